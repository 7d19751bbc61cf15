/* tensor_core.h: the instructions for matrices that CUDA C++ has no names for. flexgen.cu's products with packed weights
 * are written with them.
 *
 * A warp multiplies small matrices that are dealt to its 32 lanes: lane l has row r = l / 4 and columns c = l % 4 * 2 and c
 * + 1 of each 8 x 8 part. Two halfs that are neighbours share a word, the first in its low half. The layouts are those of
 * the PTX ISA, under "Matrix Fragments for mma.m16n8k16". All lanes of a warp must come together. tests/cuda_cpu.h has the
 * same functions for a CPU. Read next: flexgen.cu. */
#pragma once
#ifdef __CUDACC__
/* d (16, 8) += a (16, 16) b (16, 8). a[0..3] are a's rows r, r + 8, r, r + 8, columns c, c, c + 8, c + 8 and one more;
 * b[0..1] b's rows c, c + 8 and one more, column r; d[0..3] are d's row r, columns c, c + 1, and row r + 8, columns c, c
 * + 1. */
static __device__ void multiply_add(float d[4], const unsigned a[4], const unsigned b[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int k = 0; k < 2; k++) /* eight columns of a and rows of b at a time */
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

/* (x & mask) | bits, of which the compiler makes two instructions when both are constants. */
static __device__ unsigned and_or(unsigned x, unsigned mask, unsigned bits) {
    unsigned y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}
#endif
