/* batch.c: the flights, their batches, and the sequences of each batch (sections 4.2 and A.2).
 *
 * admission.c decides which prompts take which seats. Here these prompts become sequences of GPU
 * batches; batch.h has their structs and the numbers by which things are counted. A sequence has
 * tokens, rows of the hidden state and pages of the KV cache; a batch has index tables that tell
 * the kernels where all of these are. A batch's part in a sweep begins (batch_begin) with the
 * tokens that the previous sweep has chosen for it; they show which sequences have ended. The
 * members of a flight change between sweeps (flight_admit). New members of a batch that already has
 * members first prefill in a batch of their own, the entrance. What follows from new tokens is here
 * too: the last stage of a pipeline shares them with the other stages, and the counts and times of
 * RunStats grow. The pools of KV pages stand first, because sequences take their pages from them.
 *
 * Contract: only the thread that posts runs this file. Before it reads or writes data that ops use
 * too, it calls post_wait.
 * Read next: plan.c. */
#include "batch.h"

#include "device/device.h"

// -------------------------------------------------------------------------------------------------
// Pools of KV pages
//
// DIFFERS: the paper's cache of a batch has room for equally long sequences. Pages need no padding,
// and when a sequence ends, its pages are reused.
// -------------------------------------------------------------------------------------------------

void pool_open(PagePool *pool, int first, int npages) {
    *pool = (PagePool){.first = first, .npages = npages, .taken = xcalloc(npages, 1)};
}

int pool_take(PagePool *pool) {
    bool *page = memchr(pool->taken + pool->hint, false, pool->npages - pool->hint);
    CHECK(page);
    *page = true;
    pool->used++;
    pool->hint = page - pool->taken + 1;
    pool->peak = imax(pool->peak, pool->hint);
    return pool->first + pool->hint - 1;
}

void pool_give(PagePool *pool, int page) {
    page -= pool->first;
    CHECK(page >= 0 && page < pool->npages && pool->taken[page]);
    pool->taken[page] = false;
    pool->used--;
    pool->hint = imin(pool->hint, page);
}

void pool_close(PagePool *pool) { free(pool->taken); }

// -------------------------------------------------------------------------------------------------
// Views
// -------------------------------------------------------------------------------------------------

Tensor batch_activations(const Flight *f, const Batch *b, Tier tier) {
    Tensor t = plan_view(f->plan, ACTIVATIONS, tier, 0, f->plan->act_first[tier][b->plan_place],
                         b->act_rows[tier]);
    return tensor_cells(t, b->plan_place * t.ncells, t.ncells);
}

Tensor batch_newest(const Flight *f, const Batch *b, RegionId id, Tier side) {
    if (id == NEW_TOKENS && f->task->scored)
        id = GREEDY;
    return tensor_cols(plan_view(f->plan, id, side, b->plan_place, 0, 1), 0, b->head_rows);
}

Tensor batch_logits(const Flight *f, const Batch *b, int first, int n) {
    return plan_view(f->plan, LOGITS, TIER_CPU, b->plan_place, first, n);
}

PageTable batch_pages(const Flight *f, const Batch *b, Tier tier, int j) {
    const PagePool *pool = &f->pool[tier];
    const Tables *tables = batch_tables(b, tier);
    /* up to the last page that was ever used, so that Device.peak counts no others */
    PageTable t = plan_pages(f->plan, KV_CACHE, tier, 2 * j, pool->first + pool->peak);
    t.pages = tables->pages;
    t.len = tables->len;
    t.k.cell = t.v.cell = cache_cell(f->plan, tier, b->plan_place, j);
    return t;
}

/* Returns the address of a view on the CPU; NULL on the sim, but for index tables. */
static void *cpu_address(const Flight *f, Tensor t) {
    return f->to->device->cpu_address(f->to->device, t);
}

// -------------------------------------------------------------------------------------------------
// KV pages
// -------------------------------------------------------------------------------------------------

/* Returns the batch number that stands for this flight's free pages in the cells of the cache. */
static int free_pages_owner(const Flight *f) { return f->plan->batches + f->number; }

/* Records that pages of a tier pass from batch `from` to batch `to`: the new owner may write them
 * only when the ops of the old one, which still read them, are over. */
