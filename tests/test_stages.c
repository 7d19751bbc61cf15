/* test_stages.c: a pipeline of stages, each a thread of this program with a device of its own (section 4.4), gives the bits
 * of one machine: however the layers are split, for all placements, schedules and flights, under delays of the wire. The
 * network itself is test_pipeline.c's, the times of simulated stages are test_world.c's. */
#include <pthread.h>

#include "tests.h"

enum { PROMPTS = 17, MOST_STAGES = 5, WAYS = 96 };

static Task task;

/* Some prompts end by a text, which every stage finds by itself. */
static bool stops(void *ctx, int prompt, const int32_t *tokens, int n) {
    (void)ctx;
    return (prompt + tokens[n - 1]) % 16 == 5;
}

typedef struct {
    pthread_t thread;
    Checkpoint part;
    Rig rig;
    int status;
} Machine;

static void *run_stage(void *arg) {
    Machine *m = arg;
    Rig *r = &m->rig;
    r->model = &m->part, r->task = &task, r->dir = "/var/tmp", r->hears.token = stops;
    m->status = rig_open(r);
    if (!m->status && test_gpu) m->status = gpu_warm_up(r->device, r->plan, &r->err); /* as every run on a GPU begins */
    if (!m->status) m->status = rig_run(r);
    if (m->status && r->net) r->net->fail(r->net, &r->err);
    rig_stop(r);
    if (r->net) r->net->close(r->net); /* which checks that no message is left */
    return NULL;
}

/* The flags of a policy that change which messages are sent, or in which order stages wait for them. */
enum {
    ROW,
    ZIGZAG,
    DIAGONAL,
    NO_OVERLAP,
    SYNCHRONIZE,
    PACKED,
    SPARSE,
    DELEGATED,
    REFILL,
    FLIGHTS_1,
    FLIGHTS_2,
    FLIGHTS_3,
    NFLAGS
};
static const char *const flag_name[NFLAGS] = {"row",    "zigzag",    "diagonal", "no overlap", "synchronize", "packed",
                                              "sparse", "delegated", "refill",   "1 flight",   "2 flights",   "3 flights"};

/* Counts the flags of a policy with several batches, for this number of stages. */
static void count_flags(int met[NFLAGS], const Policy *p) {
    const bool flags[NFLAGS] = {[NO_OVERLAP] = !p->overlap,
                                [SYNCHRONIZE] = p->synchronize,
                                [PACKED] = p->cache_packed,
                                [SPARSE] = is_sparse(p),
                                [DELEGATED] = p->delegated && !is_sparse(p),
                                [REFILL] = p->schedule == SCHEDULE_DIAGONAL && block_size(p) * p->flights < PROMPTS};
    if (p->num_gpu_batches == 1) return;
    for (int flag = 0; flag < NFLAGS; flag++) met[flag] += flags[flag];
    met[ROW + p->schedule]++;
    if (p->flights <= 3) met[FLIGHTS_1 + p->flights - 1]++;
}

/* Returns true if a policy has a flag that has not been counted. */
static bool meets_more(const int met[NFLAGS], const Policy *p) {
    int own[NFLAGS] = {0};
    bool more = false;
    count_flags(own, p);
    for (int flag = 0; flag < NFLAGS; flag++) more |= own[flag] && !met[flag];
    return more;
}

/* The policy of a way, and what else it sets: each is drawn for itself, so that flags meet in many ways. */
static Policy drawn(int way, uint64_t *seed) {
    static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.4, .3}};
    *seed = way + 1;
    const double *w = share[test_below(seed, 4)], *c = share[test_below(seed, 4)], *h = share[test_below(seed, 4)];
    Policy p = on_tiers(w[0], w[1], c[0], c[1], h[0], h[1], 1 + test_below(seed, 3), 1 + test_below(seed, 4));
    p.schedule = test_below(seed, 3), p.flights = 1 + test_below(seed, 4), p.table_home = test_below(seed, 3);
    p.overlap = test_below(seed, 4), p.synchronize = !test_below(seed, 3), p.page_tokens = test_below(seed, 2) ? 16 : 3;
    p.weight_packed = p.cache_packed = !test_below(seed, 3), p.sparsity = test_below(seed, 4) ? 1 : .3;
    p.delegated = test_below(seed, 2) || is_sparse(&p);
    p.head_packed = p.weight_packed && way % 3;
    return p;
}

static Gpu *gpu[MOST_STAGES]; /* of each stage but the first; the emulation has as many as are opened */

static void close_gpus(void) {
    for (int g = 1; g < MOST_STAGES; g++)
        if (gpu[g]) gpu[g]->close(gpu[g]);
    memset(gpu, 0, sizeof gpu);
}

typedef struct {
    int stages, delay_us; /* of messages, at most */
    bool late,            /* the last stage has most layers; otherwise all have as many */
        rendezvous;       /* who sends waits for who receives */
} Pipeline;

