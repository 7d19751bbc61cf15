/* test_memory.c: how much memory and how many processors a process may have, from trees of files as machines and containers
 * have them, and from limits of its own; that the program keeps to it, and to what it promises. What a plan needs is
 * test_plan.c's; that commands end well where memory is short is also scripts/limit_test.sh. */
#include <cjson/cJSON.h>
#include <limits.h>
#include <mntent.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define MB ((size_t)1 << 20)
#define GB ((size_t)1 << 30)
static const size_t free_bytes = 8 * GB; /* of the machines below */

/* Writes a file with its directories. */
__attribute__((format(printf, 4, 5))) static void put(const char *root, const char *dir, const char *name,
                                                      const char *format, ...) {
    char path[9000], text[13000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(path, sizeof path, "%s%s/", root, dir);
    for (char *end = path + strlen(root) + 1; (end = strchr(end, '/')); *end++ = '/') *end = 0, mkdir(path, 0755);
    write_file(path, name, text, strlen(text));
}

/* A machine with 8 GiB available; our groups and the mounts as /proc shows them. */
static const char *machine(const char *groups, const char *mounts) {
    static char root[300];
    snprintf(root, sizeof root, "%s", temp_dir());
    put(root, "/proc", "meminfo", "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable:    8388608 kB\n");
    put(root, "/proc/self", "cgroup", "%s", groups);
    put(root, "/proc/self", "mountinfo", "%s", mounts);
    return root;
}

static void available_is(const char *root, size_t bytes) { CU_ASSERT_EQUAL(process_allowance(root, 0).memory, bytes); }

// ---------------------------------------------------------------------------------------------------------------
// Control groups
// ---------------------------------------------------------------------------------------------------------------

#define V1_MOUNTS                                                                 \
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"                             \
    "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" \
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
#define V1_GROUPS "9:cpu,cpuacct:/elsewhere\n4:memory:/batch/job\n1:name=systemd:/\n"
#define V2_MOUNTS                                     \
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n" \
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"

/* Limits are text: what is no number is none in version 2, and a large number in version 1. */
static void v1_group(const char *root, const char *dir, const char *limit, size_t used, size_t cached) {
    put(root, dir, "memory.limit_in_bytes", "%s\n", *limit == 'm' ? "9223372036854771712" : limit);
    put(root, dir, "memory.usage_in_bytes", "%zu\n", used);
    put(root, dir, "memory.stat", "cache 1\ninactive_file 7\ntotal_inactive_file %zu\ntotal_active_file %zu\n", cached / 2,
        cached - cached / 2);
}

static void v2_group(const char *root, const char *dir, const char *max, const char *high, size_t used, size_t cached) {
    put(root, dir, "memory.max", "%s", max);
    put(root, dir, "memory.high", "%s", high);
    put(root, dir, "memory.current", "%zu\n", used);
    put(root, dir, "memory.stat", "anon 5\nfile 6\ninactive_file %zu\nactive_file %zu\n", cached / 2, cached - cached / 2);
}

static void a_group_of_version_1_has_its_limit_less_its_use(void) {
    static const struct {
        const char *limit;
        size_t used, cached, expected;
    } cases[] = {{"67108864", 10 * MB, 0, 54 * MB}, {"734003200", 600 * MB, 450 * MB, 550 * MB},
                 {"4294967296", 5 * GB, 0, 0},      {"6442450944", 6 * GB, 6 * GB, 6 * GB},
                 {"68719476736", GB, 0, 8 * GB},    {"max", GB, 0, 8 * GB},
                 {"2147483648", GB, 3 * GB, GB}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = machine(V1_GROUPS, V1_MOUNTS);
        v1_group(root, "/sys/fs/cgroup/memory", "max", 3 * GB, GB);
        v1_group(root, "/sys/fs/cgroup/memory/batch/job", cases[i].limit, cases[i].used, cases[i].cached);
        v1_group(root, "/sys/fs/cgroup/memory/other", "1", 0, 0);     /* nobody of us is there */
        v1_group(root, "/sys/fs/cgroup/memory/elsewhere", "1", 0, 0); /* our group of another controller */
        available_is(root, cases[i].expected);
    }
}

/* Of job, of a.service above it, of user.slice above both; the least counts wherever it is. Each uses 100 MiB, of which 30
 * are cached. Only version 2 has a second limit, and none at its top. */
static void the_groups_above_limit_as_well(void) {
    static const struct {
        const char *max[3], *high[3];
        size_t expected;
    } cases[] = {{{"1073741824", "2147483648", "3221225472"}, {NULL}, GB - 70 * MB},
                 {{"3221225472", "2147483648", "1073741824"}, {NULL}, GB - 70 * MB},
                 {{"max", "734003200", "max"}, {NULL}, 630 * MB},
                 {{"max", "max", "268435456"}, {NULL}, 186 * MB},
                 {{"0", "max", "max"}, {NULL}, 0},
                 {{"max", "max", "max"}, {NULL}, 8 * GB},
                 {{"1073741824", "max", "max"}, {"536870912", "max", "max"}, 442 * MB},
                 {{"1073741824", "max", "max"}, {"max", "max", "104857600"}, 30 * MB}};
    static const char *const dirs[] = {"/user.slice/a.service/job", "/user.slice/a.service", "/user.slice"};
    char dir[100];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int version = cases[i].high[0] ? 2 : 1; version <= 2; version++) {
            const char *root = version == 1 ? machine("4:memory:/user.slice/a.service/job\n", V1_MOUNTS)
                                            : machine("0::/user.slice/a.service/job\n", V2_MOUNTS);
            for (int g = 0; g < 3; g++) {
                snprintf(dir, sizeof dir, "/sys/fs/cgroup%s%s", version == 1 ? "/memory" : "", dirs[g]);
                if (version == 1)
                    v1_group(root, dir, cases[i].max[g], 100 * MB, 30 * MB);
                else
                    v2_group(root, dir, cases[i].max[g], cases[i].high[0] ? cases[i].high[g] : "max\n", 100 * MB, 30 * MB);
            }
            available_is(root, cases[i].expected);
        }
}

