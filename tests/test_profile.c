/* test_profile.c: that a measured machine is one, and where it is kept. No time is compared with any other: only that
 * everything has been measured. On a profile of small sizes; the suite runs on the host device. */
#include <cjson/cJSON.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

static const ProfileSize tiny = {.h1 = 64,
                                 .h2 = 256,
                                 .nh = 1, /* whole groups, as packed pages are the smallest */
                                 .nseq = 3,
                                 .rows = 64,
                                 .tokens = 256,
                                 .cold = (size_t)4 << 20,
                                 .disk = (size_t)2 << 20,
                                 .seconds = .002};
static const Bytes capacity[NTIERS] = {(size_t)1 << 30, (size_t)2 << 30, (size_t)3 << 30};
static Error err;

/* A cache for one test; it is removed with the other temporary files. */
static void fresh_cache(char *dir, size_t size) {
    snprintf(dir, size, "%s", temp_dir());
    setenv("XDG_CACHE_HOME", dir, 1);
}

static int machine(Hardware *h, const char *offload, int threads) {
    return profile_machine(h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = threads, .capacity = capacity},
                           &err);
}

static bool positive(double x) { return x > 0 && isfinite(x); }

/* It may end early on a slow machine. */
static void check_curve(const Curve *c, int first, int most) {
    CU_ASSERT(c->n >= 1 && c->n <= most && c->size[0] == first);
    for (int i = 0; i < c->n; i++) CU_ASSERT(positive(c->rate[i]) && c->size[i] > (i ? c->size[i - 1] : 0));
}

static void check_machine(const Hardware *h) {
    for (int p = 0; p < 2; p++) {
        CU_ASSERT(positive(h->ctog_bdw[p]) && positive(h->gtoc_bdw[p]) && positive(h->dtoc_bdw[p]));
        CU_ASSERT(positive(h->ctod_bdw[p]) && positive(h->mm_flops[p]) && positive(h->bmm_flops[p]));
        CU_ASSERT(positive(h->cpu_flops[p]));
    }
    CU_ASSERT(positive(h->gpu_bdw) && positive(h->cpu_bdw) && positive(h->op_s) && h->shared_cores);
    CU_ASSERT(h->copy_core_s >= 0 && isfinite(h->copy_core_s) && h->disk_core_s >= 0 && isfinite(h->disk_core_s));
    CU_ASSERT(h->gmem == 0x1p30 && h->cmem == 0x1p31 && h->nmem == 3 * 0x1p30);
    CU_ASSERT(h->name[0] && strstr(h->name, "host device"));
}

/* q, k and v together are its widest product. */
static void a_layer_with_a_narrow_mlp_is_measured(void) {
    Hardware h;
    ProfileSize narrow = tiny;
    narrow.h2 = narrow.h1, narrow.tokens = narrow.rows;
    ASSERT_OK(
        profile_measure(&h, &narrow, &(ThisMachine){.offload_dir = temp_dir(), .threads = 2, .capacity = capacity}, &err));
    check_machine(&h);
}

/* The results of attention then need more room than those of products. */
static void prompts_of_more_rows_than_products_are_measured(void) {
    Hardware h;
    ProfileSize few = tiny;
    few.rows = 16;
    ASSERT_OK(
        profile_measure(&h, &few, &(ThisMachine){.offload_dir = temp_dir(), .threads = 2, .capacity = capacity}, &err));
    check_machine(&h);
}

static void everything_is_measured(void) {
    char offload[300], said[4000] = "";
    Hardware h;
    FILE *progress = fmemopen(said, sizeof said, "w");
    snprintf(offload, sizeof offload, "%s", temp_dir());
    ASSERT_OK(profile_measure(
        &h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 2, .capacity = capacity, .progress = progress}, &err));
    fclose(progress);
    check_machine(&h);
    check_curve(&h.mm_rows, 1, 7); /* 1 to 64 */
    check_curve(&h.bmm_tokens[0], 16, 3);
    check_curve(&h.bmm_tokens[1], 16, 3);
    check_curve(&h.cpu_tokens, 16, 3);
    check_curve(&h.mm_packed, 1, 7);
    check_curve(&h.bmm_packed, 16, 3);
    check_curve(&h.cpu_packed, 16, 3);
    CU_ASSERT(strstr(said, "disk") && strstr(said, "linear") && strstr(said, "attention"));
    CU_ASSERT_EQUAL(count_files(offload), 0);
}

