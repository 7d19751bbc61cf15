/* quant.c: group-wise quantization (section 5, "group-wise quantization"), to be read beside the
 * paper's formula
 *
 *     x_quant = round((x - min) / (max - min) * (2^b - 1))
 *
 * for each group of g contiguous numbers. The paper uses b = 4 and g = 64. With the group's min and
 * scale in F16, this takes 4.5 bits per number. quant.h describes the layout. The plain function,
 * which rounds numbers for any b and g, comes first; the fast functions, which pack 4 bits in
 * groups of 64, follow.
 *
 * Contract: a finite number comes back within half a scale and one rounding to F16. A number that
 * is not finite makes its whole group NaN, so that no finite number hides it.
 * Read next: lp.c. */
#include "quant.h"

#include <math.h>

#include "base/simd.h"

// -------------------------------------------------------------------------------------------------
// One group
// -------------------------------------------------------------------------------------------------

enum { LEVELS = 15 }; /* the largest code of 4 bits */

/* Returns (max - min) / levels as F16. It is rounded up, so that the largest code reaches max
 * however coarse F16 is there, or rounded down if the largest code would exceed F16's range. */
static f16 group_scale(float min, float max, int levels) {
    float exact = (max - min) / levels;
    f16 scale = f32_to_f16(exact);
    /* The F16 after a number has the next bit pattern. */
    if (f16_to_f32(scale) < exact)
        scale++;
    if (min + levels * f16_to_f32(scale) >= 65520) /* F16 rounds it to infinity */
        scale--;
    return scale;
}

/* Writes a group's min and scale. Returns 1 / scale, or 0 if all numbers are equal or one is not
 * finite. */
static float put_header(void *to, float min, float max, bool finite, int levels) {
    min += 0; /* -0 becomes 0, so that it does not matter which of the two comes first */
    max += 0;
    const f16 poison = 0x7e00; /* NaN */
    const f16 header[2] = {finite ? f32_to_f16(min) : poison,
                           finite ? group_scale(min, max, levels) : 0};
    memcpy(to, header, GROUP_HEADER);
    return header[1] ? 1 / f16_to_f32(header[1]) : 0;
}

/* Rounds the numbers of one group. Returns false if one is not finite; all are then NaN. */
static bool round_group(f16 *x, size_t stride, int n, int levels) {
    float min = INFINITY, max = -INFINITY;
    bool finite = true;
    f16 header[2];
    for (int i = 0; i < n; i++) {
        float value = f16_to_f32(x[i * stride]);
        min = value < min ? value : min;
        max = value > max ? value : max;
        finite = finite && isfinite(value);
    }
    float inverse = put_header(header, min, max, finite, levels);
    for (int i = 0; i < n; i++) {
        float code = finite ? rintf((f16_to_f32(x[i * stride]) - min) * inverse) : 0;
        x[i * stride] = f32_to_f16(f16_to_f32(header[0]) + f16_to_f32(header[1]) * code);
    }
    return finite;
}

bool quant_round(f16 *x, size_t stride, int n, Quant quant) {
    bool finite = true;
    for (int i = 0; i < n; i += quant.group)
        finite &=
            round_group(x + i * stride, stride, imin(quant.group, n - i), (1 << quant.bits) - 1);
    return finite;
}

// -------------------------------------------------------------------------------------------------
// The trunk ends here: the functions below pack the same codes, a vector at a time. On a first
// reading go on with lp.c.
// -------------------------------------------------------------------------------------------------

// -------------------------------------------------------------------------------------------------
// Groups of 4 bits, a vector at a time
//
// base/simd.h has the vectors: V of VL floats, VI of as many integers, VB of as many bytes.
//
// VL neighbouring columns of a matrix are packed together: element l of a vector works on column l,
// whose group runs down the rows. The codes of 32 rows take 16 bytes, of which 4 bytes (8 nibbles,
// u = 0 to 7) are packed at a time. The picture shows which rows have their codes in each byte:
//
//     byte          0   1   2   3  |  4   5  ..  |  .. 15  | 16  17  ..
//     high half    16  17  18  19  | 20  21      |     31  | 48  49
//     low half      0   1   2   3  |  4   5      |     15  | 32  33
//                  u = 0 is row 0, u = 1 row 16, u = 2 row 1, u = 3 row 17 ...
//
// A group of the KV cache lies in a row, so its numbers themselves fill the vectors.
// -------------------------------------------------------------------------------------------------

/* Returns codes of at most 15, rounded as rintf rounds. Floats around 1.5 2^23 are 1 apart. So the
 * sum is rounded to the nearest integer, or to the even one if two are equally near, and the low
 * bits of the float are the low bits of that integer. */
INLINE VI nearest(V x) { return (VI)(x + 0x1.8p23f) & LEVELS; } /* (VI) keeps bits, not values */

/* Returns the row whose code is nibble u of the 4 bytes from byte `at` on: half u % 2 of byte
 * at + u / 2 in the picture. */
INLINE int nibble_row(int at, int u) {
    return (at + u / 2) / 16 * 32 + (at + u / 2) % 16 + u % 2 * 16;
}

