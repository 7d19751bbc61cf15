/* os.c: asks the system what this process may have of memory and processors, for what is no part of
 * POSIX, and for the signals that end a run in order.
 *
 * It is the only file that differs between systems. base.h says what each function promises. First
 * comes what the process may have, then how Linux keeps the other promises, and then, from the line
 * #else on, how macOS does: for readers who have a Mac.
 *
 * The machine, each control group that the process is in, and the limits of the process itself
 * (ulimit) each leave so much; the least counts. A control group is a directory with its limits and
 * its use in files. Groups are nested, and each group above ours limits us as well.
 * /proc/self/cgroup has the path of our group, /proc/self/mountinfo where the tree of groups is
 * mounted and which group is at its top: in a container often not the first one. Version 1 has a
 * tree for each kind of resource, version 2 one tree; a machine may have both ("hybrid"). The
 * versions have files of different names, so that every group can be asked for both. What is
 * missing or is no number sets no limit: that is all on a system that has no such files.
 * Read next: app/quantize.c. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/base.h"

// -------------------------------------------------------------------------------------------------
// Files of numbers
// -------------------------------------------------------------------------------------------------

static FILE *open_at(const char *dir, const char *name) {
    char path[4 * MAX_PATH];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return fopen(path, "re");
}

/* Returns the number behind `key` at the beginning of a line of the file dir/name; SIZE_MAX if
 * there is none, or a larger one. */
static size_t file_number(const char *dir, const char *name, const char *key) {
    char line[256], digits[32];
    size_t value = SIZE_MAX;
    FILE *f = open_at(dir, name);
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key)) &&
            sscanf(line + strlen(key), " %31[0-9]", digits) == 1)
            value = strtoull(digits, NULL, 10);
    if (f)
        fclose(f);
    return value;
}

/* Returns the bytes of such a number of KiB; 0 if there is none. */
static size_t file_kib(const char *dir, const char *name, const char *key) {
    size_t kib = file_number(dir, name, key);
    return kib > SIZE_MAX / 1024 ? 0 : kib * 1024;
}

// -------------------------------------------------------------------------------------------------
// Control groups
// -------------------------------------------------------------------------------------------------

/* Returns the part of a group's limit of memory that is not in use. Version 2 lets the use grow no
 * further than max, and slows the process down beyond high. Cached files do not count as use,
 * because they give way. If a group does not tell its use, the whole limit is left. */
static size_t group_memory(const char *dir) {
    static const char *const cached[] = {"total_inactive_file ",
                                         "total_active_file "}; /* version 2 has no "total_" */
    size_t limit =
        size_min(file_number(dir, "memory.max", ""), file_number(dir, "memory.high", ""));
    size_t used = size_min(file_number(dir, "memory.current", ""),
                           file_number(dir, "memory.usage_in_bytes", ""));
    limit = size_min(limit, file_number(dir, "memory.limit_in_bytes", ""));
    if (limit == SIZE_MAX || used == SIZE_MAX)
        return limit;
    for (int c = 0; c < 2; c++) {
        size_t bytes = file_number(dir, "memory.stat", cached[c]);
        if (bytes == SIZE_MAX)
            bytes = file_number(dir, "memory.stat", cached[c] + strlen("total_"));
        if (bytes <= used)
            used -= bytes;
    }
    return size_less(limit, used);
}

/* Returns how many processors a group's quota keeps busy all the time, at least one. With one more,
 * all threads would be stopped at the end of every period. The file cpu.max has one line "QUOTA
 * PERIOD". */
static size_t group_processors(const char *dir) {
    size_t quota =
        size_min(file_number(dir, "cpu.max", ""), file_number(dir, "cpu.cfs_quota_us", ""));
    char key[32];
    snprintf(key, sizeof key, "%zu ", quota);
    size_t period =
        size_min(file_number(dir, "cpu.max", key), file_number(dir, "cpu.cfs_period_us", ""));
    if (quota == SIZE_MAX || period == SIZE_MAX || period == 0)
        return SIZE_MAX;
    return quota < period ? 1 : quota / period;
}

/* Lowers *a to what our group and those above it leave. Their tree is mounted at `mount` with the
 * group `top` at its top; if our group is not below that one, only the top is asked. */
