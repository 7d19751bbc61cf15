/* mini.c: the whole of FlexGen in one file, to be kept open beside the paper.
 *
 *   Sheng et al., High-throughput Generative Inference of Large Language Models with a Single GPU, 2023
 *
 * It runs Hugging Face's OPT checkpoints that do not fit the GPU: weights, KV cache and activations rest on
 * three tiers, GPU, CPU and disk, in shares that a linear program finds, and while one batch computes in a
 * layer, what its neighbours need is on its way. There is no GPU here: the "GPU" is a piece of memory of a
 * given size, links are copies that can be slowed to a given rate, and the threads that compute stand for
 * both processors. All that the paper says about placement, order, overlap and approximation can be run and
 * watched on any computer.
 *
 *   cc -O3 -march=native mini.c -lm -lpthread -o mini
 *   ./mini models/opt-tiny "Once upon a time" --percent 0 50 0 100 0 100 --link ctog=1G
 *
 * Read it from top to bottom: the words of the paper; generate, which is Figure 4; compute, the model; the
 * moves between tiers; placement; links; 4-bit groups; the cost model, the simplex and the search; and last
 * what every such program needs, tokenizer, checkpoint and command line. (Section 4.2), (Figure 4), (A.3)
 * name places of the paper. i, j and k are always token, layer and GPU batch.
 *
 * The engine beside this file is the same with everything. What is left out here, and where it is there:
 *   sampling, --stop, journals and --resume  device/host.c, io/job.c      refilled slots, the diagonal
 * schedule  admission.c opt-350m, all of Unicode                 opt_model.c, io/unicode.c    CUDA, several
 * machines  flexgen.cu, device/pipeline.c pages of the KV cache                    batch.c, tier.c prices of
 * the LP, its proof  io/explain.c, lp.c Where the engine does better: it waits only for what an op needs
 * (device/depend.c), where synchronize() here waits for all; the CPU attends to batch k while the GPU
 * projects k + 1 and finishes k - 1 (schedule.c); its products, attention and packing are written in vectors
 * (device/simd.h); and its own cost model is fitted to what it does (policy.c). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

// ------------------------------------------------------------------------------------------------------------
// The words of the paper
// ------------------------------------------------------------------------------------------------------------

typedef uint16_t f16;
typedef enum { GPU, CPU, DISK, NTIERS } Tier;              /* section 4.1: three levels of memory */
typedef enum { WEIGHTS, CACHE, ACTIVATIONS, NKINDS } Kind; /* section 4.2: what is placed and moved */
typedef enum { CTOG, GTOC, DTOC, CTOD, NLINKS } Link;      /* A.3: between which two tiers, and which way */
typedef enum { F16, BF16, F32 } Type;                      /* of numbers; packed ones are bytes as F16 are */
static const char *const link_name[] = {"ctog", "gtoc", "dtoc", "ctod"}, *const tier_name[] = {"GPU", "CPU",
                                                                                               "disk"};

/* Section 3: l layers, hidden sizes h1 and h2, nh heads. */
typedef struct {
    int l, h1, h2, nh, vocab, positions, eos;
    bool final_norm;
} Model;

/* Section 4.3: a policy. share[WEIGHTS] is wg, wc, wd; share[CACHE] cg, cc, cd; share[ACTIVATIONS] hg, hc,
 * hd. */
typedef struct {
    double share[NKINDS][NTIERS];
    int gbs, num_gpu_batches;             /* bls = gbs num_gpu_batches */
    bool overlap, cpu_attention;          /* section 4.2: computation delegation */
    bool compress_weight, compress_cache; /* section 5: group-wise quantization */
    double sparsity;                      /* section 5: the share of V that is read; 1: all */
} Policy;

/* Bytes on a tier. */
typedef struct {
    Tier tier;
    Type type;
    uint8_t *at;
} Place;

/* A tensor of the checkpoint (rows, cols), and where it rests. Off the GPU it passes through a slot there. */
typedef struct {
    Place file, rest;
    int rows, cols;
    bool packed;          /* groups of 4 bits */
    size_t bytes, offset; /* on the GPU; in the slot */
} Weight;

/* Each with its bias behind it. w_Q w_K w_V w_O w_1 w_2 are section 3's matrices, the norms are OPT's. */
typedef enum {
    NORM_1 = 0,
    W_Q = 2,
    W_K = 4,
    W_V = 6,
    W_O = 8,
    NORM_2 = 10,
    W_1 = 12,
    W_2 = 14,
    NROLES = 16
} Role;
enum { TOKENS, POSITIONS, LAST_NORM, LAST_BIAS, HEAD, NGLOBALS };

/* A prompt of s tokens, and the tokens that follow it. A sequence has no padding: it knows its length. */
typedef struct {
    const char *text;
    int id, *token, s, generated;
    bool ended;             /* by </s> */
    int row;                /* the first of its rows in its batch's hidden state */
    Tier kv_tier, act_tier; /* where its cache and its activations rest */
    uint8_t *kv, *act;      /* there: (l, 2, room, kv_row) and (s, h1) */
    size_t staged[NTIERS];  /* its place in a staging slot of the cache */
    int room;               /* tokens of its cache */
} Sequence;

/* A GPU batch: the sequences first .. first + count - 1 of its block. */
typedef struct {
    int first, count, rows;
    bool kv_rests, act_rests; /* on the GPU, all of it: nothing has to move */
    uint8_t *act;             /* then the hidden state is computed there */
} Batch;

/* A tier is one piece of memory, given out from its beginning. The disk's is a file that has no name. */
typedef struct {
    uint8_t *base;
    size_t used, peak, capacity;
} Arena;

/* A link is a timeline: a copy waits until its link is free. rate 0: as fast as memory is. */
typedef struct {
    double rate, free_at, seconds;
    size_t bytes;
} LinkState;

typedef struct Run Run;
typedef void Move(Run *, int i, int j, int k);
typedef struct {
    Move *move;
    int i, j, k;
} Job;

/* Some of the tasks of a computation, for one thread of the team. */
typedef void Task(Run *, const void *, int thread, int first, int n);
typedef struct {
    Task *task;
    const void *arg;
    int n, busy, members; /* tasks; threads that have not ended theirs; threads so far */
    long round;
    pthread_cond_t begin, end;
} Team;

/* A thread that moves one kind of data, one thing after the other. */
typedef struct {
    Run *run;
    Job job[4]; /* a square asks for two at most */
    long posted, done;
} Channel;

struct Run {
    Model model;
    Policy policy;
    int n, K, nprompts, nseq, threads; /* tokens to generate; batches and sequences of this block */
    Sequence *prompts, *seq;           /* all; those of this block */
    Batch *batch;                      // (K)
    Arena tier[NTIERS];
    Weight (*layer)[NROLES], global[NGLOBALS];
    size_t *slab, slot_bytes; /* of layer j, what is not on the GPU; the largest of these */
    uint8_t *weight_slot[2], *stage[NTIERS][2];
    float *x[2];   /* hidden states that do not rest on the GPU pass here */
    size_t kv_row; /* bytes of a token's k */
    float *norm, *q, *k, *v, *att, *ffn, *logits, *scratch; /* workspace of a piece of a batch */
    size_t scratch_floats;                                  /* of each thread */
    uint8_t *fresh;                                         /* one token's k and v as the cache has them */
    float *query, *result; /* on the CPU: what delegation sends down and up */
    LinkState link[NLINKS];
    double seconds; /* of generation */
    Channel channel[NKINDS];
    Team team;
    pthread_mutex_t mutex;
    pthread_cond_t posted, finished;
};

__attribute__((noreturn, format(printf, 2, 3))) static void die(int status, const char *format, ...);
static void post(Run *r, Kind kind, Move *move, int i, int j, int k);
static void synchronize(Run *r);
static void travel(Run *r, Place to, Place from, size_t bytes);
static void parallel(Run *r, Task *task, const void *arg, int n, double work);
static void widen(float *to, const f16 *from, size_t n);
static void narrow(f16 *to, const float *from, size_t n);
static size_t group_bytes(int n);
static void pack_group(uint8_t *to, const float *x, int n);
static void unpack_group(float *x, const uint8_t *from, int n);
static double now(void);

static int imin(int a, int b) { return a < b ? a : b; }
static int imax(int a, int b) { return a > b ? a : b; }

// ------------------------------------------------------------------------------------------------------------
// Figure 4: the block schedule with overlapping
//
// Generation is a grid of squares (i, j, k). Batches k lie behind one another, so that the squares of one
// token and layer, which share the layer's weights, are computed together: down a column, then to the next
// (Figure 3b). While square (i, j, k) computes, what its neighbours need or have made is on its way:
//
//                 layer j                              layer j + 1
//            +-----------------+                   +-----------------+
//   k - 1    |    computed     |  store_activation |                 |
//            |                 |  store_cache      |                 |
//            +-----------------+                   +-----------------+
//   k        |   COMPUTES NOW  |                   |   load_weight   |   part k of K of the layer's weights
//            |                 |                   |                 |
//            +-----------------+                   +-----------------+
//   k + 1    |      next       |  load_cache       |                 |
//            |                 |  load_activation  |                 |
//            +-----------------+                   +-----------------+
//
// Above the first batch of a column is the last of the column before, below the last the first of the next
// column. Column l, behind the layers, is the head, which makes the next token.
// ------------------------------------------------------------------------------------------------------------

static void load_weight(Run *r, int i, int j, int k);
static void store_activation(Run *r, int i, int j, int k);
static void store_cache(Run *r, int i, int j, int k);
static void load_cache(Run *r, int i, int j, int k);
static void load_activation(Run *r, int i, int j, int k);
static void compute(Run *r, int i, int j, int k);
static bool begin_token(Run *r, int i);

/* One block: n tokens for each of its sequences, of which some may end before. */
static void generate(Run *r) {
    const int generation_length = r->n, num_layers = r->model.l, num_gpu_batches = r->K;
    for (int k = 0; k < num_gpu_batches; k++)
        load_weight(r, 0, 0, k); /* what no square before could have loaded */
    synchronize(r);
    for (int i = 0; i < generation_length && begin_token(r, i); i++)
        for (int j = 0; j <= num_layers; j++)
            for (int k = 0; k < num_gpu_batches; k++) {
                load_weight(r, i, j + 1, k);
                store_activation(r, i, j, k - 1);
                store_cache(r, i, j, k - 1);
                load_cache(r, i, j, k + 1);
                load_activation(r, i, j, k + 1);
                compute(r, i, j, k);
                synchronize(r);
            }
}

/* How many rows sequence q has in square (i, ., .): its whole prompt in prefill, one token in decoding
 * (section 3). */
static int rows_of(const Sequence *q, int i) { return q->ended ? 0 : i ? 1 : q->s; }

/* Between two tokens nothing moves: sequences that have ended leave their batches, the others close up.
 * False: none. */
static bool begin_token(Run *r, int i) {
    int rows = 0;
    for (int k = 0; k < r->K; k++) {
        Batch *b = &r->batch[k];
        b->rows = 0;
        for (Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++) {
            q->ended |= i && q->token[q->s + i - 1] == r->model.eos;
            q->row = b->rows, b->rows += rows_of(q, i);
        }
        rows += b->rows;
    }
    return rows > 0;
}

/* The square that k - 1 or k + 1 means beside the edges of its column. False: there is none. */
static bool at_square(const Run *r, int *i, int *j, int *k) {
    if (*k < 0) *k += r->K, --*j;
    if (*k >= r->K) *k -= r->K, ++*j;
    if (*j < 0) *j += r->model.l + 1, --*i;
    if (*j > r->model.l) *j -= r->model.l + 1, ++*i;
    return *i >= 0 && *i < r->n;
}

/* Two buffers take turns: the squares behind and ahead use one, while this square uses the other. */
static int buffer_of(const Run *r, int i, int j, int k) {
    return (int)(((long)i * (r->model.l + 1) + j) * r->K + k) % 2;
}

// ------------------------------------------------------------------------------------------------------------
// compute(i, j, k): OPT's layer (section 3)
//
//   x_Q = ln(x) w_Q + b_Q, x_K, x_V likewise      x_Out = softmax(x_Q x_K^T / sqrt(hd)) x_V w_O + b_O + x
//                                                 x = relu(ln(x_Out) w_1 + b_1) w_2 + b_2 + x_Out
//
// The paper leaves out the biases and the layernorms that the checkpoints have. Activations and sums are
// floats; weights and the cache are F16 or packed, and q, k and v are rounded to F16, as the cache keeps
// them.
// ------------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
enum { VL = 16 }; /* floats of a vector */
#else
enum { VL = 8 };
#endif
enum { MT = 4, NT = VL / 4, GROUP = 64, PIECE = 256, PAD = 32 }; /* MT x NT sums are held in registers */
typedef float V __attribute__((vector_size(4 * VL)));

/* y[a][b] = x[a] . w[b] for m rows of x and NT of w, over k. Inlined, so that m is a constant. */
__attribute__((always_inline)) static inline void dot_tile(float *y, size_t y_ld, const float *x, size_t x_ld,
                                                           const float *w, size_t w_ld, int k, const int m) {
    V sum[MT][NT] = {{{0}}}, a, b;
    int c = 0;
    for (; c + VL <= k; c += VL)
        for (int p = 0; p < NT; p++) {
            memcpy(&b, w + p * w_ld + c, sizeof b);
            for (int q = 0; q < m; q++) {
                memcpy(&a, x + q * x_ld + c, sizeof a);
                sum[q][p] += a * b;
            }
        }
    for (int q = 0; q < m; q++)
        for (int p = 0; p < NT; p++) {
            float lane[VL], total = 0;
            memcpy(lane, &sum[q][p], sizeof lane);
            for (int half = VL / 2; half; half /= 2)
                for (int e = 0; e < half; e++) lane[e] += lane[e + half];
            for (int e = c; e < k; e++) total += x[q * x_ld + e] * w[p * w_ld + e];
            y[q * y_ld + p] = lane[0] + total;
        }
}

/* The same for any number of rows. */
static void dot_rows(float *y, size_t y_ld, const float *x, size_t x_ld, int rows, const float *w,
                     size_t w_ld, int k) {
    int q = 0;
    for (; q + MT <= rows; q += MT) dot_tile(y + q * y_ld, y_ld, x + q * x_ld, x_ld, w, w_ld, k, MT);
    for (; q < rows; q++) dot_tile(y + q * y_ld, y_ld, x + q * x_ld, x_ld, w, w_ld, k, 1);
}

/* y = x w^T + b: y (rows, n), x (rows, k), w (n, k). */
typedef struct {
    float *y;
    const float *x;
    const uint8_t *w, *b; /* b, F16, may be absent */
    int rows, n, k;
    bool packed, relu, add; /* add: y is added to */
} Linear;

/* The outputs of groups first .. first + count - 1. Section 5: packed weights become F16 before they are
 * used. */
