/* tensor_core.h: the instructions for matrices and for copies into shared memory for which CUDA C++
 * has no names. flexgen.cu's products with packed weights, and its attention, are written with
 * them.
 *
 * A warp multiplies small matrices, of which each of its 32 threads holds a part. Below, l is the
 * place of a thread in its warp, r is l / 4 and c is l % 4 * 2. A word holds two halfs, the first
 * in its low bits. The layouts are those of the PTX ISA, under "Matrix Fragments for mma.m16n8k16"
 * and "ldmatrix". All threads of a warp must call multiply_add and load_... together.
 * tests/cuda_cpu.h has the same functions for a CPU.
 * Read next: flexgen.cu. */
#pragma once
#ifdef __CUDACC__
#include <cuda_fp16.h>

/* Returns the address of shared memory as PTX counts it. */
static __device__ unsigned shared_address(const void *p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

/* Computes d (16, 8) += a (16, 16) b (16, 8). Thread l holds
 *   a[0..3]   rows r, r + 8, r, r + 8 at columns c, c, c + 8, c + 8 and their neighbours to the
 *             right;
 *   b[0..1]   rows c, c + 8 and the rows below them, at column r;
 *   d[0..3]   rows r, r, r + 8, r + 8 at columns c, c + 1, c, c + 1. */
static __device__ void multiply_add(float d[4], const unsigned a[4], const unsigned b[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int k = 0; k < 2; k++) /* eight columns of a and rows of b at a time */
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

/* Loads four 8 x 8 matrices of halfs from shared memory. In thread l, `row` is where row l % 8 of
 * matrix l / 8 begins, 16-byte aligned. m[i] becomes row r of matrix i at columns c and c + 1. */
static __device__ void load_matrices(unsigned m[4], const half *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* Like load_matrices, with each matrix transposed: m[i] becomes rows c and c + 1 of matrix i at
 * column r. */
static __device__ void load_transposed(unsigned m[4], const half *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* A copy into shared memory that is on its way. sm_75 has no asynchronous copies: there a copy
 * waits in registers. */
struct Copy {
    enum : unsigned { NOWHERE = ~0u };
#if __CUDA_ARCH__ < 800
    uint4 bits;
    unsigned to = NOWHERE; /* where in shared memory */
#endif
};

/* Begins to copy 16 bytes from memory into shared memory, both 16-byte aligned; zeros if not
 * `there`. This thread sees them once it has waited for its copies, others after a barrier behind
 * that. */
static __device__ Copy copy_async(void *to, const void *from, bool there) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
    return {};
#else
    return {there ? *(const uint4 *)from : make_uint4(0, 0, 0, 0), shared_address(to)};
#endif
}

/* Closes a set of copies: those since the set before. (PTX calls a set a group.) */
static __device__ void close_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all sets of copies but the OPEN latest. On sm_75 it writes these copies into shared
 * memory, which must be all that are on their way; those that were never begun go NOWHERE. */
template <int OPEN, int N>
static __device__ void wait_for_copies(const Copy (&copies)[N]) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
#else
    for (const Copy &copy : copies)
        if (copy.to != Copy::NOWHERE)
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(copy.to),
                         "r"(copy.bits.x), "r"(copy.bits.y), "r"(copy.bits.z), "r"(copy.bits.w)
                         : "memory");
#endif
}

/* Returns 2^x, to two units in the last place; 0 instead of numbers below 2^-126. */
static __device__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns (x & mask) | bits by one instruction; the compiler makes two when both are constants. */
static __device__ unsigned and_or(unsigned x, unsigned mask, unsigned bits) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}
#endif
