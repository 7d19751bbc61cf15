/* test_sim.c: the clock. First single ops whose times can be worked out by hand, then whole schedules: their times where
 * one thing alone counts. All times are simulated; none is the test's own. What a sim moves and how far it reaches is
 * test_schedule.c's, sims as stages of a pipeline are test_world.c's. */
#include <sys/resource.h>

#include "tests.h"
#include "written.h"

static const OptConfig small = SMALL_CONFIG(2);
enum { S = 20, N = 6, SEQS = 6 };

/* Round rates that differ from each other and between the stages. */
static const char round_rates[] =
    "ctog_bdw_g=1000 ctog_bdw_p=2000 gtoc_bdw_g=500 gtoc_bdw_p=250 dtoc_bdw_g=100 dtoc_bdw_p=50 "
    "ctod_bdw_g=200 ctod_bdw_p=400 mm_flops_g=1e6 mm_flops_p=2e6 bmm_flops_g=1e5 "
    "bmm_flops_p=4e5 cpu_flops_g=2e4 cpu_flops_p=3e4";

static Policy mixed(int gbs, int num_gpu_batches) { /* a bit of everything everywhere */
    Policy p = on_tiers(.4, .3, .34, .33, .34, .33, gbs, num_gpu_batches);
    p.delegated = true, p.table_home = TIER_DISK;
    return p;
}

static Checkpoint *checkpoint;
static Task task;
static Hardware simulated; /* by the rig */
static Rig rig;
static Device *device; /* of the rig */
static const Plan *plan;

static void open_sim(Policy policy, Hardware hardware) {
    checkpoint = checkpoint_dummy(&small, 3);
    task = equal_task(SEQS, S, N);
    simulated = hardware;
    rig = (Rig){.model = checkpoint, .policy = policy, .task = &task, .sim = &simulated};
    CU_ASSERT_EQUAL_FATAL(rig_open(&rig), 0);
    device = rig.device, plan = rig.plan;
}
static void open_mixed(Hardware hardware) { open_sim(mixed(6, 1), hardware); }

static void close_sim(void) {
    rig_close(&rig);
    free_task(&task);
    checkpoint_close(checkpoint);
}

/* Simulated seconds agree to 1e-8 of their value: the sim's own rounding is 1e-9 an op. */
static bool about(double a, double b) { return fabs(a - b) <= 1e-8 * fabs(b); }
#define EXPECT_SECONDS(found, expected) CU_ASSERT(about(found, expected))

static double now(void) { return device->now(device); }
static double busy(Lane lane) { return device->count[lane].busy_s; }

/* Waits, and returns the clock. */
static double wait_for(Event e) {
    CU_ASSERT_EQUAL(device->wait(device, e, &rig.err), 0);
    return now();
}

static Event post_op(Op op) { return device->post(device, &op); }
static Call on(Lane lane, bool prefill) { return (Call){.lane = lane, .kind = CACHE, .prefill = prefill}; }

static Event copy_behind(Event after, Call call, size_t bytes) {
    const int numbers = (int)(bytes / 2);
    Tensor all[NTIERS];
    for (int t = 0; t < NTIERS; t++) all[t] = plan_bytes(plan, RESTING_WEIGHTS, t, 0, F16, numbers);
    return post_row(device, call, all, 0, numbers, after);
}
static Event copy(Lane lane, size_t bytes) { return copy_behind(no_event, on(lane, false), bytes); }

// ---- Lanes and links ------------------------------------------------------------------------------------------------

/* Copies that are posted at 0 s, each behind the event of an earlier one (after: its number from 1 on; 0: none), and when
 * they begin and end. */
