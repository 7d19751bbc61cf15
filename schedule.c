/* schedule.c: the block schedule with overlapping (sections 4.1 and 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token for every batch in flight:
 * for each layer j, for each batch k, in the order of Figure 4, call for call. Layer l, behind the decoder layers, is the
 * head: final norm, logits, the next token. Who is in flight changes only between sweeps (batch.c).
 *
 * Everything here is written as if each call happened at once, in the order in which it is made. Calls only post ops on
 * lanes; what an op must come after follows from the views that it reads and writes (device/depend.c), and overlap is what
 * is left when nothing forbids it. compute(j, k) is project, attend, finish, for a prefill piece by piece; three workspaces
 * rotate, so that while the CPU attends for batch k, the GPU finishes batch k-1 and projects batch k+1. Read next: batch.c,
 * who is in a batch. */
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
    Flight *flight, *flights; /* the one that sweeps; all, [flight_count] */
    Line line;
    int l, i, K;            /* decoder layers; this sweep, of all flights; batches in flight in it */
    long base;              /* squares of the sweeps before this one */
    long streamed;          /* layers that have streamed so far: they take the two slots in turn */
    long turn;              /* pieces so far */
    LayerWeights now, next; /* the layer that computes, the one that loads beside it */
    bool next_is_layer0;    /* next is layer 0 of the coming sweep */
    Op op;                  /* the one that is being made */
    Move *moves;            /* [room] scratch: of the op that is being made, and behind them of its second hop */
    size_t room;
} Run;

// ---------------------------------------------------------------------------------------------------------------
// Squares and their views
// ---------------------------------------------------------------------------------------------------------------

// clang-format off
/* One square (i, j, k): its six views, and which slot of its region each takes.
 *
 *              rests on CPU or disk                       is on the GPU while the square computes
 *
 *   weights    RESTING_WEIGHTS ----- load_weight -------> WEIGHT_SLOT or WEIGHT_SLOT_1: layers that stream, in turn
 *                                                              |    UNPACKED_WEIGHTS, where a batch wants F16
 *   x          ACTIVATIONS --------- load_activation ---> HIDDEN            [square_number mod nws]
 *              of Batch.index                                  |    in its ACTIVATIONS where all of it rests on the GPU
 *                                                         - project -
 *                                                              |
 *   q, k, v                                               QKV               [Batch.turn mod turns]
 *                                                              |
 *   new k, v   KV_CACHE <----------- store_cache -------- QKV, or NEW_KV_PACKED of the same turn; by NEW_KV on the CPU
 *              of Batch.index and layer j                      |
 *   pages      KV_CACHE ------------ load_cache --------> KV_STAGING        [square_number mod 2]
 *                                                              |
 *                                                         - attend -    or on the CPU, where the pages are: QUERY goes
 *                                                              |        down and ATTENDED comes up, [Batch.turn mod turns]
 *   o                                                     ATTENDED          [Batch.turn mod turns]
 *                                                              |
 *                                                         - finish -
 *                                                              |
 *   x          ACTIVATIONS <-------- store_activation --- HIDDEN of the same square; the head's is LAST_ROWS
 *
 * square_number counts squares: what it numbers is in use beside the squares before and behind. Batch.turn counts pieces of
 * prefills, and decoding batches: what it numbers a piece needs alone. Batch.index is the batch's place in the plan: what
 * it numbers stays from sweep to sweep. A cell is a part of a slot that is always used as a whole: by cells depend.c knows
 * who must wait for whom (number_cells in tier.c). */
// clang-format on

static const Tensor none = {.rows = 0};

/* The batch that computes square (j, k). k may be -1 (the last batch of layer j-1) or K (the first of layer j+1). NULL
 * outside the sweep, and where the batch has no members any more. */
static Batch *at_square(const Run *run, int *j, int *k) {
    if (*k < 0) *k += run->K, *j -= 1;
    if (*k >= run->K) *k -= run->K, *j += 1;
    if (*j < 0 || *j > run->l) return NULL;
    Batch *b = run->flight->in_sweep[*k];
    return b->nseq ? b : NULL;
}

/* Squares are counted over the run; workspaces and staging take turns by it. */
static long square_number(const Run *run, int j, int k) { return run->base + (long)j * run->K + k; }

/* Whether the CPU attends in this batch's square (computation delegation, section 4.2). */
static bool delegated(const Run *run, const Batch *b) { return run->plan->policy.cpu_attention && !b->prefill; }

/* What the next op is for; the constructors add what it does. */
static Op *new_op(Run *run, Lane lane, Kind kind, int j, int k) {
    const Batch *b = run->flight->in_sweep[k];
    run->op.lane = lane, run->op.kind = kind;
    run->op.prefill_sweep = run->flight->prefill, run->op.delegated = delegated(run, b);
    run->op.prefill = kind == WEIGHT ? run->flight->prefill : b->prefill;
    run->op.i = run->i, run->op.j = j, run->op.k = k, run->op.batch = b->number;
    return &run->op;
}

/* A rotating workspace on the GPU. */
static Tensor workspace(const Run *run, RegionId id, long sq, int rows) {
    return plan_view(run->plan, id, TIER_GPU, sq, 0, rows);
}

