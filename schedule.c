/* schedule.c: the block schedule with overlapping (sections 4.1 and 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token for
 * every batch in flight: for each layer j and each batch k, it makes the calls of Figure 4 in the
 * order of the figure. Layer l, after the decoder layers, is the head: final norm, logits, the next
 * token. Prompts enter only between sweeps. A sequence ends when its batch begins its part of a
 * sweep (batch.c).
 *
 * Read every function here as if each call happened at once, in the order in which it is made. In
 * fact calls only post ops on lanes. device/depend.c derives from the views that an op reads and
 * writes which earlier ops it must wait for; everything else may overlap. compute(j, k) calls
 * project, attend and finish, in prefill for one piece after the other. Three workspaces rotate, so
 * that while the CPU attends for batch k, the GPU finishes batch k-1 and projects batch k+1.
 * Read next: batch.c. */
#include "batch.h"
#include "device/device.h"

// clang-format off
/* The six views of one square (i, j, k). The brackets say which slot of its region each view takes.
 *
 *              rests on CPU or disk                       is on the GPU while the square computes
 *
 *   weights    RESTING_WEIGHTS ----- load_weight -------> WEIGHT_SLOT or WEIGHT_SLOT_1, in turn
 *                                                              |    UNPACKED_WEIGHTS if the batch
 *                                                              |    needs F16
 *   x          ACTIVATIONS --------- load_activation ---> HIDDEN            [square_number mod nws]
 *              of Batch.index                                  |    or stays in its ACTIVATIONS if
 *                                                              |    all of it rests on the GPU
 *                                                         - project -
 *                                                              |
 *   q, k, v                                               QKV               [Batch.turn mod turns]
 *                                                              |
 *   new k, v   KV_CACHE <----------- store_cache -------- QKV, or NEW_KV_PACKED [same turn];
 *              of Batch.index and layer j                      |    passes NEW_KV on the CPU
 *                                                              |
 *   pages      KV_CACHE ------------ load_cache --------> KV_STAGING        [square_number mod 2]
 *                                                              |
 *                                                         - attend -        on the GPU, or on the CPU
 *                                                              |    where the pages are: QUERY goes
 *                                                              |    down and ATTENDED comes up
 *   o                                                     ATTENDED          [Batch.turn mod turns]
 *                                                              |
 *                                                         - finish -
 *                                                              |
 *   x          ACTIVATIONS <-------- store_activation --- HIDDEN of the same square; LAST_ROWS for
 *                                                         the head
 *
 * square_number counts squares: its slots are in use at the same time as those of the squares
 * before and after. Batch.turn counts pieces of prefills and decoding batches: each of its slots is
 * used by one piece only. Batch.index is the batch's place in the plan: the batch keeps its slots
 * from sweep to sweep. A slot has one or more cells. A cell is always used as a whole; depend.c
 * orders ops by cells (number_cells in plan.c). */
// clang-format on

/* The weights of one layer while they load or are used. */
typedef struct {
    int slot;      /* the staging slot of the tensors that do not rest on the GPU */
    bool unpacked; /* its packed matrices have been unpacked to F16 */
} LayerWeights;

/* One run of the schedule. */
typedef struct {
    const Plan *plan;
    const Task *task;
    Poster *to;
    Flight *flight, *flights; /* the flight that sweeps; all flights [flight_count] */
    Line line;
    int l, i, K;            /* decoder layers; number of this sweep over all flights; its batches */
    long base;              /* squares of the earlier sweeps */
    long streamed;          /* layers that have streamed so far; they use the two slots in turn */
    long turn;              /* pieces so far */
    LayerWeights now, next; /* the layer that computes; the layer that loads meanwhile */
    bool next_is_layer0;    /* `next` is layer 0 of the coming sweep */
    Move *moves; /* [room] scratch: the moves of a copy, followed by those of its second hop */
    size_t room;
} Run;

// -------------------------------------------------------------------------------------------------
// Figure 4
// -------------------------------------------------------------------------------------------------

/* The calls of Figure 4. While square (j, k) computes, the results of its neighbours are stored and
 * their inputs loaded. j is a layer, and k the place of a batch in the sweep: -1 stands for the
 * last batch of layer j-1, and K for the first batch of layer j+1. */
static void load_weight(Run *run, int j, int k);
static void store_activation(Run *run, int j, int k);
static void store_cache(Run *run, int j, int k);
static void load_cache(Run *run, int j, int k);
static void load_activation(Run *run, int j, int k);
static void compute(Run *run, int j, int k);
static bool synchronize(Run *run); /* false: the run has failed */

static void load_part(Run *run, int j, int k, int K);
static void advance_weights(Run *run);
static bool begin(Run *run, int k);