typedef struct {
    Lane lane;
    size_t bytes;
    int after;
    double begins, ends;
} Copy;
static const struct {
    const char *what;
    bool prefill;
    double gpu_bdw, op_s;
    Copy copy[4];
} copies[] = {
    // clang-format off
    {"on one lane they add up", false, 0, 0, {{W_LOAD, 600, 0, 0, .6}, {W_LOAD, 400, 0, .6, 1}}},
    /* both at 500 bytes/s until 0.4 s, then what is left of the first, 400, alone */
    {"two lanes share a link", false, 0, 0, {{W_LOAD, 600, 0, 0, .8}, {C_LOAD, 200, 0, 0, .4}}},
    /* 300 each at a third, then 300 at half, then 300 alone */
    {"three lanes", false, 0, 0, {{W_LOAD, 900, 0, 0, 1.8}, {C_LOAD, 600, 0, 0, 1.5}, {A_UP, 300, 0, 0, .9}}},
    {"links run side by side", false, 0, 0,
     {{W_LOAD, 1000, 0, 0, 1}, {STORE, 1000, 0, 0, 2}, {C_READ, 1000, 0, 0, 10}, {D_WRITE, 1000, 0, 0, 5}}},
    {"in prefill at other rates", true, 0, 0,
     {{C_LOAD, 1000, 0, 0, .5}, {STORE, 1000, 0, 0, 4}, {C_READ, 1000, 0, 0, 20}, {D_WRITE, 1000, 0, 0, 2.5}}},
    /* it holds up those behind it in its lane as well; the last is alone on gtoc until then */
    {"an event holds up what comes after it", false, 0, 0,
     {{W_LOAD, 1000, 0, 0, 1}, {STORE, 500, 1, 1, 2}, {STORE, 250, 0, 2, 2.5}, {A_DOWN, 100, 0, 0, .2}}},
    {"every op takes op_s besides", false, 0, .25, {{W_LOAD, 1000, 0, 0, 1.25}, {W_LOAD, 1000, 0, 1.25, 2.5}}},
    {"without a bound on the GPU's memory its copies take no time", false, 0, 0,
     {{PROJECT, 1000, 0, 0, 0}, {FINISH, 1000, 1, 0, 0}, {PROJECT, 1000, 2, 0, 0}}},
    {"with one, bytes over it", false, 10000, 0, {{PROJECT, 1000, 0, 0, .1}}},
    /* the GPU does one op at a time, of those that are ready the one that was posted first */
    {"the GPU's second op is ready in time", false, 100, 0,
     {{W_LOAD, 500, 0, 0, .5}, {FINISH, 100, 0, 0, 1}, {PROJECT, 200, 1, 1, 3}, {FINISH, 400, 0, 3, 7}}},
    {"and is not", false, 100, 0,
     {{W_LOAD, 1500, 0, 0, 1.5}, {FINISH, 100, 0, 0, 1}, {PROJECT, 200, 1, 5, 7}, {FINISH, 400, 0, 1, 5}}},
    // clang-format on
};

TEST(copies_begin_and_end_when_they_must) {
    for (size_t i = 0; i < COUNT(copies); i++) {
        const Copy *copy = copies[i].copy;
        Hardware h = machine_with(round_rates);
        Trace trace = {0};
        Event e[5] = {no_event};
        double busy_s[NLANES] = {0};
        int n = 0;
        h.gpu_bdw = copies[i].gpu_bdw, h.op_s = copies[i].op_s;
        open_mixed(h);
        device->trace = &trace;
        for (; n < 4 && copy[n].bytes; n++) {
            Call call = on(copy[n].lane, copies[i].prefill);
            call.k = n;
            e[n + 1] = copy_behind(e[copy[n].after], call, copy[n].bytes);
            busy_s[copy[n].lane] += copy[n].ends - copy[n].begins;
        }
        CU_ASSERT(now() == 0 && wait_for(no_event) == 0 && !trace.n); /* posting takes no time, and begins nothing */
        for (int c = 1; c <= n; c++) CU_ASSERT(wait_for(e[c]) >= copy[c - 1].ends * (1 - 1e-8));
        CU_ASSERT_EQUAL_FATAL((int)trace.n, n);
        for (const Slice *s = trace.slice; s < trace.slice + n; s++) {
            const Copy *c = &copy[s->k];
            if (!about(s->end, c->ends)) fprintf(stderr, "\n    %s, %d: ends at %g s\n", copies[i].what, s->k, s->end);
            CU_ASSERT(about(s->begin, c->begins) && about(s->end, c->ends) && s->lane == c->lane && s->bytes == c->bytes);
        }
        for (int lane = 0; lane < NLANES; lane++) EXPECT_SECONDS(busy(lane), busy_s[lane]);
        trace_free(&trace);
        close_sim();
    }
}

