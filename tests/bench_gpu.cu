/* bench_gpu.cu: what this machine's GPU can do at best, for scripts/gpu_check.sh to put beside what flexgen does: copies
 * over the link from and to pinned memory, one way and both ways at once, copies within the GPU's memory, and fp16 matrix
 * products with fp32 sums through cublasLt. Beside them flexgen's own products with packed weights, whose bound is d2d. One
 * "name value" a line, in units of 1e9 a second; medians.
 *
 *   h2d d2h             bytes from host to device, and back
 *   h2d_both d2h_both   the same while the other direction is busy
 *   both                the two together
 *   d2d                 bytes read and written within the GPU's memory
 *   gemm_large          FLOP of 8192 x 8192 x 8192
 *   gemm_prefill        FLOP of the first matrix of OPT-6.7B's mlp on 4096 tokens
 *   gemm_decode         the same on 64 tokens, and gemm_decode_weights: bytes of weights read by it
 *   packed_M_N_K        bytes of packed weights read by M rows times (N, K)
 *
 * Random data throughout: on zeros a GPU draws less power and is faster than it will ever be. */
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "device/device.h"

enum { RUNS = 9, COPIES = 4, ALGORITHMS = 8, WEIGHTS = 4 };
static const size_t LINK = (size_t)256 << 20, MEMORY = (size_t)1 << 30, WORKSPACE = (size_t)32 << 20;

