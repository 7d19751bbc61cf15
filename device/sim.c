/* sim.c: the device that is a clock (section 4.3), alone or as the stages of a pipeline.
 *
 * It has the same lanes, events and counters as lanes.c, on hardware that is only numbers: no op
 * touches data, each just takes its time.
 *
 * Time stands still while ops are posted and advances inside wait. There the first op of every lane
 * begins as soon as its events have all happened, and is then active. The clock goes from one end
 * of an active op to the next until the awaited event has happened:
 *
 *     clock           0         2      3         6
 *     C_LOAD, a       |--- 2 ---|
 *     C_LOAD, b                 |---------- 4 ---------|     after a, in the same lane
 *     PROJECT, c                |-- 1 -|                     waits for a's event
 *     wait(c)         goes to 2, then to 3, and returns; b is still active, with 3 to go
 *
 * So an op never begins before the moment when it was posted, as on a real device.
 *   Links       the active lanes of one link share its bandwidth equally.
 *   GPU         one op at a time: of those that could begin, the one posted earlier. It is not
 *               interrupted.
 *   CPU         only ATTEND uses it. With shared_cores the CPU's cores are the GPU as well: copies
 *               take some of them, and while GPU and CPU both work, each has half of the rest.
 * The time of an op at full speed is known when it is posted: its bytes over the bandwidth of its
 * link or of its processor's memory, its flops over the rate, the longer of both, and op_s. The
 * only memory is the index tables: the schedule writes them, and the lengths of attention are read
 * from them. The GPU's are the same bytes as the CPU's. Contract: one thread posts and waits.
 *
 * Several simulated machines share one time as the stages of a pipeline (section 4.4); for them
 * this file is the network that pipeline.c is for real ones. See "Waiting" below.
 * Read next: trace.c. */
#include <math.h>

#include "device/parts.h"

// -------------------------------------------------------------------------------------------------
// A simulated machine
// -------------------------------------------------------------------------------------------------

/* A posted op. */
typedef struct {
    int nafter;
    Event after[NLANES]; /* it begins when these have happened */
    Slice slice;         /* its begin and end are filled in when it ends */
    uint64_t order;      /* number of ops that were posted before it */
    double work, left;   /* seconds at full speed: all, and those not done yet */
} SimOp;

/* A lane: its ops that are not done. Op number n, counted from 0, lies at ring[n % capacity]. */
typedef struct {
    SimOp *ring;
    uint64_t capacity, posted, done;
    bool active;  /* op number `done` has begun */
    double began; /* time at which it has begun */
} SimLane;

/* A message on its way to a stage. */
typedef struct {
    double at; /* time of its arrival */
    Bytes size;
} Message;

/* The messages to a stage, in the order in which they arrive. */
typedef struct {
    Message *message;
    int n, taken; /* messages so far, and those of them that have been received */
} Inbox;

typedef struct Sim Sim;

/* The sims of a pipeline and the wires between them; a machine alone is a world of one. */
struct World {
    pthread_mutex_t lock; /* guards this struct and inboxes; the rest of a sim belongs to its thread
                             as long as that runs, then to the lock */
    Sim **sim;
    int stages, running; /* running: threads that do not wait */
    double delay_s;
    bool failed;
    Error error;
};

/* The part of a sim that makes it a stage of a pipeline. */
typedef struct {
    World *world;
    double bytes_s; /* bytes/s of its wire */
    Net net;
    Inbox inbox[NET_TOKENS + 1]; /* hidden states from the stage before, tokens from the last */
    double wire_free;            /* time at which the last of its posted messages has left */
    double next;                 /* time at which its next op ends or its next message arrives */
    bool waits;                  /* its thread waits: */
    const Inbox *awaited;        /* for a message, */
    Event event;                 /* or if awaited is NULL for an event */
    pthread_cond_t woken;
} SimStage;

