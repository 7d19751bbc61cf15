/* test_lanes.c: lanes by themselves. Slowed links take the time that their bytes take and change no bit; the trace says
 * what the counters say. Times are only bounded from below, where a slow machine cannot matter. The suite runs on the host
 * device, and what it says of traces on the cuda device too where main.c was told so. What lanes compute is
 * test_schedule.c's. */
#include <stdatomic.h>
#include <unistd.h>

#include "tests.h"
#include "written.h"

static const OptConfig config = TEST_CONFIG(3, 64, 400, 4, 131, -1);
enum { PROMPTS = 5, N = 4, MOST = 20000, PERIOD = 199 };

static Checkpoint *model;
static Task task;
static Rig rig;
static Device *device; /* the rig's */
static Trace trace;
static bool untraced, no_graph;
static int generated = N; /* tokens of each prompt */
static double opened;     /* when */
static Tensor on[NTIERS]; /* a weight of each tier, as a row of MOST elements, which repeat after PERIOD of them */

static void open_device(Policy p) {
    const int s[PROMPTS] = {9, 10, 11, 12, 13}, n[PROMPTS] = {generated, generated, generated, generated, generated};
    model = checkpoint_dummy(&config, 3);
    task = random_task(PROMPTS, s, n, config.vocab, 1);
    task.keep_logits = true;
    rig = (Rig){.model = model, .policy = p, .task = &task};
    CU_ASSERT_EQUAL_FATAL(rig_open(&rig), 0);
    device = rig.device;
    device->trace = untraced ? NULL : &trace;
    device->no_graph = no_graph;
    opened = device->now(device);
}

static void close_device(void) {
    rig_close(&rig);
    free_task(&task);
    checkpoint_close(model);
    trace_free(&trace);
}

/* A device with weights on every tier, to copy to and fro. */
static void open_rows(void) {
    open_device(on_tiers(.34, .33, 1, 0, 1, 0, PROMPTS, 1));
    for (int j = 0; j < config.l; j++)
        for (int r = FC1_W; r <= FC2_W; r += FC2_W - FC1_W) {
            const Tensor home = rig.plan->weight[j][r].home;
            on[home.tier] = tensor_cols(tensor_flat(home), 0, MOST);
        }
    f16 *row = xcalloc(MOST, sizeof *row);
    for (int t = 0; t < NTIERS; t++) {
        for (int c = 0; c < MOST; c++) row[c] = (f16)(0x3c00 + t * 256 + c % PERIOD);
        device->upload(device, on[t], 0, row, MOST);
    }
    free(row);
}

/* n elements of the rows from `first` on, as call k. */
static Event copy_behind(Event after, Lane lane, int first, int n, int k) {
    return post_row(device, (Call){.lane = lane, .kind = OTHER, .k = k}, on, first, n, after);
}
static Event copy(Lane lane, int first, int n) { return copy_behind(no_event, lane, first, n, 0); }
static void wait_for(Event e) { CU_ASSERT_EQUAL(device->wait(device, e, &rig.err), 0); }

/* Being late, threads may catch up; but not with what nobody had before. */
TEST(ops_take_as_long_as_their_bytes_on_one_lane_of_a_link_and_on_all) {
    enum { OPS = 100 };
    for (int way = 0; way < 2 * (CTOD + 1) && !test_gpu; way++) {
        const Channel link = way / 2;
        const bool all = way % 2;
        Lane lane[NLANES];
        Event last[NLANES];
        int n = 0;
        for (int l = 0; l < NLANES; l++)
            if (lane_channel[l] == link && (all || !n)) lane[n++] = l;
        open_rows();
        device->link[link] = 4e6; /* and no other */
        double begin = device->now(device), busy = 0, expected = OPS * n * 1000 / 4e6;
        for (int i = 0; i < OPS * n; i++) last[i % n] = copy(lane[i % n], i % n * 500, 500);
        for (int l = 0; l < n; l++) wait_for(last[l]);
        CU_ASSERT(device->now(device) - begin >= .999 * expected);
        for (int l = 0; l < n; l++) busy += device->count[lane[l]].busy_s;
        CU_ASSERT(busy >= .999 * expected);
        close_device();
    }
}

/* Both begin when a third one has ended. */
TEST(a_small_copy_does_not_wait_behind_a_slab) {
    if (test_gpu) return;
    open_rows();
    device->link[CTOG] = 1e3; /* the slab takes 40 s, and is not waited for */
    const Event gate = copy(STORE, 0, MOST);
    copy_behind(gate, W_LOAD, 100, MOST - 100, 0);
    wait_for(copy_behind(gate, A_UP, 0, 1, 0));
    rig_stop(&rig); /* the slab ends here without having been copied */
    CU_ASSERT(trace.last[A_UP] > 0 && trace.last[W_LOAD] == 0);
    close_device();
}