static void order_new_owner(Flight *f, Tier tier, int to, int from) {
    for (int j = 0; j < f->plan->config.l; j++)
        depend_join(f->to->depend, cache_cell(f->plan, tier, to, j),
                    cache_cell(f->plan, tier, from, j));
}

/* Gives every sequence of the batch the pages for this sweep's tokens. */
static void grow_pages(Flight *f, Batch *b) {
    bool took[NTIERS] = {false};
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        int npages = pages_for(q->s + q->generated, f->plan->policy.page_tokens);
        for (; q->npages < npages; q->npages++) {
            q->pages[q->npages] = pool_take(&f->pool[q->kv]);
            took[q->kv] = true;
        }
    }
    for (int t = 0; t < NTIERS; t++)
        if (took[t])
            order_new_owner(f, t, b->plan_place, free_pages_owner(f));
}

static int by_page(const void *a, const void *b) {
    return ((const Staged *)a)->page - ((const Staged *)b)->page;
}

/* Adds rows to a route. If they begin where the last leg ends, on both sides, they become part of
 * it. */
static void add_leg(Route *route, int gpu, int home, int rows) {
    Leg *last = &route->leg[route->n - 1];
    if (route->n && last->gpu + last->rows == gpu && last->home + last->rows == home)
        last->rows += rows;
    else
        route->leg[route->n++] = (Leg){gpu, home, rows};
}

/* Lists the pages of one tier that attention needs on another tier, in page order. Their places in
 * staging follow each other from `base` on; writes these into Tables.staged, and makes the route of
 * those that hold past tokens. */
static void list_staged_pages(Flight *f, Batch *b, Tier tier, int base) {
    int32_t *table = cpu_address(f, b->cpu.staged);
    int n = 0, page_tokens = f->plan->policy.page_tokens;
    for (int r = 0; r < b->nseq; r++, table += f->plan->max_pages) {
        const Sequence *q = b->seq[r];
        int past = q->s + q->generated - 1; /* tokens of earlier sweeps */
        for (int e = 0; q->kv == tier && e < q->npages; e++)
            f->staged[n++] = (Staged){q->pages[e], e * page_tokens < past, &table[e]};
    }
    qsort(f->staged, n, sizeof *f->staged, by_page);
    for (int i = 0; i < n; i++) {
        const Staged *s = &f->staged[i];
        *s->entry = base + i;
        if (s->past)
            add_leg(&b->past[tier], i * page_tokens, s->page * page_tokens, page_tokens);
    }
    b->nstaged[tier] = n;
}

// -------------------------------------------------------------------------------------------------
// The newest tokens
// -------------------------------------------------------------------------------------------------

/* Counts the sweep whose last tokens have just arrived, and calls the listener. */
static void end_sweep(Flight *f) {
    double t = f->to->device->now(f->to->device), took = t - f->shared->sweep_end;
    f->shared->sweep_end = t;
    f->stats->total_s += took;
    f->stats->sweeps++;
    if (f->collected_prefill) {
        f->stats->prefill_sweeps_s += took;
        f->stats->prefill_sweeps++;
    }
    if (f->listener->sweep && f->listener->sweep(f->listener->ctx, f->stats, f->to->err))
        f->to->failed = true;
}

/* Adds one new token to a sequence and counts it. id is the token; -1 in a scored task, where the
 * given token is added and never ends the sequence early, and on the sim, where no token is known.
 * Returns true if the sequence goes on. If this was its last token, frees its pages, vacates its
 * seat, reports it and returns false. */
