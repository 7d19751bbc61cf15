/* test_policy.c: Appendix A.3 against values by hand, and what must hold of a best placement whatever the machine; the
 * model `runtime` against values by hand and against the sim, whose clock is no one's watch. The search for a policy is
 * test_search.c's, the formulas of several machines are test_cluster.c's. */
#include "tests.h"

static Error err;
static Hardware machine;

// ---- Appendix A.3 ---------------------------------------------------------------------------------------------------

static OptConfig opt;
static Block block;

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
#define GPU(name, hidden, of_cache, one) \
    { "gpu_peak" name, 1, {W_ALL - 2 * W, 0, 0, C_ALL + of_cache, 0, 0, hidden - H_GBS}, 16e9 - 2 * W - H_GBS - one }
static const struct {
    const char *name;
    double rate, a[NFRACTIONS], b; /* a: the bytes that take this rate, or a tier's */
} rows_30b[NROWS] = {
    /* wg wc wd cg cc cd hg hc hd */
    {"ctog^p", 10e9, {0, W, W, 0, 0, 0, 0, H_P, H_P}, 0},
    {"gtoc^p", 5e9, {0, 0, 0, 0, 2118057984, 2118057984, 0, H_P, H_P}, 0},
    {"dtoc^p", 1.6e9, {0, 0, W, 0, 0, 0, 0, 0, H_P}, 0},
    {"ctod^p", .8e9, {0, 0, 0, 0, 0, 2118057984, 0, 0, H_P}, 0},
    {"comp^p", 1, {0}, -(90915867721728 / 20e12 + 1082331758592 / 8e12)},
    {"ctog^g", 12e9, {0, W, W, 0, 0, 0, 0, H_G, H_G}, 0},
    {"gtoc^g", 6e9, {0, 0, 0, 0, 0, 0, 0, H_G, H_G}, 0},
    {"dtoc^g", 2e9, {0, 0, W, 0, 0, 2179989504, 0, 0, H_G}, 0},
    {"ctod^g", 1e9, {0, 0, 0, 0, 0, 4128768, 0, 0, H_G}, 0},
    {"comp^g", 1, {0, 0, 0, 2179989504 / .3e12, 2179989504 / .05e12, 2179989504 / .05e12}, -177570054144 / 4e12},
    GPU("^p with qkv^p", H_P, 0, 1409286144),
    GPU("^p with att_1^p", H_P, 2113929216, 0),
    GPU("^p with att_2^p", H_P, 2113929216, 0),
    GPU("^p with embed^p", H_P, 0, 704643072),
    GPU("^p with mlp_1^p", H_P, 0, 1761607680),
    GPU("^p with mlp_2^p", H_P, 0, 1761607680),
    GPU("^g with kv^g", H_G, 0, 2752512),
    GPU("^g with att_1^g", H_G, 377954304, 0),
    GPU("^g with att_2^g", H_G, 377954304, 0),
    GPU("^g with embed^g", H_G, 0, 1376256),
    GPU("^g with mlp_1^g", H_G, 0, 3440640),
    GPU("^g with mlp_2^g", H_G, 0, 3440640),
    {"cpu_peak^p", 1, {-W, W_ALL, 0, 0, C_ALL, 0, -H_GBS, H_P}, 200e9 - W - H_GBS},
    {"cpu_peak^g", 1, {0, W_ALL, W, 0, C_ALL, 1497366528, 0, H_G, 1376256}, 200e9 - 3612672},
    {"nvme_peak", 1, {0, 0, W_ALL, 0, 0, C_ALL, 0, 0, H_P}, 1500e9},
    {"wg + wc + wd", 1, {1, 1, 1}, 1},
    {"cg + cc + cd", 1, {0, 0, 0, 1, 1, 1}, 1},
    {"hg + hc + hd", 1, {0, 0, 0, 0, 0, 0, 1, 1, 1}, 1},
};
// clang-format on

TEST(the_rows_of_opt_30b_are_those_of_a_3_by_hand) {
    static Lp lp;
    opt = opt_named("opt-30b");
    block = (Block){.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3};
    /* every rate is another round number, so that a wrong one shows */
    machine = machine_with(
        "gmem=16e9 cmem=200e9 nmem=1500e9 ctog_bdw_g=12e9 ctog_bdw_p=10e9 gtoc_bdw_g=6e9 gtoc_bdw_p=5e9 dtoc_bdw_g=2e9 "
        "dtoc_bdw_p=1.6e9 ctod_bdw_g=1e9 ctod_bdw_p=.8e9 mm_flops_g=4e12 mm_flops_p=20e12 bmm_flops_g=.3e12 "
        "bmm_flops_p=8e12 cpu_flops_g=.05e12 cpu_flops_p=.04e12");
    paper_lp(&lp, &machine, &opt, &block);
    CU_ASSERT_EQUAL(lp.n, NVARS);
    CU_ASSERT_EQUAL_FATAL(lp.m, NROWS);
    for (int i = 0; i < NROWS; i++) {
        const LpRow *row = &lp.row[i];
        CU_ASSERT_STRING_EQUAL(row->name, rows_30b[i].name);
        CU_ASSERT_EQUAL(row->equal, i >= FRACTION_ROWS);
        bool same = near(row->b, rows_30b[i].b);
        for (int f = 0; f < NFRACTIONS; f++) same = same && near(row->a[f], rows_30b[i].a[f] / rows_30b[i].rate);
        CU_ASSERT(same && row->a[T_PRE] == -(i < T_GEN_ROWS) && row->a[T_GEN] == -(i >= T_GEN_ROWS && i < GPU_ROWS));
    }
    for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT_EQUAL(lp.c[f], 0);
    CU_ASSERT(near(lp.c[T_PRE], 48 / 144.) && near(lp.c[T_GEN], 31 * 48 / 144.)); /* T / bls */
}