TEST(an_op_never_begins_before_it_is_posted) {
    open_mixed(machine_with(round_rates));
    const Event first = copy(W_LOAD, 1000);
    CU_ASSERT(first.lane == W_LOAD && first.seq == 1);
    wait_for(first);
    EXPECT_SECONDS(wait_for(copy(STORE, 500)), 2); /* the link down has been idle since 0 */
    EXPECT_SECONDS(wait_for(first), 2);            /* what has happened has happened */
    copy(C_READ, 1000);
    EXPECT_SECONDS(wait_for(copy(W_LOAD, 1000)), 3);
    EXPECT_SECONDS(wait_for(copy(C_READ, 100)), 13); /* 10 s from 2 on, then its own */
    close_sim();
}

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

static const Tensor none;
static Tensor ws(RegionId id, int rows) { return plan_view(plan, id, TIER_GPU, 0, 0, rows); }

/* An index table at `ints` of the first batch's block; side: GPU or CPU. */
static Tensor table_view(Tier side, int ints, int rows, int cols) {
    Tensor t = plan_bytes(plan, INDEX_TABLES, side, (size_t)ints * 4, I32, cols);
    t.rows = rows;
    return t;
}

static void put(int ints, const int32_t *values, int n) {
    memcpy(device->cpu_address(device, table_view(TIER_CPU, ints, 1, n)), values, n * sizeof *values);
}

static PageTable pool(Tier tier) {
    Tier side = tier == TIER_GPU ? TIER_GPU : TIER_CPU;
    PageTable table = plan_pages(plan, KV_CACHE, tier, 0, 2);
    table.pages = table_view(side, 32, 2, 2);
    table.len = table_view(side, 0, 1, 2);
    return table;
}

/* Attends for two sequences, whose lengths are at 0. */
static Op attend(Lane lane) {
    const Tier side = lane == ATTEND ? TIER_CPU : TIER_GPU;
    const PageTable table = pool(side);
    const Tensor q = side == TIER_CPU ? plan_view(plan, QUERY, side, 0, 0, 2) : tensor_cols(ws(QKV, 2), 0, small.h1);
    return op_attend(on(lane, false), plan_view(plan, ATTENDED, side, 0, 0, 2), q, &table);
}

/* One after another: 2 flops for each weight and row of a product, 4 h1 for a token that another one attends to, and bytes
 * that are read and written; the longer of both. */
