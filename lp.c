/* lp.c: the simplex method for small dense linear programs; section 4.3 solves one for every (gbs,
 * bls).
 *
 *     minimize c x   subject to   a x <= b or a x = b for every row,   x >= 0
 *
 * The first chapter gives the method as a textbook does. The other chapters deal with rounding.
 * Rows and columns are scaled by powers of two, so that scaling does not round. Before a decision
 * depends on a small number, the tableau is computed again from the LP. No verdict is trusted: each
 * has a proof (see LpAnswer), which is checked against the LP. If the proof fails, the LP is solved
 * again with its rows in another order.
 *
 * Read next: policy.c. */
#include <limits.h>
#include <math.h>

#include "base/base.h"
#include "lp.h"

enum { PHASE_1, PHASE_2, NPHASES };
enum { COLS = LP_MAX_VARS + 2 * LP_MAX_ROWS + 1 };
enum { MAX_PIVOTS = 1000 }; /* the LPs of policy.c take about forty */
enum { TRIES = 12 };        /* orders of the rows; the first one nearly always succeeds */

/* Scaled numbers are around 1. These bounds say which of them are too small to count. */
static const double EPS = 1e-9;    /* smaller costs and pivots count as 0 */
static const double SMALL = 1e-4;  /* smaller numbers may be mostly rounding error: refresh first */
static const double NOISE = 1e-13; /* a difference below this share of its minuend counts as 0 */
static const double TIE = 1e-12;   /* quotients that differ by less than this share are equal */

/* The tableau of the simplex method. Every row i has a slack variable s_i, which is 0 in a row with
 * =: a_i x + s_i = b_i, where b_i >= 0. (A row with b_i < 0 is first multiplied by -1.) One
 * variable of each row is basic; the others are 0. At first a row's slack is basic, at b_i. But a
 * slack cannot be basic in a row with =, where it is always 0, nor in a row that was multiplied by
 * -1, where its factor is -1. Such a row begins with an artificial variable, which stands for
 * what is missing at the equals sign. Phase 1 drives the artificials to 0, and one that has left
 * the basis never comes back. The first tableau is
 *
 *                n variables     m slacks     artificials    right-hand side
 *     m rows          a          1, -1 or 0      1 or 0             b
 *     phase 1       -sum           -sum            0              -sum
 *     phase 2         c              0             0                0
 *
 * where the sums are those of the rows that begin with an artificial. The last two rows are the
 * reduced costs: the phase's costs in the variables that are not basic. To minimize -x subject to
 * x <= 4 and -x <= -1, for example, the first tableau is
 *
 *                x    s_0  s_1   a_0     b       basic
 *     row 0      1     1    0     0      4       s_0
 *     row 1      1     0   -1     1      1       a_0, since the row was multiplied by -1
 *     phase 1   -1     0    1     0     -1
 *     phase 2   -1     0    0     0      0
 *
 * Pivots add multiples of rows, so that the cells remain the first rows multiplied by the inverse
 * of the basis. */
typedef struct {
    const Lp *lp;
    const LpRow *row[LP_MAX_ROWS];              /* of the LP, in the order of this try */
    int n, m, width;                            /* width: n + m + artificials + 1 columns */
    double a[LP_MAX_ROWS + 1][LP_MAX_VARS + 1]; /* the LP, scaled; row m: c, column n: b */
    int row_exp[LP_MAX_ROWS + 1];               /* each row was multiplied by 2 to this power */
    int col_exp[LP_MAX_VARS + 1];               /* and so was each column */
    double sign[LP_MAX_ROWS];                   /* -1: the row was multiplied by -1; else 1 */
    /* the slack or artificial that was basic at first; its column is this row's column of the
     * inverse */
    int unit[LP_MAX_ROWS];
    int basis[LP_MAX_ROWS]; /* the basic variable of each row */
    int pivots;             /* made so far */
    int mended;             /* dual pivots, and earlier orders of the rows */
    bool fresh;             /* true if computed from a, not by the pivots of a search */
    double cell[LP_MAX_ROWS + NPHASES][COLS];
} Tableau;