static bool all_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* The hidden state while it is computed: in place where all of it rests on the GPU, else in the workspace. */
static Tensor hidden(const Run *run, const Batch *b, long sq) {
    return all_on_gpu(b) ? batch_activations(run->flight, b, TIER_GPU) : workspace(run, HIDDEN, sq, b->rows);
}

/* Of that, what a piece computes. */
static Tensor hidden_piece(const Run *run, const Batch *b, long sq, const Piece *piece) {
    return tensor_cells(tensor_rows(hidden(run, b, sq), piece->row, piece->rows), piece->number, 1);
}

/* q of a piece's first rows, and their new k, v. */
static Tensor new_q(const Run *run, const Batch *b, int rows) {
    return tensor_cols(workspace(run, QKV, b->turn, rows), 0, run->plan->config.h1);
}
static Tensor new_kv(const Run *run, const Batch *b, int rows) {
    return tensor_cols(workspace(run, QKV, b->turn, rows), run->plan->config.h1, 2 * run->plan->config.h1);
}

/* The new k, v of its rows from `first` on, whose cache is not on the GPU, as pages take them: where these are packed,
 * PROJECT has packed them. */
static Tensor new_kv_off(const Run *run, const Batch *b, int first, int rows) {
    if (run->plan->policy.cache_packed) return workspace(run, NEW_KV_PACKED, b->turn, rows);
    return tensor_rows(new_kv(run, b, first + rows), first, rows);
}

