/* faults.c: calls that fail, for test_faults.c: a library that is loaded before a program with LD_PRELOAD.
 *
 *     FAULT=pread:7:5    the 7th read with pread fails with errno 5; pread:7+:5: and all after it
 *     FAULT=write:3:0    the 3rd write is short: half of what was asked for
 *     FAULT_HASTE=2000   the monotonic clock runs so many times as fast; what is measured for a time is then soon measured
 *     FAULT_COUNTS=FILE  at its end the program writes how many calls of each class there were, a class each line
 *     FAULT_LOG=FILE     each call that changes a file or a directory is appended, for scripts/crash_states.py
 *
 * Memory and threads are asked for through functions of the same names here, by the C library too: the buffers of its
 * streams, what fopen, opendir, qsort and realpath allocate. The other classes are system calls: a filter (seccomp) turns
 * each into a signal, whose handler counts it and either makes the call itself, from the one place that the filter lets
 * pass, or answers for the kernel. So calls from inside of the C library, such as those of fwrite, count too. Standard
 * error is left alone, since faults are told there. Without a filter, which some systems forbid and only x86-64 has here,
 * memory and threads remain. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { OPEN, READ, PREAD, WRITE, PWRITE, SYNC, ALLOCATE, MMAP, STAT, UNLINK, LOCK, MALLOC, INNER, THREAD, KEY, NCLASSES };
static const char *const class_name[NCLASSES] = {"open", "read",     "pread", "write",  "pwrite",
                                                 "sync", "allocate", "mmap",  "stat",   "unlink",
                                                 "lock", "malloc",   "inner", "thread", "key"};

static long count[NCLASSES], wanted; /* calls so far; the one that fails */
static int wanted_class = -1, wanted_errno;
static bool and_after, active;

/* Whether the next call of this class is to fail. */
static bool strikes(int class) {
    if (!active) return false;
    const long n = __atomic_add_fetch(&count[class], 1, __ATOMIC_RELAXED);
    return class == wanted_class && (n == wanted || (and_after && n > wanted));
}

// ---- Memory and threads ---------------------------------------------------------------------------------------------

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
static int (*real_create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
static int (*real_key)(pthread_key_t *, void (*)(void *));

static uintptr_t code_begin, code_end; /* of the program */

static int find_program(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        code_begin = info->dlpi_addr + part->p_vaddr, code_end = code_begin + part->p_memsz;
    }
    return 1; /* the first is the program */
}

/* Whether an allocation that is asked for from there is to fail. Libraries' own are a class beside. */
static bool denied(void *from) {
    const bool inner = (uintptr_t)from < code_begin || (uintptr_t)from >= code_end, inner_strikes = inner && strikes(INNER);
    return strikes(MALLOC) || inner_strikes;
}
#define DENIED denied(__builtin_return_address(0))

void *malloc(size_t n) { return DENIED ? errno = ENOMEM, NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return DENIED ? errno = ENOMEM, NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return DENIED ? errno = ENOMEM, NULL : __libc_realloc(p, n); }
int posix_memalign(void **to, size_t align, size_t n) {
    void *p = DENIED ? NULL : __libc_memalign(align, n);
    if (p) *to = p;
    return p ? 0 : ENOMEM;
}
int pthread_key_create(pthread_key_t *key, void (*end)(void *)) { return strikes(KEY) ? EAGAIN : real_key(key, end); }
int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*f)(void *), void *arg) {
    memset(thread, 0x5a, sizeof *thread); /* a failed call leaves anything there */
    return strikes(THREAD) ? EAGAIN : real_create(thread, attr, f, arg);
}

// ---- The clock ------------------------------------------------------------------------------------------------------

static long haste = 1;
static struct timespec begun;

int clock_gettime(clockid_t clock, struct timespec *t) {
    const long second = 1000000000;
    const int status = (int)syscall(SYS_clock_gettime, clock, t);
    if (clock != CLOCK_MONOTONIC || haste == 1) return status;
    const long ns = ((t->tv_sec - begun.tv_sec) * second + t->tv_nsec - begun.tv_nsec) * haste;
    *t = (struct timespec){begun.tv_sec + ns / second, ns % second};
    return status;
}

// ---- System calls ---------------------------------------------------------------------------------------------------

#ifdef __x86_64__
static const struct {
    int number, class;
} calls[] = {{SYS_openat, OPEN},     {SYS_read, READ},       {SYS_pread64, PREAD},   {SYS_write, WRITE},
             {SYS_pwrite64, PWRITE}, {SYS_fsync, SYNC},      {SYS_fdatasync, SYNC},  {SYS_ftruncate, ALLOCATE},
             {SYS_mmap, MMAP},       {SYS_readv, READ},      {SYS_writev, WRITE},    {SYS_fallocate, ALLOCATE},
             {SYS_rename, SYNC},     {SYS_getdents64, READ}, {SYS_getrandom, STAT},  {SYS_stat, STAT},
             {SYS_fstat, STAT},      {SYS_lstat, STAT},      {SYS_newfstatat, STAT}, {SYS_statx, STAT},
             {SYS_statfs, STAT},     {SYS_access, STAT},     {SYS_faccessat, STAT},  {SYS_readlink, STAT},
             {SYS_unlink, UNLINK},   {SYS_unlinkat, UNLINK}, {SYS_rmdir, UNLINK},    {SYS_mkdir, UNLINK},
             {SYS_flock, LOCK}};
enum { NCALLS = sizeof calls / sizeof *calls };

long raw_call(long number, long a, long b, long c, long d, long e, long f);
extern char raw_call_end[]; /* where the filter sees that call */
__asm__(
    "raw_call:\n mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
    " mov 8(%rsp), %r9\n syscall\nraw_call_end:\n ret\n");