TEST(ops_take_their_flops_or_their_bytes) {
    static const int32_t tables[] = {17, 5, 0, 0, 0, 3, 4, 11}; /* lengths at 0, where prompts begin at 4 */
    for (int bound = 0; bound < 2; bound++) {
        Hardware h = machine_with(round_rates);
        if (bound) h.gpu_bdw = 1000, h.cpu_bdw = 500;
        open_mixed(h);
        put(0, tables, 8);
        const Call gpu = on(PROJECT, false), cpu = on(ATTEND, false);
        const Tensor x = ws(ATTENDED, 5), qkv = ws(QKV, 11), norm = plan->global[FINAL_LN_W].home,
                     ids = tensor_cols(plan_view(plan, NEW_TOKENS, TIER_GPU, 0, 0, 1), 0, 2);
        int j = 0;
        while (plan->weight[j][FC1_W].home.tier != TIER_GPU) j++;
        const Tensor w = plan->weight[j][FC1_W].home, b = plan->weight[j][FC1_B].home;
        const double product = 2. * 7 * 60 * 100, tokens = 4. * 60 * (17 + 5), pairs = 4. * 60 * (6 + 1 + 28);
        const Op linear = op_linear_relu(gpu, ws(MLP, 7), ws(ATTENDED, 7), w, b);
        Op in_prefill = linear;
        in_prefill.prefill = true;
        const struct {
            Op op;
            double flops_s, bytes;
        } cases[] = {
            {linear, product / 1e6, 2. * (7 * 60 + 60 * 100 + 7 * 100)},
            {in_prefill, product / 2e6, 2. * (7 * 60 + 60 * 100 + 7 * 100)},
            {attend(FINISH), tokens / 1e5, tokens},
            {attend(ATTEND), tokens / 2e4, tokens},
            {op_attend_prefill(on(FINISH, true), ws(ATTENDED, 11), tensor_cols(qkv, 0, small.h1),
                               tensor_cols(qkv, small.h1, 2 * small.h1), table_view(TIER_GPU, 4, 1, 4), small.nh),
             pairs / 4e5, 2. * 11 * 4 * 60},
            {op_layernorm(gpu, x, x, norm, norm), 0, 2 * 5 * 120},
            {op_embed(gpu, x, plan->global[POS_EMBED].home, none, true), 0, 5 * 120},
            {op_embed(cpu, plan_view(plan, EMBEDDED, TIER_CPU, 0, 0, 5), plan->global[TOK_EMBED].home, none, false), 0,
             5 * 120},
            {op_pick(gpu, ids, plan_view(plan, LOGITS, TIER_GPU, 0, 0, 2), none, none, task.prompts), 0, 2 * 131 * 4},
        };
        for (size_t i = 0; i < COUNT(cases); i++) {
            const Op *op = &cases[i].op;
            const double from = now(), bdw = lane_channel[op->lane] == CPU ? h.cpu_bdw : h.gpu_bdw;
            const double took = wait_for(post_op(*op)) - from;
            CU_ASSERT_DOUBLE_EQUAL(took, fmax(cases[i].flops_s, bdw ? cases[i].bytes / bdw : 0), 1e-8 * took);
            for (int kind = 0; kind < NKINDS; kind++) CU_ASSERT_EQUAL(device->count[op->lane].moved[kind], 0);
        }
        close_sim();
    }
}

/* Of attention, the lengths that rest in the tables when it is posted. */
TEST(a_length_counts_when_the_op_is_posted) {
    open_mixed(machine_with(round_rates));
    put(0, (int32_t[]){17, 5}, 2);
    const Event gpu = post_op(attend(FINISH));
    put(0, (int32_t[]){170, 50}, 2);
    EXPECT_SECONDS(wait_for(gpu), 4. * 60 * (17 + 5) / 1e5);
    close_sim();
}

/* Single tokens go into pages: over the disk's link, or through the CPU's memory, and as far as the highest page. Rows of a
 * table on disk cross its link, too. */
TEST(appends_take_their_bytes_and_reach_their_pages) {
    static const int32_t seq[] = {0, 1}, pos[] = {3, 17}, pages[] = {0, 1, 0, 1};
    Hardware h = machine_with(round_rates);
    h.cpu_bdw = 48;
    open_mixed(h);
    put(0, seq, 2), put(8, pos, 2), put(32, pages, 4);
    const Tensor kv = plan_view(plan, NEW_KV, TIER_CPU, 0, 0, 2);
    for (int tier = TIER_CPU; tier <= TIER_DISK; tier++) {
        const PageTable table = pool(tier);
        const bool disk = tier == TIER_DISK;
        const Call call = on(disk ? D_WRITE : ATTEND, false);
        const Bytes peak = device->peak[tier], half = plan->region[KV_CACHE][tier].bytes / (2 * small.l);
        const double from = now();
        const Op op = op_append(call, &table, kv, table_view(TIER_CPU, 0, 1, 2), table_view(TIER_CPU, 8, 1, 2));
        EXPECT_SECONDS(wait_for(post_op(op)) - from, 480. / (disk ? 200 : 48));
        CU_ASSERT_EQUAL(device->count[call.lane].moved[CACHE], disk ? 480 : 0);
        if (disk) /* all of K and two pages of V */
            CU_ASSERT_EQUAL(device->peak[tier] - peak, (half + 32 * 120 + 63) / 64 * 64);
    }
    const Tensor rows = plan_view(plan, EMBEDDED, TIER_CPU, 0, 0, 5);
    const double from = now();
    const Op gather = op_embed(on(C_READ, false), rows, plan->global[TOK_EMBED].home, none, false);
    EXPECT_SECONDS(wait_for(post_op(gather)) - from, 6);
    CU_ASSERT_EQUAL(device->count[C_READ].moved[CACHE], 600);
    close_sim();
}

