/* explain.c: prints a linear program as a person writes it (section 4.3, Appendix A.3), its optimum
 * and its prices.
 *
 * At the optimum some rows bind: their left side is as large as their right side. The dual price of
 * a row (LpAnswer.y) says how much the objective falls if the right side is one unit larger, as
 * long as the same rows bind. So the price of a tier's row is seconds for each GB more, and rows
 * with price 0 have room to spare. The gain from a faster link is not the price of one row, since
 * the link's GB/s are in many coefficients. For links, and as a check for the tiers, the program is
 * solved once more with one more GB/s or GB.
 * Read next: choose.c. */
#include <math.h>

#include "app/app.h"

static const double GB = 1e9;
static const double DUST = 1e-12; /* relative size below which a difference is rounding */

/* The subject of a linear program: a policy that was found (the cost model runtime), or without one
 * a block, by Appendix A.3. */
typedef struct {
    const Search *search;
    const Policy *policy;
    const Block *block;
} Question;

typedef struct {
    Lp lp;
    LpAnswer answer;
    double tokens, seconds; /* tokens that the sweeps make; seconds that they take, which is the
                               objective without the small price of idle lanes */
} Solved;

// -------------------------------------------------------------------------------------------------
// Solving
// -------------------------------------------------------------------------------------------------

static bool optimum(Solved *s) {
    s->seconds = 0;
    lp_solve(&s->answer, &s->lp);
    for (int v = NFRACTIONS; v < s->lp.n; v++)
        s->seconds += s->lp.c[v] * s->answer.x[v];
    return s->answer.verdict == LP_OPTIMAL;
}

static bool solve_question(Solved *s, const Question *q) {
    s->tokens = q->policy ? 0 : q->block->n; /* A.3's objective is for one sequence */
    if (q->policy)
        policy_lp(&s->lp, &s->tokens, q->search, q->policy);
    else
        paper_lp(&s->lp, q->search->hardware, &q->search->checkpoint->config, q->block);
    return optimum(s);
}

/* Solves the question for a machine with one GB more in tier `what`, or, counted on behind the
 * tiers, one GB/s more on a link. */
static bool solve_with_more(Solved *s, const Question *q, int what) {
    Search search = *q->search;
    Hardware h = *search.hardware;
    search.hardware = &h;
    if (what < NTIERS) {
        h.mem[what] += GB;
        search.capacity[what] += (Bytes)GB;
    }
    for (int phase = 0; what >= NTIERS && phase < 2; phase++)
        h.bdw[what - NTIERS][phase] += GB;
    return solve_question(s, &(Question){&search, q->policy, q->block});
}

// -------------------------------------------------------------------------------------------------
// Rows
// -------------------------------------------------------------------------------------------------

static const char *variable_name(const Question *q, int v) {
    static const char *const paper[] = {"T_pre", "T_gen"}, *const runtime[] = {"T_gen", "T_pre",
                                                                               "T_gen_last",
                                                                               "T_pre_last"};
    if (v < NFRACTIONS)
        return fraction_name[v];
    return q->policy ? runtime[v - NFRACTIONS] : paper[v - NFRACTIONS];
}

/* Returns the tier whose capacity a row bounds; NTIERS: the row bounds none. */
static Tier row_tier(const Question *q, const Lp *lp, int i) {
    int t = TIER_GPU;
    while (t < NTIERS && (q->policy ? strcmp(lp->row[i].name, memory_row[t]) != 0
                                    : i < tier_rows[t] || i >= tier_rows[t + 1]))
        t++;
    return (Tier)t;
}

/* The terms of variables [from, to) of a row, with coefficients a * scale in a unit, or "". sign:
 * only the positive ones (1), only the negative ones without their sign (-1), or all of them (0).
 */
typedef struct {
    const double *a;
    int from, to;
    double scale;
    const char *unit;
    int sign;
} Terms;

/* Prints terms, such as "0.5 GB (wc + wd) + 0.1 GB hc"; equal coefficients are printed once.
 * Returns true if nothing has been printed yet. */
static bool print_terms(FILE *out, const Question *q, Terms t, bool first) {
    for (int v = t.from; v < t.to; v++) {
        double a = t.a[v], size = fabs(a * t.scale);
        int equal = 0, before = t.from;
        while (t.a[before] != a)
            before++;
        if (a == 0 || a * t.sign < 0 || before < v)
            continue;
        for (int w = v; w < t.to; w++)
            equal += t.a[w] == a;
        bool brackets = equal > 1 && *t.unit;
        const char *before_name = brackets ? "(" : "";
        if (a < 0 && !t.sign)
            fputs(first ? "-" : " - ", out);
        else
            fputs(first ? "" : " + ", out);
        if (*t.unit || size != 1)
            fprintf(out, "%.4g%s ", size, t.unit);
        for (int w = v; w < t.to; w++)
            if (t.a[w] == a) {
                fprintf(out, "%s%s", before_name, variable_name(q, w));
                before_name = " + ";
            }
        fputs(brackets ? ")" : "", out);
        first = false;
    }
    return first;
}

