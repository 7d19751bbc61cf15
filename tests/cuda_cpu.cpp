/* cuda_cpu.cpp: the emulated GPU behind cuda_cpu.h, which says what it is: fibers and blocks of them, streams and events,
 * memory, launches, the functions of the CUDA runtime, and cuBLAS. Compiled with the sanitizer of the kernels that it is
 * linked with. */
#include "tests/cuda_cpu.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <pthread.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define CUDA_CPU_ASAN(...) __VA_ARGS__
#else
#define CUDA_CPU_ASAN(...)
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define CUDA_CPU_TSAN(...) __VA_ARGS__
#else
#define CUDA_CPU_TSAN(...)
#endif

__constinit thread_local uint3 threadIdx, blockIdx;
__constinit thread_local dim3 blockDim, gridDim;

namespace cuda_cpu {

static std::string env(const char *name) { return getenv(name) ? getenv(name) : ""; }
static long env_number(const char *name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }
static const struct {
    bool strict = env("CUDA_CPU_STRICT") == "1";
    bool reverse = env("CUDA_CPU_ORDER") == "reverse", random = env("CUDA_CPU_ORDER") == "random";
    double bytes_per_ns = atof(env("CUDA_CPU_GBPS").c_str()); /* 0: no limit */
} settings;

void complain(bool fatal, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "cuda_cpu: %s\n", text);
    if (fatal || settings.strict) abort();
}
static int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ---- Fibers ---------------------------------------------------------------------------------------------------------

extern "C" void cuda_cpu_switch(void **save_sp, void *load_sp);
asm(R"(.text
cuda_cpu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)"); /* only the stack pointer and the registers that a callee saves change */

static CUDA_CPU_UNSEEN void switch_context(Context *from, Context *to) {
    CUDA_CPU_ASAN(__sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->size));
    CUDA_CPU_TSAN(__tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync));
    cuda_cpu_switch(&from->sp, to->sp);
    CUDA_CPU_ASAN(__sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr));
}

// ---- A block --------------------------------------------------------------------------------------------------------

__constinit thread_local Block blk;

/* Returns the next thread that is ready in this pass, or null when the pass is over. */
static CUDA_CPU_UNCHECKED Thread *next_ready() {
    while (++blk.position < blk.n) {
        blk.cur = &blk.threads[blk.index];
        threadIdx.x = blk.index;
        if ((blk.index += blk.stride) >= blk.n) blk.index -= blk.n;
        if (blk.cur->state == READY) return blk.cur;
    }
    return nullptr;
}

static CUDA_CPU_UNSEEN void suspend(State why) {
    Thread *me = blk.cur;
    me->state = why;
    Thread *next = next_ready();
    switch_context(&me->context, next ? &next->context : &blk.scheduler);
}

/* It is not inlined, as the next kernel's OS thread may be another one, whose blk lies elsewhere. */
__attribute__((noinline)) static CUDA_CPU_UNSEEN void run_thread() {
    CUDA_CPU_TSAN(__tsan_acquire(&blk.start));
    (*blk.kernel)();
    CUDA_CPU_TSAN(__tsan_release(&blk.end));
    if (blk.cur->copies) complain(true, "%s: a thread has ended and not waited for its copies", blk.name);
    blk.done++;
    suspend(DONE);
}
static CUDA_CPU_UNSEEN void fiber_main() {
    CUDA_CPU_ASAN(__sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr));
    for (;;) run_thread();
}

static void create_fiber(Context *c) {
    c->size = 64 << 10;
    CUDA_CPU_ASAN(c->size *= 4); /* a sanitizer's report is made on the stack where it happens */
    CUDA_CPU_TSAN(c->size *= 4);
    c->stack = (char *)aligned_alloc(64, c->size);
    if (!c->stack) complain(true, "no memory for fibers");
    /* Stacks begin at different places of their pages, since equal places would share a few lines of the caches. */
    static std::atomic<unsigned> fibers;
    void **top = (void **)(c->stack + c->size - fibers.fetch_add(1, std::memory_order_relaxed) % 16 * 1088);
    std::fill(top - 8, top, nullptr);
    top[-2] = (void *)fiber_main; /* cuda_cpu_switch pops six registers and returns there */
    c->sp = top - 8;
    CUDA_CPU_TSAN(c->tsan = __tsan_create_fiber(0));
}

/* Ends the program, and says where the first thread is, and the first that is elsewhere. */
[[noreturn]] static void report_stuck() {
    static const char *const what[] = {"ready", "waits at __syncthreads", "waits at a warp operation", "has returned"};
    const Thread *t = blk.threads;
    int other = 0;
    while (other < blk.n - 1 && t[other].state == t->state && t[other].line == t->line) other++;
    complain(true, "%s, block (%u,%u,%u) is stuck: thread 0 %s, line %d, thread %d %s, line %d", blk.name, blockIdx.x,
             blockIdx.y, blockIdx.z, what[t->state], t->line, other, what[t[other].state], t[other].line);
    abort();
}

/* Chooses a walk over 0..n-1, modulo n. */
static void choose_order(int n, int *first, int *stride) {
    *first = settings.random ? rand() % n : settings.reverse ? n - 1 : 0;
    *stride = settings.reverse ? n - 1 : 1;
    if (!settings.random) return;
    do *stride = 1 + rand() % n;
    while (std::gcd(*stride, n) != 1);
}

static std::atomic<long> most_roundings; /* the most of one thread in the kernels since this was last asked for */

static CUDA_CPU_UNSEEN void run_block() {
    blk.done = blk.nseen = blk.counted = 0;
    for (int i = 0; i < blk.n; i++) {
        Thread *t = &blk.threads[i];
        t->state = READY, t->in_warp = i % 32, t->line = 0, t->arrived = 0, t->roundings = 0;
    }
    CUDA_CPU_TSAN(__tsan_release(&blk.start));
    while (blk.done < blk.n) {
        choose_order(blk.n, &blk.index, &blk.stride);
        blk.position = -1;
        if (Thread *t = next_ready()) {
            switch_context(&blk.scheduler, &t->context);
            continue;
        }
        for (int i = 0; i < blk.n; i++) /* none is ready: all must wait, and at one barrier */
            if (blk.threads[i].state != AT_BARRIER || blk.threads[i].line != blk.threads[0].line) report_stuck();
        for (int i = 0; i < blk.n; i++) blk.threads[i].state = READY;
        blk.phase++;
    }
    CUDA_CPU_TSAN(__tsan_acquire(&blk.end));
    long most = 0;
    for (int i = 0; i < blk.n; i++) most = std::max(most, blk.threads[i].roundings);
    if (most > most_roundings) most_roundings = most; /* of concurrent kernels either; the grades ask about one alone */
}

/* Fills memory as the device hands it out: NaN in all float types. TSan, for which a memset is slow, need not see it. */
static void poison(void *p, size_t n) { asm volatile("rep stosb" : "+D"(p), "+c"(n) : "a"(0xff) : "memory"); }

