/* mini.c: the whole of FlexGen in one file, to be kept open beside the paper:
 * Sheng et al., High-throughput Generative Inference of Large Language Models with a Single GPU, 2023.
 *
 *   cc -O3 -march=native mini.c -lm -lpthread -o mini
 *   ./mini models/opt-tiny "Once upon a time" --percent 0 50 0 100 0 100 --link ctog=1G
 *
 * It runs Hugging Face's OPT checkpoints that do not fit the GPU: weights, KV cache and activations rest on
 * GPU, CPU and disk, in shares that a linear program finds, and while one batch computes, what its neighbours
 * need is on its way. There is no GPU here: the "GPU" is memory of a given size, links are copies that can be
 * slowed to a given rate, and threads stand for both processors. So any computer can run and show it all.
 *
 * Read it from top to bottom: the words of the paper; generate, which is Figure 4; compute, the model; moves
 * between tiers; placement; links; 4-bit groups; cost model, simplex and search; and what every such program
 * needs. "4.2", "A.3", "Eq. 1" are places in the paper; i, j, k are token, layer and GPU batch.
 *
 * The engine beside this file is the same with everything. What is left out here, and where it is there:
 *
 *   sampling, stop texts    device/host.c, base/os.c    opt-350m, Unicode    opt_model.c, io/unicode.c
 *   jobs that survive       app/job.c, app/journal.c      pages of the cache   batch.c, plan.c
 *   refilling, diagonal     admission.c                 CUDA; many machines  flexgen.cu; device/pipeline.c
 *   measuring the machine   cost/profile.c              proof of an optimum  lp.c
 *
 * Where the engine does better: an op waits only for what it needs (device/depend.c), where synchronize()
 * here waits for all; the CPU attends for batch k while the GPU projects k + 1 and finishes k - 1
 * (schedule.c); products are written for each processor (device/host_linear.c); and a second cost model knows
 * what really moves (cost/runtime.c).
 *
 * Read next: flexgen.h. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// ---- The words of the paper -----------------------------------------------------------------------------
typedef uint16_t f16;
typedef enum { GPU, CPU, DISK, NTIERS } Tier;              /* 4.1: three levels of memory */
typedef enum { WEIGHTS, CACHE, ACTIVATIONS, NKINDS } Kind; /* 4.2: what is placed and moved */
enum { CTOG, GTOC, DTOC, CTOD, NLINKS };                   /* A.3: which two tiers, which way */
enum { F16, BF16, F32, NTYPES };
static const char *const tier_name[] = {"GPU", "CPU", "disk"};
static const char *const link_name[] = {"ctog", "gtoc", "dtoc", "ctod"};
/* Section 3: l layers, hidden sizes h1 and h2, nh heads of size hd; and what OPT has besides. */
static int l, h1, h2, nh, hd, vocab, positions, eos;
static bool final_norm = true, tied = true;
static struct Policy { /* 4.3. The shares are wg, wc, wd; cg, cc, cd; hg, hc, hd */
    double share[NKINDS][NTIERS];
    int gbs, num_gpu_batches;             /* bls is their product */
    bool no_overlap, delegated;           /* 4.2: overlapping, computation delegation */
    bool compress_weight, compress_cache; /* 5: group-wise quantization */
    double sparsity;                      /* 5: the share of V that is read; 1: all */
} policy = {.sparsity = 1};
typedef struct { /* bytes on a tier: F16 or packed; those of the checkpoint may be of another type */
    Tier tier;
    int type;
    uint8_t *at;
} Place;
static Place on(Tier tier, void *at) { return (Place){tier, F16, at}; }
typedef struct { /* (rows, cols), in the checkpoint and at rest; off the GPU it passes through a slot */
    Place file, rest;
    int rows, cols;
    size_t bytes, offset; /* on the GPU; in the slot */
    bool packed;
} Weight;
/* Each with its bias behind it. W_Q to W_2 are section 3's matrices; the paper leaves out the norms. */
enum { NORM_1 = 0, W_Q = 2, W_K = 4, W_V = 6, W_O = 8, NORM_2 = 10, W_1 = 12, W_2 = 14, NROLES = 16 };
static Weight (*layer)[NROLES];  // (l)
enum { TOKENS, POSITIONS, LAST_NORM, LAST_BIAS, HEAD, NGLOBALS };
static Weight outside[NGLOBALS]; /* of the layers: always on the GPU */
typedef struct {                 /* a prompt of s tokens and those that follow; nothing is padded */
    const char *text;            /* a 0 is behind it, and may be in it */
    size_t size;                 /* bytes */
    int id, *token, s, generated;
    bool ended;             /* by </s> */
    int row, room;          /* its first row in the hidden state; tokens of its cache */
    Tier kv_tier, act_tier; /* where its cache and its activations rest ... */
    uint8_t *kv;            /* ... as (l, k and v, room, kv_row) ... */
    float *act;             /* ... and (s, h1) */
    size_t staged[NTIERS];  /* its cache's place in a staging slot */
} Sequence;
typedef struct { /* a square of Figure 3: token, layer (l: the head) and batch */
    int i, j, k;
} Square;
static Sequence *prompts;
static Sequence **batch; /* (K + 1): GPU batch k has the sequences from batch[k] up to batch[k + 1] */
static int nprompts, longest, K, generation_length = 64, threads; /* tokens; batches of this block */
static size_t kv_row, *slab, scratch_floats; /* bytes of a token's k, of layers off the GPU; of each thread */
static uint8_t *weight_slot[2], *stage[2][2];                /* where weights and cache pass; [tier][slot] */
static float *x_slot[2];                                     /* and hidden states (rows, h1) */
static float *norm, *x_Q, *x_K, *x_V, *x_Out, *ffn, *logits; /* the workspace of a batch, on the GPU */
static float *scratch, *new_row, *query, *result; /* of threads; a k or v; the last two on the CPU */
typedef void Move(Square at, bool down), Task(const void *arg, int thread, int first, int n);
static void post(int worker, Move *move, Square at, bool down), synchronize(void);
static void parallel(Task *task, const void *arg, int n, double work);
static void travel(Place to, Place from, size_t bytes), await(void);
static void widen(float *to, const void *f16s, size_t n), narrow(void *f16s, const float *from, size_t n);
static void pack(uint8_t *to, const float *x, int n), unpack(float *x, const uint8_t *from, int n);
static size_t packed_bytes(int n);
static void fill_weight(Weight *w);
static double now(void), generation_s; /* seconds */
static long min(long a, long b) { return a < b ? a : b; }
static long max(long a, long b) { return a > b ? a : b; }

// ---- Figure 4: the block schedule with overlapping ------------------------------------------------------
//
// Generation is a grid of squares (i, j, k). The squares of one token and layer share the layer's weights, so
// they are computed together, down a column of K batches, then down the next (Figure 3b; one batch is row by
// row, Figure 3a). While square (i, j, k) computes, what its neighbours have made or will need is on its way:
//
//               layer j                                        layer j + 1
//          +---------------+
//   k - 1  |   computed    |  store_activation, store_cache
//          +---------------+                               +---------------+
//     k    | COMPUTES NOW  |  compute          load_weight |  part k of K  |
//          +---------------+                               +---------------+
//   k + 1  |     next      |  load_activation, load_cache
//          +---------------+
// Above the first batch of a column is the last of the column before; below the last, the first of the next.
// Column l, behind the layers, is the head, which makes the next token.
typedef void Call(int i, int j, int k);
static Call load_weight, store_activation, store_cache, load_cache, load_activation, compute;
static bool begin_token(int i);
static void generate(void) { /* one token after another for each sequence of the block */
    const int num_layers = l + 1, num_gpu_batches = K;
    for (int k = 0; k < num_gpu_batches; k++) load_weight(0, 0, k); /* which no square before could load */
    synchronize();
    for (int i = 0; i < generation_length && begin_token(i); i++)
        for (int j = 0; j < num_layers; j++)
            for (int k = 0; k < num_gpu_batches; k++) {
                load_weight(i, j + 1, k);
                store_activation(i, j, k - 1);
                store_cache(i, j, k - 1);
                load_cache(i, j, k + 1);
                load_activation(i, j, k + 1);
                compute(i, j, k);
                synchronize();
            }
}
/* Rows of a sequence in the squares of token i: in prefill its prompt, in decoding its newest token (3). */
static int rows_of(const Sequence *q, int i) { return q->ended ? 0 : i ? 1 : q->s; }
/* Between two tokens nothing moves: who has ended leaves, the others close up. False: nobody is left. */
static bool begin_token(int i) {
    int row = 0, all = 0;
    for (int k = 0; k < K; k++, all += row, row = 0)
        for (Sequence *q = batch[k]; q < batch[k + 1]; q++) {
            q->ended |= i && q->token[q->s + i - 1] == eos;
            q->row = row, row += rows_of(q, i);
        }
    return all > 0;
}
/* The square that k - 1 or k + 1 means beside the edges of its column. False: there is none. */
static bool find_square(int *i, int *j, int *k) {
    const int columns = l + 1, column = *i * columns + *j + (*k >= K) - (*k < 0);
    *k = (*k + K) % K, *i = column / columns, *j = column % columns;
    return column >= 0 && *i < generation_length;
}
/* Of two buffers, one is for this square, the other for the squares behind and ahead of it. */
static int buffer_of(Square at) { return (int)(((at.i * (l + 1L) + at.j) * K + at.k) % 2); }

// ---- compute(i, j, k): OPT's layer (section 3) ----------------------------------------------------------
//
//   x_Q = ln(x) w_Q, x_K and x_V likewise      x_Out = softmax(x_Q x_K^T / sqrt(hd)) x_V w_O + x
//                                              x = relu(ln(x_Out) w_1) w_2 + x_Out
//
// and every product adds a bias. Activations and sums are floats; weights and cache are F16 or packed, and
// x_Q, x_K and x_V are rounded to F16, as the cache keeps them.
enum { VL = __BIGGEST_ALIGNMENT__ / 4, NT = VL / 4, MT = 6 }; /* VL: floats of the machine's widest vector */
enum { GROUP = 64, PANEL = 128, LD = PANEL + 16 };            /* powers of two would share cache lines */
typedef float V __attribute__((vector_size(4 * VL), aligned(4), may_alias));
/* y = x w of x (MT, n), w (n, GROUP) and y (MT, GROUP), in NT vectors of columns; the sums are in registers.
 * x lies in a buffer with MT rows more than needed; what those give is not used. */
