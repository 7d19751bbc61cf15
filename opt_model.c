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
 * where every product also adds a bias. opt-350m normalizes after each sum instead of before each
 * product. The paper prints the layer without its layernorms; the checkpoints have them.
 * Read next: admission.c. */
#include <math.h>

#include "device/device.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// The plain forward
// -------------------------------------------------------------------------------------------------

/* Computes y = x w^T + b. y (m, n), x (m, k), w (n, k), b (n) or NULL. */
static void plain_linear(float *y, const float *x, const float *w, const float *b, int m, int n,
                         int k) {
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) {
            const float *xr = x + (size_t)r * k, *wc = w + (size_t)c * k;
            float sum = 0;
            for (int p = 0; p < k; p++)
                sum += xr[p] * wc[p];
            y[(size_t)r * n + c] = b ? sum + b[c] : sum;
        }
}

/* Computes y = (x - mean) / sqrt(var + 1e-5) * w + b, row by row; y may be x. y, x (rows, cols), w,
 * b (cols). */
static void plain_layernorm(float *y, const float *x, const float *w, const float *b, int rows,
                            int cols) {
    for (int r = 0; r < rows; r++, x += cols, y += cols) {
        float mean = 0, var = 0;
        for (int c = 0; c < cols; c++)
            mean += x[c];
        mean /= cols;
        for (int c = 0; c < cols; c++)
            var += (x[c] - mean) * (x[c] - mean);
        float scale = 1 / sqrtf(var / cols + 1e-5f);
        for (int c = 0; c < cols; c++)
            y[c] = (x[c] - mean) * scale * w[c] + b[c];
    }
}

