/* search.c: the policy search (section 4.3), which finds of all block sizes, schedules and
 * placements the one with the best throughput, for one machine or for a pipeline (section 4.4).
 *
 * As in the paper there are two levels. The outer level is a loop over block sizes (gbs,
 * num_gpu_batches), here also over schedules, over delegation of attention, over compression, and
 * in a pipeline over flights. The inner level is a linear program over the nine fractions. The LP
 * takes memory and time to be linear in the fractions, so its optimum is a bound that plans come
 * close to:
 *
 *   1. Enumerate. For every schedule, attention and compression, gbs = 1, 2, 4, ... while one batch
 *      fits, and for each of them num_gpu_batches = 1, 2, 4, ... while more batches help. Each such
 *      candidate is an LP; its optimum is the bound.
 *   2. Refine. Three times smaller steps are taken from the three best of each schedule.
 *      Throughput rises with the block until memory or a processor is full, and falls slowly
 *      behind that; so doubling finds the right hill, and steps of an eighth come near its top.
 *      test_search.c compares with all placements of a grid.
 *   3. Realize. By falling bounds, a candidate's fractions are rounded to what can be had, and
 *      planned. If that plan is too large for a tier, the LP is solved again with this tier
 *      smaller. Policies are compared by the costs of such plans.
 *   4. Stop when the next bound is no better than the best that has been found. If shares of cache
 *      or activations are given, go on: the bound is that of the share, and a block has whole
 *      sequences.
 *
 * The last chapter is about pipelines.
 * Read next: rehearse.c. */
#include <math.h>

#include "cost/cost.h"

enum {
    MAX_CANDIDATES = 4096, /* more than enough: some hundred are enumerated for each G */
    MAX_BATCHES = 64,      /* of a block: a layer's weights are then a small part of what moves */
    MAX_REALIZED = 64,     /* or as many as are asked for; mostly the first few are the best */
    ROUNDS = 3,            /* of smaller steps ... */
    AROUND = 3,            /* ... from so many candidates of a schedule */
    SMALL_BLOCK = 32,      /* sequences whose cache is dealt anew */
    ENOUGH_PROMPTS = 2048, /* of a longer task only so many prompts are planned */
};
static const double
    /* Twice the batches must bring half a percent for more to be tried. */
    HELPS = 1.005,
    /* Fewer workspaces must bring one percent: batches wait for each other in more ways than the
     * cost model knows. */
    WAITS_MORE = 1.01,
    /* This share of the best throughput is good enough for a shorter block. */
    COSTS_LITTLE = .95,
    /* The LP's latency may be a little more than that of the best plan. */
    LATENCY_SLACK = 1.05,
    /* See policy_score. */
    PRICE_OF_CORES = .02, PRICE_OF_BLOCKS = .01;

// -------------------------------------------------------------------------------------------------
// The linear program of one candidate
// -------------------------------------------------------------------------------------------------

/* A policy whose fractions are still to be found. */
typedef struct {
    Policy policy;
    double bound; /* token/s that the LP promises; 0: nothing fits */
    double score; /* of the bound; 0 if a block takes too long */
} Candidate;

/* The candidates that a search has found so far, best first. */
typedef struct {
    const Search *s;
    Candidate *list;
    int n;
} Candidates;

/* Returns the task by which a policy is judged: all of it, or one block for each flight. */
static Task task_for(const Search *s, const Policy *policy) {
    Task task = *s->task;
    if (s->one_block)
        task.count = imin(block_size(policy) * flight_count(policy), task.count);
    return task;
}

Plan *plan_for(const Search *s, const Policy *policy, Error *err) {
    Task task = task_for(s, policy);
    return plan_make(s->checkpoint, policy, &task, s->act_type, err);
}

/* Places everything on one of the upper tiers, where the GPU attends to it. */
static void place_all(Policy *policy, Tier tier) {
    for (int i = 0; i < 6; i++)
        policy->share[i] = i % 2 == (int)tier;
    policy->delegated = false;
}

/* Returns the plan that runtime_lp starts from: everything on the CPU. */
static Plan *corner_plan(const Search *s, const Policy *policy) {
    Error ignored;
    Policy corner = *policy;
    place_all(&corner, TIER_CPU);
    return plan_for(s, &corner, &ignored);
}

