/* lp.c: the simplex method for small dense linear programs; section 4.3 solves one for every (gbs,
 * bls).
 *
 *     minimize c x   subject to   a x <= b or a x = b for every row,   x >= 0
 *
 * The trunk is the method as a textbook gives it. The chapters below the trunk deal with rounding.
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

/* The LP is scaled, so that its numbers are around 1. */
static const double EPS = 1e-9;  /* smaller costs and slopes count as 0 */
static const double TIE = 1e-12; /* quotients that differ by less than this share are equal */

/* The tableau of the simplex method. Row i has a slack, the variable s_i, which is 0 in a row with
 * =: a_i x + s_i = b_i, where b_i >= 0. (A row with b_i < 0 is first multiplied by -1.) One
 * variable of each row is basic; the others are 0, and the tableau says how the basic ones and the
 * cost change when one of these grows. At first a row's slack is basic, at b_i. But a slack cannot
 * be basic in a row with =, where it is always 0, nor in a row that was multiplied by -1, where its
 * factor is -1. Such a row begins with an artificial variable, which stands for what is missing at
 * the equals sign. (mini.c has one auxiliary variable for all rows instead, and no columns for
 * basic variables.) The first tableau is
 *
 *                n variables     m slacks     artificials    right-hand side
 *     m rows          a          1, -1 or 0      1 or 0             b
 *     phase 1       -sum           -sum            0              -sum
 *     phase 2         c              0             0                0
 *
 * where the sums are those of the rows that begin with an artificial. The last two rows are the
 * reduced costs: what one unit of each variable costs in this phase while the other variables that
 * are not basic stay 0. On the right is minus the cost itself. To minimize -x subject to x <= 4 and
 * -x <= -1, for example, the first tableau is
 *
 *                x    s_0  s_1   a_0     b       basic
 *     row 0      1     1    0     0      4       s_0
 *     row 1      1     0   -1     1      1       a_0, since the row was multiplied by -1
 *     phase 1   -1     0    1     0     -1
 *     phase 2   -1     0    0     0      0
 *
 * In phase 1 x enters and a_0 leaves, in phase 2 s_1 enters and s_0 leaves: now x is 4, and the
 * right-hand side of phase 2 is 4, so the cost is -4. */
typedef struct {
    /* These are the LP: scaled, and with its rows in an order that lp_solve chooses. */
    int n, m; /* the numbers of variables and of rows */
    const double *c;
    const LpRow *row[LP_MAX_ROWS];
    int artificial, right;  /* the columns of the first artificial and of the right-hand sides */
    int basic[LP_MAX_ROWS]; /* the basic variable of each row */
    int unit[LP_MAX_ROWS];  /* and the one that was basic at first, for read_y */
    int way;                /* the column that lowers the cost; -1: none does */
    double cell[LP_MAX_ROWS + NPHASES][LP_MAX_VARS + 2 * LP_MAX_ROWS + 1];
    /* The rest is about rounding. Only the part below the trunk changes it. */
    int pivots; /* with this order of the rows; those of refresh do not count */
    int mended; /* dual pivots, and earlier orders of the rows */
    bool fresh; /* true if no pivot has followed the first tableau or a refresh */
    bool lost;  /* true if rounding errors are too large, or there were too many pivots */
    int row_exp[LP_MAX_ROWS + 1]; /* each row was multiplied by 2 to this power; row m is c */
    int col_exp[LP_MAX_VARS + 1]; /* and so was each column; column n is b */
    double corner;                /* 0, where c would have a b */
} Tableau;

// -------------------------------------------------------------------------------------------------
// The simplex method
//
// A pivot exchanges two variables: one becomes basic, because that lowers the cost, and one that
// was basic becomes 0. When no variable would lower the cost, x is the best.
//
// Phase 1 finds a point where all rows hold. It minimizes the sum of the artificials, which measure
// how far the rows are from holding; if the least sum is not 0, no x satisfies the rows. Phase 2
// minimizes c x. Pivots of phase 1 change the costs of phase 2 as well, so phase 2 can begin at
// once. An artificial that has left the basic variables never comes back.
//
// A pivot need not lower the cost, if the new basic variable stays 0: a series of such pivots could
// return to its beginning, and the search would never end. Bland's rule prevents this: of several
// variables that could enter or leave, take the first.
//
// The trunk calls five functions that stand below it, since they deal with rounding or with proofs.
// -------------------------------------------------------------------------------------------------

