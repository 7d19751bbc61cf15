/* sparse.c: sparse attention (section 5): of each query and head, only the tokens with the largest
 * scores are used.
 *
 * It reads all of K, and then V of the chosen tokens, which it first fetches if the pages rest on
 * disk: where pages come into staging, only their K does (bring_cache). The CPU attends for all
 * sequences whose cache is not on the GPU.
 * Read next: stages.c. */
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
