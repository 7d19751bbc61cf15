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
 * writes which earlier ops it must wait for; everything else may overlap. One thing no view shows,
 * and the caller tells it: that memory changes its owner (depend_join in branches/pages.c).
 * compute(j, k) calls project, attend and finish, in prefill for one piece after the other. HIDDEN
 * has two or three workspaces (Policy.workspaces), but no more than there are batches. QKV and
 * ATTENDED have three; they have fewer only if there are fewer batches and each batch is one piece.
 * They rotate, so that while the CPU attends for batch k, the GPU finishes batch k-1 and projects
 * batch k+1. Read next: square.c. */
#include "device/device.h"
#include "schedule.h"

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
 * other layers. compute loads the rows of x that rest on the GPU, since they cross no link, and
 * load_activation the others.
 */
static void store_activation(Run *run, int j, int k);
static void store_cache(Run *run, int j, int k);
static void load_cache(Run *run, int j, int k);
static void load_activation(Run *run, int j, int k);
static void compute(Run *run, int j, int k);
static bool synchronize(Run *run); /* false: the run has failed */

/* Begins batch k's part in the sweep: its tokens, its tables, the cache of layer 0. */
static bool begin(Run *run, int k);

/* Computes one token of every sequence of the flight: Figure 4 from its second line on. With K = 1
 * square k + 1 is the same batch in layer j + 1, whose x this square has yet to make. So the x that
 * is loaded is this square's own, right after it was stored, with nothing to hide behind. The cache
 * of layer j + 1 is other data and can be loaded ahead. */
static void sweep(Run *run) {
    int K = run->flight->K;
    begin_weights(run);
    for (int j = 0; j <= run->l; j++) { /* l: the head */
        turn_weights(run);
        for (int k = 0; k < K; k++) {
            load_weight(run, j + 1, k);
            store_activation(run, j, k - 1);
            store_cache(run, j, k - 1);
            if (!j && !begin(run, k))
                return;
            load_cache(run, j, k + 1);
            load_activation(run, j, K > 1 ? k + 1 : k);
            compute(run, j, k);
            if (!synchronize(run))
                return;
        }
        /* begin has just seen the last tokens: all sequences had ended, and nothing was computed */
        if (!j && flight_is_empty(run->flight)) {
            keep_layer0(run);
            return;
        }
    }
    run->squares += (long)(run->l + 1) * K;
    run->i++;
    flight_end_posting(run->flight);
}

// -------------------------------------------------------------------------------------------------
// store_activation
// -------------------------------------------------------------------------------------------------

/* Returns true if the hidden state rests between layers j-1 and j. It does not before layer 0, and
 * not before the head if this stage sends it on to the next one. */
static bool rests_before(const Run *run, int j) {
    bool head_is_here = is_last_stage(&run->plan->config);
    return j > 0 && (j < run->l || (j == run->l && head_is_here));
}

/* Returns the rows of x that rest on a tier; rows[] counts the rows of x by the tiers on which they
 * rest, and x has them in the order of the tiers. */
static Tensor rows_of_tier(Tensor x, const int rows[NTIERS], Tier tier) {
    int first = 0;
    for (int t = 0; t < (int)tier; t++)
        first += rows[t];
    return tensor_rows(x, first, rows[tier]);
}

// clang-format off
/* Stores the rows of x that rest on a tier. The head needs only the last rows of each sequence. So after the
 * last layer only these are stored on CPU and disk. Rows at home on the GPU are all stored, and compute_head
 * takes from them what it needs. Sequences g, a and b have 2, 3 and 2 rows in prefill, and g rests on the GPU:
 *
 *                                 x                             home on the GPU    on CPU or disk
 *
 *   between two layers            g1 g2 a1 a2 a3 b1 b2    <->   g1 g2              a1 a2 a3 b1 b2
 *   stored after the last layer   g1 g2 a1 a2 a3 b1 b2     ->   g1 g2                    a3    b2
 *   loaded before the head           g2       a3    b2    <-                             a3    b2
 *                                    (compute_head)                                              */
