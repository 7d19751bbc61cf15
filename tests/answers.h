/* answers.h: the driver of the judge (test_grade.c): it draws the cases of a step, asks an exam, which is linked with a
 * student's code, and has the answers checked.
 *
 * The exam is another program (exam.h), which the driver starts for each step, by the shell command GRADE_EXAM, or from the
 * directory GRADE_EXAMS. It gets questions and gives back numbers: no memory, file or output of the judge is in its reach,
 * so whatever the code does or prints earns nothing. Cases are drawn from the seed of the run, so a table of answers earns
 * nothing either. What the exam prints goes to the file GRADE_LOG. The question of the first wrong case stays in
 * GRADE_QUESTION, if that is a file's name. */
#ifndef ANSWERS_H
#define ANSWERS_H
#include "exam.h"
#include "tests.h"

/* The steps of an exercise that have their cases in common. `step` is the one that is taken, from 1; `number` that of the
 * case that is drawn, from 0. */
enum { MOST_STEPS = 6 };
extern int step, number;
/* Of the exercises' contracts: 0 is that of docs/EXERCISES.md, and scripts/exercises.txt has the others. The judge alone
 * knows which one a student has. */
enum { VARIANTS = 4 };
extern int variant;
typedef struct {
    const char *program;           /* the exam, in GRADE_EXAMS */
    const char *steps[MOST_STEPS]; /* sentences, the names of the tests */
    int cases;                     /* that are drawn, at most */
    bool (*draw)(void);            /* calls `ask` and fills in the question; false: the step has no such case */
    void (*check)(void);           /* says what is wrong with the answer, of which it trusts nothing */
} Exercise;
extern const Exercise exercises[]; /* up to one without steps; answers.c makes tests of their steps */

/* Says which struct is the case, and sets it to 0. */
void ask(AskKind kind, void *c);

/* Asks the exam something more, about the case that is checked. Returns false if it has not answered. */
bool ask_more(AskKind kind, void *c);

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
