/* test_trace.c: slices, the file they make, and Table 4 out of them. Times in these tests are small whole numbers of
 * seconds, so that sums are exact. That a device notes what it does, and as much as its lanes count, is
 * test_lanes.c's and test_sim.c's. */
#include "tests.h"
#include "written.h"

/* A call of a lane in sweep i, layer j and batch k, and the bytes and the time of an op of it. */
typedef struct {
    Lane lane;
    Kind kind;
    bool prefill;
    int i, j, k, batch;
    double begin, end;
    size_t bytes;
} Timed;

/* Adds the op, and returns what it is by itself. */
static Slice add(Trace *trace, Timed p) {
    const Op op = {.call = {p.lane, p.kind, p.prefill, p.prefill, false, p.i, p.j, p.k, p.batch}};
    const Slice slice = slice_of(&op, p.bytes, p.begin, p.end);
    trace_add(trace, &slice, 0);
    return slice;
}

// ---- Slices ---------------------------------------------------------------------------------------------------------

/* Ops in the order in which they end, and the slice that each is a part of. Ops of one call are one, but after a pause;
 * what differs in anything begins a new one; slices join over other lanes but not over others of their own. */
TEST(ops_of_one_call_are_one_slice) {
    static const struct {
        Timed op;
        int slice;
    } ops[] = {
        {{C_LOAD, CACHE, false, 3, 4, 5, 0, 10, 11, 100}, 0},
        {{C_LOAD, CACHE, false, 3, 4, 5, 0, 11.00005, 13, 3}, 0},
        {{C_LOAD, CACHE, false, 3, 4, 5, 0, 12, 12.5, 2}, 0},    /* ends before the slice does */
        {{C_LOAD, CACHE, false, 3, 4, 5, 0, 13.001, 14, 4}, 1},  /* after a pause */
        {{C_LOAD, ACTIVATION, false, 3, 4, 5, 0, 14, 15, 1}, 2}, /* another kind, stage, i, j, k, batch */
        {{C_LOAD, ACTIVATION, true, 3, 4, 5, 0, 15, 16, 2}, 3},
        {{C_LOAD, ACTIVATION, true, 2, 4, 5, 0, 16, 17, 3}, 4},
        {{C_LOAD, ACTIVATION, true, 2, 2, 5, 0, 17, 18, 4}, 5},
        {{C_LOAD, ACTIVATION, true, 2, 2, 2, 0, 18, 19, 5}, 6},
        {{C_LOAD, ACTIVATION, true, 2, 2, 2, 1, 19, 20, 5}, 7},
        {{PROJECT, OTHER, false, 0, 1, 0, 0, 20, 21, 1}, 8},
        {{FINISH, OTHER, false, 0, 1, 0, 0, 20, 23, 10}, 9},
        {{PROJECT, OTHER, false, 0, 1, 0, 0, 21, 22, 1}, 8}, /* another lane does not part them */
        {{PROJECT, CACHE, false, 0, 1, 0, 0, 22, 23, 1}, 10},
        {{FINISH, OTHER, false, 0, 1, 0, 0, 23, 24, 10}, 9},
        {{PROJECT, OTHER, false, 0, 1, 0, 0, 23, 24, 1}, 11}, /* another call does */
    };
    enum { SLICES = 12 };
    Trace trace = {0};
    Slice expected[SLICES] = {{0}};
    for (size_t o = 0; o < COUNT(ops); o++) {
        const Slice own = add(&trace, ops[o].op);
        Slice *whole = &expected[ops[o].slice];
        if (!whole->end)
            *whole = own;
        else
            whole->end = fmax(whole->end, own.end), whole->bytes += own.bytes;
    }
    CU_ASSERT_EQUAL_FATAL(trace.n, SLICES);
    for (int n = 0; n < SLICES; n++) {
        const Slice *s = &trace.slice[n], *e = &expected[n];
        CU_ASSERT(s->begin == e->begin && s->end == e->end && s->bytes == e->bytes);
        CU_ASSERT(s->lane == e->lane && same_call(s, e));
    }
    trace_free(&trace);
    CU_ASSERT(!trace.slice && !trace.n && !trace.last[C_LOAD]);
}

