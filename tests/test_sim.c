/* test_sim.c: the clock. First single ops whose times can be worked out by hand, then whole schedules: their times where
 * one thing alone counts, the bytes they move, the memory they reach. All times are simulated; none is the test's own. */
#include <sys/resource.h>

#include "tests.h"

static const OptConfig small = SMALL_CONFIG(2);
enum { S = 20, N = 6, SEQS = 6 };

/* Round rates that differ from each other and between the stages ([0] generation, [1] prefill). */
static const Hardware round_rates = {.name = "round",
                                     .gmem = 1e9,
                                     .cmem = 1e9,
                                     .nmem = 1e9,
                                     .ctog_bdw = {1000, 2000},
                                     .gtoc_bdw = {500, 250},
                                     .dtoc_bdw = {100, 50},
                                     .ctod_bdw = {200, 400},
                                     .mm_flops = {1e6, 2e6},
                                     .bmm_flops = {1e5, 4e5},
                                     .cpu_flops = {2e4, 3e4}};

static Policy mixed(void) { /* a bit of everything everywhere */
    return (Policy){.wg = .4,
                    .wc = .3,
                    .cg = .34,
                    .cc = .33,
                    .hg = .34,
                    .hc = .33,
                    .gbs = 6,
                    .num_gpu_batches = 1,
                    .overlap = true,
                    .delegated = true,
                    .page_tokens = 16,
                    .table_home = TIER_CPU};
}

/* A plan of `small` for an even task, and the sim on it. */
typedef struct {
    Checkpoint *checkpoint;
    Task task;
    Plan *plan;
    Device *device;
} OnSim;

static void onsim_open(OnSim *r, const OptConfig *config, const Policy *policy, const Hardware *hardware, int seqs, int s,
                     int n) {
    Error err = {0, ""};
    r->checkpoint = checkpoint_dummy(config, 3);
    r->task = equal_task(seqs, s, n);
    r->plan = plan_make(r->checkpoint, policy, &r->task, F16, &err);
    CHECK(r->plan);
    r->device = sim_open(r->plan, hardware, &err);
    CHECK(r->device);
}

static void onsim_close(OnSim *r) {
    r->device->close(r->device);
    plan_free(r->plan);
    free_task(&r->task);
    checkpoint_close(r->checkpoint);
}

static OnSim rig;
static void open_mixed(const Hardware *hardware) {
    Policy p = mixed();
    onsim_open(&rig, &small, &p, hardware, SEQS, S, N);
}
static void close_rig(void) { onsim_close(&rig); }

/* Simulated seconds agree to 1e-8 of their value: the sim's own rounding is 1e-9 an op. */
static bool about(double a, double b) { return fabs(a - b) <= 1e-8 * fabs(b); }
static void expect_seconds(double found, double expected, int line) {
    if (!about(found, expected)) fprintf(stderr, "\n    line %d: %.12g s; expected %.12g s\n", line, found, expected);
    CU_ASSERT(about(found, expected));
}
#define EXPECT_SECONDS(found, expected) expect_seconds(found, expected, __LINE__)

static double now(void) { return rig.device->now(rig.device); }

/* Waits, and returns the clock. */
static double wait_for(Event e) {
    Error err = {0, ""};
    CU_ASSERT_EQUAL(rig.device->wait(rig.device, e, &err), 0);
    return now();
}

/* So many bytes of the tier's largest region. */
static Tensor piece(Tier tier, size_t bytes) {
    RegionId largest = RESTING_WEIGHTS;
    for (int id = 0; id < NREGIONS; id++)
        if (rig.plan->region[id][tier].bytes > rig.plan->region[largest][tier].bytes) largest = (RegionId)id;
    CHECK(rig.plan->region[largest][tier].bytes >= bytes);
    return plan_bytes(rig.plan, largest, tier, 0, F16, (int)(bytes / 2));
}

static Event post_op(Op op) { return rig.device->post(rig.device, &op); }

static Call on(Lane lane, bool prefill) { return (Call){.lane = lane, .kind = CACHE, .prefill = prefill}; }

/* A copy of so many bytes in generation, behind an event. */
static Event copy_after(Lane lane, size_t bytes, Event e) {
    static const Tier from[NCHANNELS] = {TIER_CPU, TIER_GPU, TIER_DISK, TIER_CPU, TIER_GPU, TIER_CPU},
                      to[NCHANNELS] = {TIER_GPU, TIER_CPU, TIER_CPU, TIER_DISK, TIER_GPU, TIER_CPU};
    Channel c = lane_channel[lane];
    Move m = {piece(to[c], bytes), piece(from[c], bytes)};
    Op op = op_copy(on(lane, false), &m, 1);
    if (e.seq) op.after[op.nafter++] = e;
    return post_op(op);
}
static const Event nothing = {0, 0};
static Event copy(Lane lane, size_t bytes) { return copy_after(lane, bytes, nothing); }

// ---------------------------------------------------------------------------------------------------------------
// Lanes and links
// ---------------------------------------------------------------------------------------------------------------