/* Packs the groups of VL columns of w (GROUP, k). Returns false if a number is not finite. */
static bool pack_columns(uint8_t *to, const f16 *w, int k) {
    V min = v_set(INFINITY), max = -min, zero = {0}, inverse = {0};
    bool finite = true;
    for (int i = 0; i < GROUP; i++) {
        V x = v_load_f16(w + (size_t)i * k);
        /* The processor's own prefetching does not follow so many rows. */
        __builtin_prefetch(w + (size_t)i * k + 4 * VL, 0, 2);
        min = v_min(min, x);
        max = v_max(max, x);
        zero += x - x; /* NaN if a number of the column is not finite */
    }
    for (int l = 0; l < VL; l++) {
        inverse[l] = put_header(to + l * GROUP_BYTES, min[l], max[l], zero[l] == 0, LEVELS);
        finite &= zero[l] == 0;
    }
    for (int at = 0; at < GROUP / 2; at += 4) {
        VI word = {0};
        for (int u = 0; u < 8; u++) {
            V x = v_load_f16(w + (size_t)nibble_row(at, u) * k);
            /* 0 in a group that is not finite: its inverse is 0, and NaN's low bits are 0 too */
            word |= nearest((x - min) * inverse) << 4 * u;
        }
        for (int l = 0; l < VL; l++) {
            uint32_t codes = word[l];
            memcpy(to + l * GROUP_BYTES + GROUP_HEADER + at, &codes, sizeof codes);
        }
    }
    return finite;
}

/* Unpacks the groups of VL columns, as pack_columns has packed them, to w (GROUP, k). */
static void unpack_columns(f16 *w, const uint8_t *from, int k) {
    float min[VL], scale[VL];
    for (int l = 0; l < VL; l++) {
        f16 header[2];
        memcpy(header, from + l * GROUP_BYTES, sizeof header);
        min[l] = f16_to_f32(header[0]);
        scale[l] = f16_to_f32(header[1]);
    }
    for (int at = 0; at < GROUP / 2; at += 4) {
        VI word = {0};
        for (int l = 0; l < VL; l++)
            memcpy((char *)&word + 4 * l, from + l * GROUP_BYTES + GROUP_HEADER + at, 4);
        for (int u = 0; u < 8; u++) {
            V code = __builtin_convertvector((word >> (4 * u)) & LEVELS, V);
            v_store_f16_part(w + (size_t)nibble_row(at, u) * k, v_load(min) + v_load(scale) * code,
                             VL);
        }
    }
}

/* Packs the codes of 16 or 32 numbers in 16 bytes. The codes of the first 16 numbers go to the low
 * halves of the bytes, those of the others to the high halves, which are 0 if there are no others.
 */
static void pack_block(uint8_t *codes, const f16 *x, int n, float min, float inverse) {
    uint8_t code[32] = {0};
    for (int i = 0; i < n; i += VL) {
        VB some = __builtin_convertvector(nearest((v_load_f16(x + i) - min) * inverse), VB);
        memcpy(code + i, &some, sizeof some);
    }
    for (int i = 0; i < 16; i++)
        codes[i] = (uint8_t)(code[i] | code[16 + i] << 4);
}

/* Packs a group of n contiguous numbers; n is a multiple of 16, and so of VL. Returns false if a
 * number is not finite. */
static bool pack_run(uint8_t *to, const f16 *x, int n) {
    V low = v_set(INFINITY), high = -low, zero = {0};
    for (int i = 0; i < n; i += VL) {
        V some = v_load_f16(x + i);
        low = v_min(low, some);
        high = v_max(high, some);
        zero += some - some;
    }
    float min = -v_largest(-low);
    bool finite = v_sum(zero) == 0;
    float inverse = put_header(to, min, v_largest(high), finite, LEVELS);
    for (int i = 0; i < n; i += 32)
        pack_block(to + GROUP_HEADER + i / 2, x + i, imin(32, n - i), min, inverse);
    return finite;
}

// -------------------------------------------------------------------------------------------------
// Matrices, and heads of the KV cache
// -------------------------------------------------------------------------------------------------

bool quant_pack_rows(uint8_t *to, const f16 *w, int k) {
    bool finite = true;
    for (int c = 0; c < k; c += VL)
        finite &= pack_columns(to + (size_t)c * GROUP_BYTES, w + c, k);
    return finite;
}

void quant_unpack_rows(f16 *w, const uint8_t *from, int k) {
    for (int c = 0; c < k; c += VL)
        unpack_columns(w + c, from + (size_t)c * GROUP_BYTES, k);
}

void quant_unpack_row(f16 *x, const uint8_t *from, int i, int k) {
    int at = GROUP_HEADER + i / 32 * 16 + i % 16, shift = i % 32 / 16 * 4;
    for (int c = 0; c < k; c++, from += GROUP_BYTES) {
        f16 header[2];
        memcpy(header, from, sizeof header);
        x[c] = f32_to_f16(f16_to_f32(header[0]) +
                          f16_to_f32(header[1]) * (from[at] >> shift & LEVELS));
    }
}

bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd) {
    bool finite = true;
    for (int h = 0; h < nh; h++, x += hd, to += quant_bytes(hd))
        for (int i = 0; i < hd; i += GROUP)
            finite &= pack_run(to + i / GROUP * GROUP_BYTES, x + i, imin(GROUP, hd - i));
    return finite;
}
