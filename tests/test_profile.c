/* test_profile.c: that a measured machine is one, and where it is kept. No time is compared with any other (test_measure.c
 * does, on a machine whose times are known): only that everything has been measured. On a profile of small sizes; the suite
 * runs on the host device. */
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

/* h1, h2, nh; nseq, rows, tokens; bytes of cold memory and of the disk's file; seconds. One head, since packed pages of
 * whole groups are the smallest. */
static const ProfileSize tiny = {64, 256, 1, 3, 64, 256, 4 << 20, 2 << 20, .002};
static const Bytes capacity[NTIERS] = {(size_t)1 << 30, (size_t)2 << 30, (size_t)3 << 30};
static Error err;

/* A cache and an offload directory for one test; they are removed with the other temporary files. */
static char cache[300], folder[310], offload[300], path[600]; /* folder: of the cache, flexgen's; path: tiny's file there */
static char said[4000];                                       /* what the newest measurement has said of its progress */
static ThisMachine here;                                      /* of one thread */

/* Where the profile of tiny is kept for a machine. */
static const char *path_for(Gpu *gpu, const char *dir, int threads) {
    static char at[600];
    profile_path(at, sizeof at, &tiny, &(ThisMachine){.gpu = gpu, .offload_dir = dir, .threads = threads});
    return at;
}

static void fresh_cache(void) {
    strcpy(cache, temp_dir());
    strcpy(folder, in_dir(cache, "flexgen"));
    strcpy(offload, temp_dir());
    setenv("XDG_CACHE_HOME", cache, 1);
    here = (ThisMachine){.offload_dir = offload, .threads = 1, .capacity = capacity};
    strcpy(path, path_for(NULL, offload, 1));
}

static Hardware measured(int (*measure)(Hardware *, const ProfileSize *, const ThisMachine *, Error *),
                         const ProfileSize *size) {
    Hardware h;
    ThisMachine telling = here;
    telling.progress = fmemopen(said, sizeof said, "w");
    ASSERT_OK(measure(&h, size, &telling, &err));
    fclose(telling.progress);
    return h;
}

static bool positive(double x) { return x > 0 && isfinite(x); }

/* A machine's rates lie side by side, and so do its curves, which may end early on a slow machine. */
static void check_machine(Hardware h) {
    for (const double *rate = *h.bdw; rate <= &h.op_s; rate++) CU_ASSERT(positive(*rate));
    for (const Curve *c = &h.mm_rows; c <= &h.cpu_packed; c++) {
        CU_ASSERT(c->n >= 1);
        for (int i = 0; i < c->n; i++) CU_ASSERT(positive(c->rate[i]));
    }
    CU_ASSERT(h.copy_core_s >= 0 && isfinite(h.copy_core_s) && h.disk_core_s >= 0 && isfinite(h.disk_core_s));
    for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(h.mem[t], (double)capacity[t]);
    CU_ASSERT(h.shared_cores && strstr(h.name, "host device"));
}

/* With a narrow MLP q, k and v together are the widest product; where prompts have more rows than products, the results of
 * attention need more room; and the least memory that will do has heads that cannot be halved, too. */
TEST(everything_is_measured_at_every_size) {
    static const char *const models[] = {"opt-125m", "opt-1.3b"};
    ProfileSize sizes[5] = {tiny, tiny, tiny};
    fresh_cache();
    here.threads = 2;
    sizes[1].h2 = sizes[1].h1, sizes[1].tokens = sizes[1].rows;
    sizes[2].rows = 16;
    for (int m = 0; m < 2; m++) {
        const OptConfig config = opt_named(models[m]);
        ASSERT_OK(profile_size(&sizes[3 + m], NULL, &config, (size_t)8 << 20, &err));
        sizes[3 + m].seconds = tiny.seconds, sizes[3 + m].disk = tiny.disk;
    }
    for (int s = 0; s < 5; s++) {
        check_machine(measured(profile_measure, &sizes[s]));
        CU_ASSERT(strstr(said, "disk") && strstr(said, "linear") && strstr(said, "attention"));
        CU_ASSERT_EQUAL(count_files(offload), 0);
    }
}

/* What is kept is a hardware file with sources, and is found again, with the capacities of now. */
TEST(the_second_time_it_is_read) {
    const Bytes more[NTIERS] = {7, 8, 9};
    fresh_cache();
    Hardware h = measured(profile_machine, &tiny);
    CU_ASSERT(!access(path, R_OK) && !strncmp(path, cache, strlen(cache)));
    CU_ASSERT_EQUAL(count_files(folder), 1); /* and nothing half */
    char *text = contents(path, NULL);
    CU_ASSERT(strstr(text, "measured by flexgen profile on 20") && strstr(text, "sources"));
    free(text);
    h.op_s = 77;
    strcpy(h.name, "planted");
    profile_keep(&h, &tiny, &here);
    CU_ASSERT_EQUAL(count_files(folder), 1);
    here.capacity = more;
    const Hardware again = measured(profile_machine, &tiny);
    CU_ASSERT(again.op_s == 77 && strcmp(again.name, "planted") == 0);
    CU_ASSERT(again.gmem == 7 && again.cmem == 8 && again.nmem == 9);
}

TEST(a_damaged_file_is_measured_anew) {
    static const char *const damaged[] = {"", "{\"name\": \"x\"}"};
    Hardware h;
    fresh_cache();
    CHECK(mkdir(folder, 0700) == 0);
    for (int i = 0; i < 2; i++) {
        write_file(folder, strrchr(path, '/') + 1, damaged[i], strlen(damaged[i]));
        check_machine(measured(profile_machine, &tiny));
        ASSERT_OK(hardware_read(&h, path, &err));
        CU_ASSERT_EQUAL(count_files(folder), 1);
    }
}

