/* schedule.h: one run of the schedule, and the square whose ops are posted now.
 *
 * The picture is the map of the engine: which memory a square uses, and what comes from where.
 * Below it the same stands in numbers, op by op, to be looked up while you read schedule.c. Then
 * come the two structs that all of schedule.c, square.c and weights.c speak of, and last their
 * functions, which you may pass by until one is called. Read next: schedule.c. */
#ifndef SCHEDULE_H
#define SCHEDULE_H
#include "batch.h"

// clang-format off
/* The six views of one square (i, j, k). The brackets say which slot of its region each view takes.
 *
 *              rests on CPU or disk                       is on the GPU while the square computes
 *
 *   weights    RESTING_WEIGHTS ----- load_weight -------> WEIGHT_SLOT or WEIGHT_SLOT_1 [Run.now.slot]
 *                                                              |    UNPACKED_WEIGHTS if the batch
 *                                                              |    needs F16
 *   x          ACTIVATIONS --------- load_activation ---> HIDDEN            [Square.turn mod square_slots]
 *              of Batch.plan_place                             |    or stays in its ACTIVATIONS if
 *                                                              |    all of it rests on the GPU
 *                                                         - project -
 *                                                              |
 *   q, k, v                                               QKV               [Batch.piece_turn mod piece_slots]
 *                                                              |
 *   new k, v   KV_CACHE <----------- store_cache -------- QKV, or NEW_KV_PACKED [same turn];
 *              the pages of layer j                            |    passes NEW_KV on the CPU
 *                                                              |
 *   pages      KV_CACHE ------------ load_cache --------> KV_STAGING        [Square.turn mod 2];
 *                                                              |    pages at home on the GPU are
 *                                                              |    used in place, and project
 *                                                              |    appends the new k, v to them
 *                                                         - attend -        on the GPU, or on the CPU
 *                                                              |    where the pages are: QUERY goes
 *                                                              |    down and ATTENDED comes up
 *   o                                                     ATTENDED          [Batch.piece_turn mod piece_slots]
 *                                                              |
 *                                                         - finish -
 *                                                              |
 *   x          ACTIVATIONS <-------- store_activation --- HIDDEN of the same square
 *
 * For the head load_activation brings x to HEAD_ROWS (compute gathers rows at home on the GPU there), and
 * nothing is stored.
 *
 * A turn is a place in a rotation. Square.turn counts squares: a slot that rotates by it is in use while the
 * neighbours of its square use the next ones. Batch.piece_turn counts pieces: a slot that rotates by it is used by
 * one piece at a time. Rows of ACTIVATIONS are the batch's own from sweep to sweep (Batch.plan_place), pages
 * are their sequence's own. */

