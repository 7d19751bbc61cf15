/* diagonal.c: how many prompts may enter with the diagonal schedule (A.2, Figure 6).
 *
 * DIFFERS: the paper describes this schedule but does not implement it. One more GPU batch is
 * opened every n/K sweeps until all K are open, and every sequence that leaves an open batch is
 * replaced. With K = 4 and n = 8, batches open before sweeps 0, 2, 4 and 6, and if all sequences
 * have 8 tokens, the first batch ends after sweep 7, the second after sweep 9, and so on: again one
 * every n/K sweeps.
 *
 * refill.c has the order in which the squares of these batches are computed, and the end of walk.c
 * what they need at most.
 * Read next: work.c. */
#include "branches/walk.h"

int diagonal_seats(const Admission *a) {
    long K = ceil_div(a->nseats, a->policy->gbs), open = 1 + a->sweep * K / a->n;
    return (open < K ? (int)open * a->policy->gbs : a->nseats) - a->seated;
}

bool more_may_enter(const Admission *a) {
    return a->policy->schedule == SCHEDULE_DIAGONAL && *a->next_prompt < a->task->count &&
           a->seated < a->nseats;
}
