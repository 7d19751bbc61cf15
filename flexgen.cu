/* flexgen.cu: the device that is a GPU: its kernels with their launchers, cuBLAS, streams, events
 * and memory. lanes.c and tiers.c use it through struct Gpu of device.h.
 *
 * Paper: sections 3 and 5, as in host.c. For each op that gpu_run carries out there is a launcher,
 * gpu_NAME, whose twin on the CPU, of host.c and the files beside it, says what the op computes.
 * Both take the Op; a kernel gets the op, or parts of it, by value. Activations, weights, K and V
 * are half, sums are float. Nothing here knows of tiers, plans or schedules, and after opening
 * nothing is allocated except what cuBLAS keeps about the shape of a product. The whole device is
 * never synchronized: a stream waits for events of other streams, and a thread for one event.
 *
 * Order of sums: the result for a row may not depend on the row's place in a batch. Therefore
 * attention cuts a sequence at fixed tokens, whoever else is in the batch, products with packed
 * weights cut the columns by the shape of the matrix, and cuBLAS is asked by shape alone, so that
 * one shape always meets one algorithm.
 *
 * Memory: most of the traffic is K, V and the weights. Kernels read these once, and 16 bytes at a
 * time where the length of a row allows it (`wide`).
 *
 * Threads: a thread's place in its warp is `in_warp`. Four neighbouring threads are a quad: `quad`
 * is in_warp / 4, `in_quad` is in_warp % 4.
 * Read next: cost/profile.c. */
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "device/parts.h"
#include "device/tensor_core.h"

enum { WARP = 32, THREADS = 256, MOST_THREADS = 1024 };

// -------------------------------------------------------------------------------------------------
// Parts of kernels
//
// Almost all kernels read and write eight halfs at a time, since 16 bytes are the widest load that
// all these GPUs have. A sum or a maximum is found through the registers of a warp, and, where all
// threads of a block want it, through shared memory.
// -------------------------------------------------------------------------------------------------

/* Eight halfs as they lie in memory. */
typedef uint4 Half8;

/* Returns halfs p[0..n) and zeros behind them. wide: p is 16-byte aligned, and n is either at least
 * 8, or 0 or less. */
__device__ Half8 load8(const half *p, int n, bool wide) {
    Half8 bits = make_uint4(0, 0, 0, 0);
    if (wide) { /* a condition of its own, so that a warp never takes both branches */
        if (n > 0)
            bits = *(Half8 *)p;
        return bits;
    }
    half *h = (half *)&bits;
    for (int i = 0; i < 8; i++)
        if (i < n)
            h[i] = p[i];
    return bits;
}

/* Writes eight halfs to p, in memory and 16-byte aligned, by one instruction, which cannot write to
 * shared memory. Of `*p = bits` the compiler often makes four, of 4 bytes each. */
__device__ void store_wide(half *p, Half8 bits) { __stwb((Half8 *)p, bits); }

/* Writes the first n of eight halfs to p; wide as above. */
__device__ void store8(half *p, Half8 bits, int n, bool wide) {
    const half *h = (half *)&bits;
    if (wide) {
        if (n > 0)
            store_wide(p, bits);
        return;
    }
    for (int i = 0; i < 8; i++)
        if (i < n)
            p[i] = h[i];
}

__device__ void to_floats(float x[8], Half8 bits) {
    const half2 *h = (half2 *)&bits;
    for (int i = 0; i < 4; i++) {
        float2 f = __half22float2(h[i]);
        x[2 * i] = f.x;
        x[2 * i + 1] = f.y;
    }
}

__device__ Half8 to_halfs(const float x[8]) {
    Half8 bits;
    half2 *h = (half2 *)&bits;
    for (int i = 0; i < 4; i++)
        h[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
    return bits;
}

/* These three join two values into one, for the reductions below. */
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

/* Joins the x of those threads of a warp whose in_warp differ only in the bits of `from`, 2 `from`,
 * ... below `to`, and returns the result to each of them. */
template <class Join, class T>
__device__ T warp_reduce(T x, int from, int to = WARP) {
    for (int d = from; d < to; d *= 2)
        x = Join()(x, __shfl_xor_sync(0xffffffff, x, d));
    return x;
}

/* Joins the x of all threads of a block, which has whole warps, and returns the result to each. */
template <class Join, class T>
__device__ T block_reduce(T x) {
    __shared__ T part[MOST_THREADS / WARP];
    x = warp_reduce<Join>(x, 1);
    __syncthreads(); /* the call before this one may still be reading part */
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = x;
    __syncthreads();
    x = part[0];
    for (int w = 1; w < (int)blockDim.x / WARP; w++)
        x = Join()(x, part[w]);
    return x;
}

// -------------------------------------------------------------------------------------------------
// An open GPU, and what launchers need of it
// -------------------------------------------------------------------------------------------------

/* A product y (m, n) = x (m, k) w^T, as far as cuBLAS distinguishes products. All fields have 4
 * bytes, since shapes are compared as bytes. */
struct Shape {
    int m, n, k, y_ld, y_type, relu;
    uint32_t bias; /* the alignment of the bias in bytes; 0: there is none */
};

/* One product: what cuBLAS has been told about it, and what it answered. All zero: not in use. */
struct Known {
    Shape shape;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t w, x, y;
    cublasLtMatmulAlgo_t algorithm;
    bool fused; /* the product adds the bias and takes the ReLU */
};

enum { KNOWN = 128, WORKSPACE = 32 << 20 };

/* The bytes that are pinned in one call. Where the system limits what may be pinned, as under WSL,
 * so much more or less of the CPU tier is pinned. */
static const size_t PINNED_AT_ONCE = (size_t)1 << 30;

/* A mark of a lane: events on its stream. */
struct Mark {
    cudaEvent_t begin, end; /* with times */
    cudaEvent_t untimed;    /* an end without a time */
    cudaEvent_t reached;    /* one of the two ends: the one that was recorded last */
};

/* An open GPU. Lanes that do not touch the GPU have no streams and no events. */
struct CudaGpu : Gpu {
    cudaStream_t stream[NLANES];
    Mark marks[NLANES][MARKS];
    cudaEvent_t known[NLANES]; /* a past event: at first of the opening, then the latest begin that
                                  gpu_began was asked for */
    double known_s[NLANES];    /* its time, seconds */
    cublasLtHandle_t blas;
    Known products[NLANES][KNOWN]; /* of PROJECT and FINISH; one thread looks them up */
    int next_product[NLANES];      /* the place that the next new product takes, modulo KNOWN */
    char *scratch;                 /* WORKSPACE bytes for partial results and scores of attention */
    int attends;                   /* the only lane that uses scratch; NLANES: none has yet */
    char *workspace[2]; /* WORKSPACE bytes each, for the products of PROJECT and of FINISH */
    int places;         /* two blocks on each multiprocessor */
    int since_80;       /* 1 if the code was compiled for sm_80 or later */
    int packed_most;    /* the last of packed_kernels that shared memory is large enough for */
    int *not_finite;    /* Gpu.bad, in pinned memory: kernels write it, the host reads it */
    char *pinned;       /* `pinned_bytes` of the host, pinned in ranges of pin_part */
    size_t pinned_bytes;
};

static_assert(sizeof(Op) <= 4000, "a kernel gets an op by value, and 4 KB of arguments at most");

static CudaGpu *cuda(Gpu *gpu) { return (CudaGpu *)gpu; }
static cudaStream_t stream_of(Gpu *gpu, Lane lane) { return cuda(gpu)->stream[lane]; }
static Mark *mark_of(Gpu *gpu, Lane lane, uint64_t mark) {
    return &cuda(gpu)->marks[lane][mark % MARKS];
}

static bool on_gpu(int lane) {
    return lane_channel[lane] == GPU || lane_channel[lane] == CTOG || lane_channel[lane] == GTOC;
}

/* Returns 0 if e is success, else -1 and err: what was done, what CUDA says, and a remedy. */
static int checked(cudaError_t e, const char *what, Error *err) {
    if (!e)
        return 0;
    const char *remedy = "run again under compute-sanitizer, which names the place";
    /* under WSL memory that a GPU lacks may show as "not ready" */
    if (e == cudaErrorMemoryAllocation || e == cudaErrorNotReady)
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

static __host__ __device__ bool eights(int a) { return a % 8 == 0; }

/* Returns how many blocks (or threads) of `size` things each n things need. */
static int blocks_for(long n, int size) { return (int)((n + size - 1) / size); }

/* Returns the threads of a block that has a row: one for eight columns, in whole warps, and `most`
 * for longer rows, whose threads have more than eight. */
static int row_threads(int cols, int most = THREADS) {
    return imin(blocks_for(cols, 8 * WARP) * WARP, most);
}

// -------------------------------------------------------------------------------------------------
// Embeddings and norms
//
// The formulas of section 3 leave these out; OPT begins with the rows of two tables, for the token
// and for its place, and normalizes the rows before or after each half of a layer. A block has one
// row. It reads the row once, with the weights and biases of the norm, and writes one row of y.
// -------------------------------------------------------------------------------------------------

__global__ void embed_kernel(Op op, bool wide) {
    Tensor y = op.embed.y, table = op.embed.table;
    const half *from = (half *)table.at + ((const int *)op.embed.idx.at)[blockIdx.x] * table.ld;
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

/* Does the same without op.add, for a packed table: see the next chapter. */
__global__ void embed_packed_kernel(Op op, bool);

static void gpu_embed(CudaGpu *, const Op *op, cudaStream_t stream) {
    Tensor y = op->embed.y;
    bool packed = op->embed.table.type == U8;
    CHECK(y.type == F16 && (packed ? !op->add : op->embed.table.type == F16));
    auto kernel = packed ? embed_packed_kernel : embed_kernel;
    kernel<<<y.rows, row_threads(y.cols), 0, stream>>>(*op, eights(y.cols));
}

enum {
    PARTS = 2, /* of a row that a thread of layernorm has; each is 8 numbers */
    MOST_COLUMNS = MOST_THREADS * 8 * PARTS
};

/* Normalizes a row, which stays in registers: its mean, the variance about the mean, the result.
 * The mean is summed as distances from the first element, since float sums of large numbers lose
 * it. */
__global__ void __launch_bounds__(MOST_THREADS)
    layernorm_kernel(half *y, const half *x, const half *w, const half *b, int cols, bool wide) {
    const half *row = x + (size_t)blockIdx.x * cols;
    half *to = y + (size_t)blockIdx.x * cols;
    int first = threadIdx.x * 8, step = blockDim.x * 8;
    Half8 part[PARTS];
    for (int p = 0; p < PARTS; p++)
        part[p] = load8(row + first + p * step, cols - first - p * step, wide);
    /* returns the sum of term(v) of all numbers v of the row */
    auto sum = [&](auto term) {
        float v[8], mine = 0;
        for (int p = 0; p < PARTS; p++) {
            to_floats(v, part[p]);
            for (int i = 0; i < 8; i++)
                mine += first + p * step + i < cols ? term(v[i]) : 0;
        }
        return block_reduce<Add>(mine);
    };
    float near = __half2float(row[0]);
    float mean = near + sum([&](float v) { return v - near; }) / cols;
    float square = sum([&](float v) { return (v - mean) * (v - mean); });
    float norm = rsqrtf(square / cols + 1e-5f);
    for (int p = 0; p < PARTS; p++) {
        int c = first + p * step;
        float v[8], scale[8], shift[8];
        to_floats(v, part[p]);
        to_floats(scale, load8(w + c, cols - c, wide));
        to_floats(shift, load8(b + c, cols - c, wide));
        for (int i = 0; i < 8; i++)
            v[i] = (v[i] - mean) * norm * scale[i] + shift[i];
        store8(to + c, to_halfs(v), cols - c, wide);
    }
}

static void gpu_layernorm(CudaGpu *, const Op *op, cudaStream_t stream) {
    Tensor x = op->layernorm.x;
    CHECK(x.cols <= MOST_COLUMNS);
    layernorm_kernel<<<x.rows, row_threads(x.cols, MOST_THREADS), 0, stream>>>(
        (half *)op->layernorm.y.at, (half *)x.at, (half *)op->layernorm.w.at,
        (half *)op->layernorm.b.at, x.cols, eights(x.cols));
}

// -------------------------------------------------------------------------------------------------
// Packed numbers (section 5)
//
// Groups of 64 numbers are stored as a min, a scale and codes of 4 bits. quant.h has the layout,
// and quant.c the plain functions, which these follow bit for bit. A block unpacks COLUMNS columns
// of a row of groups of a weight, from packed bytes to half. A warp packs one group of a head of k
// or v.
// -------------------------------------------------------------------------------------------------

enum { GROUP_WORDS = GROUP_BYTES / 4 };

/* Returns a code as a float. A float whose bits are those of 2^23 and the code is 2^23 + code;
 * subtracting 2^23 leaves the code. A conversion would have a quarter of the speed. */
__device__ float code_float(unsigned code) {
    return __uint_as_float(0x4b000000 | code) - 8388608.f;
}

/* Returns a group's min in x and its scale in y. header: the first word of the group. */
__device__ float2 group_header(unsigned header) { return __half22float2(*(half2 *)&header); }

/* Returns min + scale * code, to be rounded to a half. Whether the compiler fuses the two steps
 * does not matter, since the product of a half and a code is exact. */
__device__ float unpack_code(float2 header, unsigned code) {
    return header.x + header.y * code_float(code);
}

enum { COLUMNS = 64 };

/* Unpacks COLUMNS columns of one row of groups, through shared memory. A thread has 8 of the
 * columns, and of each the codes of 8 rows: 4 bytes. */
__global__ void __launch_bounds__(COLUMNS) unpack_kernel(Op op) {
    __shared__ unsigned groups[COLUMNS * GROUP_WORDS];
    int k = op.unpack.w.cols;
    const unsigned *from = (unsigned *)op.unpack.packed.at +
                           ((size_t)blockIdx.y * k + blockIdx.x * COLUMNS) * GROUP_WORDS;
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
        header[j] = group_header(group[0]);
        codes[j] = group[1 + word];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) { /* the low halves of the 4 bytes, then the high halves */
        int row = top + i % 4 + i / 4 * 16;
        float x[8];
        for (int j = 0; j < 8; j++)
            x[j] = unpack_code(header[j], codes[j] >> (i % 4 * 8 + i / 4 * 4) & 15);
        half *w = (half *)op.unpack.w.at + (size_t)row * k + blockIdx.x * COLUMNS + c;
        store_wide(w, to_halfs(x));
    }
}

/* Unpacks a row of a token table: of each column it reads the group's header and one code. */
__global__ void embed_packed_kernel(Op op, bool) {
    int cols = op.embed.y.cols, id = ((const int *)op.embed.idx.at)[blockIdx.x], row = id % GROUP;
    int at = GROUP_HEADER + row / 32 * 16 + row % 16, shift = row % 32 / 16 * 4;
    const uint8_t *from = (uint8_t *)op.embed.table.at + id / GROUP * (size_t)cols * GROUP_BYTES;
    half *to = (half *)op.embed.y.at + (size_t)blockIdx.x * cols;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        const uint8_t *group = from + c * GROUP_BYTES;
        to[c] =
            __float2half(unpack_code(group_header(*(unsigned *)group), group[at] >> shift & 15));
    }
}

/* Returns (max - min) / 15 as a half, rounded up, or down where the largest code would otherwise
 * leave the range of halfs. */
__device__ half group_scale(float min, float max) {
    float exact = (max - min) / 15;
    __half_raw scale = __float2half(exact);
    if (__half2float(scale) < exact)
        scale.x++;
    if (min + 15 * __half2float(scale) >= 65520)
        scale.x--;
    return scale;
}

/* Packs a group of n numbers, 16, 32, 48 or 64, by one warp. */
__device__ void pack_group(uint8_t *to, const half *x, int n) {
    unsigned short poison = 0x7e00; /* NaN */
    int in_warp = threadIdx.x % WARP, finite = 1;
    float min = INFINITY, max = -INFINITY;
    for (int i = in_warp; i < n; i += WARP) {
        float v = __half2float(x[i]);
        min = fminf(min, v);
        max = fmaxf(max, v);
        finite &= isfinite(v) ? 1 : 0;
    }
    min = -warp_reduce<Most>(-min, 1);
    max = warp_reduce<Most>(max, 1);
    finite = warp_reduce<Least>(finite, 1);
    min += 0.f; /* -0 becomes 0, as in quant.c */
    max += 0.f;
    half scale = finite ? group_scale(min, max) : __float2half(0);
    float step = __half2float(scale), inverse = step > 0 ? 1 / step : 0;
    auto code = [&](int i) {
        return i < n && finite ? (unsigned)rintf((__half2float(x[i]) - min) * inverse) : 0;
    };
    if (in_warp == 0) {
        ((half *)to)[0] = finite ? __float2half(min) : half(__half_raw{poison});
        ((half *)to)[1] = scale;
    }
    int i = in_warp / 16 * 32 + in_warp % 16; /* the code in the low half of byte in_warp */
    if (i < n)
        to[GROUP_HEADER + in_warp] = (uint8_t)(code(i) | code(i + 16) << 4);
}

/* Packs a row of kv: its nh heads of k go to k, those of v to v. Warp by warp, the blocks with the
 * same blockIdx.x share the row. */
__device__ void pack_row(uint8_t *k, uint8_t *v, const half *kv, int nh, int hd) {
    int groups = (hd + GROUP - 1) / GROUP, number = (blockIdx.y * blockDim.x + threadIdx.x) / WARP;
    int head = number / groups, g = number % groups;
    if (head >= 2 * nh)
        return;
    uint8_t *to = head < nh ? k + head * quant_bytes(hd) : v + (head - nh) * quant_bytes(hd);
    pack_group(to + g * GROUP_BYTES, kv + (size_t)head * hd + g * GROUP,
               min((int)GROUP, hd - g * GROUP));
}

__global__ void pack_kernel(Op op) {
    size_t bytes = op.nh * quant_bytes(op.hd);
    uint8_t *row = (uint8_t *)op.pack.packed.at + blockIdx.x * 2 * bytes;
    pack_row(row, row + bytes, (half *)op.pack.kv.at + blockIdx.x * op.pack.kv.ld, op.nh, op.hd);
}

/* Returns a grid with as many blocks for each row as its groups need, a warp for each group. */
static dim3 pack_grid(int rows, const Op *op) {
    return dim3(rows, blocks_for(2 * op->nh * blocks_for(op->hd, GROUP), THREADS / WARP));
}

static void gpu_pack(CudaGpu *, const Op *op, cudaStream_t stream) {
    pack_kernel<<<pack_grid(op->pack.kv.rows, op), THREADS, 0, stream>>>(*op);
}

static void gpu_unpack(CudaGpu *, const Op *op, cudaStream_t stream) {
    Tensor w = op->unpack.w;
    CHECK(w.rows % GROUP == 0 && w.cols % COLUMNS == 0);
    unpack_kernel<<<dim3(w.cols / COLUMNS, w.rows / GROUP), COLUMNS, 0, stream>>>(*op);
}

// -------------------------------------------------------------------------------------------------
// Products: cuBLAS
//
// Section 3's x w_Q, x w_K, x w_V, the products with w_O, w_1 and w_2, and the logits. cuBLAS
// divides the work. It reads x (m, k), w (n, k) and a bias, and writes y (m, n), or adds to the
// residual that y holds. It sees matrices by columns, so that for it this is
//     y^T (n, m) = w (n, k) x^T (k, m), where w as it lies in memory is transposed.
// One call also adds the bias, or the residual, and takes the ReLU. The algorithm that cuBLAS
// chooses for a shape is kept.
// -------------------------------------------------------------------------------------------------

static int blas_checked(cublasStatus_t s, const Shape *p, Error *err) {
    if (!s)
        return 0;
    const char *remedy = "check that driver and CUDA toolkit fit together";
    if (s == CUBLAS_STATUS_ALLOC_FAILED)
        remedy = "lower --gpu-mem";
    if (s == CUBLAS_STATUS_NOT_SUPPORTED)
        remedy = "it has no kernel for this shape: use --device host";
    return fail(err, EXIT_FAILED, "cuBLAS, a product of %d x %d x %d: status %d; %s", p->m, p->n,
                p->k, (int)s, remedy);
}

/* Returns the largest power of two up to 16 that divides an address, or of several the lowest:
 * their bits are joined by `or`. */
static uint32_t alignment(size_t bits) {
    bits |= 16;
    return (uint32_t)(bits & -bits);
}

/* Sets an attribute of a product. */
template <class Value>
static cublasStatus_t describe(Known *p, cublasLtMatmulDescAttributes_t which, Value value) {
    return cublasLtMatmulDescSetAttribute(&p->product, which, &value, sizeof value);
}

/* Asks cuBLAS for an algorithm; returns false when it has none. b is the bias of this call, whose
 * address tells cuBLAS how biases are aligned. All matrices are aligned as their rows are: regions
 * begin at multiples of 64 bytes, and every matrix begins some whole rows after that. */
static bool ask(CudaGpu *g, Known *p, const void *b, bool fused) {
    /* NVIDIA does not say whether this ReLU keeps NaN; a GPU may report bad weights later */
    cublasLtEpilogue_t with_bias =
        p->shape.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
    cublasLtEpilogue_t epilogue = fused && b ? with_bias : CUBLASLT_EPILOGUE_DEFAULT;
    size_t y = type_bytes((Type)p->shape.y_type);
    uint32_t align = alignment((size_t)p->shape.k * 2 | p->shape.y_ld * y | p->shape.n * y);
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
        return cublasLtMatmulPreferenceSetAttribute(&preference, which, &value, sizeof value);
    };
    /* Blocks that share k may not add as halfs, nor in the order in which they finish. */
    bool refused = describe(p, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue) ||
                   (b && describe(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, b)) ||
                   cublasLtMatmulPreferenceInit(&preference) ||
                   prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)WORKSPACE) ||
                   prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction);
    for (auto which :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        refused = refused || prefer(which, align);
    if (refused ||
        cublasLtMatmulAlgoGetHeuristic(g->blas, &p->product, &p->w, &p->x, &p->y, &p->y,
                                       &preference, 1, &result, &found) ||
        !found || result.state)
        return false;
    p->algorithm = result.algo;
    p->fused = fused;
    return true;
}