/* One square in numbers: (i, j, k) = (2, 1, 1) of 3 layers and 3 batches, all weights on the GPU.
 * The batch decodes three sequences a, b and c: rows 0, 1 and 2 of x and of QKV. Their KV cache
 * rests on GPU, CPU and disk, and so do their activations. Each has 5 past tokens and a new one in
 * pages 1 and 4 of its tier, of 4 tokens: rows 4-7 and 16-17. A row of x, q, k or v has 64 bytes.
 * A line is an op: its lane, the bytes that cross a link, the rows that it writes <- those that it
 * reads. KV_CACHE[1] is layer 1. Other brackets are slots: [0] is 28 mod 2 (Square.turn: two
 * sweeps of 4 columns, the head's included, a column and a square), and [1] is 22 mod 3
 * (piece_turn: the head has no pieces). Prompts have 4 tokens: the rows of batch 1 begin at 4 on
 * each tier. Rows of pages are those of K; V has the same. Loads are posted in the square before
 * this one, and stores in the next. `project` and `finish` stand for layer norms and products. If
 * the CPU attends, the ops with - are left out (listing square):
 *   load_cache
 *   - C_LOAD  copy    1024 GPU KV_STAGING[0] 0-3, 4-7 <- CPU KV_CACHE[1] 4-7, 16-19
 *     C_READ  copy    1024 CPU KV_STAGING[0] 0-3, 4-7 <- disk KV_CACHE[1] 4-7, 16-19
 *   - C_LOAD  copy    1024 GPU KV_STAGING[0] 8-15     <- CPU KV_STAGING[0] 0-7
 *   load_activation
 *     C_LOAD  copy      64 GPU HIDDEN[0] 1            <- CPU ACTIVATIONS 4
 *     C_READ  copy      64 CPU ACT_READING[0] 0       <- disk ACTIVATIONS 4
 *     C_LOAD  copy      64 GPU HIDDEN[0] 2            <- CPU ACT_READING[0] 0
 *   compute
 *     PROJECT copy         GPU HIDDEN[0] 0            <- GPU ACTIVATIONS 4
 *     PROJECT project      GPU QKV[1] 0-2             <- GPU HIDDEN[0] 0-2
 *     PROJECT append       GPU KV_CACHE[1] 17         <- GPU QKV[1] kv 0
 *     FINISH  attend       GPU ATTENDED[1] 0          <- GPU QKV[1] q 0, KV_CACHE[1] 4-7, 16-17
 *   - FINISH  append       GPU KV_STAGING[0] 5, 13    <- GPU QKV[1] kv 1-2
 *   - FINISH  attend       GPU ATTENDED[1] 1-2        <- GPU QKV[1] q 1-2, KV_STAGING[0] 0-5, 8-13
 *     FINISH  finish       GPU HIDDEN[0] 0-2          <- GPU ATTENDED[1] 0-2, HIDDEN[0] 0-2
 *   store_activation
 *     FINISH  copy         GPU ACTIVATIONS 4          <- GPU HIDDEN[0] 0
 *     STORE   copy      64 CPU ACTIVATIONS 4          <- GPU HIDDEN[0] 1
 *     STORE   copy      64 CPU ACT_WRITING[0] 0       <- GPU HIDDEN[0] 2
 *     D_WRITE copy      64 disk ACTIVATIONS 4         <- CPU ACT_WRITING[0] 0
 *   store_cache
 *   - STORE   copy     256 CPU NEW_KV[1] 0-1          <- GPU QKV[1] kv 1-2
 *   - ATTEND  append       CPU KV_CACHE[1] 17         <- CPU NEW_KV[1] 0
 *     D_WRITE append   128 disk KV_CACHE[1] 17        <- CPU NEW_KV[1] 1
 *   all bytes: ctog 2176, gtoc 384, dtoc 1088, ctod 192
 *
 * The first op has the two legs of Batch.past[TIER_CPU], {0, 4, 4} and {4, 16, 4}. Batch.x has one
 * leg on each tier, {0, 0, 1}. `staged` is the GPU's KV_STAGING, where c's pages begin at row 8;
 * `landing` is the CPU's. kv_to_leave is kv 1-2 of QKV, and kv_on_cpu is NEW_KV. FINISH appends the
 * new k and v of b and c to the staged pages; ATTEND and D_WRITE append them to the pages at home.
 * With --cpu-cache-compute the ops with + take their place (listing delegated):
 *   compute
 *   + A_DOWN  copy     384 CPU QUERY[1] 0-1, NEW_KV[1] 0-1 <- GPU QKV[1] q 1-2, kv 1-2
 *   + ATTEND  append       CPU KV_CACHE[1] 17         <- CPU NEW_KV[1] 0
 *   + ATTEND  attend       CPU ATTENDED[1] 0          <- CPU QUERY[1] 0, KV_CACHE[1] 4-7, 16-17
 *   + ATTEND  append       CPU KV_STAGING[0] 5        <- CPU NEW_KV[1] 1
 *   + ATTEND  attend       CPU ATTENDED[1] 1          <- CPU QUERY[1] 1, KV_STAGING[0] 0-5
 *   + A_UP    copy     128 GPU ATTENDED[1] 1-2        <- CPU ATTENDED[1] 0-1
 *   all bytes: ctog 256, gtoc 512, dtoc 1088, ctod 192
 *
 * `staged` is now the same as `landing`. The pages of b cross no link, and those of c cross only
 * dtoc. For each of the two, q, k and v go down (192 bytes) and o comes up (64 bytes). */