/* Writes the LP whose optimum is the best fractions; those that are given are fixed. */
static void fill_lp(Lp *lp, const Search *s, const Policy *policy, const Plan *corner,
                    const double capacity[NTIERS], const Plan *placed) {
    static const char *const name[6] = {"wg given", "wc given", "cg given",
                                        "cc given", "hg given", "hc given"};
    runtime_lp(lp, s->hardware, s->checkpoint, corner, policy->delegated, capacity, placed);
    for (int i = 0; i < 6; i++)
        if (s->fixed[i])
            lp_row(lp, name[i], true, s->given.share[i])->a[i / 2 * NTIERS + i % 2] = 1;
}

static void set_capacities(double capacity[NTIERS], const Search *s) {
    for (int t = 0; t < NTIERS; t++)
        capacity[t] = s->capacity[t];
}

/* Writes the LP of a policy on the search's machine. Returns the plan that it starts from, or NULL
 * if there is none. */
static Plan *policy_program(Lp *lp, const Search *s, const Policy *policy, const Plan *placed) {
    double capacity[NTIERS];
    Plan *corner = corner_plan(s, policy);
    set_capacities(capacity, s);
    if (corner)
        fill_lp(lp, s, policy, corner, capacity, placed);
    return corner;
}

void policy_lp(Lp *lp, double *tokens, const Search *search, const Policy *policy) {
    Plan *corner = policy_program(lp, search, policy, NULL);
    CHECK(corner); /* as for the search, which has found the policy */
    *tokens = runtime_tokens(corner);
    plan_free(corner);
}

/* Returns the prompts of one flight, if all flights have equally many. */
static int prompts_each(const Search *s, const Policy *p) {
    return ceil_div(s->task->count, flight_count(p));
}

/* Returns the seconds of one block: of as many sweeps of its flight as its longest output has
 * tokens. */
static double latency_of(const Search *s, const Plan *plan, double T) {
    Task task = task_for(s, &plan->policy);
    int n = 0;
    for (int i = 0; i < task.count; i++)
        n = imax(n, task.prompts[i].n);
    return T * n * flight_count(&plan->policy) / plan->sweeps;
}

/* Returns token/s, less two prices. On shared cores twice the batches must bring two percent more:
 * arithmetic beside copies is never quite as fast as it was measured alone, and more squares suffer
 * more. If blocks may be of any size, twice the block must bring one percent, because the first
 * results take twice as long. */
double policy_score(const Search *s, double throughput, const Policy *p) {
    double block = block_size(p), batches = block / p->gbs;
    double cores = s->hardware->shared_cores ? PRICE_OF_CORES * log2(batches) : 0;
    return throughput / (1 + (cores + (s->one_block ? PRICE_OF_BLOCKS * log2(block) : 0)));
}
static double found_score(const Search *s, const Found *f) {
    return policy_score(s, f->cost.throughput, &f->policy);
}

// -------------------------------------------------------------------------------------------------
// 1. Enumerate
// -------------------------------------------------------------------------------------------------

/* Returns true if the policies differ in placement, attention and workspaces at most. */
static bool same_block(const Policy *a, const Policy *b) {
    return a->flights == b->flights && a->gbs == b->gbs &&
           a->num_gpu_batches == b->num_gpu_batches && a->schedule == b->schedule &&
           a->weight_packed == b->weight_packed && a->cache_packed == b->cache_packed;
}

/* Fills in the bound and the score of a candidate, whose workspaces and table_home are chosen. */
static void set_bound(Candidate *c, const Search *s) {
    LpAnswer answer;
    Lp lp;
    double sweep_s[2];
    Plan *corner = policy_program(&lp, s, &c->policy, NULL);
    if (corner)
        lp_solve(&answer, &lp);
    if (corner && answer.verdict == LP_OPTIMAL) {
        runtime_sweeps(sweep_s, answer.x, corner->config.l);
        double seconds = cluster_pace(&s->cluster, corner, sweep_s).T;
        bool late =
            s->max_latency > 0 && latency_of(s, corner, seconds) > LATENCY_SLACK * s->max_latency;
        c->bound = runtime_tokens(corner) / seconds;
        c->score = late ? 0 : policy_score(s, c->bound, &c->policy);
    }
    plan_free(corner);
}

/* Returns true if a comes before b. Of equals, the one that was found first does. */
static bool is_better(const Candidate *a, const Candidate *b) {
    if (a->score != b->score)
        return a->score > b->score;
    if (a->policy.schedule != b->policy.schedule)
        return a->policy.schedule < b->policy.schedule;
    return a->policy.gbs < b->policy.gbs;
}