/* Computes a -= times b for n numbers. What rounding leaves of a zero becomes 0. */
static void subtract(double *a, double times, const double *b, int n);
/* Returns the value, or 0 if it may be no more than a rounding error. */
static double clean(double value);
/* Mends what rounding has spoiled, before minimize takes a step: a pivot at row r and column c, or
 * the end if one of them is -1. Returns true if minimize must choose its step again. It must give
 * up if `lost` is then true. */
static bool mend(Tableau *t, int phase, int r, int c);
/* Returns true if x satisfies every row, apart from rounding errors; b_weight is 1. */
static bool rows_hold(const Tableau *t, const double *x, double b_weight);
/* Reads y, the weights of the rows (see LpAnswer), from the costs of the phase. */
static void read_y(double *y, const Tableau *t, int phase);

/* Solves row r for the variable of column c, and removes the variable from all other rows. */
static void pivot(Tableau *t, int r, int c) {
    double *row = t->cell[r], inverse = 1 / row[c];
    for (int k = 0; k <= t->right; k++)
        row[k] *= inverse;
    row[c] = 1;
    for (int i = 0; i < t->m + NPHASES; i++) {
        if (i == r || t->cell[i][c] == 0)
            continue;
        subtract(t->cell[i], t->cell[i][c], row, t->right + 1);
        t->cell[i][c] = 0;
    }
    t->basic[r] = c;
}

/* Returns the first column that lowers the cost, or -1 if none does. Artificials never enter. */
static int entering(const Tableau *t, int phase) {
    for (int c = 0; c < t->artificial; c++)
        if (t->cell[t->m + phase][c] < -EPS)
            return c;
    return -1;
}

/* Returns the row whose basic variable is the first to reach 0 as column c's variable grows, or -1
 * if none does. Of several such rows, it returns the one whose variable comes first. */
static int leaving(const Tableau *t, int phase, int c) {
    int r = -1;
    double nearest = INFINITY;
    for (int i = 0; i < t->m; i++) {
        double slope = t->cell[i][c], value = fmax(t->cell[i][t->right], 0);
        /* An artificial that is still basic in phase 2 is 0 and must stay 0: it leaves at once. */
        if (phase == PHASE_2 && t->basic[i] >= t->artificial) {
            slope = fabs(slope);
            value = 0;
        }
        double reach = slope > EPS ? value / slope : INFINITY;
        bool tie = r >= 0 && fabs(reach - nearest) <= TIE * nearest;
        if (tie ? t->basic[i] < t->basic[r] : reach < nearest) {
            r = i;
            nearest = reach;
        }
    }
    return r;
}

/* Pivots until nothing lowers the phase's cost any more. Returns
 *   LP_OPTIMAL     no column lowers the cost
 *   LP_UNBOUNDED   the column `way` lowers it without end, as no row blocks it
 *   LP_LOST        mend has given up */
static LpVerdict minimize(Tableau *t, int phase) {
    while (!t->lost) {
        int c = t->way = entering(t, phase);
        int r = c < 0 ? -1 : leaving(t, phase, c);
        if (mend(t, phase, r, c))
            continue;
        if (c < 0)
            return LP_OPTIMAL;
        if (r < 0)
            return LP_UNBOUNDED;
        pivot(t, r, c);
    }
    return LP_LOST;
}

