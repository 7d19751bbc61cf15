/* util.h: the smaller and the larger of two numbers, plurals, the clock, halfs, random numbers. For C, C++ and CUDA; it
 * knows nothing of the program. */
#ifndef UTIL_H
#define UTIL_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

/* Before a function that GPUs run as well. */
#ifdef __CUDACC__
#define HOST_AND_GPU __host__ __device__
#else
#define HOST_AND_GPU
#endif

/* Counts of bytes of tiers, plans and machines: they may be larger than what this machine can address. */
typedef uint64_t Bytes;

HOST_AND_GPU static inline int imin(int a, int b) { return a < b ? a : b; }
HOST_AND_GPU static inline int imax(int a, int b) { return a > b ? a : b; }
static inline Bytes size_min(Bytes a, Bytes b) { return a < b ? a : b; }
static inline Bytes size_less(Bytes a, Bytes b) { return a > b ? a - b : 0; }

/* The ending of a noun behind a count: "1 token", "2 tokens". */
static inline const char *plural(double n) { return n == 1 ? "" : "s"; }

/* Seconds of CLOCK_MONOTONIC. */
static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
/* Returns such a time in the form that pthread_cond_timedwait takes. */
static inline struct timespec timespec_at(double seconds) {
    struct timespec t = {(time_t)seconds, 0};
    t.tv_nsec = (long)(1e9 * (seconds - (double)t.tv_sec));
    return t;
}
/* A condition whose timed waits end by that clock. */
static inline void cond_open(pthread_cond_t *cond) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

// ---------------------------------------------------------------------------------------------------------------
// Halfs
// ---------------------------------------------------------------------------------------------------------------

typedef uint16_t f16; /* IEEE binary16 as bits: storage only, arithmetic is float */

static inline float f16_to_f32(f16 x) {
#ifdef __F16C__
    return _cvtsh_ss(x);
#else
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    f *= 0x1p112f;
    memcpy(&bits, &f, sizeof f);
    if (f >= 65536.0f) bits |= 0x7f800000;
    if ((x & 0x7fff) > 0x7c00) bits |= 0x400000; /* NaNs come out quiet */
    bits |= (uint32_t)(x & 0x8000) << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
#endif
}

/* Rounds to the nearest half, ties to even. */
static inline f16 f32_to_f16(float x) {
#ifdef __F16C__
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    f16 sign = (f16)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (bits >> 13 & 0x3ff);
    if (bits >= 0x477ff000) return sign | 0x7c00; /* from 65520 up the nearest half is inf */
    if (bits < 0x38800000) {                      /* subnormal: a float addition rounds at 2^-24 for us */
        float f;
        memcpy(&f, &bits, sizeof f);
        f += 0.5f;
        memcpy(&bits, &f, sizeof f);
        return sign | (f16)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (f16)((bits - 0x38000000) >> 13);
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Hashes. Random numbers are hashes of what they are drawn for, so that nothing else can change them
// ---------------------------------------------------------------------------------------------------------------

/* Number n of the splitmix64 generator that began with this seed. */
static inline uint64_t splitmix64(uint64_t seed, uint64_t n) {
    uint64_t z = seed + n * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* FNV-1a of bytes, behind what `hash` stands for already. */
static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n) {
    for (const uint8_t *b = (const uint8_t *)bytes, *end = b + n; b < end; b++) hash = (hash ^ *b) * 0x100000001B3ull;
    return hash;
}
enum { HASH_START = 0x2545F491 };

/* Uniform in [0, 1): what decides about the token at `pos` of a prompt. */
static inline double random_draw(uint64_t seed, int32_t prompt, int32_t pos) {
    uint64_t hash = splitmix64(splitmix64(splitmix64(seed, 1) ^ (uint32_t)prompt, 1) ^ (uint32_t)pos, 1);
    return (double)(hash >> 11) * 0x1p-53;
}
#endif