static void copies_on_one_lane_add_up(void) {
    open_mixed(&round_rates);
    Event a = copy(W_LOAD, 600), b = copy(W_LOAD, 400);
    CU_ASSERT(a.lane == W_LOAD && a.seq == 1 && b.seq == 2);
    EXPECT_SECONDS(now(), 0); /* posting takes no time */
    EXPECT_SECONDS(wait_for(nothing), 0);
    EXPECT_SECONDS(wait_for(a), .6);
    EXPECT_SECONDS(wait_for(b), 1);
    EXPECT_SECONDS(wait_for(a), 1); /* what has happened has happened */
    EXPECT_SECONDS(rig.device->count[W_LOAD].busy_s, 1);
    CU_ASSERT_EQUAL(rig.device->count[W_LOAD].moved[CACHE], 1000);
    CU_ASSERT_EQUAL(rig.device->count[W_LOAD].moved[WEIGHT], 0);
    close_rig();
}

/* 600 and 200 bytes at 1000 bytes/s: both run at 500 until 0.4 s, then what is left of the first, 400, alone. */
static void lanes_of_one_link_share_its_bandwidth(void) {
    open_mixed(&round_rates);
    Event a = copy(W_LOAD, 600), b = copy(C_LOAD, 200);
    EXPECT_SECONDS(wait_for(b), .4);
    EXPECT_SECONDS(wait_for(a), .8);
    EXPECT_SECONDS(rig.device->count[W_LOAD].busy_s, .8);
    EXPECT_SECONDS(rig.device->count[C_LOAD].busy_s, .4);
    close_rig();
    open_mixed(&round_rates); /* three lanes of ctog: 300 each at a third, then 300 at half, then 300 alone */
    a = copy(W_LOAD, 900), b = copy(C_LOAD, 600);
    Event c = copy(A_UP, 300);
    EXPECT_SECONDS(wait_for(c), .9);
    EXPECT_SECONDS(wait_for(b), 1.5);
    EXPECT_SECONDS(wait_for(a), 1.8);
    close_rig();
}

static void different_links_run_side_by_side(void) {
    open_mixed(&round_rates);
    Event up = copy(W_LOAD, 1000), down = copy(STORE, 1000), read = copy(C_READ, 1000), write = copy(D_WRITE, 1000);
    EXPECT_SECONDS(wait_for(up), 1);
    EXPECT_SECONDS(wait_for(down), 2);
    EXPECT_SECONDS(wait_for(write), 5);
    EXPECT_SECONDS(wait_for(read), 10);
    close_rig();
}

static void each_stage_has_its_rate(void) {
    static const Lane lanes[] = {C_LOAD, STORE, C_READ, D_WRITE};
    static const double rate[] = {2000, 250, 50, 400};
    static const Tier tiers[][2] = {
        {TIER_GPU, TIER_CPU}, {TIER_CPU, TIER_GPU}, {TIER_CPU, TIER_DISK}, {TIER_DISK, TIER_CPU}};
    for (int i = 0; i < 4; i++) {
        open_mixed(&round_rates);
        Move m = {piece(tiers[i][0], 1000), piece(tiers[i][1], 1000)};
        EXPECT_SECONDS(wait_for(post_op(op_copy(on(lanes[i], true), &m, 1))), 1000 / rate[i]);
        close_rig();
    }
}

/* 1000 bytes up from 0 to 1 s; 500 bytes down only then, until 2 s; those behind in their lane wait with them. */
static void an_event_holds_up_what_comes_after_it(void) {
    open_mixed(&round_rates);
    Event up = copy(W_LOAD, 1000), down = copy_after(STORE, 500, up), behind = copy(STORE, 250), other = copy(A_DOWN, 100);
    EXPECT_SECONDS(wait_for(other), .2); /* alone on gtoc so far */
    EXPECT_SECONDS(wait_for(down), 2);
    EXPECT_SECONDS(wait_for(behind), 2.5);
    EXPECT_SECONDS(rig.device->count[STORE].busy_s, 1.5); /* waits are not counted */
    close_rig();
}

static void an_op_never_begins_before_it_is_posted(void) {
    open_mixed(&round_rates);
    wait_for(copy(W_LOAD, 1000));
    EXPECT_SECONDS(wait_for(copy(STORE, 500)), 2); /* the link down has been idle since 0 */
    copy(C_READ, 1000);
    EXPECT_SECONDS(wait_for(copy(W_LOAD, 1000)), 3);
    EXPECT_SECONDS(wait_for(copy(C_READ, 100)), 13); /* 10 s from 2 on, then its own */
    close_rig();
}

static void every_op_takes_op_s_besides(void) {
    Hardware h = round_rates;
    h.op_s = .25;
    open_mixed(&h);
    copy(W_LOAD, 1000);
    EXPECT_SECONDS(wait_for(copy(W_LOAD, 1000)), 2.5);
    close_rig();
}

static void ops_without_work_take_no_time(void) {
    Hardware h = round_rates;
    open_mixed(&h);
    Event a = copy(PROJECT, 1000), b = copy_after(FINISH, 1000, a); /* no bound on the GPU's memory */
    EXPECT_SECONDS(wait_for(copy_after(PROJECT, 1000, b)), 0);
    CU_ASSERT_EQUAL(rig.device->count[PROJECT].moved[CACHE], 2000);
    close_rig();
    h.gpu_bdw = 10000;
    open_mixed(&h);
    EXPECT_SECONDS(wait_for(copy(PROJECT, 1000)), .1); /* with a bound: bytes over it */
    close_rig();
}

