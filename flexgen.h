/* flexgen.h: the words of the paper as structs, and the functions of the top level. The main
 * headers of the three folders behind it are device/device.h, cost/cost.h and io/io.h.
 *
 * Names are the paper's: i is a token, j a layer, k a GPU batch; wg wc wd, cg cc cd, hg hc hd are
 * the fractions of weights, KV cache and activations on GPU, CPU and disk; s and n are prompt and
 * output lengths, l layers, h1 and h2 hidden sizes, nh heads. Sizes and offsets in bytes are Bytes.
 * The header is valid C and C++. Read next: opt_model.c. */
#ifndef FLEXGEN_H
#define FLEXGEN_H
#include "base/base.h"
#include "quant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* U8: the bytes of numbers that quant.c has packed. */
typedef enum { F32, F16, BF16, I32, U8 } Type;
HOST_AND_GPU static inline size_t type_bytes(Type t) {
    return t == F32 || t == I32 ? 4 : t == U8 ? 1 : 2;
}

/* The paper's three-level memory hierarchy (section 4.1). NTIERS also means "nowhere". */
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;

/* What a lane occupies: a link, a processor. */
typedef enum { CTOG, GTOC, DTOC, CTOD, GPU, CPU, NET, NCHANNELS } Channel;
extern const char *const tier_name[NTIERS], *const channel_name[NCHANNELS];

/* A view of a matrix; it owns nothing. On GPU and CPU, offset counts from the start of the tier's
 * arena; on disk, from the start of `file` (0: the offload file, 1 and up: the checkpoint's). Row r
 * begins at offset + r * ld * type_bytes(type). plan_view makes views from the regions of a plan.
 */
typedef struct {
    Tier tier;
    Type type;
    int file;
    Bytes offset;
    int rows, cols;
    uint64_t ld; /* elements from one row to the next, cols when dense */
    int region;  /* which region of its tier it lies in */
    int cell,
        ncells; /* the run of cells by which depend.c orders its users; none where nobody writes */
    void *at;   /* its address, for who carries out an op; else NULL */
} Tensor;

/* Regions and slabs begin at whole cache lines. */
static inline Bytes whole_lines(Bytes bytes) { return (bytes + 63) / 64 * 64; }
static inline Bytes tensor_bytes(Tensor t) { return (Bytes)t.rows * t.cols * type_bytes(t.type); }
/* Bytes from the first element of a view to the end of its last. */
static inline Bytes tensor_span(Tensor t) {
    return t.rows ? ((t.rows - 1) * t.ld + t.cols) * type_bytes(t.type) : 0;
}
/* The same view, so many bytes further. */
static inline Tensor tensor_moved(Tensor t, Bytes bytes) {
    t.offset += bytes;
    if (t.at)
        t.at = (uint8_t *)t.at + bytes;
    return t;
}
/* Rows first .. first+n-1 of a view. */
static inline Tensor tensor_rows(Tensor t, int first, int n) {
    t = tensor_moved(t, first * t.ld * type_bytes(t.type));
    t.rows = n;
    return t;
}
/* The elements of a dense view as one row. */
static inline Tensor tensor_row(Tensor t) {
    t.cols *= t.rows;
    t.rows = 1;
    t.ld = (size_t)t.cols;
    return t;
}
/* The same view, of which only cells first .. first+n-1 are used. */
static inline Tensor tensor_cells(Tensor t, int first, int n) {
    t.cell += first;
    t.ncells = n;
    return t;
}
/* Columns first .. first+n-1 of a view. */
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

typedef struct {
    char name[64];
    int l, h1, h2, nh; /* layers, hidden size, FFN size, heads */
    int vocab,
        max_pos; /* vocabulary; positions (their embedding has max_pos + 2 rows, offset by 2) */
    int embed;   /* word_embed_proj_dim: columns of the token table; h1 unless the model projects in
                    and out */
    bool pre_norm;   /* do_layer_norm_before; false only in opt-350m */
    bool final_norm; /* a layernorm after the last layer: pre_norm and not _remove_final_layer_norm
                      */
    int eos;         /* </s>, also the first token of every prompt (2) */
    int stage, stages; /* which part of a pipeline the layers are (section 4.4); stages 0 or 1: the
                          whole model */
} OptConfig;
/* The first stage has the embedding, the last one the head. */
static inline bool is_first(const OptConfig *config) { return config->stage == 0; }
static inline bool is_last(const OptConfig *config) { return config->stage + 1 >= config->stages; }

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
/* Compression packs the matrices; the rest are biases and layernorms. */
static inline bool role_is_matrix(Role role) {
    return role % 2 == 0 && role != LN1_W && role != LN2_W;
}
/* q, k and v are one product: their matrices lie together wherever they rest, one behind the other,
 * and so do their biases. Whether another one follows: */
