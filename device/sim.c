/* sim.c: the device that is a clock (section 4.3). The same lanes, events and counters as in lanes.c, on hardware that is
 * only numbers: no op touches data, each just takes its time.
 *
 * Time stands still while ops are posted and moves inside wait: there the first op of every lane whose events have all
 * happened is active, and the clock goes from one end of an active op to the next until the awaited event has happened. So
 * an op never begins before the moment it was posted, exactly as a real lane's thread would find it then.
 *   Links       the active lanes of one link share its bandwidth equally.
 *   GPU         one op at a time: of those that could begin the one posted earlier. It is not interrupted.
 *   CPU         only ATTEND uses it. With shared_cores it is the GPU as well, and both go at half speed while both work;
 * copies take their part of them, too. What an op takes at full speed is known when it is posted: its bytes over the
 * bandwidth of its link or of its processor's memory, its flops over the rate, the longer of both, and op_s. The only
 * memory is the index tables, which the schedule writes and attention's lengths are read from; the GPU's are the same
 * bytes, since their copy has no other purpose. Contract: one thread posts and waits. Read next: device/op.c, the ops as
 * data. */
#include "device/sim.h"

#include <math.h>

/* An op is done when no more than this share of its work is left: rounding must not part ops that end together. */
static const double ROUNDING = 1e-9;
/* The share of shared cores that arithmetic keeps beside any copies. */
static const double LEAST_CORES = .1;

// ---------------------------------------------------------------------------------------------------------------
// Lanes and the clock
// ---------------------------------------------------------------------------------------------------------------

static SimOp *first_op(const SimLane *lane) { return &lane->ring[lane->done % lane->capacity]; }

/* Whether the lane's first op can begin. */
static bool is_ready(const Sim *d, int i) {
    const SimLane *lane = &d->lane[i];
    if (lane->active || lane->done == lane->posted) return false;
    if (i == RECEIVE && !has_come(d, &d->inbox[NET_STATES])) return false;
    const SimOp *op = first_op(lane);
    for (int n = 0; n < op->nafter; n++)
        if (!happened(d, op->after[n])) return false;
    return true;
}

static void begin_op(Sim *d, int i) {
    d->lane[i].active = true;
    d->lane[i].began = d->clock;
    if (i == RECEIVE) take_letter(&d->inbox[NET_STATES], first_op(&d->lane[i])->slice.bytes);
}

static void begin_ready(Sim *d) {
    for (int i = 0; i < NLANES; i++)
        if (lane_channel[i] != GPU && is_ready(d, i)) begin_op(d, i);
    if (d->lane[PROJECT].active || d->lane[FINISH].active) return;
    const bool ready[] = {is_ready(d, PROJECT), is_ready(d, FINISH)};
    const Lane turn = gpu_turn(ready, ready[0] ? first_op(&d->lane[PROJECT])->order : 0,
                               ready[1] ? first_op(&d->lane[FINISH])->order : 0);
    if (turn != NLANES) begin_op(d, turn);
}

/* When the oldest of the ops began that have not ended. */
static double sim_settled(const Sim *d) {
    double first = d->clock;
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].active) first = fmin(first, d->lane[i].began);
    return first;
}

static void end_op(Sim *d, int i) {
    SimLane *lane = &d->lane[i];
    Slice *slice = &first_op(lane)->slice;
    slice->begin = lane->began, slice->end = d->clock;
    if (d->base.trace) trace_add(d->base.trace, slice, sim_settled(d));
    if (i == SEND) d->sent(d, slice->bytes);
    lane->active = false;
    lane->done++;
}

/* The share of full speed at which the active ops run beside each other. Copies leave so much of shared cores to
 * arithmetic; GPU and CPU have half of that each while both work. */
static void find_speeds(Sim *d) {
    const Hardware *h = &d->hardware;
    int active[NCHANNELS] = {0};
    double cores = 1;
    for (int i = 0; i < NLANES; i++) active[lane_channel[i]] += d->lane[i].active;
    for (int c = CTOG; c <= CTOD; c++)
        if (active[c]) cores -= link_cores(h, (Channel)c, false);
    cores = fmax(cores, LEAST_CORES) / (active[GPU] && active[CPU] ? 2 : 1);
    for (int c = 0; c < NCHANNELS; c++) d->speed[c] = 1.0 / imax(active[c], 1);
    d->speed[GPU] = d->speed[CPU] = h->shared_cores ? cores : 1;
}

