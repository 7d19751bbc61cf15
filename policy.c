/* policy.c: what a placement costs (section 4.3): Appendix A.3 and Eq. (1) to the letter.
 *
 * With gbs and bls fixed, everything in this cost model, `paper`, is linear in the nine fractions,
 * so the best placement is a linear program: a max becomes one row for each of its terms, and <
 * becomes <=. The appendix is followed as printed even where no machine behaves like that:
 *   the CPU attends to all KV that is not on the GPU, so that ctog^g has no KV read and gtoc^g no
 *     new K and V
 *   prefill stores s + 1 tokens
 *   att_1^p and att_2^p are multiplied by cg although prefill runs on the GPU
 *   gpu_w^g holds the activations of a whole prompt
 *   comp^g adds two processors that could work at once
 *   embeddings and logits take no memory
 * The disk's fractions are wn, cn, hn there and wd, cd, hd here.
 *
 * The cost model `runtime` of cost/runtime.c describes what this engine really does. The outer
 * level of the policy search, which chooses gbs and bls, is cost/search.c.
 * Read next: branches/embed.c. */
#include <math.h>

#include "policy.h"
#include "device/device.h"

// -------------------------------------------------------------------------------------------------
// Appendix A.3
// -------------------------------------------------------------------------------------------------

const char *const fraction_name[NFRACTIONS] = {"wg", "wc", "wd", "cg", "cc",
                                               "cd", "hg", "hc", "hd"};

/* The symbols of A.3 for one model, block and machine. */
typedef struct {
    double s, n, l, h1, h2, nh, gbs, bls;
    double weights; /* bytes of a layer, 8 h1^2 + 4 h1 h2 */
    const Hardware *hw;
} Letters;

void sum_add(Sum *to, double factor, Sum more) {
    for (int f = 0; f <= NFRACTIONS; f++)
        to->at[f] += factor * more.at[f];
}

void latency_row(Lp *lp, const char *name, int T, Sum sum, double rate) {
    LpRow *row = lp_row(lp, name, false, -sum.one / rate);
    for (int f = 0; f < NFRACTIONS; f++)
        row->a[f] = sum.at[f] / rate;
    row->a[T] = -1;
}

void peak_row(Lp *lp, const char *name, Sum sum, double capacity) {
    LpRow *row = lp_row(lp, name, false, capacity - sum.one);
    for (int f = 0; f < NFRACTIONS; f++)
        row->a[f] = sum.at[f];
}

/* Adds T_pre = max(ctog^p, gtoc^p, dtoc^p, ctod^p, comp^p), or T_gen = max of the same terms with
 * ^g. The phases differ in q, the number of new tokens of a sequence, in the cache that is stored
 * and loaded, and in the processor that attends. */
static void time_rows(Lp *lp, const Letters *a, bool prefill) {
    static const char *const name[2][5] = {{"ctog^g", "gtoc^g", "dtoc^g", "ctod^g", "comp^g"},
                                           {"ctog^p", "gtoc^p", "dtoc^p", "ctod^p", "comp^p"}};
    double s = a->s, n = a->n, h1 = a->h1, h2 = a->h2, bls = a->bls, weights = a->weights,
           q = prefill ? s : 1;
    double hidden = 2 * q * h1 * bls, stored = 4 * (prefill ? s + 1 : 1) * h1 * bls;
    double to_cpu = prefill ? stored : 0, loaded = prefill ? 0 : 4 * bls * (s + n / 2) * h1;
    double linear_layer = bls * (8 * q * h1 * h1 + 4 * q * h1 * h2);
    double att = 4 * bls * (prefill ? s * s : s + n / 2) * h1;
    Sum comp = {.one = linear_layer / a->hw->mm_flops[prefill]};
    if (prefill) {
        comp.one += att / a->hw->bmm_flops[1];
    } else { /* gpu_comp^g + cpu_comp^g */
        comp.cg = att / a->hw->bmm_flops[0];
        comp.cc = comp.cd = att / a->hw->cpu_flops[0];
    }
    Sum ctog = {.wc = weights, .wd = weights, .hc = hidden, .hd = hidden};
    Sum gtoc = {.cc = to_cpu, .cd = to_cpu, .hc = hidden, .hd = hidden};
    Sum dtoc = {.wd = weights, .cd = loaded, .hd = hidden}, ctod = {.cd = stored, .hd = hidden};
    Sum sum[] = {ctog, gtoc, dtoc, ctod, comp}; /* in the order of Channel, to GPU */
    for (Channel c = CTOG; c <= GPU; c++)
        latency_row(lp, name[prefill][c], prefill ? T_PRE : T_GEN, sum[c],
                    c < GPU ? a->hw->bdw[c][prefill] : 1); /* comp is in seconds already */
}

/* Adds gpu_peak^p = gpu_home^p + gpu_w^p < gmem, where a sequence has q = s new tokens, which
 * attend to past = s tokens; or the same with ^g, where q = 1 and past = s + n. gpu_w has the
 * activations of a whole prompt in both, as printed. */
