/* lanes.c: the host and the cuda device, as in-order lanes (section 4.2).
 *
 * A lane is a queue with a thread. An op begins when all its `after` events have happened and
 * everything before it in its lane is done; its own event is its place in the lane. PROJECT and
 * FINISH share the GPU, and so a thread. On the host device every thread does the work itself. On
 * the cuda device a lane that touches the GPU is a stream, and its thread only posts there: it
 * waits until the ops that its next op depends on are done or, on other streams, posted, tells its
 * stream to wait for those, and goes on ahead of the GPU. FINISH waits for other lanes than PROJECT
 * only where attention does: for the CPU, or for pages that are not at home on the GPU. Where there
 * are none, or one batch alone is in flight, ops of FINISH join the queue and the stream of
 * PROJECT, and no marks are needed between them. Of one batch its thread takes ops by the segment:
 * as many as follow each other with nothing to wait for between them. graph.c launches a segment
 * that came before as a whole.
 *
 * The host device's links can be slowed (Device.link), to show on a laptop how a PCIe link or a
 * disk changes a schedule. The lanes that are busy on a link share it equally, as in the sim. An op
 * first waits until its bytes would have crossed and copies them then, so that a missing event
 * shows as wrong data; the wait counts as busy, since the link is.
 *
 * With a trace every op is noted when it has ended. On a stream it is noted by spans between two
 * marks; a span then belongs to one call of Figure 4, and its times, from the GPU's clock, are
 * converted to ours. Without a trace marks have no times, which would cost time on the GPU.
 *
 * The first op that fails makes all later ones do nothing; wait reports it. Contract: one thread
 * posts.
 * Read next: graph.c. */
#include <math.h>
#include <unistd.h>

#include "device/parts.h"

enum {
    RING = MARKS,
    SQUARE_OPS = 24, /* a square of one piece posts fewer ops than this to a queue */
    SEGMENT = 32, /* the most ops of a segment: a GPU that is idle waits until so many are posted */
};

/* Seconds that a lane on a slowed link may be late and still catch up. */
static const double CATCH_UP = 4e-3;
/* Each copy multiplies the weight of those before it by this. */
static const double MEMORY = 0.875;
/* Seconds for which a thread asks before it sleeps: as long as a sweep of a small model; or, where
 * the CPU has other work, as long as a thread takes to wake up. */
static const double POLL = 2e-3, SHORT_POLL = 50e-6;

typedef struct LaneDevice LaneDevice;

/* A posted op. */
typedef struct {
    Op op;          /* its lane is the queue that it is in, its moves are a copy */
    Lane lane;      /* the lane that it was posted for */
    uint64_t order; /* number of ops of all lanes that were posted before it */
    size_t bytes;   /* bytes that it moves */
    bool ends;      /* its segment ends with it */
} Posted;

/* A slowed link. The lanes on it share it equally, so one number says how far all of them are: a
 * lane that needs `bytes` has them when `served` has grown by as much. */
typedef struct {
    int busy;            /* lanes on it */
    double at;           /* the time of the last update */
    double served;       /* bytes that a lane which was always on it would have got by then */
    pthread_cond_t left; /* signalled when a lane has left, so that the others are faster, or an op
                            has failed */
} Link;

/* A span: ops of a stream that begin one behind the other and belong to one call. */
typedef struct {
    Slice slice;
    double posted;
    bool timed;
} Span;

/* A lane: its queue, its thread, and on a stream its marks and spans. */
typedef struct {
    LaneDevice *device;
    int index;
    bool is_stream;
    pthread_t thread;
    bool started;                 /* its thread runs and is to be joined */
    pthread_cond_t ready_cond;    /* wakes its thread, which may go on */
    pthread_cond_t progress_cond; /* wakes those who wait for its ops */
    uint64_t posted;              /* ops in the queue so far */
    uint64_t whole;               /* ops up to the last that ends a segment: these may begin */
    uint64_t begun;               /* ops that have run, or have been given to the stream */
    uint64_t waitable;   /* ops that others can wait for: they are done, or on a stream have a mark
                            behind them */
    uint64_t awaited;    /* the first op that someone sleeps for, on progress_cond */
    uint64_t retired;    /* on a stream: ops known to have happened */
    uint64_t mark[RING]; /* on a stream: the op whose mark ends this one's span */
    int sleepers[RING];  /* threads that sleep until a mark, which may not be reused meanwhile */
    Span span[RING];     /* on a stream: indexed by its first op */
    double began;  /* time at which the current op began to run or to be posted; INFINITY: there is
                      none */
    double noted;  /* time at which the newest op (on a stream: slice) ended */
    bool on_link;  /* on its slowed link; it leaves when its next op is not ready */
    double served; /* Link.served at which its op is done */
    double copied, took; /* bytes and seconds of recent copies; older ones weigh less */
    Posted *queue;       /* ring buffer of LaneDevice.capacity */
} LaneState;

