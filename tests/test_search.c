/* test_search.c: that what the search finds fits and keeps what was given, that nothing better lies beside it, and that
 * what it refuses is impossible. Times are those of the cost model, which is test_policy.c's; none is measured. */
#include "tests.h"

static Error err;

// ---- Questions ------------------------------------------------------------------------------------------------------

static bool one_in(uint64_t *seed, int n) { return test_below(seed, n) == 0; }

/* The question to the search, with what it points to. */
static Hardware machine;
static Checkpoint *model;
static Task task;
static Search q;

/* Everything is open. */
static void open_case(OptConfig config, const char *hardware, int count, int s, int n) {
    ASSERT_OK(hardware_read(&machine, hardware, &err));
    model = checkpoint_dummy(&config, 0), task = equal_task(count, s, n);
    q = open_question(&machine, model, &task);
}

static void close_case(void) {
    free_task(&task);
    checkpoint_close(model);
}

/* A machine whose GPU has room for a part only. */
static void open_squeeze(const char *name, int count, int s, int n) {
    const OptConfig config = opt_named(name);
    const double weights = 24. * config.h1 * config.h1 * config.l;
    open_case(config, "hardware/laptop.json", count, s, n);
    q.capacity[TIER_GPU] = (Bytes)(3e8 + .3 * weights), q.capacity[TIER_CPU] = (Bytes)(3e8 + 1.5 * weights);
}

/* The block, the schedule and who attends are given. */
static void give_block(int gbs, int num_gpu_batches) {
    q.given.gbs = gbs, q.given.num_gpu_batches = num_gpu_batches;
    q.fixed_gbs = q.fixed_batches = q.fixed_schedule = q.fixed_attention = true;
}

/* Rates scaled, and memory that is a squeeze for the model, mostly. */
static void vary_machine(uint64_t *seed) {
    const OptConfig *m = &model->config;
    const double weights = 24. * m->h1 * m->h1 * m->l, of_weights[][2] = {{.05, 5}, {.1, 10}, {.2, 50}};
    double kv = 0;
    for (int i = 0; i < task.count; i++) kv += 4. * m->h1 * m->l * (task.prompts[i].s + task.prompts[i].n);
    for (int t = 0; t < NTIERS; t++)
        q.capacity[t] =
            (Bytes)(weights * test_spread(seed, of_weights[t][0], of_weights[t][1]) + kv * test_spread(seed, .01, 2));
    for (int rate = 0; rate < 8; rate++) machine.bdw[rate / 2][rate % 2] *= test_spread(seed, .1, 10);
    machine.shared_cores = one_in(seed, 3);
    machine.copy_core_s = test_spread(seed, 1e-12, 2e-11), machine.disk_core_s = test_spread(seed, 1e-12, 1e-10);
    q.act_type = machine.shared_cores ? F32 : F16;
}

/* Some of what the search would look for is given. Large models mean more layers to plan, so that they get few prompts. */
static void open_random(uint64_t *seed) {
    static const char *const names[] = {"opt-350m", "opt-1.3b", "opt-6.7b", "opt-30b", "opt-175b"};
    static const char *const machines[] = {"hardware/t4.json", "hardware/rtx4090.json", "hardware/h100.json",
                                           "hardware/laptop.json", "hardware/t4-fitted.json"};
    const char *name = one_in(seed, 3) ? names[test_below(seed, 5)] : "opt-125m";
    const OptConfig config = one_in(seed, 5) ? (OptConfig)SMALL_CONFIG(2) : opt_named(name);
    const int limit = imin(1000, config.max_pos - 30);
    const int count = (int)test_spread(seed, 1, config.l > 24 ? 8 : one_in(seed, 16) ? 300 : 20);
    open_case(config, machines[test_below(seed, 5)], count, limit, 20);
    for (int i = 0, mixed = one_in(seed, 2); i < count; i++) {
        Prompt *prompt = &task.prompts[i];
        prompt->s = mixed || !i ? (int)test_spread(seed, 1, limit) : prompt[-1].s;
        prompt->n = mixed || !i ? (int)test_spread(seed, 1, 20) : prompt[-1].n;
    }
    vary_machine(seed);
    Policy *p = &q.given;
    for (int i = 0; i < 6; i++) {
        if (i % 2 == 0) draw_shares(&p->share[i], &p->share[i + 1], seed);
        q.fixed[i] = one_in(seed, 6);
        p->share[i] *= q.fixed[i];
    }
    q.fixed_gbs = one_in(seed, 4), q.fixed_schedule = one_in(seed, 3), q.fixed_attention = one_in(seed, 4);
    if (q.fixed_gbs) p->gbs = (int)test_spread(seed, 1, 2 * count + 1);
    if (q.fixed_schedule) p->schedule = test_below(seed, 3);
    q.fixed_batches = p->schedule == SCHEDULE_ROW || one_in(seed, 4);
    if (q.fixed_batches) p->num_gpu_batches = (int)test_spread(seed, 1, 12);
    if (q.fixed_attention) p->delegated = one_in(seed, 2);
    const bool packs = config.h1 % GROUP == 0; /* and so is h2, and heads are whole sixteens */
    p->weight_packed = packs && one_in(seed, 4), p->cache_packed = packs && one_in(seed, 4);
    p->head_packed = p->weight_packed && config.embed % GROUP == 0 && one_in(seed, 2);
    q.may_pack = packs && one_in(seed, 4);
    if (one_in(seed, 4)) p->sparsity = .1, q.fixed_attention = p->delegated = true;
    p->overlap = !one_in(seed, 8), p->page_tokens = one_in(seed, 4) ? 1 + test_below(seed, 64) : 16;
    q.one_block = one_in(seed, 4);
}

