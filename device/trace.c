/* trace.c: the record of what ran on the lanes, as a file for a trace viewer and as the paper's
 * Table 4.
 *
 * A device notes every op that has ended. Ops of one call of Figure 4 that follow each other at
 * once (the products and norms of half a layer) are one slice. Because lanes are in order, it is
 * enough to look at a lane's newest slice: an op that differs from it, or comes after a pause,
 * begins a new one. trace_write shows slices as they are. trace_breakdown adds them up as Table 4
 * does, but for a run that overlaps: the time of a part is that of the union of its slices, and its
 * share beside which some processor was busy is hidden. It also gives the union of all slices but
 * those of the network: in the rest of the time a stage of a pipeline only waits. A trace for this
 * table alone drops slices when they are over and keeps their sums, so that a run of any length is
 * added up whole. A trace for the file also has what each sweep holds, KV pages and sequences, as
 * counters. A trace that is all zeros is empty and ready.
 * scripts/plot_trace.py draws the file.
 * Read next: pipeline.c. */
#include <inttypes.h>
#include <limits.h>
#include <math.h>

#include "device/parts.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// Calls
// -------------------------------------------------------------------------------------------------

bool same_call(const Slice *a, const Slice *b) {
    return a->kind == b->kind && a->prefill == b->prefill && a->i == b->i && a->j == b->j &&
           a->k == b->k && a->batch == b->batch;
}

/* compute(j, k) appears under the names of its parts. Three names are not in Figure 4:
 * "load_inputs", a batch's index tables and embedding rows on their way up; "gather_tokens", the
 * CPU picks those rows out of the table; "tokens", the picked ones on their way down, or the
 * logits, and then the CPU's choice. A call that is not in the table has the name of its lane:
 * "project", "finish", "attend", "receive" and "send" are called like that. */
const char *trace_call(const Slice *slice) {
    static const char *const call[NLANES][NKINDS] = {
        [W_READ] = {"load_weight"},
        [W_LOAD] = {"load_weight"},
        [C_READ] = {NULL, "load_cache", "load_activation", "load_inputs"},
        [C_LOAD] = {NULL, "load_cache", "load_activation", "load_inputs"},
        [STORE] = {NULL, "store_cache", "store_activation"},
        [D_WRITE] = {NULL, "store_cache", "store_activation"},
        [A_DOWN] = {NULL, "attend", NULL, "tokens"},
        [A_UP] = {NULL, "attend"},
        [PROJECT] = {"unpack_weight", "store_cache", "load_activation"},
        [FINISH] = {"unpack_weight", "attend", "store_activation"},
        [ATTEND] = {NULL, NULL, NULL, "gather_tokens"},
    };
    const char *name = call[slice->lane][slice->kind];
    if (slice->lane == ATTEND && slice->kind == OTHER && slice->j)
        name = "tokens"; /* rows are gathered for layer 0 alone */
    if (slice->lane == ATTEND && slice->kind != OTHER && !slice->delegated)
        name = "store_cache"; /* it appends to its pages */
    return name ? name : lane_name[slice->lane];
}

// -------------------------------------------------------------------------------------------------
// The file
// -------------------------------------------------------------------------------------------------

