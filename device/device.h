/* device.h: the devices that carry out ops: host, cuda, sim. */
#ifndef DEVICE_H
#define DEVICE_H
#include <stdio.h>

#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// Lanes and ops (section 4.2)
// -------------------------------------------------------------------------------------------------

/* A lane is an in-order queue of a device. W_ lanes carry weights, C_ lanes cache and activations;
 * READ is from disk to CPU, LOAD from CPU to GPU. A_DOWN carries the queries of delegated attention
 * to the CPU and A_UP its results back, so that these never wait behind a slab or a store. PROJECT
 * and FINISH are the two halves of a layer, before and after its attention; they share the GPU, so
 * that batch k+1 can be projected while the CPU still attends for batch k. RECEIVE and SEND exist
 * only in a pipeline. */
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

/* A point on a lane: it has happened when the lane has finished its seq-th op. An event with seq 0
 * has always happened. */
typedef struct {
    int lane;
    uint64_t seq;
} Event;

/* The kind of data that an op moves or computes, for the counters. */
typedef enum { WEIGHT, CACHE, ACTIVATION, OTHER, NKINDS } Kind;

/* One part of a copy. dst and src have the same number of elements; their types differ only when
 * weights from disk become F16. */
typedef struct {
    Tensor dst, src;
} Move;

/* The purpose of an op: the lane that carries it out, and the square whose call of Figure 4 posts
 * it. Traces, counters and the rates of the sim depend on it. */
struct Call {
    Lane lane;
    Kind kind;
    bool prefill;       /* the batch is in prefill; for weights, some batch of the sweep is */
    bool prefill_sweep; /* some batch of the sweep is in prefill */
    bool delegated;     /* the CPU attends for the batch */
    int i, j, k;        /* sweep, layer, place of the batch in the sweep */
    int batch;          /* number of the batch, in the order in which batches enter */
};

/* The operations of a device. op_info (ops.c) has the name of each, and which views it reads and
 * writes. */