// ---- Answers --------------------------------------------------------------------------------------------------------

/* What was given is kept: a plan fills in a sparsity that was left open, and zig-zag stands for a diagonal that adds
 * nothing. Where nothing was given, a tier has nothing at all or a step at least: of weights a tenth of a percent, of the
 * rest a sequence. The cost model, asked about the policy as it is, says that it fits, and the same cost; which tiers bind
 * only the search knows. */
static void check_found(const Found *f) {
    const Policy *p = &f->policy, *given = &q.given;
    const bool adds_nothing = p->schedule == SCHEDULE_ZIGZAG && given->schedule == SCHEDULE_DIAGONAL && !q.fixed_batches;
    CU_ASSERT(p->overlap == given->overlap && p->page_tokens == given->page_tokens);
    CU_ASSERT(p->sparsity == (given->sparsity > 0 ? given->sparsity : 1));
    CU_ASSERT(!q.fixed_gbs || p->gbs == given->gbs);
    CU_ASSERT(!q.fixed_batches || p->num_gpu_batches == given->num_gpu_batches);
    CU_ASSERT(!q.fixed_attention || p->delegated == given->delegated);
    CU_ASSERT(!q.fixed_schedule || p->schedule == given->schedule || adds_nothing);
    CU_ASSERT(p->weight_packed == (given->weight_packed || (p->weight_packed && q.may_pack)));
    CU_ASSERT(p->cache_packed == (given->cache_packed || (p->cache_packed && q.may_pack)));
    CU_ASSERT(p->head_packed == given->head_packed);
    const int sequences = imin(block_size(p), ceil_div(task.count, flight_count(p)));
    for (int i = 0; i < 6; i += 2) {
        const double *two = p->share + i, share[] = {two[0], two[1], 1 - two[0] - two[1]};
        const double least = q.fixed[i] || q.fixed[i + 1] ? -1e-9 : .5 / (i ? imin(sequences, 1000) : 1000);
        for (int t = 0; t < 2; t++) CU_ASSERT(!q.fixed[i + t] || share[t] == given->share[i + t]);
        for (int t = 0; t < NTIERS; t++) CU_ASSERT(share[t] == 0 || share[t] > least);
    }
    Found again;
    Search as_found = q;
    as_found.given = *p;
    ASSERT_OK(policy_predict(&again, &as_found, &err));
    const Cost *c = &f->cost;
    CU_ASSERT(isfinite(c->T) && c->throughput > 0 && isfinite(c->throughput) && c->T_pre > 0 && c->T_gen >= 0);
    CU_ASSERT(!memcmp(c, &again.cost, offsetof(Cost, full)) && f->latency == again.latency);
    for (int t = 0; t < NTIERS; t++) CU_ASSERT(c->peak[t] <= (double)q.capacity[t]);
    CU_ASSERT(f->latency > 0 && (q.max_latency <= 0 || f->latency <= q.max_latency));
    CU_ASSERT(f->latency <= c->T * (1 + 1e-9));
}

/* What the list is sorted by: on shared cores twice the batches must bring two percent, and where a block may have any
 * size, twice the block one. */
static double worth(const Found *f) {
    const double block = block_size(&f->policy), batches = block / f->policy.gbs;
    return f->cost.throughput /
           (1 + (machine.shared_cores ? .02 * log2(batches) : 0) + (q.one_block ? .01 * log2(block) : 0));
}

/* If the search refuses, the smallest block that the question allows, with all that is open on one tier, does not fit or is
 * not quick enough at any corner. */
