/* test_policy.c: Appendix A.3 against values by hand, and what must hold of a best placement whatever the machine; the
 * model `runtime` against values by hand and against the sim, whose clock is no one's watch. */
#include "tests.h"

// ---------------------------------------------------------------------------------------------------------------
// Appendix A.3
// ---------------------------------------------------------------------------------------------------------------

/* Every rate is another round number, so that a wrong one shows. [0]: generation, [1]: prefill. */
static const Hardware round_machine = {.name = "round",
                                       .gmem = 16e9,
                                       .cmem = 200e9,
                                       .nmem = 1500e9,
                                       .ctog_bdw = {12e9, 10e9},
                                       .gtoc_bdw = {6e9, 5e9},
                                       .dtoc_bdw = {2e9, 1.6e9},
                                       .ctod_bdw = {1e9, 0.8e9},
                                       .mm_flops = {4e12, 20e12},
                                       .bmm_flops = {0.3e12, 8e12},
                                       .cpu_flops = {0.05e12, 0.04e12}};
static const Block block_30b = {.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3};

// clang-format off
/* OPT-30B: l = 48, h1 = 7168, h2 = 28672, nh = 56; s = 512, n = 32, gbs = 48, bls = 144. In bytes:
 *     weights of a layer     8 h1^2 + 4 h1 h2      = 24 x 7168^2                       =   1233125376
 *     weights, all           x 48                                                      =  59190018048
 *     activations^p          2 s h1 bls            = 2 x 512 x 7168 x 144              =   1056964608
 *     of a GPU batch         / 3                                                       =    352321536
 *     activations^g          2 h1 bls              = 2 x 7168 x 144                    =      2064384
 *     cache^p                4 (s + 1) h1 bls      = 4 x 513 x 7168 x 144              =   2118057984
 *     cache read^g           4 bls (s + n/2) h1    = 4 x 144 x 528 x 7168              =   2179989504
 *     cache of one token^g   4 bls h1              = 4 x 144 x 7168                    =      4128768
 *     cache, all             4 (s + n) h1 bls l    = 4 x 544 x 7168 x 144 x 48         = 107810390016
 * in flops:
 *     linear^p               bls s (8 h1^2 + 4 h1 h2) = 144 x 512 x 1233125376         = 90915867721728
 *     attention^p            4 bls s^2 h1          = 4 x 144 x 262144 x 7168           =  1082331758592
 *     linear^g               bls (8 h1^2 + 4 h1 h2) = 144 x 1233125376                 =   177570054144
 *     attention^g            as the cache read                                         =     2179989504
 * working memory of a GPU batch, in bytes:
 *     qkv^p                  8 s h1 gbs                                                =   1409286144
 *     att^p                  gbs (4 s h1 + 2 nh s^2) = 48 (14680064 + 29360128)        =   2113929216
 *     embed^p                4 s h1 gbs                                                =    704643072
 *     mlp^p                  2 gbs s (h1 + h2)     = 96 x 512 x 35840                  =   1761607680
 *     kv^g                   8 h1 gbs                                                  =      2752512
 *     att^g                  gbs (2 h1 + 2 x 544 h1 + 2 nh 544) = 48 (14336 + 7798784 + 60928) = 377954304
 *     embed^g                4 h1 gbs                                                  =      1376256
 *     mlp^g                  2 gbs (h1 + h2)                                           =      3440640
 *     on the CPU^g, of hd    2 x 2 h1 gbs                                              =      1376256
 *     of cd                  2 x 4 (s + n) h1 gbs                                      =   1497366528
 *     always                 2 nh (s + n) gbs + 2 h1 gbs = 2924544 + 688128            =      3612672 */
#define W 1233125376.
#define W_ALL 59190018048.
#define C_ALL 107810390016.
#define H_P 1056964608.
#define H_G 2064384.
#define H_GBS 352321536.
typedef struct {
    const char *name;
    double a[NVARS], b;
} Row;
#define GPU_P(name, cg, one) \
    { "gpu_peak^p with " name, {W_ALL - 2 * W, 0, 0, C_ALL + cg, 0, 0, H_P - H_GBS}, 16e9 - 2 * W - H_GBS - one }
#define GPU_G(name, cg, one) \
    { "gpu_peak^g with " name, {W_ALL - 2 * W, 0, 0, C_ALL + cg, 0, 0, H_G - H_GBS}, 16e9 - 2 * W - H_GBS - one }
static const Row rows_30b[NROWS] = {
    /* wg wc wd cg cc cd hg hc hd T_pre T_gen */
    {"ctog^p", {0, W / 10e9, W / 10e9, 0, 0, 0, 0, H_P / 10e9, H_P / 10e9, -1, 0}, 0},
    {"gtoc^p", {0, 0, 0, 0, 2118057984 / 5e9, 2118057984 / 5e9, 0, H_P / 5e9, H_P / 5e9, -1, 0}, 0},
    {"dtoc^p", {0, 0, W / 1.6e9, 0, 0, 0, 0, 0, H_P / 1.6e9, -1, 0}, 0},
    {"ctod^p", {0, 0, 0, 0, 0, 2118057984 / .8e9, 0, 0, H_P / .8e9, -1, 0}, 0},
    {"comp^p", {0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0}, -(90915867721728 / 20e12 + 1082331758592 / 8e12)},
    {"ctog^g", {0, W / 12e9, W / 12e9, 0, 0, 0, 0, H_G / 12e9, H_G / 12e9, 0, -1}, 0},
    {"gtoc^g", {0, 0, 0, 0, 0, 0, 0, H_G / 6e9, H_G / 6e9, 0, -1}, 0},
    {"dtoc^g", {0, 0, W / 2e9, 0, 0, 2179989504 / 2e9, 0, 0, H_G / 2e9, 0, -1}, 0},
    {"ctod^g", {0, 0, 0, 0, 0, 4128768 / 1e9, 0, 0, H_G / 1e9, 0, -1}, 0},
    {"comp^g",
     {0, 0, 0, 2179989504 / .3e12, 2179989504 / .05e12, 2179989504 / .05e12, 0, 0, 0, 0, -1},
     -177570054144 / 4e12},
    GPU_P("qkv^p", 0, 1409286144),
    GPU_P("att_1^p", 2113929216, 0),
    GPU_P("att_2^p", 2113929216, 0),
    GPU_P("embed^p", 0, 704643072),
    GPU_P("mlp_1^p", 0, 1761607680),
    GPU_P("mlp_2^p", 0, 1761607680),
    GPU_G("kv^g", 0, 2752512),
    GPU_G("att_1^g", 377954304, 0),
    GPU_G("att_2^g", 377954304, 0),
    GPU_G("embed^g", 0, 1376256),
    GPU_G("mlp_1^g", 0, 3440640),
    GPU_G("mlp_2^g", 0, 3440640),
    {"cpu_peak^p", {-W, W_ALL, 0, 0, C_ALL, 0, -H_GBS, H_P}, 200e9 - W - H_GBS},
    {"cpu_peak^g", {0, W_ALL, W, 0, C_ALL, 1497366528, 0, H_G, 1376256}, 200e9 - 3612672},
    {"nvme_peak", {0, 0, W_ALL, 0, 0, C_ALL, 0, 0, H_P}, 1500e9},
    {"wg + wc + wd", {1, 1, 1}, 1},
    {"cg + cc + cd", {0, 0, 0, 1, 1, 1}, 1},
    {"hg + hc + hd", {0, 0, 0, 0, 0, 0, 1, 1, 1}, 1},
};
// clang-format on

static bool near(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); } /* a few roundings */

