/* answers.c: see answers.h. */
#include "answers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_SAID = 3 };

static double most_seconds = 20;       /* for a question */
static const double STEP_SECONDS = 50; /* for all of a step */
static double step_ends;
static uint64_t seed;  /* decides all cases of a run */
static uint64_t state; /* of the generator, set anew in each step */
int step, number, variant;
static int said;          /* in this step */
static int all_said;      /* in all steps */
static char context[400]; /* what in_case said of this case */
static long printed[2];   /* where in the log is what was printed for this case: from the first byte up to the second */

// ---- What is drawn --------------------------------------------------------------------------------------------------

double draw_real(double low, double high) { return low + (high - low) * (test_random(&state) + 1) / 2; }
int draw(int low, int high) { return low + (int)((test_random(&state) + 1) / 2 * (high - low + 1)); }

void draw_order(int *order, int n) {
    for (int i = 0; i < n; i++) {
        const int other = draw(0, i);
        order[i] = order[other];
        order[other] = i;
    }
}

// ---- What is said ---------------------------------------------------------------------------------------------------

void in_case(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(context, sizeof context, format, list);
    va_end(list);
}

void wrong(const char *format, ...) {
    char text[600];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    all_said++;
    if (said++ >= MOST_SAID) return;
    printf("%s    Found: %s%s%s\n", said > 1 ? "" : "\n", context, *context ? ": " : "", text);
    if (said == 1) printf("    Printed: %ld %ld\n", printed[0], printed[1]);
    CU_FAIL("a wrong value");
}

bool near_to(double found, double expected, double tolerance, const char *where, ...) {
    char place[400];
    va_list list;
    if (fabs(found - expected) <= tolerance) return true;
    va_start(list, where);
    vsnprintf(place, sizeof place, where, list);
    va_end(list);
    wrong("%s: expected %.9g, found %.9g", place, expected, found);
    return false;
}

bool near_row(const float *found, const float *expected, int n, double tolerance) {
    double largest = 0;
    for (int i = 0; i < n; i++) largest = fmax(largest, fabs(expected[i]));
    for (int i = 0; i < n; i++)
        if (!near_to(found[i], expected[i], tolerance * largest, "number %d", i)) return false;
    return true;
}

// ---- An exam --------------------------------------------------------------------------------------------------------

#define SIZES(kind, type, answer) {sizeof(type), offsetof(type, answer)},
static const struct {
    size_t bytes, question; /* of the struct, and of its first part */
} size_of[NASKS] = {QUESTIONS(SIZES)};

static struct {
    AskKind kind;
    char *c;
} asked;

static struct {
    pid_t pid; /* and its process group; 0: none runs */
    int questions, answers;
} exam;

void ask(AskKind kind, void *c) {
    asked.kind = kind, asked.c = c;
    memset(c, 0, size_of[kind].bytes);
}

/* The exam in a session of its own, which shares processors fairly with others: of the open files it has its questions, its
 * answers and its log. */
static void start_exam(const char *program) {
    const char *command = getenv("GRADE_EXAM"), *log = getenv("GRADE_LOG"), *dir = getenv("GRADE_EXAMS");
    char path[1000];
    int questions[2], answers[2];
    snprintf(path, sizeof path, "%s/%s", dir ? dir : "build", program);
    CHECK(!pipe2(questions, O_CLOEXEC) && !pipe2(answers, O_CLOEXEC));
    fflush(NULL);
    exam.pid = fork();
    CHECK(exam.pid >= 0);
    if (!exam.pid) {
        setsid();
        const int out = open(log ? log : "/dev/null", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        CHECK(out >= 0 && dup2(questions[0], 0) == 0 && dup2(out, 1) == 1 && dup2(out, 2) == 2);
        const int copy = fcntl(answers[1], F_DUPFD, ANSWERS_FD + 1); /* which may be ANSWERS_FD itself */
        CHECK(copy > 0 && dup2(copy, ANSWERS_FD) == ANSWERS_FD && !close(copy));
        signal(SIGPIPE, SIG_DFL);
        unsetenv("GRADE_SEED");
        unsetenv("GRADE_VARIANT");
        unsetenv("GRADE_LOG");
        unsetenv("GRADE_QUESTION");
        if (command) execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        execl(path, path, (char *)NULL);
        fprintf(stderr, "%s cannot be started\n", path);
        _exit(127);
    }
    close(questions[0]), close(answers[1]);
    exam.questions = questions[1], exam.answers = answers[0];
    fcntl(exam.questions, F_SETFL, O_NONBLOCK), fcntl(exam.answers, F_SETFL, O_NONBLOCK);
}

static void stop_exam(void) {
    if (!exam.pid) return;
    kill(-exam.pid, SIGKILL);
    kill(exam.pid, SIGKILL);
    waitpid(exam.pid, NULL, 0);
    close(exam.questions), close(exam.answers);
    exam.pid = 0;
}

/* Writes to the exam, or reads from it, until that many bytes are there. Returns NULL, or why they are not. */
static const char *pass(void *at, size_t bytes, bool to, double end) {
    static char late[80];
    struct pollfd wait = {to ? exam.questions : exam.answers, to ? POLLOUT : POLLIN, 0};
    snprintf(late, sizeof late, "it did not end within %g seconds", end < step_ends ? most_seconds : STEP_SECONDS);
    for (size_t had = 0; had < bytes;) {
        const double left = end - seconds_now();
        if (left <= 0 || !poll(&wait, 1, (int)(left * 1000) + 1)) return late;
        const ssize_t n = to ? write(wait.fd, (char *)at + had, bytes - had) : read(wait.fd, (char *)at + had, bytes - had);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n <= 0) return "the whole program ended without an answer";
        had += n;
    }
    return NULL;
}