static inline bool role_goes_on(Role role) { return role >= Q_W && role <= K_B; }
/* Where a layer's tensors come in what we lay out: the matrices of q, k and v, their biases, the
 * others as here. */
static inline int role_place(Role role) {
    const int from_q = (int)role - Q_W;
    return role >= Q_W && role <= V_B ? from_q % 2 * 3 + from_q / 2 : V_B + (int)role;
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

/* Fills *config for "opt-125m" ... "opt-175b" ("facebook/" in front is allowed); -1 if the name is
 * none of them. */
int opt_config_by_name(OptConfig *config, const char *name);
/* "opt-125m, opt-350m, ..." for messages. */
const char *opt_known_names(void);
/* Shapes: vectors have rows 1. */
void opt_role_shape(const OptConfig *config, Role role, int *rows, int *cols);
void opt_global_shape(const OptConfig *config, Global global, int *rows, int *cols);

/* The plain forward pass of one whole sequence, to be read beside section 3: no tiers, no pages, no
 * lanes. Everything is float, but weights, Q, K and V are rounded to F16, as the engine stores
 * them. logits is (n, vocab), for all positions. ids[n], n <= max_pos. Slow on purpose. Fails on a
 * read error. */
int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n,
                      Error *err);
/* Its attention: o = softmax(q k^T / sqrt(hd)) v for every head; row t sees rows 0..t. o, q, k, v
 * (n, nh * hd). score (n) is scratch. */
void plain_attention(float *o, const float *q, const float *k, const float *v, float *score, int n,
                     int nh, int hd);

// -------------------------------------------------------------------------------------------------
// Policies and tasks (sections 4.2, 4.3)
// -------------------------------------------------------------------------------------------------

typedef enum { SCHEDULE_ZIGZAG, SCHEDULE_ROW, SCHEDULE_DIAGONAL } Schedule;
extern const char *const schedule_name[];

/* A policy (section 4.3): fractions are 0 to 1, the disk's share is what is left. */
typedef struct {
    double wg, wc, cg, cc, hg, hc;
    int gbs, num_gpu_batches;
    int flights; /* blocks in flight, which sweep in turn (section 4.4); 0 or 1: one, as on one
                    machine */
    Schedule schedule;
    bool cpu_attention; /* attention over CPU and disk pages runs on the CPU (computation
                           delegation) */
    bool overlap;       /* false: every post is waited for */
    bool synchronize;   /* all lanes are waited for behind every square, as Figure 4 is printed */
    int page_tokens;    /* tokens of a KV page */
    Tier table_home;    /* where the token table (and lm_head) rests */
    int piece_rows;     /* of prompts that pass a layer together, or of the longest prompt; 0 is
                           PIECE_ROWS */
    int workspaces;     /* rotating ones for hidden states that rest off the GPU: 2 or 3; 0 is 3 */
    bool weight_packed; /* the matrices of the layers are, on every tier; else they are F16 */
    bool cache_packed;  /* the KV pages are */
    Quant weight_study; /* how matrices in F16 are rounded when they are loaded, for a study; bits
                           0: not at all */
    Quant cache_study;  /* how new k and v in F16 are rounded */
    double sparsity; /* the share of past tokens whose V attention reads, if between 0 and 1; only
                        with cpu_attention, since V can be skipped only where the pages are */
} Policy;
/* One batch's hidden state is computed, the next one's comes, and the last one's goes: into three
 * workspaces, or into two if the next may wait for the last. */
enum { PIECE_ROWS = 1024, LEAST_WORKSPACES = 2, WORKSPACES = 3 };
/* A GPU is faster at more rows, up to about so many; see fit_pieces. */
enum { LARGE_PIECE_ROWS = 4096 };
/* Up to so many rows a GPU uses packed weights directly; otherwise it unpacks them first. */
enum { PACKED_ROWS = 64 };
/* KV pages for `tokens` tokens. */
static inline int pages_for(int tokens, int page_tokens) {
    return (tokens + page_tokens - 1) / page_tokens;
}
static inline int flight_count(const Policy *policy) { return imax(policy->flights, 1); }
static inline bool is_sparse(const Policy *policy) {
    return policy->sparsity > 0 && policy->sparsity < 1;
}
/* For a new token, sparse attention (section 5) reads all of K, but V only of the token itself and
 * of ceil(sparsity * past) of the `past` tokens before it: for each query and head, those with the
 * largest scores; of equal scores, the earlier token. How many tokens that is, with itself: */
