/* main.c: runs every suite, or those named on the command line; the exit status is the number of failures.
 *
 *     run_tests [--device cuda] [--every N] [SUITE...]
 *
 * --device cuda: the suites `schedule` and `lanes` run on the GPU. --every N: the former takes every N-th of its
 * combinations. The suite `cuda` is there where the program was linked with flexgen.cu, for a GPU or for the emulation. */
#include <CUnit/Basic.h>
#include <dirent.h>
#include <ftw.h>
#include <unistd.h>

#include "tests.h"

#define X(name) extern CU_TestInfo tests_##name[];
SUITES
#undef X

static struct {
    const char *name;
    CU_TestInfo *tests;
} suites[] = {
#define X(name) {#name, tests_##name},
    SUITES
#undef X
};

static char temp_root[256];
static int temp_count;

const char *temp_dir(void) {
    static char dir[300];
    if (!temp_root[0]) {
        const char *base = getenv("TMPDIR");
        snprintf(temp_root, sizeof temp_root, "%s/flexgen-test-XXXXXX", base ? base : "/tmp");
        CHECK(mkdtemp(temp_root));
    }
    snprintf(dir, sizeof dir, "%s/%d", temp_root, temp_count++);
    char command[400];
    snprintf(command, sizeof command, "mkdir '%s'", dir);
    CHECK(system(command) == 0);
    return dir;
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw) {
    (void)st, (void)flag, (void)ftw;
    return remove(path);
}

int count_files(const char *dir) {
    int n = -2; /* . and .. */
    DIR *d = opendir(dir);
    CHECK(d);
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

void write_file(const char *dir, const char *name, const void *bytes, size_t len) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, len, f) == len && fclose(f) == 0);
}

double max_norm_error(const float *a, const float *b, size_t n) {
    double diff = 0, ref = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - b[i]);
        if (isnan(d)) return NAN;
        if (d > diff) diff = d;
        if (fabs(b[i]) > ref) ref = fabs(b[i]);
    }
    return ref > 0 ? diff / ref : diff;
}

Hardware test_fast_machine(void) {
    Hardware h = {.name = "fast", .gmem = 1e18, .cmem = 1e18, .nmem = 1e18};
    for (int p = 0; p < 2; p++) {
        h.ctog_bdw[p] = h.gtoc_bdw[p] = h.dtoc_bdw[p] = h.ctod_bdw[p] = 1e25;
        h.mm_flops[p] = h.bmm_flops[p] = h.cpu_flops[p] = 1e25;
    }
    return h;
}

float test_random(uint64_t *state) {
    uint64_t z = (*state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (float)((double)((z ^ (z >> 31)) >> 40) / 8388608.0 - 1.0);
}

Gpu *test_gpu;
int test_every = 1;

/* Takes the flags; what is left are names of suites. */
static int parse_flags(int argc, char **argv) {
    int names = 0;
    for (int a = 1; a < argc; a++) {
        Error err;
        if (!strcmp(argv[a], "--device") && a + 1 < argc && !strcmp(argv[a + 1], "cuda")) {
            a++;
            if (!cuda_open_gpu) fail(&err, EXIT_FAILED, "this program was linked without flexgen.cu");
            if (!cuda_open_gpu || !(test_gpu = cuda_open_gpu(&err))) {
                fprintf(stderr, "--device cuda: %s\n", err.text);
                exit(EXIT_FAILED);
            }
        } else if (!strcmp(argv[a], "--every") && a + 1 < argc && atoi(argv[a + 1]) > 0) {
            test_every = atoi(argv[++a]);
        } else if (argv[a][0]) {
            argv[++names] = argv[a];
        }
    }
    return names;
}

static bool is_chosen(const char *suite, char **names, int n) {
    if (!cuda_open_gpu && !strcmp(suite, "cuda")) return false;
    for (int i = 0; i < n; i++)
        if (!strcmp(suite, names[i])) return true;
    return !n;
}

int main(int argc, char **argv) {
    int nsuites = (int)(sizeof suites / sizeof suites[0]), chosen = 0, names = parse_flags(argc, argv);
    if (CU_initialize_registry() != CUE_SUCCESS) return 1;
    for (int i = 0; i < nsuites; i++) {
        if (!is_chosen(suites[i].name, argv + 1, names)) continue;
        CU_SuiteInfo info[] = {{suites[i].name, NULL, NULL, NULL, NULL, suites[i].tests}, CU_SUITE_INFO_NULL};
        if (CU_register_suites(info) != CUE_SUCCESS) return 1;
        chosen++;
    }
    if (!chosen) {
        fprintf(stderr, "no such suite here: %s; the suites are:", names ? argv[1] : "");
        for (int i = 0; i < nsuites; i++) fprintf(stderr, " %s", suites[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    CU_basic_set_mode(CU_BRM_VERBOSE);
    CU_basic_run_tests();
    unsigned failures = CU_get_number_of_failures();
    CU_cleanup_registry();
    if (test_gpu) test_gpu->close(test_gpu);
    if (temp_root[0]) nftw(temp_root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return failures > 255 ? 255 : (int)failures;
}