void sim_look_ahead(Sim *d) {
    begin_ready(d);
    find_speeds(d);
    d->ends = INFINITY;
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].active) d->ends = fmin(d->ends, first_op(&d->lane[i])->left / d->speed[lane_channel[i]]);
    d->next = d->clock + d->ends;
    for (const Inbox *box = d->inbox; box <= &d->inbox[NET_TOKENS]; box++)
        if (box->taken < box->n && !has_come(d, box)) d->next = fmin(d->next, box->letter[box->taken].at);
}

void sim_pass(Sim *d, double dt) {
    d->clock += dt;
    for (int i = 0; i < NLANES; i++) {
        if (!d->lane[i].active) continue;
        SimOp *job = first_op(&d->lane[i]);
        job->left -= dt * d->speed[lane_channel[i]];
        d->base.count[i].busy_s += dt;
        if (job->slice.prefill) d->base.count[i].prefill_s += dt;
        if (job->left <= ROUNDING * job->work) end_op(d, i);
    }
}

static int sim_wait(Device *base, Event e, Error *err) {
    Sim *d = (Sim *)base;
    (void)err;
    CHECK(e.seq <= d->lane[e.lane].posted);
    while (!happened(d, e)) {
        sim_look_ahead(d);
        CHECK(!isinf(d->ends)); /* ops wait only for ops posted before them */
        sim_pass(d, d->ends);
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Posting: what an op takes
// ---------------------------------------------------------------------------------------------------------------

static void grow_ring(SimLane *lane) {
    uint64_t capacity = lane->capacity ? 2 * lane->capacity : 64;
    SimOp *ring = xcalloc(capacity, sizeof *ring);
    for (uint64_t n = lane->done; n < lane->posted; n++) ring[n % capacity] = lane->ring[n % lane->capacity];
    free(lane->ring);
    lane->ring = ring;
    lane->capacity = capacity;
}

/* Seconds for so many bytes over the op's link, or in its processor's memory. */
static double moving(const Sim *d, const Op *op, double bytes) {
    const Hardware *h = &d->hardware;
    Channel c = lane_channel[op->lane];
    return memory_seconds(bytes, c == GPU ? h->gpu_bdw : c == CPU ? h->cpu_bdw : h->bdw[c][op->prefill]);
}

/* An index table; the GPU's is the CPU's. */
static int32_t *indices(Sim *d, Tensor t) {
    CHECK(t.tier != TIER_DISK && t.type == I32 && t.offset >= d->tables_at[t.tier]);
    Bytes at = t.offset - d->tables_at[t.tier];
    CHECK(at + tensor_span(t) <= d->tables_bytes);
    return (int32_t *)(d->tables + at);
}

/* Seconds of attention to `tokens` of the tokens of a table's sequences, of which K, V (half of it) or both are read.
 */
static double attending(const Sim *d, const Op *op, const int32_t *len, int h1, bool packed) {
    const int n = op_lengths(op)->cols;
    double seconds = 0, all = 0;
    for (int r = 0; r < n; r++) {
        seconds += attend_seconds(&d->hardware, lane_channel[op->lane] == CPU, op->prefill, 1, len[r], h1, packed);
        all += len[r];
    }
    return seconds * op_tokens(op, len) / all;
}

static double prefilling(Sim *d, const Op *op) {
    const Tensor o = op->prefilled.o, start = op->prefilled.start;
    const int32_t *row = indices(d, start);
    double seconds = 0;
    for (int r = 0; r + 1 < start.cols; r++)
        seconds += attend_prefill_seconds(&d->hardware, 1, row[r + 1] - row[r], o.cols, type_bytes(o.type));
    return seconds;
}

static double multiplying(const Sim *d, const Op *op) {
    const Tensor y = op->linear.y, x = op->linear.x;
    const bool packed = op->linear.w.type == U8;
    return linear_seconds(&d->hardware, op->prefill, y.rows, y.cols, x.cols, type_bytes(x.type), packed);
}

/* What an op takes. moved: what it moves. */
static double op_seconds(Sim *d, const Op *op, Bytes moved, const int32_t *len) {
    switch (op->code) {
        case OP_COPY:
        case OP_FETCH:
            return moving(d, op, moved);
        case OP_EMBED: /* rows that are gathered */
            return moving(d, op, (double)op->embed.y.rows * op->embed.y.cols * type_bytes(op->embed.table.type));
        case OP_LAYERNORM:
            return moving(d, op, tensor_bytes(op->layernorm.x) + tensor_bytes(op->layernorm.y));
        case OP_LINEAR:
            return multiplying(d, op);
        case OP_UNPACK:
            return moving(d, op, tensor_bytes(op->unpack.w) + tensor_bytes(op->unpack.packed));
        case OP_PACK:
            return moving(d, op, tensor_bytes(op->pack.packed) + tensor_bytes(op->pack.kv));
        case OP_ATTEND_PREFILL:
            return prefilling(d, op);
        case OP_ATTEND:
            return attending(d, op, len, op->attend.o.cols, op->attend.k.type == U8);
        case OP_SELECT:
            return attending(d, op, len, op->attend.q.cols, op->attend.k.type == U8) / 2;
        case OP_WEIGH:
            return attending(d, op, len, op->attend.o.cols, op->attend.v.type == U8) / 2;
        case OP_APPEND:
            return moving(d, op, tensor_bytes(op->append.kv));
        case OP_PICK:
            return moving(d, op, tensor_bytes(op->pick.logits));
        case OP_SCORE:
            return moving(d, op, tensor_bytes(op->score.logits));
        case OP_RECEIVE: /* the wire is the sender's */
            return 0;
        case OP_SEND:
            return (double)moved / d->bytes_s;
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
    for (int n = 0; n < op->nafter; n++) CHECK(op->after[n].seq <= d->lane[op->after[n].lane].posted);
    reach_op(&d->reach, base->peak, op);
    const Bytes moved = op_count(&base->count[op->lane], op, len);
    const double work = op_seconds(d, op, moved, len) + d->hardware.op_s;
    if (lane->posted - lane->done == lane->capacity) grow_ring(lane);
    SimOp *job = &lane->ring[lane->posted % lane->capacity];
    job->nafter = op->nafter, job->slice = slice_of(op, moved, 0, 0);
    memcpy(job->after, op->after, op->nafter * sizeof *op->after);
    job->order = d->nposted++, job->work = job->left = work;
    return (Event){op->lane, ++lane->posted};
}

// ---------------------------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------------------------

static void *sim_host(Device *base, Tensor t) {
    Sim *d = (Sim *)base;
    Bytes at = d->tables_at[TIER_CPU];
    reach_note(&d->reach, base->peak, t);
    return t.tier == TIER_CPU && t.offset >= at && t.offset < at + d->tables_bytes ? indices(d, t) : NULL;
}

static double sim_now(Device *base) { return ((Sim *)base)->clock; }

static void sim_close(Device *base) {
    Sim *d = (Sim *)base;
    for (int i = 0; i < NLANES; i++) free(d->lane[i].ring);
    for (int k = 0; k <= NET_TOKENS; k++) free(d->inbox[k].letter);
    free(d->tables);
    free(d);
}

Device *sim_open(const Plan *plan, const Hardware *hardware, Error *err) {
    Sim *d = xcalloc(1, sizeof *d);
    (void)err; /* as the other devices; there is nothing here that could be missing */
    d->base = (Device){.name = "sim",
                       .act_type = plan->act_type,
                       .post = sim_post,
                       .wait = sim_wait,
                       .host = sim_host,
                       .now = sim_now,
                       .close = sim_close};
    d->hardware = *hardware;
    reach_open(&d->reach, d->base.peak, plan);
    for (int t = TIER_GPU; t <= TIER_CPU; t++) d->tables_at[t] = plan->region[INDEX_TABLES][t].offset;
    d->tables_bytes = plan->region[INDEX_TABLES][TIER_CPU].bytes;
    d->tables = xcalloc(d->tables_bytes, 1);
    return &d->base;
}