static void gpu_rows(Lp *lp, const Letters *a, bool prefill) {
    double s = a->s, n = a->n, l = a->l, h1 = a->h1, h2 = a->h2, nh = a->nh, gbs = a->gbs,
           bls = a->bls;
    double q = prefill ? s : 1, past = prefill ? s : s + n, weights = a->weights,
           hidden = 2 * s * h1 * gbs;
    Sum gpu_home = {.wg = weights * l, .hg = 2 * q * h1 * bls, .cg = 4 * (s + n) * h1 * bls * l};
    Sum gpu_w = {
        .one = 2 * weights + hidden, .wg = -2 * weights, .hg = -hidden}; /* 2 (1 - wg), 1 - hg */
    static const char *const name[2][6] = {
        {"gpu_peak^g with kv^g", "gpu_peak^g with att_1^g", "gpu_peak^g with att_2^g",
         "gpu_peak^g with embed^g", "gpu_peak^g with mlp_1^g", "gpu_peak^g with mlp_2^g"},
        {"gpu_peak^p with qkv^p", "gpu_peak^p with att_1^p", "gpu_peak^p with att_2^p",
         "gpu_peak^p with embed^p", "gpu_peak^p with mlp_1^p", "gpu_peak^p with mlp_2^p"}};
    Sum work[6] = {{.one = gbs * (2 * q * h1 + 3 * (2 * q * h1))},
                   {.cg = gbs * (2 * q * h1 + 2 * past * h1 + 2 * nh * q * past)},
                   {.cg = gbs * (2 * nh * q * past + 2 * past * h1 + 2 * q * h1)},
                   {.one = gbs * (2 * q * h1 + 2 * q * h1)},
                   {.one = gbs * 2 * (q * h1 + q * h2)},
                   {.one = gbs * 2 * (q * h2 + q * h1)}};
    for (int i = 0; i < 6; i++) {
        Sum sum = gpu_home;
        sum_add(&sum, 1, gpu_w);
        sum_add(&sum, 1, work[i]);
        peak_row(lp, name[prefill][i], sum, a->hw->gmem);
    }
}

/* Adds cpu_peak^p = cpu_home^p + cpu_w^p < cmem, the same with ^g, and nvme_peak < nmem. */
static void cpu_and_disk_rows(Lp *lp, const Letters *a) {
    double s = a->s, n = a->n, h1 = a->h1, nh = a->nh, gbs = a->gbs, bls = a->bls,
           weights = a->weights;
    double all_weights = weights * a->l, cache = 4 * (s + n) * h1 * bls * a->l,
           hidden_w = 2 * s * h1 * gbs;
    Sum cpu_p = {.wc = all_weights, .hc = 2 * s * h1 * bls, .cc = cache};
    Sum cpu_g = {.wc = all_weights, .hc = 2 * h1 * bls, .cc = cache};
    /* cpu_w^p, where weights and activations are multiplied by 1 - wg and 1 - hg */
    sum_add(&cpu_p, 1, (Sum){.one = weights + hidden_w, .wg = -weights, .hg = -hidden_w});
    /* cpu_w^g */
    sum_add(&cpu_g, 1,
            (Sum){.one = 2 * nh * (s + n) * gbs + 2 * h1 * gbs,
                  .wd = weights,
                  .cd = 2 * 4 * (s + n) * h1 * gbs,
                  .hd = 2 * 2 * h1 * gbs});
    peak_row(lp, "cpu_peak^p", cpu_p, a->hw->cmem);
    peak_row(lp, "cpu_peak^g", cpu_g, a->hw->cmem);
    peak_row(lp, "nvme_peak", (Sum){.wd = all_weights, .hd = 2 * s * h1 * bls, .cd = cache},
             a->hw->nmem);
}

void fraction_rows(Lp *lp) {
    static const char *const name[] = {"wg + wc + wd", "cg + cc + cd", "hg + hc + hd"};
    for (int i = 0; i < 3; i++) {
        LpRow *row = lp_row(lp, name[i], true, 1);
        for (int f = 3 * i; f < 3 * i + 3; f++)
            row->a[f] = 1;
    }
}

void paper_lp(Lp *lp, const Hardware *hardware, const OptConfig *config, const Block *block) {
    Letters a = {.s = block->s,
                 .n = block->n,
                 .l = config->l,
                 .h1 = config->h1,
                 .h2 = config->h2,
                 .nh = config->nh,
                 .gbs = block->gbs,
                 .hw = hardware};
    a.bls = a.gbs * block->num_gpu_batches;
    a.weights = 8 * a.h1 * a.h1 + 4 * a.h1 * a.h2;
    *lp = (Lp){.n = NVARS};
    lp->c[T_PRE] = a.l / a.bls;
    lp->c[T_GEN] = (a.n - 1) * a.l / a.bls; /* T / bls, T = T_pre l + T_gen (n - 1) l */
    for (int prefill = 1; prefill >= 0; prefill--)
        time_rows(lp, &a, prefill);
    for (int prefill = 1; prefill >= 0; prefill--)
        gpu_rows(lp, &a, prefill);
    cpu_and_disk_rows(lp, &a);
    fraction_rows(lp);
    CHECK(lp->m == NROWS);
}

