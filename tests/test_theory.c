/* test_theory.c: appendix A.2 and section 5 on counted bytes. Models of any size, since the sim moves none. */
#include "tests.h"

static const Hardware machine = {.gmem = 1e18,
                                 .cmem = 1e18,
                                 .nmem = 1e18,
                                 .ctog_bdw = {1e10, 1e10},
                                 .gtoc_bdw = {1e10, 1e10},
                                 .dtoc_bdw = {1e9, 1e9},
                                 .ctod_bdw = {1e9, 1e9},
                                 .mm_flops = {1e13, 1e13},
                                 .bmm_flops = {1e13, 1e13},
                                 .cpu_flops = {1e11, 1e11}};

typedef struct {
    double moved[NCHANNELS][NKINDS], per_token; /* bytes; weights over ctog for each new token */
    int pages;                                  /* of the CPU tier's pool */
    long sweeps, planned_sweeps;
    double read[2]; /* K, V by attention on the CPU */
} Counted;

static bool packed;     /* weights and cache */
static double sparsity; /* with attention on the CPU; 0: on the GPU */

/* count prompts of s tokens, n to generate, everything streamed from the CPU (or the disk): weights, cache, activations. */
static Counted count_bytes(const char *name, int l, Schedule schedule, int gbs, int K, int count, int s, int n, bool disk) {
    OptConfig config;
    Error err;
    Counted c = {.per_token = 0};
    RunStats stats;
    Listener listener = {0};
    CU_ASSERT_FATAL(opt_config_by_name(&config, name) == 0);
    config.l = l, config.eos = -1;
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Task task = {.prompts = xcalloc(count, sizeof(Prompt)), .count = count};
    int32_t *ids = xcalloc(s, sizeof *ids);
    for (int i = 0; i < count; i++) task.prompts[i] = (Prompt){.ids = ids, .s = s, .n = n};
    Policy p = {
        .wc = !disk, .cc = !disk, .hc = !disk, .gbs = gbs, .num_gpu_batches = K, .schedule = schedule, .overlap = true};
    p.page_tokens = 1, p.table_home = disk ? TIER_DISK : TIER_CPU;
    p.weight_packed = p.cache_packed = packed, p.sparsity = sparsity, p.delegated = sparsity > 0;
    Plan *plan = plan_make(model, &p, &task, F16, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Device *device = sim_open(plan, &machine);
    ASSERT_OK(schedule_run(plan, &task, device, &listener, &stats, &err));
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) c.moved[lane_channel[lane]][kind] += device->count[lane].moved[kind];
    for (int kv = 0; kv < 2; kv++) c.read[kv] = (double)device->count[ATTEND].read[kv];
    CU_ASSERT_EQUAL(stats.generated, (long)count * n);
    c.per_token = c.moved[CTOG][WEIGHT] / stats.generated;
    c.pages = plan->npages[TIER_CPU], c.sweeps = stats.sweeps, c.planned_sweeps = plan->sweeps;
    CU_ASSERT_EQUAL(c.sweeps, c.planned_sweeps);
    device->close(device);
    plan_free(plan);
    checkpoint_close(model);
    free(task.prompts), free(ids);
    return c;
}

static double layer_bytes(const OptConfig *c) {
    double bytes = 0;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(c, (Role)r, &rows, &cols);
        bytes += ((size_t)rows * cols * 2 + 63) / 64 * 64;
    }
    return bytes;
}

/* n times the model; 4 h1 bls l (s n + n (n-1) / 2) of cache in and out; 2 (2 h1 s bls l + 2 h1 bls l (n-1)) of
 * activations, less the s - 1 rows of a prompt that nobody wants behind the last layer. */
