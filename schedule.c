/* schedule.c: the block schedule with overlapping (section 4.2, Figure 4).
 *
 * Generation is a grid of squares (token i, layer j, GPU batch k). A sweep computes one token of
 * every sequence of a flight (one machine needs one flight): for each layer j and each batch k, it
 * makes the calls of Figure 4 in the order of the figure. Layer l, after the decoder layers, is the
 * head: final norm, logits, the next token. Prompts enter only between sweeps. A sequence with all
 * its tokens leaves between sweeps too; one that stops early leaves at the latest when its batch
 * begins its part of the next sweep (batch.c).
 *
 * Read every function here as if each call happened at once, in the order in which it is made. In
 * fact calls only post ops on lanes. device/depend.c derives from the views that an op reads and
 * writes which earlier ops it must wait for; everything else may overlap. Two things no view shows,
 * and the caller tells them: that memory changes its owner (depend_join in batch.c), and that it is
 * cut anew (depend_fold in load_part). compute(j, k) calls project, attend and finish, in prefill
 * for one piece after the other. HIDDEN has two or three workspaces (Policy.workspaces), but no
 * more than there are batches. QKV and ATTENDED have three; they have fewer only if there are fewer
 * batches and each batch is one piece. They rotate, so that while the CPU attends for batch k, the
 * GPU finishes batch k-1 and projects batch k+1.
 * Read next: batch.c.
 */
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
 *   x          ACTIVATIONS --------- load_activation ---> HIDDEN            [Square.number mod batch_slots]
 *              of Batch.plan_place                             |    or stays in its ACTIVATIONS if
 *                                                              |    all of it rests on the GPU
 *                                                         - project -
 *                                                              |
 *   q, k, v                                               QKV               [Batch.turn mod piece_slots]
 *                                                              |
 *   new k, v   KV_CACHE <----------- store_cache -------- QKV, or NEW_KV_PACKED [same turn];
 *              the pages of layer j                            |    passes NEW_KV on the CPU
 *                                                              |
 *   pages      KV_CACHE ------------ load_cache --------> KV_STAGING        [Square.number mod 2];
 *                                                              |    pages at home on the GPU are
 *                                                              |    used in place, and project
 *                                                              |    appends the new k, v to them
 *                                                         - attend -        on the GPU, or on the CPU
 *                                                              |    where the pages are: QUERY goes
 *                                                              |    down and ATTENDED comes up
 *   o                                                     ATTENDED          [Batch.turn mod piece_slots]
 *                                                              |
 *                                                         - finish -
 *                                                              |
 *   x          ACTIVATIONS <-------- store_activation --- HIDDEN of the same square
 *
 * For the head load_activation brings x to HEAD_ROWS, and nothing is stored.
 *
 * Square.number counts squares: a slot that rotates by it is in use while the neighbours of its square use
 * the next ones. Batch.turn counts pieces: a slot that rotates by it is used by one piece at a time. Rows of
 * ACTIVATIONS are the batch's own from sweep to sweep (Batch.plan_place), pages are their sequence's own. A
 * slot has one or more cells. A cell is always used as a whole; depend.c orders ops by cells (number_cells in
 * plan.c). */
// clang-format on

/* The staging slot of a layer that loads or computes. */
typedef struct {
    int slot;      /* has the layer's tensors that do not rest on the GPU */
    bool unpacked; /* the layer's packed matrices have been unpacked to F16 */
} LayerSlot;

/* A square of the sweep, with the views that the calls of Figure 4 share. */
typedef struct {
    Batch *batch;
    Call call;        /* the place of its ops, but for lane and kind */
    long number;      /* in the run; HIDDEN and KV_STAGING rotate by it */
    Tensor x;         /* the hidden state while it is computed */
    PageTable staged; /* its pages in staging, on the tier of the processor that attends to them */

    Piece piece;         /* the piece of it that is computed; the whole batch if it decodes */
    int on_gpu, off_gpu; /* rows whose cache is on the GPU; the other rows, which come after them */
    Tensor x_piece;      /* its rows of x */
    Tensor qkv, q, kv;   /* (rows, 3 h1), of which q has the first h1 columns, kv the others */
    Tensor kv_to_leave, kv_on_cpu; /* the off_gpu rows of kv as pages store them, on GPU and CPU */
    Tensor attended, attended_off_gpu; /* the result of attention; its off_gpu rows, which have a
                                          cell of their own, because other lanes write them */
} Square;

/* One run of the schedule. */
typedef struct {
    const Plan *plan;
    Poster *to;
    Flight *flights; /* [policy.flights] */
    Flight *flight;  /* the one that sweeps */
    Shared shared;
    int l,         /* decoder layers, and so the number of the head */
        i;         /* the number of this sweep, over all flights */
    long base;     /* squares of the earlier sweeps */
    long streamed; /* even: the next layer that streams takes the first slot; odd: the other */
    long turn;     /* pieces so far */
    LayerSlot now, next; /* the layer that computes; the layer that loads meanwhile */
    bool next_is_layer0; /* `next` is layer 0 of the coming sweep */
    Square square;       /* the one whose ops are posted now */
    Move *near, *far;    /* scratch: the moves of the copies that `carry` posts */
    int nnear, nfar;
} Run;

// -------------------------------------------------------------------------------------------------
// Figure 4
// -------------------------------------------------------------------------------------------------

