/* test_stages.c: a pipeline of stages, each a thread of this program with a device of its own (section 4.4), gives the bits
 * of one machine: however the layers are split, for all placements, schedules and flights, under delays of the wire. */
#include <pthread.h>

#include "tests.h"

enum { PROMPTS = 11, MOST_STAGES = 5, MOST_TOKENS = 12 };

static const OptConfig models[] = {
    {.name = "pre",
     .l = 5,
     .h1 = 60,
     .h2 = 100,
     .nh = 3,
     .vocab = 131,
     .max_pos = 64,
     .embed = 60,
     .pre_norm = true,
     .final_norm = true,
     .eos = 7},
    {.name = "post", .l = 5, .h1 = 60, .h2 = 100, .nh = 3, .vocab = 131, .max_pos = 64, .embed = 28, .eos = 7}};

static Task task;

/* What a stage has heard. */
typedef struct {
    int32_t tokens[PROMPTS][MOST_TOKENS];
    int n[PROMPTS], scored[PROMPTS];
    float logp[PROMPTS][2 * MOST_TOKENS];
} Heard;

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *why) {
    Heard *h = ctx;
    (void)reason, (void)why;
    memcpy(h->tokens[prompt], tokens, n * sizeof *tokens);
    h->n[prompt] = n;
    return 0;
}

static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Heard *h = ctx;
    h->logp[prompt][h->scored[prompt]++] = at + logp + best;
}

/* Some prompts end by a text, which every stage finds by itself. */
static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    (void)ctx;
    return (prompt + tokens[n - 1]) % 16 == 5;
}

typedef struct {
    pthread_t thread;
    Checkpoint part;
    const Policy *policy;
    Gpu *gpu; /* NULL: the host device */
    Net *net;
    Heard heard;
    int status;
    Error err;
} Machine;

static void *run_stage(void *arg) {
    Machine *s = arg;
    RunStats stats;
    const Listener listener = {.ctx = &s->heard, .done = on_done, .scored = on_scored, .token = on_token};
    Plan *plan = plan_make(&s->part, s->policy, &task, test_act_type(), &s->err);
    Device *device = NULL;
    if (plan)
        device = device_open(s->gpu, plan, &s->part, "/var/tmp", &s->err);
    s->status = device ? weights_load(plan, &s->part, device, &s->err) : -1;
    if (device) device->net = s->net;
    if (!s->status && s->gpu) s->status = opt_warm_up(device, plan, &s->err); /* as every run on a GPU begins */
    if (!s->status) s->status = schedule_run(plan, &task, device, &listener, &stats, &s->err);
    if (s->status && s->net) s->net->fail(s->net, &s->err);
    if (device) device->close(device);
    plan_free(plan);
    if (s->net) s->net->close(s->net); /* which checks that no message is left */
    return NULL;
}

static void make_task(bool scored) {
    uint64_t state = 3;
    static int32_t ids[PROMPTS][64];
    static Prompt prompts[PROMPTS];
    task = (Task){
        .prompts = prompts, .count = PROMPTS, .sampling = {.temperature = .8f, .top_p = .95f, .seed = 9}, .scored = scored};
    for (int i = 0; i < PROMPTS; i++) {
        const int s = 1 + i * 5 % 17, n = 1 + i * 7 % MOST_TOKENS;
        for (int t = 0; t < s + n; t++) ids[i][t] = t ? (int32_t)(65 * (test_random(&state) + 1)) : 2;
        prompts[i] = (Prompt){.ids = ids[i], .s = s, .n = n, .from = 1 + i % s, .place = i};
    }
}

/* Layers of stage p of `stages`, unevenly where that is asked for. */
static int layers_of(int l, int p, int stages, bool uneven) {
    if (uneven) return p + 1 < stages ? 1 : l - stages + 1;
    return l * (p + 1) / stages - l * p / stages;
}

