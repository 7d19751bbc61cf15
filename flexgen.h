/* flexgen.h: the words of the paper as structs, and the functions of the top level. Each floor has a header of its own.
 *
 * Names are the paper's: i is a token, j a layer, k a GPU batch; wg wc wd, cg cc cd, hg hc hd are the fractions of
 * weights, KV cache and activations on GPU, CPU and disk; s and n are prompt and output lengths, l layers, h1 and h2
 * hidden sizes, nh heads. Sizes and offsets in bytes are size_t. The header is valid C and C++.
 * Read next: opt_model.c, the model that all this is for. */
#ifndef FLEXGEN_H
#define FLEXGEN_H
#include "check.h"
#include "quant.h"
#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* U8: the bytes of numbers that quant.c has packed. */
typedef enum { F32, F16, BF16, I32, U8 } Type;
static inline size_t type_bytes(Type t) { return t == F32 || t == I32 ? 4 : t == U8 ? 1 : 2; }

/* The paper's three-level memory hierarchy (section 4.1). NTIERS also means "nowhere". */
typedef enum { TIER_GPU, TIER_CPU, TIER_DISK, NTIERS } Tier;

/* What a lane occupies: a link, a processor. */
typedef enum { CTOG, GTOC, DTOC, CTOD, GPU, CPU, NET, NCHANNELS } Channel;
extern const char *const tier_name[NTIERS], *const channel_name[NCHANNELS];

/* A view of a matrix; it owns nothing. On GPU and CPU, offset counts from the start of the tier's arena; on disk, from the
 * start of `file` (0: the offload file, 1 and up: the checkpoint's). Row r begins at offset + r * ld * type_bytes(type).
 * plan_view makes views from the regions of a plan. */
typedef struct {
    Tier tier;
    Type type;
    int file;
    Quant quant; /* of U8 */
    size_t offset;
    int rows, cols;
    size_t ld;        /* elements from one row to the next, cols when dense */
    int region;       /* which region of its tier it lies in */
    int cell, ncells; /* the run of cells by which depend.c orders its users; none where nobody writes */
} Tensor;

/* Regions and slabs begin at whole cache lines. */
static inline size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }
static inline size_t tensor_bytes(Tensor t) { return (size_t)t.rows * t.cols * type_bytes(t.type); }
/* Bytes from the first element of a view to the end of its last. */
static inline size_t tensor_span(Tensor t) { return t.rows ? ((t.rows - 1) * t.ld + t.cols) * type_bytes(t.type) : 0; }
/* Rows first .. first+n-1 of a view. */
static inline Tensor tensor_rows(Tensor t, int first, int n) {
    t.offset += (size_t)first * t.ld * type_bytes(t.type);
    t.rows = n;
    return t;
}
/* The elements of a dense view as one row. */
static inline Tensor tensor_row(Tensor t) {
    t.cols *= t.rows, t.rows = 1, t.ld = (size_t)t.cols;
    return t;
}
/* Two dense views that lie one behind the other, as one. */
static inline Tensor tensor_joined(Tensor a, Tensor b) {
    CHECK(a.offset + a.rows * a.ld * type_bytes(a.type) == b.offset && a.cols == b.cols);
    a.rows += b.rows;
    return a;
}
/* The same view, of which only cells first .. first+n-1 are used. */
static inline Tensor tensor_cells(Tensor t, int first, int n) {
    t.cell += first;
    t.ncells = n;
    return t;
}
/* Columns first .. first+n-1 of a view. */
static inline Tensor tensor_cols(Tensor t, int first, int n) {
    t.offset += (size_t)first * type_bytes(t.type);
    t.cols = n;
    return t;
}

typedef struct Checkpoint Checkpoint;
typedef struct Device Device;
typedef struct Op Op;
typedef struct Poster Poster;
typedef struct Hardware Hardware;
typedef struct Net Net;
typedef struct Trace Trace;