/* The result of attention: of the sequences whose KV is on the GPU, and of the others, which other lanes write. */
static Tensor attended_on_gpu(const Run *run, const Batch *b) {
    return tensor_cells(workspace(run, ATTENDED, b->turn, b->kv_seqs[TIER_GPU]), 0, 1);
}
static Tensor attended_elsewhere(const Run *run, const Batch *b) {
    const int gpu = b->kv_seqs[TIER_GPU];
    return tensor_cells(tensor_rows(workspace(run, ATTENDED, b->turn, b->nseq), gpu, b->nseq - gpu), 1, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Weights
// ---------------------------------------------------------------------------------------------------------------

/* Bytes first .. first+bytes-1 of layer j's disk slab, which begins at `slab` on the GPU. */
static int disk_part(Run *run, int j, Tensor slab, Bytes first, Bytes bytes, int n) {
    const Plan *p = run->plan;
    for (int i = 0; i < (j < run->l ? NROLES : 1); i++) {
        const WeightPlace *place = j < run->l ? &p->weight[j][p->slab_order[j][i]] : &p->global[p->head];
        Tensor src = place->home, dst = slab;
        if (src.tier != TIER_DISK) continue;
        Bytes begin = j < run->l ? place->slab_offset - p->cpu_slab[j] : 0;
        Bytes size = (Bytes)src.rows * src.cols * (src.type == U8 ? 1 : 2);
        if (src.type == U8) src.type = F16; /* bytes, two at a time */
        Bytes from = first > begin ? first - begin : 0, to = first + bytes < begin + size ? first + bytes - begin : size;
        if (first + bytes <= begin || from >= to) continue;
        src.rows = 1, src.cols = dst.cols = (int)((to - from) / 2);
        src.offset += from / 2 * type_bytes(src.type), dst.offset += begin + from;
        n = add_move(run->moves, n, dst, src);
    }
    return n;
}

/* The k-th of K parts of layer j, into next's slot: equal parts, cut at whole cache lines. */
static void load_part(Run *run, int j, int k, int K) {
    const Plan *p = run->plan;
    const Bytes cpu = p->cpu_slab[j], disk = p->disk_slab[j];
    if (!cpu && !disk) return;
    if (!k) run->next = (LayerWeights){.slot = (int)(run->streamed++ % 2)};
    const RegionId slot = (RegionId)(WEIGHT_SLOT + run->next.slot);
    const Bytes c0 = cpu / 64 * k / K * 64, c1 = cpu / 64 * (k + 1) / K * 64;
    const Bytes d0 = disk / 64 * k / K * 64, d1 = disk / 64 * (k + 1) / K * 64;
    Tensor slab = plan_bytes(p, slot, TIER_GPU, 0, cpu, F16, 0), via = plan_view(p, slot, TIER_CPU, 0, 0, 1);
    int n = 0;
    if (!k && disk) depend_fold(run->to.depend, &via); /* the parts of the layer that had the slot had other bounds */
    if (c1 > c0)
        n = add_move(run->moves, n, plan_bytes(p, slot, TIER_GPU, 0, c0, F16, (int)((c1 - c0) / 2)),
                     plan_bytes(p, j < run->l ? RESTING_WEIGHTS : EMBEDDINGS, TIER_CPU, 0, p->cpu_slab_offset[j] + c0, F16,
                                (int)((c1 - c0) / 2)));
    if (d1 > d0) n = disk_part(run, j, slab, d0, d1 - d0, n);
    carry(&run->to, new_op(run, W_LOAD, WEIGHT, j, k), W_READ, run->moves, n, &(Stop){slab, tensor_cells(via, k, 1)}, 1);
}

/* Whether any flight will sweep once more. */
static bool goes_on(const Run *run) {
    for (int g = 0; g < flight_count(&run->plan->policy); g++)
        if (flight_goes_on(&run->flights[g])) return true;
    return false;
}

/* Figure 4: part k of the next layer's weights. Behind the head comes layer 0 of the next sweep, if there is one. */
static void load_weight(Run *run, int j, int k) {
    bool wraps = j > run->l;
    if (wraps && !goes_on(run)) return;
    if (wraps) run->next_is_layer0 = true;
    load_part(run, wraps ? 0 : j, k, run->K);
}

/* Layer j's tensors where they are while it computes. */
static void layer_weights(const Run *run, int j, Tensor w[NROLES]) {
    for (int r = 0; r < NROLES; r++) {
        const WeightPlace *place = &run->plan->weight[j][r];
        w[r] = place->home;
        if (w[r].tier == TIER_GPU) continue;
        w[r] = plan_bytes(run->plan, (RegionId)(WEIGHT_SLOT + run->now.slot), TIER_GPU, 0, place->slab_offset,
                          place->home.type == U8 ? U8 : F16, place->home.cols);
        w[r].rows = place->home.rows;
    }
}

/* Packed matrices become F16 for a batch of more rows than the device multiplies with packed ones: once a layer and sweep,
 * before the first such batch. q, k and v unpack on PROJECT, the rest on FINISH: each lane has then finished with the layer
 * before. */
static void unpack_weights(Run *run, int j, int k, Tensor w[NROLES]) {
    const Plan *p = run->plan;
    if (run->flight->in_sweep[k]->rows <= p->packed_rows) return;
    for (int r = 0; r < NROLES; r++) {
        Tensor packed = w[r];
        if (packed.type != U8) continue;
        opt_role_shape(&p->config, (Role)r, &w[r].rows, &w[r].cols);
        Tensor plain = plan_bytes(p, UNPACKED_WEIGHTS, TIER_GPU, 0, p->unpacked_at[r], F16, w[r].cols);
        plain.rows = w[r].rows;
        w[r] = tensor_cells(plain, r >= O_W, 1);
        if (!run->now.unpacked)
            post(&run->to, op_unpack(new_op(run, r < O_W ? PROJECT : FINISH, WEIGHT, j, k), w[r], packed));
    }
    run->now.unpacked = true;
}

static Tensor head_weights(const Run *run) {
    Tensor head = run->plan->global[run->plan->head].home;
    if (head.tier == TIER_GPU) return head;
    Tensor t = plan_bytes(run->plan, (RegionId)(WEIGHT_SLOT + run->now.slot), TIER_GPU, 0, 0, F16, head.cols);
    t.rows = head.rows;
    return t;
}

// ---------------------------------------------------------------------------------------------------------------
// Activations
// ---------------------------------------------------------------------------------------------------------------

/* The rows of the hidden state that rest on one tier, as moves between `state` on the GPU and their home. Behind the last
 * layer of a prefill only the rows that the head wants go down; only those come up again, to where they are alone. */
static int act_moves(Run *run, const Batch *b, int j, Tier tier, Tensor state, bool store) {
    const bool for_head = is_last(&run->plan->config) && j + store == run->l; /* all rows go to another stage */
    const bool head_only = b->prefill && tier != TIER_GPU && for_head, alone = j == run->l;
    Tensor home = batch_activations(run->flight, b, tier);
    int row = 0, seq = 0, head = 0, n = 0;
    for (int t = 0; t < (int)tier; t++) row += b->act_rows[t], seq += b->act_seqs[t], head += b->act_last[t];
    if (!head_only) {
        Tensor rows = tensor_rows(state, alone ? head : row, home.rows);
        run->moves[n++] = store ? (Move){home, rows} : (Move){rows, home};
        return n;
    }
    for (int r = seq, end = 0; r < seq + b->act_seqs[tier]; r++) {
        const int last_rows = b->seq[r]->last_rows;
        end += b->seq[r]->s;
        Tensor low = tensor_rows(home, end - last_rows, last_rows);
        Tensor rows = tensor_rows(state, alone ? head : row + end - last_rows, last_rows);
        run->moves[n++] = store ? (Move){low, rows} : (Move){rows, low};
        head += last_rows;
    }
    return n;
}

static Tensor act_staging(const Run *run, const Batch *b, RegionId id, long sq) {
    return plan_view(run->plan, id, TIER_CPU, sq, 0, b->act_rows[TIER_DISK]);
}

/* Whether the hidden state does not rest behind layer j: the head has taken it, or another stage will. */
static bool leaves(const Run *run, int j) { return j + !is_last(&run->plan->config) >= run->l; }

/* Figure 4: the hidden state goes to rest, but where it was computed in place. */
static void store_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || leaves(run, j) || all_on_gpu(b)) return;
    long sq = square_number(run, j, k);
    Tensor x = hidden(run, b, sq);
    const Lane lane[NTIERS] = {FINISH, STORE, STORE};
    for (int t = 0; t < NTIERS; t++) {
        if (!b->act_rows[t]) continue;
        int n = act_moves(run, b, j, (Tier)t, x, true), above = t == TIER_DISK ? b->act_rows[0] + b->act_rows[1] : 0;
        Stop stop = {tensor_rows(x, above, 0), act_staging(run, b, ACT_WRITING, sq)};
        carry(&run->to, new_op(run, lane[t], ACTIVATION, j, k), D_WRITE, run->moves, n, &stop, 1);
    }
}

