/* test_cuda.c: the GPU's launchers against their twins on the host, on the same halves; and bit for bit where a result may
 * not depend on its company.
 *
 * A test lays out a piece of GPU memory (put, room) in a copy on the host, which is uploaded when the work begins; when it
 * has ended everything comes back, and but for the rooms no byte may have changed: neither an input nor what lies between.
 * What nobody filled is NOBODYS. */
#include <time.h>

#include "ops.h"
#include "tests.h"

enum { MIB = 1 << 20, GUARD = 192, MAX_ROOMS = 4 };

/* A half is within 2^-11 of what it was rounded from, or below the normal halves within 2^-25. */
static const double HALF = 1.0 / 2048, TINY = 1.0 / (1 << 25);

static Gpu *gpu;
static Error err;
static uint64_t state = 1;

static struct {
    uint8_t *gpu, *before, *after; /* on the GPU; what it is given, what comes back */
    size_t bytes, used;
    size_t room[MAX_ROOMS], room_bytes[MAX_ROOMS];
    int nrooms, mark;
} arena;

static void **temps; /* memory of the current test */
static int ntemps;

// ---- data, and the GPU's memory ------------------------------------------------------------------------------------

static void *temp(size_t count, size_t size) {
    temps = (void **)xrealloc(temps, ntemps + 1, sizeof *temps);
    return temps[ntemps++] = xcalloc(count, size);
}

