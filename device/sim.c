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
 * bytes, since their copy has no other purpose. Contract: one thread posts and waits. Read next: schedule.c, which cannot
 * tell this device from a real one, save that no token has a value. */
#include <math.h>

#include "cost/cost.h"

typedef struct {
    Op op;
    uint64_t order;    /* how many ops of all lanes were posted before it */
    size_t moved;      /* bytes, for counter and trace */
    double work, left; /* seconds at full speed: of all of it, of what is still to do */
} SimOp;

/* Op number n, counted from 0, lies at ring[n % capacity]. */
typedef struct {
    SimOp *ring;
    uint64_t capacity, posted, done;
    bool active; /* op number `done` has begun */
    double began;
} SimLane;

typedef struct {
    Device base;
    Hardware hardware;
    SimLane lane[NLANES];
    double clock; /* seconds */
    uint64_t nposted;
    uint8_t *tables;     /* index tables of the CPU tier */
    size_t tables_at[2]; /* where they lie on GPU and CPU: mirrors of each other */
    size_t tables_bytes;
    Reach reach;
} Sim;

/* An op is done when no more than this share of its work is left: rounding must not part ops that end together. */
static const double ROUNDING = 1e-9;
/* The share of shared cores that arithmetic keeps beside any copies. */
static const double LEAST_CORES = .1;

// ---------------------------------------------------------------------------------------------------------------
// Lanes and the clock
// ---------------------------------------------------------------------------------------------------------------

static SimOp *first_op(const SimLane *lane) { return &lane->ring[lane->done % lane->capacity]; }

static bool happened(const Sim *d, Event e) { return d->lane[e.lane].done >= e.seq; }

/* Whether the lane's first op can begin. */
static bool is_ready(const Sim *d, int i) {
    const SimLane *lane = &d->lane[i];
    if (lane->active || lane->done == lane->posted) return false;
    const Op *op = &first_op(lane)->op;
    for (int n = 0; n < op->nafter; n++)
        if (!happened(d, op->after[n])) return false;
    return true;
}

static void begin(Sim *d, int i) {
    d->lane[i].active = true;
    d->lane[i].began = d->clock;
}

static void begin_ready(Sim *d) {
    for (int i = 0; i < NLANES; i++)
        if (lane_channel[i] != GPU && is_ready(d, i)) begin(d, i);
    if (d->lane[PROJECT].active || d->lane[FINISH].active) return;
    bool p = is_ready(d, PROJECT), f = is_ready(d, FINISH);
    if (p && f) p = first_op(&d->lane[PROJECT])->order < first_op(&d->lane[FINISH])->order;
    if (p || f) begin(d, p ? PROJECT : FINISH);
}

static void end(Sim *d, int i) {
    SimLane *lane = &d->lane[i];
    const SimOp *job = first_op(lane);
    if (d->base.trace) trace_add(d->base.trace, &job->op, job->moved, lane->began, d->clock);
    lane->active = false;
    lane->done++;
}

/* How much of shared cores copies leave to arithmetic. */
static double cores_left(const Sim *d, const int active[NCHANNELS]) {
    const Hardware *h = &d->hardware;
    double left = 1;
    for (int c = CTOG; c <= CTOD; c++)
        if (active[c]) left -= link_bdw(h, (Channel)c)[0] * (c < DTOC ? h->copy_core_s : h->disk_core_s);
    return fmax(left, LEAST_CORES);
}

/* The share of full speed at which a lane's op runs beside the others that are active. */
static double speed(const Sim *d, Channel c, const int active[NCHANNELS]) {
    if (c != GPU && c != CPU) return 1.0 / active[c];
    if (!d->hardware.shared_cores) return 1;
    return cores_left(d, active) / (active[GPU] && active[CPU] ? 2 : 1);
}