/* Fills the first tableau, where a slack or an artificial is basic in each row. */
static void fill_tableau(Tableau *t) {
    t->artificial = t->right = t->n + t->m;
    for (int i = 0; i < t->m; i++) {
        bool artificial = t->row[i]->equal || t->row[i]->b < 0;
        t->basic[i] = t->unit[i] = artificial ? t->right++ : t->n + i;
    }
    for (int i = 0; i < t->m + NPHASES; i++)
        memset(t->cell[i], 0, (t->right + 1) * sizeof(double));
    memcpy(t->cell[t->m + PHASE_2], t->c, t->n * sizeof *t->c);
    for (int i = 0; i < t->m; i++) {
        const LpRow *from = t->row[i];
        double *row = t->cell[i], sign = from->b < 0 ? -1 : 1;
        for (int j = 0; j < t->n; j++)
            row[j] = sign * from->a[j];
        row[t->n + i] = from->equal ? 0 : sign;
        row[t->right] = sign * from->b;
        /* In phase 1 an artificial costs 1, and it is b minus the rest of its row. */
        for (int k = 0; k <= t->right && t->basic[i] >= t->artificial; k++)
            t->cell[t->m + PHASE_1][k] -= row[k];
        row[t->basic[i]] = 1;
    }
}

/* Reads x from the tableau; if the cost falls without end, reads the direction of x instead. */
static void read_x(double *x, const Tableau *t) {
    for (int j = 0; j < t->n; j++)
        x[j] = j == t->way;
    for (int i = 0; i < t->m; i++) {
        double value = t->way < 0 ? t->cell[i][t->right] : -t->cell[i][t->way];
        if (t->basic[i] < t->n)
            x[t->basic[i]] = fmax(clean(value), 0);
    }
}

