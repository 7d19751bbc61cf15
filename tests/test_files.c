/* test_files.c: the files of a command line, by all the names that a file may have: nothing is written over what is read or
 * written as well, and what cannot be written is refused before the model is read. scripts/file_pairs.py draws such command
 * lines at random. What is made beside a result until it is complete is test_quantize.c's and test_json.c's. */
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/started.h"
#include "tests/written.h"

#define TINY " --model m"
#define GENERATE "$F generate" TINY " --hardware hw.json --max-tokens 2"
#define EVAL "$F eval" TINY " --hardware hw.json --limit 1"
#define POLICY "$F policy --model opt-125m --hardware hw.json --prompt-len 8 --gen-len 2 --num-prompts 4"
#define BENCH "$F bench" TINY " --hardware hw.json --prompt-len 8 --gen-len 2 --num-prompts 4"

/* Runs a command in the directory of the files, in which $F is the program. */
static Result shell(const char *command) {
    const char *bin = getenv("FLEXGEN_BIN");
    char *line;
    open_directories();
    CHECK(asprintf(&line, "F=%s; cd %s/files && { %s; }", (char *)keep(realpath(bin ? bin : "flexgen", NULL)), capture,
                   command) > 0);
    keep(line);
    return finish(start_program((const char *const[]){"sh", "-c", line, NULL}));
}

/* All files with their inodes, modes and bytes. */
static const char *look(void) { return shell("find . -printf '%p %i %m %l\\n' -type f -exec cksum {} + | sort").out; }

/* A model; the same as a download, whose files are links; prompts; and results of other runs. */
static void give_files(void) {
    open_directories();
    CHECK(!mkdir(in_dir(capture, "files"), 0777));
    CHECK(!symlink(in_dir(keep(realpath("models/opt-tiny", NULL)), "."), in_dir(capture, "files/tiny")));
    CHECK(!symlink(keep(realpath("hardware/laptop.json", NULL)), in_dir(capture, "files/laptop")));
    const Result r = shell(
        "mkdir m hub hub/blobs hub/s hub/s/1 full empty && for f in config.json vocab.json merges.txt model.safetensors; "
        "do "
        "cp tiny/$f m/ && ln m/$f hub/blobs/$f && ln -s ../../blobs/$f hub/s/1/$f; done && rm tiny && cp laptop hw.json && "
        "rm laptop && ln m/config.json hard && ln -s m/vocab.json link && ln -s nowhere dangling && "
        "echo once >p && echo '{\"text\": \"a b\"}' >w && echo old >o && echo busy >busy && echo busy >busy.journal && "
        "echo kept >full/kept && ln p p2 && ln -s p p3");
    CU_ASSERT_EQUAL_FATAL(r.status, 0);
}

