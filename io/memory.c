/* memory.c: how much memory this process may have. Read next: json.c. */
#include "io/text.h"

/* The number behind prefix in a file of lines, in units of so many bytes; SIZE_MAX: there is none. */
static size_t file_number(const char *path, const char *prefix, size_t unit) {
    char line[256];
    size_t value = SIZE_MAX;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, prefix, strlen(prefix)) && sscanf(line + strlen(prefix), "%zu", &value) == 1) {
            value *= unit;
            break;
        }
    if (f) fclose(f);
    return value;
}

size_t memory_available(void) {
    static const char group[] = "/sys/fs/cgroup/memory.stat";
    size_t available = file_number("/proc/meminfo", "MemAvailable:", 1024);
    size_t limit = file_number("/sys/fs/cgroup/memory.max", "", 1);
    size_t used = file_number("/sys/fs/cgroup/memory.current", "", 1);
    /* the group counts files that are only cached; they give way */
    size_t active = file_number(group, "active_file ", 1), inactive = file_number(group, "inactive_file ", 1);
    if (limit == SIZE_MAX || used == SIZE_MAX) return available;
    if (active <= used) used -= active;
    if (inactive <= used) used -= inactive;
    size_t left = used < limit ? limit - used : 0;
    return left < available ? left : available;
}