/* A simulated machine. */
struct Sim {
    Device base;
    Hardware hardware;
    SimLane lane[NLANES];
    double clock;            /* seconds */
    double speed[NCHANNELS]; /* the active ops' share of the speed that each has alone */
    double ends;             /* seconds from clock until the first of the active ops ends */
    uint64_t nposted;
    uint8_t *tables;    /* index tables of the CPU tier */
    Bytes tables_at[2]; /* their offsets on GPU and CPU: mirrors of each other */
    Bytes tables_bytes;
    Reach reach;
    SimStage stage;
    World alone; /* its world until it is joined to others */
    Sim *itself; /* alone.sim points here: the sims of that world */
};

static const double
    /* Clocks of several machines that differ by less than this share show the same time. Each is a
     * sum of its own ops' seconds, and rounds differently. */
    ROUNDING_OF_CLOCKS = 1e-12,
    /* An op is done when no more than this share of its work is left: rounding must not separate
     * ops that end together. */
    ROUNDING = 1e-9,
    /* The share of shared cores that arithmetic keeps beside any copies. */
    LEAST_CORES = .1;

// -------------------------------------------------------------------------------------------------
// Messages
//
// A message is delivered here as soon as it is known when it leaves its stage, and will arrive
// after the wire's delay. Until then the receiver's inbox holds it, with the time of its arrival.
// -------------------------------------------------------------------------------------------------

/* Returns true if a message has arrived that has not been taken. */
static bool has_come(const Sim *d, const Inbox *box) {
    return box->taken < box->n &&
           box->message[box->taken].at <= d->clock * (1 + ROUNDING_OF_CLOCKS);
}

/* Delivers a message that has left its stage at `leaves`. */
static void deliver(Sim *from, int to, NetKind kind, Bytes size, double leaves) {
    const World *w = from->stage.world;
    SimStage *stage = &w->sim[to]->stage;
    Inbox *box = &stage->inbox[kind];
    box->message = with_room(box->message, box->n, sizeof *box->message);
    box->message[box->n++] = (Message){leaves + w->delay_s, size};
    stage->next = fmin(stage->next, leaves + w->delay_s);
}

static void take_message(Inbox *box, Bytes size) { CHECK(box->message[box->taken++].size == size); }

// -------------------------------------------------------------------------------------------------
// Lanes: which ops begin and end
// -------------------------------------------------------------------------------------------------

static bool happened(const Sim *d, Event e) { return d->lane[e.lane].done >= e.seq; }

static SimOp *first_op(const SimLane *lane) { return &lane->ring[lane->done % lane->capacity]; }

/* Returns the place of a lane's first op in the order of posting, or NOT_READY if it is active or
 * cannot begin now. */
static uint64_t first_order(const Sim *d, int i) {
    const SimLane *lane = &d->lane[i];
    if (lane->active || lane->done == lane->posted ||
        (i == RECEIVE && !has_come(d, &d->stage.inbox[NET_STATES])))
        return NOT_READY;
    const SimOp *op = first_op(lane);
    for (int n = 0; n < op->nafter; n++)
        if (!happened(d, op->after[n]))
            return NOT_READY;
    return op->order;
}

static void begin_op(Sim *d, int i) {
    d->lane[i].active = true;
    d->lane[i].began = d->clock;
    if (i == RECEIVE)
        take_message(&d->stage.inbox[NET_STATES], first_op(&d->lane[i])->slice.bytes);
}

/* Begins every op that can begin: the first of each lane, but of the GPU's two lanes only one. */
static void begin_ready(Sim *d) {
    for (int i = 0; i < NLANES; i++)
        if (lane_channel[i] != GPU && first_order(d, i) != NOT_READY)
            begin_op(d, i);
    if (d->lane[PROJECT].active || d->lane[FINISH].active)
        return;
    Lane turn = gpu_turn(first_order(d, PROJECT), first_order(d, FINISH));
    if (turn != NLANES)
        begin_op(d, turn);
}

/* Returns when the oldest of the active ops began. */
static double oldest_begin(const Sim *d) {
    double first = d->clock;
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].active)
            first = fmin(first, d->lane[i].began);
    return first;
}

