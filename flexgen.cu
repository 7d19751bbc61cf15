/* flexgen.cu: a GPU. Kernels with their launchers, cuBLAS, streams and events: what lanes.c needs
 * to be the cuda device.
 *
 * Paper: sections 3 and 5, as in host.c. For each op gpu_run has a launcher, and host_run there a
 * twin of it, which says what it computes: host_attend for gpu_attend. Both take the Op; kernels
 * get it, or its parts, by value. Activations, weights and KV are half, sums are float. Nothing
 * here knows tiers, plans or schedules, and after opening nothing is allocated but what cuBLAS
 * notes of a product's shape. The whole device is never synchronized: a stream waits for events of
 * others, a thread for one event.
 *   One order of sums   A row's result may not depend on its place in a batch. Attention therefore
 * cuts a sequence at fixed tokens, whoever else is there, products with packed weights cut the
 * columns by the matrix, and cuBLAS is asked by shape alone, so that one shape always meets one
 * algorithm.
 *   Memory   Everything but weights is small beside K and V and the matrices. Kernels read those
 * once, and in 16-byte pieces where the length of a row allows it (`wide`).
 * Read next: cost/profile.c. */
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "device/parts.h"
#include "device/tensor_core.h"

enum { WARP = 32, THREADS = 256, MOST_THREADS = 1024 };

// -------------------------------------------------------------------------------------------------
// Pieces of kernels
// -------------------------------------------------------------------------------------------------

/* Eight halfs as they lie in memory. */
typedef uint4 Half8;

/* Halfs p[0..n), zeros behind them. wide: p is 16-byte aligned, and n at least 8 where it is not 0
 * or less. */
static __device__ Half8 load8(const half *p, int n, bool wide) {
    Half8 bits = make_uint4(0, 0, 0, 0);
    if (wide) { /* asked alone, so that a warp never takes both ways */
        if (n > 0)
            bits = *(const Half8 *)p;
        return bits;
    }
    half *h = (half *)&bits;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n)
            h[i] = p[i];
    return bits;
}

static __device__ void store8(half *p, Half8 bits, int n, bool wide) {
    const half *h = (const half *)&bits;
    if (wide) {
        if (n > 0)
            *(Half8 *)p = bits;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n)
            p[i] = h[i];
}

static __device__ void to_floats(float x[8], Half8 bits) {
    const half2 *h = (const half2 *)&bits;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 f = __half22float2(h[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

static __device__ Half8 to_halfs(const float x[8]) {
    Half8 bits;
    half2 *h = (half2 *)&bits;
#pragma unroll
    for (int i = 0; i < 4; i++)
        h[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    return bits;
}

struct Add {
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct Most {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Least {
    __device__ int operator()(int a, int b) const { return a < b ? a : b; }
};

/* Joins what those lanes of a warp have whose numbers differ in the bits of `from`, 2 `from`, ...
 * below `to`; all get it.
 */
template <class Join, class T>
static __device__ T warp_reduce(T x, int from, int to = WARP) {
    for (int d = from; d < to; d *= 2)
        x = Join()(x, __shfl_xor_sync(0xffffffff, x, d));
    return x;
}

/* The last number of low, low + 1 .. high - 1 up to which `holds`; it does for low. */
template <class N, class Holds>
static __device__ N last_where(N low, N high, Holds holds) {
    while (high - low > 1) {
        N middle = low + (high - low) / 2;
        (holds(middle) ? low : high) = middle;
    }
    return low;
}

/* Over a block of whole warps; all get it. */
template <class Join, class T>
static __device__ T block_reduce(T x) {
    __shared__ T part[MOST_THREADS / WARP];
    x = warp_reduce<Join>(x, 1);
    __syncthreads(); /* part may still be read from the time before */
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = x;
    __syncthreads();
    x = part[0];
    for (int w = 1; w < (int)blockDim.x / WARP; w++)
        x = Join()(x, part[w]);
    return x;
}

// -------------------------------------------------------------------------------------------------
// An open GPU
// -------------------------------------------------------------------------------------------------

/* What tells products apart for cuBLAS. */
typedef struct {
    int m, n, k, y_ld, y_type, bias, relu;
} Shape;

/* What cuBLAS has been told of a product, and what it answered. All zero: an empty place. */
typedef struct {
    Shape shape;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, y;
    cublasLtMatmulAlgo_t algorithm;
    bool fused; /* bias and ReLU happen in it */
} Known;

enum { KNOWN = 128, SCRATCH = 32 << 20, WORKSPACE = 32 << 20 };

/* To pin a gigabyte takes some tenths of a second, and no limit is documented: a call for hundreds
 * may be refused. */
static const size_t PINNED_AT_ONCE = (size_t)64 << 30;

/* What kernels may take when they are loaded and first run, stacks and the library's own included:
 * a card with more multiprocessors keeps more. A guess until one has been asked: bench prints what
 * it was. */
static size_t spare_of(size_t total) {
    return (size_t)(total > (size_t)40 << 30 ? 512 : 128) << 20;
}

struct CudaGpu : Gpu {
    cudaStream_t stream[NLANES];                            /* of the lanes that touch the GPU */
    cudaEvent_t begins[NLANES][MARKS], ends[NLANES][MARKS]; /* with times */
    cudaEvent_t marks[NLANES][MARKS];                       /* ends without */
    cudaEvent_t reached[NLANES][MARKS];                     /* which of the two was recorded last */
    cudaEvent_t known[NLANES]; /* a past event, at first of the opening, then the begin that was
                                  last asked for */
    double known_s[NLANES];    /* when it was */
    cublasLtHandle_t blas;
    Known products[NLANES][KNOWN]; /* of PROJECT and FINISH; looked up by one thread */
    int next_product[NLANES];
    char *scratch; /* SCRATCH bytes for partial results and scores of attention, which runs on one
                      lane */
    char *workspace[2]; /* a WORKSPACE each, for what products of PROJECT, of FINISH leave there */
    int places;         /* two blocks on each multiprocessor */
    int packed_most;    /* the last of packed_kernels that shared memory is large enough for */
    int *not_finite;    /* `bad`, pinned: kernels write it, the host reads it */
    char *pinned;       /* `pinned_bytes` of the host, in pieces of pin_part */
    size_t pinned_bytes;
};

static CudaGpu *cuda(Gpu *gpu) { return static_cast<CudaGpu *>(gpu); }
static cudaStream_t stream_of(Gpu *gpu, Lane lane) { return cuda(gpu)->stream[lane]; }

static bool on_gpu(int lane) {
    return lane_channel[lane] == GPU || lane_channel[lane] == CTOG || lane_channel[lane] == GTOC;
}

/* 0, or -1 and what CUDA says of `what`, with a remedy where one is known. */
static int checked(cudaError_t e, const char *what, Error *err) {
    if (e == cudaSuccess)
        return 0;
    const char *remedy = "run again under compute-sanitizer, which names the place";
    if (e == cudaErrorMemoryAllocation)
        remedy = "lower --gpu-mem, or end other programs that use the GPU";
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction ||
        e == cudaErrorUnsupportedPtxVersion)
        remedy = "this build has no code for this GPU: build again on this machine";
    if (e == cudaErrorSystemNotReady || e == cudaErrorDevicesUnavailable ||
        e == cudaErrorSystemDriverMismatch || e == cudaErrorInitializationError)
        remedy = "driver and GPU are not ready for programs: check nvidia-smi";
    if (e == cudaErrorLaunchTimeout)
        remedy =
            "a display's watchdog ended it: lower --gpu-batch-size, or use a GPU without display";
    return fail(err, EXIT_FAILED, "the GPU, %s: %s; %s", what, cudaGetErrorString(e), remedy);
}

/* What the last launch says. */
static int launched(const char *what, Error *err) { return checked(cudaGetLastError(), what, err); }

static bool eights(int a) { return a % 8 == 0; }

/* Threads for a row, eight elements each: whole warps, at most `most`, which then take more. */
static int row_threads(int cols, int most = THREADS) {
    int threads = ((cols + 7) / 8 + WARP - 1) / WARP * WARP;
    return threads < most ? threads : most;
}

// -------------------------------------------------------------------------------------------------
// Packed numbers (section 5; quant.c has the layout and the plain functions, which these follow bit
// for bit)
// -------------------------------------------------------------------------------------------------

enum { GROUP_WORDS = GROUP_BYTES / 4 };

/* A code as a float: 2^23 and the code share a float's bits, and 2^23 goes again. Conversions have
 * a quarter of the speed.
 */
static __device__ float code_float(unsigned code) {
    return __uint_as_float(0x4b000000 | code) - 8388608.f;
}

/* x: a group's min, y: its scale. Groups begin at multiples of 4 bytes. */
static __device__ float2 group_header(const uint8_t *group) {
    return __half22float2(*(const half2 *)group);
}

/* min + scale * code, to be rounded to a half. Products of halfs and codes are exact: whether this
 * is fused is no matter.
 */
static __device__ float unpack_code(float2 header, unsigned code) {
    return header.x + header.y * code_float(code);
}

enum { COLUMNS = 64 };

/* A block takes COLUMNS columns of one row of groups through shared memory; a thread has 8 of them,
 * and of each the codes of 8 rows: 4 bytes. */
static __global__ void __launch_bounds__(COLUMNS)
    unpack_kernel(half *w, const unsigned *packed, int k) {
    __shared__ unsigned groups[COLUMNS * GROUP_WORDS];
    const unsigned *from = packed + ((size_t)blockIdx.y * k + blockIdx.x * COLUMNS) * GROUP_WORDS;
    for (int i = threadIdx.x; i < COLUMNS * GROUP_WORDS; i += COLUMNS)
        groups[i] = from[i];
    __syncthreads();
    int c = threadIdx.x % (COLUMNS / 8) * 8, word = threadIdx.x / (COLUMNS / 8);
    int top = blockIdx.y * GROUP + word / 4 * 32 + word % 4 * 4;
    float2 header[8];
    unsigned codes[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const unsigned *group = groups + (c + j) * GROUP_WORDS;
        header[j] = group_header((const uint8_t *)group);
        codes[j] = group[1 + word];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { /* low halves, then high halves of the 4 bytes */
        int row = top + i % 4 + i / 4 * 16;
        float x[8];
        for (int j = 0; j < 8; j++)
            x[j] = unpack_code(header[j], codes[j] >> (i % 4 * 8 + i / 4 * 4) & 15);
        *(Half8 *)(w + (size_t)row * k + blockIdx.x * COLUMNS + c) = to_halfs(x);
    }
}

/* (max - min) / 15 as a half, rounded up; down where the largest code would pass the range of
 * halfs. */
static __device__ half group_scale(float min, float max) {
    float exact = (max - min) / 15;
    __half_raw scale = __float2half(exact);
    if (__half2float(scale) < exact)
        scale.x++;
    if (min + 15 * __half2float(scale) >= 65520)
        scale.x--;
    return scale;
}

/* A group of n numbers, 16, 32, 48 or 64, by one warp. */
static __device__ void pack_group(uint8_t *to, const half *x, int n) {
    const unsigned short poison = 0x7e00;
    int lane = threadIdx.x % WARP, finite = 1;
    float min = INFINITY, max = -INFINITY;
    for (int i = lane; i < n; i += WARP) {
        float v = __half2float(x[i]);
        min = fminf(min, v);
        max = fmaxf(max, v);
        finite &= isfinite(v) ? 1 : 0;
    }
    min = -warp_reduce<Most>(-min, 1), max = warp_reduce<Most>(max, 1),
    finite = warp_reduce<Least>(finite, 1);
    min += 0.f;
    max += 0.f; /* -0 becomes 0, as in quant.c */
    half scale = finite ? group_scale(min, max) : __float2half(0);
    float step = __half2float(scale), inverse = step > 0 ? 1 / step : 0;
    auto code = [&](int i) {
        return i < n && finite ? (unsigned)rintf((__half2float(x[i]) - min) * inverse) : 0;
    };
    if (lane == 0) {
        ((half *)to)[0] = finite ? __float2half(min) : half(__half_raw{poison});
        ((half *)to)[1] = scale;
    }
    int i = lane / 16 * 32 + lane % 16; /* whose code is in the low half of byte `lane` */
    if (i < n)
        to[GROUP_HEADER + lane] = (uint8_t)(code(i) | code(i + 16) << 4);
}

/* Row blockIdx.x of kv, whose nh heads of k go to k and of v to v, a group a warp. */
static __device__ void pack_row(uint8_t *k, uint8_t *v, const half *kv, int nh, int hd) {
    int groups = (hd + GROUP - 1) / GROUP, number = (blockIdx.y * blockDim.x + threadIdx.x) / WARP;
    int head = number / groups, g = number % groups;
    if (head >= 2 * nh)
        return;
    uint8_t *to = head < nh ? k + head * quant_bytes(hd) : v + (head - nh) * quant_bytes(hd);
    pack_group(to + g * GROUP_BYTES, kv + (size_t)head * hd + g * GROUP,
               min((int)GROUP, hd - g * GROUP));
}

static __global__ void pack_kernel(uint8_t *packed, const half *kv, int ld, int nh, int hd) {
    const size_t bytes = nh * quant_bytes(hd);
    uint8_t *row = packed + blockIdx.x * 2 * bytes;
    pack_row(row, row + bytes, kv + (size_t)blockIdx.x * ld, nh, hd);
}

/* For each row as many blocks as its groups take, a warp a group. */
static dim3 pack_grid(int rows, int nh, int hd) {
    const int WARPS = THREADS / WARP, groups = 2 * nh * ((hd + GROUP - 1) / GROUP);
    return dim3(rows, (groups + WARPS - 1) / WARPS);
}

static int gpu_pack(CudaGpu *g, const Op *op, Error *err) {
    const Tensor kv = op->pack.kv;
    if (!kv.rows)
        return 0;
    pack_kernel<<<pack_grid(kv.rows, op->nh, op->hd), THREADS, 0, g->stream[op->lane]>>>(
        (uint8_t *)op->pack.packed.at, (const half *)kv.at, (int)kv.ld, op->nh, op->hd);
    return launched("pack", err);
}

static int gpu_unpack(CudaGpu *g, const Op *op, Error *err) {
    const Tensor w = op->unpack.w;
    CHECK(w.rows % GROUP == 0 && w.cols % COLUMNS == 0);
    if (!w.rows)
        return 0;
    unpack_kernel<<<dim3(w.cols / COLUMNS, w.rows / GROUP), COLUMNS, 0, g->stream[op->lane]>>>(
        (half *)w.at, (const unsigned *)op->unpack.packed.at, w.cols);
    return launched("unpack", err);
}

// -------------------------------------------------------------------------------------------------
// Rows: embed, layernorm
// -------------------------------------------------------------------------------------------------

/* One block a row. */
static __global__ void embed_kernel(Op op, bool wide) {
    const Tensor y = op.embed.y, table = op.embed.table;
    const half *from =
        (const half *)table.at + ((const int *)op.embed.idx.at)[blockIdx.x] * table.ld;
    half *to = (half *)y.at + (size_t)blockIdx.x * y.cols;
    for (int c = threadIdx.x * 8; c < y.cols; c += blockDim.x * 8) {
        Half8 row = load8(from + c, y.cols - c, wide);
        if (op.add) {
            float a[8], b[8];
            to_floats(a, load8(to + c, y.cols - c, wide));
            to_floats(b, row);
            for (int i = 0; i < 8; i++)
                a[i] += b[i];
            row = to_halfs(a);
        }
        store8(to + c, row, y.cols - c, wide);
    }
}

static int gpu_embed(CudaGpu *g, const Op *op, Error *err) {
    const Tensor y = op->embed.y;
    CHECK(y.type == F16 && op->embed.table.type == F16);
    if (!y.rows)
        return 0;
    embed_kernel<<<y.rows, row_threads(y.cols), 0, g->stream[op->lane]>>>(*op, eights(y.cols));
    return launched("embed", err);
}

enum {
    PIECES = 2, /* of a row, of 8 numbers each, that a thread of layernorm has */
    MOST_COLUMNS = MOST_THREADS * 8 * PIECES
};

/* One block a row, which stays in registers: mean, variance about it, result. The mean is summed as
 * distances from the first element, since float sums of large numbers lose it. */
static __global__ void __launch_bounds__(MOST_THREADS)
    layernorm_kernel(half *y, const half *x, const half *w, const half *b, int cols, bool wide) {
    const half *row = x + (size_t)blockIdx.x * cols;
    half *to = y + (size_t)blockIdx.x * cols;
    const int first = threadIdx.x * 8, step = blockDim.x * 8;
    float v[8], scale[8], shift[8], near = __half2float(row[0]), sum = 0, square = 0;
    Half8 piece[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        piece[p] = load8(row + first + p * step, cols - first - p * step, wide);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        to_floats(v, piece[p]);
        for (int i = 0; i < 8; i++)
            sum += first + p * step + i < cols ? v[i] - near : 0;
    }
    float mean = near + block_reduce<Add>(sum) / cols;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        to_floats(v, piece[p]);
        for (int i = 0; i < 8; i++)
            square += first + p * step + i < cols ? (v[i] - mean) * (v[i] - mean) : 0;
    }
    float norm = rsqrtf(block_reduce<Add>(square) / cols + 1e-5f);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int c = first + p * step;
        to_floats(v, piece[p]);
        to_floats(scale, load8(w + c, cols - c, wide));
        to_floats(shift, load8(b + c, cols - c, wide));
        for (int i = 0; i < 8; i++)
            v[i] = (v[i] - mean) * norm * scale[i] + shift[i];
        store8(to + c, to_halfs(v), cols - c, wide);
    }
}

static int gpu_layernorm(CudaGpu *g, const Op *op, Error *err) {
    const Tensor x = op->layernorm.x;
    if (!x.rows)
        return 0;
    CHECK(x.cols <= MOST_COLUMNS);
    layernorm_kernel<<<x.rows, row_threads(x.cols, MOST_THREADS), 0, g->stream[op->lane]>>>(
        (half *)op->layernorm.y.at, (const half *)x.at, (const half *)op->layernorm.w.at,
        (const half *)op->layernorm.b.at, x.cols, eights(x.cols));
    return launched("layernorm", err);
}

// -------------------------------------------------------------------------------------------------
// linear: cuBLAS
//
// cuBLAS thinks in columns: y^T (n, m) = w (n, k) x^T (k, m), where w as it lies is transposed. One
// call adds the bias, or the residual that y holds, and takes the ReLU. Its choice of algorithm is
// kept for each shape.
// -------------------------------------------------------------------------------------------------

static int blas_checked(cublasStatus_t s, const Shape *p, Error *err) {
    if (s == CUBLAS_STATUS_SUCCESS)
        return 0;
    const char *remedy = "check that driver and CUDA toolkit fit together";
    if (s == CUBLAS_STATUS_ALLOC_FAILED)
        remedy = "lower --gpu-mem";
    if (s == CUBLAS_STATUS_NOT_SUPPORTED)
        remedy = "it has no kernel for this shape: use --device host";
    return fail(err, EXIT_FAILED, "cuBLAS, a product of %d x %d x %d: status %d; %s", p->m, p->n,
                p->k, (int)s, remedy);
}

/* The largest power of two up to 16 that every address in the product is a multiple of: regions
 * begin at multiples of 64 bytes, and within them whole rows come before. */
static uint32_t alignment(const Shape *s) {
    const size_t y = type_bytes((Type)s->y_type),
                 bits = (size_t)s->k * 2 | s->y_ld * y | s->n * y | 16;
    return (uint32_t)(bits & -bits);
}

/* Asks for an algorithm; false when there is none. b: the bias of this call, whose address tells
 * how biases are aligned. */
static bool ask(CudaGpu *g, Known *p, const void *b, bool fused) {
    const cublasLtEpilogue_t with_bias =
        p->shape.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
    const cublasLtEpilogue_t epilogue = fused && b ? with_bias : CUBLASLT_EPILOGUE_DEFAULT;
    const size_t workspace = WORKSPACE;
    const uint32_t align = alignment(&p->shape), reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                   sizeof epilogue);
    cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &b, sizeof b);
    if (cublasLtMatmulPreferenceInit(&preference))
        return false;
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace, sizeof workspace);
    /* where blocks share k: not in halves, and not in the order in which they come */
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                         &reduction, sizeof reduction);
    static const cublasLtMatmulPreferenceAttributes_t which[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        cublasLtMatmulPreferenceSetAttribute(&preference, which[i], &align, sizeof align);
    if (cublasLtMatmulAlgoGetHeuristic(g->blas, &p->product, &p->w, &p->x, &p->y, &p->y,
                                       &preference, 1, &result, &found) ||
        !found || result.state)
        return false;
    p->algorithm = result.algo;
    p->fused = fused;
    return true;
}

/* What is known of this product, from before or asked for now; NULL and err when cuBLAS cannot
 * compute it. */
static Known *find_product(CudaGpu *g, Lane lane, const Shape *s, const void *b, Error *err) {
    for (int i = 0; i < KNOWN; i++)
        if (memcmp(&g->products[lane][i].shape, s, sizeof *s) == 0)
            return &g->products[lane][i];
    Known *p = &g->products[lane][g->next_product[lane]++ % KNOWN];
    const cudaDataType y_type = s->y_type == F32 ? CUDA_R_32F : CUDA_R_16F;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    *p = Known{};
    cublasStatus_t status = cublasLtMatmulDescInit(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->w, CUDA_R_16F, s->k, s->n, s->k);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->x, CUDA_R_16F, s->k, s->m, s->k);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->y, y_type, s->n, s->m, s->y_ld);
    if (!status)
        status = cublasLtMatmulDescSetAttribute(&p->product, CUBLASLT_MATMUL_DESC_TRANSA,
                                                &transposed, sizeof transposed);
    p->shape = *s;
    if (!status && (ask(g, p, b, true) || (b && ask(g, p, b, false))))
        return p;
    *p = Known{};
    blas_checked(status ? status : CUBLAS_STATUS_NOT_SUPPORTED, s, err);
    return NULL;
}

