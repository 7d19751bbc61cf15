/* policy.c: what a placement costs (section 4.3, Appendix A.3).
 *
 * The cost model `paper` is Appendix A.3 to the letter. With gbs and bls fixed everything in it is linear in the nine
 * fractions, so that the best placement is a linear program: a max is one row for each of its terms, < is <=. What is
 * printed stays even where it is no machine's behaviour: attention over all KV that is not on the GPU is the CPU's, and so
 * ctog^g has no KV read and gtoc^g no new K and V; prefill stores s + 1 tokens; att_1^p and att_2^p are multiplied by cg
 * although prefill runs on the GPU; gpu_w^g holds the activations of a whole prompt; comp^g adds two processors that could
 * work at once; embeddings and logits take no memory. The disk's fractions are wn, cn, hn there and wd, cd, hd here.
 * Read next: lp.c, which solves it. */
#include <math.h>

#include "flexgen.h"

// ---------------------------------------------------------------------------------------------------------------
// Appendix A.3
// ---------------------------------------------------------------------------------------------------------------

const char *const fraction_name[NFRACTIONS] = {"wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd"};

/* A sum that is linear in the nine fractions, in their order; `one` is its constant. */
typedef union {
    struct {
        double wg, wc, wd, cg, cc, cd, hg, hc, hd, one;
    };
    double at[NFRACTIONS + 1];
} Linear;

/* A.3's letters; weights: the bytes of a layer, 8 h1^2 + 4 h1 h2. */
typedef struct {
    double s, n, l, h1, h2, nh, gbs, bls, weights;
    const Hardware *hw;
} Letters;

static Letters letters(const Hardware *hardware, const OptConfig *config, const Block *block) {
    double h1 = config->h1, h2 = config->h2;
    return (Letters){.s = block->s,
                     .n = block->n,
                     .l = config->l,
                     .h1 = h1,
                     .h2 = h2,
                     .nh = config->nh,
                     .gbs = block->gbs,
                     .bls = (double)block->gbs * block->num_gpu_batches,
                     .weights = 8 * h1 * h1 + 4 * h1 * h2,
                     .hw = hardware};
}

/* sum / rate <= T, where T is T_PRE or T_GEN: a term of T's max. */
static void latency(Lp *lp, const char *name, int T, Linear sum, double rate) {
    LpRow *row = lp_row(lp, name, false, -sum.one / rate);
    for (int f = 0; f < NFRACTIONS; f++) row->a[f] = sum.at[f] / rate;
    row->a[T] = -1;
}

/* home + work + more <= capacity */
static void peak(Lp *lp, const char *name, Linear home, Linear work, Linear more, double capacity) {
    LpRow *row = lp_row(lp, name, false, capacity - home.one - work.one - more.one);
    for (int f = 0; f < NFRACTIONS; f++) row->a[f] = home.at[f] + work.at[f] + more.at[f];
}

/* T_pre = max(ctog^p, gtoc^p, dtoc^p, ctod^p, comp^p) */
static void prefill_rows(Lp *lp, const Letters *a) {
    const double s = a->s, h1 = a->h1, h2 = a->h2, bls = a->bls, weights = a->weights;
    const double hidden = 2 * s * h1 * bls, cache = 4 * (s + 1) * h1 * bls;
    const double linear_layer = bls * (8 * s * h1 * h1 + 4 * s * h1 * h2), att = 4 * bls * s * s * h1;
    const Hardware *hw = a->hw;
    enum { P = 1 }; /* the stage */
    latency(lp, "ctog^p", T_PRE, (Linear){.wc = weights, .wd = weights, .hc = hidden, .hd = hidden}, hw->ctog_bdw[P]);
    latency(lp, "gtoc^p", T_PRE, (Linear){.cc = cache, .cd = cache, .hc = hidden, .hd = hidden}, hw->gtoc_bdw[P]);
    latency(lp, "dtoc^p", T_PRE, (Linear){.wd = weights, .hd = hidden}, hw->dtoc_bdw[P]);
    latency(lp, "ctod^p", T_PRE, (Linear){.cd = cache, .hd = hidden}, hw->ctod_bdw[P]);
    latency(lp, "comp^p", T_PRE, (Linear){.one = linear_layer / hw->mm_flops[P] + att / hw->bmm_flops[P]}, 1);
}