static void a_measured_machine_is_a_hardware_file_with_sources(void) {
    char path[400];
    Hardware h, back;
    ASSERT_OK(
        profile_measure(&h, &tiny, &(ThisMachine){.offload_dir = temp_dir(), .threads = 1, .capacity = capacity}, &err));
    snprintf(path, sizeof path, "%s/hw.json", temp_dir());
    FILE *f = fopen(path, "w");
    profile_write(&h, f);
    CU_ASSERT_EQUAL(fclose(f), 0);
    ASSERT_OK(hardware_read(&back, path, &err));
    CU_ASSERT(memcmp(&h.gmem, &back.gmem, offsetof(Hardware, shared_cores) - offsetof(Hardware, gmem)) == 0);
    CU_ASSERT(memcmp(&h.copy_core_s, &back.copy_core_s, sizeof h - offsetof(Hardware, copy_core_s)) == 0);
    CU_ASSERT_STRING_EQUAL(h.name, back.name);
    CU_ASSERT(back.shared_cores);
    size_t len;
    char *text = file_read(path, 1 << 20, &len, &err);
    CU_ASSERT(strstr(text, "measured by flexgen profile on 20") && strstr(text, "sources"));
    free(text);
}

/* What is kept is found again, with the capacities of now. */
static void the_second_time_it_is_read(void) {
    char cache[300], path[600], offload[300];
    Hardware h, again;
    const Bytes more[NTIERS] = {7, 8, 9};
    fresh_cache(cache, sizeof cache);
    snprintf(offload, sizeof offload, "%s", temp_dir());
    ASSERT_OK(machine(&h, offload, 1));
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    CU_ASSERT_EQUAL(access(path, R_OK), 0);
    CU_ASSERT_EQUAL(strncmp(path, cache, strlen(cache)), 0);
    snprintf(cache + strlen(cache), 20, "/flexgen");
    CU_ASSERT_EQUAL(count_files(cache), 1); /* and nothing half */
    h.op_s = 77;
    strcpy(h.name, "planted");
    profile_keep(&h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    CU_ASSERT_EQUAL(count_files(cache), 1);
    ASSERT_OK(profile_machine(&again, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1, .capacity = more}, &err));
    CU_ASSERT(again.op_s == 77 && strcmp(again.name, "planted") == 0);
    CU_ASSERT(again.mm_rows.n == h.mm_rows.n && again.ctog_bdw[0] == h.ctog_bdw[0]);
    CU_ASSERT(again.gmem == 7 && again.cmem == 8 && again.nmem == 9);
}

static void a_damaged_file_is_measured_anew(void) {
    char cache[300], path[600], offload[300];
    static const char *const damaged[] = {"", "{\"name\": ", "{\"name\": \"x\"}", "[]"};
    Hardware h;
    fresh_cache(cache, sizeof cache);
    snprintf(offload, sizeof offload, "%s", temp_dir());
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    snprintf(cache + strlen(cache), 20, "/flexgen");
    CU_ASSERT_EQUAL_FATAL(mkdir(cache, 0700), 0);
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) {
        write_file(cache, strrchr(path, '/') + 1, damaged[i], strlen(damaged[i]));
        ASSERT_OK(machine(&h, offload, 1));
        check_machine(&h);
        ASSERT_OK(hardware_read(&h, path, &err));
        CU_ASSERT_EQUAL(count_files(cache), 1);
    }
}

/* One line says that the machine will be measured again, and why. */
static void check_unkept(const char *offload, const char *why) {
    char said[2000] = "";
    Hardware h;
    FILE *progress = fmemopen(said, sizeof said, "w");
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    profile_keep(&h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1, .progress = progress});
    fclose(progress);
    CU_ASSERT(strstr(said, "the next run will measure again") && strstr(said, why));
    CU_ASSERT(said[0] && strchr(said, '\n') == said + strlen(said) - 1);
}