/* The calls of Figure 4. While square (j, k) computes, the results of its neighbours are stored and
 * their inputs loaded. j is a layer, and k the place of a batch in the sweep: -1 stands for the
 * last batch of layer j-1, and K for the first batch of layer j+1. load_weight takes the layer that
 * is to be loaded, where l + 1 stands for layer 0 of the next sweep; its k is a part of that layer.
 *
 * DIFFERS: some work of a call is done elsewhere. In prefill compute stores the new k and v, piece
 * by piece, and store_cache nothing. begin loads the cache of layer 0, and load_cache that of the
 * other layers. compute moves the rows of x that rest on the GPU, and load_activation the others.
 */
static void load_weight(Run *run, int j, int k);
static void store_activation(Run *run, int j, int k);
static void store_cache(Run *run, int j, int k);
static void load_cache(Run *run, int j, int k);
static void load_activation(Run *run, int j, int k);
static void compute(Run *run, int j, int k);
static bool synchronize(Run *run); /* false: the run has failed */

static void load_part(Run *run, int j, int k, int K);
static bool begin(Run *run, int k);

/* Computes one token of every sequence of the flight: Figure 4 from its second line on. */
static void sweep(Run *run) {
    int K = run->flight->K;
    if (!run->next_is_layer0) {
        run->streamed += run->streamed % 2; /* begin with the first slot, as plan_slots assumes */
        load_part(run, 0, 0, 1);
    }
    run->next_is_layer0 = false;
    long streamed = run->streamed;
    for (int j = 0; j <= run->l; j++) { /* l: the head */
        /* what has been loaded is now the layer that computes */
        run->now = run->next;
        run->next = (LayerSlot){0};
        for (int k = 0; k < K; k++) {
            /* With K = 1 square k + 1 is the batch's own in layer j + 1, and its hidden state does
             * not exist yet: what is loaded is that of this square, which layer j - 1 has stored.
             * The cache of layer j + 1 is other data and can be loaded ahead. */
            int arriving = K > 1 ? k + 1 : k;
            load_weight(run, j + 1, k);
            store_activation(run, j, k - 1);
            store_cache(run, j, k - 1);
            if (!j && !begin(run, k))
                return;
            load_cache(run, j, k + 1);
            load_activation(run, j, arriving);
            compute(run, j, k);
            if (!synchronize(run))
                return;
        }
        /* All sequences turned out to have ended when their batches began. The weights of layer 0
         * are kept for the next sweep; those of layer 1 are loaded again when they are needed. */
        if (!j && flight_is_empty(run->flight)) {
            run->next = run->now;
            run->next_is_layer0 = true;
            run->streamed = streamed;
            return;
        }
    }
    run->base += (long)(run->l + 1) * K;
    run->i++;
    flight_end_posting(run->flight);
}

// -------------------------------------------------------------------------------------------------
// Squares and their views
// -------------------------------------------------------------------------------------------------

/* Returns true if layer j is the head. */
static bool is_head(const Run *run, int j) { return j == run->l; }

/* Returns true if all rows of the batch's hidden state rest on the GPU. */
static bool x_rests_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }

/* Return rows of a workspace: squares take its slots in turn, or pieces do. */
static Tensor square_slot(const Run *run, RegionId id, Tier tier, int rows) {
    return plan_view(run->plan, id, tier, run->square.number, 0, rows);
}
static Tensor piece_slot(const Run *run, RegionId id, Tier tier, int rows) {
    return plan_view(run->plan, id, tier, run->square.batch->turn, 0, rows);
}

/* Returns places for pages in staging on a tier; there are two sets of them, which squares take in
 * turn. */
static PageTable staging(const Run *run, Tier tier, int npages) {
    return plan_pages(run->plan, KV_STAGING, tier, 2 * run->square.number, npages);
}

/* Returns the hidden state of the square while it is computed: in place if all of it rests on the
 * GPU, otherwise in the workspace. The head has the rows that it needs in a workspace of its own.
 */
static Tensor hidden(const Run *run) {
    const Square *s = &run->square;
    if (is_head(run, s->call.j))
        return square_slot(run, HEAD_ROWS, TIER_GPU, s->batch->head_rows);
    if (x_rests_on_gpu(s->batch))
        return batch_activations(run->flight, s->batch, TIER_GPU);
    return square_slot(run, HIDDEN, TIER_GPU, s->batch->rows);
}

/* Returns the staged pages of the square. */
static PageTable staged_pages(const Run *run) {
    const Square *s = &run->square;
    Tier side = s->call.delegated ? TIER_CPU : TIER_GPU;
    PageTable t = staging(run, side, s->batch->nstaged[TIER_CPU] + s->batch->nstaged[TIER_DISK]);
    t.pages = batch_tables(s->batch, side)->staged;
    t.len = batch_tables(s->batch, side)->len;
    return t;
}

/* Goes to square (j, k), where k is a place in the sweep: it becomes run->square. Its batch may
 * have no members left; the views are then of no use. */
static void go_to(Run *run, int j, int k) {
    const Flight *f = run->flight;
    Batch *b = f->in_sweep[k];
    run->square = (Square){.batch = b,
                           .call = {.prefill = b->prefill,
                                    .prefill_sweep = f->prefill,
                                    .delegated = run->plan->policy.delegated && !b->prefill,
                                    .i = run->i,
                                    .j = j,
                                    .k = k,
                                    .batch = b->admitted_as},
                           .number = run->base + (long)j * f->K + k};
    run->square.x = hidden(run);
    run->square.staged = staged_pages(run);
}

/* Goes to square (j, k), where k may also be -1 or K (see above). Returns false outside the sweep,
 * or if the batch has no members left. */
