/* policy.c: what a placement costs (section 4.3, Appendix A.3).
 *
 * The cost model `paper` is Appendix A.3 to the letter. With gbs and bls fixed everything in it is linear in the nine
 * fractions, so that the best placement is a linear program: a max is one row for each of its terms, < is <=. What is
 * printed stays even where it is no machine's behaviour: attention over all KV that is not on the GPU is the CPU's, and so
 * ctog^g has no KV read and gtoc^g no new K and V; prefill stores s + 1 tokens; att_1^p and att_2^p are multiplied by cg
 * although prefill runs on the GPU; gpu_w^g holds the activations of a whole prompt; comp^g adds two processors that could
 * work at once; embeddings and logits take no memory. The disk's fractions are wn, cn, hn there and wd, cd, hd here.
 *
 * The cost model `runtime` is what schedule.c posts and hardware.c prices, by lanes: a row for the seconds that each takes
 * in a layer, in sweeps with a prefill and in the others, as the plan's walk through the task counts them. Read next: lp.c,
 * which solves both; search.c, which asks. */
#include <math.h>

#include "cost/cost.h"

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

// ---------------------------------------------------------------------------------------------------------------
// What this engine does
// ---------------------------------------------------------------------------------------------------------------

/* What takes time: the channels; GPU and CPU lanes on shared cores, with what copies take of them; and ways from lane to
 * lane, which only so many batches go at once as there are workspaces. CHAIN: of the hidden state through a layer. STORE:
 * of new k and v to their pages. QUEUE: batches that decode behind one in prefill, for which only the next pages load.
 * WITH: two that are equally busy hold each other up a little. */
enum {
    R_CTOG,
    R_GTOC,
    R_DTOC,
    R_CTOD,
    R_GPU,
    R_CPU,
    R_CORES,
    R_CHAIN,
    R_STORE,
    R_QUEUE,
    R_WITH_CTOG,
    R_WITH_DTOC,
    NRESOURCES
};
static const char *const resource_row[NRESOURCES][2] = {{"ctog^g", "ctog^p"},
                                                        {"gtoc^g", "gtoc^p"},
                                                        {"dtoc^g", "dtoc^p"},
                                                        {"ctod^g", "ctod^p"},
                                                        {"gpu^g", "gpu^p"},
                                                        {"cpu^g", "cpu^p"},
                                                        {"cores^g", "cores^p"},
                                                        {"chain^g", "chain^p"},
                                                        {"store^g", "store^p"},
                                                        {"", "queue^p"},
                                                        {"comp^g with ctog^g", "comp^p with ctog^p"},
                                                        {"comp^g with dtoc^g", "comp^p with dtoc^p"}};
/* Of a link and a processor, each as busy as the other, the seconds of both that pass. */
static const double PRICE_OF_BOTH = .53;
/* What a second on a lane that others hide costs, of a second that passes. */
static const double PRICE_OF_IDLE = .02;
const char *const memory_row[NTIERS] = {"GPU memory", "CPU memory", "disk space"};

/* Seconds of each resource in one sweep: in a layer; in the last layer and the head, what differs from a layer. */
typedef struct {
    Linear layer[NRESOURCES], head[NRESOURCES];
} Sweep;

/* What is off the GPU: weights, cache, activations. */
static Linear off_w(double x) { return (Linear){.wc = x, .wd = x}; }
static Linear off_c(double x) { return (Linear){.cc = x, .cd = x}; }
static Linear off_h(double x) { return (Linear){.hc = x, .hd = x}; }

static void add(Linear *to, double factor, Linear more) {
    for (int f = 0; f <= NFRACTIONS; f++) to->at[f] += factor * more.at[f];
}

/* The task in one sweep of a stage, in the mean. */
typedef struct {
    const Hardware *hw;
    const OptConfig *config;
    const Plan *plan;
    int stage;
    bool delegated;
    double act, weights, on_disk;     /* bytes of an activation; of a layer's weights; as they lie on disk */
    double kv;                        /* bytes of a token's K and V in a layer */
    double v_read;                    /* the share of V that attention reads */
    double table, table_on_disk;      /* of the head's matrix */
    double prefills, decodes;         /* batches */
    double prompts, prompt_rows, len; /* len: tokens of a prompt, by its pairs */
    double steps, past, heads;        /* new tokens; tokens that one of them attends to; rows that the head wants */
} Stage;

