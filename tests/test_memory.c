/* test_memory.c: how much memory and how many processors a process may have, from trees of files as machines and containers
 * have them, and from limits of its own; that the program keeps to it, and to what it promises. What a plan needs is
 * test_plan.c's; that commands end well where memory is short is also scripts/limit_test.sh. */
#include <limits.h>
#include <sys/mman.h>
#include <unistd.h>

#include "started.h"
#include "written.h"

#define MB ((size_t)1 << 20)
#define GB ((size_t)1 << 30)
static const size_t free_bytes = 8 * GB; /* of the machines below */

// ---- Control groups -------------------------------------------------------------------------------------------------

#define V1_MOUNTS                                                                 \
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"                             \
    "34 31 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" \
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
#define V1_GROUPS "9:cpu,cpuacct:/elsewhere\n4:memory:/batch/job\n1:name=systemd:/\n"
#define V2_MOUNTS                                     \
    "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n" \
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1 V1_GROUPS, V1_MOUNTS
#define V2 "0::/user/a/job\n", V2_MOUNTS

/* The shell's words for a machine. The first lines give it 8 GiB that are available; v1 makes a group of version 1 for
 * memory, with limit, use and cached files; v2 one of version 2, with max, high, use and cached files; cpu1 and cpu2 groups
 * of both for the CPU, with quota and period. */
static const char words[] =
    "mkdir -p proc/self sys/fs/cgroup && cd sys/fs/cgroup\n"
    "echo 'MemFree: 1048576 kB\nMemAvailable:    8388608 kB\nCached: 1 kB' >../../../proc/meminfo\n"
    "M=1048576 G=1073741824\n"
    "put() { test -d $1 || mkdir -p $1; printf -- \"$3\\n\" >$1/$2; }\n"
    "v1() { put memory/$1 memory.limit_in_bytes $(($2)); put memory/$1 memory.usage_in_bytes $(($3))\n"
    "    put memory/$1 memory.stat \"cache 1\\ninactive_file 7\\ntotal_inactive_file $(($4 / 4))\\n"
    "total_active_file $(($4 - $4 / 4))\"; }\n"
    "v2() { put $1 memory.max $2; put $1 memory.high $3; put $1 memory.current $(($4))\n"
    "    put $1 memory.stat \"anon 5\\nfile 6\\ninactive_file $(($5 / 4))\\nactive_file $(($5 - $5 / 4))\"; }\n"
    "cpu1() { put cpu,cpuacct/$1 cpu.cfs_quota_us $2; put cpu,cpuacct/$1 cpu.cfs_period_us $3; }\n"
    "cpu2() { put $1 cpu.max \"$2 $3\"; }\n";

typedef struct {
    const char *groups, *mounts; /* ours, and those of the file systems, as /proc shows them */
    const char *tree;            /* at /sys/fs/cgroup, in these words */
    size_t left;                 /* bytes, or processors; of the other there is all */
} Machine;

/* Writes the files of a machine. Returns their root. */
static const char *written(const Machine *m) {
    static char root[300];
    char command[4000];
    strcpy(root, temp_dir());
    CHECK((size_t)snprintf(command, sizeof command, "cd %s && %s%s", root, words, m->tree) < sizeof command);
    CU_ASSERT_EQUAL_FATAL(system(command), 0);
    write_file(root, "proc/self/cgroup", m->groups, strlen(m->groups));
    write_file(root, "proc/self/mountinfo", m->mounts, strlen(m->mounts));
    return root;
}

static void check(const Machine *m, size_t n, bool of_processors) {
    for (; n > 0; n--, m++) {
        const Allowance a = process_allowance(written(m), 0);
        const bool right = of_processors ? a.memory == free_bytes && (size_t)a.processors == m->left
                                         : a.memory == m->left && a.processors == INT_MAX;
        if (!right) fprintf(stderr, "\n    %s: %zu bytes, %d processors", m->tree, a.memory, a.processors);
        CU_ASSERT(right);
    }
}

