/* base.h: declares what every file uses: errors, small numbers, the clock, halfs, random numbers,
 * threads, and what differs between systems. For C, C++ and CUDA; it knows nothing of models.
 *
 * Two kinds of trouble exist. A bug of ours aborts with file and line (CHECK). A fault of the
 * outside world (a checkpoint, a prompt file, a disk, a flag) becomes one line for a person in an
 * Error: what, where, found, expected, remedy. Library functions that can meet such a fault take
 * `Error *err` last, return 0 or -1 (pointers: NULL), and write err only when they fail. Only
 * flexgen.c prints it and exits. Read next: flexgen.h, the words of the paper as structs. */
#ifndef BASE_H
#define BASE_H
#include <assert.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// Errors
// -------------------------------------------------------------------------------------------------

enum {
    EXIT_OK = 0,
    EXIT_FAILED = 1,
    EXIT_USAGE = 2,
    EXIT_SIGNAL = 128 /* and the signal's number */
};

/* A fault, as one line for a person. */
typedef struct {
    int code; /* exit status this fault asks for: EXIT_FAILED, or EXIT_USAGE for wrong use and "does
                 not fit" */
    char text[1024];
} Error;

/* Fills err with one line and returns -1, so that callers can write `return fail(err, ...)`. */
__attribute__((format(printf, 3, 4))) static inline int fail(Error *err, int code,
                                                             const char *format, ...) {
    va_list args;
    va_start(args, format);
    err->code = code;
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    for (char *c = err->text; *c; c++) /* hostile names must not forge a second line */
        if ((unsigned char)*c < ' ' || *c == 127)
            *c = '?';
    return -1;
}

/* Fills err with the error `why` of a stage of a pipeline, and returns -1. */
static inline int fail_of_stage(Error *err, int stage, const Error *why) {
    return fail(err, why->code, "stage %d: %.*s", stage, (int)sizeof why->text - 20, why->text);
}

/* Puts the place of a fault in front of its text, "WHERE: TEXT", and returns -1. */
static inline int fail_at(Error *err, const char *where) {
    Error why = *err;
    return fail(err, why.code, "%s: %s", where, why.text);
}

/* Reports that pthread_create has failed with the error number `why`. Returns -1. */
static inline int fail_to_start(Error *err, int why) {
    return fail(err, EXIT_FAILED,
                "cannot start a thread: %s; raise ulimit -u or -v, or the control group's pids "
                "limit, or give fewer "
                "--threads",
                strerror(why));
}

/* The name that begins a message to the user; in a pipeline it is "flexgen: stage 1". */
__attribute__((weak)) const char *speaker = "flexgen";

/* Aborts unless `cond` holds, which only a bug of ours can break. */
#define CHECK(cond)                                                                      \
    do {                                                                                 \
        if (!(cond)) {                                                                   \
            fprintf(stderr, "%s: bug: %s:%d: %s\n", speaker, __FILE__, __LINE__, #cond); \
            abort();                                                                     \
        }                                                                                \
    } while (0)

/* True once memory has run out. What text streams hold is then of no use any more, and they take
 * nothing when the end of the program flushes them. */
__attribute__((weak)) bool memory_ran_out;

static inline void *out_of_memory(size_t count, size_t size) {
    flockfile(stderr); /* for good: other threads that find no memory wait here for the end */
    memory_ran_out = true;
    fprintf(stderr,
            "%s: out of memory (%zu x %zu bytes); close other programs or use a smaller task\n",
            speaker, count, size);
    exit(EXIT_FAILED);
}

/* Allocates zeroed memory for small things, never for the tiers; ends the program if there is none.
 */
static inline void *xcalloc(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size);
    return p ? p : out_of_memory(count, size);
}

static inline void *xrealloc(void *old, size_t count, size_t size) {
    void *p = count > SIZE_MAX / size ? NULL : realloc(old, count ? count * size : 1);
    return p ? p : out_of_memory(count, size);
}

/* Returns an array of n elements with room for one more. It grows at each power of two, and n may
 * have become smaller since. */
static inline void *with_room(void *array, size_t n, size_t size) {
    return n & (n - 1) ? array : xrealloc(array, 2 * n + 1, size);
}

static inline char *xstrdup(const char *s) {
    size_t n = strlen(s) + 1;
    return (char *)memcpy(xcalloc(n, 1), s, n);
}

/* Returns true if a list such as " one two " has this word. */
static inline bool has_word(const char *list, const char *word) {
    char key[100];
    snprintf(key, sizeof key, " %s ", word);
    return !strchr(word, ' ') && strstr(list, key);
}

// -------------------------------------------------------------------------------------------------
// Numbers, the clock
// -------------------------------------------------------------------------------------------------

/* Stands before a function that GPUs run as well. */
#ifdef __CUDACC__
#define HOST_AND_GPU __host__ __device__
#else
#define HOST_AND_GPU
#endif