static void a_zigzag_block_moves_what_a21_says(void) {
    static const struct {
        const char *name;
        int l, gbs, K, s, n;
    } cases[] = {{"opt-125m", 12, 2, 3, 7, 5},
                 {"opt-1.3b", 24, 4, 2, 64, 16},
                 {"opt-30b", 3, 12, 3, 512, 32},
                 {"opt-175b", 2, 8, 8, 256, 32}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OptConfig c;
        int s = cases[i].s, n = cases[i].n, bls = cases[i].gbs * cases[i].K;
        CU_ASSERT_FATAL(opt_config_by_name(&c, cases[i].name) == 0);
        c.l = cases[i].l;
        double model = c.l * layer_bytes(&c) + 2. * c.vocab * c.h1, h1 = c.h1, l = c.l;
        double cache = 4 * h1 * bls * l * (s * (double)n + n * (n - 1) / 2.);
        double activations = 2 * (2 * h1 * s * bls * l + 2 * h1 * bls * l * (n - 1)) - 2 * 2 * h1 * bls * (s - 1);
        for (int disk = 0; disk < 2; disk++) {
            Counted b = count_bytes(cases[i].name, c.l, SCHEDULE_ZIGZAG, cases[i].gbs, cases[i].K, bls, s, n, disk);
            Counted r = count_bytes(cases[i].name, c.l, SCHEDULE_ROW, cases[i].gbs, cases[i].K, bls, s, n, disk);
            CU_ASSERT_EQUAL(b.moved[CTOG][WEIGHT], n * model);
            CU_ASSERT_EQUAL(r.moved[CTOG][WEIGHT], cases[i].K * n * model); /* row: once for every GPU batch */
            CU_ASSERT_EQUAL(b.moved[CTOG][CACHE] + b.moved[GTOC][CACHE], cache);
            CU_ASSERT_EQUAL(r.moved[CTOG][CACHE] + r.moved[GTOC][CACHE], cache);
            CU_ASSERT_EQUAL(b.moved[CTOG][ACTIVATION] + b.moved[GTOC][ACTIVATION], activations);
            CU_ASSERT_EQUAL(b.moved[DTOC][CACHE] + b.moved[CTOD][CACHE], disk ? cache : 0);
            CU_ASSERT_EQUAL(b.moved[DTOC][ACTIVATION] + b.moved[CTOD][ACTIVATION], disk ? activations : 0);
        }
    }
}

/* Four and a half bits of sixteen; biases, layernorms and the table stay as they are. */
static void packed_it_moves_four_and_a_half_bits_a_number(void) {
    enum { S = 64, N = 8, BLS = 4 };
    OptConfig c;
    CU_ASSERT_FATAL(opt_config_by_name(&c, "opt-1.3b") == 0);
    double matrices = c.l * (8. * c.h1 * c.h1 + 4. * c.h1 * c.h2), all = c.l * layer_bytes(&c), table = 2. * c.vocab * c.h1;
    for (int disk = 0; disk < 2; disk++) {
        Counted plain = count_bytes("opt-1.3b", 24, SCHEDULE_ZIGZAG, 2, 2, BLS, S, N, disk);
        packed = true;
        Counted b = count_bytes("opt-1.3b", 24, SCHEDULE_ZIGZAG, 2, 2, BLS, S, N, disk);
        packed = false;
        CU_ASSERT_EQUAL(b.moved[CTOG][WEIGHT], N * (all - matrices * 11.5 / 16 + table));
        CU_ASSERT((b.moved[CTOG][WEIGHT] - N * table) / (plain.moved[CTOG][WEIGHT] - N * table) < .2825);
        for (int link = CTOG; link <= CTOD; link++) {
            CU_ASSERT_EQUAL(b.moved[link][CACHE], plain.moved[link][CACHE] * 4.5 / 16);
            CU_ASSERT_EQUAL(b.moved[link][ACTIVATION], plain.moved[link][ACTIVATION]);
        }
    }
}

/* Of V a tenth of the past and the own token's; from the disk, where it is staged, no more than that moves either. */
static void sparse_it_reads_a_tenth_of_v(void) {
    enum { S = 2000, N = 5 };
    OptConfig c;
    CU_ASSERT_FATAL(opt_config_by_name(&c, "opt-125m") == 0);
    double row = 2. * c.h1 * c.l, k = 0, v = 0, past = 0;
    for (int t = S + 1; t < S + N; t++) k += t * row, past += (t - 1) * row, v += (ceil(.1 * (t - 1)) + 1) * row;
    for (int disk = 0; disk < 2; disk++) {
        sparsity = .1;
        Counted b = count_bytes("opt-125m", c.l, SCHEDULE_ZIGZAG, 1, 2, 2, S, N, disk);
        sparsity = 1;
        Counted dense = count_bytes("opt-125m", c.l, SCHEDULE_ZIGZAG, 1, 2, 2, S, N, disk);
        sparsity = 0;
        CU_ASSERT(dense.read[0] == 2 * k && dense.read[1] == 2 * k);
        CU_ASSERT(b.read[0] == 2 * k && b.read[1] == 2 * v && v < .102 * k);
        CU_ASSERT_EQUAL(dense.moved[DTOC][CACHE], disk ? 2 * 2 * past : 0);
        CU_ASSERT_EQUAL(b.moved[DTOC][CACHE], disk ? 2 * (past + v - (N - 1) * row) : 0);
    }
}

