/* op_cases.h: the arithmetic that every device has to get right. It has
 *     the memory in which an op is carried out, which shows what else it writes;
 *     the cases: sizes beside the edges of vectors, tiles and pages, numbers that are not finite, strides, packed pages,
 *     each beside the plain form of its op, in double precision, one number after the other.
 * test_host.c and test_cuda.c run the cases on their device. A suite defines what differs:
 *     ACT                         the type of the device's activations;
 *     device_memory, on_device    where its memory is, and how it carries ops out there (declared below);
 *     EPSILON                     how exact the result of each op is, in units of what is added up to it.
 * What is about one device alone (threads, instruction sets, streams, shared memory) is in its suite. */
#ifndef OP_CASES_H
#define OP_CASES_H
#include "ops.h"
#include "tests.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* A half is within 2^-11 of what it was rounded from, or below the normal halves within 2^-25. */
static const double HALF = 1.0 / 2048, TINY = 1.0 / (1 << 25);

static uint64_t state = 1;

/* Returns true under ThreadSanitizer. It looks for races in each kernel: one case a kernel is enough, and tests about
 * numbers alone are left out. */
static bool for_races(void) { return test_every > 100; }
/* These return the step through a list of cases. Under ThreadSanitizer it is 11, which is prime to the lengths of the
 * lists; elsewhere every case is taken. */
static int every_eleventh(void) { return for_races() ? 11 : 1; }
/* In the other ways that are in a hurry every third case is taken. */
static int every_third(void) { return test_every > 95 && test_every <= 100 ? 3 : every_eleventh(); }
/* For what takes long, such as products, every fifth case is taken on the emulation without ThreadSanitizer. */
static int every_fifth(void) { return test_every > 30 && test_every <= 100 ? 5 : every_eleventh(); }
/* For short lists, whose first, fourth, ... cases have each kernel and each kind of size. */
static int every_few(void) { return imin(every_third(), 3); }

// ---- numbers in memory ----------------------------------------------------------------------------------------------

static void **temps;
static int ntemps;

/* Returns zeros, which stay until `forget` is called. */
static void *temp(size_t bytes) {
    temps = with_room(temps, ntemps, sizeof *temps);
    return temps[ntemps++] = xcalloc(bytes, 1);
}

/* A byte of what nobody has written: as halves and floats NaN, but none that arithmetic gives; as indices far below 0. */
enum { NOBODYS = 0xfd, GUARD = 192 };

/* Where the views of ops are, GUARD bytes or more of nobody's apart, and where they are when ops have been carried out.
 * They are aligned to 64 bytes, and no more. */
static _Alignas(128) uint8_t room[2][1 << 27];
static size_t used = GUARD;

static void forget(void) {
    while (ntemps) free(temps[--ntemps]);
    used = GUARD;
}

static Tensor blank(Type type, int rows, int cols) {
    const size_t bytes = (size_t)rows * cols * type_bytes(type);
    uint8_t *at = room[0] + used;
    used = (used + bytes + GUARD + 63) / 128 * 128 + 64;
    CHECK(used < sizeof *room);
    memset(at - GUARD, NOBODYS, bytes + 2 * GUARD);
    return tensor_at(at, type, rows, cols, cols);
}

static const Tensor absent;

static void *element(Tensor t, int row, int col) { return (uint8_t *)t.at + (row * t.ld + col) * type_bytes(t.type); }
static int32_t *integer(Tensor t, int row, int col) { return element(t, row, col); }

static double number(Tensor t, int row, int col) {
    const void *at = element(t, row, col);
    if (t.type == F32) return *(const float *)at;
    if (t.type == F16) return f16_to_f32(*(const f16 *)at);
    float f = 0;
    memcpy((uint8_t *)&f + 2, at, sizeof(f16));
    return f;
}

static void set_number(Tensor t, int row, int col, double x) {
    const float f = (float)x;
    if (t.type == F16)
        *(f16 *)element(t, row, col) = f32_to_f16(f);
    else /* the upper half of a float is a BF16 */
        memcpy(element(t, row, col), (const uint8_t *)&f + (t.type == BF16 ? 2 : 0), type_bytes(t.type));
}

static Tensor numbers(Type type, int rows, int cols, double scale) {
    const Tensor t = blank(type, rows, cols);
    for (int i = 0; i < rows * cols; i++) set_number(t, 0, i, scale * test_random(&state));
    return t;
}

static Tensor indices(const int32_t *from, int n) {
    const Tensor t = blank(I32, 1, n);
    memcpy(t.at, from, n * sizeof *from);
    return t;
}

static Tensor copy_of(Tensor t) {
    const Tensor copy = blank(t.type, t.rows, t.cols);
    for (int r = 0; r < t.rows; r++) memcpy(element(copy, r, 0), element(t, r, 0), t.cols * type_bytes(t.type));
    return copy;
}

static bool same(Tensor a, Tensor b) {
    bool equal = a.rows == b.rows && a.cols == b.cols;
    for (int r = 0; r < a.rows && equal; r++)
        equal = memcmp(element(a, r, 0), element(b, r, 0), a.cols * type_bytes(a.type)) == 0;
    return equal;
}

/* Pages as numbers: packed ones are unpacked, head by head. */
static Tensor unpacked_pages(Tensor t, int hd) {
    if (t.type != U8) return t;
    const int bytes = (int)quant_bytes(hd), cols = t.cols / bytes * hd;
    const Tensor x = tensor_at(temp((size_t)t.rows * cols * sizeof(float)), F32, t.rows, cols, cols);
    for (int r = 0; r < t.rows; r++)
        for (int c = 0; c < cols; c += hd) plain_numbers(element(x, r, c), element(t, r, c / hd * bytes), hd);
    return x;
}

/* Packs w (n, k). Its last row stands for those that the last group lacks. */
static Tensor packed_weights(Tensor w) {
    const Tensor packed = blank(U8, ceil_div(w.rows, GROUP), w.cols * GROUP_BYTES);
    for (int g = 0; g < packed.rows; g++)
        for (int c = 0; c < w.cols; c++) {
            f16 column[GROUP];
            for (int o = 0; o < GROUP; o++) column[o] = *(f16 *)element(w, imin(g * GROUP + o, w.rows - 1), c);
            plain_pack((uint8_t *)element(packed, g, c * GROUP_BYTES), column, 1, GROUP);
        }
    return packed;
}

/* Packed weights as numbers (n, k): the halves that they unpack to, or min + scale * code in floats. */
static Tensor unpacked_weights(Tensor packed, Type type) {
    const int n = packed.rows * GROUP, k = packed.cols / GROUP_BYTES;
    const Tensor w = tensor_at(temp((size_t)n * k * type_bytes(type)), type, n, k, k);
    for (int g = 0; g < packed.rows; g++)
        for (int c = 0; c < k; c++) {
            float column[GROUP];
            plain_numbers(column, element(packed, g, c * GROUP_BYTES), GROUP);
            for (int o = 0; o < GROUP; o++) set_number(w, g * GROUP + o, c, column[o]);
        }
    return w;
}

