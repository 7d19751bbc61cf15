/* head.c: layer l, the head: logits, and the next tokens.
 *
 * Three things that a task may ask for branch off here. A scored task has tokens given, and wants
 * their log-probabilities. A task may keep its logits, and then they come down to the CPU. And
 * where a GPU would have to sample, the CPU chooses from the logits (Plan.chooser). DIFFERS: the
 * paper's head computes the logits of all rows, this one those of the rows that are needed: the
 * last of each sequence, or more in a scored task. These go two ways to x: rows at home on the GPU
 * are gathered here, and load_activation has brought the others (Batch.x_for_head). Read next:
 * tables.c. */
#include "schedule.h"

/* Chooses the next token of each sequence from its logits, on the processor that has them. In a
 * scored task it computes, for the head's rows from `first` on, the probability of the given token
 * and the greedy choice. */
static void choose_tokens(Run *run, Tensor logits, int first) {
    const Flight *f = run->flight;
    const Batch *b = run->square.batch;
    Call call = call_on(run, logits.tier == TIER_CPU ? ATTEND : PROJECT, OTHER);
    const Tables *t = batch_tables(b, logits.tier);
    int n = logits.rows;
    Tensor ids = tensor_cols(batch_newest(f, b, NEW_TOKENS, logits.tier), first, n);
    if (!run->task->scored) {
        CHECK(first == 0); /* one row a sequence: max_seqs rows are one chunk (see head_chunk) */
        post(run->poster, op_pick(call, ids, logits, t->prompt, t->len, run->task->prompts));
        return;
    }
    Tensor logp = tensor_cols(batch_newest(f, b, LOG_PROBS, TIER_GPU), first, n);
    post(run->poster, op_score(call, logp, ids, logits, tensor_cols(t->target, first, n)));
}

/* Copies the chosen tokens to the CPU, and the logits if they are kept or if the CPU is to choose
 * from them. */
static void bring_down(Run *run, Tensor logits) {
    const Batch *b = run->square.batch;
    const Flight *f = run->flight;
    Tier chooser = run->plan->chooser;
    Move moves[2];
    int n = 0;
    if (chooser == TIER_GPU)
        moves[n++] = (Move){batch_newest(f, b, NEW_TOKENS, TIER_CPU),
                            batch_newest(f, b, NEW_TOKENS, TIER_GPU)};
    if (run->task->scored)
        moves[n++] = (Move){batch_newest(f, b, LOG_PROBS, TIER_CPU),
                            batch_newest(f, b, LOG_PROBS, TIER_GPU)};
    if (run->task->keep_logits || chooser == TIER_CPU)
        moves[n++] = (Move){batch_logits(f, b, 0, b->nseq), logits};
    post(run->poster, op_copy(call_on(run, A_DOWN, OTHER), moves, n));
}

/* Turns the rows that the head needs (the last of each sequence, or
 * more in a scored task) into logits, head_chunk rows at a time. */
void compute_head(Run *run) {
    const Plan *p = run->plan;
    const Batch *b = run->square.batch;
    int resting = b->act_head_rows[TIER_GPU];
    Call call = call_on(run, PROJECT, OTHER);
    Tensor head = plan_weight(p, &p->global[p->head], run->now.slot), x = run->square.x;
    Tensor logits = {.rows = 0};
    if (!is_last_stage(&p->config))
        return;
    /* load_activation has brought the rows that rest elsewhere; those on the GPU are gathered here
     */
    if (resting)
        post(run->poster, op_embed(call, tensor_rows(x, 0, resting), activations(run, TIER_GPU),
                                   tensor_cols(b->gpu.head, 0, resting), false));
    for (int first = 0; first < b->head_rows; first += p->head_chunk) {
        int n = imin(p->head_chunk, b->head_rows - first);
        logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, n);
        opt_logits(run->poster, call, p, head, logits, tensor_rows(x, first, n));
        if (p->chooser == TIER_GPU)
            choose_tokens(run, logits, first);
    }
    bring_down(run, logits);
    if (p->chooser == TIER_CPU)
        choose_tokens(run, batch_logits(run->flight, b, 0, b->nseq), 0);
}
