/* test_schedule.c: the invariants of the engine. On one device every schedule, placement, overlap setting, page size and
 * batching gives bit-identical tokens and logits; what moves over each link is the closed form; nothing is left behind.
 * The suite runs on the host device, and on the cuda device where main.c was told so. */
#include <dirent.h>
#include <unistd.h>

#include "golden.h"

/* Odd sizes on purpose: no dimension is a multiple of what a vector register holds, and prompts end at every place of a
 * page. */
static const OptConfig small = SMALL_CONFIG(-1);
enum { PROMPTS = 9, MAX_N = 12 };
static const int prompt_len[PROMPTS] = {5, 1, 17, 33, 16, 2, 64, 31, 9},
                 prompt_n[PROMPTS] = {12, 7, 1, 9, 12, 3, 12, 2, 10};

typedef struct {
    int32_t tokens[PROMPTS][MAX_N];
    int n[PROMPTS], done[PROMPTS];
    FinishReason reason[PROMPTS];
    float *last[PROMPTS]; /* logits of the last step */
    int vocab, order[PROMPTS], finished;
    size_t planned[NTIERS], peak[NTIERS], moved[NCHANNELS][NKINDS];
    long sweeps;
    RunStats stats;
    long fresh, decoded; /* tokens of the present sweep; of those before it in which nobody prefilled */
    bool entered;        /* someone's first token is one of the present sweep's */
} Result;

static void make_task(Task *task, const OptConfig *config) {
    uint64_t state = 7;
    *task = (Task){
        .prompts = xcalloc(PROMPTS, sizeof(Prompt)), .count = PROMPTS, .keep_logits = true, .sampling = {.top_p = 1}};
    for (int i = 0; i < PROMPTS; i++) {
        Prompt *p = &task->prompts[i];
        *p = (Prompt){.ids = xcalloc(prompt_len[i], sizeof(int32_t)), .s = prompt_len[i], .n = prompt_n[i], .place = i};
        for (int t = 0; t < p->s; t++) p->ids[t] = t ? (int32_t)((test_random(&state) + 1) / 2 * (config->vocab - 1)) : 2;
    }
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    Result *r = ctx;
    (void)err;
    memcpy(r->tokens[prompt], tokens, n * sizeof *tokens);
    r->n[prompt] = n;
    r->done[prompt]++;
    r->reason[prompt] = reason;
    r->order[r->finished++] = prompt;
    return 0;
}

static void on_logits(void *ctx, int prompt, int n, const float *logits) {
    Result *r = ctx;
    (void)n;
    memcpy(r->last[prompt], logits, r->vocab * sizeof *logits);
}

static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    Result *r = ctx;
    (void)prompt, (void)tokens;
    r->fresh++;
    r->entered = r->entered || n == 1;
    return false;
}

static int on_sweep(void *ctx, const RunStats *stats, Error *err) {
    Result *r = ctx;
    (void)stats, (void)err;
    if (!r->entered) r->decoded += r->fresh;
    r->fresh = 0, r->entered = false;
    return 0;
}

static void result_open(Result *r, int vocab) {
    *r = (Result){.vocab = vocab};
    for (int i = 0; i < PROMPTS; i++) r->last[i] = xcalloc(vocab, sizeof(float));
}

static void result_close(Result *r) {
    for (int i = 0; i < PROMPTS; i++) free(r->last[i]);
}

static int slow_lane = -1; /* every op of it waits for a millisecond first */
static bool spoil;         /* the final layernorm's bias is NaN */
static int spoilt_row;     /* of the token table, if it is not 0: has a NaN */

/* Runs the task under the policy on a fresh device. */
static int run(Result *r, const Checkpoint *checkpoint, const Policy *policy, const Task *task, Error *err) {
    int status = -1;
    result_open(r, checkpoint->config.vocab);
    Listener listener = {.ctx = r, .done = on_done, .logits = on_logits, .token = on_token, .sweep = on_sweep};
    Plan *plan = plan_make(checkpoint, policy, task, test_act_type(), err);
    Device *device = plan ? test_open(plan, checkpoint, temp_dir(), err) : NULL;
    if (device && slow_lane >= 0) device->delay_us[slow_lane] = 1000;
    if (device && !weights_load(plan, checkpoint, device, err)) {
        const f16 nan = 0x7e00;
        if (spoil) device->upload(device, plan->global[FINAL_LN_B].home, 1, &nan, 1);
        const Tensor table = plan->global[TOK_EMBED].home;
        if (spoilt_row) device->upload(device, table, (size_t)spoilt_row * table.cols + 2, &nan, 1);
        status = schedule_run(plan, task, device, &listener, &r->stats, err);
        const bool timed = !test_gpu || policy->schedule == SCHEDULE_DIAGONAL; /* a GPU's marks, as long as none traces */
        CU_ASSERT(status || (device->count[PROJECT].busy_s > 0) == timed);
    }
    if (device) {
        memcpy(r->planned, plan->total, sizeof r->planned);
        memcpy(r->peak, device->peak, sizeof r->peak);
        for (int lane = 0; lane < NLANES; lane++)
            for (int kind = 0; kind < NKINDS; kind++) r->moved[lane_channel[lane]][kind] += device->count[lane].moved[kind];
        device->close(device);
    }
    plan_free(plan);
    return status;
}

static bool same(const Result *a, const Result *b) {
    for (int i = 0; i < PROMPTS; i++) {
        if (a->n[i] != b->n[i] || a->done[i] != 1 || a->reason[i] != b->reason[i]) return false;
        if (memcmp(a->tokens[i], b->tokens[i], a->n[i] * sizeof(int32_t)) != 0) return false;
        if (memcmp(a->last[i], b->last[i], a->vocab * sizeof(float)) != 0) return false;
    }
    return true;
}

/* On a GPU: what a policy is compared with. cuBLAS may sum differently for another number of rows, and the CPU attends in
 * float, so bits are the same for the same members of a batch and where the same processor attends. All else is on the GPU,
 * one op after another. */
static struct {
    const Checkpoint *checkpoint;
    Policy policy;
    Result result;
} known[16];
static int nknown;

static void forget_known(void) {
    for (; nknown > 0; nknown--) result_close(&known[nknown - 1].result);
}

