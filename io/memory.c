/* memory.c: how much memory this process may have: what the machine has left, what each control group that it is in has
 * left, and what its own limits allow; the least counts. And how many processors its groups' quotas of CPU come to.
 *
 * A control group is a directory with the group's limits and use in files. Groups are nested, and each group above ours
 * limits us as well. /proc/self/cgroup has our group's path, /proc/self/mountinfo where the tree of groups is mounted and
 * which group is at its top: in a container often not the first one. Version 1 has a tree for each kind of resource,
 * version 2 one tree; a machine may have both ("hybrid"). Whatever is missing or is no number sets no limit.
 * Read next: json.c. */
#include <ctype.h>
#include <limits.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "io/text.h"
#include "util.h"

/* The number behind key in the file dir/name of lines; SIZE_MAX: there is none, or it is larger. */
static size_t file_number(const char *dir, const char *name, const char *key) {
    char path[2 * MAX_PATH], line[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    size_t value = SIZE_MAX;
    FILE *f = fopen(path, "re");
    while (f && value == SIZE_MAX && fgets(line, sizeof line, f)) {
        if (strncmp(line, key, strlen(key)) != 0) continue;
        const char *digits = line + strlen(key) + strspn(line + strlen(key), " \t");
        if (isdigit((unsigned char)*digits)) value = strtoull(digits, NULL, 10);
    }
    if (f) fclose(f);
    return value;
}

// ---------------------------------------------------------------------------------------------------------------
// Control groups
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *type, *controller;   /* of the mount; of its options and of our line in /proc/self/cgroup. "": any */
    size_t (*left)(const char *dir); /* what one group allows; SIZE_MAX: it sets no limit */
} Version;

/* Of a limit the part that is not in use; the files cached in memory give way. If the use is not told, the whole limit. */
static size_t memory_left(const char *dir, size_t limit, const char *use, const char *const cached[2]) {
    size_t used = file_number(dir, use, "");
    if (limit == SIZE_MAX || used == SIZE_MAX) return limit;
    for (int c = 0; c < 2; c++) {
        size_t bytes = file_number(dir, "memory.stat", cached[c]);
        if (bytes <= used) used -= bytes;
    }
    return size_less(limit, used);
}

static size_t memory_left_1(const char *dir) {
    static const char *const cached[] = {"total_inactive_file ", "total_active_file "};
    return memory_left(dir, file_number(dir, "memory.limit_in_bytes", ""), "memory.usage_in_bytes", cached);
}

/* Use cannot grow beyond max, and is made slow beyond high. */
static size_t memory_left_2(const char *dir) {
    static const char *const cached[] = {"inactive_file ", "active_file "};
    const size_t limit = size_min(file_number(dir, "memory.max", ""), file_number(dir, "memory.high", ""));
    return memory_left(dir, limit, "memory.current", cached);
}

/* Processors that a quota keeps busy all the time, at least one. With one more the team would be stopped at the end of
 * every period, all of it as soon as one has no time left. */
static size_t quota_processors(size_t quota, size_t period) {
    if (quota == SIZE_MAX || period == SIZE_MAX || !period) return SIZE_MAX;
    return quota < period ? 1 : quota / period;
}

static size_t processors_1(const char *dir) {
    return quota_processors(file_number(dir, "cpu.cfs_quota_us", ""), file_number(dir, "cpu.cfs_period_us", ""));
}

/* A line "QUOTA PERIOD". */
static size_t processors_2(const char *dir) {
    const size_t quota = file_number(dir, "cpu.max", "");
    char key[32];
    snprintf(key, sizeof key, "%zu ", quota);
    return quota_processors(quota, file_number(dir, "cpu.max", key));
}

static const Version memory_versions[] = {{"cgroup", "memory", memory_left_1}, {"cgroup2", "", memory_left_2}};
static const Version cpu_versions[] = {{"cgroup", "cpu", processors_1}, {"cgroup2", "", processors_2}};

/* Whether word is in a list with commas. */
static bool listed(const char *list, const char *word) {
    const size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at++)
        if ((at == list || at[-1] == ',') && (!at[n] || at[n] == ',')) return true;
    return false;
}

/* Our group in a version's tree. A line is "4:memory:/a/b", of version 2 "0::/a/b". */
static bool find_group(char group[MAX_PATH], const char *root, const Version *v) {
    char path[MAX_PATH], line[2 * MAX_PATH];
    bool found = false;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *at = controllers ? strchr(++controllers, ':') : NULL;
        if (!at) continue;
        *at++ = 0, at[strcspn(at, "\n")] = 0;
        found = v->controller[0] ? listed(controllers, v->controller) : !controllers[0];
        snprintf(group, MAX_PATH, "%s", at);
    }
    if (f) fclose(f);
    return found;
}

