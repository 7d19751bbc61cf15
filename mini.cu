/* mini.cu: the GPU's half of mini.c, with CUDA and cuBLAS.
 *
 *   nvcc -O3 -DGPU mini.c mini.cu -lcublas -o mini
 *   ./mini models/opt-tiny "Once upon a time" --percent 0 50 0 100 0 100
 *
 * With -DGPU mini.c leaves out the functions that compute in the GPU's memory or copy to it. Most
 * are here under the same names: read a function there first, and then its twin. Two have other
 * names: mini.c's attend() is attend_on_gpu() here, though mini.c keeps attend() for delegation,
 * and add_product() is multiply(). These have no twin: those that deal with streams and buffers
 * (stream, mark, post_copy, pass_bounce, place_buffers), those that kernels share, and those that
 * measure. In four places, #ifdef GPU, mini.c knows that there is a GPU.
 *
 * All flags keep their meaning; --ctog and the like still slow a link. But where mini.c guesses the
 * GPU's memory, the rates of CTOG and GTOC and the speed of products, measure_gpu() measures them.
 * Any GPU from compute capability 7.5 on runs it.
 *
 * The order is: threads and blocks; streams and copies; products; the kernels of a layer;
 * attention; the first and the last step of a token; what is measured at the start. Kernels are
 * plain. A comment at each says its shape and its grid, and at most of them which kernel of
 * flexgen.cu does it faster, and how.
 *
 * nvcc compiles a .cu as C++. So mini.c is included here for its types and prototypes only, which
 * end at its #ifndef __cplusplus; its functions are compiled once, as C.
 *
 * Read next: flexgen.h. */
#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>

extern "C" {
#undef _GNU_SOURCE  // C++ compilers define it themselves, and mini.c does it again.
#define SHARED extern
#include "mini.c"

/* What mini.c has further down. */
uint8_t *weight_at(Weight *w);
int rows_of(Sequence *q, int i), sparse_top(int n);
bool is_delegated(Sequence *q, int i);
Place kv_near(Sequence *q, Square at, int t, int value);
void *take(Tier t, size_t bytes);
void account(Tier to, Tier from, double start, double end, size_t bytes);
void fill(uint8_t *to, Weight *w);
}

#define REMEDY \
    "nvidia-smi shows driver and free memory; lower --gpu-mem, --cpu-mem; nvcc -arch=native"

