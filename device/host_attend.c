/* host_attend.c: attention on this CPU: softmax(q k^T / sqrt(hd)) v, for whole prompts, and for one
 * new token against the cache where it lives (section 3; section 4.2, computation delegation); also
 * for packed pages and with sparse attention (section 5).
 *
 * Contract: tokens are taken in blocks of BLOCK by their index in the sequence, with a running
 * maximum (an online softmax). Prefill and decode share every step, so decode of token t equals row
 * t of prefill, bit for bit. Packed heads are never unpacked: their codes are multiplied (quant.h).
 * Read next: flexgen.cu. */
#include <math.h>

#include "device/parts.h"

enum { BLOCK = 64 }; /* tokens */

// -------------------------------------------------------------------------------------------------
// The two tiles that attention is made of: dot products of rows, and weighted sums of rows. They
// are inlined for each constant mr and unrolled, so that the sums stay in registers.
// -------------------------------------------------------------------------------------------------

/* Adds x[i] * w[j] to acc[i * NR + j], element by element, for mr rows of x and NR rows of w (F16),
 * which have k columns. */
INLINE void add_dots(V *acc, const float *x, const void *const w[NR], int k, const int mr) {
    V a[6];
    for (int p = 0; p < k; p += VL) {
        int n = k - p;
        if (n >= VL) {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_load(x + (size_t)i * k + p);
        } else {
            UNROLL
            for (int i = 0; i < mr; i++)
                a[i] = v_load_part(x + (size_t)i * k + p, n);
        }
        UNROLL
        for (int j = 0; j < NR; j++) {
            const f16 *row = (const f16 *)w[j] + p;
            V b = n >= VL ? v_load_f16(row) : v_load_f16_part(row, n);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i * NR + j] = v_fma(a[i], b, acc[i * NR + j]);
        }
    }
}

/* Dot products of some rows of x with NR rows of w. */
typedef struct {
    float *dot;           /* (rows, NR), rows BLOCK apart */
    const float *x;       /* (rows, k) */
    const void *const *w; /* NR addresses of rows of k numbers, F16 */
    int k;
} Dots;

/* Writes dot[i][j] = x[i] . w[j], never -0. */
INLINE void dot_tile(const void *dots, const int mr) {
    const Dots *d = dots;
    V acc[6 * NR] = {{0}}, *row = acc;
    add_dots(acc, d->x, d->w, d->k, mr);
    UNROLL
    for (int i = 0; i < mr; i++, row += NR) {
        V4 s = v_sum4(row[0], row[1], row[2], row[3]) + (V4){0};
        memcpy(d->dot + i * BLOCK, &s, sizeof s);
    }
}

/* Weighted sums of heads of V: o[i] += sum over t < n of p[i][t] v[t], in the order of t. */
typedef struct {
    float *o;             /* (rows, hd rounded up to whole vectors) */
    const float *p;       /* the weights (rows, n), rows BLOCK apart */
    const void *const *v; /* n addresses of heads, F16 or packed */
    int n;
    const Table *codes; /* of packed heads: the codes as floats */
} Weighted;

/* Sums mr rows over nv vectors of columns from d on. Only `last` columns of the last vector exist
 * in v. */
INLINE void weigh_tile(const Weighted *w, int hd, int d, const int last, const int nv,
                       const int mr) {
    const int ld = round_up(hd, VL);
    V acc[6][4], a[6];
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++)
            acc[i][u] = v_load(w->o + i * ld + d + u * VL);
    }
    for (int t = 0; t < w->n; t++) {
        UNROLL
        for (int i = 0; i < mr; i++)
            a[i] = v_set(w->p[i * BLOCK + t]);
        UNROLL
        for (int u = 0; u < nv; u++) {
            V b = v_load_f16_part((const f16 *)w->v[t] + d + u * VL, last);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i][u] = v_fma(a[i], b, acc[i][u]);
        }
    }
    UNROLL
    for (int i = 0; i < mr; i++) {
        UNROLL
        for (int u = 0; u < nv; u++)
            v_store(w->o + i * ld + d + u * VL, acc[i][u]);
    }
}