typedef enum {
    OP_COPY,           /* moves */
    OP_EMBED,          /* y[r] = table[idx[r]], or y[r] += */
    OP_LAYERNORM,      /* y = layernorm(x) w + b */
    OP_LINEAR,         /* y = x w^T + b, ReLU, + residual */
    OP_UNPACK,         /* packed weights to F16 */
    OP_PACK,           /* new k, v that leave the GPU, to rows of packed pages */
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

enum { MAX_VIEWS = 8 };

/* One operation of a lane, as data. The constructors below say what each code computes, with its
 * shapes. */
struct Op {
    OpCode code;
    // clang-format off
    union { /* its purpose; the fields of Call can be named directly */
        Call call;
        struct { Lane lane; Kind kind; bool prefill, prefill_sweep, delegated; int i, j, k, batch; };
    };
    union { /* its views, by number, or by name for each code */
        Tensor view[MAX_VIEWS];
        struct { Tensor y, table, idx; } embed;
        struct { Tensor y, x, w, b; } layernorm;
        struct { Tensor y, x, w, b, residual; } linear;
        struct { Tensor w, packed; } unpack;
        struct { Tensor packed, kv; } pack;
        struct { Tensor o, q, kv, start; } prefilled;
        struct { Tensor o, q, tokens, weights, k, v, pages, len; } attend; /* of OP_SELECT and OP_WEIGH too */
        struct { Tensor v, pages, len, home_v, home_pages, tokens; } fetch;
        struct { Tensor k, v, kv, seq, pos, pages; } append;
        struct { Tensor ids, logits, prompt, pos; } pick;
        struct { Tensor logp, best, logits, target; } score;
        struct { Tensor x; } state; /* the hidden state that travels */
    };
    // clang-format on
    const Move *moves; /* [nmoves] of a copy; the caller may change them once it has been posted */
    int nmoves;
    int nh, hd, page_tokens; /* heads; elements of a head; tokens of a page */
    bool add;                /* an embedding adds to y */
    bool relu;               /* a product passes ReLU */
    double sparsity;
    Quant study; /* an append to F16 pages rounds k and v so, on the host (bits 0: not at all); set
                    by who makes the op */
    Sampling sampling;
    int nafter; /* the op begins when these events have happened */
    Event after[NLANES];
};

// -------------------------------------------------------------------------------------------------
// ops.c: ops as data
// -------------------------------------------------------------------------------------------------

/* The way in which an op uses one of its views. */
typedef enum { UNUSED, READS, WRITES } Use;

/* The description of a code: its name, and its views with their names. The views of a copy are
 * those of its moves. */
typedef struct {
    const char *name;
    struct {
        const char *name;
        Use use;
    } view[MAX_VIEWS];
} OpInfo;
extern const OpInfo op_info[NCODES];

/* The constructors. Each returns an op that is for `call`, and checks the shapes for all devices.
 * A view that is absent has rows 0. Index tables are I32, weights and biases F16. Activations are
 * F32 on the host, whose functions host_NAME are the specification, and F16 on a GPU.
 *
 * Batch invariance, on the host: a row of a result depends on that row's inputs only, bit for bit,
 * whatever the other rows, the number of threads, the page size or the number of sequences. */
Op op_copy(Call call, const Move *moves, int n);
/* y[r] = table[idx[r]], or y[r] += if add. y (rows, cols); table (any, cols) F16, and on the CPU or
 * in the checkpoint also BF16 or F32; idx (1, rows), absent: row r of the table */
Op op_embed(Call call, Tensor y, Tensor table, Tensor idx, bool add);
/* y[r] = (x[r] - mean) / sqrt(var + 1e-5) * w + b; y may be x. x, y (rows, cols) dense; w, b (1,
 * cols) */
Op op_layernorm(Call call, Tensor y, Tensor x, Tensor w, Tensor b);
/* y = x w^T + b, then ReLU in op_linear_relu, then + residual (section 3's x.w_Q and so on). x (m,
 * k) dense; w (n, k) F16, or packed, U8, if the device takes packed weights for so many rows
 * (Plan.packed_rows); y (m, n) F32, or F16; residual has y's type and ld; it may be y itself, and
 * on a GPU it must be. On the host every output sums over k in one fixed order; with packed w,
 * which is unpacked during the product, this order is another one. */
Op op_linear(Call call, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual);
Op op_linear_relu(Call call, Tensor y, Tensor x, Tensor w, Tensor b);
/* w (n, k) F16 = packed weights as quant_unpack_rows unpacks them, for products of more rows than
 * those that take packed weights */
Op op_unpack(Call call, Tensor w, Tensor packed);
/* packed = rows of U8 for packed pages, k's heads, then v's, from kv: rows of new k, v (2 h1)
 * F16 */
Op op_pack(Call call, Tensor packed, Tensor kv, int nh);
/* Prefill: o = causal softmax(q k^T / sqrt(hd)) v of whole prompts, one after another. o (rows,
 * h1); q (rows, h1) F16, not yet scaled; kv (rows, 2 h1) F16, a row's k, then its v, with q's ld;
 * start (1, nseq + 1): the first row of each prompt, and the end. Working memory does not grow with
 * nseq or with the length of a prompt. */
Op op_attend_prefill(Call call, Tensor o, Tensor q, Tensor kv, Tensor start, int nh);
/* Attention of one new token per sequence to paged KV, on the GPU or the CPU (section 4.2,
 * computation delegation). o (nseq, h1), F16 for a GPU; q (nseq, h1) F16, not yet scaled. Reads
 * every byte of K and V once, in place. */
Op op_attend(Call call, Tensor o, Tensor q, const PageTable *table);
/* Sparse attention (section 5). select, the first half, gives the chosen tokens I32, ascending, and
 * their weights F32, both (nseq, nh * most), most >= sparse_tokens(sparsity, len[r]) of every r;
 * the softmax is over all tokens, and the weights of the others are dropped. It does not touch V.
 * fetch brings the V of these tokens, and no other, from its home on disk to its place in the
 * staged pages; it belongs on C_READ. weigh, the second half, gives o, the weighted sum of that
 * V. */
Op op_select(Call call, Tensor tokens, Tensor weights, Tensor q, const PageTable *table,
             double sparsity);
Op op_fetch(Call call, const PageTable *staged, const PageTable *home, Tensor tokens,
            double sparsity);
Op op_weigh(Call call, Tensor o, Tensor tokens, Tensor weights, const PageTable *table,
            double sparsity);
/* kv row r becomes token pos[r] of sequence seq[r] of the page table; seq may skip and repeat, but
 * no token comes twice. kv has the type of its pages, or is F16 to be packed. */
Op op_append(Call call, const PageTable *table, Tensor kv, Tensor seq, Tensor pos);
/* The next token of each row of logits (rows, vocab) F32. Greedy: the largest, the lowest id among
 * equals. Otherwise softmax at temperature, cut to top_k, then to the smallest set with mass >=
 * top_p, drawn with a counter-based generator from (seed, prompt[r], pos[r]) alone; a GPU only
 * chooses greedily. NaN logits never win over numbers; the run then fails. */
Op op_pick(Call call, Tensor ids, Tensor logits, Tensor prompt, Tensor pos,
           const Sampling *sampling);
/* For evaluation: logp[r] = log softmax(logits[r])[target[r]], and the greedy choice best[r] as
 * op_pick makes it. logp (1, rows) F32, best and target (1, rows) I32 */
Op op_score(Call call, Tensor logp, Tensor best, Tensor logits, Tensor target);
/* x (rows, h1) on the CPU, dense */
Op op_receive(Call call, Tensor x);
Op op_send(Call call, Tensor x);

// -------------------------------------------------------------------------------------------------
// lanes.c: what every device offers; the host and the cuda device
// -------------------------------------------------------------------------------------------------

typedef struct {
    Bytes moved[NKINDS]; /* bytes, by what they were */
    Bytes read[2];       /* bytes of K, of V that attention to the cache has read */
    double busy_s;    /* seconds of work; waiting for a slowed link counts, waiting for events does
                         not. A GPU's lanes have them only where its marks have times: in a trace,
                         and where sweeps mix prompts with new tokens */
    double prefill_s; /* of these, for batches in prefill */
} LaneCount;

/* The n-th of an op's views, and what it does with it. A copy has two for each move, the others up
 * to MAX_VIEWS. */
static inline int op_nviews(const Op *op) {
    return op->code == OP_COPY ? 2 * op->nmoves : MAX_VIEWS;
}
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
/* How many tokens of K or V it reads: all, or in the second half of sparse attention the chosen
 * ones. len: what op_lengths stands for, where the CPU can read it. */
long op_tokens(const Op *op, const int32_t *len);
/* Adds the bytes that an op moves and reads to the counters of its lane, and returns those it
 * moves. len as above. */
Bytes op_count(LaneCount *count, const Op *op, const int32_t *len);

typedef struct Gpu Gpu;

/* A device: in-order lanes that carry out ops and meet at events. */
struct Device {
    const char *name;
    Type act_type;      /* of activations: F32 on the host */
    Bytes peak[NTIERS]; /* bytes of each tier in use: how far ops have reached into its regions */
    LaneCount count[NLANES];
    Error notice; /* text: what its user should know, such as memory that could not be pinned;
                     mostly empty */
    Trace *trace; /* where finished ops are noted; NULL: nowhere. Set before the first op */
    double link[NCHANNELS]; /* host device: bytes/s that a link is slowed to; 0: not slowed. Set
                               before the first op */
    int delay_us[NLANES]; /* each op of a lane begins so much later; tests find missing events with
                             it */
    Net *net;        /* the pipeline that it is a stage of; NULL: none. Set before the first op */
    const int *stop; /* once this is not 0 no further op begins, as if one had failed; NULL: never.
                        Host, cuda */

    /* Queues the op and returns the event of its end. The op and its moves are copied, the index
     * arrays that it points to are not. */
    Event (*post)(Device *, const Op *);
    /* Copies count elements to element `first` of a dense view on GPU or CPU, and returns when that
     * is done: for loading, before any op is posted. NULL on the sim, which has nothing to load. */
    void (*upload)(Device *, Tensor dst, size_t first, const void *src, size_t count);
    int (*wait)(
        Device *, Event,
        Error *); /* until it has happened; -1 once any op has failed (the first error sticks) */
    void *(*host)(Device *,
                  Tensor);   /* address of a view on the CPU tier, for the thread that posts; on the
                                sim only index tables have one, the others are NULL */
    double (*now)(Device *); /* seconds */
    void (*close)(Device *); /* ends lanes, frees tiers, removes the offload file */
};

/* Opens the host device with one allocation a tier, as large as the plan says: GPU and CPU in
 * memory, disk in an unlinked file under offload_dir (fully allocated beforehand, so that a full
 * disk is an error here and nowhere else). checkpoint serves disk reads of weights and must outlive
 * the device. NULL and err when there is not enough memory or disk. */
Device *host_open(const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir,
                  Error *err);
/* Opens the cuda device on an open GPU, which must outlive it: the GPU tier is memory of the GPU,
 * the CPU tier is pinned (where that fails, a line on standard error says so and copies are
 * slower), lanes that touch the GPU are streams. The rest is as on the host. */
Device *cuda_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir,
                  Error *err);