/* Each row ends with one line, which says this, and no file is another than before. */
TEST(nothing_is_written_over_what_is_read_or_written_as_well_by_whatever_name) {
    static const struct {
        const char *command;
        int status;
        const char *said;
    } rows[] = {
        /* inputs, also as standard input and standard output */
        {GENERATE " --prompts - --output p --overwrite <p", 2, "--output: is the file of --prompts"},
        {GENERATE " --prompts /dev/fd/3 --output p --overwrite 3<p", 2, "--output: is the file of --prompts"},
        {GENERATE " --prompts - --trace p2 <p", 2, "--trace: is the file of --prompts"},
        {GENERATE " --prompts p --output p3 --overwrite", 2, "--output: is the file of --prompts"},
        {GENERATE " --prompts p >>p2", 2, "standard output: is the file of --prompts"},
        {EVAL " --perplexity - --json p <p2", 2, "--json: is the file of --perplexity"},
        {EVAL " --last-word - --json w <w", 2, "--json: is the file of --last-word"},
        {EVAL " --last-word w >>w", 2, "standard output: is the file of --last-word"},
        {EVAL " --score - --output w --overwrite <w", 2, "--output: is the file of --score"},
        {EVAL " --score w >>w", 2, "standard output: is the file of --score"},
        {POLICY " --json /dev/fd/3 3<hw.json", 2, "--json: is the file of --hardware"},
        {POLICY " >>hw.json", 2, "standard output: is the file of --hardware"},
        /* other results */
        {BENCH " --json - --trace -", 2, "--trace: standard output has the other results"},
        {BENCH " --trace o >>o", 2, "--trace: standard output has the other results"},
        {GENERATE " --prompt a --output - --trace /dev/stdout", 2, "--trace: standard output has the other results"},
        {GENERATE " --prompt a --output new --trace new.journal", 2, "--trace: is the file of the journal of --output"},
        {GENERATE " --prompts o.journal --output o --overwrite", 2, "the journal of --output: is the file of --prompts"},
        /* the model's files */
        {BENCH " --trace hard", 2, "--trace: is a file of the model"},
        {BENCH " --json link", 2, "--json: is a file of the model"},
        {BENCH " --json m/./model.safetensors", 2, "--json: is a file of the model"},
        {GENERATE " --prompt a >>m/merges.txt", 2, "standard output: is a file of the model"},
        {"$F bench --model hub/s/1 --trace hub/blobs/model.safetensors", 2, "--trace: is a file of the model"},
        {"$F bench --model hub/s/1 --json hub/s/1/config.json", 2, "--json: is a file of the model"},
        {"$F quantize" TINY " --output m", 2, "not empty"},
        /* of a job that runs */
        {BENCH " --trace busy.journal", 2, "--trace busy.journal: another job is writing there"},
        {GENERATE " --prompt a --output busy --overwrite", 2, "--output busy: another job is writing there"},
        /* what cannot be written */
        {BENCH " --trace ''", 2, "--trace : expected a name"},
        {BENCH " --json ''", 2, "--json : expected a name"},
        {GENERATE " --prompt a --output ''", 2, "--output : expected a name"},
        {BENCH " --trace new/", 1, "--trace new/ ... name"},
        {BENCH " --json empty", 1, "--json empty: Is a directory"},
        {BENCH " --json dangling", 1, "--json dangling: is a link to nothing"},
        {BENCH " --trace o/new", 1, "--trace o/new: Not a directory"},
        {BENCH " --json /proc/new", 1, "--json /proc/new"},
        {BENCH " --trace $(printf %0300d 0)", 1, "File name too long"},
        {BENCH " --trace $(printf %0250d 0)", 1, "File name too long"},
        {GENERATE " --prompt a --output $(printf %0250d 0)", 1, "File name too long"},
        {"ln -s nowhere n.journal; " GENERATE " --prompt a --output n; s=$?; rm n.journal; (exit $s)", 1, "n.journal"},
        {"$F quantize" TINY " --output full", 2, "--output full: Directory not empty"},
        {"$F quantize" TINY " --output -", 2, "--output is missing; name the directory"},
        {"$F quantize" TINY " --output o", 2, "--output o: Not a directory"},
        {"$F quantize" TINY " --output dangling", 2, "--output dangling: Not a directory"},
        {"$F profile --output new/", 1, "--output new/"},
    };
    give_files();
    const int busy[] = {open(in_dir(capture, "files/busy"), O_RDWR), open(in_dir(capture, "files/busy.journal"), O_RDWR)};
    CHECK(!flock(busy[0], LOCK_EX) && !flock(busy[1], LOCK_EX));
    const char *before = look();
    for (size_t i = 0; i < COUNT(rows); i++) {
        assert_ends(shell(rows[i].command), rows[i].status, rows[i].said);
        const char *now = look();
        const bool same = !strcmp(now, before);
        if (!same) fprintf(stderr, "\n    %s changes files\n", rows[i].command);
        CU_ASSERT(same);
        before = now;
    }
    close(busy[0]), close(busy[1]);
}

