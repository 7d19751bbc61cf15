/* runtime.c: the cost model `runtime`, which describes what this engine does with a task as a
 * linear program (section 4.3).
 *
 * DIFFERS: Appendix A.3 (policy.c) describes the paper's machine. This model adds up the operations
 * that schedule.c posts, at the prices of hardware.c. Each lane has a row for the seconds that its
 * work takes in a layer, one for sweeps with a prefill and one for the others; the plan's walk
 * through the task has counted both kinds of sweeps.
 * Read next: search.c. */
#include <math.h>

#include "cost/cost.h"

// -------------------------------------------------------------------------------------------------
// One kind of sweep
//
// A sweep takes every batch in flight through every layer. Sweeps with a prefill (^p) and sweeps
// without one (^g) differ, as the paper's two phases do, and each kind has two variables of time:
// the seconds of a layer, and those of the last layer with the head behind it. As in A.3 a layer
// takes as long as the slowest of its lanes, and each lane has a row
//     seconds that its work takes <= seconds of the layer.
// -------------------------------------------------------------------------------------------------

/* The rows that bound a layer: the six channels of a machine (flexgen.h), and nine more. NET is not
 * a channel of a single machine. */
enum {
    CORES = CPU + 1, /* the cores on which a host device computes and copies */
    UNDER_WAY,       /* a batch's whole way through the layer: only a few are under way at once */
    STORING,         /* the same for the way of its new k and v */
    BUNCHED,         /* a batch's pieces whose k and v leave the GPU come one after the other */
    QUEUED,          /* caches that cannot load while another batch is in prefill, */
    READ_LATE,       /* and that the disk cannot read */
    COMP_WITH_CTOG,  /* from here on: two lanes that are both busy */
    COMP_WITH_DTOC,
    CPU_WITH_CTOG,
    CPU_WITH_DTOC,
    CTOG_WITH_DTOC,
    NBOUNDS
};
static const char *const bound_name[2][NBOUNDS] = {
    {"ctog^g", "gtoc^g", "dtoc^g", "ctod^g", "gpu^g", "cpu^g", "cores^g", "chain^g", "store^g",
     "bunch^g", "queue^g", "read^g", "comp^g with ctog^g", "comp^g with dtoc^g",
     "cpu^g with ctog^g", "cpu^g with dtoc^g", "ctog^g with dtoc^g"},
    {"ctog^p", "gtoc^p", "dtoc^p", "ctod^p", "gpu^p", "cpu^p", "cores^p", "chain^p", "store^p",
     "bunch^p", "queue^p", "read^p", "comp^p with ctog^p", "comp^p with dtoc^p",
     "cpu^p with ctog^p", "cpu^p with dtoc^p", "ctog^p with dtoc^p"}};
const char *const memory_row[NTIERS] = {"GPU memory", "CPU memory", "disk space"};

/* The seconds of each bound in one sweep: those of a layer, and those by which the last layer with
 * the head takes longer than a layer. */
typedef struct {
    Sum layer[NBOUNDS], head[NBOUNDS];
} Seconds;

/* The mean sweep of one kind, in A.3's letters where it has them. Bytes are of one layer. */
typedef struct {
    const Hardware *hw;
    const OptConfig *config;
    const Plan *plan;
    int phase;      /* 0: ^g, 1: ^p */
    bool delegated; /* the CPU attends to the cache that is not on the GPU */
    double h1;
    double op_s;                   /* seconds that every operation takes besides */
    double ctog, gtoc, dtoc, ctod; /* bytes/s of what moves with new tokens */
    double batches[2], rows[2];    /* batches that decode [0], in prefill [1]; their new tokens */
    double K, all_rows;            /* batches, new tokens of both kinds */
    double prompts, len;           /* prompts in prefill; their length */
    double past, head_rows;        /* tokens that a new one attends to; rows that the head needs */
    double act, kv;                /* bytes of one activation; of one token's K and V */
    double v_read;           /* share of V that attention reads: less than 1 if it is sparse */
    double weights, on_disk; /* bytes of the weights as they rest and move; as on the disk */
    double hidden, fresh;    /* bytes of the hidden states; of new k and v */
    double cache;            /* bytes of the pages that new tokens attend to */
    Tensor table;            /* the head's matrix at home */
} Sweep;

