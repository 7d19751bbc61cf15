/* answers.h: the driver of the grades (test_grade.c): it draws the cases of a step, has a student's code answer them, and
 * has the answers checked.
 *
 * The code that is graded runs in a process of its own, which has no output and gives back values alone; what is expected,
 * and the verdict, are of the process that asked. So whatever the code prints, and however it ends, earns nothing. Cases
 * are drawn from the seed of the run, so a table of answers earns nothing either. */
#ifndef ANSWERS_H
#define ANSWERS_H
#include <unistd.h>

#include "tests.h"

/* The steps of an exercise that have their cases in common. `step` is the one that is taken, from 1; `number` that of the
 * case that is drawn, from 0. */
enum { MOST_STEPS = 6 };
extern int step, number;
typedef struct {
    const char *steps[MOST_STEPS]; /* sentences, the names of the tests */
    int cases;                     /* that are drawn, at most */
    void *c;                       /* the case; 0 at first */
    size_t bytes;                  /* the size of the case */
    void *answer;        /* the last part of the case, which the graded code fills in; it must not write to others */
    bool (*draw)(void);  /* fills in what is given; false: the step has no such case */
    void (*work)(void);  /* in a child: has the code that is graded fill in the answer */
    void (*check)(void); /* says what is wrong with the answer */
} Exercise;
/* The three fields for struct c, whose answer begins at that field. */
#define CASE(c, answer) &(c), sizeof(c), &(c).answer
extern const Exercise exercises[]; /* up to one without steps; answers.c makes tests of their steps */

/* Says what the case is, before what is wrong with it. */
void in_case(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Says what was found, where, and what was expected, of the first few in a test; it fails. */
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Whether found is within tolerance of expected; if not, `where` is said with both. */
bool near_to(double found, double expected, double tolerance, const char *where, ...) __attribute__((format(printf, 4, 5)));
/* Says the first of n numbers that is not within tolerance times the largest that is expected; false if there is one. */
bool near_row(const float *found, const float *expected, int n, double tolerance);

/* What is drawn in a step is the same for the same seed, whatever was drawn in others. */
int draw(int low, int high); /* low to high, both of them */
double draw_real(double low, double high);
void draw_order(int *order, int n); /* 0 to n - 1, shuffled */
#endif