// ---- Any machine ----------------------------------------------------------------------------------------------------

/* The numbers of a machine of which more is never worse, which lie side by side: its memories, then its rates. */
enum { RATES = 14, NUMBERS = NTIERS + RATES };
static double *number(int i) { return (double *)&machine.mem + i; }

/* A machine on which the model is a squeeze, mostly. */
static void draw_case(uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-1.3b", "opt-13b", "opt-175b"};
    static const double range[][2] = {{1e9, 6e10},  {1e9, 6e10},  {1e8, 1e10}, {5e7, 1e10}, /* of the links */
                                      {1e12, 1e15}, {1e10, 1e14}, {1e9, 1e12}};
    opt = opt_named(names[test_below(seed, 4)]);
    machine = (Hardware){.name = "random"};
    const double weights = 24. * opt.h1 * opt.h1 * opt.l;
    block.s = (int)test_spread(seed, 1, 1500), block.n = (int)test_spread(seed, 1, 500);
    block.gbs = (int)test_spread(seed, 1, 200), block.num_gpu_batches = (int)test_spread(seed, 1, 20);
    machine.gmem = weights * test_spread(seed, .02, 3);
    machine.cmem = weights * test_spread(seed, .05, 10);
    machine.nmem = weights * test_spread(seed, .1, 100);
    for (int i = 0; i < RATES; i++) *number(NTIERS + i) = test_spread(seed, range[i / 2][0], range[i / 2][1]);
}

/* Its seconds are those of the rows, and it names the rows that bind: of a time, and of a tier that is full. None of the
 * tiers holds more than it can. With n = 1 the LP does not pay for T_gen, and yet it is the largest of its terms. That no
 * other placement is faster, lp.c sees to (test_lp.c). */
TEST(the_best_placement_is_one_and_takes_what_the_rows_say) {
    static Lp lp;
    uint64_t seed = 1;
    int fits = 0;
    for (int trial = 0; trial < 400; trial++) {
        Cost cost;
        double x[NVARS] = {0}, held[NTIERS] = {0};
        draw_case(&seed);
        if (trial % 4 == 0) block.n = 1;
        if (paper_cost(&cost, &machine, &opt, &block, &err)) continue;
        paper_lp(&lp, &machine, &opt, &block);
        memcpy(x, cost.fraction, sizeof cost.fraction);
        x[T_PRE] = cost.T_pre, x[T_GEN] = cost.T_gen;
        for (int f = 0; f < NFRACTIONS; f++) CU_ASSERT(x[f] >= 0);
        for (int i = 0, tier = 0; i < NROWS; i++) {
            const LpRow *row = &lp.row[i];
            const bool binds = lp_binds(row, x, NVARS);
            tier += i == CPU_ROWS || i == DISK_ROWS;
            const char *named = i < GPU_ROWS ? cost.slowest[i < T_GEN_ROWS] : cost.full[tier];
            const double excess = lp_excess(row, x, NVARS), size = i < GPU_ROWS ? x[T_GEN - (i < T_GEN_ROWS)] : row->b;
            CU_ASSERT(excess <= 1e-9 * fabs(size) && (i < FRACTION_ROWS ? binds == !!strstr(named, row->name) : binds));
            if (i >= GPU_ROWS && i < FRACTION_ROWS) held[tier] = fmax(held[tier], excess + machine.mem[tier]);
        }
        for (int t = 0; t < NTIERS; t++) CU_ASSERT(fabs(cost.peak[t] - held[t]) <= 1e-9 * machine.mem[t]);
        CU_ASSERT(cost.slowest[0][0] && cost.slowest[1][0]);
        CU_ASSERT(near(cost.T, (cost.T_pre + cost.T_gen * (block.n - 1)) * opt.l));
        CU_ASSERT(near(cost.throughput * cost.T, (double)block.gbs * block.num_gpu_batches * block.n));
        fits++;
    }
    CU_ASSERT(fits > 100 && fits < 390);
}

/* Where nothing fits, there is a placement with as much more as the message says, in hundredths of a GiB, and none with
 * less. */
TEST(with_what_the_tiers_lack_there_is_a_placement) {
    static const char *const lacks[] = {" GPU lacks ", " CPU lacks ", " disk lacks "};
    uint64_t seed = 2;
    int named[NTIERS] = {0};
    for (int trial = 0; trial < 600; trial++) {
        Cost cost;
        int lacking = 0, last = 0;
        draw_case(&seed);
        if (!paper_cost(&cost, &machine, &opt, &block, &err)) continue;
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT(strstr(err.text, "no placement fits: the ") && strstr(err.text, " GiB; use a smaller --gpu-batch-size"));
        for (int t = 0; t < NTIERS; t++) {
            const char *at = strstr(err.text, lacks[t]);
            if (!at) continue;
            machine.mem[t] += atof(at + strlen(lacks[t])) * 0x1p30;
            named[t]++, lacking++, last = t;
        }
        ASSERT_OK(paper_cost(&cost, &machine, &opt, &block, &err));
        machine.mem[last] -= .0101 * 0x1p30;
        CU_ASSERT(lacking > 1 || paper_cost(&cost, &machine, &opt, &block, &err));
    }
    CU_ASSERT(named[TIER_GPU] > 50 && named[TIER_CPU] > 0 && named[TIER_DISK] > 50);
}

/* An answer, or one line, and no nonsense; of rates that there are hardly any is lost in rounding. The last ones are the
 * bounds of a hardware file. */