/* Figure 4: what does not rest on the GPU comes up. Layer 0 has nothing to load, its rows come from the embedding. */
static void load_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || !j || all_on_gpu(b) || (j == run->l && leaves(run, j - 1))) return;
    long sq = square_number(run, j, k);
    const bool head = j == run->l;
    Tensor x = head ? workspace(run, LAST_ROWS, sq, b->last_rows) : hidden(run, b, sq);
    const int *above = head ? b->act_last : b->act_rows;
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        if (!b->act_rows[t]) continue;
        int n = act_moves(run, b, j, (Tier)t, x, false);
        Stop stop = {tensor_rows(x, t == TIER_DISK ? above[0] + above[1] : 0, 0), act_staging(run, b, ACT_READING, sq)};
        carry(&run->to, new_op(run, C_LOAD, ACTIVATION, j, k), C_READ, run->moves, n, &stop, 1);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The KV cache
// ---------------------------------------------------------------------------------------------------------------

/* Off the GPU: the sequences whose KV is on the CPU or on disk; they come last. */
static int off_seqs(const Batch *b) { return b->nseq - b->kv_seqs[TIER_GPU]; }

/* New k and v of a piece that have come down, of the sequences off the GPU. */
static Tensor new_kv_below(const Run *run, const Batch *b, int rows) {
    return plan_view(run->plan, NEW_KV, TIER_CPU, b->turn, 0, rows);
}

/* Puts new tokens' k and v, rows first .. first+n-1 of the batch, into the pages of a table. */
static void append(Run *run, Op *op, const Tables *t, const PageTable *table, Tensor kv, int first, int n) {
    op->study = run->plan->policy.cache_study;
    post(&run->to, op_append(op, table, kv, tensor_cols(t->row_seq, first, n), tensor_cols(t->row_token, first, n)));
}

/* How many of a piece's rows have their KV on each tier: they lie in this order. */
static void rows_by_tier(int rows[NTIERS], const Batch *b, const Piece *piece) {
    for (int t = 0, end = 0; t < NTIERS; t++) {
        const int begin = imax(end, piece->row);
        end += b->kv_rows[t];
        rows[t] = imax(0, imin(end, piece->row + piece->rows) - begin);
    }
}

/* A piece's new k and v go home, if that is on the CPU or on disk. */
static void store_piece(Run *run, Batch *b, int j, int k, const Piece *piece) {
    int rows[NTIERS];
    rows_by_tier(rows, b, piece);
    const int gpu = rows[TIER_GPU], cpu = rows[TIER_CPU], disk = rows[TIER_DISK], first = piece->row + gpu;
    if (!(cpu + disk)) return;
    Tensor below = new_kv_below(run, b, cpu + disk);
    if (!delegated(run, b)) { /* if not, they came down with the queries */
        Move down = {below, new_kv_off(run, b, gpu, cpu + disk)};
        post(&run->to, op_copy(new_op(run, STORE, CACHE, j, k), &down, 1));
    }
    if (cpu && !delegated(run, b)) {
        PageTable home = batch_pages(run->flight, b, TIER_CPU, j, &b->cpu);
        append(run, new_op(run, ATTEND, CACHE, j, k), &b->cpu, &home, tensor_rows(below, 0, cpu), first, cpu);
    }
    if (disk) {
        PageTable home = batch_pages(run->flight, b, TIER_DISK, j, &b->cpu);
        append(run, new_op(run, D_WRITE, CACHE, j, k), &b->cpu, &home, tensor_rows(below, cpu, disk), first + cpu, disk);
    }
}

/* Figure 4: the new k and v go home; those of a prefill have gone, piece by piece. */
static void store_cache(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    Piece all = {.number = 0};
    if (b && j < run->l && !b->prefill && batch_piece(run->flight, b, &all)) store_piece(run, b, j, k, &all);
}

/* The past of sequences whose pages must come nearer: where the CPU attends, the disk's to the CPU; else all to the GPU. */
static void bring_cache(Run *run, const Batch *b, int j, int k) {
    const long sq = square_number(run, j, k);
    const int cpu = b->nstaged[TIER_CPU], disk = b->nstaged[TIER_DISK], page = run->plan->policy.page_tokens;
    const Tier side = delegated(run, b) ? TIER_CPU : TIER_GPU;
    const PageTable to = staged_pages(run->plan, side, sq, cpu + disk, none, none);
    const PageTable via = staged_pages(run->plan, TIER_CPU, sq, disk, none, none);
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        if (!b->nstaged[t]) continue;
        const PageTable home = batch_pages(run->flight, b, (Tier)t, j, &b->cpu);
        const int first = t == TIER_DISK ? cpu * page : 0;
        const Stop stops[] = {{tensor_rows(to.k, first, 0), via.k}, {tensor_rows(to.v, first, 0), via.v}};
        int n = batch_moves(run->moves, 0, b, (Tier)t, stops[0].here, home.k, page);
        if (!is_sparse(&run->plan->policy)) n = batch_moves(run->moves, n, b, (Tier)t, stops[1].here, home.v, page);
        CHECK(2 * (size_t)n <= run->room);
        if (side == TIER_CPU) {
            post(&run->to, op_copy(new_op(run, C_READ, CACHE, j, k), run->moves, n));
        } else {
            carry(&run->to, new_op(run, C_LOAD, CACHE, j, k), C_READ, run->moves, n, stops, 2);
        }
    }
}

