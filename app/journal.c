/* journal.c: keeps the tokens of a job on disk, so that a job that was killed can be resumed.
 *
 * The first line of the file is a JSON object that identifies the job. After it come records, one
 * for each sweep, with numbers as in memory:
 *
 *     u32  n            number of pairs
 *     n times:
 *         u32  place    index of the prompt
 *         i32  token    its next token
 *     u64  check        hash of the file up to here
 *
 * A record is valid if its check is the hash of the record and of everything before it; so it is
 * valid only after the records after which it was written. An incomplete last record, which a kill
 * or a full disk has left, is not valid, and is cut off. The file is locked as long as it is open:
 * two jobs never share an output, and a lock ends with the process that holds it.
 * Read next: completions.c. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "app/app.h"

struct Journal {
    char path[MAX_PATH];
    int fd;
    bool locked;
    cJSON *head;    /* the first line; NULL if nothing has been written yet */
    size_t end;     /* bytes that are valid */
    uint64_t check; /* the hash of these bytes */
};

/* Fills err with what could not be done, and why (an errno). Returns -1. */
static int journal_fault(const Journal *j, const char *what, int why, Error *err) {
    return fail(err, EXIT_FAILED, "%s: cannot %s: %s", j->path, what, strerror(why));
}

// -------------------------------------------------------------------------------------------------
// Opening and reading
// -------------------------------------------------------------------------------------------------

/* Opens and locks the file. Begins again if the file has no name any more: the job that held the
 * lock removed it at its end, while we waited. */
static int open_locked(Journal *j, double patience, Error *err) {
    struct stat st = {.st_nlink = 0};
    while (!st.st_nlink) {
        if (j->fd >= 0)
            close(j->fd);
        j->locked = false;
        j->fd = open(j->path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (j->fd < 0)
            return fail(
                err, EXIT_FAILED,
                "%s: cannot open: %s; a job keeps its tokens there: write where that can be",
                j->path, strerror(errno));
        if (!file_lock(j->fd, patience))
            return errno == EWOULDBLOCK
                       ? fail(err, EXIT_USAGE, "%s: another job is writing there; wait for its end",
                              j->path)
                       : journal_fault(j, "lock", errno, err);
        j->locked = true;
        if (fstat(j->fd, &st))
            return journal_fault(j, "read", errno, err);
    }
    return 0;
}

/* Reads the first line. A file that ends within it belongs to a job that was killed at its
 * beginning, and counts as empty. */
static int read_head(Journal *j, const char *text, size_t size, Error *err) {
    static const char start[] = "{\"" JOURNAL_VERSION "\"";
    const char *newline = memchr(text, '\n', size);
    const bool begins = !strncmp(text, start, size < strlen(start) ? size : strlen(start));
    if (begins && !newline)
        return 0;
    j->head = begins ? json_parse(text, (size_t)(newline - text), j->path, err) : NULL;
    if (!j->head)
        return fail(err, EXIT_USAGE, "%s: is no journal of this version; move it away", j->path);
    j->end = (size_t)(newline - text) + 1;
    j->check = hash_bytes(HASH_START, text, j->end);
    return 0;
}

/* Reads the next record, hands its tokens to `take`, and moves the valid end behind it. Returns 1,
 * or 0 if there is no valid record, or -1 and fills err. */
static int read_record(Journal *j, const char *text, size_t size, TakeToken *take, void *ctx,
                       Error *err) {
    uint32_t n;
    uint64_t check;
    const size_t left = size - j->end;
    const char *record = text + j->end;
    if (left < sizeof n)
        return 0;
    memcpy(&n, record, sizeof n);
    const size_t pairs = (size_t)n * sizeof(Pair), whole = sizeof n + pairs + sizeof check;
    if (!n || left < whole)
        return 0;
    memcpy(&check, record + sizeof n + pairs, sizeof check);
    const uint64_t hash = hash_bytes(j->check, record, sizeof n + pairs);
    if (check != hash)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        Pair pair;
        memcpy(&pair, record + sizeof n + i * sizeof pair, sizeof pair);
        if (take(ctx, pair.place, pair.token))
            return fail(
                err, EXIT_FAILED,
                "%s: byte %zu: token %d of prompt %u is none of this job's; move the file away",
                j->path, j->end, pair.token, pair.place);
    }
    j->check = hash;
    j->end += whole;
    return 1;
}