/* The file's name is taken by a directory, the directory's by a file; there is no home. */
static void a_cache_that_cannot_be_written_is_passed_over(void) {
    char cache[300], path[600], offload[300];
    Hardware h;
    snprintf(offload, sizeof offload, "%s", temp_dir());
    fresh_cache(cache, sizeof cache);
    write_file(cache, "flexgen", "", 0);
    ASSERT_OK(machine(&h, offload, 1));
    check_machine(&h);
    check_unkept(offload, "Not a directory");
    fresh_cache(cache, sizeof cache);
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    snprintf(cache + strlen(cache), 20, "/flexgen");
    CU_ASSERT_EQUAL_FATAL(mkdir(cache, 0700), 0);
    CU_ASSERT_EQUAL_FATAL(mkdir(path, 0700), 0);
    ASSERT_OK(machine(&h, offload, 1));
    check_machine(&h);
    check_unkept(offload, "Is a directory");
    CU_ASSERT_EQUAL(count_files(cache), 1);
    setenv("XDG_CACHE_HOME", "/nonexistent/cache", 1);
    ASSERT_OK(machine(&h, offload, 1));
    check_unkept(offload, "/nonexistent/cache/flexgen");
    char *home = getenv("HOME") ? xstrdup(getenv("HOME")) : NULL;
    unsetenv("XDG_CACHE_HOME"), unsetenv("HOME");
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    CU_ASSERT_EQUAL(path[0], 0);
    ASSERT_OK(machine(&h, offload, 1));
    check_unkept(offload, "HOME");
    setenv("HOME", "/a/home", 1);
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    CU_ASSERT_EQUAL(strncmp(path, "/a/home/.cache/flexgen/hardware-", 32), 0);
    if (home) setenv("HOME", home, 1);
    free(home);
}

static void *no_memory(size_t size) { return out_of_memory(1, size); }

/* Whether memory runs out while it is written, or a run before was killed then. */
static void no_half_of_a_profile_stays(void) {
    char cache[300], path[600], half[700], offload[300];
    Hardware h;
    int status;
    fresh_cache(cache, sizeof cache);
    snprintf(offload, sizeof offload, "%s", temp_dir());
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    profile_keep(&h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    snprintf(cache + strlen(cache), 20, "/flexgen");
    CU_ASSERT_FATAL(!access(path, R_OK) && count_files(cache) == 1 && !unlink(path));
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = no_memory, .free_fn = free});
        profile_keep(&h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
        _exit(0);
    }
    CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT_EQUAL(count_files(cache), 0);
    snprintf(half, sizeof half, "%s.tmp-1", strrchr(path, '/') + 1);
    write_file(cache, half, "{", 1);
    profile_keep(&h, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    CU_ASSERT(!access(path, R_OK) && count_files(cache) == 1);
}

static void the_key_stands_for_threads_gpu_and_disk(void) {
    char cache[300], one[600], path[600], offload[300];
    Gpu gpu = {.name = "a GPU"}, other = {.name = "another"};
    fresh_cache(cache, sizeof cache);
    snprintf(offload, sizeof offload, "%s", temp_dir());
    profile_path(one, sizeof one, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1});
    profile_path(path, sizeof path, &tiny,
                 &(ThisMachine){.offload_dir = temp_dir(), .threads = 1}); /* another directory of the same disk */
    CU_ASSERT_STRING_EQUAL(one, path);
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 2});
    CU_ASSERT_STRING_NOT_EQUAL(one, path);
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.offload_dir = "/proc", .threads = 1});
    CU_ASSERT_STRING_NOT_EQUAL(one, path);
    profile_path(path, sizeof path, &tiny, &(ThisMachine){.gpu = &gpu, .offload_dir = offload, .threads = 1});
    CU_ASSERT_STRING_NOT_EQUAL(one, path);
    profile_path(one, sizeof one, &tiny, &(ThisMachine){.gpu = &other, .offload_dir = offload, .threads = 1});
    CU_ASSERT_STRING_NOT_EQUAL(one, path);
    profile_path(path, 20, &tiny, &(ThisMachine){.offload_dir = offload, .threads = 1}); /* no room for it */
    CU_ASSERT_EQUAL(path[0], 0);
}