static bool find_square(Run *run, int j, int k) {
    int K = run->flight->K;
    if (k < 0) {
        k += K;
        j--;
    }
    if (k >= K) {
        k -= K;
        j++;
    }
    if (j < 0 || j > run->l || !run->flight->in_sweep[k]->nseq)
        return false;
    go_to(run, j, k);
    return true;
}

/* Returns the pages of the square that rest on a tier. */
static PageTable home_pages(const Run *run, Tier tier) {
    return batch_pages(run->flight, run->square.batch, tier, run->square.call.j);
}

/* Goes on to the square's next piece, which takes this turn of the workspaces. Returns false if
 * there is none. */
static bool find_piece(Run *run, long turn) {
    const Plan *p = run->plan;
    Square *s = &run->square;
    if (!batch_piece(run->flight, s->batch, &s->piece))
        return false;
    s->batch->turn = turn;
    int rows = s->piece.rows, h1 = p->config.h1;
    s->on_gpu = s->piece.kv_rows[TIER_GPU];
    s->off_gpu = rows - s->on_gpu;
    s->x_piece = tensor_cells(tensor_rows(s->x, s->piece.row, rows), s->piece.number, 1);
    s->qkv = piece_slot(run, QKV, TIER_GPU, rows);
    s->q = tensor_cols(s->qkv, 0, h1);
    s->kv = tensor_cols(s->qkv, h1, 2 * h1);
    /* if pages are packed, PROJECT packs what leaves */
    s->kv_to_leave = p->policy.cache_packed ? piece_slot(run, NEW_KV_PACKED, TIER_GPU, s->off_gpu)
                                            : tensor_rows(s->kv, s->on_gpu, s->off_gpu);
    s->kv_on_cpu = piece_slot(run, NEW_KV, TIER_CPU, s->off_gpu);
    s->attended = piece_slot(run, ATTENDED, TIER_GPU, rows);
    s->attended_off_gpu = tensor_cells(tensor_rows(s->attended, s->on_gpu, s->off_gpu), 1, 1);
    return true;
}

/* Returns the Call for ops on the data of the square, on a lane. */
static Call call_on(const Run *run, Lane lane, Kind kind) {
    Call call = run->square.call;
    call.lane = lane;
    call.kind = kind;
    if (kind == WEIGHT)
        call.prefill = call.prefill_sweep;
    return call;
}

/* Posts a copy of one view. */
static void copy(Run *run, Call call, Tensor dst, Tensor src) {
    Move move = {dst, src};
    post(run->to, op_copy(call, &move, 1));
}

// -------------------------------------------------------------------------------------------------
// Between home and GPU
// -------------------------------------------------------------------------------------------------

// clang-format off
/* What rests on the CPU is one hop away from the GPU, and what rests on disk is two, because it stops on
 * the CPU in between:
 *
 *                           far hop                       near hop
 *
 *   a load    from disk     disk -> CPU, on X_READ        CPU -> GPU, on X_LOAD
 *             from the CPU                                CPU -> GPU
 *   a store   to disk       CPU -> disk, on D_WRITE       GPU -> CPU, on STORE
 *             to the CPU                                  GPU -> CPU
 *
 * The far hops are one op, and so are the near ones, so that the disk can read the next part while the link
 * carries this one. The same serves rows that move within the GPU, on a lane that has no disk's lane. */
// clang-format on

/* Adds data to run->near and run->far: its place on the GPU, its stop on the CPU, its home. Where
 * the CPU attends, pages go no farther than to their stop. */
static void add_way(Run *run, Tensor gpu, Tensor stop, Tensor home, bool store) {
    Tensor below = home;
    if (home.tier == TIER_DISK) {
        below = stop;
        run->nfar = store ? add_move(run->far, run->nfar, home, stop)
                          : add_move(run->far, run->nfar, stop, home);
    }
    if (gpu.tier == TIER_GPU)
        run->nnear = store ? add_move(run->near, run->nnear, below, gpu)
                           : add_move(run->near, run->nnear, gpu, below);
}

/* Adds the rows of a route. In x all rows lie as they do at home, whatever is stored of them. */
static void add_route(Run *run, const Route *route, Tensor gpu, Tensor stop, Tensor home,
                      bool store) {
    for (const Leg *leg = route->leg; leg < route->leg + route->n; leg++) {
        int row = store ? leg->home : leg->gpu;
        add_way(run, tensor_rows(gpu, row, leg->rows), tensor_rows(stop, row, leg->rows),
                tensor_rows(home, leg->home, leg->rows), store);
    }
}

/* Posts what has been added, on call.lane and the disk's lane that belongs to it. */
static void carry(Run *run, Call call) {
    static const Lane disk_lane[NLANES] = {[W_LOAD] = W_READ, [C_LOAD] = C_READ, [STORE] = D_WRITE};
    Op near = op_copy(call, run->near, run->nnear);
    call.lane = disk_lane[call.lane];
    Op far = op_copy(call, run->far, run->nfar);
    if (run->nfar && near.lane != STORE)
        post(run->to, far);
    if (run->nnear)
        post(run->to, near);
    if (run->nfar && near.lane == STORE)
        post(run->to, far);
    run->nnear = run->nfar = 0;
}

// -------------------------------------------------------------------------------------------------
// load_weight
// -------------------------------------------------------------------------------------------------