// -------------------------------------------------------------------------------------------------
// depend.c: order follows from use (section 4.2)
// -------------------------------------------------------------------------------------------------

typedef struct Depend Depend;

/* Opens it for so many cells, of which none has been used. */
Depend *depend_open(int ncells);
/* Fills op->after with the events that the op must wait for, without those that others imply. */
void depend_before(Depend *d, Op *op);
/* Notes that the same op has been posted, and that e is its event. */
void depend_posted(Depend *d, Event e);
/* The posting thread is about to use a view itself: the events that it must wait for first. Returns
 * how many. */
int depend_host(const Depend *d, Event wait[NLANES], const Tensor *view, Use use);
/* Notes that the posting thread has waited for e. */
void depend_waited(Depend *d, Event e);
/* From now on, whoever uses cell `to` must also come after the users of cell `from`. */
void depend_join(Depend *d, int to, int from);
/* From now on, whoever uses any cell of the view must come after the users of all of them, since
 * their bounds change. */
void depend_fold(Depend *d, const Tensor *view);
void depend_close(Depend *d);

/* Who posts: on which device, in which order. With overlap an op is only posted; without, each is
 * waited for at once, and that is the only difference. */
struct Poster {
    Device *device;
    Depend *depend; /* NULL: ops come with their own `after` */
    bool overlap, failed;
    Error *err; /* filled when it has failed */
    Event last[NLANES];
};
Event post(Poster *to, Op op);
/* When this returns, the posting thread may use the view; false if an op has failed. */
bool post_host(Poster *to, Tensor view, Use use);
/* Waits for everything posted. */
bool post_drain(Poster *to);