/* Posted FINISH 1, PROJECT 2, FINISH 3; 2 waits for a link. The GPU takes 1, then 3, which is ready, then 2. With 2 ready
 * in time it would be 1, 2, 3. */
static void the_gpu_does_one_op_at_a_time_in_the_order_of_posting(void) {
    Hardware h = round_rates;
    h.gpu_bdw = 100;
    for (int late = 0; late < 2; late++) {
        open_mixed(&h);
        Event up = copy(W_LOAD, late ? 1500 : 500);
        Event one = copy(FINISH, 100), two = copy_after(PROJECT, 200, up), three = copy(FINISH, 400);
        EXPECT_SECONDS(wait_for(one), 1);
        EXPECT_SECONDS(wait_for(late ? three : two), late ? 5 : 3);
        EXPECT_SECONDS(wait_for(late ? two : three), 7);
        EXPECT_SECONDS(rig.device->count[PROJECT].busy_s + rig.device->count[FINISH].busy_s, 7);
        close_rig();
    }
}

/* Far more ops than a ring begins with, posted when it is partly used. */
static void a_queue_has_no_end(void) {
    open_mixed(&round_rates);
    Event e = nothing;
    for (int i = 0; i < 30; i++) copy(W_LOAD, 2);
    wait_for(copy(W_LOAD, 2));
    for (int i = 0; i < 5000; i++) e = copy(W_LOAD, 2 + 2 * (i % 3));
    EXPECT_SECONDS(wait_for(e), (62 + 5000 / 3 * 12 + 2 + 4) / 1000.); /* 2, 4, 6, 2, 4, 6, ..., 2, 4 */
    CU_ASSERT_EQUAL(e.seq, 5031);
    close_rig();
}

// ---------------------------------------------------------------------------------------------------------------
// Arithmetic
// ---------------------------------------------------------------------------------------------------------------

static Tensor ws(RegionId id, int rows) { return plan_view(rig.plan, id, TIER_GPU, 0, 0, rows); }

static Event linear(int rows, bool prefill) {
    int j = 0;
    while (rig.plan->weight[j][FC1_W].home.tier != TIER_GPU) j++;
    const WeightPlace *w = rig.plan->weight[j];
    return post_op(op_linear_relu(on(PROJECT, prefill), ws(MLP, rows), ws(ATTENDED, rows), w[FC1_W].home, w[FC1_B].home));
}

static void a_product_takes_its_flops_or_its_bytes(void) {
    Hardware h = round_rates;
    double flops = 2. * 7 * 60 * 100, bytes = 2. * (7 * 60 + 60 * 100 + 7 * 100);
    open_mixed(&h);
    EXPECT_SECONDS(wait_for(linear(7, false)), flops / 1e6);
    EXPECT_SECONDS(wait_for(linear(7, true)), flops / 1e6 + flops / 2e6);
    close_rig();
    h.gpu_bdw = bytes / 3; /* now reading takes longer */
    open_mixed(&h);
    EXPECT_SECONDS(wait_for(linear(7, false)), 3);
    CU_ASSERT_EQUAL(rig.device->count[PROJECT].moved[CACHE], 0);
    close_rig();
}

/* An index table at `ints` of the first batch's block; side: GPU or CPU. */
static Tensor table_view(Tier side, int ints, int rows, int cols) {
    Tensor t = plan_bytes(rig.plan, INDEX_TABLES, side, (size_t)ints * 4, I32, cols);
    t.rows = rows;
    return t;
}

static void put(int ints, const int32_t *values, int n) {
    memcpy(rig.device->cpu_address(rig.device, table_view(TIER_CPU, ints, 1, n)), values, n * sizeof *values);
}

static PageTable pool(Tier tier, int seqs) {
    Tier side = tier == TIER_GPU ? TIER_GPU : TIER_CPU;
    PageTable table = plan_pages(rig.plan, KV_CACHE, tier, 0, 2);
    table.pages = table_view(side, 32, seqs, 2);
    table.len = table_view(side, 0, 1, seqs);
    return table;
}

static Event attend(Lane lane) {
    Tier side = lane == ATTEND ? TIER_CPU : TIER_GPU;
    PageTable table = pool(side, 2);
    Tensor q = side == TIER_CPU ? plan_view(rig.plan, QUERY, side, 0, 0, 2) : tensor_cols(ws(QKV, 2), 0, small.h1);
    Tensor o = plan_view(rig.plan, ATTENDED, side, 0, 0, 2);
    return post_op(op_attend(on(lane, false), o, q, &table));
}

/* 4 h1 flops and 4 h1 bytes a token, of lengths that rest in the tables when the op is posted. */
static void attention_takes_the_tokens_that_it_sees(void) {
    static const int32_t len[] = {17, 5}, longer[] = {170, 50};
    Hardware h = round_rates;
    double tokens = 4. * 60 * (17 + 5);
    open_mixed(&h);
    put(0, len, 2);
    Event gpu = attend(FINISH), cpu = attend(ATTEND);
    put(0, longer, 2);
    EXPECT_SECONDS(wait_for(gpu), tokens / 1e5);
    EXPECT_SECONDS(wait_for(cpu), tokens / 2e4);
    EXPECT_SECONDS(wait_for(attend(FINISH)), tokens / 2e4 + 10 * tokens / 1e5);
    close_rig();
    h.gpu_bdw = tokens / 3, h.cpu_bdw = tokens / 4;
    open_mixed(&h);
    put(0, len, 2);
    gpu = attend(FINISH), cpu = attend(ATTEND);
    EXPECT_SECONDS(wait_for(gpu), 3);
    EXPECT_SECONDS(wait_for(cpu), 4);
    close_rig();
}