static bool add_token(Flight *f, const Batch *b, Sequence *q, int32_t id) {
    const Listener *to = f->listener;
    RunStats *stats = f->stats;
    bool eos = is_eos(&f->plan->config, id), decoded = q->generated > 0;
    if (f->task->scored)
        id = q->prompt->ids[q->s + q->generated];
    q->tokens[q->generated++] = id;
    if (!decoded)
        stats->prefill_tokens += q->s;
    stats->attended += decoded ? q->s + q->generated - 1 : q->s * (q->s + 1.) / 2;
    stats->generated++;
    stats->decoded += decoded;
    stats->beside += decoded && f->collected_prefill;
    bool stop = (to->token && to->token(to->ctx, q->prompt_index, q->tokens, q->generated)) || eos;
    if (!stop && q->generated < q->n)
        return true;
    stats->ended++;
    while (q->npages)
        pool_give(&f->pool[q->kv], q->pages[--q->npages]);
    order_new_owner(f, q->kv, free_pages_owner(f), b->plan_place);
    admission_leave(&f->admission, q - f->seqs, q->generated);
    if (to->done && to->done(to->ctx, q->prompt_index, q->tokens, q->generated - eos,
                             stop ? FINISH_STOP : FINISH_LENGTH, f->to->err))
        f->to->failed = true;
    return false;
}

/* Reports, in a scored task, the scores of the newest step, sequence by sequence, except those of
 * tokens before Prompt.from. */
static void tell_scores(Flight *f, const Batch *b) {
    const Listener *to = f->listener;
    if (!to->scored || !f->logp)
        return;
    for (int r = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        /* its rows are of its newest tokens, and each row scores the token after it */
        int scored = q->s + q->generated - q->head_rows + 1;
        for (int e = 0; e < q->head_rows; e++, row++, scored++)
            if (scored >= q->prompt->from)
                to->scored(to->ctx, q->prompt_index, scored, f->logp[row], f->ids[row]);
    }
}

/* Sends the new tokens (or scores) from the last stage of a pipeline to all stages (section 4.4),
 * so that each knows which sequences have ended. Returns false if that fails. */
static bool share_newest(Flight *f, const Batch *b) {
    Net *net = f->to->device->net;
    int last = net->stages - 1;
    size_t size = b->head_rows * sizeof(int32_t);
    int status = 0;
    void *const what[] = {f->ids, f->logp};
    for (int w = 0; w < 1 + f->task->scored && !status; w++) {
        if (net->stage < last)
            status = net->receive(net, last, NET_TOKENS, what[w], size, f->to->err);
        for (int to = 0; net->stage == last && to < last && !status; to++)
            status = net->post(net, to, NET_TOKENS, what[w], size, f->to->err);
    }
    f->to->failed = status != 0;
    return !status;
}

/* Waits for a batch's newest tokens, or in a scored task for the scores of its newest step, and
 * points f->ids and f->logp to them (to NULL on the sim, which has no memory; or to f->came).
 * Returns false if the run has failed. */
static bool await_newest(Flight *f, const Batch *b) {
    bool scored = f->task->scored;
    f->logp = NULL;
    if (is_last(&f->plan->config)) {
        Tensor newest = batch_newest(f, b, NEW_TOKENS, TIER_CPU);
        /* one op copies all results, so the scores have arrived with the tokens */
        if (!post_wait(f->to, newest, READS))
            return false;
        f->ids = cpu_address(f, newest);
        if (scored)
            f->logp = cpu_address(f, batch_newest(f, b, LOG_PROBS, TIER_CPU));
    } else {
        /* the last stage's tokens come after this stage has sent its states, or failed to */
        if (!post_wait(f->to, plan_view(f->plan, SENDING, TIER_CPU, b->plan_place, 0, 1), WRITES))
            return false;
        f->ids = f->came;
        f->logp = scored ? (float *)f->came + f->plan->head_rows : NULL;
    }
    return !f->to->device->net || share_newest(f, b);
}

/* Waits for the batch's newest tokens, gives each sequence its own, and removes the sequences that
 * have ended. This happens once for each batch and sweep: between two sweeps for the batches that
 * end_sequences names, and for the others when they begin the next sweep (batch_begin), so that the
 * GPU need not wait. */
static void collect(Flight *f, Batch *b) {
    if (!b->uncollected || f->to->failed)
        return;
    b->uncollected = false;
    if (!await_newest(f, b))
        return;
    tell_scores(f, b);
    bool logits = f->task->keep_logits && f->listener->logits && is_last(&f->plan->config);
    int going = 0;
    for (int r = 0; r < b->nseq && !f->to->failed; r++) {
        Sequence *q = b->seq[r];
        const float *row = logits ? cpu_address(f, batch_logits(f, b, r, 1)) : NULL;
        if (row)
            f->listener->logits(f->listener->ctx, q->prompt_index, q->generated + 1, row);
        if (add_token(f, b, q, f->ids && !f->task->scored ? f->ids[r] : -1))
            b->seq[going++] = q;
    }
    b->nseq = going;
    if (!--f->uncollected)
        end_sweep(f);
}