/* The host device or the cuda device. */
struct LaneDevice {
    Device base;
    Arenas arenas;
    Gpu *gpu;             /* NULL: the host device */
    const GpuCalls *call; /* the functions of gpu */
    pthread_mutex_t lock; /* guards everything below and the lanes' counters */
    uint64_t nposted;
    bool closing, failed;
    bool one_stream; /* FINISH and PROJECT share a stream */
    Graphs *graphs;  /* of that stream, if there is one batch alone; else NULL */
    bool mixes;      /* sweeps mix prompts with new tokens, and divide their seconds by how busy the
                       lanes were */
    Error error;
    LaneState lane[NLANES];
    Link link[NCHANNELS];
    double gpu_ahead;  /* seconds by which the GPU's clock, started with ours, is ahead now */
    uint64_t capacity; /* ops that a queue has room for */
    Reach reach;
};

// -------------------------------------------------------------------------------------------------
// Lanes
// -------------------------------------------------------------------------------------------------

/* Keeps the first error, and makes all later ops do nothing, and none wait for its link. All
 * functions up to device_post are called with the lock held. */
static void note_failure(LaneDevice *d, const Error *err) {
    if (d->failed)
        return;
    d->error = *err;
    d->failed = true;
    for (int c = 0; c < NCHANNELS; c++)
        pthread_cond_broadcast(&d->link[c].left);
}

/* Returns a time before which no slice begins that is still to be noted. */
static double lanes_settled(const LaneDevice *d) {
    double first = seconds_now();
    for (int l = 0; l < NLANES; l++) {
        const LaneState *lane = &d->lane[l];
        first = fmin(first, lane->on_link ? fmin(lane->began, lane->noted) : lane->began);
        if (lane->is_stream && lane->begun > lane->retired)
            first = fmin(first, lane->span[(lane->retired + 1) % RING].posted);
    }
    return first;
}

/* Notes the slice of a span that has happened. The GPU's clock does not run quite as ours does, but
 * the span began after it was posted, and has ended by now. */
static void note_span(LaneDevice *d, LaneState *lane, uint64_t first, double took) {
    Span *span = &lane->span[first % RING];
    double begin = d->call->began(d->gpu, lane->index, first), end = begin + took;
    d->gpu_ahead = fmax(d->gpu_ahead, end - seconds_now());
    d->gpu_ahead = fmin(d->gpu_ahead, begin - span->posted);
    begin = fmax(begin - d->gpu_ahead, lane->noted);
    lane->noted = fmax(end - d->gpu_ahead, lane->noted);
    span->slice.begin = begin;
    span->slice.end = lane->noted;
    trace_add(d->base.trace, &span->slice, lanes_settled(d));
}

/* Counts and notes a stream's ops up to the mark behind op `last`, which have happened. */
static void retire(LaneDevice *d, LaneState *lane, uint64_t last) {
    while (lane->retired < last) {
        uint64_t first = lane->retired + 1, end = lane->mark[first % RING];
        const Span *span = &lane->span[first % RING];
        double took = span->timed ? d->call->took(d->gpu, lane->index, first, end) : 0;
        count_busy(d->base.count, &span->slice, took);
        if (d->base.trace)
            note_span(d, lane, first, took);
        lane->retired = end;
    }
}

/* Sleeps until the lane has made progress towards op seq. It may wake too early: the caller checks
 * again. */
static void sleep_on(LaneDevice *d, LaneState *lane, uint64_t seq) {
    if (seq < lane->awaited)
        lane->awaited = seq;
    pthread_cond_wait(&lane->progress_cond, &d->lock);
}