static void tile(float *y, const float *x, size_t x_ld, const float *w, int n) {
    V sum[MT][NT] = {{{0}}};
    for (int c = 0; c < n; c++, w += GROUP)
        for (int q = 0; q < MT; q++)
            for (int p = 0; p < NT; p++) sum[q][p] += x[q * x_ld + c] * *(V *)(w + p * VL);
    for (int e = 0; e < MT * NT; e++) *(V *)(y + e / NT * GROUP + e % NT * VL) = sum[e / NT][e % NT];
}
typedef struct { /* y = x w^T of x (rows, in), w (out, in); its bias, or y as it was, is added */
    float *y;
    const float *x;
    int rows;
    const Weight *w;
    bool bias, add, relu;
} Linear;
static Square now_at;                              /* the square that computes */
static const uint8_t *weight_at(const Weight *w) { /* its own bytes, or those in the layer's slot */
    return w->rest.tier == GPU ? w->rest.at : weight_slot[((long)now_at.i * l + now_at.j) % 2] + w->offset;
}
/* Columns c .. c + n - 1 of a group of outputs as floats, (n, GROUP): "before doing computation" (5). */
static void fill_panel(float *panel, const Weight *w, size_t group, size_t c, int n) {
    const size_t cols = w->cols, at = group * GROUP, outputs = min(GROUP, w->rows - at);
    const uint8_t *from = weight_at(w);
    float *turned = panel + GROUP * PANEL;
    for (int e = 0; e < n && w->packed; e++) { /* which become F16 again, unlike a cache's */
        unpack(panel + e * GROUP, from + (group * cols + c + e) * packed_bytes(GROUP), (int)outputs);
        narrow(turned, panel + e * GROUP, outputs), widen(panel + e * GROUP, turned, outputs);
    }
    for (size_t o = 0; o < outputs && !w->packed; o++)
        widen(turned + o * LD, from + ((at + o) * cols + c) * sizeof(f16), n);
    for (int e = 0; e < n && !w->packed; e++)
        for (int o = 0; o < GROUP; o++) panel[e * GROUP + o] = turned[o * LD + e];
}
/* Groups first .. first + n - 1 of the outputs, a panel of columns at a time, which all rows of x meet. */
static void linear_task(const void *arg, int thread, int first, int n) {
    const Linear *a = arg;
    const size_t in = a->w->cols, out = a->w->rows;
    float *panel = scratch + thread * scratch_floats, y[MT * GROUP], bias[GROUP] = {0};
    for (size_t at = first * GROUP, end = min((first + n) * GROUP, out); at < end; at += GROUP)
        for (size_t c = 0; c < in; c += PANEL) {
            const int cols = (int)min(PANEL, in - c), outputs = (int)min(GROUP, out - at);
            if (a->bias) widen(bias, weight_at(a->w + 1) + at * sizeof(f16), outputs);
            fill_panel(panel, a->w, at / GROUP, c, cols);
            for (int row = 0; row < a->rows; row++) {
                float *to = a->y + row * out + at, *sum = y + row % MT * GROUP;
                for (int p = 0; p < outputs && row % MT == 0; p += NT * VL)
                    tile(y + p, a->x + row * in + c, in, panel + p, cols);
                for (int p = 0; p < outputs; p++) sum[p] += c ? to[p] : bias[p] + (a->add ? to[p] : 0);
                for (int p = 0; p < outputs; p++)
                    to[p] = a->relu && c + PANEL >= in && sum[p] < 0 ? 0 : sum[p];
            }
        }
}
static void linear(Linear a) {
    parallel(linear_task, &a, (a.w->rows + GROUP - 1) / GROUP, 1. * a.rows * a.w->rows * a.w->cols);
}
/* y = (x - mean) / sqrt(var + 1e-5) * w + b, row by row. */
static void layernorm(float *y, const float *x, const Weight *w, int rows) {
    float *gain = scratch, *bias = gain + h1;
    widen(gain, weight_at(w), h1), widen(bias, weight_at(w + 1), h1);
    for (int row = 0; row < rows; row++, x += h1, y += h1) {
        float mean = 0, var = 0;
        for (int c = 0; c < h1; c++) mean += x[c] / h1;
        for (int c = 0; c < h1; c++) var += (x[c] - mean) * (x[c] - mean) / h1;
        for (int c = 0; c < h1; c++) y[c] = (x[c] - mean) / sqrtf(var + 1e-5f) * gain[c] + bias[c];
    }
}
static float dot(const float *a, const float *b, int n) {
    V sum = {0};
    float all = 0;
    int d = 0;
    for (; d + VL <= n; d += VL) sum += *(const V *)(a + d) * *(const V *)(b + d);
    for (int lane = 0; lane < VL; lane++) all += sum[lane];
    for (; d < n; d++) all += a[d] * b[d];
    return all;
}
static void softmax(float *score, int n) { /* in place; the largest is taken off, for exp not to overflow */
    float most = score[0], sum = 0;
    for (int t = 1; t < n; t++) most = fmaxf(most, score[t]);
    for (int t = 0; t < n; t++) sum += score[t] = expf(score[t] - most);
    for (int t = 0; t < n; t++) score[t] /= sum;
}
static void add_weighed(float *restrict o, float p, const float *restrict v, int n) { /* o += p v */
    for (int d = 0; d < n; d++) o[d] += p * v[d];
}
static bool is_sparse(void) { return policy.sparsity < 1; }
/* Computation delegation (4.2): in decoding the CPU attends to cache that is not on the GPU. */
static bool is_delegated(const Sequence *q, int i) { return i && policy.delegated && q->kv_tier != GPU; }
static Place kv_home(const Sequence *q, int j, int t, int value) { /* k (value 0) or v of token t at rest */
    return on(q->kv_tier, q->kv + ((2 * (size_t)j + value) * q->room + t) * kv_row);
}
static Place kv_near(const Sequence *q, Square at, int t, int value) { /* where it is for who attends */
    const Tier side = is_delegated(q, at.i) ? CPU : GPU;
    const size_t room = side == GPU && policy.delegated ? q->s : q->room; /* then it only prefills here */
    if (q->kv_tier == side) return kv_home(q, at.j, t, value);
    return on(side, stage[side][buffer_of(at)] + q->staged[side] + (value * room + t) * kv_row);
}
/* Top-K sparse attention (5): the weights of the others become -1, the rest stay. K is 1 + the share of the
 * past, rounded up; the newest of the n tokens is always one of them, and of equal ones the earlier. */
static void keep_top(float *weight, float *all, int n) {
    const int top = (int)min((long)ceil(policy.sparsity * (n - 1) * (1 - 1e-9)), n - 1);
    memcpy(all, weight, n * sizeof *all);
    for (int t = 0; t < n - 1; t++) {
        int better = 0;
        for (int u = 0; u < n - 1; u++) better += (all[u] > all[t]) | ((all[u] == all[t]) & (u < t));
        if (better >= top) weight[t] = -1;
    }
}
/* k (value 0) or v (1) of token t, a head of it, as floats: in prefill as it was just computed, in decoding
 * from the cache where it is near. Of sparse attention's v only the chosen come there, now. */
static const float *head_of(const Sequence *q, int t, int value, int head, float *some) {
    const size_t bytes = kv_row / nh;
    if (!now_at.i) return (value ? x_V : x_K) + (size_t)(q->row + t) * h1 + head * hd;
    Place near = kv_near(q, now_at, t, value), home = kv_home(q, now_at.j, t, value);
    near.at += head * bytes, home.at += head * bytes;
    if (is_sparse() && value && near.at != home.at && t < q->s + now_at.i - 1) travel(near, home, bytes);
    __builtin_prefetch(near.at + 16 * kv_row); /* rows lie too far apart for the processor to see a pattern */
    __builtin_prefetch(near.at + 16 * kv_row + bytes - 1);
    return policy.compress_cache ? unpack(some, near.at, hd) : widen(some, near.at, hd), some;
}
/* x_Out = softmax(x_Q x_K^T) x_V; a task is a head of a sequence. No token sees those behind it. */
static void attend(const void *arg, int thread, int first, int n) {
    float *some = scratch + thread * scratch_floats, *score = some + hd;
    for (int task = first; task < first + n; task++) {
        const Sequence *seq = (const Sequence *)arg + task / nh;
        const bool below = is_delegated(seq, now_at.i);
        for (int row = 0, head = task % nh; row < rows_of(seq, now_at.i); row++) {
            const size_t at = (size_t)(seq->row + row) * h1 + head * hd;
            const int len = now_at.i ? seq->s + now_at.i : row + 1;
            float *x = (below ? query : x_Q) + at, *o = (below ? result : x_Out) + at;
            for (int t = 0; t < len; t++) score[t] = dot(x, head_of(seq, t, 0, head, some), hd);
            softmax(score, len), memset(o, 0, hd * sizeof *o); /* over all tokens, also if few are kept (5) */
            if (now_at.i && is_sparse()) keep_top(score, score + len, len);
            for (int t = 0; t < len; t++)
                if (score[t] >= 0) add_weighed(o, score[t], head_of(seq, t, 1, head, some), hd);
        }
        await();
    }
}
/* New k and v go where the square has its cache, in groups along the hidden dimension of each head (5). */
static void append(const Sequence *q) {
    for (int e = 0, past = now_at.i ? q->s + now_at.i - 1 : 0; e < 2 * rows_of(q, now_at.i); e++) {
        const float *x = (e % 2 ? x_V : x_K) + (size_t)(q->row + e / 2) * h1;
        const Place near = kv_near(q, now_at, past + e / 2, e % 2);
        uint8_t *to = near.tier == GPU ? near.at : (uint8_t *)new_row;
        if (!policy.compress_cache) narrow(to, x, h1);
        for (int d = 0; d < h1 && policy.compress_cache; d += hd)
            pack(to + d / hd * packed_bytes(hd), x + d, hd);
        if (near.tier != GPU) travel(near, on(GPU, new_row), kv_row);
    }
}
static void exchange(const Sequence *q, bool down) { /* queries go down, results up: 4 b h1 bytes (4.2) */
    const size_t at = (size_t)q->row * h1, bytes = h1 * sizeof(float);
    const Place above = on(GPU, (down ? x_Q : x_Out) + at), below = on(CPU, (down ? query : result) + at);
    if (!q->ended && is_delegated(q, now_at.i)) travel(down ? below : above, down ? above : below, bytes);
}
static void attention(int k, float *x, int rows) { /* x_Out, in the place of x */
    const size_t size = (size_t)rows * h1;
    float *const qkv[] = {x_Q, x_K, x_V};
    const Weight *w = layer[now_at.j];
    layernorm(norm, x, w + NORM_1, rows);
    for (int m = 0; m < 3; m++) {
        linear((Linear){qkv[m], norm, rows, w + W_Q + 2 * m, .bias = true});
        narrow(x_Out, qkv[m], size), widen(qkv[m], x_Out, size); /* rounded to F16 */
    }
    for (size_t e = 0; e < size; e++) x_Q[e] /= sqrtf((float)hd); /* instead of all scores */
    for (const Sequence *q = batch[k]; q < batch[k + 1]; q++) append(q), exchange(q, true);
    await(); /* the CPU has k, v and queries */
    parallel(attend, batch[k], (int)(batch[k + 1] - batch[k]) * nh, 1. * rows * size);
    for (const Sequence *q = batch[k]; q < batch[k + 1]; q++) exchange(q, false);
    await(); /* x_Out is whole again */
    linear((Linear){x, x_Out, rows, w + W_O, .bias = true, .add = true});
}
static void mlp(float *x, int rows) { /* x = relu(x_Out w_1) w_2 + x_Out, in place */
    const Weight *w = layer[now_at.j];
    layernorm(norm, x, w + NORM_2, rows);
    linear((Linear){ffn, norm, rows, w + W_1, .bias = true, .relu = true});
    linear((Linear){x, ffn, rows, w + W_2, .bias = true, .add = true});
}
static void embed(int i, int k, float *x) { /* tables: of tokens [token], of positions [position + 2] */
    for (const Sequence *q = batch[k]; q < batch[k + 1]; q++)
        for (int t = 0; t < rows_of(q, i); t++, x += h1) {
            const size_t at = i ? q->s + i - 1 : t;
            widen(x, outside[TOKENS].rest.at + q->token[at] * h1 * sizeof(f16), h1);
            widen(norm, outside[POSITIONS].rest.at + (at + 2) * h1 * sizeof(f16), h1);
            add_weighed(x, 1, norm, h1);
        }
}
static void head(int i, int k, const float *x) { /* logits of last rows, and the largest's token */
    int n = 0;
    for (const Sequence *q = batch[k]; q < batch[k + 1]; q++)
        if (!q->ended) memcpy(x_Out + 1L * n++ * h1, x + (q->row + rows_of(q, i) - 1L) * h1, h1 * sizeof *x);
    if (final_norm) layernorm(x_Out, x_Out, &outside[LAST_NORM], n);
    linear((Linear){logits, x_Out, n, &outside[tied ? TOKENS : HEAD], .bias = false});
    const float *logit = logits;
    for (Sequence *q = batch[k]; q < batch[k + 1]; q++) {
        if (q->ended) continue;
        int best = 0;
        for (int t = 1; t < vocab; t++) best = logit[t] > logit[best] ? t : best;
        q->token[q->s + q->generated++] = best, logit += vocab;
    }
}
static float *hidden_state(Square at) { return x_slot[K > 1 ? buffer_of(at) : 0]; } /* alone in one place */
static void compute(int i, int j, int k) {
    const int rows = batch[k + 1][-1].row + rows_of(&batch[k + 1][-1], i);
    float *x = hidden_state(now_at = (Square){i, j, k});
    if (j == 0) embed(i, k, x);
    if (j < l) attention(k, x, rows), mlp(x, rows);
    if (j == l) head(i, k, x); /* the square behind the layers */
}

