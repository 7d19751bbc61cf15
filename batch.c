/* batch.c: the flights, their batches, and the sequences of each batch (sections 4.2 and A.2).
 *
 * admission.c decides which prompts take which seats. Here these prompts become sequences of GPU
 * batches; batch.h has their structs and the numbers by which things are counted. A sequence has
 * tokens, rows of the hidden state and pages of the KV cache; a batch has index tables that tell
 * the kernels where all of these are. A batch's part in a sweep begins (batch_begin) with the
 * tokens that the previous sweep has chosen for it; they show which sequences have ended. The
 * members of a flight change between sweeps (flight_admit). New members of a batch that already has
 * members first prefill in a batch of their own, the entrance (branches/refill.c).
 *
 * Contract: only the thread that posts runs this file. Before it reads or writes data that ops use
 * too, it calls post_wait.
 * Read next: plan.c. */
#include "schedule.h"

// -------------------------------------------------------------------------------------------------
// Views
// -------------------------------------------------------------------------------------------------

Tensor batch_newest(const Flight *f, const Batch *b, RegionId id, Tier side) {
    if (id == NEW_TOKENS && f->run->task->scored)
        id = GREEDY;
    return tensor_cols(plan_view(f->run->plan, id, side, b->plan_place, 0, 1), 0, b->head_rows);
}

// -------------------------------------------------------------------------------------------------
// The newest tokens
// -------------------------------------------------------------------------------------------------

/* Adds one new token to a sequence. id is the token; -1 in a scored task, where the given token is
 * added and never ends the sequence early, and on the sim, where no token is known. Returns true if
 * the sequence goes on. If this was its last token, frees its pages and its seat and returns false.
 */
static bool add_token(Flight *f, const Batch *b, Sequence *q, int32_t id) {
    const Run *run = f->run;
    bool eos = is_eos(&run->plan->config, id);
    q->tokens[q->generated] = run->task->scored ? q->prompt->ids[q->s + q->generated] : id;
    q->generated++;
    bool stopped = tell_token(f, q) || eos;
    if (!stopped && q->generated < q->n)
        return true;
    give_back_pages(f, b, q);
    admission_leave(&f->admission, q - f->seqs, q->generated);
    tell_end(f, q, eos, stopped);
    return false;
}

/* Waits for a batch's newest tokens, or in a scored task for the scores of its newest step, and
 * points f->ids and f->logp to them (to NULL on the sim, which has no memory). Returns false if the
 * run has failed. */
static bool await_newest(Flight *f, const Batch *b) {
    const Run *run = f->run;
    f->logp = NULL;
    if (!is_last_stage(&run->plan->config))
        return receive_newest(f, b);
    Tensor newest = batch_newest(f, b, NEW_TOKENS, TIER_CPU);
    /* one op copies all results, so the scores have arrived with the tokens */
    if (!post_wait(run->poster, newest, READS))
        return false;
    f->ids = cpu_address(run->poster, newest);
    if (run->task->scored)
        f->logp = cpu_address(run->poster, batch_newest(f, b, LOG_PROBS, TIER_CPU));
    return share_newest(f, b);
}

/* Waits for the batch's newest tokens, gives each sequence its own, and removes the sequences that
 * have ended. This happens once for each batch and sweep: between two sweeps for the batches that
 * end_sequences names, and for the others when they begin the next sweep (batch_begin), so that the
 * GPU need not wait. */
static void collect(Flight *f, Batch *b) {
    const Run *run = f->run;
    if (!b->uncollected || run->poster->failed)
        return;
    b->uncollected = false;
    if (!await_newest(f, b))
        return;
    tell_scores(f, b);
    int going = 0;
    for (int r = 0; r < b->nseq && !run->poster->failed; r++) {
        tell_logits(f, b, r);
        if (add_token(f, b, b->seq[r], f->ids && !run->task->scored ? f->ids[r] : -1))
            b->seq[going++] = b->seq[r];
    }
    b->nseq = going;
    if (!--f->nuncollected)
        tell_sweep(f);
}

// -------------------------------------------------------------------------------------------------
// A batch begins its sweep: its members, its rows, its tables
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

/* Counts the rows of the new tokens, by the tier of their activations. Makes the routes of the
 * hidden state: the head needs the last rows of each sequence. */
static void count_rows(Flight *f, Batch *b) {
    b->rows = b->head_rows = 0;
    for (int t = 0; t < NTIERS; t++) {
        b->act_rows[t] = b->act_head_rows[t] = 0;
        b->x[t].n = b->x_for_head[t].n = 0;
    }
    for (int r = 0; r < b->nseq; r++) {
        Sequence *q = b->seq[r];
        int rows = batch_rows(b, q);
        q->head_rows = b->prefill ? head_rows(f->run->task, q->prompt) : 1;
        b->rows += rows;
        b->head_rows += q->head_rows;
        add_leg(&b->x[q->act], b->act_rows[q->act], b->act_rows[q->act], rows);
        b->act_rows[q->act] += rows;
        add_leg(&b->x_for_head[q->act], b->act_head_rows[q->act],
                b->act_rows[q->act] - q->head_rows, q->head_rows);
        b->act_head_rows[q->act] += q->head_rows;
    }
}