/* Causal: a prompt of s tokens has s (s + 1) / 2 pairs of query and key. */
static void prefill_attention_takes_half_the_square(void) {
    static const int32_t start[] = {0, 3, 4, 11};
    open_mixed(&round_rates);
    put(0, start, 4);
    Tensor qkv = ws(QKV, 11);
    Event e = post_op(op_attend_prefill(on(FINISH, true), ws(ATTENDED, 11), tensor_cols(qkv, 0, small.h1),
                                        tensor_cols(qkv, small.h1, 2 * small.h1), table_view(TIER_GPU, 0, 1, 4), small.nh));
    EXPECT_SECONDS(wait_for(e), 4. * 60 * (6 + 1 + 28) / 4e5);
    close_rig();
}

/* Single tokens go into pages: over the disk's link, or through the CPU's memory, and as far as the highest page. */
static void appends_take_their_bytes_and_reach_their_pages(void) {
    static const int32_t seq[] = {0, 1}, pos[] = {3, 17}, pages[] = {0, 1, 0, 1};
    Hardware h = round_rates;
    h.cpu_bdw = 48;
    open_mixed(&h);
    put(0, seq, 2), put(8, pos, 2), put(32, pages, 4);
    Tensor kv = plan_view(rig.plan, NEW_KV, TIER_CPU, 0, 0, 2);
    for (int disk = 0; disk < 2; disk++) {
        Tier tier = disk ? TIER_DISK : TIER_CPU;
        PageTable table = pool(tier, 2);
        const Call call = on(disk ? D_WRITE : ATTEND, false);
        size_t peak = rig.device->peak[tier];
        double from = now();
        Event e = post_op(op_append(call, &table, kv, table_view(TIER_CPU, 0, 1, 2), table_view(TIER_CPU, 8, 1, 2)));
        EXPECT_SECONDS(wait_for(e) - from, 480. / (disk ? 200 : 48));
        CU_ASSERT_EQUAL(rig.device->count[call.lane].moved[CACHE], disk ? 480 : 0);
        size_t reached = rig.device->peak[tier] - peak, half = rig.plan->region[KV_CACHE][tier].bytes / (2 * small.l);
        if (disk) CU_ASSERT_EQUAL(reached, (half + 32 * 120 + 63) / 64 * 64); /* all of K and two pages of V */
    }
    close_rig();
}

static void other_ops_take_their_bytes(void) {
    Hardware h = round_rates;
    h.gpu_bdw = 1000, h.cpu_bdw = 500;
    open_mixed(&h);
    Device *d = rig.device;
    const Plan *p = rig.plan;
    Call call = on(PROJECT, false), gather = on(ATTEND, false);
    Tensor x = ws(ATTENDED, 5), none = {.rows = 0}, norm = p->global[FINAL_LN_W].home;
    double t = 0;
    EXPECT_SECONDS(wait_for(post_op(op_layernorm(call, x, x, norm, norm))), t += 2 * 5 * 120 / 1000.);
    EXPECT_SECONDS(wait_for(post_op(op_embed(call, x, p->global[POS_EMBED].home, none, true))), t += 5 * 120 / 1000.);
    Tensor rows = plan_view(p, EMBEDDED, TIER_CPU, 0, 0, 5);
    EXPECT_SECONDS(wait_for(post_op(op_embed(gather, rows, p->global[TOK_EMBED].home, none, false))), t += 5 * 120 / 500.);
    CU_ASSERT_EQUAL(d->count[ATTEND].moved[CACHE], 0);
    Tensor logits = plan_view(p, LOGITS, TIER_GPU, 0, 0, 2),
           ids = tensor_cols(plan_view(p, NEW_TOKENS, TIER_GPU, 0, 0, 1), 0, 2);
    EXPECT_SECONDS(wait_for(post_op(op_pick(call, ids, logits, none, none, &rig.task.sampling))), t += 2 * 131 * 4 / 1000.);
    close_rig();
    Policy on_disk = mixed(); /* rows that are gathered on disk have moved */
    on_disk.table_home = TIER_DISK;
    onsim_open(&rig, &small, &on_disk, &round_rates, SEQS, S, N);
    gather.lane = C_READ;
    rows = plan_view(rig.plan, EMBEDDED, TIER_CPU, 0, 0, 5);
    Event e = post_op(op_embed(gather, rows, rig.plan->global[TOK_EMBED].home, none, false));
    EXPECT_SECONDS(wait_for(e), 600 / 100.);
    CU_ASSERT_EQUAL(rig.device->count[C_READ].moved[CACHE], 600);
    close_rig();
}

