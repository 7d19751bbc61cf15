/* test_quant.c: packed groups (section 5) against their definition: how far a number may move, bytes solved by hand, and
 * the fast functions byte for byte against the plain ones of fixture.c. */
#include "tests.h"

static uint64_t state;

enum { MOST = 160 }; /* numbers of a test's matrix column or head */

static int below(int n) { return test_below(&state, n); }

static f16 any_finite_half(void) { return (f16)(below(2) << 15 | below(0x7c00)); }

/* Fills x with finite numbers around one, with any ones, with one or two again and again, or with a mixture. Some groups
 * are of numbers whose steps are as large as those of codes, of both ends of the range, of subnormal numbers, of both
 * zeros. */
static void fill(f16 *x, size_t n) {
    static const float around[][2] = {{0, 1}, {1000, 1}, {5e4f, 5e4f}, {0, 1e6f}, {0, 6e-5f}, {2e-7f, 2e-7f}, {-0.0f, 0}};
    const float *middle = around[below(7)];
    const f16 other[] = {any_finite_half(), any_finite_half()};
    const int others = below(3), share = (int[]){0, 2, 30, 100}[below(4)];
    for (size_t i = 0; i < n; i++) {
        const float value = middle[0] + middle[1] * test_random(&state);
        x[i] = f32_to_f16(fminf(fmaxf(value, -65504), 65504));
        if (below(100) < share) x[i] = others ? other[below(others)] : any_finite_half();
    }
}

/* Of any group: the code is found in float, so that of at most 255 steps it is off by four roundings of 6e-8. A step is the
 * range of the group over the largest code, but for its own rounding: 2^-10 of it, or one subnormal. */
TEST(every_number_comes_back_within_half_a_step_and_one_rounding_and_in_its_place_in_the_order) {
    static const int groups[] = {1, 2, 16, 32, 48, 64, 100, 128};
    int far = 0, turned = 0, moved = 0, touched = 0;
    for (int round = 0; round < 4000; round++) {
        const Quant quant = {(uint16_t)(2 + round % 7), (uint16_t)groups[round / 7 % 8]};
        const int stride = 1 + below(2), n = (1 + below(MOST)) / stride;
        f16 x[MOST], back[MOST];
        fill(x, MOST);
        memcpy(back, x, sizeof x);
        CU_ASSERT(quant_round(back, stride, n, quant));
        for (int first = 0; first < n; first += quant.group) {
            const int end = imin(n, first + quant.group);
            double low = INFINITY, high = -INFINITY;
            for (int i = first; i < end; i++)
                low = fmin(low, f16_to_f32(x[i * stride])), high = fmax(high, f16_to_f32(x[i * stride]));
            const double step = (high - low) / ((1 << quant.bits) - 1) * (1 + 0x1p-10) + (high > low ? 0x1p-24 : 0);
            for (int i = first; i < end; i++) {
                const double was = f16_to_f32(x[i * stride]), is = f16_to_f32(back[i * stride]);
                int exponent; /* rounding to F16 may cost half the distance of halves */
                frexp(fmax(fabs(is), fabs(was)), &exponent);
                far += !(fabs(is - was) <= step * (0.5 + 1e-4) + ldexp(1, imax(exponent, -13) - 12));
                moved += (was == low || low == high) && is != was; /* the least number, and equal ones, stay */
                for (int j = first; j < i; j++) {
                    const double other = f16_to_f32(x[j * stride]), other_is = f16_to_f32(back[j * stride]);
                    turned += other < was ? other_is > is : other_is < is;
                }
            }
        }
        for (int i = 0; i < MOST; i++) touched += (i % stride || i / stride >= n) && back[i] != x[i];
    }
    CU_ASSERT_EQUAL(far, 0);
    CU_ASSERT_EQUAL(turned, 0);
    CU_ASSERT_EQUAL(moved, 0);
    CU_ASSERT_EQUAL(touched, 0);
}

/* 0, 1, ... 15, then 48 more of them downwards: min 0, scale 15 / 15 = 1, so that a code is its number. In F16 0 is 0x0000
 * and 1 is 0x3c00. Byte b < 16 has number b in its low half and number 16 + b in its high half; byte 16 + b has numbers
 * 32 + b and 48 + b. Numbers 0 .. 15 are b, all others 15 - b: bytes b | (15 - b) << 4, then (15 - b) * 0x11. */
TEST(a_group_of_4_bits_has_the_bytes_that_one_finds_by_hand) {
    static const uint8_t golden[36] = {0x00, 0x00, 0x00, 0x3c, 0xf0, 0xe1, 0xd2, 0xc3, 0xb4, 0xa5, 0x96, 0x87,
                                       0x78, 0x69, 0x5a, 0x4b, 0x3c, 0x2d, 0x1e, 0x0f, 0xff, 0xee, 0xdd, 0xcc,
                                       0xbb, 0xaa, 0x99, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x00};
    uint8_t packed[37];
    f16 x[64];
    for (int i = 0; i < 64; i++) x[i] = f32_to_f16((float)(i < 16 ? i : 15 - i % 16));
    packed[36] = 0x5a;
    CU_ASSERT(plain_pack(packed, x, 1, 64));
    CU_ASSERT(memcmp(packed, golden, 36) == 0);
    CU_ASSERT_EQUAL(packed[36], 0x5a);
    CU_ASSERT(quant_pack_heads(packed, x, 1, 64));
    CU_ASSERT(memcmp(packed, golden, 36) == 0);
}

/* 0, 1, 2.4, 3.5, 4.5, 6.6 and 7 in 3 bits: scale 7 / 7 = 1. Of two codes that are as near the even one is taken. A group
 * of three: 0, 1, 2.4, scale 2.4 / 7 rounded up to a half, 0.343017578125, codes 0, 3 (1 / .343 = 2.92) and 7. */
