/* mini.c: the whole of FlexGen in one file, to be kept open beside the paper: Sheng et al.,
 * High-throughput Generative Inference of Large Language Models with a Single GPU, 2023.
 *
 *   cc -O3 mini.c -lm -lpthread -o mini
 *   ./mini models/opt-tiny "Once upon a time" --percent 0 50 0 100 0 100 --ctog 1e9
 *
 * With -DGPU this file leaves out what computes in the GPU's memory or copies to it, and mini.cu
 * has the same functions for a card: nvcc -O3 -DGPU mini.c mini.cu -lcublas -o mini
 *
 * The program runs Hugging Face's OPT checkpoints that do not fit the GPU. Weights, KV cache and
 * activations rest on GPU, CPU and disk, in shares that a linear program finds. While one batch
 * computes, the data of its neighbours moves. There is no GPU in this file: the "GPU" is memory of
 * a given size, links are copies that can be slowed to a given rate, and threads stand for both
 * processors. So any computer can run all of it. -march=native makes it faster.
 *
 * Read it from top to bottom: the words of the paper; Figure 4; a fast product, which you can skip;
 * compute, which is the model; the five moves; placement; links and threads; groups of 4 bits;
 * sparse attention; the cost model of A.3, simplex and search. The last quarter is what every such
 * program needs: the checkpoint, the tokenizer and the command line; skip it at first. "4.2", "A.3"
 * and "Eq. 1" are places in the paper; i, j and k are token, layer and GPU batch. "See it move" at
 * the end of the links' chapter draws all of this as it happens: --trace FILE.
 *
 * The engine beside this file does all that a complete program needs. Only there one finds:
 *
 *   sampling, stop texts     device/host.c, app/completions.c
 *   opt-350m, Unicode        opt_model.c, io/
 *   jobs that survive        app/job.c, app/journal.c
 *   pages of the cache       branches/pages.c
 *   refilling, diagonal      branches/refill.c
 *   fast kernels             flexgen.cu
 *   measuring a machine      cost/profile.c
 *   many machines            device/pipeline.c
 *   proof of an optimum      lp.c
 *   other types than F16     io/checkpoint.c
 *
 * The engine does better in four ways. An operation waits only for what it needs
 * (device/depend.c), where synchronize() here waits for all moves. The CPU attends for batch k
 * while the GPU projects k + 1 and finishes k - 1 (schedule.c). Products are written for each
 * processor (device/host_linear.c). A second cost model counts the bytes that really move
 * (cost/runtime.c).
 *
 * Read next: mini.cu, or, without a GPU, flexgen.h. */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// -------------------------------------------------------------------------------------------------
// The words of the paper
//
// Sections 3 and 4 name three levels of memory, three kinds of data, and a policy that says where
// each kind rests. Here are these words as types, and all that the chapters share. A Place is bytes
// on a tier. A Weight rests in one place and is used in another, unless it rests on the GPU; a
// Sequence is a prompt with its new tokens, and knows where its cache and its activations rest. It
// is easy to miss that a tier is only a range of bytes: memory for GPU and CPU, a mapped file for
// the disk. What makes a tier slow are the links. The variables stand here because all chapters use
// them; skim them now, and come back when a chapter names one.
// -------------------------------------------------------------------------------------------------

#ifndef SHARED
#define SHARED /* mini.cu includes this chapter with the word `extern` here. */
#endif

typedef uint16_t f16;
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;                 /* 4.1 */
typedef enum { WEIGHTS, CACHE, ACTIVATIONS, NKINDS, COMPUTE = NKINDS } Kind; /* 4.2 */
enum { CTOG, GTOC, DTOC, CTOD, NLINKS }; /* A.3: a link joins two tiers one way. */

/* Section 3: there are l layers, the hidden sizes are h1 and h2, and nh heads have hd numbers each.
 * The other four are OPT's. */
SHARED int l, h1, h2, nh, hd, vocab, positions, eos;

/* 4.3: a policy. Its shares are wg, wc, wd; cg, cc, cd; hg, hc, hd. (In the paper hd is the disk's
 * share of activations; the variable hd above is the size of a head.) */
SHARED struct Policy {
    double share[NKINDS][NTIERS];
    int gbs, num_gpu_batches;             /* Their product is bls, the block size. */
    bool no_overlap, delegated;           /* 4.2: overlapping, computation delegation */
    bool compress_weight, compress_cache; /* 5: group-wise quantization */
    double sparsity;                      /* 5: the share of V that is read; 1 is all of it. */
} policy;

/* 4.3, Table 8: a machine of a few numbers, in generation [0] and in prefill [1]: bytes; bytes a
 * second; operations a second. Tier t has hw[GMEM + t], link c has hw[CTOG_BDW + c]. */
enum {
    GMEM,
    CMEM,
    NMEM,
    CTOG_BDW,
    GTOC_BDW,
    DTOC_BDW,
    CTOD_BDW,
    MM_FLOPS,
    BMM_FLOPS,
    CPU_FLOPS,
    NCONSTANTS
};
SHARED double hw[NCONSTANTS][2], given_hw[NCONSTANTS]; /* given_hw: those that flags say, or 0 */

typedef struct {
    Tier tier;
    uint8_t *at;
} Place;

/* A tensor (rows, cols) of F16, or packed in groups of 4 bits. A weight off the
 * GPU is copied to a slot on the GPU, `offset` bytes behind the slot's beginning. */
typedef struct {
    uint8_t *file; /* in the mapped checkpoint */
    Place rest;
    int rows, cols;
    size_t bytes, offset;
    bool packed;
} Weight;

/* The tensors of a layer: a bias follows each. W_Q to W_2 are section 3's matrices; the paper
 * leaves out the norms. */
enum { LN_1 = 0, W_Q = 2, W_K = 4, W_V = 6, W_O = 8, LN_2 = 10, W_1 = 12, W_2 = 14, NROLES = 16 };
SHARED Weight (*layer)[NROLES]; /* (l) */
SHARED size_t *slab_bytes;      /* (l): bytes that a layer has off the GPU */

/* The tensors outside the layers are always on the GPU. */
enum { TOKENS, POSITIONS, LAST_NORM, LAST_BIAS, NGLOBALS };
SHARED Weight outside[NGLOBALS];

/* A prompt of s tokens and the tokens that follow it. Nothing is padded. */
typedef struct {
    const char *text;
    int *token, s, generated;
    bool ended;             /* True after </s>. */
    size_t row;             /* its first row in the hidden state of its batch */
    int room;               /* how many tokens its cache can hold */
    Tier kv_tier, act_tier; /* where its cache and its activations rest */
    uint8_t *kv;            /* (l, k and v, room, kv_row) */
    float *act;             /* (s, h1) */
    size_t staged[NTIERS];  /* where its cache begins in a staging slot of that tier */
} Sequence;
SHARED Sequence *prompts;
SHARED int nprompts, longest, generation_length,
    threads; /* longest: tokens of the longest prompt */

/* A square of Figure 3: token, layer and batch. Layer l is the head. */
typedef struct {
    int i, j, k;
} Square;

/* One of Figure 4's six calls: a move of some kind of data, down or up, or COMPUTE. */
typedef struct {
    Kind kind;
    Square at;
    bool down; /* True for a store, false for a load and for COMPUTE. */
} Op;
SHARED __thread Op doing; /* what this thread is busy with; most functions of compute read it */

/* A block has K GPU batches; batch k has the sequences from batch[k] up to batch[k + 1]. */
enum { MAX_BATCHES = 1 << 16 }; /* also the largest whole number that a flag may give */
SHARED int K;
SHARED Sequence *batch[MAX_BATCHES + 1];

/* Buffers on the GPU: two slots for a layer's weights, for the cache of a batch, and for its hidden
 * state. With delegation the CPU has slots for the cache, too. */
SHARED uint8_t *weight_slot[2], *stage[2][2]; /* stage[tier][slot] */
SHARED float *x_slot[2];                      /* (rows, h1) */

/* The workspace of the batch that computes. */
SHARED float *norm_x, *x_Q, *x_K, *x_V,
    *attended,                /* (rows, h1); attended is what w_O is applied to */
    *ffn,                     /* (rows, h2) */
    *logits;                  /* (gbs, vocab) */
SHARED float *query, *result; /* (gbs, h1), on the CPU, for delegation */
SHARED float *scratch;        /* (threads, scratch_floats) */

SHARED size_t kv_row, scratch_floats; /* kv_row: bytes of a token's k */

enum { GROUP = 64 }; /* 5: numbers that share a minimum and a scale */

/* What later chapters define. */
typedef void Loop(void *arg, int thread, int first, int n);
void post(int number, Op op), synchronize(void);
void note(int track, double begin, double end, size_t bytes);
void parallel(Loop *loop, void *arg, int n, double work);
void travel(Place to, Place from, size_t bytes), await(void), sleep_off(void);
void widen(float *to, const void *f16s, size_t n), narrow(void *f16s, const float *from, size_t n);
void pack(uint8_t *to, const float *x, int n), unpack(float *x, const uint8_t *from, int n);
size_t packed_bytes(int n);
bool is_sparse(void);
void keep_top(float *weight, float *all, int n);
void fill_weight(Weight *w);
double now(void); /* seconds */

/* What computes in the GPU's memory, or depends on it: here, or in mini.cu. */
void layernorm(float *y, const float *x, Weight *w, int rows);
void linear(float *y, const float *x, Weight *w, size_t rows, bool add);
void relu(float *x, size_t n), round_to_f16(float *x, size_t n);
void keep_rows(uint8_t *to, const float *x, int rows);
void attend_on_gpu(Sequence *begin, Sequence *end);
void embed(Sequence *q, float *x), choose_tokens(Sequence *begin, Sequence *end, float *x);
void place_buffers(size_t rows);
void *open_memory(Tier t, size_t bytes);
void measure_gpu(double *constants);

/* Ends the program with one line for the user. Status 2 is wrong use, or what does not fit. */
#define die(status, ...)                       \
    do {                                       \
        fprintf(stderr, "mini: " __VA_ARGS__); \
        fputc('\n', stderr);                   \
        _exit(status);                         \
    } while (0)

#ifndef __cplusplus /* mini.cu needs no more. */

const char *tier_name[] = {"GPU", "CPU", "disk"};

/* Returns n elements that are all zeros. */
void *allocate(size_t n, size_t size) {
    void *memory = calloc(n + 1, size);
    if (!memory)
        die(1, "no memory for %zu x %zu bytes", n, size);
    return memory;
}

long min(long a, long b) { return a < b ? a : b; }
long max(long a, long b) { return a > b ? a : b; }
Place on(Tier tier, void *at) { return (Place){tier, at}; }

// -------------------------------------------------------------------------------------------------
// Figure 4: the block schedule with overlapping (4.1, 4.2)
//
// Generation is a grid of squares (i, j, k). The squares of one token and layer share the layer's
// weights, so the paper computes them together: down a column of K batches, then down the next
// (Figure 3b; with one batch this is row by row, Figure 3a). generate() is the paper's loop, call
// for call: while square (i, j, k) computes, the data of the squares around it moves. It is easy to
// miss that k - 1 and k + 1 may leave the column: the first square of a column follows the last
// square of the column before, and its last square is followed by the first square of the next.
//
// clang-format off
//               layer j                                        layer j + 1
//          +---------------+
//   k - 1  |   computed    |  store_activation, store_cache
//          +---------------+                               +---------------+
//     k    | COMPUTES NOW  |  compute          load_weight |  part k of K  |
//          +---------------+                               +---------------+
//   k + 1  |     next      |  load_activation, load_cache
//          +---------------+
//
// The two weight slots while three columns of two squares compute. Part 0 of the next layer comes
// beside the first square of a column, part 1 beside the second, into the slot that is free:
//
//   computing  | (j, 0)        (j, 1)    | (j+1, 0)      (j+1, 1)  | (j+2, 0)      (j+2, 1)
//   -----------+-------------------------+-------------------------+------------------------
//   one slot   | layer j is used         | j+2: part 0   part 1    | layer j+2 is used
//   the other  | j+1: part 0   part 1    | layer j+1 is used       | j+3: part 0   part 1
// clang-format on
//
// Column l follows the layers. It is the head, which makes the next token. A square of the head
// needs one load, that of its hidden state, and no store. While it computes, the results of the
// square before it are stored, and the weights of layer 0 are loaded for the next token. The head's
// own matrix is always on the GPU and uses no weight slot. That is why slot_of() counts l columns a
// token, and buffer_of() l + 1.
// -------------------------------------------------------------------------------------------------

typedef void Figure4(int i, int j, int k);
Figure4 load_weight, store_activation, store_cache, load_cache, load_activation, compute;
bool begin_token(int i);

