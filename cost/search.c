/* search.c: the policy search (section 4.3): of all block sizes, schedules and placements the one with the best throughput.
 *
 * As in the paper, a loop over (gbs, num_gpu_batches) around a linear program over the nine fractions; here also over the
 * schedules, and over who attends to the cache off the GPU. The loop goes by powers of two, then by smaller steps around
 * the best. The LP knows the plan only along straight lines, so what it promises is a bound: the candidates are taken in
 * its order, each answer is rounded to percentages that can be had and planned; where the plan does not fit, the LP is
 * solved again with that tier smaller by the excess. What counts is the cost of the plan itself. When no bound is better
 * than what has been found, the search ends. Read next: policy.c, which writes the LP; tier.c, which plans. */
#include <math.h>

#include "cost/cost.h"

enum { MAX_CANDIDATES = 1024, MAX_BATCHES = 64, MAX_REALIZED = 64 };

/* A policy with its percentages still to be found. */
typedef struct {
    Policy policy;
    double bound; /* token/s that no placement exceeds, by the LP */
    double score; /* of it; 0 where a block takes too long */
} Candidate;

typedef struct {
    const Search *s;
    Candidate *list;
    int n;
    Lp lp; /* of the newest candidate */
} Candidates;

// ---------------------------------------------------------------------------------------------------------------
// One candidate: an LP, and a plan that fits
// ---------------------------------------------------------------------------------------------------------------

/* The task as a policy sees it: all of it, or one block. */
static Task task_for(const Search *s, const Policy *policy) {
    Task task = *s->task;
    if (s->one_block) task.count = imin(block_size(policy), task.count);
    return task;
}

/* The plan that runtime_lp starts from. */
static Plan *corner_plan(const Search *s, const Policy *policy) {
    Error ignored;
    Policy corner = *policy;
    Task task = task_for(s, policy);
    corner.wg = corner.cg = corner.hg = 0, corner.wc = corner.cc = corner.hc = 1;
    corner.cpu_attention = false;
    return plan_make(s->checkpoint, &corner, &task, s->act_type, &ignored);
}

static void add_fixed(Lp *lp, const Search *s) {
    static const char *const name[6] = {"wg given", "wc given", "cg given", "cc given", "hg given", "hc given"};
    const double share[6] = {s->given.wg, s->given.wc, s->given.cg, s->given.cc, s->given.hg, s->given.hc};
    for (int i = 0; i < 6; i++)
        if (s->fixed[i]) lp_row(lp, name[i], true, share[i])->a[i / 2 * NTIERS + i % 2] = 1;
}

static void write_lp(Lp *lp, const Search *s, const Policy *policy, const Plan *corner, const double capacity[NTIERS]) {
    runtime_lp(lp, s->hardware, s->checkpoint, corner, policy->cpu_attention, capacity);
    add_fixed(lp, s);
}

/* To whole steps of 1 / steps; a share that is nothing is 0. */
static void round_shares(double *gpu, double *cpu, const double x[NTIERS], const bool fixed[2], int steps) {
    if (fixed[0] && fixed[1]) return;
    if (!fixed[0]) *gpu = round(x[TIER_GPU] * steps) / steps;
    if (!fixed[1]) *cpu = round(x[TIER_CPU] * steps) / steps;
    if (x[TIER_DISK] < .5 / steps || *gpu + *cpu > 1) *(fixed[1] ? gpu : cpu) = 1 - (fixed[1] ? *cpu : *gpu);
}

/* Weights to percentages with one digit behind the point, cache and activations to sequences of the block; as long as one
 * digit can tell them apart. */
static void set_fractions(Policy *p, const Search *s, const double *x) {
    const int weights = 1000, sequences = imin(weights, imin(block_size(p), s->task->count));
    p->wg = s->given.wg, p->wc = s->given.wc, p->cg = s->given.cg;
    p->cc = s->given.cc, p->hg = s->given.hg, p->hc = s->given.hc;
    round_shares(&p->wg, &p->wc, x + WG, s->fixed, weights);
    round_shares(&p->cg, &p->cc, x + CG, s->fixed + 2, sequences);
    round_shares(&p->hg, &p->hc, x + HG, s->fixed + 4, sequences);
}

