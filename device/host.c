/* host.c: the device that is this CPU: embeddings and layer norms, new rows of the cache, the next
 * token. With host_linear.c (products) and host_attend.c (attention) it is the arithmetic of one
 * OPT layer and of the next token, as plain C. host_run has a function for each op; it specifies
 * what the CUDA launcher for the same op computes, host_attend what gpu_attend does.
 *
 * Contract. Batch invariance: an output element is computed by one fixed sequence of float
 * operations, whatever the other rows are, wherever its tile lies, however many threads run,
 * whatever the page size. So every sum has one order, which each file states. Nothing is static,
 * and working memory is each thread's own, so any lanes may call at once.
 * Read next: host_linear.c. */
#include <math.h>

#include "device/parts.h"

const char *host_isa(void) { return ISA; }

// -------------------------------------------------------------------------------------------------
// Rows: embed, layernorm
// -------------------------------------------------------------------------------------------------

static void embed_rows(const void *embed, int first, int n) {
    const Op *op = embed;
    const Tensor y = op->embed.y, table = op->embed.table;
    const int32_t *idx = op->embed.idx.at;
    for (int r = first; r < first + n; r++) {
        for (int c = 0; c < y.cols; c += VL) {
            size_t at = (size_t)r * y.cols + c;
            V v = load_any(table.at, table.type, idx[r] * table.ld + c, y.cols - c);
            if (op->add)
                v = load_any(y.at, y.type, at, y.cols - c) + v;
            store_any(y.at, y.type, at, v, y.cols - c);
        }
    }
}

static void host_embed(const Op *op) {
    const Type y = op->embed.y.type, table = op->embed.table.type;
    CHECK((y == F32 || y == F16) && (table == F16 || table == BF16 || table == F32));
    host_share((double)op->embed.y.rows * op->embed.y.cols, op->embed.y.rows, embed_rows, op);
}

/* Returns the sum over a row of (x - shift)^power, power 1 or 2. */
static float row_sum(const float *x, float shift, int power, int cols) {
    V sum = {0};
    int c = 0;
    for (; c + VL <= cols; c += VL) {
        V d = v_load(x + c) - shift;
        sum += power == 1 ? d : d * d;
    }
    float tail = 0;
    for (; c < cols; c++)
        tail += power == 1 ? x[c] - shift : (x[c] - shift) * (x[c] - shift);
    return v_sum(sum) + tail;
}

static void normalize_rows(const void *norm, int first, int rows) {
    const Op *op = norm;
    const int cols = op->layernorm.x.cols;
    const f16 *w = op->layernorm.w.at, *b = op->layernorm.b.at;
    for (int r = first; r < first + rows; r++) {
        const float *in = (const float *)op->layernorm.x.at + (size_t)r * cols;
        float *out = (float *)op->layernorm.y.at + (size_t)r * cols;
        float mean = row_sum(in, 0, 1, cols) / cols;
        float scale = 1 / sqrtf(row_sum(in, mean, 2, cols) / cols + 1e-5f);
        for (int c = 0; c < cols; c += VL) {
            int n = cols - c;
            V v = (v_load_part(in + c, n) - mean) * scale;
            v_store_part(out + c, v * v_load_f16_part(w + c, n) + v_load_f16_part(b + c, n), n);
        }
    }
}

static void host_layernorm(const Op *op) {
    const Tensor x = op->layernorm.x;
    host_share((double)x.rows * x.cols, x.rows, normalize_rows, op);
}

// -------------------------------------------------------------------------------------------------
// Packed weights to F16; new k and v, into pages
// -------------------------------------------------------------------------------------------------

static void host_unpack(const Op *op) {
    const Tensor w = op->unpack.w, packed = op->unpack.packed;
    for (int g = 0; g < packed.rows; g++)
        quant_unpack_rows((f16 *)w.at + (size_t)g * GROUP * w.cols,
                          (const uint8_t *)packed.at + (size_t)g * packed.cols, w.cols);
}

