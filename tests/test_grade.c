/* test_grade.c: the steps by which `make grade EX=N` grades the exercises of docs/EXERCISES.md, three of each. They give no
 * solution away: what they expect was found by hand, is a property, or is what Hugging Face computed. The points of each
 * step, and what it expects in words, are in scripts/exercises.txt. */
#include <sys/wait.h>
#include <unistd.h>

#include "golden.h"
#include "mini_parts.h"

static Error err;

// ---------------------------------------------------------------------------------------------------------------
// 1: plain attention, through the forward pass
// ---------------------------------------------------------------------------------------------------------------

/* The largest error of the plain forward of the first n tokens of each golden sequence (n 0: of all), against Hugging Face.
 */
static double golden_error(const char *dir, int n) {
    Golden golden = golden_read(dir);
    Checkpoint *checkpoint = checkpoint_open(dir, &err);
    double worst = 0;
    CU_ASSERT_PTR_NOT_NULL_FATAL(checkpoint);
    for (int i = 0; i < golden.count; i++) {
        const GoldenSequence *s = &golden.sequence[i];
        const int all = n ? n : s->n, first = s->n - s->rows; /* whose logits are known */
        if (n && first) continue;
        float *logits = xcalloc((size_t)all * golden.vocab, sizeof *logits);
        ASSERT_OK(reference_forward(logits, checkpoint, s->ids, all, &err));
        double e = max_norm_error(logits + (size_t)first * golden.vocab, s->logits, (size_t)(all - first) * golden.vocab);
        if (!(e <= worst)) worst = e;
        free(logits);
    }
    golden_free(&golden);
    checkpoint_close(checkpoint);
    return worst;
}

/* As in test_opt_model.c: K and V rounded to F16 cost up to 8e-4, what is wrong costs over 1e-2. */
static void attention_1_alone(void) { CU_ASSERT(golden_error("tests/golden/opt-pre", 1) <= 2e-3); }

static void attention_2_causal(void) {
    enum { N = 9, CHANGED = 4, VOCAB = 131 };
    const OptConfig config = SMALL_CONFIG(-1);
    Checkpoint *checkpoint = checkpoint_dummy(&config, 1);
    int32_t ids[N];
    float a[N * VOCAB], b[N * VOCAB];
    for (int t = 0; t < N; t++) ids[t] = (t * 37 + 2) % VOCAB;
    ASSERT_OK(reference_forward(a, checkpoint, ids, N, &err));
    ids[CHANGED] = 5;
    ASSERT_OK(reference_forward(b, checkpoint, ids, N, &err));
    CU_ASSERT(memcmp(a, b, CHANGED * VOCAB * sizeof *a) == 0);
    for (int t = CHANGED; t < N; t++) CU_ASSERT(max_norm_error(a + t * VOCAB, b + t * VOCAB, VOCAB) > 1e-3);
    checkpoint_close(checkpoint);
}

static void attention_3_hugging_face(void) {
    CU_ASSERT(golden_error("tests/golden/opt-pre", 0) <= 2e-3);
    CU_ASSERT(golden_error("tests/golden/opt-post", 0) <= 2e-3);
}

// ---------------------------------------------------------------------------------------------------------------
// 2 and 3: who may be seated
// ---------------------------------------------------------------------------------------------------------------

/* Equal prompts under the diagonal schedule, and their admission. */
static Prompt prompts[64];
static Task task;
static Policy policy;
static Admission admission;
static int next_prompt;

static void wait_in_line(int gbs, int K, int page_tokens, const int *limit) {
    policy = all_gpu(gbs, K);
    policy.schedule = SCHEDULE_DIAGONAL, policy.page_tokens = page_tokens;
    next_prompt = 0;
    admission_open(&admission, &policy, &task, &next_prompt, limit);
}

static void equal_prompts(int count, int s, int n) {
    task = (Task){.prompts = prompts, .count = count};
    for (int i = 0; i < count; i++) prompts[i] = (Prompt){.s = s, .n = n};
}

/* How many enter a sweep; before it, whoever has n tokens leaves. */
static int enter(long sweep) {
    int entered[64], topups;
    for (int e = 0; e < admission.nseats; e++) {
        const Seat *seat = &admission.seat[e];
        if (seat->prompt >= 0 && seat->since + prompts[seat->prompt].n <= sweep)
            admission_leave(&admission, e, prompts[seat->prompt].n);
    }
    return admission_next(&admission, sweep, entered, &topups);
}

static void diagonal_1_first_sweep(void) {
    equal_prompts(64, 5, 8);
    for (int gbs = 1; gbs <= 4; gbs++)
        for (int K = 1; K <= 4; K++) {
            wait_in_line(gbs, K, 4, NULL);
            CU_ASSERT_EQUAL(enter(0), gbs);
            admission_close(&admission);
        }
}

static void diagonal_2_every_n_over_K(void) {
    static const int two[] = {2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 2}, /* n = 8, K = 4: from sweep 8 on, in freed seats */
        one_and_a_half[] = {2, 0, 2, 2, 0, 2, 2, 0, 2, 2};            /* n = 6, K = 4 */
    equal_prompts(64, 5, 8);
    wait_in_line(2, 4, 4, NULL);
    for (int i = 0; i < 13; i++) CU_ASSERT_EQUAL(enter(i), two[i]);
    admission_close(&admission);
    equal_prompts(64, 5, 6);
    wait_in_line(2, 4, 4, NULL);
    for (int i = 0; i < 10; i++) CU_ASSERT_EQUAL(enter(i), one_and_a_half[i]);
    admission_close(&admission);
}

static void diagonal_3_replaced_at_once(void) {
    equal_prompts(64, 5, 8);
    wait_in_line(2, 4, 4, NULL);
    for (int i = 0; i < 7; i++) enter(i);
    CU_ASSERT_EQUAL_FATAL(admission.seated, 8);
    admission_leave(&admission, 3, 5); /* it stops early */
    CU_ASSERT_EQUAL(enter(7), 1);
    CU_ASSERT_EQUAL(admission.seated, 8);
    admission_close(&admission);
}

/* The first of `count` prompts of s and n tokens that enter sweep 0, where so many pages of 4 tokens are all. */
static int of_those_enter(int pages) {
    const int limit[NTIERS] = {pages, 0, 0};
    wait_in_line(task.count, 1, 4, pages < 0 ? NULL : limit);
    const int n = enter(0);
    admission_close(&admission);
    return n;
}

