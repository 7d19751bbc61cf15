/* test_cluster.c: pipelines of machines on paper: the formulas by hand, and what must hold of any cluster. The search for
 * one machine is test_search.c's; simulated stages, case by case, are test_world.c's. */
#include "tests.h"

static Error err;
static Hardware t4;
static Checkpoint *model;
static Task task;

/* One block of equal prompts on the paper's machine; everything is open. */
static Search open_cluster(const char *name, int n) {
    const OptConfig config = opt_named(name);
    if (hardware_read(&t4, "hardware/t4.json", &err)) CU_FAIL_FATAL(err.text);
    model = checkpoint_dummy(&config, 0), task = equal_task(2048, 512, n);
    Search s = open_question(&t4, model, &task);
    s.one_block = true;
    return s;
}

static void close_cluster(void) {
    task.count = 2048;
    free_task(&task);
    checkpoint_close(model);
}

static Found ask(Search s, int nodes, double net_bdw, double delay_s) {
    Found found;
    s.cluster = (Cluster){nodes, net_bdw, delay_s};
    if (cluster_search(&found, &s, true, &err)) CU_FAIL_FATAL(err.text);
    return found;
}

/* token/s when only new tokens are made. */
static double decoding(const Found *f) { return block_size(&f->policy) * flight_count(&f->policy) / f->pace.token_s; }

/* A cluster of one is the machine itself. */
TEST(one_machine_takes_what_the_search_says) {
    Search s = open_cluster("opt-30b", 32);
    const Found c = ask(s, 1, 1, 1e6); /* its network does not count */
    const Cost *cost = &c.cost;
    CU_ASSERT_DOUBLE_EQUAL(c.pace.prefill_s, cost->T_pre * 48, 1e-9 * c.pace.prefill_s);
    CU_ASSERT_DOUBLE_EQUAL(c.pace.token_s, cost->T_gen * 48, 1e-9 * c.pace.token_s);
    CU_ASSERT_DOUBLE_EQUAL(cost->T, 48 * (cost->T_pre + 31 * cost->T_gen), 1e-6 * cost->T);
    CU_ASSERT_DOUBLE_EQUAL(cost->throughput, 32 * block_size(&c.policy) / cost->T, 1e-6 * cost->throughput);
    close_cluster();
}

/* Four machines with 12 of OPT-30B's 48 layers each: section 4.4 by hand. Bound by the machines, by the wire, by the delay.
 */
TEST(four_machines_fill_run_and_empty) {
    static const double wires[][2] = {{1e12, 0}, {1e6, .5}, {1e12, 100}};
    Search s = open_cluster("opt-30b", 32);
    s.given.flights = 5, s.fixed_flights = true;
    for (int i = 0; i < 3; i++) {
        const double bdw = wires[i][0], delay = wires[i][1];
        const Found c = ask(s, 4, bdw, delay);
        const double K = c.policy.num_gpu_batches, gbs = c.policy.gbs, x_gen = 2 * 7168 * gbs / bdw, x_pre = 512 * x_gen;
        const double t_pre = c.cost.T_pre * 12, t_gen = c.cost.T_gen * 12;
        const double pre = t_pre / 12 / K, gen = t_gen / 12 / K; /* a square */
        /* 11 layers, and the first batch's square of the last: then it is on its way */
        const double fill = (11 * K + 1) * pre + x_pre + delay + (K - 1) * fmax(0, x_pre - pre);
        const double hop = (11 * K + 1) * gen + x_gen + delay + (K - 1) * fmax(0, x_gen - gen);
        const double token = fmax(fmax(5 * t_gen, 5 * K * x_gen), 3 * hop + t_gen + delay);
        CU_ASSERT_EQUAL(c.policy.flights, 5);
        CU_ASSERT_DOUBLE_EQUAL(c.pace.prefill_s, 3 * fill + 5 * fmax(t_pre, K * x_pre), 1e-9 * c.pace.prefill_s);
        CU_ASSERT_DOUBLE_EQUAL(c.pace.token_s, token, 1e-9 * token);
        CU_ASSERT_DOUBLE_EQUAL(c.cost.T, c.pace.prefill_s + 31 * token, 1e-9 * c.cost.T);
        CU_ASSERT_DOUBLE_EQUAL(c.cost.throughput, 32 * fmin(5 * gbs * K, task.count) / c.cost.T, 1e-9 * c.cost.throughput);
    }
    close_cluster();
}

