/* test_memory.c: how much memory a process may have, from trees of files as machines and containers have them, and from
 * limits of its own; that the program keeps to it, and to what it promises. */
#include <cjson/cJSON.h>
#include <limits.h>
#include <mntent.h>
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
static void put(const char *root, const char *path, const char *text) {
    char dir[600];
    const int last = (int)(strrchr(path, '/') - path);
    for (int n = 1; n <= last; n++) {
        snprintf(dir, sizeof dir, "%s%.*s", root, n, path);
        if (path[n] == '/') mkdir(dir, 0755); /* there already, mostly */
    }
    write_file(dir, strrchr(path, '/') + 1, text, strlen(text));
}

static void put_number(const char *root, const char *dir, const char *name, size_t number) {
    char path[400], text[64];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    snprintf(text, sizeof text, "%zu\n", number);
    put(root, path, text);
}

/* A machine with 8 GiB available; our groups and the mounts as /proc shows them. */
static const char *machine(const char *groups, const char *mounts) {
    static char root[300];
    snprintf(root, sizeof root, "%s", temp_dir());
    put(root, "/proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n");
    put(root, "/proc/self/cgroup", groups);
    put(root, "/proc/self/mountinfo", mounts);
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

static void v1_group(const char *root, const char *dir, size_t limit, size_t used, size_t cached) {
    char text[200];
    put_number(root, dir, "memory.limit_in_bytes", limit);
    put_number(root, dir, "memory.usage_in_bytes", used);
    snprintf(text, sizeof text, "cache 1\ninactive_file 7\ntotal_inactive_file %zu\ntotal_active_file %zu\n", cached / 2,
             cached - cached / 2);
    char path[400];
    snprintf(path, sizeof path, "%s/memory.stat", dir);
    put(root, path, text);
}

static void v2_group(const char *root, const char *dir, const char *max, const char *high, size_t used, size_t cached) {
    char path[400], text[200];
    snprintf(path, sizeof path, "%s/memory.max", dir), put(root, path, max);
    snprintf(path, sizeof path, "%s/memory.high", dir), put(root, path, high);
    put_number(root, dir, "memory.current", used);
    snprintf(text, sizeof text, "anon 5\nfile 6\ninactive_file %zu\nactive_file %zu\n", cached / 2, cached - cached / 2);
    snprintf(path, sizeof path, "%s/memory.stat", dir), put(root, path, text);
}

static void a_group_of_version_1_has_its_limit_less_its_use(void) {
    static const size_t no_limit = 9223372036854771712u;
    static const struct {
        size_t limit, used, cached, expected;
    } cases[] = {{64 * MB, 10 * MB, 0, 54 * MB}, {700 * MB, 600 * MB, 450 * MB, 550 * MB},
                 {4 * GB, 5 * GB, 0, 0},         {6 * GB, 6 * GB, 6 * GB, 6 * GB},
                 {64 * GB, GB, 0, 8 * GB},       {no_limit, GB, 0, 8 * GB},
                 {2 * GB, GB, 3 * GB, GB}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = machine(V1_GROUPS, V1_MOUNTS);
        v1_group(root, "/sys/fs/cgroup/memory", no_limit, 3 * GB, GB);
        v1_group(root, "/sys/fs/cgroup/memory/batch/job", cases[i].limit, cases[i].used, cases[i].cached);
        v1_group(root, "/sys/fs/cgroup/memory/other", MB, 0, 0);     /* nobody of us is there */
        v1_group(root, "/sys/fs/cgroup/memory/elsewhere", MB, 0, 0); /* our group of another controller */
        available_is(root, cases[i].expected);
    }
}

static void the_groups_above_limit_as_well(void) {
    static const size_t limits[][3] = {/* of job, of batch, of all; the least counts wherever it is */
                                       {1 * GB, 2 * GB, 3 * GB},
                                       {3 * GB, 2 * GB, 1 * GB},
                                       {2 * GB, 1 * GB, 3 * GB},
                                       {700 * MB, 64 * GB, 64 * GB},
                                       {64 * GB, 64 * GB, 700 * MB}};
    static const char *const dirs[] = {"/sys/fs/cgroup/memory/batch/job", "/sys/fs/cgroup/memory/batch",
                                       "/sys/fs/cgroup/memory"};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        const char *root = machine(V1_GROUPS, V1_MOUNTS);
        size_t expected = SIZE_MAX;
        for (int g = 0; g < 3; g++) {
            v1_group(root, dirs[g], limits[i][g], 100 * MB, 30 * MB);
            if (limits[i][g] < expected) expected = limits[i][g];
        }
        available_is(root, expected - 70 * MB);
    }
}

