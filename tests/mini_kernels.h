/* mini_kernels.h: the attention of mini.cu, for an exam, which is C. */
#ifndef MINI_KERNELS_H
#define MINI_KERNELS_H

/* Rows of queries (rows, nh, hd), of which number r sees first + r tokens; k and v are (tokens, nh, hd). */
typedef struct {
    int rows, first, nh, hd;
    const float *q, *k, *v;
    int halves;      /* 1 for a cache of F16, 0 for the floats of a prefill. */
    const int *kept; /* (nh, tokens), of which tokens v is read; NULL: of all */
} MiniAttention;

// clang-format off
/* Has attend_kernel compute o (rows, nh, hd), of which `room` floats are brought there and back. Returns the most halves that
 * one thread has read. */
#ifdef __cplusplus
extern "C"
#endif
long mini_attend(float *o, int room, const MiniAttention *a);
// clang-format on

#endif