/* Returns the rate of a link at which the new tokens of a sweep move. Each batch, and the cache
 * that it attends to, moves at the rate of its own phase, whatever the others do. */
static double mean_rate(const double bdw[2], const Workload *w) {
    return (w->decoded + w->prompt_rows) / (w->decoded / bdw[0] + w->prompt_rows / bdw[1]);
}

/* Returns the bytes of a weight as it moves, F16 or packed. */
static Bytes moving_bytes(Tensor home) {
    return (Bytes)home.rows * home.cols * (home.type == U8 ? 1 : sizeof(f16));
}

/* Returns those of a layer's weights. */
static Bytes layer_bytes(const Plan *plan) {
    Bytes sum = 0;
    for (int r = 0; r < NROLES; r++)
        sum += moving_bytes(plan->weight[0][r].home);
    return sum;
}

static Sweep mean_sweep(const Hardware *hw, const Checkpoint *checkpoint, const Plan *plan,
                        bool delegated, int phase) {
    const Workload *w = &plan->work[phase];
    double sweeps = fmax(w->sweeps, 1), page = plan->policy.page_tokens;
    Sweep a = {.hw = hw,
               .config = &checkpoint->config,
               .plan = plan,
               .phase = phase,
               .delegated = delegated,
               .h1 = checkpoint->config.h1,
               .op_s = hw->op_s,
               .ctog = mean_rate(hw->ctog_bdw, w),
               .gtoc = mean_rate(hw->gtoc_bdw, w),
               .dtoc = mean_rate(hw->dtoc_bdw, w),
               .ctod = mean_rate(hw->ctod_bdw, w),
               .batches = {w->decodes / sweeps, w->prefills / sweeps},
               .rows = {w->decoded / sweeps, w->prompt_rows / sweeps},
               .prompts = w->prompts / sweeps,
               .past = w->decoded > 0 ? w->past / w->decoded : 0,
               .head_rows = w->head_rows / sweeps,
               .act = type_bytes(plan->act_type),
               .kv = 2.0 * plan->kv_row,
               .v_read = plan->policy.sparsity,
               .weights = layer_bytes(plan),
               .table = plan->global[plan->head].home};
    a.K = a.batches[1] + a.batches[0];
    a.all_rows = a.rows[1] + a.rows[0];
    /* len solves len (len + 1) / 2 = pairs of a prompt. */
    a.len = w->prompts > 0 ? (sqrt(1 + 8 * w->pairs / w->prompts) - 1) / 2 : 0;
    for (int r = 0; r < NROLES; r++)
        a.on_disk += tensor_span(checkpoint->layer[0][r]);
    if (copied_to_disk(plan, checkpoint))
        a.on_disk = a.weights;
    a.hidden = a.act * a.h1 * a.all_rows;
    a.fresh = a.kv * a.all_rows;
    /* past includes the new token, which is not loaded. Pages move whole, and on average half of
     * the last one is empty. */
    a.cache = a.kv * a.rows[0] * (a.past - 1 + page / 2);
    return a;
}

/* Returns a sum with these factors for the shares of weights, cache and activations off the GPU. */
static Sum off_gpu(double w, double c, double h) {
    return (Sum){.wc = w, .wd = w, .cc = c, .cd = c, .hc = h, .hd = h};
}

// -------------------------------------------------------------------------------------------------
// The links, by the calls of Figure 4
//
// A call takes its bytes over the bandwidth of its link, and every operation op_s besides. Weights
// cross in K parts, one beside each batch; the caches and hidden states of the K batches cross one
// by one.
// -------------------------------------------------------------------------------------------------

/* Returns the seconds in which the disk's pages are read; sparse attention reads a share of V, half
 * of the cache. */
static double read_seconds(const Sweep *a) {
    return a->cache * (1 + a->v_read) / 2 / a->hw->dtoc_bdw[0];
}