/* Figure 4: of layer 0 it is asked for when the batch begins. */
static void load_cache(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (b && j && j < run->l) bring_cache(run, b, j, k);
}

// ---------------------------------------------------------------------------------------------------------------
// compute(j, k): project, attend, finish
// ---------------------------------------------------------------------------------------------------------------

/* Token rows are gathered where the table rests; only they move. */
static Tensor gather_tokens(Run *run, Batch *b, long sq, int k, Tensor x) {
    Tensor table = run->plan->global[TOK_EMBED].home;
    if (table.tier == TIER_GPU) return none;
    Tensor rows = plan_view(run->plan, EMBEDDED, TIER_CPU, sq, 0, b->rows);
    Tensor arrive = run->plan->config.embed == run->plan->config.h1 ? x : workspace(run, EMBEDDED, sq, b->rows);
    Move up = {arrive, rows};
    const Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
    post(&run->to, op_embed(new_op(run, lane, OTHER, 0, k), rows, table, b->cpu.ids, false));
    post(&run->to, op_copy(new_op(run, C_LOAD, OTHER, 0, k), &up, 1));
    return arrive;
}

/* Section 4.4: layer 0 of this stage begins where the last layer of the stage before has ended.
 *
 * Why stages never wait for each other in a circle: order messages by sweep, stage and batch. A state (i, p, k) is sent
 * when (i, p - 1, k) has come and smaller ones of its lane are gone; the tokens of a batch follow the last stage's states;
 * and a flight's sweep begins with the tokens of its sweep before. So whatever is waited for is smaller, and the smallest
 * that has not come can be sent. Whether a message exists depends on who is in flight, which the tokens tell all stages
 * alike. */
static void receive(Run *run, Batch *b, long sq, int k) {
    Move up = {hidden(run, b, sq), plan_view(run->plan, RECEIVED, TIER_CPU, b->index, 0, b->rows)};
    post(&run->to, op_receive(new_op(run, RECEIVE, ACTIVATION, 0, k), up.src));
    post(&run->to, op_copy(new_op(run, C_LOAD, ACTIVATION, 0, k), &up, 1));
}

/* What the stage behind waits for. */
static void send(Run *run, Batch *b, int j, int k) {
    Move down = {plan_view(run->plan, SENDING, TIER_CPU, b->index, 0, b->rows), hidden(run, b, square_number(run, j, k))};
    post(&run->to, op_copy(new_op(run, STORE, ACTIVATION, j, k), &down, 1));
    post(&run->to, op_send(new_op(run, SEND, ACTIVATION, j, k), down.dst));
}

static void embed(Run *run, Batch *b, long sq, int k, Tensor x) {
    Tensor global[NGLOBALS], tokens = gather_tokens(run, b, sq, k, x);
    for (int g = 0; g < NGLOBALS; g++) global[g] = run->plan->global[g].home;
    opt_embed(&run->to, *new_op(run, PROJECT, OTHER, 0, k), &run->plan->config, global, x, tokens, b->gpu.ids,
              b->gpu.positions, workspace(run, EMBEDDED, sq, b->rows));
}

/* The hidden state is where layer j computes it. */
static void enter(Run *run, Batch *b, int j, int k) {
    const long sq = square_number(run, j, k);
    Tensor x = hidden(run, b, sq);
    if (!j && is_first(&run->plan->config)) embed(run, b, sq, k, x);
    if (j && !all_on_gpu(b) && b->act_rows[TIER_GPU]) {
        int n = act_moves(run, b, j, TIER_GPU, x, false);
        post(&run->to, op_copy(new_op(run, PROJECT, ACTIVATION, j, k), run->moves, n));
    }
}

static void project(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    const OptConfig *c = &run->plan->config;
    int rows[NTIERS];
    opt_project(&run->to, *new_op(run, PROJECT, OTHER, j, k), c, w, workspace(run, QKV, b->turn, piece->rows),
                hidden_piece(run, b, square_number(run, j, k), piece),
                plan_view(run->plan, NORM_1, TIER_GPU, 0, 0, piece->rows));
    rows_by_tier(rows, b, piece);
    const int gpu = rows[TIER_GPU], off = piece->rows - gpu;
    if (off && run->plan->policy.cache_packed)
        post(&run->to, op_pack(new_op(run, PROJECT, CACHE, j, k), new_kv_off(run, b, gpu, off),
                               tensor_rows(new_kv(run, b, piece->rows), gpu, off), c->nh));
    if (gpu) {
        PageTable home = batch_pages(run->flight, b, TIER_GPU, j, &b->gpu);
        append(run, new_op(run, PROJECT, CACHE, j, k), &b->gpu, &home, new_kv(run, b, gpu), piece->row, gpu);
    }
}