/* What is written to the source while the copy waits for its link arrives: a missing event shows. Where the machine kept us
 * from writing in time nothing is known, and the link is slowed further. */
TEST(the_wait_comes_before_the_copy) {
#ifndef __SANITIZE_THREAD__ /* it is a race, on purpose */
    enum { ELEMENTS = 5000 };
    bool in_time = false;
    for (double rate = 1e6; rate >= 1e4 && !in_time && !test_gpu; rate /= 10) {
        open_rows();
        volatile f16 *from = device->cpu_address(device, on[TIER_CPU]);
        device->link[CTOG] = rate;
        const double begin = device->now(device);
        const Event up = copy(W_LOAD, 0, ELEMENTS);
        usleep(1000); /* for a lane that copied first to do so, and be found out */
        from[0] = 7;
        in_time = device->now(device) - begin < .9 * ELEMENTS * sizeof(f16) / rate;
        wait_for(up);
        from[0] = 8;
        wait_for(copy(STORE, 0, ELEMENTS));
        CU_ASSERT(from[0] == 7 || !in_time);
        close_device();
    }
#endif
}

/* Copies that would take days end when an op fails; behind a number that is one, when the device is closed. The logit is of
 * a row that is not the first, and of a token that is not chosen. */
TEST(a_logit_that_is_no_number_ends_every_wait_as_closing_does) {
    enum { ROWS = 3, VOCAB = 131 };
    static const Lane copying[] = {W_LOAD, A_UP, STORE, W_READ, C_READ, D_WRITE};
    static const float number[] = {1, NAN, INFINITY, -INFINITY};
    static const Prompt greedy[ROWS];
    const int stop = 1;
    for (size_t i = 0; i < COUNT(number) && !test_gpu; i++) { /* a GPU: in test_cuda.c */
        const float numbers[ROWS * VOCAB] = {[VOCAB + 7] = number[i], [VOCAB + 9] = 2};
        Event waiting[COUNT(copying) + 1];
        open_rows();
        for (int c = CTOG; c <= CTOD; c++) device->link[c] = .1;
        for (size_t w = 0; w < COUNT(copying); w++) waiting[w] = copy(copying[w], 0, MOST);
        const Tensor logits = plan_view(rig.plan, LOGITS, TIER_GPU, 0, 0, ROWS);
        const Tensor ids = tensor_cols(plan_view(rig.plan, NEW_TOKENS, TIER_GPU, 0, 0, 1), 0, ROWS);
        device->upload(device, logits, 0, numbers, ROWS * VOCAB);
        device->upload(device, ids, 0, (int32_t[ROWS]){0}, ROWS);
        const Op op = op_pick((Call){.lane = PROJECT, .kind = OTHER}, ids, logits, ids, ids, greedy);
        const int status = device->wait(device, device->post(device, &op), &rig.err);
        CU_ASSERT_EQUAL(status, i ? -1 : 0);
        for (size_t w = 0; w <= COUNT(copying) && status; w++) {
            if (w == COUNT(copying)) { /* a later reason to end does not replace the first */
                device->stop = &stop;
                waiting[w] = copy(STORE, 0, 1);
            }
            rig.err.text[0] = 0;
            CU_ASSERT_EQUAL(device->wait(device, waiting[w], &rig.err), -1);
            CU_ASSERT_PTR_NOT_NULL(strstr(rig.err.text, "not finite"));
        }
        CU_ASSERT_EQUAL(trace.n, !i); /* no copy has happened */
        close_device();
    }
}

/* Whoever posts an op may change its moves at once. */
TEST(moves_stay_until_their_op_is_done) {
    enum { MOVES = 256, OPS = 20 };
    Move moves[MOVES];
    Event last = no_event;
    if (test_gpu) return; /* whose streams take them at once */
    open_rows();
    device->delay_us[W_LOAD] = 1000;
    for (int i = 0; i < OPS; i++) {
        for (int m = 0, c = i * MOVES; m < MOVES; m++, c++)
            moves[m] = (Move){tensor_cols(on[TIER_GPU], c, 1), tensor_cols(on[TIER_CPU], c, 1)};
        const Op op = op_copy((Call){.lane = W_LOAD, .kind = OTHER}, moves, MOVES);
        last = device->post(device, &op);
    }
    wait_for(last);
    wait_for(copy(STORE, 0, OPS * MOVES));
    const f16 *low = device->cpu_address(device, on[TIER_CPU]), *untouched = low + OPS * MOVES / PERIOD * PERIOD + PERIOD;
    CU_ASSERT(!memcmp(low, untouched, OPS * MOVES * sizeof *low));
    close_device();
}