static void the_rows_of_opt_30b_are_those_of_a_3_by_hand(void) {
    static Lp lp;
    OptConfig config = opt_named("opt-30b");
    paper_lp(&lp, &round_machine, &config, &block_30b);
    CU_ASSERT_EQUAL(lp.n, NVARS);
    CU_ASSERT_EQUAL_FATAL(lp.m, NROWS);
    for (int i = 0; i < NROWS; i++) {
        const LpRow *row = &lp.row[i];
        CU_ASSERT_STRING_EQUAL(row->name, rows_30b[i].name);
        CU_ASSERT_EQUAL(row->equal, i >= FRACTION_ROWS);
        bool same = near(row->b, rows_30b[i].b);
        for (int j = 0; j < NVARS; j++) same = same && near(row->a[j], rows_30b[i].a[j]);
        if (!same) fprintf(stderr, "\n    %s differs\n", row->name);
        CU_ASSERT(same);
    }
    for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT_EQUAL(lp.c[f], 0);
    CU_ASSERT(near(lp.c[T_PRE], 48 / 144.) && near(lp.c[T_GEN], 31 * 48 / 144.)); /* T / bls */
}

/* Where the GPU has room for all, nothing moves, and T is what it computes: per layer 90915867721728 / 20e12 +
 * 1082331758592 / 8e12 = 4.681084855910 s in prefill, 177570054144 / 4e12 + 2179989504 / 0.3e12 = 0.051659145216 s in
 * generation. */
static void a_gpu_with_room_for_all_gets_all(void) {
    Error err;
    Cost cost;
    Hardware large = round_machine;
    OptConfig config = opt_named("opt-30b");
    large.gmem = 1e12;
    ASSERT_OK(paper_cost(&cost, &large, &config, &block_30b, &err));
    CU_ASSERT(fabs(cost.T_pre - 4.681084855910) < 1e-11 && fabs(cost.T_gen - .051659145216) < 1e-12);
    CU_ASSERT(near(cost.T, 48 * cost.T_pre + 31 * 48 * cost.T_gen));
    CU_ASSERT(near(cost.throughput, 144 * 32 / cost.T));
    CU_ASSERT(cost.fraction[CG] == 1);
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "comp^p");
    CU_ASSERT_PTR_NOT_NULL(strstr(cost.slowest[0], "comp^g"));
    CU_ASSERT(!cost.full[TIER_GPU][0] && !cost.full[TIER_CPU][0] && !cost.full[TIER_DISK][0]);
    CU_ASSERT(cost.peak[TIER_GPU] > C_ALL && cost.peak[TIER_GPU] < 1e12);
}

/* By hand: nothing costs time but a slow disk, so that T_gen is W wd / 1e6. The GPU has room for its working memory only,
 * the CPU for 40e9 bytes, of which prefill takes W_ALL wc + W (1 - wg) with wg = 0, more than generation. The cache and the
 * activations are those of one token or two. */
static void what_fits_nowhere_else_is_read_from_the_disk(void) {
    Error err;
    Cost cost;
    Hardware h = round_machine;
    OptConfig config = opt_named("opt-30b");
    Block one = {.s = 1, .n = 2, .gbs = 1, .num_gpu_batches = 1};
    h.gmem = 2 * W + 1e6, h.cmem = 40e9;
    for (int p = 0; p < 2; p++)
        h.ctog_bdw[p] = h.gtoc_bdw[p] = h.ctod_bdw[p] = h.mm_flops[p] = h.bmm_flops[p] = h.cpu_flops[p] = 1e18,
        h.dtoc_bdw[p] = 1e6;
    ASSERT_OK(paper_cost(&cost, &h, &config, &one, &err));
    double wd = 1 - (40e9 - W) / W_ALL;
    CU_ASSERT(fabs(cost.fraction[WD] - wd) < 1e-4);
    CU_ASSERT(fabs(cost.T_gen / (W * wd / 1e6) - 1) < 1e-3);
    CU_ASSERT_STRING_EQUAL(cost.slowest[0], "dtoc^g");
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "dtoc^p");
    CU_ASSERT_STRING_EQUAL(cost.full[TIER_CPU], "cpu_peak^p");
    CU_ASSERT_PTR_NOT_NULL(strstr(cost.full[TIER_GPU], "gpu_peak^p with mlp_1^p"));
}

// ---------------------------------------------------------------------------------------------------------------
// Any machine
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    OptConfig config;
    Hardware hardware;
    Block block;
} Case;

/* A machine on which the model is a squeeze, mostly. */
static Case random_case(uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    Case c = {.config = opt_named(names[(int)test_spread(seed, 1, 9.99) - 1]), .hardware = {.name = "random"}};
    double weights = 24. * c.config.h1 * c.config.h1 * c.config.l;
    Hardware *h = &c.hardware;
    c.block.s = (int)test_spread(seed, 1, 1500), c.block.n = (int)test_spread(seed, 1, 500);
    c.block.gbs = (int)test_spread(seed, 1, 200), c.block.num_gpu_batches = (int)test_spread(seed, 1, 20);
    h->gmem = weights * test_spread(seed, .02, 3);
    h->cmem = weights * test_spread(seed, .05, 10);
    h->nmem = weights * test_spread(seed, .1, 100);
    for (int p = 0; p < 2; p++) {
        h->ctog_bdw[p] = test_spread(seed, 1e9, 6e10), h->gtoc_bdw[p] = test_spread(seed, 1e9, 6e10);
        h->dtoc_bdw[p] = test_spread(seed, 1e8, 1e10), h->ctod_bdw[p] = test_spread(seed, 5e7, 1e10);
        h->mm_flops[p] = test_spread(seed, 1e12, 1e15), h->bmm_flops[p] = test_spread(seed, 1e10, 1e14);
        h->cpu_flops[p] = test_spread(seed, 1e9, 1e12);
    }
    return c;
}

/* T of a placement by the rows, infinite where some tier is too small. */
static double rows_T(const Lp *lp, const Case *c, const double *fraction) {
    double x[NVARS] = {0}, T[2] = {0, 0};
    memcpy(x, fraction, NFRACTIONS * sizeof *x);
    for (int i = 0; i < FRACTION_ROWS; i++) {
        double excess = lp_excess(&lp->row[i], x, NVARS);
        if (i < GPU_ROWS)
            T[i < T_GEN_ROWS] = fmax(T[i < T_GEN_ROWS], excess);
        else if (excess > 1e-9 * fabs(lp->row[i].b))
            return INFINITY;
    }
    return (T[1] + T[0] * (c->block.n - 1)) * c->config.l;
}

/* Three fractions that add up to 1, often at a corner. */
static void random_shares(double share[3], uint64_t *seed) {
    double sum = 0;
    for (int i = 0; i < 3; i++) share[i] = fmax(test_random(seed), 1e-9), sum += share[i];
    for (int i = 0; i < 3; i++) share[i] /= sum;
}

static void the_best_placement_is_one_and_no_other_is_faster(void) {
    uint64_t seed = 1;
    static Lp lp;
    int fits = 0, tried = 0;
    for (int trial = 0; trial < 400; trial++) {
        Case c = random_case(&seed);
        Cost cost = {.T = INFINITY};
        Error err;
        double other[NFRACTIONS];
        bool ok = paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) == 0;
        paper_lp(&lp, &c.hardware, &c.config, &c.block);
        if (ok) {
            for (int f = 0; f < NFRACTIONS; f += 3)
                CU_ASSERT(fabs(cost.fraction[f] + cost.fraction[f + 1] + cost.fraction[f + 2] - 1) < 1e-9);
            for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT(cost.fraction[f] >= 0);
            CU_ASSERT(fabs(rows_T(&lp, &c, cost.fraction) / cost.T - 1) < 1e-9);
            CU_ASSERT(cost.slowest[0][0] && cost.slowest[1][0]);
        }
        for (int i = 0; i < 200; i++) {
            for (int f = 0; f < NFRACTIONS; f += 3) random_shares(other + f, &seed);
            double T = rows_T(&lp, &c, other);
            CU_ASSERT(T == INFINITY || (ok && T >= cost.T * (1 - 1e-9)));
            tried += T < INFINITY;
        }
        fits += ok;
    }
    CU_ASSERT(fits > 100 && fits < 390 && tried > 1000);
}

