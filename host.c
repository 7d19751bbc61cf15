/* host.c: the device that is this CPU. The arithmetic of one OPT layer and of the next token, as plain C on plain
 * pointers; each function is the specification of the CUDA launcher of the same name.
 *
 * Paper: section 3 (x.w_Q ... relu(t_out.w_1).w_2), section 4.2 (computation delegation: attention where the KV lives).
 *
 * Contract. Batch invariance: an output element is computed by one fixed sequence of float operations, whatever the
 * other rows are, wherever its tile lies, however many threads run, whatever the page size. So every sum has one order:
 *   linear     within a block of KC, lane l of a vector adds the products l, l + VL, l + 2 VL ...; the lanes are
 *              added as a tree; the blocks are added in order. Tiles of any size and edge run this same sequence.
 *   attention  tokens go in blocks of BLOCK by their index in the sequence, with a running maximum (an online softmax);
 *              prefill and decode share every step, so decode of token t equals row t of prefill, bit for bit.
 * Nothing is static but the number of threads and a scratch buffer per thread, so any lanes may call at once.
 * Read next: flexgen.c, or flexgen.cu for the same functions on a GPU. */
#include <math.h>
#include <pthread.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "simd.h"

// ---------------------------------------------------------------------------------------------------------------
// f16, threads, scratch
// ---------------------------------------------------------------------------------------------------------------

#ifdef __F16C__
float f16_to_f32(f16 x) { return _cvtsh_ss(x); }
f16 f32_to_f16(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
float f16_to_f32(f16 x) {
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
}

f16 f32_to_f16(float x) {
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
}
#endif

const char *host_isa(void) { return ISA; }

#ifdef _OPENMP
static int threads_asked;
static int host_threads(void) { return threads_asked ? threads_asked : omp_get_num_procs(); }
int host_set_threads(int threads) {
    threads_asked = threads < 0 ? 0 : threads > 1024 ? 1024 : threads;
    return host_threads();
}
/* The loop below, its iterations dealt to the threads, if there is enough work. Which thread runs which never matters. */
#define PARALLEL_FOR(when, how) PRAGMA(omp parallel for num_threads(host_threads()) schedule(how) if (when))
#else
static int host_threads(void) { return 1; }
int host_set_threads(int threads) {
    (void)threads;
    return 1;
}
#define PARALLEL_FOR(when, how)
#endif

enum { ENOUGH = 1 << 17 }; /* multiplications (or as much other work) that pay for waking the threads */

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void scratch_init(void) { CHECK(pthread_key_create(&scratch_key, free) == 0); }

/* This thread's working memory, at least that many floats with anything in them. It grows to the largest need, so a
 * steady loop allocates nothing; it is freed when the thread ends. Valid until the thread asks again. */
static float *scratch(size_t floats) {
    static _Thread_local size_t have;
    pthread_once(&scratch_once, scratch_init);
    float *buffer = pthread_getspecific(scratch_key);
    if (have < floats) {
        buffer = xrealloc(buffer, floats, sizeof *buffer);
        CHECK(pthread_setspecific(scratch_key, buffer) == 0);
        have = floats;
    }
    return buffer;
}

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }
static int round_up(int a, int b) { return (a + b - 1) / b * b; }

// ---------------------------------------------------------------------------------------------------------------
// The two tiles that everything below is made of. They are inlined for each constant mr and unrolled, so that the
// sums stay in registers.
// ---------------------------------------------------------------------------------------------------------------

/* sum[i][j] += x[i] . w[j] for mr rows of x and NR rows of w, over k. */
INLINE void dot_tile(float *sum, size_t sum_ld, const float *x, size_t x_ld, const f16 *const w[NR], int k, const int mr) {
    V acc[6][NR] = {{{0}}}, a[6];
    for (int p = 0; p < k; p += VL) {
        int n = k - p;
        if (n >= VL) {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_load(x + i * x_ld + p);
        } else {
            UNROLL
            for (int i = 0; i < mr; i++) a[i] = v_load_part(x + i * x_ld + p, n);
        }
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b = n >= VL ? v_load_f16(w[j] + p) : v_load_f16_part(w[j] + p, n);
            UNROLL
            for (int i = 0; i < mr; i++) acc[i][j] = v_fma(a[i], b, acc[i][j]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        V4 s = v_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]), old;
        memcpy(&old, sum + i * sum_ld, sizeof old);
        s += old;
        memcpy(sum + i * sum_ld, &s, sizeof s);
    }
}