/* Returns this product, known from before or asked for now; NULL and err when cuBLAS cannot compute
 * it. The oldest product gives way to a new one. */
static Known *find_product(CudaGpu *g, Lane lane, const Shape *s, const void *b, Error *err) {
    for (int i = 0; i < KNOWN; i++)
        if (!memcmp(&g->products[lane][i].shape, s, sizeof *s))
            return &g->products[lane][i];
    Known *p = &g->products[lane][g->next_product[lane]++ % KNOWN];
    cudaDataType y_type = s->y_type == F32 ? CUDA_R_32F : CUDA_R_16F;
    *p = {};
    cublasStatus_t status = cublasLtMatmulDescInit(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->w, CUDA_R_16F, s->k, s->n, s->k);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->x, CUDA_R_16F, s->k, s->m, s->k);
    if (!status)
        status = cublasLtMatrixLayoutInit(&p->y, y_type, s->n, s->m, s->y_ld);
    if (!status)
        status = describe(p, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    p->shape = *s;
    if (!status && (ask(g, p, b, true) || (b && ask(g, p, b, false))))
        return p;
    *p = {};
    blas_checked(status ? status : CUBLAS_STATUS_NOT_SUPPORTED, s, err);
    return NULL;
}

static char *workspace_of(CudaGpu *g, Lane lane) { return g->workspace[lane == FINISH]; }

/* Writes an output: adds the bias to its sum v, takes the ReLU, adds the residual, as asked. */
__device__ void store_output(const Op &op, int row, int col, float v) {
    const half *b = (half *)op.linear.b.at;
    size_t at = row * op.linear.y.ld + col;
    half *y = (half *)op.linear.y.at + at;
    if (col >= op.linear.y.cols)
        return;
    if (b)
        v += __half2float(b[col]);
    if (op.relu && v < 0)
        v = 0;
    if (op.linear.residual.at)
        v += __half2float(*y);
    if (op.linear.y.type == F32) /* logits, to which nothing is added */
        ((float *)op.linear.y.at)[at] = v;
    else
        *y = __float2half(v);
}

/* Adds the bias and takes the ReLU, where cuBLAS has no algorithm that includes them. A block has
 * one row of y. */
__global__ void bias_kernel(Op op) {
    const half *row = (half *)op.linear.y.at + blockIdx.x * op.linear.y.ld;
    for (int c = threadIdx.x; c < op.linear.y.cols; c += blockDim.x)
        store_output(op, blockIdx.x, c, __half2float(row[c]));
}