// -------------------------------------------------------------------------------------------------
// Members, and the entrance
// -------------------------------------------------------------------------------------------------

/* Makes a sequence a member of the batch. Members are ordered by the tier of their KV, and on each
 * tier by their seats: pointers into Flight.seqs are ordered as seats are. */
static void add_member(Batch *b, Sequence *q) {
    int at = b->nseq++;
    for (; at > 0; at--) {
        Sequence *before = b->seq[at - 1];
        if (before->kv < q->kv || (before->kv == q->kv && before < q))
            break;
        b->seq[at] = before;
    }
    b->seq[at] = q;
}

// clang-format off
/* With the diagonal schedule, prompts take the seats of sequences that have ended in batches that
 * go on. Such prompts are the topups. A batch either prefills or decodes, so the topups of all
 * batches first prefill together in one more batch, the entrance, and then join the batches of
 * their seats:
 *
 *                  sweep i - 1               sweep i                       sweep i + 1
 *
 *   entrance       -                         prefills x, y
 *   batch 0        decodes a, b, c           decodes a, c      <- x        decodes a, x, c
 *   batch 1        decodes d, e, f           decodes d, e      <- y        decodes d, e, y
 *                  b and f end               x and y have their seats      x and y have joined
 *
 * This is so if b and f have all their tokens. If b stops early, it may be seen only when batch 0 begins
 * sweep i, and x enters one sweep later.
 *
 * While x prefills, it is a member of the entrance. Before sweep i + 1, when its first token is known, x
 * moves to `joining` of batch 0, where its seat is (leave_entrance). When batch 0 begins sweep i + 1, x
 * becomes a member (batch_begin).
 *
 * This is Figure 6. Batch k has entered with sweep i_k. Sweep i computes, layer by layer, the square
 * (token i - i_k, layer j) of every batch k in flight: after the entrance, the oldest batch comes first; it
 * is the farthest to the right in the figure. All squares of a sweep are one diagonal of the figure. Those of
 * one layer, one in each row, are one of its sub-diagonals, and share the weights. The warm-up is the gray
 * area of the figure: first batch 0 alone, then with batch 1, until K batches are n/K tokens apart. */
// clang-format on

/* Returns the flight's entrance; only the diagonal schedule has one. */
static Batch *entrance(Flight *f) { return &f->batch[f->batches - 1]; }

/* Deals new homes to the activations in the entrance: they rest in the entrance's part of
 * ACTIVATIONS, where the tiers' shares are dealt among the topups. */
static void deal_activations(Flight *f) {
    Batch *b = entrance(f);
    Seat *deal = xcalloc(b->nseq, sizeof *deal);
    deal_block(deal, &f->plan->policy, b->nseq);
    for (int r = 0; r < b->nseq; r++)
        b->seq[r]->act = deal[r].act;
    free(deal);
}

/* Moves the sequences that have prefilled in the entrance to the batches of their seats. Ops that
 * use their pages there come after those of the entrance. */
static void leave_entrance(Flight *f) {
    Batch *from = entrance(f);
    for (int r = 0; r < from->nseq; r++) {
        Sequence *q = from->seq[r];
        const Seat *seat = &f->admission.seat[q - f->seqs];
        Batch *home = &f->batch[seat->k];
        q->act = seat->act;
        home->joining[home->njoining++] = q;
        order_new_owner(f, q->kv, home->plan_place, from->plan_place);
    }
    from->nseq = 0;
}

// -------------------------------------------------------------------------------------------------
// A batch begins its sweep: its rows, its tables
// -------------------------------------------------------------------------------------------------

/* Counts the rows of the new tokens, by the tier of their activations, and the sequences by the
 * tier of their KV. Makes the routes of the hidden state: the head needs the last rows of each
 * sequence. */