// ---- Figure 4's five moves ------------------------------------------------------------------------------
// Each kind of data has a thread, which does what it is asked in this order: what the square behind has made
// leaves its buffer before what the square ahead needs enters it. So two buffers of a kind are enough. And no
// move touches what is being computed: a load of the cache brings the past, which has been stored.
static void move_weight(Square at, bool down) { /* part k of K of what the layer has off the GPU */
    const size_t lines = slab[at.j] / 64, from = lines * at.k / K * 64, to = lines * (at.k + 1) / K * 64;
    for (const Weight *w = layer[at.j]; w < layer[at.j] + NROLES && !down; w++) {
        const size_t begin = max(w->offset, from), end = min(w->offset + w->bytes, to);
        if (w->rest.tier == GPU || begin >= end) continue;
        Place rest = w->rest, slot = on(GPU, weight_slot[((long)at.i * l + at.j) % 2] + begin);
        rest.at += (begin - w->offset) * (rest.type == F32 ? 2 : 1), travel(slot, rest, end - begin);
    }
}
static void move_activation(Square at, bool down) { /* down behind a layer, up before the next */
    for (const Sequence *q = batch[at.k]; q < batch[at.k + 1]; q++) {
        const Place home = on(q->act_tier, q->act), here = on(GPU, hidden_state(at) + 1L * q->row * h1);
        travel(down ? home : here, down ? here : home, rows_of(q, at.i) * h1 * sizeof(float));
    }
}
static void move_cache(Square at, bool down) { /* new k, v go down; up comes the past, if sparse only k */
    for (const Sequence *q = batch[at.k]; q < batch[at.k + 1]; q++)
        for (int value = 0; value < (is_sparse() && !down ? 1 : 2) && !q->ended; value++) {
            const int past = at.i ? q->s + at.i - 1 : 0, first = down ? past : 0;
            const Place home = kv_home(q, at.j, first, value), near = kv_near(q, at, first, value);
            const size_t bytes = (down ? rows_of(q, at.i) : past) * kv_row;
            travel(down ? home : near, down ? near : home, near.at == home.at ? 0 : bytes);
        }
}
static void load_weight(int i, int j, int k) { /* behind the head comes layer 0 of the next token */
    i += j > l, j %= l + 1;
    if (i < generation_length && j < l && slab[j]) post(WEIGHTS, move_weight, (Square){i, j, k}, false);
}
/* Nothing rests behind the head, nor before layer 0 and a prefill; and a batch alone keeps its state. */
static void ask(Kind kind, Move *move, int i, int j, int k, bool down) {
    if (!find_square(&i, &j, &k) || (kind == ACTIVATIONS && K == 1)) return;
    if (down || kind == CACHE ? j < l && (down || i) : j > 0) post(kind, move, (Square){i, j, k}, down);
}
static void store_activation(int i, int j, int k) { ask(ACTIVATIONS, move_activation, i, j, k, true); }
static void store_cache(int i, int j, int k) { ask(CACHE, move_cache, i, j, k, true); }
static void load_cache(int i, int j, int k) { ask(CACHE, move_cache, i, j, k, false); }
static void load_activation(int i, int j, int k) { ask(ACTIVATIONS, move_activation, i, j, k, false); }

// ---- Threads: one for each kind of data that moves; the others help to compute --------------------------
typedef struct {
    Move *move;
    Square at;
    bool down;
} Job;
static struct Worker {
    Job job[4];                 /* in turn; a square asks for two at most */
    long posted, begun, waited; /* how many it was asked for, has begun, are known to be done */
    sem_t wake, done;
} * worker;          // (NKINDS + threads - 1)
static Task *shared; /* what the threads compute together, of shared_n, in shares */
static const void *shared_arg;
static int shared_n, shares;
static void *work(void *arg) {
    for (struct Worker *w = arg;; sem_post(&w->done)) {
        sem_wait(&w->wake);
        const Job job = w->job[w->begun++ % 4];
        job.move(job.at, job.down), await();
    }
    return NULL;
}
static void post(int to, Move *move, Square at, bool down) { /* without overlapping it is made at once */
    struct Worker *w = &worker[to];
    if (policy.no_overlap && to < NKINDS) return move(at, down), await();
    for (; w->posted - w->waited >= 4; w->waited++) sem_wait(&w->done); /* a block's first layer: K parts */
    w->job[w->posted++ % 4] = (Job){move, at, down}, sem_post(&w->wake);
}
static void wait_for(int first, int end) {
    for (struct Worker *w = worker + first; w < worker + end; w++)
        for (; w->waited < w->posted; w->waited++) sem_wait(&w->done);
}
static void synchronize(void) { wait_for(0, NKINDS); } /* Figure 4: synchronize all devices. */
static void do_share(Square at, bool down) {           /* share k, which is of no square */
    const int first = (int)((long)shared_n * at.k / shares), end = (int)((shared_n * (at.k + 1L)) / shares);
    if (first < end && !down) shared(shared_arg, at.k, first, end - first);
}
static void parallel(Task *task, const void *arg, int n, double work) { /* tasks 0 .. n - 1, in shares */
    const int helpers = work < 1e6 ? 0 : threads - 1; /* few multiplications are not worth waking others */
    shared = task, shared_arg = arg, shared_n = n, shares = helpers + 1;
    for (int t = 0; t < helpers; t++) post(NKINDS + t, do_share, (Square){.k = t}, false);
    do_share((Square){.k = helpers}, false), wait_for(NKINDS, NKINDS + helpers);
}