/* Seconds of one block: of as many sweeps as its longest prompt has tokens. */
static double latency_of(const Task *task, const Plan *plan, double T) {
    int n = 0;
    for (int i = 0; i < task->count; i++) n = imax(n, task->prompts[i].n);
    return T * n / (double)plan->sweeps;
}

/* The tiers that the LP would have larger. */
static void note_full(Cost *cost, const Lp *lp, const LpAnswer *answer) {
    for (int i = 0; i < lp->m; i++)
        for (int t = 0; t < NTIERS; t++)
            if (!strcmp(lp->row[i].name, memory_row[t]) && answer->y[i] > 0)
                snprintf(cost->full[t], sizeof cost->full[t], "%s", memory_row[t]);
}

/* Whether the policy's plan fits, and what it costs; if not, by how many bytes it exceeds each tier. */
static bool try_plan(Found *found, const Search *s, const Policy *policy, const Lp *lp, double excess[NTIERS], Error *err) {
    Task task = task_for(s, policy);
    Plan *plan = plan_make(s->checkpoint, policy, &task, s->act_type, err);
    bool fits = plan && plan_fits(plan, s->capacity, err) == 0;
    for (int t = 0; t < NTIERS; t++) excess[t] = plan ? fmax(0, (double)plan->total[t] - (double)s->capacity[t]) : 0;
    if (fits) {
        *found = (Found){.policy = *policy};
        runtime_cost(&found->cost, lp, plan);
        found->latency = latency_of(&task, plan, found->cost.T);
    }
    plan_free(plan);
    return fits;
}

/* The candidate's best placement whose plan fits. */
static bool realize(Found *found, const Search *s, const Candidate *c) {
    enum { TRIES = 12 };
    double capacity[NTIERS], excess[NTIERS];
    Policy policy = c->policy;
    Plan *corner = corner_plan(s, &policy);
    bool done = false;
    for (int t = 0; t < NTIERS; t++) capacity[t] = (double)s->capacity[t];
    for (int i = 0; i < TRIES && corner && !done; i++) {
        Error ignored;
        Lp lp;
        LpAnswer answer;
        write_lp(&lp, s, &policy, corner, capacity);
        lp_solve(&answer, &lp);
        if (answer.verdict != LP_OPTIMAL) break;
        set_fractions(&policy, s, answer.x);
        done = try_plan(found, s, &policy, &lp, excess, &ignored);
        if (done) note_full(&found->cost, &lp, &answer);
        for (int t = 0; t < NTIERS; t++) capacity[t] -= excess[t] * 1.05 * (1 << i); /* a rounded share falls in steps */
    }
    plan_free(corner);
    return done && !(s->max_latency > 0 && found->latency > s->max_latency);
}

// ---------------------------------------------------------------------------------------------------------------
// The candidates
// ---------------------------------------------------------------------------------------------------------------

/* What counts: token/s. On shared cores twice the batches must bring two percent more: arithmetic beside copies is never
 * quite as fast as it was measured alone, and more squares suffer more. Where blocks may be of any size, twice the block
 * must bring one percent. */
static double score(const Search *s, double throughput, const Policy *p) {
    const double block = block_size(p), batches = block / p->gbs;
    const double share = (s->hardware->shared_cores ? .02 * log2(batches) : 0) + (s->one_block ? .01 * log2(block) : 0);
    return throughput / (1 + share);
}

static bool same_block(const Policy *a, const Policy *b) {
    return a->gbs == b->gbs && a->num_gpu_batches == b->num_gpu_batches && a->schedule == b->schedule &&
           a->weight_quant.bits == b->weight_quant.bits && a->cache_quant.bits == b->cache_quant.bits;
}

static const Candidate *known(const Candidates *c, const Policy *p) {
    for (int i = 0; i < c->n; i++)
        if (same_block(&c->list[i].policy, p) && c->list[i].policy.cpu_attention == p->cpu_attention) return &c->list[i];
    return NULL;
}

