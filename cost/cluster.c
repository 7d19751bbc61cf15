/* cluster.c: many machines on paper: pipeline parallelism (section 4.4), and the chain without offloading that section 6.4
 * compares with.
 *
 * The layers are split equally over M machines, l each (rounded up). G flights of K GPU batches are in flight and sweep in
 * turn (schedule.c), each machine running a flight's K batches through its layers as if the model had only those; so the
 * policy search for one machine is used as it is, with room for the caches of G flights, and G is one more number that it
 * looks for. In its last layer's row a sweep's batches leave one by one, and the next machine begins with the first: 2 h1
 * bytes a token travel, x seconds a batch on the wire, and d more until they arrive. With t the seconds of a machine's
 * sweep (t_pre, t_gen):
 *
 *   leave    (1 - 1/l) t + t / (l K)                     until a sweep's first batch is through the last layer's row
 *   hop      leave + d + x + (K - 1) max(0, x - t / (l K))   until the next machine is as far; slow wires delay its row 0
 *   round    max(G t, G K x, (M - 1) hop + t + d)            a sweep of every flight: no machine and no wire does more, and
 *                                                            a flight's tokens, which its head's row gives, must be round
 *   prefill  (M - 1) hop_pre + G max(t_pre, K x_pre)         the pipeline fills; then the last machine sets the pace
 *   all      T = prefill + (n - 1) round_gen,   throughput = G bls n / T; a later block's prefill is one more round
 *
 * The bubble, the share of T in which a machine has nothing to do, is 1 - G (t_pre + (n - 1) t_gen) / T: with G > M and a
 * fast wire hardly more than the filling, (M - 1) / (M - 1 + G) of the prefill. More flights make it smaller, and cost:
 * each streams the weights anew and has a cache of its own. Less memory pressure on each machine allows larger blocks and
 * faster tiers, which is why decoding may scale better than linearly, while the bubble of a short prefill holds generation
 * back. Without offloading (Petals and the like) everything rests on the GPUs: the same formulas with 100 0 100 0 100 0,
 * and M must be large enough. The head is counted on every machine, as the slowest sets the pace. Read next: search.c, the
 * policy search, which ends with the policies of such a pipeline. */
#include <math.h>

#include "cost/cost.h"

Pace cluster_pace(const Cluster *cluster, const Plan *plan, const double sweep_s[2]) {
    const Workload *work = plan->work;
    const double M = imax(cluster->nodes, 1), l = plan->config.l, d = M > 1 ? cluster->delay_s : 0;
    const double G =
        fmax(1, fmin(flight_count(&plan->policy), work[1].sweeps)); /* with fewer blocks, of those that have one */
    double hop[2], pace[2];
    for (int pre = 0; pre < 2; pre++) {
        const Workload *w = &work[pre];
        const double t = sweep_s[pre], batches = fmax(1, w->prefills + w->decodes), K = batches / fmax(1, w->sweeps);
        const double state = (double)type_bytes(plan->act_type) * plan->config.h1, square = t / (l * K);
        const double x = M > 1 ? state * (w->prompt_rows + w->steps) / batches / cluster->net_bdw : 0;
        hop[pre] = (1 - 1 / l) * t + square + d + x + (K - 1) * fmax(0, x - square);
        pace[pre] = G * fmax(t, K * x);
    }
    Pace p = {.prefill_s = (M - 1) * hop[1] + pace[1]};
    p.token_s = fmax(pace[0], (M - 1) * hop[0] + sweep_s[0] + d);
    const double again = fmax(pace[1], (M - 1) * hop[1] + sweep_s[1] + d);
    p.T = p.prefill_s + (work[1].sweeps / G - 1) * again + work[0].sweeps / G * p.token_s;
    return p;
}