// ---- Tensor placement (4.2): six percentages, and the bytes of each tier --------------------------------
// Things are placed whole, one after the other: the GPU takes one if its share of all so far has room; else
// the CPU, if the share of both has; else the disk. So a share is met to the size of one thing: of weights a
// tensor, over all layers in a row, so that layers are spread alike; of cache and activations a sequence.
static struct {
    uint8_t *base;
    size_t used, peak, uncounted; /* uncounted: embeddings and workspace, which A.3 does not count */
} arena[NTIERS];                  /* a tier is one piece of memory, given out from its beginning */
static Tier place(double dealt[NTIERS + 1], const double share[NTIERS], double size) { /* dealt: so far */
    double above = size, room = 0;
    int t = GPU;
    for (dealt[NTIERS] += size; t < DISK; t++)
        if ((above += dealt[t]) <= (room += share[t] * dealt[NTIERS]) * (1 + 1e-9)) break;
    return dealt[t] += size, (Tier)t;
}
static void *take(Tier t, size_t bytes) { /* the next bytes; before there are tiers this only counts */
    const uintptr_t at = (uintptr_t)arena[t].base + arena[t].used;
    arena[t].used += (bytes + 63) / 64 * 64, arena[t].peak = max(arena[t].peak, arena[t].used);
    return (void *)at;
}
static float *floats(Tier t, size_t n) { return take(t, n * sizeof(float)); }
static bool is_matrix(int role) { return role % 2 == 0 && role != NORM_1 && role != NORM_2; }
/* Gives a tensor its home, and fills it. The disk's is the checkpoint itself, if it need not be packed. */
static void settle(Weight *w, Tier tier, bool fill) {
    w->bytes = (size_t)w->rows * w->cols * sizeof(f16);
    if (w->packed) w->bytes = (w->rows + GROUP - 1UL) / GROUP * w->cols * packed_bytes(GROUP);
    w->rest = tier == DISK && !w->packed ? w->file : on(tier, take(tier, w->bytes));
    if (fill) fill_weight(w);
}
static void place_weights(bool fill) {
    double dealt[NTIERS + 1] = {0};
    size_t slot = 0;
    for (int g = 0; g < NGLOBALS; g++) settle(&outside[g], GPU, fill); /* the shares are of layers */
    arena[GPU].uncounted = arena[GPU].used;
    for (int j = 0; j < l; slot = max(slot, slab[j++])) {
        slab[j] = 0;
        for (int role = 0; role < NROLES; role++) {
            Weight *w = &layer[j][role];
            w->packed = policy.compress_weight && is_matrix(role);
            settle(w, place(dealt, policy.share[WEIGHTS], 1. * w->rows * w->cols), fill);
            if (w->rest.tier != GPU) w->offset = slab[j], slab[j] += (w->bytes + 63) / 64 * 64;
        }
    }
    for (int s = 0; s < 2; s++) weight_slot[s] = take(GPU, slot);
}
/* A batch's cache and activations. staged: what a slot of the cache has to hold. Returns its rows. */
static size_t place_batch(int k, double dealt[NKINDS][NTIERS + 1], size_t staged[NTIERS]) {
    size_t need[NTIERS] = {0}, rows = 0;
    for (Sequence *q = batch[k]; q < batch[k + 1]; q++) {
        q->room = q->s + generation_length - 1, rows += q->s;
        q->kv_tier = place(dealt[CACHE], policy.share[CACHE], q->room);
        q->act_tier = place(dealt[ACTIVATIONS], policy.share[ACTIVATIONS], q->s);
        q->kv = take(q->kv_tier, 2 * l * kv_row * q->room);
        q->staged[GPU] = need[GPU], q->staged[CPU] = need[CPU];
        if (q->kv_tier != GPU) need[GPU] += 2 * kv_row * (policy.delegated ? q->s : q->room);
        if (q->kv_tier == DISK && policy.delegated) need[CPU] += 2 * kv_row * q->room;
        if (K > 1) q->act = floats(q->act_tier, q->s * h1);
    }
    for (int t = GPU; t <= CPU; t++) staged[t] = max(staged[t], need[t]);
    return rows;
}
static void place_block(Sequence *seq, int count) { /* its sequences, the buffers, the workspace */
    double dealt[NKINDS][NTIERS + 1] = {{0}};
    const size_t gbs = min(policy.gbs, count), before = arena[GPU].used;
    size_t staged[NTIERS] = {0}, most_room = 0, rows = 0;
    K = (count + policy.gbs - 1) / policy.gbs;
    for (int k = 0; k <= K; k++) batch[k] = seq + min(k * gbs, count);
    for (int k = 0; k < K; k++) rows = max(rows, place_batch(k, dealt, staged));
    const size_t homes = arena[GPU].used - before; /* what A.3 does count */
    for (int q = 0; q < count; q++) most_room = max(most_room, seq[q].room);
    for (int slot = 0; slot < 2; slot++) {
        stage[GPU][slot] = take(GPU, staged[GPU]), stage[CPU][slot] = take(CPU, staged[CPU]);
        x_slot[slot] = floats(GPU, rows * h1);
    }
    const size_t part = (rows + MT) * h1; /* floats */
    norm = floats(GPU, part), x_Q = floats(GPU, part), x_K = floats(GPU, part), x_V = floats(GPU, part);
    x_Out = floats(GPU, part), ffn = floats(GPU, (rows + MT) * h2), logits = floats(GPU, gbs * vocab);
    scratch_floats = max(max(GROUP * (PANEL + LD), hd + 2 * most_room), 2 * h1);
    scratch = floats(GPU, threads * scratch_floats), new_row = floats(GPU, h1);
    if (policy.delegated) query = floats(CPU, gbs * h1), result = floats(CPU, gbs * h1);
    arena[GPU].uncounted += arena[GPU].used - before - homes;
}
/* Places all, block by block, each where the one before was, and generates; or only counts bytes. */
static void place_all(bool run) {
    size_t mark[NTIERS] = {0};
    kv_row = policy.compress_cache ? nh * packed_bytes(hd) : h1 * sizeof(f16);
    for (int t = 0; t < NTIERS; t++) arena[t].used = arena[t].peak = 0;
    place_weights(run);
    for (int first = 0, bls = policy.gbs * policy.num_gpu_batches; first < nprompts; first += bls) {
        for (int t = 0; t < NTIERS; t++) arena[t].used = mark[t] = first ? mark[t] : arena[t].used;
        place_block(prompts + first, (int)min(bls, nprompts - first));
        if (run) generation_s -= now(), generate(), generation_s += now();
    }
}