// ---- What kernels call ----------------------------------------------------------------------------------------------

CUDA_CPU_UNSEEN void fresh(void *p, size_t n) {
    for (int i = 0; i < blk.nseen; i++)
        if (blk.seen[i] == p) return;
    if (blk.nseen == sizeof blk.seen / sizeof *blk.seen) complain(true, "%s: too many shared arrays", blk.name);
    blk.seen[blk.nseen++] = p;
    poison(p, n);
}

CUDA_CPU_UNSEEN void sync_threads(int line) {
    CUDA_CPU_TSAN(char *edge = &blk.barrier[blk.phase & 1]; __tsan_release(edge));
    blk.cur->line = line;
    suspend(AT_BARRIER);
    CUDA_CPU_TSAN(__tsan_acquire(edge));
}

/* All threads of the warp must come here. The last of them runs op for all, and lets them go. This orders nothing: where
 * TSan shall see an order, it must be told. */
static CUDA_CPU_UNCHECKED void join_warp(WarpOp *op, int line) {
    Thread *me = blk.cur, *warp = me - me->in_warp;
    me->op = op, me->line = line;
    if (++warp->arrived < 32) return suspend(AT_WARP_OP);
    for (int l = 0; l < 32; l++)
        if (warp[l].line != line || warp[l].op != op)
            complain(true, "%s: thread %d of a warp, at line %d, cannot join thread %d, at line %d", blk.name, l,
                     warp[l].line, me->in_warp, line);
    op(warp);
    for (int l = 0; l < 32; l++) warp[l].state = READY;
    warp->arrived = 0;
}

/* Gives `in` to the warp. Returns what op makes of it for this thread. */
static CUDA_CPU_UNCHECKED uint64_t exchange(WarpOp *op, int line, unsigned mask, uint64_t in, int src) {
    Thread *me = blk.cur;
    if (~mask) complain(true, "%s: a warp operation of some threads is not emulated", blk.name);
    me->in = in, me->src = src;
    join_warp(op, line);
    return me->out;
}
static CUDA_CPU_UNCHECKED void deal(Thread *warp) {
    for (int l = 0; l < 32; l++) warp[l].out = warp[warp[l].src].in;
}
static CUDA_CPU_UNCHECKED void vote(Thread *warp) {
    uint64_t all = 0;
    for (int l = 0; l < 32; l++) all |= warp[l].in << l;
    for (int l = 0; l < 32; l++) warp[l].out = all;
}
unsigned ballot(int line, unsigned mask, bool yes) { return unsigned(exchange(vote, line, mask, yes, 0)); }
uint64_t shuffle(int line, unsigned mask, uint64_t in, int src) { return exchange(deal, line, mask, in, src); }

CUDA_CPU_UNSEEN void sync_warp(int line) {
    CUDA_CPU_TSAN(Thread *first = blk.cur - blk.cur->in_warp; char *edge = &first->sync[first->phase++ / 32 & 1];
                  __tsan_release(edge));
    join_warp([](Thread *) {}, line);
    CUDA_CPU_TSAN(__tsan_acquire(edge));
}
CUDA_CPU_UNSEEN void fence() {
    CUDA_CPU_TSAN(static char edge; blk.counted ? __tsan_acquire(&edge) : __tsan_release(&edge));
}

/* The product is exact in a double. It is rounded once, through a float: where the float loses bits of d, its last bit is
 * set, so that the half is not a tie by mistake. Nothing branches, since that would be as good as random. */
#ifdef __F16C__
CUDA_CPU_UNCHECKED uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    const auto widened = [](uint32_t pair) { return _mm_cvtps_pd(_mm_cvtph_ps(_mm_cvtsi32_si128(pair))); };
    const auto low_halves = [](__m128d mask) { return _mm_shuffle_epi32(_mm_castpd_si128(mask), 8); };
    const __m128d d = widened(a) * widened(b) + widened(c), sign = _mm_set1_pd(-0.);
    const __m128 f = _mm_cvtpd_ps(d);
    const __m128d wide = _mm_cvtps_pd(f);
    const __m128d above = _mm_cmpgt_pd(_mm_andnot_pd(sign, wide), _mm_andnot_pd(sign, d));
    const __m128i lost = _mm_srli_epi32(low_halves(_mm_cmp_pd(wide, d, _CMP_NEQ_OQ)), 31);
    const __m128i toward_0 = _mm_add_epi32(_mm_castps_si128(f), low_halves(above));
    if (blk.cur) blk.cur->roundings += 2;
    const __m128 odd = _mm_castsi128_ps(_mm_or_si128(toward_0, lost));
    return _mm_cvtsi128_si32(_mm_cvtps_ph(odd, _MM_FROUND_TO_NEAREST_INT));
}
#else
static CUDA_CPU_UNCHECKED uint16_t multiply_add_bits(uint16_t a, uint16_t b, uint16_t c) {
    const double d = (double)bits_to_float(a) * bits_to_float(b) + bits_to_float(c);
    const float f = (float)d;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits -= fabs(f) > fabs(d);
    bits |= (f != d) & (d == d);
    float odd;
    memcpy(&odd, &bits, sizeof odd);
    return rounded_bits(odd);
}
uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    return multiply_add_bits(a, b, c) | (uint32_t)multiply_add_bits(a >> 16, b >> 16, c >> 16) << 16;
}
#endif

// ---- Tensor cores ---------------------------------------------------------------------------------------------------

typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));

/* Converts n halves, a multiple of eight. */
static CUDA_CPU_UNCHECKED void widen(float *to, const uint16_t *from, int n) {
#ifdef __F16C__
    for (int i = 0; i < n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#else
    for (int i = 0; i < n; i++) to[i] = bits_to_float(from[i]);
#endif
}

/* Computes d += a b for a warp; every sum is in the order of k. A thread's elements lie as in "Matrix Fragments for
 * mma.m16n8k16 with floating point type"; those of d as the first four of a. */
static CUDA_CPU_UNCHECKED void multiply_fragments(Thread *warp) {
    uint32_t pairs[16][8]; /* of a's halves */
    uint16_t bits[16][8];  /* of b */
    float a[16][16];
    union {
        float at[16][8];
        Floats row[16];
    } b, d;
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            const int low = l / 4, pair = l % 4;
            memcpy(&pairs[low + i % 2 * 8][pair + i / 2 * 4], warp[l].a + 2 * i, sizeof **pairs);
            bits[pair * 2 + i % 2 + i / 2 * 8][low] = warp[l].b[i];
            d.at[low + i / 2 * 8][pair * 2 + i % 2] = warp[l].d[i];
        }
    widen(&a[0][0], (const uint16_t *)pairs, 16 * 16), widen(&b.at[0][0], &bits[0][0], 16 * 8);
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++) d.row[r] += a[r][k] * b.row[k];
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) warp[l].d[i] = d.at[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2];
}

