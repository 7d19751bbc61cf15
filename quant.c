/* quant.c: group-wise quantization (section 5, "group-wise quantization"), to be read beside the paper's formula
 *
 *     x_quant = round((x - min) / (max - min) * (2^b - 1))
 *
 * for each group of g contiguous numbers. The paper takes b = 4 and g = 64, which is 4.5 bits a number with the group's min
 * and scale in F16. The layout is in quant.h. First come the plain functions, which take a number at a time; then the fast
 * ones for 4 bits, which give the same bytes.
 *
 * Contract: a finite number comes back within half a scale and one rounding to F16. One that is not finite makes its whole
 * group NaN, so that it cannot pass for a number. Read next: lp.c, the solver of the policy search. */
#include "quant.h"

#include <math.h>

#include "device/simd.h"

// ---------------------------------------------------------------------------------------------------------------
// One group
// ---------------------------------------------------------------------------------------------------------------

enum { HEADER = 4 }; /* bytes of min and scale */

/* Bytes of a group of n numbers. */
static size_t group_bytes(Quant quant, int n) {
    int last = n % 32 < 16 ? n % 32 : 16; /* of 4 bits: a byte holds numbers that are 16 apart */
    size_t codes = quant.bits == 4 ? (size_t)n / 32 * 16 + last : ((size_t)n * quant.bits + 7) / 8;
    return HEADER + (codes + 3) / 4 * 4;
}

/* Where number i's code begins, in bits. */
static size_t code_at(Quant quant, int i) {
    return quant.bits == 4 ? (size_t)(i / 32 * 16 + i % 16) * 8 + i % 32 / 16 * 4 : (size_t)i * quant.bits;
}

static void put_code(uint8_t *codes, Quant quant, int i, unsigned code) {
    size_t at = code_at(quant, i);
    codes[at / 8] |= (uint8_t)(code << at % 8);
    if (at % 8 + quant.bits > 8) codes[at / 8 + 1] |= (uint8_t)(code >> (8 - at % 8));
}

static unsigned get_code(const uint8_t *codes, Quant quant, int i) {
    size_t at = code_at(quant, i);
    unsigned bits = codes[at / 8];
    if (at % 8 + quant.bits > 8) bits |= (unsigned)codes[at / 8 + 1] << 8;
    return bits >> at % 8 & ((1u << quant.bits) - 1);
}

/* (max - min) / (2^bits - 1) as F16, rounded up, so that the largest code reaches max however coarse F16 is there; down
 * where the largest code would pass F16's range. */
static f16 group_scale(float min, float max, Quant quant) {
    const float levels = (float)((1 << quant.bits) - 1), exact = (max - min) / levels;
    f16 scale = f32_to_f16(exact);
    if (f16_to_f32(scale) < exact) scale++;
    if (min + levels * f16_to_f32(scale) >= 65520) scale--;
    return scale;
}

/* Writes a group's min and scale; 1 / scale, or 0 where all are equal or one is not finite. */
static float put_header(uint8_t *to, float min, float max, bool finite, Quant quant) {
    min += 0, max += 0; /* -0, which is equal to 0, becomes it: which of them comes first must not matter */
    const f16 poison = 0x7e00, header[2] = {finite ? f32_to_f16(min) : poison, finite ? group_scale(min, max, quant) : 0};
    memcpy(to, header, HEADER);
    return header[1] ? 1 / f16_to_f32(header[1]) : 0;
}

static bool pack_group(uint8_t *to, const f16 *x, size_t stride, int n, Quant quant) {
    float min = INFINITY, max = -INFINITY, zero = 0;
    for (int i = 0; i < n; i++) {
        float value = f16_to_f32(x[i * stride]);
        min = value < min ? value : min, max = value > max ? value : max;
        zero += value - value; /* NaN of what is not finite */
    }
    memset(to, 0, group_bytes(quant, n));
    float inverse = put_header(to, min, max, zero == 0, quant);
    for (int i = 0; zero == 0 && i < n; i++)
        put_code(to + HEADER, quant, i, (unsigned)rintf((f16_to_f32(x[i * stride]) - min) * inverse));
    return zero == 0;
}

