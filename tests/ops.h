/* ops.h: ops whose views are at addresses, of the host or of a GPU, for tests and benchmarks that carry them out without
 * lanes. Arguments are in the order of the constructors' in device/ops.h, pointers with the sizes of what they point to;
 * NULL: no such view. `act` is the type of activations, F32 on the host and F16 on a GPU. Their lane is PROJECT. */
#ifndef TESTS_OPS_H
#define TESTS_OPS_H
#include "device/parts.h"

/* (rows, cols), rows ld elements apart. */
static inline Tensor tensor_at(const void *p, Type type, int rows, int cols, size_t ld) {
    Tensor t;
    memset(&t, 0, sizeof t);
    t.type = type, t.rows = p ? rows : 0, t.cols = cols, t.ld = ld, t.at = (void *)p;
    return t;
}
static inline Tensor row_at(const void *p, Type type, int n) { return tensor_at(p, type, 1, n, n); }

static inline Call on_lane(Lane lane) {
    Call call;
    memset(&call, 0, sizeof call);
    call.lane = lane;
    return call;
}

static inline Op embedding(const void *y, Type y_type, const void *table, Type type, size_t table_ld, const int32_t *idx,
                           int rows, int cols, bool add) {
    const Tensor to = tensor_at(y, y_type, rows, cols, cols), from = tensor_at(table, type, 1, cols, table_ld);
    return op_embed(on_lane(PROJECT), to, from, row_at(idx, I32, rows), add);
}

static inline Op norm(Type act, const void *y, const void *x, const void *w, const void *b, int rows, int cols) {
    const Tensor to = tensor_at(y, act, rows, cols, cols), from = tensor_at(x, act, rows, cols, cols);
    return op_layernorm(on_lane(PROJECT), to, from, row_at(w, F16, cols), row_at(b, F16, cols));
}

/* w (n, k) F16, or packed. residual: as y lies. */
static inline Op product(Type act, const void *y, Type y_type, size_t y_ld, const void *x, const void *w, const void *b,
                         const void *residual, bool packed, bool relu, int m, int n, int k) {
    const Tensor weights = packed ? row_at(w, U8, (int)quant_matrix_bytes(n, k)) : tensor_at(w, F16, n, k, k);
    Op op = op_linear(on_lane(PROJECT), tensor_at(y, y_type, m, n, y_ld), tensor_at(x, act, m, k, k), weights,
                      row_at(b, F16, n), tensor_at(residual, y_type, m, n, y_ld));
    op.relu = relu;
    return op;
}

/* start (nseq + 1) ends at row `rows`; q and kv have rows ld apart. */
static inline Op prefilling(Type act, const void *o, const f16 *q, const f16 *kv, const int32_t *start, int nseq, int rows,
                            int h1, int nh, int ld) {
    return op_attend_prefill(on_lane(PROJECT), tensor_at(o, act, rows, h1, h1), tensor_at(q, F16, rows, h1, ld),
                             tensor_at(kv, F16, rows, 2 * h1, ld), row_at(start, I32, nseq + 1), nh);
}

/* Pages of K and V as halves, or packed; pages (nseq, max_pages), len (nseq). */
static inline PageTable paged(const void *k, const void *v, const int32_t *pages, const int32_t *len, int nseq,
                              int max_pages, int page_tokens, int h1, int nh, bool packed) {
    PageTable t;
    const int row = packed ? nh * (int)quant_bytes(h1 / nh) : h1;
    t.k = tensor_at(k, packed ? U8 : F16, 1, row, row), t.v = tensor_at(v, t.k.type, 1, row, row);
    t.pages = tensor_at(pages, I32, nseq, max_pages, max_pages), t.len = row_at(len, I32, nseq);
    t.page_tokens = page_tokens, t.nh = nh;
    return t;
}

/* q (nseq, h1), rows ld apart. */
static inline Op attention(const void *o, Type o_type, const f16 *q, int ld, int h1, PageTable table) {
    const int nseq = table.len.cols;
    return op_attend(on_lane(PROJECT), tensor_at(o, o_type, nseq, h1, h1), tensor_at(q, F16, nseq, h1, ld), &table);
}

/* tokens, weights (nseq, nh, most). */
static inline Op selection(const int32_t *tokens, const float *weights, int most, const f16 *q, int ld, int h1,
                           PageTable table, double sparsity) {
    const int nseq = table.len.cols, cols = table.nh * most;
    return op_select(on_lane(PROJECT), tensor_at(tokens, I32, nseq, cols, cols), tensor_at(weights, F32, nseq, cols, cols),
                     tensor_at(q, F16, nseq, h1, ld), &table, sparsity);
}

/* kv (rows, cols) F16, or with packed pages of the same type as these if `packed`; its rows are ld elements apart. */
static inline Op appending(PageTable table, const void *kv, int cols, bool packed, int ld, const int32_t *seq,
                           const int32_t *pos, int rows) {
    return op_append(on_lane(PROJECT), &table, tensor_at(kv, packed ? U8 : F16, rows, cols, ld), row_at(seq, I32, rows),
                     row_at(pos, I32, rows));
}

/* Prompts at the places from 0, all sampled in this way. The next call changes them. */
enum { SAMPLED = 100 };
static inline const Prompt *prompts_sampled(Sampling sampling) {
    static Prompt prompts[SAMPLED];
    for (int i = 0; i < SAMPLED; i++) {
        prompts[i].place = i;
        prompts[i].sampling = sampling;
    }
    return prompts;
}

static inline Op picking(const int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos,
                         Sampling sampling, int rows, int vocab) {
    return op_pick(on_lane(PROJECT), row_at(ids, I32, rows), tensor_at(logits, F32, rows, vocab, vocab),
                   row_at(prompt, I32, rows), row_at(pos, I32, rows), prompts_sampled(sampling));
}

/* On the host. */
static inline void run(Op op) { host_run(&op); }

static inline int by_size(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }
/* Sorts what was measured n times, and returns the median. */
static inline double median(double *x, int n) {
    qsort(x, n, sizeof *x, by_size);
    return x[n / 2];
}

#endif