/* Writes the names of the rows. tid is the lane, pid counts the traces from 1. */
static void write_rows(const Trace *trace, int pid, FILE *out) {
    fprintf(out, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":",
            pid);
    json_write_string(out, trace->name, strlen(trace->name));
    fprintf(out, "}}");
    for (int lane = 0; lane < NLANES; lane++) {
        if (!trace->last[lane])
            continue;
        fprintf(out,
                ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{"
                "\"name\":\"%s\"}},\n{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,"
                "\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                pid, lane, lane_name[lane], pid, lane, lane);
    }
}

/* Writes a slice. Its begin and end are rounded to nanoseconds one by one, so that neighbours that
 * touch still do and none overlap. entered: the sweep in which its batch entered. */
static void write_slice(const Slice *s, int pid, double first, int entered, FILE *out) {
    double begin = round((s->begin - first) * 1e9), took = round((s->end - first) * 1e9) - begin;
    fprintf(out,
            ",\n{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,"
            "\"ts\":%.3f,\"dur\":%.3f,",
            trace_call(s), channel_name[lane_channel[s->lane]], pid, s->lane, begin / 1e3,
            took / 1e3);
    fprintf(out,
            "\"args\":{\"i\":%d,\"j\":%d,\"k\":%d,\"batch\":%d,\"token\":%d,\"bytes\":%" PRIu64
            ",\"phase\":\"%s\"}}",
            s->i, s->j, s->k, s->batch, s->i - entered, s->bytes,
            s->prefill ? "prefill" : "decode");
}

/* Writes two counters; a viewer shows each value until the next one. */
static void write_held(const Held *h, int pid, double first, FILE *out) {
    double at = round(fmax(h->at - first, 0) * 1e9) / 1e3;
    fprintf(out,
            ",\n{\"ph\":\"C\",\"name\":\"KV pages\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,"
            "\"args\":{\"GPU\":%d,\"CPU\":%d,\"disk\":%d}}",
            pid, at, h->pages[TIER_GPU], h->pages[TIER_CPU], h->pages[TIER_DISK]);
    fprintf(out,
            ",\n{\"ph\":\"C\",\"name\":\"sequences\",\"pid\":%d,\"tid\":0,\"ts\":%.3f,"
            "\"args\":{\"in flight\":%d}}",
            pid, at, h->sequences);
}

/* Returns [number of batches] the sweep in which each batch entered. */
static int *first_sweeps(const Trace *trace) {
    int batches = 0;
    for (size_t n = 0; n < trace->n; n++)
        if (trace->slice[n].batch >= batches)
            batches = trace->slice[n].batch + 1;
    int *first = xcalloc(batches, sizeof *first);
    for (int b = 0; b < batches; b++)
        first[b] = INT_MAX;
    for (size_t n = 0; n < trace->n; n++) {
        const Slice *s = &trace->slice[n];
        if (s->i < first[s->batch] && s->kind != WEIGHT)
            first[s->batch] = s->i;
    }
    return first;
}

void trace_write(const Trace *traces, int n, FILE *out) {
    double first = INFINITY;
    for (const Trace *t = traces; t < traces + n; t++)
        for (size_t i = 0; i < t->n; i++)
            first = fmin(first, t->slice[i].begin);
    fprintf(out, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
    for (const Trace *t = traces; t < traces + n; t++) {
        int pid = 1 + t - traces;
        int *entered = first_sweeps(t);
        if (pid > 1)
            fprintf(out, ",\n");
        write_rows(t, pid, out);
        for (size_t i = 0; i < t->n; i++)
            write_slice(&t->slice[i], pid, first, entered[t->slice[i].batch], out);
        for (size_t i = 0; i < t->sweeps; i++)
            write_held(&t->held[i], pid, first, out);
        free(entered);
    }
    fprintf(out, "\n]}\n");
}

// -------------------------------------------------------------------------------------------------
// Table 4, and how long a stage was busy
// -------------------------------------------------------------------------------------------------

const char *const part_name[NPARTS] = {"compute", "weight (R)", "cache (R)", "cache (W)",
                                       "activation"};

/* Returns the part of Table 4 that a slice belongs to. Delegated attention's queries go down
 * together with the new k and v: "cache (W)". Its results, which come up, are no cache. */
static int slice_part(const Slice *slice) {
    Channel channel = lane_channel[slice->lane];
    bool read = channel == DTOC || channel == CTOG;
    if (channel == GPU || channel == CPU)
        return COMPUTE;
    if (slice->kind == WEIGHT && read)
        return WEIGHT_READ;
    if (slice->kind == CACHE && slice->lane != A_UP)
        return read ? CACHE_READ : CACHE_WRITE;
    return ACTIVATION_MOVES;
}

/* The beginning (step 1) or end (-1) of a slice. */
typedef struct {
    double at;
    int prefill, part, step;
    bool net;
} Edge;

static int by_time(const void *a, const void *b) {
    double x = ((const Edge *)a)->at, y = ((const Edge *)b)->at;
    return (x > y) - (x < y);
}

/* The numbers of slices that run at a moment: by phase and part, and in all except those of the
 * network. */
typedef struct {
    int part[2][NPARTS], local;
} Running;

/* Adds seconds in which these run. A sweep belongs to prefill as a whole when some batch prefills
 * in it. */
static void add_span(Breakdown *sum, const Running *running, double seconds) {
    int computing = running->part[0][COMPUTE] + running->part[1][COMPUTE], all = 0;
    for (int part = 0; part < NPARTS; part++)
        all += running->part[0][part] + running->part[1][part];
    for (int prefill = 0; prefill < 2; prefill++) {
        bool busy = false;
        for (int part = 0; part < NPARTS; part++) {
            if (!running->part[prefill][part])
                continue;
            Share *share = &sum->part[prefill][part];
            bool hidden = part == COMPUTE ? all > computing : computing > 0;
            share->busy_s += seconds;
            share->hidden_s += hidden ? seconds : 0;
            busy = true;
        }
        if (busy)
            sum->total_s[prefill] += seconds;
    }
    if (running->local)
        sum->busy_s += seconds;
}

/* Adds up the slices until then. */
static void add_slices(Breakdown *sum, const Trace *trace, double until) {
    Edge *edge = xcalloc(2 * trace->n, sizeof *edge), *to = edge;
    Running running = {0};
    for (const Slice *s = trace->slice; s < trace->slice + trace->n; s++) {
        bool net = lane_channel[s->lane] == NET;
        if (s->begin >= until)
            continue;
        *to++ = (Edge){s->begin, s->prefill_sweep, slice_part(s), 1, net};
        *to++ = (Edge){fmin(s->end, until), s->prefill_sweep, slice_part(s), -1, net};
    }
    qsort(edge, to - edge, sizeof *edge, by_time);
    for (const Edge *e = edge; e < to; e++) {
        if (e > edge)
            add_span(sum, &running, e->at - e[-1].at);
        running.part[e->prefill][e->part] += e->step;
        running.local += e->net ? 0 : e->step;
    }
    free(edge);
}

Breakdown trace_breakdown(const Trace *trace) {
    Breakdown sum = trace->dropped;
    add_slices(&sum, trace, INFINITY);
    return sum;
}

// -------------------------------------------------------------------------------------------------
// Noting slices
// -------------------------------------------------------------------------------------------------

/* Seconds between two ops of one call that do not count as a pause. */
static const double PAUSE = 1e-4;

/* Adds up the slices until then, and keeps of them what comes later. */
static void drop(Trace *trace, double until) {
    size_t kept = 0;
    add_slices(&trace->dropped, trace, until);
    memset(trace->last, 0, sizeof trace->last);
    for (size_t n = 0; n < trace->n; n++) {
        Slice s = trace->slice[n];
        if (s.end <= until)
            continue;
        s.begin = fmax(s.begin, until);
        trace->slice[kept++] = s;
        trace->last[s.lane] = kept;
    }
    trace->n = trace->kept = kept;
}

void trace_add(Trace *trace, const Slice *slice, double settled) {
    Slice *newest = trace->last[slice->lane] ? &trace->slice[trace->last[slice->lane] - 1] : NULL;
    if (newest && same_call(newest, slice) && slice->begin - newest->end <= PAUSE) {
        newest->end = fmax(newest->end, slice->end);
        newest->bytes += slice->bytes;
        return;
    }
    if (trace->limit && trace->n == trace->kept + trace->limit)
        drop(trace, settled - PAUSE); /* a slice that may still grow ends later */
    trace->slice = with_room(trace->slice, trace->n, sizeof *trace->slice);
    trace->slice[trace->n++] = *slice;
    trace->last[slice->lane] = trace->n;
}

void trace_hold(Trace *trace, const Held *held) {
    if (trace->limit)
        return; /* only the file shows it */
    trace->held = with_room(trace->held, trace->sweeps, sizeof *trace->held);
    trace->held[trace->sweeps++] = *held;
}

void trace_free(Trace *trace) {
    free(trace->slice);
    free(trace->held);
    *trace = (Trace){0};
}
