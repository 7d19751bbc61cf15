/* lp.c: the simplex method for small dense linear programs; section 4.3 has one to solve for every (gbs, bls).
 *
 *     minimize c x   subject to   a x <= b or a x = b for every row,   x >= 0
 *
 * Each row gets a slack variable (a x + slack = b) and an artificial one, which may fill a gap that no x closes yet. The
 * tableau holds the rows multiplied by the inverse of the basis: every row is solved for its basic variable, and the other
 * variables are 0. Phase 1 minimizes the sum of the artificials; what it cannot bring to 0 is infeasible. Phase 2 minimizes
 * c x. A pivot swaps one variable in and one out. Bland's rule chooses them: the first column that lowers the cost, and of
 * the rows that block it first, that of the first variable. Other rules need fewer pivots, but may go round in circles.
 *
 * Numbers: rows and columns are scaled by powers of two, so nothing is rounded. What is left where equal numbers cancel is
 * called 0. At the end of a phase, and before a pivot that could be an error, the tableau is computed again from the rows
 * as given. And no verdict is believed: each has a proof (see LpAnswer) that is checked against the LP.
 *
 * Read next: policy.c, which writes Appendix A.3 as rows. */
#include <math.h>
#include <stdint.h>

#include "check.h"
#include "lp.h"

enum { PHASE_1, PHASE_2, NPHASES };
enum { COLS = LP_MAX_VARS + 2 * LP_MAX_ROWS + 1, MAX_PIVOTS = 1000, SCALE_PASSES = 4 };
/* Of scaled numbers, which are around 1. */
static const double COST_EPS = 1e-9, PIVOT_EPS = 1e-9, NOISE = 1e-13, SMALL = 1e-4;
static const double TOLERANCE = 1e-9; /* of a proof, as a share of the terms of a sum */

typedef struct {
    const Lp *lp;
    int n, m, width;                          /* columns: n variables, m slacks, m artificials, the right-hand side */
    int row_exp[LP_MAX_ROWS + 1];             /* powers of two that multiply the rows; [m]: c */
    int col_exp[LP_MAX_VARS + 1];             /* and the columns; [n]: b */
    double sign[LP_MAX_ROWS];                 /* -1: the row was turned round to make its right-hand side positive */
    int basis[LP_MAX_ROWS], pivots;           /* the basic variable of each row */
    bool fresh;                               /* computed from the LP, not by pivots of a search */
    double cell[LP_MAX_ROWS + NPHASES][COLS]; /* the rows; then each phase's cost, reduced to the nonbasic variables */
} Tableau;

LpRow *lp_row(Lp *lp, const char *name, bool equal, double b) {
    CHECK(lp->m < LP_MAX_ROWS);
    LpRow *row = &lp->row[lp->m++];
    *row = (LpRow){.name = name, .equal = equal, .b = b};
    return row;
}

/* A sum, and the size of what it is made of: it is 0 if it is small beside that. NaN passes for nothing. */
typedef struct {
    double sum, size;
} Sum;

static void add(Sum *s, double term) { s->sum += term, s->size += fabs(term); }
static bool at_most_0(Sum s) { return s.sum <= TOLERANCE * s.size; }
static bool at_least_0(Sum s) { return s.sum >= -TOLERANCE * s.size; }

static Sum excess(const LpRow *row, const double *x, int n) {
    Sum s = {0, 0};
    for (int j = 0; j < n; j++) add(&s, row->a[j] * x[j]);
    add(&s, -row->b);
    return s;
}

double lp_excess(const LpRow *row, const double *x, int n) { return excess(row, x, n).sum; }
bool lp_binds(const LpRow *row, const double *x, int n) { return at_least_0(excess(row, x, n)); }

// ---------------------------------------------------------------------------------------------------------------
// The tableau
// ---------------------------------------------------------------------------------------------------------------

/* The LP as given, with c below the rows and b right of the columns. */
static double given(const Tableau *t, int i, int j) {
    const Lp *lp = t->lp;
    if (i < t->m) return j < t->n ? lp->row[i].a[j] : lp->row[i].b;
    return j < t->n ? lp->c[j] : 0;
}

static double scaled(const Tableau *t, int i, int j) { return ldexp(given(t, i, j), t->row_exp[i] + t->col_exp[j]); }

