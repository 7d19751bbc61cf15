/* test_summary.c: how suites are run and counted (scripts/suite.sh, scripts/summary.sh). What fails, crashes, hangs or ends
 * badly behind its last test must be seen. The suites here are scripts that print what CUnit prints. */
#include <fcntl.h>
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
};
enum { SUITES = sizeof suites / sizeof *suites };

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

CU_TestInfo tests[] = {
    {"a program that hangs is named and a second one ends its suite", /* first, while there are no directories */
     a_program_that_hangs_is_named_and_a_second_one_ends_its_suite},
    {"a summary adds up what its suites passed", a_summary_adds_up_what_its_suites_passed},
    {"a failure is named and fails the summary", a_failure_is_named_and_fails_the_summary},
    {"a suite that ends badly behind its tests fails the summary",
     a_suite_that_ends_badly_behind_its_tests_fails_the_summary},
    {"a suite that ends early fails the summary", a_suite_that_ends_early_fails_the_summary},
    CU_TEST_INFO_NULL,
};
