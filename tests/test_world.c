/* test_world.c: sims as the stages of a pipeline, in one time (section 4.4): cases solved by hand, one stage beside the
 * plain sim, and what must not depend on how fast threads are. All times are simulated. What stages compute is
 * test_stages.c's, the formulas of a pipeline are test_cluster.c's. */
#include <time.h>

#include "tests.h"
#include "written.h"

static Error err;
static Checkpoint *model;
static Task task;
static Stages stages;
static RunStats stats;
static Trace traces[8]; /* of the stages */
static const size_t roomy[NTIERS] = {(size_t)1 << 50, (size_t)1 << 50, (size_t)1 << 50};

/* Where only products take time. A row of a layer takes 2 (4 h1^2 + 2 h1 h2) flops, which are a second; so are those of a
 * row of the head, 2 h1 vocab. */
enum { H1 = 64, H2 = 128, VOCAB = 512, FLOPS = 2 * (4 * H1 * H1 + 2 * H1 * H2) };
static Checkpoint *model_of(int l) { return checkpoint_dummy(&(OptConfig)TEST_CONFIG(l, H1, H2, 4, VOCAB, 2), 3); }

/* A pipeline of l layers and its task, with a trace on every stage; layers: of each, or NULL. */
static void open_stages(int l, int m, const char *layers, const Policy *policy, Task whole, const Hardware *hardware,
                        double bytes_s, double delay_s) {
    model = model_of(l), task = whole;
    ASSERT_OK(stages_split(&stages, model, m, layers, &err));
    ASSERT_OK(stages_plan(&stages, policy, &task, F16, roomy, &err));
    stages_open(&stages, hardware, bytes_s, delay_s);
    for (int s = 0; s < m; s++) {
        traces[s] = (Trace){0};
        stages.stage[s].device->trace = &traces[s];
    }
}

static void close_stages(void) {
    stages_close(&stages);
    for (int s = 0; s < stages.n; s++) trace_free(&traces[s]);
    free_task(&task);
    checkpoint_close(model);
}

static int run_all(Listener listener) { return stages_run(&stages, &task, &listener, &stats, &err); }

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
enum { SLICES = 6 };
static const struct {
    int stage;
    Lane lane;
    double end[SLICES];
} slices[] = {{0, SEND, {2, 4, 7, 10, 12, 14}},
              {1, RECEIVE, {2.5, 4.5, 7.5, 10.5, 12.5, 14.5}},
              {1, A_DOWN, {5.5, 8.5, 10.5, 12.5, 14.5, 16.5}}};
/* A wire that takes X s for a state, STATE bytes, and TOKEN_S for a token. */
#define STATE (2 * H1)
#define X 1.25
#define TOKEN_S (4 * X / STATE)
typedef struct {
    const char *layers;
    int l, m, gbs, num_gpu_batches, flights, count, s, n;
    double bytes_s, delay_s, total;
} Pipeline;
static const Pipeline by_hand[] = {
    {NULL, 2, 2, 1, 1, 2, 2, 2, 3, 1e30, .5, 17}, /* as above */
    /* One machine, then two stages of four layers: prefill alone, 16 flights of two batches of one row. Stage 1 begins when
     * the first batch is through stage 0's last row, after 3 x 2 + 1 s, and is busy from then on with its layers and the
     * head: 16 x 2 x 5 s. */
    {NULL, 8, 1, 1, 2, 16, 32, 1, 1, 1e30, 0, 16 * 2 * 9},
    {NULL, 8, 2, 1, 2, 16, 32, 1, 1, 1e30, 0, 3 * 2 + 1 + 16 * 2 * 5},
    /* Two stages of five seconds each, of which the second has four layers and the head. With three flights the wire is
     * hidden: once it is filled, the pipeline computes 15 s a round. With two, a round is 5 + X + 5 + TOKEN_S, and the second
     * flight is 5 s behind. A stage that waited for its wire would take 3 x (5 + X) s for three flights. */
    {"5,4", 9, 2, 1, 1, 2, 2, 1, 9, STATE / X, 0, 9 * (5 + X + 5 + TOKEN_S) + 5},
    {"5,4", 9, 2, 1, 1, 3, 3, 1, 9, STATE / X, 0, 5 + X + 9 * 3 * 5 + TOKEN_S},
    /* A slow wire: eight batches of three prompts of five tokens, 15 s each, one message after the other. The layer of the
     * last one and the head's rows of all are behind it. Tokens, of four bytes, go back meanwhile, but for the last three. */
    {NULL, 2, 2, 3, 8, 1, 24, 5, 1, 10, .25, 15 + 24 * 5 * STATE / 10 + .25 + 15 + 24 + 3 * .4 + .25},
};
// clang-format on