// -------------------------------------------------------------------------------------------------
// depend.c: copies between tiers, in one hop or in two (section 4.2)
// -------------------------------------------------------------------------------------------------

/* Appends a move between dense views to moves[0..n), as one row; one that goes on where the last
 * one ends, on both sides, becomes part of it. Returns how many there are. */
int add_move(Move *moves, int n, Tensor dst, Tensor src);

/* A place on the CPU where moves between GPU and disk stop: `via` mirrors `here` on the GPU byte
 * for byte. */
typedef struct {
    Tensor here, via;
} Stop;
/* Posts moves[0..n), which are between the GPU and the tiers below it, on call.lane. Moves to or
 * from the CPU take one hop. Moves to or from disk take a second hop, on the disk's lane beside
 * call.lane, and stop on the CPU in between: at the last of the stops, which have ascending
 * addresses, that begins before them. moves has room for 2 n, and is changed. */
void carry(Poster *to, Call call, Move *moves, int n, const Stop *stops, int nstops);

// -------------------------------------------------------------------------------------------------
// tiers.c: before a run
// -------------------------------------------------------------------------------------------------

/* Fills the weights' homes: reads (or generates) every tensor once into its GPU or CPU home, a
 * dummy's disk share into the offload file. */
int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err);

// -------------------------------------------------------------------------------------------------
// host.c, host_linear.c, host_attend.c: the arithmetic of the device that is this CPU
// -------------------------------------------------------------------------------------------------

/* "AVX-512", "AVX2", "portable": what the kernels were compiled for. */
const char *host_isa(void);
/* Counts the orders in which its products and its attention have added, since another order may
 * give other tokens: a job that began with another is told so when it goes on. */
enum { HOST_SUMS = 2 };