/* GPU 1 s and CPU 3 s on the same cores: both at half speed until 2 s, then 2 s alone. Links are no part of it. */
static void shared_cores_go_at_half_speed_while_both_work(void) {
    static const int32_t len[] = {50, 50};
    Hardware h = round_rates;
    h.bmm_flops[0] = 24000, h.cpu_flops[0] = 8000;
    for (int shared = 0; shared < 2; shared++) {
        h.shared_cores = shared;
        open_mixed(&h);
        put(0, len, 2);
        Event gpu = attend(FINISH), cpu = attend(ATTEND), up = copy(W_LOAD, 1000);
        EXPECT_SECONDS(wait_for(up), 1);
        EXPECT_SECONDS(wait_for(gpu), shared ? 2 : 1);
        EXPECT_SECONDS(wait_for(cpu), shared ? 4 : 3);
        EXPECT_SECONDS(rig.device->count[FINISH].busy_s, shared ? 2 : 1);
        close_rig();
    }
}

/* Each link that is busy takes its own part, whichever others are, and a tenth is always left. */
static void copies_on_every_link_take_their_part_of_shared_cores(void) {
    static const int32_t len[] = {50, 50};
    static const Lane lane[] = {W_LOAD, STORE, C_READ, D_WRITE}; /* by channel */
    static const double part[] = {.4, .2, .15, .3};
    Hardware h = round_rates;
    h.shared_cores = true, h.copy_core_s = part[CTOG] / 1000, h.disk_core_s = part[DTOC] / 100;
    h.bmm_flops[0] = 10 * 24000;
    for (int busy = 0; busy < 1 << 4; busy++) {
        double left = 1;
        open_mixed(&h);
        put(0, len, 2);
        for (int c = CTOG; c <= CTOD; c++) {
            if (!(busy >> c & 1)) continue;
            copy(lane[c], (size_t)(2 * h.bdw[c][0]));
            left -= part[c];
        }
        EXPECT_SECONDS(wait_for(attend(FINISH)), .1 / fmax(left, .1));
        close_rig();
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The table of functions
// ---------------------------------------------------------------------------------------------------------------

static void only_index_tables_have_an_address(void) {
    open_mixed(&round_rates);
    Device *d = rig.device;
    const Plan *p = rig.plan;
    size_t bytes = p->region[INDEX_TABLES][TIER_CPU].bytes;
    CU_ASSERT_STRING_EQUAL(d->name, "sim");
    CU_ASSERT_EQUAL(d->act_type, F16);
    CU_ASSERT_PTR_NULL(d->upload);
    uint8_t *first = d->cpu_address(d, table_view(TIER_CPU, 0, 1, 1)),
            *last = d->cpu_address(d, table_view(TIER_CPU, bytes / 4 - 1, 1, 1));
    CU_ASSERT_PTR_NOT_NULL_FATAL(first);
    CU_ASSERT_EQUAL(last - first, (long)bytes - 4);
    memset(first, 1, bytes); /* all of it is there */
    CU_ASSERT_PTR_NULL(d->cpu_address(d, plan_view(p, NEW_TOKENS, TIER_CPU, 0, 0, 1)));
    CU_ASSERT_PTR_NULL(d->cpu_address(d, piece(TIER_CPU, 100)));
    close_rig();
}

static void a_trace_says_when_each_op_ran(void) {
    Trace trace = {.n = 0};
    open_mixed(&round_rates);
    rig.device->trace = &trace;
    Call load = on(W_LOAD, false);
    Move m = {piece(TIER_GPU, 1000), piece(TIER_CPU, 1000)}, back = {m.src, m.dst};
    load.kind = WEIGHT, load.i = 4, load.j = 5, load.k = 6;
    Op down = op_copy(on(STORE, false), &back, 1);
    down.after[down.nafter++] = post_op(op_copy(load, &m, 1));
    Event e = post_op(down);
    CU_ASSERT_EQUAL(trace.n, 0); /* nothing has run yet */
    wait_for(e);
    CU_ASSERT_EQUAL_FATAL(trace.n, 2);
    const Slice *s = trace.slice;
    CU_ASSERT(s[0].lane == W_LOAD && s[0].kind == WEIGHT && s[0].i == 4 && s[0].j == 5 && s[0].k == 6);
    CU_ASSERT(s[0].bytes == 1000 && s[1].bytes == 1000 && s[1].lane == STORE && s[1].kind == CACHE);
    EXPECT_SECONDS(s[0].begin, 0);
    EXPECT_SECONDS(s[0].end, 1);
    EXPECT_SECONDS(s[1].begin, 1);
    EXPECT_SECONDS(s[1].end, 3);
    linear(7, false);
    wait_for(linear(7, true));
    CU_ASSERT_EQUAL(trace.slice[trace.n - 1].bytes, 0); /* arithmetic moves nothing */
    trace_free(&trace);
    close_rig();
}

// ---------------------------------------------------------------------------------------------------------------
// Whole schedules
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    double total, work; /* the clock at the end; busy seconds of all lanes */
    LaneCount count[NLANES];
    size_t moved[NCHANNELS][NKINDS], peak[NTIERS], planned[NTIERS];
    RunStats stats;
    int done;
} Outcome;

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    Outcome *o = ctx;
    (void)prompt, (void)tokens, (void)err;
    CU_ASSERT(n == rig.task.prompts[prompt].n && reason == FINISH_LENGTH);
    o->done++;
    return 0;
}

