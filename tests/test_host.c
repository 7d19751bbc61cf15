/* test_host.c: the CPU's arithmetic. The cases of op_cases.h, in which every op has another number of threads; and what the
 * host promises beyond them: no bit of a row depends on other rows, columns or threads; a result in halves is the float
 * result, rounded once; decode is prefill, bit for bit; and tokens are sampled as asked. That
 * halves are what the standard says is here too. test_quant.c has the bytes of packed numbers, test_team.c the threads. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "device/parts.h"

#define ACT F32
static const double EPSILON[NCODES] = {
    [OP_LAYERNORM] = 5e-7,      /* roundings of 6e-8, and those of a sum of 2049 floats about 40 */
    [OP_LINEAR] = 1e-6,         /* the same on each partial sum; a wrong term of F16 weights would be 1/k >= 2e-4 */
    [OP_ATTEND_PREFILL] = 2e-5, /* scores up to ~20 carry 2e-6 of error into weights of values up to 2 */
    [OP_ATTEND] = 2e-5,         /* the same */
    [OP_SELECT] = 1e-5,         /* the same, of a weight */
    [OP_WEIGH] = 5e-6,          /* sums of 700 products of up to 2 */
    [OP_SCORE] = 4e-6,          /* of up to 30 */
};
#include "op_cases.h"

static uint8_t *device_memory(size_t bytes) {
    (void)bytes;
    return memory.after;
}

/* AddressSanitizer sees what is read between the views. */
static void on_device(const Op *ops, int n) {
    static int times;
    memcpy(memory.after, memory.before, memory.used);
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(memory.after, memory.used);
    for (int v = 0; v < n * MAX_VIEWS; v++) {
        Use use;
        const Tensor *view = op_view(&ops[v / MAX_VIEWS], v % MAX_VIEWS, &use);
        if (use) ASAN_UNPOISON_MEMORY_REGION(view->at, tensor_span(*view));
    }
#endif
    for (int i = 0; i < n; i++) {
        host_set_threads(1 + times++ % 5);
        host_run(&ops[i]);
    }
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(memory.after, memory.used);
#endif
}

// ---- f16 ------------------------------------------------------------------------------------------------------------

/* The value of a half by the definition of binary16. */
static double half_value(unsigned h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double v = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
    return h & 0x8000 ? -v : v;
}

