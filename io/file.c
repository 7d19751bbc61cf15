/* file.c: reads input files, whole or line by line, and writes result files safely.
 *
 * A file that the user names may be missing, a directory, a pipe without a writer, cut while it is
 * read, or on a full disk. For each of these the user gets one line that names the file. "-" is
 * standard input or standard output. A file of results is replaced only when the new one is
 * complete, which until then has a name that proves whose it is (io.h, unfinished_begin). A file
 * that this program has not made is never removed.
 * Read next: json.c. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// Input files
// -------------------------------------------------------------------------------------------------

/* Refuses a path that was cut to MAX_PATH: `length` is what it would have been. */
static int check_length(int length, const char *path, Error *err) {
    if (length < MAX_PATH)
        return 0;
    return fail(err, EXIT_FAILED, "%.200s...: the path is too long; expected less than %d bytes",
                path, MAX_PATH);
}

int file_path(char path[MAX_PATH], const char *dir, const char *name, Error *err) {
    return check_length(snprintf(path, MAX_PATH, "%s/%s", dir, name), dir, err);
}

void program_file(char path[MAX_PATH], const char *suffix) {
    strcpy(path + program_path(path, MAX_PATH - strlen(suffix) - 1), suffix);
}

const char *directory_fault(const char *path) {
    struct stat st;
    if (stat(path, &st))
        return errno == ENOENT ? "there is no such directory" : strerror(errno);
    return S_ISDIR(st.st_mode) ? NULL : "is no directory";
}

