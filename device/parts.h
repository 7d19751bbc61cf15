/* parts.h: what the files of this folder and flexgen.cu share, and nobody else sees. */
#ifndef PARTS_H
#define PARTS_H
#include "device/device.h"
#ifndef __cplusplus
#include "base/simd.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// ops.c: the views and bytes of an op
// -------------------------------------------------------------------------------------------------

/* The description of a code: its name, and its views in the order of the op's struct. The views of
 * a copy are those of its moves. */
typedef struct {
    const char *name;
    Use view[MAX_VIEWS];
} OpInfo;
extern const OpInfo op_info[NCODES];

/* Returns the number of an op's views: two for each move of a copy, up to MAX_VIEWS for others. */
static inline int op_nviews(const Op *op) {
    return op->code == OP_COPY ? 2 * op->nmoves : MAX_VIEWS;
}
/* Returns the n-th of an op's views; *use says what the op does with it. */
static inline const Tensor *op_view(const Op *op, int n, Use *use) {
    if (op->code == OP_COPY) {
        *use = n % 2 ? READS : WRITES;
        return n % 2 ? &op->moves[n / 2].src : &op->moves[n / 2].dst;
    }
    *use = op_info[op->code].view[n];
    return &op->view[n];
}
/* Returns the lengths (1, nseq) of the sequences that an op on pages attends to; NULL for other
 * ops. */
const Tensor *op_lengths(const Op *op);
/* Returns how many tokens of K or V the op reads: all, or in the second half of sparse attention
 * the selected ones. len: the values of op_lengths, where the CPU can read them. */
long op_tokens(const Op *op, const int32_t *len);
/* Adds the bytes that an op moves and reads to the counters of its lane, and returns those it
 * moves. len: as for op_tokens. */
Bytes op_count(LaneCount *count, const Op *op, const int32_t *len);

// -------------------------------------------------------------------------------------------------
// depend.c: how post finds the events of an op
// -------------------------------------------------------------------------------------------------

/* Fills op->after with the events that the op must wait for, without those that others imply. */
void depend_before(Depend *d, Op *op);
/* Notes that the same op has been posted, and that e is its event. */
void depend_posted(Depend *d, const Op *op, Event e);
/* Finds the events that the posting thread must wait for before it uses a view itself. Returns how
 * many there are. */
int depend_poster(const Depend *d, Event wait[NLANES], const Tensor *view, Use use);
/* Notes that the posting thread has waited for e. */
void depend_waited(Depend *d, Event e);

// -------------------------------------------------------------------------------------------------
// lanes.c, sim.c: what devices count
// -------------------------------------------------------------------------------------------------

/* How far views have reached into each region of a plan, for measured peaks. Not thread safe. */
typedef struct {
    const Plan *plan;
    Bytes *peak;                  /* [NTIERS] */
    Bytes high[NREGIONS][NTIERS]; /* bytes of each region touched so far, from its beginning */
} Reach;
/* Begins with nothing touched except what rests in the checkpoint, which is added to the peak of
 * zeros. */
void reach_open(Reach *reach, Bytes peak[NTIERS], const Plan *plan);
/* Raises the peak by the bytes that a view reaches further than those before it. Aborts when it
 * lies outside its region. Views of the checkpoint do not count. */
void reach_note(Reach *reach, Tensor view);
/* Notes all views of an op. */
void reach_op(Reach *reach, const Op *op);

/* Returns which of PROJECT and FINISH, which share the GPU, has its turn: the one whose first op
 * was posted earlier, of those that can begin. It is given the places of their first ops in the
 * order of posting, NOT_READY of one that cannot begin. NLANES: neither can. */
#define NOT_READY UINT64_MAX
static inline Lane gpu_turn(uint64_t project, uint64_t finish) {
    if (project < finish)
        return PROJECT;
    return finish < NOT_READY ? FINISH : NLANES;
}

// -------------------------------------------------------------------------------------------------
// flexgen.cu: a GPU, as lanes.c and tiers.c see it
//
// Each lane has a stream. Ops are posted on the stream of their lane as kernels, the twins of the
// host's functions: pointers are addresses on the GPU, activations F16, sums F32. A row of a result
// depends only on that row's inputs and, in cuBLAS, on the number of rows: attention splits at
// fixed tokens of a sequence.
// -------------------------------------------------------------------------------------------------

enum { MARKS = 256 }; /* points of a stream that can be waited for at a time */

/* A copy of rows of row_bytes from src to dst, where a row begins a pitch of bytes after the one
 * before. Either is on the GPU, or on the host (pinned, to overlap). */
typedef struct {
    void *dst;
    size_t dst_pitch;
    const void *src;
    size_t src_pitch, row_bytes;
    int rows;
} StridedCopy;