// ---------------------------------------------------------------------------------------------------------------
// io/config.c: OPT sizes and shapes; opt_model.c: the forward pass (section 3)
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    char name[64];
    int l, h1, h2, nh;  /* layers, hidden size, FFN size, heads */
    int vocab, max_pos; /* vocabulary; positions (their embedding has max_pos + 2 rows, offset by 2) */
    int embed;          /* word_embed_proj_dim: columns of the token table; h1 unless the model projects in and out */
    bool pre_norm;      /* do_layer_norm_before; false only in opt-350m */
    bool final_norm;    /* a layernorm after the last layer: pre_norm and not _remove_final_layer_norm */
    int eos;            /* </s>, also the first token of every prompt (2) */
    int stage, stages;  /* which part of a pipeline the layers are (section 4.4); stages 0 or 1: the whole model */
} OptConfig;
/* The first stage has the embedding, the last one the head. */
static inline bool is_first(const OptConfig *config) { return config->stage == 0; }
static inline bool is_last(const OptConfig *config) { return config->stage + 1 >= config->stages; }

/* The tensors of one decoder layer. A weight is followed by its bias; matrices are (out, in) as in the checkpoint. */
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
static inline bool role_is_matrix(Role role) { return role % 2 == 0 && role != LN1_W && role != LN2_W; }
/* q, k and v are one product: their matrices lie together wherever they rest, one behind the other, and so do their biases.
 * Whether another one follows: */
static inline bool role_goes_on(Role role) { return role >= Q_W && role <= K_B; }
/* Where a layer's tensors come in what we lay out: the matrices of q, k and v, their biases, the others as here. */
static inline int role_place(Role role) {
    const int from_q = (int)role - Q_W;
    return role >= Q_W && role <= V_B ? from_q % 2 * 3 + from_q / 2 : V_B + (int)role;
}

/* The tensors outside the layers. Absent ones have rows 0: project_in/out when embed == h1, final norm when
 * !final_norm, lm_head when it is tied to the token table. */
typedef enum { TOK_EMBED, POS_EMBED, PROJECT_IN, PROJECT_OUT, FINAL_LN_W, FINAL_LN_B, LM_HEAD, NGLOBALS } Global;

/* Fills *config for "opt-125m" ... "opt-175b" ("facebook/" in front is allowed); -1 if the name is none of them. */
int opt_config_by_name(OptConfig *config, const char *name);
/* "opt-125m, opt-350m, ..." for messages. */
const char *opt_known_names(void);
/* Shapes: vectors have rows 1. */
void opt_role_shape(const OptConfig *config, Role role, int *rows, int *cols);
void opt_global_shape(const OptConfig *config, Global global, int *rows, int *cols);

/* The plain forward pass of one whole sequence, to be read beside section 3: no tiers, no pages, no lanes. Everything is
 * float, but weights, Q, K and V are rounded to F16, as the engine stores them. logits is (n, vocab), for all positions.
 * ids[n], n <= max_pos. Slow on purpose. Fails on a read error. */
int reference_forward(float *logits, const Checkpoint *checkpoint, const int32_t *ids, int n, Error *err);
/* Its attention: o = softmax(q k^T / sqrt(hd)) v for every head; row t sees rows 0..t. o, q, k, v (n, nh * hd). score (n)
 * is scratch. */
void plain_attention(float *o, const float *q, const float *k, const float *v, float *score, int n, int nh, int hd);

// ---------------------------------------------------------------------------------------------------------------
// tier.c: placement, the plan, KV pages (section 4.2)
// ---------------------------------------------------------------------------------------------------------------

typedef enum { SCHEDULE_ZIGZAG, SCHEDULE_ROW, SCHEDULE_DIAGONAL } Schedule;
extern const char *const schedule_name[];

