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
 *     all others                        dtype F16: biases, layernorms, embeddings, projections,
 *                                       a separate head
 *
 * Row g of a packed matrix is the result of quant_pack_rows for rows [64 g, 64 (g + 1)); quant.h
 * describes the layout of a group. A layer is never split between shards. The data begins at a
 * multiple of 64 bytes and has no holes. Tensors whose sizes are multiples of 64 come first, then
 * multiples of 32, and so on, so that each tensor begins at as round a byte as its size is.
 *
 * Contract: each thread buffers only one row of groups, however large the model is. The copy is
 * made beside its place, as OUTPUT.tmp-PID, synced, and renamed when it is complete; on any failure
 * it is removed.
 * Read next: job.c. */
#include <cjson/cJSON.h>
#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "app/app.h"

/* Bytes to which data is aligned; numbers that are converted at once; threads; bytes of a small
 * file at most; bytes of a path. */
enum { ALIGN = 64, CHUNK = 1 << 20, MOST_THREADS = 8, SMALL_FILE = 100 << 20, PATH_SIZE = 4096 };

/* One tensor of the copy. */
typedef struct {
    const Tensor *from;        /* the source's tensor */
    bool vector, packed;       /* it has one dimension; it is packed */
    int order, shard, rows;    /* rank within its shard; rows, or rows of groups if packed */
    size_t cols, bytes, begin; /* begin: its first byte in the data of its shard */
} Item;

/* A copy that is being made. */
typedef struct {
    const Checkpoint *checkpoint; /* the source */
    Item *items;                  /* (nitems), in the order of the files */
    int nitems, nshards, threads;
    char dir[PATH_SIZE]; /* the directory where it is made */
    f16 *scratch;        /* (threads, GROUP, largest k), and at least CHUNK numbers */
    uint8_t *packed;     /* (threads, bytes of the largest row of groups) */
    size_t done, total;  /* bytes of tensors that are written, and of all */
    FILE *progress;      /* NULL: progress is not shown */
} Copy;

// -------------------------------------------------------------------------------------------------
// The layout of the copy
// -------------------------------------------------------------------------------------------------

/* Adds a tensor to the items. */
static void add_item(Copy *copy, const Part *part) {
    const Tensor *t = part->tensor;
    Item item = {t, part->vector, part->matrix, .rows = t->rows, .cols = (size_t)t->cols};
    item.order = part->layer < 0 ? copy->nitems
                                 : (part->layer + 1) * 2 * NROLES + role_place((Role)part->role);
    if (item.packed) {
        item.rows /= GROUP;
        item.cols *= GROUP_BYTES;
    }
    item.bytes = item.rows * item.cols * (item.packed ? 1 : sizeof(f16));
    copy->items[copy->nitems++] = item;
    copy->total += item.bytes;
}

/* Adds the items from `first` on, which must stay together, to the current shard, of *size bytes so
 * far; or begins the next shard if this one would grow too large. */
static void add_to_shard(Copy *copy, size_t *size, int first, Bytes shard_bytes) {
    size_t bytes = 0;
    for (int i = first; i < copy->nitems; i++)
        bytes += copy->items[i].bytes;
    if (copy->nshards == 0 || *size + bytes > shard_bytes) {
        copy->nshards++;
        *size = 0;
    }
    for (int i = first; i < copy->nitems; i++)
        copy->items[i].shard = copy->nshards - 1;
    *size += bytes;
}

/* Returns the largest power of two, up to ALIGN, that divides the item's size in bytes. */
static size_t roundness(const Item *item) {
    size_t bit = item->bytes & -item->bytes;
    return bit < ALIGN ? bit : ALIGN;
}

static int compare_items(const void *a, const void *b) {
    const Item *x = (const Item *)a, *y = (const Item *)b;
    if (x->shard != y->shard)
        return x->shard - y->shard;
    if (roundness(x) != roundness(y))
        return roundness(x) > roundness(y) ? -1 : 1;
    return x->order - y->order;
}