/* Runs both phases. Returns the verdict, of which x and y are the proof (see LpAnswer). */
static LpVerdict simplex(double *x, double *y, Tableau *t) {
    fill_tableau(t);
    if (minimize(t, PHASE_1) != LP_OPTIMAL)
        return LP_LOST; /* A sum of artificials cannot fall without end, except by rounding. */
    read_x(x, t);
    if (!rows_hold(t, x, 1)) {
        read_y(y, t, PHASE_1);
        return LP_INFEASIBLE;
    }
    LpVerdict verdict = minimize(t, PHASE_2);
    read_x(x, t);
    read_y(y, t, PHASE_2);
    return verdict;
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows deals with rounding and with proofs. On a first reading go on
// with policy.c.
// -------------------------------------------------------------------------------------------------

// -------------------------------------------------------------------------------------------------
// Small numbers
// -------------------------------------------------------------------------------------------------

/* Scaled numbers are around 1. These bounds say which of them are too small to count. */
static const double SMALL = 1e-4;  /* smaller numbers may be mostly rounding error: refresh first */
static const double NOISE = 1e-13; /* a difference below this share of its minuend counts as 0 */

static void subtract(double *restrict a, double times, const double *restrict b, int n) {
    for (int k = 0; k < n; k++) {
        double before = a[k], difference = before - times * b[k];
        a[k] = fabs(difference) <= NOISE * fabs(before) ? 0 : difference;
    }
}

static double clean(double value) { return fabs(value) <= NOISE ? 0 : value; }

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
    bool wanted[LP_MAX_VARS + 2 * LP_MAX_ROWS] = {false}, solved[LP_MAX_ROWS];
    for (int i = 0; i < t->m; i++)
        wanted[t->basic[i]] = true;
    fill_tableau(t);
    for (int i = 0; i < t->m; i++) {
        solved[i] = wanted[t->basic[i]];
        wanted[t->basic[i]] = false;
    }
    for (int c = 0; c < t->right; c++)
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
// Mending
// -------------------------------------------------------------------------------------------------

enum { MAX_PIVOTS = 1000 }; /* the LPs of policy.c take about forty */

/* Finds a pivot of the dual simplex method, when no cost is below 0: row *r, whose right-hand side
 * is below 0, and column *c. The simplex method keeps all right-hand sides at 0 or above, but
 * rounding may hide until a refresh that one has fallen below. The dual method mends this and keeps
 * all costs at 0 or above: as multiples of the row are added to the costs, column *c is the first
 * whose cost reaches 0. Returns false if there is no such row or column. */
static bool find_dual_pivot(const Tableau *t, int phase, int *r, int *c) {
    const double *cost = t->cell[t->m + phase], *row = NULL;
    for (int i = 0; i < t->m; i++)
        if (t->cell[i][t->right] < -NOISE) {
            row = t->cell[i];
            *r = i;
        }
    for (int k = 0; row && k < t->artificial; k++)
        if (row[k] < -EPS && (*c < 0 || cost[k] / row[k] > cost[*c] / row[*c]))
            *c = k;
    return *c >= 0;
}

/* A step that depends on a small number, and the end of a phase, are chosen again with a refreshed
 * tableau. At the end a dual pivot may be necessary; it is made here, and more steps may follow. */
static bool mend(Tableau *t, int phase, int r, int c) {
    bool clear = r >= 0 && fabs(t->cell[r][c]) > SMALL && t->cell[t->m + phase][c] < -SMALL;
    if (!clear && !t->fresh) {
        t->lost = !refresh(t);
        return true;
    }
    bool dual = c < 0 && find_dual_pivot(t, phase, &r, &c);
    if (r < 0 || c < 0)
        return false;
    t->fresh = false;
    t->lost = t->pivots++ == MAX_PIVOTS;
    if (dual && !t->lost) {
        t->mended++;
        pivot(t, r, c);
    }
    return dual || t->lost;
}

// -------------------------------------------------------------------------------------------------
// Scaling
//
// An LP of policy.c has bytes beside fractions, 1e12 beside 1e-9, so no single bound could tell a
// small entry from an error. Therefore rows and columns are divided in turn, first by the geometric
// mean of their smallest and largest number and in the end by their largest, until all numbers are
// around 1.
// -------------------------------------------------------------------------------------------------

/* Returns where a number of the LP is, with c below the rows and b to the right of the columns. */
static double *number_at(Lp *lp, Tableau *t, int i, int j) {
    if (i < t->m)
        return j < t->n ? &lp->row[i].a[j] : &lp->row[i].b;
    return j < t->n ? &lp->c[j] : &t->corner;
}

/* Copies the LP that is given to lp and scales it; row_exp and col_exp are 0 before. Returns false
 * if some number is not finite. */
static bool scale(Lp *lp, Tableau *t, const Lp *given) {
    /* The first passes divide by the mean. Then one over the rows divides by the largest, and one
     * over the columns: it only enlarges numbers, and none beyond the largest of another column, so
     * that every row keeps its largest. */
    enum { BY_MIDDLE = 8, PASSES = 10 };
    const int n = t->n, m = t->m;
    int exponent[LP_MAX_ROWS + 1][LP_MAX_VARS + 1];
    memcpy(lp->c, given->c, sizeof lp->c);
    for (int i = 0; i < m; i++)
        lp->row[i] = given->row[i];
    for (int i = 0; i <= m; i++)
        for (int j = 0; j <= n; j++) {
            double number = *number_at(lp, t, i, j);
            if (!isfinite(number))
                return false;
            exponent[i][j] = ilogb(number);
        }
    for (int pass = 0; pass < PASSES; pass++) {
        bool columns = pass % 2; /* rows and columns in turn */
        for (int index = 0; index <= (columns ? n : m); index++) {
            int low = INT_MAX, high = INT_MIN;
            for (int k = 0; k <= (columns ? m : n); k++) {
                int i = columns ? k : index, j = columns ? index : k;
                if (exponent[i][j] == FP_ILOGB0)
                    continue;
                int power = exponent[i][j] + t->row_exp[i] + t->col_exp[j];
                low = imin(low, power);
                high = imax(high, power);
            }
            if (low <= high)
                (columns ? t->col_exp : t->row_exp)[index] -=
                    pass < BY_MIDDLE ? (low + high) / 2 : high;
        }
    }
    for (int i = 0; i <= m; i++)
        for (int j = 0; j <= n; j++) {
            double *number = number_at(lp, t, i, j);
            *number = ldexp(*number, t->row_exp[i] + t->col_exp[j]);
        }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Proofs
//
// A sum counts as 0 if it is small compared with its terms. The LP, x and y are scaled, which does
// not change what they prove.
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
        const LpRow *row = t->row[i];
        Tally s = excess(NOTHING, row->a, x, t->n, b_weight * row->b);
        if (!at_most_0(s) || (row->equal && !at_least_0(s)))
            return false;
    }
    return true;
}