/* The name in Figure 4 and the part in Table 4 of everything that the schedule posts; no name: it does not. By kind:
 * WEIGHT, CACHE, ACTIVATION, OTHER; where the CPU attends for all that decode. */
static const struct {
    const char *name;
    int part;
} calls[NLANES][NKINDS] = {
    [W_READ] = {{"load_weight", WEIGHT_READ}},
    [W_LOAD] = {{"load_weight", WEIGHT_READ}},
    [C_READ] = {{0}, {"load_cache", CACHE_READ}, {"load_activation", ACTIVATION_MOVES}, {"load_inputs", ACTIVATION_MOVES}},
    [C_LOAD] = {{0}, {"load_cache", CACHE_READ}, {"load_activation", ACTIVATION_MOVES}, {"load_inputs", ACTIVATION_MOVES}},
    [STORE] = {{0}, {"store_cache", CACHE_WRITE}, {"store_activation", ACTIVATION_MOVES}},
    [D_WRITE] = {{0}, {"store_cache", CACHE_WRITE}, {"store_activation", ACTIVATION_MOVES}},
    [A_DOWN] = {{0}, {"attend", CACHE_WRITE}, {0}, {"tokens", ACTIVATION_MOVES}},
    [A_UP] = {{0}, {"attend", ACTIVATION_MOVES}},
    [PROJECT] = {{0}, {"store_cache", COMPUTE}, {"load_activation", COMPUTE}, {"project", COMPUTE}},
    [FINISH] = {{0}, {"attend", COMPUTE}, {"store_activation", COMPUTE}, {"finish", COMPUTE}},
    [ATTEND] = {{0}, {"attend", COMPUTE}, {0}, {"gather_tokens", COMPUTE}},
    [RECEIVE] = {{0}, {0}, {"receive", ACTIVATION_MOVES}},
    [SEND] = {{0}, {0}, {"send", ACTIVATION_MOVES}},
};

/* What the schedule never posts has a name, too. */
TEST(calls_have_the_names_of_figure_4) {
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) {
            const char *name = trace_call(&(Slice){.lane = lane, .kind = kind, .delegated = true});
            CU_ASSERT_PTR_NOT_NULL_FATAL(name);
            if (calls[lane][kind].name) CU_ASSERT_STRING_EQUAL(name, calls[lane][kind].name);
        }
    CU_ASSERT_STRING_EQUAL(trace_call(&(Slice){.lane = ATTEND, .kind = CACHE, .prefill = true}), "store_cache");
    CU_ASSERT_STRING_EQUAL(trace_call(&(Slice){.lane = ATTEND, .kind = OTHER, .j = 12}), "tokens"); /* that it samples */
}

// ---- The file -------------------------------------------------------------------------------------------------------

/* Writes traces, and returns the text, which the caller frees. */
static char *written(const Trace *traces, int n) {
    char *text = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    CHECK(out);
    trace_write(traces, n, out);
    CHECK(fclose(out) == 0);
    return text;
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (; (text = strstr(text, part)); text += strlen(part)) count++;
    return count;
}

/* Times are microseconds from the first slice of all, with three decimals: three slices of a third of 1.0007 us are, in
 * nanoseconds, 334, 333, 334, and each ends where the next begins. A batch has its own tokens;
 * weights that are loaded for it in the sweep before are not of its first one. An empty trace has its name alone. */
