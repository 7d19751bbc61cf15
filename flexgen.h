/* flexgen.h: the terms of the paper as structs, and the functions of opt_model.c, admission.c
 * and schedule.c. The main headers of the folders are base/base.h, io/io.h, device/device.h,
 * cost/cost.h and app/app.h.
 *
 * One word has one meaning, and where mini.c has the thing, it has the word. The paper's letters:
 *
 *   i, j, k          token, layer, GPU batch: the engine counts sweeps by i, and the batches of a
 *                    sweep by k (Seat.k those of the block)
 *   s, n             prompt and output length
 *   l, h1, h2, nh    layers, hidden sizes, attention heads; beside heads, hd is the size of one
 *   wg, wc, wd       the fractions of weights on GPU, CPU and disk;
 *   cg .., hg ..     those of KV cache and activations
 *   K                the batches of a sweep
 *   m, n, k          beside a product, its sizes
 *
 * Words that the paper does not have:
 *
 *   square         one (i, j, k): a batch in a layer, in one of its tokens
 *   sweep          all squares of one i: a token for each sequence
 *   lane           a queue on one link or processor, which carries out ops one after the other
 *   op, to post    a step of work of one lane, as data; to hand it to the lane
 *   call           one of Figure 4's; a Call says for which of them an op works, and on which lane
 *   view           a matrix in a tier, which owns nothing (Tensor)
 *   region, slot   memory of a tier for one purpose; one of several equal parts of it
 *   turn           a count that, modulo the number of slots, picks a slot
 *   cell           what depend.c keeps order in: a slot, or what a batch has of a region
 *   home, staging  where data rests; where it passes through on its way to a square that computes
 *   landing        where data of the disk stops on the CPU, on its way to the GPU or back
 *   slab           what a layer has off the GPU, which streams to a slot
 *   the head       layer l, which makes logits (heads are those of attention)
 *   first          where a range begins, in rows, sequences or bytes
 *   task           what a run is given: prompts
 *   seat           a place in a block, which a prompt takes
 *   page           room for some tokens of a sequence's K and V, in every layer
 *   piece          those sequences of a batch's prefill that pass a layer together
 *   flight         a block of batches that sweep together; only pipelines have several
 *   topup          with the diagonal schedule: a prompt that takes the seat of an ended one
 *   entrance       the batch in which topups prefill before they join that of their seat
 *
 * docs/TOUR.md ends with a longer glossary. Of base.h one needs: CHECK aborts if a condition does
 * not hold, xcalloc never fails, fail() fills an Error and returns -1, HOST_AND_GPU is for
 * nvcc. Sizes and offsets in bytes have the type Bytes. The header is valid C and C++.
 * Read next: opt_model.c. */
#ifndef FLEXGEN_H
#define FLEXGEN_H
#include "base/base.h"
#include "quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The type of an element. U8 is a byte of numbers that quant.c has packed. */
typedef enum { F32, F16, BF16, I32, U8 } Type;
HOST_AND_GPU static inline size_t type_bytes(Type t) {
    return t == F32 || t == I32 ? 4 : t == U8 ? 1 : 2;
}

/* The paper's three-level memory hierarchy (section 4.1). NTIERS, their number, also stands for
 * "no tier". */
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;

/* A link or a processor, which a lane keeps busy. */
typedef enum { CTOG, GTOC, DTOC, CTOD, GPU, CPU, NET, NCHANNELS } Channel;
extern const char *const tier_name[NTIERS], *const channel_name[NCHANNELS];

/* A view of a matrix; it owns nothing. On GPU and CPU, offset counts from the start of the tier's
 * arena; on disk, from the start of `file` (0 is the offload file; 1 and up are the files of the
 * checkpoint). Row r begins at offset + r * ld * type_bytes(type). plan_view makes views from the
 * regions of a plan. */