static char *workspace_of(CudaGpu *g, Lane lane) { return g->workspace[lane == FINISH]; }

/* y += b, then ReLU: only where cuBLAS has no algorithm that does it on the way. */
static __global__ void bias_kernel(half *y, size_t y_ld, const half *b, bool relu, int cols) {
    half *row = y + blockIdx.x * y_ld;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        float v = __half2float(row[c]) + __half2float(b[c]);
        row[c] = __float2half(relu ? fmaxf(v, 0) : v);
    }
}

static int blas_linear(CudaGpu *g, const Op *op, Error *err) {
    const Tensor y = op->linear.y;
    const void *w = op->linear.w.at, *x = op->linear.x.at, *b = op->linear.b.at;
    const Shape shape = {y.rows, y.cols, op->linear.x.cols, (int)y.ld, y.type, b != NULL, op->relu};
    const cudaStream_t stream = g->stream[op->lane];
    CHECK((!op->relu || b) && (y.type == F16 || !b));
    Known *known = find_product(g, op->lane, &shape, b, err);
    if (!known)
        return -1;
    const float one = 1, keep = op->linear.residual.at ? 1 : 0;
    cublasLtMatmulDescSetAttribute(&known->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &b,
                                   sizeof b);
    cublasStatus_t s = cublasLtMatmul(g->blas, &known->product, &one, w, &known->w, x, &known->x,
                                      &keep, y.at, &known->y, y.at, &known->y, &known->algorithm,
                                      workspace_of(g, op->lane), WORKSPACE, stream);
    if (blas_checked(s, &shape, err))
        return -1;
    if (!b || known->fused)
        return 0;
    bias_kernel<<<y.rows, row_threads(y.cols), 0, stream>>>((half *)y.at, y.ld, (const half *)b,
                                                            op->relu, y.cols);
    return launched("bias", err);
}