static void a_group_of_version_2_is_nested_too(void) {
    static const struct {
        const char *max[3], *high[3]; /* of job, of a.service, of user.slice; the top has none */
        size_t expected;              /* each uses 100 MiB, of which 30 are cached */
    } cases[] = {
        {{"1073741824\n", "max\n", "max\n"}, {"max\n", "max\n", "max\n"}, GB - 70 * MB},
        {{"max\n", "734003200\n", "max\n"}, {"max\n", "max\n", "max\n"}, 630 * MB},
        {{"max\n", "max\n", "268435456\n"}, {"max\n", "max\n", "max\n"}, 186 * MB},
        {{"1073741824\n", "max\n", "max\n"}, {"536870912\n", "max\n", "max\n"}, 442 * MB},
        {{"1073741824\n", "max\n", "max\n"}, {"max\n", "max\n", "104857600\n"}, 30 * MB},
        {{"0\n", "max\n", "max\n"}, {"max\n", "max\n", "max\n"}, 0},
        {{"max\n", "max\n", "max\n"}, {"max\n", "max\n", "max\n"}, 8 * GB},
    };
    static const char *const dirs[] = {"/sys/fs/cgroup/user.slice/a.service/job", "/sys/fs/cgroup/user.slice/a.service",
                                       "/sys/fs/cgroup/user.slice"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = machine("0::/user.slice/a.service/job\n", V2_MOUNTS);
        for (int g = 0; g < 3; g++) v2_group(root, dirs[g], cases[i].max[g], cases[i].high[g], 100 * MB, 30 * MB);
        available_is(root, cases[i].expected);
    }
}