static void simulate(Outcome *o, const OptConfig *config, const Policy *policy, const Hardware *hardware, int seqs, int s,
                     int n) {
    Error err = {0, ""};
    *o = (Outcome){.total = 0};
    Listener listener = {.ctx = o, .done = on_done};
    onsim_open(&rig, config, policy, hardware, seqs, s, n);
    ASSERT_OK(schedule_run(rig.plan, &rig.task, rig.device, &listener, &o->stats, &err));
    o->total = now();
    memcpy(o->count, rig.device->count, sizeof o->count);
    memcpy(o->peak, rig.device->peak, sizeof o->peak);
    memcpy(o->planned, rig.plan->total, sizeof o->planned);
    for (int lane = 0; lane < NLANES; lane++) {
        o->work += o->count[lane].busy_s;
        for (int kind = 0; kind < NKINDS; kind++) o->moved[lane_channel[lane]][kind] += o->count[lane].moved[kind];
    }
    CU_ASSERT_EQUAL(o->done, seqs);
    CU_ASSERT_EQUAL(o->stats.generated, (long)seqs * n);
    close_rig();
}

/* Where only products take time: 2 flops for every weight of a layer and token, and for the head's and last token. In
 * sweeps of the diagonal schedule prompts and new tokens are side by side. */
static void products_alone_take_the_flops_of_the_model(void) {
    Hardware h = test_fast_machine();
    Outcome o;
    double layer = 3 * 2. * (4 * 60 * 60 + 2 * 60 * 100), head = 2. * 131 * 60;
    h.mm_flops[0] = 1e6, h.mm_flops[1] = 3e6;
    for (int way = 0; way < 4; way++) {
        Policy p = all_gpu(2, 3);
        p.overlap = way > 0, p.schedule = (Schedule)(way % 3);
        simulate(&o, &small, &p, &h, SEQS, S, N);
        double prefill = SEQS * (S * layer + head) / 3e6, decode = SEQS * (N - 1) * (layer + head) / 1e6;
        EXPECT_SECONDS(o.total, prefill + decode);
        if (!p.overlap) continue; /* each batch's tokens are fetched before its next layer 0, behind the others' */
        EXPECT_SECONDS(o.stats.prefill_s, prefill);
        EXPECT_SECONDS(o.stats.decode_s, decode);
        EXPECT_SECONDS(o.total, o.stats.total_s);
    }
}

/* In generation the GPU attends, or the CPU. On the diagonal some decode beside a prefill; a sweep in which they do counts
 * as the one and the other by the seconds of the processors, of which decoding takes equally many for each token. */
static void attention_alone_takes_the_tokens_of_the_cache(void) {
    const double flops = 3 * 4. * 60, prompts = SEQS * S * (S + 1) / 2, prefill = flops * prompts / 3e5;
    Outcome o;
    double past = 0;
    for (int i = 1; i < N; i++) past += SEQS * (S + i);
    const double decode = flops * past / 1e5;
    for (int way = 0; way < 4; way++) {
        const bool cpu = way & 1, mixed = way & 2;
        Hardware h = test_fast_machine();
        Policy p = all_gpu(2, 3);
        p.cg = !cpu, p.cc = cpu, p.delegated = true;
        p.schedule = mixed ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
        h.bmm_flops[1] = 3e5, *(cpu ? h.cpu_flops : h.bmm_flops) = 1e5;
        simulate(&o, &small, &p, &h, SEQS, S, N);
        const double beside = decode * o.stats.beside / (SEQS * (N - 1));
        CU_ASSERT((beside > 0) == mixed);
        EXPECT_SECONDS(o.stats.prefill_s, o.stats.prefill_sweeps_s * prefill / (prefill + beside));
        if (!mixed) EXPECT_SECONDS(o.stats.prefill_s, prefill);
        if (!mixed) EXPECT_SECONDS(o.stats.decode_s, decode);
        EXPECT_SECONDS(o.count[ATTEND].busy_s, cpu ? decode : 0);
        CU_ASSERT_EQUAL(o.stats.attended, prompts + past);
    }
}

/* The link is never idle where it is all that counts: N times the model over it. With the row schedule, for every batch. */
static void streaming_alone_takes_the_bytes_of_the_weights(void) {
    Outcome o;
    for (int row = 0; row < 2; row++) {
        Hardware h = test_fast_machine();
        Policy p = all_gpu(2, 3);
        p.wg = 0, p.wc = 1, p.table_home = TIER_CPU, p.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
        h.ctog_bdw[0] = h.ctog_bdw[1] = 1e6;
        simulate(&o, &small, &p, &h, SEQS, S, N);
        CU_ASSERT_EQUAL(o.moved[CTOG][WEIGHT], (row ? 3 : 1) * N * streamed_bytes(&small, 64));
        double other = o.moved[CTOG][OTHER] + o.moved[CTOG][ACTIVATION] + o.moved[CTOG][CACHE];
        CU_ASSERT(o.total >= o.moved[CTOG][WEIGHT] / 1e6);
        CU_ASSERT(o.total <= (o.moved[CTOG][WEIGHT] + other) / 1e6 * (1 + 1e-8));
    }
}

