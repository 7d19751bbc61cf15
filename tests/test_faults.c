/* test_faults.c: whatever call of the program fails, it ends with the right result or with one line, and never with a half
 * result that looks whole.
 *
 * Each command does a small job with faults.so loaded before it, first undisturbed, which counts its calls, and then once
 * for each case: the N-th call of a class fails, is short or is interrupted; or that one and all after it. `make test`
 * takes some cases of each job; scripts/fault_test.sh takes them all (FAULT_CASES: at most so many N for each way to fail;
 * FAULT_JOB, FAULT_CLASS: only of this job, only calls of this class).
 */
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define MODEL "--model", "models/opt-tiny"
enum { TIMEOUT = 60 /* seconds, of a run that hangs */, MOST_LINES = 100, MAX_BYTES = 1 << 28, SPACE = 250 << 20 };

static char dir[300], offload[300]; /* where results go; where runs may leave nothing */
static char unfinished[400];        /* what they may not leave of a machine that they measured */
static long cases, refused;         /* so far; of them that ended with our line */

// ---------------------------------------------------------------------------------------------------------------
// Jobs
// ---------------------------------------------------------------------------------------------------------------

/* What a result is: lines in any order; JSON with figures that depend on no time; a text; a directory; a machine. */
typedef enum { LINES, FIGURES, TEXT, MODEL_DIRECTORY, MACHINE } Form;

/* A job writes its result to the file RESULT, or to standard output. */
typedef struct {
    const char *name;
    Form form;
    bool to_stdout;
    bool measures; /* with a hurried clock and little memory, which make it quick */
    bool kept;     /* in a journal: whatever fails, the job can go on */
    bool goes_on;  /* with what a run before has left */
    const char *args[32];
} Errand;

#define RESULT "RESULT"
#define LONG "LONG" /* prompts whose lines are longer than the buffers of the C library */
// clang-format off
#define PLACED "--percent", "0", "50", "0", "50", "0", "50", "--gpu-batch-size", "2", "--num-gpu-batches", "2"
#define GENERATED "generate", MODEL, "--prompts", "models/prompts.txt", PLACED, "--max-tokens", "4", "--threads", "2", \
                  "--output", RESULT
#define BENCHED "bench", MODEL, "--prompt-len", "16", "--gen-len", "3", PLACED, "--threads", "1"
#define SEARCHED "policy", "--model", "opt-1.3b", "--hardware", "hardware/t4.json", "--prompt-len", "64", "--gen-len", "8", \
                 "--num-prompts", "8"
static const Errand jobs[] = {
    {"generate", LINES, .kept = true, .args = {GENERATED}},
    {"resume", LINES, .kept = true, .goes_on = true, .args = {GENERATED, "--resume"}},
    {"long lines", LINES, .kept = true, .args = {"generate", MODEL, "--prompts", LONG, PLACED, "--max-tokens", "2",
                                                 "--threads", "1", "--output", RESULT}},
    {"searched", LINES, .to_stdout = true, .args = {"generate", MODEL, "--prompts", "-", "--max-tokens", "2",
                                                    "--hardware", "hardware/laptop.json"}},
    {"bench", FIGURES, .args = {BENCHED, "--compress-cache", "--json", RESULT}},
    {"trace", FIGURES, .args = {BENCHED, "--trace", RESULT}},
    {"policy", FIGURES, .args = {SEARCHED, "--json", RESULT}},
    {"frontier", FIGURES, .args = {SEARCHED, "--frontier", "--json", RESULT}},
    {"explain", TEXT, .to_stdout = true, .args = {SEARCHED, "--explain"}},
    {"quantize", MODEL_DIRECTORY, .args = {"quantize", MODEL, "--output", RESULT}},
    {"eval", FIGURES, .args = {"eval", MODEL, "--perplexity", "models/opt-tiny/stories.txt", "--window", "64", "--limit", "2",
                               "--percent", "0", "100", "50", "0", "100", "0", "--gpu-batch-size", "2",
                               "--num-gpu-batches", "1", "--json", RESULT}},
    {"profile", MACHINE, .measures = true, .args = {"profile", MODEL, "--threads", "1", "--disk-mem", "1M",
                                                    "--output", RESULT}},
};
// clang-format on
static const char *path_of(const char *name) {
    static char path[8][400];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], sizeof path[next], "%s/%s", dir, name);
    return path[next];
}

