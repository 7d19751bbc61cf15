/* admission.c: decides between two sweeps which prompts enter the next one, by one of the three
 * schedules (section 4.2, Figure 3; appendix A.2, Figure 6).
 *
 * A block is a set of seats. A seat is a place in a GPU batch, with a home for the KV cache and one
 * for the activations of the sequence that takes it. Before each sweep, admission decides which
 * waiting prompts take which vacant seats. They prefill in that sweep and stay until they have
 * their n tokens or stop. No sequence is ever moved out, and prompts enter in the order of the
 * input, so no prompt starves. A prompt enters only if there will be pages for all its tokens.
 * branches/ledger.c keeps account of them: pages_fit asks it, reserve_pages writes into it, and
 * advance_ledger goes on to the next sweep.
 *
 * The schedules differ in how many seats may be taken now (seats_for) and in the size of a block: a
 * block of the row schedule is one GPU batch. With row and zig-zag all seats are vacant when a
 * block enters. The diagonal schedule opens the batches of its block one after the other
 * (branches/diagonal.c), and replaces sequences that end in batches that go on. The prompts that do
 * this, the topups, prefill together in one batch more, the entrance, and then join the batches of
 * their seats (branches/refill.c).
 * Read next: plan.h. (A look at Figure 4, `sweep` in schedule.c, first shows what its words are
 * for.) */
#include <math.h>

#include "branches/walk.h"

const char *const schedule_name[] = {"zigzag", "row", "diagonal"};

// -------------------------------------------------------------------------------------------------
// Dealing seats to GPU batches and to tiers
// -------------------------------------------------------------------------------------------------

Tier diffuse(Diffusion *d, double size) {
    Tier best = TIER_GPU; /* of equals, the upper tier; a tier without a share never gets an item */
    for (int t = 0; t < NTIERS; t++) {
        d->due[t] += size * d->share[t];
        if (d->share[t] > 0 && (d->share[best] <= 0 || d->due[t] > d->due[best] + 1e-9 * size))
            best = t;
    }
    d->due[best] -= size;
    return best;
}

int block_size(const Policy *policy) {
    return policy->schedule == SCHEDULE_ROW ? policy->gbs : policy->gbs * policy->num_gpu_batches;
}

void apportion(int count[NTIERS], const double share[NTIERS], int total) {
    double remainder[NTIERS];
    int left = total;
    for (int t = 0; t < NTIERS; t++) {
        double exact = share[t] * total;
        count[t] = floor(exact + 1e-9);
        remainder[t] = exact - count[t];
        left -= count[t];
    }
    for (; left > 0; left--) {
        int best = 0;
        for (int t = 1; t < NTIERS; t++)
            if (remainder[t] > remainder[best])
                best = t;
        count[best]++;
        remainder[best] -= 1;
    }
}

/* Returns an error diffusion that deals `count` items in the whole numbers nearest to the shares.
 * It uses these numbers in place of the shares, so that exactly they have been dealt in the end: of
 * 4 items in shares of 50, 30 and 20%, 2, 1 and 1 are dealt, in shares of 50, 25 and 25%. */
static Diffusion dealer(double g, double c, int count) {
    double share[NTIERS] = {g, c, fmax(0, 1 - g - c)};
    int whole[NTIERS];
    Diffusion d = {0};
    apportion(whole, share, count);
    for (int t = 0; t < NTIERS; t++)
        d.share[t] = (double)whole[t] / count;
    return d;
}

/* Takes one of the dealt[t] items of the uppermost tier t that has any, and returns the tier. */
static Tier take_uppermost(int dealt[NTIERS]) {
    int t = 0;
    while (!dealt[t])
        t++;
    dealt[t]--;
    return t;
}

void deal_block(Seat *seats, const Policy *policy, int count) {
    Diffusion kv = dealer(policy->cg, policy->cc, count);
    Diffusion act = dealer(policy->hg, policy->hc, count);
    for (int first = 0; first < count; first += policy->gbs) {
        int end = imin(first + policy->gbs, count);
        int kvs[NTIERS] = {0}, acts[NTIERS] = {0};
        for (int i = first; i < end; i++) {
            kvs[diffuse(&kv, 1)]++;
            acts[diffuse(&act, 1)]++;
        }
        for (int i = first; i < end; i++)
            seats[i] = (Seat){.prompt = -1,
                              .k = first / policy->gbs,
                              .kv = take_uppermost(kvs),
                              .act = take_uppermost(acts)};
    }
}