static void more_memory_or_bandwidth_is_never_worse(void) {
    uint64_t seed = 2;
    int better = 0;
    for (int trial = 0; trial < 300; trial++) {
        Case c = random_case(&seed);
        Cost cost, more;
        Error err;
        int before = paper_cost(&cost, &c.hardware, &c.config, &c.block, &err);
        for (int i = 0; i < 17; i++) {
            Hardware h = c.hardware;
            double *const rate[] = {h.ctog_bdw, h.gtoc_bdw, h.dtoc_bdw, h.ctod_bdw, h.mm_flops, h.bmm_flops, h.cpu_flops};
            *(i == 0 ? &h.gmem : i == 1 ? &h.cmem : i == 2 ? &h.nmem : &rate[(i - 3) / 2][(i - 3) % 2]) *= 1.5;
            int after = paper_cost(&more, &h, &c.config, &c.block, &err);
            CU_ASSERT(before != 0 || after == 0);
            if (before != 0) continue;
            CU_ASSERT(more.T <= cost.T * (1 + 1e-9));
            better += more.T < cost.T * (1 - 1e-6);
        }
    }
    CU_ASSERT(better > 300);
}

/* The bytes that the message says a tier lacks. */
static double lacks(const char *text, const char *tier) {
    char find[40];
    double gib = 0;
    snprintf(find, sizeof find, " %s lacks ", tier);
    const char *at = strstr(text, find);
    return at && sscanf(at + strlen(find), "%lf GiB", &gib) == 1 ? gib * 0x1p30 : 0;
}

static void who_cannot_hold_it_is_named_with_what_is_enough(void) {
    uint64_t seed = 3;
    int count[NTIERS] = {0};
    for (int trial = 0; trial < 600; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err = {0, ""};
        if (paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) == 0) continue;
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "no placement fits: the "));
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--gpu-batch-size"));
        double *const mem[] = {&c.hardware.gmem, &c.hardware.cmem, &c.hardware.nmem};
        for (int t = 0; t < NTIERS; t++) count[t] += lacks(err.text, tier_name[t]) > 0;
        for (int t = 0; t < NTIERS; t++) *mem[t] += lacks(err.text, tier_name[t]);
        ASSERT_OK(paper_cost(&cost, &c.hardware, &c.config, &c.block, &err));
    }
    CU_ASSERT(count[TIER_GPU] > 50 && count[TIER_CPU] > 0 && count[TIER_DISK] > 50);
}

/* By hand, OPT-30B: whatever is placed where, the GPU works on 2 W - wg 2 W + wg W_ALL + H_GBS + 1761607680 (mlp) at least,
 * so 4580179968 bytes with wg = hg = 0: of 4 GiB = 4294967296, 285212672 are missing, 0.265625 GiB. */
static void a_gpu_too_small_for_its_working_memory_is_named(void) {
    Hardware h = round_machine;
    OptConfig config = opt_named("opt-30b");
    Cost cost;
    Error err = {0, ""};
    h.gmem = 4294967296;
    CU_ASSERT_EQUAL(paper_cost(&cost, &h, &config, &block_30b, &err), -1);
    CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(err.text, "opt-30b, 512 + 32 tokens, block of 48 x 3: no placement fits: the GPU lacks 0.27 GiB; "));
}

/* With n = 1 the LP does not pay for T_gen, and yet it is the largest of its terms. */
static void one_token_out_costs_no_generation(void) {
    uint64_t seed = 5;
    static Lp lp;
    for (int trial = 0; trial < 100; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err;
        double x[NVARS] = {0}, T_gen = 0;
        c.block.n = 1;
        if (paper_cost(&cost, &c.hardware, &c.config, &c.block, &err) != 0) continue;
        paper_lp(&lp, &c.hardware, &c.config, &c.block);
        memcpy(x, cost.fraction, sizeof cost.fraction);
        for (int i = T_GEN_ROWS; i < GPU_ROWS; i++) T_gen = fmax(T_gen, lp_excess(&lp.row[i], x, NVARS));
        CU_ASSERT(near(cost.T, c.config.l * cost.T_pre));
        CU_ASSERT(near(cost.T_gen, T_gen));
    }
}

/* Rates from low to high. An answer, or one line, and no nonsense; returns the share of those that are lost in rounding. */
static double lost_share(double low, double high, uint64_t seed) {
    int lost = 0, trials = 1000;
    for (int trial = 0; trial < trials; trial++) {
        Case c = random_case(&seed);
        Cost cost;
        Error err = {0, ""};
        Hardware *h = &c.hardware;
        double *const rate[] = {h->ctog_bdw, h->gtoc_bdw,  h->dtoc_bdw, h->ctod_bdw,
                                h->mm_flops, h->bmm_flops, h->cpu_flops};
        for (int i = 0; i < 7; i++)
            for (int p = 0; p < 2; p++) rate[i][p] = test_spread(&seed, low, high);
        int status = paper_cost(&cost, h, &c.config, &c.block, &err);
        CU_ASSERT(status == 0 ? isfinite(cost.T) && cost.T > 0 && isfinite(cost.throughput)
                              : (err.code == EXIT_USAGE || err.code == EXIT_FAILED) && err.text[0]);
        lost += status != 0 && err.code == EXIT_FAILED;
    }
    return (double)lost / trials;
}

static void impossible_machines_get_an_answer_or_a_line(void) {
    CU_ASSERT(lost_share(1e8, 1e16, 6) < .005);
    CU_ASSERT(lost_share(1e6, 1e18, 7) < .03);
    lost_share(1e-9, 1e30, 8); /* the bounds of a hardware file */
}

// ---------------------------------------------------------------------------------------------------------------
// The model `runtime`: one task under one policy
// ---------------------------------------------------------------------------------------------------------------

static const double roomy[NTIERS] = {1e18, 1e18, 1e18};

/* A task, its plan, and the plan that runtime_lp starts from. */
typedef struct {
    Hardware hardware;
    Checkpoint *checkpoint;
    Task task;
    Plan *plan, *corner;
} Priced;

static float temperature; /* of the tasks */

static void price_open(Priced *r, const OptConfig *config, const Policy *policy, const Hardware *hardware, int count, int s,
                     int n) {
    Error err;
    Policy corner = *policy;
    Type act = hardware->shared_cores ? F32 : F16;
    *r = (Priced){.hardware = *hardware, .checkpoint = checkpoint_dummy(config, 0)};
    r->task = equal_task(count, s, n);
    r->task.sampling.temperature = temperature;
    corner.wg = corner.cg = corner.hg = 0, corner.wc = corner.cc = corner.hc = 1, corner.delegated = false;
    r->plan = plan_make(r->checkpoint, policy, &r->task, act, &err);
    r->corner = plan_make(r->checkpoint, &corner, &r->task, act, &err);
    CU_ASSERT_FATAL(r->plan && r->corner);
}

static void price_close(Priced *r) {
    plan_free(r->plan), plan_free(r->corner);
    free_task(&r->task);
    checkpoint_close(r->checkpoint);
}