static Stage stage_open(const Hardware *hw, const Checkpoint *checkpoint, const Plan *plan, bool delegated, int stage) {
    const Workload *w = &plan->work[stage];
    double sweeps = fmax(w->sweeps, 1);
    Stage a = {.hw = hw, .config = &checkpoint->config, .plan = plan, .stage = stage, .delegated = delegated};
    for (int r = 0; r < NROLES; r++) {
        Tensor t = checkpoint->layer[0][r];
        a.on_disk += (double)type_bytes(t.type) * t.rows * t.cols;
    }
    a.weights = (double)plan_layer_bytes(plan);
    if (copied_to_disk(plan, checkpoint)) a.on_disk = a.weights;
    a.kv = 2.0 * plan->kv_row;
    a.v_read = is_sparse(&plan->policy) ? plan->policy.sparsity : 1;
    Tensor head = checkpoint->global[plan->head];
    a.table = 2.0 * head.rows * head.cols, a.table_on_disk = (double)type_bytes(head.type) * head.rows * head.cols;
    a.act = type_bytes(plan->act_type);
    a.prefills = w->prefills / sweeps, a.decodes = w->decodes / sweeps;
    a.prompts = w->prompts / sweeps, a.prompt_rows = w->prompt_rows / sweeps;
    a.len = w->prompts > 0 ? (sqrt(1 + 8 * w->pairs / w->prompts) - 1) / 2 : 0;
    a.steps = w->steps / sweeps, a.past = w->steps > 0 ? w->past / w->steps : 0, a.heads = w->heads / sweeps;
    return a;
}

static double read_seconds(double bytes, double bdw) { return bdw > 0 ? bytes / bdw : 0; }

/* The products of a layer for `batches` batches of so many rows in all; the rows of a batch go through in pieces. */
static double products(const Stage *a, double batches, double rows) {
    if (batches <= 0) return 0;
    double h1 = a->config->h1, h2 = a->config->h2, pieces = ceil(rows / batches / a->plan->chunk);
    double m = rows / batches / pieces;
    const Hardware *h = a->hw;
    double (*seconds)(const Hardware *, bool, double, double, double, double) =
        a->plan->policy.weight_quant.bits && !a->plan->unpacked_bytes ? linear_packed_seconds : linear_seconds;
    double one = 4 * seconds(h, a->stage, m, h1, h1, a->act) + seconds(h, a->stage, m, h2, h1, a->act) +
                 seconds(h, a->stage, m, h1, h2, a->act);
    return batches * pieces * (one + 7 * h->op_s);
}

/* What packing costs beside: a layer is unpacked where products want F16, new k and v are packed. */
static double packing_seconds(const Stage *a) {
    const double rows = a->prompt_rows + a->steps, h1 = a->config->h1, bdw = a->hw->gpu_bdw;
    double seconds = 0;
    if (a->plan->unpacked_bytes) seconds += read_seconds(a->weights + a->plan->unpacked_bytes, bdw) + 6 * a->hw->op_s;
    if (a->plan->policy.cache_quant.bits) seconds += read_seconds((4 * h1 + a->kv) * rows, bdw) + a->hw->op_s;
    return seconds;
}

/* Attention to the cache of this stage, on either side. */
static double attend_cache(const Stage *a, bool on_cpu) {
    if (a->steps <= 0) return 0;
    bool packed = a->plan->policy.cache_quant.bits;
    return attend_seconds(a->hw, on_cpu, a->stage, a->steps, a->past, a->config->h1, packed) * (1 + a->v_read) / 2;
}

/* PROJECT and FINISH of the batches that prefill, or of those that decode, without attention over the cache: products,
 * layernorms, attention of prompts. */
