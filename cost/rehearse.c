/* rehearse.c: policies that the search has found, played on the device sim (section 4.3).
 *
 * The cost model adds up the seconds of each lane, but not how squares wait for each other; the sim
 * plays that. So before one policy is chosen, the best of those that were found play a part of the
 * task. The choice depends on counted squares alone, never on a clock, and is always the same:
 *
 *   part          at most BLOCKS blocks, since from the second one on the diagonal schedule is
 *                 staggered as it will be; fewer layers, since all do the same work; and if LAYERS
 *                 layers are still more than SQUARES squares, fewer tokens
 *   kept          the seconds predicted for the part over those played. A policy is expected to
 *                 make kept times the token/s predicted for the task, so that what the part leaves
 *                 out is as predicted
 *   neighbours    the nearer a policy is to one that was played, the more it is expected to keep of
 *                 its own prediction what that one kept
 *
 * Whichever policy is now expected to be the best plays next, until that is one that has played.
 * After PLAYS plays nothing is expected of the others.
 * Read next: io/file.c. */
#include <math.h>

#include "cost/cost.h"

enum {
    PLAYS = 16,
    BLOCKS = 2,
    LAYERS = 4,     /* enough for placements of whole tensors to be like those of all layers */
    SQUARES = 3500, /* of ten operations or so, or pieces of a prefill: some 30 milliseconds */
};

/* Makes the part of the task that the policy plays. The prompts have no text of their own. */
static Task part_of_task(const Search *s, const Policy *policy) {
    Task part = *s->task;
    int blocks = s->one_block ? 1 : BLOCKS;
    part.count = imin(part.count, blocks * block_size(policy));
    part.prompts = xcalloc(part.count, sizeof *part.prompts);
    int32_t *ids = xcalloc(s->checkpoint->config.max_pos, sizeof *ids);
    for (int i = 0; i < part.count; i++) {
        part.prompts[i] = s->task->prompts[(long)i * s->task->count / part.count];
        part.prompts[i].ids = ids;
    }
    return part;
}

/* Shortens the part to about SQUARES squares. Returns how many layers it keeps. */
static int shorten(Task *part, const Plan *plan) {
    const Workload *w = plan->work;
    double layers = SQUARES / (w[0].decodes + w[1].decodes + w[1].prefills * plan->pieces);
    for (int i = 0; i < part->count && layers < LAYERS; i++)
        part->prompts[i].n = ceil(part->prompts[i].n * layers / LAYERS);
    return imin(plan->config.l, fmax(layers, LAYERS));
}

/* Plays the policy, and returns what it keeps of its prediction. */
static double play(const Search *search, const Policy *policy) {
    Error ignored;
    Found found;
    RunStats stats;
    Listener none = {0};
    Search s = *search;
    Checkpoint few = *s.checkpoint;
    Task part = part_of_task(&s, policy);
    s.task = &part;
    s.one_block = false;
    s.given = *policy;
    memset(s.capacity, 0xff, sizeof s.capacity); /* its longest prompts may need more */
    Plan *plan = plan_for(&s, policy, &ignored);
    few.config.l = shorten(&part, plan);
    plan_free(plan);
    s.checkpoint = &few;
    plan = plan_for(&s, policy, &ignored);
    Device *sim = sim_open(plan, s.hardware);
    CHECK(!policy_predict(&found, &s, &ignored) &&
          !schedule_run(plan, &part, sim, &none, &stats, &ignored));
    sim->close(sim);
    plan_free(plan);
    free(part.prompts->ids);
    free(part.prompts);
    return found.cost.T / stats.total_s;
}

/* Returns how unlike two policies are: 2 for twice the batch, 4 for another schedule. */
static double distance(const Policy *a, const Policy *b) {
    int kinds = (a->schedule != b->schedule) + (a->delegated != b->delegated) +
                (a->weight_packed != b->weight_packed) + (a->cache_packed != b->cache_packed);
    return 2 * fabs(log2((double)a->gbs / b->gbs)) +
           2 * fabs(log2((double)a->num_gpu_batches / b->num_gpu_batches)) + 4 * kinds;
}

/* Returns the place of the policy that is expected to be the best of those whose blocks are in
 * time; -1: there is none. */
static int find_best(const Found *found, int n, const Search *s) {
    int best = -1;
    double most = 0;
    for (int i = 0; i < n; i++) {
        const Found *f = &found[i];
        double score = policy_score(s, f->expected, &f->policy);
        bool late =
            s->max_latency > 0 && f->latency * f->cost.throughput > s->max_latency * f->expected;
        if (score > most && !late) {
            most = score;
            best = i;
        }
    }
    return best;
}

int policy_rehearse(Found *found, int n, const Search *search, Error *err) {
    double *nearest = xcalloc(n, sizeof *nearest), began = seconds_now();
    int plays = 0, best;
    for (int i = 0; i < n; i++)
        nearest[i] = INFINITY;
    while ((best = find_best(found, n, search)) >= 0 && nearest[best] > 0) {
        Policy policy = found[best].policy;
        double kept = play(search, &policy);
        plays++;
        for (int i = 0; i < n; i++) {
            double far = distance(&policy, &found[i].policy);
            if (far < nearest[i]) {
                nearest[i] = far;
                found[i].expected = found[i].cost.throughput * pow(kept, 1 / (1 + far));
            }
            if (plays == PLAYS && nearest[i] > 0)
                found[i].expected = 0;
            found[i].plays = plays;
            found[i].play_s = seconds_now() - began;
        }
    }
    free(nearest);
    if (best < 0)
        return fail(err, EXIT_USAGE,
                    "no policy brings a block within %g s in the rehearsal: raise --max-latency, "
                    "or shorten prompts or outputs",
                    search->max_latency);
    Found first = found[best];
    memmove(found + 1, found, best * sizeof *found);
    *found = first;
    return 0;
}
