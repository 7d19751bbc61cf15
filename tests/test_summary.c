/* test_summary.c: how suites are run and counted (scripts/suite.sh, scripts/summary.sh). What fails, crashes, hangs or ends
 * badly behind its last test must be seen. The suites here are scripts that print what CUnit prints. Then how the program
 * is measured: its speed (scripts/bench.sh), its kernels (scripts/gpu_kernels.sh), its size (scripts/size.py),
 * and how much the suites see of it (scripts/mutate.py); and what runs on others' computers (scripts/workflow.py). */
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/started.h"
#include "written.h"

static const char *printed; /* by the newest command */

/* Runs a command of the shell in suite_dir; $here is where scripts are. Returns its exit status. */
__attribute__((format(printf, 1, 2))) static int shell(const char *format, ...) {
    char command[2000], line[3000];
    va_list list;
    va_start(list, format);
    vsnprintf(command, sizeof command, format, list);
    va_end(list);
    snprintf(line, sizeof line, "here=$PWD && cd %s && { %s; } >said 2>&1", suite_dir(), command);
    const int status = system(line);
    printed = keep(contents(in_dir(suite_dir(), "said"), NULL));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* That command has ended with such a status, and has said this part. */
static void assert_said(int status, int expected, const char *part) {
    const bool right = status == expected && strstr(printed, part);
    if (!right) fprintf(stderr, "\n    not %d, \"%s\", but %d: %s", expected, part, status, printed);
    CU_ASSERT(right);
}

// ---- scripts/suite.sh, scripts/summary.sh ---------------------------------------------------------------------------

#define LISTED "echo '  Listed: first'; echo '  Listed: second'; echo '  Listed: third'\n"
#define TOTALS(passed, failed)                                                   \
    "cat <<'END'\n\nRun Summary:    Type  Total    Ran Passed Failed Inactive\n" \
    "              suites      1      1    n/a      0        0\n"                \
    "               tests      3      3      " #passed "      " #failed          \
    "        0\n"                                                                \
    "             asserts     30     30     " #passed "0      " #failed "      n/a\n\nElapsed time = 0\nEND\n"
#define SUITE_SH "unset GOING_ON; SUITE_SECONDS=1 $here/scripts/suite.sh "

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

/* One that sleeps and one that computes, in a child that is a suite of its own: it removes its directories. */
TEST(a_program_that_hangs_is_named_and_a_second_one_ends_its_suite) {
    static const char *const programs[][4] = {{"sleep", "60"}, {"sh", "-c", "while :; do :; done"}};
    char heard[3000] = "";
    int ends[2], status;
    CHECK(!pipe2(ends, O_CLOEXEC));
    const pid_t pid = fork();
    if (!pid) {
        CHECK(dup2(ends[1], 2) == 2);
        setenv("SUITE_SECONDS", "1", 1);
        for (int p = 0; p < 2; p++) finish(start_program(programs[p]));
        _exit(0);
    }
    close(ends[1]);
    for (size_t len = 0, n = 1; n; len += n) n = (size_t)read(ends[0], heard + len, sizeof heard - 1 - len);
    close(ends[0]);
    CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT(strstr(heard, "hangs: sleep 60\n") && strstr(heard, "hangs: sh -c while :; do :; done\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(heard, "the suite ends: 2 programs hang\n"));
}

/* One in which a sanitizer finds a leak when it ends has failed. Where one ends early, the test in which it did has failed,
 * and those behind it are skipped. */
TEST(a_summary_adds_up_its_suites_and_names_what_failed) {
    static const struct {
        const char *logs;
        int status;
        const char *totals, *part;
    } cases[] = {
        {"good.log", 0, "\n3 passed, 0 failed, 0 skipped\n", "  Test: first ...passed\n"},
        {"good.log good.log good.log", 0, "\n9 passed, 0 failed, 0 skipped\n",
         "asserts     90     90     90      0      n/a\n"},
        {"red.log", 1, "\n2 passed, 1 failed, 0 skipped\n", "/red, exit status 1\n    Test: second\n"},
        {"good.log red.log good.log", 1, "\n8 passed, 1 failed, 0 skipped\n", "/red, exit status 1\n    Test: second\n"},
        {"leaks.log", 1, "\n3 passed, 1 failed, 0 skipped\n", "/leaks, at its end, exit status 23\n"},
        {"leaks.log good.log", 1, "\n6 passed, 1 failed, 0 skipped\n", "/leaks, at its end, exit status 23\n"},
        {"crashes.log", 1, "\n1 passed, 1 failed, 1 skipped\n", "/crashes: died, exit status 139, in test \"second\"\n"},
        {"good.log crashes.log", 1, "\n4 passed, 1 failed, 1 skipped\n", "  not run: third\n"},
        {"hangs.log good.log", 1, "\n3 passed, 1 failed, 2 skipped\n", "/hangs: ended after 1 s, in test \"first\"\n"},
    };
    for (size_t s = 0; s < COUNT(suites); s++) {
        const char *name = suites[s].name;
        const int status = suites[s].status;
        write_file(suite_dir(), name, suites[s].script, strlen(suites[s].script));
        assert_said(shell(SUITE_SH "./%s.log sh %s", name, name), status, status ? "FAILED (" : " passed in ");
    }
    for (size_t c = 0; c < COUNT(cases); c++) {
        const int status = shell("$here/scripts/summary.sh %s", cases[c].logs);
        assert_said(status, cases[c].status, cases[c].totals);
        assert_said(status, cases[c].status, cases[c].part);
        CU_ASSERT_EQUAL(!strstr(printed, "FAILED: "), !cases[c].status);
    }
}

/* It would go on to hold the pipe's end that it has inherited. */
TEST(what_a_suite_leaves_running_is_ended) {
    enum { PATIENCE = 20000 }; /* ms, less than it sleeps */
    int ends[2];
    CHECK(!pipe(ends));
    assert_said(shell(SUITE_SH "./leaves.log sh -c 'sleep 60 &'"), 0, " passed in ");
    close(ends[1]);
    struct pollfd left = {.fd = ends[0], .events = POLLIN};
    CU_ASSERT(poll(&left, 1, PATIENCE) == 1 && left.revents == POLLHUP);
    close(ends[0]);
}

/* By size, and not as text. */
TEST(a_bench_says_the_median_of_three) {
    static const char *const runs[] = {"9 10.5 200", "9 200 10.5", "10.5 9 200", "10.5 200 9", "200 9 10.5", "200 10.5 9"};
    for (size_t r = 0; r < COUNT(runs); r++) {
        CU_ASSERT_EQUAL(shell("eval \"$(grep '^median()' $here/scripts/bench.sh)\"; median %s", runs[r]), 0);
        CU_ASSERT_STRING_EQUAL(printed, "10.5\n");
    }
}

/* All that the script computes from the constants of flexgen.cu alone, without nvcc; it is the file's end. */
TEST(the_waves_of_the_kernels_are_of_todays_constants) {
    const char *kept = keep(contents("results/kernels.md", NULL));
    CU_ASSERT_EQUAL(shell("cd $here && sed -n '/^value()/p; /^constants=/p; /^awk /,$p' scripts/gpu_kernels.sh | bash"), 0);
    const char *there = strstr(kept, printed);
    CU_ASSERT(strstr(printed, "| 30B | FC2 |") && there && !there[strlen(printed)]);
}

/* No row has bytes of local memory: neither spilled registers nor arrays without a place in registers. */
TEST(no_kernel_spills) {
    CU_ASSERT_EQUAL(shell("sed '/^## /,$d' $here/results/kernels.md | grep '^| `' >rows && grep -v '| 0 |$' rows"), 1);
    CU_ASSERT_STRING_EQUAL(printed, "");
}

typedef struct {
    const char *path, *text;
} File;

/* Makes a fresh directory, DIR/tree, with these folders and files; the last one has no path. */
static void make_tree(const char *folders, const File *file) {
    CU_ASSERT_EQUAL_FATAL(shell("rm -rf tree && mkdir tree && cd tree && mkdir %s", folders), 0);
    for (; file->path; file++) write_file(in_dir(suite_dir(), "tree"), file->path, file->text, strlen(file->text));
}

// ---- scripts/setup.sh, and temporary files ------------------------------------------------------------------------------

/* Root writes to no name in a directory of everybody's that others can foresee: it could be a link of theirs. Here `id`
 * says that this is root, and `apt-get` installs nothing. */
TEST(what_is_missing_is_installed_without_a_name_that_others_can_foresee) {
    CU_ASSERT_EQUAL_FATAL(shell("mkdir -p bin tmp && echo kept >victim && ln -s ../victim tmp/flexgen-setup.lock && "
                                "printf '#!/bin/sh\necho 0\n' >bin/id && printf '#!/bin/sh\n: >asked\n' >bin/apt-get && "
                                "chmod +x bin/*"),
                          0);
    CU_ASSERT_EQUAL(shell("PATH=$PWD/bin:$PATH TMPDIR=$PWD/tmp $here/scripts/setup.sh cc flexgen-has-no-such.h:package"),
                    0);
    CU_ASSERT_STRING_EQUAL(printed, "installing package\n");
    CU_ASSERT_EQUAL(shell("[ -e asked ] && cat victim && ls tmp"), 0);
    CU_ASSERT_STRING_EQUAL(printed, "kept\nflexgen-setup.lock\n");
}

TEST(no_script_writes_to_a_fixed_name_in_a_directory_of_everybodys) {
    CU_ASSERT_EQUAL(
        shell("grep -nE '(>|default=) *\"?(\\$\\{?TMPDIR|/tmp/|/var/tmp/|/dev/shm/)' -r $here/scripts $here/.ci"), 1);
}

// ---- scripts/workflow.py --------------------------------------------------------------------------------------------

const char *test_missing(const char *name) {
    const bool reads = strstr(name, "workflow") && system("python3 -c 'import yaml' 2>/dev/null");
    return reads ? "the check of .github/workflows, since python3-yaml is missing" : NULL;
}

/* Each case changes the workflow with sed, unless it is the first. */
TEST(a_workflow_calls_only_what_the_documents_name_and_may_only_read) {
    static const char *const cases[][2] = {
        {"", ""},
        {"s/contents: read/contents: write/", "permissions: expected contents: read, and no other\n"},
        {"/^permissions:/,+1d", "permissions: expected contents: read, and no other\n"},
        {"s/^  arm:.*/&\\n    permissions: write-all/", "arm: has permissions of its own\n"},
        {"s/checkout@v[0-9]*/checkout@main/",
         "arm: actions/checkout@main: expected an action of GitHub's own, by its major"},
        {"s,actions/checkout,somebody/checkout,", "mac: somebody/checkout@v"},
        {"s/run: make test/run: make tests/",
         "bare: no file of README.md, docs/COMPUTERS.md, .ci/run, .ci/install names: make tests\n"},
        {"s/sudo make install/sudo rm -r x/",
         "arm: no file of README.md, docs/COMPUTERS.md, .ci/run, .ci/install names: rm -r x\n"},
        {"s/run: make run/run: make run \"/", "mac: bash cannot read: make run \"\n"},
        {"s/if: failure()/if: always()/", "mac: its last step does not keep build/**/*.log if another has failed\n"},
        {"s/path: build.*/path: builds/", "arm: its last step does not keep build/**/*.log if another has failed\n"},
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        const int status = shell(
            "sed '%s' $here/.github/workflows/ci.yml >ci.yml && to=$PWD/ci.yml && cd $here && "
            "python3 -B scripts/workflow.py $to",
            cases[c][0]);
        assert_said(status, c > 0, cases[c][1]);
    }
}

// ---- scripts/size.py ------------------------------------------------------------------------------------------------

#define TEN "1234567890"
#define HUNDRED_COLUMNS "//34567890" TEN TEN TEN TEN TEN TEN TEN TEN TEN
#define LOW "int low(void) {\n    return 1;\n}\n"
#define BUDGETS "10 base/low.c\n6 base/low.h\n15 io/high.c\n12 lp.c\n"
#define SUMS "6 trunk\n43 total\n"

/* Three floors, whose files have exactly as many tokens as they may. Half of lp.c belongs to the trunk. */
static const File program[] = {{"base/low.c", LOW},
                               {"base/low.h", "int low(void);\n"},
                               {"io/high.c", "#include \"base/low.h\"\nint high(void) {\n    return low();\n}\n"},
                               {"lp.c", "int lp(void);\n// The trunk ends here.\nint us(void);\n"},
                               {"mini.c", LOW},
                               {"mini.cu", LOW},
                               {"scripts/size.txt", BUDGETS SUMS},
                               {0}};

/* Of the program each case changes one file. */
TEST(a_rule_of_size_that_is_broken_is_said_and_fails) {
    static const struct {
        File change;
        const char *said; /* NULL: it passes */
    } cases[] = {
        {{"base/low.c", HUNDRED_COLUMNS "\n" LOW}, NULL},
        {{"base/low.c", HUNDRED_COLUMNS "1\n" LOW}, "base/low.c:1: 101 columns, more than 100\n"},
        {{"base/low.c", LOW ";\n"}, "base/low.c: 11 tokens, and its budget is 10\n"},
        {{"base/low.c", "#include \"io/high.c\"\n" LOW}, "base/low.c: includes io/high.c, which is on a higher floor\n"},
        {{"base/low.c", "int high(void);\nint low(void) { return high(); }\n"},
         "base/low.c: uses high of io/high.c, which is on a higher floor\n"
         "size.py: these need each other: base/low.c -> io/high.c -> base/low.c\n"
         "size.py: these need each other: base -> io -> base\n"},
        {{"base/low.h", "int low(void), a[1];\n"}, "base/low.h: 11.00 tokens a line\n"},
        {{"mini.c", "int low(void), a[1];\n"}, "mini.c: 11 tokens, 11.00 a line; at most"},
        {{"mini.cu", "int low(void), a[1];\n"}, "mini.cu: 11 tokens, 11.00 a line; at most"},
        {{"lp.c", "int lp(void), us;\n// The trunk ends here.\nint v;\n"}, "trunk: 8 tokens, and its budget is 6\n"},
        {{"lp.c", "int lp(void);\nint us(void);\n"}, "trunk: 12 tokens, and its budget is 6\n"},
        {{"scripts/size.txt", BUDGETS "43 total\n"}, "trunk: has no budget in scripts/size.txt\n"},
        {{"scripts/size.txt", BUDGETS "6 trunk\n42 total\n"}, "total: 43 tokens, and its budget is 42\n"},
        {{"scripts/size.txt", SUMS}, "base/low.h: has no budget in scripts/size.txt\n"},
    };
    if (!has_python()) return;
    for (size_t c = 0; c < COUNT(cases); c++) {
        const File *change = &cases[c].change;
        make_tree("base io scripts build build/base build/io", program);
        write_file(in_dir(suite_dir(), "tree"), change->path, change->text, strlen(change->text));
        const int status = shell(
            "cd tree && cc -c -I. base/low.c -o build/base/low.o && cc -c -I. io/high.c -o build/io/high.o && "
            "python3 -B $here/scripts/size.py build");
        assert_said(status, cases[c].said ? 1 : 0, cases[c].said ? cases[c].said : "");
    }
}

// ---- scripts/mutate.py ----------------------------------------------------------------------------------------------

/* A program of three lines that can be mutated: one suite sees the first, hangs by the last, and does not call the other.
 */
static const File mutable[] = {
    {"Makefile",
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
    {"tests/test_low.c", "int low(int), spent(int);\nint main(void) { return low(1) != 2 || spent(3); }\n"},
    {0}};

TEST(a_mutation_is_caught_hangs_or_survives) {
    static const char *const cases[][2] = {
        {"--count 4", "\n3 mutations: 1 caught, 1 hung, 1 survived\n--- a/base/low.c\n+++ b/base/low.c\n@@ -5 +5 @@\n"},
        {"--only 3", "\n1 mutations: "},
        {"--count 0", "\n0 mutations: 0 caught, 0 hung, 0 survived\n"}};
    if (!has_python()) return;
    make_tree("base scripts tests", mutable);
    for (size_t c = 0; c < COUNT(cases); c++) {
        const int status = shell(
            "cd tree && cp $here/scripts/suite.sh scripts && "
            "python3 -B $here/scripts/mutate.py --files 'base/*' --limit 1 %s",
            cases[c][0]);
        assert_said(status, 0, cases[c][1]);
    }
}