/* Returns the place of the lane's first op in the order of posting, or NOT_READY if it cannot begin
 * now. */
static uint64_t first_order(const LaneDevice *d, const LaneState *lane) {
    const Posted *job = &lane->queue[lane->begun % d->capacity];
    if (lane->begun >= lane->whole)
        return NOT_READY;
    for (const Event *e = job->op.after; e < job->op.after + job->op.nafter; e++)
        if (d->lane[e->lane].waitable < e->seq)
            return NOT_READY;
    return job->order;
}

/* Wakes the lane's thread if the first op can begin. PROJECT's serves FINISH too. */
static void wake_ready(LaneDevice *d, const LaneState *lane) {
    if (first_order(d, lane) != NOT_READY)
        pthread_cond_signal(&d->lane[lane->index == FINISH ? PROJECT : lane->index].ready_cond);
}

/* Ends a segment with op seq of the lane. */
static void end_segment(LaneDevice *d, LaneState *lane, uint64_t seq) {
    if (seq > lane->begun)
        lane->queue[(seq - 1) % d->capacity].ends = true;
    if (seq > lane->whole) {
        lane->whole = seq;
        wake_ready(d, lane);
    }
}

/* Ends the segment of the ops that are held back, before the thread that posts waits: it will not
 * post the rest meanwhile. */
static void hold_nothing(LaneDevice *d) {
    end_segment(d, &d->lane[PROJECT], d->lane[PROJECT].posted);
}

/* Wakes those who may go on after the lane has made progress, and only those: waking a thread takes
 * longer than most ops of a small model. */
static void wake_waiting(LaneDevice *d, LaneState *lane) {
    if (lane->begun >= lane->awaited) {
        lane->awaited = UINT64_MAX;
        pthread_cond_broadcast(&lane->progress_cond);
    }
    for (int i = 0; i < NLANES; i++)
        wake_ready(d, &d->lane[i]);
}

/* Sleeps until a stream has done op seq, which has been posted there with a mark behind it. The
 * lock is free meanwhile. */
static void sleep_until(LaneDevice *d, LaneState *lane, uint64_t seq) {
    if (d->failed || lane->retired >= seq)
        return;
    uint64_t mark = lane->mark[seq % RING];
    Error err;
    lane->sleepers[mark % RING]++;
    pthread_mutex_unlock(&d->lock);
    int status = d->call->sync(d->gpu, lane->index, mark, &err);
    pthread_mutex_lock(&d->lock);
    if (!--lane->sleepers[mark % RING])
        pthread_cond_broadcast(&lane->progress_cond);
    if (status)
        note_failure(d, &err);
    else
        retire(d, lane, mark);
}

/* Sleeps until the event has happened. If a stream waits for a stream, sleeps only until it can be
 * told to. waiter NULL: the thread that posts. */
static void await(LaneDevice *d, LaneState *waiter, Event e) {
    LaneState *lane = &d->lane[e.lane];
    while (lane->waitable < e.seq)
        sleep_on(d, lane, e.seq);
    if (!lane->is_stream || waiter == lane)
        return;
    if (!waiter || !waiter->is_stream)
        sleep_until(d, lane, e.seq);
    else if (!d->failed && lane->retired < e.seq)
        d->failed =
            d->call->after(d->gpu, waiter->index, lane->index, lane->mark[e.seq % RING], &d->error);
}

/* Sets a mark behind the ops that a stream has been given, so that others can wait for them. One
 * mark serves a span of ops that begin one behind the other: marks take the GPU's time. */
static void end_span(LaneDevice *d, LaneState *lane) {
    uint64_t last = lane->begun;
    if (lane->waitable == last)
        return;
    while (lane->sleepers[last % RING])
        pthread_cond_wait(&lane->progress_cond, &d->lock); /* the sleepers are about to wake */
    for (uint64_t seq = lane->waitable + 1; seq <= last; seq++)
        lane->mark[seq % RING] = last;
    if (!d->failed)
        d->failed = d->call->end(d->gpu, lane->index, last,
                                 lane->span[(lane->waitable + 1) % RING].timed, &d->error);
    lane->waitable = last;
    wake_waiting(d, lane);
}

