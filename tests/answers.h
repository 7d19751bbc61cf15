/* answers.h: what a student's code answers, for the grades (test_grade.c).
 *
 * The code that is graded runs in a process of its own, which has no output and gives back values alone; what is expected,
 * and the verdict, are of the process that asked. So whatever the code prints, and however it ends, earns nothing. Cases
 * are drawn from the seed of the run, so a table of answers earns nothing either. */
#ifndef ANSWERS_H
#define ANSWERS_H
#include <unistd.h>

#include "tests.h"

/* In a child: work(answer, about), answer being `bytes` that are 0 at first. Returns them, until the next call. NULL: it
 * did not return, which has been said, and the test has failed. */
typedef void Work(void *answer, const void *about);
const void *ask(size_t bytes, Work *work, const void *about);
#define ASK(type, work, about) ((const type *)ask(sizeof(type), work, about))

/* Within work: what should not happen whatever the code that is graded does. */
#define MUST(call)                                                  \
    do {                                                            \
        if (!(call)) fprintf(stderr, "%s\n", err.text), _exit(127); \
    } while (0)

/* Says what was found, where, and what was expected, of the first few in a test; it fails. */
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Whether found is within tolerance of expected; if not, `where` is said with both. */
bool near_to(double found, double expected, double tolerance, const char *where, ...) __attribute__((format(printf, 4, 5)));

/* The cases of a step: the same for the same seed and name, whatever was drawn before. */
void draw_for(const char *step);
int draw(int low, int high); /* low to high, both of them */
double draw_real(double low, double high);
uint64_t draw_seed(void);
void draw_order(int *order, int n); /* 0 to n - 1, shuffled */
#endif
