/* stages.c: a stage of a pipeline (section 4.4): hidden states go from stage to stage, and the new
 * tokens round from the last stage to all.
 *
 * Layer 0 of a stage begins where the last layer of the stage before has ended. device/pipeline.c
 * says why stages cannot wait for each other in a circle. Read next: tell.c. */
#include "device/device.h"
#include "schedule.h"

void receive_hidden(Run *run) {
    const Batch *b = run->square.batch;
    if (is_first_stage(&run->plan->config))
        return;
    Tensor came = plan_view(run->plan, RECEIVED, TIER_CPU, b->plan_place, 0, b->rows);
    post(run->poster, op_receive(call_on(run, RECEIVE, ACTIVATION), came));
    post_copy(run, call_on(run, C_LOAD, ACTIVATION), run->square.x, came);
}

void send_hidden(Run *run) {
    const Batch *b = run->square.batch;
    if (is_last_stage(&run->plan->config))
        return;
    Tensor sent = plan_view(run->plan, SENDING, TIER_CPU, b->plan_place, 0, b->rows);
    post_copy(run, call_on(run, STORE, ACTIVATION), sent, run->square.x);
    post(run->poster, op_send(call_on(run, SEND, ACTIVATION), sent));
}

/* Sends the new tokens (or scores) of the batch from the last stage to all stages, or receives
 * them, so that each knows which sequences have ended. Returns false if that fails. */
static bool pass_newest(Flight *f, const Batch *b) {
    Run *run = f->run;
    Net *net = run->poster->device->net;
    int last = net->stages - 1;
    size_t size = b->head_rows * sizeof(int32_t);
    int status = 0;
    void *const what[] = {f->ids, f->logp};
    for (int w = 0; w < 1 + run->task->scored && !status; w++) {
        if (net->stage < last)
            status = net->receive(net, last, NET_TOKENS, what[w], size, run->poster->err);
        for (int to = 0; net->stage == last && to < last && !status; to++)
            status = net->post(net, to, NET_TOKENS, what[w], size, run->poster->err);
    }
    run->poster->failed = status != 0;
    return !status;
}

bool share_newest(Flight *f, const Batch *b) {
    return !f->run->poster->device->net || pass_newest(f, b);
}

bool receive_newest(Flight *f, const Batch *b) {
    const Run *run = f->run;
    /* the last stage's tokens come after this stage has sent its states, or failed to */
    if (!post_wait(run->poster, plan_view(run->plan, SENDING, TIER_CPU, b->plan_place, 0, 1),
                   WRITES))
        return false;
    f->ids = f->came;
    f->logp = run->task->scored ? (float *)f->came + run->plan->head_rows : NULL;
    return share_newest(f, b);
}

bool waits_in_sweep(const Flight *f) {
    const Run *run = f->run;
    return run->poster->device->net && (!run->poster->overlap || run->plan->policy.synchronize);
}
