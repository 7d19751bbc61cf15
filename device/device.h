/* device.h: the devices that carry out ops: host, cuda, sim. */
#ifndef DEVICE_H
#define DEVICE_H
#include "device/team.h"
#include "tier.h"
#ifdef __cplusplus
extern "C" {
#endif

// ---------------------------------------------------------------------------------------------------------------
// Lanes and ops (section 4.2)
// ---------------------------------------------------------------------------------------------------------------

/* In-order queues. W_: weights, C_: cache and activations; READ: disk to CPU, LOAD: CPU to GPU. A_DOWN and A_UP carry the
 * queries of delegated attention down and its results up, so that they never wait behind a slab or a store. PROJECT and
 * FINISH are the two halves of a layer on either side of its attention; they share the GPU, so that batch k+1 can be
 * projected while the CPU still attends for batch k. RECEIVE and SEND are there in a pipeline only. */
typedef enum {
    W_READ,
    W_LOAD,
    C_READ,
    C_LOAD,
    STORE,
    D_WRITE,
    A_DOWN,
    A_UP,
    PROJECT,
    FINISH,
    ATTEND,
    RECEIVE,
    SEND,
    NLANES
} Lane;
extern const Channel lane_channel[NLANES];
extern const char *const lane_name[NLANES];

/* A point on a lane: it has happened when the lane has finished its seq-th op. An event with seq 0 has always happened. */
typedef struct {
    int lane;
    uint64_t seq;
} Event;

/* What moves or is computed, for the counters. */
typedef enum { WEIGHT, CACHE, ACTIVATION, OTHER, NKINDS } Kind;

/* One piece of a copy: dst and src have the same shape; their types differ only when weights from disk become F16. */
typedef struct {
    Tensor dst, src;
} Move;

/* What a device can do. op_info (device/op.c) says what each is called, and which views it reads and writes. */
typedef enum {
    OP_COPY,           /* moves */
    OP_EMBED,          /* y[r] = table[idx[r]], or y[r] += */
    OP_LAYERNORM,      /* y = layernorm(x) w + b */
    OP_LINEAR,         /* y = x w^T + b, ReLU, + residual */
    OP_UNPACK,         /* packed weights to F16 */
    OP_PACK,           /* new k, v that go down to rows of packed pages */
    OP_ATTEND_PREFILL, /* causal attention of whole prompts */
    OP_ATTEND,         /* attention of new tokens to pages */
    OP_SELECT,         /* sparse attention: the chosen tokens, and their weights */
    OP_FETCH,          /* the V of the chosen tokens from disk */
    OP_WEIGH,          /* the weighted sum of the V of the chosen tokens */
    OP_APPEND,         /* new k, v into pages, which may pack them */
    OP_PICK,           /* the next tokens from logits */
    OP_SCORE,          /* log-probabilities of given tokens from logits */
    OP_RECEIVE,        /* hidden states from the stage before */
    OP_SEND,           /* hidden states to the stage behind */
    NCODES
} OpCode;

enum { MAX_VIEWS = 6 };

/* What a lane is to do, as data. Shapes are those of the host_ functions (device.h); op_linear and so on check them. */
struct Op {
    OpCode code;
    Lane lane;
    /* what it is for, which traces, counters and the sim's rates need: i is the sweep, j the layer, k the GPU batch by its
     * place in the sweep, batch the same by its number in the order of entering; prefill: whether it is in prefill,
     * prefill_sweep: whether some batch of the sweep is; delegated: whether the CPU attends for it */
    Kind kind;
    bool prefill, prefill_sweep, delegated;
    int i, j, k, batch;
    // clang-format off
    union { /* its views, by number, or by name for each code */
        Tensor view[MAX_VIEWS];
        struct { Tensor y, table, idx; } embed;
        struct { Tensor y, x, w, b; } layernorm;
        struct { Tensor y, x, w, b, residual; } linear;
        struct { Tensor w, packed; } unpack;
        struct { Tensor packed, kv; } pack;
        struct { Tensor o, q, kv, start; } prefilled;
        struct { Tensor o, q, k, v, pages, len; } attend;
        struct { Tensor tokens, weights, q, k, pages, len; } select;
        struct { Tensor v, pages, len, home_v, home_pages, tokens; } fetch;
        struct { Tensor o, tokens, weights, v, pages, len; } weigh;
        struct { Tensor k, v, kv, seq, pos, pages; } append;
        struct { Tensor ids, logits, prompt, pos; } pick;
        struct { Tensor logp, best, logits, target; } score;
        struct { Tensor x; } state; /* that travels */
    };
    // clang-format on
    const Move *moves; /* of a copy; they may be changed once it has been posted */
    int nmoves;
    int nh, page_tokens;
    bool add, relu;
    double sparsity;
    Quant study;
    Sampling sampling;
    int nafter; /* it begins when these events have happened */
    Event after[NLANES];
};

// ---------------------------------------------------------------------------------------------------------------
// op.c: ops as data
// ---------------------------------------------------------------------------------------------------------------

/* What an op does with one of its views. */
typedef enum { UNUSED, READS, WRITES } Use;

/* What is known of a code: its name, and its views with their names. A copy's views are those of its moves. */
typedef struct {
    const char *name;
    struct {
        const char *name;
        Use use;
    } view[MAX_VIEWS];
} OpInfo;
extern const OpInfo op_info[NCODES];

/* The constructors. `op` brings the lane and what it is for, and is returned; shapes are checked here, for all devices.
 * Absent: rows 0. y (rows, cols), table (any, cols), idx (1, rows) I32; the table may rest in the checkpoint. */
Op *op_copy(Op *op, const Move *moves, int n);
Op *op_embed(Op *op, Tensor y, Tensor table, Tensor idx, bool add);
Op *op_layernorm(Op *op, Tensor y, Tensor x, Tensor w, Tensor b);
/* w F16, or packed, U8, where the device takes packed weights for so many rows (Plan.packed_rows) */
Op *op_linear(Op *op, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual, bool relu);
/* w (n, k) F16 of packed weights, for products of more rows than those that take packed ones */
Op *op_unpack(Op *op, Tensor w, Tensor packed);
/* New k, v, rows of (2 h1) F16, as rows of U8 for packed pages: k's heads, then v's */
Op *op_pack(Op *op, Tensor packed, Tensor kv, int nh);
/* start (1, nseq + 1): where the prompts' rows begin, and the end */
Op *op_attend_prefill(Op *op, Tensor o, Tensor q, Tensor kv, Tensor start, int nh);
Op *op_attend(Op *op, Tensor o, Tensor q, const PageTable *table);
/* Sparse attention: tokens I32 and weights F32 are (nseq, nh * most). fetch brings the V of these tokens, and no other,
 * from their home on disk to their places in the staged pages; it belongs on C_READ. */
Op *op_select(Op *op, Tensor tokens, Tensor weights, Tensor q, const PageTable *table, double sparsity);
Op *op_fetch(Op *op, const PageTable *staged, const PageTable *home, Tensor tokens, double sparsity);
Op *op_weigh(Op *op, Tensor o, Tensor tokens, Tensor weights, const PageTable *table, double sparsity);
/* kv row r becomes token pos[r] of sequence seq[r] of the page table. kv is as its pages are, or F16 to be packed; of F16
 * pages `study` is set before */
Op *op_append(Op *op, const PageTable *table, Tensor kv, Tensor seq, Tensor pos);
Op *op_pick(Op *op, Tensor ids, Tensor logits, Tensor prompt, Tensor pos, const Sampling *sampling);
/* logp (1, rows) F32, best and target (1, rows) I32 */
Op *op_score(Op *op, Tensor logp, Tensor best, Tensor logits, Tensor target);
/* x (rows, h1) on the CPU, dense */
Op *op_receive(Op *op, Tensor x);
Op *op_send(Op *op, Tensor x);

// ---------------------------------------------------------------------------------------------------------------
// lanes.c: what every device offers; the host and the cuda device
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    Bytes moved[NKINDS]; /* bytes, by what they were */
    Bytes read[2];       /* bytes of K, of V that attention to the cache has read */
    double busy_s;    /* seconds of work; waiting for a slowed link counts, waiting for events does not. A GPU's lanes have
                         them only where its marks have times: in a trace, and where sweeps mix prompts with new tokens */
    double prefill_s; /* of these, for batches in prefill */
} LaneCount;