INLINE void weigh_columns(const Weighted *w, int hd, const int mr) {
    int d = 0;
    for (; d + 4 * VL <= hd; d += 4 * VL)
        weigh_tile(w, hd, d, VL, 4, mr);
    for (; d + VL <= hd; d += VL)
        weigh_tile(w, hd, d, VL, 1, mr);
    if (d < hd)
        weigh_tile(w, hd, d, hd - d, 1, mr);
}

/* Sums mr rows. It is not inlined: in prefill_tile the sums would not stay in registers. */
__attribute__((noinline)) static void weigh_rows(Weighted w, int hd, int mr) {
    if (mr == MR) {
        weigh_columns(&w, hd, MR);
        return;
    }
    for (int i = 0; i < mr; i++) {
        weigh_columns(&w, hd, 1);
        w.o += round_up(hd, VL);
        w.p += BLOCK;
    }
}

// -------------------------------------------------------------------------------------------------
// Attention: softmax(q k^T / sqrt(hd)) v, one block of tokens after another (section 3); prefill
// -------------------------------------------------------------------------------------------------

/* The state of a query's online softmax: m is the largest score so far, l the sum of e^(score - m).
 * Beside it stands o, the sum of e^(score - m) v. */
typedef struct {
    float m, l;
} Seen;

/* Raises *m to the largest of n scores, replaces each score by e^(score - *m), and returns their
 * sum. The numbers from n up to `room`, which is whole vectors, become 0. */
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
    float before = seen->m;
    float sum = exponentiate(score, n, BLOCK, &seen->m);
    float scale = v_exp(v_set(before - seen->m))[0];
    if (scale != 1)
        for (int d = 0; d < hd; d += VL)
            v_store(o + d, v_load(o + d) * scale);
    seen->l = seen->l * scale + sum;
}

/* Writes o / l to elements at .. at+hd of out. */
static void attend_finish(Tensor out, size_t at, const float *o, Seen seen, int hd) {
    for (int d = 0; d < hd; d += VL)
        store_any(out.at, out.type, at + d, v_load(o + d) / seen.l, hd - d);
}

/* Writes q (rows, hd) = in * hd^-1/2, as OPT scales it; rows of in are in_ld apart. */
static void scale_q(float *q, const f16 *in, size_t in_ld, int rows, int hd) {
    V scale = v_set(1 / sqrtf((float)hd));
    for (int i = 0; i < rows; i++)
        for (int d = 0; d < hd; d += VL)
            v_store_part(q + (size_t)i * hd + d,
                         v_load_f16_part(in + i * in_ld + d, hd - d) * scale, hd - d);
}

/* Queries of one head that a task of prefill takes: each block of K and V is gathered once for all
 * of them. */
enum { QUERIES = 96 };

typedef struct {
    float *q, *o; /* (QUERIES, hd) scaled; (QUERIES, hdp) */
    f16 *k, *v;   /* (BLOCK, hd): the head's part of a block, row by row */
    float score[6 * BLOCK];
    const void *krow[BLOCK + NR], *vrow[BLOCK]; /* the rows of k and v */
    Seen seen[QUERIES];
    int hd, hdp; /* elements of a head, and these rounded up to whole vectors */
} PrefillTask;

/* Lets queries i .. i+mr, the first of which is at position pos, attend to tokens t0 .. t0+nt. */
static void prefill_tile(PrefillTask *a, int i, int mr, int pos, int t0, int nt) {
    nt = imin(nt, pos + mr - t0);
    if (nt <= 0)
        return;
    float *o = a->o + (size_t)i * a->hdp;
    for (int t = 0; t < nt; t += NR)
        for_rows(dot_tile, &(Dots){a->score + t, a->q + (size_t)i * a->hd, a->krow + t, a->hd}, mr);
    const int common = imax(0, imin(nt, pos + 1 - t0)); /* tokens that all of the rows may see */
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0);
        if (n > 0)
            softmax_block(a->score + r * BLOCK, n, &a->seen[i + r], o + r * a->hdp, a->hd);
    }
    weigh_rows((Weighted){o, a->score, a->vrow, common, NULL}, a->hd, mr);
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, pos + r + 1 - t0) - common;
        const float *p = a->score + r * BLOCK + common;
        if (n > 0)
            weigh_rows((Weighted){o + r * a->hdp, p, a->vrow + common, n, NULL}, a->hd, 1);
    }
}

