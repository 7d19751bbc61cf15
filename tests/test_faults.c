/* test_faults.c: whatever call of the program fails, it ends with the right result or with one line, and never with a half
 * result that looks whole.
 *
 * Each command does a small job with faults.so loaded before it, first undisturbed, which counts its calls, and then once
 * for each case: the N-th call of a class fails, is short or is interrupted; or that one and all after it. `make test`
 * takes some cases of each job; scripts/fault_test.sh takes them all (FAULT_CASES: at most so many N for each way to fail;
 * FAULT_JOB, FAULT_CLASS: only of this job, only calls of this class). */
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/started.h"
#include "tests/written.h"

enum { MAX_BYTES = 1 << 28, SPACE = 250 << 20, HALF = 640 /* bytes of a result and its journal */ };

static long cases, refused; /* so far; of them that ended with our line */

// ---- Jobs -----------------------------------------------------------------------------------------------------------

/* What a result is: lines in any order; JSON with figures that depend on no time; a text; a directory; a machine. */
typedef enum { LINES, FIGURES, TEXT, MODEL_DIRECTORY, MACHINE } Form;

/* A job writes its result to the file @result, or to standard output. Lines in a file have a journal: whatever fails, such
 * a job can go on. */
typedef struct {
    const char *name;
    Form form;
    bool to_stdout;
    bool measures; /* with a hurried clock and little memory, which make it quick */
    bool goes_on;  /* with what a run before has left */
    const char *args;
} Errand;

#define TINY " --model models/opt-tiny"
#define PLACED " --percent 0 50 0 50 0 50 --gpu-batch-size 2 --num-gpu-batches 2"
#define GENERATED "generate" TINY PLACED " --prompts models/prompts.txt --max-tokens 4 --threads 2 --output @result"
#define BENCHED "bench" TINY PLACED " --prompt-len 16 --gen-len 3 --threads 1"
#define SEARCHED "policy --model opt-1.3b --hardware hardware/t4.json --prompt-len 64 --gen-len 8 --num-prompts 8"
static const Errand jobs[] = {
    {"generate", LINES, .args = GENERATED},
    {"resume", LINES, .goes_on = true, .args = GENERATED " --resume"},
    /* whose lines are longer than the buffers of the C library */
    {"long lines", LINES,
     .args = "generate" TINY PLACED " --prompts @long.jsonl --max-tokens 2 --threads 1 --output @result"},
    {"searched", LINES, .to_stdout = true,
     .args = "generate" TINY " --prompts - --max-tokens 2 --hardware hardware/laptop.json"},
    {"bench", FIGURES, .args = BENCHED " --compress-cache --json @result"},
    {"trace", FIGURES, .args = BENCHED " --trace @result"},
    {"policy", FIGURES, .args = SEARCHED " --json @result"},
    {"frontier", FIGURES, .args = SEARCHED " --frontier --json @result"},
    {"explain", TEXT, .to_stdout = true, .args = SEARCHED " --explain"},
    {"quantize", MODEL_DIRECTORY, .args = "quantize" TINY " --output @result"},
    {"eval", FIGURES,
     .args = "eval" TINY " --perplexity models/opt-tiny/stories.txt --window 64 --limit 2 --percent 0 100 50 0 100 0 "
             "--gpu-batch-size 2 --num-gpu-batches 1 --json @result"},
    {"profile", MACHINE, .measures = true, .args = "profile" TINY " --threads 1 --disk-mem 1M --output @result"},
};

static const char *path_of(const char *name) { return in_dir(capture, name); }

/* In the directory of the results. */
static int shell(const char *command) {
    char line[900];
    snprintf(line, sizeof line, "cd '%s' && { %s; }", capture, command);
    return system(line);
}

/* Runs a job, disturbed by `fault`; "": its calls are counted. One that goes on begins with the half of a result that a job
 * on a full disk has left, unless `more` resumes it. */