/* To the next moment at which an op ends, or several together. False: nothing can run. */
static bool advance(Sim *d) {
    int active[NCHANNELS] = {0};
    double dt = INFINITY;
    begin_ready(d);
    for (int i = 0; i < NLANES; i++) active[lane_channel[i]] += d->lane[i].active;
    for (int i = 0; i < NLANES; i++)
        if (d->lane[i].active) dt = fmin(dt, first_op(&d->lane[i])->left / speed(d, lane_channel[i], active));
    if (isinf(dt)) return false;
    d->clock += dt;
    for (int i = 0; i < NLANES; i++) {
        if (!d->lane[i].active) continue;
        SimOp *job = first_op(&d->lane[i]);
        job->left -= dt * speed(d, lane_channel[i], active);
        d->base.count[i].busy_s += dt;
        if (job->left <= ROUNDING * job->work) end(d, i);
    }
    return true;
}

static int sim_wait(Device *base, Event e, Error *err) {
    Sim *d = (Sim *)base;
    (void)err; /* nothing fails here */
    CHECK(e.seq <= d->lane[e.lane].posted);
    while (!happened(d, e)) CHECK(advance(d)); /* ops wait only for ops posted before them */
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Posting: what an op takes
// ---------------------------------------------------------------------------------------------------------------

static void grow(SimLane *lane) {
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
    double bdw = c == GPU ? h->gpu_bdw : c == CPU ? h->cpu_bdw : link_bdw(h, c)[op->prefill];
    return bdw > 0 ? bytes / bdw : 0;
}

/* moved: bytes for the counters. */
static Event post(Sim *d, const Op *op, size_t moved, double seconds) {
    SimLane *lane = &d->lane[op->lane];
    double work = seconds + d->hardware.op_s;
    for (int n = 0; n < op->nafter; n++) CHECK(op->after[n].seq <= d->lane[op->after[n].lane].posted);
    if (lane->posted - lane->done == lane->capacity) grow(lane);
    lane->ring[lane->posted % lane->capacity] = (SimOp){*op, d->nposted++, moved, work, work};
    d->base.count[op->lane].moved[op->kind] += moved;
    return (Event){op->lane, ++lane->posted};
}

static size_t tensor_bytes(Tensor t) { return (size_t)t.rows * t.cols * type_bytes(t.type); }

static void touch(Sim *d, Tensor t) { reach_note(&d->reach, d->base.peak, t); }

/* An index table; the GPU's is the CPU's. */
static int32_t *indices(Sim *d, Tensor t) {
    CHECK(t.tier != TIER_DISK && t.type == I32 && t.offset >= d->tables_at[t.tier]);
    size_t at = t.offset - d->tables_at[t.tier];
    CHECK(at + tensor_span(t) <= d->tables_bytes);
    return (int32_t *)(d->tables + at);
}

static Event sim_copy(Device *base, const Op *op, const Move *moves, int n) {
    Sim *d = (Sim *)base;
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        const Move *m = &moves[i];
        CHECK((size_t)m->dst.rows * m->dst.cols == (size_t)m->src.rows * m->src.cols);
        CHECK(m->dst.type == m->src.type || (m->src.file && m->dst.type == F16));
        touch(d, m->dst), touch(d, m->src);
        bytes += tensor_bytes(m->src);
    }
    return post(d, op, bytes, moving(d, op, bytes));
}

/* Rows that are gathered; on the disk's lane they have moved. */
static Event sim_embed(Device *base, const Op *op, Tensor y, Tensor table, Tensor idx, bool add) {
    Sim *d = (Sim *)base;
    (void)idx, (void)add;
    touch(d, y), touch(d, table);
    size_t bytes = (size_t)y.rows * y.cols * type_bytes(table.type);
    return post(d, op, lane_channel[op->lane] == DTOC ? bytes : 0, moving(d, op, bytes));
}

static Event sim_layernorm(Device *base, const Op *op, Tensor y, Tensor x, Tensor w, Tensor b) {
    Sim *d = (Sim *)base;
    touch(d, y), touch(d, x), touch(d, w), touch(d, b);
    return post(d, op, 0, moving(d, op, tensor_bytes(x) + tensor_bytes(y)));
}