static void without_overlap_the_times_of_all_ops_add_up(void) {
    Outcome o;
    Policy p = mixed();
    p.overlap = false, p.gbs = 2, p.num_gpu_batches = 3;
    for (int cpu = 0; cpu < 2; cpu++) {
        p.delegated = cpu;
        simulate(&o, &small, &p, &round_rates, SEQS, S, N);
        EXPECT_SECONDS(o.total, o.work);
        /* nothing shares a link then: a lane that only copies is busy for its bytes */
        Hardware even = round_rates;
        even.dtoc_bdw[1] = even.dtoc_bdw[0];
        simulate(&o, &small, &p, &even, SEQS, S, N);
        EXPECT_SECONDS(o.count[W_READ].busy_s, o.count[W_READ].moved[WEIGHT] / 100.);
        CU_ASSERT(o.count[W_READ].moved[WEIGHT] > 0);
    }
}

/* Rates at which every lane has something to do, so that there is something to hide. */
static Hardware balanced(void) {
    return (Hardware){.name = "balanced",
                      .ctog_bdw = {1e6, 1e6},
                      .gtoc_bdw = {1e6, 1e6},
                      .dtoc_bdw = {6e5, 6e5},
                      .ctod_bdw = {4e5, 4e5},
                      .mm_flops = {8e6, 2e7},
                      .bmm_flops = {4e6, 4e6},
                      .cpu_flops = {2e6, 2e6}};
}

/* What Figure 4 waits for behind every square costs something, but less than to wait for every op. */
static void to_synchronize_is_between_overlap_and_none(void) {
    const Hardware h = balanced();
    Outcome waits, overlaps, alone;
    Policy p = mixed();
    for (int cpu = 0; cpu < 2; cpu++) {
        p.gbs = 2, p.num_gpu_batches = 3, p.delegated = cpu, p.overlap = true, p.synchronize = false;
        simulate(&overlaps, &small, &p, &h, SEQS, S, N);
        p.synchronize = true;
        simulate(&waits, &small, &p, &h, SEQS, S, N);
        p.synchronize = p.overlap = false;
        simulate(&alone, &small, &p, &h, SEQS, S, N);
        CU_ASSERT(waits.total > 1.02 * overlaps.total && alone.total > 1.1 * waits.total);
    }
}

static void with_overlap_the_total_lies_between_its_bounds(void) {
    Hardware h = balanced();
    Outcome apart, o;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int shared = 0; shared < 2; shared++) {
            Policy p = mixed();
            p.gbs = 2, p.num_gpu_batches = 3, p.delegated = cpu, p.overlap = false, h.shared_cores = shared;
            simulate(&apart, &small, &p, &h, SEQS, S, N);
            p.overlap = true;
            simulate(&o, &small, &p, &h, SEQS, S, N);
            const double rate[] = {1e6, 1e6, 6e5, 4e5};
            for (int c = CTOG; c <= CTOD; c++) { /* no link carries more than its rate */
                double bytes = 0;
                for (int kind = 0; kind < NKINDS; kind++) bytes += o.moved[c][kind];
                CU_ASSERT(o.total * rate[c] >= bytes * (1 - 1e-8));
            }
            for (int lane = 0; lane < NLANES; lane++) CU_ASSERT(o.total >= o.count[lane].busy_s * (1 - 1e-8));
            double gpu = o.count[PROJECT].busy_s + o.count[FINISH].busy_s; /* one at a time */
            CU_ASSERT(o.total >= gpu * (1 - 1e-8));
            if (!shared) EXPECT_SECONDS(gpu, apart.count[PROJECT].busy_s + apart.count[FINISH].busy_s);
            CU_ASSERT(o.total <= o.work);
            CU_ASSERT(o.total < .9 * apart.total); /* and something was hidden */
        }
}

/* The same closed forms as on the real devices (A.2.1), whatever the rates; the plan is reached to the byte. */
static void bytes_and_peaks_do_not_depend_on_the_rates(void) {
    static const double f[][6] = {{1, 0, 1, 0, 1, 0},       {0, 1, 0, 1, 0, 1},    {0, 0, 0, 0, 0, 0},
                                  {.4, .3, .3, .3, .3, .3}, {0, .5, .4, .3, 1, 0}, {.7, .1, .1, .1, .1, .8}};
    Hardware slow = balanced();
    slow.op_s = 1e-4, slow.gpu_bdw = 1e5, slow.cpu_bdw = 3e5, slow.shared_cores = true;
    for (size_t i = 0; i < sizeof f / sizeof *f; i++)
        for (int way = 0; way < 4; way++) {
            Outcome a, b;
            Policy p = mixed();
            p.wg = f[i][0], p.wc = f[i][1], p.cg = f[i][2], p.cc = f[i][3], p.hg = f[i][4], p.hc = f[i][5];
            p.gbs = way & 2 ? 6 : 2, p.num_gpu_batches = way & 2 ? 1 : 3, p.delegated = way & 1;
            p.table_home = (Tier)(i % 3);
            simulate(&a, &small, &p, &round_rates, SEQS, S, N);
            simulate(&b, &small, &p, &slow, SEQS, S, N);
            CU_ASSERT_EQUAL(memcmp(a.moved, b.moved, sizeof a.moved), 0);
            CU_ASSERT_EQUAL(memcmp(a.peak, b.peak, sizeof a.peak), 0);
            CU_ASSERT_EQUAL(memcmp(a.peak, a.planned, sizeof a.peak), 0);
            CU_ASSERT(a.total != b.total);
        }
}