/* Reports row i: a capacity, a time or 1 stands alone on its right side, and what does not depend
 * on the fractions is on the left. */
static void report_row(FILE *out, cJSON *rows, const Question *q, const Solved *s, int i) {
    const LpRow *row = &s->lp.row[i];
    const double *x = s->answer.x;
    int n = s->lp.n;
    Tier tier = row_tier(q, &s->lp, i);
    bool memory = tier < NTIERS, binds = row->equal || lp_binds(row, x, n);
    const char *unit = row->equal ? "" : memory ? " GB" : " s";
    double size = memory ? GB : 1, /* of the unit */
        bound = memory       ? q->search->capacity[tier]
                : row->equal ? row->b
                             : 0,
           right = bound;
    for (int v = NFRACTIONS; v < n; v++)
        right -= fmin(row->a[v], 0) * x[v];
    double left = (right + lp_excess(row, x, n)) / size, price = s->answer.y[i] * size,
           constant = (bound - row->b) / size;
    right /= size;
    cJSON *one = cJSON_CreateObject();
    cJSON_AddItemToArray(rows, one);
    cJSON_AddStringToObject(one, "row", row->name);
    cJSON_AddStringToObject(one, "unit", unit);
    ADD(one, {"left", left}, {"right", right}, {"price", price});
    cJSON_AddBoolToObject(one, "binds", binds);
    fprintf(out, "%c %10.5g%-3s %10.5g%-3s %10.4g  %-24s ", binds ? '*' : ' ', left, unit, right,
            unit, price, row->name);
    Terms shares = {row->a, 0, NFRACTIONS, 1 / size, unit, 0},
          times = {row->a, NFRACTIONS, n, 1, "", 1}, waits = {row->a, NFRACTIONS, n, 1, "", -1};
    bool first = constant == 0, link = !q->policy && i < GPU_ROWS && i % T_GEN_ROWS <= CTOD;
    if (!first)
        fprintf(out, "%.4g%s", constant, unit);
    if (link) { /* A.3 divides bytes by the link's rate */
        double rate = q->search->hardware->bdw[i % T_GEN_ROWS][i < T_GEN_ROWS] / GB;
        shares.scale = rate;
        shares.unit = " GB";
        fprintf(out, "(");
        first = print_terms(out, q, shares, first);
        fprintf(out, ") / %.4g GB/s", rate);
    } else
        first = print_terms(out, q, shares, first);
    print_terms(out, q, times, first);
    fputs(row->equal ? " = " : " <= ", out);
    if (print_terms(out, q, waits, true))
        fprintf(out, "%.5g%s", right, unit);
    fprintf(out, "\n");
}

// -------------------------------------------------------------------------------------------------
// What more would bring
// -------------------------------------------------------------------------------------------------

/* Reports a line for each tier and link. The dual price of a tier is the sum over its rows. */
static void explain_more(const TaskRun *run, const Question *q, const Solved *s) {
    double before = s->tokens / s->seconds;
    cJSON *more = cJSON_AddObjectToObject(run->json, "more");
    fputs("\nwith one more GB or GB/s           by price (s)   solved (s)      token/s\n",
          run->text);
    for (int what = 0; what <= NTIERS + CTOD; what++) {
        bool tier = what < NTIERS;
        const char *name = tier ? memory_row[what] : channel_name[what - NTIERS];
        Solved then;
        if (!solve_with_more(&then, q, what))
            continue;
        double falls = s->answer.value - then.answer.value;
        double price = 0, rises = then.tokens / then.seconds - before;
        if (fabs(rises) < DUST * before)
            rises = 0;
        for (int i = 0; i < s->lp.m; i++)
            if ((int)row_tier(q, &s->lp, i) == what)
                price += s->answer.y[i] * GB;
        cJSON *one = cJSON_AddObjectToObject(more, name);
        if (tier) {
            cJSON_AddNumberToObject(one, "price", price);
            fprintf(run->text, "  %-11s %12.5g GB      %12.4g", name,
                    q->search->capacity[what] / GB, 0 - price);
        } else
            fprintf(run->text, "  %-11s %12.5g GB/s    %12s", name,
                    q->search->hardware->bdw[what - NTIERS][0] / GB, "");
        ADD(one, {"seconds", falls}, {"throughput", rises});
        fprintf(run->text, " %12.4g %+12.4g\n", 0 - falls, rises);
    }
}

