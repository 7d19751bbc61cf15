/* tests.h: what every suite shares. A suite is a file test_<name>.c that defines
 *     CU_TestInfo tests[] = {{"a sentence that is true", function}, ..., CU_TEST_INFO_NULL};
 * The Makefile finds it by its file name and makes a program of it, which runs in the repository root. */
#ifndef TESTS_H
#define TESTS_H
#include <CUnit/CUnit.h>
#include <math.h>

#include "app/app.h"
#include "device/parts.h"

extern CU_TestInfo tests[]; /* the suite's */

/* max|a-b| / max|b|, the error of a row of numbers relative to its largest one. NaN anywhere gives NaN, which is not
 * `<=` any tolerance, so that the assertion fails. */
double max_norm_error(const float *a, const float *b, size_t n);
/* A fresh directory under TMPDIR, removed with everything in it after the suite. */
const char *temp_dir(void);
void remove_temp_dirs(void);
/* Entries of a directory. */
int count_files(const char *dir);
/* Writes bytes to dir/name. */
void write_file(const char *dir, const char *name, const void *bytes, size_t len);
/* dir/name, until the fourth call behind this one. */
char *in_dir(const char *dir, const char *name);
/* A whole file, which the caller frees, and in *len, if that is not NULL, its bytes. Without it the test ends. */
char *contents(const char *path, size_t *len);
void copy_file(const char *from, const char *to, const char *name); /* from one directory to another */
bool has_python(void);                                              /* without it what is about scripts is left out */
/* In a child: fd is the file, opened with these flags. */
void redirect(int fd, const char *path, int flags);
/* Cuts a text, in place, into words at blanks, but not within '...'; NULL is behind the last. Returns how many there are.
 */
int split_words(char *text, char *words[], int most);
/* A small reproducible generator for test data: uniform in [-1, 1); 0 to n - 1; over orders of magnitude. */
float test_random(uint64_t *state);
/* quant.h's packed form a number at a time: packs x[0], x[stride], ... x[(n-1) stride]; false where one is not finite. And
 * what the codes stand for: min + scale * code. */
bool plain_pack(uint8_t *to, const f16 *x, size_t stride, int n);
void plain_numbers(float *x, const uint8_t *from, int n);
int test_below(uint64_t *state, int n);
double test_spread(uint64_t *state, double low, double high);
/* A published OPT. */
OptConfig opt_named(const char *name);
/* count equal prompts of s times token 0, n to generate; free_task frees them. */
Task equal_task(int count, int s, int n);
void free_task(Task *task);
/* A machine so fast that nothing takes any time; a test then slows what it looks at. */
Hardware test_fast_machine(void);
/* Everything rests on the GPU; one block of num_gpu_batches batches of gbs prompts, with overlap and pages of 16 tokens. */
Policy all_gpu(int gbs, int num_gpu_batches);

// ---- local_net.c: a network between threads of one process ------------------------------------------------------

/* The ends of the stages of a pipeline; each is to be closed. With rendezvous a send returns only when its message has been
 * received; otherwise it is copied, as what is posted always is. Each message becomes visible up to delay_us later. When
 * all are closed and none has failed, no message may be left. */
void local_net_open(Net *net[], int stages, bool rendezvous, int delay_us);
/* What this end has sent. To be read when no function is running. */
typedef struct {
    uint64_t messages, bytes;
} LocalCount;
const LocalCount *local_net_count(const Net *net, NetKind kind);

// ---- main.c -----------------------------------------------------------------------------------------------------

/* A suite whose tests cannot all run everywhere defines it: NULL, or why the test of that name cannot run here. */
const char *test_missing(const char *name) __attribute__((weak));
/* One that starts its own program as a stage of a pipeline defines it: what `test_NAME --stage WHAT` does. */
int test_stage(const char *what) __attribute__((weak));
/* One whose tests run in children, each of which opens the GPU itself, defines it: called at the end. */
void test_ended(unsigned failures) __attribute__((weak));

/* What main.c found and was told. The engine's suites run on test_gpu, or where it is NULL on the host device; of long
 * lists of combinations they take every test_every-th. */
extern Gpu *test_gpu;
extern int test_every;
static inline Type test_act_type(void) { return test_gpu ? F16 : F32; }
static inline Device *test_open(const Plan *plan, const Checkpoint *checkpoint, const char *dir, Error *err) {
    return test_gpu ? cuda_open(test_gpu, plan, checkpoint, dir, err) : host_open(plan, checkpoint, dir, err);
}

/* A model of odd sizes on purpose: no dimension is a multiple of what a vector register holds. eos_id -1: nothing stops. */
#define SMALL_CONFIG(eos_id)                                                                                               \
    {                                                                                                                      \
        .name = "test", .l = 3, .h1 = 60, .h2 = 100, .nh = 3, .vocab = 131, .max_pos = 128, .embed = 60, .pre_norm = true, \
        .final_norm = true, .eos = (eos_id)                                                                                \
    }

#define ASSERT_OK(call)                              \
    do {                                             \
        if ((call) != 0) {                           \
            fprintf(stderr, "\n    %s\n", err.text); \
            CU_FAIL_FATAL(#call);                    \
        } else                                       \
            CU_PASS(#call);                          \
    } while (0)
#endif