bool batch_begin(Flight *f, Batch *b) {
    collect(f, b);
    while (b->njoining)
        add_member(b, b->joining[--b->njoining]);
    if (!b->nseq || f->run->poster->failed)
        return false;
    b->sweeps++;
    count_rows(f, b);
    grow_pages(f, b);
    lay_out_tables(f, b);
    /* stores of the sweep before last may still read the tables */
    if (!post_wait(f->run->poster, b->cpu.all, WRITES))
        return false;
    fill_tables(f, b);
    stage_pages(f, b);
    b->uncollected = true; /* from now on a token of each sequence is on its way */
    f->began++;
    return true;
}

// -------------------------------------------------------------------------------------------------
// Between sweeps
// -------------------------------------------------------------------------------------------------

/* Returns true if the sequence's newest token, which may not be known yet, is its last one. */
static bool is_last_token(const Batch *b, const Sequence *q) {
    int chosen = q->generated + (b->uncollected ? 1 : 0);
    return chosen == q->n;
}

/* Waits for the tokens of every batch in which a sequence ends, and of the entrance
 * (branches/refill.c), and drops empty batches. A stage of a pipeline that waits within its sweeps
 * (branches/stages.c) waits for the tokens of all batches here. */
static void end_sequences(Flight *f) {
    int K = 0;
    for (int k = 0; k < f->K; k++) {
        Batch *b = f->in_sweep[k];
        bool ends = b == entrance(f) || waits_in_sweep(f);
        for (int r = 0; r < b->nseq; r++)
            ends |= is_last_token(b, b->seq[r]);
        if (ends)
            collect(f, b);
    }
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
 * of its seat. The batch prefills in this sweep. */
static void begin_sequence(Flight *f, int seat, bool topup) {
    const Seat *from = &f->admission.seat[seat];
    Batch *b = topup ? entrance(f) : &f->batch[from->k];
    Sequence *q = &f->seqs[seat];
    q->prompt_index = from->prompt;
    q->prompt = &f->run->task->prompts[from->prompt];
    q->kv = from->kv;
    q->act = from->act;
    q->s = q->prompt->s;
    q->n = q->prompt->n;
    q->generated = q->npages = 0;
    if (!b->nseq) { /* its first member: the batch joins the sweep */
        b->prefill = f->prefill = true;
        b->admitted_as = f->run->admitted++;
        f->in_sweep[f->K++] = b;
    }
    add_member(b, q);
}

bool flight_admit(Flight *f) {
    int topups;
    end_sequences(f);
    f->prefill = false;
    if (f->run->poster->failed)
        return false;
    int n = admission_next(&f->admission, f->i, f->entered, &topups);
    for (int e = 0; e < n; e++)
        begin_sequence(f, f->entered[e], e < topups);
    if (topups)
        open_entrance(f);
    f->began = 0;
    return f->K > 0;
}

void flight_end_posting(Flight *f) {
    f->collected_prefill = f->prefill;
    f->nuncollected = f->began;
    f->i++;
}

bool flight_goes_on(const Flight *f) {
    if (f->run->next_prompt < f->run->task->count)
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

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows is the memory of a flight. On a first reading go on with
// plan.c.
// -------------------------------------------------------------------------------------------------

void flight_open(Flight *f) {
    Run *run = f->run;
    const Plan *p = run->plan;
    int block = imin(block_size(&p->policy), run->task->count);
    f->batches = p->batches / p->policy.flights;
    f->batch = xcalloc(f->batches, sizeof *f->batch);
    f->in_sweep = xcalloc(f->batches, sizeof *f->in_sweep);
    f->seqs = xcalloc(block, sizeof *f->seqs);
    f->entered = xcalloc(block, sizeof *f->entered);
    admission_open(&f->admission, &p->policy, run->task, &run->next_prompt, p->npages);
    for (int i = 0; i < block; i++) {
        f->seqs[i].pages = xcalloc(p->max_pages, sizeof(int));
        f->seqs[i].tokens = xcalloc(f->admission.horizon, sizeof(int32_t));
    }
    f->nseqs = block;
    for (int k = 0; k < f->batches; k++) {
        Batch *b = &f->batch[k];
        b->plan_place = f->index * f->batches + k;
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
        pool_open(&f->pool[t], f->index * p->npages[t], p->npages[t]);
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