static void linear_task(Run *r, const void *arg, int thread, int first, int count) {
    const Linear *a = arg;
    const size_t k = a->k,
                 ld = k + PAD; /* lines of a power of two would all fall into the same places of the cache */
    float *tile = r->scratch + thread * r->scratch_floats, *y = tile + NT * k, column[GROUP];
    f16 *plain = (f16 *)(y + PIECE * NT), rounded[GROUP];
    for (int g = first; g < first + count; g++) {
        const int outputs = imin(GROUP, a->n - g * GROUP);
        for (size_t c = 0; c < k && a->packed; c++) {
            unpack_group(column, a->w + (g * k + c) * group_bytes(GROUP), outputs);
            narrow(rounded, column, GROUP);
            for (int o = 0; o < outputs; o++) plain[o * ld + c] = rounded[o];
        }
        for (int o = g * GROUP; o < g * GROUP + outputs; o += NT) {
            const int some = imin(NT, g * GROUP + outputs - o);
            for (int p = 0; p < some; p++)
                widen(tile + p * k,
                      a->packed ? plain + (o % GROUP + p) * ld : (const f16 *)a->w + (o + p) * k, k);
            for (int row = 0; row < a->rows; row += PIECE) {
                const int rows = imin(PIECE, a->rows - row);
                dot_rows(y, NT, a->x + row * k, k, rows, tile, k, a->k);
                for (int p = 0; p < some; p++) {
                    float bias = 0;
                    if (a->b) widen(&bias, (const f16 *)a->b + o + p, 1);
                    for (int q = 0; q < rows; q++) {
                        float *to = a->y + (size_t)(row + q) * a->n + o + p, sum = y[q * NT + p] + bias;
                        *to = a->add ? *to + sum : a->relu && sum < 0 ? 0 : sum;
                    }
                }
            }
        }
    }
}

static void linear(Run *r, Linear a) {
    parallel(r, linear_task, &a, (a.n + GROUP - 1) / GROUP, (double)a.rows * a.n * a.k);
}

/* y = (x - mean) / sqrt(var + 1e-5) * w + b, row by row. */
static void layernorm(Run *r, float *y, const float *x, const uint8_t *w, const uint8_t *b, int rows) {
    const int h1 = r->model.h1;
    float *gain = r->scratch, *bias = gain + h1;
    widen(gain, (const f16 *)w, h1), widen(bias, (const f16 *)b, h1);
    for (int row = 0; row < rows; row++, x += h1, y += h1) {
        float mean = 0, var = 0;
        for (int c = 0; c < h1; c++) mean += x[c];
        mean /= h1;
        for (int c = 0; c < h1; c++) var += (x[c] - mean) * (x[c] - mean);
        const float scale = 1 / sqrtf(var / h1 + 1e-5f);
        for (int c = 0; c < h1; c++) y[c] = (x[c] - mean) * scale * gain[c] + bias[c];
    }
}

/* Softmax of n scores. */
static void softmax(float *score, int n) {
    float most = score[0], sum = 0;
    for (int t = 1; t < n; t++) most = score[t] > most ? score[t] : most;
    for (int t = 0; t < n; t++) sum += score[t] = expf(score[t] - most);
    for (int t = 0; t < n; t++) score[t] /= sum;
}

/* o += p v */
static void add_weighed(float *restrict o, float p, const float *restrict v, int hd) {
    for (int d = 0; d < hd; d++) o[d] += p * v[d];
}

/* What attention is about: sequences first .. last - 1 of batch k in layer j. */
typedef struct {
    int i, j, k, first, last;
} Piece;

/* Prefill attends to what has just been computed: tasks are heads of sequences, token t sees tokens 0 .. t.
 */
static void attend_prefill(Run *r, const void *arg, int thread, int first, int n) {
    const Piece *p = arg;
    const int nh = r->model.nh, h1 = r->model.h1, hd = h1 / nh;
    float *score = r->scratch + thread * r->scratch_floats;
    for (int task = first; task < first + n; task++) {
        const Sequence *seq = &r->seq[p->first + task / nh];
        const size_t at = (size_t)(seq->row - r->seq[p->first].row) * h1 + task % nh * hd, ld = seq->s + NT;
        for (int t = 0; t < rows_of(seq, 0); t += MT) {
            const int rows = imin(MT, seq->s - t);
            for (int u = 0; u < t + rows; u += NT)
                dot_rows(score + u, ld, r->q + at + (size_t)t * h1, h1, rows, r->k + at + (size_t)u * h1, h1,
                         hd);
            for (int q = 0; q < rows; q++) {
                float *o = r->att + at + (size_t)(t + q) * h1;
                softmax(score + q * ld, t + q + 1);
                memset(o, 0, hd * sizeof *o);
                for (int u = 0; u <= t + q; u++)
                    add_weighed(o, score[q * ld + u], r->v + at + (size_t)u * h1, hd);
            }
        }
    }
}

static bool is_sparse(const Run *r) { return r->policy.sparsity < 1; }

/* Whether the CPU attends to a sequence's cache, which is not on the GPU (section 4.2, computation
 * delegation). */
static bool is_delegated(const Run *r, const Sequence *q, int i) {
    return i && r->policy.cpu_attention && q->kv_tier != GPU;
}

/* Where k (value 0) or v (value 1) of token t rests in layer j. */
static Place kv_home(const Run *r, const Sequence *q, int j, int t, int value) {
    return (Place){q->kv_tier, F16, q->kv + ((2 * (size_t)j + value) * q->room + t) * r->kv_row};
}

/* Where square (i, j, k) has it: at home if whoever attends can read it there, else in a staging slot. */
static Place kv_near(const Run *r, const Sequence *q, int i, int j, int k, int t, int value) {
    const Tier side = is_delegated(r, q, i) ? CPU : GPU;
    const size_t room =
        side == GPU && r->policy.cpu_attention ? q->s : q->room; /* then decoding is not for the GPU */
    if (q->kv_tier == side) return kv_home(r, q, j, t, value);
    return (Place){side, F16,
                   r->stage[side][buffer_of(r, i, j, k)] + q->staged[side] + (value * room + t) * r->kv_row};
}

/* One head as the cache has it, to and from floats. Section 5: the cache is grouped along the hidden
 * dimension. */
static void read_head(const Run *r, float *x, const uint8_t *from, int hd) {
    if (!r->policy.compress_cache) return widen(x, (const f16 *)from, hd);
    for (int d = 0; d < hd; from += group_bytes(imin(GROUP, hd - d)), d += GROUP)
        unpack_group(x + d, from, imin(GROUP, hd - d));
}
static void write_row(const Run *r, uint8_t *to, const float *x) {
    const int hd = r->model.h1 / r->model.nh;
    if (!r->policy.compress_cache) return narrow((f16 *)to, x, r->model.h1);
    for (int h = 0; h < r->model.nh; h++, x += hd)
        for (int d = 0; d < hd; to += group_bytes(imin(GROUP, hd - d)), d += GROUP)
            pack_group(to, x + d, imin(GROUP, hd - d));
}

