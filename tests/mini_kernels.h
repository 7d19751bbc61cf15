/* mini_kernels.h: the attention of mini.cu, for a grade. Its emulation of a GPU is its own, and so it is a library of its
 * own: a program has one of flexgen.cu already. */
#ifndef MINI_KERNELS_H
#define MINI_KERNELS_H
#include <stdbool.h>

/* Rows of queries (rows, nh, hd), of which number r sees first + r tokens; k and v are (tokens, nh, hd). */
typedef struct {
    int rows, first, nh, hd;
    const float *q, *k, *v;
    bool halves;      /* True for a cache of F16, false for the floats of a prefill. */
    const bool *kept; /* (nh, tokens), of which tokens v is read; NULL: of all */
} MiniAttention;

// clang-format off
/* Has attend_kernel compute o (rows, nh, hd), of which `room` floats are brought there and back. */
#ifdef __cplusplus
extern "C"
#endif
void mini_attend(float *o, int room, const MiniAttention *a);
// clang-format on

#endif