typedef struct {
    Tier tier;
    Type type;
    int file;
    Bytes offset;
    int rows, cols;
    uint64_t ld; /* elements from one row to the next, cols when dense */
    int region;  /* the region of its tier that it lies in (RegionId in plan.h) */
    int cell;    /* its cell (see Region in plan.h); 0: no op writes it */
    void *at;    /* its address, while a device or reference_forward computes; else NULL */
} Tensor;

/* Rounds bytes up to whole cache lines, because regions and slabs begin at cache lines. */
static inline Bytes whole_lines(Bytes bytes) { return (bytes + 63) / 64 * 64; }
static inline Bytes tensor_bytes(Tensor t) { return (Bytes)t.rows * t.cols * type_bytes(t.type); }
/* Returns the bytes from the first element of a view to the end of its last one. */
static inline Bytes tensor_span(Tensor t) {
    return t.rows ? ((t.rows - 1) * t.ld + t.cols) * type_bytes(t.type) : 0;
}
/* Returns the view moved forward by `bytes`. */
static inline Tensor tensor_moved(Tensor t, Bytes bytes) {
    t.offset += bytes;
    if (t.at)
        t.at = (uint8_t *)t.at + bytes;
    return t;
}
/* Returns rows first .. first+n-1 of a view. */
static inline Tensor tensor_rows(Tensor t, int first, int n) {
    t = tensor_moved(t, first * t.ld * type_bytes(t.type));
    t.rows = n;
    return t;
}
/* Returns the elements of a dense view as one row. */
static inline Tensor tensor_flat(Tensor t) {
    t.cols *= t.rows;
    t.rows = 1;
    t.ld = (size_t)t.cols;
    return t;
}
/* Returns columns first .. first+n-1 of a view. */
static inline Tensor tensor_cols(Tensor t, int first, int n) {
    t = tensor_moved(t, (Bytes)first * type_bytes(t.type));
    t.cols = n;
    return t;
}

typedef struct Checkpoint Checkpoint;
typedef struct Plan Plan;
typedef struct Device Device;
typedef struct Call Call;
typedef struct Op Op;
typedef struct Poster Poster;
typedef struct Hardware Hardware;
typedef struct Net Net;
typedef struct Trace Trace;

// -------------------------------------------------------------------------------------------------
// io/checkpoint.c: OPT sizes and shapes; opt_model.c: the forward pass (section 3)
// -------------------------------------------------------------------------------------------------

/* The sizes of an OPT model, or of the part of it that one stage of a pipeline has. */
typedef struct {
    char name[64];
    int l, h1, h2, nh; /* layers, hidden size, FFN size, heads */
    int vocab;         /* size of the vocabulary */
    int max_pos;       /* positions; their embedding has max_pos + 2 rows, offset by 2 */
    int embed; /* word_embed_proj_dim: columns of the token table; h1 unless the model projects in
                  and out */
    bool pre_norm;     /* do_layer_norm_before; false only in opt-350m */
    bool final_norm;   /* true if a layernorm follows the last layer: pre_norm and not
                          _remove_final_layer_norm */
    int eos;           /* the token that ends a sequence: the id of </s> (2); -1: no token does */
    int more_eos[7];   /* other tokens that end one, too ... */
    int nmore;         /* ... and their number */
    int stage, stages; /* the pipeline stage that has these layers; the number of stages
                          (section 4.4), 0 or 1: the whole model */
} OptConfig;
/* Returns true if a token ends a sequence. */
static inline bool is_eos(const OptConfig *config, int32_t id) {
    bool ends = id == config->eos && id >= 0;
    for (int i = 0; i < config->nmore; i++)
        ends |= id == config->more_eos[i];
    return ends;
}
/* Return true for the stage that has the embedding (the first) or the head (the last). */
static inline bool is_first_stage(const OptConfig *config) { return config->stage == 0; }
static inline bool is_last_stage(const OptConfig *config) {
    return config->stage + 1 >= config->stages;
}

/* The tensors of one decoder layer. A weight is followed by its bias; matrices are (out, in) as in
 * the checkpoint. */