static void ask_tree(Allowance *a, const char *root, const char *mount, const char *top,
                     const char *group) {
    size_t n = strcmp(top, "/") ? strlen(top) : 0;
    bool below = !strncmp(group, top, n) && (group[n] == '/' || !group[n]) && !strstr(group, "/..");
    char dir[3 * MAX_PATH];
    snprintf(dir, sizeof dir, "%s%s%s", root, mount, below ? group + n : "");
    for (;;) {
        a->memory = size_min(a->memory, group_memory(dir));
        a->processors = (int)size_min((size_t)a->processors, group_processors(dir));
        if (strlen(dir) <= strlen(root) + strlen(mount))
            return;
        *strrchr(dir, '/') = 0;
    }
}

/* Finds our group in the tree of version 2 (options: NULL), or in that tree of version 1 whose
 * mount has these options. A line of /proc/self/cgroup is "0::/a/b" or "4:cpu,cpuacct:/a/b"; the
 * options name the same controllers. */
static bool find_group(char group[MAX_PATH], const char *root, const char *options) {
    char line[2 * MAX_PATH], controllers[256];
    bool found = false;
    FILE *f = open_at(root, "proc/self/cgroup");
    while (f && !found && fgets(line, sizeof line, f))
        if (options)
            found = sscanf(line, "%*d:%255[^:]:%4095[^\n]", controllers, group) == 2 &&
                    strstr(options, controllers);
        else
            found = sscanf(line, "%*d::%4095[^\n]", group) == 1;
    if (f)
        fclose(f);
    return found;
}

/* Lowers *a to what our groups in all trees leave. A line of mounts is "35 31 0:32 TOP MOUNT x -
 * TYPE source OPTIONS". */
static void ask_groups(Allowance *a, const char *root) {
    char line[4 * MAX_PATH], group[MAX_PATH], top[MAX_PATH], mount[MAX_PATH], type[32],
        options[MAX_PATH];
    FILE *f = open_at(root, "proc/self/mountinfo");
    while (f && fgets(line, sizeof line, f)) {
        const char *rest = strstr(line, " - ");
        if (rest && sscanf(line, "%*s %*s %*s %4095s %4095s", top, mount) == 2 &&
            sscanf(rest, " - %31s %*s %4095s", type, options) == 2 && !strncmp(type, "cgroup", 6) &&
            find_group(group, root, strcmp(type, "cgroup2") ? options : NULL))
            ask_tree(a, root, mount, top, group);
    }
    if (f)
        fclose(f);
}

// -------------------------------------------------------------------------------------------------
// This process
// -------------------------------------------------------------------------------------------------

/* Returns what a limit of the process (ulimit) leaves beside its use, when as many threads as are
 * to come have their stacks: a stack counts as a whole, touched or not. */
static size_t limit_left(int resource, const char *used, int threads) {
    struct rlimit limit;
    pthread_attr_t attributes;
    size_t stack = 0;
    if (getrlimit(resource, &limit) || limit.rlim_cur == RLIM_INFINITY)
        return SIZE_MAX;
    pthread_attr_init(&attributes);
    pthread_attr_getstacksize(&attributes, &stack);
    pthread_attr_destroy(&attributes);
    return size_less(limit.rlim_cur, file_kib("/proc/self", "status", used) + threads * stack);
}

Allowance process_allowance(const char *root, int threads) {
    Allowance a = {.memory = file_kib(root, "proc/meminfo", "MemAvailable:"),
                   .address = limit_left(RLIMIT_AS, "VmSize:", threads),
                   .processors = INT_MAX};
    if (a.memory == 0)
        a.memory = memory_unused();
    a.memory = size_min(size_min(a.memory, a.address), limit_left(RLIMIT_DATA, "VmData:", threads));
    ask_groups(&a, root);
    return a;
}

// -------------------------------------------------------------------------------------------------
// SIGINT, SIGTERM and SIGHUP
// -------------------------------------------------------------------------------------------------

static int caught; /* the number of the first signal; 0: none */

/* Notes the first signal; a second one ends the program at once. */
static void note(int signal) {
    if (__atomic_exchange_n(&caught, signal, __ATOMIC_RELAXED))
        _exit(EXIT_SIGNAL + signal);
}

