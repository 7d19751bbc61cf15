/* schedule.c: the block schedule with overlapping (sections 4.1 and 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token for every batch in flight:
 * for each layer j, for each batch k, in the order of Figure 4, call for call. Layer l, behind the decoder layers, is the
 * head: final norm, logits, the next token. Who is in flight changes only between sweeps (batch.c).
 *
 * Everything here is written as if each call happened at once, in the order in which it is made. Calls only post ops on
 * lanes; what an op must come after follows from the views that it reads and writes (device/depend.c), and overlap is what
 * is left when nothing forbids it. compute(j, k) is project, attend, finish; three workspaces rotate, so that while the CPU
 * attends for batch k, the GPU finishes batch k-1 and projects batch k+1. Read next: batch.c, who is in a batch. */
#include "batch.h"

/* A layer's weights on their way to the GPU or there. */
typedef struct {
    int slot;      /* where what does not rest on the GPU passes through */
    bool unpacked; /* its packed matrices are F16 now */
} LayerWeights;

typedef struct {
    const Plan *plan;
    const Task *task;
    Poster to;
    Flight flight;
    int l, K;               /* decoder layers; batches in flight in this sweep */
    long base;              /* squares of the sweeps before this one */
    long streamed;          /* layers that have streamed so far: they take the two slots in turn */
    LayerWeights now, next; /* the layer that computes, the one that loads beside it */
    bool next_is_layer0;    /* next is layer 0 of the coming sweep */
    Op op;                  /* the one that is being made */
    Move *moves;            /* scratch: of the op that is being made, and behind them of its second hop */
} Run;

// ---------------------------------------------------------------------------------------------------------------
// Squares and their views
// ---------------------------------------------------------------------------------------------------------------

static const Tensor none = {.rows = 0};

/* The batch that computes square (j, k), where k may be one before or behind this layer's row: then it is the last square
 * of layer j - 1, or the first of layer j + 1. NULL outside the sweep, and where the batch has no members any more. */
static Batch *at_square(const Run *s, int *j, int *k) {
    if (*k < 0) *k += s->K, *j -= 1;
    if (*k >= s->K) *k -= s->K, *j += 1;
    if (*j < 0 || *j > s->l) return NULL;
    Batch *b = s->flight.flight[*k];
    return b->nseq ? b : NULL;
}

/* Squares are counted over the run; workspaces and staging take turns by it. */
static long square_number(const Run *s, int j, int k) { return s->base + (long)j * s->K + k; }

/* What the next op is for; the constructors add what it does. */
static Op *new_op(Run *s, Lane lane, Kind kind, int j, int k) {
    const Batch *b = s->flight.flight[k];
    s->op.lane = lane, s->op.kind = kind;
    s->op.prefill = kind == WEIGHT ? s->flight.prefill : b->prefill;
    s->op.i = s->flight.i, s->op.j = j, s->op.k = k, s->op.batch = b->number;
    return &s->op;
}

/* A rotating workspace on the GPU. */
static Tensor workspace(const Run *s, RegionId id, long sq, int rows) {
    return plan_view(s->plan, id, TIER_GPU, sq, 0, rows);
}

static bool all_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* The hidden state while it is computed: in place where all of it rests on the GPU, else in the workspace. */
static Tensor hidden(const Run *s, const Batch *b, long sq) {
    return all_on_gpu(b) ? batch_activations(&s->flight, b, TIER_GPU) : workspace(s, HIDDEN, sq, b->rows);
}

/* New k, v as pages take them: where the cache is packed, they are packed before they go anywhere. */
static Tensor new_kv(const Run *s, long sq, int rows) {
    return workspace(s, s->plan->policy.cache_quant.bits ? NEW_KV_PACKED : NEW_KV, sq, rows);
}

/* The result of attention: rows of the sequences whose KV is on the GPU, and rows of the others, which other lanes write.
 */
