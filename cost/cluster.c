/* cluster.c: many machines on paper: pipeline parallelism (section 4.4), and the chain without offloading that section 6.4
 * compares with.
 *
 * The layers are split equally over M machines, l each (rounded up). G groups of K GPU batches are in flight and sweep in
 * turn (schedule.c), each machine running a group's K batches through its layers as if the model had only those; so the
 * policy search for one machine is used as it is, with room for the caches of G groups. In its last layer's row a sweep's
 * batches leave one by one, and the next machine begins with the first: 2 h1 bytes a token travel, x seconds a batch on the
 * wire, and d more until they arrive. With t the seconds of a machine's sweep (t_pre, t_gen):
 *
 *   leave    (1 - 1/l) t + t / (l K)                     until a sweep's first batch is through the last layer's row
 *   hop      leave + d + x + (K - 1) max(0, x - t / (l K))   until the next machine is as far; slow wires delay its row 0
 *   round    max(G t, G K x, (M - 1) hop + t + d)            a sweep of every group: no machine and no wire does more, and
 *                                                            a group's tokens, which its head's row gives, must be round
 *   prefill  (M - 1) hop_pre + G max(t_pre, K x_pre)         the pipeline fills; then the last machine sets the pace
 *   all      T = prefill + (n - 1) round_gen,   throughput = G bls n / T
 *
 * The bubble, the share of T in which a machine has nothing to do, is 1 - G (t_pre + (n - 1) t_gen) / T: with G > M and a
 * fast wire hardly more than the filling, (M - 1) / (M - 1 + G) of the prefill. More groups make it smaller, and cost: each
 * streams the weights anew and has a cache of its own. Less memory pressure on each machine allows larger blocks and faster
 * tiers, which is why decoding may scale better than linearly, while the bubble of a short prefill holds generation back.
 * Without offloading (Petals and the like) everything rests on the GPUs: the same formulas with 100 0 100 0 100 0, and M
 * must be large enough. The head is counted on every machine, as the slowest sets the pace. Read next: io/file.c, the
 * lowest file of the last floor. */
#include <math.h>

#include "cost/cost.h"

/* The model as one of `nodes` machines has it. */
static Checkpoint *part_of(const Checkpoint *whole, int nodes) {
    OptConfig config = whole->config;
    config.l = (config.l + nodes - 1) / nodes;
    return checkpoint_dummy(&config, whole->seed);
}

/* The formulas above, for a policy of one machine. */
static ClusterCost run_through(const Found *found, const Cluster *cluster, const OptConfig *part, int s, int n) {
    const Policy *p = &found->policy;
    const double M = cluster->nodes, G = group_count(p), K = p->num_gpu_batches, l = part->l, in_flight = G * K * p->gbs;
    const double t[] = {found->cost.T_gen * l, found->cost.T_pre * l}; /* [1]: in prefill */
    const double x_gen = M > 1 ? 2.0 * part->h1 * p->gbs / cluster->net_bdw : 0, x[] = {x_gen, x_gen * s};
    const double d = M > 1 ? cluster->delay_s : 0;
    double hop[2];
    for (int pre = 0; pre < 2; pre++) {
        const double square = t[pre] / (l * K), leave = (1 - 1 / l) * t[pre] + square;
        hop[pre] = leave + d + x[pre] + (K - 1) * fmax(0, x[pre] - square);
    }
    ClusterCost c = {.found = *found};
    c.prefill_s = (M - 1) * hop[1] + G * fmax(t[1], K * x[1]);
    c.token_s = fmax(G * fmax(t[0], K * x[0]), (M - 1) * hop[0] + t[0] + d);
    c.T = c.prefill_s + (n - 1) * c.token_s;
    c.throughput = in_flight * n / c.T;
    c.decode_throughput = n > 1 ? in_flight / c.token_s : 0;
    return c;
}

int cluster_predict(ClusterCost *cost, const Search *part, const Cluster *cluster, Error *err) {
    const Prompt *prompt = &part->task->prompts[0];
    Found found;
    if (policy_predict(&found, part, err)) return -1;
    *cost = run_through(&found, cluster, &part->checkpoint->config, prompt->s, prompt->n);
    return 0;
}

/* Everything on the GPU. */
static void hold_on_gpu(Search *s) {
    Policy *p = &s->given;
    p->wg = p->cg = p->hg = 1, p->wc = p->cc = p->hc = 0, p->cpu_attention = false;
    for (int i = 0; i < 6; i++) s->fixed[i] = true;
    s->fixed_attention = true;
}

int cluster_search(ClusterCost *best, const Search *search, const Cluster *cluster, bool offloading, Error *err) {
    enum { MOST = 64, TRIES = 4 };
    const int M = cluster->nodes, given = search->given.groups, groups[TRIES] = {1, M + 1, 2 * M, 4 * M};
    Found found[MOST];
    Search one = *search;
    const Prompt *prompt = &search->task->prompts[0];
    Checkpoint *part = part_of(search->checkpoint, cluster->nodes);
    bool any = false;
    one.checkpoint = part;
    if (!offloading) hold_on_gpu(&one);
    for (int g = 0; g < (M == 1 || given ? 1 : TRIES); g++) {
        Error ignored;
        one.given.groups = M == 1 ? 1 : given ? given : groups[g];
        int n = policy_search(found, MOST, &one, g ? &ignored : err);
        for (int i = 0; i < n; i++, any = true) {
            ClusterCost c = run_through(&found[i], cluster, &part->config, prompt->s, prompt->n);
            if (!any || c.throughput > best->throughput) *best = c;
        }
    }
    checkpoint_close(part);
    return any ? 0 : -1;
}

int cluster_least(const Search *search) {
    Search one = *search;
    Found ignored;
    Error err;
    hold_on_gpu(&one);
    one.given.gbs = one.given.num_gpu_batches = 1;
    one.given.table_home = TIER_GPU;
    for (int nodes = 1; nodes <= search->checkpoint->config.l; nodes++) {
        Checkpoint *part = part_of(search->checkpoint, nodes);
        one.checkpoint = part;
        bool fits = policy_predict(&ignored, &one, &err) == 0;
        checkpoint_close(part);
        if (fits) return nodes;
    }
    return 0;
}