// clang-format off
/* The tensors of a layer that do not rest on the GPU stream as one slab. While the layer before
 * computes for its K batches, part k of the slab is loaded beside batch k. Here K is 3, and fc2 is
 * on disk (biases and norms are not drawn):
 *
 *   slab       |  cpu_slab                      |  disk_slab    |
 *   tensors    | q | k | v | o |      fc1       |      fc2      |
 *   parts      |     0    |    1     |    2     |  0 |  1  |  2 |
 *
 * The CPU's share and the disk's share are each cut into K equal parts, and part k has the k-th of
 * both. Its moves bring the bytes of each tensor that lie in it from the tensor's home to their
 * place in the slot: those of part 0 are of q, k, v and fc2. */
// clang-format on

/* Returns where part k of K equal parts begins, at a whole cache line. */
static Bytes part_begin(Bytes bytes, int k, int K) { return bytes / 64 * k / K * 64; }

/* Adds the ways of bytes first .. end-1 of layer j's slab to the slot of run->next; k is the part
 * of the layer that they belong to. */
static void add_slab(Run *run, int j, Bytes first, Bytes end, int k) {
    const Plan *p = run->plan;
    RegionId slot = (RegionId)(WEIGHT_SLOT + run->next.slot);
    for (int i = 0; i < (is_head(run, j) ? 1 : NROLES); i++) {
        const WeightPlace *place =
            is_head(run, j) ? &p->global[p->head] : &p->weight[j][p->slab_order[j][i]];
        Bytes begin = place->slab_offset, from = first > begin ? first : begin;
        Bytes to = size_min(end, begin + place->slab_bytes);
        Tensor src = place->home;
        if (src.tier == TIER_GPU || from >= to)
            continue;
        /* The slab holds F16, the checkpoint perhaps numbers of 4 bytes: so count elements. Packed
         * bytes count as F16, two at a time. */
        if (src.type == U8)
            src.type = F16;
        src.rows = 1;
        src.cols = (int)((to - from) / 2);
        src.offset += (from - begin) / 2 * type_bytes(src.type);
        Tensor stop = plan_bytes(p, slot, TIER_CPU, from - p->slab[TIER_CPU][j], F16, src.cols);
        add_way(run, plan_bytes(p, slot, TIER_GPU, from, F16, src.cols), tensor_cells(stop, k, 1),
                src, false);
    }
}

/* Loads part k of K of layer j into the slot of run->next. */
static void load_part(Run *run, int j, int k, int K) {
    const Plan *p = run->plan;
    Bytes cpu = p->slab[TIER_CPU][j], disk = p->slab[TIER_DISK][j];
    if (!cpu && !disk)
        return;
    if (!k)
        run->next = (LayerSlot){.slot = (int)(run->streamed++ % 2)};
    Tensor on_cpu = plan_view(p, (RegionId)(WEIGHT_SLOT + run->next.slot), TIER_CPU, 0, 0, 1);
    /* Each part is a cell of the slot on the CPU. The layer that had the slot before was cut at
     * other borders, so each new part comes after all of its parts. */
    if (!k && disk)
        depend_fold(run->to->depend, &on_cpu);
    add_slab(run, j, part_begin(cpu, k, K), part_begin(cpu, k + 1, K), k);
    add_slab(run, j, cpu + part_begin(disk, k, K), cpu + part_begin(disk, k + 1, K), k);
    go_to(run, j, k);
    run->square.call.i += run->next_is_layer0;
    carry(run, call_on(run, W_LOAD, WEIGHT));
}

/* Returns true if some flight will sweep at least once more. */
static bool goes_on(const Run *run) {
    for (int g = 0; g < run->plan->policy.flights; g++)
        if (flight_goes_on(&run->flights[g]))
            return true;
    return false;
}

/* Loads part k of the weights of layer j, the next layer (Figure 4). After the head comes layer 0
 * of the next sweep, if there is one. */
static void load_weight(Run *run, int j, int k) {
    if (j > run->l) {
        if (!goes_on(run))
            return;
        run->next_is_layer0 = true;
        j = 0;
    }
    load_part(run, j, k, run->flight->K);
}

// -------------------------------------------------------------------------------------------------
// store_activation
// -------------------------------------------------------------------------------------------------

/* Returns true if the hidden state rests between layers j-1 and j. It does not before layer 0, and
 * not before the head if this stage sends it on to the next one. */
static bool rests_before(const Run *run, int j) {
    return j > 0 && j < run->l + is_last(&run->plan->config);
}

// clang-format off
/* Moves the rows of the hidden state that rest on one tier: after layer j from x, where it was computed, to
 * their home (store), or before layer j from their home to x. The head needs only the last rows of each
 * sequence, so only these make the last way. Of sequences a and b with 3 and 2 rows on CPU or disk:
 *
 *                                 x                        home
 *   between two layers            a1 a2 a3 b1 b2    <->    a1 a2 a3 b1 b2
 *   stored after the last layer   a1 a2 a3 b1 b2     ->           a3    b2
 *   loaded before the head        a3 b2             <-            a3    b2 */
// clang-format on
static void move_activation(Run *run, Tier tier, bool store) {
    static const Lane lane[2][NTIERS] = {
        {PROJECT, C_LOAD, C_LOAD}, /* of a load, by the tier of the home */
        {FINISH, STORE, STORE},    /* of a store */
    };
    const Batch *b = run->square.batch;
    int j = run->square.call.j, first = 0; /* row of x where the tier's rows begin */
    if (!b->act_rows[tier] || x_rests_on_gpu(b))
        return;
    for (int t = 0; t < (int)tier; t++)
        first += is_head(run, j) ? b->act_head_rows[t] : b->act_rows[t];
    /* A store before the head leaves out what the head does not need, but for the rows at home on
     * the GPU: compute_head chooses among them. */
    bool for_head = tier != TIER_GPU && is_head(run, j + store);
    add_route(run, for_head ? &b->x_for_head[tier] : &b->x[tier],
              tensor_rows(run->square.x, first, b->act_rows[tier]),
              square_slot(run, store ? ACT_WRITING : ACT_READING, TIER_CPU, b->act_rows[TIER_DISK]),
              batch_activations(run->flight, b, tier), store);
    carry(run, call_on(run, lane[store][tier], ACTIVATION));
}