/* The functions of an open GPU. Those with an Error return -1 (or NULL) and err if they fail. */
typedef struct GpuCalls {
    /* Posts any op that host_run carries out, whose views are at addresses, and returns at once.
     * Products are of cuBLAS, or for packed w, whose y is F16, of a kernel of ours; they have no
     * ReLU before a residual, and their lane is PROJECT or FINISH, which have a workspace each. */
    int (*run)(Gpu *, const Op *, Error *);
    /* Posts a copy. */
    int (*copy)(Gpu *, Lane lane, StridedCopy, Error *);

    /* Between these two, which one thread calls, the ops that run posts on the lane are not done,
     * but become the graph that is returned (NULL: it fails), in their order. They have run before,
     * and nothing else is posted on the lane meanwhile. */
    int (*capture)(Gpu *, Lane lane, Error *);
    void *(*captured)(Gpu *, Lane lane, Error *);
    /* Posts all of a graph at once. */
    int (*launch)(Gpu *, Lane lane, void *graph, Error *);
    /* Frees a graph, once the lane has done all that was posted on it. */
    void (*forget)(Gpu *, Lane lane, void *graph);

    /* begin and a timed end note the times before and after what is posted between them. An end
     * that is not timed takes less of the GPU's time. Once a mark has passed, the one MARKS later
     * may be made in its place. */
    int (*begin)(Gpu *, Lane lane, uint64_t mark, Error *);
    int (*end)(Gpu *, Lane lane, uint64_t mark, bool timed, Error *);
    /* Makes a lane go on only when another has reached the mark's end. */
    int (*after)(Gpu *, Lane lane, Lane other, uint64_t mark, Error *);
    /* Sleeps until the mark's end. */
    int (*sync)(Gpu *, Lane lane, uint64_t mark, Error *);
    /* Returns the seconds from first's begin to last's end, both past. */
    double (*took)(Gpu *, Lane lane, uint64_t first, uint64_t last);
    /* Returns when a past mark began, in seconds: CLOCK_MONOTONIC at opening, plus the GPU's clock
     * since then. To be asked in order on each lane, and as the last thing about this mark. */
    double (*began)(Gpu *, Lane lane, uint64_t mark);

    /* Allocates the GPU tier; there is one at a time. */
    void *(*alloc)(Gpu *, size_t bytes, Error *);
    /* Waits for the streams, then frees the tier. */
    void (*release)(Gpu *, void *);
    /* Page-locks memory of the host, so that copies overlap; there is one range at a time. If it
     * fails, the beginning may be locked. */
    int (*pin)(Gpu *, void *host, size_t bytes, Error *);
    void (*unpin)(Gpu *, void *host);
    /* Copies to or from the GPU and waits; any thread may call it. */
    int (*transfer)(Gpu *, void *dst, const void *src, size_t bytes, Error *);
} GpuCalls;

// -------------------------------------------------------------------------------------------------
// trace.c: noting what ran
// -------------------------------------------------------------------------------------------------

/* Returns the slice of an op that has run from begin to end. */
static inline Slice slice_of(const Op *op, Bytes bytes, double begin, double end) {
    Slice s = {op->lane,      op->kind, op->prefill, op->prefill_sweep,
               op->delegated, op->i,    op->j,       op->k,
               op->batch,     begin,    end,         bytes};
    return s;
}
/* Counts the seconds of a slice for its lane. */
static inline void count_busy(LaneCount count[NLANES], const Slice *slice, double seconds) {
    count[slice->lane].busy_s += seconds;
    count[slice->lane].prefill_s += slice->prefill ? seconds : 0;
}
/* Returns true if two slices are of the same call. */
bool same_call(const Slice *a, const Slice *b);
/* Notes a slice. It extends the lane's newest one if that is of the same call (kind, i, j, k,
 * batch, phase) and ended less than 0.1 ms before. settled: neither it nor a later one begins
 * before. A Trace of zeros is empty. Not thread safe: devices call it under their lock. */
void trace_add(Trace *trace, const Slice *slice, double settled);
/* Returns Figure 4's name of the call that a slice is part of: "load_weight", "store_cache",
 * "project", ... */
const char *trace_call(const Slice *slice);

// -------------------------------------------------------------------------------------------------
// tiers.c: the disk tier
// -------------------------------------------------------------------------------------------------

/* The offload file, and the files of the checkpoint. */
typedef struct Disk Disk;

/* Makes an unlinked file of so many bytes under dir, fully allocated (0: none), to be used beside
 * the files of the checkpoint, which must outlive it. Returns NULL and err if the disk is full or
 * dir cannot be written to. */
Disk *disk_open(const char *dir, size_t bytes, const Checkpoint *checkpoint, Error *err);
/* Reads a dense view into memory. If its type is not `type`, it is a checkpoint's and becomes F16.
 * Two threads may read at a time, each with its own buffer, 0 or 1. Returns -1 and err for read
 * errors and files that have shrunk. */
