/* tiers.c: the three tiers (section 4.1), ops carried out there, and the loading of the weights.
 *
 * The disk tier is an offload file, and the files of the checkpoint. The offload file is mapped,
 * has all its blocks before the first byte is written, and never has a name, so that no way of
 * ending leaves it behind. DIFFERS: appends of single tokens go through the mapping; bulk traffic
 * reads and writes the file. Large reads bypass the page cache, and whatever was touched is dropped
 * from it, so that the page cache does not exceed the CPU tier's limit. A read error, or a file
 * that shrank, is an error and never a signal.
 *
 * On the host device the GPU tier is an arena in RAM like the CPU tier, and a thread of ours does
 * the work itself. On the cuda device it is memory of the GPU: ops on lanes that touch it are
 * posted on streams of the GPU (flexgen.cu), the others are as on the host. Either way views get
 * their addresses here.
 * Read next: sim.c. */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/parts.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// The disk tier: reading and writing
// -------------------------------------------------------------------------------------------------

/* Direct reads are of whole blocks, through a buffer of BOUNCE bytes; reads of less than DIRECT_MIN
 * are quicker without. */
enum { BLOCK = 4096, BOUNCE = 4 << 20, DIRECT_MIN = 1 << 18 };
/* The files of the checkpoint are checked for changes once in so many reads of weights: a few
 * layers, which take far longer than the check. */
enum { LOOK_EVERY = 64 };

/* The disk tier. */
struct Disk {
    const Checkpoint *checkpoint;
    int file; /* descriptor of the offload file; -1: there is none */
    uint8_t *map;
    size_t bytes;
    int *direct; /* [1 + files of the checkpoint] descriptors that bypass the page cache; -1: there
                    is none */
    uint8_t *bounce;       /* (2, BOUNCE); NULL: reads are not direct */
    unsigned weights_read; /* reads of weights so far; atomic */
};

/* Drops file pages from the page cache, which the tiers' accounting does not allow it to keep.
 * Written pages must be on their way to disk first: many are waited for; a few are only sent off,
 * and are dropped when they are read. */
static void drop_cache(int fd, size_t offset, size_t bytes, size_t written) {
    bool few = written && written < DIRECT_MIN;
    if (written)
        file_write_back(fd, offset, bytes, !few);
    if (!few)
        file_advise(fd, offset, bytes, false);
}

/* Fails with the message for an error at a view on disk. what: "reading" or "writing". */
static int disk_fault(const Disk *d, Tensor t, const char *what, const char *why, Error *err) {
    size_t at = t.offset, bytes = tensor_bytes(t);
    return fail(err, EXIT_FAILED, "%s: %s %zu byte%s at %zu: %s; check the disk%s",
                t.file ? d->checkpoint->files[t.file - 1].path : "the offload file", what, bytes,
                plural(bytes), at, why, t.file ? "" : " under --offload-dir");
}

/* Reads whole blocks into the bounce buffer, and copies the wanted bytes from there. */
static int read_direct(Disk *d, int buffer, uint8_t *memory, Tensor from, Error *err) {
    uint8_t *bounce = d->bounce + buffer * BOUNCE;
    size_t at = from.offset, left = tensor_bytes(from);
    while (left) {
        size_t skip = at % BLOCK, end = skip + left;
        size_t want = end < BOUNCE ? (end + BLOCK - 1) / BLOCK * BLOCK : BOUNCE;
        ssize_t n = pread(d->direct[from.file], bounce, want, at - skip);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || (size_t)n <= skip)
            return disk_fault(d, from, "reading", n < 0 ? strerror(errno) : "unexpected end", err);
        size_t got = size_min(n - skip, left);
        memcpy(memory, bounce + skip, got);
        memory += got;
        at += got;
        left -= got;
    }
    if (!from.file) /* small writes since the last read are on disk now */
        drop_cache(d->file, from.offset, tensor_bytes(from), 0);
    return 0;
}