/* The n-th of an op's views, and what it does with it. A copy has two for each move, the others up to MAX_VIEWS. */
static inline int op_nviews(const Op *op) { return op->code == OP_COPY ? 2 * op->nmoves : MAX_VIEWS; }
static inline const Tensor *op_view(const Op *op, int n, Use *use) {
    if (op->code == OP_COPY) {
        *use = n % 2 ? READS : WRITES;
        return n % 2 ? &op->moves[n / 2].src : &op->moves[n / 2].dst;
    }
    *use = op_info[op->code].view[n].use;
    return &op->view[n];
}
/* The lengths (1, nseq) of the sequences that an op on pages attends to; NULL for other ops. */
const Tensor *op_lengths(const Op *op);
/* How many tokens of K or V it reads: all, or in the second half of sparse attention the chosen ones. len: what op_lengths
 * stands for, where the CPU can read it. */
long op_tokens(const Op *op, const int32_t *len);
/* Adds the bytes that an op moves and reads to the counters of its lane, and returns those it moves. len as above. */
Bytes op_count(LaneCount *count, const Op *op, const int32_t *len);

/* How far views have reached into each region of a plan: measured peaks. Not thread safe. */
typedef struct {
    Region region[NREGIONS][NTIERS];
    Bytes high[NREGIONS][NTIERS]; /* bytes of each region touched so far, from its beginning */
} Reach;
/* Nothing is touched yet except what rests in the checkpoint, with which peak begins. */
void reach_open(Reach *reach, Bytes peak[NTIERS], const Plan *plan);
/* Raises the peak by what a view reaches further than those before it. Aborts when it lies outside its region. Views of the
 * checkpoint do not count. */