/* Large reads are of whole blocks, 4 MiB at most at a time: what is wanted may begin and end anywhere. */
TEST(a_large_read_brings_its_bytes_wherever_they_begin_and_end) {
    enum { MIB = 1 << 20, BLOCK = 4096, FILE_SIZE = 9 * MIB, PIECE = 4 * MIB };
    static const size_t sizes[] = {PIECE - BLOCK, PIECE - 100, PIECE, PIECE + 6}, offsets[] = {0, 2, 300, BLOCK - 2};
    Checkpoint *c = checkpoint_dummy(&config, 3);
    Error err;
    Disk *disk = disk_open(temp_dir(), FILE_SIZE, c, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(disk);
    uint16_t *written = xcalloc(FILE_SIZE, 1), *read = xcalloc(FILE_SIZE, 1);
    for (int i = 0; i < FILE_SIZE / 2; i++) written[i] = (uint16_t)(i * 40503u >> 4);
    Tensor t = {.tier = TIER_DISK, .type = F16, .rows = 1, .cols = FILE_SIZE / 2, .ld = FILE_SIZE / 2};
    ASSERT_OK(disk_write(disk, t, written, &err));
    for (int i = 0; i < 16; i++) {
        t.offset = offsets[i / 4], t.cols = (int)(sizes[i % 4] / 2), t.ld = (size_t)t.cols;
        memset(read, 0xff, FILE_SIZE);
        ASSERT_OK(disk_read(disk, read, t, F16, i % 2, &err));
        CU_ASSERT(!memcmp(read, written + t.offset / 2, sizes[i % 4]) && read[t.cols] == 0xffff);
    }
    disk_close(disk);
    checkpoint_close(c);
    free(written), free(read);
}

/* Weights, and the cache with what else rests there, each by reads around the page cache; all to different places. */
TEST(lanes_that_read_the_disk_at_once_keep_their_bytes_apart) {
    enum { TIMES = 16, SIZE = 1 << 18, CELLS = SIZE / sizeof(f16) };
    static const Lane lane[] = {W_READ, C_READ};
    static uint8_t row[2][SIZE];
    Event last[2];
    Policy large_pages = on_tiers(1, 0, 0, 0, 1, 0, PROMPTS, 1);
    large_pages.page_tokens = 4096, large_pages.delegated = true;
    open_device(large_pages);
    Tensor to[2 * TIMES], from[2];
    for (int l = 0; l < 2; l++) {
        from[l] = plan_bytes(rig.plan, KV_CACHE, TIER_DISK, l * SIZE, F16, CELLS);
        device->upload(device, from[l], 0, memset(row[l], 1 + l, SIZE), CELLS);
    }
    for (int i = 0; i < 2 * TIMES; i++) {
        to[i] = plan_bytes(rig.plan, KV_STAGING, TIER_CPU, i * SIZE, F16, CELLS);
        const Op op = op_copy((Call){.lane = lane[i % 2], .kind = OTHER}, &(Move){to[i], from[i % 2]}, 1);
        last[i % 2] = device->post(device, &op);
    }
    wait_for(last[0]), wait_for(last[1]);
    for (int i = 0; i < 2 * TIMES; i++) CU_ASSERT(!memcmp(device->cpu_address(device, to[i]), row[i % 2], SIZE));
    close_device();
}

// ---- Whole runs -----------------------------------------------------------------------------------------------------

static Policy spread(int way) {
    static const double shares[][6] = {{0, .5, 0, .5, 0, .5}, {.3, .3, .3, .3, .3, .3}, {0, 0, 0, 0, 0, 0}};
    Policy p = placed(shares[way / 2], 2, 2);
    p.page_tokens = 4, p.delegated = way % 2, p.table_home = TIER_CPU;
    return p;
}
enum { SPREADS = 6 };

/* Opens a device and runs the task on it; close_device ends it. */
static void run(Policy p, double link) {
    open_device(p);
    for (int c = CTOG; c <= CTOD; c++) device->link[c] = link;
    CU_ASSERT_EQUAL_FATAL(rig_run(&rig), 0);
}

TEST(slowed_links_change_no_bit) {
    const double link = 2e7;
    for (int way = 0; way < SPREADS && !test_gpu; way++) {
        double busy[NCHANNELS] = {0};
        run(spread(way), link);
        for (int lane = 0; lane < NLANES; lane++) busy[lane_channel[lane]] += device->count[lane].busy_s;
        for (int c = CTOG; c <= CTOD; c++) {
            Bytes bytes = 0;
            for (int kind = 0; kind < NKINDS; kind++) bytes += rig.moved[c][kind];
            CU_ASSERT(busy[c] >= .999 * (double)bytes / link);
        }
        Rig fast = rig_ran(model, &rig.policy, &task, NULL);
        CU_ASSERT(rig_same(&rig, &fast));
        rig_close(&fast);
        close_device();
    }
}

/* Slices of each lane come in order, do not overlap, lie between begin and end, and add up to the counters. */
static void check_trace(void) {
    const double end = device->now(device) + 1e-5;
    for (int lane = 0; lane < NLANES; lane++) {
        const LaneCount *count = &device->count[lane];
        double before = opened, took = 0;
        Bytes bytes = 0;
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++) {
            if ((int)s->lane != lane) continue;
            CU_ASSERT(s->begin >= before - 1e-9 && s->end >= s->begin && s->end <= end);
            before = s->end;
            took += s->end - s->begin;
            bytes += s->bytes;
        }
        for (int kind = 0; kind < NKINDS; kind++) bytes -= count->moved[kind];
        CU_ASSERT_EQUAL(bytes, 0);
        CU_ASSERT((took > 0) == (count->busy_s > 0));
        if (!test_gpu) CU_ASSERT(took >= count->busy_s - 1e-6); /* and what is between the ops of a call */
    }
}

