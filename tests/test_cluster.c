/* test_cluster.c: pipelines of machines on paper: the formulas by hand, and what must hold of any cluster. The search for
 * one machine is test_search.c's; simulated stages, case by case, are test_world.c's. */
#include <cjson/cJSON.h>

#include "tests/started.h"
#include "written.h"

static Error err;
static Hardware t4;
static Checkpoint *model;
static Task task;

/* One block of equal prompts on the paper's machine; everything is open. */
static Search open_cluster(const char *name, int n) {
    const OptConfig config = opt_named(name);
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
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

static const Cluster four_nodes = {4, 1.25e9, 1e-4};

static Found ask(Search s, Cluster cluster) {
    Found found;
    s.cluster = cluster;
    ASSERT_OK(cluster_search(&found, &s, true, &err));
    return found;
}

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* token/s when only new tokens are made. */
static double decoding(const Found *f) { return block_size(&f->policy) * flight_count(&f->policy) / f->pace.token_s; }

/* Four machines with 12 of OPT-30B's 48 layers each, and one with all: section 4.4 by hand. Bound by the machines, by the
 * wire, by the delay; the network of one machine does not count. */
TEST(machines_fill_run_and_empty) {
    static const Cluster clusters[] = {{4, 1e12, 0}, {4, 1e6, .5}, {4, 1e12, 100}, {1, 1, 1e6}};
    Search s = open_cluster("opt-30b", 32);
    s.fixed_flights = true;
    for (int i = 0; i < 4; i++) {
        const double M = clusters[i].nodes, l = 48 / M, G = M > 1 ? 5 : 1, delay = M > 1 ? clusters[i].delay_s : 0;
        s.given.flights = (int)G;
        const Found c = ask(s, clusters[i]);
        const double K = c.policy.num_gpu_batches, gbs = c.policy.gbs,
                     x_gen = M > 1 ? 2 * 7168 * gbs / clusters[i].net_bdw : 0, x_pre = 512 * x_gen;
        const double pre = c.cost.T_pre / K, gen = c.cost.T_gen / K, t_pre = l * K * pre,
                     t_gen = l * K * gen; /* a square */
        /* all layers but one, and the first batch's square of the last: then it is on its way */
        const double fill = ((l - 1) * K + 1) * pre + x_pre + delay + (K - 1) * fmax(0, x_pre - pre);
        const double hop = ((l - 1) * K + 1) * gen + x_gen + delay + (K - 1) * fmax(0, x_gen - gen);
        const double token = fmax(fmax(G * t_gen, G * K * x_gen), (M - 1) * hop + t_gen + delay);
        CU_ASSERT_EQUAL(c.policy.flights, G);
        CU_ASSERT(close_to(c.pace.prefill_s, (M - 1) * fill + G * fmax(t_pre, K * x_pre)));
        CU_ASSERT(close_to(c.pace.token_s, token));
        CU_ASSERT(close_to(c.cost.T, c.pace.prefill_s + 31 * token));
        CU_ASSERT(close_to(c.cost.throughput, 32 * fmin(G * gbs * K, task.count) / c.cost.T));
    }
    close_cluster();
}

/* Table 3: decoding scales better than linearly, since the machines' memory adds up; generation does not. */
TEST(decoding_scales_better_than_linearly) {
    static const char *const models[] = {"opt-30b", "opt-175b"};
    for (int m = 0; m < 2; m++) {
        Search s = open_cluster(models[m], 32);
        const Found one = ask(s, (Cluster){.nodes = 1}), four = ask(s, four_nodes);
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
    const Found best = ask(s, four_nodes);
    double most = 0;
    s.fixed_flights = true;
    for (int g = 0; g < 5; g++) {
        s.given.flights = flights[g];
        most = fmax(most, ask(s, four_nodes).cost.throughput);
    }
    CU_ASSERT(best.cost.throughput >= .99 * most); /* as far as steps from the best candidates go */
    s.fixed_flights = false, s.max_latency = best.latency / 2;
    const Found sooner = ask(s, four_nodes);
    CU_ASSERT(close_to(best.latency, best.cost.T));
    CU_ASSERT(sooner.latency <= best.latency / 2 && sooner.cost.throughput > .8 * most);
    close_cluster();
}

/* Flights are looked for as long as each has a prompt of its own. */
TEST(four_prompts_keep_four_machines_busy) {
    Search s = open_cluster("opt-6.7b", 32);
    task.count = 4;
    CU_ASSERT_EQUAL(ask(s, four_nodes).policy.flights, 4);
    task.count = 3;
    CU_ASSERT_EQUAL(ask(s, four_nodes).policy.flights, 1);
    close_cluster();
}

/* Section 6.4: without offloading the GPUs hold everything, or it is refused; how many it takes is the least that does. A
 * layer has 3.6 GB: of all 96 four fit into 15 GiB, and nine into 33 GiB. */
TEST(without_offloading_the_gpus_hold_everything) {
    Search s = open_cluster("opt-175b", 32);
    for (int larger = 0; larger < 2; larger++) {
        Found c = {.policy.wg = 0};
        const Policy *p = &c.policy;
        const int least = cluster_least(&s);
        s.cluster = (Cluster){least, 1.25e9, 1e-4};
        CU_ASSERT_EQUAL(cluster_search(&c, &s, false, &err), 0);
        CU_ASSERT(p->wg == 1 && p->cg == 1 && p->hg == 1 && p->table_home == TIER_GPU);
        s.cluster.nodes--;
        CU_ASSERT(cluster_search(&c, &s, false, &err) == -1 && err.code == EXIT_USAGE);
        CU_ASSERT_EQUAL(least, larger ? 11 : 24);
        s.capacity[TIER_GPU] *= 2.2;
    }
    s.capacity[TIER_GPU] = 1000;
    CU_ASSERT_EQUAL(cluster_least(&s), 0);
    close_cluster();
}

// clang-format off
static const char lines[] = /* flights x block, shares, seconds to prefill and for a token, T, token/s, those of decoding */
    "\n1 machine                            1 x    7 x 9     1.0   2.0   3.0   4.0   5.0   6.0"
    "         1.5          12       160.2          18        5.25"
    "\n4 machines, pipeline                 8 x    7 x 9     1.0   2.0   3.0   4.0   5.0   6.0"
    "         1.5           3        1700          19         168"
    "\n4 machines, without offloading: it does not fit; 23 would hold one sequence\n";
// clang-format on

/* Checks what `policy --nodes 4` prints and writes, with policies that are made up. */
TEST(a_comparison_has_the_figures_of_its_policies) {
    const Options options = {.nodes = 4};
    Found one = {.policy = on_tiers(.01, .02, .03, .04, .05, .06, 7, 9), .pace = {.prefill_s = 1.5, .token_s = 12}},
          four = one;
    size_t len;
    char *text;
    open_cluster("opt-30b", 32);
    one.cost = (Cost){.T = 160.25, .throughput = 18};
    four.policy.flights = 8, four.pace.token_s = 3, four.cost = (Cost){.T = 1700, .throughput = 19};
    const TaskRun run = {.options = &options,
                         .checkpoint = model,
                         .hardware = &t4,
                         .json = cJSON_CreateObject(),
                         .text = open_memstream(&text, &len)};
    report_clusters(&run, (const Found *const[]){&one, &four, NULL}, 23);
    fclose(run.text);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, lines));
    free(text), text = cJSON_PrintUnformatted(run.json);
    CU_ASSERT(shows(text,
                    "\"pipeline\":{ ... \"wg\":0.01, ... \"flights\":8, ... \"prefill_s\":1.5,\"token_s\":3,"
                    "\"T\":1700,\"throughput\":19,\"decode_throughput\":168}"));
    free(text), cJSON_Delete(run.json), close_cluster();
}

