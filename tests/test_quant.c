/* test_quant.c: packed groups (section 5) against their definition: how far a number may move, bytes solved by hand, and
 * the fast functions byte for byte against the plain ones of fixture.c. */
#include "tests.h"

static uint64_t state;

enum { MOST = 160 }; /* numbers of a test's matrix column or head */

static const int groups[] = {1, 2, 16, 32, 48, 64, 100, 128};
enum { NGROUPS = sizeof groups / sizeof *groups };

static unsigned random_bits(unsigned n) { return (unsigned)((test_random(&state) + 1) / 2 * (float)n) % n; }

/* Any finite half. */
static f16 any_half(void) {
    unsigned h;
    do h = random_bits(65536);
    while ((h & 0x7c00) == 0x7c00);
    return (f16)h;
}

/* The kinds of numbers that a group is made of. */
enum {
    UNIFORM,
    ANY,
    EQUAL,
    TWO,
    OUTLIER,
    SUBNORMAL,
    FEW_SUBNORMAL,
    EXTREMES,
    ZEROS,
    SIGNED_ZEROS,
    FAR,
    TOP,
    NKINDS_OF_DATA
};

static void fill(f16 *x, size_t n, int kind) {
    f16 a = any_half(), b = any_half();
    for (size_t i = 0; i < n; i++) {
        switch (kind) {
            case UNIFORM:
                x[i] = f32_to_f16(test_random(&state));
                break;
            case ANY:
                x[i] = any_half();
                break;
            case EQUAL:
                x[i] = a;
                break;
            case TWO:
                x[i] = random_bits(2) ? a : b;
                break;
            case OUTLIER:
                x[i] = i == n / 2 ? a : f32_to_f16(test_random(&state) / 100);
                break;
            case SUBNORMAL:
                x[i] = (f16)(random_bits(1024) | random_bits(2) << 15);
                break;
            case FEW_SUBNORMAL:
                x[i] = (f16)(1 + random_bits(4));
                break;
            case EXTREMES:
                x[i] = i % 2 ? 0x7bff : 0xfbff;
                break;
            case ZEROS:
                x[i] = i % 3 ? 0x8000 : 0;
                break;
            case SIGNED_ZEROS:
                x[i] = random_bits(3) ? (f16)(random_bits(2) << 15) : a & 0x7fff;
                break;
            case FAR:
                x[i] = f32_to_f16(1000 + test_random(&state));
                break; /* steps of x as large as those of the codes */
            default:
                x[i] = f32_to_f16(65504 - 30000 * (float)random_bits(2) * (test_random(&state) + 1));
                break;
        }
    }
}

/* Half the distance of halves around x: what rounding to F16 may cost. */
static double half_ulp(double x) {
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, (exponent < -13 ? -13 : exponent) - 12);
}

static f16 stored_scale(const uint8_t *group) { return (f16)(group[2] | group[3] << 8); }

/* A step is the range of a group over the largest code, but for its own rounding: 2^-10 of it, or one subnormal. */
static double longest_step(const f16 *x, int stride, int n, int bits) {
    double low = INFINITY, high = -INFINITY;
    for (int i = 0; i < n; i++) low = fmin(low, f16_to_f32(x[i * stride])), high = fmax(high, f16_to_f32(x[i * stride]));
    return (high - low) / ((1 << bits) - 1) * (1 + 0x1p-10) + (high > low ? 0x1p-24 : 0);
}