/* Stores the hidden state (Figure 4), unless it was computed where it rests. */
static void store_activation(Run *run, int j, int k) {
    if (!find_square(run, j, k) || !rests_before(run, run->square.call.j + 1))
        return;
    for (int t = 0; t < NTIERS; t++)
        move_activation(run, (Tier)t, true);
}

// -------------------------------------------------------------------------------------------------
// store_cache
// -------------------------------------------------------------------------------------------------

/* Posts an op that appends kv, the new k and v of the batch's rows from `first` on, to pages. */
static void append(Run *run, Lane lane, PageTable pages, Tensor kv, int first) {
    const Tables *t = batch_tables(run->square.batch, pages.k.tier);
    Op op =
        op_append(call_on(run, lane, CACHE), &pages, kv, tensor_cols(t->row_seq, first, kv.rows),
                  tensor_cols(t->row_token, first, kv.rows));
    op.study = run->plan->policy.cache_study;
    post(run->to, op);
}

/* Stores the new k and v of a piece's rows whose cache is on the CPU or on disk. If the CPU
 * attends, all of them have come down with the queries, and attend_to has appended those of the
 * CPU's pages. */
static void store_piece(Run *run) {
    const Square *s = &run->square;
    bool came_down = s->call.delegated;
    if (!s->off_gpu)
        return;
    if (!came_down)
        copy(run, call_on(run, STORE, CACHE), s->kv_on_cpu, s->kv_to_leave);
    int row = 0;
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        int n = s->piece.kv_rows[t];
        if (n && !(came_down && t == TIER_CPU))
            append(run, t == TIER_CPU ? ATTEND : D_WRITE, home_pages(run, (Tier)t),
                   tensor_rows(s->kv_on_cpu, row, n), s->piece.row + s->on_gpu + row);
        row += n;
    }
}

/* Stores the new k and v of a decoding batch (Figure 4); compute has stored those of a prefill,
 * piece by piece. */
static void store_cache(Run *run, int j, int k) {
    if (find_square(run, j, k) && !is_head(run, run->square.call.j) &&
        !run->square.batch->prefill && find_piece(run, run->square.batch->turn))
        store_piece(run);
}

// -------------------------------------------------------------------------------------------------
// load_cache
// -------------------------------------------------------------------------------------------------

/* Copies the pages that hold past tokens into staging: all pages that are not on the GPU to the
 * GPU, or, if the CPU attends, the disk's pages to the CPU (fill_tables then lists no others). With
 * sparse attention only K moves; attend_rows fetches the V that it reads. */
static void bring_cache(Run *run) {
    const Batch *b = run->square.batch;
    PageTable to = run->square.staged;
    PageTable stop = staging(run, TIER_CPU, b->nstaged[TIER_DISK]);
    int row = 0;
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        PageTable home = home_pages(run, (Tier)t);
        add_route(run, &b->past[t], tensor_rows(to.k, row, 0), stop.k, home.k, false);
        if (!is_sparse(&run->plan->policy))
            add_route(run, &b->past[t], tensor_rows(to.v, row, 0), stop.v, home.v, false);
        carry(run, call_on(run, C_LOAD, CACHE));
        row += b->nstaged[t] * to.page_tokens;
    }
}

/* Loads the cache of the coming square (Figure 4). For layer 0, begin does this. */
static void load_cache(Run *run, int j, int k) {
    if (find_square(run, j, k) && run->square.call.j && !is_head(run, run->square.call.j))
        bring_cache(run);
}

// -------------------------------------------------------------------------------------------------
// load_activation
// -------------------------------------------------------------------------------------------------

/* Loads the rows of the hidden state that do not rest on the GPU (Figure 4). */
static void load_activation(Run *run, int j, int k) {
    if (!find_square(run, j, k) || !rests_before(run, run->square.call.j))
        return;
    for (int t = TIER_CPU; t <= TIER_DISK; t++)
        move_activation(run, (Tier)t, false);
}

// -------------------------------------------------------------------------------------------------
// compute: project, attend, finish
//
// DIFFERS: Figure 4 computes a square as a whole. Here it is split around attention, so that while
// the CPU attends for one batch, the GPU works on its neighbours.
//
// Now read the second half of opt_model.c: the forward pass as ops, which these functions call.
// -------------------------------------------------------------------------------------------------

/* Fills w with the tensors of layer j where they are while it computes. For a batch of more than
 * packed_rows rows, packed matrices are first unpacked to F16, once for each layer and sweep,
 * before the first such batch. q, k and v are unpacked on PROJECT and the other matrices on FINISH,
 * because each of these lanes has then finished the layer before. */
