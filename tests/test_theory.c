/* test_theory.c: appendix A.2 and section 5 on counted bytes. Models of any size, since the sim moves none. That the same
 * bytes are moved by a device that has them is of the suites `schedule` and `lanes`. */
#include "tests.h"

/* count prompts of s tokens, n to generate, in batches of gbs. */
typedef struct {
    const char *model;
    int l, gbs, K, count, s, n;
} Load;
/* As they are; weights and cache packed; with attention on the CPU, to all of the past and to a tenth of it. */
typedef enum { PLAIN, PACKED, DENSE, SPARSE } How;

/* Weights, cache and activations all stream from the CPU or from the disk. */
static Rig counted(Schedule schedule, Tier from, const Load *load, How how) {
    const double cpu = from == TIER_CPU;
    const Hardware machine = machine_with("");
    OptConfig config = opt_named(load->model);
    config.l = load->l;
    config.eos = -1;
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Task task = equal_task(load->count, load->s, load->n);
    Rig c = {
        .model = model, .policy = on_tiers(0, cpu, 0, cpu, 0, cpu, load->gbs, load->K), .task = &task, .sim = &machine};
    Policy *p = &c.policy;
    p->schedule = schedule, p->page_tokens = 1, p->table_home = from;
    p->weight_packed = p->cache_packed = how == PACKED, p->delegated = how >= DENSE;
    p->sparsity = how == DENSE ? 1 : how == SPARSE ? .1 : 0;
    CU_ASSERT_EQUAL_FATAL(rig_run(&c), 0);
    CU_ASSERT_EQUAL(c.stats.generated, (long)load->count * load->n);
    rig_close(&c), free_task(&task), checkpoint_close(model);
    return c;
}

/* The model in each sweep; 4 h1 l (s n + n (n-1) / 2) of cache in and out for each sequence; 2 (2 h1 s l + 2 h1 l (n-1)) of
 * activations, less the s - 1 rows of a prompt that nobody wants behind the last layer. Only the sweeps differ: row has n
 * for each batch, zig-zag n for each block, and the diagonal n behind the one with which the last batch enters. */
TEST(blocks_of_any_schedule_move_what_a21_says) {
    static const Load cases[] = {{"opt-125m", 12, 2, 3, 6, 7, 5},
                                 {"opt-1.3b", 24, 4, 2, 22, 64, 16},
                                 {"opt-30b", 3, 12, 3, 36, 512, 32},
                                 {"opt-175b", 2, 8, 8, 64, 256, 32}};
    for (int i = 0; i < 24; i++) {
        const Schedule schedule = (Schedule)(i / 8);
        const bool disk = i / 4 % 2;
        const Load *b = &cases[i % 4];
        OptConfig c = opt_named(b->model);
        c.l = b->l; /* as in counted() */
        const double h1 = c.h1, l = c.l, s = b->s, n = b->n, count = b->count, last = ceil(count / b->gbs) - 1;
        const double sweeps[] = {
            [SCHEDULE_ZIGZAG] = (floor(last / b->K) + 1) * n,
            [SCHEDULE_ROW] = (last + 1) * n,
            [SCHEDULE_DIAGONAL] = (floor(last / b->K) + 1) * n + ceil(fmod(last, b->K) * n / b->K),
        };
        const double expected[NKINDS] = {
            [WEIGHT] = sweeps[schedule] * streamed_bytes(&c),
            [CACHE] = 4 * h1 * count * l * (s * n + n * (n - 1) / 2),
            [ACTIVATION] = 2 * count * (2 * h1 * s * l + 2 * h1 * l * (n - 1)) - 2 * 2 * h1 * count * (s - 1),
        };
        const double stored[NKINDS] = {[CACHE] = 4 * h1 * count * l * (s + n - 1), [ACTIVATION] = expected[ACTIVATION] / 2};
        const Rig found = counted(schedule, disk ? TIER_DISK : TIER_CPU, b, PLAIN);
        for (int kind = WEIGHT; kind <= ACTIVATION; kind++) {
            CU_ASSERT_EQUAL(found.moved[GTOC][kind], stored[kind]);
            CU_ASSERT_EQUAL(found.moved[CTOD][kind], disk ? stored[kind] : 0);
            CU_ASSERT_EQUAL(found.moved[CTOG][kind] + found.moved[GTOC][kind], expected[kind]);
            CU_ASSERT_EQUAL(found.moved[DTOC][kind] + found.moved[CTOD][kind], disk ? expected[kind] : 0);
        }
    }
}

