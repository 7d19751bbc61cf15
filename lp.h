/* lp.h: small linear programs (the inner problem of section 4.3). */
#ifndef LP_H
#define LP_H
#include <stdbool.h>

enum { LP_MAX_VARS = 24, LP_MAX_ROWS = 64 };

/* A row: a x <= b, or a x = b if equal is set. */
typedef struct {
    const char *name;
    double a[LP_MAX_VARS], b;
    bool equal;
} LpRow;

/* A linear program: minimize c x subject to the m rows and x >= 0, where x has n variables. */
typedef struct {
    int n, m;
    double c[LP_MAX_VARS];
    LpRow row[LP_MAX_ROWS];
} Lp;

typedef enum { LP_OPTIMAL, LP_INFEASIBLE, LP_UNBOUNDED, LP_LOST } LpVerdict;

/* A verdict and its proof: x, and a weight y for every row, which is at least 0 for a row with <=.
 *   optimal      x satisfies every row, c + y A >= 0, and c x = -y b: no x can do better. y says
 *                what a row's b is worth: how much the value falls for each unit added to b.
 *   infeasible   y A >= 0 and y b < 0: the rows, weighted by y, add up to a contradiction.
 *                Rows with y = 0 play no part.
 *   unbounded    c x falls without end in direction x: c x < 0, and for every row a x <= 0, or
 *                a x = 0 if equal is set.
 *   lost         No verdict passed its own test: the numbers are too far apart for doubles, or are
 *                not finite. */
typedef struct {
    LpVerdict verdict;
    int pivots; /* of the last order of the rows */
    int mended; /* dual pivots, and orders of the rows before it: 0 unless rounding spoils a verdict
                 */
    double value; /* c x of the optimum */
    double x[LP_MAX_VARS], y[LP_MAX_ROWS];
} LpAnswer;

/* Adds the row 0 x <= b, or = b, and returns it so that the caller can set its coefficients. The
 * name is not copied. */
LpRow *lp_row(Lp *lp, const char *name, bool equal, double b);
/* Solves the LP by simplex in two phases. Its numbers may be of any size from 1e-12 to 1e15. Takes
 * about 50 microseconds for the LPs of policy.c. */
void lp_solve(LpAnswer *answer, const Lp *lp);
/* Returns a x - b of a row, which is at most 0 if the row holds. */
double lp_excess(const LpRow *row, const double *x, int n);
/* Returns true if the row is binding at x, which means that a x - b is not below 0. */
bool lp_binds(const LpRow *row, const double *x, int n);
#endif
