/* test_world.c: sims as the stages of a pipeline, in one time (section 4.4): cases solved by hand, one stage beside the
 * plain sim, and what must not depend on how fast threads are. All times are simulated. */
#include <cjson/cJSON.h>
#include <time.h>

#include "tests.h"

static Error err;
static Hardware fast, t4;
static Checkpoint *model;
static Task task;
static Stages stages;
static Trace traces[8]; /* of the stages */
static const size_t roomy[NTIERS] = {(size_t)1 << 50, (size_t)1 << 50, (size_t)1 << 50};

/* Where only products take time. A row of a layer takes 2 (4 h1^2 + 2 h1 h2) flops, which are a second; so are those of a
 * row of the head, 2 h1 vocab. */
enum { H1 = 60, H2 = 100, VOCAB = 440, FLOPS = 2 * (4 * H1 * H1 + 2 * H1 * H2) };
static OptConfig seconds_config(int l) {
    return (OptConfig){.name = "seconds",
                       .l = l,
                       .h1 = H1,
                       .h2 = H2,
                       .nh = 3,
                       .vocab = VOCAB,
                       .max_pos = 128,
                       .embed = H1,
                       .pre_norm = true,
                       .final_norm = true,
                       .eos = 2};
}

/* A pipeline with a trace on every stage, of so many layers each. */
static void open_uneven(const OptConfig *config, const char *layers, int m, const Policy *policy, const Hardware *hardware,
                        double bytes_s, double delay_s) {
    model = checkpoint_dummy(config, 3);
    ASSERT_OK(stages_split(&stages, model, m, layers, &err));
    ASSERT_OK(stages_plan(&stages, policy, &task, F16, roomy, &err));
    stages_open(&stages, hardware, bytes_s, delay_s);
    for (int s = 0; s < m; s++) {
        traces[s] = stage_trace(s, stages.stage[s].first, stages.stage[s].part.config.l, 0);
        stages.stage[s].device->trace = &traces[s];
    }
}

static void open_stages(const OptConfig *config, int m, const Policy *policy, const Hardware *hardware, double bytes_s,
                        double delay_s) {
    open_uneven(config, NULL, m, policy, hardware, bytes_s, delay_s);
}

static void close_stages(void) {
    const int m = stages.n;
    stages_close(&stages);
    for (int s = 0; s < m; s++) trace_free(&traces[s]);
    checkpoint_close(model);
}

static int run_all(Listener listener, RunStats *stats) { return stages_run(&stages, &task, &listener, stats, &err); }

/* When the slices of a lane end on a stage. */
static void expect_ends(int stage, Lane lane, int n, const double *end) {
    const Trace *trace = stages.stage[stage].device->trace;
    int found = 0;
    for (size_t i = 0; i < trace->n; i++) {
        if (trace->slice[i].lane != lane) continue;
        if (found < n && fabs(trace->slice[i].end - end[found]) > 1e-8 * end[found])
            fprintf(stderr, "\n    stage %d, %s %d: ends at %.12g, expected %.12g\n", stage, lane_name[lane], found,
                    trace->slice[i].end, end[found]);
        CU_ASSERT(found < n && fabs(trace->slice[i].end - end[found]) <= 1e-8 * end[found]);
        found++;
    }
    CU_ASSERT_EQUAL(found, n);
}

static Hardware only_products(void) {
    Hardware h = fast = test_fast_machine();
    for (int p = 0; p < 2; p++) h.mm_flops[p] = FLOPS;
    return h;
}

// clang-format off
/* Two stages of one layer, two flights A and B of one prompt of 2 tokens, 3 new ones; a message takes half a second.
 *
 *     stage 0                     stage 1: a layer, and a second more for the head's row
 *     A prefill  0 ..  2          2.5 ..  5.5     tokens of A are with stage 0 at 6
 *     B prefill  2 ..  4          5.5 ..  8.5     (B is there at 4.5)     of B at 9
 *     A          6 ..  7          8.5 .. 10.5     (A is there at 7.5)             11
 *     B          9 .. 10         10.5 .. 12.5                                     13
 *     A         11 .. 12         12.5 .. 14.5                                     15
 *     B         13 .. 14         14.5 .. 16.5                                     17 */