static void a_hybrid_machine_has_both(void) {
    for (int both = 0; both < 2; both++) {
        const char *root =
            machine(V1_GROUPS "0::/session\n", V1_MOUNTS "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        v1_group(root, "/sys/fs/cgroup/memory/batch/job", 3 * GB, GB, 0);
        put(root, "/sys/fs/cgroup/unified/session/cgroup.procs", "");
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
        put(root, "/sys/fs/cgroup/a/memory.current", used[i]);
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

static void put_quota(const char *root, const char *dir, const char *quota, const char *period) {
    char path[400];
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", dir), put(root, path, quota);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", dir), put(root, path, period);
}

static void a_quota_of_cpu_is_so_many_whole_processors(void) {
    static const struct {
        const char *quota, *period, *both;
        int expected;
    } cases[] = {{"-1\n", "100000\n", "max 100000\n", INT_MAX}, {"200000\n", "100000\n", "200000 100000\n", 2},
                 {"50000\n", "100000\n", "50000 100000\n", 1},  {"190000\n", "100000\n", "190000 100000\n", 1},
                 {"30000\n", "10000\n", "30000 10000\n", 3},    {"1000\n", "1000000\n", "1000 1000000\n", 1},
                 {"50000\n", "0\n", "50000 0\n", INT_MAX},      {"", "", "", INT_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *root = machine(V1_GROUPS, V1_MOUNTS);
        put_quota(root, "/sys/fs/cgroup/cpu,cpuacct/elsewhere", cases[i].quota, cases[i].period);
        put_quota(root, "/sys/fs/cgroup/cpu,cpuacct/other", "1000\n", "1000\n");     /* nobody of us is there */
        put_quota(root, "/sys/fs/cgroup/cpu,cpuacct/batch/job", "1000\n", "1000\n"); /* our group of another controller */
        CU_ASSERT_EQUAL(process_allowance(root, 0).processors, cases[i].expected);
        root = machine("0::/user.slice/job\n", V2_MOUNTS);
        put(root, "/sys/fs/cgroup/user.slice/job/cpu.max", cases[i].both);
        CU_ASSERT_EQUAL(process_allowance(root, 0).processors, cases[i].expected);
    }
    CU_ASSERT_EQUAL(process_allowance(temp_dir(), 0).processors, INT_MAX);
    CU_ASSERT(process_allowance("", 0).processors >= 1 && processors_allowed() >= 1);
}

static void the_smallest_quota_on_the_way_up_counts(void) {
    static const char *const max[][3] = {{"200000 100000\n", "300000 100000\n", "max 100000\n"},
                                         {"max 100000\n", "200000 100000\n", "400000 100000\n"},
                                         {"800000 100000\n", "max 100000\n", "200000 100000\n"}};
    for (size_t i = 0; i < sizeof max / sizeof *max; i++) {
        const char *root = machine("0::/user.slice/a.service/job\n", V2_MOUNTS);
        put(root, "/sys/fs/cgroup/user.slice/a.service/job/cpu.max", max[i][0]);
        put(root, "/sys/fs/cgroup/user.slice/a.service/cpu.max", max[i][1]);
        put(root, "/sys/fs/cgroup/user.slice/cpu.max", max[i][2]);
        CU_ASSERT_EQUAL(process_allowance(root, 0).processors, 2);
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
            const size_t alone = available_in_child(resources[r], more[i], 0), least = more[i] - 2 * MB;
            CU_ASSERT(alone <= more[i] && alone >= least); /* what the child itself takes until then is little */
        }
        CU_ASSERT_EQUAL(available_in_child(resources[r], 64 * GB, 0), free_bytes);
    }
}

static void stacks_of_threads_to_come_are_taken_off(void) {
    const size_t alone = available_in_child(RLIMIT_AS, GB, 0), ten = available_in_child(RLIMIT_AS, GB, 10);
    CU_ASSERT(ten < alone && alone - ten >= 10 * 2 * MB); /* glibc's least usual stack is 2 MiB */
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
    Error err;
    for (size_t i = 0; i < sizeof runs / sizeof *runs && plain; i++) {
        char command[600];
        int status;
        snprintf(command, sizeof command,
                 "%%s bench --device host %s --prompt-len 40 --gen-len 6 --gpu-batch-size 8 --num-gpu-batches 2 "
                 "--num-prompts 24 --json - 2>&-",
                 runs[i]);
        const char *said = program_says(&status, command);
        CU_ASSERT_EQUAL_FATAL(status, 0);
        cJSON *json = json_parse(said, strlen(said), &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(json);
        const cJSON *tiers = json_get(json, "tiers");
        const double overhead = cJSON_GetNumberValue(json_get(json, "overhead_bytes"));
        const double peak = cJSON_GetNumberValue(json_get(json, "peak_rss_bytes"));
        double planned = 0;
        for (int t = TIER_GPU; t <= TIER_CPU; t++)
            planned += cJSON_GetNumberValue(json_get(json_get(tiers, tier_name[t]), "planned_bytes"));
        CU_ASSERT(peak > planned / 2 && peak <= planned + overhead);
        CU_ASSERT(overhead < 100 * MB); /* or it would promise nothing */
        cJSON_Delete(json);
    }
}

#define ONE_BATCH "--gpu-batch-size 1 --num-gpu-batches 1"

/* What it says in so many KiB of address space about a model of 690 MB, of which one batch is all. */
#define IN_SPACE(kib, flags)                                                                      \
    program_says(&status, "ulimit -v " #kib                                                       \
                          "; %s bench --device host --model opt-350m --prompt-len 8 --gen-len 2 " \
                          "--gpu-batch-size 1 --num-gpu-batches 1 " flags " 2>&1")

static void the_program_keeps_to_its_address_space(void) {
    int status;
    if (!plain) return;
    const char *said = program_says(&status,
                                    "ulimit -v 500000; %s generate --model models/opt-tiny --prompt x --max-tokens 4 "
                                    "--gpu-batch-size 1 --num-gpu-batches 1 --percent 100 0 100 0 100 0 2>&-");
    CU_ASSERT(status == 0 && strstr(said, "completion"));
    said = IN_SPACE(500000, "--percent 100 0 100 0 100 0");
    CU_ASSERT(status == 2 && strstr(said, "flexgen: the GPU tier needs"));
    said = IN_SPACE(500000, "--percent 0 0 100 0 100 0"); /* the offload file is mapped */
    CU_ASSERT(status == 2 && strstr(said, "flexgen: the disk tier needs"));
    said = IN_SPACE(1100000, "--percent 0 0 100 0 100 0 --gpu-mem 150M --cpu-mem 100M");
    CU_ASSERT(status == 0 && strstr(said, "generation throughput"));
}

/* Each flag alone and both; one leaves a little to the other, and where both are large, what is planned decides. */
static void what_the_flags_give_together_is_no_more_than_there_is(void) {
    int status;
    if (!plain) return;
    const char *said = IN_SPACE(500000, "--percent 100 0 100 0 100 0 --gpu-mem 4G");
    CU_ASSERT(status == 2 && strstr(said, "flexgen: the GPU tier needs") && strstr(said, "may have tiers of"));
    said = IN_SPACE(500000, "--percent 0 100 0 100 0 100 --cpu-mem 4G");
    CU_ASSERT(status == 2 && strstr(said, "flexgen: the GPU tier needs") && strstr(said, "may have tiers of"));
    said = IN_SPACE(800000, "--percent 50 50 100 0 100 0 --gpu-mem 500M --cpu-mem 400M");
    CU_ASSERT(status == 2 && strstr(said, "tier needs") && strstr(said, "may have tiers of"));
    said = IN_SPACE(1100000, "--percent 0 100 0 100 0 100 --gpu-mem 700M --cpu-mem 800M");
    CU_ASSERT(status == 0 && strstr(said, "generation throughput"));
    said = IN_SPACE(1100000, "--percent 100 0 100 0 100 0 --gpu-mem 4G");
    CU_ASSERT(status == 0 && strstr(said, "generation throughput"));
}

/* An offload file of 580 MB, by a process that may have 500 MB, to which that file would not count by itself. */
static void an_offload_directory_that_is_memory_has_no_more_than_there_is(void) {
    int status;
    if (!plain || !is_tmpfs("/dev/shm")) return;
    const char *said = program_says(&status,
                                    "ulimit -d 500000; %s bench --device host --model opt-350m --prompt-len 8 --gen-len 2 "
                                    "--gpu-batch-size 1 --num-gpu-batches 1 --percent 0 0 100 0 100 0 "
                                    "--offload-dir /dev/shm --disk-mem 4G 2>&1");
    CU_ASSERT(status == 2 && strstr(said, "flexgen: the disk tier needs") && strstr(said, "may have tiers of"));
}

/* Without a machine that was measured before, and with it. In 16 MB there is no room even for measuring. */
static void every_command_ends_well_or_is_refused_in_a_small_group(void) {
    if (!plain) return;
    CU_ASSERT_EQUAL(system("scripts/limit_test.sh 16 max >&2"), 0);
    CU_ASSERT_EQUAL(system("scripts/limit_test.sh 64 50 'percent|quantize' >&2"), 0);
}

static size_t five_in_use(Gpu *gpu) { return (void)gpu, 5; }

static void a_gpu_tier_may_have_what_nobody_uses_or_will_use(void) {
    Gpu gpu = {.total = 9, .spare = 3, .in_use = five_in_use};
    CU_ASSERT_EQUAL(gpu_left(&gpu), 1);
    gpu.spare = 4;
    CU_ASSERT_EQUAL(gpu_left(&gpu), 0);
    gpu.spare = 5;
    CU_ASSERT_EQUAL(gpu_left(&gpu), 0);
}

CU_TestInfo tests[] = {
    {"a GPU tier may have what nobody uses or will use", a_gpu_tier_may_have_what_nobody_uses_or_will_use},
    {"a group of version 1 has its limit less its use", a_group_of_version_1_has_its_limit_less_its_use},
    {"the groups above limit as well", the_groups_above_limit_as_well},
    {"a group of version 2 is nested too", a_group_of_version_2_is_nested_too},
    {"a hybrid machine has both", a_hybrid_machine_has_both},
    {"in a container the tree may begin at its group", in_a_container_the_tree_may_begin_at_its_group},
    {"what is no number sets no limit", what_is_no_number_sets_no_limit},
    {"what is missing sets no limit", what_is_missing_sets_no_limit},
    {"long names do not overflow", long_names_do_not_overflow},
    {"a quota of CPU is so many whole processors", a_quota_of_cpu_is_so_many_whole_processors},
    {"the smallest quota on the way up counts", the_smallest_quota_on_the_way_up_counts},
    {"the process has what its own limits leave", the_process_has_what_its_own_limits_leave},
    {"stacks of threads to come are taken off", stacks_of_threads_to_come_are_taken_off},
    {"this process may have something", this_process_may_have_something},
    {"files in memory are told from others", files_in_memory_are_told_from_others},
    {"the peak can be measured from now on", the_peak_can_be_measured_from_now_on},
    {"a run takes no more than the plan and the overhead", a_run_takes_no_more_than_the_plan_and_the_overhead},
    {"the program keeps to its address space", the_program_keeps_to_its_address_space},
    {"what the flags give together is no more than there is", what_the_flags_give_together_is_no_more_than_there_is},
    {"an offload directory that is memory has no more than there is",
     an_offload_directory_that_is_memory_has_no_more_than_there_is},
    {"every command ends well or is refused in a small group", every_command_ends_well_or_is_refused_in_a_small_group},
    CU_TEST_INFO_NULL,
};