/* Generates one token after another for each sequence of the block. */
void generate(void) {
    int num_layers = l + 1, num_gpu_batches = K;
    for (int k = 0; k < num_gpu_batches; k++)
        load_weight(0, 0, k); /* No square before the first could load these. */
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

/* Returns the rows of a sequence in the squares of token i: in prefill (i = 0) its prompt, in
 * decoding its newest token (section 3). */
int rows_of(Sequence *q, int i) {
    if (q->ended)
        return 0;
    return i ? 1 : q->s;
}

/* Marks the sequences that have ended, and gives the others their rows. Nothing moves meanwhile.
 * Returns false if no sequence is left. */
bool begin_token(int i) {
    int all = 0;
    for (int k = 0; k < K; k++) {
        int row = 0;
        for (Sequence *q = batch[k]; q < batch[k + 1]; q++) {
            q->ended |= i && q->token[q->s + i - 1] == eos;
            q->row = row;
            row += rows_of(q, i);
        }
        all += row;
    }
    return all > 0;
}

/* Finds the square that k = -1 or k = K means. k = -1 is the last batch of the column before this
 * one, and k = K is the first batch of the next column. Columns are numbered through all tokens: i
 * (l + 1) + j. Returns false before the first square of a block and after its last one. */
bool find_square(int *i, int *j, int *k) {
    long columns = l + 1, column = *i * columns + *j + (*k >= K) - (*k < 0);
    *k = (*k + K) % K;
    *i = column / columns;
    *j = column % columns;
    return column >= 0 && *i < generation_length;
}

/* Returns which of two buffers is this square's. The squares right behind and ahead of it have the
 * other one. */
int buffer_of(Square at) { return ((at.i * (l + 1L) + at.j) * K + at.k) % 2; }

/* Returns the slot of a layer's weights. Layer 0 of a token follows the last layer of the one
 * before, so that slots alternate also where l is odd. */
uint8_t *slot_of(Square at) { return weight_slot[((long)at.i * l + at.j) % 2]; }

// -------------------------------------------------------------------------------------------------
// A fast product, y += x w^T (skip this chapter at first)
//
// The paper calls cuBLAS for its products. add_product() does their work here, and dot() that of
// attention: all that is fast in this program. The model begins in the next chapter.
// -------------------------------------------------------------------------------------------------

/* A matrix w has one row for each output, (out, in). Its rows are widened a panel at a time: GROUP
 * rows of PANEL columns. MT rows of x are multiplied by a row of w at once, so that its numbers are
 * read once for all of them. VL is the number of floats in the machine's widest vector, at most 16;
 * all sizes of OPT are multiples of 16. */
enum { VL = __BIGGEST_ALIGNMENT__ < 16 ? 4 : __BIGGEST_ALIGNMENT__ / 4, MT = 8, PANEL = 256 };
typedef float Floats __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16)));

/* Returns the sum of a vector's floats, four at a time: products make many such sums. */
float total(Floats sum) {
    Four all = {0}, part[VL / 4];
    memcpy(part, &sum, sizeof sum);
    for (int e = 0; e < VL / 4; e++)
        all += part[e];
    return all[0] + all[1] + all[2] + all[3];
}

/* Returns the dot product of a and b. */
float dot(const float *a, const float *b, int n) {
    Floats sum = {0};
    for (int d = 0; d < n; d += VL)
        sum += *(Floats *)(a + d) * *(Floats *)(b + d);
    return total(sum);
}

/* Returns a tensor's bytes on the GPU: its own, or those in the layer's slot. Every row of the
 * batch is multiplied by all tensors of the layer, those at home on the GPU (wg) and those that
 * have come through the slot (wc, wd): the percentages divide the weights, not the rows. */
uint8_t *weight_at(Weight *w) {
    return w->rest.tier == TIER_GPU ? w->rest.at : slot_of(doing.at) + w->offset;
}

#ifndef GPU

/* Writes columns c to c + n - 1 of a group of w's rows as floats, (GROUP, PANEL). Packed weights
 * are unpacked here, "before doing computation" (5): each column is a group. Unlike a packed cache
 * they become F16 again. */
void fill_panel(float *panel, Weight *w, size_t group, int outputs, size_t c, int n) {
    size_t cols = w->cols;
    f16 *plain = (f16 *)weight_at(w) + group * GROUP * cols + c, half[GROUP];
    float column[GROUP];
    for (int o = 0; o < outputs && !w->packed; o++)
        widen(panel + o * PANEL, plain + o * cols, n);
    for (int e = 0; e < n && w->packed; e++) {
        unpack(column, weight_at(w) + (group * cols + c + e) * packed_bytes(GROUP), outputs);
        narrow(half, column, outputs);
        widen(column, half, outputs);
        for (int o = 0; o < outputs; o++)
            panel[o * PANEL + e] = column[o];
    }
}

/* A product to add: y += x w^T, for x (rows, in) and w (out, in). */
typedef struct {
    float *y;
    const float *x;
    Weight *w;
    int rows;
} Product;

/* Adds the products of MT rows with columns c to c + n - 1 of row o of the matrix, which are at
 * w. x lies in a buffer that has MT rows more than needed; nothing is added for those. */
void tile(Product *a, int row, int o, const float *w, int c, int n) {
    size_t in = a->w->cols, out = a->w->rows;
    const float *x = a->x + row * in + c;
    Floats sum[MT] = {{0}};
    for (int e = 0; e < n; e += VL)
        for (int r = 0; r < MT; r++)
            sum[r] += *(Floats *)(x + r * in + e) * *(Floats *)(w + e);
    for (int r = 0; r < MT; r++)
        if (row + r < a->rows)
            a->y[(row + r) * out + o] += total(sum[r]);
}

/* Adds groups first to first + n - 1 of a product's outputs, a panel after the other. */
void product_loop(void *arg, int thread, int first, int n) {
    Product *a = arg;
    float *panel = scratch + thread * scratch_floats;
    for (int group = first; group < first + n; group++)
        for (int c = 0; c < a->w->cols; c += PANEL) {
            int cols = min(PANEL, a->w->cols - c), outputs = min(GROUP, a->w->rows - group * GROUP);
            fill_panel(panel, a->w, group, outputs, c, cols);
            for (int row = 0; row < a->rows; row += MT)
                for (int o = 0; o < outputs; o++)
                    tile(a, row, group * GROUP + o, panel + o * PANEL, c, cols);
        }
}

/* Computes y += x w^T in all threads that compute. */
void add_product(float *y, const float *x, Weight *w, int rows) {
    Product a = {y, x, w, rows};
    parallel(product_loop, &a, (w->rows + GROUP - 1) / GROUP, 1. * rows * w->rows * w->cols);
}

// -------------------------------------------------------------------------------------------------
// compute(i, j, k): OPT's layer (section 3)
//
//   x_Q = ln(x) w_Q, x_K and x_V likewise      x_Out = softmax(x_Q x_K^T / sqrt(hd)) x_V w_O + x
//                                              x = relu(ln(x_Out) w_1) w_2 + x_Out
//
// Section 3 gives these formulas; every product adds a bias, too. compute() finds the weights in
// the layer's slot and the past keys and values where load_cache() has put them, and appends the
// new ones. Most functions below do not pass the square around: each thread has it in `doing`. With
// delegation (4.2) the CPU attends, because in decoding it is cheaper to move a query down than a
// cache up. It is easy to miss that x is a float everywhere, while weights and cache are F16 or
// packed: x_Q, x_K and x_V are rounded to F16, as the cache keeps them.
// -------------------------------------------------------------------------------------------------

/* Computes y = x w + b, or adds it to y. The bias follows its matrix. */
void linear(float *y, const float *x, Weight *w, size_t rows, bool add) {
    widen(scratch, weight_at(w + 1), w->rows);
    for (size_t row = 0; row < rows; row++) {
        float *to = y + row * w->rows;
        for (int o = 0; o < w->rows; o++)
            to[o] = scratch[o] + (add ? to[o] : 0);
    }
    add_product(y, x, w, rows);
}

/* Computes y = (x - mean) / sqrt(var + 1e-5) * w + b, row by row. */
void layernorm(float *y, const float *x, Weight *w, int rows) {
    float *gain = scratch, *bias = gain + h1;
    widen(gain, weight_at(w), h1);
    widen(bias, weight_at(w + 1), h1);
    for (int row = 0; row < rows; row++, x += h1, y += h1) {
        float mean = 0, var = 0;
        for (int c = 0; c < h1; c++)
            mean += x[c] / h1;
        for (int c = 0; c < h1; c++)
            var += (x[c] - mean) * (x[c] - mean) / h1;
        for (int c = 0; c < h1; c++)
            y[c] = (x[c] - mean) / sqrtf(var + 1e-5f) * gain[c] + bias[c];
    }
}

/* Replaces negative numbers by 0. */
void relu(float *x, size_t n) {
    for (size_t e = 0; e < n; e++)
        x[e] = x[e] < 0 ? 0 : x[e];
}

/* Rounds to F16. `attended` is free until attend() writes it, and lends its bytes. */
void round_to_f16(float *x, size_t n) {
    narrow(attended, x, n);
    widen(x, attended, n);
}

/* Writes rows of k or v as the cache keeps them: as F16, or in groups along the hidden dimension of
 * each head (5). */
void keep_rows(uint8_t *to, const float *x, int rows) {
    if (!policy.compress_cache)
        narrow(to, x, (size_t)rows * h1);
    for (int head = 0; head < rows * nh && policy.compress_cache; head++)
        pack(to + head * packed_bytes(hd), x + head * hd, hd);
}

#endif

/* Replaces scores by their softmax. The largest is taken off, so that exp does not overflow. */
void softmax(float *score, int n) {
    float most = score[0], sum = 0;
    for (int t = 1; t < n; t++)
        most = fmaxf(most, score[t]);
    for (int t = 0; t < n; t++) {
        score[t] = expf(score[t] - most);
        sum += score[t];
    }
    for (int t = 0; t < n; t++)
        score[t] /= sum;
}

/* Computes o += p v. */
void add_weighed(float *restrict o, float p, const float *restrict v, int n) {
    for (int d = 0; d < n; d++)
        o[d] += p * v[d];
}

// ---- Where the keys and values are
//
// clang-format off
//   The k and v of a sequence whose cache rests on disk:
//
//           prefill, i = 0      decoding, delegated                     decoding, not delegated
//
//   GPU     x_K, x_V            x_K, x_V      x_Q          attended     x_K, x_V
//              | append            | append    | send_row    ^             | append
//              v                   |           v             | send_row    v
//           the slot               |         query        result        the slot  -> attend()
//              |                   v           |             ^             |      ^
//   CPU        |                the slot  ->   +- attend() --+             |      |
//              |                   |      ^                                |      |
//              v store_cache       v      | load_cache                     v      | load_cache
//   disk    q->kv               q->kv ----+                             q->kv ----+
// clang-format on
//
// A slot is one of stage[tier]. In prefill attend() reads x_K and x_V themselves. What the picture
// shows of the disk holds for a cache on the CPU as well, if the GPU attends to it.
//
// A cache may also rest where attention is computed: on the GPU, or on the CPU with delegation.
// Then it needs no slot. kv_near() returns kv_home(), append() writes new k and v there, and
// nothing is loaded or stored. But delegation begins with decoding: in prefill, a cache on the CPU
// is appended to the GPU's slot and stored from there.

/* Returns true if the CPU attends for this sequence: with computation delegation (4.2), in
 * decoding, to a cache that is not on the GPU. */
bool is_delegated(Sequence *q, int i) { return i && policy.delegated && q->kv_tier != TIER_GPU; }

/* Returns where k (value 0) or v (value 1) of token t rests. */
Place kv_home(Sequence *q, int j, int t, int value) {
    return on(q->kv_tier, q->kv + ((2L * j + value) * q->room + t) * kv_row);
}

/* Returns how many tokens a sequence has in a staging slot of this side: with delegation the GPU
 * sees this cache in prefill only. stage[side][slot] holds one sequence after the other, from
 * q->staged[side] on, and of each k and then v: (k and v, staged_room, kv_row). */
long staged_room(Sequence *q, Tier side) {
    return side == TIER_GPU && policy.delegated ? q->s : q->room;
}

/* Returns where k or v of token t is for the processor that attends: at home or in a slot. */
Place kv_near(Sequence *q, Square at, int t, int value) {
    Tier side = is_delegated(q, at.i) ? TIER_CPU : TIER_GPU;
    if (q->kv_tier == side)
        return kv_home(q, at.j, t, value);
    return on(side, stage[side][buffer_of(at)] + q->staged[side] +
                        (value * staged_room(q, side) + t) * kv_row);
}

/* Returns one head of k or v of token t as floats. In prefill these are the floats that were just
 * computed. In decoding they are read from the cache and written to `some`, which has room for
 * them. */
float *head_of(Sequence *q, int t, int value, int head, float *some) {
    size_t bytes = kv_row / nh;
    if (doing.at.i == 0)
        return (value ? x_V : x_K) + (q->row + t) * h1 + head * hd;
    Place near = kv_near(q, doing.at, t, value), home = kv_home(q, doing.at.j, t, value);
    near.at += head * bytes;
    home.at += head * bytes;
    /* With sparse attention load_cache() brings k alone. If v has its home on another tier, it is
     * sent now, because its token has been chosen. The newest v is here already: append() wrote it.
     */
    bool comes_late = is_sparse() && value && t < q->s + doing.at.i - 1 && near.at != home.at;
    if (comes_late)
        travel(near, home, bytes);
    /* Rows lie so far apart that the processor does not foresee the next ones: we name them. */
    __builtin_prefetch(near.at + 16 * kv_row);
    __builtin_prefetch(near.at + 16 * kv_row + bytes - 1);
    if (policy.compress_cache)
        unpack(some, near.at, hd);
    else
        widen(some, near.at, hd);
    return some;
}

/* Computes attended = softmax(x_Q x_K^T / sqrt(hd)) x_V; an iteration is one head of one sequence.
 * No token sees those behind it. With sparse attention few weights are kept, as shares of all
 * tokens (5). */
void attend(void *arg, int thread, int first, int n) {
    Sequence *begin = arg;
    int i = doing.at.i;
    float *some = scratch + thread * scratch_floats, *score = some + hd;
    for (int pair = first; pair < first + n; pair++) {
        Sequence *q = begin + pair / nh;
        int head = pair % nh;
        bool below = is_delegated(q, i);
#ifdef GPU
        if (!below)
            continue; /* attend_on_gpu() serves it. */
#endif
        for (int row = 0; row < rows_of(q, i); row++) {
            size_t element = (q->row + row) * h1 + head * hd;
            int len = i ? q->s + i : row + 1;
            float *x = (below ? query : x_Q) + element, *o = (below ? result : attended) + element;
            for (int t = 0; t < len; t++)
                score[t] = dot(x, head_of(q, t, 0, head, some), hd) / sqrtf(hd);
            softmax(score, len);
            if (i && is_sparse())
                keep_top(score, score + len, len);
            memset(o, 0, hd * sizeof *o);
            for (int t = 0; t < len; t++)
                if (score[t] >= 0)
                    add_weighed(o, score[t], head_of(q, t, 1, head, some), hd);
        }
        sleep_off(); /* head_of() has copied v at once, but it may not have arrived yet. */
    }
}