/* Counts of bytes of tiers, plans and machines: they may be larger than what this machine can
 * address. */
typedef uint64_t Bytes;

HOST_AND_GPU static inline int imin(int a, int b) { return a < b ? a : b; }
HOST_AND_GPU static inline int imax(int a, int b) { return a > b ? a : b; }
static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline Bytes size_min(Bytes a, Bytes b) { return a < b ? a : b; }
static inline Bytes size_max(Bytes a, Bytes b) { return a > b ? a : b; }
static inline Bytes size_less(Bytes a, Bytes b) { return a > b ? a - b : 0; }

/* Returns the ending of a noun behind a count: "1 token", "2 tokens". */
static inline const char *plural(double n) { return n == 1 ? "" : "s"; }

/* Returns the seconds of CLOCK_MONOTONIC. */
static inline double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
/* Returns such a time, or a duration, in the form that the system's calls take. */
static inline struct timespec timespec_at(double seconds) {
    struct timespec t = {(time_t)seconds, 0};
    t.tv_nsec = (long)(1e9 * (seconds - (double)t.tv_sec));
    return t;
}

/* Bytes of a path, with its closing 0, at most. */
enum { MAX_PATH = 4096 };

// -------------------------------------------------------------------------------------------------
// Halfs
// -------------------------------------------------------------------------------------------------

/* Checkpoints have little-endian numbers, which are used as they are. */
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "big-endian processors are not supported");

typedef uint16_t f16; /* IEEE binary16 as bits: storage only, arithmetic is float (simd.h) */

// -------------------------------------------------------------------------------------------------
// Hashes. A random number is the hash of what it is drawn for, so that nothing else can change it.
// -------------------------------------------------------------------------------------------------

/* Returns number n of the splitmix64 generator that begins with this seed. */
static inline uint64_t splitmix64(uint64_t seed, uint64_t n) {
    uint64_t z = seed + n * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Returns the FNV-1a hash of n bytes that follow those of which `hash` is the hash. */
static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t n) {
    for (const uint8_t *b = (const uint8_t *)bytes, *end = b + n; b < end; b++)
        hash = (hash ^ *b) * 0x100000001B3ull;
    return hash;
}
enum { HASH_START = 0x2545F491 };
/* Returns it of a text with its 0; a text that is NULL does not count. */
static inline uint64_t hash_text(uint64_t hash, const char *text) {
    return text ? hash_bytes(hash, text, strlen(text) + 1) : hash;
}

/* Returns a number, uniform in [0, 1), that decides about the token at `pos` of a prompt. */
static inline double random_draw(uint64_t seed, int32_t prompt, int32_t pos) {
    uint64_t hash =
        splitmix64(splitmix64(splitmix64(seed, 1) ^ (uint32_t)prompt, 1) ^ (uint32_t)pos, 1);
    return (double)(hash >> 11) * 0x1p-53;
}

// -------------------------------------------------------------------------------------------------
// team.c: the threads that compute
// -------------------------------------------------------------------------------------------------

/* Sets how many threads compute from now on: the caller's, and helpers, which are started here. 0
 * asks for one per processor that this process may use. Returns the number, which is less if the
 * system does not let so many start. Before the first call it is 1. Must not be called while
 * anybody computes. */
int host_set_threads(int threads);
int host_threads(void);         /* the threads that compute */
int host_threads_missing(void); /* how many fewer they are than was asked for */

/* Carries out rounds first .. first+n-1 of a loop. */
typedef void (*LoopPart)(const void *what, int first, int n);

/* Calls part(what, ...) for all of 0 .. count-1, divided among the caller and the threads of the
 * team that are free, and returns when all is done. It must not matter which thread does which
 * part. Any thread may call at any time, and loops of several callers run side by side. work: how
 * many multiplications the loop is (or as much of something else); a loop of little work is done by
 * the caller alone, at once. */
void host_share(double work, int count, LoopPart part, const void *what);

/* Returns this thread's working memory: at least so many floats, not initialized, from the
 * beginning of a cache line. It grows to the largest need, so a steady loop allocates nothing, and
 * is freed when the thread ends. It is valid until the thread asks again. */
float *scratch(size_t floats);

// -------------------------------------------------------------------------------------------------
// os.c: what this process may have
// -------------------------------------------------------------------------------------------------

/* The least that the machine, the control groups and the limits of this process leave it. */
typedef struct {
    size_t memory;  /* bytes that it may still take */
    size_t address; /* bytes of address space alone, to which mapped files count too; SIZE_MAX:
                       there is no limit */
    int processors; /* whole processors that the quotas of CPU come to, at least one; INT_MAX: there
                       is no quota */
} Allowance;
/* Returns the allowance of this process, when so many threads are still to be started. root: the
 * directory that holds /proc and /sys, "" except in tests. */