static int descending(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Section 5, sparse attention: the weights of all but the Top-K of n tokens become 0, those of the others
 * stay what they are. K is 1 + the share of the past, rounded up; the newest token is always one of them, of
 * equal ones the earlier. */
static void keep_top(float *weight, float *sorted, int n, double share) {
    const int top = imin((int)ceil(share * (n - 1) * (1 - 1e-9)), n - 1);
    memcpy(sorted, weight, n * sizeof *sorted);
    qsort(sorted, n - 1, sizeof *sorted, descending);
    const float least = top ? sorted[top - 1] : INFINITY;
    int equal = top; /* how many of those that equal the least */
    for (int t = 0; t < top; t++) equal -= sorted[t] > least;
    for (int t = 0; t < n - 1; t++)
        if (!(weight[t] > least || (weight[t] == least && equal-- > 0))) weight[t] = -1;
}

/* Decoding attends to the cache where it is near: tasks are heads of sequences. */
static void attend_decode(Run *r, const void *arg, int thread, int first, int n) {
    const Piece *p = arg;
    const int nh = r->model.nh, h1 = r->model.h1, hd = h1 / nh;
    for (int task = first; task < first + n; task++) {
        const Sequence *seq = &r->seq[p->first + task / nh];
        const int len = seq->s + p->i, past = len - 1;
        const size_t head = task % nh * (r->kv_row / nh), at = (size_t)seq->row * h1 + task % nh * hd;
        const bool below = is_delegated(r, seq, p->i), fetch = below && is_sparse(r) && seq->kv_tier == DISK;
        const uint8_t *k = kv_near(r, seq, p->i, p->j, p->k, 0, 0).at + head;
        Place v = kv_near(r, seq, p->i, p->j, p->k, 0, 1), home = kv_home(r, seq, p->j, 0, 1);
        float *some = r->scratch + thread * r->scratch_floats, *score = some + NT * hd;
        float *o = (below ? r->result : r->att) + at;
        v.at += head, home.at += head;
        if (!rows_of(seq, p->i)) continue;
        for (int t = 0; t < len; t += NT) {
            for (int u = 0; u < imin(NT, len - t); u++)
                read_head(r, some + u * hd, k + (t + u) * r->kv_row, hd);
            dot_rows(score + t, 0, (below ? r->query : r->q) + at, 0, 1, some, hd, hd);
        }
        softmax(score, len);
        if (is_sparse(r)) keep_top(score, score + len, len, r->policy.sparsity);
        memset(o, 0, hd * sizeof *o);
        for (int t = 0; t < len; t++, v.at += r->kv_row, home.at += r->kv_row) {
            if (score[t] < 0) continue;
            if (fetch && t < past)
                travel(r, v, home, r->kv_row / nh); /* K was loaded whole, of V only this */
            read_head(r, some, v.at, hd);
            add_weighed(o, score[t], some, hd);
        }
    }
}

/* The new k and v of a sequence go where the square has its cache; below, packed as they are, by the link. */
static void append(Run *r, const Sequence *seq, const Piece *p, size_t row) {
    const int past = p->i ? seq->s + p->i - 1 : 0, h1 = r->model.h1;
    for (int value = 0; value < 2; value++)
        for (int t = 0; t < rows_of(seq, p->i); t++) {
            const Place near = kv_near(r, seq, p->i, p->j, p->k, past + t, value);
            const Place here = {GPU, F16, near.tier == GPU ? near.at : r->fresh};
            write_row(r, here.at, (value ? r->v : r->k) + (row + t) * h1);
            if (near.tier != GPU) travel(r, near, here, r->kv_row);
        }
}

/* Computation delegation (section 4.2): queries go down, and what the CPU has attended to comes up. */
static void exchange(Run *r, const Piece *p, bool down) {
    const size_t h1 = r->model.h1;
    for (const Sequence *seq = r->seq + p->first; seq < r->seq + p->last; seq++) {
        if (!rows_of(seq, p->i) || !is_delegated(r, seq, p->i)) continue;
        const Place q = {GPU, F16, (uint8_t *)(r->q + seq->row * h1)},
                    o = {GPU, F16, (uint8_t *)(r->att + seq->row * h1)};
        const Place query = {CPU, F16, (uint8_t *)(r->query + seq->row * h1)};
        const Place result = {CPU, F16, (uint8_t *)(r->result + seq->row * h1)};
        travel(r, down ? query : o, down ? q : result, h1 * sizeof(float));
    }
}

/* Layer j's tensor where it is while the layer computes. */
static const uint8_t *weight_at(const Run *r, const Piece *p, int role) {
    const Weight *w = &r->layer[p->j][role];
    return w->rest.tier == GPU ? w->rest.at
                               : r->weight_slot[((long)p->i * r->model.l + p->j) % 2] + w->offset;
}

/* y = x w + b of a matrix of the layer, and what else `how` says. */
static void product(Run *r, const Piece *p, int role, float *y, const float *x, int rows, Linear how) {
    const Weight *w = &r->layer[p->j][role];
    how.y = y, how.x = x, how.rows = rows, how.n = w->rows, how.k = w->cols, how.packed = w->packed;
    how.w = weight_at(r, p, role), how.b = weight_at(r, p, role + 1);
    linear(r, how);
}

/* x_Out = softmax(x_Q x_K^T / sqrt(hd)) x_V w_O + x, in place. */
static void attention(Run *r, const Piece *p, float *x, int rows) {
    const int h1 = r->model.h1, tasks = (p->last - p->first) * r->model.nh, row = r->seq[p->first].row;
    const size_t size = (size_t)rows * h1;
    float *const qkv[] = {r->q, r->k, r->v};
    layernorm(r, r->norm, x, weight_at(r, p, NORM_1), weight_at(r, p, NORM_1 + 1), rows);
    for (int m = 0; m < 3; m++) {
        product(r, p, W_Q + 2 * m, qkv[m], r->norm, rows, (Linear){0});
        narrow((f16 *)r->att, qkv[m], size), widen(qkv[m], (f16 *)r->att, size);
    }
    for (size_t e = 0; e < size; e++) r->q[e] /= sqrtf((float)h1 / r->model.nh);
    for (const Sequence *seq = r->seq + p->first; seq < r->seq + p->last; seq++)
        append(r, seq, p, seq->row - row);
    exchange(r, p, true);
    parallel(r, p->i ? attend_decode : attend_prefill, p, tasks, (double)rows * tasks * h1);
    exchange(r, p, false);
    product(r, p, W_O, x, r->att, rows, (Linear){.add = true});
}

/* x = relu(x_Out w_1) w_2 + x_Out, in place. */
static void mlp(Run *r, const Piece *p, float *x, int rows) {
    layernorm(r, r->norm, x, weight_at(r, p, NORM_2), weight_at(r, p, NORM_2 + 1), rows);
    product(r, p, W_1, r->ffn, r->norm, rows, (Linear){.relu = true});
    product(r, p, W_2, x, r->ffn, rows, (Linear){.add = true});
}

/* Before layer 0: x = token table[token] + position table[2 + position]. */
static void embed(Run *r, int i, const Batch *b, float *x) {
    const int h1 = r->model.h1;
    for (const Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++)
        for (int t = 0; t < rows_of(q, i); t++) {
            const size_t at = i ? q->s + i - 1 : t;
            float *row = x + (size_t)(q->row + t) * h1;
            widen(row, (f16 *)r->global[TOKENS].rest.at + (size_t)q->token[at] * h1, h1);
            widen(r->norm, (f16 *)r->global[POSITIONS].rest.at + (2 + at) * h1, h1);
            for (int c = 0; c < h1; c++) row[c] += r->norm[c];
        }
}

/* Behind the last layer: the logits of each sequence's last row, and the token with the largest. */
static void head(Run *r, int i, const Batch *b, float *x) {
    const size_t h1 = r->model.h1, vocab = r->model.vocab;
    int row = 0;
    for (const Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++)
        if (rows_of(q, i)) memcpy(r->att + row++ * h1, x + (q->row + rows_of(q, i) - 1) * h1, h1 * sizeof *x);
    if (r->model.final_norm)
        layernorm(r, r->att, r->att, r->global[LAST_NORM].rest.at, r->global[LAST_BIAS].rest.at, row);
    linear(r,
           (Linear){
               .y = r->logits, .x = r->att, .w = r->global[HEAD].rest.at, .rows = row, .n = vocab, .k = h1});
    row = 0;
    for (Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++) {
        const float *logit = r->logits + row * vocab;
        if (!rows_of(q, i)) continue;
        int best = 0;
        for (int t = 1; t < (int)vocab; t++) best = logit[t] > logit[best] ? t : best;
        q->token[q->s + q->generated++] = best;
        row++;
    }
}

static float *hidden_state(const Run *r, int i, int j, int k);

/* The sequences of a batch are taken some together, of PIECE rows where they are short, so that the workspace
 * stays small. */
static void compute(Run *r, int i, int j, int k) {
    const Batch *b = &r->batch[k];
    float *x = hidden_state(r, i, j, k);
    if (j == 0) embed(r, i, b, x);
    if (j == r->model.l) return head(r, i, b, x);
    for (Piece p = {i, j, k, b->first, b->first}; p.first < b->first + b->count; p.first = p.last) {
        int rows = 0;
        while (p.last < b->first + b->count && (!rows || rows + rows_of(&r->seq[p.last], i) <= PIECE || i))
            rows += rows_of(&r->seq[p.last++], i);
        float *part = x + (size_t)r->seq[p.first].row * r->model.h1;
        if (rows) attention(r, &p, part, rows), mlp(r, &p, part, rows);
    }
}

// ------------------------------------------------------------------------------------------------------------
// Figure 4's five moves (section 4.2, overlapping)
//
// Each says what must go where; a thread of its kind of data does it (post). Two things make two buffers of a
// kind enough. A kind's moves are done in the order in which they are asked for, and stores are asked for
// before loads: what the square behind has made leaves its buffer before what the square ahead needs enters
// it. And no move reads what is being computed: a load of the cache wants the past, whose length the square's
// token tells, and which has been stored squares ago.
// ------------------------------------------------------------------------------------------------------------

/* Part k of K of the layer's bytes that rest off the GPU. Slots alternate from layer to layer, also over the
 * end of a token, where l is odd. */
static void move_weight(Run *r, int i, int j, int k) {
    const size_t lines = r->slab[j] / 64, from = lines * k / r->K * 64, to = lines * (k + 1) / r->K * 64;
    uint8_t *slot = r->weight_slot[((long)i * r->model.l + j) % 2];
    for (const Weight *w = r->layer[j]; w < r->layer[j] + NROLES; w++) {
        const size_t begin = w->offset > from ? w->offset : from;
        const size_t end = w->offset + w->bytes < to ? w->offset + w->bytes : to;
        if (w->rest.tier == GPU || begin >= end) continue;
        Place source = w->rest;
        source.at += (begin - w->offset) * (source.type == F32 ? 2 : 1);
        travel(r, (Place){GPU, F16, slot + begin}, source, end - begin);
    }
}

static void load_weight(Run *r, int i, int j, int k) {
    if (j > r->model.l) j = 0, i++;
    if (i < r->n && j < r->model.l && r->slab[j]) post(r, WEIGHTS, move_weight, i, j, k);
}

/* Where square (i, j, k) computes: at home, if that is the GPU; alone, a batch stays in one place; else the
 * squares' buffers take turns. */
static float *hidden_state(const Run *r, int i, int j, int k) {
    if (r->batch[k].act_rests) return (float *)r->batch[k].act;
    return r->x[buffer_of(r, i, j, k)];
}

/* The hidden state between its home and the square that has computed it (down) or will. */
static void move_activation(Run *r, int i, int j, int k, bool down) {
    const Batch *b = &r->batch[k];
    const size_t row = r->model.h1 * sizeof(float);
    for (const Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++) {
        const Place home = {q->act_tier, F16, q->act};
        const Place here = {GPU, F16, (uint8_t *)hidden_state(r, i, j, k) + q->row * row};
        travel(r, down ? home : here, down ? here : home, rows_of(q, i) * row);
    }
}
static void activation_down(Run *r, int i, int j, int k) { move_activation(r, i, j, k, true); }
static void activation_up(Run *r, int i, int j, int k) { move_activation(r, i, j, k, false); }

/* Nothing is left to store behind the head; before layer 0 nothing is there to load. */
static void store_activation(Run *r, int i, int j, int k) {
    if (at_square(r, &i, &j, &k) && j < r->model.l && !r->batch[k].act_rests)
        post(r, ACTIVATIONS, activation_down, i, j, k);
}
static void load_activation(Run *r, int i, int j, int k) {
    if (at_square(r, &i, &j, &k) && j > 0 && !r->batch[k].act_rests)
        post(r, ACTIVATIONS, activation_up, i, j, k);
}

/* The new k and v go home: s tokens behind the prefill, then one. Where the CPU attended at home they are
 * there. */
static void cache_down(Run *r, int i, int j, int k) {
    const Batch *b = &r->batch[k];
    for (const Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++)
        for (int value = 0, t = i ? q->s + i - 1 : 0; value < 2; value++) {
            const Place home = kv_home(r, q, j, t, value), near = kv_near(r, q, i, j, k, t, value);
            if (near.at != home.at) travel(r, home, near, rows_of(q, i) * r->kv_row);
        }
}

/* The past comes near; of sparse attention, which the CPU does, only k. */
static void cache_up(Run *r, int i, int j, int k) {
    const Batch *b = &r->batch[k];
    for (const Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++)
        for (int value = 0; value < (is_sparse(r) ? 1 : 2) && !q->ended; value++) {
            const Place home = kv_home(r, q, j, 0, value), near = kv_near(r, q, i, j, k, 0, value);
            if (near.at != home.at) travel(r, near, home, (q->s + i - 1) * r->kv_row);
        }
}

static void store_cache(Run *r, int i, int j, int k) {
    if (at_square(r, &i, &j, &k) && j < r->model.l && !r->batch[k].kv_rests)
        post(r, CACHE, cache_down, i, j, k);
}
static void load_cache(Run *r, int i, int j, int k) {
    if (at_square(r, &i, &j, &k) && i > 0 && j < r->model.l && !r->batch[k].kv_rests)
        post(r, CACHE, cache_up, i, j, k);
}

// ------------------------------------------------------------------------------------------------------------
// Threads: one a kind of data, and a team that computes
// ------------------------------------------------------------------------------------------------------------

static void *channel_thread(void *arg) {
    Channel *c = arg;
    Run *r = c->run;
    pthread_mutex_lock(&r->mutex);
    for (;;) {
        while (c->done == c->posted) pthread_cond_wait(&r->posted, &r->mutex);
        const Job job = c->job[c->done % 4];
        pthread_mutex_unlock(&r->mutex);
        job.move(r, job.i, job.j, job.k);
        pthread_mutex_lock(&r->mutex);
        c->done++;
        pthread_cond_signal(&r->finished);
    }
    return NULL;
}

/* Without overlapping the move is made at once. That is the only difference. */
static void post(Run *r, Kind kind, Move *move, int i, int j, int k) {
    Channel *c = &r->channel[kind];
    if (!r->policy.overlap) return move(r, i, j, k);
    pthread_mutex_lock(&r->mutex);
    c->job[c->posted++ % 4] = (Job){move, i, j, k};
    pthread_cond_broadcast(&r->posted);
    pthread_mutex_unlock(&r->mutex);
}

/* Figure 4: synchronize all devices. */
static void synchronize(Run *r) {
    pthread_mutex_lock(&r->mutex);
    for (int c = 0; c < NKINDS; c++)
        while (r->channel[c].done < r->channel[c].posted) pthread_cond_wait(&r->finished, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
}

/* Thread 0 is the one that computes. */
static void do_share(Run *r, int thread) {
    const Team *t = &r->team;
    const int first = (int)((long)t->n * thread / r->threads),
              end = (int)((long)t->n * (thread + 1) / r->threads);
    if (first < end) t->task(r, t->arg, thread, first, end - first);
}

static void *team_thread(void *arg) {
    Run *r = arg;
    pthread_mutex_lock(&r->mutex);
    const int thread = ++r->team.members;
    for (long round = 0;;) {
        while (r->team.round == round) pthread_cond_wait(&r->team.begin, &r->mutex);
        round = r->team.round;
        pthread_mutex_unlock(&r->mutex);
        do_share(r, thread);
        pthread_mutex_lock(&r->mutex);
        if (--r->team.busy == 0) pthread_cond_signal(&r->team.end);
    }
    return NULL;
}

/* Does tasks 0 .. n - 1, each thread its share. Little work, in multiplications, is not worth waking anyone.
 */
static void parallel(Run *r, Task *task, const void *arg, int n, double work) {
    if (work < 3e5 || r->threads == 1) return task(r, arg, 0, 0, n);
    pthread_mutex_lock(&r->mutex);
    r->team.task = task, r->team.arg = arg, r->team.n = n, r->team.busy = r->threads - 1, r->team.round++;
    pthread_cond_broadcast(&r->team.begin);
    pthread_mutex_unlock(&r->mutex);
    do_share(r, 0);
    pthread_mutex_lock(&r->mutex);
    while (r->team.busy) pthread_cond_wait(&r->team.end, &r->mutex);
    pthread_mutex_unlock(&r->mutex);
}

static void start_thread(void *(*thread)(void *), void *arg) {
    pthread_t id;
    if (pthread_create(&id, NULL, thread, arg)) die(1, "no thread could be started: %s", strerror(errno));
    pthread_detach(id);
}

static void start_threads(Run *r) {
    pthread_mutex_init(&r->mutex, NULL);
    pthread_cond_init(&r->posted, NULL), pthread_cond_init(&r->finished, NULL);
    pthread_cond_init(&r->team.begin, NULL), pthread_cond_init(&r->team.end, NULL);
    for (int t = 1; t < r->threads; t++) start_thread(team_thread, r);
    for (int c = 0; c < NKINDS; c++) r->channel[c].run = r, start_thread(channel_thread, &r->channel[c]);
}

// ------------------------------------------------------------------------------------------------------------
// Tensor placement (section 4.2): six percentages, and the bytes of each tier
//
// One rule places everything. Whole things come one after the other, and the GPU takes one if its share of
// all that have come has room for it; else the CPU does, if the share of both has; else the disk. So a tier
// above never has more than its share, and after many things each has what was asked, to the size of one.
// Weights are placed by tensors, over all layers in a row, so that each layer has its part on every tier
// (layer granularity); cache and activations by sequences.
// ------------------------------------------------------------------------------------------------------------

/* What has come so far, and how much of it each tier has. */
typedef struct {
    double all, on[NTIERS];
} Dealt;

static Tier place(Dealt *d, const double share[NTIERS], double size) {
    double above = 0, room = 0;
    d->all += size;
    for (int t = GPU; t < NTIERS; t++) {
        above += d->on[t], room += share[t] * d->all;
        if (t < DISK && above + size > room * (1 + 1e-9)) continue;
        d->on[t] += size;
        return (Tier)t;
    }
    return DISK;
}

/* The next bytes of a tier. Before the tiers are there this only counts, so that all is known before anything
 * is done. */
static uint8_t *take(Run *r, Tier tier, size_t bytes) {
    Arena *a = &r->tier[tier];
    uint8_t *at = (uint8_t *)((uintptr_t)a->base + a->used);
    a->used += (bytes + 63) / 64 * 64;
    if (a->used > a->peak) a->peak = a->used;
    return at;
}
static float *take_floats(Run *r, Tier tier, size_t n) {
    return (float *)(void *)take(r, tier, n * sizeof(float));
}

static bool is_matrix(int role) { return role % 2 == 0 && role != NORM_1 && role != NORM_2; }

/* Gives a tensor its home. The disk's share stays in the checkpoint, if it need not be packed. */
static void settle(Run *r, Weight *w, Tier tier) {
    const size_t groups = (size_t)(w->rows + GROUP - 1) / GROUP * w->cols;
    w->bytes = w->packed ? groups * group_bytes(GROUP) : (size_t)w->rows * w->cols * sizeof(f16);
    w->rest = w->file;
    if (tier != DISK || w->packed) w->rest = (Place){tier, F16, take(r, tier, w->bytes)};
}

/* Embeddings, final norm and head are on the GPU: the percentages are about the layers. */
static void place_weights(Run *r) {
    Dealt dealt = {0};
    r->slot_bytes = 0;
    for (int g = 0; g < NGLOBALS; g++)
        if (g != HEAD || r->global[HEAD].file.at != r->global[TOKENS].file.at) settle(r, &r->global[g], GPU);
    if (r->global[HEAD].file.at == r->global[TOKENS].file.at) r->global[HEAD].rest = r->global[TOKENS].rest;
    for (int j = 0; j < r->model.l; j++) {
        r->slab[j] = 0;
        for (int role = 0; role < NROLES; role += 2) { /* a tensor and its bias */
            Weight *w = &r->layer[j][role];
            const Tier tier = place(&dealt, r->policy.share[WEIGHTS], ((double)w->rows + 1) * w->cols);
            for (int part = 0; part < 2; part++, w++) {
                w->packed = r->policy.compress_weight && is_matrix(role + part);
                settle(r, w, tier);
                if (tier == GPU) continue;
                w->offset = r->slab[j], r->slab[j] += (w->bytes + 63) / 64 * 64;
            }
        }
        if (r->slab[j] > r->slot_bytes) r->slot_bytes = r->slab[j];
    }
    for (int slot = 0; slot < 2; slot++) r->weight_slot[slot] = take(r, GPU, r->slot_bytes);
}

/* A batch's cache and activations, and how much of the staging slots it needs. */
static void place_batch(Run *r, Batch *b, Dealt dealt[NKINDS], size_t staged[NTIERS]) {
    const size_t row = r->model.h1 * sizeof(float);
    const bool below = r->policy.cpu_attention;
    size_t need[NTIERS] = {0};
    b->kv_rests = true, b->rows = 0;
    b->act_rests = true;
    for (Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++) {
        q->room = q->s + r->n - 1;
        q->kv_tier = place(&dealt[CACHE], r->policy.share[CACHE], q->room);
        q->act_tier = place(&dealt[ACTIVATIONS], r->policy.share[ACTIVATIONS], q->s);
        q->kv = take(r, q->kv_tier, 2 * (size_t)r->model.l * q->room * r->kv_row);
        b->kv_rests &= q->kv_tier == GPU,
            b->act_rests &= q->act_tier == GPU || r->K == 1; /* alone, a batch computes in one place */
        b->rows += q->s;
        q->staged[GPU] = need[GPU], q->staged[CPU] = need[CPU];
        if (q->kv_tier != GPU) need[GPU] += 2 * r->kv_row * (below ? q->s : q->room);
        if (q->kv_tier == DISK && below) need[CPU] += 2 * r->kv_row * q->room;
    }
    if (b->act_rests) b->act = take(r, GPU, b->rows * row);
    for (Sequence *q = r->seq + b->first; q < r->seq + b->first + b->count; q++)
        if (!b->act_rests) q->act = take(r, q->act_tier, q->s * row);
    for (int t = GPU; t <= CPU; t++) staged[t] = need[t] > staged[t] ? need[t] : staged[t];
}

/* Everything of one block: its sequences, the buffers, the workspace of a piece. */
static void place_block(Run *r, int first, int count) {
    const Model *m = &r->model;
    Dealt dealt[NKINDS] = {{0}};
    size_t staged[NTIERS] = {0};
    int longest = 0, rows = 0, piece = imax(PIECE, r->policy.gbs);
    r->seq = r->prompts + first, r->nseq = count, r->K = (count + r->policy.gbs - 1) / r->policy.gbs;
    for (int k = 0; k < r->K; k++) {
        Batch *b = &r->batch[k];
        *b = (Batch){.first = k * r->policy.gbs, .count = imin(r->policy.gbs, count - k * r->policy.gbs)};
        place_batch(r, b, dealt, staged);
        rows = imax(rows, b->act_rests ? 0 : b->rows);
    }
    for (int q = 0; q < count; q++) longest = imax(longest, r->seq[q].room);
    piece = imax(piece, longest);
    for (int slot = 0; slot < 2; slot++) {
        for (int t = GPU; t <= CPU; t++) r->stage[t][slot] = take(r, (Tier)t, staged[t]);
        r->x[slot] = take_floats(r, GPU, (size_t)rows * m->h1);
    }
    float **const work[] = {&r->norm, &r->q, &r->k, &r->v, &r->att};
    for (int w = 0; w < 5; w++) *work[w] = take_floats(r, GPU, (size_t)(piece + PAD) * m->h1);
    r->ffn = take_floats(r, GPU, (size_t)piece * m->h2);
    r->logits = take_floats(r, GPU, (size_t)imin(r->policy.gbs, count) * m->vocab);
    r->fresh = take(r, GPU, r->kv_row);
    for (int to = 0; to < 2 && r->policy.cpu_attention; to++)
        *(to ? &r->query : &r->result) = take_floats(r, CPU, (size_t)imin(r->policy.gbs, count) * m->h1);
    const size_t widest = imax(imax(m->h1, m->h2), PIECE),
                 unpacked = r->policy.compress_weight ? GROUP / 2 : 0;
    r->scratch_floats =
        NT * widest + PIECE * NT + unpacked * (widest + PAD) + (size_t)MT * (longest + NT) + 64;
    r->scratch = take_floats(r, GPU, r->scratch_floats * r->threads);
}

static void fill_weight(Weight *w);

/* Places everything, block by block, each in the place of the one before, and with each does what is to be
 * done then. NULL: nothing, since only how much it takes is asked. */
static void place_all(Run *r, void (*then)(Run *)) {
    size_t mark[NTIERS];
    for (int t = 0; t < NTIERS; t++) r->tier[t].used = r->tier[t].peak = 0;
    r->kv_row = r->model.h1 * sizeof(f16);
    if (r->policy.compress_cache) {
        const int hd = r->model.h1 / r->model.nh, rest = hd % GROUP;
        r->kv_row = r->model.nh * (hd / GROUP * group_bytes(GROUP) + (rest ? group_bytes(rest) : 0));
    }
    place_weights(r);
    for (int g = 0; g < NGLOBALS && then; g++) fill_weight(&r->global[g]);
    for (int e = 0; e < r->model.l * NROLES && then; e++) fill_weight(&r->layer[e / NROLES][e % NROLES]);
    for (int t = 0; t < NTIERS; t++) mark[t] = r->tier[t].used;
    const int bls = r->policy.gbs * r->policy.num_gpu_batches;
    for (int first = 0; first < r->nprompts; first += bls) {
        for (int t = 0; t < NTIERS; t++) r->tier[t].used = mark[t];
        place_block(r, first, imin(bls, r->nprompts - first));
        if (then) then(r);
    }
}

// ------------------------------------------------------------------------------------------------------------
// Links (A.3's ctog, gtoc, dtoc, ctod)
// ------------------------------------------------------------------------------------------------------------

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The numbers of a checkpoint as F16; bytes of these. They may lie at any address. */
static void copy_as_f16(uint8_t *to, const uint8_t *from, Type type, size_t bytes) {
    if (type == F16) memcpy(to, from, bytes);
    for (size_t e = 0; e < bytes / 2 && type != F16; e++) {
        uint8_t raw[4] = {0};
        float x;
        memcpy(raw + (type == BF16 ? 2 : 0), from + e * (type == BF16 ? 2 : 4), type == BF16 ? 2 : 4);
        memcpy(&x, raw, sizeof x);
        f16 y;
        narrow(&y, &x, 1);
        memcpy(to + 2 * e, &y, sizeof y);
    }
}

/* Takes so many bytes from one place to another, over one link or two: from disk to GPU they pass the CPU,
 * and the slower link sets the pace. Each link is taken from when it is free for as long as its rate says,
 * then this thread sleeps until the bytes have arrived; debts below a tenth of a millisecond are left to the
 * next copy. */
static void travel(Run *r, Place to, Place from, size_t bytes) {
    const double start = now(), TOO_SHORT = 1e-4;
    const bool up = to.tier < from.tier;
    double arrival = start;
    if (!bytes) return;
    copy_as_f16(to.at, from.at, from.type, bytes);
    const double copied = now();
    pthread_mutex_lock(&r->mutex);
    for (int t = imin(to.tier, from.tier); t < imax(to.tier, from.tier); t++) {
        LinkState *link = &r->link[t == GPU ? (up ? CTOG : GTOC) : (up ? DTOC : CTOD)];
        const double seconds = fmax(link->rate ? bytes / link->rate : 0, copied - start);
        link->free_at = fmax(link->free_at, start) + seconds;
        arrival = fmax(arrival, link->free_at);
        link->bytes += bytes, link->seconds += seconds;
    }
    pthread_mutex_unlock(&r->mutex);
    if (arrival < now() + TOO_SHORT) return;
    const struct timespec until = {(time_t)arrival, (long)((arrival - floor(arrival)) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) continue;
}

// ------------------------------------------------------------------------------------------------------------
// F16, and groups of 4 bits (section 5, group-wise quantization)
// ------------------------------------------------------------------------------------------------------------

/* F16 to float: the exponent's bias goes from 15 to 127; what is below F16's smallest normal number is 2^-14
 * and some mantissa, less 2^-14. */
static void widen(float *to, const f16 *from, size_t n) {
    size_t e = 0;
#ifdef __F16C__
    for (; e + 8 <= n; e += 8)
        _mm256_storeu_ps(to + e, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + e))));
#endif
    for (; e < n; e++) {
        const uint32_t sign = (from[e] & 0x8000u) << 16, low = (from[e] & 0x7fffu) << 13;
        const uint32_t bits = low < 1 << 23     ? low + (113 << 23)
                              : low >= 31 << 23 ? low + (224u << 23)
                                                : low + (112 << 23);
        float x;
        memcpy(&x, &bits, sizeof x);
        x = low < 1 << 23 ? x - 0x1p-14f : x;
        to[e] = sign ? -x : x;
    }
}