/* Returns the slice of a job. Without a trace it counts for the lane whose queue it was in. */
static Slice slice_of_job(const LaneDevice *d, const Posted *job, double begin, double end) {
    Slice slice = slice_of(&job->op, job->bytes, begin, end);
    if (d->base.trace)
        slice.lane = job->lane;
    return slice;
}

/* Returns true if a trace has to tell the op from the span that it could join, since it belongs to
 * another call. */
static bool is_other_call(const LaneDevice *d, const LaneState *lane, const Posted *job) {
    const Slice slice = slice_of_job(d, job, 0, 0),
                *span = &lane->span[(lane->waitable + 1) % RING].slice;
    return d->base.trace && lane->begun != lane->waitable &&
           (span->lane != slice.lane || !same_call(span, &slice));
}

/* Makes the stream wait for the ops that its next n ops, of which the first is given, depend on.
 * Ops without events of their own belong to the span before them. */
static void begin_on_stream(LaneDevice *d, LaneState *lane, const Posted *job, int n) {
    const Op *op = &job->op;
    uint64_t seq = lane->begun + 1, last = lane->begun + n;
    if (op->nafter || last - lane->waitable > RING / 2 || is_other_call(d, lane, job))
        end_span(d, lane);
    if (last > RING) /* their marks are reused; no stream is farther ahead of the GPU */
        sleep_until(d, lane, last - RING);
    if (lane->begun != lane->waitable) {
        lane->span[(lane->waitable + 1) % RING].slice.bytes += job->bytes;
        return;
    }
    for (int i = 0; i < op->nafter; i++)
        await(d, lane, op->after[i]);
    bool timed = d->base.trace || d->mixes;
    lane->span[seq % RING] = (Span){slice_of_job(d, job, 0, 0), lane->began = seconds_now(), timed};
    if (timed && !d->failed)
        d->failed = d->call->begin(d->gpu, lane->index, seq, &d->error);
}

// -------------------------------------------------------------------------------------------------
// Slowed links
// -------------------------------------------------------------------------------------------------

/* Returns the rate in bytes/s to which the job is slowed; 0: it is not. */
static double link_rate(const LaneDevice *d, const Posted *job) {
    Channel c = lane_channel[job->op.lane];
    return d->gpu || c == GPU || c == CPU || !job->bytes ? 0 : d->base.link[c];
}

/* Updates served to now. */
static void link_advance(Link *link, double rate) {
    double t = seconds_now();
    if (link->busy)
        link->served += (t - link->at) * rate / link->busy;
    link->at = t;
}

/* Sleeps until the lane has all its bytes, or will have them in `early` seconds. The lock is free
 * meanwhile. */
static void link_wait(LaneDevice *d, const LaneState *lane, Link *link, double rate, double early) {
    for (;;) {
        link_advance(link, rate);
        double rest = (lane->served - link->served) * link->busy / rate - early;
        if (d->failed || rest <= 0)
            return;
        /* if no lane leaves before; a lane that joins makes it later */
        cond_wait_until(&link->left, &d->lock, link->at + fmin(rest, 1e6));
    }
}

/* Waits before a job's copy, so that it takes as long as its bytes on the link. The real copy comes
 * last, and the wait before it is shorter by the time that copies take. Threads wake late: an op
 * that was ready begins where the one before it should have ended. */
static void link_begin(LaneDevice *d, LaneState *lane, Link *link, double rate, size_t bytes) {
    link_advance(link, rate);
    if (!lane->on_link) {
        lane->on_link = true;
        lane->served = link->served;
        link->busy++;
    }
    lane->served = fmax(lane->served, link->served - CATCH_UP * rate) + bytes;
    link_wait(d, lane, link, rate, lane->copied ? bytes * lane->took / lane->copied : 0);
}

/* Takes the lane off its link after its last op that could begin, so that the others get its share.
 */
static void link_leave(LaneDevice *d, LaneState *lane) {
    Link *link = &d->link[lane_channel[lane->index]];
    if (!lane->on_link)
        return;
    link_advance(link, d->base.link[lane_channel[lane->index]]);
    lane->on_link = false;
    link->busy--;
    pthread_cond_broadcast(&link->left);
}