/* Computes one token for every batch in flight: Figure 4 from its second line on. */
static void sweep(Run *run) {
    run->K = run->flight->K;
    if (!run->next_is_layer0) {
        run->streamed += run->streamed % 2; /* begin with the first slot, as the plan assumes */
        load_part(run, 0, 0, 1);
    }
    run->next_is_layer0 = false;
    const long streamed = run->streamed;
    for (int j = 0; j <= run->l; j++) { /* l: the head */
        advance_weights(run);
        for (int k = 0; k < run->K; k++) {
            /* a batch that is alone in flight loads what it has just stored */
            const int next = run->K > 1 ? k + 1 : k;
            load_weight(run, j + 1, k);
            store_activation(run, j, k - 1);
            store_cache(run, j, k - 1);
            if (!j && !begin(run, k))
                return;
            load_cache(run, j, k + 1);
            load_activation(run, j, next);
            compute(run, j, k);
            if (!synchronize(run))
                return;
        }
        /* only after layer 0, where batches begin: all sequences turn out to have ended, and what
         * has been loaded of layer 0 is kept */
        if (flight_is_empty(run->flight)) {
            run->next = run->now;
            run->next_is_layer0 = true;
            run->streamed = streamed;
            return;
        }
    }
    run->base += (long)(run->l + 1) * run->K;
    run->i++;
    flight_swept(run->flight);
}

/* Makes the layer whose weights have just been loaded the layer that computes. */
static void advance_weights(Run *run) {
    run->now = run->next;
    run->next = (LayerWeights){0};
}

// -------------------------------------------------------------------------------------------------
// Squares and their views
// -------------------------------------------------------------------------------------------------

static const Tensor none = {.rows = 0};

/* Returns the batch of square (j, k). If k is -1 or K (see above), changes j and k so that k is a
 * place in the sweep. Returns NULL outside the sweep, and for a batch that has no members left. */
static Batch *at_square(const Run *run, int *j, int *k) {
    if (*k < 0) {
        *k += run->K;
        *j -= 1;
    }
    if (*k >= run->K) {
        *k -= run->K;
        *j += 1;
    }
    if (*j < 0 || *j > run->l)
        return NULL;
    Batch *b = run->flight->in_sweep[*k];
    return b->nseq ? b : NULL;
}

/* Returns the number of a square in the run; workspaces and staging slots rotate by it. */
static long square_number(const Run *run, int j, int k) { return run->base + (long)j * run->K + k; }

/* Returns true if the CPU computes attention for this batch (computation delegation, section
 * 4.2). */
static bool delegated(const Run *run, const Batch *b) {
    return run->plan->policy.delegated && !b->prefill;
}

/* Returns the Call for ops of square (j, k) on a lane. */
static Call call_on(const Run *run, Lane lane, Kind kind, int j, int k) {
    const Batch *b = run->flight->in_sweep[k];
    return (Call){.lane = lane,
                  .kind = kind,
                  .prefill = kind == WEIGHT ? run->flight->prefill : b->prefill,
                  .prefill_sweep = run->flight->prefill,
                  .delegated = delegated(run, b),
                  .i = run->i,
                  .j = j,
                  .k = k,
                  .batch = b->number};
}

/* Returns rows of a rotating workspace on the GPU; sq is a square_number or a turn. */
static Tensor workspace(const Run *run, RegionId id, long sq, int rows) {
    return plan_view(run->plan, id, TIER_GPU, sq, 0, rows);
}

static bool all_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* Returns the hidden state while it is computed: in place if all of it rests on the GPU, otherwise
 * in the workspace. */
static Tensor hidden(const Run *run, const Batch *b, long sq) {
    return all_on_gpu(b) ? batch_activations(run->flight, b, TIER_GPU)
                         : workspace(run, HIDDEN, sq, b->rows);
}

/* Returns the rows of the hidden state that a piece computes. */
static Tensor hidden_piece(const Run *run, const Batch *b, long sq, const Piece *piece) {
    return tensor_cells(tensor_rows(hidden(run, b, sq), piece->row, piece->rows), piece->number, 1);
}

/* Returns the new k and v of the first rows of a piece. */
static Tensor new_kv(const Run *run, const Batch *b, int rows) {
    return tensor_cols(workspace(run, QKV, b->turn, rows), run->plan->config.h1,
                       2 * run->plan->config.h1);
}

/* Returns the new k and v of a piece's rows from `first` on, which are those whose cache is not on
 * the GPU. They have the format of the pages: if pages are packed, PROJECT has packed them. */
static Tensor new_kv_off(const Run *run, const Batch *b, int first, int rows) {
    if (run->plan->policy.cache_packed)
        return workspace(run, NEW_KV_PACKED, b->turn, rows);
    return tensor_rows(new_kv(run, b, first + rows), first, rows);
}

/* Returns room on the CPU for the new k and v of a piece's sequences whose cache is not on the
 * GPU. */
static Tensor new_kv_below(const Run *run, const Batch *b, int rows) {
    return plan_view(run->plan, NEW_KV, TIER_CPU, b->turn, 0, rows);
}

/* Returns the result of attention for the sequences whose cache is not on the GPU. It has a cell of
 * its own, because other lanes write it. */