// -------------------------------------------------------------------------------------------------
// linear with packed weights, of a few rows
//
// Such a product is as fast as its weights are read, and packed they are 28% of the bytes of F16.
// So nothing but the packed bytes moves: they are unpacked into the registers from which tensor
// cores take them. These give, for 16 outputs and 8 rows of x at a time,
//
//     sum (16 outputs, 8 rows) += w (16 outputs, 16 columns) x^T (16 columns, 8 rows)
//
// A lane's share of w is, in four columns, outputs g and g + 8 of the 16, where g = lane / 4. Word
// g of a group's codes has 8 outputs of one column: it is a lane's share of four such w at once,
// which together are all outputs of a group.
//
// A block has four rows of groups and two warps for each. The columns are dealt, PORTION at a time,
// to the two and, where there are few outputs, to several blocks. That is decided by n, k and the
// GPU alone, and sums are added in one order: so the bits of a row depend on no other row. All rows
// of x are one block's where shared memory is large enough, so that weights are read once. They and
// x come through a ring of STAGES portions, all but one of which are on their way.
// -------------------------------------------------------------------------------------------------

enum {
    FEW = 8,      /* rows of x in an instruction */
    SIDES = 4,    /* rows of groups of a block */
    SLICES = 2,   /* warps that share one */
    STAGES = 4,   /* portions of a warp that are there or on their way */
    PORTION = 32, /* columns */
    SHARERS = 9,  /* blocks that share outputs, at most: each leaves sums that one has to add */
    BLOCKS = 512, /* at most, where they do */
    PORTIONS = 4, /* of a warp at least, where they do */
    LINEAR_THREADS = SIDES * SLICES * WARP,
    OUTPUTS = SIDES * GROUP,
    WORDS = PORTION * GROUP_WORDS, /* of a portion of a row of groups */
    X_LD = PORTION + 8, /* halfs from a row of x to the next: eight rows lie in different banks */
    SUMS = 16,          /* of a lane for FEW rows of x: of four (16, FEW) */
    SUMS_LD =
        GROUP + 4, /* floats from a row of sums to the next: four rows lie in different banks */
    HEIGHT = 2     /* blocks that share weights and have other rows of x, at most */
};
static_assert((size_t)PACKED_ROWS * BLOCKS * OUTPUTS * sizeof(float) <= WORKSPACE,
              "partial sums have room");

/* How many of the blocks that share outputs have come; 0 between kernels. Of PROJECT and FINISH,
 * which run side by side. */
static __device__ unsigned arrived[2][HEIGHT * BLOCKS];

/* What a block has in shared memory: its portions, and afterwards its sums. */
template <int TILES>
struct Stage {
    unsigned words[SIDES * SLICES][WORDS];
    half x[SLICES][TILES * FEW][X_LD];
};
template <int TILES>
union Room {
    Stage<TILES> ring[STAGES];
    float sums[SIDES][TILES * FEW][SUMS_LD];
};

/* A block's next portions of w and x, `w` and `x` the warp's first; `left` columns from there on,
 * zeros behind them: groups of zeros, which stand for zeros. x has `rows` rows, x_ld apart. They
 * are there after wait_for_copies. */
template <int TILES>
static __device__ void load_portions(Stage<TILES> *to, const unsigned *w, int w_left, const half *x,
                                     int x_ld, int rows, int x_left) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, side = warp % SIDES,
              slice = warp / SIDES;
#pragma unroll
    for (int at = lane * 4; at < WORDS; at += WARP * 4)
        copy_async(to->words[warp] + at, w + at, at < w_left * GROUP_WORDS);
#pragma unroll
    for (int i = side * WARP + lane; i < TILES * FEW * 4; i += SIDES * WARP) {
        const int row = i / 4,
                  c = i % 4 * 8; /* the warps of a slice share its x: four pieces a row */
        copy_async(&to->x[slice][row][c], x + (size_t)row * x_ld + c, row < rows && c < x_left);
    }
}

/* What a lane has of two neighbouring columns: a word of codes of each; their mins, their scales.
 */
typedef struct {
    unsigned codes[2];
    half2 min, scale;
} Columns;

/* group: the first one's. */
static __device__ Columns load_columns(const unsigned *group, int word) {
    const unsigned mins = __byte_perm(group[0], group[GROUP_WORDS], 0x5410),
                   scales = __byte_perm(group[0], group[GROUP_WORDS], 0x7632);
    return Columns{{group[1 + word], group[GROUP_WORDS + 1 + word]},
                   *(const half2 *)&mins,
                   *(const half2 *)&scales};
}

/* min + scale * code, as bits. DIFFERS: quant.c rounds the sum to a float first, so that where one
 * of the two is thousands of times the other a number may be the other neighbour of one that lies
 * in the middle of two halfs. */
static __device__ unsigned unpack_two(half2 codes, const Columns &c) {
    half2 x = __hfma2(codes, c.scale, c.min);
    return *(unsigned *)&x;
}

/* The numbers of byte u: w[0] of the low halves, w[1] of the high ones. Half of a byte is put into
 * the low bits of 1024, whose last place is 1: then it is code, or 16 code, above 1024. */
static __device__ void unpack_byte(unsigned w[2], const Columns &c, int u) {
    unsigned both = __byte_perm(c.codes[0], c.codes[1], 0x0400 + 0x0101 * u);
    unsigned low = and_or(both, 0x000f000f, 0x64006400),
             high = and_or(both, 0x00f000f0, 0x64006400);
    w[0] = unpack_two(__hsub2(*(half2 *)&low, __float2half2_rn(1024)), c);
    w[1] =
        unpack_two(__hfma2(*(half2 *)&high, __float2half2_rn(1.f / 16), __float2half2_rn(-64)), c);
}

/* sum += a portion of w times one of x, by one warp. */
template <int TILES>
static __device__ void multiply_portion(float sum[TILES * SUMS], const unsigned *words,
                                        const half (*x)[X_LD]) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned mine[TILES][4]; /* of each row of x columns 2 t + 0, 1, 8, 9, ... 24, 25 */
#pragma unroll
    for (int i = 0; i < TILES; i++)
        load_matrices(mine[i], x[i * FEW + lane % 8] + lane / 8 * 8);
#pragma unroll
    for (int half_portion = 0; half_portion < 2; half_portion++) {
        const unsigned *group = words + (half_portion * 16 + 2 * t) * GROUP_WORDS;
        const Columns two = load_columns(group, g), next = load_columns(group + 8 * GROUP_WORDS, g);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            unsigned w[4];
            unpack_byte(w, two, u);
            unpack_byte(w + 2, next, u);
#pragma unroll
            for (int i = 0; i < TILES; i++)
                multiply_add(sum + i * SUMS + u * 4, w, mine[i] + 2 * half_portion);
        }
    }
}

/* Where four neighbouring outputs, sum[0], sum[4], sum[8] and sum[12], of a row of x lie among a
 * warp's sums (rows, GROUP).
 */
static __device__ float4 *sums_at(float (*sums)[SUMS_LD], int tile, int d) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    return (float4 *)&sums[tile * FEW + 2 * t + d % 2][g / 4 * 32 + d / 2 * 16 + g % 4 * 4];
}

template <int TILES>
static __device__ void store_sums(float (*to)[SUMS_LD], const float sum[TILES * SUMS]) {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        const float *s = sum + i / 4 * SUMS + i % 4;
        *sums_at(to, i / 4, i % 4) = make_float4(s[0], s[4], s[8], s[12]);
    }
}

template <int TILES>
static __device__ void add_sums(float sum[TILES * SUMS], float (*from)[SUMS_LD]) {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        float *s = sum + i / 4 * SUMS + i % 4;
        float4 more = *sums_at(from, i / 4, i % 4);
        s[0] += more.x;
        s[4] += more.y;
        s[8] += more.z;
        s[12] += more.w;
    }
}

static __device__ void store_output(const Op &op, int row, int col, float v) {
    const half *b = (const half *)op.linear.b.at;
    half *y = (half *)op.linear.y.at + row * op.linear.y.ld + col;
    if (col >= op.linear.y.cols)
        return;
    if (b)
        v += __half2float(b[col]);
    if (op.relu && v < 0)
        v = 0;
    if (op.linear.residual.at)
        v += __half2float(*y);
    *y = __float2half(v);
}

/* Whether this block is the last of `blocks`, which then sees what the others have written. Leaves
 * 0. */
