/* schedule.c: the block schedule with overlapping (sections 4.1 and 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token for
 * every batch in flight: for each layer j, for each batch k, in the order of Figure 4, call for
 * call. Layer l, behind the decoder layers, is the head: final norm, logits, the next token. Who is
 * in flight changes only between sweeps (batch.c).
 *
 * Everything here is written as if each call happened at once, in the order in which it is made.
 * Calls only post ops on lanes; what an op must come after follows from the views that it reads and
 * writes (device/depend.c), and overlap is what is left when nothing forbids it. compute(j, k) is
 * project, attend, finish, for a prefill piece by piece; three workspaces rotate, so that while the
 * CPU attends for batch k, the GPU finishes batch k-1 and projects batch k+1.
 * Read next: batch.c. */
#include "batch.h"
#include "device/device.h"

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
    int l, i, K;   /* decoder layers; this sweep, of all flights; batches in flight in it */
    long base;     /* squares of the sweeps before this one */
    long streamed; /* layers that have streamed so far: they take the two slots in turn */
    long turn;     /* pieces so far */
    LayerWeights now, next; /* the layer that computes, the one that loads beside it */
    bool next_is_layer0;    /* next is layer 0 of the coming sweep */
    Op op;                  /* the one that is being made */
    Move *
        moves; /* [room] scratch: of the op that is being made, and behind them of its second hop */
    size_t room;
} Run;

// -------------------------------------------------------------------------------------------------
// Squares and their views
// -------------------------------------------------------------------------------------------------

// clang-format off
/* One square (i, j, k): its six views, and which slot of its region each takes.
 *
 *              rests on CPU or disk                       is on the GPU while the square computes
 *
 *   weights    RESTING_WEIGHTS ----- load_weight -------> WEIGHT_SLOT or WEIGHT_SLOT_1: layers that
 *              stream, in turn
 *                                                              |    UNPACKED_WEIGHTS, where a batch
 *                                                                   wants F16
 *   x          ACTIVATIONS --------- load_activation ---> HIDDEN            [square_number mod nws]
 *              of Batch.index                                  |    in its ACTIVATIONS where all of
 *                                                              it rests on the GPU
 *                                                         - project -
 *                                                              |
 *   q, k, v                                               QKV               [Batch.turn mod turns]
 *                                                              |
 *   new k, v   KV_CACHE <----------- store_cache -------- QKV, or NEW_KV_PACKED of the same turn;
 *              by NEW_KV on the CPU
 *              of Batch.index and layer j                      |
 *   pages      KV_CACHE ------------ load_cache --------> KV_STAGING        [square_number mod 2]
 *                                                              |
 *                                                         - attend -    or on the CPU, where the
 *                                                                       pages are: QUERY goes
 *                                                              |        down and ATTENDED comes up,
 *                                                                       [Batch.turn mod turns]
 *   o                                                     ATTENDED          [Batch.turn mod turns]
 *                                                              |
 *                                                         - finish -
 *                                                              |
 *   x          ACTIVATIONS <-------- store_activation --- HIDDEN of the same square; the head's is
 *              LAST_ROWS
 *
 * square_number counts squares: what it numbers is in use beside the squares before and behind.
 * Batch.turn counts pieces of prefills, and decoding batches: what it numbers a piece needs alone.
 * Batch.index is the batch's place in the plan: what it numbers stays from sweep to sweep. A cell
 * is a part of a slot that is always used as a whole: by cells depend.c knows who must wait for
 * whom (number_cells in plan.c). */
// clang-format on

static const Tensor none = {.rows = 0};

/* The batch that computes square (j, k). k may be -1 (the last batch of layer j-1) or K (the first
 * of layer j+1). NULL outside the sweep, and where the batch has no members any more. */
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

/* Squares are counted over the run; workspaces and staging take turns by it. */
static long square_number(const Run *run, int j, int k) { return run->base + (long)j * run->K + k; }