/* A policy (section 4.3): fractions are 0 to 1, the disk's share is what is left. */
typedef struct {
    double wg, wc, cg, cc, hg, hc;
    int gbs, num_gpu_batches;
    int groups; /* blocks in flight, which sweep in turn (section 4.4); 0 or 1: one, as on one machine */
    Schedule schedule;
    bool cpu_attention; /* attention over CPU and disk pages runs on the CPU (computation delegation) */
    bool overlap;       /* false: every post is waited for */
    bool synchronize;   /* all lanes are waited for behind every square, as Figure 4 is printed */
    int page_tokens;    /* tokens of a KV page */
    Tier table_home;    /* where the token table (and lm_head) rests */
    int piece_rows;     /* of prompts that pass a layer together, or of the longest prompt; 0 is PIECE_ROWS */
    int workspaces;     /* rotating ones for hidden states that rest off the GPU: 2 or 3; 0 is 3 */
    Quant weight_quant; /* how the matrices of the layers are packed, on every tier; bits 0: they are F16 */
    Quant cache_quant;  /* how the KV pages are packed */
    double sparsity;    /* the share of past tokens whose V attention reads, if between 0 and 1; only with cpu_attention,
                           since V can be skipped only where the pages are */
} Policy;
/* One batch's hidden state is computed, the next one's comes, and the last one's goes: into three workspaces, or into two
 * if the next may wait for the last. */
enum { PIECE_ROWS = 1024, LEAST_WORKSPACES = 2, WORKSPACES = 3 };
/* Up to so many rows a GPU uses packed weights directly (4 bits, groups of 64); otherwise it unpacks them first. */
enum { PACKED_ROWS = 64 };
static inline bool takes_packed(Quant quant) { return quant.bits == 4 && quant.group == 64; }
static inline int group_count(const Policy *policy) { return imax(policy->groups, 1); }
static inline bool is_sparse(const Policy *policy) { return policy->sparsity > 0 && policy->sparsity < 1; }
/* For a new token, sparse attention (section 5) reads all of K, but V only of the token itself and of ceil(sparsity * past)
 * of the `past` tokens before it: for each query and head, those with the largest scores; of equal scores, the earlier
 * token. How many tokens that is, with itself: */
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

/* Rows of a prompt in prefill that the head needs: the last; in a scored task, all that are followed by a scored token. */
static inline int head_rows(const Task *task, const Prompt *prompt) {
    return task->scored ? prompt->s + 1 - imin(prompt->from, prompt->s) : 1;
}

/* A place in a block: its GPU batch, and the tiers of the KV pages and the activations of whoever sits there. k counts the
 * batches of the block; Op.k counts those of a sweep, and may be another number for the same batch. */
typedef struct {
    int k;
    Tier kv, act;
    int prompt; /* who sits there, an index into the task; -1: nobody */
    long since; /* the sweep of its prefill */
} Seat;

/* Error diffusion over a stream of items: each goes to the tier that is furthest behind its share. */
typedef struct {
    double share[NTIERS], due[NTIERS]; /* due: what the tier should hold by now minus what it holds */
} Diffusion;
Tier diffuse(Diffusion *d, double size);
/* Splits `total` sequences by the shares. What rounding down leaves goes to the tiers with the largest remainders. */
void apportion(int count[NTIERS], const double share[NTIERS], int total);
/* Deals a block of count vacant seats to GPU batches of gbs and to tiers, so that the block as a whole meets cg cc cd and
 * hg hc hd to within one sequence. Within a batch, seats are ordered by the tier of their KV, and the tiers of their
 * activations never decrease, so that each tier's rows lie together. */
void deal_block(Seat *seats, const Policy *policy, int count);
/* Seats in a block: gbs * num_gpu_batches, or gbs where the schedule keeps one batch in flight. */
int block_size(const Policy *policy);

/* Chooses a home for every tensor of every decoder layer (a weight and its bias stay together, and so do q, k and v), by
 * error diffusion across layers: each tier gets its fraction of the bytes to within one of these. home is [l][NROLES]. */
void place_weights(Tier (*home)[NROLES], const OptConfig *config, double wg, double wc);

/* What a tier is used for, in the order in which the plan lays it out. A purpose may exist on several tiers: the cache on
 * all three, the queries of delegated attention on GPU and CPU. */