TEST(groups_of_3_bits_are_rounded_as_one_finds_by_hand) {
    static const float numbers[] = {0, 1, 2.4f, 3.5f, 4.5f, 6.6f, 7}, in_7[] = {0, 1, 2, 4, 4, 7, 7};
    static const float in_3[] = {0, 3 * 0.343017578125f, 7 * 0.343017578125f};
    f16 x[7], y[3];
    for (int i = 0; i < 7; i++) x[i] = f32_to_f16(numbers[i]);
    memcpy(y, x, sizeof y);
    CU_ASSERT(quant_round(x, 1, 7, (Quant){3, 64}));
    CU_ASSERT(quant_round(y, 1, 3, (Quant){3, 3}));
    for (int i = 0; i < 7; i++) CU_ASSERT_EQUAL(x[i], f32_to_f16(in_7[i]));
    for (int i = 0; i < 3; i++) CU_ASSERT_EQUAL(y[i], f32_to_f16(in_3[i]));
}

TEST(bytes_are_four_and_a_half_bits_a_number_in_groups_of_the_paper) {
    static const size_t bytes[][2] = {
        {0, 0},       {64, 36},         {64 * 1000, 64 * 1000 * 9 / 16}, {128 + 32, 36 * 2 + 4 + 16},
        {48, 4 + 32}, {80, 36 + 4 + 16}}; /* 16 numbers have the low halves of 16 bytes */
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) CU_ASSERT_EQUAL(quant_bytes((int)bytes[i][0]), bytes[i][1]);
    CU_ASSERT_EQUAL(quant_matrix_bytes(192, 128), (size_t)3 * 128 * 36);
}

TEST(what_is_not_finite_is_told_and_poisons_its_group_alone) {
    static const f16 bad[] = {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff};
    int wrong = 0;
    for (int b = 0; b < 5; b++) {
        for (int at = 0; at < 144; at += 3) {
            const Quant quant = {(uint16_t)(2 + (at + b) % 7), 50};
            f16 x[144], plain[144];
            fill(x, 144);
            memcpy(plain, x, sizeof x);
            x[at] = bad[b];
            wrong += quant_round(x, 1, 144, quant) || !quant_round(plain, 1, 144, quant);
            for (int i = 0; i < 144; i++) wrong += i / 50 == at / 50 ? !isnan(f16_to_f32(x[i])) : x[i] != plain[i];
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Packs n groups of `size` numbers, which lie `stride` apart, plainly and with the fast function. A group is a column of
 * `stride` columns, or, where that is 1, a head. Now and then a number is not finite. The bytes are the same, and nothing
 * behind them is written. Returns them. */
static uint8_t *packed_alike(f16 *x, int n, int size, int stride) {
    const size_t each = quant_bytes(size), bytes = n * each;
    const bool rows = stride > 1, spoiled = below(11) == 0;
    uint8_t *fast = memset(xcalloc(bytes + 1, 1), 0xa5, bytes + 1), *slow = xcalloc(bytes, 1);
    fill(x, n * size);
    if (spoiled) x[below(n * size)] = below(2) ? 0x7c00 : 0xfe00;
    for (int g = 0; g < n; g++) plain_pack(slow + g * each, x + (rows ? g : g * size), stride, size);
    CU_ASSERT_EQUAL(rows ? quant_pack_rows(fast, x, n) : quant_pack_heads(fast, x, n, size), !spoiled);
    CU_ASSERT(memcmp(fast, slow, bytes) == 0 && fast[bytes] == 0xa5);
    free(fast);
    return slow;
}

TEST(rows_have_the_plain_functions_bytes_and_numbers) {
    int wrong = 0;
    for (int round = 0; round < 300; round++) {
        const int k = 64 * (1 + round % 3), count = GROUP * k;
        f16 *x = xcalloc(count, 2), *back = xcalloc(count + 1, 2);
        uint8_t *packed = packed_alike(x, k, GROUP, k);
        back[count] = 0x1234;
        quant_unpack_rows(back, packed, k);
        for (int c = 0; c < k; c++) {
            float column[GROUP];
            plain_numbers(column, packed + c * GROUP_BYTES, GROUP);
            for (int r = 0; r < GROUP; r++) wrong += back[r * k + c] != f32_to_f16(column[r]);
        }
        for (int r = 0; r < GROUP; r++) { /* row by row too, into the place of what x held */
            x[(r + 1) % GROUP * k] = 0x4321;
            quant_unpack_row(x + r * k, packed, r, k);
            wrong += memcmp(x + r * k, back + r * k, k * sizeof *x) || x[(r + 1) % GROUP * k] != 0x4321;
        }
        wrong += back[count] != 0x1234;
        free(x);
        free(back);
        free(packed);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* A study of 4 bits in groups of 64 makes of heads what packed ones stand for, as halves. */
TEST(heads_have_the_plain_functions_bytes_and_a_study_makes_their_numbers) {
    int wrong = 0;
    for (int round = 0; round < 2000; round++) {
        const int hd = 16 * (1 + round % 12), nh = 1 + below(4);
        f16 *x = xcalloc(nh * hd, 2); /* no more than is there, for the sanitizer */
        uint8_t *packed = packed_alike(x, nh, hd, 1);
        for (int h = 0; h < nh; h++) {
            float numbers[192];
            plain_numbers(numbers, packed + h * quant_bytes(hd), hd);
            quant_round(x + h * hd, 1, hd, (Quant){4, 64});
            for (int i = 0; i < hd; i++) wrong += x[h * hd + i] != f32_to_f16(numbers[i]);
        }
        free(x);
        free(packed);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}