/* Checks a call of CUDA, and of cuBLAS. A kernel's fault shows at a later call. */
#define CUDA(call)                                                       \
    do {                                                                 \
        cudaError_t error = (call);                                      \
        if (error)                                                       \
            die(1, "%s: %s; " REMEDY, #call, cudaGetErrorString(error)); \
    } while (0)
#define CUBLAS(call)                                                  \
    do {                                                              \
        int status = (call);                                          \
        if (status)                                                   \
            die(1, "%s: cuBLAS's status %d; " REMEDY, #call, status); \
    } while (0)

// -------------------------------------------------------------------------------------------------
// Threads, warps, blocks and grids
//
// A GPU runs one function in many threads. These are not threads of the system: there are thousands
// at a time, and each does very little. They are ordered in three steps:
//
//   warp    32 threads that usually run in step, and can read each other's registers
//           (__shfl_xor_sync, whose first argument says which of them take part)
//   block   threads that share memory and wait for each other (__syncthreads), here always 128
//   grid    all blocks of a launch, which are independent of each other
//
// The words of CUDA, which C does not have:
//
//   __global__   marks a kernel: a function that the CPU launches and the GPU runs.
//   __device__   marks a function of the GPU that kernels call.
//   __shared__   marks a variable with one copy for each block, which lives as long as the block.
//   threadIdx.x  is the number of this thread in its block, from 0 on.
//   blockIdx     is the place of this block in the grid, (x, y); gridDim is the grid's size.
//   dim3         is a size of up to three numbers; a single number n is (n, 1, 1).
//   half         is F16; __float2half rounds to it, __half2float widens it.
//
//   kernel<<<blocks, threads, extra, stream>>>(arguments)
//
// launches a kernel: the blocks of the grid; the threads of a block; the bytes of shared memory
// that the kernel does not declare itself, here 0; and the stream, see the next chapter. The call
// returns before the kernel has run.
//
// A block takes a row, or a head of a row; in other kernels a thread takes a number, a group or a
// token. Why 128 threads? A GPU has some dozens of processors, each of which runs whole blocks and
// goes to another warp while one waits for memory: so a block should be a few warps. But a head has
// 64 to 128 numbers, so most of a larger block would be idle in the sums of attention. It is easy
// to miss that threads of the last block may have no number: so such kernels begin with a
// comparison.
// -------------------------------------------------------------------------------------------------

enum { WARP = 32, THREADS = 128, GROUP_BYTES = 4 + GROUP / 2 };

/* Launches a kernel in blocks of THREADS on the calling thread's stream, unless it has no work. */
#define LAUNCH(kernel, grid, ...)                                                 \
    do {                                                                          \
        dim3 blocks = grid;                                                       \
        if (!blocks.x || !blocks.y)                                               \
            break;                                                                \
        kernel<<<blocks, THREADS, 0, stream()>>>(__VA_ARGS__);                    \
        cudaError_t error = cudaGetLastError(); /* of a launch that is refused */ \
        if (error)                                                                \
            die(1, "%s: %s; " REMEDY, #kernel, cudaGetErrorString(error));        \
    } while (0)

/* Returns the blocks for n threads. */
static unsigned blocks_of(size_t n) { return (n + THREADS - 1) / THREADS; }

/* Returns this thread's number in the grid. */
static __device__ size_t number(void) { return blockIdx.x * (size_t)THREADS + threadIdx.x; }

// -------------------------------------------------------------------------------------------------
// Streams and copies (4.2)
//
// The paper moves data while the GPU computes (4.2). CUDA has streams for that: queues on the GPU,
// whose work runs in order, while the work of different streams runs side by side. Each thread of
// mini.c that needs one has one. That of the main thread carries all kernels, and the few copies
// that compute() asks for: new k and v, queries, results. Those of the three movers carry weights,
// cache and activations. The engine calls such a queue a lane.
//
// A call for a stream returns before its work is done. await() waits until all work of the calling
// thread's stream is done, and then as long as a link that --ctog and the like slow would still
// have taken: the copies themselves are not slowed. These wait:
//
//   attention(), before attend()   The CPU needs queries, and new k and v.
//   attention(), before w_O        Results have gone up, also over a slowed link.
//   mlp()                          The hidden state is complete, so that a mover may store it.
//   choose_tokens()                The CPU needs the tokens.
//   make_move()                    A mover has made its move.
//
// The first two wait even where nothing is delegated, and are not needed then. With --no-overlap
// the main thread makes the moves, too, and all is in its one stream.
//
// The GPU waits for a copy only if the copy is before its next kernel in the same stream. No stream
// waits for another: synchronize() has seen that the movers' copies have arrived before it lets the
// kernels that need them be posted. CUDA has a default stream for calls that name none, and other
// streams usually wait for it; cudaStreamNonBlocking says that ours do not.
//
// It is easy to miss that only pinned memory, which the system never moves or swaps out, is copied
// behind the CPU's back. So the whole tier of the CPU is pinned. The disk's is a mapped file, which
// pinning would hold in memory as a whole: its bytes bounce, which means that they pass through a
// small pinned buffer. Each thread that needs one has one, and --cpu-mem does not count it.
// -------------------------------------------------------------------------------------------------

enum { BOUNCE = 4 << 20, PIECE = BOUNCE / 4 };
static __thread cudaStream_t own_stream;
static __thread uint8_t *bounce; /* (BOUNCE), pinned */
static __thread size_t bounce_used;
/* What this thread has sent by its stream since its latest await(): sent[to][from]. An event marks
 * a place in a stream, and has the time at which the stream came there: a copy begins when the
 * kernels before it are done, which may be long after it was posted. */
struct Copies {
    size_t bytes;
    cudaEvent_t begun;
};
static __thread Copies sent[NTIERS][NTIERS];
static __thread cudaEvent_t finished;

/* Returns the calling thread's stream. */
static cudaStream_t stream(void) {
    if (!own_stream)
        CUDA(cudaStreamCreateWithFlags(&own_stream, cudaStreamNonBlocking));
    return own_stream;
}

/* Marks the place in the calling thread's stream behind all that was posted so far. */
static void mark(cudaEvent_t *event) {
    if (!*event)
        CUDA(cudaEventCreateWithFlags(event, cudaEventDefault));
    CUDA(cudaEventRecord(*event, stream()));
}

/* Posts a copy. CUDA sees from the addresses which way it goes. */
static void post_copy(void *to, const void *from, size_t bytes) {
    CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
}

/* Sends bytes between GPU and disk in pieces. While one piece goes up, the next is read. Down, each
 * piece must have come before the CPU writes it to the file. (min and max are CUDA's here.) */
static void pass_bounce(Place to, Place from, size_t bytes) {
    if (!bounce)
        CUDA(cudaHostAlloc((void **)&bounce, BOUNCE, cudaHostAllocDefault));
    for (size_t done = 0, n; done < bytes; done += n) {
        n = min(bytes - done, (size_t)PIECE);
        if (bounce_used + n > BOUNCE) { /* full: wait for its pieces, and begin it again */
            CUDA(cudaStreamSynchronize(stream()));
            bounce_used = 0;
        }
        uint8_t *via = bounce + bounce_used;
        bounce_used += n;
        if (to.tier == TIER_GPU) {
            memcpy(via, from.at + done, n);
            post_copy(to.at + done, via, n);
        } else {
            post_copy(via, from.at + done, n);
            CUDA(cudaStreamSynchronize(stream()));
            memcpy(to.at + done, via, n);
        }
    }
}

/* Sends bytes: posts what goes to or from the GPU. Between CPU and disk it copies at once, as
 * mini.c does. */
void travel(Place to, Place from, size_t bytes) {
    Copies *pair = &sent[to.tier][from.tier];
    double start = now();
    if (!bytes)
        return;
    if (to.tier != TIER_GPU && from.tier != TIER_GPU) {
        memcpy(to.at, from.at, bytes);
        account(to.tier, from.tier, start, now(), bytes);
        return;
    }
    if (!pair->bytes)
        mark(&pair->begun);
    pair->bytes += bytes;
    if (to.tier == TIER_DISK || from.tier == TIER_DISK)
        pass_bounce(to, from, bytes);
    else
        post_copy(to.at, from.at, bytes);
}

/* Waits until the kernels and copies that this thread has posted are done, and accounts for the
 * copies. */
void await(void) {
    if (own_stream) {
        mark(&finished);
        CUDA(cudaStreamSynchronize(own_stream));
    }
    bounce_used = 0;
    double end = now();
    for (int to = 0; to < NTIERS; to++)
        for (int from = 0; from < NTIERS; from++) {
            Copies *pair = &sent[to][from];
            float ms = 0;
            if (!pair->bytes)
                continue;
            CUDA(cudaEventElapsedTime(&ms, pair->begun, finished));
            account((Tier)to, (Tier)from, end - ms / 1e3, end, pair->bytes);
            pair->bytes = 0;
        }
    sleep_off();
}

/* Returns the memory of a tier: the GPU's own, or pinned memory. */
void *open_memory(Tier t, size_t bytes) {
    void *at;
    if (t == TIER_GPU)
        CUDA(cudaMalloc(&at, bytes));
    else
        CUDA(cudaHostAlloc(&at, bytes, cudaHostAllocDefault));
    return at;
}

/* Brings a tensor to where it rests. `ready` is not pinned: this happens once, at the start, when
 * nothing computes that a copy could hold up. */
void fill_weight(Weight *w) {
    if (w->rest.tier != TIER_GPU) {
        fill(w->rest.at, w);
        return;
    }
    uint8_t *ready = (uint8_t *)malloc(w->bytes);
    if (!ready)
        die(1, "no memory for a tensor of %zu bytes; close other programs", w->bytes);
    fill(ready, w);
    post_copy(w->rest.at, ready, w->bytes);
    CUDA(cudaStreamSynchronize(stream()));
    free(ready);
}

// -------------------------------------------------------------------------------------------------
// Products (section 3)
//
// The paper calls cuBLAS for its products, and so do we: it multiplies F16 by F16 on tensor cores,
// units for small matrices, which is where a GPU's speed is, and adds up and returns floats. So
// each product first rounds x to F16, and unpacks weights that are packed, a whole tensor. mini.c's
// floats stay floats; where two logits are nearly equal, the two programs may therefore choose
// different tokens. It is easy to miss that cuBLAS takes a matrix to lie in memory column after
// column, where ours lie row after row. It therefore sees the transpose of each of ours. We want y
// = x w^T, so we ask for its transpose, y^T = w x^T:
//
//     ours in memory    cuBLAS sees     the product needs
//     w (n, k)          w^T (k, n)      w (n, k): transpose it
//     x (m, k)          x^T (k, m)      x^T (k, m)
//     y (m, n)          y^T (n, m)      y^T (n, m)
// -------------------------------------------------------------------------------------------------

static cublasHandle_t cublas;
static half *x_half, *w_half; /* (rows, h1 or h2); (h1, h2), if weights are packed */
static int *ids;              /* (rows), pinned, so that kernels read and write it: token ids */
static float *scores;         /* (nh, tokens), for sparse attention */
static bool *is_kept;         /* (nh, tokens), likewise: true where v of a token is read */

/* Places what only the GPU's half needs, and `scratch` for the CPU's threads. */
void place_buffers(size_t rows) {
    size_t widest = max(h1, h2);
    x_half = (half *)take(TIER_GPU, rows * widest * sizeof(half));
    w_half = (half *)take(TIER_GPU, policy.compress_weight ? h1 * widest * sizeof(half) : 0);
    ids = (int *)take(TIER_CPU, rows * sizeof(int));
    size_t most = is_sparse() ? (size_t)nh * (longest + generation_length) : 0;
    scores = (float *)take(TIER_GPU, most * sizeof(float));
    is_kept = (bool *)take(TIER_GPU, most);
    scratch = (float *)take(TIER_CPU, threads * scratch_floats * sizeof(float));
}

/* Rounds n numbers to F16; a thread each. A faster one does eight numbers a thread. flexgen.cu does
 * not need it: its layernorm_kernel writes F16 itself. */
static __global__ void narrow_kernel(half *to, const float *from, size_t n) {
    size_t e = number();
    if (e < n)
        to[e] = __float2half(from[e]);
}

/* Unpacks (rows / GROUP, cols) groups, whose bytes packed_bytes() of mini.c describes, to (rows,
 * cols); a thread a group. Neighbouring threads write neighbouring columns, which memory takes
 * together. A faster one never writes them: packed_linear_kernel unpacks in registers, right before
 * it multiplies. */
static __global__ void unpack_kernel(half *to, const uint8_t *from, size_t groups, int cols) {
    size_t g = number();
    if (g >= groups)
        return;
    const uint8_t *group = from + g * GROUP_BYTES;
    float least = __half2float(((const half *)group)[0]);
    float scale = __half2float(((const half *)group)[1]);
    half *column = to + g / cols * GROUP * cols + g % cols;
    for (int e = 0; e < GROUP; e++) {
        int code = group[4 + e / 32 * 16 + e % 16] >> e % 32 / 16 * 4 & 15;
        column[(size_t)e * cols] = __float2half(least + scale * code);
    }
}

/* Computes y = x w^T + beta y, for x (rows, w->cols) and y (rows, w->rows). cuBLAS takes 19
 * arguments: the handle; whether to transpose the two factors, w and not x; the sizes n, m and k,
 * here w->rows, rows and w->cols; a number that the product is multiplied by, 1; w, x, beta and y,
 * each matrix with its type and the length of a column as cuBLAS sees it; in which type to add up;
 * and which of its methods to take. */
static void multiply(float *y, const float *x, Weight *w, int rows, float beta) {
    const float one = 1;
    const uint8_t *bytes = weight_at(w);
    const half *plain = (const half *)bytes;
    size_t numbers = (size_t)rows * w->cols, groups = (size_t)w->rows / GROUP * w->cols;
    if (!rows)
        return;
    LAUNCH(narrow_kernel, blocks_of(numbers), x_half, x, numbers);
    if (w->packed) {
        LAUNCH(unpack_kernel, blocks_of(groups), w_half, bytes, groups, w->cols);
        plain = w_half;
    }
    CUBLAS(cublasGemmEx(cublas, CUBLAS_OP_T, CUBLAS_OP_N, w->rows, rows, w->cols, &one, plain,
                        CUDA_R_16F, w->cols, x_half, CUDA_R_16F, w->cols, &beta, y, CUDA_R_32F,
                        w->rows, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

// -------------------------------------------------------------------------------------------------
// A layer without its attention (section 3)
//
// What is left of a layer is sums over a row, and work on each number for itself. It is easy to
// miss that these kernels are as slow as memory: each computes a few operations for each number
// that it reads.
// -------------------------------------------------------------------------------------------------

/* Takes a number from each thread of the block, and returns to all of them the sum of these numbers
 * or, with `most`, the largest. First each thread of a warp adds what its partner 16 places away
 * has, then the one 8, 4, 2 and 1 places away: now all 32 have the sum of their warp. (~0u, 32
 * bits, says that all 32 take part.) Then each thread adds the sums of the warps. */
static __device__ float join_block(float mine, bool most) {
    __shared__ float part[THREADS / WARP];
    for (int distance = WARP / 2; distance; distance /= 2) {
        float other = __shfl_xor_sync(~0u, mine, distance);
        mine = most ? fmaxf(mine, other) : mine + other;
    }
    __syncthreads(); /* An earlier call's parts have been read. */
    if (threadIdx.x % WARP == 0)
        part[threadIdx.x / WARP] = mine;
    __syncthreads();
    float all = part[0];
    for (int warp = 1; warp < THREADS / WARP; warp++)
        all = most ? fmaxf(all, part[warp]) : all + part[warp];
    return all;
}

/* Computes the norm of rows (rows, n); a block each. A faster one reads a row once, into registers:
 * layernorm_kernel. */
static __global__ void norm_kernel(float *y, const float *x, const half *gain, const half *bias,
                                   int n) {
    size_t row = (size_t)blockIdx.x * n;
    float sum = 0, squares = 0;
    for (int c = threadIdx.x; c < n; c += THREADS)
        sum += x[row + c];
    float mean = join_block(sum, false) / n;
    for (int c = threadIdx.x; c < n; c += THREADS)
        squares += (x[row + c] - mean) * (x[row + c] - mean);
    float var = join_block(squares, false) / n;
    for (int c = threadIdx.x; c < n; c += THREADS)
        y[row + c] = (x[row + c] - mean) / sqrtf(var + 1e-5f) * __half2float(gain[c]) +
                     __half2float(bias[c]);
}

/* Computes y = bias, or y += bias, for y (n / cols, cols); a thread a number. A faster one leaves
 * this to the product: cuBLASLt adds a bias while it writes y. */
static __global__ void bias_kernel(float *y, const half *bias, size_t n, int cols, bool add) {
    size_t e = number();
    if (e < n)
        y[e] = __half2float(bias[e % cols]) + (add ? y[e] : 0);
}

/* Replaces negative numbers by 0; a thread a number. cuBLASLt can do this in the product, too. */
static __global__ void relu_kernel(float *x, size_t n) {
    size_t e = number();
    if (e < n)
        x[e] = x[e] < 0 ? 0 : x[e];
}

/* Rounds numbers to F16 and keeps them as floats; a thread a number. In flexgen.cu they are F16
 * from the product on. */
static __global__ void round_kernel(float *x, size_t n) {
    size_t e = number();
    if (e < n)
        x[e] = __half2float(__float2half(x[e]));
}

void layernorm(float *y, const float *x, Weight *w, int rows) {
    const half *gain = (half *)weight_at(w), *bias = (half *)weight_at(w + 1);
    LAUNCH(norm_kernel, rows, y, x, gain, bias, h1);
}

void linear(float *y, const float *x, Weight *w, size_t rows, bool add) {
    const half *bias = (half *)weight_at(w + 1);
    size_t n = rows * w->rows;
    LAUNCH(bias_kernel, blocks_of(n), y, bias, n, w->rows, add);
    multiply(y, x, w, rows, 1);
}

void relu(float *x, size_t n) { LAUNCH(relu_kernel, blocks_of(n), x, n); }

void round_to_f16(float *x, size_t n) { LAUNCH(round_kernel, blocks_of(n), x, n); }

// -------------------------------------------------------------------------------------------------
// Cache and attention (section 3, 5)
//
// Attention in decoding reads each number of the cache once and uses it once (sparse attention
// reads k twice, and v of few tokens). So it is as slow as memory, too, and slower with each token.
// A block takes one head of one row. It goes through the tokens in tiles of THREADS. First each
// thread makes the score of one token. Then thread d sums the tile's values for number d of the
// head, and in a larger head for number d + THREADS, too; threads without a number are idle.
//
// The weights of a softmax depend on the largest score of all, which nobody knows before the end.
// Online softmax uses the largest one so far, and shrinks what was summed whenever a larger one
// comes. So a block needs memory for one tile, however long the text: 528 bytes, which are 128
// weights and the 4 sums of join_block().
//
// Attention that is delegated stays mini.c's, and the CPU computes it while the GPU attends for the
// other sequences: attend() waits for no stream.
//
// Shared memory has 32 banks of 4 bytes: float n is in bank n % 32. When threads of a warp ask for
// different words of one bank, they are served one after the other: a bank conflict. There is none
// here, since neighbours write neighbouring weights, and all threads read the same weight at once.
// weight[32 * threadIdx.x] would have one.
//
// It is easy to miss that at one time the threads of a warp read one number each of 32 keys, which
// lie a whole row of nh heads apart. Memory gives at least 32 bytes for each, of which one number
// is used now; the others are used only if the processor's own cache still has them when the next
// ones are asked for.
// -------------------------------------------------------------------------------------------------

enum Form { FLOATS, HALVES, GROUPS }; /* of numbers in memory */

/* Packs heads of hd numbers; a thread each. A faster one gives a group a warp, whose threads find
 * the least and the largest number together: flexgen.cu's pack_kernel. */
static __global__ void pack_kernel(uint8_t *to, const float *x, size_t heads, int hd, int bytes) {
    size_t head = number();
    if (head >= heads)
        return;
    to += head * bytes;
    x += head * hd;
    for (int left = hd; left > 0; left -= GROUP, x += GROUP, to += GROUP_BYTES) {
        int n = min(left, (int)GROUP);
        float least = x[0], most = x[0];
        for (int e = 1; e < n; e++) {
            least = fminf(least, x[e]);
            most = fmaxf(most, x[e]);
        }
        half *min_scale = (half *)to, scale = __float2half((most - least) / 15);
        if (__half2float(scale) < (most - least) / 15)
            ++*(f16 *)&scale; /* the next F16: code 15 reaches the largest number */
        min_scale[0] = __float2half(least);
        min_scale[1] = scale;
        float kept = __half2float(scale);
        for (int e = 0; e < n; e++) {
            int code = kept > 0 ? fminf(15, rintf((x[e] - least) * (1 / kept))) : 0;
            uint8_t *byte = to + 4 + e / 32 * 16 + e % 16;
            *byte = e % 32 < 16 ? code : *byte | code << 4;
        }
    }
}

void keep_rows(uint8_t *to, const float *x, int rows) {
    size_t n = (size_t)rows * h1, heads = (size_t)rows * nh;
    if (policy.compress_cache)
        LAUNCH(pack_kernel, blocks_of(heads), to, x, heads, hd, (int)(kv_row / nh));
    else
        LAUNCH(narrow_kernel, blocks_of(n), (half *)to, x, n);
}

/* Returns number d of a head, which begins at `at`. */
static __device__ float number_at(const uint8_t *at, Form form, int d) {
    if (form == FLOATS)
        return ((const float *)at)[d];
    if (form == HALVES)
        return __half2float(((const half *)at)[d]);
    const uint8_t *group = at + d / GROUP * GROUP_BYTES;
    int e = d % GROUP, code = group[4 + e / 32 * 16 + e % 16] >> e % 32 / 16 * 4 & 15;
    return __half2float(((const half *)group)[0]) + __half2float(((const half *)group)[1]) * code;
}

/* Returns the score of a token: a head's query times its key, over sqrt(hd). */
static __device__ float score_of(const float *query, const uint8_t *key, Form form, int hd) {
    float dot = 0;
    for (int d = 0; d < hd; d++)
        dot += query[d] * number_at(key, form, d);
    return dot / sqrtf(hd);
}

/* Writes the scores (nh, len) of one row; grid (blocks_of(len), nh), a thread a token. k is
 * (len, nh, head_bytes). */
static __global__ void score_kernel(float *score, const float *x_q, const uint8_t *k, Form form,
                                    int head_bytes, int len, int hd) {
    int t = number(), head = blockIdx.y, heads = gridDim.y;
    const uint8_t *key = k + ((size_t)t * heads + head) * head_bytes;
    if (t < len)
        score[head * len + t] = score_of(x_q + head * hd, key, form, hd);
}

/* Keeps the newest token, and of those before it the `top` with the largest scores, of equal ones
 * the earlier; grid (blocks_of(len), nh), a thread a token. A faster one does not compare each with
 * each, but finds the least score that is kept by bisection: flexgen.cu's select_kernel. */
static __global__ void keep_kernel(bool *kept, const float *score, int len, int top) {
    int t = number(), head = blockIdx.y, better = 0;
    score += head * len;
    if (t >= len)
        return;
    for (int u = 0; u < len - 1; u++)
        better += (score[u] > score[t]) | ((score[u] == score[t]) & (u < t));
    kept[head * len + t] = t == len - 1 || better < top;
}

/* Computes o = softmax(x_q k^T / sqrt(hd)) v for rows (rows, nh, hd); row r sees first + r tokens.
 * The grid is (nh, rows), a block for a head of a row. k and v are (tokens, nh, head_bytes); kept
 * (nh, tokens) is true for the tokens whose v is read; if it is NULL, every v is read. As in
 * mini.c, the weights that are kept are shares of all tokens, and do not sum to 1. A faster one
 * lets many blocks share the tokens of a long text, attend_kernel of flexgen.cu, and in prefill
 * uses tensor cores: attend_prefill_kernel. */
static __global__ void attend_kernel(float *o, const float *x_q, const uint8_t *k, const uint8_t *v,
                                     Form form, int head_bytes, int first, int hd,
                                     const bool *kept) {
    __shared__ float weight[THREADS];
    int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, len = first + row;
    size_t element = ((size_t)row * heads + head) * hd, stride = (size_t)heads * head_bytes;
    float most = -INFINITY, sum = 0;
    o += element;
    x_q += element;
    k += head * head_bytes;
    v += head * head_bytes;
    for (int begin = 0; begin < len; begin += THREADS) {
        int t = begin + threadIdx.x, n = min(len - begin, (int)THREADS);
        float score = t < len ? score_of(x_q, k + t * stride, form, hd) : -INFINITY;
        float largest = fmaxf(most, join_block(score, true));
        float shrink = expf(most - largest), mine = expf(score - largest);
        bool is_left_out = kept && t < len && !kept[head * len + t];
        most = largest;
        sum = sum * shrink + join_block(mine, false);
        weight[threadIdx.x] = is_left_out ? 0 : mine;
        __syncthreads(); /* All weights are there. */
        for (int d = threadIdx.x; d < hd; d += THREADS) {
            float all = begin ? o[d] * shrink : 0;
            for (int u = 0; u < n; u++)
                if (weight[u] > 0)
                    all += weight[u] * number_at(v + (begin + u) * stride, form, d);
            o[d] = all;
        } /* The next join_block() waits until all threads have read the weights. */
    }
    for (int d = threadIdx.x; d < hd; d += THREADS)
        o[d] /= sum;
}

/* Posts the attention of the sequences that are not delegated, one after the other. In prefill it
 * reads the floats that were just computed, in decoding the cache. */
void attend_on_gpu(Sequence *begin, Sequence *end) {
    int i = doing.at.i;
    for (Sequence *q = begin; q < end; q++) {
        size_t element = q->row * h1;
        uint8_t *k = (uint8_t *)(x_K + element), *v = (uint8_t *)(x_V + element);
        float *o = attended + element, *x = x_Q + element;
        int rows = rows_of(q, i), head_bytes = i ? kv_row / nh : hd * sizeof(float);
        int len = q->s + i, first = i ? len : 1;
        Form form = !i ? FLOATS : policy.compress_cache ? GROUPS : HALVES;
        bool *kept = i && is_sparse() ? is_kept : NULL;
        dim3 tokens(blocks_of(len), nh);
        if (!rows || is_delegated(q, i))
            continue;
        if (i) {
            k = kv_near(q, doing.at, 0, 0).at;
            v = kv_near(q, doing.at, 0, 1).at;
        }
        if (kept) {
            LAUNCH(score_kernel, tokens, scores, x, k, form, head_bytes, len, hd);
            LAUNCH(keep_kernel, tokens, kept, scores, len, sparse_top(len));
        }
        LAUNCH(attend_kernel, dim3(nh, rows), o, x, k, v, form, head_bytes, first, hd, kept);
    }
}

// -------------------------------------------------------------------------------------------------
// The first and the last step of a token (section 3)
//
// Token ids are the CPU's, and the GPU needs them to find rows of a table; its choice goes back the
// same way. CUDA lets kernels use pinned memory by its address, so embed_kernel reads `ids` and
// choose_kernel writes it where it is, over the link, and no copy is asked for. It is easy to miss
// that the CPU may read `ids` only after await(). Without delegation the main thread needs numbers
// that the GPU has computed only here: its other waits keep the order.
// -------------------------------------------------------------------------------------------------

/* Computes x = token's row + position's row, for x (rows, n); a block a row. flexgen.cu's
 * embed_kernel reads eight numbers at a time. */
static __global__ void embed_kernel(float *x, const half *tokens, const half *places, const int *id,
                                    int n) {
    size_t row = blockIdx.x, from = (size_t)id[row] * n;
    for (int c = threadIdx.x; c < n; c += THREADS)
        x[row * n + c] = __half2float(tokens[from + c]) + __half2float(places[row * n + c]);
}

void embed(Sequence *q, float *x) {
    int i = doing.at.i, rows = rows_of(q, i), first = i ? q->s + i - 1 : 0;
    const half *tokens = (half *)outside[TOKENS].rest.at;
    const half *places = (half *)outside[POSITIONS].rest.at + (first + 2) * (size_t)h1;
    memcpy(ids + q->row, q->token + first, rows * sizeof(int));
    LAUNCH(embed_kernel, rows, x, tokens, places, ids + q->row, h1);
}

/* Finds the largest of n logits, and of equal ones the first, for logits (rows, n); a block a row.
 * A faster one would give a row many blocks; flexgen.cu's pick_kernel gives it one, too, but does
 * not leave the end to one thread. */
static __global__ void choose_kernel(int *best, const float *logits, int n) {
    __shared__ float value[THREADS];
    __shared__ int place[THREADS];
    const float *logit = logits + (size_t)blockIdx.x * n;
    int mine = 0;
    for (int t = threadIdx.x; t < n; t += THREADS)
        if (logit[t] > logit[mine] || t == (int)threadIdx.x)
            mine = t; /* A thread's first token is taken as it is. */
    value[threadIdx.x] = logit[mine];
    place[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x)
        return;
    int of = 0;
    for (int t = 1; t < THREADS; t++)
        if (value[t] > value[of] || (value[t] == value[of] && place[t] < place[of]))
            of = t;
    best[blockIdx.x] = place[of];
}

void choose_tokens(Sequence *begin, Sequence *end, float *x) {
    int n = 0;
    for (Sequence *q = begin; q < end; q++)
        if (!q->ended) {
            size_t last = q->row + rows_of(q, doing.at.i) - 1;
            layernorm(attended + (size_t)n * h1, x + last * h1, &outside[LAST_NORM], 1);
            n++;
        }
    multiply(logits, attended, &outside[TOKENS], n, 0);
    LAUNCH(choose_kernel, n, ids, logits, vocab);
    await();
    n = 0;
    for (Sequence *q = begin; q < end; q++)
        if (!q->ended)
            q->token[q->s + q->generated++] = ids[n++];
}

// -------------------------------------------------------------------------------------------------
// What is measured at the start (4.3)
//
// The policy search needs this machine's constants. The CPU's clock measures a copy each way and a
// product, from the call until the stream is done, each twice, since the first time also loads code
// and touches memory. It is easy to miss that the CPU's and the disk's constants stay guesses;
// cost/profile.c measures them for the engine.
// -------------------------------------------------------------------------------------------------

enum { SIDE = 2048, MEASURED = SIDE * SIDE * 8 }; /* bytes: two matrices of F16, one of floats */

/* Returns the bytes a second of a copy. */
static double copy_rate(void *to, const void *from) {
    double start = 0;
    for (int time = 0; time < 2; time++) {
        start = now();
        post_copy(to, from, MEASURED);
        CUDA(cudaStreamSynchronize(stream()));
    }
    return MEASURED / (now() - start);
}

/* Doubles the side of a product until it takes a millisecond or has SIDE rows, and returns the
 * operations a second of the last one. */
static double product_rate(half *at) {
    const float one = 1, none = 0;
    half *b = at + SIDE * SIDE;
    float *c = (float *)(b + SIDE * SIDE);
    double rate = 0, seconds = 0;
    for (int n = SIDE / 16; n <= SIDE && seconds < 1e-3; n *= 2)
        for (int time = 0; time < 2; time++) {
            double start = now();
            CUBLAS(cublasGemmEx(cublas, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, at, CUDA_R_16F, n,
                                b, CUDA_R_16F, n, &none, c, CUDA_R_32F, n, CUBLAS_COMPUTE_32F,
                                CUBLAS_GEMM_DEFAULT));
            CUDA(cudaStreamSynchronize(stream()));
            seconds = now() - start;
            rate = 2. * n * n * n / seconds;
        }
    return rate;
}

/* Begins to use the GPU, and writes its constants. */
void measure_gpu(double *constants) {
    enum { ATTENDS = 10 }; /* A guess: attend_kernel is so many times slower than a product. */
    int count = 0;
    size_t available, whole;
    void *there, *here;
    cudaError_t found = cudaGetDeviceCount(&count);
    if (found || !count)
        die(1, "no GPU: %s; install NVIDIA's driver, or compile mini.c alone, without -DGPU",
            cudaGetErrorString(found));
    CUBLAS(cublasCreate(&cublas));
    CUBLAS(cublasSetStream(cublas, stream()));
    CUDA(cudaMemGetInfo(&available, &whole));
    CUDA(cudaMalloc(&there, MEASURED));
    CUDA(cudaHostAlloc(&here, MEASURED, cudaHostAllocDefault));
    memset(here, 0, MEASURED);
    constants[GMEM] = .9 * available; /* cuBLAS takes some more. */
    constants[CTOG_BDW] = copy_rate(there, here);
    constants[GTOC_BDW] = copy_rate(here, there);
    constants[MM_FLOPS] = product_rate((half *)there);
    constants[BMM_FLOPS] = constants[MM_FLOPS] / ATTENDS;
    CUDA(cudaFree(there));
    CUDA(cudaFreeHost(here));
}