void reach_note(Reach *reach, Bytes peak[NTIERS], Tensor view);

/* The same of all views of an op. */
void reach_op(Reach *reach, Bytes peak[NTIERS], const Op *op);

/* One call of Figure 4 as it ran on one lane: ops of the same call that follow each other at once are one slice. Seconds of
 * Device.now. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill, prefill_sweep, delegated;
    int i, j, k, batch;
    double begin, end;
    Bytes bytes; /* moved; 0 for arithmetic */
} Slice;

/* A part of Table 4 in one phase: the seconds in which its lanes were busy, and in how many of them a processor was too. */
typedef struct {
    double busy_s, hidden_s;
} Share;
enum { COMPUTE, WEIGHT_READ, CACHE_READ, CACHE_WRITE, ACTIVATION_MOVES, NPARTS };
typedef struct {
    Share part[2][NPARTS]; /* [prefill] */
    double total_s[2];     /* in which anything was busy */
    double busy_s;         /* in which some lane was busy, those of channel NET aside */
} Breakdown;

/* What a sweep holds, from the end of the sweep before it on: KV pages of each tier, sequences in flight. */
typedef struct {
    double at;
    int pages[NTIERS], sequences;
} Held;

/* What a device did, in the order in which calls ended on each lane. */
struct Trace {
    char name[64];   /* of its group of rows: the model, or the stage of a pipeline */
    double ready_at; /* Device.now when all stages were ready, where their clocks differ; else 0 */
    Slice *slice;
    size_t n, capacity;
    size_t limit;      /* after so many more slices, those that are over are added up and dropped; 0: all are kept */
    size_t kept;       /* that were not over then */
    Breakdown dropped; /* what the others add up to */
    long last[NLANES]; /* 1 + index of each lane's newest slice */
    Held *held;        /* [sweeps], and one when all is over; noted by the thread that posts */
    size_t sweeps;
};

/* PROJECT and FINISH share the GPU: of their first ops, the one that can begin has its turn, and of two that can, the one
 * that was posted earlier. NLANES: neither can. */
static inline Lane gpu_turn(const bool ready[2], uint64_t project_order, uint64_t finish_order) {
    if (ready[0] && ready[1]) return finish_order < project_order ? FINISH : PROJECT;
    return ready[0] ? PROJECT : ready[1] ? FINISH : NLANES;
}

typedef struct Gpu Gpu;

/* A device: in-order lanes that carry out ops and meet at events. */
struct Device {
    const char *name;
    Type act_type;      /* of activations: F32 on the host */
    Bytes peak[NTIERS]; /* bytes of each tier in use: how far ops have reached into its regions */
    LaneCount count[NLANES];
    Error notice;           /* text: what its user should know, such as memory that could not be pinned; mostly empty */
    Trace *trace;           /* where finished ops are noted; NULL: nowhere. Set before the first op */
    double link[NCHANNELS]; /* host device: bytes/s that a link is slowed to; 0: not slowed. Set before the first op */
    int delay_us[NLANES];   /* each op of a lane begins so much later; tests find missing events with it */
    Net *net;               /* the pipeline that it is a stage of; NULL: none. Set before the first op */
    const int *stop;        /* once this is not 0 no further op begins, as if one had failed; NULL: never. Host, cuda */

    /* Queues the op and returns the event of its end. The op and its moves are copied, the index arrays that it points to
     * are not. */
    Event (*post)(Device *, const Op *);
    /* Copies count elements to element `first` of a dense view on GPU or CPU, and returns when that is done: for loading,
     * before any op is posted. NULL on the sim, which has nothing to load. */
    void (*upload)(Device *, Tensor dst, size_t first, const void *src, size_t count);
    int (*wait)(Device *, Event, Error *); /* until it has happened; -1 once any op has failed (the first error sticks) */
    void *(*host)(Device *, Tensor);       /* address of a view on the CPU tier, for the thread that posts; on the
                                              sim only index tables have one, the others are NULL */
    double (*now)(Device *);               /* seconds */
    void (*close)(Device *);               /* ends lanes, frees tiers, removes the offload file */
};