static void pages_1_no_limit(void) {
    equal_prompts(4, 5, 4); /* 5 to 8 tokens: two pages each */
    CU_ASSERT_EQUAL(of_those_enter(-1), 4);
    CU_ASSERT_EQUAL(of_those_enter(8), 4);
    CU_ASSERT_EQUAL(of_those_enter(1000), 4);
}

static void pages_2_prompts(void) {
    equal_prompts(4, 9, 1); /* three pages at once */
    CU_ASSERT_EQUAL(of_those_enter(8), 2);
    CU_ASSERT_EQUAL(of_those_enter(11), 3);
    CU_ASSERT_EQUAL(of_those_enter(2), 0);
}

static void pages_3_growth(void) {
    equal_prompts(4, 4, 2); /* one page, then two */
    CU_ASSERT_EQUAL(of_those_enter(4), 2);
    CU_ASSERT_EQUAL(of_those_enter(7), 3);
    equal_prompts(2, 4, 2);                /* pages 1 2 */
    prompts[1] = (Prompt){.s = 1, .n = 9}; /* pages 1 1 1 1 2 2 2 2 3: it grows when the other one has left */
    CU_ASSERT_EQUAL(of_those_enter(3), 2);
    CU_ASSERT_EQUAL(of_those_enter(2), 1);
}

// ---------------------------------------------------------------------------------------------------------------
// 4: error diffusion
// ---------------------------------------------------------------------------------------------------------------

static void diffusion_1_equal_items(void) {
    Diffusion half = {.share = {.5, .5, 0}}, quarter = {.share = {.25, 0, .75}}, disk = {.share = {0, 0, 1}};
    int halves[NTIERS] = {0}, quarters[NTIERS] = {0};
    for (int i = 0; i < 40; i++) {
        halves[diffuse(&half, 1)]++, quarters[diffuse(&quarter, 1)]++;
        CU_ASSERT(abs(halves[TIER_GPU] - halves[TIER_CPU]) <= 1);
        if (i % 4 == 3) CU_ASSERT_EQUAL(quarters[TIER_GPU], (i + 1) / 4);
        CU_ASSERT_EQUAL(diffuse(&disk, 1), TIER_DISK);
    }
    CU_ASSERT(halves[TIER_DISK] == 0 && quarters[TIER_CPU] == 0);
}

/* Items from 1 to 100; after each, every tier has its share of the bytes to within the largest item. */
static void diffusion_2_any_sizes(void) {
    uint64_t state = 4;
    for (int trial = 0; trial < 300; trial++) {
        double g = fabs(test_random(&state)), c = trial % 3 ? (1 - g) * fabs(test_random(&state)) : 1 - g;
        Diffusion d = {.share = {g, c, trial % 3 ? 1 - g - c : 0}};
        double held[NTIERS] = {0}, all = 0, worst = 0;
        for (int i = 0; i < 50; i++) {
            const double size = 1 + floor(99 * fabs(test_random(&state)));
            all += size, held[diffuse(&d, size)] += size;
            for (int t = 0; t < NTIERS; t++) worst = fmax(worst, fabs(held[t] - all * d.share[t]));
        }
        CU_ASSERT(worst <= 100);
        CU_ASSERT(d.share[TIER_DISK] > 0 || held[TIER_DISK] == 0);
    }
}

static void diffusion_3_opt_30b(void) {
    OptConfig config;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-30b"), 0);
    Tier(*home)[NROLES] = xcalloc(config.l, sizeof *home);
    for (int g = 0; g <= 100; g += 5)
        for (int c = 0; c + g <= 100; c += 5) {
            double bytes[NTIERS] = {0}, all = 0, largest = 2.0 * config.h1 * config.h2 + 2 * config.h2;
            place_weights(home, &config, g / 100., c / 100.);
            for (int j = 0; j < config.l; j++) {
                for (int r = 0; r < NROLES; r++) {
                    int rows, cols;
                    opt_role_shape(&config, (Role)r, &rows, &cols);
                    all += 2.0 * rows * cols, bytes[home[j][r]] += 2.0 * rows * cols;
                }
                CU_ASSERT(fabs(bytes[TIER_GPU] - all * g / 100) <= largest);
                CU_ASSERT(fabs(bytes[TIER_CPU] - all * c / 100) <= largest);
            }
        }
    free(home);
}

// ---------------------------------------------------------------------------------------------------------------
// 5 and 6: the engine, against the plain forward
// ---------------------------------------------------------------------------------------------------------------

enum { PROMPTS = 5, TOKENS = 4, VOCAB = 131, LONGEST = 16 };
static int32_t given[PROMPTS][LONGEST + TOKENS]; /* the prompts, and behind them what was generated */
static float said[PROMPTS][TOKENS][VOCAB];       /* the logits of each step */
static int ended;

static void on_logits(void *ctx, int prompt, int n, const float *logits) {
    (void)ctx;
    memcpy(said[prompt][n - 1], logits, sizeof said[prompt][n - 1]);
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *why) {
    (void)ctx, (void)reason, (void)why;
    memcpy(given[prompt] + prompts[prompt].s, tokens, n * sizeof *tokens);
    ended += n == TOKENS;
    return 0;
}