static const Result *gpu_reference(const Checkpoint *checkpoint, const Policy *policy, const Task *task) {
    Policy p = *policy;
    Error err;
    p.wg = p.hg = 1, p.wc = p.hc = 0, p.table_home = TIER_GPU, p.page_tokens = 16, p.overlap = false;
    if (!p.delegated) p.cg = 1, p.cc = 0;
    for (int i = 0; i < nknown; i++) {
        const Policy *k = &known[i].policy;
        if (known[i].checkpoint == checkpoint && k->gbs == p.gbs && k->num_gpu_batches == p.num_gpu_batches &&
            k->schedule == p.schedule && k->delegated == p.delegated && k->cg == p.cg && k->cc == p.cc &&
            k->weight_packed == p.weight_packed && k->cache_packed == p.cache_packed && k->sparsity == p.sparsity)
            return &known[i].result;
    }
    if (nknown == sizeof known / sizeof *known) forget_known();
    known[nknown].checkpoint = checkpoint, known[nknown].policy = p;
    int slow = slow_lane;
    slow_lane = -1;
    if (run(&known[nknown].result, checkpoint, &p, task, &err)) fprintf(stderr, "\n    reference: %s\n", err.text);
    slow_lane = slow;
    return &known[nknown++].result;
}

/* Of a long list of combinations, whether this one's turn has come. */
static bool taken(void) {
    static int turn;
    return turn++ % test_every == 0;
}

/* So slow a way that tests which the others run whole are cut short. */
static bool hurried(void) { return test_every > 96; }

/* Asserts that the policy gives what `reference` gave. */
static void expect_same(const Result *reference, const Checkpoint *checkpoint, const Policy *p, const Task *task) {
    Result r;
    Error err;
    if (!taken()) return;
    if (test_gpu) reference = gpu_reference(checkpoint, p, task);
    int status = run(&r, checkpoint, p, task, &err);
    bool ok = !status && same(&r, reference);
    if (!ok)
        fprintf(
            stderr, "\n    differs: %g %g %g %g %g %g, %d x %d, %s, table %d, page %d, packed %d %d, sparsity %g%s%s%s%s\n",
            p->wg, p->wc, p->cg, p->cc, p->hg, p->hc, p->gbs, p->num_gpu_batches, schedule_name[p->schedule], p->table_home,
            p->page_tokens, p->weight_packed, p->cache_packed, p->sparsity, p->delegated ? ", CPU attention" : "",
            p->overlap ? "" : ", no overlap", status ? ": " : "", status ? err.text : "");
    CU_ASSERT(ok);
    result_close(&r);
}

static const double placements[][6] = {
    {1, 0, 1, 0, 1, 0},
    {0, 1, 0, 1, 0, 1},
    {0, 0, 0, 0, 0, 0},
    {0, 1, 1, 0, 1, 0},
    {1, 0, 0, 1, 1, 0},
    {1, 0, 1, 0, 0, 1},
    {0, 0, 1, 0, 1, 0},
    {1, 0, 0, 0, 1, 0},
    {1, 0, 1, 0, 0, 0},
    {.5, .5, 1, 0, 1, 0},
    {.2, .8, 0, 1, 0, 1},
    {.5, 0, .5, 0, .5, 0},
    {0, .5, 0, .5, 0, .5},
    {.3, .3, .3, .3, .3, .3},
    {.1, .2, .6, .3, .3, .6},
    {1, 0, .5, .5, 1, 0},
    {1, 0, .5, 0, 1, 0},
    {1, 0, 0, .5, 1, 0},
    {1, 0, 1, 0, .5, .5},
    {1, 0, 1, 0, .5, 0},
    {0, .5, .4, .3, 1, 0},
    {.7, .1, .1, .1, .1, .8},
    {0, 0, 0, 1, 1, 0},
    {0, 1, 0, 0, 0, 0},
    {.9, .05, .34, .33, .33, .34},
};
enum { PLACEMENTS = sizeof placements / sizeof placements[0] };

static Policy placed(const double *f) {
    Policy p = all_gpu(4, 3);
    p.wg = f[0], p.wc = f[1], p.cg = f[2], p.cc = f[3], p.hg = f[4], p.hc = f[5];
    return p;
}

static Checkpoint *model;
static Task task;
static Result reference;
static bool have_reference;

/* The reference: everything on the GPU, one batch of all, pages of one size, no overlap. */
static void run_reference(void) {
    Error err;
    Policy p = all_gpu(4, 3);
    p.gbs = PROMPTS, p.num_gpu_batches = 1, p.overlap = false;
    ASSERT_OK(run(&reference, model, &p, &task, &err));
    have_reference = true;
}

static void open_reference(const OptConfig *config) {
    model = checkpoint_dummy(config, 3);
    make_task(&task, config);
    if (!test_gpu) run_reference(); /* on a GPU expect_same has others */
}

static void close_reference(void) {
    forget_known();
    if (have_reference) result_close(&reference);
    have_reference = false;
    free_task(&task);
    checkpoint_close(model);
}

static void every_placement_gives_the_same_bits(void) {
    open_reference(&small);
    for (int i = 0; i < PLACEMENTS; i++)
        for (int way = 0; way < 4; way++) {
            Policy p = placed(placements[i]);
            p.delegated = way & 1, p.overlap = !(way & 2);
            p.table_home = (Tier)((i + way) % 3);
            p.gbs = 2, p.num_gpu_batches = 3, p.schedule = (i + way / 2) % 2 ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
            expect_same(&reference, model, &p, &task);
        }
    close_reference();
}

/* How numbers are kept, and which are read: what they cost in accuracy they cost everywhere alike. */
static const struct {
    bool weights, cache;             /* packed */
    Quant weight_study, cache_study; /* the second on the host alone */
    double sparsity;
} numbers[] = {{true, false, {0}, {0}, 1},   {false, true, {0}, {0}, 1},          {true, true, {0}, {0}, .3},
               {false, false, {0}, {0}, .1}, {false, false, {3, 32}, {5, 6}, .5}, {true, false, {0}, {8, 64}, .01}};
enum { NUMBERS = sizeof numbers / sizeof numbers[0] };
/* Its matrices are of whole groups. */
static const OptConfig grouped = {.name = "grouped",
                                  .l = 3,
                                  .h1 = 64,
                                  .h2 = 128,
                                  .nh = 4,
                                  .vocab = 131,
                                  .max_pos = 128,
                                  .embed = 64,
                                  .pre_norm = true,
                                  .final_norm = true,
                                  .eos = -1};

static void set_numbers(Policy *p, int i) {
    p->weight_packed = numbers[i].weights, p->cache_packed = numbers[i].cache, p->sparsity = numbers[i].sparsity;
    p->weight_study = numbers[i].weight_study;
    if (!test_gpu) p->cache_study = numbers[i].cache_study;
    p->delegated = p->delegated || is_sparse(p);
}

/* What the others are compared with: as run_reference, with such numbers. */
static void run_packed(Result *packed, int n) {
    Error err;
    Policy one = all_gpu(4, 3);
    one.gbs = PROMPTS, one.num_gpu_batches = 1;
    set_numbers(&one, n);
    ASSERT_OK(run(packed, model, &one, &task, &err));
    CU_ASSERT(!same(packed, &reference)); /* or nothing would have been packed */
}