// clang-format on
static void store_rows(Run *run, Tier tier) {
    const Batch *b = run->square.batch;
    bool for_head = tier != TIER_GPU && is_head(run, run->square.call.j + 1);
    Tensor landing = square_slot(run, ACT_WRITING, TIER_CPU, b->act_rows[TIER_DISK]);
    add_route(run, for_head ? &b->x_for_head[tier] : &b->x[tier],
              rows_of_tier(run->square.x, b->act_rows, tier), landing, activations(run, tier),
              true);
    carry(run, call_on(run, tier == TIER_GPU ? FINISH : STORE, ACTIVATION));
}

/* Stores the hidden state (Figure 4), unless it was computed where it rests. */
static void store_activation(Run *run, int j, int k) {
    if (!go_to_square(run, j, k) || !rests_before(run, run->square.call.j + 1) ||
        x_rests_on_gpu(run->square.batch))
        return;
    for (int t = 0; t < NTIERS; t++)
        store_rows(run, (Tier)t);
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
    post(run->poster, op);
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
        post_copy(run, call_on(run, STORE, CACHE), s->kv_on_cpu, s->kv_to_leave);
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
 * piece by piece. A batch that decodes is one piece: next_piece makes its views again, in the slot
 * that it had. */
static void store_cache(Run *run, int j, int k) {
    if (go_to_square(run, j, k) && !is_head(run, run->square.call.j) &&
        !run->square.batch->prefill && next_piece(run, run->square.batch->piece_turn))
        store_piece(run);
}

// -------------------------------------------------------------------------------------------------
// load_cache
// -------------------------------------------------------------------------------------------------

/* Copies the pages that hold past tokens into staging: all pages that are not on the GPU to the
 * GPU, or, if the CPU attends, the disk's pages to the CPU (stage_pages then lists no others). With
 * sparse attention only K moves. */
static void bring_cache(Run *run) {
    const Batch *b = run->square.batch;
    PageTable staged = run->square.staged, landing = run->square.landing;
    int row = 0;
    for (int t = TIER_CPU; t <= TIER_DISK; t++) {
        PageTable home = home_pages(run, (Tier)t);
        add_route(run, &b->past[t], tensor_rows(staged.k, row, 0), landing.k, home.k, false);
        if (!is_sparse(&run->plan->policy))
            add_route(run, &b->past[t], tensor_rows(staged.v, row, 0), landing.v, home.v, false);
        carry(run, call_on(run, C_LOAD, CACHE));
        row += b->nstaged[t] * staged.page_tokens;
    }
}

/* Loads the cache of the coming square (Figure 4). For layer 0, begin does this. */
static void load_cache(Run *run, int j, int k) {
    if (go_to_square(run, j, k) && run->square.call.j && !is_head(run, run->square.call.j))
        bring_cache(run);
}

// -------------------------------------------------------------------------------------------------
// load_activation
// -------------------------------------------------------------------------------------------------

/* Loads the rows of x that rest on a tier: before the head, only those that it needs (see the
 * picture above store_rows). */
static void load_rows(Run *run, Tier tier) {
    const Batch *b = run->square.batch;
    bool for_head = is_head(run, run->square.call.j);
    Tensor x = rows_of_tier(run->square.x, for_head ? b->act_head_rows : b->act_rows, tier);
    Tensor landing = square_slot(run, ACT_READING, TIER_CPU, b->act_rows[TIER_DISK]);
    add_route(run, for_head ? &b->x_for_head[tier] : &b->x[tier], x, landing,
              activations(run, tier), false);
    carry(run, call_on(run, tier == TIER_GPU ? PROJECT : C_LOAD, ACTIVATION));
}

/* Loads the rows of the hidden state that do not rest on the GPU (Figure 4). */
static void load_activation(Run *run, int j, int k) {
    if (!go_to_square(run, j, k) || !rests_before(run, run->square.call.j))
        return;
    for (int t = TIER_CPU; t <= TIER_DISK; t++)
        load_rows(run, (Tier)t);
}

// -------------------------------------------------------------------------------------------------
// compute: project, attend, finish
//
// DIFFERS: Figure 4 computes a square as a whole. Here it is split around attention, so that while
// the CPU attends for one batch, the GPU works on its neighbours.
//
// Now read the second half of opt_model.c: the forward pass as ops, which these functions call.
// -------------------------------------------------------------------------------------------------

/* Computes q, k and v of the piece. Appends new k and v to the pages on the GPU. Packs those of
 * other pages, if pages are packed. */
static void project(Run *run, const Tensor w[NROLES]) {
    const Square *s = &run->square;
    opt_project(run->poster, call_on(run, PROJECT, OTHER), run->plan, w, s->qkv, s->x_piece);
    if (s->off_gpu && run->plan->policy.cache_packed)
        post(run->poster, op_pack(call_on(run, PROJECT, CACHE), s->kv_to_leave,
                                  tensor_rows(s->kv, s->on_gpu, s->off_gpu), run->plan->config.nh));
    if (s->on_gpu)
        append(run, PROJECT, home_pages(run, TIER_GPU), tensor_rows(s->kv, 0, s->on_gpu),
               s->piece.row);
}

/* Posts the attention of one new token of each sequence from `first` on, which attend alike, to
 * their pages. These need the tokens' k and v first: kv has no rows if project has appended them.
 * append counts sequences in the batch, and attention in the table that it is given. */
static void attend_to(Run *run, PageTable pages, int first, Tensor o, Tensor q, Tensor kv) {
    Lane lane = o.tier == TIER_CPU ? ATTEND : FINISH;
    Call call = call_on(run, lane, CACHE);
    if (kv.rows)
        append(run, lane, pages, kv, first);
    pages = table_rows(pages, first, q.rows);
    if (is_sparse(&run->plan->policy))
        attend_sparsely(run, call, pages, first, o, q);
    else
        post(run->poster, op_attend(call, o, q, &pages));
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
    post(run->poster, op_copy(call_on(run, A_DOWN, CACHE), down, 2));
    if (cpu)
        attend_to(run, home_pages(run, TIER_CPU), s->on_gpu, tensor_rows(result, 0, cpu),
                  tensor_rows(query, 0, cpu), tensor_rows(s->kv_on_cpu, 0, cpu));
    if (disk)
        attend_to(run, s->staged, s->on_gpu + cpu, tensor_rows(result, cpu, disk),
                  tensor_rows(query, cpu, disk), tensor_rows(s->kv_on_cpu, cpu, disk));
    post_copy(run, call_on(run, A_UP, CACHE), s->attended_off_gpu, result);
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
        /* a piece of n sequences has n + 1 entries there: their first rows, and the end */
        Tensor start =
            tensor_cols(s->batch->gpu.start, s->piece.first + s->piece.index, s->piece.nseq + 1);
        post(run->poster, op_attend_prefill(call_on(run, FINISH, CACHE), s->attended, s->q, s->kv,
                                            start, run->plan->config.nh));
        return;
    }
    if (s->off_gpu && delegated)
        attend_on_cpu(run);
    if (s->on_gpu)
        attend_to(run, home_pages(run, TIER_GPU), 0, tensor_rows(s->attended, 0, s->on_gpu),
                  tensor_rows(s->q, 0, s->on_gpu), (Tensor){0});
    if (s->off_gpu && !delegated)
        attend_to(run, s->staged, s->on_gpu, s->attended_off_gpu,
                  tensor_rows(s->q, s->on_gpu, s->off_gpu), s->kv_to_leave);
}