#define CUDA(call)                                                                                            \
    do {                                                                                                      \
        cudaError_t e_ = (call);                                                                              \
        if (e_ != cudaSuccess) {                                                                              \
            fprintf(stderr, "bench_gpu: %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

#define LT(call)                                                                                                   \
    do {                                                                                                           \
        cublasStatus_t s_ = (call);                                                                                \
        if (s_ != CUBLAS_STATUS_SUCCESS) {                                                                         \
            fprintf(stderr, "bench_gpu: %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cublasLtGetStatusString(s_)); \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

/* Seconds between two events, both past. */
static double between(cudaEvent_t begin, cudaEvent_t end) {
    float ms;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    return ms / 1e3;
}

/* Uniform in [-1, 1) * scale. */
static __global__ void fill_kernel(half *x, size_t n, uint32_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ seed;
        h = (h ^ h >> 16) * 0x85ebca6bu;
        h = (h ^ h >> 13) * 0xc2b2ae35u;
        x[i] = __float2half((int32_t)(h ^ h >> 16) * scale / 2147483648.f);
    }
}

static void *device_memory(size_t bytes, uint32_t seed, float scale) {
    void *p;
    CUDA(cudaMalloc(&p, bytes));
    fill_kernel<<<1024, 256>>>((half *)p, bytes / sizeof(half), seed, scale);
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    return p;
}

static void *pinned_memory(size_t bytes, const void *from) {
    void *p;
    CUDA(cudaMallocHost(&p, bytes));
    CUDA(cudaMemcpy(p, from, bytes, cudaMemcpyDeviceToHost));
    return p;
}

// ---------------------------------------------------------------------------------------------------------------
// Copies
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    void *dst;
    const void *src;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} Copy;

/* Starts the n copies of `bytes` at once, COPIES times each; rate[c]: of copy c in its own time, *sum: of all of them. */
static void copy_rates(double *rate, double *sum, Copy *copies, int n, size_t bytes) {
    std::vector<double> one[2], all;
    for (int r = -1; r < RUNS; r++) { /* the first warms up */
        for (int c = 1; c < n; c++) CUDA(cudaStreamSynchronize(copies[c].stream));
        CUDA(cudaEventRecord(copies[0].begin, copies[0].stream));
        for (int c = 1; c < n; c++) {
            CUDA(cudaStreamWaitEvent(copies[c].stream, copies[0].begin, 0));
            CUDA(cudaEventRecord(copies[c].begin, copies[c].stream));
        }
        for (int i = 0; i < COPIES; i++)
            for (int c = 0; c < n; c++)
                CUDA(cudaMemcpyAsync(copies[c].dst, copies[c].src, bytes, cudaMemcpyDefault, copies[c].stream));
        for (int c = 0; c < n; c++) CUDA(cudaEventRecord(copies[c].end, copies[c].stream));
        double longest = 0;
        for (int c = 0; c < n; c++) {
            CUDA(cudaEventSynchronize(copies[c].end));
            longest = std::max(longest, between(copies[0].begin, copies[c].end));
            if (r >= 0) one[c].push_back(COPIES * (double)bytes / between(copies[c].begin, copies[c].end));
        }
        if (r >= 0) all.push_back(n * COPIES * (double)bytes / longest);
    }
    for (int c = 0; c < n; c++) rate[c] = median(one[c]);
    *sum = median(all);
}

static void print_copies(void) {
    void *a = device_memory(MEMORY, 1, 1), *b = device_memory(MEMORY, 2, 1);
    void *up = pinned_memory(LINK, a), *down = pinned_memory(LINK, b);
    Copy copies[2] = {{a, up, 0, 0, 0}, {down, b, 0, 0, 0}};
    double rate[2], sum;
    for (Copy &c : copies) {
        CUDA(cudaStreamCreateWithFlags(&c.stream, cudaStreamNonBlocking));
        CUDA(cudaEventCreate(&c.begin));
        CUDA(cudaEventCreate(&c.end));
    }
    copy_rates(rate, &sum, &copies[0], 1, LINK);
    printf("h2d %.2f\n", rate[0] / 1e9);
    copy_rates(rate, &sum, &copies[1], 1, LINK);
    printf("d2h %.2f\n", rate[0] / 1e9);
    copy_rates(rate, &sum, copies, 2, LINK);
    printf("h2d_both %.2f\nd2h_both %.2f\nboth %.2f\n", rate[0] / 1e9, rate[1] / 1e9, sum / 1e9);
    copies[0].src = b;
    copy_rates(rate, &sum, &copies[0], 1, MEMORY);
    printf("d2d %.1f\n", 2 * rate[0] / 1e9);
    for (Copy &c : copies) {
        CUDA(cudaStreamDestroy(c.stream));
        CUDA(cudaEventDestroy(c.begin));
        CUDA(cudaEventDestroy(c.end));
    }
    CUDA(cudaFreeHost(up));
    CUDA(cudaFreeHost(down));
    CUDA(cudaFree(a));
    CUDA(cudaFree(b));
}

// ---------------------------------------------------------------------------------------------------------------
// Matrix products
// ---------------------------------------------------------------------------------------------------------------

/* A matrix of fp16, column by column, as cublasLt sees it. */
static cublasLtMatrixLayout_t layout(int rows, int cols) {
    cublasLtMatrixLayout_t l;
    LT(cublasLtMatrixLayoutCreate(&l, CUDA_R_16F, rows, cols, rows));
    return l;
}

/* Products a second of y = x w^T with x (m, k), w (n, k), y (m, n), row by row, which to cublasLt is y^T = w x^T: the
 * fastest of the algorithms it proposes. Each product reads another copy of w, so that none is met in the cache. */
static double product_rate(cublasLtHandle_t handle, int m, int n, int k, int launches) {
    size_t each = (size_t)n * k;
    half *w = (half *)device_memory(WEIGHTS * each * sizeof(half), 3, 0.05f),
         *x = (half *)device_memory((size_t)m * k * sizeof(half), 4, 1),
         *y = (half *)device_memory((size_t)m * n * sizeof(half), 5, 1);
    void *workspace = device_memory(WORKSPACE, 6, 1);
    cublasLtMatmulDesc_t product;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
    cublasLtMatrixLayout_t lw = layout(k, n), lx = layout(k, m), ly = layout(n, m);
    cublasOperation_t transposed = CUBLAS_OP_T;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* as flexgen.cu asks */
    cudaEvent_t begin, end;
    float one = 1, zero = 0;
    int nfound;
    LT(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    LT(cublasLtMatmulPreferenceCreate(&preference));
    LT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE,
                                            sizeof WORKSPACE));
    LT(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                            sizeof reduction));
    LT(cublasLtMatmulAlgoGetHeuristic(handle, product, lw, lx, ly, ly, preference, ALGORITHMS, found, &nfound));
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    double best = 0;
    for (int a = 0; a < nfound; a++) {
        std::vector<double> rates;
        if (found[a].state != CUBLAS_STATUS_SUCCESS) continue;
        for (int r = -1; r < RUNS; r++) {
            CUDA(cudaEventRecord(begin));
            for (int i = 0; i < launches; i++)
                LT(cublasLtMatmul(handle, product, &one, w + (size_t)(i + r + 1) % WEIGHTS * each, lw, x, lx, &zero, y, ly,
                                  y, ly, &found[a].algo, workspace, WORKSPACE, 0));
            CUDA(cudaEventRecord(end));
            CUDA(cudaEventSynchronize(end));
            if (r >= 0) rates.push_back(launches / between(begin, end));
        }
        best = std::max(best, median(rates));
    }
    if (!best) fprintf(stderr, "bench_gpu: cublasLt knows no algorithm for %d x %d x %d\n", m, n, k), exit(1);
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    for (cublasLtMatrixLayout_t l : {lw, lx, ly}) LT(cublasLtMatrixLayoutDestroy(l));
    LT(cublasLtMatmulPreferenceDestroy(preference));
    LT(cublasLtMatmulDescDestroy(product));
    for (void *p : {(void *)w, (void *)x, (void *)y, workspace}) CUDA(cudaFree(p));
    return best;
}

/* Bytes of packed weights that flexgen.cu's product of m rows with w (n, k) reads in a second, each time of another copy.
 */
static double packed_rate(Gpu *gpu, int m, int n, int k) {
    enum { LAUNCHES = 32 };
    const Quant quant = {4, 64};
    const size_t each = quant_matrix_bytes(quant, n, k);
    char *w = (char *)device_memory(WEIGHTS * each, 7, 0.05f);
    Product p = {};
    p.x = device_memory((size_t)m * k * sizeof(half), 8, 1), p.y = device_memory((size_t)m * n * sizeof(half), 9, 1);
    p.y_type = F16, p.y_ld = n, p.quant = quant, p.m = m, p.n = n, p.k = k;
    std::vector<double> rates;
    Error err;
    for (int r = -1; r < RUNS; r++) {
        int status = gpu->begin(gpu, PROJECT, 0, &err);
        for (int i = 0; i < LAUNCHES && !status; i++) {
            p.w = w + (size_t)i % WEIGHTS * each;
            status = gpu->linear(gpu, PROJECT, &p, &err);
        }
        if (status || gpu->end(gpu, PROJECT, 0, &err) || gpu->sync(gpu, PROJECT, 0, &err))
            fprintf(stderr, "bench_gpu: %s\n", err.text), exit(1);
        if (r >= 0) rates.push_back(LAUNCHES * (double)each / gpu->took(gpu, PROJECT, 0, 0));
    }
    for (void *of : {(void *)w, (void *)p.x, p.y}) CUDA(cudaFree(of));
    return median(rates);
}

static void print_packed(void) {
    static const int rows[] = {1, 16, 64}, shapes[][2] = {{8192, 8192}, {7168, 28672}};
    Error err;
    Gpu *gpu = cuda_open_gpu(&err);
    if (!gpu) fprintf(stderr, "bench_gpu: %s\n", err.text), exit(1);
    for (const int *shape : shapes)
        for (int m : rows)
            printf("packed_%d_%d_%d %.1f\n", m, shape[0], shape[1], packed_rate(gpu, m, shape[0], shape[1]) / 1e9);
    gpu->close(gpu);
}

int main(void) {
    const struct {
        const char *name;
        int m, n, k, launches;
    } products[] = {
        {"gemm_large", 8192, 8192, 8192, 1}, {"gemm_prefill", 4096, 16384, 4096, 2}, {"gemm_decode", 64, 16384, 4096, 64}};
    cublasLtHandle_t handle;
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was measured stays when something later is cut off */
    print_copies();
    LT(cublasLtCreate(&handle));
    for (const auto &p : products) {
        double rate = product_rate(handle, p.m, p.n, p.k, p.launches);
        printf("%s %.1f\n", p.name, 2.0 * p.m * p.n * p.k * rate / 1e9);
        if (p.m == 64) printf("%s_weights %.1f\n", p.name, 2.0 * p.n * p.k * rate / 1e9);
    }
    LT(cublasLtDestroy(handle));
    print_packed();
    return 0;
}