/* Opens the host device with one allocation a tier, as large as the plan says: GPU and CPU in memory, disk in an unlinked
 * file under offload_dir (fully allocated beforehand, so that a full disk is an error here and nowhere else). checkpoint
 * serves disk reads of weights and must outlive the device. NULL and err when there is not enough memory or disk. */
Device *host_open(const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err);
/* Opens the cuda device on an open GPU, which must outlive it: the GPU tier is memory of the GPU, the CPU tier is pinned
 * (where that fails, a line on standard error says so and copies are slower), lanes that touch the GPU are streams. The
 * rest is as on the host. */
Device *cuda_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// depend.c: order follows from use (section 4.2)
// ---------------------------------------------------------------------------------------------------------------

typedef struct Depend Depend;

/* Opens it for so many cells, of which none has been used. */
Depend *depend_open(int ncells);
/* Fills op->after with the events that the op must wait for, without those that others imply. */
void depend_before(Depend *d, Op *op);
/* Notes that the same op has been posted, and that e is its event. */
void depend_posted(Depend *d, Event e);
/* The posting thread is about to use a view itself: the events that it must wait for first. Returns how many. */
int depend_host(const Depend *d, Event wait[NLANES], const Tensor *view, Use use);
/* Notes that the posting thread has waited for e. */
void depend_waited(Depend *d, Event e);
/* From now on, whoever uses cell `to` must also come after the users of cell `from`. */
void depend_join(Depend *d, int to, int from);
/* From now on, whoever uses any cell of the view must come after the users of all of them, since their bounds change. */
void depend_fold(Depend *d, const Tensor *view);
void depend_close(Depend *d);

/* Who posts: on which device, in which order. With overlap an op is only posted; without, each is waited for at once, and
 * that is the only difference. */
struct Poster {
    Device *device;
    Depend *depend; /* NULL: ops come with their own `after` */
    bool overlap, failed;
    Error *err; /* filled when it has failed */
    Event last[NLANES];
};
Event post(Poster *to, Op *op);
/* When this returns, the posting thread may use the view; false if an op has failed. */
bool post_host(Poster *to, Tensor view, Use use);
/* Waits for everything posted. */
bool post_drain(Poster *to);

// ---------------------------------------------------------------------------------------------------------------
// moves.c: copies between tiers, in one hop or in two (section 4.2)
// ---------------------------------------------------------------------------------------------------------------

/* Appends a move between dense views to moves[0..n), as one row; one that goes on where the last one ends, on both sides,
 * becomes part of it. Returns how many there are. */
int add_move(Move *moves, int n, Tensor dst, Tensor src);

/* Where what is on its way between GPU and disk stops on the CPU. */
typedef struct {
    Tensor here, via;
} Stop;
/* Posts moves[0..n), which are between the GPU and the tiers below it, on op->lane. What rests on the CPU crosses at once;
 * what rests on disk makes a second hop, on disk_lane, and between them stops on the CPU, where `via` mirrors `here` on the
 * GPU byte for byte (of several pairs, by ascending address, the last that begins before it). moves has room for 2 n, and
 * is changed. */
void carry(Poster *to, Op *op, Lane disk_lane, Move *moves, int n, const Stop *stops, int nstops);

// ---------------------------------------------------------------------------------------------------------------
// load.c: before a run
// ---------------------------------------------------------------------------------------------------------------

/* Fills the weights' homes: reads (or generates) every tensor once into its GPU or CPU home, a dummy's disk share into the
 * offload file. */
int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err);
/* Computes every product of a layer and of the head once, at the shapes of a prefill and of a decoding step, on whatever
 * the workspaces hold. A GPU's library chooses and loads a kernel when it first meets a shape, and the first prompts
 * should not wait for that. To be called before the run; it sets the counters back to 0. */
int opt_warm_up(Device *device, const Plan *plan, Error *err);

// ---------------------------------------------------------------------------------------------------------------
// host.c, host_linear.c, host_attend.c: the arithmetic of the device that is this CPU. Plain functions on plain pointers,
// the specification of the CUDA launchers of the same names.
//
// Batch invariance: a row of a result depends on that row's inputs only, bit for bit, whatever the other rows, the
// number of threads, the page size or the number of sequences. Activations are float, weights and KV f16.
// ---------------------------------------------------------------------------------------------------------------