/* T_gen = max(ctog^g, gtoc^g, dtoc^g, ctod^g, comp^g) */
static void decode_rows(Lp *lp, const Letters *a) {
    const double s = a->s, n = a->n, h1 = a->h1, h2 = a->h2, bls = a->bls, weights = a->weights;
    const double hidden = 2 * h1 * bls, cache_dtoc = 4 * bls * (s + n / 2) * h1, cache_ctod = 4 * bls * h1;
    const double linear_layer = bls * (8 * h1 * h1 + 4 * h1 * h2), att = 4 * bls * (s + n / 2) * h1;
    const Hardware *hw = a->hw;
    enum { G = 0 };
    latency(lp, "ctog^g", T_GEN, (Linear){.wc = weights, .wd = weights, .hc = hidden, .hd = hidden}, hw->ctog_bdw[G]);
    latency(lp, "gtoc^g", T_GEN, (Linear){.hc = hidden, .hd = hidden}, hw->gtoc_bdw[G]);
    latency(lp, "dtoc^g", T_GEN, (Linear){.cd = cache_dtoc, .wd = weights, .hd = hidden}, hw->dtoc_bdw[G]);
    latency(lp, "ctod^g", T_GEN, (Linear){.cd = cache_ctod, .hd = hidden}, hw->ctod_bdw[G]);
    latency(lp, "comp^g", T_GEN, /* gpu_comp^g + cpu_comp^g */
            (Linear){.one = linear_layer / hw->mm_flops[G],
                     .cg = att / hw->bmm_flops[G],
                     .cc = att / hw->cpu_flops[G],
                     .cd = att / hw->cpu_flops[G]},
            1);
}

/* gpu_peak^p = gpu_home^p + gpu_w^p < gmem */
static void gpu_prefill_rows(Lp *lp, const Letters *a) {
    const double s = a->s, n = a->n, l = a->l, h1 = a->h1, h2 = a->h2, nh = a->nh, gbs = a->gbs, bls = a->bls;
    const double weights = a->weights, hidden = 2 * s * h1 * gbs, gmem = a->hw->gmem;
    const Linear gpu_home = {.wg = weights * l, .hg = 2 * s * h1 * bls, .cg = 4 * (s + n) * h1 * bls * l};
    const Linear gpu_w = {.one = 2 * weights + hidden, .wg = -2 * weights, .hg = -hidden}; /* 2 (1 - wg), 1 - hg */
    const Linear qkv = {.one = gbs * (2 * s * h1 + 3 * (2 * s * h1))};
    const Linear att_1 = {.cg = gbs * (2 * s * h1 + 2 * s * h1 + 2 * nh * s * s)};
    const Linear att_2 = {.cg = gbs * (2 * nh * s * s + 2 * s * h1 + 2 * s * h1)};
    const Linear embed = {.one = gbs * (2 * s * h1 + 2 * s * h1)};
    const Linear mlp_1 = {.one = gbs * 2 * (s * h1 + s * h2)};
    const Linear mlp_2 = {.one = gbs * 2 * (s * h2 + s * h1)};
    peak(lp, "gpu_peak^p with qkv^p", gpu_home, gpu_w, qkv, gmem);
    peak(lp, "gpu_peak^p with att_1^p", gpu_home, gpu_w, att_1, gmem);
    peak(lp, "gpu_peak^p with att_2^p", gpu_home, gpu_w, att_2, gmem);
    peak(lp, "gpu_peak^p with embed^p", gpu_home, gpu_w, embed, gmem);
    peak(lp, "gpu_peak^p with mlp_1^p", gpu_home, gpu_w, mlp_1, gmem);
    peak(lp, "gpu_peak^p with mlp_2^p", gpu_home, gpu_w, mlp_2, gmem);
}