// clang-format on

/* The staging slot of a layer that loads or computes. */
typedef struct {
    int slot;      /* has the layer's tensors that do not rest on the GPU */
    bool unpacked; /* the layer's packed matrices have been unpacked to F16 */
} LayerSlot;

/* A square of the sweep, with the views that the calls of Figure 4 share. */
typedef struct {
    Batch *batch;
    Call call;        /* the place of its ops, but for lane and kind */
    long turn;        /* in the run; HIDDEN and KV_STAGING rotate by it */
    Tensor x;         /* the hidden state while it is computed */
    PageTable staged, /* its pages in staging, on the tier of the processor that attends to them */
        landing;      /* on the CPU: where pages from disk stop on their way to staging; where the
                         CPU attends, this is `staged` itself */

    Piece piece;         /* the piece of it that is computed; the whole batch if it decodes */
    int on_gpu, off_gpu; /* rows whose cache is on the GPU; the other rows, which come after them */
    Tensor x_piece;      /* its rows of x */
    Tensor qkv, q, kv;   /* (rows, 3 h1), of which q has the first h1 columns, kv the others */
    Tensor kv_to_leave, kv_on_cpu; /* the off_gpu rows of kv as pages store them, on GPU and CPU */
    Tensor attended, attended_off_gpu; /* the result of attention; its off_gpu rows, which FINISH
                                          or A_UP writes */
} Square;

/* One run of the schedule. */
typedef struct Run {
    const Plan *plan;
    const Task *task;
    const Listener *listener;
    RunStats *stats;
    Poster *poster;
    Flight *flights;  /* [policy.flights] */
    int next_prompt;  /* the first prompt that waits */
    long admitted;    /* batches admitted so far */
    double sweep_end; /* the time when the last tokens of the newest sweep arrived, in seconds */

    /* the sweep whose ops are posted now */
    Flight *flight; /* the one that sweeps */
    int l,          /* decoder layers, and so the number of the head */
        i;          /* the number of this sweep, over all flights */
    long squares,   /* of all sweeps before this one */
        pieces;     /* of the run so far, those of this sweep included */
    Square square;  /* the one whose ops are posted now */

    /* the weights that stream */
    LayerSlot now, next;    /* the layer that computes; the layer that loads meanwhile */
    bool next_is_layer0;    /* `next` is layer 0 of the coming sweep */
    long weight_turn,       /* of the next layer that streams: an even one has the first slot */
        weight_turn_before; /* the same when this sweep began */

    Move *near, *far; /* scratch: the moves that `carry` posts, between GPU and CPU, and between
                         CPU and disk */
    int nnear, nfar;
} Run;

// -------------------------------------------------------------------------------------------------
// square.c: the square that is current, and the ways of its data
// -------------------------------------------------------------------------------------------------

/* Goes to square (j, k), where k may also be -1, the last batch of layer j-1, or K, the first batch
 * of layer j+1: run->square then has its views. Returns false outside the sweep, or if the batch
 * has no members left; the views are then of no use. */
bool go_to_square(Run *run, int j, int k);
/* Goes on to the square's next piece, which takes this turn of the workspaces. Returns false if
 * there is none. */
bool next_piece(Run *run, long turn);
/* Returns true if layer j is the head. */
static inline bool is_head(const Run *run, int j) { return j == run->l; }
/* Returns true if all rows of the batch's hidden state rest on the GPU. */
static inline bool x_rests_on_gpu(const Batch *b) { return b->act_rows[TIER_GPU] == b->rows; }
/* Return rows of a workspace: squares take its slots in turn, or pieces do. */
Tensor square_slot(const Run *run, RegionId id, Tier tier, int rows);
Tensor piece_slot(const Run *run, RegionId id, Tier tier, int rows);
/* Returns the place on one tier where the batch's activations rest: row 0 is its first row on that
 * tier. */