/* Whether the CPU attends in this batch's square (computation delegation, section 4.2). */
static bool delegated(const Run *run, const Batch *b) {
    return run->plan->policy.cpu_attention && !b->prefill;
}

/* What the next op is for; the constructors add what it does. */
static Op *new_op(Run *run, Lane lane, Kind kind, int j, int k) {
    const Batch *b = run->flight->in_sweep[k];
    run->op.lane = lane;
    run->op.kind = kind;
    run->op.prefill_sweep = run->flight->prefill;
    run->op.delegated = delegated(run, b);
    run->op.prefill = kind == WEIGHT ? run->flight->prefill : b->prefill;
    run->op.i = run->i;
    run->op.j = j;
    run->op.k = k;
    run->op.batch = b->number;
    return &run->op;
}

/* A rotating workspace on the GPU. */
static Tensor workspace(const Run *run, RegionId id, long sq, int rows) {
    return plan_view(run->plan, id, TIER_GPU, sq, 0, rows);
}

static bool all_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* The hidden state while it is computed: in place where all of it rests on the GPU, else in the
 * workspace. */
static Tensor hidden(const Run *run, const Batch *b, long sq) {
    return all_on_gpu(b) ? batch_activations(run->flight, b, TIER_GPU)
                         : workspace(run, HIDDEN, sq, b->rows);
}

/* Of that, what a piece computes. */
static Tensor hidden_piece(const Run *run, const Batch *b, long sq, const Piece *piece) {
    return tensor_cells(tensor_rows(hidden(run, b, sq), piece->row, piece->rows), piece->number, 1);
}

/* The new k, v of a piece's first rows. */
static Tensor new_kv(const Run *run, const Batch *b, int rows) {
    return tensor_cols(workspace(run, QKV, b->turn, rows), run->plan->config.h1,
                       2 * run->plan->config.h1);
}

/* The new k, v of its rows from `first` on, whose cache is not on the GPU, as pages take them:
 * where these are packed, PROJECT has packed them. */
static Tensor new_kv_off(const Run *run, const Batch *b, int first, int rows) {
    if (run->plan->policy.cache_packed)
        return workspace(run, NEW_KV_PACKED, b->turn, rows);
    return tensor_rows(new_kv(run, b, first + rows), first, rows);
}

/* The result of attention, of the sequences whose KV is not on the GPU: other lanes write it, and
 * it is a cell of its own.
 */
static Tensor attended_elsewhere(const Run *run, const Batch *b) {
    const int gpu = b->kv_seqs[TIER_GPU];
    return tensor_cells(tensor_rows(workspace(run, ATTENDED, b->turn, b->nseq), gpu, b->nseq - gpu),
                        1, 1);
}

// -------------------------------------------------------------------------------------------------
// Weights
// -------------------------------------------------------------------------------------------------

/* Numbers in F16 from byte `at` of next's slot on. */
static Tensor slot_bytes(const Run *run, Bytes at, int n) {
    return plan_bytes(run->plan, (RegionId)(WEIGHT_SLOT + run->next.slot), TIER_GPU, at, F16, n);
}

/* What of layer j lies in bytes first .. end-1 of its slab, as moves into next's slot. */
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
            src.type = F16; /* bytes, two at a time */
        src.rows = 1;
        src.cols = (int)((to - from) / 2);
        src.offset += (from - begin) / 2 * type_bytes(src.type);
        n = add_move(run->moves, n, slot_bytes(run, from, src.cols), src);
    }
    return n;
}

/* The k-th of K parts of layer j, into next's slot: equal parts of what the CPU holds and of what
 * the disk holds, cut at whole cache lines. */