// -------------------------------------------------------------------------------------------------
// The picture
// -------------------------------------------------------------------------------------------------

/* Returns the largest value of a fraction that fits. */
static double largest(const Solved *s, int fraction) {
    Solved most = *s;
    memset(most.lp.c, 0, sizeof most.lp.c);
    most.lp.c[fraction] = -1;
    return optimum(&most) ? most.answer.x[fraction] : 0;
}

/* Draws the best token/s for each wg and cg that some placement fits, with the other fractions
 * chosen anew, in percent of the optimum's. */
static void draw_objective(FILE *out, const Solved *s) {
    enum { STEPS = 10 };
    double wg = largest(s, WG) / STEPS, cg = largest(s, CG) / STEPS;
    fprintf(out,
            "\ntoken/s by wg and cg, the other fractions at their best, in percent of the optimum; "
            "-: it does not fit\n");
    for (int y = STEPS; y >= 0; y--) {
        fprintf(out, "  cg %5.1f%% |", 100 * cg * y);
        for (int x = 0; x <= STEPS; x++) {
            Solved at = *s;
            lp_row(&at.lp, "wg here", true, wg * x)->a[WG] = 1;
            lp_row(&at.lp, "cg here", true, cg * y)->a[CG] = 1;
            optimum(&at) ? fprintf(out, "%7.1f", 100 * s->seconds / at.seconds)
                         : fprintf(out, "%7s", "-");
        }
        fprintf(out, "\n");
    }
    fprintf(out, "  %11s", "wg");
    for (int x = 0; x <= STEPS; x++)
        fprintf(out, "%6.1f%%", 100 * wg * x);
    fprintf(out, "\n");
}

static void print_optimum(FILE *out, const Question *q, const Solved *s) {
    fprintf(out, "\nminimize  ");
    bool first = print_terms(out, q, (Terms){s->lp.c, NFRACTIONS, s->lp.n, 1, "", 0}, true);
    print_terms(out, q, (Terms){s->lp.c, 0, NFRACTIONS, 1, " s", 0}, first);
    fprintf(out, "\n  which is %.6g s%s at", s->answer.value,
            q->policy ? " for the task" : ", T / bls, for a sequence");
    for (int v = 0; v < s->lp.n; v++)
        if (s->answer.x[v] > 0 || v >= NFRACTIONS)
            fprintf(out, v < NFRACTIONS ? " %s %.4f" : " %s %.4g s", variable_name(q, v),
                    s->answer.x[v]);
    fprintf(out, "\n  %g tokens in %.6g s: %.6g token/s\n", s->tokens, s->seconds,
            s->tokens / s->seconds);
    if (q->policy)
        fprintf(out,
                "  (the terms without T are a small price of work that hides behind other work, so "
                "that nothing moves in "
                "vain)\n");
    fprintf(out, "\n  %-13s %-13s %10s  subject to (*: the row binds)\n", "left side", "right side",
            "price (s)");
}

/* Adds what the policy's plan holds, by tier and purpose, in bytes. */
static void add_regions(cJSON *json, const Search *search, const Policy *policy) {
    Error ignored; /* unused: the search has planned it before */
    Plan *plan = plan_for(search, policy, &ignored);
    cJSON *regions = cJSON_AddObjectToObject(json, "regions"), *tier[NTIERS];
    for (int t = 0; t < NTIERS; t++)
        tier[t] = cJSON_AddObjectToObject(regions, tier_name[t]);
    for (int i = 0; i < NREGIONS * NTIERS && plan; i++) {
        Bytes bytes[NTIERS];
        const char *name = plan_purpose(bytes, plan, i);
        for (int t = 0; t < NTIERS && name; t++)
            if (bytes[t])
                cJSON_AddNumberToObject(tier[t], name, bytes[t]);
    }
    plan_free(plan);
}

int report_explained(const TaskRun *run, const Search *search, const Policy *policy,
                     const Block *block, Error *err) {
    Question q = {search, policy, block};
    Solved s;
    if (!solve_question(&s, &q))
        return fail(
            err, EXIT_FAILED,
            "--explain: the linear program has no optimum: only rounded fractions fit the machine");
    cJSON *lp = cJSON_AddObjectToObject(run->json, "lp"),
          *rows = cJSON_AddArrayToObject(lp, "rows");
    ADD(lp, {"objective", s.answer.value}, {"seconds", s.seconds},
        {"throughput", s.tokens / s.seconds});
    print_optimum(run->text, &q, &s);
    for (int i = 0; i < s.lp.m; i++)
        report_row(run->text, rows, &q, &s, i);
    explain_more(run, &q, &s);
    if (policy)
        add_regions(run->json, search, policy);
    if (!search->fixed[0] && !search->fixed[2])
        draw_objective(run->text, &s);
    return 0;
}
