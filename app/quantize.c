/* quantize.c: writes a packed copy of a checkpoint (section 5), so that a model is packed once and
 * not at every start.
 *
 * The copy is a Hugging Face directory like its source. The small .json and .txt files are copied
 * unchanged; the tensors are in model.safetensors, or in shards model-00001-of-000NN.safetensors
 * with model.safetensors.index.json. Each of these files has
 *
 *     "__metadata__": {"format": "flexgen-packed-1", "flexgen.bits": "4", "flexgen.group": "64"}
 *
 * and these tensors, under the names that they have in the source:
 *
 *     matrices of the decoder layers    dtype U8, shape (n / 64, 36 k) instead of (n, k)
 *     token table, a separate head      the same with --compress-head, where n / 64 is rounded up
 *     all others                        dtype F16: biases, layernorms, positions, projections, and
 *                                       without --compress-head the token table and the head
 *
 * Row g of a packed matrix is the result of quant_pack_rows for rows [64 g, 64 (g + 1)), where the
 * last row stands for rows behind it; quant.h describes the layout of a group. A layer is never
 * split between shards. The data begins at a multiple of 64 bytes and has no holes. Tensors whose
 * sizes are multiples of 64 come first, then multiples of 32, and so on, so that each tensor begins
 * at as round a byte as its size is.
 *
 * Contract: each thread buffers only one row of groups, however large the model is. The copy is
 * made beside its place, as OUTPUT.tmp-..., synced, and renamed when it is complete; on any failure
 * it is removed.
 * Read next: job.c. */
#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <unistd.h>

#include "app/app.h"

/* Bytes to which data is aligned; numbers that are converted at once; threads; bytes of a small
 * file at most. */
enum { ALIGN = 64, CHUNK = 1 << 20, MOST_THREADS = 8, SMALL_FILE = 100 << 20 };

/* One tensor of the copy. */
typedef struct {
    const Tensor *from;        /* the source's tensor */
    int layer;                 /* -1: it is outside of the layers */
    bool vector, packed;       /* it has one dimension; it is packed */
    int order, shard, rows;    /* rank within its shard; rows, or rows of groups if packed */
    size_t cols, bytes, begin; /* begin: its first byte in the data of its shard */
} Item;

/* A copy that is being made. */
typedef struct {
    const Checkpoint *checkpoint; /* the source */
    bool head;                    /* tables are packed, too */
    Item *items;                  /* (nitems), in the order of the files */
    int nitems, nshards, threads;
    size_t numbers[2], bytes[2]; /* of all items: [0] as F16; [1] packed */
    size_t done;                 /* bytes that are written */
    f16 *scratch;                /* (threads, GROUP, largest k), and CHUNK numbers */
    uint8_t *packed;             /* (threads, bytes of the largest row of groups) */
    FILE *file, *progress;       /* the file that is open; NULL: progress is not shown */
    char path[MAX_PATH + 256];   /* that file's */
    Error *err;                  /* filled when something fails */
} Copy;

// -------------------------------------------------------------------------------------------------
// The layout of the copy
// -------------------------------------------------------------------------------------------------

/* Adds a tensor to the items. */
static void add_item(Copy *copy, const Part *part) {
    const Tensor *t = part->tensor;
    bool packed = part->matrix || (part->table && copy->head);
    Item item = {t, part->layer, part->vector, packed, .rows = t->rows, .cols = t->cols};
    item.order =
        part->layer < 0 ? copy->nitems : (part->layer + 1) * 2 * NROLES + role_place(part->role);
    if (item.packed) {
        item.rows = ceil_div(item.rows, GROUP);
        item.cols *= GROUP_BYTES;
    }
    item.bytes = item.rows * item.cols * (item.packed ? 1 : sizeof(f16));
    copy->items[copy->nitems++] = item;
    copy->numbers[item.packed] += (size_t)t->rows * t->cols;
    copy->bytes[item.packed] += item.bytes;
}

/* Returns the largest power of two, up to ALIGN, that divides the item's size in bytes. */
static int roundness(const Item *item) {
    size_t bit = item->bytes & -item->bytes;
    return size_min(bit, ALIGN);
}

static int compare_items(const void *a, const void *b) {
    const Item *x = a, *y = b;
    int shard = x->shard - y->shard, round = roundness(y) - roundness(x);
    if (shard)
        return shard;
    return round ? round : x->order - y->order;
}

