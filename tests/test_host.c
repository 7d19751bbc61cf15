/* test_host.c: the CPU's arithmetic against plain double-precision loops, and batch invariance bit for bit. */
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ops.h"
#include "tests.h"

static uint64_t state;

static float *random_floats(size_t n, float scale) {
    float *x = (float *)xcalloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * test_random(&state);
    return x;
}

static f16 *random_halves(size_t n, float scale) {
    f16 *x = (f16 *)xcalloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = f32_to_f16(scale * test_random(&state));
    return x;
}

/* The larger of two errors; a NaN stays. */
static double worse(double worst, double e) { return isnan(worst) || e <= worst ? worst : e; }

static bool same_bits(const void *a, const void *b, size_t bytes) { return memcmp(a, b, bytes) == 0; }

// ---- f16 ---------------------------------------------------------------------------------------------------------

/* The value of a half by the definition of binary16. */
static double half_value(unsigned h) {
    int exponent = h >> 10 & 31, mantissa = h & 1023;
    double v = exponent == 31 ? (mantissa ? NAN : INFINITY)
               : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                              : ldexp(mantissa, -24);
    return h & 0x8000 ? -v : v;
}

static void every_half_converts_exactly_and_back(void) {
    int wrong = 0;
    for (unsigned h = 0; h < 65536; h++) {
        float f = f16_to_f32((f16)h);
        double v = half_value(h);
        if (isnan(v)) {
            f16 back = f32_to_f16(f);
            wrong += !isnan(f) || !isnan(half_value(back)) || (back ^ h) & 0x8000;
        } else {
            wrong += f != v || !signbit(f) != !signbit(v) || f32_to_f16(f) != h;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void vectors_read_halves_as_scalars_do(void) {
    f16 *all = (f16 *)xcalloc(65536, 2);
    float *y = random_floats(65536, 1);
    const int32_t first = 0;
    int wrong = 0;
    for (int h = 0; h < 65536; h++) all[h] = (f16)h;
    run(embedding(y, F32, all, F16, 65536, &first, 1, 65536, false));
    for (int h = 0; h < 65536; h++) {
        float f = f16_to_f32((f16)h);
        wrong += isnan(f) ? !isnan(y[h]) : !same_bits(&f, y + h, 4);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(all), free(y);
}

static void floats_round_to_the_nearest_even_half(void) {
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
    CU_ASSERT_EQUAL(f32_to_f16(1e30f), 0x7c00);
    CU_ASSERT_EQUAL(f32_to_f16(-INFINITY), 0xfc00);
    CU_ASSERT_EQUAL(f32_to_f16(1e-30f), 0);
    CU_ASSERT_EQUAL(f32_to_f16(-0.0f), 0x8000);
}

// ---- rows --------------------------------------------------------------------------------------------------------

static void embed_gathers_and_adds_rows_of_every_type(void) {
    enum { ROWS = 5, COLS = 37, LD = 41, TABLE = 9 };
    int32_t idx[ROWS] = {8, 0, 3, 3, 7};
    float f[TABLE * LD], y[ROWS * COLS + 1];
    uint16_t h[TABLE * LD], b[TABLE * LD];
    for (int i = 0; i < TABLE * LD; i++) {
        f[i] = (float)(i - 100) / 4; /* exact in all three types */
        uint32_t bits;
        memcpy(&bits, &f[i], 4);
        h[i] = f32_to_f16(f[i]), b[i] = (uint16_t)(bits >> 16);
    }
    const void *tables[] = {f, h, b};
    const Type types[] = {F32, F16, BF16};
    for (int t = 0; t < 3; t++) {
        int wrong = 0;
        y[ROWS * COLS] = 7;
        run(embedding(y, F32, tables[t], types[t], LD, idx, ROWS, COLS, false));
        run(embedding(y, F32, tables[0], F32, LD, idx, ROWS, COLS, true));
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLS; c++) {
                float exact = f[idx[r] * LD + c];
                if (types[t] == BF16) exact = exact < 64 && exact > -64 ? exact : NAN; /* beyond: 8 bits do not hold it */
                wrong += !isnan(exact) && y[r * COLS + c] != 2 * exact;
            }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(y[ROWS * COLS], 7);
    }
}

static void embed_into_halves_is_the_float_result_rounded_once(void) {
    enum { ROWS = 7, TABLE = 9 };
    static const int cols[] = {1, 16, 31, 64, 100};
    int32_t idx[ROWS] = {8, 0, 3, 3, 7, 1, 1};
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        int n = cols[c], wrong = 0;
        float *table = random_floats((size_t)TABLE * n, 1), *y = random_floats((size_t)ROWS * n, 1);
        f16 *half = random_halves((size_t)ROWS * n + 1, 1), guard = half[ROWS * n];
        for (int add = 0; add < 2; add++) {
            for (int i = 0; i < ROWS * n; i++) y[i] = f16_to_f32(half[i]);
            run(embedding(y, F32, table, F32, n, idx, ROWS, n, add));
            run(embedding(half, F16, table, F32, n, idx, ROWS, n, add));
            for (int i = 0; i < ROWS * n; i++) wrong += half[i] != f32_to_f16(y[i]);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(half[ROWS * n], guard);
        free(table), free(y), free(half);
    }
}

static void layernorm_matches_its_formula_in_place_and_row_by_row(void) {
    static const int cols[] = {1, 2, 15, 16, 33, 64, 100, 768, 2049};
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        int n = cols[c], rows = 300;
        float *x = random_floats((size_t)rows * n, 3), *y = random_floats((size_t)rows * n, 1), *one = random_floats(n, 1);
        f16 *w = random_halves(n, 2), *b = random_halves(n, 2);
        for (int i = 0; i < n; i++) x[i] += 40; /* a mean far from 0: one-pass formulas lose digits here */
        run(norm(F32, y, x, w, b, rows, n));
        double worst = 0;
        for (int r = 0; r < rows; r++) {
            double mean = 0, var = 0;
            for (int i = 0; i < n; i++) mean += x[r * n + i];
            mean /= n;
            for (int i = 0; i < n; i++) var += (x[r * n + i] - mean) * (x[r * n + i] - mean);
            for (int i = 0; i < n; i++) {
                double ref = (x[r * n + i] - mean) / sqrt(var / n + 1e-5) * f16_to_f32(w[i]) + f16_to_f32(b[i]);
                worst = worse(worst, fabs(ref - y[r * n + i]) * sqrt(var / n + 1e-5) / (1 + fabs(f16_to_f32(w[i]))));
            }
        }
        CU_ASSERT(worst <= 1e-5); /* in units of the row's deviation: a float at 40 is good to 4e-6 */
        run(norm(F32, one, x + (size_t)7 * n, w, b, 1, n));
        CU_ASSERT(same_bits(one, y + (size_t)7 * n, (size_t)n * 4));
        run(norm(F32, x, x, w, b, rows, n));
        CU_ASSERT(same_bits(x, y, (size_t)rows * n * 4));
        free(x), free(y), free(one), free(w), free(b);
    }
}

// ---- linear ------------------------------------------------------------------------------------------------------

typedef struct {
    int m, n, k;
    float *x, *y;
    f16 *w, *b;
} Matrices;

static Matrices product_new(int m, int n, int k) {
    return (Matrices){m,
                      n,
                      k,
                      random_floats((size_t)m * k, 1),
                      random_floats((size_t)m * n, 1),
                      random_halves((size_t)n * k, 1),
                      random_halves(n, 1)};
}

static void product_free(Matrices *p) { free(p->x), free(p->y), free(p->w), free(p->b); }

/* The largest error of y = relu(x w^T + b), in units of the sum of the terms' sizes. */
static double product_error(const Matrices *p, bool relu) {
    double worst = 0;
    for (int i = 0; i < p->m; i++) {
        for (int j = 0; j < p->n; j++) {
            double sum = f16_to_f32(p->b[j]), size = fabs(sum);
            for (int t = 0; t < p->k; t++) {
                double term = (double)p->x[(size_t)i * p->k + t] * f16_to_f32(p->w[(size_t)j * p->k + t]);
                sum += term, size += fabs(term);
            }
            if (relu && sum < 0) sum = 0;
            worst = worse(worst, fabs(sum - p->y[(size_t)i * p->n + j]) / size);
        }
    }
    return worst;
}

static void linear_matches_double_precision_at_odd_sizes(void) {
    static const int sizes[] = {1, 3, 4, 15, 16, 17, 31, 64, 65, 100};
    const int count = sizeof sizes / sizeof *sizes;
    double worst = 0;
    for (int m = 1; m <= 40; m++) {
        for (int i = 0; i < count; i++) {
            Matrices p = product_new(m, sizes[i], sizes[(i * 7 + m) % count]);
            run(product(F32, p.y, F32, p.n, p.x, p.w, p.b, NULL, false, m % 2, m, p.n, p.k));
            worst = worse(worst, product_error(&p, m % 2));
            product_free(&p);
        }
    }
    static const int large[][3] = {{97, 193, 1025}, {200, 401, 100}, {5, 17, 4100}, {49, 33, 2049}, {193, 16, 31}};
    for (int i = 0; i < 5; i++) {
        Matrices p = product_new(large[i][0], large[i][1], large[i][2]);
        run(product(F32, p.y, F32, p.n, p.x, p.w, p.b, NULL, false, false, p.m, p.n, p.k));
        worst = worse(worst, product_error(&p, false));
        product_free(&p);
    }
    CU_ASSERT(worst <= 1e-6); /* a few roundings of 6e-8 on each partial sum; a wrong term would be 1/k >= 2e-4 */
}

static void linear_rows_do_not_depend_on_the_other_rows(void) {
    static const int shapes[][2] = {{100, 65}, {7, 31}, {193, 1200}, {64, 2500}};
    for (int s = 0; s < 4; s++) {
        int most = 200, wrong = 0; /* more than a task has */
        Matrices p = product_new(most, shapes[s][0], shapes[s][1]);
        float *y = random_floats((size_t)most * p.n, 1);
        for (int i = 0; i < most; i++)
            run(product(F32, p.y + (size_t)i * p.n, F32, p.n, p.x + (size_t)i * p.k, p.w, p.b, NULL, false, false, 1, p.n,
                        p.k));
        for (int m = 1; m <= most; m += m < 50 ? 1 : 50) { /* and not starting at row 0 */
            int first = most - m;
            run(product(F32, y, F32, p.n, p.x + (size_t)first * p.k, p.w, p.b, NULL, false, false, m, p.n, p.k));
            wrong += !same_bits(y, p.y + (size_t)first * p.n, (size_t)m * p.n * 4);
        }
        for (int n = 1; n <= p.n; n += 5) { /* nor on the columns */
            run(product(F32, y, F32, p.n, p.x, p.w, p.b, NULL, false, false, 60, n, p.k));
            for (int i = 0; i < 60; i++) wrong += !same_bits(y + (size_t)i * p.n, p.y + (size_t)i * p.n, (size_t)n * 4);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        free(y);
        product_free(&p);
    }
}

static void results_do_not_depend_on_the_threads(void) {
    int wrong = 0;
    static const int ms[] = {1, 7, 40, 200};
    for (int i = 0; i < 4; i++) {
        Matrices p = product_new(ms[i], 301, 1100);
        float *y = random_floats((size_t)p.m * p.n, 1);
        for (int threads = 1; threads <= 5; threads++) {
            host_set_threads(threads);
            run(product(F32, threads == 1 ? p.y : y, F32, p.n, p.x, p.w, p.b, NULL, false, false, p.m, p.n, p.k));
            wrong += threads > 1 && !same_bits(y, p.y, (size_t)p.m * p.n * 4);
        }
        free(y);
        product_free(&p);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT(host_set_threads(0) >= 1);
}

static void linear_writes_halves_and_strides_and_nothing_outside(void) {
    enum { M = 9, N = 37, K = 50, LD = 45 };
    Matrices p = product_new(M, N, K);
    float y32[M * LD];
    f16 y16[M * LD];
    int wrong = 0;
    for (int i = 0; i < M * LD; i++) y32[i] = -77, y16[i] = 0x1234;
    run(product(F32, p.y, F32, N, p.x, p.w, p.b, NULL, false, false, M, N, K));
    run(product(F32, y32, F32, LD, p.x, p.w, p.b, NULL, false, false, M, N, K));
    run(product(F32, y16, F16, LD, p.x, p.w, p.b, NULL, false, false, M, N, K));
    for (int i = 0; i < M * LD; i++) {
        int r = i / LD, c = i % LD;
        wrong += y32[i] != (c < N ? p.y[r * N + c] : -77);
        wrong += y16[i] != (c < N ? f32_to_f16(p.y[r * N + c]) : 0x1234);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    product_free(&p);
}

static void linear_adds_bias_then_relu_then_the_residual_even_in_place(void) {
    enum { M = 8, N = 21, K = 40 };
    Matrices p = product_new(M, N, K);
    float plain[M * N], biased[M * N], *y = random_floats(M * N, 1), residual[M * N];
    memcpy(residual, y, sizeof residual);
    int wrong = 0;
    run(product(F32, plain, F32, N, p.x, p.w, NULL, NULL, false, false, M, N, K));
    run(product(F32, biased, F32, N, p.x, p.w, p.b, NULL, false, true, M, N, K));
    run(product(F32, y, F32, N, p.x, p.w, p.b, y, false, true, M, N, K));
    for (int i = 0; i < M * N; i++) {
        float sum = plain[i] + f16_to_f32(p.b[i % N]), positive = sum < 0 ? 0 : sum;
        wrong += biased[i] != positive || y[i] != positive + residual[i];
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(y);
    product_free(&p);
}

// ---- linear, packed ----------------------------------------------------------------------------------------------

/* Packs p's weights, whose place what comes back takes. */
static uint8_t *product_pack(const Matrices *p) {
    uint8_t *packed = (uint8_t *)xcalloc(quant_matrix_bytes(p->n, p->k), 1), *to = packed;
    for (int r = 0; r < p->n; r += GROUP, to += quant_matrix_bytes(GROUP, p->k)) {
        f16 *w = p->w + (size_t)r * p->k;
        CU_ASSERT(quant_pack_rows(to, w, p->k));
        quant_unpack_rows(w, to, p->k);
    }
    return packed;
}

static void packed_linear_matches_double_precision_over_the_numbers_that_came_back(void) {
    static const int shapes[][3] = {{1, 64, 64},   {1, 128, 192}, {2, 64, 320},  {3, 192, 64},  {4, 320, 256},
                                    {5, 192, 128}, {6, 128, 576}, {7, 64, 1024}, {13, 320, 64}, {50, 256, 128}};
    double worst = 0, apart = 0;
    for (int s = 0; s < 10; s++) {
        Matrices p = product_new(shapes[s][0], shapes[s][1], shapes[s][2]);
        uint8_t *w = product_pack(&p);
        float *plain = random_floats((size_t)p.m * p.n, 1);
        run(product(F32, p.y, F32, p.n, p.x, w, p.b, NULL, true, s % 2, p.m, p.n, p.k));
        run(product(F32, plain, F32, p.n, p.x, p.w, p.b, NULL, false, s % 2, p.m, p.n, p.k));
        worst = worse(worst, product_error(&p, s % 2));
        apart = worse(apart, max_norm_error(p.y, plain, (size_t)p.m * p.n));
        free(w), free(plain);
        product_free(&p);
    }
    Matrices p = product_new(2, 64, 49152); /* the longest sum there is, of OPT-175B's second FFN matrix */
    uint8_t *w = product_pack(&p);
    run(product(F32, p.y, F32, p.n, p.x, w, p.b, NULL, true, false, p.m, p.n, p.k));
    worst = worse(worst, product_error(&p, false));
    free(w);
    product_free(&p);
    CU_ASSERT(worst <= 1e-6); /* as for linear */
    CU_ASSERT(apart <= 1e-5); /* in units of the largest result, which may be a tenth of its terms' sizes */
}

static void packed_rows_depend_on_neither_rows_nor_columns_nor_threads(void) {
    static const int ms[] = {1, 2, 3, 4, 5, 6, 7, 12, 13, 100, 193, 400}; /* tiles, and tasks of 192 rows */
    enum { MOST = 400 };
    for (int k = 64; k <= 320; k += 128) {
        Matrices p = product_new(MOST, 320, k);
        uint8_t *w = product_pack(&p);
        float *y = random_floats((size_t)MOST * p.n, 1);
        int wrong = 0;
        for (int i = 0; i < MOST; i++)
            run(product(F32, p.y + (size_t)i * p.n, F32, p.n, p.x + (size_t)i * p.k, w, p.b, NULL, true, false, 1, p.n,
                        p.k));
        for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) { /* not starting at row 0 */
            int m = ms[i], first = MOST - m;
            host_set_threads(1 + (int)i % 4);
            run(product(F32, y, F32, p.n, p.x + (size_t)first * p.k, w, p.b, NULL, true, false, m, p.n, p.k));
            wrong += !same_bits(y, p.y + (size_t)first * p.n, (size_t)m * p.n * 4);
        }
        for (int n = 64; n <= p.n; n += 64) {
            run(product(F32, y, F32, p.n, p.x, w, p.b, NULL, true, false, 9, n, p.k));
            for (int i = 0; i < 9; i++) wrong += !same_bits(y + (size_t)i * p.n, p.y + (size_t)i * p.n, (size_t)n * 4);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        free(w), free(y);
        product_free(&p);
    }
    host_set_threads(0);
}

static void packed_linear_finishes_like_linear_and_writes_nothing_outside(void) {
    enum { M = 9, N = 192, K = 64, LD = 200 };
    static float plain[M * LD], y32[M * LD], add[M * LD];
    static f16 y16[M * LD];
    Matrices p = product_new(M, N, K);
    uint8_t *w = product_pack(&p);
    int wrong = 0;
    for (int i = 0; i < M * LD; i++) plain[i] = -77, y32[i] = add[i] = (float)i / 8, y16[i] = 0x1234;
    run(product(F32, plain, F32, LD, p.x, w, NULL, NULL, true, false, M, N, K));
    run(product(F32, y32, F32, LD, p.x, w, p.b, y32, true, true, M, N, K));
    run(product(F32, y16, F16, LD, p.x, w, p.b, NULL, true, true, M, N, K));
    for (int i = 0; i < M * LD; i++) {
        bool inside = i % LD < N;
        float sum = inside ? plain[i] + f16_to_f32(p.b[i % LD]) : 0, positive = sum < 0 ? 0 : sum;
        wrong += !inside && plain[i] != -77;
        wrong += y32[i] != (inside ? positive + add[i] : add[i]);
        wrong += y16[i] != (inside ? f32_to_f16(positive) : 0x1234);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(w);
    product_free(&p);
}

// ---- attention ---------------------------------------------------------------------------------------------------

/* Whole sequences, one after another: q (rows, h1) and kv (rows, 2 h1), side by side as the engine has them. */
typedef struct {
    int nseq, h1, nh, rows, ld;
    const int32_t *start; /* [nseq + 1] */
    f16 *q, *kv;
} Prompts;

static Prompts prompts_new(const int32_t *start, int nseq, int hd, int nh) {
    int h1 = hd * nh, rows = start[nseq];
    f16 *qkv = random_halves((size_t)rows * 3 * h1, 2);
    for (size_t i = 0; i < (size_t)rows * 3 * h1; i++)
        if (i % (3 * h1) < (size_t)h1) qkv[i] = f32_to_f16(1.5f * f16_to_f32(qkv[i]));
    return (Prompts){nseq, h1, nh, rows, 3 * h1, start, qkv, qkv + h1};
}

static void free_prompts(Prompts *p) { free(p->q); }

/* Prefill attention of sequences start of p, from row `first` on. */
static void prefill(float *o, const Prompts *p, int first, const int32_t *start, int nseq) {
    const size_t at = (size_t)first * p->ld;
    run(prefilling(F32, o, p->q + at, p->kv + at, start, nseq, start[nseq], p->h1, p->nh, p->ld));
}

static float kv_number(const Prompts *p, const float *kv, size_t at) { return kv ? kv[at] : f16_to_f32(p->kv[at]); }

/* Section 3's attention of one row over tokens first .. row, in double. kv: what the numbers of p->kv count as, or NULL. */
static void attention_reference(double *o, const Prompts *p, const float *kv, int first, int row) {
    int hd = p->h1 / p->nh, n = row - first + 1;
    double *s = (double *)xcalloc(n, sizeof *s);
    for (int h = 0; h < p->nh; h++) {
        double top = -INFINITY, sum = 0;
        for (int t = 0; t < n; t++) {
            for (int d = 0; d < hd; d++)
                s[t] += (double)f16_to_f32(p->q[(size_t)row * p->ld + h * hd + d]) *
                        kv_number(p, kv, (size_t)(first + t) * p->ld + h * hd + d);
            s[t] /= sqrt(hd);
            top = s[t] > top ? s[t] : top;
        }
        for (int t = 0; t < n; t++) sum += s[t] = exp(s[t] - top);
        for (int d = 0; d < hd; d++) {
            double *out = &o[h * hd + d];
            *out = 0;
            for (int t = 0; t < n; t++)
                *out += s[t] / sum * kv_number(p, kv, (size_t)(first + t) * p->ld + p->h1 + h * hd + d);
        }
        memset(s, 0, (size_t)n * sizeof *s);
    }
    free(s);
}

/* Decodes the last token of every sequence from pages of that size scattered in a pool; o (nseq, h1). */
static void decode_paged(float *o, const Prompts *p, int page_tokens, int nseq) {
    int max_pages = 0, npages = 3, next = 0;
    for (int r = 0; r < nseq; r++) {
        int n = (p->start[r + 1] - p->start[r] + page_tokens - 1) / page_tokens;
        npages += n, max_pages = n > max_pages ? n : max_pages;
    }
    size_t page = (size_t)page_tokens * p->h1;
    f16 *k = random_halves(npages * page, 60000), *v = random_halves(npages * page, 60000); /* what must not be read */
    int32_t *pages = (int32_t *)xcalloc((size_t)nseq * max_pages, 4), *len = (int32_t *)xcalloc(nseq, 4);
    int32_t *seq = (int32_t *)xcalloc(p->rows, 4), *pos = (int32_t *)xcalloc(p->rows, 4);
    const int ld = p->h1 + 5;
    f16 *q = random_halves((size_t)nseq * ld, 1);
    memset(o, 0xff, (size_t)nseq * p->h1 * sizeof *o);
    for (int i = 0; i < nseq * max_pages; i++) pages[i] = -1;
    for (int c = 0; c < max_pages; c++) /* dealt in turns and backwards: a sequence's pages never lie together */
        for (int r = 0; r < nseq; r++)
            if (c * page_tokens < p->start[r + 1] - p->start[r]) pages[r * max_pages + c] = npages - 1 - next++;
    for (int r = 0; r < nseq; r++) {
        len[r] = p->start[r + 1] - p->start[r];
        for (int t = 0; t < len[r]; t++) seq[p->start[r] + t] = r, pos[p->start[r] + t] = t;
        memcpy(q + (size_t)r * ld, p->q + (size_t)(p->start[r + 1] - 1) * p->ld, (size_t)p->h1 * sizeof *q);
    }
    const PageTable table = paged(k, v, pages, len, nseq, max_pages, page_tokens, p->h1, p->nh, false);
    run(appending(table, p->kv, 2 * p->h1, false, p->ld, seq, pos, p->start[nseq]));
    run(attention(o, F32, q, ld, p->h1, table));
    free(k), free(v), free(pages), free(len), free(seq), free(pos), free(q);
}

static const int head_dims[] = {64, 80, 96, 128, 8, 20, 1};
enum { NDIMS = sizeof head_dims / sizeof *head_dims };
static const int32_t starts[] = {0, 1, 66, 194, 197, 398}; /* lengths 1 65 128 3 201 */

static void append_puts_rows_where_the_page_table_says(void) {
    enum { H1 = 5, PT = 3, PAGES = 4 };
    f16 k[PAGES * PT * H1], v[PAGES * PT * H1], kv[3 * 2 * H1];
    const int32_t pages[] = {2, 0, 3, 1}, seq[] = {1, 0, 1}, pos[] = {4, 2, 0}; /* two pages a sequence */
    const int at[] = {1 * PT + 1, 2 * PT + 2, 3 * PT};
    for (int i = 0; i < 3 * 2 * H1; i++) kv[i] = (f16)(100 + i);
    memset(k, 0, sizeof k), memset(v, 0, sizeof v);
    run(appending(paged(k, v, pages, NULL, 2, 2, PT, H1, 1, false), kv, 2 * H1, false, 2 * H1, seq, pos, 3));
    int wrong = 0, filled = 0;
    for (int r = 0; r < 3; r++)
        for (int c = 0; c < H1; c++)
            wrong += k[at[r] * H1 + c] != kv[r * 2 * H1 + c] || v[at[r] * H1 + c] != kv[r * 2 * H1 + H1 + c];
    for (int i = 0; i < PAGES * PT * H1; i++) filled += (k[i] != 0) + (v[i] != 0);
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(filled, 2 * 3 * H1);
}

static void prefill_attention_matches_double_precision(void) {
    for (int c = 0; c < NDIMS; c++) {
        Prompts p = prompts_new(starts, 5, head_dims[c], 3);
        float *o = random_floats((size_t)p.rows * p.h1, 1);
        double *ref = (double *)xcalloc(p.h1, sizeof *ref), worst = 0;
        prefill(o, &p, 0, p.start, p.nseq);
        for (int r = 0; r < p.nseq; r++)
            for (int row = p.start[r]; row < p.start[r + 1]; row++) {
                attention_reference(ref, &p, NULL, p.start[r], row);
                for (int d = 0; d < p.h1; d++) worst = worse(worst, fabs(ref[d] - o[(size_t)row * p.h1 + d]));
            }
        CU_ASSERT(worst <= 2e-5); /* scores up to ~20 carry 2e-6 of error into weights of values up to 2 */
        free(o), free(ref);
        free_prompts(&p);
    }
}

static void prefill_rows_do_not_depend_on_the_other_sequences(void) {
    for (int c = 0; c < NDIMS; c++) {
        Prompts p = prompts_new(starts, 5, head_dims[c], 5);
        float *o = random_floats((size_t)p.rows * p.h1, 1), *one = random_floats((size_t)p.rows * p.h1, 1);
        prefill(o, &p, 0, p.start, p.nseq);
        for (int r = 0; r < p.nseq; r++) {
            int32_t s = p.start[r + 1] - p.start[r], alone[] = {0, s};
            size_t at = (size_t)p.start[r] * p.h1;
            for (int cut = 0; cut < 2; cut++) { /* nor on the tokens after them */
                prefill(one, &p, p.start[r], alone, 1);
                CU_ASSERT(same_bits(one, o + at, (size_t)alone[1] * p.h1 * 4));
                alone[1] = (s + 1) / 2;
            }
        }
        free(o), free(one);
        free_prompts(&p);
    }
}

static void a_token_never_sees_the_ones_after_it(void) {
    Prompts p = prompts_new(starts + 4, 1, 64, 2);
    int32_t start[] = {0, 120};
    p.start = start;
    float *o = random_floats((size_t)120 * p.h1, 1), *again = random_floats((size_t)120 * p.h1, 1);
    prefill(o, &p, 0, start, 1);
    for (int t = 0; t < 119; t++) {
        f16 *next = p.kv + (size_t)(t + 1) * p.ld, saved[4 * 64];
        memcpy(saved, next, sizeof saved);
        for (int i = 0; i < 2 * p.h1; i++) next[i] = i % 2 ? 0x7e00 : 0x7c00; /* NaN, inf */
        prefill(again, &p, 0, start, 1);
        CU_ASSERT(same_bits(again, o, (size_t)(t + 1) * p.h1 * 4));
        memcpy(next, saved, sizeof saved);
    }
    free(o), free(again);
    free_prompts(&p);
}

static void decode_attention_matches_double_precision_and_prefill_bit_for_bit(void) {
    for (int c = 0; c < NDIMS; c++) {
        Prompts p = prompts_new(starts, 5, head_dims[c], 7);
        float *o = random_floats((size_t)p.nseq * p.h1, 1), *all = random_floats((size_t)p.rows * p.h1, 1);
        double *ref = (double *)xcalloc(p.h1, sizeof *ref), worst = 0;
        decode_paged(o, &p, 16, p.nseq);
        prefill(all, &p, 0, p.start, p.nseq);
        for (int r = 0; r < p.nseq; r++) {
            int row = p.start[r + 1] - 1;
            attention_reference(ref, &p, NULL, p.start[r], row);
            for (int d = 0; d < p.h1; d++) worst = worse(worst, fabs(ref[d] - o[(size_t)r * p.h1 + d]));
            CU_ASSERT(same_bits(o + (size_t)r * p.h1, all + (size_t)row * p.h1, (size_t)p.h1 * 4));
        }
        CU_ASSERT(worst <= 2e-5);
        free(o), free(all), free(ref);
        free_prompts(&p);
    }
}

static void page_size_placement_and_company_never_change_a_bit(void) {
    static const int page_sizes[] = {16, 1, 3, 64, 1000};
    for (int c = 0; c < NDIMS; c++) {
        Prompts p = prompts_new(starts, 5, head_dims[c], c < 4 ? 7 : 19);
        size_t bytes = (size_t)p.nseq * p.h1 * 4;
        float *o = random_floats((size_t)p.nseq * p.h1, 1), *again = random_floats((size_t)p.nseq * p.h1, 1);
        decode_paged(o, &p, page_sizes[0], p.nseq);
        for (int s = 1; s < 5; s++) {
            decode_paged(again, &p, page_sizes[s], p.nseq);
            CU_ASSERT(same_bits(again, o, bytes));
        }
        for (int r = 0; r < p.nseq; r++) { /* alone, and with other heads per task */
            Prompts one = p;
            one.start = p.start + r;
            int32_t start[] = {0, p.start[r + 1] - p.start[r]};
            one.q = p.q + (size_t)p.start[r] * p.ld, one.kv = p.kv + (size_t)p.start[r] * p.ld, one.start = start;
            for (int threads = 1; threads <= 7; threads += 2) {
                host_set_threads(threads);
                decode_paged(again, &one, 16, 1);
                CU_ASSERT(same_bits(again, o + (size_t)r * p.h1, (size_t)p.h1 * 4));
            }
            host_set_threads(0);
        }
        free(o), free(again);
        free_prompts(&p);
    }
}

static void decode_to_halves_is_the_float_result_rounded_once(void) {
    enum { NSEQ = 3, PT = 4, MAX_PAGES = 40, NH = 5 };
    const int32_t len[NSEQ] = {1, 70, 157};
    int32_t pages[NSEQ * MAX_PAGES];
    for (int i = 0; i < NSEQ * MAX_PAGES; i++) pages[i] = i;
    for (int c = 0; c < NDIMS; c++) {
        int h1 = head_dims[c] * NH, n = NSEQ * h1, wrong = 0;
        f16 *k = random_halves((size_t)MAX_PAGES * PT * n, 2), *v = random_halves((size_t)MAX_PAGES * PT * n, 2);
        f16 *q = random_halves(n, 3), *oh = random_halves(n + 1, 1), guard = oh[n];
        float *o = random_floats(n, 1);
        run(attention(o, F32, q, h1, h1, paged(k, v, pages, len, NSEQ, MAX_PAGES, PT, h1, NH, false)));
        run(attention(oh, F16, q, h1, h1, paged(k, v, pages, len, NSEQ, MAX_PAGES, PT, h1, NH, false)));
        for (int i = 0; i < n; i++) wrong += oh[i] != f32_to_f16(o[i]);
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_EQUAL(oh[n], guard);
        free(k), free(v), free(oh), free(q), free(o);
    }
}

/* Two tokens with scores 0 and -x and values 0 and 1: what comes out is e^-x / (1 + e^-x). */
static void softmax_weights_are_right_to_a_few_roundings(void) {
    enum { N = 8700 };
    const f16 k[2] = {0, 0x3c00}, v[2] = {0, 0x3c00};
    int32_t *pages = (int32_t *)xcalloc(N, 4), *len = (int32_t *)xcalloc(N, 4);
    f16 *q = random_halves(N, 1);
    float *o = random_floats(N, 1);
    double worst = 0;
    for (int i = 0; i < N; i++) q[i] = f32_to_f16(-0.00999f * (float)i), len[i] = 2;
    run(attention(o, F32, q, 1, 1, paged(k, v, pages, len, N, 1, 2, 1, 1, false)));
    for (int i = 0; i < N; i++) worst = worse(worst, fabs(o[i] * (1 + exp(-f16_to_f32(q[i]))) - 1));
    CU_ASSERT(worst <= 4e-7); /* e^-x within 2 ulp (2.4e-7), a sum and a quotient */
    free(pages), free(len), free(q), free(o);
}

static void large_scores_do_not_overflow(void) {
    const int32_t start[] = {0, 130};
    Prompts p = prompts_new(start, 1, 64, 2);
    for (int i = 0; i < p.rows * p.ld; i++) /* the first block may weigh e^-1000 of the second */
        if (i % p.ld < p.h1) p.q[i] = f32_to_f16(1000 * f16_to_f32(p.q[i]));
    float *o = random_floats((size_t)p.rows * p.h1, 1), last[128];
    double ref[128], worst = 0;
    prefill(o, &p, 0, start, 1);
    attention_reference(ref, &p, NULL, 0, 129);
    for (int d = 0; d < 128; d++) last[d] = (float)ref[d];
    worst = max_norm_error(o + 129 * 128, last, 128);
    CU_ASSERT(worst <= 2e-3); /* scores of 1e4 in float: 1e-3 in the exponent */
    free(o);
    free_prompts(&p);
}

/* One lane: the same work again and again, whose result must be o. */
typedef struct {
    const Prompts *p;
    const float *o;
    bool differs;
} Work;

static void *lane(void *arg) {
    Work *work = (Work *)arg;
    const Prompts *p = work->p;
    size_t n = (size_t)p->rows * p->h1;
    float *o = (float *)xcalloc(n, 4);
    for (int i = 0; i < 20; i++) {
        prefill(o, p, 0, p->start, p->nseq);
        work->differs |= !same_bits(o, work->o, n * 4);
        run(product(F32, o, F32, p->nh, work->o, p->kv, NULL, NULL, false, false, p->rows, p->nh, p->h1));
    }
    free(o);
    return NULL;
}

static void lanes_may_call_at_the_same_time(void) {
    pthread_t threads[3];
    Prompts p[3];
    Work work[3];
    for (int i = 0; i < 3; i++) { /* of different sizes, so that a shared buffer would show */
        p[i] = prompts_new(starts, 5 - i, head_dims[i], 2 + i);
        float *o = random_floats((size_t)p[i].rows * p[i].h1, 1);
        prefill(o, &p[i], 0, p[i].start, p[i].nseq);
        work[i] = (Work){&p[i], o, false};
    }
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL_FATAL(pthread_create(&threads[i], NULL, lane, &work[i]), 0);
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CU_ASSERT(!work[i].differs);
    }
    for (int i = 0; i < 3; i++) free((float *)work[i].o), free_prompts(&p[i]);
}

// ---- packed pages ------------------------------------------------------------------------------------------------

/* Sequences in pages that are scattered in a pool, put there by append. */
typedef struct {
    int nseq, h1, nh, page_tokens, max_pages;
    bool packed;
    int32_t *pages;
    const int32_t *len; /* [nseq] */
    size_t bytes;       /* of k, of v */
    uint8_t *k, *v;
} Paged;

static PageTable table_of(const Paged *p) {
    return paged(p->k, p->v, p->pages, p->len, p->nseq, p->max_pages, p->page_tokens, p->h1, p->nh, p->packed);
}

/* kv (rows, 2 h1), ld apart, holds the sequences one after another. They are packed before they go to their pages, or for
 * pages of an odd number of tokens on the way. */
static Paged paged_new(const f16 *kv, int ld, const int32_t *len, int nseq, int hd, int nh, int page_tokens, bool packs) {
    Paged p = {.nseq = nseq, .h1 = hd * nh, .nh = nh, .page_tokens = page_tokens, .packed = packs, .len = len};
    int rows = 0;
    for (int r = 0; r < nseq; r++) rows += len[r], p.max_pages = imax(p.max_pages, pages_for(len[r], page_tokens));
    int npages = nseq * p.max_pages;
    p.bytes = (size_t)npages * page_tokens * nh * (packs ? quant_bytes(hd) : hd * sizeof(f16));
    p.k = (uint8_t *)memset(xcalloc(p.bytes, 1), 0x7f, p.bytes); /* as F16 NaN, which must not be read */
    p.v = (uint8_t *)memset(xcalloc(p.bytes, 1), 0x7f, p.bytes);
    p.pages = (int32_t *)xcalloc(npages, 4);
    for (int i = 0; i < npages; i++) p.pages[i] = npages - 1 - (i % p.max_pages * nseq + i / p.max_pages);
    int32_t *seq = (int32_t *)xcalloc(rows, 4), *pos = (int32_t *)xcalloc(rows, 4);
    for (int r = 0, row = 0; r < nseq; r++)
        for (int t = 0; t < len[r]; t++, row++) seq[row] = r, pos[row] = t;
    const size_t row = p.bytes / ((size_t)npages * page_tokens);
    uint8_t *packed = (uint8_t *)xcalloc(rows, 2 * row);
    const bool before = packs && page_tokens % 2 == 0;
    if (before) run(packing(packed, kv, ld, rows, nh, hd));
    const int cols = before ? 2 * (int)row : 2 * hd * nh;
    run(appending(table_of(&p), before ? (const void *)packed : kv, cols, before, before ? cols : ld, seq, pos, rows));
    free(seq), free(pos), free(packed);
    return p;
}

static void paged_free(Paged *p) { free(p->pages), free(p->k), free(p->v); }

static void paged_attend(void *o, const f16 *q, Type type, const Paged *p) {
    run(attention(o, type, q, p->h1, p->h1, table_of(p)));
}

/* What attention takes packed heads for: min + scale * code, which no half need be. */
static void packed_numbers(float *to, const f16 *x, int heads, int hd) {
    uint8_t *bytes = (uint8_t *)xcalloc(quant_bytes(hd), 1);
    for (int h = 0; h < heads; h++) {
        plain_pack(bytes, x + (size_t)h * hd, 1, hd);
        plain_numbers(to + (size_t)h * hd, bytes, hd);
    }
    free(bytes);
}

enum { NSEQ = 5 };
static const int32_t lengths[NSEQ] = {1, 66, 200, 3, 128}; /* less than a block, whole blocks, and what is left over */
enum { TOKENS = 1 + 66 + 200 + 3 + 128 };

/* No packed number is rounded to a half: of numbers below 2 that is up to 2^-11 of a value, and with 128 queries of up to 3
 * up to 3 * 128 / sqrt(128) * 2^-11 of a score; so much or twice as much, and twice the largest value, is what two weighted
 * means may differ by. */
static void attention_to_packed_pages_is_that_to_halves_of_the_same_numbers(void) {
    const double FACTORED = 2 * 2 * (3 * sqrt(128) + 1) / 2048;
    static const int dims[] = {64, 80, 128, 16, 96, 48, 144}, page_sizes[] = {1, 3, 16};
    enum { NH = 3 };
    int wrong = 0;
    for (size_t c = 0; c < sizeof dims / sizeof *dims; c++) {
        const int hd = dims[c], h1 = hd * NH, n = NSEQ * h1;
        f16 *kv = random_halves((size_t)TOKENS * 2 * h1, 2), *back = random_halves((size_t)TOKENS * 2 * h1, 1);
        f16 *q = random_halves(n, 3), *oh = random_halves(n, 1), *againh = random_halves(n, 1);
        float *o = random_floats(n, 1), *again = random_floats(n, 1), *numbers = random_floats((size_t)TOKENS * 2 * h1, 1);
        packed_numbers(numbers, kv, TOKENS * 2 * NH, hd);
        for (int i = 0; i < TOKENS * 2 * h1; i++) back[i] = f32_to_f16(numbers[i]);
        Paged plain = paged_new(back, 2 * h1, lengths, NSEQ, hd, NH, 16, false);
        paged_attend(o, q, F32, &plain);
        for (int i = 0; i < 3; i++) {
            Paged packed = paged_new(kv, 2 * h1, lengths, NSEQ, hd, NH, page_sizes[i], true);
            paged_attend(again, q, F32, &packed);
            paged_attend(againh, q, F16, &packed);
            for (int e = 0; e < n && i == 0; e++) { /* what other pages are compared with */
                wrong += !(fabs(again[e] - o[e]) <= FACTORED);
                o[e] = again[e], oh[e] = f32_to_f16(again[e]);
            }
            wrong += !same_bits(again, o, (size_t)n * 4) || !same_bits(againh, oh, (size_t)n * 2);
            paged_free(&packed);
        }
        paged_free(&plain);
        free(kv), free(back), free(oh), free(againh), free(q), free(o), free(again), free(numbers);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void append_packs_every_head(void) {
    enum { DIM = 80, NH = 5, LD = 2 * DIM * NH + 3 }; /* enough of it for several threads */
    for (int c = 0; c < 2; c++) {
        const int PT = 2 + c % 2;
        f16 *kv = random_halves((size_t)TOKENS * LD, 2);
        Paged p = paged_new(kv, LD, lengths, NSEQ, DIM, NH, PT, true);
        size_t head = quant_bytes(DIM);
        uint8_t *k = (uint8_t *)memset(xcalloc(p.bytes, 1), 0x7f, p.bytes);
        uint8_t *v = (uint8_t *)memset(xcalloc(p.bytes, 1), 0x7f, p.bytes);
        const f16 *x = kv;
        for (int r = 0; r < NSEQ; r++)
            for (int t = 0; t < lengths[r]; t++, x += LD)
                for (int h = 0; h < 2 * NH; h++) {
                    size_t row = (size_t)p.pages[r * p.max_pages + t / PT] * PT + t % PT;
                    plain_pack((h < NH ? k : v) + (row * NH + h % NH) * head, x + h * DIM, 1, DIM);
                }
        CU_ASSERT(same_bits(k, p.k, p.bytes)); /* nothing else was touched */
        CU_ASSERT(same_bits(v, p.v, p.bytes));
        paged_free(&p);
        free(kv), free(k), free(v);
    }
}

/* A study's k and v are halves, each head in groups of its own. */
static void append_rounds_every_head_for_a_study(void) {
    enum { DIM = 20, NH = 3, H1 = DIM * NH, ROWS = 9 };
    static const Quant studies[] = {{3, 64}, {4, 16}, {8, 7}};
    for (int c = 0; c < 3; c++) {
        f16 *kv = random_halves(ROWS * 2 * H1, 2), k[ROWS * H1], v[ROWS * H1];
        const int32_t seq[ROWS] = {0}, pos[ROWS] = {8, 7, 6, 5, 4, 3, 2, 1, 0}, pages[] = {2, 0, 1};
        Op op = appending(paged(k, v, pages, NULL, 1, 3, 3, H1, NH, false), kv, 2 * H1, false, 2 * H1, seq, pos, ROWS);
        op.study = studies[c];
        run(op);
        for (int r = 0; r < ROWS; r++) {
            const size_t at = (size_t)(pages[pos[r] / 3] * 3 + pos[r] % 3) * H1;
            f16 *row = kv + r * 2 * H1;
            for (int h = 0; h < 2 * NH; h++) quant_round(row + h * DIM, 1, DIM, studies[c]);
            CU_ASSERT(same_bits(k + at, row, H1 * sizeof *k) && same_bits(v + at, row + H1, H1 * sizeof *v));
        }
        free(kv);
    }
}

static void decode_from_packed_pages_matches_double_precision(void) {
    static const int dims[] = {64, 16, 80, 96, 112, 128};
    enum { NH = 2, MOST = 128 * NH };
    int32_t start[NSEQ + 1] = {0};
    for (int r = 0; r < NSEQ; r++) start[r + 1] = start[r] + lengths[r];
    for (size_t c = 0; c < sizeof dims / sizeof *dims; c++) {
        const int DIM = dims[c], H1 = DIM * NH;
        Prompts p = prompts_new(start, NSEQ, DIM, NH);
        f16 *q = random_halves((size_t)NSEQ * H1, 1);
        float o[NSEQ * MOST], *numbers = random_floats((size_t)p.rows * p.ld, 1);
        double ref[MOST], worst = 0;
        for (int r = 0; r < NSEQ; r++) memcpy(q + r * H1, p.q + (size_t)(start[r + 1] - 1) * p.ld, H1 * sizeof *q);
        Paged packed = paged_new(p.kv, p.ld, lengths, NSEQ, DIM, NH, 16, true);
        paged_attend(o, q, F32, &packed);
        for (int row = 0; row < p.rows; row++) /* kv begins one width into rows of three */
            packed_numbers(numbers + (size_t)row * p.ld, p.kv + (size_t)row * p.ld, 2 * NH, DIM);
        for (int r = 0; r < NSEQ; r++) {
            attention_reference(ref, &p, numbers, start[r], start[r + 1] - 1);
            for (int d = 0; d < H1; d++) worst = worse(worst, fabs(ref[d] - o[r * H1 + d]));
        }
        CU_ASSERT(worst <= 2e-5); /* as from halves */
        paged_free(&packed);
        free_prompts(&p);
        free(q), free(numbers);
    }
}

// ---- sparse attention --------------------------------------------------------------------------------------------

/* tokens, weights (nseq, nh, most) of sparse attention, and o. What is not written stays -1. */
typedef struct {
    int most;
    int32_t *tokens;
    float *weights, *o;
} Sparse;

static Sparse sparse_attend(const f16 *q, const Paged *p, double sparsity, int spare) {
    Sparse s = {.most = spare};
    for (int r = 0; r < p->nseq; r++) s.most = imax(s.most, sparse_tokens(sparsity, p->len[r]) + spare);
    size_t n = (size_t)p->nseq * p->nh * s.most;
    s.tokens = (int32_t *)memset(xcalloc(n, 4), 0xff, n * 4);
    s.weights = random_floats(n, 1), s.o = random_floats((size_t)p->nseq * p->h1, 1);
    for (size_t i = 0; i < n; i++) s.weights[i] = -1;
    run(selection(s.tokens, s.weights, s.most, q, p->h1, p->h1, table_of(p), sparsity));
    run(weighing(s.o, F32, s.tokens, s.weights, s.most, p->h1, table_of(p), sparsity));
    return s;
}

static void sparse_free(Sparse *s) { free(s->tokens), free(s->weights), free(s->o); }

/* Whether score a of token i goes before score b of token j. */
static bool goes_before(double a, int i, double b, int j) {
    if (isnan(a) || isnan(b)) return isnan(a) == isnan(b) ? i < j : isnan(b);
    return a > b || (a == b && i < j);
}

/* How much of the tokens and weights of a (sequence, head) is not as section 5 says; score (len). */
static int sparse_faults(const int32_t *tokens, const float *weights, int most, const double *score, int len,
                         double sparsity) {
    int k = sparse_tokens(sparsity, len) - 1, wrong = 0, at = 0;
    double top = score[len - 1], sum = 0;
    for (int t = 0; t < len; t++) {
        int before = 0;
        for (int u = 0; u < len - 1; u++) before += goes_before(score[u], u, score[t], t);
        if (t < len - 1 && before >= k) continue;
        wrong += at > k || tokens[at++] != t;
    }
    if (at != k + 1 || wrong) return 1;
    for (int t = 0; t < len; t++) top = fmax(top, score[t]);
    for (int t = 0; t < len; t++) sum += exp(score[t] - top); /* of all: NaN poisons it, as in dense attention */
    for (int i = 0; i < at; i++)
        wrong += isnan(sum) ? !isnan(weights[i]) : !(fabs(exp(score[tokens[i]] - top) / sum - weights[i]) <= 1e-6);
    for (int i = at; i < most; i++) wrong += tokens[i] != -1 || weights[i] != -1;
    return wrong;
}

static double dot_reference(const f16 *q, const float *k, int hd) {
    double sum = 0;
    for (int d = 0; d < hd; d++) sum += (double)f16_to_f32(q[d]) * k[d];
    return sum / sqrt(hd);
}

/* Whole numbers, so that scores are exact and many are equal; each head of k has a 0 and a 15, so that 4 bits hold it. */
static f16 *whole_numbers(int heads, int hd) {
    f16 *x = random_halves((size_t)heads * hd, 1);
    for (int i = 0; i < heads * hd; i++) {
        int number = i % hd == 0 ? 0 : i % hd == 1 ? 15 : (int)(8 + 8 * test_random(&state));
        x[i] = f32_to_f16((float)number);
    }
    return x;
}

static void the_largest_scores_are_chosen_and_of_equal_ones_the_earlier(void) {
    static const double sparsities[] = {1e-9, 0.004, 0.1, 0.5, 0.9999, 1};
    enum { DIM = 16, NH = 3, H1 = DIM * NH };
    f16 *kv = whole_numbers(TOKENS * 2 * NH, DIM);
    f16 *q = random_halves(NSEQ * H1, 1);
    float *numbers = random_floats(TOKENS * 2 * H1, 1);
    for (int i = 0; i < TOKENS * 2 * H1; i++) numbers[i] = f16_to_f32(kv[i]);
    int wrong = 0;
    for (int i = 0; i < NSEQ * H1; i++) /* few scores are possible */
        q[i] = f32_to_f16((float)(i % DIM % 5 == 2) - (float)(i % DIM == 6));
    for (int c = 0; c < 12; c++) {
        double sparsity = sparsities[c / 2], score[200];
        Paged p = paged_new(kv, 2 * H1, lengths, NSEQ, DIM, NH, 7, c % 2);
        Sparse s = sparse_attend(q, &p, sparsity, 2);
        for (int r = 0, row = 0; r < NSEQ; row += lengths[r++])
            for (int h = 0; h < NH; h++) {
                size_t at = ((size_t)r * NH + h) * s.most;
                for (int t = 0; t < lengths[r]; t++)
                    score[t] = dot_reference(q + r * H1 + h * DIM, numbers + (size_t)(row + t) * 2 * H1 + h * DIM, DIM);
                wrong += sparse_faults(s.tokens + at, s.weights + at, s.most, score, lengths[r], sparsity);
            }
        sparse_free(&s);
        paged_free(&p);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(kv), free(q), free(numbers);
}

/* One head of one number: the scores are what is in k. */
static int chosen_faults(const float *scores, int len, double sparsity) {
    const f16 one = 0x3c00;
    double score[64];
    int32_t length = len;
    f16 kv[64 * 2] = {0};
    for (int t = 0; t < len; t++) kv[2 * t] = f32_to_f16(scores[t]), score[t] = scores[t];
    Paged p = paged_new(kv, 2, &length, 1, 1, 1, 5, false);
    Sparse s = sparse_attend(&one, &p, sparsity, 1);
    int wrong = sparse_faults(s.tokens, s.weights, s.most, score, len, sparsity);
    sparse_free(&s);
    paged_free(&p);
    return wrong;
}

static void signs_zeros_infinities_and_nan_have_their_place_among_the_scores(void) {
    float signs[] = {-1, 2, -3, 0, 4, -0.0f, 0, -5, 6, -0.0f, 1e-7f, -1e-7f, 0}, equal[64], low[20];
    float numbers[] = {1, NAN, -2, -NAN, 3, NAN, -4, 0.5f};
    float all[9], ends[] = {-2, -INFINITY, 3, -INFINITY, 1, -INFINITY, 2};
    for (int i = 0; i < 64; i++) equal[i] = 2.5f;
    for (int i = 0; i < 20; i++) low[i] = (float)(-60000 + 32 * i);
    for (int k = 0; k <= 12; k++) CU_ASSERT_EQUAL(chosen_faults(signs, 13, k / 12.0), 0);
    for (int k = 0; k <= 63; k += 7) CU_ASSERT_EQUAL(chosen_faults(equal, 64, k / 63.0), 0);
    for (int k = 0; k <= 19; k++) CU_ASSERT_EQUAL(chosen_faults(low, 20, k / 19.0), 0);
    for (int k = 0; k <= 4; k++) CU_ASSERT_EQUAL(chosen_faults(numbers, 8, k / 7.0), 0); /* there are 4 numbers before it */
    for (int k = 0; k <= 6; k++) CU_ASSERT_EQUAL(chosen_faults(ends, 7, k / 6.0), 0);
    for (int i = 0; i < 9; i++) all[i] = NAN; /* weights are NaN, tokens the earliest */
    const int32_t len = 9;
    const f16 one = 0x3c00;
    f16 kv[18];
    for (int i = 0; i < 18; i++) kv[i] = f32_to_f16(all[i / 2]);
    Paged p = paged_new(kv, 2, &len, 1, 1, 1, 4, false);
    Sparse s = sparse_attend(&one, &p, 0.5, 0);
    const int32_t earliest[] = {0, 1, 2, 3, 8};
    CU_ASSERT(same_bits(s.tokens, earliest, sizeof earliest));
    CU_ASSERT(isnan(s.weights[0]) && isnan(s.o[0]));
    sparse_free(&s);
    paged_free(&p);
}

static void sparse_attention_is_softmax_over_all_and_v_of_the_largest(void) {
    static const int dims[] = {128, 80, 20};
    enum { NH = 2 };
    for (int c = 0; c < 5; c++) { /* heads of 20 are never packed */
        const int hd = dims[c / 2], h1 = hd * NH;
        const bool packs = c % 2;
        f16 *kv = random_halves((size_t)TOKENS * 2 * h1, 2);
        float *numbers = random_floats((size_t)TOKENS * 2 * h1, 1), *x = numbers;
        if (packs) packed_numbers(numbers, kv, TOKENS * 2 * NH, hd);
        for (int i = 0; !packs && i < TOKENS * 2 * h1; i++) numbers[i] = f16_to_f32(kv[i]);
        f16 *q = random_halves((size_t)NSEQ * h1, 3);
        double score[200], worst = 0;
        int wrong = 0;
        Paged p = paged_new(kv, 2 * h1, lengths, NSEQ, hd, NH, 16, packs);
        Sparse s = sparse_attend(q, &p, 0.2, 0);
        for (int r = 0; r < NSEQ; x += (size_t)lengths[r++] * 2 * h1) {
            int n = sparse_tokens(0.2, lengths[r]);
            for (int h = 0; h < NH; h++) {
                const int32_t *tokens = s.tokens + ((size_t)r * NH + h) * s.most;
                bool chosen[200] = {0};
                double sum = 0, least = INFINITY;
                for (int t = 0; t < lengths[r]; t++)
                    score[t] = dot_reference(q + r * h1 + h * hd, x + (size_t)t * 2 * h1 + h * hd, hd);
                for (int i = 0; i < n; i++) chosen[tokens[i]] = true;
                for (int t = 0; t < lengths[r]; t++) sum += exp(score[t]);
                for (int i = 0; i < n - 1; i++) least = fmin(least, score[tokens[i]]);
                for (int t = 0; t < lengths[r] - 1; t++) wrong += !chosen[t] && score[t] > least + 1e-5;
                for (int d = 0; d < hd; d++) {
                    double o = 0;
                    for (int i = 0; i < n; i++)
                        o += exp(score[tokens[i]]) / sum * x[(size_t)tokens[i] * 2 * h1 + h1 + h * hd + d];
                    worst = worse(worst, fabs(o - s.o[r * h1 + h * hd + d]));
                }
            }
        }
        CU_ASSERT_EQUAL(wrong, 0); /* scores up to ~20 are good to 2e-6 */
        CU_ASSERT(worst <= 2e-5);  /* as dense attention */
        sparse_free(&s);
        paged_free(&p);
        free(kv), free(numbers), free(q);
    }
}

static void choosing_every_token_is_dense_attention(void) {
    enum { DIM = 64, NH = 4, N = NSEQ * DIM * NH };
    for (int c = 0; c < 2; c++) {
        f16 *kv = random_halves((size_t)TOKENS * 2 * DIM * NH, 2);
        f16 *q = random_halves(N, 3);
        float *o = random_floats(N, 1);
        double worst = 0;
        Paged p = paged_new(kv, 2 * DIM * NH, lengths, NSEQ, DIM, NH, 16, c);
        Sparse s = sparse_attend(q, &p, 1, 0);
        paged_attend(o, q, F32, &p);
        for (int i = 0; i < N; i++) worst = worse(worst, fabs(o[i] - s.o[i]));
        /* the same scores, but divided before v is weighed, not after, and without a running maximum: some roundings of
         * 6e-8 in weights that add up to 1, of values up to 2 */
        CU_ASSERT(worst <= 2e-6);
        sparse_free(&s);
        paged_free(&p);
        free(kv), free(q), free(o);
    }
}

static void page_size_company_and_threads_never_change_a_bit_of_sparse_attention(void) {
    enum { DIM = 80, NH = 7, H1 = DIM * NH };
    int wrong = 0;
    for (int c = 0; c < 2; c++) {
        f16 *kv = random_halves((size_t)TOKENS * 2 * H1, 2);
        f16 *q = random_halves(NSEQ * H1, 3);
        Paged p = paged_new(kv, 2 * H1, lengths, NSEQ, DIM, NH, 16, c);
        Sparse s = sparse_attend(q, &p, 0.1, 0);
        for (int r = 0, row = 0; r < NSEQ; row += lengths[r++]) {
            host_set_threads(1 + r * 2);
            Paged alone = paged_new(kv + (size_t)row * 2 * H1, 2 * H1, lengths + r, 1, DIM, NH, 1 + r, c);
            Sparse one = sparse_attend(q + r * H1, &alone, 0.1, 0);
            wrong += !same_bits(one.o, s.o + r * H1, sizeof(float[H1]));
            for (int h = 0; h < NH; h++) {
                size_t at = ((size_t)r * NH + h) * s.most, n = sparse_tokens(0.1, lengths[r]);
                wrong += !same_bits(one.tokens + (size_t)h * one.most, s.tokens + at, n * 4);
                wrong += !same_bits(one.weights + (size_t)h * one.most, s.weights + at, n * 4);
            }
            sparse_free(&one);
            paged_free(&alone);
        }
        host_set_threads(0);
        sparse_free(&s);
        paged_free(&p);
        free(kv), free(q);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* A token's row of V is a page of memory, and only what was chosen may be read. */
static void v_of_tokens_that_were_not_chosen_is_never_touched(void) {
    enum { LEN = 40, DIM = 64, NH = 32, H1 = DIM * NH, PT = 4 }; /* the heads have the same k and q, so they agree */
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), row = H1 * sizeof(f16);
    if (row % page) return;
    const int32_t len = LEN;
    f16 *kv = random_halves((size_t)LEN * 2 * H1, 1);
    f16 *q = random_halves(H1, 1);
    float *o = random_floats(H1, 1), *again = random_floats(H1, 1);
    for (int i = DIM; i < H1; i++) q[i] = q[i - DIM];
    for (int t = 0; t < LEN; t++)
        for (int i = DIM; i < H1; i++) kv[(size_t)t * 2 * H1 + i] = kv[(size_t)t * 2 * H1 + i - DIM];
    Paged p = paged_new(kv, 2 * H1, &len, 1, DIM, NH, PT, false);
    Sparse s = sparse_attend(q, &p, 0.1, 0);
    uint8_t *v = (uint8_t *)mmap(NULL, p.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CU_ASSERT_FATAL(v != MAP_FAILED);
    memcpy(v, p.v, p.bytes);
    for (int t = 0, i = 0; t < LEN; t++) {
        if (s.tokens[i] == t)
            i++;
        else
            mprotect(v + ((size_t)p.pages[t / PT] * PT + t % PT) * row, row, PROT_NONE);
    }
    PageTable table = table_of(&p);
    table.v.at = v;
    run(weighing(again, F32, s.tokens, s.weights, s.most, H1, table, 0.1));
    CU_ASSERT(same_bits(again, s.o, sizeof(float[H1])));
    munmap(v, p.bytes);
    sparse_free(&s);
    paged_free(&p);
    free(kv), free(q), free(o), free(again);
}

// ---- pick --------------------------------------------------------------------------------------------------------

static int pick_one(const float *logits, int vocab, Sampling s, int prompt, int pos) {
    int32_t id = -1, at = prompt, where = pos;
    run(picking(&id, logits, &at, &where, &s, 1, vocab));
    return id;
}

static void greedy_takes_the_largest_the_lowest_id_among_equals_and_never_nan(void) {
    float a[] = {1, 3, 2, 3, -1}, b[] = {NAN, -5, NAN, -4, NAN}, c[] = {NAN, -INFINITY, NAN}, d[] = {NAN, NAN},
          e[] = {0, INFINITY, 1};
    for (int sampled = 0; sampled < 2; sampled++) { /* a tiny temperature is greedy but for ties */
        Sampling s = {sampled ? 1e-30f : 0, 1, 0, 7};
        if (!sampled) CU_ASSERT_EQUAL(pick_one(a, 5, s, 0, 0), 1);
        CU_ASSERT_EQUAL(pick_one(a + 2, 3, s, 0, 0), 1);
        CU_ASSERT_EQUAL(pick_one(b, 5, s, 0, 0), 3);
        CU_ASSERT_EQUAL(pick_one(c, 3, s, 0, 0), 1);
        CU_ASSERT_EQUAL(pick_one(d, 2, s, 0, 0), 0);
        CU_ASSERT_EQUAL(pick_one(e, 3, s, 0, 0), 1);
    }
}

static void greedy_looks_at_every_place(void) {
    enum { VOCAB = 100 };
    float logits[VOCAB];
    Sampling s = {0, 1, 0, 1};
    for (int at = 0; at < VOCAB; at++) {
        for (int i = 0; i < VOCAB; i++) logits[i] = i % 7 == 3 ? NAN : -10;
        logits[at] = -9, logits[VOCAB - 1] = -9;
        CU_ASSERT_EQUAL(pick_one(logits, VOCAB, s, 0, 0), at);
    }
}

static void sampling_depends_on_seed_prompt_and_position_only(void) {
    enum { VOCAB = 50272, ROWS = 9 };
    float *logits = random_floats((size_t)ROWS * VOCAB, 3);
    for (int r = 1; r < ROWS; r++) memcpy(logits + (size_t)r * VOCAB, logits, VOCAB * 4);
    int32_t prompt[] = {0, 0, 0, 1, 1, 1, 2, 2, 2}, pos[] = {5, 6, 7, 5, 6, 7, 5, 6, 7}, ids[ROWS], again[ROWS];
    Sampling s = {0.9f, 0.95f, 0, 11};
    run(picking(ids, logits, prompt, pos, &s, ROWS, VOCAB));
    int same = 0, reseeded = 0;
    for (int r = 0; r < ROWS; r++) {
        CU_ASSERT_EQUAL(pick_one(logits, VOCAB, s, prompt[r], pos[r]), ids[r]);
        for (int q = 0; q < r; q++) same += ids[q] == ids[r];
    }
    s.seed = 12;
    run(picking(again, logits, prompt, pos, &s, ROWS, VOCAB));
    for (int r = 0; r < ROWS; r++) reseeded += again[r] == ids[r];
    CU_ASSERT(same <= 1); /* of 36 pairs among thousands of likely tokens */
    CU_ASSERT(reseeded <= 1);
    free(logits);
}

/* Draws 20000 times and compares with what is expected: sum (seen - expected)^2 / expected, over tokens that may come. */
static double chi_square(const float *logits, int vocab, Sampling s, const double *expected, int *outside) {
    enum { DRAWS = 20000 };
    int seen[64] = {0};
    double chi = 0;
    *outside = 0;
    for (int i = 0; i < DRAWS; i++) seen[pick_one(logits, vocab, s, i % 100, i / 100)]++;
    for (int t = 0; t < vocab; t++) {
        double want = expected[t] * DRAWS;
        if (want > 0)
            chi += (seen[t] - want) * (seen[t] - want) / want;
        else
            *outside += seen[t];
    }
    return chi;
}

static void sampling_follows_the_softmax_cut_by_top_k_and_top_p(void) {
    const double p[] = {0.05, 0.3, 0.05, 0.25, 0.2, 0.15}; /* order: 1 3 4 5 then 0 before 2 */
    static const struct {
        float top_p;
        int top_k;
        int kept; /* bits */
    } cases[] = {
        {1, 0, 63},     {1, 100, 63},  {1, 6, 63},   {1, 2, 10},     {1, 5, 59}, {0.5f, 0, 10}, {0.56f, 0, 26},
        {0.92f, 0, 59}, {0.5f, 4, 10}, {0.3f, 3, 2}, {0.45f, 3, 10}, {0, 0, 2},  {1, 1, 2},     {0.99f, 100, 63},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        for (int hot = 0; hot < 2; hot++) { /* at temperature 2 logits of twice the size give the same */
            Sampling s = {hot ? 2 : 1, cases[c].top_p, cases[c].top_k, c};
            float logits[7];
            double expected[7] = {0}, mass = 0;
            int outside;
            for (int t = 0; t < 6; t++) {
                logits[t] = (float)log(p[t] * 100) * (hot ? 2 : 1);
                if (t == 2) logits[t] = logits[0];
                mass += cases[c].kept >> t & 1 ? p[t] : 0;
            }
            for (int t = 0; t < 6; t++) expected[t] = cases[c].kept >> t & 1 ? p[t] / mass : 0;
            logits[6] = NAN;
            double chi = chi_square(logits, 7, s, expected, &outside);
            CU_ASSERT(chi <= 25); /* 5 degrees of freedom: beyond 25 once in 7000, and the seed is fixed */
            CU_ASSERT_EQUAL(outside, 0);
        }
    }
}

/* Two equal tokens have half of the mass each, exactly: the first reaches top_p = 0.5, so the second is never drawn. */
static void what_reaches_top_p_exactly_ends_the_choice(void) {
    const float logits[] = {-INFINITY, 3, -INFINITY, 3, -INFINITY};
    for (int top_k = 0; top_k <= 4; top_k += 2) /* cut by top_p alone, by both, by both with room for more */
        for (int pos = 0; pos < 100; pos++) CU_ASSERT_EQUAL(pick_one(logits, 5, (Sampling){1, 0.5f, top_k, 3}, 0, pos), 1);
}

/* Of two equal tokens the one with the lower id has the first half of the draws, wherever the two lie; other tokens, 2^-40
 * and less as probable, are cut or not. */
static void equal_tokens_are_drawn_in_the_order_of_their_ids(void) {
    enum { VOCAB = 131 };
    static const Sampling samplings[] = {{1, 0.999f, 0, 3}, {1, 1, 2, 4}, {1, 0.999f, 9, 5}, {1, 1, 0, 6}};
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

static void top_k_among_many_keeps_the_best(void) {
    enum { VOCAB = 5000, K = 40 };
    float *logits = random_floats(VOCAB, 1);
    int inside = 0, distinct = 0;
    bool seen[VOCAB] = {0};
    Sampling s = {1, 1, K, 3};
    for (int i = 0; i < 1000; i++) {
        int id = pick_one(logits, VOCAB, s, 0, i), better = 0;
        for (int t = 0; t < VOCAB; t++) better += logits[t] > logits[id];
        inside += better < K;
        distinct += !seen[id];
        seen[id] = true;
    }
    CU_ASSERT_EQUAL(inside, 1000);
    CU_ASSERT_EQUAL(distinct, K); /* nearly equal weights: each is missed with (39/40)^1000 */
    free(logits);
}

static void score_is_the_log_softmax_of_the_target_and_the_greedy_choice(void) {
    static const int vocabs[] = {1, 5, 16, 131, 1025, 50272};
    Sampling greedy = {0, 1, 0, 1};
    for (int c = 0; c < 6; c++) {
        enum { ROWS = 6 };
        int vocab = vocabs[c], wrong = 0;
        float *logits = random_floats((size_t)ROWS * vocab, 50), logp[ROWS];
        int32_t target[ROWS], best[ROWS];
        double worst = 0;
        for (int r = 0; r < ROWS; r++) target[r] = vocab * r / ROWS;
        for (int i = 0; i < vocab; i++) logits[i] = -50 + 1e-3f * (i % 7); /* flat: the sum is long and all of it counts */
        run(scoring(logp, best, logits, target, ROWS, vocab));
        for (int r = 0; r < ROWS; r++) {
            const float *row = logits + (size_t)r * vocab;
            double sum = 0;
            for (int i = 0; i < vocab; i++) sum += exp((double)row[i] - row[best[r]]);
            worst = worse(worst, fabs((double)row[target[r]] - row[best[r]] - log(sum) - logp[r]));
            wrong += best[r] != pick_one(row, vocab, greedy, 0, 0);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT(worst <= 6e-6); /* half a float's step at 100 is 3.8e-6, the sum is good to 1e-6 */
        free(logits);
    }
}

static void score_of_nan_is_nan_and_of_what_cannot_come_is_minus_infinity(void) {
    enum { VOCAB = 100 };
    float logits[2][VOCAB] = {{0}}, logp[2];
    const int32_t target[] = {3, 3};
    int32_t best[2];
    for (int at = 0; at < VOCAB; at++) {
        logits[0][at] = NAN, logits[1][3] = -INFINITY;
        run(scoring(logp, best, logits[0], target, 2, VOCAB));
        CU_ASSERT(isnan(logp[0]) && logp[1] == -INFINITY);
        CU_ASSERT_EQUAL(best[0], at == 0);
        logits[0][at] = 0;
    }
}

CU_TestInfo tests[] = {
    {"every half converts exactly and back", every_half_converts_exactly_and_back},
    {"vectors read halves as scalars do", vectors_read_halves_as_scalars_do},
    {"floats round to the nearest even half", floats_round_to_the_nearest_even_half},
    {"embed gathers and adds rows of every type", embed_gathers_and_adds_rows_of_every_type},
    {"embed into halves is the float result, rounded once", embed_into_halves_is_the_float_result_rounded_once},
    {"layernorm matches its formula, in place and row by row", layernorm_matches_its_formula_in_place_and_row_by_row},
    {"linear matches double precision at odd sizes", linear_matches_double_precision_at_odd_sizes},
    {"linear's rows do not depend on the other rows", linear_rows_do_not_depend_on_the_other_rows},
    {"results do not depend on the threads", results_do_not_depend_on_the_threads},
    {"linear writes halves and strides and nothing outside", linear_writes_halves_and_strides_and_nothing_outside},
    {"linear adds bias, then relu, then the residual, even in place",
     linear_adds_bias_then_relu_then_the_residual_even_in_place},
    {"packed linear matches double precision over the numbers that came back",
     packed_linear_matches_double_precision_over_the_numbers_that_came_back},
    {"packed rows depend on neither rows nor columns nor threads",
     packed_rows_depend_on_neither_rows_nor_columns_nor_threads},
    {"packed linear finishes like linear and writes nothing outside",
     packed_linear_finishes_like_linear_and_writes_nothing_outside},
    {"append puts rows where the page table says", append_puts_rows_where_the_page_table_says},
    {"prefill attention matches double precision", prefill_attention_matches_double_precision},
    {"prefill rows do not depend on the other sequences", prefill_rows_do_not_depend_on_the_other_sequences},
    {"a token never sees the ones after it", a_token_never_sees_the_ones_after_it},
    {"decode attention matches double precision, and prefill bit for bit",
     decode_attention_matches_double_precision_and_prefill_bit_for_bit},
    {"page size, placement and company never change a bit", page_size_placement_and_company_never_change_a_bit},
    {"decode to halves is the float result, rounded once", decode_to_halves_is_the_float_result_rounded_once},
    {"softmax weights are right to a few roundings", softmax_weights_are_right_to_a_few_roundings},
    {"large scores do not overflow", large_scores_do_not_overflow},
    {"lanes may call at the same time", lanes_may_call_at_the_same_time},
    {"attention to packed pages is that to halves of the same numbers",
     attention_to_packed_pages_is_that_to_halves_of_the_same_numbers},
    {"append packs every head", append_packs_every_head},
    {"append rounds every head for a study", append_rounds_every_head_for_a_study},
    {"decode from packed pages matches double precision", decode_from_packed_pages_matches_double_precision},
    {"the largest scores are chosen, and of equal ones the earlier",
     the_largest_scores_are_chosen_and_of_equal_ones_the_earlier},
    {"signs, zeros, infinities and NaN have their place among the scores",
     signs_zeros_infinities_and_nan_have_their_place_among_the_scores},
    {"sparse attention is softmax over all, and V of the largest",
     sparse_attention_is_softmax_over_all_and_v_of_the_largest},
    {"choosing every token is dense attention", choosing_every_token_is_dense_attention},
    {"page size, company and threads never change a bit of sparse attention",
     page_size_company_and_threads_never_change_a_bit_of_sparse_attention},
    {"V of tokens that were not chosen is never touched", v_of_tokens_that_were_not_chosen_is_never_touched},
    {"greedy takes the largest, the lowest id among equals, never NaN",
     greedy_takes_the_largest_the_lowest_id_among_equals_and_never_nan},
    {"greedy looks at every place", greedy_looks_at_every_place},
    {"sampling depends on seed, prompt and position only", sampling_depends_on_seed_prompt_and_position_only},
    {"sampling follows the softmax cut by top-k and top-p", sampling_follows_the_softmax_cut_by_top_k_and_top_p},
    {"what reaches top-p exactly ends the choice", what_reaches_top_p_exactly_ends_the_choice},
    {"equal tokens are drawn in the order of their ids", equal_tokens_are_drawn_in_the_order_of_their_ids},
    {"top-k among many keeps the best", top_k_among_many_keeps_the_best},
    {"score is the log softmax of the target, and the greedy choice",
     score_is_the_log_softmax_of_the_target_and_the_greedy_choice},
    {"score of NaN is NaN, and of what cannot come minus infinity",
     score_of_nan_is_nan_and_of_what_cannot_come_is_minus_infinity},
    CU_TEST_INFO_NULL,
};