static void packed_and_sparse_every_placement_gives_the_same_bits_too(void) {
    open_reference(&grouped);
    for (int n = 0; n < NUMBERS; n++) {
        Result packed;
        if (!test_gpu) run_packed(&packed, n);
        for (int i = 0; i < PLACEMENTS; i++)
            for (int way = n % 2; way < (test_gpu ? 2 : 4); way += 2) { /* a GPU has a reference each */
                Policy p = placed(placements[i]);
                p.delegated = way & 2, p.overlap = (i + way) % 4, p.page_tokens = i % 3 ? 16 : 3;
                p.table_home = (Tier)((i + way) % 3);
                p.gbs = 1 + i % 3, p.num_gpu_batches = 3, p.schedule = (Schedule)((i + way / 2) % 3);
                set_numbers(&p, n);
                expect_same(&packed, model, &p, &task);
            }
        if (!test_gpu) result_close(&packed);
    }
    close_reference();
}

static void packed_and_sparse_no_lane_may_be_so_slow_that_the_bits_change(void) {
    static const int some[] = {2, 13};
    Result packed;
    open_reference(&grouped);
    if (!test_gpu) run_packed(&packed, 2);
    for (slow_lane = 0; slow_lane < NLANES; slow_lane++)
        for (size_t i = 0; i < sizeof some / sizeof some[0]; i++) {
            Policy p = placed(placements[some[i]]);
            p.gbs = p.num_gpu_batches = 2, p.schedule = i % 2 ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
            set_numbers(&p, 2);
            expect_same(&packed, model, &p, &task);
        }
    slow_lane = -1;
    if (!test_gpu) result_close(&packed);
    close_reference();
}

static void every_batching_gives_the_same_bits(void) {
    static const int shapes[][2] = {{1, 1}, {1, 2}, {1, 7}, {2, 1}, {2, 2}, {2, 7},
                                    {3, 3}, {4, 2}, {5, 1}, {9, 1}, {20, 2}};
    static const int some[] = {0, 1, 2, 13, 20, 24};
    open_reference(&small);
    for (size_t b = 0; b < sizeof shapes / sizeof shapes[0]; b++)
        for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
            for (int way = 0; way < 4; way++) {
                Policy p = placed(placements[some[i]]);
                p.gbs = shapes[b][0], p.num_gpu_batches = shapes[b][1], p.flights = 1 + (int)(b + i + way) % 3;
                p.delegated = way & 1, p.schedule = (Schedule)((way / 2 + i + b) % 3);
                p.table_home = (Tier)((i + b) % 3);
                p.piece_rows = (i + way) % 2 ? 0 : 1 + (int)b, p.workspaces = 2 + way % 2; /* a sequence or two a piece */
                expect_same(&reference, model, &p, &task);
            }
    close_reference();
}

static void every_page_size_gives_the_same_bits(void) {
    static const int sizes[] = {1, 2, 3, 16, 64, 200};
    static const int some[] = {0, 1, 2, 13};
    open_reference(&small);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
            for (int cpu = 0; cpu < 2; cpu++) {
                Policy p = placed(placements[some[i]]);
                p.page_tokens = sizes[s], p.delegated = cpu;
                p.gbs = 3 - cpu, p.num_gpu_batches = 3 - cpu,
                p.schedule = (i + cpu) % 2 ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
                expect_same(&reference, model, &p, &task);
            }
    close_reference();
}

/* Lanes meet only at events. Where one is missing, holding up a single lane lets another run ahead of it into the wrong
 * bytes. */
static void no_lane_may_be_so_slow_that_the_bits_change(void) {
    static const int some[] = {2, 4, 7, 8, 13};
    open_reference(&small);
    for (slow_lane = 0; slow_lane < NLANES; slow_lane++)
        for (size_t i = 0; i < sizeof some / sizeof some[0]; i++)
            for (int cpu = 0; cpu < 2; cpu++) {
                Policy p = placed(placements[some[i]]);
                p.gbs = 2 + cpu, p.num_gpu_batches = 5 - 2 * cpu, p.delegated = cpu;
                if (i % 2) p.gbs = p.num_gpu_batches = 2, p.schedule = SCHEDULE_DIAGONAL; /* seats refill, topups join */
                p.table_home = (Tier)(i % 3);
                expect_same(&reference, model, &p, &task);
            }
    slow_lane = -1;
    close_reference();
}

static void one_thread_and_two_give_the_same_bits(void) {
    open_reference(&small);
    for (int threads = 1; threads <= 3; threads++) {
        host_set_threads(threads);
        Policy p = placed(placements[13]);
        p.delegated = true;
        expect_same(&reference, model, &p, &task);
    }
    host_set_threads(0);
    close_reference();
}

static void the_post_norm_form_gives_the_same_bits_too(void) {
    OptConfig post = small;
    post.pre_norm = post.final_norm = false, post.embed = 28;
    open_reference(&post);
    for (int i = 0; i < PLACEMENTS; i += 2) {
        Policy p = placed(placements[i]);
        p.delegated = i & 2, p.gbs = 2, p.table_home = (Tier)(i / 2 % 3), p.schedule = (Schedule)(i / 2 % 3);
        expect_same(&reference, model, &p, &task);
    }
    close_reference();
}

static Tensor row_of(void *at, Type type, int n) {
    return (Tensor){.type = type, .rows = 1, .cols = n, .ld = (size_t)n, .at = at};
}

/* What the host's sampler takes for the last token of prompt i, from the logits of the run. */
static int32_t host_choice(const Result *r, int i) {
    int32_t id, at = prompt_len[i] + r->n[i] - 1, place = task.prompts[i].place;
    const Op op = op_pick((Call){.lane = ATTEND}, row_of(&id, I32, 1), row_of(r->last[i], F32, r->vocab),
                          row_of(&place, I32, 1), row_of(&at, I32, 1), &task.sampling);
    host_run(&op);
    return id;
}

/* A prompt alone, at another place of the batch, or sampled: only seed, index and position count. The index is the place in
 * the input, so the same input is dealt to other batches. */