/* Sparse attention (section 5): K is read whole, then V of the chosen tokens. home: where V is on disk, of which that alone
 * comes to the table's pages; NULL: it is in them. */
static void attend_sparse(Run *run, Op *op, const PageTable *table, const PageTable *home, Tensor o, Tensor q) {
    const Lane lane = op->lane;
    const Tier side = lane == ATTEND ? TIER_CPU : TIER_GPU;
    const double sparsity = run->plan->policy.sparsity;
    Tensor tokens = plan_view(run->plan, CHOSEN, side, 0, 0, q.rows),
           weights = plan_view(run->plan, WEIGHING, side, 0, 0, q.rows);
    post(&run->to, op_select(op, tokens, weights, q, table, sparsity));
    if (home) {
        op->lane = C_READ;
        post(&run->to, op_fetch(op, table, home, tokens, sparsity));
        op->lane = lane;
    }
    post(&run->to, op_weigh(op, o, tokens, weights, table, sparsity));
}

/* Attention of sequences first .. first+n-1 of a decoding batch over one table, which holds all the batch's sequences. */
static void attend_rows(Run *run, Op *op, PageTable table, const PageTable *home, Tensor o, Tensor q, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    if (is_sparse(&run->plan->policy))
        attend_sparse(run, op, &table, home, o, q);
    else
        post(&run->to, op_attend(op, o, q, &table));
}

/* Computation delegation (section 4.2): queries and the new k, v go down, the CPU attends where the pages are, the result
 * comes up. */
static void attend_on_cpu(Run *run, Batch *b, int j, int k, Tensor q) {
    long sq = square_number(run, j, k);
    const int gpu = b->kv_seqs[TIER_GPU], cpu = b->kv_seqs[TIER_CPU], disk = b->kv_seqs[TIER_DISK];
    Tensor query = plan_view(run->plan, QUERY, TIER_CPU, b->turn, 0, cpu + disk);
    Tensor result = plan_view(run->plan, ATTENDED, TIER_CPU, b->turn, 0, cpu + disk), kv = new_kv_below(run, b, cpu + disk);
    Move down[] = {{query, tensor_rows(q, gpu, cpu + disk)}, {kv, new_kv_off(run, b, gpu, cpu + disk)}},
         up = {attended_elsewhere(run, b), result};
    post(&run->to, op_copy(new_op(run, A_DOWN, CACHE, j, k), down, 2));
    Op *op = new_op(run, ATTEND, CACHE, j, k);
    if (cpu) {
        PageTable home = batch_pages(run->flight, b, TIER_CPU, j, &b->cpu);
        append(run, op, &b->cpu, &home, tensor_rows(kv, 0, cpu), gpu, cpu);
        attend_rows(run, op, home, NULL, tensor_rows(result, 0, cpu), tensor_rows(query, 0, cpu), gpu, cpu);
    }
    if (disk) {
        PageTable near = staged_pages(run->plan, TIER_CPU, sq, b->nstaged[TIER_DISK], b->cpu.staged, b->cpu.len);
        PageTable home = batch_pages(run->flight, b, TIER_DISK, j, &b->cpu);
        home.pages = tensor_rows(home.pages, gpu + cpu, disk);
        append(run, op, &b->cpu, &near, tensor_rows(kv, cpu, disk), gpu + cpu, disk);
        attend_rows(run, op, near, &home, tensor_rows(result, cpu, disk), tensor_rows(query, cpu, disk), gpu + cpu, disk);
    }
    post(&run->to, op_copy(new_op(run, A_UP, CACHE, j, k), &up, 1));
}

static void attend(Run *run, Batch *b, int j, int k, const Piece *piece) {
    const long sq = square_number(run, j, k);
    const int n = piece->rows, gpu = b->kv_seqs[TIER_GPU], off = off_seqs(b);
    Tensor q = new_q(run, b, n);
    if (b->prefill) { /* to what has just been computed */
        Tensor start = tensor_cols(b->gpu.start, piece->first + piece->number, piece->nseq + 1);
        post(&run->to, op_attend_prefill(new_op(run, FINISH, CACHE, j, k), workspace(run, ATTENDED, b->turn, n), q,
                                         new_kv(run, b, n), start, run->plan->config.nh));
        return;
    }
    if (off && delegated(run, b)) attend_on_cpu(run, b, j, k, q);
    Op *op = new_op(run, FINISH, CACHE, j, k);
    if (gpu) {
        PageTable home = batch_pages(run->flight, b, TIER_GPU, j, &b->gpu);
        attend_rows(run, op, home, NULL, attended_on_gpu(run, b), tensor_rows(q, 0, gpu), 0, gpu);
    }
    if (off && !delegated(run, b)) {
        PageTable near =
            staged_pages(run->plan, TIER_GPU, sq, b->nstaged[TIER_CPU] + b->nstaged[TIER_DISK], b->gpu.staged, b->gpu.len);
        append(run, op, &b->gpu, &near, new_kv_off(run, b, gpu, off), gpu, off);
        attend_rows(run, op, near, NULL, attended_elsewhere(run, b), tensor_rows(q, gpu, off), gpu, off);
    }
}