/* The seconds of all sweeps at a point of the LP, without the small price of what others hide. */
static double all_sweeps(const Priced *r, const double *x) {
    double sweep_s[2];
    runtime_sweeps(sweep_s, x, r->plan->config.l);
    return r->plan->work[0].sweeps * sweep_s[0] + r->plan->work[1].sweeps * sweep_s[1];
}

static Lp *rig_lp(const Priced *r, const double capacity[NTIERS]) {
    static Lp lp;
    runtime_lp(&lp, &r->hardware, r->checkpoint, r->corner, r->plan->policy.delegated, capacity);
    return &lp;
}

static Cost expected(const Priced *r) {
    Cost cost;
    runtime_cost(&cost, rig_lp(r, roomy), r->plan);
    return cost;
}

static double layer_bytes(const OptConfig *config) {
    double sum = 0;
    for (int role = 0; role < NROLES; role++) {
        int rows, cols;
        opt_role_shape(config, (Role)role, &rows, &cols);
        sum += 2. * rows * cols;
    }
    return sum;
}

enum { COUNT = 24, S = 100, N = 9, SWEEPS = 2 * N }; /* two blocks of 4 x 3 */

static Cost expected_of(const char *model, const Policy *policy, const Hardware *hardware) {
    Priced r;
    OptConfig config = opt_named(model);
    price_open(&r, &config, policy, hardware, COUNT, S, N);
    Cost cost = expected(&r);
    price_close(&r);
    return cost;
}

// ---------------------------------------------------------------------------------------------------------------
// By hand
// ---------------------------------------------------------------------------------------------------------------