/* Does "ldmatrix": thread l has brought row l % 8 of matrix l / 8 and gets from each matrix two elements of row l / 4, or
 * of that row of the transposed matrix. */
template <bool TRANSPOSED>
static CUDA_CPU_UNSEEN void deal_rows(Thread *warp) {
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            int at = l / 4, pair = l % 4 * 2;
            const Thread *matrix = &warp[8 * i];
            unsigned low = TRANSPOSED ? matrix[pair].row[at] : matrix[at].row[pair];
            unsigned high = TRANSPOSED ? matrix[pair + 1].row[at] : matrix[at].row[pair + 1];
            warp[l].m[i] = high << 16 | low;
        }
}
template <bool TRANSPOSED>
static void load_rows(unsigned m[4], const half *p, int line) {
    check_aligned(p, line);
    uint64_t row[2] = {((const uint64_t *)p)[0], ((const uint64_t *)p)[1]}; /* TSan does not see a short memcpy */
    blk.cur->row = (const uint16_t *)row, blk.cur->m = m;
    join_warp(deal_rows<TRANSPOSED>, line);
}
void load_matrices(unsigned m[4], const half *row, int line) { load_rows<false>(m, row, line); }
void load_transposed(unsigned m[4], const half *row, int line) { load_rows<true>(m, row, line); }
CUDA_CPU_UNSEEN void multiply_add(float d[4], const unsigned a[4], const unsigned b[2], int line) {
    CUDA_CPU_ASAN(if (__asan_region_is_poisoned(d, 16) || __asan_region_is_poisoned((void *)a, 16) ||
                      __asan_region_is_poisoned((void *)b, 8))
                      complain(true, "%s, line %d: registers out of bounds", blk.name, line));
    blk.cur->a = (const uint16_t *)a, blk.cur->b = (const uint16_t *)b, blk.cur->d = d;
    join_warp(multiply_fragments, line);
}

// ---- Streams and events ---------------------------------------------------------------------------------------------

/* TSan shall find a missing wait, so nothing here may order more than CUDA does: no lock is common to all host threads but
 * for reading, workers take none, and what only keeps count uses relaxed atomics, which on x86 are fences nevertheless. */

/* A flag that is set once. All that precedes set() comes before all that follows wait(). */
struct Flag {
    int value = 0;

    bool is_set() { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }
    void set() {
        __atomic_store_n(&value, 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
    }
    void wait() {
        while (!is_set()) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, 0, nullptr);
    }
};
/* An element of a stream's queue. */
struct Op {
    std::function<void()> run;
    Op *next = nullptr;
    Flag has_next{};
};
/* One cudaEventRecord. It lives as long as its event: what counted its users would order them for TSan. */
struct Record {
    Flag done;
    int64_t when = 0;
};

enum Kind { NONE, DEVICE, HOST, REGISTERED };
struct Allocation {
    size_t size;
    Kind kind;
};
static std::shared_mutex host; /* guards these, which exist until the very end */
static std::set<cudaStream_t> &streams = *new std::set<cudaStream_t>;
static std::vector<cudaEvent_t> &destroyed = *new std::vector<cudaEvent_t>; /* but kept, since streams may yet set them */
static std::map<uintptr_t, Allocation> &allocations = *new std::map<uintptr_t, Allocation>;
static std::vector<Thread *> &idle = *new std::vector<Thread *>; /* left by streams: fibers are dear in TSan */
static std::pair<size_t, void *> spare; /* the largest device memory that was freed: fresh pages are dear */
static size_t memory_used = 0;
static std::atomic<long> launches, events, graphs;
static std::atomic<bool> pin_failed;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local bool capturing_here; /* this thread captures a graph */

static cudaError_t error(cudaError_t e) { return last_error = e; }
static cublasStatus_t error(cublasStatus_t s) { return s; } /* the library keeps none */
template <class Status>
Status refuse(Status s, const char *where, const char *why) {
    complain(false, "%s: %s", where, why);
    return error(s);
}

/* Refuses what a thread may not do while it captures a graph. */
static bool captures(const char *what) {
    if (capturing_here) complain(false, "%s, while this thread captures a graph", what);
    return capturing_here;
}

static Thread *take_threads() {
    std::lock_guard<std::shared_mutex> guard(host);
    if (idle.empty()) idle.push_back((Thread *)calloc(1024, sizeof(Thread)));
    Thread *t = idle.back();
    if (!t) complain(true, "no memory for threads");
    idle.pop_back();
    return t;
}
}  // namespace cuda_cpu

struct CUstream_st {
    bool quit = false;               /* the worker's */
    std::mutex lock;                 /* of tail */
    cudaGraph_t capturing = nullptr; /* takes what is posted, in place of the queue */
    cuda_cpu::Thread *threads = cuda_cpu::take_threads();
    cuda_cpu::Op *tail = new cuda_cpu::Op;
    std::thread worker{[this, op = tail]() mutable {
        using cuda_cpu::blk;
        blk.threads = threads;
        CUDA_CPU_TSAN(blk.scheduler.tsan = __tsan_get_current_fiber());
        CUDA_CPU_ASAN(pthread_attr_t a; pthread_getattr_np(pthread_self(), &a);
                      pthread_attr_getstack(&a, (void **)&blk.scheduler.stack, &blk.scheduler.size);
                      pthread_attr_destroy(&a));
        while (!quit) {
            op->has_next.wait();
            delete std::exchange(op, op->next);
            op->run();
        }
        delete op;
    }};

    void submit(std::function<void()> f);
    void queue(std::function<void()> f) {
        std::lock_guard<std::mutex> guard(lock);
        cuda_cpu::Op *last = std::exchange(tail, new cuda_cpu::Op{std::move(f)});
        last->next = tail;
        last->has_next.set();
    }
    void wait() {
        cuda_cpu::Flag f;
        queue([&f] { f.set(); });
        f.wait();
    }
    ~CUstream_st() {
        queue([this] { quit = true; });
        worker.join();
        std::lock_guard<std::shared_mutex> guard(cuda_cpu::host);
        cuda_cpu::idle.push_back(threads);
    }
};

/* A graph, and one that can be launched: what was posted on a stream, in that order. */
struct CUgraph_st {
    std::vector<std::function<void()>> ops{};
};
struct CUgraphExec_st : CUgraph_st {};

void CUstream_st::submit(std::function<void()> f) {
    if (capturing) return capturing->ops.push_back(std::move(f));
    queue(std::move(f));
}

struct CUevent_st {
    bool timed;
    std::mutex lock;
    std::deque<cuda_cpu::Record> records{};

    /* Returns the latest recording; null when there is none. */
    cuda_cpu::Record *latest() {
        std::lock_guard<std::mutex> guard(lock);
        return records.empty() ? nullptr : &records.back();
    }
    /* Returns a new one. */
    cuda_cpu::Record *record() {
        std::lock_guard<std::mutex> guard(lock);
        return &records.emplace_back();
    }
};

