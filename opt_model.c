/* opt_model.c: OPT, the model (section 3 of the paper).
 *
 * First comes a plain forward pass of one whole sequence, which is the specification of everything
 * else. Then comes the same computation as ops, for the pieces of a sweep. A decoder layer
 * computes, in the paper's letters and with x of shape (tokens, h1),
 *
 *     q, k, v = ln(x) w_q, ln(x) w_k, ln(x) w_v
 *     a = softmax(q k^T / sqrt(hd)) v
 *     x = a w_o + x
 *     x = relu(ln(x) w_1) w_2 + x
 *
 * where every product with a matrix w also adds a bias. opt-350m normalizes after each sum instead
 * of before each product. The paper prints the layer without its layernorms; the checkpoints have
 * them. Read next: admission.c. */
#include <math.h>

#include "base/simd.h"
#include "device/ops.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// The plain forward
// -------------------------------------------------------------------------------------------------

/* An absent tensor. */
static const Tensor none = {0};

/* In this chapter w.at, of a weight's Tensor, is the address of its numbers as floats. */

/* Computes y = x w^T + b. y (m, n), x (m, k), w (n, k), b (n) or absent. */
static void plain_linear(float *y, const float *x, Tensor w, Tensor b, int m) {
    const float *bias = b.at;
    for (int r = 0; r < m; r++)
        for (int c = 0; c < w.rows; c++) {
            const float *xr = x + (size_t)r * w.cols, *wc = (float *)w.at + (size_t)c * w.cols;
            float sum = 0;
            for (int p = 0; p < w.cols; p++)
                sum += xr[p] * wc[p];
            y[(size_t)r * w.rows + c] = bias ? sum + bias[c] : sum;
        }
}

/* Computes y = (x - mean) / sqrt(var + 1e-5) * w + b, row by row; y may be x. y, x (rows, cols), w,
 * b (cols). */
static void plain_layernorm(float *y, const float *x, Tensor w, Tensor b, int rows) {
    const float *times = w.at, *plus = b.at;
    for (int r = 0; r < rows; r++, x += w.cols, y += w.cols) {
        float mean = 0, var = 0;
        for (int c = 0; c < w.cols; c++)
            mean += x[c];
        mean /= w.cols;
        for (int c = 0; c < w.cols; c++)
            var += (x[c] - mean) * (x[c] - mean);
        float scale = 1 / sqrtf(var / w.cols + 1e-5f);
        for (int c = 0; c < w.cols; c++)
            y[c] = (x[c] - mean) * scale * times[c] + plus[c];
    }
}

