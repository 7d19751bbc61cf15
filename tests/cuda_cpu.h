/* cuda_cpu.h: the CUDA runtime and cuBLASLt on the CPU, to test flexgen.cu where there is no GPU.
 *
 *   sed -E -f tests/cuda2cpp.sed flexgen.cu > x.cpp
 *   g++ -std=c++17 -I. -isystem /usr/local/cuda/include -include tests/cuda_cpu.h -c x.cpp    # the code for sm_80;
 *                                                                    with -D__CUDA_ARCH__=750 that for sm_75
 *   g++ -std=c++17 -I. -isystem /usr/local/cuda/include -c tests/cuda_cpu.cpp                 # once for both
 *
 * Types and prototypes are the toolkit's. Here is what kernels call; the runtime, in place of the toolkit's libraries, is
 * cuda_cpu.cpp. A CUDA thread is a fiber; the fibers of a block share an OS thread and take turns. __shared__ is a static
 * variable of that thread, NaN when a block comes to it first. A stream is a thread with a queue. Device memory is
 * malloc's, NaN at first; the pointers to it are tagged, so that the host cannot follow them, and kernels get them
 * untagged, as arguments and in the views of an op. ThreadSanitizer takes a CUDA thread for a thread, and only barriers,
 * fences, events and syncs order anything: where one is missing it finds a race. Every other block of a kernel then runs on
 * a second OS thread, so it sees races between blocks too. AddressSanitizer checks all bounds, of shared arrays too;
 * kernels then run one at a time. An asynchronous copy into shared memory leaves NaN there until it is waited for. What
 * cudaMemcpy brings to the device from memory that is not pinned arrives only when somebody waits for the default stream or
 * uses it.
 *
 * Environment, read at the start:
 *   CUDA_CPU_STRICT=1              abort on a refused call, a kernel that nobody asked about before its first launch,
 *                                  an asynchronous copy of pageable memory, memory that was written behind its end
 *                                  (seen when it is freed), anything left at exit
 *   CUDA_CPU_ORDER=reverse|random  in which blocks and threads take turns
 *   CUDA_CPU_GBPS=12               the speed of copies between host and device, each way
 *   cuda_cpu_hold                  (a variable, for tests) while it is not 0, no copy on a stream begins, for 10 s at most
 *   cuda_cpu_forbid                (a function, for tests, under AddressSanitizer) makes a touch of memory an error
 *   cuda_cpu_largest               (a variable) the bytes of the largest copy that was posted on a stream
 *   cuda_cpu_shared                (one more) the most dynamic shared memory that a kernel was allowed
 *   cuda_cpu_timed, cuda_cpu_asked (others, which count) events that were recorded with a time; that were asked about
 *   cuda_cpu_launches              (one more) launches of a kernel, a product of cuBLAS or a graph
 *   cuda_cpu_graphs, cuda_cpu_made (two more) launches of graphs; graphs that were made
 * and read when it matters, so that a test can set it before it opens the device:
 *   CUDA_CPU_MEM_MB=2048           device memory
 *   CUDA_CPU_ARCH=80               compute capability
 *   CUDA_CPU_SHARED=101376         shared memory of a block, at most
 *   CUDA_CPU_NO_DEVICE=1|2         no driver, or no GPU
 *   CUDA_CPU_PIN_FAILS=N           cudaHostRegister has no memory for the Nth range
 *   CUDA_CPU_GRAPH_FAILS=N         there is no memory for the Nth graph
 *   CUDA_CPU_LAUNCH_FAILS=N        the Nth launch since the latest cudaGetDeviceCount lacks resources
 *
 * A launch is compared with its kernel's row in results/kernels.md: threads, shared memory, and registers.
 *   It cannot see: races between blocks two apart; threads of a warp that mix up two calls of one function which shuffles;
 * __launch_bounds__; the rounding of tensor cores; what cuBLAS's choice of algorithm changes; speed.
 *   tests/planted.cu has faults that it must find.
 * For g++ 10 or later on x86-64. Read next: flexgen.cu. */
#pragma once
#pragma GCC optimize("no-strict-aliasing") /* CUDA code looks at halfs through uint4 */
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

/* UNSEEN is for the machinery, which runs on all fibers, so that TSan must not judge it. UNCHECKED is for code that needs
 * no check at all: it touches no memory of a kernel, or only what its caller has checked. */