static void get_header(float *min, float *scale, const uint8_t *from) {
    f16 header[2];
    memcpy(header, from, HEADER);
    *min = f16_to_f32(header[0]), *scale = f16_to_f32(header[1]);
}

static void unpack_group(f16 *x, size_t stride, const uint8_t *from, int n, Quant quant) {
    float min, scale;
    get_header(&min, &scale, from);
    for (int i = 0; i < n; i++) x[i * stride] = f32_to_f16(min + scale * (float)get_code(from + HEADER, quant, i));
}

// ---------------------------------------------------------------------------------------------------------------
// Numbers in groups
// ---------------------------------------------------------------------------------------------------------------

size_t quant_bytes(Quant quant, int n) {
    int whole = n / quant.group, rest = n % quant.group;
    return whole * group_bytes(quant, quant.group) + (rest ? group_bytes(quant, rest) : 0);
}

bool quant_pack(uint8_t *to, const f16 *x, size_t stride, int n, Quant quant) {
    bool finite = true;
    for (int i = 0; i < n; i += quant.group) {
        int count = imin(quant.group, n - i);
        finite &= pack_group(to, x + i * stride, stride, count, quant);
        to += group_bytes(quant, count);
    }
    return finite;
}

void quant_unpack(f16 *x, size_t stride, const uint8_t *from, int n, Quant quant) {
    for (int i = 0; i < n; i += quant.group) {
        int count = imin(quant.group, n - i);
        unpack_group(x + i * stride, stride, from, count, quant);
        from += group_bytes(quant, count);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Groups of 4 bits, a vector at a time
//
// Of a matrix, VL neighbouring columns are packed together: lane l works on column l, whose group runs down the rows. 32
// rows have their codes in 16 bytes, which are made 4 bytes (8 nibbles, u = 0 to 7) at a time:
//
//     byte          0   1   2   3  |  4   5  ..  |  .. 15  | 16  17  ..
//     high half    16  17  18  19  | 20  21      |     31  | 48  49            the rows whose codes lie there
//     low half      0   1   2   3  |  4   5      |     15  | 32  33
//                  u = 0 is row 0, u = 1 row 16, u = 2 row 1, u = 3 row 17 ...
//
// A group of the KV cache lies in a row, so that its numbers themselves fill the vectors.
// ---------------------------------------------------------------------------------------------------------------

/* Codes as rintf rounds: x + 1.5 2^23 has the nearest integer in its low bits, of two the even one. Of at most 15. */
INLINE VI nearest(V x) { return (VI)(x + 0x1.8p23f) & 15; }

/* The row whose code is nibble u of the 4 bytes that begin at byte `at`, as in the picture. */
static int nibble_row(size_t at, int u) { return (int)((at + u / 2) / 16 * 32 + (at + u / 2) % 16 + u % 2 * 16); }

/* The groups of cols (at most VL) columns of w (rows, k). */
static bool pack_columns(uint8_t *to, const f16 *w, int rows, int k, int cols, Quant quant) {
    const size_t size = group_bytes(quant, quant.group), end = group_bytes(quant, rows) - HEADER;
    V min = v_set(INFINITY), max = -min, zero = {0}, inverse = {0};
    bool finite = true;
    for (int i = 0; i < rows; i++) {
        V x = v_load_f16_part(w + (size_t)i * k, cols);
        __builtin_prefetch(w + (size_t)i * k + 4 * VL, 0, 2); /* of so many rows the processor foresees none */
        min = v_min(min, x), max = v_max(max, x), zero += x - x;
    }
    for (int l = 0; l < cols; l++) {
        inverse[l] = put_header(to + l * size, min[l], max[l], zero[l] == 0, quant);
        finite &= zero[l] == 0;
    }
    for (size_t at = 0; at < end; at += 4) {
        VI word = {0};
        for (int u = 0; u < 8; u++) {
            if (nibble_row(at, u) >= rows) continue;
            V x = v_load_f16_part(w + (size_t)nibble_row(at, u) * k, cols);
            word |= nearest((x - min) * inverse) << 4 * u; /* 0 in a poisoned group, and NaN's low bits are 0 as well */
        }
        for (int l = 0; l < cols; l++) {
            uint32_t codes = word[l];
            memcpy(to + l * size + HEADER + at, &codes, sizeof codes);
        }
    }
    return finite;
}

static void unpack_columns(f16 *w, const uint8_t *from, int rows, int k, int cols, Quant quant) {
    const size_t size = group_bytes(quant, quant.group), end = group_bytes(quant, rows) - HEADER;
    float min[VL] = {0}, scale[VL] = {0};
    for (int l = 0; l < cols; l++) get_header(&min[l], &scale[l], from + l * size);
    for (size_t at = 0; at < end; at += 4) {
        VI word = {0};
        for (int l = 0; l < cols; l++) memcpy((char *)&word + 4 * l, from + l * size + HEADER + at, 4);
        for (int u = 0; u < 8; u++) {
            if (nibble_row(at, u) >= rows) continue;
            V code = __builtin_convertvector(word >> 4 * u & 15, V);
            v_store_f16_part(w + (size_t)nibble_row(at, u) * k, v_load(min) + v_load(scale) * code, cols);
        }
    }
}

/* The codes of n <= 32 numbers. */
static void pack_block(uint8_t *codes, const f16 *x, int n, float min, float inverse) {
    uint8_t code[32] = {0};
    for (int i = 0; i < n; i += VL) {
        VB some = __builtin_convertvector(nearest((v_load_f16_part(x + i, n - i) - min) * inverse), VB);
        memcpy(code + i, &some, n - i < VL ? (size_t)(n - i) : sizeof some);
    }
    for (int i = 0; i < 16; i++) code[i] |= (uint8_t)(code[16 + i] << 4);
    memcpy(codes, code, imin(n, 16));
}

/* A group of n neighbours. */
static bool pack_run(uint8_t *to, const f16 *x, int n, Quant quant) {
    if (n < VL) return pack_group(to, x, 1, n, quant);
    V low = v_set(INFINITY), high = -low, zero = {0};
    for (int i = 0; i < n; i += VL) { /* the last vector ends with the group, whatever it has seen before */
        V some = v_load_f16(x + imin(i, n - VL));
        low = v_min(low, some), high = v_max(high, some), zero += some - some;
    }
    const float min = -v_largest(-low);
    const bool finite = v_sum(zero) == 0;
    memset(to, 0, group_bytes(quant, n));
    float inverse = put_header(to, min, v_largest(high), finite, quant);
    for (int i = 0; finite && i < n; i += 32) pack_block(to + HEADER + i / 2, x + i, imin(32, n - i), min, inverse);
    return finite;
}

// ---------------------------------------------------------------------------------------------------------------
// Matrices, and heads of the KV cache
// ---------------------------------------------------------------------------------------------------------------

size_t quant_matrix_bytes(Quant quant, int n, int k) {
    return (size_t)((n + quant.group - 1) / quant.group) * k * quant_bytes(quant, quant.group);
}

bool quant_pack_rows(uint8_t *to, const f16 *w, int rows, int k, Quant quant) {
    const size_t size = quant_bytes(quant, quant.group);
    const int step = quant.bits == 4 ? VL : 1;
    bool finite = true;
    memset(to, 0, k * size);
    for (int c = 0; c < k; c += step)
        finite &= quant.bits == 4 ? pack_columns(to + c * size, w + c, rows, k, imin(VL, k - c), quant)
                                  : pack_group(to + c * size, w + c, k, rows, quant);
    return finite;
}

void quant_unpack_rows(f16 *w, const uint8_t *from, int rows, int k, Quant quant) {
    const size_t size = quant_bytes(quant, quant.group);
    const int step = quant.bits == 4 ? VL : 1;
    for (int c = 0; c < k; c += step)
        if (quant.bits == 4)
            unpack_columns(w + c, from + c * size, rows, k, imin(VL, k - c), quant);
        else
            unpack_group(w + c, k, from + c * size, rows, quant);
}

bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd, Quant quant) {
    bool finite = true;
    for (int h = 0; h < nh; h++, x += hd) {
        for (int i = 0; i < hd; i += quant.group) {
            int n = imin(quant.group, hd - i);
            finite &= quant.bits == 4 ? pack_run(to, x + i, n, quant) : pack_group(to, x + i, 1, n, quant);
            to += group_bytes(quant, n);
        }
    }
    return finite;
}