// -------------------------------------------------------------------------------------------------
// flexgen.cu: a GPU, as lanes.c and tiers.c see it
//
// Each lane has a stream. Ops are posted on the stream of their lane as kernels, the twins of the
// host's functions: pointers are addresses on the GPU, activations F16, sums F32. A row of a result
// depends only on that row's inputs and, in cuBLAS, on the number of rows: attention splits at
// fixed tokens of a sequence.
// -------------------------------------------------------------------------------------------------

enum { MARKS = 256 }; /* so many points of a stream can be waited for at a time */

struct Gpu {
    char name[96];   /* "NVIDIA H200, sm_90" */
    size_t total;    /* bytes of its memory */
    size_t overhead; /* of them in use before there is a GPU tier: context, workspaces of cuBLAS and
                        of attention */
    size_t spare;    /* of them that kernels will take when they are loaded at their first use */
    int max_head;    /* elements of a head that attention has room for */
    double
        poll_s; /* so long sync asks again and again before it sleeps; 0: never. lanes.c sets it */
    size_t pin_piece; /* so many bytes are pinned at a time; tests make it small, before they pin */
    const volatile int
        *bad; /* not 0 once pick or score has met a logit that is not finite; alloc resets it */

    /* Posts any op that host_run carries out, whose views are at addresses, and returns at once; -1
     * and err if that fails. Products are of cuBLAS, or for packed w, whose y is F16, of a kernel
     * of ours; they have no ReLU before a residual, and their lane is PROJECT or FINISH, which have
     * a workspace each. */
    int (*run)(Gpu *, const Op *, Error *);
    /* rows of row_bytes from src to dst, pitches in bytes; either is on the GPU, or on the host
     * (pinned, to overlap) */
    int (*copy)(Gpu *, Lane lane, void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
                size_t row_bytes, int rows, Error *);

    /* begin and end note the times before and after what is posted between them; mark is an end
     * without one, which takes less of the GPU's time. Once a mark has passed, the one MARKS later
     * may be made in its place. */
    int (*begin)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*end)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*mark)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*after)(Gpu *, Lane lane, Lane other, uint64_t mark,
                 Error *); /* lane goes on when other has reached the mark's end */
    int (*sync)(Gpu *, Lane lane, uint64_t mark,
                Error *); /* the calling thread sleeps until the mark's end */
    double (*took)(Gpu *, Lane lane, uint64_t first,
                   uint64_t last); /* seconds from first's begin to last's end, both past */
    /* When a past mark began, in seconds: CLOCK_MONOTONIC at opening, plus the GPU's clock since
     * then. To be asked in order on each lane, and as the last thing about this mark. */
    double (*began)(Gpu *, Lane lane, uint64_t mark);

    void *(*alloc)(Gpu *, size_t bytes, Error *); /* the GPU tier; one at a time */
    void (*release)(Gpu *, void *);               /* waits for the streams first */
    int (*pin)(Gpu *, void *host, size_t bytes,
               Error *); /* memory of ours becomes page-locked, so that copies overlap; one
                            range at a time */
    void (*unpin)(Gpu *, void *host);
    int (*upload)(Gpu *, void *dst, const void *src, size_t bytes, Error *); /* waits; any thread */
    int (*download)(Gpu *, void *dst, const void *src, size_t bytes, Error *); /* for tests */
    void (*forbid)(const void *,
                   size_t);  /* NULL, or of tests: nobody may touch these bytes of the GPU tier */
    size_t (*in_use)(Gpu *); /* cudaMemGetInfo: bytes of the whole GPU, by anyone */
    void (*close)(Gpu *);
};

/* Opens the first GPU (CUDA_VISIBLE_DEVICES chooses) with streams, cuBLAS and workspaces. NULL and
 * err, one line that says what to do, without a driver, without a GPU, with one that is too old or
 * too full. Where flexgen.cu is not linked to the program but a library beside it, or was not
 * built, there is no such function: its address is NULL. */
Gpu *cuda_open_gpu(Error *err) __attribute__((weak));

// -------------------------------------------------------------------------------------------------
// net.c: the GPU on demand
// -------------------------------------------------------------------------------------------------

/* cuda_open_gpu, from the library beside the program if it is not linked. Loads nothing large where
 * there is no GPU. */