/* Returns true if c_weight c + y A >= 0. */
static bool columns_hold(const Tableau *t, const double *y, double c_weight) {
    for (int j = 0; j < t->n; j++) {
        Tally s = NOTHING;
        add(&s, c_weight * t->c[j]);
        for (int i = 0; i < t->m; i++)
            add(&s, y[i] * t->row[i]->a[j]);
        if (!at_least_0(s))
            return false;
    }
    return true;
}

/* The column of variable unit[i] began as e_i with cost 0. So its reduced cost is minus the dual
 * price of row i, and that is y_i. In phase 1, the reduced cost of an artificial also contains its
 * own cost, 1. */
static void read_y(double *y, const Tableau *t, int phase) {
    for (int i = 0; i < t->m; i++) {
        const LpRow *row = t->row[i];
        bool paid = phase == PHASE_1 && t->unit[i] >= t->artificial;
        double price = clean(t->cell[t->m + phase][t->unit[i]] - paid);
        double worth = row->b < 0 ? -price : price;
        y[i] = row->equal ? worth : fmax(worth, 0);
    }
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
        add(&gap, t->c[j] * p->x[j]);
    for (int i = 0; i < t->m && has_y; i++)
        add(&gap, t->row[i]->b * p->y[i]);
    return has_x && has_y ? at_most_0(gap) : !at_least_0(gap);
}

// -------------------------------------------------------------------------------------------------
// The answer
// -------------------------------------------------------------------------------------------------

enum { TRIES = 12 }; /* orders of the rows; the first one nearly always succeeds */

/* Converts the answer back to the units of the LP as given, and y to the order of its rows. */
static void restore(LpAnswer *answer, const Tableau *t, const Lp *scaled, const Lp *given) {
    const LpAnswer found = *answer;
    int b_exp = answer->verdict == LP_UNBOUNDED ? 0 : t->col_exp[t->n];
    for (int j = 0; j < t->n; j++) {
        answer->x[j] = ldexp(found.x[j], t->col_exp[j] - b_exp);
        answer->value += given->c[j] * answer->x[j];
    }
    for (int i = 0; i < t->m; i++) {
        int at = t->row[i] - scaled->row;
        answer->y[at] = ldexp(found.y[i], t->row_exp[at] - t->row_exp[t->m]);
    }
}

/* The order of the rows decides which of several equal numbers is taken. In another order the
 * search takes another way, on which other numbers are rounded. So a verdict that rounding has
 * spoiled is mostly found when the rows are rotated, first by one, then by two, and so on. */
void lp_solve(LpAnswer *answer, const Lp *lp) {
    CHECK(lp->n >= 0 && lp->n <= LP_MAX_VARS && lp->m >= 0 && lp->m <= LP_MAX_ROWS);
    Tableau *t = xcalloc(1, sizeof *t); /* 82 KB, too much for a small stack */
    Lp scaled;
    t->n = lp->n;
    t->m = lp->m;
    t->c = scaled.c;
    const bool finite = scale(&scaled, t, lp);
    for (int try = 0; try < TRIES; try++) {
        for (int i = 0; i < t->m; i++)
            t->row[i] = &scaled.row[(i + try) % t->m];
        *answer = (LpAnswer){.verdict = LP_LOST};
        if (!finite)
            break;
        t->pivots = 0;
        t->fresh = true;
        t->lost = false;
        answer->verdict = simplex(answer->x, answer->y, t);
        if (is_proved(t, answer))
            break;
        answer->verdict = LP_LOST;
        t->mended++;
    }
    answer->pivots = t->pivots;
    answer->mended = t->mended;
    restore(answer, t, &scaled, lp);
    free(t);
}

LpRow *lp_row(Lp *lp, const char *name, bool equal, double b) {
    CHECK(lp->m < LP_MAX_ROWS);
    LpRow *row = &lp->row[lp->m++];
    *row = (LpRow){.name = name, .equal = equal, .b = b};
    return row;
}

double lp_excess(const LpRow *row, const double *x, int n) {
    return excess(NOTHING, row->a, x, n, row->b).sum;
}
bool lp_binds(const LpRow *row, const double *x, int n) {
    return at_least_0(excess((Tally){0, 0}, row->a, x, n, row->b));
}