int disk_read(Disk *d, void *memory, Tensor from, Type type, int buffer, Error *err) {
    CHECK(from.ld == (size_t)from.cols || from.rows == 1);
    size_t bytes = tensor_bytes(from);
    if (from.file && __atomic_add_fetch(&d->weights_read, 1, __ATOMIC_RELAXED) % LOOK_EVERY == 0 &&
        checkpoint_unchanged(d->checkpoint, err))
        return -1;
    if (from.type == type && bytes >= DIRECT_MIN && d->direct[from.file] >= 0)
        return read_direct(d, buffer, memory, from, err);
    int fd = d->file;
    if (from.file) { /* weights become F16 on the way */
        fd = d->checkpoint->files[from.file - 1].fd;
        if (checkpoint_fill(d->checkpoint, memory, &from, 0, (size_t)from.rows * from.cols, err))
            return -1;
    } else {
        const char *why = file_read_at(fd, memory, bytes, from.offset);
        if (why)
            return disk_fault(d, from, "reading", why, err);
    }
    drop_cache(fd, from.offset, bytes, 0);
    return 0;
}

int disk_write(Disk *d, Tensor to, const void *memory, Error *err) {
    CHECK(!to.file && (to.ld == (size_t)to.cols || to.rows == 1));
    size_t bytes = tensor_bytes(to);
    const char *why = file_write_at(d->file, memory, bytes, to.offset);
    if (why)
        return disk_fault(d, to, "writing", why, err);
    drop_cache(d->file, to.offset, bytes, bytes);
    return 0;
}

/* Tells the disk of all small reads before the first is waited for. */
static void disk_expect(const Disk *d, const Move *moves, int n) {
    for (int i = 0; i < n; i++) {
        Tensor from = moves[i].src;
        if (from.tier == TIER_DISK && !from.file && tensor_span(from) < DIRECT_MIN)
            file_advise(d->file, from.offset, tensor_span(from), true);
    }
}

/* Sends `written` bytes of a range that was written through the mapping to disk, and out of memory.
 * written 0: only begins to send them, but the mapping no longer counts as this process's memory.
 */
static void disk_settle(const Disk *d, size_t offset, size_t bytes, size_t written) {
    memory_let_go(d->map + offset, bytes);
    drop_cache(d->file, offset, bytes, written);
}

/* Embeds rows that are read one by one, never through a mapping, so that a file that shrank is an
 * error. */
int disk_embed(const Disk *d, const Op *op, Error *err) {
    Tensor y = op->embed.y, table = op->embed.table;
    const int32_t *idx = op->embed.idx.at;
    f16 *row = xcalloc(table.cols, sizeof *row);
    int tokens = table.type == U8 ? GROUP : 1; /* of a row of the table */
    int32_t token;
    int status = 0;
    Op one = *op; /* reads from a table of one row */
    one.embed.table.at = row;
    if (table.type != U8)
        one.embed.table.type = F16;
    one.embed.idx.at = &token;
    for (int r = 0; r < y.rows && !status; r++) {
        one.embed.y = tensor_rows(y, r, 1);
        token = idx[r] % tokens;
        status = checkpoint_fill(d->checkpoint, row, &table, idx[r] / tokens * (size_t)table.cols,
                                 table.cols, err);
        if (!status)
            host_run(&one);
    }
    free(row);
    return status;
}

// -------------------------------------------------------------------------------------------------
// The disk tier: the V of the tokens that sparse attention selects
// -------------------------------------------------------------------------------------------------

/* A set of blocks of the offload file. */
typedef struct {
    bool *has;       /* [n + 1], the last one false */
    size_t first, n; /* in blocks */
} Blocks;

/* Adds the blocks of a range of bytes to the set. */
static void want(const Blocks *b, size_t offset, size_t bytes) {
    for (size_t i = offset / BLOCK; i <= (offset + bytes - 1) / BLOCK; i++)
        b->has[i - b->first] = true;
}

/* Tells the system of every run of blocks in the set whether it is wanted. */
static void advise(const Disk *d, const Blocks *b, bool wanted) {
    for (size_t i = 0, begin; i < b->n; i++) {
        for (begin = i; b->has[i];)
            i++;
        if (begin < i)
            file_advise(d->file, (b->first + begin) * BLOCK, (i - begin) * BLOCK, wanted);
    }
}

/* Visits the V of each selected token of each sequence and head. With blocks it only adds it to
 * them; without, it copies it from its page at home to the same place of the staged page. */