static void count_rows(Flight *f, Batch *b) {
    b->rows = b->head_rows = 0;
    for (int t = 0; t < NTIERS; t++) {
        b->kv_seqs[t] = b->act_rows[t] = b->act_head_rows[t] = 0;
        b->x[t].n = b->x_for_head[t].n = 0;
    }
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        int rows = batch_rows(b, q);
        q->head_rows = b->prefill ? head_rows(f->task, q->prompt) : 1;
        b->rows += rows;
        b->head_rows += q->head_rows;
        b->kv_seqs[q->kv]++;
        add_leg(&b->x[q->act], b->act_rows[q->act], b->act_rows[q->act], rows);
        b->act_rows[q->act] += rows;
        add_leg(&b->x_for_head[q->act], b->act_head_rows[q->act],
                b->act_rows[q->act] - q->head_rows, q->head_rows);
        b->act_head_rows[q->act] += q->head_rows;
    }
}

/* Takes a table of n integers from the beginning of *left, where it has this much room. */
static Tensor take_table(Tensor *left, int n, size_t room) {
    Tensor t = tensor_cols(*left, 0, n);
    t.ld = n;
    *left = tensor_moved(*left, room * sizeof(int32_t));
    return t;
}

/* Makes the views of the batch's block of tables on one side, CPU or GPU. */
static void lay_out_tables(const Flight *f, const Batch *b, Tables *t, Tier side) {
    const Plan *p = f->plan;
    size_t rows = p->max_rows, seqs = p->max_seqs;
    Tensor left = plan_view(p, INDEX_TABLES, side, 2 * b->plan_place + b->sweeps % 2, 0, 1);
    t->all = left;
    t->ids = take_table(&left, b->rows, rows);
    t->positions = take_table(&left, b->rows, rows);
    t->row_seq = take_table(&left, b->rows, rows);
    t->row_token = take_table(&left, b->rows, rows);
    t->len = take_table(&left, b->nseq, seqs);
    t->prompt = take_table(&left, b->nseq, seqs);
    /* a first row for each sequence, and an end for each piece, of which there are at most nseq */
    t->start = take_table(&left, 2 * b->nseq, 2 * seqs);
    t->pages = take_table(&left, p->max_pages, seqs * p->max_pages);
    t->staged = take_table(&left, p->max_pages, seqs * p->max_pages);
    t->pages.rows = t->staged.rows = b->nseq;
    t->head = take_table(&left, b->head_rows, p->head_rows);
    t->target = take_table(&left, f->task->scored ? b->head_rows : 0, p->head_rows);
}

bool batch_piece(const Flight *f, const Batch *b, Piece *p) {
    *p = (Piece){
        .number = p->number + (p->nseq > 0), .first = p->first + p->nseq, .row = p->row + p->rows};
    for (int r = p->first; r < b->nseq; r++) {
        int rows = batch_rows(b, b->seq[r]);
        if (p->rows + rows > f->plan->piece_rows)
            break;
        p->nseq++;
        p->rows += rows;
        p->kv_rows[b->seq[r]->kv] += rows;
    }
    return p->nseq > 0;
}

/* Lists for every piece of a prefill the first row of each of its sequences, counted within the
 * piece, and the end. */
static void fill_starts(const Flight *f, const Batch *b) {
    int32_t *start = cpu_address(f, b->cpu.start);
    for (Piece p = {0}; b->prefill && batch_piece(f, b, &p);) {
        *start++ = 0;
        for (int r = p.first; r < p.first + p.nseq; r++, start++)
            *start = start[-1] + b->seq[r]->s;
    }
}