static double gpu_seconds(const Stage *a, bool prefill) {
    double batches = prefill ? a->prefills : a->decodes, rows = prefill ? a->prompt_rows : a->steps, h1 = a->config->h1;
    double norms = read_seconds(4 * a->act * h1 * rows, a->hw->gpu_bdw) + 2 * batches * a->hw->op_s;
    double attention = prefill && batches > 0 ? attend_prefill_seconds(a->hw, a->prompts, a->len, h1, a->act) : 0;
    return products(a, batches, rows) + norms + attention;
}

/* The four links in a layer. */
static void link_loads(Sweep *s, const Stage *a) {
    const double h1 = a->config->h1, rows = a->prompt_rows + a->steps, page = a->plan->policy.page_tokens;
    const double hidden = a->act * h1 * rows, fresh = a->kv * rows;
    const double past = a->kv * a->steps * (a->past - 1 + page / 2), op = a->hw->op_s, K = a->prefills + a->decodes;
    const double ctog = a->hw->ctog_bdw[a->stage], gtoc = a->hw->gtoc_bdw[a->stage];
    const double dtoc = a->hw->dtoc_bdw[a->stage], ctod = a->hw->ctod_bdw[a->stage];
    Linear *up = &s->layer[R_CTOG], *low = &s->layer[R_GTOC];
    add(up, 1, off_w(a->weights / ctog + K * op));
    add(up, 1, off_c(a->delegated ? a->act * h1 * a->steps / ctog : past / ctog));
    add(up, 1, off_c(a->decodes * op));
    add(up, 1, off_h(hidden / ctog + K * op));
    add(low, 1, off_c(fresh / gtoc + K * op)); /* with delegation those of decoding come down with the queries */
    if (a->delegated) add(low, 1, off_c(a->act * h1 * a->steps / gtoc));
    add(low, 1, off_h(hidden / gtoc + K * op));
    add(&s->layer[R_DTOC], 1,
        (Linear){.wd = a->on_disk / dtoc + K * op, .cd = past * (1 + a->v_read) / 2 / dtoc, .hd = hidden / dtoc + K * op});
    add(&s->layer[R_CTOD], 1, (Linear){.cd = fresh / ctod + K * op, .hd = hidden / ctod + K * op});
}

/* Layer 0 loads no activations, and the head wants only some rows (mostly each sequence's last); the table streams like a
 * layer when it is not on the GPU, and the rows of new tokens are gathered from it. */
static void head_loads(Sweep *s, const Stage *a) {
    const OptConfig *c = a->config;
    const double rows = a->prompt_rows + a->steps, heads = a->heads, K = a->prefills + a->decodes;
    const double less = a->act * c->h1 * (heads - rows), ids = 2.0 * c->embed * rows;
    const Hardware *h = a->hw;
    const int x = a->stage;
    Tier home = a->plan->policy.table_home;
    Linear *of = s->head;
    add(&of[R_CTOG], less / h->ctog_bdw[x], off_h(1));
    add(&of[R_GTOC], less / h->gtoc_bdw[x], off_h(1));
    of[R_DTOC].hd += less / h->dtoc_bdw[x], of[R_CTOD].hd += less / h->ctod_bdw[x];
    if (home != TIER_GPU) of[R_CTOG].one += (a->table + a->act * c->embed * rows) / h->ctog_bdw[x];
    if (home == TIER_DISK) of[R_DTOC].one += (a->table_on_disk + ids) / h->dtoc_bdw[x];
    if (home == TIER_CPU) of[R_CPU].one += read_seconds(ids, h->cpu_bdw);
    double embed = (ids + a->act * c->h1 * rows) * 2, norm = 2 * a->act * c->h1 * heads, pick = 4.0 * c->vocab * heads;
    of[R_GPU].one += K * (linear_seconds(h, x, heads / K, c->vocab, c->embed, a->act) + 6 * h->op_s) +
                     read_seconds(embed + norm + pick, h->gpu_bdw);
}