TEST(impossible_machines_get_an_answer_or_a_line) {
    uint64_t seed = 4;
    int lost = 0;
    for (int trial = 0; trial < 2000; trial++) {
        const bool at_bounds = trial >= 1000;
        Cost cost;
        draw_case(&seed);
        for (int i = NTIERS; i < NUMBERS; i++)
            *number(i) = at_bounds ? test_spread(&seed, 1e-9, 1e30) : test_spread(&seed, 1e8, 1e16);
        err = (Error){0, ""};
        const bool ok = !paper_cost(&cost, &machine, &opt, &block, &err);
        CU_ASSERT(ok ? isfinite(cost.T) && cost.T > 0 && isfinite(cost.throughput)
                     : (err.code == EXIT_USAGE || err.code == EXIT_FAILED) && err.text[0]);
        lost += !at_bounds && err.code == EXIT_FAILED;
    }
    CU_ASSERT(lost <= 5);
}

// ---- The model `runtime`: one task under one policy -----------------------------------------------------------------

/* A task on the machine, its plan, and the plan that runtime_lp starts from. */
static Checkpoint *model;
static Task task;
static Plan *plan, *corner;
static float temperature; /* of the tasks */

static void open_plan(OptConfig config, Policy policy, Hardware hardware, int count, int s, int n) {
    const Type act = hardware.shared_cores ? F32 : F16;
    machine = hardware, model = checkpoint_dummy(&config, 0), task = equal_task(count, s, n);
    sample(&task, (Sampling){.temperature = temperature});
    plan = plan_make(model, &policy, &task, act, &err);
    memcpy(policy.share, (double[]){0, 1, 0, 1, 0, 1}, sizeof policy.share), policy.delegated = false;
    corner = plan_make(model, &policy, &task, act, &err);
    CU_ASSERT_FATAL(plan && corner);
}

static void close_plan(void) {
    plan_free(plan), plan_free(corner);
    free_task(&task);
    checkpoint_close(model);
}

static Lp *lp_for(const Plan *placed) {
    static Lp lp;
    runtime_lp(&lp, &machine, model, corner, plan->policy.delegated, machine.mem, placed);
    return &lp;
}
static Lp *open_lp(void) { return lp_for(NULL); }

static Cost expected(void) {
    Cost cost;
    runtime_cost(&cost, lp_for(plan), plan);
    return cost;
}

// ---- By hand --------------------------------------------------------------------------------------------------------

/* Only one thing of a machine takes time, and a case says how much of it a task asks for: of all layers and sweeps
 * together, as bytes, flops or ops. OPT-125M, and two blocks of 4 x K prompts; every new token is attended by those behind
 * it. */
enum { COUNT = 24, S = 100, N = 9, SWEEPS = 2 * N, H1 = 768, H2 = 4 * H1, L = 12, VOCAB = 50272, K = 3 };
static const double NEW = COUNT * (N - 1.), IN_PREFILL = COUNT * (double)S, ROWS = COUNT * (S + N - 1.),
                    SEEN = COUNT * ((N - 1.) * S + N * (N - 1) / 2.), PAIRS = COUNT * S * (S + 1) / 2.;
static const double KV = 4 * H1, HIDDEN_ROW = 2 * H1; /* bytes of a token's K and V, and of a hidden state */
static const double MATRICES = 4. * H1 * H1 + 2. * H1 * H2, HEAD = 2. * VOCAB * H1; /* numbers; flops, or bytes */
static const double LAYER_BYTES = 2 * (4. * H1 * H1 + 2. * H1 * H2 + 9 * H1 + H2);  /* with biases and layernorms */

static void open_by_hand(Policy p, const char *slow) {
    open_plan(opt_named("opt-125m"), p, machine_with(slow), COUNT, S, N);
}

static Cost expect_takes(Policy p, const char *slow, double seconds) {
    open_by_hand(p, slow);
    const Cost cost = expected();
    CU_ASSERT(fabs(cost.T / seconds - 1) < 1e-9);
    close_plan();
    return cost;
}

/* Everything on the GPU but the weights, the cache, the states or the table, which are on that tier. With
 * DELEGATED the CPU attends, ALONE is without overlap, IN_TURN is one square at a time, and with PACKED the weights are. */
enum { WEIGHTS = 0, KEPT = 2, STATES = 4, TABLE = 6 };
enum { DELEGATED = 1, ALONE = 2, IN_TURN = 4, PACKED = 8 };
static Policy on(Tier tier, int what, int ways) {
    Policy p = all_gpu(4, K);
    if (what == TABLE) {
        p.table_home = tier;
    } else {
        p.share[what] = tier == TIER_GPU;
        p.share[what + 1] = tier == TIER_CPU;
    }
    p.delegated = ways & DELEGATED;
    p.overlap = !(ways & ALONE);
    p.synchronize = ways & IN_TURN;
    p.weight_packed = ways & PACKED;
    return p;
}

/* Each row takes so long:
 *     The weights cross the link once a sweep, however many batches there are; with the row schedule, once for each batch.
 * From the disk they cross both links, side by side, and the slower one counts. A table on the CPU streams as well, behind
 * the last layer of every sweep, and so do rows of new tokens.
 *     Products are 2 flops for a weight of a layer and a token, and for the head's and a sequence; attention 4 h1 for a
 * token that another one attends to. GPU and CPU side by side take the longer of the two; without overlap, their sum.
 *     Pages move whole, half of the last one empty, and without the new token, which is not there yet. Where the CPU
 * attends, q comes down and the result goes up in place of the pages. */