static void finish(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    const int n = piece->rows;
    opt_finish(&run->to, *new_op(run, FINISH, OTHER, j, k), &run->plan->config, w,
               hidden_piece(run, b, square_number(run, j, k), piece), workspace(run, ATTENDED, b->turn, n),
               plan_view(run->plan, NORM_2, TIER_GPU, 0, 0, n), plan_view(run->plan, MLP, TIER_GPU, 0, 0, n));
}

/* Logits become the next token of each sequence; in a scored task, those of head rows from `first` on, the probability of
 * what is given and the greedy choice. */
static void choose(Run *run, Batch *b, int k, Tensor logits, int first) {
    Op *op = new_op(run, PROJECT, OTHER, run->l, k);
    const int n = logits.rows;
    if (!run->task->scored)
        post(&run->to,
             op_pick(op, batch_tokens(run->flight, b, TIER_GPU), logits, b->gpu.prompt, b->gpu.at, &run->task->sampling));
    else
        post(&run->to, op_score(op, tensor_cols(batch_scores(run->flight, b, LOG_PROBS, TIER_GPU), first, n),
                                tensor_cols(batch_scores(run->flight, b, GREEDY, TIER_GPU), first, n), logits,
                                tensor_cols(b->gpu.target, first, n)));
}

/* What has been chosen goes down, and the logits where they are wanted. */
static void bring_down(Run *run, Batch *b, int k, Tensor logits) {
    const Flight *f = run->flight;
    Move moves[2];
    int n = 0;
    if (run->task->scored) {
        moves[n++] = (Move){batch_scores(f, b, LOG_PROBS, TIER_CPU), batch_scores(f, b, LOG_PROBS, TIER_GPU)};
        moves[n++] = (Move){batch_scores(f, b, GREEDY, TIER_CPU), batch_scores(f, b, GREEDY, TIER_GPU)};
    } else {
        moves[n++] = (Move){batch_tokens(f, b, TIER_CPU), batch_tokens(f, b, TIER_GPU)};
        if (run->task->keep_logits) moves[n++] = (Move){batch_logits(f, b, 0, b->nseq), logits};
    }
    post(&run->to, op_copy(new_op(run, A_DOWN, OTHER, run->l, k), moves, n));
}

/* Layer l: the rows that the head wants, the last of each sequence or in a scored task more, become logits, piece by piece.
 */