static bool close_to(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* Only a link takes time. The weights cross it once a sweep, however many batches there are; with the row schedule, once
 * for each batch. From the disk they cross both links, side by side, and the slower one counts. */
static void where_weights_stream_time_is_their_bytes_over_the_link(void) {
    OptConfig config = opt_named("opt-125m");
    double bytes = 12 * layer_bytes(&config);
    for (int row = 0; row < 2; row++)
        for (int disk = 0; disk < 2; disk++) {
            Hardware h = test_fast_machine();
            Policy p = all_gpu(4, 3);
            p.wg = 0, p.wc = !disk, p.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
            h.ctog_bdw[0] = h.ctog_bdw[1] = 1e9;
            if (disk) h.dtoc_bdw[0] = h.dtoc_bdw[1] = 2e8;
            Cost cost = expected_of("opt-125m", &p, &h);
            double sweeps = row ? 6. * N : SWEEPS, seconds = sweeps * bytes / (disk ? 2e8 : 1e9);
            CU_ASSERT(close_to(cost.T, seconds));
            CU_ASSERT(close_to(cost.T_gen, seconds / sweeps / 12) && close_to(cost.T_pre, cost.T_gen));
            CU_ASSERT(close_to(cost.throughput, COUNT * N / seconds));
            CU_ASSERT_STRING_EQUAL(cost.slowest[0], disk ? "dtoc^g" : "ctog^g");
            CU_ASSERT_STRING_EQUAL(cost.slowest[1], disk ? "dtoc^p" : "ctog^p");
        }
}

/* Half of the weights, at twice the rate in prefill; the table streams as well where it is on the CPU: behind the last
 * layer of every sweep, with rows of new tokens. */
static void what_streams_is_what_is_not_on_the_gpu(void) {
    OptConfig config = opt_named("opt-1.3b");
    Hardware h = test_fast_machine();
    Policy p = all_gpu(4, 3);
    p.wg = .5, p.wc = .5;
    h.ctog_bdw[0] = 1e9, h.ctog_bdw[1] = 2e9;
    double half = 24 * layer_bytes(&config) / 2, pre = 2 * half / 2e9, gen = (SWEEPS - 2) * half / 1e9;
    CU_ASSERT_DOUBLE_EQUAL(expected_of("opt-1.3b", &p, &h).T / (pre + gen), 1, .02); /* whole tensors: nearly half */
    p = all_gpu(4, 3), p.table_home = TIER_CPU;
    double table = 2. * config.vocab * config.h1, row = 2. * config.h1;
    double seconds = (2 * table + COUNT * S * row) / 2e9 + ((SWEEPS - 2) * table + COUNT * (N - 1) * row) / 1e9;
    CU_ASSERT(close_to(expected_of("opt-1.3b", &p, &h).T, seconds));
}

/* Everything is on the GPU, and only its products take time: 2 flops for a weight of a layer and a token, and for the
 * head's and a sequence. */
static void where_products_count_time_is_the_flops_of_the_model(void) {
    OptConfig c = opt_named("opt-125m");
    double layers = 2. * 12 * (4. * c.h1 * c.h1 + 2. * c.h1 * c.h2), head = 2. * c.vocab * c.h1;
    Hardware h = test_fast_machine();
    Policy p = all_gpu(4, 3);
    h.mm_flops[0] = 1e12, h.mm_flops[1] = 5e12;
    Cost cost = expected_of("opt-125m", &p, &h);
    CU_ASSERT(close_to(cost.T, COUNT * (S * layers + head) / 5e12 + COUNT * (N - 1) * (layers + head) / 1e12));
    CU_ASSERT(!strcmp(cost.slowest[0], "gpu^g") && !strcmp(cost.slowest[1], "gpu^p"));
}

/* The tokens that the new ones attend to: s + 1, ..., s + n - 1 of every sequence, 4 h1 flops each in every layer. */
static void where_attention_counts_time_is_the_tokens_it_sees(void) {
    OptConfig c = opt_named("opt-125m");
    double tokens = COUNT * ((N - 1.) * S + N * (N - 1) / 2.), prefill = COUNT * S * (S + 1) / 2.;
    for (int cpu = 0; cpu < 2; cpu++) {
        Hardware h = test_fast_machine();
        Policy p = all_gpu(4, 3);
        p.cg = !cpu, p.cc = cpu, p.delegated = true;
        *(cpu ? h.cpu_flops : h.bmm_flops) = 1e10, h.bmm_flops[1] = 4e10;
        Cost cost = expected_of("opt-125m", &p, &h);
        CU_ASSERT(close_to(cost.T, 12 * 4. * c.h1 * (tokens / 1e10 + prefill / 4e10)));
        CU_ASSERT_STRING_EQUAL(cost.slowest[0], cpu ? "cpu^g" : "gpu^g");
    }
}

/* Only one thing of a machine takes time, and a case says how much of it a task asks for: of all layers and sweeps
 * together, as bytes or as ops. Two blocks of 4 x 3 prompts; every new token is attended by those behind it. */
static const double NEW = COUNT * (N - 1.), IN_PREFILL = COUNT * (double)S, ROWS = COUNT * (S + N - 1.),
                    SEEN = COUNT * ((N - 1.) * S + N * (N - 1) / 2.);
enum { H1 = 768, H2 = 4 * H1, L = 12, VOCAB = 50272, K = 3 }; /* OPT-125M; K batches */
static const double KV = 4 * H1, HIDDEN_ROW = 2 * H1;         /* bytes of a token's K and V, and of a hidden state */

static void assert_takes(const Policy *p, const Hardware *h, double seconds, const char *what) {
    const double T = expected_of("opt-125m", p, h).T;
    if (!close_to(T, seconds)) fprintf(stderr, "\n    %s: %.9g s, by hand %.9g s\n", what, T, seconds);
    CU_ASSERT(close_to(T, seconds));
}

/* Everything on the GPU but one thing, which is on a lower tier. */
static Policy weights_away(Tier tier) {
    Policy p = all_gpu(4, K);
    p.wg = 0, p.wc = tier == TIER_CPU;
    return p;
}
static Policy cache_away(Tier tier, bool delegated) {
    Policy p = all_gpu(4, K);
    p.cg = 0, p.cc = tier == TIER_CPU, p.delegated = delegated;
    return p;
}
static Policy states_away(Tier tier) {
    Policy p = all_gpu(4, K);
    p.hg = 0, p.hc = tier == TIER_CPU;
    return p;
}

/* Pages move whole, half of the last one empty, and without the new token, which is not there yet. Where the CPU attends, q
 * comes down and the result goes up in place of the pages. */
static void a_link_carries_the_bytes_of_its_calls(void) {
    const double pages = KV * (SEEN - NEW + NEW * 16 / 2), fresh = KV * ROWS, states = HIDDEN_ROW * ROWS;
    const struct {
        const char *what;
        Channel link;
        Policy policy;
        double bytes; /* of a layer */
    } cases[] = {{"pages up", CTOG, cache_away(TIER_CPU, false), pages},
                 {"pages from disk go up", CTOG, cache_away(TIER_DISK, false), pages},
                 {"results up", CTOG, cache_away(TIER_CPU, true), HIDDEN_ROW * NEW},
                 {"states up", CTOG, states_away(TIER_CPU), states},
                 {"states from disk go up", CTOG, states_away(TIER_DISK), states},
                 {"new k and v down", GTOC, cache_away(TIER_CPU, false), fresh},
                 {"q, and new k and v down", GTOC, cache_away(TIER_DISK, true), fresh + HIDDEN_ROW * NEW},
                 {"states down", GTOC, states_away(TIER_CPU), states},
                 {"pages from disk", DTOC, cache_away(TIER_DISK, false), pages},
                 {"pages from disk to the CPU's attention", DTOC, cache_away(TIER_DISK, true), pages},
                 {"states from disk", DTOC, states_away(TIER_DISK), states},
                 {"new k and v to disk", CTOD, cache_away(TIER_DISK, false), fresh},
                 {"states to disk", CTOD, states_away(TIER_DISK), states}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Hardware h = test_fast_machine();
        double *const bdw[] = {h.ctog_bdw, h.gtoc_bdw, h.dtoc_bdw, h.ctod_bdw};
        bdw[cases[i].link][0] = bdw[cases[i].link][1] = 1e9;
        assert_takes(&cases[i].policy, &h, L * cases[i].bytes / 1e9, cases[i].what);
    }
    Hardware h = test_fast_machine();
    Policy sparse = cache_away(TIER_DISK, true);
    sparse.sparsity = .25, h.dtoc_bdw[0] = 1e9;
    assert_takes(&sparse, &h, L * pages * (1 + .25) / 2 / 1e9, "all of K and a quarter of V from disk");
}

/* From the disk comes what lies there: a copy as it is packed, the checkpoint's own matrices in their own type. */
static void what_is_read_from_disk_are_the_bytes_that_lie_there(void) {
    enum { COPY, OWN, TABLE, WAYS };
    OptConfig config = opt_named("opt-125m");
    for (int way = COPY; way < WAYS; way++) {
        Priced r;
        Hardware h = test_fast_machine();
        Policy p = way == TABLE ? all_gpu(4, K) : weights_away(TIER_DISK);
        h.dtoc_bdw[0] = h.dtoc_bdw[1] = 1e9;
        if (way == TABLE) p.table_home = TIER_DISK;
        if (way == COPY) p.weight_packed = true;
        price_open(&r, &config, &p, &h, COUNT, S, N);
        if (way == TABLE) r.checkpoint->global[TOK_EMBED].type = F32;
        for (int role = 0; role < NROLES && way == OWN; role++) r.checkpoint->layer[0][role].type = F32;
        r.checkpoint->dummy = way != OWN; /* whose weights would be copied */
        const double copy = (double)plan_layer_bytes(r.plan), own = 2 * layer_bytes(&config), head = 4. * VOCAB * H1;
        CU_ASSERT(way != COPY || copy < .3 * layer_bytes(&config)); /* 4.5 bits of 16 */
        const double bytes = way == TABLE ? SWEEPS * head + 2. * H1 * ROWS : SWEEPS * L * (way == OWN ? own : copy);
        CU_ASSERT(close_to(expected(&r).T, bytes / 1e9));
        r.checkpoint->dummy = true;
        price_close(&r);
    }
}

/* Seconds of all ops, of which a layer of a sweep has so many in prefill and in generation, and the last one those of the
 * head besides. */
static double ops_seconds(double prefill, double generation, double head, double op_s) {
    return op_s * (2 * (L * prefill + head) + (SWEEPS - 2) * (L * generation + head));
}

/* Of a batch: four products, one op that puts k and v away and two layernorms, attention to the cache in generation, and 6
 * ops of the head; six that unpack a layer's matrices for all of its batches; 4 on the way to the CPU's attention. */
static void where_ops_count_time_is_their_number(void) {
    Hardware h = test_fast_machine();
    Policy p = all_gpu(4, K);
    h.op_s = 1e-3;
    assert_takes(&p, &h, ops_seconds(7 * K, 8 * K, 6 * K, h.op_s), "all on the GPU");
    p.weight_packed = true; /* 400 rows want F16, and 4 rows do not */
    assert_takes(&p, &h, ops_seconds(7 * K + 6, 8 * K, 6 * K, h.op_s), "packed weights");
    p = all_gpu(12, 1); /* 1200 rows are two pieces, with products and a store of their own */
    assert_takes(&p, &h, ops_seconds(2 * 5 + 2, 8, 6, h.op_s), "two pieces");
    p = cache_away(TIER_CPU, true);
    assert_takes(&p, &h, ops_seconds(7 * K, 7 * K, 6 * K, h.op_s), "the CPU attends beside the GPU");
    p.synchronize = true; /* squares one after the other: the whole way there and back counts, but not beside the head */
    const double last = 7 * K + 6 * K, way = 7 * K + 4 * K;
    assert_takes(&p, &h, h.op_s * (2 * (11 * 7 * K + last) + (SWEEPS - 2) * (11 * way + last)), "one square at a time");
    p = states_away(TIER_CPU), p.overlap = false; /* an op up and one down for every batch */
    assert_takes(&p, &h, ops_seconds(9 * K, 10 * K, 6 * K, h.op_s), "without overlap");
}

/* Bytes of a product of m rows that the GPU reads and writes. */
static double product_bytes(double m, double n, double k, bool packed) {
    return 2 * n * k * (packed ? 4.5 / 16 : 1) + 2 * m * (n + k);
}

/* The four products of a layer, and two layernorms, which read and write a hidden state each. */
static double layer_traffic(double rows, bool packed) {
    return product_bytes(rows, 3 * H1, H1, packed) + product_bytes(rows, H1, H1, packed) +
           product_bytes(rows, H2, H1, packed) + product_bytes(rows, H1, H2, packed) + 4 * HIDDEN_ROW * rows;
}

/* Embedding reads and writes a row of the table and a hidden state; the head normalizes, multiplies and chooses. */
static double head_traffic(double rows, double heads) {
    return 2 * (2. * H1 + HIDDEN_ROW) * rows + 2 * HIDDEN_ROW * heads + 4. * VOCAB * heads +
           K * product_bytes(heads / K, VOCAB, H1, false);
}

/* By hand, every byte that goes through the GPU's memory: what a layer's batches read and write, new k and v to their
 * pages, attention within prompts (q, o, k and v of each token) and to the pages. */
static void where_the_gpus_memory_counts_time_is_its_bytes(void) {
    const double sweep = 4 * K, heads = SWEEPS * head_traffic(0, sweep) + 2 * (2. * H1 + HIDDEN_ROW) * ROWS;
    const double prefill = 2 * K * layer_traffic(4 * S, false) + 2 * HIDDEN_ROW * 2 * IN_PREFILL;
    const double matrices = 2. * (4. * H1 * H1 + 2. * H1 * H2);
    for (int packed = 0; packed < 2; packed++)
        for (int what = 0; what < 3; what++) { /* the cache on the GPU, on the CPU, packed on the CPU */
            OptConfig config = opt_named("opt-125m");
            Priced r;
            Hardware h = test_fast_machine();
            Policy p = what ? cache_away(TIER_CPU, false) : all_gpu(4, K);
            h.gpu_bdw = 1e9;
            p.weight_packed = packed, p.cache_packed = what == 2;
            price_open(&r, &config, &p, &h, COUNT, S, N);
            const double generation = (SWEEPS - 2) * K * layer_traffic(4, packed), kv = what == 2 ? KV * 4.5 / 16 : KV;
            const double unpacking = packed ? 2 * ((double)plan_layer_bytes(r.plan) + matrices) : 0;
            const double attention = kv * SEEN, put = what ? kv * NEW : KV * ROWS, pack = what == 2 ? (KV + kv) * ROWS : 0;
            const double bytes = L * (prefill + generation + unpacking + attention + put + pack) + heads;
            const double T = expected(&r).T;
            if (!close_to(T, bytes / 1e9))
                fprintf(stderr, "\n    packed %d, what %d: %g, by hand %g\n", packed, what, T, bytes / 1e9);
            CU_ASSERT(close_to(T, bytes / 1e9));
            price_close(&r);
        }
}

/* New k and v to their pages, K and V that it attends to, and rows of the table that are gathered there. */
static void where_the_cpus_memory_counts_time_is_its_bytes(void) {
    Hardware h = test_fast_machine();
    h.cpu_bdw = 1e9;
    const Policy stores = cache_away(TIER_CPU, false), attends = cache_away(TIER_CPU, true);
    Policy gathers = all_gpu(4, K);
    gathers.table_home = TIER_CPU;
    assert_takes(&stores, &h, L * KV * ROWS / 1e9, "new k and v");
    assert_takes(&attends, &h, L * KV * (ROWS + SEEN) / 1e9, "new k and v, and attention");
    assert_takes(&gathers, &h, 2. * H1 * ROWS / 1e9, "rows of the table");
}

/* With a temperature the logits go down, and the CPU reads them. */
static void where_tokens_are_sampled_time_is_that_of_the_logits(void) {
    const Policy p = all_gpu(4, K);
    Hardware link = test_fast_machine(), memory = link;
    link.gtoc_bdw[0] = link.gtoc_bdw[1] = memory.cpu_bdw = 1e9;
    temperature = 1;
    assert_takes(&p, &link, COUNT * N * 4. * VOCAB / 1e9, "logits over the link");
    assert_takes(&p, &memory, COUNT * N * 4. * VOCAB / 1e9, "logits in memory");
    temperature = 0;
}

/* One square at a time waits for its states from disk to GPU and back. Its k and v are ready after a quarter of the
 * products: where they are slow to store, they are behind the rest. */
static void a_square_alone_takes_its_whole_way(void) {
    Hardware h = test_fast_machine();
    Policy p = states_away(TIER_DISK);
    p.synchronize = true;
    for (int s = 0; s < 2; s++) h.ctog_bdw[s] = 1e9, h.gtoc_bdw[s] = 2e9, h.dtoc_bdw[s] = 4e9, h.ctod_bdw[s] = .5e9;
    assert_takes(&p, &h, L * HIDDEN_ROW * ROWS * (1 + .5 + .25 + 2) / 1e9, "states there and back");
    const double flops = 2. * S * COUNT * (4. * H1 * H1 + 2. * H1 * H2);
    for (int tier = TIER_CPU; tier <= TIER_DISK; tier++) {
        h = test_fast_machine(), p = cache_away(tier, false), p.synchronize = true;
        h.mm_flops[1] = flops; /* a layer of both prefills takes a second */
        *(tier == TIER_CPU ? &h.gtoc_bdw[1] : &h.ctod_bdw[1]) = KV * IN_PREFILL / .9;
        assert_takes(&p, &h, L * (.25 + .9), "k and v to their tier");
    }
}

/* With the diagonal schedule one batch is in prefill beside others that decode. The caches of two of these move beside it;
 * those of the others wait for its products. */
static void behind_a_prefill_the_caches_of_all_but_two_batches_queue(void) {
    Priced r;
    OptConfig config = opt_named("opt-125m");
    Hardware h = test_fast_machine();
    Policy p = all_gpu(2, 6);
    p.cg = 0, p.cc = 1, p.schedule = SCHEDULE_DIAGONAL;
    h.ctog_bdw[1] = 1e9, h.mm_flops[1] = 1e12;
    price_open(&r, &config, &p, &h, 60, S, 2 * N);
    const Workload *w = &r.plan->work[1];
    const double decoding = w->decodes / w->sweeps, caches = KV * w->past / w->sweeps / 1e9;
    const double products = 2 * w->prompt_rows / w->sweeps * (4. * H1 * H1 + 2. * H1 * H2) / 1e12;
    const double gpu = products + 2 * w->steps / w->sweeps * (4. * H1 * H1 + 2. * H1 * H2) / 1e12;
    CU_ASSERT_FATAL(decoding > 3);                      /* or nothing would queue */
    h.mm_flops[1] *= products / caches, r.hardware = h; /* now both take as long */
    const double queue = caches + (decoding - 2) / decoding * caches;
    const Cost cost = expected(&r);
    CU_ASSERT(queue > gpu / products * caches); /* the longest by far */
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "queue^p");
    if (!close_to(cost.T_pre, queue))
        fprintf(stderr, "\n    T_pre %g, by hand %g, decoding %g\n", cost.T_pre, queue, decoding);
    CU_ASSERT(close_to(cost.T_pre, queue));
    price_close(&r);
}

