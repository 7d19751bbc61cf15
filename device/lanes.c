/* lanes.c: two devices, the one that is this CPU and the one that is a GPU beside it. In-order lanes, events, copies,
 * counters.
 *
 * A lane is a queue with a thread. An op begins when all its `after` events have happened and everything before it in its
 * lane is done; its own event is its place in the lane. PROJECT and FINISH share the GPU, and so a thread. The CPU tier is
 * an arena in memory with the planned size, the disk an unlinked file that exists as long as its descriptor does, so that
 * no way of ending leaves it behind. Appends of single tokens go through the mapping of that file; bulk traffic reads and
 * writes it, and drops what it touched from the page cache, so that the CPU tier's limit stays honest.
 *
 * On the host device the GPU tier is another arena, and every lane's thread does the work itself. On the cuda device it is
 * memory of the GPU. A lane that touches that is a stream, and its thread only posts there: it waits until what an op needs
 * is done or, on other streams, posted, tells its stream to wait for those, and goes on ahead of the GPU. The lanes of the
 * disk and of the CPU's attention are as on the host.
 *
 * The host device's links can be slowed (Device.link), to show on a laptop what a PCIe link or a disk does to a schedule.
 * The lanes that are busy on a link share it equally, as in the sim. An op first waits until its bytes would have crossed
 * and copies them then, so that an event that is missing shows; the wait counts as busy, since the link is.
 *
 * With a trace every op is noted when it has ended: on a stream by groups between two marks, which then are of one call of
 * Figure 4 each, in times of the GPU's clock brought to ours.
 *
 * The first op that fails makes all later ones do nothing; wait reports it. Contract: one thread posts. Arithmetic is in
 * host.c and flexgen.cu. Read next: host.c. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "device/device.h"
#include "io/io.h"

const Channel lane_channel[NLANES] = {DTOC, CTOG, DTOC, CTOG, GTOC, CTOD, GTOC, CTOG, GPU, GPU, CPU};
const char *const lane_name[NLANES] = {"read weights",   "load weights", "read cache", "load cache", "store", "write",
                                       "attention down", "attention up", "project",    "finish",     "attend"};
const char *const channel_name[NCHANNELS] = {"ctog", "gtoc", "dtoc", "ctod", "gpu", "cpu"};

enum { RING = MARKS, BLOCK = 4096, BOUNCE = 4 << 20, DIRECT_MIN = 1 << 18 };

static const double CATCH_UP = 4e-3; /* of a slowed link: seconds that a lane may be late and still catch up */
static const double MEMORY = 0.875;  /* a copy leaves so much of what is remembered of those before it */

typedef struct LaneDevice LaneDevice;
typedef struct Posted Posted;

/* A posted op: what run needs, by value. */
struct Posted {
    Op op;
    uint64_t order; /* how many ops of all lanes were posted before it */
    int (*run)(LaneDevice *, const Posted *, Error *);
    Tensor t[5];
    PageTable table, home;
    double sparsity;
    Sampling sampling;
    bool flag; /* add, relu */
    int nh;
    size_t bytes;        /* that it moves, for the counters */
    size_t move, nmoves; /* in the lane's ring of moves */
};

/* A slowed link. The lanes on it share it equally, so one number tells how far all of them are: a lane that needs `bytes`
 * has them when served has grown by so much. */
typedef struct {
    int busy;            /* lanes that are on it */
    double at, served;   /* by that time a lane that was always on it would have been given so many bytes */
    pthread_cond_t left; /* a lane has left, so that the others are faster, or an op has failed */
} Link;

/* Ops of a stream that begin one behind the other and belong to one call. */
typedef struct {
    Op op; /* the first */
    size_t bytes;
    double posted;
} Group;

typedef struct {
    LaneDevice *device;
    int index;
    pthread_t thread;
    pthread_cond_t posted_cond, done_cond;
    uint64_t posted, begun, done; /* ops so far; on a stream done means posted there, with a mark behind */
    uint64_t retired;             /* of a stream: ops known to have happened */
    uint64_t mark[RING];          /* of a stream: the op behind which the mark is that ends this one's group */
    int sleepers[RING];           /* threads that sleep until a mark, which may not be set anew meanwhile */
    Posted ring[RING];
    Group group[RING];   /* of a stream: by its first op */
    double noted;        /* when the newest op, of a stream the newest slice, ended */
    bool on_link;        /* on its slowed link: from an op that had to wait to one behind which no other is ready */
    double served;       /* Link.served at which its op is done */
    double copied, took; /* recent copies: bytes and seconds, the older the less */
    Move *moves;         /* ring of move_capacity */
    uint64_t moves_posted, moves_done;
    uint8_t *bounce; /* BOUNCE bytes for direct reads, on the lanes that read the disk */
} LaneState;