namespace cuda_cpu {

/* Copies that cudaMemcpy has taken from pageable memory and that are not yet on the device. */
static struct {
    std::mutex lock;
    std::vector<std::function<void()>> copies;
} late;
static void submit(cudaStream_t s, std::function<void()> f) {
    if (s) return s->submit(std::move(f));
    static CUstream_st default_stream;
    std::vector<std::function<void()>> before;
    {
        std::lock_guard<std::mutex> guard(late.lock);
        before.swap(late.copies);
    }
    for (auto &copy : before) default_stream.submit(std::move(copy));
    default_stream.submit(std::move(f));
    default_stream.wait();
}

// ---- Memory ---------------------------------------------------------------------------------------------------------

/* Bytes behind an allocation, which nobody may write. AddressSanitizer has its own. */
static const size_t GUARD = CUDA_CPU_ASAN(0 *) 64;
static size_t capacity() { return size_t(env_number("CUDA_CPU_MEM_MB", 2048)) << 20; }

/* Returns the allocation in which p lies, or which it ends, with what is left of it from p on. */
static Allocation rest_of(const void *p) {
    std::shared_lock<std::shared_mutex> guard(host);
    auto it = allocations.upper_bound((uintptr_t)p);
    if (it == allocations.begin()) return {0, NONE};
    const auto [begin, whole] = *--it;
    const size_t at = (uintptr_t)p - begin;
    return at <= whole.size ? Allocation{whole.size - at, whole.kind} : Allocation{0, NONE};
}
static bool allocated(const void *p, size_t n) { return n <= rest_of(p).size; }
static bool on_device(const void *p, size_t n) { return is_device(p) && allocated(p, n); }
static cudaError_t allocate(void **p, size_t n, Kind kind) {
    if (captures("memory is allocated")) return error(cudaErrorStreamCaptureUnsupported);
    std::lock_guard<std::shared_mutex> guard(host);
    if (kind == DEVICE && (n > capacity() || memory_used > capacity() - n)) return error(cudaErrorMemoryAllocation);
    if (n && n == spare.first)
        *p = std::exchange(spare, {}).second;
    else if (posix_memalign(p, 256, n + !n + GUARD))
        return error(cudaErrorMemoryAllocation);
    poison(*p, n + GUARD);
    if (kind == DEVICE) *p = (void *)((uintptr_t)*p | DEVICE_TAG), memory_used += n;
    allocations[(uintptr_t)*p] = {n, kind};
    return cudaSuccess;
}
static cudaError_t release(void *p, Kind kind, cudaError_t otherwise, const char *where) {
    submit(nullptr, [] {});
    {
        std::shared_lock<std::shared_mutex> guard(host);
        for (cudaStream_t s : streams) s->wait();
    }
    std::lock_guard<std::shared_mutex> guard(host);
    auto it = allocations.find((uintptr_t)p);
    if (it == allocations.end() || it->second.kind != kind) return refuse(otherwise, where, "not a pointer of this kind");
    size_t size = it->second.size;
    if (kind == DEVICE) memory_used -= size;
    allocations.erase(it);
    p = untag(p);
    const char *end = (char *)p + size;
    if (kind != REGISTERED && std::any_of(end, end + GUARD, [](char c) { return c != -1; }))
        complain(true, "%s: something was written behind the memory", where);
    CUDA_CPU_ASAN(size = 0); /* which looks out for use after free */
    if (kind == DEVICE && size > spare.first) std::swap(size, spare.first), std::swap(p, spare.second);
    if (kind != REGISTERED) free(p);
    return cudaSuccess;
}

extern "C" {
int cuda_cpu_hold;
long cuda_cpu_timed, cuda_cpu_asked, cuda_cpu_launches, cuda_cpu_largest, cuda_cpu_shared, cuda_cpu_graphs, cuda_cpu_made;
}

/* Sleeps as long as the bytes take on the link, which has one copy engine each way. */
static void throttle(size_t bytes, bool to_device) {
    static std::atomic<int64_t> busy_until[2];
    if (settings.bytes_per_ns <= 0) return;
    int64_t now = now_ns(), old = busy_until[to_device].load(std::memory_order_relaxed), end;
    do end = std::max(old, now) + int64_t(bytes / settings.bytes_per_ns);
    while (!busy_until[to_device].compare_exchange_weak(old, end, std::memory_order_relaxed));
    std::this_thread::sleep_for(std::chrono::nanoseconds(end - now));
}
static cudaError_t copy(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                        cudaMemcpyKind kind, cudaStream_t s, const char *where) {
    if (!width || !height) return cudaSuccess;
    if (!s && captures("a copy is waited for")) return error(cudaErrorStreamCaptureUnsupported);
    if (height > 1 && (dst_pitch < width || src_pitch < width)) return refuse(cudaErrorInvalidPitchValue, where, "pitch");
    bool to = is_device(dst), from = is_device(src);
    bool dst_known = allocated(dst, (height - 1) * dst_pitch + width);
    bool src_known = allocated(src, (height - 1) * src_pitch + width);
    if (kind != cudaMemcpyDefault)
        return refuse(cudaErrorInvalidMemcpyDirection, where, "a direction that the pointers do not tell");
    if ((to && !dst_known) || (from && !src_known))
        return refuse(cudaErrorInvalidValue, where, "outside of any device allocation");
    bool pageable = !dst_known || !src_known;
    if ((!dst_known && allocated(dst, 1)) || (!src_known && allocated(src, 1)))
        return refuse(cudaErrorInvalidValue, where, "reaches beyond the range in which it begins");
    if (settings.strict && s && pageable && !pin_failed)
        complain(false, "%s: pageable host memory, so it is not asynchronous", where);
    if (!s && to && pageable) { /* returns when it has read the bytes */
        std::vector<char> bytes((const char *)src, (const char *)src + width);
        std::lock_guard<std::mutex> guard(late.lock);
        late.copies.push_back([=, bytes = std::move(bytes)] {
            throttle(width, to);
            memcpy(untag(dst), bytes.data(), width);
        });
        return cudaSuccess;
    }
    if (s && long(width * height) > __atomic_load_n(&cuda_cpu_largest, __ATOMIC_RELAXED)) /* orders nothing */
        __atomic_store_n(&cuda_cpu_largest, width * height, __ATOMIC_RELAXED);
    submit(s, [=] {
        for (int ms = 0; s && ms < 10000 && __atomic_load_n(&cuda_cpu_hold, __ATOMIC_ACQUIRE); ms++)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (to != from) throttle(width * height, to); /* the data come last */
        for (size_t y = 0; y < height; y++)
            memcpy((char *)untag(dst) + y * dst_pitch, (const char *)untag(src) + y * src_pitch, width);
    });
    if (s && pageable && !s->capturing) s->wait();
    return cudaSuccess;
}

// ---- Launches -------------------------------------------------------------------------------------------------------

void *kernel_pointer(const char *name, const void *p) {
    if (p && !is_device(p) && rest_of(p).kind != HOST)
        complain(false, "kernel %s gets a pointer to host memory that is not CUDA's", name);
    return (void *)untag(p);
}

/* A row of the first table of results/kernels.md, which scripts/gpu_kernels.sh has from ptxas. */
struct Row {
    size_t threads, shared; /* of a block, at most */
    size_t registers;       /* of a thread, on the GPU where they are most */
};
struct Kernel {
    std::string name;  /* as that file has it, such as attend_kernel<16, 1, 0> */
    const Row *row;    /* null: it has none */
    size_t may_shared; /* the dynamic shared memory that it may have */
};
enum { VARIABLES = 16 }; /* bytes of shared memory that every kernel is said to have beside that, for its variables */
static std::map<const void *, Kernel> &kernels = *new std::map<const void *, Kernel>; /* guarded by host, too */

/* The rows by the kernels' names; none where the file is not. */
static const std::map<std::string, Row> &known_kernels() {
    static const std::map<std::string, Row> all = [] {
        enum { GPUS = 6 };
        std::map<std::string, Row> rows;
        FILE *f = fopen("results/kernels.md", "r");
        char line[1000], name[200];
        while (f && fgets(line, sizeof line, f) && strncmp(line, "## ", 3)) { /* of the first table */
            Row row{};
            int at = 0;
            if (sscanf(line, "| `%199[^`]` | %zu | %zu |%n", name, &row.threads, &row.shared, &at) != 3 || !at) continue;
            const char *cell = line + at;
            for (int gpu = 0; gpu < GPUS; gpu++, cell = strchr(cell, '|') + 1)
                row.registers = std::max(row.registers, size_t(atoi(cell)));
            rows[name] = row;
        }
        if (f) fclose(f);
        return rows;
    }();
    return all;
}
static std::string name_of(const void *kernel) {
    Dl_info info;
    if (!dladdr(kernel, &info) || !info.dli_sname) return "a kernel";
    char *whole = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, nullptr);
    std::string name = whole ? whole : info.dli_sname;
    free(whole);
    const auto replace = [&name](const std::string &old, const char *other) {
        for (size_t at; (at = name.find(old)) != std::string::npos;) name.replace(at, old.size(), other);
    };
    replace("void ", ""), replace("(int)", ""), replace("(bool)", ""), replace("(Pages)", "");
    replace("true", "1"), replace("false", "0");
    return name.substr(0, name.find('('));
}
/* Returns what is known of a kernel. Launches order nothing, so they only read, but for the first.
 * too_late: the kernel should have been known before. */
