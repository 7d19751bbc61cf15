/* batch.c: the sequences of each batch (sections 4.1 and A.2).
 *
 * admission.c decides which prompts take which seats. Here these prompts become sequences of GPU
 * batches. A sequence has tokens, rows of the hidden state and pages of the KV cache; a batch has
 * index tables that tell the kernels where all of these are. A batch's part in a sweep begins
 * (batch_begin) with the tokens that the previous sweep has chosen for it; they show which
 * sequences have ended. The members of a flight change between sweeps (flight_admit). New members
 * of a batch that already has members first prefill in a batch of their own, the entrance.
 *
 * Contract: only the thread that posts runs this file. Before it reads or writes data that ops use
 * too, it calls post_host.
 * Read next: plan.c. */
#include "batch.h"

#include "device/device.h"

// -------------------------------------------------------------------------------------------------
// Views
// -------------------------------------------------------------------------------------------------

Tensor batch_activations(const Flight *f, const Batch *b, Tier tier) {
    const int first = f->plan->act_first[tier][b->index];
    Tensor t = plan_view(f->plan, ACTIVATIONS, tier, 0, first, b->act_rows[tier]);
    return tensor_cells(t, b->index * t.ncells, t.ncells);
}

Tensor batch_newest(const Flight *f, const Batch *b, RegionId id, Tier side) {
    if (id == NEW_TOKENS && f->task->scored)
        id = GREEDY;
    return tensor_cols(plan_view(f->plan, id, side, b->index, 0, 1), 0, b->last_rows);
}

Tensor batch_logits(const Flight *f, const Batch *b, int first, int n) {
    return plan_view(f->plan, LOGITS, TIER_CPU, b->index, first, n);
}

PageTable batch_pages(const Flight *f, const Batch *b, Tier tier, int j) {
    const PagePool *pool = &f->pool[tier];
    const Tables *tables = batch_tables(b, tier);
    /* up to the last page that was ever used, so that Device.peak counts no others */
    PageTable t = plan_pages(f->plan, KV_CACHE, tier, 2 * j, pool->first + pool->peak);
    t.pages = tables->pages;
    t.len = tables->len;
    t.k.cell = t.v.cell = cache_cell(f->plan, tier, b->index, j);
    return t;
}

static void *host(const Flight *f, Tensor t) { return f->to->device->host(f->to->device, t); }

// -------------------------------------------------------------------------------------------------
// KV pages
// -------------------------------------------------------------------------------------------------

/* Returns the batch number that stands for this flight's free pages in the cells of the cache. */
static int nobody(const Flight *f) { return f->plan->batches + f->number; }

/* Records that pages of a tier pass from batch `from` to batch `to`, so that ops of the new owner
 * come after those of the old one. */
static void pages_change_owner(Flight *f, Tier tier, int to, int from) {
    for (int j = 0; j < f->plan->config.l; j++)
        depend_join(f->to->depend, cache_cell(f->plan, tier, to, j),
                    cache_cell(f->plan, tier, from, j));
}

/* Gives every sequence of the batch the pages for this sweep's tokens, one page to each in turn, so
 * that pages taken in one sweep lie together. */
static void grow_pages(Flight *f, Batch *b) {
    bool took[NTIERS] = {false};
    for (bool grew = true; grew;) {
        grew = false;
        for (int r = 0; r < b->nseq; r++) {
            Sequence *q = b->seq[r];
            if (q->npages >= pages_for(q->s + q->generated, f->plan->policy.page_tokens))
                continue;
            q->pages[q->npages++] = pool_take(&f->pool[q->kv]);
            grew = took[q->kv] = true;
        }
    }
    for (int t = 0; t < NTIERS; t++)
        if (took[t])
            pages_change_owner(f, (Tier)t, b->index, nobody(f));
}

static int by_page(const void *a, const void *b) {
    return ((const Staged *)a)->page - ((const Staged *)b)->page;
}

/* Lists the pages of one tier that attention needs on another tier. Writes their places in staging,
 * which are counted from `base`, into the table. */