TEST(the_one_slow_thing_takes_its_bytes_or_flops) {
    static const char side_by_side[] = "mm_flops_g=1e12 cpu_flops_g=2e9", two_rates[] = "ctog_bdw_g=1e9 ctog_bdw_p=2e9";
    const double pages = L * KV * (SEEN - NEW + NEW * 16 / 2) / 1e9, fresh = L * KV * ROWS / 1e9,
                 states = L * HIDDEN_ROW * ROWS / 1e9, queries = L * HIDDEN_ROW * NEW / 1e9;
    const double layers = 2. * L * MATRICES, attention = L * 4. * H1, gpu = NEW * (layers + HEAD) / 1e12,
                 cpu = attention * SEEN / 2e9, attending = attention * (SEEN / 1e10 + PAIRS / 4e10);
    const Policy on_cpu = on(TIER_CPU, KEPT, DELEGATED), staged = on(TIER_CPU, KEPT, 0),
                 on_disk = on(TIER_DISK, KEPT, DELEGATED), from_disk = on(TIER_DISK, KEPT, 0),
                 x_on_cpu = on(TIER_CPU, STATES, 0), x_on_disk = on(TIER_DISK, STATES, 0),
                 weights_on_cpu = on(TIER_CPU, WEIGHTS, 0), table_on_cpu = on(TIER_CPU, TABLE, 0);
    Policy sparse = on_disk, row = weights_on_cpu;
    sparse.sparsity = .25, row.schedule = SCHEDULE_ROW;
    const struct {
        const char *slow;
        Policy policy;
        double seconds;
    } cases[] = {{"ctog_bdw=1e9", weights_on_cpu, SWEEPS * LAYER_BYTES * L / 1e9},
                 {"ctog_bdw=1e9", row, 6 * N * LAYER_BYTES * L / 1e9},
                 {two_rates, table_on_cpu,
                  (2 * HEAD + IN_PREFILL * HIDDEN_ROW) / 2e9 + ((SWEEPS - 2) * HEAD + NEW * HIDDEN_ROW) / 1e9},
                 {"mm_flops_g=1e12 mm_flops_p=5e12", all_gpu(4, K), COUNT * (S * layers + HEAD) / 5e12 + gpu},
                 {"bmm_flops_g=1e10 bmm_flops_p=4e10", all_gpu(4, K), attending},
                 {side_by_side, on_cpu, fmax(gpu, cpu)},
                 {side_by_side, on(TIER_CPU, KEPT, DELEGATED | ALONE), gpu + cpu},
                 {"ctog_bdw=1e9", staged, pages},
                 {"ctog_bdw=1e9", from_disk, pages},
                 {"ctog_bdw=1e9", on_cpu, queries}, /* the results */
                 {"ctog_bdw=1e9", x_on_cpu, states},
                 {"ctog_bdw=1e9", x_on_disk, states},
                 {"gtoc_bdw=1e9", staged, fresh},
                 {"gtoc_bdw=1e9", on_disk, fresh + queries},
                 {"gtoc_bdw=1e9", x_on_cpu, states},
                 {"dtoc_bdw=1e9", from_disk, pages},
                 {"dtoc_bdw=1e9", on_disk, pages}, /* to the CPU's attention */
                 {"dtoc_bdw=1e9", x_on_disk, states},
                 {"dtoc_bdw_g=1e9", sparse, pages * (1 + .25) / 2}, /* all of K and a quarter of V */
                 {"cpu_flops_g=2e9", sparse, cpu * (1 + .25) / 2},
                 {"ctod_bdw=1e9", from_disk, fresh},
                 {"ctod_bdw=1e9", x_on_disk, states},
                 {"cpu_bdw=1e9", staged, fresh}, /* to their pages; and K and V that it attends to */
                 {"cpu_bdw=1e9", on_cpu, L * KV * (ROWS + SEEN) / 1e9},
                 {"cpu_bdw=1e9", table_on_cpu, HIDDEN_ROW * ROWS / 1e9}}; /* rows that it gathers */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_takes(cases[i].policy, cases[i].slow, cases[i].seconds);
    const Cost read = expect_takes(on(TIER_DISK, WEIGHTS, 0), "ctog_bdw=1e9 dtoc_bdw=2e8", SWEEPS * LAYER_BYTES * L / 2e8),
               attended = expect_takes(on_cpu, "cpu_flops_g=1e10 bmm_flops_p=4e10", attending);
    CU_ASSERT(!strcmp(read.slowest[0], "dtoc^g") && !strcmp(read.slowest[1], "dtoc^p"));
    CU_ASSERT(!strcmp(attended.slowest[0], "cpu^g") && !strcmp(attended.slowest[1], "gpu^p"));
    temperature = 1; /* the logits go down, and the CPU reads them */
    expect_takes(all_gpu(4, K), "gtoc_bdw=1e9", COUNT * N * 4. * VOCAB / 1e9);
    expect_takes(all_gpu(4, K), "cpu_bdw=1e9", COUNT * N * 4. * VOCAB / 1e9);
    temperature = 0;
    open_by_hand(on_cpu, side_by_side); /* shared cores compute one after the other */
    machine.shared_cores = true;
    CU_ASSERT(near(expected().T, gpu + cpu));
    close_plan();
}

/* From the disk comes what lies there: a copy as it is packed (4.5 bits of 16), the checkpoint's own matrices in their own
 * type. */