/* Attention over the cache, on both sides; new k and v of the CPU's pages are put there by its lane. */
static void attention_loads(Sweep *s, const Stage *a) {
    const double rows = a->prompt_rows + a->steps, op = a->hw->op_s;
    Linear *gpu = &s->layer[R_GPU], *cpu = &s->layer[R_CPU];
    double on_gpu = 0, on_cpu = 0;
    if (a->steps > 0) {
        on_gpu = attend_cache(a, false) + a->decodes * op;
        on_cpu = attend_cache(a, true) + a->decodes * op;
    }
    gpu->cg += on_gpu + read_seconds(a->kv * rows, a->hw->gpu_bdw);
    add(a->delegated ? cpu : gpu, a->delegated ? on_cpu : on_gpu, off_c(1));
    if (!a->delegated) add(gpu, read_seconds(a->kv * a->steps, a->hw->gpu_bdw), off_c(1));
    cpu->cc += read_seconds(a->kv * rows, a->hw->cpu_bdw) + (a->prefills + a->decodes) * op;
}

/* Seconds of the cores that copies take. */
static Linear copying(const Stage *a, const Linear *of) {
    Linear sum = {.one = 0};
    for (int c = CTOG; c <= CTOD; c++) {
        double core_s = c < DTOC ? a->hw->copy_core_s : a->hw->disk_core_s;
        add(&sum, link_bdw(a->hw, (Channel)c)[a->stage] * core_s, of[R_CTOG + c - CTOG]);
    }
    return sum;
}

/* The ways. Where some prefill, they are what counts: their squares are long. */
static void chain_loads(Sweep *s, const Stage *a) {
    const bool prefill = a->prefills > 0;
    const double K = prefill ? a->prefills : a->decodes, rows = prefill ? a->prompt_rows : a->steps, h1 = a->config->h1;
    const double *bdw[] = {a->hw->ctog_bdw, a->hw->gtoc_bdw, a->hw->dtoc_bdw, a->hw->ctod_bdw};
    const double up = 1 / bdw[0][a->stage], down = 1 / bdw[1][a->stage], ctod = 1 / bdw[3][a->stage];
    const double hidden = a->act * h1 * rows, once = 1 / fmax(1, fmin(K, a->plan->nws));
    const double gpu = gpu_seconds(a, prefill), queued = fmax(0, a->decodes - 2) / fmax(1, a->decodes);
    const double attend = attend_cache(a, a->delegated);
    Linear chain = {.one = gpu}, store = {.one = gpu / 4}; /* q, k, v are a quarter of the products */
    const double trip =
        (a->act * h1 + a->kv) * rows * down + hidden * up + 4 * K * a->hw->op_s; /* down, append, attend, up */
    if (!prefill) add(&chain, attend + (a->delegated ? trip : 0), off_c(1));
    if (!prefill && !a->delegated) chain.cg += attend;
    add(&chain, hidden * (up + down), off_h(1));
    chain.hd += hidden * (1 / bdw[2][a->stage] + ctod);
    add(&s->layer[R_CHAIN], once, chain);
    add(&store, a->kv * rows * down, off_c(1));
    store.cd += a->kv * rows * ctod;
    add(&s->layer[R_STORE], once, store);
    if (!prefill || !a->steps) return;
    s->layer[R_QUEUE].one = gpu;
    add(&s->layer[R_QUEUE], queued * (a->delegated ? attend : a->kv * a->steps * a->past * up), off_c(1));
}

/* On shared cores arithmetic and copies add up; without overlap everything does. */
static void joint_loads(Sweep *s, const Stage *a) {
    for (int part = 0; part < 2; part++) {
        Linear *of = part ? s->head : s->layer, sum = {.one = 0};
        for (int r = R_CTOG; r <= R_CPU; r++) add(&sum, 1, of[r]);
        if (!a->plan->policy.overlap) of[R_CHAIN] = sum;
        if (a->hw->shared_cores) {
            add(&of[R_CORES], 1, of[R_GPU]);
            add(&of[R_CORES], 1, of[R_CPU]);
            add(&of[R_CORES], 1, copying(a, of));
        }
        for (int link = 0; link < 2; link++) {
            Linear *both = &of[link ? R_WITH_DTOC : R_WITH_CTOG];
            add(both, PRICE_OF_BOTH, of[link ? R_DTOC : R_CTOG]);
            add(both, PRICE_OF_BOTH, of[a->hw->shared_cores ? R_CORES : R_GPU]);
        }
    }
}

