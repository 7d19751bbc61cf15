/* arena.c: the tiers in memory, and ops carried out there.
 *
 * On the host device the GPU tier is an arena in RAM like the CPU tier, and a thread of ours does the work itself. On the
 * cuda device it is memory of the GPU: ops on lanes that touch it are posted on streams of the GPU (flexgen.cu), the others
 * are as on the host. Either way views get their addresses here. Read next: disk.c, the tier below. */
#include <errno.h>
#include <sys/mman.h>

#include "device/device.h"
#include "device/net.h"

/* Under AddressSanitizer the regions of a tier in memory lie a page further apart than in the plan, and to touch what lies
 * behind one is an error, as if each were an allocation. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { APART = 4096 };
#else
enum { APART = 0 };
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

/* How much further from the beginning of its tier than in the plan a region lies, or the end if id is NREGIONS. */
static size_t shift_of(int tier, int id) { return tier == TIER_DISK ? 0 : (size_t)APART * id; }

void *arenas_address(const Arenas *a, Tensor t) {
    if (!t.rows) return NULL;
    CHECK(t.tier < NTIERS && t.file == 0);
    const size_t at = t.offset + shift_of(t.tier, t.region);
    CHECK(at <= a->bytes[t.tier] && tensor_span(t) <= a->bytes[t.tier] - at);
    return a->arena[t.tier] + at;
}

const int32_t *arenas_indices(const Arenas *a, Tensor t) {
    if (t.tier == TIER_GPU) t.offset = t.offset - a->tables[TIER_GPU] + a->tables[TIER_CPU], t.tier = TIER_CPU;
    return arenas_address(a, t);
}

bool arenas_is_stream(const Arenas *a, int lane) {
    Channel c = lane_channel[lane];
    return a->gpu && (c == GPU || c == CTOG || c == GTOC);
}

// ---------------------------------------------------------------------------------------------------------------
// Ops
// ---------------------------------------------------------------------------------------------------------------

int logits_not_finite(Error *err) {
    return fail(err, EXIT_FAILED,
                "the model's logits are not finite: its weights hold NaN, or values too large; check the checkpoint");
}

/* Of every logit, also of those that are not chosen: a row of the head that is not finite never would be. */
static int check_logits(Tensor t, Error *err) {
    const float *logits = t.at;
    const size_t n = (size_t)t.rows * t.cols;
    uint32_t most = 0, infinite = 0x7f800000;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof bits);
        bits &= INT32_MAX; /* without the sign numbers are ordered as their bits are, NaN last */
        most = bits > most ? bits : most;
    }
    return most < infinite ? 0 : logits_not_finite(err);
}

static int run_copy(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    if (a->disk) disk_expect(a->disk, op->moves, op->nmoves);
    for (int i = 0; i < op->nmoves; i++) {
        Tensor to = op->moves[i].dst, from = op->moves[i].src;
        const size_t size = type_bytes(to.type), row = to.cols * size;
        int status = 0;
        if (from.tier == TIER_DISK)
            status = disk_read(a->disk, arenas_address(a, to), from, to.type, op->lane == C_READ, err);
        else if (to.tier == TIER_DISK)
            status = disk_write(a->disk, to, arenas_address(a, from), err);
        else if (gpu)
            status = gpu->copy(gpu, op->lane, arenas_address(a, to), to.ld * size, arenas_address(a, from), from.ld * size,
                               row, to.rows, err);
        else if (to.ld == (size_t)to.cols && from.ld == (size_t)from.cols)
            memcpy(arenas_address(a, to), arenas_address(a, from), row * to.rows);
        else
            for (int r = 0; r < to.rows; r++)
                memcpy(arenas_address(a, tensor_rows(to, r, 1)), arenas_address(a, tensor_rows(from, r, 1)), row);
        if (status) return status;
    }
    return 0;
}

/* On the CPU, and what is to be done about the result. */
static int run_on_host(const Arenas *a, const Op *op, Error *err) {
    const Tensor k = op->append.k, v = op->append.v;
    host_run(op);
    if (op->code == OP_PICK) return check_logits(op->pick.logits, err);
    if (op->code == OP_SCORE) return check_logits(op->score.logits, err);
    if (op->code == OP_APPEND && k.tier == TIER_DISK) /* K and V of a layer lie one after the other */
        disk_settle(a->disk, k.offset, v.offset + tensor_span(v) - k.offset, tensor_bytes(op->append.kv));
    return 0;
}

int arenas_run(const Arenas *a, Op *op, Error *err) {
    Gpu *gpu = arenas_is_stream(a, op->lane) ? a->gpu : NULL;
    const Tensor *x = &op->state.x;
    for (int n = 0; n < MAX_VIEWS; n++) /* what rests in the checkpoint has no address */
        if (op_info[op->code].view[n].use && !op->view[n].file) op->view[n].at = arenas_address(a, op->view[n]);
    switch (op->code) {
        case OP_COPY:
            return run_copy(a, op, gpu, err);
        case OP_FETCH:
            disk_fetch(a->disk, op);
            return 0;
        case OP_RECEIVE:
            return a->net->receive(a->net, a->net->stage - 1, NET_STATES, x->at, tensor_bytes(*x), err);
        case OP_SEND:
            return a->net->send(a->net, a->net->stage + 1, NET_STATES, x->at, tensor_bytes(*x), err);
        default:
            if (op->code == OP_EMBED && op->embed.table.file) return disk_embed(a->disk, op, err);
            return gpu ? gpu->run(gpu, op, err) : run_on_host(a, op, err);
    }
}