TEST(what_is_read_from_disk_are_the_bytes_that_lie_there) {
    open_by_hand(on(TIER_DISK, WEIGHTS, PACKED), "dtoc_bdw=1e9");
    double copy = 0;
    for (int role = 0; role < NROLES; role++) copy += (double)tensor_bytes(plan->weight[0][role].home);
    CU_ASSERT(copy < .3 * LAYER_BYTES);
    CU_ASSERT(near(expected().T, SWEEPS * L * copy / 1e9));
    close_plan();
    open_by_hand(on(TIER_DISK, WEIGHTS, 0), "dtoc_bdw=1e9");
    for (int role = 0; role < NROLES; role++) model->layer[0][role].type = F32;
    model->dummy = false; /* whose weights would be copied */
    CU_ASSERT(near(expected().T, SWEEPS * L * 2 * LAYER_BYTES / 1e9));
    model->dummy = true;
    close_plan();
    open_by_hand(on(TIER_DISK, TABLE, 0), "dtoc_bdw=1e9");
    corner->global[TOK_EMBED].home.type = F32; /* as it lies in a checkpoint that is no dummy */
    CU_ASSERT(near(expected().T, (SWEEPS * 2 * HEAD + HIDDEN_ROW * ROWS) / 1e9));
    close_plan();
    Policy p = on(TIER_DISK, TABLE, PACKED); /* of a packed table whole rows of groups are read */
    p.head_packed = true;
    open_by_hand(p, "dtoc_bdw=1e9");
    const double packed = tensor_bytes(plan->global[TOK_EMBED].home);
    CU_ASSERT(packed < .3 * HEAD);
    CU_ASSERT(near(expected().T, (SWEEPS * packed + HIDDEN_ROW / 2 * GROUP_BYTES * ROWS) / 1e9));
    close_plan();
}

/* Of a batch: four products and two layernorms, and in prefill attention; where the cache is on the GPU, an op that puts k
 * and v there, and in generation attention; 6 ops of the head; six that unpack a layer's matrices for all of its batches
 * (400 rows want F16, and 4 rows do not); 4 on the way to the CPU's attention. 1200 rows are two pieces, each with all of
 * them. Squares one after the other: the whole way to the CPU and back counts, but not beside the head. Without overlap, an
 * op up and one down for every batch. */
TEST(where_ops_count_time_is_their_number) {
    const struct {
        Policy policy;
        double prefill, generation, head; /* ops of a layer for each batch; those of the head in generation, 6 in prefill */
    } cases[] = {{all_gpu(4, K), 8, 8, 6},
                 {on(TIER_GPU, WEIGHTS, PACKED), 8 + 6. / K, 8, 6},
                 {all_gpu(12, 1), 2 * 8, 8, 6},
                 {on(TIER_CPU, KEPT, DELEGATED), 7, 6, 6},
                 {on(TIER_CPU, KEPT, DELEGATED | IN_TURN), 7, 6 + 4, 6 - 4},
                 {on(TIER_CPU, STATES, ALONE), 10, 10, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Policy *p = &cases[i].policy;
        const double ops = 2 * (L * cases[i].prefill + 6) + (SWEEPS - 2) * (L * cases[i].generation + cases[i].head);
        expect_takes(*p, "op_s=1e-3", 1e-3 * p->num_gpu_batches * ops);
    }
}

// clang-format off
/* By hand, every byte that goes through the GPU's memory. A product of m rows reads and writes 2 n k bytes of weights, or
 * 4.5 bits for each 16 where they are packed, and 2 m (n + k) of states; a layer has four products and two layernorms:
 *     weights                2 x 7077888                                               =    14155776, packed 3981312
 *     states of a row        2 (4 + 2 + 5 + 5) 768 + 4 x 1536                          =       30720
 * Of a layer, in all sweeps:
 *     prefill                6 (14155776 + 400 x 30720) + 4 x 1536 x 2400 (q, o, k, v) =   173408256
 *     generation             16 x 3 (14155776 + 4 x 30720)                             =   685375488
 *     with packed weights    48 (3981312 + 122880)                                     =   197001216
 *     unpacking, prefill     2 (4001280 (all of a layer) + 14155776)                   =    36314112
 *     attention              24 x 836 tokens x 3072                                    =    61636608, packed 17335296
 *     new k and v, to pages  2592 x 3072; from the CPU 192 x 3072                      =     7962624; 589824, packed 165888
 *     packing them           2592 (3072 + 864)                                         =    10202112
 * Of the head: a norm, a choice and a product for each batch; embedding reads and writes a row of the table and a state:
 *     18 (2 x 1536 x 12 + 4 x 50272 x 12 + 3 (2 x 50272 x 768 + 8 (50272 + 768))) + 4 x 1536 x 2592 = 4251833856 */
// clang-format on
TEST(where_the_gpus_memory_counts_time_is_its_bytes) {
    static const double head = 4251833856, prefill = 173408256, generation = 685375488, packed = 197001216 + 36314112,
                        cache[] = {61636608 + 7962624, 61636608 + 589824, 17335296 + 165888 + 10202112};
    for (int way = 0; way < 6; way++) {
        const int kept = way / 2; /* on the GPU, on the CPU, and there packed */
        Policy p = kept ? on(TIER_CPU, KEPT, 0) : all_gpu(4, K);
        p.weight_packed = way % 2, p.cache_packed = kept == 2;
        expect_takes(p, "gpu_bdw=1e9", (L * (prefill + (way % 2 ? packed : generation) + cache[kept]) + head) / 1e9);
    }
    /* a packed head reads 4.5 of 16 bits for each batch, and 36 bytes in place of 2 for a number of a token, as it embeds
     */
    Policy p = all_gpu(4, K);
    p.weight_packed = p.head_packed = true;
    expect_takes(p, "gpu_bdw=1e9",
                 (L * (prefill + packed + cache[0]) + head - SWEEPS * K * (1 - 4.5 / 16) * HEAD +
                  2 * (GROUP_BYTES - 2.) * H1 * ROWS) /
                     1e9);
}

/* One square at a time waits for its states from disk to GPU and back. Its k and v are ready after a quarter of the
 * products: where they are slow to store, they are behind the rest. */
TEST(a_square_alone_takes_its_whole_way) {
    char slow[100];
    expect_takes(on(TIER_DISK, STATES, IN_TURN), "ctog_bdw=1e9 gtoc_bdw=2e9 dtoc_bdw=4e9 ctod_bdw=.5e9",
                 L * HIDDEN_ROW * ROWS * (1 + .5 + .25 + 2) / 1e9);
    for (int tier = TIER_CPU; tier <= TIER_DISK; tier++) { /* a layer of both prefills takes a second */
        snprintf(slow, sizeof slow, "mm_flops_p=%.17g %s_bdw_p=%.17g", 2 * IN_PREFILL * MATRICES,
                 tier == TIER_CPU ? "gtoc" : "ctod", KV * IN_PREFILL / .9);
        expect_takes(on(tier, KEPT, IN_TURN), slow, L * (.25 + .9));
    }
}

/* With the diagonal schedule one batch is in prefill beside others that decode, each at the rates of its own phase. The
 * caches of two of these move beside it; those of the others wait for its products. Half of each last page is empty. */
TEST(behind_a_prefill_the_caches_of_all_but_two_batches_queue) {
    Policy p = on_tiers(1, 0, 0, 1, 1, 0, 2, 6);
    p.schedule = SCHEDULE_DIAGONAL;
    open_plan(opt_named("opt-125m"), p, machine_with("ctog_bdw_g=1e9 mm_flops_p=1e12"), 60, S, 2 * N);
    const Workload *w = &plan->work[1];
    const double decoding = w->decodes / w->sweeps, page = plan->policy.page_tokens;
    const double caches = KV * (w->past + w->decoded * (page / 2 - 1)) / w->sweeps / 1e9;
    const double products = 2 * w->prompt_rows / w->sweeps * MATRICES / 1e12;
    CU_ASSERT_FATAL(decoding > 3);            /* or nothing would queue */
    machine.mm_flops[1] *= products / caches; /* now both take as long */
    const Cost cost = expected();
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "queue^p");
    CU_ASSERT(near(cost.T_pre, caches + (decoding - 2) / decoding * caches));
    close_plan();
}