static void every_number_comes_back_within_half_a_step_and_one_rounding(void) {
    f16 x[MOST], back[MOST];
    int far = 0, constant = 0, between = 0;
    for (int round = 0; round < 7 * NGROUPS * NKINDS_OF_DATA * 6; round++) {
        Quant quant = {(uint16_t)(2 + round % 7), (uint16_t)groups[round / 7 % NGROUPS]};
        int kind = round / 7 / NGROUPS % NKINDS_OF_DATA, n = 1 + (int)random_bits(MOST), stride = 1 + (int)random_bits(2);
        n = stride == 2 ? (n + 1) / 2 : n;
        fill(x, MOST, kind);
        memcpy(back, x, sizeof x);
        CU_ASSERT(quant_round(back, stride, n, quant));
        for (int i = 0; i < n; i++) {
            const int first = i / quant.group * quant.group;
            double step = longest_step(x + first * stride, stride, imin(quant.group, n - first), quant.bits);
            double was = f16_to_f32(x[i * stride]), is = f16_to_f32(back[i * stride]);
            /* the code is found in float: of at most 255 steps, four roundings of 6e-8 */
            far += !(fabs(is - was) <= step * (0.5 + 1e-4) + half_ulp(fmax(fabs(is), fabs(was))));
            constant += (kind == EQUAL || kind == ZEROS) && is != was;
        }
        for (int i = 0; i < MOST; i++) between += (i % stride || i / stride >= n) && back[i] != x[i];
    }
    CU_ASSERT_EQUAL(far, 0);
    CU_ASSERT_EQUAL(constant, 0);
    CU_ASSERT_EQUAL(between, 0); /* the others are not touched */
}