Gpu *gpu_find(Error *err);
/* Bytes that a GPU tier could have now: those that nobody uses, less `spare`. */
Bytes gpu_left(Gpu *gpu);

// -------------------------------------------------------------------------------------------------
// sim.c: the device that is a clock
// -------------------------------------------------------------------------------------------------

/* Opens the sim for a plan of any act_type: the same lanes and events, but an op only takes time:
 * bytes over the bandwidth of its channel, or flops over the rate of its processor (the longer of
 * that and its bytes over that processor's memory bandwidth). Lanes of one link share its bandwidth
 * equally; the GPU does one op at a time, in the order of posting. No data, no tiers: memory does
 * not grow with the model. now is the simulated clock. */
Device *sim_open(const Plan *plan, const Hardware *hardware, Error *err);

/* Joins sims that have not been used yet, in one time, as the stages of a pipeline (section 4.4).
 * Each posts and waits on a thread of its own, and time passes when all of them wait; so the
 * schedule of every stage must run. The wire out of a stage takes bytes_s bytes/s, one message
 * after the other, and each arrives delay_s seconds after it has left. Of device->net, which they
 * have then, post, receive (of tokens) and fail are there: what stages agree on, their one process
 * knows. */
typedef struct World World;
World *world_open(Device *const sim[], int stages, double bytes_s, double delay_s);
/* The stage's thread has done. */
void world_leave(Device *sim);
void world_close(World *world); /* and the sims */

// -------------------------------------------------------------------------------------------------
// net.c: the network of a pipeline (section 4.4)
// -------------------------------------------------------------------------------------------------

/* What a pipeline of machines needs of a network (section 4.4). pipeline.c provides it over MPI,
 * sim.c between simulated machines (where only tokens use it), and for the tests tests/local_net.c
 * between the threads of one process. */

/* Messages of different kinds never wait for each other: hidden states; new tokens, on their way
 * round; what is agreed on before the run. */
typedef enum { NET_STATES, NET_TOKENS, NET_SETUP, NKINDS_OF_MESSAGES } NetKind;

/* One stage's end of the network. All functions but close may be called by several threads at once,
 * for a pair of stages and a kind by one at a time. Messages of one kind from one stage to another
 * arrive in the order in which they were sent. They fail, with -1 and one line that names the
 * stage, when any stage has failed; over MPI the launcher then ends all processes instead. What a
 * function was given is not touched any more once it has returned, however it ends. */
struct Net {
    int stage, stages; /* stages are counted from 0 */
    int neighbours;    /* stages on this machine, with this one; 0: not known */
    /* Returns when the bytes may be changed again; that may be before or after they have arrived.
     */
    int (*send)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* Returns when they are here. A message of another size is an error, and as if this stage had
     * failed. */
    int (*receive)(Net *, int from, NetKind kind, void *bytes, size_t size, Error *);
    /* Copies the bytes, and returns at once. */
    int (*post)(Net *, int to, NetKind kind, const void *bytes, size_t size, Error *);
    /* All stages call it: stage 0's bytes come to all. */
    int (*share)(Net *, void *bytes, size_t size, Error *);
    /* All stages call it, each with how far it has come: 0, or -1 and err. Returns 0 if all are
     * well; else -1 to all, with err, which names the stage, of the first that is not. The network
     * goes on in either case. */
    int (*agree)(Net *, int status, Error *);
    /* This stage has failed: everybody's functions end with "stage 2: <text>", of the first one
     * that fails. Over MPI it ends the job, and does not return; its caller has said why. */
    void (*fail)(Net *, const Error *);
    /* All stages call it, when no other function is running. It waits until they have. */
    void (*close)(Net *);
};

/* The network that mpirun has started this process in. NULL and err if there is one and it cannot
 * be used; NULL and err's text empty, at once and without loading MPI, if there is none or this
 * process is alone in it. bytes_s, delay_s: the wire is slowed to so many bytes/s, and a message
 * takes so many seconds more (0: it is not); what is agreed on is not slowed.
 */
Net *net_open(double bytes_s, double delay_s, Error *err);

/* The same out of the library for MPI, which net_open loads from beside the program. share and
 * agree are left to it. */
Net *net_open_mpi(double bytes_s, double delay_s, Error *err);
/* share and agree on top of send and receive, for all who provide a Net. */
int net_share(Net *, void *bytes, size_t size, Error *);
int net_agree(Net *, int status, Error *);