/* As before, but the caches come from the disk, one more of them beside the prefill. */
TEST(behind_a_prefill_the_disk_reads_the_caches_of_all_but_three_batches) {
    Policy p = on_tiers(1, 0, 0, 0, 1, 0, 2, 6);
    p.schedule = SCHEDULE_DIAGONAL, p.delegated = true;
    open_plan(opt_named("opt-125m"), p, machine_with("dtoc_bdw_g=1e9 mm_flops_p=1e12"), 60, S, 2 * N);
    const Workload *w = &plan->work[1];
    const double decoding = w->decodes / w->sweeps, page = plan->policy.page_tokens;
    const double caches = KV * (w->past + w->decoded * (page / 2 - 1)) / w->sweeps / 1e9;
    machine.mm_flops[1] *= 2 * w->prompt_rows / w->sweeps * MATRICES / 1e12 / caches;
    const Cost cost = expected();
    CU_ASSERT_STRING_EQUAL(cost.slowest[1], "read^p");
    CU_ASSERT(near(cost.T_pre, caches + (decoding - 3) / decoding * caches));
    close_plan();
}

/* Beside a layer the next one's weights are loaded, and beside the last one, which has the head behind it, the first one's:
 * where the head takes longer than any load, these are the bytes that it hides. */
TEST(beside_the_last_layer_the_first_is_loaded) {
    const Policy p = on_tiers(.45, .55, 1, 0, 1, 0, 4, 1);
    const double products = 4 * 2. * MATRICES / 2e10, head = 4 * HEAD / 2e10;
    double loads = 0;
    open_plan(opt_named("opt-125m"), p, machine_with("ctog_bdw_g=1e9 mm_flops_g=2e10"), 4, S, N);
    for (int j = 1; j < L; j++) {
        const double load = (double)plan->layer_bytes[TIER_CPU][j] / 1e9;
        CU_ASSERT_FATAL(load > 1.2 * products && load < head); /* longer by more than what the two hold each other up */
        loads += load;
    }
    CU_ASSERT(plan->layer_bytes[TIER_CPU][0] != plan->layer_bytes[TIER_CPU][L - 1]); /* or the test would say nothing */
    CU_ASSERT(near(L * expected().T_gen, loads + products + head));
    close_plan();
}

/* What streams takes one of the two slots, in turn. Here layers 2, 6 and 10 stream a matrix, and of those between them two
 * or three a bias: so each matrix has the two layers before its own to load in. */
TEST(a_layer_that_streams_hides_behind_those_that_do_not) {
    const double products = 4 * 2. * MATRICES / 2e10, head = 4 * HEAD / 2e10;
    open_plan(opt_named("opt-125m"), on_tiers(.98, .02, 1, 0, 1, 0, 4, 1), machine_with("mm_flops_g=2e10"), 4, S, N);
    const double matrix = (double)plan->layer_bytes[TIER_CPU][2];
    for (int j = 0; j < L; j++) CU_ASSERT_FATAL((plan->layer_bytes[TIER_CPU][j] > .99 * matrix) == (j % 4 == 2));
    for (double load = 1.5; load < 5; load += 1.5) { /* in layers */
        machine.bdw[CTOG][0] = matrix / (load * products);
        const double waits = 3 * fmax(0, load - 2);
        CU_ASSERT(fabs(L * expected().T_gen / ((L + waits) * products + head) - 1) <
                  .001); /* biases take .0004 of a layer */
    }
    machine.bdw[CTOG][0] = matrix / (2 * products);
    plan->policy.synchronize = true; /* nothing loads before the layer behind which it comes */
    CU_ASSERT(fabs(L * expected().T_gen / ((L + 3) * products + head) - 1) < .001);
    close_plan();
}