/* Adds y to x. */
static void plain_add(float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

void plain_attention(float *o, const float *q, const float *k, const float *v, int n,
                     const OptConfig *c) {
    size_t h1 = c->h1, hd = h1 / c->nh;
    float *score = xcalloc(n, sizeof *score); /* of one query */
    for (int head = 0; head < c->nh; head++)
        for (int t = 0; t < n; t++) {
            const float *qt = q + t * h1 + head * hd;
            float *ot = o + t * h1 + head * hd;
            float max = -INFINITY, sum = 0;
            /* the scores of the tokens that it sees */
            for (int u = 0; u <= t; u++) {
                const float *ku = k + u * h1 + head * hd;
                score[u] = 0;
                for (size_t d = 0; d < hd; d++)
                    score[u] += qt[d] * ku[d];
                score[u] /= sqrtf(hd);
                max = fmaxf(max, score[u]);
            }
            /* their softmax, and the weighted sum of v */
            for (int u = 0; u <= t; u++)
                sum += score[u] = expf(score[u] - max);
            for (size_t d = 0; d < hd; d++)
                ot[d] = 0;
            for (int u = 0; u <= t; u++)
                for (size_t d = 0; d < hd; d++)
                    ot[d] += score[u] / sum * v[u * h1 + head * hd + d];
        }
    free(score);
}

/* Computes multi-head attention with its residual; w holds the layer's tensors, x is (n, h1). */
static void plain_attention_block(float *x, const Tensor w[NROLES], const OptConfig *c, int n) {
    size_t size = (size_t)n * c->h1;
    float *y = xcalloc(5 * size, sizeof *y), *q = y + size, *k = q + size, *v = k + size,
          *a = v + size;
    const float *in = c->pre_norm ? y : x;
    if (c->pre_norm)
        plain_layernorm(y, x, w[LN1_W], w[LN1_B], n);
    plain_linear(q, in, w[Q_W], w[Q_B], n);
    plain_linear(k, in, w[K_W], w[K_B], n);
    plain_linear(v, in, w[V_W], w[V_B], n);
    for (float *e = q; e < a; e++) /* q, k and v are rounded, as the engine does to store them */
        *e = f16_to_f32(f32_to_f16(*e));
    plain_attention(a, q, k, v, n, c);
    plain_linear(y, a, w[O_W], w[O_B], n);
    plain_add(x, y, size);
    if (!c->pre_norm)
        plain_layernorm(x, x, w[LN1_W], w[LN1_B], n);
    free(y);
}

/* Computes the feed-forward network with its residual; x, w as above. ReLU replaces negative
 * numbers between its two products by 0. */
static void plain_ffn_block(float *x, const Tensor w[NROLES], const OptConfig *c, int n) {
    size_t size = (size_t)n * c->h1, inner_size = (size_t)n * c->h2;
    float *y = xcalloc(size + inner_size, sizeof *y), *inner = y + size;
    if (c->pre_norm)
        plain_layernorm(y, x, w[LN2_W], w[LN2_B], n);
    plain_linear(inner, c->pre_norm ? y : x, w[FC1_W], w[FC1_B], n);
    for (size_t e = 0; e < inner_size; e++)
        inner[e] = fmaxf(inner[e], 0);
    plain_linear(y, inner, w[FC2_W], w[FC2_B], n);
    plain_add(x, y, size);
    if (!c->pre_norm)
        plain_layernorm(x, x, w[LN2_W], w[LN2_B], n);
    free(y);
}

/* Computes x = project_in(token table[ids]) + position table[2 ..]; OPT's positions are offset by 2
 * (OptConfig.max_pos). g holds the tensors outside the layers; without project_in the rows of the
 * token table are used as they are. */
static void plain_embed(float *x, const Tensor g[NGLOBALS], const OptConfig *c, const int32_t *ids,
                        int n) {
    size_t embed = c->embed, h1 = c->h1;
    const float *table = g[TOK_EMBED].at, *positions = g[POS_EMBED].at;
    float *rows = xcalloc(n * embed, sizeof *rows);
    for (int t = 0; t < n; t++)
        memcpy(rows + t * embed, table + ids[t] * embed, embed * sizeof *rows);
    if (g[PROJECT_IN].rows)
        plain_linear(x, rows, g[PROJECT_IN], none, n);
    else
        memcpy(x, rows, n * embed * sizeof *rows);
    plain_add(x, positions + 2 * h1, n * h1);
    free(rows);
}

/* Computes logits (n, vocab) from x: final norm, project_out, then the head. */
static void plain_head(float *logits, float *x, const Tensor g[NGLOBALS], const OptConfig *c,
                       int n) {
    Tensor project = g[PROJECT_OUT], head = g[LM_HEAD].rows ? g[LM_HEAD] : g[TOK_EMBED];
    head.rows = c->vocab; /* a packed one was filled up to whole groups */
    float *y = xcalloc((size_t)n * project.rows, sizeof *y);
    if (g[FINAL_LN_W].rows)
        plain_layernorm(x, x, g[FINAL_LN_W], g[FINAL_LN_B], n);
    if (project.rows)
        plain_linear(y, x, project, none, n);
    plain_linear(logits, project.rows ? y : x, head, none, n);
    free(y);
}

/* Reads count tensors as floats; absent ones stay absent. On failure the tensors read so far stay
 * for the caller to free. */
static int read_floats(Tensor *to, const Checkpoint *checkpoint, const Tensor *from, int count,
                       Error *err) {
    for (int i = 0; i < count; i++) {
        to[i] = from[i];
        if (from[i].type == U8) { /* a packed tensor's shape counts groups: make it count numbers */
            to[i].rows *= GROUP;
            to[i].cols /= GROUP_BYTES;
        }
        if (from[i].rows && !(to[i].at = checkpoint_floats(checkpoint, &from[i], err)))
            return -1;
    }
    return 0;
}

/* Frees the numbers of count tensors. */
static void free_floats(Tensor *tensors, int count) {
    for (int i = 0; i < count; i++) {
        free(tensors[i].at);
        tensors[i].at = NULL;
    }
}

int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n,
                      Error *err) {
    const OptConfig *c = &checkpoint->config;
    CHECK(n > 0 && n <= c->max_pos);
    for (int t = 0; t < n; t++)
        CHECK(ids[t] >= 0 && ids[t] < c->vocab);
    Tensor g[NGLOBALS] = {none}, w[NROLES] = {none};
    float *x = xcalloc((size_t)n * c->h1, sizeof *x); /* (n, h1) passes from layer to layer */
    int status = read_floats(g, checkpoint, checkpoint->global, NGLOBALS, err);
    if (!status)
        plain_embed(x, g, c, ids, n);
    for (int j = 0; j < c->l && !status; j++) {
        status = read_floats(w, checkpoint, checkpoint->layer[j], NROLES, err);
        if (!status) {
            plain_attention_block(x, w, c, n);
            plain_ffn_block(x, w, c, n);
        }
        free_floats(w, NROLES);
    }
    if (!status)
        plain_head(logits, x, g, c, n);
    free_floats(g, NGLOBALS);
    free(x);
    return status;
}