/* sum <= variable */
static void at_least(Lp *lp, const char *name, int variable, const Linear *sum, const Linear *more) {
    LpRow *row = lp_row(lp, name, false, -sum->one - (more ? more->one : 0));
    for (int f = 0; f < NFRACTIONS; f++) row->a[f] = sum->at[f] + (more ? more->at[f] : 0);
    row->a[variable] = -1;
}

/* Whether some placement makes it more than 0. */
static bool is_positive(const Linear *sum) {
    for (int f = 0; f <= NFRACTIONS; f++)
        if (sum->at[f] > 0) return true;
    return false;
}

static void stage_rows(Lp *lp, const Stage *a) {
    Sweep s = {.layer = {{.one = 0}}};
    s.layer[R_GPU].one = gpu_seconds(a, true) + gpu_seconds(a, false) + packing_seconds(a);
    link_loads(&s, a);
    attention_loads(&s, a);
    head_loads(&s, a);
    chain_loads(&s, a);
    joint_loads(&s, a);
    for (int r = 0; r < NRESOURCES; r++) {
        if (a->hw->shared_cores && (r == R_GPU || r == R_CPU)) continue; /* CORES has both */
        const char *name = resource_row[r][a->stage];
        if (is_positive(&s.layer[r])) at_least(lp, name, LAYER_S + a->stage, &s.layer[r], NULL);
        if (r <= R_CHAIN && is_positive(&s.head[r])) at_least(lp, name, LAST_S + a->stage, &s.layer[r], &s.head[r]);
    }
    for (int r = R_CTOG; r <= R_CPU; r++) /* of placements that are equally fast, that which moves least */
        for (int f = 0; r != R_GPU && f < NFRACTIONS; f++)
            lp->c[f] += PRICE_OF_IDLE * lp->c[LAYER_S + a->stage] * s.layer[r].at[f];
    LpRow *last = lp_row(lp, "last layer", false, 0); /* no shorter than the others */
    last->a[LAYER_S + a->stage] = 1, last->a[LAST_S + a->stage] = -1;
}

/* The plan's totals, linear between its corners: what it has with everything on the CPU tier, and what the shares on other
 * tiers come to besides. */
static void memory_rows(Lp *lp, const Stage *a, const double capacity[NTIERS]) {
    const Plan *p = a->plan;
    const double l = a->config->l, h1 = a->config->h1, page = p->policy.page_tokens * a->kv, pages = p->npages[TIER_CPU];
    const double weights = a->weights * l, cache = pages * page * l, near = 2 * p->staged_pages[0] * page;
    const double rows = p->max_rows, x = p->nws * rows * h1 * a->act, kvrow = p->nws * (double)p->off_rows * a->kv;
    double act = 0;
    for (int k = 0; k < p->slots; k++) act += p->act_rows[TIER_CPU][k] * h1 * a->act;
    Linear tier[NTIERS] = {{.wg = weights, .cg = cache, .hg = act},
                           {.wc = weights, .cc = cache, .hc = act},
                           {.wd = weights, .cd = cache, .hd = act}};
    add(&tier[TIER_GPU], 1, off_w(2 * a->weights));
    add(&tier[TIER_GPU], 1, off_c(near));
    add(&tier[TIER_GPU], 1, off_h(x));
    add(&tier[TIER_CPU], 1, off_c(kvrow));
    add(&tier[TIER_CPU], 1, (Linear){.wd = 2 * a->weights, .cd = near, .hd = 4 * rows * h1 * a->act});
    for (int t = 0; t < NTIERS; t++) tier[t].one = (double)p->total[t] - tier[t].wc - tier[t].cc - tier[t].hc;
    if (a->delegated) { /* the plan was made without */
        add(&tier[TIER_GPU], -1, off_c(near));
        add(&tier[TIER_CPU], 2 * p->nws * (double)p->off_seqs * h1 * a->act, off_c(1));
    }
    for (int t = 0; t < NTIERS; t++) {
        LpRow *row = lp_row(lp, memory_row[t], false, capacity[t] - tier[t].one);
        memcpy(row->a, tier[t].at, sizeof tier[t].at[0] * NFRACTIONS);
    }
}