/* The diagonal moves the same cache and, batch for batch, the same activations: only weights differ. */
static void the_diagonal_moves_the_same_cache(void) {
    Counted z = count_bytes("opt-1.3b", 24, SCHEDULE_ZIGZAG, 2, 4, 64, 32, 24, false);
    Counted d = count_bytes("opt-1.3b", 24, SCHEDULE_DIAGONAL, 2, 7, 64, 32, 24, false);
    for (int kind = CACHE; kind <= ACTIVATION; kind++) {
        CU_ASSERT_EQUAL(d.moved[CTOG][kind], z.moved[CTOG][kind]);
        CU_ASSERT_EQUAL(d.moved[GTOC][kind], z.moved[GTOC][kind]);
    }
    CU_ASSERT(d.moved[CTOG][WEIGHT] < z.moved[CTOG][WEIGHT]);
}

/* Pages of one token that K batches of one sequence hold at most. */
static int diagonal_pages(int K, int s, int n) {
    Admission a;
    int topups, entered[64], peak;
    Task task = {.prompts = xcalloc(2 * K, sizeof(Prompt)), .count = 2 * K};
    Policy p = {.cg = 1, .gbs = 1, .num_gpu_batches = K, .schedule = SCHEDULE_DIAGONAL, .page_tokens = 1};
    for (int i = 0; i < 2 * K; i++) task.prompts[i] = (Prompt){.s = s, .n = n};
    int line = 0;
    admission_open(&a, &p, &task, &line, NULL);
    for (long i = 0; line < task.count; i++) {
        for (int e = 0; e < a.nseats; e++)
            if (a.seat[e].prompt >= 0 && a.seat[e].since + n == i) admission_leave(&a, e, n);
        admission_next(&a, i, entered, &topups);
    }
    peak = a.peak[TIER_GPU];
    admission_close(&a);
    free(task.prompts);
    return peak;
}

/* Theorem 4.1: at equal memory zig-zag loads weights at most twice as often for each token as the optimal schedule, which
 * the diagonal approaches; and by no more than (2s + 2n) / (2s + n). Memory is that of Z zig-zag batches. */
static void zigzag_is_within_twice_the_diagonal(void) {
    static const int lengths[] = {4, 16, 64, 256}, outputs[] = {2, 8, 32, 96};
    double most = 0;
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++)
            for (int Z = 1; Z <= 9; Z *= 3) {
                int s = lengths[a], n = outputs[b], K = Z, P;
                while (diagonal_pages(K + 1, s, n) <= Z * (s + n - 1)) K++;
                P = K * Z * ((Z + 3) / Z); /* whole blocks of either, and four rounds of the diagonal or more */
                Counted z = count_bytes("opt-125m", 1, SCHEDULE_ZIGZAG, 1, Z, P, s, n, false);
                Counted d = count_bytes("opt-125m", 1, SCHEDULE_DIAGONAL, 1, K, P, s, n, false);
                double ratio = z.per_token / d.per_token, warm_up = (double)P / (P + K);
                CU_ASSERT_EQUAL(z.pages, Z * (s + n - 1));
                CU_ASSERT(d.pages <= z.pages);
                CU_ASSERT(ratio <= 2 && ratio <= (2. * s + 2 * n) / (2. * s + n) + 1e-9);
                CU_ASSERT(ratio >= (double)K / Z * warm_up - 1e-9);
                if (ratio > most) most = ratio;
            }
    CU_ASSERT(most > 1.6); /* and it is worth its name */
}

CU_TestInfo tests[] = {
    {"a zig-zag block moves what A.2.1 says", a_zigzag_block_moves_what_a21_says},
    {"packed, it moves four and a half bits a number", packed_it_moves_four_and_a_half_bits_a_number},
    {"sparse, it reads a tenth of V", sparse_it_reads_a_tenth_of_v},
    {"the diagonal moves the same cache", the_diagonal_moves_the_same_cache},
    {"zig-zag is within twice the diagonal (Theorem 4.1)", zigzag_is_within_twice_the_diagonal},
    CU_TEST_INFO_NULL,
};