void stop_catch(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction to = {.sa_handler = note}, before;
    sigemptyset(&to.sa_mask);
    for (int s = 0; s < 3; s++) /* what was ignored, as in a shell's background, stays so */
        if (sigaction(signals[s], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(signals[s], &to, NULL);
}

const int *stop_signal(void) { return &caught; }

int stop_fail(Error *err, const char *what) {
    int signal = __atomic_load_n(&caught, __ATOMIC_RELAXED);
    return fail(err, EXIT_SIGNAL + signal, "stopped by %s%s",
                signal == SIGINT   ? "SIGINT"
                : signal == SIGHUP ? "SIGHUP"
                                   : "SIGTERM",
                what);
}

// -------------------------------------------------------------------------------------------------
// What the systems have in common
// -------------------------------------------------------------------------------------------------

/* Makes a file that has a name for a moment only. */
static int make_and_unlink(const char *dir) {
    char path[MAX_PATH];
    snprintf(path, sizeof path, "%s/flexgen-offload-XXXXXX", dir);
    int fd = mkstemp(path);
    if (fd >= 0)
        unlink(path);
    return fd;
}

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static size_t memory_of_machine(void) { return (size_t)sysconf(_SC_PHYS_PAGES) * page_bytes(); }

void memory_let_go(uint8_t *at, size_t bytes) {
    size_t head = (uintptr_t)at % page_bytes();
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
    struct timespec due = timespec_at(until);
    return pthread_cond_timedwait(cond, lock, &due) != ETIMEDOUT;
}

void sleep_exactly(void) { prctl(PR_SET_TIMERSLACK, 1); } /* nanoseconds; usually 50000 */

// -------------------------------------------------------------------------------------------------
// Linux: files
// -------------------------------------------------------------------------------------------------

int file_sync(int fd) { return fdatasync(fd); }

int file_nameless(const char *dir) {
    int fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    return fd >= 0 ? fd : make_and_unlink(dir); /* not all file systems have nameless files */
}

int file_reserve(int fd, size_t bytes) { return posix_fallocate(fd, 0, bytes); }

int file_direct(int fd) {
    char path[64]; /* leads to the file also if it has no other name */
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

void file_write_back(int fd, size_t offset, size_t bytes, bool wait) {
    unsigned done = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER;
    sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE | (wait ? done : 0));
}

void file_advise(int fd, size_t offset, size_t bytes, bool wanted) {
    posix_fadvise(fd, offset, bytes, wanted ? POSIX_FADV_WILLNEED : POSIX_FADV_DONTNEED);
}

struct timespec file_changed(const struct stat *st) {
    return st->st_mtim;
}

uint64_t file_touched(const struct stat *st) {
    return st->st_ctim.tv_sec * 1000000000ull + st->st_ctim.tv_nsec;
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

size_t memory_unused(void) { return memory_of_machine(); }

size_t memory_peak(void) { return file_kib("/proc/self", "status", "VmHWM:"); }

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
    char line[300];
    FILE *f = open_at("/proc", "cpuinfo");
    name[0] = 0;
    while (f && !name[0] && fgets(line, sizeof line, f))
        sscanf(line, "model name : %199[^\n]", name);
    if (f)
        fclose(f);
}

size_t processor_cache(void) {
#ifdef _SC_LEVEL3_CACHE_SIZE /* glibc */
    long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? bytes : 0;
#else
    return 0;
#endif
}

size_t program_path(char *path, size_t size) {
    ssize_t n = readlink("/proc/self/exe", path, size);
    return n > 0 ? n : 0;
}

static ssize_t append(void *text, const char *bytes, size_t n) {
    if (!memory_ran_out)
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
#include <sys/sysctl.h>

// -------------------------------------------------------------------------------------------------
// macOS: time
// -------------------------------------------------------------------------------------------------

void cond_open(pthread_cond_t *cond) { pthread_cond_init(cond, NULL); }

/* Waits for a time from now on: conditions know no other clock than the calendar's. */
bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, double until) {
    struct timespec rest = timespec_at(fmax(until - seconds_now(), 0));
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

uint64_t file_touched(const struct stat *st) {
    return st->st_ctimespec.tv_sec * 1000000000ull + st->st_ctimespec.tv_nsec;
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
    size_t third = system_number("hw.l3cachesize"); /* Apple's own processors have none */
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
    if (!memory_ran_out)
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