static void dot_rows(float *sum, size_t sum_ld, const float *x, size_t x_ld, const f16 *const w[NR], int k, int mr) {
    if (mr == 1) dot_tile(sum, sum_ld, x, x_ld, w, k, 1);
    if (mr == 2) dot_tile(sum, sum_ld, x, x_ld, w, k, 2);
    if (mr == 3) dot_tile(sum, sum_ld, x, x_ld, w, k, 3);
    if (mr == 4) dot_tile(sum, sum_ld, x, x_ld, w, k, 4);
    if (mr == 5) dot_tile(sum, sum_ld, x, x_ld, w, k, 5);
    if (mr == 6) dot_tile(sum, sum_ld, x, x_ld, w, k, 6);
}

/* o[i] += sum over t < nt of p[i][t] v[t], in the order of t, for mr rows and nv vectors' worth of columns. The last
 * vector may be cut to `last` columns of v; o is padded. */
INLINE void weigh_tile(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int d, int nt,
                       const int last, const int nv, const int mr) {
    V acc[6][4], a[6];
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++) acc[i][u] = v_load(o + i * o_ld + d + u * VL);
    }
    for (int t = 0; t < nt; t++) {
        UNROLL
        for (int i = 0; i < mr; i++) a[i] = v_set(p[i * p_ld + t]);
        UNROLL
        for (int u = 0; u < nv; u++) {
            V b = v_load_f16_part(v[t] + d + u * VL, last);
            UNROLL
            for (int i = 0; i < mr; i++) acc[i][u] = v_fma(a[i], b, acc[i][u]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++) v_store(o + i * o_ld + d + u * VL, acc[i][u]);
    }
}

INLINE void weigh_columns(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int hd, int nt,
                          const int mr) {
    int d = 0;
    for (; d + 4 * VL <= hd; d += 4 * VL) weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 4, mr);
    for (; d + VL <= hd; d += VL) weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 1, mr);
    if (d < hd) weigh_tile(o, o_ld, p, p_ld, v, d, nt, hd - d, 1, mr);
}

static void weigh_rows(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v, int hd, int nt, int mr) {
    if (mr == MR)
        weigh_columns(o, o_ld, p, p_ld, v, hd, nt, MR);
    else
        for (int i = 0; i < mr; i++) weigh_columns(o + i * o_ld, o_ld, p + i * p_ld, p_ld, v, hd, nt, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// Rows: embed, layernorm, linear
// ---------------------------------------------------------------------------------------------------------------

INLINE V load_any(const void *p, Type type, size_t at, int n) {
    if (type == F16) return v_load_f16_part((const f16 *)p + at, n);
    if (type == F32) return v_load_part((const float *)p + at, n);
    V v = {0}; /* BF16 is the upper half of a float */
    for (int i = 0; i < VL && i < n; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)p)[at + i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        v[i] = f;
    }
    return v;
}

INLINE void store_any(void *p, Type type, size_t at, V v, int n) {
    if (type == F32)
        v_store_part((float *)p + at, v, n);
    else
        for (int i = 0; i < VL && i < n; i++) ((f16 *)p)[at + i] = f32_to_f16(v[i]);
}

void host_embed(void *y, Type y_type, const void *table, Type type, size_t table_ld, const int32_t *idx, int rows, int cols,
                bool add) {
    CHECK((y_type == F32 || y_type == F16) && (type == F16 || type == BF16 || type == F32));
    PARALLEL_FOR((size_t)rows * cols > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        size_t row = (size_t)r * cols;
        for (int c = 0; c < cols; c += VL) {
            V v = load_any(table, type, idx[r] * table_ld + c, cols - c);
            store_any(y, y_type, row + c, add ? load_any(y, y_type, row + c, cols - c) + v : v, cols - c);
        }
    }
}

/* The sum over a row of (x - shift)^power, power 1 or 2. */
static float row_sum(const float *x, float shift, int power, int cols) {
    V sum = {0};
    int c = 0;
    for (; c + VL <= cols; c += VL) {
        V d = v_load(x + c) - shift;
        sum += power == 1 ? d : d * d;
    }
    float tail = 0;
    for (; c < cols; c++) tail += power == 1 ? x[c] - shift : (x[c] - shift) * (x[c] - shift);
    return v_sum(sum) + tail;
}

void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols) {
    PARALLEL_FOR((size_t)rows * cols > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        const float *in = x + (size_t)r * cols;
        float *out = y + (size_t)r * cols;
        float mean = row_sum(in, 0, 1, cols) / cols;
        float scale = 1 / sqrtf(row_sum(in, mean, 2, cols) / cols + 1e-5f);
        for (int c = 0; c < cols; c += VL) {
            int n = cols - c;
            V v = (v_load_part(in + c, n) - mean) * scale;
            v_store_part(out + c, v * v_load_f16_part(w + c, n) + v_load_f16_part(b + c, n), n);
        }
    }
}