static void check_refused(void) {
    enum { HOMES = NTIERS * NTIERS * NTIERS * NTIERS };
    Search least = q;
    Policy *p = &least.given;
    p->weight_packed |= q.may_pack, p->cache_packed |= q.may_pack;
    if (!q.fixed_gbs) p->gbs = 1;
    if (!q.fixed_batches) p->num_gpu_batches = 1;
    for (int where = 0; where < (q.fixed_attention ? HOMES : 2 * HOMES); where++) {
        const int home[] = {where % 3, where / 3 % 3, where / 9 % 3};
        Found corner;
        Error why;
        p->table_home = where / 27 % 3;
        if (!q.fixed_attention) p->delegated = where >= HOMES;
        for (int i = 0; i < 6; i++)
            if (!q.fixed[i]) p->share[i] = home[i / 2] == i % 2 ? 1 - (q.fixed[i ^ 1] ? p->share[i ^ 1] : 0) : 0;
        CU_ASSERT(policy_predict(&corner, &least, &why) || (q.max_latency > 0 && corner.latency > q.max_latency));
    }
}

enum { TEN = 10, FRONTIER = 64 };
static Found found[FRONTIER];

/* Returns the number of policies, at most `most`; 0 where the search refused, with one line for the user: which tier is too
 * small, or that the latency is. Planning all corners of a deep model takes its time: of such refusals every fourth is
 * checked. */
static int ask(int most) {
    static int deep;
    err = (Error){0, ""};
    const int n = policy_search(found, most, &q, &err);
    CU_ASSERT(n <= most && n != 0);
    for (int i = 0; i < n; i++) {
        check_found(&found[i]);
        CU_ASSERT(!i || worth(&found[i]) <= worth(&found[i - 1]));
    }
    if (n > 0) return n;
    CU_ASSERT(err.code == EXIT_USAGE && !strchr(err.text, '\n'));
    CU_ASSERT(strstr(err.text, "-mem") || strstr(err.text, "--max-latency"));
    if (model->config.l <= 24 || deep++ % 4 == 3) check_refused();
    return 0;
}

/* The best policy, where there must be one. */
static Found best(void) {
    CU_ASSERT_EQUAL_FATAL(policy_search(found, 1, &q, &err), 1);
    return found[0];
}

/* Some are asked again with less time than the best takes, or more. */
TEST(random_searches_find_policies_that_fit_or_say_why_not) {
    const int trials = 400 / test_every;
    uint64_t seed = 1;
    int fits = 0, too_slow = 0;
    for (int trial = 0; trial < trials; trial++) {
        open_random(&seed);
        const int n = ask(one_in(&seed, 8) ? TEN : 1);
        fits += n > 0;
        if (n > 0 && one_in(&seed, 5)) {
            q.max_latency = found[0].latency * test_spread(&seed, .05, 2);
            too_slow += !ask(2);
        }
        close_case();
    }
    CU_ASSERT(fits > .4 * trials && fits < .8 * trials && too_slow > .025 * trials);
}

// ---- The sim as the judge -------------------------------------------------------------------------------------------

/* Seconds of the whole task in the sim. */
static double played_s(const Policy *policy) {
    Rig r = {.model = model, .task = &task, .sim = &machine, .plan = plan_for(&q, policy, &err)};
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    const double seconds = r.stats.total_s;
    rig_close(&r);
    return seconds;
}

static void open_played(const char *name, const char *hardware, int count, int s, int n) {
    OptConfig config = opt_named(name);
    config.eos = -1; /* every sequence takes its full length */
    open_case(config, hardware, count, s, n);
}

/* Machines on which batches wait for each other more than is predicted. What is chosen is always the same, first in the
 * list, and as quick as what was predicted to be the best; of some it is quicker by far. */
TEST(a_rehearsal_finds_what_waits_less) {
    const struct {
        const char *model, *hardware;
        int count, s, n;
        double quicker;
    } cases[] = {{"opt-350m", "hardware/t4-fitted.json", 56, 64, 4, 1},
                 {"opt-6.7b", "hardware/rtx3060.json", 100, 32, 16, 1.05},
                 {"opt-1.3b", "hardware/t4-fitted.json", 40, 32, 16, 1.05},
                 {"opt-125m", "hardware/rtx3090.json", 30, 32, 16, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_played(cases[i].model, cases[i].hardware, cases[i].count, cases[i].s, cases[i].n);
        double seconds[2];
        for (int again = 0; again < 2; again++) {
            const int n = policy_search(found, MANY_FOUND, &q, &err);
            const Policy predicted = found[0].policy;
            ASSERT_OK(policy_rehearse(found, n, &q, &err));
            CU_ASSERT(found[0].plays > 0 && found[0].play_s > 0 && found[0].expected > 0);
            seconds[again] = played_s(&found[0].policy);
            CU_ASSERT(seconds[again] * cases[i].quicker <= 1.01 * played_s(&predicted));
            const double made = task.count * cases[i].n / seconds[again];
            CU_ASSERT(fabs(found[0].expected / made - 1) < .03);
        }
        CU_ASSERT(seconds[0] == seconds[1]);
        close_case();
    }
}

/* What the sim finds too slow is not chosen, even if it was predicted to be quick enough. One of four batches of one
 * sequence is on the CPU, and all wait for it: that takes half as long again as predicted. */
TEST(a_latency_holds_in_the_rehearsal) {
    open_played("opt-2.7b", "hardware/t4-fitted.json", 4, 256, 16);
    give_block(1, 4);
    q.given.delegated = true, q.given.share[WG] = 1, q.given.share[2] = .75, q.given.share[3] = .25, q.given.share[4] = 1;
    memset(q.fixed, true, sizeof q.fixed);
    const double predicted = best().latency;
    for (int twice = 0; twice < 2; twice++) {
        q.max_latency = predicted * (twice ? 2 : 1.1);
        CU_ASSERT_EQUAL_FATAL(policy_search(found, 1, &q, &err), 1);
        CU_ASSERT_EQUAL(policy_rehearse(found, 1, &q, &err), twice ? 0 : -1);
        if (!twice) CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "in the rehearsal: raise --max-latency"));
    }
    close_case();
}