/* Asserts that each stage of a pipeline hears what one machine hears. */
static void expect_same(const Checkpoint *model, const Policy *p, const Pipeline *line) {
    /* A GPU's batches have as many rows as those of the stages, since its products round by that. */
    Machine alone = {.part = *model, .rig = {.policy = test_gpu ? *p : all_gpu(task.count, 1)}}, machine[MOST_STAGES] = {0};
    Net *net[MOST_STAGES];
    Policy *one = &alone.rig.policy;
    int first = 0;
    one->sparsity = p->sparsity, one->delegated |= is_sparse(p);
    one->weight_packed = p->weight_packed, one->cache_packed = p->cache_packed, one->head_packed = p->head_packed;
    run_stage(&alone);
    CU_ASSERT_EQUAL_FATAL(alone.status, 0);
    local_net_open(net, line->stages, line->rendezvous, line->delay_us);
    for (int s = 0; s < line->stages; s++) {
        Machine *m = &machine[s];
        Error err;
        if (test_gpu && s && !gpu[s]) gpu[s] = cuda_open_gpu(&err);
        ASSERT_OK(test_gpu && s && !gpu[s]);
        const int end = line->late && s < line->stages - 1 ? s + 1 : model->config.l * (s + 1) / line->stages;
        m->part = checkpoint_stage(model, s, line->stages, first, end - first);
        first = end;
        m->rig = (Rig){.policy = *p, .net = net[s], .gpu = gpu[s]};
        CHECK(!pthread_create(&m->thread, NULL, run_stage, m));
    }
    for (int s = 0; s < line->stages; s++) {
        Rig *r = &machine[s].rig;
        pthread_join(machine[s].thread, NULL);
        const bool same = !machine[s].status && rig_same(r, &alone.rig);
        if (!same) say_policy(p), fprintf(stderr, "stage %d of %d\n", s, line->stages);
        CU_ASSERT(same);
        rig_close(r);
    }
    rig_close(&alone.rig);
}

TEST(stages_give_the_bits_of_one_machine) {
    int length[PROMPTS], n[PROMPTS], met[MOST_STAGES + 1][NFLAGS] = {0};
    for (int i = 0; i < PROMPTS; i++) length[i] = 1 + i * 5 % 17, n[i] = 1 + i * 7 % 12;
    task = random_task(PROMPTS, length, n, 131, 3);
    sample(&task, (Sampling){.temperature = .8f, .top_p = .95f, .seed = 9});
    for (int i = 0; i < PROMPTS; i++) task.prompts[i].from = 1 + i % length[i];
    for (int way = 0; way < WAYS; way++) {
        if (test_gpu && way % (test_every > 96 ? WAYS : 24) != 5) continue; /* the emulation takes its time */
        uint64_t seed;
        Pipeline line = {.stages = test_gpu ? 2 : 2 + way % 4};
        Policy p = drawn(way, &seed);
        const bool post_norm = test_below(&seed, 2);
        line.late = test_below(&seed, 2), line.rendezvous = test_below(&seed, 2);
        line.delay_us = test_below(&seed, 3) ? 0 : 2000;
        OptConfig config = TEST_CONFIG(5, 60, 100, 3, 131, 7);
        if (p.weight_packed) config.h1 = config.embed = 64, config.h2 = 128, config.nh = 4; /* whole groups */
        if (post_norm) config.pre_norm = config.final_norm = false, config.embed = p.head_packed ? 64 : 28;
        task.scored = !test_below(&seed, 5);
        if (!test_gpu && way % test_every && !meets_more(met[line.stages], &p)) continue;
        count_flags(met[line.stages], &p);
        Checkpoint *model = checkpoint_dummy(&config, 5);
        expect_same(model, &p, &line);
        checkpoint_close(model);
    }
    for (int stages = 2; stages <= MOST_STAGES && !test_gpu; stages++) /* no flag was left out */
        for (int flag = 0; flag < NFLAGS; flag++) {
            if (!met[stages][flag]) fprintf(stderr, "\n    %d stages have not met: %s\n", stages, flag_name[flag]);
            CU_ASSERT(met[stages][flag] > 0);
        }
    free_task(&task);
    close_gpus();
}

/* A stage that waited for room in a queue before it has shared the tokens of all batches would wait for ever: its ops wait
 * for states that need these tokens. What may fill a queue are many batches; many pieces in the entrance, where half of the
 * sequences have ended; many moves, where every page is for itself. */
TEST(however_much_a_sweep_posts_a_pipeline_ends) {
    enum { MOST = 400, CASES = 3 };
    static const struct {
        Schedule schedule;
        int count, gbs, num_gpu_batches, n[2], piece_rows;
        double on_gpu; /* share of the cache */
    } cases[CASES] = {{SCHEDULE_ZIGZAG, 100, 1, 100, {2, 3}, 0, 1},
                      {SCHEDULE_DIAGONAL, MOST, 150, 2, {2, 8}, 3, 1},
                      {SCHEDULE_ZIGZAG, 30, 1, 30, {20, 20}, 0, 0}};
    const OptConfig config = TEST_CONFIG(4, 16, 16, 2, 40, -1);
    Checkpoint *model = checkpoint_dummy(&config, 5);
    for (int c = 0; c < CASES && !test_gpu; c++) { /* the emulation would take minutes */
        int s[MOST], n[MOST];
        Policy p = on_tiers(1, 0, cases[c].on_gpu, 1 - cases[c].on_gpu, 1, 0, cases[c].gbs, cases[c].num_gpu_batches);
        for (int i = 0; i < cases[c].count; i++) s[i] = 3, n[i] = cases[c].n[i % 2];
        task = random_task(cases[c].count, s, n, config.vocab, 3);
        p.schedule = cases[c].schedule, p.piece_rows = cases[c].piece_rows, p.page_tokens = 1;
        expect_same(model, &p, &(Pipeline){.stages = 2});
        free_task(&task);
    }
    checkpoint_close(model);
}