static void sampling_depends_on_nothing_but_seed_place_and_position(void) {
    Error err;
    Result one, other;
    if (hurried()) return;
    model = checkpoint_dummy(&small, 3);
    make_task(&task, &small);
    task.sampling = (Sampling){.temperature = 1.2f, .top_p = .95f, .top_k = 50, .seed = 11};
    run_reference();
    Policy p;
    for (int i = 0; i < PLACEMENTS; i += 3) {
        p = placed(placements[i]);
        p.gbs = 1 + i % 4, p.num_gpu_batches = 1 + i % 5, p.delegated = i & 1, p.schedule = (Schedule)(i / 3 % 3);
        p.flights = i % 4;
        expect_same(&reference, model, &p, &task);
    }
    task.sampling.seed = 12;
    forget_known();
    ASSERT_OK(run(&one, model, &p, &task, &err));
    CU_ASSERT(!same(&one, &reference)); /* and the seed does count */
    for (int i = 0; i < PROMPTS; i++)
        CU_ASSERT_EQUAL(one.tokens[i][one.n[i] - 1], host_choice(&one, i)); /* of a GPU, too */
    task.keep_logits = false;
    ASSERT_OK(run(&other, model, &p, &task, &err));
    CU_ASSERT(!memcmp(other.tokens, one.tokens, sizeof one.tokens));
    result_close(&one), result_close(&other);
    close_reference();
}

/* Tensors and page runs of more than a quarter MiB are read around the page cache, in blocks that do not begin where they
 * do. */
static void large_reads_from_disk_bring_the_same_bits(void) {
    OptConfig wide = {.name = "wide",
                      .l = 2,
                      .h1 = 520,
                      .h2 = 1000,
                      .nh = 5,
                      .vocab = 4100, /* the token table is uploaded in two pieces */
                      .max_pos = 512,
                      .embed = 520,
                      .pre_norm = true,
                      .final_norm = true,
                      .eos = -1};
    model = checkpoint_dummy(&wide, 5);
    make_task(&task, &wide);
    for (int i = 0; i < PROMPTS; i += 2) { /* some long prompts, for long runs of pages */
        Prompt *p = &task.prompts[i];
        p->ids = xrealloc(p->ids, 200, sizeof(int32_t));
        for (int t = p->s; t < 200; t++) p->ids[t] = t;
        p->s = 200 - i, p->n = 4;
    }
    if (!test_gpu) run_reference();
    for (int cpu = 0; cpu < 2; cpu++) {
        Policy p = placed(placements[2]);
        p.table_home = TIER_DISK, p.delegated = cpu;
        expect_same(&reference, model, &p, &task);
    }
    close_reference();
}

/* More ops a sweep than a lane's queue holds, or a stream has marks. */
static void a_model_deeper_than_the_queues_gives_the_same_bits(void) {
    OptConfig deep = {.name = "deep",
                      .l = 100,
                      .h1 = 16,
                      .h2 = 16,
                      .nh = 2,
                      .vocab = 40,
                      .max_pos = 128,
                      .embed = 16,
                      .pre_norm = true,
                      .final_norm = true,
                      .eos = -1};
    if (hurried()) return;
    open_reference(&deep);
    for (int i = 0; i < PROMPTS; i++) {
        Prompt *p = &task.prompts[i];
        p->s = p->s < 3 ? p->s : 3, p->n = 1 + i % 2;
    }
    have_reference = false;
    if (!test_gpu) result_close(&reference), run_reference();
    int every = test_every;
    test_every = 1; /* there are no others that do this */
    for (int way = every > 16 ? 3 : 0; way < 4; way++) {
        Policy p = placed(placements[way % 2 ? 13 : 0]);
        p.gbs = 3, p.num_gpu_batches = 3, p.delegated = way & 2;
        expect_same(&reference, model, &p, &task);
    }
    test_every = every;
    close_reference();
}

static void ends_the_run(void) {
    Error err;
    Result r;
    Policy p = all_gpu(4, 3);
    for (int sampled = 0; sampled < 2; sampled++) {
        task.sampling.temperature = sampled;
        CU_ASSERT_EQUAL(run(&r, model, &p, &task, &err), -1);
        CU_ASSERT(strstr(err.text, "not finite") != NULL);
        result_close(&r);
    }
}

static void logits_that_are_no_numbers_end_the_run(void) {
    open_reference(&small);
    spoil = true;
    ends_the_run();
    spoil = false;
    close_reference();
}

/* The last token is in no prompt, and its logit, which is NaN, is never the largest. */
static void a_token_that_has_no_numbers_ends_the_run_though_nobody_says_it(void) {
    open_reference(&small);
    spoilt_row = small.vocab - 1;
    ends_the_run();
    spoilt_row = 0;
    close_reference();
}

/* </s> is made a token that the model is known to choose, so that some sequences stop early and others do not. */
static void sequences_that_stop_early_change_nothing_for_the_others(void) {
    OptConfig config = small;
    Result full;
    Error err;
    open_reference(&config);
    if (test_gpu) run_reference();
    full = reference;
    config.eos = full.tokens[4][5]; /* the sixth token of the fifth prompt */
    Checkpoint *stopping = checkpoint_dummy(&config, 3);
    Policy p = all_gpu(4, 3);
    Result r;
    ASSERT_OK(run(&r, stopping, &p, &task, &err));
    int stopped = 0;
    for (int i = 0; i < PROMPTS; i++) {
        int n = 0;
        while (n < full.n[i] && full.tokens[i][n] != config.eos) n++;
        CU_ASSERT_EQUAL(r.n[i], n);
        CU_ASSERT_EQUAL(r.reason[i], n < full.n[i] ? FINISH_STOP : FINISH_LENGTH);
        CU_ASSERT(memcmp(r.tokens[i], full.tokens[i], n * sizeof(int32_t)) == 0);
        stopped += n < full.n[i];
    }
    CU_ASSERT(stopped > 0);
    for (int i = 0; i < PLACEMENTS; i += 2)
        for (int schedule = 0; schedule < 3; schedule++) {
            p = placed(placements[i]);
            p.gbs = 1 + i % 3, p.num_gpu_batches = 1 + i % 4, p.delegated = i & 2, p.flights = i % 3;
            p.schedule = (Schedule)schedule;
            expect_same(&r, stopping, &p, &task);
        }
    result_close(&r);
    forget_known();
    checkpoint_close(stopping);
    close_reference();
}

/* With the diagonal schedule some decode while others prefill; no sweep is the one alone, and its seconds are divided. */
static void seconds_are_of_what_they_were_spent_on(void) {
    if (hurried()) return;
    open_reference(&small);
    for (int schedule = 0; schedule < 3; schedule++) {
        Result r;
        Error err;
        Policy p = all_gpu(4, 3);
        p.gbs = 2, p.num_gpu_batches = 2, p.schedule = (Schedule)schedule;
        ASSERT_OK(run(&r, model, &p, &task, &err));
        const RunStats *s = &r.stats;
        const bool mixed = p.schedule == SCHEDULE_DIAGONAL;
        CU_ASSERT(r.decoded > 0 && s->beside >= 0);
        CU_ASSERT_EQUAL(s->decoded, s->generated - PROMPTS);
        CU_ASSERT_EQUAL(s->decoded - s->beside, r.decoded);
        CU_ASSERT((s->beside > 0) == mixed);
        CU_ASSERT(fabs(s->prefill_s + s->decode_s - s->total_s) <= 1e-9 * s->total_s);
        CU_ASSERT(mixed ? 0 < s->prefill_s && s->prefill_s < s->prefill_sweeps_s : s->prefill_s == s->prefill_sweeps_s);
        result_close(&r);
    }
    close_reference();
}