static Event sim_linear(Device *base, const Op *op, Tensor y, Tensor x, Tensor w, Tensor b, Tensor residual, bool relu) {
    Sim *d = (Sim *)base;
    (void)relu;
    CHECK(y.rows == x.rows && x.type == base->act_type);
    if (w.type == U8)
        CHECK((size_t)w.rows * w.cols == quant_matrix_bytes(w.quant, y.cols, x.cols));
    else
        CHECK(x.cols == w.cols && y.cols == w.rows && w.type == F16);
    touch(d, y), touch(d, x), touch(d, w), touch(d, b), touch(d, residual);
    double (*seconds)(const Hardware *, bool, double, double, double, double) =
        w.type == U8 ? linear_packed_seconds : linear_seconds;
    return post(d, op, 0, seconds(&d->hardware, op->prefill, y.rows, y.cols, x.cols, type_bytes(x.type)));
}

static Event sim_unpack(Device *base, const Op *op, Tensor w, Tensor packed) {
    Sim *d = (Sim *)base;
    touch(d, w), touch(d, packed);
    return post(d, op, 0, moving(d, op, tensor_bytes(w) + tensor_bytes(packed)));
}

static Event sim_pack(Device *base, const Op *op, Tensor packed, Tensor kv, int nh) {
    Sim *d = (Sim *)base;
    (void)nh;
    touch(d, packed), touch(d, kv);
    return post(d, op, 0, moving(d, op, tensor_bytes(packed) + tensor_bytes(kv)));
}

static Event sim_attend_prefill(Device *base, const Op *op, Tensor o, Tensor q, Tensor kv, Tensor start, int nh) {
    Sim *d = (Sim *)base;
    const int32_t *row = indices(d, start);
    double seconds = 0;
    (void)nh;
    touch(d, o), touch(d, q), touch(d, kv);
    for (int r = 0; r + 1 < start.cols; r++)
        seconds += attend_prefill_seconds(&d->hardware, 1, row[r + 1] - row[r], o.cols, type_bytes(o.type));
    return post(d, op, 0, seconds);
}

/* Seconds of attention to a table's tokens, of which K, V or both are read. */
static double attending(const Sim *d, const Op *op, const PageTable *table, const int32_t *len, double share) {
    bool on_cpu = lane_channel[op->lane] == CPU;
    double seconds = 0;
    for (int r = 0; r < table->len.cols; r++)
        seconds += attend_seconds(&d->hardware, on_cpu, op->prefill, 1, len[r], table->h1, table->k.type == U8);
    return seconds * share;
}

static Event sim_attend(Device *base, const Op *op, Tensor o, Tensor q, const PageTable *table) {
    Sim *d = (Sim *)base;
    const int32_t *len = indices(d, table->len);
    CHECK(table->len.cols == o.rows);
    touch(d, o), touch(d, q);
    for (int r = 0; r < o.rows; r++)
        for (int kv = 0; kv < 2; kv++) base->count[op->lane].read[kv] += len[r] * table_row_bytes(table);
    return post(d, op, 0, attending(d, op, table, len, 1));
}

static Event sim_select(Device *base, const Op *op, Tensor tokens, Tensor weights, Tensor q, const PageTable *table,
                        double sparsity) {
    Sim *d = (Sim *)base;
    const int32_t *len = indices(d, table->len);
    (void)sparsity;
    touch(d, tokens), touch(d, weights), touch(d, q);
    for (int r = 0; r < q.rows; r++) base->count[op->lane].read[0] += len[r] * table_row_bytes(table);
    return post(d, op, 0, attending(d, op, table, len, .5));
}

/* Tokens whose V is wanted, with the own or without. */
static double chosen(const PageTable *table, const int32_t *len, double sparsity, int own) {
    double n = 0;
    for (int r = 0; r < table->len.cols; r++) n += sparse_tokens(sparsity, len[r]) - 1 + own;
    return n;
}

static Event sim_fetch(Device *base, const Op *op, const PageTable *staged, const PageTable *home, Tensor tokens,
                       double sparsity) {
    Sim *d = (Sim *)base;
    (void)home;
    touch(d, staged->v), touch(d, tokens);
    double bytes = chosen(staged, indices(d, staged->len), sparsity, 0) * table_row_bytes(staged);
    return post(d, op, (size_t)bytes, moving(d, op, bytes));
}