typedef enum {
    LN1_W,
    LN1_B,
    Q_W,
    Q_B,
    K_W,
    K_B,
    V_W,
    V_B,
    O_W,
    O_B,
    LN2_W,
    LN2_B,
    FC1_W,
    FC1_B,
    FC2_W,
    FC2_B,
    NROLES
} Role;
/* Returns true for a matrix, which compression packs; the others are biases and layernorms. */
static inline bool role_is_matrix(Role role) {
    return role % 2 == 0 && role != LN1_W && role != LN2_W;
}
/* Returns true if the next matrix (or bias) lies directly behind this one: q, k and v are computed
 * as one product, so their matrices lie together wherever they rest, and so do their biases. */
static inline bool role_goes_on(Role role) { return role >= Q_W && role <= K_B; }
/* Returns the rank of a tensor in the files that `quantize` writes: the matrices of q, k and v come
 * first, then their biases, as in a slab, then the others in the order of Role. */
static inline int role_place(Role role) {
    /* weight and bias of:            ln1   q     k     v     o     ln2     fc1     fc2 */
    static const int place[NROLES] = {6, 7, 0, 3, 1, 4, 2, 5, 8, 9, 10, 11, 12, 13, 14, 15};
    return place[role];
}

/* The tensors outside the layers. Absent ones have rows 0: project_in/out when embed == h1, final
 * norm when !final_norm, lm_head when it is tied to the token table. */
typedef enum {
    TOK_EMBED,
    POS_EMBED,
    PROJECT_IN,
    PROJECT_OUT,
    FINAL_LN_W,
    FINAL_LN_B,
    LM_HEAD,
    NGLOBALS
} Global;

/* Fills *config for "opt-125m" ... "opt-175b" ("facebook/" in front is allowed). Returns -1 if the
 * name is none of them. */
int opt_config_by_name(OptConfig *config, const char *name);
/* Returns "opt-125m, opt-350m, ..." for messages. */
const char *opt_known_names(void);
/* Return the shape of a tensor; vectors have rows 1. */
void opt_role_shape(const OptConfig *config, Role role, int *rows, int *cols);
void opt_global_shape(const OptConfig *config, Global global, int *rows, int *cols);

/* Computes the plain forward pass of one whole sequence, to be read beside section 3. It has no
 * tiers, pages or lanes. Everything is float, but weights, Q, K and V are rounded to F16, as the
 * engine stores them. logits is (n, vocab), for all positions. ids[n], n <= max_pos. It is simple
 * rather than fast. Fails on a read error. */
int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n,
                      Error *err);
/* Computes the attention of reference_forward: o = softmax(q k^T / sqrt(hd)) v for every head,
 * where row t sees rows 0..t. o, q, k, v (n, h1), h1 = nh hd. */
void plain_attention(float *o, const float *q, const float *k, const float *v, int n,
                     const OptConfig *config);

// -------------------------------------------------------------------------------------------------
// Policies and tasks (sections 4.2, 4.3)
// -------------------------------------------------------------------------------------------------

typedef enum { SCHEDULE_ZIGZAG, SCHEDULE_ROW, SCHEDULE_DIAGONAL } Schedule;
extern const char *const schedule_name[];

/* A policy (section 4.3): fractions are 0 to 1, and the disk gets the rest. A field that nobody has
 * chosen is 0: gbs, num_gpu_batches and flights until the search has chosen them. plan_make gives
 * flights, piece_rows, workspaces and sparsity their defaults, but only in its copy, Plan.policy,
 * where no field is left to be chosen. */