static void link_rows(Seconds *t, const Sweep *a) {
    double numbers = a->delegated ? a->h1 * a->rows[0] : 0, queries = sizeof(f16) * numbers;
    double results = a->act * numbers, op = a->op_s, each = a->K * op;
    const Hardware *h = a->hw;
    // clang-format off
    /* ctog = (wc + wd) weights    load_weight
            + (cc + cd) cache      load_cache; with delegation the results of attention instead
            + (hc + hd) hidden     load_activation */
    // clang-format on
    t->layer[CTOG] =
        off_gpu(a->weights / h->ctog_bdw[a->phase] + each,
                (a->delegated ? results : a->cache) / h->ctog_bdw[0] + a->batches[0] * op,
                a->hidden / a->ctog + each);
    // clang-format off
    /* gtoc = (cc + cd) fresh      store_cache; with delegation the queries too
            + (hc + hd) hidden     store_activation */
    // clang-format on
    t->layer[GTOC] = off_gpu(0, a->fresh / a->gtoc + each + queries / h->gtoc_bdw[0],
                             a->hidden / a->gtoc + each);
    // clang-format off
    /* dtoc = wd weights           load_weight
            + cd cache             load_cache
            + hd hidden            load_activation */
    // clang-format on
    t->layer[DTOC] = (Sum){.wd = a->on_disk / h->dtoc_bdw[a->phase] + each,
                           .cd = read_seconds(a),
                           .hd = a->hidden / a->dtoc + each};
    /* ctod = cd fresh (store_cache) + hd hidden (store_activation) */
    t->layer[CTOD] = (Sum){.cd = a->fresh / a->ctod + each, .hd = a->hidden / a->ctod + each};
}

// -------------------------------------------------------------------------------------------------
// The processors
// -------------------------------------------------------------------------------------------------

/* Returns true if the batches in prefill, or those that decode, use packed weights directly. */
static bool takes_packed_weights(const Sweep *a, bool prefill) {
    return a->plan->policy.weight_packed &&
           a->rows[prefill] <= a->batches[prefill] * a->plan->packed_rows;
}

/* Returns the seconds of a product of m rows with a matrix (n, k), of a batch in prefill or not. */
static double product(const Sweep *a, bool prefill, double m, double n, double k, bool packed) {
    return linear_seconds(a->hw, prefill, (Linear){m, n, k, a->act, packed});
}

/* Returns how many times these batches pass a layer: in prefill piece by piece. */
static double passes(const Sweep *a, bool prefill) {
    double batches = a->batches[prefill];
    return batches > 0 ? batches * ceil(a->rows[prefill] / batches / a->plan->piece_rows) : 0;
}

/* Returns the seconds of the GPU's work for these batches that does not depend on placement: four
 * products, two layernorms, each of which reads and writes the hidden state, and attention within
 * prompts. */
static double gpu_seconds(const Sweep *a, bool prefill) {
    enum { OPS = 4 + 2 };
    double h1 = a->h1, h2 = a->config->h2, rows = a->rows[prefill], times = passes(a, prefill);
    if (times <= 0)
        return 0;
    double m = rows / times;
    bool packed = takes_packed_weights(a, prefill);
    double qkv = product(a, prefill, m, 3 * h1, h1, packed),
           out = product(a, prefill, m, h1, h1, packed),
           mlp = product(a, prefill, m, h2, h1, packed) + product(a, prefill, m, h1, h2, packed),
           norms = memory_seconds(4 * a->act * h1 * rows, a->hw->gpu_bdw),
           attention = prefill ? attend_prefill_seconds(a->hw, a->prompts, a->len, h1, a->act) : 0;
    return times * (qkv + out + mlp + (OPS + prefill) * a->op_s) + norms + attention;
}

/* Returns the seconds that it takes to unpack the layer's matrices, if the products of some batch
 * need F16. */
static double unpacking_seconds(const Sweep *a) {
    enum { MATRICES = 6 }; /* of a layer */
    if (!a->plan->policy.weight_packed ||
        (takes_packed_weights(a, false) && takes_packed_weights(a, true)))
        return 0;
    return memory_seconds(a->weights + a->plan->region[UNPACKED_WEIGHTS][TIER_GPU].bytes,
                          a->hw->gpu_bdw) +
           MATRICES * a->op_s;
}

/* Returns the seconds of attention of new tokens to the whole cache, on one processor. It reads K,
 * and v_read of V. */