static Kernel &known(const void *kernel, bool too_late) {
    {
        std::shared_lock<std::shared_mutex> guard(host);
        const auto at = kernels.find(kernel);
        if (at != kernels.end()) return at->second;
    }
    const std::string name = name_of(kernel);
    const auto row = known_kernels().find(name);
    captures("a kernel is loaded");
    if (too_late) complain(false, "%s: loaded only by its first launch", name.c_str());
    std::lock_guard<std::shared_mutex> guard(host);
    return kernels[kernel] = {name, row == known_kernels().end() ? nullptr : &row->second, 48 << 10};
}
/* Returns what a launch has more of than its kernel's row, or null. */
static const char *excess(const Kernel &k, size_t threads, size_t shared, bool has_rows) {
    if (!k.row) return known_kernels().empty() || !has_rows ? nullptr : "no row of results/kernels.md";
    const size_t of_warp = (32 * k.row->registers + 255) / 256 * 256; /* a warp's registers are dealt out by 256 */
    if (threads > k.row->threads) return "more threads than its row of results/kernels.md";
    if (shared > k.row->shared) return "more shared memory than its row of results/kernels.md";
    return of_warp * ((threads + 31) / 32) > 65536 ? "more registers than there are" : nullptr;
}

static void run_grid(const char *name, dim3 grid, dim3 block, size_t shared, const std::function<void()> &kernel) {
    CUDA_CPU_ASAN(static std::mutex one_at_a_time; std::lock_guard<std::mutex> lock(one_at_a_time));
    const int blocks = grid.x * grid.y * grid.z;
    int first, stride;
    choose_order(blocks, &first, &stride);
    /* Runs every `step`-th block, from number `from` on. */
    const auto run = [&](int from, int step) {
        gridDim = grid, blockDim = block;
        blk.n = block.x;
        blk.kernel = &kernel, blk.name = name, blk.shared = malloc(shared + 1);
        for (int i = 0; i < blk.n; i++)
            if (!blk.threads[i].context.stack) create_fiber(&blk.threads[i].context);
        for (int64_t i = from; i < blocks; i += step) {
            unsigned b = (i * stride + first) % blocks;
            blockIdx = {b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)};
            poison(blk.shared, shared);
            run_block();
        }
        free(blk.shared);
    };
    CUDA_CPU_TSAN(if (blocks > 1) {
        static thread_local CUstream_st second;
        second.submit([&] { run(1, 2); });
        run(0, 2);
        return second.wait();
    })
    run(0, 1);
}

const char *allowed(const Launch &l, bool has_rows) {
    const Kernel &k = known(l.kernel, has_rows);
    const char *name = k.name.c_str();
    const dim3 grid = l.grid, block = l.block;
    const size_t threads = block.x;
    const bool fits = threads && threads <= 1024 && block.y * block.z == 1 && grid.x && grid.y && grid.z;
    if (!fits || grid.x > INT_MAX || grid.y > 65535 || grid.z > 65535)
        return refuse(cudaErrorInvalidConfiguration, name, "bad grid or block size"), nullptr;
    if (l.shared > k.may_shared) return refuse(cudaErrorInvalidValue, name, "too much dynamic shared memory"), nullptr;
    if (const char *why = excess(k, threads, l.shared, has_rows)) complain(false, "%s: %s", name, why);
    if (launches.fetch_add(1, std::memory_order_relaxed) + 1 == env_number("CUDA_CPU_LAUNCH_FAILS", 0))
        return error(cudaErrorLaunchOutOfResources), nullptr;
    __atomic_fetch_add(&cuda_cpu_launches, 1, __ATOMIC_RELAXED);
    return name;
}
void post(const Launch &l, const char *name, std::function<void()> call) {
    submit(l.stream, [=, call = std::move(call)] { run_grid(name, l.grid, l.block, l.shared, call); });
}

static struct AtExit {
    ~AtExit() {
        std::shared_lock<std::shared_mutex> guard(host);
        if (!allocations.empty() || !streams.empty() || events || graphs)
            complain(false,
                     "left at exit: %zu allocations or pinned ranges, %zu bytes on the device, %zu streams, %ld events, "
                     "%ld graphs",
                     allocations.size(), memory_used, streams.size(), events.load(), graphs.load());
    }
} at_exit;

// ---- The runtime's functions ----------------------------------------------------------------------------------------