static Policy few_pages(int gbs, int num_gpu_batches) {
    Policy p = all_gpu(gbs, num_gpu_batches);
    p.page_tokens = 4;
    return p;
}

/* Of the emulation (tests/cuda_cpu.h): events that were recorded with a time; that were asked about; kernels. */
extern long cuda_cpu_timed __attribute__((weak)), cuda_cpu_asked __attribute__((weak)),
    cuda_cpu_launches __attribute__((weak)), cuda_cpu_graphs __attribute__((weak)), cuda_cpu_made __attribute__((weak));
/* A real GPU does not say. The counts are the same in all ways, and the first is enough. */
static bool counting(void) { return test_gpu && &cuda_cpu_launches && test_every <= 96; }

/* What the GPU is asked for. Marks are those of FINISH alone: PROJECT sets one for each token that goes down, and one more
 * whenever its thread has nothing to do. */
typedef struct {
    long kernels, copies, marks, waits, graphs;
} Asked;
static Asked asked;
static const GpuCalls *plain;

static int count_copy(Gpu *gpu, Lane lane, StridedCopy c, Error *e) {
    __atomic_fetch_add(&asked.copies, 1, __ATOMIC_RELAXED); /* of several lanes at once */
    return plain->copy(gpu, lane, c, e);
}

static int count_end(Gpu *gpu, Lane lane, uint64_t mark, bool timed, Error *e) {
    asked.marks += lane == FINISH;
    return plain->end(gpu, lane, mark, timed, e);
}

static int count_after(Gpu *gpu, Lane lane, Lane other, uint64_t mark, Error *e) {
    asked.waits++;
    return plain->after(gpu, lane, other, mark, e);
}

/* What the sweeps of a longer task that come on top ask the GPU for: of a batch in each layer, beside what a batch needs
 * once. The eight kernels are norm, q k v, append, attention, w_O, norm and the two products of the MLP; if the CPU
 * attends, append and attention are not among them. Kernels of the batch: the two rows of its embedding, the rows of the
 * head, norm, logits and choice. Its copies: tables, tokens, and logits, since they are kept. Waits are of a stream for
 * another; where one is late enough, there is nothing left to wait for. */
TEST(a_layer_of_a_batch_takes_eight_launches_and_no_events) {
    if (!counting()) return;
    enum { MORE = 3, OF_BATCH = 6, COPIES_OF_BATCH = 3, WAITS_OF_BATCH = 3 };
    static const struct {
        double share[6];
        bool delegated;
        int kernels, copies, most_waits;
    } placements[] = {{{1, 0, 1, 0, 1, 0}, false, 8, 0, 0}, /* all on the GPU */
                      {{0, 1, 1, 0, 1, 0}, false, 8, 1, 2}, /* weights come: a part of a layer beside each batch */
                      {{1, 0, 0, 1, 1, 0}, true, 6, 3, 4}}; /* the CPU attends: q, new k v go down, o comes up */
    untraced = no_graph = true;                             /* a trace parts calls */
    plain = test_gpu->call;
    GpuCalls counting = *plain;
    counting.copy = count_copy, counting.end = count_end, counting.after = count_after;
    test_gpu->call = &counting;
    for (size_t i = 0; i < COUNT(placements); i++)
        for (int K = 1; K <= 2; K++) {
            Asked of[2];
            for (int longer = 0; longer < 2; longer++) {
                Policy p = few_pages((PROMPTS + K - 1) / K, K);
                memcpy(p.share, placements[i].share, sizeof p.share);
                p.delegated = placements[i].delegated;
                generated = N + longer * MORE;
                asked = (Asked){.kernels = -cuda_cpu_launches};
                run(p, 0);
                of[longer] = asked;
                of[longer].kernels += cuda_cpu_launches;
                close_device();
            }
            const long batches = K * MORE, squares = config.l * batches;
            const bool one_stream = K == 1 || !placements[i].delegated;
            CU_ASSERT_EQUAL(of[1].kernels - of[0].kernels, placements[i].kernels * squares + OF_BATCH * batches);
            CU_ASSERT_EQUAL(of[1].copies - of[0].copies, placements[i].copies * squares + COPIES_OF_BATCH * batches);
            CU_ASSERT(one_stream ? of[1].marks == 0 : of[1].marks >= squares);
            CU_ASSERT(of[1].waits <= (placements[i].most_waits * config.l + WAITS_OF_BATCH) * K * (N + MORE));
        }
    generated = N;
    test_gpu->call = plain, untraced = no_graph = false;
}

