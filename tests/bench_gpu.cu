/* bench_gpu.cu: measures what this machine's GPU can do at best, for scripts/gpu_check.sh to put beside what flexgen does,
 * and what flexgen's own kernels do by themselves. Prints a line "name value" for each figure, a median. Its arguments
 * choose parts; without any it measures all of these:
 *
 * copies, in 1e9 bytes a second:
 *   h2d d2h             from host to device, and back
 *   both                the two together, in sum
 *   d2d                 read and written within the GPU's memory
 * products, through cublasLt, in 1e9 FLOP a second:
 *   gemm_large          8192 x 8192 x 8192
 *   gemm_prefill        the first matrix of OPT-6.7B's mlp on 4096 tokens
 * kernels, at OPT-30B's shapes, whose bound is d2d (a read alone may be faster: d2d writes as much as it reads):
 *   packed_M_N_K        1e9 bytes a second of packed weights read by M rows times (N, K)
 *   blas_M_N_K          the same of fp16 weights, as flexgen asks cublasLt
 *   attend_B_S          1e9 bytes a second of fp16 K and V, B sequences of S tokens; attend4_B_S: of 4 bits
 *   attend_prefill_B_S  1e9 FLOP a second, B prompts of S tokens
 *   layernorm_M unpack  1e9 bytes a second, read and written
 *   pick_greedy         microseconds for 64 rows of 50,272 logits
 * waits, in microseconds:
 *   launch              an empty kernel behind others
 *   launch_graph        the same in a graph of 32
 *   launch_mark         the same with a mark behind each, without a time
 *   launch_timed        the same between two marks with a time
 *   sync_sleep sync_poll    from posting an empty kernel to knowing that it is over
 *   copy_64k            a copy of 64 KB up
 *   copy_64k_16m copy_64k_4m    the same beside copies of 256 MB in parts of so many MiB
 *   pieces_16m pieces_4m        1e9 bytes a second of those copies
 *   register            milliseconds for a GB of memory that is there already
 *
 * All data are random: on zeros a GPU draws less power and is faster than it will ever be. */
#include <cublasLt.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "device/parts.h"
extern "C" void host_run(const Op *op); /* parts.h has it for C alone; ops.h calls it */
#include "ops.h"

enum { RUNS = 9, COPIES = 4, ALGORITHMS = 8, WEIGHTS = 4 };
static const size_t LINK = (size_t)256 << 20, MEMORY = (size_t)1 << 30, WORKSPACE = (size_t)32 << 20;

static void die(const char *why) {
    fprintf(stderr, "bench_gpu: %s\n", why);
    exit(1);
}

static const char *text_of(cudaError_t e) { return e == cudaSuccess ? NULL : cudaGetErrorString(e); }
static const char *text_of(cublasStatus_t s) { return s == CUBLAS_STATUS_SUCCESS ? NULL : cublasLtGetStatusString(s); }