/* Returns the whole file, malloc'ed, and its size; or NULL and fills err. */
static char *read_whole(const Journal *j, size_t *size, Error *err) {
    struct stat st;
    if (fstat(j->fd, &st)) {
        journal_fault(j, "read", errno, err);
        return NULL;
    }
    return file_read_part(j->fd, j->path, *size = (size_t)st.st_size, 0, err);
}

Journal *journal_open(const char *output, double patience, Error *err) {
    Journal *j = xcalloc(1, sizeof *j);
    j->fd = -1;
    size_t size;
    char *text = NULL;
    if (!file_beside(j->path, output, ".journal", err) && !open_locked(j, patience, err))
        text = read_whole(j, &size, err);
    const int status = text ? read_head(j, text, size, err) : -1;
    free(text);
    if (!status)
        return j;
    journal_close(j);
    return NULL;
}

const cJSON *journal_head(const Journal *j) { return j->head; }
const char *journal_path(const Journal *j) { return j->path; }

int journal_read(Journal *j, TakeToken *take, void *ctx, Error *err) {
    size_t size;
    int status;
    char *text = read_whole(j, &size, err);
    if (!text)
        return -1;
    while ((status = read_record(j, text, size, take, ctx, err)) > 0)
        continue;
    free(text);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Writing
// -------------------------------------------------------------------------------------------------

/* Appends bytes; if not all can be written, writes none. */
static int append_bytes(Journal *j, const void *bytes, size_t size, Error *err) {
    const char *why = file_write_at(j->fd, bytes, size, j->end);
    if (!why) {
        j->end += size;
        return 0;
    }
    const int unused = ftruncate(j->fd, (off_t)j->end);
    (void)unused; /* if this fails too, the rest is an invalid record */
    return fail(err, EXIT_FAILED, "%s: cannot write: %s; make room", j->path, why);
}

int journal_begin(Journal *j, const cJSON *head, Error *err) {
    if (head) {
        char *text = cJSON_PrintUnformatted(head);
        const size_t size = strlen(text);
        text[size] = '\n'; /* replaces the final 0 */
        cJSON_Delete(j->head);
        j->head = cJSON_Duplicate(head, true);
        j->end = 0;
        j->check = hash_bytes(HASH_START, text, size + 1);
        const int status = ftruncate(j->fd, 0) ? journal_fault(j, "write", errno, err)
                                               : append_bytes(j, text, size + 1, err);
        free(text);
        return status ? -1 : journal_sync(j, err);
    }
    return ftruncate(j->fd, (off_t)j->end) ? journal_fault(j, "write", errno, err) : 0;
}

int journal_append(Journal *j, const Pair *pairs, size_t n, Error *err) {
    const uint32_t count = (uint32_t)n;
    const size_t bytes = n * sizeof *pairs;
    uint8_t *record = xcalloc(sizeof count + bytes + sizeof j->check, 1);
    memcpy(record, &count, sizeof count);
    memcpy(record + sizeof count, pairs, bytes);
    const uint64_t check = hash_bytes(j->check, record, sizeof count + bytes);
    memcpy(record + sizeof count + bytes, &check, sizeof check);
    const int status = append_bytes(j, record, sizeof count + bytes + sizeof check, err);
    if (!status)
        j->check = check;
    free(record);
    return status;
}

int journal_sync(const Journal *j, Error *err) {
    return fdatasync(j->fd) ? journal_fault(j, "write", errno, err) : 0;
}

int journal_remove(const Journal *j, Error *err) {
    struct stat mine, there;
    if (stat(j->path, &there) && errno == ENOENT)
        return 0;
    if (fstat(j->fd, &mine) || stat(j->path, &there))
        return journal_fault(j, "read", errno, err);
    /* Another file, which somebody has put there, is left alone. */
    const bool same = mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
    return same && unlink(j->path) ? journal_fault(j, "remove", errno, err) : 0;
}

void journal_close(Journal *j) {
    struct stat st;
    Error left; /* ignored: an empty file that stays does no harm */
    if (!j)
        return;
    if (j->locked && !j->head && !fstat(j->fd, &st) && !st.st_size)
        journal_remove(j, &left); /* the job never began */
    if (j->fd >= 0)
        close(j->fd);
    cJSON_Delete(j->head);
    free(j);
}