TEST(the_file_has_a_row_a_lane_and_a_slice_a_call) {
    Trace traces[] = {{.name = "opt-30b \"zig\\zag\"\n"}, {.name = "\xff little"}, {.name = "nothing"}};
    add(&traces[0], (Timed){PROJECT, OTHER, false, 6, 2, 1, 1, 1000.5, 1000.501, 0});
    add(&traces[0], (Timed){PROJECT, OTHER, false, 7, 2, 1, 1, 1000.6, 1000.601, 0});
    add(&traces[0], (Timed){W_LOAD, WEIGHT, true, 5, 3, 1, 1, 1000.25, 1000.7500000004, 5000000000}); /* begins first */
    for (int n = 0; n < 3; n++)
        add(&traces[1],
            (Timed){STORE, CACHE, false, n, 0, 0, 0, 1000.25 + n * 1.0007e-6 / 3, 1000.25 + (n + 1) * 1.0007e-6 / 3, 1});
    char *text = written(traces, 3), *expected = contents("tests/golden/trace.json", NULL);
    CU_ASSERT_STRING_EQUAL(text, expected);
    free(text), free(expected);
    for (int t = 0; t < 3; t++) trace_free(&traces[t]);
}

static const OptConfig config = SMALL_CONFIG(2);

static void run_on_sim(Trace *trace, Policy policy, Task task, Hardware hardware) {
    Checkpoint *checkpoint = checkpoint_dummy(&config, 3);
    Rig r = {.model = checkpoint, .policy = policy, .task = &task, .sim = &hardware};
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    r.device->trace = trace;
    CU_ASSERT_EQUAL(rig_run(&r), 0);
    rig_close(&r), free_task(&task), checkpoint_close(checkpoint);
}

/* Eight prompts of 5 tokens that get 5 more, two batches of two, pages of 4 tokens; sweep i of a sequence holds 5 + i
 * tokens. With zig-zag the 2 x 2 sequences of a block hold 4 ceil((5 + i) / 4) pages: 8 in sweeps 0 to 3, 12 in the last.
 */
TEST(the_pages_of_every_sweep_are_those_of_its_sequences) {
    enum { PROMPTS = 8, S = 5, N = 5, PAGE = 4, BLOCK = 4 };
    Trace trace = {0};
    Policy policy = on_tiers(1, 0, .5, .5, 1, 0, 2, 2);
    policy.page_tokens = PAGE;
    run_on_sim(&trace, policy, equal_task(PROMPTS, S, N), machine_with(""));
    CU_ASSERT_EQUAL_FATAL(trace.sweeps, PROMPTS / BLOCK * N + 1);
    for (size_t i = 1; i < trace.sweeps; i++) CU_ASSERT(trace.held[i].at >= trace.held[i - 1].at);
    char *text = written(&trace, 1);
    CU_ASSERT_EQUAL(count_of(text, "\"ph\":\"C\""), 2 * (int)trace.sweeps);
    CU_ASSERT_EQUAL(count_of(text, "\"GPU\":4,\"CPU\":4,\"disk\":0"), 8);
    CU_ASSERT_EQUAL(count_of(text, "\"GPU\":6,\"CPU\":6,\"disk\":0"), 2);
    CU_ASSERT_EQUAL(count_of(text, "\"GPU\":0,\"CPU\":0,\"disk\":0"), 1);
    CU_ASSERT_EQUAL(count_of(text, "\"in flight\":4"), 10);
    free(text);
    trace_free(&trace);
}

