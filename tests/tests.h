/* tests.h: what every suite shares. A suite is a file test_<name>.c with tests,
 *     TEST(a_sentence_that_is_true) { ... }
 * The Makefile finds it by its file name and makes a program of it, which runs in the repository root. */
#ifndef TESTS_H
#define TESTS_H
#include <CUnit/CUnit.h>
#include <math.h>

#include "app/app.h"
#include "device/parts.h"

/* A test, by the name that is its sentence. Those of a suite run in the order in which they stand. */
#define TEST(name)                                                                       \
    static void name(void);                                                              \
    __attribute__((constructor)) static void add_##name(void) { test_add(#name, name); } \
    static void name(void)
void test_add(const char *name, void (*run)(void));

/* max|a-b| / max|b|, the error of a row of numbers relative to its largest one. NaN anywhere gives NaN, which is not
 * `<=` any tolerance, so that the assertion fails. */
double max_norm_error(const float *a, const float *b, size_t n);
/* A fresh directory under TMPDIR, removed with everything in it when the suite ends, or by the next one if it was killed.
 * Its path stays until the fourth call behind this one. */
const char *temp_dir(void);
void forget_temp_dirs(void); /* in a child, which is then a suite of its own */
void remove_temp_dirs(void); /* exit calls it; a program that dies has to */
/* Entries of a directory. */
int count_files(const char *dir);
/* Writes bytes to dir/name. */
void write_file(const char *dir, const char *name, const void *bytes, size_t len);
/* dir/name, until the fourth call behind this one. */
char *in_dir(const char *dir, const char *name);
/* A whole file, which the caller frees, and in *len, if that is not NULL, its bytes. Without it the test ends. */
char *contents(const char *path, size_t *len);
/* What a process leaves that is killed while it makes a result at PATH: a directory with one file, or a file. Its name,
 * until the next call. */
const char *leave_unfinished(const char *path, bool directory);
void copy_file(const char *from, const char *to, const char *name); /* from one directory to another */
bool has_python(void);                                              /* without it what is about scripts is left out */
/* Runs lines of Python in the repository, `begin` before them. They can import what is in scripts/, have a temporary
 * directory, `dir`, and a function `same`, which ends them if two values differ. Returns 0 if they ran to their end. */
int python(const char *begin, const char *lines);
/* In a child: fd is the file, opened with these flags. */
void redirect(int fd, const char *path, int flags);
/* True if the function aborts, in a process of its own. */
bool aborts(void (*run)(void));
/* Cuts a text, in place, into words at blanks, but not within '...'; NULL is behind the last. Returns their number. */
int split_words(char *text, char *words[], int most);
/* A small reproducible generator for test data: uniform in [-1, 1); 0 to n - 1; over orders of magnitude. */
float test_random(uint64_t *state);
/* quant.h's packed form a number at a time: packs x[0], x[stride], ... x[(n-1) stride]; false where one is not finite. And
 * what the codes stand for: min + scale * code. */
bool plain_pack(uint8_t *to, const f16 *x, size_t stride, int n);
void plain_numbers(float *x, const uint8_t *from, int n);
int test_below(uint64_t *state, int n);
double test_spread(uint64_t *state, double low, double high);
/* True if a is b, but for a few roundings. */
static inline bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }
/* A published OPT. */
OptConfig opt_named(const char *name);
/* Tasks of prompts with lengths s[i] and n[i], of random tokens below vocab behind a first </s>, given ones included, or of
 * equal lengths and tokens 0. free_task frees both. */
Task random_task(int count, const int *s, const int *n, int vocab, uint64_t seed);
Task equal_task(int count, int s, int n);
void sample(Task *task, Sampling sampling); /* all of its prompts */
void free_task(Task *task);
/* A machine so fast that nothing takes any time, but for what "KEY=NUMBER ..." changes, the keys of a hardware file. */
Hardware machine_with(const char *changes);
/* One block of num_gpu_batches batches of gbs prompts, with overlap and pages of 16 tokens: everything rests on the GPU, or
 * as the shares say. */
Policy all_gpu(int gbs, int num_gpu_batches);
Policy on_tiers(double wg, double wc, double cg, double cc, double hg, double hc, int gbs, int num_gpu_batches);
Policy placed(const double share[6], int gbs, int num_gpu_batches);
/* Draws the shares of GPU and CPU: all on one tier, round ones, whole percent, or any. */
void draw_shares(double *gpu, double *cpu, uint64_t *state);
/* The question to the search if nothing is given. */
Search open_question(const Hardware *hardware, const Checkpoint *model, const Task *task);
/* Prints it to standard error, for a test that has failed. */
void say_policy(const Policy *p);

// ---- the engine -----------------------------------------------------------------------------------------------------