/* Float to F16, to the nearest, of two the even one: the sum with 2^13 ulps' half rounds in place. */
static void narrow(f16 *to, const float *from, size_t n) {
    size_t e = 0;
#ifdef __F16C__
    for (; e + 8 <= n; e += 8)
        _mm_storeu_si128((void *)(to + e), _mm256_cvtps_ph(_mm256_loadu_ps(from + e), 0));
#endif
    for (; e < n; e++) {
        uint32_t bits, half = 0x7e00;                    /* NaN */
        const float x = fabsf(from[e]), small = x + .5f; /* the last bit of .5 is F16's smallest number */
        memcpy(&bits, x < 0x1p-14f ? &small : &x, sizeof bits);
        if (x < 0x1p-14f)
            half = bits - 0x3f000000;
        else if (x >= 65520)
            half = 0x7c00; /* infinity */
        else if (x == x)
            half = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
        to[e] = (f16)(half | (signbit(from[e]) ? 0x8000 : 0));
    }
}

static float f16_float(f16 h) {
    float x;
    return widen(&x, &h, 1), x;
}
static f16 float_f16(float x) {
    f16 h;
    return narrow(&h, &x, 1), h;
}

/* Bytes of a group: min and scale as F16, then the codes. Number e's lies in byte e / 32 * 16 + e % 16, in
 * the low half where e % 32 < 16. Whole fours of bytes. */
static size_t group_bytes(int n) { return 4 + (n / 32 * 16 + (size_t)imin(n % 32, 16) + 3) / 4 * 4; }

/* x_quant = round((x - min) / (max - min) * (2^b - 1)), b = 4. The scale is rounded up, so that 15 reaches
 * max, but not beyond F16's range; of equal numbers it is 0; a group with a number that is not finite is NaN
 * altogether. */
static void pack_group(uint8_t *to, const float *x, int n) {
    float min = INFINITY, max = -INFINITY, poison = 0;
    for (int e = 0; e < n; e++) min = fminf(min, x[e]), max = fmaxf(max, x[e]), poison += x[e] - x[e];
    min += 0, max += 0; /* -0 becomes 0 */
    f16 head[2] = {float_f16(min), float_f16((max - min) / 15)};
    if (f16_float(head[1]) < (max - min) / 15) head[1]++;
    if (min + 15 * f16_float(head[1]) >= 65520) head[1]--;
    if (poison != 0) head[0] = 0x7e00, head[1] = 0;
    const float inverse = head[1] ? 1 / f16_float(head[1]) : 0;
    memset(to, 0, group_bytes(n));
    memcpy(to, head, sizeof head);
    for (int e = 0; e < n && inverse; e++)
        to[4 + e / 32 * 16 + e % 16] |=
            (uint8_t)((unsigned)rintf((x[e] - min) * inverse) << (e % 32 / 16 * 4));
}

/* x = min + scale x_quant, as F16 (section 5: "converted back to FP16 before doing computation"). */
static void unpack_group(float *x, const uint8_t *from, int n) {
    f16 head[2], rounded[GROUP];
    memcpy(head, from, sizeof head);
    const float min = f16_float(head[0]), scale = f16_float(head[1]);
    for (int e = 0; e < n; e += 16) {
        const uint8_t *codes = from + 4 + e / 32 * 16;
        for (int u = 0; u < imin(16, n - e); u++)
            x[e + u] = min + scale * (float)(codes[u] >> (e % 32 / 4) & 15);
    }
    narrow(rounded, x, n), widen(x, rounded, n);
}

/* Brings a tensor of the checkpoint to where it rests. A matrix (rows, cols) is packed along its rows, the
 * output channels: the group of rows g GROUP .. of column c is number g cols + c. */
static void fill_weight(Weight *w) {
    if (w->rest.at == w->file.at || !w->bytes) return;
    if (!w->packed) return copy_as_f16(w->rest.at, w->file.at, w->file.type, w->bytes);
    const size_t cols = w->cols, size = w->file.type == F32 ? 4 : 2;
    f16 *plain = calloc(GROUP * cols, sizeof *plain);
    if (!plain) die(1, "no memory for %zu bytes", GROUP * cols * sizeof *plain);
    float column[GROUP];
    for (int g = 0; g * GROUP < w->rows; g++) {
        const int rows = imin(GROUP, w->rows - g * GROUP);
        copy_as_f16((uint8_t *)plain, w->file.at + g * GROUP * cols * size, w->file.type,
                    rows * cols * sizeof *plain);
        for (size_t c = 0; c < cols; c++) {
            for (int o = 0; o < rows; o++) column[o] = f16_float(plain[o * cols + c]);
            pack_group(w->rest.at + (g * cols + c) * group_bytes(GROUP), column, rows);
        }
    }
    free(plain);
}

// ------------------------------------------------------------------------------------------------------------
// A.3: the cost model, a linear program in the nine fractions and the seconds of a layer (section 4.3, Eq. 1)
//
// It is written down as printed, also where it is no machine's behaviour: the CPU attends to all of the cache
// that is not on the GPU, comp^g adds two processors that could work at once, a prompt's activations stay in
// gpu_w^g, embeddings take no memory. The disk's fractions are wn, cn, hn there and wd, cd, hd here, as in
// section 4.2.
// ------------------------------------------------------------------------------------------------------------

enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, T_PRE, T_GEN, NVARS, NROWS = 31 };
static const char *const var_name[] = {"wg", "wc", "wd", "cg",    "cc",   "cd",
                                       "hg", "hc", "hd", "T_pre", "T_gen"};

/* Tables 7 and 8: a machine of a few numbers. A rate has two values, for generation [0] and for prefill [1].
 */
enum { MM = NLINKS, BMM, CPU_FLOPS, NRATES };
typedef struct {
    double mem[NTIERS], rate[NRATES][2];
} Machine;

/* a x <= b */
typedef struct {
    const char *name;
    double a[NVARS], b;
} Row;

/* Minimize c x, x >= 0. */
typedef struct {
    int m;
    double c[NVARS];
    Row row[NROWS];
} Lp;

static double *row(Lp *lp, const char *name, double b) {
    lp->row[lp->m] = (Row){.name = name, .b = b};
    return lp->row[lp->m++].a;
}

/* T_pre = max(ctog^p, gtoc^p, dtoc^p, ctod^p, comp^p), and T_gen the same with ^g: a row for each, its
 * seconds <= T. */
static void latency_rows(Lp *lp, const Machine *hw, const Model *m, double s, double n, double bls) {
    const double h1 = m->h1, h2 = m->h2, weights = 8 * h1 * h1 + 4 * h1 * h2;
    const double hidden_p = 2 * s * h1 * bls, cache_p = 4 * (s + 1) * h1 * bls;
    const double hidden_g = 2 * h1 * bls, new_g = 4 * bls * h1, cache_g = 4 * bls * (s + n / 2) * h1;
    const double linear_p = bls * (8 * s * h1 * h1 + 4 * s * h1 * h2), att_p = 4 * bls * s * s * h1;
    const double linear_g = bls * (8 * h1 * h1 + 4 * h1 * h2), att_g = 4 * bls * (s + n / 2) * h1;
    const struct {
        const char *name;
        int prefill, rate;
        double a[NVARS], one; /* bytes; seconds of computing */
    } term[] = {{"ctog^p", 1, CTOG, {[WC] = weights, [WD] = weights, [HC] = hidden_p, [HD] = hidden_p}, 0},
                {"gtoc^p", 1, GTOC, {[CC] = cache_p, [CD] = cache_p, [HC] = hidden_p, [HD] = hidden_p}, 0},
                {"dtoc^p", 1, DTOC, {[WD] = weights, [HD] = hidden_p}, 0},
                {"ctod^p", 1, CTOD, {[CD] = cache_p, [HD] = hidden_p}, 0},
                {"comp^p", 1, -1, {0}, linear_p / hw->rate[MM][1] + att_p / hw->rate[BMM][1]},
                {"ctog^g", 0, CTOG, {[WC] = weights, [WD] = weights, [HC] = hidden_g, [HD] = hidden_g}, 0},
                {"gtoc^g", 0, GTOC, {[HC] = hidden_g, [HD] = hidden_g}, 0},
                {"dtoc^g", 0, DTOC, {[CD] = cache_g, [WD] = weights, [HD] = hidden_g}, 0},
                {"ctod^g", 0, CTOD, {[CD] = new_g, [HD] = hidden_g}, 0},
                {"comp^g",
                 0,
                 -1,
                 {[CG] = att_g / hw->rate[BMM][0],
                  [CC] = att_g / hw->rate[CPU_FLOPS][0],
                  [CD] = att_g / hw->rate[CPU_FLOPS][0]},
                 linear_g / hw->rate[MM][0]}};
    for (size_t t = 0; t < sizeof term / sizeof *term; t++) {
        double *a = row(lp, term[t].name, -term[t].one);
        for (int v = 0; v < NVARS; v++)
            a[v] = term[t].a[v] / (term[t].rate < 0 ? 1 : hw->rate[term[t].rate][term[t].prefill]);
        a[term[t].prefill ? T_PRE : T_GEN] = -1;
    }
}