/* Makes the items, and gives each its shard and its place there. A layer stays together: the next
 * shard begins with it if this one would grow too large. */
static void lay_out(Copy *copy, Bytes shard_bytes) {
    int count = part_count(&copy->checkpoint->config);
    Item *items = copy->items = xcalloc(count, sizeof *items);
    size_t size = 0;
    for (int t = 0; t < count; t++) {
        Part part = checkpoint_part(copy->checkpoint, t);
        if (part.tensor->rows)
            add_item(copy, &part);
    }
    for (int first = 0, end = 0; first < copy->nitems; first = end) {
        size_t bytes = 0;
        while (end < copy->nitems && items[end].layer == items[first].layer)
            bytes += items[end++].bytes;
        if (!first || size + bytes > shard_bytes) {
            copy->nshards++;
            size = 0;
        }
        size += bytes;
        for (int i = first; i < end; i++)
            items[i].shard = copy->nshards - 1;
    }
    qsort(items, copy->nitems, sizeof *items, compare_items);
    for (int i = 1; i < copy->nitems; i++)
        if (items[i].shard == items[i - 1].shard)
            items[i].begin = items[i - 1].begin + items[i - 1].bytes;
}

static void shard_name(char name[48], const Copy *copy, int shard) {
    if (copy->nshards == 1)
        snprintf(name, 48, "model.safetensors");
    else
        snprintf(name, 48, "model-%05d-of-%05d.safetensors", shard + 1, copy->nshards);
}

// -------------------------------------------------------------------------------------------------
// Files
// -------------------------------------------------------------------------------------------------

/* Reports that the file that is open could not be written. Returns -1. */
static int cannot_write(const Copy *copy) {
    return fail(copy->err, EXIT_FAILED, "%s: %s; make room or write elsewhere", copy->path,
                strerror(errno));
}

/* Opens a new file of the copy. */
static int begin_file(Copy *copy, const char *name) {
    snprintf(copy->path, sizeof copy->path, "%s/%s", unfinished_name(), name);
    copy->file = fopen(copy->path, "wxe");
    return copy->file ? 0 : cannot_write(copy);
}

static int write_bytes(const Copy *copy, const void *bytes, size_t size) {
    if (__atomic_load_n(stop_signal(), __ATOMIC_RELAXED))
        return stop_fail(copy->err, "; there is no copy");
    return fwrite(bytes, 1, size, copy->file) == size ? 0 : cannot_write(copy);
}

/* Closes the file. If all went well so far (status 0), first syncs it to the disk. */
static int end_file(const Copy *copy, int status) {
    if (!status && (fflush(copy->file) || fsync(fileno(copy->file))))
        status = cannot_write(copy);
    return fclose(copy->file) && !status ? cannot_write(copy) : status;
}

static int write_whole(Copy *copy, const char *name, const void *bytes, size_t size) {
    if (begin_file(copy, name))
        return -1;
    return end_file(copy, write_bytes(copy, bytes, size));
}

/* Returns true if a file belongs into the copy: the configuration and the tokenizer's files, and
 * other small ones unless they are links, which could lead out of the model. If that cannot be
 * found out, reading the file will say why. Leaves out an index, since it lists the source's
 * shards. */
static bool is_copied(const char *path, const char *name) {
    struct stat st;
    if (is_model_text(name))
        return true;
    return (!fnmatch("*.json", name, 0) || !fnmatch("*.txt", name, 0)) &&
           fnmatch("*.index.json", name, 0) && (lstat(path, &st) || S_ISREG(st.st_mode));
}