static void a_hybrid_machine_has_both(void) {
    for (int both = 0; both < 2; both++) {
        const char *root =
            machine(V1_GROUPS "0::/session\n", V1_MOUNTS "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        v1_group(root, "/sys/fs/cgroup/memory/batch/job", "3221225472", GB, 0);
        put(root, "/sys/fs/cgroup/unified/session", "cgroup.procs", "%s", "");
        if (both) v2_group(root, "/sys/fs/cgroup/unified/session", "1073741824\n", "max\n", 0, 0);
        available_is(root, both ? GB : 2 * GB);
    }
}

static void in_a_container_the_tree_may_begin_at_its_group(void) {
    static const struct {
        const char *group, *top, *limited; /* where the limit of 1 GiB is, below the mount */
        size_t expected;
    } cases[] = {
        {"/docker/abc", "/docker/abc", "", GB},         /* ours is the top */
        {"/docker/abc/job", "/docker/abc", "/job", GB}, /* ours is below it */
        {"/docker/abc/job", "/docker/abc", "", GB},
        {"/docker/abcd", "/docker/abc", "d", 8 * GB}, /* a longer name is another group's */
        {"/docker/xyz/job", "/docker/abc", "/job", 8 * GB},
        {"/", "/", "", GB},         /* a name space: the container's group is / */
        {"/", "/../..", "", GB},    /* the top is above it */
        {"/../other", "/", "", GB}, /* ours cannot be seen */
        {"/../other", "/", "/../other", 8 * GB},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char groups[100], mounts[200], dir[100];
        snprintf(groups, sizeof groups, "0::%s\n", cases[i].group);
        snprintf(mounts, sizeof mounts, "30 23 0:26 %s /mnt/groups rw - cgroup2 cgroup2 rw\n", cases[i].top);
        snprintf(dir, sizeof dir, "/mnt/groups%s", cases[i].limited);
        const char *root = machine(groups, mounts);
        v2_group(root, dir, "1073741824\n", "max\n", 0, 0);
        available_is(root, cases[i].expected);
    }
}

static void what_is_no_number_sets_no_limit(void) {
    static const char *const limits[] = {"max\n",    "",       "\n", "-1\n", "unlimited", "99999999999999999999999999\n",
                                         "\xff\xfe", " \n\n\n"};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const char *root = machine("0::/a\n", V2_MOUNTS);
        v2_group(root, "/sys/fs/cgroup/a", limits[i], limits[i], 100 * MB, 0);
        available_is(root, free_bytes);
    }
    static const char *const used[] = {"max\n", "", "-5\n", "99999999999999999999999999\n", "many\n"};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) { /* the whole limit then */
        const char *root = machine("0::/a\n", V2_MOUNTS);
        v2_group(root, "/sys/fs/cgroup/a", "1073741824\n", "max\n", 0, 0);
        put(root, "/sys/fs/cgroup/a", "memory.current", "%s", used[i]);
        available_is(root, GB);
    }
}