static void pack_rows(const void *pack, int first, int n) {
    const Op *op = pack;
    const Tensor packed = op->pack.packed, kv = op->pack.kv;
    for (int r = first; r < first + n; r++) /* a number that is not finite makes its group NaN */
        quant_pack_heads((uint8_t *)packed.at + (size_t)r * packed.cols,
                         (const f16 *)kv.at + r * kv.ld, 2 * op->nh, op->hd);
}

static void host_pack(const Op *op) {
    const Tensor kv = op->pack.kv;
    host_share(4.0 * kv.rows * kv.cols, kv.rows, pack_rows, op);
}

/* Writes row after row: a token's k to one place and its v to another. */
static void append_rows(const void *append, int first, int n) {
    const Op *op = append;
    const Tensor kv = op->append.kv, pages = op->append.pages, k = op->append.k;
    const int32_t *seq = op->append.seq.at, *pos = op->append.pos.at;
    const size_t bytes = k.cols * type_bytes(k.type);
    for (int r = first; r < first + n; r++) {
        int page = ((const int32_t *)pages.at)[seq[r] * pages.ld + pos[r] / op->page_tokens];
        size_t at = ((size_t)page * op->page_tokens + pos[r] % op->page_tokens) * bytes;
        uint8_t *to_k = (uint8_t *)k.at + at, *to_v = (uint8_t *)op->append.v.at + at;
        const uint8_t *from = (const uint8_t *)kv.at + r * kv.ld * type_bytes(kv.type);
        const uint8_t *from_v = from + kv.cols / 2 * type_bytes(kv.type);
        if (kv.type != k.type) {
            quant_pack_heads(to_k, (const f16 *)from, op->nh, op->hd);
            quant_pack_heads(to_v, (const f16 *)from_v, op->nh, op->hd);
        } else {
            memcpy(to_k, from, bytes);
            memcpy(to_v, from_v, bytes);
        }
        for (int h = 0; op->study.bits && h < op->nh; h++) {
            quant_round((f16 *)to_k + h * op->hd, 1, op->hd, op->study);
            quant_round((f16 *)to_v + h * op->hd, 1, op->hd, op->study);
        }
    }
}

static void host_append(const Op *op) {
    const Tensor kv = op->append.kv;
    const double work =
        kv.type != op->append.k.type ? 4.0 * kv.rows * kv.cols : (double)tensor_bytes(kv) / 2;
    /* D_WRITE works alone, without the team's help */
    host_share(op->lane == D_WRITE ? 0 : work, kv.rows, append_rows, op);
}

// -------------------------------------------------------------------------------------------------
// The next token
// -------------------------------------------------------------------------------------------------

static int pick_greedy(const float *logits, int vocab) {
    V top = v_set(-INFINITY); /* no comparison with NaN is true, so none gets in */
    int i = 0;
    for (; i + VL <= vocab; i += VL)
        top = v_max(top, v_load(logits + i));
    float best = v_largest(top);
    for (; i < vocab; i++)
        best = best < logits[i] ? logits[i] : best;
    for (i = 0; i < vocab; i++)
        if (logits[i] == best)
            return i;
    return 0;
}

/* Returns true if token a comes before b: it is more probable, or as probable with a lower id. */
static bool before(const float *p, int a, int b) { return p[a] > p[b] || (p[a] == p[b] && a < b); }

static void heap_sink(int *heap, int n, int at, const float *p) {
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(p, heap[child + 1], heap[child]))
            child++;
        if (before(p, heap[at], heap[child]))
            return;
        int swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
    }
}

/* Moves the first of n tokens behind the others and returns it. */
static int heap_pop(int *heap, int n, const float *p) {
    int first = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = first;
    heap_sink(heap, n - 1, 0, p);
    return first;
}

/* Sorts the most probable tokens to the END of ids[vocab], the most probable one last, and returns
 * how many they are: top_k, or fewer whose mass reaches top_p of the mass of these top_k. It uses a
 * heap, so that only the tokens that are kept get sorted. */