/* The part of a task may need more memory than the task, where its longest prompts are among those of the part. It still
 * plays. */
TEST(a_part_of_the_longest_prompts_is_rehearsed) {
    open_played("opt-125m", "hardware/laptop.json", 40, 10, 8);
    for (int i = 0; i < task.count; i += 5) task.prompts[i].s = 500;
    give_block(2, 2);
    for (int of = 0; of < 6; of++) q.fixed[of] = true, q.given.share[of] = of % 2 == 0;
    q.capacity[TIER_GPU] = (Bytes)best().cost.peak[TIER_GPU];
    CU_ASSERT_EQUAL_FATAL(policy_search(found, 1, &q, &err), 1);
    ASSERT_OK(policy_rehearse(found, 1, &q, &err));
    CU_ASSERT(found[0].plays == 1);
    close_case();
}

/* Random tasks on ten shipped machines with other rates: by the sim, no random block, schedule and attention with the best
 * placement for them is much better. scripts/regret.py looks further. */
TEST(no_random_policy_is_much_better_in_the_sim) {
    enum { MACHINES = 10, POLICIES = 10 };
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b"};
    static const char *const machines[] = {"hardware/t4.json", "hardware/rtx3060.json", "hardware/laptop.json",
                                           "hardware/t4-fitted.json"};
    uint64_t seed = 5;
    double sum = 0;
    for (int trial = 0; trial < MACHINES; trial++) {
        open_played(names[test_below(&seed, 4)], machines[trial % 4], (int)test_spread(&seed, 4, 100),
                    32 << test_below(&seed, 4), 4 << test_below(&seed, 3));
        for (int rate = 0; rate < 8; rate += 2) {
            const double times = test_spread(&seed, .3, 3);
            machine.bdw[rate / 2][0] *= times, machine.bdw[rate / 2][1] *= times;
        }
        q.capacity[TIER_GPU] = (Bytes)(q.capacity[TIER_GPU] * test_spread(&seed, .05, 1));
        const int n = policy_search(found, MANY_FOUND, &q, &err);
        ASSERT_OK(policy_rehearse(found, n, &q, &err));
        const double seconds = played_s(&found[0].policy);
        double least = seconds;
        for (int i = 0; i < POLICIES; i++) {
            Policy *p = &q.given;
            q.fixed_gbs = q.fixed_batches = q.fixed_schedule = q.fixed_attention = true;
            p->gbs = (int)test_spread(&seed, 1, task.count + 1), p->num_gpu_batches = (int)test_spread(&seed, 1, 17);
            p->schedule = one_in(&seed, 2) ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG, p->delegated = one_in(&seed, 2);
            if (policy_search(found, 1, &q, &err) == 1) least = fmin(least, played_s(&found[0].policy));
        }
        sum += seconds / least - 1;
        CU_ASSERT(seconds < 1.05 * least);
        close_case();
    }
    CU_ASSERT(sum / MACHINES < .01);
}

// ---- The best -------------------------------------------------------------------------------------------------------

/* Twelve prompts on machines of which one thing or another is scarce, and blocks of many sizes, both schedules, either side
 * of attention and all placements in halves, with the table on the highest tier that leaves room for the rest. The LP does
 * not know that a sequence is not divided, so that a block of two or three may be missed where it just fits: that may cost
 * more, once. */