/* gpu_peak = gpu_home + gpu_w < gmem, where gpu_w has the largest of six terms: a row for each. In prefill q
 * = s new tokens of a sequence attend to u = s, in generation q = 1 to u = s + n. */
static void gpu_rows(Lp *lp, const Machine *hw, const Model *m, double s, double n, double gbs, double bls,
                     bool prefill) {
    const double h1 = m->h1, h2 = m->h2, nh = m->nh, l = m->l, weights = 8 * h1 * h1 + 4 * h1 * h2;
    const double q = prefill ? s : 1, u = prefill ? s : s + n;
    const struct {
        const char *name[2];
        double work, times_cg;
    } term[] = {{{"gpu_peak^g with kv^g", "gpu_peak^p with qkv^p"}, gbs * (2 * q * h1 + 3 * (2 * q * h1)), 0},
                {{"gpu_peak^g with att_1^g", "gpu_peak^p with att_1^p"},
                 0,
                 gbs * (2 * q * h1 + 2 * u * h1 + 2 * nh * q * u)},
                {{"gpu_peak^g with att_2^g", "gpu_peak^p with att_2^p"},
                 0,
                 gbs * (2 * nh * q * u + 2 * u * h1 + 2 * q * h1)},
                {{"gpu_peak^g with embed^g", "gpu_peak^p with embed^p"}, gbs * (2 * q * h1 + 2 * q * h1), 0},
                {{"gpu_peak^g with mlp_1^g", "gpu_peak^p with mlp_1^p"}, 2 * gbs * q * (h1 + h2), 0},
                {{"gpu_peak^g with mlp_2^g", "gpu_peak^p with mlp_2^p"}, 2 * gbs * q * (h2 + h1), 0}};
    for (size_t t = 0; t < sizeof term / sizeof *term; t++) {
        const double fixed = 2 * weights + 2 * s * h1 * gbs + term[t].work; /* of gpu_w: 2 (1 - wg), 1 - hg */
        double *a = row(lp, term[t].name[prefill], hw->mem[GPU] - fixed);
        a[WG] = weights * l - 2 * weights;
        a[HG] = 2 * q * h1 * bls - 2 * s * h1 * gbs;
        a[CG] = 4 * (s + n) * h1 * bls * l + term[t].times_cg;
    }
}

/* cpu_peak = cpu_home + cpu_w < cmem in both stages, nvme_peak < nmem, and Eq. 1's sums, each as two rows. */
static void other_rows(Lp *lp, const Machine *hw, const Model *m, double s, double n, double gbs,
                       double bls) {
    static const char *const sum[] = {"wg + wc + wd", "cg + cc + cd", "hg + hc + hd"};
    const double h1 = m->h1, weights = 8 * h1 * h1 + 4 * h1 * m->h2, all = weights * m->l,
                 hidden_w = 2 * s * h1 * gbs;
    const double cache = 4 * (s + n) * h1 * bls * m->l;
    double *a = row(lp, "cpu_peak^p", hw->mem[CPU] - weights - hidden_w); /* cpu_w^p: 1 - wg, 1 - hg */
    a[WC] = all, a[HC] = 2 * s * h1 * bls, a[CC] = cache, a[WG] = -weights, a[HG] = -hidden_w;
    a = row(lp, "cpu_peak^g", hw->mem[CPU] - 2 * m->nh * (s + n) * gbs - 2 * h1 * gbs);
    a[WC] = all, a[HC] = 2 * h1 * bls, a[CC] = cache;
    a[WD] = weights, a[HD] = 2 * 2 * h1 * gbs, a[CD] = 2 * 4 * (s + n) * h1 * gbs;
    a = row(lp, "nvme_peak", hw->mem[DISK]);
    a[WD] = all, a[HD] = 2 * s * h1 * bls, a[CD] = cache;
    for (int e = 0; e < 6; e++) {
        const int sign = e % 2 ? -1 : 1;
        a = row(lp, sum[e / 2], sign);
        for (int v = 0; v < 3; v++) a[e / 2 * 3 + v] = sign;
    }
}

/* Eq. 1: minimize T / bls, where T = T_pre l + T_gen (n - 1) l. */
static void paper_lp(Lp *lp, const Machine *hw, const Model *m, int s, int n, int gbs, int num_gpu_batches) {
    const double bls = (double)gbs * num_gpu_batches;
    *lp = (Lp){.c = {[T_PRE] = m->l / bls, [T_GEN] = (n - 1.) * m->l / bls}};
    latency_rows(lp, hw, m, s, n, bls);
    for (int prefill = 1; prefill >= 0; prefill--) gpu_rows(lp, hw, m, s, n, gbs, bls, prefill);
    other_rows(lp, hw, m, s, n, gbs, bls);
}

static void print_lp(const Lp *lp, const double *x) {
    printf("minimize %.6g T_pre + %.6g T_gen, so that (*: with nothing to spare)\n", lp->c[T_PRE],
           lp->c[T_GEN]);
    for (const Row *p = lp->row; p < lp->row + lp->m; p++) {
        double sum = 0, size = fabs(p->b);
        for (int v = 0; v < NVARS; v++) sum += p->a[v] * x[v], size = fmax(size, fabs(p->a[v] * x[v]));
        printf("%c %-24s", sum >= p->b - 1e-9 * size ? '*' : ' ', p->name);
        for (int v = 0; v < NVARS; v++)
            if (p->a[v] != 0) printf(" %+.6g %s", p->a[v], var_name[v]);
        printf(" <= %.6g\n", p->b);
    }
}

// ------------------------------------------------------------------------------------------------------------
// The simplex method (section 4.3: "the linear programming problem can be solved very fast")
//
// Every row gets a slack variable, and the tableau says each basic variable by those that are not basic,
// which are 0: basic + sum of cell x = last cell. A pivot lets one variable enter the basis and another leave
// it. Phase 1 begins with one artificial variable that every row may lean on, and drives it to 0. Phase 2
// does the same with the cost. Of several choices the first variable is taken (Bland's rule), so that it
// cannot go in circles.
// ------------------------------------------------------------------------------------------------------------

enum { ARTIFICIAL = NVARS, RIGHT = NVARS + 1, COST = NROWS, LEAN = NROWS + 1 };
static const double EPS = 1e-11;
typedef struct {
    int m, basic[NROWS],
        other[NVARS + 1]; /* variables 0 .. NVARS - 1, then the slacks, last the artificial */
    double cell[NROWS + 2][NVARS + 2];
} Tableau;

static void pivot(Tableau *t, int r, int c) {
    double *row = t->cell[r];
    const double inverse = 1 / row[c];
    for (int i = 0; i < NROWS + 2; i++) {
        double *to = t->cell[i], factor = to[c] * inverse;
        if (i == r || to[c] == 0) continue;
        for (int v = 0; v <= RIGHT; v++) to[v] -= factor * row[v];
        to[c] = -factor;
    }
    for (int v = 0; v <= RIGHT; v++) row[v] *= inverse;
    row[c] = inverse;
    const int leaves = t->basic[r];
    t->basic[r] = t->other[c], t->other[c] = leaves;
}

/* Pivots until nothing lowers the cost any more. False: it did not end. */
static bool minimize(Tableau *t, int cost) {
    for (int pivots = 0; pivots < 5000; pivots++) {
        int c = -1, r = -1;
        for (int v = 0; v <= ARTIFICIAL; v++)
            if (t->cell[cost][v] < -EPS && (cost == LEAN || t->other[v] != NVARS + NROWS) &&
                (c < 0 || t->other[v] < t->other[c]))
                c = v;
        if (c < 0) return true;
        for (int i = 0; i < t->m; i++) {
            if (t->cell[i][c] <= EPS) continue;
            const double reach = t->cell[i][RIGHT] / t->cell[i][c],
                         best = r < 0 ? INFINITY : t->cell[r][RIGHT] / t->cell[r][c];
            if (reach < best || (reach == best && t->basic[i] < t->basic[r])) r = i;
        }
        if (r < 0) return false;
        pivot(t, r, c);
    }
    return false;
}

/* x >= 0 with c x least; unit: by what each variable is measured, so that all numbers are around 1. False: no
 * x satisfies all rows. Where several x are best, the one with less on slower tiers is taken: they cost a
 * little. */
static bool simplex(double x[NVARS], const Lp *lp, const double unit[NVARS]) {
    static const double slower[] = {[WC] = 1, [WD] = 2, [CC] = 1, [CD] = 2, [HC] = 1, [HD] = 2, [T_GEN] = 0};
    Tableau t = {.m = lp->m};
    int least = 0;
    double largest = 0;
    for (int v = 0; v < NVARS; v++) largest = fmax(largest, lp->c[v] * unit[v]);
    for (int v = 0; v <= ARTIFICIAL; v++) t.other[v] = v < NVARS ? v : NVARS + NROWS;
    for (int v = 0; v < NVARS; v++) t.cell[COST][v] = lp->c[v] * unit[v] / largest + 1e-9 * slower[v];
    for (int i = 0; i < lp->m; i++) {
        double size = fabs(lp->row[i].b);
        for (int v = 0; v < NVARS; v++) size = fmax(size, fabs(lp->row[i].a[v] * unit[v]));
        for (int v = 0; v < NVARS; v++) t.cell[i][v] = lp->row[i].a[v] * unit[v] / size;
        t.cell[i][ARTIFICIAL] = -1, t.cell[i][RIGHT] = lp->row[i].b / size, t.basic[i] = NVARS + i;
        if (t.cell[i][RIGHT] < t.cell[least][RIGHT]) least = i;
    }
    t.cell[LEAN][ARTIFICIAL] = 1;
    pivot(&t, least, ARTIFICIAL);
    if (!minimize(&t, LEAN) || t.cell[LEAN][RIGHT] < -1e-9) return false;
    for (int i = 0; i < t.m; i++) /* basic though 0: out with it, for any other */
        for (int v = 0; v <= ARTIFICIAL && t.basic[i] == NVARS + NROWS; v++)
            if (fabs(t.cell[i][v]) > EPS) pivot(&t, i, v);
    if (!minimize(&t, COST)) return false;
    memset(x, 0, NVARS * sizeof *x);
    for (int i = 0; i < t.m; i++)
        if (t.basic[i] < NVARS) x[t.basic[i]] = fmax(t.cell[i][RIGHT], 0) * unit[t.basic[i]];
    return true;
}

/* The least seconds in which a layer can be computed at x: the largest of its terms. */
static double longest_term(const Lp *lp, const double *x, int T) {
    double most = 0;
    for (const Row *p = lp->row; p < lp->row + lp->m; p++) {
        double sum = -p->b;
        for (int v = 0; v < T_PRE; v++) sum += p->a[v] * x[v];
        if (p->a[T] != 0) most = fmax(most, sum);
    }
    return most;
}

