/* explore.c: what docs/explore.html runs is this whole program, compiled to WebAssembly (make
 * explore): the page asks it with a command line, as a person would, and reads what it prints.
 * There is no second cost model, and nothing here but what the C library of browsers lacks. Such a
 * program has one thread and no disk. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    (void)pid, (void)size, (void)set;
    errno = ENOSYS; /* then the program asks sysconf */
    return -1;
}

int __sched_cpucount(size_t size, const cpu_set_t *set) {
    (void)size, (void)set;
    return 1;
}

int sync_file_range(int file, off64_t at, off64_t bytes, unsigned flags) {
    (void)file, (void)at, (void)bytes, (void)flags;
    return 0; /* it is advice */
}