static void ready_weights(Run *run, Tensor w[NROLES]) {
    const Plan *p = run->plan;
    bool many_rows = run->square.batch->rows > p->packed_rows;
    for (int r = 0; r < NROLES; r++) {
        Tensor streamed = plan_weight(p, &p->weight[run->square.call.j][r], run->now.slot);
        bool unpack = streamed.type == U8 && many_rows;
        w[r] = unpack ? plan_f16(p, (Role)r) : streamed;
        if (unpack && !run->now.unpacked)
            post(run->to,
                 op_unpack(call_on(run, r < O_W ? PROJECT : FINISH, WEIGHT), w[r], streamed));
    }
    run->now.unpacked |= many_rows;
}

/* Gathers rows of the token table on the tier where the table rests, so that only these rows move,
 * and computes the hidden state of layer 0 from them. */
static void embed(Run *run) {
    const Plan *p = run->plan;
    const Batch *b = run->square.batch;
    Tensor x = run->square.x, table = p->global[TOK_EMBED].home;
    Tensor tokens =
        p->config.embed == p->config.h1 ? x : square_slot(run, EMBEDDED, TIER_GPU, b->rows);
    Call call = call_on(run, PROJECT, OTHER);
    if (table.tier == TIER_GPU) {
        post(run->to, op_embed(call, tokens, table, b->gpu.ids, false));
    } else {
        Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
        Tensor gathered = square_slot(run, EMBEDDED, TIER_CPU, b->rows);
        post(run->to, op_embed(call_on(run, lane, OTHER), gathered, table, b->cpu.ids, false));
        copy(run, call_on(run, C_LOAD, OTHER), tokens, gathered);
    }
    opt_embed(run->to, call, p, x, tokens, b->gpu.positions);
}

/* Receives the hidden state from the stage before: layer 0 of this stage begins where the last
 * layer of that stage has ended (section 4.4). device/pipeline.c says why stages cannot wait for
 * each other in a circle. */
static void receive(Run *run) {
    const Batch *b = run->square.batch;
    Tensor came = plan_view(run->plan, RECEIVED, TIER_CPU, b->plan_place, 0, b->rows);
    post(run->to, op_receive(call_on(run, RECEIVE, ACTIVATION), came));
    copy(run, call_on(run, C_LOAD, ACTIVATION), run->square.x, came);
}

/* Sends the hidden state to the next stage. */
static void send(Run *run) {
    const Batch *b = run->square.batch;
    Tensor sent = plan_view(run->plan, SENDING, TIER_CPU, b->plan_place, 0, b->rows);
    copy(run, call_on(run, STORE, ACTIVATION), sent, run->square.x);
    post(run->to, op_send(call_on(run, SEND, ACTIVATION), sent));
}

/* Computes q, k and v of the piece. Appends new k and v to the pages on the GPU. Packs those of
 * other pages, if pages are packed. */
static void project(Run *run, const Tensor w[NROLES]) {
    const Square *s = &run->square;
    opt_project(run->to, call_on(run, PROJECT, OTHER), run->plan, w, s->qkv, s->x_piece);
    if (s->off_gpu && run->plan->policy.cache_packed)
        post(run->to, op_pack(call_on(run, PROJECT, CACHE), s->kv_to_leave,
                              tensor_rows(s->kv, s->on_gpu, s->off_gpu), run->plan->config.nh));
    if (s->on_gpu)
        append(run, PROJECT, home_pages(run, TIER_GPU), tensor_rows(s->kv, 0, s->on_gpu),
               s->piece.row);
}

/* Returns the part of a batch's page table for its sequences first .. first+n-1. */
static PageTable table_rows(PageTable table, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    return table;
}

/* Posts sparse attention (section 5): it reads all of K, then V of the chosen tokens, which it
 * first fetches if the pages rest on disk. */
static void attend_sparsely(Run *run, Call call, PageTable pages, int first, Tensor o, Tensor q) {
    const Plan *p = run->plan;
    double sparsity = p->policy.sparsity;
    Tensor tokens = plan_view(p, CHOSEN, o.tier, 0, 0, q.rows);
    Tensor probs = plan_view(p, CHOSEN_PROBS, o.tier, 0, 0, q.rows);
    post(run->to, op_select(call, tokens, probs, q, &pages, sparsity));
    if (run->square.batch->seq[first]->kv == TIER_DISK) {
        PageTable home = table_rows(home_pages(run, TIER_DISK), first, q.rows);
        post(run->to, op_fetch(call_on(run, C_READ, CACHE), &pages, &home, tokens, sparsity));
    }
    post(run->to, op_weigh(call, o, tokens, probs, &pages, sparsity));
}

/* Posts the attention of one new token of each sequence from `first` on, which attend alike, to
 * their pages. These need the tokens' k and v first: kv has no rows if project has appended them.
 */
static void attend_to(Run *run, PageTable pages, int first, Tensor o, Tensor q, Tensor kv) {
    Lane lane = o.tier == TIER_CPU ? ATTEND : FINISH;
    Call call = call_on(run, lane, CACHE);
    if (kv.rows)
        append(run, lane, pages, kv, first);
    pages = table_rows(pages, first, q.rows);
    if (is_sparse(&run->plan->policy))
        attend_sparsely(run, call, pages, first, o, q);
    else
        post(run->to, op_attend(call, o, q, &pages));
}

/* Delegates attention to the CPU (section 4.2): queries and the new k and v go down, the CPU
 * attends where the pages are, or are staged from disk, and the results come up. */