#define CUDA_CPU_UNSEEN __attribute__((no_sanitize("thread")))
#define CUDA_CPU_UNCHECKED __attribute__((no_sanitize("thread", "address", "undefined")))

#ifndef CUDA_CPU_TABLE /* 0: a program has no rows in results/kernels.md, and loads kernels as it needs them */
#define CUDA_CPU_TABLE 1
#endif
#define __launch_bounds__(...)
#define __noinline__
#undef __shared__
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static __constinit /* ASan puts guards around statics, but not around thread-locals */
#else
#define __shared__ static thread_local __constinit
#endif
extern __constinit thread_local uint3 threadIdx, blockIdx;
extern __constinit thread_local dim3 blockDim, gridDim;

namespace cuda_cpu {

__attribute__((format(printf, 2, 3))) void complain(bool fatal, const char *format, ...);

// ---- A block --------------------------------------------------------------------------------------------------------

struct Context { /* a suspended flow of control */
    void *sp;
    char *stack;
    size_t size;
    void *fake_stack, *tsan; /* what the sanitizers keep for it */
};

enum State { READY, AT_BARRIER, AT_WARP_OP, DONE };
enum { MOST_COPIES = 32 };
struct Thread;
typedef void WarpOp(Thread *warp); /* computes the results of all of its threads */

struct Thread { /* a CUDA thread */
    Context context;
    int in_warp;
    State state;
    int line; /* of the barrier or warp operation where it waits */
    WarpOp *op;
    int src; /* the operands and the result of a warp operation */
    uint64_t in, out;
    const uint16_t *row;   /* of matrices in shared memory: the one that this thread has read */
    unsigned *m;           /* and its part of them */
    const uint16_t *a, *b; /* its parts of d += a b */
    float *d;
    struct {
        void *to;
        const void *from; /* null: zeros */
        int group;
    } copy[MOST_COPIES]; /* asynchronous ones that it has not waited for */
    int copies, groups;
    int arrived;    /* in the first thread of a warp: how many are at a warp operation */
    long roundings; /* to halves: how the work of a block is shared */
    int phase;      /* in the first thread of a warp: its syncs so far */
    char sync[2];   /* their addresses stand for these, of which one ends while the next begins */
};
struct Block { /* what this OS thread is running */
    Thread *threads, *cur;
    int n, done, phase;
    bool counted;                /* by atomicInc */
    int position, index, stride; /* of the present pass over the threads */
    Context scheduler;
    const std::function<void()> *kernel;
    const char *name;
    void *shared;
    const void *seen[16]; /* the shared arrays that this block has come to */
    int nseen;
    char start, end, barrier[2]; /* their addresses stand for orderings that TSan is told of */
};
extern __constinit thread_local Block blk;

// ---- What kernels call ----------------------------------------------------------------------------------------------

inline void *dynamic_shared() { return blk.shared; }
/* Fills a shared array with NaN when a block first comes to its declaration. */
void fresh(void *p, size_t n);
void sync_threads(int line);
void sync_warp(int line);
/* A block's fence before it counts itself is for what it has written; one behind that, for what others have. */
void fence();
/* Gives all threads of a warp a mask whose bit l is set where thread l says yes. */
unsigned ballot(int line, unsigned mask, bool yes);
/* Gives `in` to the warp. Returns what thread src gave. */
uint64_t shuffle(int line, unsigned mask, uint64_t in, int src);
template <class T>
T shfl_xor(int line, unsigned mask, T v, int x) {
    uint64_t bits = 0;
    static_assert(sizeof v <= sizeof bits);
    memcpy(&bits, &v, sizeof v);
    bits = shuffle(line, mask, bits, blk.cur->in_warp ^ x);
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* The toolkit's own conversions are right, but slow on a host. These are written without <immintrin.h>, which takes the
 * compiler longer to read than all kernels of mini.cu. */
typedef short Halves __attribute__((vector_size(16)));
typedef float Singles __attribute__((vector_size(16)));
CUDA_CPU_UNSEEN inline float bits_to_float(uint16_t h) {
#ifdef __F16C__
    return __builtin_ia32_vcvtph2ps(Halves{short(h)})[0];
#else
    return __half2float(__half_raw{h});
#endif
}
inline float to_float(half h) { return bits_to_float(__half_raw(h).x); }
CUDA_CPU_UNSEEN inline uint16_t rounded_bits(float f) {
    if (blk.cur) blk.cur->roundings++;
#ifdef __F16C__
    return __builtin_ia32_vcvtps2ph(Singles{f}, 0)[0];
#else
    return __half_raw(::__float2half(f)).x;
#endif
}
inline half to_half(float f) { return __half_raw{rounded_bits(f)}; }
template <class To, class From>
To bit_cast(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float2 to_floats(half2 h) { return {to_float(h.x), to_float(h.y)}; }
inline half2 to_halfs(float a, float b) { return half2(to_half(a), to_half(b)); }
/* Returns a b + c of two halfs each, rounded once. */
uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c);
inline half2 multiply_add2(half2 a, half2 b, half2 c) {
    const uint32_t r = multiply_add_pair(bit_cast<uint32_t>(a), bit_cast<uint32_t>(b), bit_cast<uint32_t>(c));
    return __half2_raw{uint16_t(r), uint16_t(r >> 16)};
}

// ---- Tensor cores and asynchronous copies ---------------------------------------------------------------------------

/* This is what device/tensor_core.h declares, from the tables of the PTX ISA. Each thread reads and writes shared and
 * global memory for itself, for the sanitizers to see; that orders nothing between threads. The registers of all threads of
 * a warp are read and written by the last of them. multiply_add checks their bounds. */

inline void write16(void *to, uint64_t low, uint64_t high) { ((uint64_t *)to)[0] = low, ((uint64_t *)to)[1] = high; }
inline void check_aligned(const void *p, int line) {
    if ((uintptr_t)p % 16) complain(true, "%s, line %d: an address is not a multiple of 16", blk.name, line);
}
void load_matrices(unsigned m[4], const half *row, int line = __builtin_LINE());
void load_transposed(unsigned m[4], const half *row, int line = __builtin_LINE());
void multiply_add(float d[4], const unsigned a[4], const unsigned b[2], int line = __builtin_LINE());
#ifdef __CUDA_ARCH__ /* as on sm_75: a copy on its way has been read, and wait_for_copies writes it if it is given */
struct Copy {
    uint64_t bits[2];
    void *to = nullptr; /* it was never begun */
};
inline Copy copy_async(void *to, const void *from, bool there, int line = __builtin_LINE()) {
    const uint64_t *bits = (const uint64_t *)from;
    check_aligned(to, line), check_aligned(from, line);
    write16(to, ~0ull, ~0ull);
    return {{there ? bits[0] : 0, there ? bits[1] : 0}, to};
}
inline void close_copies() {}
template <int OPEN, int N>
void wait_for_copies(const Copy (&copies)[N]) {
    for (const Copy &copy : copies)
        if (copy.to) write16(copy.to, copy.bits[0], copy.bits[1]);
}
#else
struct Copy {}; /* a copy on its way has nothing here */
/* Writes NaN, since until the wait nothing certain is there. wait_for_copies writes what was asked for. */
inline Copy copy_async(void *to, const void *from, bool there, int line = __builtin_LINE()) {
    Thread *me = blk.cur;
    check_aligned(to, line), check_aligned(from, line);
    if (me->copies == MOST_COPIES) complain(true, "line %d: raise MOST_COPIES", line);
    write16(to, ~0ull, ~0ull);
    me->copy[me->copies++] = {to, there ? from : nullptr, me->groups};
    return {};
}
inline void close_copies() { blk.cur->groups++; }
template <int OPEN, int N>
void wait_for_copies(const Copy (&)[N]) {
    Thread *me = blk.cur;
    int left = 0;
    for (int i = 0; i < me->copies; i++) {
        const auto copy = me->copy[i];
        const uint64_t *from = (const uint64_t *)copy.from;
        if (copy.group < me->groups - OPEN)
            write16(copy.to, from ? from[0] : 0, from ? from[1] : 0);
        else
            me->copy[left++] = copy;
    }
    me->copies = left;
}
#endif
}  // namespace cuda_cpu

#define __syncthreads() cuda_cpu::sync_threads(__LINE__)
#define __syncwarp() cuda_cpu::sync_warp(__LINE__)
#define __shfl_xor_sync(...) cuda_cpu::shfl_xor(__LINE__, __VA_ARGS__)
#define __ballot_sync(...) cuda_cpu::ballot(__LINE__, __VA_ARGS__)
#define __popc(u) __builtin_popcount(u)
#define __half2float(h) cuda_cpu::to_float(h)
#define __float2half(f) cuda_cpu::to_half(f)
#define __half22float2(h) cuda_cpu::to_floats(h)
#define __floats2half2_rn(a, b) cuda_cpu::to_halfs(a, b)
#define __hfma2(a, b, c) cuda_cpu::multiply_add2(a, b, c)
#define __hsub2(a, b) cuda_cpu::multiply_add2(b, cuda_cpu::to_halfs(-1, -1), a)
#define __float2half2_rn(f) cuda_cpu::to_halfs(f, f)
#define __threadfence() cuda_cpu::fence()
using cuda_cpu::Copy, cuda_cpu::copy_async, cuda_cpu::close_copies, cuda_cpu::wait_for_copies;
using cuda_cpu::multiply_add, cuda_cpu::load_matrices, cuda_cpu::load_transposed;
using std::max, std::min;
template <class T>
T __ldcg(const T *p) {
    return *p;
}
template <class T>
void __stwb(T *p, T value) {
    *p = value;
}
CUDA_CPU_UNSEEN inline unsigned atomicInc(unsigned *p, unsigned most) {
    cuda_cpu::blk.counted = true;
    unsigned was = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &was, was >= most ? 0 : was + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    return was;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    uint64_t both = a | (uint64_t)b << 32;
    unsigned bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= unsigned(both >> (select >> 4 * i & 7) * 8 & 255) << 8 * i;
    return bytes;
}
inline int atomicExch(int *p, int v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline unsigned __float_as_uint(float f) { return cuda_cpu::bit_cast<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return cuda_cpu::bit_cast<float>(u); }
inline unsigned and_or(unsigned x, unsigned mask, unsigned bits) { return (x & mask) | bits; }
inline float power_of_2(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}

// ---- Launches -------------------------------------------------------------------------------------------------------

namespace cuda_cpu {

const uintptr_t DEVICE_TAG = uintptr_t(1) << 62; /* makes an address that the CPU refuses */

inline bool is_device(const void *p) { return (uintptr_t)p & DEVICE_TAG; }
template <class T>
T *untag(T *p) {
    return (T *)((uintptr_t)p & ~DEVICE_TAG);
}

/* Returns a pointer as a kernel gets it, untagged. The host's memory must be cudaHostAlloc's, since under WSL 2 a GPU sees
 * what was registered elsewhere. */
void *kernel_pointer(const char *name, const void *p);

/* Returns an argument as a kernel gets it: the argument itself, or the addresses of an op's views. */
template <class T>
T argument(const char *name, T v) {
    if constexpr (std::is_class_v<T>)
        for (auto &view : v.view) view.at = argument(name, view.at);
    if constexpr (std::is_pointer_v<T>) v = (T)kernel_pointer(name, v);
    return v;
}

struct Launch {
    const void *kernel;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
/* Returns the kernel's name; or null when the launch is refused. has_rows: the program's kernels are in results/kernels.md,
 * and are all known before their first launch. */
const char *allowed(const Launch &l, bool has_rows);
/* Posts a launch that is allowed. `call` is what each thread of it does. */
void post(const Launch &l, const char *name, std::function<void()> call);

/* Calls a kernel as one thread does. The tuning for all processors copies the arguments, an op being hundreds of bytes, by
 * instructions; others call memcpy, and a sanitizer looks at every byte of that. */
template <class... P, size_t... I>
__attribute__((target("tune=generic"))) CUDA_CPU_UNCHECKED void call(void (*kernel)(P...), const std::tuple<P...> &values,
                                                                     std::index_sequence<I...>) {
    kernel(std::get<I>(values)...);
}

template <class... P>
auto launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = nullptr) {
    return [=](P... args) {
        const Launch l{(const void *)kernel, grid, block, shared, stream};
        const char *name = allowed(l, CUDA_CPU_TABLE);
        if (!name) return;
        std::tuple<P...> values(argument(name, args)...); /* copied now, as CUDA does */
        post(l, name, [=] { call(kernel, values, std::index_sequence_for<P...>()); });
    };
}
}  // namespace cuda_cpu

/* The toolkit's headers have this function for nvcc only. */
template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, void (*kernel)(P...)) {
    const cudaError_t e = cudaFuncGetAttributes(a, (const void *)kernel);
#ifdef __CUDA_ARCH__
    a->ptxVersion = __CUDA_ARCH__ / 10;
#endif
    return e;
}