TEST(no_policy_of_a_grid_is_two_percent_better) {
    enum { HALVES = 6, PLACEMENTS = HALVES * HALVES * HALVES, BLOCKS = 11 };
    static const int block[BLOCKS][2] = {{1, 1}, {2, 1},  {4, 1}, {6, 1}, {12, 1}, {1, 3},
                                         {3, 2}, {1, 12}, {2, 6}, {4, 3}, {6, 2}};
    static const double halves[HALVES][2] = {{1, 0}, {0, 1}, {0, 0}, {.5, .5}, {.5, 0}, {0, .5}};
    uint64_t seed = 11;
    int off = 0;
    for (int trial = 0; trial < 8; trial++) {
        open_case((OptConfig)SMALL_CONFIG(2), "hardware/laptop.json", 12, 40, 12);
        vary_machine(&seed);
        machine.op_s = trial % 2 ? 1e-7 : 0; /* the model is tiny */
        Search s = q;
        double grid = 0;
        for (int where = 0; where < PLACEMENTS * 2 * 2 * BLOCKS; where++) {
            const double *w = halves[where % HALVES], *c = halves[where / HALVES % HALVES],
                         *h = halves[where / HALVES / HALVES % HALVES];
            const int *size = block[where / PLACEMENTS / 4];
            Found f = {.latency = 0};
            s.given = on_tiers(w[0], w[1], c[0], c[1], h[0], h[1], size[0], size[1]);
            s.given.delegated = where / PLACEMENTS % 2;
            s.given.schedule = where / PLACEMENTS / 2 % 2 ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
            while (policy_predict(&f, &s, &err) && s.given.table_home < TIER_DISK) s.given.table_home++;
            grid = fmax(grid, f.cost.throughput);
        }
        const int n = policy_search(found, 1, &q, &err);
        CU_ASSERT(n == 1 || !grid);
        off += n == 1 && found[0].cost.throughput < .98 * grid;
        CU_ASSERT(n < 0 || found[0].cost.throughput >= .8 * grid);
        close_case();
    }
    CU_ASSERT(off <= 1);
}

/* What a machine may have more of, behind its capacities: links, and what the processors do and read. */
enum { FLOPS = NTIERS + CTOD + 1, READING = FLOPS + 3, RESOURCES = READING + 2 };

/* Doubles a resource of the question, or halves it again. A link that is twice as fast takes its share of shared cores for
 * half as long. */
static void scale_resource(int resource, double factor) {
    double *const rate[] = {machine.bdw[CTOG], machine.bdw[GTOC], machine.bdw[DTOC], machine.bdw[CTOD], machine.mm_flops,
                            machine.bmm_flops, machine.cpu_flops, &machine.gpu_bdw,  &machine.cpu_bdw};
    double *one = resource < NTIERS ? NULL : rate[resource - NTIERS];
    if (!one) q.capacity[resource] = (Bytes)((double)q.capacity[resource] * factor);
    for (int phase = 0; one && phase < (resource < READING ? 2 : 1); phase++) one[phase] *= factor;
    if (one && resource < FLOPS) *(one < machine.bdw[DTOC] ? &machine.copy_core_s : &machine.disk_core_s) /= factor;
}

/* Draws a question, and asks it again with twice of each resource. The LP's bound never falls (test_policy.c); what is
 * found by steps and rounded may, by one percent. */
static void ask_with_twice(uint64_t *seed) {
    const unsigned long drawn = *seed;
    open_random(seed);
    if (policy_search(found, 1, &q, &err) == 1) {
        const Found before = found[0];
        for (int resource = 0; resource < RESOURCES; resource++) {
            scale_resource(resource, 2);
            const Found after = best();
            const bool less = worth(&after) < .99 * worth(&before);
            CU_ASSERT(!less);
            if (less) {
                fprintf(stderr, "\nseed %lu, twice resource %d: %g times as much\n", drawn, resource,
                        worth(&after) / worth(&before));
                say_policy(&before.policy);
                say_policy(&after.policy);
            }
            scale_resource(resource, .5);
        }
    }
    close_case();
}

/* A machine that has more can do what it could. In `make test` some forty questions are drawn, or as many as DOUBLINGS
 * says. Of 1,740 questions five find over 1% less with twice of something, up to 17%: these are not among the first. The
 * seeds are of questions whose blocks of a few sequences once were dealt to the tiers as the LP's shares are rounded. */
TEST(twice_a_capacity_or_a_rate_brings_no_less) {
    static const uint64_t once[] = {17616436531678595146u, 6000845067181399913u, 10244899726522201381u,
                                    13970164604368349481u};
    const char *given = getenv("DOUBLINGS");
    const long most = given ? atol(given) : 38;
    uint64_t seed = 13;
    for (int i = 0; i < 4; i++) ask_with_twice(&(uint64_t){once[i]});
    for (long asked = 0; asked < most; asked++) ask_with_twice(&seed);
}

/* A tensor that no longer fits the CPU enlarges the GPU's staging. This once left every candidate without a placement, and
 * the search with its last resort: a tenth of what it had found with less memory. */
