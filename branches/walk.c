/* walk.c: what a task will need, counted before it runs (sections 4.2 and A.2).
 *
 * The plan walks the task through admission.c as if no sequence stopped early, and counts
 *   maxima   the most rows, sequences and pages of a batch, and the most pages of a pool; plan.c
 *            makes its regions so large
 *   sums     how many sweeps there are, and how much work they do (branches/work.c); the cost model
 *            needs them
 * The walk goes in stretches. A stretch is a run of sweeps between which no sequence enters or
 * leaves. Here are two sequences of a zig-zag block, with n = 2 and n = 4, and the block after it;
 * P is a prefill and d a decoding step:
 *
 *     sweep         0   1   2   3   4   5  ..
 *     n = 2         P   d   .   .   .   .
 *     n = 4         P   d   d   d   .   .
 *     next block    .   .   .   .   P   d  ..
 *     stretch       1       2       3
 *
 * The chapters are the maxima of a batch, the stretches of a task, and what follows from both.
 * Read next: ledger.c. */
#include <limits.h>
#include <math.h>

#include "branches/walk.h"

// -------------------------------------------------------------------------------------------------
// The maxima: what one GPU batch needs
//
// A block that enters together is measured as it is seated.
// -------------------------------------------------------------------------------------------------

/* The most that one GPU batch needs. "off" counts only sequences whose KV is not on the GPU. */
typedef struct {
    int seqs;
    int rows;      /* token rows of its prefill */
    int head_rows; /* those of them that the head needs */
    int off_seqs, off_rows;
    int off_pages[NTIERS]; /* pages on CPU and disk when the sequences are longest */
    int act_rows[NTIERS];  /* rows by the tier of their activations */
} BatchNeed;

/* Makes *most at least n. */
static void raise_to(int *most, int n) { *most = imax(*most, n); }

/* Raises the plan's maxima to what batch k needs. */
static void note_batch(Plan *p, int k, const BatchNeed *b) {
    raise_to(&p->batches, k + 1);
    raise_to(&p->max_rows, b->rows);
    raise_to(&p->max_seqs, b->seqs);
    raise_to(&p->head_rows, b->head_rows);
    raise_to(&p->off_rows, b->off_rows);
    raise_to(&p->off_seqs, b->off_seqs);
    raise_to(&p->disk_act_rows, b->act_rows[TIER_DISK]);
    for (int t = 0; t < NTIERS; t++)
        raise_to(&p->act_rows[t][k], b->act_rows[t]);
    if (!p->policy.delegated)
        raise_to(&p->staged_pages[TIER_GPU], b->off_pages[TIER_CPU] + b->off_pages[TIER_DISK]);
    raise_to(&p->staged_pages[TIER_CPU], b->off_pages[TIER_DISK]);
}

/* Returns how many pages a prompt's sequence has when they are loaded for the last time. A sequence
 * of one new token never loads any. */
static int loaded_pages(const Plan *p, const Prompt *q) {
    return q->n > 1 ? pages_for(q->s + q->n - 1, p->policy.page_tokens) : 0;
}

/* Adds to b a sequence of s prompt tokens in this seat. */
static void add_seat(BatchNeed *b, const Seat *seat, int s, int pages) {
    b->rows += s;
    b->seqs++;
    b->act_rows[seat->act] += s;
    if (seat->kv != TIER_GPU) {
        b->off_rows += s;
        b->off_seqs++;
        b->off_pages[seat->kv] += pages;
    }
}

/* Records what each batch of a block needs, when the whole block has just been seated. */
static void measure_block(Plan *p, const Task *task, const Seat *seats, int count) {
    for (int first = 0; first < count; first += p->policy.gbs) {
        BatchNeed b = {0};
        for (int r = first; r < imin(first + p->policy.gbs, count); r++) {
            const Prompt *q = &task->prompts[seats[r].prompt];
            add_seat(&b, &seats[r], q->s, loaded_pages(p, q));
            b.head_rows += head_rows(task, q);
        }
        note_batch(p, seats[first].k, &b);
    }
}

// -------------------------------------------------------------------------------------------------
// The stretches of a task
//
// Every flight has stretches of its own, but all flights take their prompts from one waiting line.
// So the stretches of all flights are walked in the order of their first sweeps.
// -------------------------------------------------------------------------------------------------

/* Does for the diagonal schedule, where any prompt may take any seat, what measure_block does for
 * the others. */
static void bound_batches(Plan *p, const Task *task, const Seat *seats, int count);