typedef enum {
    RESTING_WEIGHTS,  /* of the decoder layers */
    EMBEDDINGS,       /* the tensors outside of the layers */
    WEIGHT_SLOT,      /* layers that stream use this slot and the next in turn; on the CPU, what comes from disk */
    WEIGHT_SLOT_1,    /* the other one */
    UNPACKED_WEIGHTS, /* a layer's matrices in F16, for batches of too many rows for packed ones */
    KV_CACHE,         /* pages: (layer, K|V, page, token, h1) */
    KV_STAGING,       /* pages of one layer on their way: on the GPU to its attention, on the CPU from disk */
    ACTIVATIONS,      /* at rest between two layers */
    ACT_READING,      /* staging of the disk's activations on the CPU */
    ACT_WRITING,
    HIDDEN,        /* workspaces: x, the hidden state while it is computed */
    QKV,           /* q, k, v: what PROJECT makes, side by side */
    NEW_KV_PACKED, /* new k, v as packed pages store them, on their way down */
    QUERY,         /* q that has come down */
    NEW_KV,        /* new k, v that have come down, as pages store them, packed or not */
    ATTENDED,      /* o, the result of attention */
    NORM_1,        /* what PROJECT has normalized, some rows at a time */
    NORM_2,        /* what FINISH has normalized */
    MLP,
    EMBEDDED,     /* rows of the token table, before project_in; on the CPU if the token table is there */
    LAST_ROWS,    /* the rows that the head needs */
    HEAD_OUT,     /* the same rows after project_out */
    LOGITS,       /* of some of these rows; on the CPU of all, if the task keeps them */
    RECEIVED,     /* hidden states from the stage before: one slot for each batch */
    SENDING,      /* hidden states for the stage behind */
    CHOSEN,       /* sparse attention: the chosen tokens */
    WEIGHING,     /* sparse attention: their weights */
    INDEX_TABLES, /* two for each batch: for its even and its odd sweeps */
    NEW_TOKENS,   /* chosen ids of each batch */
    LOG_PROBS,    /* in a scored task: log-probabilities of the given tokens */
    GREEDY,       /* in a scored task: the greedy choices */
    NREGIONS
} RegionId;

/* One line of the plan: what one tier holds for one purpose, `slots` matrices of (rows, cols) one after the other. A
 * slot is one cell or several; a cell is always used as a whole, and depend.c keeps order by cells. bytes 0: no region. */
typedef struct {
    const char *name, *remedy; /* "KV cache", "--percent (third number), ..." */
    Type type;
    int rows, cols, slots;
    size_t offset, bytes; /* offset SIZE_MAX: it rests in the checkpoint */
    int cell, cells;      /* the first of its cells; cells of a slot */
} Region;

/* Where a tensor lies while its layer is computed: in its GPU home, or at an offset of the layer's staging slot. */
typedef struct {
    Tensor home;        /* tier DISK: in the checkpoint (or the offload file for a dummy) */
    size_t slab_offset; /* in the slot, when home is not the GPU */
} WeightPlace;

/* The work of all sweeps of one kind if no sequence stops early, as sums over these sweeps. */
typedef struct {
    double sweeps;
    double prefills, prompts, prompt_rows, pairs; /* batches in prefill; their prompts, tokens; pairs of query and key */
    double decodes, steps, past;                  /* batches that decode; their new tokens; tokens that those attend to */
    double heads;                                 /* rows that the head needs, of both */
} Workload;

/* Every byte that each tier will hold, before anything is allocated, and where. Layer l stands for the head: the token
 * table (or lm_head), which is streamed like a layer when it does not rest on the GPU. */