/* Adds y to x. */
static void plain_add(float *x, const float *y, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

/* Rounds x as the engine does when it stores q, k and v. */
static void plain_round_to_f16(float *x, size_t n) {
    for (size_t i = 0; i < n; i++)
        x[i] = f16_to_f32(f32_to_f16(x[i]));
}

void plain_attention(float *o, const float *q, const float *k, const float *v, float *score, int n,
                     int nh, int hd) {
    size_t h1 = (size_t)nh * hd;
    for (int head = 0; head < nh; head++)
        for (int t = 0; t < n; t++) {
            const float *qt = q + t * h1 + head * hd;
            float *ot = o + t * h1 + head * hd;
            float max = -INFINITY, sum = 0;
            /* the scores of the tokens that it sees */
            for (int u = 0; u <= t; u++) {
                const float *ku = k + u * h1 + head * hd;
                score[u] = 0;
                for (int d = 0; d < hd; d++)
                    score[u] += qt[d] * ku[d];
                score[u] /= sqrtf(hd);
                max = fmaxf(max, score[u]);
            }
            /* their softmax, and the weighted sum of v */
            for (int u = 0; u <= t; u++)
                sum += score[u] = expf(score[u] - max);
            for (int d = 0; d < hd; d++)
                ot[d] = 0;
            for (int u = 0; u <= t; u++)
                for (int d = 0; d < hd; d++)
                    ot[d] += score[u] / sum * v[u * h1 + head * hd + d];
        }
}

/* The activations of one forward pass of n tokens, by name or by number. */
typedef union {
    struct {
        float *x;         /* (n, h1) the hidden state, which passes from layer to layer */
        float *y;         /* (n, max(h1, embed)) normalized x, results of products */
        float *q, *k, *v; /* (n, h1) */
        float *a;         /* (n, h1) the result of attention */
        float *hidden;    /* (n, h2) between the two products of the MLP */
        float *score;     /* (n) the scores of one query */
    };
    float *all[8];
} Buffers;

/* Computes multi-head attention with its residual; w holds the layer's tensors. */
static void plain_attention_block(Buffers *s, float *w[NROLES], const OptConfig *c, int n) {
    const float *in = c->pre_norm ? s->y : s->x;
    if (c->pre_norm)
        plain_layernorm(s->y, s->x, w[LN1_W], w[LN1_B], n, c->h1);
    plain_linear(s->q, in, w[Q_W], w[Q_B], n, c->h1, c->h1);
    plain_linear(s->k, in, w[K_W], w[K_B], n, c->h1, c->h1);
    plain_linear(s->v, in, w[V_W], w[V_B], n, c->h1, c->h1);
    plain_round_to_f16(s->q, (size_t)n * c->h1);
    plain_round_to_f16(s->k, (size_t)n * c->h1);
    plain_round_to_f16(s->v, (size_t)n * c->h1);
    plain_attention(s->a, s->q, s->k, s->v, s->score, n, c->nh, c->h1 / c->nh);
    plain_linear(s->y, s->a, w[O_W], w[O_B], n, c->h1, c->h1);
    plain_add(s->x, s->y, (size_t)n * c->h1);
    if (!c->pre_norm)
        plain_layernorm(s->x, s->x, w[LN1_W], w[LN1_B], n, c->h1);
}

/* Computes the feed-forward network with its residual; w as above. ReLU replaces negative hidden
 * numbers by 0. */
static void plain_ffn_block(Buffers *s, float *w[NROLES], const OptConfig *c, int n) {
    const float *in = c->pre_norm ? s->y : s->x;
    if (c->pre_norm)
        plain_layernorm(s->y, s->x, w[LN2_W], w[LN2_B], n, c->h1);
    plain_linear(s->hidden, in, w[FC1_W], w[FC1_B], n, c->h2, c->h1);
    for (size_t e = 0; e < (size_t)n * c->h2; e++)
        s->hidden[e] = fmaxf(s->hidden[e], 0);
    plain_linear(s->y, s->hidden, w[FC2_W], w[FC2_B], n, c->h1, c->h2);
    plain_add(s->x, s->y, (size_t)n * c->h1);
    if (!c->pre_norm)
        plain_layernorm(s->x, s->x, w[LN2_W], w[LN2_B], n, c->h1);
}

/* Computes x = project_in(token table[ids]) + position table[2 ..]. g holds the tensors outside the
 * layers; without project_in the rows of the token table are used as they are. */
static void plain_embed(Buffers *s, float *g[NGLOBALS], const OptConfig *c, const int32_t *ids,
                        int n) {
    size_t row = (size_t)c->embed * sizeof(float);
    for (int t = 0; t < n; t++)
        memcpy(s->y + (size_t)t * c->embed, g[TOK_EMBED] + (size_t)ids[t] * c->embed, row);
    if (g[PROJECT_IN])
        plain_linear(s->x, s->y, g[PROJECT_IN], NULL, n, c->h1, c->embed);
    else
        memcpy(s->x, s->y, n * row);
    plain_add(s->x, g[POS_EMBED] + 2 * (size_t)c->h1, (size_t)n * c->h1);
}

/* Computes logits (n, vocab) from x: final norm, project_out, then the head. */
static void plain_head(float *logits, Buffers *s, float *g[NGLOBALS], const OptConfig *c, int n) {
    const float *in = g[PROJECT_OUT] ? s->y : s->x;
    if (g[FINAL_LN_W])
        plain_layernorm(s->x, s->x, g[FINAL_LN_W], g[FINAL_LN_B], n, c->h1);
    if (g[PROJECT_OUT])
        plain_linear(s->y, s->x, g[PROJECT_OUT], NULL, n, c->embed, c->h1);
    plain_linear(logits, in, g[LM_HEAD] ? g[LM_HEAD] : g[TOK_EMBED], NULL, n, c->vocab, c->embed);
}

/* Reads count tensors as floats; absent ones stay NULL. On failure the tensors read so far stay for
 * the caller to free. */
static int tensors_floats(float **values, const Checkpoint *checkpoint, const Tensor *tensors,
                          int count, Error *err) {
    for (int i = 0; i < count; i++)
        if (tensors[i].rows && !(values[i] = checkpoint_floats(checkpoint, &tensors[i], err)))
            return -1;
    return 0;
}

/* Frees count tensors and makes them absent. */
static void free_floats(float **values, int count) {
    for (int i = 0; i < count; i++) {
        free(values[i]);
        values[i] = NULL;
    }
}

int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n,
                      Error *err) {
    const OptConfig *c = &checkpoint->config;
    CHECK(n > 0 && n <= c->max_pos);
    for (int t = 0; t < n; t++)
        CHECK(ids[t] >= 0 && ids[t] < c->vocab);
    /* floats per token of x, y, q, k, v, a, hidden, score */
    const size_t width[8] = {c->h1, imax(c->embed, c->h1), c->h1, c->h1, c->h1, c->h1, c->h2, 1};
    float *g[NGLOBALS] = {NULL}, *w[NROLES] = {NULL};
    Buffers buffers;
    for (int b = 0; b < 8; b++)
        buffers.all[b] = (float *)xcalloc(n * width[b], sizeof(float));

    int rc = tensors_floats(g, checkpoint, checkpoint->global, NGLOBALS, err);
    if (rc == 0)
        plain_embed(&buffers, g, c, ids, n);
    for (int j = 0; j < c->l && rc == 0; j++) {
        rc = tensors_floats(w, checkpoint, checkpoint->layer[j], NROLES, err);
        if (rc == 0) {
            plain_attention_block(&buffers, w, c, n);
            plain_ffn_block(&buffers, w, c, n);
        }
        free_floats(w, NROLES);
    }
    if (rc == 0)
        plain_head(logits, &buffers, g, c, n);
    free_floats(g, NGLOBALS);
    free_floats(buffers.all, 8);
    return rc;
}

// -------------------------------------------------------------------------------------------------
// The forward pass as ops, in pieces of a sweep. Read it after schedule.c and device/device.h
// -------------------------------------------------------------------------------------------------

/* An absent view. */
static const Tensor none = {.rows = 0};

/* Returns scratch on the GPU for the rows of x, in a region that only one op at a time uses. */
static Tensor scratch_rows(const Plan *plan, RegionId id, Tensor x) {
    return plan_view(plan, id, TIER_GPU, 0, 0, x.rows);
}