void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan, bool delegated,
                const double capacity[NTIERS]) {
    *lp = (Lp){.n = RUNTIME_VARS};
    for (int x = 0; x < 2; x++) {
        const Stage a = stage_open(hardware, checkpoint, plan, delegated, x);
        lp->c[LAYER_S + x] = plan->work[x].sweeps * (a.config->l - 1), lp->c[LAST_S + x] = plan->work[x].sweeps;
        if (plan->work[x].sweeps > 0) stage_rows(lp, &a);
        if (x) memory_rows(lp, &a, capacity);
    }
    sum_rows(lp);
}

double runtime_seconds(const Lp *lp, const double *x) {
    double seconds = 0;
    for (int v = LAYER_S; v < RUNTIME_VARS; v++) seconds += lp->c[v] * x[v];
    return seconds;
}

/* The largest of the rows that bound a variable from below, at x, where that is more than `most`; its name. */
static double largest(const Lp *lp, const double *x, int variable, double most, const char **name) {
    for (int i = 0; i < lp->m; i++) {
        if (lp->row[i].a[variable] >= 0) continue;
        double seconds = lp_excess(&lp->row[i], x, lp->n);
        if (seconds > most) most = seconds, *name = lp->row[i].name;
    }
    return most;
}

/* Seconds of a sweep, layer by layer: beside each loads the next. slowest: the row that most seconds are bound by. */
static double sweep_seconds(const Lp *lp, double *x, const Plan *plan, int stage, char *slowest, size_t size) {
    const int l = plan->config.l;
    double sum = 0, most = 0, by[LP_MAX_ROWS] = {0};
    const double layer = (double)plan_layer_bytes(plan);
    const char *name[LP_MAX_ROWS];
    int names = 0;
    for (int j = 0; j < l; j++) {
        const char *bound = "";
        int next = (j + 1) % l, n = 0;
        x[WC] = plan->cpu_slab[next] / layer, x[WD] = plan->disk_slab[next] / layer, x[WG] = 1 - x[WC] - x[WD];
        double seconds = largest(lp, x, LAYER_S + stage, 0, &bound);
        if (j + 1 == l) seconds = largest(lp, x, LAST_S + stage, seconds, &bound);
        while (n < names && name[n] != bound) n++;
        if (n == names) name[names++] = bound;
        sum += seconds, by[n] += seconds;
        if (by[n] > most) most = by[n], snprintf(slowest, size, "%s", bound);
    }
    return sum;
}

void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan) {
    double x[LP_MAX_VARS] = {0}, seconds[2] = {0}, tokens = 0; /* T is 0: a row's excess is what T must be */
    *cost = (Cost){.T = 0};
    for (int f = 0; f < NFRACTIONS; f++) cost->fraction[f] = x[f] = plan->achieved[f / NTIERS][f % NTIERS];
    for (int stage = 0; stage < 2; stage++) {
        if (plan->work[stage].sweeps > 0)
            seconds[stage] = sweep_seconds(lp, x, plan, stage, cost->slowest[stage], sizeof cost->slowest[stage]);
        cost->T += seconds[stage] * plan->work[stage].sweeps;
        tokens += plan->work[stage].prompts + plan->work[stage].steps;
    }
    cost->T_gen = seconds[0] / plan->config.l, cost->T_pre = seconds[1] / plan->config.l;
    cost->throughput = tokens / cost->T;
    for (int t = 0; t < NTIERS; t++) cost->peak[t] = (double)plan->total[t];
}