TEST(a_correction_that_leaves_no_placement_is_undone) {
    static const double cmem[] = {88e9, 89296533584};
    double throughput[2];
    for (int i = 0; i < 2; i++) {
        open_case(opt_named("opt-175b"), "hardware/laptop.json", 8, 32, 8);
        q.fixed_schedule = true;
        q.given.schedule = SCHEDULE_ZIGZAG;
        q.capacity[TIER_CPU] = (Bytes)cmem[i];
        throughput[i] = best().cost.throughput;
        close_case();
    }
    CU_ASSERT(throughput[1] >= throughput[0]);
}

// ---- Latency against throughput -------------------------------------------------------------------------------------

/* With the latency of one of its points as the limit the search finds that point, or one that is nearly as good: it comes
 * to the limit by steps. Somebody who waits gets a shorter block where that costs little, not much longer than the
 * frontier's shortest one with enough throughput. */
TEST(the_frontier_rises_and_a_limit_on_latency_finds_its_points) {
    static const char *const models[] = {"opt-125m", "opt-1.3b"};
    bool shorter = false;
    for (int way = 0; way < 4; way++) {
        Found all[FRONTIER];
        open_squeeze(models[way / 2], 96, 128, 16);
        q.one_block = way % 2;
        const int n = policy_frontier(all, FRONTIER, &q, &err);
        CU_ASSERT_FATAL(n > 3 && n < FRONTIER);
        const int searched = ask(FRONTIER);
        const Found fastest = found[0], sooner = *policy_sooner(found, searched);
        const double most = fastest.cost.throughput, enough = .95 * most;
        for (const Found *f = all; f < all + n; f++) {
            check_found(f);
            CU_ASSERT(f == all || (f->latency > f[-1].latency && f->cost.throughput > f[-1].cost.throughput));
            CU_ASSERT(f->cost.throughput < enough || sooner.latency <= 1.25 * f->latency);
        }
        CU_ASSERT(all[n - 1].cost.throughput >= most * (1 - 1e-12));
        CU_ASSERT(sooner.cost.throughput >= enough && sooner.latency <= fastest.latency);
        shorter = shorter || sooner.latency < .7 * fastest.latency;
        for (int i = 0; i < searched; i++)
            CU_ASSERT(found[i].latency >= sooner.latency || found[i].cost.throughput < enough);
        for (int i = way; i < n; i += 4) {
            q.max_latency = all[i].latency * (1 + 1e-9);
            const Found limited = best();
            CU_ASSERT(worth(&limited) >= .93 * worth(&all[i]));
        }
        close_case();
    }
    CU_ASSERT(shorter); /* or the test would say nothing of that */
}

TEST(a_latency_that_cannot_be_is_refused_with_the_least) {
    double least = 0;
    open_squeeze("opt-125m", 96, 128, 16);
    q.max_latency = 1e-6;
    CU_ASSERT(!ask(1) && strstr(err.text, "1e-06 s") && strstr(err.text, "--max-latency"));
    const char *takes = strstr(err.text, "takes ");
    CU_ASSERT_FATAL(takes && sscanf(takes, "takes %lf", &least) == 1);
    q.max_latency = least * .99;
    CU_ASSERT(!ask(1));
    q.max_latency = least * 1.01; /* it is said in three digits */
    best();
    CU_ASSERT_EQUAL(policy_frontier(found, 1, &q, &err), 1);
    CU_ASSERT(found[0].latency <= q.max_latency);
    close_case();
}

// ---- By hand --------------------------------------------------------------------------------------------------------

/* Which is zig-zag with one batch, and is considered only where it is given. */
TEST(the_row_schedule_is_no_better_than_the_best) {
    open_squeeze("opt-1.3b", 96, 128, 16);
    const Found any = best();
    q.fixed_schedule = q.fixed_batches = true, q.given.schedule = SCHEDULE_ROW, q.given.num_gpu_batches = 4;
    const Found row = best();
    CU_ASSERT(any.policy.schedule != SCHEDULE_ROW && row.policy.schedule == SCHEDULE_ROW);
    CU_ASSERT(worth(&any) >= worth(&row) * (1 - 1e-12));
    close_case();
}

/* Where the GPU has room for everything, nothing is gained elsewhere; but for a CPU that is fast enough to attend too. */
TEST(a_gpu_with_room_for_all_gets_all) {
    open_case(opt_named("opt-1.3b"), "hardware/h100.json", 64, 128, 32);
    machine.cpu_flops[0] = machine.cpu_flops[1] = machine.cpu_bdw = 1e9;
    const Found f = best();
    const Policy *p = &f.policy;
    CU_ASSERT(p->wg == 1 && p->cg == 1 && p->hg == 1 && p->table_home == TIER_GPU && block_size(p) >= 64);
    CU_ASSERT_STRING_EQUAL(f.cost.slowest[0], "gpu^g");
    CU_ASSERT(!f.cost.full[0][0] && !f.cost.full[1][0] && !f.cost.full[2][0]);
    close_case();
}