/* Five prompts under a policy: each step's logits are those of the plain forward of what has been said so far. */
static void assert_generates(Policy p) {
    static const OptConfig config = SMALL_CONFIG(-1);
    RunStats stats;
    Checkpoint *model = checkpoint_dummy(&config, 3);
    task = (Task){.prompts = prompts, .count = PROMPTS, .keep_logits = true};
    for (int i = 0; i < PROMPTS; i++) {
        prompts[i] = (Prompt){.ids = given[i], .s = 3 + i * 5 % (LONGEST - 3), .n = TOKENS, .place = i};
        for (int t = 0; t < prompts[i].s; t++) given[i][t] = (i * 31 + t * 17 + 2) % VOCAB;
    }
    memset(said, 0, sizeof said), ended = 0;
    Plan *plan = plan_make(model, &p, &task, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Device *device = host_open(plan, model, temp_dir(), &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(device);
    ASSERT_OK(weights_load(plan, model, device, &err));
    ASSERT_OK(schedule_run(plan, &task, device, &(Listener){.done = on_done, .logits = on_logits}, &stats, &err));
    CU_ASSERT_EQUAL_FATAL(ended, PROMPTS);
    for (int i = 0; i < PROMPTS; i++) {
        const int s = prompts[i].s, total = s + TOKENS - 1;
        float logits[LONGEST + TOKENS][VOCAB];
        ASSERT_OK(reference_forward(logits[0], model, given[i], total, &err));
        /* as in test_schedule.c: a difference in the last bit can flip a rounding of K and V to F16 */
        CU_ASSERT(max_norm_error(said[i][0], logits[s - 1], TOKENS * VOCAB) <= 1e-3);
    }
    device->close(device);
    plan_free(plan);
    checkpoint_close(model);
}

/* In shares of 1: weights, cache and activations on the GPU and on the CPU. */
static Policy shares(int gbs, int K, double wg, double wc, double cg, double cc, double hg, double hc) {
    Policy p = all_gpu(gbs, K);
    p.wg = wg, p.wc = wc, p.cg = cg, p.cc = cc, p.hg = hg, p.hc = hc, p.page_tokens = 4;
    return p;
}

static void sweep_1_all_on_gpu(void) {
    assert_generates(shares(5, 1, 1, 0, 1, 0, 1, 0));
    assert_generates(shares(1, 3, 1, 0, 1, 0, 1, 0));
}

static void sweep_2_weights_stream(void) {
    assert_generates(shares(5, 1, 0, 1, 1, 0, 1, 0));
    assert_generates(shares(2, 3, .3, .3, 1, 0, 1, 0));
}

static void sweep_3_all_move(void) {
    for (int K = 1; K <= 3; K++) {
        assert_generates(shares(2, K, 1, 0, 1, 0, 0, .5));
        assert_generates(shares(2, K, 1, 0, 0, .5, 1, 0));
        assert_generates(shares(2, K, 0, .5, .3, .3, .3, .3));
    }
}

static Policy delegating(int gbs, int K, double cg, double cc) {
    Policy p = shares(gbs, K, 1, 0, cg, cc, 1, 0);
    p.cpu_attention = true;
    return p;
}

static void delegation_1_cpu(void) {
    assert_generates(delegating(5, 1, 0, 1));
    assert_generates(delegating(2, 3, 0, 1));
}

static void delegation_2_gpu_and_cpu(void) {
    assert_generates(delegating(5, 1, .4, .6));
    assert_generates(delegating(2, 3, .4, .6));
}

static void delegation_3_disk(void) {
    assert_generates(delegating(5, 1, 0, 0));
    assert_generates(delegating(5, 1, .2, .4));
    assert_generates(delegating(3, 2, .2, .4));
}

// ---------------------------------------------------------------------------------------------------------------
// 7: Appendix A.3 in generation, by hand
//
// h1 = 8, h2 = 32, s = 10, n = 6, bls = 2 x 3 = 6. A layer has 8 h1^2 + 4 h1 h2 = 1536 bytes of weights; a new token of
// each sequence has 2 h1 bls = 96 bytes of activations and 4 h1 bls = 192 of K and V, and attends to 4 bls (s + n/2) h1 =
// 2496.
// ---------------------------------------------------------------------------------------------------------------

/* The row is a x - T_gen <= b. */
static void assert_row(const char *name, const double a[NFRACTIONS], double b) {
    static const OptConfig config = {.l = 4, .h1 = 8, .h2 = 32, .nh = 2, .embed = 8, .vocab = 10, .max_pos = 20};
    static const Hardware machine = {.ctog_bdw = {2, 102},
                                     .gtoc_bdw = {4, 104},
                                     .dtoc_bdw = {3, 103},
                                     .ctod_bdw = {6, 106},
                                     .mm_flops = {9, 109},
                                     .bmm_flops = {8, 108},
                                     .cpu_flops = {13, 113}};
    Lp lp;
    paper_lp(&lp, &machine, &config, &(Block){.s = 10, .n = 6, .gbs = 2, .num_gpu_batches = 3});
    int found = 0;
    for (int i = 0; i < lp.m; i++) {
        if (strcmp(lp.row[i].name, name)) continue;
        found++;
        for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT_DOUBLE_EQUAL(lp.row[i].a[f], a[f], 1e-9 * a[f]);
        CU_ASSERT_DOUBLE_EQUAL(lp.row[i].b, b, 1e-9 * fabs(b));
        CU_ASSERT(lp.row[i].a[T_PRE] == 0 && lp.row[i].a[T_GEN] == -1 && !lp.row[i].equal);
    }
    CU_ASSERT_EQUAL(found, 1);
}

static void rows_1_gpu_link(void) {
    assert_row("ctog^g", (double[NFRACTIONS]){[WC] = 768, [WD] = 768, [HC] = 48, [HD] = 48}, 0);
    assert_row("gtoc^g", (double[NFRACTIONS]){[HC] = 24, [HD] = 24}, 0);
}

static void rows_2_disk_link(void) {
    assert_row("dtoc^g", (double[NFRACTIONS]){[WD] = 512, [CD] = 832, [HD] = 32}, 0);
    assert_row("ctod^g", (double[NFRACTIONS]){[CD] = 32, [HD] = 16}, 0);
}

/* Products take 6 x 1536 flops wherever; attention is the GPU's over cg, and the CPU's over the rest. */
static void rows_3_compute(void) { assert_row("comp^g", (double[NFRACTIONS]){[CG] = 312, [CC] = 192, [CD] = 192}, -1024); }

// ---------------------------------------------------------------------------------------------------------------
// 8: the simplex method
// ---------------------------------------------------------------------------------------------------------------

static Lp new_lp(int n, const double *c) {
    Lp lp = {.n = n};
    memcpy(lp.c, c, n * sizeof *c);
    return lp;
}

static void add_row(Lp *lp, bool equal, double b, const double *a) {
    memcpy(lp_row(lp, "row", equal, b)->a, a, lp->n * sizeof *a);
}
#define C(...) ((const double[]){__VA_ARGS__})

static void assert_solved(const Lp *lp, LpVerdict verdict, double value) {
    LpAnswer answer;
    lp_solve(&answer, lp);
    CU_ASSERT_EQUAL(answer.verdict, verdict);
    if (verdict == LP_OPTIMAL) CU_ASSERT_DOUBLE_EQUAL(answer.value, value, 1e-9);
}

typedef void Check(const Lp *lp, LpVerdict verdict, double value);

static void textbook(Check *check) {
    Lp lp = new_lp(2, C(-3, -5)); /* x = 2, 6 */
    add_row(&lp, false, 4, C(1, 0)), add_row(&lp, false, 12, C(0, 2)), add_row(&lp, false, 18, C(3, 2));
    check(&lp, LP_OPTIMAL, -36);
    lp = new_lp(3, C(-5, -4, -3)); /* x = 2, 0, 1 */
    add_row(&lp, false, 5, C(2, 3, 1)), add_row(&lp, false, 11, C(4, 1, 2)), add_row(&lp, false, 8, C(3, 4, 2));
    check(&lp, LP_OPTIMAL, -13);
}

static void simplex_1_textbook(void) { textbook(assert_solved); }

static void unbounded(Check *check) {
    Lp lp = new_lp(2, C(-1, 0));
    add_row(&lp, false, 1, C(-1, 1));
    check(&lp, LP_UNBOUNDED, 0);
}

static void simplex_2_two_phases(void) {
    Lp lp = new_lp(2, C(1, 1)); /* x = 1, 1.5 */
    add_row(&lp, true, 4, C(1, 2)), add_row(&lp, false, -1, C(-1, 0));
    assert_solved(&lp, LP_OPTIMAL, 2.5);
    lp = new_lp(1, C(1));
    add_row(&lp, false, 1, C(1)), add_row(&lp, false, -2, C(-1));
    assert_solved(&lp, LP_INFEASIBLE, 0);
    unbounded(assert_solved);
    lp = new_lp(2, C(-1, 0)); /* phase 1 leaves the first row's artificial in the basis, at 0 */
    add_row(&lp, true, 0, C(-1, -1)), add_row(&lp, false, 5, C(1, 0));
    assert_solved(&lp, LP_OPTIMAL, 0);
}

/* The literature's, and more. */
static void cycles(Check *check) {
    Lp beale = new_lp(4, C(-.75, 20, -.5, 6)), kuhn = new_lp(4, C(-2, -3, 1, 12)), chvatal = new_lp(4, C(-10, 57, 9, 24));
    add_row(&beale, false, 0, C(.25, -8, -1, 9)), add_row(&beale, false, 0, C(.5, -12, -.5, 3));
    add_row(&beale, false, 1, C(0, 0, 1, 0));
    check(&beale, LP_OPTIMAL, -1.25);
    add_row(&kuhn, false, 0, C(-2, -9, 1, 9)), add_row(&kuhn, false, 0, C(1 / 3., 1, -1 / 3., -2));
    add_row(&kuhn, false, 2, C(2, 3, -1, -12));
    check(&kuhn, LP_OPTIMAL, -2);
    add_row(&chvatal, false, 0, C(.5, -5.5, -2.5, 9)), add_row(&chvatal, false, 0, C(.5, -1.5, -.5, 1));
    add_row(&chvatal, false, 1, C(1, 0, 0, 0));
    check(&chvatal, LP_OPTIMAL, -1);
    /* as in test_lp.c: here the rule for columns is Bland's, and ties between rows matter */
    Lp one = new_lp(6, C(-1, 1, 3, -4, 1, -3)), two = new_lp(5, C(3, 1, -2, -4, 6));
    add_row(&one, false, 0, C(-1, -3, 2, 2, -3, -3)), add_row(&one, false, 0, C(-2, 0, -4, -3, 3, -1));
    add_row(&one, false, 0, C(3, 1, 2, 4, -3, -2)), add_row(&one, false, 1, C(1, 1, 1, 1, 1, 1));
    check(&one, LP_OPTIMAL, -10 / 3.);
    add_row(&two, false, 0, C(1, -2, -2, 4, 9)), add_row(&two, false, 0, C(3, 1, -8, -7, 3));
    add_row(&two, false, 0, C(1, -2, 5, 8, -2)), add_row(&two, false, 0, C(0, 7, 8, -8, 0));
    add_row(&two, false, 1, C(1, 1, 1, 1, 1));
    check(&two, LP_OPTIMAL, 0);
}

/* A.3 for OPT-30B on the paper's machine: seconds for each of 144 sequences; 309.12 s a block. */
#define OPT_30B_SECONDS 2.14667022904

static void simplex_3_cycles(void) {
    cycles(assert_solved);
    Hardware t4;
    OptConfig config;
    Lp paper;
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-30b"), 0);
    paper_lp(&paper, &t4, &config, &(Block){.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3});
    assert_solved(&paper, LP_OPTIMAL, OPT_30B_SECONDS);
}

// ---------------------------------------------------------------------------------------------------------------
// 9: groups of a few bits
// ---------------------------------------------------------------------------------------------------------------

/* Packs n numbers that lie `stride` apart and takes them back, into back[0 .. n); whether all are finite. */
static bool there_and_back(float *back, const float *x, int n, size_t stride, Quant quant) {
    f16 half[512] = {0}, after[512] = {0};
    uint8_t packed[2048];
    CU_ASSERT_FATAL(n * stride <= 512 && quant_bytes(quant, n) <= sizeof packed);
    for (int i = 0; i < n; i++) half[i * stride] = f32_to_f16(x[i]);
    const bool finite = quant_pack(packed, half, stride, n, quant);
    quant_unpack(after, 1, packed, n, quant);
    for (int i = 0; i < n; i++) back[i] = f16_to_f32(after[i]);
    return finite;
}

static void quant_1_exact(void) {
    const Quant quant = {4, 64};
    float x[128], back[128];
    for (int i = 0; i < 128; i++) x[i] = i < 64 ? -2.5f : (float)(i * 7 % 16 - 3); /* a constant group; steps of 1 */
    CU_ASSERT(there_and_back(back, x, 128, 1, quant));
    for (int i = 0; i < 128; i++) CU_ASSERT_EQUAL(back[i], x[i]);
}

/* Within half a step, and what F16 rounds: of the minimum, the step and the result, at numbers below 8. */
static void quant_2_half_a_step(void) {
    uint64_t state = 9;
    for (int bits = 2; bits <= 8; bits++)
        for (int n = 1; n <= 128; n += 3) {
            float x[128], back[128], low = INFINITY, high = -INFINITY;
            for (int i = 0; i < n; i++) {
                x[i] = f16_to_f32(f32_to_f16(4 * test_random(&state) + 3));
                if (n <= 64) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
            }
            if (n > 64) low = -1, high = 7;
            CU_ASSERT(there_and_back(back, x, n, n % 3 + 1, (Quant){(uint16_t)bits, 64}));
            const double step = (high - low) / ((1 << bits) - 1);
            for (int i = 0; i < n; i++) CU_ASSERT(fabs(back[i] - x[i]) <= step * (.5 + 1. / 1024) + 8. / 2048);
        }
}

static void quant_3_hard_numbers(void) {
    const Quant quant = {4, 64};
    float x[192], back[192];
    for (int i = 0; i < 192; i++) x[i] = i == 70 ? INFINITY : i == 130 ? NAN : (float)(i % 16);
    CU_ASSERT_FALSE(there_and_back(back, x, 192, 1, quant));
    for (int i = 0; i < 192; i++) CU_ASSERT(i < 64 ? back[i] == x[i] : isnan(back[i]));
    for (int i = 0; i < 64; i++) x[i] = i % 2 ? 65504 : -65504; /* F16's ends: the step is as wide as it can be */
    CU_ASSERT(there_and_back(back, x, 64, 1, quant));
    for (int i = 0; i < 64; i++) CU_ASSERT(fabsf(back[i] - x[i]) <= 15 * 8); /* the step is rounded to a multiple of 8 */
    for (int i = 0; i < 64; i++)
        x[i] = (float)(i % 8) * 0x1p-24f; /* and its smallest numbers: it is as coarse as they are */
    CU_ASSERT(there_and_back(back, x, 64, 1, quant));
    for (int i = 0; i < 64; i++) CU_ASSERT_EQUAL(back[i], x[i]);
}

// ---------------------------------------------------------------------------------------------------------------
// 10: the tokens with the largest scores
// ---------------------------------------------------------------------------------------------------------------

enum { NH = 2, HEAD = 4, H1 = NH * HEAD, SEQS = 2, PAGE = 2, PAGES = 5, LEN = PAGE * PAGES, MOST = 8 };
static int32_t chosen[SEQS][NH][MOST];
static float weights[SEQS][NH][MOST];

/* Selects for sequences of len tokens whose score for token t and head h of sequence r is score[r][h][t]: q is (2, 0, 0, 0)
 * and k (score, 9, -9, 9). Rows of q lie apart. Pages are given backwards, and lie in turn. */
static void select_by(const float score[SEQS][NH][LEN], int len, double sparsity) {
    f16 q[SEQS][3 * H1] = {0};
    f16 k[SEQS * PAGES * PAGE][H1];
    int32_t pages[SEQS][PAGES], lens[SEQS] = {len, len};
    for (int r = 0; r < SEQS; r++)
        for (int h = 0; h < NH; h++) {
            q[r][h * HEAD] = f32_to_f16(2); /* over sqrt(HEAD), which is 2 */
            for (int p = 0; p < PAGES; p++) pages[r][p] = (PAGES - 1 - p) * SEQS + r;
            for (int t = 0; t < LEN; t++) {
                f16 *to = k[pages[r][t / PAGE] * PAGE + t % PAGE] + h * HEAD;
                to[0] = f32_to_f16(score[r][h][t]), to[1] = to[3] = f32_to_f16(9), to[2] = f32_to_f16(-9);
            }
        }
    memset(chosen, 0xff, sizeof chosen), memset(weights, 0xff, sizeof weights);
    host_select(&(Attention){.q = q[0],
                             .q_ld = 3 * H1,
                             .o_type = F32,
                             .k = k,
                             .pages = pages[0],
                             .len = lens,
                             .nseq = SEQS,
                             .max_pages = PAGES,
                             .page_tokens = PAGE,
                             .h1 = H1,
                             .nh = NH,
                             .tokens = chosen[0][0],
                             .weights = weights[0][0],
                             .sparsity = sparsity,
                             .most = MOST});
}

static void assert_chosen(int r, int h, const int *tokens, int n) {
    for (int i = 0; i < n; i++) CU_ASSERT_EQUAL(chosen[r][h][i], tokens[i]);
    for (int i = n; i < MOST; i++) CU_ASSERT_EQUAL(chosen[r][h][i], -1);
}

static const float different[SEQS][NH][LEN] = {
    {{1, 5, 2, 4, 3, 0, -1, 6, -2, -9}, {-1, -5, -2, -4, -3, 0, 1, -6, 2, 9}},
    {{.5, .25, .125, 0, -.125, -.25, -.5, -1, -2, 0}, {-2, -1, -.5, -.25, -.125, 0, .125, .25, .5, 0}}};

static void select_1_largest(void) {
    select_by(different, LEN, 1 / 3.); /* three of the nine before it, and the token itself */
    assert_chosen(0, 0, (int[]){1, 3, 7, 9}, 4);
    assert_chosen(0, 1, (int[]){5, 6, 8, 9}, 4);
    assert_chosen(1, 0, (int[]){0, 1, 2, 9}, 4);
    assert_chosen(1, 1, (int[]){6, 7, 8, 9}, 4);
    select_by(different, 5, .1); /* one of four */
    assert_chosen(0, 0, (int[]){1, 4}, 2);
    assert_chosen(0, 1, (int[]){0, 4}, 2);
    select_by(different, 1, .1);
    assert_chosen(1, 1, (int[]){0}, 1);
}

static void select_2_equal(void) {
    static const float equal[SEQS][NH][LEN] = {{{1, 2, 1, 2, 1, 2, 1, 2, 1, 2}, {0}},
                                               {{3, 1, 2, 2, 2, 2, 1, 3, 1, 0}, {-1, -1, -1, -1, 5, -1, -1, -1, -1, 7}}};
    select_by(equal, LEN, 1 / 3.);
    assert_chosen(0, 0, (int[]){1, 3, 5, 9}, 4);
    assert_chosen(0, 1, (int[]){0, 1, 2, 9}, 4);
    assert_chosen(1, 0, (int[]){0, 2, 7, 9}, 4);
    assert_chosen(1, 1, (int[]){0, 1, 4, 9}, 4);
}

/* The weights are shares of all tokens' exponentials. */
static void select_3_weights(void) {
    select_by(different, LEN, 1 / 3.);
    for (int r = 0; r < SEQS; r++)
        for (int h = 0; h < NH; h++) {
            double sum = 0;
            for (int t = 0; t < LEN; t++) sum += exp(different[r][h][t]);
            for (int i = 0; i < 4; i++) {
                CU_ASSERT_FATAL(chosen[r][h][i] >= 0 && chosen[r][h][i] < LEN);
                const double share = exp(different[r][h][chosen[r][h][i]]) / sum;
                CU_ASSERT_DOUBLE_EQUAL(weights[r][h][i], share, 1e-5 * share);
            }
        }
    static const float large[SEQS][NH][LEN] = {{{900, 1000}, {0}}, {{0}, {-1000, -1000}}}; /* they must not overflow */
    select_by(large, 2, .5);
    CU_ASSERT(weights[0][0][0] < 1e-30 && weights[0][0][1] == 1);
    CU_ASSERT_DOUBLE_EQUAL(weights[1][1][0], .5, 1e-6);
}

// ---------------------------------------------------------------------------------------------------------------
// 11: a pipeline by hand
//
// Sweeps take 16 s in prefill and 8 s in generation, through 4 layers with 2 batches of 10 and of 5 rows: a square of a
// layer and a batch is 2 s and 1 s. Each group prefills once and then generates three tokens. A row is 16 bytes.
// ---------------------------------------------------------------------------------------------------------------

static void assert_pace(Cluster cluster, int G, int blocks, double prefill_s, double token_s, double T) {
    Plan plan = {.config = {.l = 4, .h1 = 8}, .act_type = F16, .policy = {.groups = G}};
    const double pre = G * blocks, gen = 3 * pre;
    plan.work[1] = (Workload){.sweeps = pre, .prefills = 2 * pre, .prompt_rows = 20 * pre};
    plan.work[0] = (Workload){.sweeps = gen, .decodes = 2 * gen, .steps = 10 * gen};
    const Pace p = cluster_pace(&cluster, &plan, (const double[2]){8, 16});
    CU_ASSERT_DOUBLE_EQUAL(p.prefill_s, prefill_s, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(p.token_s, token_s, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(p.T, T, 1e-9);
}

static void pipeline_1_one_machine(void) {
    assert_pace((Cluster){1, 1, 1000}, 1, 1, 16, 8, 16 + 3 * 8); /* its network does not count */
    assert_pace((Cluster){1, 1, 1000}, 2, 1, 32, 16, 32 + 3 * 16);
    assert_pace((Cluster){1, 1, 1000}, 2, 3, 32, 16, 3 * (32 + 3 * 16));
}

/* Three machines begin 3/4 of a sweep and a square behind one another: 14 s, and 7 s. With two groups a token's round is
 * two hops and a sweep; with four, the machines are busy all the time. */
static void pipeline_2_fast_wire(void) {
    assert_pace((Cluster){3, 1e30, 0}, 2, 1, 2 * 14 + 32, 22, 60 + 3 * 22);
    assert_pace((Cluster){3, 1e30, 0}, 4, 1, 2 * 14 + 64, 32, 92 + 3 * 32);
    assert_pace((Cluster){3, 1e30, 0}, 4, 2, 2 * 14 + 64, 32, 92 + 64 + 6 * 32);
}

/* 160 and 80 bytes over 16 bytes/s are 10 and 5 s, and each message takes half a second more. The second batch waits for
 * the wire: 8 s in prefill, 4 s in generation. */
static void pipeline_3_slow_wire(void) {
    const double hop_pre = 12 + 2 + .5 + 10 + 8, hop_gen = 6 + 1 + .5 + 5 + 4, round = 2 * hop_gen + 8 + .5;
    assert_pace((Cluster){3, 16, .5}, 2, 1, 2 * hop_pre + 2 * 20, round, 2 * hop_pre + 2 * 20 + 3 * round);
    assert_pace((Cluster){3, 16, .5}, 8, 1, 2 * hop_pre + 8 * 20, 80, 2 * hop_pre + 8 * 20 + 3 * 80);
    assert_pace((Cluster){3, 1e30, 4}, 2, 1, 2 * 18 + 32, 2 * 11 + 12, 2 * 18 + 32 + 3 * 34);
}

// ---------------------------------------------------------------------------------------------------------------
// 12: a kernel, on the GPU or in its emulation; without either, its twin on the host
// ---------------------------------------------------------------------------------------------------------------

enum { MARK = 1 };

static void normalize_on_host(f16 *y, const f16 *x, const f16 *w, const f16 *b, int rows, int cols) {
    const size_t n = (size_t)rows * cols;
    float *floats = xcalloc(n, sizeof *floats);
    for (size_t i = 0; i < n; i++) floats[i] = f16_to_f32(x[i]);
    host_layernorm(floats, floats, w, b, rows, cols);
    for (size_t i = 0; i < n; i++) y[i] = f32_to_f16(floats[i]);
    free(floats);
}

/* y = layernorm(x) w + b on the GPU: x, y (rows, cols), w, b (cols), all F16 in one allocation in this order; in place: y
 * is x. */
static void normalize(f16 *y, const f16 *x, const f16 *w, const f16 *b, int rows, int cols, bool in_place) {
    if (!test_gpu) {
        normalize_on_host(y, x, w, b, rows, cols);
        return;
    }
    const size_t row = (size_t)cols * sizeof(f16), all = rows * row, apart = whole_lines(all);
    uint8_t *at = test_gpu->alloc(test_gpu, 4 * apart, &err), *to = in_place ? at : at + apart;
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    ASSERT_OK(test_gpu->upload(test_gpu, at, x, all, &err));
    ASSERT_OK(test_gpu->upload(test_gpu, at + 2 * apart, w, row, &err));
    ASSERT_OK(test_gpu->upload(test_gpu, at + 3 * apart, b, row, &err));
    ASSERT_OK(test_gpu->begin(test_gpu, PROJECT, MARK, &err));
    ASSERT_OK(test_gpu->layernorm(test_gpu, PROJECT, to, at, at + 2 * apart, at + 3 * apart, rows, cols, &err));
    ASSERT_OK(test_gpu->end(test_gpu, PROJECT, MARK, &err));
    ASSERT_OK(test_gpu->sync(test_gpu, PROJECT, MARK, &err));
    ASSERT_OK(test_gpu->download(test_gpu, y, to, all, &err));
    test_gpu->release(test_gpu, at);
}

/* Rows that alternate between `low` and `high`, an even number of columns: normalized they are -1 and 1 (1e-5 beside a
 * variance of 1/4 or more is lost in F16). Weight c % 3 + 1, bias c % 5. */
static void assert_normalized(int rows, int cols, float low, float high, bool in_place) {
    const size_t n = (size_t)rows * cols;
    f16 *x = xcalloc(2 * n, sizeof *x), *w = xcalloc(2 * (size_t)cols, sizeof *w), *y = x + n, *b = w + cols;
    int wrong = 0;
    for (size_t i = 0; i < n; i++) x[i] = f32_to_f16((i + i / cols) % 2 ? high : low);
    for (int c = 0; c < cols; c++) w[c] = f32_to_f16((float)(c % 3 + 1)), b[c] = f32_to_f16((float)(c % 5));
    normalize(y, x, w, b, rows, cols, in_place);
    for (size_t i = 0; i < n; i++) {
        const float sign = (i + i / cols) % 2 ? 1 : -1, want = sign * (float)(i % cols % 3 + 1) + (float)(i % cols % 5);
        wrong += !(fabsf(f16_to_f32(y[i]) - want) <= 5e-3f);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(x), free(w);
}

static void kernel_1_one_row(void) {
    assert_normalized(1, 64, 1, 3, false);
    assert_normalized(3, 256, -2, 0, false);
}

/* Widths that no block covers at once, that end within eight numbers; in place. */
static void kernel_2_all_widths(void) {
    static const int widths[] = {2, 28, 60, 1022, 5120, 12288};
    for (int i = 0; i < 6; i++) assert_normalized(2, widths[i], 1, 3, i % 2);
}

/* At 1000 a square has no digits left for a variance of 1/4. */
static void kernel_3_large_mean(void) {
    assert_normalized(2, 768, 1000, 1001, false);
    assert_normalized(2, 60, -1001, -1000, true);
}

// ---------------------------------------------------------------------------------------------------------------
// 13 and 14: in mini.c. What may end the process runs in one of its own.
// ---------------------------------------------------------------------------------------------------------------

/* What `mini WORDS` prints; NULL if it fails, or takes too long. */
static char *mini_says(const char *words) {
    enum { MOST_SECONDS = 20 };
    char text[1000], path[400], *argv[40] = {"mini"};
    int argc = 1, status;
    size_t len;
    snprintf(text, sizeof text, "%s", words), snprintf(path, sizeof path, "%s/said", temp_dir());
    for (char *word = strtok(text, "|"); word && argc < 39; word = strtok(NULL, "|")) argv[argc++] = word;
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        alarm(MOST_SECONDS);
        CHECK(freopen(path, "w", stdout) && freopen("/dev/null", "w", stderr));
        const int said = mini_main(argc, argv);
        fflush(stdout), _exit(said);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return status ? NULL : file_read(path, 1 << 20, &len, &err);
}

/* As lp.c's, of rows that the slacks satisfy. */
static void assert_minimized(const Lp *lp, LpVerdict verdict, double value) {
    double a[40], b[8], found;
    CHECK(lp->m * lp->n <= 40 && lp->m <= 8);
    for (int i = 0; i < lp->m; i++) b[i] = lp->row[i].b, memcpy(a + i * lp->n, lp->row[i].a, lp->n * sizeof *a);
    CU_ASSERT_EQUAL(mini_minimize(&found, lp->c, a, b, lp->m, lp->n), verdict == LP_OPTIMAL);
    if (verdict == LP_OPTIMAL) CU_ASSERT_DOUBLE_EQUAL(found, value, 1e-9);
}

static double farthest(const double *a, const double *b, int n) {
    double worst = 0;
    for (int i = 0; i < n; i++) worst = fmax(worst, fabs(a[i] - b[i]));
    return worst;
}

/* 2x + y + s = 8, x + 3y + u = 9, and twice the cost -3x - 2y. Variable 0 is x, 1 y, 12 s, 13 u. */
static void mini_simplex_1_pivot(void) {
    static const double begin[4][3] = {{2, 1, 8}, {1, 3, 9}, {-3, -2, 0}, {-3, -2, 0}},
                        x_for_s[4][3] = {{.5, .5, 4}, {-.5, 2.5, 5}, {1.5, -.5, 12}, {1.5, -.5, 12}},
                        y_for_u[4][3] = {{.6, -.2, 3}, {-.2, .4, 2}, {1.4, .2, 13}, {1.4, .2, 13}};
    double at[4][3];
    int basic[] = {12, 13}, other[] = {0, 1};
    memcpy(at, begin, sizeof at);
    mini_pivot(at, basic, other, 0, 0); /* x = (8 - y - s) / 2 */
    CU_ASSERT(farthest(at[0], x_for_s[0], 12) <= 1e-12);
    CU_ASSERT(basic[0] == 0 && basic[1] == 13 && other[0] == 12 && other[1] == 1);
    mini_pivot(at, basic, other, 1, 1);
    CU_ASSERT(farthest(at[0], y_for_u[0], 12) <= 1e-12);
    CU_ASSERT(basic[0] == 0 && basic[1] == 1 && other[0] == 12 && other[1] == 13);
    mini_pivot(at, basic, other, 1, 1), mini_pivot(at, basic, other, 0, 0); /* and back */
    CU_ASSERT(farthest(at[0], begin[0], 12) <= 1e-12);
}

static void mini_simplex_2_textbook(void) { textbook(assert_minimized), unbounded(assert_minimized); }

static void mini_simplex_3_cycles(void) {
    static const char opt_30b[] =
        "{\"model_type\": \"opt\", \"activation_function\": \"relu\", \"num_hidden_layers\": 48, \"hidden_size\": 7168, "
        "\"ffn_dim\": 28672, \"num_attention_heads\": 56, \"vocab_size\": 50272, \"max_position_embeddings\": 2048}";
    const char *dir = temp_dir();
    char words[700];
    cycles(assert_minimized);
    write_file(dir, "config.json", opt_30b, sizeof opt_30b - 1);
    snprintf(words, sizeof words,
             "%s|--policy|--hardware|hardware/t4.json|--prompt-len|512|--max-tokens|32|--gpu-batch-size|48|"
             "--num-gpu-batches|3",
             dir);
    char *said = mini_says(words), *T = said ? strstr(said, "\nT ") : NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(T);
    CU_ASSERT_DOUBLE_EQUAL(atof(T + 3) / 144, OPT_30B_SECONDS, 1e-6);
    free(said);
}

/* Whether each of the last TOKENS of s + TOKENS tokens is the one that the plain forward pass finds best, or one so close
 * to it that the order of sums decides: 1e-3 of the largest |logit|, as in test_mini.c. */
static bool are_best(const Checkpoint *model, const int32_t *ids, int s) {
    const int vocab = model->config.vocab;
    float *logits = xcalloc((size_t)(s + TOKENS) * vocab, sizeof *logits);
    int wrong = reference_forward(logits, model, ids, s + TOKENS - 1, &err);
    for (int t = s; t < s + TOKENS && !wrong; t++) {
        const float *row = logits + (size_t)(t - 1) * vocab;
        float best = row[0], largest = 0;
        for (int v = 0; v < vocab; v++) best = fmaxf(best, row[v]), largest = fmaxf(largest, fabsf(row[v]));
        wrong += !(best - row[ids[t]] <= 1e-3f * largest);
    }
    free(logits);
    return !wrong;
}

/* The prompts of mini, each with the tokens that it gets: those of the first run, which were right. */
static const char *const texts[PROMPTS] = {"Once upon a time", "Tom and Sue", "One", "The big brown dog", "Ben"};
static int32_t right[PROMPTS][TOKENS];

/* Reads "tokens": [1, 2, ...]; returns what is behind it. */
static const char *read_tokens(int32_t *to, const char *at, int vocab) {
    CU_ASSERT_PTR_NOT_NULL_FATAL(at = strstr(at, "\"tokens\": ["));
    at = strchr(at, '[');
    for (int t = 0; t < TOKENS; t++) {
        CU_ASSERT_FATAL(*at == (t ? ',' : '['));
        to[t] = (int32_t)strtol(at + 1, (char **)&at, 10);
        CU_ASSERT_FATAL(to[t] > 0 && to[t] < vocab);
    }
    return at;
}

/* The prompts by mini with those flags. */
static void assert_mini_generates(const Checkpoint *model, const Tokenizer *tokenizer, const char *flags) {
    char words[700];
    int used = snprintf(words, sizeof words, "models/opt-tiny|--json|--max-tokens|%d|%s", TOKENS, flags);
    for (int i = 0; i < PROMPTS; i++) used += snprintf(words + used, sizeof words - used, "|%s", texts[i]);
    char *said = mini_says(words);
    CU_ASSERT_PTR_NOT_NULL_FATAL(said);
    const char *at = said;
    for (int i = 0; i < PROMPTS; i++) {
        int32_t *text, ids[LONGEST + TOKENS] = {model->config.eos}, chosen[TOKENS];
        at = read_tokens(chosen, at, model->config.vocab);
        if (!memcmp(chosen, right[i], sizeof chosen)) continue;
        const int n = tokenizer_encode(tokenizer, texts[i], strlen(texts[i]), &text, &err);
        CU_ASSERT_FATAL(n > 0 && n < LONGEST);
        memcpy(ids + 1, text, n * sizeof *ids), memcpy(ids + 1 + n, chosen, sizeof chosen), free(text);
        CU_ASSERT_FATAL(are_best(model, ids, 1 + n));
        memcpy(right[i], chosen, sizeof chosen);
    }
    free(said);
}

/* With overlapping and without. */
static void assert_mini_generates_in_blocks(const char *percent, const char *const *blocks, int n) {
    Checkpoint *model = checkpoint_open("models/opt-tiny", &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(model);
    Tokenizer *tokenizer = tokenizer_open("models/opt-tiny", model->config.vocab, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tokenizer);
    for (int b = 0; b < 2 * n; b++) {
        char flags[200];
        snprintf(flags, sizeof flags, "%s--percent|%s|--gpu-batch-size|%s", b % 2 ? "--no-overlap|" : "", percent,
                 blocks[b / 2]);
        assert_mini_generates(model, tokenizer, flags);
    }
    tokenizer_close(tokenizer), checkpoint_close(model);
}

static void mini_loop_1_one_batch(void) {
    static const char *const blocks[] = {"5|--num-gpu-batches|1", "2|--num-gpu-batches|1"};
    assert_mini_generates_in_blocks("100|0|100|0|100|0", blocks, 2);
}

/* One batch of all, three in flight, and two, of which the second block has one. */
static const char *const many[] = {"5|--num-gpu-batches|1", "2|--num-gpu-batches|3", "2|--num-gpu-batches|2"};

static void mini_loop_2_cache_and_activations(void) {
    assert_mini_generates_in_blocks("100|0|0|100|0|100", many, 3);
    assert_mini_generates_in_blocks("100|0|30|30|30|30", many, 3);
}

static void mini_loop_3_weights(void) {
    assert_mini_generates_in_blocks("20|40|100|0|100|0", many, 3);
    assert_mini_generates_in_blocks("0|0|0|0|0|0", many, 3);
}

CU_TestInfo tests[] = {
    {"a token alone attends to itself", attention_1_alone},
    {"no token sees the ones behind it", attention_2_causal},
    {"all logits are Hugging Face's", attention_3_hugging_face},
    {"the first sweep has one GPU batch", diagonal_1_first_sweep},
    {"a GPU batch enters every n/K sweeps", diagonal_2_every_n_over_K},
    {"whoever stops early is replaced at once", diagonal_3_replaced_at_once},
    {"without a limit, and up to it, all enter", pages_1_no_limit},
    {"a prompt waits for the pages of its prefill", pages_2_prompts},
    {"a prompt enters when its pages fit in every sweep", pages_3_growth},
    {"equal items meet the shares exactly", diffusion_1_equal_items},
    {"items of any size meet the shares to within one", diffusion_2_any_sizes},
    {"the weights of OPT-30B meet every placement", diffusion_3_opt_30b},
    {"with everything on the GPU the logits are right", sweep_1_all_on_gpu},
    {"the weights may stream", sweep_2_weights_stream},
    {"cache and activations may rest anywhere", sweep_3_all_move},
    {"the CPU attends to a cache on the CPU", delegation_1_cpu},
    {"GPU and CPU attend to their parts of a batch", delegation_2_gpu_and_cpu},
    {"the CPU attends to a cache on disk", delegation_3_disk},
    {"the rows of the link between CPU and GPU", rows_1_gpu_link},
    {"the rows of the disk", rows_2_disk_link},
    {"the row of the processors", rows_3_compute},
    {"a textbook's programs are solved", simplex_1_textbook},
    {"both phases end with the right verdict", simplex_2_two_phases},
    {"the known cycles end", simplex_3_cycles},
    {"numbers on the grid come back exactly", quant_1_exact},
    {"all numbers come back within half a step", quant_2_half_a_step},
    {"the ends of F16 and numbers that are not finite", quant_3_hard_numbers},
    {"the largest scores are chosen, and the token itself", select_1_largest},
    {"of equal scores the earlier are chosen", select_2_equal},
    {"weights are shares of all tokens", select_3_weights},
    {"one machine takes its sweeps", pipeline_1_one_machine},
    {"machines fill and run", pipeline_2_fast_wire},
    {"a slow wire holds them up", pipeline_3_slow_wire},
    {"a row is normalized", kernel_1_one_row},
    {"rows of all widths, in place too", kernel_2_all_widths},
    {"a large mean does not blur the variance", kernel_3_large_mean},
    {"mini.c: a pivot exchanges two variables", mini_simplex_1_pivot},
    {"mini.c: a textbook's programs are minimized", mini_simplex_2_textbook},
    {"mini.c: the known cycles end, and A.3 has its optimum", mini_simplex_3_cycles},
    {"mini.c: a batch alone on the GPU gets the right tokens", mini_loop_1_one_batch},
    {"mini.c: cache and activations may rest anywhere", mini_loop_2_cache_and_activations},
    {"mini.c: the weights may stream", mini_loop_3_weights},
    CU_TEST_INFO_NULL,
};
