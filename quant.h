/* quant.h: group-wise quantization (section 5).
 *
 * A group of n numbers, n <= quant.group, is 4 + codes bytes: its min and its scale, F16, little-endian, then a code of
 * quant.bits (2 to 8) for each number, then zeros to a whole multiple of 4 bytes.
 *     scale = (max - min) / (2^bits - 1), rounded up to F16      code = round((x - min) / scale)
 * What comes back is F16(min + scale * code): within half a scale and F16's rounding of x, exact in a constant group. Codes
 * of 4 bits lie as SIMD reads them: number i in byte i / 32 * 16 + i % 16, in its low half where i % 32 < 16, else in its
 * high half. Codes of another width are a string of bits, the first lowest. */
#ifndef QUANT_H
#define QUANT_H
#include "util.h"
#ifdef __cplusplus
extern "C" {
#endif

/* How numbers are packed: `bits` each, in groups of `group`. bits 0: they are not. */
typedef struct {
    uint16_t bits, group;
} Quant;

/* Bytes of n numbers in groups, one after the other; the last may be shorter. */
size_t quant_bytes(Quant quant, int n);
/* Packs x[0], x[stride], ... x[(n-1) stride]. False where one of them is not finite; its group then gives NaN. */
bool quant_pack(uint8_t *to, const f16 *x, size_t stride, int n, Quant quant);
void quant_unpack(f16 *x, size_t stride, const uint8_t *from, int n, Quant quant);

/* A weight w (n, k) is grouped along n, its output channels, which lie k numbers apart. Packed, a group is contiguous: the
 * one that begins at (g * group, c) is at byte (g * k + c) * quant_bytes(quant, group). If n is no multiple of group, the
 * last row of groups still has room for whole ones. */
size_t quant_matrix_bytes(Quant quant, int n, int k);
/* One row of groups: rows <= group rows of w. Fast; the same bytes as quant_pack. */
bool quant_pack_rows(uint8_t *to, const f16 *w, int rows, int k, Quant quant);
void quant_unpack_rows(f16 *w, const uint8_t *from, int rows, int k, Quant quant);

/* A token's k or v, x (nh, hd), is grouped within heads: head h begins at byte h quant_bytes(quant, hd). Fast. */
bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd, Quant quant);
/* Whether attention takes such heads as codes and unpacks none of them. Of each group it then adds
 *     K   min * sum of q + scale * sum of q code          to a token's score
 *     V   sum of weight min + sum of (weight scale) code   to an element of the output
 * so that a packed number counts as min + scale * code, which is not rounded to F16. */
static inline bool quant_factored(Quant quant, int hd) { return quant.bits == 4 && quant.group == 64 && hd % 16 == 0; }

#ifdef __cplusplus
}
#endif
#endif