/* Writes the tables of this sweep. */
static void fill_tables(Flight *f, Batch *b) {
    int32_t *ids = cpu_address(f, b->cpu.ids), *positions = cpu_address(f, b->cpu.positions);
    int32_t *row_seq = cpu_address(f, b->cpu.row_seq);
    int32_t *row_token = cpu_address(f, b->cpu.row_token);
    int32_t *len = cpu_address(f, b->cpu.len), *prompt = cpu_address(f, b->cpu.prompt);
    int32_t *pages = cpu_address(f, b->cpu.pages);
    int32_t *head = cpu_address(f, b->cpu.head), *target = cpu_address(f, b->cpu.target);
    int row = 0, head_row = 0;
    for (int r = 0; r < b->nseq; r++, pages += f->plan->max_pages) {
        const Sequence *q = b->seq[r];
        int tokens = q->s + q->generated;
        for (int token = tokens - batch_rows(b, q); token < tokens; token++, row++) {
            ids[row] = token < q->s ? q->prompt->ids[token] : q->tokens[token - q->s];
            positions[row] = token + 2;
            row_seq[row] = r;
            row_token[row] = token;
        }
        for (int e = q->head_rows; e > 0; e--, head_row++) { /* row - 1 is its last row */
            head[head_row] = row - e;
            if (f->task->scored)
                target[head_row] = q->prompt->ids[tokens - e + 1];
        }
        len[r] = tokens;
        prompt[r] = q->prompt_index;
        memcpy(pages, q->pages, q->npages * sizeof *pages);
    }
    fill_starts(f, b);
    for (int t = 0; t < NTIERS; t++)
        b->nstaged[t] = b->past[t].n = 0;
    if (b->prefill) /* it attends to what it has just computed, and needs no pages */
        return;
    if (!f->plan->policy.delegated)
        list_staged_pages(f, b, TIER_CPU, 0);
    list_staged_pages(f, b, TIER_DISK, b->nstaged[TIER_CPU]);
}

bool batch_begin(Flight *f, Batch *b) {
    collect(f, b);
    while (b->njoining)
        add_member(b, b->joining[--b->njoining]);
    if (!b->nseq || f->to->failed)
        return false;
    b->sweeps++;
    count_rows(f, b);
    grow_pages(f, b);
    lay_out_tables(f, b, &b->cpu, TIER_CPU);
    lay_out_tables(f, b, &b->gpu, TIER_GPU);
    /* stores of the sweep before last may still read the tables */
    if (!post_wait(f->to, b->cpu.all, WRITES))
        return false;
    fill_tables(f, b);
    b->uncollected = true;
    f->began++;
    return true;
}

// -------------------------------------------------------------------------------------------------
// Between sweeps
// -------------------------------------------------------------------------------------------------

/* Returns true if the sequence's newest token, which may not be known yet, is its last one. */
static bool is_last_token(const Batch *b, const Sequence *q) {
    return q->generated + b->uncollected == q->n;
}

/* Returns true if a stage of a pipeline waits for ops of a square, or of the whole machine, while
 * it posts a sweep. Then it must share the tokens of all batches before it waits for the hidden
 * states of one: the stages before need all these tokens before they send any states. */
static bool waits_in_sweep(const Flight *f) {
    return f->to->device->net && (!f->to->overlap || f->plan->policy.synchronize);
}

/* Waits for the tokens of the entrance and of every batch in which a sequence ends, and drops empty
 * batches. A stage that waits within its sweeps waits for the tokens of all batches here. */
static void end_sequences(Flight *f) {
    int K = 0;
    Batch *in = f->plan->policy.schedule == SCHEDULE_DIAGONAL ? entrance(f) : NULL;
    for (int k = 0; k < f->K; k++) {
        Batch *b = f->in_sweep[k];
        bool ends = b == in || waits_in_sweep(f);
        for (int r = 0; r < b->nseq; r++)
            ends |= is_last_token(b, b->seq[r]);
        if (ends)
            collect(f, b);
    }
    if (in)
        leave_entrance(f);
    for (int k = 0; k < f->K; k++) {
        Batch *b = f->in_sweep[k];
        b->prefill = false;
        if (b->nseq || b->njoining)
            f->in_sweep[K++] = b;
    }
    f->K = K;
}

/* Begins the sequence of a newly taken seat, as a member of the entrance (a topup) or of the batch
 * of its seat. The batch prefills in this sweep; if it is the entrance, it comes first. */