/* A group that nobody of us is in does not count, nor our group of another controller. Cached files are not in use. */
TEST(a_group_of_version_1_has_its_limit_less_its_use) {
#define OTHERS "v1 '' 9223372036854771712 3*G G; v1 other 1 0 0; v1 elsewhere 1 0 0; v1 batch/job "
    static const Machine cases[] = {
        {V1, OTHERS "64*M 10*M 0", 54 * MB}, {V1, OTHERS "700*M 600*M 450*M", 550 * MB},
        {V1, OTHERS "4*G 5*G 0", 0},         {V1, OTHERS "6*G 6*G 6*G", 6 * GB},
        {V1, OTHERS "64*G G 0", 8 * GB},     {V1, OTHERS "9223372036854771712 G 0", 8 * GB},
        {V1, OTHERS "2*G G 8*G", GB},
    };
    check(cases, COUNT(cases), false);
}

/* The least counts wherever it is. Only version 2 has a second limit, and none at its top. */
TEST(the_groups_above_limit_as_well) {
#define THREE_1 "three() { v1 batch/job $1 100*M 30*M; v1 batch $2 100*M 30*M; v1 '' $3 100*M 30*M; }; three "
#define THREE_2 "three() { v2 user/a/job $1 $4 100*M 30*M; v2 user/a $2 $5 100*M 30*M; v2 user $3 $6 100*M 30*M; }; three "
    static const Machine cases[] = {
        {V1, THREE_1 "G 2*G 3*G", GB - 70 * MB},
        {V1, THREE_1 "3*G 2*G G", GB - 70 * MB},
        {V1, THREE_1 "2*G G 3*G", GB - 70 * MB},
        {V1, THREE_1 "700*M 64*G 64*G", 630 * MB},
        {V1, THREE_1 "64*G 64*G 700*M", 630 * MB},
        {V2, THREE_2 "1073741824 max max max max max", GB - 70 * MB},
        {V2, THREE_2 "max 734003200 max max max max", 630 * MB},
        {V2, THREE_2 "max max 268435456 max max max", 186 * MB},
        {V2, THREE_2 "1073741824 max max 536870912 max max", 442 * MB},
        {V2, THREE_2 "1073741824 max max max max 104857600", 30 * MB},
        {V2, THREE_2 "0 max max max max max", 0},
        {V2, THREE_2 "max max max max max max", 8 * GB},
    };
    check(cases, COUNT(cases), false);
}

TEST(a_hybrid_machine_has_both) {
#define HYBRID V1_GROUPS "0::/session\n", V1_MOUNTS "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    static const Machine cases[] = {{HYBRID, "v1 batch/job 3*G G 0; put unified/session cgroup.procs ''", 2 * GB},
                                    {HYBRID, "v1 batch/job 3*G G 0; v2 unified/session 1073741824 max 0 0", GB}};
    check(cases, COUNT(cases), false);
}

/* Ours may be the top, or below it, or cannot be seen; a longer name is another group's. In a name space the container's
 * group is /, and the top may be above it. */
TEST(in_a_container_the_tree_may_begin_at_its_group) {
#define TREE_OF(top) "30 23 0:26 " top " /mnt/groups rw - cgroup2 cgroup2 rw\n"
#define LIMITED(group) "v2 ../../../mnt/groups" group " 1073741824 max 0 0"
    static const Machine cases[] = {
        {"0::/docker/abc\n", TREE_OF("/docker/abc"), LIMITED(""), GB},
        {"0::/docker/abc/job\n", TREE_OF("/docker/abc"), LIMITED("/job"), GB},
        {"0::/docker/abc/job\n", TREE_OF("/docker/abc"), LIMITED(""), GB},
        {"0::/docker/abcd\n", TREE_OF("/docker/abc"), LIMITED("d"), 8 * GB},
        {"0::/docker/xyz/job\n", TREE_OF("/docker/abc"), LIMITED("/job"), 8 * GB},
        {"0::/\n", TREE_OF("/"), LIMITED(""), GB},
        {"0::/\n", TREE_OF("/../.."), LIMITED(""), GB},
        {"0::/../other\n", TREE_OF("/"), LIMITED(""), GB},
        {"0::/../other\n", TREE_OF("/"), LIMITED("/../other"), 8 * GB},
    };
    check(cases, COUNT(cases), false);
}

