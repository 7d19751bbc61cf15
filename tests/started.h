/* started.h: programs that a test starts, what they write and what they leave behind. */
#ifndef STARTED_H
#define STARTED_H
#include <sys/resource.h>
#include <sys/types.h>

#include "tests.h"

/* What it wrote is kept to the end of the suite. */
typedef struct {
    int status;      /* exit status, or 1000 + the signal that ended it */
    char *out, *err; /* what it wrote */
    size_t out_len, err_len;
    long resident; /* bytes of memory, at most; those of this suite, of which it is a copy at first, count as its own */
} Result;

/* What the next run gets; all zero again behind it. */
typedef struct {
    const char *input, *output; /* files for standard input and output; without: nothing, and captured */
    int pipe;                   /* instead of a file for standard output */
    rlim_t memory, data, file; /* bytes of address space, of its data, of the largest file that it may write; 0: no limit */
    rlim_t stack;              /* bytes of each thread's stack; 0: no limit of its own */
    const char *fault;         /* what faults.so disturbs; "": nothing, but it is loaded */
    const char *set[4];        /* up to three NAME=VALUE, variables of its environment */
    bool emulated;             /* the program that was linked with the emulation of a GPU */
} With;
extern With with;

extern char offload[300], capture[300]; /* directories: where runs may leave nothing; where their output goes */
void open_directories(void);            /* and the environment of all runs; start_program does it */
/* Starts argv[0]. If it hangs it is ended (SIGALRM), named and fails its test; a second one that hangs ends the suite. */
pid_t start_program(const char *const *argv);
bool program_runs(pid_t pid); /* false: it has ended, and finish does not wait */
/* Waits for it. Whatever happened, nothing may be left in `offload`. */
Result finish(pid_t pid);

// ---- flexgen --------------------------------------------------------------------------------------------------------

/* The program is $FLEXGEN_BIN, or ./flexgen. Its arguments, made with printf, are written as in a shell: see split_words. A
 * word that begins with @ is a file in `capture`. */
pid_t start_flexgen(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define flexgen(...) finish(start_flexgen(__VA_ARGS__))
Result went_well(Result r); /* returns r, if the run has done what it was to do; otherwise the test ends */
#define flexgen_done(...) went_well(flexgen(__VA_ARGS__))

/* Returns true if a text has the parts of a pattern, which " ... " parts, in their order; otherwise prints why not. */
bool shows(const char *text, const char *pattern);
/* Asserts that the run ended with that status and says this on standard error. A run that failed must have said it in one
 * line, and must have written no result. */
void assert_ends(Result r, int status, const char *said);

/* Keeps memory, such as JSON, to the end of the suite. */
void *keep(void *p);
#endif