/* Beside a layer the next one's weights are loaded, and beside the last one, which has the head behind it, the first one's:
 * where the head takes longer than any load, these are the bytes that it hides. */
static void beside_the_last_layer_the_first_is_loaded(void) {
    Priced r;
    OptConfig config = opt_named("opt-125m");
    Hardware h = test_fast_machine();
    Policy p = all_gpu(4, 1);
    p.wg = .45, p.wc = .55;
    h.ctog_bdw[0] = 1e9, h.mm_flops[0] = 2e10;
    price_open(&r, &config, &p, &h, 4, S, N);
    const double products = 4 * 2. * (4. * H1 * H1 + 2. * H1 * H2) / h.mm_flops[0],
                 head = 4 * 2. * VOCAB * H1 / h.mm_flops[0];
    double loads = 0;
    for (int j = 1; j < L; j++) {
        const double load = (double)r.plan->slab[TIER_CPU][j] / h.ctog_bdw[0];
        CU_ASSERT_FATAL(load > 1.2 * products && load < head); /* longer by more than what the two hold each other up */
        loads += load;
    }
    CU_ASSERT(r.plan->slab[TIER_CPU][0] != r.plan->slab[TIER_CPU][L - 1]); /* or the test would say nothing */
    CU_ASSERT(close_to(L * expected(&r).T_gen, loads + products + head));
    price_close(&r);
}

/* What it minimizes are these seconds, and a price that is small beside them. */
static void the_lp_minimizes_the_seconds_of_all_sweeps(void) {
    OptConfig config = opt_named("opt-125m");
    for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++) {
        Priced r;
        double x[RUNTIME_VARS] = {0}, sum = 0;
        Hardware h = round_machine;
        Policy p = all_gpu(4, K);
        p.schedule = (Schedule)schedule;
        price_open(&r, &config, &p, &h, COUNT, S, N);
        const Lp *lp = rig_lp(&r, roomy);
        for (int v = NFRACTIONS; v < RUNTIME_VARS; v++) x[v] = v, sum += lp->c[v] * v;
        CU_ASSERT(close_to(sum, all_sweeps(&r, x)));
        for (int v = 0; v < NFRACTIONS; v++) CU_ASSERT(lp->c[v] >= 0);
        price_close(&r);
    }
}