/* The machine is measured; and one line says that it will be measured again, and why. */
static void check_unkept(const char *why) {
    check_machine(measured(profile_machine, &tiny));
    const char *line = strstr(said, "the next run will measure again"), *end = line ? strchr(line, '\n') : NULL;
    while (line && line > said && line[-1] != '\n') line--;
    CU_ASSERT(line && end && !end[1] && strstr(line, why));
}

/* The directory's name is taken by a file, the file's by a directory; there is no cache, or no home. */
TEST(a_cache_that_cannot_be_written_is_passed_over) {
    fresh_cache();
    write_file(cache, "flexgen", "", 0);
    check_unkept("Not a directory");
    fresh_cache();
    CU_ASSERT_FATAL(!mkdir(folder, 0700) && !mkdir(path, 0700));
    check_unkept("Is a directory");
    CU_ASSERT_EQUAL(count_files(folder), 1);
    setenv("XDG_CACHE_HOME", "/nonexistent/cache", 1);
    check_unkept("/nonexistent/cache/flexgen");
    unsetenv("XDG_CACHE_HOME"), unsetenv("HOME");
    CU_ASSERT_STRING_EQUAL(path_for(NULL, offload, 1), "");
    check_unkept("HOME");
    setenv("HOME", "/a/home", 1);
    CU_ASSERT_EQUAL(strncmp(path_for(NULL, offload, 1), "/a/home/.cache/flexgen/hardware-", 32), 0);
}

static void *no_memory(size_t size) { return out_of_memory(1, size); }

/* Whether memory runs out while it is written, or a run before was killed then. */
TEST(no_half_of_a_profile_stays) {
    Hardware h;
    int status;
    fresh_cache();
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    profile_keep(&h, &tiny, &here);
    CU_ASSERT_FATAL(!access(path, R_OK) && count_files(folder) == 1 && !unlink(path));
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = no_memory, .free_fn = free});
        profile_keep(&h, &tiny, &here);
        _exit(0);
    }
    CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT_EQUAL(count_files(folder), 0);
    leave_unfinished(path, false);
    CU_ASSERT_EQUAL(count_files(folder), 1);
    profile_keep(&h, &tiny, &here);
    CU_ASSERT(!access(path, R_OK) && count_files(folder) == 1);
}

TEST(the_key_stands_for_threads_gpu_and_disk) {
    Gpu gpu = {.name = "a GPU"}, other = {.name = "another"};
    char tight[20];
    fresh_cache();
    CU_ASSERT_STRING_EQUAL(path, path_for(NULL, temp_dir(), 1)); /* another directory of the same disk */
    CU_ASSERT_STRING_NOT_EQUAL(path, path_for(NULL, offload, 2));
    CU_ASSERT_STRING_NOT_EQUAL(path, path_for(NULL, "/proc", 1));
    CU_ASSERT_STRING_NOT_EQUAL(path, path_for(&gpu, offload, 1));
    strcpy(path, path_for(&gpu, offload, 1));
    CU_ASSERT_STRING_NOT_EQUAL(path, path_for(&other, offload, 1));
    profile_path(tight, sizeof tight, &tiny, &here); /* no room for it */
    CU_ASSERT_STRING_EQUAL(tight, "");
}

/* The notice goes to progress. It is not kept, since the disk may be back the next time. */
TEST(without_a_disk_the_rest_is_measured) {
    const Bytes all[NTIERS] = {1, 1, SIZE_MAX / 4};
    ProfileSize large = tiny;
    large.disk = (size_t)1 << 50;
    fresh_cache();
    for (int i = 0; i < 2; i++) {
        here.offload_dir = i ? offload : "/nonexistent/dir", here.capacity = i ? all : capacity;
        const Hardware h = measured(profile_machine, i ? &large : &tiny);
        CU_ASSERT(strstr(said, "measured without a disk: ") && strstr(said, i ? "cannot reserve" : "/nonexistent/dir"));
        CU_ASSERT(positive(h.mm_flops[0]) && positive(h.ctog_bdw[0]) && h.nmem == 1 && h.dtoc_bdw[0] < 1e7);
        CU_ASSERT_EQUAL(count_files(cache), 0);
    }
}

/* Sizes fit both upper tiers, and what is measured fits them: a product reads half of the cold memory. The sizes of a layer
 * keep their ratio. */
TEST(where_memory_is_short_less_is_measured_with) {
    static const char *const models[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-175b"};
    for (int m = 0; m < 4; m++) {
        const OptConfig config = opt_named(models[m]);
        bool fits = true, all = false;
        for (size_t memory = (size_t)8 << 30; memory; memory = memory * 3 / 4) {
            ProfileSize s;
            const bool fitted = fits;
            fits = profile_size(&s, NULL, &config, memory, &err) == 0;
            CU_ASSERT(fitted || !fits); /* with less memory not either */
            CU_ASSERT(fits || memory <= (size_t)8 << 20);
            if (!fits) {
                CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "measuring this machine needs"));
                continue;
            }
            const size_t widest = imax(3 * s.h1, s.h2), product = sizeof(f16) * s.h1 * widest;
            const size_t row = sizeof(float) * size_max(s.rows * widest, (size_t)s.tokens * s.h1);
            CU_ASSERT(2 * (s.cold + 2 * row) <= memory && 2 * product <= s.cold && s.cold % 4096 == 0);
            CU_ASSERT(s.h1 % s.nh == 0 && s.h2 == 4 * s.h1 && s.rows >= 1 && s.tokens >= 16);
            all = all || s.rows == 1024;
        }
        CU_ASSERT(all && !fits);
    }
}
