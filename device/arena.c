/* arena.c: the tiers in memory, and ops carried out there.
 *
 * On the host device the GPU tier is an arena in RAM like the CPU tier, and a thread of ours does the work itself. On the
 * cuda device it is memory of the GPU: ops on lanes that touch it are posted on streams of the GPU (flexgen.cu), the others
 * are as on the host. Either way views become addresses here, and each code calls the function of its name: host_linear, or
 * its twin Gpu.linear. Read next: disk.c, the tier below. */
#include <errno.h>
#include <sys/mman.h>

#include "device/device.h"
#include "device/net.h"

void *arenas_address(const Arenas *a, Tensor t) {
    if (!t.rows) return NULL;
    CHECK(t.tier < NTIERS && t.file == 0);
    CHECK(t.offset <= a->bytes[t.tier] && tensor_span(t) <= a->bytes[t.tier] - t.offset);
    return a->arena[t.tier] + t.offset;
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
// One function a code
// ---------------------------------------------------------------------------------------------------------------

int logits_not_finite(Error *err) {
    return fail(err, EXIT_FAILED,
                "the model's logits are not finite: its weights hold NaN, or values too large; check the checkpoint");
}

/* Of every logit, also of those that are not chosen: a row of the head that is not finite never would be. */
static int check_logits(const float *logits, size_t n, Error *err) {
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

static int run_embed(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor y = op->embed.y, table = op->embed.table;
    Lookup l = {.y = arenas_address(a, y), .y_type = y.type, .idx = arenas_address(a, op->embed.idx)};
    l.rows = y.rows, l.cols = y.cols, l.add = op->add;
    if (table.file) return disk_embed(a->disk, &l, table, err);
    l.table = arenas_address(a, table), l.type = table.type, l.table_ld = table.ld;
    if (gpu) return gpu->embed(gpu, op->lane, &l, err);
    host_embed(&l);
    return 0;
}

static int run_layernorm(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    void *y = arenas_address(a, op->layernorm.y), *x = arenas_address(a, op->layernorm.x);
    void *w = arenas_address(a, op->layernorm.w), *b = arenas_address(a, op->layernorm.b);
    const int rows = op->layernorm.y.rows, cols = op->layernorm.y.cols;
    if (gpu) return gpu->layernorm(gpu, op->lane, y, x, w, b, rows, cols, err);
    host_layernorm(y, x, w, b, rows, cols);
    return 0;
}

static int run_linear(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor y = op->linear.y, x = op->linear.x, w = op->linear.w;
    Product p = {.y = arenas_address(a, y), .y_type = y.type, .y_ld = y.ld, .packed = w.type == U8, .relu = op->relu};
    p.x = arenas_address(a, x), p.w = arenas_address(a, w), p.b = arenas_address(a, op->linear.b);
    p.residual = arenas_address(a, op->linear.residual);
    p.m = y.rows, p.n = y.cols, p.k = x.cols;
    if (gpu) return gpu->linear(gpu, op->lane, &p, err);
    host_linear(&p);
    return 0;
}

static int run_unpack(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor w = op->unpack.w, packed = op->unpack.packed;
    f16 *to = arenas_address(a, w);
    const uint8_t *from = arenas_address(a, packed);
    if (gpu) return gpu->unpack(gpu, op->lane, to, from, w.rows, w.cols, err);
    for (int g = 0; g < packed.rows; g++)
        quant_unpack_rows(to + (size_t)g * GROUP * w.cols, from + (size_t)g * packed.cols, w.cols);
    return 0;
}

static int run_pack(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor packed = op->pack.packed, kv = op->pack.kv;
    const int ld = (int)kv.ld, hd = kv.cols / 2 / op->nh;
    void *to = arenas_address(a, packed);
    const f16 *from = arenas_address(a, kv);
    if (gpu) return gpu->pack(gpu, op->lane, to, from, ld, kv.rows, op->nh, hd, err);
    host_pack(to, from, ld, kv.rows, op->nh, hd);
    return 0;
}

static int run_attend_prefill(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor o = op->prefilled.o, q = op->prefilled.q, start = op->prefilled.start;
    Prefill p = {.o = arenas_address(a, o), .q = arenas_address(a, q), .kv = arenas_address(a, op->prefilled.kv)};
    p.start = arenas_address(a, start), p.nseq = start.cols - 1, p.rows = o.rows, p.h1 = o.cols, p.nh = op->nh;
    p.ld = (int)q.ld;
    if (gpu) return gpu->attend_prefill(gpu, op->lane, &p, err);
    host_attend_prefill(&p);
    return 0;
}

/* What attend, select and weigh have in common. */
static Attention on_pages(const Arenas *a, const Op *op, Tensor pages, Tensor len, Tensor kv, int h1) {
    return (Attention){.pages = arenas_address(a, pages),
                       .len = arenas_address(a, len),
                       .nseq = len.cols,
                       .max_pages = (int)pages.ld,
                       .page_tokens = op->page_tokens,
                       .h1 = h1,
                       .nh = op->nh,
                       .packed = kv.type == U8,
                       .sparsity = op->sparsity};
}

static int run_attend(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor o = op->attend.o, q = op->attend.q, k = op->attend.k;
    Attention t = on_pages(a, op, op->attend.pages, op->attend.len, k, o.cols);
    t.o = arenas_address(a, o), t.o_type = o.type, t.q = arenas_address(a, q), t.q_ld = (int)q.ld;
    t.k = arenas_address(a, k), t.v = arenas_address(a, op->attend.v);
    if (gpu) return gpu->attend(gpu, op->lane, &t, err);
    host_attend(&t);
    return 0;
}

static int run_select(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor q = op->select.q, k = op->select.k;
    Attention t = on_pages(a, op, op->select.pages, op->select.len, k, q.cols);
    t.tokens = arenas_address(a, op->select.tokens), t.weights = arenas_address(a, op->select.weights);
    t.most = op->select.tokens.cols / op->nh;
    t.q = arenas_address(a, q), t.q_ld = (int)q.ld, t.k = arenas_address(a, k);
    if (gpu) return gpu->select(gpu, op->lane, &t, err);
    host_select(&t);
    return 0;
}

static int run_weigh(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor o = op->weigh.o, v = op->weigh.v;
    Attention t = on_pages(a, op, op->weigh.pages, op->weigh.len, v, o.cols);
    t.tokens = arenas_address(a, op->weigh.tokens), t.weights = arenas_address(a, op->weigh.weights);
    t.most = op->weigh.tokens.cols / op->nh;
    t.o = arenas_address(a, o), t.o_type = o.type, t.v = arenas_address(a, v);
    if (gpu) return gpu->weigh(gpu, op->lane, &t, err);
    host_weigh(&t);
    return 0;
}

static int run_fetch(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor v = op->fetch.v, home = op->fetch.home_v;
    Fetch f = {.v = arenas_address(a, v), .home = home.offset, .home_bytes = tensor_span(home), .nh = op->nh};
    (void)gpu, (void)err; /* the disk's lanes are no streams */
    f.pages = arenas_address(a, op->fetch.pages), f.home_pages = arenas_address(a, op->fetch.home_pages);
    f.len = arenas_address(a, op->fetch.len), f.nseq = op->fetch.len.cols, f.max_pages = (int)op->fetch.pages.ld;
    f.tokens = arenas_address(a, op->fetch.tokens), f.most = op->fetch.tokens.cols / op->nh;
    f.page_tokens = op->page_tokens, f.row_bytes = v.cols * type_bytes(v.type), f.sparsity = op->sparsity;
    disk_fetch(a->disk, &f);
    return 0;
}

static int run_append(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor k = op->append.k, v = op->append.v, kv = op->append.kv;
    Append p = {.k = arenas_address(a, k), .v = arenas_address(a, v), .kv = arenas_address(a, kv), .rows = kv.rows};
    p.seq = arenas_address(a, op->append.seq), p.pos = arenas_address(a, op->append.pos);
    p.pages = arenas_address(a, op->append.pages), p.max_pages = (int)op->append.pages.ld;
    p.page_tokens = op->page_tokens, p.width = (int)(k.cols * type_bytes(k.type) / sizeof(f16));
    p.ld = (int)(kv.ld * type_bytes(kv.type) / sizeof(f16));
    p.pack = kv.type != k.type, p.study = op->study, p.nh = op->nh, p.hd = kv.cols / 2 / op->nh;
    if (gpu) return gpu->append(gpu, op->lane, &p, err);
    p.alone = op->lane == D_WRITE;
    host_append(&p);
    if (k.tier == TIER_DISK) { /* K and V of a layer lie one after the other */
        disk_settle(a->disk, k.offset, v.offset + tensor_span(v) - k.offset, tensor_bytes(kv));
    }
    return 0;
}

static int run_pick(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor logits = op->pick.logits;
    int32_t *ids = arenas_address(a, op->pick.ids);
    const int32_t *prompt = arenas_address(a, op->pick.prompt), *pos = arenas_address(a, op->pick.pos);
    const float *rows = arenas_address(a, logits);
    if (gpu) return gpu->pick(gpu, op->lane, ids, rows, prompt, pos, &op->sampling, logits.rows, logits.cols, err);
    host_pick(ids, rows, prompt, pos, &op->sampling, logits.rows, logits.cols);
    return check_logits(rows, (size_t)logits.rows * logits.cols, err);
}

static int run_score(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    const Tensor logits = op->score.logits;
    float *logp = arenas_address(a, op->score.logp);
    int32_t *best = arenas_address(a, op->score.best);
    const float *rows = arenas_address(a, logits);
    const int32_t *target = arenas_address(a, op->score.target);
    if (gpu) return gpu->score(gpu, op->lane, logp, best, rows, target, logits.rows, logits.cols, err);
    host_score(logp, best, rows, target, logits.rows, logits.cols);
    return check_logits(rows, (size_t)logits.rows * logits.cols, err);
}

static int run_receive(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    (void)gpu;
    const Tensor x = op->state.x;
    return a->net->receive(a->net, a->net->stage - 1, NET_STATES, arenas_address(a, x), tensor_bytes(x), err);
}

static int run_send(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    (void)gpu;
    const Tensor x = op->state.x;
    return a->net->send(a->net, a->net->stage + 1, NET_STATES, arenas_address(a, x), tensor_bytes(x), err);
}

int arenas_run(const Arenas *a, const Op *op, Error *err) {
    static int (*const run[NCODES])(const Arenas *, const Op *, Gpu *, Error *) = {
        [OP_COPY] = run_copy,           [OP_EMBED] = run_embed,
        [OP_LAYERNORM] = run_layernorm, [OP_LINEAR] = run_linear,
        [OP_UNPACK] = run_unpack,       [OP_PACK] = run_pack,
        [OP_ATTEND] = run_attend,       [OP_SELECT] = run_select,
        [OP_FETCH] = run_fetch,         [OP_WEIGH] = run_weigh,
        [OP_APPEND] = run_append,       [OP_PICK] = run_pick,
        [OP_SCORE] = run_score,         [OP_ATTEND_PREFILL] = run_attend_prefill,
        [OP_RECEIVE] = run_receive,     [OP_SEND] = run_send,
    };
    return run[op->code](a, op, arenas_is_stream(a, op->lane) ? a->gpu : NULL, err);
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
    a->arena[TIER_GPU] = a->gpu->alloc(a->gpu, plan->total[TIER_GPU], err);
    a->bytes[TIER_GPU] = plan->total[TIER_GPU];
    if (!a->arena[TIER_GPU] || open_memory(a, TIER_CPU, plan->total[TIER_CPU], err)) return -1;
    a->pinned = !a->gpu->pin(a->gpu, a->arena[TIER_CPU], a->bytes[TIER_CPU], notice);
    return 0;
}

int arenas_open(Arenas *a, Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *notice,
                Error *err) {
    *a = (Arenas){.gpu = gpu};
    for (int t = TIER_GPU; t <= TIER_CPU; t++) a->tables[t] = plan->region[INDEX_TABLES][t].offset;
    if (gpu ? open_gpu_memory(a, plan, notice, err)
            : open_memory(a, TIER_GPU, plan->total[TIER_GPU], err) || open_memory(a, TIER_CPU, plan->total[TIER_CPU], err))
        return -1;
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
    if (!a->gpu && a->arena[TIER_GPU]) munmap(a->arena[TIER_GPU], a->bytes[TIER_GPU]);
    if (a->arena[TIER_CPU]) munmap(a->arena[TIER_CPU], a->bytes[TIER_CPU]);
}
