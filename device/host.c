/* host.c: the device that is this CPU: embeddings and layer norms, new rows of the cache, the next token. With
 * host_linear.c (products) and host_attend.c (attention) it is the arithmetic of one OPT layer and of the next token, as
 * plain C on plain pointers; each function is the specification of the CUDA launcher of the same name.
 *
 * Contract. Batch invariance: an output element is computed by one fixed sequence of float operations, whatever the
 * other rows are, wherever its tile lies, however many threads run, whatever the page size. So every sum has one order,
 * which each file states. Nothing is static, and working memory is each thread's own, so any lanes may call at once.
 * Read next: team.c, the threads. */
#include <math.h>

#include "device/host.h"

const char *host_isa(void) { return ISA; }

// ---------------------------------------------------------------------------------------------------------------
// Rows: embed, layernorm
// ---------------------------------------------------------------------------------------------------------------

static void embed_rows(const void *lookup, int first, int n) {
    const Lookup *l = lookup;
    for (int r = first; r < first + n; r++) {
        for (int c = 0; c < l->cols; c += VL) {
            size_t at = (size_t)r * l->cols + c;
            V v = load_any(l->table, l->type, l->idx[r] * l->table_ld + c, l->cols - c);
            if (l->add) v = load_any(l->y, l->y_type, at, l->cols - c) + v;
            store_any(l->y, l->y_type, at, v, l->cols - c);
        }
    }
}

void host_embed(const Lookup *l) {
    CHECK((l->y_type == F32 || l->y_type == F16) && (l->type == F16 || l->type == BF16 || l->type == F32));
    host_share((double)l->rows * l->cols, l->rows, embed_rows, l);
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

typedef struct {
    float *y;
    const float *x;
    const f16 *w, *b;
    int cols;
} Norm;

static void normalize_rows(const void *norm, int first, int rows) {
    const Norm *a = norm;
    const int cols = a->cols;
    for (int r = first; r < first + rows; r++) {
        const float *in = a->x + (size_t)r * cols;
        float *out = a->y + (size_t)r * cols;
        float mean = row_sum(in, 0, 1, cols) / cols;
        float scale = 1 / sqrtf(row_sum(in, mean, 2, cols) / cols + 1e-5f);
        for (int c = 0; c < cols; c += VL) {
            int n = cols - c;
            V v = (v_load_part(in + c, n) - mean) * scale;
            v_store_part(out + c, v * v_load_f16_part(a->w + c, n) + v_load_f16_part(a->b + c, n), n);
        }
    }
}

void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols) {
    host_share((double)rows * cols, rows, normalize_rows, &(Norm){y, x, w, b, cols});
}

// ---------------------------------------------------------------------------------------------------------------
// New k and v, into pages
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    uint8_t *packed;
    const f16 *kv;
    int ld, nh, hd;
} Packs;

static void pack_rows(const void *packs, int first, int n) {
    const Packs *p = packs;
    const size_t row = 2 * p->nh * quant_bytes(p->hd); /* k's heads, then v's */
    for (int r = first; r < first + n; r++)            /* what is not finite poisons its group alone */
        quant_pack_heads(p->packed + r * row, p->kv + (size_t)r * p->ld, 2 * p->nh, p->hd);
}

void host_pack(uint8_t *packed, const f16 *kv, int ld, int rows, int nh, int hd) {
    host_share(8.0 * rows * nh * hd, rows, pack_rows, &(Packs){packed, kv, ld, nh, hd});
}

/* Row after row: a token's k goes to one place and its v to another, and both are written in order. */
static void append_rows(const void *append, int first, int n) {
    const Append *a = append;
    const size_t bytes = (size_t)a->width * sizeof(f16);
    for (int r = first; r < first + n; r++) {
        int page = a->pages[(size_t)a->seq[r] * a->max_pages + a->pos[r] / a->page_tokens];
        size_t at = ((size_t)page * a->page_tokens + a->pos[r] % a->page_tokens) * bytes;
        uint8_t *k = (uint8_t *)a->k + at, *v = (uint8_t *)a->v + at;
        const f16 *from = a->kv + (size_t)r * a->ld;
        if (a->pack) {
            quant_pack_heads(k, from, a->nh, a->hd);
            quant_pack_heads(v, from + a->nh * a->hd, a->nh, a->hd);
        } else {
            memcpy(k, from, bytes);
            memcpy(v, from + a->width, bytes);
        }
        for (int h = 0; a->study.bits && h < a->nh; h++) { /* what is not finite poisons its group alone */
            quant_round((f16 *)k + h * a->hd, 1, a->hd, a->study);
            quant_round((f16 *)v + h * a->hd, 1, a->hd, a->study);
        }
    }
}

