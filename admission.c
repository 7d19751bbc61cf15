/* admission.c: decides between two sweeps which prompts enter the next one, by one of the three
 * schedules (section 4.1, Figure 3; appendix A.2, Figure 6).
 *
 * A block is a set of seats. A seat is a place in a GPU batch, with a home for the KV cache and one
 * for the activations of the sequence that takes it. Before each sweep, admission decides which
 * waiting prompts take which vacant seats. They prefill in that sweep and stay until they have
 * their n tokens or stop. Row, zig-zag and diagonal differ only in how many seats may be taken now
 * (each is one small function) and in the size of a block: for row it is one GPU batch. No sequence
 * is ever moved out, and prompts enter in the order of the input, so no prompt starves.
 *
 * The ledger `need` holds the number of KV pages of each tier that the seated sequences will hold
 * in every sweep to come if none stops early (an early stop only frees pages). The plan runs the
 * whole task through this file without a limit and makes the pools as large as the largest need
 * (plan.c). The run does it again with that limit: a prompt enters only if its pages fit in every
 * sweep up to its last. Without early stops, both give the same result.
 * Before schedule.c, look at RegionId in plan.h and at lanes and ops in device/device.h.
 * Read next: schedule.c. */
#include <math.h>

#include "flexgen.h"

const char *const schedule_name[] = {"zigzag", "row", "diagonal"};

// -------------------------------------------------------------------------------------------------
// Dealing seats to GPU batches and to tiers
// -------------------------------------------------------------------------------------------------

Tier diffuse(Diffusion *d, double size) {
    Tier best = TIER_GPU;
    for (int t = 0; t < NTIERS; t++) {
        d->due[t] += size * d->share[t];
        if (d->share[t] > 0 && (d->share[best] <= 0 || d->due[t] > d->due[best] + 1e-9 * size))
            best = (Tier)t;
    }
    d->due[best] -= size;
    return best;
}

int block_size(const Policy *policy) {
    return policy->schedule == SCHEDULE_ROW ? policy->gbs : policy->gbs * policy->num_gpu_batches;
}

void apportion(int count[NTIERS], const double share[NTIERS], int total) {
    double rest[NTIERS];
    int left = total;
    for (int t = 0; t < NTIERS; t++) {
        double exact = share[t] * total;
        count[t] = (int)floor(exact + 1e-9);
        rest[t] = exact - count[t];
        left -= count[t];
    }
    for (; left > 0; left--) {
        int best = 0;
        for (int t = 1; t < NTIERS; t++)
            if (rest[t] > rest[best])
                best = t;
        count[best]++;
        rest[best] -= 1;
    }
}

static int by_k_and_tier(const void *a, const void *b) {
    const Seat *x = a, *y = b;
    return x->k != y->k ? x->k - y->k : (int)x->kv - (int)y->kv;
}

static int by_tier(const void *a, const void *b) {
    return (int)*(const Tier *)a - (int)*(const Tier *)b;
}

/* Returns an error diffusion that deals `count` items in the whole numbers nearest to the
 * shares. */
static Diffusion dealer(double g, double c, int count) {
    double share[NTIERS] = {g, c, fmax(0, 1 - g - c)};
    int whole[NTIERS];
    Diffusion d = {{0}, {0}};
    apportion(whole, share, count);
    for (int t = 0; t < NTIERS; t++)
        d.share[t] = (double)whole[t] / count;
    return d;
}

void deal_block(Seat *seats, const Policy *policy, int count) {
    if (!count)
        return;
    Diffusion kv = dealer(policy->cg, policy->cc, count),
              act = dealer(policy->hg, policy->hc, count);
    Tier *tiers = xcalloc(count, sizeof *tiers);
    for (int i = 0; i < count; i++) {
        seats[i] = (Seat){.prompt = -1, .k = i / policy->gbs, .kv = diffuse(&kv, 1)};
        tiers[i] = diffuse(&act, 1);
    }
    qsort(seats, count, sizeof *seats, by_k_and_tier);
    for (int i = 0; i < count; i += policy->gbs) { /* sort the tiers of each batch */
        int n = imin(policy->gbs, count - i);
        qsort(tiers + i, n, sizeof *tiers, by_tier);
        for (int r = 0; r < n; r++)
            seats[i + r].act = tiers[i + r];
    }
    free(tiers);
}

// -------------------------------------------------------------------------------------------------
// How many prompts may take a seat, by schedule
// -------------------------------------------------------------------------------------------------

/* Returns the seats of the row schedule, Figure 3(a): the next GPU batch enters when the one before
 * it has finished. */
static int row_seats(const Admission *a) { return a->seated ? 0 : a->policy->gbs; }

/* Returns the seats of the zig-zag schedule, Figures 3(b) and 4: the next block enters when the
 * whole block has finished. */
static int zigzag_seats(const Admission *a) { return a->seated ? 0 : a->nseats; }

/* Returns the seats of the diagonal schedule, Figure 6: one more GPU batch enters every n/K sweeps
 * until all K are in flight; from then on every sequence that leaves is replaced. With equal
 * lengths, this again replaces one batch every n/K sweeps.
 *
 * Squares are computed in this order. Batch k has entered with sweep i_k. Sweep i computes, layer
 * by layer, the square (token i - i_k, layer j) of every batch k in flight. After the entrance
 * (batch.c), the oldest batch comes first; it is the farthest to the right in the figure. All
 * squares of a sweep are one diagonal of Figure 6. Those of one layer, one in each row, are one of
 * its sub-diagonals, and share the weights. The warm-up is the figure's gray area: first batch 0
 * alone, then with batch 1, until K batches are n/K tokens apart. */