static int blas_linear(CudaGpu *g, const Op *op, cudaStream_t stream, Error *err) {
    Tensor y = op->linear.y;
    const void *w = op->linear.w.at, *x = op->linear.x.at, *b = op->linear.b.at;
    uint32_t bias = b ? alignment((size_t)b) : 0;
    Shape shape = {y.rows, y.cols, op->linear.x.cols, (int)y.ld, y.type, op->relu, bias};
    CHECK((!op->relu || b) && (y.type == F16 || !b));
    Known *known = find_product(g, op->lane, &shape, b, err);
    if (!known)
        return -1;
    float one = 1, keep = op->linear.residual.at != NULL;
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (b)
        s = describe(known, CUBLASLT_MATMUL_DESC_BIAS_POINTER, b);
    if (!s)
        s = cublasLtMatmul(g->blas, &known->product, &one, w, &known->w, x, &known->x, &keep, y.at,
                           &known->y, y.at, &known->y, &known->algorithm, workspace_of(g, op->lane),
                           WORKSPACE, stream);
    if (blas_checked(s, &shape, err))
        return -1;
    if (b && !known->fused) {
        Op rest = *op;
        rest.linear.residual = {}; /* cuBLAS has added it */
        bias_kernel<<<y.rows, row_threads(y.cols), 0, stream>>>(rest);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Products: packed weights, for a few rows (section 5)
//
// DIFFERS: the paper converts compressed weights back to F16 before a product. Such a product is as
// fast as its weights are read, and packed they are 28% of the bytes of F16. So for a few rows
// nothing but the packed bytes moves: they are unpacked in the registers from which tensor cores
// take them. These compute, for 16 outputs and 8 rows of x at a time,
//
//     sum (16 outputs, 8 rows) += w (16 outputs, 16 columns) x^T (16 columns, 8 rows)
//
// A thread's part of such a w is, in four columns, outputs `quad` and quad + 8 of the 16. Word
// `quad` of a group's codes has 8 outputs of one column: it is the thread's part of four such w at
// once, which together are all outputs of a group. Any columns may meet in an instruction, if w
// and x have them in the same places: a thread takes columns 8 in_quad .. + 7 of a portion, four at
// a time. Then its halfs of x are one load, and a warp's words of codes lie in different banks.
//
// A block has four rows of groups and two warps for each. The columns are dealt out, PORTION at a
// time, to the two warps and, where there are few outputs, to several blocks. Only n, k and the GPU
// decide how many, and sums are added in one order, so the bits of a row depend on no other row. A
// block takes all rows of x where shared memory is large enough, so that weights are read once.
// They and x come through a ring buffer with a place for SLOTS portions, all but one of which are
// in flight; on sm_75 the one in flight is in registers. The block writes y or, where blocks share
// outputs, sums of its own, which the last of these blocks adds.
// -------------------------------------------------------------------------------------------------

enum {
    FEW = 8,      /* rows of x in an instruction */
    SIDES = 4,    /* rows of groups of a block */
    SLICES = 2,   /* warps that share a row of groups */
    PORTION = 32, /* columns */
    SHARERS = 9,  /* blocks that share outputs, at most: one of them has to add all their sums */
    BLOCKS = 512, /* of a grid at most, where they share outputs */
    PORTIONS = 4, /* of a warp at least, where blocks share outputs */
    LINEAR_THREADS = SIDES * SLICES * WARP,
    OUTPUTS = SIDES * GROUP,
    WORDS = PORTION * GROUP_WORDS, /* of a portion of a row of groups */
    WORD_COPIES =
        (WORDS + 4 * WARP - 1) / (4 * WARP), /* of 16 bytes, that a thread makes of these */
    SUMS = 16,           /* that a thread has for FEW rows of x: of four (16, FEW) */
    SUMS_LD = GROUP + 4, /* floats from a row of sums to the next: four rows, different banks */
    TILES_AT_ONCE = 2,   /* FEW rows each, whose sums a block writes at a time */
    SHARED_ROWS = TILES_AT_ONCE * FEW,
    HEIGHT = 2 /* blocks that have the same weights and other rows of x, at most */
};
static_assert((size_t)PACKED_ROWS * BLOCKS * OUTPUTS * sizeof(float) <= WORKSPACE,
              "partial sums have room");

/* Counts, for each set of blocks that share outputs, those that have written their sums; 0 between
 * kernels. PROJECT and FINISH have a row each, since they run side by side. */
static __device__ unsigned arrived[2][HEIGHT * BLOCKS];

/* The slots of a ring buffer, by the GPU that the code is compiled for. */
enum { SLOTS_75 = 2, SLOTS_80 = 4 };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
const int SLOTS = SLOTS_75;
#else
const int SLOTS = SLOTS_80;
#endif

/* One portion of each warp of a block, in shared memory. */
template <int TILES>
struct Slot {
    unsigned words[SIDES * SLICES][WORDS];
    half x[SLICES][TILES * FEW][PORTION];
};
/* The shared memory of a block: its ring buffer, and afterwards its sums. */
template <int TILES, int SLOTS>
union Room {
    Slot<TILES> ring[SLOTS];
    float sums[SIDES][SHARED_ROWS][SUMS_LD];
};

/* The beginning of a warp's next portion, in memory. */
struct Portion {
    const unsigned *w;
    const half *x;
    int x_ld, rows;     /* halfs from a row of x to the next; rows of x */
    int w_left, x_left; /* columns of w and of x from here on; 0 or less: none */
};

/* The copies of 16 bytes that a thread makes of x for a portion. */
template <int TILES>
constexpr int X_COPIES = (TILES * FEW * PORTION / 8 + SIDES * WARP - 1) / (SIDES * WARP);

/* Begins to copy a block's next portions into a slot, with zeros behind what is left: groups of
 * zeros stand for zeros. They are there after wait_for_copies. */
template <int TILES>
__device__ void load_portions(Copy *copies, Slot<TILES> *to, const Portion &from) {
    int in_warp = threadIdx.x % WARP, warp = threadIdx.x / WARP, side = warp % SIDES,
        slice = warp / SIDES;
#pragma unroll
    for (int n = 0; n < WORD_COPIES; n++) {
        int at = (n * WARP + in_warp) * 4;
        if (at < WORDS)
            copies[n] =
                copy_async(to->words[warp] + at, from.w + at, at < from.w_left * GROUP_WORDS);
    }
#pragma unroll
    for (int n = 0; n < X_COPIES<TILES>; n++) {
        /* the warps of a slice share its x, of which a row is four times 16 bytes */
        int i = (n * SIDES + side) * WARP + in_warp, row = i / 4, c = i % 4 * 8;
        if (row < TILES * FEW)
            copies[WORD_COPIES + n] =
                copy_async(&to->x[slice][row][c], from.x + (size_t)row * from.x_ld + c,
                           row < from.rows && c < from.x_left);
    }
}

/* A thread's part of two neighbouring columns: a word of codes of each, their mins, their scales.
 */
struct Columns {
    unsigned codes[2];
    half2 min, scale;
};

/* Loads a word of codes of two columns; group is the first column's. */
__device__ Columns load_columns(const unsigned *group, int word) {
    unsigned mins = __byte_perm(group[0], group[GROUP_WORDS], 0x5410),
             scales = __byte_perm(group[0], group[GROUP_WORDS], 0x7632);
    return {{group[1 + word], group[GROUP_WORDS + 1 + word]}, *(half2 *)&mins, *(half2 *)&scales};
}

/* Returns the bits of min + scale * code for two codes. DIFFERS: quant.c rounds the sum to a float
 * first. So where one of the two terms is thousands of times the other, and the sum lies in the
 * middle between two halfs, the result may be the other of these two. */
__device__ unsigned unpack_two(half2 codes, const Columns &c) {
    half2 x = __hfma2(codes, c.scale, c.min);
    return *(unsigned *)&x;
}

/* Unpacks byte u of two columns: w[0] gets the numbers of the low halves, w[1] those of the high
 * halves. Half of a byte is put into the low bits of the half 1024, whose last place is 1, so that
 * it is 1024 + code, or 1024 + 16 code. */
__device__ void unpack_byte(unsigned w[2], const Columns &c, int u) {
    unsigned both = __byte_perm(c.codes[0], c.codes[1], 0x0400 + 0x0101 * u);
    unsigned low = and_or(both, 0x000f000f, 0x64006400),
             high = and_or(both, 0x00f000f0, 0x64006400);
    w[0] = unpack_two(__hsub2(*(half2 *)&low, __float2half2_rn(1024)), c);
    w[1] =
        unpack_two(__hfma2(*(half2 *)&high, __float2half2_rn(1.f / 16), __float2half2_rn(-64)), c);
}

/* Adds a portion of w times a portion of x to sum, by one warp. */
template <int TILES>
__device__ void multiply_portion(float sum[TILES * SUMS], const unsigned *words,
                                 const half (*x)[PORTION]) {
    int in_warp = threadIdx.x % WARP, quad = in_warp / 4, in_quad = in_warp % 4;
    Half8 mine[TILES]; /* the thread's columns of rows `quad` of x */
#pragma unroll
    for (int i = 0; i < TILES; i++)
        mine[i] = *(const Half8 *)(x[i * FEW + quad] + 8 * in_quad);
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
        const unsigned *group = words + (8 * in_quad + c) * GROUP_WORDS;
        Columns two = load_columns(group, quad), next = load_columns(group + 2 * GROUP_WORDS, quad);
#pragma unroll
        for (int u = 0; u < 4; u++) {
            unsigned w[4];
            unpack_byte(w, two, u);
            unpack_byte(w + 2, next, u);
#pragma unroll
            for (int i = 0; i < TILES; i++)
                multiply_add(sum + i * SUMS + u * 4, w, &mine[i].x + c / 2);
        }
    }
}

/* Returns where four neighbouring outputs of a row of x, the thread's sum[0], sum[4], sum[8] and
 * sum[12], lie among the sums of a row of groups, (rows, GROUP). */
__device__ float4 *sums_at(float (*sums)[SUMS_LD], int tile, int d) {
    int quad = threadIdx.x % WARP / 4, in_quad = threadIdx.x % 4;
    int row = tile * FEW + 2 * in_quad + d % 2, col = quad / 4 * 32 + d / 2 * 16 + quad % 4 * 4;
    return (float4 *)&sums[row][col];
}

__device__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Writes a thread's sums, or if `add` adds them to those that are there. */
template <int TILES>
__device__ void store_sums(float (*to)[SUMS_LD], const float sum[TILES * SUMS], bool add) {
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        const float *s = sum + i / 4 * SUMS + i % 4;
        float4 *at = sums_at(to, i / 4, i % 4), four = make_float4(s[0], s[4], s[8], s[12]);
        *at = add ? add4(four, *at) : four;
    }
}

/* Adds the sums of the warps that share a row of groups, and writes them to partial, (rows,
 * OUTPUTS), or if that is NULL as the outputs of the rows from `first` on. shared: room for
 * TILES_AT_ONCE tiles, which take turns. */
template <int TILES>
__device__ void write_sums(const Op &op, float *partial, float (*shared)[SHARED_ROWS][SUMS_LD],
                           const float sum[TILES * SUMS], int first, int rows) {
    const int AT_ONCE = TILES < TILES_AT_ONCE ? TILES : TILES_AT_ONCE;
    int warp = threadIdx.x / WARP, side = warp % SIDES, slice = warp / SIDES;
#pragma unroll
    for (int tile = 0; tile < TILES; tile += AT_ONCE) {
        int top = tile * FEW, size = min(rows - top, AT_ONCE * FEW) * OUTPUTS;
        __syncthreads(); /* nobody needs what is in shared memory any more */
        if (slice)
            store_sums<AT_ONCE>(shared[side], sum + tile * SUMS, false);
        __syncthreads();
        if (!slice)
            store_sums<AT_ONCE>(shared[side], sum + tile * SUMS, true);
        __syncthreads();
        for (int e = threadIdx.x; e < size; e += blockDim.x) {
            int row = e / OUTPUTS, col = e % OUTPUTS;
            float v = shared[col / GROUP][row][col % GROUP];
            if (partial)
                partial[top * OUTPUTS + e] = v;
            else
                store_output(op, first + top + row, blockIdx.y * OUTPUTS + col, v);
        }
    }
}

/* Returns true in the last of `blocks` blocks that come here, which then sees what the others have
 * written, and leaves the count at 0. */
