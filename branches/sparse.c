/* sparse.c: sparse attention (section 5): it reads all of K, then V of the chosen tokens, which it
 * first fetches if the pages rest on disk. */
#include "schedule.h"

void attend_sparsely(Run *run, Call call, PageTable pages, int first, Tensor o, Tensor q) {
    const Plan *p = run->plan;
    double sparsity = p->policy.sparsity;
    Tensor tokens = plan_view(p, CHOSEN, o.tier, 0, 0, q.rows);
    Tensor probs = plan_view(p, CHOSEN_PROBS, o.tier, 0, 0, q.rows);
    post(run->poster, op_select(call, tokens, probs, q, &pages, sparsity));
    if (run->square.batch->seq[first]->kv == TIER_DISK) {
        PageTable home = table_rows(home_pages(run, TIER_DISK), first, q.rows);
        post(run->poster, op_fetch(call_on(run, C_READ, CACHE), &pages, &home, tokens, sparsity));
    }
    post(run->poster, op_weigh(call, o, tokens, probs, &pages, sparsity));
}