/* A batch in prefill has many pieces, and the k and v of those at its end leave the GPU: where that takes eight times as
 * long as the products of these pieces, it hides only behind them and the next pieces that have a slot. */
TEST(stores_of_a_prefill_come_at_its_end) {
    enum { SEQS = 64 };
    char slow[100];
    for (int tier = TIER_CPU; tier <= TIER_DISK; tier++) { /* a layer's products take a second */
        snprintf(slow, sizeof slow, "mm_flops_p=%.17g %s_bdw_p=%.17g", 2 * SEQS * S * MATRICES,
                 tier == TIER_CPU ? "gtoc" : "ctod", KV * SEQS * S / 8);
        open_plan(opt_named("opt-125m"), on_tiers(1, 0, .75, tier == TIER_CPU ? .25 : 0, 1, 0, SEQS, 1), machine_with(slow),
                  SEQS, S, N);
        const double pieces = ceil((double)SEQS * S / plan->piece_rows);
        const Cost cost = expected();
        CU_ASSERT(pieces > 2 * plan->piece_slots && !strcmp(cost.slowest[1], "bunch^p"));
        CU_ASSERT(near(cost.T_pre, .75 + 8 * .25 - plan->piece_slots / pieces));
        close_plan();
    }
}

/* What it minimizes are these seconds, and a price that is small beside them. */
TEST(the_lp_minimizes_the_seconds_of_all_sweeps) {
    double x[RUNTIME_VARS] = {0}, sum = 0, sweep_s[2];
    Policy p = all_gpu(4, K);
    p.schedule = SCHEDULE_DIAGONAL;
    open_by_hand(p, "");
    const Lp *lp = open_lp();
    for (int v = 0; v < NFRACTIONS; v++) CU_ASSERT(lp->c[v] >= 0);
    for (int v = NFRACTIONS; v < RUNTIME_VARS; v++) x[v] = v, sum += lp->c[v] * v;
    runtime_sweeps(sweep_s, x, L);
    CU_ASSERT(near(sum, plan->work[0].sweeps * sweep_s[0] + plan->work[1].sweeps * sweep_s[1]));
    close_plan();
}

/* Weights, cache and activations each on one tier, under every schedule, with either side attending, in four flights or one
 * and with packed pages: the rows of memory have the plan's totals. To the byte where everything is on the CPU, from where
 * they start; elsewhere to the padding of tensors and regions, which begin at whole multiples of 64 bytes. What a row could
 * leave out is thousands of bytes. */
TEST(the_lps_memory_is_the_plans_at_every_corner) {
    enum { CORNERS = NTIERS * NTIERS * NTIERS, WAYS = 3 * 2 * CORNERS };
    for (int way = 0; way < 3 * WAYS; way++) {
        const int w = way % 3, c = way / 3 % 3, h = way / 9 % 3, kind = way / WAYS; /* plain, four flights, packed */
        OptConfig config = SMALL_CONFIG(2);
        Policy p = on_tiers(w == 0, w == 1, c == 0, c == 1, h == 0, h == 1, 6, 3);
        double x[RUNTIME_VARS] = {0};
        p.schedule = way / CORNERS / 2 % 3, p.delegated = way / CORNERS % 2;
        p.flights = kind == 1 ? 4 : 1, p.cache_packed = kind == 2;
        if (p.cache_packed) config.h1 = config.embed = 48; /* heads of whole sixteens */
        open_plan(config, p, machine_with(""), 3 * COUNT, S, N);
        memset(machine.mem, 0, sizeof machine.mem);
        const Lp *lp = open_lp();
        const bool start = w == TIER_CPU && c == TIER_CPU && h == TIER_CPU && !p.delegated;
        x[WG + w] = x[CG + c] = x[HG + h] = 1;
        int t = 0;
        for (const LpRow *row = lp->row; row < lp->row + lp->m && t < NTIERS; row++) {
            if (strcmp(row->name, memory_row[t])) continue;
            CU_ASSERT(fabs(lp_excess(row, x, lp->n) - (double)plan->total[t]) < (start ? .5 : 64. * NROLES * config.l));
            t++;
        }
        CU_ASSERT_EQUAL(t, NTIERS);
        close_plan();
    }
}

/* A placement is judged by what its whole sequences take, the LP by shares. With one of 8 sequences on the CPU each of the
 * two batches has one op on each lane where none or all would have it; with one of 2 it is alone in its batch, which is the
 * whole way behind the other. */
TEST(a_batch_with_one_sequence_off_the_gpu_makes_all_the_ops) {
    const double shares[][2] = {{0, 0}, {1. / 8, .5}, {1. / 4, 1}, {1, 1}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        open_plan(opt_named("opt-125m"), on_tiers(1, 0, 1, 0, 1 - shares[i][0], shares[i][0], 4, 2), machine_with(""), 8, S,
                  N);
        double b[2] = {0};
        machine.op_s = 1;
        for (int placed = 0; placed < 2; placed++) {
            const Lp *lp = lp_for(placed ? plan : NULL);
            double x[RUNTIME_VARS] = {1, 0, 0, 1, 0, 0, 1 - shares[i][0], shares[i][0]};
            for (const LpRow *row = lp->row; row < lp->row + lp->m; row++)
                if (!strcmp(row->name, "gtoc^g")) b[placed] = lp_excess(row, x, lp->n);
        }
        CU_ASSERT(near(b[0], 2 * shares[i][0]) && near(b[1], 2 * shares[i][1]));
        close_plan();
    }
}

// ---- Against the sim, and on any machine ----------------------------------------------------------------------------