/* A run of its own on the suite's device, with graphs and without, which must be alike. Returns the first. ThreadSanitizer
 * looks for races, and not at numbers: then there is no second one. */
static Rig run_both(const Checkpoint *of, Policy p, const Task *asked_for) {
    const bool for_races = test_every > 100;
    Rig rigs[2];
    for (int way = 0; way < (for_races ? 1 : 2); way++) {
        rigs[way] = (Rig){.model = of, .policy = p, .task = asked_for};
        CU_ASSERT_EQUAL_FATAL(rig_open(&rigs[way]), 0);
        rigs[way].device->no_graph = way;
        CU_ASSERT_EQUAL_FATAL(rig_run(&rigs[way]), 0);
        rig_stop(&rigs[way]);
    }
    if (for_races) return rigs[0];
    CU_ASSERT(rig_same(&rigs[0], &rigs[1]));
    rig_close(&rigs[1]);
    return rigs[0];
}

/* More ops than a queue has room for. The runs differ in the launches of MORE sweeps, which are like those before them
 * though their tokens have new pages. A segment has 32 ops at most; logits that were asked for end one, too. Tables lie in
 * two places in turn, so each segment is captured twice. With two batches the host is ahead of the GPU, and no graph is
 * made. */
TEST(what_is_posted_again_is_launched_as_a_graph) {
    if (!counting()) return;
    enum { LAYERS = 40, SEQS = 2, FIRST = 6, MORE = 6, KERNELS = 8 * LAYERS + 6, SEGMENT = 32 };
    const OptConfig deep = TEST_CONFIG(LAYERS, 16, 32, 2, 131, -1);
    Checkpoint *tall = checkpoint_dummy(&deep, 3);
    for (int K = 1; K <= 2; K++) {
        long graphs[2], kernels[2], made[2];
        for (int longer = 0; longer < 2; longer++) {
            const int s[SEQS] = {5, 6}, n[SEQS] = {FIRST + longer * MORE, FIRST + longer * MORE};
            const long before[] = {cuda_cpu_launches, cuda_cpu_graphs, cuda_cpu_made};
            Task two = random_task(SEQS, s, n, deep.vocab, 1);
            Rig r = {.model = tall, .policy = few_pages(SEQS / K, K), .task = &two};
            CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
            rig_close(&r);
            graphs[longer] = cuda_cpu_graphs - before[1], made[longer] = cuda_cpu_made - before[2];
            kernels[longer] = cuda_cpu_launches - before[0] - graphs[longer];
            free_task(&two);
        }
        const int of_sweep = K == 1 ? (KERNELS + SEGMENT - 1) / SEGMENT : 0;
        CU_ASSERT_EQUAL(graphs[1] - graphs[0], MORE * of_sweep);
        CU_ASSERT_EQUAL(kernels[1] - kernels[0], K == 1 ? 0 : K * MORE * KERNELS);
        CU_ASSERT(made[0] == 2 * of_sweep && made[1] == made[0]);
    }
    checkpoint_close(tall);
}