static void for_selected(const Disk *d, const Op *op, const Blocks *blocks) {
    Tensor v = op->fetch.v, selected = op->fetch.tokens;
    size_t row_bytes = v.cols * type_bytes(v.type), head = row_bytes / op->nh,
           page_bytes = op->page_tokens * row_bytes;
    const int32_t *to_page = op->fetch.pages.at, *from_page = op->fetch.home_pages.at;
    const int32_t *token = selected.at, *len = op->fetch.len.at;
    for (int r = 0; r < selected.rows; r++) {
        int n = sparse_tokens(op->sparsity, len[r]) - 1; /* the last is the current one: here */
        for (int h = 0; h < op->nh; h++) {
            for (int i = 0; i < n; i++) {
                int page = token[i] / op->page_tokens;
                size_t within = token[i] % op->page_tokens * row_bytes + h * head;
                size_t from = op->fetch.home_v.offset + from_page[page] * page_bytes + within;
                if (blocks)
                    want(blocks, from, head);
                else
                    memcpy((uint8_t *)v.at + to_page[page] * page_bytes + within, d->map + from,
                           head);
            }
            token += selected.cols / op->nh;
        }
        to_page += op->fetch.pages.ld;
        from_page += op->fetch.pages.ld;
    }
}

/* Tells the disk of all blocks that the many small reads lie in before the first is waited for;
 * then reads through the mapping. */
static void disk_fetch(const Disk *d, const Op *op) {
    size_t home = op->fetch.home_v.offset, bytes = tensor_span(op->fetch.home_v);
    Blocks blocks = {.first = home / BLOCK, .n = (home + bytes) / BLOCK + 1 - home / BLOCK};
    blocks.has = xcalloc(blocks.n + 1, sizeof *blocks.has);
    for_selected(d, op, &blocks);
    advise(d, &blocks, true);
    for_selected(d, op, NULL);
    memory_let_go(d->map + home, bytes);
    advise(d, &blocks, false);
    free(blocks.has);
}

// -------------------------------------------------------------------------------------------------
// The disk tier: opening and closing
// -------------------------------------------------------------------------------------------------

/* Makes the offload file, reserves its blocks and maps it. */
static int open_file(Disk *d, const char *dir, size_t bytes, Error *err) {
    d->file = file_nameless(dir);
    if (d->file < 0)
        return fail(err, EXIT_FAILED,
                    "cannot create the offload file in %s: %s; name a writable directory with "
                    "--offload-dir",
                    dir, strerror(errno));
    int status = file_reserve(d->file, bytes);
    if (status)
        return fail(err, EXIT_FAILED,
                    "cannot reserve %.1f MiB for the offload file in %s: %s; choose another "
                    "--offload-dir, or move "
                    "less to the disk",
                    bytes / 1048576.0, dir, strerror(status));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, d->file, 0);
    if (p == MAP_FAILED)
        return fail(err, EXIT_FAILED,
                    "cannot map the offload file, %.1f MiB, in %s: %s; raise ulimit -v, or move "
                    "less to the disk",
                    bytes / 1048576.0, dir, strerror(errno));
    /* only the bytes of a token are touched, and nothing around them is wanted */
    madvise(p, bytes, MADV_RANDOM);
    d->map = p;
    d->bytes = bytes;
    return 0;
}

/* Opens second descriptors for direct reads. Files that do not support them (tmpfs) are read the
 * ordinary way. */
static void open_direct(Disk *d) {
    d->bounce = aligned_alloc(BLOCK, 2 * BOUNCE);
    if (!d->bounce)
        return;
    d->direct[0] = file_direct(d->file);
    for (int f = 1; f <= d->checkpoint->nfiles; f++)
        d->direct[f] = file_direct(d->checkpoint->files[f - 1].fd);
}

Disk *disk_open(const char *dir, size_t bytes, const Checkpoint *checkpoint, Error *err) {
    Disk *d = xcalloc(1, sizeof *d);
    d->checkpoint = checkpoint;
    d->file = -1;
    d->direct = xcalloc(checkpoint->nfiles + 1, sizeof *d->direct);
    for (int f = 0; f <= checkpoint->nfiles; f++)
        d->direct[f] = -1;
    if (!bytes || !open_file(d, dir, bytes, err)) {
        open_direct(d);
        return d;
    }
    disk_close(d);
    return NULL;
}

void disk_close(Disk *d) {
    if (!d)
        return;
    for (int f = 0; f <= d->checkpoint->nfiles; f++)
        if (d->direct[f] >= 0)
            close(d->direct[f]);
    if (d->map)
        munmap(d->map, d->bytes);
    if (d->file >= 0)
        close(d->file);
    free(d->bounce);
    free(d->direct);
    free(d);
}

// -------------------------------------------------------------------------------------------------
// The tiers: the address of a view
// -------------------------------------------------------------------------------------------------