static void load_part(Run *run, int j, int k, int K) {
    const Plan *p = run->plan;
    const Bytes cpu = p->cpu_slab[j], disk = p->disk_slab[j];
    if (!cpu && !disk)
        return;
    if (!k)
        run->next = (LayerWeights){.slot = (int)(run->streamed++ % 2)};
    Tensor via = plan_view(p, (RegionId)(WEIGHT_SLOT + run->next.slot), TIER_CPU, 0, 0, 1);
    if (!k && disk)
        depend_fold(run->to.depend,
                    &via); /* the parts of the layer that had the slot had other bounds */
    int n = slab_moves(run, j, cpu / 64 * k / K * 64, cpu / 64 * (k + 1) / K * 64, 0);
    n = slab_moves(run, j, cpu + disk / 64 * k / K * 64, cpu + disk / 64 * (k + 1) / K * 64, n);
    const Stop stop = {slot_bytes(run, cpu, 0), tensor_cells(via, k, 1)};
    carry(&run->to, new_op(run, W_LOAD, WEIGHT, j, k), W_READ, run->moves, n, &stop, 1);
}

/* Whether any flight will sweep once more. */
static bool goes_on(const Run *run) {
    for (int g = 0; g < flight_count(&run->plan->policy); g++)
        if (flight_goes_on(&run->flights[g]))
            return true;
    return false;
}

/* Figure 4: part k of the next layer's weights. Behind the head comes layer 0 of the next sweep, if
 * there is one. */
static void load_weight(Run *run, int j, int k) {
    bool wraps = j > run->l;
    if (wraps && !goes_on(run))
        return;
    if (wraps)
        run->next_is_layer0 = true;
    load_part(run, wraps ? 0 : j, k, run->K);
}

/* Layer j's tensors where they are while it computes. Packed matrices become F16 for a batch of
 * more rows than the device multiplies with packed ones: once a layer and sweep, before the first
 * such batch. q, k and v unpack on PROJECT, the rest on FINISH: each lane has then finished with
 * the layer before. */
static void layer_weights(Run *run, int j, int k, Tensor w[NROLES]) {
    const Plan *p = run->plan;
    const bool many_rows = run->flight->in_sweep[k]->rows > p->packed_rows;
    for (int r = 0; r < NROLES; r++) {
        const Tensor streamed = plan_weight(p, &p->weight[j][r], run->now.slot);
        const bool unpack = streamed.type == U8 && many_rows;
        w[r] = unpack ? plan_f16(p, (Role)r) : streamed;
        if (unpack && !run->now.unpacked)
            post(&run->to,
                 op_unpack(new_op(run, r < O_W ? PROJECT : FINISH, WEIGHT, j, k), w[r], streamed));
    }
    run->now.unpacked = run->now.unpacked || many_rows;
}

// -------------------------------------------------------------------------------------------------
// Activations
// -------------------------------------------------------------------------------------------------

/* Moves the rows of the hidden state that rest on one tier: to their home behind layer j, or from
 * there to layer j. Behind the last layer of a prefill only the rows that the head wants go down;
 * only those come up again, to where they are alone.
 */
static void move_activation(Run *run, const Batch *b, int j, int k, Tier tier, bool store) {
    static const Lane lane[2][NTIERS] = {{PROJECT, C_LOAD, C_LOAD}, {FINISH, STORE, STORE}};
    const long sq = square_number(run, j, k);
    const bool alone = j == run->l, for_head = is_last(&run->plan->config) && j + store == run->l;
    const Tensor home = batch_activations(run->flight, b, tier);
    const Tensor x = alone ? workspace(run, LAST_ROWS, sq, b->last_rows) : hidden(run, b, sq);
    Stop stop = {.via = plan_view(run->plan, store ? ACT_WRITING : ACT_READING, TIER_CPU, sq, 0,
                                  b->act_rows[TIER_DISK])};
    int low = 0, high = 0, n = 0; /* rows of `home` and of x before those of the sequence */
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        const int rows = batch_rows(b, q),
                  wanted = for_head && tier != TIER_GPU ? q->last_rows : rows;
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
    if (n)
        carry(&run->to, new_op(run, lane[store][tier], ACTIVATION, j, k), store ? D_WRITE : C_READ,
              run->moves, n, &stop, 1);
}

