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
    if (!stat(path, &st))
        return S_ISDIR(st.st_mode) ? NULL : "is no directory";
    return errno != ENOENT    ? strerror(errno)
           : lstat(path, &st) ? "there is no such directory"
                              : "is a link to what is missing; download it again";
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

/* Fills err: a file cannot be opened, for the reason in errno. */
static int refuse_open(const char *path, Error *err) {
    char target[MAX_PATH] = ""; /* of a link, such as a hub's cache has in place of files */
    if (errno == ENOENT && readlink(path, target, MAX_PATH - 1) > 0)
        return fail(err, EXIT_FAILED,
                    "%s: is a link to %.300s, which is missing; download it again", path, target);
    return fail(err, EXIT_FAILED, "%s: cannot open: %s; check the path, or download it", path,
                strerror(errno));
}

static const char pointer[] = "version https://git-lfs.github.com/spec/",
                  is_pointer[] =
                      "is a Git-LFS pointer, which stands for the file; run git lfs "
                      "pull, or download the file";

int file_open(const char *path, struct stat *st, Error *err) {
    char first[sizeof pointer] = "";
    /* O_NONBLOCK: opening a pipe without a writer must not hang the program. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return refuse_open(path, err);
    if (fstat(fd, st))
        fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    else if (!S_ISREG(st->st_mode))
        fail(err, EXIT_FAILED, "%s: is a %s; expected a regular file", path,
             S_ISDIR(st->st_mode) ? "directory" : "special file");
    else if (!file_read_at(fd, first, strlen(pointer), 0) && !strcmp(first, pointer))
        fail(err, EXIT_FAILED, "%s: %s", path, is_pointer);
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
    return l->in ? 0 : refuse_open(path, err);
}

/* Returns why an input that begins with this line is none, or NULL. UTF-16 has one of two marks, or
 * a 0 in one of two bytes. */
static const char *input_fault(const Text *t) {
    bool odd = t->len > 2 && !t->text[0] != !t->text[1];
    if (odd || !strncmp(t->text, "\xFF\xFE", 2) || !strncmp(t->text, "\xFE\xFF", 2))
        return "is in UTF-16, and UTF-8 was expected; convert it: iconv -f UTF-16 -t UTF-8";
    return strncmp(t->text, pointer, strlen(pointer)) ? NULL : is_pointer;
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
    const char *why = l->number ? NULL : input_fault(&l->text);
    return why ? fail(err, EXIT_FAILED, "%s: %s", l->path, why) : c != EOF;
}

int lines_whole(Lines *l, size_t factor, Error *err) {
    if (read_until(l, EOF, SIZE_MAX, err))
        return -1;
    l->line = l->text.text;
    l->size = l->text.len - 1;
    return input_fits(l->path, factor * l->size, err);
}

int line_next(Lines *l, Error *err) {
    /* Bytes. What becomes of a line takes ENTRY. */
    enum { ENTRY = 256, OFTEN = 1 << 20, SPARE = 8 << 20 };
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
        snprintf(l->where, sizeof l->where, "line %d", l->number);
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

/* Writes the directory of a path, and returns the name in it. */
static const char *split_path(char dir[MAX_PATH], const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(dir, MAX_PATH, "%.*s.", (int)(name - path), path);
    return name;
}

uint64_t file_identity(const char *path) {
    char dir[MAX_PATH];
    struct stat st;
    const char *name = "";
    if (!path)
        return 0;
    if (!strcmp(path, "-"))
        path = "/dev/stdin";
    if (stat(path, &st)) {
        name = split_path(dir, path);
        if (stat(dir, &st))
            return 0;
    }
    const uint64_t inode[] = {st.st_dev, st.st_ino};
    return hash_bytes(hash_bytes(HASH_START, inode, sizeof inode), name, strlen(name));
}

int file_beside(char name[MAX_PATH], const char *path, const char *suffix, Error *err) {
    char real[PATH_MAX];
    bool there = realpath(path, real) != NULL;
    if (!there && errno != ENOENT)
        return fail(err, EXIT_FAILED, "%s: cannot read: %s", path, strerror(errno));
    return check_length(snprintf(name, MAX_PATH, "%s%s", there ? real : path, suffix), path, err);
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
    char path[MAX_PATH]; /* the name that it is to get */
    DIR *dir;            /* a directory is kept open, so that emptying it needs no memory */
} unfinished;

/* Removes from a directory what a copy of a model consists of (app/quantize.c). */
static void empty_directory(DIR *dir) {
    static const char *const copied[] = {"*.json", "*.txt", "*.safetensors"};
    rewinddir(dir);
    for (const struct dirent *e; (e = readdir(dir));)
        for (int i = 0; i < 3; i++)
            if (!fnmatch(copied[i], e->d_name, 0))
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

enum { DIGITS = 16 }; /* hexadecimal ones of the random number, and of the proof */

/* Returns the proof for an open file and the digits of its random number. */
static uint64_t proof_of(int fd, const char *random) {
    struct stat st = {.st_ino = 0}; /* which no file has, if this one cannot be read */
    fstat(fd, &st);
    return splitmix64(hash_bytes(geteuid(), random, DIGITS), st.st_ino);
}

int file_prove(char name[MAX_PATH], int fd) {
    char proven[MAX_PATH];
    uint64_t proof = proof_of(fd, name + strlen(name) - DIGITS);
    int length = snprintf(proven, MAX_PATH, "%s-%016" PRIx64, name, proof);
    if (length >= MAX_PATH)
        errno = ENAMETOOLONG;
    if (length >= MAX_PATH || rename(name, proven))
        return -1;
    strcpy(name, proven);
    return 0;
}

bool file_is_dead(int fd, const char *name) {
    size_t len = strlen(name);
    if (len <= 2 * DIGITS)
        return false;
    const char *proof = name + len - DIGITS, *random = proof - 1 - DIGITS;
    return strtoull(proof, NULL, 16) == proof_of(fd, random) && file_lock(fd, 0);
}

/* Removes every dead PATH.tmp-RANDOM-PROOF; `name` is PATH.tmp-RANDOM of this process. If one
 * cannot be removed, this prints a warning and the new run goes on. */
static void clear_dead(const char *name) {
    char place[MAX_PATH];
    const char *base = split_path(place, name);
    size_t len = strrchr(base, '-') + 1 - base; /* up to the random number */
    DIR *beside = opendir(place);
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

int unfinished_begin(const char *flag, const char *path, bool directory, Error *err) {
    char name[MAX_PATH];
    uint64_t random;
    struct stat st;
    bool there = !stat(path, &st);
    mode_t mode = there ? 0700 : 0777;
    atexit(unfinished_remove); /* a second call does no harm */
    if (getentropy(&random, sizeof random))
        return fail(err, EXIT_FAILED, "%s %s: no random numbers: %s", flag, path, strerror(errno));
    if (file_beside(unfinished.path, path, "", err))
        return -1;
    int length = snprintf(name, MAX_PATH, "%s.tmp-%016" PRIx64, unfinished.path, random);
    if (check_length(length, path, err))
        return -1;
    clear_dead(name);
    strcpy(unfinished.name, name);
    int how = directory ? O_RDONLY | O_DIRECTORY : O_WRONLY | O_CREAT | O_EXCL;
    int fd =
        directory && mkdir(name, mode) ? -1 : open(name, how | O_NOFOLLOW | O_CLOEXEC, mode & 0666);
    if (fd < 0) {
        fail(err, EXIT_FAILED, "%s %s: %s; name a file that can be written", flag, path,
             strerror(errno));
        unfinished_remove();
        return -1;
    }
    if (directory)
        unfinished.dir = fdopendir(fd);
    if (there) { /* it will replace this one: it gets its mode, and its owner as far as may be */
        int unused = fchown(fd, st.st_uid, st.st_gid);
        (void)unused;
        fchmod(fd, st.st_mode & 07777);
    }
    /* without locks, no later run could know that this one has ended */
    if (!file_lock(fd, 0) || !file_prove(unfinished.name, fd))
        return fd;
    fail(err, EXIT_FAILED, "%s %s: %s; give it a shorter name", flag, path, strerror(errno));
    if (!directory)
        close(fd);
    unfinished_remove();
    return -1;
}

const char *unfinished_name(void) { return unfinished.name; }

int name_sync(const char *path) {
    char dir[MAX_PATH];
    split_path(dir, path);
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno == EACCES ? 0 : -1; /* one may write in it, and not read it */
    int status = fsync(fd) && errno != EINVAL && errno != ENOTSUP ? -1 : 0;
    close(fd);
    return status;
}

int unfinished_end(void) {
    if (rename(unfinished.name, unfinished.path))
        return -1;
    unfinished_forget();
    return name_sync(unfinished.path);
}

// -------------------------------------------------------------------------------------------------
// Writing results
// -------------------------------------------------------------------------------------------------

FILE *output_open(const char *flag, const char *path, Error *err) {
    bool replaces = !output_is_special(path);
    int fd = replaces ? unfinished_begin(flag, path, false, err) : -1;
    if (replaces && fd < 0)
        return NULL;
    FILE *f = replaces ? fdopen(fd, "w") : strcmp(path, "-") ? fopen(path, "we") : stdout;
    if (f)
        return f;
    fail(err, EXIT_FAILED, "%s %s: %s; name a file that can be written", flag, path,
         strerror(errno));
    if (replaces) {
        unfinished_remove();
        close(fd);
    }
    return NULL;
}

/* Returns what forbids to write at a path, and leaves its errno; NULL: nothing that can be seen
 * there. */
static const char *writing_fault(const char *path) {
    static const double PATIENCE = 3; /* seconds: a job that is killed takes a moment to end */
    struct stat st;
    if (output_is_special(path)) /* opening it could have effects */
        return strcmp(path, "-") && access(path, W_OK) ? strerror(errno) : NULL;
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
    const char *why = writing_fault(path);
    if (why)
        return fail(err, errno == EWOULDBLOCK ? EXIT_USAGE : EXIT_FAILED,
                    "%s %s: %s; name a file that can be written", flag, path, why);
    if (output_is_special(path))
        return 0;
    int fd = unfinished_begin(flag, path, false, err); /* the one that would replace it */
    unfinished_remove();
    return fd < 0 ? -1 : close(fd);
}

int output_close(FILE *f, const char *flag, const char *path, Error *err) {
    bool replaces = f != stdout && !output_is_special(path);
    const char *why = fflush(f) || (replaces && fsync(fileno(f))) ? strerror(errno) : NULL;
    if (!why && ferror(f))
        why = "a write failed"; /* errno now belongs to a later call */
    if (!why && replaces && unfinished_end())
        why = strerror(errno);
    if (f != stdout && fclose(f) && !why)
        why = strerror(errno);
    if (!why)
        return 0;
    if (replaces)
        unfinished_remove();
    return fail(err, EXIT_FAILED, "%s %s: %s; make room or write elsewhere", flag, path, why);
}