/* Makes the items, and gives each its shard and its place there. */
static void lay_out(Copy *copy, Bytes shard_bytes) {
    const Checkpoint *c = copy->checkpoint;
    const int count = part_count(&c->config);
    size_t size = 0, begin = 0;
    copy->items = xcalloc(count, sizeof *copy->items);
    for (int t = 0, first = 0; t < count; t++) {
        const Part part = checkpoint_part(c, t);
        if (part.tensor->rows)
            add_item(copy, &part);
        if (t + 1 < count && checkpoint_part(c, t + 1).layer == part.layer)
            continue;
        add_to_shard(copy, &size, first, shard_bytes);
        first = copy->nitems;
    }
    qsort(copy->items, copy->nitems, sizeof *copy->items, compare_items);
    for (int i = 0; i < copy->nitems; i++) {
        if (i && copy->items[i].shard > copy->items[i - 1].shard)
            begin = 0;
        copy->items[i].begin = begin;
        begin += copy->items[i].bytes;
    }
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

/* A file of the copy that is open for writing. */
typedef struct {
    FILE *file;
    char path[PATH_SIZE + 256];
} Out;

static int cannot_write(const char *path, Error *err) {
    return fail(err, EXIT_FAILED, "%s: %s; make room or write elsewhere", path, strerror(errno));
}

static int out_open(Out *out, const Copy *copy, const char *name, Error *err) {
    snprintf(out->path, sizeof out->path, "%s/%s", copy->dir, name);
    out->file = fopen(out->path, "wxe");
    return out->file ? 0 : cannot_write(out->path, err);
}

static int out_write(const Out *out, const void *bytes, size_t size, Error *err) {
    if (__atomic_load_n(stop_signal(), __ATOMIC_RELAXED))
        return stop_fail(err, "; there is no copy");
    return fwrite(bytes, 1, size, out->file) == size ? 0 : cannot_write(out->path, err);
}

/* Closes a file. If all went well so far (status 0), first syncs it to the disk. */
static int out_close(const Out *out, int status, Error *err) {
    if (!status && (fflush(out->file) || fsync(fileno(out->file))))
        status = cannot_write(out->path, err);
    if (fclose(out->file) && !status)
        status = cannot_write(out->path, err);
    return status;
}

static int write_whole(const Copy *copy, const char *name, const void *bytes, size_t size,
                       Error *err) {
    Out out;
    if (out_open(&out, copy, name, err))
        return -1;
    return out_close(&out, out_write(&out, bytes, size, err), err);
}

/* Syncs a directory, where the file system supports this. */
static int sync_directory(const char *path, Error *err) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC),
        bad = fd < 0 || (fsync(fd) && errno != EINVAL);
    if (bad)
        cannot_write(path, err);
    if (fd >= 0)
        close(fd);
    return -bad;
}

/* Copies the other files of a model's directory: its configuration and the tokenizer's files.
 * Leaves out an index, since it lists the source's shards. */
static int copy_small_files(const Copy *copy, const char *from, Error *err) {
    char path[PATH_SIZE + 256];
    struct stat st;
    int status = 0;
    DIR *d = opendir(from);
    if (!d)
        return fail(err, EXIT_FAILED, "%s: %s", from, strerror(errno));
    for (const struct dirent *e; !status && (errno = 0, e = readdir(d));) {
        bool other = fnmatch("*.json", e->d_name, 0) && fnmatch("*.txt", e->d_name, 0);
        if (other || !fnmatch("*.index.json", e->d_name, 0))
            continue;
        snprintf(path, sizeof path, "%s/%s", from, e->d_name);
        if (!stat(path, &st) && S_ISDIR(st.st_mode))
            continue;
        size_t len;
        /* A dangling link, or a file above SMALL_FILE, is an error: the copy would lack it. */
        char *text = file_read(path, SMALL_FILE, &len, err);
        status = text ? write_whole(copy, e->d_name, text, len, err) : -1;
        free(text);
    }
    if (!status && errno)
        status = fail(err, EXIT_FAILED, "%s: read error: %s", from, strerror(errno));
    closedir(d);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Shards
// -------------------------------------------------------------------------------------------------

/* Adds an item to a shard's header: its dtype, shape and place. */
static void add_item_json(cJSON *header, const Copy *copy, const Item *item) {
    char name[100];
    cJSON *json =
        cJSON_AddObjectToObject(header, checkpoint_name(name, copy->checkpoint, item->from));
    cJSON_AddStringToObject(json, "dtype", item->packed ? "U8" : "F16");
    cJSON *shape = cJSON_AddArrayToObject(json, "shape"),
          *offsets = cJSON_AddArrayToObject(json, "data_offsets");
    if (!item->vector)
        cJSON_AddItemToArray(shape, cJSON_CreateNumber(item->rows));
    cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)item->cols));
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)item->begin));
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(item->begin + item->bytes)));
}