/* token/s by the LP's optimum, 0: no placement; and its latency. */
static double bound_of(Candidates *c, const Policy *policy, const Plan *corner, double *latency) {
    double capacity[NTIERS], tokens = 0;
    Task task = task_for(c->s, policy);
    LpAnswer answer;
    for (int t = 0; t < NTIERS; t++) capacity[t] = (double)c->s->capacity[t];
    write_lp(&c->lp, c->s, policy, corner, capacity);
    lp_solve(&answer, &c->lp);
    for (int x = 0; x < 2; x++) tokens += corner->work[x].prompts + corner->work[x].steps;
    if (answer.verdict != LP_OPTIMAL) return 0;
    *latency = latency_of(&task, corner, runtime_seconds(&c->lp, answer.x));
    return tokens / runtime_seconds(&c->lp, answer.x);
}

/* Adds the candidate, with the table of tokens on the highest tier that leaves room for the rest. Returns its bound, 0
 * where nothing fits. */
static double consider(Candidates *c, Policy policy) {
    const Candidate *old = known(c, &policy);
    double bound = 0, latency = 0, most = 1.05 * c->s->max_latency; /* the LP's latency is not quite the least */
    if (old) return old->bound;
    for (int home = TIER_GPU; home < NTIERS && !bound; home++) {
        policy.table_home = (Tier)home;
        Plan *corner = corner_plan(c->s, &policy);
        if (corner) bound = bound_of(c, &policy, corner, &latency);
        plan_free(corner);
    }
    if (c->n < MAX_CANDIDATES)
        c->list[c->n++] = (Candidate){policy, bound, most > 0 && latency > most ? 0 : score(c->s, bound, &policy)};
    return bound;
}

/* num_gpu_batches by doubling, as long as more of them help. */
static double double_batches(Candidates *c, Policy policy) {
    const Search *s = c->s;
    int most =
        s->fixed_batches ? s->given.num_gpu_batches : imin(MAX_BATCHES, (s->task->count + policy.gbs - 1) / policy.gbs);
    double first = 0, best = 0;
    for (int K = s->fixed_batches ? most : 1;; K = imin(2 * K, most)) {
        policy.num_gpu_batches = K;
        double bound = consider(c, policy);
        if (!first) first = bound;
        if (bound < best * 1.005 || K == most) break;
        best = bound;
    }
    return first;
}

static void for_gbs(Candidates *c, Policy policy) {
    const Search *s = c->s;
    int most = s->fixed_gbs ? s->given.gbs : s->task->count;
    for (int gbs = s->fixed_gbs ? most : 1;; gbs = imin(2 * gbs, most)) {
        policy.gbs = gbs;
        if (!double_batches(c, policy) || gbs == most) break; /* where one batch does not fit, no larger one does */
    }
}

static int by_score(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? 1 : -1;
    return x->policy.schedule != y->policy.schedule ? (int)x->policy.schedule - (int)y->policy.schedule
                                                    : x->policy.gbs - y->policy.gbs;
}

/* Considers the policy with another block, no larger than the task. */
static void try_block(Candidates *c, Policy p, int gbs, int num_gpu_batches) {
    const Search *s = c->s;
    p.gbs = s->fixed_gbs ? p.gbs : imin(imax(gbs, 1), s->task->count);
    p.num_gpu_batches = imax(1, imin(num_gpu_batches, (s->task->count + p.gbs - 1) / p.gbs));
    if (s->fixed_batches) p.num_gpu_batches = s->given.num_gpu_batches;
    consider(c, p);
}

/* Smaller steps from the policy, in both directions, and blocks that share the task equally. */
static void refine(Candidates *c, const Policy *from) {
    static const double step[] = {.75, .875, 1.125, 1.25, 1.5};
    const int gbs = from->gbs, K = from->num_gpu_batches, count = c->s->task->count;
    for (size_t i = 0; i < sizeof step / sizeof *step; i++) {
        try_block(c, *from, (int)(gbs * step[i]), K);
        try_block(c, *from, gbs, (int)lround(K * step[i]));
    }
    if (c->s->one_block) return;
    try_block(c, *from, gbs, K - 1), try_block(c, *from, gbs, K + 1);
    for (int blocks = 1; blocks <= 4; blocks++) try_block(c, *from, (count + K * blocks - 1) / (K * blocks), K);
}