typedef struct {
    union {
        struct {
            double wg, wc, cg, cc, hg, hc;
        };
        double share[6];
    };
    int gbs, num_gpu_batches;
    int flights; /* blocks in flight, which sweep in turn (section 4.4); more than one is of use
                    only in a pipeline */
    Schedule schedule;
    bool delegated;     /* attention over CPU and disk pages runs on the CPU (computation
                               delegation) */
    bool overlap;       /* false: wait for every op as soon as it is posted */
    bool synchronize;   /* wait for all lanes after every square, as Figure 4 is printed */
    int page_tokens;    /* tokens of a KV page */
    Tier table_home;    /* where the token table (and lm_head) rests */
    int piece_rows;     /* the most rows of a piece; a longer prompt raises it */
    int workspaces;     /* hidden states that the GPU holds at once: 2 or 3, see below */
    bool weight_packed; /* the matrices of the layers are packed on every tier; else they are F16 */
    bool head_packed;   /* so are the token table and lm_head; only with weight_packed */
    bool cache_packed;  /* the KV pages are packed */
    double sparsity;    /* the share of past tokens whose V attention reads; 1: all. Less requires
                           delegated, because V can be skipped only where the pages are */
    /* eval studies what fewer bits cost: it rounds numbers, and keeps them in F16. bits 0: it does
     * not */
    Quant weight_study; /* of the matrices, when they are loaded */
    Quant cache_study;  /* of new k and v */
} Policy;
/* While the hidden state of one batch is computed, that of the next batch arrives and that of the
 * previous one leaves. This takes three workspaces, or two if the next state waits until the
 * previous one has left. */
enum { PIECE_ROWS = 1024, LEAST_WORKSPACES = 2, WORKSPACES = 3 };
/* A GPU is faster with more rows in a piece, up to about this many (see fit_pieces). */
enum { LARGE_PIECE_ROWS = 4096 };
/* With at most this many rows a GPU uses packed weights directly; with more, it unpacks them. A
 * packed head is never unpacked: it is read again for every so many rows. */
enum { PACKED_ROWS = 64 };
/* Returns the number of KV pages that `tokens` tokens need. */
static inline int pages_for(int tokens, int page_tokens) { return ceil_div(tokens, page_tokens); }
/* Returns the number of flights, also of a policy whose flights are not chosen yet. */
static inline int flight_count(const Policy *policy) { return imax(policy->flights, 1); }
static inline bool is_sparse(const Policy *policy) {
    return policy->sparsity > 0 && policy->sparsity < 1;
}
/* Returns the number of tokens whose V sparse attention reads (section 5). For a new token it reads
 * all of K, but only the V of the token itself and of ceil(sparsity * past) of the `past` tokens
 * before it. For each query and head, these are the tokens with the largest scores; if scores are
 * equal, it takes the earlier token. */
HOST_AND_GPU static inline int sparse_tokens(double sparsity, int len) {
    double k = sparsity * (len - 1);
    int whole = (int)k;
    return 1 + whole + (k - whole > 1e-9 * k); /* a ceiling that forgives rounding */
}

/* How the next token is chosen from the logits. */
typedef struct {
    float temperature; /* 0 or less: greedy */
    float top_p;       /* 1: off */
    int top_k;         /* 0: off */
    uint64_t seed;
    bool placeless; /* draws depend on the seed and the position alone: the seed is the prompt's own
                     */
} Sampling;

/* A prompt of a task. In a scored task, an evaluation, all s + n tokens are given, and their
 * probabilities are wanted. */
typedef struct {
    int32_t *ids; /* s tokens, beginning with </s>; in a scored task s + n tokens */
    int s, n;     /* prompt length; the most tokens to generate; s + n - 1 <= max_pos */
    int from;     /* in a scored task, the first token that is scored, 1 <= from <= s + n - 1 */
    int place;    /* its index in the input; draws depend on it, the seed and the position alone */
    Sampling sampling; /* unused in a scored task */
} Prompt;

/* A list of prompts to complete or to score. */
typedef struct {
    Prompt *prompts;
    int count;
    bool keep_logits; /* copy every step's logits to the CPU (for tests); not in a scored task */
    bool scored;      /* evaluation, see Prompt */
    bool sampled;     /* some prompt has a temperature; not in a scored task */
} Task;

/* Returns how many rows of a prompt the head needs in prefill: only the last row. In a scored task
 * row from-1 predicts the first scored token, so it needs rows from-1 .. s-1, at least the last. */