/* Four and a half bits of sixteen; biases, layernorms and the table stay as they are. */
TEST(packed_it_moves_four_and_a_half_bits_a_number) {
    const Load load = {"opt-1.3b", 24, 2, 2, 4, 64, 8};
    const OptConfig c = opt_named("opt-1.3b");
    const double matrices = c.l * (8. * c.h1 * c.h1 + 4. * c.h1 * c.h2);
    for (Tier from = TIER_CPU; from <= TIER_DISK; from++) {
        const Rig plain = counted(SCHEDULE_ZIGZAG, from, &load, PLAIN), b = counted(SCHEDULE_ZIGZAG, from, &load, PACKED);
        CU_ASSERT_EQUAL(b.moved[CTOG][WEIGHT], load.n * (streamed_bytes(&c) - matrices * 11.5 / 16));
        for (int link = CTOG; link <= CTOD; link++) {
            CU_ASSERT_EQUAL(b.moved[link][CACHE], plain.moved[link][CACHE] * 4.5 / 16);
            CU_ASSERT_EQUAL(b.moved[link][ACTIVATION], plain.moved[link][ACTIVATION]);
        }
    }
}

/* Of V a tenth of the past and the own token's; from the disk, where it is staged, no more than that moves either. */
TEST(sparse_it_reads_a_tenth_of_v) {
    enum { S = 2000, N = 5 };
    const OptConfig c = opt_named("opt-125m");
    const Load load = {"opt-125m", 12, 1, 2, 2, S, N};
    double row = 2. * c.h1 * c.l, k = 0, v = 0, past = 0;
    for (int t = S + 1; t < S + N; t++) k += t * row, past += (t - 1) * row, v += (ceil(.1 * (t - 1)) + 1) * row;
    for (Tier from = TIER_CPU; from <= TIER_DISK; from++) {
        const Rig b = counted(SCHEDULE_ZIGZAG, from, &load, SPARSE), dense = counted(SCHEDULE_ZIGZAG, from, &load, DENSE);
        CU_ASSERT(dense.read[0] == 2 * k && dense.read[1] == 2 * k);
        CU_ASSERT(b.read[0] == 2 * k && b.read[1] == 2 * v);
        CU_ASSERT_EQUAL(dense.moved[DTOC][CACHE], from == TIER_DISK ? 2 * 2 * past : 0);
        CU_ASSERT_EQUAL(b.moved[DTOC][CACHE], from == TIER_DISK ? 2 * (past + v - (N - 1) * row) : 0);
    }
}

/* K batches of one sequence. */
static Rig single(Schedule schedule, int K, int count, int s, int n) {
    return counted(schedule, TIER_CPU, &(Load){"opt-125m", 1, 1, K, count, s, n}, PLAIN);
}

/* Theorem 4.1: at equal memory zig-zag loads weights at most twice as often for each token as the optimal schedule, which
 * the diagonal approaches; and by no more than (2s + 2n) / (2s + n). Memory is that of Z zig-zag batches. */
TEST(zigzag_is_within_twice_the_diagonal_as_theorem_4_1_says) {
    static const int lengths[] = {4, 16, 64, 256}, outputs[] = {2, 8, 32, 96};
    double most = 0;
    for (int i = 0; i < 16; i++)
        for (int Z = 1; Z <= 9; Z *= 3) {
            int s = lengths[i / 4], n = outputs[i % 4], K = Z;
            while (single(SCHEDULE_DIAGONAL, K + 1, 2 * K + 2, s, n).pages <= Z * (s + n - 1)) K++;
            const int P = K * Z * ((Z + 3) / Z); /* whole blocks of either, and four rounds of the diagonal or more */
            const Rig z = single(SCHEDULE_ZIGZAG, Z, P, s, n), d = single(SCHEDULE_DIAGONAL, K, P, s, n);
            const double ratio = (double)z.moved[CTOG][WEIGHT] / d.moved[CTOG][WEIGHT], warm_up = (double)P / (P + K);
            CU_ASSERT_EQUAL(z.pages, Z * (s + n - 1));
            CU_ASSERT(d.pages <= z.pages);
            CU_ASSERT(ratio <= (2. * s + 2 * n) / (2. * s + n) + 1e-9); /* which is less than 2 */
            CU_ASSERT(ratio >= (double)K / Z * warm_up - 1e-9);
            most = fmax(most, ratio);
        }
    CU_ASSERT(most > 1.6); /* and it is worth its name */
}