// ---- Links ----------------------------------------------------------------------------------------------
static struct {
    double rate, free_at, seconds;
    size_t bytes;  /* all that it has carried */
} link_of[NLINKS]; /* a link is a timeline: a copy waits until it is free. rate 0: as fast as memory is */
static double now(void) {
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t), (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static void copy_as_f16(uint8_t *to, const uint8_t *from, int type, size_t bytes) { /* bytes: of F16 */
    const size_t size = type == F32 ? 4 : 2;
    if (type == F16) memcpy(to, from, bytes);
    for (size_t e = 0; e < bytes / 2 && type != F16; e++) {
        float x = 0;
        f16 y;
        memcpy((uint8_t *)&x + 4 - size, from + e * size, size); /* BF16 is the upper half of a float */
        narrow(&y, &x, 1), memcpy(to + 2 * e, &y, sizeof y);
    }
}
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of the links */
static _Thread_local double arrival;                      /* of all that this thread has sent */
/* Over one link or two: bytes of the disk go by the CPU, and the slower link sets the pace. */
static void travel(Place to, Place from, size_t bytes) {
    const double start = now(); /* seconds */
    if (bytes) copy_as_f16(to.at, from.at, from.type, bytes);
    const double copied = now() - start; /* at least so long, also on a fast link */
    pthread_mutex_lock(&mutex);
    for (int t = (int)min(to.tier, from.tier); t < max(to.tier, from.tier) && bytes; t++) {
        const int c = (t == GPU ? CTOG : DTOC) + (to.tier > from.tier);
        const double seconds = fmax(link_of[c].rate > 0 ? (double)bytes / link_of[c].rate : 0, copied);
        link_of[c].free_at = fmax(link_of[c].free_at, start) + seconds;
        link_of[c].bytes += bytes, link_of[c].seconds += seconds;
        arrival = fmax(arrival, link_of[c].free_at);
    }
    pthread_mutex_unlock(&mutex);
}
static void await(void) { /* until all that this thread has sent has arrived */
    const struct timespec until = {(time_t)arrival, (long)((arrival - floor(arrival)) * 1e9)};
    if (arrival > now()) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

// ---- F16, and groups of 4 bits (5, group-wise quantization) ---------------------------------------------
/* Sign and other bits move to their places; a product adds 112 to the exponent, and makes all normal. */
static void widen(float *to, const void *f16s, size_t n) {
    const f16 *from = f16s;
    for (size_t e = 0; e < n; e++) {
        const uint32_t bits = (from[e] & 0x8000u) << 16 | (from[e] & 0x7fffu) << 13;
        memcpy(to + e, &bits, sizeof bits), to[e] *= 0x1p112f;
    }
}
/* Backwards; to the nearest, of two the even one. What F16 cannot hold as normal the product has rounded. */
static void narrow(void *f16s, const float *from, size_t n) {
    f16 *to = f16s;
    for (size_t e = 0; e < n; e++) {
        const float small = from[e] * 0x1p-112f;
        uint32_t bits;
        memcpy(&bits, &small, sizeof bits);
        const uint32_t most = bits & 0x7fffffff, rounded = (most + 0xfff + (most >> 13 & 1)) >> 13;
        to[e] = (f16)(bits >> 16 & 0x8000) | (f16)(rounded < 0x7c00 ? rounded : 0x7c00);
    }
}
/* Of n numbers in groups: min and scale as F16, and codes, in whole fours of bytes: that of number e in byte
 * e / 32 * 16 + e % 16, in the low half where e % 32 < 16. */
static size_t packed_bytes(int n) {
    const size_t codes = n / 32 * 16 + min(n % 32, 16);
    return n > GROUP ? packed_bytes(GROUP) + packed_bytes(n - GROUP) : 4 + (codes + 3) / 4 * 4;
}
/* x_quant = round((x - min) / (max - min) * (2^b - 1)), b = 4. The scale is rounded up: 15 reaches max. */
static void pack(uint8_t *to, const float *x, int n) {
    float most = x[0], head[2] = {x[0], 0};
    f16 rounded[2];
    if (n > GROUP) pack(to + packed_bytes(GROUP), x + GROUP, n - GROUP), n = GROUP;
    for (int e = 1; e < n; e++) head[0] = fminf(head[0], x[e]), most = fmaxf(most, x[e]);
    const float least = head[0] += 0, exact = (most - least) / 15; /* + 0: -0 becomes 0 */
    head[1] = exact, narrow(rounded, head, 2), widen(head, rounded, 2);
    if (head[1] < exact) rounded[1]++, widen(head, rounded, 2);
    memset(memcpy(to, rounded, 4) + 4, 0, packed_bytes(n) - 4);
    for (int e = 0; e < n && head[1] > 0; e++) {
        const unsigned code = (unsigned)fminf(15, rintf((x[e] - least) * (1 / head[1])));
        to[4 + e / 32 * 16 + e % 16] |= (uint8_t)(code << e % 32 / 16 * 4);
    }
}
static void unpack(float *x, const uint8_t *from, int n) { /* min + scale x_quant */
    float head[2];
    if (n > GROUP) unpack(x + GROUP, from + packed_bytes(GROUP), n - GROUP), n = GROUP;
    widen(head, from, 2);
    for (int e = 0; e < n; e++)
        x[e] = head[0] + head[1] * (float)(from[4 + e / 32 * 16 + e % 16] >> e % 32 / 16 * 4 & 15);
}
/* Brings a tensor from the checkpoint to where it rests. Weights are grouped along the output channel, their
 * rows: the group of column c that begins in row g GROUP is number g cols + c. */
static void fill_weight(Weight *w) {
    const size_t cols = w->cols, size = w->file.type == F32 ? 4 : 2;
    if (w->rest.at == w->file.at || !w->bytes) return;
    if (!w->packed) return copy_as_f16(w->rest.at, w->file.at, w->file.type, w->bytes);
    for (size_t group = 0; group < w->bytes / packed_bytes(GROUP); group++) {
        const size_t row = group / cols * GROUP;
        const int rows = (int)min(GROUP, w->rows - row);
        uint8_t plain[GROUP * sizeof(f16)], *from = w->file.at + (row * cols + group % cols) * size;
        float column[GROUP];
        for (int o = 0; o < rows; o++) copy_as_f16(plain + 2 * o, from + o * cols * size, w->file.type, 2);
        widen(column, plain, rows), pack(w->rest.at + group * packed_bytes(GROUP), column, rows);
    }
}

// ---- A.3: the cost model, linear in nine fractions and in the seconds of a layer (4.3, Eq. 1) -----------
// As printed, also where it is no machine's behaviour: the CPU attends to all cache off the GPU, comp^g adds
// two processors that could work at once, gpu_w^g holds a prompt's activations. wn, cn, hn are wd, cd, hd.
enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, T_PRE, T_GEN, NVARS, NROWS = 31 };
static const char var_name[][6] = {"wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd", "T_pre", "T_gen"};
/* Table 7: a machine of a few numbers. Rates are those of generation [0] and of prefill [1]. */
enum { MM = NLINKS, BMM, CPU_FLOPS, NRATES };
static struct {
    double mem[NTIERS], rate[NRATES][2]; /* bytes; bytes or operations a second */
} hw = {.mem = {0, 0, 1e18},
        .rate = {{9e9, 9e9}, {9e9, 9e9}, {1e9, 1e9}, {1e9, 1e9}, {9e10, 9e10}, {2e10, 2e10}, {2e10, 2e10}}};
typedef struct { /* minimize c x, x >= 0, where a x <= b in each of m rows */
    int m;       /* rows so far */
    double c[NVARS], a[NROWS][NVARS], b[NROWS], x[NVARS];
    const char *name[NROWS];
} Lp;
static void row(Lp *lp, const char *name, double b, const double *a) {
    memcpy(lp->a[lp->m], a, sizeof lp->a[0]), lp->name[lp->m] = name, lp->b[lp->m++] = b;
}
#define ROW(name, b, ...) row(lp, name, b, (const double[NVARS]){__VA_ARGS__})
#define STAGE(name) (p ? name "^p" : name "^g")
/* In prefill (p = 1) and generation (p = 0) T = max(ctog, gtoc, dtoc, ctod, comp), and gpu_peak = gpu_home +
 * gpu_w < gmem with the largest of six terms: a row for each. q new tokens of a sequence attend to u. */
static void stage_rows(Lp *lp, const double *mem, double s, double n, double gbs, double bls, int p) {
    const double q = p ? s : 1, u = p ? s : s + n, weight = 8. * h1 * h1 + 4. * h1 * h2;
    const double act = 2 * q * h1 * bls, stored = 4 * (p ? s + 1 : 1) * h1 * bls;
    const double down = p ? stored : 0, loaded = p ? 0 : 4 * bls * (s + n / 2) * h1;
    const double ctog = hw.rate[CTOG][p], gtoc = hw.rate[GTOC][p], dtoc = hw.rate[DTOC][p];
    const double ctod = hw.rate[CTOD][p], bmm_flops = hw.rate[BMM][p], cpu_flops = hw.rate[CPU_FLOPS][p];
    const double linear_layer = bls * (8 * q * h1 * h1 + 4 * q * h1 * h2) / hw.rate[MM][p];
    const double att = 4 * bls * (p ? s * s : s + n / 2) * h1, gpu = att / bmm_flops, cpu = att / cpu_flops;
    const int first = lp->m;
    ROW(STAGE("ctog"), 0, [WC] = weight / ctog, [WD] = weight / ctog, [HC] = act / ctog, [HD] = act / ctog);
    ROW(STAGE("gtoc"), 0, [CC] = down / gtoc, [CD] = down / gtoc, [HC] = act / gtoc, [HD] = act / gtoc);
    ROW(STAGE("dtoc"), 0, [CD] = loaded / dtoc, [WD] = weight / dtoc, [HD] = act / dtoc);
    ROW(STAGE("ctod"), 0, [CD] = stored / ctod, [HD] = act / ctod);
    ROW(STAGE("comp"), -linear_layer - p * gpu, [CG] = !p * gpu, [CC] = !p * cpu, [CD] = !p * cpu);
    for (int i = first; i < lp->m; i++) lp->a[i][p ? T_PRE : T_GEN] = -1; /* sum <= T */
    const double qkv = gbs * (2 * q * h1 + 3 * (2 * q * h1)), embed_w = gbs * (2 * q * h1 + 2 * q * h1);
    const double att_1 = gbs * (2 * q * h1 + 2 * u * h1 + 2 * nh * q * u), mlp_1 = 2 * gbs * q * (h1 + h2);
    const double fixed[] = {qkv, 0, 0, embed_w, mlp_1, mlp_1}; /* att_2 is att_1, mlp_2 is mlp_1 */
    for (int w = 0; w < 6; w++) /* of gpu_w: 2 (1 - wg) weight, (1 - hg) 2 s h1 gbs, and a term */
        ROW(STAGE("gpu_peak"), mem[GPU] - 2 * weight - 2 * s * h1 * gbs - fixed[w],
            [WG] = weight * l - 2 * weight, [HG] = 2 * q * h1 * bls - 2 * s * h1 * gbs,
            [CG] = 4 * (s + n) * h1 * bls * l + (fixed[w] > 0 ? 0 : att_1));
}
/* Eq. 1: minimize T / bls, where T = T_pre l + T_gen (n - 1) l. Its sums of 1 are two rows each. */
static void paper_lp(Lp *lp, const double *mem, double s, double n, double gbs, double num_gpu_batches) {
    const double bls = gbs * num_gpu_batches, weight = 8. * h1 * h1 + 4. * h1 * h2;
    const double cache = 4 * (s + n) * h1 * bls * l, act = 2 * s * h1 * bls, act_w = 2 * s * h1 * gbs;
    *lp = (Lp){.c = {[T_PRE] = l / bls, [T_GEN] = (n - 1) * l / bls}};
    for (int p = 1; p >= 0; p--) stage_rows(lp, mem, s, n, gbs, bls, p);
    ROW("cpu_peak^p", mem[CPU] - weight - act_w, [WC] = weight * l, [HC] = act, [CC] = cache, [WG] = -weight,
        [HG] = -act_w);
    ROW("cpu_peak^g",
        mem[CPU] - 2 * nh * (s + n) * gbs - 2 * h1 * gbs, [WC] = weight * l, [HC] = 2 * h1 * bls,
        [CC] = cache, [WD] = weight, [HD] = 2 * 2 * h1 * gbs, [CD] = 2 * 4 * (s + n) * h1 * gbs);
    ROW("nvme_peak", mem[DISK], [WD] = weight * l, [HD] = act, [CD] = cache);
    for (int sign = 1; sign >= -1; sign -= 2) {
        ROW("wg + wc + wd = 1", sign, [WG] = sign, [WC] = sign, [WD] = sign);
        ROW("cg + cc + cd = 1", sign, [CG] = sign, [CC] = sign, [CD] = sign);
        ROW("hg + hc + hd = 1", sign, [HG] = sign, [HC] = sign, [HD] = sign);
    }
}
static void print_lp(const Lp *lp) {
    printf("minimize %.6g T_pre + %.6g T_gen\n", lp->c[T_PRE], lp->c[T_GEN]);
    for (int i = 0; i < lp->m; i++) {
        printf("%-20s", lp->name[i]);
        for (int v = 0; v < NVARS; v++)
            if (lp->a[i][v] != 0) printf(" %+.6g %s", lp->a[i][v], var_name[v]);
        printf(" <= %.6g\n", lp->b[i]);
    }
}

// ---- Simplex (4.3: "can be solved very fast because there are only 9 variables") ------------------------
// A row's slack is what it lacks to equality: a x + slack = b. One variable a row is basic; the tableau has
// it by the others, which are 0. A pivot exchanges two. Phase 1 gives all rows one more variable to lean on
// and drives it to 0, phase 2 minimizes the cost. Of several pivots the first variables' is taken (Bland): no
// cycles.
enum { LEAN = NVARS, RIGHT = NVARS + 1, COST = NROWS, PHASE_1 = NROWS + 1, FIRST_SLACK = NVARS + 1 };
typedef struct {
    int basic[NROWS], other[NVARS + 1]; /* variables; LEAN; slacks */
    double at[NROWS + 2][NVARS + 2];    /* basic + sum of at x other = at[RIGHT]; and the two costs */
} Tableau;
static void pivot(Tableau *t, int r, int c) {
    const double inverse = 1 / t->at[r][c];
    const int leaves = t->basic[r];
    for (int i = 0; i < NROWS + 2; i++) {
        const double factor = i == r ? 0 : t->at[i][c] * inverse;
        for (int v = 0; v <= RIGHT; v++) t->at[i][v] -= factor * t->at[r][v];
        if (i != r) t->at[i][c] = -factor;
    }
    for (int v = 0; v <= RIGHT; v++) t->at[r][v] *= inverse;
    t->at[r][c] = inverse, t->basic[r] = t->other[c], t->other[c] = leaves;
}
static bool minimize(Tableau *t, int cost) { /* pivots while that lowers the cost; false: it has no end */
    const double EPS = 1e-11;
    for (int pivots = 0, c = 0, r = 0; pivots < 5000 && r >= 0; pivots++) {
        double least = INFINITY;
        c = r = -1;
        for (int v = 0; v <= LEAN; v++)
            if (t->at[cost][v] < -EPS && (cost == PHASE_1 || t->other[v] != LEAN))
                c = c < 0 || t->other[v] < t->other[c] ? v : c;
        if (c < 0) return true;
        for (int i = 0; i < NROWS; i++) {
            const double reach = t->at[i][c] > EPS ? t->at[i][RIGHT] / t->at[i][c] : INFINITY;
            const bool tie = r >= 0 && reach <= least && t->basic[i] < t->basic[r];
            if (reach < least || tie) r = i, least = reach;
        }
        if (r >= 0) pivot(t, r, c);
    }
    return false;
}
static double layer_seconds(const Lp *lp, int T) { /* the largest term at x */
    double most = 0;
    for (int i = 0; i < NROWS; i++) {
        double sum = -lp->b[i];
        for (int v = 0; v < T_PRE; v++) sum += lp->a[i][v] * lp->x[v];
        most = lp->a[i][T] < 0 ? fmax(most, sum) : most;
    }
    return most;
}
/* Improves x; false: nothing satisfies all rows. Numbers are scaled to be around 1, seconds by those at x. Of
 * several best answers that with less on slower tiers is taken, since these cost a little here. */
static bool simplex(Lp *lp) {
    Tableau t = {.at[PHASE_1][LEAN] = 1, .other[LEAN] = LEAN};
    double *x = lp->x, unit[NVARS], most = 0;
    int least = 0;
    for (int v = 0; v < NVARS; v++) unit[v] = v < T_PRE ? 1 : layer_seconds(lp, v), t.other[v] = v;
    for (int v = 0; v < NVARS; v++) most = fmax(most, lp->c[v] * unit[v]);
    for (int v = 0; v < NVARS; v++) t.at[COST][v] = v < T_PRE ? 1e-9 * (v % 3) : lp->c[v] * unit[v] / most;
    for (int i = 0; i < NROWS; i++) {
        double size = fabs(lp->b[i]);
        for (int v = 0; v < NVARS; v++) size = fmax(size, fabs(lp->a[i][v] * unit[v]));
        for (int v = 0; v < NVARS; v++) t.at[i][v] = lp->a[i][v] * unit[v] / size;
        t.at[i][LEAN] = -1, t.at[i][RIGHT] = lp->b[i] / size, t.basic[i] = FIRST_SLACK + i;
        if (t.at[i][RIGHT] < t.at[least][RIGHT]) least = i;
    }
    pivot(&t, least, LEAN); /* now all rows hold: no right side is negative */
    if (!minimize(&t, PHASE_1) || t.at[PHASE_1][RIGHT] < -1e-9) return false; /* none without it */
    for (int i = 0; i < NROWS; i++) /* basic, but 0: any other may take its place */
        for (int v = 0; v <= LEAN && t.basic[i] == LEAN; v++)
            if (fabs(t.at[i][v]) > 1e-6) pivot(&t, i, v);
    if (!minimize(&t, COST)) return false; /* phase 2 */
    memset(x, 0, NVARS * sizeof *x);
    for (int i = 0; i < NROWS; i++)
        if (t.basic[i] < T_PRE) x[t.basic[i]] = fmax(t.at[i][RIGHT], 0);
    for (int T = T_PRE; T <= T_GEN; T++) x[T] = layer_seconds(lp, T);
    return true;
}

// ---- Policy search (4.3): the best placement for each of a few blocks, and the best of these ------------
static Lp found; /* the best, by the search */
/* Of the policy's block, first from everything on disk, then with units of the answer's size. To run it also
 * has to fit: what A.3 does not count comes off the memory, and so does what a tier still lacks. */
static bool best_placement(Lp *lp, int s, bool to_run) {
    double mem[] = {hw.mem[GPU], hw.mem[CPU], hw.mem[DISK]};
    for (int tries = 0; tries < 12; tries++) {
        bool fits = true;
        paper_lp(lp, mem, s, generation_length, policy.gbs, policy.num_gpu_batches);
        for (int v = 0; v < T_PRE; v++) lp->x[v] = v % 3 == DISK;
        if (mem[GPU] <= 0 || mem[CPU] <= 0 || !simplex(lp) || !simplex(lp)) return false;
        memcpy(policy.share, lp->x, sizeof policy.share);
        if (to_run) place_all(false);
        for (int t = 0; t < NTIERS && to_run; t++) {
            const double lacks = (double)arena[t].peak - hw.mem[t];
            mem[t] -= tries ? fmax(lacks, 0) : (double)arena[t].uncounted;
            fits &= tries && lacks <= 0;
        }
        if (fits) return true;
    }
    return false;
}
/* Tries the blocks that the flags leave open: gbs small or a multiple of 4, up to 20 batches. s: tokens of
 * the longest prompt (the paper pads to it). Leaves the best policy and its x; returns T / bls. */
static double search(int s, int count, bool to_run, bool show_lp) {
    const struct Policy given = policy; /* 0: gbs, num_gpu_batches are open */
    struct Policy best = given;
    double least = INFINITY;
    Lp lp;
    for (int g = 1; g == 1 || (!given.gbs && g < count + 4); g = g < 4 ? 2 * g : g + max(4, g / 16 * 4))
        for (int b = 1; b <= (given.num_gpu_batches ? 1 : 20) && (b == 1 || g * (b - 1) < count); b++) {
            if (!given.gbs) policy.gbs = g;
            if (!given.num_gpu_batches) policy.num_gpu_batches = b;
            if (!best_placement(&lp, s, to_run)) continue;
            const double T = (lp.x[T_PRE] + lp.x[T_GEN] * (generation_length - 1)) * l;
            const double each = T / (double)min(count, (long)policy.gbs * policy.num_gpu_batches);
            if (each < least) least = each, best = policy, found = lp;
        }
    policy = best;
    if (show_lp) print_lp(&found);
    return least;
}

// ---- The checkpoint: config.json, and files of safetensors, whose headers are not trusted ---------------
/* One line for the user. Status 2: wrong use, or it does not fit; 1: everything else. */
__attribute__((noreturn, format(printf, 2, 3))) static void die(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout), fputs("mini: ", stderr), vfprintf(stderr, format, args), fputc('\n', stderr);
    _exit(status);
}
static void mapping_failed(int signal) { die(signal > 0, "a mapped file could not be read: was it cut?"); }
static void *allocate(size_t n, size_t size) {
    void *memory = calloc(n + 1, size);
    return memory ? memory : (die(1, "no memory for %zu x %zu bytes", n, size), NULL);
}
static char *read_text(int status, const char *dir, const char *name) { /* status 0: NULL if there is none */
    char path[4200], *text = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "%s%s", dir, name);
    FILE *file = fopen(path, "r");
    if (!file && errno == ENOENT && !status) return NULL;
    if (!file || getdelim(&text, &room, 0, file) <= 0)
        die(status + !status, "%s: is missing or unreadable", path);
    return fclose(file), text;
}
static const char *member(const char *text, const char *key) { /* what is behind "key": or ""; no parser */
    const size_t len = strlen(key);
    for (const char *at = text; (at = strstr(at, key)); at++) {
        if (at == text || at[-1] != '"' || at[len] != '"') continue;
        const char *colon = at + len + 1 + strspn(at + len + 1, " \n\r\t");
        if (*colon == ':') return colon + 1 + strspn(colon + 1, " \n\r\t");
    }
    return "";
}
static bool says(const char *text, const char *key, const char *value) {
    return !strncmp(member(text, key), value, strlen(value));
}
/* A whole number of config.json; left_out: what it is if it is not there, unless that is negative. */
static int whole(const char *text, const char *key, int low, int high, int left_out) {
    const char *at = member(text, key);
    char *end;
    const double value = strtod(at += *at == '[', &end);
    if (left_out >= 0 && (!*at || *at == 'n')) return left_out;
    if (end > at && value >= low && value <= high && value <= floor(value)) return (int)value;
    die(1, "config.json: %s has to be a whole number from %d to %d", key, low, high);
}
static void read_config(const char *dir) {
    const char *text = read_text(1, dir, "/config.json");
    l = whole(text, "num_hidden_layers", 1, 1 << 10, -1), h1 = whole(text, "hidden_size", 1, 1 << 16, -1);
    h2 = whole(text, "ffn_dim", 1, 1 << 19, -1), nh = whole(text, "num_attention_heads", 1, h1, -1);
    vocab = whole(text, "vocab_size", 1, 1 << 20, -1), eos = whole(text, "eos_token_id", 0, vocab - 1, 2);
    positions = whole(text, "max_position_embeddings", 1, 1 << 20, -1), hd = h1 / nh;
    final_norm = !says(text, "_remove_final_layer_norm", "true");
    tied = !says(text, "tie_word_embeddings", "false");
    if (!says(text, "model_type", "\"opt\"") || !says(text, "activation_function", "\"relu\"") ||
        says(text, "do_layer_norm_before", "false") || hd * nh != h1 ||
        whole(text, "word_embed_proj_dim", 1, 1 << 16, h1) != h1)
        die(1, "%s: is no OPT model, or one like opt-350m, which the engine runs (opt_model.c)", dir);
}
static struct Shard { /* a file: 8 bytes with the length of its header, the header in JSON, the tensors */
    char name[256], *header;
    uint8_t *data; /* mapped: its pages come when they are read */
    double size;   /* of the tensors, in bytes */
} shard[1000];
static void open_shard(const char *dir, const char *name) {
    struct Shard *s = shard;
    char path[4200];
    uint64_t len = 0; /* bytes of the header */
    while (s < shard + 998 && *s->name && strcmp(s->name, name)) s++;
    if (*s->name) return; /* it is open */
    snprintf(path, sizeof path, "%s/%s", dir, name), snprintf(s->name, sizeof s->name, "%s", name);
    const int fd = open(path, O_RDONLY | O_NONBLOCK);
    const off_t size = fd < 0 ? 0 : lseek(fd, 0, SEEK_END);
    uint8_t *file = size > 8 ? mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (file != MAP_FAILED) memcpy(&len, file, 8);
    if (file == MAP_FAILED || len > size - 8ull) die(1, "%s: is no whole file of safetensors", path);
    s->header = memcpy(allocate(len, 1), file + 8, len), s->data = file + 8 + len, s->size = size - 8. - len;
}
/* The tensor of that name, with or without "model." in front, of this shape; it has to be inside its file. */
static Weight find_tensor(const char *name, int rows, int cols) {
    static const char *const types[] = {"\"F16\"", "\"BF16\"", "\"F32\""};
    const char *at = "";
    const struct Shard *s = shard;
    double shape[3] = {1, 1, 1}, begin = -1, end = -1;
    for (; s->header && !*at; s += !*at)
        if (!*(at = member(s->header, name))) at = member(s->header, name + 6 * !strncmp(name, "model.", 6));
    int type = F16, dims = sscanf(member(at, "shape"), "[ %lf , %lf , %lf", &shape[0], &shape[1], &shape[2]);
    while (type < NTYPES && !says(at, "dtype", types[type])) type++;
    sscanf(member(at, "data_offsets"), "[ %lf , %lf", &begin, &end);
    if (dims == 1) shape[1] = shape[0], shape[0] = 1; /* a vector is a row */
    if (dims > 2 || shape[0] != rows || shape[1] != cols || type == NTYPES ||
        !(begin >= 0 && end <= s->size) || begin > floor(begin) ||
        end - begin != (double)rows * cols * (type == F32 ? 4 : 2))
        die(1, "%s: is not there as F16, BF16 or F32 of %d x %d: is it all there?", name, rows, cols);
    return (Weight){.file = {DISK, type, s->data + (size_t)begin}, .rows = rows, .cols = cols};
}
#define PARTS                                                                                     \
    "self_attn_layer_norm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj " \
    "final_layer_norm fc1 fc2"