typedef struct Plan {
    OptConfig config;
    Policy policy;
    Type act_type;
    Region region[NREGIONS][NTIERS];
    int ncells;                 /* of all regions */
    size_t total[NTIERS];       /* bytes of each tier; on disk, the checkpoint's share included */
    size_t offload_bytes;       /* of the disk's total: the offload file */
    double achieved[3][NTIERS]; /* weights, cache, activations: the fractions that result */

    WeightPlace (*weight)[NROLES]; /* [l] */
    Role (*slab_order)[NROLES];    /* [l] how a layer's tensors lie in its slab: q, k, v, then as in the checkpoint */
    WeightPlace global[NGLOBALS];  /* the head streams as layer l when it is not on the GPU */
    Global head;                   /* the matrix that makes logits: LM_HEAD, or TOK_EMBED when they are tied */
    size_t *cpu_slab, *disk_slab;  /* [l + 1] bytes of a layer that stream from the CPU tier, from disk */
    size_t *cpu_slab_offset;       /* [l + 1] in the CPU's RESTING_WEIGHTS; the head's in its EMBEDDINGS */
    size_t slot_bytes[2];          /* of the two staging slots on the GPU, which streaming layers take in turn */
    size_t disk_slot_bytes[2];     /* of the disk's two staging slots on the CPU tier */

    int batches;      /* GPU batches in flight, of all groups; with the diagonal schedule each has one more, through which
                         topups enter */
    long sweeps;      /* that the task takes if no sequence stops early */
    Workload work[2]; /* in sweeps without a prefill; in those with one */
    double a21_kv;    /* A.2.1's estimate of the peak bytes of KV for the schedule, with the task's mean lengths */
    int max_rows, max_seqs;    /* of a batch: token rows, sequences */
    int max_pages;             /* of a sequence */
    int piece_rows;            /* of a batch in prefill: rows of the sequences that pass a layer together */
    int chunk;                 /* of a piece: rows that are normalized at a time */
    int pieces;                /* of a batch, at most */
    int head_rows, head_chunk; /* rows of a batch that the head needs; rows that become logits at a time */
    int off_rows, off_seqs;    /* largest share of a batch whose KV is not on the GPU: rows, sequences */
    size_t kv_row;             /* bytes of a token's K (or V) in a page */
    int npages[NTIERS];        /* KV pages of each tier's pool, for each group */
    int staged_pages[2];       /* pages of one staging slot: on the GPU; on the CPU, for the disk */
    int nws, turns;            /* rotating workspaces: of batches (x), of pieces (q, k and v, the result of attention) */
    int *act_rows[NTIERS];     /* [batches] rows of activation home of each batch */
    int *act_first[NTIERS];    /* [batches] its first row in the tier's ACTIVATIONS */
    int max_act_rows[NTIERS];
    bool need_x;                /* some batch has activations off the GPU: workspaces hold x */
    int packed_rows;            /* batches of at most so many rows take packed weights as they lie */
    size_t unpacked_bytes;      /* of UNPACKED_WEIGHTS; 0: none */
    size_t unpacked_at[NROLES]; /* where each matrix begins there */
    int table_ints;             /* of one batch's index tables */
    int most_chosen;            /* sparse attention: the most tokens that a query and head choose */
} Plan;

/* One layer's paged KV on one tier, as attention sees it: k and v are (npages * page_tokens, h1) views, or packed
 * (npages * page_tokens, bytes) U8; pages (nseq, max_pages) and len (nseq) are I32 views. All are on the tier of the
 * processor that attends. There are no pointers in it, so a GPU kernel reads it as it is. */
typedef struct {
    Tensor k, v, pages, len;
    int page_tokens, nh;
} PageTable;

/* Rows first .. first+rows-1 of slot `slot` (modulo their number) of a region. */
Tensor plan_view(const Plan *plan, RegionId id, Tier tier, long slot, int first, int rows);
/* n numbers of a type, from byte `at` of a slot on, as a matrix of one row. */
Tensor plan_bytes(const Plan *plan, RegionId id, Tier tier, long slot, size_t at, Type type, int n);

/* The first npages pages of layer j in a tier's page pool, as a batch uses them; and a staging slot laid out as a pool of
 * one layer. pages, len: the batch's index tables. */
PageTable pool_pages(const Plan *plan, Tier tier, int j, int batch, int npages, Tensor pages, Tensor len);
PageTable staged_pages(const Plan *plan, Tier tier, long slot, int npages, Tensor pages, Tensor len);
/* The cell of a batch's pages of layer j; batch == plan->batches + g stands for the pages of group g that nobody has. */
int cache_cell(const Plan *plan, Tier tier, int batch, int j);