// -------------------------------------------------------------------------------------------------
// trace.c: what happened on the lanes
// -------------------------------------------------------------------------------------------------

/* One call of Figure 4 as it ran on one lane: ops of the same call that follow each other at once
 * are one slice. Seconds of Device.now. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill, prefill_sweep, delegated;
    int i, j, k, batch;
    double begin, end;
    Bytes bytes; /* moved; 0 for arithmetic */
} Slice;

/* A part of Table 4 in one phase: the seconds in which its lanes were busy, and in how many of them
 * a processor was too. */
typedef struct {
    double busy_s, hidden_s;
} Share;
enum { COMPUTE, WEIGHT_READ, CACHE_READ, CACHE_WRITE, ACTIVATION_MOVES, NPARTS };
typedef struct {
    Share part[2][NPARTS]; /* [prefill] */
    double total_s[2];     /* in which anything was busy */
    double busy_s;         /* in which some lane was busy, those of channel NET aside */
} Breakdown;

/* What a sweep holds, from the end of the sweep before it on: KV pages of each tier, sequences in
 * flight. */
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
    size_t limit; /* after so many more slices, those that are over are added up and dropped; 0: all
                     are kept */
    size_t kept;  /* that were not over then */
    Breakdown dropped; /* what the others add up to */
    long last[NLANES]; /* 1 + index of each lane's newest slice */
    Held *held;        /* [sweeps], and one when all is over; noted by the thread that posts */
    size_t sweeps;
};

/* The slice of an op that has run from begin to end. */
static inline Slice slice_of(const Op *op, Bytes bytes, double begin, double end) {
    Slice s = {op->lane,      op->kind, op->prefill, op->prefill_sweep,
               op->delegated, op->i,    op->j,       op->k,
               op->batch,     begin,    end,         bytes};
    return s;
}
/* Whether two slices are of the same call. */
bool same_call(const Slice *a, const Slice *b);
/* Notes a slice. It extends the lane's newest one if that is of the same call (kind, i, j, k,
 * batch, phase) and ended less than 0.1 ms before. settled: neither it nor a later one begins
 * before. A Trace of zeros is empty. Not thread safe: devices call it under their lock. */
void trace_add(Trace *trace, const Slice *slice, double settled);
/* Notes what a sweep holds, if the trace is for a file (without a limit). */
void trace_hold(Trace *trace, const Held *held);
/* Figure 4's name of the call that a slice is part of: "load_weight", "store_cache", "project", ...
 */
const char *trace_call(const Slice *slice);
/* Chrome trace JSON (chrome://tracing, Perfetto) of n traces: a group of rows a trace, one row a
 * lane, one slice a call with its i, j, k, its batch and that batch's token, bytes and phase, times
 * in microseconds from the first slice of all. What could not be written shows in ferror(out). */
void trace_write(const Trace *traces, int n, FILE *out);
void trace_free(Trace *trace);

extern const char *const part_name[NPARTS];
/* Two lanes that are busy with the same part at the same time count once. COMPUTE is the lanes of
 * the GPU and of the CPU; its hidden_s is the time in which some copy ran beside them. A sweep in
 * which some batch prefills counts as prefill, as in RunStats. */
Breakdown trace_breakdown(const Trace *trace);

// -------------------------------------------------------------------------------------------------
// hardware.c: a machine as numbers (section 4.3, Table 7)
// -------------------------------------------------------------------------------------------------

/* A rate that depends on a size: between two points, seconds are taken to be linear in the size;
 * outside, proportional to it. */
enum { MAX_POINTS = 16, MOST_NAME = 95 };
typedef struct {
    int n; /* points, by ascending size; 0: there is no curve */
    double size[MAX_POINTS], rate[MAX_POINTS];
} Curve;

/* Bytes/s that stand for a disk which cannot be written: so few that the search leaves it alone. */
static const double NO_DISK = 1e6;

/* The hardware parameters of section 4.3 and Table 7. Of a pair [0] holds in generation, [1] in
 * prefill. */