/* Attends for queries q0 .. q0+nq of head h of the prompt that begins at row `row`. */
static void prefill_task(const Op *op, size_t row, int h, int q0, int nq) {
    const Tensor q = op->prefilled.q, o = op->prefilled.o;
    const int hd = op->hd;
    const size_t ld = q.ld, at = row * ld + (size_t)h * hd; /* of q, k and v */
    const f16 *k = (const f16 *)op->prefilled.kv.at + at, *v = k + q.cols;
    PrefillTask a = {.hd = hd, .hdp = round_up(hd, VL)};
    a.q = scratch((size_t)QUERIES * (hd + a.hdp) + BLOCK * hd);
    a.o = a.q + (size_t)QUERIES * hd;
    a.k = (f16 *)(a.o + (size_t)QUERIES * a.hdp);
    a.v = a.k + (size_t)BLOCK * hd;
    scale_q(a.q, (const f16 *)q.at + at + q0 * ld, ld, nq, hd);
    memset(a.o, 0, (size_t)nq * a.hdp * sizeof *a.o);
    for (int i = 0; i < nq; i++)
        a.seen[i] = (Seen){-INFINITY, 0};
    for (int t0 = 0; t0 < q0 + nq; t0 += BLOCK) {
        const int nt = imin(BLOCK, q0 + nq - t0);
        for (int t = 0; t < nt; t++) {
            a.krow[t] = memcpy(a.k + (size_t)t * hd, k + (t0 + t) * ld, (size_t)hd * sizeof *k);
            a.vrow[t] = memcpy(a.v + (size_t)t * hd, v + (t0 + t) * ld, (size_t)hd * sizeof *v);
        }
        for (int t = nt; t < nt + NR; t++)
            a.krow[t] = a.krow[nt - 1]; /* fills the last tile; its scores are not used */
        for (int i = 0; i < nq; i += MR)
            prefill_tile(&a, i, imin(MR, nq - i), q0 + i, t0, nt);
    }
    for (int i = 0; i < nq; i++)
        attend_finish(o, (row + q0 + i) * o.cols + (size_t)h * hd, a.o + (size_t)i * a.hdp,
                      a.seen[i], hd);
}

static int longest_prompt(const Op *op) {
    const int32_t *start = op->prefilled.start.at;
    int most = 0;
    for (int r = 0; r + 1 < op->prefilled.start.cols; r++)
        most = imax(most, start[r + 1] - start[r]);
    return most;
}

/* Carries out tasks first .. first+n-1. A task has up to QUERIES queries of one head of one prompt;
 * there are as many for each prompt as the longest needs, and some find nothing to do. */