/* Ends the active op of a lane. What it sends has then left the stage. */
static void end_op(Sim *d, int i) {
    SimLane *lane = &d->lane[i];
    Slice *slice = &first_op(lane)->slice;
    slice->begin = lane->began;
    slice->end = d->clock;
    if (d->base.trace)
        trace_add(d->base.trace, slice, oldest_begin(d));
    if (i == SEND)
        deliver(d, d->stage.net.stage + 1, NET_STATES, slice->bytes, d->clock);
    lane->active = false;
    lane->done++;
}

// -------------------------------------------------------------------------------------------------
// The clock: how fast active ops are, and when the next of them ends
// -------------------------------------------------------------------------------------------------

/* Finds the share of full speed at which the active ops run beside each other. An active link takes
 * its share of shared cores as in generation, also if its op belongs to a prefill; this is a
 * simplification. */
static void find_speeds(Sim *d) {
    const Hardware *h = &d->hardware;
    int active[NCHANNELS] = {0};
    double cores = 1;
    for (int i = 0; i < NLANES; i++)
        active[lane_channel[i]] += d->lane[i].active;
    for (int c = CTOG; c <= CTOD; c++)
        if (active[c])
            cores -= link_cores(h, c, false);
    cores = fmax(cores, LEAST_CORES) / (active[GPU] && active[CPU] ? 2 : 1);
    for (int c = 0; c < NCHANNELS; c++)
        d->speed[c] = 1.0 / imax(active[c], 1);
    d->speed[GPU] = d->speed[CPU] = h->shared_cores ? cores : 1;
}

/* Begins all ops that can begin. Then finds in how many seconds the first active op ends (d->ends),
 * and when an op ends or a message arrives (stage.next); INFINITY: nothing happens by itself. */
static void begin_and_look_ahead(Sim *d) {
    begin_ready(d);
    find_speeds(d);
    d->ends = INFINITY;
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].active)
            d->ends = fmin(d->ends, first_op(&d->lane[i])->left / d->speed[lane_channel[i]]);
    d->stage.next = d->clock + d->ends;
    for (const Inbox *box = d->stage.inbox; box <= &d->stage.inbox[NET_TOKENS]; box++)
        if (box->taken < box->n && !has_come(d, box))
            d->stage.next = fmin(d->stage.next, box->message[box->taken].at);
}

/* Advances the clock, and with it the active ops, by dt seconds: at most to the moment d->ends, at
 * which one op ends, or several together. */
static void advance(Sim *d, double dt) {
    d->clock += dt;
    for (int i = 0; i < NLANES; i++) {
        if (!d->lane[i].active)
            continue;
        SimOp *job = first_op(&d->lane[i]);
        job->left -= dt * d->speed[lane_channel[i]];
        count_busy(d->base.count, &job->slice, dt);
        if (job->left <= ROUNDING * job->work)
            end_op(d, i);
    }
}

// -------------------------------------------------------------------------------------------------
// Posting: what an op takes
// -------------------------------------------------------------------------------------------------

/* Doubles the room of a lane. Ops keep their numbers, and get new places by them. */
static void grow_ring(SimLane *lane) {
    uint64_t capacity = lane->capacity ? 2 * lane->capacity : 64;
    SimOp *ring = xcalloc(capacity, sizeof *ring);
    for (uint64_t n = lane->done; n < lane->posted; n++)
        ring[n % capacity] = lane->ring[n % lane->capacity];
    free(lane->ring);
    lane->ring = ring;
    lane->capacity = capacity;
}

/* Returns the seconds for so many bytes over the op's link, or in its processor's memory. */
static double move_seconds(const Sim *d, const Op *op, double bytes) {
    const Hardware *h = &d->hardware;
    Channel c = lane_channel[op->lane];
    return memory_seconds(bytes, c == GPU   ? h->gpu_bdw
                                 : c == CPU ? h->cpu_bdw
                                            : h->bdw[c][op->prefill]);
}