/* Writes the new k and v where the square has its cache. Until attend() writes it, `attended` lends
 * them room on the GPU if they travel on; the two rows need no more than its floats. */
void append(Sequence *q) {
    int i = doing.at.i, past = i ? q->s + i - 1 : 0, rows = rows_of(q, i);
    for (int value = 0; value < 2 && rows; value++) {
        size_t element = q->row * h1;
        Place near = kv_near(q, doing.at, past, value);
        bool leaves = near.tier != TIER_GPU;
        uint8_t *to = leaves ? (uint8_t *)(attended + element) + value * kv_row : near.at;
        keep_rows(to, (value ? x_V : x_K) + element, rows);
        if (leaves)
            travel(near, on(TIER_GPU, to), kv_row);
    }
}

/* Moves a delegated sequence's query down, or the result up: 4 h1 bytes each (4.2). */
void send_row(Sequence *q, bool down) {
    size_t element = q->row * h1, bytes = h1 * sizeof(float);
    if (q->ended || !is_delegated(q, doing.at.i))
        return;
    if (down)
        travel(on(TIER_CPU, query + element), on(TIER_GPU, x_Q + element), bytes);
    else
        travel(on(TIER_GPU, attended + element), on(TIER_CPU, result + element), bytes);
}

// ---- The layer

/* Writes the x_Out of section 3's formula over x. */
void attention(Sequence *begin, Sequence *end, float *x, size_t rows) {
    size_t size = rows * h1;
    Weight *w = layer[doing.at.j];
    float *qkv[] = {x_Q, x_K, x_V};
    layernorm(norm_x, x, w + LN_1, rows);
    for (int m = 0; m < 3; m++) {
        linear(qkv[m], norm_x, w + W_Q + 2 * m, rows, false);
        round_to_f16(qkv[m], size);
    }
    for (Sequence *q = begin; q < end; q++) {
        append(q);
        send_row(q, true);
    }
    await(); /* The CPU has k, v and queries. */
#ifdef GPU
    attend_on_gpu(begin, end); /* It computes while attend() serves what is delegated. */
#endif
    /* A row meets the k of at most longest + i tokens: an upper bound on the work. */
    parallel(attend, begin, (end - begin) * nh, size * (longest + doing.at.i));
    for (Sequence *q = begin; q < end; q++)
        send_row(q, false);
    await(); /* `attended` is complete. */
    linear(x, attended, w + W_O, rows, true);
}

/* Computes x = relu(ln(x_Out) w_1) w_2 + x_Out in place. */
void mlp(float *x, size_t rows) {
    Weight *w = layer[doing.at.j];
    layernorm(norm_x, x, w + LN_2, rows);
    linear(ffn, norm_x, w + W_1, rows, false);
    relu(ffn, rows * h2);
    linear(x, ffn, w + W_2, rows, true);
    await(); /* A GPU computes behind the CPU's back. */
}

#ifndef GPU

/* Writes the hidden state before layer 0: the token's row of one table, and the row of its position
 * in another, which begins with two rows that OPT does not use. */
void embed(Sequence *q, float *x) {
    int i = doing.at.i;
    for (int t = 0; t < rows_of(q, i); t++) {
        size_t position = i ? q->s + i - 1 : t;
        widen(x, (f16 *)outside[TOKENS].rest.at + (size_t)q->token[position] * h1, h1);
        widen(norm_x, (f16 *)outside[POSITIONS].rest.at + (position + 2) * h1, h1);
        add_weighed(x, 1, norm_x, h1);
        x += h1;
    }
}

/* Computes the logits of each sequence's last row, and takes the token with the largest. */
void choose_tokens(Sequence *begin, Sequence *end, float *x) {
    size_t n = 0;
    for (Sequence *q = begin; q < end; q++)
        if (!q->ended) {
            size_t last = q->row + rows_of(q, doing.at.i) - 1;
            /* The head attends to nothing, so `attended` holds the rows of its norm. */
            layernorm(attended + n * h1, x + last * h1, &outside[LAST_NORM], 1);
            n++;
        }
    memset(logits, 0, sizeof *logits * n * vocab);
    add_product(logits, attended, &outside[TOKENS], n);
    float *logit = logits;
    for (Sequence *q = begin; q < end; q++) {
        if (q->ended)
            continue;
        int best = 0;
        for (int t = 1; t < vocab; t++)
            best = logit[t] > logit[best] ? t : best;
        q->token[q->s + q->generated++] = best;
        logit += vocab;
    }
}

#endif

/* Returns the buffer of a square's hidden state. A batch alone in its block keeps it in one. */
float *hidden_state(Square at) { return x_slot[K > 1 ? buffer_of(at) : 0]; }

/* Computes a square: a layer of OPT for the rows of one batch, or the head. */
void compute(int i, int j, int k) {
    Sequence *begin = batch[k], *end = batch[k + 1];
    int rows = end[-1].row + rows_of(end - 1, i);
    double start = now();
    doing = (Op){COMPUTE, {i, j, k}, false};
    float *x = hidden_state(doing.at);
    for (Sequence *q = begin; q < end && j == 0; q++)
        embed(q, x + q->row * h1);
    if (j == l)
        choose_tokens(begin, end, x);
    else {
        attention(begin, end, x, rows);
        mlp(x, rows);
    }
    note(COMPUTE, start, now(), 0);
}

// -------------------------------------------------------------------------------------------------
// The five moves of Figure 4 (4.2)
//
// Five of the six calls in Figure 4's loop are moves; the sixth is compute. Each kind of data has a
// thread of its own, which makes its moves in the order of the calls. While a square computes in
// one of two buffers, the other one is emptied and filled: first it still holds the results of the
// square before, which are stored; then the data of the next square are loaded into it. So two
// buffers of a kind are enough, and no move touches what is being computed.
// compute() sends bytes, too, and waits for them: new k and v that go to the CPU (append), queries
// and results (send_row), and sparse v (head_of).
// It is easy to miss that a load of the cache brings the past alone: the newest k and v are made by
// the square itself.
// -------------------------------------------------------------------------------------------------

/* Brings part k of K of a layer's weights off the GPU to its slot. A part is a range of the slot's
 * lines of 64 bytes, whatever tensors they belong to. */
void move_weight(void) {
    Square at = doing.at;
    size_t lines = slab_bytes[at.j] / 64, from = lines * at.k / K * 64,
           to = lines * (at.k + 1) / K * 64;
    for (Weight *w = layer[at.j]; w < layer[at.j] + NROLES; w++) {
        size_t begin = max(w->offset, from), end = min(w->offset + w->bytes, to);
        if (w->rest.tier == TIER_GPU || begin >= end)
            continue;
        travel(on(TIER_GPU, slot_of(at) + begin), on(w->rest.tier, w->rest.at + begin - w->offset),
               end - begin);
    }
}

/* Moves a batch's cache: down go the new k and v, up comes the past; with sparse attention only its
 * k. A cache that rests where it is used does not move. */
void move_cache(void) {
    Square at = doing.at;
    bool down = doing.down;
    int values = is_sparse() && !down ? 1 : 2;
    for (Sequence *q = batch[at.k]; q < batch[at.k + 1]; q++)
        for (int value = 0; value < values && !q->ended; value++) {
            int past = at.i ? q->s + at.i - 1 : 0, first = down ? past : 0;
            Place home = kv_home(q, at.j, first, value), near = kv_near(q, at, first, value);
            size_t bytes = (down ? rows_of(q, at.i) : past) * kv_row;
            if (near.at != home.at)
                travel(down ? home : near, down ? near : home, bytes);
        }
}

/* Moves a batch's hidden state: down after a layer, up before the next. */
void move_activation(void) {
    Square at = doing.at;
    bool down = doing.down;
    for (Sequence *q = batch[at.k]; q < batch[at.k + 1]; q++) {
        Place home = on(q->act_tier, q->act);
        Place here = on(TIER_GPU, hidden_state(at) + q->row * h1);
        travel(down ? home : here, down ? here : home, rows_of(q, at.i) * h1 * sizeof(float));
    }
}

void (*move_of[])(void) = {move_weight, move_cache, move_activation};

/* Posts the load of a layer's weights; behind the head comes layer 0 of the next token. */
void load_weight(int i, int j, int k) {
    if (j > l) {
        i++;
        j = 0;
    }
    if (i < generation_length && j < l && slab_bytes[j])
        post(WEIGHTS, (Op){WEIGHTS, {i, j, k}, false});
}

/* Posts a move of cache or activations, if that square has any. */
void ask(Kind kind, int i, int j, int k, bool down) {
    if (!find_square(&i, &j, &k) || (kind == ACTIVATIONS && K == 1))
        return;
    /* The head has no cache, and leaves no hidden state behind. */
    if (j == l && (down || kind == CACHE))
        return;
    /* A prefill has no past, and before layer 0 there is no hidden state. */
    if (!down && (kind == CACHE ? i : j) == 0)
        return;
    post(kind, (Op){kind, {i, j, k}, down});
}

void store_activation(int i, int j, int k) { ask(ACTIVATIONS, i, j, k, true); }
void store_cache(int i, int j, int k) { ask(CACHE, i, j, k, true); }
void load_cache(int i, int j, int k) { ask(CACHE, i, j, k, false); }
void load_activation(int i, int j, int k) { ask(ACTIVATIONS, i, j, k, false); }

// -------------------------------------------------------------------------------------------------
// Tensor placement (4.2)
//
// Six percentages say how much of each kind rests on the GPU and on the CPU; the disk has the rest.
// The paper gives whole tensors of the weights to a tier, but divides cache and activations by
// their elements, so that each tier may have a part of one tensor. Here a sequence's cache, and its
// activations, rest on one tier as a whole; that is this program's choice. place() deals things out
// one after the other. The GPU takes a thing if, with it, the GPU has at most its share of all that
// has been dealt. Otherwise the CPU takes it if, with it, GPU and CPU together have at most their
// two shares. Otherwise the disk takes it. With shares of 50, 25 and 25 percent, eight equal things
// go to disk, GPU, CPU, GPU, disk, GPU, CPU, GPU. So a share is met to the size of one thing; the
// report says what each tier has got. A batch that is alone in its block keeps its hidden state in
// one buffer of the GPU: then no activations rest anywhere. It is easy to miss that the GPU needs
// more than its shares: slots, the embeddings, and the workspace of a batch. `uncounted` is the sum
// of these bytes, but for the weight slots, which A.3 counts.
//
// clang-format off
//   bytes of the GPU                               taken by            counted by
//   -------------------------------------------------------------------------------------
//   embeddings, last norm (`outside`)              place_weights()     uncounted
//   weights, by wg                                 place_weights()     A.3, gpu_home
//   weight_slot, two                               place_weights()     A.3, gpu_w
//   cache, by cg; hidden states, by hg             place_batch()       A.3, gpu_home
//   stage[TIER_GPU], two; x_slot, two              place_block()       uncounted (*)
//   norm_x, x_Q to attended, ffn, logits, scratch  place_workspace()   uncounted (*)
// clang-format on
//
// (*) A.3's gpu_w counts parts of these as well. They are counted twice, on the safe side.
// -------------------------------------------------------------------------------------------------

/* A tier is one piece of memory, which is given out from its beginning. */
uint8_t *base[NTIERS];

/* Says what rests on the tiers. */
struct {
    size_t used[NTIERS], peak[NTIERS]; /* bytes */
    /* What each tier has been given of a kind, and all tiers: numbers of weights; tokens of cache
     * and activations, of the present block and then of the whole run. */
    double dealt[NKINDS][NTIERS + 1], met[NKINDS][NTIERS + 1];
} tiers;
size_t uncounted; /* bytes of the GPU that A.3 leaves out: neither shares nor weight slots */

/* Returns the tier of a thing of that size. */
Tier place(Kind kind, double size) {
    double so_far = size, allowed = 0; /* of GPU and then CPU together */
    int t = TIER_GPU;
    double *dealt = tiers.dealt[kind], *met = tiers.met[kind];
    dealt[NTIERS] += size;
    for (; t < TIER_DISK; t++) {
        so_far += dealt[t];
        allowed += policy.share[kind][t] * dealt[NTIERS];
        if (so_far <= allowed * (1 + 1e-9)) /* Sums of shares are rounded. */
            break;
    }
    dealt[t] += size;
    met[t] += size;
    met[NTIERS] += size;
    return t;
}

/* Takes the next bytes of a tier. While there are no tiers yet this only counts. */
void *take(Tier t, size_t bytes) {
    uintptr_t address = (uintptr_t)base[t] + tiers.used[t];
    tiers.used[t] += (bytes + 63) / 64 * 64;
    tiers.peak[t] = max(tiers.peak[t], tiers.used[t]);
    return (void *)address;
}

/* Takes n floats of a tier. */
float *floats(Tier t, size_t n) { return take(t, n * sizeof(float)); }

/* Returns true for the tensors that are packed: neither norms nor biases. */
bool is_matrix(int role) { return role % 2 == 0 && role != LN_1 && role != LN_2; }

/* Gives a tensor its home, and fills it. On disk that is the checkpoint itself, unless the tensor
 * has to be packed. */
void settle(Weight *w, Tier tier, bool fill) {
    w->bytes = sizeof(f16) * w->rows * w->cols;
    if (w->packed)
        w->bytes = w->rows / GROUP * w->cols * packed_bytes(GROUP);
    if (tier == TIER_DISK && !w->packed)
        w->rest = on(TIER_DISK, w->file);
    else {
        w->rest = on(tier, take(tier, w->bytes));
        if (fill)
            fill_weight(w);
    }
}

/* Places the weights. They are dealt through all layers, one layer after the other, so that each
 * layer is divided alike. */