/* The exponent of the largest number in row i (j < 0) or column j (i < 0), or the middle between the largest and the
 * smallest; 0 is no number here. */
static int exponent(const Tableau *t, int i, int j, bool middle) {
    int low = INT32_MAX, high = INT32_MIN, along = j < 0 ? t->n + 1 : t->m + 1;
    for (int k = 0; k < along; k++) {
        int r = j < 0 ? i : k, c = j < 0 ? k : j;
        double value = given(t, r, c);
        if (value == 0) continue;
        int e = ilogb(value) + t->row_exp[r] + t->col_exp[c];
        if (e < low) low = e;
        if (e > high) high = e;
    }
    return low > high ? 0 : middle ? (low + high) / 2 : high;
}

/* Brings all numbers near 1: rows and columns in turn are divided by their middle number, and at the end by their largest.
 */
static void scale(Tableau *t) {
    for (int pass = 0; pass < 2 * SCALE_PASSES; pass++) {
        bool middle = pass < SCALE_PASSES;
        for (int i = 0; i <= t->m; i++) t->row_exp[i] -= exponent(t, i, -1, middle);
        for (int j = 0; j <= t->n; j++) t->col_exp[j] -= exponent(t, -1, j, middle);
    }
}

/* The first tableau: the basis is each row's slack, or its artificial where the slack cannot be. */
static void load(Tableau *t) {
    int rhs = t->width - 1;
    double *cost_1 = t->cell[t->m + PHASE_1], *cost_2 = t->cell[t->m + PHASE_2];
    memset(t->cell, 0, sizeof t->cell);
    for (int i = 0; i < t->m; i++) {
        double *row = t->cell[i];
        int slack = t->n + i, artificial = t->n + t->m + i;
        bool equal = t->lp->row[i].equal;
        t->sign[i] = given(t, i, t->n) < 0 ? -1 : 1;
        for (int j = 0; j < t->n; j++) row[j] = t->sign[i] * scaled(t, i, j);
        row[slack] = equal ? 0 : t->sign[i];
        row[artificial] = 1;
        row[rhs] = t->sign[i] * scaled(t, i, t->n);
        t->basis[i] = row[slack] == 1 ? slack : artificial;
        cost_1[artificial] += 1;
        for (int c = 0; t->basis[i] == artificial && c < t->width; c++) cost_1[c] -= row[c];
    }
    for (int j = 0; j < t->n; j++) cost_2[j] = scaled(t, t->m, j);
}

/* a -= times b; what is left where equal numbers cancel is 0. */
static void subtract(double *restrict a, double times, const double *restrict b, int n) {
    for (int k = 0; k < n; k++) {
        double before = a[k], difference = before - times * b[k];
        a[k] = fabs(difference) <= NOISE * fabs(before) ? 0 : difference;
    }
}

/* Solves row r for the variable of column c. */
static void pivot(Tableau *t, int r, int c) {
    double *row = t->cell[r], factor = 1 / row[c];
    for (int k = 0; k < t->width; k++) row[k] *= factor;
    row[c] = 1;
    for (int i = 0; i < t->m + NPHASES; i++) {
        if (i == r || t->cell[i][c] == 0) continue;
        subtract(t->cell[i], t->cell[i][c], row, t->width);
        t->cell[i][c] = 0;
    }
    t->basis[r] = c;
    t->fresh = false;
}

/* Computes the tableau of the present basis from the LP: the slacks that are in both bases stay with their rows, the other
 * columns are solved for, the largest pivots first. False: columns depend on each other. */
static bool refresh(Tableau *t) {
    int columns[LP_MAX_ROWS], n = 0;
    bool wanted[COLS] = {false}, solved[LP_MAX_ROWS];
    for (int i = 0; i < t->m; i++) wanted[t->basis[i]] = true;
    load(t);
    for (int i = 0; i < t->m; i++) {
        solved[i] = wanted[t->basis[i]];
        wanted[t->basis[i]] = false;
    }
    for (int c = 0; c < t->width; c++)
        if (wanted[c]) columns[n++] = c;
    while (n > 0) {
        int r = -1, at = -1;
        double largest = 0;
        for (int i = 0; i < t->m; i++)
            for (int k = 0; k < n && !solved[i]; k++)
                if (fabs(t->cell[i][columns[k]]) > largest) largest = fabs(t->cell[r = i][columns[at = k]]);
        if (r < 0) return false;
        pivot(t, r, columns[at]);
        solved[r] = true;
        columns[at] = columns[--n];
    }
    return t->fresh = true;
}