static Result run(const Errand *job, const char *fault, const char *more) {
    char counts[400];
    if (job->goes_on && !*more) CHECK(!shell("cp half result && cp half.journal result.journal"));
    snprintf(counts, sizeof counts, "FAULT_COUNTS=%s", *fault || *more ? "" : path_of("counts"));
    with = (With){.input = "models/prompts.txt", .fault = fault, .set = {counts}};
    if (job->to_stdout) with.output = path_of("result");
    if (job->measures) with.set[1] = "FAULT_HASTE=2000", with.memory = SPACE;
    return flexgen("%s %s", job->args, more);
}

// ---- Results --------------------------------------------------------------------------------------------------------

typedef enum { RIGHT, SHORT, WRONG } Verdict; /* short: it says itself that it is not whole */

static bool is_there(const char *pattern) {
    glob_t found;
    const bool there = !glob(path_of(pattern), 0, NULL, &found);
    globfree(&found);
    return there;
}

/* NULL: there is no such file. */
static char *text_of(const char *name) { return is_there(name) ? contents(path_of(name), NULL) : NULL; }

/* Every line that ends is one of the reference, and not twice: what was found there is not found again. */
static Verdict judge_lines(void) {
    char *text = text_of("result"), *known = text_of("reference"), *end, *found = known;
    size_t missing = strlen(known); /* bytes */
    for (char *line = text; found && line && (end = strchr(line, '\n')); line = end + 1) {
        const size_t len = (size_t)(end + 1 - line);
        found = memmem(known, strlen(known), line, len);
        if (found && found > known && found[-1] != '\n') found = NULL; /* the end of a line only */
        if (found) *found = ' ';
        missing -= len;
    }
    free(text), free(known);
    return !found ? WRONG : missing ? SHORT : RIGHT;
}

static Verdict judge_figures(void) {
    static const char *const keys[] = {"sweeps", "tiers", "best", "frontier", "perplexity", "tokens", "windows"};
    Error err;
    cJSON *now = json_read(path_of("result"), MAX_BYTES, &err), *then = json_read(path_of("reference"), MAX_BYTES, &err);
    bool same = cJSON_GetArraySize(now) == cJSON_GetArraySize(then);
    for (size_t k = 0; k < COUNT(keys); k++)
        if (json_get(then, keys[k])) same &= cJSON_Compare(json_get(then, keys[k]), json_get(now, keys[k]), true);
    const Verdict verdict = !now ? SHORT : same ? RIGHT : WRONG;
    cJSON_Delete(now), cJSON_Delete(then);
    return verdict;
}

static Verdict judge_result(Form form) {
    Hardware h;
    Error err;
    if (form == LINES) return judge_lines();
    if (form == FIGURES) return judge_figures();
    if (form == MACHINE) return hardware_read(&h, path_of("result"), &err) ? SHORT : RIGHT;
    if (!shell("diff -r result reference >/dev/null 2>&1")) return RIGHT;
    /* what is on standard output cannot be taken back, so the exit status must say it */
    return form == TEXT || !is_there("result") ? SHORT : WRONG;
}

// ---- Cases ----------------------------------------------------------------------------------------------------------

/* Ways to fail: a class and an errno; 0: to be short. + : and all calls after it */
static const char *const ways[] = {
    "open:5",    "open+:24",   "read:5",    "read:0",     "read:4",     "pread:5",     "pread+:5", "pread:0",
    "pread:4",   "write:28",   "write+:28", "write:0",    "write:4",    "pwrite:28",   "pwrite:5", "pwrite:0",
    "pwrite:4",  "sync:5",     "sync+:5",   "sync:4",     "allocate:4", "allocate:28", "mmap:12",  "mmap+:12",
    "malloc:12", "malloc+:12", "thread:11", "thread+:11", "stat:5",     "stat+:12",    "unlink:5", "unlink+:13",
    "lock:37",   "lock:4",     "key:11",    "inner:12",   "inner+:12"};

/* Calls of a way's class in the undisturbed run. */
static long count_of(const char *way) {
    char key[20];
    snprintf(key, sizeof key, "\n%.*s ", (int)strcspn(way, "+:"), way);
    const char *counts = keep(text_of("counts")), *at = counts ? strstr(counts, key) : NULL;
    return at ? atol(at + strlen(key)) : 0;
}