/* The clocks of stages 1 and 2 begin elsewhere. What a stage sends is copied, so that one thread is enough for all. */
TEST(traces_of_all_stages_come_together_with_the_clock_of_the_first) {
    enum { M = 3 };
    Net *net[M];
    Trace all[M] = {{.ready_at = 50}};
    Error err;
    local_net_open(net, M, false, 0);
    add(&all[0], (Timed){SEND, ACTIVATION, true, 0, 0, 0, 0, 51, 52, 1});
    for (int s = M - 1; s >= 0; s--) {
        Trace own = stage_trace(s, 4 * s, 4, 0);
        own.ready_at = 1000 * s;
        for (int n = 0; n < s; n++) {
            const double at = own.ready_at + n;
            add(&own, (Timed){RECEIVE, ACTIVATION, true, n, 0, 0, 0, at, at + 1, 1});
            trace_hold(&own, &(Held){.at = at, .sequences = n});
        }
        ASSERT_OK(stage_gather_traces(net[s], s ? &own : all, &err));
        trace_free(&own);
    }
    for (int s = 0; s < M; s++) net[s]->close(net[s]);
    CU_ASSERT_FATAL(all[0].n == 1 && all[1].n == 1 && all[2].n == 2);
    for (int n = 0; n < 4; n++) { /* one of each stage, and the second one of stage 2 */
        const Slice *s = n < M ? all[n].slice : all[2].slice + 1;
        const int begin = n == 1 || n == 2 ? 50 : 51;
        CU_ASSERT(s->begin == begin && s->end == begin + 1 && s->bytes == 1);
    }
    CU_ASSERT_STRING_EQUAL(all[2].name, "stage 2: layers 8 to 11");
    CU_ASSERT(all[0].sweeps == 0 && all[2].sweeps == 2 && all[2].held[1].at == 51 && all[2].held[1].sequences == 1);
    for (int s = 0; s < M; s++) trace_free(&all[s]);
}

// ---- Table 4 --------------------------------------------------------------------------------------------------------

/* By definition: the ticks in which a part is busy, in which what hides it (computing hides copies, and copies hide
 * computing) is busy as well, and in which any lane but those of the network is. */
TEST(random_intervals_agree_with_a_count_of_every_tick) {
    enum { TICKS = 64, COMPUTES = 1, COPIES = 2 };
    uint64_t state = 5;
    for (int round = 0; round < 2000; round++) {
        Trace trace = {0};
        Breakdown counted = {0};
        bool busy[TICKS][2][NPARTS] = {{{false}}}, local[TICKS] = {false};
        int does[TICKS] = {0}, n = test_below(&state, 40), longest = 1 + test_below(&state, 20);
        for (int i = 0; i < n; i++) {
            const int lane = test_below(&state, NLANES), kind = test_below(&state, NKINDS), part = calls[lane][kind].part;
            if (!calls[lane][kind].name) continue;
            const int begin = test_below(&state, TICKS), end = imin(begin + test_below(&state, longest), TICKS);
            const bool prefill = !test_below(&state, 6);
            /* Each op has an i of its own, so that no two are joined; some are empty. */
            add(&trace, (Timed){lane, kind, prefill, i, 0, 0, 0, begin, end, 1});
            for (int tick = begin; tick < end; tick++) {
                busy[tick][prefill][part] = true;
                does[tick] |= part == COMPUTE ? COMPUTES : COPIES;
                local[tick] |= lane != RECEIVE && lane != SEND;
            }
        }
        for (int tick = 0; tick < TICKS; tick++) {
            for (int prefill = 0; prefill < 2; prefill++) {
                bool any = false;
                for (int p = 0; p < NPARTS; p++) {
                    const int hides = p == COMPUTE ? COPIES : COMPUTES;
                    if (!busy[tick][prefill][p]) continue;
                    counted.part[prefill][p].busy_s++;
                    counted.part[prefill][p].hidden_s += (does[tick] & hides) != 0;
                    any = true;
                }
                counted.total_s[prefill] += any;
            }
            counted.busy_s += local[tick];
        }
        const Breakdown fast = trace_breakdown(&trace);
        CU_ASSERT_FATAL(!memcmp(&fast, &counted, sizeof fast));
        trace_free(&trace);
    }
}

/* Runs eight prompts with everything on every tier, but no cache on the GPU, the batches at equal distances or all at once.
 * It is so fast that pauses between ops of one call are too short to part them, and a slice counts these as its own. */
