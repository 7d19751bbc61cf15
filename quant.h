/* quant.h: group-wise quantization (section 5).
 *
 * Numbers are stored in 4 bits, in groups of 64. A group holds its min and its scale (F16,
 * little-endian), then its codes:
 *     scale = (max - min) / 15, rounded up to F16 (down near F16's limit)
 *     code  = round((x - min) / scale)
 * Unpacking gives F16(min + scale * code), which differs from x by at most half a scale and F16's
 * rounding, and is exact in a constant group. Codes lie as SIMD reads them: number i is in byte
 * i / 32 * 16 + i % 16, in its low half if i % 32 < 16, else in its high half. The last group of a
 * head may be shorter. A head has a multiple of 16 numbers, and the codes of 16 numbers take as
 * many bytes as those of 32.
 *
 * Other widths and group sizes are not stored; quant_round shows their effect on numbers that stay
 * F16. */
#ifndef QUANT_H
#define QUANT_H
#include "base/base.h"
#ifdef __cplusplus
extern "C" {
#endif

enum { GROUP = 64, GROUP_HEADER = 4, GROUP_BYTES = GROUP_HEADER + GROUP / 2 };

/* Returns the bytes that n numbers of a head take when packed; n is a multiple of 16. */
HOST_AND_GPU static inline size_t quant_bytes(int n) {
    return (size_t)(n / GROUP) * GROUP_BYTES +
           (n % GROUP ? GROUP_HEADER + (n % GROUP + 31) / 32 * 16 : 0);
}

/* Returns the bytes of a packed weight w (n, k); k is a multiple of GROUP. Groups run along n, the
 * output channels, which lie k numbers apart. A packed group is contiguous: the group that begins
 * at (g * GROUP, c) is at byte (g * k + c) * GROUP_BYTES. So as a Tensor of type U8 the packed
 * matrix has the shape (n / GROUP, k * GROUP_BYTES). The n of a layer's matrix is a multiple of
 * GROUP; that of a token table need not be, and then its last row is repeated to fill the groups.
 */
static inline size_t quant_matrix_bytes(int n, int k) {
    return (size_t)ceil_div(n, GROUP) * k * GROUP_BYTES;
}
/* Packs one row of groups, which is GROUP rows of w. Returns false if a number is not finite; its
 * group then unpacks to NaN. Products on the CPU take a number as min + scale * code, not rounded
 * to F16. */
bool quant_pack_rows(uint8_t *to, const f16 *w, int k);
void quant_unpack_rows(f16 *w, const uint8_t *from, int k);
/* Unpacks row i of one row of groups: the k numbers of a token in a packed token table. */
void quant_unpack_row(f16 *x, const uint8_t *from, int i, int k);

/* Packs a token's k or v, x (nh, hd), in groups within heads: head h begins at byte
 * h quant_bytes(hd). Returns false as above. Heads are never unpacked: attention reads the codes
 * (device/host_attend.c), and takes a packed number as min + scale * code, not rounded to F16. */
bool quant_pack_heads(uint8_t *to, const f16 *x, int nh, int hd);

/* A quantization to study: codes of 2 to 8 bits, in groups of any size; none if bits is 0. */
typedef struct {
    uint16_t bits, group;
} Quant;
/* Returns true for the one quantization in which numbers are also stored. */
static inline bool is_stored(Quant asked) { return asked.bits == 4 && asked.group == GROUP; }
/* Rounds x[0], x[stride], ... x[(n-1) stride] to the values that packing and unpacking them would
 * give; the last group may be shorter. Returns false as above. */
bool quant_round(f16 *x, size_t stride, int n, Quant quant);

#ifdef __cplusplus
}
#endif
#endif