static void open_checkpoint(const char *dir) { /* one file, or those that an index names */
    char *index = read_text(0, dir, "/model.safetensors.index.json"), name[256];
    for (char *at = index, *begin; at && (at = begin = strstr(at, ".safetensors\"")); at += 12) {
        while (begin > index && at - begin < 200 && !strchr("\"/", begin[-1])) begin--;
        snprintf(name, sizeof name, "%.*s.safetensors", (int)(at - begin), begin), open_shard(dir, name);
    }
    if (!index) open_shard(dir, "model.safetensors");
    free(index), layer = allocate(l, sizeof *layer), slab = allocate(l, sizeof *slab);
    outside[TOKENS] = find_tensor("model.decoder.embed_tokens.weight", vocab, h1);
    outside[POSITIONS] = find_tensor("model.decoder.embed_positions.weight", positions + 2, h1);
    if (final_norm) outside[LAST_NORM] = find_tensor("model.decoder.final_layer_norm.weight", 1, h1);
    if (final_norm) outside[LAST_BIAS] = find_tensor("model.decoder.final_layer_norm.bias", 1, h1);
    if (!tied) outside[HEAD] = find_tensor("lm_head.weight", vocab, h1);
    for (int j = 0; j < l; j++) {
        char parts[] = PARTS, *next = parts, *part = NULL;
        for (int role = 0; role < NROLES; role++) {
            const int out = role / 2 == W_1 / 2 ? h2 : h1, in = role == W_2 ? h2 : h1;
            const char *kind = role % 2 ? "bias" : "weight";
            if (role % 2 == 0) part = strsep(&next, " ");
            snprintf(name, sizeof name, "model.decoder.layers.%d.%s.%s", j, part, kind);
            layer[j][role] = find_tensor(name, is_matrix(role) ? out : 1, is_matrix(role) ? in : out);
        }
    }
}