void place_weights(bool fill) {
    size_t slot = 0;
    for (int g = 0; g < NGLOBALS; g++)
        settle(&outside[g], TIER_GPU, fill);
    uncounted = tiers.used[TIER_GPU];
    for (int j = 0; j < l; j++) {
        slab_bytes[j] = 0;
        for (int role = 0; role < NROLES; role++) {
            Weight *w = &layer[j][role];
            w->packed = policy.compress_weight && is_matrix(role);
            settle(w, place(WEIGHTS, 1. * w->rows * w->cols), fill);
            if (w->rest.tier == TIER_GPU)
                continue;
            w->offset = slab_bytes[j];
            slab_bytes[j] += (w->bytes + 63) / 64 * 64;
        }
        slot = max(slot, slab_bytes[j]);
    }
    weight_slot[0] = take(TIER_GPU, slot);
    weight_slot[1] = take(TIER_GPU, slot);
}

/* Places a batch's cache and activations, and returns its rows. staged: what a staging slot of each
 * tier has to hold. */
size_t place_batch(int k, size_t staged[NTIERS]) {
    size_t need[NTIERS] = {0}, rows = 0;
    for (Sequence *q = batch[k]; q < batch[k + 1]; q++) {
        rows += q->s;
        q->room = q->s + generation_length - 1;
        q->kv_tier = place(CACHE, q->room);
        q->kv = take(q->kv_tier, 2 * l * kv_row * q->room);
        if (K > 1) {
            q->act_tier = place(ACTIVATIONS, q->s);
            q->act = floats(q->act_tier, 1UL * q->s * h1);
        }
        memcpy(q->staged, need, sizeof need);
        if (q->kv_tier != TIER_GPU)
            need[TIER_GPU] += 2 * kv_row * staged_room(q, TIER_GPU);
        if (q->kv_tier == TIER_DISK && policy.delegated)
            need[TIER_CPU] += 2 * kv_row * staged_room(q, TIER_CPU);
    }
    for (int t = TIER_GPU; t <= TIER_CPU; t++)
        staged[t] = max(staged[t], need[t]);
    return rows;
}

/* Places the workspace of batches of so many rows and sequences. `scratch` is counted to the GPU,
 * but it serves any thread, also one that attends on the CPU; mini.cu places it there. */
void place_workspace(size_t rows, size_t gbs) {
    float **part[] = {&norm_x, &x_Q, &x_K, &x_V, &attended};
    for (int p = 0; p < 5; p++)
        *part[p] = floats(TIER_GPU, (rows + MT) * h1); /* MT: see tile(). */
    ffn = floats(TIER_GPU, (rows + MT) * h2);
    logits = floats(TIER_GPU, gbs * vocab);
    /* The largest use: a panel; scores of attention; a norm's weights or a bias. */
    scratch_floats = max(GROUP * PANEL, max(hd + 2 * (longest + generation_length), 2 * h1 + h2));
#ifdef GPU
    place_buffers(rows);
#else
    scratch = floats(TIER_GPU, threads * scratch_floats);
#endif
    if (policy.delegated) {
        query = floats(TIER_CPU, gbs * h1);
        result = floats(TIER_CPU, gbs * h1);
    }
}

/* Places a block: its sequences, the slots, the workspace. Returns its `uncounted` bytes. */
size_t place_block(Sequence *seq, int count) {
    size_t staged[NTIERS] = {0}, rows = 0;
    size_t gbs = min(policy.gbs, count);
    K = (count + gbs - 1) / gbs;
    for (int k = 0; k <= K; k++)
        batch[k] = seq + min(k * gbs, count);
    memset(tiers.dealt[CACHE], 0, 2 * sizeof *tiers.dealt); /* ACTIVATIONS follow. */
    for (int k = 0; k < K; k++)
        rows = max(rows, place_batch(k, staged));
    size_t end_of_homes = tiers.used[TIER_GPU]; /* A.3 counts what lies before it. */
    for (int slot = 0; slot < 2; slot++) {
        stage[TIER_GPU][slot] = take(TIER_GPU, staged[TIER_GPU]);
        stage[TIER_CPU][slot] = take(TIER_CPU, staged[TIER_CPU]);
        x_slot[slot] = floats(TIER_GPU, rows * h1);
    }
    place_workspace(rows, gbs);
    return tiers.used[TIER_GPU] - end_of_homes;
}

double generation_s; /* seconds */

/* Goes through the run: places the weights and then the blocks, each where the one before it was.
 * If it does not generate, it only counts bytes; otherwise it also fills the weights, and generates
 * block after block. */
void do_blocks(bool generates) {
    size_t mark[NTIERS], most = 0;
    long bls = 1L * policy.gbs * policy.num_gpu_batches;
    kv_row = policy.compress_cache ? nh * packed_bytes(hd) : h1 * sizeof(f16);
    memset(&tiers, 0, sizeof tiers);
    place_weights(generates);
    memcpy(mark, tiers.used, sizeof mark);
    for (long first = 0; first < nprompts; first += bls) {
        memcpy(tiers.used, mark, sizeof mark);
        most = max(most, place_block(prompts + first, min(bls, nprompts - first)));
        if (generates) {
            generation_s -= now();
            generate();
            generation_s += now();
        }
    }
    uncounted += most; /* The blocks share one place. */
}

// -------------------------------------------------------------------------------------------------
// Links and threads: how moving and computing overlap (4.2)
//
// On the paper's machine copies run on CUDA streams, beside the kernels. Here each kind of data has
// a thread that moves it, and the other threads compute. A link is a timeline: a copy begins when
// the link is free, and takes its bytes divided by the link's rate, or as long as the copy itself
// took, if that is longer. travel() copies the bytes at once, notes when they would have arrived,
// and returns; await() sleeps until then. It is easy to miss that synchronize() waits for the three
// movers only: compute() has returned by then, because the main thread computes.
// -------------------------------------------------------------------------------------------------

/* A link that no flag slows is as fast as memory. free_at: when all that was sent has arrived. */
struct Link {
    double free_at, seconds;
    size_t bytes;
} link_of[NLINKS];
pthread_mutex_t links = PTHREAD_MUTEX_INITIALIZER;
_Thread_local double arrival; /* of all that this thread has sent */

/* Returns the seconds of a clock that only goes forward. */
double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Accounts for bytes that went over one link or two from `start` to `end`: the disk's go by the
 * CPU, and the slower link sets the pace. */
void account(Tier to, Tier from, double start, double end, size_t bytes) {
    pthread_mutex_lock(&links);
    for (int t = min(to, from); t < max(to, from); t++) {
        /* Tiers t and t + 1 are joined by CTOG and GTOC, or by DTOC and CTOD: up is the first. */
        int c = (t == TIER_GPU ? CTOG : DTOC) + (to > from);
        struct Link *link = &link_of[c];
        double begin = fmax(link->free_at, start), rate = given_hw[CTOG_BDW + c];
        /* A fast link takes at least as long as the copy itself took. */
        double seconds = fmax(rate > 0 ? bytes / rate : 0, end - begin);
        link->free_at = begin + seconds;
        link->seconds += seconds;
        link->bytes += bytes;
        arrival = fmax(arrival, link->free_at);
        note(COMPUTE + 1 + c, begin, link->free_at, bytes);
    }
    pthread_mutex_unlock(&links);
}

/* Sleeps until all that this thread has sent has arrived on slowed links. */
void sleep_off(void) {
    double left;
    while ((left = arrival - now()) > 0) {
        struct timespec wait = {left, fmod(left, 1) * 1e9};
        nanosleep(&wait, NULL);
    }
}

#ifndef GPU

/* Sends bytes: copies them at once. */
void travel(Place to, Place from, size_t bytes) {
    double start = now();
    if (!bytes)
        return;
    memcpy(to.at, from.at, bytes);
    account(to.tier, from.tier, start, now(), bytes);
}

/* Waits until all that this thread has sent has arrived. */
void await(void) { sleep_off(); }

#endif

// ---- The threads
//
// clang-format off
//   The ring of a worker that has done 4 of 7 ops; an 8th op goes where its 4th was:
//
//           op 5      op 6      op 7     (op 4)
//         +---------+---------+---------+---------+
//         |  runs   |  waits  |  waits  | is free |
//         +---------+---------+---------+---------+
//           done % 4                      posted % 4
// clang-format on
//
// A place is free when its op is done, not when it is taken. Only the main thread posts.
//
// A square asks for two moves of a kind at most; only a block's first layer asks for K parts.

enum { RING = 4 };
typedef struct {
    Op ring[RING];
    long posted, done;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* Only one of the worker and the main thread can be waiting. */
} Worker;
Worker *worker; /* (NKINDS + threads - 1): those that move, then those that help to compute */

/* What the threads compute together: iterations 0 to shared_n - 1 of a loop, in one portion for
 * each thread. */
Loop *shared_loop;
void *shared_arg;
int shared_n, portions;

/* Runs one portion of them. */
void do_portion(long p) {
    int first = shared_n * p / portions, end = shared_n * (p + 1) / portions;
    shared_loop(shared_arg, p, first, end - first);
}

/* Makes the move that this thread is to do, and waits until it has arrived. */
void make_move(void) {
    double start = now();
    move_of[doing.kind]();
    await();
    note(doing.kind, start, now(), 0);
}

/* Does one op after the other, for ever: a move, or a portion of what is computed together. */
void *work(void *arg) {
    Worker *w = arg;
    pthread_mutex_lock(&w->mutex);
    for (;;) {
        while (w->done == w->posted)
            pthread_cond_wait(&w->changed, &w->mutex);
        pthread_mutex_unlock(&w->mutex);
        doing = w->ring[w->done % RING];
        if (doing.kind == COMPUTE)
            do_portion(w - worker - NKINDS);
        else
            make_move();
        pthread_mutex_lock(&w->mutex);
        w->done++;
        pthread_cond_signal(&w->changed);
    }
    return NULL;
}

/* Locks a worker as soon as it has at most so many ops left. */
void lock_when_left(Worker *w, int most) {
    pthread_mutex_lock(&w->mutex);
    while (w->posted - w->done > most)
        pthread_cond_wait(&w->changed, &w->mutex);
}