/* "AVX-512", "AVX2", "portable": what the kernels were compiled for. */
const char *host_isa(void);
/* Counts the orders in which its products and its attention have added, since another order may give other tokens: a job
 * that began with another is told so when it goes on. */
enum { HOST_SUMS = 2 };

/* y[r] = table[idx[r]], or y[r] += table[idx[r]]. */
typedef struct {
    void *y; /* (rows, cols) of y_type, F32 or F16; on a GPU F16 */
    Type y_type;
    const void *table; /* (any, cols) of `type`, F16, BF16 or F32; on a GPU F16 */
    Type type;
    size_t table_ld;    /* elements from one row of the table to the next */
    const int32_t *idx; /* (rows) */
    int rows, cols;
    bool add;
} Lookup;
void host_embed(const Lookup *l);

/* y[r] = (x[r] - mean) / sqrt(var + 1e-5) * w + b; y may be x. x, y (rows, cols) F32; w, b (cols) F16. */
void host_layernorm(float *y, const float *x, const f16 *w, const f16 *b, int rows, int cols);

/* y = x w^T + b, then ReLU if relu, then + residual (section 3's x.w_Q and so on). */
typedef struct {
    void *y; /* (m, n) of y_type, F32 or F16 */
    Type y_type;
    size_t y_ld;          /* elements from one row of y to the next */
    const void *x;        /* (m, k) dense, F32; on a GPU F16 */
    const void *w;        /* (n, k) dense, F16, or packed by quant_pack_rows */
    const void *b;        /* (n) F16, or NULL */
    const void *residual; /* (m, n) with y's type and y_ld, or NULL. It may be y itself; on a GPU it must be */
    bool packed;          /* w is; a GPU takes such w for at most PACKED_ROWS rows */
    bool relu;
    int m, n, k;
} Product;
/* Every output sums over k in one fixed order; with packed w, which is unpacked on the way, in another fixed order. */
void host_linear(const Product *p);

/* Prefill attention: causal softmax(q k^T / sqrt(hd)) v of nseq whole prompts that lie one after another. */
typedef struct {
    void *o;              /* (rows, h1) F32; on a GPU F16 */
    const f16 *q;         /* (rows, h1), not yet scaled */
    const f16 *kv;        /* (rows, 2 h1): a row is its k, then its v */
    const int32_t *start; /* (nseq + 1): sequence r owns rows start[r] .. start[r+1] - 1 */
    int nseq, rows, h1, nh;
    int ld; /* elements from one row of q to the next, and of kv */
} Prefill;
/* Working memory per thread does not grow with nseq or with the length of a prompt. */
void host_attend_prefill(const Prefill *p);

/* Attention of one new token per sequence to paged KV, on the GPU tier or the CPU (section 4.2, computation delegation).
 * attend, select and weigh each use a part of this. */
typedef struct {
    void *o;              /* (nseq, h1) of o_type, out of attend and weigh */
    Type o_type;          /* F32, or F16 for a GPU and on it */
    const f16 *q;         /* (nseq, h1), not yet scaled; into attend and select */
    int q_ld;             /* elements from one row of q to the next */
    const void *k, *v;    /* (npages, page_tokens, h1) F16, or packed by quant_pack_heads */
    const int32_t *pages; /* (nseq, max_pages): token t of sequence r lies in page pages[r * max_pages + t / page_tokens],
                             row t % page_tokens */
    const int32_t *len;   /* (nseq): sequence r attends to its tokens 0 .. len[r] - 1 */
    int nseq, max_pages, page_tokens, h1, nh;
    bool packed;     /* k and v are */
    int32_t *tokens; /* (nseq, nh, most), of sparse attention: out of select, into weigh */
    float *weights;  /* (nseq, nh, most), likewise */
    double sparsity; /* which share of the past is chosen */
    int most;        /* at least sparse_tokens(sparsity, len[r]) of every r */
} Attention;
/* Dense attention. Reads every byte of K and V once, in place. */
void host_attend(const Attention *a);
/* Sparse attention (section 5), the first half: the chosen tokens, ascending, and their weights. The softmax is over all
 * tokens, and the weights of the others are dropped. Does not touch V. */
void host_select(const Attention *a);
/* The second half: o = the weighted sum of the chosen tokens' v. Does not touch any other v. */
void host_weigh(const Attention *a);

/* Rows of k then v, kv (rows, 2 nh hd), ld elements apart, packed head by head as the cache's pages store them. */
void host_pack(uint8_t *packed, const f16 *kv, int ld, int rows, int nh, int hd);