/* gpu_peak^g = gpu_home^g + gpu_w^g < gmem */
static void gpu_decode_rows(Lp *lp, const Letters *a) {
    const double s = a->s, n = a->n, l = a->l, h1 = a->h1, h2 = a->h2, nh = a->nh, gbs = a->gbs, bls = a->bls;
    const double weights = a->weights, hidden = 2 * s * h1 * gbs /* as printed */, gmem = a->hw->gmem;
    const Linear gpu_home = {.wg = weights * l, .hg = 2 * h1 * bls, .cg = 4 * (s + n) * h1 * bls * l};
    const Linear gpu_w = {.one = 2 * weights + hidden, .wg = -2 * weights, .hg = -hidden}; /* 2 (1 - wg), 1 - hg */
    const Linear kv = {.one = gbs * (2 * h1 + 3 * (2 * h1))};
    const Linear att_1 = {.cg = gbs * (2 * h1 + 2 * (s + n) * h1 + 2 * nh * (s + n))};
    const Linear att_2 = {.cg = gbs * (2 * nh * (s + n) + 2 * (s + n) * h1 + 2 * h1)};
    const Linear embed = {.one = gbs * (2 * h1 + 2 * h1)};
    const Linear mlp_1 = {.one = 2 * gbs * (h1 + h2)};
    const Linear mlp_2 = {.one = 2 * gbs * (h2 + h1)};
    peak(lp, "gpu_peak^g with kv^g", gpu_home, gpu_w, kv, gmem);
    peak(lp, "gpu_peak^g with att_1^g", gpu_home, gpu_w, att_1, gmem);
    peak(lp, "gpu_peak^g with att_2^g", gpu_home, gpu_w, att_2, gmem);
    peak(lp, "gpu_peak^g with embed^g", gpu_home, gpu_w, embed, gmem);
    peak(lp, "gpu_peak^g with mlp_1^g", gpu_home, gpu_w, mlp_1, gmem);
    peak(lp, "gpu_peak^g with mlp_2^g", gpu_home, gpu_w, mlp_2, gmem);
}

/* cpu_peak^p = cpu_home^p + cpu_w^p < cmem, and the same with ^g */
static void cpu_rows(Lp *lp, const Letters *a) {
    const double s = a->s, n = a->n, l = a->l, h1 = a->h1, nh = a->nh, gbs = a->gbs, bls = a->bls;
    const double weights = a->weights, cache = 4 * (s + n) * h1 * bls * l, hidden_w = 2 * s * h1 * gbs;
    const Linear cpu_home_p = {.wc = weights * l, .hc = 2 * s * h1 * bls, .cc = cache};
    const Linear cpu_w_p = {.one = weights + hidden_w, .wg = -weights, .hg = -hidden_w}; /* 1 - wg, 1 - hg */
    const Linear cpu_home_g = {.wc = weights * l, .hc = 2 * h1 * bls, .cc = cache};
    const Linear cpu_w_g = {.wd = weights,
                            .hd = 2 * 2 * h1 * gbs,
                            .cd = 2 * 4 * (s + n) * h1 * gbs,
                            .one = 2 * nh * (s + n) * gbs + 2 * h1 * gbs};
    peak(lp, "cpu_peak^p", cpu_home_p, cpu_w_p, (Linear){.one = 0}, a->hw->cmem);
    peak(lp, "cpu_peak^g", cpu_home_g, cpu_w_g, (Linear){.one = 0}, a->hw->cmem);
}

/* nvme_peak < nmem */
static void disk_rows(Lp *lp, const Letters *a) {
    const double s = a->s, n = a->n, l = a->l, h1 = a->h1, bls = a->bls;
    const Linear nvme = {.wd = a->weights * l, .hd = 2 * s * h1 * bls, .cd = 4 * (s + n) * h1 * bls * l};
    peak(lp, "nvme_peak", nvme, (Linear){.one = 0}, (Linear){.one = 0}, a->hw->nmem);
}

/* Eq. (1): wg + wc + wd = 1, cg + cc + cd = 1, hg + hc + hd = 1 */
static void sum_rows(Lp *lp) {
    static const char *const name[] = {"wg + wc + wd", "cg + cc + cd", "hg + hc + hd"};
    for (int i = 0; i < 3; i++) {
        LpRow *row = lp_row(lp, name[i], true, 1);
        for (int f = 3 * i; f < 3 * i + 3; f++) row->a[f] = 1;
    }
}

void paper_lp(Lp *lp, const Hardware *hardware, const OptConfig *config, const Block *block) {
    const Letters a = letters(hardware, config, block);
    *lp = (Lp){.n = NVARS};
    lp->c[T_PRE] = a.l / a.bls, lp->c[T_GEN] = (a.n - 1) * a.l / a.bls; /* T / bls, T = T_pre l + T_gen (n - 1) l */
    prefill_rows(lp, &a);
    decode_rows(lp, &a);
    gpu_prefill_rows(lp, &a);
    gpu_decode_rows(lp, &a);
    cpu_rows(lp, &a);
    disk_rows(lp, &a);
    sum_rows(lp);
    CHECK(lp->m == NROWS);
}

