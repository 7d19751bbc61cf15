/* simd.h: defines a vector of VL floats for AVX-512, AVX2, NEON and portable C, and one of VL pairs
 * of integers. Everything is inlined. What differs between processors stands here and nowhere else.
 * C's operators work on these vectors; these few functions do what C cannot say. */
#ifndef SIMD_H
#define SIMD_H
#include "base/base.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define UNROLL PRAGMA(unroll)
#else
#define UNROLL PRAGMA(GCC unroll 16)
#endif

#if defined __AVX512BW__ && defined __F16C__
#define ISA "AVX-512"
#define VL 16
#define REGISTERS 32
#elif defined __AVX2__ && defined __FMA__ && defined __F16C__
#define ISA "AVX2"
#define VL 8
#define REGISTERS 16
#elif defined __aarch64__
#include <arm_neon.h>
/* Otherwise GCC would load so many vectors ahead that the sums of a tile leave their registers. */
#ifndef __clang__
#pragma GCC optimize("no-schedule-insns")
#endif
#define ISA "NEON"
#define VL 4
#define REGISTERS 32
#else
#define ISA "portable"
#define VL 4
#define REGISTERS 16
#endif
// -------------------------------------------------------------------------------------------------
// One number: halfs
// -------------------------------------------------------------------------------------------------

static inline float f16_to_f32(f16 x) {
#ifdef __F16C__
    return _cvtsh_ss(x);
#elif defined __ARM_NEON
    __fp16 half;
    memcpy(&half, &x, sizeof half);
    return half;
#else
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    f *= 0x1p112f;
    memcpy(&bits, &f, sizeof f);
    if (f >= 65536.0f)
        bits |= 0x7f800000;
    if ((x & 0x7fff) > 0x7c00)
        bits |= 0x400000; /* NaNs come out quiet */
    bits |= (uint32_t)(x & 0x8000) << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
#endif
}