const char *file_read_at(int fd, void *to, size_t size, size_t offset) {
    for (size_t got = 0; got < size;) {
        ssize_t n = pread(fd, (char *)to + got, size - got, offset + got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return strerror(errno);
        if (n == 0)
            return "the file became shorter since it was opened; do not change a file in use";
        got += n;
    }
    return NULL;
}

int input_fits(const char *name, size_t bytes, Error *err) {
    enum { SMALL = 1 << 20 }; /* bytes that are worth no look */
    size_t left = bytes < SMALL ? bytes : process_allowance("", 0).memory;
    if (bytes <= left)
        return 0;
    return fail(err, EXIT_USAGE,
                "%s needs %zu MiB more of memory, and this process may have %zu MiB; split it, or "
                "allow more memory",
                name, bytes >> 20, left >> 20);
}

char *file_read_part(int fd, const char *name, size_t size, size_t offset, Error *err) {
    if (input_fits(name, size, err))
        return NULL;
    char *text = xcalloc(size + 1, 1);
    const char *why = file_read_at(fd, text, size, offset);
    if (!why)
        return text;
    fail(err, EXIT_FAILED, "%s: read error: %s", name, why);
    free(text);
    return NULL;
}

const char *file_write_at(int fd, const void *from, size_t size, size_t offset) {
    for (size_t put = 0; put < size;) {
        ssize_t n = pwrite(fd, (const char *)from + put, size - put, offset + put);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return strerror(n ? errno : ENOSPC);
        put += n;
    }
    return NULL;
}

int file_open(const char *path, struct stat *st, Error *err) {
    /* O_NONBLOCK: opening a pipe without a writer must not hang the program. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return fail(err, EXIT_FAILED, "%s: cannot open: %s; check the path", path, strerror(errno));
    if (fstat(fd, st))
        fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    else if (!S_ISREG(st->st_mode))
        fail(err, EXIT_FAILED, "%s: is a %s; expected a regular file", path,
             S_ISDIR(st->st_mode) ? "directory" : "special file");
    else
        return fd;
    close(fd);
    return -1;
}

char *file_read(const char *path, size_t max_bytes, size_t *len, Error *err) {
    struct stat st;
    int fd = file_open(path, &st, err);
    if (fd < 0)
        return NULL;
    char *text = NULL;
    *len = st.st_size;
    if (*len > max_bytes)
        fail(err, EXIT_FAILED, "%s: has %zu bytes; expected at most %zu", path, *len, max_bytes);
    else
        text = file_read_part(fd, path, *len, 0, err);
    close(fd);
    return text;
}

const char *input_name(const char *path) { return strcmp(path, "-") ? path : "standard input"; }

int lines_open(Lines *l, const char *path, Error *err) {
    *l = (Lines){.path = input_name(path), .in = strcmp(path, "-") ? fopen(path, "re") : stdin};
    l->name = l->path;
    return l->in ? 0
                 : fail(err, EXIT_FAILED, "%s: cannot open: %s; check the path", path,
                        strerror(errno));
}

/* Reads on to the byte `end`, or to the end of the input. Of more than `most` bytes the first ones
 * stay. Returns 1, 0 at the end of the input, or -1 and err. */
static int read_until(Lines *l, int end, size_t most, Error *err) {
    int c;
    l->text.len = 0;
    while ((c = getc_unlocked(l->in)) != EOF && c != end) {
        if (l->text.len > most)
            continue;
        if (l->text.len == l->text.room && input_fits(l->path, 3 * l->text.len, err))
            return -1; /* it would grow to twice its size */
        text_append(&l->text, &(char){c}, 1);
    }
    if (ferror(l->in))
        return fail(err, EXIT_FAILED, "%s: cannot read: %s", l->path, strerror(errno));
    text_append(&l->text, "", 1); /* a 0 after it */
    return c != EOF;
}

char *input_read(const char *path, size_t *len, size_t factor, Error *err) {
    size_t most = process_allowance("", 0).memory / factor;
    Lines l;
    if (lines_open(&l, path, err))
        return NULL;
    int status = read_until(&l, EOF, most, err);
    *len = l.text.len - 1;
    char *text = NULL;
    if (!status && !input_fits(l.path, factor * *len, err)) {
        text = l.text.text;
        l.text.text = NULL; /* or it would be freed */
    }
    lines_close(&l);
    return text;
}

int line_next(Lines *l, Error *err) {
    enum {
        ENTRY = 256,
        OFTEN = 1 << 20,
        SPARE = 8 << 20
    }; /* bytes; ENTRY: what becomes of a line */
    for (int more = 1; more;) {
        more = read_until(l, '\n', MAX_LINE, err);
        l->taken += l->text.len + ENTRY;
        if (more < 0 ||
            (l->taken > OFTEN && input_fits(l->path, SPARE + l->number * (size_t)ENTRY, err)))
            return -1;
        l->taken %= OFTEN;
        size_t mark = !l->number++ && !strncmp(l->text.text, "\xEF\xBB\xBF", 3) ? 3 : 0;
        l->line = l->text.text + mark;
        l->size = l->text.len - 1 - mark;
        if (l->size && l->line[l->size - 1] == '\r')
            l->size--;
        snprintf(l->where, sizeof l->where, "%.500s%sline %d", l->name, *l->name ? " " : "",
                 l->number);
        if (strspn(l->line, " \t") < l->size)
            return 1;
    }
    return 0;
}

void lines_close(Lines *l) {
    if (l->in != stdin)
        fclose(l->in);
    free(l->text.text);
}

// -------------------------------------------------------------------------------------------------
// Paths of result files
// -------------------------------------------------------------------------------------------------

bool output_is_special(const char *path) {
    struct stat st;
    return !strcmp(path, "-") || (!stat(path, &st) && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode));
}

/* Returns true if two paths lead to one file or directory, which exists. */
static bool same_inode(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool output_is_standard(const char *path) {
    return !strcmp(path, "-") || same_inode(path, "/dev/stdout");
}

bool same_file(const char *a, const char *b) {
    char copy[MAX_PATH], dir_a[MAX_PATH], name_a[MAX_PATH];
    if (!a || !b)
        return false;
    if (!strcmp(a, "-") || !strcmp(b, "-"))
        return !strcmp(a, b);
    if (same_inode(a, b))
        return !output_is_special(a);
    if (strlen(a) >= MAX_PATH || strlen(b) >= MAX_PATH || !access(a, F_OK) || !access(b, F_OK))
        return false;
    strcpy(dir_a, dirname(strcpy(copy, a))); /* what they return is valid until the next call */
    strcpy(name_a, basename(strcpy(copy, a)));
    return !strcmp(name_a, basename(strcpy(copy, b))) &&
           same_inode(dir_a, dirname(strcpy(copy, b)));
}

int file_beside(char name[MAX_PATH], const char *path, const char *suffix, Error *err) {
    char real[PATH_MAX];
    bool there = realpath(path, real) != NULL;
    if (!there && errno != ENOENT)
        return fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    return check_length(snprintf(name, MAX_PATH, "%s%s", there ? real : path, suffix), path, err);
}

int file_size(size_t *size, const char *path, Error *err) {
    struct stat st = {.st_size = 0};
    if (stat(path, &st) && errno != ENOENT)
        return fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    *size = st.st_size;
    return 0;
}

bool file_lock(int fd, double patience) {
    for (double until = seconds_now() + patience; flock(fd, LOCK_EX | LOCK_NB);) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || seconds_now() > until)
            return false;
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL); /* tries 20 times a second */
    }
    return true;
}