/* The lines of standard error that begin so. */
static int lines_with(const char *text, const char *prefix) {
    int n = 0;
    for (const char *at = text; at && (at = strstr(at, prefix)); at++) n += at == text || at[-1] == '\n';
    return n;
}

/* Returns what is wrong with what a run ended with and left behind, or NULL. finish has looked for an offload file. */
static const char *judge(const Result *r, Verdict result, bool unlinks) {
    const int lines = lines_with(r->err, "flexgen: ");
    if (r->status >= 1000) return "crashes";
    if (result == WRONG) return "leaves a wrong result";
    const char *journal = keep(text_of("result.journal"));
    if (!r->status && journal && !strstr(journal, JOURNAL_ENDED)) return "leaves a journal of what is done";
    if (!r->status && (result != RIGHT || lines)) return "calls it done";
    if (r->status > EXIT_USAGE) return "ends with another status";
    if (r->status && (lines != 1 || strstr(r->err, "flexgen: bug") || lines_with(r->err, "flexgen: \n")))
        return "does not say why in one line";
    if (!unlinks && (is_there("result*.tmp*") || is_there("flexgen/*.json?*"))) return "leaves an unfinished file";
    return NULL;
}

/* True if the disturbed run ends with the right result, or with a line that says why not and nothing that looks whole. */
static bool ends_well(const Errand *job, const char *fault) {
    const Result r = run(job, fault, "");
    const bool kept = job->form == LINES && !job->to_stdout;
    const char *wrong = judge(&r, judge_result(job->form), !strncmp(fault, "unlink", 6));
    if (!wrong && r.status && kept && (run(job, "", "--resume").status || judge_lines() != RIGHT))
        wrong = "leaves what cannot go on";
    if (wrong) fprintf(stderr, "\n    %s with FAULT=%s %s: status %d: %s", job->name, fault, wrong, r.status, r.err);
    shell("rm -rf result result.*");
    cases++, refused += r.status && !wrong;
    return !wrong;
}

/* Runs the job undisturbed: its calls are counted, and its result is the reference. */
static bool make_reference(const Errand *job) {
    const bool made = !run(job, "", "").status && !shell("rm -rf reference && mv result reference");
    CU_ASSERT(made);
    return made;
}

static void *ask_for_too_much(void *unused) {
    xcalloc((size_t)1 << 62, 1);
    return unused;
}

/* A process takes its time to end, as long as what it does at its end. */
static void end_slowly(void) { usleep(50000); }

TEST(threads_that_find_no_memory_say_so_once) {
    enum { THREADS = 4 };
    int status;
    open_directories();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        pthread_t thread[THREADS];
        redirect(2, path_of("err"), O_WRONLY | O_CREAT | O_TRUNC);
        CHECK(!atexit(end_slowly));
        for (int t = 0; t < THREADS; t++) CHECK(!pthread_create(&thread[t], NULL, ask_for_too_much, NULL));
        for (int t = 0; t < THREADS; t++) pthread_join(thread[t], NULL);
        _exit(0);
    }
    CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_FAILED);
    CU_ASSERT_EQUAL(lines_with(keep(text_of("err")), "flexgen: out of memory"), 1);
}

/* Whatever read of a directory fails, and these are the last: a copy is not refused because of what another run has left,
 * and that is either removed or said. */
TEST(what_a_killed_run_has_left_harms_no_other) {
    const Errand job = {.args = "quantize" TINY " --output @result"};
    int said = 0;
    open_directories();
    if (!make_reference(&job) || !count_of("read")) return; /* nothing but memory and threads can be disturbed here */
    for (long calls = count_of("read"), n = calls - 10; n <= calls + 4; n++) {
        char fault[30];
        snprintf(fault, sizeof fault, "read:%ld:5", n);
        if (!is_there("result.tmp-*")) leave_unfinished(path_of("result"), true);
        const Result r = run(&job, fault, "");
        const bool left = is_there("result.tmp-*");
        const int lines = lines_with(r.err, path_of("result.tmp-*: cannot remove"));
        CU_ASSERT(r.status == EXIT_FAILED || (!r.status && judge_result(MODEL_DIRECTORY) == RIGHT));
        CU_ASSERT(lines <= 1 && (lines || !left)); /* where the end alone cannot be read, all has been removed */
        CU_ASSERT(!lines || (!r.status && !lines_with(r.err, "flexgen: ")));
        said += left;
        shell("rm -rf result");
    }
    CU_ASSERT_EQUAL(said, 2); /* what is beside cannot be read, or what is in it */
    shell("rm -rf result.*");
}