/* Asks the exam. Returns NULL, or why it has not answered. */
static const char *why_unanswered(void) {
    static char status[80];
    const size_t question = size_of[asked.kind].question, answer = size_of[asked.kind].bytes - question;
    const double end = fmin(seconds_now() + most_seconds, step_ends);
    Ask header = {asked.kind, (int32_t)question};
    Reply reply = {0, 0};
    const char *why = pass(&header, sizeof header, true, end);
    if (!why) why = pass(asked.c, question, true, end);
    if (!why) why = pass(&reply, sizeof reply, false, end);
    if (!why && (size_t)reply.bytes != answer) why = "the whole program answered by itself";
    if (!why) why = pass(asked.c + question, answer, false, end);
    if (why) return why;
    if (!reply.status) return NULL;
    if (reply.status == CHANGED) return "what was given has been written to";
    if (reply.status == ENDED) return "it ended the program, and did not return";
    if (WIFSIGNALED(reply.status))
        snprintf(status, sizeof status, "it crashed: %s", strsignal(WTERMSIG(reply.status)));
    else
        snprintf(status, sizeof status, "it ended the program, exit status %d, and did not return",
                 WEXITSTATUS(reply.status));
    return status;
}

bool ask_more(AskKind kind, void *c) {
    asked.kind = kind, asked.c = c;
    return !why_unanswered();
}

/* Returns the bytes of the log so far. */
static long logged(void) {
    struct stat log;
    const char *path = getenv("GRADE_LOG");
    return path && !stat(path, &log) ? (long)log.st_size : 0;
}

/* Keeps the question in the file GRADE_QUESTION, as an exam reads it. */
static void keep_question(void) {
    const Ask header = {asked.kind, (int32_t)size_of[asked.kind].question};
    FILE *f = fopen(getenv("GRADE_QUESTION"), "wb");
    CHECK(f && fwrite(&header, sizeof header, 1, f) == 1 && fwrite(asked.c, header.bytes, 1, f) == 1 && !fclose(f));
}

// ---- A step ---------------------------------------------------------------------------------------------------------

/* Takes the step that has the name of the test; each test is a step. */
static void take_step(void) {
    const char *name = CU_get_current_test()->pName;
    const Exercise *e = exercises;
    for (step = 1; strcmp(e->steps[step - 1], name) != 0; step++) {
        if (step < MOST_STEPS && e->steps[step]) continue;
        step = 0; /* of the next exercise */
        e++;
    }
    state = seed;
    said = 0;
    step_ends = seconds_now() + STEP_SECONDS;
    for (; *name; name++) state = state * 1099511628211u + (unsigned char)*name;
    for (number = 0; number < e->cases; number++) {
        *context = 0;
        if (!e->draw()) continue;
        if (!exam.pid) start_exam(e->program);
        if (getenv("GRADE_QUESTION") && !all_said) keep_question(); /* which is that of the first wrong case in the end */
        printed[0] = logged();
        const char *why = why_unanswered();
        printed[1] = logged();
        if (why) {
            wrong("%s", why);
            break;
        }
        e->check();
    }
    stop_exam();
}

// ---- The run --------------------------------------------------------------------------------------------------------

/* The kernels' exam needs the emulation of a GPU. */
const char *test_missing(const char *name) {
    char path[1000];
    const char *dir = getenv("GRADE_EXAMS");
    if (getenv("GRADE_EXAM")) return NULL;
    for (const Exercise *e = exercises; e->steps[0]; e++)
        for (int i = 0; i < MOST_STEPS && e->steps[i]; i++) {
            snprintf(path, sizeof path, "%s/%s", dir ? dir : "build", e->program);
            if (!strcmp(e->steps[i], name) && access(path, X_OK)) return "some exams, since their programs are not built";
        }
    return NULL;
}

/* Runs before main: reads the settings of the run, and adds the steps as tests. */
__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("GRADE_SEED"), *seconds = getenv("GRADE_SECONDS"), *which = getenv("GRADE_VARIANT");
    if (seconds) most_seconds = atof(seconds);
    if (which) variant = atoi(which);
    CHECK((unsigned)variant < VARIANTS);
    seed = given && *given ? strtoull(given, NULL, 10) : (uint64_t)(seconds_now() * 1e6) % 1000000;
    if (!given) printf("GRADE_SEED=%llu\n", (unsigned long long)seed);
    seed = seed * 2 + 1; /* never 0 */
    signal(SIGPIPE, SIG_IGN);
    for (const Exercise *e = exercises; e->steps[0]; e++)
        for (int i = 0; i < MOST_STEPS && e->steps[i]; i++) test_add(e->steps[i], take_step);
}