static int log_file = -1;

/* Appends "NAME RESULT FD OFFSET BYTES", a line of its own, and behind it the bytes: what was written, or the paths, each
 * with its 0. OFFSET is also the flags of an open, or the new length. */
static void log_call(long number, const greg_t *r, long result) {
    const long rdi = r[REG_RDI], rsi = r[REG_RSI], rdx = r[REG_RDX], r10 = r[REG_R10];
    const struct {
        long number, fd, offset;
        const char *name, *bytes, *more; /* more: a second path */
        bool data;
    } known[] = {{SYS_openat, rdi, rdx, "open", (char *)rsi, NULL, false},
                 {SYS_write, rdi, -1, "write", (char *)rsi, NULL, true},
                 {SYS_pwrite64, rdi, r10, "write", (char *)rsi, NULL, true},
                 {SYS_fsync, rdi, 0, "sync", "", NULL, false},
                 {SYS_fdatasync, rdi, 0, "sync", "", NULL, false},
                 {SYS_ftruncate, rdi, rsi, "truncate", "", NULL, false},
                 {SYS_rename, 0, 0, "rename", (char *)rdi, (char *)rsi, false},
                 {SYS_unlink, 0, 0, "unlink", (char *)rdi, NULL, false},
                 {SYS_unlinkat, rdi, 0, "unlink", (char *)rsi, NULL, false},
                 {SYS_rmdir, 0, 0, "unlink", (char *)rdi, NULL, false},
                 {SYS_mkdir, 0, 0, "mkdir", (char *)rdi, NULL, false}};
    for (size_t i = 0; i < sizeof known / sizeof *known && result >= 0; i++) {
        if (known[i].number != number) continue;
        char line[100];
        const char *more = known[i].more ? known[i].more : "";
        const size_t size = known[i].data ? (size_t)result : strlen(known[i].bytes) + 1,
                     rest = known[i].more ? strlen(more) + 1 : 0;
        const int n = snprintf(line, sizeof line, "%s %ld %ld %ld %zu\n", known[i].name, result, known[i].fd,
                               known[i].offset, size + rest);
        const struct iovec parts[] = {{line, (size_t)n}, {(void *)known[i].bytes, size}, {(void *)more, rest}};
        raw_call(SYS_writev, log_file, (long)parts, 3, 0, 0, 0);
    }
}

static void on_call(int signal, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int saved = errno, number = info->si_syscall;
    int class = 0;
    (void)signal;
    for (int i = 0; i < NCALLS; i++)
        if (calls[i].number == number) class = calls[i].class;
    const bool told = (class == WRITE && r[REG_RDI] == STDERR_FILENO), strike = !told && strikes(class);
    if (strike && wanted_errno)
        r[REG_RAX] = -wanted_errno;
    else {
        const bool sized = number == SYS_read || number == SYS_write || number == SYS_pread64 || number == SYS_pwrite64;
        const long size = strike && sized ? (r[REG_RDX] + 1) / 2 : r[REG_RDX];
        r[REG_RAX] = raw_call(number, r[REG_RDI], r[REG_RSI], size, r[REG_R10], r[REG_R8], r[REG_R9]);
        if (log_file >= 0) log_call(number, r, r[REG_RAX]);
    }
    errno = saved;
}

/* The calls are appended to the file `log`, if that is not NULL. */
static void install(const char *log) {
    struct sock_filter code[NCALLS + 8];
    const uint64_t pass = (uint64_t)(uintptr_t)raw_call_end;
    int n = 0;
    if (log) log_file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
#define LOAD(at) code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at)
#define EQUAL(k, yes, no) code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, k, yes, no)
#define RETURN(what) code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, what)
    LOAD(offsetof(struct seccomp_data, instruction_pointer));
    EQUAL((uint32_t)pass, 0, 2);
    LOAD(offsetof(struct seccomp_data, instruction_pointer) + 4);
    EQUAL((uint32_t)(pass >> 32), NCALLS + 1, 0);
    LOAD(offsetof(struct seccomp_data, nr));
    for (int i = 0; i < NCALLS; i++) EQUAL((uint32_t)calls[i].number, NCALLS - i, 0);
    RETURN(SECCOMP_RET_ALLOW);
    RETURN(SECCOMP_RET_TRAP);
    struct sock_fprog program = {(unsigned short)n, code};
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGSYS, &action, NULL);
    if (!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}
#else
static void install(const char *log) { (void)log; }
#endif

// ---- Beginning and end ----------------------------------------------------------------------------------------------

__attribute__((constructor)) static void begin(void) {
    char name[20];
    const char *fault = getenv("FAULT"), *hastens = getenv("FAULT_HASTE"), *log = getenv("FAULT_LOG");
    *(void **)&real_create = dlsym(RTLD_NEXT, "pthread_create");
    *(void **)&real_key = dlsym(RTLD_NEXT, "pthread_key_create");
    if (fault && sscanf(fault, "%19[^:]:%ld", name, &wanted) == 2) {
        for (int c = 0; c < NCLASSES; c++)
            if (!strcmp(name, class_name[c])) wanted_class = c;
        and_after = strchr(fault, '+') != NULL;
        wanted_errno = atoi(strrchr(fault, ':') + 1);
    }
    clock_gettime(CLOCK_MONOTONIC, &begun);
    if (hastens) haste = atol(hastens);
    dl_iterate_phdr(find_program, NULL);
    install(log);
    active = true;
}

__attribute__((destructor)) static void end(void) {
    const char *path = getenv("FAULT_COUNTS");
    active = false;
    FILE *f = path ? fopen(path, "w") : NULL;
    for (int c = 0; f && c < NCLASSES; c++) fprintf(f, "\n%s %ld", class_name[c], count[c]);
    if (f) fclose(f);
}