/* Neither as a limit; of what is no number as the use, the whole limit is left. */
TEST(what_is_no_number_sets_no_limit) {
#define LIMIT \
    "both() { v2 user/a/job x x 100*M 0; printf -- \"$1\" | tee user/a/job/memory.max >user/a/job/memory.high; }; both "
#define USE "v2 user/a/job 1073741824 max 0 0; printf >user/a/job/memory.current "
    static const Machine cases[] = {
        {V2, LIMIT "'max\\n'", 8 * GB},     {V2, LIMIT "''", 8 * GB},
        {V2, LIMIT "'\\n'", 8 * GB},        {V2, LIMIT "'-1\\n'", 8 * GB},
        {V2, LIMIT "unlimited", 8 * GB},    {V2, LIMIT "'99999999999999999999999999\\n'", 8 * GB},
        {V2, LIMIT "'\\377\\376'", 8 * GB}, {V2, LIMIT "' \\n\\n\\n'", 8 * GB},
        {V2, USE "'max\\n'", GB},           {V2, USE "''", GB},
        {V2, USE "' -5\\n'", GB},           {V2, USE "'99999999999999999999999999\\n'", GB},
        {V2, USE "'many\\n'", GB},
    };
    check(cases, COUNT(cases), false);
}

TEST(what_is_missing_sets_no_limit) {
    static const char *const groups[] = {"", "0::", "4:memory", "nonsense\n", ":::::\n", "4:memory:/a\n0::/not/there\n"};
    static const char *const mounts[] = {"", "30 23\n", " - \n", "30 23 0:26 / /gone rw - cgroup2 cgroup2 rw\n",
                                         "30 23 0:26 / /sys/fs/cgroup rw - cgroup2\n"};
    for (size_t g = 0; g < COUNT(groups); g++)
        for (size_t m = 0; m < COUNT(mounts); m++)
            check(&(Machine){groups[g], mounts[m], "v2 a 1 max 0 0", free_bytes}, 1, false);
    const size_t nothing = process_allowance(temp_dir(), 0).memory; /* without /proc: all memory there is */
    CU_ASSERT_EQUAL(nothing, (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE));
}

TEST(long_names_do_not_overflow) {
    enum { LONG = 6000 };
    char groups[LONG + 100], mounts[2 * LONG + 300];
    snprintf(groups, sizeof groups, "0::/%0*d\n", LONG, 0);
    snprintf(mounts, sizeof mounts, "30 23 0:26 /%0*d /%0*d rw - cgroup2 cgroup2 rw\n%s", LONG, 0, LONG, 0, V2_MOUNTS);
    check(&(Machine){groups, mounts, "v2 . 1073741824 max 0 0", GB}, 1, false);
}

