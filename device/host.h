/* host.h: what the three files of the device that is this CPU share: tiles of few rows, vectors of every type of number.
 * Read next: simd.h, the vectors. */
#ifndef HOST_H
#define HOST_H
#include "device/device.h"
#include "device/simd.h"

/* The ops of these names (device.h), of the files beside host.c. */
void host_linear(const Op *op);
void host_attend_prefill(const Op *op);
void host_attend(const Op *op);
void host_select(const Op *op);
void host_weigh(const Op *op);

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

/* Calls tile(..., mr) with each possible number of rows as a constant. */
#define FOR_ROWS(mr, tile, ...)            \
    do {                                   \
        if (mr == 1) tile(__VA_ARGS__, 1); \
        if (mr == 2) tile(__VA_ARGS__, 2); \
        if (mr == 3) tile(__VA_ARGS__, 3); \
        if (mr == 4) tile(__VA_ARGS__, 4); \
        if (mr == 5) tile(__VA_ARGS__, 5); \
        if (mr == 6) tile(__VA_ARGS__, 6); \
    } while (0)

INLINE V load_any(const void *p, Type type, size_t at, int n) {
    if (type == F16) return v_load_f16_part((const f16 *)p + at, n);
    if (type == F32) return v_load_part((const float *)p + at, n);
    VH upper = {0}; /* BF16 is the upper half of a float */
    memcpy(&upper, (const f16 *)p + at, (size_t)imin(n, VL) * sizeof(f16));
    return (V)(__builtin_convertvector(upper, VI) << 16);
}

INLINE void store_any(void *p, Type type, size_t at, V v, int n) {
    if (type == F32)
        v_store_part((float *)p + at, v, n);
    else
        v_store_f16_part((f16 *)p + at, v, n);
}

#endif