static Tensor attended_on_gpu(const Run *s, const Batch *b, long sq) {
    return tensor_cells(workspace(s, ATTENDED, sq, b->kv_seqs[TIER_GPU]), 0, 1);
}
static Tensor attended_elsewhere(const Run *s, const Batch *b, long sq) {
    Tensor o = tensor_rows(workspace(s, ATTENDED, sq, b->nseq), b->kv_seqs[TIER_GPU], b->nseq - b->kv_seqs[TIER_GPU]);
    return tensor_cells(o, 1, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Copies: one hop, or two
// ---------------------------------------------------------------------------------------------------------------

/* Whether a dense view begins where another ends, and its users are the same. */
static bool goes_on(Tensor before, Tensor t) {
    return before.tier == t.tier && before.file == t.file && before.region == t.region && before.cell == t.cell &&
           before.type == t.type && before.offset + tensor_bytes(before) == t.offset;
}

static Tensor as_row(Tensor t) {
    t.cols *= t.rows, t.rows = 1, t.ld = (size_t)t.cols;
    return t;
}

/* Appends a move between dense views, as one row; one that goes on where the last one ends, on both sides, becomes part of
 * it. */
static int add_move(Move *moves, int n, Tensor dst, Tensor src) {
    Move *last = n ? &moves[n - 1] : NULL;
    if (!last || !goes_on(last->dst, dst) || !goes_on(last->src, src)) {
        moves[n] = (Move){as_row(dst), as_row(src)};
        return n + 1;
    }
    last->dst.cols += dst.rows * dst.cols, last->dst.ld = (size_t)last->dst.cols;
    last->src.cols += src.rows * src.cols, last->src.ld = (size_t)last->src.cols;
    return n;
}

/* Where what is on its way between GPU and disk stops on the CPU. */
typedef struct {
    Tensor here, via;
} Stop;

/* Posts s->moves[0..n), which are between the GPU and the tiers below it, on op.lane. What rests on the CPU crosses at
 * once; what rests on disk makes a second hop, on disk_lane, and between them stops on the CPU, where `via` mirrors `here`
 * on the GPU byte for byte (of several pairs, by ascending address, the last that begins before it). */
static void carry(Run *s, Op *op, Lane disk_lane, int n, const Stop *stops, int nstops) {
    const Lane gpu_lane = op->lane;
    const bool up = lane_channel[gpu_lane] == CTOG;
    Move *far = s->moves + n;
    int hops = 0, crossing = 0;
    for (int i = 0; i < n; i++) {
        Tensor gpu = up ? s->moves[i].dst : s->moves[i].src, low = up ? s->moves[i].src : s->moves[i].dst;
        if (low.tier == TIER_DISK) {
            const Stop *stop = stops + nstops - 1;
            while (stop > stops && stop->here.offset > gpu.offset) stop--;
            Tensor there = gpu;
            there.tier = TIER_CPU, there.region = stop->via.region;
            there.cell = stop->via.cell, there.ncells = stop->via.ncells;
            there.offset = stop->via.offset + (gpu.offset - stop->here.offset);
            far[hops++] = up ? (Move){there, low} : (Move){low, there};
            low = there;
        }
        crossing = up ? add_move(s->moves, crossing, gpu, low) : add_move(s->moves, crossing, low, gpu);
    }
    for (int hop = 0; hop < 2; hop++) {
        const bool disk = hop == !up;
        op->lane = disk ? disk_lane : gpu_lane;
        if (disk ? hops : crossing) post(&s->to, op_copy(op, disk ? far : s->moves, disk ? hops : crossing));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Weights
// ---------------------------------------------------------------------------------------------------------------

/* Bytes first .. first+bytes-1 of layer j's disk slab, which begins at `slab` on the GPU. */
static int disk_part(Run *s, int j, Tensor slab, size_t first, size_t bytes, int n) {
    const Plan *p = s->plan;
    for (int i = 0; i < (j < s->l ? NROLES : 1); i++) {
        const WeightPlace *place = j < s->l ? &p->weight[j][p->slab_order[j][i]] : &p->global[p->head];
        Tensor src = place->home, dst = slab;
        if (src.tier != TIER_DISK) continue;
        size_t begin = j < s->l ? place->slab_offset - p->cpu_slab[j] : 0;
        size_t size = (size_t)src.rows * src.cols * (src.type == U8 ? 1 : 2);
        if (src.type == U8) src.type = F16; /* bytes, two at a time */
        size_t from = first > begin ? first - begin : 0, to = first + bytes < begin + size ? first + bytes - begin : size;
        if (first + bytes <= begin || from >= to) continue;
        src.rows = 1, src.cols = dst.cols = (int)((to - from) / 2);
        src.offset += from / 2 * type_bytes(src.type), dst.offset += begin + from;
        n = add_move(s->moves, n, dst, src);
    }
    return n;
}

/* The k-th of K parts of layer j, into next's slot: equal parts, cut at whole cache lines. */
static void load_part(Run *s, int j, int k, int K) {
    const Plan *p = s->plan;
    const size_t cpu = p->cpu_slab[j], disk = p->disk_slab[j];
    if (!cpu && !disk) return;
    if (!k) s->next = (LayerWeights){.slot = (int)(s->streamed++ % 2)};
    const RegionId slot = (RegionId)(WEIGHT_SLOT + s->next.slot);
    const size_t c0 = cpu / 64 * k / K * 64, c1 = cpu / 64 * (k + 1) / K * 64;
    const size_t d0 = disk / 64 * k / K * 64, d1 = disk / 64 * (k + 1) / K * 64;
    Tensor slab = plan_bytes(p, slot, TIER_GPU, 0, cpu, F16, 0), via = plan_view(p, slot, TIER_CPU, 0, 0, 1);
    int n = 0;
    if (!k && disk) depend_fold(s->to.depend, &via); /* the parts of the layer that had the slot had other bounds */
    if (c1 > c0)
        n = add_move(s->moves, n, plan_bytes(p, slot, TIER_GPU, 0, c0, F16, (int)((c1 - c0) / 2)),
                     plan_bytes(p, j < s->l ? RESTING_WEIGHTS : EMBEDDINGS, TIER_CPU, 0, p->cpu_slab_offset[j] + c0, F16,
                                (int)((c1 - c0) / 2)));
    if (d1 > d0) n = disk_part(s, j, slab, d0, d1 - d0, n);
    carry(s, new_op(s, W_LOAD, WEIGHT, j, k), W_READ, n, &(Stop){slab, tensor_cells(via, k, 1)}, 1);
}

/* Figure 4: part k of the next layer's weights. Behind the head comes layer 0 of the next sweep, if there is one. */
static void load_weight(Run *s, int j, int k) {
    bool wraps = j > s->l;
    if (wraps && !flight_goes_on(&s->flight)) return;
    if (wraps) s->next_is_layer0 = true;
    load_part(s, wraps ? 0 : j, k, s->K);
}

/* Layer j's tensors where they are while it computes. */
static void layer_weights(const Run *s, int j, Tensor w[NROLES]) {
    for (int r = 0; r < NROLES; r++) {
        const WeightPlace *place = &s->plan->weight[j][r];
        w[r] = place->home;
        if (w[r].tier == TIER_GPU) continue;
        w[r] = plan_bytes(s->plan, (RegionId)(WEIGHT_SLOT + s->now.slot), TIER_GPU, 0, place->slab_offset,
                          place->home.type == U8 ? U8 : F16, place->home.cols);
        w[r].rows = place->home.rows, w[r].quant = place->home.quant;
    }
}

/* Packed matrices become F16 where the device wants them so: once a layer and sweep, before its first batch. Those of each
 * half on the lane of that half, so that it has done with the layer before. */
static void unpack_weights(Run *s, int j, int k, Tensor w[NROLES]) {
    const Plan *p = s->plan;
    for (int r = 0; r < NROLES && p->unpacked_bytes; r++) {
        Tensor packed = w[r];
        if (packed.type != U8) continue;
        opt_role_shape(&p->config, (Role)r, &w[r].rows, &w[r].cols);
        Tensor plain = plan_bytes(p, UNPACKED_WEIGHTS, TIER_GPU, 0, p->unpacked_at[r], F16, w[r].cols);
        plain.rows = w[r].rows;
        w[r] = tensor_cells(plain, r >= O_W, 1);
        if (!s->now.unpacked) post(&s->to, op_unpack(new_op(s, r < O_W ? PROJECT : FINISH, WEIGHT, j, k), w[r], packed));
    }
    s->now.unpacked = true;
}

static Tensor head_weights(const Run *s) {
    Tensor head = s->plan->global[s->plan->head].home;
    if (head.tier == TIER_GPU) return head;
    Tensor t = plan_bytes(s->plan, (RegionId)(WEIGHT_SLOT + s->now.slot), TIER_GPU, 0, 0, F16, head.cols);
    t.rows = head.rows;
    return t;
}

// ---------------------------------------------------------------------------------------------------------------
// Activations
// ---------------------------------------------------------------------------------------------------------------

/* The rows of the hidden state that rest on one tier, as moves between `state` on the GPU and their home. Behind the last
 * layer of a prefill only the rows that the head wants go down; only those come up again, to where they are alone. */
static int act_moves(Run *s, const Batch *b, int j, Tier tier, Tensor state, bool store) {
    const bool head_only = b->prefill && tier != TIER_GPU && j + store == s->l, alone = j == s->l;
    Tensor home = batch_activations(&s->flight, b, tier);
    int row = 0, seq = 0, head = 0, n = 0;
    for (int t = 0; t < (int)tier; t++) row += b->act_rows[t], seq += b->act_seqs[t], head += b->act_heads[t];
    if (!head_only) {
        Tensor rows = tensor_rows(state, alone ? head : row, home.rows);
        s->moves[n++] = store ? (Move){home, rows} : (Move){rows, home};
        return n;
    }
    for (int r = seq, end = 0; r < seq + b->act_seqs[tier]; r++) {
        const int heads = b->seq[r]->heads;
        end += b->seq[r]->s;
        Tensor low = tensor_rows(home, end - heads, heads);
        Tensor rows = tensor_rows(state, alone ? head : row + end - heads, heads);
        s->moves[n++] = store ? (Move){low, rows} : (Move){rows, low};
        head += heads;
    }
    return n;
}

static Tensor act_staging(const Run *s, const Batch *b, RegionId id, long sq) {
    return plan_view(s->plan, id, TIER_CPU, sq, 0, b->act_rows[TIER_DISK]);
}

/* Figure 4: the hidden state goes to rest, but where it was computed in place. */
static void store_activation(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || j == s->l || all_on_gpu(b)) return;
    long sq = square_number(s, j, k);
    Tensor x = hidden(s, b, sq);
    const Lane lane[NTIERS] = {FINISH, STORE, STORE};
    for (int t = 0; t < NTIERS; t++) {
        if (!b->act_rows[t]) continue;
        int n = act_moves(s, b, j, (Tier)t, x, true), above = t == TIER_DISK ? b->act_rows[0] + b->act_rows[1] : 0;
        Stop stop = {tensor_rows(x, above, 0), act_staging(s, b, ACT_WRITING, sq)};
        carry(s, new_op(s, lane[t], ACTIVATION, j, k), D_WRITE, n, &stop, 1);
    }
}

/* Figure 4: what does not rest on the GPU comes up. Layer 0 has nothing to load, its rows come from the embedding. */
static void load_activation(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || !j || all_on_gpu(b)) return;
    long sq = square_number(s, j, k);
    const bool head = j == s->l;
    Tensor x = head ? workspace(s, LAST_ROWS, sq, b->heads) : hidden(s, b, sq);
    const int *above = head ? b->act_heads : b->act_rows;
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        if (!b->act_rows[t]) continue;
        int n = act_moves(s, b, j, (Tier)t, x, false);
        Stop stop = {tensor_rows(x, t == TIER_DISK ? above[0] + above[1] : 0, 0), act_staging(s, b, ACT_READING, sq)};
        carry(s, new_op(s, C_LOAD, ACTIVATION, j, k), C_READ, n, &stop, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The KV cache
// ---------------------------------------------------------------------------------------------------------------

/* Off the GPU: the sequences whose KV is on the CPU or on disk; they come last. */
static int off_rows(const Batch *b) { return b->rows - b->kv_rows[TIER_GPU]; }
static int off_seqs(const Batch *b) { return b->nseq - b->kv_seqs[TIER_GPU]; }

/* Whether the CPU attends in this batch's square (computation delegation, section 4.2). */
static bool delegated(const Run *s, const Batch *b) { return s->plan->policy.cpu_attention && !b->prefill; }

/* New k and v that have come down, of the sequences off the GPU. */
static Tensor new_kv_below(const Run *s, const Batch *b, long sq) {
    return plan_view(s->plan, NEW_KV, TIER_CPU, sq, 0, off_rows(b));
}

/* Puts new tokens' k and v, rows first .. first+n-1 of the batch, into the pages of a table. */
static void append(Run *s, Op *op, const Tables *t, const PageTable *table, Tensor kv, int first, int n) {
    post(&s->to, op_append(op, table, kv, tensor_cols(t->row_seq, first, n), tensor_cols(t->row_token, first, n)));
}

/* Figure 4: the new k and v of sequences whose pages are on the CPU or on disk go home. */
static void store_cache(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (!b || j == s->l || !off_rows(b)) return;
    long sq = square_number(s, j, k);
    int gpu = b->kv_rows[TIER_GPU], cpu = b->kv_rows[TIER_CPU], disk = b->kv_rows[TIER_DISK];
    Tensor below = new_kv_below(s, b, sq);
    if (!delegated(s, b)) { /* if not, they came down with the queries */
        Move down = {below, tensor_rows(new_kv(s, sq, b->rows), gpu, off_rows(b))};
        post(&s->to, op_copy(new_op(s, STORE, CACHE, j, k), &down, 1));
    }
    if (cpu && !delegated(s, b)) {
        PageTable home = batch_pages(&s->flight, b, TIER_CPU, j, &b->cpu);
        append(s, new_op(s, ATTEND, CACHE, j, k), &b->cpu, &home, tensor_rows(below, 0, cpu), gpu, cpu);
    }
    if (disk) {
        PageTable home = batch_pages(&s->flight, b, TIER_DISK, j, &b->cpu);
        append(s, new_op(s, D_WRITE, CACHE, j, k), &b->cpu, &home, tensor_rows(below, cpu, disk), gpu + cpu, disk);
    }
}

/* Moves the listed pages that hold past tokens from their home into staging, by place from base on: of K, or of V. Runs of
 * neighbours are one move. */
static int page_moves(Run *s, int n, Tensor to, Tensor from, int base, const Staged *list, int pages) {
    const int page = s->plan->policy.page_tokens;
    for (int i = 0, run; i < pages; i += run) {
        for (run = 0; i + run < pages && list[i + run].past && list[i + run].page == list[i].page + run; run++) continue;
        if (run)
            n = add_move(s->moves, n, tensor_rows(to, (base + i) * page, run * page),
                         tensor_rows(from, list[i].page * page, run * page));
        else
            run = 1;
    }
    return n;
}

/* The past of sequences whose pages must come nearer: where the CPU attends, the disk's to the CPU; else all to the GPU. */
static void bring_cache(Run *s, const Batch *b, int j, int k) {
    const long sq = square_number(s, j, k);
    const int cpu = b->nstaged[TIER_CPU], disk = b->nstaged[TIER_DISK], page = s->plan->policy.page_tokens;
    const Tier side = delegated(s, b) ? TIER_CPU : TIER_GPU;
    const PageTable to = staged_pages(s->plan, side, sq, cpu + disk, none, none);
    const PageTable via = staged_pages(s->plan, TIER_CPU, sq, disk, none, none);
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        if (!b->nstaged[t]) continue;
        const PageTable home = batch_pages(&s->flight, b, (Tier)t, j, &b->cpu);
        const int base = t == TIER_DISK ? cpu : 0;
        int n = page_moves(s, 0, to.k, home.k, base, b->staged[t], b->nstaged[t]);
        if (!is_sparse(&s->plan->policy)) n = page_moves(s, n, to.v, home.v, base, b->staged[t], b->nstaged[t]);
        if (side == TIER_CPU) {
            post(&s->to, op_copy(new_op(s, C_READ, CACHE, j, k), s->moves, n));
            continue;
        }
        const Stop stops[] = {{tensor_rows(to.k, base * page, 0), via.k}, {tensor_rows(to.v, base * page, 0), via.v}};
        carry(s, new_op(s, C_LOAD, CACHE, j, k), C_READ, n, stops, 2);
    }
}

/* Figure 4: of layer 0 it is asked for when the batch begins. */
static void load_cache(Run *s, int j, int k) {
    Batch *b = at_square(s, &j, &k);
    if (b && j && j < s->l) bring_cache(s, b, j, k);
}

// ---------------------------------------------------------------------------------------------------------------
// compute(j, k): project, attend, finish
// ---------------------------------------------------------------------------------------------------------------

/* Token rows are gathered where the table rests; only they move. */
static Tensor gather_tokens(Run *s, Batch *b, long sq, int k, Tensor x) {
    Tensor table = s->plan->global[TOK_EMBED].home;
    if (table.tier == TIER_GPU) return none;
    Tensor rows = plan_view(s->plan, EMBEDDED, TIER_CPU, sq, 0, b->rows);
    Tensor arrive = s->plan->config.embed == s->plan->config.h1 ? x : workspace(s, EMBEDDED, sq, b->rows);
    Move up = {arrive, rows};
    const Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
    post(&s->to, op_embed(new_op(s, lane, OTHER, 0, k), rows, table, b->cpu.ids, false));
    post(&s->to, op_copy(new_op(s, C_LOAD, OTHER, 0, k), &up, 1));
    return arrive;
}

static void embed(Run *s, Batch *b, long sq, int k, Tensor x) {
    Tensor global[NGLOBALS], tokens = gather_tokens(s, b, sq, k, x);
    for (int g = 0; g < NGLOBALS; g++) global[g] = s->plan->global[g].home;
    opt_embed(&s->to, *new_op(s, PROJECT, OTHER, 0, k), &s->plan->config, global, x, tokens, b->gpu.ids, b->gpu.positions,
              workspace(s, EMBEDDED, sq, b->rows));
}

static void project(Run *s, Batch *b, int j, int k, const Tensor w[NROLES]) {
    const OptConfig *c = &s->plan->config;
    long sq = square_number(s, j, k);
    Tensor x = hidden(s, b, sq), q = workspace(s, QUERY, sq, b->rows), kv = workspace(s, NEW_KV, sq, b->rows);
    const int on_gpu = b->kv_rows[TIER_GPU];
    if (!j) embed(s, b, sq, k, x);
    if (j && !all_on_gpu(b) && b->act_rows[TIER_GPU]) {
        int n = act_moves(s, b, j, TIER_GPU, x, false);
        post(&s->to, op_copy(new_op(s, PROJECT, ACTIVATION, j, k), s->moves, n));
    }
    opt_project(&s->to, *new_op(s, PROJECT, OTHER, j, k), c, w, q, kv, x,
                plan_view(s->plan, NORM_1, TIER_GPU, 0, 0, s->plan->chunk));
    if (s->plan->policy.cache_quant.bits)
        post(&s->to, op_pack(new_op(s, PROJECT, CACHE, j, k), new_kv(s, sq, b->rows), kv, c->nh));
    if (on_gpu) {
        PageTable home = batch_pages(&s->flight, b, TIER_GPU, j, &b->gpu);
        append(s, new_op(s, PROJECT, CACHE, j, k), &b->gpu, &home, new_kv(s, sq, on_gpu), 0, on_gpu);
    }
}

/* Sparse attention (section 5): K is read whole, then V of the chosen tokens. home: where V is on disk, of which that alone
 * comes to the table's pages; NULL: it is in them. */
static void attend_sparse(Run *s, Op *op, const PageTable *table, const PageTable *home, Tensor o, Tensor q) {
    const Lane lane = op->lane;
    const Tier side = lane == ATTEND ? TIER_CPU : TIER_GPU;
    const double sparsity = s->plan->policy.sparsity;
    Tensor tokens = plan_view(s->plan, CHOSEN, side, 0, 0, q.rows),
           weights = plan_view(s->plan, WEIGHING, side, 0, 0, q.rows);
    post(&s->to, op_select(op, tokens, weights, q, table, sparsity));
    if (home) {
        op->lane = C_READ;
        post(&s->to, op_fetch(op, table, home, tokens, sparsity));
        op->lane = lane;
    }
    post(&s->to, op_weigh(op, o, tokens, weights, table, sparsity));
}

/* Attention of sequences first .. first+n-1 of a decoding batch over one table, which holds all the batch's sequences. */
static void attend_group(Run *s, Op *op, PageTable table, const PageTable *home, Tensor o, Tensor q, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    if (is_sparse(&s->plan->policy))
        attend_sparse(s, op, &table, home, o, q);
    else
        post(&s->to, op_attend(op, o, q, &table));
}

/* Computation delegation (section 4.2): queries and the new k, v go down, the CPU attends where the pages are, the result
 * comes up. */
static void attend_on_cpu(Run *s, Batch *b, int j, int k, Tensor q) {
    long sq = square_number(s, j, k);
    const int gpu = b->kv_seqs[TIER_GPU], cpu = b->kv_seqs[TIER_CPU], disk = b->kv_seqs[TIER_DISK];
    Tensor query = plan_view(s->plan, QUERY, TIER_CPU, sq, 0, cpu + disk), kv = new_kv_below(s, b, sq);
    Tensor result = plan_view(s->plan, ATTENDED, TIER_CPU, sq, 0, cpu + disk);
    Move down[] = {{query, tensor_rows(q, gpu, cpu + disk)}, {kv, tensor_rows(new_kv(s, sq, b->rows), gpu, cpu + disk)}},
         up = {attended_elsewhere(s, b, sq), result};
    post(&s->to, op_copy(new_op(s, A_DOWN, CACHE, j, k), down, 2));
    Op *op = new_op(s, ATTEND, CACHE, j, k);
    if (cpu) {
        PageTable home = batch_pages(&s->flight, b, TIER_CPU, j, &b->cpu);
        append(s, op, &b->cpu, &home, tensor_rows(kv, 0, cpu), gpu, cpu);
        attend_group(s, op, home, NULL, tensor_rows(result, 0, cpu), tensor_rows(query, 0, cpu), gpu, cpu);
    }
    if (disk) {
        PageTable near = staged_pages(s->plan, TIER_CPU, sq, b->nstaged[TIER_DISK], b->cpu.staged, b->cpu.len);
        PageTable home = batch_pages(&s->flight, b, TIER_DISK, j, &b->cpu);
        home.pages = tensor_rows(home.pages, gpu + cpu, disk);
        append(s, op, &b->cpu, &near, tensor_rows(kv, cpu, disk), gpu + cpu, disk);
        attend_group(s, op, near, &home, tensor_rows(result, cpu, disk), tensor_rows(query, cpu, disk), gpu + cpu, disk);
    }
    post(&s->to, op_copy(new_op(s, A_UP, CACHE, j, k), &up, 1));
}

static void attend(Run *s, Batch *b, int j, int k) {
    long sq = square_number(s, j, k);
    Tensor q = workspace(s, QUERY, sq, b->rows);
    const int gpu = b->kv_seqs[TIER_GPU], off = off_seqs(b);
    if (b->prefill) { /* to what has just been computed */
        post(&s->to, op_attend_prefill(new_op(s, FINISH, CACHE, j, k), workspace(s, ATTENDED, sq, b->rows), q,
                                       workspace(s, NEW_KV, sq, b->rows), b->gpu.start, s->plan->config.nh));
        return;
    }
    if (off && delegated(s, b)) attend_on_cpu(s, b, j, k, q);
    Op *op = new_op(s, FINISH, CACHE, j, k);
    if (gpu) {
        PageTable home = batch_pages(&s->flight, b, TIER_GPU, j, &b->gpu);
        attend_group(s, op, home, NULL, attended_on_gpu(s, b, sq), tensor_rows(q, 0, gpu), 0, gpu);
    }
    if (off && !delegated(s, b)) {
        PageTable near =
            staged_pages(s->plan, TIER_GPU, sq, b->nstaged[TIER_CPU] + b->nstaged[TIER_DISK], b->gpu.staged, b->gpu.len);
        append(s, op, &b->gpu, &near, tensor_rows(new_kv(s, sq, b->rows), gpu, off), gpu, off);
        attend_group(s, op, near, NULL, attended_elsewhere(s, b, sq), tensor_rows(q, gpu, off), gpu, off);
    }
}

static void finish(Run *s, Batch *b, int j, int k, const Tensor w[NROLES]) {
    long sq = square_number(s, j, k);
    const int chunk = s->plan->chunk;
    opt_finish(&s->to, *new_op(s, FINISH, OTHER, j, k), &s->plan->config, w, hidden(s, b, sq),
               workspace(s, ATTENDED, sq, b->rows), plan_view(s->plan, NORM_2, TIER_GPU, 0, 0, chunk),
               plan_view(s->plan, MLP, TIER_GPU, 0, 0, chunk));
}

/* Logits become the next token of each sequence; in a scored task, those of head rows from `first` on, the probability of
 * what is given and the greedy choice. */
static void choose(Run *s, Batch *b, int k, Tensor logits, int first) {
    Op *op = new_op(s, PROJECT, OTHER, s->l, k);
    const int n = logits.rows;
    if (!s->task->scored)
        post(&s->to,
             op_pick(op, batch_tokens(&s->flight, b, TIER_GPU), logits, b->gpu.prompt, b->gpu.at, &s->task->sampling));
    else
        post(&s->to, op_score(op, tensor_cols(batch_scores(&s->flight, b, LOG_PROBS, TIER_GPU), first, n),
                              tensor_cols(batch_scores(&s->flight, b, GREEDY, TIER_GPU), first, n), logits,
                              tensor_cols(b->gpu.target, first, n)));
}

/* What has been chosen goes down, and the logits where they are wanted. */
static void bring_down(Run *s, Batch *b, int k, Tensor logits) {
    const Flight *f = &s->flight;
    Move moves[2];
    int n = 0;
    if (s->task->scored) {
        moves[n++] = (Move){batch_scores(f, b, LOG_PROBS, TIER_CPU), batch_scores(f, b, LOG_PROBS, TIER_GPU)};
        moves[n++] = (Move){batch_scores(f, b, GREEDY, TIER_CPU), batch_scores(f, b, GREEDY, TIER_GPU)};
    } else {
        moves[n++] = (Move){batch_tokens(f, b, TIER_CPU), batch_tokens(f, b, TIER_GPU)};
        if (s->task->keep_logits) moves[n++] = (Move){batch_logits(f, b, 0, b->nseq), logits};
    }
    post(&s->to, op_copy(new_op(s, A_DOWN, OTHER, s->l, k), moves, n));
}

/* Layer l: the rows that the head wants, the last of each sequence or in a scored task more, become logits, piece by piece.
 */
static void compute_head(Run *s, Batch *b, int k) {
    const Plan *p = s->plan;
    const int resting = b->act_heads[TIER_GPU];
    Op *op = new_op(s, PROJECT, OTHER, s->l, k);
    Tensor x = workspace(s, LAST_ROWS, square_number(s, s->l, k), b->heads), logits = none, global[NGLOBALS];
    for (int g = 0; g < NGLOBALS; g++) global[g] = p->global[g].home;
    if (resting)
        post(&s->to, op_embed(op, tensor_rows(x, 0, resting), batch_activations(&s->flight, b, TIER_GPU),
                              tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->heads; first += p->head_chunk) {
        const int n = imin(p->head_chunk, b->heads - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(&s->to, *op, &p->config, global, head_weights(s), logits, tensor_rows(x, first, n),
                   plan_view(p, HEAD_OUT, TIER_GPU, 0, 0, n));
        choose(s, b, k, logits, first);
    }
    bring_down(s, b, k, logits);
}

static void compute(Run *s, int j, int k) {
    Batch *b = s->flight.flight[k];
    if (!b->nseq) return;
    if (j == s->l) {
        compute_head(s, b, k);
        return;
    }
    Tensor w[NROLES];
    layer_weights(s, j, w);
    unpack_weights(s, j, k, w);
    project(s, b, j, k, w);
    attend(s, b, j, k);
    finish(s, b, j, k, w);
}

// ---------------------------------------------------------------------------------------------------------------
// The sweep
// ---------------------------------------------------------------------------------------------------------------

/* Figure 4 waits for all devices here. DIFFERS: every op knows what it must come after, so there is nothing left to wait
 * for; only an error ends the sweep. Without overlap each op has been waited for already. */
static bool synchronize(const Run *s) { return !s->to.failed; }

/* Batch k's part in this sweep begins: here its newest tokens are waited for, and its tables go up. */
static bool begin(Run *s, int k) {
    Batch *b = s->flight.flight[k];
    if (!batch_begin(&s->flight, b)) return synchronize(s);
    Move up = {b->gpu.all, b->cpu.all};
    post(&s->to, op_copy(new_op(s, C_LOAD, OTHER, 0, k), &up, 1));
    bring_cache(s, b, 0, k); /* of the other layers it is asked for one square ahead */
    return synchronize(s);
}

/* The layer that has loaded beside the last one is the one to compute now. */
static void advance_weights(Run *s) {
    s->now = s->next;
    s->next = (LayerWeights){0};
}

/* One token for every batch in flight: Figure 4 from its second line on. */
static void sweep(Run *s) {
    s->K = s->flight.K;
    if (!s->next_is_layer0) {
        s->streamed += s->streamed % 2; /* as the plan counts: a sweep begins with the first slot (where it matters) */
        load_part(s, 0, 0, 1);
    }
    s->next_is_layer0 = false;
    for (int j = 0; j <= s->l; j++) {
        advance_weights(s);
        for (int k = 0; k < s->K; k++) {
            const int next = s->K > 1 ? k + 1 : k; /* alone in flight, a batch loads what it has just stored */
            load_weight(s, j + 1, k);
            store_activation(s, j, k - 1);
            store_cache(s, j, k - 1);
            if (!j && !begin(s, k)) return;
            load_cache(s, j, k + 1);
            load_activation(s, j, next);
            compute(s, j, k);
            if (!synchronize(s)) return;
        }
        if (flight_is_empty(&s->flight)) return; /* all have ended by themselves: known only now */
    }
    s->base += (long)(s->l + 1) * s->K;
    flight_swept(&s->flight);
}

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats,
                 Error *err) {
    Run s = {.plan = plan, .task = task, .l = plan->config.l};
    CHECK(!is_sparse(&plan->policy) || plan->policy.cpu_attention);
    *stats = (RunStats){0};
    s.to = (Poster){.device = device, .depend = depend_open(plan->ncells), .overlap = plan->policy.overlap, .err = err};
    s.flight = (Flight){.plan = plan, .task = task, .listener = listener, .stats = stats, .to = &s.to};
    s.moves = xcalloc(4 * ((size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES + 2), sizeof *s.moves);
    flight_open(&s.flight);
    while (task->count && flight_admit(&s.flight)) sweep(&s);
    if (!s.to.failed) post_drain(&s.to); /* the last stores, and weights that were loaded for nobody */
    flight_close(&s.flight);
    depend_close(s.to.depend);
    free(s.moves);
    return s.to.failed ? -1 : 0;
}
