/* tell.c: what a run tells of itself: the counts and seconds of RunStats, the calls of the
 * Listener, and what the trace shows of pages and sequences. Read next: fit.c. */
#include "device/device.h"
#include "schedule.h"

void tell_sweep(Flight *f) {
    Run *run = f->run;
    double t = run->poster->device->now(run->poster->device), took = t - run->sweep_end;
    run->sweep_end = t;
    run->stats->total_s += took;
    run->stats->sweeps++;
    if (f->collected_prefill) {
        run->stats->prefill_sweeps_s += took;
        run->stats->prefill_sweeps++;
    }
    if (run->listener->sweep &&
        run->listener->sweep(run->listener->ctx, run->stats, run->poster->err))
        run->poster->failed = true;
}

void tell_scores(Flight *f, const Batch *b) {
    const Listener *listener = f->run->listener;
    if (!listener->scored || !f->logp)
        return;
    for (int r = 0, row = 0; r < b->nseq; r++) {
        const Sequence *q = b->seq[r];
        /* its rows are of its newest tokens, and each row scores the token after it */
        int scored = q->s + q->generated - q->head_rows + 1;
        for (int e = 0; e < q->head_rows; e++, row++, scored++)
            if (scored >= q->prompt->from)
                listener->scored(listener->ctx, q->prompt_index, scored, f->logp[row], f->ids[row]);
    }
}

void tell_logits(Flight *f, const Batch *b, int r) {
    const Run *run = f->run;
    const Listener *listener = run->listener;
    if (!run->task->keep_logits || !listener->logits || !is_last_stage(&run->plan->config))
        return;
    const float *row = cpu_address(run->poster, batch_logits(f, b, r, 1));
    if (row)
        listener->logits(listener->ctx, b->seq[r]->prompt_index, b->seq[r]->generated + 1, row);
}

bool tell_token(Flight *f, const Sequence *q) {
    const Listener *listener = f->run->listener;
    RunStats *stats = f->run->stats;
    bool decoded = q->generated > 1;
    if (!decoded)
        stats->prefill_tokens += q->s;
    stats->attended += decoded ? q->s + q->generated - 1 : q->s * (q->s + 1.) / 2;
    stats->generated++;
    stats->decoded += decoded;
    stats->beside += decoded && f->collected_prefill;
    return listener->token &&
           listener->token(listener->ctx, q->prompt_index, q->tokens, q->generated);
}

void tell_end(Flight *f, const Sequence *q, bool eos, bool stop) {
    Run *run = f->run;
    const Listener *listener = run->listener;
    run->stats->ended++;
    if (listener->done &&
        listener->done(listener->ctx, q->prompt_index, q->tokens, q->generated - eos,
                       stop ? FINISH_STOP : FINISH_LENGTH, run->poster->err))
        run->poster->failed = true;
}

void tell_held(const Run *run) {
    Held held = {.at = run->sweep_end};
    for (int g = 0; g < run->plan->policy.flights; g++) {
        const Flight *f = &run->flights[g];
        for (int t = 0; t < NTIERS; t++)
            held.pages[t] += f->pool[t].used;
        held.sequences += f->admission.seated;
    }
    if (run->poster->device->trace)
        trace_hold(run->poster->device->trace, &held);
}

void tell_seconds(const Run *run) {
    RunStats *s = run->stats;
    double prefill = 0, decode = 0;
    for (int lane = PROJECT; lane <= ATTEND; lane++) { /* the lanes of processors */
        const LaneCount *count = &run->poster->device->count[lane];
        prefill += count->prefill_s;
        decode += count->busy_s - count->prefill_s;
    }
    double beside = s->decoded ? decode * s->beside / s->decoded : 0;
    s->prefill_s = s->prefill_sweeps_s * (beside > 0 ? prefill / (prefill + beside) : 1);
    s->decode_s = s->total_s - s->prefill_s;
}
