/* ops.h: lanes, and the operations (ops) that are posted on them (depend.c, ops.c).
 * Before schedule.c, read the first two chapters. The last one says what each op computes, and is
 * to be looked up when schedule.c posts one. Read next: batch.h. */
#ifndef DEVICE_OPS_H
#define DEVICE_OPS_H
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// Lanes and calls (section 4.2)
// -------------------------------------------------------------------------------------------------

/* A lane is an in-order queue of a device. A_DOWN and A_UP are lanes of their own, so that
 * delegated attention never waits behind a slab or a store. PROJECT and FINISH share the GPU, but
 * are two lanes, so that batch k+1 can be projected while the CPU still attends for batch k. */
typedef enum {
    W_READ,  /* weights, disk to CPU */
    W_LOAD,  /* weights, CPU to GPU */
    C_READ,  /* cache and activations, disk to CPU */
    C_LOAD,  /* cache and activations, CPU to GPU */
    STORE,   /* cache and activations, GPU to CPU */
    D_WRITE, /* cache and activations, CPU to disk */
    A_DOWN,  /* for delegated attention the queries and new k, v; new tokens, scores, logits; GPU to
                CPU */
    A_UP,    /* the results of delegated attention, CPU to GPU */
    PROJECT, /* the GPU: a layer up to its attention; the head (FINISH would do as well) */
    FINISH,  /* the GPU: attention and the rest of the layer */
    ATTEND,  /* the CPU: delegated attention, and its other work */
    RECEIVE, /* from the stage before, in a pipeline */
    SEND,    /* to the next stage */
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

/* The place of an op in the run: the lane that carries it out, and the square that its data belongs
 * to. This is not always the square whose call posts it: load_cache(j, k + 1) posts ops of the next
 * square. An op that loads weights belongs to the layer that will use them, and its k is the part
 * of the layer that it loads; prefill and batch are those of the sweep that posts it. Traces,
 * counters and the rates of the sim depend on a Call. */
struct Call {
    Lane lane;
    Kind kind;
    bool prefill;       /* the batch is in prefill; for weights, the same as prefill_sweep */
    bool prefill_sweep; /* some batch is in prefill in the sweep that posts the op */
    bool delegated;     /* the CPU attends for its sequences off the GPU; never in prefill */
    int i, j, k;        /* sweep, layer, place of the batch in the sweep */
    int batch;          /* number of the batch, in the order in which batches enter; for weights
                           that load, of the batch at place k of the sweep that posts the op */
};

// -------------------------------------------------------------------------------------------------
// depend.c: posting, in an order that follows from use (section 4.2)
// -------------------------------------------------------------------------------------------------

/* The way in which an op uses one of its views. */
typedef enum { UNUSED, READS, WRITES } Use;

/* The past users of all cells. parts.h says how post queries it. */
typedef struct Depend Depend;

/* Opens a record of ncells cells, none of which has been used. */
Depend *depend_open(int ncells);
/* Makes later users of a cell come after the past users of another, too: pages pass from there to
 * here. */
void depend_join(Depend *d, int to, int from);
void depend_close(Depend *d);

/* The state of the thread that posts: its device and the order that it must keep. With overlap it
 * only posts each op; without, it also waits for the op at once. */
struct Poster {
    Device *device;
    Depend *depend; /* NULL: ops come with their own Op.after (cost/profile.c) */
    bool overlap, failed;
    Error *err;         /* filled when it has failed */
    Event last[NLANES]; /* the newest of each lane; seq 0: none so far */
};
/* Posts an op, which comes after the earlier users of its views. Returns the event of its end. */
Event post(Poster *poster, Op op);
/* Waits until the posting thread may itself use the view. Returns false if an op has failed. */
bool post_wait(Poster *poster, Tensor view, Use use);
/* Returns the address of a view on the CPU for the posting thread, which must have waited; NULL on
 * the sim, but for index tables. */
void *cpu_address(const Poster *poster, Tensor view);
/* Waits for everything posted. */
bool post_drain(Poster *poster);

/* Appends a move between dense views to moves[0..n), as one row. If it begins where the last move
 * ends, on both sides, it becomes part of that move. Returns the number of moves. */
int add_move(Move *moves, int n, Tensor dst, Tensor src);

/* A route says which rows of a view on the GPU are which rows of a view at home, on one tier. It is
 * the same in every layer. A leg is a run of rows that lie together on both sides, so it is one
 * move of a copy. Pages 4, 5, 6 and 8 of 4 tokens, which pass through staging as pages 0 to 3, are
 * two legs: rows 0 .. 11 on the GPU are rows 16 .. 27 at home, and rows 12 .. 15 are rows 32 .. 35.
 */
typedef struct {
    int gpu, home, rows; /* the first row on the GPU, the first at home; how many they are */
} Leg;
typedef struct {
    Leg *leg;
    int n;
} Route;
/* Adds rows to a route. If they begin where the last leg ends, on both sides, they become part of
 * it. */
void add_leg(Route *route, int gpu, int home, int rows);

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows is each op, to be looked up where one is posted (ops.c). On a
// first reading go on with batch.h.
// -------------------------------------------------------------------------------------------------

/* The operations of a device. op_info (ops.c) says which views each of them reads and writes. */
typedef enum {
    OP_COPY,           /* moves */
    OP_EMBED,          /* y[r] = table[idx[r]], or y[r] += */
    OP_LAYERNORM,      /* y = layernorm(x) w + b */
    OP_LINEAR,         /* y = x w^T + b, ReLU, + residual */
    OP_UNPACK,         /* packed weights to F16 */
    OP_PACK,           /* new k, v that leave the GPU, to rows of packed pages */
    OP_ATTEND_PREFILL, /* causal attention of whole prompts */
    OP_ATTEND,         /* attention of new tokens to pages */
    OP_SELECT,         /* sparse attention: the chosen tokens, and their softmax probabilities */
    OP_FETCH,          /* the V of the chosen tokens from disk */
    OP_WEIGH,          /* the weighted sum of the V of the chosen tokens */
    OP_APPEND,         /* new k, v into pages, which may pack them */
    OP_PICK,           /* the next tokens from logits */
    OP_SCORE,          /* log-probabilities of given tokens from logits */
    OP_RECEIVE,        /* hidden states from the stage before */
    OP_SEND,           /* hidden states to the next stage */
    NCODES
} OpCode;

enum { MAX_VIEWS = 8 };

/* One operation of a lane, as data. The constructors below say what each code computes, with its
 * shapes. */
struct Op {
    OpCode code;
    // clang-format off
    union { /* its place in the run; the fields of Call can be named directly */
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
        struct { Tensor o, q, tokens, probs, k, v, pages, len; } attend; /* also OP_SELECT, OP_WEIGH */
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
    Quant study; /* how an append to F16 pages rounds k and v on the host (bits 0: it does not); the
                    caller of op_append sets it */
    const Prompt *prompts; /* of a pick, which finds there how each is sampled */
    int nafter;            /* the op begins when these events have happened */
    Event after[NLANES];
};

/* The constructors. Each returns an op for `call`, and checks the shapes for all devices; its
 * comment says what the op does. A view that is absent has rows 0. Index tables are I32, weights
 * and biases F16. Activations are F32 on the host, whose functions host_NAME are the specification,
 * and F16 on a GPU.
 *
 * Batch invariance, on the host: a row of a result depends on that row's inputs only, bit for bit,
 * whatever the other rows, the number of threads, the page size or the number of sequences. */
Op op_copy(Call call, const Move *moves, int n);
/* Computes y[r] = table[idx[r]], or y[r] += if add. y (rows, cols); table (any, cols) F16, on the
 * host device or in the checkpoint also BF16 or F32, or packed, U8, of which it unpacks these rows
 * (on a GPU not with add); idx (1, rows), which may be absent on the sim. */
Op op_embed(Call call, Tensor y, Tensor table, Tensor idx, bool add);
/* Computes y[r] = (x[r] - mean) / sqrt(var + 1e-5) * w + b; y may be x. x, y (rows, cols) dense; w,
 * b (1, cols). */
Op op_layernorm(Call call, Tensor y, Tensor x, Tensor w, Tensor b);
/* Compute y = x w^T + b, then ReLU in op_linear_relu, then + residual (section 3's x.w_Q and so
 * on). x (m, k) dense; w (n, k) F16, or packed, U8; y (m, n) F32, or F16; residual has y's type and
 * ld; it may be y itself, and on a GPU it must be. A GPU reads packed w once for every PACKED_ROWS
 * rows. On the host every output sums over k in one fixed order. There packed w is not unpacked,
 * and min + scale * code is not rounded to F16; but x * scale is rounded to an integer of 16 bits,
 * in units of the largest |x| times the largest |scale| of 128 columns, over 32760. */
Op op_linear(Call call, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual);
Op op_linear_relu(Call call, Tensor y, Tensor x, Tensor w, Tensor b);
/* Unpacks packed weights to w (n, k) F16, as quant_unpack_rows does, for products of more rows than
 * those that take packed weights. */
Op op_unpack(Call call, Tensor w, Tensor packed);
/* Packs kv, rows of new k, v (2 h1) F16, to rows of U8 for packed pages: k's heads, then v's. */
Op op_pack(Call call, Tensor packed, Tensor kv, int nh);
/* Computes, in prefill, o = causal softmax(q k^T / sqrt(hd)) v of whole prompts, one after another.
 * o (rows, h1); q (rows, h1) F16, not yet scaled; kv (rows, 2 h1) F16, a row's k, then its v, with
 * q's ld; start (1, nseq + 1): the first row of each prompt, and the end. Working memory does not
 * grow with nseq or with the length of a prompt. */
Op op_attend_prefill(Call call, Tensor o, Tensor q, Tensor kv, Tensor start, int nh);
/* Computes attention of one new token per sequence to paged KV, on the GPU or the CPU (section 4.2,
 * computation delegation). o (nseq, h1), F16 for a GPU; q (nseq, h1) F16, not yet scaled. Reads
 * every byte of K and V once, in place. */
Op op_attend(Call call, Tensor o, Tensor q, const PageTable *table);
/* Compute sparse attention (section 5). select, the first half, gives the chosen tokens I32,
 * ascending, and their probabilities F32, both (nseq, nh * most), where most >=
 * sparse_tokens(sparsity, len[r]) for every r. The softmax is over all tokens, and the
 * probabilities of the others are dropped. select does not touch V. fetch brings the V of these
 * tokens, and no other, from its home on disk to its place in the staged pages; it belongs on
 * C_READ. weigh, the second half, gives o, the weighted sum of that V. */
Op op_select(Call call, Tensor tokens, Tensor probs, Tensor q, const PageTable *table,
             double sparsity);
Op op_fetch(Call call, const PageTable *staged, const PageTable *home, Tensor tokens,
            double sparsity);
Op op_weigh(Call call, Tensor o, Tensor tokens, Tensor probs, const PageTable *table,
            double sparsity);
/* Appends new k and v: row r of kv becomes token pos[r] of sequence seq[r] of the page table. seq
 * may skip and repeat sequences, but no token may occur twice. kv has the type of its pages, or is
 * F16 to be packed. */
Op op_append(Call call, const PageTable *table, Tensor kv, Tensor seq, Tensor pos);
/* Chooses the next token of each row of logits (rows, vocab) F32. A greedy choice is the largest
 * logit, and the lowest id among equals. Otherwise the token is drawn from the softmax at
 * temperature, cut to top_k and then to the smallest set with mass >= top_p, with a counter-based
 * generator from (seed, place, pos[r]) alone. Row r is of prompts[prompt[r]], which says how it is
 * sampled and must live as long as the op. A GPU only chooses greedily. NaN logits never win over
 * numbers; the run then fails. */
Op op_pick(Call call, Tensor ids, Tensor logits, Tensor prompt, Tensor pos, const Prompt *prompts);
/* Computes, for evaluation, logp[r] = log softmax(logits[r])[target[r]], and the greedy choice
 * best[r] as op_pick makes it. logp (1, rows) F32, best and target (1, rows) I32. */
Op op_score(Call call, Tensor logp, Tensor best, Tensor logits, Tensor target);
/* Receive and send x (rows, h1), which is dense and on the CPU. */
Op op_receive(Call call, Tensor x);
Op op_send(Call call, Tensor x);

#ifdef __cplusplus
}
#endif
#endif