static double attend_cache(const Sweep *a, bool on_cpu) {
    return attend_seconds(a->hw, on_cpu, false, a->rows[0] * a->h1, a->past,
                          a->plan->policy.cache_packed) *
           (1 + a->v_read) / 2;
}

static void processor_rows(Seconds *t, const Sweep *a) {
    double ops = a->batches[0] * a->op_s, gpu_bdw = a->hw->gpu_bdw;
    double on_gpu = attend_cache(a, false) + 2 * ops, on_cpu = attend_cache(a, true) + ops;
    double made = 4 * a->h1 * a->all_rows; /* bytes of new k and v, which are F16 */
    double packing =
        a->plan->policy.cache_packed ? memory_seconds(made + a->fresh, gpu_bdw) + a->op_s : 0;
    Sum *gpu = &t->layer[GPU], *cpu = &t->layer[CPU];
    // clang-format off
    /* gpu = work that does not depend on placement
           + cg (attention + new k and v to their pages, which are two ops)
           + (cc + cd) packing of new k and v
       and without delegation
           + (cc + cd) (attention + new k and v of decoding batches to the pages in staging) */
    // clang-format on
    gpu->one = gpu_seconds(a, true) + gpu_seconds(a, false) + unpacking_seconds(a);
    gpu->cg = on_gpu + passes(a, true) * a->op_s + memory_seconds(made, gpu_bdw);
    gpu->cc = gpu->cd =
        packing + (a->delegated ? 0 : on_gpu + memory_seconds(a->kv * a->rows[0], gpu_bdw));
    /* cpu = (cc + cd) attention, with delegation, + cc (new k and v to their pages) */
    cpu->cc = cpu->cd = a->delegated ? on_cpu : 0;
    cpu->cc += memory_seconds(a->fresh, a->hw->cpu_bdw) + a->K * a->op_s;
}

/* Fills in the seconds by which the last layer with the head takes longer than a layer. Layer 0
 * loads no hidden states of `rows`, but the head loads those of `head_rows`, mostly one of each
 * sequence. The token table streams like a layer when it is not on the GPU, and the rows of new
 * tokens are gathered on the tier where it rests. The GPU embeds (ids, then hidden states, each
 * read and written), and for every batch of the head it normalizes, multiplies with the table and
 * chooses; if the CPU chooses, the logits go down. */
static void head_seconds(Seconds *t, const Sweep *a) {
    const OptConfig *c = a->config;
    const Hardware *h = a->hw;
    Tier home = a->plan->policy.table_home;
    bool packed = a->table.type == U8;
    double less = a->act * a->h1 * (a->head_rows - a->all_rows),
           ids = (packed ? GROUP_BYTES : sizeof(f16)) * c->embed * a->all_rows;
    Sum *of = t->head;
    of[CTOG] = off_gpu(0, 0, less / a->ctog);
    of[GTOC] = off_gpu(0, 0, less / a->gtoc);
    of[DTOC].hd = less / a->dtoc;
    of[CTOD].hd = less / a->ctod;
    if (home != TIER_GPU)
        of[CTOG].one = (moving_bytes(a->table) + a->act * c->embed * a->all_rows) / a->ctog;
    if (home == TIER_DISK)
        of[DTOC].one = (tensor_bytes(a->table) + ids) / a->dtoc;
    if (home == TIER_CPU)
        of[CPU].one = memory_seconds(ids, h->cpu_bdw);
    double embed = (ids + a->hidden) * 2, norm = 2 * a->act * a->h1 * a->head_rows,
           choose = 4.0 * c->vocab * a->head_rows;
    double logits =
        product(a, a->batches[1] > a->batches[0], a->head_rows / a->K, c->vocab, c->embed, packed);
    bool down = a->plan->chooser == TIER_CPU;
    enum { HEAD_OPS = 6 }; /* token and position rows, two projections, norm, choice */
    of[GPU].one = a->K * (logits + HEAD_OPS * a->op_s) +
                  memory_seconds(embed + norm + (down ? 0 : choose), h->gpu_bdw);
    if (down) {
        of[GTOC].one = choose / a->gtoc;
        of[CPU].one += memory_seconds(choose, h->cpu_bdw);
    }
}