// -------------------------------------------------------------------------------------------------
// Unfinished results
// -------------------------------------------------------------------------------------------------

/* The one file or directory that is being made. */
static struct {
    char name[MAX_PATH]; /* its temporary name; "" if there is none */
    DIR *dir;            /* a directory is kept open, so that emptying it needs no memory */
} unfinished;

/* Removes from a directory what a copy of a model consists of (app/quantize.c). */
static void empty_directory(DIR *dir) {
    static const char *const copied[] = {"*.json", "*.txt", "*.safetensors"};
    rewinddir(dir);
    for (const struct dirent *e; (e = readdir(dir));)
        for (int i = 0; i < 3; i++)
            if (e->d_type != DT_LNK && !fnmatch(copied[i], e->d_name, 0))
                unlinkat(dirfd(dir), e->d_name, 0);
}

/* Forgets it, when it is removed or finished. */
static void unfinished_forget(void) {
    if (unfinished.dir)
        closedir(unfinished.dir);
    unfinished.dir = NULL;
    unfinished.name[0] = 0;
}

void unfinished_remove(void) {
    if (unfinished.dir)
        empty_directory(unfinished.dir);
    if (unfinished.name[0])
        remove(unfinished.name);
    unfinished_forget();
}

/* Hexadecimal digits of the random number and of the proof; bytes of a name that may be too long.
 */
enum { DIGITS = 16, PROVEN = MAX_PATH + DIGITS + 1 };

/* Adds -PROOF to a name that ends with a random number, for the open file. */
static void add_proof(char proven[PROVEN], const char *name, int fd) {
    uint64_t named = hash_bytes(geteuid(), name + strlen(name) - DIGITS, DIGITS);
    struct stat st = {.st_ino = 0}; /* which no file has, if this one cannot be read */
    fstat(fd, &st);
    snprintf(proven, PROVEN, "%s-%016" PRIx64, name, splitmix64(named, st.st_ino));
}

void file_prove(char name[MAX_PATH], int fd) {
    char proven[PROVEN];
    add_proof(proven, name, fd);
    if (!rename(name, proven))
        strcpy(name, proven);
}

bool file_is_dead(int fd, const char *name) {
    char proven[PROVEN], before[MAX_PATH];
    size_t len = strlen(name);
    if (len < 2 * (DIGITS + 1))
        return false;
    snprintf(before, len - DIGITS, "%s", name);
    add_proof(proven, before, fd);
    return !strcmp(proven, name) && file_lock(fd, 0);
}

/* Removes every dead PATH.tmp-RANDOM-PROOF; `name` is PATH.tmp-RANDOM of this process. If one
 * cannot be removed, this prints a warning and the new run goes on. */
static void clear_dead(const char *name) {
    char copy[MAX_PATH];
    const char *base = strrchr(name, '/') ? strrchr(name, '/') + 1 : name;
    size_t len = strrchr(base, '-') + 1 - base; /* up to the random number */
    DIR *beside = opendir(dirname(strcpy(copy, name)));
    int why = 0;
    if (!beside)
        return;
    for (const struct dirent *e; (errno = 0, e = readdir(beside));) {
        if (strncmp(e->d_name, base, len))
            continue;
        int fd = openat(dirfd(beside), e->d_name, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
            continue;
        /* before it ended, its maker may have given it another name: that of a result */
        bool dead = file_is_dead(fd, e->d_name) && !faccessat(dirfd(beside), e->d_name, F_OK, 0);
        DIR *dir = dead ? fdopendir(fd) : NULL;
        if (dir)
            empty_directory(dir);
        if (dead && unlinkat(dirfd(beside), e->d_name, dir ? AT_REMOVEDIR : 0))
            why = errno;
        if (dir)
            closedir(dir);
        else
            close(fd);
    }
    if (errno)
        why = errno;
    if (why)
        fprintf(stderr,
                "%.*s*: cannot remove all that runs which were killed have left: %s; remove it\n",
                (int)(base + len - name), name, strerror(why));
    closedir(beside);
}

int unfinished_begin(const char *path, bool directory, Error *err) {
    char suffix[32], name[MAX_PATH];
    uint64_t random;
    struct stat st;
    bool there = !stat(path, &st);
    mode_t mode = there ? 0700 : 0777;
    atexit(unfinished_remove); /* a second call does no harm */
    if (getentropy(&random, sizeof random))
        return fail(err, EXIT_FAILED, "%s: no random numbers: %s", path, strerror(errno));
    snprintf(suffix, sizeof suffix, ".tmp-%016" PRIx64, random);
    if (file_beside(name, path, suffix, err))
        return -1;
    clear_dead(name);
    int fd = directory ? mkdir(name, mode)
                       : open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode & 0666);
    if (fd >= 0) {
        strcpy(unfinished.name, name);
        if (directory) {
            fd = open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            unfinished.dir = fdopendir(fd);
            fd = unfinished.dir ? fd : -1;
        }
    }
    if (fd < 0) {
        fail(err, EXIT_FAILED, "%s: %s; name a file that can be written", path, strerror(errno));
        unfinished_remove();
        return -1;
    }
    if (there) { /* it will replace this one: it gets its mode, and its owner as far as may be */
        int unused = fchown(fd, st.st_uid, st.st_gid);
        (void)unused;
        fchmod(fd, st.st_mode & 07777);
    }
    if (file_lock(fd, 0)) /* without locks, no later run could know that this one has ended */
        file_prove(unfinished.name, fd);
    return fd;
}

