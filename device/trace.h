/* trace.h: what happened on the lanes of a device, as a file and as the paper's Table 4 (trace.c). */
#ifndef TRACE_H
#define TRACE_H
#include "device/device.h"

/* One call of Figure 4 as it ran on one lane: ops of the same call that follow each other at once are one slice. Seconds of
 * Device.now. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill, prefill_sweep, delegated;
    int i, j, k, batch;
    double begin, end;
    Bytes bytes; /* moved; 0 for arithmetic */
} Slice;

/* A part of Table 4 in one phase: the seconds in which its lanes were busy, and in how many of them a processor was too. */
typedef struct {
    double busy_s, hidden_s;
} Share;
enum { COMPUTE, WEIGHT_READ, CACHE_READ, CACHE_WRITE, ACTIVATION_MOVES, NPARTS };
typedef struct {
    Share part[2][NPARTS]; /* [prefill] */
    double total_s[2];     /* in which anything was busy */
    double busy_s;         /* in which some lane was busy, those of channel NET aside */
} Breakdown;

/* What a sweep holds, from the end of the sweep before it on: KV pages of each tier, sequences in flight. */
typedef struct {
    double at;
    int pages[NTIERS], sequences;
} Held;

/* What a device did, in the order in which calls ended on each lane. */
struct Trace {
    char name[64];   /* of its group of rows: the model, or the stage of a pipeline */
    double ready_at; /* Device.now when all stages were ready, where their clocks differ; else 0 */
    Slice *slice;
    size_t n, capacity;
    size_t limit;      /* after so many more slices, those that are over are added up and dropped; 0: all are kept */
    size_t kept;       /* that were not over then */
    Breakdown dropped; /* what the others add up to */
    long last[NLANES]; /* 1 + index of each lane's newest slice */
    Held *held;        /* [sweeps], and one when all is over; noted by the thread that posts */
    size_t sweeps;
};

/* The slice of an op that has run from begin to end. */
static inline Slice slice_of(const Op *op, Bytes bytes, double begin, double end) {
    Slice s = {op->lane, op->kind, op->prefill, op->prefill_sweep, op->delegated, op->i, op->j, op->k, op->batch,
               begin,    end,      bytes};
    return s;
}
/* Whether two slices are of the same call. */
bool same_call(const Slice *a, const Slice *b);
/* Notes a slice. It extends the lane's newest one if that is of the same call (kind, i, j, k, batch, phase) and ended less
 * than 0.1 ms before. settled: neither it nor a later one begins before. A Trace of zeros is empty. Not thread safe:
 * devices call it under their lock. */
void trace_add(Trace *trace, const Slice *slice, double settled);
/* Notes what a sweep holds, if the trace is for a file (without a limit). */
void trace_hold(Trace *trace, const Held *held);
/* Figure 4's name of the call that a slice is part of: "load_weight", "store_cache", "project", ... */
const char *trace_call(const Slice *slice);
/* Chrome trace JSON (chrome://tracing, Perfetto) of n traces: a group of rows a trace, one row a lane, one slice a call
 * with its i, j, k, its batch and that batch's token, bytes and phase, times in microseconds from the first slice of all.
 * What could not be written shows in ferror(out). */
void trace_write(const Trace *traces, int n, FILE *out);
void trace_free(Trace *trace);

extern const char *const part_name[NPARTS];
/* Two lanes that are busy with the same part at the same time count once. COMPUTE is the lanes of the GPU and of the CPU;
 * its hidden_s is the time in which some copy ran beside them. A sweep in which some batch prefills counts as prefill,
 * as in RunStats. */
Breakdown trace_breakdown(const Trace *trace);

#endif