TEST(every_half_converts_exactly_and_back_also_in_vectors) {
    enum { ALL = 65536 };
    const int32_t first = 0;
    const Tensor all = blank(F16, 1, ALL), y = blank(F32, 1, ALL);
    int wrong = 0;
    for (unsigned h = 0; h < ALL; h++) ((f16 *)all.at)[h] = (f16)h;
    carry_out(op_embed(on_lane(PROJECT), y, all, indices(&first, 1), false));
    for (unsigned h = 0; h < ALL; h++) {
        const float f = f16_to_f32((f16)h), vector = ((float *)y.at)[h];
        const double v = half_value(h);
        const f16 back = f32_to_f16(f);
        if (isnan(v))
            wrong += !isnan(f) || !isnan(vector) || !isnan(half_value(back)) || (back ^ h) & 0x8000;
        else
            wrong += f != v || !signbit(f) != !signbit(v) || back != h || memcmp(&f, &vector, sizeof f) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    forget();
}

TEST(floats_round_to_the_nearest_even_half) {
    int wrong = 0;
    for (unsigned h = 0; h < 0x7c00; h++) { /* between every half and the next, the first past the largest being 65536 */
        double low = half_value(h), high = h == 0x7bff ? 65536 : half_value(h + 1);
        float middle = (float)((low + high) / 2); /* exact: one bit more than a half has */
        wrong += f32_to_f16(middle) != h + (h & 1);
        wrong += f32_to_f16(nextafterf(middle, 0)) != h;
        wrong += f32_to_f16(nextafterf(middle, INFINITY)) != h + 1;
        wrong += f32_to_f16(-nextafterf(middle, INFINITY)) != ((h + 1) | 0x8000);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

// ---- products -------------------------------------------------------------------------------------------------------

TEST(linear_matches_its_formula_at_every_number_of_rows_and_odd_sizes) {
    static const int sizes[] = {1, 3, 4, 15, 16, 17, 31, 64, 65, 100};
    static const Epilogue ends[] = {{0, 1, 0, 0, 1}, {0, 1, 1, 0, 2}, {0, 0, 1, 0, 1}, {0, 1, 1, 1, 2}, {0, 0, 0, 1, 1}};
    for (int i = 0; i < 40 * COUNT(sizes); i++) {
        const int m = 1 + i / COUNT(sizes), n = sizes[i % COUNT(sizes)],
                  k = sizes[(i % COUNT(sizes) * 7 + m) % COUNT(sizes)];
        Op op = linear_new(&ends[i % COUNT(ends)], false, m, n, k, PROJECT);
        if (m % 2 && ends[i % COUNT(ends)].residual && op.linear.y.ld == (size_t)n)
            op.linear.residual = copy_of(op.linear.y); /* elsewhere it is y itself */
        expect_linear(op);
        forget();
    }
    expect_linear(linear_new(&ends[3], false, 49, 33, 2049, PROJECT)); /* in place, and more than one block of columns */
    expect_linear(
        linear_new(&ends[1], true, 2, 64, 49152, PROJECT)); /* the longest sum there is: OPT-175B's second FFN matrix */
    forget();
}

/* An output is the same in a product of one row; in the last m rows, for tiles and tasks of any size; in the first n
 * columns. Each has another number of threads. */
TEST(a_row_depends_on_neither_rows_nor_columns_nor_threads) {
    static const struct {
        int n, k;
        bool packed;
    } shapes[] = {{100, 65, 0},   {7, 31, 0},   {193, 1200, 0}, {64, 2500, 0},
                  {301, 1100, 0}, {320, 64, 1}, {320, 192, 1},  {320, 320, 1}};
    enum { MOST = 400 };
    for (int s = 0; s < COUNT(shapes); s++) {
        const Op all = linear_new(&epilogues[1], shapes[s].packed, MOST, shapes[s].n, shapes[s].k, PROJECT);
        const Tensor y = all.linear.y, x = all.linear.x;
        Op some = all;
        some.linear.y = tensor_rows(y, 0, 9), some.linear.x = tensor_rows(x, 0, 9);
        expect_linear(some);
        for (int i = 0; i < MOST; i++) {
            Op one = all;
            one.linear.y = tensor_rows(y, i, 1), one.linear.x = tensor_rows(x, i, 1);
            run(one);
        }
        for (int m = 1; m <= MOST; m += m < 50 ? 1 : 50) {
            Op last = all;
            last.linear.x = tensor_rows(x, MOST - m, m);
            expect_same(last, tensor_rows(y, MOST - m, m));
        }
        const int step = shapes[s].packed ? GROUP : 5;
        for (int n = step; n <= y.cols; n += step) {
            Op first = all;
            first.linear.x = tensor_rows(x, 0, 60), first.linear.b.cols = n;
            first.linear.w.rows = n / (shapes[s].packed ? GROUP : 1);
            expect_same(first, tensor_cols(tensor_rows(y, 0, 60), 0, n));
        }
        forget();
    }
}

/* Groups of any bytes, so that scales differ much and are negative too; numbers of x that are far larger than their
 * neighbours; rows and groups of zeros. */
TEST(packed_products_keep_their_bound_whatever_the_numbers) {
    static const int rows[] = {1, 2, 5, 7, 13, 40};
    for (int i = 0; i < 4 * COUNT(rows); i++) {
        Op op = linear_new(&epilogues[i % 2], true, rows[i / 4], 192, i % 4 < 2 ? 192 : 448, PROJECT);
        const Tensor x = op.linear.x;
        for (int c = i % 7; c < x.cols; c += 29) set_number(x, c % x.rows, c, 3e4 * number(x, c % x.rows, c));
        for (int c = 0; c < x.cols; c++) set_number(x, x.rows - 1, c, i % 3 ? number(x, x.rows - 1, c) * 1e-30 : 0);
        if (i % 4 % 2) op.linear.w = random_groups(192, x.cols);
        if (i % 4 == 2) memset(element(op.linear.w, 1, 0), 0, op.linear.w.cols);
        expect_linear(op);
        forget();
    }
}

/* A number of x makes its row NaN or infinite, and a group its outputs; the others keep their bits. */
TEST(what_is_not_finite_shows_in_packed_products_and_stays_where_it_belongs) {
    static const uint16_t odd[] = {0x7e00, 0x7c00, 0xfc00};
    enum { MIN, SCALE, X, PLACES, ROWS = 9, N = 192, BAD_ROW = 4 };
    for (int i = 0; i < PLACES * COUNT(odd); i++) {
        const int place = i % PLACES, column = 30 * i + 3;
        const Op op = linear_new(&epilogues[1], true, ROWS, N, 320, PROJECT);
        Op bad = op;
        bad.linear.x = copy_of(op.linear.x);
        bad.linear.w = copy_of(op.linear.w);
        bad.linear.y = blank(F32, ROWS, N);
        if (place == X)
            set_number(bad.linear.x, BAD_ROW, column, f16_to_f32(odd[i / PLACES]));
        else
            memcpy(element(bad.linear.w, 1, column * GROUP_BYTES + 2 * place), &odd[i / PLACES], 2);
        run(op);
        run(bad);
        int wrong = 0;
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < N; o++) {
                const double is = number(bad.linear.y, r, o);
                const bool hit = place == X ? r == BAD_ROW : o / GROUP == 1;
                wrong += hit ? isfinite(is) : is != number(op.linear.y, r, o);
            }
        CU_ASSERT_EQUAL(wrong, 0);
        forget();
    }
}

/* In each block of columns the largest number of x is 32760 units and the largest scale is 1 or 2, so that a unit is a
 * power of two. Then the factor of a code is the integer next to x scale / unit, and what is added up is known to the last
 * bit. */
TEST(each_factor_of_a_packed_code_is_the_nearest_integer) {
    enum { ROWS = 9, N = 128, K = 320, BLOCK = 128, LARGEST = 32760 };
    const Op op = linear_new(&epilogues[0], true, ROWS, N, K, PROJECT);
    const Tensor x = op.linear.x, w = op.linear.w;
    static int factor[ROWS][K];
    for (int c = 0; c < K; c++) {
        const int block = c / BLOCK, scale = block % 2 ? 2 : 1, sign = c % 3 ? 1 : -1;
        for (int g = 0; g < N / GROUP; g++) {
            const f16 header[2] = {f32_to_f16(c % BLOCK == 7 ? 3 : 0), f32_to_f16((float)(sign * scale))};
            memcpy(element(w, g, c * GROUP_BYTES), header, sizeof header);
        }
        for (int r = 0; r < ROWS; r++) {
            const int whole = c % BLOCK == 7 ? LARGEST : test_below(&state, 64000) - 32000;
            const double rest = c % BLOCK == 7 ? 0 : (test_below(&state, 7) - 3) / 8.0;
            factor[r][c] = sign * whole;
            set_number(x, r, c, ldexp(whole + rest, (r + block) % 4));
        }
    }
    run(op);
    int wrong = 0;
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < N; o++) {
            float want = 0, of_mins = 0;
            for (int c = 0; c < K; c += BLOCK) {
                int sum = 0;
                for (int i = c; i < imin(K, c + BLOCK); i++) {
                    const uint8_t *code = element(w, o / GROUP, i * GROUP_BYTES + GROUP_HEADER);
                    const int byte = code[o % GROUP / 32 * 16 + o % 16];
                    sum += factor[r][i] * (o % 32 < 16 ? byte & 15 : byte >> 4);
                }
                want += (float)sum * ldexpf(c / BLOCK % 2 ? 2 : 1, (r + c / BLOCK) % 4);
            }
            for (int c = 7; c < K; c += BLOCK) of_mins += 3 * (float)number(x, r, c);
            wrong += number(op.linear.y, r, o) != want + of_mins;
        }
    CU_ASSERT_EQUAL(wrong, 0);
    forget();
}

TEST(a_result_in_halves_is_the_float_result_rounded_once) {
    static const int cols[] = {1, 16, 31, 64, 100}, some_heads[][2] = {{64, 5}, {80, 5}, {20, 5}, {1, 5}};
    static const int32_t idx[] = {8, 0, 3, 3, 7, 1, 1};
    Op ops[30];
    int n = 0;
    ops[n++] = linear_new(&epilogues[3], false, 9, 37, 50, PROJECT);
    ops[n++] = linear_new(&epilogues[3], true, 9, 192, 64, PROJECT);
    for (int c = 0; c < 2 * COUNT(cols); c++) {
        const Tensor y = blank(F32, 7, cols[c / 2]), table = numbers(F32, 9, y.cols, 1);
        CHECK(n < COUNT(ops));
        ops[n++] = op_embed(on_lane(PROJECT), y, table, indices(idx, 7), c % 2);
    }
    for (int h = 0; h < COUNT(some_heads); h++) {
        const Sequences s = sequences_new(contexts, some_heads[h], 3, 2);
        for (int packs = 0; packs < 1 + (h < 2); packs++) {
            const PageTable t = pages_of(&s, 16, packs, 1);
            const Sparse sparse = sparse_of(last_queries(&s), t, .1);
            carry_out(sparse.select);
            CHECK(n + 1 < COUNT(ops));
            ops[n++] = attend_of(last_queries(&s), t);
            ops[n++] = sparse.weigh;
        }
    }
    for (int o = 0; o < n; o++) {
        Op op = ops[o];
        const Tensor y = op.view[0]; /* of a product in halves, rows lie apart */
        const Tensor half = tensor_cols(numbers(F16, y.rows, y.cols + 8 * (op.code == OP_LINEAR), 1), 0, y.cols);
        int wrong = 0;
        for (int i = 0; i < y.rows * y.cols && op.add; i++) set_number(y, 0, i, number(half, 0, i));
        carry_out(op);
        op.view[0] = half;
        carry_out(op);
        for (int i = 0; i < y.rows * y.cols; i++) {
            const double once = f16_to_f32(f32_to_f16((float)number(y, 0, i)));
            wrong += number(half, i / y.cols, i % y.cols) != once;
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
    forget();
}

// ---- attention ------------------------------------------------------------------------------------------------------

TEST(decode_of_the_last_token_is_prefill_bit_for_bit) {
    for (int i = 0; i < HEADS; i++) {
        const Sequences s = sequences_new(contexts, heads[i], 3, 2);
        const Op prefill = prefill_of(&s, 0, s.nseq, 0), decode = attend_of(last_queries(&s), pages_of(&s, 16, false, 1));
        carry_out(prefill), carry_out(decode);
        for (int r = 0; r < s.nseq; r++)
            CU_ASSERT(same(tensor_rows(decode.attend.o, r, 1), tensor_rows(prefill.prefilled.o, s.start[r + 1] - 1, 1)));
        forget();
    }
}

/* Not even what is no number. */
TEST(a_token_never_sees_the_ones_after_it) {
    static const int length[] = {120, 0}, head[] = {64, 2};
    const Sequences s = sequences_new(length, head, 3, 2);
    const Op op = prefill_of(&s, 0, 1, 0);
    carry_out(op);
    for (int t = length[0] - 1; t > 0; t--) {
        for (int c = 0; c < s.kv.cols; c++) set_number(s.kv, t, c, c % 2 ? NAN : INFINITY);
        Op again = op;
        again.prefilled.o = blank(F32, length[0], s.h1);
        carry_out(again);
        CU_ASSERT(same(tensor_rows(again.prefilled.o, 0, t), tensor_rows(op.prefilled.o, 0, t)));
    }
    forget();
}

/* Two tokens with scores 0 and -x and values 0 and 1: what comes out is e^-x / (1 + e^-x). */
TEST(softmax_weights_are_right_to_a_few_roundings) {
    enum { N = 8700 };
    const Tensor zero_and_one = blank(F16, 2, 1), q = blank(F16, N, 1), len = blank(I32, 1, N), pages = blank(I32, N, 1);
    memset(pages.at, 0, tensor_bytes(pages));
    for (int i = 0; i < N; i++) set_number(q, i, 0, -0.00999f * (float)i), ((int32_t *)len.at)[i] = 2;
    for (int i = 0; i < 2; i++) set_number(zero_and_one, i, 0, i);
    const Op op = attend_of(
        q, (PageTable){.k = zero_and_one, .v = zero_and_one, .pages = pages, .len = len, .page_tokens = 2, .nh = 1});
    carry_out(op);
    int wrong = 0; /* e^-x within 2 ulp (2.4e-7), a sum and a quotient */
    for (int i = 0; i < N; i++) wrong += !(fabs(number(op.attend.o, i, 0) * (1 + exp(-number(q, i, 0))) - 1) <= 4e-7);
    CU_ASSERT_EQUAL(wrong, 0);
    forget();
}

// ---- pick -----------------------------------------------------------------------------------------------------------

static int pick_one(const float *logits, int vocab, Sampling s, int prompt, int pos) {
    int32_t id = -1, at = prompt, where = pos;
    run(picking(&id, logits, &at, &where, s, 1, vocab));
    return id;
}

TEST(a_tiny_temperature_takes_the_largest_and_never_nan) {
    static const float rows[][5] = {
        {2, 3, -1, -2, 1}, {NAN, -4, NAN, -5, NAN}, {NAN, -INFINITY, NAN, NAN, NAN}, {0, INFINITY, 1, 2, NAN}};
    const Sampling s = {1e-30f, 1, 0, 7, false};
    for (int i = 0; i < COUNT(rows); i++) CU_ASSERT_EQUAL(pick_one(rows[i], 5, s, 0, 0), 1);
}

TEST(sampling_depends_on_seed_prompt_and_position_only) {
    enum { VOCAB = 50272, ROWS = 9 };
    const Tensor logits = numbers(F32, ROWS, VOCAB, 3), again = blank(I32, 1, ROWS);
    Sampling s = {0.9f, 0.95f, 0, 11, false};
    Op op = pick_of(logits, s);
    int32_t *prompt = op.pick.prompt.at, *pos = op.pick.pos.at, *ids = op.pick.ids.at;
    for (int r = 0; r < ROWS; r++)
        prompt[r] = r / 3, pos[r] = 5 + r % 3, memcpy(element(logits, r, 0), logits.at, VOCAB * 4);
    carry_out(op);
    int equal = 0, reseeded = 0, moved = 0;
    for (int r = 0; r < ROWS; r++) {
        CU_ASSERT_EQUAL(pick_one((float *)logits.at, VOCAB, s, prompt[r], pos[r]), ids[r]);
        for (int q = 0; q < r; q++) equal += ids[q] == ids[r];
    }
    s.seed = 12, op.prompts = prompts_sampled(s), op.pick.ids = again;
    carry_out(op);
    for (int r = 0; r < ROWS; r++) reseeded += ((int32_t *)again.at)[r] == ids[r];
    CU_ASSERT(equal <= 1); /* of 36 pairs among thousands of likely tokens */
    CU_ASSERT(reseeded <= 1);
    s.placeless = true, op.prompts = prompts_sampled(s); /* as the first place, wherever it is */
    carry_out(op);
    for (int r = 0; r < ROWS; r++) moved += ((int32_t *)again.at)[r] != ((int32_t *)again.at)[r % 3];
    CU_ASSERT_EQUAL(moved, 0);
    forget();
}

TEST(sampling_follows_the_softmax_cut_by_top_k_and_top_p) {
    enum { DRAWS = 20000, TOKENS = 6 };
    const double p[] = {0.05, 0.3, 0.05, 0.25, 0.2, 0.15}; /* order: 1 3 4 5 then 0 before 2 */
    static const struct {
        float top_p;
        int top_k;
        int kept; /* bits */
    } cases[] = {
        {1, 0, 63},     {1, 100, 63},  {1, 6, 63},   {1, 2, 10},     {1, 5, 59}, {0.5f, 0, 10}, {0.56f, 0, 26},
        {0.92f, 0, 59}, {0.5f, 4, 10}, {0.3f, 3, 2}, {0.45f, 3, 10}, {0, 0, 2},  {1, 1, 2},     {0.99f, 100, 63},
    };
    for (int i = 0; i < 2 * COUNT(cases); i++) {
        const int c = i / 2, hot = 1 + i % 2; /* at temperature 2 logits of twice the size give the same */
        const Sampling s = {hot, cases[c].top_p, cases[c].top_k, c, false};
        float logits[TOKENS + 1] = {[TOKENS] = NAN};
        int seen[TOKENS + 1] = {0}, outside;
        double mass = 0, chi = 0;
        for (int t = 0; t < TOKENS; t++)
            logits[t] = (float)log(p[t] * 100) * hot, mass += cases[c].kept >> t & 1 ? p[t] : 0;
        logits[2] = logits[0];
        for (int draw = 0; draw < DRAWS; draw++) seen[pick_one(logits, TOKENS + 1, s, draw % 100, draw / 100)]++;
        outside = seen[TOKENS];
        for (int t = 0; t < TOKENS; t++) {
            const bool kept = cases[c].kept >> t & 1;
            const double want = kept ? p[t] / mass * DRAWS : 1;
            if (kept)
                chi += (seen[t] - want) * (seen[t] - want) / want;
            else
                outside += seen[t];
        }
        CU_ASSERT(chi <= 25); /* 5 degrees of freedom: beyond 25 once in 7000, and the seed is fixed */
        CU_ASSERT_EQUAL(outside, 0);
    }
}

/* Two equal tokens have half of the mass each, exactly: the first reaches top_p = 0.5, so the second is never drawn. */
TEST(what_reaches_top_p_exactly_ends_the_choice) {
    const float logits[] = {-INFINITY, 3, -INFINITY, 3, -INFINITY};
    for (int top_k = 0; top_k <= 4; top_k += 2) /* cut by top_p alone, by both, by both with room for more */
        for (int pos = 0; pos < 100; pos++)
            CU_ASSERT_EQUAL(pick_one(logits, 5, (Sampling){1, 0.5f, top_k, 3, false}, 0, pos), 1);
}

/* Of two equal tokens the one with the lower id has the first half of the draws, wherever the two lie; other tokens, 2^-40
 * and less as probable, are cut or not. */
TEST(equal_tokens_are_drawn_in_the_order_of_their_ids) {
    enum { VOCAB = 131 };
    static const Sampling samplings[] = {
        {1, 0.999f, 0, 3, false}, {1, 1, 2, 4, false}, {1, 0.999f, 9, 5, false}, {1, 1, 0, 6, false}};
    for (int pos = 0; pos < 64; pos++) {
        float logits[VOCAB];
        for (int i = 0; i < VOCAB; i++) logits[i] = -28 - (float)(i % 7);
        logits[pos] = logits[2 * pos + 4] = 3;
        for (int s = 0; s < 4; s++) {
            const bool first = random_draw(samplings[s].seed, 0, pos) < 0.5;
            CU_ASSERT_EQUAL(pick_one(logits, VOCAB, samplings[s], 0, pos), first ? pos : 2 * pos + 4);
        }
    }
}

TEST(top_k_among_many_keeps_the_best) {
    enum { VOCAB = 5000, K = 40 };
    const float *logits = (float *)numbers(F32, 1, VOCAB, 1).at;
    int outside = 0, distinct = 0;
    bool seen[VOCAB] = {0};
    for (int i = 0; i < 1000; i++) {
        const int id = pick_one(logits, VOCAB, (Sampling){1, 1, K, 3, false}, 0, i);
        int better = 0;
        for (int t = 0; t < VOCAB; t++) better += logits[t] > logits[id];
        outside += better >= K, distinct += !seen[id];
        seen[id] = true;
    }
    CU_ASSERT_EQUAL(outside, 0);
    CU_ASSERT_EQUAL(distinct, K); /* nearly equal weights: each is missed with (39/40)^1000 */
    forget();
}
