/* host_attend.c: attention on this CPU: softmax(q k^T / sqrt(hd)) v of whole prompts, and of one
 * new token to the cache where it lives (section 3; section 4.2, computation delegation), packed
 * and sparse too (section 5).
 *
 * Contract: tokens go in blocks of BLOCK by their index in the sequence, with a running maximum (an
 * online softmax). Prefill and decode share every step, so decode of token t equals row t of
 * prefill, bit for bit. Of packed heads only the codes are multiplied (quant.h).
 * Read next: flexgen.cu. */
#include <math.h>

#include "device/parts.h"

// -------------------------------------------------------------------------------------------------
// The two tiles that attention is made of. They are inlined for each constant mr and unrolled, so
// that the sums stay in registers.
// -------------------------------------------------------------------------------------------------

/* acc[i * NR + j] += x[i] . w[j], lane by lane, for mr rows of x and NR rows of w, over k. */
INLINE void dot_lanes(V *acc, const float *x, size_t x_ld, const f16 *const w[NR], int k,
                      const int mr) {
    V a[6];
    for (int p = 0; p < k; p += VL) {
        int n = k - p;
        if (n >= VL) {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_load(x + i * x_ld + p);
        } else {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_load_part(x + i * x_ld + p, n);
        }
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b = n >= VL ? v_load_f16(w[j] + p) : v_load_f16_part(w[j] + p, n);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i * NR + j] = v_fma(a[i], b, acc[i * NR + j]);
        }
    }
}

/* dot[i][j] = x[i] . w[j], never -0. */
INLINE void dot_tile(float *dot, size_t dot_ld, const float *x, size_t x_ld, const f16 *const w[NR],
                     int k, const int mr) {
    V acc[6 * NR] = {{0}}, *row = acc;
    dot_lanes(acc, x, x_ld, w, k, mr);
    UNROLL
    for (int i = 0; i < mr; i++, row += NR) {
        V4 s = v_sum4(row[0], row[1], row[2], row[3]) + (V4){0};
        memcpy(dot + i * dot_ld, &s, sizeof s);
    }
}

static void dot_rows(float *dot, size_t dot_ld, const float *x, size_t x_ld, const f16 *const w[NR],
                     int k, int mr) {
    FOR_ROWS(mr, dot_tile, dot, dot_ld, x, x_ld, w, k);
}

/* o[i] += sum over t < nt of p[i][t] v[t], in the order of t, for mr rows and nv vectors' worth of
 * columns. The last vector may be cut to `last` columns of v; o is padded. */
INLINE void weigh_tile(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v,
                       int d, int nt, const int last, const int nv, const int mr) {
    V acc[6][4], a[6];
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++)
            acc[i][u] = v_load(o + i * o_ld + d + u * VL);
    }
    for (int t = 0; t < nt; t++) {
        UNROLL
        for (int i = 0; i < mr; i++)
            a[i] = v_set(p[i * p_ld + t]);
        UNROLL
        for (int u = 0; u < nv; u++) {
            V b = v_load_f16_part(v[t] + d + u * VL, last);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i][u] = v_fma(a[i], b, acc[i][u]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++)
            v_store(o + i * o_ld + d + u * VL, acc[i][u]);
    }
}

INLINE void weigh_columns(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v,
                          int hd, int nt, const int mr) {
    int d = 0;
    for (; d + 4 * VL <= hd; d += 4 * VL)
        weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 4, mr);
    for (; d + VL <= hd; d += VL)
        weigh_tile(o, o_ld, p, p_ld, v, d, nt, VL, 1, mr);
    if (d < hd)
        weigh_tile(o, o_ld, p, p_ld, v, d, nt, hd - d, 1, mr);
}

static void weigh_rows(float *o, size_t o_ld, const float *p, size_t p_ld, const f16 *const *v,
                       int hd, int nt, int mr) {
    if (mr == MR)
        weigh_columns(o, o_ld, p, p_ld, v, hd, nt, MR);
    else
        for (int i = 0; i < mr; i++)
            weigh_columns(o + i * o_ld, o_ld, p + i * p_ld, p_ld, v, hd, nt, 1);
}

// -------------------------------------------------------------------------------------------------
// Attention: softmax(q k^T / sqrt(hd)) v, one block of tokens after another (section 3); prefill
// -------------------------------------------------------------------------------------------------