/* Under AddressSanitizer the regions of a tier in memory lie a page further apart than in the plan,
 * and touching the bytes behind one is an error, as if each were an allocation. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { APART = 4096 };
#else
enum { APART = 0 };
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)0)
#endif

/* Returns how much further from the beginning of its tier a region lies than in the plan, or the
 * end if id is NREGIONS. */
static size_t shift_of(int tier, int id) { return tier == TIER_DISK ? 0 : (size_t)APART * id; }

void *arenas_address(const Arenas *a, Tensor t) {
    if (!t.rows)
        return NULL;
    CHECK(t.tier < NTIERS && t.file == 0);
    size_t at = t.offset + shift_of(t.tier, t.region);
    CHECK(at <= a->bytes[t.tier] && tensor_span(t) <= a->bytes[t.tier] - at);
    return a->arena[t.tier] + at;
}

const int32_t *arenas_indices(const Arenas *a, Tensor t) {
    if (t.tier == TIER_GPU) {
        t.offset = t.offset - a->tables[TIER_GPU] + a->tables[TIER_CPU];
        t.tier = TIER_CPU;
    }
    return arenas_address(a, t);
}

bool arenas_is_stream(const Arenas *a, int lane) {
    Channel c = lane_channel[lane];
    return a->gpu && (c == GPU || c == CTOG || c == GTOC);
}

// -------------------------------------------------------------------------------------------------
// The tiers: carrying ops out
// -------------------------------------------------------------------------------------------------

int logits_not_finite(Error *err) {
    return fail(err, EXIT_FAILED,
                "the model's logits are not finite: its weights hold NaN, or values too large; "
                "check the checkpoint");
}

/* Fails if any logit is not finite, also one that is not picked: a row of the head that is not
 * finite never would be. */
static int check_logits(Tensor t, Error *err) {
    const float *logits = t.at;
    size_t n = (size_t)t.rows * t.cols;
    int bad = 0;
    for (size_t i = 0; i < n; i++) /* to the end, so that several are tested at once */
        bad |= !isfinite(logits[i]);
    return bad ? logits_not_finite(err) : 0;
}

/* Runs a copy's moves; gpu NULL: in memory, or from or to disk. */
static int run_copy(const Arenas *a, const Op *op, Gpu *gpu, Error *err) {
    if (a->disk)
        disk_expect(a->disk, op->moves, op->nmoves);
    for (int i = 0; i < op->nmoves; i++) {
        Tensor to = op->moves[i].dst, from = op->moves[i].src;
        size_t size = type_bytes(to.type);
        int status = 0;
        if (from.tier == TIER_DISK)
            status =
                disk_read(a->disk, arenas_address(a, to), from, to.type, op->lane == C_READ, err);
        else if (to.tier == TIER_DISK)
            status = disk_write(a->disk, to, arenas_address(a, from), err);
        else {
            StridedCopy c = {arenas_address(a, to), to.ld * size,   arenas_address(a, from),
                             from.ld * size,        to.cols * size, to.rows};
            if (gpu)
                status = gpu->call->copy(gpu, op->lane, c, err);
            for (int r = 0; r < c.rows && !gpu; r++)
                memcpy((uint8_t *)c.dst + r * c.dst_pitch, (const uint8_t *)c.src + r * c.src_pitch,
                       c.row_bytes);
        }
        if (status)
            return status;
    }
    return 0;
}

/* Runs an op on the CPU, and then checks its logits, or sends its K and V to disk. */
static int run_on_host(const Arenas *a, const Op *op, Error *err) {
    Tensor k = op->append.k, v = op->append.v;
    host_run(op);
    if (op->code == OP_PICK)
        return check_logits(op->pick.logits, err);
    if (op->code == OP_SCORE)
        return check_logits(op->score.logits, err);
    if (op->code == OP_APPEND && k.tier == TIER_DISK) /* K and V of a layer are adjacent */
        disk_settle(a->disk, k.offset, v.offset + tensor_span(v) - k.offset,
                    tensor_bytes(op->append.kv));
    return 0;
}