/* Of one batch, with what is in its ops' way: weights that come, attention of the CPU, numbers of 4 bits, few tokens' V. */
TEST(a_graph_changes_no_bit) {
    static const double shares[][6] = {{1, 0, 1, 0, 1, 0}, {0, 1, 1, 0, 1, 0}, {1, 0, .5, .5, .5, .5}};
    enum { WAYS = 5, TOKENS = 8 };
    if (!test_gpu) return;
    untraced = true, generated = TOKENS;
    for (int way = 0; way<WAYS; way += test_every> 96 ? 2 : 1) {
        Policy p = placed(shares[way % 3], PROMPTS, 1);
        p.page_tokens = 4, p.delegated = way % 3 == 2, p.sparsity = way == 3 ? .4 : 1;
        if (way > 2) p.weight_packed = p.cache_packed = way > 3, p.delegated = true;
        open_device(p);
        const long before = &cuda_cpu_graphs ? cuda_cpu_graphs : 0;
        rig_stop(&rig);
        Rig r = run_both(model, p, &task);
        if (&cuda_cpu_graphs) CU_ASSERT(cuda_cpu_graphs > before);
        rig_close(&r);
        close_device();
    }
    generated = N, untraced = false;
}

static int count_run(Gpu *gpu, const Op *op, Error *e) {
    __atomic_fetch_add(&asked.kernels, 1, __ATOMIC_RELAXED);
    return plain->run(gpu, op, e);
}

/* What is held back until its segment is whole is given to the GPU when the thread that posts waits, for whatever it may
 * be. */
TEST(who_waits_holds_nothing_back) {
    enum { VOCAB = 131 };
    static const Prompt greedy;
    const float numbers[VOCAB] = {[7] = 1};
    if (!test_gpu) return;
    untraced = true;
    plain = test_gpu->call;
    GpuCalls counting = *plain;
    counting.run = count_run;
    test_gpu->call = &counting;
    open_rows();
    const Tensor logits = plan_view(rig.plan, LOGITS, TIER_GPU, 0, 0, 1);
    const Tensor ids = tensor_cols(plan_view(rig.plan, NEW_TOKENS, TIER_GPU, 0, 0, 1), 0, 1);
    device->upload(device, logits, 0, numbers, VOCAB);
    device->upload(device, ids, 0, (int32_t[1]){0}, 1);
    const Op op = op_pick((Call){.lane = PROJECT, .kind = OTHER}, ids, logits, ids, ids, &greedy);
    asked = (Asked){0};
    device->post(device, &op);
    wait_for(copy(STORE, 0, 1));
    for (int ms = 0; ms < 10000 && !__atomic_load_n(&asked.kernels, __ATOMIC_RELAXED); ms++) usleep(1000);
    CU_ASSERT_EQUAL(__atomic_load_n(&asked.kernels, __ATOMIC_RELAXED), 1);
    close_device();
    test_gpu->call = plain, untraced = false;
}

/* Times are for a trace, and where sweeps mix prompts with new tokens, whose seconds are then told apart. */
TEST(marks_have_times_only_where_somebody_wants_them) {
    if (!counting()) return;
    for (int way = 0; way < 3; way++) {
        Policy p = few_pages(1, 2);
        p.wg = 0, p.wc = 1;
        if (way == 2) p.schedule = SCHEDULE_DIAGONAL;
        untraced = way != 1;
        const long before = cuda_cpu_timed;
        run(p, 0);
        const long timed = cuda_cpu_timed - before;
        CU_ASSERT(way ? timed >= 2 * config.l * N : timed == 0);
        CU_ASSERT((device->count[PROJECT].busy_s > 0) == (way > 0) && (device->count[W_LOAD].busy_s > 0) == (way > 0));
        close_device();
    }
    untraced = false;
}

/* Alone a batch waits for everything that is waited for; beside others the GPU has more to do meanwhile. */
TEST(only_one_batch_in_flight_asks_before_it_sleeps) {
    if (!counting()) return;
    for (int K = 1; K <= 2; K++) {
        const long before = cuda_cpu_asked;
        run(few_pages(2, K), 0);
        CU_ASSERT((cuda_cpu_asked > before) == (K == 1));
        close_device();
    }
}

/* The halves of its layers share a queue of a GPU, and are told apart. */
TEST(the_trace_of_one_batch_has_every_call) {
    static const char *const calls[] = {"project", "store_cache", "attend", "finish"};
    run(few_pages(PROMPTS, 1), 0);
    for (int c = 0; c < 4; c++) {
        int n = 0; /* a pause may part a call */
        for (size_t s = 0; s < trace.n; s++)
            n += trace.slice[s].j < config.l && !strcmp(trace_call(&trace.slice[s]), calls[c]);
        CU_ASSERT(n >= config.l * N);
    }
    close_device();
}

TEST(the_trace_of_a_run_adds_up_to_its_counters) {
    for (int way = test_gpu && test_every > 96 ? 3 : 0; way < SPREADS; way += test_gpu ? 3 : 1) {
        run(spread(way), way < 2 ? 5e7 : 0);
        check_trace();
        close_device();
    }
}