HOST_AND_GPU static inline int sparse_tokens(double sparsity, int len) {
    double k = sparsity * (len - 1);
    int whole = (int)k;
    return 1 + whole + (k - whole > 1e-9 * k);
}

typedef struct {
    float temperature; /* 0: greedy */
    float top_p;       /* 1: off */
    int top_k;         /* 0: off */
    uint64_t seed;
} Sampling;

typedef struct {
    int32_t *ids; /* s tokens, </s> first; in a scored task s + n */
    int s, n;     /* prompt length; tokens to generate at most, s + n - 1 <= max_pos */
    int from;     /* in a scored task, the first token that is scored, 1 <= from <= s + n - 1 */
    int place;    /* in the input: with the seed and the position, all that sampling depends on */
} Prompt;

/* What is to be generated. */
typedef struct {
    Prompt *prompts;
    int count;
    Sampling sampling;
    bool keep_logits; /* bring every step's logits to the CPU (tests); not in a scored task */
    bool scored;      /* evaluation: all tokens are given, and their probabilities are reported */
} Task;

/* Rows of a prompt in prefill that the head needs: the last; in a scored task, all that are
 * followed by a scored token. */
static inline int last_rows(const Task *task, const Prompt *prompt) {
    return task->scored ? prompt->s + 1 - imin(prompt->from, prompt->s) : 1;
}

/* A place in a block: its GPU batch, and the tiers of the KV pages and the activations of whoever
 * sits there. k counts the batches of the block; Op.k counts those of a sweep, and may be another
 * number for the same batch. */
typedef struct {
    int k;
    Tier kv, act;
    int prompt; /* who sits there, an index into the task; -1: nobody */
    long since; /* the sweep of its prefill */
} Seat;

// -------------------------------------------------------------------------------------------------
// admission.c: row, zig-zag, diagonal (sections 4.1 and A.2)
// -------------------------------------------------------------------------------------------------

/* Error diffusion over a stream of items: each goes to the tier that is furthest behind its share.
 */
typedef struct {
    double share[NTIERS],
        due[NTIERS]; /* due: what the tier should hold by now minus what it holds */
} Diffusion;
Tier diffuse(Diffusion *d, double size);
/* Splits `total` sequences by the shares. What rounding down leaves goes to the tiers with the
 * largest remainders. */
void apportion(int count[NTIERS], const double share[NTIERS], int total);
/* Deals a block of count vacant seats to GPU batches of gbs and to tiers, so that the block as a
 * whole meets cg cc cd and hg hc hd to within one sequence. Within a batch, seats are ordered by
 * the tier of their KV, and the tiers of their activations never decrease, so that each tier's rows
 * lie together. */
void deal_block(Seat *seats, const Policy *policy, int count);
/* Seats in a block: gbs * num_gpu_batches, or gbs where the schedule keeps one batch in flight. */
int block_size(const Policy *policy);

/* Who is in flight of one block of several, and which KV pages they will hold. */
typedef struct {
    const Policy *policy;
    const Task *task;
    const int *limit;      /* [NTIERS] pages of each pool; NULL: no limit (the plan) */
    Seat *seat;            /* dealt anew for every block; [min(block_size, task count)] */
    int nseats;            /* of the present block */
    int seated, *in_batch; /* how many are seated: in all, in batch k */
    bool *with_members;    /* whether batch k had members before the last admission */
    int *next_prompt;      /* the line of waiting prompts, which flights share */
    long sweep;            /* the next one, of this flight's */
    long n;                /* the mean of the prompts' n, rounded up */
    int horizon;           /* the largest n of a prompt: the sweeps that it takes */
    int *need[NTIERS]; /* at [i % horizon]: pages in sweep i of all who are seated, if none stops
                          early */
    int peak[NTIERS];  /* the largest need so far */
} Admission;

/* By schedule: how many prompts may take a seat before sweep a->sweep; 0 or less: none. */
extern int (*seats_for[])(const Admission *a);

/* limit and next_prompt must outlive it. */
void admission_open(Admission *a, const Policy *policy, const Task *task, int *next_prompt,
                    const int *limit);