/* Puts row r of kv at token pos[r] of sequence seq[r]; seq may skip and repeat, but no token comes twice. What pages store
 * packed is packed on the way, or before: then it moves as bytes, two at a time, like F16. */
typedef struct {
    void *k, *v;              /* (npages, page_tokens, width) F16 */
    const f16 *kv;            /* (rows, 2 width): a row is its k, then its v; if it is to be packed, (rows, 2 nh hd) */
    const int32_t *seq, *pos; /* (rows) */
    const int32_t *pages;     /* (any, max_pages), as in Attention */
    int rows, max_pages, page_tokens, width;
    int ld;      /* elements from one row of kv to the next */
    bool pack;   /* else it moves as it is, and nh and hd are used by a study alone */
    Quant study; /* how what it has put there is rounded, on the host; bits 0: not */
    int nh, hd;  /* heads of a row's k, and their elements */
    bool alone;  /* on this thread: its lane has no others */
} Append;
void host_append(const Append *a);

/* The next token of each row of logits (rows, vocab) F32. Greedy: the largest, the lowest id among equals. Otherwise
 * softmax at temperature, cut to top_k, then to the smallest set with mass >= top_p, drawn with a counter-based generator
 * from (seed, prompt[r], pos[r]) alone. ids[rows]. NaN logits never win over numbers. */
void host_pick(int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos, const Sampling *sampling,
               int rows, int vocab);
/* For evaluation: logp[r] = log softmax(logits[r])[target[r]], and the greedy choice best[r] as host_pick makes it. */
void host_score(float *logp, int32_t *best, const float *logits, const int32_t *target, int rows, int vocab);

// ---------------------------------------------------------------------------------------------------------------
// flexgen.cu: a GPU, as lanes.c and arena.c see it
//
// Each lane has a stream. The launchers are the twins of the host_ functions of the same names. They take the same
// arguments, but pointers are addresses on the GPU and activations are F16; sums are F32. They post kernels on the stream
// of `lane` and return at once, with -1 and err if that fails. A row of a result depends only on that row's inputs and, in
// cuBLAS, on the number of rows: attention splits at fixed tokens of a sequence.
// ---------------------------------------------------------------------------------------------------------------

enum { MARKS = 256 }; /* so many points of a stream can be waited for at a time */

struct Gpu {
    char name[96];           /* "NVIDIA H200, sm_90" */
    size_t total;            /* bytes of its memory */
    size_t overhead;         /* of them in use before there is a GPU tier: context, workspaces of cuBLAS and of attention */
    size_t spare;            /* of them that kernels will take when they are loaded at their first use */
    int max_head;            /* elements of a head that attention has room for */
    double poll_s;           /* so long sync asks again and again before it sleeps; 0: never. lanes.c sets it */
    size_t pin_piece;        /* so many bytes are pinned at a time; tests make it small, before they pin */
    const volatile int *bad; /* not 0 once pick or score has met a logit that is not finite; alloc resets it */

    int (*embed)(Gpu *, Lane lane, const Lookup *, Error *);
    int (*layernorm)(Gpu *, Lane lane, void *y, const void *x, const void *w, const void *b, int rows, int cols, Error *);
    /* cuBLAS; for packed w, whose y is F16, a kernel of ours. There is no ReLU before a residual. The lane is PROJECT or
     * FINISH, which have a workspace each. */
    int (*linear)(Gpu *, Lane lane, const Product *, Error *);
    int (*attend_prefill)(Gpu *, Lane lane, const Prefill *, Error *);
    int (*attend)(Gpu *, Lane lane, const Attention *, Error *);
    int (*select)(Gpu *, Lane lane, const Attention *, Error *);
    int (*weigh)(Gpu *, Lane lane, const Attention *, Error *);
    int (*pack)(Gpu *, Lane lane, void *packed, const f16 *kv, int ld, int rows, int nh, int hd, Error *);
    int (*append)(Gpu *, Lane lane, const Append *, Error *);
    /* w (n, k) F16 = what quant_unpack_rows gives, for all rows of groups */
    int (*unpack)(Gpu *, Lane lane, void *w, const void *packed, int n, int k, Error *);
    int (*pick)(Gpu *, Lane lane, int32_t *ids, const float *logits, const int32_t *prompt, const int32_t *pos,
                const Sampling *sampling, int rows, int vocab, Error *);
    int (*score)(Gpu *, Lane lane, float *logp, int32_t *best, const float *logits, const int32_t *target, int rows,
                 int vocab, Error *);

    /* rows of row_bytes from src to dst, pitches in bytes; either is on the GPU, or on the host (pinned, to overlap) */
    int (*copy)(Gpu *, Lane lane, void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t row_bytes,
                int rows, Error *);