int arenas_upload(const Arenas *a, Tensor dst, size_t first, const void *src, size_t count, Error *err) {
    const size_t size = type_bytes(dst.type), all = (size_t)dst.rows * dst.cols;
    uint8_t *to = (uint8_t *)arenas_address(a, dst) + first * size;
    CHECK(first + count <= all);
    if (a->gpu && dst.tier == TIER_GPU) return a->gpu->upload(a->gpu, to, src, count * size, err);
    memcpy(to, src, count * size);
    if (dst.tier == TIER_DISK) disk_settle(a->disk, dst.offset + first * size, count * size, 0); /* piece by piece */
    if (dst.tier == TIER_DISK && first + count == all) disk_settle(a->disk, dst.offset, tensor_span(dst), tensor_span(dst));
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------------------------

#ifndef MADV_POPULATE_WRITE /* of Linux 5.14; an older C library does not name it */
#define MADV_POPULATE_WRITE 23
#endif

typedef struct {
    uint8_t *at;
    size_t bytes;
} Memory;

enum { SLICE = 64 << 20 };

static void populate_slices(const void *memory, int first, int n) {
    const Memory *m = memory;
    const size_t at = (size_t)first * SLICE, end = at + (size_t)n * SLICE;
    madvise(m->at + at, (end < m->bytes ? end : m->bytes) - at, MADV_POPULATE_WRITE);
}

/* Gives a tier its pages before the first sweep, by all threads: a page that is met later holds up the lane that meets it,
 * and to pin memory would touch it by one thread. Where Linux does not know the call they are met. */
static void populate(uint8_t *memory, size_t bytes) {
    host_share((double)bytes, (int)((bytes + SLICE - 1) / SLICE), populate_slices, &(Memory){memory, bytes});
}

static size_t tier_bytes(const Plan *plan, Tier tier) { return plan->total[tier] + shift_of(tier, NREGIONS); }

static int open_memory(Arenas *a, Tier tier, size_t bytes, Error *err) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return fail(err, EXIT_FAILED, "cannot allocate %.1f MiB for the %s tier: %s; lower %s or free some memory",
                    bytes / 1048576.0, tier_name[tier], strerror(errno), tier == TIER_GPU ? "--gpu-mem" : "--cpu-mem");
    madvise(p, bytes, MADV_HUGEPAGE);
    populate((uint8_t *)p, bytes);
    a->arena[tier] = p;
    a->bytes[tier] = bytes;
    return 0;
}

/* The upper tiers of the cuda device. Memory that cannot be pinned serves as well, slower. */
static int open_gpu_memory(Arenas *a, const Plan *plan, Error *notice, Error *err) {
    a->bytes[TIER_GPU] = tier_bytes(plan, TIER_GPU);
    a->arena[TIER_GPU] = a->gpu->alloc(a->gpu, a->bytes[TIER_GPU], err);
    if (!a->arena[TIER_GPU] || open_memory(a, TIER_CPU, tier_bytes(plan, TIER_CPU), err)) return -1;
    a->pinned = !a->gpu->pin(a->gpu, a->arena[TIER_CPU], a->bytes[TIER_CPU], notice);
    return 0;
}

/* Forbids what lies behind the regions that are in memory. */
static void guard_regions(const Arenas *a, const Plan *plan) {
    for (int tier = TIER_GPU; tier <= TIER_CPU && APART; tier++)
        for (int id = 0; id < NREGIONS; id++) {
            const Region *r = &plan->region[id][tier];
            const Bytes used = r->rows ? (Bytes)r->rows * r->cols * r->slots * type_bytes(r->type) : r->bytes;
            uint8_t *end = a->arena[tier] + r->offset + shift_of(tier, id) + used;
            if (!r->bytes) continue;
            if (tier == TIER_CPU || !a->gpu)
                ASAN_POISON_MEMORY_REGION(end, r->bytes - used + APART);
            else if (a->gpu->forbid)
                a->gpu->forbid(end, r->bytes - used + APART);
        }
}

/* Memory of ours goes back as it came. */
static void close_memory(Arenas *a, Tier tier) {
    if (!a->arena[tier]) return;
    ASAN_UNPOISON_MEMORY_REGION(a->arena[tier], a->bytes[tier]);
    munmap(a->arena[tier], a->bytes[tier]);
}

int arenas_open(Arenas *a, Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *notice,
                Error *err) {
    *a = (Arenas){.gpu = gpu};
    for (int t = TIER_GPU; t <= TIER_CPU; t++) a->tables[t] = plan->region[INDEX_TABLES][t].offset;
    if (gpu ? open_gpu_memory(a, plan, notice, err)
            : open_memory(a, TIER_GPU, tier_bytes(plan, TIER_GPU), err) ||
                  open_memory(a, TIER_CPU, tier_bytes(plan, TIER_CPU), err))
        return -1;
    guard_regions(a, plan);
    if (!plan->total[TIER_DISK]) return 0;
    a->disk = disk_open(offload_dir, plan->offload_bytes, checkpoint, err);
    if (!a->disk) return -1;
    a->arena[TIER_DISK] = disk_map(a->disk);
    a->bytes[TIER_DISK] = plan->offload_bytes;
    return 0;
}

void arenas_close(Arenas *a) {
    disk_close(a->disk);
    if (a->gpu && a->arena[TIER_GPU]) a->gpu->release(a->gpu, a->arena[TIER_GPU]); /* waits for the streams */
    if (a->pinned) a->gpu->unpin(a->gpu, a->arena[TIER_CPU]);
    if (!a->gpu) close_memory(a, TIER_GPU);
    close_memory(a, TIER_CPU);
}