/* Returns an index table; the GPU's is the CPU's. */
static int32_t *indices(Sim *d, Tensor t) {
    CHECK(t.tier != TIER_DISK && t.type == I32 && t.offset >= d->tables_at[t.tier]);
    Bytes at = t.offset - d->tables_at[t.tier];
    CHECK(at + tensor_span(t) <= d->tables_bytes);
    return (int32_t *)(d->tables + at);
}

/* Returns the seconds of attention to all tokens of the op's sequences, scaled to the tokens that
 * the op reads (op_tokens). len has the length of each sequence. */
static double decode_seconds(const Sim *d, const Op *op, const int32_t *len) {
    double seconds = 0, all = 0;
    for (int r = 0; r < op->attend.len.cols; r++) {
        seconds += attend_seconds(&d->hardware, lane_channel[op->lane] == CPU, op->prefill,
                                  op->nh * op->hd, len[r], op->attend.k.type == U8);
        all += len[r];
    }
    return seconds * op_tokens(op, len) / all;
}

/* Returns the seconds of attention within each prompt of a piece; start has their first rows. */
static double prefill_seconds(Sim *d, const Op *op) {
    Tensor o = op->prefilled.o, start = op->prefilled.start;
    const int32_t *row = indices(d, start);
    double seconds = 0;
    for (int r = 0; r + 1 < start.cols; r++)
        seconds += attend_prefill_seconds(&d->hardware, 1, row[r + 1] - row[r], o.cols,
                                          type_bytes(o.type));
    return seconds;
}

/* Returns the seconds that an op takes at full speed, without op_s. moved: the bytes that it moves.
 */
static double op_seconds(Sim *d, const Op *op, Bytes moved, const int32_t *len) {
    Tensor y = op->view[0], x = op->view[1];
    switch (op->code) {
        case OP_COPY:
        case OP_FETCH:
            return move_seconds(d, op, moved);
        case OP_EMBED: /* gathers rows, of a packed table rows of groups */
            return move_seconds(d, op, (double)y.rows * x.cols * type_bytes(x.type));
        case OP_LAYERNORM: /* these read x and write y */
        case OP_UNPACK:
        case OP_PACK:
            return move_seconds(d, op, tensor_bytes(y) + tensor_bytes(x));
        case OP_LINEAR:
            return linear_seconds(
                &d->hardware, op->prefill,
                (Linear){y.rows, y.cols, x.cols, type_bytes(x.type), op->linear.w.type == U8});
        case OP_ATTEND_PREFILL:
            return prefill_seconds(d, op);
        case OP_ATTEND:
            return decode_seconds(d, op, len);
        case OP_SELECT: /* reads K alone, and the next V alone */
        case OP_WEIGH:
            return decode_seconds(d, op, len) / 2;
        case OP_PICK: /* reads the logits */
            return move_seconds(d, op, tensor_bytes(x));
        case OP_APPEND: /* reads the new k and v */
        case OP_SCORE:  /* reads the logits */
            return move_seconds(d, op, tensor_bytes(op->view[2]));
        case OP_RECEIVE: /* the wire belongs to the sender */
            return 0;
        case OP_SEND:
            return moved / d->stage.bytes_s;
        default:
            CHECK(!"an op that takes no time");
    }
    return 0;
}

static Event sim_post(Device *base, const Op *op) {
    Sim *d = (Sim *)base;
    SimLane *lane = &d->lane[op->lane];
    const Tensor *lengths = op_lengths(op);
    const int32_t *len = lengths ? indices(d, *lengths) : NULL;
    reach_op(&d->reach, op);
    Bytes moved = op_count(&base->count[op->lane], op, len);
    if (lane->posted - lane->done == lane->capacity)
        grow_ring(lane);
    SimOp *job = &lane->ring[lane->posted % lane->capacity];
    job->nafter = op->nafter;
    job->slice = slice_of(op, moved, 0, 0);
    memcpy(job->after, op->after, op->nafter * sizeof *op->after);
    job->order = d->nposted++;
    job->work = job->left = op_seconds(d, op, moved, len) + d->hardware.op_s;
    return (Event){op->lane, ++lane->posted};
}