// -------------------------------------------------------------------------------------------------
// How many prompts may take a seat, by schedule
// -------------------------------------------------------------------------------------------------

/* Returns the seats of the row and the zig-zag schedule, Figures 3(a), 3(b) and 4: the next block
 * enters when the whole block has finished. The block of the row schedule is one GPU batch. */
static int block_seats(const Admission *a) { return a->seated ? 0 : a->nseats; }

/* How many may take a seat, by Schedule; tests replace one. */
int (*seats_for[])(const Admission *) = {block_seats, block_seats, diagonal_seats};

/* Seats the next prompt if its pages fit. Returns false if they do not. */
static bool take_seat(Admission *a, Seat *seat) {
    if (!pages_fit(a, &a->task->prompts[*a->next_prompt], seat->kv))
        return false;
    seat->prompt = (*a->next_prompt)++;
    seat->since = a->sweep;
    reserve_pages(a, seat, 0, 1);
    a->seated++;
    return true;
}

void admission_leave(Admission *a, int index, int generated) {
    Seat *seat = &a->seat[index];
    reserve_pages(a, seat, generated, -1);
    seat->prompt = -1;
    a->seated--;
    a->in_batch[seat->k]--;
}

// -------------------------------------------------------------------------------------------------
// Between two sweeps
// -------------------------------------------------------------------------------------------------

/* Deals the seats of the next block: as many as the waiting prompts need, at most a block's. With
 * the diagonal schedule all prompts of the task count: prompts come and go, and its seats stay.
 */
static void deal_seats(Admission *a) {
    int left = a->task->count - (a->policy->schedule == SCHEDULE_DIAGONAL ? 0 : *a->next_prompt);
    a->nseats = imin(block_size(a->policy), left);
    deal_block(a->seat, a->policy, a->nseats);
}

/* Seats at most `most` prompts, in the order of the input, in the batches that go on (topups) or in
 * those that have no members. Writes their seats to entered[] and returns how many there are. */
static int fill_seats(Admission *a, int *entered, int most, bool topups) {
    int n = 0;
    for (int i = 0; i < a->nseats && n < most && *a->next_prompt < a->task->count; i++) {
        Seat *seat = &a->seat[i];
        bool goes_on = a->in_batch[seat->k] > 0;
        if (seat->prompt >= 0 || goes_on != topups)
            continue;
        if (!take_seat(a, seat))
            break; /* no later prompt may overtake the one that does not fit */
        entered[n++] = i;
    }
    return n;
}

int admission_next(Admission *a, long sweep, int *entered, int *topups) {
    advance_ledger(a, sweep);
    *topups = 0;
    if (*a->next_prompt == a->task->count)
        return 0;
    if (!a->seated)
        deal_seats(a);
    int most = seats_for[a->policy->schedule](a);
    *topups = fill_seats(a, entered, imin(most, a->policy->gbs), true);
    int n = *topups + fill_seats(a, entered + *topups, most - *topups, false);
    for (int e = 0; e < n; e++)
        a->in_batch[a->seat[entered[e]].k]++; /* only now, since fill_seats asks who goes on */
    return n;
}

void admission_open(Admission *a, const Policy *policy, const Task *task, int *next_prompt,
                    const int *limit) {
    long tokens = 0;
    *a = (Admission){
        .policy = policy, .task = task, .next_prompt = next_prompt, .limit = limit, .horizon = 1};
    for (int i = 0; i < task->count; i++) {
        tokens += task->prompts[i].n;
        a->horizon = imax(a->horizon, task->prompts[i].n);
    }
    a->n = task->count ? (tokens + task->count - 1) / task->count : 1;
    a->seat = xcalloc(imin(block_size(policy), task->count), sizeof *a->seat);
    a->in_batch = xcalloc(policy->num_gpu_batches, sizeof *a->in_batch);
    for (int t = 0; t < NTIERS; t++)
        a->need[t] = xcalloc(a->horizon, sizeof(int));
}

void admission_close(Admission *a) {
    for (int t = 0; t < NTIERS; t++)
        free(a->need[t]);
    free(a->seat);
    free(a->in_batch);
}