void opt_embed(Poster *to, Call call, const Plan *plan, Tensor x, Tensor tokens, Tensor positions) {
    const bool projected = plan->config.embed != plan->config.h1;
    post(to, op_embed(call, x, plan->global[POS_EMBED].home, positions, !projected));
    if (projected)
        post(to, op_linear(call, x, tokens, plan->global[PROJECT_IN].home, none, x));
}

/* Returns the tensors of q, k and v as one tensor; they must lie directly behind each other. */
static Tensor joined(const Tensor *q) {
    const Tensor k = q[K_W - Q_W], v = q[V_W - Q_W];
    Tensor all = *q;
    CHECK(all.offset + tensor_span(all) == k.offset && k.offset + tensor_span(k) == v.offset);
    all.rows += k.rows + v.rows;
    return all;
}

void opt_project(Poster *to, Call call, const Plan *plan, const Tensor w[NROLES], Tensor qkv,
                 Tensor x) {
    const Tensor matrix = joined(&w[Q_W]), bias = tensor_row(joined(&w[Q_B]));
    const bool pre_norm = plan->config.pre_norm;
    const Tensor in = pre_norm ? scratch_rows(plan, NORM_1, x) : x;
    if (pre_norm)
        post(to, op_layernorm(call, in, x, w[LN1_W], w[LN1_B]));
    post(to, op_linear(call, qkv, in, matrix, bias, none));
}

void opt_finish(Poster *to, Call call, const Plan *plan, const Tensor w[NROLES], Tensor x,
                Tensor o) {
    const bool pre_norm = plan->config.pre_norm;
    const Tensor in = pre_norm ? scratch_rows(plan, NORM_2, x) : x;
    const Tensor hidden = scratch_rows(plan, MLP, x);
    post(to, op_linear(call, x, o, w[O_W], w[O_B], x));
    if (pre_norm)
        post(to, op_layernorm(call, in, x, w[LN2_W], w[LN2_B]));
    else /* opt-350m: in is x */
        post(to, op_layernorm(call, x, x, w[LN1_W], w[LN1_B]));
    post(to, op_linear_relu(call, hidden, in, w[FC1_W], w[FC1_B]));
    post(to, op_linear(call, x, hidden, w[FC2_W], w[FC2_B], x));
    if (!pre_norm)
        post(to, op_layernorm(call, x, x, w[LN2_W], w[LN2_B]));
}

void opt_logits(Poster *to, Call call, const Plan *plan, Tensor head, Tensor logits, Tensor x) {
    const bool projected = plan->config.embed != plan->config.h1;
    const Tensor in = projected ? scratch_rows(plan, HEAD_OUT, x) : x;
    if (plan->config.final_norm)
        post(to, op_layernorm(call, x, x, plan->global[FINAL_LN_W].home,
                              plan->global[FINAL_LN_B].home));
    if (projected)
        post(to, op_linear(call, in, x, plan->global[PROJECT_OUT].home, none, none));
    post(to, op_linear(call, logits, in, head, none, none));
}

/* Fills w with the tensors of layer 0 in the format that batches of `rows` rows use. */
static void warm_layer(const Plan *plan, int slot, int rows, Tensor w[NROLES]) {
    for (int r = 0; r < NROLES; r++) {
        w[r] = plan_weight(plan, &plan->weight[0][r], slot);
        if (w[r].type == U8 && rows > plan->packed_rows)
            w[r] = plan_f16(plan, (Role)r);
    }
}

int opt_warm_up(Device *device, const Plan *plan, Error *err) {
    const int sizes[] = {plan->piece_rows, plan->max_seqs};
    /* the larger of the two staging slots */
    const int slot =
        plan->region[WEIGHT_SLOT][TIER_GPU].bytes < plan->region[WEIGHT_SLOT_1][TIER_GPU].bytes;
    const Call project = {.lane = PROJECT, .kind = OTHER};
    const Call finish = {.lane = FINISH, .kind = OTHER};
    Poster to = {.device = device, .overlap = true, .err = err};
    Tensor w[NROLES];
    for (int i = 0; i < 2; i++) { /* the products of a prefill, then of a decoding step */
        const int n = sizes[i];
        Tensor o = plan_view(plan, ATTENDED, TIER_GPU, 0, 0, n);
        /* x overwrites q, k and v, which nothing reads */
        Tensor x = plan_bytes(plan, QKV, TIER_GPU, 0, plan->act_type, plan->config.h1);
        x.rows = n;
        warm_layer(plan, slot, n, w);
        opt_project(&to, project, plan, w, plan_view(plan, QKV, TIER_GPU, 0, 0, n), o);
        if (!post_drain(&to))
            return -1;
        opt_finish(&to, finish, plan, w, x, o);
        if (!post_drain(&to))
            return -1;
    }
    if (is_last(&plan->config)) {
        Tensor x = plan_view(plan, LAST_ROWS, TIER_GPU, 0, 0, plan->head_chunk);
        Tensor logits = plan_view(plan, LOGITS, TIER_GPU, 0, 0, plan->head_chunk);
        Tensor head = plan_weight(plan, &plan->global[plan->head], slot);
        opt_logits(&to, project, plan, head, logits, x);
        if (!post_drain(&to))
            return -1;
    }
    memset(device->count, 0, sizeof device->count);
    return 0;
}
