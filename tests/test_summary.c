/* test_summary.c: how suites are run and counted (scripts/suite.sh, scripts/summary.sh). What fails, crashes, hangs or ends
 * badly behind its last test must be seen. The suites here are scripts that print what CUnit prints. Then how the program
 * is measured: its speed (scripts/bench.sh), its kernels (scripts/gpu_kernels.sh), its size (scripts/size.py),
 * and how much the suites see of it (scripts/mutate.py). */
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/started.h"

static char dir[300]; /* with the programs and their logs */

#define LISTED "echo '  Listed: first'; echo '  Listed: second'; echo '  Listed: third'\n"
#define TOTALS(passed, failed)                                                   \
    "cat <<'END'\n\nRun Summary:    Type  Total    Ran Passed Failed Inactive\n" \
    "              suites      1      1    n/a      0        0\n"                \
    "               tests      3      3      " #passed "      " #failed          \
    "        0\n"                                                                \
    "             asserts     30     30     " #passed "0      " #failed "      n/a\n\nElapsed time = 0\nEND\n"

static const struct {
    const char *name, *script;
    int status; /* of the suite, which is that of suite.sh */
} suites[] = {
    {"good", LISTED "echo '  Test: first ...passed'\n" TOTALS(3, 0), 0},
    {"red", LISTED "echo '  Test: first ...passed'; echo '  Test: second ...FAILED'\n" TOTALS(2, 1) "exit 1\n", 1},
    {"leaks", LISTED "echo '  Test: first ...passed'\n" TOTALS(3, 0) "exit 23\n", 23},
    {"crashes", LISTED "echo '  Test: first ...passed'; echo '  Test: second ...'; exit 139\n", 139},
    {"hangs", LISTED "echo '  Test: first ...'; exec sleep 60\n", 124},
    {"leaves", LISTED "sleep 60 &\n" TOTALS(3, 0), 0},
};
enum { SUITES = sizeof suites / sizeof *suites, LEAVES = SUITES - 1 };