/* Computes the half of the layer after attention for the piece. */
static void finish(Run *run, const Tensor w[NROLES]) {
    const Square *s = &run->square;
    opt_finish(run->poster, call_on(run, FINISH, OTHER), run->plan, w, s->x_piece, s->attended);
}

/* Computes layer j of batch k (Figure 4). */
static void compute(Run *run, int j, int k) {
    if (!go_to_square(run, j, k))
        return;
    if (is_head(run, j)) {
        compute_head(run);
        return;
    }
    Tensor w[NROLES];
    ready_weights(run, w);
    if (!j)
        embed(run);
    else if (!x_rests_on_gpu(run->square.batch))
        load_rows(run, TIER_GPU);
    for (; next_piece(run, run->pieces); run->pieces++) {
        project(run, w);
        if (run->square.batch->prefill)
            store_piece(run);
        attend(run);
        finish(run, w);
    }
    if (is_head(run, j + 1))
        send_hidden(run);
}

// -------------------------------------------------------------------------------------------------
// synchronize, and the sweeps of a run
// -------------------------------------------------------------------------------------------------

/* Waits for all lanes, as Figure 4 waits for all devices. DIFFERS: every op already waits for the
 * ops that it needs, so this waits only with --synchronize. Returns false when the run has
 * failed. */
