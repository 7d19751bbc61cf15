/* work.c: how much work the sweeps of a task do, for the search (cost/runtime.c).
 *
 * The first sweep of a stretch (walk.c) may have prefills. In each later sweep all sequences
 * decode, and each attends to one token more than in the sweep before. Beside it stands the paper's
 * own figure of memory, for comparison with the plan's pages.
 * Read next: warm_up.c. */
#include "branches/walk.h"

/* Counts the work of the GPU batch that begins at seat `first`: that of the stretch's first sweep
 * in *now, that of its `more` later sweeps in *later. Returns true if the batch has topups: they
 * prefill while the rest of it decodes. */
static bool count_batch(Workload *now, Workload *later, const Admission *a, int first,
                        double more) {
    bool decodes = false, prefills = false;
    for (int e = first; e < imin(first + a->policy->gbs, a->nseats); e++) {
        const Prompt *q = seated_prompt(a, e);
        if (!q)
            continue;
        double s = q->s, age = a->sweep - a->seat[e].since;
        if (age > 0) {
            decodes = true;
            now->decoded++;
            now->past += s + age;
            now->head_rows++;
        } else {
            prefills = true;
            now->prompts++;
            now->prompt_rows += s;
            now->pairs += s * (s + 1) / 2;
            now->head_rows += head_rows(a->task, q);
        }
        later->decoded += more;
        later->past += more * (s + age) + more * (more + 1) / 2;
        later->head_rows += more;
    }
    now->decodes += decodes;
    now->prefills += prefills && !decodes;
    later->decodes += decodes || prefills ? more : 0;
    return prefills && decodes;
}

/* Adds to the plan the work of a stretch: of sweep a->sweep, in which sequences prefill or not, and
 * of the sweeps after it up to `until`. Topups prefill in the entrance, so they count as one more
 * batch in prefill, however many batches have topups. */
void note_work(Plan *p, const Admission *a, bool prefill, long until) {
    Workload *now = &p->work[prefill], *later = &p->work[false];
    double more = until - a->sweep - 1;
    bool topups = false;
    for (int first = 0; first < a->nseats; first += a->policy->gbs)
        topups |= count_batch(now, later, a, first, more);
    now->sweeps++;
    now->prefills += topups;
    later->sweeps += more;
}

// -------------------------------------------------------------------------------------------------
// The paper's own figure of memory
// -------------------------------------------------------------------------------------------------

/* Returns the KV term of A.2.1's peak memory, in bytes: 4 h1 bls l tokens, where each sequence
 * holds s + n tokens, or with the diagonal schedule (2s + n)(n - 1) / 2n.
 *
 * This is the mean of 0, s + 1, s + 2, ... s + n - 1, the lengths of n batches of which one enters
 * in each sweep; the one that enters counts as 0. Our pages (walk_task) need a little more, because
 * they hold its s tokens too, and because there may be fewer than n batches. For s = n = 4:
 *     A.2.1                (0 + 5 + 6 + 7) / 4 = 4.5 tokens
 *     pages, 4 batches     (4 + 5 + 6 + 7) / 4 = 5.5
 *     pages, 2 batches     (5 + 7) / 2 = 6, in every second sweep; in the others (4 + 6) / 2 = 5 */
double a21_cache(const Plan *p, const Task *task) {
    double s = 0, n = 0;
    int bls = imin(block_size(&p->policy), task->count);
    for (int i = 0; i < task->count; i++) {
        s += task->prompts[i].s;
        n += task->prompts[i].n;
    }
    s /= task->count;
    n /= task->count;
    double tokens =
        p->policy.schedule == SCHEDULE_DIAGONAL ? (2 * s + n) * (n - 1) / (2 * n) : s + n;
    return 4.0 * p->config.h1 * bls * p->config.l * tokens;
}
