/* walk.c: what a task will need, counted before it runs: the whole task walked through admission as if nobody stopped
 * early.
 *
 * The plan (tier.c) wants the largest that anything becomes: the rows of a batch, the pages of a pool. The cost model
 * (cost/runtime.c) wants sums: how many sweeps there are and what they have to do. Both come from one walk. Each step of it
 * is one sweep before which someone enters, and all sweeps behind it in which only ages change. Read next:
 * device/depend.c, how the order of ops follows from what they use. */
#include <limits.h>
#include <math.h>

#include "tier.h"

enum { HEAD_ROWS = 64 };

// ---------------------------------------------------------------------------------------------------------------
// The largest
// ---------------------------------------------------------------------------------------------------------------

/* Of one GPU batch, at most: rows of its prefill, and of them those that the head wants; of those of its sequences that
 * have KV off the GPU the rows, and the pages on CPU and disk when they are longest; rows by the tier of their activations.
 */
typedef struct {
    int rows, last_rows, seqs, off_rows, off_seqs, act_rows[NTIERS], off_pages[NTIERS];
} BatchNeed;

static void note_batch(Plan *p, int k, const BatchNeed *b) {
    p->batches = imax(p->batches, k + 1);
    p->max_rows = imax(p->max_rows, b->rows);
    p->max_seqs = imax(p->max_seqs, b->seqs);
    p->last_rows = imax(p->last_rows, b->last_rows); /* at least one of each prompt */
    p->off_rows = imax(p->off_rows, b->off_rows);
    p->off_seqs = imax(p->off_seqs, b->off_seqs);
    for (int t = 0; t < NTIERS; t++) {
        p->act_rows[t][k] = imax(p->act_rows[t][k], b->act_rows[t]);
        p->max_act_rows[t] = imax(p->max_act_rows[t], b->act_rows[t]);
    }
    if (!p->policy.cpu_attention)
        p->staged_pages[0] = imax(p->staged_pages[0], b->off_pages[TIER_CPU] + b->off_pages[TIER_DISK]);
    p->staged_pages[1] = imax(p->staged_pages[1], b->off_pages[TIER_DISK]);
}

static int longest_pages(const Plan *p, const Prompt *q) {
    return q->n > 1 ? pages_for(q->s + q->n - 1, p->policy.page_tokens) : 0;
}

/* A sequence of s tokens sits there. */
static void add_seat(BatchNeed *b, const Seat *seat, int s, int pages) {
    b->rows += s, b->seqs++, b->act_rows[seat->act] += s;
    if (seat->kv != TIER_GPU) b->off_rows += s, b->off_seqs++, b->off_pages[seat->kv] += pages;
}

/* The batches of a block that has just been seated as a whole. */
static void measure_block(Plan *p, const Task *task, const Seat *seats, int count) {
    for (int first = 0; first < count; first += p->policy.gbs) {
        BatchNeed b = {.rows = 0};
        for (int r = first; r < imin(first + p->policy.gbs, count); r++) {
            const Prompt *q = &task->prompts[seats[r].prompt];
            add_seat(&b, &seats[r], q->s, longest_pages(p, q)), b.last_rows += last_rows(task, q);
        }
        note_batch(p, seats[first].k, &b);
    }
}

/* Most rows that gbs neighbouring prompts have, and most of them that the head wants. */
static BatchNeed widest_window(const Task *task, int gbs) {
    BatchNeed most = {.seqs = gbs};
    int rows = 0, last = 0;
    for (int i = 0; i < task->count; i++) {
        const Prompt *in = &task->prompts[i], *out = i >= gbs ? in - gbs : NULL;
        rows += in->s - (out ? out->s : 0);
        last += last_rows(task, in) - (out ? last_rows(task, out) : 0);
        most.rows = imax(most.rows, rows), most.last_rows = imax(most.last_rows, last);
    }
    return most;
}

/* With the diagonal schedule anybody may come to sit anywhere, beside anybody: a batch needs what gbs of the longest would,
 * but a prefill has only neighbours of the input in it. */
