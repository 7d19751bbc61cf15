/* file.c: whole files in, and results out.
 *
 * What a user names may be missing, a directory, a pipe without a writer, cut while it is read, or on a full disk; each of
 * these is one line that names the file. "-" is standard input or standard output. Read next: memory.c. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/text.h"

// ---------------------------------------------------------------------------------------------------------------
// Files in
// ---------------------------------------------------------------------------------------------------------------

int file_path(char path[MAX_PATH], const char *dir, const char *name, Error *err) {
    if (snprintf(path, MAX_PATH, "%s/%s", dir, name) < MAX_PATH) return 0;
    return fail(err, EXIT_FAILED, "%.200s...: the path is too long; expected less than %d bytes", dir, MAX_PATH);
}

const char *file_read_at(int fd, void *to, size_t size, size_t offset) {
    for (size_t got = 0; got < size;) {
        ssize_t n = pread(fd, (char *)to + got, size - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return strerror(errno);
        if (n == 0) return "the file became shorter since it was opened; do not change a file in use";
        got += (size_t)n;
    }
    return NULL;
}

/* What is wrong with a file that is to be read as a whole, or 0. */
static int check_whole(int fd, const char *path, size_t max_bytes, size_t *len, Error *err) {
    struct stat st;
    if (fstat(fd, &st) != 0) return fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return fail(err, EXIT_FAILED, "%s: is a %s; expected a regular file", path,
                    S_ISDIR(st.st_mode) ? "directory" : "special file");
    *len = (size_t)st.st_size;
    if (*len <= max_bytes) return 0;
    return fail(err, EXIT_FAILED, "%s: has %zu bytes; expected at most %zu", path, *len, max_bytes);
}

char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err) {
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a pipe without a writer must not hang us */
    if (fd < 0) return fail(err, EXIT_FAILED, "%s: cannot open: %s; check the path", path, strerror(errno)), NULL;
    int status = check_whole(fd, path, max_bytes, len, err);
    if (status == 0) {
        text = xcalloc(*len + 1, 1);
        const char *why = file_read_at(fd, text, *len, 0);
        if (why) status = fail(err, EXIT_FAILED, "%s: read error: %s", path, why);
    }
    close(fd);
    return status == 0 ? text : (free(text), NULL);
}

/* All of standard input, with a 0 after it. */
static char *read_standard_input(size_t *len, Error *err) {
    size_t capacity = 1 << 16, n;
    char *text = xcalloc(capacity, 1);
    errno = 0;
    for (*len = 0; (n = fread(text + *len, 1, capacity - *len - 1, stdin)) > 0;) {
        *len += n;
        if (capacity - *len < 2) text = xrealloc(text, capacity *= 2, 1);
    }
    text[*len] = 0;
    if (!ferror(stdin)) return text;
    fail(err, EXIT_FAILED, "standard input: cannot read: %s; give the prompts as a file or through a pipe",
         strerror(errno));
    free(text);
    return NULL;
}

const char *input_name(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

char *input_read(const char *path, size_t *len, Error *err) {
    return strcmp(path, "-") ? file_read(path, (size_t)1 << 40, len, err) : read_standard_input(len, err);
}

int input_lines(const char *path, int (*take)(void *, const char *, size_t, int, const char *, Error *), void *ctx,
                Error *err) {
    size_t len;
    char *text = input_read(path, &len, err), where[600];
    if (!text) return -1;
    int number = 0, status = 0;
    size_t at = len >= 3 && !memcmp(text, "\xEF\xBB\xBF", 3) ? 3 : 0; /* a byte order mark */
    for (; at < len && !status; number++) {
        const char *line = text + at, *end = memchr(line, '\n', len - at);
        size_t size = end ? (size_t)(end - line) : len - at;
        at += size + 1;
        if (size && line[size - 1] == '\r') size--;
        size_t blank = 0;
        while (blank < size && (line[blank] == ' ' || line[blank] == '\t')) blank++;
        snprintf(where, sizeof where, "%.500s line %d", input_name(path), number + 1);
        if (blank < size) status = take(ctx, line, size, number, where, err);
    }
    free(text);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// Results out
// ---------------------------------------------------------------------------------------------------------------

FILE *output_open(const char *flag, const char *path, Error *err) {
    FILE *f = strcmp(path, "-") ? fopen(path, "w") : stdout;
    if (!f) fail(err, EXIT_FAILED, "%s %s: %s; name a file that can be written", flag, path, strerror(errno));
    return f;
}

int output_close(FILE *f, const char *flag, const char *path, int status, Error *err) {
    int bad = fflush(f) || ferror(f);
    if (f != stdout && fclose(f)) bad = 1;
    if (status || !bad) return status;
    return fail(err, EXIT_FAILED, "%s %s: %s; make room or write elsewhere", flag, path, strerror(errno));
}
