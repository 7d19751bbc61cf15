/* memory.c: how much memory this process may have: what the machine has left, what each control group that it is in has
 * left, and what its own limits allow; the least counts.
 *
 * A control group is a directory with the group's limit and use in files. Groups are nested, and each group above ours
 * limits us as well. /proc/self/cgroup has our group's path, /proc/self/mountinfo where the tree of groups is mounted and
 * which group is at its top: in a container often not the first one. Version 1 has a tree for each kind of resource,
 * version 2 one tree; a machine may have both ("hybrid"). Whatever is missing or is no number sets no limit.
 * Read next: json.c. */
#include <ctype.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io/text.h"

static size_t least(size_t a, size_t b) { return a < b ? a : b; }
static size_t less(size_t a, size_t b) { return a > b ? a - b : 0; }

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
    const char *type, *controller; /* of the mount; of its options and of our line in /proc/self/cgroup. "": any */
    const char *limit, *slow;      /* files: use cannot grow beyond limit, and is made slow beyond slow */
    const char *used, *cached[2];  /* use, and the parts of it in memory.stat that are cached files, which give way */
} Version;

static const Version versions[] = {
    {"cgroup",
     "memory",
     "memory.limit_in_bytes",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file ", "total_active_file "}},
    {"cgroup2", "", "memory.max", "memory.high", "memory.current", {"inactive_file ", "active_file "}},
};

/* What one group has left. If it does not say what it uses, its whole limit. */
static size_t group_available(const Version *v, const char *dir) {
    size_t limit = least(file_number(dir, v->limit, ""), file_number(dir, v->slow, ""));
    size_t used = file_number(dir, v->used, "");
    if (limit == SIZE_MAX || used == SIZE_MAX) return limit;
    for (int c = 0; c < 2; c++) {
        size_t cached = file_number(dir, "memory.stat", v->cached[c]);
        if (cached <= used) used -= cached;
    }
    return less(limit, used);
}

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

/* The least that our group and those above it have left, in a tree that is mounted at `mount` with the group `top` at its
 * top. If ours is not below that one, only the top is looked at. */
static size_t tree_available(const Version *v, const char *root, const char *mount, const char *top, const char *group) {
    const size_t n = strcmp(top, "/") ? strlen(top) : 0;
    const bool below = !strncmp(group, top, n) && (group[n] == '/' || !group[n]) && !strstr(group, "/..");
    char dir[3 * MAX_PATH];
    snprintf(dir, sizeof dir, "%s%s%s", root, mount, below ? group + n : "");
    for (size_t available = SIZE_MAX;; *strrchr(dir, '/') = 0) {
        available = least(available, group_available(v, dir));
        if (strlen(dir) <= strlen(root) + strlen(mount)) return available;
    }
}

/* All mounts of a version. A line is "35 31 0:32 TOP MOUNT options - TYPE source options". */
static size_t groups_available(const Version *v, const char *root) {
    char path[MAX_PATH], group[MAX_PATH], top[MAX_PATH], mount[MAX_PATH], type[32], options[MAX_PATH], *line = NULL;
    size_t available = SIZE_MAX, room = 0;
    snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
    FILE *f = find_group(group, root, v) ? fopen(path, "re") : NULL;
    while (f && getline(&line, &room, f) > 0) {
        const char *rest = strstr(line, " - ");
        if (rest && sscanf(line, "%*s %*s %*s %4095s %4095s", top, mount) == 2 &&
            sscanf(rest, " - %31s %*s %4095s", type, options) == 2 && !strcmp(type, v->type) &&
            (!v->controller[0] || listed(options, v->controller)))
            available = least(available, tree_available(v, root, mount, top, group));
    }
    if (f) fclose(f);
    free(line);
    return available;
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
    return less(limit.rlim_cur, status_bytes(used) + threads * stack);
}

size_t address_available(int threads) { return limit_available(RLIMIT_AS, "VmSize:", threads); }

size_t memory_available_under(const char *root, int threads) {
    char proc[MAX_PATH];
    snprintf(proc, sizeof proc, "%s/proc", root);
    const size_t kib = file_number(proc, "meminfo", "MemAvailable:");
    size_t available = kib > SIZE_MAX / 1024 ? (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE) : kib * 1024;
    for (size_t v = 0; v < sizeof versions / sizeof *versions; v++)
        available = least(available, groups_available(&versions[v], root));
    return least(available, least(address_available(threads), limit_available(RLIMIT_DATA, "VmData:", threads)));
}

size_t memory_available(int threads) { return memory_available_under("", threads); }

size_t memory_peak(void) { return status_bytes("VmHWM:"); }

void memory_restart(void) {
    FILE *f = fopen("/proc/self/clear_refs", "we");
    if (!f) return;
    fputs("5", f); /* proc(5): the peak begins at the present */
    fclose(f);
}