static inline int head_rows(const Task *task, const Prompt *prompt) {
    return task->scored ? prompt->s + 1 - imin(prompt->from, prompt->s) : 1;
}

/* A place in a block: its GPU batch, and the tiers of the KV pages and the activations of the
 * sequence that takes it. k counts the batches of the block; Call.k counts those of a sweep. When
 * batch 0 of a block has ended, batch 1 is k = 0 of the sweep. */
typedef struct {
    int k;
    Tier kv, act;
    int prompt; /* the prompt that sits there, an index into the task; -1: it is vacant */
    long since; /* the sweep of that prompt's prefill */
} Seat;

// -------------------------------------------------------------------------------------------------
// admission.c: row, zig-zag, diagonal (sections 4.2 and A.2)
// -------------------------------------------------------------------------------------------------

/* The state of an error diffusion over a stream of items: each item goes to the tier that is
 * furthest behind its share. */
typedef struct {
    double share[NTIERS];
    double due[NTIERS]; /* what each tier should hold by now, minus what it holds */
} Diffusion;
/* Returns the tier of the next item, which has `size` bytes. */
Tier diffuse(Diffusion *d, double size);
/* Splits `total` sequences by the shares. The sequences left over by rounding down go to the tiers
 * with the largest remainders. */
void apportion(int count[NTIERS], const double share[NTIERS], int total);
/* Deals a block of count vacant seats to GPU batches of gbs and to tiers, so that the block as a
 * whole meets cg cc cd and hg hc hd to within one sequence. Within a batch, seats are ordered by
 * the tier of their KV, and the tiers of their activations never decrease, so that each tier's rows
 * lie together. */
void deal_block(Seat *seats, const Policy *policy, int count);
/* Returns the number of seats in a block: gbs * num_gpu_batches, or gbs if the schedule keeps one
 * batch in flight. */
int block_size(const Policy *policy);

/* The seats of one flight: which prompts sit there, and how many KV pages they will hold. */
typedef struct {
    const Policy *policy;
    const Task *task;
    const int
        *limit;    /* [NTIERS] the pages that each tier has; NULL while plan.c still counts them */
    Seat *seat;    /* dealt again for every block; [min(block_size, task count)] */
    int nseats;    /* seats of the present block */
    int seated;    /* how many of them are taken */
    int *in_batch; /* how many of them are taken in batch k */
    int *next_prompt; /* the first waiting prompt; all flights share it */
    long sweep;       /* the next sweep of this flight */
    /* for branches/diagonal.c and ledger.c: */
    long n;            /* the mean of the prompts' n, rounded up */
    int horizon;       /* the largest n of a prompt: the number of sweeps that it takes */
    int *need[NTIERS]; /* [horizon] pages that all seated prompts will hold in sweep i, if none
                          stops early: need[tier][i % horizon], for the next `horizon` sweeps */
    int peak[NTIERS];  /* the largest need so far */
} Admission;

/* Returns the prompt whose sequence sits in a seat, or NULL if the seat is vacant. */
static inline const Prompt *seated_prompt(const Admission *a, int seat) {
    int prompt = a->seat[seat].prompt;
    return prompt < 0 ? NULL : &a->task->prompts[prompt];
}

/* Opens an admission with all seats vacant. limit and next_prompt must outlive it. */
void admission_open(Admission *a, const Policy *policy, const Task *task, int *next_prompt,
                    const int *limit);
/* Seats the waiting prompts that enter the coming sweep. If no seat is taken and prompts are
 * waiting, at least one enters. Returns how many enter, and fills entered[] with their seats: first
 * *topups seats (at most gbs) in batches that have members already, which only the diagonal
 * schedule fills, then seats in new batches. The topups together are neighbours in the input, and
 * so are the prompts of each new batch. */
int admission_next(Admission *a, long sweep, int *entered, int *topups);
/* Vacates a->seat[index], whose sequence has ended after `generated` tokens. */
void admission_leave(Admission *a, int index, int generated);
void admission_close(Admission *a);