/* Copies that take long beside many short ops: what has been added up when they end must not have been a part of them. The
 * union of what lanes do is never longer than the clock, and never shorter than what one of them does. */
TEST(a_trace_that_drops_slices_counts_nothing_twice) {
    for (int way = 0; way < SPREADS; way += test_gpu ? 3 : 1) {
        trace.limit = 1;
        run(spread(way), 5e6);
        const double busy = trace_breakdown(&trace).busy_s;
        CU_ASSERT(busy > 0 && busy <= device->now(device) - opened);
        if (!test_gpu) CU_ASSERT(busy >= (1 - 1e-9) * device->count[W_LOAD].busy_s && trace.dropped.busy_s > 0);
        close_device();
    }
}

/* No slice is of two calls, whether ops share marks of a stream or not (a pause may part a call); a stream that runs ahead
 * of its events does not begin before they have happened. */
TEST(a_slice_is_of_one_call) {
    static const struct {
        int k, n;
        bool event;
    } ops[] = {{0, 100, false}, {0, 200, false}, {1, 300, false}, {2, 400, true}, {2, 500, false}, {3, 600, true}};
    static const size_t bytes[] = {600, 600, 1800, 1200};
    enum { OPS = COUNT(ops), CALLS = COUNT(bytes) };
    for (int round = 0; round < 3; round++) {
        size_t slices = 0, got[CALLS] = {0};
        int newest = 0;
        open_rows();
        device->delay_us[W_LOAD] = round * 2000;
        Event last = no_event, up = copy_behind(no_event, W_LOAD, 1000, MOST - 1000, 9);
        for (int i = 0; i < OPS; i++) last = copy_behind(ops[i].event ? up : no_event, STORE, 0, ops[i].n, ops[i].k);
        wait_for(last), wait_for(up);
        check_trace();
        CU_ASSERT_FATAL(trace.last[W_LOAD] > 0);
        for (size_t i = 0; i < trace.n; i++) {
            const Slice *s = &trace.slice[i];
            if (s->lane != STORE) continue;
            CU_ASSERT_FATAL(s->k >= newest && s->k < CALLS);
            if (s->k == 2 && !got[2] && !test_gpu) CU_ASSERT(s->begin >= trace.slice[trace.last[W_LOAD] - 1].end);
            got[newest = s->k] += s->bytes;
            slices++;
        }
        CU_ASSERT(slices >= CALLS && slices <= OPS);
        CU_ASSERT(!memcmp(got, bytes, sizeof got));
        close_device();
    }
}

TEST(a_lane_may_have_more_calls_than_marks) {
    enum { CALLS = 3 * MARKS };
    Event last = no_event;
    open_rows();
    for (int i = 0; i < CALLS; i++) last = copy_behind(no_event, STORE, 0, 1 + i, i);
    wait_for(last);
    check_trace();
    CU_ASSERT_EQUAL(trace.n, CALLS);
    for (size_t i = 0; i < trace.n; i++)
        CU_ASSERT(trace.slice[i].k == (int)i && trace.slice[i].bytes == (i + 1) * sizeof(f16));
    close_device();
}

/* Of the lane STORE: who waits for its first mark is held in CUDA until all other marks have been set, and a little longer,
 * or until the first one is set anew. */
static atomic_bool sleeps, all_set, set_anew;

static int sync_and_sleep(Gpu *gpu, Lane lane, uint64_t mark, Error *e) {
    if (lane == STORE && mark == 1 && !atomic_exchange(&sleeps, true)) {
        while (!all_set) usleep(100);
        for (int ms = 0; ms < 50 && !set_anew; ms++) usleep(1000);
        sleeps = false;
    }
    return plain->sync(gpu, lane, mark, e);
}

static int end_while_one_sleeps(Gpu *gpu, Lane lane, uint64_t mark, bool timed, Error *e) {
    if (lane == STORE && mark == MARKS) all_set = true;
    if (lane == STORE && mark == MARKS + 1) set_anew = sleeps;
    return plain->end(gpu, lane, mark, timed, e);
}

TEST(a_mark_is_not_set_anew_while_someone_waits_for_it) {
    if (!test_gpu) return;
    plain = test_gpu->call;
    GpuCalls sleeping = *plain;
    sleeping.end = end_while_one_sleeps, sleeping.sync = sync_and_sleep;
    test_gpu->call = &sleeping;
    sleeps = all_set = set_anew = false;
    open_rows();
    const Event first = copy(STORE, 0, 100), waiting = copy_behind(first, D_WRITE, 0, 100, 0);
    Event last = first;
    while (!sleeps) usleep(100);
    for (int k = 1; k <= MARKS + 1; k++) last = copy_behind(no_event, STORE, 200, 100, k);
    wait_for(waiting), wait_for(last);
    CU_ASSERT(all_set && !set_anew);
    close_device();
    test_gpu->call = plain;
}