static void compute_head(Run *run, Batch *b, int k) {
    const Plan *p = run->plan;
    const int resting = b->act_last[TIER_GPU];
    Op *op = new_op(run, PROJECT, OTHER, run->l, k);
    Tensor x = workspace(run, LAST_ROWS, square_number(run, run->l, k), b->last_rows), logits = none, global[NGLOBALS];
    for (int g = 0; g < NGLOBALS; g++) global[g] = p->global[g].home;
    if (resting)
        post(&run->to, op_embed(op, tensor_rows(x, 0, resting), batch_activations(run->flight, b, TIER_GPU),
                                tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->last_rows; first += p->head_chunk) {
        const int n = imin(p->head_chunk, b->last_rows - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(&run->to, *op, &p->config, global, head_weights(run), logits, tensor_rows(x, first, n),
                   plan_view(p, HEAD_OUT, TIER_GPU, 0, 0, n));
        choose(run, b, k, logits, first);
    }
    bring_down(run, b, k, logits);
}

static void compute(Run *run, int j, int k) {
    Batch *b = run->flight->in_sweep[k];
    if (!b->nseq) return;
    if (j == run->l) {
        if (is_last(&run->plan->config)) compute_head(run, b, k);
        return;
    }
    Tensor w[NROLES];
    layer_weights(run, j, w);
    unpack_weights(run, j, k, w);
    enter(run, b, j, k);
    for (Piece piece = {.number = 0}; batch_piece(run->flight, b, &piece);) {
        b->turn = run->turn++;
        project(run, b, j, k, w, &piece);
        if (b->prefill) store_piece(run, b, j, k, &piece);
        attend(run, b, j, k, &piece);
        finish(run, b, j, k, w, &piece);
    }
    if (j + 1 == run->l && leaves(run, j)) send(run, b, j, k);
}

// ---------------------------------------------------------------------------------------------------------------
// The sweep
// ---------------------------------------------------------------------------------------------------------------

/* Figure 4 waits for all devices here. DIFFERS: every op knows what it must come after, so nothing is left to wait for, but
 * with --synchronize; only an error ends the sweep. */
static bool synchronize(Run *run) { return run->plan->policy.synchronize ? post_drain(&run->to) : !run->to.failed; }

/* Batch k's part in this sweep begins: here its newest tokens are waited for, and its tables go up. */
static bool begin(Run *run, int k) {
    Batch *b = run->flight->in_sweep[k];
    if (!batch_begin(run->flight, b)) return !run->to.failed;
    Move up = {b->gpu.all, b->cpu.all};
    post(&run->to, op_copy(new_op(run, C_LOAD, OTHER, 0, k), &up, 1));
    if (!is_first(&run->plan->config)) receive(run, b, square_number(run, 0, k), k);
    bring_cache(run, b, 0, k); /* of the other layers it is asked for one square ahead */
    return !run->to.failed;
}

/* The layer that has loaded beside the last one is the one to compute now. */
static void advance_weights(Run *run) {
    run->now = run->next;
    run->next = (LayerWeights){0};
}

/* One token for every batch in flight: Figure 4 from its second line on. */
static void sweep(Run *run) {
    run->K = run->flight->K;
    if (!run->next_is_layer0) {
        run->streamed += run->streamed % 2; /* as the plan counts: a sweep begins with the first slot (where it matters) */
        load_part(run, 0, 0, 1);
    }
    run->next_is_layer0 = false;
    const long streamed = run->streamed;
    for (int j = 0; j <= run->l; j++) { /* l: the head */
        advance_weights(run);
        for (int k = 0; k < run->K; k++) {
            const int next = run->K > 1 ? k + 1 : k; /* alone in flight, a batch loads what it has just stored */
            load_weight(run, j + 1, k);
            store_activation(run, j, k - 1);
            store_cache(run, j, k - 1);
            if (!j && !begin(run, k)) return;
            load_cache(run, j, k + 1);
            load_activation(run, j, next);
            compute(run, j, k);
            if (!synchronize(run)) return;
        }
        if (flight_is_empty(
                run->flight)) { /* all have ended by themselves, known only now: layer 0 is for the next sweep */
            run->next = run->now, run->next_is_layer0 = true, run->streamed = streamed;
            return;
        }
    }
    run->base += (long)(run->l + 1) * run->K;
    run->i++;
    flight_swept(run->flight);
}

/* For a trace: what this sweep holds. All flights' pages are in use at once. */
static void note_held(const Run *run) {
    Held held = {.at = run->line.swept_at};
    for (int g = 0; g < flight_count(&run->plan->policy); g++) {
        const Flight *f = &run->flights[g];
        for (int t = 0; t < NTIERS; t++) held.pages[t] += f->pool[t].used;
        for (int k = 0; k < f->K; k++) held.sequences += f->in_sweep[k]->nseq + f->in_sweep[k]->njoining;
    }
    if (run->to.device->trace) trace_hold(run->to.device->trace, &held);
}

/* Section 4.4's new loop, and Figure 4's loop over i: flights sweep in turn, until none has anybody left. Sweep i is of
 * flight i mod G, as long as all have. */
static void sweep_all(Run *run) {
    const int flights = flight_count(&run->plan->policy);
    for (int g = 0, idle = 0; idle < flights && !run->to.failed; g = (g + 1) % flights) {
        run->flight = &run->flights[g];
        idle++;
        if (!flight_admit(run->flight)) continue;
        sweep(run);
        note_held(run);
        idle = 0;
    }
    note_held(run);
}

/* The seconds of sweeps with a prefill are divided by what the processors did in them. How much of their decoding that was,
 * the tokens say. */
static void divide_seconds(RunStats *s, const Device *device) {
    static const Lane processors[] = {PROJECT, FINISH, ATTEND};
    double prefill = 0, decode = 0;
    for (int p = 0; p < 3; p++) {
        const LaneCount *count = &device->count[processors[p]];
        prefill += count->prefill_s, decode += count->busy_s - count->prefill_s;
    }
    const double beside = s->decoded ? decode * s->beside / s->decoded : 0;
    s->prefill_s = s->prefill_sweeps_s * (beside > 0 ? prefill / (prefill + beside) : 1);
    s->decode_s = s->total_s - s->prefill_s;
}

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats,
                 Error *err) {
    const int flights = flight_count(&plan->policy);
    Run run = {.plan = plan, .task = task, .l = plan->config.l};
    CHECK(!is_sparse(&plan->policy) || plan->policy.cpu_attention);
    *stats = (RunStats){0};
    run.to = (Poster){.device = device, .depend = depend_open(plan->ncells), .overlap = plan->policy.overlap, .err = err};
    run.room = 4 * ((size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES + 2);
    run.moves = xcalloc(run.room, sizeof *run.moves);
    run.line.swept_at = device->now(device);
    run.flights = xcalloc(flights, sizeof *run.flights);
    for (int g = 0; g < flights; g++) {
        run.flights[g] = (Flight){.plan = plan, .task = task, .listener = listener, .stats = stats, .to = &run.to};
        run.flights[g].line = &run.line, run.flights[g].number = g;
        flight_open(&run.flights[g]);
    }
    if (task->count) sweep_all(&run);
    if (!run.to.failed) post_drain(&run.to); /* the last stores, and weights that were loaded for nobody */
    if (!run.to.failed) divide_seconds(stats, device);
    for (int g = 0; g < flights; g++) flight_close(&run.flights[g]);
    depend_close(run.to.depend);
    free(run.moves), free(run.flights);
    return run.to.failed ? -1 : 0;
}