// -------------------------------------------------------------------------------------------------
// Waiting, while time passes
//
// A stage's thread computes nothing that takes time, so time passes only when the threads of all
// stages wait. The last one to do so makes steps: it goes to the next moment at which an op ends or
// a message arrives anywhere, until this is what some thread waits for. With two stages:
//
//     what happens                               running    the lock
//     A waits for an op that ends at 3           2 -> 1     A sleeps and has given it back
//     B waits for a message that A will send     1 -> 0     B holds it, and steps to 3
//     there A's op ends: B signals A             0 -> 1     B sleeps and has given it back
//     A posts, and waits for a later op          1 -> 0     A holds it, and steps on
//
// So results do not depend on how fast the threads are. A step touches only the sims in which
// something happens at that moment; the clocks of the others stay behind until it is their turn.
// -------------------------------------------------------------------------------------------------

/* Goes to the next moment at which something happens, or several things together. */
static void step(World *w) {
    double t = INFINITY;
    for (int s = 0; s < w->stages; s++)
        t = fmin(t, w->sim[s]->stage.next);
    CHECK(!isinf(t)); /* else somebody waits for a message or an op that nobody has posted */
    double together = t * (1 + ROUNDING_OF_CLOCKS);
    for (int s = 0; s < w->stages; s++) {
        Sim *d = w->sim[s];
        SimStage *stage = &d->stage;
        if (stage->next > together)
            continue;
        /* If an op ends, it gets exactly the seconds that it still needs; otherwise a message
         * arrives. */
        bool op_ends = d->clock + d->ends <= together;
        advance(d, op_ends ? d->ends : t - d->clock);
        d->clock = t;
        if (stage->waits &&
            (stage->awaited ? has_come(d, stage->awaited) : happened(d, stage->event))) {
            stage->waits = false;
            stage->next = INFINITY;
            w->running++;
            pthread_cond_signal(&stage->woken);
        } else {
            begin_and_look_ahead(d);
        }
    }
}

/* Makes the stage's thread wait: for a message, which it takes, or with box NULL for an event. */
static int wait_in_world(Sim *d, Event e, Inbox *box, Bytes size, Error *err) {
    SimStage *stage = &d->stage;
    World *w = stage->world;
    pthread_mutex_lock(&w->lock);
    stage->waits = box ? !has_come(d, box) : !happened(d, e);
    if (stage->waits) {
        stage->event = e;
        stage->awaited = box;
        begin_and_look_ahead(d);
        w->running--;
    }
    while (stage->waits && !w->failed)
        if (w->running)
            pthread_cond_wait(&stage->woken, &w->lock);
        else
            step(w);
    int status = w->failed ? -1 : 0;
    if (status)
        *err = w->error;
    else if (box)
        take_message(box, size);
    pthread_mutex_unlock(&w->lock);
    return status;
}

static void wake_all(World *w) {
    for (int s = 0; s < w->stages; s++)
        pthread_cond_signal(&w->sim[s]->stage.woken);
}

static int sim_wait(Device *base, Event e, Error *err) {
    Sim *d = (Sim *)base;
    return happened(d, e) ? 0 : wait_in_world(d, e, NULL, 0, err);
}

// -------------------------------------------------------------------------------------------------
// Opening and closing
// -------------------------------------------------------------------------------------------------

static void *sim_address(Device *base, Tensor t) {
    Sim *d = (Sim *)base;
    reach_note(&d->reach, t);
    return t.tier == TIER_CPU && t.region == INDEX_TABLES ? indices(d, t) : NULL;
}

static double sim_now(Device *base) { return ((Sim *)base)->clock; }

static void sim_close(Device *base) {
    Sim *d = (Sim *)base;
    for (int i = 0; i < NLANES; i++)
        free(d->lane[i].ring);
    for (int k = 0; k <= NET_TOKENS; k++)
        free(d->stage.inbox[k].message);
    free(d->tables);
    free(d);
}