/* Adds a candidate if it is new. Its token table is on the highest tier that leaves room for the
 * rest, and it has the best number of workspaces there. Returns its bound. */
static double consider(Candidates *all, Policy policy) {
    Candidate c = {0};
    for (int i = 0; i < all->n; i++) {
        const Candidate *old = &all->list[i];
        if (same_block(&old->policy, &policy) && old->policy.delegated == policy.delegated)
            return old->bound;
    }
    for (int home = TIER_GPU; home < NTIERS && !c.bound; home++)
        for (int n = WORKSPACES; n >= LEAST_WORKSPACES; n--) {
            Candidate one = {.policy = policy};
            one.policy.table_home = home;
            one.policy.workspaces = n;
            set_bound(&one, all->s);
            if (!c.bound || one.score > WAITS_MORE * c.score)
                c = one;
        }
    if (all->n == MAX_CANDIDATES)
        return c.bound;
    int at = all->n++;
    for (; at > 0 && is_better(&c, &all->list[at - 1]); at--)
        all->list[at] = all->list[at - 1];
    all->list[at] = c;
    return c.bound;
}

/* Considers num_gpu_batches = 1, 2, 4, ... while more batches help. Returns the bound of the
 * first. */
static double double_batches(Candidates *c, Policy policy) {
    const Search *s = c->s;
    int enough = imin(MAX_BATCHES, ceil_div(prompts_each(s, &policy), policy.gbs));
    int most = s->fixed_batches ? s->given.num_gpu_batches : enough;
    double first = 0, best = 0;
    for (int K = s->fixed_batches ? most : 1;; K = imin(2 * K, most)) {
        policy.num_gpu_batches = K;
        double bound = consider(c, policy);
        if (!first)
            first = bound;
        if (bound < best * HELPS || K == most)
            return first;
        best = bound;
    }
}

/* Considers gbs = 1, 2, 4, ... until one batch does not fit; then no larger one does. */
static void double_gbs(Candidates *c, Policy policy) {
    const Search *s = c->s;
    int most = s->fixed_gbs ? s->given.gbs : prompts_each(s, &policy);
    for (policy.gbs = s->fixed_gbs ? most : 1; double_batches(c, policy) && policy.gbs < most;)
        policy.gbs = imin(2 * policy.gbs, most);
}

/* Returns true if the search considers a schedule. Row is zig-zag with one batch, and is considered
 * only if it is given. Pipelines are compared by blocks of zig-zag. If the diagonal schedule is
 * given but staggering does not help, zig-zag is the same. */
static bool may_be(const Search *s, Schedule schedule) {
    if (!s->fixed_schedule)
        return schedule == SCHEDULE_ZIGZAG ||
               (schedule == SCHEDULE_DIAGONAL && !(s->one_block && s->cluster.nodes));
    if (s->given.schedule == schedule)
        return true;
    return s->given.schedule == SCHEDULE_DIAGONAL && schedule == SCHEDULE_ZIGZAG &&
           !s->fixed_batches;
}

/* Considers all compressions, schedules and delegations that are not given. consider() drops those
 * that come to the same policy. Sparse attention is always delegated to the CPU. */
static void enumerate_flights(Candidates *c, int flights) {
    const Search *s = c->s;
    bool sparse = is_sparse(&s->given);
    for (int packed = 0; packed < 4; packed++)
        for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++)
            for (int on_cpu = sparse; on_cpu < 2; on_cpu++) {
                Policy policy = s->given;
                policy.flights = flights;
                policy.weight_packed |= s->may_pack && packed & 1;
                policy.cache_packed |= s->may_pack && packed & 2;
                if (!may_be(s, schedule))
                    continue;
                if (s->fixed_attention && !sparse && on_cpu != (int)s->given.delegated)
                    continue;
                policy.schedule = schedule;
                policy.delegated = on_cpu;
                double_gbs(c, policy);
            }
}

/* Considers several numbers of flights. A pipeline of M machines needs M flights to have work for
 * all, and one more to hide the wire; with more flights machines wait less, but each flight takes
 * memory, or streams the weights once more. */