// ---- The tokenizer: GPT-2's byte-level BPE --------------------------------------------------------------
static struct Entry { /* in the order of texts: pieces with ids, pairs "left right" with ranks */
    const char *text;
    int number;
} * entry;
static const char **piece;                       // (vocab)
static int nentries, byte_id[256], byte_of[324]; /* 1 + the byte that a character stands for */
static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static int find(const char *text) {
    const struct Entry *it = bsearch(&text, entry, nentries, sizeof *entry, by_text);
    return it ? it->number : -1;
}
static char *put_utf8(char *to, long c) { /* a character below 2048 */
    if (c > 0x7f) *to++ = (char)(0xc0 | (c >> 6 & 31));
    return *to = (char)(c > 0x7f ? 0x80 | (c & 63) : c), to + 1;
}
static char *read_string(char *at) { /* of JSON: decodes it where it is, up to a 0; returns what is behind */
    char *to = at, hex[5];
    for (; *at && *at != '"'; at++) {
        const bool escaped = *at == '\\' && at[1];
        const bool coded = escaped && at[1] == 'u' && snprintf(hex, sizeof hex, "%.4s", at + 2) == 4;
        if (!coded) *to++ = escaped ? *++at : *at;
        if (coded) to = put_utf8(to, strtol(hex, NULL, 16)), at += 5;
    }
    return at += *at == '"', *to = 0, at;
}
static void read_tokenizer(const char *dir) {
    char *at = read_text(1, dir, "/vocab.json"), *lines = read_text(1, dir, "/merges.txt"), text[2048];
    int n = 0;
    piece = allocate(vocab, sizeof *piece);
    entry = allocate(vocab + strlen(lines) / 2, sizeof *entry);       /* a line has two bytes and more */
    for (char *name, *end; (name = strchr(at, '"')); at = end, n++) { /* "piece": id */
        at = read_string(++name);
        const long id = strtol(at += strspn(at, ": "), &end, 10);
        if (end == at || !*end || !strchr(",} \r\n\t", *end) || id < 0 || id >= vocab || piece[id])
            die(1, "%s: vocab.json: \"%.60s\" has no id of its own below vocab_size", dir, name);
        entry[n] = (struct Entry){piece[id] = name, (int)id};
    }
    qsort(entry, nentries = n, sizeof *entry, by_text);
    for (char *line = strtok(lines, "\r\n"), *right; line; line = strtok(NULL, "\r\n")) { /* "left right" */
        if (!strncmp(line, "#version", 8)) continue;
        if ((right = strchr(line, ' '))) *right++ = 0, snprintf(text, sizeof text, "%s%s", line, right);
        if (!right || find(line) < 0 || find(right) < 0 || find(text) < 0)
            die(1, "%s: merges.txt: \"%.60s\" begins no pair of pieces that make a third", dir, line);
        right[-1] = ' ', entry[n] = (struct Entry){line, n}, n++;
    }
    qsort(entry, nentries = n, sizeof *entry, by_text);
    for (int b = 0, next = 256; b < 256; b++) { /* what cannot be printed is written as 256 and more */
        const int code = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae ? b : next++;
        byte_of[code] = b + 1, *put_utf8(text, code) = 0, byte_id[b] = find(text);
        if (byte_id[b] < 0) die(1, "%s: vocab.json has no piece for byte %d", dir, b);
    }
}
/* Letters, digits, blanks, others. Beyond ASCII all are letters here. */
static int kind_of(char c) { return c & 0x80 || isalpha(c) ? 0 : isdigit(c) ? 1 : isspace(c) ? 2 : 3; }
/* Ends a word of GPT-2's 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
static const char *word_end(const char *at, const char *limit) {
    for (const char *c = "s t revem lld "; *at == '\'' && *c; c += 2)
        if (at[1] == c[0] && (c[1] == ' ' || at[2] == c[1])) return at + (c[1] == ' ' ? 2 : 3);
    const char *first = at + (at[0] == ' ' && at + 1 < limit), *end = first + 1;
    while (end < limit && kind_of(*end) == kind_of(*first)) end++;
    return end - (kind_of(*first) == 2 && end < limit && end > at + 1); /* the last is the next word's */
}
static int join_pairs(int *id, int n) { /* the first of merges.txt first; returns how many are left */
    char pair[2048];
    for (int best, where = 0;; memmove(id + where + 1, id + where + 2, (--n - where - 1) * sizeof *id)) {
        best = nentries;
        for (int b = 0, rank; b + 1 < n; b++) {
            snprintf(pair, sizeof pair, "%s %s", piece[id[b]], piece[id[b + 1]]);
            if ((rank = find(pair)) >= 0 && rank < best) best = rank, where = b;
        }
        if (best == nentries) return n;
        snprintf(pair, sizeof pair, "%s%s", piece[id[where]], piece[id[where + 1]]), id[where] = find(pair);
    }
}
static void encode(Sequence *q) { /* </s> and the words, which begin as bytes */
    q->token = allocate(q->size + 1 + generation_length, sizeof *q->token);
    if ((q->token[q->s++] = find("</s>")) < 0) die(1, "vocab.json has no piece </s>");
    for (const char *at = q->text, *limit = at + q->size, *end; at < limit; at = end) {
        int *id = q->token + q->s, n = 0;
        if ((end = word_end(at, limit)) - at > 1000) die(2, "prompt %d: a word has over 1000 bytes", q->id);
        for (; at < end; at++) id[n++] = byte_id[(unsigned char)*at];
        q->s += join_pairs(id, n);
    }
    longest = (int)max(longest, q->s);
    if (q->s + generation_length - 1 > positions)
        die(2, "prompt %d: with --max-tokens it is longer than the model's %d positions", q->id, positions);
}
static char *decode(const int *id, int n, size_t *size) { /* bytes of tokens but <s>, <pad>, </s>, <unk> */
    size_t room = *size = 0;
    for (int e = 0; e < n; e++) room += piece[id[e]] ? strlen(piece[id[e]]) : 0;
    char *text = allocate(room, 1);
    for (int e = 0; e < n; e++)
        for (const char *c = piece[id[e]]; id[e] > 3 && c && *c; c += *c & 0x80 && c[1] ? 2 : 1) {
            const int code = *c & 0x80 ? (c[0] & 31) << 6 | (c[1] & 63) : *c;
            if (code < 324 && byte_of[code]) text[(*size)++] = (char)(byte_of[code] - 1);
        }
    return text;
}
static int utf8_step(const unsigned char *s) { /* bytes of a character of UTF-8; -n: n bytes are none */
    const int more = *s < 0x80 ? 0 : *s < 0xc2 || *s > 0xf4 ? -1 : 1 + (*s >= 0xe0) + (*s >= 0xf0);
    if ((*s == 0xe0 && s[1] < 0xa0) || (*s == 0xf0 && s[1] < 0x90)) return -1; /* shorter forms */
    if ((*s == 0xed && s[1] > 0x9f) || (*s == 0xf4 && s[1] > 0x8f)) return -1; /* not Unicode */
    for (int b = 1; b <= more; b++)
        if ((s[b] & 0xc0) != 0x80) return -b;
    return more < 0 ? -1 : more + 1;
}
static void print_text(const char *text, size_t size, bool json) { /* what is no UTF-8 becomes U+FFFD */
    for (const char *end = text + size; text < end;) {
        const int step = utf8_step((const unsigned char *)text);
        const bool escaped = json && step == 1 && (*text < ' ' || *text == '"' || *text == '\\');
        if (escaped) printf("\\u%04x", *text);
        if (!escaped) fwrite(step < 0 ? "\xEF\xBF\xBD" : text, 1, step < 0 ? 3 : step, stdout);
        text += abs(step);
    }
}

// ---- The command line -----------------------------------------------------------------------------------
static const char *prompts_file, *hardware;
static bool percent, json, only_policy, show_lp, help; /* flags of that name; --policy */
static double gpu_mem, cpu_mem;                        /* bytes */
static int prompt_len = 512;                           /* s of A.3, in tokens */
static const struct Flag {
    const char *name;
    char kind; /* s is a switch, t a text, w a whole number, f a fraction, b bytes, p percentages, l links */
    void *to;
    const char *help;
} flags[] = {{"--prompts", 't', &prompts_file, "FILE: a prompt a line; - is standard input"},
             {"--max-tokens", 'w', &generation_length, "N: tokens to generate (64)"},
             {"--percent", 'p', &percent, "WG WC CG CC HG HC: weights, cache, activations on GPU, CPU"},
             {"--gpu-batch-size", 'w', &policy.gbs, "N: sequences of a GPU batch"},
             {"--num-gpu-batches", 'w', &policy.num_gpu_batches, "N: GPU batches of a block"},
             {"--cpu-cache-compute", 's', &policy.delegated, "the CPU attends to cache off the GPU"},
             {"--compress-weight", 's', &policy.compress_weight, "4-bit groups for the layers' matrices"},
             {"--compress-cache", 's', &policy.compress_cache, "4-bit groups for the KV cache"},
             {"--attn-sparsity", 'f', &policy.sparsity, "F: read V of this share of the tokens (1)"},
             {"--no-overlap", 's', &policy.no_overlap, "make every move at once"},
             {"--gpu-mem", 'b', &gpu_mem, "SIZE: of the GPU tier, such as 16G (half of the memory)"},
             {"--cpu-mem", 'b', &cpu_mem, "SIZE: of the CPU tier (half of the memory)"},
             {"--link", 'l', NULL, "LIST: bytes a second, such as ctog=1G,gtoc=1G,dtoc=0.5G,ctod=0.5G"},
             {"--threads", 'w', &threads, "N: that compute (all cores)"},
             {"--json", 's', &json, "completions as JSON lines"},
             {"--policy", 's', &only_policy, "print what A.3 finds for --max-tokens, and end"},
             {"--prompt-len", 'w', &prompt_len, "S: tokens of a prompt for --policy (512)"},
             {"--hardware", 't', &hardware, "FILE: the machine to search for: hardware/t4.json"},
             {"--lp", 's', &show_lp, "print the linear program that was solved"},
             {"--help", 's', &help, "print this"},
             {NULL, 0, NULL, NULL}};