/* Some prompts have ended, others have some of their tokens behind them and prefill these as well; what is left, under
 * another policy, is chosen as if there had been no break. */
static void a_sequence_goes_on_behind_tokens_that_are_known(void) {
    if (test_gpu) return; /* prefill and decode are other products there, and may round in another way */
    open_reference(&small);
    task.sampling = (Sampling){.temperature = .9f, .top_p = .95f, .seed = 5};
    result_close(&reference), run_reference();
    for (int way = 0; way < 9; way++) {
        static const int placement[] = {0, 2, 13};
        Task rest = {.prompts = xcalloc(PROMPTS, sizeof(Prompt)), .sampling = task.sampling};
        Policy p = placed(placements[placement[way % 3]]);
        Result r;
        Error err;
        p.schedule = (Schedule)(way / 3), p.delegated = way % 2, p.gbs = 1 + way % 4;
        for (int i = 0; i < PROMPTS; i++) {
            const int given = (i + way) % (reference.n[i] + 1), s = task.prompts[i].s;
            if (given == reference.n[i]) continue; /* it has ended */
            Prompt *q = &rest.prompts[rest.count++];
            *q = (Prompt){
                .ids = xcalloc(s + given, sizeof(int32_t)), .s = s + given, .n = task.prompts[i].n - given, .place = i};
            memcpy(q->ids, task.prompts[i].ids, s * sizeof *q->ids);
            memcpy(q->ids + s, reference.tokens[i], given * sizeof *q->ids);
        }
        ASSERT_OK(run(&r, model, &p, &rest, &err));
        for (int i = 0; i < rest.count; i++) {
            const int place = rest.prompts[i].place, given = rest.prompts[i].s - task.prompts[place].s;
            CU_ASSERT_EQUAL_FATAL(r.n[i], reference.n[place] - given);
            CU_ASSERT(!memcmp(r.tokens[i], reference.tokens[place] + given, r.n[i] * sizeof(int32_t)));
        }
        result_close(&r);
        free_task(&rest);
    }
    close_reference();
}