    /* begin and end note the times before and after what is posted between them; mark is an end without one, which takes
     * less of the GPU's time. Once a mark has passed, the one MARKS later may be made in its place. */
    int (*begin)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*end)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*mark)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*after)(Gpu *, Lane lane, Lane other, uint64_t mark,
                 Error *);                                 /* lane goes on when other has reached the mark's end */
    int (*sync)(Gpu *, Lane lane, uint64_t mark, Error *); /* the calling thread sleeps until the mark's end */
    double (*took)(Gpu *, Lane lane, uint64_t first,
                   uint64_t last); /* seconds from first's begin to last's end, both past */
    /* When a past mark began, in seconds: CLOCK_MONOTONIC at opening, plus the GPU's clock since then. To be asked in order
     * on each lane, and as the last thing about this mark. */
    double (*began)(Gpu *, Lane lane, uint64_t mark);

    void *(*alloc)(Gpu *, size_t bytes, Error *);         /* the GPU tier; one at a time */
    void (*release)(Gpu *, void *);                       /* waits for the streams first */
    int (*pin)(Gpu *, void *host, size_t bytes, Error *); /* memory of ours becomes page-locked, so that copies overlap; one
                                                             range at a time */
    void (*unpin)(Gpu *, void *host);
    int (*upload)(Gpu *, void *dst, const void *src, size_t bytes, Error *);   /* waits; any thread */
    int (*download)(Gpu *, void *dst, const void *src, size_t bytes, Error *); /* for tests */
    size_t (*in_use)(Gpu *); /* cudaMemGetInfo: bytes of the whole GPU, by anyone */
    void (*close)(Gpu *);
};

/* Opens the first GPU (CUDA_VISIBLE_DEVICES chooses) with streams, cuBLAS and workspaces. NULL and err, one line that says
 * what to do, without a driver, without a GPU, with one that is too old or too full. Where flexgen.cu is not linked to the
 * program but a library beside it, or was not built, there is no such function: its address is NULL. */
Gpu *cuda_open_gpu(Error *err) __attribute__((weak));

// ---------------------------------------------------------------------------------------------------------------
// gpu.c: the GPU on demand
// ---------------------------------------------------------------------------------------------------------------

/* cuda_open_gpu, from the library beside the program if it is not linked. Loads nothing large where there is no GPU. */
Gpu *gpu_find(Error *err);

// ---------------------------------------------------------------------------------------------------------------
// disk.c: the offload file and the checkpoint's
// ---------------------------------------------------------------------------------------------------------------

typedef struct Disk Disk;

/* Makes an unlinked file of so many bytes under dir, fully allocated (0: none), to be used beside the files of the
 * checkpoint, which must outlive it. NULL and err if the disk is full or dir cannot be written to. */
Disk *disk_open(const char *dir, size_t bytes, const Checkpoint *checkpoint, Error *err);
/* Where the offload file is mapped; NULL: there is none. */
uint8_t *disk_map(const Disk *disk);
/* Reads a dense view into memory. If its type is not `type`, it is a checkpoint's and becomes F16. Two threads may read at
 * a time, each with its own buffer, 0 or 1. -1 and err for read errors and files that have shrunk. */
int disk_read(Disk *disk, void *memory, Tensor from, Type type, int buffer, Error *err);
int disk_write(Disk *disk, Tensor to, const void *memory, Error *err);
/* Announces that these moves are about to be read. */
void disk_expect(const Disk *disk, const Move *moves, int n);
/* `written` bytes of a range were written through the mapping: sends them to disk, and out of memory. 0: only begins to
 * send what was written, but the mapping no longer counts as this process's memory. */
void disk_settle(const Disk *disk, size_t offset, size_t bytes, size_t written);
/* host_embed from a table that rests in the checkpoint. */
int disk_embed(const Disk *disk, const Lookup *rows, Tensor table, Error *err);
/* The V of the tokens (nseq, nh, most) that sparse attention has chosen, without each sequence's last: from the pages at
 * `home` in the offload file to the same places of the staged pages v. */
typedef struct {
    void *v;
    size_t home, home_bytes;
    const int32_t *pages, *home_pages, *len, *tokens; /* pages (nseq, max_pages) */
    int nseq, nh, most, max_pages, page_tokens;
    size_t row_bytes; /* of a token's V */
    double sparsity;
} Fetch;
void disk_fetch(const Disk *disk, const Fetch *fetch);
void disk_close(Disk *disk);