enum { BLOCK = 64 }; /* tokens */

/* What a query has seen: m the largest score, l the sum of e^(score - m), o the sum of e^(score -
 * m) v. */
typedef struct {
    float m, l;
} Seen;

/* score[n] becomes e^(score - *m), where *m is first raised to the largest, and is 0 from there up
 * to `room`, whole vectors. Returns the sum. */
INLINE float exponentiate(float *score, int n, const int room, float *m) {
    V top = v_set(*m), sum = {0};
    for (int t = n; t < room; t++)
        score[t] = -INFINITY;
    for (int t = 0; t < room; t += VL)
        top = v_max(top, v_load(score + t));
    *m = v_largest(top);
    for (int t = 0; t < room; t += VL) {
        V p = v_exp(v_load(score + t) - *m);
        v_store(score + t, p);
        sum += p;
    }
    return v_sum(sum);
}

/* Turns n scores of a block into weights, and rescales what was seen before. */
static void softmax_block(float *score, int n, Seen *seen, float *o, int hd) {
    float before = seen->m, sum = exponentiate(score, n, BLOCK, &seen->m),
          scale = v_exp(v_set(before - seen->m))[0];
    if (scale != 1)
        for (int d = 0; d < hd; d += VL)
            v_store(o + d, v_load(o + d) * scale);
    seen->l = seen->l * scale + sum;
}

/* Element `at` of out and the hd-1 after it. */
static void attend_finish(Tensor out, size_t at, const float *o, Seen seen, int hd) {
    for (int d = 0; d < hd; d += VL)
        store_any(out.at, out.type, at + d, v_load(o + d) / seen.l, hd - d);
}

/* q[rows][hd] = in * hd^-1/2, as OPT scales it; rows of in are in_ld apart. */
static void scale_q(float *q, const f16 *in, size_t in_ld, int rows, int hd) {
    V scale = v_set(1 / sqrtf((float)hd));
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < hd; d += VL)
            v_store_part(q + (size_t)i * hd + d,
                         v_load_f16_part(in + i * in_ld + d, hd - d) * scale, hd - d);
}

/* Queries of one head that attend_prefill takes together: each block of k and v is gathered once
 * for all of them. */
enum { QUERIES = 96 };

typedef struct {
    float *q, *o; /* (QUERIES, hd) scaled; (QUERIES, hd padded) */
    f16 *k, *v;   /* (BLOCK, hd): the head's part of a block, row by row */
    float score[6 * BLOCK];
    const f16 *krow[BLOCK + NR], *vrow[BLOCK];
    Seen seen[QUERIES];
    int hd, hdp;
} PrefillTask;

/* Rows i .. i+mr of the queries, the first at position pos, meet tokens t0 .. t0+nt. */
static void prefill_tile(PrefillTask *a, int i, int mr, int pos, int t0, int nt) {
    nt = imin(nt, pos + mr - t0);
    if (nt <= 0)
        return;
    float *o = a->o + (size_t)i * a->hdp;
    for (int t = 0; t < nt; t += NR)
        dot_rows(a->score + t, BLOCK, a->q + (size_t)i * a->hd, a->hd, a->krow + t, a->hd, mr);
    int common = imax(0, imin(nt, pos + 1 - t0)); /* tokens that all of the rows may see */
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0);
        if (n > 0)
            softmax_block(a->score + r * BLOCK, n, &a->seen[i + r], o + r * a->hdp, a->hd);
    }
    weigh_rows(o, a->hdp, a->score, BLOCK, a->vrow, a->hd, common, mr);
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0);
        if (n > common)
            weigh_rows(o + r * a->hdp, a->hdp, a->score + r * BLOCK + common, BLOCK,
                       a->vrow + common, a->hd, n - common, 1);
    }
}

/* Queries q0 .. q0+nq of one head of one sequence of s tokens; q, k, v and element `at` of o are of
 * its token 0. ld: of q, k and v. */