extern "C" {
CUDA_CPU_ASAN(void cuda_cpu_forbid(const void *p, size_t n) { __asan_poison_memory_region(untag(p), n); })
long cuda_cpu_most_roundings() { return cuda_cpu::most_roundings.exchange(0); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char *cudaGetErrorString(cudaError_t e) {
    static thread_local char text[40];
    snprintf(text, sizeof text, "error %d of the emulation", int(e));
    return text;
}

/* The device */
cudaError_t cudaGetDeviceCount(int *n) {
    long without = env_number("CUDA_CPU_NO_DEVICE", 0);
    launches = 0, pin_failed = false;
    *n = !without;
    return without ? error(without == 2 ? cudaErrorNoDevice : cudaErrorInsufficientDriver) : cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device ? error(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device) return error(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulated GPU");
    p->totalGlobalMem = capacity(), p->warpSize = 32, p->multiProcessorCount = 132, p->maxThreadsPerBlock = 1024;
    p->sharedMemPerBlockOptin = env_number("CUDA_CPU_SHARED", env_number("CUDA_CPU_ARCH", 80) < 80 ? 64 << 10 : 99 << 10);
    p->major = env_number("CUDA_CPU_ARCH", 80) / 10, p->minor = env_number("CUDA_CPU_ARCH", 80) % 10;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *kernel) {
    known(kernel, false);
    memset(a, 0, sizeof *a);
    a->sharedSizeBytes = VARIABLES;
    a->ptxVersion = 80;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int bytes) {
    cudaDeviceProp card;
    cudaGetDeviceProperties(&card, 0);
    if (size_t(bytes) + VARIABLES > card.sharedMemPerBlockOptin) return error(cudaErrorInvalidValue);
    __atomic_store_n(&cuda_cpu_shared, std::max(cuda_cpu_shared, long(bytes)), __ATOMIC_RELAXED);
    known(kernel, false).may_shared = std::max(bytes, 48 << 10);
    return cudaSuccess;
}

/* Memory */
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    std::shared_lock<std::shared_mutex> guard(host);
    *total = capacity(), *available = *total - std::min(*total, memory_used);
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, DEVICE); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned) { return allocate(p, n, HOST); }
cudaError_t cudaFree(void *p) { return p ? release(p, DEVICE, cudaErrorInvalidValue, "cudaFree") : cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { return p ? release(p, HOST, cudaErrorInvalidValue, "cudaFreeHost") : cudaSuccess; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned) {
    if (!p || !n || is_device(p)) return refuse(cudaErrorInvalidValue, "cudaHostRegister", "not memory of the host");
    std::lock_guard<std::shared_mutex> guard(host);
    const auto pinned = [](const auto &a) { return a.second.kind == REGISTERED; };
    const long fails = env_number("CUDA_CPU_PIN_FAILS", 0);
    pin_failed = fails && std::count_if(allocations.begin(), allocations.end(), pinned) + 1 >= fails;
    if (pin_failed) return error(cudaErrorMemoryAllocation);
    auto next = allocations.lower_bound((uintptr_t)p + n); /* the first that begins behind it */
    if (next != allocations.begin() && (--next, next->first + next->second.size > (uintptr_t)p))
        return refuse(cudaErrorHostMemoryAlreadyRegistered, "cudaHostRegister", "overlaps memory that is pinned");
    allocations[(uintptr_t)p] = {n, REGISTERED};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) {
    return release(p, REGISTERED, cudaErrorHostMemoryNotRegistered, "cudaHostUnregister");
}
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n, cudaMemcpyKind kind) {
    return copy(dst, n, src, n, n, 1, kind, nullptr, "cudaMemcpy");
}
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, cudaMemcpyKind kind, cudaStream_t s) {
    return copy(dst, n, src, n, n, 1, kind, s, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t s) {
    return copy(dst, dst_pitch, src, src_pitch, width, height, kind, s, "cudaMemcpy2DAsync");
}

/* Streams and events */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    if (flags != cudaStreamNonBlocking) return refuse(cudaErrorInvalidValue, "a stream", "only those that do not block");
    *s = new CUstream_st;
    std::lock_guard<std::shared_mutex> guard(host);
    streams.insert(*s);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
    {
        std::lock_guard<std::shared_mutex> guard(host);
        streams.erase(s);
    }
    delete s;
    return cudaSuccess;
}
/* Refuses what would wait for a stream that only takes notes, or would be noted though nobody replays it. */
static cudaError_t refuse_capture(cudaStream_t s, const char *where) {
    return s && s->capturing ? refuse(cudaErrorStreamCaptureUnsupported, where, "while a graph is captured") : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    if (cudaError_t e = refuse_capture(s, "cudaStreamSynchronize")) return e;
    return s ? s->wait() : submit(nullptr, [] {}), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    if (cudaError_t refused = refuse_capture(s, "cudaStreamWaitEvent")) return refused;
    if (Record *r = e->latest()) submit(s, [r] { r->done.wait(); }); /* not recorded: nothing to wait for */
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    *e = new CUevent_st{!(flags & cudaEventDisableTiming), {}};
    events++;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    std::lock_guard<std::shared_mutex> guard(host);
    destroyed.push_back(e);
    events--;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    if (cudaError_t refused = refuse_capture(s, "cudaEventRecord")) return refused;
    if (e->timed) __atomic_fetch_add(&cuda_cpu_timed, 1, __ATOMIC_RELAXED);
    submit(s, [r = e->record()] {
        r->when = now_ns();
        r->done.set();
    });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    if (Record *r = e->latest()) r->done.wait();
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    Record *r = e->latest();
    __atomic_fetch_add(&cuda_cpu_asked, 1, __ATOMIC_RELAXED);
    return !r || r->done.is_set() ? cudaSuccess : error(cudaErrorNotReady);
}
/* Graphs. Those of one stream, whose nodes are in one row, are all that is emulated. */
cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
    if (!s || mode != cudaStreamCaptureModeThreadLocal)
        return refuse(cudaErrorInvalidValue, "cudaStreamBeginCapture", "not emulated");
    if (cudaError_t e = refuse_capture(s, "cudaStreamBeginCapture")) return e;
    return s->capturing = new CUgraph_st, capturing_here = true, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    if (!s->capturing) return refuse(cudaErrorIllegalState, "cudaStreamEndCapture", "nothing is captured");
    return *g = std::exchange(s->capturing, nullptr), capturing_here = false, graphs++, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long) {
    if (__atomic_add_fetch(&cuda_cpu_made, 1, __ATOMIC_RELAXED) == env_number("CUDA_CPU_GRAPH_FAILS", 0))
        return error(cudaErrorMemoryAllocation);
    return *exec = new CUgraphExec_st{*g}, graphs++, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) { return delete g, graphs--, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return delete g, graphs--, cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
    if (cudaError_t e = refuse_capture(s, "cudaGraphLaunch")) return e;
    __atomic_fetch_add(&cuda_cpu_launches, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&cuda_cpu_graphs, 1, __ATOMIC_RELAXED);
    for (const auto &op : g->ops) submit(s, op);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last) {
    Record *from = first->latest(), *to = last->latest();
    if (!first->timed || !last->timed || !from || !to) return error(cudaErrorInvalidResourceHandle);
    if (!from->done.is_set() || !to->done.is_set()) return error(cudaErrorNotReady);
    *ms = (to->when - from->when) * 1e-6f;
    return cudaSuccess;
}
}