/* Writes a shard's length and header, padded with spaces to where the data begins. */
static int write_header(const Copy *copy, int shard, const Out *out, Error *err) {
    cJSON *header = cJSON_CreateObject(),
          *metadata = cJSON_AddObjectToObject(header, "__metadata__");
    cJSON_AddStringToObject(metadata, "format", PACKED_FORMAT);
    cJSON_AddStringToObject(metadata, "flexgen.bits", "4");
    cJSON_AddStringToObject(metadata, "flexgen.group", "64");
    for (int i = 0; i < copy->nitems; i++)
        if (copy->items[i].shard == shard)
            add_item_json(header, copy, &copy->items[i]);
    char *json = cJSON_PrintUnformatted(header);
    const uint64_t size = (8 + strlen(json) + ALIGN - 1) / ALIGN * ALIGN - 8,
                   length = htole64(size);
    int status = out_write(out, &length, sizeof length, err);
    if (!status && fprintf(out->file, "%-*s", (int)size, json) < 0)
        status = cannot_write(out->path, err);
    cJSON_free(json);
    cJSON_Delete(header);
    return status;
}

/* Rows of groups that the threads pack in parallel. */
typedef struct {
    const Copy *copy;
    const Item *item;
    int first;   /* the first row of groups */
    int *failed; /* (threads), nonzero where packing failed */
    Error *why;  /* (threads) */
} Rows;

/* Packs rows of groups first .. first + n - 1 of `rows`, as one thread's share. */
static void pack_row_groups(const void *rows, int first, int n) {
    const Rows *r = rows;
    const Copy *copy = r->copy;
    const size_t numbers = (size_t)GROUP * r->item->from->cols, bytes = r->item->cols;
    for (int i = first; i < first + n; i++)
        r->failed[i] =
            checkpoint_pack(copy->checkpoint, copy->packed + i * bytes, copy->scratch + i * numbers,
                            r->item->from, r->first + i, &r->why[i]);
}

/* Writes a packed matrix: packs one row of groups on each thread, writes these, and goes on with
 * the next rows. */
static int write_packed(const Copy *copy, const Item *item, const Out *out, Error *err) {
    const size_t numbers = (size_t)GROUP * item->from->cols, bytes = item->cols;
    for (int first = 0; first < item->rows; first += copy->threads) {
        const int n = imin(copy->threads, item->rows - first);
        int failed[MOST_THREADS];
        Error why[MOST_THREADS];
        host_share((double)n * numbers, n, pack_row_groups,
                   &(Rows){copy, item, first, failed, why});
        for (int i = 0; i < n; i++)
            if (failed[i]) {
                *err = why[i];
                return -1;
            }
        if (out_write(out, copy->packed, n * bytes, err))
            return -1;
    }
    return 0;
}

static int write_f16(const Copy *copy, const Item *item, const Out *out, Error *err) {
    const Tensor *t = item->from;
    const size_t count = item->bytes / sizeof(f16);
    for (size_t first = 0, n; first < count; first += n) {
        n = count - first < CHUNK ? count - first : CHUNK;
        if (checkpoint_fill(copy->checkpoint, copy->scratch, t, first, n, err) ||
            checkpoint_finite(copy->checkpoint, copy->scratch, t, first, n, err) ||
            out_write(out, copy->scratch, n * sizeof *copy->scratch, err))
            return -1;
    }
    return 0;
}

static int write_shard(Copy *copy, int shard, Error *err) {
    char name[48];
    Out out;
    shard_name(name, copy, shard);
    if (out_open(&out, copy, name, err))
        return -1;
    int status = write_header(copy, shard, &out, err);
    for (int i = 0; i < copy->nitems && !status; i++) {
        const Item *item = &copy->items[i];
        if (item->shard != shard)
            continue;
        if (copy->progress)
            fprintf(copy->progress, "\r\033[K%.2f of %.2f GB, %s", copy->done / 1e9,
                    copy->total / 1e9, name);
        status =
            item->packed ? write_packed(copy, item, &out, err) : write_f16(copy, item, &out, err);
        copy->done += item->bytes;
    }
    return out_close(&out, status, err);
}

static int write_index(const Copy *copy, Error *err) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddNumberToObject(cJSON_AddObjectToObject(json, "metadata"), "total_size",
                            (double)copy->total);
    cJSON *map = cJSON_AddObjectToObject(json, "weight_map");
    for (int i = 0; i < copy->nitems; i++) {
        char name[100], shard[48];
        shard_name(shard, copy, copy->items[i].shard);
        cJSON_AddStringToObject(map, checkpoint_name(name, copy->checkpoint, copy->items[i].from),
                                shard);
    }
    char *text = cJSON_Print(json);
    int status = write_whole(copy, "model.safetensors.index.json", text, strlen(text), err);
    cJSON_free(text);
    cJSON_Delete(json);
    return status;
}