static void prefill_task(Tensor o, size_t at, const f16 *q, const f16 *k, const f16 *v, int q0,
                         int nq, size_t ld, int hd) {
    PrefillTask a = {.hd = hd, .hdp = round_up(hd, VL)};
    a.q = scratch((size_t)QUERIES * (hd + a.hdp) + BLOCK * hd);
    a.o = a.q + (size_t)QUERIES * hd;
    a.k = (f16 *)(a.o + (size_t)QUERIES * a.hdp);
    a.v = a.k + (size_t)BLOCK * hd;
    scale_q(a.q, q + q0 * ld, ld, nq, hd);
    memset(a.o, 0, (size_t)nq * a.hdp * sizeof *a.o);
    for (int i = 0; i < nq; i++)
        a.seen[i] = (Seen){-INFINITY, 0};
    for (int t0 = 0; t0 < q0 + nq; t0 += BLOCK) {
        int nt = imin(BLOCK, q0 + nq - t0);
        for (int t = 0; t < nt; t++) {
            size_t row = (t0 + t) * ld;
            a.krow[t] = memcpy(a.k + (size_t)t * hd, k + row, (size_t)hd * sizeof *k);
            a.vrow[t] = memcpy(a.v + (size_t)t * hd, v + row, (size_t)hd * sizeof *v);
        }
        for (int t = nt; t < nt + NR; t++)
            a.krow[t] = a.krow[nt - 1]; /* fills the last tile; its scores are not used */
        for (int i = 0; i < nq; i += MR)
            prefill_tile(&a, i, imin(MR, nq - i), q0 + i, t0, nt);
    }
    for (int i = 0; i < nq; i++)
        attend_finish(o, at + (size_t)(q0 + i) * o.cols, a.o + (size_t)i * a.hdp, a.seen[i], hd);
}

static int longest_prompt(const Op *op) {
    const int32_t *start = op->prefilled.start.at;
    int most = 0;
    for (int r = 0; r + 1 < op->prefilled.start.cols; r++)
        most = imax(most, start[r + 1] - start[r]);
    return most;
}

/* A task: QUERIES queries of one head of one sequence, if it has so many. */
static void prefill_tasks(const void *prefill, int first, int n) {
    const Op *op = prefill;
    const Tensor q = op->prefilled.q, kv = op->prefilled.kv;
    const int h1 = q.cols, hd = op->hd, nh = op->nh, blocks = ceil_div(longest_prompt(op), QUERIES);
    const int32_t *start = op->prefilled.start.at;
    for (int task = first; task < first + n; task++) {
        int r = task / (nh * blocks), h = task / blocks % nh, q0 = task % blocks * QUERIES;
        int s = start[r + 1] - start[r];
        size_t row = start[r], at = row * q.ld + (size_t)h * hd;
        const f16 *k = (const f16 *)kv.at + at;
        if (q0 < s)
            prefill_task(op->prefilled.o, row * h1 + (size_t)h * hd, (const f16 *)q.at + at, k,
                         k + h1, q0, imin(QUERIES, s - q0), q.ld, hd);
    }
}

void host_attend_prefill(const Op *op) {
    const int longest = longest_prompt(op), nseq = op->prefilled.start.cols - 1;
    host_share((double)longest * longest * op->prefilled.q.cols * nseq,
               nseq * op->nh * ceil_div(longest, QUERIES), prefill_tasks, op);
}

// -------------------------------------------------------------------------------------------------
// Decode attention to pages (section 4.2)
//
// A thread takes a task: some heads of one sequence. It goes through the sequence's tokens a block
// at a time. The page table says where a token's row of K and of V lies; of each row the task has
// the part of its heads, which lie side by side:
//
//     page table          rows of K                   of a task with 2 of 4 heads
//     t0 .. t3   ----->   t0 | h0 h1 [h2 h3] |                              t0   t1   t2   t3  ...
//     t4 .. t7   ---.     t1 | h0 h1 [h2 h3] |    q[h] . k[t] = score   h2   .    .    .    .
//                   |     ..                                            h3   .    .    .    .
//                   '->   t4 | h0 h1 [h2 h3] |
//
//     attend_task, for each block:   find_rows       where its tokens lie
//                                    score_block     score[h][t] = q[h] . k[t]
//                                    softmax_block   scores become weights
//                                    weigh_heads     o[h] += weight[h][t] v[t]
//     Sparse attention (section 5):
//     select_task                    the scores of all tokens; each head's largest, and what they
//     weigh weigh_task                     o[h], the weighted sum of each head's own tokens
//
// A head of K or V is F16, or packed; then it is multiplied as codes.
// -------------------------------------------------------------------------------------------------