// -------------------------------------------------------------------------------------------------
// Threads, posting, waiting
// -------------------------------------------------------------------------------------------------

/* Runs the ops of a segment on the stream that it belongs to. The lock is free meanwhile. */
static void run_segment(LaneDevice *d, const LaneState *lane, int n) {
    Op *op[SEGMENT];
    Error err;
    for (int i = 0; i < n; i++)
        op[i] = &lane->queue[(lane->begun + i) % d->capacity].op;
    pthread_mutex_unlock(&d->lock);
    int status = graphs_run(d->graphs, op, n, &err);
    pthread_mutex_lock(&d->lock);
    if (status)
        note_failure(d, &err);
}

/* Runs a job and notes it. The lock is free while it runs. */
static void run_job(LaneDevice *d, LaneState *lane, Posted *job) {
    Link *link = &d->link[lane_channel[lane->index]];
    double rate = link_rate(d, job), begin = lane->on_link ? lane->noted : seconds_now();
    Error err;
    lane->began = fmin(lane->began, begin);
    if (rate > 0)
        link_begin(d, lane, link, rate, job->bytes);
    if (d->failed)
        return;
    pthread_mutex_unlock(&d->lock);
    double start = seconds_now();
    int status = arenas_run(&d->arenas, &job->op, &err);
    double end = seconds_now();
    pthread_mutex_lock(&d->lock);
    if (status)
        note_failure(d, &err);
    if (lane->is_stream)
        return; /* a stream's seconds come from its marks */
    if (rate > 0) {
        lane->took = MEMORY * lane->took + end - start;
        lane->copied = MEMORY * lane->copied + job->bytes;
        link_wait(d, lane, link, rate, 0); /* the copy was faster than expected */
        end = seconds_now();
    }
    lane->noted = end;
    Slice slice = slice_of_job(d, job, begin, end);
    count_busy(d->base.count, &slice, end - begin);
    if (d->base.trace && !d->failed)
        trace_add(d->base.trace, &slice, lanes_settled(d));
}

/* Runs the lane's first segment when the events of its first op have all happened, or on streams
 * been posted. Other ops of a segment have no events. */
static void run_first(LaneDevice *d, LaneState *lane) {
    Posted *job = &lane->queue[lane->begun % d->capacity];
    int delay = d->base.delay_us[lane->index], n = 1;
    while (!lane->queue[(lane->begun + n - 1) % d->capacity].ends)
        n++;
    for (int i = 0; i < job->op.nafter && !lane->is_stream; i++)
        await(d, lane, job->op.after[i]);
    if (delay && !d->failed) {
        link_leave(d, lane);
        pthread_mutex_unlock(&d->lock);
        usleep(delay);
        pthread_mutex_lock(&d->lock);
    }
    if (d->base.stop && __atomic_load_n(d->base.stop, __ATOMIC_RELAXED))
        note_failure(d, &(Error){EXIT_FAILED, "stopped"}); /* a signal, for example */
    if (lane->is_stream)
        begin_on_stream(d, lane, job, n);
    if (!d->failed && n > 1)
        run_segment(d, lane, n);
    else if (!d->failed)
        run_job(d, lane, job);
    lane->began = INFINITY;
    if (job->op.code == OP_COPY) /* which is a segment */
        free((void *)job->op.moves);
    lane->begun += n;
    if (!lane->is_stream)
        lane->waitable = lane->begun;
    wake_waiting(d, lane);
}