/* Rounds to the nearest half, ties to even. */
static inline f16 f32_to_f16(float x) {
#ifdef __F16C__
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined __ARM_NEON
    __fp16 half = x;
    f16 bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    f16 sign = (f16)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00 | (bits >> 13 & 0x3ff);
    if (bits >= 0x477ff000)
        return sign | 0x7c00; /* from 65520 up the nearest half is inf */
    if (bits < 0x38800000) {  /* subnormal: a float addition rounds at 2^-24 for us */
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

// -------------------------------------------------------------------------------------------------
// Vectors
// -------------------------------------------------------------------------------------------------

/* The rows of a tile, of x and of w: their MR * NR sums and what feeds these fit the vector
 * registers. */
enum { MR = REGISTERS == 32 ? 6 : 3, NR = 4 };

typedef float V __attribute__((vector_size(VL * 4)));
typedef int32_t VI __attribute__((vector_size(VL * 4)));
typedef f16 VH __attribute__((vector_size(VL * 2)));
typedef uint8_t VB __attribute__((vector_size(VL)));
typedef float V4 __attribute__((vector_size(16)));
/* VL pairs of 16-bit numbers. Of pairs of codes NEON has all first numbers in the lower half. */
typedef uint16_t VP __attribute__((vector_size(VL * 4)));

/* Attention multiplies the codes themselves, as floats that are this times a code: on NEON the code
 * lies in the low bits of a half, which is a subnormal number. */
#ifdef __ARM_NEON
#define CODE_UNIT 0x1p-24f
#else
#define CODE_UNIT 1.0f
#endif

/* Returns v, and keeps the compiler from loading it again. */
INLINE V v_hold(V v) {
#if VL == 16
    __asm__("" : "+v"(v));
#elif defined __x86_64__
    __asm__("" : "+x"(v));
#elif defined __ARM_NEON
    __asm__("" : "+w"(v));
#endif
    return v;
}
INLINE V v_set(float x) { return x - (V){0}; }
INLINE V v_load(const float *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void v_store(float *p, V v) { memcpy(p, &v, sizeof v); }

INLINE V v_select(VI mask, V yes, V no) { return (V)(((VI)yes & mask) | ((VI)no & ~mask)); }
/* If b is NaN, v_max and v_min return a. */
#if VL == 16
INLINE V v_max(V a, V b) { return (V)_mm512_max_ps((__m512)b, (__m512)a); }
INLINE V v_min(V a, V b) { return (V)_mm512_min_ps((__m512)b, (__m512)a); }
#elif VL == 8
INLINE V v_max(V a, V b) { return (V)_mm256_max_ps((__m256)b, (__m256)a); }
INLINE V v_min(V a, V b) { return (V)_mm256_min_ps((__m256)b, (__m256)a); }
#else
INLINE V v_max(V a, V b) { return v_select(a < b, b, a); }
INLINE V v_min(V a, V b) { return v_select(b < a, b, a); }
#endif

// -------------------------------------------------------------------------------------------------
// Functions that each instruction set has its own words for. codes_block returns 32 codes times
// CODE_UNIT. p_load_16 pairs each of 16 bytes at p with that at q. p_set repeats a pair of numbers
// with a sign. p_dot adds to each element the two products of a pair of codes and such a pair.
// -------------------------------------------------------------------------------------------------

#if VL == 16
INLINE V v_fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE V v_widen(VH h) { return (V)_mm512_cvtph_ps((__m256i)h); }
INLINE VH v_narrow(V v) { return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
INLINE VI p_dot(VP codes, VP x, VI sum) {
#ifdef __AVX512VNNI__
    return (VI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#else
    return sum + (VI)_mm512_madd_epi16((__m512i)codes, (__m512i)x);
#endif
}
INLINE VI v_load_bytes(const uint8_t *p) {
    return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
}
#elif VL == 8
INLINE V v_fma(V a, V b, V c) { return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE V v_widen(VH h) { return (V)_mm256_cvtph_ps((__m128i)h); }
INLINE VH v_narrow(V v) { return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
INLINE VI v_load_bytes(const uint8_t *p) {
    return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
}
INLINE VI p_dot(VP codes, VP x, VI sum) {
#ifdef __AVXVNNI__
    return (VI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
    return sum + (VI)_mm256_madd_epi16((__m256i)codes, (__m256i)x);
#endif
}
#elif defined __ARM_NEON
INLINE V v_fma(V a, V b, V c) {
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE V v_widen(VH h) { return (V)vcvt_f32_f16((float16x4_t)h); }
INLINE VH v_narrow(V v) { return (VH)vcvt_f16_f32((float32x4_t)v); }
INLINE void v_widen_two(V out[2], uint8x16_t halves) {
    out[0] = (V)vcvt_f32_f16(vget_low_f16((float16x8_t)halves));
    out[1] = (V)vcvt_high_f32_f16((float16x8_t)halves);
}
INLINE void p_load_16(VP to[4], const uint8_t *p, const uint8_t *q) {
    uint32x4_t first = vreinterpretq_u32_u8(vld1q_u8(p)),
               second = vreinterpretq_u32_u8(vld1q_u8(q)), two[2];
    two[0] = vzip1q_u32(first, second);
    two[1] = vzip2q_u32(first, second);
    UNROLL
    for (int i = 0; i < 2; i++) {
        to[2 * i] = (VP)vmovl_u8(vget_low_u8((uint8x16_t)two[i]));
        to[2 * i + 1] = (VP)vmovl_high_u8((uint8x16_t)two[i]);
    }
}
INLINE VI p_dot(VP codes, VP x, VI sum) {
    int16x4_t pair = vget_low_s16((int16x8_t)x);
    int32x4_t firsts = vmlal_lane_s16((int32x4_t)sum, vget_low_s16((int16x8_t)codes), pair, 0);
    return (VI)vmlal_high_lane_s16(firsts, (int16x8_t)codes, pair, 1);
}
INLINE void codes_block(V out[8], const uint8_t *codes) {
    uint8x16_t pairs = vld1q_u8(codes), code[2] = {pairs & 15, pairs >> 4}, zero = {0};
    UNROLL
    for (int i = 0; i < 2; i++) {
        v_widen_two(out + i * 4, vzip1q_u8(code[i], zero));
        v_widen_two(out + i * 4 + 2, vzip2q_u8(code[i], zero));
    }
}
#else
INLINE V v_fma(V a, V b, V c) { return a * b + c; }
/* The bits of a half, moved to a float's place, mean 2^-112 of its value, subnormals too; only inf
 * and NaN need help. */
INLINE V v_widen(VH h) {
    VI bits = __builtin_convertvector(h, VI);
    V v = (V)((bits & 0x7fff) << 13) * 0x1p112f;
    return (V)((VI)v | ((bits & 0x8000) << 16) | ((VI)(v >= 65536.0f) & 0x7f800000));
}
INLINE VH v_narrow(V v) {
    VH h;
    for (int i = 0; i < VL; i++)
        h[i] = f32_to_f16(v[i]);
    return h;
}
INLINE VI p_dot(VP codes, VP x, VI sum) {
    VI all = (VI)x;
    return sum + ((VI)codes & 0xffff) * (all << 16 >> 16) + ((VI)codes >> 16) * (all >> 16);
}
INLINE VI v_load_bytes(const uint8_t *p) { return (VI){p[0], p[1], p[2], p[3]}; }
#endif

#ifndef __ARM_NEON
INLINE void p_load_16(VP to[16 / VL], const uint8_t *p, const uint8_t *q) {
    UNROLL
    for (int i = 0; i < 16 / VL; i++)
        to[i] = (VP)(v_load_bytes(p + i * VL) | v_load_bytes(q + i * VL) << 16);
}
#endif
INLINE VP p_set(const int16_t *pair) {
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (VP)(both - (VI){0});
}

#if VL == 16
INLINE void codes_block(V out[2], const uint8_t *codes) {
    /* a look-up ignores all but the low four bits */
    const V all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    VI pairs = v_load_bytes(codes);
    out[0] = (V)_mm512_permutexvar_ps((__m512i)pairs, (__m512)all);
    out[1] = (V)_mm512_permutexvar_ps((__m512i)(pairs >> 4), (__m512)all);
}
#elif !defined __ARM_NEON
INLINE void codes_block(V out[32 / VL], const uint8_t *codes) {
    UNROLL
    for (int i = 0; i < 16 / VL; i++) {
        VI pairs = v_load_bytes(codes + i * VL);
        out[i] = __builtin_convertvector(pairs & 15, V);
        out[16 / VL + i] = __builtin_convertvector(pairs >> 4, V);
    }
}
#endif

// -------------------------------------------------------------------------------------------------
// Functions that follow from these. Those named ..._part load or store only the first n of VL
// numbers; loads put zeros after them.
// -------------------------------------------------------------------------------------------------

INLINE V v_load_part(const float *p, int n) {
    if (n >= VL)
        return v_load(p);
    V v = {0};
    memcpy(&v, p, n * sizeof *p);
    return v;
}
INLINE void v_store_part(float *p, V v, int n) {
    memcpy(p, &v, n >= VL ? sizeof v : n * sizeof *p);
}
INLINE V v_load_f16(const f16 *p) {
    VH h;
    memcpy(&h, p, sizeof h);
    return v_widen(h);
}
/* Loads four vectors that lie side by side; NEON loads them by one instruction. */
INLINE void v_load_four(V out[4], const f16 *p) {
#ifdef __ARM_NEON
    uint16x8_t first = vld1q_u16(p), second = vld1q_u16(p + 8);
    v_widen_two(out, (uint8x16_t)first);
    v_widen_two(out + 2, (uint8x16_t)second);
#else
    UNROLL
    for (int i = 0; i < 4; i++)
        out[i] = v_load_f16(p + i * VL);
#endif
}
/* Adds x * w[j] to sum[j], element by element, for four vectors of x and of each w[j] from column c
 * on. */
INLINE void add_four(V sum[NR], const float *x, const f16 *const w[NR], int c) {
    UNROLL
    for (int j = 0; j < NR; j++) {
        V b[4];
        v_load_four(b, w[j] + c);
        UNROLL
        for (int u = 0; u < 4; u++)
            sum[j] = v_fma(v_load(x + c + u * VL), b[u], sum[j]);
    }
}
INLINE V v_load_f16_part(const f16 *p, int n) {
    if (n >= VL)
        return v_load_f16(p);
    VH h = {0};
    memcpy(&h, p, n * sizeof *p);
    return v_widen(h);
}
INLINE void v_store_f16_part(f16 *p, V v, int n) {
    VH h = v_narrow(v);
    if (n >= VL)
        memcpy(p, &h, sizeof h);
    else
        memcpy(p, &h, n * sizeof *p);
}

/* V_CHOOSE returns those elements of a and b together that have these numbers; V_CHOOSE4 returns
 * four elements of v. gcc has the first form from version 12 on. */
#if defined __clang__ || __GNUC__ >= 12
#define V_CHOOSE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define V_CHOOSE4(v, n0, n1, n2, n3) __builtin_shufflevector(v, v, n0, n1, n2, n3)
#else
#define V_CHOOSE(a, b, ...) __builtin_shuffle(a, b, (VI){__VA_ARGS__})
#define V_CHOOSE4(v, n0, n1, n2, n3) ((V4){v[n0], v[n1], v[n2], v[n3]})
#endif

/* Returns a vector whose element i is element f(i, ...) of a and b together, where b's count from
 * VL on. A compiler wants these numbers as constants in the source, so they are given by macros. */
#define FOUR(f, i, ...) \
    f(i, __VA_ARGS__), f(i + 1, __VA_ARGS__), f(i + 2, __VA_ARGS__), f(i + 3, __VA_ARGS__)
#if VL == 16
#define V_SHUFFLE(a, b, f, ...)                                                               \
    V_CHOOSE(a, b, FOUR(f, 0, __VA_ARGS__), FOUR(f, 4, __VA_ARGS__), FOUR(f, 8, __VA_ARGS__), \
             FOUR(f, 12, __VA_ARGS__))
#elif VL == 8
#define V_SHUFFLE(a, b, f, ...) V_CHOOSE(a, b, FOUR(f, 0, __VA_ARGS__), FOUR(f, 4, __VA_ARGS__))
#else
#define V_SHUFFLE(a, b, f, ...) V_CHOOSE(a, b, FOUR(f, 0, __VA_ARGS__))
#endif
/* Takes n elements of a, n of b, the next n of a ... of the lower (or upper) half of each `all`
 * elements. */
#define ZIPPED(i, n, all, upper)                                                             \
    ((i) / (all) * (all) + (upper) * (all) / 2 + (i) % (all) / (2 * (n)) * (n) + (i) % (n) + \
     (i) / (n) % 2 * VL)

/* Adds the lower to the upper half of each `all` elements: n sums of a, n of b and so on. */
#define ADD_HALVES(a, b, n, all) \
    (V_SHUFFLE(a, b, ZIPPED, n, all, 0) + V_SHUFFLE(a, b, ZIPPED, n, all, 1))
#define XORED(i, n) ((i) ^ (n))

/* Returns a vector whose element i is the sum of the elements of v[i], added as v_sum adds them:
 * those VL / 2 apart, then VL / 4 ... */
#define ADD_ALL_HALVES(v, n)       \
    UNROLL                         \
    for (int i_ = 0; i_ < n; i_++) \
    v[i_] = ADD_HALVES(v[i_], v[i_ + n], n, 2 * n)
INLINE V v_sums(V v[VL]) {
#if VL == 16
    ADD_ALL_HALVES(v, 8);
#endif
#if VL >= 8
    ADD_ALL_HALVES(v, 4);
#endif
    ADD_ALL_HALVES(v, 2);
    ADD_ALL_HALVES(v, 1);
    return v[0];
}

/* Returns the sums of the elements of a, b, c and d, added alike. On the way they lie in the order
 * a, c, b, d. */
INLINE V4 v_sum4(V a, V b, V c, V d) {
    V ab = ADD_HALVES(a, b, VL / 2, VL), cd = ADD_HALVES(c, d, VL / 2, VL),
      acbd = ADD_HALVES(ab, cd, VL / 4, VL / 2);
#if VL == 16
    acbd += V_SHUFFLE(acbd, acbd, XORED, 2);
#endif
#if VL >= 8
    acbd += V_SHUFFLE(acbd, acbd, XORED, 1);
#endif
    return V_CHOOSE4(acbd, 0, VL / 2, VL / 4, 3 * VL / 4);
}
INLINE float v_sum(V v) { return v_sum4(v, v, v, v)[0]; }

/* v_largest returns the largest element; none may be NaN. */
#define ROTATED(i, n) (((i) + (n)) % VL)
INLINE float v_largest(V v) {
    v = v_max(v, V_SHUFFLE(v, v, ROTATED, 8)); /* of 8 elements or four it is v again */
    v = v_max(v, V_SHUFFLE(v, v, ROTATED, 4));
    v = v_max(v, V_SHUFFLE(v, v, ROTATED, 2));
    return v_max(v, V_SHUFFLE(v, v, ROTATED, 1))[0];
}

/* Returns e^x within 2 ulp for x <= 88, 0 below -87, NaN of NaN. x = n ln2 + r, e^r as its series,
 * 2^n into the exponent bits. */
INLINE V v_exp(V x) {
    float round = 0x1.8p23f; /* x + round leaves the nearest integer in the low bits */
    VI tiny = x < -87.0f;
    x = v_max(v_min(x, v_set(88)), v_set(-87));
    V shifted = v_fma(x, v_set(0x1.715476p0f), v_set(round)), n = shifted - round;
    V r = v_fma(n, v_set(-0x1.7f7d1cp-20f), v_fma(n, v_set(-0x1.62e4p-1f), x));
    V e = v_set(1 / 5040.0f);
    float series[] = {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f};
    UNROLL
    for (int i = 0; i < 7; i++)
        e = v_fma(e, r, v_set(series[i]));
    return v_select(tiny, v_set(0), (V)((VI)e + ((VI)shifted << 23)));
}

#endif