// -------------------------------------------------------------------------------------------------
// The simplex method
//
// Phase 1 minimizes the sum of the artificials, which measure how far the rows are from being
// satisfied; if the least sum is not 0, no x satisfies the rows. Phase 2 minimizes c x. A pivot
// brings one variable into the basis and takes one out. Bland's rule chooses both: it takes the
// first column that lowers the cost and, of the rows that block it first, the one whose basic
// variable comes first. Other rules need fewer pivots, but may cycle.
// -------------------------------------------------------------------------------------------------

/* Fills the first tableau. Its basis is each row's slack, or an artificial if the row's slack
 * cannot be basic. */
static void load(Tableau *t) {
    double *cost_1 = t->cell[t->m + PHASE_1], *cost_2 = t->cell[t->m + PHASE_2];
    int artificial = t->n + t->m; /* the next one's column */
    t->fresh = true;
    for (int i = 0; i < t->m; i++) {
        const bool turned = t->row[i]->b < 0;
        t->sign[i] = turned ? -1 : 1;
        t->basis[i] = t->unit[i] = turned || t->row[i]->equal ? artificial++ : t->n + i;
    }
    t->width = artificial + 1;
    for (int i = 0; i < t->m + NPHASES; i++)
        memset(t->cell[i], 0, t->width * sizeof *t->cell[i]);
    memcpy(cost_2, t->a[t->m], t->n * sizeof *cost_2);
    for (int i = 0; i < t->m; i++) {
        double *row = t->cell[i];
        for (int j = 0; j < t->n; j++)
            row[j] = t->sign[i] * t->a[i][j];
        row[t->n + i] = t->row[i]->equal ? 0 : t->sign[i];
        row[t->unit[i]] = 1;
        row[t->width - 1] = t->sign[i] * t->a[i][t->n];
        if (t->unit[i] < t->n + t->m)
            continue;
        /* An artificial costs 1. As it is basic, its reduced cost must be 0: the loop subtracts its
         * row, and with it the 1. */
        cost_1[t->unit[i]] += 1;
        for (int c = 0; c < t->width; c++)
            cost_1[c] -= row[c];
    }
}

/* Computes a -= times b. Where equal numbers cancel, a remaining rounding error becomes 0. */
static void subtract(double *restrict a, double times, const double *restrict b, int n) {
    for (int k = 0; k < n; k++) {
        double before = a[k], difference = before - times * b[k];
        a[k] = fabs(difference) <= NOISE * fabs(before) ? 0 : difference;
    }
}

/* Solves row r for the variable of column c, and removes the variable from all other rows. */
static void pivot(Tableau *t, int r, int c) {
    double *row = t->cell[r], factor = 1 / row[c];
    for (int k = 0; k < t->width; k++)
        row[k] *= factor;
    row[c] = 1;
    for (int i = 0; i < t->m + NPHASES; i++) {
        if (i == r || t->cell[i][c] == 0)
            continue;
        subtract(t->cell[i], t->cell[i][c], row, t->width);
        t->cell[i][c] = 0;
    }
    t->basis[r] = c;
    t->fresh = false;
}

/* Returns the first column that lowers the cost, or -1 if none does. Artificials never enter. */
static int entering(const Tableau *t, int phase) {
    for (int c = 0; c < t->n + t->m; c++)
        if (t->cell[t->m + phase][c] < -EPS)
            return c;
    return -1;
}

/* Returns the row whose basic variable is the first to reach 0 as column c's variable grows, or -1
 * if none does. Of several such rows, it returns the one whose variable comes first. An artificial
 * that is still basic in phase 2 is 0 and must stay 0, so it leaves at once. */