enum {
    HEADS = 32, /* that a task takes at most ... */
    RUN = 6144, /* ... and their bytes of a token's k: long runs, of which a few blocks stay in the
                   second cache */
    WEIGH = 8,  /* tokens whose v meet in registers */
    TOGETHER = VL / NR, /* heads whose scores for NR tokens are the lanes of a vector */
};

/* A task: heads h .. h+nh-1 of sequence r, which has len tokens. */
typedef struct {
    const Op *op;
    int r, h, nh, hd, len;
    const int32_t *pages;
    size_t head_bytes; /* of a head in a page */
    size_t at;         /* the first head's first element in o */
    Table codes;       /* the codes as floats */
    float *sum_q;      /* (nh, groups, VL): of each group of q the sum, lane by lane */
} Heads;

/* Calls of `run`, one a task. */
typedef struct {
    const Op *op;
    void (*run)(Heads);
    int parts, most; /* tasks of a sequence, heads of a task */
    size_t head_bytes;
} Tasks;

/* Whether the pages that the op reads hold codes. */
static bool is_packed(const Op *op) { return op->attend.k.type == U8; }

static void attend_tasks(const void *all, int first, int n) {
    const Tasks *tasks = all;
    const Op *op = tasks->op;
    for (int i = first; i < first + n; i++) {
        Heads c = {
            .op = op, .r = i / tasks->parts, .h = i % tasks->parts * tasks->most, .hd = op->hd};
        c.nh = imin(tasks->most, op->nh - c.h);
        c.len = ((const int32_t *)op->attend.len.at)[c.r];
        c.pages = (const int32_t *)op->attend.pages.at + c.r * op->attend.pages.ld;
        c.at = (size_t)c.r * op->nh * c.hd + c.h * c.hd;
        c.head_bytes = tasks->head_bytes;
        c.codes = t_make(v_set(0), v_set(1));
        tasks->run(c);
    }
}

/* Calls `run` for every task; `tokens` of a sequence are the work. */
static void for_tasks(const Op *op, int tokens, void (*run)(Heads)) {
    const int nseq = op->attend.len.cols;
    const size_t head_bytes = is_packed(op) ? quant_bytes(op->hd) : op->hd * sizeof(f16);
    const int fit = imin(imin(op->nh, HEADS), (int)(RUN / head_bytes)),
              for_all = nseq * op->nh / host_threads();
    const int parts = ceil_div(op->nh, imax(1, imin(fit, for_all))),
              most = ceil_div(op->nh, parts); /* heads of a task */
    host_share((double)tokens * nseq * op->nh * op->hd, nseq * parts, attend_tasks,
               &(Tasks){op, run, parts, most, head_bytes});
}

static int longest(const Op *op) {
    const int32_t *len = op->attend.len.at;
    int most = 0;
    for (int r = 0; r < op->attend.len.cols; r++)
        most = imax(most, len[r]);
    return most;
}

/* The k or v of token t, which lies at `base` in pages: its part that the task has. */
static const uint8_t *find_row(const Heads *c, const void *base, int t) {
    const int page_tokens = c->op->page_tokens;
    size_t row = (size_t)c->pages[t / page_tokens] * page_tokens + t % page_tokens;
    return (const uint8_t *)base + (row * c->op->nh + c->h) * c->head_bytes;
}

/* A block's rows of K or V; room for NR more. */
typedef struct {
    int n;
    const uint8_t *at[BLOCK + NR];
} Rows;

/* Tokens t0 .. t0+BLOCK-1, or those that there are. */
static void find_rows(Rows *rows, const Heads *c, const void *base, int t0) {
    rows->n = imax(0, imin(BLOCK, c->len - t0));
    for (int t = 0; t < rows->n; t++)
        rows->at[t] = find_row(c, base, t0 + t);
}

/* Asks for a head of n rows, which begins at byte `at`. Pages lie anywhere, so the processor cannot
 * foresee them; we know them a block ahead: reading k asks for the same tokens' v, reading v asks
 * for the next block's k. */
INLINE void prefetch_rows(const uint8_t *const *row, int n, size_t at, size_t bytes) {
    for (int t = 0; t < n; t++)
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(row[t] + at + i, 0, 2);
}

/* n <= WEIGH heads of F16. */
static void read_heads(const f16 **plain, const uint8_t *const *head, int n) {
    for (int u = 0; u < n; u++)
        plain[u] = (const f16 *)(const void *)head[u];
}

