/* check.h: checked calls, and one way to say what went wrong.
 *
 * Two kinds of trouble exist. A bug of ours aborts with file and line (CHECK). A fault of the outside world (a
 * checkpoint, a prompt file, a disk, a flag) becomes one line for a person in an Error: what, where, found, expected,
 * remedy. Library functions that can meet such a fault take `Error *err` last, return 0 or -1 (pointers: NULL), and
 * write err only when they fail. Only flexgen.c prints it and exits.
 * Read next: flexgen.h, the words of the paper as structs. */
#ifndef CHECK_H
#define CHECK_H
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_SIGNAL = 128 /* and the signal's number */ };

typedef struct {
    int code; /* exit status this fault asks for: EXIT_FAILED, or EXIT_USAGE for wrong use and "does not fit" */
    char text[1024];
} Error;

/* Fills err with one line and returns -1, so that callers can write `return fail(err, ...)`. */
__attribute__((format(printf, 3, 4))) static inline int fail(Error *err, int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    err->code = code;
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    for (char *c = err->text; *c; c++) /* hostile names must not forge a second line */
        if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
    return -1;
}

/* The same error, of a stage of a pipeline. */
static inline int fail_of_stage(Error *err, int stage, const Error *why) {
    return fail(err, why->code, "stage %d: %.*s", stage, (int)sizeof why->text - 20, why->text);
}

/* Why pthread_create has not made a thread. */
static inline int fail_to_start(Error *err, int why) {
    return fail(err, EXIT_FAILED,
                "cannot start a thread: %s; raise ulimit -u or -v, or the control group's pids limit, or give fewer "
                "--threads",
                strerror(why));
}

/* Who speaks to the user; in a pipeline it is "flexgen: stage 1". */
__attribute__((weak)) const char *speaker = "flexgen";

/* A condition that only a bug of ours can break. */
#define CHECK(cond)                                                                      \
    do {                                                                                 \
        if (!(cond)) {                                                                   \
            fprintf(stderr, "%s: bug: %s:%d: %s\n", speaker, __FILE__, __LINE__, #cond); \
            abort();                                                                     \
        }                                                                                \
    } while (0)

static inline void *out_of_memory(size_t count, size_t size) {
    flockfile(stderr); /* for good: other threads that find no memory wait here for the end */
    fprintf(stderr, "%s: out of memory (%zu x %zu bytes); close other programs or use a smaller task\n", speaker, count,
            size);
    exit(EXIT_FAILED);
}

/* Small allocations (never the tiers): out of memory here is the end. Zeroed. */
static inline void *xcalloc(size_t count, size_t size) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    return p ? p : out_of_memory(count, size);
}

static inline void *xrealloc(void *old, size_t count, size_t size) {
    void *p = size > 0 && count > (size_t)-1 / size ? NULL : realloc(old, count && size ? count * size : 1);
    return p ? p : out_of_memory(count, size);
}

static inline char *xstrdup(const char *s) {
    size_t n = strlen(s) + 1;
    return (char *)memcpy(xcalloc(n, 1), s, n);
}
#endif
