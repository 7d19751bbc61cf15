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

enum {
    BLOCK = 64,     /* tokens */
    WIDE = 64 / VL, /* vectors of columns that are summed together, for one row */
};

// -------------------------------------------------------------------------------------------------
// The two tiles that attention is made of: dot products of rows, and weighted sums of rows. They
// are inlined for each constant mr and unrolled, so that the sums stay in registers. Rows of floats
// are padded with zeros to whole vectors.
// -------------------------------------------------------------------------------------------------

/* Adds x[i] * w[j] to acc[i * NR + j], element by element, for mr rows of x and NR rows of w (F16),
 * over columns d to hd. */
INLINE void add_dots(V *acc, const float *x, const void *const w[NR], int d, int hd, const int mr) {
    int ld = round_up(hd, VL);
    for (; d < hd; d += VL) {
        V a[MR];
        UNROLL
        for (int i = 0; i < mr; i++)
            a[i] = v_load(x + i * ld + d);
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b = v_load_f16_part((const f16 *)w[j] + d, hd - d);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i * NR + j] = v_fma(a[i], b, acc[i * NR + j]);
        }
    }
}

/* Writes dot[i * BLOCK + j] = x[i] . w[j], never -0, for rows as above. */
INLINE void dot_tile(float *dot, const float *x, const void *const w[NR], int hd, const int mr) {
    V acc[MR * NR] = {{0}}, *row = acc;
    add_dots(acc, x, w, 0, hd, mr);
    UNROLL
    for (int i = 0; i < mr; i++, row += NR) {
        V4 s = v_sum4(row[0], row[1], row[2], row[3]) + (V4){0};
        memcpy(dot + i * BLOCK, &s, sizeof s);
    }
}

/* Weighted sums of heads of V: o[i] += sum over t < n of p[i][t] v[t], in the order of t. */
typedef struct {
    float *o;             /* (rows, hd rounded up to whole vectors) */
    const float *p;       /* the weights (rows, n), rows BLOCK apart */
    const void *const *v; /* n addresses of heads, F16 or packed */
    int n;
} Weighted;

/* Sums mr rows over nv vectors of columns from d on. Only `last` columns of the last vector exist
 * in v. */
INLINE void weigh_tile(const Weighted *w, int hd, int d, const int last, const int nv, int mr) {
    int ld = round_up(hd, VL);
    bool fours = mr == 1 && nv >= 4; /* else there are no registers left for four */
    V acc[MR][WIDE], a[MR], b[4];
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
            const f16 *v = (const f16 *)w->v[t] + d + u * VL;
            if (!fours)
                b[u % 4] = v_load_f16_part(v, last);
            else if (u % 4 == 0)
                v_load_four(b, v);
            UNROLL
            for (int i = 0; i < mr; i++)
                acc[i][u] = v_fma(a[i], b[u % 4], acc[i][u]);
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
    for (; mr == 1 && d + WIDE * VL <= hd; d += WIDE * VL)
        weigh_tile(w, hd, d, VL, WIDE, mr);
    for (; d + 4 * VL <= hd; d += 4 * VL)
        weigh_tile(w, hd, d, VL, 4, mr);
    for (; d < hd; d += VL)
        weigh_tile(w, hd, d, hd - d, 1, mr);
}