/* Floats of a head's sums of q: VL lanes of each group. */
static int sums_of(int hd) { return ceil_div(hd, GROUP) * VL; }

/* to (nh, hd) = the task's q, scaled; and c->sum_q. */
static void take_q(Heads *c, float *to) {
    const Tensor q = c->op->attend.q;
    const int hd = c->hd;
    scale_q(to, (const f16 *)q.at + c->r * q.ld + (size_t)c->h * hd, hd, c->nh, hd);
    for (int h = 0; is_packed(c->op) && h < c->nh; h++)
        for (int d = 0; d < hd; d += VL) {
            float *sum = c->sum_q + h * sums_of(hd) + d / GROUP * VL;
            v_store(sum,
                    d % GROUP ? v_load(sum) + v_load(to + h * hd + d) : v_load(to + h * hd + d));
        }
}

/* The min and the scale of a group. */
INLINE void load_header(float header[2], const uint8_t *group) {
    f16 bits[2];
    memcpy(bits, group, sizeof bits);
    header[0] = f16_to_f32(bits[0]);
    header[1] = f16_to_f32(bits[1]);
}

/* acc[j] += q . k[j], lane by lane, for the `width` numbers of a group that begins at byte `group`
 * of each k: min times sum_q, the sum of these q, and scale times that of q code. */
INLINE void dot_codes(V acc[NR], const Table *codes, const float *q, V sum_q,
                      const uint8_t *const k[NR], size_t group, const int width) {
    V dot[NR] = {{0}};
    UNROLL
    for (int d = 0; d < width; d += 32) {
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b[32 / VL];
            t_block(b, codes, k[j] + group + GROUP_HEADER + d / 2);
            UNROLL
            for (int i = 0; i < imin(width - d, 32) / VL; i++)
                dot[j] = v_fma(v_load(q + d + i * VL), b[i], dot[j]);
        }
    }
    UNROLL
    for (int j = 0; j < NR; j++) {
        float header[2];
        load_header(header, k[j] + group);
        acc[j] = v_fma(v_set(header[1]), dot[j], v_fma(v_set(header[0]), sum_q, acc[j]));
    }
}

/* acc[j] += q . k[j], lane by lane, for NR heads of k. */
INLINE void dot_head(V acc[NR], const Heads *c, const float *q, const float *sum_q,
                     const uint8_t *const k[NR], const int hd, const bool packed) {
    if (!packed) {
        const f16 *plain[NR];
        read_heads(plain, k, NR);
        dot_lanes(acc, q, 0, plain, hd, 1);
        return;
    }
    size_t group = 0;
    for (int d = 0; d < hd; d += GROUP, group += GROUP_BYTES)
        dot_codes(acc, &c->codes, q + d, v_load(sum_q + d / GROUP * VL), k, group,
                  imin(GROUP, hd - d));
}

/* score[h * ld + t] = q[h] . k[t], never -0, for nh <= TOGETHER heads, which begin at byte `at` of
 * NR tokens' rows. Their sums are added together, which takes as long as one head's. The rows
 * `ahead` are asked for a head at a time: all heads at once are more requests than a processor can
 * have open. */
INLINE void score_tile(float *score, size_t ld, const Heads *c, const float *q, const float *sum_q,
                       const uint8_t *const row[NR], size_t at, const uint8_t *const *ahead,
                       int rows, const int nh, const int hd, const bool packed) {
    V acc[TOGETHER * NR] = {{0}};
    UNROLL
    for (int h = 0; h < TOGETHER; h++) {
        const uint8_t *head[NR];
        if (h >= nh)
            continue;
        for (int u = 0; u < NR; u++)
            head[u] = row[u] + at + h * c->head_bytes;
        prefetch_rows(ahead, rows, at + h * c->head_bytes,
                      packed ? c->head_bytes : hd * sizeof(f16));
        dot_head(acc + h * NR, c, q + h * hd, sum_q + h * sums_of(hd), head, hd, packed);
    }
    V sums = v_sums(acc) + v_set(0);
    for (int h = 0; h < nh; h++)
        memcpy(score + h * ld, (const float *)&sums + h * NR, NR * sizeof *score);
}

/* o += sum over t < nt of p[t] v[t], for `width` columns, a group: of p[t] scale code in the order
 * of t, and then of p[t] min. */