// ---------------------------------------------------------------------------------------------------------------
// The best placement of one block
// ---------------------------------------------------------------------------------------------------------------

static const int tier_rows[NTIERS + 1] = {GPU_ROWS, CPU_ROWS, DISK_ROWS, SUM_ROWS};

/* The names of those of rows [from, to) that x meets with nothing to spare; returns the largest excess of all. */
static double binding_rows(char *text, size_t size, const Lp *lp, const double *x, int from, int to) {
    double most = -INFINITY;
    text[0] = 0;
    for (int i = from; i < to; i++) {
        most = fmax(most, lp_excess(&lp->row[i], x, lp->n));
        size_t used = strlen(text);
        if (lp_binds(&lp->row[i], x, lp->n)) snprintf(text + used, size - used, "%s%s", used ? ", " : "", lp->row[i].name);
    }
    return most;
}

/* At a corner of the LP T_pre and T_gen are the largest of their terms, also T_gen for n = 1, where it costs nothing. */
static void describe_cost(Cost *cost, const Lp *lp, const double *x, const Hardware *hardware, const OptConfig *config,
                          const Block *block) {
    const double capacity[NTIERS] = {hardware->gmem, hardware->cmem, hardware->nmem};
    memcpy(cost->fraction, x, sizeof cost->fraction);
    binding_rows(cost->slowest[0], sizeof cost->slowest[0], lp, x, T_GEN_ROWS, GPU_ROWS);
    binding_rows(cost->slowest[1], sizeof cost->slowest[1], lp, x, T_PRE_ROWS, T_GEN_ROWS);
    for (int t = 0; t < NTIERS; t++)
        cost->peak[t] =
            capacity[t] + binding_rows(cost->full[t], sizeof cost->full[t], lp, x, tier_rows[t], tier_rows[t + 1]);
    cost->T_pre = x[T_PRE], cost->T_gen = x[T_GEN];
    cost->T = (cost->T_pre + cost->T_gen * (block->n - 1)) * config->l;
    cost->throughput = (double)block->gbs * block->num_gpu_batches * block->n / cost->T;
}

/* The tiers are given more bytes until a placement fits, the disk's being the cheapest and the GPU's the dearest. */
static int does_not_fit(Lp *lp, const OptConfig *config, const Block *block, Error *err) {
    static const double price[NTIERS] = {100, 10, 1};
    char who[200] = "";
    LpAnswer more;
    memset(lp->c, 0, sizeof lp->c);
    for (int t = 0; t < NTIERS; t++) {
        lp->c[lp->n] = price[t];
        for (int i = tier_rows[t]; i < tier_rows[t + 1]; i++) lp->row[i].a[lp->n] = -1;
        lp->n++;
    }
    lp_solve(&more, lp);
    for (int t = 0; t < NTIERS && more.verdict == LP_OPTIMAL; t++) {
        size_t used = strlen(who);
        if (more.x[NVARS + t] > 0)
            snprintf(who + used, sizeof who - used, "%s the %s lacks %.2f GiB", used ? "," : ":", tier_name[t],
                     ceil(100 * more.x[NVARS + t] / 0x1p30) / 100);
    }
    return fail(err, EXIT_USAGE,
                "%s, %d + %d tokens, block of %d x %d: no placement fits%s; use a smaller --gpu-batch-size or "
                "--num-gpu-batches, shorter prompts or outputs, or a larger machine",
                config->name, block->s, block->n, block->gbs, block->num_gpu_batches, who);
}

int paper_cost(Cost *cost, const Hardware *hardware, const OptConfig *config, const Block *block, Error *err) {
    Lp lp;
    LpAnswer answer;
    paper_lp(&lp, hardware, config, block);
    lp_solve(&answer, &lp);
    if (answer.verdict == LP_INFEASIBLE) return does_not_fit(&lp, config, block, err);
    if (answer.verdict != LP_OPTIMAL)
        return fail(err, EXIT_FAILED,
                    "%s: its numbers and those of %s are too far apart to be solved in doubles; check them", hardware->name,
                    config->name);
    describe_cost(cost, &lp, answer.x, hardware, config, block);
    return 0;
}