/* So many whole processors, and at least one. */
TEST(a_quota_of_cpu_is_so_many_whole_processors) {
#define QUOTA_1 "cpu1 other 1000 1000; cpu1 batch/job 1000 1000; cpu1 elsewhere "
#define QUOTA_2 "cpu2 user/a/job "
#define IN_BOTH(quota, left) \
    {V1, QUOTA_1 quota, left}, { V2, QUOTA_2 quota, left }
    static const Machine cases[] = {
        {V1, QUOTA_1 "-1 100000", INT_MAX},
        {V2, QUOTA_2 "max 100000", INT_MAX},
        IN_BOTH("200000 100000", 2),
        IN_BOTH("190000 100000", 1),
        IN_BOTH("30000 10000", 3),
        IN_BOTH("1000 1000000", 1),
        IN_BOTH("50000 0", INT_MAX),
        IN_BOTH("'' ''", INT_MAX),
        {V2, QUOTA_2 "200000 100000; cpu2 user/a 300000 100000; cpu2 user max 100000", 2},
        {V2, QUOTA_2 "max 100000; cpu2 user/a 200000 100000; cpu2 user 400000 100000", 2},
        {V2, QUOTA_2 "800000 100000; cpu2 user/a max 100000; cpu2 user 200000 100000", 2},
    };
    check(cases, COUNT(cases), true);
    CU_ASSERT_EQUAL(process_allowance(temp_dir(), 0).processors, INT_MAX);
    CU_ASSERT(processors_allowed() >= 1);
}

// ---- Limits of the process ------------------------------------------------------------------------------------------

/* What is available, in bytes, while the address space, or the data, may grow by so much. */
static size_t available(int resource, size_t more, int threads) {
    const char *root = written(&(Machine){"", "", "", 0}), *key = resource == RLIMIT_AS ? "VmSize:" : "VmData:";
    struct rlimit before;
    size_t used = 0;
    char line[200];
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status))
        if (!strncmp(line, key, strlen(key))) used = strtoull(line + strlen(key), NULL, 10) * 1024;
    fclose(status);
    CHECK(!getrlimit(resource, &before) && !setrlimit(resource, &(struct rlimit){used + more, before.rlim_max}));
    const Allowance a = process_allowance(root, threads);
    CHECK(!setrlimit(resource, &before));
    return a.memory;
}

TEST(the_process_has_what_its_own_limits_leave) {
    static const size_t more[] = {64 * MB, 200 * MB, 500 * MB, 2 * GB, 7 * GB};
    static const int resources[] = {RLIMIT_AS, RLIMIT_DATA};
    for (int r = 0; r < 2; r++) {
        for (size_t i = 0; i < COUNT(more); i++) {
            const size_t alone = available(resources[r], more[i], 0);
            CU_ASSERT(alone <= more[i] && alone >= more[i] - 2 * MB); /* little is taken until then */
        }
        CU_ASSERT_EQUAL(available(resources[r], 64 * GB, 0), free_bytes);
    }
    const size_t alone = available(RLIMIT_AS, GB, 0), ten = available(RLIMIT_AS, GB, 10);
    CU_ASSERT(ten < alone && alone - ten >= 10 * 2 * MB); /* of threads to come; glibc's least usual stack is 2 MiB */
    CU_ASSERT_EQUAL(available(RLIMIT_AS, GB, 10000), 0);
}

static bool shm_is_memory(void) { return !system("stat -f -c %T /dev/shm | grep -q tmpfs"); }

TEST(files_in_memory_are_told_from_others) {
    CU_ASSERT_EQUAL(memory_holds("/dev/shm"), shm_is_memory());
    CU_ASSERT(!memory_holds("/proc") && !memory_holds("/not/there"));
}

