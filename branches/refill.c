/* refill.c: with the diagonal schedule, prompts take the seats of sequences that have ended, in
 * batches that go on (section 4.2 and A.2, Figure 6). admission.c says which prompts take which
 * seats. Read next: sparse.c. */
#include "schedule.h"

// clang-format off
/* With the diagonal schedule, prompts take the seats of sequences that have ended in batches that
 * go on. Such prompts are the topups. A batch either prefills or decodes, so the topups of all
 * batches first prefill together in one more batch, the entrance, and then join the batches of
 * their seats:
 *
 *                  sweep i - 1               sweep i                       sweep i + 1
 *
 *   entrance       -                         prefills x, y
 *   batch 0        decodes a, b, c           decodes a, c      <- x        decodes a, x, c
 *   batch 1        decodes d, e, f           decodes d, e      <- y        decodes d, e, y
 *                  b and f end               x and y have their seats      x and y have joined
 *
 * This is so if b and f have all their tokens. If b stops early, it may be seen only when batch 0 begins
 * sweep i, and x enters one sweep later.
 *
 * While x prefills, it is a member of the entrance. Before sweep i + 1, when its first token is known, x
 * moves to `joining` of batch 0, where its seat is (leave_entrance). When batch 0 begins sweep i + 1, x
 * becomes a member (batch_begin).
 *
 * This is Figure 6. Batch k has entered with sweep i_k. Sweep i computes, layer by layer, the square
 * (token i - i_k, layer j) of every batch k in flight: after the entrance, the oldest batch comes first; it
 * is the farthest to the right in the figure. All squares of a sweep are one diagonal of the figure. Those of
 * one layer, one in each row, are one of its sub-diagonals, and share the weights. The warm-up is the gray
 * area of the figure: first batch 0 alone, then with batch 1, until K batches are n/K tokens apart. */
// clang-format on

Batch *entrance(Flight *f) {
    bool has = f->run->plan->policy.schedule == SCHEDULE_DIAGONAL;
    return has ? &f->batch[f->batches - 1] : NULL;
}

void open_entrance(Flight *f) {
    Batch *b = entrance(f);
    int k = 0; /* its place, behind the batches that go on */
    while (f->in_sweep[k] != b)
        k++;
    memmove(f->in_sweep + 1, f->in_sweep, k * sizeof *f->in_sweep);
    f->in_sweep[0] = b;
    Seat *deal = xcalloc(b->nseq, sizeof *deal);
    deal_block(deal, &f->run->plan->policy, b->nseq);
    for (int r = 0; r < b->nseq; r++)
        b->seq[r]->act = deal[r].act;
    free(deal);
}

void leave_entrance(Flight *f) {
    Batch *from = entrance(f);
    if (!from)
        return;
    for (int r = 0; r < from->nseq; r++) {
        Sequence *q = from->seq[r];
        const Seat *seat = &f->admission.seat[q - f->seqs];
        Batch *home = &f->batch[seat->k];
        q->act = seat->act;
        home->joining[home->njoining++] = q;
        order_new_owner(f, q->kv, home->plan_place, from->plan_place);
    }
    from->nseq = 0;
}