Device *sim_open(const Plan *plan, const Hardware *hardware) {
    Sim *d = xcalloc(1, sizeof *d);
    d->base = (Device){.name = "sim",
                       .act_type = plan->act_type,
                       .post = sim_post,
                       .wait = sim_wait,
                       .cpu_address = sim_address,
                       .now = sim_now,
                       .close = sim_close};
    d->hardware = *hardware;
    d->itself = d;
    d->alone =
        (World){.lock = PTHREAD_MUTEX_INITIALIZER, .sim = &d->itself, .stages = 1, .running = 1};
    d->stage = (SimStage){.world = &d->alone, .next = INFINITY, .woken = PTHREAD_COND_INITIALIZER};
    reach_open(&d->reach, d->base.peak, plan);
    for (int t = TIER_GPU; t <= TIER_CPU; t++)
        d->tables_at[t] = plan->region[INDEX_TABLES][t].offset;
    d->tables_bytes = plan->region[INDEX_TABLES][TIER_CPU].bytes;
    d->tables = xcalloc(d->tables_bytes, 1);
    return &d->base;
}

// -------------------------------------------------------------------------------------------------
// A pipeline of sims
// -------------------------------------------------------------------------------------------------

static Sim *sim_of(Net *net) { return (Sim *)((char *)net - offsetof(Sim, stage.net)); }

/* Posts a message without content: only its arrival matters. A stage that posts has no op on SEND:
 * it is the last. */
static int world_post(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    Sim *d = sim_of(net);
    SimStage *stage = &d->stage;
    (void)bytes;
    (void)err;
    CHECK(kind == NET_TOKENS && net->stage == net->stages - 1);
    pthread_mutex_lock(&stage->world->lock);
    stage->wire_free = fmax(stage->wire_free, d->clock) + size / stage->bytes_s;
    deliver(d, to, kind, size, stage->wire_free);
    pthread_mutex_unlock(&stage->world->lock);
    return 0;
}

/* Receives tokens, which are all -1: the sim has none. */
static int world_receive(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    Sim *d = sim_of(net);
    CHECK(kind == NET_TOKENS && from == net->stages - 1);
    memset(bytes, 0xff, size);
    return wait_in_world(d, (Event){0}, &d->stage.inbox[kind], size, err);
}

static void world_fail(Net *net, const Error *err) {
    World *w = sim_of(net)->stage.world;
    pthread_mutex_lock(&w->lock);
    if (!w->failed)
        fail_of_stage(&w->error, net->stage, err);
    w->failed = true;
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
}

World *world_open(Device *const sim[], int stages, double bytes_s, double delay_s) {
    World *w = xcalloc(1, sizeof *w);
    w->sim = xcalloc(stages, sizeof *w->sim);
    w->stages = w->running = stages;
    w->delay_s = delay_s;
    pthread_mutex_init(&w->lock, NULL);
    for (int s = 0; s < stages; s++) {
        Sim *d = w->sim[s] = (Sim *)sim[s];
        SimStage *stage = &d->stage;
        d->base.net = stages > 1 ? &stage->net : NULL;
        stage->world = w;
        stage->bytes_s = bytes_s;
        stage->net = (Net){.stage = s,
                           .stages = stages,
                           .post = world_post,
                           .receive = world_receive,
                           .fail = world_fail};
    }
    return w;
}

void world_leave(Device *sim) {
    World *w = ((Sim *)sim)->stage.world;
    pthread_mutex_lock(&w->lock);
    w->running--;
    wake_all(w); /* if no thread runs any more, one of those who wait goes on with the time */
    pthread_mutex_unlock(&w->lock);
}

void world_close(World *w) {
    for (int s = 0; s < w->stages; s++) {
        Sim *d = w->sim[s];
        for (const Inbox *box = d->stage.inbox; box <= &d->stage.inbox[NET_TOKENS]; box++)
            CHECK(w->failed || box->taken == box->n);
        pthread_cond_destroy(&d->stage.woken);
        d->base.close(&d->base);
    }
    pthread_mutex_destroy(&w->lock);
    free(w->sim);
    free(w);
}