static Breakdown run_mixed(Trace *trace, Schedule schedule, bool delegated) {
    Task task = equal_task(8, 5, 40);
    Policy policy = on_tiers(.3, .3, 0, .6, .3, .3, 2, 2);
    for (int p = 0; p < task.count; p++) task.prompts[p].n -= 3 * p;
    policy.schedule = schedule, policy.delegated = delegated;
    run_on_sim(trace, policy, task, machine_with("ctog_bdw=1e9 gtoc_bdw=1e9 dtoc_bdw=5e8 ctod_bdw=5e8 mm_flops=1e10"));
    return trace_breakdown(trace);
}

/* Whether some batch prefills in the sweep that posts it: layer 0 is loaded by the sweep before its own. Where the CPU does
 * not attend it only puts new k and v into their pages. Those that the GPU attends to go to the cache that has come up, and
 * on FINISH, since PROJECT must not wait for it. */
TEST(a_slice_knows_its_sweep_and_who_attends) {
    for (int cpu = 0; cpu < 2; cpu++) {
        Trace trace = {0};
        bool prefill[400] = {false};
        int mixed = 0, attends = 0, stores = 0;
        run_mixed(&trace, SCHEDULE_DIAGONAL, cpu);
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++)
            if (s->kind != WEIGHT) prefill[s->i] |= s->prefill;
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++) {
            const bool attend = !strcmp(trace_call(s), "attend"), ahead = s->kind == WEIGHT && !s->j && s->i;
            CU_ASSERT_EQUAL(s->prefill_sweep, prefill[s->i - ahead]);
            CU_ASSERT(s->kind != WEIGHT || s->prefill == s->prefill_sweep);
            CU_ASSERT(s->lane != PROJECT || s->kind != CACHE);
            mixed += s->prefill != s->prefill_sweep;
            if (s->lane != ATTEND) continue;
            attends += attend, stores += !strcmp(trace_call(s), "store_cache");
            CU_ASSERT_EQUAL(attend, cpu && !s->prefill);
        }
        CU_ASSERT(mixed > 0 && stores > 0 && (attends > 0) == cpu);
        trace_free(&trace);
    }
}

/* They have come before the layer has been computed in that sweep; layer 0 comes beside the sweep before. */
TEST(weights_are_of_the_sweep_that_uses_them) {
    enum { SWEEPS = 400, MOST = 8 };
    for (int schedule = 0; schedule < 3; schedule++) {
        Trace trace = {0};
        double computed[SWEEPS][MOST] = {{0}};
        int ahead = 0;
        run_mixed(&trace, schedule, false);
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++)
            if (s->lane == PROJECT || s->lane == FINISH) computed[s->i][s->j] = fmax(computed[s->i][s->j], s->end);
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++) {
            if (s->lane != W_LOAD) continue;
            CU_ASSERT(s->end <= computed[s->i][s->j]);
            ahead += s->i && !s->j;
        }
        CU_ASSERT(ahead > 0);
        trace_free(&trace);
    }
}

/* However few slices a trace keeps at a time, its table is that of one that keeps all of them. */
TEST(a_trace_that_drops_slices_adds_up_the_whole_run) {
    static const size_t limits[] = {1, 16, 100};
    for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++) {
        Trace all = {0};
        const Breakdown whole = run_mixed(&all, schedule, true);
        for (int l = 0; l < 3; l++) {
            Trace some = {.limit = limits[l]};
            const Breakdown b = run_mixed(&some, schedule, true);
            CU_ASSERT(some.n < all.n / 10 && some.kept + some.limit <= 1024);
            const double *its = (const double *)&b, *all_of_it = (const double *)&whole;
            for (size_t i = 0; i < sizeof b / sizeof *its; i++)
                CU_ASSERT_DOUBLE_EQUAL(its[i], all_of_it[i], 1e-9 * all_of_it[i]);
            trace_free(&some);
        }
        trace_free(&all);
    }
}