// ---- ops, carried out where everything that they may not write shows ------------------------------------------------

/* The memory of some ops: the room from the first of their views on, before and after. */
static struct {
    size_t used;
    uint8_t *before, *after;
} memory;

/* What a suite defines. The device's memory, of so many bytes; and a function that carries ops out, in order on each lane,
 * whose views are at addresses there. That memory begins as memory.before, and what it becomes goes to memory.after. */
static uint8_t *device_memory(size_t bytes);
static void on_device(const Op *ops, int n);

static void carry_out_all(const Op *ops, int n) {
    const int views = n * MAX_VIEWS;
    Op *moved = memcpy(temp(n * sizeof *ops), ops, n * sizeof *ops);
    size_t first = used;
    for (int v = 0; v < views; v++) {
        const Tensor *view = &ops[v / MAX_VIEWS].view[v % MAX_VIEWS];
        if (view->at) first = size_min(first, (uint8_t *)view->at - room[0]);
    }
    first = (first - GUARD) / 128 * 128; /* on the device too no view is aligned to more than 64 bytes */
    memory.before = room[0] + first, memory.after = room[1] + first, memory.used = used - first;
    uint8_t *base = device_memory(memory.used);
    for (int v = 0; v < views; v++) {
        Tensor *view = &moved[v / MAX_VIEWS].view[v % MAX_VIEWS];
        if (view->at) view->at = base + ((uint8_t *)view->at - memory.before);
    }
    on_device(moved, n);
    for (int v = 0; v < views; v++) { /* what may have changed */
        Use use;
        const Tensor *view = op_view(&ops[v / MAX_VIEWS], v % MAX_VIEWS, &use);
        for (int r = 0; r < view->rows && use == WRITES; r++) {
            uint8_t *row = element(*view, r, 0);
            memcpy(row, memory.after + (row - memory.before), view->cols * type_bytes(view->type));
        }
    }
    CU_ASSERT(memcmp(memory.before, memory.after, memory.used) == 0);
}

static void carry_out(Op op) { carry_out_all(&op, 1); }

static const Lane lanes[] = {PROJECT, FINISH};

/* True if a number is neither `want`, rounded to its type, nor within `most` and what such a rounding costs of it. With
 * most 0 it is to be `want`, rounded. */
static bool is_off(Tensor y, int row, int col, double want, double most) {
    const double is = number(y, row, col);
    const double exact = y.type == F16 ? f16_to_f32(f32_to_f16((float)want)) : (float)want;
    const double rounding = y.type == F16 ? HALF * fabs(want) + TINY : HALF * HALF * fabs(want);
    if (is == exact || (isnan(is) && isnan(want))) return false;
    return !(most && fabs(is - want) <= most + rounding);
}

/* Whether a copy of the op that writes to another place gives the same bits as `whole`. */
static void expect_same(Op op, Tensor whole) {
    op.view[0] = blank(whole.type, whole.rows, whole.cols);
    carry_out(op);
    CU_ASSERT(same(op.view[0], whole));
}

// ---- rows -----------------------------------------------------------------------------------------------------------

static const int some_rows[] = {1, 31, 33, 65};

TEST(embed_copies_rows_exactly_and_adds_with_one_rounding) {
    static const int all_cols[] = {1, 16, 31, 60, 64, 100, 768};
    static const Type host_types[] = {F16, F32, BF16};
    enum { TABLE = 9 };
    for (int i = 0; i < COUNT(all_cols) * COUNT(some_rows); i += every_eleventh()) {
        const int cols = all_cols[i % COUNT(all_cols)], rows = some_rows[i / COUNT(all_cols)];
        const Type type = ACT == F32 ? host_types[i % 3] : F16;
        const Tensor table = tensor_cols(numbers(type, TABLE, cols + i % 2 * 8, 1), 0, cols);
        const Tensor y = blank(ACT, rows, cols), sum = numbers(ACT, rows, cols, 1), before = copy_of(sum);
        const Tensor idx = blank(I32, 1, rows);
        int wrong = 0;
        for (int r = 0; r < rows; r++) *integer(idx, 0, r) = test_below(&state, TABLE);
        carry_out(op_embed(on_lane(lanes[i % 2]), y, table, idx, false));
        carry_out(op_embed(on_lane(lanes[i % 2]), sum, table, idx, true));
        for (int e = 0; e < rows * cols; e++) {
            const double from = number(table, *integer(idx, 0, e / cols), e % cols);
            wrong += is_off(y, 0, e, from, 0) + is_off(sum, 0, e, from + number(before, 0, e), 0);
        }
        CU_ASSERT_EQUAL(wrong, 0);
        forget();
    }
}

TEST(embed_unpacks_the_rows_of_a_packed_table_exactly) {
    static const int all_cols[] = {64, 192, 768};
    enum { TABLE = 131 };
    for (int i = 0; i < COUNT(all_cols) * COUNT(some_rows); i += every_eleventh()) {
        const int cols = all_cols[i % COUNT(all_cols)], rows = some_rows[i / COUNT(all_cols)];
        const Tensor table = packed_weights(numbers(F16, TABLE, cols, 1)), plain = unpacked_weights(table, F16);
        const Tensor y = blank(ACT, rows, cols), idx = blank(I32, 1, rows);
        int wrong = 0;
        for (int r = 0; r < rows; r++) *integer(idx, 0, r) = r ? test_below(&state, TABLE) : TABLE - 1;
        carry_out(op_embed(on_lane(lanes[i % 2]), y, table, idx, false));
        for (int e = 0; e < rows * cols; e++)
            wrong += is_off(y, 0, e, number(plain, *integer(idx, 0, e / cols), e % cols), 0);
        CU_ASSERT_EQUAL(wrong, 0);
        forget();
    }
}

