/* embed.c: the hidden state with which a sweep begins: rows of the token table.
 *
 * The table is large, and may rest on any tier (Policy.table_home). So its rows are gathered where
 * it rests, and only they move.
 * Read next: head.c. */
#include "schedule.h"

void embed(Run *run) {
    const Plan *p = run->plan;
    const Batch *b = run->square.batch;
    Tensor x = run->square.x, table = p->global[TOK_EMBED].home;
    Tensor tokens =
        p->config.embed == p->config.h1 ? x : square_slot(run, EMBEDDED, TIER_GPU, b->rows);
    Call call = call_on(run, PROJECT, OTHER);
    if (!is_first_stage(&p->config))
        return;
    if (table.tier == TIER_GPU) {
        post(run->poster, op_embed(call, tokens, table, b->gpu.ids, false));
    } else {
        Lane lane = table.tier == TIER_DISK ? C_READ : ATTEND;
        Tensor gathered = square_slot(run, EMBEDDED, TIER_CPU, b->rows);
        post(run->poster, op_embed(call_on(run, lane, OTHER), gathered, table, b->cpu.ids, false));
        post_copy(run, call_on(run, C_LOAD, OTHER), tokens, gathered);
    }
    opt_embed(run->poster, call, p, x, tokens, b->gpu.positions);
}