// ---------------------------------------------------------------------------------------------------------------
// Pivoting
// ---------------------------------------------------------------------------------------------------------------

/* The first column that lowers the cost; -1: none does. Artificials stay out. */
static int entering(const Tableau *t, int phase) {
    for (int c = 0; c < t->n + t->m; c++)
        if (t->cell[t->m + phase][c] < -COST_EPS) return c;
    return -1;
}

/* The row whose basic variable is the first to reach 0 as column c's grows, of several the one with the first variable; -1:
 * none does. An artificial in phase 2 is 0 and may not leave it. */
static int leaving(const Tableau *t, int phase, int c) {
    int best = -1;
    double least = 0;
    for (int i = 0; i < t->m; i++) {
        bool stuck = phase == PHASE_2 && t->basis[i] >= t->n + t->m;
        double slope = stuck ? fabs(t->cell[i][c]) : t->cell[i][c];
        if (!(slope > PIVOT_EPS)) continue;
        double reach = stuck ? 0 : fmax(t->cell[i][t->width - 1], 0) / slope, near = 1e-12 * least;
        bool tie = best >= 0 && fabs(reach - least) <= near;
        if (best < 0 || (tie ? t->basis[i] < t->basis[best] : reach < least)) best = i, least = reach;
    }
    return best;
}

/* Pivots until nothing lowers the phase's cost any more. What is small may be rounding: it is looked at again in a fresh
 * tableau. *way: the column without end. */