static void stage_pages(Flight *f, Batch *b, Tier tier, int base, int32_t *table) {
    Staged *list = b->staged[tier];
    int n = 0;
    for (int r = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        for (int e = 0; q->kv == tier && e < q->npages; e++) {
            const bool past = e * f->plan->policy.page_tokens < q->s + q->generated - 1;
            list[n++] = (Staged){q->pages[e], past, &table[(size_t)r * f->plan->max_pages + e]};
        }
    }
    qsort(list, n, sizeof *list, by_page);
    for (int i = 0; i < n; i++)
        *list[i].entry = base + i;
    b->nstaged[tier] = n;
}

// -------------------------------------------------------------------------------------------------
// The newest tokens
// -------------------------------------------------------------------------------------------------

/* Counts the sweep whose last tokens have just arrived, and calls the listener. */
static void end_sweep(Flight *f) {
    double t = f->to->device->now(f->to->device), took = t - f->line->swept_at;
    f->line->swept_at = t;
    f->stats->total_s += took;
    f->stats->sweeps++;
    if (f->prefill_sweep) {
        f->stats->prefill_sweeps_s += took;
        f->stats->prefill_sweeps++;
    }
    if (f->listener->sweep && f->listener->sweep(f->listener->ctx, f->stats, f->to->err))
        f->to->failed = true;
}

/* Adds one new token to a sequence: id, or in a scored task (id -1) the given one, which never ends
 * it early. Returns true if the sequence goes on. If it has ended, frees its pages, reports it and
 * returns false. */
static bool next_token(Flight *f, Sequence *q, int32_t id) {
    const Listener *to = f->listener;
    const bool eos = id >= 0 && id == f->plan->config.eos, decoded = q->generated > 0;
    if (f->task->scored)
        id = f->task->prompts[q->prompt].ids[q->s + q->generated];
    q->tokens[q->generated++] = id;
    if (!decoded)
        f->stats->prefill_tokens += q->s;
    f->stats->attended += decoded ? q->s + q->generated - 1 : q->s * (q->s + 1.) / 2;
    f->stats->generated++;
    f->stats->decoded += decoded;
    f->stats->beside += decoded && f->prefill_sweep;
    bool stop = (to->token && to->token(to->ctx, q->prompt, q->tokens, q->generated)) || eos;
    if (!stop && q->generated < q->n)
        return true;
    while (q->npages)
        pool_give(&f->pool[q->kv], q->pages[--q->npages]);
    admission_leave(&f->admission, (int)(q - f->seqs), q->generated);
    if (to->done && to->done(to->ctx, q->prompt, q->tokens, q->generated - eos,
                             stop ? FINISH_STOP : FINISH_LENGTH, f->to->err))
        f->to->failed = true;
    return false;
}

/* Reports the scores of the newest step, sequence by sequence, except those of tokens before
 * Prompt.from. */
static void tell_scores(Flight *f, const Batch *b) {
    const Listener *to = f->listener;
    if (!to->scored || !f->logp)
        return;
    for (int r = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        for (int e = 1; e <= q->last_rows; e++, row++) {
            int at = q->s + q->generated - q->last_rows + e;
            if (at >= f->task->prompts[q->prompt].from)
                to->scored(to->ctx, q->prompt, at, f->logp[row], f->ids[row]);
        }
    }
}

/* Sends the new tokens (or scores) from the last stage of a pipeline to all stages (section 4.4),
 * so that each knows which sequences have ended. Returns false if that fails. */
static bool go_round(Flight *f, const Batch *b) {
    Net *net = f->to->device->net;
    const int last = net->stages - 1;
    const size_t size = b->last_rows * sizeof(int32_t);
    int status = 0;
    void *const what[] = {f->ids, f->logp};
    for (int w = 0; w < 1 + f->task->scored && !status; w++) {
        if (net->stage < last)
            status = net->receive(net, last, NET_TOKENS, what[w], size, f->to->err);
        for (int to = 0; net->stage == last && to < last && !status; to++)
            status = net->post(net, to, NET_TOKENS, what[w], size, f->to->err);
    }
    if (status)
        f->to->failed = true;
    return !status;
}

/* Waits for a batch's newest tokens, or in a scored task for the scores of its newest step, and
 * points f->ids and f->logp to them (NULL on the sim). Returns false if the run has failed. */