TEST(pipelines_take_the_time_that_they_must) {
    Hardware h = machine_with("");
    h.mm_flops[0] = h.mm_flops[1] = FLOPS;
    for (const Pipeline *c = by_hand; c < by_hand + COUNT(by_hand); c++) {
        const int states = c->m > 1 ? c->count * (c->s + c->n - 1) * STATE : 0; /* bytes that go to stage 1 */
        Policy p = all_gpu(c->gbs, c->num_gpu_batches);
        p.flights = c->flights;
        open_stages(c->l, c->m, c->layers, &p, equal_task(c->count, c->s, c->n), &h, c->bytes_s, c->delay_s);
        ASSERT_OK(run_all((Listener){0}));
        CU_ASSERT_DOUBLE_EQUAL(stats.total_s, c->total, 1e-6);
        CU_ASSERT_EQUAL(stats.generated, c->count * c->n);
        CU_ASSERT_DOUBLE_EQUAL(stages.stage[0].device->count[SEND].busy_s, states / c->bytes_s, 1e-6);
        CU_ASSERT_EQUAL(stages.stage[c->m - 1].device->count[RECEIVE].moved[ACTIVATION], (Bytes)states);
        if (c == by_hand) {
            for (size_t i = 0; i < COUNT(slices); i++) {
                const Trace *trace = &traces[slices[i].stage];
                const double *end = slices[i].end;
                for (const Slice *s = trace->slice; s < trace->slice + trace->n; s++) {
                    if (s->lane != slices[i].lane) continue;
                    CU_ASSERT_FATAL(end < slices[i].end + SLICES);
                    CU_ASSERT_DOUBLE_EQUAL(s->end, *end, 1e-8 * *end);
                    end++;
                }
                CU_ASSERT_PTR_EQUAL(end, slices[i].end + SLICES);
            }
            CU_ASSERT_DOUBLE_EQUAL(stages.stage[1].stats.total_s, 16.5, 1e-6);
            CU_ASSERT_EQUAL(stages.stage[1].stats.generated, 6);
        }
        close_stages();
    }
}

/* A pipeline on the t4. */
static Hardware machine;
static void open_on_t4(int m, const Policy *p) {
    ASSERT_OK(hardware_read(&machine, "hardware/t4.json", &err));
    open_stages(7, m, NULL, p, equal_task(20, 9, 5), &machine, 1e8, 1e-5);
}

/* One with a bit of everything everywhere. */
static void open_mixed(int m, int way) {
    Policy p = on_tiers(.4, .3, .34, .33, way % 2 ? 1 : .34, way % 2 ? 0 : .33, 3, 2);
    p.flights = 1 + way, p.schedule = way % 3, p.overlap = way != 3, p.delegated = way / 2 % 2;
    open_on_t4(m, &p);
}

TEST(one_stage_is_the_plain_sim_bit_for_bit) {
    for (int way = 0; way < 6; way++) {
        open_mixed(1, way);
        ASSERT_OK(run_all((Listener){0}));
        Rig plain = {.model = model, .policy = stages.stage[0].plan->policy, .task = &task, .sim = &machine};
        CU_ASSERT_EQUAL(rig_run(&plain), 0);
        CU_ASSERT(!memcmp(&stats, &plain.stats, sizeof stats));
        CU_ASSERT(!memcmp(plain.device->count, stages.stage[0].device->count, sizeof plain.device->count));
        rig_close(&plain);
        close_stages();
    }
}

/* Sims that wait for each other in a circle abort. Each combination of flags may have a circle of its own. There are more
 * prompts than seats, so that on the diagonal seats refill. */
TEST(every_policy_ends_with_every_number_of_stages) {
    static const struct {
        bool delegated, packed;
        double sparsity;
    } numbers[] = {{false, false, 1}, {true, false, 1}, {true, false, .3}, {false, true, 1}, {true, true, .3}};
    static const struct { bool overlap, synchronize; } waits[] = {{true, false}, {true, true}, {false, false}};
    int turn = 0;
    for (int m = 2; m <= 5; m++)
        for (int flights = 1; flights <= 3; flights++)
            for (int schedule = 0; schedule < 3; schedule++)
                for (size_t n = 0; n < COUNT(numbers); n++)
                    for (size_t w = 0; w < COUNT(waits); w++) {
                        if (turn++ % test_every) continue;
                        Policy p = on_tiers(.4, .3, .34, .33, .34, .33, 2, 3);
                        p.flights = flights, p.schedule = schedule;
                        p.delegated = numbers[n].delegated, p.sparsity = numbers[n].sparsity;
                        p.weight_packed = p.cache_packed = numbers[n].packed;
                        p.overlap = waits[w].overlap, p.synchronize = waits[w].synchronize;
                        open_on_t4(m, &p);
                        ASSERT_OK(run_all((Listener){0}));
                        CU_ASSERT(stats.generated == 20 * 5 && stages.stage[0].stats.generated == 20 * 5);
                        close_stages();
                    }
}