static void what_is_missing_sets_no_limit(void) {
    static const char *const groups[] = {"", "0::", "4:memory", "nonsense\n", ":::::\n", "4:memory:/a\n0::/not/there\n"};
    static const char *const mounts[] = {"", "30 23\n", " - \n", "30 23 0:26 / /gone rw - cgroup2 cgroup2 rw\n",
                                         "30 23 0:26 / /sys/fs/cgroup rw - cgroup2\n"};
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
        for (size_t m = 0; m < sizeof mounts / sizeof *mounts; m++) {
            const char *root = machine(groups[g], mounts[m]);
            v2_group(root, "/sys/fs/cgroup/a", "1\n", "max\n", 0, 0);
            available_is(root, free_bytes);
        }
    const size_t nothing = process_allowance(temp_dir(), 0).memory; /* without /proc: all memory there is */
    CU_ASSERT_EQUAL(nothing, (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE));
}

static void long_names_do_not_overflow(void) {
    enum { LONG = 6000 };
    char groups[LONG + 100], mounts[2 * LONG + 300], name[LONG + 1];
    memset(name, 'x', LONG), name[0] = '/', name[LONG] = 0;
    snprintf(groups, sizeof groups, "0::%s\n", name);
    snprintf(mounts, sizeof mounts, "30 23 0:26 %s %s rw - cgroup2 cgroup2 rw\n%s", name, name, V2_MOUNTS);
    const char *root = machine(groups, mounts);
    v2_group(root, "/sys/fs/cgroup", "1073741824\n", "max\n", 0, 0);
    available_is(root, GB);
}

static void processors_are(const char *root, int expected) {
    CU_ASSERT_EQUAL(process_allowance(root, 0).processors, expected);
}

static void put_quota(const char *root, const char *group, const char *quota, const char *period) {
    char dir[100];
    snprintf(dir, sizeof dir, "/sys/fs/cgroup/cpu,cpuacct/%s", group);
    put(root, dir, "cpu.cfs_quota_us", "%s\n", quota), put(root, dir, "cpu.cfs_period_us", "%s\n", period);
}