// -------------------------------------------------------------------------------------------------
// The best placement of one block
// -------------------------------------------------------------------------------------------------

const int tier_rows[NTIERS + 1] = {GPU_ROWS, CPU_ROWS, DISK_ROWS, FRACTION_ROWS};

/* Writes the names of the rows in [from, to) that are binding at x. Returns the largest excess
 * a x - b of all rows in [from, to). In the rows of a tier, a x - b is the bytes that are needed,
 * less the tier's capacity, so the largest excess and the capacity together are the tier's peak. */
static double summarize_rows(char text[NAMES], const Lp *lp, const double *x, int from, int to);
/* Writes the message that no placement fits. */
static int does_not_fit(Lp *lp, const OptConfig *config, const Block *block, Error *err);

int paper_cost(Cost *cost, const Hardware *hardware, const OptConfig *config, const Block *block,
               Error *err) {
    Lp lp;
    LpAnswer answer;
    paper_lp(&lp, hardware, config, block);
    lp_solve(&answer, &lp);
    if (answer.verdict == LP_INFEASIBLE)
        return does_not_fit(&lp, config, block, err);
    if (answer.verdict != LP_OPTIMAL || answer.x[T_PRE] <= 0) /* nothing is prefilled in no time */
        return fail(
            err, EXIT_FAILED,
            "%s: its numbers and those of %s are too far apart to be solved in doubles; check them",
            hardware->name, config->name);
    /* x is a corner of the LP, so T_pre and T_gen are the largest of their terms: no other row
     * holds them. This is true even of T_gen for n = 1, which costs nothing then: if none of its
     * rows were binding, it could still fall, and x would be no corner. */
    const double *x = answer.x;
    memcpy(cost->fraction, x, sizeof cost->fraction);
    cost->T_pre = x[T_PRE];
    cost->T_gen = x[T_GEN];
    cost->T = (cost->T_pre + cost->T_gen * (block->n - 1)) * config->l;
    cost->throughput = (double)block->gbs * block->num_gpu_batches * block->n / cost->T;
    summarize_rows(cost->slowest[0], &lp, x, T_GEN_ROWS, GPU_ROWS);
    summarize_rows(cost->slowest[1], &lp, x, T_PRE_ROWS, T_GEN_ROWS);
    for (int t = 0; t < NTIERS; t++)
        cost->peak[t] = hardware->mem[t] +
                        summarize_rows(cost->full[t], &lp, x, tier_rows[t], tier_rows[t + 1]);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows tells what a placement fills, or what it lacks. On a first
// reading go on with branches/embed.c.
// -------------------------------------------------------------------------------------------------

static double summarize_rows(char text[NAMES], const Lp *lp, const double *x, int from, int to) {
    double largest_excess = -INFINITY;
    text[0] = 0;
    for (const LpRow *row = lp->row + from; row < lp->row + to; row++) {
        size_t used = strlen(text);
        largest_excess = fmax(largest_excess, lp_excess(row, x, lp->n));
        if (lp_binds(row, x, lp->n))
            snprintf(text + used, NAMES - used, "%s%s", used ? ", " : "", row->name);
    }
    return largest_excess;
}

/* It says how many bytes each tier lacks. For this, the
 * LP is solved with one more variable for each tier, its missing bytes, and minimizes their price.
 * A byte could be missing on any tier, so the prices decide which tier is said to be too small: the
 * disk if possible, because a disk is the easiest to enlarge, and the GPU last. The prices are far
 * apart, because a byte on a lower tier also takes some staging on the tiers above it, and together
 * these should still cost less than a byte up there. */
static int does_not_fit(Lp *lp, const OptConfig *config, const Block *block, Error *err) {
    static const double price[NTIERS] = {100, 10, 1};
    char who[200] = "";
    LpAnswer more;
    memset(lp->c, 0, sizeof lp->c);
    for (int t = 0; t < NTIERS; t++) {
        lp->c[lp->n] = price[t];
        for (int i = tier_rows[t]; i < tier_rows[t + 1]; i++)
            lp->row[i].a[lp->n] = -1;
        lp->n++;
    }
    lp_solve(&more, lp);
    for (int t = 0; t < NTIERS && more.verdict == LP_OPTIMAL; t++) {
        size_t used = strlen(who);
        if (more.x[NVARS + t] > 0)
            snprintf(who + used, sizeof who - used, "%s the %s lacks %.2f GiB", used ? "," : ":",
                     tier_name[t], ceil(100 * more.x[NVARS + t] / 0x1p30) / 100);
    }
    return fail(err, EXIT_USAGE,
                "%s, %d + %d tokens, block of %d x %d: no placement fits%s; use a smaller "
                "--gpu-batch-size or "
                "--num-gpu-batches, shorter prompts or outputs, or a larger machine",
                config->name, block->s, block->n, block->gbs, block->num_gpu_batches, who);
}