/* Gives a worker an op. Without overlapping, the main thread makes a move itself, at once. */
void post(int number, Op op) {
    Worker *w = &worker[number];
    if (policy.no_overlap && op.kind != COMPUTE) {
        doing = op;
        make_move();
        return;
    }
    lock_when_left(w, RING - 1);
    w->ring[w->posted++ % RING] = op;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

/* Waits until these workers have done all that they were given. */
void wait_for(int first, int end) {
    for (Worker *w = worker + first; w < worker + end; w++) {
        lock_when_left(w, 0);
        pthread_mutex_unlock(&w->mutex);
    }
}

/* Waits until the ops of the three movers have arrived. compute() has returned, so after this
 * nothing is in flight: Figure 4's synchronize. */
void synchronize(void) { wait_for(0, NKINDS); }

/* Runs iterations 0 to n - 1 in the threads that compute. A few multiplications are not worth
 * waking others. */
void parallel(Loop *loop, void *arg, int n, double work) {
    int helpers = work < 1e6 ? 0 : threads - 1;
    shared_loop = loop;
    shared_arg = arg;
    shared_n = n;
    portions = helpers + 1;
    for (int t = 0; t < helpers; t++)
        post(NKINDS + t, doing);
    do_portion(helpers);
    wait_for(NKINDS, NKINDS + helpers);
}

/* Starts the workers, which never end. */
void start_threads(void) {
    worker = allocate(NKINDS + threads, sizeof *worker);
    for (Worker *w = worker; w < worker + NKINDS + threads - 1; w++) {
        pthread_t id;
        pthread_mutex_init(&w->mutex, NULL);
        pthread_cond_init(&w->changed, NULL);
        if (pthread_create(&id, NULL, work, w))
            die(1, "a thread could not be started: lower --threads, or raise ulimit -u or -v");
    }
}

// ---- See it move
//
// --trace FILE writes what each mover, the main thread and each link did, and when, as slices in
// Chrome's trace format. https://ui.perfetto.dev shows such a file, and so does
// `python3 scripts/plot_trace.py --lanes FILE OUT.svg`. Where a slice of compute stands above
// slices of the links, the run overlaps.

FILE *trace;
double trace_begin;
const char *track_name[] = {"weights", "cache", "activations", "compute",
                            "ctog",    "gtoc",  "dtoc",        "ctod"};
const char *call_name[][2] = {{"load_weight", ""},
                              {"load_cache", "store_cache"},
                              {"load_activation", "store_activation"},
                              {"compute", ""}};

/* Begins the file, with the names of the tracks. */
void open_trace(const char *path) {
    trace = fopen(path, "w");
    if (!trace)
        die(1, "--trace %s: cannot be written", path);
    fprintf(trace,
            "{\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"tid\":0,"
            "\"args\":{\"name\":\"mini\"}}");
    for (int track = 0; track <= COMPUTE + NLINKS; track++)
        fprintf(trace,
                ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":%d,"
                "\"args\":{\"name\":\"%s\"}}",
                track, track_name[track]);
    trace_begin = now();
}

/* Notes what the thread was doing in that time. The track is its own, or that of the link it used.
 */
void note(int track, double begin, double end, size_t bytes) {
    double ns = rint((begin - trace_begin) * 1e9);
    if (!trace)
        return;
    fprintf(trace, /* in one call, so that threads do not mix their lines */
            ",\n{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":1,\"tid\":%d,"
            "\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"i\":%d,\"j\":%d,\"k\":%d,\"bytes\":%zu,\"phase\":\"%s\"}}",
            call_name[doing.kind][doing.down], track_name[track], track, ns / 1e3,
            (rint((end - trace_begin) * 1e9) - ns) / 1e3, doing.at.i, doing.at.j, doing.at.k, bytes,
            doing.at.i ? "decode" : "prefill");
}

/* Ends the file. */
void close_trace(void) {
    fprintf(trace, "\n]}\n");
    if (ferror(trace) | fclose(trace))
        die(1, "--trace: the file could not be written whole");
}

// -------------------------------------------------------------------------------------------------
// F16, and groups of 4 bits (5, group-wise quantization)
//
// The paper keeps weights and cache in 4 bits: each group of 64 numbers has its minimum and its
// maximum, and codes between them; weights are grouped along the output channel, the cache along
// the hidden dimension. A group is packed where it rests and while it moves, and unpacked just
// before it is used. A group of 64 has 36 bytes and not 128: 32 of codes, and 2 for each of two F16
// numbers; so 4.5 bits a number. It is easy to miss that the second number is not max but the scale
// (max - min) / 15, which unpacking needs.
// -------------------------------------------------------------------------------------------------

/* Widens F16 to floats: sign and other bits move to their places; a product adds 112 to the
 * exponent, and makes all numbers normal. */
void widen(float *to, const void *f16s, size_t n) {
    const f16 *from = f16s;
    for (size_t e = 0; e < n; e++) {
        uint32_t bits = (from[e] & 0x8000u) << 16 | (from[e] & 0x7fffu) << 13;
        memcpy(to + e, &bits, sizeof bits);
        to[e] *= 0x1p112f;
    }
}

/* Narrows floats to F16: to the nearest one, and of two to the even one. The product rounds what
 * F16 cannot hold as a normal number. */
void narrow(void *f16s, const float *from, size_t n) {
    f16 *to = f16s;
    for (size_t e = 0; e < n; e++) {
        float small = from[e] * 0x1p-112f;
        uint32_t bits;
        memcpy(&bits, &small, sizeof bits);
        uint32_t most = bits & 0x7fffffff, rounded = (most + 0xfff + (most >> 13 & 1)) >> 13;
        to[e] = (bits >> 16 & 0x8000) | (rounded < 0x7c00 ? rounded : 0x7c00);
    }
}

/* Returns the bytes of n numbers in groups; n is a multiple of 16. A group has minimum and scale as
 * F16, and then its codes: that of number e is in byte e / 32 * 16 + e % 16, in the low half where
 * e % 32 < 16. */
size_t packed_bytes(int n) {
    if (n > GROUP)
        return packed_bytes(GROUP) + packed_bytes(n - GROUP);
    return 4 + (n + 16) / 32 * 16;
}

/* Computes x_quant = round((x - min) / (max - min) * (2^b - 1)) with b = 4. The scale is rounded
 * up, so that code 15 reaches max. */
void pack(uint8_t *to, const float *x, int n) {
    float least = x[0], most = x[0], kept[2];
    f16 min_scale[2];
    if (n > GROUP) {
        pack(to + packed_bytes(GROUP), x + GROUP, n - GROUP);
        n = GROUP;
    }
    for (int e = 1; e < n; e++) {
        least = fminf(least, x[e]);
        most = fmaxf(most, x[e]);
    }
    float scale = (most - least) / 15; /* kept: minimum and scale as F16 has them. */
    narrow(min_scale, (float[]){least, scale}, 2);
    widen(kept, min_scale, 2);
    if (kept[1] < scale)
        min_scale[1]++;
    widen(kept, min_scale, 2);
    memset(to, 0, packed_bytes(n));
    memcpy(to, min_scale, sizeof min_scale);
    for (int e = 0; e < n && kept[1] > 0; e++) {
        unsigned code = fminf(15, rintf((x[e] - least) * (1 / kept[1])));
        to[4 + e / 32 * 16 + e % 16] |= code << e % 32 / 16 * 4;
    }
}

/* Computes x = min + scale x_quant. */
void unpack(float *x, const uint8_t *from, int n) {
    float kept[2];
    if (n > GROUP) {
        unpack(x + GROUP, from + packed_bytes(GROUP), n - GROUP);
        n = GROUP;
    }
    widen(kept, from, 2);
    for (int e = 0; e < n; e++) {
        int code = from[4 + e / 32 * 16 + e % 16] >> e % 32 / 16 * 4 & 15;
        x[e] = kept[0] + kept[1] * code;
    }
}

/* Writes a tensor of the checkpoint, packed if it is to be. Weights are grouped along the output
 * channel, which is their rows: the group of column c that begins in row g GROUP is number
 * g cols + c. */
void fill(uint8_t *to, Weight *w) {
    size_t cols = w->cols;
    if (!w->packed) {
        memcpy(to, w->file, w->bytes);
        return;
    }
    for (size_t group = 0; group < w->bytes / packed_bytes(GROUP); group++) {
        size_t row = group / cols * GROUP;
        f16 half[GROUP];
        float column[GROUP];
        for (int o = 0; o < GROUP; o++)
            memcpy(half + o, w->file + ((row + o) * cols + group % cols) * 2, 2);
        widen(column, half, GROUP);
        pack(to + group * packed_bytes(GROUP), column, GROUP);
    }
}

#ifndef GPU

/* Brings a tensor to where it rests. */
void fill_weight(Weight *w) { fill(w->rest.at, w); }

#endif

// -------------------------------------------------------------------------------------------------
// Sparse attention (5)
//
// The paper computes the weights of all tokens, from all keys, and then reads only the values of
// the few tokens with the largest weights. So move_cache() loads no v here, keep_top() chooses, and
// head_of() brings the v of a chosen token when attend() asks for it, with which nothing overlaps.
// The CPU then always attends to a cache off the GPU (choose_policy), so only v that rests on disk
// travels. It is easy to miss that the weights that are kept stay as they are: they do not sum to 1
// any more.
// -------------------------------------------------------------------------------------------------

bool is_sparse(void) { return policy.sparsity < 1; }

/* Returns how many of the n - 1 tokens before the newest one are kept. */
int sparse_top(int n) {
    /* 1e-9 is more than what rounding adds to a product. */
    return min(ceil(policy.sparsity * (n - 1) * (1 - 1e-9)), n - 1);
}

/* Sets the weights of all but the top tokens to -1. The newest token, n - 1, is always one of them.
 * The others are the ceil(sparsity (n - 1)) tokens before it with the largest weights; of equal
 * weights, those of the earlier tokens. `all` has room for n floats. */
void keep_top(float *weight, float *all, int n) {
    int top = sparse_top(n);
    memcpy(all, weight, n * sizeof *all);
    for (int t = 0; t < n - 1; t++) {
        int better = 0;
        for (int u = 0; u < n - 1; u++)
            better += (all[u] > all[t]) | ((all[u] == all[t]) & (u < t));
        if (better >= top)
            weight[t] = -1;
    }
}

// -------------------------------------------------------------------------------------------------
// A.3: the cost model, and Eq. 1
//
// Appendix A.3 writes each of five times of a layer, ctog, gtoc, dtoc, ctod and comp, as a linear
// function of the nine shares, in prefill (^p) and in generation (^g). The seconds T of the layer
// are the largest of the five, as if all overlapped completely. In a linear program such a maximum
// is one row for each: term <= T. More rows say that each tier holds its shares at its peak.
//
// The rows here are the paper's as printed, also where no machine behaves so: the CPU attends to
// all cache off the GPU, comp^g adds two processors that could work at once, and gpu_w^g holds a
// prompt's activations. Compression does not enter them: --policy finds the same T with
// --compress-weight and without. The rates of --hardware guide only the search; a run's links are
// slowed only by flags such as --ctog.
//
// It is easy to miss that a cost is linear in the shares only while the block is given: search()
// tries the blocks one by one. The paper's wn, cn and hn are wd, cd and hd here.
// -------------------------------------------------------------------------------------------------

enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, T_PRE, T_GEN, NVARS, NROWS = 31 };
const char *var_name[] = {"wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd", "T_pre", "T_gen"};

/* A linear program: minimize c x with x >= 0, where a x <= b in each of m rows. */
typedef struct {
    int m;
    double c[NVARS], a[NROWS][NVARS], b[NROWS], x[NVARS];
} Lp;

/* Adds a row. */
void add_row(Lp *lp, double b, double *a) {
    memcpy(lp->a[lp->m], a, sizeof lp->a[0]);
    lp->b[lp->m++] = b;
}
#define ROW(b, ...) add_row(lp, b, (double[NVARS]){__VA_ARGS__})

/* Returns the bytes of a layer's weights. */
double layer_weights(void) { return 8. * h1 * h1 + 4. * h1 * h2; }

/* Adds T >= ctog, gtoc, dtoc, ctod, comp in prefill (p = 1) or in generation (p = 0). A link's row
 * says that its bytes are at most rate x T. In a layer q new tokens of each sequence are computed.
 * The paper counts k and v of s + 1 tokens as made in prefill; this program makes those of s. */
void time_rows(Lp *lp, double s, int p) {
    double q = p ? s : 1, mean = s + generation_length / 2.,
           bls = 1. * policy.gbs * policy.num_gpu_batches;
    double weight = layer_weights(), act = 2 * q * h1 * bls;
    double stored = 4 * (p ? s + 1 : 1) * h1 * bls; /* k and v that are new */
    double loaded = p ? 0 : 4 * mean * h1 * bls;    /* k and v of the past */
    double sent = p ? stored : 0; /* A.3 leaves these out in generation; append() does send them. */
    double linear_s = bls * (8 * q * h1 * h1 + 4 * q * h1 * h2) / hw[MM_FLOPS][p];
    double att = 4 * bls * (p ? s * s : mean) * h1;
    double gpu_s = att / hw[BMM_FLOPS][p], cpu_s = att / hw[CPU_FLOPS][p];
    /* The bytes of a layer in generation; each divided by its link's rate is A.3's term:
     *   ctog^g = (wc + wd) weight + (hc + hd) act
     *   gtoc^g = (hc + hd) act
     *   dtoc^g = wd weight + hd act + cd loaded
     *   ctod^g = hd act + cd stored */
    double bytes[NLINKS][NVARS] = {
        /* ctog: weights and activations that are not on the GPU come up. */
        {[WC] = weight, [WD] = weight, [HC] = act, [HD] = act},
        /* gtoc: the new activations, and in prefill the new cache, go down. */
        {[CC] = sent, [CD] = sent, [HC] = act, [HD] = act},
        /* dtoc: all that rests on disk is read. */
        {[CD] = loaded, [WD] = weight, [HD] = act},
        /* ctod: all that is new and rests on disk is written. */
        {[CD] = stored, [HD] = act},
    };
    for (int c = 0; c < NLINKS; c++) {
        bytes[c][p ? T_PRE : T_GEN] = -hw[CTOG_BDW + c][p]; /* bytes - rate T <= 0 */
        add_row(lp, 0, bytes[c]);
    }
    /* comp^p = linear_s + gpu_s; comp^g = linear_s + cg gpu_s + (cc + cd) cpu_s. */
    if (p)
        ROW(-linear_s - gpu_s, [T_PRE] = -1);
    else
        ROW(-linear_s, [CG] = gpu_s, [CC] = cpu_s, [CD] = cpu_s, [T_GEN] = -1);
}

/* Adds gpu_peak = gpu_home + gpu_w < gmem: gpu_w has the largest of six terms, so there is a row
 * for each. q new tokens of a sequence attend to u. */
void gpu_rows(Lp *lp, double gmem, double s, int p) {
    double n = generation_length, gbs = policy.gbs, bls = gbs * policy.num_gpu_batches;
    double q = p ? s : 1, u = p ? s : s + n, weight = layer_weights();
    double qkv = gbs * (2 * q * h1 + 3 * (2 * q * h1));
    double att_1 = gbs * (2 * q * h1 + 2 * u * h1 + 2 * nh * q * u); /* and att_2 */
    double embed_w = gbs * (2 * q * h1 + 2 * q * h1);
    double mlp_1 = 2 * gbs * q * (h1 + h2); /* and mlp_2 */
    double fixed[] = {qkv, 0, 0, embed_w, mlp_1, mlp_1}, cg[] = {0, att_1, att_1, 0, 0, 0};
    double act = 2 * q * h1 * bls, cache = 4 * (s + n) * h1 * bls * l;
    /* gpu_home + gpu_w <= gmem, where gpu_home = wg weight l + hg act + cg cache, and
     *   gpu_w = 2 (1 - wg) weight + (1 - hg) 2 s h1 gbs + fixed[term] + cg cg[term].
     * Products with a share stay on the left side; the others go to the right. */
    for (int term = 0; term < 6; term++)
        ROW(gmem - 2 * weight - 2 * s * h1 * gbs - fixed[term], [WG] = weight * l - 2 * weight,
            [HG] = act - 2 * s * h1 * gbs, [CG] = cache + cg[term]);
}

/* Writes Eq. 1 for the policy's block: minimize T / bls, where T = T_pre l + T_gen (n - 1) l. It
 * also sets x to all on disk: from the time of this placement fill_tableau() takes its unit. */
void paper_lp(Lp *lp, double *mem, double s) {
    double n = generation_length, gbs = policy.gbs, bls = gbs * policy.num_gpu_batches;
    double weight = layer_weights(), cache = 4 * (s + n) * h1 * bls * l;
    double act = 2 * s * h1 * bls, act_w = 2 * s * h1 * gbs;
    *lp = (Lp){.c = {[T_PRE] = l / bls, [T_GEN] = (n - 1) * l / bls}};
    lp->x[WD] = lp->x[CD] = lp->x[HD] = 1;
    for (int p = 1; p >= 0; p--) {
        time_rows(lp, s, p);
        gpu_rows(lp, mem[TIER_GPU], s, p);
    }
    /* cpu_peak^p: what rests there; (1 - wg) weight + (1 - hg) act_w of the layer in use. */
    ROW(mem[TIER_CPU] - weight - act_w, [WC] = weight * l, [HC] = act, [CC] = cache, [WG] = -weight,
        [HG] = -act_w);
    /* cpu_peak^g: what rests there; attention's scores and output; what passes by from disk. */
    ROW(mem[TIER_CPU] - 2 * nh * (s + n) * gbs - 2 * h1 * gbs, [WC] = weight * l,
        [HC] = 2 * h1 * bls, [CC] = cache, [WD] = weight, [HD] = 2 * 2 * h1 * gbs,
        [CD] = 2 * 4 * (s + n) * h1 * gbs);
    /* nvme_peak */
    ROW(mem[TIER_DISK], [WD] = weight * l, [HD] = act, [CD] = cache);
    /* The shares of each kind have the sum 1: at most 1, and at least 1. */
    for (int sign = 1; sign >= -1; sign -= 2) {
        ROW(sign, [WG] = sign, [WC] = sign, [WD] = sign);
        ROW(sign, [CG] = sign, [CC] = sign, [CD] = sign);
        ROW(sign, [HG] = sign, [HC] = sign, [HD] = sign);
    }
}