static __device__ bool comes_last(unsigned *count, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(count, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

/* TILES FEW rows of x in a block. Block (which rows, which rows of groups, which of those that
 * share these). */
template <int TILES>
static __global__ void __launch_bounds__(LINEAR_THREADS, TILES > 4 ? 1 : 2)
    packed_linear_kernel(Op op, float *partial, int on_finish) {
    const int m = op.linear.y.rows, n = op.linear.y.cols, k = op.linear.x.cols;
    extern __shared__ uint4 shared_bytes[];
    Room<TILES> &room = *(Room<TILES> *)shared_bytes;
    const int warp = threadIdx.x / WARP, side = warp % SIDES, slice = warp / SIDES,
              first = blockIdx.x * TILES * FEW;
    const int group = blockIdx.y * SIDES + side, step = gridDim.z * SLICES * PORTION,
              rows = min(m - first, TILES * FEW);
    const int before = (blockIdx.z * SLICES + slice) * PORTION, steps = (k + step - 1) / step;
    const bool outputs =
        group * GROUP < n; /* the last rows of groups may have fewer than SIDES beside them */
    const unsigned *w = (const unsigned *)op.linear.w.at +
                        ((size_t)(outputs ? group : 0) * k + before) * GROUP_WORDS;
    const half *x = (const half *)op.linear.x.at + (size_t)first * k + before;
    float sum[TILES * SUMS] = {};
    auto load = [&](int i) {
        const int left = k - before - i * step;
        if (i < steps)
            load_portions<TILES>(&room.ring[i % STAGES], w, outputs ? left : 0, x, k, rows, left);
        close_copies(); /* of nothing at the end, so that as many groups are open */
        w += step * GROUP_WORDS;
        x += step;
    };
    for (int i = 0; i < STAGES - 1; i++)
        load(i);
    for (int i = 0; i < steps; i++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads(); /* portion i is there for all, and all have used the one before, whose
                            place is free */
        load(i + STAGES - 1);
        multiply_portion<TILES>(sum, room.ring[i % STAGES].words[warp],
                                room.ring[i % STAGES].x[slice]);
    }
    wait_for_copies<0>();
    __syncthreads();
    if (slice)
        store_sums<TILES>(room.sums[side], sum);
    __syncthreads();
    if (!slice)
        add_sums<TILES>(sum, room.sums[side]), store_sums<TILES>(room.sums[side], sum);
    __syncthreads();
    const int place = blockIdx.x * gridDim.y + blockIdx.y, blocks = gridDim.z,
              size = rows * OUTPUTS;
    partial += ((size_t)first * gridDim.y + (size_t)rows * blockIdx.y) * blocks * OUTPUTS;
    for (int e = threadIdx.x; e < size; e += blockDim.x) {
        int row = e / OUTPUTS, col = e % OUTPUTS;
        float v = room.sums[col / GROUP][row][col % GROUP];
        if (blocks == 1)
            store_output(op, first + row, blockIdx.y * OUTPUTS + col, v);
        else
            partial[blockIdx.z * size + e] = v;
    }
    if (blocks == 1 || !comes_last(&arrived[on_finish][place], blocks))
        return;
    for (int e = 4 * threadIdx.x; e < size; e += 4 * blockDim.x) {
        float4 part[SHARERS];
#pragma unroll
        for (int b = 0; b < SHARERS; b++)
            if (b < blocks)
                part[b] = __ldcg((const float4 *)(partial + b * size + e));
#pragma unroll
        for (int b = 1; b < SHARERS; b++)
            if (b < blocks) {
                part[0].x += part[b].x;
                part[0].y += part[b].y;
                part[0].z += part[b].z;
                part[0].w += part[b].w;
            }
        const float v[] = {part[0].x, part[0].y, part[0].z, part[0].w};
        for (int i = 0; i < 4; i++)
            store_output(op, first + e / OUTPUTS, blockIdx.y * OUTPUTS + e % OUTPUTS + i, v[i]);
    }
}

typedef void (*PackedKernel)(Op, float *, int);
static const struct {
    PackedKernel kernel;
    size_t shared;
} packed_kernels[] = {{packed_linear_kernel<1>, sizeof(Room<1>)},
                      {packed_linear_kernel<2>, sizeof(Room<2>)},
                      {packed_linear_kernel<4>, sizeof(Room<4>)},
                      {packed_linear_kernel<8>, sizeof(Room<8>)}};
enum { PACKED_KERNELS = sizeof packed_kernels / sizeof *packed_kernels };

/* How many blocks share outputs, so that `across` times as many fill the GPU's places for the
 * largest part of their time.
 */
static int count_sharers(int across, int k, int places) {
    int best = 1;
    auto waves = [&](int sharers) { return (across * sharers + places - 1) / places; };
    for (int z = 2; z <= SHARERS && across * z <= BLOCKS && z * SLICES * PORTIONS * PORTION <= k;
         z++)
        if ((long)z * waves(best) > (long)best * waves(z))
            best = z;
    return best;
}

static int packed_linear(CudaGpu *g, const Op *op, Error *err) {
    const Tensor y = op->linear.y;
    const int k = op->linear.x.cols;
    CHECK(y.rows <= PACKED_ROWS && y.cols % GROUP == 0 && eights(k) && y.type == F16);
    int rows = FEW, which = 0; /* of the block */
    for (; rows < y.rows && which < g->packed_most; rows *= 2)
        which++;
    const int across = (y.cols + OUTPUTS - 1) / OUTPUTS;
    const PackedKernel kernel = packed_kernels[which].kernel;
    dim3 grid((y.rows + rows - 1) / rows, across, count_sharers(across, k, g->places));
    kernel<<<grid, LINEAR_THREADS, packed_kernels[which].shared, g->stream[op->lane]>>>(
        *op, (float *)workspace_of(g, op->lane), op->lane == FINISH);
    return launched("linear with packed weights", err);
}

static int gpu_linear(CudaGpu *g, const Op *op, Error *err) {
    const Tensor y = op->linear.y, residual = op->linear.residual;
    CHECK(lane_channel[op->lane] == GPU && (!residual.at || (residual.at == y.at && !op->relu)));
    if (!y.rows)
        return 0;
    return op->linear.w.type == U8 ? packed_linear(g, op, err) : blas_linear(g, op, err);
}

// -------------------------------------------------------------------------------------------------
// Prefill attention: FlashAttention-2 (arXiv 2307.08691) on tensor cores
//
// A block has QUERIES consecutive queries of one sequence and one head, a warp 16 of them. It goes
// once through the keys that they see, a tile of KEYS at a time, with an online softmax. With m the
// largest score so far, a query has
//     sum = the sum of e^(score - m)    and    out = the sum of e^(score - m) value,
// and when a tile raises m to m', both are multiplied by e^(m - m') before the tile's terms, made
// with m', are added. At the end the result is out / sum. Scores and weights never leave the
// registers: multiply_add leaves them where the next product wants its first factor. The next tile
// of keys comes in while the values are used, and these while the keys are.
// -------------------------------------------------------------------------------------------------

enum { QUERIES = 64, TILE = 16, TILES_MAX = 8, PREFILL_THREADS = QUERIES / TILE * WARP };

/* For heads of up to TILES times 16 elements. KEYS: such that registers suffice, and the shared
 * memory of an SM of a T4 for two blocks. LD: from one row to the next in shared memory, an odd
 * number of 16 bytes, so that the eight rows that load_matrices reads at once lie in different
 * banks. */
template <int TILES>
constexpr int KEYS = TILES <= 6 ? 64 : 32;
template <int TILES>
constexpr int LD = (2 * TILES + 1) * 8;

/* Blocks that an SM shall have registers for; a T4's shared memory has no room for more. */
#if __CUDA_ARCH__ >= 800
template <int TILES>
constexpr int PREFILL_BLOCKS = TILES <= 4 ? 4 : 3;
#else
template <int TILES>
constexpr int PREFILL_BLOCKS = 2;
#endif

/* The sequence that a block's tile of queries belongs to, and which of its tiles it is. Sequence r
 * has the numbers from start[r] / QUERIES + r on: at least as many as it needs. */
static __device__ int find_tile(int *tile, const int *start, int nseq, int number) {
    int r = last_where(0, nseq, [&](int i) { return start[i] / QUERIES + i <= number; });
    *tile = number - (start[r] / QUERIES + r);
    return r;
}

/* to[r][c] = from[r][c] for ROWS rows, zeros from row n and column hd on. It is there after
 * wait_for_tile. LANES threads share a row, as many as its pieces of 16 bytes can be dealt to.
 * wide: hd is TILES TILE. */
template <int TILES, int ROWS>
static __device__ void load_tile(half *to, const half *from, int from_ld, int n, int hd,
                                 bool wide) {
    const int LANES = TILES * 2 & -(TILES * 2), STEP = PREFILL_THREADS / LANES;
    int row = threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    if (STEP > ROWS && row >= ROWS)
        return; /* heads of 97 to 112 elements: two threads a row are more than 32 rows take */
    to += row * LD<TILES> + column, from += row * from_ld + column, n -= row, hd -= column;
    if (wide)
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP, from += STEP * from_ld)
#pragma unroll
            for (int c = 0; c < TILES * TILE; c += LANES * 8)
                copy_async(to + r * LD<TILES> + c, from + c, r < n);
    else
#pragma unroll 1
        for (int r = 0; r < ROWS; r += STEP, from += STEP * from_ld)
#pragma unroll 1
            for (int c = 0; c < TILES * TILE; c += LANES * 8)
                *(Half8 *)(to + r * LD<TILES> + c) = load8(from + c, r < n ? hd - c : 0, false);
}

/* Afterwards what any thread of the block has loaded is there for all, and what any has read before
 * may be overwritten. */
static __device__ void wait_for_tile(void) {
    close_copies();
    wait_for_copies<0>();
    __syncthreads();
}

/* score (16, KEYS) = queries times keys, by one warp. */
template <int TILES>
static __device__ void score_keys(float score[][4], const unsigned query[][4], const half *keys) {
    int lane = threadIdx.x % WARP;
    const half *row = keys + (lane / 16 * 8 + lane % 8) * LD<TILES> + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < KEYS<TILES> / 8; n += 2) {
        for (int i = 0; i < 4; i++)
            score[n][i] = score[n + 1][i] = 0;
#pragma unroll
        for (int d = 0; d < TILES; d++) {
            unsigned key[4]; /* of 8 keys the first and the second 8 of the elements from d TILE on;
                                of the next 8 keys */
            load_matrices(key, row + n * 8 * LD<TILES> + d * TILE);
            multiply_add(score[n], query[d], key);
            multiply_add(score[n + 1], query[d], key + 2);
        }
    }
}

/* A step of the online softmax for the two queries of which a lane has a share. Scores become
 * weights; scale has the factor log2(e), since a GPU computes powers of 2. */
template <int TILES>
static __device__ void weigh_keys(float score[][4], float out[][4], float sum[2], float largest[2],
                                  float scale) {
#pragma unroll
    for (int q = 0; q < 2; q++) {
        float before = largest[q];
#pragma unroll
        for (int n = 0; n < KEYS<TILES> / 8; n++)
            largest[q] = fmaxf(largest[q], fmaxf(score[n][2 * q], score[n][2 * q + 1]));
        largest[q] = warp_reduce<Most>(largest[q], 1, 4); /* four lanes share a row */
        float shrink = power_of_2((before - largest[q]) * scale);
        sum[q] *= shrink;
#pragma unroll
        for (int d = 0; d < 2 * TILES; d++) {
            out[d][2 * q] *= shrink;
            out[d][2 * q + 1] *= shrink;
        }
#pragma unroll
        for (int i = 0; i < KEYS<TILES> / 4; i++) {
            float *s = &score[i / 2][2 * q + i % 2];
            sum[q] += *s = power_of_2((*s - largest[q]) * scale);
        }
    }
}

static __device__ unsigned pack_halfs(float low, float high) {
    half2 pair = __floats2half2_rn(low, high);
    return *(unsigned *)&pair;
}

/* out (16, TILES TILE) += weights (16, KEYS) times values, by one warp. */
template <int TILES>
static __device__ void add_values(float out[][4], const float weight[][4], const half *values) {
    int lane = threadIdx.x % WARP;
    const half *row = values + lane % 16 * LD<TILES> + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < KEYS<TILES> / 8; n += 2) {
        unsigned a[4];
        for (int i = 0; i < 4; i++)
            a[i] = pack_halfs(weight[n + i / 2][i % 2 * 2], weight[n + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < TILES; d++) {
            unsigned value[4]; /* of the first and the second 8 tokens 8 elements from d TILE on;
                                  the next 8 elements */
            load_transposed(value, row + n * 8 * LD<TILES> + d * TILE);
            multiply_add(out[2 * d], a, value);
            multiply_add(out[2 * d + 1], a, value + 2);
        }
    }
}

/* The warp's 16 queries, of the block's n, come through shared memory, which has room for QUERIES
 * rows. */
template <int TILES>
static __device__ void load_queries(unsigned query[][4], half *shared, const half *from, int ld,
                                    int n, int hd, bool wide) {
    int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * TILE;
    load_tile<TILES, QUERIES>(shared, from, ld, n, hd, wide);
    wait_for_tile();
#pragma unroll
    for (int d = 0; d < TILES; d++)
        load_matrices(query[d],
                      shared + (first + lane % 16) * LD<TILES> + d * TILE + lane / 16 * 8);
    __syncthreads();
}

/* Their results go back the same way. */
template <int TILES>
static __device__ void store_results(half *to, half *shared, const float out[][4],
                                     const float sum[2], int h1, int n, int hd, bool wide) {
    int lane = threadIdx.x % WARP, first = threadIdx.x / WARP * TILE;
    __syncthreads(); /* nobody needs the values any more */
#pragma unroll
    for (int q = 0; q < 2; q++) {
        float share = 1 / warp_reduce<Add>(sum[q], 1, 4);
        half *row = shared + (first + lane / 4 + q * 8) * LD<TILES> + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < 2 * TILES; d++)
            *(unsigned *)(row + d * 8) =
                pack_halfs(out[d][2 * q] * share, out[d][2 * q + 1] * share);
    }
    __syncwarp();
    for (int i = lane; i < TILE * TILES * 2; i += WARP) {
        int r = first + i / (TILES * 2), c = i % (TILES * 2) * 8;
        store8(to + (size_t)r * h1 + c, *(Half8 *)(shared + r * LD<TILES> + c), r < n ? hd - c : 0,
               wide);
    }
}

/* TILES: head size over TILE, rounded up. The block's number counts the query tiles of all the
 * sequences. */
template <int TILES>
static __global__ void __launch_bounds__(PREFILL_THREADS, PREFILL_BLOCKS<TILES>)
    attend_prefill_kernel(Op op, bool wide) {
    const int STEP = KEYS<TILES>, h1 = op.prefilled.q.cols, hd = op.hd, ld = (int)op.prefilled.q.ld;
    const int *start = (const int *)op.prefilled.start.at, nseq = op.prefilled.start.cols - 1;
    const float scale = rsqrtf((float)hd) * 1.44269504f; /* log2(e) */
    __shared__ __align__(16) half keys[2 * STEP * LD<TILES>];
    half *values = keys + STEP * LD<TILES>;
    int tile, r = find_tile(&tile, start, nseq, blockIdx.x), head = blockIdx.y * hd;
    int first = tile * QUERIES,
        seen = min(start[r + 1] - start[r], first + QUERIES); /* keys, by the last query */
    if (first >= seen)
        return;
    const half *q = (const half *)op.prefilled.q.at + (size_t)(start[r] + first) * ld + head;
    const half *k = (const half *)op.prefilled.kv.at + (size_t)start[r] * ld + head;
    /* a lane has the queries pos and pos + 8, and of each 8 keys column and column + 1 */
    int pos = first + threadIdx.x / WARP * TILE + threadIdx.x % WARP / 4,
        column = threadIdx.x % 4 * 2;

    unsigned query[TILES][4];
    float out[2 * TILES][4] = {}, sum[2] = {}, largest[2] = {-INFINITY, -INFINITY};
    load_queries<TILES>(query, keys, q, ld, seen - first, hd, wide);
    load_tile<TILES, STEP>(keys, k, ld, seen, hd, wide);
    for (int t0 = 0; t0 < seen; t0 += STEP) {
        float score[STEP / 8][4];
        wait_for_tile(); /* the keys */
        load_tile<TILES, STEP>(values, k + h1, ld, seen - t0, hd, wide);
        score_keys<TILES>(score, query, keys);
        if (pos < t0 + STEP - 1) /* some come later than the query; token 0 never does, so `largest`
                                    will be finite */
#pragma unroll
            for (int i = 0; i < STEP / 2; i++)
                if (i / 4 * 8 + i % 2 - i % 4 / 2 * 8 > pos - t0 - column)
                    score[i / 4][i % 4] = -INFINITY;
        weigh_keys<TILES>(score, out, sum, largest, scale);
        wait_for_tile(); /* the values */
        if (t0 + STEP < seen)
            load_tile<TILES, STEP>(keys, k += STEP * ld, ld, seen - t0 - STEP, hd, wide);
        add_values<TILES>(out, score, values);
    }
    store_results<TILES>((half *)op.prefilled.o.at + (size_t)(start[r] + first) * h1 + head, keys,
                         out, sum, h1, seen - first, hd, wide);
}