/* Returns the sweep before which the next sequence leaves the flight, with all its tokens. */
static long next_end(const Admission *a) {
    long end = LONG_MAX;
    for (int e = 0; e < a->nseats; e++) {
        const Prompt *q = seated_prompt(a, e);
        if (q && a->seat[e].since + q->n < end)
            end = a->seat[e].since + q->n;
    }
    return end;
}

/* Walks one stretch of a flight, from `sweep` on: seats the prompts that enter, counts, and lets
 * the sequences leave that end with the stretch. p->achieved counts these by the tiers of their KV
 * and of their activations. Returns the first sweep of the next stretch, or -1 when the flight has
 * ended. entered is scratch. */
static long walk_flight(Plan *p, Admission *a, long sweep, int *entered) {
    const Task *task = a->task;
    int topups, n = admission_next(a, sweep, entered, &topups);
    if (p->policy.schedule != SCHEDULE_DIAGONAL)
        measure_block(p, task, a->seat, n);
    else if (n && !sweep)
        bound_batches(p, task, a->seat, a->nseats);
    if (!a->seated)
        return -1;
    /* a prompt that may enter before any sweep ends the stretch after this one (diagonal.c) */
    long next = more_may_enter(a) ? sweep + 1 : next_end(a);
    note_work(p, a, n > 0, next);
    p->sweeps += next - sweep;
    for (int e = 0; e < a->nseats; e++) {
        const Prompt *q = seated_prompt(a, e);
        if (!q || a->seat[e].since + q->n > next)
            continue;
        p->achieved[OF_CACHE][a->seat[e].kv]++;
        p->achieved[OF_ACTIVATIONS][a->seat[e].act]++;
        admission_leave(a, e, q->n);
    }
    return next;
}

/* Returns the flight whose next stretch begins first, as flights sweep in turn; -1: all have
 * ended. */
static int first_flight(const long *next, int flights) {
    int first = -1;
    for (int g = 0; g < flights; g++)
        if (next[g] >= 0 && (first < 0 || next[g] < next[first]))
            first = g;
    return first;
}

/* Walks the whole task through admission. */
static void walk_task(Plan *p, const Task *task) {
    int flights = p->policy.flights;
    Admission *a = xcalloc(flights, sizeof *a);
    /* the sweep with which each flight's next stretch begins */
    long *next = xcalloc(flights, sizeof *next);
    int *entered = xcalloc(imin(block_size(&p->policy), task->count), sizeof *entered);
    int next_prompt = 0;
    for (int g = 0; g < flights; g++)
        admission_open(&a[g], &p->policy, task, &next_prompt, NULL);
    for (int g = 0; g >= 0; g = first_flight(next, flights))
        next[g] = walk_flight(p, &a[g], next[g], entered);
    for (int g = 0; g < flights; g++) {
        for (int t = 0; t < NTIERS; t++) /* the pools serve the peak of each flight */
            raise_to(&p->npages[t], a[g].peak[t]);
        admission_close(&a[g]);
    }
    free(entered);
    free(next);
    free(a);
}

// -------------------------------------------------------------------------------------------------
// What follows from the counts
// -------------------------------------------------------------------------------------------------

/* Sets the sizes of pieces, and how many slots the workspaces of batches and of pieces have.
 *
 * A piece takes sequences as long as they fit, so two neighbouring pieces have together more than
 * piece_rows rows. Pieces 0 and 1, 2 and 3 and so on are such pairs, and together they have at most
 * max_rows rows. So there are at most max_rows / piece_rows pairs, and one piece more. Pieces of
 * one batch follow each other through the same three workspaces as batches do; so a batch of
 * several pieces needs all of them even when it is alone. */
static void size_pieces(Plan *p) {
    enum { LEAST_CHUNK = 64 }; /* the head's rows at a time, unless max_seqs is more */
    int in_flight = imin(WORKSPACES, imax(p->batches, 1));
    p->piece_rows = imin(imax(p->policy.piece_rows, p->max_prompt), p->max_rows);
    raise_to(&p->piece_rows, p->max_seqs);
    p->square_slots = imin(p->policy.workspaces, in_flight);
    p->piece_slots = p->max_rows > p->piece_rows ? WORKSPACES : in_flight;
    p->pieces = imax(1, imin(p->max_seqs, 2 * p->max_rows / imax(p->piece_rows, 1) + 1));
    p->head_chunk = imin(imax(p->max_seqs, LEAST_CHUNK), p->head_rows);
}