static void enumerate(Candidates *c) {
    int M = c->s->cluster.nodes, flights[] = {1, M, M + 1, 2 * M, 4 * M};
    if (c->s->fixed_flights || M <= 1)
        enumerate_flights(c, flight_count(&c->s->given));
    else
        for (int g = 0; g < 5; g++)
            if (flights[g] <= c->s->task->count)
                enumerate_flights(c, flights[g]);
}

// -------------------------------------------------------------------------------------------------
// 2. Refine
// -------------------------------------------------------------------------------------------------

/* Considers the policy with another block, no larger than the task. */
static void try_block(Candidates *c, Policy p, int gbs, int num_gpu_batches) {
    const Search *s = c->s;
    int count = prompts_each(s, &p);
    if (!s->fixed_gbs)
        p.gbs = imin(imax(gbs, 1), count);
    p.num_gpu_batches = imax(1, imin(num_gpu_batches, ceil_div(count, p.gbs)));
    if (s->fixed_batches)
        p.num_gpu_batches = s->given.num_gpu_batches;
    consider(c, p);
}

/* Considers smaller steps in both directions, one batch more or less, and batches such that one to
 * four blocks share the task equally. */
static void step_from(Candidates *c, const Policy *from) {
    static const double step[] = {.75, .875, 1.125, 1.25, 1.5};
    int gbs = from->gbs, K = from->num_gpu_batches, count = prompts_each(c->s, from);
    for (size_t i = 0; i < sizeof step / sizeof *step; i++) {
        try_block(c, *from, gbs * step[i], K);
        try_block(c, *from, gbs, lround(K * step[i]));
    }
    if (c->s->one_block)
        return;
    try_block(c, *from, gbs, K - 1);
    try_block(c, *from, gbs, K + 1);
    for (int blocks = 1; blocks <= 4; blocks++)
        try_block(c, *from, ceil_div(count, K * blocks), K);
}

/* Adds candidates around the best ones of each schedule, as the sim may prefer another. */
static void refine(Candidates *c) {
    for (int round = 0; round < ROUNDS * (SCHEDULE_DIAGONAL + 1); round++) {
        int n = 0, schedule = round % (SCHEDULE_DIAGONAL + 1);
        Policy best[AROUND];
        for (int i = 0; i < c->n && n < AROUND; i++)
            if ((int)c->list[i].policy.schedule == schedule)
                best[n++] = c->list[i].policy;
        while (n > 0)
            step_from(c, &best[--n]);
    }
}

/* Returns all candidates, best first. They are judged by a part of a long task, whose prompts are
 * taken from all of it at equal distances. */
static Candidates find_candidates(const Search *search) {
    Search thin = *search;
    Task task = *search->task;
    Prompt *some = NULL;
    Candidates c = {.s = &thin, .list = xcalloc(MAX_CANDIDATES, sizeof *c.list)};
    if (!search->one_block && task.count > ENOUGH_PROMPTS) {
        some = xcalloc(ENOUGH_PROMPTS, sizeof *some);
        for (int i = 0; i < ENOUGH_PROMPTS; i++)
            some[i] = task.prompts[(long)i * task.count / ENOUGH_PROMPTS];
        task.prompts = some;
        task.count = ENOUGH_PROMPTS;
        thin.task = &task;
    }
    enumerate(&c);
    refine(&c);
    free(some);
    c.s = search;
    return c;
}

// -------------------------------------------------------------------------------------------------
// 3. Realize
// -------------------------------------------------------------------------------------------------

/* Rounds x to steps of 1 / steps, so that the shares of the upper tiers and the rest, the disk's,
 * add up to 1. Shares that are fixed stay. */
static void round_shares(double share[2], const double x[NTIERS], const bool fixed[2], int steps) {
    int last = fixed[TIER_CPU] ? TIER_GPU : TIER_CPU;
    for (int t = TIER_GPU; t <= TIER_CPU; t++)
        if (!fixed[t])
            share[t] = round(x[t] * steps) / steps;
    if (!fixed[last] && (x[TIER_DISK] < .5 / steps || share[0] + share[1] > 1))
        share[last] = 1 - share[1 - last];
}

/* Sets the policy's fractions to x, rounded: weights to percentages with one digit behind the
 * point, cache and activations to sequences of the block, as long as one digit can tell these
 * apart. */