/* A stage's thread that sleeps for as long as chance has it: up to a tenth of a millisecond. */
static int dawdle(void *ctx, const RunStats *so_far, Error *e) {
    (void)so_far, (void)e;
    nanosleep(&(struct timespec){.tv_nsec = (long)(1e5 * fabs(test_random(ctx)))}, NULL);
    return 0;
}

/* All that three stages have done is compared as one number. */
TEST(results_do_not_depend_on_the_speed_of_threads) {
    uint64_t chance = 1;
    for (int way = 0; way < 6; way++) {
        uint64_t first = 0;
        for (int time = 0; time < 5; time++) {
            uint64_t hash = HASH_START;
            open_mixed(3, way);
            ASSERT_OK(run_all((Listener){.ctx = &chance, .sweep = time ? dawdle : NULL}));
            for (int s = 0; s < 3; s++) {
                hash = hash_bytes(hash, stages.stage[s].device->count, sizeof stages.stage[s].device->count);
                hash = hash_bytes(hash, &stages.stage[s].stats, sizeof(RunStats));
                for (size_t i = 0; i < traces[s].n; i++) hash = hash_bytes(hash, &traces[s].slice[i].end, sizeof(double));
            }
            if (!time) first = hash;
            CU_ASSERT_EQUAL(hash, first);
            close_stages();
        }
    }
}

static int refuse(void *ctx, const RunStats *so_far, Error *e) {
    (void)ctx;
    return so_far->sweeps < 3 ? 0 : fail(e, EXIT_FAILED, "enough");
}

TEST(a_stage_that_fails_ends_all) {
    open_mixed(4, 1);
    CU_ASSERT_EQUAL(run_all((Listener){.sweep = refuse}), -1);
    CU_ASSERT_STRING_EQUAL(err.text, "enough");
    for (int s = 1; s < 4; s++) CU_ASSERT_STRING_EQUAL(stages.stage[s].err.text, "stage 0: enough");
    close_stages();
}

TEST(what_does_not_fit_names_the_stage) {
    const Policy p = all_gpu(1, 1);
    size_t capacity[NTIERS];
    task = equal_task(1, 2, 3), model = model_of(4);
    ASSERT_OK(stages_split(&stages, model, 2, "1,3", &err));
    ASSERT_OK(stages_plan(&stages, &p, &task, F16, roomy, &err));
    memcpy(capacity, stages.stage[0].plan->total, sizeof capacity); /* the second has more layers */
    capacity[TIER_CPU] = roomy[0];
    CU_ASSERT_EQUAL(stages_plan(&stages, &p, &task, F16, capacity, &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && !strncmp(err.text, "stage 1: the GPU tier needs", 27));
    close_stages();
}

/* What a list of layers gives to stage p of m, from *first on; -1: it is refused. */
static int layers_of(int *first, int p, int m, int l, const char *list) {
    Checkpoint part, *whole = model_of(l);
    const int status = stage_part(&part, first, whole, &(Net){.stage = p, .stages = m}, list, &err);
    checkpoint_close(whole);
    return status ? -1 : part.config.l;
}

/* One behind the other, each at least one, and where no list says otherwise their numbers differ by one at most. */
TEST(every_layer_is_of_one_stage) {
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

TEST(a_list_of_layers_is_of_all_stages_and_all_layers) {
    static const struct {
        const char *list;
        int m, l;
    } wrong[] = {{"3,1,4,2", 4, 11}, {"3,1,4,2", 4, 9}, {"3,1,4,2", 3, 10}, {"3,1,6", 4, 10}, {"3,0,7", 3, 10},
                 {"3,-1,8", 3, 10},  {"3,x,7", 3, 10},  {"", 3, 10},        {"3,7,", 3, 10},  {NULL, 3, 2}};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        int first;
        CU_ASSERT_EQUAL(layers_of(&first, 0, wrong[i].m, wrong[i].l, wrong[i].list), -1);
        CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, wrong[i].list ? "--stages: " : "of 3 stages: "));
    }
}