/* GPU and CPU side by side take the longer of the two; on shared cores, and without overlap, their sum. */
static void processors_work_side_by_side_unless_they_share_cores(void) {
    OptConfig c = opt_named("opt-125m");
    double layers = 2. * 12 * (4. * c.h1 * c.h1 + 2. * c.h1 * c.h2), head = 2. * c.vocab * c.h1;
    double gpu = COUNT * (N - 1) * (layers + head) / 1e12;
    double cpu = 12 * 4. * c.h1 * COUNT * ((N - 1.) * S + N * (N - 1) / 2.) / 2e9;
    for (int how = 0; how < 3; how++) {
        Hardware h = test_fast_machine();
        Policy p = all_gpu(4, 3);
        p.cg = 0, p.cc = 1, p.delegated = true, p.overlap = how != 2;
        h.mm_flops[0] = 1e12, h.cpu_flops[0] = 2e9, h.shared_cores = how == 1;
        double T = expected_of("opt-125m", &p, &h).T;
        CU_ASSERT(how ? close_to(T, gpu + cpu) : close_to(T, fmax(gpu, cpu)));
    }
}

/* Only ctog takes time, the task is one prompt of one token, and the GPU has room for a part of the weights. By hand: of a
 * capacity the table of tokens takes its bytes, two layers' slots 2 W (1 - wg), and the rest is wg W l. */
static void the_lp_fills_the_gpu_with_weights(void) {
    Priced r;
    LpAnswer answer;
    OptConfig config = opt_named("opt-1.3b");
    Hardware h = test_fast_machine();
    Policy p = all_gpu(4, 3);
    for (int x = 0; x < 2; x++) { /* numbers that an LP can bear */
        h.gtoc_bdw[x] = h.dtoc_bdw[x] = h.ctod_bdw[x] = h.mm_flops[x] = h.bmm_flops[x] = h.cpu_flops[x] = 1e18;
        h.ctog_bdw[x] = 1e9;
    }
    price_open(&r, &config, &p, &h, 1, 1, 2);
    double layer = layer_bytes(&config), table = 2. * config.vocab * config.h1 + 2. * 2050 * config.h1;
    for (int part = 1; part < 10; part++) {
        double capacity[NTIERS] = {table + 2 * layer + part * .1 * 22 * layer, 1e15, 1e15};
        const Lp *lp = rig_lp(&r, capacity);
        lp_solve(&answer, lp);
        CU_ASSERT_EQUAL_FATAL(answer.verdict, LP_OPTIMAL);
        CU_ASSERT(fabs(answer.x[WG] - part * .1) < .002);
        CU_ASSERT(fabs(all_sweeps(&r, answer.x) / (2 * 24 * layer / 1e9) - (1 - answer.x[WG])) < 1e-3);
        for (int i = 0; i < lp->m; i++)
            if (!strcmp(lp->row[i].name, "GPU memory")) CU_ASSERT(lp_binds(&lp->row[i], answer.x, lp->n));
    }
    price_close(&r);
}

/* Weights, cache and activations each on one tier, under every schedule, with either side attending: the rows of memory
 * have the plan's totals. To the byte where everything is on the CPU, from where they start; elsewhere to the padding of
 * tensors and regions, which begin at whole multiples of 64 bytes. What a row could leave out is thousands of bytes. */
static void check_corners(int flights, bool packed) {
    enum { CORNERS = NTIERS * NTIERS * NTIERS };
    OptConfig config = SMALL_CONFIG(2);
    if (packed) config.h1 = config.embed = 48; /* heads of whole sixteens */
    for (int where = 0; where < 3 * 2 * CORNERS; where++) {
        const int w = where % 3, c = where / 3 % 3, h = where / 9 % 3;
        const double padding = 64. * NROLES * config.l;
        Priced r;
        double x[RUNTIME_VARS] = {0}, none[NTIERS] = {0};
        Hardware fast = test_fast_machine();
        Policy p = all_gpu(4, 3);
        p.schedule = (Schedule)(where / CORNERS / 2), p.delegated = where / CORNERS % 2, p.gbs = 3 * p.gbs;
        p.wg = w == TIER_GPU, p.wc = w == TIER_CPU, p.cg = c == TIER_GPU, p.cc = c == TIER_CPU, p.hg = h == TIER_GPU,
        p.hc = h == TIER_CPU;
        p.flights = flights, p.cache_packed = packed;
        price_open(&r, &config, &p, &fast, 3 * COUNT, S, N);
        const Lp *lp = rig_lp(&r, none);
        bool start = w == TIER_CPU && c == TIER_CPU && h == TIER_CPU && !p.delegated;
        x[WG + w] = x[CG + c] = x[HG + h] = 1;
        for (int t = 0, rows = 0; t < NTIERS; t++, rows = 0) {
            for (int i = 0; i < lp->m; i++) {
                if (strcmp(lp->row[i].name, memory_row[t])) continue;
                CU_ASSERT(fabs(lp_excess(&lp->row[i], x, lp->n) - (double)r.plan->total[t]) < (start ? .5 : padding));
                rows++;
            }
            CU_ASSERT_EQUAL(rows, 1);
        }
        price_close(&r);
    }
}

static void the_lps_memory_is_the_plans_at_every_corner(void) { check_corners(1, false); }
static void every_flight_has_a_cache_of_its_own(void) { check_corners(2, false); }
static void packed_pages_take_the_room_that_the_plan_gives_them(void) { check_corners(1, true); }

// ---------------------------------------------------------------------------------------------------------------
// Against the sim, and on any machine
// ---------------------------------------------------------------------------------------------------------------

static void random_pair(double *gpu, double *cpu, uint64_t *seed) {
    static const double round[][2] = {{1, 0}, {0, 1}, {0, 0}, {.5, .5}, {.2, .8}, {0, .5}, {.3, .3}};
    int i = test_below(seed, 9);
    *gpu = i < 7 ? round[i][0] : test_below(seed, 101) / 100.;
    *cpu = i < 7 ? round[i][1] : floor((1 - *gpu) * test_below(seed, 101)) / 100;
}

static void random_rig(Priced *r, uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b"};
    static const char *const machines[] = {"hardware/t4.json", "hardware/rtx4090.json", "hardware/h100.json",
                                           "hardware/laptop.json"};
    Error err;
    Hardware h;
    OptConfig config = opt_named(names[test_below(seed, 3)]);
    config.eos = -1; /* every sequence takes its full length */
    ASSERT_OK(hardware_read(&h, machines[test_below(seed, 4)], &err));
    h.shared_cores = test_below(seed, 4) == 0;
    Policy p = {.gbs = 1 << test_below(seed, 6),
                .num_gpu_batches = 1 + test_below(seed, test_below(seed, 2) ? 3 : 8),
                .schedule = test_below(seed, 4) ? SCHEDULE_ZIGZAG : SCHEDULE_DIAGONAL,
                .delegated = test_below(seed, 2),
                .overlap = test_below(seed, 8),
                .page_tokens = 16,
                .table_home = test_below(seed, 3) ? TIER_GPU : TIER_CPU};
    random_pair(&p.wg, &p.wc, seed);
    random_pair(&p.cg, &p.cc, seed);
    random_pair(&p.hg, &p.hc, seed);
    p.weight_packed = test_below(seed, 3) == 0;
    p.cache_packed = test_below(seed, 3) == 0;
    if (test_below(seed, 4) == 0) p.sparsity = .1, p.delegated = true;
    int s = 32 << test_below(seed, 5), n = 2 + test_below(seed, 30),
        blocks = p.schedule == SCHEDULE_DIAGONAL ? 3 : 1 + test_below(seed, 2);
    price_open(r, &config, &p, &h, p.gbs * p.num_gpu_batches * blocks, s, n);
}