static void a_run_that_is_stopped_begins_no_further_op(void) {
    const int stop = 1;
    RunStats stats;
    Error err;
    Policy p = all_gpu(4, 3);
    open_reference(&small);
    Plan *plan = plan_make(model, &p, &task, test_act_type(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Device *device = test_open(plan, model, temp_dir(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(device);
    ASSERT_OK(weights_load(plan, model, device, &err));
    device->stop = &stop;
    CU_ASSERT_EQUAL(schedule_run(plan, &task, device, &(Listener){.done = on_done}, &stats, &err), -1);
    CU_ASSERT_STRING_EQUAL(err.text, "stopped");
    for (int lane = 0; lane < NLANES; lane++) CU_ASSERT_EQUAL(device->count[lane].busy_s, 0);
    device->close(device);
    plan_free(plan);
    close_reference();
}

static void a_task_without_prompts_is_done_at_once(void) {
    Checkpoint *none = checkpoint_dummy(&small, 3);
    for (int schedule = 0; schedule < 3; schedule++) {
        Error err;
        RunStats stats;
        Policy p = all_gpu(4, 3);
        Task nothing = {.count = 0};
        p.schedule = (Schedule)schedule, p.wg = p.wc = .5; /* so that no tier's memory is empty */
        Plan *plan = plan_make(none, &p, &nothing, test_act_type(), &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
        Device *device = test_open(plan, none, temp_dir(), &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(device);
        ASSERT_OK(schedule_run(plan, &nothing, device, &(Listener){.done = on_done}, &stats, &err));
        CU_ASSERT(stats.sweeps == 0 && stats.generated == 0);
        device->close(device);
        plan_free(plan);
    }
    checkpoint_close(none);
}

/* Greedy tokens and logits of the engine against the plain forward: 2e-5 is a hundred roundings of float. */
static void the_engine_agrees_with_the_plain_forward(void) {
    Error err;
    if (hurried()) return;
    for (int post = 0; post < 2; post++) {
        OptConfig config = small;
        if (post) config.pre_norm = config.final_norm = false, config.embed = 28;
        open_reference(&config);
        if (test_gpu) run_reference();
        for (int i = 0; i < PROMPTS; i++) {
            int s = prompt_len[i], n = reference.n[i], total = s + n - 1;
            int32_t ids[128];
            memcpy(ids, task.prompts[i].ids, s * sizeof *ids);
            memcpy(ids + s, reference.tokens[i], (n - 1) * sizeof *ids);
            float *logits = xcalloc((size_t)total * config.vocab, sizeof *logits);
            ASSERT_OK(reference_forward(logits, model, ids, total, &err));
            double e = max_norm_error(reference.last[i], logits + (size_t)(total - 1) * config.vocab, config.vocab);
            /* K and V are rounded to F16, and a last-bit difference before that can flip a rounding; on a GPU all is F16 */
            CU_ASSERT(e <= (test_gpu ? 1e-2 : 1e-3));
            free(logits);
        }
        close_reference();
    }
}

/* What Hugging Face says of one checkpoint, against the engine run over every prefix of every sequence. */
typedef struct {
    const Golden *golden;
    const int *sequence, *length; /* of each prompt */
    double worst;
    bool same_tokens;
} HuggingFace;

static int compare_tokens(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    HuggingFace *h = ctx;
    (void)reason, (void)err;
    const GoldenSequence *q = &h->golden->sequence[h->sequence[prompt]];
    if (h->length[prompt] == q->n && (n != h->golden->greedy || memcmp(tokens, q->tokens, n * sizeof *tokens) != 0))
        h->same_tokens = false;
    return 0;
}

static void compare_logits(void *ctx, int prompt, int n, const float *logits) {
    HuggingFace *h = ctx;
    const GoldenSequence *q = &h->golden->sequence[h->sequence[prompt]];
    int row = h->length[prompt] - 1 - (q->n - q->rows), vocab = h->golden->vocab;
    if (n != 1 || row < 0) return;
    double e = max_norm_error(logits, q->logits + (size_t)row * vocab, vocab);
    if (!(e <= h->worst)) h->worst = e;
}

static void compare_with_hugging_face(const char *dir) {
    Error err;
    Checkpoint *c = checkpoint_open(dir, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    Golden golden = golden_read(dir);
    int prompts = 0, sequence[256], length[256];
    Task t = {.prompts = xcalloc(256, sizeof(Prompt)), .keep_logits = true, .sampling = {.top_p = 1}};
    c->config.eos = -1; /* Hugging Face was told to go on */
    for (int i = 0; i < golden.count; i++)
        for (int s = 1; s <= golden.sequence[i].n && prompts < 256; s++) {
            if (s % (1 + test_every / 8) && s != golden.sequence[i].n) continue;
            sequence[prompts] = i, length[prompts] = s;
            t.prompts[prompts] =
                (Prompt){.ids = golden.sequence[i].ids, .s = s, .n = s == golden.sequence[i].n ? golden.greedy : 1};
            prompts++;
        }
    t.count = prompts;
    HuggingFace h = {&golden, sequence, length, 0, true};
    Listener listener = {.ctx = &h, .done = compare_tokens, .logits = compare_logits};
    Policy p = placed(placements[13]); /* a bit of everything everywhere */
    p.gbs = 16, p.num_gpu_batches = 3, p.delegated = true, p.table_home = TIER_DISK;
    RunStats stats;
    Plan *plan = plan_make(c, &p, &t, test_act_type(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Device *device = test_open(plan, c, temp_dir(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(device);
    ASSERT_OK(weights_load(plan, c, device, &err));
    ASSERT_OK(schedule_run(plan, &t, device, &listener, &stats, &err));
    /* against float32 throughout: K and V in F16 alone cost 3e-4 to 8e-4; on a GPU activations are F16 too */
    CU_ASSERT(h.worst <= (test_gpu ? 1e-2 : 2e-3));
    CU_ASSERT(h.worst > 0);
    CU_ASSERT(h.same_tokens);
    device->close(device);
    plan_free(plan);
    free(t.prompts);
    golden_free(&golden);
    checkpoint_close(c);
}

static void the_engine_agrees_with_hugging_face(void) {
    compare_with_hugging_face("tests/golden/opt-pre");
    compare_with_hugging_face("tests/golden/opt-post");
}

// ---------------------------------------------------------------------------------------------------------------
// Bytes
// ---------------------------------------------------------------------------------------------------------------

enum { S = 20, N = 6, SEQS = 6 };

static void make_even_task(Task *t) {
    *t = (Task){.prompts = xcalloc(SEQS, sizeof(Prompt)), .count = SEQS, .sampling = {.top_p = 1}};
    for (int i = 0; i < SEQS; i++) {
        t->prompts[i] = (Prompt){.ids = xcalloc(S, sizeof(int32_t)), .s = S, .n = N};
        for (int e = 0; e < S; e++) t->prompts[i].ids[e] = (e * 7 + i) % small.vocab;
    }
}

/* Bytes of all layers and the head; on the CPU each tensor begins at a whole cache line, and the padding moves with it. */
static size_t model_bytes(const OptConfig *c, size_t line) {
    size_t layer = 0, head = (size_t)c->vocab * c->h1 * 2;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(c, (Role)r, &rows, &cols);
        if (role_goes_on((Role)r)) continue; /* q, k and v begin at one together */
        layer += ((size_t)rows * cols * (r == V_W || r == V_B ? 6 : 2) + line - 1) / line * line;
    }
    return c->l * layer + (head + line - 1) / line * line;
}

/* A.2.1: n times the whole model per block; with the row schedule, n times for each GPU batch. */
static void weights_cross_once_a_sweep(void) {
    if (hurried()) return;
    Error err;
    Task even;
    model = checkpoint_dummy(&small, 3);
    make_even_task(&even);
    for (int disk = 0; disk < 2; disk++)
        for (int row = 0; row < 2; row++) {
            Result r;
            Policy p = all_gpu(4, 3);
            p.wg = 0, p.wc = !disk, p.table_home = disk ? TIER_DISK : TIER_CPU, p.gbs = 2, p.num_gpu_batches = 3;
            p.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
            ASSERT_OK(run(&r, model, &p, &even, &err));
            size_t times = row ? 3 * N : N, once = model_bytes(&small, disk ? 1 : 64);
            CU_ASSERT_EQUAL(r.moved[CTOG][WEIGHT], times * once);
            CU_ASSERT_EQUAL(r.moved[DTOC][WEIGHT], disk ? times * once : 0);
            result_close(&r);
        }
    free_task(&even);
    checkpoint_close(model);
}

/* A.2.1's 4 h1 bls l (s n + n (n - 1) / 2) for reads and writes: s tokens are stored in prefill and one a token after; the
 * past is loaded in each of the n-1 decoding sweeps. Pages of one token make page traffic exact. */
static void the_cache_crosses_as_the_formula_says(void) {
    if (hurried()) return;
    Error err;
    Task even;
    model = checkpoint_dummy(&small, 3);
    make_even_task(&even);
    size_t token = 4 * (size_t)small.h1 * small.l * SEQS, stored = token * (S + N - 1), loaded = 0, each;
    for (int i = 1; i < N; i++) loaded += token * (S + i - 1);
    each = (size_t)(N - 1) * SEQS * small.l * small.h1; /* numbers of the queries, of the results */
    for (int disk = 0; disk < 2; disk++)
        for (int cpu = 0; cpu < 2; cpu++) {
            Result r;
            Policy p = all_gpu(4, 3);
            p.cg = 0, p.cc = !disk, p.gbs = 2, p.num_gpu_batches = 3, p.page_tokens = 1, p.delegated = cpu;
            ASSERT_OK(run(&r, model, &p, &even, &err));
            CU_ASSERT_EQUAL(r.moved[GTOC][CACHE], stored + (cpu ? each * sizeof(f16) : 0));
            CU_ASSERT_EQUAL(r.moved[CTOG][CACHE], cpu ? each * type_bytes(test_act_type()) : loaded);
            CU_ASSERT_EQUAL(r.moved[DTOC][CACHE], disk ? loaded : 0);
            CU_ASSERT_EQUAL(r.moved[CTOD][CACHE], disk ? stored : 0);
            result_close(&r);
        }
    free_task(&even);
    checkpoint_close(model);
}

/* From the disk K of the past and V of what is chosen of it; packed, of both so many bytes fewer. */
static void a_sparse_cache_is_read_from_disk_as_the_formula_says(void) {
    if (hurried()) return;
    const OptConfig *c = &grouped;
    Error err;
    Task even;
    model = checkpoint_dummy(c, 3);
    make_even_task(&even);
    for (int i = 0; i < 2; i++) {
        Result r;
        Policy p = all_gpu(4, 3);
        p.cg = p.cc = 0, p.gbs = 2, p.num_gpu_batches = 3, p.page_tokens = 1, p.delegated = true, p.sparsity = .25;
        p.cache_packed = i;
        size_t row = i ? c->nh * quant_bytes(c->h1 / c->nh) : (size_t)c->h1 * 2, rows = 0;
        for (int t = S + 1; t < S + N; t++) rows += t - 1 + sparse_tokens(.25, t) - 1;
        ASSERT_OK(run(&r, model, &p, &even, &err));
        CU_ASSERT_EQUAL(r.moved[DTOC][CACHE], rows * row * c->l * SEQS);
        CU_ASSERT_EQUAL(r.moved[CTOD][CACHE], 2 * row * c->l * SEQS * (S + N - 1));
        result_close(&r);
    }
    free_task(&even);
    checkpoint_close(model);
}

/* A.2.1's 2 (2 h1 s bls l + 2 h1 bls l (n - 1)), with the device's type of activations, and the last layer handing on only
 * last rows. */
static void activations_cross_as_the_formula_says(void) {
    if (hurried()) return;
    Error err;
    Task even;
    model = checkpoint_dummy(&small, 3);
    make_even_task(&even);
    size_t row = type_bytes(test_act_type()) * small.h1 * SEQS, each = row * ((small.l - 1) * (S + N - 1) + N);
    for (int disk = 0; disk < 2; disk++)
        for (int batches = 1; batches <= 3; batches += 2) {
            Result r;
            Policy p = all_gpu(4, 3);
            p.hg = 0, p.hc = !disk, p.gbs = SEQS / batches, p.num_gpu_batches = batches;
            ASSERT_OK(run(&r, model, &p, &even, &err));
            CU_ASSERT_EQUAL(r.moved[GTOC][ACTIVATION], each);
            CU_ASSERT_EQUAL(r.moved[CTOG][ACTIVATION], each);
            CU_ASSERT_EQUAL(r.moved[DTOC][ACTIVATION], disk ? each : 0);
            CU_ASSERT_EQUAL(r.moved[CTOD][ACTIVATION], disk ? each : 0);
            result_close(&r);
        }
    free_task(&even);
    checkpoint_close(model);
}

static void the_plan_is_what_is_used_to_the_byte(void) {
    Error err;
    Task even;
    model = checkpoint_dummy(&small, 3);
    make_even_task(&even);
    for (int i = 0; i < PLACEMENTS; i++)
        for (int way = 0; way < 4; way++) {
            Result r;
            if (!taken()) continue;
            Policy p = placed(placements[i]);
            p.gbs = way & 2 ? 6 : 2, p.num_gpu_batches = way & 2 ? 1 : 3, p.delegated = way & 1;
            p.table_home = (Tier)(i % 3);
            ASSERT_OK(run(&r, model, &p, &even, &err));
            for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(r.peak[t], r.planned[t]);
            result_close(&r);
        }
    free_task(&even);
    checkpoint_close(model);
}

/* Threads of this process that are not about to end: one that has been joined may still be listed for a moment. */
static int threads(void) {
    enum { PF_EXITING = 4 }; /* of the kernel's flags */
    int n = 0;
    DIR *dir = opendir("/proc/self/task");
    CHECK(dir);
    for (struct dirent *e; (e = readdir(dir));) {
        char path[300], text[600] = "";
        unsigned flags = PF_EXITING; /* so has one that has gone in between, and so have . and .. */
        snprintf(path, sizeof path, "/proc/self/task/%s/stat", e->d_name);
        FILE *f = fopen(path, "r");
        if (f && fgets(text, sizeof text, f) && strrchr(text, ')'))
            sscanf(strrchr(text, ')'), ") %*c %*d %*d %*d %*d %*d %u", &flags);
        if (f) fclose(f);
        n += !(flags & PF_EXITING);
    }
    closedir(dir);
    return n;
}

static int mappings(void) {
    int lines = 0, c;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && (c = getc(f)) != EOF) lines += c == '\n';
    if (f) fclose(f);
    return lines;
}

static int refuse(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    (void)ctx, (void)prompt, (void)tokens, (void)n, (void)reason;
    return fail(err, EXIT_FAILED, "refused");
}

/* In turn a run that succeeds, one that fails, and a device that cannot be opened. */
static void nothing_is_left_behind_after_success_or_failure(void) {
    Error err;
    int maps = 0;
    model = checkpoint_dummy(&small, 3);
    make_task(&task, &small);
    Policy p = placed(placements[13]);
    memory_share_heap(); /* malloc maps no memory for threads that happen to meet */
    for (int round = 0; round < (hurried() ? 2 : 9); round++) {
        const char *dir = temp_dir();
        int files = count_files("/proc/self/fd"), before = threads();
        if (round <= 3) maps = mappings(); /* the first three leave what is used again by all others */
        RunStats stats;
        Result r;
        result_open(&r, small.vocab);
        Listener listener = {.ctx = &r, .done = round % 3 == 1 ? refuse : on_done};
        Plan *plan = plan_make(model, &p, &task, test_act_type(), &err);
        Device *device = test_open(plan, model, round % 3 == 2 ? "/nonexistent" : dir, &err);
        CU_ASSERT_EQUAL(device == NULL, round % 3 == 2);
        if (device) {
            ASSERT_OK(weights_load(plan, model, device, &err));
            CU_ASSERT_EQUAL(schedule_run(plan, &task, device, &listener, &stats, &err), round % 3 == 1 ? -1 : 0);
            CU_ASSERT_EQUAL(count_files(dir), 0); /* even while it runs the file has no name */
            device->close(device);
        }
        plan_free(plan);
        result_close(&r);
        CU_ASSERT_EQUAL(count_files(dir), 0);
        CU_ASSERT_EQUAL(count_files("/proc/self/fd"), files);
        CU_ASSERT_EQUAL(threads(), before);
        if (round >= 3) CU_ASSERT(mappings() <= maps + 2); /* one a device would be more by now */
    }
    free_task(&task);
    checkpoint_close(model);
}

/* Runs on a GPU opened anew with a variable of the emulation set. */
static int run_with_trouble(Result *r, const Policy *p, const char *name, const char *value, Error *err) {
    Gpu *whole = test_gpu;
    setenv(name, value, 1);
    test_gpu = cuda_open_gpu(err);
    int status = test_gpu ? run(r, model, p, &task, err) : -1;
    if (test_gpu) test_gpu->close(test_gpu);
    unsetenv(name);
    test_gpu = whole;
    return status;
}

/* A launch fails near the beginning, in the middle, near the end: the run ends, and says why. Memory that cannot be pinned
 * serves as well. */
static void a_gpu_in_trouble_ends_the_run_or_changes_no_bit(void) {
    static const char *const launches[] = {"1", "30", "900"};
    if (!test_gpu || !strstr(test_gpu->name, "emulated")) return;
    Error err;
    Result r;
    open_reference(&small);
    Policy p = placed(placements[13]);
    p.delegated = true;
    for (size_t i = hurried() ? 2 : 0; i < sizeof launches / sizeof *launches; i++) {
        err.text[0] = 0;
        CU_ASSERT_EQUAL(run_with_trouble(&r, &p, "CUDA_CPU_LAUNCH_FAILS", launches[i], &err), -1);
        CU_ASSERT(strstr(err.text, "the GPU") != NULL);
        result_close(&r);
    }
    if (!hurried()) {
        ASSERT_OK(run_with_trouble(&r, &p, "CUDA_CPU_PIN_FAILS", "1", &err));
        CU_ASSERT(same(&r, gpu_reference(model, &p, &task)));
        result_close(&r);
    }
    close_reference();
}

/* A lane may be given ops faster than they happen, more of them than it has marks. */
static void run_far_ahead(bool timed) {
    enum { OPS = MARKS * 3 / 2 };
    OptConfig wide = small;
    Error err;
    int32_t number[OPS];
    Event done[OPS];
    wide.h1 = wide.embed = 300, wide.h2 = 1000, wide.l = 2;
    model = checkpoint_dummy(&wide, 3);
    make_task(&task, &wide);
    Policy p = all_gpu(4, 3);
    if (timed) p.schedule = SCHEDULE_DIAGONAL;
    Plan *plan = plan_make(model, &p, &task, test_act_type(), &err);
    Device *device = test_open(plan, model, temp_dir(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(device);
    Tensor bulk = plan->weight[0][FC1_W].home, other = plan->weight[1][FC1_W].home;
    Tensor up = plan->weight[0][FC2_W].home, down = plan_view(plan, LOGITS, TIER_CPU, 0, 0, 1);
    up.type = down.type = I32, up.rows = 1, up.cols = down.cols = OPS, up.ld = down.ld = OPS;
    for (int i = 0; i < OPS; i++) number[i] = i + 1;
    device->upload(device, up, 0, number, MARKS);
    device->upload(device, up, MARKS, number + MARKS, OPS - MARKS); /* as large tensors are, piece by piece */
    int32_t *arrived = memset(device->cpu_address(device, down), 0, sizeof number);
    double start = device->now(device), busy;
    Op op = op_copy((Call){.lane = W_LOAD, .kind = OTHER}, &(Move){other, bulk}, 1);
    Event first = device->post(device, &op);
    for (int i = 0; i < OPS; i++) { /* something that takes time, then a number; an event makes it a group of its own */
        Move moves[] = {{other, bulk}, {other, bulk}, {other, bulk}, {tensor_cols(down, i, 1), tensor_cols(up, i, 1)}};
        op = op_copy((Call){.lane = STORE, .kind = OTHER}, moves, 4);
        op.after[op.nafter++] = first;
        done[i] = device->post(device, &op);
    }
    int missing = 0;
    for (int i = MARKS * 3 / 4; i < OPS; i++) {
        ASSERT_OK(device->wait(device, done[i], &err));
        missing += arrived[i] != i + 1;
    }
    CU_ASSERT_EQUAL(missing, 0);
    busy = device->count[STORE].busy_s;
    CU_ASSERT((busy > 0) == (timed || !test_gpu) && busy <= device->now(device) - start + 1e-3);
    device->close(device);
    plan_free(plan);
    free_task(&task);
    checkpoint_close(model);
}

/* With marks that have no times, and with such as have them. */
static void what_is_waited_for_has_happened_however_far_ahead_a_lane_is(void) {
    for (int timed = 0; timed < 2; timed++) run_far_ahead(timed);
}

CU_TestInfo tests[] = {
    {"every placement gives the same bits", every_placement_gives_the_same_bits},
    {"packed and sparse, every placement gives the same bits too",
     packed_and_sparse_every_placement_gives_the_same_bits_too},
    {"packed and sparse, no lane may be so slow that the bits change",
     packed_and_sparse_no_lane_may_be_so_slow_that_the_bits_change},
    {"every batching gives the same bits", every_batching_gives_the_same_bits},
    {"every page size gives the same bits", every_page_size_gives_the_same_bits},
    {"no lane may be so slow that the bits change", no_lane_may_be_so_slow_that_the_bits_change},
    {"one thread and two give the same bits", one_thread_and_two_give_the_same_bits},
    {"the post-norm form gives the same bits too", the_post_norm_form_gives_the_same_bits_too},
    {"sampling depends on nothing but seed, place and position", sampling_depends_on_nothing_but_seed_place_and_position},
    {"large reads from disk bring the same bits", large_reads_from_disk_bring_the_same_bits},
    {"a model deeper than the queues gives the same bits", a_model_deeper_than_the_queues_gives_the_same_bits},
    {"logits that are no numbers end the run", logits_that_are_no_numbers_end_the_run},
    {"a token that has no numbers ends the run though nobody says it",
     a_token_that_has_no_numbers_ends_the_run_though_nobody_says_it},
    {"sequences that stop early change nothing for the others", sequences_that_stop_early_change_nothing_for_the_others},
    {"seconds are of what they were spent on", seconds_are_of_what_they_were_spent_on},
    {"a sequence goes on behind tokens that are known", a_sequence_goes_on_behind_tokens_that_are_known},
    {"a run that is stopped begins no further op", a_run_that_is_stopped_begins_no_further_op},
    {"a task without prompts is done at once", a_task_without_prompts_is_done_at_once},
    {"the engine agrees with the plain forward", the_engine_agrees_with_the_plain_forward},
    {"the engine agrees with Hugging Face", the_engine_agrees_with_hugging_face},
    {"weights cross once a sweep", weights_cross_once_a_sweep},
    {"the cache crosses as the formula says", the_cache_crosses_as_the_formula_says},
    {"a sparse cache is read from disk as the formula says", a_sparse_cache_is_read_from_disk_as_the_formula_says},
    {"activations cross as the formula says", activations_cross_as_the_formula_says},
    {"the plan is what is used, to the byte", the_plan_is_what_is_used_to_the_byte},
    {"what is waited for has happened, however far ahead a lane is",
     what_is_waited_for_has_happened_however_far_ahead_a_lane_is},
    {"a GPU in trouble ends the run, or changes no bit", a_gpu_in_trouble_ends_the_run_or_changes_no_bit},
    {"nothing is left behind after success or failure", nothing_is_left_behind_after_success_or_failure},
    CU_TEST_INFO_NULL,
};