/* Table 3: decoding scales better than linearly, since the machines' memory adds up; generation does not. */
TEST(decoding_scales_better_than_linearly) {
    static const char *const models[] = {"opt-30b", "opt-175b"};
    for (int m = 0; m < 2; m++) {
        Search s = open_cluster(models[m], 32);
        const Found one = ask(s, 1, 1e9, 1e-4), four = ask(s, 4, 1.25e9, 1e-4);
        CU_ASSERT(decoding(&four) > 4 * decoding(&one));
        if (!m) CU_ASSERT(four.cost.throughput < 4 * one.cost.throughput);
        close_cluster();
    }
}

/* The number of flights is the search's: as good as the best that could be given. A block that must come sooner is smaller.
 */
TEST(the_search_finds_how_many_flights_sweep_in_turn) {
    static const int flights[] = {1, 4, 5, 8, 16};
    Search s = open_cluster("opt-30b", 32);
    const Found best = ask(s, 4, 1.25e9, 1e-4);
    double most = 0;
    s.fixed_flights = true;
    for (int g = 0; g < 5; g++) {
        s.given.flights = flights[g];
        most = fmax(most, ask(s, 4, 1.25e9, 1e-4).cost.throughput);
    }
    CU_ASSERT(best.cost.throughput >= .99 * most); /* as far as steps from the best candidates go */
    s.fixed_flights = false, s.max_latency = best.latency / 2;
    const Found sooner = ask(s, 4, 1.25e9, 1e-4);
    CU_ASSERT_DOUBLE_EQUAL(best.latency, best.cost.T, 1e-9 * best.cost.T);
    CU_ASSERT(sooner.latency <= best.latency / 2 && sooner.cost.throughput > .8 * most);
    close_cluster();
}

/* Flights are looked for as long as each has a prompt of its own. */
TEST(four_prompts_keep_four_machines_busy) {
    Search s = open_cluster("opt-6.7b", 32);
    task.count = 4;
    CU_ASSERT_EQUAL(ask(s, 4, 1.25e9, 1e-4).policy.flights, 4);
    task.count = 3;
    CU_ASSERT_EQUAL(ask(s, 4, 1.25e9, 1e-4).policy.flights, 1);
    close_cluster();
}

TEST(a_worse_network_is_never_better) {
    Search s = open_cluster("opt-30b", 32);
    double before = INFINITY;
    for (double slow = 1; slow < 1e5; slow *= 10) {
        const Found c = ask(s, 12, 1.25e9 / slow, 1e-4 * slow);
        CU_ASSERT(c.cost.throughput <= before * (1 + 1e-9));
        before = c.cost.throughput;
    }
    close_cluster();
}

/* Section 6.4: without offloading the GPUs hold everything, or it is refused; how many it takes is the least that does. */
TEST(without_offloading_the_gpus_hold_everything) {
    Search s = open_cluster("opt-175b", 32);
    int least = cluster_least(&s);
    for (int nodes = least - 1; nodes <= least; nodes++) {
        Found c;
        s.cluster = (Cluster){nodes, 1.25e9, 1e-4};
        int status = cluster_search(&c, &s, false, &err);
        CU_ASSERT_EQUAL(status, nodes < least ? -1 : 0);
        if (status) continue;
        const Policy *p = &c.policy;
        CU_ASSERT(p->wg == 1 && p->cg == 1 && p->hg == 1 && p->table_home == TIER_GPU);
    }
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
    CU_ASSERT(least >= 23 && least <= 30); /* 350 GB in tiers of 15 GiB */
    s.capacity[TIER_GPU] = 1000;
    CU_ASSERT_EQUAL(cluster_least(&s), 0);
    close_cluster();
}