static int diagonal_seats(const Admission *a) {
    long K = (a->nseats + a->policy->gbs - 1) / a->policy->gbs, open = 1 + a->sweep * K / a->n;
    return (open < K ? (int)open * a->policy->gbs : a->nseats) - a->seated;
}

int (*seats_for[])(const Admission *) = {zigzag_seats, row_seats, diagonal_seats};

// -------------------------------------------------------------------------------------------------
// The ledger of pages
// -------------------------------------------------------------------------------------------------

/* Returns a pointer to the need of a tier in a coming sweep; the caller may change it. */
static int *need_in(const Admission *a, Tier tier, long sweep) {
    return &a->need[tier][sweep % a->horizon];
}

/* Returns true if the tier has pages for the prompt in every sweep in which it will take part. */
static bool pages_fit(const Admission *a, const Prompt *q, Tier kv) {
    for (int x = 0; a->limit && x < q->n; x++)
        if (*need_in(a, kv, a->sweep + x) + pages_for(q->s + x, a->policy->page_tokens) >
            a->limit[kv])
            return false;
    return true;
}

/* Seats the next prompt if its pages fit. Returns false if they do not. */
static bool take_seat(Admission *a, int seat) {
    Seat *to = &a->seat[seat];
    const Prompt *q = &a->task->prompts[*a->next_prompt];
    if (!pages_fit(a, q, to->kv))
        return false;
    for (int x = 0, at = (int)(a->sweep % a->horizon); x < q->n;
         x++, at = at + 1 < a->horizon ? at + 1 : 0) {
        int need = a->need[to->kv][at] += pages_for(q->s + x, a->policy->page_tokens);
        if (need > a->peak[to->kv])
            a->peak[to->kv] = need;
    }
    to->prompt = (*a->next_prompt)++;
    to->since = a->sweep;
    a->seated++;
    a->in_batch[to->k]++;
    return true;
}

void admission_leave(Admission *a, int seat, int generated) {
    Seat *from = &a->seat[seat];
    const Prompt *q = &a->task->prompts[from->prompt];
    for (int x = generated; x < q->n; x++)
        *need_in(a, from->kv, from->since + x) -= pages_for(q->s + x, a->policy->page_tokens);
    from->prompt = -1;
    a->seated--;
    a->in_batch[from->k]--;
}

// -------------------------------------------------------------------------------------------------
// Between two sweeps
// -------------------------------------------------------------------------------------------------

/* Deals the seats of the next block: as many as the waiting prompts need, at most a block's. With
 * the diagonal schedule all prompts of the task count, so that its block always has the same seats.
 */
static void deal_seats(Admission *a) {
    int left = a->task->count - (a->policy->schedule == SCHEDULE_DIAGONAL ? 0 : *a->next_prompt);
    a->nseats = imin(block_size(a->policy), left);
    deal_block(a->seat, a->policy, a->nseats);
}

/* Seats at most `most` prompts, in the order of the input, in batches that have members (or in
 * those that have none). Returns how many it has seated. */
static int fill_seats(Admission *a, int *entered, int most, const bool *with_members,
                      bool members) {
    int n = 0;
    for (int seat = 0; seat < a->nseats && n < most && *a->next_prompt < a->task->count; seat++) {
        if (a->seat[seat].prompt >= 0 || with_members[a->seat[seat].k] != members)
            continue;
        if (!take_seat(a, seat))
            break;
        entered[n++] = seat;
    }
    return n;
}

int admission_next(Admission *a, long sweep, int *entered, int *topups) {
    /* the places of sweeps that are over are free for later ones: `need` is a ring */
    for (; a->sweep < sweep; a->sweep++)
        for (int t = 0; t < NTIERS; t++)
            *need_in(a, (Tier)t, a->sweep) = 0;
    *topups = 0;
    if (*a->next_prompt == a->task->count)
        return 0;
    if (!a->seated)
        deal_seats(a);
    int most = seats_for[a->policy->schedule](a), batches = a->policy->num_gpu_batches;
    if (most <= 0)
        return 0;
    for (int k = 0; k < batches; k++)
        a->with_members[k] = a->in_batch[k] > 0;
    *topups = fill_seats(a, entered, imin(most, a->policy->gbs), a->with_members, true);
    return *topups + fill_seats(a, entered + *topups, most - *topups, a->with_members, false);
}

void admission_open(Admission *a, const Policy *policy, const Task *task, int *next_prompt,
                    const int *limit) {
    int seats = imin(block_size(policy), task->count);
    long tokens = 0;
    *a = (Admission){
        .policy = policy, .task = task, .next_prompt = next_prompt, .limit = limit, .horizon = 1};
    for (int i = 0; i < task->count; i++) {
        tokens += task->prompts[i].n;
        if (task->prompts[i].n > a->horizon)
            a->horizon = task->prompts[i].n;
    }
    a->n = task->count ? (tokens + task->count - 1) / task->count : 1;
    a->seat = xcalloc(seats, sizeof *a->seat);
    a->in_batch = xcalloc(policy->num_gpu_batches, sizeof *a->in_batch);
    a->with_members = xcalloc(policy->num_gpu_batches, sizeof *a->with_members);
    for (int t = 0; t < NTIERS; t++)
        a->need[t] = xcalloc(a->horizon, sizeof(int));
}

void admission_close(Admission *a) {
    for (int t = 0; t < NTIERS; t++)
        free(a->need[t]);
    free(a->seat);
    free(a->in_batch);
    free(a->with_members);
}