// ---- cuBLASLt -------------------------------------------------------------------------------------------------------

/* D = epilogue(alpha op(A) op(B) + beta C), column by column; halfs in, halfs or floats out, sums of floats. */

/* These three lie in what the toolkit reserves for them. */
struct Product {
    cublasComputeType_t compute;
    cudaDataType scale;
    cublasOperation_t op_a;
    cublasLtEpilogue_t epilogue;
    const void *bias;
};
struct Layout {
    cudaDataType type;
    uint64_t rows, cols;
    int64_t ld;

    size_t element() const { return type == CUDA_R_16F ? sizeof(half) : type == CUDA_R_32F ? sizeof(float) : 0; }
    size_t bytes() const { return ((cols - 1) * ld + rows) * element(); }
    bool valid() const { return element() && rows && cols && ld >= int64_t(rows); }
};
struct Preference {
    uint64_t workspace;
    uint32_t align[4];  /* of A, B, C, D */
    uint32_t reduction; /* the schemes that are allowed where blocks share k */
};
static_assert(sizeof(Product) <= sizeof(cublasLtMatmulDescOpaque_t) &&
              sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t) &&
              sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
/* The contents of a cublasLtMatmulAlgo_t: the problem that it was found for, and what that may rely on. */
struct Algorithm {
    uint32_t m, n, k, ld[3], workspace; /* ld: of A, B, D */
    uint16_t align[4];
    uint8_t epilogue, type_d, known, align_bias;
};
static_assert(sizeof(Algorithm) == 40 && sizeof(cublasLtMatmulAlgo_t) >= 40); /* compared as bytes: no padding */
const uint32_t WORKSPACE_USED = 1 << 20;                                      /* at most */

/* Returns the problem D = A^T B + beta D as an Algorithm with nothing to rely on; `known` is 0 when the parts do not fit
 * together. */
static Algorithm problem(const Product *p, const Layout *a, const Layout *b, const Layout *c, const Layout *d) {
    uint64_t m = a->cols, k = a->rows, n = b->cols;
    bool fit = a->valid() && b->valid() && d->valid() && c == d && k == b->rows && d->rows == m && d->cols == n &&
               p->op_a == CUBLAS_OP_T && std::max({m, n, k}) < INT_MAX;
    if (!fit) return {};
    Algorithm r{};
    r.m = m, r.n = n, r.k = k, r.ld[0] = a->ld, r.ld[1] = b->ld, r.ld[2] = d->ld;
    r.epilogue = p->epilogue, r.type_d = d->type, r.known = 1;
    return r;
}

enum { ROWS = 64 }; /* of D that are computed at a time: several Floats */

/* Computes d[row] = the sum of a[k][row] b[k] over k, in the order of k, each element for itself. */
static CUDA_CPU_UNCHECKED void multiply_rows(float *d, const float *a, const float *b, size_t k) {
    Floats sum[ROWS / 8] = {};
    for (size_t i = 0; i < k; i++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS / 8; r++) sum[r] += ((const Floats *)a)[i * (ROWS / 8) + r] * b[i];
    memcpy(d, sum, sizeof sum);
}

static void run_product(const Algorithm &q, float alpha, const half *a, const half *b, float beta, void *d,
                        const void *bias) {
    static thread_local std::vector<float> of_a, of_b;
    float sum[ROWS];
    const auto load = [&q](const void *p, size_t i) {
        return q.type_d == CUDA_R_16F ? to_float(((const half *)p)[i]) : ((const float *)p)[i];
    };
    of_a.resize(size_t(q.k) * ROWS), of_b.resize(size_t(q.k) * q.n);
    for (size_t j = 0; j < q.n; j++)
        for (size_t k = 0; k < q.k; k++) of_b[j * q.k + k] = to_float(b[j * q.ld[1] + k]);
    for (size_t i = 0; i < q.m; i += ROWS) {
        const size_t end = std::min<size_t>(i + ROWS, q.m);
        for (size_t row = i; row < end; row++)
            for (size_t k = 0; k < q.k; k++) of_a[k * ROWS + row - i] = to_float(a[row * q.ld[0] + k]);
        for (size_t j = 0; j < q.n; j++) {
            multiply_rows(sum, &of_a[0], &of_b[j * q.k], q.k);
            for (size_t row = i; row < end; row++) {
                const size_t at = j * q.ld[2] + row;
                float v = alpha * sum[row - i];
                if (beta != 0) v += beta * load(d, at);
                if (q.epilogue & CUBLASLT_EPILOGUE_BIAS) v += load(bias, row);
                if ((q.epilogue & CUBLASLT_EPILOGUE_RELU) && v < 0) v = 0; /* NaN stays */
                if (q.type_d == CUDA_R_16F)
                    ((half *)d)[at] = to_half(v);
                else
                    ((float *)d)[at] = v;
            }
        }
    }
}

/* Returns why a matrix may not be used, or null. */
static const char *matrix_fault(const void *p, const Layout *l, uint32_t align) {
    if (!on_device(p, l->bytes())) return "a matrix is not within a device allocation";
    if ((uintptr_t)p % align || (uintptr_t)p % l->element()) return "an address is less aligned than was promised";
    if (l->cols > 1 && l->ld * l->element() % std::min(align, 16u))
        return "a leading dimension is less aligned than was promised";
    return nullptr;
}