TEST(layernorm_matches_its_formula_in_place_and_row_by_row) {
    /* The host adds up floats as they are, which loses digits of a mean of 1000, and in rows as long as OPT-175B's. Where
     * ThreadSanitizer watches, it meets none of these: their blocks have 1024 threads. */
    enum { ON_GPU = ACT == F16 };
    static const int all_cols[] = {1, ON_GPU ? 12288 : 16, ON_GPU ? 5120 : 100, 2, 15, 28, 33, 60, 64, 96, 768, 2049};
    /* of every four rows: where the mean is far from 0, one-pass formulas lose the variance; one that is below what is
     * added to it */
    static const double mean[] = {ON_GPU ? 1000 : 40, 0, 40, 0}, spread[] = {1, 1. / 1024, 1, 1};
    for (int i = test_every % every_fifth(); i < COUNT(all_cols) * COUNT(some_rows); i += every_fifth()) {
        const int cols = all_cols[i % COUNT(all_cols)], rows = some_rows[i / COUNT(all_cols)];
        const Tensor x = numbers(ACT, rows, cols, 3), w = numbers(F16, 1, cols, 2), b = numbers(F16, 1, cols, 1);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) set_number(x, r, c, number(x, r, c) * spread[r % 4] + mean[r % 4]);
        const Op op = op_layernorm(on_lane(PROJECT), blank(ACT, rows, cols), x, w, b);
        const Tensor y = op.layernorm.y, last = tensor_rows(x, rows - 1, 1), in_place = copy_of(x);
        int far = 0;
        carry_out(op);
        for (int r = 0; r < rows; r++) {
            double average = 0, var = 0;
            for (int c = 0; c < cols; c++) average += number(x, r, c) / cols;
            for (int c = 0; c < cols; c++) var += pow(number(x, r, c) - average, 2) / cols;
            const double deviation = sqrt(var + 1e-5);
            for (int c = 0; c < cols; c++) {
                const double scale = number(w, 0, c), shift = number(b, 0, c);
                const double size =
                    (fabs(average) / deviation + 8) * fabs(scale) + fabs(shift); /* few are 4 deviations off */
                far +=
                    is_off(y, r, c, (number(x, r, c) - average) / deviation * scale + shift, EPSILON[OP_LAYERNORM] * size);
            }
        }
        CU_ASSERT_EQUAL(far, 0);
        expect_same(op_layernorm(on_lane(FINISH), last, last, w, b), tensor_rows(y, rows - 1, 1));
        carry_out(op_layernorm(on_lane(FINISH), in_place, in_place, w, b));
        CU_ASSERT(same(in_place, y));
        forget();
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

/* y = x w^T and what else there is. y has rows of parts * n elements and is the last n of them. */
typedef struct {
    bool floats, bias, relu, residual; /* y is F32 on a GPU too, as logits are */
    int parts;
} Epilogue;
static const Epilogue epilogues[] = {{0, 0, 0, 0, 1}, {0, 1, 0, 0, 1}, {0, 1, 0, 0, 2}, {0, 1, 1, 0, 1},
                                     {0, 1, 0, 1, 1}, {1, 0, 0, 0, 1}, {0, 1, 1, 0, 3}};

static Op linear_new(const Epilogue *e, bool packs, int m, int n, int k, Lane lane) {
    const Type type = e->floats ? F32 : ACT;
    const Tensor all = e->residual ? numbers(type, m, e->parts * n, 1) : blank(type, m, e->parts * n),
                 y = tensor_cols(all, all.cols - n, n), w = numbers(F16, n, k, 2 / sqrt(k));
    Op op = op_linear(on_lane(lane), y, numbers(ACT, m, k, 1), packs ? packed_weights(w) : w,
                      e->bias ? numbers(F16, 1, n, 1) : absent, e->residual ? y : absent);
    op.relu = e->relu;
    return op;
}

/* The last row first. */
static Tensor turned(Tensor t) {
    const Tensor turn = copy_of(t);
    for (int r = 0; r < t.rows; r++)
        memcpy(element(turn, r, 0), element(t, t.rows - 1 - r, 0), t.cols * type_bytes(t.type));
    return turn;
}

/* By how much output o of row r may differ because the CPU rounds the factors of codes. In a block of columns a factor is
 * off by half a unit at most, and a code is at most 15. A unit is the largest |x| times the largest |scale|, over UNITS. */
static double packed_loss(Op op, int r, int o) {
    enum { COLUMNS = 128, UNITS = 32760 };
    double loss = 0;
    for (int c = 0; c < op.linear.x.cols; c += COLUMNS) {
        const int n = imin(COLUMNS, op.linear.x.cols - c);
        double x = 0x1p-100, scale = 0;
        for (int i = c; i < c + n; i++) {
            f16 header[2];
            memcpy(header, element(op.linear.w, o / GROUP, i * GROUP_BYTES), sizeof header);
            x = fmax(x, fabs(number(op.linear.x, r, i)));
            scale = fmax(scale, fabs(f16_to_f32(header[1])));
        }
        loss += n * 15 * x * scale / UNITS / 2;
    }
    return loss;
}

/* Carries a product out, whose result may differ from its formula's by EPSILON of what is added up, and by a rounding. */
static void expect_linear(Op op) {
    const Tensor y = op.linear.y, x = op.linear.x, b = op.linear.b, residual = copy_of(op.linear.residual);
    const bool packed = op.linear.w.type == U8;
    const Tensor w = packed ? unpacked_weights(op.linear.w, ACT) : op.linear.w;
    double *weight = temp(x.cols * sizeof *weight); /* of one output */
    double *loss = temp(y.rows * sizeof *loss);     /* of one group of outputs */
    int far = 0;
    carry_out(op);
    for (int o = 0; o < y.cols; o++) {
        for (int r = 0; r < y.rows && o % GROUP == 0; r++) loss[r] = packed && ACT == F32 ? packed_loss(op, r, o) : 0;
        for (int c = 0; c < x.cols; c++) weight[c] = number(w, o, c);
        for (int r = 0; r < y.rows; r++) {
            const double bias = b.rows ? number(b, 0, o) : 0, add = residual.rows ? number(residual, r, o) : 0;
            double sum = 0, size = fabs(bias) + fabs(add);
            for (int c = 0; c < x.cols; c++) {
                const double term = number(x, r, c) * weight[c];
                sum += term;
                size += fabs(term);
            }
            /* a GPU may cut a sum to a half before the bias is added */
            const double cut = b.rows && ACT == F16 ? HALF * (fabs(sum) + fabs(add)) : loss[r];
            sum += bias;
            far += is_off(y, r, o, (op.relu && sum < 0 ? 0 : sum) + add, EPSILON[OP_LINEAR] * size + cut);
        }
    }
    CU_ASSERT_EQUAL(far, 0);
}

/* Shapes of packed weights: one row of groups, an odd number of them and more than a block has; few columns and so many
 * that several blocks share them; and those of a head, whose last group is not full. */
static const int packed_shapes[][2] = {{64, 64},   {128, 192}, {192, 128}, {320, 64},
                                       {320, 576}, {64, 1024}, {131, 64},  {300, 576}};

TEST(products_match_their_formula_and_the_place_of_a_row_among_others_changes_no_bit) {
    static const int shapes[][2] = {{60, 100}, {131, 28}, {28, 131}, {64, 256}, {256, 60}};
    static const int few_rows[] = {1, 8, 9, 16, 17, 33, 64, PACKED_ROWS + 9};
    for (int s = 0; s < COUNT(shapes) + COUNT(packed_shapes); s++) {
        const bool packs = s >= COUNT(shapes);
        const int *shape = packs ? packed_shapes[s - COUNT(shapes)] : shapes[s];
        const int *rows = packs ? few_rows : some_rows, nrows = packs ? COUNT(few_rows) : COUNT(some_rows);
        const int step = packs ? every_fifth() : every_third();
        for (int i = (s + test_every) % step; i < nrows * COUNT(epilogues); i += step) {
            const Epilogue *e = &epilogues[i % COUNT(epilogues)];
            const Lane lane =
                lanes[(packs ? i : s) % 2]; /* without packs, what differs in one thing alone meets on one lane */
            const Op op = linear_new(e, packs, rows[i / COUNT(epilogues)], shape[0], shape[1], lane);
            Op other = op;
            other.linear.y = turned(op.linear.y);
            other.linear.x = turned(op.linear.x);
            if (e->residual) other.linear.residual = other.linear.y;
            expect_linear(op);
            if (!for_races()) {
                carry_out(other);
                CU_ASSERT(same(turned(other.linear.y), op.linear.y));
            }
            forget();
        }
    }
}

/* Bytes of any kind, but that no group's min or scale is an infinity or NaN. */
static Tensor random_groups(int n, int k) {
    const Tensor t = blank(U8, ceil_div(n, GROUP), k * GROUP_BYTES);
    uint8_t *x = t.at;
    for (size_t i = 0; i < tensor_bytes(t); i++) {
        x[i] = (uint8_t)test_below(&state, 256);
        if (i % GROUP_BYTES == 1 || i % GROUP_BYTES == 3) x[i] &= 0xbf;
    }
    return t;
}

TEST(an_unpacked_matrix_is_what_its_codes_stand_for) {
    static const int shapes[][2] = {{64, 64}, {64, 128}, {192, 64}, {128, 320}, {64, 2048}};
    for (int i = 0; i < 2 * COUNT(shapes); i++) {
        const int n = shapes[i / 2][0], k = shapes[i / 2][1];
        const Tensor packed = i % 2 ? packed_weights(numbers(F16, n, k, 1)) : random_groups(n, k), w = blank(F16, n, k);
        carry_out(op_unpack(on_lane(lanes[i % 2]), w, packed));
        CU_ASSERT(same(w, unpacked_weights(packed, F16)));
        forget();
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------

/* Heads: their size and number. The first of them are those for which devices have code of their own. Those of whole units
 * of 16 numbers can be packed, in one group or two. The last FOR_HOST, many heads and heads of three groups, are for the
 * host alone, since the emulation of a GPU would take too long, and there for decode and for packing alone. A task of the
 * host has at most 32 heads. */
static const int heads[][2] = {{64, 2}, {80, 1}, {96, 2}, {128, 1}, {112, 1}, {7, 3},  {99, 1},  {40, 2},  {20, 3},
                               {1, 2},  {8, 19}, {48, 2}, {16, 5},  {64, 7},  {80, 7}, {128, 7}, {16, 39}, {144, 2}};
enum {
    USUAL_HEADS = 6,
    FOR_HOST = 5,
    HEADS = COUNT(heads) - FOR_HOST,
    ALL_HEADS = ACT == F32 ? COUNT(heads) : HEADS,
    LONGEST = 700
};

static bool packable(const int head[2]) { return head[0] % 16 == 0; }

/* Lengths of sequences: beside the edges of tiles of 16, 32 and 64 tokens, and of the parts that a sequence is cut into. */
static const int prompts[][6] = {{1, 31, 33, 65, 130}, {1, 63, 15, 17, 16}, {65, 128, 64, 129, 201}},
                 contexts[] = {1, 31, 33, 65, 127, 128, 129, 300, LONGEST, 0};

/* Whole sequences one after another. */
typedef struct {
    int nseq, hd, nh, h1;
    int32_t start[16]; /* row of each, and of the end */
    Tensor q, kv;      /* q (rows, h1) and kv (rows, 2 h1) side by side */
} Sequences;

static Sequences sequences_new(const int *len, const int head[2], double q_scale, double k_scale) {
    Sequences s = {.hd = head[0], .nh = head[1], .h1 = head[0] * head[1]};
    const double scale[] = {q_scale, k_scale, 2};
    for (; len[s.nseq]; s.nseq++) s.start[s.nseq + 1] = s.start[s.nseq] + len[s.nseq];
    const Tensor all = blank(F16, s.start[s.nseq], 3 * s.h1);
    for (int i = 0; i < all.rows * all.cols; i++) set_number(all, 0, i, scale[i % all.cols / s.h1] * test_random(&state));
    s.q = tensor_cols(all, 0, s.h1), s.kv = tensor_cols(all, s.h1, 2 * s.h1);
    return s;
}

/* Prefill of n sequences from `first` on, or, of one, of some of its tokens. */
static Op prefill_of(const Sequences *s, int first, int n, int tokens) {
    int32_t start[16];
    const int row = s->start[first];
    for (int r = 0; r <= n; r++) start[r] = s->start[first + r] - row;
    if (tokens) start[1] = tokens;
    return op_attend_prefill(on_lane(FINISH), blank(ACT, start[n], s->h1), tensor_rows(s->q, row, start[n]),
                             tensor_rows(s->kv, row, start[n]), indices(start, n + 1), s->nh);
}

/* The row of pages that token t of a sequence has. */
static int row_in(Tensor pages, int page_tokens, int seq, int t) {
    return *integer(pages, seq, t / page_tokens) * page_tokens + t % page_tokens;
}

/* The rows of K and V that query r of an op attends to, and how many. */
static int *rows_seen(const Op *op, int r, int *len) {
    const bool prefill = op->code == OP_ATTEND_PREFILL;
    int first = 0;
    for (int s = 0; prefill && *integer(op->prefilled.start, 0, s) <= r; s++) first = *integer(op->prefilled.start, 0, s);
    *len = prefill ? r + 1 - first : *integer(op->attend.len, 0, r);
    int *row = temp(*len * sizeof *row);
    for (int t = 0; t < *len; t++) row[t] = prefill ? first + t : row_in(op->attend.pages, op->page_tokens, r, t);
    return row;
}

/* The scores of n tokens for head h of query r; row[t]: the row of k that token t has. */
static double *plain_scores(const Op *op, int r, int h, Tensor k, const int *row, int n) {
    double *score = temp(n * sizeof *score);
    for (int t = 0; t < n; t++) {
        for (int d = h * op->hd; d < (h + 1) * op->hd; d++) score[t] += number(op->view[1], r, d) * number(k, row[t], d);
        score[t] /= sqrt(op->hd);
    }
    return score;
}

static void softmax(double *score, int n) {
    double largest = -INFINITY, sum = 0;
    for (int t = 0; t < n; t++) largest = fmax(largest, score[t]);
    for (int t = 0; t < n; t++) sum += score[t] = exp(score[t] - largest);
    for (int t = 0; t < n; t++) score[t] /= sum;
}

/* Where the choice of head h of sequence r begins in tokens or probs. */
static void *chosen_at(const Op *op, Tensor t, int r, int h) { return element(t, r, h * (t.cols / op->nh)); }

/* Carries out section 3's attention, or the half of sparse attention that is given the weights of some tokens. */
static void expect_attend(Op op, double epsilon) {
    const bool prefill = op.code == OP_ATTEND_PREFILL;
    const int hd = op.hd;
    const Tensor o = op.view[0];
    const Tensor k = prefill ? op.prefilled.kv : unpacked_pages(op.attend.k, hd);
    const Tensor v = prefill ? tensor_cols(op.prefilled.kv, o.cols, o.cols) : unpacked_pages(op.attend.v, hd);
    int far = 0;
    carry_out(op);
    for (int i = 0, len; i < o.rows * op.nh; i++) {
        const int r = i / op.nh, h = i % op.nh, *row = rows_seen(&op, r, &len);
        double *weight = temp(len * sizeof *weight);
        if (op.code == OP_WEIGH) {
            const int32_t *token = chosen_at(&op, op.attend.tokens, r, h);
            const float *prob = chosen_at(&op, op.attend.probs, r, h);
            for (int c = 0; c < sparse_tokens(op.sparsity, len); c++) weight[token[c]] = prob[c];
        } else {
            weight = plain_scores(&op, r, h, k, row, len);
            softmax(weight, len);
        }
        for (int d = h * hd; d < (h + 1) * hd; d++) {
            double sum = 0;
            for (int t = 0; t < len; t++)
                if (weight[t] != 0) sum += weight[t] * number(v, row[t], d); /* what has not been chosen may be NaN */
            far += is_off(o, r, d, sum, epsilon);
        }
    }
    CU_ASSERT_EQUAL(far, 0);
}

TEST(prefill_matches_its_formula_and_company_changes_no_bit) {
    for (int i = 0; i < HEADS + (COUNT(prompts) - 1) * USUAL_HEADS; i++) {
        const int list = i < HEADS ? 0 : 1 + (i - HEADS) / USUAL_HEADS;
        /* for races one head of each kernel is enough: of the others in the first list, those of 20 and of 48 */
        if (list ? i % every_few() : for_races() && i >= USUAL_HEADS && i % 3 < 2) continue;
        const Sequences s = sequences_new(prompts[list], heads[list ? (i - HEADS) % USUAL_HEADS : i], 3, 2);
        const Op op = prefill_of(&s, 0, s.nseq, 0);
        expect_attend(op, EPSILON[OP_ATTEND_PREFILL]);
        for (int r = i % every_few(); r < s.nseq && list == 0;
             r += every_third()) { /* alone, whole, and without its second half */
            const int row = s.start[r], n = prompts[list][r];
            expect_same(prefill_of(&s, r, 1, n), tensor_rows(op.prefilled.o, row, n));
            expect_same(prefill_of(&s, r, 1, (n + 1) / 2), tensor_rows(op.prefilled.o, row, (n + 1) / 2));
        }
        forget();
    }
}

/* The sequences in shuffled pages, and three pages that are nobody's. What no token has is NaN. A sequence has room for
 * max_pages at least, and for one more than it has; the table sends who looks there far away. */
static PageTable pages_of(const Sequences *s, int page_tokens, bool packed, int max_pages) {
    int npages = 3, next = 0;
    const Tensor len = blank(I32, 1, s->nseq);
    for (int r = 0; r < s->nseq; r++) {
        *integer(len, 0, r) = s->start[r + 1] - s->start[r];
        const int pages = pages_for(*integer(len, 0, r), page_tokens);
        npages += pages, max_pages = imax(max_pages, pages + 1);
    }
    const int rows = npages * page_tokens, cols = packed ? s->nh * (int)quant_bytes(s->hd) : s->h1;
    const Type type = packed ? U8 : F16;
    const PageTable t = {
        blank(type, rows, cols), blank(type, rows, cols), blank(I32, s->nseq, max_pages), len, page_tokens, s->nh};
    int *page = temp(npages * sizeof *page);
    for (int i = 0; i < npages; i++) {
        const int other = test_below(&state, i + 1);
        page[i] = page[other], page[other] = i;
    }
    for (int r = 0; r < s->nseq; r++)
        for (int i = 0; i < *integer(len, 0, r); i++) {
            if (i % page_tokens == 0) *integer(t.pages, r, i / page_tokens) = page[next++];
            for (int h = 0; h < 2 * s->nh; h++) {
                const f16 *from = element(s->kv, s->start[r] + i, h * s->hd);
                void *to = element(h < s->nh ? t.k : t.v, row_in(t.pages, page_tokens, r, i), h % s->nh * (cols / s->nh));
                if (packed)
                    plain_pack(to, from, 1, s->hd);
                else
                    memcpy(to, from, s->hd * sizeof *from);
            }
        }
    return t;
}

/* One of the sequences of a table, which then has only so many pages as it needs. */
static PageTable only(PageTable t, int r) {
    const int len = *integer(t.len, 0, r);
    t.pages = tensor_cols(tensor_rows(t.pages, r, 1), 0, pages_for(len, t.page_tokens) + 1),
    t.len = tensor_cols(t.len, r, 1);
    return t;
}

/* The queries of the last tokens (nseq, h1), whose rows are 3 h1 apart. */
static Tensor last_queries(const Sequences *s) {
    const Tensor q = tensor_cols(numbers(F16, s->nseq, 3 * s->h1, 1), 0, s->h1);
    for (int r = 0; r < s->nseq; r++) memcpy(element(q, r, 0), element(s->q, s->start[r + 1] - 1, 0), s->h1 * sizeof(f16));
    return q;
}

static Op attend_of(Tensor q, PageTable t) { return op_attend(on_lane(FINISH), blank(ACT, q.rows, q.cols), q, &t); }

/* No packed number is rounded to a half: it counts as min + scale * code. */
TEST(decode_to_halves_and_packed_pages_matches_its_formula_and_pages_and_company_change_no_bit) {
    static const int page_sizes[] = {16, 1, 3, 200};
    for (int i = 0; i < 2 * ALL_HEADS; i++) {
        const bool packs = i / ALL_HEADS;
        const int *head = heads[i % ALL_HEADS];
        if (i % ALL_HEADS % every_few() || (packs && !packable(head))) continue;
        const Sequences s = sequences_new(contexts, head, 3, 2);
        const Tensor q = last_queries(&s);
        const PageTable t = pages_of(&s, page_sizes[0], packs, 1);
        const Op op = attend_of(q, t);
        expect_attend(op, EPSILON[OP_ATTEND]);
        for (int r = 0; r < s.nseq; r += every_eleventh())
            expect_same(attend_of(tensor_rows(q, r, 1), only(t, r)), tensor_rows(op.attend.o, r, 1));
        for (int p = 1; p < COUNT(page_sizes); p += every_eleventh())
            expect_same(attend_of(q, pages_of(&s, page_sizes[p], packs, 1)), op.attend.o);
        forget();
    }
}

TEST(large_scores_neither_overflow_nor_blur) {
    static const double scales[] = {30, 60000}; /* scores of some hundreds; of 1e9, as large as halves can make them */
    if (for_races()) return;
    for (int i = 0; i < 2; i++) {
        const Sequences s = sequences_new(prompts[0], heads[3 * i], scales[i], scales[i]);
        /* scores of 1e3 are good to 1e-4, to 5e-4 on tensor cores, where weights are halves besides */
        expect_attend(prefill_of(&s, 0, s.nseq, 0), 4 * HALF);
        expect_attend(attend_of(last_queries(&s), pages_of(&s, 16, false, 1)), 1e-3);
        forget();
    }
}

// ---- pages ----------------------------------------------------------------------------------------------------------

/* Numbers in rows of n that try a packer: usual ones, equal ones, both zeros, the ends of the range, tiny ones, and ones
 * that are no finite numbers. */
static Tensor trying_halves(int rows, int n) {
    static const f16 special[][4] = {{0x7bff, 0xfbff, 0x3c00, 0x0000}, {0x8000, 0x0000, 0x0000, 0x8000},
                                     {0x0000, 0x8000, 0x3c00, 0x8000}, {0x0001, 0x0003, 0x0002, 0x8001},
                                     {0x7bff, 0x7bfe, 0x7bf0, 0x7bff}, {0x3c00, 0x7e00, 0x4000, 0xbc00},
                                     {0x7c00, 0x3c00, 0xc000, 0x0000}, {0xb800, 0xb800, 0xb800, 0xb800},
                                     {0x7bff, 0x0000, 0x3c00, 0x7bff}}; /* of the last, the largest would be 65520 */
    const Tensor t = numbers(F16, rows, n, 2);
    f16 *x = t.at;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < n && r % 12 < COUNT(special); i++)
            if (r % 12 < 5 || r % 12 >= 7 || i == n / 2) x[(size_t)r * n + i] = special[r % 12][(i + r / 12) % 4];
    return t;
}

/* New k and v of some sequences go to pages as they are, or are packed on the way; or they have been packed before; or, on
 * the host, they are rounded as a study asks. Every other row of kv goes to an odd place of an odd sequence. */
TEST(append_fills_its_slots_with_the_plain_bytes_and_nothing_else) {
    enum { AS_HALVES, PACKED_ON_THE_WAY, PACKED_BEFORE, STUDIED, TOKENS = 40, ROWS = 65 };
    static const int lengths[] = {TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS, 0},
                     page_sizes[] = {1, 3, 16};
    static const Quant studies[] = {{3, 64}, {4, 16}, {8, 7}};
    for (int how = AS_HALVES; how < STUDIED + (ACT == F32); how++) {
        const bool packs = how == PACKED_ON_THE_WAY || how == PACKED_BEFORE;
        for (int i = 0; i < (packs ? ALL_HEADS : HEADS) * 3; i += packs ? 3 * every_few() : every_third()) {
            const int *head = heads[i / 3], hd = head[0], nh = head[1], h1 = hd * nh,
                      page_tokens = page_sizes[(i + i / 3 + i / 9 + how) % 3]; /* each size, also in steps of nine */
            if (packs && !packable(head)) continue;
            const Sequences s = sequences_new(lengths, head, 1, 1);
            const Tensor kv = tensor_at(trying_halves(2 * ROWS * 2 * nh, hd).at, F16, ROWS, 2 * h1, 4 * h1);
            const Tensor rows = how == PACKED_BEFORE ? blank(U8, ROWS, 2 * nh * (int)quant_bytes(hd)) : kv;
            const Tensor seq = blank(I32, 1, ROWS), pos = blank(I32, 1, ROWS);
            const uint64_t before = state; /* which shuffles the pages alike */
            const PageTable t = pages_of(&s, page_tokens, packs, 1);
            for (int r = 0; r < ROWS; r++) {
                *integer(seq, 0, r) = r % 4 * 2 + 1;
                *integer(pos, 0, r) = TOKENS - 1 - r / 4 * 2;
                f16 *row = element(s.kv, s.start[*integer(seq, 0, r)] + *integer(pos, 0, r), 0);
                memcpy(row, element(kv, r, 0), 2 * h1 * sizeof *row);
                for (int h = 0; h < 2 * nh && how == STUDIED; h++) quant_round(row + h * hd, 1, hd, studies[i % 3]);
            }
            state = before;
            const PageTable want = pages_of(&s, page_tokens, packs, 1);
            Op op = op_append(on_lane(FINISH), &t, rows, seq, pos);
            if (how == STUDIED) op.study = studies[i % 3];
            if (how == PACKED_BEFORE) carry_out(op_pack(on_lane(PROJECT), rows, kv, nh));
            carry_out(op);
            CU_ASSERT(same(t.k, want.k) && same(t.v, want.v));
            forget();
        }
    }
}

// ---- sparse attention -----------------------------------------------------------------------------------------------

/* The two halves of sparse attention. */
typedef struct {
    Op select, weigh;
} Sparse;

static Sparse sparse_of(Tensor q, PageTable t, double sparsity) {
    const int cols = t.nh * imax(3, sparse_tokens(sparsity, LONGEST));
    const Tensor tokens = blank(I32, q.rows, cols), probs = blank(F32, q.rows, cols);
    return (Sparse){op_select(on_lane(FINISH), tokens, probs, q, &t, sparsity),
                    op_weigh(on_lane(FINISH), blank(ACT, q.rows, q.cols), tokens, probs, &t, sparsity)};
}

/* Carries both halves out. A head chooses as section 5 says; where two scores differ by less than `slack`, either may be
 * the larger. V of what no head has chosen is NaN before it is weighed. */
static void expect_sparse(Sparse s, double slack) {
    const Op *op = &s.select;
    const int hd = op->hd, most = op->attend.tokens.cols / op->nh;
    const Tensor k = unpacked_pages(op->attend.k, hd);
    const Tensor nobodys = blank(I32, 1, most), v = s.weigh.attend.v, kept = copy_of(v);
    int wrong = 0;
    carry_out(*op);
    memset(v.at, NOBODYS, tensor_bytes(v));
    for (int i = 0, len; i < op->attend.q.rows * op->nh; i++) {
        const int r = i / op->nh, h = i % op->nh, *row = rows_seen(op, r, &len), chosen = sparse_tokens(op->sparsity, len);
        const int32_t *token = chosen_at(op, op->attend.tokens, r, h);
        const float *prob = chosen_at(op, op->attend.probs, r, h);
        const double *score = plain_scores(op, r, h, k, row, len);
        double *weight = memcpy(temp(len * sizeof *weight), score, len * sizeof *weight);
        bool *is_chosen = temp(len);
        softmax(weight, len); /* over all tokens; a NaN makes all of them NaN, as in dense attention */
        for (int c = 0; c < chosen && !wrong; c++) {
            const int t = token[c];
            wrong += t < 0 || t >= len || (c && t <= token[c - 1]);
            if (wrong) break;
            is_chosen[t] = true;
            const double far = fmin(EPSILON[OP_SELECT] * weight[t] + 1e-30, ACT == F32 ? 1e-6 : 1);
            wrong += isnan(weight[t]) ? !isnan(prob[c]) : !(fabs(prob[c] - weight[t]) <= far);
            memcpy(element(v, row[t], 0), element(kept, row[t], 0), v.cols * type_bytes(v.type));
        }
        for (int t = 0; t < len - 1; t++) /* none of the past goes before one that is chosen */
            for (int c = 0; c < chosen - 1 && !is_chosen[t] && !wrong; c++) {
                const double mine = score[t] - slack, other = score[token[c]];
                const bool numbers = !isnan(mine) && !isnan(other), earlier = t < token[c];
                wrong += numbers ? mine > other || (mine == other && earlier) : isnan(other) && (!isnan(mine) || earlier);
            }
        wrong += !is_chosen[len - 1];
        wrong += memcmp(token + chosen, nobodys.at, (most - chosen) * sizeof *token) != 0;
        wrong += memcmp(prob + chosen, nobodys.at, (most - chosen) * sizeof *prob) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    expect_attend(s.weigh, EPSILON[OP_WEIGH]);
}

static const double sparsities[] = {0.1, 1e-4, 0.5, 1}; /* the second: one token of the past; the last: all */

TEST(the_largest_scores_are_chosen_and_of_equals_the_earlier) {
    static const int page_sizes[] = {16, 1, 200};
    for (int i = 0; i < HEADS * COUNT(sparsities); i += every_third()) {
        const double sparsity = sparsities[i % COUNT(sparsities)];
        const Sequences s = sequences_new(contexts, heads[i / COUNT(sparsities)], 1, 1);
        /* small whole numbers, whose products are summed exactly in any order: equal scores are common, and stay equal */
        const Tensor all = tensor_at(s.q.at, F16, s.q.rows, s.q.ld, s.q.ld);
        for (int e = 0; e < all.rows * all.cols; e++) set_number(all, 0, e, round(1.4 * number(all, 0, e)));
        const Tensor q = last_queries(&s);
        const PageTable t = pages_of(&s, page_sizes[i / COUNT(sparsities) % 3], false, 1);
        for (int r = 0; r < s.nseq; r++) {
            if (s.nh > 1) memset(element(q, r, s.hd), 0, s.hd * sizeof(f16)); /* all scores of one head are equal */
            for (int p = 5; p < contexts[r] - 1 && sparsity < 1; p += 11)     /* what is no number is chosen last */
                set_number(t.k, row_in(t.pages, t.page_tokens, r, p), p % s.h1, NAN);
        }
        /* the host scales q first: scores stay equal where the root of a head's size is a power of two */
        expect_sparse(sparse_of(q, t, sparsity), ACT == F16 || s.hd == 16 || s.hd == 64 ? 0 : 1e-5);
        forget();
    }
}

TEST(weighing_takes_the_values_of_the_chosen_tokens_alone) {
    static const int page_sizes[] = {3, 16, 200};
    for (int i = 0; i < HEADS * COUNT(sparsities); i += every_third()) {
        const int head = i / COUNT(sparsities);
        const Sequences s = sequences_new(contexts, heads[head], 3, 2);
        const PageTable t = pages_of(&s, page_sizes[head % 3], packable(heads[head]) && (head + i) % 2, 1);
        expect_sparse(sparse_of(last_queries(&s), t, sparsities[i % COUNT(sparsities)]), 1e-5); /* scores of up to 30 */
        forget();
    }
}

/* A choice is the same alone, and in other pages, whose size and number the cases have. On a GPU the scores have a place of
 * fixed size: three sequences of the second case fill it, so that its batch is done in three pieces; those of the last case
 * would lie across the end of it, in the last sequence's fourth head, if its batch were not done in pieces. */
TEST(page_size_and_company_change_no_choice) {
    static const struct {
        int head[2], page_tokens, max_pages;
        bool packs;
    } cases[] = {
        {{80, 12} /* two threads have six each */, 3, 1, false}, {{80, 7}, 3, 114130, true}, {{128, 5}, 64, 3048, false}};
    if (for_races()) return;
    for (int i = 0; i < COUNT(cases); i++) {
        const Sequences s = sequences_new(contexts, cases[i].head, 3, 2);
        const Tensor q = last_queries(&s);
        const PageTable others = pages_of(&s, cases[i].page_tokens, cases[i].packs, cases[i].max_pages);
        const Sparse all = sparse_of(q, pages_of(&s, 16, cases[i].packs, 1), .3);
        carry_out(all.select);
        carry_out(all.weigh);
        for (int r = -1; r < s.nseq; r += r < 0 ? 1 : every_third()) { /* all of them, each alone */
            const int first = imax(r, 0), n = r < 0 ? s.nseq : 1;
            const Sparse one = sparse_of(tensor_rows(q, first, n), r < 0 ? others : only(others, r), .3);
            carry_out(one.select);
            CU_ASSERT(same(one.select.attend.tokens, tensor_rows(all.select.attend.tokens, first, n)));
            CU_ASSERT(same(one.select.attend.probs, tensor_rows(all.select.attend.probs, first, n)));
            expect_same(one.weigh, tensor_rows(all.weigh.attend.o, first, n));
        }
        forget();
    }
}

/* A head of one number: the scores are what is in k. Any number of them is chosen. */
TEST(signs_zeros_infinities_and_nan_have_their_place_among_the_scores) {
    enum { MOST = 13 };
    static const float scores[][MOST] = {
        {-1, 2, -3, 0, 4, -0.0f, 0, -5, 6, -0.0f, 1e-7f, -1e-7f, 0},
        {1, NAN, -2, -NAN, 3, NAN, -4, .5f, NAN, -6, -INFINITY, NAN, 7},
        {-2, -INFINITY, 3, -INFINITY, 1, -INFINITY, 2, -INFINITY, 0, -1, -INFINITY, 4, 2},
        {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN},
        {-60000, -59968, -59936, -59904, -59872, -60032, -60064, -60096, -59840, -59808, -60128, -60160, -59776}};
    static const int one[] = {1, 1}, len[] = {MOST, 0};
    for (int i = 0; i < COUNT(scores) * MOST; i++) {
        const Sequences s = sequences_new(len, one, 1, 1);
        for (int t = 0; t < MOST; t++) set_number(s.kv, t, 0, scores[i / MOST][t]);
        set_number(s.q, MOST - 1, 0, 1);
        expect_sparse(sparse_of(last_queries(&s), pages_of(&s, 5, false, 1), i % MOST / (MOST - 1.)), 0);
        forget();
    }
}

// ---- logits ---------------------------------------------------------------------------------------------------------

/* Logits in steps of 1/64, so that equal ones are common and unequal ones have clearly different probabilities. */
static Tensor stepped_logits(int rows, int vocab, double scale) {
    const Tensor t = blank(F32, rows, vocab);
    for (int i = 0; i < rows * vocab; i++) set_number(t, 0, i, floor(64 * scale * test_random(&state)) / 64);
    return t;
}

/* The lowest id among the largest logits; NaN is never one. */
static int plain_pick(Tensor logits, int r) {
    int best = -1;
    for (int i = 0; i < logits.cols; i++) {
        const double x = number(logits, r, i);
        if (!isnan(x) && (best < 0 || x > number(logits, r, best))) best = i;
    }
    return imax(best, 0);
}

static Op pick_of(Tensor logits, Sampling sampling) {
    const Tensor ids = blank(I32, 1, logits.rows), prompt = blank(I32, 1, logits.rows), pos = blank(I32, 1, logits.rows);
    memset(prompt.at, 0, tensor_bytes(prompt));
    return op_pick(on_lane(FINISH), ids, logits, prompt, pos, prompts_sampled(sampling));
}

static void expect_greedy(Tensor logits) {
    const Op op = pick_of(logits, (Sampling){0});
    carry_out(op);
    int wrong = 0;
    for (int r = 0; r < logits.rows; r++) wrong += *integer(op.pick.ids, 0, r) != plain_pick(logits, r);
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Rows of NaN and a few numbers; of minus infinities and a few numbers; of these and NaN; with an infinity that wins; of
 * NaN alone. */
static Tensor logits_that_are_no_numbers(void) {
    enum { VOCAB = 300 };
    const Tensor t = blank(F32, 5, VOCAB);
    for (int c = 0; c < VOCAB; c++) {
        set_number(t, 0, c, c % 3 ? NAN : test_random(&state) - 5);
        set_number(t, 1, c, c % 7 ? -INFINITY : test_random(&state) - 5);
        set_number(t, 2, c, c % 3 ? NAN : c ? -INFINITY : NAN);
        set_number(t, 3, c, c % 3 ? NAN : c == 201 ? INFINITY : -INFINITY);
        set_number(t, 4, c, NAN);
    }
    return t;
}

/* Where ThreadSanitizer watches, it does not meet the last, whose blocks have 1024 threads. */
static const int logit_sizes[][2] = {{3, 1}, {33, 131}, {5, 1025}, {2, 50272}};

TEST(greedy_takes_the_largest_and_the_lowest_id_among_equals_and_never_nan) {
    for (int i = 0; i < COUNT(logit_sizes) - for_races(); i++) {
        const int rows = logit_sizes[i][0], vocab = logit_sizes[i][1];
        const Tensor logits = stepped_logits(rows, vocab, .5); /* many are equally large */
        expect_greedy(logits);
        for (int r = 0; r < rows; r++) set_number(logits, r, vocab - 1 - r * 53 % vocab, 9); /* one is, near the end */
        expect_greedy(logits);
        forget();
    }
    enum { EVERY = 100 }; /* a row for each place, whose last logit is as large, with NaN in between */
    const Tensor logits = blank(F32, EVERY, EVERY);
    for (int r = 0; r < EVERY; r++)
        for (int c = 0; c < EVERY; c++) set_number(logits, r, c, c == r || c == EVERY - 1 ? -9 : c % 7 == 3 ? NAN : -10);
    expect_greedy(logits), expect_greedy(logits_that_are_no_numbers());
    forget();
}

static Op score_of(Tensor logits, Tensor target) {
    return op_score(on_lane(PROJECT), blank(F32, 1, logits.rows), blank(I32, 1, logits.rows), logits, target);
}

/* Log-probabilities of down to -30 and more, in float; what is no number, or minus infinity, is that. */
TEST(scores_are_log_probabilities_of_the_targets) {
    /* a row for each place of an infinity that weighs nothing, of a NaN, of an infinity that is too large */
    static const float odd[] = {-INFINITY, NAN, INFINITY};
    const int nsizes = COUNT(logit_sizes) - for_races();
    for (int i = 0; i < nsizes + COUNT(odd); i++) {
        const bool usual = i < nsizes;
        const Tensor logits = stepped_logits(usual ? logit_sizes[i][0] : 100, usual ? logit_sizes[i][1] : 100, 8);
        const Tensor target = blank(I32, 1, logits.rows);
        const Op op = score_of(logits, target);
        int wrong = 0;
        for (int c = 0; c < logits.cols && usual; c++)
            set_number(logits, 0, c, -8 + 1e-3 * (c % 7)); /* flat: all of a long sum counts */
        for (int r = 0; r < logits.rows; r++) {
            if (!usual) set_number(logits, r, r, odd[i - nsizes]);
            *integer(target, 0, r) = r % 2 ? r % logits.cols : logits.cols - 1 - r % logits.cols;
        }
        carry_out(op);
        for (int r = 0; r < logits.rows; r++) {
            const int best = plain_pick(logits, r);
            const double top = number(logits, r, best), is = number(op.score.logp, 0, r);
            double sum = 0;
            for (int c = 0; c < logits.cols; c++) sum += exp(number(logits, r, c) - top);
            const double want = number(logits, r, *integer(target, 0, r)) - top - log(sum);
            wrong += isnan(want) ? !isnan(is) : is != want && !(fabs(is - want) <= EPSILON[OP_SCORE]);
            wrong += *integer(op.score.best, 0, r) != best;
        }
        CU_ASSERT_EQUAL(wrong, 0);
        forget();
    }
}

#endif