static bool synchronize(Run *run) {
    return run->plan->policy.synchronize ? post_drain(run->poster) : !run->poster->failed;
}

/* Begins batch k's part in this sweep: waits for its newest tokens, and until its index tables may
 * be filled, copies these to the GPU, and loads what its first square needs. Returns false when the
 * run has failed. */
static bool begin(Run *run, int k) {
    if (!batch_begin(run->flight, run->flight->in_sweep[k]))
        return !run->poster->failed;
    go_to_square(run, 0, k);
    const Batch *b = run->square.batch;
    post_copy(run, call_on(run, C_LOAD, OTHER), b->gpu.all, b->cpu.all);
    receive_hidden(run);
    /* load_cache does this for the other layers, one square ahead */
    bring_cache(run);
    return !run->poster->failed;
}

/* Runs the loop that section 4.4 adds, and Figure 4's loop over i: flights sweep in turn until all
 * are empty. */
static void sweep_all(Run *run) {
    int flights = run->plan->policy.flights;
    int idle = 0; /* flights in a row that had nothing to do */
    for (int g = 0; idle < flights && !run->poster->failed; g = (g + 1) % flights) {
        run->flight = &run->flights[g];
        if (!flight_admit(run->flight)) {
            idle++;
            continue;
        }
        sweep(run);
        tell_held(run);
        idle = 0;
    }
    tell_held(run);
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows opens and closes a run. On a first reading go on with square.c.
// -------------------------------------------------------------------------------------------------

int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener,
                 RunStats *stats, Error *err) {
    int flights = plan->policy.flights;
    Poster poster = {.device = device,
                     .depend = depend_open(plan->ncells),
                     .overlap = plan->policy.overlap,
                     .err = err};
    /* the most moves of a copy: K and V of all pages of a batch, the rows of its sequences, or the
     * tensors of a layer */
    size_t moves = 2 * (size_t)plan->max_seqs * plan->max_pages + plan->max_seqs + NROLES;
    Run run = {.plan = plan,
               .task = task,
               .listener = listener,
               .stats = stats,
               .poster = &poster,
               .flights = xcalloc(flights, sizeof *run.flights),
               .sweep_end = device->now(device),
               .l = plan->config.l,
               .near = xcalloc(moves, sizeof *run.near),
               .far = xcalloc(moves, sizeof *run.far)};
    CHECK(!is_sparse(&plan->policy) || plan->policy.delegated);
    *stats = (RunStats){0};
    for (int g = 0; g < flights; g++) {
        run.flights[g] = (Flight){.run = &run, .index = g};
        flight_open(&run.flights[g]);
    }
    if (task->count)
        sweep_all(&run);
    /* still on the lanes: the last stores, and weights for a sweep that did not take place */
    if (!poster.failed && post_drain(&poster))
        tell_seconds(&run);
    for (int g = 0; g < flights; g++)
        flight_close(&run.flights[g]);
    depend_close(poster.depend);
    free(run.near);
    free(run.far);
    free(run.flights);
    return poster.failed ? -1 : 0;
}
