/* cluster.c: many machines on paper: pipeline parallelism (section 4.4), and the chain without offloading that section 6.4
 * compares with.
 *
 * The l layers are split equally over M machines, l/M each (rounded up). Each machine runs the block's K GPU batches
 * through its layers as if the model had only those; so the policy search for one machine is used as it is. Between
 * neighbours the hidden states of one batch travel: 2 h1 bytes a token. With t_pre and t_gen the seconds that one machine
 * takes for all K batches of a sweep, x the seconds that a batch's hidden states take on the wire, and d the delay of a
 * hop:
 *
 *   prefill      (K + M - 1) max(t_pre / K, x_pre) + (M - 1) (x_pre + d)      the pipeline fills, runs and empties
 *   one token    max(t_gen, K x_gen, M (t_gen / K + x_gen + d))               no machine and no wire does more than that;
 *                                                                             and a batch must be round before it can go on
 *   a block      T = prefill + (n - 1) one token,   throughput = bls n / T
 *
 * Less memory pressure on each machine allows larger blocks and faster tiers, which is why decoding may scale better than
 * linearly, while the bubbles of a short prefill hold generation back. Without offloading (Petals and the like) everything
 * rests on the GPUs: the same formulas with 100 0 100 0 100 0, and M must be large enough. The head is counted on every
 * machine, as the slowest sets the pace. Read next: io/file.c, the lowest file of the last floor. */
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
    const double M = cluster->nodes, K = found->policy.num_gpu_batches, gbs = found->policy.gbs;
    const double t_pre = found->cost.T_pre * part->l, t_gen = found->cost.T_gen * part->l;
    const double x_gen = M > 1 ? 2.0 * part->h1 * gbs / cluster->net_bdw : 0, x_pre = x_gen * s;
    const double d = M > 1 ? cluster->delay_s : 0;
    ClusterCost c = {.found = *found};
    c.prefill_s = (K + M - 1) * fmax(t_pre / K, x_pre) + (M - 1) * (x_pre + d);
    c.token_s = fmax(fmax(t_gen, K * x_gen), M * (t_gen / K + x_gen + d));
    c.T = c.prefill_s + (n - 1) * c.token_s;
    c.throughput = gbs * K * n / c.T;
    c.decode_throughput = n > 1 ? gbs * K / c.token_s : 0;
    return c;
}

/* Everything on the GPU. */
static void hold_on_gpu(Search *s) {
    Policy *p = &s->given;
    p->wg = p->cg = p->hg = 1, p->wc = p->cc = p->hc = 0, p->cpu_attention = false;
    for (int i = 0; i < 6; i++) s->fixed[i] = true;
    s->fixed_attention = true;
}

int cluster_search(ClusterCost *best, const Search *search, const Cluster *cluster, bool offloading, Error *err) {
    enum { MOST = 64, FILLS = 4 };
    static const int fills[FILLS] = {0, 1, 2, 4}; /* batches for each machine, to keep all of them busy; 0: any number */
    Found found[MOST];
    Search one = *search;
    const Prompt *prompt = &search->task->prompts[0];
    Checkpoint *part = part_of(search->checkpoint, cluster->nodes);
    bool any = false;
    one.checkpoint = part;
    if (!offloading) hold_on_gpu(&one);
    for (int f = 0; f < (search->fixed_batches ? 1 : FILLS); f++) {
        Error ignored;
        one.fixed_batches = f || search->fixed_batches;
        if (f) one.given.num_gpu_batches = fills[f] * cluster->nodes;
        int n = policy_search(found, MOST, &one, f ? &ignored : err);
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