/* Row is zig-zag with one batch. The diagonal schedule needs more prompts than a block has; where its pacing adds nothing
 * it is zig-zag. */
static bool may_be(const Search *s, Schedule schedule) {
    if (s->fixed_schedule && s->given.schedule == schedule) return true;
    if (s->fixed_schedule)
        return s->given.schedule == SCHEDULE_DIAGONAL && schedule == SCHEDULE_ZIGZAG && !s->fixed_batches;
    return schedule == SCHEDULE_ZIGZAG || (schedule == SCHEDULE_DIAGONAL && !s->one_block);
}

/* The policy with what compression may be taken. */
static Policy compressed(const Search *s, Policy p, bool weights, bool cache) {
    if (weights && !p.weight_quant.bits) p.weight_quant = s->allowed;
    if (cache && !p.cache_quant.bits) p.cache_quant = s->allowed;
    return p;
}

/* All blocks under one way of compression. */
static void for_schedules(Candidates *c, Policy policy) {
    const Search *s = c->s;
    bool delegated_only = is_sparse(&policy);
    for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++) {
        if (!may_be(s, (Schedule)schedule)) continue;
        for (int delegated = delegated_only; delegated < 2; delegated++) {
            if (s->fixed_attention && !delegated_only && delegated != (int)s->given.cpu_attention) continue;
            policy.schedule = (Schedule)schedule, policy.cpu_attention = delegated;
            for_gbs(c, policy);
        }
    }
}

static void look_around(Candidates *c) {
    enum { ROUNDS = 3, AROUND = 3 };
    const Search *s = c->s;
    for (int packed = 0; packed < 4; packed++) {
        bool weights = packed & 1, cache = packed & 2, may_weights = s->allowed.bits && !s->given.weight_quant.bits;
        bool may_cache = s->allowed.bits && !s->given.cache_quant.bits;
        if ((!weights || may_weights) && (!cache || may_cache)) for_schedules(c, compressed(s, s->given, weights, cache));
    }
    for (int round = 0; round < ROUNDS; round++) {
        Policy around[AROUND];
        qsort(c->list, c->n, sizeof *c->list, by_score);
        for (int i = 0; i < AROUND && i < c->n; i++) around[i] = c->list[i].policy;
        for (int i = 0, n = imin(AROUND, c->n); i < n; i++) refine(c, &around[i]);
    }
    qsort(c->list, c->n, sizeof *c->list, by_score);
}