const char *unfinished_name(void) { return unfinished.name; }

int name_sync(const char *path) {
    char copy[MAX_PATH];
    snprintf(copy, sizeof copy, "%s", path);
    int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno == EACCES ? 0 : -1; /* one may write in it, and not read it */
    int status = fsync(fd) && errno != EINVAL ? -1 : 0;
    close(fd);
    return status;
}

int unfinished_end(const char *path, Error *err) {
    char real[MAX_PATH];
    if (file_beside(real, path, "", err))
        return -1;
    if (!rename(unfinished.name, real)) {
        unfinished_forget();
        if (!name_sync(real))
            return 0;
    }
    return fail(err, EXIT_FAILED, "%s: %s", real, strerror(errno));
}

// -------------------------------------------------------------------------------------------------
// Writing results
// -------------------------------------------------------------------------------------------------

FILE *output_open(const char *flag, const char *path, Error *err) {
    bool replaces = !output_is_special(path);
    Error why;
    int fd = replaces ? unfinished_begin(path, false, &why) : -1;
    if (replaces && fd < 0) {
        fail(err, why.code, "%s %.900s", flag, why.text);
        return NULL;
    }
    FILE *f = replaces ? fdopen(fd, "w") : strcmp(path, "-") ? fopen(path, "we") : stdout;
    if (!f)
        fail(err, EXIT_FAILED, "%s %s: %s; name a file that can be written", flag, path,
             strerror(errno));
    if (!f && replaces) {
        unfinished_remove();
        close(fd);
    }
    return f;
}

/* Returns what forbids to write at a path, and leaves its errno; NULL: nothing that can be seen
 * there. */
static const char *writing_fault(const char *path) {
    static const double PATIENCE = 3; /* seconds: a job that is killed takes a moment to end */
    struct stat st;
    if (output_is_special(path)) /* opening it could have effects */
        return access(path, W_OK) ? strerror(errno) : NULL;
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return lstat(path, &st) ? NULL : "is a link to nothing";
    if (fd < 0)
        return strerror(errno);
    bool busy = !file_lock(fd, PATIENCE) && errno == EWOULDBLOCK;
    close(fd);
    return busy ? "another job is writing there" : NULL;
}

int output_check(const char *flag, const char *path, Error *err) {
    if (!strcmp(path, "-"))
        return 0;
    const char *why = writing_fault(path);
    if (why)
        return fail(err, errno == EWOULDBLOCK ? EXIT_USAGE : EXIT_FAILED,
                    "%s %s: %s; name a file that can be written", flag, path, why);
    if (output_is_special(path))
        return 0;
    FILE *file = output_open(flag, path, err); /* the one that would replace it */
    unfinished_remove();
    return file ? fclose(file) : -1;
}

int output_close(FILE *f, const char *flag, const char *path, Error *err) {
    bool replaces = f != stdout && !output_is_special(path);
    const char *why = fflush(f) || (replaces && fsync(fileno(f))) ? strerror(errno) : NULL;
    Error inner;
    if (!why && ferror(f))
        why = "a write failed"; /* errno now belongs to a later call */
    if (!why && replaces && unfinished_end(path, &inner))
        why = inner.text;
    if (f != stdout && fclose(f) && !why)
        why = strerror(errno);
    if (!why)
        return 0;
    if (replaces)
        unfinished_remove();
    return fail(err, EXIT_FAILED, "%s %s: %.900s; make room or write elsewhere", flag, path, why);
}