/* Copies the other files of a model's directory. */
static int copy_small_files(Copy *copy, const char *from) {
    char path[MAX_PATH + 256];
    size_t len;
    int status = 0;
    DIR *d = opendir(from);
    if (!d)
        return fail(copy->err, EXIT_FAILED, "%s: %s", from, strerror(errno));
    for (const struct dirent *e; !status && (errno = 0, e = readdir(d));) {
        const char *name = e->d_name;
        snprintf(path, sizeof path, "%s/%s", from, name);
        if (!is_copied(path, name))
            continue;
        /* A dangling link, or a file above SMALL_FILE, is an error: the copy would lack it. */
        char *text = file_read(path, SMALL_FILE, &len, copy->err);
        status = text ? write_whole(copy, name, text, len) : -1;
        free(text);
    }
    if (!status && errno)
        status = fail(copy->err, EXIT_FAILED, "%s: read error: %s", from, strerror(errno));
    closedir(d);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Shards
// -------------------------------------------------------------------------------------------------

/* Writes an item's entry in the header of its shard: its dtype, shape and place. */
static void write_entry(FILE *out, const Copy *copy, const Item *item) {
    char name[100];
    fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[",
            checkpoint_name(name, copy->checkpoint, item->from), item->packed ? "U8" : "F16");
    if (!item->vector)
        fprintf(out, "%d,", item->rows);
    fprintf(out, "%zu],\"data_offsets\":[%zu,%zu]}", item->cols, item->begin,
            item->begin + item->bytes);
}

/* Writes a shard's length and header, padded with spaces to where the data begins. */
static int write_header(const Copy *copy, int shard) {
    Text header = {0};
    FILE *out = text_stream(&header);
    fprintf(out, "{\"__metadata__\":{\"format\":\"" PACKED_FORMAT
                 "\",\"flexgen.bits\":\"4\",\"flexgen.group\":\"64\"}");
    for (int i = 0; i < copy->nitems; i++)
        if (copy->items[i].shard == shard)
            write_entry(out, copy, &copy->items[i]);
    putc('}', out);
    fclose(out);
    uint64_t size = (8 + header.len + ALIGN - 1) / ALIGN * ALIGN - 8, length = size;
    int status = write_bytes(copy, &length, sizeof length);
    if (!status && fprintf(copy->file, "%-*.*s", (int)size, (int)header.len, header.text) < 0)
        status = cannot_write(copy);
    free(header.text);
    return status;
}

/* Rows of groups that the threads pack in parallel. */
typedef struct {
    const Copy *copy;
    const Item *item;
    int first;  /* the first row of groups */
    Error *why; /* (threads), with a code where packing failed */
} Rows;

/* Packs rows of groups first .. first + n - 1 of `rows`, as one thread's share. */
static void pack_row_groups(const void *rows, int first, int n) {
    const Rows *r = rows;
    const Copy *copy = r->copy;
    const Tensor *from = r->item->from;
    for (int i = first; i < first + n; i++)
        checkpoint_pack(copy->checkpoint, copy->packed + i * r->item->cols,
                        copy->scratch + (size_t)i * GROUP * from->cols, from, r->first + i,
                        &r->why[i]);
}

/* Writes a packed matrix: packs one row of groups on each thread, writes these, and goes on with
 * the next rows. */
static int write_packed(const Copy *copy, const Item *item) {
    for (int first = 0; first < item->rows; first += copy->threads) {
        int n = imin(copy->threads, item->rows - first);
        Error why[MOST_THREADS] = {0};
        host_share((double)n * GROUP * item->from->cols, n, pack_row_groups,
                   &(Rows){copy, item, first, why});
        for (int i = 0; i < n; i++)
            if (why[i].code) {
                *copy->err = why[i];
                return -1;
            }
        if (write_bytes(copy, copy->packed, n * item->cols))
            return -1;
    }
    return 0;
}

static int write_f16(const Copy *copy, const Item *item) {
    const Tensor *t = item->from;
    size_t count = item->bytes / sizeof(f16);
    for (size_t first = 0, n; first < count; first += n) {
        n = size_min(count - first, CHUNK);
        if (checkpoint_fill(copy->checkpoint, copy->scratch, t, first, n, copy->err) ||
            checkpoint_finite(copy->checkpoint, copy->scratch, t, first, n, copy->err) ||
            write_bytes(copy, copy->scratch, n * sizeof *copy->scratch))
            return -1;
    }
    return 0;
}

static int write_shard(Copy *copy, int shard) {
    char name[48];
    shard_name(name, copy, shard);
    if (begin_file(copy, name))
        return -1;
    int status = write_header(copy, shard);
    for (int i = 0; i < copy->nitems && !status; i++) {
        const Item *item = &copy->items[i];
        if (item->shard != shard)
            continue;
        if (copy->progress)
            fprintf(copy->progress, "\r\033[K%.2f of %.2f GB, %s", copy->done / 1e9,
                    (copy->bytes[0] + copy->bytes[1]) / 1e9, name);
        status = item->packed ? write_packed(copy, item) : write_f16(copy, item);
        copy->done += item->bytes;
    }
    return end_file(copy, status);
}

static int write_index(Copy *copy) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(json, "metadata"), "total_size", copy->done);
    cJSON *map = cJSON_AddObjectToObject(json, "weight_map");
    for (int i = 0; i < copy->nitems; i++) {
        char name[100], shard[48];
        shard_name(shard, copy, copy->items[i].shard);
        cJSON_AddStringToObject(map, checkpoint_name(name, copy->checkpoint, copy->items[i].from),
                                shard);
    }
    char *text = cJSON_Print(json);
    int status = write_whole(copy, "model.safetensors.index.json", text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(json);
    return status;
}

