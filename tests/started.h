/* started.h: a program that a test starts, what it writes and leaves behind; for the suites `cli`, `mini`, `summary`. */
#ifndef STARTED_H
#define STARTED_H
#include <sys/resource.h>
#include <sys/types.h>

#include "tests.h"

typedef struct {
    int status;      /* exit status, or 1000 + the signal that ended it */
    char *out, *err; /* what it wrote */
    size_t out_len, err_len;
    long resident; /* bytes of memory, at most */
} Result;

/* What the next run gets; all zero again behind it. */
typedef struct {
    const char *input, *output; /* files for standard input and output; without: nothing, and captured */
    int pipe;                   /* instead of a file for standard output */
    rlim_t memory, file;        /* bytes of address space, of the largest file that it may write; 0: no limit */
    const char *fault;          /* what faults.so disturbs */
    bool emulated;              /* the program that was linked with the emulation of a GPU */
} With;
extern With with;

extern char offload[300], capture[300]; /* directories: where runs may leave nothing; where their output goes */
void open_directories(void);            /* and the environment of all runs; start_program does it */
/* Starts argv[0]. If it hangs it is ended (SIGALRM), named and fails its test; a second one that hangs ends the suite. */
pid_t start_program(const char *const *argv);
bool program_runs(pid_t pid); /* false: it has ended, and finish does not wait */
/* Waits for it; the caller frees the result. Whatever happened, nothing may be left in `offload`. */
Result finish(pid_t pid);
void result_free(Result *r);

#endif
