/* disk.c: the disk tier (section 4.1): an offload file, and the files of the checkpoint.
 *
 * The offload file is mapped, has all its blocks before the first byte is written, and no name from the start, so that no
 * way of ending leaves it behind. Appends of single tokens go through the mapping; bulk traffic reads and writes the file.
 * Large reads go around the page cache, and whatever was touched is dropped from it, so that the CPU tier's limit stays
 * honest. A read error, or a file that shrank, is an error and never a signal. Read next: load.c, how weights come to
 * their homes. */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/device.h"
#include "io/io.h"

/* Direct reads are of whole blocks, through a buffer of BOUNCE bytes; smaller ones than DIRECT_MIN are quicker without. */
enum { BLOCK = 4096, BOUNCE = 4 << 20, DIRECT_MIN = 1 << 18 };
enum { LOOK_EVERY = 64 /* reads of weights: some layers, which take far longer than a look at the files */ };

struct Disk {
    const Checkpoint *checkpoint;
    int file; /* the offload file; -1: there is none */
    uint8_t *map;
    size_t bytes;
    int *direct; /* [1 + files of the checkpoint] descriptors that pass the page cache by; -1: there is none */
    uint8_t *bounce[2];
    unsigned weights_read; /* how often; atomic */
};

// ---------------------------------------------------------------------------------------------------------------
// Reading and writing
// ---------------------------------------------------------------------------------------------------------------

/* Makes the kernel forget file pages that the tiers' accounting does not allow it to keep. What was written must be on its
 * way first: a lot is waited for; a little is only sent off, and dropped when it is read. */