/* A GPU for each stage, where there are GPUs (the emulation has as many as are opened). */
static Gpu *gpu[MOST_STAGES];
static Gpu *gpu_of(int stage) {
    Error err;
    if (!test_gpu) return NULL;
    if (!gpu[stage]) gpu[stage] = stage ? cuda_open_gpu(&err) : test_gpu;
    if (!gpu[stage]) CU_FAIL_FATAL(err.text);
    return gpu[stage];
}

/* Runs all stages; each hears what one machine heard. */
static void assert_same(const Checkpoint *model, const Policy *p, int stages, bool uneven, bool rendezvous, int delay_us,
                        const Heard *alone) {
    Machine stage[MOST_STAGES] = {0};
    Net *net[MOST_STAGES];
    local_net_open(net, stages, rendezvous, delay_us);
    for (int s = 0, first = 0; s < stages; s++) {
        const int layers = layers_of(model->config.l, s, stages, uneven);
        stage[s].part = checkpoint_stage(model, s, stages, first, layers);
        stage[s].policy = p, stage[s].net = net[s], stage[s].gpu = gpu_of(s);
        first += layers;
    }
    for (int s = 0; s < stages; s++) CHECK(!pthread_create(&stage[s].thread, NULL, run_stage, &stage[s]));
    for (int s = 0; s < stages; s++) {
        pthread_join(stage[s].thread, NULL);
        if (stage[s].status) fprintf(stderr, "\n    stage %d of %d: %s\n", s, stages, stage[s].err.text);
        CU_ASSERT_EQUAL(stage[s].status, 0);
        const bool same = !memcmp(&stage[s].heard, alone, sizeof *alone);
        if (!same)
            fprintf(stderr, "\n    stage %d of %d: %g %g %g %g %g %g, %d x %d x %d, %s\n", s, stages, p->wg, p->wc, p->cg,
                    p->cc, p->hg, p->hc, p->gbs, p->num_gpu_batches, p->flights, schedule_name[p->schedule]);
        CU_ASSERT(same);
    }
}

/* One machine, everything on its GPU; a GPU's batches have as many rows as those of the stages, since its products round by
 * that. */
static void run_alone(Heard *heard, const Checkpoint *model, const Policy *same) {
    static Machine one;
    const Policy p = all_gpu(PROMPTS, 1);
    one = (Machine){.part = *model, .policy = test_gpu ? same : &p, .gpu = gpu_of(0)};
    run_stage(&one);
    if (one.status) CU_FAIL_FATAL(one.err.text);
    *heard = one.heard;
}

static void stages_give_the_bits_of_one_machine(void) {
    static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.4, .3}};
    for (int way = 0; way < 48; way++) {
        if (test_gpu && way % (test_every > 96 ? 48 : 11) != 5) continue; /* the emulation takes its time */
        static Heard alone;
        Checkpoint *model = checkpoint_dummy(&models[way / 2 % 2], 5);
        const double *w = share[way % 4], *c = share[way / 4 % 4], *h = share[(way + way / 4) % 4];
        Policy p = all_gpu(1 + way % 4, 1 + way / 3 % 3);
        make_task(way % 5 == 4);
        p.wg = w[0], p.wc = w[1], p.cg = c[0], p.cc = c[1], p.hg = h[0], p.hc = h[1];
        p.schedule = (Schedule)(way % 3), p.flights = 1 + way % 5, p.delegated = way / 2 % 2,
        p.table_home = (Tier)(way % 3);
        p.overlap = way % 7 != 6, p.page_tokens = way % 2 ? 16 : 3;
        run_alone(&alone, model, &p);
        assert_same(model, &p, test_gpu ? 2 : 2 + way % 4, way / 8 % 2, way / 4 % 2, way % 3 == 2 ? 2000 : 0, &alone);
        checkpoint_close(model);
    }
    for (int g = 1; g < MOST_STAGES; g++)
        if (gpu[g]) gpu[g]->close(gpu[g]), gpu[g] = NULL;
}

CU_TestInfo tests[] = {
    {"stages give the bits of one machine", stages_give_the_bits_of_one_machine},
    CU_TEST_INFO_NULL,
};