// -------------------------------------------------------------------------------------------------
// The copy
// -------------------------------------------------------------------------------------------------

/* Writes the whole copy to copy->dir. */
static int write_files(Copy *copy, const char *from, Error *err) {
    const int k = imax(copy->checkpoint->config.h1, copy->checkpoint->config.h2);
    const size_t numbers = (size_t)copy->threads * GROUP * k;
    copy->scratch = xcalloc(numbers > CHUNK ? numbers : CHUNK, sizeof *copy->scratch);
    copy->packed = xcalloc(copy->threads, (size_t)k * GROUP_BYTES);
    int status = copy_small_files(copy, from, err);
    for (int s = 0; s < copy->nshards && !status; s++)
        status = write_shard(copy, s, err);
    if (!status)
        status = checkpoint_unchanged(copy->checkpoint, err);
    if (!status && copy->nshards > 1)
        status = write_index(copy, err);
    if (copy->progress)
        fprintf(copy->progress, "\r\033[K");
    free(copy->scratch);
    free(copy->packed);
    return status ? -1 : sync_directory(copy->dir, err);
}

/* Makes the copy beside output and renames it. An empty directory at output is removed first, so
 * that one that cannot be removed (a mount point) is found before the work begins. It is made again
 * if the work fails. */
static int write_beside(Copy *copy, const char *from, const char *output, Error *err) {
    char place[PATH_SIZE];
    int len = (int)strlen(output);
    while (len > 1 && output[len - 1] == '/')
        len--;
    if (len > PATH_SIZE - 40)
        return fail(err, EXIT_USAGE, "--output: the path is too long; expected a shorter one");
    snprintf(place, sizeof place, "%.*s", len, output);
    Error inner;
    if (unfinished_begin(place, true, &inner) < 0)
        return fail(err, inner.code, "--output %.400s: %.500s", output, inner.text);
    snprintf(copy->dir, sizeof copy->dir, "%s", unfinished_name());
    bool empty = rmdir(output) == 0;
    int status = 0;
    if (!empty && errno != ENOENT)
        status = fail(err, EXIT_USAGE, "--output %s: %s; name a new directory or an empty one",
                      output, strerror(errno));
    if (!status)
        status = write_files(copy, from, err);
    if (!status)
        status = unfinished_end(place, err);
    if (status) {
        unfinished_remove();
        if (empty)
            mkdir(output, 0777);
        return -1;
    }
    Error ignored; /* the copy is complete and in its place */
    snprintf(copy->dir, sizeof copy->dir, "%.*s/..", len, output);
    sync_directory(copy->dir, &ignored);
    return 0;
}

static void sum_up(CopyStats *stats, const Copy *copy) {
    size_t numbers[2] = {0}, bytes[2] = {0}; /* [0]: of F16 tensors; [1]: of packed ones */
    *stats = (CopyStats){
        .files = copy->nshards, .untied = copy->checkpoint->untied, .after = copy->total};
    for (int f = 0; f < copy->checkpoint->nfiles; f++)
        stats->before += copy->checkpoint->files[f].size;
    for (int i = 0; i < copy->nitems; i++) {
        const Item *item = &copy->items[i];
        numbers[item->packed] += (size_t)item->from->rows * item->from->cols;
        bytes[item->packed] += item->bytes;
    }
    stats->bits = 8.0 * copy->total / (numbers[0] + numbers[1]);
    stats->packed_bits = 8.0 * bytes[1] / numbers[1];
}

int checkpoint_quantize(CopyStats *stats, const char *dir, const char *output, Bytes shard_bytes,
                        FILE *progress, Error *err) {
    Checkpoint *checkpoint = checkpoint_open(dir, err);
    if (!checkpoint)
        return -1;
    Copy copy = {.checkpoint = checkpoint,
                 .threads = imin(host_threads(), MOST_THREADS),
                 .progress = progress};
    int status = -1;
    if (checkpoint->packed)
        fail(err, EXIT_USAGE, "%s: is packed already; name the model that it was made from", dir);
    else if (!checkpoint_packs(checkpoint, err)) {
        lay_out(&copy, shard_bytes);
        status = write_beside(&copy, dir, output, err);
        sum_up(stats, &copy);
    }
    free(copy.items);
    checkpoint_close(checkpoint);
    return status;
}