static bool newest_come(Flight *f, const Batch *b) {
    const bool scored = f->task->scored;
    f->logp = NULL;
    if (is_last(&f->plan->config)) {
        Tensor newest = batch_newest(f, b, NEW_TOKENS, TIER_CPU);
        if (!post_host(f->to, newest, READS))
            return false; /* one op copies all results, so the others have arrived too */
        f->ids = host(f, newest);
        if (scored)
            f->logp = host(f, batch_newest(f, b, LOG_PROBS, TIER_CPU));
    } else { /* the tokens come after this stage has sent its states, or failed to */
        if (!post_host(f->to, plan_view(f->plan, SENDING, TIER_CPU, b->index, 0, 1), WRITES))
            return false;
        f->ids = f->came;
        f->logp = scored ? (float *)f->came + f->plan->last_rows : NULL;
    }
    return !f->to->device->net || go_round(f, b);
}

/* Waits for the batch's newest tokens, gives each sequence its own, and removes the sequences that
 * have ended. */
static void collect(Flight *f, Batch *b) {
    if (!b->waiting || f->to->failed)
        return;
    b->waiting = false;
    const bool scored = f->task->scored, logits = f->task->keep_logits && f->listener->logits;
    int going = 0, used[NTIERS];
    for (int t = 0; t < NTIERS; t++)
        used[t] = f->pool[t].used;
    if (!newest_come(f, b))
        return;
    const int32_t *ids = scored ? NULL : f->ids;
    if (scored)
        tell_scores(f, b);
    for (int r = 0; r < b->nseq && !f->to->failed; r++) {
        Sequence *q = b->seq[r];
        const float *row =
            logits && is_last(&f->plan->config) ? host(f, batch_logits(f, b, r, 1)) : NULL;
        if (row)
            f->listener->logits(f->listener->ctx, q->prompt, q->generated + 1, row);
        if (next_token(f, q, ids ? ids[r] : -1))
            b->seq[going++] = q;
    }
    b->nseq = going;
    for (int t = 0; t < NTIERS; t++)
        if (f->pool[t].used < used[t])
            pages_change_owner(f, (Tier)t, nobody(f), b->index);
    if (--f->uncollected == 0)
        end_sweep(f);
}

// -------------------------------------------------------------------------------------------------
// The entrance
// -------------------------------------------------------------------------------------------------

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
 * While x prefills, its Sequence.seat_batch is 0. Before sweep i + 1, when its first token is known, x moves
 * to batch 0's `joining` (leave_entrance). When batch 0 begins sweep i + 1, x becomes a member, in the
 * order of seats (take_in). */
// clang-format on

/* Returns the flight's entrance; only the diagonal schedule has one. */
static Batch *entrance(Flight *f) { return &f->batch[f->batches - 1]; }

/* Orders the sequences in the entrance, whose seats are in several batches, by the tier of their
 * KV. Deals their activations new homes, because these must lie in the entrance's rows. */
static void order_entrance(Flight *f) {
    Batch *b = entrance(f);
    int at = 0;
    Sequence **order = b->joining; /* free, because no sequence joins the entrance */
    Seat *deal = xcalloc(b->nseq, sizeof *deal);
    deal_block(deal, &f->plan->policy, b->nseq);
    for (int t = 0; t < NTIERS; t++)
        for (int r = 0; r < b->nseq; r++)
            if ((int)b->seq[r]->kv == t)
                order[at++] = b->seq[r];
    for (int r = 0; r < at; r++) {
        b->seq[r] = order[r];
        b->seq[r]->act = deal[r].act;
    }
    free(deal);
}

/* Moves the sequences that have prefilled in the entrance to the batches of their seats. Ops that
 * use their pages there come after those of the entrance. */
static void leave_entrance(Flight *f) {
    Batch *from = entrance(f);
    for (int r = 0; r < from->nseq; r++) {
        Sequence *q = from->seq[r];
        Batch *home = &f->batch[q->seat_batch];
        q->act = f->admission.seat[q - f->seqs].act;
        home->joining[home->njoining++] = q;
        const Sequence *before =
            r ? from->seq[r - 1] : NULL; /* neighbours mostly go the same way */
        if (!before || before->kv != q->kv || before->seat_batch != q->seat_batch)
            pages_change_owner(f, q->kv, home->index, from->index);
        CHECK(home->in_flight); /* it was topped up because it had members */
    }
    from->nseq = 0;
}