INLINE void weigh_codes(float *o, const Table *codes, const float *p, const uint8_t *const *v,
                        size_t group, int nt, const int width) {
    V acc[GROUP / VL];
    float low = 0;
    UNROLL
    for (int i = 0; i < GROUP / VL; i++)
        acc[i] = i < width / VL ? v_load(o + i * VL) : v_set(0);
    for (int t = 0; t < nt; t++) {
        float header[2];
        load_header(header, v[t] + group);
        V a = v_set(p[t] * header[1]);
        low += p[t] * header[0];
        UNROLL
        for (int d = 0; d < width; d += 32) {
            V b[32 / VL];
            t_block(b, codes, v[t] + group + GROUP_HEADER + d / 2);
            UNROLL
            for (int i = 0; i < imin(width - d, 32) / VL; i++)
                acc[d / VL + i] = v_fma(a, b[i], acc[d / VL + i]);
        }
    }
    UNROLL
    for (int i = 0; i < width / VL; i++)
        v_store(o + i * VL, acc[i] + low);
}

/* o[hd padded] += sum over t < nt <= WEIGH of p[t] v[t], in the order of t, for heads v[t]. */
INLINE void weigh_head(float *o, const Heads *c, const float *p, const uint8_t *const *v, int nt,
                       const int hd, const bool packed) {
    if (!packed) {
        const f16 *plain[WEIGH];
        read_heads(plain, v, nt);
        weigh_columns(o, 0, p, 0, plain, hd, nt, 1);
        return;
    }
    size_t group = 0;
    for (int d = 0; d < hd; d += GROUP, group += GROUP_BYTES)
        weigh_codes(o + d, &c->codes, p, v, group, nt, imin(GROUP, hd - d));
}

/* Calls name(..., hd, packed) with the head size, and whether codes are multiplied, as constants
 * for the usual ones, so that its loops are unrolled. */
#define FOR_HEAD_SIZE(c, name, ...)                \
    do {                                           \
        const int hd_ = (c)->hd;                   \
        if (is_packed((c)->op) && hd_ == 64)       \
            name(__VA_ARGS__, 64, true);           \
        else if (is_packed((c)->op) && hd_ == 128) \
            name(__VA_ARGS__, 128, true);          \
        else if (is_packed((c)->op) && hd_ == 80)  \
            name(__VA_ARGS__, 80, true);           \
        else if (is_packed((c)->op))               \
            name(__VA_ARGS__, hd_, true);          \
        else if (hd_ == 80)                        \
            name(__VA_ARGS__, 80, false);          \
        else if (hd_ == 64)                        \
            name(__VA_ARGS__, 64, false);          \
        else if (hd_ == 128)                       \
            name(__VA_ARGS__, 128, false);         \
        else                                       \
            name(__VA_ARGS__, hd_, false);         \
    } while (0)

/* score[h * ld + t] = q[h] . k[t] of a block's rows k, while the rows `ahead` are on their way. */
INLINE void score_heads(float *score, size_t ld, const Heads *c, const float *q, Rows *k,
                        const Rows *ahead, const int hd, const bool packed) {
    for (int t = k->n; t < k->n + NR; t++)
        k->at[t] = k->at[k->n - 1]; /* fills the last tile; its scores are not used */
    for (int t = 0; t < k->n; t += NR) {
        for (int h = 0; h < c->nh; h += TOGETHER) {
            const int n = imin(TOGETHER, c->nh - h);
            score_tile(score + h * ld + t, ld, c, q + (size_t)h * hd, c->sum_q + h * sums_of(hd),
                       k->at + t, h * c->head_bytes, ahead->at + t, imin(NR, ahead->n - t), n, hd,
                       packed);
        }
    }
}

static void score_block(float *score, size_t ld, const Heads *c, const float *q, Rows *k,
                        const Rows *ahead) {
    FOR_HEAD_SIZE(c, score_heads, score, ld, c, q, k, ahead);
}

/* o[h * ld] += the weighted sum of a block's rows v, weights p (nh, BLOCK). */
INLINE void weigh_heads(float *o, int ld, const Heads *c, const float *p, const Rows *v,
                        const Rows *ahead, const int hd, const bool packed) {
    for (int t = 0; t < v->n; t += WEIGH) {
        size_t at = 0;
        for (int h = 0; h < c->nh; h++, at += c->head_bytes) {
            const uint8_t *head[WEIGH];
            int n = imin(WEIGH, v->n - t);
            for (int u = 0; u < n; u++)
                head[u] = v->at[t + u] + at;
            prefetch_rows(ahead->at + t, imin(WEIGH, ahead->n - t), at, c->head_bytes);
            if (n == WEIGH) /* a constant */
                weigh_head(o + h * ld, c, p + h * BLOCK + t, head, WEIGH, hd, packed);
            else
                weigh_head(o + h * ld, c, p + h * BLOCK + t, head, n, hd, packed);
        }
    }
}