static double simulated_seconds(const Priced *r) {
    Error err;
    RunStats stats = {0};
    Listener listener = {0};
    Device *device = sim_open(r->plan, &r->hardware, &err);
    ASSERT_OK(schedule_run(r->plan, &r->task, device, &listener, &stats, &err));
    device->close(device);
    return stats.total_s;
}

static void say_off(const Priced *r, const Cost *cost, double seconds, int trial) {
    const Policy *p = &r->plan->policy;
    fprintf(stderr,
            "\n    trial %d: %s on %s%s, %d prompts of %d + %d, %d x %d, %s, att %d, overlap %d, table %d, packed %d %d, "
            "sparsity %g, "
            "w %g/%g c %g/%g h %g/%g: %g s (%s %s), the sim %g s\n",
            trial, r->plan->config.name, r->hardware.name, r->hardware.shared_cores ? " (shared cores)" : "", r->task.count,
            r->task.prompts[0].s, r->task.prompts[0].n, p->gbs, p->num_gpu_batches, schedule_name[p->schedule],
            p->delegated, p->overlap, p->table_home, p->weight_packed, p->cache_packed, p->sparsity, p->wg, p->wc, p->cg,
            p->cc, p->hg, p->hc, cost->T, cost->slowest[1], cost->slowest[0], seconds);
}

/* The model has one layer load beside the one before it. Lanes with room in their slots go further ahead, so that where
 * few layers stream much it expects too much: rarely more than a quarter. */
static void the_sim_takes_what_the_model_expects(void) {
    enum { TRIALS = 60 };
    uint64_t seed = 9;
    int near_by = 0, far = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        Priced r;
        random_rig(&r, &seed);
        Cost cost = expected(&r);
        double seconds = simulated_seconds(&r), off = fabs(cost.T / seconds - 1);
        near_by += off<.1, far += off> .25;
        if (!(off < .35)) say_off(&r, &cost, seconds, trial);
        CU_ASSERT(off < .35);
        CU_ASSERT(close_to(cost.throughput * cost.T, (double)r.task.count * r.task.prompts[0].n));
        price_close(&r);
    }
    CU_ASSERT(near_by >= TRIALS * 9 / 10 && far <= 1);
}

/* The least value of the LP, infinite where nothing fits; *seconds: what all sweeps take there. */
static double least(const Priced *r, const double capacity[NTIERS], double *seconds) {
    LpAnswer answer;
    const Lp *lp = rig_lp(r, capacity);
    lp_solve(&answer, lp);
    CU_ASSERT(answer.verdict == LP_OPTIMAL || answer.verdict == LP_INFEASIBLE);
    *seconds = answer.verdict == LP_OPTIMAL ? all_sweeps(r, answer.x) : INFINITY;
    return answer.verdict == LP_OPTIMAL ? answer.value : INFINITY;
}

static void more_memory_or_bandwidth_never_costs_time(void) {
    uint64_t seed = 10;
    int better = 0;
    for (int trial = 0; trial < 100; trial++) {
        Priced r;
        random_rig(&r, &seed);
        double capacity[NTIERS], before, after;
        for (int t = 0; t < NTIERS; t++) capacity[t] = (double)r.plan->total[t] * test_spread(&seed, .3, 2) + 1;
        double value = least(&r, capacity, &before);
        const Hardware h = r.hardware;
        for (int i = 0; i < 17; i++) {
            double *const rate[] = {r.hardware.ctog_bdw, r.hardware.gtoc_bdw,  r.hardware.dtoc_bdw, r.hardware.ctod_bdw,
                                    r.hardware.mm_flops, r.hardware.bmm_flops, r.hardware.cpu_flops};
            double more[NTIERS] = {capacity[0], capacity[1], capacity[2]};
            *(i < NTIERS ? &more[i] : &rate[(i - 3) / 2][(i - 3) % 2]) *= 1.5;
            CU_ASSERT(least(&r, more, &after) <= value * (1 + 1e-9));
            CU_ASSERT(after <= before * 1.02); /* the price of idling is 2%, and may be worth it */
            better += after < before * (1 - 1e-6);
            r.hardware = h;
        }
        price_close(&r);
    }
    CU_ASSERT(better > 100);
}

CU_TestInfo tests[] = {
    {"the rows of OPT-30B are those of A.3 by hand", the_rows_of_opt_30b_are_those_of_a_3_by_hand},
    {"a GPU with room for all gets all", a_gpu_with_room_for_all_gets_all},
    {"what fits nowhere else is read from the disk", what_fits_nowhere_else_is_read_from_the_disk},
    {"the best placement is one and no other is faster", the_best_placement_is_one_and_no_other_is_faster},
    {"more memory or bandwidth is never worse", more_memory_or_bandwidth_is_never_worse},
    {"who cannot hold it is named with what is enough", who_cannot_hold_it_is_named_with_what_is_enough},
    {"a GPU too small for its working memory is named", a_gpu_too_small_for_its_working_memory_is_named},
    {"one token out costs no generation", one_token_out_costs_no_generation},
    {"impossible machines get an answer or a line", impossible_machines_get_an_answer_or_a_line},
    {"where weights stream, time is their bytes over the link", where_weights_stream_time_is_their_bytes_over_the_link},
    {"what streams is what is not on the GPU", what_streams_is_what_is_not_on_the_gpu},
    {"where products count, time is the flops of the model", where_products_count_time_is_the_flops_of_the_model},
    {"where attention counts, time is the tokens it sees", where_attention_counts_time_is_the_tokens_it_sees},
    {"a link carries the bytes of its calls", a_link_carries_the_bytes_of_its_calls},
    {"what is read from disk are the bytes that lie there", what_is_read_from_disk_are_the_bytes_that_lie_there},
    {"where ops count, time is their number", where_ops_count_time_is_their_number},
    {"where the GPU's memory counts, time is its bytes", where_the_gpus_memory_counts_time_is_its_bytes},
    {"where the CPU's memory counts, time is its bytes", where_the_cpus_memory_counts_time_is_its_bytes},
    {"where tokens are sampled, time is that of the logits", where_tokens_are_sampled_time_is_that_of_the_logits},
    {"a square alone takes its whole way", a_square_alone_takes_its_whole_way},
    {"behind a prefill the caches of all but two batches queue", behind_a_prefill_the_caches_of_all_but_two_batches_queue},
    {"beside the last layer the first is loaded", beside_the_last_layer_the_first_is_loaded},
    {"the LP minimizes the seconds of all sweeps", the_lp_minimizes_the_seconds_of_all_sweeps},
    {"processors work side by side unless they share cores", processors_work_side_by_side_unless_they_share_cores},
    {"the LP fills the GPU with weights", the_lp_fills_the_gpu_with_weights},
    {"the LP's memory is the plan's at every corner", the_lps_memory_is_the_plans_at_every_corner},
    {"every flight has a cache of its own", every_flight_has_a_cache_of_its_own},
    {"packed pages take the room that the plan gives them", packed_pages_take_the_room_that_the_plan_gives_them},
    {"the sim takes what the model expects", the_sim_takes_what_the_model_expects},
    {"more memory or bandwidth never costs time", more_memory_or_bandwidth_never_costs_time},
    CU_TEST_INFO_NULL,
};