// -------------------------------------------------------------------------------------------------
// The copy
// -------------------------------------------------------------------------------------------------

/* Writes the whole copy to the unfinished directory. */
static int write_files(Copy *copy, const char *from) {
    const OptConfig *c = &copy->checkpoint->config;
    int k = imax(imax(c->h1, c->h2), c->embed);
    size_t numbers = (size_t)copy->threads * GROUP * k;
    copy->scratch = xcalloc(CHUNK + numbers, sizeof *copy->scratch);
    copy->packed = xcalloc(copy->threads, (size_t)k * GROUP_BYTES);
    int status = copy_small_files(copy, from);
    for (int s = 0; s < copy->nshards && !status; s++)
        status = write_shard(copy, s);
    if (!status)
        status = checkpoint_unchanged(copy->checkpoint, copy->err);
    if (!status && copy->nshards > 1)
        status = write_index(copy);
    if (copy->progress)
        fprintf(copy->progress, "\r\033[K");
    free(copy->scratch);
    free(copy->packed);
    if (!status && name_sync(copy->path)) /* of the last file, and so of all */
        status = cannot_write(copy);
    return status;
}

/* Makes the copy beside output and renames it. An empty directory at output is removed first, so
 * that one that cannot be removed (a mount point) is found before the work begins. It is made again
 * if the work fails. */
static int write_beside(Copy *copy, const char *from, const char *output) {
    char place[MAX_PATH];
    struct stat st = {0};
    snprintf(place, sizeof place, "%s", output);
    for (size_t len = strlen(place); len > 1 && place[len - 1] == '/'; len--)
        place[len - 1] = 0;
    int made = unfinished_begin("--output", place, true, copy->err);
    if (made < 0)
        return -1;
    fstat(made, &st); /* it has the mode of the one that is there */
    bool empty = rmdir(output) == 0;
    int status =
        empty || errno == ENOENT
            ? write_files(copy, from)
            : fail(copy->err, EXIT_USAGE, "--output %s: %s; name a new directory or an empty one",
                   output, strerror(errno));
    if (!status && unfinished_end())
        status = cannot_write(copy);
    if (status) {
        unfinished_remove();
        if (empty)
            mkdir(output, st.st_mode & 0777);
    }
    return status;
}

int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Bytes shard_bytes,
                        bool head, FILE *progress, Error *err) {
    Checkpoint *checkpoint = checkpoint_open(dir, err);
    if (!checkpoint)
        return -1;
    checkpoint->digest = checkpoint_digest(checkpoint);
    Copy copy = {.checkpoint = checkpoint,
                 .head = head,
                 .threads = imin(host_threads(), MOST_THREADS),
                 .progress = progress,
                 .err = err};
    int status = -1;
    if (checkpoint->packed)
        fail(err, EXIT_USAGE, "%s: is packed already; name the model that it was made from", dir);
    else if (!checkpoint_packs(checkpoint, head, err)) {
        lay_out(&copy, shard_bytes);
        status = write_beside(&copy, dir, output);
    }
    *stats = (CopyStats){.files = copy.nshards,
                         .untied = checkpoint->untied,
                         .after = copy.done,
                         .bits = 8.0 * copy.done / (copy.numbers[0] + copy.numbers[1]),
                         .packed_bits = 8.0 * copy.bytes[1] / copy.numbers[1]};
    for (int f = 0; f < checkpoint->nfiles; f++)
        stats->before += checkpoint->files[f].size;
    free(copy.items);
    checkpoint_close(checkpoint);
    return status;
}