/* The notice goes to progress. It is not kept, since the disk may be back the next time. */
static void without_a_disk_the_rest_is_measured(void) {
    char cache[300], said[4000], path[400];
    const Bytes all[NTIERS] = {1, 1, SIZE_MAX / 4};
    const char *const dirs[] = {"/nonexistent/dir", temp_dir()}, *const why[] = {"/nonexistent/dir", "cannot reserve"};
    Hardware h, back;
    fresh_cache(cache, sizeof cache);
    for (int i = 0; i < 2; i++) {
        ProfileSize size = tiny;
        if (i) size.disk = (size_t)1 << 50;
        FILE *progress = fmemopen(said, sizeof said, "w");
        ASSERT_OK(profile_machine(
            &h, &size,
            &(ThisMachine){.offload_dir = dirs[i], .threads = 1, .capacity = i ? all : capacity, .progress = progress},
            &err));
        fclose(progress);
        CU_ASSERT(strstr(said, "measured without a disk: ") && strstr(said, why[i]));
        CU_ASSERT(positive(h.mm_flops[0]) && positive(h.ctog_bdw[0]) && h.nmem == 1 && h.dtoc_bdw[0] < 1e7);
        CU_ASSERT_EQUAL(count_files(cache), 0);
    }
    snprintf(path, sizeof path, "%s/hw.json", temp_dir());
    FILE *f = fopen(path, "w");
    profile_write(&h, f);
    CU_ASSERT_EQUAL(fclose(f), 0);
    ASSERT_OK(hardware_read(&back, path, &err));
    host_set_threads(0); /* for the suites behind this one */
}

/* Sizes fit both upper tiers, and what is measured fits them: a product reads half of the cold memory. */
static void check_size(const ProfileSize *s, size_t memory) {
    const size_t product = sizeof(f16) * s->h1 * imax(3 * s->h1, s->h2);
    const size_t row = sizeof(float) * imax(s->rows * imax(3 * s->h1, s->h2), s->tokens * s->h1);
    CU_ASSERT(2 * (s->cold + 2 * row) <= memory && 2 * product <= s->cold && s->cold % 4096 == 0);
    CU_ASSERT(s->h1 % s->nh == 0 && s->rows >= 1 && s->tokens >= 16);
}

static void where_memory_is_short_less_is_measured_with(void) {
    static const char *const models[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-175b"};
    for (int m = 0; m < 4; m++) {
        OptConfig config;
        bool fits = true, all = false;
        CU_ASSERT_EQUAL(opt_config_by_name(&config, models[m]), 0);
        for (size_t memory = (size_t)8 << 30; memory; memory = memory * 3 / 4) {
            ProfileSize size;
            const bool fitted = fits;
            fits = profile_size(&size, NULL, &config, memory, &err) == 0;
            CU_ASSERT(fitted || !fits); /* with less memory not either */
            if (fits) check_size(&size, memory), all = all || size.rows == 1024;
            if (!fits) CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "measuring this machine needs"));
            if (memory > (size_t)8 << 20) CU_ASSERT(fits);
        }
        CU_ASSERT(all && !fits);
    }
}

/* Of heads that cannot be halved, too. */
static void with_the_least_memory_everything_is_measured(void) {
    static const char *const models[] = {"opt-125m", "opt-1.3b"};
    for (int m = 0; m < 2; m++) {
        OptConfig config;
        ProfileSize size;
        Hardware h;
        CU_ASSERT_EQUAL(opt_config_by_name(&config, models[m]), 0);
        ASSERT_OK(profile_size(&size, NULL, &config, (size_t)8 << 20, &err));
        size.seconds = tiny.seconds, size.disk = tiny.disk;
        ASSERT_OK(profile_measure(&h, &size, &(ThisMachine){.offload_dir = temp_dir(), .threads = 2, .capacity = capacity},
                                  &err));
        check_machine(&h);
    }
}

CU_TestInfo tests[] = {
    {"everything is measured", everything_is_measured},
    {"a layer with a narrow MLP is measured", a_layer_with_a_narrow_mlp_is_measured},
    {"prompts of more rows than products are measured", prompts_of_more_rows_than_products_are_measured},
    {"a measured machine is a hardware file with sources", a_measured_machine_is_a_hardware_file_with_sources},
    {"the second time it is read", the_second_time_it_is_read},
    {"a damaged file is measured anew", a_damaged_file_is_measured_anew},
    {"a cache that cannot be written is passed over", a_cache_that_cannot_be_written_is_passed_over},
    {"no half of a profile stays", no_half_of_a_profile_stays},
    {"the key stands for threads, GPU and disk", the_key_stands_for_threads_gpu_and_disk},
    {"without a disk the rest is measured", without_a_disk_the_rest_is_measured},
    {"where memory is short less is measured with", where_memory_is_short_less_is_measured_with},
    {"with the least memory everything is measured", with_the_least_memory_everything_is_measured},
    CU_TEST_INFO_NULL,
};
