/* mini_kernels.cpp: see mini_kernels.h. MINI_CU is mini.cu, made C++ for the emulation. */
#include <algorithm>
#include <vector>

/* How many halves each thread of each block of a kernel has read, so that one sees how they share the work. */
static std::vector<long> halves_read;
static float read_half(half h) {
    const size_t block = (size_t)blockIdx.y * gridDim.x + blockIdx.x, at = block * blockDim.x + threadIdx.x;
    if (at < halves_read.size()) halves_read[at]++;
    return cuda_cpu::to_float(h);
}
#undef __half2float
#define __half2float(h) read_half(h)

#include MINI_CU
#include "tests/mini_kernels.h"

/* Returns a copy of memory in the emulated GPU's. */
static void *to_gpu(const void *from, size_t bytes) {
    void *at;
    CUDA(cudaMalloc(&at, bytes));
    post_copy(at, from, bytes);
    CUDA(cudaStreamSynchronize(stream()));
    return at;
}

/* Returns numbers as a cache keeps them. */
static void *to_cache(const float *from, size_t n, int halves) {
    if (!halves) return to_gpu(from, n * sizeof *from);
    std::vector<half> rounded(n);
    for (size_t e = 0; e < n; e++) rounded[e] = __float2half(from[e]);
    return to_gpu(rounded.data(), n * sizeof(half));
}

/* Returns flags as a kernel reads them. */
static const bool *to_flags(const int *from, size_t n) {
    std::vector<uint8_t> flags(n);
    for (size_t e = 0; e < n; e++) flags[e] = from[e] != 0;
    return (const bool *)to_gpu(flags.data(), n);
}

long mini_attend(float *o, int room, const MiniAttention *a) {
    const size_t tokens = a->first + a->rows - 1, n = tokens * a->nh * a->hd;
    const int head_bytes = a->hd * (a->halves ? sizeof(half) : sizeof(float));
    float *out = (float *)to_gpu(o, room * sizeof *o);
    const float *q = (float *)to_gpu(a->q, (size_t)a->rows * a->nh * a->hd * sizeof *q);
    const uint8_t *k = (uint8_t *)to_cache(a->k, n, a->halves), *v = (uint8_t *)to_cache(a->v, n, a->halves);
    const bool *kept = a->kept ? to_flags(a->kept, tokens * a->nh) : NULL;
    halves_read.assign((size_t)a->nh * a->rows * THREADS, 0);
    LAUNCH(attend_kernel, dim3(a->nh, a->rows), out, q, k, v, a->halves ? HALVES : FLOATS, head_bytes, a->first, a->hd,
           kept);
    post_copy(o, out, room * sizeof *o);
    CUDA(cudaStreamSynchronize(stream()));
    return *std::max_element(halves_read.begin(), halves_read.end());
}
