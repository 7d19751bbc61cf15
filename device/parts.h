/* parts.h: what the files of this folder share, and nobody else sees. */
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
// lanes.c, sim.c: what devices count
// -------------------------------------------------------------------------------------------------

/* How far views have reached into each region of a plan: measured peaks. Not thread safe. */
typedef struct {
    Region region[NREGIONS][NTIERS];
    Bytes high[NREGIONS][NTIERS]; /* bytes of each region touched so far, from its beginning */
} Reach;
/* Nothing is touched yet except what rests in the checkpoint, with which peak begins. */
void reach_open(Reach *reach, Bytes peak[NTIERS], const Plan *plan);
/* Raises the peak by what a view reaches further than those before it. Aborts when it lies outside
 * its region. Views of the checkpoint do not count. */
void reach_note(Reach *reach, Bytes peak[NTIERS], Tensor view);

/* The same of all views of an op. */
void reach_op(Reach *reach, Bytes peak[NTIERS], const Op *op);

/* PROJECT and FINISH share the GPU: of their first ops, the one that can begin has its turn, and of
 * two that can, the one that was posted earlier. NLANES: neither can. */
static inline Lane gpu_turn(const bool ready[2], uint64_t project_order, uint64_t finish_order) {
    if (ready[0] && ready[1])
        return finish_order < project_order ? FINISH : PROJECT;
    return ready[0] ? PROJECT : ready[1] ? FINISH : NLANES;
}

// -------------------------------------------------------------------------------------------------
// tiers.c: the offload file and the checkpoint's
// -------------------------------------------------------------------------------------------------

typedef struct Disk Disk;

/* Makes an unlinked file of so many bytes under dir, fully allocated (0: none), to be used beside
 * the files of the checkpoint, which must outlive it. NULL and err if the disk is full or dir
 * cannot be written to. */
Disk *disk_open(const char *dir, size_t bytes, const Checkpoint *checkpoint, Error *err);
/* Where the offload file is mapped; NULL: there is none. */
uint8_t *disk_map(const Disk *disk);
/* Reads a dense view into memory. If its type is not `type`, it is a checkpoint's and becomes F16.
 * Two threads may read at a time, each with its own buffer, 0 or 1. -1 and err for read errors and
 * files that have shrunk. */
int disk_read(Disk *disk, void *memory, Tensor from, Type type, int buffer, Error *err);
int disk_write(Disk *disk, Tensor to, const void *memory, Error *err);
/* Announces that these moves are about to be read. */
void disk_expect(const Disk *disk, const Move *moves, int n);
/* `written` bytes of a range were written through the mapping: sends them to disk, and out of
 * memory. 0: only begins to send what was written, but the mapping no longer counts as this
 * process's memory. */
void disk_settle(const Disk *disk, size_t offset, size_t bytes, size_t written);
/* The op of this name, from a table that rests in the checkpoint. */
int disk_embed(const Disk *disk, const Op *op, Error *err);
/* The op of this name, from the offload file. */
void disk_fetch(const Disk *disk, const Op *op);
void disk_close(Disk *disk);

// -------------------------------------------------------------------------------------------------
// tiers.c: the tiers in memory, and ops carried out there
// -------------------------------------------------------------------------------------------------

typedef struct {
    Gpu *gpu; /* NULL: the GPU tier is memory of ours */
    Disk *disk;
    bool pinned;
    uint8_t *arena[NTIERS]; /* TIER_DISK: the mapping of the offload file; TIER_GPU with a GPU: an
                               address there */
    size_t bytes[NTIERS];
    size_t tables[2]; /* where the index tables lie on GPU and CPU: mirrors of each other */
    Net *net;         /* for RECEIVE and SEND */
} Arenas;

/* Makes the tiers as large as the plan says. notice: what the user should know, if anything. To be
 * closed even after -1. */
int arenas_open(Arenas *a, Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint,
                const char *offload_dir, Error *notice, Error *err);
/* The address of a view; NULL for an absent tensor. */
void *arenas_address(const Arenas *a, Tensor t);
/* Index tables where the thread that posts can read them: those on the GPU tier, which may still be
 * on their way, have a mirror on the CPU tier. */
const int32_t *arenas_indices(const Arenas *a, Tensor t);
/* Whether the ops of a lane go to a stream of the GPU. */
bool arenas_is_stream(const Arenas *a, int lane);
/* Carries an op out, or posts it on its lane's stream, once its views have addresses. */
int arenas_run(const Arenas *a, Op *op, Error *err);
/* Device.upload */
int arenas_upload(const Arenas *a, Tensor dst, size_t first, const void *src, size_t count,
                  Error *err);
/* Fails with the message for logits that are not finite. */
int logits_not_finite(Error *err);
void arenas_close(Arenas *a);

#ifdef __cplusplus
}
#else /* C alone has these vectors */
// -------------------------------------------------------------------------------------------------
// host.c, host_linear.c, host_attend.c
// -------------------------------------------------------------------------------------------------

/* Carries out any op except copies, fetches and those of a pipeline; its views have addresses. */
void host_run(const Op *op);

/* Carry out the ops of these names (device.h); they are in the files beside host.c. */
void host_linear(const Op *op);
void host_attend_prefill(const Op *op);
void host_attend(const Op *op);
void host_select(const Op *op);
void host_weigh(const Op *op);

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
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
    memcpy(&upper, (const f16 *)p + at, (size_t)imin(n, VL) * sizeof(f16));
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