static Tensor attended_elsewhere(const Run *run, const Batch *b) {
    const int gpu = b->kv_seqs[TIER_GPU];
    return tensor_cells(tensor_rows(workspace(run, ATTENDED, b->turn, b->nseq), gpu, b->nseq - gpu),
                        1, 1);
}

// -------------------------------------------------------------------------------------------------
// load_weight
// -------------------------------------------------------------------------------------------------

/* Returns n F16 numbers of the slot of run->next, from byte `at` on. */
static Tensor slot_bytes(const Run *run, Bytes at, int n) {
    return plan_bytes(run->plan, (RegionId)(WEIGHT_SLOT + run->next.slot), TIER_GPU, at, F16, n);
}

/* Appends to run->moves[0..n) the moves that bring bytes first .. end-1 of layer j's slab into the
 * slot of run->next. Returns how many moves there are. */
static int slab_moves(Run *run, int j, Bytes first, Bytes end, int n) {
    const Plan *p = run->plan;
    for (int i = 0; i < (j < run->l ? NROLES : 1); i++) {
        const WeightPlace *place =
            j < run->l ? &p->weight[j][p->slab_order[j][i]] : &p->global[p->head];
        const Bytes begin = place->slab_offset, from = first > begin ? first : begin;
        const Bytes to = size_min(end, begin + place->slab_bytes);
        Tensor src = place->home;
        if (src.tier == TIER_GPU || from >= to)
            continue;
        if (src.type == U8)
            src.type = F16; /* two bytes at a time */
        src.rows = 1;
        src.cols = (int)((to - from) / 2);
        src.offset += (from - begin) / 2 * type_bytes(src.type);
        n = add_move(run->moves, n, slot_bytes(run, from, src.cols), src);
    }
    return n;
}

/* Returns where part k of K equal parts begins, at a whole cache line. */
static Bytes part_begin(Bytes bytes, int k, int K) { return bytes / 64 * k / K * 64; }

/* Loads part k of K of layer j into the slot of run->next. The CPU's share and the disk's share are
 * each cut into K equal parts. */
static void load_part(Run *run, int j, int k, int K) {
    const Plan *p = run->plan;
    const Bytes cpu = p->slab[TIER_CPU][j], disk = p->slab[TIER_DISK][j];
    if (!cpu && !disk)
        return;
    if (!k)
        run->next = (LayerWeights){.slot = (int)(run->streamed++ % 2)};
    Tensor via = plan_view(p, (RegionId)(WEIGHT_SLOT + run->next.slot), TIER_CPU, 0, 0, 1);
    if (!k && disk) /* parts are the cells of the slot; the layer before had other parts there */
        depend_fold(run->to->depend, &via);
    int n = slab_moves(run, j, part_begin(cpu, k, K), part_begin(cpu, k + 1, K), 0);
    n = slab_moves(run, j, cpu + part_begin(disk, k, K), cpu + part_begin(disk, k + 1, K), n);
    const Stop stop = {slot_bytes(run, cpu, 0), tensor_cells(via, k, 1)};
    carry(run->to, call_on(run, W_LOAD, WEIGHT, j, k), run->moves, n, &stop, 1);
}

/* Returns true if some flight will sweep at least once more. */
static bool goes_on(const Run *run) {
    for (int g = 0; g < flight_count(&run->plan->policy); g++)
        if (flight_goes_on(&run->flights[g]))
            return true;
    return false;
}

/* Loads part k of the weights of layer j, the next layer (Figure 4). After the head comes layer 0
 * of the next sweep, if there is one. */
static void load_weight(Run *run, int j, int k) {
    bool wraps = j > run->l;
    if (wraps && !goes_on(run))
        return;
    if (wraps)
        run->next_is_layer0 = true;
    load_part(run, wraps ? 0 : j, k, run->K);
}

// -------------------------------------------------------------------------------------------------
// store_activation
// -------------------------------------------------------------------------------------------------

/* Moves the rows of the hidden state that rest on one tier: to their home after layer j (store), or
 * from their home before layer j. After the last layer of a prefill only the rows that the head
 * needs leave the GPU, and only those come back, to the workspace LAST_ROWS. */
static void move_activation(Run *run, const Batch *b, int j, int k, Tier tier, bool store) {
    static const Lane lane[2][NTIERS] = {{PROJECT, C_LOAD, C_LOAD}, {FINISH, STORE, STORE}};
    if (!b->act_rows[tier])
        return;
    const long sq = square_number(run, j, k);
    const bool alone = j == run->l, for_head = is_last(&run->plan->config) && j + store == run->l;
    const Tensor home = batch_activations(run->flight, b, tier);
    const Tensor x = alone ? workspace(run, LAST_ROWS, sq, b->last_rows) : hidden(run, b, sq);
    Stop stop = {.via = plan_view(run->plan, store ? ACT_WRITING : ACT_READING, TIER_CPU, sq, 0,
                                  b->act_rows[TIER_DISK])};
    /* rows of `home`, and of x, before those of the sequence. Of a prompt's rows ....LL only those
     * that the head needs, LL, travel after the last layer; LAST_ROWS then holds the LL alone */
    int low = 0, high = 0, n = 0;
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        const int rows = batch_rows(b, q);
        const int wanted = for_head && tier != TIER_GPU ? q->last_rows : rows;
        if (q->act == tier) {
            Tensor rest = tensor_rows(home, low + rows - wanted, wanted);
            Tensor state = tensor_rows(x, alone ? high : high + rows - wanted, wanted);
            if (!low)
                stop.here = tensor_rows(x, high, 0);
            n = add_move(run->moves, n, store ? rest : state, store ? state : rest);
            low += rows;
        }
        high += alone ? q->last_rows : rows;
    }
    carry(run->to, call_on(run, lane[store][tier], ACTIVATION, j, k), run->moves, n, &stop, 1);
}