/* The least that our group and those above it allow, in a tree that is mounted at `mount` with the group `top` at its
 * top. If ours is not below that one, only the top is looked at. */
static size_t tree_allows(const Version *v, const char *root, const char *mount, const char *top, const char *group) {
    const size_t n = strcmp(top, "/") ? strlen(top) : 0;
    const bool below = !strncmp(group, top, n) && (group[n] == '/' || !group[n]) && !strstr(group, "/..");
    char dir[3 * MAX_PATH];
    snprintf(dir, sizeof dir, "%s%s%s", root, mount, below ? group + n : "");
    for (size_t allowed = SIZE_MAX;; *strrchr(dir, '/') = 0) {
        allowed = size_min(allowed, v->left(dir));
        if (strlen(dir) <= strlen(root) + strlen(mount)) return allowed;
    }
}

/* All mounts of a version. A line is "35 31 0:32 TOP MOUNT options - TYPE source options". */
static size_t version_allows(const Version *v, const char *root) {
    char path[MAX_PATH], group[MAX_PATH], top[MAX_PATH], mount[MAX_PATH], type[32], options[MAX_PATH], *line = NULL;
    size_t allowed = SIZE_MAX, room = 0;
    snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
    FILE *f = find_group(group, root, v) ? fopen(path, "re") : NULL;
    while (f && getline(&line, &room, f) > 0) {
        const char *rest = strstr(line, " - ");
        if (rest && sscanf(line, "%*s %*s %*s %4095s %4095s", top, mount) == 2 &&
            sscanf(rest, " - %31s %*s %4095s", type, options) == 2 && !strcmp(type, v->type) &&
            (!v->controller[0] || listed(options, v->controller)))
            allowed = size_min(allowed, tree_allows(v, root, mount, top, group));
    }
    if (f) fclose(f);
    free(line);
    return allowed;
}

static size_t groups_allow(const Version versions[2], const char *root) {
    return size_min(version_allows(&versions[0], root), version_allows(&versions[1], root));
}

// ---------------------------------------------------------------------------------------------------------------
// This process
// ---------------------------------------------------------------------------------------------------------------

/* Bytes that /proc/self/status has under a key; 0: none. */
static size_t status_bytes(const char *key) {
    const size_t kib = file_number("/proc/self", "status", key);
    return kib > SIZE_MAX / 1024 ? 0 : kib * 1024;
}

/* What a limit of the process (ulimit) leaves beside its use, when as many threads as are to come have their stacks: a
 * stack counts as a whole, touched or not. */
static size_t limit_available(int resource, const char *used, int threads) {
    struct rlimit limit;
    pthread_attr_t attributes;
    size_t stack = 0;
    if (getrlimit(resource, &limit) || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
    if (!pthread_attr_init(&attributes)) {
        pthread_attr_getstacksize(&attributes, &stack);
        pthread_attr_destroy(&attributes);
    }
    return size_less(limit.rlim_cur, status_bytes(used) + threads * stack);
}

size_t address_available(int threads) { return limit_available(RLIMIT_AS, "VmSize:", threads); }

size_t memory_available(const char *root, int threads) {
    char proc[MAX_PATH];
    snprintf(proc, sizeof proc, "%s/proc", root);
    const size_t kib = file_number(proc, "meminfo", "MemAvailable:");
    size_t available = kib > SIZE_MAX / 1024 ? (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) : kib * 1024;
    available = size_min(available, groups_allow(memory_versions, root));
    return size_min(available, size_min(address_available(threads), limit_available(RLIMIT_DATA, "VmData:", threads)));
}

int processors_allowed(const char *root) { return (int)size_min(groups_allow(cpu_versions, root), INT_MAX); }

bool memory_holds(const char *dir) {
    static const unsigned tmpfs = 0x01021994, ramfs = 0x858458f6; /* as linux/magic.h has them */
    struct statfs fs;
    return !statfs(dir, &fs) && ((unsigned)fs.f_type == tmpfs || (unsigned)fs.f_type == ramfs);
}

size_t memory_peak(void) { return status_bytes("VmHWM:"); }

void memory_restart(void) {
    FILE *f = fopen("/proc/self/clear_refs", "we");
    if (!f) return;
    fputs("5", f); /* proc(5): the peak begins at the present */
    fclose(f);
}