/* GPU 1 s and CPU 3 s on the same cores: both at half speed until 2 s, then 2 s alone. Links are no part of it. */
TEST(shared_cores_go_at_half_speed_while_both_work) {
    Hardware h = machine_with(round_rates);
    h.bmm_flops[0] = 24000, h.cpu_flops[0] = 8000;
    for (int shared = 0; shared < 2; shared++) {
        h.shared_cores = shared;
        open_mixed(h);
        put(0, (int32_t[]){50, 50}, 2);
        const Event gpu = post_op(attend(FINISH)), cpu = post_op(attend(ATTEND)), up = copy(W_LOAD, 1000);
        EXPECT_SECONDS(wait_for(up), 1);
        EXPECT_SECONDS(wait_for(gpu), shared ? 2 : 1);
        EXPECT_SECONDS(wait_for(cpu), shared ? 4 : 3);
        EXPECT_SECONDS(busy(FINISH), shared ? 2 : 1);
        close_sim();
    }
}

/* Each link that is busy takes its own part, whichever others are, and a tenth is always left. */
TEST(copies_on_every_link_take_their_part_of_shared_cores) {
    static const Lane lane[] = {W_LOAD, STORE, C_READ, D_WRITE}; /* by channel */
    static const double part[] = {.4, .2, .15, .3};
    Hardware h = machine_with(round_rates);
    h.shared_cores = true, h.copy_core_s = part[CTOG] / 1000, h.disk_core_s = part[DTOC] / 100;
    h.bmm_flops[0] = 10 * 24000;
    for (int busy_links = 0; busy_links < 1 << 4; busy_links++) {
        double left = 1;
        open_mixed(h);
        put(0, (int32_t[]){50, 50}, 2);
        for (int c = CTOG; c <= CTOD; c++) {
            if (!(busy_links >> c & 1)) continue;
            copy(lane[c], (size_t)(2 * h.bdw[c][0]));
            left -= part[c];
        }
        EXPECT_SECONDS(wait_for(post_op(attend(FINISH))), .1 / fmax(left, .1));
        close_sim();
    }
}

// ---- The table of functions -----------------------------------------------------------------------------------------

TEST(only_index_tables_have_an_address) {
    open_mixed(machine_with(round_rates));
    const size_t bytes = plan->region[INDEX_TABLES][TIER_CPU].bytes;
    uint8_t *first = device->cpu_address(device, table_view(TIER_CPU, 0, 1, 1)),
            *last = device->cpu_address(device, table_view(TIER_CPU, bytes / 4 - 1, 1, 1));
    CU_ASSERT_FATAL(first && last - first == (long)bytes - 4);
    memset(first, 1, bytes); /* all of it is there */
    CU_ASSERT(!device->cpu_address(device, plan_view(plan, NEW_TOKENS, TIER_CPU, 0, 0, 1)) &&
              !device->cpu_address(device, table_view(TIER_GPU, 0, 1, 1)) && !device->upload);
    CU_ASSERT_STRING_EQUAL(device->name, "sim");
    close_sim();
}

// ---- Whole schedules ------------------------------------------------------------------------------------------------