/* Returns true if the hidden state is not stored after layer j: j is the head itself, or the last
 * layer of a stage that sends its state on. */
static bool leaves(const Run *run, int j) { return j + !is_last(&run->plan->config) >= run->l; }

/* Stores the hidden state (Figure 4), unless it was computed where it rests. */
static void store_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || leaves(run, j) || all_on_gpu(b))
        return;
    for (int t = 0; t < NTIERS; t++)
        move_activation(run, b, j, k, (Tier)t, true);
}

// -------------------------------------------------------------------------------------------------
// store_cache
// -------------------------------------------------------------------------------------------------

/* Posts an op that appends kv, the new k and v of the batch's rows from `first` on, to the pages of
 * a table. */
static void append(Run *run, Call call, const Batch *b, PageTable table, Tensor kv, int first) {
    const Tables *t = batch_tables(b, table.k.tier);
    Op op = op_append(call, &table, kv, tensor_cols(t->row_seq, first, kv.rows),
                      tensor_cols(t->row_token, first, kv.rows));
    op.study = run->plan->policy.cache_study;
    post(run->to, op);
}

/* Stores the new k and v of a piece's rows whose cache is on the CPU or on disk. If the CPU
 * attends, all of them have come down with the queries, and attend_on_cpu has appended those of the
 * CPU's pages. */
static void store_piece(Run *run, Batch *b, int j, int k, const Piece *piece) {
    const int gpu = piece->kv_rows[TIER_GPU], cpu = piece->kv_rows[TIER_CPU];
    const int disk = piece->kv_rows[TIER_DISK], first = piece->row + gpu;
    if (!(cpu + disk))
        return;
    Tensor below = new_kv_below(run, b, cpu + disk);
    if (!delegated(run, b)) {
        Move down = {below, new_kv_off(run, b, gpu, cpu + disk)};
        post(run->to, op_copy(call_on(run, STORE, CACHE, j, k), &down, 1));
    }
    if (cpu && !delegated(run, b))
        append(run, call_on(run, ATTEND, CACHE, j, k), b, batch_pages(run->flight, b, TIER_CPU, j),
               tensor_rows(below, 0, cpu), first);
    if (disk)
        append(run, call_on(run, D_WRITE, CACHE, j, k), b,
               batch_pages(run->flight, b, TIER_DISK, j), tensor_rows(below, cpu, disk),
               first + cpu);
}

/* Stores the new k and v of a decoding batch (Figure 4); compute has stored those of a prefill,
 * piece by piece. */
static void store_cache(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    Piece all = {.number = 0};
    if (b && j < run->l && !b->prefill && batch_piece(run->flight, b, &all))
        store_piece(run, b, j, k, &all);
}

// -------------------------------------------------------------------------------------------------
// load_cache
// -------------------------------------------------------------------------------------------------

/* Copies the pages that hold past tokens into staging: all pages that are not on the GPU to the
 * GPU, or, if the CPU attends, the disk's pages to the CPU. */
static void bring_cache(Run *run, const Batch *b, int j, int k) {
    const long sq = square_number(run, j, k);
    const int cpu = b->nstaged[TIER_CPU], disk = b->nstaged[TIER_DISK];
    const int page = run->plan->policy.page_tokens;
    const Tier side = delegated(run, b) ? TIER_CPU : TIER_GPU;
    const PageTable to = plan_pages(run->plan, KV_STAGING, side, 2 * sq, cpu + disk);
    const PageTable via = plan_pages(run->plan, KV_STAGING, TIER_CPU, 2 * sq, disk);
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        if (!b->nstaged[t])
            continue;
        const PageTable home = batch_pages(run->flight, b, (Tier)t, j);
        const int first = t == TIER_DISK ? cpu * page : 0;
        const Stop stops[] = {{tensor_rows(to.k, first, 0), via.k},
                              {tensor_rows(to.v, first, 0), via.v}};
        int n = batch_moves(run->moves, 0, b, (Tier)t, stops[0].here, home.k);
        if (!is_sparse(&run->plan->policy))
            n = batch_moves(run->moves, n, b, (Tier)t, stops[1].here, home.v);
        CHECK(2 * (size_t)n <= run->room);
        if (side == TIER_CPU)
            post(run->to, op_copy(call_on(run, C_READ, CACHE, j, k), run->moves, n));
        else
            carry(run->to, call_on(run, C_LOAD, CACHE, j, k), run->moves, n, stops, 2);
    }
}