typedef void (*PrefillKernel)(Op, bool);
static const PrefillKernel prefill_kernels[TILES_MAX] = {
    attend_prefill_kernel<1>, attend_prefill_kernel<2>, attend_prefill_kernel<3>,
    attend_prefill_kernel<4>, attend_prefill_kernel<5>, attend_prefill_kernel<6>,
    attend_prefill_kernel<7>, attend_prefill_kernel<8>};

static int gpu_attend_prefill(CudaGpu *g, const Op *op, Error *err) {
    const int rows = op->prefilled.q.rows, nseq = op->prefilled.start.cols - 1,
              tiles = (op->hd + TILE - 1) / TILE;
    if (!rows)
        return 0;
    CHECK(tiles <= TILES_MAX);
    dim3 grid(rows / QUERIES + nseq, op->nh); /* at least as many as the sequences' tiles */
    const PrefillKernel kernel = prefill_kernels[tiles - 1];
    kernel<<<grid, PREFILL_THREADS, 0, g->stream[op->lane]>>>(*op, op->hd % TILE == 0);
    return launched("prefill attention", err);
}

// -------------------------------------------------------------------------------------------------
// Decode attention: heads in 4 bits, as codes (quant.h)
//
// Tensor cores multiply the codes of 16 tokens, a tile, and nothing is unpacked. Four bits at the
// low end of a half are code 2^-24, and four bits further code 2^-20, exactly: they are subnormal
// halfs, which tensor cores take as they are. So a word, eight codes of one token, needs but a
// shift and masks. Of such a product
//
//     K   rows are tokens, and b is q              columns 2 i and 2 i + 1: group i's low and high
//     halves of bytes V   rows are elements, and b the weights     columns 2 i and 2 i + 1: of
//     group i, weight scale as halfs, and what
//                                                  these lack, times 2^11: together as exact as a
//                                                  float but for two bits
//
// which leaves min times the sum of q or of the weights. One warp has one head; of its lanes g =
// lane / 4, t = lane % 4.
// -------------------------------------------------------------------------------------------------

/* How pages hold numbers: FOURS are packed as above. */
enum Pages { HALFS, FOURS };
enum {
    SPLIT = 128,      /* tokens of a warp */
    HEADS = 4,        /* warps of a block */
    HALF = GROUP / 2, /* elements whose codes lie in 16 bytes */
    SHARES_LD =
        SPLIT +
        TILE / 2 /* halfs from a column of shares to the next: four lie in different banks */
};
const float LOW_CODE = 1 << 24,
            HIGH_CODE = 1.f / 16; /* a low one from its half, and a high one from a low one's */

static __device__ int whole_tiles(int tokens) { return (tokens + TILE - 1) / TILE * TILE; }

/* Of two words the codes in the low or in the high halves of bytes 0 and 2. */
static __device__ unsigned low_codes(unsigned word) { return word & 0x000f000f; }
static __device__ unsigned high_codes(unsigned word) { return word & 0x00f000f0; }

/* score[t] = q.k * scale of n tokens; rows: whole tiles of them. k: the head in row 0. LANES: as
 * below, 8 elements each. */
template <int LANES>
static __device__ void score_fours(float *score, const half *q, const uint8_t *k, size_t row,
                                   const int *rows, int n, int hd, float scale) {
    const int HALVES = LANES * 8 / HALF, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    unsigned low[HALVES][2] = {},
             high[HALVES][2] = {}; /* of each half of a group this lane's part of b */
    float sum[2] = {0, 0};         /* of q, of each group */
#pragma unroll
    for (int b = 0; b < HALVES; b++) {
        const int at = b * HALF + t * 4 + g % 2 * 16, column = b * HALF / GROUP * 2 + g % 2;
        if (b * HALF + lane < hd)
            sum[b / 2] += __half2float(q[b * HALF + lane]);
        if (g != column || at >= hd)
            continue;
        const uint2 four = *(const uint2 *)(q + at);
        const unsigned pair[] = {__byte_perm(four.x, four.y, 0x5410),
                                 __byte_perm(four.x, four.y, 0x7632)};
        for (int i = 0; i < 2; i++) {
            low[b][i] = g % 2 ? 0 : pair[i];
            high[b][i] = g % 2 ? pair[i] : 0;
        }
    }
    for (int i = 0; i < 2; i++)
        sum[i] = warp_reduce<Add>(sum[i], 1);
    const float all = t == 0 ? sum[0] : sum[1];
    for (int t0 = 0; t0 < n; t0 += TILE) {
        unsigned word[2][HALVES], header[2]; /* of tokens g and g + 8; group t's */
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint8_t *head = k + rows[t0 + g + 8 * i] * row;
            header[i] = t * GROUP < hd ? *(const unsigned *)(head + t * GROUP_BYTES) : 0;
#pragma unroll
            for (int b = 0; b < HALVES; b++) {
                const uint8_t *codes =
                    head + b / 2 * GROUP_BYTES + GROUP_HEADER + b % 2 * 16 + t * 4;
                word[i][b] = b * HALF < hd ? *(const unsigned *)codes : 0;
            }
        }
#pragma unroll
        for (int b = 0; b < HALVES; b++) {
            const unsigned x = word[0][b], y = word[1][b];
            const unsigned lows[] = {low_codes(x), low_codes(y), low_codes(x >> 8),
                                     low_codes(y >> 8)};
            const unsigned highs[] = {high_codes(x), high_codes(y), high_codes(x >> 8),
                                      high_codes(y >> 8)};
            multiply_add(d, lows, low[b]);
            multiply_add(d, highs, high[b]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 group = group_header((const uint8_t *)&header[i]);
            float dot =
                group.x * all + group.y * ((d[2 * i] + d[2 * i + 1] * HIGH_CODE) * LOW_CODE);
            if (t >= 2)
                dot = 0;
            if (HALVES > 2)
                dot += __shfl_xor_sync(0xffffffff, dot, 1);
            const int token = t0 + g + 8 * i;
            if (t == 0 && token < n)
                score[token] = dot * scale;
        }
    }
}

/* out = the sum of weight[t] * v of a warp's n tokens, a lane's eight elements of all of them;
 * weight is used up. */
template <int LANES>
static __device__ void weigh_fours(float out[8], float *weight, const uint8_t *v, size_t row,
                                   const int *rows, int n, int hd) {
    const int GROUPS = (LANES * 8 + GROUP - 1) / GROUP, lane = threadIdx.x % WARP, g = lane / 4,
              t = lane % 4;
    __shared__ __align__(16)
        half all_shares[HEADS][2 * GROUPS][SHARES_LD]; /* b of all tiles, by columns */
    half(*shares)[SHARES_LD] = all_shares[threadIdx.x / WARP];
    float min_part = 0, sum[GROUPS * 4][4] = {};
    for (int i = lane; i < whole_tiles(n) * GROUPS; i += WARP) {
        const int token = i / GROUPS, group = i % GROUPS;
        const float w = token < n ? weight[token] : 0;
        unsigned header = 0;
        if (token < n && group * GROUP < hd)
            header = *(const unsigned *)(v + rows[token] * row + group * GROUP_BYTES);
        const float2 x = group_header((const uint8_t *)&header);
        const half share = __float2half(w * x.y);
        min_part += w * x.x;
        shares[2 * group][token] = share;
        shares[2 * group + 1][token] = __float2half((w * x.y - __half2float(share)) * 2048);
    }
    min_part = warp_reduce<Add>(min_part, GROUPS); /* of group lane % GROUPS */
    __syncwarp();
    for (int t0 = 0; t0 < n; t0 += TILE) {
        unsigned word[GROUPS][4], b[2] = {0, 0}; /* of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9 */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint8_t *head =
                v + rows[t0 + 2 * t + i % 2 + i / 2 * 8] * row + GROUP_HEADER + g * 4;
#pragma unroll
            for (int j = 0; j < GROUPS; j++)
                word[j][i] =
                    j * GROUP + g / 4 * HALF < hd ? *(const unsigned *)(head + j * GROUP_BYTES) : 0;
        }
        if (g < 2 * GROUPS) {
            const unsigned *mine = (const unsigned *)(shares[g] + t0) + t;
            b[0] = mine[0];
            b[1] = mine[4];
        }
#pragma unroll
        for (int i = 0; i < GROUPS * 4;
             i++) { /* bytes i % 4 of the words: elements g and g + 8 of a product */
            const unsigned *w = word[i / 4], byte = 0x0400 + 0x0101 * (i % 4);
            const unsigned first = __byte_perm(w[0], w[1], byte),
                           second = __byte_perm(w[2], w[3], byte);
            const unsigned a[] = {low_codes(first), high_codes(first), low_codes(second),
                                  high_codes(second)};
            multiply_add(sum[i], a, b);
        }
    }
    __syncwarp(); /* all have read their weights, which give way to elements, since lanes t < GROUPS
                     have the sums */
    if (t < GROUPS) {
        const int at = t * GROUP + g / 4 * HALF + g % 4 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float s[4]; /* of group t; an address of `sum` that depends on t would put it into
                           memory */
            for (int j = 0; j < 4; j++)
                s[j] = t == 0 ? sum[i][j] : sum[GROUPS * 4 - 4 + i][j];
            weight[at + i] = (s[0] + s[1] / 2048) * LOW_CODE + min_part;
            weight[at + 16 + i] = (s[2] + s[3] / 2048) * (LOW_CODE * HIGH_CODE) + min_part;
        }
    }
    __syncwarp();
    for (int i = 0; i < 8; i++)
        out[i] = weight[lane % LANES * 8 + i];
}

// -------------------------------------------------------------------------------------------------
// Decode attention over pages
//
// A warp has one head of one sequence for SPLIT tokens: scores, softmax, weighted values. LANES
// lanes share a token, 8 elements each, so that a warp reads 32 / LANES tokens at once and UNROLL
// times as many before it uses the first. Sequences of more than SPLIT tokens leave partial
// results, which combine_kernel puts together in the order of the tokens. Packed heads are read by
// functions of their own, in the chapter before.
// -------------------------------------------------------------------------------------------------

enum { UNROLL = 4 };

/* A partial result: the largest score, the sum of e^(score - largest), that sum's hd weighted
 * values. */
static __host__ __device__ size_t partial_floats(int hd) { return hd + 2; }

/* The row of K and V that a sequence's token has. */
static __device__ int token_row(const int *pages, int t, int page_tokens) {
    return pages[t / page_tokens] * page_tokens + t % page_tokens;
}

/* Sequence r's tokens; its row of the page table. */
static __device__ int length_of(const Op &op, int r) { return ((const int *)op.attend.len.at)[r]; }
static __device__ const int *pages_of(const Op &op, int r) {
    return (const int *)op.attend.pages.at + r * op.attend.pages.ld;
}
/* Its heads' results, (h1). */
static __device__ half *result_of(const Op &op, int r) {
    return (half *)op.attend.o.at + (size_t)r * op.nh * op.hd;
}
/* Where what head h of it chooses begins, in tokens and in weights. */
static __device__ size_t chosen_of(const Op &op, int r, int h) {
    const int most = op.attend.tokens.cols / op.nh;
    return ((size_t)r * op.nh + h) * most;
}

/* rows[t] of sequence r's tokens t0 .. t0+n-1, by the whole block; the last one again up to whole
 * tiles. */
static __device__ void load_rows(int *rows, const Op &op, int r, int t0, int n) {
    for (int t = threadIdx.x; t < whole_tiles(n); t += blockDim.x)
        rows[t] = token_row(pages_of(op, r), t0 + min(t, n - 1), op.page_tokens);
    __syncthreads();
}

