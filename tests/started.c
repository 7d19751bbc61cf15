/* started.c: see started.h. */
#include "tests/started.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LONGEST = 10 /* times the patience, of any run */, MOST_HANGS = 2 };
static const double HARDLY = .02; /* seconds of computing: a program that wakes up now and then needs less */

/* The program that was started last. */
static struct {
    pid_t pid;
    double computed; /* seconds, on all its threads, when it was looked at */
    char command[1000];
} newest;

With with;
char offload[300], capture[300];

void *keep(void *p) {
    static void **kept;
    static int n;
    kept = xrealloc(kept, (size_t)n + 1, sizeof *kept);
    return kept[n++] = p;
}

void open_directories(void) {
    if (offload[0]) return;
    snprintf(offload, sizeof offload, "%s", temp_dir());
    snprintf(capture, sizeof capture, "%s", temp_dir());
    setenv("TMPDIR", offload, 1); /* the default --offload-dir */
    setenv("XDG_CACHE_HOME", temp_dir(), 1);
    setenv("CUDA_VISIBLE_DEVICES", "", 1); /* the host device, also where there is a GPU */
}

static void limit(int resource, rlim_t most) {
    if (most) CHECK(!setrlimit(resource, &(struct rlimit){most, most}));
}

/* Seconds: a thirtieth of what suite.sh gives the suite. */
static unsigned patience(void) {
    const char *given = getenv("SUITE_SECONDS");
    return (unsigned)(given ? atoi(given) : 600) / 30 + 1;
}

/* On SIGALRM: a program hangs that has hardly computed for so long, or has computed for longer. One that waits for a
 * processor, because much else runs, gets a little of it, and does not. */
static void look(int signal) {
    struct timespec t = {0};
    clockid_t clock;
    if (!clock_getcpuclockid(newest.pid, &clock)) clock_gettime(clock, &t);
    const double computed = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    if (computed - newest.computed < HARDLY || computed > patience()) kill(newest.pid, signal);
    newest.computed = computed;
    alarm(patience());
}

/* In the child: limits, files, and off it goes. */
__attribute__((noreturn)) static void become(const char *const *argv) {
    redirect(0, with.input ? with.input : "/dev/null", O_RDONLY);
    if (with.pipe)
        CHECK(dup2(with.pipe, 1) == 1);
    else
        redirect(1, with.output ? with.output : in_dir(capture, "out"), O_WRONLY | O_CREAT | O_TRUNC);
    redirect(2, in_dir(capture, "err"), O_WRONLY | O_CREAT | O_TRUNC);
    limit(RLIMIT_AS, with.memory), limit(RLIMIT_DATA, with.data), limit(RLIMIT_FSIZE, with.file);
    limit(RLIMIT_STACK, with.stack);
    if (with.fault) setenv("LD_PRELOAD", getenv("FAULTS_LIBRARY"), 1), setenv("FAULT", with.fault, 1);
    for (const char *const *set = with.set; *set; set++) putenv((char *)*set);
    signal(SIGINT, SIG_DFL); /* a shell's background jobs ignore it, and so would the program */
    alarm(LONGEST * patience());
    execvp(argv[0], (char *const *)argv);
    _exit(127);
}

pid_t start_program(const char *const *argv) {
    open_directories();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) become(argv);
    size_t len = 0;
    newest.pid = pid, newest.computed = 0, newest.command[0] = 0;
    for (; *argv && len < sizeof newest.command; argv++)
        len += (size_t)snprintf(newest.command + len, sizeof newest.command - len, " %s", *argv);
    CHECK(!sigaction(SIGALRM, &(struct sigaction){.sa_handler = look, .sa_flags = SA_RESTART}, NULL));
    alarm(patience());
    return pid;
}

bool program_runs(pid_t pid) {
    siginfo_t ended = {.si_pid = 0};
    return !waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) && !ended.si_pid;
}

Result finish(pid_t pid) {
    static int hangs;
    struct rusage usage;
    int status;
    CHECK(wait4(pid, &status, 0, &usage) == pid);
    alarm(0);
    Result r = {.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status),
                .resident = usage.ru_maxrss * 1024};
    r.out = keep(with.output || with.pipe ? xstrdup("") : contents(in_dir(capture, "out"), &r.out_len));
    r.err = keep(contents(in_dir(capture, "err"), &r.err_len));
    memset(&with, 0, sizeof with);
    CU_ASSERT_EQUAL(count_files(offload), 0);
    if (r.status != 1000 + SIGALRM) return r;
    fprintf(stderr, "\n    hangs:%s\n", newest.command);
    CU_FAIL("a program hangs");
    if (++hangs < MOST_HANGS) return r;
    /* what makes one program hang can make all hang; the suite is to end all the same, and soon */
    fprintf(stderr, "    the suite ends: %d programs hang\n", hangs);
    exit(EXIT_FAILED);
}

// ---- flexgen --------------------------------------------------------------------------------------------------------

pid_t start_flexgen(const char *format, ...) {
    enum { MOST = 64 };
    const char *bin = getenv(with.emulated ? "FLEXGEN_EMULATED" : "FLEXGEN_BIN");
    char *line, *words[MOST] = {(char *)(bin ? bin : "./flexgen")};
    va_list list;
    open_directories();
    va_start(list, format);
    CHECK(vasprintf(&line, format, list) >= 0);
    va_end(list);
    split_words(keep(line), words + 1, MOST - 1);
    for (char **word = words + 1; *word; word++)
        if (**word == '@') *word = keep(xstrdup(in_dir(capture, *word + 1)));
    return start_program((const char *const *)words);
}

static bool ended_with(const Result *r, int status) {
    const bool one_line = r->err_len && strchr(r->err, '\n') == r->err + r->err_len - 1,
               refused = !r->out_len && one_line && !strncmp(r->err, "flexgen: ", 9),
               right = r->status == status && (status ? refused : !strstr(r->err, "flexgen: "));
    if (!right) fprintf(stderr, "\n   %s: status %d, %zu bytes out: %s\n", newest.command, r->status, r->out_len, r->err);
    return right;
}

Result went_well(Result r) {
    CU_ASSERT_FATAL(ended_with(&r, 0));
    return r;
}

bool shows(const char *text, const char *pattern) {
    char parts[1000], *part = parts;
    const char *at = text;
    CHECK((size_t)snprintf(parts, sizeof parts, "%s", pattern) < sizeof parts);
    for (char *next; part; part = next) {
        next = strstr(part, " ... ");
        if (next) *next = 0, next += strlen(" ... ");
        at = strstr(at, part);
        if (!at) return fprintf(stderr, "\n    no \"%s\" in its place: %s\n", part, text), false;
        at += strlen(part);
    }
    return true;
}

void assert_ends(Result r, int status, const char *said) { CU_ASSERT(ended_with(&r, status) && shows(r.err, said)); }