static LpVerdict minimize(Tableau *t, int phase, int *way) {
    for (;;) {
        int c = entering(t, phase), r = c < 0 ? -1 : leaving(t, phase, c);
        bool clear = r >= 0 && fabs(t->cell[r][c]) > SMALL && t->cell[t->m + phase][c] < -SMALL;
        if (!clear && !t->fresh) {
            if (!refresh(t)) return LP_LOST;
        } else if (r >= 0) {
            if (t->pivots++ == MAX_PIVOTS) return LP_LOST;
            pivot(t, r, c);
        } else {
            *way = c;
            return c < 0 ? LP_OPTIMAL : phase == PHASE_2 ? LP_UNBOUNDED : LP_LOST; /* no sum falls below 0 */
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Proofs. x and y are scaled as the tableau is, which changes nothing in what they prove
// ---------------------------------------------------------------------------------------------------------------

static const Sum NOTHING = {0, 1e-3}; /* beside numbers around 1: what rounding leaves of a sum of zeros is 0 */

/* a x - b_weight b of row i */
static Sum row_sum(const Tableau *t, int i, const double *x, double b_weight) {
    Sum s = NOTHING;
    for (int j = 0; j < t->n; j++) add(&s, scaled(t, i, j) * x[j]);
    add(&s, -b_weight * scaled(t, i, t->n));
    return s;
}

/* Whether x satisfies every row (b_weight 1), or leads from one point that does to others (0). */
static bool rows_hold(const Tableau *t, const double *x, double b_weight) {
    for (int i = 0; i < t->m; i++) {
        Sum s = row_sum(t, i, x, b_weight);
        if (!at_most_0(s) || (t->lp->row[i].equal && !at_least_0(s))) return false;
    }
    return true;
}

/* Whether c_weight c + y A >= 0. */
static bool columns_hold(const Tableau *t, const double *y, double c_weight) {
    for (int j = 0; j < t->n; j++) {
        Sum s = NOTHING;
        add(&s, c_weight * scaled(t, t->m, j));
        for (int i = 0; i < t->m; i++) add(&s, y[i] * scaled(t, i, j));
        if (!at_least_0(s)) return false;
    }
    return true;
}

/* c_weight c x + b_weight y b */
static Sum gap(const Tableau *t, const LpAnswer *p, double c_weight, double b_weight) {
    Sum s = NOTHING;
    for (int j = 0; j < t->n; j++) add(&s, c_weight * scaled(t, t->m, j) * p->x[j]);
    for (int i = 0; i < t->m; i++) add(&s, b_weight * scaled(t, i, t->n) * p->y[i]);
    return s;
}

static bool is_proved(const Tableau *t, const LpAnswer *p) {
    if (p->verdict == LP_OPTIMAL) return rows_hold(t, p->x, 1) && columns_hold(t, p->y, 1) && at_most_0(gap(t, p, 1, 1));
    if (p->verdict == LP_INFEASIBLE) return columns_hold(t, p->y, 0) && !at_least_0(gap(t, p, 0, 1));
    if (p->verdict == LP_UNBOUNDED) return rows_hold(t, p->x, 0) && !at_least_0(gap(t, p, 1, 0));
    return false;
}

static int most_violated(const Tableau *t, const double *x) {
    int worst = 0;
    double most = 0;
    for (int i = 0; i < t->m; i++) {
        Sum s = row_sum(t, i, x, 1);
        double share = (t->lp->row[i].equal ? fabs(s.sum) : s.sum) / s.size;
        if (share > most) most = share, worst = i;
    }
    return worst;
}

// ---------------------------------------------------------------------------------------------------------------
// The answer
// ---------------------------------------------------------------------------------------------------------------

/* A scaled 0 as rounding leaves it. */
static double clean(double value) { return fabs(value) <= NOISE ? 0 : value; }

/* x as the basis says, or the direction in which column `way` leads. */
static void read_x(double *x, const Tableau *t, int way) {
    for (int j = 0; j < t->n; j++) x[j] = j == way;
    for (int i = 0; i < t->m; i++)
        if (t->basis[i] < t->n) x[t->basis[i]] = fmax(clean(way < 0 ? t->cell[i][t->width - 1] : -t->cell[i][way]), 0);
}

/* The cost of a row's artificial shows what the row is worth. */
static void read_y(double *y, const Tableau *t, int phase) {
    for (int i = 0; i < t->m; i++) {
        double worth = t->sign[i] * clean(t->cell[t->m + phase][t->n + t->m + i] - (phase == PHASE_1));
        y[i] = t->lp->row[i].equal ? worth : fmax(worth, 0);
    }
}

/* Back to the units of the LP. */
static void unscale(LpAnswer *answer, const Tableau *t) {
    int b_exp = answer->verdict == LP_UNBOUNDED ? 0 : t->col_exp[t->n];
    for (int j = 0; j < t->n; j++) answer->x[j] = ldexp(answer->x[j], t->col_exp[j] - b_exp);
    for (int i = 0; i < t->m; i++) answer->y[i] = ldexp(answer->y[i], t->row_exp[i] - t->row_exp[t->m]);
    for (int j = 0; j < t->n; j++) answer->value += t->lp->c[j] * answer->x[j];
}

static bool all_finite(const Lp *lp) {
    double sum = 0; /* of zeros: 0 x stays 0 unless x is infinite or NaN */
    for (int j = 0; j < lp->n; j++) sum += 0 * lp->c[j];
    for (int i = 0; i < lp->m; i++) {
        for (int j = 0; j < lp->n; j++) sum += 0 * lp->row[i].a[j];
        sum += 0 * lp->row[i].b;
    }
    return sum == 0;
}

/* Phase 1, and phase 2 where that leaves a point which satisfies the rows. */
static void find_answer(LpAnswer *answer, Tableau *t) {
    int way = -1;
    answer->verdict = minimize(t, PHASE_1, &way);
    if (answer->verdict != LP_OPTIMAL) return;
    read_x(answer->x, t, way);
    if (rows_hold(t, answer->x, 1)) {
        answer->verdict = minimize(t, PHASE_2, &way);
        read_x(answer->x, t, way);
        read_y(answer->y, t, PHASE_2);
    } else {
        answer->verdict = LP_INFEASIBLE;
        answer->row = most_violated(t, answer->x);
        read_y(answer->y, t, PHASE_1);
    }
}

void lp_solve(LpAnswer *answer, const Lp *lp) {
    Tableau t = {.lp = lp, .n = lp->n, .m = lp->m, .width = lp->n + 2 * lp->m + 1, .fresh = true};
    CHECK(lp->n >= 0 && lp->n <= LP_MAX_VARS && lp->m >= 0 && lp->m <= LP_MAX_ROWS);
    *answer = (LpAnswer){.verdict = LP_LOST, .row = -1};
    if (!all_finite(lp)) return;
    scale(&t);
    load(&t);
    find_answer(answer, &t);
    answer->pivots = t.pivots;
    if (!is_proved(&t, answer)) answer->verdict = LP_LOST;
    unscale(answer, &t);
}