Tensor activations(const Run *run, Tier tier);
/* Returns the pages of the square that rest on a tier: the tier's pool of its layer, with the
 * batch's tables. */
PageTable home_pages(const Run *run, Tier tier);
/* Returns the part of a batch's page table for its sequences first .. first+n-1. */
PageTable table_rows(PageTable table, int first, int n);
/* Returns the LOGITS of its sequences first .. first+n-1 (n, vocab), which are on the CPU if the
 * task keeps them or the CPU chooses. */
static inline Tensor batch_logits(const Flight *f, const Batch *b, int first, int n) {
    return plan_view(f->run->plan, LOGITS, TIER_CPU, b->plan_place, first, n);
}
/* Returns the Call for ops on the data of the square, on a lane. */
Call call_on(const Run *run, Lane lane, Kind kind);
/* Do the same for a square that is not the current one: square_call returns what the Calls of
 * square (j, k), 0 <= k < K, have in common, and call_of adds lane and kind. */
Call square_call(const Run *run, int j, int k);
Call call_of(Call square, Lane lane, Kind kind);
/* Posts a copy of one view. */
void post_copy(Run *run, Call call, Tensor dst, Tensor src);

/* Adds data to those that `carry` will post: where it is used, its landing on the CPU (needed only
 * if home is the disk), and its home. What is used on the CPU, where it attends, goes no farther
 * than to its landing. */
void add_way(Run *run, Tensor used, Tensor landing, Tensor home, bool store);
/* Adds the rows of a route. A load brings row leg->home to row leg->gpu. A store takes row
 * leg->home to row leg->home: before it is stored, x lies as ACTIVATIONS do. */
void add_route(Run *run, const Route *route, Tensor used, Tensor landing, Tensor home, bool store);
/* Posts what has been added, on call.lane and the disk's lane that belongs to it. */
void carry(Run *run, Call call);

// -------------------------------------------------------------------------------------------------
// weights.c: the weights of a layer
// -------------------------------------------------------------------------------------------------

/* Loads layer 0, if the sweep before has not. */
void begin_weights(Run *run);
/* Passes on to the next layer: what has been loaded is now the layer that computes. */
void turn_weights(Run *run);
/* For a sweep that ends with layer 0, because all sequences turned out to have ended while it was
 * loaded: layer 0 stays for the next sweep, and what has come of layer 1 is forgotten. */
void keep_layer0(Run *run);
/* Loads part k of the weights of layer j, the next layer (Figure 4). After the head comes layer 0
 * of the next sweep, if there is one. */
void load_weight(Run *run, int j, int k);
/* Fills w with the tensors of the square's layer where they are while it computes, F16 or packed.
 */
void ready_weights(Run *run, Tensor w[NROLES]);

// -------------------------------------------------------------------------------------------------
// The trunk ends here: what follows are the branches, as schedule.c sees them. On a first reading
// go on with schedule.c.
// -------------------------------------------------------------------------------------------------

/* embed.c: computes the hidden state of layer 0 from the new tokens' rows of the token table; a
 * later stage of a pipeline has received it. */
void embed(Run *run);
/* head.c: computes layer l of the square, the head: logits, the next tokens, scores. */
void compute_head(Run *run);
/* sparse.c: posts sparse attention (section 5) for the sequences of the batch from `first` on: as
 * op_attend does, but only V of the chosen tokens is read. */
void attend_sparsely(Run *run, Call call, PageTable pages, int first, Tensor o, Tensor q);
/* stages.c: receives the square's hidden state from the stage before if there is one, sends it to
 * the next one if there is one (section 4.4). */
void receive_hidden(Run *run);
void send_hidden(Run *run);
/* tell.c: records in the trace how many pages and sequences all flights together hold now. */
void tell_held(const Run *run);
/* Divides the seconds of prefill sweeps into prefill and decode, by the time that the processors
 * spent on each. The time that they spent on decoding beside prefills is estimated from the number
 * of tokens. */
void tell_seconds(const Run *run);
#endif