// -------------------------------------------------------------------------------------------------
// opt_model.c again: the forward pass as ops, in pieces of a sweep (section 3)
//
// Each function posts ops for `call`, on its lane, and uses scratch regions of the plan. x (rows,
// h1) is the hidden state, which is changed in place; w holds one layer's tensors on the GPU.
// -------------------------------------------------------------------------------------------------

/* Posts the embedding of new tokens: x = token rows + position rows. tokens (rows, embed) holds
 * their rows of the token table; it is x itself if there is no project_in. positions (1, rows) I32
 * are already offset by 2. */
void opt_embed(Poster *poster, Call call, const Plan *plan, Tensor x, Tensor tokens,
               Tensor positions);
/* Posts the half of a layer before attention. It computes qkv (rows, 3 h1) F16; each row holds q, k
 * and v side by side. */
void opt_project(Poster *poster, Call call, const Plan *plan, const Tensor w[NROLES], Tensor qkv,
                 Tensor x);
/* Posts the half of a layer after attention: x += o w_O, then the MLP; o (rows, h1). */
void opt_finish(Poster *poster, Call call, const Plan *plan, const Tensor w[NROLES], Tensor x,
                Tensor o);
/* Posts the final norm, project_out and the head: logits (rows, vocab) of the last rows x (rows,
 * h1), which are overwritten. */
void opt_logits(Poster *poster, Call call, const Plan *plan, Tensor head, Tensor logits, Tensor x);

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows is schedule_run, the way into all of it, and what it tells its
// caller. On a first reading go on with opt_model.c.
// -------------------------------------------------------------------------------------------------

typedef enum { FINISH_STOP, FINISH_LENGTH } FinishReason;

/* The times and counts of a run so far; prefill_s and decode_s are 0 until it has ended. A sweep in
 * which some batch prefills counts as a prefill sweep, even if others decode; its seconds are
 * divided into prefill and decode by the time that the processors worked on each. */
typedef struct {
    double total_s;          /* seconds of all sweeps */
    double prefill_s;        /* those of them that were spent on prompts */
    double decode_s;         /* and on new tokens */
    double prefill_sweeps_s; /* seconds of the prefill sweeps */
    long prefill_tokens;     /* tokens of prompts */
    long generated;          /* new tokens */
    long decoded;            /* new tokens other than a sequence's first */
    long beside;             /* the decoded tokens of prefill sweeps */
    double attended;         /* pairs of a token and a token that it attends to */
    long sweeps, prefill_sweeps;
    long ended; /* sequences that have ended */
} RunStats;

/* The callbacks of a run, on the thread that runs the schedule. */
typedef struct {
    void *ctx;
    /* Receives the n-th token of a prompt. Returning true ends the sequence there (at a stop text);
     * </s> always ends it. May be NULL. */
    bool (*token)(void *ctx, int prompt, const int32_t *tokens, int n);
    /* Receives a sequence that has ended, without the final </s>. Returning -1 and err stops the
     * run. May be NULL. */
    int (*done)(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason,
                Error *err);
    /* Receives, with task.keep_logits, the logits (vocab) of the step that chose token n-1. May be
     * NULL. */
    void (*logits)(void *ctx, int prompt, int n, const float *logits);
    /* Receives, in a scored task, the log-probability of token `at` of the prompt and the most
     * probable token, `best`. Each prompt's tokens come in order. May be NULL. */
    void (*scored)(void *ctx, int prompt, int at, float logp, int32_t best);
    /* Receives the stats after each sweep. Returning -1 and err stops the run. May be NULL. */
    int (*sweep)(void *ctx, const RunStats *stats, Error *err);
} Listener;

/* Runs the whole task, block after block, as the plan's policy says. Returns 0, or -1 and err. In a
 * pipeline (device->net) every stage calls it with a plan for its own layers, the same policy and
 * the same task. */
int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener,
                 RunStats *stats, Error *err);

#ifdef __cplusplus
}
#endif
#endif