/* A number in its range; "16G" is one, if numbers of that kind have a thousand. */
static double number(const char *flag, const char *text, double thousand, double low, double high) {
    char *end;
    double value = strtod(text, &end);
    const char *unit = strchr("TGMK", toupper((unsigned char)*end)); /* or none: the end of both */
    if (unit) value *= pow(thousand, (double)strlen(unit));
    if (end == text || !unit || (*unit && end[1]) || !(value >= low && value <= high))
        die(2, "%s %.60s: expected a number from %g to %g", flag, text, low, high);
    return value;
}
static void read_value(const struct Flag *f, int v, char *text) { /* v: which of a flag's values */
    double *share = policy.share[v / 2];
    if (f->kind == 't') *(char **)f->to = text;
    if (f->kind == 'f') *(double *)f->to = number(f->name, text, NAN, 1e-6, 1);
    if (f->kind == 'b') *(double *)f->to = number(f->name, text, 1024, 1, 1e18);
    if (f->kind == 'p') share[v % 2] = number(f->name, text, NAN, 0, 100) / 100;
    if (v % 2 && share[GPU] + share[CPU] > 1 + 1e-9) die(2, "--percent: GPU and CPU have more than 100");
    share[DISK] = fmax(0, 1 - share[GPU] - share[CPU]);
    if (f->kind == 'w') *(int *)f->to = (int)number(f->name, text, NAN, 1, 1 << 16);
    if (f->kind == 'w' && atof(text) > *(int *)f->to) die(2, "%s %.60s: is not whole", f->name, text);
    for (char *at = f->kind == 'l' ? strtok(text, ",") : NULL; at; at = strtok(NULL, ",")) {
        int c = 0;
        while (c < NLINKS && (strncmp(at, link_name[c], 4) || at[4] != '=')) c++;
        if (c == NLINKS) die(2, "--link %.60s: expected a link and bytes a second, such as ctog=1G", at);
        link_of[c].rate = number(f->name, at + 5, 1000, 1, 1e15);
    }
}
static int read_flags(char **args, int n) { /* returns how many words, which are no flags, are left in args */
    int words = 0;
    for (int a = 0, values; a < n; a++) {
        const struct Flag *f = flags;
        while (f->name && strcmp(args[a], f->name)) f++;
        if (!f->name && !strncmp(args[a], "--", 2)) die(2, "there is no flag %.60s; see --help", args[a]);
        if (!f->name) args[words++] = args[a];
        values = !f->name || f->kind == 's' ? 0 : f->kind == 'p' ? 6 : 1;
        if (n - a <= values) die(2, "%s takes %d values: %s", f->name, values, f->help);
        if (f->kind == 's' || f->kind == 'p') *(bool *)f->to = true;
        for (int v = 0; v < values; v++) read_value(f, v, args[++a]);
    }
    return words;
}
static void describe_machine(void) { /* this computer, or a file of Table 7's constants; and what flags say */
    static const char key[][12] = {"gmem",     "cmem",     "nmem",     "ctog_bdw",  "gtoc_bdw",
                                   "dtoc_bdw", "ctod_bdw", "mm_flops", "bmm_flops", "cpu_flops"};
    const char *text = hardware ? read_text(2, "", hardware) : NULL;
    hw.mem[GPU] = hw.mem[CPU] = .5 * (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    for (int v = 0; v < 20 && text; v++) { /* KEY, or KEY_g and KEY_p: of generation, of prefill */
        char of_phase[40];
        snprintf(of_phase, sizeof of_phase, "%s_%c", key[v / 2], "gp"[v % 2]);
        const char *both = member(text, key[v / 2]);
        const double value = atof(*both ? both : member(text, of_phase));
        if (!(value >= 1e-9 && value <= 1e30)) die(2, "%s: %s: expected 1e-9 to 1e30", hardware, key[v / 2]);
        *(v < 6 ? &hw.mem[v / 2] : &hw.rate[v / 2 - 3][v % 2]) = value;
    }
    for (int v = 0; v < 2 * NLINKS; v++)
        if (link_of[v / 2].rate > 0) hw.rate[v / 2][v % 2] = link_of[v / 2].rate;
    if (gpu_mem > 0) hw.mem[GPU] = gpu_mem;
    if (cpu_mem > 0) hw.mem[CPU] = cpu_mem;
}
static void read_prompts(char **words,
                         int n) { /* words behind the model, or lines, whose numbers are the ids */
    FILE *file = !prompts_file ? NULL : strcmp(prompts_file, "-") ? fopen(prompts_file, "r") : stdin;
    if (prompts_file && !file) die(2, "%s: %s", prompts_file, strerror(errno));
    for (int id = 0; file || id < n; id++) {
        char *text = file ? NULL : words[id];
        size_t room = 0;
        ssize_t size = file ? getline(&text, &room, file) : (ssize_t)strlen(text);
        if (size < 0) break;
        while (file && size && (text[size - 1] == '\n' || text[size - 1] == '\r')) text[--size] = 0;
        if (file && !size) continue; /* an empty line */
        prompts = realloc(prompts, (nprompts + 1) * sizeof *prompts);
        if (!prompts) die(1, "no memory for %d prompts", nprompts + 1);
        prompts[nprompts] = (Sequence){.text = text, .size = size, .id = id};
        encode(&prompts[nprompts++]);
    }
    if (!nprompts) die(2, "there is no prompt: give some behind the model, or --prompts FILE");
}
static void choose_policy(void) { /* searches if none is given, and refuses what does not fit */
    if (percent) policy.gbs += policy.gbs ? 0 : 32, policy.num_gpu_batches += !policy.num_gpu_batches;
    policy.gbs = min(policy.gbs, nprompts), policy.num_gpu_batches = min(policy.num_gpu_batches, nprompts);
    policy.delegated |= is_sparse() || !percent; /* as A.3 has it */
    batch = allocate(max(20, policy.num_gpu_batches), sizeof(Sequence *));
    if (!percent && !(search(longest, nprompts, true, show_lp) < INFINITY))
        die(2, "no policy fits; raise --gpu-mem or --cpu-mem, lower --max-tokens, or try --gpu-batch-size 1");
    place_all(false);
    const size_t own = percent ? 0 : arena[GPU].uncounted;
    if (own) fprintf(stderr, "mini: A.3 was given the GPU less %zu bytes of embeddings and workspace\n", own);
    for (int t = 0; t < NTIERS; t++)
        if ((double)arena[t].peak > hw.mem[t])
            die(2, "the %s tier needs %zu bytes, but has %.0f: change --percent or lower --gpu-batch-size",
                tier_name[t], arena[t].peak, hw.mem[t]);
}
static void print_policy(int s, bool printed) { /* --policy: Eq. 1 as printed */
    const double each = search(s, 1024, false, printed), n = generation_length;
    if (!(each < INFINITY)) die(2, "no placement fits; try smaller batches, fewer tokens, another machine");
    for (int v = 0; v < NVARS; v++) printf("%s %.12g\n", var_name[v], found.x[v]);
    printf("gbs %d\nnum_gpu_batches %d\n", policy.gbs, policy.num_gpu_batches);
    printf("T %.12g\nthroughput %.12g\n", (found.x[T_PRE] + found.x[T_GEN] * (n - 1)) * l, n / each);
}
static void open_tiers(void) { /* the disk is a file that has lost its name before it is used */
    char path[4200];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/mini-XXXXXX", tmp && *tmp ? tmp : "/var/tmp");
    const int fd = mkstemp(path);
    if (fd < 0 || unlink(path)) die(1, "%s: %s", path, strerror(errno));
    for (int t = 0; t < NTIERS; t++) {
        const size_t size = max(arena[t].peak, 1);
        const int full = t == DISK ? posix_fallocate(fd, 0, (off_t)size) : 0;
        if (full) die(1, "%s: no room for %zu bytes: %s", path, size, strerror(full));
        const int how = t == DISK ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
        arena[t].base = mmap(NULL, size, PROT_READ | PROT_WRITE, how, t == DISK ? fd : -1, 0);
        if (arena[t].base == MAP_FAILED) die(1, "no memory for %zu bytes of the %s tier", size, tier_name[t]);
    }
    worker = allocate(NKINDS + threads, sizeof *worker);
    for (struct Worker *w = worker; w < worker + NKINDS + threads - 1; w++) {
        pthread_t id;
        sem_init(&w->wake, 0, 0), sem_init(&w->done, 0, 0);
        if (pthread_create(&id, NULL, work, w)) die(1, "a thread could not be started; lower --threads");
    }
}
static void print_results(void) {
    long tokens = 0;
    for (const Sequence *q = prompts; q < prompts + nprompts; q++) {
        const int *token = q->token + q->s, n = q->generated - (token[q->generated - 1] == eos);
        size_t size;
        char *text = decode(token, n, &size);
        if (json) printf("{\"id\": %d, \"prompt\": \"", q->id);
        print_text(q->text, q->size, json), fputs(json ? "\", \"completion\": \"" : "", stdout);
        print_text(text, size, json), fputs(json ? "\", \"tokens\": [" : "", stdout);
        for (int e = 0; e < n && json; e++) printf(e ? ", %d" : "%d", token[e]);
        puts(json ? "]}" : ""), tokens += q->generated, free(text);
    }
    if (fflush(stdout) || ferror(stdout)) die(1, "standard output: %s", strerror(errno));
    for (int t = 0; t < NTIERS; t++)
        fprintf(stderr, "mini: %s: %zu bytes, %.4f of weights, %.4f of cache, %.4f of activations\n",
                tier_name[t], arena[t].peak, policy.share[WEIGHTS][t], policy.share[CACHE][t],
                policy.share[ACTIVATIONS][t]);
    for (int c = 0; c < NLINKS; c++)
        fprintf(stderr, "mini: %s: %zu bytes, %.3f s, %.1f%% of the time\n", link_name[c], link_of[c].bytes,
                link_of[c].seconds, 100 * link_of[c].seconds / generation_s);
    fprintf(stderr, "mini: %d prompt%s, %d x %d, %ld token%s, %.3f s, %.1f tokens/s\n", nprompts,
            nprompts > 1 ? "s" : "", policy.gbs, policy.num_gpu_batches, tokens, tokens > 1 ? "s" : "",
            generation_s, (double)tokens / generation_s);
}
int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN), signal(SIGBUS, mapping_failed); /* a full disk is an error, a cut file a line */
    threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const int words = read_flags(argv + 1, argc - 1);
    for (const struct Flag *f = flags; help && f->name; f++) printf("  %-20s %s\n", f->name, f->help);
    if (help) return 0;
    if (!words) die(2, "mini MODEL [PROMPT ...] [FLAGS]: name the directory of an OPT model; see --help");
    describe_machine(), read_config(argv[1]); /* all that A.3 needs */
    if (only_policy) return print_policy(prompt_len, show_lp), 0;
    open_checkpoint(argv[1]), read_tokenizer(argv[1]), read_prompts(argv + 2, words - 1);
    choose_policy(), open_tiers(), place_all(true);
    return print_results(), 0;
}