static void a_quota_of_cpu_is_so_many_whole_processors(void) {
    static const struct {
        const char *quota, *period;
        int expected;
    } cases[] = {{"max", "100000", INT_MAX}, {"200000", "100000", 2}, {"50000", "100000", 1},  {"190000", "100000", 1},
                 {"30000", "10000", 3},      {"1000", "1000000", 1},  {"50000", "0", INT_MAX}, {"", "", INT_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = machine(V1_GROUPS, V1_MOUNTS);
        put_quota(root, "elsewhere", *cases[i].quota == 'm' ? "-1" : cases[i].quota, cases[i].period);
        put_quota(root, "other", "1000", "1000");     /* nobody of us is there */
        put_quota(root, "batch/job", "1000", "1000"); /* our group of another controller */
        processors_are(root, cases[i].expected);
        root = machine("0::/user.slice/job\n", V2_MOUNTS);
        put(root, "/sys/fs/cgroup/user.slice/job", "cpu.max", "%s %s\n", cases[i].quota, cases[i].period);
        processors_are(root, cases[i].expected);
    }
    processors_are(temp_dir(), INT_MAX);
    CU_ASSERT(process_allowance("", 0).processors >= 1 && processors_allowed() >= 1);
}

static void the_smallest_quota_on_the_way_up_counts(void) {
    static const char *const max[][3] = {
        {"200000", "300000", "max"}, {"max", "200000", "400000"}, {"800000", "max", "200000"}};
    for (size_t i = 0; i < sizeof max / sizeof *max; i++) {
        const char *root = machine("0::/user.slice/a.service/job\n", V2_MOUNTS);
        put(root, "/sys/fs/cgroup/user.slice/a.service/job", "cpu.max", "%s 100000\n", max[i][0]);
        put(root, "/sys/fs/cgroup/user.slice/a.service", "cpu.max", "%s 100000\n", max[i][1]);
        put(root, "/sys/fs/cgroup/user.slice", "cpu.max", "%s 100000\n", max[i][2]);
        processors_are(root, 2);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Limits of the process
// ---------------------------------------------------------------------------------------------------------------

/* In a child whose address space, or data, may grow by so much: what is available, in bytes. */
static size_t available_in_child(int resource, size_t more, int threads) {
    const char *const root = machine("", "");
    size_t available = 0;
    int ends[2];
    CHECK(pipe(ends) == 0);
    const pid_t pid = fork();
    if (!pid) {
        const char *key = resource == RLIMIT_AS ? "VmSize:" : "VmData:";
        size_t used = 0;
        char line[200];
        FILE *f = fopen("/proc/self/status", "r");
        while (fgets(line, sizeof line, f))
            if (!strncmp(line, key, strlen(key))) used = strtoull(line + strlen(key), NULL, 10) * 1024;
        fclose(f);
        CHECK(setrlimit(resource, &(struct rlimit){used + more, used + more}) == 0);
        available = process_allowance(root, threads).memory;
        _exit(write(ends[1], &available, sizeof available) != sizeof available);
    }
    int status;
    close(ends[1]);
    CHECK(waitpid(pid, &status, 0) == pid && read(ends[0], &available, sizeof available) == sizeof available);
    close(ends[0]);
    return available;
}

static void the_process_has_what_its_own_limits_leave(void) {
    static const size_t more[] = {64 * MB, 200 * MB, 500 * MB, 2 * GB, 7 * GB};
    static const int resources[] = {RLIMIT_AS, RLIMIT_DATA};
    for (int r = 0; r < 2; r++) {
        for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
            const size_t alone = available_in_child(resources[r], more[i], 0);
            CU_ASSERT(alone <= more[i] && alone >= more[i] - 2 * MB); /* the child itself takes little until then */
        }
        CU_ASSERT_EQUAL(available_in_child(resources[r], 64 * GB, 0), free_bytes);
    }
    const size_t alone = available_in_child(RLIMIT_AS, GB, 0), ten = available_in_child(RLIMIT_AS, GB, 10);
    CU_ASSERT(ten < alone && alone - ten >= 10 * 2 * MB); /* of threads to come; glibc's least usual stack is 2 MiB */
    CU_ASSERT_EQUAL(available_in_child(RLIMIT_AS, GB, 10000), 0);
}

static void this_process_may_have_something(void) {
    CU_ASSERT(process_allowance("", 0).memory > 16 * MB && process_allowance("", 0).memory < (size_t)1 << 50);
}

/* Whether /proc/mounts says that files there are memory; of two mounts on one place the later one is seen. */
static bool is_tmpfs(const char *dir) {
    bool is = false;
    FILE *mounts = setmntent("/proc/mounts", "r");
    for (const struct mntent *m; mounts && (m = getmntent(mounts));)
        if (!strcmp(m->mnt_dir, dir)) is = !strcmp(m->mnt_type, "tmpfs");
    if (mounts) endmntent(mounts);
    return is;
}

static void files_in_memory_are_told_from_others(void) {
    CU_ASSERT_EQUAL(memory_holds("/dev/shm"), is_tmpfs("/dev/shm"));
    CU_ASSERT(!memory_holds("/proc") && !memory_holds("/not/there"));
}

static void the_peak_can_be_measured_from_now_on(void) {
    enum { BYTES = 64 << 20 };
    const size_t before = memory_peak();
    char *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    memset(p, 1, BYTES);
    munmap(p, BYTES);
    const size_t high = memory_peak();
    CU_ASSERT(before > 0 && high >= before + BYTES / 2);
    memory_restart();
    if (access("/proc/self/clear_refs", W_OK) == 0) CU_ASSERT(memory_peak() < high - BYTES / 2);
}

// ---------------------------------------------------------------------------------------------------------------
// The program
// ---------------------------------------------------------------------------------------------------------------

#ifdef __SANITIZE_ADDRESS__
static const bool plain = false; /* AddressSanitizer takes far more memory */
#else
static const bool plain = true;
#endif

/* What a shell command says that starts the program, "%s", and its status. */
static char *program_says(int *status, const char *command) {
    static char line[2048], said[1 << 16];
    const char *program = getenv("FLEXGEN_BIN");
    snprintf(line, sizeof line, command, program ? program : "./flexgen");
    FILE *f = popen(line, "r");
    CHECK(f);
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    *status = pclose(f);
    *status = WIFEXITED(*status) ? WEXITSTATUS(*status) : -1;
    return said;
}

static void a_run_takes_no_more_than_the_plan_and_the_overhead(void) {
    static const char *const runs[] = {
        "--model models/opt-tiny --percent 100 0 100 0 100 0",
        "--model models/opt-tiny --percent 0 30 20 30 0 0 --cpu-cache-compute --threads 8",
        "--model models/opt-tiny --percent 0 0 0 0 0 0 --compress-cache --attn-sparsity 0.3 --cpu-cache-compute",
        "--model opt-125m --percent 100 0 100 0 100 0",
        "--model opt-125m --percent 20 30 0 50 50 50 --compress-weight --threads 8",
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs && plain; i++) {
        char command[600];
        int status;
        snprintf(command, sizeof command,
                 "%%s bench --device host %s --prompt-len 40 --gen-len 6 --gpu-batch-size 8 --num-gpu-batches 2 "
                 "--num-prompts 24 --json - 2>&-",
                 runs[i]);
        cJSON *json = cJSON_Parse(program_says(&status, command));
        CU_ASSERT_FATAL(status == 0 && json);
        const double overhead = cJSON_GetNumberValue(json_get(json, "overhead_bytes"));
        const double peak = cJSON_GetNumberValue(json_get(json, "peak_rss_bytes"));
        double planned = 0;
        for (int t = TIER_GPU; t <= TIER_CPU; t++)
            planned += cJSON_GetNumberValue(json_get(json_get(json_get(json, "tiers"), tier_name[t]), "planned_bytes"));
        CU_ASSERT(peak > planned / 2 && peak <= planned + overhead);
        CU_ASSERT(overhead < 100 * MB); /* or it would promise nothing */
        cJSON_Delete(json);
    }
}

/* In so many KiB of address space a model of 690 MB, of which one batch is all. Each flag for a tier alone and both: one
 * leaves a little to the other, and where both are large, what is planned decides. The offload file is mapped, so that it
 * counts; one of 580 MB in a directory that is memory counts where a process may have 500 MB of data, too. */
static void the_program_keeps_to_what_it_may_have(void) {
#define LARGE "--model opt-350m --device host --prompt-len 8 --gen-len 2 --percent "
#define GPU_NEEDS \
    { "flexgen: the GPU tier needs", "may have tiers of" }
#define DISK_NEEDS \
    { "flexgen: the disk tier needs", "may have tiers of" }
#define WORKS \
    { "generation throughput", "" }
    static const struct {
        const char *limit, *flags;
        int status;
        const char *says[2];
    } cases[] = {
        {"-v 500000",
         "generate --model models/opt-tiny --prompt x --max-tokens 4 --percent 100 0 100 0 100 0",
         0,
         {"completion", ""}},
        {"-v 500000", "bench " LARGE "100 0 100 0 100 0", 2, {"flexgen: the GPU tier needs", ""}},
        {"-v 500000", "bench " LARGE "0 0 100 0 100 0", 2, {"flexgen: the disk tier needs", ""}},
        {"-v 1100000", "bench " LARGE "0 0 100 0 100 0 --gpu-mem 150M --cpu-mem 100M", 0, WORKS},
        {"-v 500000", "bench " LARGE "100 0 100 0 100 0 --gpu-mem 4G", 2, GPU_NEEDS},
        {"-v 500000", "bench " LARGE "0 100 0 100 0 100 --cpu-mem 4G", 2, GPU_NEEDS},
        {"-v 800000",
         "bench " LARGE "50 50 100 0 100 0 --gpu-mem 500M --cpu-mem 400M",
         2,
         {"tier needs", "may have tiers of"}},
        {"-v 1100000", "bench " LARGE "0 100 0 100 0 100 --gpu-mem 700M --cpu-mem 800M", 0, WORKS},
        {"-v 1100000", "bench " LARGE "100 0 100 0 100 0 --gpu-mem 4G", 0, WORKS},
        {"-d 500000", "bench " LARGE "0 0 100 0 100 0 --offload-dir /dev/shm --disk-mem 4G", 2, DISK_NEEDS},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases && plain; c++) {
        char command[600];
        int status;
        if (*cases[c].limit == '-' && cases[c].limit[1] == 'd' && !is_tmpfs("/dev/shm")) continue;
        snprintf(command, sizeof command, "ulimit %s; %%s %s --gpu-batch-size 1 --num-gpu-batches 1 2>&1", cases[c].limit,
                 cases[c].flags);
        const char *said = program_says(&status, command);
        const bool right = status == cases[c].status && strstr(said, cases[c].says[0]) && strstr(said, cases[c].says[1]);
        if (!right) fprintf(stderr, "\n    ulimit %s, %s: status %d: %s", cases[c].limit, cases[c].flags, status, said);
        CU_ASSERT(right);
    }
}

/* Without a machine that was measured before, and with it. In 16 MB there is no room even for measuring. */
static void every_command_ends_well_or_is_refused_in_a_small_group(void) {
    if (!plain) return;
    CU_ASSERT_EQUAL(system("scripts/limit_test.sh 16 max >&2"), 0);
    CU_ASSERT_EQUAL(system("scripts/limit_test.sh 64 50 'percent|quantize' >&2"), 0);
}

static size_t five_in_use(Gpu *gpu) { return (void)gpu, 5; }

static void a_gpu_tier_may_have_what_nobody_uses_or_will_use(void) {
    Gpu gpu = {.total = 9, .in_use = five_in_use};
    for (gpu.spare = 3; gpu.spare <= 5; gpu.spare++) CU_ASSERT_EQUAL(gpu_left(&gpu), gpu.spare == 3);
}

CU_TestInfo tests[] = {
    {"a GPU tier may have what nobody uses or will use", a_gpu_tier_may_have_what_nobody_uses_or_will_use},
    {"a group of version 1 has its limit less its use", a_group_of_version_1_has_its_limit_less_its_use},
    {"the groups above limit as well", the_groups_above_limit_as_well},
    {"a hybrid machine has both", a_hybrid_machine_has_both},
    {"in a container the tree may begin at its group", in_a_container_the_tree_may_begin_at_its_group},
    {"what is no number sets no limit", what_is_no_number_sets_no_limit},
    {"what is missing sets no limit", what_is_missing_sets_no_limit},
    {"long names do not overflow", long_names_do_not_overflow},
    {"a quota of CPU is so many whole processors", a_quota_of_cpu_is_so_many_whole_processors},
    {"the smallest quota on the way up counts", the_smallest_quota_on_the_way_up_counts},
    {"the process has what its own limits leave", the_process_has_what_its_own_limits_leave},
    {"this process may have something", this_process_may_have_something},
    {"files in memory are told from others", files_in_memory_are_told_from_others},
    {"the peak can be measured from now on", the_peak_can_be_measured_from_now_on},
    {"a run takes no more than the plan and the overhead", a_run_takes_no_more_than_the_plan_and_the_overhead},
    {"the program keeps to what it may have", the_program_keeps_to_what_it_may_have},
    {"every command ends well or is refused in a small group", every_command_ends_well_or_is_refused_in_a_small_group},
    CU_TEST_INFO_NULL,
};
