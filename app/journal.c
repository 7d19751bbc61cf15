/* journal.c: keeps the tokens of a job on disk, so that a job that was killed can be resumed.
 *
 * The first line of the file is a JSON object that identifies the job. After it come records, one
 * for each sweep or for several, with numbers as in memory:
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
 *
 * When the job ends, a file with the first line alone takes the journal's place. Its line also has
 * the number of bytes of the output and their hash, which tell later what job a finished output is
 * of, and if it is still as the job wrote it.
 * Read next: completions.c. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "app/app.h"

/* Fills err with what could not be done, and why, by errno. Returns -1. */
static int journal_fault(const Journal *j, const char *what, Error *err) {
    return fail(err, EXIT_FAILED, "%s: cannot %s: %s", j->path, what, strerror(errno));
}

// -------------------------------------------------------------------------------------------------
// Opening and reading
// -------------------------------------------------------------------------------------------------

/* Opens and locks the file. It has no name any more if the job that held the lock has just ended.
 */
static int open_locked(Journal *j, Error *err) {
    struct stat st;
    j->fd = open(j->path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (j->fd < 0)
        return fail(err, EXIT_FAILED,
                    "%s: cannot open: %s; a job keeps its tokens there: write where that can be",
                    j->path, strerror(errno));
    bool locked = file_lock(j->fd, 0);
    if (!locked && errno != EWOULDBLOCK)
        return journal_fault(j, "lock", err);
    if (fstat(j->fd, &st))
        return journal_fault(j, "read", err);
    if (!locked || !st.st_nlink)
        return fail(err, EXIT_USAGE, "%s: another job is writing there; wait for its end", j->path);
    j->size = st.st_size;
    errno = 0;
    j->identity = file_identity(j->path);
    return errno ? journal_fault(j, "read", err) : 0;
}

/* Reads the first line. A file that ends within it belongs to a job that was killed at its
 * beginning, and counts as empty. */
static int read_head(Journal *j, Error *err) {
    static const char start[] = "{\"" JOURNAL_VERSION "\"";
    const char *newline = memchr(j->text, '\n', j->size);
    bool begins = !strncmp(j->text, start, size_min(j->size, strlen(start)));
    if (begins && !newline)
        return 0;
    if (begins)
        j->head = json_parse(j->text, newline - j->text, err);
    if (!j->head)
        return fail(err, EXIT_USAGE, "%s: is no journal of this version; move it away", j->path);
    j->end = newline - j->text + 1;
    j->check = hash_bytes(HASH_START, j->text, j->end);
    return 0;
}

Journal *journal_open(const char *output, Error *err) {
    Journal *j = xcalloc(1, sizeof *j);
    j->fd = -1;
    if (!file_beside(j->path, output, ".journal", err) && !open_locked(j, err))
        j->text = file_read_part(j->fd, j->path, j->size, 0, err);
    if (j->text && !read_head(j, err))
        return j;
    journal_close(j);
    return NULL;
}

/* Returns the bytes of the record behind the valid end, without its check, and sets *check. Returns
 * 0 if there is no valid record. */
static size_t next_record(const Journal *j, uint64_t *check) {
    uint32_t n;
    uint64_t there;
    const char *record = j->text + j->end;
    size_t left = j->size - j->end;
    if (left < sizeof n)
        return 0;
    memcpy(&n, record, sizeof n);
    size_t bytes = sizeof n + n * sizeof(Pair);
    if (!n || left < bytes + sizeof there)
        return 0;
    memcpy(&there, record + bytes, sizeof there);
    *check = hash_bytes(j->check, record, bytes);
    return there == *check ? bytes : 0;
}

int journal_read(Journal *j, TakeToken *take, void *ctx, Error *err) {
    uint64_t check;
    for (size_t bytes; (bytes = next_record(j, &check));) {
        for (size_t at = sizeof(uint32_t); at < bytes; at += sizeof(Pair)) {
            Pair pair;
            memcpy(&pair, j->text + j->end + at, sizeof pair);
            if (take(ctx, pair))
                return fail(err, EXIT_FAILED,
                            "%s: byte %zu: token %d of prompt %u is none of this job's; move the "
                            "file away",
                            j->path, j->end, pair.token, pair.place);
        }
        j->check = check;
        j->end += bytes + sizeof check;
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Writing
// -------------------------------------------------------------------------------------------------

/* Appends bytes. If a disk is full, a part of them may stay: it is no valid record. */
static int append_bytes(Journal *j, const void *bytes, size_t size, Error *err) {
    const char *why = file_write_at(j->fd, bytes, size, j->end);
    j->end += size;
    return why ? fail(err, EXIT_FAILED, "%s: cannot write: %s; make room", j->path, why) : 0;
}

int journal_begin(Journal *j, const cJSON *head, Error *err) {
    size_t size = j->end;
    if (head) {
        cJSON_Delete(j->head);
        j->head = cJSON_Duplicate(head, true);
        free(j->text);
        j->text = cJSON_PrintUnformatted(head);
        size = strlen(j->text);
        j->text[size++] = '\n'; /* replaces the final 0 */
        j->check = hash_bytes(HASH_START, j->text, size);
    }
    if (ftruncate(j->fd, head ? 0 : size))
        return journal_fault(j, "write", err);
    /* What was read is written again: if a sync failed, it may be in memory only, and no later sync
     * would say so. */
    j->end = 0;
    int status = append_bytes(j, j->text, size, err);
    free(j->text);
    j->text = NULL;
    if (status || journal_sync(j, err))
        return -1;
    return name_sync(j->path) ? journal_fault(j, "sync", err) : 0; /* and the output's name */
}

int journal_append(Journal *j, const Pair *pairs, size_t n, Error *err) {
    uint32_t count = n;
    Text record = {0};
    FILE *out = text_stream(&record);
    j->check = hash_bytes(hash_bytes(j->check, &count, sizeof count), pairs, n * sizeof *pairs);
    fwrite(&count, sizeof count, 1, out);
    fwrite(pairs, sizeof *pairs, n, out);
    fwrite(&j->check, sizeof j->check, 1, out);
    fclose(out);
    int status = append_bytes(j, record.text, record.len, err);
    free(record.text);
    return status;
}

int journal_sync(const Journal *j, Error *err) {
    return file_sync(j->fd) ? journal_fault(j, "write", err) : 0;
}

/* Returns true if the file still has its name. Another one, which somebody has put there, is left
 * alone. */
static bool is_there(const Journal *j) { return file_identity(j->path) == j->identity; }

int journal_end(Journal *j, const char *state, Error *err) {
    errno = 0;
    if (!is_there(j)) /* it was removed, or cannot be looked at */
        return errno && errno != ENOENT
                   ? fail(err, EXIT_FAILED, "%s: cannot be ended: %s; --resume ends it", j->path,
                          strerror(errno))
                   : 0;
    FILE *out = output_open("--output", j->path, err);
    if (!out)
        return -1;
    cJSON_AddStringToObject(j->head, JOURNAL_ENDED, state);
    char *line = cJSON_PrintUnformatted(j->head);
    fprintf(out, "%s\n", line);
    free(line);
    return output_close(out, "--output", j->path, err);
}

void journal_close(Journal *j) {
    if (!j)
        return;
    if (!lseek(j->fd, 0, SEEK_END) && is_there(j))
        unlink(j->path); /* the job never began; an empty file that stays does no harm */
    if (j->fd >= 0)
        close(j->fd);
    cJSON_Delete(j->head);
    free(j->text);
    free(j);
}