// -------------------------------------------------------------------------------------------------
// Simplex (4.3: "can be solved very fast because there are only 9 variables")
//
// The paper says only that a linear programming solver does this. A row's slack is the difference
// of its two sides, b - a x: with it, a x + slack = b. One variable of each row is basic; the
// others are 0, and the tableau says how the basic ones and the cost change when one of these
// grows. A pivot exchanges two variables, so that the cost falls; when none would lower it, x is
// the best.
//
// Phase 1 finds a point where all rows hold. It adds one variable, AUXILIARY, with the factor -1 to
// every row: if it is large enough, all rows hold. Phase 1 pivots until it is 0. Phase 2 minimizes
// the cost. Pivots of phase 1 change the row COST as well, so phase 2 can begin at once.
//
// It is easy to miss that a pivot need not lower the cost: a series of such pivots could return to
// its beginning, and the search would never end. Bland's rule prevents this: of several variables
// that could enter or leave, take the one with the least number.
//
// The picture is the tableau before fill_tableau() makes AUXILIARY basic by its last pivot.
//
// clang-format off
//                 other[0]     other[1]     ...  AUXILIARY  |  RIGHT
//              +--------------------------------------------+------------------------------
//   basic[0]   |  cell[0][0]   cell[0][1]   ...     -1      |  the value of basic[0]
//   basic[1]   |  cell[1][0]   cell[1][1]   ...     -1      |  the value of basic[1]
//   ...        |                                            |  ... while the others are 0
//              +--------------------------------------------+------------------------------
//   COST       |  what one unit of other[v] costs           |  minus the cost, for phase 2
//   PHASE_1    |     0            0         ...      1      |  minus AUXILIARY, for phase 1
//
//   Row i says: basic[i] + sum of cell[i][v] x other[v] = cell[i][RIGHT].
// clang-format on
// -------------------------------------------------------------------------------------------------

enum {
    AUXILIARY = NVARS,      /* a column and its variable: how far phase 1 relaxes all rows */
    RIGHT = NVARS + 1,      /* the column of the right-hand sides */
    COST = NROWS,           /* the row of the costs */
    PHASE_1 = NROWS + 1,    /* the row of the costs of phase 1 */
    FIRST_SLACK = NVARS + 1 /* the number of row 0's slack among the variables */
};
typedef struct {
    int basic[NROWS], other[NVARS + 1]; /* variables; AUXILIARY; slacks */
    double cell[NROWS + 2][NVARS + 2];
} Tableau;

/* Exchanges basic[r] and other[c]. */
void pivot(Tableau *t, int r, int c) {
    double inverse = 1 / t->cell[r][c];
    int leaves = t->basic[r];
    for (int i = 0; i < NROWS + 2; i++) {
        double factor = i == r ? 0 : t->cell[i][c] * inverse;
        for (int v = 0; v <= RIGHT; v++)
            t->cell[i][v] -= factor * t->cell[r][v];
        if (i != r)
            t->cell[i][c] = -factor;
    }
    for (int v = 0; v <= RIGHT; v++)
        t->cell[r][v] *= inverse;
    t->cell[r][c] = inverse;
    t->basic[r] = t->other[c];
    t->other[c] = leaves;
}

/* Pivots while that lowers the cost. Returns false if the cost falls without end, or if 5,000
 * pivots were not enough. */
bool minimize(Tableau *t, int cost) {
    const double EPS = 1e-11; /* Smaller numbers are roundings of 0. */
    for (int pivots = 0; pivots < 5000; pivots++) {
        int c = -1, r = -1;
        double nearest = INFINITY;
        for (int v = 0; v <= AUXILIARY; v++) {
            /* AUXILIARY must not come back in phase 2. */
            bool allowed = cost == PHASE_1 || t->other[v] != AUXILIARY;
            if (allowed && t->cell[cost][v] < -EPS && (c < 0 || t->other[v] < t->other[c]))
                c = v;
        }
        if (c < 0)
            return true;
        for (int i = 0; i < NROWS; i++) { /* Which basic variable is the first at 0, as c grows? */
            double reach = t->cell[i][c] > EPS ? t->cell[i][RIGHT] / t->cell[i][c] : INFINITY;
            /* Bland's rule: of several that do, the one with the least number. */
            bool tie = r >= 0 && reach <= nearest && t->basic[i] < t->basic[r];
            if (reach < nearest || tie) {
                r = i;
                nearest = reach;
            }
        }
        if (r < 0)
            return false;
        pivot(t, r, c);
    }
    return false;
}

/* Returns T_PRE or T_GEN at x: the largest of its terms. */
double layer_seconds(Lp *lp, int T) {
    double most = 0;
    for (int i = 0; i < NROWS; i++) {
        double sum = -lp->b[i];
        for (int v = 0; v < T_PRE; v++)
            sum += lp->a[i][v] * lp->x[v];
        if (lp->a[i][T] < 0)
            most = fmax(most, -sum / lp->a[i][T]);
    }
    return most;
}

/* Fills the tableau. Numbers are scaled to be around 1; the unit of seconds is a layer's time at x.
 * Among several best answers we want the one with less on slower tiers, so a share there has a
 * small cost. The last pivot makes AUXILIARY basic, so that all rows hold: no right side is
 * negative. */
void fill_tableau(Tableau *t, Lp *lp) {
    double unit[NVARS], most = 0;
    int worst = 0; /* the row that is furthest from holding at 0 */
    *t = (Tableau){.cell[PHASE_1][AUXILIARY] = 1, .other[AUXILIARY] = AUXILIARY};
    for (int v = 0; v < NVARS; v++) {
        t->other[v] = v;
        unit[v] = v < T_PRE ? 1 : layer_seconds(lp, v);
        most = fmax(most, lp->c[v] * unit[v]);
    }
    for (int v = 0; v < NVARS; v++)
        t->cell[COST][v] = v < T_PRE ? 1e-9 * (v % NTIERS) : lp->c[v] * unit[v] / most;
    for (int i = 0; i < NROWS; i++) {
        double size = fabs(lp->b[i]);
        for (int v = 0; v < NVARS; v++)
            size = fmax(size, fabs(lp->a[i][v] * unit[v]));
        for (int v = 0; v < NVARS; v++)
            t->cell[i][v] = lp->a[i][v] * unit[v] / size;
        t->cell[i][AUXILIARY] = -1;
        t->cell[i][RIGHT] = lp->b[i] / size;
        t->basic[i] = FIRST_SLACK + i;
        if (t->cell[i][RIGHT] < t->cell[worst][RIGHT])
            worst = i;
    }
    pivot(t, worst, AUXILIARY);
}

/* Overwrites x with the best one. Returns false if nothing satisfies all rows. */
bool simplex(Lp *lp) {
    Tableau t;
    fill_tableau(&t, lp);
    if (!minimize(&t, PHASE_1) || t.cell[PHASE_1][RIGHT] < -1e-9)
        return false;
    /* If AUXILIARY is still basic, it is 0, and any other variable may take its place. */
    for (int i = 0; i < NROWS; i++)
        for (int v = 0; v <= AUXILIARY && t.basic[i] == AUXILIARY; v++)
            if (fabs(t.cell[i][v]) > 1e-6)
                pivot(&t, i, v);
    if (!minimize(&t, COST))
        return false;
    memset(lp->x, 0, sizeof lp->x);
    for (int i = 0; i < NROWS; i++)
        if (t.basic[i] < T_PRE)
            lp->x[t.basic[i]] = fmax(t.cell[i][RIGHT], 0);
    lp->x[T_PRE] = layer_seconds(lp, T_PRE);
    lp->x[T_GEN] = layer_seconds(lp, T_GEN);
    return true;
}

// -------------------------------------------------------------------------------------------------
// The policy search (4.3)
//
// The paper enumerates the block, gbs and the number of batches, solves Eq. 1 for each, and takes
// the policy with the least T / bls. search() does so, with up to 20 batches: we read the paper's
// "bls is less than 20" as their number. Its gbs are 1, 2, 4, 8, 12, 16, 20 and so on; from 32 the
// steps grow, to about a quarter of gbs. To run, a policy also has to fit as this program places
// it; best_placement() solves again with less memory until it does. choose_policy() searches only
// if no --percent is given.
//
// Where no link and no tier is short, T / bls is the same for all blocks. Then the largest GPU
// batch is taken: A.3 does not know that a product of many rows is faster.
//
// It is easy to miss that search() divides T by the number of prompts where these are fewer than
// bls: the other places of such a block make no tokens.
// -------------------------------------------------------------------------------------------------

Lp found;                          /* the best, by the search */
double predicted;                  /* seconds that A.3 expects of the run; 0: not searched */
int policy_len;                    /* tokens of a prompt, if a policy is only to be printed */
double percent[2 * NKINDS] = {-1}; /* wg, wc, cg, cc, hg, hc; -1: not given */

/* Solves Eq. 1 for the policy's block, with so much memory, and takes its shares. Returns false if
 * no shares fit. s: tokens of a prompt. */
bool solve(Lp *lp, double mem[NTIERS], int s) {
    paper_lp(lp, mem, s);
    /* Twice: the first takes its unit of seconds from a placement with all on disk, the second from
     * the answer of the first. */
    if (mem[TIER_GPU] <= 0 || mem[TIER_CPU] <= 0 || !simplex(lp) || !simplex(lp))
        return false;
    memcpy(policy.share, lp->x, sizeof policy.share);
    return true;
}

/* Finds the best placement of the policy's block. A policy that is to run has to fit: first
 * the bytes that A.3 does not count are subtracted from the GPU's memory, and then, as often as
 * needed, the bytes that a tier lacks from that tier's. */
bool best_placement(Lp *lp, int s) {
    double mem[] = {hw[GMEM][0], hw[CMEM][0], hw[NMEM][0]};
    if (!solve(lp, mem, s))
        return false;
    if (policy_len)
        return true;
    do_blocks(false);
    mem[TIER_GPU] -= uncounted;
    /* More than 11 tries hardly ever help: what lacks then is a fraction of a tensor. */
    for (int tries = 0; tries < 11 && solve(lp, mem, s); tries++) {
        bool fits = true;
        do_blocks(false);
        for (int t = 0; t < NTIERS; t++) {
            double lacks = fmax(tiers.peak[t] - hw[GMEM + t][0], 0);
            mem[t] -= lacks;
            fits &= lacks <= 0;
        }
        if (fits)
            return true;
    }
    return false;
}

double total_seconds(Lp *lp) { /* T of Eq. 1 */
    return (lp->x[T_PRE] + lp->x[T_GEN] * (generation_length - 1)) * l;
}

/* Returns the GPU batch size to try after g. */
int next_gbs(int g) { return g < 4 ? 2 * g : g + max(4, g / 16 * 4); }

/* Tries the blocks that the flags leave open, for `count` prompts of s tokens; the paper pads to
 * the longest. Leaves the best policy and its x, and returns its seconds a sequence. */
double search(int s, int count) {
    struct Policy given = policy, best = policy; /* 0: gbs, num_gpu_batches are open. */
    /* One of the sizes below next_gbs(count) holds all prompts in one batch. */
    int most_g = given.gbs ? given.gbs : next_gbs(count) - 1,
        most_b = given.num_gpu_batches ? given.num_gpu_batches : 20;
    double least = INFINITY;
    Lp lp;
    for (int g = max(given.gbs, 1); g <= most_g; g = next_gbs(g))
        for (int b = max(given.num_gpu_batches, 1); b <= most_b; b++) {
            policy.gbs = g;
            policy.num_gpu_batches = b;
            if (!given.num_gpu_batches && g * (b - 1) >= count)
                break; /* A batch would have no prompt. */
            if (!best_placement(&lp, s))
                continue;
            double each = total_seconds(&lp) / min(count, (long)g * b);
            /* Of blocks that are equal but for rounding, the one with the largest gbs is taken. */
            if (each <= least * (1 + 1e-9)) {
                least = fmin(each, least);
                best = policy;
                found = lp;
            }
        }
    if (least >= INFINITY)
        die(2,
            "no policy fits; raise --gpu-mem or --cpu-mem, lower --max-tokens, --gpu-batch-size");
    policy = best;
    return least;
}

/* Searches for a policy if none is given, and refuses one that does not fit. */
void choose_policy(void) {
    bool given = percent[0] >= 0;
    for (int kind = 0; kind < NKINDS && given; kind++) {
        double *share = policy.share[kind];
        share[TIER_GPU] = percent[2 * kind] / 100;
        share[TIER_CPU] = percent[2 * kind + 1] / 100;
        share[TIER_DISK] = fmax(0, 1 - share[TIER_GPU] - share[TIER_CPU]);
        if (share[TIER_GPU] + share[TIER_CPU] > 1 + 1e-9)
            die(2, "--percent: GPU and CPU have more than 100");
    }
    if (policy.compress_weight && (h1 % GROUP || h2 % GROUP))
        die(2, "--compress-weight wants hidden_size and ffn_dim to be multiples of 64");
    policy.gbs = min(given && !policy.gbs ? 32 : policy.gbs, nprompts);
    policy.num_gpu_batches =
        min(given && !policy.num_gpu_batches ? 1 : policy.num_gpu_batches, nprompts);
    policy.delegated |= is_sparse() || !given; /* A.3 counts with delegation. */
    if (!given)
        predicted = search(longest, nprompts) * nprompts;
    do_blocks(false);
    for (int t = 0; t < NTIERS; t++)
        if (tiers.peak[t] > hw[GMEM + t][0])
            die(2, "the %s tier needs %zu bytes, but has %.0f; change --percent, --gpu-batch-size",
                tier_name[t], tiers.peak[t], hw[GMEM + t][0]);
}