/* A task is a block of mc x nc outputs. KC columns of a tile's x and of a task's w stay in the caches. Few rows of x
 * read w from memory, so their tasks are narrow, which reads it nearly in sequence. */
enum { KC = 2048, MC = 96, NC = 256, NC_FEW = 16 };

typedef struct {
    void *y;
    Type y_type;
    size_t y_ld;
    const float *x;
    const f16 *w, *b;
    const float *residual;
    bool relu;
    int k;
} Linear;

/* Columns col .. col+nc of row r, from their sums. */
static void linear_finish(const Linear *l, const float *sum, size_t r, size_t col, int nc) {
    size_t at = r * l->y_ld + col;
    for (int j = 0; j < nc; j += VL) {
        int n = nc - j;
        V v = v_load(sum + j);
        if (l->b) v += v_load_f16_part(l->b + col + j, n);
        if (l->relu) v = v_select(v < 0.0f, v_set(0), v);
        if (l->residual) v += v_load_part(l->residual + at + j, n);
        store_any(l->y, l->y_type, at + j, v, n);
    }
}

static void linear_task(const Linear *l, int row, int mc, int col, int nc) {
    float sum[MC * NC];
    int ld = round_up(nc, VL);
    memset(sum, 0, (size_t)mc * ld * sizeof *sum);
    for (int k0 = 0; k0 < l->k; k0 += KC) {
        for (int i = 0; i < mc; i += MR) {
            for (int j = 0; j < nc; j += NR) {
                const f16 *w[NR]; /* past the last column the last one again: its sums are not used */
                for (int u = 0; u < NR; u++) w[u] = l->w + (size_t)(col + min_int(j + u, nc - 1)) * l->k + k0;
                dot_rows(sum + i * ld + j, ld, l->x + (size_t)(row + i) * l->k + k0, l->k, w, min_int(KC, l->k - k0),
                         min_int(MR, mc - i));
            }
        }
    }
    for (int i = 0; i < mc; i++) linear_finish(l, sum + i * ld, row + i, col, nc);
}