static void drop_cache(int fd, size_t offset, size_t bytes, size_t written) {
    if (written && written < DIRECT_MIN) {
        sync_file_range(fd, (off_t)offset, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
        return;
    }
    if (written)
        sync_file_range(fd, (off_t)offset, (off_t)bytes,
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

static int disk_fault(const Disk *d, int file, const char *what, size_t bytes, size_t offset, const char *why, Error *err) {
    return fail(err, EXIT_FAILED, "%s: %s %zu byte%s at %zu: %s; check the disk%s",
                file ? d->checkpoint->files[file - 1].path : "the offload file", what, bytes, plural((double)bytes), offset,
                why, file ? "" : " under --offload-dir");
}

/* Whole blocks into the bounce buffer, and what is wanted of them on from there. */
static int read_direct(Disk *d, int buffer, int file, uint8_t *memory, size_t offset, size_t bytes, Error *err) {
    uint8_t *bounce = d->bounce[buffer];
    size_t begin = offset;
    while (bytes) {
        size_t skip = offset % BLOCK, want = skip + bytes < BOUNCE ? (skip + bytes + BLOCK - 1) / BLOCK * BLOCK : BOUNCE;
        ssize_t n = pread(d->direct[file], bounce, want, (off_t)(offset - skip));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 || (size_t)n <= skip)
            return disk_fault(d, file, "reading", bytes, offset, n < 0 ? strerror(errno) : "unexpected end", err);
        size_t got = (size_t)n - skip < bytes ? (size_t)n - skip : bytes;
        memcpy(memory, bounce + skip, got);
        memory += got, offset += got, bytes -= got;
    }
    if (!file) drop_cache(d->file, begin, offset - begin, 0); /* small writes since the last read are on disk now */
    return 0;
}

int disk_read(Disk *d, void *memory, Tensor from, Type type, int buffer, Error *err) {
    CHECK(from.ld == (size_t)from.cols || from.rows == 1);
    size_t count = (size_t)from.rows * from.cols, bytes = tensor_bytes(from);
    if (from.file && __atomic_add_fetch(&d->weights_read, 1, __ATOMIC_RELAXED) % LOOK_EVERY == 0 &&
        checkpoint_unchanged(d->checkpoint, err))
        return -1;
    if (from.type == type && bytes >= DIRECT_MIN && d->direct[from.file] >= 0)
        return read_direct(d, buffer, from.file, memory, from.offset, bytes, err);
    if (from.file) { /* weights, which become F16 on the way */
        if (checkpoint_fill(d->checkpoint, memory, &from, 0, count, err)) return -1;
        drop_cache(d->checkpoint->files[from.file - 1].fd, from.offset, bytes, 0);
        return 0;
    }
    const char *why = file_read_at(d->file, memory, bytes, from.offset);
    if (why) return disk_fault(d, 0, "reading", bytes, from.offset, why, err);
    drop_cache(d->file, from.offset, bytes, 0);
    return 0;
}

int disk_write(Disk *d, Tensor to, const void *memory, Error *err) {
    CHECK(!to.file && (to.ld == (size_t)to.cols || to.rows == 1));
    const size_t bytes = tensor_bytes(to);
    const char *why = file_write_at(d->file, memory, bytes, to.offset);
    if (why) return disk_fault(d, 0, "writing", bytes, to.offset, why, err);
    drop_cache(d->file, to.offset, bytes, bytes);
    return 0;
}

/* Small reads: the disk hears of all of them before the first is waited for. */
void disk_expect(const Disk *d, const Move *moves, int n) {
    for (int i = 0; i < n; i++) {
        Tensor from = moves[i].src;
        if (from.tier == TIER_DISK && !from.file && tensor_span(from) < DIRECT_MIN)
            posix_fadvise(d->file, (off_t)from.offset, (off_t)tensor_span(from), POSIX_FADV_WILLNEED);
    }
}

void disk_settle(const Disk *d, size_t offset, size_t bytes, size_t written) {
    size_t head = offset % BLOCK;
    madvise(d->map + offset - head, bytes + head, MADV_DONTNEED); /* nothing is lost in a shared file */
    drop_cache(d->file, offset, bytes, written);
}

/* Rows are read one by one, never through a mapping: a file that shrank is then an error. */
int disk_embed(const Disk *d, const Op *op, Error *err) {
    const Tensor y = op->embed.y, table = op->embed.table;
    const int32_t *idx = op->embed.idx.at;
    f16 *row = xcalloc(table.cols, sizeof *row);
    int32_t zero = 0;
    int status = 0;
    Op one = *op; /* from a table of one row */
    one.embed.table = (Tensor){.type = F16, .rows = 1, .cols = table.cols, .ld = table.cols, .at = row};
    one.embed.idx.at = &zero;
    for (int r = 0; r < y.rows && !status; r++) {
        one.embed.y = tensor_rows(y, r, 1);
        status = checkpoint_fill(d->checkpoint, row, &table, (size_t)idx[r] * table.cols, table.cols, err);
        if (!status) host_run(&one);
    }
    free(row);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// The pieces of V that sparse attention chooses
// ---------------------------------------------------------------------------------------------------------------

/* What is wanted of the offload file, by blocks. */
typedef struct {
    uint64_t *bits;
    size_t first, n; /* blocks */
} Blocks;

static void want(Blocks *b, size_t offset, size_t bytes) {
    for (size_t i = offset / BLOCK - b->first; i <= (offset + bytes - 1) / BLOCK - b->first; i++)
        b->bits[i / 64] |= 1ull << i % 64;
}

/* Tells the kernel of every run of wanted blocks. */
static void advise(const Disk *d, const Blocks *b, int advice) {
    for (size_t i = 0, run; i < b->n; i += run) {
        for (run = 0; i + run < b->n && (b->bits[(i + run) / 64] >> (i + run) % 64 & 1); run++) continue;
        if (run) posix_fadvise(d->file, (off_t)((b->first + i) * BLOCK), (off_t)(run * BLOCK), advice);
        if (!run) run = 1;
    }
}

/* Goes through the pieces, one for each chosen token of each sequence and head; with blocks it only wants them, without it
 * copies them from their pages at home to the same places of the staged ones. */
static void for_pieces(const Disk *d, const Op *op, Blocks *blocks) {
    const Tensor v = op->fetch.v, home = op->fetch.home_v, chosen = op->fetch.tokens, pages = op->fetch.pages;
    const size_t row_bytes = v.cols * type_bytes(v.type), head = row_bytes / op->nh;
    const int32_t *to_page = pages.at, *from_page = op->fetch.home_pages.at, *len = op->fetch.len.at;
    for (int r = 0; r < chosen.rows; r++, to_page += pages.ld, from_page += pages.ld) {
        for (int h = 0; h < op->nh; h++) {
            const int32_t *token = (const int32_t *)chosen.at + ((size_t)r * op->nh + h) * (chosen.cols / op->nh);
            for (int i = 0; i < sparse_tokens(op->sparsity, len[r]) - 1; i++) { /* the last is its own: it is here */
                int page = token[i] / op->page_tokens, row = token[i] % op->page_tokens;
                size_t to = ((size_t)to_page[page] * op->page_tokens + row) * row_bytes + h * head;
                size_t from = home.offset + ((size_t)from_page[page] * op->page_tokens + row) * row_bytes + h * head;
                if (blocks)
                    want(blocks, from, head);
                else
                    memcpy((uint8_t *)v.at + to, d->map + from, head);
            }
        }
    }
}

/* Many small pieces: the disk hears of all blocks that they lie in before the first is waited for; then they are read
 * through the mapping. */
void disk_fetch(const Disk *d, const Op *op) {
    const size_t home = op->fetch.home_v.offset, bytes = tensor_span(op->fetch.home_v), head = home % BLOCK;
    Blocks blocks = {.first = home / BLOCK, .n = (home + bytes) / BLOCK + 1 - home / BLOCK};
    blocks.bits = xcalloc(blocks.n / 64 + 1, sizeof *blocks.bits);
    for_pieces(d, op, &blocks);
    advise(d, &blocks, POSIX_FADV_WILLNEED);
    for_pieces(d, op, NULL);
    madvise(d->map + home - head, bytes + head, MADV_DONTNEED);
    advise(d, &blocks, POSIX_FADV_DONTNEED);
    free(blocks.bits);
}

// ---------------------------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------------------------

uint8_t *disk_map(const Disk *d) { return d->map; }

static int open_file(Disk *d, const char *dir, size_t bytes, Error *err) {
    char path[4096];
    snprintf(path, sizeof path, "%s/flexgen-offload-XXXXXX", dir);
    d->file = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (d->file < 0) { /* a file system without nameless files: nameless a moment later */
        d->file = mkstemp(path);
        if (d->file >= 0) unlink(path);
    }
    if (d->file < 0)
        return fail(err, EXIT_FAILED,
                    "cannot create the offload file in %s: %s; name a writable directory with --offload-dir", dir,
                    strerror(errno));
    int status = posix_fallocate(d->file, 0, (off_t)bytes);
    if (status)
        return fail(err, EXIT_FAILED,
                    "cannot reserve %.1f MiB for the offload file in %s: %s; choose another --offload-dir, or move "
                    "less to the disk",
                    bytes / 1048576.0, dir, strerror(status));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, d->file, 0);
    if (p == MAP_FAILED)
        return fail(err, EXIT_FAILED,
                    "cannot map the offload file, %.1f MiB, in %s: %s; raise ulimit -v, or move less to the disk",
                    bytes / 1048576.0, dir, strerror(errno));
    madvise(p, bytes, MADV_RANDOM); /* a token's place is all that is touched; nothing around it is wanted */
    d->map = p;
    d->bytes = bytes;
    return 0;
}

/* Second descriptors for direct reads. A file system without them (tmpfs) is read the ordinary way. */
static void open_direct(Disk *d) {
    char path[64];
    for (int b = 0; b < 2; b++)
        if (posix_memalign((void **)&d->bounce[b], BLOCK, BOUNCE)) d->bounce[b] = NULL;
    if (!d->bounce[0] || !d->bounce[1]) return;
    snprintf(path, sizeof path, "/proc/self/fd/%d", d->file); /* it has no other name */
    if (d->file >= 0) d->direct[0] = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    for (int f = 1; f <= d->checkpoint->nfiles; f++)
        d->direct[f] = open(d->checkpoint->files[f - 1].path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

Disk *disk_open(const char *dir, size_t bytes, const Checkpoint *checkpoint, Error *err) {
    Disk *d = xcalloc(1, sizeof *d);
    d->checkpoint = checkpoint;
    d->file = -1;
    d->direct = xcalloc(checkpoint->nfiles + 1, sizeof *d->direct);
    for (int f = 0; f <= checkpoint->nfiles; f++) d->direct[f] = -1;
    if (!bytes || !open_file(d, dir, bytes, err)) return open_direct(d), d;
    disk_close(d);
    return NULL;
}

void disk_close(Disk *d) {
    if (!d) return;
    for (int f = 0; f <= d->checkpoint->nfiles; f++)
        if (d->direct[f] >= 0) close(d->direct[f]);
    if (d->map) munmap(d->map, d->bytes);
    if (d->file >= 0) close(d->file);
    free(d->bounce[0]), free(d->bounce[1]), free(d->direct), free(d);
}