static f16 *random_halves(size_t n, float scale) {
    f16 *x = (f16 *)temp(n, sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = f32_to_f16(scale * test_random(&state));
    return x;
}

static float *floats(const f16 *x, size_t n) {
    float *y = (float *)temp(n, sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = f16_to_f32(x[i]);
    return y;
}

static int random_below(int n) { return (int)((test_random(&state) + 1) / 2 * (float)n); }

/* How many of n halves or floats are not within atol + rtol |ref| of ref; no NaN is. */
static int far_off(const void *y, Type type, const float *ref, size_t n, double atol, double rtol) {
    int far = 0;
    for (size_t i = 0; i < n; i++) {
        float v = type == F32 ? ((const float *)y)[i] : f16_to_f32(((const f16 *)y)[i]);
        far += !(fabs((double)v - ref[i]) <= atol + rtol * fabs(ref[i]));
    }
    return far;
}

static void gpu_open(void) {
    if (!gpu) gpu = cuda_open_gpu(&err);
    if (gpu) return;
    fprintf(stderr, "\n    %s\n", err.text);
    CU_FAIL_FATAL("cuda_open_gpu");
}

static void gpu_close(void) {
    gpu->close(gpu);
    gpu = NULL;
}

static void arena_close(void) {
    if (arena.gpu) gpu->call->release(gpu, arena.gpu);
    arena.gpu = NULL;
    while (ntemps) free(temps[--ntemps]);
    free(temps);
    temps = NULL;
}

/* What nobody filled: as halves NaN, but none that arithmetic gives; as indices far below 0. */
enum { NOBODYS = 0xfd };

/* Begins a layout: nothing filled, nothing taken. */
static void clear(void) {
    memset(arena.before, NOBODYS, arena.bytes);
    arena.used = GUARD, arena.nrooms = 0;
}

static void arena_open(size_t bytes) {
    gpu_open();
    arena_close(); /* a test may have been left by a fatal failure */
    arena.bytes = bytes;
    arena.gpu = (uint8_t *)gpu->call->alloc(gpu, bytes, &err);
    CU_ASSERT_FATAL(arena.gpu != NULL);
    arena.before = (uint8_t *)temp(bytes, 1), arena.after = (uint8_t *)temp(bytes, 1);
    clear();
}

/* The address on the GPU of bytes like src's. It is a multiple of 64, as in a plan, and of no more. */
static void *put(const void *src, size_t bytes) {
    uint8_t *at = arena.gpu + arena.used;
    if (src) memcpy(arena.before + arena.used, src, bytes);
    arena.used = (arena.used + bytes + GUARD) / 128 * 128 + 64;
    CHECK(arena.used + GUARD <= arena.bytes);
    return at;
}

/* The same for a place that will be written to; src NULL: it is NOBODYS before. */
static void *room(const void *src, size_t bytes) {
    uint8_t *at = (uint8_t *)put(src, bytes);
    CHECK(arena.nrooms < MAX_ROOMS);
    arena.room[arena.nrooms] = (size_t)(at - arena.gpu), arena.room_bytes[arena.nrooms++] = bytes;
    return at;
}

/* What was at an address of the GPU when the work had ended. */
static void *result(const void *at) { return arena.after + ((const uint8_t *)at - arena.gpu); }

#define POST(lane, f, ...) ASSERT_OK(gpu->call->f(gpu, lane, __VA_ARGS__, &err))

static void start(Lane lane) {
    arena.mark = (arena.mark + 1) % MARKS;
    ASSERT_OK(gpu->call->transfer(gpu, arena.gpu, arena.before, arena.used, &err));
    POST(lane, begin, arena.mark);
}

static void finish(Lane lane) {
    size_t at = 0;
    POST(lane, end, arena.mark, true);
    POST(lane, sync, arena.mark);
    ASSERT_OK(gpu->call->transfer(gpu, arena.after, arena.gpu, arena.used, &err));
    bool untouched = true;
    for (int i = 0; i < arena.nrooms; i++) {
        untouched &= memcmp(arena.before + at, arena.after + at, arena.room[i] - at) == 0;
        at = arena.room[i] + arena.room_bytes[i];
    }
    CU_ASSERT(untouched && memcmp(arena.before + at, arena.after + at, arena.used - at) == 0);
}

static void post_op(Lane lane, Op op) {
    op.lane = lane;
    ASSERT_OK(gpu->call->run(gpu, &op, &err));
}
/* An op alone, and a copy. */
static void on_gpu(Lane lane, Op op) {
    start(lane);
    post_op(lane, op);
    finish(lane);
}
static void copy_on(Lane lane, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t row_bytes, int rows) {
    start(lane);
    POST(lane, copy, (StridedCopy){dst, dst_pitch, src, src_pitch, row_bytes, rows});
    finish(lane);
}

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
/* Where ThreadSanitizer watches, every eleventh of many combinations: 11 is prime to the lengths of their lists. */
static int every_eleventh(void) { return test_every > 100 ? 11 : 1; }
/* The same, and every third where another way is in a hurry. */
static int every_third(void) { return test_every > 40 && test_every <= 100 ? 3 : every_eleventh(); }
static const int some_rows[] = {1, 31, 33, 65};
static const Lane lanes[] = {PROJECT, FINISH};

// ---- rows ----------------------------------------------------------------------------------------------------------

static void embed_copies_rows_exactly_and_adds_with_one_rounding(void) {
    static const int all_cols[] = {1, 31, 60, 64, 768};
    enum { TABLE = 9 };
    arena_open(2 * MIB);
    for (int i = 0; i < COUNT(all_cols) * COUNT(some_rows); i += every_eleventh()) {
        int cols = all_cols[i % COUNT(all_cols)], rows = some_rows[i / COUNT(all_cols)], ld = cols + i % 2 * 8;
        size_t n = (size_t)rows * cols;
        f16 *table = random_halves((size_t)TABLE * ld, 1), *old = random_halves(n, 1);
        int32_t *idx = (int32_t *)temp(rows, sizeof *idx);
        for (int r = 0; r < rows; r++) idx[r] = random_below(TABLE);
        float *ref = floats(old, n);
        run(embedding(ref, F32, table, F16, ld, idx, rows, cols, true));
        clear();
        const void *from = put(table, (size_t)TABLE * ld * 2), *indices = put(idx, (size_t)rows * 4);
        void *y = room(NULL, n * 2), *sum = room(old, n * 2);
        on_gpu(lanes[i % 2], embedding(y, F16, from, F16, ld, indices, rows, cols, false));
        int wrong = 0;
        for (int r = 0; r < rows; r++)
            wrong += memcmp((f16 *)result(y) + (size_t)r * cols, table + (size_t)idx[r] * ld, (size_t)cols * 2) != 0;
        CU_ASSERT_EQUAL(wrong, 0);
        on_gpu(lanes[i % 2], embedding(sum, F16, from, F16, ld, indices, rows, cols, true));
        CU_ASSERT_EQUAL(far_off(result(sum), F16, ref, n, TINY, HALF), 0);
    }
    arena_close();
}

static void layernorm_matches_the_host_in_place_too(void) {
    static const int all_cols[] = {28, 60, 64, 96, 768, 5120, 12288};
    arena_open(8 * MIB);
    for (int i = 0; i < COUNT(all_cols) * COUNT(some_rows); i += every_eleventh()) {
        int cols = all_cols[i % COUNT(all_cols)], rows = some_rows[i / COUNT(all_cols)];
        size_t n = (size_t)rows * cols;
        f16 *x = random_halves(n, 3), *w = random_halves(cols, 2), *b = random_halves(cols, 1);
        for (int r = 0; r < rows; r += 2) /* a mean far from 0: one-pass formulas lose the variance here */
            for (size_t c = (size_t)r * cols; c < (size_t)(r + 1) * cols; c++) x[c] = f32_to_f16(f16_to_f32(x[c]) + 1000);
        for (int r = 1; r < rows; r += 4) /* a variance below what is added to it */
            for (size_t c = (size_t)r * cols; c < (size_t)(r + 1) * cols; c++) x[c] = f32_to_f16(f16_to_f32(x[c]) / 1024);
        float *ref = floats(x, n);
        run(norm(F32, ref, ref, w, b, rows, cols));
        clear();
        const void *gw = put(w, (size_t)cols * 2), *gb = put(b, (size_t)cols * 2), *from = put(x, n * 2);
        void *y = room(NULL, n * 2), *same = room(x, n * 2);
        on_gpu(PROJECT, norm(F16, y, from, gw, gb, rows, cols));
        /* sums at 1000 are good to 6e-5, the deviation is 1.7, w up to 2 */
        CU_ASSERT_EQUAL(far_off(result(y), F16, ref, n, 2e-4, HALF), 0);
        memcpy(x, result(y), n * 2);
        on_gpu(FINISH, norm(F16, same, same, gw, gb, rows, cols));
        CU_ASSERT(memcmp(result(same), x, n * 2) == 0);
    }
    arena_close();
}

// ---- linear --------------------------------------------------------------------------------------------------------

/* y = x w^T and what else there is. y has rows of parts * n elements and is the last n of them; the others stay. */
typedef struct {
    Type y_type;
    bool bias, relu, residual;
    int parts;
} Epilogue;
static const Epilogue epilogues[] = {{F16, 0, 0, 0, 1}, {F16, 1, 0, 0, 1}, {F16, 1, 0, 0, 2}, {F16, 1, 1, 0, 1},
                                     {F16, 1, 0, 1, 1}, {F32, 0, 0, 0, 1}, {F16, 1, 1, 0, 3}};

/* The last row first. */
static f16 *turned(const f16 *x, int rows, int cols) {
    f16 *y = (f16 *)temp(rows, (size_t)cols * 2);
    for (int r = 0; r < rows; r++) memcpy(y + (size_t)r * cols, x + (size_t)(rows - 1 - r) * cols, (size_t)cols * 2);
    return y;
}

/* w (n, k). */
static void *packed_weights(const f16 *w, int n, int k) {
    uint8_t *packed = (uint8_t *)temp(quant_matrix_bytes(n, k), 1);
    for (int r = 0; r < n; r += GROUP) quant_pack_rows(packed + quant_matrix_bytes(r, k), w + (size_t)r * k, k);
    return packed;
}

static void linear_case(const Epilogue *e, bool packs, int m, int n, int k, Lane lane) {
    size_t size = type_bytes(e->y_type), row = e->parts * n * size, before = row - n * size;
    size_t w_bytes = packs ? quant_matrix_bytes(n, k) : (size_t)n * k * 2;
    f16 *x = random_halves((size_t)m * k, 1);
    f16 *plain = random_halves((size_t)n * k, 2 / sqrtf((float)k));
    const void *w = packs ? packed_weights(plain, n, k) : plain;
    f16 *b = random_halves(n, 1), *old = random_halves((size_t)m * n, 1);
    float *ref = floats(old, (size_t)m * n);
    run(product(F32, ref, F32, n, floats(x, (size_t)m * k), w, e->bias ? b : NULL, e->residual ? ref : NULL, packs, e->relu,
                m, n, k));
    uint8_t *first = (uint8_t *)temp(m, row);
    /* Terms' sizes add up to about 8, in float. Where there is a bias, a number below 4 may have been cut to a half before
     * it is added. */
    double atol = e->bias ? 4 * HALF : 2e-5, rtol = e->y_type == F32 ? 0 : HALF;
    for (int turn = 0; turn < 2; turn++) {
        clear();
        if (turn) put(NULL, (size_t)n * 2); /* what is known of this product of before does not know where the bias lies */
        const void *gw = put(w, w_bytes), *gb = e->bias ? put(b, (size_t)n * 2) : NULL;
        const void *from = put(turn ? turned(x, m, k) : x, (size_t)m * k * 2);
        uint8_t *all = (uint8_t *)room(!e->residual ? NULL : turn ? turned(old, m, n) : old, m * row), *y = all + before;
        on_gpu(lane, product(F16, y, e->y_type, row / size, from, gw, gb, e->residual ? y : NULL, packs, e->relu, m, n, k));
        int wrong = 0;
        for (int r = 0; r < m; r++) {
            const uint8_t *got = (uint8_t *)result(all) + r * row;
            int at = turn ? m - 1 - r : r;
            wrong += far_off(got + before, e->y_type, ref + (size_t)at * n, n, atol, rtol);
            wrong += turn && memcmp(got, first + at * row, row) != 0;
            for (size_t i = 0; i < before; i++) wrong += got[i] != NOBODYS;
        }
        CU_ASSERT_EQUAL(wrong, 0);
        memcpy(first, result(all), m * row);
    }
}

static void linear_matches_the_host_and_the_place_of_a_row_changes_no_bit(void) {
    static const int shapes[][2] = {{60, 100}, {131, 28}, {28, 131}, {64, 256}, {256, 60}};
    arena_open(MIB);
    for (int s = 0; s < COUNT(shapes); s++)
        for (int i = 0; i < COUNT(some_rows) * COUNT(epilogues); i += every_eleventh())
            linear_case(&epilogues[i % COUNT(epilogues)], false, some_rows[i / COUNT(epilogues)], shapes[s][0],
                        shapes[s][1], lanes[s % 2]); /* what differs in one thing alone meets on one lane */
    arena_close();
}

/* Shapes: one row of groups, an odd number of them and more than a block has; few columns and so many that several blocks
 * share them. */
static const int few_shapes[][2] = {{64, 64}, {128, 192}, {192, 128}, {320, 64}, {320, 576}, {64, 640}};

static void a_few_rows_times_packed_weights_match_the_host(void) {
    static const int rows[] = {1, 8, 9, 16, 17, 33, 64};
    arena_open(2 * MIB);
    for (int i = 0; i < COUNT(few_shapes) * COUNT(epilogues) * COUNT(rows); i += every_third()) {
        const Epilogue *e = &epilogues[i / COUNT(rows) % COUNT(epilogues)];
        const int *shape = few_shapes[i / COUNT(rows) / COUNT(epilogues)];
        if (e->y_type == F16) linear_case(e, true, rows[i % COUNT(rows)], shape[0], shape[1], lanes[i % 2]);
    }
    arena_close();
}

/* The last m of 64 rows, alone. The second half of the columns all but takes back what the first half adds, so that another
 * order of sums would show. */
static void how_many_rows_there_are_changes_no_bit_of_one(void) {
    enum { N = 128, K = 1088 };
    const size_t row = N * 2;
    arena_open(2 * MIB);
    f16 *x = random_halves((size_t)PACKED_ROWS * K, 100), *plain = random_halves((size_t)N * K, 2 / sqrtf(K));
    const f16 *b = random_halves(N, 1);
    for (int r = 0; r < PACKED_ROWS; r++)
        for (int c = 0; c < K / 2; c++) {
            f16 *of = x + (size_t)r * K;
            of[K - 1 - c] = f32_to_f16(test_random(&state) / 10 - f16_to_f32(of[c]));
        }
    for (int o = 0; o < N; o++)
        for (int c = 0; c < K / 2; c++) plain[o * K + K - 1 - c] = plain[o * K + c];
    const void *w = packed_weights(plain, N, K);
    uint8_t *all = (uint8_t *)temp(PACKED_ROWS, row);
    for (int m = PACKED_ROWS; m > 0; m -= every_third()) {
        clear();
        const void *gw = put(w, quant_matrix_bytes(N, K)), *gb = put(b, row);
        const void *from = put(x + (size_t)(PACKED_ROWS - m) * K, (size_t)m * K * 2);
        void *y = room(NULL, m * row);
        on_gpu(lanes[m % 2], product(F16, y, F16, N, from, gw, gb, NULL, true, false, m, N, K));
        if (m == PACKED_ROWS) memcpy(all, result(y), m * row);
        CU_ASSERT(memcmp(result(y), all + (PACKED_ROWS - m) * row, m * row) == 0);
    }
    arena_close();
}

/* So many outputs that more blocks would fill the GPU for longer, but their sums would not have room. Of zeros, since only
 * a sanitizer could see where they lie. */
static void partial_sums_stay_in_their_place(void) {
    enum { M = PACKED_ROWS, N = 14848, K = 2304 };
    if (every_eleventh() > 1) return;
    arena_open(quant_matrix_bytes(N, K) + 3 * MIB);
    const size_t y_bytes = (size_t)M * N * 2;
    void *zeros = temp(quant_matrix_bytes(N, K), 1), *y;
    const void *x = put(zeros, (size_t)M * K * 2), *w = put(zeros, quant_matrix_bytes(N, K));
    y = room(NULL, y_bytes);
    on_gpu(PROJECT, product(F16, y, F16, N, x, w, NULL, NULL, true, false, M, N, K));
    CU_ASSERT(memcmp(result(y), zeros, y_bytes) == 0);
    arena_close();
}

/* Few outputs and many columns, so that blocks share outputs and leave partial sums: those of PROJECT and of FINISH, which
 * run side by side, lie apart. Each of the two has another product to do, so that one's sums in the other's place show. */
static void products_of_both_lanes_at_once_are_those_of_each_alone(void) {
    enum { M = 8, N = 64, K = 512, TIMES = 3 };
    const size_t y_bytes = (size_t)M * N * 2;
    Op p[2];
    const f16 *alone[2];
    arena_open(MIB);
    for (int l = 0; l < 2; l++) {
        const void *x = put(random_halves((size_t)M * K, 1), (size_t)M * K * 2);
        const void *w = put(packed_weights(random_halves((size_t)N * K, 1), N, K), quant_matrix_bytes(N, K));
        p[l] = product(F16, room(NULL, y_bytes), F16, N, x, w, NULL, NULL, true, false, M, N, K);
    }
    for (int l = 0; l < 2; l++) {
        on_gpu(lanes[l], p[l]);
        alone[l] = (f16 *)memcpy(temp(y_bytes, 1), result(p[l].linear.y.at), y_bytes);
    }
    start(PROJECT);
    for (int i = 0; i < TIMES; i++)
        for (int l = 0; l < 2; l++) post_op(lanes[l], p[l]);
    POST(FINISH, end, arena.mark, true);
    POST(FINISH, sync, arena.mark);
    finish(PROJECT);
    for (int l = 0; l < 2; l++) CU_ASSERT(memcmp(result(p[l].linear.y.at), alone[l], y_bytes) == 0);
    arena_close();
}

// ---- attention -----------------------------------------------------------------------------------------------------

/* MOST: sequences. Heads: their size and number. */
enum { MOST = 9 };
static const int heads[][2] = {{64, 2}, {80, 1}, {96, 1}, {128, 1}, {20, 3}, {12, 2}, {7, 3}, {112, 1}, {99, 1}, {1, 2}};
static const int prompts[] = {1, 31, 33, 65, 130}, contexts[MOST] = {1, 31, 33, 65, 127, 128, 129, 300, 700};

/* Whole sequences one after another; o is what the GPU made of them, each row in its place. */
typedef struct {
    int nseq, h1, nh, rows, ld;
    const int *len;
    int first[MOST]; /* row */
    f16 *q, *kv, *o; /* (rows, h1) and (rows, 2 h1) side by side, ld apart; (rows, h1) */
} Batch;

static Batch batch_new(const int *len, int nseq, const int head[2], float q_scale, float k_scale) {
    Batch b = {.nseq = nseq, .h1 = head[0] * head[1], .nh = head[1], .len = len, .ld = 3 * head[0] * head[1]};
    const float scale[] = {q_scale, k_scale, 2};
    for (int r = 0; r < nseq; r++) b.first[r] = b.rows, b.rows += len[r];
    size_t n = (size_t)b.rows * b.h1;
    b.q = random_halves(3 * n, 1), b.kv = b.q + b.h1, b.o = (f16 *)temp(n, 2);
    for (size_t i = 0; i < 3 * n; i++) b.q[i] = f32_to_f16(f16_to_f32(b.q[i]) * scale[i / b.h1 % 3]);
    memset(b.o, 0xff, n * 2);
    return b;
}

/* Prefill of the sequences seq[0..n) in this order, cut to len / cut tokens each. With ref, the host does it too. */
static void prefill(Batch *b, const int *seq, int n, int cut, float *ref) {
    int32_t at[MOST + 1] = {0};
    size_t row = (size_t)b->h1 * 2; /* bytes */
    f16 *q = (f16 *)temp(b->rows, 3 * row);
    for (int i = 0; i < n; i++) {
        int rows = (b->len[seq[i]] + cut - 1) / cut, first = b->first[seq[i]];
        memcpy(q + (size_t)at[i] * b->ld, b->q + (size_t)first * b->ld, rows * 3 * row);
        at[i + 1] = at[i] + rows;
    }
    clear();
    const f16 *gq = (const f16 *)put(q, at[n] * 3 * row);
    const int32_t *gstart = (const int32_t *)put(at, ((size_t)n + 1) * 4);
    f16 *o = (f16 *)room(NULL, at[n] * row), *got = (f16 *)result(o);
    on_gpu(FINISH, prefilling(F16, o, gq, gq + b->h1, gstart, n, at[n], b->h1, b->nh, b->ld));
    if (ref) run(prefilling(F32, ref, q, q + b->h1, at, n, at[n], b->h1, b->nh, b->ld));
    for (int i = 0; i < n; i++)
        memcpy(b->o + (size_t)b->first[seq[i]] * b->h1, got + (size_t)at[i] * b->h1, (at[i + 1] - at[i]) * row);
}

static void prefill_matches_the_host_and_company_changes_no_bit(void) {
    static const int in_order[] = {0, 1, 2, 3, 4}, backwards[] = {4, 2, 3, 1, 0};
    arena_open(2 * MIB);
    for (int c = 0; c < COUNT(heads); c++) {
        Batch b = batch_new(prompts, COUNT(prompts), heads[c], 3, 2);
        size_t n = (size_t)b.rows * b.h1;
        float *ref = (float *)temp(n, 4);
        prefill(&b, in_order, 5, 1, ref);
        /* weights may be halves when they meet values of up to 2 */
        CU_ASSERT_EQUAL(far_off(b.o, F16, ref, n, 2 * HALF, HALF), 0);
        f16 *o = (f16 *)memcpy(temp(n, 2), b.o, n * 2);
        memset(b.o, 0xff, n * 2);
        prefill(&b, backwards, 5, 1, NULL);
        CU_ASSERT(memcmp(b.o, o, n * 2) == 0);
        for (int r = 0; r < b.nseq; r++) { /* alone, whole, and without its second half */
            prefill(&b, &in_order[r], 1, 1, NULL);
            prefill(&b, &in_order[r], 1, 2, NULL);
        }
        CU_ASSERT(memcmp(b.o, o, n * 2) == 0);
    }
    arena_close();
}

/* Lengths beside the edges of tiles of 16, 32 and 64 tokens. */
static void a_token_sees_itself_and_those_before_it_at_the_edges_of_tiles_too(void) {
    static const int lengths[][5] = {{1, 63, 15, 17, 16}, {65, 128, 64, 129, 127}}, in_order[] = {0, 1, 2, 3, 4};
    static const int some_heads[][2] = {{64, 1}, {80, 1}, {96, 1}, {112, 1}, {128, 1}, {7, 2}};
    arena_open(2 * MIB);
    for (int i = 0; i < COUNT(lengths) * COUNT(some_heads); i++) {
        Batch b = batch_new(lengths[i % COUNT(lengths)], 5, some_heads[i / COUNT(lengths)], 3, 2);
        size_t n = (size_t)b.rows * b.h1;
        float *ref = (float *)temp(n, 4);
        prefill(&b, in_order, 5, 1, ref);
        CU_ASSERT_EQUAL(far_off(b.o, F16, ref, n, 2 * HALF, HALF), 0);
    }
    arena_close();
}

/* Queries are about 1 and keys about first + t * step, so that token t's score is about sqrt(hd) times that. */
static void the_largest_score_may_come_late_or_early_or_be_far_below_zero(void) {
    static const float first[] = {0, 16, -40}, step[] = {1.f / 8, -1.f / 8, 0};
    static const int length[] = {130}, only[] = {0}, some_heads[][2] = {{64, 1}, {128, 1}, {7, 2}};
    arena_open(2 * MIB);
    for (int i = 0; i < COUNT(first) * COUNT(some_heads); i += imin(4, every_eleventh())) {
        Batch b = batch_new(length, 1, some_heads[i / COUNT(first)], 0.125f, 0.125f);
        size_t n = (size_t)b.rows * b.h1;
        float *ref = (float *)temp(n, 4);
        for (size_t e = 0; e < n; e++) {
            size_t t = e / b.h1;
            f16 *q = &b.q[e + 2 * t * b.h1], *k = q + b.h1;
            *q = f32_to_f16(1 + f16_to_f32(*q));
            *k = f32_to_f16(first[i % COUNT(first)] + (float)t * step[i % COUNT(first)] + f16_to_f32(*k));
        }
        prefill(&b, only, 1, 1, ref);
        CU_ASSERT_EQUAL(far_off(b.o, F16, ref, n, 2 * HALF, HALF), 0);
    }
    arena_close();
}

/* Sequences in shuffled pages, and the queries of their last tokens. */
typedef struct {
    int n, page_tokens, max_pages, h1, nh;
    size_t rows;                  /* of all pages */
    int32_t *pages, *len;         /* (n, max_pages), (n) */
    f16 *q, *k, *v;               /* (n, h1), (rows, h1) */
    uint8_t *packed_k, *packed_v; /* of paged_pack: k and v */
    float *means_k, *means_v;     /* (rows, h1), what each number of these counts as */
} Paged;

/* A page that no memory has room for. */
enum { FAR_AWAY = 1 << 27 };

/* Sequences first .. first+n-1, the table having room for max_pages at least; behind the last page of each, another one is
 * FAR_AWAY. Slots that no token has are NaN, in the last page of a sequence and in three more pages. */
static Paged paged_new(const Batch *b, int first, int n, int page_tokens, int max_pages) {
    int npages = 3, rows = 0, next = 0, from = b->first[first];
    for (int r = first; r < first + n; r++) {
        int pages = pages_for(b->len[r], page_tokens);
        npages += pages, rows += b->len[r], max_pages = pages >= max_pages ? pages + 1 : max_pages;
    }
    Paged p = {.n = n, .page_tokens = page_tokens, .max_pages = max_pages, .h1 = b->h1, .nh = b->nh};
    p.rows = (size_t)npages * page_tokens;
    size_t row = (size_t)b->h1 * 2, table = (size_t)n * max_pages * 4;
    p.k = (f16 *)memset(temp(p.rows, row), 0xff, p.rows * row), p.v = (f16 *)memset(temp(p.rows, row), 0xff, p.rows * row);
    p.q = (f16 *)temp(n, 3 * row), p.pages = (int32_t *)temp(table, 1), p.len = (int32_t *)temp(n, 4);
    int32_t *seq = (int32_t *)temp(rows, 4), *pos = (int32_t *)temp(rows, 4), *page = (int32_t *)temp(npages, 4);
    for (size_t i = 0; i < table / 4; i++) p.pages[i] = FAR_AWAY;
    for (int i = 0; i < npages; i++) { /* shuffled */
        int at = random_below(i + 1);
        page[i] = page[at], page[at] = i;
    }
    for (int r = 0; r < n; r++) {
        p.len[r] = b->len[first + r];
        for (int t = 0; t < p.len[r]; t++) {
            int i = b->first[first + r] + t - from;
            seq[i] = r, pos[i] = t;
            if (t % page_tokens == 0) p.pages[r * max_pages + t / page_tokens] = page[next++];
        }
        memcpy(p.q + (size_t)r * b->ld, b->q + (size_t)(b->first[first + r] + p.len[r] - 1) * b->ld, row);
    }
    run(appending(paged(p.k, p.v, p.pages, p.len, n, max_pages, page_tokens, b->h1, b->nh, false),
                  b->kv + (size_t)from * b->ld, 2 * b->h1, false, b->ld, seq, pos, rows));
    return p;
}

/* The row that token t of sequence r has in k and v. */
static size_t paged_row(const Paged *p, int r, int t) {
    return (size_t)p->pages[r * p->max_pages + t / p->page_tokens] * p->page_tokens + t % p->page_tokens;
}

static uint8_t *packed(float **means, const f16 *x, const Paged *p) {
    const int hd = p->h1 / p->nh;
    const size_t head = quant_bytes(hd);
    uint8_t *to = (uint8_t *)temp(p->rows * p->nh, head);
    *means = (float *)temp(p->rows, (size_t)p->h1 * sizeof **means);
    for (size_t i = 0; i < p->rows * p->nh; i++) {
        plain_pack(to + i * head, x + i * hd, 1, hd);
        plain_numbers(*means + i * hd, to + i * head, hd);
    }
    return to;
}

static void paged_pack(Paged *p) { p->packed_k = packed(&p->means_k, p->k, p), p->packed_v = packed(&p->means_v, p->v, p); }

static float k_number(const Paged *p, size_t at) { return p->means_k ? p->means_k[at] : f16_to_f32(p->k[at]); }
static float v_number(const Paged *p, size_t at) { return p->means_v ? p->means_v[at] : f16_to_f32(p->v[at]); }

/* The pages on the GPU, as halfs or as they are packed, and the queries, whose rows are 3 h1 apart. */
static PageTable put_pages(const Paged *p, bool packs, const f16 **q) {
    size_t halfs = p->rows * p->h1 * 2, codes = p->rows * p->nh * quant_bytes(p->h1 / p->nh);
    clear();
    *q = (const f16 *)put(p->q, (size_t)p->n * 3 * p->h1 * 2);
    const void *k = packs ? put(p->packed_k, codes) : put(p->k, halfs),
               *v = packs ? put(p->packed_v, codes) : put(p->v, halfs);
    const int32_t *pages = put(p->pages, (size_t)p->n * p->max_pages * 4), *len = put(p->len, (size_t)p->n * 4);
    return paged(k, v, pages, len, p->n, p->max_pages, p->page_tokens, p->h1, p->nh, packs);
}

/* o (n, h1). */
static f16 *attend(const Paged *p, bool packs) {
    const f16 *q;
    const PageTable table = put_pages(p, packs, &q);
    size_t bytes = (size_t)p->n * p->h1 * 2;
    void *o = room(NULL, bytes);
    on_gpu(FINISH, attention(o, F16, q, 3 * p->h1, p->h1, table));
    return (f16 *)memcpy(temp(bytes, 1), result(o), bytes);
}

/* Decode of the last token of sequences first .. first+n-1 from pages of that size. */
static f16 *decode(const Batch *b, int first, int n, int page_tokens, int max_pages, float *ref) {
    Paged p = paged_new(b, first, n, page_tokens, max_pages);
    if (ref)
        run(attention(ref, F32, p.q, b->ld, b->h1,
                      paged(p.k, p.v, p.pages, p.len, n, p.max_pages, page_tokens, b->h1, b->nh, false)));
    return attend(&p, false);
}

static void decode_matches_the_host_and_pages_and_company_change_no_bit(void) {
    static const int page_sizes[] = {1, 3, 200};
    arena_open(4 * MIB);
    for (int c = 0; c < COUNT(heads); c++) {
        Batch b = batch_new(contexts, MOST, heads[c], 3, 2);
        size_t n = (size_t)MOST * b.h1;
        float *ref = (float *)temp(n, 4);
        f16 *o = decode(&b, 0, MOST, 16, 1, ref);
        /* scores of 10 carry 5e-6 into weights of values up to 2 */
        CU_ASSERT_EQUAL(far_off(o, F16, ref, n, 5e-5, HALF), 0);
        for (int s = 0; s < COUNT(page_sizes); s++)
            CU_ASSERT(memcmp(decode(&b, 0, MOST, page_sizes[s], 1, NULL), o, n * 2) == 0);
        for (int r = 0; r < MOST; r += every_eleventh()) /* alone */
            CU_ASSERT(memcmp(decode(&b, r, 1, 16, 1, NULL), o + (size_t)r * b.h1, (size_t)b.h1 * 2) == 0);
    }
    arena_close();
}

/* Partial results have a place of fixed size. Where sequences may become so long that all of them together have none there,
 * the batch is done in pieces: here of eight and of one, whose results would lie across the end of the place. */
static void a_batch_in_pieces_gives_the_same_bits(void) {
    static const int head[] = {128, 4};
    arena_open(8 * MIB);
    Batch b = batch_new(contexts, MOST, head, 3, 2);
    f16 *o = decode(&b, 0, MOST, 16, 1, NULL);
    CU_ASSERT(memcmp(decode(&b, 0, MOST, 16, 16128, NULL), o, (size_t)MOST * b.h1 * 2) == 0);
    arena_close();
}

static void large_scores_neither_overflow_nor_blur(void) {
    static const int in_order[] = {0, 1, 2, 3, 4};
    static const float scales[] = {30, 60000}; /* scores of some hundreds; of 1e9, as large as halves can make them */
    arena_open(4 * MIB);
    for (int i = 0; i < 2; i++) {
        Batch b = batch_new(prompts, COUNT(prompts), heads[3 * i], scales[i], scales[i]);
        size_t n = (size_t)b.rows * b.h1;
        float *ref = (float *)temp(n, 4);
        prefill(&b, in_order, b.nseq, 1, ref);
        /* scores of 1e3 are good to 1e-4, to 5e-4 on tensor cores, where weights are halves besides */
        CU_ASSERT_EQUAL(far_off(b.o, F16, ref, n, 4 * HALF, HALF), 0);
        f16 *o = decode(&b, 0, b.nseq, 16, 1, ref);
        CU_ASSERT_EQUAL(far_off(o, F16, ref, (size_t)b.nseq * b.h1, 1e-3, HALF), 0);
    }
    arena_close();
}

/* The last two are never packed. */
static const int some_heads[][2] = {{64, 2}, {16, 5}, {80, 1}, {128, 1}, {112, 1}, {48, 2}, {20, 3}, {7, 3}};
enum { PACKED_HEADS = COUNT(some_heads) - 2 };

/* Scores of head h of sequence r's tokens, NaN as less than all; whether there is one. */
static bool plain_scores(double *score, const Paged *p, int r, int h) {
    int hd = p->h1 / p->nh;
    bool nan = false;
    for (int t = 0; t < p->len[r]; t++) {
        const f16 *q = p->q + (size_t)r * 3 * p->h1 + h * hd;
        const size_t k = paged_row(p, r, t) * p->h1 + h * hd;
        double dot = 0;
        for (int i = 0; i < hd; i++) dot += (double)f16_to_f32(q[i]) * k_number(p, k + i);
        score[t] = dot == dot ? dot / sqrt(hd) : -INFINITY;
        nan = nan || dot != dot;
    }
    return nan;
}

/* (n, h1) */
static float *plain_attend(const Paged *p) {
    const int hd = p->h1 / p->nh;
    float *o = (float *)temp((size_t)p->n * p->h1, sizeof *o);
    for (int r = 0; r < p->n; r++)
        for (int h = 0; h < p->nh; h++) {
            double *score = (double *)temp(p->len[r], sizeof *score), largest = -INFINITY, sum = 0;
            plain_scores(score, p, r, h);
            for (int t = 0; t < p->len[r]; t++) largest = fmax(largest, score[t]);
            for (int t = 0; t < p->len[r]; t++) sum += score[t] = exp(score[t] - largest);
            for (int i = 0; i < hd; i++) {
                double out = 0;
                for (int t = 0; t < p->len[r]; t++) out += score[t] * v_number(p, paged_row(p, r, t) * p->h1 + h * hd + i);
                o[(size_t)r * p->h1 + h * hd + i] = (float)(out / sum);
            }
        }
    return o;
}

static void attention_to_packed_pages_is_that_to_what_they_hold(void) {
    static const int page_sizes[] = {16, 3, 200};
    arena_open(4 * MIB);
    for (int i = 0; i < PACKED_HEADS * COUNT(page_sizes); i += every_third()) {
        Batch b = batch_new(contexts, MOST, some_heads[i % PACKED_HEADS], 3, 2);
        Paged p = paged_new(&b, 0, MOST, page_sizes[i / PACKED_HEADS], 1);
        paged_pack(&p); /* scores as exact as those of halfs, and weights of 22 bits */
        CU_ASSERT_EQUAL(far_off(attend(&p, true), F16, plain_attend(&p), (size_t)MOST * b.h1, 5e-5, HALF), 0);
    }
    arena_close();
}

static void append_fills_its_slots_and_nothing_else(void) {
    static const int h1s[] = {7, 20, 64}, page_sizes[] = {1, 3, 16};
    enum { NSEQ = 8, TOKENS = 40, ROWS = 65 };
    arena_open(MIB);
    for (int i = 0; i < COUNT(h1s) * COUNT(page_sizes); i++) {
        int h1 = h1s[i % 3], page_tokens = page_sizes[i / 3], max_pages = pages_for(TOKENS, page_tokens);
        int npages = NSEQ * max_pages;
        size_t n = (size_t)npages * page_tokens * h1;
        f16 *k = random_halves(n, 1), *v = random_halves(n, 1), *kv = random_halves((size_t)ROWS * 2 * h1, 1);
        int32_t *pages = (int32_t *)temp(npages, 4), seq[ROWS], pos[ROWS];
        /* pages shuffled: 37 is prime to their number; every other sequence, in it every other token */
        for (int p = 0; p < npages; p++) pages[p] = (p * 37 + 5) % npages;
        for (int r = 0; r < ROWS; r++) seq[r] = r % 4 * 2 + 1, pos[r] = r / 4 * 2 + 1;
        clear();
        void *gk = room(k, n * 2), *gv = room(v, n * 2);
        const void *from = put(kv, (size_t)ROWS * h1 * 4);
        const int32_t *gseq = put(seq, sizeof seq), *gpos = put(pos, sizeof pos), *gpages = put(pages, (size_t)npages * 4);
        const PageTable table = paged(k, v, pages, NULL, NSEQ, max_pages, page_tokens, h1, 1, false);
        on_gpu(FINISH, appending(paged(gk, gv, gpages, NULL, NSEQ, max_pages, page_tokens, h1, 1, false), from, 2 * h1,
                                 false, 2 * h1, gseq, gpos, ROWS));
        run(appending(table, kv, 2 * h1, false, 2 * h1, seq, pos, ROWS));
        CU_ASSERT(memcmp(result(gk), k, n * 2) == 0);
        CU_ASSERT(memcmp(result(gv), v, n * 2) == 0);
    }
    arena_close();
}

/* Numbers in rows of n that try a packer: usual ones, equal ones, both zeros, the ends of the range, tiny ones, and ones
 * that are no finite numbers. */
static f16 *trying_halves(int rows, int n) {
    static const f16 special[][4] = {{0x7bff, 0xfbff, 0x3c00, 0x0000}, {0x8000, 0x0000, 0x0000, 0x8000},
                                     {0x0000, 0x8000, 0x3c00, 0x8000}, {0x0001, 0x0003, 0x0002, 0x8001},
                                     {0x7bff, 0x7bfe, 0x7bf0, 0x7bff}, {0x3c00, 0x7e00, 0x4000, 0xbc00},
                                     {0x7c00, 0x3c00, 0xc000, 0x0000}, {0xb800, 0xb800, 0xb800, 0xb800},
                                     {0x7bff, 0x0000, 0x3c00, 0x7bff}}; /* of the last, the largest would be 65520 */
    f16 *x = random_halves((size_t)rows * n, 2);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n && r % 12 < COUNT(special); i++)
            if (r % 12 < 5 || r % 12 >= 7 || i == n / 2) x[(size_t)r * n + i] = special[r % 12][(i + r / 12) % 4];
    return x;
}

static void pack_gives_the_plain_bytes(void) {
    enum { ROWS = 24 };
    arena_open(MIB);
    for (int i = 0; i < PACKED_HEADS; i++) {
        int hd = some_heads[i][0], nh = some_heads[i][1];
        size_t head = quant_bytes(hd), bytes = ROWS * 2 * nh * head;
        f16 *kv = trying_halves(ROWS * 2 * nh, hd);
        uint8_t *ref = (uint8_t *)temp(bytes, 1);
        for (int r = 0; r < ROWS * 2 * nh; r++) plain_pack(ref + r * head, kv + (size_t)r * hd, 1, hd);
        clear();
        const f16 *from = (const f16 *)put(kv, (size_t)ROWS * 2 * nh * hd * 2);
        void *to = room(NULL, bytes);
        on_gpu(PROJECT, packing(to, from, 2 * nh * hd, ROWS, nh, hd));
        CU_ASSERT(memcmp(result(to), ref, bytes) == 0);
        /* every other row into pages of 3 tokens, backwards */
        int32_t none[ROWS] = {0}, pos[ROWS], pages[ROWS / 3];
        for (int r = 0; r < ROWS / 2; r++) pos[r] = ROWS - 1 - r;
        for (int p = 0; p < ROWS / 3; p++) pages[p] = (p + 3) % (ROWS / 3);
        uint8_t *k = (uint8_t *)temp(bytes / 2, 1), *v = (uint8_t *)temp(bytes / 2, 1);
        memset(k, 0x7f, bytes / 2), memset(v, 0x7f, bytes / 2);
        void *gk = room(k, bytes / 2), *gv = room(v, bytes / 2);
        const int32_t *seq = put(none, sizeof none), *gpos = put(pos, sizeof pos), *gpages = put(pages, sizeof pages);
        const PageTable table = paged(gk, gv, gpages, NULL, 1, ROWS / 3, 3, nh * hd, nh, true);
        on_gpu(PROJECT, appending(table, from, 2 * nh * hd, false, 4 * nh * hd, seq, gpos, ROWS / 2));
        for (int r = 0; r < ROWS / 2; r++) {
            size_t at = ((size_t)pages[pos[r] / 3] * 3 + pos[r] % 3) * nh * head;
            memcpy(k + at, ref + 4 * r * nh * head, nh * head);
            memcpy(v + at, ref + (4 * r + 1) * nh * head, nh * head);
        }
        CU_ASSERT(memcmp(result(gk), k, bytes / 2) == 0);
        CU_ASSERT(memcmp(result(gv), v, bytes / 2) == 0);
    }
    arena_close();
}

/* Bytes of any kind, but that no group's min or scale is an infinity or NaN. */
static uint8_t *random_groups(size_t n) {
    uint8_t *x = (uint8_t *)temp(n, GROUP_BYTES);
    for (size_t i = 0; i < n * GROUP_BYTES; i++) {
        x[i] = (uint8_t)random_below(256);
        if (i % GROUP_BYTES == 1 || i % GROUP_BYTES == 3) x[i] &= 0xbf;
    }
    return x;
}

static void an_unpacked_matrix_is_what_quant_unpack_rows_gives(void) {
    static const int shapes[][2] = {{64, 64}, {64, 128}, {192, 64}, {128, 320}, {64, 2048}};
    arena_open(MIB);
    for (int i = 0; i < COUNT(shapes); i++) {
        const int n = shapes[i][0], k = shapes[i][1];
        const size_t row = quant_matrix_bytes(GROUP, k);
        uint8_t *packed = random_groups((size_t)n / GROUP * k);
        f16 *w = (f16 *)temp((size_t)n * k, 2), *usual = random_halves((size_t)n * k, 1);
        for (int g = 0; g < n / GROUP; g++) {
            const size_t first = (size_t)g * GROUP * k;
            if (g % 2) quant_pack_rows(packed + g * row, usual + first, k);
            quant_unpack_rows(w + first, packed + g * row, k);
        }
        clear();
        const void *from = put(packed, n / GROUP * row);
        void *to = room(NULL, (size_t)n * k * 2);
        on_gpu(lanes[i % 2], unpacking(to, from, n, k));
        CU_ASSERT(memcmp(result(to), w, (size_t)n * k * 2) == 0);
    }
    arena_close();
}

/* A row of x that is 1 in one column and 0 elsewhere gets that column of w. It is what quant_unpack_rows gives, or, where
 * 2^13 lies between the min and scale * code, whose sum has then more bits than a float and is rounded twice there, may be
 * its neighbour. */
static void each_packed_number_is_multiplied_as_what_it_unpacks_to(void) {
    int others = 0, all = 0;
    arena_open(2 * MIB);
    for (int i = 0; i < COUNT(few_shapes); i++) {
        const int n = few_shapes[i][0], k = few_shapes[i][1], groups = n / GROUP;
        uint8_t *packed = random_groups((size_t)groups * k);
        f16 *w = (f16 *)temp((size_t)n * k, 2);
        for (int g = 0; g < groups; g++)
            quant_unpack_rows(w + (size_t)g * GROUP * k, packed + (size_t)g * k * GROUP_BYTES, k);
        for (int first = 0; first < k; first += PACKED_ROWS * every_eleventh()) {
            const int m = imin(k - first, PACKED_ROWS);
            f16 *x = (f16 *)temp((size_t)m * k, 2);
            for (int r = 0; r < m; r++) x[(size_t)r * k + first + r] = f32_to_f16(1);
            clear();
            const void *gw = put(packed, quant_matrix_bytes(n, k)), *from = put(x, (size_t)m * k * 2);
            void *y = room(NULL, (size_t)m * n * 2);
            on_gpu(PROJECT, product(F16, y, F16, n, from, gw, NULL, NULL, true, false, m, n, k));
            int wrong = 0;
            for (int e = 0; e < m * n; e++) {
                const int o = e % n, c = first + e / n;
                const f16 *header = (const f16 *)(packed + ((size_t)(o / GROUP) * k + c) * GROUP_BYTES);
                const f16 got = ((const f16 *)result(y))[e], is = w[(size_t)o * k + c];
                if (f16_to_f32(got) == f16_to_f32(is)) continue; /* 0 may be -0 */
                others++;
                const float min = fabsf(f16_to_f32(header[0])), scale = fabsf(f16_to_f32(header[1]));
                wrong += abs(got - is) != 1 || !(min >= 4096 * scale || scale >= 512 * min);
            }
            all += m * n;
            CU_ASSERT_EQUAL(wrong, 0);
        }
    }
    CU_ASSERT(others < all / 1000);
    arena_close();
}

// ---- sparse attention ----------------------------------------------------------------------------------------------

/* The chosen tokens and their weights, (n, nh, most). */
typedef struct {
    int most;
    double sparsity;
    size_t bytes; /* of each */
    int32_t *tokens;
    float *weights;
} Chosen;

static Chosen choose(const Paged *p, bool packs, double sparsity) {
    Chosen c = {.most = 3, .sparsity = sparsity};
    for (int r = 0; r < p->n; r++) c.most = imax(c.most, sparse_tokens(sparsity, p->len[r]));
    c.bytes = (size_t)p->n * p->nh * c.most * 4;
    const f16 *q;
    const PageTable table = put_pages(p, packs, &q);
    void *tokens = room(NULL, c.bytes), *weights = room(NULL, c.bytes);
    on_gpu(FINISH, selection(tokens, weights, c.most, q, 3 * p->h1, p->h1, table, sparsity));
    c.tokens = (int32_t *)memcpy(temp(c.bytes, 1), result(tokens), c.bytes);
    c.weights = (float *)memcpy(temp(c.bytes, 1), result(weights), c.bytes);
    return c;
}

static f16 *weigh(const Paged *p, bool packs, const Chosen *c) {
    const f16 *q;
    const PageTable table = put_pages(p, packs, &q);
    const void *tokens = put(c->tokens, c->bytes), *weights = put(c->weights, c->bytes);
    size_t bytes = (size_t)p->n * p->h1 * 2;
    void *o = room(NULL, bytes);
    on_gpu(FINISH, weighing(o, F16, tokens, weights, c->most, p->h1, table, c->sparsity));
    return (f16 *)memcpy(temp(bytes, 1), result(o), bytes);
}

/* How many of the entries of a row of Chosen are not those of the definition, behind which nothing was written. */
static int wrongly_chosen(const Paged *p, const Chosen *c, int r, int h) {
    const size_t row = ((size_t)r * p->nh + h) * c->most;
    const int past = p->len[r] - 1, k = sparse_tokens(c->sparsity, p->len[r]) - 1;
    double *score = (double *)temp(past + 1, sizeof *score), sum = 0;
    int wrong = 0, at = 0;
    bool nan = plain_scores(score, p, r, h); /* it poisons all weights, as in dense attention */
    for (int t = 0; t <= past; t++) sum += exp(score[t] - score[past]);
    for (int t = 0; t <= past; t++) {
        int before = 0;
        for (int u = 0; u < past; u++) before += score[u] > score[t] || (score[u] == score[t] && u < t);
        if (t < past && before >= k) continue;
        double weight = exp(score[t] - score[past]) / sum;
        wrong += c->tokens[row + at] != t;
        float found = c->weights[row + at]; /* scores of up to 30 carry 2e-6 into it */
        wrong += nan ? !isnan(found) : !(fabs(found - weight) <= 1e-5 * weight);
        at++;
    }
    for (; at < c->most; at++) wrong += c->tokens[row + at] != (int32_t)(NOBODYS * 0x01010101u);
    return wrong;
}

/* Small whole numbers, whose products are summed exactly in any order, so that equal scores are common and stay equal. */
static void make_whole(f16 *x, size_t n, float most) {
    for (size_t i = 0; i < n; i++) x[i] = f32_to_f16(roundf(most * test_random(&state)));
}

static const double sparsities[] = {0.1, 1e-4, 0.5, 1}; /* the second: one token of the past; the last: all */

static void the_largest_scores_are_chosen_and_of_equals_the_earlier(void) {
    static const int page_sizes[] = {16, 1, 200};
    arena_open(4 * MIB);
    for (int i = 0; i < COUNT(some_heads) * COUNT(sparsities); i += every_eleventh()) {
        Batch b = batch_new(contexts, MOST, some_heads[i % COUNT(some_heads)], 1, 1);
        make_whole(b.q, (size_t)b.rows * b.ld, 1.4f);
        Paged p = paged_new(&b, 0, MOST, page_sizes[i % COUNT(page_sizes)], 1);
        double sparsity = sparsities[i / COUNT(some_heads)];
        for (int r = 0; r < MOST && sparsity < 1; r++) /* what is no number is chosen last */
            for (int t = 5; t < p.len[r] - 1; t += 11) p.k[paged_row(&p, r, t) * p.h1 + t % p.h1] = 0x7e00;
        Chosen c = choose(&p, false, sparsity);
        int wrong = 0;
        for (int r = 0; r < MOST; r++)
            for (int h = 0; h < p.nh; h++) wrong += wrongly_chosen(&p, &c, r, h);
        CU_ASSERT_EQUAL(wrong, 0);
    }
    arena_close();
}

static void all_scores_equal_choose_the_first_tokens(void) {
    static const int head[] = {16, 2};
    arena_open(4 * MIB);
    Batch b = batch_new(contexts, MOST, head, 1, 1);
    for (int r = 0; r < b.rows; r++) memset(b.q + (size_t)r * b.ld, 0, (size_t)b.h1 * 2);
    Paged p = paged_new(&b, 0, MOST, 16, 1);
    for (int i = 0; i < COUNT(sparsities); i++) {
        Chosen c = choose(&p, false, sparsities[i]);
        int wrong = 0;
        for (int r = 0; r < MOST; r++)
            for (int h = 0; h < p.nh; h++) wrong += wrongly_chosen(&p, &c, r, h);
        CU_ASSERT_EQUAL(wrong, 0);
    }
    arena_close();
}

/* ref (n, h1) = the weighted sums of V; afterwards what no head of it has chosen is NaN. */
static void plain_weigh(float *ref, Paged *p, const Chosen *c) {
    int hd = p->h1 / p->nh;
    f16 *v = (f16 *)memset(temp(p->rows * p->h1, 2), 0xff, p->rows * p->h1 * 2);
    for (int r = 0; r < p->n; r++)
        for (int e = 0; e < p->h1; e++) {
            size_t row = ((size_t)r * p->nh + e / hd) * c->most;
            double sum = 0;
            for (int i = 0; i < sparse_tokens(c->sparsity, p->len[r]); i++) {
                size_t at = paged_row(p, r, c->tokens[row + i]) * p->h1 + e;
                v[at] = p->v[at], sum += (double)c->weights[row + i] * v_number(p, at);
            }
            ref[(size_t)r * p->h1 + e] = (float)sum;
        }
    p->v = v;
}

static void weighing_takes_the_values_of_the_chosen_tokens_alone(void) {
    static const int page_sizes[] = {3, 16, 200};
    arena_open(4 * MIB);
    for (int i = 0; i < COUNT(some_heads) * COUNT(sparsities); i += every_eleventh()) {
        Batch b = batch_new(contexts, MOST, some_heads[i % COUNT(some_heads)], 3, 2);
        Paged p = paged_new(&b, 0, MOST, page_sizes[i % COUNT(page_sizes)], 1);
        size_t n = (size_t)MOST * b.h1;
        Chosen c = choose(&p, false, sparsities[i / COUNT(some_heads)]);
        float *ref = (float *)temp(n, 4);
        f16 *o = c.sparsity < 1 ? NULL : attend(&p, false);
        if (o) CU_ASSERT_EQUAL(far_off(o, F16, floats(weigh(&p, false, &c), n), n, 2e-5, 2 * HALF), 0);
        plain_weigh(ref, &p, &c);
        /* sums of 700 products of up to 2 in float */
        CU_ASSERT_EQUAL(far_off(weigh(&p, false, &c), F16, ref, n, 5e-6, HALF), 0);
    }
    arena_close();
}

static void sparse_attention_to_packed_pages_is_that_to_what_they_hold(void) {
    arena_open(4 * MIB);
    for (int i = 0; i < PACKED_HEADS; i++) {
        Batch b = batch_new(contexts, MOST, some_heads[i], 3, 2);
        Paged p = paged_new(&b, 0, MOST, 16, 1);
        paged_pack(&p);
        const size_t n = (size_t)MOST * b.h1;
        Chosen c = choose(&p, true, 0.2);
        float *ref = (float *)temp(n, 4);
        int wrong = 0;
        for (int r = 0; r < MOST; r++)
            for (int h = 0; h < p.nh; h++) wrong += wrongly_chosen(&p, &c, r, h);
        CU_ASSERT_EQUAL(wrong, 0);
        plain_weigh(ref, &p, &c);
        CU_ASSERT_EQUAL(far_off(weigh(&p, true, &c), F16, ref, n, 5e-6, HALF), 0); /* as of halfs */
    }
    arena_close();
}

/* Scores have that place too: those of the last sequence's fourth head would lie across the end of it. */
static void company_and_pieces_change_no_choice(void) {
    static const int head[] = {128, 5};
    arena_open(8 * MIB);
    Batch b = batch_new(contexts, MOST, head, 3, 2);
    Paged all = paged_new(&b, 0, MOST, 16, 1), pieces = paged_new(&b, 0, MOST, 3, 65024);
    Chosen c = choose(&all, false, 0.3), in_pieces = choose(&pieces, false, 0.3);
    f16 *o = weigh(&all, false, &c);
    CU_ASSERT(memcmp(c.tokens, in_pieces.tokens, c.bytes) == 0 && memcmp(c.weights, in_pieces.weights, c.bytes) == 0);
    CU_ASSERT(memcmp(weigh(&pieces, false, &c), o, (size_t)MOST * b.h1 * 2) == 0);
    for (int r = 0; r < MOST; r += every_eleventh()) {
        Paged p = paged_new(&b, r, 1, 16, 1);
        Chosen alone = choose(&p, false, 0.3);
        for (int h = 0; h < b.nh; h++) {
            size_t at = ((size_t)r * b.nh + h) * c.most, bytes = sparse_tokens(0.3, b.len[r]) * sizeof(float);
            CU_ASSERT(memcmp(alone.tokens + h * alone.most, c.tokens + at, bytes) == 0);
            CU_ASSERT(memcmp(alone.weights + h * alone.most, c.weights + at, bytes) == 0);
        }
        CU_ASSERT(memcmp(weigh(&p, false, &alone), o + (size_t)r * b.h1, (size_t)b.h1 * 2) == 0);
    }
    arena_close();
}

// ---- pick ----------------------------------------------------------------------------------------------------------

/* What the GPU picks. The host's choice goes to ref. */
static int32_t *pick(int32_t *ref, const float *logits, int rows, int vocab) {
    const Sampling greedy = {0, 1, 0, 7};
    clear();
    const void *from = put(logits, (size_t)rows * vocab * 4);
    void *ids = room(NULL, (size_t)rows * 4);
    on_gpu(FINISH, picking(ids, from, NULL, NULL, &greedy, rows, vocab));
    run(picking(ref, logits, NULL, NULL, &greedy, rows, vocab));
    return (int32_t *)result(ids);
}

/* Logits in steps of 1/64, so that equal ones are common and unequal ones have clearly different probabilities. */
static float *stepped_logits(size_t n, float scale) {
    float *x = (float *)temp(n, sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = floorf(64 * scale * test_random(&state)) / 64;
    return x;
}

static void greedy_takes_the_largest_and_the_lowest_id_among_equals(void) {
    static const int sizes[][2] = {{3, 1}, {33, 131}, {2, 50272}};
    int32_t ref[33];
    arena_open(MIB);
    for (int i = 0; i < COUNT(sizes); i++) {
        int rows = sizes[i][0], vocab = sizes[i][1];
        float *logits = stepped_logits((size_t)rows * vocab, 0.5f); /* many are equally large */
        for (int tops = 0; tops < 3; tops++) {                      /* then one is, near the end, then another before it */
            for (int r = 0; r < rows && tops; r++) logits[(r + 1) * vocab - 1 - r * 53 % vocab / tops] = 9;
            CU_ASSERT(memcmp(pick(ref, logits, rows, vocab), ref, (size_t)rows * 4) == 0);
        }
    }
    CU_ASSERT_EQUAL(*gpu->bad, 0);
    arena_close();
}

static void logits_that_are_no_numbers_never_win_and_are_reported(void) {
    enum { ROWS = 5, VOCAB = 300 };
    float logits[ROWS * VOCAB];
    int32_t ref[ROWS];
    arena_open(MIB);
    for (int i = 0; i < ROWS * VOCAB; i++) logits[i] = i % 3 ? NAN : i < 2 * VOCAB ? test_random(&state) - 5 : -INFINITY;
    for (int i = 0; i < VOCAB; i++) logits[VOCAB + i] = i % 7 ? -INFINITY : logits[VOCAB + i];
    logits[2 * VOCAB] = NAN, logits[3 * VOCAB + 200] = INFINITY;
    for (int i = 0; i < VOCAB; i++) logits[4 * VOCAB + i] = NAN;
    CU_ASSERT(memcmp(pick(ref, logits, ROWS, VOCAB), ref, sizeof ref) == 0);
    arena_close();
    for (int row = -1; row < ROWS; row++) { /* whether it is chosen or not, and where nothing was reported before */
        arena_open(MIB);
        CU_ASSERT_EQUAL(*gpu->bad, 0);
        pick(ref, row < 0 ? stepped_logits(VOCAB, 1) : logits + row * VOCAB, 1, VOCAB);
        CU_ASSERT((*gpu->bad != 0) == (row >= 0));
        arena_close();
    }
}

static void scores_are_log_probabilities_of_the_targets(void) {
    static const int sizes[][2] = {{3, 1}, {33, 131}, {2, 50272}};
    int32_t ref[33], target[33];
    arena_open(MIB);
    for (int i = 0; i < COUNT(sizes); i++) {
        int rows = sizes[i][0], vocab = sizes[i][1], wrong = 0;
        float *logits = stepped_logits((size_t)rows * vocab, 8);
        for (int r = 0; r < rows; r++) target[r] = r ? random_below(vocab) : vocab - 1;
        pick(ref, logits, rows, vocab);
        clear();
        const void *from = put(logits, (size_t)rows * vocab * 4), *gtarget = put(target, (size_t)rows * 4);
        void *logp = room(NULL, (size_t)rows * 4), *best = room(NULL, (size_t)rows * 4);
        on_gpu(PROJECT, scoring(logp, best, from, gtarget, rows, vocab));
        for (int r = 0; r < rows; r++) {
            const float *row = logits + (size_t)r * vocab;
            double sum = 0;
            for (int t = 0; t < vocab; t++) sum += exp(row[t] - row[target[r]]);
            wrong += !(fabs(((float *)result(logp))[r] + log(sum)) <= 4e-6); /* of up to 30, in float */
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT(memcmp(result(best), ref, (size_t)rows * 4) == 0);
    }
    arena_close();
}

static void a_score_beside_what_is_no_number_is_none_and_it_is_reported(void) {
    enum { VOCAB = 300 };
    float logits[3 * VOCAB]; /* an infinity that weighs nothing, a NaN, an infinity too large */
    int32_t target[] = {7, 7, 7};
    arena_open(MIB);
    for (int i = 0; i < 3 * VOCAB; i++) logits[i] = test_random(&state);
    logits[40] = -INFINITY, logits[VOCAB + 40] = NAN, logits[2 * VOCAB + 40] = INFINITY;
    const void *from = put(logits, sizeof logits), *gtarget = put(target, sizeof target);
    void *logp = room(NULL, sizeof target), *best = room(NULL, sizeof target);
    CU_ASSERT_EQUAL(*gpu->bad, 0);
    on_gpu(PROJECT, scoring(logp, best, from, gtarget, 3, VOCAB));
    CU_ASSERT(*gpu->bad != 0);
    const float *got = (const float *)result(logp);
    CU_ASSERT(isfinite(got[0]) && !isfinite(got[1]) && !isfinite(got[2]));
    CU_ASSERT(((int32_t *)result(best))[1] != 40 && ((int32_t *)result(best))[2] == 40);
    arena_close();
}

// ---- copies, marks, memory -----------------------------------------------------------------------------------------

/* way 0: up, 1: within the GPU, 2: down. */
static void copy_case(Lane lane, int way, uint8_t *host, size_t dst_pitch, size_t src_pitch, size_t row_bytes, int rows) {
    size_t dst_bytes = dst_pitch * rows, src_bytes = src_pitch * rows;
    uint8_t *src = host, *dst = host + 32768, *want = (uint8_t *)temp(dst_bytes + 1, 1);
    for (size_t i = 0; i < src_bytes; i++) src[i] = (uint8_t)random_below(256);
    memset(dst, NOBODYS, dst_bytes + 1), memset(want, NOBODYS, dst_bytes + 1);
    for (int r = 0; r < rows; r++) memcpy(want + r * dst_pitch, src + r * src_pitch, row_bytes);
    clear();
    void *from = way ? put(src, src_bytes) : src, *to = way < 2 ? room(NULL, dst_bytes) : dst;
    copy_on(lane, to, dst_pitch, from, src_pitch, row_bytes, rows);
    CU_ASSERT(memcmp(way < 2 ? result(to) : dst, want, dst_bytes) == 0);
    CU_ASSERT_EQUAL(dst[dst_bytes], NOBODYS);
}

static void copies_go_up_down_and_across_whole_and_by_rows(void) {
    static const Lane copiers[] = {W_LOAD, FINISH, STORE};
    arena_open(MIB);
    const size_t usual = gpu->pin_part;
    uint8_t *host = (uint8_t *)aligned_alloc(4096, 65536);
    CU_ASSERT_FATAL(host != NULL);
    for (int pinned = getenv("CUDA_CPU_STRICT") != NULL; pinned < 3; pinned++) { /* strict: no others */
        if (pinned == 2) gpu->pin_part = 4096; /* borders within copies, and within their rows */
        if (pinned) ASSERT_OK(gpu->call->pin(gpu, host, 65536, &err));
        for (int way = 0; way < 3; way++) {
            copy_case(copiers[way], way, host, 30000, 30000, 30000, 1);
            copy_case(copiers[way], way, host, 100, 100, 100, 65); /* dense */
            copy_case(copiers[way], way, host, 128, 90, 62, 33);
            copy_case(copiers[way], way, host, 62, 256, 62, 33);
            copy_case(copiers[way], way, host, 2, 14, 2, 31);
            copy_case(copiers[way], way, host, 62, 127, 62, 33); /* a border within the last row alone, of src, of dst */
            copy_case(copiers[way], way, host, 127, 62, 62, 33);
        }
        if (pinned) gpu->call->unpin(gpu, host);
    }
    gpu->pin_part = usual;
    free(host);
    arena_close();
}

/* Of the emulation (tests/cuda_cpu.h): the bytes of the largest copy on a stream. */
extern long cuda_cpu_largest __attribute__((weak));

/* They go in pieces of 16 MiB, the last one smaller: up, and down again. */
static void large_copies_bring_every_byte_to_its_place(void) {
    const size_t bytes = (size_t)(every_third() > 1 ? 16 : 32) * MIB + 64, words = bytes / sizeof(uint32_t);
    uint32_t *from = (uint32_t *)aligned_alloc(64, 2 * bytes), *back = from + words;
    gpu_open();
    void *there = gpu->call->alloc(gpu, bytes, &err);
    CU_ASSERT_FATAL(from && there);
    ASSERT_OK(gpu->call->pin(gpu, from, 2 * bytes, &err));
    for (size_t i = 0; i < words; i++) from[i] = (uint32_t)i, back[i] = 0;
    POST(W_LOAD, copy, (StridedCopy){there, bytes, from, bytes, bytes, 1});
    POST(W_LOAD, end, 7, true);
    POST(STORE, after, W_LOAD, 7);
    POST(STORE, copy, (StridedCopy){back, bytes, there, bytes, bytes, 1});
    POST(STORE, end, 7, true);
    POST(STORE, sync, 7);
    CU_ASSERT(memcmp(back, from, bytes) == 0);
    CU_ASSERT(!&cuda_cpu_largest || cuda_cpu_largest <= 16 * MIB);
    gpu->call->unpin(gpu, from), gpu->call->release(gpu, there);
    free(from);
}

/* From memory that is not pinned: such a copy may arrive when CUDA's call has long returned, and no stream waits for it. */
static void what_is_uploaded_is_there_for_every_stream(void) {
    enum { BYTES = 1 << 17 };
    arena_open(MIB);
    const f16 *numbers = random_halves(BYTES / 2, 1);
    const void *from = put(numbers, BYTES);
    void *to = room(NULL, BYTES);
    for (int lane = 0; lane < COUNT(lanes); lane++) {
        copy_on(lanes[lane], to, BYTES, from, BYTES, BYTES, 1);
        CU_ASSERT(memcmp(result(to), numbers, BYTES) == 0);
    }
    arena_close();
}

/* Of the emulation (tests/cuda_cpu.h): while it is not 0, no copy on a stream begins. */
extern int cuda_cpu_hold __attribute__((weak));

/* Where shared memory is too small for all rows of x, blocks that read the same weights share these rows. */
static void a_gpu_with_less_shared_memory_gives_the_same_bits(void) {
    enum { M = PACKED_ROWS, N = 128, K = 1088, Y = M * N * 2 };
    uint8_t y[2][Y];
    if (!&cuda_cpu_hold) return; /* there is one real GPU */
    const char *arch = getenv("CUDA_CPU_ARCH");
    const uint64_t seed = state;
    for (int small = 0; small < 2; small++) {
        if (gpu) gpu_close();
        setenv("CUDA_CPU_ARCH", small ? "75" : "80", 1);
        state = seed;
        arena_open(MIB);
        const void *x = put(random_halves((size_t)M * K, 1), (size_t)M * K * 2);
        const void *w = put(packed_weights(random_halves((size_t)N * K, 1), N, K), quant_matrix_bytes(N, K));
        void *to = room(NULL, Y);
        on_gpu(PROJECT, product(F16, to, F16, N, x, w, NULL, NULL, true, false, M, N, K));
        memcpy(y[small], result(to), Y);
        arena_close();
        gpu_close();
    }
    CU_ASSERT(memcmp(y[0], y[1], Y) == 0);
    arch ? setenv("CUDA_CPU_ARCH", arch, 1) : unsetenv("CUDA_CPU_ARCH");
}

/* What cuBLAS makes of a NaN is its own affair; where it has no algorithm with a bias, the kernel that adds one keeps it.
 */
static void a_bias_and_relu_keep_what_is_not_a_number(void) {
    enum { M = 3, N = 70, K = 64 }; /* rows of 140 bytes */
    if (!&cuda_cpu_hold) return;
    arena_open(MIB);
    f16 *numbers = random_halves(M * K, 1);
    numbers[K] = 0x7e00;
    const void *x = put(numbers, M * K * 2), *w = put(random_halves(N * K, 1), N * K * 2),
               *b = put(random_halves(N, 1), N * 2);
    void *y = room(NULL, M * N * 2);
    on_gpu(PROJECT, product(F16, y, F16, N, x, w, b, NULL, false, true, M, N, K));
    int wrong = 0;
    for (int i = 0; i < M * N; i++) wrong += isnan(f16_to_f32(((f16 *)result(y))[i])) != (i / N == 1);
    CU_ASSERT_EQUAL(wrong, 0);
    arena_close();
}

/* A copy that waited for its stream would come back with its bytes moved, once the emulation tires of holding it. */
static void a_copy_is_only_posted(void) {
    enum { BYTES = 4096, ROWS = 16 };
    if (!&cuda_cpu_hold) return; /* a real GPU's copies cannot be held */
    arena_open(MIB);
    uint8_t *host = (uint8_t *)aligned_alloc(4096, BYTES);
    CU_ASSERT_FATAL(host != NULL);
    ASSERT_OK(gpu->call->pin(gpu, host, BYTES, &err));
    f16 *numbers = random_halves(BYTES / 2, 1);
    const void *from = put(numbers, BYTES);
    void *other = room(NULL, BYTES);
    for (int by_rows = 0; by_rows < 2; by_rows++) {
        size_t row = BYTES / ROWS, pitch = by_rows ? row / 2 : row; /* every row is half as long, or they are one */
        memset(host, 0, BYTES);
        start(STORE);
        __atomic_store_n(&cuda_cpu_hold, 1, __ATOMIC_RELEASE);
        POST(STORE, copy, (StridedCopy){host, pitch, from, row, pitch, ROWS});
        ASSERT_OK(gpu->call->transfer(gpu, other, numbers, BYTES, &err)); /* which waits for no stream either */
        bool moved = memcmp(host, numbers, pitch) == 0;
        __atomic_store_n(&cuda_cpu_hold, 0, __ATOMIC_RELEASE);
        CU_ASSERT(!moved);
        finish(STORE);
        CU_ASSERT(memcmp(host, numbers, pitch) == 0);
    }
    gpu->call->unpin(gpu, host);
    free(host);
    arena_close();
}

static void a_lane_waits_for_another_s_mark_and_times_are_taken(void) {
    enum { N = 64, TIMES = 16 };
    const size_t BULK = (size_t)(20 / every_eleventh()) * MIB;
    const int32_t zero = 0;
    f16 row[N];
    arena_open(BULK * 2 + MIB);
    for (int i = 0; i < N; i++) row[i] = (f16)(0x3c00 + i);
    const void *table = put(row, sizeof row), *idx = put(&zero, 4);
    void *first = room(NULL, sizeof row), *second = room(NULL, sizeof row);
    uint8_t *bulk = (uint8_t *)room(NULL, 2 * BULK);
    ASSERT_OK(gpu->call->transfer(gpu, arena.gpu, arena.before, arena.used, &err));
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    POST(PROJECT, begin, 7);
    for (int i = 0; i < TIMES; i++) POST(PROJECT, copy, (StridedCopy){bulk + BULK, BULK, bulk, BULK, BULK, 1});
    POST(PROJECT, end, 7, true);
    POST(PROJECT, begin, 8);
    Op op = embedding(first, F16, table, F16, N, idx, 1, N, false);
    post_op(PROJECT, op);
    POST(PROJECT, end, 8, true);
    POST(FINISH, after, PROJECT, 8);
    POST(FINISH, begin, 7);
    op.embed.y.at = second, op.embed.table.at = first;
    post_op(FINISH, op);
    POST(FINISH, end, 7, true);
    gpu->poll_s = 60; /* asks again and again, and launches what comes next as if it had not */
    POST(FINISH, sync, 7);
    gpu->poll_s = 0;
    post_op(FINISH, op);
    POST(FINISH, end, 8, true);
    POST(FINISH, sync, 8);
    clock_gettime(CLOCK_MONOTONIC, &to);
    double all = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec) + 1e-4; /* two clocks */
    ASSERT_OK(gpu->call->transfer(gpu, arena.after, arena.gpu, arena.used, &err));
    CU_ASSERT(memcmp(result(second), row, sizeof row) == 0);
    double one = gpu->call->took(gpu, PROJECT, 7, 7), both = gpu->call->took(gpu, PROJECT, 7, 8),
           other = gpu->call->took(gpu, FINISH, 7, 7);
    CU_ASSERT(one > 0 && both >= one && both <= all && other > 0 && other <= all);
    const double begun = gpu->call->began(gpu, PROJECT, 7), later = gpu->call->began(gpu, PROJECT, 8) - begun;
    CU_ASSERT(later >= one - 1e-4 && later <= all);
    arena_close();
}

static void nothing_to_do_is_nothing_done(void) {
    const int32_t none[4] = {0};
    Sampling greedy = {0, 1, 0, 1};
    arena_open(MIB);
    void *x = put(random_halves(4096, 1), 8192), *y = put(NULL, 8192); /* no rooms: nothing may change */
    const int32_t *i = (const int32_t *)put(none, sizeof none);
    const f16 *q = (const f16 *)x;
    on_gpu(PROJECT, embedding(y, F16, x, F16, 64, i, 0, 64, false));
    on_gpu(PROJECT, norm(F16, y, x, x, x, 0, 64));
    on_gpu(PROJECT, product(F16, y, F16, 64, x, x, x, NULL, false, true, 0, 64, 64));
    on_gpu(FINISH, product(F16, y, F16, 64, x, x, x, NULL, true, true, 0, 64, 64));
    on_gpu(FINISH, prefilling(F16, y, q, q, i, 0, 0, 64, 1, 192));
    for (int packs = 0; packs < 2; packs++) {
        const PageTable table = paged(x, x, i, i, 0, 1, 16, 64, 1, packs);
        on_gpu(FINISH, attention(y, F16, q, 64, 64, table));
        on_gpu(FINISH, selection(y, y, 8, q, 64, 64, table, 0.1));
        on_gpu(FINISH, weighing(y, F16, y, y, 8, 64, table, 0.1));
    }
    on_gpu(FINISH, appending(paged(y, y, i, i, 0, 1, 16, 64, 1, false), q, 128, false, 128, i, i, 0));
    on_gpu(PROJECT, packing(y, q, 128, 0, 1, 64));
    on_gpu(PROJECT, unpacking(y, x, 0, 64));
    on_gpu(FINISH, picking(y, x, i, i, &greedy, 0, 64));
    on_gpu(PROJECT, scoring(y, y, x, i, 0, 64));
    copy_on(STORE, y, 64, x, 64, 32, 0);
    arena_close();
}

static void memory_that_is_not_there_is_refused_with_its_remedy(void) {
    gpu_open();
    err.text[0] = 0;
    CU_ASSERT_PTR_NULL_FATAL(gpu->call->alloc(gpu, 2 * gpu->total, &err));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--gpu-mem"));
    arena_open(MIB); /* and what is there is still given */
    const void *x = put(random_halves(32, 1), 64);
    void *y = room(NULL, 64);
    copy_on(STORE, y, 64, x, 64, 64, 1);
    CU_ASSERT(memcmp(result(y), result(x), 64) == 0);
    arena_close();
}

static void what_is_pinned_of_a_range_that_fails_is_given_back(void) {
    enum { PIECE = 4096, PIECES = 3 };
    if (!&cuda_cpu_hold) return; /* a real driver has its own limit */
    gpu_open();
    uint8_t *host = (uint8_t *)aligned_alloc(PIECE, PIECE * PIECES);
    CU_ASSERT_FATAL(host != NULL);
    const size_t usual = gpu->pin_part;
    gpu->pin_part = PIECE;
    setenv("CUDA_CPU_PIN_FAILS", "3", 1);
    CU_ASSERT_EQUAL(gpu->call->pin(gpu, host, PIECE * PIECES, &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "ulimit -l"));
    unsetenv("CUDA_CPU_PIN_FAILS");
    ASSERT_OK(gpu->call->pin(gpu, host, PIECE * PIECES, &err));
    gpu->call->unpin(gpu, host);
    gpu->pin_part = usual;
    free(host);
}

static void what_is_released_and_closed_is_free_again(void) {
    gpu_open();
    CU_ASSERT(gpu->name[0] && gpu->total > gpu->overhead);
    size_t bytes = gpu->total / 4 < 256 * MIB ? gpu->total / 4 : 256 * MIB, slack = bytes / 8; /* others may be there */
    size_t before = gpu->in_use(gpu);
    void *p = gpu->call->alloc(gpu, bytes, &err);
    CU_ASSERT_FATAL(p != NULL);
    CU_ASSERT(gpu->in_use(gpu) + slack >= before + bytes);
    gpu->call->release(gpu, p);
    CU_ASSERT(gpu->in_use(gpu) <= before + slack);
    for (int i = 0; i < 3; i++) { /* what an open GPU takes is as much the third time */
        gpu_close();
        gpu_open();
    }
    CU_ASSERT(gpu->in_use(gpu) <= before + slack);
    gpu_close();
}

static void a_large_card_sets_more_aside(void) {
    static const char *const mib[] = {"2048", "40960", "40961", "143771"};
    if (!&cuda_cpu_hold) return; /* a real GPU has the memory that it has */
    const char *before = getenv("CUDA_CPU_MEM_MB");
    char *was = before ? strdup(before) : NULL;
    for (int i = 0; i < COUNT(mib); i++) {
        setenv("CUDA_CPU_MEM_MB", mib[i], 1);
        gpu_open();
        CU_ASSERT_EQUAL(gpu->spare, (size_t)(i < 2 ? 128 : 512) * MIB);
        gpu_close();
    }
    was ? setenv("CUDA_CPU_MEM_MB", was, 1) : unsetenv("CUDA_CPU_MEM_MB");
    free(was);
}

CU_TestInfo tests[] = {
    {"embed copies rows exactly and adds with one rounding", embed_copies_rows_exactly_and_adds_with_one_rounding},
    {"layernorm matches the host, in place too", layernorm_matches_the_host_in_place_too},
    {"linear matches the host, and the place of a row changes no bit",
     linear_matches_the_host_and_the_place_of_a_row_changes_no_bit},
    {"a few rows times packed weights match the host", a_few_rows_times_packed_weights_match_the_host},
    {"how many rows there are changes no bit of one", how_many_rows_there_are_changes_no_bit_of_one},
    {"partial sums stay in their place", partial_sums_stay_in_their_place},
    {"products of both lanes at once are those of each alone", products_of_both_lanes_at_once_are_those_of_each_alone},
    {"prefill matches the host, and company changes no bit", prefill_matches_the_host_and_company_changes_no_bit},
    {"a token sees itself and those before it, at the edges of tiles too",
     a_token_sees_itself_and_those_before_it_at_the_edges_of_tiles_too},
    {"the largest score may come late or early, or be far below zero",
     the_largest_score_may_come_late_or_early_or_be_far_below_zero},
    {"decode matches the host; pages and company change no bit",
     decode_matches_the_host_and_pages_and_company_change_no_bit},
    {"a batch in pieces gives the same bits", a_batch_in_pieces_gives_the_same_bits},
    {"large scores neither overflow nor blur", large_scores_neither_overflow_nor_blur},
    {"attention to packed pages is that to what they hold", attention_to_packed_pages_is_that_to_what_they_hold},
    {"append fills its slots and nothing else", append_fills_its_slots_and_nothing_else},
    {"pack gives the plain bytes", pack_gives_the_plain_bytes},
    {"an unpacked matrix is what quant_unpack_rows gives", an_unpacked_matrix_is_what_quant_unpack_rows_gives},
    {"each packed number is multiplied as what it unpacks to", each_packed_number_is_multiplied_as_what_it_unpacks_to},
    {"the largest scores are chosen, and of equals the earlier", the_largest_scores_are_chosen_and_of_equals_the_earlier},
    {"all scores equal choose the first tokens", all_scores_equal_choose_the_first_tokens},
    {"weighing takes the values of the chosen tokens alone", weighing_takes_the_values_of_the_chosen_tokens_alone},
    {"sparse attention to packed pages is that to what they hold",
     sparse_attention_to_packed_pages_is_that_to_what_they_hold},
    {"company and pieces change no choice", company_and_pieces_change_no_choice},
    /* From here on blocks have 1024 threads. ThreadSanitizer remembers them all, and every later barrier costs as much. */
    {"greedy takes the largest, and the lowest id among equals", greedy_takes_the_largest_and_the_lowest_id_among_equals},
    {"scores are log-probabilities of the targets", scores_are_log_probabilities_of_the_targets},
    {"a score beside what is no number is none, and it is reported",
     a_score_beside_what_is_no_number_is_none_and_it_is_reported},
    {"copies go up, down and across, whole and by rows", copies_go_up_down_and_across_whole_and_by_rows},
    {"large copies bring every byte to its place", large_copies_bring_every_byte_to_its_place},
    {"what is uploaded is there for every stream", what_is_uploaded_is_there_for_every_stream},
    {"a GPU with less shared memory gives the same bits", a_gpu_with_less_shared_memory_gives_the_same_bits},
    {"a bias and ReLU keep what is not a number", a_bias_and_relu_keep_what_is_not_a_number},
    {"a copy is only posted", a_copy_is_only_posted},
    {"a lane waits for another's mark, and times are taken", a_lane_waits_for_another_s_mark_and_times_are_taken},
    {"nothing to do is nothing done", nothing_to_do_is_nothing_done},
    {"memory that is not there is refused with its remedy", memory_that_is_not_there_is_refused_with_its_remedy},
    {"logits that are no numbers never win and are reported", logits_that_are_no_numbers_never_win_and_are_reported},
    {"what is pinned of a range that fails is given back", what_is_pinned_of_a_range_that_fails_is_given_back},
    {"what is released and closed is free again", what_is_released_and_closed_is_free_again},
    {"a large card sets more aside", a_large_card_sets_more_aside},
    CU_TEST_INFO_NULL,
};