/* Prints the policy of Eq. 1 as it stands in the paper, which knows no number of prompts: the
 * search tries blocks for 1024 of them. */
void print_policy(void) {
    double each = search(policy_len, 1024);
    for (int v = 0; v < NVARS; v++)
        printf("%s %.12g\n", var_name[v], found.x[v]);
    printf("gbs %d\nnum_gpu_batches %d\nT %.12g\nthroughput %.12g\n", policy.gbs,
           policy.num_gpu_batches, total_seconds(&found), generation_length / each);
}

// =================================================================================================
// What every such program needs. Of the paper only Table 8's constants follow, which
// describe_machine() reads; a reader may stop here.
// =================================================================================================

// -------------------------------------------------------------------------------------------------
// The checkpoint: config.json, and files of safetensors
//
// A file of safetensors is 8 bytes with the length of its header, the header in JSON, and the bytes
// of all tensors. It is mapped, so that its pages are read when they are used. Headers are not
// trusted: whatever they say, a tensor has to be inside its file.
// -------------------------------------------------------------------------------------------------

struct stat traced; /* the file of --trace, if there is one: it is no input, by any name */

/* Refuses standard output or standard error as the file of --trace. */
void keep_apart(void) {
    struct stat is;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++)
        if (!fstat(fd, &is) && S_ISREG(is.st_mode) && is.st_ino == traced.st_ino &&
            is.st_dev == traced.st_dev)
            die(2, "--trace: is also the file of standard output or standard error");
}

/* Opens a file that is read. One of the model has to be a regular file. */
int open_input(const char *path, bool of_model) {
    struct stat is;
    int fd = open(path, O_RDONLY | of_model * O_NONBLOCK);
    if (fd < 0 || fstat(fd, &is))
        die(2, "%s: %s", path, strerror(errno));
    if (is.st_ino == traced.st_ino && is.st_dev == traced.st_dev)
        die(2, "%s: is also the file of --trace", path);
    if (of_model && !S_ISREG(is.st_mode))
        die(2, "%s: is no regular file", path);
    return fd;
}

/* Returns the text of a file of the model, or of one that a flag names: then dir is "". One that is
 * not needed may be missing, and is then "". */
char *read_text(const char *dir, const char *name, bool needed) {
    char path[4200], *text = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "%s%s", dir, name);
    if (!needed && access(path, F_OK))
        return "";
    FILE *file = fdopen(open_input(path, *dir), "r");
    long len = file ? getdelim(&text, &room, 0, file) : 0;
    if (len <= 0 || !text[len - 1] || ferror(file))
        die(2, "%s: is empty, has a NUL byte, or cannot be read", path);
    fclose(file);
    return text;
}

/* Returns what stands behind "key": in a text of JSON, or "". This is no parser. */
const char *member(const char *text, const char *key) {
    char quoted[300];
    int len = snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *at = strstr(text, quoted);
    return at ? at + len + strspn(at + len, " \n") : "";
}

/* Returns true if what stands behind "key": begins with value. */
bool says(const char *text, const char *key, const char *value) {
    return !strncmp(member(text, key), value, strlen(value));
}

/* Returns a whole number of config.json. */
int whole(const char *text, const char *key) {
    double value = atof(member(text, key));
    if (!(value >= 1 && value <= 1 << 20) || value > floor(value))
        die(1, "config.json (or generation_config.json): %s has to be a whole number from 1 to %d",
            key, 1 << 20);
    return value;
}

/* Reads the sizes of a model, and refuses what is no OPT. The token that ends a text is that of
 * generation_config.json, if there is one. */
void read_config(const char *dir) {
    const char *text = read_text(dir, "/config.json", true),
               *ends = read_text(dir, "/generation_config.json", false);
    l = whole(text, "num_hidden_layers");
    h1 = whole(text, "hidden_size");
    h2 = whole(text, "ffn_dim");
    nh = whole(text, "num_attention_heads");
    hd = h1 / nh;
    vocab = whole(text, "vocab_size");
    eos = whole(*member(ends, "eos_token_id") ? ends : text, "eos_token_id");
    positions = whole(text, "max_position_embeddings");
    if (!says(text, "model_type", "\"opt\"") || !says(text, "activation_function", "\"relu\"") ||
        says(text, "do_layer_norm_before", "false") || says(text, "tie_word_embeddings", "false") ||
        hd * nh != h1 || hd % 16 || h2 % 16)
        die(1, "%s: expected OPT with relu, norms first, a tied head, heads of 16, 32, ... numbers",
            dir);
}

/* A file of the checkpoint. */
struct Shard {
    char *header;
    uint8_t *data;
    size_t size; /* of the tensors, in bytes */
} * shard;       /* The last one has no header. */

/* Maps a file. */
void open_shard(struct Shard *s, const char *path) {
    uint64_t len = 0; /* of the header */
    int fd = open_input(path, true);
    off_t size = lseek(fd, 0, SEEK_END);
    uint8_t *file = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (file != MAP_FAILED)
        memcpy(&len, file, 8);
    if (file == MAP_FAILED || size < 8 || len > size - 8ull)
        die(1, "%s: is no whole file of safetensors", path);
    s->header = allocate(len, 1);
    memcpy(s->header, file + 8, len);
    s->data = file + 8 + len;
    s->size = size - 8 - len;
}

/* Returns the tensor of that name, with or without "model." in front, and of that shape: (cols) if
 * rows is 1. */
Weight find_tensor(const char *name, size_t rows, size_t cols) {
    const char *at = "";
    struct Shard *s = shard;
    size_t begin = 1, end = 0, first = 0;
    for (; s->header; s++) {
        at = member(s->header, name);
        if (!*at)
            at = member(s->header, name + strlen("model."));
        if (*at)
            break;
    }
    sscanf(member(at, "shape"), "[ %zu", &first);
    if (!says(at, "dtype", "\"F16\"") || first != (rows > 1 ? rows : cols))
        die(1, "%s: is not there as F16 of %zu x %zu; the engine reads other types", name, rows,
            cols);
    sscanf(member(at, "data_offsets"), "[ %zu , %zu", &begin, &end);
    if (begin > end || end > s->size || end - begin != 2 * rows * cols)
        die(1, "%s: its %zu bytes are not in its file; is that whole?", name, 2 * rows * cols);
    return (Weight){.file = s->data + begin, .rows = rows, .cols = cols};
}

/* Finds the tensors of layer j. */
void find_layer(int j) {
    const char *part[] = {"self_attn_layer_norm",
                          "self_attn.q_proj",
                          "self_attn.k_proj",
                          "self_attn.v_proj",
                          "self_attn.out_proj",
                          "final_layer_norm",
                          "fc1",
                          "fc2"};
    for (int role = 0; role < NROLES; role++) {
        char name[256];
        int out = role / 2 == W_1 / 2 ? h2 : h1, in = role == W_2 ? h2 : h1;
        snprintf(name, sizeof name, "model.decoder.layers.%d.%s.%s", j, part[role / 2],
                 role % 2 ? "bias" : "weight");
        layer[j][role] = find_tensor(name, is_matrix(role) ? out : 1, is_matrix(role) ? in : out);
    }
}

/* Opens all files of safetensors in a directory, and finds the tensors. */
void open_checkpoint(const char *dir) {
    char pattern[4200];
    glob_t files;
    snprintf(pattern, sizeof pattern, "%s/*.safetensors", dir);
    if (glob(pattern, 0, NULL, &files))
        die(2, "%s: no readable file (*, ?, [ and \\ in a directory match others)", pattern);
    shard = allocate(files.gl_pathc, sizeof *shard);
    for (size_t f = 0; f < files.gl_pathc; f++)
        open_shard(&shard[f], files.gl_pathv[f]);
    layer = allocate(l, sizeof *layer);
    slab_bytes = allocate(l, sizeof *slab_bytes);
    outside[TOKENS] = find_tensor("model.decoder.embed_tokens.weight", vocab, h1);
    outside[POSITIONS] = find_tensor("model.decoder.embed_positions.weight", positions + 2, h1);
    outside[LAST_NORM] = find_tensor("model.decoder.final_layer_norm.weight", 1, h1);
    outside[LAST_BIAS] = find_tensor("model.decoder.final_layer_norm.bias", 1, h1);
    for (int j = 0; j < l; j++)
        find_layer(j);
}

// -------------------------------------------------------------------------------------------------
// The tokenizer: GPT-2's byte-level BPE
//
// A text is cut into words, and a word into bytes. vocab.json has a piece for each byte, and for
// longer ones; merges.txt lists the pairs of pieces that are joined, the first pair first. Bytes
// that cannot be printed are written as other characters there.
// -------------------------------------------------------------------------------------------------

/* Pieces with their ids, and pairs "left right" with their ranks, in the order of their texts. */
typedef struct {
    const char *text;
    int number;
} Entry;
Entry *entry;
const char **piece; /* (vocab) */
int nentries, byte_id[256];
int byte_of[324]; /* 1 + the byte that a character stands for */

int by_text(const void *a, const void *b) { return strcmp(((Entry *)a)->text, ((Entry *)b)->text); }

/* Returns the number of a text, or -1. */
int find(const char *text) {
    Entry key = {text, 0};
    Entry *it = bsearch(&key, entry, nentries, sizeof *entry, by_text);
    return it ? it->number : -1;
}

/* Writes a character below 2048 as UTF-8, and returns the place behind it. */
char *put_utf8(char *to, long c) {
    if (c < 0x80) {
        *to = c;
        return to + 1;
    }
    to[0] = 0xc0 | (c >> 6 & 31);
    to[1] = 0x80 | (c & 63);
    return to + 2;
}

/* Decodes a string of JSON in its place, up to a 0, and returns what is behind it. */
char *read_string(char *at) {
    char *to = at, hex[5];
    for (; *at && *at != '"'; at++) {
        bool escaped = *at == '\\' && at[1];
        at += escaped;
        if (escaped && *at == 'u' && snprintf(hex, sizeof hex, "%.4s", at + 1) == 4) {
            to = put_utf8(to, strtol(hex, NULL, 16));
            at += 4;
        } else
            *to++ = *at;
    }
    at += *at == '"';
    *to = 0;
    return at;
}

/* Reads vocab.json: "piece": id. */
void read_pieces(const char *dir, char *at) {
    for (char *name, *end; (name = strchr(at, '"')); at = end) {
        at = read_string(++name);
        at += strspn(at, ": ");
        long id = strtol(at, &end, 10);
        if (end == at || id < 0 || id >= vocab || piece[id] || !*name || strchr(name, ' '))
            die(1, "%s: vocab.json: \"%.60s\" has no id of its own below vocab_size, or a blank",
                dir, name);
        piece[id] = name;
        entry[nentries++] = (Entry){name, id};
    }
    qsort(entry, nentries, sizeof *entry, by_text);
}

/* Reads the lines of merges.txt: "left right". */
void read_pairs(const char *dir, char *lines) {
    int n = nentries;
    for (char *line = strtok(lines, "\r\n"); line; line = strtok(NULL, "\r\n")) {
        char text[2048] = "";
        int left = strcspn(line, " ");
        if (!strncmp(line, "#version", 8))
            continue;
        if (line[left])
            snprintf(text, sizeof text, "%.*s%s", left, line, line + left + 1);
        if (find(text) < 0)
            die(1, "%s: merges.txt: \"%.60s\" begins no pair that makes a piece", dir, line);
        entry[n] = (Entry){line, n};
        n++;
    }
    nentries = n;
    qsort(entry, nentries, sizeof *entry, by_text);
}

/* Refuses what the engine reads and this program does not: pieces that were added, and prompts that
 * do not begin with </s>. */
void refuse_more(const char *dir) {
    const char *text = read_text(dir, "/tokenizer_config.json", false);
    if (*read_text(dir, "/added_tokens.json", false) || find("</s>") < 0 ||
        (*text && (!says(text, "add_bos_token", "true") || strstr(text, "\"<s>\""))))
        die(1, "%s: has added pieces, or prompts without </s> in front; use the engine", dir);
}

/* Reads pieces and pairs, and finds the piece of each byte. */
void read_tokenizer(const char *dir) {
    char *pieces = read_text(dir, "/vocab.json", true),
         *pairs = read_text(dir, "/merges.txt", true);
    piece = allocate(vocab, sizeof *piece);
    entry = allocate(vocab + strlen(pairs) / 2, sizeof *entry); /* A line has two bytes at least. */
    read_pieces(dir, pieces);
    refuse_more(dir);
    read_pairs(dir, pairs);
    for (int b = 0, next = 256; b < 256; b++) {
        /* A byte that can be printed is written as it is. */
        int character = isgraph(b) || (b >= 0xa1 && b != 0xad) ? b : next++;
        char text[3];
        byte_of[character] = b + 1;
        *put_utf8(text, character) = 0;
        byte_id[b] = find(text);
        if (byte_id[b] < 0)
            die(1, "%s: vocab.json has no piece for byte %d", dir, b);
    }
}

/* Returns 0 for letters, 1 for digits, 2 for blanks, 3 for others. Beyond ASCII all are letters. */
int kind_of(char c) {
    if (c & 0x80 || isalpha(c))
        return 0;
    return isdigit(c) ? 1 : isspace(c) ? 2 : 3;
}

