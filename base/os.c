/* os.c: asks the system for what is no part of POSIX, and is the only file that differs between
 * systems. base.h says what each function promises. First comes how Linux keeps the promises, and
 * then, from the line #else on, how macOS does: for readers who have a Mac.
 * Read next: app/quantize.c. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

/* Makes a file that has a name for a moment only. */
static int make_and_unlink(const char *dir) {
    char path[MAX_PATH];
    snprintf(path, sizeof path, "%s/flexgen-offload-XXXXXX", dir);
    const int fd = mkstemp(path);
    if (fd >= 0)
        unlink(path);
    return fd;
}

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t memory_of_machine(void) { return (size_t)sysconf(_SC_PHYS_PAGES) * page_bytes(); }

void memory_let_go(uint8_t *at, size_t bytes) {
    const size_t head = (uintptr_t)at % page_bytes();
    madvise(at - head, bytes + head, MADV_DONTNEED);
}

#ifndef __APPLE__
#include <malloc.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/vfs.h>

// -------------------------------------------------------------------------------------------------
// Linux: time
// -------------------------------------------------------------------------------------------------

void cond_open(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, double until) {
    const struct timespec due = timespec_at(until);
    return pthread_cond_timedwait(cond, lock, &due) != ETIMEDOUT;
}

void sleep_exactly(void) { prctl(PR_SET_TIMERSLACK, 1); } /* nanoseconds; usually 50000 */

// -------------------------------------------------------------------------------------------------
// Linux: files
// -------------------------------------------------------------------------------------------------

int file_sync(int fd) { return fdatasync(fd); }

int file_nameless(const char *dir) {
    const int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    return fd >= 0 ? fd : make_and_unlink(dir); /* not all file systems have nameless files */
}

int file_reserve(int fd, size_t bytes) { return posix_fallocate(fd, 0, bytes); }

int file_direct(int fd) {
    char path[64]; /* leads to the file also if it has no other name */
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

void file_write_back(int fd, size_t offset, size_t bytes, bool wait) {
    const unsigned done = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
    sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE | (wait ? done : 0));
}

void file_advise(int fd, size_t offset, size_t bytes, bool wanted) {
    posix_fadvise(fd, offset, bytes, wanted ? POSIX_FADV_WILLNEED : POSIX_FADV_DONTNEED);
}

struct timespec file_changed(const struct stat *st) {
    return st->st_mtim;
}

// -------------------------------------------------------------------------------------------------
// Linux: memory
// -------------------------------------------------------------------------------------------------

bool memory_holds(const char *dir) {
    static const uint32_t tmpfs = 0x01021994, ramfs = 0x858458f6; /* as linux/magic.h has them */
    uint64_t kind;
    return !file_system(dir, &kind) && ((uint32_t)kind == tmpfs || (uint32_t)kind == ramfs);
}

void memory_enlarge(void *at, size_t bytes) { madvise(at, bytes, MADV_HUGEPAGE); }

void memory_populate(void *at, size_t bytes) {
    enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE; older C libraries do not define it */
    madvise(at, bytes, POPULATE_WRITE);
}

/* Reads from the first line of a file that fits the format, as sscanf does. */
static void read_line(const char *path, const char *format, void *value) {
    char line[300];
    bool found = false;
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f))
        found = sscanf(line, format, value) == 1;
    if (f)
        fclose(f);
}

size_t memory_unused(void) { return memory_of_machine(); }

size_t memory_peak(void) {
    size_t kib = 0;
    read_line("/proc/self/status", "VmHWM: %zu", &kib);
    return kib * 1024;
}

void memory_restart(void) {
    FILE *f = fopen("/proc/self/clear_refs", "we");
    if (f) {
        fputs("5", f); /* proc(5): the peak begins at the present */
        fclose(f);
    }
}

void memory_share_heap(void) {
#ifdef M_ARENA_MAX /* glibc; other C libraries have one heap */
    mallopt(M_ARENA_MAX, 1);
#endif
}

// -------------------------------------------------------------------------------------------------
// Linux: the processors, the program
// -------------------------------------------------------------------------------------------------

int processors_allowed(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
}

void processor_name(char name[MOST_PROCESSOR]) {
    name[0] = 0;
    read_line("/proc/cpuinfo", "model name : %199[^\n]", name);
}

size_t processor_cache(void) {
#ifdef _SC_LEVEL3_CACHE_SIZE /* glibc */
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? bytes : 0;
#else
    return 0;
#endif
}

size_t program_path(char *path, size_t size) {
    const ssize_t n = readlink("/proc/self/exe", path, size);
    return n > 0 ? n : 0;
}

static ssize_t append(void *text, const char *bytes, size_t n) {
    text_append(text, bytes, n);
    return n;
}

FILE *text_stream(Text *text) {
    FILE *f = fopencookie(text, "w", (cookie_io_functions_t){.write = append});
    return f ? f : out_of_memory(1, BUFSIZ);
}