static void set_fractions(Policy *p, const Search *s, const double *x) {
    int weights = 1000, sequences = imin(weights, imin(block_size(p), prompts_each(s, p)));
    for (int of = 0; of < 3; of++)
        round_shares(p->share + 2 * of, x + NTIERS * of, s->fixed + 2 * of,
                     of ? sequences : weights);
}

/* Returns the plan's policy with its cost by the rows of the LP. */
static Found found_by(const Search *s, const Plan *plan, const Lp *lp) {
    Found found = {.policy = plan->policy};
    runtime_cost(&found.cost, lp, plan);
    double l = plan->config.l, tokens = found.cost.throughput * found.cost.T;
    found.pace = cluster_pace(&s->cluster, plan,
                              (const double[]){found.cost.T_gen * l, found.cost.T_pre * l});
    found.cost.T = found.pace.T;
    found.cost.throughput = tokens / found.cost.T;
    found.latency = latency_of(s, plan, found.cost.T);
    found.expected = found.cost.throughput;
    return found;
}

/* Notes the tiers that bind: with more memory there the LP's optimum would be better. */
static void note_full(Cost *cost, const Lp *lp, const LpAnswer *answer) {
    for (int i = 0; i < lp->m; i++)
        for (int t = 0; t < NTIERS; t++)
            if (lp->row[i].name == memory_row[t] && answer->y[i] > 0)
                strcpy(cost->full[t], memory_row[t]);
}

/* Plans a policy whose cache and activations are placed. Weights are placed anew beside them, since
 * whole sequences take more or less room than their fractions. Returns 1 and *found if the plan
 * fits the search's capacities; 0 if it exceeds them, by excess bytes on each tier; -1 if there is
 * no plan. */
static int place_beside(Found *found, double excess[NTIERS], const Search *s, Policy policy,
                        const Plan *corner, const double capacity[NTIERS]) {
    Error ignored;
    Lp lp;
    LpAnswer answer;
    Search whole = *s;
    whole.given = policy;
    memset(whole.fixed + 2, true, 4); /* all but wg and wc */
    fill_lp(&lp, &whole, &policy, corner, capacity, NULL);
    lp_solve(&answer, &lp);
    if (answer.verdict == LP_OPTIMAL)
        set_fractions(&policy, &whole, answer.x);
    Plan *plan = plan_for(s, &policy, &ignored);
    if (!plan)
        return -1;
    bool fits = !plan_missing(plan, s->capacity);
    if (fits) {
        fill_lp(&lp, s, &policy, corner, capacity, plan);
        *found = found_by(s, plan, &lp);
    }
    for (int t = 0; t < NTIERS; t++)
        excess[t] = size_less(plan->total[t], s->capacity[t]);
    plan_free(plan);
    return fits;
}

/* Plans the placement of a candidate that is best for so much memory. Returns as place_beside. */
static int place(Found *found, double excess[NTIERS], const Search *s, Policy policy,
                 const Plan *corner, const double capacity[NTIERS]) {
    Lp lp;
    LpAnswer answer;
    fill_lp(&lp, s, &policy, corner, capacity, NULL);
    lp_solve(&answer, &lp);
    if (answer.verdict != LP_OPTIMAL)
        return -1;
    set_fractions(&policy, s, answer.x);
    int fits = place_beside(found, excess, s, policy, corner, capacity);
    if (fits > 0)
        note_full(&found->cost, &lp, &answer);
    return fits;
}

/* Moves one, two or all of a tier's sequences of a small block's cache to another tier, for as long
 * as that is better: a rounded share may be far from the LP's there. The weights have room as
 * corrected or all of it. */
static void deal_cache(Found *found, const Search *s, const Plan *corner,
                       const double corrected[NTIERS]) {
    double all[NTIERS];
    int n = imin(block_size(&found->policy), prompts_each(s, &found->policy));
    bool given = s->fixed[2] || s->fixed[3];
    int moves = given || n > SMALL_BLOCK ? 0 : 6 * NTIERS * NTIERS;
    set_capacities(all, s);
    for (int move = 0; move < moves; move++) {
        int from = move / 6 % NTIERS, to = move / 6 / NTIERS;
        Found other;
        double excess[NTIERS];
        Policy policy = found->policy;
        double *share = policy.share + 2;
        int on[] = {lround(share[0] * n), lround(share[1] * n), 0};
        on[TIER_DISK] = n - on[0] - on[1];
        int moved = imin(on[from], (const int[]){1, 2, n}[move % 3]);
        on[from] -= moved;
        on[to] += moved;
        if (from == to || !moved)
            continue;
        share[0] = (double)on[0] / n;
        share[1] = on[TIER_DISK] ? (double)on[1] / n : 1 - share[0];
        if (place_beside(&other, excess, s, policy, corner, move / 3 % 2 ? all : corrected) > 0 &&
            found_score(s, &other) > found_score(s, found)) {
            memcpy(other.cost.full, found->cost.full, sizeof other.cost.full);
            *found = other;
            move = -1;
        }
    }
}