TEST(the_peak_can_be_measured_from_now_on) {
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

// ---- The program ----------------------------------------------------------------------------------------------------

#ifdef __SANITIZE_ADDRESS__
static const bool plain = false; /* AddressSanitizer takes far more memory */
#else
static const bool plain = true;
#endif

#define LEAST " --gpu-batch-size 1 --num-gpu-batches 1"
#define TINY "bench --device host --model models/opt-tiny --prompt-len 40 --gen-len 6 --percent "
#define MEDIUM "bench --device host --model opt-125m --prompt-len 4 --gen-len 2 --percent "
#define LARGE "bench --device host --model opt-350m --prompt-len 4 --gen-len 2 --percent "

TEST(a_run_takes_no_more_than_the_plan_and_the_overhead) {
    static const char *const runs[] = {
        TINY "100 0 100 0 100 0",
        TINY "0 30 20 30 0 0 --cpu-cache-compute --threads 8",
        TINY "0 0 0 0 0 0 --compress-cache --attn-sparsity 0.3 --cpu-cache-compute",
        MEDIUM "100 0 100 0 100 0",
        MEDIUM "20 30 0 50 50 50 --compress-weight --threads 8",
    };
    for (size_t i = 0; i < COUNT(runs) && plain; i++) {
        const Result r = flexgen_done("%s --gpu-batch-size 8 --num-gpu-batches 2 --num-prompts 24 --json -", runs[i]);
        cJSON *json = cJSON_Parse(r.out);
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

/* In an address space that has little room beside the model, where no group can be made. */
TEST(an_input_fits_or_is_refused_in_one_line) {
    static const struct {
        const char *name, *begin, *repeated, *end, *args;
        size_t times;
        int status;
        const char *said;
    } inputs[] = {
        {"prompts", "", "Once upon a time they all went home\n", "", "generate --prompts @prompts", 1200000, 2,
         "prompts needs ... MiB more of memory, and this process may have "},
        {"wide.jsonl", "{\"prompt\": \"Hi\", \"x\": [0", ",0", "]}\n",
         "generate --strict --prompts @wide.jsonl --max-tokens 2 --percent 100 0 100 0 100 0" LEAST, 4000000, 0, ""},
        {"body.jsonl", "{\"prompt\": [0", ",0", "]}\n", "generate --strict --prompts @body.jsonl", 2500000, 1,
         "line 1: its JSON needs ... MiB more of memory"},
        {"long.jsonl", "{\"prompt\": \"Hi\", \"x\": [0", ",0", "]}\n", "generate --strict --prompts @long.jsonl", 9000000,
         1, "line 1: has more than 16 MiB; shorten it"},
        {"words", "", "{\"text\": \"Once upon\"}\n", "", "eval --last-word @words", 800000, 2,
         "words needs ... MiB more of memory"},
        {"text", "", "Once upon a time they all went home\n", "", "eval --perplexity @text", 1000000, 2,
         "text needs ... MiB more of memory"},
        {"endless", "", "", "", "eval --perplexity /dev/zero", 0, 2, "/dev/zero needs ... MiB more of memory"},
    };
    for (size_t i = 0; i < COUNT(inputs) && plain; i++) {
        open_directories();
        FILE *f = fopen(in_dir(capture, inputs[i].name), "w");
        fputs(inputs[i].begin, f);
        for (size_t n = 0; n < inputs[i].times; n++) fputs(inputs[i].repeated, f);
        fputs(inputs[i].end, f);
        CHECK(!fclose(f));
        with.memory = 200 * MB;
        assert_ends(flexgen("%s --model models/opt-tiny --device host --threads 1", inputs[i].args), inputs[i].status,
                    inputs[i].said);
        unlink(in_dir(capture, inputs[i].name));
    }
}

/* In so many MB of address space, or of data, a model of 690 MB or 250 MB, of which one batch is all. Each flag for a tier
 * alone and both: one leaves a little to the other, and where both are large, what is planned decides. The offload file is
 * mapped, so that it counts; in a directory that is memory, one of 580 MB counts as data, too. */
TEST(the_program_keeps_to_what_it_may_have) {
    static const struct {
        rlim_t memory, data;
        const char *args;
        int status;
        const char *said;
    } cases[] = {
        {512, 0, "generate --model models/opt-tiny --prompt x --max-tokens 4 --percent 100 0 100 0 100 0", 0, ""},
        {512, 0, LARGE "100 0 100 0 100 0", 2, "the GPU tier needs"},
        {512, 0, LARGE "0 0 100 0 100 0", 2, "the disk tier needs"},
        {512, 0, MEDIUM "0 0 100 0 100 0 --gpu-mem 150M --cpu-mem 100M", 2, "the disk tier needs ... may have tiers of"},
        {614, 0, MEDIUM "0 0 100 0 100 0 --gpu-mem 150M --cpu-mem 100M", 0, ""},
        {512, 0, LARGE "100 0 100 0 100 0 --gpu-mem 4G", 2, "the GPU tier needs ... may have tiers of"},
        {512, 0, LARGE "0 100 0 100 0 100 --cpu-mem 4G", 2, "the GPU tier needs ... may have tiers of"},
        {819, 0, LARGE "50 50 100 0 100 0 --gpu-mem 500M --cpu-mem 400M", 2, "tier needs ... may have tiers of"},
        {512, 0, MEDIUM "0 100 0 100 0 100 --gpu-mem 300M --cpu-mem 300M", 0, ""},
        {512, 0, MEDIUM "100 0 100 0 100 0 --gpu-mem 4G", 0, ""},
        {0, 512, LARGE "0 0 100 0 100 0 --offload-dir /dev/shm --disk-mem 4G", 2,
         "the disk tier needs ... may have tiers of"},
    };
    for (size_t c = 0; c < COUNT(cases) && plain; c++) {
        if (cases[c].data && !shm_is_memory()) continue;
        with.memory = cases[c].memory * 1000 * 1000, with.data = cases[c].data * 1000 * 1000;
        assert_ends(flexgen("%s" LEAST, cases[c].args), cases[c].status, cases[c].said);
    }
}

/* That is what a thread has by default with musl. No command here measures the machine first, which takes seconds. */
TEST(every_command_runs_with_a_stack_of_128_kib) {
#define T4 " --hardware hardware/t4.json"
    static const char *const runs[] = {
        "generate --model models/opt-tiny --device host --prompt x --max-tokens 4 --compress-weight --compress-cache "
        "--attn-sparsity 0.5 --percent 0 50 50 0 0 50" LEAST,
        "bench --device sim" T4 " --model opt-125m --prompt-len 32 --gen-len 4 --num-prompts 8 --trace @trace",
        "policy --model opt-30b" T4 " --explain --json @json --num-prompts 8",
        "policy --model opt-125m" T4 " --frontier --num-prompts 8",
        "policy --model opt-1.3b" T4 " --nodes 2 --prompt-len 32 --gen-len 4",
        "policy --model opt-30b" T4 " --cost-model paper --explain" LEAST,
        "eval --model models/opt-tiny --device host --perplexity models/prompts.txt --window 64 "
        "--percent 100 0 100 0 100 0" LEAST,
        "quantize --model models/opt-tiny --output @packed",
    };
    for (size_t i = 0; i < COUNT(runs) && plain; i++) {
        with.stack = 128 << 10;
        flexgen_done("%s", runs[i]);
    }
}

/* Without a machine that was measured before, and with it. In 16 MB there is no room even for measuring. */
TEST(every_command_ends_well_or_is_refused_in_a_small_group) {
    if (!plain) return;
    if (test_takes(0)) CU_ASSERT_EQUAL(system("scripts/limit_test.sh 16 max >&2"), 0);
    if (test_takes(1)) CU_ASSERT_EQUAL(system("scripts/limit_test.sh 64 50 'percent|quantize' >&2"), 0);
    if (test_takes(2)) CU_ASSERT_EQUAL(system("scripts/limit_test.sh 64 max 'input (prompts|wide|config)' >&2"), 0);
}

static size_t five_in_use(Gpu *gpu) { return (void)gpu, 5; }

TEST(a_gpu_tier_may_have_what_nobody_uses_or_will_use) {
    Gpu gpu = {.total = 9, .in_use = five_in_use};
    for (gpu.spare = 3; gpu.spare <= 5; gpu.spare++) CU_ASSERT_EQUAL(gpu_left(&gpu), gpu.spare == 3);
}