/* Sums MR rows or one. It is not inlined: in prefill_tile the sums would not stay in registers. */
__attribute__((noinline)) static void weigh_rows(Weighted w, int hd, int mr) {
    if (mr == MR)
        weigh_columns(&w, hd, MR);
    else
        weigh_columns(&w, hd, 1);
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

/* Writes q = in * hd^-1/2, as OPT scales it; rows of hd numbers, those of in are in_ld apart. */
static void scale_q(float *q, const f16 *in, size_t in_ld, int rows, int hd) {
    V scale = v_set(1 / sqrtf(hd));
    for (int i = 0; i < rows; i++, in += in_ld)
        for (int d = 0; d < hd; d += VL, q += VL)
            v_store(q, v_load_f16_part(in + d, hd - d) * scale);
}

/* Queries of one head that a task of prefill takes: each block of K and V is gathered once for all
 * of them. */
enum { QUERIES = 96 };

typedef struct {
    float *q, *o; /* (QUERIES, hdp), q scaled */
    f16 *k, *v;   /* (BLOCK, hd): the head's part of a block, row by row */
    float score[MR * BLOCK];
    const void *krow[BLOCK + NR], *vrow[BLOCK]; /* the rows of k and v */
    Seen seen[QUERIES];
    int hd, hdp; /* elements of a head, and these rounded up to whole vectors */
} PrefillTask;

/* Lets queries i .. i+mr attend to a block of nt tokens, of which `before` come before query i. */
INLINE void prefill_tile(PrefillTask *a, int i, int before, int nt, const int mr) {
    nt = imin(nt, before + mr);
    if (nt <= 0)
        return;
    float *o = a->o + i * a->hdp;
    for (int t = 0; t < nt; t += NR)
        dot_tile(a->score + t, a->q + i * a->hdp, a->krow + t, a->hd, mr);
    int common = imax(0, imin(nt, before + 1)); /* tokens that all of the rows may see */
    for (int r = 0; r < mr; r++) {
        int n = imin(nt, before + r + 1);
        if (n > 0)
            softmax_block(a->score + r * BLOCK, n, &a->seen[i + r], o + r * a->hdp, a->hd);
    }
    weigh_rows((Weighted){o, a->score, a->vrow, common}, a->hd, mr);
    for (int r = 1; r < mr; r++) {
        int n = imin(nt, before + r + 1) - common;
        const float *p = a->score + r * BLOCK + common;
        if (n > 0)
            weigh_rows((Weighted){o + r * a->hdp, p, a->vrow + common, n}, a->hd, 1);
    }
}

/* Attends for queries q0 .. q0+nq of head h of the prompt that begins at row `row`. */
static void prefill_task(const Op *op, size_t row, int h, int q0, int nq) {
    Tensor q = op->prefilled.q, o = op->prefilled.o;
    int hd = op->hd;
    size_t ld = q.ld;
    const f16 *k = tensor_cols(tensor_rows(op->prefilled.kv, row, 1), h * hd, hd).at,
              *v = k + q.cols;
    PrefillTask a = {.hd = hd, .hdp = round_up(hd, VL)};
    a.q = scratch(2 * QUERIES * a.hdp + BLOCK * hd);
    a.o = a.q + QUERIES * a.hdp;
    a.k = (f16 *)(a.o + QUERIES * a.hdp);
    a.v = a.k + BLOCK * hd;
    scale_q(a.q, tensor_cols(tensor_rows(q, row + q0, nq), h * hd, hd).at, ld, nq, hd);
    memset(a.o, 0, nq * a.hdp * sizeof *a.o);
    for (int i = 0; i < nq; i++)
        a.seen[i] = (Seen){-INFINITY, 0};
    for (int t0 = 0; t0 < q0 + nq; t0 += BLOCK) {
        int nt = imin(BLOCK, q0 + nq - t0);
        for (int t = 0; t < nt; t++) {
            a.krow[t] = memcpy(a.k + t * hd, k + (t0 + t) * ld, hd * sizeof *k);
            a.vrow[t] = memcpy(a.v + t * hd, v + (t0 + t) * ld, hd * sizeof *v);
        }
        for (int t = nt; t < nt + NR; t++)
            a.krow[t] = a.krow[nt - 1]; /* fills the last tile; its scores are not used */
        int i = 0;
        for (; i + MR <= nq; i += MR)
            prefill_tile(&a, i, q0 + i - t0, nt, MR);
        for (; i < nq; i++)
            prefill_tile(&a, i, q0 + i - t0, nt, 1);
    }
    for (int i = 0; i < nq; i++)
        attend_finish(o, (row + q0 + i) * o.cols + h * hd, a.o + i * a.hdp, a.seen[i], hd);
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
    int nh = op->nh, blocks = ceil_div(longest_prompt(op), QUERIES);
    const int32_t *start = op->prefilled.start.at;
    for (int task = first; task < first + n; task++) {
        int r = task / (nh * blocks), h = task / blocks % nh, q0 = task % blocks * QUERIES;
        int s = start[r + 1] - start[r];
        if (q0 < s)
            prefill_task(op, start[r], h, q0, imin(QUERIES, s - q0));
    }
}

void host_attend_prefill(const Op *op) {
    int longest = longest_prompt(op), nseq = op->prefilled.start.cols - 1;
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
    HEADS = 64,  /* heads that a task takes at most ... */
    RUN = 16384, /* ... and their bytes of a token's K: whole rows of most models, since memory
                    delivers long runs faster */
    WEIGH = 8,   /* tokens whose v are added while o stays in registers */
    TOGETHER = VL / NR, /* heads whose scores for NR tokens fill a vector */
};

/* A task: heads h .. h+nh-1 of sequence r. */
typedef struct {
    const Op *op;
    int r, h, nh, hd, hdp; /* elements of a head, and these rounded up to whole vectors */
    int len;               /* tokens that it reads ... */
    const int32_t *tokens; /* ... and which; NULL: all of the sequence, in order */
    const int32_t *pages;
    size_t head_bytes; /* bytes of a head in a page */
    float *q, *o;      /* (nh, hdp); q scaled */
    float *score;      /* (nh, ld): the scores of a block, and then its weights */
    size_t ld;
} Heads;

/* The tasks of an op. Each is a call of `run`. */
typedef struct {
    const Op *op;
    void (*run)(Heads);
    int most; /* heads of a task */
} Tasks;

/* Returns true if the pages that the op reads are packed. */
static bool is_packed(const Op *op) { return op->attend.k.type == U8; }

/* Returns the bytes of a head in a page. */
INLINE size_t head_bytes(int hd, bool packed) {
    return packed ? quant_bytes(hd) : hd * sizeof(f16);
}

static void attend_tasks(const void *all, int first, int n) {
    const Tasks *tasks = all;
    const Op *op = tasks->op;
    int parts = ceil_div(op->nh, tasks->most);
    for (int i = first; i < first + n; i++) {
        int r = i / parts, h = i % parts * tasks->most;
        tasks->run((Heads){.op = op,
                           .r = r,
                           .h = h,
                           .nh = imin(tasks->most, op->nh - h),
                           .hd = op->hd,
                           .hdp = round_up(op->hd, VL),
                           .len = ((const int32_t *)op->attend.len.at)[r],
                           .pages = tensor_rows(op->attend.pages, r, 1).at,
                           .head_bytes = head_bytes(op->hd, is_packed(op))});
    }
}

/* Calls `run` for every task. most: heads that a task may have. */
static void for_tasks(const Op *op, int most, void (*run)(Heads)) {
    int nseq = op->attend.len.cols, nh = op->nh;
    int for_all = nseq * nh / host_threads(); /* so that every thread has a task */
    int heads = imax(1, imin(imin(nh, most), for_all)), parts = ceil_div(nh, heads);
    host_share((double)op_tokens(op, op->attend.len.at) * nh * op->hd, nseq * parts, attend_tasks,
               &(Tasks){op, run, ceil_div(nh, parts)});
}

/* Returns the heads that a task takes where it reads its heads' part of whole rows. */
static int heads_of_rows(const Op *op) {
    return imin(HEADS, RUN / head_bytes(op->hd, is_packed(op)));
}

/* Finds the rows of up to BLOCK tokens from t0 on: where the task's heads begin in the pages of K
 * or V. Returns how many there are. NR more repeat the last one, to fill a tile, whose other scores
 * are not used. */
static int find_rows(const uint8_t **rows, const Heads *c, Tensor pages, int t0) {
    int page_tokens = c->op->page_tokens, n = imax(0, imin(BLOCK, c->len - t0));
    for (int t = 0; t < n + NR; t++) {
        int i = imin(t0 + t, c->len - 1), token = c->tokens ? c->tokens[i] : i;
        size_t row = (size_t)c->pages[token / page_tokens] * page_tokens + token % page_tokens;
        rows[t] = (uint8_t *)pages.at + (row * c->op->nh + c->h) * c->head_bytes;
    }
    return n;
}

/* The functions for the rows of a block. */
typedef struct {
    const Heads *c;
    const uint8_t *const *rows; /* n, and NR more */
    int n;
    const uint8_t *const *ahead; /* nahead rows that are read soon and are prefetched meanwhile */
    int nahead;
} Block;

/* Prefetches head h of up to n of the rows ahead, from row t on. Pages lie anywhere,
 * so the processor cannot foresee them; we know them a block ahead: while K is read, V of the same
 * tokens is prefetched, and while V is read, K of the next block. All heads at once would be more
 * requests than a processor can have open. */
INLINE void prefetch_ahead(const Block *b, int t, int n, int h, const size_t bytes) {
    for (int end = imin(t + n, b->nahead); t < end; t++)
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(b->ahead[t] + h * bytes + i, 0, 2);
}

/* Gives the task its working memory, with scores of ld tokens and ld numbers behind them, and fills
 * its q. */
static void take_q(Heads *c, size_t ld) {
    Tensor q = tensor_rows(c->op->attend.q, c->r, 1);
    c->ld = ld;
    c->q = scratch(c->nh * (2 * c->hdp + ld) + ld);
    c->o = c->q + c->nh * c->hdp;
    c->score = c->o + c->nh * c->hdp;
    scale_q(c->q, tensor_cols(q, c->h * c->hd, c->hd).at, c->hd, c->nh, c->hd);
}

/* Reads the min of a group, and by what floats of its codes are multiplied. */
INLINE void load_header(float header[2], const uint8_t *group) {
    f16 bits[2];
    memcpy(bits, group, sizeof bits);
    header[0] = f16_to_f32(bits[0]);
    header[1] = f16_to_f32(bits[1]) / CODE_UNIT;
}

/* Adds q . k[j] to acc[j], element by element, for the group of each packed head k[j] that begins
 * at element d and has `width` numbers: min times the sum of these q, and scale times the sum of q
 * code. */
INLINE void dot_codes(V acc[NR], const float *q, const void *const k[NR], int d, const int width) {
    const uint8_t *group[NR];
    V dot[NR] = {{0}}, sum_q = v_load(q + d);
    UNROLL
    for (int i = VL; i < width; i += VL)
        sum_q += v_load(q + d + i);
    UNROLL
    for (int j = 0; j < NR; j++)
        group[j] = (const uint8_t *)k[j] + d / GROUP * GROUP_BYTES;
    UNROLL
    for (int i = 0; i < width; i += 32) {
        UNROLL
        for (int j = 0; j < NR; j++) {
            V b[32 / VL];
            codes_block(b, group[j] + GROUP_HEADER + i / 2);
            UNROLL
            for (int u = 0; u < imin(width - i, 32) / VL; u++)
                dot[j] = v_fma(v_load(q + d + i + u * VL), b[u], dot[j]);
        }
    }
    UNROLL
    for (int j = 0; j < NR; j++) {
        float header[2];
        load_header(header, group[j]);
        acc[j] = v_fma(v_set(header[1]), dot[j], v_fma(v_set(header[0]), sum_q, acc[j]));
    }
}

/* Adds q . k[j] to acc[j], element by element, for NR heads of K. */
INLINE void dot_head(V acc[NR], const float *q, const void *const k[NR], const int hd,
                     bool packed) {
    int d = 0;
    if (packed) {
        for (; d < hd; d += GROUP)
            dot_codes(acc, q, k, d, imin(GROUP, hd - d));
    } else {
        PRAGMA(GCC unroll 8)
        for (; d + 4 * VL <= hd; d += 4 * VL)
            add_four(acc, q, (const f16 *const *)k, d);
        add_dots(acc, q, k, d, hd, 1);
    }
}

/* Scores NR tokens from t on for TOGETHER heads from `first` on, or for those that the task has.
 * The elements of all their vectors are added up together, which takes as long as for one head. No
 * score is -0. */
INLINE void score_tile(const Block *b, int t, int first, const int hd, const bool packed) {
    const Heads *c = b->c;
    int nh = imin(TOGETHER, c->nh - first);
    V acc[TOGETHER * NR] = {{0}};
    UNROLL
    for (int h = 0; h < TOGETHER; h++) {
        size_t bytes = head_bytes(hd, packed);
        const void *head[NR];
        if (h >= nh)
            continue;
        for (int u = 0; u < NR; u++)
            head[u] = b->rows[t + u] + (first + h) * bytes;
        prefetch_ahead(b, t, NR, first + h, bytes);
        dot_head(acc + h * NR, c->q + (first + h) * round_up(hd, VL), head, hd, packed);
    }
    V sums = v_sums(acc) + v_set(0);
    for (int h = 0; h < nh; h++)
        memcpy(c->score + (first + h) * c->ld + t, (const float *)&sums + h * NR,
               NR * sizeof *c->score);
}

/* Writes score[h][t] = q[h] . k[t]. */
INLINE void score_heads(const Block *b, const int hd, const bool packed) {
    for (int t = 0; t < b->n; t += NR)
        for (int h = 0; h < b->c->nh; h += TOGETHER)
            score_tile(b, t, h, hd, packed);
}

/* Sums the columns of a group of packed heads, which begins at element d and has `width` numbers: p
 * scale code in the order of t, and then the sum of p min. */
INLINE void weigh_codes(const Weighted *w, int d, const int width) {
    float *o = w->o + d, low = 0;
    V acc[GROUP / VL];
    UNROLL
    for (int i = 0; i < width / VL; i++)
        acc[i] = v_load(o + i * VL);
    for (int t = 0; t < w->n; t++) {
        const uint8_t *group = (const uint8_t *)w->v[t] + d / GROUP * GROUP_BYTES;
        float header[2];
        load_header(header, group);
        V a = v_set(w->p[t] * header[1]);
        low += w->p[t] * header[0];
        UNROLL
        for (int i = 0; i < width; i += 32) {
            V b[32 / VL];
            codes_block(b, group + GROUP_HEADER + i / 2);
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
INLINE void weigh_head(Weighted w, const int hd, const bool packed) {
    if (!packed)
        weigh_columns(&w, hd, 1);
    for (int d = 0; packed && d < hd; d += GROUP)
        weigh_codes(&w, d, imin(GROUP, hd - d));
}

/* Adds to o[h] the sum over t of score[h][t] v[t]. */
INLINE void weigh_heads(const Block *b, const int hd, const bool packed) {
    const Heads *c = b->c;
    for (int t = 0; t < b->n; t += WEIGH)
        for (int h = 0; h < c->nh; h++) {
            size_t bytes = head_bytes(hd, packed);
            int n = imin(WEIGH, b->n - t);
            const void *head[WEIGH];
            for (int u = 0; u < n; u++)
                head[u] = b->rows[t + u] + h * bytes;
            prefetch_ahead(b, t, WEIGH, h, bytes);
            float *o = c->o + h * round_up(hd, VL), *p = c->score + h * c->ld + t;
            if (n == WEIGH) /* a constant */
                weigh_head((Weighted){o, p, head, WEIGH}, hd, packed);
            else
                weigh_head((Weighted){o, p, head, n}, hd, packed);
        }
}

/* The functions for a head size, of packed heads or F16. */
typedef void HeadLoop(const Block *b, int hd, bool packed);

/* Calls run(b, hd, packed) with the usual head sizes as constants, so that its loops are unrolled.
 */
INLINE void for_head_size(HeadLoop *run, const Block *b, const bool packed) {
    switch (b->c->hd) {
        case 64:
            run(b, 64, packed);
            break;
        case 80:
            run(b, 80, packed);
            break;
        case 128:
            run(b, 128, packed);
            break;
        default:
            run(b, b->c->hd, packed);
    }
}

/* Calls run(b, hd, packed) for the task's heads. */
INLINE void for_heads(HeadLoop *run, const Block *b) {
    if (is_packed(b->c->op))
        for_head_size(run, b, true);
    else
        for_head_size(run, b, false);
}

static void score_block(Block b) { for_heads(score_heads, &b); }
static void weigh_block(Block b) { for_heads(weigh_heads, &b); }

/* Writes the output of the task's head h. */
static void finish_head(const Heads *c, int h, Seen seen) {
    attend_finish(c->op->attend.o, ((size_t)c->r * c->op->nh + c->h + h) * c->hd, c->o + h * c->hdp,
                  seen, c->hd);
}

static void attend_task(Heads c) {
    Tensor k_pages = c.op->attend.k, v_pages = c.op->attend.v;
    take_q(&c, BLOCK);
    memset(c.o, 0, c.nh * c.hdp * sizeof *c.o);
    Seen seen[HEADS];
    for (int h = 0; h < c.nh; h++)
        seen[h] = (Seen){-INFINITY, 0};
    const uint8_t *k[BLOCK + NR], *v[BLOCK + NR];
    int n = find_rows(k, &c, k_pages, 0), next;
    for (int t0 = 0; t0 < c.len; t0 += BLOCK, n = next) {
        find_rows(v, &c, v_pages, t0);
        score_block((Block){&c, k, n, v, n});
        next = find_rows(k, &c, k_pages, t0 + BLOCK);
        for (int h = 0; h < c.nh; h++)
            softmax_block(c.score + h * BLOCK, n, &seen[h], c.o + h * c.hdp, c.hd);
        weigh_block((Block){&c, v, n, k, next});
    }
    for (int h = 0; h < c.nh; h++)
        finish_head(&c, h, seen[h]);
}

void host_attend(const Op *op) { for_tasks(op, heads_of_rows(op), attend_task); }

// -------------------------------------------------------------------------------------------------
// Sparse attention (section 5): the tokens with the largest scores, and their v alone
// -------------------------------------------------------------------------------------------------

/* Turns n scores into keys: whole numbers in the same order, so that halving their range finds any
 * of them. NaN becomes a smaller one than any other score, and the keys behind the last, up to a
 * whole vector, an even smaller one. */
static void order_scores(int32_t *key, const float *score, int n) {
    for (int t = 0; t < n; t += VL) {
        V s = v_load(score + t); /* never -0: its sum began at 0 */
        VI bits = (VI)s, ordered = bits ^ (bits >> 31 & INT32_MAX);
        v_store((float *)key + t, v_select(s == s, (V)ordered, (V)((VI){0} + INT32_MIN + 1)));
    }
    for (int t = n; t < round_up(n, VL); t++)
        key[t] = INT32_MIN;
}

INLINE VI load_keys(const int32_t *key) { return (VI)v_load((const float *)key); }

/* Returns how many of n keys are at least `least`. */
static int count_keys(const int32_t *key, int n, int32_t least) {
    VI count = {0};
    for (int t = 0; t < n; t += VL)
        count -= load_keys(key + t) >= least;
    return v_sum(__builtin_convertvector(count, V));
}

/* Returns the largest number that at least k of n keys reach, 1 <= k <= n, or another number that
 * exactly k of them reach. It is found bit by bit, the highest first. */
static int32_t kth_key(const int32_t *key, int n, int k) {
    int64_t least = INT32_MIN + 1; /* which no number behind the last key reaches */
    int reach = n;
    for (int64_t bit = 1ll << 31; bit && reach != k; bit /= 2) {
        int m = count_keys(key, n, (int32_t)(least + bit));
        if (m >= k) {
            least += bit;
            reach = m;
        }
    }
    return (int32_t)least;
}

/* Writes which k of n scores are the largest, of equal ones the earlier, in ascending order of
 * tokens. key: room for n numbers. */
static void select_tokens(int32_t *tokens, int32_t *key, const float *score, int n, int k) {
    if (k == 0)
        return;
    order_scores(key, score, n);
    int32_t least = kth_key(key, n, k);
    /* of those that are `least`, the last ones are left out */
    for (int t = n - 1, surplus = count_keys(key, n, least) - k; surplus > 0; t--)
        if (key[t] == least) {
            key[t] = INT32_MIN;
            surplus--;
        }
    for (int t = 0; t < n; t += VL) {
        VB reach = __builtin_convertvector(load_keys(key + t) >= least, VB) & 1;
        uint64_t byte[2] = {0};
        memcpy(byte, &reach, sizeof reach);
        for (int u = 0; u < VL; u += 8)
            for (uint64_t left = byte[u / 8]; left; left &= left - 1)
                *tokens++ = t + u + __builtin_ctzll(left) / 8;
    }
}

/* Returns where t, the chosen tokens or their probabilities, has those of head h of the task. */
static void *chosen_at(Tensor t, const Heads *c, int h) {
    return (int32_t *)t.at + c->r * t.ld + (c->h + h) * (t.cols / c->op->nh);
}

static void select_task(Heads c) {
    int chosen = sparse_tokens(c.op->sparsity, c.len);
    take_q(&c, round_up(c.len, BLOCK));
    float *score = c.score;
    const uint8_t *k[2][BLOCK + NR]; /* this block's and the next one's */
    int n = find_rows(k[0], &c, c.op->attend.k, 0), next;
    for (int t0 = 0, b = 0; t0 < c.len; t0 += BLOCK, b ^= 1, n = next) {
        next = find_rows(k[b ^ 1], &c, c.op->attend.k, t0 + BLOCK);
        c.score = score + t0;
        score_block((Block){&c, k[b], n, k[b ^ 1], next});
    }
    int32_t *key = (int32_t *)(score + c.nh * c.ld);
    for (int h = 0; h < c.nh; h++, score += c.ld) {
        int32_t *tokens = chosen_at(c.op->attend.tokens, &c, h);
        float *probs = chosen_at(c.op->attend.probs, &c, h);
        /* DIFFERS: the newest token is always one of them, unlike the paper's top-K */
        select_tokens(tokens, key, score, c.len - 1, chosen - 1);
        tokens[chosen - 1] = c.len - 1;
        float largest = -INFINITY; /* over all tokens, as the sum is */
        float sum = exponentiate(score, c.len, round_up(c.len, VL), &largest);
        for (int i = 0; i < chosen; i++)
            probs[i] = score[tokens[i]] / sum;
    }
}

void host_select(const Op *op) { for_tasks(op, heads_of_rows(op), select_task); }

static void weigh_task(Heads c) {
    enum { AHEAD = 2 * WEIGH }; /* rows from one that is read to one that is prefetched */
    int n = sparse_tokens(c.op->sparsity, c.len), all = c.nh * n;
    const uint8_t **rows; /* (nh, n): where the V of each head's chosen tokens lies */
    Heads one = c;        /* a head at a time, since each has other tokens */
    one.nh = 1;
    one.len = n;
    one.o = scratch(c.hdp + (all + NR) * (sizeof *rows / sizeof *one.o));
    rows = (void *)(one.o + c.hdp);
    for (int h = 0; h < c.nh; h++, one.h++) {
        one.tokens = chosen_at(c.op->attend.tokens, &c, h);
        for (int t0 = 0; t0 < n; t0 += BLOCK)
            find_rows(rows + h * n + t0, &one, c.op->attend.v, t0);
    }
    one.h = c.h;
    for (int h = 0; h < c.nh; h++, one.h++, rows += n) {
        one.score = chosen_at(c.op->attend.probs, &c, h);
        memset(one.o, 0, c.hdp * sizeof *one.o);
        weigh_block((Block){&one, rows, n, rows + AHEAD, (c.nh - h) * n - AHEAD});
        finish_head(&one, 0, (Seen){0, 1}); /* the probabilities have been divided by their sum */
    }
}

void host_weigh(const Op *op) { for_tasks(op, heads_of_rows(op), weigh_task); }
