/* quant.c: group-wise quantization (section 5, "group-wise quantization"), to be read beside its formula
 *
 *     x_quant = round((x - min) / (max - min) * (2^b - 1))
 *
 * for each group of g contiguous numbers: g = 64 and b = 4 in the paper, 4.5 bits a number with a group's min and scale in
 * F16. flexgen.h has the layout. First the plain functions, a number at a time; then the fast ones, which give the same
 * bytes. Contract: what is finite comes back within half a scale and one rounding to F16; what is not poisons its group, so
 * that it cannot pass for a number. Read next: host.c, which multiplies and attends to packed numbers without unpacking
 * them to memory. */
#include <math.h>

#include "flexgen.h"

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

/* Where number i's code begins. */
typedef struct {
    size_t byte;
    int shift;
} Place;

static Place code_place(Quant quant, int i) {
    if (quant.bits == 4) return (Place){(size_t)i / 32 * 16 + i % 16, i % 32 < 16 ? 0 : 4};
    return (Place){(size_t)i * quant.bits / 8, i * quant.bits % 8};
}

static void put_code(uint8_t *codes, Quant quant, int i, unsigned code) {
    Place at = code_place(quant, i);
    codes[at.byte] |= (uint8_t)(code << at.shift);
    if (at.shift + quant.bits > 8) codes[at.byte + 1] |= (uint8_t)(code >> (8 - at.shift));
}

static unsigned get_code(const uint8_t *codes, Quant quant, int i) {
    Place at = code_place(quant, i);
    unsigned bits = codes[at.byte];
    if (at.shift + quant.bits > 8) bits |= (unsigned)codes[at.byte + 1] << 8;
    return bits >> at.shift & ((1u << quant.bits) - 1);
}

static void put_f16(uint8_t *to, f16 x) { to[0] = x & 0xff, to[1] = x >> 8; }
static f16 get_f16(const uint8_t *from) { return (f16)(from[0] | from[1] << 8); }

/* (max - min) / (2^bits - 1) as F16, rounded up, so that the largest code reaches max however coarse F16 is there; down
 * where the largest code would pass F16's range. */
static f16 group_scale(float min, float max, Quant quant) {
    const float levels = (float)((1 << quant.bits) - 1), exact = (max - min) / levels;
    f16 scale = f32_to_f16(exact);
    if (f16_to_f32(scale) < exact) scale++;
    if (min + levels * f16_to_f32(scale) >= 65520) scale--;
    return scale;
}

static bool pack_group(uint8_t *to, const f16 *x, size_t stride, int n, Quant quant) {
    float min = INFINITY, max = -INFINITY, zero = 0;
    for (int i = 0; i < n; i++) {
        float value = f16_to_f32(x[i * stride]);
        min = value < min ? value : min, max = value > max ? value : max;
        zero += value - value; /* NaN of what is not finite */
    }
    memset(to, 0, group_bytes(quant, n));
    put_f16(to, zero == 0 ? f32_to_f16(min) : 0x7e00);
    if (zero != 0) return false;
    f16 scale = group_scale(min, max, quant);
    float inverse = scale ? 1 / f16_to_f32(scale) : 0;
    put_f16(to + 2, scale);
    for (int i = 0; i < n; i++)
        put_code(to + HEADER, quant, i, (unsigned)rintf((f16_to_f32(x[i * stride]) - min) * inverse));
    return true;
}

static void unpack_group(f16 *x, size_t stride, const uint8_t *from, int n, Quant quant) {
    float min = f16_to_f32(get_f16(from)), scale = f16_to_f32(get_f16(from + 2));
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
        finite = pack_group(to, x + i * stride, stride, count, quant) && finite;
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
// Matrices, and heads of the KV cache
// ---------------------------------------------------------------------------------------------------------------

size_t quant_matrix_bytes(Quant quant, int n, int k) {
    return (size_t)((n + quant.group - 1) / quant.group) * k * quant_bytes(quant, quant.group);
}

bool quant_pack_rows(uint8_t *to, const f16 *w, int rows, int k, Quant quant) {
    const size_t size = quant_bytes(quant, quant.group);
    bool finite = true;
    memset(to, 0, k * size);
    for (int c = 0; c < k; c++) finite = quant_pack(to + c * size, w + c, k, rows, quant) && finite;
    return finite;
}

void quant_unpack_rows(f16 *w, const uint8_t *from, int rows, int k, Quant quant) {
    const size_t size = quant_bytes(quant, quant.group);
    for (int c = 0; c < k; c++) quant_unpack(w + c, k, from + c * size, rows, quant);
}

bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd, Quant quant) {
    bool finite = true;
    for (int h = 0; h < nh; h++) finite = quant_pack(to + h * quant_bytes(quant, hd), x + h * hd, 1, hd, quant) && finite;
    return finite;
}