/* Whether the hidden state does not rest behind layer j: the head has taken it, or another stage
 * will. */
static bool leaves(const Run *run, int j) { return j + !is_last(&run->plan->config) >= run->l; }

/* Figure 4: the hidden state goes to rest, but where it was computed in place. */
static void store_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || leaves(run, j) || all_on_gpu(b))
        return;
    for (int t = 0; t < NTIERS; t++)
        move_activation(run, b, j, k, (Tier)t, true);
}

/* Figure 4: what does not rest on the GPU comes up. Layer 0 has nothing to load, its rows come from
 * the embedding. */
static void load_activation(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    if (!b || !j || all_on_gpu(b) || (j == run->l && leaves(run, j - 1)))
        return;
    for (int t = TIER_CPU; t <= TIER_DISK; t++)
        move_activation(run, b, j, k, (Tier)t, false);
}

// -------------------------------------------------------------------------------------------------
// The KV cache
// -------------------------------------------------------------------------------------------------

/* Off the GPU: the sequences whose KV is on the CPU or on disk; they come last. */
static int off_seqs(const Batch *b) { return b->nseq - b->kv_seqs[TIER_GPU]; }

/* New k and v of a piece that have come down, of the sequences off the GPU. */
static Tensor new_kv_below(const Run *run, const Batch *b, int rows) {
    return plan_view(run->plan, NEW_KV, TIER_CPU, b->turn, 0, rows);
}

/* Puts new tokens' k and v, rows first .. first+n-1 of the batch, into the pages of a table. */
static void append(Run *run, Op *op, const Batch *b, PageTable table, Tensor kv, int first, int n) {
    const Tables *t = batch_tables(b, table.k.tier);
    op->study = run->plan->policy.cache_study;
    post(&run->to, op_append(op, &table, kv, tensor_cols(t->row_seq, first, n),
                             tensor_cols(t->row_token, first, n)));
}

/* A piece's new k and v go home, if that is on the CPU or on disk. */
static void store_piece(Run *run, Batch *b, int j, int k, const Piece *piece) {
    const int gpu = piece->kv_rows[TIER_GPU], cpu = piece->kv_rows[TIER_CPU],
              disk = piece->kv_rows[TIER_DISK];
    const int first = piece->row + gpu;
    if (!(cpu + disk))
        return;
    Tensor below = new_kv_below(run, b, cpu + disk);
    if (!delegated(run, b)) { /* if not, they came down with the queries */
        Move down = {below, new_kv_off(run, b, gpu, cpu + disk)};
        post(&run->to, op_copy(new_op(run, STORE, CACHE, j, k), &down, 1));
    }
    if (cpu && !delegated(run, b))
        append(run, new_op(run, ATTEND, CACHE, j, k), b, batch_pages(run->flight, b, TIER_CPU, j),
               tensor_rows(below, 0, cpu), first, cpu);
    if (disk)
        append(run, new_op(run, D_WRITE, CACHE, j, k), b, batch_pages(run->flight, b, TIER_DISK, j),
               tensor_rows(below, cpu, disk), first + cpu, disk);
}

/* Figure 4: the new k and v go home; those of a prefill have gone, piece by piece. */
static void store_cache(Run *run, int j, int k) {
    Batch *b = at_square(run, &j, &k);
    Piece all = {.number = 0};
    if (b && j < run->l && !b->prefill && batch_piece(run->flight, b, &all))
        store_piece(run, b, j, k, &all);
}

/* The past of sequences whose pages must come nearer: where the CPU attends, the disk's to the CPU;
 * else all to the GPU. */
static void bring_cache(Run *run, const Batch *b, int j, int k) {
    const long sq = square_number(run, j, k);
    const int cpu = b->nstaged[TIER_CPU], disk = b->nstaged[TIER_DISK],
              page = run->plan->policy.page_tokens;
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
        int n = batch_moves(run->moves, 0, b, (Tier)t, stops[0].here, home.k, page);
        if (!is_sparse(&run->plan->policy))
            n = batch_moves(run->moves, n, b, (Tier)t, stops[1].here, home.v, page);
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
    if (b && j && j < run->l)
        bring_cache(run, b, j, k);
}