static int leaving(const Tableau *t, int phase, int c) {
    int best = -1;
    double least = 0;
    for (int i = 0; i < t->m; i++) {
        bool stuck = phase == PHASE_2 && t->basis[i] >= t->n + t->m;
        double slope = stuck ? fabs(t->cell[i][c]) : t->cell[i][c];
        if (!(slope > EPS))
            continue;
        double reach = stuck ? 0 : fmax(t->cell[i][t->width - 1], 0) / slope;
        bool tie = best >= 0 && fabs(reach - least) <= TIE * least;
        if (best < 0 || (tie ? t->basis[i] < t->basis[best] : reach < least)) {
            best = i;
            least = reach;
        }
    }
    return best;
}

/* Finds a pivot of the dual simplex method, when no cost is below 0: row *r, whose right-hand side
 * is below 0, and column *c. The simplex method keeps all right-hand sides at 0 or above, but
 * rounding may hide until a refresh that one has fallen below. The dual method mends this and keeps
 * all costs at 0 or above: as multiples of the row are added to the costs, column *c is the first
 * whose cost reaches 0. Returns false if there is no such row or column. */
static bool find_dual_pivot(const Tableau *t, int phase, int *r, int *c) {
    const double *cost = t->cell[t->m + phase], *row = NULL;
    for (int i = 0; i < t->m; i++)
        if (t->cell[i][t->width - 1] < -NOISE) {
            row = t->cell[i];
            *r = i;
        }
    for (int k = 0; row && k < t->n + t->m; k++)
        if (row[k] < -EPS && (*c < 0 || cost[k] / row[k] > cost[*c] / row[*c]))
            *c = k;
    return *c >= 0;
}

/* Returns true if the decision for column c and row r (-1: none) depends on no small number. */
static bool is_clear(const Tableau *t, int phase, int r, int c) {
    return r >= 0 && fabs(t->cell[r][c]) > SMALL && t->cell[t->m + phase][c] < -SMALL;
}

static bool refresh(Tableau *t);

/* Pivots until nothing lowers the phase's cost any more. A decision that depends on a small number,
 * and the decision to end, are taken again with a refreshed tableau. Returns
 *   LP_OPTIMAL     no column lowers the cost, and there is no dual pivot; *way is -1
 *   LP_UNBOUNDED   column *way lowers it without end, as no row blocks it; only in phase 2
 *   LP_LOST        rounding errors are too large, or there were too many pivots */