__device__ bool comes_last(unsigned *count, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(count, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

/* Adds the sums that `blocks` blocks have left in partial, (blocks, rows, OUTPUTS), in the order of
 * the blocks, and writes the outputs of the rows from `first` on. */
__device__ void add_partial(const Op &op, const float *partial, int blocks, int first, int rows) {
    int size = rows * OUTPUTS;
    for (int e = 4 * threadIdx.x; e < size; e += 4 * blockDim.x) {
        float4 part[SHARERS];
#pragma unroll
        for (int b = 0; b < SHARERS; b++)
            if (b < blocks)
                part[b] = __ldcg((float4 *)(partial + b * size + e));
#pragma unroll
        for (int b = 1; b < SHARERS; b++)
            if (b < blocks)
                part[0] = add4(part[0], part[b]);
        const float *v = &part[0].x;
        for (int i = 0; i < 4; i++)
            store_output(op, first + e / OUTPUTS, blockIdx.y * OUTPUTS + e % OUTPUTS + i, v[i]);
    }
}

/* Multiplies TILES * FEW rows of x. blockIdx tells: x which rows, y which rows of groups, z which
 * of the blocks that share these. */
template <int TILES>
__global__ void __launch_bounds__(LINEAR_THREADS, TILES > 4 ? 1 : 2)
    packed_linear_kernel(Op op, float *partial, int on_finish) {
    extern __shared__ uint4 shared_bytes[];
    auto &room = *(Room<TILES, SLOTS> *)shared_bytes;
    int m = op.linear.y.rows, n = op.linear.y.cols, k = op.linear.x.cols;
    int warp = threadIdx.x / WARP, side = warp % SIDES, slice = warp / SIDES,
        group = blockIdx.y * SIDES + side, step = gridDim.z * SLICES * PORTION,
        first = blockIdx.x * TILES * FEW, rows = min(m - first, TILES * FEW),
        before = (blockIdx.z * SLICES + slice) * PORTION, steps = (k + step - 1) / step;
    bool outputs = group * GROUP < n; /* the last block may have fewer than SIDES of these */
    const unsigned *w =
        (unsigned *)op.linear.w.at + ((size_t)(outputs ? group : 0) * k + before) * GROUP_WORDS;
    const half *x = (half *)op.linear.x.at + (size_t)first * k + before;
    float sum[TILES * SUMS] = {};
    Copy copies[WORD_COPIES + X_COPIES<TILES>];
    auto load = [&](int i) {
        int left = k - before - i * step;
        if (i < steps)
            load_portions<TILES>(copies, &room.ring[i % SLOTS],
                                 {w, x, k, rows, outputs ? left : 0, left});
        close_copies(); /* of no copies at the end, so that the number of open sets stays */
        w += step * GROUP_WORDS;
        x += step;
    };
    for (int i = 0; i < SLOTS - 1; i++)
        load(i);
    for (int i = 0; i < steps; i++) {
        wait_for_copies<SLOTS - 2>(copies);
        __syncthreads(); /* all see portion i, and the slot of portion i - 1 is free */
        load(i + SLOTS - 1);
        multiply_portion<TILES>(sum, room.ring[i % SLOTS].words[warp],
                                room.ring[i % SLOTS].x[slice]);
    }
    int place = blockIdx.x * gridDim.y + blockIdx.y, blocks = gridDim.z;
    partial += ((size_t)first * gridDim.y + (size_t)rows * blockIdx.y) * blocks * OUTPUTS;
    float *mine = blocks > 1 ? partial + blockIdx.z * rows * OUTPUTS : NULL;
    write_sums<TILES>(op, mine, room.sums, sum, first, rows);
    if (blocks == 1 || !comes_last(&arrived[on_finish][place], blocks))
        return;
    add_partial(op, partial, blocks, first, rows);
}

/* The kernels, in the order of the rows of a block: FEW, and its doubles. */
static const struct {
    void (*kernel)(Op, float *, int);
    size_t shared[2]; /* bytes of shared memory that a block needs beside its variables: where the
                         code is compiled for sm_75, and elsewhere */
} packed_kernels[] = {
    {packed_linear_kernel<1>, {sizeof(Room<1, SLOTS_75>), sizeof(Room<1, SLOTS_80>)}},
    {packed_linear_kernel<2>, {sizeof(Room<2, SLOTS_75>), sizeof(Room<2, SLOTS_80>)}},
    {packed_linear_kernel<4>, {sizeof(Room<4, SLOTS_75>), sizeof(Room<4, SLOTS_80>)}},
    {packed_linear_kernel<8>, {sizeof(Room<8, SLOTS_75>), sizeof(Room<8, SLOTS_80>)}}};

/* Returns how many blocks share outputs, so that `across` times as many blocks fill the places of
 * the GPU for the largest part of their time. */
static int count_sharers(int across, int k, int places) {
    int best = 1;
    auto waves = [&](int sharers) { return blocks_for(across * sharers, places); };
    for (int z = 2; z <= SHARERS && across * z <= BLOCKS && z * SLICES * PORTIONS * PORTION <= k;
         z++)
        if ((long)z * waves(best) > (long)best * waves(z))
            best = z;
    return best;
}

static void packed_linear(CudaGpu *g, const Op *op, cudaStream_t stream) {
    Tensor y = op->linear.y;
    int k = op->linear.x.cols;
    CHECK(y.rows <= PACKED_ROWS && eights(k));
    int rows = FEW, which = 0; /* rows of a block */
    for (; rows < y.rows && which < g->packed_most; rows *= 2)
        which++;
    int across = blocks_for(y.cols, OUTPUTS);
    auto kernel = packed_kernels[which].kernel;
    dim3 grid(blocks_for(y.rows, rows), across, count_sharers(across, k, g->places));
    kernel<<<grid, LINEAR_THREADS, packed_kernels[which].shared[g->since_80], stream>>>(
        *op, (float *)workspace_of(g, op->lane), op->lane == FINISH);
}

/* Returns -1 and err if cuBLAS refuses the product. */
static int gpu_linear(CudaGpu *g, const Op *op, cudaStream_t stream, Error *err) {
    Tensor y = op->linear.y, residual = op->linear.residual;
    CHECK(lane_channel[op->lane] == GPU && (!residual.at || (residual.at == y.at && !op->relu)));
    if (op->linear.w.type != U8)
        return blas_linear(g, op, stream, err);
    Op part = *op;
    for (int first = 0; first < y.rows; first += PACKED_ROWS) {
        part.linear.y = tensor_rows(y, first, imin(y.rows - first, PACKED_ROWS));
        part.linear.x = tensor_rows(op->linear.x, first, part.linear.y.rows);
        packed_linear(g, &part, stream);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Prefill attention: FlashAttention-2 (arXiv 2307.08691) on tensor cores
//
// Section 3's softmax(x_Q x_K^T / sqrt(h)) x_V for whole prompts. A block has QUERIES consecutive
// queries of one sequence and one head, a warp 16 of them. It reads these once, and goes once
// through the keys that they see, a tile of KEYS at a time, with an online softmax. With m the
// largest score so far, a query has
//     sum = the sum of e^(score - m)    and    out = the sum of e^(score - m) value,
// and when a tile raises m to m', both are multiplied by e^(m - m') before the terms of the tile,
// made with m', are added. At the end the block writes out / sum. Scores and weights never leave
// the registers: multiply_add leaves them where the next product wants its first factor. The next
// tile of keys comes in while the values are used, and the values come in while the keys are used.
// -------------------------------------------------------------------------------------------------

enum { QUERIES = 64, TILE = 16, TILES_MAX = 8, PREFILL_THREADS = QUERIES / TILE * WARP };

/* These are for heads of up to TILES * TILE elements. KEYS is such that there are enough registers,
 * and that an SM of a T4 has shared memory for two blocks. LD is the number of halfs from one row
 * to the next in shared memory: an odd number of 16 bytes, so that the eight rows that
 * load_matrices reads at once lie in different banks. */
template <int TILES>
constexpr int KEYS = TILES <= 6 ? 64 : 32;
template <int TILES>
constexpr int LD = (2 * TILES + 1) * 8;

/* The blocks for which an SM must have registers. A T4's shared memory has no room for more. */
#if __CUDA_ARCH__ >= 800
template <int TILES>
constexpr int PREFILL_BLOCKS = TILES <= 4 ? 4 : 3;
#else
template <int TILES>
constexpr int PREFILL_BLOCKS = 2;
#endif

/* Returns the sequence that the tile of queries `number` belongs to, and in *tile which of its
 * tiles it is. The tiles of sequence r have numbers from start[r] / QUERIES + r on, which leaves
 * room for at least as many as it needs. */
__device__ int find_tile(int *tile, const int *start, int nseq, int number) {
    int r = 0;
    for (int end = nseq; end - r > 1;) { /* sequence r does not begin behind the tile, `end` does */
        int middle = (r + end) / 2;
        (start[middle] / QUERIES + middle <= number ? r : end) = middle;
    }
    *tile = number - (start[r] / QUERIES + r);
    return r;
}

/* One head of some rows of q, k, v or o. */
struct HeadRows {
    half *at;
    int ld, n, hd; /* halfs from a row to the next; rows; elements of the head */
    bool wide;     /* hd is TILES * TILE */
};

/* The threads that share a row, as many as its parts of 16 bytes can be dealt to; and the copies
 * that a thread makes of ROWS rows. */
template <int TILES>
constexpr int PER_ROW = TILES * 2 & -(TILES * 2);
template <int TILES, int ROWS>
constexpr int TILE_COPIES =
    (ROWS * PER_ROW<TILES> + PREFILL_THREADS - 1) / PREFILL_THREADS *(TILES * 2 / PER_ROW<TILES>);

/* Begins to load rows, ROWS of them at most, into shared memory, with zeros from row n and column
 * hd on. They are there after wait_for_tile. */
template <int TILES, int ROWS>
__device__ void load_tile(Copy *copies, half *to, HeadRows from) {
    const int PER_ROW = ::PER_ROW<TILES>, STEP = PREFILL_THREADS / PER_ROW;
    int row = threadIdx.x / PER_ROW, column = threadIdx.x % PER_ROW * 8;
    if (STEP > ROWS && row >= ROWS)
        return; /* heads of 97 to 112 elements: two threads a row are more than 32 rows take */
    to += row * LD<TILES> + column;
    from.at += row * from.ld + column;
    from.n -= row;
    from.hd -= column;
    if (from.wide)
        for (int r = 0; r < ROWS; r += STEP, from.at += STEP * from.ld)
            for (int c = 0; c < TILES * TILE; c += PER_ROW * 8)
                *copies++ = copy_async(to + r * LD<TILES> + c, from.at + c, r < from.n);
    else
#pragma unroll 1
        for (int r = 0; r < ROWS; r += STEP, from.at += STEP * from.ld)
#pragma unroll 1
            for (int c = 0; c < TILES * TILE; c += PER_ROW * 8)
                *(Half8 *)(to + r * LD<TILES> + c) =
                    load8(from.at + c, r < from.n ? from.hd - c : 0, false);
}

/* Waits for the whole block. Afterwards all threads see what any of them has loaded, and what they
 * have read before may be overwritten. */
template <int N>
__device__ void wait_for_tile(const Copy (&copies)[N]) {
    close_copies();
    wait_for_copies<0>(copies);
    __syncthreads();
}

/* Computes score (16, KEYS) = queries times keys, by one warp. */
template <int TILES>
__device__ void score_keys(float score[][4], const unsigned query[][4], const half *keys) {
    int in_warp = threadIdx.x % WARP;
    const half *row = keys + (in_warp / 16 * 8 + in_warp % 8) * LD<TILES> + in_warp / 8 % 2 * 8;
    for (int n = 0; n < KEYS<TILES> / 8; n += 2) {
        for (int i = 0; i < 4; i++)
            score[n][i] = score[n + 1][i] = 0;
        for (int d = 0; d < TILES; d++) {
            /* of 8 keys, the first and the second 8 elements from d TILE on; of the next 8 keys */
            unsigned key[4];
            load_matrices(key, row + n * 8 * LD<TILES> + d * TILE);
            multiply_add(score[n], query[d], key);
            multiply_add(score[n + 1], query[d], key + 2);
        }
    }
}

/* Does a step of the online softmax for the two queries of which a thread holds a part. Scores
 * become weights. scale includes the factor log2(e), since a GPU computes powers of 2. */
template <int TILES>
__device__ void weigh_keys(float score[][4], float out[][4], float sum[2], float largest[2],
                           float scale) {
    for (int q = 0; q < 2; q++) {
        float before = largest[q];
        for (int n = 0; n < KEYS<TILES> / 8; n++)
            largest[q] = fmaxf(largest[q], fmaxf(score[n][2 * q], score[n][2 * q + 1]));
        largest[q] = warp_reduce<Most>(largest[q], 1, 4); /* a quad shares a row */
        float shrink = power_of_2((before - largest[q]) * scale);
        sum[q] *= shrink;
        for (int d = 0; d < 2 * TILES; d++) {
            out[d][2 * q] *= shrink;
            out[d][2 * q + 1] *= shrink;
        }
        for (int i = 0; i < KEYS<TILES> / 4; i++) {
            float *s = &score[i / 2][2 * q + i % 2];
            *s = power_of_2((*s - largest[q]) * scale);
            sum[q] += *s;
        }
    }
}

__device__ unsigned pack_halfs(float low, float high) {
    half2 pair = __floats2half2_rn(low, high);
    return *(unsigned *)&pair;
}

/* Adds weights (16, KEYS) times values to out (16, TILES * TILE), by one warp. */
template <int TILES>
__device__ void add_values(float out[][4], const float weight[][4], const half *values) {
    int in_warp = threadIdx.x % WARP;
    const half *row = values + in_warp % 16 * LD<TILES> + in_warp / 16 * 8;
    for (int n = 0; n < KEYS<TILES> / 8; n += 2) {
        unsigned a[4];
        for (int i = 0; i < 4; i++)
            a[i] = pack_halfs(weight[n + i / 2][i % 2 * 2], weight[n + i / 2][i % 2 * 2 + 1]);
        for (int d = 0; d < TILES; d++) {
            /* 8 elements from d TILE on, of 8 tokens and of the next 8; then the next 8 elements */
            unsigned value[4];
            load_transposed(value, row + n * 8 * LD<TILES> + d * TILE);
            multiply_add(out[2 * d], a, value);
            multiply_add(out[2 * d + 1], a, value + 2);
        }
    }
}

/* Loads the warp's 16 of the block's queries, through shared memory with room for QUERIES rows. */
template <int TILES>
__device__ void load_queries(unsigned query[][4], half *shared, const HeadRows &from) {
    int in_warp = threadIdx.x % WARP, first = threadIdx.x / WARP * TILE;
    Copy copies[TILE_COPIES<TILES, QUERIES>];
    load_tile<TILES, QUERIES>(copies, shared, from);
    wait_for_tile(copies);
    for (int d = 0; d < TILES; d++)
        load_matrices(query[d],
                      shared + (first + in_warp % 16) * LD<TILES> + d * TILE + in_warp / 16 * 8);
    __syncthreads();
}

/* Stores the results of the warp's queries, out / sum, through the same shared memory. */
template <int TILES>
__device__ void store_results(const HeadRows &to, half *shared, const float out[][4],
                              float sum[2]) {
    int in_warp = threadIdx.x % WARP, first = threadIdx.x / WARP * TILE;
    __syncthreads(); /* nobody needs the values any more */
    for (int q = 0; q < 2; q++) {
        float share = 1 / warp_reduce<Add>(sum[q], 1, 4);
        half *row = shared + (first + in_warp / 4 + q * 8) * LD<TILES> + in_warp % 4 * 2;
        for (int d = 0; d < 2 * TILES; d++)
            *(unsigned *)(row + d * 8) =
                pack_halfs(out[d][2 * q] * share, out[d][2 * q + 1] * share);
    }
    __syncwarp();
    for (int i = in_warp; i < TILE * TILES * 2; i += WARP) {
        int r = first + i / (TILES * 2), c = i % (TILES * 2) * 8;
        store8(to.at + (size_t)r * to.ld + c, *(Half8 *)(shared + r * LD<TILES> + c),
               r < to.n ? to.hd - c : 0, to.wide);
    }
}

/* TILES is the size of a head over TILE, rounded up. blockIdx.x is the number of a tile of queries,
 * as find_tile counts them, blockIdx.y the head. */
template <int TILES>
__global__ void __launch_bounds__(PREFILL_THREADS, PREFILL_BLOCKS<TILES>)
    attend_prefill_kernel(Op op, bool wide) {
    const int STEP = KEYS<TILES>, h1 = op.prefilled.q.cols, hd = op.hd, ld = (int)op.prefilled.q.ld;
    const int *start = (int *)op.prefilled.start.at, nseq = op.prefilled.start.cols - 1;
    float scale = rsqrtf((float)hd) * 1.44269504f; /* log2(e) */
    __shared__ __align__(16) half keys[2 * STEP * LD<TILES>];
    half *values = keys + STEP * LD<TILES>;
    int tile, r = find_tile(&tile, start, nseq, blockIdx.x), head = blockIdx.y * hd;
    int begin = start[r], first = tile * QUERIES;
    int seen = min(start[r + 1] - begin, first + QUERIES); /* keys that the last query sees */
    if (first >= seen)
        return;
    half *q = (half *)op.prefilled.q.at + (size_t)(begin + first) * ld + head;
    /* Returns the keys (column 0) or values (column h1) from token t on. A pointer that moved along
     * would take a register more, which heads of 128 elements do not have. */
    auto tokens = [&](int t, int column) {
        half *row = (half *)op.prefilled.kv.at + (size_t)(begin + t) * ld + head;
        return HeadRows{row + column, ld, seen - t, hd, wide};
    };
    /* a thread has the queries pos and pos + 8, and of each 8 keys `column` and column + 1 */
    int pos = first + threadIdx.x / WARP * TILE + threadIdx.x % WARP / 4;
    int column = threadIdx.x % 4 * 2;

    unsigned query[TILES][4];
    float out[2 * TILES][4] = {}, sum[2] = {}, largest[2] = {-INFINITY, -INFINITY};
    load_queries<TILES>(query, keys, {q, ld, seen - first, hd, wide});
    Copy copies[TILE_COPIES<TILES, STEP>];
    load_tile<TILES, STEP>(copies, keys, tokens(0, 0));
    for (int t0 = 0; t0 < seen; t0 += STEP) {
        float score[STEP / 8][4];
        wait_for_tile(copies); /* the keys */
        load_tile<TILES, STEP>(copies, values, tokens(t0, h1));
        score_keys<TILES>(score, query, keys);
        /* Keys that come after the query get no weight. Token 0 never does, so `largest` will be
         * finite. */
        if (pos < t0 + STEP - 1)
            for (int i = 0; i < STEP / 2; i++)
                if (i / 4 * 8 + i % 2 - i % 4 / 2 * 8 > pos - t0 - column)
                    score[i / 4][i % 4] = -INFINITY;
        weigh_keys<TILES>(score, out, sum, largest, scale);
        wait_for_tile(copies); /* the values */
        if (t0 + STEP < seen)
            load_tile<TILES, STEP>(copies, keys, tokens(t0 + STEP, 0));
        add_values<TILES>(out, score, values);
    }
    half *o = (half *)op.prefilled.o.at + (size_t)(begin + first) * h1 + head;
    store_results<TILES>({o, h1, seen - first, hd, wide}, keys, out, sum);
}

static void (*const prefill_kernels[TILES_MAX])(Op, bool) = {
    attend_prefill_kernel<1>, attend_prefill_kernel<2>, attend_prefill_kernel<3>,
    attend_prefill_kernel<4>, attend_prefill_kernel<5>, attend_prefill_kernel<6>,
    attend_prefill_kernel<7>, attend_prefill_kernel<8>};

static void gpu_attend_prefill(CudaGpu *, const Op *op, cudaStream_t stream) {
    int nseq = op->prefilled.start.cols - 1, tiles = blocks_for(op->hd, TILE);
    CHECK(tiles <= TILES_MAX);
    /* at least as many blocks as the sequences have tiles */
    dim3 grid(op->prefilled.q.rows / QUERIES + nseq, op->nh);
    auto kernel = prefill_kernels[tiles - 1];
    kernel<<<grid, PREFILL_THREADS, 0, stream>>>(*op, op->hd % TILE == 0);
}

// -------------------------------------------------------------------------------------------------
// Decode attention: pages
//
// Section 3's attention of one new token per sequence to the K and V of all its tokens, which lie
// in pages. A warp has one head of one sequence for SPLIT tokens: it computes scores, their softmax
// and the weighted sum of values. It reads every byte of these K and V once and writes o, or, in a
// sequence of more than SPLIT tokens, a partial result. The block that comes last adds these in the
// order of the tokens.
//
// PER_TOKEN threads share a token of a page of halfs, 8 elements each, so that a warp reads
// 32 / PER_TOKEN tokens at once, and UNROLL times as many before it uses the first. Heads in 4 bits
// have functions of their own, in the chapter after this one.
// -------------------------------------------------------------------------------------------------

/* How pages hold numbers: as halfs, or in 4 bits, packed. */
enum Pages { HALFS, FOURS };
const int SPLIT = 128; /* tokens of a warp */
enum {
    HEADS = 4, /* warps of a block, each with a head of its own */
    UNROLL = 8
};

__device__ int whole_tiles(int tokens) { return (tokens + TILE - 1) / TILE * TILE; }

/* Returns the floats of a partial result: the largest score, the sum of e^(score - largest), and
 * the hd values weighted with these. */
__host__ __device__ size_t partial_floats(int hd) { return hd + 2; }

/* Returns the row of K and V that token t of a sequence has. */
__device__ int token_row(const int *pages, int t, int page_tokens) {
    return pages[t / page_tokens] * page_tokens + t % page_tokens;
}

/* Returns how many tokens sequence r has. */
__device__ int length_of(const Op &op, int r) { return ((int *)op.attend.len.at)[r]; }
/* Returns sequence r's row of the page table. */
__device__ const int *pages_of(const Op &op, int r) {
    return (int *)op.attend.pages.at + r * op.attend.pages.ld;
}
/* Returns the row of o, (h1), of sequence r. */
__device__ half *result_of(const Op &op, int r) {
    return (half *)op.attend.o.at + (size_t)r * op.nh * op.hd;
}
/* Returns where the choice of head h of sequence r begins, in tokens and in probs. */
__device__ size_t chosen_of(const Op &op, int r, int h) {
    int most = op.attend.tokens.cols / op.nh;
    return ((size_t)r * op.nh + h) * most;
}

/* Fills rows[0..n) with the rows of sequence r's tokens t0 .. t0 + n - 1, and up to whole tiles
 * with the last of them, by the whole block. */
__device__ void load_rows(int *rows, const Op &op, int r, int t0, int n) {
    for (int t = threadIdx.x; t < whole_tiles(n); t += blockDim.x)
        rows[t] = token_row(pages_of(op, r), t0 + min(t, n - 1), op.page_tokens);
    __syncthreads();
}

/* A head of K or V, and what a thread reads of it: elements c .. c + 7. */
struct Head {
    const uint8_t *first; /* element c in row 0; where pages are packed, the head in row 0 */
    size_t row;           /* bytes from a token's row to the next */
    int hd, left;         /* elements of the head; elements from c on */
    bool wide;            /* heads are whole eights of elements */
};

template <Pages PAGES>
__device__ Head find_head(const Op &op, const Tensor &kv, int h, int c) {
    size_t head = PAGES == HALFS ? op.hd * sizeof(half) : quant_bytes(op.hd);
    size_t before = PAGES == HALFS ? c * sizeof(half) : 0;
    return {(uint8_t *)kv.at + h * head + before, op.nh * head, op.hd, op.hd - c, eights(op.hd)};
}

/* Calls use(t, x) for a thread's share of a warp's n tokens, with its eight elements x of token t.
 * With TOGETHER all threads make as many calls; for those that have fewer tokens, t is n or more
 * and x is zeros. */
template <int PER_TOKEN, bool TOGETHER, class Use>
__device__ void for_tokens(const Head &head, const int *rows, int n, Use use) {
    const int AT_ONCE = WARP / PER_TOKEN;
    int first = threadIdx.x % WARP / PER_TOKEN;
    for (int t0 = first; (TOGETHER ? t0 - first : t0) < n; t0 += UNROLL * AT_ONCE) {
        Half8 token[UNROLL];
        for (int u = 0; u < UNROLL; u++) {
            int t = t0 + u * AT_ONCE;
            const uint8_t *from = head.first + (t < n ? rows[t] : 0) * head.row;
            token[u] = load8((half *)from, t < n ? head.left : 0, head.wide);
        }
        for (int u = 0; u < UNROLL; u++) {
            float x[8];
            to_floats(x, token[u]);
            use(t0 + u * AT_ONCE, x);
        }
    }
}

/* Computes score[t] = q.k * scale of a warp's n tokens. q: the thread's elements of the query. */
template <int PER_TOKEN>
__device__ void score_tokens(float *score, const half *q, const Head &k, const int *rows, int n,
                             float scale) {
    float mine[8];
    to_floats(mine, load8(q, k.left, k.wide));
    for_tokens<PER_TOKEN, true>(k, rows, n, [&](int t, const float x[8]) {
        float dot = 0;
        for (int i = 0; i < 8; i++)
            dot += mine[i] * x[i];
        dot = warp_reduce<Add>(dot, 1, PER_TOKEN);
        if (threadIdx.x % PER_TOKEN == 0 && t < n)
            score[t] = dot * scale;
    });
}

/* Adds weight[t] * v to out, for those of a warp's n tokens that the thread reads. */
template <int PER_TOKEN>
__device__ void weigh_tokens(float out[8], const float *weight, const Head &v, const int *rows,
                             int n) {
    for_tokens<PER_TOKEN, false>(v, rows, n, [&](int t, const float x[8]) {
        float w = t < n ? weight[t] : 0;
        for (int i = 0; i < 8; i++)
            out[i] += w * x[i];
    });
}

/* Replaces score[0..n) by e^(score - largest), by one warp, and returns the sum of these. */
__device__ float exponentiate(float *score, int n, float *largest) {
    float most = -INFINITY, sum = 0;
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        most = fmaxf(most, score[t]);
    most = warp_reduce<Most>(most, 1);
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        sum += score[t] = expf(score[t] - most);
    *largest = most;
    return warp_reduce<Add>(sum, 1);
}

// -------------------------------------------------------------------------------------------------
// Decode attention: heads in 4 bits, as codes (section 5; quant.h)
//
// The paper unpacks a compressed cache before it is used. DIFFERS: tensor cores multiply the codes
// of 16 tokens, a tile, and nothing is unpacked. Four bits at the low end of a half are the number
// code 2^-24, and four bits further up code 2^-20, exactly: they are subnormal halfs, which tensor
// cores take as they are. So a word, eight codes of one token, needs only a shift and masks. Such a
// product a b has
//
//            rows of a    columns of b
//     K      tokens       2 i:      the elements of q that meet the low halves of group i's bytes
//                         2 i + 1:  those that meet the high halves
//     V      elements     2 i:      weight * scale of group i, as halfs
//                         2 i + 1:  what these halfs lack, times 2^11; the two together are as
//                                   exact as a float, except for two bits
//
// What remains to be added is min times the sum of q, or of the weights. A warp has one head; it
// reads rows of packed pages, and leaves scores, or eight elements in each thread.
// -------------------------------------------------------------------------------------------------

enum {
    HALF = GROUP / 2,            /* elements whose codes lie in 16 bytes */
    SHARES_LD = SPLIT + TILE / 2 /* halfs from a column of b to the next: four, different banks */
};
const float LOW_CODE = 1 << 24;   /* a code from the number in the low end of a half */
const float HIGH_CODE = 1.f / 16; /* a number in the low end from one four bits further up */
const float MORE_BITS = 1 << 11;  /* the scale of the second column of V */

/* Return the codes in the low or the high halves of bytes 0 and 2 of a word. */
__device__ unsigned low_codes(unsigned word) { return word & 0x000f000f; }
__device__ unsigned high_codes(unsigned word) { return word & 0x00f000f0; }

/* Loads the thread's part of b for each half of a group of a query, and returns the sum of the
 * elements of group in_quad. */
template <int HALVES>
__device__ float load_query(unsigned low[][2], unsigned high[][2], const half *q, int hd) {
    int in_warp = threadIdx.x % WARP, quad = in_warp / 4, in_quad = in_warp % 4;
    float sum[2] = {}; /* of each group */
    for (int b = 0; b < HALVES; b++) {
        int at = b * HALF + in_quad * 4 + quad % 2 * 16, column = b * HALF / GROUP * 2 + quad % 2;
        if (b * HALF + in_warp < hd)
            sum[b / 2] += __half2float(q[b * HALF + in_warp]);
        if (quad != column || at >= hd)
            continue;
        uint2 four = *(uint2 *)(q + at);
        unsigned pair[] = {__byte_perm(four.x, four.y, 0x5410),
                           __byte_perm(four.x, four.y, 0x7632)};
        for (int i = 0; i < 2; i++) {
            low[b][i] = quad % 2 ? 0 : pair[i];
            high[b][i] = quad % 2 ? pair[i] : 0;
        }
    }
    for (float &x : sum)
        x = warp_reduce<Add>(x, 1);
    return in_quad ? sum[1] : sum[0];
}

/* Computes score[t] = q.k * scale of n tokens, whose rows are filled up to whole tiles. */
template <int PER_TOKEN>
__device__ void score_fours(float *score, const half *q, const Head &k, const int *rows, int n,
                            float scale) {
    const int HALVES = PER_TOKEN * 8 / HALF, quad = threadIdx.x % WARP / 4,
              in_quad = threadIdx.x % 4;
    unsigned low[HALVES][2] = {}, high[HALVES][2] = {};
    float sum = load_query<HALVES>(low, high, q, k.hd);
    for (int t0 = 0; t0 < n; t0 += TILE) {
        unsigned word[2][HALVES], header[2]; /* of tokens quad and quad + 8; of group in_quad */
        float d[4] = {};
        for (int i = 0; i < 2; i++) {
            const uint8_t *head = k.first + rows[t0 + quad + 8 * i] * k.row;
            header[i] = in_quad * GROUP < k.hd ? *(unsigned *)(head + in_quad * GROUP_BYTES) : 0;
            for (int b = 0; b < HALVES; b++) {
                const uint8_t *codes =
                    head + b / 2 * GROUP_BYTES + GROUP_HEADER + b % 2 * 16 + in_quad * 4;
                word[i][b] = b * HALF < k.hd ? *(unsigned *)codes : 0;
            }
        }
        for (int b = 0; b < HALVES; b++) {
            unsigned x = word[0][b], y = word[1][b];
            unsigned lows[] = {low_codes(x), low_codes(y), low_codes(x >> 8), low_codes(y >> 8)};
            unsigned highs[] = {high_codes(x), high_codes(y), high_codes(x >> 8),
                                high_codes(y >> 8)};
            multiply_add(d, lows, low[b]);
            multiply_add(d, highs, high[b]);
        }
        for (int i = 0; i < 2; i++) {
            float2 group = group_header(header[i]);
            float dot =
                group.x * sum + group.y * ((d[2 * i] + d[2 * i + 1] * HIGH_CODE) * LOW_CODE);
            if (HALVES > 2)
                dot += __shfl_xor_sync(0xffffffff, dot, 1);
            int token = t0 + quad + 8 * i;
            if (in_quad == 0 && token < n)
                score[token] = dot * scale;
        }
    }
}

/* Writes the columns of b to shares, for all tiles of a warp's n tokens, and returns the sum of
 * weight * min over group in_warp % GROUPS. */
template <int GROUPS>
__device__ float load_shares(half (*shares)[SHARES_LD], const float *weight, const Head &v,
                             const int *rows, int n) {
    float min_part = 0;
    for (int i = threadIdx.x % WARP; i < whole_tiles(n) * GROUPS; i += WARP) {
        int token = i / GROUPS, group = i % GROUPS;
        float w = token < n ? weight[token] : 0;
        unsigned header = 0;
        if (token < n && group * GROUP < v.hd)
            header = *(unsigned *)(v.first + rows[token] * v.row + group * GROUP_BYTES);
        float2 x = group_header(header);
        half share = __float2half(w * x.y);
        min_part += w * x.x;
        shares[2 * group][token] = share;
        shares[2 * group + 1][token] = __float2half((w * x.y - __half2float(share)) * MORE_BITS);
    }
    return warp_reduce<Add>(min_part, GROUPS);
}

/* Adds weight[t] * v to out for all of a warp's n tokens: the thread's eight elements. Overwrites
 * weight. */
template <int PER_TOKEN>
__device__ void weigh_fours(float out[8], float *weight, const Head &v, const int *rows, int n) {
    const int GROUPS = (PER_TOKEN * 8 + GROUP - 1) / GROUP, in_warp = threadIdx.x % WARP,
              quad = in_warp / 4, in_quad = in_warp % 4;
    __shared__ __align__(16) half all_shares[HEADS][2 * GROUPS][SHARES_LD];
    half(*shares)[SHARES_LD] = all_shares[threadIdx.x / WARP];
    float min_part = load_shares<GROUPS>(shares, weight, v, rows, n);
    float sum[GROUPS * 4][4] = {}; /* 4 j .. 4 j + 3: of group j */
    __syncwarp();
    for (int t0 = 0; t0 < n; t0 += TILE) {
        unsigned word[GROUPS][4], b[2] = {}; /* of tokens 2 in_quad + 0, 1, 8, 9 */
        for (int i = 0; i < 4; i++) {
            int row = rows[t0 + 2 * in_quad + i % 2 + i / 2 * 8];
            const uint8_t *head = v.first + row * v.row + GROUP_HEADER + quad * 4;
            for (int j = 0; j < GROUPS; j++) {
                bool there = j * GROUP + quad / 4 * HALF < v.hd;
                word[j][i] = there ? *(unsigned *)(head + j * GROUP_BYTES) : 0;
            }
        }
        if (quad < 2 * GROUPS) {
            const unsigned *mine = (unsigned *)(shares[quad] + t0) + in_quad;
            b[0] = mine[0];
            b[1] = mine[4];
        }
        for (int i = 0; i < GROUPS * 4; i++) { /* bytes i % 4: elements quad and quad + 8 of a */
            unsigned *w = word[i / 4], byte = 0x0400 + 0x0101 * (i % 4);
            unsigned x = __byte_perm(w[0], w[1], byte), y = __byte_perm(w[2], w[3], byte);
            unsigned a[] = {low_codes(x), high_codes(x), low_codes(y), high_codes(y)};
            multiply_add(sum[i], a, b);
        }
    }
    /* All have read their weights. Elements take their place, as threads with in_quad < GROUPS have
     * the sums. */
    __syncwarp();
    if (in_quad < GROUPS) {
        int at = in_quad * GROUP + quad / 4 * HALF + quad % 4 * 4;
        for (int i = 0; i < 4; i++) {
            float s[4]; /* of group in_quad, chosen so that no index of `sum` depends on a thread,
                           which would put it into memory */
            for (int j = 0; j < 4; j++)
                s[j] = in_quad == 0 ? sum[i][j] : sum[GROUPS * 4 - 4 + i][j];
            weight[at + i] = (s[0] + s[1] / MORE_BITS) * LOW_CODE + min_part;
            weight[at + 16 + i] = (s[2] + s[3] / MORE_BITS) * (LOW_CODE * HIGH_CODE) + min_part;
        }
    }
    __syncwarp();
    for (int i = 0; i < 8; i++)
        out[i] += weight[in_warp % PER_TOKEN * 8 + i];
}

// -------------------------------------------------------------------------------------------------
// Decode attention: the kernels, and new K and V
//
// A block of attend_kernel has HEADS heads of one sequence for SPLIT tokens. append_kernel writes
// the new K and V of section 3 into the pages, a row of kv by one block.
// -------------------------------------------------------------------------------------------------

/* Counts, for each sequence and HEADS of its heads, the blocks that have written their partial
 * results; 0 between kernels. */
enum { JOINED = 1 << 16 };
static __device__ unsigned joined[JOINED];

/* Attends with head h of sequence blockIdx.x, by one warp, to n tokens. Writes their scores to
 * score[0..n). Then writes o, or a partial result to scratch if the sequence has more than SPLIT
 * tokens; if SCORES, nothing more. */
template <int PER_TOKEN, Pages PAGES, bool SCORES>
__device__ void attend_head(const Op &op, int h, const int *rows, int n, float *score,
                            float *scratch) {
    int r = blockIdx.x, hd = op.hd, in_warp = threadIdx.x % WARP, c = in_warp % PER_TOKEN * 8;
    const half *q = (half *)op.attend.q.at + r * op.attend.q.ld + h * hd;
    Head k = find_head<PAGES>(op, op.attend.k, h, c);
    Head v = find_head<PAGES>(op, op.attend.v, h, c);
    float out[8] = {}, scale = rsqrtf((float)hd), largest;
    if (PAGES == FOURS)
        score_fours<PER_TOKEN>(score, q, k, rows, n, scale);
    else
        score_tokens<PER_TOKEN>(score, q + c, k, rows, n, scale);
    if (SCORES)
        return;
    __syncwarp();
    float sum = exponentiate(score, n, &largest);
    __syncwarp();
    if (PAGES == FOURS) {
        weigh_fours<PER_TOKEN>(out, score, v, rows, n);
    } else {
        weigh_tokens<PER_TOKEN>(out, score, v, rows, n);
        for (float &x : out)
            x = warp_reduce<Add>(x, PER_TOKEN);
    }
    if (in_warp >= PER_TOKEN || c >= hd)
        return;
    if (length_of(op, r) <= SPLIT) {
        for (float &x : out)
            x /= sum;
        store8(result_of(op, r) + h * hd + c, to_halfs(out), hd - c, v.wide);
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

/* Joins n partial results of the block's heads, by the whole block. */
__device__ void join_partial(const Op &op, const float *partial, int n) {
    int r = blockIdx.x, hd = op.hd, first = blockIdx.y * HEADS * hd;
    size_t stride = op.nh * partial_floats(hd);
    for (int c = first + threadIdx.x; c < min(first + HEADS * hd, op.nh * hd); c += blockDim.x) {
        const float *p = partial + r * gridDim.z * stride + c / hd * partial_floats(hd);
        float largest = -INFINITY, sum = 0, out = 0;
        for (int i = 0; i < n; i++)
            largest = fmaxf(largest, __ldcg(p + i * stride));
        for (int i = 0; i < n; i++) {
            float weight = expf(__ldcg(p + i * stride) - largest);
            sum += weight * __ldcg(p + i * stride + 1);
            out += weight * __ldcg(p + i * stride + 2 + c % hd);
        }
        result_of(op, r)[c] = __float2half(out / sum);
    }
}

/* Does dense attention; or, if SCORES, writes only the scores to scratch, (nseq, nh, gridDim.z *
 * SPLIT), for sparse attention. */
template <int PER_TOKEN, Pages PAGES, bool SCORES>
__global__ void __launch_bounds__(HEADS *WARP, 6) attend_kernel(Op op, float *scratch) {
    __shared__ int rows[SPLIT];
    __shared__ float scores[SCORES ? 1 : HEADS][SPLIT];
    int r = blockIdx.x, t0 = blockIdx.z * SPLIT, n = min(length_of(op, r) - t0, SPLIT),
        blocks = (length_of(op, r) + SPLIT - 1) / SPLIT, warp = threadIdx.x / WARP,
        h = blockIdx.y * HEADS + warp;
    if (n <= 0)
        return;
    load_rows(rows, op, r, t0, n);
    size_t scored = ((size_t)r * op.nh + h) * gridDim.z * SPLIT + t0;
    float *score = SCORES ? scratch + scored : scores[warp];
    if (h < op.nh)
        attend_head<PER_TOKEN, PAGES, SCORES>(op, h, rows, n, score, scratch);
    if (!SCORES && blocks > 1 && comes_last(&joined[r * gridDim.y + blockIdx.y], blocks))
        join_partial(op, scratch, blocks);
}

/* The tables of these have a kernel for 4, 8 and 16 threads that share a token, which are for heads
 * of up to 32, 64 and 128 elements, and each of these for both kinds of pages. */
typedef void (*DecodeKernel)(Op, float *);
enum { MOST_PER_TOKEN = 16, DECODE_KERNELS = 6 };

static DecodeKernel decode_kernel(const DecodeKernel *kernels, const Op *op) {
    bool packed = op->attend.k.type == U8;
    int which = packed ? FOURS : HALFS;
    CHECK((!op->attend.o.at || op->attend.o.type == F16) && op->hd <= MOST_PER_TOKEN * 8 &&
          (!packed || op->hd % 16 == 0));
    for (int elements = 4 * 8; elements < op->hd; elements *= 2)
        which += 2;
    return kernels[which];
}

/* Returns how many times SPLIT tokens the page table has room for. */
static int count_splits(const Op *op) {
    return blocks_for((long)op->attend.pages.cols * op->page_tokens, SPLIT);
}

static dim3 decode_grid(const Op *op, int splits) {
    return dim3(op->attend.len.cols, blocks_for(op->nh, HEADS), splits);
}

/* Returns the op for n of its sequences from `first` on, or for as many as there are. */
static Op some_sequences(Op op, int first, int n) {
    n = imin(n, op.attend.len.cols - first);
    for (Tensor *t :
         {&op.attend.o, &op.attend.q, &op.attend.tokens, &op.attend.probs, &op.attend.pages})
        *t = tensor_rows(*t, first, n);
    op.attend.len = tensor_cols(op.attend.len, first, n);
    return op;
}

/* Posts one of the kernels, and with `then` what uses the floats that it leaves in scratch; for as
 * many sequences at once as scratch and `joined` have room for, each of which needs so many floats.
 */
template <class Then>
static void post_decode(CudaGpu *g, const Op *op, const DecodeKernel *kernels, size_t floats,
                        Then then) {
    DecodeKernel kernel = decode_kernel(kernels, op);
    cudaStream_t stream = g->stream[op->lane];
    float *scratch = (float *)g->scratch;
    int at_once = imin(WORKSPACE / (floats * sizeof(float)), JOINED / blocks_for(op->nh, HEADS)),
        splits = count_splits(op);
    CHECK(at_once && (g->attends == NLANES || g->attends == op->lane));
    g->attends = op->lane;
    for (int r = 0; r < op->attend.len.cols; r += at_once) {
        Op some = some_sequences(*op, r, at_once);
        kernel<<<decode_grid(&some, splits), HEADS * WARP, 0, stream>>>(some, scratch);
        then(some, scratch);
    }
}

template <bool SCORES>
static const DecodeKernel attend_kernels[DECODE_KERNELS] = {
    attend_kernel<4, HALFS, SCORES>,  attend_kernel<4, FOURS, SCORES>,
    attend_kernel<8, HALFS, SCORES>,  attend_kernel<8, FOURS, SCORES>,
    attend_kernel<16, HALFS, SCORES>, attend_kernel<16, FOURS, SCORES>};

static void gpu_attend(CudaGpu *g, const Op *op, cudaStream_t) {
    int splits = count_splits(op);
    size_t floats = splits > 1 ? splits * op->nh * partial_floats(op->hd) : 1;
    post_decode(g, op, attend_kernels<false>, floats, [](const Op &, float *) {});
}

/* Writes rows of kv into pages. A block has one row; where it packs the row, several blocks share
 * it. What is not packed here, since it stays F16 or is packed already, moves as halfs. */
__global__ void append_kernel(Op op, bool wide) {
    Tensor kv = op.append.kv, pages = op.append.pages;
    int size = (int)type_bytes(kv.type), width = kv.cols / 2 * size / (int)sizeof(half);
    int seq = ((int *)op.append.seq.at)[blockIdx.x], pos = ((int *)op.append.pos.at)[blockIdx.x];
    const half *from = (half *)((uint8_t *)kv.at + blockIdx.x * kv.ld * size);
    size_t row = token_row((const int *)pages.at + seq * pages.ld, pos, op.page_tokens);
    size_t at = row * op.append.k.ld * type_bytes(op.append.k.type);
    uint8_t *k = (uint8_t *)op.append.k.at + at, *v = (uint8_t *)op.append.v.at + at;
    if (kv.type != op.append.k.type)
        return pack_row(k, v, from, op.nh, op.hd);
    for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
        store8((half *)k + c, load8(from + c, width - c, wide), width - c, wide);
        store8((half *)v + c, load8(from + width + c, width - c, wide), width - c, wide);
    }
}

static void gpu_append(CudaGpu *, const Op *op, cudaStream_t stream) {
    Tensor kv = op->append.kv;
    bool pack = kv.type != op->append.k.type;
    int width = (int)(kv.cols / 2 * type_bytes(kv.type) / sizeof(half));
    dim3 grid = pack ? pack_grid(kv.rows, op) : dim3(kv.rows);
    int threads = pack ? THREADS : row_threads(width);
    append_kernel<<<grid, threads, 0, stream>>>(*op, eights(width));
}

// -------------------------------------------------------------------------------------------------
// Sparse attention (section 5)
//
// The paper keeps, for each query, the tokens with the largest scores, drops the others, and loads
// only the V of those it keeps. attend_kernel writes the scores of all tokens to scratch; a warp of
// select_kernel reads those of one head of one sequence, and writes its tokens and their weights; a
// warp of weigh_kernel reads these and the V of the tokens, and writes o. The least score that is
// kept is found by bisection, and how many scores are larger than a given one by looking at each of
// them.
// -------------------------------------------------------------------------------------------------

/* Returns an integer for a score, such that integers are in the order of the scores, and NaN is
 * below all. No score is -0, since their sums begin at 0. */
__device__ unsigned rank(float score) {
    unsigned bits = __float_as_uint(score), sign = 1u << 31;
    if (score != score)
        return 0;
    return bits & sign ? ~bits : bits | sign;
}

/* Returns how many of n scores have at least that rank, by one warp. */
__device__ int count_from(const float *score, int n, unsigned least) {
    int count = 0;
    for (int t = threadIdx.x % WARP; t < n; t += WARP)
        count += rank(score[t]) >= least;
    return warp_reduce<Add>(count, 1);
}

/* Returns the largest rank that at least k of n scores reach, or another that exactly k reach. */
__device__ unsigned least_rank(const float *score, int n, int k) {
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

/* Writes the k of n tokens with the largest scores, in ascending order, by one warp. Of equal
 * scores the earlier tokens are chosen. */
__device__ void choose(int *tokens, const float *score, int n, int k) {
    unsigned least = least_rank(score, n, k), in_warp = threadIdx.x % WARP;
    unsigned before = (1u << in_warp) - 1;                      /* the threads before this one */
    int kept = 0, equals = k - count_from(score, n, least + 1); /* of the least rank, yet to keep */
    for (int t0 = 0; t0 < n; t0 += WARP) {
        int t = t0 + (int)in_warp;
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

__global__ void __launch_bounds__(HEADS *WARP) select_kernel(Op op, float *scores, int splits) {
    int r = blockIdx.x, h = blockIdx.y * HEADS + threadIdx.x / WARP, in_warp = threadIdx.x % WARP,
        past = length_of(op, r) - 1;
    if (h >= op.nh)
        return;
    float *score = scores + ((size_t)r * op.nh + h) * splits * SPLIT, largest;
    size_t at = chosen_of(op, r, h);
    int *tokens = (int *)op.attend.tokens.at + at, chosen = sparse_tokens(op.sparsity, past + 1);
    float *probs = (float *)op.attend.probs.at + at;
    choose(tokens, score, past, chosen - 1);
    if (in_warp == 0)
        tokens[chosen - 1] = past;
    __syncwarp(); /* all scores have been compared, all tokens are there */
    /* the softmax is over all tokens; the probabilities of those that are not chosen are lost */
    float sum = exponentiate(score, past + 1, &largest);
    __syncwarp();
    for (int i = in_warp; i < chosen; i += WARP)
        probs[i] = score[tokens[i]] / sum;
}

static void gpu_select(CudaGpu *g, const Op *op, cudaStream_t stream) {
    int splits = count_splits(op);
    auto select = [&](const Op &some, float *scores) {
        select_kernel<<<decode_grid(&some, 1), HEADS * WARP, 0, stream>>>(some, scores, splits);
    };
    post_decode(g, op, attend_kernels<true>, (size_t)splits * SPLIT * op->nh, select);
}

template <int PER_TOKEN, Pages PAGES>
__global__ void __launch_bounds__(HEADS *WARP, 6) weigh_kernel(Op op, float *) {
    __shared__ int rows[HEADS][SPLIT];
    __shared__ float part[HEADS][SPLIT];
    int r = blockIdx.x, warp = threadIdx.x / WARP, in_warp = threadIdx.x % WARP,
        h = blockIdx.y * HEADS + warp;
    if (h >= op.nh)
        return;
    int hd = op.hd, c = in_warp % PER_TOKEN * 8;
    int count = sparse_tokens(op.sparsity, length_of(op, r));
    Head v = find_head<PAGES>(op, op.attend.v, h, c);
    float out[8] = {};
    size_t at = chosen_of(op, r, h);
    const int *pages = pages_of(op, r), *tokens = (int *)op.attend.tokens.at + at;
    const float *probs = (float *)op.attend.probs.at + at;
    for (int first = 0; first < count; first += SPLIT) {
        int n = min(count - first, SPLIT);
        __syncwarp(); /* the tokens before have been read */
        for (int i = in_warp; i < whole_tiles(n); i += WARP) {
            int token = first + min(i, n - 1);
            rows[warp][i] = token_row(pages, tokens[token], op.page_tokens);
            part[warp][i] = probs[token];
        }
        __syncwarp();
        if (PAGES == FOURS)
            weigh_fours<PER_TOKEN>(out, part[warp], v, rows[warp], n);
        else
            weigh_tokens<PER_TOKEN>(out, part[warp], v, rows[warp], n);
    }
    if (PAGES == HALFS)
        for (float &x : out)
            x = warp_reduce<Add>(x, PER_TOKEN);
    if (in_warp >= PER_TOKEN || c >= hd)
        return;
    store8(result_of(op, r) + h * hd + c, to_halfs(out), hd - c, v.wide);
}

static const DecodeKernel weigh_kernels[DECODE_KERNELS] = {
    weigh_kernel<4, HALFS>, weigh_kernel<4, FOURS>,  weigh_kernel<8, HALFS>,
    weigh_kernel<8, FOURS>, weigh_kernel<16, HALFS>, weigh_kernel<16, FOURS>};

static void gpu_weigh(CudaGpu *, const Op *op, cudaStream_t stream) {
    DecodeKernel kernel = decode_kernel(weigh_kernels, op);
    kernel<<<decode_grid(op, 1), HEADS * WARP, 0, stream>>>(*op, NULL);
}

// -------------------------------------------------------------------------------------------------
// The choice of the next token
//
// Section 3 ends with the last layer; its rows become logits, of which a token is chosen. A block
// reads one row of logits, (vocab) floats, and writes the most probable token, or for evaluation
// how probable a given token is. With a temperature the CPU chooses, from logits that have been
// copied to it (Plan.chooser in plan.h).
// -------------------------------------------------------------------------------------------------

/* Returns the lowest id among the largest logits, and the largest logit, to all threads. Sets *bad
 * to 1 where one of the logits, chosen or not, is not finite. NaN is never the largest. */
__device__ int largest_logit(const float *logits, int vocab, float *largest, int *bad) {
    float most = -INFINITY;
    int best = vocab;
    bool finite = true;
#pragma unroll 8 /* so many are read before the first is looked at */
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float logit = logits[i];
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
    return best < vocab ? best : 0; /* 0: all are NaN */
}

__global__ void __launch_bounds__(MOST_THREADS) pick_kernel(Op op, int *bad) {
    Tensor logits = op.pick.logits;
    float largest;
    int id = largest_logit((float *)logits.at + (size_t)blockIdx.x * logits.cols, logits.cols,
                           &largest, bad);
    if (threadIdx.x == 0)
        ((int *)op.pick.ids.at)[blockIdx.x] = id;
}

/* Writes the log-probability of the target and the best token of a row. A NaN among the logits
 * makes logp NaN. */
__global__ void __launch_bounds__(MOST_THREADS) score_kernel(Op op, int *bad) {
    int r = blockIdx.x, vocab = op.score.logits.cols;
    const float *row = (float *)op.score.logits.at + (size_t)r * vocab;
    float largest;
    double sum = 0;
    int id = largest_logit(row, vocab, &largest, bad);
    for (int i = threadIdx.x; i < vocab; i += blockDim.x)
        sum += expf(row[i] - largest);
    sum = block_reduce<Add>(sum);
    if (threadIdx.x)
        return;
    int target = ((int *)op.score.target.at)[r];
    ((float *)op.score.logp.at)[r] = row[target] - largest - logf((float)sum);
    ((int *)op.score.best.at)[r] = id;
}

static void gpu_pick(CudaGpu *g, const Op *op, cudaStream_t stream) {
    Tensor logits = op->pick.logits;
    int threads = row_threads(logits.cols, MOST_THREADS);
    pick_kernel<<<logits.rows, threads, 0, stream>>>(*op, g->not_finite);
}

static void gpu_score(CudaGpu *g, const Op *op, cudaStream_t stream) {
    Tensor logits = op->score.logits;
    int threads = row_threads(logits.cols, MOST_THREADS);
    score_kernel<<<logits.rows, threads, 0, stream>>>(*op, g->not_finite);
}

// -------------------------------------------------------------------------------------------------
// The device: streams and events
//
// Section 4.2 overlaps loads, stores and computation, and Figure 4 has a function for each. Here
// each lane that touches the GPU has a stream, on which its ops are posted as kernels and copies. A
// mark is a point of a stream that other streams and threads wait for; it is an event of CUDA.
// -------------------------------------------------------------------------------------------------

static int gpu_run(Gpu *gpu, const Op *op, Error *err) {
    // clang-format off
    static void (*launch[NCODES])(CudaGpu *, const Op *, cudaStream_t) = { /* in OpCode's order */
        NULL, gpu_embed, gpu_layernorm, NULL, gpu_unpack, gpu_pack, gpu_attend_prefill,
        gpu_attend, gpu_select, NULL, gpu_weigh, gpu_append, gpu_pick, gpu_score};
    // clang-format on
    cudaStream_t stream = stream_of(gpu, op->lane);
    for (const Tensor &view : op->view)
        if (view.at && !view.rows)
            return 0; /* nothing to do, and CUDA refuses grids without blocks */
    if (op->code == OP_LINEAR) {
        if (gpu_linear(cuda(gpu), op, stream, err))
            return -1;
    } else {
        CHECK(launch[op->code]);
        launch[op->code](cuda(gpu), op, stream);
    }
    return checked(cudaGetLastError(), op_info[op->code].name, err);
}

/* Returns how many bytes from p on lie before the end of its pinned range; SIZE_MAX if p is not
 * pinned. */
static size_t before_border(const CudaGpu *g, const void *p) {
    size_t at = (size_t)((const char *)p - g->pinned); /* wraps around if p lies before it */
    return at < g->pinned_bytes ? g->pin_part - at % g->pin_part : SIZE_MAX;
}

/* Copies contiguous rows in parts, so that on a link that takes one copy at a time a slab of
 * weights does not delay results of attention for long. CUDA takes no copy that crosses a border
 * between two pinned ranges, so these cut copies too. */
static int gpu_copy(Gpu *gpu, Lane lane, StridedCopy c, Error *err) {
    const CudaGpu *g = cuda(gpu);
    const size_t PART = 16 << 20;
    cudaStream_t stream = stream_of(gpu, lane);
    cudaError_t e = cudaSuccess;
    if (c.dst_pitch == c.row_bytes && c.src_pitch == c.row_bytes) {
        c.row_bytes *= c.rows;
        c.rows = 1;
    }
    if (c.rows > 1 && before_border(g, c.dst) >= c.rows * c.dst_pitch &&
        before_border(g, c.src) >= c.rows * c.src_pitch)
        return checked(cudaMemcpy2DAsync(c.dst, c.dst_pitch, c.src, c.src_pitch, c.row_bytes,
                                         c.rows, cudaMemcpyDefault, stream),
                       "copy", err);
    for (int r = 0; r < c.rows; r++)
        for (size_t at = 0, n; at < c.row_bytes && !e; at += n) {
            char *to = (char *)c.dst + r * c.dst_pitch + at;
            const char *from = (const char *)c.src + r * c.src_pitch + at;
            n = size_min(size_min(c.row_bytes - at, PART),
                         size_min(before_border(g, to), before_border(g, from)));
            e = cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream);
        }
    return checked(e, "copy", err);
}

static int gpu_capture(Gpu *gpu, Lane lane, Error *err) {
    cudaError_t e = cudaStreamBeginCapture(stream_of(gpu, lane), cudaStreamCaptureModeThreadLocal);
    if (e)
        cudaGetLastError(); /* or the next launch would be blamed for it */
    return checked(e, "capturing a graph", err);
}

static void *gpu_captured(Gpu *gpu, Lane lane, Error *err) {
    cudaGraph_t captured = NULL;
    cudaGraphExec_t graph = NULL;
    cudaError_t e = cudaStreamEndCapture(stream_of(gpu, lane), &captured);
    if (!e)
        e = cudaGraphInstantiateWithFlags(&graph, captured, 0);
    if (captured)
        cudaGraphDestroy(captured);
    if (e)
        cudaGetLastError(); /* as above */
    return checked(e, "making a graph", err) ? NULL : graph;
}

static int gpu_launch(Gpu *gpu, Lane lane, void *graph, Error *err) {
    return checked(cudaGraphLaunch((cudaGraphExec_t)graph, stream_of(gpu, lane)),
                   "launching a graph", err);
}

static void gpu_forget(Gpu *gpu, Lane lane, void *graph) {
    cudaStreamSynchronize(stream_of(gpu, lane));
    cudaGraphExecDestroy((cudaGraphExec_t)graph);
    cudaGetLastError(); /* forgets an error that the next sync reports */
}

static int record(Gpu *gpu, Lane lane, cudaEvent_t event, Error *err) {
    return checked(cudaEventRecord(event, stream_of(gpu, lane)), "event", err);
}

static int gpu_begin(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    return record(gpu, lane, mark_of(gpu, lane, mark)->begin, err);
}

static int gpu_end(Gpu *gpu, Lane lane, uint64_t mark, bool timed, Error *err) {
    Mark *m = mark_of(gpu, lane, mark);
    m->reached = timed ? m->end : m->untimed;
    return record(gpu, lane, m->reached, err);
}

static int gpu_after(Gpu *gpu, Lane lane, Lane other, uint64_t mark, Error *err) {
    cudaEvent_t event = mark_of(gpu, other, mark)->reached;
    return checked(cudaStreamWaitEvent(stream_of(gpu, lane), event, 0), "wait", err);
}

static int gpu_sync(Gpu *gpu, Lane lane, uint64_t mark, Error *err) {
    cudaEvent_t event = mark_of(gpu, lane, mark)->reached;
    double until = seconds_now() + gpu->poll_s;
    cudaError_t e = cudaErrorNotReady;
    while (e == cudaErrorNotReady && seconds_now() < until)
        e = cudaEventQuery(event);
    cudaGetLastError(); /* forgets the answers "not ready", or the next launch would be blamed */
    return checked(e == cudaErrorNotReady ? cudaEventSynchronize(event) : e, lane_name[lane], err);
}

/* Returns the seconds between two events, or -1. */
static double elapsed(cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    if (!cudaEventElapsedTime(&ms, from, to))
        return ms * 1e-3;
    cudaGetLastError(); /* or the next launch would be blamed for it */
    return -1;
}

static double gpu_took(Gpu *gpu, Lane lane, uint64_t first, uint64_t last) {
    return fmax(elapsed(mark_of(gpu, lane, first)->begin, mark_of(gpu, lane, last)->end), 0);
}

/* Adds the time since the begin that it was asked for before: CUDA tells times as floats of
 * milliseconds, which are exact as long as they are short. The begin's event is kept, and the mark
 * gets the event that was kept until now. */
static double gpu_began(Gpu *gpu, Lane lane, uint64_t mark) {
    CudaGpu *g = cuda(gpu);
    cudaEvent_t *next = &mark_of(gpu, lane, mark)->begin;
    double s = elapsed(g->known[lane], *next);
    if (s >= 0) {
        cudaEvent_t kept = g->known[lane];
        g->known[lane] = *next;
        *next = kept;
        g->known_s[lane] += s;
    }
    return g->known_s[lane];
}

// -------------------------------------------------------------------------------------------------
// The device: memory
//
// The GPU tier of section 4 is one allocation. The memory of the CPU tier is pinned, so that copies
// between the two overlap with computation.
// -------------------------------------------------------------------------------------------------

static void *gpu_alloc(Gpu *gpu, size_t bytes, Error *err) {
    void *p;
    size_t available = 0, total;
    *cuda(gpu)->not_finite = 0;
    cuda(gpu)->attends = NLANES;
    if (!cudaMalloc(&p, bytes))
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
    cudaGetLastError(); /* forgets an error that has been reported before */
}

static void gpu_unpin(Gpu *gpu, void *host) {
    CudaGpu *g = cuda(gpu);
    for (size_t at = 0; at < g->pinned_bytes; at += g->pin_part)
        cudaHostUnregister((char *)host + at);
    g->pinned = NULL;
    g->pinned_bytes = 0;
}

/* Pins memory in ranges of pin_part bytes. If one fails, those before it stay pinned. */
static int gpu_pin(Gpu *gpu, void *host, size_t bytes, Error *err) {
    CudaGpu *g = cuda(gpu);
    cudaError_t e = cudaSuccess;
    CHECK(!g->pinned_bytes);
    for (g->pinned = (char *)host; g->pinned_bytes < bytes && !e;) {
        size_t n = size_min(bytes - g->pinned_bytes, g->pin_part);
        e = cudaHostRegister(g->pinned + g->pinned_bytes, n, cudaHostRegisterDefault);
        if (!e)
            g->pinned_bytes += n;
    }
    if (!e)
        return 0;
    cudaGetLastError();
    return fail(
        err, EXIT_FAILED,
        "cannot pin more than %.1f of the CPU tier's %.1f MiB (%s), so copies will be slower and "
        "overlap less; raise the limit of locked memory (ulimit -l), or lower --cpu-mem",
        g->pinned_bytes / 1048576.0, bytes / 1048576.0, cudaGetErrorString(e));
}

static int gpu_transfer(Gpu *, void *dst, const void *src, size_t bytes, Error *err) {
    /* from memory that is not pinned, cudaMemcpy returns before the last bytes have arrived */
    if (checked(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "transfer", err))
        return -1;
    return checked(cudaStreamSynchronize(NULL), "transfer", err);
}

static size_t gpu_in_use(Gpu *) {
    size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    return total - available;
}

// -------------------------------------------------------------------------------------------------
// The device: opening and closing
// -------------------------------------------------------------------------------------------------

static void gpu_close(Gpu *gpu) {
    CudaGpu *g = cuda(gpu);
    for (int lane = 0; lane < NLANES; lane++) {
        for (const Mark &m : g->marks[lane])
            for (cudaEvent_t event : {m.begin, m.end, m.untimed})
                if (event)
                    cudaEventDestroy(event);
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

/* Asks about all kernels. CUDA loads a kernel when it is first launched or asked about, and no
 * prompt should wait for that. Allows products with packed weights the shared memory that their
 * blocks ask for, as far as the GPU has so much. most: the bytes that it has for a block. */
static int load_kernels(CudaGpu *g, size_t most, Error *err) {
    cudaError_t e = cudaSuccess;
    cudaFuncAttributes attributes; /* of the kernel that was last asked about */
    auto load = [&](auto... kernels) {
        for (cudaError_t asked : {cudaFuncGetAttributes(&attributes, kernels)...})
            e = e ? e : asked;
    };
    load(embed_kernel, embed_packed_kernel, layernorm_kernel, unpack_kernel, pack_kernel,
         bias_kernel, append_kernel, select_kernel, pick_kernel, score_kernel);
    for (auto kernel : prefill_kernels)
        load(kernel);
    for (const DecodeKernel *kernels : {attend_kernels<false>, attend_kernels<true>, weigh_kernels})
        for (int i = 0; i < DECODE_KERNELS; i++)
            load(kernels[i]);
    for (const auto &packed : packed_kernels) {
        load(packed.kernel);
        if (e)
            break;
        g->since_80 = attributes.ptxVersion >= 80;
        size_t shared = packed.shared[g->since_80];
        if (shared + attributes.sharedSizeBytes > most)
            continue;
        g->packed_most = (int)(&packed - packed_kernels);
        e = cudaFuncSetAttribute((void *)packed.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared);
    }
    return checked(e, "looking for its code", err);
}

/* Finds the GPU, fills in what it is, and loads the kernels. */
static int find_gpu(CudaGpu *g, Error *err) {
    int n = 0;
    cudaDeviceProp card;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaErrorInsufficientDriver)
        return fail(
            err, EXIT_USAGE,
            "no GPU: NVIDIA's driver is missing, or older than CUDA %d; install a newer one",
            CUDART_VERSION / 1000);
    if (e == cudaErrorNoDevice || (!e && !n))
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
    return load_kernels(g, card.sharedMemPerBlockOptin, err);
}

static int create_event(cudaEvent_t *event, unsigned flags, Error *err) {
    return checked(cudaEventCreateWithFlags(event, flags), "events", err);
}

/* Opens the streams and their events. Threads that wait for an event sleep. */
static int open_streams(CudaGpu *g, Error *err) {
    unsigned untimed = cudaEventBlockingSync | cudaEventDisableTiming;
    for (int lane = 0; lane < NLANES; lane++) {
        if (!on_gpu(lane))
            continue;
        if (checked(cudaStreamCreateWithFlags(&g->stream[lane], cudaStreamNonBlocking), "streams",
                    err))
            return -1;
        for (Mark &m : g->marks[lane])
            if (create_event(&m.begin, cudaEventDefault, err) ||
                create_event(&m.end, cudaEventBlockingSync, err) ||
                create_event(&m.untimed, untimed, err))
                return -1;
        if (create_event(&g->known[lane], cudaEventDefault, err))
            return -1;
    }
    return 0;
}

/* Notes the GPU's clock and the host's at one moment. */
static int open_clock(CudaGpu *g, Error *err) {
    for (int lane = 0; lane < NLANES; lane++)
        if (on_gpu(lane) && record(g, PROJECT, g->known[lane], err))
            return -1;
    if (checked(cudaStreamSynchronize(g->stream[PROJECT]), "clock", err))
        return -1;
    for (double &s : g->known_s)
        s = seconds_now();
    return 0;
}

/* Computes a product of few rows and one of many. cuBLAS takes memory when it first runs, which
 * then counts as overhead. */
static int run_products(CudaGpu *g, Error *err) {
    enum { SIDE = 256 };
    static const f16 zeros[SIDE * SIDE] = {};
    Tensor w = {};
    if (gpu_transfer(g, g->scratch, zeros, sizeof zeros, err))
        return -1;
    w.type = F16;
    w.rows = w.cols = SIDE;
    w.ld = SIDE;
    w.at = g->scratch;
    for (int rows = 1; rows <= SIDE; rows *= SIDE) {
        Op op = {};
        op.code = OP_LINEAR;
        op.lane = PROJECT;
        op.linear.w = w;
        op.linear.b = tensor_rows(w, 0, 1);
        op.linear.x = op.linear.y = tensor_rows(w, 0, rows);
        op.linear.y.at = g->workspace[1];
        if (gpu_run(g, &op, err))
            return -1;
    }
    return checked(cudaStreamSynchronize(g->stream[PROJECT]), "a first product", err);
}

static int open_memory(CudaGpu *g, Error *err) {
    size_t most = 1u << 30;
    if (cublasLtCreate(&g->blas))
        return fail(err, EXIT_FAILED,
                    "cannot open cuBLAS; check that driver and CUDA toolkit fit together");
    if (checked(cudaHostAlloc((void **)&g->not_finite, sizeof *g->not_finite, cudaHostAllocDefault),
                "pinned memory", err))
        return -1;
    g->bad = g->not_finite;
    /* an allocation for each, so that a sanitizer sees what is written beyond the end of one */
    for (char **p : {&g->scratch, &g->workspace[0], &g->workspace[1]}) {
        *p = (char *)gpu_alloc(g, WORKSPACE, err);
        if (!*p)
            return -1;
    }
    g->max_head = TILES_MAX * TILE;
    g->pin_part = PINNED_AT_ONCE;
    if (run_products(g, err))
        return -1;
    /* CUDA does not tell the size of the context; it is what is in use now, or, where others use
     * the GPU too, at most `most` of that. */
    g->overhead = size_min(gpu_in_use(g), most);
    /* Kernels take memory when they first run, stacks included: the more, the more multiprocessors
     * there are. This is a guess until a card has been asked: bench prints what it was. */
    g->spare = size_min((size_t)(64 + 3 * g->places / 2) << 20, g->total / 16);
    return 0;
}

static Gpu *open_gpu(Error *err) {
    static const GpuCalls calls = {gpu_run,    gpu_copy,    gpu_capture, gpu_captured, gpu_launch,
                                   gpu_forget, gpu_begin,   gpu_end,     gpu_after,    gpu_sync,
                                   gpu_took,   gpu_began,   gpu_alloc,   gpu_release,  gpu_pin,
                                   gpu_unpin,  gpu_transfer};
    CudaGpu *g = (CudaGpu *)xcalloc(1, sizeof *g);
    setenv("CUDA_MODULE_LOADING", "LAZY", 0); /* before CUDA 12.2 all code is loaded at once */
    g->call = &calls;
    g->in_use = gpu_in_use;
    g->close = gpu_close;
    if (!find_gpu(g, err) && !open_streams(g, err) && !open_clock(g, err) && !open_memory(g, err))
        return g;
    gpu_close(g);
    return NULL;
}

Gpu *(*cuda_open_gpu)(Error *) = open_gpu;