void host_append(const Append *a) {
    const double work = a->pack ? 8.0 * a->rows * a->nh * a->hd : (double)a->rows * a->width * sizeof(f16);
    host_share(a->alone ? 0 : work, a->rows, append_rows, a);
}

// ---------------------------------------------------------------------------------------------------------------
// The next token
// ---------------------------------------------------------------------------------------------------------------

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

/* Moves the first of n tokens behind the others, and returns it. */
static int heap_pop(int *heap, int n, const float *p) {
    int first = heap[0];
    heap[0] = heap[n - 1], heap[n - 1] = first;
    heap_sink(heap, n - 1, 0, p);
    return first;
}

/* Puts the first tokens of ids[vocab] in order of probability at its END, the most probable last, and returns how many:
 * top_k, or fewer whose mass reaches top_p of what top_k left. A heap, so that only what is kept gets sorted. */
static int pick_cut(int *ids, const float *p, double *mass, const Sampling *s, int vocab) {
    const bool cut_k = s->top_k > 0 && s->top_k < vocab;
    const int most = cut_k ? s->top_k : vocab;
    int sorted = 0, kept = 0;
    double sum = 0;
    for (int i = vocab / 2; i-- > 0;) heap_sink(ids, vocab, i, p);
    if (cut_k)
        for (*mass = 0; sorted < most;) *mass += p[heap_pop(ids, vocab - sorted++, p)];
    const double want = s->top_p < 1 ? s->top_p * *mass : INFINITY;
    while (kept < most && (kept == 0 || sum < want)) {
        if (kept == sorted) heap_pop(ids, vocab - sorted++, p);
        sum += p[ids[vocab - ++kept]];
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

typedef struct {
    int32_t *ids;
    const float *logits;
    const int32_t *prompt, *pos;
    const Sampling *sampling;
    int vocab;
} Picks;

static void pick_rows(const void *picks, int first, int n) {
    const Picks *p = picks;
    const Sampling *s = p->sampling;
    for (int r = first; r < first + n; r++) {
        const float *row = p->logits + (size_t)r * p->vocab;
        p->ids[r] = s->temperature > 0 ? pick_sample(row, random_draw(s->seed, p->prompt[r], p->pos[r]), s, p->vocab)
                                       : pick_greedy(row, p->vocab);
    }
}

void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling,
               int rows, int vocab) {
    host_share((double)rows * vocab, rows, pick_rows, &(Picks){ids, logits, prompt, pos, sampling, vocab});
}

/* The sum of e^(x[i] - top): short sums in float, and these in double. */
static double sum_exp(const float *x, float top, int n) {
    enum { SHORT = 64 * VL };
    double sum = 0;
    for (int i = 0; i < n; i += SHORT) {
        V part = {0};
        for (int at = i; at < imin(n, i + SHORT); at += VL) {
            V e = v_exp(v_load_part(x + at, n - at) - top);
            for (int lane = n - at; lane < VL; lane++) e[lane] = 0;
            part += e;
        }
        sum += v_sum(part);
    }
    return sum;
}

typedef struct {
    float *logp;
    int32_t *best;
    const float *logits;
    const int32_t *target;
    int vocab;
} Scores;

static void score_rows(const void *scores, int first, int n) {
    const Scores *s = scores;
    for (int r = first; r < first + n; r++) {
        const float *row = s->logits + (size_t)r * s->vocab;
        s->best[r] = pick_greedy(row, s->vocab);
        float top = row[s->best[r]];
        s->logp[r] = (float)((double)row[s->target[r]] - top - log(sum_exp(row, top, s->vocab)));
    }
}

void host_score(float *logp, int32_t *best, const float *logits, const int32_t *target, int rows, int vocab) {
    host_share((double)rows * vocab, rows, score_rows, &(Scores){logp, best, logits, target, vocab});
}