static LpVerdict minimize(Tableau *t, int phase, int *way) {
    for (;;) {
        int c = *way = entering(t, phase), r = c < 0 ? -1 : leaving(t, phase, c);
        if (!t->fresh && !is_clear(t, phase, r, c)) {
            if (!refresh(t))
                return LP_LOST;
        } else if (r >= 0 || (c < 0 && find_dual_pivot(t, phase, &r, &c))) {
            if (t->pivots++ == MAX_PIVOTS)
                return LP_LOST;
            t->mended += *way < 0;
            pivot(t, r, c);
        } else {
            return c < 0              ? LP_OPTIMAL
                   : phase == PHASE_2 ? LP_UNBOUNDED
                                      : LP_LOST; /* no sum can fall below 0 */
        }
    }
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: `find_answer`, near the end, runs the two phases, and everything else below
// deals with rounding. On a first reading go on with policy.c.
// -------------------------------------------------------------------------------------------------

// -------------------------------------------------------------------------------------------------
// Scaling
//
// An LP of policy.c has bytes beside fractions, 1e12 beside 1e-9, so no single bound could tell a
// small entry from an error. Therefore rows and columns are divided in turn, first by the geometric
// mean of their smallest and largest number and in the end by their largest, until all numbers are
// around 1.
// -------------------------------------------------------------------------------------------------

/* Returns a number of the LP as given, with c below the rows and b to the right of the columns. */
static double given(const Tableau *t, int i, int j) {
    if (i < t->m)
        return j < t->n ? t->row[i]->a[j] : t->row[i]->b;
    return j < t->n ? t->lp->c[j] : 0;
}

/* Fills a, row_exp and col_exp. Returns false if some number is not finite. */
static bool scale(Tableau *t) {
    /* The first passes divide by the mean. Then one over the rows divides by the largest, and one
     * over the columns: it only enlarges numbers, and none beyond the largest of another column, so
     * that every row keeps its largest. */
    enum { BY_MIDDLE = 8, PASSES = 10 };
    int exponent[LP_MAX_ROWS + 1][LP_MAX_VARS + 1];
    for (int i = 0; i <= t->m; i++)
        for (int j = 0; j <= t->n; j++) {
            double number = given(t, i, j);
            if (!isfinite(number))
                return false;
            exponent[i][j] = ilogb(number);
        }
    memset(t->row_exp, 0, sizeof t->row_exp);
    memset(t->col_exp, 0, sizeof t->col_exp);
    for (int pass = 0; pass < PASSES; pass++) {
        bool columns = pass % 2; /* rows and columns in turn */
        for (int index = 0; index <= (columns ? t->n : t->m); index++) {
            int low = INT_MAX, high = INT_MIN;
            for (int k = 0; k <= (columns ? t->m : t->n); k++) {
                int i = columns ? k : index, j = columns ? index : k;
                if (exponent[i][j] == FP_ILOGB0)
                    continue;
                low = imin(low, exponent[i][j] + t->row_exp[i] + t->col_exp[j]);
                high = imax(high, exponent[i][j] + t->row_exp[i] + t->col_exp[j]);
            }
            if (low <= high)
                (columns ? t->col_exp : t->row_exp)[index] -=
                    pass < BY_MIDDLE ? (low + high) / 2 : high;
        }
    }
    for (int i = 0; i <= t->m; i++)
        for (int j = 0; j <= t->n; j++)
            t->a[i][j] = ldexp(given(t, i, j), t->row_exp[i] + t->col_exp[j]);
    return true;
}

// -------------------------------------------------------------------------------------------------
// Refreshing
//
// Every pivot rounds, and its errors remain. Before a pivot on a small number, and before a phase
// ends, the tableau of the present basis is therefore computed again from the LP. The variables of
// the basis may enter in any order and in any row: a basis is a set, and another order only changes
// which row is whose. Each time the largest cell of all rows and columns that are left is the pivot
// (full pivoting), because this rounds least.
// -------------------------------------------------------------------------------------------------

/* Computes the tableau of the present basis again. Slacks and artificials that are also in the
 * first basis stay with their rows. Returns false if columns of the basis are linearly
 * dependent. */
static bool refresh(Tableau *t) {
    int columns[LP_MAX_ROWS], n = 0;
    bool wanted[COLS] = {false}, solved[LP_MAX_ROWS];
    for (int i = 0; i < t->m; i++)
        wanted[t->basis[i]] = true;
    load(t);
    for (int i = 0; i < t->m; i++) {
        solved[i] = wanted[t->basis[i]];
        wanted[t->basis[i]] = false;
    }
    for (int c = 0; c < t->width; c++)
        if (wanted[c])
            columns[n++] = c;
    for (; n > 0; n--) {
        int r = -1, *c = columns;
        double largest = 0;
        for (int i = 0; i < t->m; i++)
            for (int k = 0; k < n && !solved[i]; k++)
                if (fabs(t->cell[i][columns[k]]) > largest) {
                    r = i;
                    c = &columns[k];
                    largest = fabs(t->cell[i][*c]);
                }
        if (r < 0)
            return false;
        pivot(t, r, *c);
        solved[r] = true;
        *c = columns[n - 1];
    }
    return t->fresh = true;
}

// -------------------------------------------------------------------------------------------------
// Proofs
//
// A sum counts as 0 if it is small compared with its terms. x and y are scaled as the tableau is,
// which does not change what they prove.
// -------------------------------------------------------------------------------------------------

static const double TOLERANCE = 1e-9; /* a sum that is a smaller share of its terms counts as 0 */

/* A sum, and the sum of its terms' absolute values. A sum with a NaN is neither <= 0 nor >= 0. */
typedef struct {
    double sum, size;
} Tally;
/* The empty sum. It counts as one term of size 1e-3, so that a sum of at most 1e-12 is always 0,
 * even if all its terms are such rounding errors. */
static const Tally NOTHING = {0, 1e-3};

static void add(Tally *s, double term) {
    s->sum += term;
    s->size += fabs(term);
}
static bool at_most_0(Tally s) { return s.sum <= TOLERANCE * s.size; }
static bool at_least_0(Tally s) { return s.sum >= -TOLERANCE * s.size; }

/* Returns start + a x - b. */
static Tally excess(Tally start, const double *a, const double *x, int n, double b) {
    for (int j = 0; j < n; j++)
        add(&start, a[j] * x[j]);
    add(&start, -b);
    return start;
}

/* Returns true if x satisfies every row (b_weight 1), or if moving in direction x from a point that
 * satisfies them keeps them satisfied (b_weight 0). */
static bool rows_hold(const Tableau *t, const double *x, double b_weight) {
    for (int i = 0; i < t->m; i++) {
        Tally s = excess(NOTHING, t->a[i], x, t->n, b_weight * t->a[i][t->n]);
        if (!at_most_0(s) || (t->row[i]->equal && !at_least_0(s)))
            return false;
    }
    return true;
}

/* Returns true if c_weight c + y A >= 0. */
static bool columns_hold(const Tableau *t, const double *y, double c_weight) {
    for (int j = 0; j < t->n; j++) {
        Tally s = NOTHING;
        add(&s, c_weight * t->a[t->m][j]);
        for (int i = 0; i < t->m; i++)
            add(&s, y[i] * t->a[i][j]);
        if (!at_least_0(s))
            return false;
    }
    return true;
}

/* Returns true if the answer's proof (see LpAnswer) holds:
 *
 *   verdict      there are    the rows hold with    the columns with    and
 *   optimal      x and y      a x <= b              y a + c >= 0        c x + y b <= 0
 *   infeasible   y            -                     y a >= 0            y b < 0
 *   unbounded    x            a x <= 0              -                   c x < 0
 *
 * So has_x is also the weight of c, and has_y that of b. */
static bool is_proved(const Tableau *t, const LpAnswer *p) {
    bool has_x = p->verdict != LP_INFEASIBLE, has_y = p->verdict != LP_UNBOUNDED;
    Tally gap = NOTHING; /* c x + y b, as far as there are an x and a y */
    if (p->verdict == LP_LOST || (has_x && !rows_hold(t, p->x, has_y)) ||
        (has_y && !columns_hold(t, p->y, has_x)))
        return false;
    for (int j = 0; j < t->n && has_x; j++)
        add(&gap, t->a[t->m][j] * p->x[j]);
    for (int i = 0; i < t->m && has_y; i++)
        add(&gap, t->a[i][t->n] * p->y[i]);
    return has_x && has_y ? at_most_0(gap) : !at_least_0(gap);
}

// -------------------------------------------------------------------------------------------------
// The answer
// -------------------------------------------------------------------------------------------------

/* Returns the scaled value, or 0 if it may be no more than a rounding error. */
static double clean(double value) { return fabs(value) <= NOISE ? 0 : value; }

/* Reads x from the basis, or the direction of column `way` if that is not -1. */
static void read_x(double *x, const Tableau *t, int way) {
    for (int j = 0; j < t->n; j++)
        x[j] = j == way;
    for (int i = 0; i < t->m; i++)
        if (t->basis[i] < t->n)
            x[t->basis[i]] = fmax(clean(way < 0 ? t->cell[i][t->width - 1] : -t->cell[i][way]), 0);
}

/* Reads y. The unit column of row i began as e_i with cost 0. So its reduced cost is minus the dual
 * price of the row, and that is y_i. In phase 1, the reduced cost of an
 * artificial also contains its own cost, 1. */
static void read_y(double *y, const Tableau *t, int phase) {
    for (int i = 0; i < t->m; i++) {
        bool paid = phase == PHASE_1 && t->unit[i] >= t->n + t->m;
        double worth = t->sign[i] * clean(t->cell[t->m + phase][t->unit[i]] - paid);
        y[i] = t->row[i]->equal ? worth : fmax(worth, 0);
    }
}

/* Runs phase 1, and then phase 2 if phase 1 has found a point that satisfies the rows. */
static void find_answer(LpAnswer *answer, Tableau *t) {
    int way;
    answer->verdict = minimize(t, PHASE_1, &way);
    if (answer->verdict != LP_OPTIMAL)
        return;
    read_x(answer->x, t, way);
    if (rows_hold(t, answer->x, 1)) {
        answer->verdict = minimize(t, PHASE_2, &way);
        read_x(answer->x, t, way);
        read_y(answer->y, t, PHASE_2);
    } else {
        answer->verdict = LP_INFEASIBLE;
        read_y(answer->y, t, PHASE_1);
    }
}

/* Converts the answer back to the units of the LP, and y to the order of its rows. */
static void restore(LpAnswer *answer, const Tableau *t) {
    const LpAnswer scaled = *answer;
    int b_exp = answer->verdict == LP_UNBOUNDED ? 0 : t->col_exp[t->n];
    for (int j = 0; j < t->n; j++) {
        answer->x[j] = ldexp(scaled.x[j], t->col_exp[j] - b_exp);
        answer->value += t->lp->c[j] * answer->x[j];
    }
    for (int i = 0; i < t->m; i++)
        answer->y[t->row[i] - t->lp->row] = ldexp(scaled.y[i], t->row_exp[i] - t->row_exp[t->m]);
}

/* The order of the rows decides which of several equal numbers is taken. In another order the
 * search takes another way, on which other numbers are rounded. So a verdict that rounding has
 * spoiled is mostly found when the rows are rotated, first by one, then by two, and so on. */
void lp_solve(LpAnswer *answer, const Lp *lp) {
    Tableau *t = xcalloc(1, sizeof *t); /* 95 KB, too much for a small stack */
    CHECK(lp->n >= 0 && lp->n <= LP_MAX_VARS && lp->m >= 0 && lp->m <= LP_MAX_ROWS);
    t->lp = lp;
    t->n = lp->n;
    t->m = lp->m;
    for (int try = 0; try < TRIES; try++) {
        for (int i = 0; i < t->m; i++)
            t->row[i] = &lp->row[(i + try) % t->m];
        *answer = (LpAnswer){.verdict = LP_LOST};
        if (!scale(t))
            break;
        load(t);
        t->pivots = 0;
        find_answer(answer, t);
        if (is_proved(t, answer))
            break;
        answer->verdict = LP_LOST;
        t->mended++;
    }
    answer->pivots = t->pivots;
    answer->mended = t->mended;
    restore(answer, t);
    free(t);
}

LpRow *lp_row(Lp *lp, const char *name, bool equal, double b) {
    CHECK(lp->m < LP_MAX_ROWS);
    LpRow *row = &lp->row[lp->m++];
    *row = (LpRow){.name = name, .equal = equal, .b = b};
    return row;
}

double lp_excess(const LpRow *row, const double *x, int n) {
    return excess((Tally){0, 0}, row->a, x, n, row->b).sum;
}
bool lp_binds(const LpRow *row, const double *x, int n) {
    return at_least_0(excess((Tally){0, 0}, row->a, x, n, row->b));
}