static int pick_cut(int *ids, const float *p, double *mass, const Sampling *s, int vocab) {
    const bool cut_k = s->top_k > 0 && s->top_k < vocab;
    const int most = cut_k ? s->top_k : vocab;
    int sorted = 0, kept = 0;
    double sum = 0;
    for (int i = vocab / 2; i-- > 0;)
        heap_sink(ids, vocab, i, p);
    if (cut_k)
        for (*mass = 0; sorted < most;)
            *mass += p[heap_pop(ids, vocab - sorted++, p)];
    const double want = s->top_p < 1 ? s->top_p * *mass : INFINITY;
    while (kept < most && (kept == 0 || sum < want)) {
        if (kept == sorted)
            heap_pop(ids, vocab - sorted++, p);
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
    for (int i = 0; i < vocab; i++) {
        ids[vocab - 1 - i] = i;
        mass += p[i];
    }
    bool cut = (s->top_k > 0 && s->top_k < vocab) || s->top_p < 1;
    int kept = cut ? pick_cut(ids, p, &mass, s, vocab) : vocab;
    double sum = 0;
    for (int i = 0; i < kept; i++) {
        int id = ids[vocab - 1 - i];
        sum += p[id];
        if (sum > u * mass)
            return id;
    }
    return best; /* no token has a weight: the logits are infinities or NaN */
}

static void pick_rows(const void *pick, int first, int n) {
    const Op *op = pick;
    const Sampling *s = &op->sampling;
    const int vocab = op->pick.logits.cols;
    int32_t *ids = op->pick.ids.at;
    const int32_t *prompt = op->pick.prompt.at, *pos = op->pick.pos.at;
    for (int r = first; r < first + n; r++) {
        const float *row = (const float *)op->pick.logits.at + (size_t)r * vocab;
        ids[r] = s->temperature > 0
                     ? pick_sample(row, random_draw(s->seed, prompt[r], pos[r]), s, vocab)
                     : pick_greedy(row, vocab);
    }
}

static void host_pick(const Op *op) {
    const Tensor logits = op->pick.logits;
    host_share((double)logits.rows * logits.cols, logits.rows, pick_rows, op);
}

/* Returns the sum of e^(x[i] - top): short sums are added in float, and these in double. */
static double sum_exp(const float *x, float top, int n) {
    enum { SHORT = 64 * VL };
    double sum = 0;
    for (int i = 0; i < n; i += SHORT) {
        V part = {0};
        for (int at = i; at < imin(n, i + SHORT); at += VL) {
            V e = v_exp(v_load_part(x + at, n - at) - top);
            for (int u = n - at; u < VL; u++)
                e[u] = 0;
            part += e;
        }
        sum += v_sum(part);
    }
    return sum;
}

static void score_rows(const void *score, int first, int n) {
    const Op *op = score;
    const int vocab = op->score.logits.cols;
    float *logp = op->score.logp.at;
    int32_t *best = op->score.best.at;
    const int32_t *target = op->score.target.at;
    for (int r = first; r < first + n; r++) {
        const float *row = (const float *)op->score.logits.at + (size_t)r * vocab;
        best[r] = pick_greedy(row, vocab);
        float top = row[best[r]];
        logp[r] = (float)((double)row[target[r]] - top - log(sum_exp(row, top, vocab)));
    }
}

static void host_score(const Op *op) {
    const Tensor logits = op->score.logits;
    host_share((double)logits.rows * logits.cols, logits.rows, score_rows, op);
}

void host_run(const Op *op) {
    static void (*const run[NCODES])(const Op *) = {
        [OP_EMBED] = host_embed,   [OP_LAYERNORM] = host_layernorm,
        [OP_LINEAR] = host_linear, [OP_UNPACK] = host_unpack,
        [OP_PACK] = host_pack,     [OP_ATTEND_PREFILL] = host_attend_prefill,
        [OP_ATTEND] = host_attend, [OP_SELECT] = host_select,
        [OP_WEIGH] = host_weigh,   [OP_APPEND] = host_append,
        [OP_PICK] = host_pick,     [OP_SCORE] = host_score,
    };
    CHECK(run[op->code]);
    run[op->code](op);
}