struct Hardware {
    char name[MOST_NAME + 65]; /* a file's, and behind it what is changed */
    union {                    /* bytes that the tiers can hold */
        struct {
            double gmem, cmem, nmem;
        };
        double mem[NTIERS];
    };
    union { /* bytes/s of the links */
        struct {
            double ctog_bdw[2], gtoc_bdw[2], dtoc_bdw[2], ctod_bdw[2];
        };
        double bdw[CTOD + 1][2];
    };
    double mm_flops[2], bmm_flops[2],
        cpu_flops[2]; /* FLOP/s of linear, of attention on the GPU, on the CPU */
    /* keys that a file may leave out */
    double gpu_bdw,
        cpu_bdw;       /* bytes/s at which the processors read their own memory; 0: no bound */
    double op_s;       /* seconds that every op takes in addition; 0 */
    bool shared_cores; /* a host device: GPU and CPU lanes run on the same cores, activations are
                          F32 */
    /* seconds of these cores for each byte that a link copies within memory, or that is read from
     * or written to disk; 0 */
    double copy_core_s, disk_core_s;
    /* FLOP/s as measured, with the reading of memory: of linear by its rows; of attention by the
     * tokens of a prompt, and by the tokens that a new one attends to. They replace mm_flops,
     * bmm_flops and cpu_flops. */
    Curve mm_rows, bmm_tokens[2], cpu_tokens;
    Curve mm_packed, bmm_packed,
        cpu_packed; /* of linear with packed weights; of attention to packed pages */
};

/* Reads a hardware file: one JSON object with name, gmem cmem nmem, ctog_bdw gtoc_bdw dtoc_bdw
 * ctod_bdw, mm_flops bmm_flops cpu_flops, each rate also as a pair KEY_p, KEY_g; optional gpu_bdw
 * cpu_bdw op_s shared_cores copy_core_s disk_core_s; optional curves mm_rows, bmm_tokens_p,
 * bmm_tokens_g, cpu_tokens, mm_packed, bmm_packed, cpu_packed, lists of [size, FLOP/s] by ascending
 * size; sources, an object of texts that say where each value is from. -1 and one line (EXIT_USAGE)
 * for a missing, unknown, negative, zero or non-numeric value. */
int hardware_read(Hardware *hardware, const char *path, Error *err);
/* Changes one number of a machine that was read: "KEY=NUMBER"; of a rate KEY is both phases, KEY_p
 * and KEY_g are one. The name says so, too, where there is room. -1 and one line (EXIT_USAGE) for
 * what the file could not hold, or what a curve of the machine replaces. */
int hardware_change(Hardware *hardware, const char *change, Error *err);
/* Writes a file that hardware_read reads back to the same numbers. measured: by whom and when; then
 * it also says how each value was (NULL: it was not). What could not be written shows in
 * ferror(out). */
void hardware_write(const Hardware *hardware, const char *measured, FILE *out);

/* The share of shared cores that a busy link takes. */
static inline double link_cores(const Hardware *hardware, Channel link, bool prefill) {
    return hardware->bdw[link][prefill] *
           (link < DTOC ? hardware->copy_core_s : hardware->disk_core_s);
}
/* Seconds in which a processor reads or writes so many bytes of its own memory; bdw 0: none. */
static inline double memory_seconds(double bytes, double bdw) { return bdw > 0 ? bytes / bdw : 0; }

/* Seconds that an op takes at full speed, without op_s. */
/* y (m, n) = x (m, k) w^T: by the curve; without one, the longer of computing and of reading and
 * writing everything. act_bytes: of an element of x and y. packed: the weights are packed, and are
 * unpacked on the way. */
double linear_seconds(const Hardware *hardware, bool prefill, double m, double n, double k,
                      double act_bytes, bool packed);
/* Causal attention of nseq prompts of s tokens. Each has s (s + 1) / 2 pairs of a query and a key,
 * of 4 h1 flops. */
double attend_prefill_seconds(const Hardware *hardware, double nseq, double s, double h1,
                              double act_bytes);
/* nseq new tokens attend to `len` tokens each over paged KV: 4 h1 flops and as many bytes a token;
 * packed, fewer bytes. */
double attend_seconds(const Hardware *hardware, bool on_cpu, bool prefill, double nseq, double len,
                      double h1, bool packed);

#ifdef __cplusplus
}
#endif
#endif