struct LaneDevice {
    Device base;
    Gpu *gpu; /* NULL: the host device */
    bool pinned;
    const Checkpoint *checkpoint;
    uint8_t *arena[NTIERS]; /* TIER_DISK: the mapping of the offload file; TIER_GPU with a GPU: an address there */
    size_t bytes[NTIERS];
    int offload_fd;
    int *direct; /* [1 + files of the checkpoint] descriptors that pass the page cache by; -1: there is none */
    int nfiles;
    pthread_mutex_t lock;    /* guards everything below and the lanes' counters */
    pthread_cond_t gpu_cond; /* something happened that PROJECT or FINISH may wait for */
    uint64_t nposted;
    bool stop, failed;
    Error error;
    LaneState lane[NLANES];
    Link link[NCHANNELS];
    double gpu_ahead; /* seconds by which the GPU's clock, begun with ours, is ahead now */
    size_t move_capacity;
    size_t tables[2]; /* where the index tables lie on GPU and CPU: mirrors of each other */
    Reach reach;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------------
// Views
// ---------------------------------------------------------------------------------------------------------------

static void *address(LaneDevice *d, Tensor t) {
    CHECK(t.tier < NTIERS && t.file == 0);
    CHECK(t.offset <= d->bytes[t.tier] && tensor_span(t) <= d->bytes[t.tier] - t.offset);
    return d->arena[t.tier] + t.offset;
}

static void touch(LaneDevice *d, Tensor t) {
    pthread_mutex_lock(&d->lock);
    reach_note(&d->reach, d->base.peak, t);
    pthread_mutex_unlock(&d->lock);
}

// ---------------------------------------------------------------------------------------------------------------
// Lanes
// ---------------------------------------------------------------------------------------------------------------

static bool is_stream(const LaneDevice *d, int lane) {
    Channel c = lane_channel[lane];
    return d->gpu && (c == GPU || c == CTOG || c == GTOC);
}

/* From now on ops do nothing, and none waits for its link. With the lock held, as everywhere up to post. */
static void give_up(LaneDevice *d) {
    d->failed = true;
    for (int c = 0; c < NCHANNELS; c++) pthread_cond_broadcast(&d->link[c].left);
}

/* The first fault stays. */
static void note_failure(LaneDevice *d, const Error *err) {
    if (d->failed) return;
    d->error = *err;
    give_up(d);
}

/* A slice for a group that has happened. The GPU's clock does not run quite as ours does, but what has begun was posted
 * before, and what has ended has ended by now. */
static void note_group(LaneDevice *d, LaneState *lane, uint64_t first, double took) {
    const Group *group = &lane->group[first % RING];
    double begin = d->gpu->began(d->gpu, lane->index, first), end = begin + took;
    d->gpu_ahead = fmax(d->gpu_ahead, end - now());
    d->gpu_ahead = fmin(d->gpu_ahead, begin - group->posted);
    begin = fmax(begin - d->gpu_ahead, lane->noted);
    lane->noted = fmax(end - d->gpu_ahead, lane->noted);
    trace_add(d->base.trace, &group->op, group->bytes, begin, lane->noted);
}

/* A stream's ops up to the mark behind op `last` have happened. */
static void retire(LaneDevice *d, LaneState *lane, uint64_t last) {
    while (lane->retired < last) {
        uint64_t first = lane->retired + 1, end = lane->mark[first % RING];
        double took = d->gpu->took(d->gpu, lane->index, first, end);
        d->base.count[lane->index].busy_s += took;
        if (d->base.trace) note_group(d, lane, first, took);
        lane->retired = end;
    }
}

/* Sleeps until a stream, which has been given op seq and a mark behind it, has done it. The lock is free meanwhile. */
static void sleep_until(LaneDevice *d, LaneState *lane, uint64_t seq) {
    if (d->failed || lane->retired >= seq) return;
    uint64_t mark = lane->mark[seq % RING];
    Error err;
    lane->sleepers[mark % RING]++;
    pthread_mutex_unlock(&d->lock);
    int status = d->gpu->sync(d->gpu, lane->index, mark, &err);
    pthread_mutex_lock(&d->lock);
    if (!--lane->sleepers[mark % RING]) pthread_cond_broadcast(&lane->done_cond);
    if (status)
        note_failure(d, &err);
    else
        retire(d, lane, mark);
}

/* Sleeps until the event has happened; where a stream waits for a stream, only until it can be told to. waiter: NULL for
 * the thread that posts. */
static void await(LaneDevice *d, LaneState *waiter, Event e) {
    LaneState *lane = &d->lane[e.lane];
    Error err;
    while (lane->done < e.seq) pthread_cond_wait(&lane->done_cond, &d->lock);
    if (!is_stream(d, e.lane) || waiter == lane) return;
    if (!waiter || !is_stream(d, waiter->index))
        sleep_until(d, lane, e.seq);
    else if (!d->failed && lane->retired < e.seq &&
             d->gpu->after(d->gpu, waiter->index, lane->index, lane->mark[e.seq % RING], &err))
        note_failure(d, &err);
}

/* Sets a mark behind what a stream has been given, so that others can wait for it. One mark serves a group of ops that
 * begin one behind the other: marks take the GPU's time. */
static void end_group(LaneDevice *d, LaneState *lane) {
    uint64_t last = lane->begun;
    Error err;
    if (lane->done == last) return;
    while (lane->sleepers[last % RING]) pthread_cond_wait(&lane->done_cond, &d->lock); /* they are about to wake */
    for (uint64_t seq = lane->done + 1; seq <= last; seq++) lane->mark[seq % RING] = last;
    if (!d->failed && d->gpu->end(d->gpu, lane->index, last, &err)) note_failure(d, &err);
    lane->done = last;
    pthread_cond_broadcast(&lane->done_cond);
    pthread_cond_signal(&d->gpu_cond);
}

/* Whether the op belongs to another call than the group that it could join: a trace tells them apart. */
static bool is_other_call(const LaneDevice *d, const LaneState *lane, const Op *op) {
    const Op *first = &lane->group[(lane->done + 1) % RING].op;
    if (!d->base.trace || lane->begun == lane->done) return false;
    return op->kind != first->kind || op->prefill != first->prefill || op->i != first->i || op->j != first->j ||
           op->k != first->k;
}

/* Makes the stream wait for what its next op needs. Ops without events of their own belong to the group before them. */
static void begin_on_stream(LaneDevice *d, LaneState *lane, const Posted *job) {
    const Op *op = &job->op;
    uint64_t seq = lane->begun + 1;
    Error err;
    if (op->nafter || lane->begun - lane->done >= RING / 2 || is_other_call(d, lane, op)) end_group(d, lane);
    if (seq > RING) sleep_until(d, lane, seq - RING); /* its mark is needed again; no stream is farther ahead of the GPU */
    if (lane->begun != lane->done) {
        lane->group[(lane->done + 1) % RING].bytes += job->bytes;
        return;
    }
    for (int i = 0; i < op->nafter; i++) await(d, lane, op->after[i]);
    lane->group[seq % RING] = (Group){*op, job->bytes, now()};
    if (!d->failed && d->gpu->begin(d->gpu, lane->index, seq, &err)) note_failure(d, &err);
}

// ---------------------------------------------------------------------------------------------------------------
// Slowed links
// ---------------------------------------------------------------------------------------------------------------

/* The rate that holds for the job, in bytes/s; 0: no slower than it is. */
static double link_rate(const LaneDevice *d, const Posted *job) {
    Channel c = lane_channel[job->op.lane];
    return d->gpu || c == GPU || c == CPU || !job->bytes ? 0 : d->base.link[c];
}

/* Reckons up to now. */
static void link_advance(Link *link, double rate) {
    double t = now();
    if (link->busy) link->served += (t - link->at) * rate / link->busy;
    link->at = t;
}

/* Sleeps until the lane has got all it needs, or will have in `early` seconds. The lock is free meanwhile. */
static void link_wait(LaneDevice *d, const LaneState *lane, Link *link, double rate, double early) {
    for (;;) {
        link_advance(link, rate);
        double rest = (lane->served - link->served) * link->busy / rate - early;
        if (d->failed || rest <= 0) return;
        double until = link->at + fmin(rest, 1e6); /* if no lane leaves before; one that joins makes it later */
        struct timespec t = {(time_t)until, (long)(1e9 * (until - floor(until)))};
        pthread_cond_timedwait(&link->left, &d->lock, &t);
    }
}

/* Runs a job so that it takes as long as its bytes on the link. The real copy comes last, and the wait before it is shorter
 * by what copies take. Threads wake late; an op that was ready begins where the one before it should have ended. */
static int run_on_link(LaneDevice *d, LaneState *lane, const Posted *job, double rate, Error *err) {
    Link *link = &d->link[lane_channel[lane->index]];
    int status = 0;
    link_advance(link, rate);
    if (!lane->on_link) lane->on_link = true, lane->served = link->served, link->busy++;
    lane->served = fmax(lane->served, link->served - CATCH_UP * rate) + job->bytes;
    link_wait(d, lane, link, rate, lane->copied ? job->bytes * lane->took / lane->copied : 0);
    if (!d->failed) {
        pthread_mutex_unlock(&d->lock);
        double begin = now();
        status = job->run(d, job, err);
        lane->took = MEMORY * lane->took + now() - begin;
        lane->copied = MEMORY * lane->copied + job->bytes;
        pthread_mutex_lock(&d->lock);
        if (!status) link_wait(d, lane, link, rate, 0); /* the copy was faster than expected */
    }
    return status;
}

/* Behind the lane's last op that could begin, so that the others get its share. */
static void link_leave(LaneDevice *d, LaneState *lane) {
    Link *link = &d->link[lane_channel[lane->index]];
    if (!lane->on_link) return;
    link_advance(link, d->base.link[lane_channel[lane->index]]);
    lane->on_link = false;
    link->busy--;
    pthread_cond_broadcast(&link->left);
}

// ---------------------------------------------------------------------------------------------------------------
// Threads, posting, waiting
// ---------------------------------------------------------------------------------------------------------------

/* Runs a job and notes it. The lock is free while it runs. */
static void run_job(LaneDevice *d, LaneState *lane, const Posted *job) {
    double rate = link_rate(d, job), begin = lane->on_link ? lane->noted : now(), end;
    int status;
    Error err;
    if (rate > 0) {
        status = run_on_link(d, lane, job, rate, &err);
        end = now();
    } else {
        pthread_mutex_unlock(&d->lock);
        status = job->run(d, job, &err);
        end = now();
        pthread_mutex_lock(&d->lock);
    }
    if (status) note_failure(d, &err);
    if (is_stream(d, lane->index)) return; /* its marks tell */
    lane->noted = end;
    d->base.count[lane->index].busy_s += end - begin;
    if (d->base.trace && !d->failed) trace_add(d->base.trace, &job->op, job->bytes, begin, end);
}

/* Runs the lane's first op, whose events on lanes that are no streams have all happened. */
static void run_first(LaneDevice *d, LaneState *lane) {
    Posted *job = &lane->ring[lane->begun % RING];
    bool stream = is_stream(d, lane->index);
    int delay = d->base.delay_us[lane->index];
    if (delay && !d->failed) {
        link_leave(d, lane);
        pthread_mutex_unlock(&d->lock);
        usleep(delay);
        pthread_mutex_lock(&d->lock);
    }
    if (stream) begin_on_stream(d, lane, job);
    if (!d->failed) run_job(d, lane, job);
    lane->moves_done += job->nmoves;
    lane->begun++;
    if (!stream) lane->done = lane->begun;
    pthread_cond_broadcast(&lane->done_cond);
    pthread_cond_signal(&d->gpu_cond);
}

/* Whether the lane's first op could begin now. */
static bool first_is_ready(LaneDevice *d, const LaneState *lane) {
    if (lane->begun == lane->posted) return false;
    const Op *op = &lane->ring[lane->begun % RING].op;
    for (int i = 0; i < op->nafter; i++)
        if (op->after[i].lane != lane->index && d->lane[op->after[i].lane].done < op->after[i].seq) return false;
    return true;
}

static void *lane_main(void *arg) {
    LaneState *lane = arg;
    LaneDevice *d = lane->device;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        if (!first_is_ready(d, lane)) link_leave(d, lane);
        while (lane->begun == lane->posted && lane->done == lane->begun && !d->stop)
            pthread_cond_wait(&lane->posted_cond, &d->lock);
        if (lane->begun == lane->posted) {
            if (lane->done == lane->begun) break;
            end_group(d, lane);
            continue;
        }
        const Op *op = &lane->ring[lane->begun % RING].op;
        for (int i = 0; i < op->nafter && !is_stream(d, lane->index); i++) await(d, lane, op->after[i]);
        run_first(d, lane);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* One thread, so one team of OpenMP's, serves both lanes of the GPU: of the two first ops it takes the one that can begin,
 * and of two that can the one that was posted earlier. */
static void *gpu_main(void *arg) {
    LaneDevice *d = arg;
    LaneState *project = &d->lane[PROJECT], *finish = &d->lane[FINISH];
    pthread_mutex_lock(&d->lock);
    for (;;) {
        bool p = first_is_ready(d, project), f = first_is_ready(d, finish);
        if (p && f) f = finish->ring[finish->begun % RING].order < project->ring[project->begun % RING].order;
        if (p || f) {
            run_first(d, f ? finish : project);
        } else if (project->done != project->begun || finish->done != finish->begun) {
            end_group(d, project); /* what the other one waits for may be in them */
            end_group(d, finish);
        } else if (d->stop && project->done == project->posted && finish->done == finish->posted) {
            break;
        } else {
            pthread_cond_wait(&d->gpu_cond, &d->lock);
        }
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Queues the job; waits only where the lane's ring is full. */
static Event post(LaneDevice *d, const Op *op, Posted *job, const Move *moves, int n) {
    LaneState *lane = &d->lane[op->lane];
    CHECK((size_t)n <= d->move_capacity);
    job->op = *op;
    job->nmoves = n;
    d->base.count[op->lane].moved[op->kind] += job->bytes;
    pthread_mutex_lock(&d->lock);
    while (lane->posted - lane->done == RING || lane->moves_posted - lane->moves_done + n > d->move_capacity)
        pthread_cond_wait(&lane->done_cond, &d->lock);
    job->move = lane->moves_posted;
    for (int i = 0; i < n; i++) lane->moves[(lane->moves_posted + i) % d->move_capacity] = moves[i];
    lane->moves_posted += n;
    job->order = d->nposted++;
    lane->ring[lane->posted % RING] = *job;
    Event event = {op->lane, ++lane->posted};
    pthread_cond_signal(lane_channel[op->lane] == GPU ? &d->gpu_cond : &lane->posted_cond);
    pthread_mutex_unlock(&d->lock);
    return event;
}

static int not_finite(Error *err) {
    return fail(err, EXIT_FAILED,
                "the model's logits are not finite: its weights hold NaN, or values too large; check the checkpoint");
}

static int device_wait(Device *base, Event e, Error *err) {
    LaneDevice *d = (LaneDevice *)base;
    pthread_mutex_lock(&d->lock);
    await(d, NULL, e);
    if (d->gpu && __atomic_load_n(d->gpu->bad, __ATOMIC_RELAXED)) {
        Error err;
        not_finite(&err);
        note_failure(d, &err);
    }
    bool failed = d->failed;
    if (failed) *err = d->error;
    pthread_mutex_unlock(&d->lock);
    return failed ? -1 : 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Copies
// ---------------------------------------------------------------------------------------------------------------

/* Makes the kernel forget file pages that the tiers' accounting does not allow it to keep. What was written must be on its
 * way first: a lot is waited for; a little is only sent off, and dropped when it is read. */
static void drop_cache(int fd, size_t offset, size_t bytes, size_t written) {
    if (written && written < DIRECT_MIN) {
        sync_file_range(fd, (off_t)offset, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
        return;
    }
    if (written)
        sync_file_range(fd, (off_t)offset, (off_t)bytes,
                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

static int transfer(int fd, uint8_t *memory, size_t offset, size_t bytes, bool write, Error *err) {
    while (bytes) {
        ssize_t n = write ? pwrite(fd, memory, bytes, (off_t)offset) : pread(fd, memory, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return fail(err, EXIT_FAILED, "the offload file: %s %zu bytes at %zu: %s; check the disk under --offload-dir",
                        write ? "writing" : "reading", bytes, offset, n ? strerror(errno) : "unexpected end");
        memory += n, offset += n, bytes -= n;
    }
    return 0;
}

/* Large reads go around the page cache: whole blocks into the lane's bounce buffer, and what is wanted of them on from
 * there. */
static int read_direct(LaneDevice *d, int lane, int file, uint8_t *memory, size_t offset, size_t bytes, Error *err) {
    uint8_t *bounce = d->lane[lane].bounce;
    size_t begin = offset;
    while (bytes) {
        size_t skip = offset % BLOCK, want = skip + bytes < BOUNCE ? (skip + bytes + BLOCK - 1) / BLOCK * BLOCK : BOUNCE;
        ssize_t n = pread(d->direct[file], bounce, want, (off_t)(offset - skip));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 || (size_t)n <= skip)
            return fail(err, EXIT_FAILED, "%s: reading %zu bytes at %zu: %s; check the disk",
                        file ? d->checkpoint->files[file - 1].path : "the offload file", bytes, offset,
                        n < 0 ? strerror(errno) : "unexpected end");
        size_t got = (size_t)n - skip < bytes ? (size_t)n - skip : bytes;
        memcpy(memory, bounce + skip, got);
        memory += got, offset += got, bytes -= got;
    }
    if (!file) drop_cache(d->offload_fd, begin, offset - begin, 0); /* small writes since the last read are on disk now */
    return 0;
}

static int disk_move(LaneDevice *d, int lane, const Move *m, Error *err) {
    bool write = m->dst.tier == TIER_DISK;
    Tensor disk = write ? m->dst : m->src, memory = write ? m->src : m->dst;
    CHECK(disk.ld == (size_t)disk.cols || disk.rows == 1);
    size_t count = (size_t)disk.rows * disk.cols, bytes = count * type_bytes(disk.type);
    if (!write && disk.type == memory.type && bytes >= DIRECT_MIN && d->direct[disk.file] >= 0)
        return read_direct(d, lane, disk.file, address(d, memory), disk.offset, bytes, err);
    if (disk.file) { /* weights from the checkpoint, which become F16 on the way */
        if (checkpoint_fill(d->checkpoint, address(d, memory), &disk, 0, count, err)) return -1;
        drop_cache(d->checkpoint->files[disk.file - 1].fd, disk.offset, bytes, 0);
        return 0;
    }
    if (transfer(d->offload_fd, address(d, memory), disk.offset, bytes, write, err)) return -1;
    drop_cache(d->offload_fd, disk.offset, bytes, write ? bytes : 0);
    return 0;
}

static int run_copy(LaneDevice *d, const Posted *job, Error *err) {
    LaneState *lane = &d->lane[job->op.lane];
    for (size_t i = 0; i < job->nmoves;
         i++) { /* small reads: the disk hears of all of them before the first is waited for */
        const Move *m = &lane->moves[(job->move + i) % d->move_capacity];
        if (m->src.tier == TIER_DISK && !m->src.file && tensor_span(m->src) < DIRECT_MIN)
            posix_fadvise(d->offload_fd, (off_t)m->src.offset, (off_t)tensor_span(m->src), POSIX_FADV_WILLNEED);
    }
    for (size_t i = 0; i < job->nmoves; i++) {
        const Move *m = &lane->moves[(job->move + i) % d->move_capacity];
        if (m->dst.tier == TIER_DISK || m->src.tier == TIER_DISK) {
            if (disk_move(d, job->op.lane, m, err)) return -1;
            continue;
        }
        uint8_t *dst = address(d, m->dst);
        const uint8_t *src = address(d, m->src);
        size_t size = type_bytes(m->dst.type), row = m->dst.cols * size;
        if (is_stream(d, job->op.lane)) {
            if (d->gpu->copy(d->gpu, job->op.lane, dst, m->dst.ld * size, src, m->src.ld * size, row, m->dst.rows, err))
                return -1;
            continue;
        }
        if (m->dst.ld == (size_t)m->dst.cols && m->src.ld == (size_t)m->src.cols)
            memcpy(dst, src, row * m->dst.rows);
        else
            for (int r = 0; r < m->dst.rows; r++) memcpy(dst + r * m->dst.ld * size, src + r * m->src.ld * size, row);
    }
    return 0;
}

static Event device_copy(Device *base, const Op *op, const Move *moves, int n) {
    LaneDevice *d = (LaneDevice *)base;
    Posted job = {.run = run_copy};
    for (int i = 0; i < n; i++) {
        const Move *m = &moves[i];
        CHECK((size_t)m->dst.rows * m->dst.cols == (size_t)m->src.rows * m->src.cols);
        CHECK(m->dst.type == m->src.type || (m->src.file && m->dst.type == F16));
        touch(d, m->dst);
        touch(d, m->src);
        job.bytes += (size_t)m->src.rows * m->src.cols * type_bytes(m->src.type);
    }
    return post(d, op, &job, moves, n);
}

// ---------------------------------------------------------------------------------------------------------------
// Arithmetic: each function posts, its run_ twin calls host.c
// ---------------------------------------------------------------------------------------------------------------

/* Rows of a table that rests in the checkpoint are read one by one, never through the mapping: a file that shrank is then
 * an error. */
static int embed_from_checkpoint(LaneDevice *d, const Posted *job, uint8_t *y, const int32_t *idx, Error *err) {
    Tensor table = job->t[1];
    Type type = job->t[0].type;
    int cols = table.cols;
    f16 *row = xcalloc(cols, sizeof *row);
    int32_t zero = 0;
    int status = 0;
    for (int r = 0; r < job->t[0].rows && !status; r++) {
        status = checkpoint_fill(d->checkpoint, row, &table, (size_t)idx[r] * cols, cols, err);
        Lookup l = {y + (size_t)r * cols * type_bytes(type), type, row, F16, cols, &zero, 1, cols, job->flag};
        if (!status) host_embed(&l);
    }
    free(row);
    return status;
}

static int run_embed(LaneDevice *d, const Posted *job, Error *err) {
    Tensor y = job->t[0], table = job->t[1];
    void *to = address(d, y);
    const int32_t *idx = address(d, job->t[2]);
    if (table.file) return embed_from_checkpoint(d, job, to, idx, err);
    Lookup l = {to, y.type, address(d, table), table.type, table.ld, idx, y.rows, y.cols, job->flag};
    if (is_stream(d, job->op.lane)) return d->gpu->embed(d->gpu, job->op.lane, &l, err);
    host_embed(&l);
    return 0;
}

static Event device_embed(Device *base, const Op *op, Tensor y, Tensor table, Tensor idx, bool add) {
    LaneDevice *d = (LaneDevice *)base;
    touch(d, y), touch(d, table);
    Posted job = {.run = run_embed, .t = {y, table, idx}, .flag = add};
    if (lane_channel[op->lane] == DTOC) job.bytes = (size_t)y.rows * y.cols * type_bytes(table.type);
    return post(d, op, &job, NULL, 0);
}

static int run_layernorm(LaneDevice *d, const Posted *job, Error *err) {
    void *y = address(d, job->t[0]), *x = address(d, job->t[1]), *w = address(d, job->t[2]), *b = address(d, job->t[3]);
    int rows = job->t[0].rows, cols = job->t[0].cols;
    if (is_stream(d, job->op.lane)) return d->gpu->layernorm(d->gpu, job->op.lane, y, x, w, b, rows, cols, err);
    host_layernorm(y, x, w, b, rows, cols);
    return 0;
}

static Event device_layernorm(Device *base, const Op *op, Tensor y, Tensor x, Tensor w, Tensor b) {
    LaneDevice *d = (LaneDevice *)base;
    touch(d, y), touch(d, x), touch(d, w), touch(d, b);
    Posted job = {.run = run_layernorm, .t = {y, x, w, b}};
    return post(d, op, &job, NULL, 0);
}

static int run_linear(LaneDevice *d, const Posted *job, Error *err) {
    Tensor y = job->t[0], w = job->t[2];
    void *to = address(d, y), *x = address(d, job->t[1]), *weight = address(d, w);
    void *b = job->t[3].rows ? address(d, job->t[3]) : NULL, *residual = job->t[4].rows ? address(d, job->t[4]) : NULL;
    Quant quant = w.type == U8 ? w.quant : (Quant){0};
    Product p = {to, y.type, y.ld, x, weight, b, residual, quant, job->flag, y.rows, y.cols, job->t[1].cols};
    if (is_stream(d, job->op.lane)) return d->gpu->linear(d->gpu, job->op.lane, &p, err);
    host_linear(&p);
    return 0;
}

static Event device_linear(Device *base, const Op *op, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual, bool relu) {
    LaneDevice *d = (LaneDevice *)base;
    if (w.type == U8)
        CHECK(!d->gpu && (size_t)w.rows * w.cols == quant_matrix_bytes(w.quant, y.cols, x.cols));
    else
        CHECK(x.cols == w.cols && y.cols == w.rows && w.type == F16);
    CHECK(y.rows == x.rows && x.type == base->act_type);
    touch(d, y), touch(d, x), touch(d, w), touch(d, b), touch(d, residual);
    Posted job = {.run = run_linear, .t = {y, x, w, b, residual}, .flag = relu};
    return post(d, op, &job, NULL, 0);
}

static int run_unpack(LaneDevice *d, const Posted *job, Error *err) {
    Tensor w = job->t[0], packed = job->t[1];
    f16 *to = address(d, w);
    const uint8_t *from = address(d, packed);
    if (is_stream(d, job->op.lane))
        return d->gpu->unpack(d->gpu, job->op.lane, to, from, w.rows, w.cols, packed.quant, err);
    for (int g = 0, r = 0; r < w.rows; g++, r += packed.quant.group)
        quant_unpack_rows(to + (size_t)r * w.cols, from + (size_t)g * packed.cols, imin(packed.quant.group, w.rows - r),
                          w.cols, packed.quant);
    return 0;
}

static Event device_unpack(Device *base, const Op *op, Tensor w, Tensor packed) {
    LaneDevice *d = (LaneDevice *)base;
    CHECK(w.type == F16 && packed.type == U8 && packed.quant.bits);
    touch(d, w), touch(d, packed);
    Posted job = {.run = run_unpack, .t = {w, packed}};
    return post(d, op, &job, NULL, 0);
}

static int run_attend_prefill(LaneDevice *d, const Posted *job, Error *err) {
    Tensor o = job->t[0], start = job->t[3];
    void *to = address(d, o), *q = address(d, job->t[1]), *kv = address(d, job->t[2]);
    Prefill p = {to, q, kv, address(d, start), start.cols - 1, o.rows, o.cols, job->nh};
    if (is_stream(d, job->op.lane)) return d->gpu->attend_prefill(d->gpu, job->op.lane, &p, err);
    host_attend_prefill(&p);
    return 0;
}

static Event device_attend_prefill(Device *base, const Op *op, Tensor o, Tensor q, Tensor kv, Tensor start, int nh) {
    LaneDevice *d = (LaneDevice *)base;
    touch(d, o), touch(d, q), touch(d, kv);
    Posted job = {.run = run_attend_prefill, .t = {o, q, kv, start}, .nh = nh};
    return post(d, op, &job, NULL, 0);
}

/* What attention to a page table has in common. */
static Attention attention(LaneDevice *d, const Posted *job) {
    const PageTable *p = &job->table;
    return (Attention){.k = address(d, p->k),
                       .v = address(d, p->v),
                       .pages = address(d, p->pages),
                       .len = address(d, p->len),
                       .max_pages = (int)p->pages.ld,
                       .page_tokens = p->page_tokens,
                       .h1 = p->h1,
                       .nh = p->nh,
                       .quant = p->k.quant,
                       .sparsity = job->sparsity};
}

static int run_attend(LaneDevice *d, const Posted *job, Error *err) {
    Tensor o = job->t[0];
    Attention a = attention(d, job);
    a.o = address(d, o), a.q = address(d, job->t[1]), a.act_type = o.type, a.nseq = o.rows;
    if (is_stream(d, job->op.lane)) return d->gpu->attend(d->gpu, job->op.lane, &a, err);
    host_attend(&a);
    return 0;
}

/* Index tables as the CPU can read them: with a GPU, those that lie there have a mirror. */
static const int32_t *indices(LaneDevice *d, Tensor t) {
    if (d->gpu && t.tier == TIER_GPU) {
        t.offset = t.offset - d->tables[TIER_GPU] + d->tables[TIER_CPU];
        t.tier = TIER_CPU;
    }
    return address(d, t);
}

static Event device_attend(Device *base, const Op *op, Tensor o, Tensor q, const PageTable *table) {
    LaneDevice *d = (LaneDevice *)base;
    size_t row = table_row_bytes(table), all = 0;
    const int32_t *len = indices(d, table->len);
    for (int r = 0; r < o.rows; r++) all += len[r] * row;
    base->count[op->lane].read[0] += all, base->count[op->lane].read[1] += all;
    touch(d, o), touch(d, q);
    Posted job = {.run = run_attend, .t = {o, q}, .table = *table};
    return post(d, op, &job, NULL, 0);
}

static int run_select(LaneDevice *d, const Posted *job, Error *err) {
    Tensor q = job->t[2];
    Attention a = attention(d, job);
    a.tokens = address(d, job->t[0]), a.weights = address(d, job->t[1]), a.most = job->t[0].cols / a.nh;
    a.q = address(d, q), a.act_type = q.type, a.nseq = q.rows;
    if (is_stream(d, job->op.lane)) return d->gpu->select(d->gpu, job->op.lane, &a, err);
    host_select(&a);
    return 0;
}

static Event device_select(Device *base, const Op *op, Tensor tokens, Tensor weights, Tensor q, const PageTable *table,
                           double sparsity) {
    LaneDevice *d = (LaneDevice *)base;
    const int32_t *len = indices(d, table->len);
    for (int r = 0; r < q.rows; r++) base->count[op->lane].read[0] += len[r] * table_row_bytes(table);
    touch(d, tokens), touch(d, weights), touch(d, q);
    Posted job = {.run = run_select, .t = {tokens, weights, q}, .table = *table, .sparsity = sparsity};
    return post(d, op, &job, NULL, 0);
}

static int run_weigh(LaneDevice *d, const Posted *job, Error *err) {
    Tensor o = job->t[0];
    Attention a = attention(d, job);
    a.tokens = address(d, job->t[1]), a.weights = address(d, job->t[2]), a.most = job->t[1].cols / a.nh;
    a.o = address(d, o), a.act_type = o.type, a.nseq = o.rows;
    if (is_stream(d, job->op.lane)) return d->gpu->weigh(d->gpu, job->op.lane, &a, err);
    host_weigh(&a);
    return 0;
}

static Event device_weigh(Device *base, const Op *op, Tensor o, Tensor tokens, Tensor weights, const PageTable *table,
                          double sparsity) {
    LaneDevice *d = (LaneDevice *)base;
    const int32_t *len = indices(d, table->len);
    for (int r = 0; r < o.rows; r++)
        base->count[op->lane].read[1] += sparse_tokens(sparsity, len[r]) * table_row_bytes(table);
    touch(d, o), touch(d, tokens), touch(d, weights);
    Posted job = {.run = run_weigh, .t = {o, tokens, weights}, .table = *table, .sparsity = sparsity};
    return post(d, op, &job, NULL, 0);
}

/* What fetch wants of the offload file, by blocks. */
typedef struct {
    uint64_t *bits;
    size_t first, n; /* blocks */
} Blocks;

static void want(Blocks *b, size_t offset, size_t bytes) {
    for (size_t i = offset / BLOCK - b->first; i <= (offset + bytes - 1) / BLOCK - b->first; i++)
        b->bits[i / 64] |= 1ull << i % 64;
}

/* Tells the kernel of every run of wanted blocks. */
static void advise(const LaneDevice *d, const Blocks *b, int advice) {
    for (size_t i = 0, run; i < b->n; i += run) {
        for (run = 0; i + run < b->n && (b->bits[(i + run) / 64] >> (i + run) % 64 & 1); run++) continue;
        if (run) posix_fadvise(d->offload_fd, (off_t)((b->first + i) * BLOCK), (off_t)(run * BLOCK), advice);
        if (!run) run = 1;
    }
}

/* The pieces of V that a fetch is about: from home pages to the same places of staged ones. What it does to each: */
typedef void Piece(Blocks *blocks, uint8_t *to, const uint8_t *from, size_t offset, size_t bytes);

static void want_piece(Blocks *blocks, uint8_t *to, const uint8_t *from, size_t offset, size_t bytes) {
    (void)to, (void)from;
    want(blocks, offset, bytes);
}
static void copy_piece(Blocks *blocks, uint8_t *to, const uint8_t *from, size_t offset, size_t bytes) {
    (void)blocks, (void)offset;
    memcpy(to, from, bytes);
}

static void for_pieces(LaneDevice *d, const Posted *job, Blocks *blocks, Piece *piece) {
    const PageTable *to = &job->table, *from = &job->home;
    const int32_t *len = address(d, to->len), *there = address(d, to->pages), *here = address(d, from->pages);
    const int32_t *tokens = address(d, job->t[0]);
    const int nh = to->nh, most = job->t[0].cols / nh, page = to->page_tokens;
    const size_t row = table_row_bytes(to), head = row / nh;
    uint8_t *near = address(d, to->v), *home = address(d, from->v);
    for (int r = 0; r < to->len.cols; r++) {
        for (int h = 0; h < nh; h++) {
            const int32_t *t = tokens + ((size_t)r * nh + h) * most;
            for (int i = 0; i < sparse_tokens(job->sparsity, len[r]) - 1; i++) { /* the last is its own: it is here */
                size_t at = (size_t)r * to->pages.ld + t[i] / page, column = h * head;
                size_t target = ((size_t)there[at] * page + t[i] % page) * row + column;
                size_t source = ((size_t)here[at] * page + t[i] % page) * row + column;
                piece(blocks, near + target, home + source, from->v.offset + source, head);
            }
        }
    }
}

/* Many small pieces: the disk hears of all blocks that they lie in before the first is waited for; then they are read
 * through the mapping. */
static int run_fetch(LaneDevice *d, const Posted *job, Error *err) {
    Tensor v = job->home.v;
    (void)err;
    Blocks blocks = {.first = v.offset / BLOCK, .n = (v.offset + tensor_span(v)) / BLOCK + 1 - v.offset / BLOCK};
    blocks.bits = xcalloc(blocks.n / 64 + 1, sizeof *blocks.bits);
    for_pieces(d, job, &blocks, want_piece);
    advise(d, &blocks, POSIX_FADV_WILLNEED);
    for_pieces(d, job, &blocks, copy_piece);
    size_t head = v.offset % BLOCK;
    madvise((uint8_t *)address(d, v) - head, tensor_span(v) + head, MADV_DONTNEED);
    advise(d, &blocks, POSIX_FADV_DONTNEED);
    free(blocks.bits);
    return 0;
}

static Event device_fetch(Device *base, const Op *op, const PageTable *staged, const PageTable *home, Tensor tokens,
                          double sparsity) {
    LaneDevice *d = (LaneDevice *)base;
    const int32_t *len = indices(d, staged->len);
    CHECK(lane_channel[op->lane] == DTOC && home->v.tier == TIER_DISK && staged->v.tier == TIER_CPU);
    touch(d, staged->v), touch(d, tokens);
    Posted job = {.run = run_fetch, .t = {tokens}, .table = *staged, .home = *home, .sparsity = sparsity};
    for (int r = 0; r < staged->len.cols; r++) job.bytes += (sparse_tokens(sparsity, len[r]) - 1) * table_row_bytes(staged);
    return post(d, op, &job, NULL, 0);
}

static int run_pack(LaneDevice *d, const Posted *job, Error *err) {
    Tensor packed = job->t[0], kv = job->t[1];
    void *to = address(d, packed);
    const void *from = address(d, kv);
    if (is_stream(d, job->op.lane))
        return d->gpu->pack(d->gpu, job->op.lane, to, from, kv.rows, kv.cols / 2, job->nh, packed.quant, err);
    host_pack(to, from, kv.rows, kv.cols / 2, job->nh, packed.quant);
    return 0;
}

static Event device_pack(Device *base, const Op *op, Tensor packed, Tensor kv, int nh) {
    LaneDevice *d = (LaneDevice *)base;
    CHECK(packed.type == U8 && packed.rows == kv.rows && kv.type == F16);
    touch(d, packed), touch(d, kv);
    Posted job = {.run = run_pack, .t = {packed, kv}, .nh = nh};
    return post(d, op, &job, NULL, 0);
}

/* Pages are touched up to the highest index that is written to. */
static void touch_pages(LaneDevice *d, const PageTable *p, const int32_t *seq, const int32_t *pos, const int32_t *pages,
                        int rows) {
    int highest = -1;
    for (int r = 0; r < rows; r++) {
        int page = pages[(size_t)seq[r] * p->pages.ld + pos[r] / p->page_tokens];
        if (page > highest) highest = page;
    }
    touch(d, tensor_rows(p->k, 0, (highest + 1) * p->page_tokens));
    touch(d, tensor_rows(p->v, 0, (highest + 1) * p->page_tokens));
}

static int run_append(LaneDevice *d, const Posted *job, Error *err) {
    const PageTable *p = &job->table;
    Tensor kv = job->t[0];
    touch_pages(d, p, indices(d, job->t[1]), indices(d, job->t[2]), indices(d, p->pages), kv.rows);
    void *k = address(d, p->k), *v = address(d, p->v), *from = address(d, kv);
    const int32_t *seq = address(d, job->t[1]), *pos = address(d, job->t[2]), *pages = address(d, p->pages);
    int max_pages = (int)p->pages.ld, page = p->page_tokens, width = (int)(table_row_bytes(p) / sizeof(f16));
    Append a = {k, v, from, seq, pos, pages, kv.rows, max_pages, page, width};
    if (is_stream(d, job->op.lane)) return d->gpu->append(d->gpu, job->op.lane, &a, err);
    host_append(&a);
    if (p->k.tier == TIER_DISK) { /* K and V of a layer lie one after the other */
        size_t bytes = 2 * tensor_span(p->k);
        size_t head = p->k.offset % 4096;
        madvise((uint8_t *)k - head, bytes + head,
                MADV_DONTNEED); /* lets the page cache drop them; nothing is lost in a shared file */
        drop_cache(d->offload_fd, p->k.offset, bytes, tensor_span(kv));
    }
    return 0;
}

static Event device_append(Device *base, const Op *op, const PageTable *table, Tensor kv, Tensor seq, Tensor pos) {
    LaneDevice *d = (LaneDevice *)base;
    CHECK(kv.cols * type_bytes(kv.type) == 2 * table_row_bytes(table));
    touch(d, kv);
    Posted job = {.run = run_append, .t = {kv, seq, pos}, .table = *table};
    if (lane_channel[op->lane] == CTOD) job.bytes = tensor_span(kv);
    return post(d, op, &job, NULL, 0);
}

static int run_pick(LaneDevice *d, const Posted *job, Error *err) {
    Tensor logits = job->t[1];
    int32_t *ids = address(d, job->t[0]);
    const int32_t *prompt = address(d, job->t[2]), *pos = address(d, job->t[3]);
    const float *rows = address(d, logits);
    if (is_stream(d, job->op.lane))
        return d->gpu->pick(d->gpu, job->op.lane, ids, rows, prompt, pos, &job->sampling, logits.rows, logits.cols, err);
    host_pick(ids, rows, prompt, pos, &job->sampling, logits.rows, logits.cols);
    for (int r = 0; r < logits.rows; r++)
        if (!isfinite(rows[(size_t)r * logits.cols + ids[r]])) return not_finite(err);
    return 0;
}

static Event device_pick(Device *base, const Op *op, Tensor ids, Tensor logits, Tensor prompt, Tensor pos,
                         const Sampling *sampling) {
    LaneDevice *d = (LaneDevice *)base;
    touch(d, ids), touch(d, logits);
    Posted job = {.run = run_pick, .t = {ids, logits, prompt, pos}, .sampling = *sampling};
    return post(d, op, &job, NULL, 0);
}

static int run_score(LaneDevice *d, const Posted *job, Error *err) {
    Tensor logits = job->t[2];
    float *logp = address(d, job->t[0]);
    int32_t *best = address(d, job->t[1]);
    const float *rows = address(d, logits);
    const int32_t *target = address(d, job->t[3]);
    if (is_stream(d, job->op.lane))
        return d->gpu->score(d->gpu, job->op.lane, logp, best, rows, target, logits.rows, logits.cols, err);
    host_score(logp, best, rows, target, logits.rows, logits.cols);
    for (int r = 0; r < logits.rows; r++)
        if (!isfinite(logp[r])) return not_finite(err);
    return 0;
}

static Event device_score(Device *base, const Op *op, Tensor logp, Tensor best, Tensor logits, Tensor target) {
    LaneDevice *d = (LaneDevice *)base;
    touch(d, logp), touch(d, best), touch(d, logits);
    Posted job = {.run = run_score, .t = {logp, best, logits, target}};
    return post(d, op, &job, NULL, 0);
}

static void device_upload(Device *base, Tensor dst, size_t first, const void *src, size_t count) {
    LaneDevice *d = (LaneDevice *)base;
    size_t size = type_bytes(dst.type);
    CHECK(first + count <= (size_t)dst.rows * dst.cols);
    touch(d, dst);
    if (d->gpu && dst.tier == TIER_GPU) {
        Error err;
        if (!d->gpu->upload(d->gpu, (uint8_t *)address(d, dst) + first * size, src, count * size, &err)) return;
        pthread_mutex_lock(&d->lock);
        note_failure(d, &err);
        pthread_mutex_unlock(&d->lock);
        return;
    }
    memcpy((uint8_t *)address(d, dst) + first * size, src, count * size);
    if (dst.tier == TIER_DISK && first + count == (size_t)dst.rows * dst.cols) {
        size_t head = dst.offset % 4096;
        madvise((uint8_t *)address(d, dst) - head, tensor_span(dst) + head, MADV_DONTNEED);
        drop_cache(d->offload_fd, dst.offset, tensor_span(dst), tensor_span(dst));
    }
}

static void *device_host(Device *base, Tensor t) {
    touch((LaneDevice *)base, t);
    return address((LaneDevice *)base, t);
}

static double device_now(Device *base) {
    (void)base;
    return now();
}

// ---------------------------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------------------------

static void device_close(Device *base) {
    LaneDevice *d = (LaneDevice *)base;
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    give_up(d); /* what is still queued is no longer wanted */
    for (int i = 0; i < NLANES; i++) pthread_cond_broadcast(&d->lane[i].posted_cond);
    pthread_cond_broadcast(&d->gpu_cond);
    pthread_mutex_unlock(&d->lock);
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].thread) pthread_join(d->lane[i].thread, NULL);
    for (int i = 0; i < NLANES; i++) { /* not before: lanes signal each other */
        pthread_cond_destroy(&d->lane[i].posted_cond);
        pthread_cond_destroy(&d->lane[i].done_cond);
        free(d->lane[i].moves);
        free(d->lane[i].bounce);
    }
    for (int f = 0; f <= d->nfiles; f++)
        if (d->direct[f] >= 0) close(d->direct[f]);
    free(d->direct);
    if (d->gpu && d->arena[TIER_GPU]) { /* waits for the streams */
        d->gpu->release(d->gpu, d->arena[TIER_GPU]);
        d->arena[TIER_GPU] = NULL;
    }
    if (d->pinned) d->gpu->unpin(d->gpu, d->arena[TIER_CPU]);
    for (int t = 0; t < NTIERS; t++)
        if (d->arena[t]) munmap(d->arena[t], d->bytes[t]);
    if (d->offload_fd >= 0) close(d->offload_fd);
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->gpu_cond);
    for (int c = 0; c < NCHANNELS; c++) pthread_cond_destroy(&d->link[c].left);
    free(d);
}

static int open_memory(LaneDevice *d, Tier tier, size_t bytes, Error *err) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return fail(err, EXIT_FAILED, "cannot allocate %.1f MiB for the %s tier: %s; lower %s or free some memory",
                    bytes / 1048576.0, tier_name[tier], strerror(errno), tier == TIER_GPU ? "--gpu-mem" : "--cpu-mem");
    madvise(p, bytes, MADV_HUGEPAGE);
    d->arena[tier] = p;
    d->bytes[tier] = bytes;
    return 0;
}

/* The upper tiers of the cuda device. Memory that cannot be pinned serves as well, slower. */
static int open_gpu_memory(LaneDevice *d, const Plan *plan, Error *err) {
    d->arena[TIER_GPU] = d->gpu->alloc(d->gpu, plan->total[TIER_GPU], err);
    d->bytes[TIER_GPU] = plan->total[TIER_GPU];
    if (!d->arena[TIER_GPU] || open_memory(d, TIER_CPU, plan->total[TIER_CPU], err)) return -1;
    d->pinned = !d->gpu->pin(d->gpu, d->arena[TIER_CPU], d->bytes[TIER_CPU], &d->base.notice);
    return 0;
}

/* The offload file has no name from the start, and all its blocks before the first byte is written. */
static int open_disk(LaneDevice *d, const char *dir, size_t bytes, Error *err) {
    char path[4096];
    snprintf(path, sizeof path, "%s/flexgen-offload-XXXXXX", dir);
    d->offload_fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (d->offload_fd < 0) { /* a file system without nameless files: nameless a moment later */
        d->offload_fd = mkstemp(path);
        if (d->offload_fd >= 0) unlink(path);
    }
    if (d->offload_fd < 0)
        return fail(err, EXIT_FAILED,
                    "cannot create the offload file in %s: %s; name a writable directory with --offload-dir", dir,
                    strerror(errno));
    int status = posix_fallocate(d->offload_fd, 0, (off_t)bytes);
    if (status)
        return fail(err, EXIT_FAILED,
                    "cannot reserve %.1f MiB for the offload file in %s: %s; choose another --offload-dir, or move "
                    "less to the disk",
                    bytes / 1048576.0, dir, strerror(status));
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, d->offload_fd, 0);
    if (p == MAP_FAILED) return fail(err, EXIT_FAILED, "cannot map the offload file in %s: %s", dir, strerror(errno));
    madvise(p, bytes, MADV_RANDOM); /* a token's place is all that is touched; nothing around it is wanted */
    d->arena[TIER_DISK] = p;
    d->bytes[TIER_DISK] = bytes;
    return 0;
}

/* Second descriptors for direct reads. A file system without them (tmpfs) is read the ordinary way. */
static void open_direct(LaneDevice *d) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", d->offload_fd); /* it has no other name */
    if (d->offload_fd >= 0) d->direct[0] = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    for (int f = 1; f <= d->nfiles; f++)
        d->direct[f] = open(d->checkpoint->files[f - 1].path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    for (int i = 0; i < NLANES; i++)
        if (lane_channel[i] == DTOC && posix_memalign((void **)&d->lane[i].bounce, BLOCK, BOUNCE)) d->lane[i].bounce = NULL;
    for (int f = 0; f <= d->nfiles; f++)
        if ((!d->lane[W_READ].bounce || !d->lane[C_READ].bounce) && d->direct[f] >= 0)
            close(d->direct[f]), d->direct[f] = -1;
}

static void init_locks(LaneDevice *d) {
    pthread_condattr_t monotonic; /* the clock of now */
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->gpu_cond, NULL);
    for (int i = 0; i < NLANES; i++) {
        pthread_cond_init(&d->lane[i].posted_cond, NULL);
        pthread_cond_init(&d->lane[i].done_cond, NULL);
    }
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    for (int c = 0; c < NCHANNELS; c++) pthread_cond_init(&d->link[c].left, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

static int open_lanes(LaneDevice *d, Error *err) {
    for (int i = 0; i < NLANES; i++) {
        LaneState *lane = &d->lane[i];
        lane->moves = xcalloc(d->move_capacity, sizeof(Move));
        if (i == FINISH) continue; /* PROJECT's thread serves it */
        int status = i == PROJECT ? pthread_create(&lane->thread, NULL, gpu_main, d)
                                  : pthread_create(&lane->thread, NULL, lane_main, lane);
        if (status) return fail(err, EXIT_FAILED, "cannot start a thread: %s", strerror(status));
    }
    return 0;
}

static const Device functions = {.copy = device_copy,
                                 .embed = device_embed,
                                 .layernorm = device_layernorm,
                                 .linear = device_linear,
                                 .unpack = device_unpack,
                                 .pack = device_pack,
                                 .attend_prefill = device_attend_prefill,
                                 .attend = device_attend,
                                 .select = device_select,
                                 .fetch = device_fetch,
                                 .weigh = device_weigh,
                                 .append = device_append,
                                 .pick = device_pick,
                                 .score = device_score,
                                 .upload = device_upload,
                                 .wait = device_wait,
                                 .host = device_host,
                                 .now = device_now,
                                 .close = device_close};

/* gpu NULL: the host device. */
static Device *device_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err) {
    LaneDevice *d = xcalloc(1, sizeof *d);
    d->base = functions;
    d->base.name = gpu ? "cuda" : "host";
    d->base.act_type = gpu ? F16 : F32;
    CHECK(plan->act_type == d->base.act_type);
    d->gpu = gpu;
    d->checkpoint = checkpoint;
    d->offload_fd = -1;
    d->nfiles = checkpoint->nfiles;
    d->direct = xcalloc(d->nfiles + 1, sizeof *d->direct);
    for (int f = 0; f <= d->nfiles; f++) d->direct[f] = -1;
    reach_open(&d->reach, d->base.peak, plan);
    memcpy(d->tables, plan->tables, sizeof d->tables);
    d->move_capacity = 256 + 2 * ((size_t)plan->max_seqs * plan->max_pages * 2 + plan->max_seqs + NROLES);
    for (int i = 0; i < NLANES; i++) d->lane[i].device = d, d->lane[i].index = i;
    init_locks(d);
    bool ok = gpu ? !open_gpu_memory(d, plan, err)
                  : !open_memory(d, TIER_GPU, plan->total[TIER_GPU], err) &&
                        !open_memory(d, TIER_CPU, plan->total[TIER_CPU], err);
    ok = ok && (!plan->offload_bytes || !open_disk(d, offload_dir, plan->offload_bytes, err)) && !open_lanes(d, err);
    if (ok && plan->total[TIER_DISK]) open_direct(d);
    if (ok) return &d->base;
    device_close(&d->base);
    return NULL;
}

Device *host_open(const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err) {
    return device_open(NULL, plan, checkpoint, offload_dir, err);
}

Device *cuda_open(Gpu *gpu, const Plan *plan, const Checkpoint *checkpoint, const char *offload_dir, Error *err) {
    return device_open(gpu, plan, checkpoint, offload_dir, err);
}