static void begin_sequence(Flight *f, int seat, bool topup) {
    const Seat *from = &f->admission.seat[seat];
    Batch *b = topup ? entrance(f) : &f->batch[from->k];
    Sequence *q = &f->seqs[seat];
    q->prompt_index = from->prompt;
    q->prompt = &f->task->prompts[from->prompt];
    q->kv = from->kv;
    q->act = from->act;
    q->s = q->prompt->s;
    q->n = q->prompt->n;
    q->generated = q->npages = 0;
    if (!b->nseq) {
        b->prefill = f->prefill = true;
        b->admitted_as = f->shared->admitted++;
        if (topup)
            memmove(f->in_sweep + 1, f->in_sweep, f->K * sizeof *f->in_sweep);
        f->in_sweep[topup ? 0 : f->K] = b;
        f->K++;
    }
    add_member(b, q);
}

bool flight_admit(Flight *f) {
    int topups;
    end_sequences(f);
    f->prefill = false;
    if (f->to->failed)
        return false;
    int n = admission_next(&f->admission, f->i, f->entered, &topups);
    for (int e = 0; e < n; e++)
        begin_sequence(f, f->entered[e], e < topups);
    if (topups)
        deal_activations(f);
    f->began = 0;
    return f->K > 0;
}

void flight_end_posting(Flight *f) {
    f->collected_prefill = f->prefill;
    f->uncollected = f->began;
    f->i++;
}

bool flight_goes_on(const Flight *f) {
    if (f->shared->next_prompt < f->task->count)
        return true;
    for (int k = 0; k < f->K; k++) {
        const Batch *b = f->in_sweep[k];
        for (int r = 0; r < b->nseq; r++)
            if (!is_last_token(b, b->seq[r]))
                return true;
    }
    return false;
}

bool flight_is_empty(const Flight *f) {
    for (int k = 0; k < f->K; k++)
        if (f->in_sweep[k]->nseq)
            return false;
    return true;
}

void flight_open(Flight *f) {
    const Plan *p = f->plan;
    int block = imin(block_size(&p->policy), f->task->count);
    f->batches = p->batches / p->policy.flights;
    f->batch = xcalloc(f->batches, sizeof *f->batch);
    f->in_sweep = xcalloc(f->batches, sizeof *f->in_sweep);
    f->seqs = xcalloc(block, sizeof *f->seqs);
    f->entered = xcalloc(block, sizeof *f->entered);
    admission_open(&f->admission, &p->policy, f->task, &f->shared->next_prompt, p->npages);
    for (int i = 0; i < block; i++) {
        f->seqs[i].pages = xcalloc(p->max_pages, sizeof(int));
        f->seqs[i].tokens = xcalloc(f->admission.horizon, sizeof(int32_t));
    }
    f->nseqs = block;
    for (int k = 0; k < f->batches; k++) {
        Batch *b = &f->batch[k];
        b->plan_place = f->number * f->batches + k;
        b->seq = xcalloc(p->max_seqs, sizeof *b->seq);
        b->joining = xcalloc(p->max_seqs, sizeof *b->joining);
        for (int t = 0; t < NTIERS; t++) {
            b->past[t].leg = xcalloc((size_t)p->max_seqs * p->max_pages, sizeof(Leg));
            b->x[t].leg = xcalloc(p->max_seqs, sizeof(Leg));
            b->x_for_head[t].leg = xcalloc(p->max_seqs, sizeof(Leg));
        }
    }
    f->staged = xcalloc((size_t)p->max_seqs * p->max_pages, sizeof *f->staged);
    f->came = xcalloc(2 * (size_t)imax(p->head_rows, p->max_seqs), sizeof *f->came);
    for (int t = 0; t < NTIERS; t++)
        pool_open(&f->pool[t], f->number * p->npages[t], p->npages[t]);
}

void flight_close(Flight *f) {
    for (int i = 0; i < f->nseqs; i++) {
        free(f->seqs[i].pages);
        free(f->seqs[i].tokens);
    }
    for (int k = 0; k < f->batches; k++) {
        free(f->batch[k].seq);
        free(f->batch[k].joining);
        for (int t = 0; t < NTIERS; t++) {
            free(f->batch[k].past[t].leg);
            free(f->batch[k].x[t].leg);
            free(f->batch[k].x_for_head[t].leg);
        }
    }
    for (int t = 0; t < NTIERS; t++)
        pool_close(&f->pool[t]);
    admission_close(&f->admission);
    free(f->batch);
    free(f->in_sweep);
    free(f->seqs);
    free(f->entered);
    free(f->staged);
    free(f->came);
}