/* A head of K or V, and what a lane reads of it: elements c .. c+7. */
typedef struct {
    const uint8_t *first; /* in row 0; packed: the head */
    size_t row;           /* bytes */
    int left;             /* elements from c on */
    bool wide;            /* heads are whole eights of elements */
} Column;

template <Pages PAGES>
static __device__ Column find_column(const Op &op, const Tensor &kv, int h, int c, bool wide) {
    const size_t head = PAGES == HALFS ? op.hd * sizeof(half) : quant_bytes(op.hd),
                 before = PAGES == HALFS ? c * sizeof(half) : 0;
    return Column{(const uint8_t *)kv.at + h * head + before, op.nh * head, op.hd - c, wide};
}

/* A lane's eight elements of UNROLL tokens, `apart` apart from t on; zeros for tokens from n on. */
static __device__ void load_tokens(Half8 piece[UNROLL], const Column &column, const int *rows,
                                   int t, int apart, int n) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++, t += apart) {
        const uint8_t *from = column.first + (t < n ? rows[t] : 0) * column.row;
        piece[u] = load8((const half *)from, t < n ? column.left : 0, column.wide);
    }
}

/* score[t] = q.k * scale of a warp's n tokens. mine: the lane's elements of q. */
template <int LANES>
static __device__ void score_tokens(float *score, const float mine[8], const Column &k,
                                    const int *rows, int n, float scale) {
    const int AT_ONCE = WARP / LANES;
    int which = threadIdx.x % WARP / LANES;
    for (int t = which; t - which < n; t += UNROLL * AT_ONCE) {
        Half8 piece[UNROLL];
        load_tokens(piece, k, rows, t, AT_ONCE, n);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float x[8], dot = 0;
            to_floats(x, piece[u]);
            for (int i = 0; i < 8; i++)
                dot += mine[i] * x[i];
            for (int d = 1; d < LANES; d *= 2)
                dot += __shfl_xor_sync(0xffffffff, dot, d);
            if (threadIdx.x % LANES == 0 && t + u * AT_ONCE < n)
                score[t + u * AT_ONCE] = dot * scale;
        }
    }
}

/* out += weight[t] * v of those of a warp's n tokens that the lane reads. */
template <int LANES>
static __device__ void weigh_tokens(float out[8], const float *weight, const Column &v,
                                    const int *rows, int n) {
    const int AT_ONCE = WARP / LANES;
    for (int t = threadIdx.x % WARP / LANES; t < n; t += UNROLL * AT_ONCE) {
        Half8 piece[UNROLL];
        load_tokens(piece, v, rows, t, AT_ONCE, n);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            float x[8], w = t + u * AT_ONCE < n ? weight[t + u * AT_ONCE] : 0;
            to_floats(x, piece[u]);
            for (int i = 0; i < 8; i++)
                out[i] += w * x[i];
        }
    }
}

/* score[0..n) becomes e^(score - largest), whose sum is returned, by one warp. */
static __device__ float exponentiate(float *score, int n, float *largest) {
    float most = -INFINITY, sum = 0;
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        most = fmaxf(most, score[t]);
    most = warp_reduce<Most>(most, 1);
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        sum += score[t] = expf(score[t] - most);
    *largest = most;
    return warp_reduce<Add>(sum, 1);
}

/* Dense attention; or, for sparse attention, the scores (nseq, nh, gridDim.z * SPLIT) alone. */
template <int LANES, Pages PAGES, bool SCORES>
static __global__ void __launch_bounds__(HEADS *WARP, 8)
    attend_kernel(Op op, bool wide, float *scratch) {
    __shared__ int rows[SPLIT];
    __shared__ float scores[SCORES ? 1 : HEADS][SPLIT];
    int r = blockIdx.x, t0 = blockIdx.z * SPLIT, n = min(length_of(op, r) - t0, (int)SPLIT),
        hd = op.hd;
    if (n <= 0)
        return;
    load_rows(rows, op, r, t0, n);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, h = blockIdx.y * HEADS + warp,
        c = lane % LANES * 8;
    if (h >= op.nh)
        return;
    const half *q = (const half *)op.attend.q.at + r * op.attend.q.ld + h * hd;
    const Column k = find_column<PAGES>(op, op.attend.k, h, c, wide),
                 v = find_column<PAGES>(op, op.attend.v, h, c, wide);
    float *score =
        SCORES ? scratch + ((size_t)r * op.nh + h) * gridDim.z * SPLIT + t0 : scores[warp];
    float mine[8], out[8] = {0}, largest;
    if (PAGES == FOURS) {
        score_fours<LANES>(score, q, k.first, k.row, rows, n, hd, rsqrtf((float)hd));
    } else {
        to_floats(mine, load8(q + c, hd - c, wide));
        score_tokens<LANES>(score, mine, k, rows, n, rsqrtf((float)hd));
    }
    if (SCORES)
        return;
    __syncwarp();
    float sum = exponentiate(score, n, &largest);
    __syncwarp();
    if (PAGES == FOURS) {
        weigh_fours<LANES>(out, score, v.first, v.row, rows, n, hd);
    } else {
        weigh_tokens<LANES>(out, score, v, rows, n);
        for (int i = 0; i < 8; i++)
            out[i] = warp_reduce<Add>(out[i], LANES);
    }
    if (lane >= LANES || c >= hd)
        return;
    if (length_of(op, r) <= SPLIT) {
        for (int i = 0; i < 8; i++)
            out[i] /= sum;
        store8(result_of(op, r) + h * hd + c, to_halfs(out), hd - c, wide);
        return;
    }
    float *to = scratch + (((size_t)r * gridDim.z + blockIdx.z) * op.nh + h) * partial_floats(hd);
    if (c == 0) {
        to[0] = largest;
        to[1] = sum;
    }
    for (int i = 0; i < 8 && c + i < hd; i++)
        to[2 + c + i] = out[i];
}

/* A thread an element. */
static __global__ void combine_kernel(Op op, const float *partial, int splits) {
    int r = blockIdx.x, n = (length_of(op, r) + SPLIT - 1) / SPLIT, hd = op.hd;
    size_t stride = op.nh * partial_floats(hd);
    int c = blockIdx.y * blockDim.x + threadIdx.x;
    if (n <= 1 || c >= op.nh * hd)
        return;
    const float *p = partial + (size_t)r * splits * stride + c / hd * partial_floats(hd);
    float largest = -INFINITY, sum = 0, out = 0;
    for (int i = 0; i < n; i++)
        largest = fmaxf(largest, p[i * stride]);
    for (int i = 0; i < n; i++) {
        float weight = expf(p[i * stride] - largest);
        sum += weight * p[i * stride + 1];
        out += weight * p[i * stride + 2 + c % hd];
    }
    result_of(op, r)[c] = __float2half(out / sum);
}

/* A kernel for each number of lanes that share a token (4 for heads of up to 32 elements, 8, 16),
 * of each one for each kind of pages. */