/* Finds the candidate's best placement whose plan fits. A tier that is exceeded becomes smaller by
 * a little more than the excess, and each time by twice as much: a rounded share falls in steps (a
 * step of OPT-175B's weights is 350 MB), and the excess may be a small part of one. After 12 tries
 * that is thousands of times the excess, more than a step. If there is no placement for so little
 * memory, the GPU has all of its memory again and the CPU a little less than before: what exceeds
 * the GPU is mostly the staging of weights, which another share on the CPU changes. Placements may
 * have been jumped over, so halving then looks for a better one. */
static bool realize(Found *found, const Search *s, const Candidate *c) {
    enum { TRIES = 12, HALVINGS = 3 };
    static const double A_LITTLE_LESS = .995;
    double capacity[NTIERS], before[NTIERS], excess[NTIERS];
    double times = 1.05; /* the excess, and a little more */
    Plan *corner = corner_plan(s, &c->policy);
    int fits = 0, tries = 0;
    set_capacities(capacity, s);
    set_capacities(before, s);
    for (; tries < TRIES && corner && fits <= 0; tries++, times *= 2) {
        fits = place(found, excess, s, c->policy, corner, capacity);
        for (int t = 0; t < NTIERS && !fits; t++) {
            before[t] = capacity[t];
            capacity[t] -= excess[t] * times;
        }
        if (fits < 0) {
            capacity[TIER_GPU] = s->capacity[TIER_GPU];
            capacity[TIER_CPU] *= A_LITTLE_LESS;
        }
    }
    for (int i = 0; i < HALVINGS && tries > 1 && fits > 0; i++) {
        double middle[NTIERS];
        Found other;
        for (int t = 0; t < NTIERS; t++)
            middle[t] = (before[t] + capacity[t]) / 2;
        bool good = place(&other, excess, s, c->policy, corner, middle) > 0;
        memcpy(good ? capacity : before, middle, sizeof middle);
        if (good && found_score(s, &other) > found_score(s, found))
            *found = other;
    }
    if (fits > 0)
        deal_cache(found, s, corner, capacity);
    plan_free(corner);
    return fits > 0 && !(s->max_latency > 0 && found->latency > s->max_latency);
}

/* Predicts search->given. Returns false if its plan does not fit; of several plans that do not, err
 * describes the one that misses the fewest bytes, so far *missing. placed: see check_fits. */
static bool predict(Found *found, const Search *s, Bytes *missing, bool placed, Error *err) {
    Plan *plan = plan_for(s, &s->given, err);
    Bytes misses = plan ? plan_missing(plan, s->capacity) : *missing;
    Lp lp;
    if (!misses) {
        plan_free(policy_program(&lp, s, &s->given, plan));
        *found = found_by(s, plan, &lp);
    } else if (misses < *missing) {
        *missing = misses;
        check_fits(plan, s->capacity, placed, err);
    }
    plan_free(plan);
    return !misses;
}

int policy_predict(Found *found, const Search *search, Error *err) {
    Bytes missing = UINT64_MAX;
    return predict(found, search, &missing, true, err) ? 0 : -1;
}

/* Looks for any policy when no candidate has a bound: the smallest block, with all tiers in turn
 * for the weights, the cache, the activations and the token table, as far as they are not given.
 * Returns 0, or -1 and err with the reason why there is none. */