// -------------------------------------------------------------------------------------------------
// compute(j, k): project, attend, finish
// -------------------------------------------------------------------------------------------------

/* Token rows are gathered where the table rests; only they move. */
static void embed(Run *run, Batch *b, int k) {
    const Plan *p = run->plan;
    const long sq = square_number(run, 0, k);
    const Tensor x = hidden(run, b, sq);
    const Tensor table = p->global[TOK_EMBED].home;
    const Tensor tokens =
        p->config.embed == p->config.h1 ? x : workspace(run, EMBEDDED, sq, b->rows);
    if (table.tier == TIER_GPU) {
        post(&run->to,
             op_embed(new_op(run, PROJECT, OTHER, 0, k), tokens, table, b->gpu.ids, false));
    } else {
        const Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
        Move up = {tokens, plan_view(p, EMBEDDED, TIER_CPU, sq, 0, b->rows)};
        post(&run->to, op_embed(new_op(run, lane, OTHER, 0, k), up.src, table, b->cpu.ids, false));
        post(&run->to, op_copy(new_op(run, C_LOAD, OTHER, 0, k), &up, 1));
    }
    opt_embed(&run->to, *new_op(run, PROJECT, OTHER, 0, k), p, x, tokens, b->gpu.positions);
}

/* Section 4.4: layer 0 of this stage begins where the last layer of the stage before has ended.
 *
 * Why stages never wait for each other in a circle: order messages by sweep, stage and batch. A
 * state (i, p, k) is sent when (i, p - 1, k) has come and smaller ones of its lane are gone; the
 * tokens of a batch follow the last stage's states; and a flight's sweep begins with the tokens of
 * its sweep before. So whatever is waited for is smaller, and the smallest that has not come can be
 * sent. Whether a message exists depends on who is in flight, which the tokens tell all stages
 * alike. */
static void receive(Run *run, Batch *b, long sq, int k) {
    Move up = {hidden(run, b, sq), plan_view(run->plan, RECEIVED, TIER_CPU, b->index, 0, b->rows)};
    post(&run->to, op_receive(new_op(run, RECEIVE, ACTIVATION, 0, k), up.src));
    post(&run->to, op_copy(new_op(run, C_LOAD, ACTIVATION, 0, k), &up, 1));
}

/* What the stage behind waits for. */
static void send(Run *run, Batch *b, int j, int k) {
    Move down = {plan_view(run->plan, SENDING, TIER_CPU, b->index, 0, b->rows),
                 hidden(run, b, square_number(run, j, k))};
    post(&run->to, op_copy(new_op(run, STORE, ACTIVATION, j, k), &down, 1));
    post(&run->to, op_send(new_op(run, SEND, ACTIVATION, j, k), down.dst));
}

static void project(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    const int gpu = piece->kv_rows[TIER_GPU], off = piece->rows - gpu;
    opt_project(&run->to, *new_op(run, PROJECT, OTHER, j, k), run->plan, w,
                workspace(run, QKV, b->turn, piece->rows),
                hidden_piece(run, b, square_number(run, j, k), piece));
    if (off && run->plan->policy.cache_packed)
        post(&run->to,
             op_pack(new_op(run, PROJECT, CACHE, j, k), new_kv_off(run, b, gpu, off),
                     tensor_rows(new_kv(run, b, piece->rows), gpu, off), run->plan->config.nh));
    if (gpu)
        append(run, new_op(run, PROJECT, CACHE, j, k), b, batch_pages(run->flight, b, TIER_GPU, j),
               new_kv(run, b, gpu), piece->row, gpu);
}

