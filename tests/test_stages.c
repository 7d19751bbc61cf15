/* test_stages.c: a pipeline of stages, each a thread of this program with a device of its own (section 4.4), gives the bits
 * of one machine: however the layers are split, for all placements, schedules and flights, under delays of the wire. The
 * network itself is test_pipeline.c's, the times of simulated stages are test_world.c's. */
#include <pthread.h>

#include "tests.h"

enum { PROMPTS = 11, MOST_STAGES = 5 };

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
    if (!m->status && test_gpu) m->status = opt_warm_up(r->device, r->plan, &r->err); /* as every run on a GPU begins */
    if (!m->status) m->status = rig_run(r);
    if (m->status && r->net) r->net->fail(r->net, &r->err);
    rig_stop(r);
    if (r->net) r->net->close(r->net); /* which checks that no message is left */
    return NULL;
}

TEST(stages_give_the_bits_of_one_machine) {
    static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.4, .3}};
    OptConfig config = TEST_CONFIG(5, 60, 100, 3, 131, 7);
    int length[PROMPTS], n[PROMPTS];
    Gpu *gpu[MOST_STAGES] = {test_gpu}; /* of each stage; the emulation has as many as are opened */
    for (int i = 0; i < PROMPTS; i++) length[i] = 1 + i * 5 % 17, n[i] = 1 + i * 7 % 12;
    task = random_task(PROMPTS, length, n, 131, 3);
    task.sampling = (Sampling){.temperature = .8f, .top_p = .95f, .seed = 9};
    for (int i = 0; i < PROMPTS; i++) task.prompts[i].from = 1 + i % length[i];
    for (int way = 0; way < 48; way++) {
        if (test_gpu && way % (test_every > 96 ? 48 : 11) != 5) continue; /* the emulation takes its time */
        const double *w = share[way % 4], *c = share[way / 4 % 4], *h = share[(way + way / 4) % 4];
        const int stages = test_gpu ? 2 : 2 + way % 4;
        Policy p = on_tiers(w[0], w[1], c[0], c[1], h[0], h[1], 1 + way % 4, 1 + way / 3 % 3);
        p.sparsity = way % 7 == 3 ? .3 : 1;
        p.schedule = way % 3, p.flights = 1 + way % 5, p.delegated = way / 2 % 2 || is_sparse(&p);
        p.table_home = way % 3, p.overlap = way % 7 != 6, p.page_tokens = way % 2 ? 16 : 3;
        task.scored = way % 5 == 4;
        config.pre_norm = config.final_norm = way / 2 % 2 == 0, config.embed = config.pre_norm ? 60 : 28;
        Checkpoint *model = checkpoint_dummy(&config, 5);
        /* A GPU's batches have as many rows as those of the stages, since its products round by that. */
        Machine alone = {.part = *model, .rig = {.policy = test_gpu ? p : all_gpu(PROMPTS, 1)}}, machine[MOST_STAGES] = {0};
        Net *net[MOST_STAGES];
        alone.rig.policy.sparsity = p.sparsity, alone.rig.policy.delegated |= is_sparse(&p);
        run_stage(&alone);
        CU_ASSERT_EQUAL_FATAL(alone.status, 0);
        local_net_open(net, stages, way / 4 % 2, way % 3 == 2 ? 2000 : 0);
        int first = 0;
        for (int s = 0; s < stages; s++) { /* layers evenly, or as late as can be */
            Machine *m = &machine[s];
            Error err;
            if (test_gpu && !gpu[s]) gpu[s] = cuda_open_gpu(&err);
            ASSERT_OK(test_gpu && !gpu[s]);
            const int end = way / 8 % 2 && s < stages - 1 ? s + 1 : config.l * (s + 1) / stages;
            m->part = checkpoint_stage(model, s, stages, first, end - first);
            first = end;
            m->rig = (Rig){.policy = p, .net = net[s], .gpu = gpu[s]};
            CHECK(!pthread_create(&m->thread, NULL, run_stage, m));
        }
        for (int s = 0; s < stages; s++) { /* each hears what one machine heard */
            Rig *r = &machine[s].rig;
            pthread_join(machine[s].thread, NULL);
            const bool same = !machine[s].status && rig_same(r, &alone.rig);
            if (!same) say_policy(&p), fprintf(stderr, "stage %d of %d\n", s, stages);
            CU_ASSERT(same);
            rig_close(r);
        }
        rig_close(&alone.rig);
        checkpoint_close(model);
    }
    free_task(&task);
    for (int g = 1; g < MOST_STAGES; g++)
        if (gpu[g]) gpu[g]->close(gpu[g]);
}