/* The last calls read the last layers, where the large matrices are read around the page cache. */
TEST(a_read_of_weights_that_is_interrupted_is_repeated) {
    const Errand job = {.args = BENCHED " --percent 0 0 100 0 100 0 --gen-len 1 --json @result"};
    open_directories();
    if (!make_reference(&job)) return;
    for (long calls = count_of("pread"), n = calls - 11; n <= calls && calls; n++) {
        char fault[30];
        snprintf(fault, sizeof fault, "pread:%ld:4", n);
        const Result r = run(&job, fault, "");
        const bool right = !r.status && judge_figures() == RIGHT;
        if (!right) fprintf(stderr, "\n    with FAULT=%s: status %d: %s", fault, r.status, r.err);
        CU_ASSERT(right);
        shell("rm result");
    }
}

/* In `make test` one N for every third way, another for each job; of a job that measures for every twelfth. Otherwise N is
 * 1, and so on in equal steps, in at most so many. */
TEST(whatever_call_fails_a_command_says_so) {
    enum { LINE = 21000, PROMPTS = 3, LETTERS = 20000 /* of a prompt's id */ };
    const char *given = getenv("FAULT_CASES"), *only = getenv("FAULT_JOB"), *class = getenv("FAULT_CLASS");
    const long most = given ? atol(given) : 0;
    char *text = keep(xcalloc(PROMPTS, LINE)), *end = text;
    open_directories();
    for (int i = 0; i < PROMPTS; i++)
        end += sprintf(end, "{\"id\": \"%d%0*d\", \"prompt\": \"Once upon\"}\n", i, LETTERS, 0);
    write_file(capture, "long.jsonl", text, (size_t)(end - text));
    setenv("XDG_CACHE_HOME", capture, 1); /* where a machine that was measured is kept */
    for (int j = 0; j < (int)COUNT(jobs); j++) {
        const Errand *job = &jobs[j];
        const long before = cases;
        if (only && strcmp(only, job->name)) continue;
        if (job->goes_on) {
            with.file = HALF; /* a job is stopped on a full disk, with some of its lines written */
            CU_ASSERT_EQUAL(flexgen(GENERATED " --percent 100 0 100 0 100 0 --num-gpu-batches 1").status, EXIT_FAILED);
            CU_ASSERT_EQUAL_FATAL(shell("test -s result && mv result half && mv result.journal half.journal"), 0);
        }
        if (!make_reference(job) || !count_of("malloc")) continue; /* a sanitizer's, say: nothing is counted */
        for (int w = 0; w < (int)COUNT(ways); w++) {
            const int len = (int)strcspn(ways[w], "+:"); /* of the class */
            const long calls = count_of(ways[w]), step = most ? 1 + (calls - 1) / most : calls + 1;
            if (class && strncmp(class, ways[w], len)) continue;
            const int stride = job->measures ? 12 : 3;
            if (!most && ((w + j) % stride || !test_takes((w + j) / stride))) continue;
            for (long n = most ? 1 : 1 + 7919L * (w + 1) * (j + 1) % imax(calls, 1); n <= calls; n += step) {
                char fault[60];
                snprintf(fault, sizeof fault, "%.*s:%ld%s", len, ways[w], n, ways[w] + len);
                CU_ASSERT(ends_well(job, fault));
            }
        }
        printf("\n    %s: %ld cases; so far %ld refused ", job->name, cases - before, refused);
    }
}