static void open_random(uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b"};
    static const char *const machines[] = {"hardware/t4.json", "hardware/rtx4090.json", "hardware/h100.json",
                                           "hardware/laptop.json"};
    Hardware h;
    OptConfig config = opt_named(names[test_below(seed, 3)]);
    config.eos = -1; /* every sequence takes its full length */
    ASSERT_OK(hardware_read(&h, machines[test_below(seed, 4)], &err));
    h.shared_cores = test_below(seed, 4) == 0;
    Policy p = all_gpu(1 << test_below(seed, 6), 1 + test_below(seed, test_below(seed, 2) ? 3 : 8));
    p.schedule = test_below(seed, 4) ? SCHEDULE_ZIGZAG : SCHEDULE_DIAGONAL, p.delegated = test_below(seed, 2);
    p.overlap = test_below(seed, 8), p.table_home = test_below(seed, 3) ? TIER_GPU : TIER_CPU;
    for (int what = 0; what < 6; what += 2) draw_shares(&p.share[what], &p.share[what + 1], seed);
    p.weight_packed = test_below(seed, 3) == 0;
    p.head_packed = p.weight_packed && p.gbs > 4;
    p.cache_packed = test_below(seed, 3) == 0;
    if (test_below(seed, 4) == 0) p.sparsity = .1, p.delegated = true;
    int s = 32 << test_below(seed, 5), n = 2 + test_below(seed, 30),
        blocks = p.schedule == SCHEDULE_DIAGONAL ? 3 : 1 + test_below(seed, 2);
    open_plan(config, p, h, p.gbs * p.num_gpu_batches * blocks, s, n);
}

/* Waiting that lanes alone do not have: reads behind a prefill, batches that decode beside it at their own rates, one
 * sequence on the CPU; the weights of few layers; stores of a batch's last pieces. */
TEST(the_sim_waits_as_the_model_expects) {
    const struct {
        const char *hardware, *model;
        int s, n, blocks;
        Policy policy;
    } cases[] = {{"hardware/laptop.json", "opt-13b", 512, 8, 3, on_tiers(.22, .78, 0, .321, 1, 0, 7, 8)},
                 {"hardware/t4-fitted.json", "opt-1.3b", 32, 32, 4, on_tiers(1, 0, 1, 0, 1, 0, 1, 16)},
                 {"hardware/rtx4090.json", "opt-350m", 64, 32, 1, on_tiers(1, 0, .9167, .0833, 1, 0, 12, 1)},
                 {"hardware/rtx3090.json", "opt-13b", 64, 16, 1, on_tiers(.97, .03, 1, 0, 1, 0, 2, 1)},
                 {"hardware/h100.json", "opt-125m", 256, 4, 1, on_tiers(1, 0, .93, .07, 1, 0, 1000, 1)}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Policy p = cases[i].policy;
        Hardware h;
        OptConfig config = opt_named(cases[i].model);
        config.eos = -1;
        ASSERT_OK(hardware_read(&h, cases[i].hardware, &err));
        p.schedule = cases[i].blocks > 1 ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG, p.delegated = true;
        open_plan(config, p, h, block_size(&p) * cases[i].blocks, cases[i].s, cases[i].n);
        const Cost cost = expected();
        Rig r = {.model = model, .task = &task, .sim = &machine, .plan = plan};
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        CU_ASSERT(fabs(cost.T / r.stats.total_s - 1) < .05);
        rig_close(&r), plan = NULL;
        close_plan();
    }
}

/* Any placement, schedule and delegation. A few of them make squares wait in ways that the model does not know. */
TEST(the_sim_takes_what_the_model_expects) {
    enum { TRIALS = 60 };
    uint64_t seed = 11;
    int near_by = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        open_random(&seed);
        const Cost cost = expected();
        Rig r = {.model = model, .task = &task, .sim = &machine, .plan = plan};
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        const double seconds = r.stats.total_s, off = fabs(cost.T / seconds - 1);
        near_by += (off < .1);
        CU_ASSERT(off < .25);
        CU_ASSERT(near(cost.throughput * cost.T, (double)task.count * task.prompts[0].n));
        rig_close(&r), plan = NULL;
        close_plan();
    }
    CU_ASSERT(near_by >= TRIALS * 19 / 20);
}

/* Returns the least value of the LP, infinite where nothing fits; *seconds: what all sweeps take there. */
static double least(double *seconds) {
    LpAnswer answer;
    const Lp *lp = open_lp();
    lp_solve(&answer, lp);
    *seconds = INFINITY;
    if (answer.verdict != LP_OPTIMAL) {
        CU_ASSERT_EQUAL(answer.verdict, LP_INFEASIBLE);
        return INFINITY;
    }
    *seconds = 0;
    for (int v = NFRACTIONS; v < RUNTIME_VARS; v++) *seconds += lp->c[v] * answer.x[v];
    return answer.value;
}

/* The price of idling is 2%, and may be worth it. */
TEST(more_memory_or_bandwidth_never_costs_time) {
    uint64_t seed = 10;
    int better = 0;
    for (int trial = 0; trial < 100; trial++) {
        double before, after;
        open_random(&seed);
        for (int t = 0; t < NTIERS; t++) machine.mem[t] = (double)plan->total[t] * test_spread(&seed, .3, 2) + 1;
        const Hardware was = machine;
        const double value = least(&before);
        for (int i = 0; i < NUMBERS; i++) {
            *number(i) *= 1.5;
            CU_ASSERT(least(&after) <= value * (1 + 1e-9));
            CU_ASSERT(after <= before * 1.02);
            better += after < before * (1 - 1e-6);
            machine = was;
        }
        close_plan();
    }
    CU_ASSERT(better > 100);
}