// -------------------------------------------------------------------------------------------------
// Times that perfect overlap leaves out
// -------------------------------------------------------------------------------------------------

// clang-format off
/* Fills in chain, store and bunch. There are square_slots rotating workspaces, so at most so many batches are on their
 * way through a layer at once. If K batches take t seconds each from lane to lane, a layer takes at
 * least K t / min(K, square_slots). In sweeps with a prefill only the batches in prefill are counted: their
 * way is by far the longest.
 *     chain = the GPU's work
 *           + (hc + hd) hidden up and down + hd hidden from and to the disk
 *       and in generation
 *           + attention on the processor that has it
 *       and in generation with delegation
 *           + (cc + cd) (q, k and v down, o up), of 4 operations: down, append, attend, up
 *     store = a quarter of the GPU's work + (cc + cd) fresh down + cd fresh to the disk
 * The quarter is for q, k and v, which are 3 h1^2 of a layer's 12 h1^2.
 * A batch in prefill has first the pieces whose k and v stay on the GPU, and behind them those whose k and v leave
 * it. So the former hide no stores, except those of the batch before, for as long as the piece_slots last:
 *     bunch = cg the GPU's work + cc the longer of it and fresh down
 *           + cd the longest of both and fresh to the disk
 *           - the GPU's work for piece_slots pieces of each batch */
// clang-format on
static void under_way_rows(Seconds *t, const Sweep *a) {
    enum { TRIP_OPS = 4 };
    bool prefill = a->batches[1] > 0;
    double K = a->batches[prefill], rows = a->rows[prefill], hidden = a->act * a->h1 * rows;
    double most = a->plan->policy.synchronize ? 1 : a->plan->square_slots,
           under_way = fmax(1, fmin(K, most));
    double fresh = a->kv * rows, gpu = gpu_seconds(a, prefill);
    double trip =
        (sizeof(f16) * a->h1 * rows + fresh) / a->gtoc + hidden / a->ctog + TRIP_OPS * K * a->op_s;
    double attend = prefill ? 0 : attend_cache(a, a->delegated);
    Sum chain = off_gpu(0, attend + (a->delegated && !prefill ? trip : 0),
                        hidden / a->ctog + hidden / a->gtoc);
    chain.one = gpu;
    chain.cg = a->delegated ? 0 : attend;
    chain.hd += hidden / a->dtoc + hidden / a->ctod;
    Sum store = off_gpu(0, fresh / a->gtoc, 0);
    store.one = gpu / 4;
    store.cd += fresh / a->ctod;
    sum_add(&t->layer[UNDER_WAY], 1 / under_way, chain);
    sum_add(&t->layer[STORING], 1 / under_way, store);
    double times = passes(a, true), down = fmax(gpu, fresh / a->gtoc),
           kept = gpu + times * a->op_s + memory_seconds(4 * a->h1 * rows, a->hw->gpu_bdw);
    if (prefill)
        t->layer[BUNCHED] = (Sum){.cg = kept,
                                  .cc = down,
                                  .cd = fmax(down, fresh / a->ctod),
                                  .one = -kept * a->plan->piece_slots * K / times};
}

/* Fills in queue and read. load_cache(j, k + 1) runs one batch ahead. While one batch is in
 * prefill, the caches of the batch before it and of the batch behind it can be in flight; those of
 * the other decoding batches come after its GPU work: they are loaded, or the CPU attends to them.
 * Reads from the disk are one batch further ahead. */
static void queue_row(Seconds *t, const Sweep *a) {
    enum { BESIDE_PREFILL = 2, READ_BESIDE = 3 };
    if (a->batches[1] <= 0 || a->rows[0] <= 0)
        return;
    double count = fmax(1, a->batches[0]), behind = fmax(0, count - BESIDE_PREFILL) / count,
           unread = fmax(0, count - READ_BESIDE) / count;
    double caches = a->delegated ? attend_cache(a, true) : a->cache / a->hw->ctog_bdw[0];
    t->layer[QUEUED] = off_gpu(0, behind * caches, 0);
    t->layer[READ_LATE].cd = unread * read_seconds(a);
    t->layer[QUEUED].one = t->layer[READ_LATE].one = gpu_seconds(a, true);
}