/* Makes the joining sequences members of the batch, in the order of seats. */
static void take_in(Batch *b) {
    for (int n = 0; n < b->njoining; n++) {
        int at = b->nseq++;
        /* pointers into Flight.seqs are ordered as seats are */
        for (; at > 0 && b->seq[at - 1] > b->joining[n]; at--)
            b->seq[at] = b->seq[at - 1];
        b->seq[at] = b->joining[n];
    }
    b->njoining = 0;
}

// -------------------------------------------------------------------------------------------------
// A batch begins its sweep: its rows, its tables
// -------------------------------------------------------------------------------------------------

/* Counts the rows of the new tokens, by the tier of their activations, and the sequences by the
 * tier of their KV. */
static void count_rows(Flight *f, Batch *b) {
    b->rows = b->last_rows = 0;
    memset(b->kv_seqs, 0, sizeof b->kv_seqs);
    memset(b->act_rows, 0, sizeof b->act_rows);
    memset(b->act_last, 0, sizeof b->act_last);
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        const int rows = batch_rows(b, q);
        q->last_rows = b->prefill ? last_rows(f->task, &f->task->prompts[q->prompt]) : 1;
        b->rows += rows;
        b->last_rows += q->last_rows;
        b->kv_seqs[q->kv]++;
        b->act_rows[q->act] += rows;
        b->act_last[q->act] += q->last_rows;
    }
}

/* Returns the next n integers of a block of tables, and advances *at by `room`. */
static Tensor ints(const Tensor *all, size_t *at, int n, size_t room) {
    Tensor t = tensor_cols(*all, (int)*at, n);
    t.ld = (size_t)n;
    *at += room;
    return t;
}

/* Makes the views of the batch's block of tables on one side, CPU or GPU. */
static void lay_out_tables(const Flight *f, Batch *b, Tables *t, Tier side) {
    const Plan *p = f->plan;
    const size_t rows = p->max_rows, seqs = p->max_seqs;
    size_t at = 0;
    t->all = plan_view(p, INDEX_TABLES, side, 2 * b->index + b->sweeps % 2, 0, 1);
    t->ids = ints(&t->all, &at, b->rows, rows);
    t->positions = ints(&t->all, &at, b->rows, rows);
    t->row_seq = ints(&t->all, &at, b->rows, rows);
    t->row_token = ints(&t->all, &at, b->rows, rows);
    t->len = ints(&t->all, &at, b->nseq, seqs);
    t->prompt = ints(&t->all, &at, b->nseq, seqs);
    t->at = ints(&t->all, &at, b->nseq, seqs);
    t->start = ints(&t->all, &at, 2 * b->nseq, 2 * seqs);
    t->pages = ints(&t->all, &at, p->max_pages, seqs * p->max_pages);
    t->staged = ints(&t->all, &at, p->max_pages, seqs * p->max_pages);
    t->pages.rows = t->staged.rows = b->nseq;
    t->head = ints(&t->all, &at, b->last_rows, p->last_rows);
    t->target = ints(&t->all, &at, f->task->scored ? b->last_rows : 0, p->last_rows);
}

/* Lists the rows that the head needs, and in a scored task the tokens given after them. */
static void fill_head(const Flight *f, Batch *b) {
    int32_t *head = host(f, b->cpu.head), *target = f->task->scored ? host(f, b->cpu.target) : NULL;
    for (int r = 0, n = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        row += batch_rows(b, q); /* the end of the sequence's rows */
        for (int e = q->last_rows; e > 0; e--, n++) {
            head[n] = row - e;
            if (target)
                target[n] = f->task->prompts[q->prompt].ids[q->s + q->generated - e + 1];
        }
    }
}

/* Writes the tables that have one number per row, for sequence r, whose first row is `row`. Returns
 * the first row after the sequence. */
static int fill_rows(const Flight *f, Batch *b, int r, int row) {
    const Sequence *q = b->seq[r];
    int32_t *ids = host(f, b->cpu.ids), *positions = host(f, b->cpu.positions);
    int32_t *row_seq = host(f, b->cpu.row_seq), *row_token = host(f, b->cpu.row_token);
    const int tokens = q->s + q->generated;
    for (int token = tokens - batch_rows(b, q); token < tokens; token++, row++) {
        ids[row] = token < q->s ? f->task->prompts[q->prompt].ids[token] : q->tokens[token - q->s];
        positions[row] = token + 2;
        row_seq[row] = r;
        row_token[row] = token;
    }
    return row;
}