/* Standard error gets the line that says so. */
TEST(a_result_is_not_the_file_of_standard_error) {
    static const char *const lines[] = {GENERATE " --prompt a --output o --overwrite 2>>o", BENCH " --json o 2>>o",
                                        BENCH " --trace /dev/stderr 2>>o"};
    for (size_t i = 0; i < COUNT(lines); i++) {
        shell("echo old >o");
        CU_ASSERT_EQUAL(shell(lines[i]).status, 2);
        CU_ASSERT(shows(shell("cat o").out, "old\nflexgen: --") && shows(shell("cat o").out, ": is the file of standard"));
    }
}

/* At its end a job makes a new journal beside the old one, under a longer name. */
TEST(a_name_beside_which_the_journal_cannot_end_is_refused_before_the_job) {
    for (int length = 200; length <= 255; length += 5) {
        const char *command = keep(calloc(1, 1000));
        snprintf((char *)command, 1000, GENERATE " --prompts p --output %0*d", length, 0);
        const char *before = look();
        const Result r = shell(command);
        const bool done = !r.status, left = strcmp(look(), before);
        if (done != left) fprintf(stderr, "\n    a name of %d bytes: status %d: %s\n", length, r.status, r.err);
        CU_ASSERT_EQUAL(done, left);
    }
}

/* The processes of a job that is killed take a moment to end, and one starts the next at once. */
TEST(an_output_of_a_job_that_is_ending_is_waited_for) {
    static const struct {
        const char *file, *command;
    } rows[] = {{"files/o", POLICY " --json o"}, {"files/o.journal", GENERATE " --prompt a --output o --overwrite"}};
    for (size_t i = 0; i < COUNT(rows); i++) {
        const int fd = open(in_dir(capture, rows[i].file), O_RDWR | O_CREAT, 0600);
        CHECK(fd >= 0 && !flock(fd, LOCK_EX));
        const pid_t job = fork();
        if (!job) {
            usleep(300000);
            _exit(0);
        }
        close(fd); /* the lock is the child's now */
        CU_ASSERT_EQUAL(shell(rows[i].command).status, 0);
        CU_ASSERT_EQUAL(waitpid(job, NULL, 0), job);
    }
}

/* A suite that is killed leaves its directory, with what is in it; the next one removes it, and nothing else. */
TEST(a_suite_that_is_killed_leaves_nothing_for_long) {
    const char *dir = temp_dir(), *foreign = in_dir(dir, "flexgen-test-0123456789abcdef-0123456789abcdef");
    CHECK(!mkdir(foreign, 0700) && !mkdir(in_dir(dir, "flexgen-test-mine"), 0700));
    for (int killed = 1; killed >= 0; killed--) {
        int status;
        fflush(NULL);
        const pid_t suite = fork();
        if (!suite) {
            setenv("TMPDIR", dir, 1);
            forget_temp_dirs();
            write_file(temp_dir(), "file", "", 0);
            killed ? kill(getpid(), SIGKILL) : exit(0);
        }
        CU_ASSERT(waitpid(suite, &status, 0) == suite && WIFSIGNALED(status) == killed);
        CU_ASSERT_EQUAL(count_files(dir), 2 + killed);
    }
}

/* Two streams, or two devices, are not one file. */
TEST(what_takes_nothing_from_another_is_allowed) {
    static const char *const lines[] = {POLICY " --json /dev/null >/dev/null 2>&1 </dev/null",
                                        BENCH " --json /dev/null --trace /dev/null",
                                        POLICY " >both 2>&1",
                                        POLICY " --json old && " POLICY " --json old",
                                        GENERATE " --prompts - --output new <p && " GENERATE
                                                 " --prompts p --output new --overwrite <new",
                                        "cd m && $F policy --model . --hardware ../hw.json --prompt-len 8 --gen-len 2 "
                                        "--num-prompts 4 --json notes.json && rm notes.json"};
    for (size_t i = 0; i < COUNT(lines); i++) {
        const Result r = shell(lines[i]);
        if (r.status) fprintf(stderr, "\n    %s: %s\n", lines[i], r.err);
        CU_ASSERT_EQUAL(r.status, 0);
    }
}