static void bound_batches(Plan *p, const Task *task, const Seat *seats, int count) {
    const int gbs = imin(p->policy.gbs, count);
    const double share[NTIERS] = {p->policy.hg, p->policy.hc, fmax(0, 1 - p->policy.hg - p->policy.hc)};
    BatchNeed topups = widest_window(task, gbs);
    int s = 0, pages = 0, seqs[NTIERS];
    for (int i = 0; i < task->count; i++)
        s = imax(s, task->prompts[i].s), pages = imax(pages, longest_pages(p, &task->prompts[i]));
    for (int first = 0; first < count; first += gbs) {
        BatchNeed b = {.rows = 0};
        for (int r = first; r < imin(first + gbs, count); r++) add_seat(&b, &seats[r], s, pages);
        b.rows = imin(b.rows, topups.rows), b.last_rows = topups.last_rows, b.off_rows = imin(b.off_rows, topups.rows);
        for (int t = 0; t < NTIERS; t++) b.act_rows[t] = imin(b.act_rows[t], topups.rows);
        note_batch(p, seats[first].k, &b);
        topups.off_rows = imin(topups.off_rows + b.off_rows, topups.rows);
    }
    for (int n = 1; n <= gbs; n++) { /* topups have the policy's fractions among themselves, however many they are */
        apportion(seqs, share, n);   /* as deal_block does */
        for (int t = 0; t < NTIERS; t++) topups.act_rows[t] = imin(imax(topups.act_rows[t], seqs[t] * s), topups.rows);
    }
    note_batch(p, (count + gbs - 1) / gbs, &topups);
}

// ---------------------------------------------------------------------------------------------------------------
// The sums
// ---------------------------------------------------------------------------------------------------------------

/* When the next of those seated has all its tokens. */
static long next_end(const Admission *a) {
    long end = LONG_MAX;
    for (int e = 0; e < a->nseats; e++) {
        const Seat *seat = &a->seat[e];
        if (seat->prompt < 0) continue;
        long at = seat->since + a->task->prompts[seat->prompt].n;
        if (at < end) end = at;
    }
    return end;
}

/* Adds what this sweep and those before sweep `until` have to do; in them nobody enters or leaves. Seats lie batch by
 * batch; who prefills in a batch that decodes has come through the entrance, which is a batch of its own for one sweep. */
static void note_work(Plan *p, const Admission *a, bool entering, long until) {
    Workload *now = &p->work[entering], *later = &p->work[0];
    const double more = (double)(until - a->sweep - 1);
    bool entrance = false;
    now->sweeps++, later->sweeps += more;
    for (int e = 0; e < a->nseats;) {
        bool decodes = false, prefills = false;
        for (const int k = a->seat[e].k; e < a->nseats && a->seat[e].k == k; e++) {
            if (a->seat[e].prompt < 0) continue;
            const Prompt *q = &a->task->prompts[a->seat[e].prompt];
            const double s = q->s, age = (double)(a->sweep - a->seat[e].since);
            if (age > 0)
                decodes = true, now->steps++, now->past += s + age, now->last_rows++;
            else
                prefills = true, now->prompts++, now->prompt_rows += s, now->pairs += s * (s + 1) / 2,
                now->last_rows += last_rows(a->task, q);
            later->last_rows += more, later->steps += more, later->past += more * (s + age) + more * (more + 1) / 2;
        }
        now->decodes += decodes, now->prefills += prefills && !decodes, later->decodes += more * (decodes || prefills);
        entrance = entrance || (prefills && decodes);
    }
    now->prefills += entrance;
}

// ---------------------------------------------------------------------------------------------------------------
// The walk
// ---------------------------------------------------------------------------------------------------------------

/* Before a flight's sweep: who enters, and what that takes. Returns its next sweep in which someone may enter, or -1: it
 * has ended. */
static long walk_flight(Plan *p, Admission *a, long sweep, int *entered, long dealt[2][NTIERS]) {
    const bool diagonal = p->policy.schedule == SCHEDULE_DIAGONAL;
    const Task *task = a->task;
    int topups, n = admission_next(a, sweep, entered, &topups);
    if (n && !diagonal) measure_block(p, task, a->seat, n);
    if (n && diagonal && !sweep) bound_batches(p, task, a->seat, a->nseats);
    for (int e = 0; e < n; e++) dealt[0][a->seat[entered[e]].kv]++, dealt[1][a->seat[entered[e]].act]++;
    if (!a->seated) return -1;
    bool opening = *a->next_prompt < task->count && a->seated < a->nseats; /* someone may enter before anybody leaves */
    const long next = diagonal && opening ? sweep + 1 : next_end(a);
    note_work(p, a, n > 0, next);
    p->sweeps += next - sweep;
    for (int e = 0; e < a->nseats; e++)
        if (a->seat[e].prompt >= 0 && a->seat[e].since + task->prompts[a->seat[e].prompt].n <= next)
            admission_leave(a, e, task->prompts[a->seat[e].prompt].n);
    return next;
}