static void the_cache_crosses_as_the_formula_says(void) {
    size_t token = 4 * (size_t)small.h1 * small.l * SEQS, stored = token * (S + N - 1), loaded = 0, queries;
    for (int i = 1; i < N; i++) loaded += token * (S + i - 1);
    queries = (size_t)(N - 1) * SEQS * small.l * small.h1 * 2;
    for (int disk = 0; disk < 2; disk++)
        for (int cpu = 0; cpu < 2; cpu++) {
            Outcome o;
            Policy p = all_gpu(2, 3);
            p.cg = 0, p.cc = !disk, p.page_tokens = 1, p.delegated = cpu;
            simulate(&o, &small, &p, &round_rates, SEQS, S, N);
            CU_ASSERT_EQUAL(o.moved[GTOC][CACHE], stored + (cpu ? queries : 0));
            CU_ASSERT_EQUAL(o.moved[CTOG][CACHE], cpu ? queries : loaded);
            CU_ASSERT_EQUAL(o.moved[DTOC][CACHE], disk ? loaded : 0);
            CU_ASSERT_EQUAL(o.moved[CTOD][CACHE], disk ? stored : 0);
        }
}

/* The paper's own run of OPT-175B at s = 512 (on the machine of its Table 1): 256 sequences, 350 GB of weights that are not
 * there. */
static void opt_175b_takes_no_memory(void) {
    struct rusage before, after;
    OptConfig config;
    Hardware t4;
    Error err;
    Outcome o;
    Policy p = {.wc = .5,
                .hc = 1,
                .gbs = 32,
                .num_gpu_batches = 8,
                .overlap = true,
                .delegated = true,
                .page_tokens = 16,
                .table_home = TIER_CPU};
    CU_ASSERT_EQUAL(opt_config_by_name(&config, "opt-175b"), 0);
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
    getrusage(RUSAGE_SELF, &before);
    simulate(&o, &config, &p, &t4, 256, 512, 32);
    getrusage(RUSAGE_SELF, &after);
    CU_ASSERT(after.ru_maxrss - before.ru_maxrss < 200 * 1024); /* KiB */
    CU_ASSERT(o.peak[TIER_DISK] > 5e11 && o.moved[DTOC][WEIGHT] > 5e12);
    /* half the weights come from a disk of 2 GB/s, 32 times: no schedule is faster, and a good one not much slower */
    double disk = o.moved[DTOC][WEIGHT] / 2e9 + o.moved[DTOC][CACHE] / 2e9;
    CU_ASSERT(o.total > disk);
    CU_ASSERT(o.total < 2 * disk);
}

CU_TestInfo tests[] = {
    {"copies on one lane add up", copies_on_one_lane_add_up},
    {"lanes of one link share its bandwidth", lanes_of_one_link_share_its_bandwidth},
    {"different links run side by side", different_links_run_side_by_side},
    {"each stage has its rate", each_stage_has_its_rate},
    {"an event holds up what comes after it", an_event_holds_up_what_comes_after_it},
    {"an op never begins before it is posted", an_op_never_begins_before_it_is_posted},
    {"every op takes op_s besides", every_op_takes_op_s_besides},
    {"ops without work take no time", ops_without_work_take_no_time},
    {"the gpu does one op at a time in the order of posting", the_gpu_does_one_op_at_a_time_in_the_order_of_posting},
    {"a queue has no end", a_queue_has_no_end},
    {"a product takes its flops or its bytes", a_product_takes_its_flops_or_its_bytes},
    {"attention takes the tokens that it sees", attention_takes_the_tokens_that_it_sees},
    {"prefill attention takes half the square", prefill_attention_takes_half_the_square},
    {"appends take their bytes and reach their pages", appends_take_their_bytes_and_reach_their_pages},
    {"other ops take their bytes", other_ops_take_their_bytes},
    {"shared cores go at half speed while both work", shared_cores_go_at_half_speed_while_both_work},
    {"copies on every link take their part of shared cores", copies_on_every_link_take_their_part_of_shared_cores},
    {"only index tables have an address", only_index_tables_have_an_address},
    {"a trace says when each op ran", a_trace_says_when_each_op_ran},
    {"products alone take the flops of the model", products_alone_take_the_flops_of_the_model},
    {"attention alone takes the tokens of the cache", attention_alone_takes_the_tokens_of_the_cache},
    {"streaming alone takes the bytes of the weights", streaming_alone_takes_the_bytes_of_the_weights},
    {"without overlap the times of all ops add up", without_overlap_the_times_of_all_ops_add_up},
    {"to synchronize is between overlap and none", to_synchronize_is_between_overlap_and_none},
    {"with overlap the total lies between its bounds", with_overlap_the_total_lies_between_its_bounds},
    {"bytes and peaks do not depend on the rates", bytes_and_peaks_do_not_depend_on_the_rates},
    {"the cache crosses as the formula says", the_cache_crosses_as_the_formula_says},
    {"opt-175b takes no memory", opt_175b_takes_no_memory},
    CU_TEST_INFO_NULL,
};