typedef void (*DecodeKernel)(Op, bool wide, float *scratch);
#define FOR_PAGES(f, LANES, ...) f<LANES, HALFS, ##__VA_ARGS__>, f<LANES, FOURS, ##__VA_ARGS__>
#define DECODE_KERNELS(f, ...)                                          \
    {                                                                   \
        FOR_PAGES(f, 4, ##__VA_ARGS__), FOR_PAGES(f, 8, ##__VA_ARGS__), \
            FOR_PAGES(f, 16, ##__VA_ARGS__)                             \
    }
enum { LANES_MAX = 16 };

static DecodeKernel decode_kernel(const DecodeKernel *kernels, const Op *op) {
    const bool packed = op->attend.k.type == U8;
    int which = packed ? FOURS : HALFS;
    CHECK((!op->attend.o.at || op->attend.o.type == F16) && op->hd <= LANES_MAX * 8 &&
          (!packed || op->hd % 16 == 0));
    for (int elements = 4 * 8; elements < op->hd; elements *= 2)
        which += 2;
    return kernels[which];
}

/* Parts of SPLIT tokens that the page table has room for. */
static int count_splits(const Op *op) {
    return (int)(((long)op->attend.pages.cols * op->page_tokens + SPLIT - 1) / SPLIT);
}

static dim3 decode_grid(const Op *op, int splits) {
    return dim3(op->attend.len.cols, (op->nh + HEADS - 1) / HEADS, splits);
}

/* Sequences from `first` on, n at most. */
static Op some_sequences(Op op, int first, int n) {
    n = imin(n, op.attend.len.cols - first);
    for (Tensor *t :
         {&op.attend.o, &op.attend.q, &op.attend.tokens, &op.attend.weights, &op.attend.pages})
        *t = tensor_rows(*t, first, n);
    op.attend.len = tensor_cols(op.attend.len, first, n);
    return op;
}

/* Posts one of the kernels, and then what goes on from what it left in scratch, for as many
 * sequences at once as scratch has so many floats each for. */
template <class Then>
static void post_decode(CudaGpu *g, const Op *op, const DecodeKernel *kernels, size_t floats,
                        Then then) {
    DecodeKernel kernel = decode_kernel(kernels, op);
    const cudaStream_t stream = g->stream[op->lane];
    float *scratch = (float *)g->scratch;
    const int at_once = (int)(SCRATCH / (floats * sizeof(float))), splits = count_splits(op);
    CHECK(lane_channel[op->lane] == GPU && at_once);
    for (int r = 0; r < op->attend.len.cols; r += at_once) {
        const Op some = some_sequences(*op, r, at_once);
        kernel<<<decode_grid(&some, splits), HEADS * WARP, 0, stream>>>(some, eights(op->hd),
                                                                        scratch);
        then(some, scratch, stream);
    }
}

static const DecodeKernel attend_kernels[] = DECODE_KERNELS(attend_kernel, false),
                          score_kernels[] = DECODE_KERNELS(attend_kernel, true);

static int gpu_attend(CudaGpu *g, const Op *op, Error *err) {
    const int splits = count_splits(op);
    const size_t floats = splits > 1 ? splits * op->nh * partial_floats(op->hd) : 1;
    post_decode(g, op, attend_kernels, floats,
                [&](const Op &some, float *partial, cudaStream_t stream) {
                    dim3 elements(some.attend.len.cols, (op->nh * op->hd + THREADS - 1) / THREADS);
                    if (splits > 1)
                        combine_kernel<<<elements, THREADS, 0, stream>>>(some, partial, splits);
                });
    return launched("attention", err);
}

/* One block a row of kv, or if it is packed on the way several. What moves as it is, packed already
 * or not, moves as halfs.
 */
static __global__ void append_kernel(Op op, bool wide) {
    const Tensor kv = op.append.kv, pages = op.append.pages;
    const int size = (int)type_bytes(kv.type), width = kv.cols / 2 * size / (int)sizeof(half);
    const int seq = ((const int *)op.append.seq.at)[blockIdx.x],
              pos = ((const int *)op.append.pos.at)[blockIdx.x];
    const half *from = (const half *)((const uint8_t *)kv.at + blockIdx.x * kv.ld * size);
    const size_t row = token_row((const int *)pages.at + seq * pages.ld, pos, op.page_tokens);
    const size_t at = row * op.append.k.ld * type_bytes(op.append.k.type);
    uint8_t *k = (uint8_t *)op.append.k.at + at, *v = (uint8_t *)op.append.v.at + at;
    if (kv.type != op.append.k.type)
        return pack_row(k, v, from, op.nh, op.hd);
    for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
        store8((half *)k + c, load8(from + c, width - c, wide), width - c, wide);
        store8((half *)v + c, load8(from + width + c, width - c, wide), width - c, wide);
    }
}

static int gpu_append(CudaGpu *g, const Op *op, Error *err) {
    const Tensor kv = op->append.kv;
    const bool pack = kv.type != op->append.k.type;
    const int width = (int)(kv.cols / 2 * type_bytes(kv.type) / sizeof(half));
    if (!kv.rows)
        return 0;
    const dim3 grid = pack ? pack_grid(kv.rows, op->nh, op->hd) : dim3(kv.rows);
    const int threads = pack ? THREADS : row_threads(width);
    append_kernel<<<grid, threads, 0, g->stream[op->lane]>>>(*op, eights(width));
    return launched("append", err);
}

// -------------------------------------------------------------------------------------------------
// Sparse attention (section 5)
//
// The scores of all tokens go to memory, from where a warp selects those of one head of one
// sequence. Where the chosen ones end is found by halving, as for the next token below: how many
// scores are larger takes a look at each of them.
// -------------------------------------------------------------------------------------------------

/* A score among integers in the order of the scores, NaN below all. No score is -0: their sums
 * begin at 0. */
static __device__ unsigned rank(float score) {
    unsigned bits = __float_as_uint(score), sign = 1u << 31;
    if (score != score)
        return 0;
    return bits & sign ? ~bits : bits | sign;
}

/* How many of n scores have at least that rank, by one warp. */
static __device__ int count_from(const float *score, int n, unsigned least) {
    int count = 0;
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        count += rank(score[t]) >= least;
    return warp_reduce<Add>(count, 1);
}

/* The largest rank that at least k of n scores reach; or another that just k reach. */
static __device__ unsigned least_rank(const float *score, int n, int k) {
    unsigned least = 0, above = 0xff800001; /* nothing ranks higher than infinity */
    for (int count = n; count != k && least + 1 < above;) {
        unsigned middle = least + (above - least) / 2;
        int m = count_from(score, n, middle);
        if (m >= k) {
            least = middle;
            count = m;
        } else
            above = middle;
    }
    return least;
}

/* The chosen k of n tokens, in order. By one warp. */
static __device__ void choose(int *tokens, const float *score, int n, int k) {
    unsigned least = least_rank(score, n, k), lane = threadIdx.x % WARP, before = (1u << lane) - 1;
    int equals = k - count_from(score, n, least + 1),
        kept = 0; /* how many of those of the least rank are chosen */
    for (int t0 = 0; t0 < n; t0 += WARP) {
        int t = t0 + (int)lane;
        bool larger = t < n && rank(score[t]) > least, equal = t < n && rank(score[t]) == least;
        unsigned same = __ballot_sync(0xffffffff, equal);
        bool chosen = larger || (equal && __popc(same & before) < equals);
        unsigned all = __ballot_sync(0xffffffff, chosen);
        if (chosen)
            tokens[kept + __popc(all & before)] = t;
        kept += __popc(all);
        equals -= __popc(same);
    }
}

static __global__ void __launch_bounds__(HEADS *WARP)
    select_kernel(Op op, float *scores, int splits) {
    int r = blockIdx.x, h = blockIdx.y * HEADS + threadIdx.x / WARP, lane = threadIdx.x % WARP,
        past = length_of(op, r) - 1;
    if (h >= op.nh)
        return;
    float *score = scores + ((size_t)r * op.nh + h) * splits * SPLIT, largest;
    int *tokens = (int *)op.attend.tokens.at + chosen_of(op, r, h),
        chosen = sparse_tokens(op.sparsity, past + 1);
    float *weights = (float *)op.attend.weights.at + chosen_of(op, r, h);
    choose(tokens, score, past, chosen - 1);
    if (lane == 0)
        tokens[chosen - 1] = past;
    __syncwarp(); /* all scores have been compared, all tokens are there */
    float sum = exponentiate(score, past + 1,
                             &largest); /* over all tokens: what the others weigh is lost */
    __syncwarp();
    for (int i = lane; i < chosen; i += WARP)
        weights[i] = score[tokens[i]] / sum;
}

static int gpu_select(CudaGpu *g, const Op *op, Error *err) {
    const int splits = count_splits(op);
    const size_t floats = (size_t)splits * SPLIT * op->nh;
    post_decode(
        g, op, score_kernels, floats, [&](const Op &some, float *scores, cudaStream_t stream) {
            select_kernel<<<decode_grid(&some, 1), HEADS * WARP, 0, stream>>>(some, scores, splits);
        });
    return launched("selection of tokens", err);
}

template <int LANES, Pages PAGES>
static __global__ void __launch_bounds__(HEADS *WARP, 6) weigh_kernel(Op op, bool wide, float *) {
    __shared__ int rows[HEADS][SPLIT];
    __shared__ float part[HEADS][SPLIT];
    int r = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP,
        h = blockIdx.y * HEADS + warp;
    if (h >= op.nh)
        return;
    int hd = op.hd, c = lane % LANES * 8, count = sparse_tokens(op.sparsity, length_of(op, r));
    Column column = find_column<PAGES>(op, op.attend.v, h, c, wide);
    float out[8] = {0};
    const int *pages = pages_of(op, r),
              *tokens = (const int *)op.attend.tokens.at + chosen_of(op, r, h);
    const float *weights = (const float *)op.attend.weights.at + chosen_of(op, r, h);
    for (int first = 0; first < count; first += SPLIT) {
        int n = min(count - first, (int)SPLIT);
        __syncwarp(); /* the tokens before have been read */
        for (int i = lane; i < whole_tiles(n); i += WARP) {
            const int token = first + min(i, n - 1);
            rows[warp][i] = token_row(pages, tokens[token], op.page_tokens);
            part[warp][i] = weights[token];
        }
        __syncwarp();
        if (PAGES == FOURS) {
            float some[8];
            weigh_fours<LANES>(some, part[warp], column.first, column.row, rows[warp], n, hd);
            for (int i = 0; i < 8; i++)
                out[i] += some[i];
        } else {
            weigh_tokens<LANES>(out, part[warp], column, rows[warp], n);
        }
    }
    for (int i = 0; i < 8 && PAGES != FOURS; i++)
        out[i] = warp_reduce<Add>(out[i], LANES);
    if (lane >= LANES || c >= hd)
        return;
    store8(result_of(op, r) + h * hd + c, to_halfs(out), hd - c, wide);
}

static const DecodeKernel weigh_kernels[] = DECODE_KERNELS(weigh_kernel);

static int gpu_weigh(CudaGpu *g, const Op *op, Error *err) {
    DecodeKernel kernel = decode_kernel(weigh_kernels, op);
    if (!op->attend.len.cols)
        return 0;
    kernel<<<decode_grid(op, 1), HEADS * WARP, 0, g->stream[op->lane]>>>(*op, eights(op->hd), NULL);
    return launched("sparse attention", err);
}

// -------------------------------------------------------------------------------------------------
// The next token
//
// The most probable one, and for evaluation how probable the given ones are. With a temperature the
// CPU chooses, from logits that have come down (Plan.chooser in plan.h).
// -------------------------------------------------------------------------------------------------

/* The largest logit that is a number and the lowest id that has it, known to all. bad becomes 1
 * where one of the logits, chosen or not, is no finite number. */
static __device__ int largest_logit(const float *logits, int vocab, float *largest, int *bad) {
    float most = -INFINITY;
    int best = vocab;
    bool finite = true;
#pragma unroll 8 /* so many are read before the first is looked at */
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        const float logit = logits[i];
        if (logit > most || (logit == most && best == vocab)) {
            most = logit;
            best = i;
        }
        finite = finite && isfinite(logit);
    }
    if (!finite)
        atomicExch(bad, 1); /* the host may be looking */
    *largest = block_reduce<Most>(most);
    best = block_reduce<Least>(most == *largest ? best : vocab);
    return best < vocab ? best : 0; /* nothing but NaN */
}

/* One block a row. */
static __global__ void __launch_bounds__(MOST_THREADS)
    pick_kernel(int *ids, int *bad, const float *logits, int vocab) {
    float largest;
    const int id = largest_logit(logits + (size_t)blockIdx.x * vocab, vocab, &largest, bad);
    if (threadIdx.x == 0)
        ids[blockIdx.x] = id;
}

/* One block a row. What is no number makes logp none. */
static __global__ void __launch_bounds__(MOST_THREADS)
    score_kernel(float *logp, int *best, int *bad, const float *logits, const int *target,
                 int vocab) {
    const float *row = logits + (size_t)blockIdx.x * vocab;
    float largest;
    double sum = 0;
    int id = largest_logit(row, vocab, &largest, bad);
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        sum += expf(row[i] - largest);
    sum = block_reduce<Add>(sum);
    if (threadIdx.x)
        return;
    logp[blockIdx.x] = row[target[blockIdx.x]] - largest - logf((float)sum);
    best[blockIdx.x] = id;
}

static int gpu_pick(CudaGpu *g, const Op *op, Error *err) {
    const Tensor logits = op->pick.logits;
    CHECK(op->sampling.temperature <= 0);
    if (!logits.rows)
        return 0;
    pick_kernel<<<logits.rows, row_threads(logits.cols, MOST_THREADS), 0, g->stream[op->lane]>>>(
        (int *)op->pick.ids.at, g->not_finite, (const float *)logits.at, logits.cols);
    return launched("pick", err);
}

static int gpu_score(CudaGpu *g, const Op *op, Error *err) {
    const Tensor logits = op->score.logits;
    if (!logits.rows)
        return 0;
    score_kernel<<<logits.rows, row_threads(logits.cols, MOST_THREADS), 0, g->stream[op->lane]>>>(
        (float *)op->score.logp.at, (int *)op->score.best.at, g->not_finite,
        (const float *)logits.at, (const int *)op->score.target.at, logits.cols);
    return launched("score", err);
}

static int gpu_run(Gpu *gpu, const Op *op, Error *err) {
    static int (*const run[NCODES])(CudaGpu *, const Op *, Error *) = {
        NULL,       gpu_embed,          gpu_layernorm, gpu_linear, gpu_unpack,
        gpu_pack,   gpu_attend_prefill, /* in OpCode's order */
        gpu_attend, gpu_select,         NULL,          gpu_weigh,  gpu_append,
        gpu_pick,   gpu_score};
    CHECK(run[op->code]);
    return run[op->code](cuda(gpu), op, err);
}

// -------------------------------------------------------------------------------------------------
// Copies, and marks: points of a stream that others wait for
// -------------------------------------------------------------------------------------------------

/* How many of the bytes from p on lie before the next border between two pinned pieces. */
static size_t before_border(const CudaGpu *g, const void *p) {
    const size_t at =
        (size_t)((const char *)p - g->pinned); /* of another address beyond all of them */
    return at < g->pinned_bytes ? g->pin_part - at % g->pin_part : SIZE_MAX;
}

/* Whole copies go in pieces, so that on a link that takes one at a time a slab of weights does not
 * keep results of attention waiting for long. CUDA takes no copy that crosses a border between two
 * pinned pieces. */
static int gpu_copy(Gpu *gpu, Lane lane, void *dst, size_t dst_pitch, const void *src,
                    size_t src_pitch, size_t row_bytes, int rows, Error *err) {
    const CudaGpu *g = cuda(gpu);
    const size_t PIECE = 16 << 20, last = rows > 0 ? rows - 1 : 0;
    const bool whole = dst_pitch == row_bytes && src_pitch == row_bytes;
    cudaError_t e = cudaSuccess;
    if (rows > 1 && !whole && before_border(g, dst) >= last * dst_pitch + row_bytes &&
        before_border(g, src) >= last * src_pitch + row_bytes)
        return checked(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, row_bytes, rows,
                                         cudaMemcpyDefault, stream_of(gpu, lane)),
                       "copy", err);
    const size_t bytes = whole ? row_bytes * rows : row_bytes;
    for (int r = 0; r < (whole ? rows > 0 : rows) && !e; r++)
        for (size_t at = 0, n; at < bytes && !e; at += n) {
            char *to = (char *)dst + r * dst_pitch + at;
            const char *from = (const char *)src + r * src_pitch + at;
            n = std::min(std::min(bytes - at, PIECE),
                         std::min(before_border(g, to), before_border(g, from)));
            e = cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream_of(gpu, lane));
        }
    return checked(e, "copy", err);
}

static int gpu_begin(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    return checked(cudaEventRecord(cuda(gpu)->begins[lane][mark % MARKS], stream_of(gpu, lane)),
                   "event", err);
}

static int record(CudaGpu *g, Lane lane, uint64_t mark, cudaEvent_t event, Error *err) {
    g->reached[lane][mark % MARKS] = event;
    return checked(cudaEventRecord(event, g->stream[lane]), "event", err);
}

static int gpu_end(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    return record(cuda(gpu), lane, mark, cuda(gpu)->ends[lane][mark % MARKS], err);
}

