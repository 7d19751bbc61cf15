/* ledger.c: how many KV pages the seated sequences will hold, sweep by sweep (A.2.1).
 *
 * The ledger `need` holds the number of KV pages of each tier that the seated sequences will hold
 * in every sweep to come if none stops early (an early stop only frees pages). It is a ring buffer
 * of as many sweeps as the longest output has tokens. The plan runs the whole task through
 * admission.c without a limit and makes the pools as large as the largest need (walk.c). The run
 * does it again with that limit: a prompt enters only if its pages fit in every sweep up to its
 * last. Without early stops, both give the same result.
 * Read next: diagonal.c. */
#include "branches/walk.h"

/* Returns a pointer to the need of a tier in a coming sweep; the caller may change it. */
static int *need_in(const Admission *a, Tier tier, long sweep) {
    return &a->need[tier][sweep % a->horizon];
}

bool pages_fit(const Admission *a, const Prompt *q, Tier kv) {
    if (!a->limit)
        return true;
    for (int x = 0; x < q->n; x++)
        if (*need_in(a, kv, a->sweep + x) + pages_for(q->s + x, a->policy->page_tokens) >
            a->limit[kv])
            return false;
    return true;
}

void reserve_pages(Admission *a, const Seat *seat, int first, int sign) {
    const Prompt *q = &a->task->prompts[seat->prompt];
    int *need = a->need[seat->kv], at = (seat->since + first) % a->horizon;
    for (int x = first; x < q->n; x++) {
        need[at] += sign * pages_for(q->s + x, a->policy->page_tokens);
        if (need[at] > a->peak[seat->kv])
            a->peak[seat->kv] = need[at];
        at = at + 1 < a->horizon ? at + 1 : 0;
    }
}

void advance_ledger(Admission *a, long sweep) {
    for (; a->sweep < sweep; a->sweep++)
        for (int t = 0; t < NTIERS; t++)
            *need_in(a, t, a->sweep) = 0; /* a place for a later sweep */
}
