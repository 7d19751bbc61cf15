/* main.c: runs the one suite that this program is linked with; the exit status is 1 when a test failed.
 *
 *     test_NAME [--every N] [--only TEST]...
 *
 * A program that is linked with flexgen.cu, for a GPU or for the emulation, tests the cuda device. Without it the suite
 * `cuda` has nothing to test: its tests are counted as inactive. --every N: the suite takes every N-th combination of its
 * long lists; TEST_TURN in the environment is the number of one that it takes, where others take turns. --only: of the
 * tests only those of these names run (make grade). */
#include <CUnit/Basic.h>

#include "tests.h"

Gpu *test_gpu;
int test_every = 1;
enum { MOST_ONLY = 8 };
static const char *only[MOST_ONLY]; /* the tests to run */
static int nonly;                   /* 0: all */

bool test_takes(int number) {
    const char *turn = getenv("TEST_TURN");
    const long taken = turn ? atol(turn) % test_every : 0;
    static bool said;
    if (test_every > 1 && !said) printf("\n    TEST_TURN=%ld, of %d ", taken, test_every);
    said = true;
    return number % test_every == taken;
}

enum { MOST_TESTS = 150 };
static CU_TestInfo tests[MOST_TESTS + 1]; /* NULL is behind the last */
static int ntests;

void test_add(const char *name, void (*run)(void)) {
    char *sentence = strdup(name);
    CHECK(sentence && ntests < MOST_TESTS);
    for (char *at = sentence; *at; at++)
        if (*at == '_') *at = ' ';
    tests[ntests++] = (CU_TestInfo){sentence, run};
}

/* Of the emulation (tests/cuda_cpu.h) under AddressSanitizer. */
void cuda_cpu_forbid(const void *p, size_t bytes) __attribute__((weak));

/* Without flexgen.cu nothing of the suite `cuda` can run; others know themselves what they miss. The tests that will run
 * are listed for suite.sh, which says what did not run when the suite ends early. */
static void choose_tests(CU_pSuite suite) {
    const bool impossible = !cuda_open_gpu && !strcmp(suite->pName, "cuda");
    const char *said = NULL;
    int found = 0;
    for (CU_pTest test = suite->pTest; test; test = test->pNext) {
        const char *missing = test_missing ? test_missing(test->pName) : NULL;
        bool chosen = !nonly;
        for (int o = 0; o < nonly; o++) chosen |= !strcmp(test->pName, only[o]); /* CU_get_test does not tell a from A */
        if (missing && missing != said) printf("SKIP: %s\n", said = missing);
        if (chosen && !missing && !impossible)
            printf("  Listed: %s\n", test->pName);
        else
            CU_set_test_active(test, CU_FALSE);
        found += chosen;
    }
    if (!nonly || found == nonly) return;
    fprintf(stderr, "no such test: %s\n", nonly > 1 ? "one of several" : only[0]);
    exit(EXIT_USAGE);
}

int main(int argc, char **argv) {
    const char *program = strrchr(argv[0], '/'), *name = strstr(program ? program : argv[0], "test_");
    Error err;
    host_set_threads(0);
    for (int a = 1; a < argc; a++)
        if (!strcmp(argv[a], "--every") && a + 1 < argc && atoi(argv[a + 1]) > 0) {
            test_every = atoi(argv[++a]);
        } else if (!strcmp(argv[a], "--only") && a + 1 < argc && nonly < MOST_ONLY) {
            only[nonly++] = argv[++a];
        } else {
            fprintf(stderr, "%s: unknown flag %s; it takes --every N and --only TEST\n", argv[0], argv[a]);
            return EXIT_USAGE;
        }
    setvbuf(stdout, NULL, _IONBF, 0); /* a crash must not take the name of its test with it */
    if (cuda_open_gpu) {
        test_gpu = cuda_open_gpu(&err);
        if (!test_gpu) return fprintf(stderr, "%s\n", err.text), EXIT_FAILED;
        test_gpu->forbid = cuda_cpu_forbid;
    }
    if (CU_initialize_registry() != CUE_SUCCESS) return EXIT_FAILED;
    CU_SuiteInfo info[] = {{name ? name + strlen("test_") : argv[0], NULL, NULL, NULL, NULL, tests}, CU_SUITE_INFO_NULL};
    if (CU_register_suites(info) != CUE_SUCCESS) return EXIT_FAILED;
    choose_tests(CU_get_suite_at_pos(1));
    CU_set_fail_on_inactive(CU_FALSE);
    CU_basic_set_mode(CU_BRM_VERBOSE);
    CU_basic_run_tests();
    unsigned failures = CU_get_number_of_failures();
    CU_cleanup_registry();
    if (test_gpu) test_gpu->close(test_gpu);
    return failures ? EXIT_FAILED : 0;
}