/* The answer to a prompt, as the listener has heard it. */
typedef struct {
    int32_t *tokens; /* [n] */
    int n, done;     /* tokens; how often it has ended */
    FinishReason reason;
    float *steps;  /* (n, vocab), the logits of every step; NULL unless they are kept */
    float *logits; /* its last step's */
    float *logp;   /* [s + n], of a scored task, as is best */
    int32_t *best;
    int scored; /* how many tokens have been scored; -1: not in order */
} Answer;

/* A task and the engine that runs it. The test fills in the first fields, as far as it wants others than the usual ones. */
typedef struct {
    const Checkpoint *model;
    Policy policy;
    const Task *task;
    const Hardware *sim; /* NULL: not a sim, but the suite's device */
    Gpu *gpu;            /* NULL: test_gpu */
    Net *net;            /* NULL: no pipeline */
    const char *dir;     /* for the disk's file; NULL: a new one */
    Listener hears;      /* the test's own functions, which are called besides */
    /* filled in by rig_open: */
    Plan *plan; /* unless it is given */
    Device *device;
    /* and by rig_run: */
    int prompts;
    Answer *answer; /* [prompts] */
    RunStats stats;
    Bytes planned[NTIERS], peak[NTIERS], moved[NCHANNELS][NKINDS];
    Bytes read[2];  /* K and V that attention on the CPU has read */
    int pages;      /* in the CPU tier's pool */
    double seconds; /* by the device's clock */
    Error err;
} Rig;

/* Makes the plan, opens the device and loads the weights. Returns -1 and err if that fails. */
int rig_open(Rig *r);
/* Opens what is not open, and runs the task. Returns -1 and err if that fails. */
int rig_run(Rig *r);
/* Closes device and plan; what has been heard and counted stays until rig_close. */
void rig_stop(Rig *r);
void rig_close(Rig *r);
/* Returns a rig that has run and stopped. The test ends if that fails. */
Rig rig_ran(const Checkpoint *model, const Policy *policy, const Task *task, const Hardware *sim);
/* True if a has heard of every prompt once, and the same as b, bit for bit. */
bool rig_same(const Rig *a, const Rig *b);
/* Posts a copy of elements first to first + n - 1 of a row that lies on each tier, in the direction of the call's lane and
 * behind an event. */
Event post_row(Device *device, Call call, const Tensor on[NTIERS], int first, int n, Event after);
static const Event no_event = {0, 0};
/* Returns the bytes of all layers and the head as they stream, of a model whose embeddings have h1 numbers. Each tensor
 * must fill its lines of 64 bytes, as those of the published models do, or lie in a file, which has no such lines. */
Bytes streamed_bytes(const OptConfig *config);

// ---- local_net.c: a network between threads of one process ----------------------------------------------------------

/* The ends of the stages of a pipeline; each is to be closed. With rendezvous a send returns only when its message has been
 * received; otherwise it is copied, as what is posted always is. Each message becomes visible up to delay_us later. When
 * all are closed no message may be left, and no stage may fail: both abort. There is one network at a time: the next one
 * may be opened when all ends of this one are closed. */
void local_net_open(Net *net[], int stages, bool rendezvous, int delay_us);

// ---- main.c ---------------------------------------------------------------------------------------------------------

/* A suite whose tests cannot all run everywhere defines it: NULL, or why the test of that name cannot run here. */
const char *test_missing(const char *name) __attribute__((weak));

/* What main.c found and was told. The engine's suites run on test_gpu, or where it is NULL on the host device; of long
 * lists of combinations they take every test_every-th. */
extern Gpu *test_gpu;
extern int test_every;
/* True for every test_every-th of such numbers. TEST_TURN in the environment says for which, so that others come another
 * time. */
bool test_takes(int number);
static inline Type test_act_type(void) { return test_gpu ? F16 : F32; }

/* A model with a random checkpoint, and one of odd sizes on purpose: no dimension is a multiple of what a vector register
 * holds. eos_id -1: nothing stops. */
#define TEST_CONFIG(layers, hidden, inner, heads, words, eos_id)                                                       \
    {                                                                                                                  \
        .name = "test", .l = (layers), .h1 = (hidden), .h2 = (inner), .nh = (heads), .vocab = (words), .max_pos = 128, \
        .embed = (hidden), .pre_norm = true, .final_norm = true, .eos = (eos_id)                                       \
    }
#define SMALL_CONFIG(eos_id) TEST_CONFIG(3, 60, 100, 3, 131, eos_id)

#define ASSERT_OK(call)                              \
    do {                                             \
        if ((call) != 0) {                           \
            fprintf(stderr, "\n    %s\n", err.text); \
            CU_FAIL_FATAL(#call);                    \
        } else                                       \
            CU_PASS(#call);                          \
    } while (0)
#endif