/* Attention of sequences first .. first+n-1 of a decoding batch over one table, which holds all the
 * batch's sequences. Sparse attention (section 5) reads K whole, then V of the chosen tokens. home:
 * where V is on disk, of which that alone comes to the table's pages; NULL: it is in them. */
static void attend_rows(Run *run, Op *op, PageTable table, const PageTable *home, Tensor o,
                        Tensor q, int first, int n) {
    const Plan *p = run->plan;
    const Lane lane = op->lane;
    const Tier side = lane == ATTEND ? TIER_CPU : TIER_GPU;
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    if (!is_sparse(&p->policy)) {
        post(&run->to, op_attend(op, o, q, &table));
        return;
    }
    const Tensor tokens = plan_view(p, CHOSEN, side, 0, 0, n),
                 weights = plan_view(p, WEIGHING, side, 0, 0, n);
    post(&run->to, op_select(op, tokens, weights, q, &table, p->policy.sparsity));
    if (home) {
        op->lane = C_READ;
        post(&run->to, op_fetch(op, &table, home, tokens, p->policy.sparsity));
        op->lane = lane;
    }
    post(&run->to, op_weigh(op, o, tokens, weights, &table, p->policy.sparsity));
}

/* Computation delegation (section 4.2): queries and the new k, v go down, the CPU attends where the
 * pages are, the result comes up. */
static void attend_on_cpu(Run *run, Batch *b, int j, int k, Tensor q) {
    long sq = square_number(run, j, k);
    const int gpu = b->kv_seqs[TIER_GPU], cpu = b->kv_seqs[TIER_CPU], disk = b->kv_seqs[TIER_DISK];
    Tensor query = plan_view(run->plan, QUERY, TIER_CPU, b->turn, 0, cpu + disk);
    Tensor result = plan_view(run->plan, ATTENDED, TIER_CPU, b->turn, 0, cpu + disk),
           kv = new_kv_below(run, b, cpu + disk);
    Move down[] = {{query, tensor_rows(q, gpu, cpu + disk)},
                   {kv, new_kv_off(run, b, gpu, cpu + disk)}},
         up = {attended_elsewhere(run, b), result};
    post(&run->to, op_copy(new_op(run, A_DOWN, CACHE, j, k), down, 2));
    Op *op = new_op(run, ATTEND, CACHE, j, k);
    if (cpu) {
        PageTable home = batch_pages(run->flight, b, TIER_CPU, j);
        append(run, op, b, home, tensor_rows(kv, 0, cpu), gpu, cpu);
        attend_rows(run, op, home, NULL, tensor_rows(result, 0, cpu), tensor_rows(query, 0, cpu),
                    gpu, cpu);
    }
    if (disk) {
        PageTable near = plan_pages(run->plan, KV_STAGING, TIER_CPU, 2 * sq, b->nstaged[TIER_DISK]);
        near.pages = b->cpu.staged;
        near.len = b->cpu.len;
        PageTable home = batch_pages(run->flight, b, TIER_DISK, j);
        home.pages = tensor_rows(home.pages, gpu + cpu, disk);
        append(run, op, b, near, tensor_rows(kv, cpu, disk), gpu + cpu, disk);
        attend_rows(run, op, near, &home, tensor_rows(result, cpu, disk),
                    tensor_rows(query, cpu, disk), gpu + cpu, disk);
    }
    post(&run->to, op_copy(new_op(run, A_UP, CACHE, j, k), &up, 1));
}