static Event sim_weigh(Device *base, const Op *op, Tensor o, Tensor tokens, Tensor weights, const PageTable *table,
                       double sparsity) {
    Sim *d = (Sim *)base;
    const int32_t *len = indices(d, table->len);
    double all = 0, n = chosen(table, len, sparsity, 1);
    for (int r = 0; r < o.rows; r++) all += len[r];
    touch(d, o), touch(d, tokens), touch(d, weights);
    base->count[op->lane].read[1] += (size_t)n * table_row_bytes(table);
    return post(d, op, 0, attending(d, op, table, len, .5 * n / all));
}

/* Pages are touched up to the highest index that is written to. */
static Event sim_append(Device *base, const Op *op, const PageTable *p, Tensor kv, Tensor seq, Tensor pos) {
    Sim *d = (Sim *)base;
    const int32_t *s = indices(d, seq), *t = indices(d, pos), *pages = indices(d, p->pages);
    int highest = -1;
    touch(d, kv);
    for (int r = 0; r < kv.rows; r++) {
        int page = pages[(size_t)s[r] * p->pages.ld + t[r] / p->page_tokens];
        if (page > highest) highest = page;
    }
    touch(d, tensor_rows(p->k, 0, (highest + 1) * p->page_tokens));
    touch(d, tensor_rows(p->v, 0, (highest + 1) * p->page_tokens));
    size_t bytes = tensor_span(kv);
    return post(d, op, lane_channel[op->lane] == CTOD ? bytes : 0, moving(d, op, bytes));
}

static Event sim_pick(Device *base, const Op *op, Tensor ids, Tensor logits, Tensor prompt, Tensor pos,
                      const Sampling *sampling) {
    Sim *d = (Sim *)base;
    (void)prompt, (void)pos, (void)sampling;
    touch(d, ids), touch(d, logits);
    return post(d, op, 0, moving(d, op, tensor_bytes(logits)));
}

static Event sim_score(Device *base, const Op *op, Tensor logp, Tensor best, Tensor logits, Tensor target) {
    Sim *d = (Sim *)base;
    (void)target;
    touch(d, logp), touch(d, best), touch(d, logits);
    return post(d, op, 0, moving(d, op, tensor_bytes(logits)));
}

// ---------------------------------------------------------------------------------------------------------------
// Opening and closing
// ---------------------------------------------------------------------------------------------------------------

static void *sim_host(Device *base, Tensor t) {
    Sim *d = (Sim *)base;
    size_t at = d->tables_at[TIER_CPU];
    touch(d, t);
    return t.tier == TIER_CPU && t.offset >= at && t.offset < at + d->tables_bytes ? indices(d, t) : NULL;
}

static double sim_now(Device *base) { return ((Sim *)base)->clock; }

static void sim_close(Device *base) {
    Sim *d = (Sim *)base;
    for (int i = 0; i < NLANES; i++) free(d->lane[i].ring);
    free(d->tables);
    free(d);
}

Device *sim_open(const Plan *plan, const Hardware *hardware, Error *err) {
    Sim *d = xcalloc(1, sizeof *d);
    (void)err; /* as the other devices; there is nothing here that could be missing */
    d->base = (Device){.name = "sim",
                       .act_type = plan->act_type,
                       .copy = sim_copy,
                       .embed = sim_embed,
                       .layernorm = sim_layernorm,
                       .linear = sim_linear,
                       .unpack = sim_unpack,
                       .pack = sim_pack,
                       .attend_prefill = sim_attend_prefill,
                       .attend = sim_attend,
                       .select = sim_select,
                       .fetch = sim_fetch,
                       .weigh = sim_weigh,
                       .append = sim_append,
                       .pick = sim_pick,
                       .score = sim_score,
                       .wait = sim_wait,
                       .host = sim_host,
                       .now = sim_now,
                       .close = sim_close};
    d->hardware = *hardware;
    reach_open(&d->reach, d->base.peak, plan);
    memcpy(d->tables_at, plan->tables, sizeof d->tables_at);
    d->tables_bytes = 2 * plan->slots * plan->table_bytes;
    d->tables = xcalloc(d->tables_bytes, 1);
    return &d->base;
}