Allowance process_allowance(const char *root, int threads);

// -------------------------------------------------------------------------------------------------
// os.c: SIGINT, SIGTERM and SIGHUP
// -------------------------------------------------------------------------------------------------

/* Catches these signals: the first one is noted, and a second one ends the program at once. */
void stop_catch(void);
/* Returns where the number of the noted signal is, or 0; it must be read atomically. */
const int *stop_signal(void);
/* Returns -1 and fills err (code EXIT_SIGNAL + signal) with "stopped by SIGINT" and the text
 * `what`.
 */
int stop_fail(Error *err, const char *what);

// -------------------------------------------------------------------------------------------------
// os.c: what differs between systems
// -------------------------------------------------------------------------------------------------

/* Opens a condition for timed waits. */
void cond_open(pthread_cond_t *cond);
/* Waits as pthread_cond_wait does, but only until seconds_now() is `until`, whatever happens to the
 * calendar's clock. Returns false if it was woken by nothing but the time. */
bool cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, double until);
/* Makes all short sleeps of this thread end within microseconds of their time, if it can. */
void sleep_exactly(void);

/* Waits until all that was written to the file is on the disk. Returns -1 and sets errno on
 * failure. */
int file_sync(int fd);
/* Makes a file in a directory that has no name, and so is gone when it is closed. Returns its
 * descriptor, to read and write, or -1 and sets errno. */
int file_nameless(const char *dir);
/* Makes the file `bytes` long, with its blocks on the disk: no later write finds the disk full.
 * Returns 0 or an error number. */
int file_reserve(int fd, size_t bytes);
/* Opens an open file again, for reads that leave no copy in memory. They are of whole blocks of
 * 4096 bytes, to memory at a multiple of that. Returns a descriptor, or -1 if the file system does
 * not support this. */
int file_direct(int fd);
/* Begins to write a range of the file to the disk; with `wait`, returns when it is there. */
void file_write_back(int fd, size_t offset, size_t bytes, bool wait);
/* Begins to read a range of the file that is wanted soon; or, if it is not, drops what memory holds
 * of it. Both are advice. */
void file_advise(int fd, size_t offset, size_t bytes, bool wanted);
/* Returns the time at which a file was written last. */
struct timespec file_changed(const struct stat *st);
/* Returns the time at which anything of a file was changed last, in ns: its data, its names or its
 * rights. Nobody can set it back, as one can the time of file_changed. */
uint64_t file_touched(const struct stat *st);
/* Writes a number that tells the kinds of file systems apart, that of the directory. Returns -1 if
 * there is none. */
int file_system(const char *dir, uint64_t *kind);

/* Returns true if files in the directory are memory (tmpfs), which counts in the control groups of
 * their process. */
bool memory_holds(const char *dir);
/* Gives a large range, just mapped, large pages if it can. */
void memory_enlarge(void *at, size_t bytes);
/* Gives a range of memory its pages now, if it can; otherwise each comes when it is touched. */
void memory_populate(void *at, size_t bytes);
/* Takes the pages of a mapped file that hold these bytes from this process. Nothing in the file is
 * lost. */
void memory_let_go(uint8_t *at, size_t bytes);
/* Returns the bytes of memory that no program needs, or all there are if that is not known. On
 * Linux process_allowance knows more. */
size_t memory_unused(void);
/* Returns the most bytes of memory that this process has had at once, since memory_restart if the
 * system can restart the count. */
size_t memory_peak(void);
void memory_restart(void);
/* Makes all threads of this process share one heap: a heap for each would take 64 MiB of address
 * space, and keep what threads free. Must be called before a thread starts. */
void memory_share_heap(void);

/* Returns the number of processors that this process may run on. */
int processors_allowed(void);
/* Writes the name of the processor, as its maker has it; "" if it is not known. */
enum { MOST_PROCESSOR = 200 }; /* bytes of it */
void processor_name(char name[MOST_PROCESSOR]);
/* Returns the bytes of the last cache; 0 if they are not known. */
size_t processor_cache(void);
/* Writes the path of the running program to path[0 .. size), without a final 0. Returns its length;
 * 0 on failure. */
size_t program_path(char *path, size_t size);

/* A text that grows. It begins as {0}. */
typedef struct {
    char *text; /* malloc'ed */
    size_t len, room;
} Text;
static inline void text_append(Text *t, const char *bytes, size_t n) {
    if (t->len + n > t->room) {
        t->room = 2 * (t->len + n);
        t->text = (char *)xrealloc(t->text, t->room, 1);
    }
    memcpy(t->text + t->len, bytes, n);
    t->len += n;
}
/* Returns a stream that appends to a text. It replaces open_memstream, which drops what it has no
 * memory for without an error in fclose; here lack of memory ends the program, as everywhere. */
FILE *text_stream(Text *text);

#ifdef __cplusplus
}
#endif
#endif