/* Before a sweep: the waiting prompts that enter it take their seats. Fills entered[] with seats
 * and returns their number; the first *topups of them (at most gbs) sit in batches that have
 * members, the others have their batch for themselves. Prompts of one batch, and the topups
 * together, are neighbours in the input. If nobody is seated and prompts wait, some enter. */
int admission_next(Admission *a, long sweep, int *entered, int *topups);
/* The sequence in this seat has ended after so many tokens. */
void admission_leave(Admission *a, int seat, int generated);
void admission_close(Admission *a);

// -------------------------------------------------------------------------------------------------
// opt_model.c again: the forward pass as ops, in pieces of a sweep (section 3)
//
// Each function posts on op.lane, and has its scratch from the plan. x (rows, h1) is the hidden
// state, changed in place; w is one layer's tensors on the GPU.
// -------------------------------------------------------------------------------------------------

/* The hidden state of new tokens: x = token rows + position rows. tokens: (rows, embed) their rows
 * of the token table, which are x itself where there is no project_in. positions (1, rows) I32 are
 * already offset by 2. */
void opt_embed(Poster *to, Call call, const Plan *plan, Tensor x, Tensor tokens, Tensor positions);
/* The half of a layer before attention: qkv (rows, 3 h1) F16, a row's q, k and v side by side. */
void opt_project(Poster *to, Call call, const Plan *plan, const Tensor w[NROLES], Tensor qkv,
                 Tensor x);
/* The half after it: x += o w_O, then the MLP; o (rows, h1). */
void opt_finish(Poster *to, Call call, const Plan *plan, const Tensor w[NROLES], Tensor x,
                Tensor o);
/* Final norm, project_out and the head: logits (rows, vocab) of the last rows x (rows, h1), which
 * it overwrites. */
void opt_logits(Poster *to, Call call, const Plan *plan, Tensor head, Tensor logits, Tensor x);
/* Computes every product of a layer and of the head once, at the shapes of a prefill and of a
 * decoding step, on whatever the workspaces hold. A GPU's library chooses and loads a kernel when
 * it first meets a shape, and the first prompts should not wait for that. To be called before the
 * run; it sets the counters back to 0. */
int opt_warm_up(Device *device, const Plan *plan, Error *err);

// -------------------------------------------------------------------------------------------------
// schedule.c: the sweep, Figure 4
// -------------------------------------------------------------------------------------------------

typedef enum { FINISH_STOP, FINISH_LENGTH } FinishReason;

/* How a run went. A sweep in which one batch prefills while others decode counts as a prefill
 * sweep; its seconds count as prefill and as decode by the time that the processors worked for
 * either. */
typedef struct {
    double total_s, prefill_s,
        decode_s;            /* of all sweeps; what of it was spent on prompts, on new tokens */
    double prefill_sweeps_s; /* of the sweeps in which some batch prefilled */
    long prefill_tokens, generated,
        decoded;     /* prompt tokens; new tokens; those of them that are no prompt's first */
    long beside;     /* of the decoded: those of prefill sweeps */
    double attended; /* pairs of a token and one that it attends to */
    long sweeps, prefill_sweeps;
} RunStats;

/* Calls back on the thread that runs the schedule. */
typedef struct {
    void *ctx;
    /* A token of a prompt, its n-th, has become known; true ends the sequence there (a stop text),
     * as </s> does anyway. May be NULL. */
    bool (*token)(void *ctx, int prompt, const int32_t *tokens, int n);
    /* A sequence has ended; tokens are without the final </s>. -1 and err stops the run. */
    int (*done)(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason,
                Error *err);
    /* With task.keep_logits: (vocab) of the step that chose token n-1. May be NULL. */
    void (*logits)(void *ctx, int prompt, int n, const float *logits);
    /* In a scored task: token `at` of the prompt had log-probability logp, and `best` would have
     * been chosen. Each prompt's tokens come in order. May be NULL. */
    void (*scored)(void *ctx, int prompt, int at, float logp, int32_t best);
    /* After every sweep. -1 and err stops the run. May be NULL. */
    int (*sweep)(void *ctx, const RunStats *stats, Error *err);
} Listener;

/* Generates for the whole task, block after block, as the plan's policy says. 0, or -1 and err. In
 * a pipeline (device->net) every stage calls it with a plan for its own layers, the same policy and
 * the same task. */
int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener,
                 RunStats *stats, Error *err);

#ifdef __cplusplus
}
#endif
#endif