/* Walks the whole task through admission: pools as large as the largest need of a flight, batches as large as the largest.
 * Flights sweep in turn, so that of those who may let someone enter the first is the one with the fewest sweeps. */
static void walk_task(Plan *p, const Task *task, long dealt[2][NTIERS]) {
    const int flights = flight_count(&p->policy);
    Admission *a = xcalloc(flights, sizeof *a);
    long *next = xcalloc(flights, sizeof *next);
    int line = 0, *entered = xcalloc(imin(block_size(&p->policy), task->count), sizeof *entered);
    for (int g = 0; g < flights; g++) admission_open(&a[g], &p->policy, task, &line, NULL);
    for (int g = 0; g >= 0;) {
        next[g] = walk_flight(p, &a[g], next[g], entered, dealt);
        g = -1;
        for (int e = 0; e < flights; e++)
            if (next[e] >= 0 && (g < 0 || next[e] < next[g])) g = e;
    }
    for (int g = 0; g < flights; g++) {
        for (int e = 0; p->policy.schedule == SCHEDULE_DIAGONAL && e < a[g].nseats; e++)
            a[g].peak[a[g].seat[e].kv] =
                imax(a[g].peak[a[g].seat[e].kv], p->max_pages); /* alone there, it must have room */
        for (int t = 0; t < NTIERS; t++) p->npages[t] = imax(p->npages[t], a[g].peak[t]);
        admission_close(&a[g]);
    }
    free(entered), free(next), free(a);
}

void plan_batches(Plan *p, const Task *task) {
    long dealt[2][NTIERS] = {{0}};
    const int flights = flight_count(&p->policy);
    for (int t = 0; t < NTIERS; t++) {
        p->act_rows[t] = xcalloc(flights * (p->policy.num_gpu_batches + 1), sizeof(int));
        p->act_first[t] = xcalloc(flights * (p->policy.num_gpu_batches + 1), sizeof(int));
    }
    for (int i = 0; i < task->count; i++)
        p->max_pages = imax(p->max_pages, pages_for(task->prompts[i].s + task->prompts[i].n - 1, p->policy.page_tokens));
    walk_task(p, task, dealt);
    const int batches = p->batches; /* of a flight, and any flight's may be like any other's */
    p->batches *= flights;
    for (int t = 0; t < NTIERS; t++) {
        for (int k = batches; k < p->batches; k++) p->act_rows[t][k] = p->act_rows[t][k - batches];
        for (int k = 1; k < p->batches; k++) p->act_first[t][k] = p->act_first[t][k - 1] + p->act_rows[t][k - 1];
        for (int what = 0; what < 2; what++)
            p->achieved[1 + what][t] = task->count ? (double)dealt[what][t] / task->count : 0;
    }
    p->piece_rows = p->policy.piece_rows ? p->policy.piece_rows : PIECE_ROWS;
    for (int i = 0; i < task->count; i++) p->piece_rows = imax(p->piece_rows, task->prompts[i].s);
    p->piece_rows = imax(imin(p->piece_rows, p->max_rows), p->max_seqs);
    const int batches_under_way = imin(WORKSPACES, imax(p->batches, 1));
    p->nws = imin(p->policy.workspaces ? p->policy.workspaces : WORKSPACES, batches_under_way);
    p->turns = p->max_rows > p->piece_rows ? WORKSPACES : batches_under_way;
    /* two neighbouring pieces together have more rows than one may have */
    p->pieces = imax(1, imin(p->max_seqs, p->piece_rows ? 2 * p->max_rows / p->piece_rows + 1 : 1));
    p->head_chunk = imin(imax(p->max_seqs, HEAD_ROWS), p->last_rows);
}