/* Of policies that promise nearly the same, the search finds the one with more workspaces. Here the smaller batches gain
 * more than a percent with fewer, the largest less. */
TEST(fewer_workspaces_must_bring_one_percent) {
    static Lp lp;
    int fewer = 0, nearly = 0;
    for (int gbs = 24; gbs <= 48; gbs += 8) {
        open_squeeze("opt-125m", 4 * gbs, 128, 16);
        q.capacity[TIER_GPU] *= 2;
        give_block(gbs, 4);
        const Policy p = best().policy;
        double promised[4] = {0}; /* token/s by the LP with so many workspaces */
        for (int n = 2; n <= 3; n++) {
            LpAnswer answer;
            Policy with = p;
            double tokens, seconds = 0;
            with.workspaces = n;
            policy_lp(&lp, &tokens, &q, &with);
            lp_solve(&answer, &lp);
            CU_ASSERT_EQUAL_FATAL(answer.verdict, LP_OPTIMAL);
            for (int v = LAYER_S; v < RUNTIME_VARS; v++) seconds += lp.c[v] * answer.x[v];
            promised[n] = tokens / seconds;
        }
        const double less = promised[2], more = promised[3];
        CU_ASSERT_EQUAL(p.workspaces, less > 1.01 * more ? 2 : 3);
        fewer += less > 1.01 * more, nearly += less > more && less <= 1.01 * more;
        close_case();
    }
    CU_ASSERT(fewer && nearly); /* or the test would say nothing */
}

/* Short prompts are followed by as many long ones. Of 4,096 every second one is looked at: these are the prompts of the
 * task of half as many, so that the block is the same. */
TEST(a_long_task_is_looked_at_from_its_beginning_to_its_end) {
    enum { LOOKED_AT = 2048 };
    Policy p[2];
    for (int times = 1; times <= 2; times++) {
        open_squeeze("opt-125m", times * LOOKED_AT, 16, 4);
        for (int i = task.count / 2; i < task.count; i++) task.prompts[i].s = 400;
        p[times - 1] = best().policy;
        close_case();
    }
    CU_ASSERT(p[0].gbs == p[1].gbs && p[0].num_gpu_batches == p[1].num_gpu_batches);
}

/* Several flights sweep in turn: each makes its own tokens, and the block that counts is one of each. Its sweeps are as
 * many as its longest output has tokens. 48 prompts are four blocks: each flight has one or more, one after the other. */
TEST(every_flight_has_its_own_tokens_and_block) {
    enum { BLOCK = 12, SHORT = 2, LONG = 8 };
    static Lp lp;
    for (int flights = 1; flights <= 4; flights++) {
        double tokens;
        LpAnswer answer;
        open_squeeze("opt-1.3b", 4 * BLOCK, 200, SHORT);
        for (int i = 5; i < task.count; i += BLOCK) task.prompts[i].n = LONG;
        q.capacity[TIER_GPU] *= 4, q.capacity[TIER_DISK] = q.capacity[TIER_CPU];
        give_block(4, 3);
        q.given.flights = flights, q.one_block = q.fixed_flights = true;
        q.given.cg = .5, q.fixed[2] = q.fixed[3] = true; /* half of all caches on the disk */
        Found f = best();
        policy_lp(&lp, &tokens, &q, &f.policy);
        lp_solve(&answer, &lp);
        CU_ASSERT(fabs(answer.x[CG] - .5) < 1e-9 && fabs(answer.x[CC]) < 1e-9); /* as given */
        CU_ASSERT_EQUAL(tokens, flights * ((BLOCK - 1) * SHORT + LONG));
        CU_ASSERT(near(f.latency, f.cost.T) && near(f.cost.throughput * f.cost.T, tokens));
        q.one_block = false, q.given = f.policy;
        ASSERT_OK(policy_predict(&f, &q, &err));
        CU_ASSERT(near(f.cost.throughput * f.cost.T, 4 * tokens / flights));
        if (flights != 3) CU_ASSERT(near(f.latency * 4 / flights, f.cost.T));
        close_case();
    }
}

/* It is also found where it just fits, though the LP, which knows no whole tensors, may say that it does not, and where it
 * is just quick enough. Where it does not fit, it is refused as it is. */