/* All of it is far below a second; with a quadratic one nobody would wait for the end of this. */
TEST(a_million_slices_take_a_moment) {
    enum { N = 1000000 };
    Trace trace = {0};
    for (int n = 0; n < N; n++) {
        const double begin = (double)((long)n * 7919 % N);
        add(&trace, (Timed){n % 2 ? W_LOAD : PROJECT, n % 2 ? WEIGHT : OTHER, false, n, 0, 0, 0, begin, begin + 1, 1});
    }
    const Breakdown b = trace_breakdown(&trace);
    free(written(&trace, 1));
    CU_ASSERT(trace.n == N && b.part[0][COMPUTE].busy_s == N / 2 && b.part[0][WEIGHT_READ].busy_s == N / 2);
    trace_free(&trace);
}

// ---- scripts/plot_trace.py ------------------------------------------------------------------------------------------

enum { SWEEPS = 3, SQUARES = 4 };

/* The drawing of a directory's trace.json, or with a range that is wrong what the script says. */
static char *drawing_of(const char *dir, const char *kind, const char *sweeps) {
    char command[1500];
    snprintf(command, sizeof command, "in=%s/trace.json; %s %s $in $in.svg --title T %s 2>$in.said", dir,
             "python3 -B scripts/plot_trace.py", kind, sweeps);
    return contents(in_dir(dir, system(command) ? "trace.json.said" : "trace.json.svg"), NULL);
}

/* Three sweeps of two layers and two batches; a square takes a second, and none runs beside another. "--sweeps A:B cuts out
 * sweeps A to B, both included; either end may be left out." */
TEST(a_drawing_has_all_of_the_sweeps_that_it_is_asked_for) {
    static const struct {
        const char *option;
        int first, last;
    } cases[] = {{"", 0, 2}, {"--sweeps 0:1", 0, 1}, {"--sweeps 1:", 1, 2}, {"--sweeps :0", 0, 0}, {"--sweeps 1", 1, 1}};
    if (!has_python()) return;
    const char *dir = temp_dir();
    Trace trace = {.name = "three sweeps"};
    for (int e = 0; e < SWEEPS * SQUARES; e++)
        add(&trace, (Timed){PROJECT, OTHER, e < SQUARES, e / SQUARES, e / 2 % 2, e % 2, e % 2, e, e + 1, 1});
    char *text = written(&trace, 1), name[60];
    write_file(dir, "trace.json", text, strlen(text));
    free(text), trace_free(&trace);
    for (int c = 0; c < 5; c++) {
        char *lanes = drawing_of(dir, "--lanes", cases[c].option), *squares = drawing_of(dir, "--squares", cases[c].option);
        const int n = cases[c].last - cases[c].first + 1;
        for (int i = 0; i < SWEEPS; i++) {
            const bool there = cases[c].first <= i && i <= cases[c].last;
            snprintf(name, sizeof name, ">sweep %d%s</text>", i, i ? "" : ", prefill");
            CU_ASSERT_EQUAL(count_of(lanes, name), there);
            snprintf(name, sizeof name, ">token %d</text>", i);
            CU_ASSERT_EQUAL(count_of(squares, name), there);
        }
        for (int square = 0; square < SQUARES; square++) {
            snprintf(name, sizeof name, ">%d,%d</text>", square / 2, square % 2);
            CU_ASSERT_EQUAL(count_of(lanes, name), n);
        }
        for (int number = 1; number <= SWEEPS * SQUARES; number++) {
            snprintf(name, sizeof name, "'>%d</text>", number);
            CU_ASSERT(!strstr(squares, name) == (number > n * SQUARES));
        }
        free(lanes), free(squares);
    }
    char *said = drawing_of(dir, "--lanes", "--sweeps 3:");
    CU_ASSERT_STRING_EQUAL(said, "plot_trace.py: --sweeps: nothing was computed in 3:; the trace has sweeps 0 to 2\n");
    free(said), said = drawing_of(dir, "--squares", "--sweeps 2:1");
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "--sweeps: found '2:1'; expected a range A:B"));
    free(said);
}