bool batch_piece(const Flight *f, const Batch *b, Piece *p) {
    *p = (Piece){
        .number = p->number + (p->nseq > 0), .first = p->first + p->nseq, .row = p->row + p->rows};
    for (int r = p->first; r < b->nseq; r++) {
        const int rows = batch_rows(b, b->seq[r]);
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
    int32_t *start = host(f, b->cpu.start);
    for (Piece p = {.number = 0}; b->prefill && batch_piece(f, b, &p);) {
        *start++ = 0;
        for (int r = p.first; r < p.first + p.nseq; r++, start++)
            *start = start[-1] + b->seq[r]->s;
    }
}

/* Writes the tables of this sweep, row by row and sequence by sequence. */
static void fill_index(Flight *f, Batch *b) {
    int32_t *len = host(f, b->cpu.len);
    int32_t *prompt = host(f, b->cpu.prompt), *at = host(f, b->cpu.at),
            *pages = host(f, b->cpu.pages);
    int32_t *staged = host(f, b->cpu.staged);
    for (int r = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        row = fill_rows(f, b, r, row);
        len[r] = at[r] = q->s + q->generated;
        prompt[r] = f->task->prompts[q->prompt].place;
        for (int e = 0; e < q->npages; e++)
            pages[(size_t)r * f->plan->max_pages + e] = q->pages[e];
    }
    fill_starts(f, b);
    fill_head(f, b);
    b->nstaged[TIER_CPU] = b->nstaged[TIER_DISK] = 0;
    if (b->prefill)
        return; /* prefill attends to what it has just computed */
    bool delegated = f->plan->policy.delegated;
    if (!delegated)
        stage_pages(f, b, TIER_CPU, 0, staged);
    stage_pages(f, b, TIER_DISK, delegated ? 0 : b->nstaged[TIER_CPU], staged);
}

bool batch_begin(Flight *f, Batch *b) {
    collect(f, b);
    take_in(b);
    b->rows = 0;
    if (!b->nseq || f->to->failed)
        return false;
    b->sweeps++;
    count_rows(f, b);
    grow_pages(f, b);
    lay_out_tables(f, b, &b->cpu, TIER_CPU);
    lay_out_tables(f, b, &b->gpu, TIER_GPU);
    if (!post_host(f->to, b->cpu.all, WRITES))
        return false; /* stores of the sweep before last may still read them */
    fill_index(f, b);
    b->waiting = true;
    f->began++;
    return true;
}

// -------------------------------------------------------------------------------------------------
// Between sweeps
// -------------------------------------------------------------------------------------------------

/* Returns true if the sequence's newest token, which may not be known yet, is its last one. */
static bool is_last_token(const Batch *b, const Sequence *q) {
    return q->generated + b->waiting == q->n;
}

/* Waits for the tokens of the entrance and of every batch in which a sequence ends, and drops empty
 * batches. In a pipeline without overlap it waits for all batches, because otherwise two stages
 * could wait for each other. */
static void end_sequences(Flight *f) {
    int K = 0;
    Batch *in = f->plan->policy.schedule == SCHEDULE_DIAGONAL ? entrance(f) : NULL;
    for (int k = 0; k < f->K; k++) {
        Batch *b = f->in_sweep[k];
        bool ends = b == in || (f->to->device->net && !f->to->overlap);
        for (int r = 0; r < b->nseq; r++)
            ends = ends || is_last_token(b, b->seq[r]);
        if (ends)
            collect(f, b);
    }
    if (in && in->in_flight)
        leave_entrance(f);
    for (int k = 0; k < f->K; k++) {
        Batch *b = f->in_sweep[k];
        b->in_flight = b->nseq || b->njoining;
        b->prefill = false;
        if (b->in_flight)
            f->in_sweep[K++] = b;
    }
    f->K = K;
}

/* Makes the sequence of a newly taken seat a member of batch b. */
static void take_place(Flight *f, int seat, Batch *b) {
    const Seat *from = &f->admission.seat[seat];
    Sequence *q = &f->seqs[seat];
    const Prompt *prompt = &f->task->prompts[from->prompt];
    q->prompt = from->prompt;
    q->seat_batch = from->k;
    q->kv = from->kv;
    q->act = from->act;
    q->s = prompt->s;
    q->n = prompt->n;
    q->generated = q->npages = 0;
    if (!b->in_flight) {
        b->in_flight = b->prefill = f->prefill = true;
        b->number = (int)f->line->admitted++;
        f->in_sweep[f->K++] = b;
    }
    b->seq[b->nseq++] = q;
}

bool flight_admit(Flight *f) {
    int topups;
    end_sequences(f);
    f->prefill = false;
    if (f->to->failed)
        return false;
    const int n = admission_next(&f->admission, f->i, f->entered, &topups);
    for (int e = 0; e < topups; e++)
        take_place(f, f->entered[e], entrance(f));
    if (topups) {
        order_entrance(f);
        memmove(f->in_sweep + 1, f->in_sweep, (f->K - 1) * sizeof *f->in_sweep);
        f->in_sweep[0] = entrance(f);
    }
    for (int e = topups; e < n; e++)
        take_place(f, f->entered[e], &f->batch[f->admission.seat[f->entered[e]].k]);
    f->began = 0;
    return f->K > 0;
}

void flight_swept(Flight *f) {
    f->prefill_sweep = f->prefill;
    f->uncollected = f->began;
    f->i++;
}

bool flight_goes_on(const Flight *f) {
    if (f->line->next_prompt < f->task->count)
        return true;
    for (int k = 0; k < f->K; k++)
        for (int r = 0; r < f->in_sweep[k]->nseq; r++)
            if (!is_last_token(f->in_sweep[k], f->in_sweep[k]->seq[r]))
                return true;
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
    f->batches = p->batches / flight_count(&p->policy);
    f->batch = xcalloc(f->batches, sizeof *f->batch);
    f->in_sweep = xcalloc(f->batches, sizeof *f->in_sweep);
    f->seqs = xcalloc(block, sizeof *f->seqs);
    f->entered = xcalloc(block, sizeof *f->entered);
    admission_open(&f->admission, &p->policy, f->task, &f->line->next_prompt, p->npages);
    for (int i = 0; i < block; i++) {
        f->seqs[i].pages = xcalloc(p->max_pages, sizeof(int));
        f->seqs[i].tokens = xcalloc(f->admission.horizon, sizeof(int32_t));
    }
    f->nseqs = block;
    for (int k = 0; k < f->batches; k++) {
        Batch *b = &f->batch[k];
        b->index = f->number * f->batches + k;
        b->page_tokens = p->policy.page_tokens;
        b->seq = xcalloc(p->max_seqs, sizeof *b->seq);
        b->joining = xcalloc(p->max_seqs, sizeof *b->joining);
        for (int t = TIER_CPU; t <= TIER_DISK; t++)
            b->staged[t] = xcalloc((size_t)p->max_seqs * p->max_pages, sizeof(Staged));
    }
    f->came = is_last(&p->config)
                  ? NULL
                  : xcalloc(2 * (size_t)imax(p->last_rows, p->max_seqs), sizeof *f->came);
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
        for (int t = 0; t < NTIERS; t++)
            free(f->batch[k].staged[t]);
    }
    for (int t = 0; t < NTIERS; t++)
        pool_close(&f->pool[t]);
    admission_close(&f->admission);
    free(f->batch);
    free(f->in_sweep);
    free(f->seqs);
    free(f->entered);
    free(f->came);
}

int batch_moves(Move *moves, int n, const Batch *b, Tier tier, Tensor to, Tensor from) {
    const Staged *list = b->staged[tier];
    const int page = b->page_tokens;
    for (int i = 0, end; i < b->nstaged[tier]; i = imax(end, i + 1)) {
        for (end = i; end < b->nstaged[tier] && list[end].past; end++)
            if (list[end].page - list[i].page != end - i)
                break;
        if (end > i)
            n = add_move(moves, n, tensor_rows(to, i * page, (end - i) * page),
                         tensor_rows(from, list[i].page * page, (end - i) * page));
    }
    return n;
}