TEST(a_given_policy_is_found_as_it_is) {
    open_squeeze("opt-1.3b", 24, 64, 8);
    q.given = on_tiers(.123, .456, .1, .8999, .01, .99, 7, 3);
    give_block(7, 3);
    q.given.delegated = true;
    memset(q.fixed, true, sizeof q.fixed);
    CU_ASSERT_EQUAL_FATAL(ask(TEN), 1);
    for (int t = 0; t < NTIERS; t++) q.capacity[t] = (Bytes)found[0].cost.peak[t];
    q.max_latency = found[0].latency;
    CU_ASSERT_EQUAL(ask(TEN), 1);
    q.capacity[TIER_CPU] = 1 << 20;
    CU_ASSERT_EQUAL(ask(TEN), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--cpu-mem"));
    close_case();
}

/* A tenth of a percent of OPT-175B's weights are 350 MB: a plan that is over its tier by less takes another step. With
 * every percent of memory more the one block that is asked for is found, and hardly ever is it slower. */
TEST(a_step_of_the_percentages_does_not_lose_the_best) {
    double before = 0;
    open_case(opt_named("opt-175b"), "hardware/h100.json", 8, 400, 8);
    give_block(8, 1);
    q.fixed[3] = true;
    for (int step = 0; step < 60; step++) {
        q.capacity[TIER_CPU] = (Bytes)(1.2e11 * (1 + .01 * step));
        const double after = best().cost.throughput;
        CU_ASSERT(after >= .98 * before);
        before = after;
    }
    close_case();
}

/* 25 x 6 puts all 150 prompts into one block. The search comes to it because it rounds batches up: rounded down, they would
 * leave some prompts to a second block. */
TEST(a_block_has_room_for_its_share_of_the_task) {
    open_case(opt_named("opt-30b"), "hardware/t4.json", 150, 512, 32);
    CU_ASSERT_EQUAL_FATAL(ask(1), 1);
    CU_ASSERT(found[0].policy.gbs == 25 && found[0].policy.num_gpu_batches == 6);
    close_case();
}

/* What is shown with one digit behind the point can be typed in again: the same tensors and sequences are dealt. */
TEST(shares_that_are_found_have_three_digits) {
    open_squeeze("opt-1.3b", 70, 200, 16);
    CU_ASSERT_EQUAL_FATAL(ask(TEN), TEN);
    for (int i = 0; i < TEN; i++) {
        Policy shown = found[i].policy;
        for (int f = 0; f < 6; f++) shown.share[f] = round(shown.share[f] * 1000) / 1000;
        Plan *as_shown = plan_make(model, &shown, &task, F16, &err);
        Plan *as_found = plan_make(model, &found[i].policy, &task, F16, &err);
        CU_ASSERT(!memcmp(as_shown->achieved, as_found->achieved, sizeof as_shown->achieved));
        CU_ASSERT(!memcmp(as_shown->total, as_found->total, sizeof as_shown->total));
        plan_free(as_shown), plan_free(as_found);
    }
    close_case();
}

/* With so many bytes more of the GPU than it says that it needs beside what it has, there is a policy; a tenth of a MiB is
 * what it leaves out. */
TEST(a_tier_that_is_too_small_is_named_with_the_least_that_would_do) {
    static const char *const flag[] = {"--gpu-mem", "--cpu-mem"};
    for (int t = 0; t < 2; t++) {
        double needs, has;
        open_squeeze("opt-1.3b", 8, 64, 8);
        for (int other = 0; other < NTIERS; other++) q.capacity[other] = other == t ? 100 : (Bytes)1 << 40;
        CU_ASSERT_EQUAL(policy_frontier(found, 1, &q, &err), -1);
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, tier_name[t]) && strstr(err.text, flag[t]));
        CU_ASSERT(!strstr(err.text, "--percent") && !strstr(err.text, "--gpu-batch-size")); /* which nobody has given */
        CU_ASSERT_EQUAL_FATAL(sscanf(strstr(err.text, "needs"), "needs %lf MiB and has %lf MiB", &needs, &has), 2);
        for (int more = -1; more <= 1 && t == TIER_GPU; more += 2) {
            q.capacity[t] = (Bytes)((needs + .1 * more) * 1048576);
            CU_ASSERT_EQUAL(policy_search(found, 1, &q, &err) > 0, more > 0);
        }
        close_case();
    }
}

/* A link is as slow as it is given and no faster than it is, in prefill and in generation; what is not given stays. */
TEST(the_search_is_for_links_as_slow_as_they_are_given) {
    Options o = {.link = {[CTOG] = 3e9, [GTOC] = 3e9, [DTOC] = 3e9}};
    Hardware h = machine_with("ctog_bdw=2e9 gtoc_bdw_p=4e9 gtoc_bdw_g=1e9 dtoc_bdw=5e9 ctod_bdw=6e9");
    Hardware slow = h;
    slow.gtoc_bdw[1] = slow.dtoc_bdw[0] = slow.dtoc_bdw[1] = 3e9;
    const TaskRun run = {.options = &o, .hardware = &h, .sim = true};
    ASSERT_OK(know_machine(&run, &err));
    CU_ASSERT(!memcmp(&h, &slow, sizeof h));
}