static void prefill_tasks(const void *prefill, int first, int n) {
    const Op *op = prefill;
    const int nh = op->nh, blocks = ceil_div(longest_prompt(op), QUERIES);
    const int32_t *start = op->prefilled.start.at;
    for (int task = first; task < first + n; task++) {
        const int r = task / (nh * blocks), h = task / blocks % nh, q0 = task % blocks * QUERIES;
        const int s = start[r + 1] - start[r];
        if (q0 < s)
            prefill_task(op, start[r], h, q0, imin(QUERIES, s - q0));
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
// at a time. The page table says where a token's row of K and of V lies. The task reads its heads'
// part of each row, where they lie side by side. Here a task has heads 2 and 3 of four, and pages
// have four tokens:
//
// clang-format off
//     page table          rows of K
//     t0 .. t3   ----->   t0 | h0 h1 [h2 h3] |                              t0   t1   t2   t3  ...
//     t4 .. t7   ---.     t1 | h0 h1 [h2 h3] |    q[h] . k[t] = score   h2   .    .    .    .
//                   |     ..                                            h3   .    .    .    .
//                   '->   t4 | h0 h1 [h2 h3] |
//
//     attend_task, for each block:   find_rows       finds where its tokens lie
//                                    score_block     score[h][t] = q[h] . k[t]
//                                    softmax_block   turns the scores into weights
//                                    weigh_block     o[h] += weight[h][t] v[t]
//     Sparse attention (section 5):
//     select_task                    scores all tokens, and keeps each head's largest as weights
//     weigh_task                     o[h] = the weighted sum of the tokens that head h has chosen
// clang-format on
//
// A head of K or V is F16, or packed; the codes of packed heads are multiplied as they are.
// -------------------------------------------------------------------------------------------------

enum {
    HEADS = 32, /* heads that a task takes at most ... */
    RUN = 6144, /* ... and their bytes of a token's K: long runs, of which a few blocks stay in the
                   second cache */
    WEIGH = 8,  /* tokens whose v are added while o stays in registers */
    TOGETHER = VL / NR, /* heads whose scores for NR tokens fill a vector */
};

/* A task: heads h .. h+nh-1 of sequence r, which has len tokens. */
typedef struct {
    const Op *op;
    int r, h, nh, hd, len;
    const int32_t *pages;
    size_t head_bytes; /* bytes of a head in a page */
    size_t at;         /* the first head's first element in o */
    Table codes;       /* the codes as floats */
    float *q, *sum_q;  /* (nh, hd), scaled; (nh, groups, VL): of each group of q the sum of its
                          vectors, for packed pages */
} Heads;

/* The tasks of an op. Each is a call of `run`. */
typedef struct {
    const Op *op;
    void (*run)(Heads);
    int parts, most; /* tasks of a sequence; heads of a task */
    size_t head_bytes;
} Tasks;

/* Returns true if the pages that the op reads are packed. */
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

/* Calls `run` for every task. `tokens`: how many a task reads of its sequence. */
static void for_tasks(const Op *op, int tokens, void (*run)(Heads)) {
    const int nseq = op->attend.len.cols;
    const size_t head_bytes = is_packed(op) ? quant_bytes(op->hd) : op->hd * sizeof(f16);
    const int fit = imin(imin(op->nh, HEADS), (int)(RUN / head_bytes));
    const int for_all = nseq * op->nh / host_threads(); /* so that every thread has a task */
    const int parts = ceil_div(op->nh, imax(1, imin(fit, for_all)));
    host_share((double)tokens * nseq * op->nh * op->hd, nseq * parts, attend_tasks,
               &(Tasks){op, run, parts, ceil_div(op->nh, parts), head_bytes});
}

static int longest(const Op *op) {
    const int32_t *len = op->attend.len.at;
    int most = 0;
    for (int r = 0; r < op->attend.len.cols; r++)
        most = imax(most, len[r]);
    return most;
}

/* Returns where the task's heads of token t begin in the pages of K or V at `base`. */
static const uint8_t *find_row(const Heads *c, const void *base, int t) {
    const int page_tokens = c->op->page_tokens;
    size_t row = (size_t)c->pages[t / page_tokens] * page_tokens + t % page_tokens;
    return (const uint8_t *)base + (row * c->op->nh + c->h) * c->head_bytes;
}

/* The task's heads of K or V of a block of tokens. */
typedef struct {
    int n;                         /* tokens; there is room for NR more */
    const uint8_t *at[BLOCK + NR]; /* where each token's heads begin */
} Rows;

/* Finds tokens t0 .. t0+BLOCK-1, or those of them that exist. */
static void find_rows(Rows *rows, const Heads *c, const void *base, int t0) {
    rows->n = imax(0, imin(BLOCK, c->len - t0));
    for (int t = 0; t < rows->n; t++)
        rows->at[t] = find_row(c, base, t0 + t);
}

/* Prefetches a head of n rows, which begins at byte `at` of each. Pages lie anywhere, so the
 * processor cannot foresee them; we know them a block ahead: while K is read, V of the same tokens
 * is prefetched, and while V is read, K of the next block. */
INLINE void prefetch_rows(const uint8_t *const *row, int n, size_t at, size_t bytes) {
    for (int t = 0; t < n; t++)
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(row[t] + at + i, 0, 2);
}

/* Returns the floats of a head's sums of q: a vector for each group. */
static int sums_of(int hd) { return ceil_div(hd, GROUP) * VL; }

/* Fills c->q, and for packed pages c->sum_q. */
static void take_q(Heads *c) {
    const Tensor q = c->op->attend.q;
    const int hd = c->hd;
    scale_q(c->q, (const f16 *)q.at + c->r * q.ld + (size_t)c->h * hd, hd, c->nh, hd);
    for (int h = 0; is_packed(c->op) && h < c->nh; h++)
        for (int d = 0; d < hd; d += VL) {
            float *sum = c->sum_q + h * sums_of(hd) + d / GROUP * VL;
            const V some = v_load(c->q + h * hd + d);
            v_store(sum, d % GROUP ? v_load(sum) + some : some);
        }
}

/* Reads the min and the scale of a group. */
INLINE void load_header(float header[2], const uint8_t *group) {
    f16 bits[2];
    memcpy(bits, group, sizeof bits);
    header[0] = f16_to_f32(bits[0]);
    header[1] = f16_to_f32(bits[1]);
}

/* Adds q[h] . k[j] to acc[j], element by element, for the group of each packed head k[j] that
 * begins at element d and has `width` numbers: min times the sum of these q, and scale times the
 * sum of q code. */
INLINE void dot_codes(V acc[NR], const Heads *c, int h, const void *const k[NR], int d,
                      const int width) {
    const float *q = c->q + h * c->hd + d;
    const V sum_q = v_load(c->sum_q + h * sums_of(c->hd) + d / GROUP * VL);
    const uint8_t *group[NR];
    V dot[NR] = {{0}};
    UNROLL
    for (int j = 0; j < NR; j++)
        group[j] = (const uint8_t *)k[j] + d / GROUP * GROUP_BYTES;
    UNROLL
    for (int i = 0; i < width; i += 32) {
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b[32 / VL];
            t_block(b, &c->codes, group[j] + GROUP_HEADER + i / 2);
            UNROLL
            for (int u = 0; u < imin(width - i, 32) / VL; u++)
                dot[j] = v_fma(v_load(q + i + u * VL), b[u], dot[j]);
        }
    }
    UNROLL
    for (int j = 0; j < NR; j++) {
        float header[2];
        load_header(header, group[j]);
        acc[j] = v_fma(v_set(header[1]), dot[j], v_fma(v_set(header[0]), sum_q, acc[j]));
    }
}

/* Adds q[h] . k[j] to acc[j], element by element, for NR heads of K. */
INLINE void dot_head(V acc[NR], const Heads *c, int h, const void *const k[NR], const int hd,
                     const bool packed) {
    if (!packed)
        add_dots(acc, c->q + h * hd, k, hd, 1);
    for (int d = 0; packed && d < hd; d += GROUP)
        dot_codes(acc, c, h, k, d, imin(GROUP, hd - d));
}

/* A block's scores: score[h * ld + t] = q[h] . k[t], never -0. */
typedef struct {
    const Heads *c;
    float *score; /* (nh, k->n), rows ld apart */
    size_t ld;
    Rows *k;
    const Rows *ahead; /* rows that are prefetched meanwhile */
} Scores;

/* Scores NR tokens from t on for TOGETHER heads from `first` on, or for those that the task has.
 * The elements of all their vectors are added up together, which takes as long as for one head. The
 * rows `ahead` are prefetched a head at a time: all heads at once are more requests than a
 * processor can have open. */
INLINE void score_tile(const Scores *s, int t, int first, const int hd, const bool packed) {
    const Heads *c = s->c;
    const int nh = imin(TOGETHER, c->nh - first);
    V acc[TOGETHER * NR] = {{0}};
    UNROLL
    for (int h = 0; h < TOGETHER; h++) {
        const size_t at = (first + h) * c->head_bytes;
        const void *head[NR];
        if (h >= nh)
            continue;
        for (int u = 0; u < NR; u++)
            head[u] = s->k->at[t + u] + at;
        prefetch_rows(s->ahead->at + t, imin(NR, s->ahead->n - t), at,
                      packed ? c->head_bytes : hd * sizeof(f16));
        dot_head(acc + h * NR, c, first + h, head, hd, packed);
    }
    V sums = v_sums(acc) + v_set(0);
    for (int h = 0; h < nh; h++)
        memcpy(s->score + (first + h) * s->ld + t, (const float *)&sums + h * NR,
               NR * sizeof *s->score);
}

/* Sums the columns of a group of packed heads, which begins at element d and has `width` numbers: p
 * scale code in the order of t, and then the sum of p min. */
INLINE void weigh_codes(const Weighted *w, int d, const int width) {
    float *o = w->o + d, low = 0;
    V acc[GROUP / VL];
    UNROLL
    for (int i = 0; i < GROUP / VL; i++)
        acc[i] = i < width / VL ? v_load(o + i * VL) : v_set(0);
    for (int t = 0; t < w->n; t++) {
        const uint8_t *group = (const uint8_t *)w->v[t] + d / GROUP * GROUP_BYTES;
        float header[2];
        load_header(header, group);
        V a = v_set(w->p[t] * header[1]);
        low += w->p[t] * header[0];
        UNROLL
        for (int i = 0; i < width; i += 32) {
            V b[32 / VL];
            t_block(b, w->codes, group + GROUP_HEADER + i / 2);
            UNROLL
            for (int u = 0; u < imin(width - i, 32) / VL; u++)
                acc[i / VL + u] = v_fma(a, b[u], acc[i / VL + u]);
        }
    }
    UNROLL
    for (int i = 0; i < width / VL; i++)
        v_store(o + i * VL, acc[i] + low);
}

/* Adds the weighted sum of n <= WEIGH heads to one row of o. */
INLINE void weigh_head(const void *weighted, const int hd, const bool packed) {
    const Weighted *w = weighted;
    if (!packed)
        weigh_columns(w, hd, 1);
    for (int d = 0; packed && d < hd; d += GROUP)
        weigh_codes(w, d, imin(GROUP, hd - d));
}

/* What is done for a head size, of packed heads or F16. */
typedef void HeadLoop(const void *what, int hd, bool packed);

/* Calls run(what, hd, packed) with the usual head sizes as constants, so that its loops are
 * unrolled. */
INLINE void for_head_size(HeadLoop *run, const void *what, int hd, const bool packed) {
    switch (hd) {
        case 64:
            run(what, 64, packed);
            break;
        case 80:
            run(what, 80, packed);
            break;
        case 128:
            run(what, 128, packed);
            break;
        default:
            run(what, hd, packed);
    }
}

/* Calls run(what, hd, packed) for the task's heads. */
INLINE void for_heads(const Heads *c, HeadLoop *run, const void *what) {
    if (is_packed(c->op))
        for_head_size(run, what, c->hd, true);
    else
        for_head_size(run, what, c->hd, false);
}

INLINE void score_heads(const void *scores, const int hd, const bool packed) {
    const Scores *s = scores;
    for (int t = 0; t < s->k->n; t += NR)
        for (int h = 0; h < s->c->nh; h += TOGETHER)
            score_tile(s, t, h, hd, packed);
}

static void score_block(Scores s) {
    for (int t = s.k->n; t < s.k->n + NR; t++)
        s.k->at[t] = s.k->at[s.k->n - 1]; /* fills the last tile; its scores are not used */
    for_heads(s.c, score_heads, &s);
}

/* A block's weighted sums: o[h] += sum over t of p[h][t] v[t]. */
typedef struct {
    const Heads *c;
    float *o;              /* (nh, hd rounded up to whole vectors) */
    const float *p;        /* (nh, BLOCK) */
    const Rows *v, *ahead; /* `ahead`: rows that are prefetched meanwhile */
} Sums;

INLINE void weigh_heads(const void *sums, const int hd, const bool packed) {
    const Sums *s = sums;
    const Heads *c = s->c;
    for (int t = 0; t < s->v->n; t += WEIGH)
        for (int h = 0; h < c->nh; h++) {
            const size_t at = h * c->head_bytes;
            const int n = imin(WEIGH, s->v->n - t);
            const void *head[WEIGH];
            for (int u = 0; u < n; u++)
                head[u] = s->v->at[t + u] + at;
            prefetch_rows(s->ahead->at + t, imin(WEIGH, s->ahead->n - t), at, c->head_bytes);
            float *o = s->o + h * round_up(hd, VL);
            const float *p = s->p + h * BLOCK + t;
            if (n == WEIGH) /* a constant */
                weigh_head(&(Weighted){o, p, head, WEIGH, &c->codes}, hd, packed);
            else
                weigh_head(&(Weighted){o, p, head, n, &c->codes}, hd, packed);
        }
}

static void weigh_block(Sums s) { for_heads(s.c, weigh_heads, &s); }

static void attend_task(Heads c) {
    const Tensor k_pages = c.op->attend.k, v_pages = c.op->attend.v;
    const int hdp = round_up(c.hd, VL);
    c.q = scratch((size_t)c.nh * (c.hd + hdp + BLOCK + sums_of(c.hd)));
    float *o = c.q + (size_t)c.nh * c.hd;  /* (nh, hdp) */
    float *score = o + (size_t)c.nh * hdp; /* (nh, BLOCK) */
    c.sum_q = score + (size_t)c.nh * BLOCK;
    take_q(&c);
    memset(o, 0, (size_t)c.nh * hdp * sizeof *o);
    Seen seen[HEADS];
    for (int h = 0; h < c.nh; h++)
        seen[h] = (Seen){-INFINITY, 0};
    Rows k, v;
    find_rows(&k, &c, k_pages.at, 0);
    for (int t0 = 0; t0 < c.len; t0 += BLOCK) {
        find_rows(&v, &c, v_pages.at, t0);
        score_block((Scores){&c, score, BLOCK, &k, &v});
        find_rows(&k, &c, k_pages.at, t0 + BLOCK);
        for (int h = 0; h < c.nh; h++)
            softmax_block(score + h * BLOCK, v.n, &seen[h], o + h * hdp, c.hd);
        weigh_block((Sums){&c, o, score, &v, &k});
    }
    for (int h = 0; h < c.nh; h++)
        attend_finish(c.op->attend.o, c.at + h * c.hd, o + h * hdp, seen[h], c.hd);
}

void host_attend(const Op *op) { for_tasks(op, longest(op), attend_task); }

// -------------------------------------------------------------------------------------------------
// Sparse attention (section 5): the tokens with the largest scores, and their v alone
// -------------------------------------------------------------------------------------------------

/* Turns n scores into keys: whole numbers in the same order, so that halving their range finds any
 * of them. NaN becomes the smallest number, and so do the keys behind the last, up to a whole
 * vector. */
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

/* Returns a number whose bit i is set if key[i], i < VL, is at least `least`, which is above
 * INT32_MIN. */
INLINE unsigned keys_from(const int32_t *key, int32_t least) {
    VI v;
    memcpy(&v, key, sizeof v);
    return v_bits(v >= least);
}

/* Returns how many of n keys are at least `least`. */
static int count_keys(const int32_t *key, int n, int32_t least) {
    int count = 0;
    for (int t = 0; t < n; t += VL)
        count += __builtin_popcount(keys_from(key + t, least));
    return count;
}

/* Returns the largest number that at least k of n keys reach, 1 <= k <= n, or another number that
 * exactly k of them reach. */
static int32_t kth_key(const int32_t *key, int n, int k) {
    /* at least k keys reach low, fewer reach high */
    int64_t low = INT32_MIN, high = (int64_t)INT32_MAX + 1;
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

/* Writes which k of n scores are the largest, of equal ones the earlier, in ascending order of
 * tokens. key: room for n numbers, rounded up to whole vectors. */
static void select_tokens(int32_t *tokens, int32_t *key, const float *score, int n, int k) {
    if (k == 0)
        return;
    order_scores(key, score, n);
    int32_t least = kth_key(key, n, k);
    int found = 0,
        equal = k - count_keys(key, n, least + 1); /* how many of the keys that are `least` */
    for (int t = 0; t < n && found < k; t += VL) {
        for (unsigned bits = keys_from(key + t, least); bits && found < k; bits &= bits - 1) {
            int at = t + __builtin_ctz(bits);
            if (key[at] > least || equal-- > 0)
                tokens[found++] = at;
        }
    }
}

/* Returns where t, the chosen tokens or their weights, has those of head h of the task. */
static void *chosen_at(Tensor t, const Heads *c, int h) {
    return (int32_t *)t.at + c->r * t.ld + (size_t)(c->h + h) * (t.cols / c->op->nh);
}

static void select_task(Heads c) {
    const void *pages = c.op->attend.k.at;
    const int chosen = sparse_tokens(c.op->sparsity, c.len);
    const size_t ld = round_up(c.len, BLOCK);
    c.q = scratch((size_t)c.nh * (c.hd + ld + sums_of(c.hd)) + ld);
    float *score = c.q + (size_t)c.nh * c.hd; /* (nh, ld) */
    int32_t *key = (int32_t *)(score + c.nh * ld);
    c.sum_q = (float *)(key + ld);
    take_q(&c);
    Rows k[2]; /* this block's and the next one's */
    find_rows(&k[0], &c, pages, 0);
    for (int t0 = 0, b = 0; t0 < c.len; t0 += BLOCK, b ^= 1) {
        find_rows(&k[b ^ 1], &c, pages, t0 + BLOCK);
        score_block((Scores){&c, score + t0, ld, &k[b], &k[b ^ 1]});
    }
    for (int h = 0; h < c.nh; h++) {
        int32_t *tokens = chosen_at(c.op->attend.tokens, &c, h);
        float *weights = chosen_at(c.op->attend.weights, &c, h);
        /* DIFFERS from the paper's top-K: the newest token is always one of them */
        select_tokens(tokens, key, score + h * ld, c.len - 1, chosen - 1);
        tokens[chosen - 1] = c.len - 1;
        float largest = -INFINITY;
        const float sum = /* over all tokens */
            exponentiate(score + h * ld, c.len, round_up(c.len, VL), &largest);
        for (int i = 0; i < chosen; i++)
            weights[i] = score[h * ld + tokens[i]] / sum;
    }
}

void host_select(const Op *op) { for_tasks(op, longest(op), select_task); }

static void weigh_task(Heads c) {
    enum { AHEAD = 2 * WEIGH }; /* heads of V that are prefetched */
    const Op *op = c.op;
    const int hdp = round_up(c.hd, VL), n = sparse_tokens(op->sparsity, c.len), all = c.nh * n;
    const uint8_t **head; /* (nh, n): where the V of each head's chosen tokens lies */
    head = (void *)scratch(all * (sizeof *head / sizeof(float)) + hdp);
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
            const int now = h * n + i, count = imin(WEIGH, n - i);
            if (now + AHEAD < all)
                prefetch_rows(head + now + AHEAD, imin(count, all - now - AHEAD), 0, c.head_bytes);
            const void *const *v = (const void *const *)(head + now);
            for_heads(&c, weigh_head, &(Weighted){o, weights + i, v, count, &c.codes});
        }
        const Seen shares = {0, 1}; /* the weights have been divided by their sum */
        attend_finish(op->attend.o, c.at + h * c.hd, o, shares, c.hd);
    }
}

void host_weigh(const Op *op) {
    for_tasks(op, sparse_tokens(op->sparsity, longest(op)), weigh_task);
}