/* Loads the cache of the coming square (Figure 4). For layer 0, begin does this. */
static void load_cache(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (b && j && j < run->l)
        bring_cache(run, b, j, k);
}

// -------------------------------------------------------------------------------------------------
// load_activation
// -------------------------------------------------------------------------------------------------

/* Loads the rows of the hidden state that do not rest on the GPU (Figure 4). Layer 0 has nothing to
 * load, because its rows come from the embedding. */
static void load_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || !j || all_on_gpu(b) || (j == run->l && leaves(run, j - 1)))
        return;
    for (int t = TIER_CPU; t <= TIER_DISK; t++)
        move_activation(run, b, j, k, (Tier)t, false);
}

// -------------------------------------------------------------------------------------------------
// compute: project, attend, finish
// -------------------------------------------------------------------------------------------------

/* Fills w with the tensors of layer j at the place where they are while it computes. For a batch of
 * more than packed_rows rows, packed matrices are first unpacked to F16, once for each layer and
 * sweep, before the first such batch. q, k and v are unpacked on PROJECT and the other matrices on
 * FINISH, because each of these lanes has then finished the layer before. */
static void layer_weights(Run *run, int j, int k, Tensor w[NROLES]) {
    const Plan *p = run->plan;
    const bool many_rows = run->flight->in_sweep[k]->rows > p->packed_rows;
    for (int r = 0; r < NROLES; r++) {
        const Tensor streamed = plan_weight(p, &p->weight[j][r], run->now.slot);
        const bool unpack = streamed.type == U8 && many_rows;
        w[r] = unpack ? plan_f16(p, (Role)r) : streamed;
        if (unpack && !run->now.unpacked)
            post(run->to,
                 op_unpack(call_on(run, r < O_W ? PROJECT : FINISH, WEIGHT, j, k), w[r], streamed));
    }
    run->now.unpacked = run->now.unpacked || many_rows;
}

/* Gathers rows of the token table on the tier where the table rests, so that only these rows move,
 * and computes the hidden state of layer 0 from them. */
static void embed(Run *run, Batch *b, int k) {
    const Plan *p = run->plan;
    const long sq = square_number(run, 0, k);
    const Tensor x = hidden(run, b, sq), table = p->global[TOK_EMBED].home;
    const Tensor tokens =
        p->config.embed == p->config.h1 ? x : workspace(run, EMBEDDED, sq, b->rows);
    const Call call = call_on(run, PROJECT, OTHER, 0, k);
    if (table.tier == TIER_GPU) {
        post(run->to, op_embed(call, tokens, table, b->gpu.ids, false));
    } else {
        const Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
        Move up = {tokens, plan_view(p, EMBEDDED, TIER_CPU, sq, 0, b->rows)};
        post(run->to, op_embed(call_on(run, lane, OTHER, 0, k), up.src, table, b->cpu.ids, false));
        post(run->to, op_copy(call_on(run, C_LOAD, OTHER, 0, k), &up, 1));
    }
    opt_embed(run->to, call, p, x, tokens, b->gpu.positions);
}

/* Receives the hidden state from the stage before: layer 0 of this stage begins where the last
 * layer of that stage has ended (section 4.4).
 *
 * Stages never deadlock, because messages are ordered by sweep i, then stage p, then batch k. State
 * (i, p, k) is sent when state (i, p - 1, k) has arrived and the smaller states of its lane have
 * been sent. The tokens of a batch follow the last stage's states, and a flight's sweep begins with
 * the tokens of its previous sweep. So every message waits only for smaller ones, and the smallest
 * message that has not arrived can always be sent. All stages agree on which messages exist,
 * because that depends only on which batches are in flight, and all stages receive the same
 * tokens. */
static void receive(Run *run, Batch *b, long sq, int k) {
    Move up = {hidden(run, b, sq), plan_view(run->plan, RECEIVED, TIER_CPU, b->index, 0, b->rows)};
    post(run->to, op_receive(call_on(run, RECEIVE, ACTIVATION, 0, k), up.src));
    post(run->to, op_copy(call_on(run, C_LOAD, ACTIVATION, 0, k), &up, 1));
}

/* Sends the hidden state to the next stage. */
static void send(Run *run, Batch *b, int j, int k) {
    Move down = {plan_view(run->plan, SENDING, TIER_CPU, b->index, 0, b->rows),
                 hidden(run, b, square_number(run, j, k))};
    post(run->to, op_copy(call_on(run, STORE, ACTIVATION, j, k), &down, 1));
    post(run->to, op_send(call_on(run, SEND, ACTIVATION, j, k), down.dst));
}

/* Computes q, k and v of a piece. Appends new k and v to the pages on the GPU. Packs those of other
 * pages, if pages are packed. */