static int last_resort(Found *found, const Search *s, Error *err) {
    enum { CORNERS = NTIERS * NTIERS * NTIERS * NTIERS };
    Search least = *s;
    Policy *p = &least.given;
    double quickest = INFINITY, *share = p->share;
    bool placed = memchr(s->fixed, true, sizeof s->fixed);
    Bytes missing = UINT64_MAX;
    if (!s->fixed_gbs)
        p->gbs = 1;
    if (!s->fixed_batches)
        p->num_gpu_batches = 1;
    p->weight_packed |= s->may_pack;
    p->cache_packed |= s->may_pack;
    for (int where = 0; where < (s->fixed_attention ? 1 : 2) * CORNERS; where++) {
        int tier[3] = {where % 3, where / 3 % 3, where / 9 % 3};
        for (int i = 0; i < 6; i++)
            if (!s->fixed[i])
                share[i] = tier[i / 2] == i % 2 ? 1 - (s->fixed[i ^ 1] ? share[i ^ 1] : 0) : 0;
        p->table_home = where / 27 % NTIERS;
        if (!s->fixed_attention)
            p->delegated = where >= CORNERS || is_sparse(p);
        if (!predict(found, &least, &missing, placed, err))
            continue;
        if (s->max_latency <= 0 || found->latency <= s->max_latency)
            return 0;
        quickest = fmin(quickest, found->latency);
    }
    if (quickest == INFINITY)
        return -1;
    return fail(err, EXIT_USAGE,
                "no policy is expected to bring a block within %g s; the smallest takes %.3g s: "
                "raise --max-latency, or "
                "shorten prompts or outputs",
                s->max_latency, quickest);
}

// -------------------------------------------------------------------------------------------------
// 4. The search
// -------------------------------------------------------------------------------------------------

/* Inserts *one into a list that is sorted, best first, and has one entry for a block and schedule.
 * Returns the new number of entries. */
static int insert(Found *found, int n, int most, const Search *s, const Found *one) {
    double value = found_score(s, one);
    int at = 0; /* the entry that leaves: the same block, or the last of a full list */
    while (at < n && !same_block(&found[at].policy, &one->policy))
        at++;
    if (at == n && n < most)
        n++;
    else if (found_score(s, &found[at = imin(at, most - 1)]) >= value)
        return n;
    for (; at > 0 && found_score(s, &found[at - 1]) < value; at--)
        found[at] = found[at - 1];
    found[at] = *one;
    return n;
}

int policy_search(Found *found, int most, const Search *search, Error *err) {
    Candidates c = find_candidates(search);
    int n = 0;
    /* A block may have more or less of its sequences on a tier than a given share says, so that its
     * bound is none. */
    bool dealt = memchr(search->fixed + 2, true, 4);
    for (int i = 0; i < imin(c.n, imax(most, MAX_REALIZED)) && c.list[i].score > 0; i++) {
        Found one;
        if (n == most && !dealt && c.list[i].score <= found_score(search, &found[n - 1]))
            break;
        if (realize(&one, search, &c.list[i]))
            n = insert(found, n, most, search, &one);
    }
    free(c.list);
    if (!n && !last_resort(found, search, err))
        n = 1;
    return n ? n : -1;
}

const Found *policy_sooner(const Found *found, int n) {
    const Found *sooner = found;
    for (const Found *f = found; f < found + n; f++)
        if (f->expected >= COSTS_LITTLE * found->expected && f->latency < sooner->latency)
            sooner = f;
    return sooner;
}

int policy_frontier(Found *found, int most, const Search *search, Error *err) {
    Found *every = xcalloc(MAX_CANDIDATES, sizeof *every);
    int all = policy_search(every, MAX_CANDIDATES, search, err);
    int n = 0;
    for (; n < most; n++) { /* the next longer latency must have a better throughput */
        const Found *next = NULL;
        for (const Found *f = every; f < every + all; f++)
            if ((!n || f->cost.throughput > found[n - 1].cost.throughput) &&
                (!next || f->latency < next->latency))
                next = f;
        if (!next)
            break;
        found[n] = *next;
    }
    free(every);
    return n ? n : -1;
}