void plan_batches(Plan *p, const Task *task) {
    int flights = p->policy.flights, most = flights * (p->policy.num_gpu_batches + 1);
    for (int t = 0; t < NTIERS; t++) {
        p->act_rows[t] = xcalloc(most, sizeof(int));
        p->act_first[t] = xcalloc(most + 1, sizeof(int));
    }
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        raise_to(&p->max_prompt, q->s);
        raise_to(&p->max_len, q->s + q->n - 1);
    }
    p->max_pages = pages_for(p->max_len, p->policy.page_tokens);
    walk_task(p, task);
    int batches = p->batches; /* of one flight; every flight has batches of the same sizes */
    p->batches *= flights;
    for (int t = 0; t < NTIERS; t++) {
        for (int k = 0; k < p->batches; k++) {
            p->act_rows[t][k] = p->act_rows[t][k % batches];
            p->act_first[t][k + 1] = p->act_first[t][k] + p->act_rows[t][k];
        }
        p->achieved[OF_CACHE][t] /= imax(task->count, 1);
        p->achieved[OF_ACTIVATIONS][t] /= imax(task->count, 1);
    }
    size_pieces(p);
    p->a21_kv = task->count ? a21_cache(p, task) : 0;
}

// -------------------------------------------------------------------------------------------------
// The diagonal schedule: bounds of what batches need, where prompts enter one by one into seats
// that become vacant
// -------------------------------------------------------------------------------------------------

/* Returns the need of gbs neighbouring prompts: the largest rows and the largest head_rows that any
 * gbs neighbours have. */
static BatchNeed widest_window(const Task *task, int gbs) {
    BatchNeed most = {.seqs = gbs};
    int rows = 0, last = 0;
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        rows += q->s;
        last += head_rows(task, q);
        if (i >= gbs) { /* a prompt leaves the window */
            rows -= q[-gbs].s;
            last -= head_rows(task, q - gbs);
        }
        raise_to(&most.rows, rows);
        raise_to(&most.head_rows, last);
    }
    return most;
}

/* Lowers all counts of rows to at most `most`. */
static void cap_rows(BatchNeed *b, int most) {
    b->rows = imin(b->rows, most);
    b->off_rows = imin(b->off_rows, most);
    for (int t = 0; t < NTIERS; t++)
        b->act_rows[t] = imin(b->act_rows[t], most);
}

/* Records bounds for the batches of the diagonal schedule, where any prompt may take any seat:
 *   seqs        the batch's seats
 *   pages       the longest sequence in each seat
 *   rows        the longest prompt in each seat, but at most the widest window, because prompts
 *               that prefill together are neighbours in the input
 *   head_rows   the widest window
 *   npages      room for the longest sequence on every tier that has a seat
 * The topups of all batches prefill together in one more batch, the entrance. It has at most the
 * widest window of rows, wherever these rest:
 *   off_rows    the sum over the batches whose seats the topups take
 *   act_rows    the policy's fractions of every possible number of topups
 *   pages       none: a prefill loads no pages, nor does the CPU attend for it (off_seqs) */
static void bound_batches(Plan *p, const Task *task, const Seat *seats, int count) {
    int gbs = imin(p->policy.gbs, count), s = p->max_prompt;
    double share[NTIERS] = {p->policy.hg, p->policy.hc, fmax(0, 1 - p->policy.hg - p->policy.hc)};
    BatchNeed entrance = widest_window(task, gbs);
    int pages = 0, seqs[NTIERS];
    for (int i = 0; i < task->count; i++)
        raise_to(&pages, loaded_pages(p, &task->prompts[i]));
    for (int n = 1; n <= gbs; n++) {
        apportion(seqs, share, n); /* as deal_block does */
        for (int t = 0; t < NTIERS; t++)
            raise_to(&entrance.act_rows[t], seqs[t] * s);
    }
    cap_rows(&entrance, entrance.rows);
    for (int first = 0; first < count; first += gbs) {
        BatchNeed b = {.head_rows = entrance.head_rows};
        for (int r = first; r < imin(first + gbs, count); r++) {
            add_seat(&b, &seats[r], s, pages);
            raise_to(&p->npages[seats[r].kv], p->max_pages);
        }
        cap_rows(&b, entrance.rows);
        note_batch(p, seats[first].k, &b);
        entrance.off_rows = imin(entrance.off_rows + b.off_rows, entrance.rows);
    }
    note_batch(p, ceil_div(count, gbs), &entrance);
}