/* When two lanes are equally busy, each sometimes waits for the other. 6% is an allowance, which is
 * not derived; without it the model would prefer placements whose two slowest lanes are equal to
 * the last percent. */
static const double HELD_UP = 1.06;

/* Fills in the bounds that are made of others: cores = gpu + cpu + copies, and for two lanes
 * HELD_UP (one + other) / 2. Without overlap everything adds up. */
static void joint_rows(Sum *of, const Sweep *a) {
    Sum all = {0};
    for (int c = CTOG; c <= CPU; c++)
        sum_add(&all, 1, of[c]);
    for (int c = CPU; c >= CTOG && a->hw->shared_cores; c--)
        sum_add(&of[CORES], c <= CTOD ? link_cores(a->hw, c, a->phase) : 1, of[c]);
    if (!a->plan->policy.overlap)
        of[UNDER_WAY] = all;
    int comp = a->hw->shared_cores ? CORES : GPU,
        pair[][2] = {{CTOG, comp}, {DTOC, comp}, {CTOG, CPU}, {DTOC, CPU}, {CTOG, DTOC}};
    for (int r = COMP_WITH_CTOG; r <= CTOG_WITH_DTOC; r++)
        for (int one = 0; one < 2; one++)
            sum_add(&of[r], HELD_UP / 2, of[pair[r - COMP_WITH_CTOG][one]]);
}

/* Fills in the bounds for any placement. */
static void fill_bounds(Seconds *t, const Sweep *a) {
    link_rows(t, a);
    processor_rows(t, a);
    head_seconds(t, a);
    under_way_rows(t, a);
    queue_row(t, a);
    joint_rows(t->layer, a);
    joint_rows(t->head, a);
}

/* Adds what the operations on the caches and hidden states of a plan take beyond their shares: a
 * batch with one sequence off the GPU makes all of them. */
static void charge_whole(Seconds *t, const Sweep *a, const Plan *placed) {
    Seconds less = {0};
    Sweep quick = *a;
    quick.op_s = 0;
    fill_bounds(&less, &quick);
    for (int f = CG; f < NFRACTIONS; f++) {
        double share = placed->achieved[f / NTIERS][f % NTIERS],
               more = fmin(1, share * placed->max_seqs) - share;
        for (int r = 0; r < NBOUNDS; r++)
            t->layer[r].one += (t->layer[r].at[f] - less.layer[r].at[f]) * more;
    }
}

// -------------------------------------------------------------------------------------------------
// The LP
// -------------------------------------------------------------------------------------------------

/* Returns true if the sum is more than 0 for some placement. */
static bool is_positive(const Sum *sum) {
    for (int f = 0; f <= NFRACTIONS; f++)
        if (sum->at[f] > 0)
            return true;
    return false;
}

/* The cost of a second of a lane that other lanes hide, beside a second that passes. So the LP
 * chooses, of placements that are equally fast, the one that moves least. */
static const double PRICE_OF_IDLE = .02;

/* Adds the rows of one kind of sweep to the LP, and the price of its lanes' seconds. */
static void sweep_rows(Lp *lp, const Sweep *a, const Plan *placed) {
    Seconds t = {0};
    int layer = LAYER_S + a->phase, last = LAST_S + a->phase;
    fill_bounds(&t, a);
    if (placed)
        charge_whole(&t, a, placed);
    for (int r = 0; r < NBOUNDS; r++) {
        const char *name = bound_name[a->phase][r];
        if (a->hw->shared_cores && (r == GPU || r == CPU))
            continue; /* CORES has both */
        if (is_positive(&t.layer[r]))
            latency_row(lp, name, layer, t.layer[r], 1);
        Sum both = t.layer[r];
        sum_add(&both, 1, t.head[r]);
        if (r <= UNDER_WAY && is_positive(&t.head[r]))
            latency_row(lp, name, last, both, 1);
    }
    for (int c = CTOG; c <= CPU; c++)
        for (int f = 0; c != GPU && f < NFRACTIONS; f++)
            lp->c[f] += PRICE_OF_IDLE * lp->c[layer] * t.layer[c].at[f];
    LpRow *row = lp_row(lp, "last layer", false, 0); /* no shorter than the others */
    row->a[layer] = 1;
    row->a[last] = -1;
}