#else /* the rest is for macOS */
#include <mach-o/dyld.h>
#include <mach/mach.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/sysctl.h>

// -------------------------------------------------------------------------------------------------
// macOS: time
// -------------------------------------------------------------------------------------------------

void cond_open(pthread_cond_t *cond) { pthread_cond_init(cond, NULL); }

/* Waits for a time from now on: conditions know no other clock than the calendar's. */
bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, double until) {
    const struct timespec rest = timespec_at(fmax(until - seconds_now(), 0));
    return pthread_cond_timedwait_relative_np(cond, lock, &rest) != ETIMEDOUT;
}

void sleep_exactly(void) {}

// -------------------------------------------------------------------------------------------------
// macOS: files
// -------------------------------------------------------------------------------------------------

/* Empties the disk's own cache as well, which fsync does not; some file systems have only that. */
int file_sync(int fd) { return fcntl(fd, F_FULLFSYNC) == -1 ? fsync(fd) : 0; }

int file_nameless(const char *dir) { return make_and_unlink(dir); }

int file_reserve(int fd, size_t bytes) {
    fstore_t blocks = {
        .fst_flags = F_ALLOCATEALL, .fst_posmode = F_PEOFPOSMODE, .fst_length = bytes};
    return fcntl(fd, F_PREALLOCATE, &blocks) == -1 || ftruncate(fd, bytes) ? errno : 0;
}

/* All descriptors of an open file share the flag: from now on its writes leave no copy, either. */
int file_direct(int fd) {
    return fcntl(fd, F_NOCACHE, 1) == -1 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

/* Parts of a file cannot be written alone. */
void file_write_back(int fd, size_t offset, size_t bytes, bool wait) {
    (void)offset, (void)bytes;
    if (wait)
        fsync(fd);
}

/* Nothing has to be dropped after file_direct. */
void file_advise(int fd, size_t offset, size_t bytes, bool wanted) {
    struct radvisory range = {.ra_offset = offset, .ra_count = (int)size_min(bytes, INT_MAX)};
    if (wanted)
        fcntl(fd, F_RDADVISE, &range);
}

struct timespec file_changed(const struct stat *st) {
    return st->st_mtimespec;
}

// -------------------------------------------------------------------------------------------------
// macOS: memory
// -------------------------------------------------------------------------------------------------

bool memory_holds(const char *dir) {
    struct statfs fs;
    return !statfs(dir, &fs) && !strcmp(fs.f_fstypename, "tmpfs");
}

void memory_enlarge(void *at, size_t bytes) { (void)at, (void)bytes; }
void memory_populate(void *at, size_t bytes) { (void)at, (void)bytes; }

/* Returns what is free, holds parts of files, or may be thrown away. */
size_t memory_unused(void) {
    vm_statistics64_data_t pages;
    mach_msg_type_number_t size = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &size))
        return memory_of_machine();
    return ((size_t)pages.free_count + pages.external_page_count + pages.purgeable_count) *
           vm_kernel_page_size;
}

size_t memory_peak(void) {
    struct rusage use;
    return getrusage(RUSAGE_SELF, &use) ? 0 : use.ru_maxrss; /* bytes here, KiB on Linux */
}

void memory_restart(void) {}
void memory_share_heap(void) {} /* macOS has no heap for each thread */

// -------------------------------------------------------------------------------------------------
// macOS: the processors, the program
// -------------------------------------------------------------------------------------------------

int processors_allowed(void) { return sysconf(_SC_NPROCESSORS_ONLN); }

void processor_name(char name[MOST_PROCESSOR]) {
    size_t size = MOST_PROCESSOR;
    if (sysctlbyname("machdep.cpu.brand_string", name, &size, NULL, 0))
        name[0] = 0;
}

static size_t system_number(const char *name) {
    uint64_t value = 0; /* some numbers have only 4 bytes */
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) ? 0 : value;
}

size_t processor_cache(void) {
    const size_t third = system_number("hw.l3cachesize"); /* Apple's own processors have none */
    return third ? third : system_number("hw.perflevel0.l2cachesize");
}

size_t program_path(char *path, size_t size) {
    char given[PATH_MAX], real[PATH_MAX];
    uint32_t room = sizeof given;
    if (_NSGetExecutablePath(given, &room) || !realpath(given, real) || strlen(real) > size)
        return 0;
    memcpy(path, real, strlen(real));
    return strlen(real);
}

static int append(void *text, const char *bytes, int n) {
    text_append(text, bytes, n);
    return n;
}

FILE *text_stream(Text *text) {
    FILE *f = funopen(text, NULL, append, NULL, NULL);
    return f ? f : out_of_memory(1, BUFSIZ);
}
#endif

// -------------------------------------------------------------------------------------------------
// Both, with statfs of the headers above
// -------------------------------------------------------------------------------------------------

int file_system(const char *dir, uint64_t *kind) {
    struct statfs fs;
    if (statfs(dir, &fs))
        return -1;
    *kind = fs.f_type;
    return 0;
}
