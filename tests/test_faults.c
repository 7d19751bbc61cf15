/* test_faults.c: whatever call of the program fails, it ends with the right result or with one line, and never with a half
 * result that looks whole.
 *
 * Each command does a small job with faults.so loaded before it, first undisturbed, which counts its calls, and then once
 * for each case: the N-th call of a class fails, is short or is interrupted; or that one and all after it. `make test`
 * takes some cases of each job; scripts/fault_test.sh takes them all (FAULT_CASES: at most so many N for each way to fail).
 */
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

#define MODEL "--model", "models/opt-tiny"
enum { TIMEOUT = 60 /* seconds, of a run that hangs */, MOST_LINES = 100, MAX_BYTES = 1 << 28 };

static char dir[300], offload[300]; /* where results go; where runs may leave nothing */
static long cases, refused;         /* so far; of them that ended with our line */

// ---------------------------------------------------------------------------------------------------------------
// Jobs
// ---------------------------------------------------------------------------------------------------------------

/* What a result is: lines in any order; JSON with figures that depend on no time; a directory; a machine. */
typedef enum { LINES, FIGURES, MODEL_DIRECTORY, MACHINE } Form;

/* A job writes its result to the file RESULT, or to standard output. */
typedef struct {
    const char *name;
    Form form;
    bool to_stdout, slow;
    const char *args[32];
} Errand;

#define RESULT "RESULT"
static const Errand jobs[] = {
    {"generate", LINES, .args = {"generate",  MODEL,
                                 "--prompts", "models/prompts.txt",
                                 "--percent", "0",
                                 "50",        "0",
                                 "50",        "0",
                                 "50",        "--gpu-batch-size",
                                 "2",         "--num-gpu-batches",
                                 "2",         "--max-tokens",
                                 "4",         "--threads",
                                 "2",         "--output",
                                 RESULT}},
    {"searched", LINES, .to_stdout = true,
     .args = {"generate", MODEL, "--prompts", "-", "--max-tokens", "2", "--hardware", "hardware/laptop.json"}},
    {"bench", FIGURES,
     .args = {"bench",
              MODEL,
              "--prompt-len",
              "16",
              "--gen-len",
              "3",
              "--percent",
              "50",
              "0",
              "0",
              "50",
              "0",
              "50",
              "--gpu-batch-size",
              "2",
              "--num-gpu-batches",
              "2",
              "--compress-cache",
              "--threads",
              "1",
              "--json",
              RESULT}},
    {"policy", FIGURES,
     .args = {"policy", "--model", "opt-1.3b", "--hardware", "hardware/t4.json", "--prompt-len", "64", "--gen-len", "8",
              "--num-prompts", "8", "--json", RESULT}},
    {"quantize", MODEL_DIRECTORY, .args = {"quantize", MODEL, "--output", RESULT}},
    {"eval", FIGURES,
     .args = {"eval",
              MODEL,
              "--perplexity",
              "models/opt-tiny/stories.txt",
              "--window",
              "64",
              "--limit",
              "2",
              "--percent",
              "0",
              "100",
              "50",
              "0",
              "100",
              "0",
              "--gpu-batch-size",
              "2",
              "--num-gpu-batches",
              "1",
              "--json",
              RESULT}},
    {"profile", MACHINE, .slow = true, .args = {"profile", MODEL, "--output", RESULT}},
};
enum { NJOBS = sizeof jobs / sizeof *jobs };

static const char *path_of(const char *name) {
    static char path[4][400];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", dir, name);
    return path[next];
}

static void redirect(int fd, const char *path, int flags) {
    int opened = open(path, flags, 0644);
    CHECK(opened >= 0 && dup2(opened, fd) == fd);
    close(opened);
}