/* Exit status, and in *said, which the caller frees, what a command of the shell prints. */
static int said_by(char **said, const char *format, const char *words) {
    char command[3000], text[2000];
    snprintf(text, sizeof text, format, words);
    snprintf(command, sizeof command, "cd . && { %s; } >%s/said 2>&1", text, dir);
    const int status = system(command);
    *said = contents(in_dir(dir, "said"), NULL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Runs the suite once; its log is DIR/NAME.log. */
static int run_suite(int s) {
    char words[1000], *said;
    write_file(dir, suites[s].name, suites[s].script, strlen(suites[s].script));
    snprintf(words, sizeof words, "%s/%s.log sh %s/%s", dir, suites[s].name, dir, suites[s].name);
    const int status = said_by(&said, "unset GOING_ON; SUITE_SECONDS=1 scripts/suite.sh %s", words);
    free(said);
    return status;
}

static void run_suites(void) {
    if (dir[0]) return;
    snprintf(dir, sizeof dir, "%s", temp_dir());
    for (int s = 0; s < SUITES; s++) {
        const int status = run_suite(s);
        if (status != suites[s].status) fprintf(stderr, "\n    suite.sh %s: exit status %d", suites[s].name, status);
        CU_ASSERT_EQUAL(status, suites[s].status);
    }
}

/* summary.sh of these suites fails or not, and says all of the parts. */
static void expect(const char *names, int status, int passed, int failed, int skipped, const char *part) {
    char words[1000] = "", last[60], *said, all[200];
    snprintf(all, sizeof all, "%s", names);
    for (char *name = strtok(all, " "); name; name = strtok(NULL, " "))
        snprintf(words + strlen(words), sizeof words - strlen(words), " %s/%s.log", dir, name);
    const int exited = said_by(&said, "scripts/summary.sh %s", words);
    snprintf(last, sizeof last, "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    if (exited != status || !strstr(said, last) || !strstr(said, part))
        fprintf(stderr, "\n    %s: exit status %d: %s", names, exited, said);
    CU_ASSERT_EQUAL(exited, status);
    CU_ASSERT_PTR_NOT_NULL(strstr(said, last));
    CU_ASSERT_PTR_NOT_NULL(strstr(said, part));
    CU_ASSERT_EQUAL(strstr(said, "FAILED: ") != NULL, status != 0);
    free(said);
}

static void a_summary_adds_up_what_its_suites_passed(void) {
    run_suites();
    expect("good", 0, 3, 0, 0, "  Test: first ...passed\n");
    expect("good good good", 0, 9, 0, 0, "asserts     90     90     90      0      n/a\n");
}

static void a_failure_is_named_and_fails_the_summary(void) {
    run_suites();
    expect("red", 1, 2, 1, 0, "/red, exit status 1\n    Test: second\n");
    expect("good red good", 1, 8, 1, 0, "/red, exit status 1\n    Test: second\n");
}

/* As one in which a sanitizer finds a leak when it ends. */
static void a_suite_that_ends_badly_behind_its_tests_fails_the_summary(void) {
    run_suites();
    expect("leaks", 1, 3, 1, 0, "/leaks, at its end, exit status 23\n");
    expect("leaks good", 1, 6, 1, 0, "/leaks, at its end, exit status 23\n");
}

/* The test in which it ended has failed, and those behind it are skipped. */
static void a_suite_that_ends_early_fails_the_summary(void) {
    run_suites();
    expect("crashes", 1, 1, 1, 1, "/crashes: died, exit status 139, in test \"second\"\n");
    expect("good crashes", 1, 4, 1, 1, "  not run: third\n");
    expect("hangs good", 1, 3, 1, 2, "/hangs: ended after 1 s, in test \"first\"\n");
}

/* It would go on to hold the pipe's end that it has inherited. */
static void what_a_suite_leaves_running_is_ended(void) {
    enum { PATIENCE = 20000 }; /* ms, less than it sleeps */
    int ends[2];
    run_suites();
    CHECK(!pipe(ends));
    CU_ASSERT_EQUAL(run_suite(LEAVES), suites[LEAVES].status);
    close(ends[1]);
    struct pollfd left = {.fd = ends[0], .events = POLLIN};
    CU_ASSERT(poll(&left, 1, PATIENCE) == 1 && left.revents == POLLHUP);
    close(ends[0]);
}

/* One that sleeps and one that computes, in a child that is a suite of its own: it removes its directories. */
static void a_program_that_hangs_is_named_and_a_second_one_ends_its_suite(void) {
    static const char *const programs[][4] = {{"sleep", "60"}, {"sh", "-c", "while :; do :; done"}};
    char said[3000] = "";
    int ends[2], status;
    CHECK(!pipe2(ends, O_CLOEXEC));
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        CHECK(dup2(ends[1], 2) == 2);
        setenv("SUITE_SECONDS", "1", 1);
        for (int p = 0; p < 2; p++) {
            Result r = finish(start_program(programs[p]));
            result_free(&r);
        }
        _exit(0);
    }
    close(ends[1]);
    for (size_t len = 0, n = 1; n; len += n) n = (size_t)read(ends[0], said + len, sizeof said - 1 - len);
    close(ends[0]);
    CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT(strstr(said, "hangs: sleep 60\n") && strstr(said, "hangs: sh -c while :; do :; done\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "the suite ends: 2 programs hang\n"));
}

/* By size, and not as text. */
static void a_bench_says_the_median_of_three(void) {
    static const char *const runs[] = {"9 10.5 200", "9 200 10.5", "10.5 9 200", "10.5 200 9", "200 9 10.5", "200 10.5 9"};
    run_suites();
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) {
        char *said;
        CU_ASSERT_EQUAL(said_by(&said, "eval \"$(grep '^median()' scripts/bench.sh)\"; median %s", runs[r]), 0);
        CU_ASSERT_STRING_EQUAL(said, "10.5\n");
        free(said);
    }
}

/* All that the script computes from the constants of flexgen.cu alone, without nvcc; it is the file's end. */
static void the_waves_of_the_kernels_are_of_todays_constants(void) {
    char *said, *kept = contents("results/kernels.md", NULL);
    run_suites();
    CU_ASSERT_EQUAL(said_by(&said, "sed -n '/^value()/p; /^constants=/p; /^awk /,$p' scripts/gpu_kernels.sh | %s", "bash"),
                    0);
    const char *there = strstr(kept, said);
    CU_ASSERT(strstr(said, "| 30B | FC2 |") && there && !there[strlen(said)]);
    free(said), free(kept);
}

// ---------------------------------------------------------------------------------------------------------------
// scripts/size.py
// ---------------------------------------------------------------------------------------------------------------

#define TEN "1234567890"
#define HUNDRED_COLUMNS "//34567890" TEN TEN TEN TEN TEN TEN TEN TEN TEN
#define LOW "int low(void) {\n    return 1;\n}\n"
#define BUDGETS "10 base/low.c\n6 base/low.h\n15 io/high.c\n"
#define MEASURE                                                      \
    "here=$PWD && cd %s && cc -c -I. base/low.c -o build/base/low.o" \
    " && cc -c -I. io/high.c -o build/io/high.o && python3 -B $here/scripts/size.py build"

/* Two floors, whose files have exactly as many tokens as they may. */
static const struct {
    const char *path, *text;
} program[] = {{"base/low.c", LOW},
               {"base/low.h", "int low(void);\n"},
               {"io/high.c", "#include \"base/low.h\"\nint high(void) {\n    return low();\n}\n"},
               {"mini.c", LOW},
               {"scripts/size.txt", BUDGETS "31 total\n"}};

/* Of the program each case changes one file. */
static void a_rule_of_size_that_is_broken_is_said_and_fails(void) {
    static const char *const folders[] = {"base", "io", "scripts", "build", "build/base", "build/io"};
    static const struct {
        const char *path, *text, *said; /* NULL: it passes */
    } cases[] = {
        {"base/low.c", HUNDRED_COLUMNS "\n" LOW, NULL},
        {"base/low.c", HUNDRED_COLUMNS "1\n" LOW, "base/low.c:1: 101 columns, more than 100\n"},
        {"base/low.c", LOW ";\n", "base/low.c: 11 tokens, and its budget is 10\n"},
        {"base/low.c", "#include \"io/high.c\"\n" LOW, "base/low.c: includes io/high.c, which is on a higher floor\n"},
        {"base/low.c", "int high(void);\nint low(void) { return high(); }\n",
         "base/low.c: uses high of io/high.c, which is on a higher floor\n"
         "size.py: these need each other: base/low.c -> io/high.c -> base/low.c\n"
         "size.py: these need each other: base -> io -> base\n"},
        {"base/low.h", "int low(void), a[1];\n", "base/low.h: 11.00 tokens a line\n"},
        {"mini.c", "int low(void), a[1];\n", "mini.c: 11 tokens, 11.00 a line; at most"},
        {"scripts/size.txt", BUDGETS "30 total\n", "total: 31 tokens, and its budget is 30\n"},
        {"scripts/size.txt", "31 total\n", "base/low.h: has no budget in scripts/size.txt\n"},
    };
    char tree[300];
    if (!has_python()) return;
    run_suites();
    snprintf(tree, sizeof tree, "%s", temp_dir());
    for (size_t d = 0; d < sizeof folders / sizeof *folders; d++) CHECK(!mkdir(in_dir(tree, folders[d]), 0777));
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char *said;
        for (size_t f = 0; f < sizeof program / sizeof *program; f++)
            write_file(tree, program[f].path, program[f].text, strlen(program[f].text));
        write_file(tree, cases[c].path, cases[c].text, strlen(cases[c].text));
        const int status = said_by(&said, MEASURE, tree);
        const bool right = cases[c].said ? status == 1 && strstr(said, cases[c].said) : !status;
        if (!right) fprintf(stderr, "\n    case %zu: exit status %d: %s", c, status, said);
        CU_ASSERT(right);
        free(said);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// scripts/mutate.py
// ---------------------------------------------------------------------------------------------------------------

#define MUTATE                                                                                                        \
    "here=$PWD && cd %s && cp $here/scripts/suite.sh scripts && python3 -B $here/scripts/mutate.py --files 'base/*' " \
    "--limit 1"

/* A program of three lines that can be mutated: one suite sees the first, hangs by the last, and does not call the other.
 */
static const struct {
    const char *path, *text;
} mutable[] = {{"Makefile",
                "build/%.o: %.c\n\tmkdir -p $(@D); cc -c $< -o $@\n"
                "build/libflexgen.a: build/base/low.o\n\tar rc $@ $^\n"
                "build/test_%: build/tests/test_%.o build/libflexgen.a\n\tcc $^ -o $@\n"
                "build/%.log: build/test_% always\n\tscripts/suite.sh $@ $<\n"
                "always:\n.PRECIOUS: build/%.o\n"},
               {"base/low.c",
                "int low(int a) {\n    return a + 1;\n}\n"
                "int unseen(int a) {\n    return a + 1; /* a + 2 */\n}\n"
                "int spent(volatile int a) {\n    while (a)\n        a--;\n    return a;\n}\n"},
               {"flexgen.c", "int main(void) {\n    return 0;\n}\n"},
               {"tests/test_low.c", "int low(int), spent(int);\nint main(void) { return low(1) != 2 || spent(3); }\n"}};

static void a_mutation_is_caught_hangs_or_survives(void) {
    static const char *const folders[] = {"base", "scripts", "tests"};
    static const struct {
        const char *flags, *said;
    } cases[] = {
        {"--count 4", "\n3 mutations: 1 caught, 1 hung, 1 survived\n--- a/base/low.c\n+++ b/base/low.c\n@@ -5 +5 @@\n"},
        {"--only 3", "\n1 mutations: "},
        {"--count 0", "\n0 mutations: 0 caught, 0 hung, 0 survived\n"}};
    char tree[300], command[600];
    if (!has_python()) return;
    run_suites();
    snprintf(tree, sizeof tree, "%s", temp_dir());
    for (size_t d = 0; d < sizeof folders / sizeof *folders; d++) CHECK(!mkdir(in_dir(tree, folders[d]), 0777));
    for (size_t f = 0; f < sizeof mutable / sizeof *mutable; f++)
        write_file(tree, mutable[f].path, mutable[f].text, strlen(mutable[f].text));
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char *said;
        snprintf(command, sizeof command, "%s %s", MUTATE, cases[c].flags);
        const int status = said_by(&said, command, tree);
        if (status || !strstr(said, cases[c].said))
            fprintf(stderr, "\n    %s: exit status %d: %s", cases[c].flags, status, said);
        CU_ASSERT(!status && strstr(said, cases[c].said));
        free(said);
    }
}

CU_TestInfo tests[] = {
    {"a program that hangs is named and a second one ends its suite", /* first, while there are no directories */
     a_program_that_hangs_is_named_and_a_second_one_ends_its_suite},
    {"a summary adds up what its suites passed", a_summary_adds_up_what_its_suites_passed},
    {"a failure is named and fails the summary", a_failure_is_named_and_fails_the_summary},
    {"a suite that ends badly behind its tests fails the summary",
     a_suite_that_ends_badly_behind_its_tests_fails_the_summary},
    {"a suite that ends early fails the summary", a_suite_that_ends_early_fails_the_summary},
    {"what a suite leaves running is ended", what_a_suite_leaves_running_is_ended},
    {"a bench says the median of three", a_bench_says_the_median_of_three},
    {"the waves of the kernels are of today's constants", the_waves_of_the_kernels_are_of_todays_constants},
    {"a rule of size that is broken is said and fails", a_rule_of_size_that_is_broken_is_said_and_fails},
    {"a mutation is caught, hangs or survives", a_mutation_is_caught_hangs_or_survives},
    CU_TEST_INFO_NULL,
};