static void project(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    const int gpu = piece->kv_rows[TIER_GPU], off = piece->rows - gpu;
    const Call call = call_on(run, PROJECT, CACHE, j, k);
    opt_project(run->to, call_on(run, PROJECT, OTHER, j, k), run->plan, w,
                workspace(run, QKV, b->turn, piece->rows),
                hidden_piece(run, b, square_number(run, j, k), piece));
    if (off && run->plan->policy.cache_packed)
        post(run->to,
             op_pack(call, new_kv_off(run, b, gpu, off),
                     tensor_rows(new_kv(run, b, piece->rows), gpu, off), run->plan->config.nh));
    if (gpu)
        append(run, call, b, batch_pages(run->flight, b, TIER_GPU, j), new_kv(run, b, gpu),
               piece->row);
}

/* Returns the part of a batch's page table for its sequences first .. first+n-1. */
static PageTable table_rows(PageTable table, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    return table;
}

/* Posts the attention of one new token per sequence of a table. Sparse attention (section 5) reads
 * all of K, then V of the chosen tokens. home holds the same sequences' pages on disk, if the V of
 * the chosen tokens must be fetched from there into the table's pages; NULL if V is already in the
 * table's pages. */
static void attend_rows(Run *run, Call call, PageTable table, const PageTable *home, Tensor o,
                        Tensor q) {
    const Plan *p = run->plan;
    const double sparsity = p->policy.sparsity;
    const Tier side = call.lane == ATTEND ? TIER_CPU : TIER_GPU;
    if (!is_sparse(&p->policy)) {
        post(run->to, op_attend(call, o, q, &table));
        return;
    }
    const Tensor tokens = plan_view(p, CHOSEN, side, 0, 0, q.rows);
    const Tensor weights = plan_view(p, WEIGHING, side, 0, 0, q.rows);
    post(run->to, op_select(call, tokens, weights, q, &table, sparsity));
    if (home) {
        Call read = call;
        read.lane = C_READ;
        post(run->to, op_fetch(read, &table, home, tokens, sparsity));
    }
    post(run->to, op_weigh(call, o, tokens, weights, &table, sparsity));
}

/* Delegates attention to the CPU (section 4.2): queries and the new k and v go down, the CPU
 * attends where the pages are, and the results come up. */
static void attend_on_cpu(Run *run, Batch *b, int j, int k, Tensor q) {
    const long sq = square_number(run, j, k);
    const int gpu = b->kv_seqs[TIER_GPU], cpu = b->kv_seqs[TIER_CPU], disk = b->kv_seqs[TIER_DISK];
    Tensor query = plan_view(run->plan, QUERY, TIER_CPU, b->turn, 0, cpu + disk);
    Tensor result = plan_view(run->plan, ATTENDED, TIER_CPU, b->turn, 0, cpu + disk);
    Tensor kv = new_kv_below(run, b, cpu + disk);
    Move down[] = {{query, tensor_rows(q, gpu, cpu + disk)},
                   {kv, new_kv_off(run, b, gpu, cpu + disk)}};
    Move up = {attended_elsewhere(run, b), result};
    const Call call = call_on(run, ATTEND, CACHE, j, k);
    post(run->to, op_copy(call_on(run, A_DOWN, CACHE, j, k), down, 2));
    if (cpu) {
        PageTable home = batch_pages(run->flight, b, TIER_CPU, j);
        append(run, call, b, home, tensor_rows(kv, 0, cpu), gpu);
        attend_rows(run, call, table_rows(home, gpu, cpu), NULL, tensor_rows(result, 0, cpu),
                    tensor_rows(query, 0, cpu));
    }
    if (disk) {
        PageTable near = plan_pages(run->plan, KV_STAGING, TIER_CPU, 2 * sq, b->nstaged[TIER_DISK]);
        near.pages = b->cpu.staged;
        near.len = b->cpu.len;
        PageTable home = table_rows(batch_pages(run->flight, b, TIER_DISK, j), gpu + cpu, disk);
        append(run, call, b, near, tensor_rows(kv, cpu, disk), gpu + cpu);
        attend_rows(run, call, table_rows(near, gpu + cpu, disk), &home,
                    tensor_rows(result, cpu, disk), tensor_rows(query, cpu, disk));
    }
    post(run->to, op_copy(call_on(run, A_UP, CACHE, j, k), &up, 1));
}

/* Posts the attention of a piece. In prefill it attends to the k and v that have just been
 * computed; otherwise to the pages on the GPU, and to the other pages in staging or on the CPU. */