static void weigh_block(float *o, int ld, const Heads *c, const float *p, const Rows *v,
                        const Rows *ahead) {
    FOR_HEAD_SIZE(c, weigh_heads, o, ld, c, p, v, ahead);
}

static void attend_task(Heads c) {
    const Tensor k_pages = c.op->attend.k, v_pages = c.op->attend.v;
    const int hdp = round_up(c.hd, VL);
    float *q = scratch((size_t)c.nh * (c.hd + hdp + BLOCK + sums_of(c.hd))); /* (nh, hd) */
    float *o = q + (size_t)c.nh * c.hd,
          *score = o + (size_t)c.nh * hdp; /* (nh, hdp), (nh, BLOCK) */
    Rows k, v;
    Seen seen[HEADS];
    c.sum_q = score + (size_t)c.nh * BLOCK;
    take_q(&c, q);
    memset(o, 0, (size_t)c.nh * hdp * sizeof *o);
    for (int h = 0; h < c.nh; h++)
        seen[h] = (Seen){-INFINITY, 0};
    find_rows(&k, &c, k_pages.at, 0);
    for (int t0 = 0; t0 < c.len; t0 += BLOCK) {
        find_rows(&v, &c, v_pages.at, t0);
        score_block(score, BLOCK, &c, q, &k, &v);
        find_rows(&k, &c, k_pages.at, t0 + BLOCK);
        for (int h = 0; h < c.nh; h++)
            softmax_block(score + h * BLOCK, v.n, &seen[h], o + h * hdp, c.hd);
        weigh_block(o, hdp, &c, score, &v, &k);
    }
    for (int h = 0; h < c.nh; h++)
        attend_finish(c.op->attend.o, c.at + h * c.hd, o + h * hdp, seen[h], c.hd);
}

void host_attend(const Op *op) { for_tasks(op, longest(op), attend_task); }

// -------------------------------------------------------------------------------------------------
// Sparse attention (section 5): the tokens with the largest scores, and their v alone
// -------------------------------------------------------------------------------------------------

/* Whole numbers in the order of the scores, so that halving their range finds any of them; NaN is
 * the smallest, and so is what follows the last up to a whole vector. */
static void order_scores(int32_t *key, const float *score, int n) {
    for (int t = 0; t < n; t += VL) {
        V s = v_load_part(score + t, n - t); /* never -0: its sum began at 0 */
        VI bits = (VI)s, ordered = bits ^ (bits >> 31 & INT32_MAX);
        ordered = (VI)v_select(s == s, (V)ordered, (V)(bits * 0 + INT32_MIN));
        memcpy(key + t, &ordered, sizeof ordered);
    }
    for (int t = n; t < round_up(n, VL); t++)
        key[t] = INT32_MIN;
}

/* Bit i: whether key[i], i < VL, is at least `least`, which is above INT32_MIN. */
INLINE unsigned keys_from(const int32_t *key, int32_t least) {
    VI v;
    memcpy(&v, key, sizeof v);
    return v_bits(v >= least);
}

/* How many of n keys are at least that. */
static int count_keys(const int32_t *key, int n, int32_t least) {
    int count = 0;
    for (int t = 0; t < n; t += VL)
        count += __builtin_popcount(keys_from(key + t, least));
    return count;
}

/* The largest key that at least k of n reach, 1 <= k <= n; or another that just k reach. */
static int32_t kth_key(const int32_t *key, int n, int k) {
    int64_t low = INT32_MIN,
            high = (int64_t)INT32_MAX + 1; /* at least k reach low, fewer reach high */
    for (int reach = n; reach != k && high - low > 1;) {
        int64_t middle = low + (high - low) / 2;
        int m = count_keys(key, n, (int32_t)middle);
        if (m >= k) {
            low = middle;
            reach = m;
        } else
            high = middle;
    }
    return (int32_t)low;
}

