/* square.c: the square whose ops are posted now: where its data is, and the ways between home and
 * GPU.
 *
 * The calls of Figure 4 only say of which square they speak: go_to_square(run, j, k). All slots of
 * workspaces and of staging rotate here. What rests below the GPU crosses one link or two: add_way
 * notes the moves of both hops, and carry posts them. Read next: weights.c. */
#include "schedule.h"

// -------------------------------------------------------------------------------------------------
// The views of the square
// -------------------------------------------------------------------------------------------------

Tensor square_slot(const Run *run, RegionId id, Tier tier, int rows) {
    return plan_view(run->plan, id, tier, run->square.turn, 0, rows);
}

Tensor piece_slot(const Run *run, RegionId id, Tier tier, int rows) {
    return plan_view(run->plan, id, tier, run->square.batch->piece_turn, 0, rows);
}

/* Returns places for pages in staging on a tier; there are two sets of them, which squares take in
 * turn. */
static PageTable staging(const Run *run, Tier tier, int npages) {
    return plan_pages(run->plan, KV_STAGING, tier, 2 * run->square.turn, npages);
}

Tensor activations(const Run *run, Tier tier) {
    const Batch *b = run->square.batch;
    Tensor t = plan_view(run->plan, ACTIVATIONS, tier, 0, run->plan->act_first[tier][b->plan_place],
                         b->act_rows[tier]);
    t.cell += b->plan_place;
    return t;
}

/* Returns the hidden state of the square while it is computed: in place if all of it rests on the
 * GPU, otherwise in the workspace. The head has the rows that it needs in a workspace of its own.
 */
static Tensor hidden(const Run *run) {
    const Square *s = &run->square;
    if (is_head(run, s->call.j))
        return square_slot(run, HEAD_ROWS, TIER_GPU, s->batch->head_rows);
    if (x_rests_on_gpu(s->batch))
        return activations(run, TIER_GPU);
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

Call square_call(const Run *run, int j, int k) {
    const Batch *b = run->flight->in_sweep[k];
    return (Call){.prefill = b->prefill,
                  .prefill_sweep = run->flight->prefill,
                  .delegated = run->plan->policy.delegated && !b->prefill,
                  .i = run->i,
                  .j = j,
                  .k = k,
                  .batch = b->admitted_as};
}

bool go_to_square(Run *run, int j, int k) {
    const Flight *f = run->flight;
    /* k = K is in the next layer, k = -1 in the one before */
    int K = f->K, over = k < 0 ? -1 : k >= K;
    j += over;
    k -= over * K;
    if (j < 0 || j > run->l)
        return false;
    Batch *b = f->in_sweep[k];
    run->square = (Square){
        .batch = b, .call = square_call(run, j, k), .turn = run->squares + (long)j * K + k};
    run->square.x = hidden(run);
    run->square.staged = staged_pages(run);
    run->square.landing = staging(run, TIER_CPU, b->nstaged[TIER_DISK]);
    return b->nseq > 0;
}

PageTable home_pages(const Run *run, Tier tier) {
    const Flight *f = run->flight;
    const Batch *b = run->square.batch;
    int j = run->square.call.j;
    const PagePool *pool = &f->pool[tier];
    const Tables *tables = batch_tables(b, tier);
    /* up to the last page that was ever used, so that the measured peak counts no others */
    PageTable t = plan_pages(run->plan, KV_CACHE, tier, 2 * j, pool->first + pool->peak);
    t.pages = tables->pages;
    t.len = tables->len;
    t.k.cell = t.v.cell = cache_cell(run->plan, tier, b->plan_place, j);
    return t;
}

bool next_piece(Run *run, long turn) {
    const Plan *p = run->plan;
    Square *s = &run->square;
    if (!batch_piece(run->flight, s->batch, &s->piece))
        return false;
    s->batch->piece_turn = turn;
    int rows = s->piece.rows, h1 = p->config.h1;
    s->on_gpu = s->piece.kv_rows[TIER_GPU];
    s->off_gpu = rows - s->on_gpu;
    s->x_piece = tensor_rows(s->x, s->piece.row, rows);
    s->qkv = piece_slot(run, QKV, TIER_GPU, rows);
    s->q = tensor_cols(s->qkv, 0, h1);
    s->kv = tensor_cols(s->qkv, h1, 2 * h1);
    /* if pages are packed, PROJECT packs what leaves */
    s->kv_to_leave = p->policy.cache_packed ? piece_slot(run, NEW_KV_PACKED, TIER_GPU, s->off_gpu)
                                            : tensor_rows(s->kv, s->on_gpu, s->off_gpu);
    s->kv_on_cpu = piece_slot(run, NEW_KV, TIER_CPU, s->off_gpu);
    s->attended = piece_slot(run, ATTENDED, TIER_GPU, rows);
    s->attended_off_gpu = tensor_rows(s->attended, s->on_gpu, s->off_gpu);
    return true;
}

Call call_of(Call square, Lane lane, Kind kind) {
    square.lane = lane;
    square.kind = kind;
    if (kind == WEIGHT)
        square.prefill = square.prefill_sweep;
    return square;
}

Call call_on(const Run *run, Lane lane, Kind kind) { return call_of(run->square.call, lane, kind); }

void post_copy(Run *run, Call call, Tensor dst, Tensor src) {
    Move move = {dst, src};
    post(run->poster, op_copy(call, &move, 1));
}

PageTable table_rows(PageTable table, int first, int n) {
    table.pages = tensor_rows(table.pages, first, n);
    table.len = tensor_cols(table.len, first, n);
    return table;
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
 *   a load    from disk     disk -> CPU, on C_READ        CPU -> GPU, on C_LOAD
 *             from the CPU                                CPU -> GPU
 *   a store   to disk       CPU -> disk, on D_WRITE       GPU -> CPU, on STORE
 *             to the CPU                                  GPU -> CPU
 *
 * The far hops are one op, and so are the near ones, so that the disk can read the next part while the link
 * carries this one. Weights load on W_READ and W_LOAD. Rows at home on the GPU move within it, in one hop, on
 * PROJECT or FINISH. */
// clang-format on

void add_way(Run *run, Tensor used, Tensor landing, Tensor home, bool store) {
    Tensor below = home;
    if (home.tier == TIER_DISK) {
        below = landing;
        run->nfar = store ? add_move(run->far, run->nfar, home, landing)
                          : add_move(run->far, run->nfar, landing, home);
    }
    if (used.tier == TIER_GPU)
        run->nnear = store ? add_move(run->near, run->nnear, below, used)
                           : add_move(run->near, run->nnear, used, below);
}

void add_route(Run *run, const Route *route, Tensor used, Tensor landing, Tensor home, bool store) {
    for (const Leg *leg = route->leg; leg < route->leg + route->n; leg++) {
        int row = store ? leg->home : leg->gpu;
        add_way(run, tensor_rows(used, row, leg->rows), tensor_rows(landing, row, leg->rows),
                tensor_rows(home, leg->home, leg->rows), store);
    }
}

void carry(Run *run, Call call) {
    static const Lane disk_lane[NLANES] = {[W_LOAD] = W_READ, [C_LOAD] = C_READ, [STORE] = D_WRITE};
    Op near = op_copy(call, run->near, run->nnear);
    call.lane = disk_lane[call.lane];
    Op far = op_copy(call, run->far, run->nfar);
    bool load = near.lane != STORE; /* begins with the far hop, a store with the near one */
    if (run->nfar && load)
        post(run->poster, far);
    if (run->nnear)
        post(run->poster, near);
    if (run->nfar && !load)
        post(run->poster, far);
    run->nnear = run->nfar = 0;
}