static void attend(Run *run, Batch *b, int j, int k, const Piece *piece) {
    const int n = piece->rows, gpu = b->kv_seqs[TIER_GPU], off = b->nseq - gpu;
    Tensor q = tensor_cols(workspace(run, QKV, b->turn, n), 0, run->plan->config.h1);
    const Call call = call_on(run, FINISH, CACHE, j, k);
    if (b->prefill) {
        Tensor start = tensor_cols(b->gpu.start, piece->first + piece->number, piece->nseq + 1);
        post(run->to, op_attend_prefill(call, workspace(run, ATTENDED, b->turn, n), q,
                                        new_kv(run, b, n), start, run->plan->config.nh));
        return;
    }
    if (off && delegated(run, b))
        attend_on_cpu(run, b, j, k, q);
    if (gpu)
        attend_rows(run, call, table_rows(batch_pages(run->flight, b, TIER_GPU, j), 0, gpu), NULL,
                    tensor_cells(workspace(run, ATTENDED, b->turn, gpu), 0, 1),
                    tensor_rows(q, 0, gpu));
    if (off && !delegated(run, b)) {
        PageTable near = plan_pages(run->plan, KV_STAGING, TIER_GPU, 2 * square_number(run, j, k),
                                    b->nstaged[TIER_CPU] + b->nstaged[TIER_DISK]);
        near.pages = b->gpu.staged;
        near.len = b->gpu.len;
        append(run, call, b, near, new_kv_off(run, b, gpu, off), gpu);
        attend_rows(run, call, table_rows(near, gpu, off), NULL, attended_elsewhere(run, b),
                    tensor_rows(q, gpu, off));
    }
}

/* Computes the half of the layer after attention for a piece. */
static void finish(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    opt_finish(run->to, call_on(run, FINISH, OTHER, j, k), run->plan, w,
               hidden_piece(run, b, square_number(run, j, k), piece),
               workspace(run, ATTENDED, b->turn, piece->rows));
}

/* Chooses the next token of each sequence from its logits, on the processor that has them. In a
 * scored task it computes, for the head's rows from `first` on, the probability of the given token
 * and the greedy choice. */
static void choose_tokens(Run *run, Batch *b, int k, Tensor logits, int first) {
    const Call call = call_on(run, logits.tier == TIER_CPU ? ATTEND : PROJECT, OTHER, run->l, k);
    const Tables *t = batch_tables(b, logits.tier);
    const int n = logits.rows;
    Tensor ids = tensor_cols(batch_newest(run->flight, b, NEW_TOKENS, logits.tier), first, n);
    if (!run->task->scored) {
        post(run->to, op_pick(call, ids, logits, t->prompt, t->at, &run->task->sampling));
        return;
    }
    Tensor logp = tensor_cols(batch_newest(run->flight, b, LOG_PROBS, TIER_GPU), first, n);
    post(run->to, op_score(call, logp, ids, logits, tensor_cols(b->gpu.target, first, n)));
}

/* Copies the chosen tokens to the CPU, and the logits if they are kept or if the CPU is to choose
 * from them. */
static void bring_down(Run *run, Batch *b, int k, Tensor logits) {
    const Flight *f = run->flight;
    const bool chosen = run->plan->chooser == TIER_GPU;
    Move moves[2] = {
        {batch_newest(f, b, NEW_TOKENS, TIER_CPU), batch_newest(f, b, NEW_TOKENS, TIER_GPU)}};
    int n = chosen;
    if (run->task->scored)
        moves[n++] = (Move){batch_newest(f, b, LOG_PROBS, TIER_CPU),
                            batch_newest(f, b, LOG_PROBS, TIER_GPU)};
    if (run->task->keep_logits || !chosen)
        moves[n++] = (Move){batch_logits(f, b, 0, b->nseq), logits};
    post(run->to, op_copy(call_on(run, A_DOWN, OTHER, run->l, k), moves, n));
}

/* Computes layer l, the head. It turns the rows that the head needs (the last of each sequence, or
 * more in a scored task) into logits, head_chunk rows at a time. */