/* The k largest of n scores, the earlier of equal ones, ascending. key: room for n, rounded up to
 * VL. */
static void select_tokens(int32_t *tokens, int32_t *key, const float *score, int n, int k) {
    if (k == 0)
        return;
    order_scores(key, score, n);
    int32_t least = kth_key(key, n, k);
    int found = 0, equal = k - count_keys(key, n, least + 1); /* so many of those that equal it */
    for (int t = 0; t < n && found < k; t += VL) {
        for (unsigned bits = keys_from(key + t, least); bits && found < k; bits &= bits - 1) {
            int at = t + __builtin_ctz(bits);
            if (key[at] > least || equal-- > 0)
                tokens[found++] = at;
        }
    }
}

/* The room for the tokens that a head h of the task chooses, and for their weights: `most` numbers
 * of a matrix' row. */
static void *chosen_at(Tensor t, const Heads *c, int h) {
    return (int32_t *)t.at + c->r * t.ld + (size_t)(c->h + h) * (t.cols / c->op->nh);
}

static void select_task(Heads c) {
    const void *pages = c.op->attend.k.at;
    const int chosen = sparse_tokens(c.op->sparsity, c.len);
    const size_t ld = round_up(c.len, BLOCK);
    float *q = scratch((size_t)c.nh * (c.hd + ld + sums_of(c.hd)) + ld);
    float *score = q + (size_t)c.nh * c.hd; /* (nh, ld) */
    int32_t *key = (int32_t *)(score + c.nh * ld);
    Rows k[2];
    c.sum_q = (float *)(key + ld);
    take_q(&c, q);
    find_rows(&k[0], &c, pages, 0);
    for (int t0 = 0, b = 0; t0 < c.len; t0 += BLOCK, b ^= 1) {
        find_rows(&k[b ^ 1], &c, pages, t0 + BLOCK);
        score_block(score + t0, ld, &c, q, &k[b], &k[b ^ 1]);
    }
    for (int h = 0; h < c.nh; h++) {
        int32_t *tokens = chosen_at(c.op->attend.tokens, &c, h);
        float *weights = chosen_at(c.op->attend.weights, &c, h);
        /* DIFFERS from the paper's top-K: the newest token is always one of them */
        select_tokens(tokens, key, score + h * ld, c.len - 1, chosen - 1);
        tokens[chosen - 1] = c.len - 1;
        float largest = -INFINITY, sum = exponentiate(score + h * ld, c.len, round_up(c.len, VL),
                                                      &largest); /* over all tokens */
        for (int i = 0; i < chosen; i++)
            weights[i] = score[h * ld + tokens[i]] / sum;
    }
}

void host_select(const Op *op) { for_tasks(op, longest(op), select_task); }

static void weigh_task(Heads c) {
    enum { AHEAD = 2 * WEIGH };
    const Op *op = c.op;
    const int hdp = round_up(c.hd, VL), n = sparse_tokens(op->sparsity, c.len), all = c.nh * n;
    const uint8_t **head =
        (void *)scratch(all * (sizeof *head / sizeof(float)) + hdp); /* (nh, n) */
    float *o = (float *)(head + all);
    for (int h = 0; h < c.nh; h++) {
        const int32_t *tokens = chosen_at(op->attend.tokens, &c, h);
        for (int i = 0; i < n; i++)
            head[h * n + i] = find_row(&c, op->attend.v.at, tokens[i]) + h * c.head_bytes;
    }
    prefetch_rows(head, imin(AHEAD, all), 0, c.head_bytes);
    for (int h = 0; h < c.nh; h++) {
        const float *weights = chosen_at(op->attend.weights, &c, h);
        memset(o, 0, hdp * sizeof *o);
        for (int i = 0; i < n; i += WEIGH) {
            int now = h * n + i, count = imin(WEIGH, n - i);
            if (now + AHEAD < all)
                prefetch_rows(head + now + AHEAD, imin(count, all - now - AHEAD), 0, c.head_bytes);
            FOR_HEAD_SIZE(&c, weigh_head, o, &c, weights + i, head + now, count);
        }
        attend_finish(op->attend.o, c.at + h * c.hd, o, (Seen){0, 1},
                      c.hd); /* the weights are shares already */
    }
}

void host_weigh(const Op *op) {
    for_tasks(op, sparse_tokens(op->sparsity, longest(op)), weigh_task);
}