/* Runs a task; the rig stays open. Returns the clock at the end. */
static double simulate(Policy policy, Hardware hardware) {
    if (rig.device) close_sim();
    open_sim(policy, hardware);
    CU_ASSERT_EQUAL_FATAL(rig_run(&rig), 0);
    CU_ASSERT_EQUAL(rig.stats.generated, SEQS * N);
    return now();
}

/* Where only products take time: 2 flops for every weight of a layer and token, and for the head's and last token. In
 * sweeps of the diagonal schedule prompts and new tokens are side by side. */
TEST(products_alone_take_the_flops_of_the_model) {
    const Hardware h = machine_with("mm_flops_g=1e6 mm_flops_p=3e6");
    const double layer = 3 * 2. * (4 * 60 * 60 + 2 * 60 * 100), head = 2. * 131 * 60;
    const double prefill = SEQS * (S * layer + head) / 3e6, decode = SEQS * (N - 1) * (layer + head) / 1e6;
    for (int way = 0; way < 4; way++) {
        Policy p = all_gpu(2, 3);
        p.overlap = way > 0, p.schedule = way % 3;
        const double total = simulate(p, h);
        EXPECT_SECONDS(total, prefill + decode);
        if (!p.overlap) continue; /* each batch's tokens are fetched before its next layer 0, behind the others' */
        EXPECT_SECONDS(rig.stats.prefill_s, prefill);
        EXPECT_SECONDS(rig.stats.decode_s, decode);
        EXPECT_SECONDS(total, rig.stats.total_s);
    }
    close_sim();
}

/* In generation the GPU attends, or the CPU. On the diagonal some decode beside a prefill; a sweep in which they do counts
 * as the one and the other by the seconds of the processors, of which decoding takes equally many for each token. */
TEST(attention_alone_takes_the_tokens_of_the_cache) {
    const double flops = 3 * 4. * 60, prompts = SEQS * S * (S + 1) / 2, prefill = flops * prompts / 3e5;
    const double past = SEQS * ((N - 1) * S + N * (N - 1) / 2), decode = flops * past / 1e5;
    for (int way = 0; way < 4; way++) {
        const bool cpu = way & 1, diagonal = way & 2;
        Policy p = on_tiers(1, 0, !cpu, cpu, 1, 0, 2, 3);
        p.delegated = true, p.schedule = diagonal ? SCHEDULE_DIAGONAL : SCHEDULE_ZIGZAG;
        simulate(p, machine_with(cpu ? "bmm_flops_p=3e5 cpu_flops_g=1e5" : "bmm_flops_p=3e5 bmm_flops_g=1e5"));
        const RunStats *stats = &rig.stats;
        const double beside = decode * stats->beside / (SEQS * (N - 1));
        CU_ASSERT((beside > 0) == diagonal);
        EXPECT_SECONDS(stats->prefill_s, stats->prefill_sweeps_s * prefill / (prefill + beside));
        if (!diagonal) CU_ASSERT(about(stats->prefill_s, prefill) && about(stats->decode_s, decode));
        EXPECT_SECONDS(busy(ATTEND), cpu ? decode : 0);
        CU_ASSERT_EQUAL(stats->attended, prompts + past);
    }
    close_sim();
}

/* The link is never idle where it is all that counts: the bytes of the weights over it, and at most all others'. */
TEST(streaming_alone_takes_the_bytes_of_the_weights) {
    for (int row = 0; row < 2; row++) {
        Policy p = on_tiers(0, 1, 1, 0, 1, 0, 2, 3);
        p.table_home = TIER_CPU, p.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
        const double total = simulate(p, machine_with("ctog_bdw=1e6"));
        const Bytes *up = rig.moved[CTOG];
        CU_ASSERT(total >= up[WEIGHT] / 1e6);
        CU_ASSERT(total <= (up[WEIGHT] + up[OTHER] + up[ACTIVATION] + up[CACHE]) / 1e6 * (1 + 1e-8));
    }
    close_sim();
}