/* Is the thread of a lane, or of the two that share the GPU. */
static void *lane_main(void *arg) {
    LaneState *lane = arg;
    LaneDevice *d = lane->device;
    LaneState *other = lane->index == PROJECT ? &d->lane[FINISH] : lane;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        Lane turn = gpu_turn(first_order(d, lane), first_order(d, other));
        if (turn != NLANES) {
            run_first(d, turn == FINISH ? other : lane);
            continue;
        }
        link_leave(d, lane);
        if (lane->waitable != lane->begun || other->waitable != other->begun) {
            end_span(d, lane); /* others may wait for ops of them */
            end_span(d, other);
        } else if (d->closing && lane->waitable == lane->posted &&
                   other->waitable == other->posted) {
            break;
        } else {
            pthread_cond_wait(&lane->ready_cond, &d->lock);
        }
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Fills the job of an op in a queue. Events of the queue itself are dropped: they have happened
 * when the op begins. */
static void enqueue(Posted *job, const Op *op, Lane queue) {
    job->op = *op;
    job->op.lane = queue;
    job->lane = op->lane;
    job->ends = false;
    job->op.nafter = 0;
    for (int i = 0; i < op->nafter; i++)
        if (op->after[i].lane != (int)queue)
            job->op.after[job->op.nafter++] = op->after[i];
}

/* Returns true if an op in a queue is held back until its segment is whole: until there are SEGMENT
 * ops, or one with events of its own, or until somebody waits. In a trace none is: it tells calls
 * apart. */
static bool may_be_held(const LaneDevice *d, const Op *op, Lane queue) {
    return d->graphs && queue == PROJECT && op->code != OP_COPY && !d->base.trace &&
           !d->base.no_graph;
}

/* Queues an op; waits only if the queue is full. */
static Event device_post(Device *base, const Op *op) {
    LaneDevice *d = (LaneDevice *)base;
    Lane queue = d->one_stream && op->lane == FINISH ? PROJECT : op->lane;
    LaneState *lane = &d->lane[queue];
    const Tensor *lengths = op_lengths(op);
    Move *moves = NULL;
    if (op->code == OP_COPY)
        moves = memcpy(xcalloc(op->nmoves, sizeof *moves), op->moves, op->nmoves * sizeof *moves);
    if (!d->nposted)
        d->arenas.net = base->net; /* no lane has begun yet */
    reach_op(&d->reach, op);
    size_t bytes =
        op_count(&base->count[op->lane], op, lengths ? arenas_indices(&d->arenas, *lengths) : NULL);
    pthread_mutex_lock(&d->lock);
    while (lane->posted - lane->waitable == d->capacity)
        sleep_on(d, lane, lane->begun + 1);
    Posted *job = &lane->queue[lane->posted % d->capacity];
    enqueue(job, op, queue);
    job->order = d->nposted++;
    job->bytes = bytes;
    if (moves)
        job->op.moves = moves;
    Event event = {queue, ++lane->posted};
    bool alone = !may_be_held(d, op, queue);
    if (alone || job->op.nafter)
        end_segment(d, lane, event.seq - 1);
    if (alone || event.seq - lane->whole == SEGMENT)
        end_segment(d, lane, event.seq);
    for (const Event *e = job->op.after; e < job->op.after + job->op.nafter; e++)
        end_segment(d, &d->lane[e->lane], e->seq);
    pthread_mutex_unlock(&d->lock);
    return event;
}

static int device_wait(Device *base, Event e, Error *err) {
    LaneDevice *d = (LaneDevice *)base;
    pthread_mutex_lock(&d->lock);
    hold_nothing(d);
    await(d, NULL, e);
    if (d->gpu && __atomic_load_n(d->gpu->bad, __ATOMIC_RELAXED)) {
        Error bad;
        logits_not_finite(&bad);
        note_failure(d, &bad);
    }
    bool failed = d->failed;
    if (failed)
        *err = d->error;
    pthread_mutex_unlock(&d->lock);
    return failed ? -1 : 0;
}

/* Is called by several threads at once. */
static void device_upload(Device *base, Tensor dst, size_t first, const void *src, size_t count) {
    LaneDevice *d = (LaneDevice *)base;
    Error err;
    int status = arenas_upload(&d->arenas, dst, first, src, count, &err);
    pthread_mutex_lock(&d->lock);
    reach_note(&d->reach, dst);
    if (status)
        note_failure(d, &err);
    pthread_mutex_unlock(&d->lock);
}

static void *device_host(Device *base, Tensor t) {
    LaneDevice *d = (LaneDevice *)base;
    CHECK(t.tier == TIER_CPU);
    reach_note(&d->reach, t);
    return arenas_address(&d->arenas, t);
}

static double device_now(Device *base) {
    (void)base;
    return seconds_now();
}

// -------------------------------------------------------------------------------------------------
// Opening and closing
// -------------------------------------------------------------------------------------------------

/* Ends the threads, which skip all ops that are still queued, and frees everything. */
static void device_close(Device *base) {
    LaneDevice *d = (LaneDevice *)base;
    pthread_mutex_lock(&d->lock);
    d->closing = true;
    note_failure(d, &(Error){0});
    hold_nothing(d);
    for (int i = 0; i < NLANES; i++)
        pthread_cond_signal(&d->lane[i].ready_cond);
    pthread_mutex_unlock(&d->lock);
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].started)
            pthread_join(d->lane[i].thread, NULL);
    for (int i = 0; i < NLANES; i++) { /* not before, since lanes signal each other */
        pthread_cond_destroy(&d->lane[i].ready_cond);
        pthread_cond_destroy(&d->lane[i].progress_cond);
        free(d->lane[i].queue);
    }
    graphs_close(d->graphs);
    arenas_close(&d->arenas);
    pthread_mutex_destroy(&d->lock);
    for (int c = 0; c < NCHANNELS; c++)
        pthread_cond_destroy(&d->link[c].left);
    free(d);
}