int disk_read(Disk *disk, void *memory, Tensor from, Type type, int buffer, Error *err);
/* Writes memory to a dense view of the offload file. */
int disk_write(Disk *disk, Tensor to, const void *memory, Error *err);
/* Carries out an OP_EMBED whose table rests in the checkpoint. */
int disk_embed(const Disk *disk, const Op *op, Error *err);
void disk_close(Disk *disk);

// -------------------------------------------------------------------------------------------------
// tiers.c: the three tiers, and ops carried out there
// -------------------------------------------------------------------------------------------------

/* The three tiers of a device. */
typedef struct {
    Gpu *gpu; /* NULL: the GPU tier is memory of ours */
    Disk *disk;
    uint8_t *arena[NTIERS]; /* TIER_DISK: the mapping of the offload file; TIER_GPU with a GPU: an
                               address there */
    size_t bytes[NTIERS];
    size_t tables[2]; /* offsets of the index tables on GPU and CPU: mirrors of each other */
    Net *net;         /* for RECEIVE and SEND */
} Arenas;

/* Makes the tiers as large as the plan says, in Arenas of zeros that have their gpu. notice:
 * receives what the user should know, if anything. To be closed even after -1. */
int arenas_open(Arenas *a, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir,
                Error *notice, Error *err);
/* Returns the address of a view; NULL for an absent tensor. */
void *arenas_address(const Arenas *a, Tensor t);
/* Returns an index table where the thread that posts can read it: a table on the GPU tier, which
 * may still be on its way, has a mirror on the CPU tier. */
const int32_t *arenas_indices(const Arenas *a, Tensor t);
/* Returns true if the ops of a lane go to a stream of the GPU. */
bool arenas_is_stream(const Arenas *a, int lane);
/* Carries an op out, or posts it on its lane's stream, once its views have addresses. */
int arenas_run(const Arenas *a, Op *op, Error *err);
/* Does the work of Device.upload. */
int arenas_upload(const Arenas *a, Tensor dst, size_t first, const void *src, size_t count,
                  Error *err);
/* Fails with the message for logits that are not finite. */
int logits_not_finite(Error *err);
void arenas_close(Arenas *a);

// -------------------------------------------------------------------------------------------------
// graph.c: ops that a GPU is given again
// -------------------------------------------------------------------------------------------------

/* What the stream of PROJECT was given. */
typedef struct Graphs Graphs;
/* arenas, notice: of the device that opens and closes it. If no graph can be made, the notice says
 * why. */
Graphs *graphs_open(const Arenas *arenas, Error *notice);
/* Posts n ops on the stream: one by one, or by one launch if these ops were posted before. */
int graphs_run(Graphs *graphs, Op *const op[], int n, Error *err);
/* May be given NULL. */
void graphs_close(Graphs *graphs);

// -------------------------------------------------------------------------------------------------
// host.c, host_linear.c, host_attend.c
// -------------------------------------------------------------------------------------------------

/* Carries out any op except copies, fetches and those of a pipeline; its views have addresses. */
void host_run(const Op *op);

/* Carry out the ops of these names (ops.h); they are in the files beside host.c. */
void host_linear(const Op *op);
void host_attend_prefill(const Op *op);
void host_attend(const Op *op);
void host_select(const Op *op);
void host_weigh(const Op *op);

#ifdef __cplusplus
}
#else /* C alone has these vectors */

static inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

/* Calls tile(what, mr) with mr, which is 1 to 6, as a constant: the compiler makes a tile for each
 * number of rows and keeps its sums in registers. */
INLINE void for_rows(void (*tile)(const void *what, int mr), const void *what, int mr) {
    switch (mr) {
        case 1:
            tile(what, 1);
            break;
        case 2:
            tile(what, 2);
            break;
        case 3:
            tile(what, 3);
            break;
        case 4:
            tile(what, 4);
            break;
        case 5:
            tile(what, 5);
            break;
        case 6:
            tile(what, 6);
            break;
    }
}

INLINE V load_any(const void *p, Type type, size_t at, int n) {
    if (type == F16)
        return v_load_f16_part((const f16 *)p + at, n);
    if (type == F32)
        return v_load_part((const float *)p + at, n);
    VH upper = {0}; /* BF16 is the upper half of a float */
    memcpy(&upper, (const f16 *)p + at, imin(n, VL) * sizeof(f16));
    return (V)(__builtin_convertvector(upper, VI) << 16);
}

INLINE void store_any(void *p, Type type, size_t at, V v, int n) {
    if (type == F32)
        v_store_part((float *)p + at, v, n);
    else
        v_store_f16_part((f16 *)p + at, v, n);
}

#endif
#endif