/* On the paper's T4 and its prompts (the new tokens are fewer, for the test's sake), the formulas are within a few percent
 * of what the simulated machines take in all, within a tenth for a token, and of the share of the time that each stage
 * waits within a twentieth. First with the policies that are found. In the last cases weights and cache are on the CPU: a
 * block of few tokens is mostly filling and draining, and with one flight, or with the wire slowed, stages wait in every
 * sweep. */
TEST(the_formulas_are_near_what_simulated_machines_take) {
    static const struct {
        const char *model;
        int n, flights; /* flights: of a policy on the CPU; 0: it is found */
        Cluster wire;
    } cases[] = {{"opt-30b", 16, 0, {1, 1.25e9, 1e-4}},  {"opt-175b", 4, 0, {1, 1.25e9, 1e-4}},
                 {"opt-6.7b", 16, 0, {2, 1.25e9, 1e-4}}, {"opt-30b", 16, 0, {4, 1.25e9, 1e-4}},
                 {"opt-175b", 4, 0, {4, 1.25e9, 1e-4}},  {"opt-6.7b", 16, 0, {8, 1.25e9, 1e-4}},
                 {"opt-30b", 4, 1, {2, 1e9, 1e-4}},      {"opt-30b", 2, 2, {2, 1e9, 1e-4}},
                 {"opt-30b", 8, 3, {2, 1e9, 1e-4}},      {"opt-30b", 2, 4, {4, 1e9, 1e-4}},
                 {"opt-30b", 8, 4, {4, 1e7, .005}},      {"opt-30b", 8, 5, {4, 1e9, 1e-4}}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const Cluster *wire = &cases[i].wire;
        const int m = wire->nodes, flights = cases[i].flights;
        Search s = open_cluster(cases[i].model, cases[i].n);
        Found expected;
        Stages stages;
        RunStats was;
        Trace traces[8];
        s.given = on_tiers(0, 1, 0, 1, 0, 1, 16, 2);
        s.given.flights = flights ? flights : m > 1 ? m + 1 : 1, s.fixed_flights = true;
        if (!flights) s.given = ask(s, *wire).policy;
        ASSERT_OK(stages_split(&stages, model, m, NULL, &err));
        do { /* as bench does, with smaller batches where a stage has less room */
            task.count = block_size(&s.given) * flight_count(&s.given);
        } while (stages_plan(&stages, &s.given, &task, F16, s.capacity, &err) && --s.given.gbs);
        s.given.table_home = stages.stage[0].plan->policy.table_home;
        s.checkpoint = &stages.stage[0].part, s.cluster = *wire;
        ASSERT_OK(policy_predict(&expected, &s, &err));
        stages_open(&stages, &t4, wire->net_bdw, wire->delay_s);
        for (int k = 0; k < m; k++) {
            traces[k] = (Trace){.limit = 1000};
            stages.stage[k].device->trace = &traces[k];
        }
        ASSERT_OK(stages_run(&stages, &task, &(Listener){0}, &was, &err));
        const Cost *cost = &expected.cost;
        const double layers = flight_count(&s.given) * s.checkpoint->config.l,
                     waited = 1 - layers * (cost->T_pre + (cases[i].n - 1) * cost->T_gen) / cost->T;
        for (int k = 0; k < m; k++) {
            CU_ASSERT_DOUBLE_EQUAL(1 - trace_breakdown(&traces[k]).busy_s / was.total_s, waited, .05);
            trace_free(&traces[k]);
        }
        CU_ASSERT(fabs(cost->T - was.total_s) < (wire->delay_s > 1e-3 ? .06 : .03) * was.total_s);
        CU_ASSERT(fabs(decoding(&expected) - was.decoded / was.decode_s) < .1 * decoding(&expected));
        stages_close(&stages), close_cluster();
    }
}