static void attend(Run *run, Batch *b, int j, int k, const Piece *piece) {
    const long sq = square_number(run, j, k);
    const int n = piece->rows, gpu = b->kv_seqs[TIER_GPU], off = off_seqs(b);
    Tensor q = tensor_cols(workspace(run, QKV, b->turn, n), 0, run->plan->config.h1);
    if (b->prefill) { /* to what has just been computed */
        Tensor start = tensor_cols(b->gpu.start, piece->first + piece->number, piece->nseq + 1);
        post(&run->to, op_attend_prefill(new_op(run, FINISH, CACHE, j, k),
                                         workspace(run, ATTENDED, b->turn, n), q, new_kv(run, b, n),
                                         start, run->plan->config.nh));
        return;
    }
    if (off && delegated(run, b))
        attend_on_cpu(run, b, j, k, q);
    Op *op = new_op(run, FINISH, CACHE, j, k);
    if (gpu)
        attend_rows(run, op, batch_pages(run->flight, b, TIER_GPU, j), NULL,
                    tensor_cells(workspace(run, ATTENDED, b->turn, gpu), 0, 1),
                    tensor_rows(q, 0, gpu), 0, gpu);
    if (off && !delegated(run, b)) {
        PageTable near = plan_pages(run->plan, KV_STAGING, TIER_GPU, 2 * sq,
                                    b->nstaged[TIER_CPU] + b->nstaged[TIER_DISK]);
        near.pages = b->gpu.staged;
        near.len = b->gpu.len;
        append(run, op, b, near, new_kv_off(run, b, gpu, off), gpu, off);
        attend_rows(run, op, near, NULL, attended_elsewhere(run, b), tensor_rows(q, gpu, off), gpu,
                    off);
    }
}

static void finish(Run *run, Batch *b, int j, int k, const Tensor w[NROLES], const Piece *piece) {
    opt_finish(&run->to, *new_op(run, FINISH, OTHER, j, k), run->plan, w,
               hidden_piece(run, b, square_number(run, j, k), piece),
               workspace(run, ATTENDED, b->turn, piece->rows));
}

/* Logits become the next token of each sequence, by the processor that has them; in a scored task,
 * those of head rows from `first` on, the probability of what is given and the greedy choice. */
static void choose_tokens(Run *run, Batch *b, int k, Tensor logits, int first) {
    Op *op = new_op(run, logits.tier == TIER_CPU ? ATTEND : PROJECT, OTHER, run->l, k);
    const Tables *t = batch_tables(b, logits.tier);
    const int n = logits.rows;
    Tensor ids = tensor_cols(batch_newest(run->flight, b, NEW_TOKENS, logits.tier), first, n);
    if (!run->task->scored)
        post(&run->to, op_pick(op, ids, logits, t->prompt, t->at, &run->task->sampling));
    else
        post(&run->to,
             op_score(op, tensor_cols(batch_newest(run->flight, b, LOG_PROBS, TIER_GPU), first, n),
                      ids, logits, tensor_cols(b->gpu.target, first, n)));
}

/* What has been chosen goes down, and the logits if they are kept or nothing has been chosen yet.
 */
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
    post(&run->to, op_copy(new_op(run, A_DOWN, OTHER, run->l, k), moves, n));
}

/* Layer l: the rows that the head wants, the last of each sequence or in a scored task more, become
 * logits, piece by piece.
 */