int arenas_run(const Arenas *a, Op *op, Error *err) {
    Gpu *gpu = arenas_is_stream(a, op->lane) ? a->gpu : NULL;
    const Tensor *x = &op->state.x;
    for (int n = 0; n < MAX_VIEWS; n++) /* a view of the checkpoint has no address */
        if (op_info[op->code].view[n] && !op->view[n].file)
            op->view[n].at = arenas_address(a, op->view[n]);
    switch (op->code) {
        case OP_COPY:
            return run_copy(a, op, gpu, err);
        case OP_FETCH:
            disk_fetch(a->disk, op);
            return 0;
        case OP_RECEIVE:
            return a->net->receive(a->net, a->net->stage - 1, NET_STATES, x->at, tensor_bytes(*x),
                                   err);
        case OP_SEND:
            return a->net->send(a->net, a->net->stage + 1, NET_STATES, x->at, tensor_bytes(*x),
                                err);
        default:
            if (op->code == OP_EMBED && op->embed.table.file)
                return disk_embed(a->disk, op, err);
            return gpu ? gpu->call->run(gpu, op, err) : run_on_host(a, op, err);
    }
}

int arenas_upload(const Arenas *a, Tensor dst, size_t first, const void *src, size_t count,
                  Error *err) {
    size_t size = type_bytes(dst.type), all = (size_t)dst.rows * dst.cols;
    uint8_t *to = (uint8_t *)arenas_address(a, dst) + first * size;
    CHECK(first + count <= all);
    if (a->gpu && dst.tier == TIER_GPU)
        return a->gpu->call->transfer(a->gpu, to, src, count * size, err);
    memcpy(to, src, count * size);
    if (dst.tier == TIER_DISK)
        disk_settle(a->disk, dst.offset + first * size, count * size, 0); /* part by part */
    if (dst.tier == TIER_DISK && first + count == all)
        disk_settle(a->disk, dst.offset, tensor_span(dst), tensor_span(dst));
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The tiers: opening and closing
// -------------------------------------------------------------------------------------------------

/* Memory that is divided into slices. */
typedef struct {
    uint8_t *at;
    size_t bytes;
} Memory;

enum { SLICE = 64 << 20 };

static void populate_slices(const void *memory, int first, int n) {
    const Memory *m = memory;
    size_t at = (size_t)first * SLICE, end = at + (size_t)n * SLICE;
    memory_populate(m->at + at, size_min(end, m->bytes) - at);
}

/* Makes a tier in memory of ours. It gets its pages before the first sweep, from all threads: a
 * page fault later would hold up the lane that meets it, and pinning touches memory by one thread
 * only. */
static int open_memory(Arenas *a, Tier tier, Error *err) {
    size_t bytes = a->bytes[tier];
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return fail(err, EXIT_FAILED,
                    "cannot allocate %.1f MiB for the %s tier: %s; lower %s or free some memory",
                    bytes / 1048576.0, tier_name[tier], strerror(errno),
                    tier == TIER_GPU ? "--gpu-mem" : "--cpu-mem");
    memory_enlarge(p, bytes);
    host_share(bytes, (bytes + SLICE - 1) / SLICE, populate_slices, &(Memory){p, bytes});
    a->arena[tier] = p;
    return 0;
}

/* Opens the upper tiers of the cuda device. What cannot be pinned works as well, but is slower. */
static int open_gpu_memory(Arenas *a, Error *notice, Error *err) {
    a->arena[TIER_GPU] = a->gpu->call->alloc(a->gpu, a->bytes[TIER_GPU], err);
    if (!a->arena[TIER_GPU] || open_memory(a, TIER_CPU, err))
        return -1;
    a->gpu->call->pin(a->gpu, a->arena[TIER_CPU], a->bytes[TIER_CPU], notice);
    return 0;
}

/* Forbids touching the bytes behind the regions that are in memory. */
static void guard_regions(const Arenas *a, const Plan *plan) {
    for (int tier = TIER_GPU; tier <= TIER_CPU && APART; tier++)
        for (int id = 0; id < NREGIONS; id++) {
            const Region *r = &plan->region[id][tier];
            Bytes used =
                r->rows ? (Bytes)r->rows * r->cols * r->slots * type_bytes(r->type) : r->bytes;
            uint8_t *end = a->arena[tier] + r->offset + shift_of(tier, id) + used;
            if (!r->bytes)
                continue;
            if (tier == TIER_CPU || !a->gpu)
                ASAN_POISON_MEMORY_REGION(end, r->bytes - used + APART);
            else if (a->gpu->forbid)
                a->gpu->forbid(end, r->bytes - used + APART);
        }
}

/* Unmaps a tier; its memory goes back as it came, without poison. */
static void close_memory(Arenas *a, Tier tier) {
    if (!a->arena[tier])
        return;
    ASAN_UNPOISON_MEMORY_REGION(a->arena[tier], a->bytes[tier]);
    munmap(a->arena[tier], a->bytes[tier]);
}

int arenas_open(Arenas *a, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir,
                Error *notice, Error *err) {
    for (int t = TIER_GPU; t <= TIER_CPU; t++) {
        a->tables[t] = plan->region[INDEX_TABLES][t].offset;
        a->bytes[t] = plan->total[t] + shift_of(t, NREGIONS);
    }
    if (a->gpu ? open_gpu_memory(a, notice, err)
               : open_memory(a, TIER_GPU, err) || open_memory(a, TIER_CPU, err))
        return -1;
    guard_regions(a, plan);
    if (!plan->total[TIER_DISK])
        return 0;
    a->disk = disk_open(offload_dir, plan->offload_bytes, checkpoint, err);
    if (!a->disk)
        return -1;
    a->arena[TIER_DISK] = a->disk->map;
    a->bytes[TIER_DISK] = plan->offload_bytes;
    return 0;
}

void arenas_close(Arenas *a) {
    disk_close(a->disk);
    if (a->gpu && a->arena[TIER_GPU])
        a->gpu->call->release(a->gpu, a->arena[TIER_GPU]); /* it waits for the streams */
    if (a->gpu)
        a->gpu->call->unpin(a->gpu, a->arena[TIER_CPU]);
    if (!a->gpu)
        close_memory(a, TIER_GPU);
    close_memory(a, TIER_CPU);
}

// -------------------------------------------------------------------------------------------------
// Loading the weights
// -------------------------------------------------------------------------------------------------

/* The loading of all weights by several threads; the first that fails stops the others, and fills
 * err. */
typedef struct {
    const Plan *plan;
    const Checkpoint *checkpoint;
    Device *device;
    atomic_int *failures;
    Error *err;
} Loading;

/* Loads one tensor, some rows at a time: plain, packed or, for a study, rounded. */
static int load_tensor(const Loading *a, Tensor home, const Tensor *source, Quant study,
                       Error *err) {
    enum { PART = 1 << 19 }; /* elements; each thread has one part */
    bool packed = home.type == U8;
    int step = packed ? GROUP : study.bits ? study.group : imax(1, PART / source->cols);
    int all = packed ? home.rows * GROUP : source->rows; /* a row of groups is GROUP rows */
    size_t cols = source->cols;
    f16 *rows = xcalloc(imin(step, all) * cols, sizeof *rows);
    uint8_t *groups = xcalloc(packed ? home.cols : 0, 1);
    int status = 0;
    for (int row = 0; row < all && !status; row += step) {
        size_t first = row * cols, n = imin(step, all - row) * cols;
        status = packed ? checkpoint_pack(a->checkpoint, groups, rows, source, row / GROUP, err)
                        : checkpoint_fill(a->checkpoint, rows, source, first, n, err);
        if (study.bits && !status)
            status = checkpoint_finite(a->checkpoint, rows, source, first, n, err);
        for (size_t c = 0; study.bits && c < cols && !status; c++)
            quant_round(rows + c, cols, n / cols, study);
        if (packed && !status)
            a->device->upload(a->device, home, row / GROUP * (size_t)home.cols, groups, home.cols);
        else if (!status)
            a->device->upload(a->device, home, first, rows, n);
    }
    free(groups);
    free(rows);
    return status;
}

/* Loads tensors first .. first + n - 1, as the checkpoint counts them. */
static void load_tensors(const void *loading, int first, int n) {
    const Loading *a = loading;
    const Plan *plan = a->plan;
    for (int t = first; t < first + n && !atomic_load(a->failures); t++) {
        Error err;
        Part part = checkpoint_part(a->checkpoint, t);
        Tensor home = part.layer < 0 ? plan->global[part.role].home
                                     : plan->weight[part.layer][part.role].home;
        if (!part.tensor->rows || home.file)
            continue;
        Quant study = part.matrix && home.type != U8 ? plan->policy.weight_study : (Quant){0};
        int status = load_tensor(a, home, part.tensor, study, &err);
        if (status && !atomic_fetch_add(a->failures, 1))
            *a->err = err;
    }
}

int weights_load(const Plan *plan, const Checkpoint *checkpoint, Device *device, Error *err) {
    atomic_int failures = 0;
    host_share(INFINITY, part_count(&plan->config), load_tensors,
               &(Loading){plan, checkpoint, device, &failures, err});
    return failures ? -1 : 0;
}