/* The stages' first policy that fits all of them, as bench finds it: the first stage's, with smaller batches where another
 * stage has less room. */
static void choose(Search *part, Stages *stages) {
    Found found;
    if (policy_search(&found, 1, part, &err) < 0) CU_FAIL_FATAL(err.text);
    part->given = found.policy;
    do {
        task.count = block_size(&part->given) * flight_count(&part->given);
    } while (stages_plan(stages, &part->given, &task, F16, part->capacity, &err) && (part->given.gbs -= 1));
    part->given.table_home = stages->stage[0].plan->policy.table_home;
}

/* On the paper's T4 and its prompts (the new tokens are fewer, for the test's sake), the formulas are within a few percent
 * of what the simulated machines take in all, within a tenth for a token, and of the share of the time that each stage
 * waits within a twentieth. In the last cases weights and cache are on the CPU: a block of few tokens is mostly filling and
 * draining, and with one flight, or with the wire slowed, stages wait in every sweep. */
TEST(the_formulas_are_near_what_simulated_machines_take) {
    static const char *const models[] = {"opt-6.7b", "opt-30b", "opt-175b"};
    static const struct {
        int m, flights, n;
        Cluster wire;
    } waiting[] = {{2, 1, 4, {2, 1e9, 1e-4}}, {2, 2, 2, {2, 1e9, 1e-4}}, {2, 3, 8, {2, 1e9, 1e-4}},
                   {4, 4, 2, {4, 1e9, 1e-4}}, {4, 4, 8, {4, 1e7, .005}}, {4, 5, 8, {4, 1e9, 1e-4}}};
    for (int way = 0; way < 18; way++) {
        const bool waits = way >= 12;
        const int m = waits ? waiting[way - 12].m : 1 << way / 3, n = waits ? waiting[way - 12].n : way % 3 == 2 ? 4 : 16;
        Search part = open_cluster(models[waits ? 1 : way % 3], n);
        Found expected;
        Stages stages;
        RunStats was;
        Trace traces[8];
        ASSERT_OK(stages_split(&stages, model, m, NULL, &err));
        part.checkpoint = &stages.stage[0].part, part.cluster = waits ? waiting[way - 12].wire : (Cluster){m, 1.25e9, 1e-4};
        part.given.flights = m > 1 ? m + 1 : 1, part.fixed_flights = true;
        if (waits) {
            part.given = on_tiers(0, 1, 0, 1, 0, 1, 16, 2);
            part.given.flights = waiting[way - 12].flights, task.count = 32 * part.given.flights;
            ASSERT_OK(stages_plan(&stages, &part.given, &task, F16, part.capacity, &err));
        } else
            choose(&part, &stages);
        ASSERT_OK(policy_predict(&expected, &part, &err));
        stages_open(&stages, &t4, part.cluster.net_bdw, part.cluster.delay_s);
        for (int s = 0; s < m; s++) {
            traces[s] = (Trace){.limit = 1000};
            stages.stage[s].device->trace = &traces[s];
        }
        ASSERT_OK(stages_run(&stages, &task, &(Listener){0}, &was, &err));
        const Policy *p = &part.given;
        const double T = expected.cost.T, l = part.checkpoint->config.l,
                     waited = 1 - flight_count(p) * l * (expected.cost.T_pre + (n - 1) * expected.cost.T_gen) / T;
        for (int s = 0; s < m; s++) {
            CU_ASSERT_DOUBLE_EQUAL(1 - trace_breakdown(&traces[s]).busy_s / was.total_s, waited, .05);
            trace_free(&traces[s]);
        }
        CU_ASSERT(fabs(T - was.total_s) < (part.cluster.delay_s > 1e-3 ? .06 : .03) * was.total_s);
        CU_ASSERT(fabs(decoding(&expected) - was.decoded / was.decode_s) < .1 * decoding(&expected));
        stages_close(&stages), close_cluster();
    }
}