// clang-format on
static void two_stages_and_two_flights_end_when_they_must(void) {
    static const double sent[] = {2, 4, 7, 10, 12, 14}, received[] = {2.5, 4.5, 7.5, 10.5, 12.5, 14.5},
                        chosen[] = {5.5, 8.5, 10.5, 12.5, 14.5, 16.5};
    const OptConfig config = seconds_config(2);
    const Hardware h = only_products();
    Policy p = all_gpu(1, 1);
    RunStats stats;
    p.flights = 2;
    task = equal_task(2, 2, 3);
    open_stages(&config, 2, &p, &h, 1e30, .5);
    ASSERT_OK(run_all((Listener){0}, &stats));
    expect_ends(0, SEND, 6, sent);
    expect_ends(1, RECEIVE, 6, received);
    expect_ends(1, A_DOWN, 6, chosen);
    CU_ASSERT_DOUBLE_EQUAL(stats.total_s, 17, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(stages.stage[1].stats.total_s, 16.5, 1e-6);
    CU_ASSERT(stats.generated == 6 && stages.stage[1].stats.generated == 6);
    close_stages(), free_task(&task);
}

/* Two stages of four layers, prefill alone, 16 flights of two batches of one row. Stage 1 begins when the first batch is
 * through stage 0's last row, after 3 x 2 + 1 s, and is busy from then on with its layers and the head: 16 x 2 x 5 s. One
 * machine takes 16 x 2 x 9 s. */
static void two_machines_take_about_half_the_time_of_one(void) {
    const OptConfig config = seconds_config(8);
    const Hardware h = only_products();
    double total[2];
    for (int m = 1; m <= 2; m++) {
        Policy p = all_gpu(1, 2);
        RunStats stats;
        p.flights = 16;
        task = equal_task(32, 1, 1);
        open_stages(&config, m, &p, &h, 1e30, 0);
        ASSERT_OK(run_all((Listener){0}, &stats));
        total[m - 1] = stats.total_s;
        close_stages(), free_task(&task);
    }
    CU_ASSERT_DOUBLE_EQUAL(total[0], 16 * 2 * 9, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(total[1], 3 * 2 + 1 + 16 * 2 * 5, 1e-6);
}

/* Only the wire takes time: eight batches of three prompts of five tokens, one message after the other. The head's row
 * begins behind the last of them; then all tokens go the other way, of four bytes each. */
static void a_slow_wire_takes_the_bytes_over_its_rate(void) {
    const OptConfig config = seconds_config(2);
    const Policy p = all_gpu(3, 8);
    const double rate = 1000, delay = .25;
    RunStats stats;
    fast = test_fast_machine();
    task = equal_task(24, 5, 1);
    open_stages(&config, 2, &p, &fast, rate, delay);
    ASSERT_OK(run_all((Listener){0}, &stats));
    const double states = 24 * 5 * 2 * H1, tokens = 24 * 4;
    CU_ASSERT_DOUBLE_EQUAL(stats.total_s, states / rate + delay + tokens / rate + delay, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(stages.stage[0].device->count[SEND].busy_s, states / rate, 1e-6);
    CU_ASSERT_EQUAL(stages.stage[1].device->count[RECEIVE].moved[ACTIVATION], (size_t)states);
    close_stages(), free_task(&task);
}

/* Two stages of five seconds each, of which the second has four layers and the head; a wire that takes 5/4 s for a state,
 * and 1/24 s for a token. With three flights the wire is hidden: once it is filled, the pipeline computes 15 s a round.
 * With two, a round is 5 + 5/4 + 5 + 1/24 s, and the second flight is 5 s behind. A stage that waited for its wire would
 * take 3 x (5 + 5/4) s for three flights. */
static void a_third_flight_hides_the_wire(void) {
    enum { N = 9 };
    const double t = 5, state = 2 * H1, x = t / 4, token = 4 * x / state;
    const OptConfig config = seconds_config(9);
    const Hardware h = only_products();
    for (int flights = 2; flights <= 3; flights++) {
        Policy p = all_gpu(1, 1);
        RunStats stats;
        p.flights = flights;
        task = equal_task(flights, 1, N);
        open_uneven(&config, "5,4", 2, &p, &h, state / x, 0);
        ASSERT_OK(run_all((Listener){0}, &stats));
        const double expected = flights == 2 ? N * (t + x + t + token) + t : t + x + N * 3 * t + token;
        CU_ASSERT_DOUBLE_EQUAL(stats.total_s, expected, 1e-6);
        close_stages(), free_task(&task);
    }
}

static void open_t4(void) {
    if (hardware_read(&t4, "hardware/t4.json", &err)) CU_FAIL_FATAL(err.text);
}

/* By the formulas of search.c: the share of the time that a machine's sweeps of one block in each flight leave. */
static double bubble(const Policy *p, int m, double bytes_s, double delay_s) {
    const Search part = {.hardware = &t4,
                         .checkpoint = &stages.stage[0].part,
                         .task = &task,
                         .cluster = {m, bytes_s, delay_s},
                         .one_block = true,
                         .act_type = F16,
                         .given = *p,
                         .fixed = {true, true, true, true, true, true},
                         .fixed_flights = true,
                         .fixed_gbs = true,
                         .fixed_batches = true,
                         .fixed_schedule = true,
                         .capacity = {roomy[0], roomy[1], roomy[2]}};
    Found c;
    ASSERT_OK(policy_predict(&c, &part, &err));
    const double l = part.checkpoint->config.l, n = task.prompts[0].n;
    return 1 - p->flights * l * (c.cost.T_pre + (n - 1) * c.cost.T_gen) / c.cost.T;
}

/* OPT-30B, weights and cache on the CPU. A block of few tokens is mostly filling and draining; with a flight, or with the
 * wire slowed, stages wait in every sweep. */
static void stages_wait_as_long_as_the_formula_says(void) {
    static const struct {
        int m, flights, n;
        double bytes_s, delay_s;
    } cases[] = {{2, 1, 4, 1e9, 1e-4}, {2, 2, 2, 1e9, 1e-4}, {2, 3, 8, 1e9, 1e-4},
                 {4, 4, 2, 1e9, 1e-4}, {4, 4, 8, 1e7, .005}, {4, 5, 8, 1e9, 1e-4}};
    OptConfig config;
    open_t4();
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-30b"), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int m = cases[i].m;
        Policy p = all_gpu(16, 2);
        RunStats stats;
        p.wg = p.cg = p.hg = 0, p.wc = p.cc = p.hc = 1, p.flights = cases[i].flights;
        task = equal_task(16 * 2 * p.flights, 256, cases[i].n);
        open_stages(&config, m, &p, &t4, cases[i].bytes_s, cases[i].delay_s);
        ASSERT_OK(run_all((Listener){0}, &stats));
        const double expected = bubble(&p, m, cases[i].bytes_s, cases[i].delay_s);
        for (int s = 0; s < m; s++) {
            const double waits = 1 - trace_breakdown(stages.stage[s].device->trace).busy_s / stats.total_s;
            CU_ASSERT_DOUBLE_EQUAL(waits, expected, .05); /* of the time */
        }
        close_stages(), free_task(&task);
    }
}

static Policy mixed(int way) {
    return (Policy){.wg = .4,
                    .wc = .3,
                    .cg = .34,
                    .cc = .33,
                    .hg = way % 2 ? 1 : .34,
                    .hc = way % 2 ? 0 : .33,
                    .gbs = 3,
                    .num_gpu_batches = 2,
                    .flights = 1 + way,
                    .schedule = (Schedule)(way % 3),
                    .overlap = way != 3,
                    .delegated = way / 2 % 2,
                    .page_tokens = 16};
}

static void one_stage_is_the_plain_sim_bit_for_bit(void) {
    const OptConfig config = seconds_config(7);
    open_t4();
    for (int way = 0; way < 6; way++) {
        const Policy p = mixed(way);
        RunStats stats, plain;
        task = equal_task(20, 9, 5);
        open_stages(&config, 1, &p, &t4, 1, 1);
        ASSERT_OK(run_all((Listener){0}, &stats));
        Device *sim = sim_open(stages.stage[0].plan, &t4);
        ASSERT_OK(schedule_run(stages.stage[0].plan, &task, sim, &(Listener){0}, &plain, &err));
        CU_ASSERT(!memcmp(&stats, &plain, sizeof stats));
        CU_ASSERT(!memcmp(sim->count, stages.stage[0].device->count, sizeof sim->count));
        sim->close(sim);
        close_stages(), free_task(&task);
    }
}

/* All that three stages have done, as a number. */
static uint64_t digest(void) {
    uint64_t hash = HASH_START;
    for (int s = 0; s < stages.n; s++) {
        const Device *d = stages.stage[s].device;
        hash = hash_bytes(hash, d->count, sizeof d->count);
        hash = hash_bytes(hash, &stages.stage[s].stats, sizeof(RunStats));
        for (size_t i = 0; i < d->trace->n; i++) hash = hash_bytes(hash, &d->trace->slice[i].end, sizeof(double));
    }
    return hash;
}

/* A stage's thread that sleeps for as long as chance has it: up to a tenth of a millisecond. */
static int dawdle(void *ctx, const RunStats *stats, Error *e) {
    (void)stats, (void)e;
    nanosleep(&(struct timespec){.tv_nsec = (long)(1e5 * fabs(test_random(ctx)))}, NULL);
    return 0;
}

static void results_do_not_depend_on_the_speed_of_threads(void) {
    const OptConfig config = seconds_config(7);
    uint64_t chance = 1;
    open_t4();
    for (int way = 0; way < 6; way++) {
        const Policy p = mixed(way);
        uint64_t first = 0;
        for (int time = 0; time < 5; time++) {
            RunStats stats;
            task = equal_task(20, 9, 5);
            open_stages(&config, 3, &p, &t4, 1e8, 1e-5);
            ASSERT_OK(run_all((Listener){.ctx = &chance, .sweep = time ? dawdle : NULL}, &stats));
            if (!time) first = digest();
            CU_ASSERT_EQUAL(digest(), first);
            close_stages(), free_task(&task);
        }
    }
}

/* Of eight layers on one to four machines: as many tokens, bytes and products as one machine has. */
static void stages_do_the_work_of_one_machine(void) {
    const OptConfig config = seconds_config(8);
    const Hardware h = only_products();
    double work[4] = {0};
    for (int m = 1; m <= 4; m++) {
        Policy p = mixed(3);
        RunStats stats;
        task = equal_task(20, 9, 5);
        open_stages(&config, m, &p, &h, 1e6, .01);
        ASSERT_OK(run_all((Listener){0}, &stats));
        CU_ASSERT_EQUAL(stats.generated, 20 * 5);
        for (int s = 0; s < m; s++)
            for (int lane = PROJECT; lane <= FINISH; lane++) work[m - 1] += stages.stage[s].device->count[lane].busy_s;
        CU_ASSERT_DOUBLE_EQUAL(work[m - 1], work[0], 1e-6 * work[0]);
        close_stages(), free_task(&task);
    }
}

static int refuse(void *ctx, const RunStats *stats, Error *e) {
    (void)ctx;
    return stats->sweeps < 3 ? 0 : fail(e, EXIT_FAILED, "enough");
}

static void a_stage_that_fails_ends_all(void) {
    const OptConfig config = seconds_config(8);
    const Policy p = mixed(1);
    RunStats stats;
    open_t4();
    task = equal_task(20, 9, 5);
    open_stages(&config, 4, &p, &t4, 1e8, 1e-5);
    CU_ASSERT_EQUAL(run_all((Listener){.sweep = refuse}, &stats), -1);
    CU_ASSERT_STRING_EQUAL(err.text, "enough");
    for (int s = 1; s < 4; s++) CU_ASSERT_STRING_EQUAL(stages.stage[s].err.text, "stage 0: enough");
    close_stages(), free_task(&task);
}

static void what_does_not_fit_names_the_stage(void) {
    const OptConfig config = seconds_config(4);
    const Policy p = all_gpu(1, 1);
    size_t capacity[NTIERS];
    task = equal_task(1, 2, 3);
    model = checkpoint_dummy(&config, 3);
    ASSERT_OK(stages_split(&stages, model, 2, "1,3", &err));
    ASSERT_OK(stages_plan(&stages, &p, &task, F16, roomy, &err));
    memcpy(capacity, stages.stage[0].plan->total, sizeof capacity); /* the second has more layers */
    capacity[TIER_CPU] = roomy[0];
    CU_ASSERT_EQUAL(stages_plan(&stages, &p, &task, F16, capacity, &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && !strncmp(err.text, "stage 1: the GPU tier needs", 27));
    stages_close(&stages), free_task(&task);
    checkpoint_close(model);
}

/* What a list of layers gives to stage p of m, from *first on; -1: it is refused. */
static int layers_of(int *first, int p, int m, int l, const char *list) {
    const OptConfig config = seconds_config(l);
    Checkpoint part, *whole = checkpoint_dummy(&config, 3);
    const int status = stage_part(&part, first, whole, &(Net){.stage = p, .stages = m}, list, &err);
    checkpoint_close(whole);
    return status ? -1 : part.config.l;
}

/* One behind the other, each at least one, and where no list says otherwise their numbers differ by one at most. */
static void every_layer_is_of_one_stage(void) {
    for (int l = 1; l <= 20; l++)
        for (int m = 1; m <= l; m++)
            for (int p = 0, end = 0, first; p < m; p++) {
                const int layers = layers_of(&first, p, m, l, NULL);
                CU_ASSERT(first == end && (layers == l / m || layers == (l + m - 1) / m));
                end = first + layers;
                CU_ASSERT(p + 1 < m || end == l);
            }
    int first;
    static const int firsts[] = {0, 3, 4, 8}, layers[] = {3, 1, 4, 2};
    for (int p = 0; p < 4; p++) CU_ASSERT(layers_of(&first, p, 4, 10, "3,1,4,2") == layers[p] && first == firsts[p]);
}

static void a_list_of_layers_is_of_all_stages_and_all_layers(void) {
    static const struct {
        const char *list;
        int m, l;
    } wrong[] = {{"3,1,4,2", 4, 11}, {"3,1,4,2", 4, 9}, {"3,1,4,2", 3, 10}, {"3,1,6", 4, 10}, {"3,0,7", 3, 10},
                 {"3,-1,8", 3, 10},  {"3,x,7", 3, 10},  {"", 3, 10},        {"3,7,", 3, 10},  {NULL, 3, 2}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int first;
        CU_ASSERT_EQUAL(layers_of(&first, 0, wrong[i].m, wrong[i].l, wrong[i].list), -1);
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "stages"));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The file
// ---------------------------------------------------------------------------------------------------------------

static double number(const cJSON *object, const char *key) {
    return cJSON_GetNumberValue(cJSON_GetObjectItemCaseSensitive(object, key));
}

/* In microseconds; where does the slice of stage `pid`, lane and batch in sweep i end? NAN: there is none. */
static double ends_at(const cJSON *events, int pid, Lane lane, double i, double k) {
    const cJSON *e;
    cJSON_ArrayForEach(e, events) {
        const cJSON *args = cJSON_GetObjectItemCaseSensitive(e, "args");
        if (number(e, "pid") == pid && number(e, "tid") == lane && number(args, "i") == i && number(args, "k") == k)
            return number(e, "ts") + number(e, "dur");
    }
    return NAN;
}

static void check_slices(const cJSON *events, int m) {
    int slices[8] = {0}, sent = 0;
    const cJSON *e;
    cJSON_ArrayForEach(e, events) {
        const int pid = (int)number(e, "pid");
        if (!cJSON_HasObjectItem(e, "dur")) continue;
        CU_ASSERT_FATAL(pid >= 1 && pid <= m);
        slices[pid]++;
        if (number(e, "tid") != SEND || pid == m) continue;
        const cJSON *args = cJSON_GetObjectItemCaseSensitive(e, "args");
        CU_ASSERT(number(e, "ts") + number(e, "dur") <
                  ends_at(events, pid + 1, RECEIVE, number(args, "i"), number(args, "k")));
        sent++;
    }
    for (int s = 0; s < m; s++) CU_ASSERT_EQUAL(slices[s + 1], stages.stage[s].device->trace->n);
    CU_ASSERT(sent > 0);
}

static void the_file_has_all_stages_and_what_is_sent_arrives_later(void) {
    enum { M = 3 };
    static const char *const name[M] = {"stage 0: layers 0 to 1", "stage 1: layers 2 to 3", "stage 2: layers 4 to 6"};
    const OptConfig config = seconds_config(7);
    const Policy p = mixed(1);
    Trace all[M];
    RunStats stats;
    char *text = NULL;
    size_t len = 0;
    int names = 0;
    open_t4();
    task = equal_task(20, 9, 5);
    open_stages(&config, M, &p, &t4, 1e8, 1e-5);
    ASSERT_OK(run_all((Listener){0}, &stats));
    for (int s = 0; s < M; s++) all[s] = *stages.stage[s].device->trace;
    FILE *out = open_memstream(&text, &len);
    CHECK(out);
    trace_write(all, M, out);
    CHECK(fclose(out) == 0);
    cJSON *tree = json_parse(text, len, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
    const cJSON *events = cJSON_GetObjectItemCaseSensitive(tree, "traceEvents"), *e;
    cJSON_ArrayForEach(e, events) {
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, "name")), "process_name")) continue;
        const cJSON *args = cJSON_GetObjectItemCaseSensitive(e, "args");
        CU_ASSERT_FATAL(names < M && number(e, "pid") == names + 1);
        CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(args, "name")), name[names]);
        names++;
    }
    CU_ASSERT_EQUAL(names, M);
    check_slices(events, M);
    cJSON_Delete(tree), free(text);
    close_stages(), free_task(&task);
}

CU_TestInfo tests[] = {
    {"two stages and two flights end when they must", two_stages_and_two_flights_end_when_they_must},
    {"two machines take about half the time of one", two_machines_take_about_half_the_time_of_one},
    {"a slow wire takes the bytes over its rate", a_slow_wire_takes_the_bytes_over_its_rate},
    {"a third flight hides the wire", a_third_flight_hides_the_wire},
    {"stages wait as long as the formula says", stages_wait_as_long_as_the_formula_says},
    {"one stage is the plain sim bit for bit", one_stage_is_the_plain_sim_bit_for_bit},
    {"results do not depend on the speed of threads", results_do_not_depend_on_the_speed_of_threads},
    {"stages do the work of one machine", stages_do_the_work_of_one_machine},
    {"a stage that fails ends all", a_stage_that_fails_ends_all},
    {"what does not fit names the stage", what_does_not_fit_names_the_stage},
    {"every layer is of one stage", every_layer_is_of_one_stage},
    {"a list of layers is of all stages and all layers", a_list_of_layers_is_of_all_stages_and_all_layers},
    {"the file has all stages, and what is sent arrives later", the_file_has_all_stages_and_what_is_sent_arrives_later},
    CU_TEST_INFO_NULL,
};