static void init_lanes(LaneDevice *d) {
    pthread_mutex_init(&d->lock, NULL);
    for (int i = 0; i < NLANES; i++) {
        LaneState *lane = &d->lane[i];
        lane->device = d;
        lane->index = i;
        lane->is_stream = arenas_is_stream(&d->arenas, i);
        lane->awaited = UINT64_MAX;
        lane->began = INFINITY;
        lane->queue = xcalloc(d->capacity, sizeof *lane->queue);
        pthread_cond_init(&lane->ready_cond, NULL);
        pthread_cond_init(&lane->progress_cond, NULL);
    }
    for (int c = 0; c < NCHANNELS; c++)
        cond_open(&d->link[c].left); /* it uses the clock of seconds_now */
}

/* Starts the threads of the lanes. */
static int start_lanes(LaneDevice *d, Error *err) {
    for (int i = 0; i < NLANES; i++) {
        LaneState *lane = &d->lane[i];
        if (i == FINISH || (lane_channel[i] == NET && d->reach.plan->config.stages < 2))
            continue; /* PROJECT's thread serves FINISH; without a pipeline nothing is sent */
        int status = pthread_create(&lane->thread, NULL, lane_main, lane);
        lane->started = !status;
        if (status)
            return fail_to_start(err, status);
    }
    return 0;
}

Device *device_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint,
                    const char *offload_dir, Error *err) {
    LaneDevice *d = xcalloc(1, sizeof *d);
    d->base = (Device){.name = gpu ? "cuda" : "host",
                       .act_type = gpu ? F16 : F32,
                       .post = device_post,
                       .upload = device_upload,
                       .wait = device_wait,
                       .cpu_address = device_host,
                       .now = device_now,
                       .close = device_close};
    CHECK(plan->act_type == d->base.act_type);
    d->gpu = d->arenas.gpu = gpu;
    d->one_stream = gpu && (plan->batches == 1 || !plan->off_seqs);
    if (gpu && plan->batches == 1)
        d->graphs = graphs_open(&d->arenas, &d->base.notice);
    d->mixes = plan->policy.schedule == SCHEDULE_DIAGONAL;
    if (gpu) {
        d->call = gpu->call;
        /* with one batch no other work is done while a thread wakes up */
        gpu->poll_s = plan->batches > 1 ? 0 : plan->policy.delegated ? SHORT_POLL : POLL;
    }
    reach_open(&d->reach, d->base.peak, plan);
    d->capacity = RING;
    /* A stage of a pipeline must not wait for room in a queue before it has begun all batches of a
     * sweep: pipeline.c says why. One of these may have many pieces. */
    if (plan->config.stages > 1)
        d->capacity += SQUARE_OPS * (plan->batches + plan->pieces);
    init_lanes(d);
    if (host_threads_missing())
        fail(&d->base.notice, EXIT_OK,
             "%d of %d threads compute: no more can be started (see ulimit -u and the control "
             "group's pids limit)",
             host_threads(), host_threads() + host_threads_missing());
    if (!arenas_open(&d->arenas, plan, checkpoint, offload_dir, &d->base.notice, err) &&
        !start_lanes(d, err))
        return &d->base;
    device_close(&d->base);
    return NULL;
}