/* Solves Eq. 1, once with units of time from everything on disk, then with those of the answer. */
static bool solve(double x[NVARS], const Lp *lp) {
    double unit[NVARS], disk[NVARS] = {[WD] = 1, [CD] = 1, [HD] = 1};
    for (int pass = 0; pass < 2; pass++) {
        const double *at = pass ? x : disk;
        for (int v = 0; v < T_PRE; v++) unit[v] = 1;
        for (int T = T_PRE; T <= T_GEN; T++) unit[T] = longest_term(lp, at, T);
        if (!simplex(x, lp, unit)) return false;
        for (int T = T_PRE; T <= T_GEN; T++) x[T] = longest_term(lp, x, T);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------------------
// Policy search (section 4.3): the best placement for each of a few blocks, and of these the best
// ------------------------------------------------------------------------------------------------------------

/* What A.3 says that everything on disk takes of a tier. */
static double counted(const Lp *lp, const Machine *hw, Tier tier) {
    const double disk[NVARS] = {[WD] = 1, [CD] = 1, [HD] = 1};
    double most = 0;
    for (const Row *p = lp->row; p < lp->row + lp->m; p++) {
        double sum = hw->mem[tier] - p->b;
        for (int v = 0; v < NVARS; v++) sum += p->a[v] * disk[v];
        if (!strncmp(p->name, tier == GPU ? "gpu_peak" : "cpu_peak", 8)) most = fmax(most, sum);
    }
    return most;
}

static void take_fractions(Policy *policy, const double *x) {
    for (int f = 0; f < 9; f++) policy->share[f / 3][f % 3] = x[f];
}

/* The best placement of one block that is also a placement here. A.3 counts no embeddings, F16 activations,
 * and other workspace than ours: what everything on disk takes beyond that comes off the machine's memory
 * first; and where whole tensors and sequences still overfill a tier, what it lacks does too, and again. */
static bool best_placement(double x[NVARS], Lp *lp, Run *r, const Machine *hw, int s) {
    const double disk[] = {0, 0, 1, 0, 0, 1, 0, 0, 1};
    Machine left = *hw;
    paper_lp(lp, hw, &r->model, s, r->n, r->policy.gbs, r->policy.num_gpu_batches);
    take_fractions(&r->policy, disk);
    place_all(r, NULL);
    for (int t = GPU; t <= CPU; t++)
        left.mem[t] -= fmax(0, (double)r->tier[t].peak - counted(lp, hw, (Tier)t));
    for (int tries = 0; tries < 12; tries++) {
        bool fits = true;
        paper_lp(lp, &left, &r->model, s, r->n, r->policy.gbs, r->policy.num_gpu_batches);
        if (left.mem[GPU] <= 0 || left.mem[CPU] <= 0 || !solve(x, lp)) return false;
        take_fractions(&r->policy, x);
        place_all(r, NULL);
        for (int t = GPU; t < NTIERS; t++)
            if ((double)r->tier[t].peak > hw->mem[t])
                fits = false, left.mem[t] -= r->tier[t].peak - hw->mem[t];
        if (fits) return true;
    }
    return false;
}

/* Tries the blocks that the flags leave open, gbs a multiple of 4 but for the smallest and num_gpu_batches up
 * to 20, and leaves the best policy. s: tokens of the longest prompt, which stands for all (the paper pads to
 * it); sequences: how many there are. on_paper: A.3 alone decides what fits. Returns T of a block, or
 * infinity. */
static double search(Run *r, const Machine *hw, int s, int sequences, bool on_paper, double x[NVARS],
                     Lp *lp) {
    const Policy given = r->policy;
    Policy best = given;
    double least = INFINITY, T = INFINITY;
    for (int gbs = 1; gbs == 1 || (!given.gbs && gbs < sequences + 4); gbs = gbs < 4    ? 2 * gbs
                                                                             : gbs < 32 ? gbs + 4
                                                                                        : gbs * 5 / 16 * 4)
        for (int K = given.num_gpu_batches ? given.num_gpu_batches : 1; K <= imax(20, given.num_gpu_batches);
             K++) {
            double at[NVARS];
            Lp one;
            if (K > 1 && (given.gbs ? given.gbs : gbs) * (K - 1) >= sequences) break;
            if (given.num_gpu_batches && K != given.num_gpu_batches) continue;
            r->policy.gbs = given.gbs ? given.gbs : gbs, r->policy.num_gpu_batches = K;
            paper_lp(&one, hw, &r->model, s, r->n, r->policy.gbs, K);
            if (!(on_paper ? solve(at, &one) : best_placement(at, &one, r, hw, s))) continue;
            const double seconds = (at[T_PRE] + at[T_GEN] * (r->n - 1)) * r->model.l;
            const double each =
                seconds / imin(sequences, r->policy.gbs * K); /* T / bls of those that there are */
            if (each >= least) continue;
            least = each, T = seconds, best = r->policy, *lp = one;
            memcpy(x, at, sizeof at);
        }
    r->policy = best;
    return T;
}

// ------------------------------------------------------------------------------------------------------------
// What every such program needs: errors, files, JSON
// ------------------------------------------------------------------------------------------------------------

/* One line for a person. Status 2: wrong use, or it does not fit; 1: everything else. */
static void die(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "mini: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    _exit(status);
}

static void *allocate(size_t n, size_t size) {
    void *memory = calloc(n ? n : 1, size);
    if (!memory) die(1, "no memory for %zu x %zu bytes", n, size);
    return memory;
}

/* Mapped files have no other way to say that they cannot be read. */
static void mapping_failed(int signal) {
    static const char text[] =
        "mini: a file could not be read where it is mapped: was it cut, or is the disk bad?\n";
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    _exit(signal ? 1 : 0);
}

/* A file as memory that may be written to, which changes nothing in the file. NULL: there is none. */
static char *map_file(const char *dir, const char *name, size_t *size) {
    char path[4200];
    struct stat st;
    snprintf(path, sizeof path, "%s%s%s", dir, *dir ? "/" : "", name);
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) return NULL;
    if (fd < 0 || fstat(fd, &st)) die(1, "%s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode) || !st.st_size) die(1, "%s: is empty, or no file", path);
    char *text = mmap(NULL, *size = st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    if (text == MAP_FAILED) die(1, "%s: %s", path, strerror(errno));
    close(fd);
    return text;
}

/* A value of a JSON text, in an array in the order of the text: what an object or a list holds lies behind
 * it. size: with that, how many there are. */
typedef struct {
    char type; /* { [ " 0 t f n */
    const char *key, *text;
    double number;
    int size;
} Json;

typedef struct {
    const char *name; /* of the file */
    char *at, *stop;
    Json *value;
    int n, room;
} Reader;

static void skip(Reader *p) {
    while (p->at < p->stop && strchr(" \t\r\n", *p->at) && *p->at) p->at++;
}

static bool next_is(Reader *p, char c) {
    skip(p);
    if (p->at >= p->stop || *p->at != c) return false;
    return p->at++, true;
}

static __attribute__((noreturn)) void bad_json(const Reader *p) {
    die(1, "%s: no JSON %zd bytes before its end: is the download complete?", p->name, p->stop - p->at);
}

static unsigned read_hex(Reader *p) {
    unsigned code = 0;
    for (int digit = 0; digit < 4; digit++, p->at++) {
        const char *hex = "0123456789abcdefABCDEF",
                   *found = p->at < p->stop && *p->at ? strchr(hex, *p->at) : NULL;
        if (!found) bad_json(p);
        code = code * 16 + (unsigned)(found - hex > 15 ? found - hex - 6 : found - hex);
    }
    return code;
}

static char *put_utf8(char *to, unsigned c) {
    const int more = (c > 0x7f) + (c > 0x7ff) + (c > 0xffff);
    static const unsigned char lead[] = {0, 0xc0, 0xe0, 0xf0};
    *to++ = (char)(lead[more] | c >> 6 * more);
    for (int m = more - 1; m >= 0; m--) *to++ = (char)(0x80 | (c >> 6 * m & 0x3f));
    return to;
}

/* Behind the first quotation mark. The text is decoded in its place, which is long enough, and gets a 0. */
static const char *read_string(Reader *p) {
    char *begin = p->at, *to = begin;
    while (p->at < p->stop && *p->at != '"') {
        if (*p->at != '\\') {
            *to++ = *p->at++;
            continue;
        }
        static const char names[] = "\"\\/bfnrt", are[] = "\"\\/\b\f\n\r\t";
        if (++p->at >= p->stop) bad_json(p);
        const char c = *p->at++, *name = c ? strchr(names, c) : NULL;
        if (!name && c != 'u') bad_json(p);
        if (name) *to++ = are[name - names];
        if (name) continue;
        unsigned code = read_hex(p);
        if (code >= 0xd800 && code < 0xdc00 && p->stop - p->at > 6 && p->at[0] == '\\' && p->at[1] == 'u')
            p->at += 2, code = 0x10000 + ((code & 0x3ff) << 10) + (read_hex(p) & 0x3ff);
        to = put_utf8(to, code);
    }
    if (p->at >= p->stop) bad_json(p);
    p->at++, *to = 0;
    return begin;
}

static void read_value(Reader *p, const char *key, int depth) {
    skip(p);
    if (p->at >= p->stop || depth > 20) bad_json(p);
    if (p->n == p->room) p->value = realloc(p->value, (p->room = 2 * p->room + 64) * sizeof *p->value);
    if (!p->value) die(1, "%s: no memory", p->name);
    const int self = p->n++;
    const char c = *p->at;
    Json v = {.type = c, .key = key};
    if (c == '"') {
        p->at++, v.text = read_string(p);
    } else if (c == '{' || c == '[') {
        const char close = c == '{' ? '}' : ']';
        p->at++;
        for (bool more = !next_is(p, close); more; more = !next_is(p, close)) {
            if (p->n > self + 1 && !next_is(p, ',')) bad_json(p);
            if (c == '{' && !next_is(p, '"')) bad_json(p);
            const char *name = c == '{' ? read_string(p) : NULL;
            if (c == '{' && !next_is(p, ':')) bad_json(p);
            read_value(p, name, depth + 1);
        }
    } else { /* a number or a word; the text does not end here, since some brace is open */
        char word[40] = "", *end;
        for (int w = 0; w < 39 && p->at < p->stop && *p->at && !strchr(",]} \t\r\n", *p->at);)
            word[w++] = *p->at++;
        v.number = strtod(word, &end);
        v.type = !strcmp(word, "true")    ? 't'
                 : !strcmp(word, "false") ? 'f'
                 : !strcmp(word, "null")  ? 'n'
                                          : '0';
        if (v.type == '0' && (end == word || *end)) bad_json(p);
    }
    v.size = p->n - self;
    p->value[self] = v;
}

/* The values of a JSON object, the first of them itself. The caller frees them. */
static Json *read_json(const char *name, char *text, size_t size) {
    Reader p = {.name = name, .at = text, .stop = text + size};
    skip(&p);
    if (p.at >= p.stop || *p.at != '{') bad_json(&p);
    read_value(&p, NULL, 0);
    return p.value;
}

/* The member of that name; NULL: there is none. */
static const Json *member(const Json *object, const char *key) {
    for (const Json *v = object + 1; object && object->type == '{' && v < object + object->size; v += v->size)
        if (!strcmp(v->key, key)) return v;
    return NULL;
}

/* A whole number that has to be there, unless it may be left out. */
static int whole(const char *name, const Json *object, const char *key, int low, int high, int left_out) {
    const Json *v = member(object, key);
    if ((!v || v->type == 'n') && left_out >= 0) return left_out;
    if (!v || v->type != '0' || !(v->number >= low && v->number <= high) || v->number != floor(v->number))
        die(1, "%s: %s has to be a whole number from %d to %d", name, key, low, high);
    return (int)v->number;
}

/* A member that is true, if it is there at all. */
static bool is_true(const Json *object, const char *key, bool left_out) {
    const Json *v = member(object, key);
    return !v || v->type == 'n' ? left_out : v->type == 't';
}

// ------------------------------------------------------------------------------------------------------------
// The checkpoint: config.json, and tensors in safetensors files, whose headers are not trusted
// ------------------------------------------------------------------------------------------------------------

/* Section 6.1's models and their smaller sisters, for a search without a checkpoint: l, h1, nh; h2 = 4 h1. */
static const struct {
    const char *name;
    int l, h1, nh;
} known[] = {{"opt-125m", 12, 768, 12},  {"opt-1.3b", 24, 2048, 32}, {"opt-2.7b", 32, 2560, 32},
             {"opt-6.7b", 32, 4096, 32}, {"opt-13b", 40, 5120, 40},  {"opt-30b", 48, 7168, 56},
             {"opt-66b", 64, 9216, 72},  {"opt-175b", 96, 12288, 96}};

/* Returns whether the head is the token table. */
static bool read_config(Model *m, const char *dir) {
    size_t size;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(dir, known[i].name)) {
            *m = (Model){known[i].l, known[i].h1, 4 * known[i].h1, known[i].nh, 50272, 2048, 2, true};
            return true;
        }
    char *text = map_file(dir, "config.json", &size);
    if (!text) die(1, "%s: has no config.json; give the directory of an OPT model", dir);
    Json *json = read_json("config.json", text, size);
    const Json *type = member(json, "model_type"), *act = member(json, "activation_function");
    if (!type || type->type != '"' || strcmp(type->text, "opt") ||
        (act && act->text && strcmp(act->text, "relu")))
        die(1, "%s: model_type has to be \"opt\", activation_function \"relu\"", dir);
    m->l = whole(dir, json, "num_hidden_layers", 1, 1024, -1),
    m->h1 = whole(dir, json, "hidden_size", 1, 1 << 16, -1);
    m->h2 = whole(dir, json, "ffn_dim", 1, 1 << 19, -1),
    m->nh = whole(dir, json, "num_attention_heads", 1, 1 << 16, -1);
    m->vocab = whole(dir, json, "vocab_size", 1, 1 << 20, -1);
    m->positions = whole(dir, json, "max_position_embeddings", 1, 1 << 20, -1);
    m->eos = whole(dir, json, "eos_token_id", 0, m->vocab - 1, imin(2, m->vocab - 1));
    m->final_norm = !is_true(json, "_remove_final_layer_norm", false);
    const bool tied = is_true(json, "tie_word_embeddings", true);
    if (m->h1 % m->nh) die(1, "%s: hidden_size is no multiple of num_attention_heads", dir);
    if (!is_true(json, "do_layer_norm_before", true) ||
        whole(dir, json, "word_embed_proj_dim", 1, 1 << 16, m->h1) != m->h1)
        die(1, "%s: a model such as opt-350m; the engine beside this file runs it (opt_model.c)", dir);
    free(json), munmap(text, size);
    return tied;
}

/* A tensor that a header names. */
typedef struct {
    const char *name;
    Place at;
    double rows, cols;
} Entry;
typedef struct {
    const char *dir;
    Entry *entry;
    int n;
} Checkpoint;

/* Adds the tensors of one file. Others than F16, BF16 and F32 are none of OPT's. */
static void read_header(Checkpoint *c, const char *name) {
    static const char *const types[] = {"F16", "BF16", "F32"};
    size_t size = 0;
    uint64_t header;
    char *file = map_file(c->dir, name, &size);
    if (!file)
        die(1,
            "%s: has no %s; safetensors files are read, with model.safetensors.index.json if there are "
            "several",
            c->dir, name);
    if (size > 8) memcpy(&header, file, 8);
    if (size <= 8 || header > size - 8)
        die(1, "%s: has no header of a safetensors file: is the download complete?", name);
    Json *json = read_json(name, file + 8, header); /* its texts are kept */
    c->entry = realloc(c->entry, (c->n + (size_t)json->size) * sizeof *c->entry);
    if (!c->entry) die(1, "%s: no memory for its tensors", name);
    for (const Json *v = json + 1; v < json + json->size; v += v->size) {
        const Json *dtype = member(v, "dtype"), *shape = member(v, "shape"),
                   *span = member(v, "data_offsets");
        if (!strcmp(v->key, "__metadata__")) continue;
        if (!dtype || !dtype->text || !shape || shape->type != '[' || !span || span->size != 3)
            die(1, "%s: %.200s has no dtype, shape and data_offsets", name, v->key);
        Entry e = {.name = v->key,
                   .rows = shape->size > 2 ? shape[1].number : 1,
                   .cols = shape[shape->size - 1].number};
        int type = F16;
        while (type <= F32 && strcmp(dtype->text, types[type])) type++;
        const double begin = span[1].number, end = span[2].number;
        if (type > F32 || shape->size > 3 || shape->size < 2) continue;
        if (!(begin >= 0 && end >= begin && end <= (double)(size - 8 - header) && e.rows >= 1 &&
              e.cols >= 1) ||
            end - begin != e.rows * e.cols * (type == F32 ? 4 : 2) || begin != floor(begin))
            die(1, "%s: %.200s is not where and of the size that the header says: is the download complete?",
                name, v->key);
        e.at = (Place){DISK, (Type)type, (uint8_t *)file + 8 + header + (size_t)begin};
        c->entry[c->n++] = e;
    }
    free(json);
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* One file, or the shards that an index names. */
static void read_headers(Checkpoint *c) {
    size_t size;
    int n = 0;
    char *text = map_file(c->dir, "model.safetensors.index.json", &size);
    if (!text) return read_header(c, "model.safetensors");
    Json *json = read_json("model.safetensors.index.json", text, size);
    const Json *map = member(json, "weight_map");
    if (!map || map->type != '{') die(1, "%s: model.safetensors.index.json has no weight_map", c->dir);
    const char **file = allocate(map->size, sizeof *file);
    for (const Json *v = map + 1; v < map + map->size; v += v->size)
        if (!v->text || strchr(v->text, '/'))
            die(1, "%s: model.safetensors.index.json: bad name of a file", c->dir);
        else
            file[n++] = v->text;
    qsort(file, n, sizeof *file, by_text);
    for (int i = 0; i < n; i++)
        if (!i || strcmp(file[i], file[i - 1])) read_header(c, file[i]);
    free(file), free(json);
}

/* The tensor of that name, with or without "model." in front, of that shape. */
static bool find_tensor(Weight *w, const Checkpoint *c, const char *name, int rows, int cols) {
    for (const Entry *e = c->entry; e < c->entry + c->n; e++) {
        if (strcmp(e->name, name) && strcmp(e->name, strncmp(name, "model.", 6) ? name : name + 6)) continue;
        if (e->rows != rows || e->cols != cols)
            die(1, "%s: %s has the shape %g x %g, config.json asks for %d x %d", c->dir, name, e->rows,
                e->cols, rows, cols);
        *w = (Weight){.file = e->at, .rows = rows, .cols = cols};
        return true;
    }
    return false;
}

static void want_tensor(Weight *w, const Checkpoint *c, const char *name, int rows, int cols) {
    if (!find_tensor(w, c, name, rows, cols))
        die(1, "%s: has no tensor %s of F16, BF16 or F32; config.json asks for it: is the download complete?",
            c->dir, name);
}

/* All that config.json asks for. A head that is a copy of the token table is the token table. */
static void open_checkpoint(Run *r, const char *dir) {
    static const char *const part[] = {"self_attn_layer_norm",
                                       "self_attn.q_proj",
                                       "self_attn.k_proj",
                                       "self_attn.v_proj",
                                       "self_attn.out_proj",
                                       "final_layer_norm",
                                       "fc1",
                                       "fc2"};
    Checkpoint c = {.dir = dir};
    Model *m = &r->model;
    const bool tied = read_config(m, dir);
    Weight *g = r->global;
    char name[120];
    read_headers(&c);
    r->layer = allocate(m->l, sizeof *r->layer), r->slab = allocate(m->l, sizeof *r->slab);
    want_tensor(&g[TOKENS], &c, "model.decoder.embed_tokens.weight", m->vocab, m->h1);
    want_tensor(&g[POSITIONS], &c, "model.decoder.embed_positions.weight", m->positions + 2, m->h1);
    if (m->final_norm) want_tensor(&g[LAST_NORM], &c, "model.decoder.final_layer_norm.weight", 1, m->h1);
    if (m->final_norm) want_tensor(&g[LAST_BIAS], &c, "model.decoder.final_layer_norm.bias", 1, m->h1);
    if (!find_tensor(&g[HEAD], &c, "lm_head.weight", m->vocab, m->h1) && !tied)
        die(1, "%s: has no tensor lm_head.weight, which config.json asks for", dir);
    const size_t size = (size_t)m->vocab * m->h1 * (g[TOKENS].file.type == F32 ? 4 : 2);
    if (tied && (!g[HEAD].rows || (g[HEAD].file.type == g[TOKENS].file.type &&
                                   !memcmp(g[HEAD].file.at, g[TOKENS].file.at, size))))
        g[HEAD] = g[TOKENS];
    for (int j = 0; j < m->l; j++)
        for (int role = 0; role < NROLES; role++) {
            const int out = role / 2 == W_1 / 2 ? m->h2 : m->h1, in = role == W_2 ? m->h2 : m->h1;
            snprintf(name, sizeof name, "model.decoder.layers.%d.%s.%s", j, part[role / 2],
                     role % 2 ? "bias" : "weight");
            want_tensor(&r->layer[j][role], &c, name, is_matrix(role) ? out : 1, is_matrix(role) ? in : out);
        }
    free(c.entry);
}

// ------------------------------------------------------------------------------------------------------------
// The tokenizer: GPT-2's byte-level BPE
// ------------------------------------------------------------------------------------------------------------

/* A text and the id of its piece. */
typedef struct {
    const char *text;
    int id;
} Named;

/* left and right become joined; of several pairs in a word the one of the lowest rank first. */
typedef struct {
    int left, right, rank, joined;
} Merge;

typedef struct {
    int vocab, nnames, nmerges, byte_id[256],
        byte_of[324];   /* both files write a byte as a character below 324 */
    const char **text;  // (vocab), of vocab.json; NULL: no such id
    Named *name;        /* in the order of the texts */
    Merge *merge;       /* in the order of left and right */
} Tokenizer;

static int by_name(const void *a, const void *b) {
    return strcmp(((const Named *)a)->text, ((const Named *)b)->text);
}
static int by_pair(const void *a, const void *b) {
    const Merge *x = a, *y = b;
    return x->left != y->left ? (x->left > y->left) - (x->left < y->left)
                              : (x->right > y->right) - (x->right < y->right);
}

static int id_of(const Tokenizer *t, const char *text) {
    const Named key = {text, 0}, *found = bsearch(&key, t->name, t->nnames, sizeof key, by_name);
    return found ? found->id : -1;
}

/* vocab.json: {"text": id, ...} */
static void read_vocab(Tokenizer *t, const char *dir) {
    size_t size;
    char *text = map_file(dir, "vocab.json", &size);
    if (!text) die(1, "%s: has no vocab.json", dir);
    Json *json = read_json("vocab.json", text, size);
    t->text = allocate(t->vocab, sizeof *t->text), t->name = allocate(json->size, sizeof *t->name);
    for (const Json *v = json + 1; v < json + json->size; v += v->size) {
        if (v->type != '0' || !(v->number >= 0 && v->number < t->vocab) || t->text[(int)v->number])
            die(1, "%s: vocab.json: \"%.60s\" has no id of its own below vocab_size, which is %d", dir,
                v->key, t->vocab);
        t->text[(int)v->number] = v->key;
        t->name[t->nnames++] = (Named){v->key, (int)v->number};
    }
    free(json);
    qsort(t->name, t->nnames, sizeof *t->name, by_name);
    for (int b = 0, next = 256; b < 256; b++) {
        const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        const int code = printable ? b : next++;
        char symbol[5];
        *put_utf8(symbol, code) = 0;
        t->byte_of[code] = b + 1, t->byte_id[b] = id_of(t, symbol);
        if (t->byte_id[b] < 0) die(1, "%s: vocab.json has no piece \"%s\" for byte %d", dir, symbol, b);
    }
}

/* merges.txt: a line for each, "left right" */
static void read_merges(Tokenizer *t, const char *dir) {
    size_t size;
    char *text = map_file(dir, "merges.txt", &size), joined[1024];
    if (!text) die(1, "%s: has no merges.txt", dir);
    t->merge = allocate(size / 4 + 1, sizeof *t->merge); /* the shortest line has four bytes */
    for (char *line = text, *stop = text + size, *end; line < stop; line = end + 1) {
        end = memchr(line, '\n', stop - line);
        if (!end) end = stop;
        const int len = (int)(end - line - (end > line && end[-1] == '\r'));
        const char *blank = memchr(line, ' ', len);
        if (!strncmp(line, "#version", 8) && line == text) continue;
        if (!blank || len >= (int)sizeof joined) die(1, "%s: merges.txt: a line is not of two pieces", dir);
        Merge m = {.rank = t->nmerges};
        snprintf(joined, sizeof joined, "%.*s", (int)(blank - line), line), m.left = id_of(t, joined);
        snprintf(joined, sizeof joined, "%.*s", (int)(line + len - blank - 1), blank + 1),
            m.right = id_of(t, joined);
        snprintf(joined, sizeof joined, "%.*s%.*s", (int)(blank - line), line, (int)(line + len - blank - 1),
                 blank + 1);
        m.joined = id_of(t, joined);
        if (m.left < 0 || m.right < 0 || m.joined < 0)
            die(1, "%s: merges.txt: \"%.60s\" is no piece", dir, joined);
        t->merge[t->nmerges++] = m;
    }
    munmap(text, size);
    qsort(t->merge, t->nmerges, sizeof *t->merge, by_pair);
}

/* l letters, d digits, s blanks, o others. Beyond ASCII all are letters here. */
static char char_kind(char c) {
    const unsigned char u = (unsigned char)c, lower = u | 32;
    return u >= 0x80 || (lower >= 'a' && lower <= 'z') ? 'l'
           : u >= '0' && u <= '9'                      ? 'd'
           : u == ' ' || (u > 8 && u < 14)             ? 's'
                                                       : 'o';
}

/* Where GPT-2's pattern 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ ends: a
 * contraction, or characters of a kind with or without a blank before them; blanks leave the last of them to
 * the word behind. */
static const char *word_end(const char *at) {
    static const char *const contraction[] = {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
    for (int c = 0; c < 7; c++)
        if (!strncmp(at, contraction[c], strlen(contraction[c]))) return at + strlen(contraction[c]);
    const char *first = at + (at[0] == ' ' && at[1]), *end = first + 1;
    while (*end && char_kind(*end) == char_kind(*first)) end++;
    return char_kind(*first) == 's' && *end && end > at + 1 ? end - 1 : end;
}

/* Writes the ids of a word of n bytes and returns their number: bytes, of which pairs are joined, the one
 * that stands first in merges.txt first. */
static int encode_word(const Tokenizer *t, int *id, const char *word, int n) {
    for (int b = 0; b < n; b++) id[b] = t->byte_id[(unsigned char)word[b]];
    for (;;) {
        const Merge *best = NULL;
        int at = 0;
        for (int b = 0; b + 1 < n; b++) {
            const Merge key = {.left = id[b], .right = id[b + 1]};
            const Merge *m = bsearch(&key, t->merge, t->nmerges, sizeof key, by_pair);
            if (m && (!best || m->rank < best->rank)) best = m, at = b;
        }
        if (!best) return n;
        id[at] = best->joined;
        memmove(id + at + 1, id + at + 2, (--n - at - 1) * sizeof *id);
    }
}

/* A prompt begins with </s>, as OPT's do. */
static void encode(const Tokenizer *t, Sequence *q, int n) {
    const size_t len = strlen(q->text);
    q->token = allocate(len + 1 + n, sizeof *q->token);
    q->token[q->s++] = id_of(t, "</s>");
    for (const char *at = q->text, *end; *at; at = end) {
        end = word_end(at);
        if (end - at > 4096)
            die(2, "a prompt has a word of %td bytes; at most 4096 can be joined to pieces", end - at);
        q->s += encode_word(t, q->token + q->s, at, (int)(end - at));
    }
}

/* The bytes of n tokens. The caller frees them. */
static char *decode(const Tokenizer *t, const int *id, int n) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (!out) die(1, "no memory");
    for (int e = 0; e < n; e++) {
        const char *piece = t->text[id[e]];
        const bool special = !piece || !strcmp(piece, "<s>") || !strcmp(piece, "<pad>") ||
                             !strcmp(piece, "</s>") || !strcmp(piece, "<unk>");
        for (const unsigned char *c = (const unsigned char *)piece; !special && *c; c += *c < 0x80 ? 1 : 2) {
            const int code = *c < 0x80 ? *c : (c[0] & 31) << 6 | (c[1] & 63);
            if (*c < 0xe0 && code < 324 && t->byte_of[code]) fputc(t->byte_of[code] - 1, out);
            if (*c >= 0x80 && !c[1]) break;
        }
    }
    fclose(out);
    return text;
}

/* How many bytes of s are a character of UTF-8; less than 1: so many are not, but negative. */
static int utf8_step(const unsigned char *s) {
    const int more = *s < 0x80                 ? 0
                     : *s >= 0xc2 && *s < 0xe0 ? 1
                     : *s >= 0xe0 && *s < 0xf0 ? 2
                     : *s >= 0xf0 && *s < 0xf5 ? 3
                                               : -1;
    for (int b = 1; b <= more; b++) {
        const int low = b > 1 ? 0x80 : *s == 0xe0 ? 0xa0 : *s == 0xf0 ? 0x90 : 0x80;
        const int high = b > 1 ? 0xbf : *s == 0xed ? 0x9f : *s == 0xf4 ? 0x8f : 0xbf;
        if (s[b] < low || s[b] > high) return -b;
    }
    return more < 0 ? -1 : more + 1;
}

/* Text as it is, or as a JSON string; what is no UTF-8 becomes U+FFFD. */
static void print_text(const char *text, bool json) {
    static const char escaped[] = "\"\\\n\t\r", letter[] = "\"\\ntr";
    if (json) putchar('"');
    for (const unsigned char *s = (const unsigned char *)text; *s;) {
        const int step = utf8_step(s);
        const char *escape = json ? strchr(escaped, *s) : NULL;
        if (escape)
            printf("\\%c", letter[escape - escaped]);
        else if (step < 0)
            fputs("\xEF\xBF\xBD", stdout);
        else if (json && (*s < ' ' || *s == 127))
            printf("\\u%04x", *s);
        else
            fwrite(s, 1, step, stdout);
        s += abs(step);
    }
    if (json) putchar('"');
}

// ------------------------------------------------------------------------------------------------------------
// The command line
// ------------------------------------------------------------------------------------------------------------

/* What a flag says besides the policy. */
typedef struct {
    const char *prompts, *hardware, *offload_dir, *link;
    int prompt_len;
    bool percent, json, policy, lp, help, no_overlap;
    double gpu_mem, cpu_mem;
} Options;

typedef struct {
    const char *name;
    char kind; /* s switch, w whole number, n number, b bytes, t text, p percentages */
    void *to;
    double low, high;
    const char *help;
} Flag;

/* "16G": a number and a power of `thousand`. NaN: it is none. *end: behind it. */
static double with_unit(const char *text, char **end, double thousand) {
    static const char units[] = "KMGT";
    const double value = strtod(text, end);
    const char *unit = **end ? strchr(units, **end & ~32) : NULL;
    if (*end == text) return NAN;
    if (unit) ++*end;
    return unit ? value * pow(thousand, (double)(unit - units + 1)) : value;
}

/* Six percentages, on GPU and on CPU; the disk has the rest. */
static void read_percent(Policy *policy, char **text) {
    for (int f = 0; f < 6; f++) {
        char *end;
        const double value = strtod(text[f], &end) / 100;
        if (*end || end == text[f] || !(value >= 0 && value <= 1))
            die(2, "--percent %.60s: expected 0 to 100", text[f]);
        policy->share[f / 2][f % 2] = value;
    }
    for (int kind = 0; kind < NKINDS; kind++) {
        const double above = policy->share[kind][GPU] + policy->share[kind][CPU];
        if (above > 1 + 1e-9)
            die(2, "--percent: on GPU and CPU together %g%%; expected at most 100%%", 100 * above);
        policy->share[kind][DISK] = fmax(0, 1 - above);
    }
}

/* Reads flag f, whose values follow; returns how many it has taken. */
static int read_flag(const Flag *f, char **values, int n, Policy *policy) {
    const int takes = f->kind == 's' ? 0 : f->kind == 'p' ? 6 : 1;
    char *end = "";
    if (n < takes) die(2, "%s takes %d value%s: %s", f->name, takes, takes > 1 ? "s" : "", f->help);
    if (f->kind == 's') *(bool *)f->to = true;
    if (f->kind == 't') *(const char **)f->to = values[0];
    if (f->kind == 'p') read_percent(policy, values), *(bool *)f->to = true;
    if (!strchr("wnb", f->kind)) return takes;
    const double value = f->kind == 'b' ? with_unit(values[0], &end, 1024) : strtod(values[0], &end);
    if (*end || end == values[0] || !(value >= f->low && value <= f->high) ||
        (f->kind == 'w' && value != floor(value)))
        die(2, "%s %.60s: expected a number from %g to %g: %s", f->name, values[0], f->low, f->high, f->help);
    if (f->kind == 'w')
        *(int *)f->to = (int)value;
    else
        *(double *)f->to = value;
    return takes;
}

/* The model, then the prompts; flags anywhere. Returns how many words are left in args. */
static int read_flags(Run *r, Options *o, char **args, int n) {
    Policy *p = &r->policy;
    const Flag flags[] = {
        {"--prompts", 't', &o->prompts, 0, 0, "FILE: a prompt a line; - is standard input"},
        {"--max-tokens", 'w', &r->n, 1, 1 << 20, "N: tokens to generate (64)"},
        {"--percent", 'p', &o->percent, 0, 0,
         "WG WC CG CC HG HC: weights, cache, activations on GPU and CPU (searched)"},
        {"--gpu-batch-size", 'w', &p->gbs, 1, 1 << 20, "N: sequences of a GPU batch"},
        {"--num-gpu-batches", 'w', &p->num_gpu_batches, 1, 1 << 16, "N: GPU batches of a block"},
        {"--cpu-cache-compute", 's', &p->cpu_attention, 0, 0,
         "the CPU attends to the cache that is not on the GPU"},
        {"--compress-weight", 's', &p->compress_weight, 0, 0, "4-bit groups for the layers' matrices"},
        {"--compress-cache", 's', &p->compress_cache, 0, 0, "4-bit groups for the KV cache"},
        {"--attn-sparsity", 'n', &p->sparsity, 1e-6, 1,
         "F: read V of this share of the tokens (1); the CPU attends"},
        {"--no-overlap", 's', &o->no_overlap, 0, 0, "make every move at once"},
        {"--gpu-mem", 'b', &o->gpu_mem, 1, 1e18, "SIZE: of the GPU tier, such as 16G (half of the memory)"},
        {"--cpu-mem", 'b', &o->cpu_mem, 1, 1e18, "SIZE: of the CPU tier (half of the memory)"},
        {"--link", 't', &o->link, 0, 0, "LIST: bytes a second of links: ctog=1G,gtoc=1G,dtoc=0.5G,ctod=0.5G"},
        {"--offload-dir", 't', &o->offload_dir, 0, 0,
         "DIR: where the disk tier's file is (TMPDIR, or /var/tmp)"},
        {"--threads", 'w', &r->threads, 1, 1024, "N: threads that compute (all cores)"},
        {"--json", 's', &o->json, 0, 0, "completions as JSON lines"},
        {"--policy", 's', &o->policy, 0, 0,
         "print what A.3 finds, and end; the model may be a name such as opt-30b"},
        {"--lp", 's', &o->lp, 0, 0, "print the linear program of what was searched"},
        {"--hardware", 't', &o->hardware, 0, 0,
         "FILE: the machine that is searched for, such as hardware/t4.json"},
        {"--prompt-len", 'w', &o->prompt_len, 1, 1 << 20, "S: tokens of a prompt, for --policy (512)"},
        {"--help", 's', &o->help, 0, 0, "this text"}};
    const int nflags = sizeof flags / sizeof *flags;
    int words = 0;
    for (int a = 0; a < n; a++) {
        const Flag *f = flags;
        while (f < flags + nflags && strcmp(args[a], f->name) != 0) f++;
        if (f < flags + nflags)
            a += read_flag(f, args + a + 1, n - a - 1, p);
        else if (!strncmp(args[a], "--", 2))
            die(2, "unknown flag %.60s; --help lists those that there are", args[a]);
        else
            args[words++] = args[a];
    }
    for (const Flag *f = flags; o->help && f < flags + nflags; f++) printf("  %-20s %s\n", f->name, f->help);
    return words;
}

/* "ctog=1G,dtoc=0.5G" */
static void read_links(LinkState link[NLINKS], const char *text) {
    for (const char *at = text; at; at = *at ? at + 1 : NULL) {
        char *end = "?";
        int c = 0;
        while (c < NLINKS && (strncmp(at, link_name[c], 4) != 0 || at[4] != '=')) c++;
        if (c < NLINKS) link[c].rate = with_unit(at + 5, &end, 1000);
        if ((*end && *end != ',') || !(link[c].rate >= 1 && link[c].rate < 1e15))
            die(2, "--link %.60s: expected links and bytes a second such as ctog=1G,gtoc=1G,dtoc=0.5G", text);
        at = end;
        if (!*at) break;
    }
}

/* A file of numbers by their names in Tables 7 and 8; a rate may differ between the stages: KEY_p and KEY_g.
 */
static void read_hardware(Machine *hw, const char *path) {
    static const char *const mem[] = {"gmem", "cmem", "nmem"};
    static const char *const rate[] = {"ctog_bdw", "gtoc_bdw",  "dtoc_bdw", "ctod_bdw",
                                       "mm_flops", "bmm_flops", "cpu_flops"};
    size_t size;
    char *text = map_file("", path, &size), key[40];
    if (!text) die(2, "%s: there is no such file", path);
    Json *json = read_json(path, text, size);
    for (int v = 0; v < NTIERS + 2 * NRATES; v++) {
        const int which = (v - NTIERS) / 2, stage = (v - NTIERS) % 2;
        const char *name = v < NTIERS ? mem[v] : rate[which];
        const Json *number = member(json, name);
        snprintf(key, sizeof key, "%s_%c", name, "gp"[stage & 1]);
        if (!number && v >= NTIERS) number = member(json, key);
        if (!number || number->type != '0' || !(number->number >= 1e-9 && number->number <= 1e30))
            die(2, "%s: %s has to be a number from 1e-9 to 1e30", path, number ? name : key);
        *(v < NTIERS ? &hw->mem[v] : &hw->rate[which][stage]) = number->number;
    }
    free(json);
}

/* This computer, as far as it can be known without measuring: half of its memory each, rates of the right
 * order. */
static void this_machine(Machine *hw, const Run *r, const Options *o) {
    static const double rate[NRATES] = {10e9, 10e9, 1e9, 1e9, 100e9, 20e9, 20e9};
    struct statvfs disk;
    for (int v = 0; v < NRATES; v++) hw->rate[v][0] = hw->rate[v][1] = rate[v];
    hw->mem[GPU] = hw->mem[CPU] = (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) / 2;
    hw->mem[DISK] = statvfs(o->offload_dir, &disk) ? 0 : (double)disk.f_bavail * disk.f_frsize;
    if (o->hardware) read_hardware(hw, o->hardware);
    for (int c = 0; c < NLINKS; c++)
        if (r->link[c].rate > 0) hw->rate[c][0] = hw->rate[c][1] = r->link[c].rate;
    if (o->gpu_mem > 0) hw->mem[GPU] = o->gpu_mem;
    if (o->cpu_mem > 0) hw->mem[CPU] = o->cpu_mem;
}

/* Lines of a file, without those that are empty, and what stands behind the model. A line's number is its
 * prompt's id. */
static void read_prompts(Run *r, const Options *o, char **words, int n) {
    FILE *in = !o->prompts ? NULL : strcmp(o->prompts, "-") ? fopen(o->prompts, "r") : stdin;
    char *line = NULL;
    size_t room = 0;
    if (o->prompts && !in) die(2, "%s: %s", o->prompts, strerror(errno));
    if (!n == !in) die(2, "give prompts behind the model, or --prompts FILE");
    for (int id = 0; in ? getline(&line, &room, in) >= 0 : id < n; id++) {
        if (in) line[strcspn(line, "\r\n")] = 0;
        if (in && !*line) continue;
        r->prompts = realloc(r->prompts, (r->nprompts + 1) * sizeof *r->prompts);
        const char *text = in ? strdup(line) : words[id];
        if (!r->prompts || !text) die(1, "no memory for prompt %d", id);
        r->prompts[r->nprompts++] = (Sequence){.text = text, .id = id};
    }
    free(line);
    if (!r->nprompts) die(2, "%s: has no prompts", o->prompts);
    if (in && in != stdin) fclose(in);
}

static void print_policy(FILE *out, const Policy *p) {
    static const char *const kind[] = {"weights", "cache", "activations"};
    for (int k = 0; k < NKINDS; k++)
        fprintf(out, "%s %.2f/%.2f/%.2f%%, ", kind[k], 100 * p->share[k][GPU], 100 * p->share[k][CPU],
                100 * p->share[k][DISK]);
    fprintf(out, "block of %d x %d\n", p->gbs, p->num_gpu_batches);
}

/* --policy: Eq. 1 as printed, for numbers to be compared. */
static void print_search(Run *r, const Machine *hw, const Options *o) {
    double x[NVARS];
    Lp lp;
    const double T = search(r, hw, o->prompt_len, 1024, true, x, &lp);
    if (!(T < INFINITY)) die(2, "no placement fits; use smaller batches, fewer tokens or a larger machine");
    if (o->lp) print_lp(&lp, x);
    take_fractions(&r->policy, x);
    for (int v = 0; v < NVARS; v++) printf("%s %.12g\n", var_name[v], x[v]);
    printf("gbs %d\nnum_gpu_batches %d\nT %.12g\n", r->policy.gbs, r->policy.num_gpu_batches, T);
    printf("throughput %.12g\n", (double)r->policy.gbs * r->policy.num_gpu_batches * r->n / T);
}

/* Searches where no policy is given, places everything, and refuses what does not fit. */
static void choose_policy(Run *r, const Machine *hw, const Options *o) {
    int longest = 0;
    double x[NVARS];
    Lp lp;
    for (int q = 0; q < r->nprompts; q++) longest = imax(longest, r->prompts[q].s);
    Policy *p = &r->policy;
    if (p->gbs) p->gbs = imin(p->gbs, r->nprompts);
    if (o->percent && !p->gbs)
        p->gbs = imin(32, (r->nprompts + p->num_gpu_batches) / imax(1, p->num_gpu_batches));
    if (o->percent && !p->num_gpu_batches) p->num_gpu_batches = 1;
    p->num_gpu_batches = imin(p->num_gpu_batches, r->nprompts);
    r->batch = allocate(imax(20, p->num_gpu_batches), sizeof *r->batch);
    if (!o->percent) {
        p->cpu_attention = true; /* as A.3 assumes */
        if (!(search(r, hw, longest, r->nprompts, false, x, &lp) < INFINITY))
            die(2,
                "no policy fits; raise --gpu-mem or --cpu-mem, lower --max-tokens, or give --gpu-batch-size "
                "1");
        fprintf(stderr,
                "mini: searched by A.3; embeddings and workspace, which it does not count, came off the "
                "memory first\n");
        if (o->lp) print_lp(&lp, x);
    }
    place_all(r, NULL);
    for (int t = 0; t < NTIERS; t++)
        if ((double)r->tier[t].peak > hw->mem[t])
            die(2,
                "the %s tier needs %zu bytes and has %.0f; change --percent, lower --gpu-batch-size or raise "
                "its size",
                tier_name[t], r->tier[t].peak, hw->mem[t]);
}

/* The tiers' bytes, as many as the placement has counted. The disk's file has no name any more when it is
 * used. */
static void open_tiers(Run *r, const char *dir) {
    for (int t = 0; t < NTIERS; t++) {
        Arena *a = &r->tier[t];
        char path[4200];
        int fd = -1, why = 0;
        if (!a->peak) continue;
        snprintf(path, sizeof path, "%s/mini-XXXXXX", dir);
        if (t == DISK && (fd = mkstemp(path)) < 0) die(1, "%s: %s", path, strerror(errno));
        if (t == DISK) unlink(path), why = posix_fallocate(fd, 0, (off_t)a->peak);
        if (why) die(1, "%s: no room for %zu bytes: %s", dir, a->peak, strerror(why));
        a->base = mmap(NULL, a->peak, PROT_READ | PROT_WRITE,
                       t == DISK ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
        if (a->base == MAP_FAILED)
            die(1, "no memory for the %zu bytes of the %s tier", a->peak, tier_name[t]);
        if (fd >= 0) close(fd);
    }
}

static void print_completion(const Tokenizer *t, const Sequence *q, int eos, bool json) {
    const int *token = q->token + q->s, n = q->generated - (q->generated && token[q->generated - 1] == eos);
    char *text = decode(t, token, n);
    if (json) printf("{\"id\": %d, \"prompt\": ", q->id);
    print_text(q->text, json);
    if (json) printf(", \"completion\": ");
    print_text(text, json);
    for (int e = 0; e < n && json; e++) printf("%s%d", e ? ", " : ", \"tokens\": [", token[e]);
    printf(json ? n ? "]}\n" : ", \"tokens\": []}\n" : "\n");
    free(text);
}

static void print_report(const Run *r) {
    const double seconds = r->seconds;
    long tokens = 0;
    for (int q = 0; q < r->nprompts; q++) tokens += r->prompts[q].generated;
    fprintf(stderr, "mini: ");
    print_policy(stderr, &r->policy);
    for (int t = 0; t < NTIERS; t++)
        fprintf(stderr, "mini: %s tier: %zu bytes\n", tier_name[t], r->tier[t].peak);
    for (int c = 0; c < NLINKS; c++)
        fprintf(stderr, "mini: %s: %zu bytes in %.3f s, %.1f%% of the time\n", link_name[c], r->link[c].bytes,
                r->link[c].seconds, 100 * r->link[c].seconds / seconds);
    fprintf(stderr, "mini: %d prompts, %ld tokens in %.3f s: %.1f tokens/s\n", r->nprompts, tokens, seconds,
            tokens / seconds);
}

/* Generation alone is timed: what is on the tiers has been brought there. */
static void generate_timed(Run *r) {
    const double start = now();
    generate(r);
    r->seconds += now() - start;
}

static void run(Run *r, const Options *o, const Machine *hw, const char *dir, char **words, int n) {
    Tokenizer t = {.vocab = r->model.vocab};
    read_prompts(r, o, words, n);
    read_vocab(&t, dir), read_merges(&t, dir);
    for (Sequence *q = r->prompts; q < r->prompts + r->nprompts; q++) {
        encode(&t, q, r->n);
        if (q->s > r->model.positions - r->n + 1)
            die(2, "prompt %d: %d tokens and %d to generate do not fit the model's %d positions", q->id, q->s,
                r->n, r->model.positions);
    }
    choose_policy(r, hw, o);
    open_tiers(r, o->offload_dir);
    start_threads(r);
    place_all(r, generate_timed);
    for (int q = 0; q < r->nprompts; q++) print_completion(&t, &r->prompts[q], r->model.eos, o->json);
    if (fflush(stdout) || ferror(stdout)) die(1, "standard output: %s", strerror(errno));
    print_report(r);
}

int main(int argc, char **argv) {
    static Run r = {.n = 64, .policy.sparsity = 1};
    const char *tmp = getenv("TMPDIR");
    Options o = {.prompt_len = 512, .offload_dir = tmp && *tmp ? tmp : "/var/tmp"};
    Machine hw;
    signal(SIGXFSZ, SIG_IGN), signal(SIGBUS, mapping_failed);
    r.threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const int words = read_flags(&r, &o, argv + 1, argc - 1);
    if (o.help) return 0;
    if (!words)
        die(2, "mini MODEL [PROMPT ...] [FLAGS]: name the directory of an OPT model; --help lists the flags");
    r.policy.overlap = !o.no_overlap, r.policy.cpu_attention |= r.policy.sparsity < 1;
    if (o.link) read_links(r.link, o.link);
    this_machine(&hw, &r, &o);
    if (o.policy)
        read_config(&r.model, argv[1]), print_search(&r, &hw, &o);
    else
        open_checkpoint(&r, argv[1]), run(&r, &o, &hw, argv[1], argv + 2, words - 1);
    return 0;
}