/* Runs a job, disturbed by `fault` if it is not NULL. Its exit status, or 1000 + the signal that ended it. */
static int run(const Errand *job, const char *fault) {
    const char *bin = getenv("FLEXGEN_BIN"), *argv[40] = {bin ? bin : "build/flexgen_host"};
    int status;
    for (int a = 0; job->args[a]; a++) argv[a + 1] = strcmp(job->args[a], RESULT) ? job->args[a] : path_of("result");
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        redirect(0, "models/prompts.txt", O_RDONLY);
        redirect(1, path_of(job->to_stdout ? "result" : "out"), O_WRONLY | O_CREAT | O_TRUNC);
        redirect(2, path_of("err"), O_WRONLY | O_CREAT | O_TRUNC);
        setenv("LD_PRELOAD", getenv("FAULTS_LIBRARY") ? getenv("FAULTS_LIBRARY") : "build/faults.so", 1);
        fault ? setenv("FAULT", fault, 1) : setenv("FAULT_COUNTS", path_of("counts"), 1);
        alarm(TIMEOUT * (job->slow ? 10 : 1));
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
    static const char *const keys[] = {"sweeps", "tiers", "best", "perplexity", "tokens", "windows"};
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

static void remove_result(const char *path) {
    char command[500];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'.*", path, path);
    CHECK(system(command) == 0);
}

// ---------------------------------------------------------------------------------------------------------------
// Cases
// ---------------------------------------------------------------------------------------------------------------

/* Ways to fail. short: errno 0. + : and all calls after it */
static const struct {
    const char *class, *how;
} ways[] = {{"open", ":5"},     {"open", "+:24"},    {"read", ":5"},    {"read", ":0"},    {"read", ":4"},
            {"pread", ":5"},    {"pread", "+:5"},    {"pread", ":0"},   {"pread", ":4"},   {"write", ":28"},
            {"write", "+:28"},  {"write", ":0"},     {"write", ":4"},   {"pwrite", ":28"}, {"pwrite", ":5"},
            {"pwrite", ":0"},   {"pwrite", ":4"},    {"sync", ":5"},    {"sync", "+:5"},   {"sync", ":4"},
            {"allocate", ":4"}, {"allocate", ":28"}, {"mmap", ":12"},   {"mmap", "+:12"},  {"malloc", ":12"},
            {"malloc", "+:12"}, {"thread", ":11"},   {"thread", "+:11"}};
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

/* What is wrong with what a run ended with and left behind; NULL: nothing. */
static const char *judge(int status, Verdict result, const char *err) {
    if (status >= 1000) return status == 1000 + SIGALRM ? "hangs" : "crashes";
    if (result == WRONG) return "leaves a wrong result";
    if (count_files(offload)) return "leaves an offload file";
    if (status == 0) return result == RIGHT && !lines_with(err, "flexgen: ") ? NULL : "calls it done";
    if (status != EXIT_FAILED && status != EXIT_USAGE) return "ends with another status";
    if (lines_with(err, "flexgen: ") != 1 || strstr(err, "flexgen: bug")) return "does not say why in one line";
    refused++;
    return NULL;
}

static bool try(const Errand *job, const char *fault) {
    static Verdict (*const judges[])(const char *, const char *) = {judge_lines, judge_figures, judge_directory,
                                                                    judge_machine};
    const int status = run(job, fault);
    char *err = text_of(path_of("err"));
    const Verdict result = judges[job->form](path_of("result"), path_of("reference"));
    const char *wrong = judge(status, result, err);
    if (wrong) fprintf(stderr, "\n    %s with FAULT=%s %s: status %d: %s", job->name, fault, wrong, status, err);
    free(err);
    remove_result(path_of("result"));
    cases++;
    return !wrong;
}

/* N = 1, and so on in equal steps, in at most so many. In `make test` one N for each way, another for each job. */
static void try_way(const Errand *job, int w, long most) {
    const long calls = count_of(ways[w].class), step = most ? 1 + (calls - 1) / most : calls + 1;
    long n = most ? 1 : 1 + (7919L * (w + 1) * (job - jobs + 1)) % (calls ? calls : 1);
    for (; n <= calls; n += step) {
        char fault[60];
        snprintf(fault, sizeof fault, "%s:%ld%s", ways[w].class, n, ways[w].how);
        CU_ASSERT(try(job, fault));
    }
}

static void try_job(const Errand *job) {
    const char *given = getenv("FAULT_CASES");
    const long most = given ? atol(given) : 0;
    const long before = cases;
    if (job->slow && !most) return;
    if (!dir[0]) {
        snprintf(dir, sizeof dir, "%s", temp_dir());
        snprintf(offload, sizeof offload, "%s", temp_dir());
        setenv("TMPDIR", offload, 1); /* the default --offload-dir */
        setenv("XDG_CACHE_HOME", temp_dir(), 1);
    }
    CU_ASSERT_EQUAL_FATAL(run(job, NULL), 0);
    remove_result(path_of("reference"));
    CU_ASSERT_EQUAL_FATAL(rename(path_of("result"), path_of("reference")), 0);
    if (!count_of("malloc")) return; /* a sanitizer's, say: nothing is counted */
    for (int w = 0; w < NWAYS; w++) try_way(job, w, job->slow ? 1 : most);
    printf("\n    %s: %ld cases; so far %ld refused ", job->name, cases - before, refused);
}

static void whatever_fails_generate_says_so(void) { try_job(&jobs[0]), try_job(&jobs[1]); }
static void whatever_fails_bench_and_policy_say_so(void) { try_job(&jobs[2]), try_job(&jobs[3]); }
static void whatever_fails_quantize_says_so(void) { try_job(&jobs[4]); }
static void whatever_fails_eval_says_so(void) { try_job(&jobs[5]); }
static void whatever_fails_profile_says_so(void) { try_job(&jobs[6]); }

CU_TestInfo tests[] = {
    {"whatever fails, generate says so", whatever_fails_generate_says_so},
    {"whatever fails, bench and policy say so", whatever_fails_bench_and_policy_say_so},
    {"whatever fails, quantize says so", whatever_fails_quantize_says_so},
    {"whatever fails, eval says so", whatever_fails_eval_says_so},
    {"whatever fails, profile says so", whatever_fails_profile_says_so},
    CU_TEST_INFO_NULL,
};