/* What is behind the point becomes nanoseconds, and never a whole second of them, which no wait would take. */
TEST(a_wait_ends_by_seconds_and_nanoseconds) {
    const struct timespec t = timespec_at(12345.75), before = timespec_at(nextafter(12346, 0));
    CU_ASSERT(t.tv_sec == 12345 && t.tv_nsec == 750000000);
    CU_ASSERT(before.tv_sec == 12345 && before.tv_nsec == 999999999);
}

/* Copies a row of numbers on the GPU to the CPU's logits, and asserts that each is finite. */
static void expect_finite(Tensor row) {
    const int halves = (int)type_bytes(row.type) / 2, exponent = row.type == F16 ? 0x7c00 : 0x7f80; /* if all are ones */
    const Tensor to = plan_bytes(rig.plan, LOGITS, TIER_CPU, 0, row.type, row.cols);
    int odd = 0;
    Move move = {to, row};
    const Op op = op_copy((Call){.lane = A_DOWN, .kind = OTHER}, &move, 1);
    CU_ASSERT_FATAL(rig.plan->region[LOGITS][TIER_CPU].bytes >= tensor_bytes(row));
    wait_for(device->post(device, &op));
    const f16 *last = (f16 *)device->cpu_address(device, to) + halves - 1; /* of each number the half with the exponent */
    for (int i = 0; i < row.cols; i++) odd += (last[i * halves] & exponent) == exponent;
    CU_ASSERT_EQUAL(odd, 0);
}

/* The emulation's memory is NaN until it is written: what no product has read shows in none. Where weights stream, layer 0
 * is not there yet; packed ones of more rows than PACKED_ROWS are unpacked to a place of their own. */
TEST(what_warms_up_reads_nothing_that_nobody_has_written) {
    const OptConfig grouped = TEST_CONFIG(3, 64, 128, 4, 131, -1);
    for (int way = 0; way < 4 && test_gpu && &cuda_cpu_launches; way++) {
        const double on_gpu = way % 2;
        model = checkpoint_dummy(&grouped, 3);
        task = equal_task(PROMPTS, PACKED_ROWS, N);
        task.keep_logits = true;
        rig = (Rig){.model = model, .policy = on_tiers(on_gpu, 1 - on_gpu, 1, 0, 1, 0, PROMPTS, 1), .task = &task};
        rig.policy.weight_packed = way / 2;
        CU_ASSERT_EQUAL_FATAL(rig_open(&rig), 0);
        device = rig.device;
        CU_ASSERT_EQUAL(gpu_warm_up(device, rig.plan, &rig.err), 0);
        expect_finite(plan_bytes(rig.plan, QKV, TIER_GPU, 0, F16, PROMPTS * grouped.h1));
        expect_finite(plan_bytes(rig.plan, LOGITS, TIER_GPU, 0, F32, grouped.vocab));
        close_device();
    }
}

/* Of AddressSanitizer, where the program has it. */
int __asan_address_is_poisoned(const volatile void *p) __attribute__((weak));
static int forbidden;
static void note_forbidden(const void *p, size_t bytes) { forbidden += p && bytes; }

/* Regions lie further apart there. */
TEST(a_sanitizer_sees_what_is_touched_behind_a_region) {
    if (!&__asan_address_is_poisoned) return;
    int seen[2] = {0, 0};
    void (*plain_forbid)(const void *, size_t) = test_gpu ? test_gpu->forbid : NULL;
    CU_ASSERT(!test_gpu || plain_forbid);
    if (test_gpu) test_gpu->forbid = note_forbidden;
    forbidden = 0;
    open_rows();
    for (int id = 0; id < NREGIONS; id++) {
        const Region *r = rig.plan->region[id];
        seen[TIER_GPU] += r[TIER_GPU].bytes > 0;
        if (!r[TIER_CPU].bytes || !r[TIER_CPU].rows) continue;
        const Tensor last = plan_view(rig.plan, id, TIER_CPU, r[TIER_CPU].slots - 1, 0, r[TIER_CPU].rows);
        const uint8_t *end = (uint8_t *)device->cpu_address(device, last) + tensor_bytes(last);
        CU_ASSERT(!__asan_address_is_poisoned(end - 1) && __asan_address_is_poisoned(end));
        seen[TIER_CPU]++;
    }
    CU_ASSERT(seen[TIER_CPU] > 0 && forbidden == (test_gpu ? seen[TIER_GPU] : 0));
    close_device();
    if (test_gpu) test_gpu->forbid = plain_forbid;
}
