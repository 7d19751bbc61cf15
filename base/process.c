/* process.c: finds out how much memory, address space and how many processors this process may
 * have, and notes the signals that end a run in order.
 *
 * The machine, each control group that the process is in, and the limits of the process itself
 * (ulimit) each leave so much; the least counts. A control group is a directory with its limits and
 * its use in files. Groups are nested, and each group above ours limits us as well.
 * /proc/self/cgroup has the path of our group, /proc/self/mountinfo where the tree of groups is
 * mounted and which group is at its top: in a container often not the first one. Version 1 has a
 * tree for each kind of resource, version 2 one tree; a machine may have both ("hybrid"). The
 * versions have files of different names, so that every group can be asked for both. What is
 * missing or is no number sets no limit: that is all on a system that has no such files.
 * Read next: os.c. */
#include <limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/base.h"

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
    const size_t kib = file_number(dir, name, key);
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
    const size_t quota =
        size_min(file_number(dir, "cpu.max", ""), file_number(dir, "cpu.cfs_quota_us", ""));
    char key[32];
    snprintf(key, sizeof key, "%zu ", quota);
    const size_t period =
        size_min(file_number(dir, "cpu.max", key), file_number(dir, "cpu.cfs_period_us", ""));
    if (quota == SIZE_MAX || period == SIZE_MAX || period == 0)
        return SIZE_MAX;
    return quota < period ? 1 : quota / period;
}

/* Lowers *a to what our group and those above it leave. Their tree is mounted at `mount` with the
 * group `top` at its top; if our group is not below that one, only the top is asked. */
static void ask_tree(Allowance *a, const char *root, const char *mount, const char *top,
                     const char *group) {
    const size_t n = strcmp(top, "/") ? strlen(top) : 0;
    const bool below =
        !strncmp(group, top, n) && (group[n] == '/' || !group[n]) && !strstr(group, "/..");
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
    const int signal = __atomic_load_n(&caught, __ATOMIC_RELAXED);
    return fail(err, EXIT_SIGNAL + signal, "stopped by %s%s",
                signal == SIGINT   ? "SIGINT"
                : signal == SIGHUP ? "SIGHUP"
                                   : "SIGTERM",
                what);
}