/* Nothing shares a link then: a lane that only copies is busy for its bytes. */
TEST(without_overlap_the_times_of_all_ops_add_up) {
    Policy p = mixed(2, 3);
    Hardware h = machine_with(round_rates);
    h.dtoc_bdw[1] = h.dtoc_bdw[0], p.overlap = false;
    for (int cpu = 0; cpu < 2; cpu++) {
        p.delegated = cpu;
        const double total = simulate(p, h);
        double all_busy = 0;
        for (int lane = 0; lane < NLANES; lane++) all_busy += busy(lane);
        EXPECT_SECONDS(total, all_busy);
        EXPECT_SECONDS(busy(W_READ), rig.moved[DTOC][WEIGHT] / 100.);
        CU_ASSERT(rig.moved[DTOC][WEIGHT] > 0);
    }
    close_sim();
}

/* Rates at which every lane has something to do, so that there is something to hide. */
static const char balanced[] =
    "ctog_bdw=1e6 gtoc_bdw=1e6 dtoc_bdw=6e5 ctod_bdw=4e5 mm_flops_g=8e6 mm_flops_p=2e7 "
    "bmm_flops=4e6 cpu_flops=2e6";

/* What Figure 4 waits for behind every square costs something, but less than to wait for every op. With overlap the total
 * lies between its bounds. */
TEST(overlap_hides_what_can_be_hidden) {
    for (int way = 0; way < 4; way++) {
        Hardware h = machine_with(balanced);
        Policy p = mixed(2, 3);
        p.delegated = way & 1, h.shared_cores = way & 2, p.overlap = false;
        const double alone = simulate(p, h), gpu_alone = busy(PROJECT) + busy(FINISH);
        p.overlap = p.synchronize = true;
        const double waits = simulate(p, h);
        p.synchronize = false;
        const double total = simulate(p, h), gpu = busy(PROJECT) + busy(FINISH); /* one at a time */
        CU_ASSERT(h.shared_cores || (waits > 1.02 * total && alone > 1.1 * waits));
        for (int c = CTOG; c <= CTOD; c++) { /* no link carries more than its rate */
            Bytes bytes = 0;
            for (int kind = 0; kind < NKINDS; kind++) bytes += rig.moved[c][kind];
            CU_ASSERT(total * h.bdw[c][0] >= bytes * (1 - 1e-8));
        }
        double all_busy = 0;
        for (int lane = 0; lane < NLANES; lane++) {
            CU_ASSERT(total >= busy(lane) * (1 - 1e-8));
            all_busy += busy(lane);
        }
        CU_ASSERT(total >= gpu * (1 - 1e-8));
        if (!h.shared_cores) EXPECT_SECONDS(gpu, gpu_alone);
        CU_ASSERT(total <= all_busy && total < .9 * alone); /* something was hidden */
    }
    close_sim();
}

/* The paper's own run of OPT-175B at s = 512 (on the machine of its Table 1): 256 sequences, 350 GB of weights that are not
 * there. Half the weights come from a disk of 2 GB/s, 32 times: no schedule is faster, and a good one not much slower. */
TEST(opt_175b_takes_no_memory) {
    struct rusage before, after;
    const OptConfig config = opt_named("opt-175b");
    Hardware t4;
    Error err;
    Policy p = on_tiers(0, .5, 0, 0, 0, 1, 32, 8);
    p.delegated = true, p.table_home = TIER_CPU;
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
    getrusage(RUSAGE_SELF, &before);
    checkpoint = checkpoint_dummy(&config, 3);
    task = equal_task(256, 512, 32);
    rig = rig_ran(checkpoint, &p, &task, &t4);
    getrusage(RUSAGE_SELF, &after);
    CU_ASSERT(after.ru_maxrss - before.ru_maxrss < 200 * 1024); /* KiB */
    CU_ASSERT(rig.peak[TIER_DISK] > 5e11 && rig.moved[DTOC][WEIGHT] > 5e12);
    const double disk = (rig.moved[DTOC][WEIGHT] + rig.moved[DTOC][CACHE]) / 2e9;
    CU_ASSERT(disk < rig.seconds && rig.seconds < 2 * disk);
    close_sim();
}