/* Returns the end of a word of GPT-2's
 * 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
const char *word_end(const char *at) {
    for (const char *c = "s t revem lld "; *at == '\'' && *c; c += 2)
        if (at[1] == c[0] && (c[1] == ' ' || at[2] == c[1]))
            return at + 3 - (c[1] == ' ');
    const char *first = at + (at[0] == ' ' && at[1]), *end = first + 1;
    while (*end && kind_of(*end) == kind_of(*first))
        end++;
    /* The last of several blanks belongs to the next word. */
    return end - (kind_of(*first) == 2 && *end && end > at + 1);
}

/* Joins pairs of pieces, the first of merges.txt first, and returns how many pieces are left. */
int join_pairs(int *id, int n) {
    char text[2048];
    for (;;) {
        int best = nentries, at = 0;
        for (int b = 0; b + 1 < n; b++) {
            snprintf(text, sizeof text, "%s %s", piece[id[b]], piece[id[b + 1]]);
            int rank = find(text);
            if (rank >= 0 && rank < best) {
                best = rank;
                at = b;
            }
        }
        if (best == nentries)
            return n;
        snprintf(text, sizeof text, "%s%s", piece[id[at]], piece[id[at + 1]]);
        id[at] = find(text);
        n--;
        memmove(id + at + 1, id + at + 2, (n - at - 1) * sizeof *id);
    }
}

/* Writes a prompt's tokens: </s>, and its words. join_pairs() takes the square of a word's bytes,
 * so they are bounded. */
void encode(Sequence *q) {
    const char *end;
    int most = positions - generation_length + 1;
    q->token = allocate(strlen(q->text) + 1 + generation_length, sizeof *q->token);
    q->token[0] = find("</s>");
    q->s = 1;
    for (const char *at = q->text; *at && q->s <= most; at = end) {
        int *id = q->token + q->s, n = 0;
        end = word_end(at);
        if (end - at > 4096)
            die(2, "prompt %d: has a word of more than 4096 bytes", nprompts);
        for (; at < end; at++)
            id[n++] = byte_id[(unsigned char)*at];
        q->s += join_pairs(id, n);
    }
    longest = max(longest, q->s);
    if (q->s > most)
        die(2, "prompt %d: with --max-tokens it is longer than the model's %d positions", nprompts,
            positions);
}

/* Prints the bytes of a token, unless it is <s>, <pad>, </s> or <unk>. */
void print_token(int id) {
    for (const char *c = piece[id]; id > 3 && c && *c; c++) {
        int character = *c;
        if (*c & 0x80) {
            character = (c[0] & 31) << 6 | (c[1] & 63);
            c += c[1] != 0;
        }
        if (character < 324 && byte_of[character])
            putchar(byte_of[character] - 1);
    }
}

// -------------------------------------------------------------------------------------------------
// The command line
// -------------------------------------------------------------------------------------------------

const char *prompts_file, *hardware, *trace_file;
bool json, help;
#define USAGE "mini MODEL (PROMPT ... | --prompts FILE | --policy S) [FLAGS]"

struct Flag {
    const char *name;
    enum { SWITCH, TEXT, WHOLE, NUMBER, FRACTION, PERCENT } kind;
    void *to;
    const char *help;
} flags[] = {
    {"--prompts", TEXT, &prompts_file, "FILE: a prompt a line"},
    {"--max-tokens", WHOLE, &generation_length, "N: tokens to generate (64)"},
    {"--percent", PERCENT, percent, "WG WC CG CC HG HC: of weights, cache, activations (searched)"},
    {"--gpu-batch-size", WHOLE, &policy.gbs,
     "N: sequences of a GPU batch (searched; 32 with --percent)"},
    {"--num-gpu-batches", WHOLE, &policy.num_gpu_batches,
     "N: batches of a block (searched; 1 with --percent)"},
    {"--cpu-cache-compute", SWITCH, &policy.delegated,
     "the CPU attends to its cache (always, if searched)"},
    {"--compress-weight", SWITCH, &policy.compress_weight, "4-bit groups for matrices (F16)"},
    {"--compress-cache", SWITCH, &policy.compress_cache, "4-bit groups for the KV cache (F16)"},
    {"--attn-sparsity", FRACTION, &policy.sparsity, "F: read V of this share of tokens (1)"},
    {"--no-overlap", SWITCH, &policy.no_overlap, "make every move at once"},
    {"--gpu-mem", NUMBER, &given_hw[GMEM], "BYTES: of the GPU, such as 16e9 (half of memory)"},
    {"--cpu-mem", NUMBER, &given_hw[CMEM], "BYTES: of the CPU (half of memory)"},
    {"--ctog", NUMBER, &given_hw[CTOG_BDW],
     "RATE: bytes a second from CPU to GPU (as fast as memory)"},
    {"--gtoc", NUMBER, &given_hw[GTOC_BDW],
     "RATE: bytes a second from GPU to CPU (as fast as memory)"},
    {"--dtoc", NUMBER, &given_hw[DTOC_BDW],
     "RATE: bytes a second from disk to CPU (as fast as memory)"},
    {"--ctod", NUMBER, &given_hw[CTOD_BDW],
     "RATE: bytes a second from CPU to disk (as fast as memory)"},
    {"--threads", WHOLE, &threads, "N: threads that compute (all cores)"},
    {"--trace", TEXT, &trace_file, "FILE: what each thread and link did, and when (none)"},
    {"--json", SWITCH, &json, "print the tokens as JSON lines"},
    {"--policy", WHOLE, &policy_len, "S: print what A.3 finds for prompts of S tokens, and end"},
    {"--hardware", TEXT, &hardware,
     "FILE: a machine to search for: hardware/t4.json (this computer)"},
    {"--help", SWITCH, &help, "print this"},
    {0},
};

/* How many values a flag of each kind takes, and from where to where they go. */
struct {
    int values;
    double low, high;
} range[] = {{0, 0, 0}, {1, 0, 0}, {1, 1, MAX_BATCHES}, {1, 1, 1e18}, {1, 1e-6, 1}, {6, 0, 100}};

/* Reads value number v of a flag. */
void read_value(struct Flag *f, int v, char *text) {
    char *end;
    if (f->kind == TEXT) {
        *(char **)f->to = text;
        return;
    }
    double value = strtod(text, &end), low = range[f->kind].low, high = range[f->kind].high;
    if (end == text || *end || !(value >= low && value <= high))
        die(2, "%s %.60s: expected a number from %g to %g", f->name, text, low, high);
    if (f->kind != WHOLE) {
        ((double *)f->to)[v] = value;
        return;
    }
    if (value > floor(value))
        die(2, "%s %.60s: is not whole", f->name, text);
    *(int *)f->to = value;
}

/* Reads the flags that stand behind the prompts. The rest keep these values, or 0. */
void read_flags(char **args, int n) {
    generation_length = 64;
    policy.sparsity = 1;
    for (int a = 0; a < n; a++) {
        struct Flag *f = flags;
        while (f->name && strcmp(args[a], f->name))
            f++;
        if (!f->name)
            die(2, "%.60s is no flag, and prompts stand before flags; see --help", args[a]);
        if (f->kind == SWITCH)
            *(bool *)f->to = true;
        int values = range[f->kind].values;
        if (n - a <= values)
            die(2, "%s takes %d values: %s", f->name, values, f->help);
        for (int v = 0; v < values; v++)
            read_value(f, v, args[++a]);
    }
}

/* Describes this computer, or reads Table 8's constants from a file. Flags come last. */
void describe_machine(void) {
    const char *name[] = {"gmem",     "cmem",     "nmem",     "ctog_bdw",  "gtoc_bdw",
                          "dtoc_bdw", "ctod_bdw", "mm_flops", "bmm_flops", "cpu_flops"};
    double half = .5 * sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    double usual[] = {half, half, 1e18, 9e9, 9e9, 1e9, 1e9, 9e10, 2e10, 2e10};
    const char *text = hardware ? read_text("", hardware, true) : "";
#ifdef GPU
    measure_gpu(usual);
#endif
    for (int v = 0; v < NCONSTANTS; v++)
        for (int p = 0; p < 2; p++) {
            char of_phase[40]; /* KEY_g or KEY_p, where KEY alone is not there */
            snprintf(of_phase, sizeof of_phase, "%s_%c", name[v], "gp"[p]);
            const char *at = member(text, name[v]);
            double value = hardware ? atof(*at ? at : member(text, of_phase)) : usual[v];
            hw[v][p] = given_hw[v] > 0 ? given_hw[v] : value;
            if (!(hw[v][p] > 0))
                die(2, "%s: %s: expected a number above 0", hardware, name[v]);
        }
}

/* Adds a prompt, as tokens. */
void add_prompt(const char *text) {
    prompts = realloc(prompts, (nprompts + 1) * sizeof *prompts);
    if (!prompts)
        die(1, "no memory for %d prompts", nprompts + 1);
    prompts[nprompts] = (Sequence){.text = text};
    encode(&prompts[nprompts]);
    nprompts++;
}

/* Reads the words behind the model, or the lines of a file that are not empty. */
void read_prompts(char **words, int n) {
    char *line = prompts_file ? strtok(read_text("", prompts_file, true), "\r\n") : NULL;
    for (int w = 0; w < n; w++)
        add_prompt(words[w]);
    for (; line; line = strtok(NULL, "\r\n"))
        add_prompt(line);
    if (!nprompts)
        die(2, "%s: has no prompt", prompts_file);
}

#ifndef GPU

/* Returns the memory of a tier that is no file. */
void *open_memory(Tier t, size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        die(1, "no memory for %zu bytes of the %s tier", bytes, tier_name[t]);
    return at;
}

#endif

/* Makes the tiers. That of the disk is a file, which loses its name before it is used; its room is
 * taken by writing zeros, so that a full disk is found now. */
void open_tiers(void) {
    static char zeros[65536];
    char path[4200];
    const char *tmp = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/mini-XXXXXX", tmp && *tmp ? tmp : "/var/tmp");
    int fd = mkstemp(path);
    if (fd < 0 || unlink(path))
        die(1, "%s: %s", path, strerror(errno));
    for (long left = max(tiers.peak[TIER_DISK], 64), n; left > 0; left -= n) {
        n = write(fd, zeros, min(left, sizeof zeros));
        if (n < 0)
            die(1, "%s: no room for %zu bytes: %s", path, tiers.peak[TIER_DISK], strerror(errno));
    }
    size_t size = max(tiers.peak[TIER_DISK], 64);
    base[TIER_DISK] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base[TIER_DISK] == MAP_FAILED)
        die(1, "%s: its %zu bytes could not be mapped: %s", path, size, strerror(errno));
    for (int t = TIER_GPU; t < TIER_DISK; t++)
        base[t] = open_memory(t, max(tiers.peak[t], 64));
}

/* Prints the texts, or their tokens, and on standard error what each tier and each link did. */
void print_results(void) {
    long tokens = 0;
    for (Sequence *q = prompts; q < prompts + nprompts; q++) {
        int *token = q->token + q->s, n = q->generated - (token[q->generated - 1] == eos);
        tokens += q->generated;
        if (json)
            printf("{\"id\": %td, \"tokens\": [", q - prompts);
        else
            fputs(q->text, stdout);
        for (int e = 0; e < n; e++)
            if (json)
                printf(e ? ", %d" : "%d", token[e]);
            else
                print_token(token[e]);
        puts(json ? "]}" : "");
    }
    if (fflush(stdout) | ferror(stdout))
        die(1, "standard output could not be written whole");
    for (int t = 0; t < NTIERS; t++) {
        fprintf(stderr, "mini: %s: %zu bytes", tier_name[t], tiers.peak[t]);
        for (int kind = 0; kind < NKINDS; kind++)
            fprintf(stderr, ", %.4f of %s", tiers.met[kind][t] / fmax(tiers.met[kind][NTIERS], 1),
                    track_name[kind]);
        fputs(t == TIER_DISK ? "; weights of F16 stay in the checkpoint\n" : "\n", stderr);
    }
    for (int c = 0; c < NLINKS; c++)
        fprintf(stderr, "mini: %s: %zu bytes, %.3f s, %.1f%% of the time\n",
                track_name[COMPUTE + 1 + c], link_of[c].bytes, link_of[c].seconds,
                100 * link_of[c].seconds / generation_s);
    fprintf(stderr, "mini: prompts %d, blocks of %d x %d, tokens %ld, %.3f s, %.1f tokens/s\n",
            nprompts, policy.gbs, policy.num_gpu_batches, tokens, generation_s,
            tokens / generation_s);
    if (predicted)
        fprintf(stderr, "mini: A.3 predicted %.3f s, by the rates of flags or --hardware\n",
                predicted);
}

/* Ends the program: behind the end of a mapped file there is no memory. Nothing that is mapped is
 * read inside stdio, so die() may be called. */
void lose_file(int signal) {
    die(1, "signal %d: a file of the model was cut short or could not be read", signal);
}

int main(int argc, char **argv) {
    signal(SIGXFSZ, SIG_IGN); /* A full disk is an error of write(). */
    signal(SIGBUS, lose_file);
    threads = sysconf(_SC_NPROCESSORS_ONLN);
    int words = 1;
    while (words < argc && *argv[words] != '-')
        words++;
    read_flags(argv + words, argc - words);
    if (help) {
        puts(USAGE);
        for (struct Flag *f = flags; f->name; f++)
            printf("  %-20s %s\n", f->name, f->help);
        return 0;
    }
    if (words < 2 || (words > 2) + !!prompts_file + !!policy_len != 1 ||
        (policy_len && (trace_file || json || percent[0] >= 0)))
        die(2, USAGE "; see --help");
    if (trace_file && !stat(trace_file, &traced))
        keep_apart();
    read_config(argv[1]); /* A.3 needs no more of a model. */
    describe_machine();
    if (policy_len) {
        print_policy();
        return 0;
    }
    open_checkpoint(argv[1]);
    read_tokenizer(argv[1]);
    read_prompts(argv + 2, words - 2);
    choose_policy();
    open_tiers();
    start_threads();
    if (trace_file)
        open_trace(trace_file);
    do_blocks(true);
    print_results();
    if (trace)
        close_trace();
    return 0;
}
#endif