/* Runs a job, disturbed by `fault` if it is not NULL. Its exit status, or 1000 + the signal that ended it. */
static int run(const Errand *job, const char *fault, bool resume) {
    const char *bin = getenv("FLEXGEN_BIN"), *argv[40] = {bin ? bin : "build/flexgen_host"};
    int status, n = 1;
    for (const char *const *a = job->args; *a; a++)
        argv[n++] = !strcmp(*a, RESULT) ? path_of("result") : !strcmp(*a, LONG) ? path_of("long.jsonl") : *a;
    if (resume) argv[n] = "--resume";
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        redirect(0, "models/prompts.txt", O_RDONLY);
        redirect(1, path_of(job->to_stdout ? "result" : "out"), O_WRONLY | O_CREAT | O_TRUNC);
        redirect(2, path_of("err"), O_WRONLY | O_CREAT | O_TRUNC);
        setenv("LD_PRELOAD", getenv("FAULTS_LIBRARY") ? getenv("FAULTS_LIBRARY") : "build/faults.so", 1);
        fault ? setenv("FAULT", fault, 1) : setenv("FAULT_COUNTS", path_of("counts"), 1);
        if (job->measures) setenv("FAULT_HASTE", "2000", 1);
        if (job->measures) CHECK(!setrlimit(RLIMIT_AS, &(struct rlimit){SPACE, SPACE}));
        alarm(TIMEOUT);
        execv(argv[0], (char *const *)argv);
        _exit(127);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

// ---------------------------------------------------------------------------------------------------------------
// Results
// ---------------------------------------------------------------------------------------------------------------

typedef enum { RIGHT, SHORT, WRONG } Verdict; /* short: it says itself that it is not whole */

static void shell(const char *format, const char *path) {
    char command[900];
    snprintf(command, sizeof command, format, path, path, path, path);
    CHECK(system(command) == 0);
}

/* Three prompts with ids of 20,000 letters. */
static void write_long_prompts(void) {
    enum { LINE = 21000 };
    char *text = xcalloc(3, LINE), *end = text;
    for (int i = 0; i < 3; i++) end += sprintf(end, "{\"id\": \"%d%0*d\", \"prompt\": \"Once upon\"}\n", i, 20000, 0);
    write_file(dir, "long.jsonl", text, (size_t)(end - text));
    free(text);
}

/* The job stopped on a disk that was full for a while, with some of its lines written. */
static void leave_half(const Errand *job) {
    struct stat st = {.st_size = 0};
    for (int n = 1; !st.st_size; n++) {
        char fault[30];
        shell("rm -f '%s'*", path_of("result"));
        snprintf(fault, sizeof fault, "pwrite:%d+:28", n);
        CU_ASSERT_FATAL(run(job, fault, false) == EXIT_FAILED && stat(path_of("result"), &st) == 0);
    }
    shell("mv '%s' '%s-half' && mv '%s.journal' '%s-half.journal'", path_of("result"));
}

static void restore_half(void) { shell("cp '%s-half' '%s' && cp '%s-half.journal' '%s.journal'", path_of("result")); }

/* NULL: there is no such file. */
static char *text_of(const char *path) {
    Error err;
    size_t len;
    return access(path, F_OK) ? NULL : file_read(path, MAX_BYTES, &len, &err);
}

/* Every line that ends is one of the reference, and not twice. */
static Verdict judge_lines(const char *path, const char *reference) {
    char *text = text_of(path), *known = text_of(reference), *end;
    bool seen[MOST_LINES] = {false};
    int lines = 0, total = 0;
    Verdict verdict = RIGHT;
    for (char *c = known; *c; c++) total += *c == '\n';
    for (char *line = text; line && (end = strchr(line, '\n')); line = end + 1, lines++) {
        int number = 0;
        char *other = known, *other_end;
        for (; (other_end = strchr(other, '\n')); other = other_end + 1, number++)
            if (end - line == other_end - other && !memcmp(line, other, (size_t)(end - line))) break;
        if (!other_end || seen[number]) verdict = WRONG;
        if (other_end) seen[number] = true;
    }
    free(text), free(known);
    return verdict == RIGHT && lines < total ? SHORT : verdict;
}

static Verdict judge_figures(const char *path, const char *reference) {
    static const char *const keys[] = {"sweeps", "tiers", "best", "frontier", "perplexity", "tokens", "windows"};
    Error err;
    cJSON *now = json_read(path, MAX_BYTES, &err), *then = json_read(reference, MAX_BYTES, &err);
    Verdict verdict = now ? RIGHT : SHORT;
    for (size_t k = 0; now && k < sizeof keys / sizeof *keys; k++)
        if (json_get(then, keys[k]) && !cJSON_Compare(json_get(then, keys[k]), json_get(now, keys[k]), true))
            verdict = WRONG;
    if (now && cJSON_GetArraySize(now) != cJSON_GetArraySize(then)) verdict = WRONG;
    cJSON_Delete(now), cJSON_Delete(then);
    return verdict;
}

/* The same, or not: what is on standard output cannot be taken back, so the exit status must say it. */
static Verdict judge_text(const char *path, const char *reference) {
    char *now = text_of(path), *then = text_of(reference);
    const Verdict verdict = now && !strcmp(now, then) ? RIGHT : SHORT;
    free(now), free(then);
    return verdict;
}

static Verdict judge_directory(const char *path, const char *reference) {
    char command[1000];
    struct stat st;
    if (stat(path, &st)) return SHORT;
    snprintf(command, sizeof command, "diff -r '%s' '%s' >/dev/null", path, reference);
    return system(command) ? WRONG : RIGHT;
}

static Verdict judge_machine(const char *path, const char *reference) {
    Hardware h;
    Error err;
    (void)reference;
    return hardware_read(&h, path, &err) ? SHORT : RIGHT;
}

static void remove_result(const char *path) { shell("rm -rf '%s' '%s'.*", path); }

// ---------------------------------------------------------------------------------------------------------------
// Cases
// ---------------------------------------------------------------------------------------------------------------

/* Ways to fail. short: errno 0. + : and all calls after it */
static const struct {
    const char *class, *how;
} ways[] = {{"open", ":5"},     {"open", "+:24"},    {"read", ":5"},     {"read", ":0"},    {"read", ":4"},
            {"pread", ":5"},    {"pread", "+:5"},    {"pread", ":0"},    {"pread", ":4"},   {"write", ":28"},
            {"write", "+:28"},  {"write", ":0"},     {"write", ":4"},    {"pwrite", ":28"}, {"pwrite", ":5"},
            {"pwrite", ":0"},   {"pwrite", ":4"},    {"sync", ":5"},     {"sync", "+:5"},   {"sync", ":4"},
            {"allocate", ":4"}, {"allocate", ":28"}, {"mmap", ":12"},    {"mmap", "+:12"},  {"malloc", ":12"},
            {"malloc", "+:12"}, {"thread", ":11"},   {"thread", "+:11"}, {"stat", ":5"},    {"stat", "+:12"},
            {"unlink", ":5"},   {"unlink", "+:13"},  {"lock", ":37"},    {"lock", ":4"},    {"key", ":11"},
            {"inner", ":12"},   {"inner", "+:12"}};
enum { NWAYS = sizeof ways / sizeof *ways };

/* Calls of a class in the undisturbed run. */
static long count_of(const char *class) {
    char *counts = text_of(path_of("counts")), key[20];
    snprintf(key, sizeof key, "%s ", class);
    const char *at = counts ? strstr(counts, key) : NULL;
    while (at && at > counts && at[-1] != '\n') at = strstr(at + 1, key);
    long n = at ? atol(at + strlen(key)) : 0;
    free(counts);
    return n;
}

/* The lines of standard error that begin so. */
static int lines_with(const char *text, const char *prefix) {
    int n = 0;
    for (const char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        n += !strncmp(line, prefix, strlen(prefix));
    return n;
}

static bool is_there(const char *pattern) {
    glob_t found;
    const bool there = glob(pattern, 0, NULL, &found) == 0;
    if (there) globfree(&found);
    return there;
}

/* What is wrong with what a run ended with and left behind; NULL: nothing. */
static const char *judge(int status, Verdict result, const char *err) {
    if (status >= 1000) return status == 1000 + SIGALRM ? "hangs" : "crashes";
    if (result == WRONG) return "leaves a wrong result";
    if (count_files(offload)) return "leaves an offload file";
    if (status == 0 && is_there(path_of("result.journal"))) return "leaves a journal of what is done";
    if (status == 0) return result == RIGHT && !lines_with(err, "flexgen: ") ? NULL : "calls it done";
    if (status != EXIT_FAILED && status != EXIT_USAGE) return "ends with another status";
    if (lines_with(err, "flexgen: ") != 1 || strstr(err, "flexgen: bug")) return "does not say why in one line";
    refused++;
    return NULL;
}

static bool try(const Errand *job, const char *fault) {
    static Verdict (*const judges[])(const char *, const char *) = {judge_lines, judge_figures, judge_text, judge_directory,
                                                                    judge_machine};
    if (job->goes_on) restore_half();
    const int status = run(job, fault, false);
    char *err = text_of(path_of("err"));
    const Verdict result = judges[job->form](path_of("result"), path_of("reference"));
    const char *wrong = judge(status, result, err);
    if (!wrong && (is_there(path_of("result.tmp*")) || is_there(unfinished)) && strncmp(fault, "unlink", 6))
        wrong = "leaves an unfinished file";
    if (!wrong && status && job->kept &&
        (run(job, NULL, !job->goes_on) || judge_lines(path_of("result"), path_of("reference")) != RIGHT))
        wrong = "leaves what cannot go on";
    if (wrong) fprintf(stderr, "\n    %s with FAULT=%s %s: status %d: %s", job->name, fault, wrong, status, err);
    free(err);
    remove_result(path_of("result"));
    cases++;
    return !wrong;
}

/* N = 1, and so on in equal steps, in at most so many. In `make test` one N for every third way, another for each job; of a
 * job that measures for every twelfth. */
static void try_way(const Errand *job, int w, long most) {
    const int number = (int)(job - jobs);
    const long calls = count_of(ways[w].class), step = most ? 1 + (calls - 1) / most : calls + 1;
    long n = most ? 1 : 1 + (7919L * (w + 1) * (number + 1)) % (calls ? calls : 1);
    for (; n <= calls && (most || (w + number) % (job->measures ? 12 : 3) == 0); n += step) {
        char fault[60];
        snprintf(fault, sizeof fault, "%s:%ld%s", ways[w].class, n, ways[w].how);
        CU_ASSERT(try(job, fault));
    }
}

static void make_directories(void) {
    if (dir[0]) return;
    snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(offload, sizeof offload, "%s", temp_dir());
    setenv("TMPDIR", offload, 1); /* the default --offload-dir */
    setenv("XDG_CACHE_HOME", temp_dir(), 1);
    snprintf(unfinished, sizeof unfinished, "%s/flexgen/*.json?*", getenv("XDG_CACHE_HOME"));
    write_long_prompts();
}

static const Errand *job_named(const char *name) {
    const Errand *job = jobs;
    while (strcmp(job->name, name) != 0) job++;
    return job;
}

/* Runs the job undisturbed: its calls are counted, and its result is the reference. */
static void make_reference(const Errand *job) {
    CU_ASSERT_EQUAL_FATAL(run(job, NULL, false), 0);
    remove_result(path_of("reference"));
    CU_ASSERT_EQUAL_FATAL(rename(path_of("result"), path_of("reference")), 0);
}

static void try_job(const char *name) {
    const char *given = getenv("FAULT_CASES"), *only = getenv("FAULT_JOB"), *way = getenv("FAULT_CLASS");
    const long most = given ? atol(given) : 0, before = cases;
    const Errand *job = job_named(name);
    if (only && strcmp(only, name) != 0) return;
    make_directories();
    if (job->goes_on) leave_half(&jobs[0]), restore_half();
    make_reference(job);
    if (!count_of("malloc")) return; /* a sanitizer's, say: nothing is counted */
    for (int w = 0; w < NWAYS; w++)
        if (!way || !strcmp(way, ways[w].class)) try_way(job, w, most);
    printf("\n    %s: %ld cases; so far %ld refused ", job->name, cases - before, refused);
}

static void *ask_for_too_much(void *unused) {
    xcalloc((size_t)1 << 62, 1);
    return unused;
}

/* A process takes its time to end, as long as what it does at its end. */
static void end_slowly(void) { usleep(50000); }

static void threads_that_find_no_memory_say_so_once(void) {
    enum { THREADS = 4 };
    int status;
    make_directories();
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
    char *err = text_of(path_of("err"));
    CU_ASSERT_EQUAL(lines_with(err, "flexgen: out of memory"), 1);
    free(err);
}

/* Whatever read fails, of a directory too: a copy is not refused because of what another run has left, and that is either
 * removed or said. */
static void what_a_killed_run_has_left_harms_no_other(void) {
    const Errand *job = job_named("quantize");
    int said = 0;
    make_directories();
    make_reference(job);
    if (!count_of("read")) return; /* nothing but memory and threads can be disturbed here */
    for (long n = 1, calls = count_of("read") + 4; n <= calls; n++) {
        char fault[30];
        snprintf(fault, sizeof fault, "read:%ld:5", n);
        if (access(path_of("result.tmp-1"), F_OK)) CHECK(!mkdir(path_of("result.tmp-1"), 0700));
        write_file(path_of("result.tmp-1"), "config.json", "{}", 2);
        const int status = run(job, fault, false);
        char *err = text_of(path_of("err"));
        const bool left = !access(path_of("result.tmp-1"), F_OK);
        const int lines = lines_with(err, path_of("result.tmp-*: cannot remove"));
        CU_ASSERT(status == EXIT_FAILED || (!status && judge_directory(path_of("result"), path_of("reference")) == RIGHT));
        CU_ASSERT(lines <= 1 && (lines || !left)); /* where the end alone cannot be read, all has been removed */
        CU_ASSERT(!lines || (!status && !lines_with(err, "flexgen: ")));
        said += left;
        free(err);
        shell("rm -rf '%s'", path_of("result"));
    }
    CU_ASSERT_EQUAL(said, 2); /* what is beside cannot be read, or what is in it */
    remove_result(path_of("result"));
}

static void whatever_fails_generate_says_so(void) { try_job("generate"), try_job("resume"), try_job("long lines"); }
static void whatever_fails_bench_and_policy_say_so(void) {
    try_job("searched"), try_job("bench"), try_job("trace"), try_job("policy"), try_job("frontier"), try_job("explain");
}
static void whatever_fails_quantize_says_so(void) { try_job("quantize"); }
static void whatever_fails_eval_says_so(void) { try_job("eval"); }
static void whatever_fails_profile_says_so(void) { try_job("profile"); }

CU_TestInfo tests[] = {
    {"whatever fails, generate says so", whatever_fails_generate_says_so},
    {"whatever fails, bench and policy say so", whatever_fails_bench_and_policy_say_so},
    {"whatever fails, quantize says so", whatever_fails_quantize_says_so},
    {"whatever fails, eval says so", whatever_fails_eval_says_so},
    {"whatever fails, profile says so", whatever_fails_profile_says_so},
    {"what a killed run has left harms no other", what_a_killed_run_has_left_harms_no_other},
    {"threads that find no memory say so once", threads_that_find_no_memory_say_so_once},
    CU_TEST_INFO_NULL,
};