void host_linear(void *y, Type y_type, size_t y_ld, const float *x, const f16 *w, const f16 *b, const float *residual,
                 bool relu, int m, int n, int k) {
    CHECK(y_type == F32 || y_type == F16);
    Linear l = {y, y_type, y_ld, x, w, b, residual, relu, k};
    int nc = m <= MC / 2 ? NC_FEW : NC, row_tasks = (m + MC - 1) / MC;
    while (nc > NC_FEW && row_tasks * (n / nc) < 4 * host_threads()) nc /= 2; /* enough tasks to deal out evenly */
    int col_tasks = (n + nc - 1) / nc;
    /* whoever is free takes the next: a copy beside may keep one of the threads from its core */
    PARALLEL_FOR((double)m * n * k > ENOUGH, dynamic)
    for (int task = 0; task < row_tasks * col_tasks; task++) {
        int row = task / col_tasks * MC, col = task % col_tasks * nc;
        linear_task(&l, row, min_int(MC, m - row), col, min_int(nc, n - col));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Attention: softmax(q k^T / sqrt(hd)) v, one block of tokens after another (section 3; 4.2 for who runs it)
// ---------------------------------------------------------------------------------------------------------------

enum { BLOCK = 64 }; /* tokens */

/* What a query has seen: m the largest score, l the sum of e^(score - m), o the sum of e^(score - m) v. */
typedef struct {
    float m, l;
} Seen;

/* Turns n scores of a block into weights, zeros after them, and rescales what was seen before. */
static void softmax_block(float score[BLOCK], int n, Seen *seen, float *o, int hd) {
    V top = v_set(seen->m);
    for (int t = n; t < BLOCK; t++) score[t] = -INFINITY;
    for (int t = 0; t < BLOCK; t += VL) top = v_max(top, v_load(score + t));
    float m = v_largest(top);
    V sum = {0};
    for (int t = 0; t < BLOCK; t += VL) {
        V p = v_exp(v_load(score + t) - m);
        v_store(score + t, p);
        sum += p;
    }
    float scale = exp1(seen->m - m);
    if (scale != 1)
        for (int d = 0; d < hd; d += VL) v_store(o + d, v_load(o + d) * scale);
    seen->l = seen->l * scale + v_sum(sum);
    seen->m = m;
}

/* Element `at` of out and the hd-1 after it. */
static void attend_finish(void *out, Type type, size_t at, const float *o, Seen seen, int hd) {
    for (int d = 0; d < hd; d += VL) store_any(out, type, at + d, v_load(o + d) / seen.l, hd - d);
}

/* q[rows][hd] = in * hd^-1/2, as OPT scales it; row i of in begins at element at + i * in_ld. */
static void scale_q(float *q, const void *in, Type type, size_t at, size_t in_ld, int rows, int hd) {
    V scale = v_set(1 / sqrtf((float)hd));
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < hd; d += VL)
            v_store_part(q + (size_t)i * hd + d, load_any(in, type, at + i * in_ld + d, hd - d) * scale, hd - d);
}

/* Queries of one head that attend_prefill takes together: each block of k and v is gathered once for all of them. */
enum { QUERIES = 96 };

typedef struct {
    float *q, *o; /* (QUERIES, hd) scaled; (QUERIES, hd padded) */
    f16 *k, *v;   /* (BLOCK, hd): the head's part of a block, row by row */
    float score[6 * BLOCK];
    const f16 *krow[BLOCK + NR], *vrow[BLOCK];
    Seen seen[QUERIES];
    int hd, hdp;
} Prefill;

/* Rows i .. i+mr of the queries, the first at position pos, meet tokens t0 .. t0+nt. */
static void prefill_tile(Prefill *a, int i, int mr, int pos, int t0, int nt) {
    nt = min_int(nt, pos + mr - t0);
    if (nt <= 0) return;
    float *o = a->o + (size_t)i * a->hdp;
    memset(a->score, 0, sizeof a->score);
    for (int t = 0; t < nt; t += NR) dot_rows(a->score + t, BLOCK, a->q + (size_t)i * a->hd, a->hd, a->krow + t, a->hd, mr);
    int common = max_int(0, min_int(nt, pos + 1 - t0)); /* tokens that all of the rows may see */
    for (int r = 0; r < mr; r++) {
        int n = min_int(nt, pos + r + 1 - t0);
        if (n > 0) softmax_block(a->score + r * BLOCK, n, &a->seen[i + r], o + r * a->hdp, a->hd);
    }
    weigh_rows(o, a->hdp, a->score, BLOCK, a->vrow, a->hd, common, mr);
    for (int r = 0; r < mr; r++) {
        int n = min_int(nt, pos + r + 1 - t0);
        if (n > common)
            weigh_rows(o + r * a->hdp, a->hdp, a->score + r * BLOCK + common, BLOCK, a->vrow + common, a->hd, n - common,
                       1);
    }
}

/* Queries q0 .. q0+nq of one head of one sequence of s tokens; o, q, k, v point at its token 0. */
static void prefill_task(float *o, const float *q, const f16 *k, const f16 *v, int q0, int nq, int h1, int hd) {
    Prefill a = {.hd = hd, .hdp = round_up(hd, VL)};
    a.q = scratch((size_t)QUERIES * (hd + a.hdp) + BLOCK * hd);
    a.o = a.q + (size_t)QUERIES * hd;
    a.k = (f16 *)(a.o + (size_t)QUERIES * a.hdp);
    a.v = a.k + (size_t)BLOCK * hd;
    scale_q(a.q, q, F32, (size_t)q0 * h1, h1, nq, hd);
    memset(a.o, 0, (size_t)nq * a.hdp * sizeof *a.o);
    for (int i = 0; i < nq; i++) a.seen[i] = (Seen){-INFINITY, 0};
    for (int t0 = 0; t0 < q0 + nq; t0 += BLOCK) {
        int nt = min_int(BLOCK, q0 + nq - t0);
        for (int t = 0; t < nt; t++) {
            size_t at = (size_t)(t0 + t) * 2 * h1;
            a.krow[t] = memcpy(a.k + (size_t)t * hd, k + at, (size_t)hd * sizeof *k);
            a.vrow[t] = memcpy(a.v + (size_t)t * hd, v + at, (size_t)hd * sizeof *v);
        }
        for (int t = nt; t < nt + NR; t++) a.krow[t] = a.krow[nt - 1]; /* fills the last tile; its scores are not used */
        for (int i = 0; i < nq; i += MR) prefill_tile(&a, i, min_int(MR, nq - i), q0 + i, t0, nt);
    }
    for (int i = 0; i < nq; i++) attend_finish(o, F32, (size_t)(q0 + i) * h1, a.o + (size_t)i * a.hdp, a.seen[i], hd);
}

void host_attend_prefill(float *o, const float *q, const f16 *kv, const int32_t *start, int nseq, int h1, int nh) {
    int hd = h1 / nh, longest = 0;
    for (int r = 0; r < nseq; r++) longest = max_int(longest, start[r + 1] - start[r]);
    int blocks = (longest + QUERIES - 1) / QUERIES;
    PARALLEL_FOR((double)longest * longest * h1 * nseq > ENOUGH, dynamic)
    for (int task = 0; task < nseq * nh * blocks; task++) {
        int r = task / (nh * blocks), h = task / blocks % nh, q0 = task % blocks * QUERIES;
        int s = start[r + 1] - start[r];
        size_t row = start[r], head = (size_t)h * hd;
        const f16 *k = kv + row * 2 * h1 + head;
        if (q0 < s) prefill_task(o + row * h1 + head, q + row * h1 + head, k, k + h1, q0, min_int(QUERIES, s - q0), h1, hd);
    }
}

/* Decode: heads that one task takes together, so that a token's k is read in long runs, and tokens whose v meet in
 * registers. */
enum { HEADS = 16, WEIGH = 8 };

typedef struct {
    const f16 *k, *v; /* the first head of the task in page 0 */
    const int32_t *pages;
    int page_tokens, h1, nh, hd, hdp;
    float *q, *o, *score; /* (nh, hd) scaled; (nh, hd padded); (nh, BLOCK) */
    const f16 *krow[BLOCK + NR], *vrow[BLOCK];
    Seen seen[HEADS];
} Decode;

/* Where the k (base a->k) or v (base a->v) of tokens t0 .. t0+nt lies. */
static void find_rows(const f16 **row, const Decode *a, const f16 *base, int t0, int nt) {
    for (int t = 0; t < nt; t++) {
        int page = a->pages[(t0 + t) / a->page_tokens];
        row[t] = base + ((size_t)page * a->page_tokens + (t0 + t) % a->page_tokens) * a->h1;
    }
}

/* Asks for n elements, from column d on, of some rows. Pages lie anywhere, so the processor cannot foresee them; we know
 * them a block ahead: reading k asks for the same tokens' v, reading v asks for the next block's k. */
INLINE void prefetch_rows(const f16 *const *row, int rows, int d, int n) {
    for (int t = 0; t < rows; t++)
        for (int at = 0; at < n; at += 32) __builtin_prefetch(row[t] + d + at, 0, 2);
}

static void score_block(Decode *a, int nt) {
    memset(a->score, 0, (size_t)a->nh * BLOCK * sizeof *a->score);
    for (int t = nt; t < nt + NR; t++) a->krow[t] = a->krow[nt - 1]; /* fills the last tile; its scores are not used */
    for (int t = 0; t < nt; t += NR) {
        for (int d = 0, h = 0; h < a->nh; h++, d += a->hd) {
            const f16 *k[NR];
            for (int u = 0; u < NR; u++) k[u] = a->krow[t + u] + d;
            prefetch_rows(a->vrow + t, min_int(NR, nt - t), d, a->hd);
            dot_rows(a->score + h * BLOCK + t, BLOCK, a->q + d, a->hd, k, a->hd, 1);
        }
    }
}

static void weigh_block(Decode *a, int nt, int next_nt) {
    for (int t = 0; t < nt; t += WEIGH) {
        for (int d = 0, h = 0; h < a->nh; h++, d += a->hd) {
            const f16 *v[WEIGH];
            int n = min_int(WEIGH, nt - t);
            for (int u = 0; u < n; u++) v[u] = a->vrow[t + u] + d;
            prefetch_rows(a->krow + t, min_int(WEIGH, next_nt - t), d, a->hd);
            weigh_rows(a->o + h * a->hdp, a->hdp, a->score + h * BLOCK + t, BLOCK, v, a->hd, n, 1);
        }
    }
}

/* The heads of `a` for one sequence of len tokens; the first begins at element `at` of o and q. */
static void attend_task(Decode *a, void *o, const void *q, Type type, size_t at, int len) {
    a->q = scratch((size_t)a->nh * (a->hd + a->hdp + BLOCK));
    a->o = a->q + (size_t)a->nh * a->hd;
    a->score = a->o + (size_t)a->nh * a->hdp;
    scale_q(a->q, q, type, at, a->hd, a->nh, a->hd);
    memset(a->o, 0, (size_t)a->nh * a->hdp * sizeof *a->o);
    for (int h = 0; h < a->nh; h++) a->seen[h] = (Seen){-INFINITY, 0};
    find_rows(a->krow, a, a->k, 0, min_int(BLOCK, len));
    for (int t0 = 0; t0 < len; t0 += BLOCK) {
        int nt = min_int(BLOCK, len - t0), next_nt = min_int(BLOCK, len - t0 - nt);
        find_rows(a->vrow, a, a->v, t0, nt);
        score_block(a, nt);
        find_rows(a->krow, a, a->k, t0 + nt, next_nt);
        for (int h = 0; h < a->nh; h++) softmax_block(a->score + h * BLOCK, nt, &a->seen[h], a->o + h * a->hdp, a->hd);
        weigh_block(a, nt, next_nt);
    }
    for (int h = 0; h < a->nh; h++) attend_finish(o, type, at + h * a->hd, a->o + h * a->hdp, a->seen[h], a->hd);
}

void host_attend(void *o, const void *q, Type act_type, const void *keys, const void *values, const int32_t *pages,
                 const int32_t *len, int nseq, int max_pages, int page_tokens, int h1, int nh, Quant quant) {
    const f16 *k = keys, *v = values;
    CHECK((act_type == F32 || act_type == F16) && !quant.bits);
    int hd = h1 / nh, total = 0, threads = host_threads();
    for (int r = 0; r < nseq; r++) total = max_int(total, len[r]);
    int group = max_int(1, min_int(min_int(nh, HEADS), nseq * nh / threads)), groups = (nh + group - 1) / group;
    PARALLEL_FOR((double)total * nseq * h1 > ENOUGH, dynamic)
    for (int task = 0; task < nseq * groups; task++) {
        int r = task / groups, h = task % groups * group;
        size_t head = (size_t)h * hd, at = (size_t)r * h1 + head;
        Decode a = {
            .k = k + head, .v = v + head, .pages = pages + (size_t)r * max_pages, .page_tokens = page_tokens, .h1 = h1};
        a.nh = min_int(group, nh - h), a.hd = hd, a.hdp = round_up(hd, VL);
        attend_task(&a, o, q, act_type, at, len[r]);
    }
}

void host_append(void *keys, void *values, const f16 *kv, const int32_t *seq, const int32_t *pos, const int32_t *pages,
                 int rows, int max_pages, int page_tokens, int h1, int nh, Quant quant) {
    f16 *k = keys, *v = values;
    CHECK(nh && !quant.bits);
    for (int r = 0; r < rows; r++) {
        int page = pages[(size_t)seq[r] * max_pages + pos[r] / page_tokens];
        size_t at = ((size_t)page * page_tokens + pos[r] % page_tokens) * h1;
        memcpy(k + at, kv + (size_t)r * 2 * h1, (size_t)h1 * sizeof *k);
        memcpy(v + at, kv + (size_t)r * 2 * h1 + h1, (size_t)h1 * sizeof *v);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The next token
// ---------------------------------------------------------------------------------------------------------------

static uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Uniform in [0, 1): a hash of what is drawn for, so that nothing else can change it. */
static double draw(uint64_t seed, int32_t prompt, int32_t pos) {
    return (double)(mix(mix(mix(seed) ^ (uint32_t)prompt) ^ (uint32_t)pos) >> 11) * 0x1p-53;
}

static int pick_greedy(const float *logits, int vocab) {
    V top = v_set(-INFINITY); /* no comparison with NaN is true, so none gets in */
    int i = 0;
    for (; i + VL <= vocab; i += VL) top = v_max(top, v_load(logits + i));
    float best = v_largest(top);
    for (; i < vocab; i++) best = best < logits[i] ? logits[i] : best;
    for (i = 0; i < vocab; i++)
        if (logits[i] == best) return i;
    return 0;
}

/* Whether token a comes before b: more probable, or as probable with a lower id. */
static bool before(const float *p, int a, int b) { return p[a] > p[b] || (p[a] == p[b] && a < b); }

static void heap_sink(int *heap, int n, int at, const float *p) {
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(p, heap[child + 1], heap[child])) child++;
        if (before(p, heap[at], heap[child])) return;
        int swap = heap[at];
        heap[at] = heap[child], heap[child] = swap;
    }
}

/* Puts the first tokens of ids[vocab] in order of probability at its END, the most probable last, and returns how many:
 * top_k, or fewer whose mass reaches top_p of what top_k left. A heap, so that only what is kept gets sorted. */
static int pick_cut(int *ids, const float *p, double *mass, const Sampling *s, int vocab) {
    bool cut_k = s->top_k > 0 && s->top_k < vocab;
    int kept = 0, most = cut_k ? s->top_k : vocab;
    double want = s->top_p < 1 ? s->top_p * *mass : INFINITY, sum = 0;
    for (int i = vocab / 2; i-- > 0;) heap_sink(ids, vocab, i, p);
    while (kept < most && (cut_k || kept == 0 || sum < want)) {
        int first = ids[0], left = vocab - ++kept;
        ids[0] = ids[left], ids[left] = first;
        heap_sink(ids, left, 0, p);
        sum += p[first];
    }
    if (cut_k && s->top_p < 1) {
        want = s->top_p * sum, most = kept, sum = 0;
        for (kept = 0; kept < most && (kept == 0 || sum < want); kept++) sum += p[ids[vocab - 1 - kept]];
    }
    *mass = sum;
    return kept;
}

static int pick_sample(const float *logits, double u, const Sampling *s, int vocab) {
    int best = pick_greedy(logits, vocab), padded = round_up(vocab, VL);
    float *p = scratch((size_t)padded * 2);
    int *ids = (int *)(p + padded);
    double mass = 0;
    for (int i = 0; i < vocab; i += VL) {
        V x = v_load_part(logits + i, vocab - i), d = (x - logits[best]) / s->temperature;
        v_store(p + i, v_select(d == d, v_exp(d), v_set(0))); /* NaN weighs nothing */
    }
    for (int i = 0; i < vocab; i++) ids[vocab - 1 - i] = i, mass += p[i];
    bool cut = (s->top_k > 0 && s->top_k < vocab) || s->top_p < 1;
    int kept = cut ? pick_cut(ids, p, &mass, s, vocab) : vocab;
    double sum = 0;
    for (int i = 0; i < kept; i++) {
        int id = ids[vocab - 1 - i];
        sum += p[id];
        if (sum > u * mass) return id;
    }
    return best; /* nothing has a weight: infinities, or no numbers at all */
}

void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling,
               int rows, int vocab) {
    PARALLEL_FOR((size_t)rows * vocab > ENOUGH, static)
    for (int r = 0; r < rows; r++) {
        const float *row = logits + (size_t)r * vocab;
        ids[r] = sampling->temperature > 0 ? pick_sample(row, draw(sampling->seed, prompt[r], pos[r]), sampling, vocab)
                                           : pick_greedy(row, vocab);
    }
}