// -------------------------------------------------------------------------------------------------
// Pipelines of machines (section 4.4), and the chain without offloading that section 6.4 compares
// with
//
// The layers are split equally over M machines, l each (rounded up). G flights of K GPU batches are
// in flight and sweep in turn (schedule.c). Each machine runs a flight's K batches through its
// layers as if the model had only those; so the policy search for one machine is used as it is,
// with room for the caches of G flights, and G is one more number that it chooses. In its last
// layer's row a sweep's batches leave one by one, and the next machine begins with the first: 2 h1
// bytes a token travel, x seconds a batch on the wire, and d more until they arrive. With t the
// seconds of a machine's sweep (t_pre, t_gen):
//
//   leave = (1 - 1/l) t + t / (l K)
//       seconds until a sweep's first batch is through the last layer's row
//   hop = leave + d + x + (K - 1) max(0, x - t / (l K))
//       seconds until the next machine is as far; a slow wire delays its row 0
//   round = max(G t, G K x, (M - 1) hop + t + d)
//       seconds of a sweep of every flight: no machine and no wire does more, and a flight's
//       tokens, which its head's row gives, must have come round
//   prefill = (M - 1) hop_pre + G max(t_pre, K x_pre)
//       the pipeline fills; then the last machine sets the pace
//   T = prefill + (n - 1) round_gen,   throughput = G bls n / T
//       a later block's prefill is one more round
//
// The bubble, which is the share of T in which a machine has nothing to do, is
// 1 - G (t_pre + (n - 1) t_gen) / T: with G > M and a fast wire it is hardly more than the filling,
// (M - 1) / (M - 1 + G) of the prefill. More flights make it smaller, but each streams the weights
// anew and has a cache of its own. A machine with less memory pressure can have larger blocks and
// use faster tiers, which is why decoding may scale better than linearly, while the bubble of a
// short prefill holds generation back. Without offloading (Petals and the like) everything rests on
// the GPUs: the formulas are the same, with 100 0 100 0 100 0, and M must be large enough. The head
// is counted on every machine, as the slowest sets the pace.
// -------------------------------------------------------------------------------------------------

Pace cluster_pace(const Cluster *cluster, const Plan *plan, const double sweep_s[2]) {
    const Workload *work = plan->work;
    double M = imax(cluster->nodes, 1), l = plan->config.l, d = M > 1 ? cluster->delay_s : 0;
    /* With fewer blocks than flights only the flights that have a block count. */
    double G = fmax(1, fmin(flight_count(&plan->policy), work[1].sweeps));
    double hop[2], pace[2], round_s[2];
    for (int pre = 0; pre < 2; pre++) {
        const Workload *w = &work[pre];
        double t = sweep_s[pre], batches = fmax(1, w->prefills + w->decodes),
               K = batches / fmax(1, w->sweeps);
        double state = type_bytes(plan->act_type) * plan->config.h1, square = t / (l * K);
        double x = M > 1 ? state * (w->prompt_rows + w->decoded) / batches / cluster->net_bdw : 0;
        hop[pre] = (1 - 1 / l) * t + square + d + x + (K - 1) * fmax(0, x - square);
        pace[pre] = G * fmax(t, K * x);
        round_s[pre] = fmax(pace[pre], (M - 1) * hop[pre] + t + d);
    }
    Pace p = {.prefill_s = (M - 1) * hop[1] + pace[1], .token_s = round_s[0]};
    p.T = p.prefill_s + (work[1].sweeps / G - 1) * round_s[1] + work[0].sweeps / G * p.token_s;
    return p;
}

/* Returns the part of the model that one of `nodes` machines has. */
static Checkpoint *part_of(const Checkpoint *whole, int nodes) {
    OptConfig config = whole->config;
    config.l = ceil_div(config.l, nodes);
    return checkpoint_dummy(&config, whole->seed);
}

/* Fixes a placement with everything on the GPU. */
static void hold_on_gpu(Search *s) {
    place_all(&s->given, TIER_GPU);
    memset(s->fixed, true, sizeof s->fixed);
    s->fixed_attention = true;
}

int cluster_search(Found *best, const Search *search, bool offloading, Error *err) {
    Search one = *search;
    Checkpoint *part = part_of(search->checkpoint, search->cluster.nodes);
    one.checkpoint = part;
    if (!offloading)
        hold_on_gpu(&one);
    int n = policy_search(best, 1, &one, err);
    checkpoint_close(part);
    return n > 0 ? 0 : -1;
}

int cluster_least(const Search *search) {
    Search one = *search;
    Found ignored;
    Error err;
    hold_on_gpu(&one);
    one.given.gbs = one.given.num_gpu_batches = one.given.flights = 1;
    one.given.table_home = TIER_GPU;
    for (int nodes = 1; nodes <= search->checkpoint->config.l; nodes++) {
        Checkpoint *part = part_of(search->checkpoint, nodes);
        one.checkpoint = part;
        bool fits = !policy_predict(&ignored, &one, &err);
        checkpoint_close(part);
        if (fits)
            return nodes;
    }
    return 0;
}
