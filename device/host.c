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
    Tensor y = op->embed.y, table = op->embed.table;
    const int32_t *idx = op->embed.idx.at;
    f16 *unpacked = (f16 *)(void *)scratch(y.cols);
    int tokens = table.type == U8 ? GROUP : 1; /* of a row of the table */
    for (int r = first; r < first + n; r++) {
        Tensor row = tensor_rows(table, idx[r] / tokens, 1);
        if (tokens > 1) {
            quant_unpack_row(unpacked, row.at, idx[r] % tokens, y.cols);
            row.type = F16;
            row.at = unpacked;
        }
        for (int c = 0; c < y.cols; c += VL) {
            size_t at = (size_t)r * y.cols + c;
            V v = load_any(row.at, row.type, c, y.cols - c);
            if (op->add)
                v = load_any(y.at, y.type, at, y.cols - c) + v;
            store_any(y.at, y.type, at, v, y.cols - c);
        }
    }
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
    int cols = op->layernorm.x.cols;
    const f16 *w = op->layernorm.w.at, *b = op->layernorm.b.at;
    for (int r = first; r < first + rows; r++) {
        const float *in = tensor_rows(op->layernorm.x, r, 1).at;
        float *out = tensor_rows(op->layernorm.y, r, 1).at;
        float mean = row_sum(in, 0, 1, cols) / cols;
        float scale = 1 / sqrtf(row_sum(in, mean, 2, cols) / cols + 1e-5f);
        for (int c = 0; c < cols; c += VL) {
            int n = cols - c;
            V v = (v_load_part(in + c, n) - mean) * scale;
            v_store_part(out + c, v * v_load_f16_part(w + c, n) + v_load_f16_part(b + c, n), n);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Packed weights to F16; new k and v, into pages
// -------------------------------------------------------------------------------------------------

static void unpack_rows(const void *unpack, int first, int n) {
    const Op *op = unpack;
    Tensor w = op->unpack.w;
    for (int g = first; g < first + n; g++)
        quant_unpack_rows(tensor_rows(w, g * GROUP, GROUP).at,
                          tensor_rows(op->unpack.packed, g, 1).at, w.cols);
}

static void pack_rows(const void *pack, int first, int n) {
    const Op *op = pack;
    for (int r = first; r < first + n; r++) /* a number that is not finite makes its group NaN */
        quant_pack_heads(tensor_rows(op->pack.packed, r, 1).at, tensor_rows(op->pack.kv, r, 1).at,
                         2 * op->nh, op->hd);
}

/* Writes row after row: a token's k to one place and its v to another. */
static void append_rows(const void *append, int first, int n) {
    const Op *op = append;
    Tensor kv = op->append.kv, k = op->append.k;
    const int32_t *seq = op->append.seq.at, *pos = op->append.pos.at;
    size_t bytes = k.cols * type_bytes(k.type);
    for (int r = first; r < first + n; r++) {
        const int32_t *pages = tensor_rows(op->append.pages, seq[r], 1).at;
        size_t page = pages[pos[r] / op->page_tokens],
               row = page * op->page_tokens + pos[r] % op->page_tokens;
        for (int v = 0; v < 2; v++) { /* k and then v */
            const void *from = tensor_cols(tensor_rows(kv, r, 1), v * kv.cols / 2, 1).at;
            void *to = (uint8_t *)op->view[v].at + row * bytes;
            if (kv.type == k.type)
                memcpy(to, from, bytes);
            else
                quant_pack_heads(to, from, op->nh, op->hd);
            for (int h = 0; op->study.bits && h < op->nh; h++)
                quant_round((f16 *)to + h * op->hd, 1, op->hd, op->study);
        }
    }
}

static void host_append(const Op *op) {
    Tensor kv = op->append.kv;
    double work = kv.type != op->append.k.type ? 4.0 * kv.rows * kv.cols : tensor_bytes(kv) / 2;
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
    bool cut_k = s->top_k > 0 && s->top_k < vocab;
    int most = cut_k ? s->top_k : vocab;
    int sorted = 0, kept = 0;
    double sum = 0;
    for (int i = vocab / 2; i-- > 0;)
        heap_sink(ids, vocab, i, p);
    if (cut_k)
        for (*mass = 0; sorted < most;)
            *mass += p[heap_pop(ids, vocab - sorted++, p)];
    double want = s->top_p < 1 ? s->top_p * *mass : INFINITY;
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
    float *p = scratch(padded * 2);
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
    int vocab = op->pick.logits.cols;
    int32_t *ids = op->pick.ids.at;
    const int32_t *prompt = op->pick.prompt.at, *pos = op->pick.pos.at;
    for (int r = first; r < first + n; r++) {
        const float *row = tensor_rows(op->pick.logits, r, 1).at;
        const Prompt *q = &op->prompts[prompt[r]];
        const Sampling *s = &q->sampling;
        int place = s->placeless ? 0 : q->place;
        ids[r] = s->temperature > 0
                     ? pick_sample(row, random_draw(s->seed, place, pos[r]), s, vocab)
                     : pick_greedy(row, vocab);
    }
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
    int vocab = op->score.logits.cols;
    float *logp = op->score.logp.at;
    int32_t *best = op->score.best.at;
    const int32_t *target = op->score.target.at;
    for (int r = first; r < first + n; r++) {
        const float *row = tensor_rows(op->score.logits, r, 1).at;
        best[r] = pick_greedy(row, vocab);
        float top = row[best[r]];
        logp[r] = (double)row[target[r]] - top - log(sum_exp(row, top, vocab));
    }
}

/* An op that is a loop over the rows of one of its views. */
typedef struct {
    LoopPart part;
    int view;
    double work; /* multiplications for a number of the view, or as much of something else */
} RowLoop;

static const RowLoop row_loop[NCODES] = {
    [OP_EMBED] = {embed_rows, 0, 1},   [OP_LAYERNORM] = {normalize_rows, 1, 1},
    [OP_UNPACK] = {unpack_rows, 1, 1}, [OP_PACK] = {pack_rows, 1, 4},
    [OP_PICK] = {pick_rows, 1, 1},     [OP_SCORE] = {score_rows, 2, 1},
};

void host_run(const Op *op) {
    static void (*const run[NCODES])(const Op *) = {
        [OP_LINEAR] = host_linear, [OP_ATTEND_PREFILL] = host_attend_prefill,
        [OP_ATTEND] = host_attend, [OP_SELECT] = host_select,
        [OP_WEIGH] = host_weigh,   [OP_APPEND] = host_append,
    };
    const RowLoop *loop = &row_loop[op->code];
    Tensor view = op->view[loop->view];
    CHECK(loop->part || run[op->code]);
    if (loop->part)
        host_share(loop->work * view.rows * view.cols, view.rows, loop->part, op);
    else
        run[op->code](op);
}