static void compute_head(Run *run, Batch *b, int k) {
    const Plan *p = run->plan;
    const int resting = b->act_last[TIER_GPU];
    Op *op = new_op(run, PROJECT, OTHER, run->l, k);
    Tensor x = workspace(run, LAST_ROWS, square_number(run, run->l, k), b->last_rows),
           logits = none;
    if (resting)
        post(&run->to,
             op_embed(op, tensor_rows(x, 0, resting), batch_activations(run->flight, b, TIER_GPU),
                      tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->last_rows; first += p->head_chunk) {
        const int n = imin(p->head_chunk, b->last_rows - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(&run->to, *op, p, plan_weight(p, &p->global[p->head], run->now.slot), logits,
                   tensor_rows(x, first, n));
        if (p->chooser == TIER_GPU)
            choose_tokens(run, b, k, logits, first);
    }
    bring_down(run, b, k, logits);
    if (p->chooser == TIER_CPU)
        choose_tokens(run, b, k, batch_logits(run->flight, b, 0, b->nseq), 0);
}

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
// The sweep
// -------------------------------------------------------------------------------------------------

/* Figure 4 waits for all devices here. DIFFERS: every op knows what it must come after, so nothing
 * is left to wait for, but with --synchronize; only an error ends the sweep. */
static bool synchronize(Run *run) {
    return run->plan->policy.synchronize ? post_drain(&run->to) : !run->to.failed;
}

/* Batch k's part in this sweep begins: here its newest tokens are waited for, and its tables go up.
 */
static bool begin(Run *run, int k) {
    Batch *b = run->flight->in_sweep[k];
    if (!batch_begin(run->flight, b))
        return !run->to.failed;
    Move up = {b->gpu.all, b->cpu.all};
    post(&run->to, op_copy(new_op(run, C_LOAD, OTHER, 0, k), &up, 1));
    if (!is_first(&run->plan->config))
        receive(run, b, square_number(run, 0, k), k);
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
        run->streamed +=
            run->streamed %
            2; /* as the plan counts: a sweep begins with the first slot (where it matters) */
        load_part(run, 0, 0, 1);
    }
    run->next_is_layer0 = false;
    const long streamed = run->streamed;
    for (int j = 0; j <= run->l; j++) { /* l: the head */
        advance_weights(run);
        for (int k = 0; k < run->K; k++) {
            const int next =
                run->K > 1 ? k + 1 : k; /* alone in flight, a batch loads what it has just stored */
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
        if (flight_is_empty(run->flight)) { /* all have stopped, known only now: layer 0 is for the
                                               next sweep */
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

/* For a trace: what this sweep holds. All flights' pages are in use at once. */
static void note_held(const Run *run) {
    Held held = {.at = run->line.swept_at};
    for (int g = 0; g < flight_count(&run->plan->policy); g++) {
        const Flight *f = &run->flights[g];
        for (int t = 0; t < NTIERS; t++)
            held.pages[t] += f->pool[t].used;
        for (int k = 0; k < f->K; k++)
            held.sequences += f->in_sweep[k]->nseq + f->in_sweep[k]->njoining;
    }
    if (run->to.device->trace)
        trace_hold(run->to.device->trace, &held);
}

/* Section 4.4's new loop, and Figure 4's loop over i: flights sweep in turn, until none has anybody
 * left. Sweep i is of flight i mod G, as long as all have. */
static void sweep_all(Run *run) {
    const int flights = flight_count(&run->plan->policy);
    for (int g = 0, idle = 0; idle < flights && !run->to.failed; g = (g + 1) % flights) {
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

/* The seconds of sweeps with a prefill are divided by what the processors did in them. How much of
 * their decoding that was, the tokens say. */
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
    Run run = {.plan = plan, .task = task, .l = plan->config.l};
    CHECK(!is_sparse(&plan->policy) || plan->policy.cpu_attention);
    *stats = (RunStats){0};
    run.to = (Poster){.device = device,
                      .depend = depend_open(plan->ncells),
                      .overlap = plan->policy.overlap,
                      .err = err};
    run.room = 4 * ((size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES + 2);
    run.moves = xcalloc(run.room, sizeof *run.moves);
    run.line.swept_at = device->now(device);
    run.flights = xcalloc(flights, sizeof *run.flights);
    for (int g = 0; g < flights; g++) {
        run.flights[g] = (Flight){
            .plan = plan, .task = task, .listener = listener, .stats = stats, .to = &run.to};
        run.flights[g].line = &run.line;
        run.flights[g].number = g;
        flight_open(&run.flights[g]);
    }
    if (task->count)
        sweep_all(&run);
    if (!run.to.failed)
        post_drain(&run.to); /* the last stores, and weights that were loaded for nobody */
    if (!run.to.failed)
        divide_seconds(stats, device);
    for (int g = 0; g < flights; g++)
        flight_close(&run.flights[g]);
    depend_close(run.to.depend);
    free(run.moves);
    free(run.flights);
    return run.to.failed ? -1 : 0;
}