/* All candidates, best first. A long task is looked at through prompts taken from all of it at equal distances. */
static Candidates gather(const Search *search) {
    enum { ENOUGH = 2048 };
    Search thin = *search;
    Task task = *search->task;
    Candidates c = {.s = &thin, .list = xcalloc(MAX_CANDIDATES, sizeof *c.list)};
    if (!search->one_block && task.count > ENOUGH) {
        task.prompts = xcalloc(ENOUGH, sizeof *task.prompts);
        for (int i = 0; i < ENOUGH; i++) task.prompts[i] = search->task->prompts[(long)i * task.count / ENOUGH];
        task.count = ENOUGH;
        thin.task = &task;
    }
    look_around(&c);
    if (thin.task == &task) free(task.prompts);
    c.s = search;
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// The search
// ---------------------------------------------------------------------------------------------------------------

/* Keeps the list sorted, best first, with one entry for a block and schedule. Returns the new number. */
static int insert(Found *found, int n, int most, const Search *s, const Found *one) {
    double value = score(s, one->cost.throughput, &one->policy);
    int at = n, from = 0;
    while (from < n && !same_block(&found[from].policy, &one->policy)) from++; /* whose place it takes */
    if (from < n && score(s, found[from].cost.throughput, &found[from].policy) >= value) return n;
    if (from == n) n = imin(n + 1, most), from = n - 1;
    while (at > 0 && score(s, found[at - 1].cost.throughput, &found[at - 1].policy) < value) at--;
    if (at > from) return n;
    memmove(found + at + 1, found + at, (from - at) * sizeof *found);
    found[at] = *one;
    return n;
}

int policy_predict(Found *found, const Search *search, Error *err) {
    const double roomy[NTIERS] = {1e18, 1e18, 1e18};
    double excess[NTIERS];
    Lp lp;
    Plan *corner = corner_plan(search, &search->given);
    if (corner) runtime_lp(&lp, search->hardware, search->checkpoint, corner, search->given.cpu_attention, roomy);
    bool fits = try_plan(found, search, &search->given, &lp, excess, err);
    plan_free(corner);
    return fits ? 0 : -1;
}

/* No placement of any block seems to fit: the smallest block, with all that is free on one tier, or the reason why not. */
static int last_resort(Found *found, const Search *s, Error *err) {
    enum { CORNERS = 27 * NTIERS };
    Search least = *s;
    Policy *p = &least.given;
    double *share[6] = {&p->wg, &p->wc, &p->cg, &p->cc, &p->hg, &p->hc}, quickest = INFINITY;
    if (!s->fixed_gbs) p->gbs = 1;
    if (!s->fixed_batches) p->num_gpu_batches = 1;
    *p = compressed(s, *p, true, true);
    for (int where = 0; where < (s->fixed_attention ? 1 : 2) * CORNERS; where++) {
        const int tier[3] = {where % 3, where / 3 % 3, where / 9 % 3};
        for (int i = 0; i < 6; i++)
            if (!s->fixed[i]) *share[i] = tier[i / 2] == i % 2 ? 1 - (s->fixed[i ^ 1] ? *share[i ^ 1] : 0) : 0;
        p->table_home = (Tier)(where / 27 % NTIERS);
        if (!s->fixed_attention) p->cpu_attention = where >= CORNERS || is_sparse(p);
        if (policy_predict(found, &least, err) != 0) continue;
        if (s->max_latency <= 0 || found->latency <= s->max_latency) return 0;
        quickest = fmin(quickest, found->latency);
    }
    if (quickest == INFINITY) return -1;
    return fail(err, EXIT_USAGE,
                "no policy is expected to bring a block within %g s; the smallest takes %.3g s: raise --max-latency, or "
                "shorten prompts or outputs",
                s->max_latency, quickest);
}

int policy_search(Found *found, int most, const Search *search, Error *err) {
    Candidates c = gather(search);
    int n = 0, realized = 0;
    for (int i = 0; i < c.n && realized < MAX_REALIZED; i++) {
        Found one;
        if (!c.list[i].score) break;
        if (n == most && c.list[i].score <= score(search, found[n - 1].cost.throughput, &found[n - 1].policy)) break;
        realized++;
        if (realize(&one, search, &c.list[i])) n = insert(found, n, most, search, &one);
    }
    free(c.list);
    if (!n && last_resort(found, search, err) == 0) n = 1;
    return n ? n : -1;
}

static int by_latency(const void *a, const void *b) {
    const Found *x = a, *y = b;
    return x->latency > y->latency ? 1 : x->latency < y->latency ? -1 : 0;
}

int policy_frontier(Found *found, int most, const Search *search, Error *err) {
    Candidates c = gather(search);
    int n = 0, all = 0;
    Found *every = xcalloc(c.n + 1, sizeof *every);
    for (int i = 0; i < c.n; i++)
        if (c.list[i].bound > 0 && realize(&every[all], search, &c.list[i])) all++;
    if (!all && last_resort(every, search, err) == 0) all = 1;
    qsort(every, all, sizeof *every, by_latency);
    for (int i = 0; i < all && n < most; i++) /* one that is slower must be better */
        if (!n || every[i].cost.throughput > found[n - 1].cost.throughput) found[n++] = every[i];
    free(every), free(c.list);
    return n ? n : -1;
}