// -------------------------------------------------------------------------------------------------
// The forward pass as ops, in pieces of a sweep
//
// On a first reading stop here, and come back from `compute` in schedule.c, which calls these
// functions.
// -------------------------------------------------------------------------------------------------

/* Returns scratch on the GPU for the rows of x, in a region that only one lane uses. */
static Tensor scratch_rows(const Plan *plan, RegionId id, Tensor x) {
    return plan_view(plan, id, TIER_GPU, 0, 0, x.rows);
}

void opt_embed(Poster *poster, Call call, const Plan *plan, Tensor x, Tensor tokens,
               Tensor positions) {
    bool projected = plan->config.embed != plan->config.h1;
    /* With project_in x begins as the rows of the position table, and the product is added to it.
     * Without it x is `tokens` itself, and the rows of the position table are added to it. */
    post(poster, op_embed(call, x, plan->global[POS_EMBED].home, positions, !projected));
    if (projected)
        post(poster, op_linear(call, x, tokens, plan->global[PROJECT_IN].home, none, x));
}

/* Returns the tensors of q, k and v as one tensor; they must lie directly behind each other. */
static Tensor joined(const Tensor *q) {
    Tensor k = q[K_W - Q_W], v = q[V_W - Q_W];
    Tensor all = *q;
    CHECK(all.offset + tensor_span(all) == k.offset && k.offset + tensor_span(k) == v.offset);
    all.rows += k.rows + v.rows;
    return all;
}

void opt_project(Poster *poster, Call call, const Plan *plan, const Tensor w[NROLES], Tensor qkv,
                 Tensor x) {
    bool pre_norm = plan->config.pre_norm;
    Tensor in = pre_norm ? scratch_rows(plan, NORM_1, x) : x;
    if (pre_norm)
        post(poster, op_layernorm(call, in, x, w[LN1_W], w[LN1_B]));
    post(poster, op_linear(call, qkv, in, joined(&w[Q_W]), tensor_flat(joined(&w[Q_B])), none));
}

void opt_finish(Poster *poster, Call call, const Plan *plan, const Tensor w[NROLES], Tensor x,
                Tensor o) {
    bool pre_norm = plan->config.pre_norm;
    Role norm = pre_norm ? LN2_W : LN1_W; /* opt-350m: the first norm comes after attention */
    Tensor in = pre_norm ? scratch_rows(plan, NORM_2, x) : x;
    Tensor inner = scratch_rows(plan, MLP, x);
    post(poster, op_linear(call, x, o, w[O_W], w[O_B], x));
    post(poster, op_layernorm(call, in, x, w[norm], w[norm + 1]));
    post(poster, op_linear_relu(call, inner, in, w[FC1_W], w[FC1_B]));
    post(poster, op_linear(call, x, inner, w[FC2_W], w[FC2_B], x));
    if (!pre_norm)
        post(poster, op_layernorm(call, x, x, w[LN2_W], w[LN2_B]));
}

void opt_logits(Poster *poster, Call call, const Plan *plan, Tensor head, Tensor logits, Tensor x) {
    bool projected = plan->config.embed != plan->config.h1;
    Tensor in = projected ? scratch_rows(plan, HEAD_OUT, x) : x;
    if (plan->config.final_norm)
        post(poster, op_layernorm(call, x, x, plan->global[FINAL_LN_W].home,
                                  plan->global[FINAL_LN_B].home));
    if (projected)
        post(poster, op_linear(call, in, x, plan->global[PROJECT_OUT].home, none, none));
    post(poster, op_linear(call, logits, in, head, none, none));
}