static void attend_on_cpu(Run *run) {
    const Square *s = &run->square;
    int cpu = s->piece.kv_rows[TIER_CPU], disk = s->piece.kv_rows[TIER_DISK];
    Tensor query = piece_slot(run, QUERY, TIER_CPU, s->off_gpu);
    Tensor result = piece_slot(run, ATTENDED, TIER_CPU, s->off_gpu);
    Move down[] = {{query, tensor_rows(s->q, s->on_gpu, s->off_gpu)},
                   {s->kv_on_cpu, s->kv_to_leave}};
    post(run->to, op_copy(call_on(run, A_DOWN, CACHE), down, 2));
    if (cpu)
        attend_to(run, home_pages(run, TIER_CPU), s->on_gpu, tensor_rows(result, 0, cpu),
                  tensor_rows(query, 0, cpu), tensor_rows(s->kv_on_cpu, 0, cpu));
    if (disk)
        attend_to(run, s->staged, s->on_gpu + cpu, tensor_rows(result, cpu, disk),
                  tensor_rows(query, cpu, disk), tensor_rows(s->kv_on_cpu, cpu, disk));
    copy(run, call_on(run, A_UP, CACHE), s->attended_off_gpu, result);
}

// clang-format off
/* Posts the attention of the piece. In prefill it attends to the k and v that have just been computed. In
 * decoding, sequences attend alike by the home of their pages. Pages in staging get the new tokens twice:
 * there, where attention must see them, and at home.
 *
 *   home    the CPU attends    attends to pages      on        appends at home on
 *
 *   GPU     yes or no          at home, the GPU's    FINISH    PROJECT (project)
 *   CPU     no                 staged on the GPU     FINISH    ATTEND  (store_piece)
 *   disk    no                 staged on the GPU     FINISH    D_WRITE (store_piece)
 *   CPU     yes                at home, the CPU's    ATTEND    ATTEND  (attend_to)
 *   disk    yes                staged on the CPU     ATTEND    D_WRITE (store_piece)
 */
// clang-format on
static void attend(Run *run) {
    const Square *s = &run->square;
    bool delegated = s->call.delegated;
    if (s->batch->prefill) {
        /* each earlier piece has one entry more than sequences: its end */
        Tensor start =
            tensor_cols(s->batch->gpu.start, s->piece.first + s->piece.number, s->piece.nseq + 1);
        post(run->to, op_attend_prefill(call_on(run, FINISH, CACHE), s->attended, s->q, s->kv,
                                        start, run->plan->config.nh));
        return;
    }
    if (s->off_gpu && delegated)
        attend_on_cpu(run);
    if (s->on_gpu)
        attend_to(run, home_pages(run, TIER_GPU), 0,
                  tensor_cells(tensor_rows(s->attended, 0, s->on_gpu), 0, 1),
                  tensor_rows(s->q, 0, s->on_gpu), (Tensor){0});
    if (s->off_gpu && !delegated)
        attend_to(run, s->staged, s->on_gpu, s->attended_off_gpu,
                  tensor_rows(s->q, s->on_gpu, s->off_gpu), s->kv_to_leave);
}

/* Computes the half of the layer after attention for the piece. */
static void finish(Run *run, const Tensor w[NROLES]) {
    const Square *s = &run->square;
    opt_finish(run->to, call_on(run, FINISH, OTHER), run->plan, w, s->x_piece, s->attended);
}

/* Chooses the next token of each sequence from its logits, on the processor that has them. In a
 * scored task it computes, for the head's rows from `first` on, the probability of the given token
 * and the greedy choice. */
static void choose_tokens(Run *run, Tensor logits, int first) {
    const Flight *f = run->flight;
    const Batch *b = run->square.batch;
    Call call = call_on(run, logits.tier == TIER_CPU ? ATTEND : PROJECT, OTHER);
    const Tables *t = batch_tables(b, logits.tier);
    int n = logits.rows;
    Tensor ids = tensor_cols(batch_newest(f, b, NEW_TOKENS, logits.tier), first, n);
    if (!f->task->scored) {
        CHECK(first == 0); /* one row a sequence: max_seqs rows are one chunk (see head_chunk) */
        post(run->to, op_pick(call, ids, logits, t->prompt, t->len, f->task->prompts));
        return;
    }
    Tensor logp = tensor_cols(batch_newest(f, b, LOG_PROBS, TIER_GPU), first, n);
    post(run->to, op_score(call, logp, ids, logits, tensor_cols(t->target, first, n)));
}

/* Copies the chosen tokens to the CPU, and the logits if they are kept or if the CPU is to choose
 * from them. */
static void bring_down(Run *run, Tensor logits) {
    const Batch *b = run->square.batch;
    const Flight *f = run->flight;
    Tier chooser = run->plan->chooser;
    Move moves[2];
    int n = 0;
    if (chooser == TIER_GPU)
        moves[n++] = (Move){batch_newest(f, b, NEW_TOKENS, TIER_CPU),
                            batch_newest(f, b, NEW_TOKENS, TIER_GPU)};
    if (f->task->scored)
        moves[n++] = (Move){batch_newest(f, b, LOG_PROBS, TIER_CPU),
                            batch_newest(f, b, LOG_PROBS, TIER_GPU)};
    if (f->task->keep_logits || chooser == TIER_CPU)
        moves[n++] = (Move){batch_logits(f, b, 0, b->nseq), logits};
    post(run->to, op_copy(call_on(run, A_DOWN, OTHER), moves, n));
}

/* Computes layer l, the head. It turns the rows that the head needs (the last of each sequence, or
 * more in a scored task) into logits, head_chunk rows at a time. */
