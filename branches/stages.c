/* stages.c: a pipeline's stage (section 4.4). Layer 0 of a stage begins where the last layer of the
 * stage before has ended. device/pipeline.c says why stages cannot wait for each other in a circle.
 */
#include "schedule.h"

void receive_hidden(Run *run) {
    const Batch *b = run->square.batch;
    Tensor came = plan_view(run->plan, RECEIVED, TIER_CPU, b->plan_place, 0, b->rows);
    post(run->to, op_receive(call_on(run, RECEIVE, ACTIVATION), came));
    post_copy(run, call_on(run, C_LOAD, ACTIVATION), run->square.x, came);
}

void send_hidden(Run *run) {
    const Batch *b = run->square.batch;
    Tensor sent = plan_view(run->plan, SENDING, TIER_CPU, b->plan_place, 0, b->rows);
    post_copy(run, call_on(run, STORE, ACTIVATION), sent, run->square.x);
    post(run->to, op_send(call_on(run, SEND, ACTIVATION), sent));
}