// clang-format off
/* Adds a row for each tier: the bytes that the plan holds there must not exceed its capacity. They
 * are linear between the corners of placement, but for the padding of regions; so the rows start
 * from the plan that has everything on the CPU tier, and say what a share takes elsewhere:
 *     GPU    wg weights + cg cache + hg states
 *          + (wc + wd) 2 layers + (cc + cd) 2 batches' pages + (hc + hd) x
 *          + (cc + cd) new k and v, packed
 *     CPU    wc weights + cc cache + hc states
 *          + (cc + cd) new k and v
 *          + wd 2 layers + cd 2 batches' pages + hd 4 batches' states
 *     disk   wd weights + cd cache + hd states
 * Weights and pages are loaded into two slots in turn, and states on their way to the disk have two
 * more; x and the new k and v are workspaces. With delegation no pages go to the GPU, and queries
 * and results have workspaces on the CPU. */
// clang-format on
static void memory_rows(Lp *lp, const Sweep *a, const double capacity[NTIERS]) {
    const Plan *p = a->plan;
    double weights = a->weights * a->config->l, two_layers = 2 * a->weights,
           cache = p->region[KV_CACHE][TIER_CPU].bytes,
           states = p->region[ACTIVATIONS][TIER_CPU].bytes,
           two_pages = p->region[KV_STAGING][TIER_GPU].bytes, x = p->region[HIDDEN][TIER_GPU].bytes,
           new_kv = p->region[NEW_KV][TIER_CPU].bytes,
           in_gpu = two_pages + p->region[NEW_KV_PACKED][TIER_GPU].bytes;
    double state = a->h1 * a->act, four_states = 4 * state * p->max_rows,
           q_and_o = p->off_seqs * p->piece_slots * (sizeof(f16) * a->h1 + state);
    // clang-format off
    Sum tier[NTIERS] = {
        {.wg = weights, .wc = two_layers, .wd = two_layers,
         .cg = cache,   .cc = in_gpu,     .cd = in_gpu,
         .hg = states,  .hc = x,          .hd = x},
        {.wc = weights,        .wd = two_layers,
         .cc = cache + new_kv, .cd = two_pages + new_kv,
         .hc = states,         .hd = four_states},
        {.wd = weights, .cd = cache, .hd = states}};
    // clang-format on
    for (int t = 0; t < NTIERS; t++)
        tier[t].one = p->total[t] - tier[t].wc - tier[t].cc - tier[t].hc;
    if (a->delegated) {
        sum_add(&tier[TIER_GPU], -1, off_gpu(0, two_pages, 0));
        sum_add(&tier[TIER_CPU], 1, off_gpu(0, q_and_o, 0));
    }
    for (int t = 0; t < NTIERS; t++)
        peak_row(lp, memory_row[t], tier[t], capacity[t]);
}

void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan,
                bool delegated, const double capacity[NTIERS], const Plan *placed) {
    *lp = (Lp){.n = RUNTIME_VARS};
    for (int phase = 0; phase < 2; phase++) {
        Sweep a = mean_sweep(hardware, checkpoint, plan, delegated, phase);
        double sweeps = plan->work[phase].sweeps;
        lp->c[LAYER_S + phase] = sweeps * (a.config->l - 1);
        lp->c[LAST_S + phase] = sweeps;
        if (sweeps > 0)
            sweep_rows(lp, &a, placed);
        if (phase)
            memory_rows(lp, &a, capacity);
    }
    fraction_rows(lp);
}

double runtime_tokens(const Plan *plan) {
    const Workload *w = plan->work;
    return w[0].prompts + w[0].decoded + w[1].prompts + w[1].decoded;
}

void runtime_sweeps(double sweep_s[2], const double *x, int l) {
    for (int phase = 0; phase < 2; phase++)
        sweep_s[phase] = (l - 1) * x[LAYER_S + phase] + x[LAST_S + phase];
}

// -------------------------------------------------------------------------------------------------
// The cost of one plan, by the rows of its LP
// -------------------------------------------------------------------------------------------------

/* Returns the name of the row that bounds the variable most from below, at x, by *most seconds; "":
 * no row asks for any. */