static void compute_head(Run *run) {
    const Plan *p = run->plan;
    const Batch *b = run->square.batch;
    int resting = b->act_head_rows[TIER_GPU];
    Call call = call_on(run, PROJECT, OTHER);
    Tensor head = plan_weight(p, &p->global[p->head], run->now.slot), x = run->square.x;
    Tensor logits = {.rows = 0};
    /* load_activation has brought the rows that rest elsewhere; those on the GPU are gathered here
     */
    if (resting)
        post(run->to,
             op_embed(call, tensor_rows(x, 0, resting), batch_activations(run->flight, b, TIER_GPU),
                      tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->head_rows; first += p->head_chunk) {
        int n = imin(p->head_chunk, b->head_rows - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(run->to, call, p, head, logits, tensor_rows(x, first, n));
        if (p->chooser == TIER_GPU)
            choose_tokens(run, logits, first);
    }
    bring_down(run, logits);
    if (p->chooser == TIER_CPU)
        choose_tokens(run, batch_logits(run->flight, b, 0, b->nseq), 0);
}

/* Computes layer j of batch k (Figure 4). */
static void compute(Run *run, int j, int k) {
    const OptConfig *config = &run->plan->config;
    if (!find_square(run, j, k))
        return;
    if (is_head(run, j)) {
        if (is_last(config))
            compute_head(run);
        return;
    }
    Tensor w[NROLES];
    ready_weights(run, w);
    if (!j && is_first(config))
        embed(run);
    if (j)
        move_activation(run, TIER_GPU, false);
    for (; find_piece(run, run->turn); run->turn++) {
        project(run, w);
        if (run->square.batch->prefill)
            store_piece(run);
        attend(run);
        finish(run, w);
    }
    if (is_head(run, j + 1) && !is_last(config))
        send(run);
}

// -------------------------------------------------------------------------------------------------
// synchronize, and the sweeps of a run
// -------------------------------------------------------------------------------------------------

/* Waits for all lanes, as Figure 4 waits for all devices. DIFFERS: every op already waits for the
 * ops that it needs, so this waits only with --synchronize. Returns false when the run has
 * failed. */
static bool synchronize(Run *run) {
    return run->plan->policy.synchronize ? post_drain(run->to) : !run->to->failed;
}

/* Begins batch k's part in this sweep: waits for its newest tokens, copies its index tables to the
 * GPU, and loads what its first square needs. Returns false when the run has failed. */
static bool begin(Run *run, int k) {
    if (!batch_begin(run->flight, run->flight->in_sweep[k]))
        return !run->to->failed;
    go_to(run, 0, k);
    const Batch *b = run->square.batch;
    copy(run, call_on(run, C_LOAD, OTHER), b->gpu.all, b->cpu.all);
    if (!is_first(&run->plan->config))
        receive(run);
    /* load_cache does this for the other layers, one square ahead */
    bring_cache(run);
    return !run->to->failed;
}

/* Records in the trace how many pages and sequences all flights together hold now. */
static void note_held(const Run *run) {
    Held held = {.at = run->shared.sweep_end};
    for (int g = 0; g < run->plan->policy.flights; g++) {
        const Flight *f = &run->flights[g];
        for (int t = 0; t < NTIERS; t++)
            held.pages[t] += f->pool[t].used;
        held.sequences += f->admission.seated;
    }
    if (run->to->device->trace)
        trace_hold(run->to->device->trace, &held);
}

/* Runs the loop that section 4.4 adds, and Figure 4's loop over i: flights sweep in turn until all
 * are empty. */
static void sweep_all(Run *run) {
    int flights = run->plan->policy.flights;
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
    double prefill = 0, decode = 0;
    for (int lane = PROJECT; lane <= ATTEND; lane++) { /* the lanes of processors */
        const LaneCount *count = &device->count[lane];
        prefill += count->prefill_s;
        decode += count->busy_s - count->prefill_s;
    }
    double beside = s->decoded ? decode * s->beside / s->decoded : 0;
    s->prefill_s = s->prefill_sweeps_s * (beside > 0 ? prefill / (prefill + beside) : 1);
    s->decode_s = s->total_s - s->prefill_s;
}

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener,
                 RunStats *stats, Error *err) {
    int flights = plan->policy.flights;
    Poster to = {.device = device,
                 .depend = depend_open(plan->ncells),
                 .overlap = plan->policy.overlap,
                 .err = err};
    /* the most moves of a copy: K and V of all pages of a batch, the rows of its sequences, or the
     * tensors of a layer */
    size_t moves = 2 * (size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES;
    Run run = {.plan = plan,
               .to = &to,
               .flights = xcalloc(flights, sizeof *run.flights),
               .shared = {.sweep_end = device->now(device)},
               .l = plan->config.l,
               .near = xcalloc(moves, sizeof *run.near),
               .far = xcalloc(moves, sizeof *run.far)};
    CHECK(!is_sparse(&plan->policy) || plan->policy.delegated);
    *stats = (RunStats){0};
    for (int g = 0; g < flights; g++) {
        run.flights[g] = (Flight){.plan = plan,
                                  .task = task,
                                  .listener = listener,
                                  .stats = stats,
                                  .to = &to,
                                  .shared = &run.shared,
                                  .number = g};
        flight_open(&run.flights[g]);
    }
    if (task->count)
        sweep_all(&run);
    /* still on the lanes: the last stores, and weights for a sweep that did not take place */
    if (!to.failed && post_drain(&to))
        divide_seconds(stats, device);
    for (int g = 0; g < flights; g++)
        flight_close(&run.flights[g]);
    depend_close(to.depend);
    free(run.near);
    free(run.far);
    free(run.flights);
    return to.failed ? -1 : 0;
}