static int gpu_mark(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    return record(cuda(gpu), lane, mark, cuda(gpu)->marks[lane][mark % MARKS], err);
}

static int gpu_after(Gpu *gpu, Lane lane, Lane other, uint64_t mark, Error *err) {
    return checked(
        cudaStreamWaitEvent(stream_of(gpu, lane), cuda(gpu)->reached[other][mark % MARKS], 0),
        "wait", err);
}

static int gpu_sync(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    const cudaEvent_t event = cuda(gpu)->reached[lane][mark % MARKS];
    const double until = gpu->poll_s > 0 ? seconds_now() + gpu->poll_s : 0;
    cudaError_t e = cudaErrorNotReady;
    while (e == cudaErrorNotReady && seconds_now() < until)
        if ((e = cudaEventQuery(event)) == cudaErrorNotReady)
            cudaGetLastError(); /* or the next launch would be blamed */
    return checked(e == cudaErrorNotReady ? cudaEventSynchronize(event) : e, lane_name[lane], err);
}

/* Seconds between two events, or -1. */
static double elapsed(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    if (!cudaEventElapsedTime(&ms, from, to))
        return ms * 1e-3;
    cudaGetLastError(); /* or the next launch would be blamed for it */
    return -1;
}

static double gpu_took(Gpu *gpu, Lane lane, uint64_t first, uint64_t last) {
    double s = elapsed(cuda(gpu)->begins[lane][first % MARKS], cuda(gpu)->ends[lane][last % MARKS]);
    return s < 0 ? 0 : s;
}

/* Counts on from the begin before: CUDA tells times as floats of milliseconds, which are exact
 * while they are short. The mark gets an event of no use any more for the one that is kept. */
static double gpu_began(Gpu *gpu, Lane lane, uint64_t mark) {
    CudaGpu *g = cuda(gpu);
    cudaEvent_t last = g->known[lane], *next = &g->begins[lane][mark % MARKS];
    double s = elapsed(last, *next);
    if (s < 0)
        return g->known_s[lane];
    g->known[lane] = *next;
    *next = last;
    return g->known_s[lane] += s;
}

// -------------------------------------------------------------------------------------------------
// Memory
// -------------------------------------------------------------------------------------------------

static void *gpu_alloc(Gpu *gpu, size_t bytes, Error *err) {
    void *p;
    size_t available = 0, total;
    *cuda(gpu)->not_finite = 0;
    if (cudaMalloc(&p, bytes) == cudaSuccess)
        return p;
    cudaGetLastError();
    cudaMemGetInfo(&available, &total);
    fail(err, EXIT_FAILED,
         "cannot allocate %.1f MiB on the GPU, which has %.1f MiB free; lower --gpu-mem, or end "
         "other programs that use it",
         bytes / 1048576.0, available / 1048576.0);
    return NULL;
}

static void gpu_release(Gpu *gpu, void *p) {
    CudaGpu *g = cuda(gpu);
    for (int lane = 0; lane < NLANES; lane++)
        if (on_gpu(lane))
            cudaStreamSynchronize(g->stream[lane]);
    cudaFree(p);
    cudaGetLastError(); /* what went wrong before has been said */
}

static void gpu_unpin(Gpu *gpu, void *host) {
    CudaGpu *g = cuda(gpu);
    for (size_t at = 0; at < g->pinned_bytes; at += g->pin_part)
        cudaHostUnregister((char *)host + at);
    g->pinned = NULL;
    g->pinned_bytes = 0;
}

/* One arena, in pieces: a piece that fails takes back those before it. */
static int gpu_pin(Gpu *gpu, void *host, size_t bytes, Error *err) {
    CudaGpu *g = cuda(gpu);
    cudaError_t e = cudaSuccess;
    CHECK(!g->pinned_bytes);
    for (g->pinned = (char *)host; g->pinned_bytes < bytes && !e;) {
        const size_t n = std::min(bytes - g->pinned_bytes, g->pin_part);
        e = cudaHostRegister(g->pinned + g->pinned_bytes, n, cudaHostRegisterDefault);
        if (!e)
            g->pinned_bytes += n;
    }
    if (!e)
        return 0;
    gpu_unpin(gpu, host);
    cudaGetLastError();
    return fail(err, EXIT_FAILED,
                "cannot pin the CPU tier's %.1f MiB (%s), so copies will be slower and overlap "
                "less; raise the limit of "
                "locked memory (ulimit -l), or lower --cpu-mem",
                bytes / 1048576.0, cudaGetErrorString(e));
}

static int gpu_upload(Gpu *, void *dst, const void *src, size_t bytes, Error *err) {
    /* from memory that is not pinned, cudaMemcpy returns before the last bytes have arrived */
    if (checked(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice), "upload", err))
        return -1;
    return checked(cudaStreamSynchronize(NULL), "upload", err);
}

static int gpu_download(Gpu *, void *dst, const void *src, size_t bytes, Error *err) {
    return checked(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost), "download", err);
}

static size_t gpu_in_use(Gpu *) {
    size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    return total - available;
}

// -------------------------------------------------------------------------------------------------
// Opening and closing
// -------------------------------------------------------------------------------------------------

static void gpu_close(Gpu *gpu) {
    CudaGpu *g = cuda(gpu);
    for (int lane = 0; lane < NLANES; lane++) {
        for (int i = 0; i < MARKS; i++) {
            if (g->begins[lane][i])
                cudaEventDestroy(g->begins[lane][i]);
            if (g->ends[lane][i])
                cudaEventDestroy(g->ends[lane][i]);
            if (g->marks[lane][i])
                cudaEventDestroy(g->marks[lane][i]);
        }
        if (g->known[lane])
            cudaEventDestroy(g->known[lane]);
        if (g->stream[lane])
            cudaStreamDestroy(g->stream[lane]);
    }
    if (g->blas)
        cublasLtDestroy(g->blas);
    for (char *p : {g->scratch, g->workspace[0], g->workspace[1]})
        if (p)
            cudaFree(p);
    if (g->not_finite)
        cudaFreeHost(g->not_finite);
    free(g);
}

/* Asks about all kernels. CUDA loads one when it is first launched or asked about, and no prompt
 * shall wait for that. */
static int load_kernels(Error *err) {
    const void *const others[] = {(const void *)unpack_kernel, (const void *)pack_kernel,
                                  (const void *)embed_kernel,  (const void *)layernorm_kernel,
                                  (const void *)bias_kernel,   (const void *)combine_kernel,
                                  (const void *)append_kernel, (const void *)select_kernel,
                                  (const void *)pick_kernel,   (const void *)score_kernel};
    cudaFuncAttributes attributes;
    int status = 0;
    auto load_one = [&](const void *kernel) {
        if (!status)
            status =
                checked(cudaFuncGetAttributes(&attributes, kernel), "looking for its code", err);
    };
    auto load = [&](const auto &kernels) {
        for (auto kernel : kernels)
            load_one((const void *)kernel);
    };
    load(others);
    load(prefill_kernels);
    load(attend_kernels);
    load(score_kernels);
    load(weigh_kernels);
    for (const auto &packed : packed_kernels)
        load_one((const void *)packed.kernel);
    return status;
}

/* Blocks of products with packed weights have as much shared memory as they ask for, where the GPU
 * has it. */
static int open_shared_memory(CudaGpu *g, size_t most, Error *err) {
    for (int i = 0; i < PACKED_KERNELS && packed_kernels[i].shared <= most; i++) {
        g->packed_most = i;
        if (checked(cudaFuncSetAttribute((const void *)packed_kernels[i].kernel,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)packed_kernels[i].shared),
                    "shared memory", err))
            return -1;
    }
    return 0;
}

/* Finds the GPU and what it is. */
static int find_gpu(CudaGpu *g, Error *err) {
    int n = 0;
    cudaDeviceProp card;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorInsufficientDriver)
        return fail(
            err, EXIT_USAGE,
            "no GPU: NVIDIA's driver is missing, or older than CUDA %d; install a newer one",
            CUDART_VERSION / 1000);
    if (e == cudaErrorNoDevice || (e == cudaSuccess && !n))
        return fail(err, EXIT_USAGE,
                    "no GPU: the driver finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES");
    if (checked(e, "looking for it", err) || checked(cudaSetDevice(0), "choosing it", err) ||
        checked(cudaGetDeviceProperties(&card, 0), "asking what it is", err))
        return -1;
    snprintf(g->name, sizeof g->name, "%.80s, sm_%d%d", card.name, card.major, card.minor);
    g->total = card.totalGlobalMem;
    if (card.major * 10 + card.minor < 75)
        return fail(err, EXIT_USAGE,
                    "the GPU, %s, is too old: sm_75 (Turing) or later is needed; use --device host",
                    g->name);
    g->places = 2 * card.multiProcessorCount;
    if (load_kernels(err))
        return -1;
    return open_shared_memory(g, card.sharedMemPerBlockOptin, err);
}

static int open_streams(CudaGpu *g, Error *err) {
    for (int lane = 0; lane < NLANES; lane++) {
        if (!on_gpu(lane))
            continue;
        if (checked(cudaStreamCreateWithFlags(&g->stream[lane], cudaStreamNonBlocking), "streams",
                    err))
            return -1;
        for (int i = 0; i < MARKS; i++) /* threads that wait sleep */
            if (checked(cudaEventCreateWithFlags(&g->begins[lane][i], cudaEventDefault), "events",
                        err) ||
                checked(cudaEventCreateWithFlags(&g->ends[lane][i], cudaEventBlockingSync),
                        "events", err) ||
                checked(cudaEventCreateWithFlags(&g->marks[lane][i],
                                                 cudaEventBlockingSync | cudaEventDisableTiming),
                        "events", err))
                return -1;
    }
    return 0;
}

/* The GPU's clock and ours at one moment. */
static int open_clock(CudaGpu *g, Error *err) {
    for (int lane = 0; lane < NLANES; lane++)
        if (on_gpu(lane) &&
            (checked(cudaEventCreateWithFlags(&g->known[lane], cudaEventDefault), "events", err) ||
             checked(cudaEventRecord(g->known[lane], g->stream[PROJECT]), "event", err)))
            return -1;
    if (checked(cudaStreamSynchronize(g->stream[PROJECT]), "clock", err))
        return -1;
    for (int lane = 0; lane < NLANES; lane++)
        g->known_s[lane] = seconds_now();
    return 0;
}

static int open_memory(CudaGpu *g, Error *err) {
    const size_t most = 1u << 30;
    if (cublasLtCreate(&g->blas))
        return fail(err, EXIT_FAILED,
                    "cannot open cuBLAS; check that driver and CUDA toolkit fit together");
    if (checked(cudaHostAlloc((void **)&g->not_finite, sizeof *g->not_finite, cudaHostAllocDefault),
                "pinned memory", err))
        return -1;
    g->bad = g->not_finite;
    /* one allocation each, so that a sanitizer sees what is written beyond the end of one */
    if (!(g->scratch = (char *)gpu_alloc(g, SCRATCH, err)))
        return -1;
    for (char *&workspace : g->workspace)
        if (!(workspace = (char *)gpu_alloc(g, WORKSPACE, err)))
            return -1;
    g->max_head = TILES_MAX * TILE;
    g->pin_part = PINNED_AT_ONCE;
    /* the context, which nobody tells the size of, is what is in use; where others use the GPU too,
     * at most `most` of it */
    size_t in_use = gpu_in_use(g);
    g->overhead = in_use < most ? in_use : most;
    g->spare = spare_of(g->total);
    return 0;
}

Gpu *cuda_open_gpu(Error *err) {
    static const GpuCalls calls = {gpu_run,     gpu_copy, gpu_begin, gpu_end,    gpu_mark,
                                   gpu_after,   gpu_sync, gpu_took,  gpu_began,  gpu_alloc,
                                   gpu_release, gpu_pin,  gpu_unpin, gpu_upload, gpu_download};
    CudaGpu *g = (CudaGpu *)xcalloc(1, sizeof *g);
    g->call = &calls;
    g->in_use = gpu_in_use;
    g->close = gpu_close;
    if (!find_gpu(g, err) && !open_streams(g, err) && !open_clock(g, err) && !open_memory(g, err))
        return g;
    gpu_close(g);
    return NULL;
}