/* Ends the program if a call of the CUDA runtime or of cublasLt has failed. */
#define CHECKED(call)                                                               \
    do {                                                                            \
        const char *why_ = text_of(call);                                           \
        if (why_) die((std::to_string(__LINE__) + ": " #call ": " + why_).c_str()); \
    } while (0)

/* Returns the median of what once() returns in RUNS calls, behind one that warms up. */
template <class Once>
static double median_of(Once once) {
    std::vector<double> results;
    for (int r = -1; r < RUNS; r++) {
        const double result = once();
        if (r >= 0) results.push_back(result);
    }
    return median(results.data(), RUNS);
}

/* Returns the seconds between two events, both past. */
static double between(cudaEvent_t begin, cudaEvent_t end) {
    float ms;
    CHECKED(cudaEventElapsedTime(&ms, begin, end));
    return ms / 1e3;
}

/* Fills x with numbers that are uniform in [-1, 1) * scale. */
static __global__ void fill_kernel(half *x, size_t n, uint32_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ seed;
        h = (h ^ h >> 16) * 0x85ebca6bu;
        h = (h ^ h >> 13) * 0xc2b2ae35u;
        x[i] = __float2half((int32_t)(h ^ h >> 16) * scale / 2147483648.f);
    }
}

static std::vector<void *> rooms; /* what device_memory has returned; free_rooms frees it */

/* Returns n numbers, each array of others. */
template <class T = half>
static T *device_memory(size_t n, float scale = 1) {
    void *p;
    CHECKED(cudaMalloc(&p, n * sizeof(T)));
    rooms.push_back(p);
    fill_kernel<<<1024, 256>>>((half *)p, n * sizeof(T) / sizeof(half), (uint32_t)rooms.size(), scale);
    CHECKED(cudaGetLastError());
    CHECKED(cudaDeviceSynchronize());
    return (T *)p;
}

/* Returns a copy of n numbers on the GPU. */
template <class T>
static T *on_gpu(const std::vector<T> &numbers) {
    T *p = device_memory<T>(numbers.size());
    CHECKED(cudaMemcpy(p, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

static void free_rooms(void) {
    for (void *p : rooms) CHECKED(cudaFree(p));
    rooms.clear();
}

static char *pinned_memory(size_t bytes, const void *from) {
    char *p;
    CHECKED(cudaMallocHost(&p, bytes));
    CHECKED(cudaMemcpy(p, from, bytes, cudaMemcpyDeviceToHost));
    return p;
}

// ---- Copies ---------------------------------------------------------------------------------------------------------

/* Returns the bytes a second of copies (to, from) of `bytes` that start at once, COPIES times each, all together. */
static double copy_rate(const std::vector<std::pair<char *, const char *>> &copies, size_t bytes) {
    cudaEvent_t begin;
    std::vector<cudaStream_t> stream(copies.size());
    std::vector<cudaEvent_t> end(copies.size());
    CHECKED(cudaEventCreate(&begin));
    for (cudaStream_t &s : stream) CHECKED(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (cudaEvent_t &e : end) CHECKED(cudaEventCreate(&e));
    return median_of([&] {
        CHECKED(cudaDeviceSynchronize());
        CHECKED(cudaEventRecord(begin, stream[0]));
        for (cudaStream_t s : stream) CHECKED(cudaStreamWaitEvent(s, begin, 0));
        for (int i = 0; i < COPIES; i++)
            for (size_t c = 0; c < copies.size(); c++)
                CHECKED(cudaMemcpyAsync(copies[c].first, copies[c].second, bytes, cudaMemcpyDefault, stream[c]));
        for (size_t c = 0; c < copies.size(); c++) CHECKED(cudaEventRecord(end[c], stream[c]));
        CHECKED(cudaDeviceSynchronize());
        double longest = 0;
        for (cudaEvent_t e : end) longest = std::max(longest, between(begin, e));
        return copies.size() * COPIES * (double)bytes / longest;
    });
}

static void print_copies(void) {
    char *a = device_memory<char>(MEMORY), *b = device_memory<char>(MEMORY);
    char *up = pinned_memory(LINK, a), *down = pinned_memory(LINK, b);
    printf("h2d %.2f\n", copy_rate({{a, up}}, LINK) / 1e9);
    printf("d2h %.2f\n", copy_rate({{down, b}}, LINK) / 1e9);
    printf("both %.2f\n", copy_rate({{a, up}, {down, b}}, LINK) / 1e9);
    printf("d2d %.1f\n", 2 * copy_rate({{a, b}}, MEMORY) / 1e9);
    CHECKED(cudaFreeHost(up));
    CHECKED(cudaFreeHost(down));
    free_rooms();
}

// ---- Matrix products ------------------------------------------------------------------------------------------------

/* Describes a matrix of fp16, column by column, as cublasLt sees it. */
static cublasLtMatrixLayout_t layout(int rows, int cols) {
    cublasLtMatrixLayout_t l;
    CHECKED(cublasLtMatrixLayoutCreate(&l, CUDA_R_16F, rows, cols, rows));
    return l;
}

/* Prints the 1e9 FLOP a second of y = x w^T with x (m, k), w (n, k), y (m, n), row by row, which to cublasLt is y^T = w
 * x^T, by the fastest of the algorithms that it proposes. */
static void print_product(const char *name, int m, int n, int k) {
    half *w = device_memory((size_t)n * k, 0.05f), *x = device_memory((size_t)m * k), *y = device_memory((size_t)m * n);
    char *workspace = device_memory<char>(WORKSPACE);
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t product;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[ALGORITHMS];
    cublasLtMatrixLayout_t lw = layout(k, n), lx = layout(k, m), ly = layout(n, m);
    cublasOperation_t transposed = CUBLAS_OP_T;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; /* as flexgen.cu asks */
    cudaEvent_t begin, end;
    float one = 1, zero = 0;
    int nfound;
    CHECKED(cublasLtCreate(&handle));
    CHECKED(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CHECKED(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    CHECKED(cublasLtMatmulPreferenceCreate(&preference));
    CHECKED(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE,
                                                 sizeof WORKSPACE));
    CHECKED(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                                 sizeof reduction));
    CHECKED(cublasLtMatmulAlgoGetHeuristic(handle, product, lw, lx, ly, ly, preference, ALGORITHMS, found, &nfound));
    CHECKED(cudaEventCreate(&begin));
    CHECKED(cudaEventCreate(&end));
    double least = INFINITY;
    for (int a = 0; a < nfound; a++) {
        if (found[a].state != CUBLAS_STATUS_SUCCESS) continue;
        least = std::min(least, median_of([&] {
                             CHECKED(cudaEventRecord(begin));
                             CHECKED(cublasLtMatmul(handle, product, &one, w, lw, x, lx, &zero, y, ly, y, ly,
                                                    &found[a].algo, workspace, WORKSPACE, 0));
                             CHECKED(cudaEventRecord(end));
                             CHECKED(cudaEventSynchronize(end));
                             return between(begin, end);
                         }));
    }
    printf("%s %.1f\n", name, 2.0 * m * n * k / least / 1e9); /* 0 where cublasLt knows no algorithm */
    CHECKED(cublasLtDestroy(handle));
    free_rooms();
}

static void print_products(void) {
    print_product("gemm_large", 8192, 8192, 8192);
    print_product("gemm_prefill", 4096, 16384, 4096);
}

// ---- flexgen's kernels ----------------------------------------------------------------------------------------------

static Gpu *gpu;
enum { H1 = 7168, H2 = 4 * H1, HEADS = 56, VOCAB = 50272, TIMES = 32 };

/* Returns true if the GPU has so many bytes left; otherwise says that `name` does not fit. */
static bool has_room(const char *name, size_t bytes) {
    size_t available = 0, total;
    CHECKED(cudaMemGetInfo(&available, &total));
    if (bytes + MEMORY > available) fprintf(stderr, "bench_gpu: %s does not fit this GPU\n", name);
    return bytes + MEMORY <= available;
}

/* Returns the median seconds of the ops that make(i) makes, posted on PROJECT. i counts up, for other memory each time. */
template <class Make>
static double seconds_of(Make make) {
    return median_of([&] {
        Error err;
        int status = gpu->call->begin(gpu, PROJECT, 0, &err);
        for (int i = 0; i < TIMES && !status; i++) {
            const Op op = make(i);
            status = gpu->call->run(gpu, &op, &err);
        }
        if (status || gpu->call->end(gpu, PROJECT, 0, true, &err) || gpu->call->sync(gpu, PROJECT, 0, &err)) die(err.text);
        return gpu->call->took(gpu, PROJECT, 0, 0) / TIMES;
    });
}

static void print_linear(int m, int n, int k, bool packed) {
    const size_t each = packed ? quant_matrix_bytes(n, k) : (size_t)n * k * sizeof(half);
    char name[64];
    snprintf(name, sizeof name, "%s_%d_%d_%d", packed ? "packed" : "blas", m, n, k);
    if (!has_room(name, WEIGHTS * each)) return;
    const char *w = device_memory<char>(WEIGHTS * each, 0.05f);
    half *x = device_memory((size_t)m * k), *y = device_memory((size_t)m * n);
    const double s = seconds_of([&](int i) {
        return product(F16, y, F16, n, x, w + (size_t)i % WEIGHTS * each, NULL, NULL, packed, false, m, n, k);
    });
    printf("%s %.1f\n", name, each / s / 1e9);
    free_rooms();
}

static void print_attend(int nseq, int len, bool packed) {
    enum { PAGE = 16 };
    const int pages = len / PAGE, hd = H1 / HEADS;
    const size_t row = packed ? HEADS * quant_bytes(hd) : H1 * sizeof(half), bytes = row * len * nseq;
    const int copies = (int)std::max(LINK / bytes, (size_t)1); /* none is met in the cache */
    std::vector<int32_t> table(nseq * pages), lens(nseq, len);
    char name[64];
    snprintf(name, sizeof name, "attend%s_%d_%d", packed ? "4" : "", nseq, len);
    if (!has_room(name, 2 * copies * bytes)) return;
    for (size_t i = 0; i < table.size(); i++) table[i] = (int32_t)(i * 7 % table.size()); /* 7 divides no power of two */
    const int32_t *dealt = on_gpu(table), *len_of = on_gpu(lens);
    const char *k = device_memory<char>(copies * bytes, 0.05f), *v = device_memory<char>(copies * bytes, 0.05f);
    f16 *q = device_memory<f16>((size_t)nseq * H1), *o = device_memory<f16>((size_t)nseq * H1);
    const double s = seconds_of([&](int i) {
        const size_t at = i % copies * bytes;
        return attention(o, F16, q, H1, H1, paged(k + at, v + at, dealt, len_of, nseq, pages, PAGE, H1, HEADS, packed));
    });
    printf("%s %.1f\n", name, 2 * bytes / s / 1e9);
    free_rooms();
}

static void print_attend_prefill(int nseq, int len) {
    std::vector<int32_t> start(nseq + 1);
    for (int i = 0; i <= nseq; i++) start[i] = i * len;
    const int rows = nseq * len;
    f16 *qkv = device_memory<f16>((size_t)rows * 3 * H1), *o = device_memory<f16>((size_t)rows * H1);
    const int32_t *starts = on_gpu(start);
    const double s =
        seconds_of([&](int) { return prefilling(F16, o, qkv, qkv + H1, starts, nseq, rows, H1, HEADS, 3 * H1); });
    printf("attend_prefill_%d_%d %.1f\n", nseq, len, 2. * nseq * len * (len + 1.) * H1 / s / 1e9);
    free_rooms();
}

static void print_pick(void) {
    enum { ROWS = 64 };
    const Sampling greedy = {0, 1, 0, 1, false};
    std::vector<float> logits((size_t)ROWS * VOCAB);
    uint32_t x = 1;
    for (float &l : logits) l = 16.f * (float)((x = x * 1664525u + 1013904223u) >> 8) / (1 << 24); /* an LCG's upper bits */
    int32_t *ids = on_gpu(std::vector<int32_t>(3 * ROWS));
    const float *from = on_gpu(logits);
    const double s = seconds_of([&](int) { return picking(ids, from, ids + ROWS, ids + 2 * ROWS, greedy, ROWS, VOCAB); });
    printf("pick_greedy %.1f\n", s * 1e6);
    free_rooms();
}

static void print_rows(void) {
    const size_t packed = quant_matrix_bytes(H2, H1), plain = (size_t)H2 * H1;
    half *x = device_memory(plain), *y = device_memory(plain);
    for (int rows : {64, 4096}) {
        const double s = seconds_of([&](int) { return norm(F16, y, x, x, x, rows, H1); });
        printf("layernorm_%d %.1f\n", rows, 2. * rows * H1 * sizeof(half) / s / 1e9);
    }
    const Tensor all = tensor_at(y, F16, H2, H1, H1), groups = row_at(x, U8, (int)packed);
    const double s = seconds_of([&](int) { return op_unpack(on_lane(PROJECT), all, groups); });
    printf("unpack %.1f\n", (packed + plain * sizeof(half)) / s / 1e9);
    free_rooms();
}

static void print_kernels(void) {
    static const int shapes[][2] = {{3 * H1, H1}, {H1, H1}, {H2, H1}, {H1, H2}};
    Error err;
    gpu = cuda_open_gpu(&err);
    if (!gpu) die(err.text);
    for (bool packed : {true, false}) /* flexgen's own first */
        for (const int *shape : shapes)
            for (int m : {1, 8, 16, 32, 64}) print_linear(m, shape[0], shape[1], packed);
    for (int len : {512, 2048})
        for (int nseq : {8, 32, 64}) print_attend(nseq, len, true), print_attend(nseq, len, false);
    print_attend_prefill(8, 512);
    print_pick();
    print_rows();
    gpu->close(gpu);
}

// ---- Launches and waits ---------------------------------------------------------------------------------------------

static __global__ void empty_kernel(void) {}

/* Calls once() n times in a row, and returns the median microseconds of one call, by the host's clock. */
template <class Once>
static double microseconds(int n, Once once) {
    return median_of([&] {
        CHECKED(cudaDeviceSynchronize());
        const double begin = seconds_now();
        for (int i = 0; i < n; i++) once();
        CHECKED(cudaDeviceSynchronize());
        return (seconds_now() - begin) / n * 1e6;
    });
}

/* Prints the microseconds of one of 32 launches that are a graph. */
template <class Launch>
static void print_graph(cudaStream_t stream, Launch launch) {
    enum { KERNELS = 32, GRAPHS = 60 };
    cudaGraph_t captured;
    cudaGraphExec_t graph;
    CHECKED(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < KERNELS; i++) launch();
    CHECKED(cudaStreamEndCapture(stream, &captured));
    CHECKED(cudaGraphInstantiateWithFlags(&graph, captured, 0));
    const double us = microseconds(GRAPHS, [&] { CHECKED(cudaGraphLaunch(graph, stream)); });
    printf("launch_graph %.2f\n", us / KERNELS);
    CHECKED(cudaGraphExecDestroy(graph));
    CHECKED(cudaGraphDestroy(captured));
}

static void print_launches(void) {
    enum { MANY = 2000 };
    cudaStream_t stream;
    cudaEvent_t timed[2], mark;
    CHECKED(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (cudaEvent_t &e : timed) CHECKED(cudaEventCreateWithFlags(&e, cudaEventBlockingSync));
    CHECKED(cudaEventCreateWithFlags(&mark, cudaEventBlockingSync | cudaEventDisableTiming));
    const auto launch = [&] {
        empty_kernel<<<1, 32, 0, stream>>>();
        CHECKED(cudaGetLastError());
    };
    const auto marked = [&] {
        launch();
        CHECKED(cudaEventRecord(mark, stream));
    };
    printf("launch %.2f\n", microseconds(MANY, launch));
    print_graph(stream, launch);
    printf("launch_mark %.2f\n", microseconds(MANY, marked));
    printf("launch_timed %.2f\n", microseconds(MANY, [&] {
               CHECKED(cudaEventRecord(timed[0], stream));
               launch();
               CHECKED(cudaEventRecord(timed[1], stream));
           }));
    printf("sync_sleep %.2f\n", microseconds(MANY / 10, [&] {
               marked();
               CHECKED(cudaEventSynchronize(mark));
           }));
    printf("sync_poll %.2f\n", microseconds(MANY / 10, [&] {
               cudaError_t e;
               marked();
               while ((e = cudaEventQuery(mark)) == cudaErrorNotReady) cudaGetLastError();
               CHECKED(e);
           }));
}

/* Prints the microseconds of a small copy that is posted behind a large one in parts, on a stream of its own. part: the
 * bytes of a part; 0: the small copy alone. */
static void print_small_copy(size_t part, char *to, const char *from) {
    enum { SMALL = 64 << 10 };
    cudaStream_t bulk, small;
    cudaEvent_t begin[2], end[2];
    for (cudaStream_t *s : {&bulk, &small}) CHECKED(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking));
    for (cudaEvent_t *e : {&begin[0], &begin[1], &end[0], &end[1]}) CHECKED(cudaEventCreate(e));
    std::vector<double> seconds, rates;
    for (int r = -1; r < RUNS; r++) {
        CHECKED(cudaEventRecord(begin[0], bulk));
        for (size_t at = 0; part && at < LINK; at += part)
            CHECKED(cudaMemcpyAsync(to + at, from + at, part, cudaMemcpyDefault, bulk));
        CHECKED(cudaEventRecord(end[0], bulk));
        CHECKED(cudaEventRecord(begin[1], small));
        CHECKED(cudaMemcpyAsync(to + LINK, from + LINK, SMALL, cudaMemcpyDefault, small));
        CHECKED(cudaEventRecord(end[1], small));
        CHECKED(cudaDeviceSynchronize());
        if (r < 0) continue;
        seconds.push_back(between(begin[1], end[1]));
        rates.push_back(LINK / between(begin[0], end[0]));
    }
    const int mib = (int)(part >> 20);
    if (!part) return (void)printf("copy_64k %.1f\n", median(seconds.data(), RUNS) * 1e6);
    printf("copy_64k_%dm %.1f\n", mib, median(seconds.data(), RUNS) * 1e6);
    printf("pieces_%dm %.2f\n", mib, median(rates.data(), RUNS) / 1e9);
}

static void print_waits(void) {
    const size_t bytes = LINK + (1 << 20);
    print_launches();
    char *plain = device_memory<char>(bytes), *pinned = pinned_memory(bytes, plain);
    for (size_t part : {0, 16, 4}) print_small_copy(part << 20, plain, pinned);
    CHECKED(cudaFreeHost(pinned));
    free_rooms();
    std::vector<char> own(MEMORY, 1);
    const double begin = seconds_now();
    CHECKED(cudaHostRegister(own.data(), MEMORY, cudaHostRegisterDefault));
    printf("register %.1f\n", (seconds_now() - begin) * 1e3 * 1e9 / (double)MEMORY);
    CHECKED(cudaHostUnregister(own.data()));
}

int main(int argc, char **argv) {
    const struct {
        const char *name;
        void (*print)(void);
    } parts[] = {
        {"copies", print_copies}, {"products", print_products}, {"kernels", print_kernels}, {"waits", print_waits}};
    setvbuf(stdout, NULL, _IOLBF, 0); /* what was measured stays when something later is cut off */
    for (int a = 1; a < argc; a++)
        if (std::none_of(std::begin(parts), std::end(parts), [&](const auto &p) { return !strcmp(p.name, argv[a]); })) {
            fprintf(stderr, "bench_gpu: no part %s; there are copies, products, kernels and waits\n", argv[a]);
            exit(2);
        }
    for (const auto &p : parts)
        if (argc < 2 || std::any_of(argv + 1, argv + argc, [&](const char *a) { return !strcmp(p.name, a); })) p.print();
    return 0;
}
