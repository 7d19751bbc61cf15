/* quant.h: group-wise quantization (section 5).
 *
 * Stored are 4 bits in groups of 64 numbers. A group is its min and its scale, F16, little-endian,
 * then the codes:
 *     scale = (max - min) / 15, rounded up to F16      code = round((x - min) / scale) What comes
 * back is F16(min + scale * code): within half a scale and F16's rounding of x, exact in a constant
 * group. Codes lie as SIMD reads them: number i in byte i / 32 * 16 + i % 16, in its low half where
 * i % 32 < 16, else in its high half. The last group of a head may be shorter: heads are whole
 * sixteens of numbers, and 16 of them take as many bytes as 32.
 *
 * Other widths and groups are not stored. quant_round shows what they would do to numbers that stay
 * F16. */
#ifndef QUANT_H
#define QUANT_H
#include "base/base.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { GROUP = 64, GROUP_HEADER = 4, GROUP_BYTES = GROUP_HEADER + GROUP / 2 };

/* Bytes of n numbers of a head, which are whole sixteens. */
HOST_AND_GPU static inline size_t quant_bytes(int n) {
    return (size_t)(n / GROUP) * GROUP_BYTES +
           (n % GROUP ? GROUP_HEADER + (n % GROUP + 31) / 32 * 16 : 0);
}

/* A weight w (n, k), both multiples of GROUP, is grouped along n, its output channels, which lie k
 * numbers apart. Packed, a group is contiguous: the one that begins at (g * GROUP, c) is at byte (g
 * * k + c) * GROUP_BYTES. */
static inline size_t quant_matrix_bytes(int n, int k) {
    return (size_t)(n / GROUP) * k * GROUP_BYTES;
}
/* One row of groups: GROUP rows of w. False where a number is not finite; its group then gives NaN.
 */
bool quant_pack_rows(uint8_t *to, const f16 *w, int k);
void quant_unpack_rows(f16 *w, const uint8_t *from, int k);

/* A token's k or v, x (nh, hd), is grouped within heads: head h begins at byte h quant_bytes(hd).
 * Attention takes heads as codes and unpacks none of them. Of each group it adds
 *     K   min * sum of q + scale * sum of q code          to a token's score
 *     V   sum of weight min + sum of (weight scale) code   to an element of the output
 * so that a packed number counts as min + scale * code, which is not rounded to F16. */
bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd);

/* A study: codes of so many bits, 2 to 8, in groups of so many numbers. bits 0: none. */
typedef struct {
    uint16_t bits, group;
} Quant;
static inline bool is_study(Quant asked) { return asked.bits != 4 || asked.group != GROUP; }
/* x[0], x[stride], ... x[(n-1) stride] become what they would come back as; the last group may be
 * shorter. False as above.
 */
bool quant_round(f16 *x, size_t stride, int n, Quant quant);

#ifdef __cplusplus
}
#endif
#endif