static const char *slowest_row(double *most, const Lp *lp, const double *x, int variable) {
    const char *name = "";
    for (const LpRow *row = lp->row; row < lp->row + lp->m; row++) {
        /* The variable is 0 in x, so this is the sum of the other terms. */
        double seconds = lp_excess(row, x, lp->n);
        if (row->a[variable] < 0 && seconds > *most) {
            *most = seconds;
            name = row->name;
        }
    }
    return name;
}

// clang-format off
/* Returns the seconds of a sweep by a row whose lane loads weights. Without weights a layer takes all[0] seconds,
 * of which other work of the lane takes own[0]; all[1] and own[1] are those of the last layer with the head. In
 * the seconds that are left, which `now` counts, layers load one after the other, each as soon as one of the two
 * slots is free, and a layer waits for its weights. Here only 1, 4 and 6 stream, and 6 has the slot of 1:
 *
 *     computes     | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
 *     may load       1
 *                      4   4   4   4
 *                              6   6   6   6
 *
 * So a layer that streams hides behind several that do not. A layer of which only a part streams needs its slot
 * while this part computes, from its first batch to its last. */
// clang-format on
static double lane_seconds(const LpRow *row, const double all[2], const double own[2],
                           const Plan *plan) {
    Bytes *cpu = plan->layer_bytes[TIER_CPU], *disk = plan->layer_bytes[TIER_DISK];
    int l = plan->config.l, K = imin(plan->batches, plan->policy.num_gpu_batches);
    double layer = layer_bytes(plan), now = 0, loaded = 0, sum = 0;
    double free = 0, free_next = 0; /* when the slots of the next layer and of the one behind are */
    for (int j = 0; j < l; j++) {
        int next = (j + 1) % l;
        double part = (cpu[j] + disk[j]) / layer, left = all[!next] - own[!next];
        if (part > 0) {
            free = free_next;
            free_next = now + left * (1 - (1 - part) / K);
        }
        loaded = fmax(loaded, plan->policy.synchronize ? now : free) +
                 (row->a[WC] * cpu[next] + row->a[WD] * disk[next]) / layer;
        now = fmax(now + left, loaded);
        sum += own[!next];
    }
    return now + sum;
}

/* Returns the seconds of a sweep with the weights where the plan has put them: those of its slowest
 * lane. resting: x with all weights on the GPU. */
static double sweep_seconds(const Lp *lp, const double *resting, const Plan *plan, int phase) {
    double all[2] = {0}, most = 0;
    slowest_row(&all[0], lp, resting, LAYER_S + phase);
    all[1] = all[0];
    slowest_row(&all[1], lp, resting, LAST_S + phase);
    for (const LpRow *row = lp->row; row < lp->row + lp->m; row++) {
        if (row->a[LAYER_S + phase] >= 0)
            continue;
        /* The row of the last layer, if there is one, follows that of a layer. */
        const LpRow *last = row + (row[1].name == row->name);
        double own[] = {lp_excess(row, resting, lp->n), lp_excess(last, resting, lp->n)};
        most = fmax(most, lane_seconds(row, all, own, plan));
    }
    return most;
}

void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan) {
    double x[LP_MAX_VARS] = {0}, resting[LP_MAX_VARS] = {0}, seconds[2];
    *cost = (Cost){0};
    for (int f = 0; f < NFRACTIONS; f++)
        cost->fraction[f] = x[f] = resting[f] = plan->achieved[f / NTIERS][f % NTIERS];
    resting[WC] = resting[WD] = 0;
    for (int phase = 0; phase < 2; phase++) {
        double mean = 0;
        strcpy(cost->slowest[phase], slowest_row(&mean, lp, x, LAYER_S + phase));
        seconds[phase] = sweep_seconds(lp, resting, plan, phase);
        cost->T += seconds[phase] * plan->work[phase].sweeps;
    }
    cost->T_gen = seconds[0] / plan->config.l;
    cost->T_pre = seconds[1] / plan->config.l;
    cost->throughput = runtime_tokens(plan) / cost->T;
    for (int t = 0; t < NTIERS; t++)
        cost->peak[t] = plan->total[t];
}