/* Plans the task under the policy. Never fails for want of memory: see plan_fits. Fails where a prompt is impossible. */
Plan *plan_make(const Checkpoint *checkpoint, const Policy *policy, const Task *task, Type act_type, Error *err);
void plan_free(Plan *plan);
/* Bytes of a layer's weights as they rest and move: F16, or packed. */
size_t plan_layer_bytes(const Plan *plan);
/* Whether the disk's share of the layers is a copy in the offload file; if not, it is the checkpoint itself. */
bool copied_to_disk(const Plan *plan, const Checkpoint *checkpoint);
/* -1 and err (EXIT_USAGE) when a tier's total exceeds its capacity; err names the tier, what it needs and has, its largest
 * region, and the flag that shrinks it. */
int plan_fits(const Plan *plan, const size_t capacity[NTIERS], Error *err);
/* The same; if not placed, nobody has given the shares, and changing them is no advice. */
int plan_refuse(const Plan *plan, const size_t capacity[NTIERS], bool placed, Error *err);
/* By how many bytes the tiers exceed their capacities; 0: the plan fits. */
size_t plan_missing(const Plan *plan, const size_t capacity[NTIERS]);
/* Sets policy->workspaces as large (no larger than it is, if it is set) and policy->table_home as high as the plan has room
 * for, the former first; -1 and err (of the plan that misses the least) where none fits. */
int fit_policy(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type, const size_t capacity[NTIERS],
               Error *err);
/* Page indices of one tier's pool: the lowest free one first, so that pages taken together lie together. */
typedef struct {
    uint64_t *free; /* one bit for each page */
    int first;      /* index of the pool's first page */
    int npages, used, peak, hint;
} PagePool;
void pool_open(PagePool *pool, int first, int npages);
int pool_take(PagePool *pool); /* the plan guarantees that there is one */
void pool_give(PagePool *pool, int page);
void pool_close(PagePool *pool);
/* Pages for `tokens` tokens. */
static inline int pages_for(int tokens, int page_tokens) { return (tokens + page_tokens - 1) / page_tokens; }

// ---------------------------------------------------------------------------------------------------------------
// admission.c: row, zig-zag, diagonal (sections 4.1 and A.2)
// ---------------------------------------------------------------------------------------------------------------

/* Who is in flight of one group, and which KV pages they will hold. */
typedef struct {
    const Policy *policy;
    const Task *task;
    const int *limit;      /* [NTIERS] pages of each pool; NULL: no limit (the plan) */
    Seat *seat;            /* dealt anew for every block; [min(block_size, task count)] */
    int nseats;            /* of the present block */
    int seated, *in_batch; /* how many are seated: in all, in batch k */
    bool *with_members;    /* whether batch k had members before the last admission */
    int *next_prompt;      /* the line of waiting prompts, which groups share */
    long sweep;            /* the next one, of this group's */
    long n;                /* the mean of the prompts' n, rounded up */
    int horizon;           /* the largest n of a prompt: the sweeps that it takes */
    int *need[NTIERS];     /* at [i % horizon]: pages in sweep i of all who are seated, if none stops early */
    int peak[NTIERS];      /* the largest need so far */
} Admission;

/* By schedule: how many prompts may take a seat before sweep a->sweep; 0 or less: none. A fourth schedule would be one
 * more. */
extern int (*seats_for[])(const Admission *a);

/* limit and next_prompt must outlive it. */
void admission_open(Admission *a, const Policy *policy, const Task *task, int *next_prompt, const int *limit);
/* Before a sweep: the waiting prompts that enter it take their seats. Fills entered[] with seats and returns their number;
 * the first *topups of them (at most gbs) sit in batches that have members, the others have their batch for themselves.
 * Prompts of one batch, and the topups together, are neighbours in the input. If nobody is seated and prompts wait,
 * some enter. */