// ---------------------------------------------------------------------------------------------------------------
// arena.c: the tiers in memory, and ops carried out there
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    Gpu *gpu; /* NULL: the GPU tier is memory of ours */
    Disk *disk;
    bool pinned;
    uint8_t *arena[NTIERS]; /* TIER_DISK: the mapping of the offload file; TIER_GPU with a GPU: an address there */
    size_t bytes[NTIERS];
    size_t tables[2]; /* where the index tables lie on GPU and CPU: mirrors of each other */
    Net *net;         /* for RECEIVE and SEND */
} Arenas;

/* Makes the tiers as large as the plan says. notice: what the user should know, if anything. To be closed even after -1. */
int arenas_open(Arenas *a, Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *notice,
                Error *err);
/* The address of a view; NULL for an absent tensor. */
void *arenas_address(const Arenas *a, Tensor t);
/* Index tables where the thread that posts can read them: those on the GPU tier, which may still be on their way, have a
 * mirror on the CPU tier. */
const int32_t *arenas_indices(const Arenas *a, Tensor t);
/* Whether the ops of a lane go to a stream of the GPU. */
bool arenas_is_stream(const Arenas *a, int lane);
/* Carries an op out, or posts it on its lane's stream. */
int arenas_run(const Arenas *a, const Op *op, Error *err);
/* Device.upload */
int arenas_upload(const Arenas *a, Tensor dst, size_t first, const void *src, size_t count, Error *err);
/* Fails with the message for logits that are not finite. */
int logits_not_finite(Error *err);
void arenas_close(Arenas *a);

// ---------------------------------------------------------------------------------------------------------------
// sim.c: the device that is a clock
// ---------------------------------------------------------------------------------------------------------------

/* Opens the sim for a plan of any act_type: the same lanes and events, but an op only takes time: bytes over the bandwidth
 * of its channel, or flops over the rate of its processor (the longer of that and its bytes over that processor's memory
 * bandwidth). Lanes of one link share its bandwidth equally; the GPU does one op at a time, in the order of posting. No
 * data, no tiers: memory does not grow with the model. now is the simulated clock. */
Device *sim_open(const Plan *plan, const Hardware *hardware, Error *err);

/* world.c: joins sims that have not been used yet, in one time, as the stages of a pipeline (section 4.4). Each posts and
 * waits on a thread of its own, and time passes when all of them wait; so the schedule of every stage must run. The wire
 * out of a stage takes bytes_s bytes/s, one message after the other, and each arrives delay_s seconds after it has left. Of
 * device->net, which they have then, post, receive (of tokens) and fail are there: what stages agree on, their one process
 * knows. */
typedef struct World World;
World *world_open(Device *const sim[], int stages, double bytes_s, double delay_s);
/* The stage's thread has done. */
void world_leave(Device *sim);
void world_close(World *world); /* and the sims */

// ---------------------------------------------------------------------------------------------------------------
// trace.c: what happened on the lanes, as a file and as the paper's Table 4
// ---------------------------------------------------------------------------------------------------------------

/* The slice of an op that has run from begin to end. */
static inline Slice slice_of(const Op *op, Bytes bytes, double begin, double end) {
    Slice s = {op->lane, op->kind, op->prefill, op->prefill_sweep, op->delegated, op->i, op->j, op->k, op->batch,
               begin,    end,      bytes};
    return s;
}
/* Whether two slices are of the same call. */
bool same_call(const Slice *a, const Slice *b);
/* Notes a slice. It extends the lane's newest one if that is of the same call (kind, i, j, k, batch, phase) and ended less
 * than 0.1 ms before. settled: neither it nor a later one begins before. A Trace of zeros is empty. Not thread safe:
 * devices call it under their lock. */
void trace_add(Trace *trace, const Slice *slice, double settled);
/* Notes what a sweep holds, if the trace is for a file (without a limit). */
void trace_hold(Trace *trace, const Held *held);
/* Figure 4's name of the call that a slice is part of: "load_weight", "store_cache", "project", ... */
const char *trace_call(const Slice *slice);
/* Chrome trace JSON (chrome://tracing, Perfetto) of n traces: a group of rows a trace, one row a lane, one slice a call
 * with its i, j, k, its batch and that batch's token, bytes and phase, times in microseconds from the first slice of all.
 * What could not be written shows in ferror(out). */
void trace_write(const Trace *traces, int n, FILE *out);
void trace_free(Trace *trace);

extern const char *const part_name[NPARTS];
/* Two lanes that are busy with the same part at the same time count once. COMPUTE is the lanes of the GPU and of the CPU;
 * its hidden_s is the time in which some copy ran beside them. A sweep in which some batch prefills counts as prefill,
 * as in RunStats. */
Breakdown trace_breakdown(const Trace *trace);

#ifdef __cplusplus
}
#endif
#endif