static void compute_head(Run *run, Batch *b, int k) {
    const Plan *p = run->plan;
    const int resting = b->act_last[TIER_GPU];
    const Call call = call_on(run, PROJECT, OTHER, run->l, k);
    const Tensor head = plan_weight(p, &p->global[p->head], run->now.slot);
    Tensor x = workspace(run, LAST_ROWS, square_number(run, run->l, k), b->last_rows);
    Tensor logits = none;
    if (resting)
        post(run->to,
             op_embed(call, tensor_rows(x, 0, resting), batch_activations(run->flight, b, TIER_GPU),
                      tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->last_rows; first += p->head_chunk) {
        const int n = imin(p->head_chunk, b->last_rows - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(run->to, call, p, head, logits, tensor_rows(x, first, n));
        if (p->chooser == TIER_GPU)
            choose_tokens(run, b, k, logits, first);
    }
    bring_down(run, b, k, logits);
    if (p->chooser == TIER_CPU)
        choose_tokens(run, b, k, batch_logits(run->flight, b, 0, b->nseq), 0);
}

/* Computes layer j of batch k (Figure 4). */
static void compute(Run *run, int j, int k) {
    Batch *b = run->flight->in_sweep[k];
    if (!b->nseq)
        return;
    if (j == run->l) {
        if (is_last(&run->plan->config))
            compute_head(run, b, k);
        return;
    }
    Tensor w[NROLES];
    layer_weights(run, j, k, w);
    if (!j && is_first(&run->plan->config))
        embed(run, b, k);
    if (j && !all_on_gpu(b))
        move_activation(run, b, j, k, TIER_GPU, false);
    for (Piece piece = {.number = 0}; batch_piece(run->flight, b, &piece);) {
        b->turn = run->turn++;
        project(run, b, j, k, w, &piece);
        if (b->prefill)
            store_piece(run, b, j, k, &piece);
        attend(run, b, j, k, &piece);
        finish(run, b, j, k, w, &piece);
    }
    if (j + 1 == run->l && leaves(run, j))
        send(run, b, j, k);
}

// -------------------------------------------------------------------------------------------------
// synchronize, and the sweeps of a run
// -------------------------------------------------------------------------------------------------

/* Waits for all lanes, as Figure 4 waits for all devices. DIFFERS: every op already waits for the
 * ops that it needs, so this waits only with --synchronize.  Returns false when the run has
 * failed. */
static bool synchronize(Run *run) {
    return run->plan->policy.synchronize ? post_drain(run->to) : !run->to->failed;
}

/* Begins batch k's part in this sweep: waits for its newest tokens, copies its index tables to the
 * GPU, and loads what its first square needs. Returns false when the run has failed. */
static bool begin(Run *run, int k) {
    Batch *b = run->flight->in_sweep[k];
    if (!batch_begin(run->flight, b))
        return !run->to->failed;
    Move up = {b->gpu.all, b->cpu.all};
    post(run->to, op_copy(call_on(run, C_LOAD, OTHER, 0, k), &up, 1));
    if (!is_first(&run->plan->config))
        receive(run, b, square_number(run, 0, k), k);
    bring_cache(run, b, 0, k); /* load_cache does this for the other layers, one square ahead */
    return !run->to->failed;
}

/* Records in the trace how many pages and sequences all flights together hold now. */
static void note_held(const Run *run) {
    Held held = {.at = run->line.swept_at};
    for (int g = 0; g < flight_count(&run->plan->policy); g++) {
        const Flight *f = &run->flights[g];
        for (int t = 0; t < NTIERS; t++)
            held.pages[t] += f->pool[t].used;
        for (int k = 0; k < f->K; k++)
            held.sequences += f->in_sweep[k]->nseq + f->in_sweep[k]->njoining;
    }
    if (run->to->device->trace)
        trace_hold(run->to->device->trace, &held);
}

/* Runs the loop that section 4.4 adds, and Figure 4's loop over i: flights sweep in turn until all
 * are empty. While all have members, sweep i belongs to flight i mod flight_count. */
static void sweep_all(Run *run) {
    const int flights = flight_count(&run->plan->policy);
    for (int g = 0, idle = 0; idle < flights && !run->to->failed; g = (g + 1) % flights) {
        run->flight = &run->flights[g];
        idle++;
        if (!flight_admit(run->flight))
            continue;
        sweep(run);
        note_held(run);
        idle = 0;
    }
    note_held(run);
}

/* Divides the seconds of prefill sweeps into prefill and decode, by the time that the processors
 * spent on each. The time that they spent on decoding beside prefills is estimated from the number
 * of tokens. */
static void divide_seconds(RunStats *s, const Device *device) {
    static const Lane processors[] = {PROJECT, FINISH, ATTEND};
    double prefill = 0, decode = 0;
    for (int p = 0; p < 3; p++) {
        const LaneCount *count = &device->count[processors[p]];
        prefill += count->prefill_s;
        decode += count->busy_s - count->prefill_s;
    }
    const double beside = s->decoded ? decode * s->beside / s->decoded : 0;
    s->prefill_s = s->prefill_sweeps_s * (beside > 0 ? prefill / (prefill + beside) : 1);
    s->decode_s = s->total_s - s->prefill_s;
}

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener,
                 RunStats *stats, Error *err) {
    const int flights = flight_count(&plan->policy);
    Poster to = {.device = device, .overlap = plan->policy.overlap, .err = err};
    Run run = {.plan = plan, .task = task, .to = &to, .l = plan->config.l};
    CHECK(!is_sparse(&plan->policy) || plan->policy.delegated);
    *stats = (RunStats){0};
    to.depend = depend_open(plan->ncells);
    /* K and V of a page, or a tensor that both shares cut in two; for each of two hops */
    run.room = 4 * ((size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES + 2);
    run.moves = xcalloc(run.room, sizeof *run.moves);
    run.line.swept_at = device->now(device);
    run.flights = xcalloc(flights, sizeof *run.flights);
    for (int g = 0; g < flights; g++) {
        run.flights[g] = (Flight){.plan = plan,
                                  .task = task,
                                  .listener = listener,
                                  .stats = stats,
                                  .to = &to,
                                  .line = &run.line,
                                  .number = g};
        flight_open(&run.flights[g]);
    }
    if (task->count)
        sweep_all(&run);
    if (!to.failed) /* the last stores, and weights loaded for a sweep that did not take place */
        post_drain(&to);
    if (!to.failed)
        divide_seconds(stats, device);
    for (int g = 0; g < flights; g++)
        flight_close(&run.flights[g]);
    depend_close(to.depend);
    free(run.moves);
    free(run.flights);
    return to.failed ? -1 : 0;
}