static void a_step_is_no_longer_and_no_shorter_than_the_range_asks_for(void) {
    int wrong = 0;
    for (int round = 0; round < NKINDS_OF_DATA * 140; round++) {
        f16 x[64];
        uint8_t packed[GROUP_BYTES];
        fill(x, 64, round % NKINDS_OF_DATA);
        CU_ASSERT(quant_pack_heads(packed, x, 1, 64));
        double longest = longest_step(x, 1, 64, 4), scale = f16_to_f32(stored_scale(packed));
        wrong += !(scale <= longest && scale >= (longest - 0x1p-24) * (1 - 0x1p-9));
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static int compare_halves(const void *a, const void *b) {
    float x = f16_to_f32(*(const f16 *)a), y = f16_to_f32(*(const f16 *)b);
    return (x > y) - (x < y);
}

static void the_order_of_numbers_is_kept_and_the_ends_stay(void) {
    int wrong = 0;
    for (int round = 0; round < 7 * NKINDS_OF_DATA * 20; round++) {
        Quant quant = {(uint16_t)(2 + round % 7), 100};
        f16 x[100], back[100];
        fill(x, 100, round / 7 % NKINDS_OF_DATA);
        qsort(x, 100, sizeof *x, compare_halves);
        memcpy(back, x, sizeof x);
        quant_round(back, 1, 100, quant);
        for (int i = 1; i < 100; i++) wrong += !(f16_to_f32(back[i - 1]) <= f16_to_f32(back[i]));
        wrong += f16_to_f32(back[0]) != f16_to_f32(x[0]);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Numbers that are a minimum and whole steps of a power of two are what codes can say exactly. */
static void what_lies_on_the_grid_comes_back_exactly_and_packs_to_the_same_bytes(void) {
    int wrong = 0;
    for (int round = 0; round < 7 * 40; round++) {
        Quant quant = {(uint16_t)(2 + round % 7), (uint16_t)groups[2 + round % (NGROUPS - 2)]};
        int n = quant.group, levels = 1 << quant.bits;
        float step = ldexpf(1, (int)random_bits(20) - 12), numbers[MOST];
        f16 x[MOST], back[MOST];
        uint8_t packed[2 * MOST], again[2 * MOST];
        for (int i = 0; i < n; i++)
            x[i] = f32_to_f16(step * (float)(i == 1 ? levels - 1 : i ? (int)random_bits(levels) : 0) - 3 * step);
        memcpy(back, x, sizeof x);
        quant_round(back, 1, n, quant);
        wrong += memcmp(x, back, (size_t)n * 2) != 0;
        if (quant.bits != 4 || n % 16) continue;
        quant_pack_heads(packed, x, 1, n);
        plain_numbers(numbers, packed, n);
        for (int i = 0; i < n; i++) back[i] = f32_to_f16(numbers[i]);
        quant_pack_heads(again, back, 1, n);
        wrong += memcmp(packed, again, quant_bytes(n)) != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* Rounding again what came back costs half a step at most, of steps that did not grow. */
static void rounding_again_moves_a_number_by_less_than_a_step(void) {
    int wrong = 0;
    for (int round = 0; round < 7 * 60; round++) {
        Quant quant = {(uint16_t)(2 + round % 7), 64};
        f16 x[64], back[64], again[64];
        fill(x, 64, round % 2 ? UNIFORM : ANY);
        memcpy(back, x, sizeof x);
        quant_round(back, 1, 64, quant);
        memcpy(again, back, sizeof x);
        CU_ASSERT(quant_round(again, 1, 64, quant)); /* nothing finite became infinite */
        for (int i = 0; i < 64; i++) {
            double first = f16_to_f32(back[i]), moved = fabs(f16_to_f32(again[i]) - first);
            wrong += !(moved <= 0.51 * longest_step(x, 1, 64, quant.bits) + 2 * half_ulp(first));
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* What a study of 4 bits in groups of 64 makes of numbers is what packed ones stand for, as halves. */
static void rounding_is_packing_and_unpacking(void) {
    int wrong = 0;
    for (int round = 0; round < 100 * NKINDS_OF_DATA; round++) {
        const int n = 16 * (1 + (int)random_bits(10));
        f16 x[160];
        float numbers[160];
        uint8_t packed[3 * GROUP_BYTES];
        fill(x, n, round % NKINDS_OF_DATA);
        quant_pack_heads(packed, x, 1, n);
        plain_numbers(numbers, packed, n);
        quant_round(x, 1, n, (Quant){4, 64});
        for (int i = 0; i < n; i++) wrong += x[i] != f32_to_f16(numbers[i]);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* 0, 1, ... 15, then 48 more of them downwards: min 0, scale 15 / 15 = 1, so that a code is its number. In F16 0 is 0x0000
 * and 1 is 0x3c00. Byte b < 16 has number b in its low half and number 16 + b in its high half; byte 16 + b has numbers
 * 32 + b and 48 + b. Numbers 0 .. 15 are b, all others 15 - b: bytes b | (15 - b) << 4, then (15 - b) * 0x11. */
static void a_group_of_4_bits_has_the_bytes_that_one_finds_by_hand(void) {
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
static void groups_of_3_bits_are_rounded_as_one_finds_by_hand(void) {
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

static void bytes_are_four_and_a_half_bits_a_number_in_the_paper_s_groups(void) {
    CU_ASSERT_EQUAL(quant_bytes(64), 36);
    CU_ASSERT_EQUAL(quant_bytes(64 * 1000) * 8, 64 * 1000 * 9 / 2);
    CU_ASSERT_EQUAL(quant_bytes(128 + 32), 36 * 2 + 4 + 16);
    CU_ASSERT_EQUAL(quant_bytes(80), 36 + 4 + 16); /* 16 numbers have the low halves of 16 bytes */
    CU_ASSERT_EQUAL(quant_bytes(48), 4 + 32);
    CU_ASSERT_EQUAL(quant_bytes(0), 0);
    CU_ASSERT_EQUAL(quant_matrix_bytes(192, 128), (size_t)3 * 128 * 36);
}

static bool is_nan_half(f16 h) { return isnan(f16_to_f32(h)); }

static void what_is_not_finite_is_told_and_poisons_its_group_alone(void) {
    static const f16 bad[] = {0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xffff};
    int wrong = 0;
    for (int b = 0; b < 5; b++) {
        for (int at = 0; at < 144; at += 3) {
            Quant quant = {(uint16_t)(2 + (at + b) % 7), 50};
            f16 x[144], back[144], plain[144];
            float numbers[144], others[144];
            uint8_t packed[3 * GROUP_BYTES];
            fill(x, 144, UNIFORM);
            memcpy(plain, x, sizeof x);
            quant_pack_heads(packed, x, 1, 144);
            plain_numbers(others, packed, 144);
            x[at] = bad[b];
            memcpy(back, x, sizeof x);
            wrong += quant_round(back, 1, 144, quant);
            wrong += quant_pack_heads(packed, x, 1, 144);
            plain_numbers(numbers, packed, 144);
            quant_round(plain, 1, 144, quant);
            for (int i = 0; i < 144; i++) {
                wrong += i / 50 == at / 50 ? !is_nan_half(back[i]) : back[i] != plain[i];
                wrong += i / 64 == at / 64 ? !isnan(numbers[i]) : numbers[i] != others[i];
            }
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

/* With numbers that are not finite now and then. */
static void rows_have_the_plain_functions_bytes_and_numbers(void) {
    int wrong = 0;
    for (int round = 0; round < 300; round++) {
        const int k = 64 * (1 + round % 3);
        const size_t count = (size_t)GROUP * k, bytes = quant_matrix_bytes(GROUP, k);
        f16 *w = (f16 *)xcalloc(count, 2), *back = (f16 *)xcalloc(count + 1, 2);
        uint8_t *fast = (uint8_t *)xcalloc(bytes + 1, 1), *slow = (uint8_t *)xcalloc(bytes, 1);
        bool finite = true;
        memset(fast, 0xa5, bytes + 1);
        fill(w, count, round % NKINDS_OF_DATA);
        if (round % 11 == 0) w[count / 2] = 0x7c00;
        for (int c = 0; c < k; c++) finite = plain_pack(slow + c * GROUP_BYTES, w + c, k, GROUP) && finite;
        wrong += quant_pack_rows(fast, w, k) != finite || finite != (round % 11 != 0);
        wrong += memcmp(fast, slow, bytes) != 0 || fast[bytes] != 0xa5;
        back[count] = 0x1234;
        quant_unpack_rows(back, slow, k);
        for (int c = 0; c < k; c++) {
            float column[GROUP];
            plain_numbers(column, slow + c * GROUP_BYTES, GROUP);
            for (int r = 0; r < GROUP; r++) {
                const f16 is = back[(size_t)r * k + c];
                wrong += isnan(column[r]) ? !is_nan_half(is) : is != f32_to_f16(column[r]);
            }
        }
        wrong += back[count] != 0x1234;
        free(w), free(back), free(fast), free(slow);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void heads_have_the_plain_function_s_bytes(void) {
    int wrong = 0;
    for (int round = 0; round < 2000; round++) {
        int hd = 16 * (1 + round % 12), nh = 1 + (int)random_bits(4);
        size_t size = quant_bytes(hd);
        f16 *x = (f16 *)xcalloc((size_t)nh * hd, 2); /* no more than is there, for the sanitizer */
        uint8_t *fast = (uint8_t *)xcalloc(nh * size + 1, 1), *slow = (uint8_t *)xcalloc(nh * size, 1);
        memset(fast, 0xa5, nh * size + 1);
        fill(x, (size_t)nh * hd, (int)random_bits(NKINDS_OF_DATA));
        if (round % 11 == 0) x[random_bits(nh * hd)] = 0xfc00;
        bool finite = true;
        for (int h = 0; h < nh; h++) finite = plain_pack(slow + h * size, x + h * hd, 1, hd) && finite;
        wrong += quant_pack_heads(fast, x, nh, hd) != finite || finite != (round % 11 != 0);
        wrong += memcmp(fast, slow, nh * size) != 0 || fast[nh * size] != 0xa5;
        free(x), free(fast), free(slow);
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

CU_TestInfo tests[] = {
    {"every number comes back within half a step and one rounding",
     every_number_comes_back_within_half_a_step_and_one_rounding},
    {"a step is no longer and no shorter than the range asks for",
     a_step_is_no_longer_and_no_shorter_than_the_range_asks_for},
    {"the order of numbers is kept, and the ends stay", the_order_of_numbers_is_kept_and_the_ends_stay},
    {"what lies on the grid comes back exactly and packs to the same bytes",
     what_lies_on_the_grid_comes_back_exactly_and_packs_to_the_same_bytes},
    {"rounding again moves a number by less than a step", rounding_again_moves_a_number_by_less_than_a_step},
    {"rounding is packing and unpacking", rounding_is_packing_and_unpacking},
    {"a group of 4 bits has the bytes that one finds by hand", a_group_of_4_bits_has_the_bytes_that_one_finds_by_hand},
    {"groups of 3 bits are rounded as one finds by hand", groups_of_3_bits_are_rounded_as_one_finds_by_hand},
    {"bytes are four and a half bits a number in the paper's groups",
     bytes_are_four_and_a_half_bits_a_number_in_the_paper_s_groups},
    {"what is not finite is told, and poisons its group alone", what_is_not_finite_is_told_and_poisons_its_group_alone},
    {"rows have the plain functions' bytes and numbers", rows_have_the_plain_functions_bytes_and_numbers},
    {"heads have the plain function's bytes", heads_have_the_plain_function_s_bytes},
    CU_TEST_INFO_NULL,
};