/* Sets an attribute, whose value must have the size of what it goes to. */
template <class T>
static cublasStatus_t set(T *to, const void *from, size_t size) {
    if (size != sizeof *to) return refuse(CUBLAS_STATUS_INVALID_VALUE, "cublasLt", "an attribute of another size");
    memcpy(to, from, size);
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" {
cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return *h = (cublasLtHandle_t) new int, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return delete (int *)h, CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t p, size_t, cublasComputeType_t compute,
                                               cudaDataType scale) {
    new (p) Product{compute, scale, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which,
                                              const void *value, size_t size) {
    Product *p = (Product *)desc;
    if (which == CUBLASLT_MATMUL_DESC_TRANSA) return set(&p->op_a, value, size);
    if (which == CUBLASLT_MATMUL_DESC_EPILOGUE) return set(&p->epilogue, value, size);
    if (which == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return set(&p->bias, value, size);
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmulDescSetAttribute", "not emulated");
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t, cudaDataType type, uint64_t rows,
                                                 uint64_t cols, int64_t ld) {
    new (l) Layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t) {
    new (p) Preference{0, {256, 256, 256, 256}, CUBLASLT_REDUCTION_SCHEME_MASK};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which, const void *value,
                                                    size_t size) {
    Preference *p = (Preference *)preference;
    if (which == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return set(&p->workspace, value, size);
    if (which == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return set(&p->reduction, value, size);
    if (which >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES && which <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
        return set(&p->align[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, size);
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmulPreferenceSetAttribute", "not emulated");
}

/* Gives one answer, or none for an epilogue with results that are not 16-byte aligned, so that callers must do without. It
 * says that there is none in each of the ways in which cuBLAS may: by its status, by their number, by the answer's state.
 */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t *results, int *found) {
    const char *where = "cublasLtMatmulAlgoGetHeuristic";
    captures("cuBLAS meets a new product, whose kernels it may have to load");
    const unsigned epilogues = CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_RELU_BIAS;
    static std::atomic<unsigned> refusals;
    const Product *p = (Product *)desc;
    const Preference *pref = (Preference *)preference;
    Algorithm q = problem(p, (Layout *)a, (Layout *)b, (Layout *)c, (Layout *)d);
    if (!q.known || asked != 1) return refuse(CUBLAS_STATUS_INVALID_VALUE, where, "the matrices do not fit each other");
    if (p->compute != CUBLAS_COMPUTE_32F || p->scale != CUDA_R_32F || ((Layout *)a)->type != CUDA_R_16F ||
        ((Layout *)b)->type != CUDA_R_16F || p->epilogue & ~epilogues)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, where, "types or epilogue are not emulated");
    if (pref->reduction & ~CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) /* batches would change a row's bits, and halves round */
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, where, "sums over k could be joined in any order, or as halfs");
    for (int i = 0; i < 4; i++) {
        if (!pref->align[i] || pref->align[i] & (pref->align[i] - 1))
            return refuse(CUBLAS_STATUS_INVALID_VALUE, where, "an alignment that is no power of two");
        q.align[i] = std::min(pref->align[i], 256u);
    }
    if (q.epilogue & CUBLASLT_EPILOGUE_BIAS) q.align_bias = ((uintptr_t)p->bias | 16) & -((uintptr_t)p->bias | 16);
    const bool none = q.epilogue != CUBLASLT_EPILOGUE_DEFAULT && q.align[3] < 16;
    const unsigned way = none ? refusals++ % 3 : 3;
    q.workspace = std::min<uint64_t>(pref->workspace, WORKSPACE_USED);
    results[0] = {};
    if (!none) memcpy(&results[0].algo, &q, sizeof q);
    results[0].state = way == 2 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
    *found = way >= 2;
    return way == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t la, const void *b, cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    const char *where = "cublasLtMatmul", *fault = nullptr;
    const Product *p = (Product *)desc;
    const Layout *of_a = (Layout *)la, *of_b = (Layout *)lb, *of_d = (Layout *)ld;
    Algorithm q{}, now = problem(p, of_a, of_b, (Layout *)lc, of_d);
    memcpy(&q, algo, sizeof q);
    now.workspace = q.workspace, memcpy(now.align, q.align, sizeof q.align), now.align_bias = q.align_bias;
    if (!q.known || memcmp(&q, &now, sizeof q) || c != d)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, where, "the algorithm was found for another problem");
    float scale = *(const float *)alpha, keep = *(const float *)beta;
    if (!(fault = matrix_fault(a, of_a, q.align[0])) && !(fault = matrix_fault(b, of_b, q.align[1])))
        fault = matrix_fault(d, of_d, std::max(q.align[2], q.align[3]));
    if (!fault && (q.epilogue & CUBLASLT_EPILOGUE_BIAS) &&
        (!on_device(p->bias, q.m * of_d->element()) || (uintptr_t)p->bias % of_d->element()))
        fault = "the bias is not within a device allocation";
    if (!fault && q.align_bias && (uintptr_t)p->bias % q.align_bias)
        fault = "the bias is less aligned than that for which the algorithm was found";
    if (!fault && (workspace_bytes < q.workspace || (uintptr_t)workspace % 256 || !on_device(workspace, workspace_bytes)))
        fault = "the workspace is too small, not aligned to 256 bytes or not within a device allocation";
    if (!fault && (char *)d < (char *)b + of_b->bytes() && (char *)b < (char *)d + of_d->bytes())
        fault = "the result lies over what is multiplied";
    if (fault) return refuse(CUBLAS_STATUS_INVALID_VALUE, where, fault);
    __atomic_fetch_add(&cuda_cpu_launches, 1, __ATOMIC_RELAXED);
    submit(stream, [=, bias = untag(p->bias), space = untag(workspace)] {
        memset(space, 0xff, std::min(q.workspace, 256u)); /* no one else may use it meanwhile */
        run_product(q, scale, (const half *)untag(a), (const half *)untag(b), keep, untag(d), bias);
    });
    return CUBLAS_STATUS_SUCCESS;
}
}

// ---- cuBLAS ---------------------------------------------------------------------------------------------------------

extern "C" {
cublasStatus_t cublasCreate_v2(cublasHandle_t *h) {
    return *h = (cublasHandle_t) new cudaStream_t{}, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) {
    return *(cudaStream_t *)h = s, CUBLAS_STATUS_SUCCESS;
}

/* C = alpha A^T B + beta C, column by column; halfs in, floats out, sums of floats. */
cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t) {
    const char *where = "cublasGemmEx";
    const Layout of_a{type_a, uint64_t(k), uint64_t(m), lda}, of_b{type_b, uint64_t(k), uint64_t(n), ldb};
    const Layout of_c{type_c, uint64_t(m), uint64_t(n), ldc};
    if (op_a != CUBLAS_OP_T || op_b != CUBLAS_OP_N || type_a != CUDA_R_16F || type_b != CUDA_R_16F ||
        type_c != CUDA_R_32F || compute != CUBLAS_COMPUTE_32F)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, where, "not emulated");
    if (m <= 0 || n <= 0 || k <= 0 || !of_a.valid() || !of_b.valid() || !of_c.valid())
        return refuse(CUBLAS_STATUS_INVALID_VALUE, where, "the matrices do not fit each other");
    const char *fault = nullptr;
    if ((fault = matrix_fault(a, &of_a, 2)) || (fault = matrix_fault(b, &of_b, 2)) || (fault = matrix_fault(c, &of_c, 4)))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, where, fault);
    Algorithm q{};
    q.m = m, q.n = n, q.k = k, q.ld[0] = lda, q.ld[1] = ldb, q.ld[2] = ldc, q.type_d = type_c;
    __atomic_fetch_add(&cuda_cpu_launches, 1, __ATOMIC_RELAXED);
    submit(*(cudaStream_t *)h, [=, scale = *(const float *)alpha, keep = *(const float *)beta] {
        run_product(q, scale, (const half *)untag(a), (const half *)untag(b), keep, untag(c), nullptr);
    });
    return CUBLAS_STATUS_SUCCESS;
}
}
}  // namespace cuda_cpu