int admission_next(Admission *a, long sweep, int *entered, int *topups);
/* The sequence in this seat has ended after so many tokens. */
void admission_leave(Admission *a, int seat, int generated);
void admission_close(Admission *a);

// ---------------------------------------------------------------------------------------------------------------
// opt_model.c again: the forward pass as ops, in pieces of a sweep (section 3)
//
// Each function posts on op.lane. x (rows, h1) is the hidden state, changed in place; w is one layer's tensors on the GPU;
// norm and ffn are scratch of norm.rows rows, and x passes through them that many rows at a time.
// ---------------------------------------------------------------------------------------------------------------

/* The hidden state of new tokens: x = token rows + position rows. tokens: (rows, embed) gathered token rows; with rows 0,
 * the rows `ids` of the token table, which is then on the GPU. positions (1, rows) I32 are already offset by 2. embedded:
 * scratch for project_in. */
void opt_embed(Poster *to, Op op, const OptConfig *config, const Tensor global[NGLOBALS], Tensor x, Tensor tokens,
               Tensor ids, Tensor positions, Tensor embedded);
/* The half of a layer before attention: qkv (rows, 3 h1) F16, a row's q, k and v side by side. */
void opt_project(Poster *to, Op op, const OptConfig *config, const Tensor w[NROLES], Tensor qkv, Tensor x, Tensor norm);
/* The half after it: x += o w_O, then the MLP; o (rows, h1). */
void opt_finish(Poster *to, Op op, const OptConfig *config, const Tensor w[NROLES], Tensor x, Tensor o, Tensor norm,
                Tensor ffn);
/* Final norm, project_out and the head: logits (rows, vocab) of the last rows x (rows, h1), which it overwrites. */
void opt_logits(Poster *to, Op op, const OptConfig *config, const Tensor global[NGLOBALS], Tensor head, Tensor logits,
                Tensor x, Tensor out);

// ---------------------------------------------------------------------------------------------------------------
// schedule.c: the sweep, Figure 4
// ---------------------------------------------------------------------------------------------------------------

typedef enum { FINISH_STOP, FINISH_LENGTH } FinishReason;

/* How a run went. A sweep in which one batch prefills while others decode counts as a prefill sweep; its seconds count as
 * prefill and as decode by the time that the processors worked for either. */
typedef struct {
    double total_s, prefill_s, decode_s;     /* of all sweeps; what of it was spent on prompts, on new tokens */
    double prefill_sweeps_s;                 /* of the sweeps in which some batch prefilled */
    long prefill_tokens, generated, decoded; /* prompt tokens; new tokens; those of them that are no prompt's first */
    long beside;                             /* of the decoded: those of prefill sweeps */
    double attended;                         /* pairs of a token and one that it attends to */
    long sweeps, prefill_sweeps;
} RunStats;

/* Calls back on the thread that runs the schedule. */
typedef struct {
    void *ctx;
    /* A token of a prompt, its n-th, has become known; true ends the sequence there (a stop text), as </s> does anyway.
     * May be NULL. */
    bool (*token)(void *ctx, int prompt, const int32_t *tokens, int n);
    /* A sequence has ended; tokens are without the final </s>. -1 and err stops the run. */
    int (*done)(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err);
    /* With task.keep_logits: (vocab) of the step that chose token n-1. May be NULL. */
    void (*logits)(void *ctx, int prompt, int n, const float *logits);
    /* In a scored task: token `at` of the prompt had log-probability logp, and `best` would have been chosen. Each prompt's
     * tokens come in order. May be NULL. */
    void (*scored)(void *ctx, int prompt, int at, float logp, int32_t best);
    /* After every sweep. -1 and err stops the run. May be NULL. */
    int (*sweep)(void *ctx, const RunStats *stats, Error *err);
} Listener;

/* Generates for the whole task, block after block, as the plan's policy says. 0, or -1 and err. In a pipeline (device->net)
 * every stage calls it with a plan for its own layers, the same policy and the same task. */
int schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats, Error *err);

#ifdef __cplusplus
}
#endif
#endif
