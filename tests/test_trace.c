/* test_trace.c: slices, the file they make, and Table 4 out of them. Times in these tests are small whole numbers of
 * seconds, so that sums are exact. */
#include <cjson/cJSON.h>
#include <pthread.h>

#include "tests.h"

static void note(Trace *trace, const Op *op, size_t bytes, double begin, double end) {
    const Slice slice = slice_of(op, bytes, begin, end);
    trace_add(trace, &slice, 0);
}

static Op call(Lane lane, Kind kind, bool prefill, int i, int j, int k) {
    return (Op){.lane = lane, .kind = kind, .prefill = prefill, .prefill_sweep = prefill, .i = i, .j = j, .k = k};
}

static void add(Trace *trace, Lane lane, Kind kind, bool prefill, int i, double begin, double end) {
    Op op = call(lane, kind, prefill, i, 0, 0);
    note(trace, &op, 1, begin, end);
}

static bool slice_is(const Trace *trace, size_t n, double begin, double end, size_t bytes) {
    const Slice *s = &trace->slice[n];
    return n < trace->n && s->begin == begin && s->end == end && s->bytes == bytes;
}

// ---------------------------------------------------------------------------------------------------------------
// Slices
// ---------------------------------------------------------------------------------------------------------------

static void ops_of_one_call_are_one_slice(void) {
    Trace trace = {0};
    Op op = call(C_LOAD, CACHE, false, 3, 4, 5);
    note(&trace, &op, 100, 10, 11);
    note(&trace, &op, 20, 11, 12);
    note(&trace, &op, 3, 12.00005, 13);
    CU_ASSERT_FATAL(trace.n == 1);
    CU_ASSERT(slice_is(&trace, 0, 10, 13, 123));
    note(&trace, &op, 4, 13.001, 14); /* after a pause */
    CU_ASSERT_FATAL(trace.n == 2);
    CU_ASSERT(slice_is(&trace, 1, 13.001, 14, 4));
    const Slice *s = trace.slice;
    CU_ASSERT(s->lane == C_LOAD && s->kind == CACHE && !s->prefill && s->i == 3 && s->j == 4 && s->k == 5);
    trace_free(&trace);
    CU_ASSERT(!trace.slice && !trace.n && !trace.last[C_LOAD]);
}

static void whatever_differs_begins_a_new_slice(void) {
    Op ops[] = {call(C_LOAD, CACHE, false, 1, 1, 1),     call(C_LOAD, ACTIVATION, false, 1, 1, 1),
                call(C_LOAD, ACTIVATION, true, 1, 1, 1), call(C_LOAD, ACTIVATION, true, 2, 1, 1),
                call(C_LOAD, ACTIVATION, true, 2, 2, 1), call(C_LOAD, ACTIVATION, true, 2, 2, 2),
                call(STORE, ACTIVATION, true, 2, 2, 2)};
    size_t count = sizeof ops / sizeof *ops;
    Trace trace = {0};
    for (size_t n = 0; n < count; n++) note(&trace, &ops[n], n, (double)n, n + 1.0);
    CU_ASSERT_FATAL(trace.n == count);
    for (size_t n = 0; n < count; n++) CU_ASSERT(slice_is(&trace, n, (double)n, n + 1.0, n));
    trace_free(&trace);
}

/* Lane A: x y x; lane B: x between them. The second x of A does not join the first, since y of A lies between. */
static void slices_join_over_other_lanes_but_not_over_their_own(void) {
    Trace trace = {0};
    Op ax = call(PROJECT, OTHER, false, 0, 1, 0), ay = call(PROJECT, CACHE, false, 0, 1, 0);
    Op bx = call(FINISH, OTHER, false, 0, 1, 0);
    note(&trace, &ax, 1, 0, 1);
    note(&trace, &bx, 10, 0, 3);
    note(&trace, &ax, 1, 1, 2); /* joins: b is another lane */
    note(&trace, &ay, 1, 2, 3);
    note(&trace, &bx, 10, 3, 4); /* joins */
    note(&trace, &ax, 1, 3, 4);  /* does not */
    note(&trace, &ax, 1, 4, 5);  /* joins the new one */
    CU_ASSERT_FATAL(trace.n == 4);
    CU_ASSERT(slice_is(&trace, 0, 0, 2, 2));
    CU_ASSERT(slice_is(&trace, 1, 0, 4, 20));
    CU_ASSERT(slice_is(&trace, 2, 2, 3, 1));
    CU_ASSERT(slice_is(&trace, 3, 3, 5, 2));
    trace_free(&trace);
}

static void calls_have_the_names_of_figure_4(void) {
    static const struct {
        Lane lane;
        Kind kind;
        bool prefill;
        const char *name;
    } expected[] = {
        {W_READ, WEIGHT, false, "load_weight"},
        {W_LOAD, WEIGHT, true, "load_weight"},
        {C_READ, CACHE, false, "load_cache"},
        {C_LOAD, CACHE, false, "load_cache"},
        {C_READ, ACTIVATION, true, "load_activation"},
        {C_LOAD, ACTIVATION, false, "load_activation"},
        {C_READ, OTHER, true, "load_inputs"},
        {C_LOAD, OTHER, false, "load_inputs"},
        {STORE, CACHE, false, "store_cache"},
        {STORE, ACTIVATION, false, "store_activation"},
        {D_WRITE, CACHE, true, "store_cache"},
        {D_WRITE, ACTIVATION, false, "store_activation"},
        {A_DOWN, CACHE, false, "attend"},
        {A_UP, CACHE, false, "attend"},
        {A_DOWN, OTHER, true, "tokens"},
        {PROJECT, OTHER, true, "project"},
        {PROJECT, CACHE, true, "store_cache"},
        {PROJECT, ACTIVATION, false, "load_activation"},
        {FINISH, CACHE, true, "attend"},
        {FINISH, OTHER, false, "finish"},
        {FINISH, ACTIVATION, false, "store_activation"},
        {ATTEND, CACHE, false, "attend"},
        {ATTEND, CACHE, true, "store_cache"},
        {ATTEND, OTHER, true, "gather_tokens"},
    };
    for (size_t n = 0; n < sizeof expected / sizeof *expected; n++) {
        Slice s = {.lane = expected[n].lane, .kind = expected[n].kind, .prefill = expected[n].prefill};
        s.delegated = !s.prefill; /* the CPU attends for all that decode */
        CU_ASSERT_STRING_EQUAL(trace_call(&s), expected[n].name);
    }
    CU_ASSERT_STRING_EQUAL(trace_call(&(Slice){.lane = ATTEND, .kind = OTHER, .j = 12}), "tokens"); /* that it samples */
    for (int lane = 0; lane < NLANES; lane++) /* and what the schedule never posts has one, too */
        for (int kind = 0; kind < NKINDS; kind++)
            CU_ASSERT_PTR_NOT_NULL(trace_call(&(Slice){.lane = (Lane)lane, .kind = (Kind)kind}));
}

// ---------------------------------------------------------------------------------------------------------------
// The file
// ---------------------------------------------------------------------------------------------------------------

/* The file as JSON; its events. cJSON_Delete(*tree). */
static cJSON *written(Trace *trace, const char *process, cJSON **tree) {
    char *text = NULL;
    size_t len = 0;
    Error err = {0, ""};
    FILE *out = open_memstream(&text, &len);
    CHECK(out);
    snprintf(trace->name, sizeof trace->name, "%s", process);
    trace_write(trace, 1, out);
    CHECK(fclose(out) == 0);
    *tree = json_parse(text, len, &err);
    free(text);
    if (!*tree) fprintf(stderr, "\n    %s\n", err.text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(*tree);
    return cJSON_GetObjectItemCaseSensitive(*tree, "traceEvents");
}

static double number(const cJSON *event, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(event, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}
static const char *text_of(const cJSON *event, const char *key) {
    const char *s = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(event, key));
    return s ? s : "";
}

static void is_metadata(const cJSON *event, const char *name, int tid, const char *value) {
    const cJSON *args = cJSON_GetObjectItemCaseSensitive(event, "args");
    CU_ASSERT_STRING_EQUAL(text_of(event, "ph"), "M");
    CU_ASSERT_STRING_EQUAL(text_of(event, "name"), name);
    CU_ASSERT(number(event, "pid") == 1 && number(event, "tid") == tid);
    if (value)
        CU_ASSERT_STRING_EQUAL(text_of(args, "name"), value)
    else
        CU_ASSERT(number(args, "sort_index") == tid);
}

static void the_file_has_a_row_a_lane_and_a_slice_a_call(void) {
    Trace trace = {0};
    Op project = call(PROJECT, OTHER, false, 7, 2, 1), load = call(W_LOAD, WEIGHT, true, 6, 3, 0);
    note(&trace, &project, 0, 1000.5, 1000.501);
    note(&trace, &load, 5000000000, 1000.25, 1000.7500000004); /* begins first */
    cJSON *tree, *events = written(&trace, "opt-30b \"zig\\zag\"\n", &tree);
    CU_ASSERT_FATAL(cJSON_GetArraySize(events) == 1 + 2 * 2 + 2);
    is_metadata(cJSON_GetArrayItem(events, 0), "process_name", 0, "opt-30b \"zig\\zag\"\n");
    is_metadata(cJSON_GetArrayItem(events, 1), "thread_name", W_LOAD, "load weights");
    is_metadata(cJSON_GetArrayItem(events, 2), "thread_sort_index", W_LOAD, NULL);
    is_metadata(cJSON_GetArrayItem(events, 3), "thread_name", PROJECT, "project");
    is_metadata(cJSON_GetArrayItem(events, 4), "thread_sort_index", PROJECT, NULL);
    cJSON *one = cJSON_GetArrayItem(events, 5), *two = cJSON_GetArrayItem(events, 6);
    cJSON *args = cJSON_GetObjectItemCaseSensitive(one, "args");
    CU_ASSERT_STRING_EQUAL(text_of(one, "ph"), "X");
    CU_ASSERT_STRING_EQUAL(text_of(one, "name"), "project");
    CU_ASSERT_STRING_EQUAL(text_of(one, "cat"), "gpu");
    CU_ASSERT(number(one, "pid") == 1 && number(one, "tid") == PROJECT);
    CU_ASSERT(number(one, "ts") == 250000 && number(one, "dur") == 1000);
    CU_ASSERT(number(args, "i") == 7 && number(args, "j") == 2 && number(args, "k") == 1 && number(args, "bytes") == 0);
    CU_ASSERT_STRING_EQUAL(text_of(args, "phase"), "decode");
    args = cJSON_GetObjectItemCaseSensitive(two, "args");
    CU_ASSERT_STRING_EQUAL(text_of(two, "name"), "load_weight");
    CU_ASSERT_STRING_EQUAL(text_of(two, "cat"), "ctog");
    CU_ASSERT(number(two, "ts") == 0 && number(two, "dur") == 500000);
    CU_ASSERT(number(args, "bytes") == 5e9);
    CU_ASSERT_STRING_EQUAL(text_of(args, "phase"), "prefill");
    cJSON_Delete(tree);
    trace_free(&trace);
}

/* Three slices of a third of 1.0007 us: in whole nanoseconds 334, 333, 334. Each ends where the next begins. */
static void times_are_microseconds_with_three_decimals_and_touch(void) {
    Trace trace = {0};
    for (int n = 0; n < 3; n++) add(&trace, STORE, CACHE, false, n, n * 1.0007e-6 / 3, (n + 1) * 1.0007e-6 / 3);
    char *text = NULL;
    size_t len = 0;
    FILE *out = open_memstream(&text, &len);
    CHECK(out);
    trace_write(&trace, 1, out);
    CHECK(fclose(out) == 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "\"ts\":0.000,\"dur\":0.334,"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "\"ts\":0.334,\"dur\":0.333,"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "\"ts\":0.667,\"dur\":0.334,"));
    free(text);
    trace_free(&trace);
}

static void an_empty_trace_is_a_file_without_rows_and_a_table_of_zeros(void) {
    Trace trace = {0};
    cJSON *tree, *events = written(&trace, "\xff nothing", &tree);
    CU_ASSERT(cJSON_GetArraySize(events) == 1);
    is_metadata(cJSON_GetArrayItem(events, 0), "process_name", 0, "? nothing");
    cJSON_Delete(tree);
    const Breakdown b = trace_breakdown(&trace);
    for (int part = 0; part < 2 * NPARTS; part++)
        CU_ASSERT(b.part[part / NPARTS][part % NPARTS].busy_s == 0 && b.part[part / NPARTS][part % NPARTS].hidden_s == 0);
    trace_free(&trace);
}

/* Eight prompts of 5 tokens that get 5 more, two batches of two, pages of 4 tokens; sweep i of a sequence holds 5 + i
 * tokens. With zig-zag the 2 x 2 sequences of a block hold 4 ceil((5 + i) / 4) pages: 8 in sweeps 0 to 3, 12 in the last.
 */
static void the_pages_of_every_sweep_are_those_of_its_sequences(void) {
    enum { PROMPTS = 8, S = 5, N = 5, PAGE = 4, BLOCK = 4 };
    static const OptConfig config = SMALL_CONFIG(2);
    const Hardware hardware = test_fast_machine();
    Checkpoint *checkpoint = checkpoint_dummy(&config, 3);
    int32_t ids[S] = {0};
    Prompt prompts[PROMPTS];
    const Task task = {.prompts = prompts, .count = PROMPTS, .sampling = {.top_p = 1}};
    const Listener listener = {0};
    Policy policy = all_gpu(2, 2);
    RunStats stats;
    Trace trace = {0};
    Error err;
    for (int p = 0; p < PROMPTS; p++) prompts[p] = (Prompt){.ids = ids, .s = S, .n = N};
    policy.cg = .5, policy.cc = .5, policy.page_tokens = PAGE;
    Plan *plan = plan_make(checkpoint, &policy, &task, F16, &err);
    Device *device = sim_open(plan, &hardware);
    device->trace = &trace;
    ASSERT_OK(schedule_run(plan, &task, device, &listener, &stats, &err));
    CU_ASSERT_EQUAL_FATAL(trace.sweeps, PROMPTS / BLOCK * N + 1);
    for (int i = 0; i < (int)trace.sweeps - 1; i++) {
        const Held *held = &trace.held[i];
        const int pages = BLOCK / 2 * pages_for(S + i % N, PAGE);
        CU_ASSERT(held->pages[TIER_GPU] == pages && held->pages[TIER_CPU] == pages && held->pages[TIER_DISK] == 0);
        CU_ASSERT_EQUAL(held->sequences, BLOCK);
        CU_ASSERT(held->at <= held[1].at);
    }
    const Held *end = &trace.held[trace.sweeps - 1];
    CU_ASSERT(end->at > 0 && !end->sequences && !end->pages[TIER_GPU] && !end->pages[TIER_CPU]);
    cJSON *tree, *events = written(&trace, "pages", &tree), *event;
    int counters = 0;
    cJSON_ArrayForEach(event, events) if (!strcmp(text_of(event, "ph"), "C")) counters++;
    CU_ASSERT_EQUAL(counters, 2 * (int)trace.sweeps);
    event = cJSON_GetArrayItem(events, cJSON_GetArraySize(events) - 2);
    CU_ASSERT_STRING_EQUAL(text_of(event, "name"), "KV pages");
    CU_ASSERT(number(cJSON_GetObjectItem(event, "args"), "GPU") == 0);
    event = cJSON_GetArrayItem(events, cJSON_GetArraySize(events) - 4);
    CU_ASSERT(number(cJSON_GetObjectItem(event, "args"), "CPU") == 2 * 3);
    cJSON_Delete(tree);
    device->close(device), plan_free(plan), checkpoint_close(checkpoint);
    trace_free(&trace);
}

static void *send_trace(void *arg) {
    Net *net = arg;
    Trace own = stage_trace(net->stage, 4 * net->stage, 4, 0), *trace = &own;
    Error err;
    trace->ready_at = 1000 * net->stage; /* the clocks of stages 1 and 2 */
    for (int n = 0; n < net->stage; n++)
        add(trace, RECEIVE, ACTIVATION, true, n, trace->ready_at + n, trace->ready_at + n + 1);
    for (int n = 0; n < net->stage; n++) trace_hold(trace, &(Held){.at = trace->ready_at + n, .sequences = n});
    CHECK(stage_gather_traces(net, trace, &err) == 0);
    trace_free(trace);
    net->close(net);
    return NULL;
}

static void traces_of_all_stages_come_together_with_the_clock_of_the_first(void) {
    enum { M = 3 };
    Net *net[M];
    pthread_t thread[M];
    Trace all[M] = {{.ready_at = 50}};
    Error err;
    local_net_open(net, M, true, 0);
    for (int s = 1; s < M; s++) CHECK(pthread_create(&thread[s], NULL, send_trace, net[s]) == 0);
    add(&all[0], SEND, ACTIVATION, true, 0, 51, 52);
    CU_ASSERT_EQUAL(stage_gather_traces(net[0], all, &err), 0);
    net[0]->close(net[0]);
    for (int s = 1; s < M; s++) pthread_join(thread[s], NULL);
    CU_ASSERT(slice_is(&all[0], 0, 51, 52, 1) && all[0].n == 1);
    CU_ASSERT(slice_is(&all[1], 0, 50, 51, 1) && all[1].n == 1);
    CU_ASSERT(slice_is(&all[2], 0, 50, 51, 1) && slice_is(&all[2], 1, 51, 52, 1) && all[2].n == 2);
    CU_ASSERT_STRING_EQUAL(all[2].name, "stage 2: layers 8 to 11");
    CU_ASSERT(all[0].sweeps == 0 && all[2].sweeps == 2 && all[2].held[1].at == 51 && all[2].held[1].sequences == 1);
    for (int s = 0; s < M; s++) trace_free(&all[s]);
}

// ---------------------------------------------------------------------------------------------------------------
// Table 4
// ---------------------------------------------------------------------------------------------------------------

static bool share_is(const Breakdown *b, bool prefill, int part, double busy, double hidden) {
    Share s = b->part[prefill][part];
    if (s.busy_s == busy && s.hidden_s == hidden) return true;
    fprintf(stderr, "\n    %s %s: %g busy, %g hidden; expected %g, %g\n", prefill ? "prefill" : "decode", part_name[part],
            s.busy_s, s.hidden_s, busy, hidden);
    return false;
}

/*      second     0 1 2 3 4 5 6 7 8 9 . 1 2 3 4 5 6 7 8 9 20
 * decode  read w  ========          ====                         0-4, 9-11
 *         load w      ========                                   2-6: the union of both is 0-6 and 9-11
 *         project   ====        ====                             1-3, 7-9
 *         attend      ======                                     2-5: compute is 1-5 and 7-9
 *         finish                    ==                           9-10: so 7-10
 *         load c                ==========                       7-12
 *         write                           ====                   12-14
 *         store act               ==                             8-9
 * prefill project                           ========             13-17
 *         load w                                  ========       16-20
 *         store c                       ==================       11-20 */
static void unions_and_what_hides_them_add_up_by_hand(void) {
    Trace trace = {0};
    Breakdown b;
    add(&trace, W_READ, WEIGHT, false, 0, 0, 4), add(&trace, W_READ, WEIGHT, false, 1, 9, 11);
    add(&trace, W_LOAD, WEIGHT, false, 0, 2, 6);
    add(&trace, PROJECT, OTHER, false, 0, 1, 3), add(&trace, PROJECT, OTHER, false, 1, 7, 9);
    add(&trace, ATTEND, CACHE, false, 0, 2, 5);
    add(&trace, FINISH, OTHER, false, 1, 9, 10);
    add(&trace, C_LOAD, CACHE, false, 1, 7, 12);
    add(&trace, D_WRITE, CACHE, false, 1, 12, 14);
    add(&trace, STORE, ACTIVATION, false, 1, 8, 9);
    add(&trace, PROJECT, OTHER, true, 2, 13, 17);
    add(&trace, W_LOAD, WEIGHT, true, 2, 16, 20);
    add(&trace, STORE, CACHE, true, 2, 11, 20);
    b = trace_breakdown(&trace);
    CU_ASSERT(share_is(&b, false, COMPUTE, 7, 7));          /* 1-5, 7-10; copies run 0-6, 7-20 */
    CU_ASSERT(share_is(&b, false, WEIGHT_READ, 8, 5));      /* 0-6, 9-11 with 1-5, 7-10, 13-17 */
    CU_ASSERT(share_is(&b, false, CACHE_READ, 5, 3));       /* 7-12 */
    CU_ASSERT(share_is(&b, false, CACHE_WRITE, 2, 1));      /* 12-14, beside prefill's project */
    CU_ASSERT(share_is(&b, false, ACTIVATION_MOVES, 1, 1)); /* 8-9 */
    CU_ASSERT(share_is(&b, true, COMPUTE, 4, 4));
    CU_ASSERT(share_is(&b, true, WEIGHT_READ, 4, 1));
    CU_ASSERT(share_is(&b, true, CACHE_READ, 0, 0));
    CU_ASSERT(share_is(&b, true, CACHE_WRITE, 9, 4));
    CU_ASSERT(share_is(&b, true, ACTIVATION_MOVES, 0, 0));
    trace_free(&trace);
}

static void one_after_the_other_hides_nothing(void) {
    Trace trace = {0};
    Breakdown b;
    for (int n = 0; n < 50; n++) { /* as with --no-overlap; intervals that touch have nothing in common */
        add(&trace, W_LOAD, WEIGHT, false, n, 3 * n, 3 * n + 1);
        add(&trace, PROJECT, OTHER, false, n, 3 * n + 1, 3 * n + 2);
        add(&trace, STORE, CACHE, false, n, 3 * n + 2, 3 * n + 3);
    }
    b = trace_breakdown(&trace);
    CU_ASSERT(share_is(&b, false, COMPUTE, 50, 0));
    CU_ASSERT(share_is(&b, false, WEIGHT_READ, 50, 0));
    CU_ASSERT(share_is(&b, false, CACHE_WRITE, 50, 0));
    trace_free(&trace);
}

/* The part of everything that the schedule posts; -1: it does not. By kind: WEIGHT, CACHE, ACTIVATION, OTHER. */
static const int part_of[NLANES][NKINDS] = {
    [W_READ] = {WEIGHT_READ, -1, -1, -1},
    [W_LOAD] = {WEIGHT_READ, -1, -1, -1},
    [C_READ] = {-1, CACHE_READ, ACTIVATION_MOVES, ACTIVATION_MOVES},
    [C_LOAD] = {-1, CACHE_READ, ACTIVATION_MOVES, ACTIVATION_MOVES},
    [STORE] = {-1, CACHE_WRITE, ACTIVATION_MOVES, -1},
    [D_WRITE] = {-1, CACHE_WRITE, ACTIVATION_MOVES, -1},
    [A_DOWN] = {-1, CACHE_WRITE, -1, ACTIVATION_MOVES},
    [A_UP] = {-1, ACTIVATION_MOVES, -1, -1},
    [PROJECT] = {-1, COMPUTE, COMPUTE, COMPUTE},
    [FINISH] = {-1, COMPUTE, COMPUTE, COMPUTE},
    [ATTEND] = {-1, COMPUTE, -1, COMPUTE},
    [RECEIVE] = {-1, -1, ACTIVATION_MOVES, -1},
    [SEND] = {-1, -1, ACTIVATION_MOVES, -1},
};

static void every_lane_and_kind_has_its_part(void) {
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) {
            if (part_of[lane][kind] < 0) continue;
            Trace trace = {0};
            Breakdown b;
            add(&trace, (Lane)lane, (Kind)kind, true, 0, 1, 3);
            b = trace_breakdown(&trace);
            for (int part = 0; part < NPARTS; part++) {
                CU_ASSERT(share_is(&b, true, part, part == part_of[lane][kind] ? 2 : 0, 0));
                CU_ASSERT(share_is(&b, false, part, 0, 0));
            }
            trace_free(&trace);
        }
}

enum { TICKS = 64 };

/* Counts, tick by tick, in which a part is busy and in which what hides it is busy as well. */
static void count_ticks(const Trace *trace, Breakdown *b) {
    *b = (Breakdown){0};
    for (int tick = 0; tick < TICKS; tick++) {
        bool busy[2][NPARTS] = {{false}}, computing = false, copying = false;
        for (size_t n = 0; n < trace->n; n++) {
            const Slice *s = &trace->slice[n];
            if (s->begin > tick || s->end < tick + 1) continue;
            int part = part_of[s->lane][s->kind];
            busy[s->prefill_sweep][part] = true;
            *(part == COMPUTE ? &computing : &copying) = true;
        }
        for (int p = 0; p < 2 * NPARTS; p++) {
            Share *share = &b->part[p / NPARTS][p % NPARTS];
            if (!busy[p / NPARTS][p % NPARTS]) continue;
            share->busy_s++;
            if (p % NPARTS == COMPUTE ? copying : computing) share->hidden_s++;
        }
    }
}

static void random_intervals_agree_with_a_count_of_every_tick(void) {
    uint64_t state = 5;
    for (int round = 0; round < 2000; round++) {
        Trace trace = {0};
        Breakdown fast, slow;
        int n = test_below(&state, 40), longest = 1 + test_below(&state, 20);
        for (int i = 0; i < n; i++) {
            int lane = test_below(&state, NLANES), kind = test_below(&state, NKINDS);
            if (part_of[lane][kind] < 0) continue;
            int begin = test_below(&state, TICKS), end = begin + test_below(&state, longest); /* some are empty */
            add(&trace, (Lane)lane, (Kind)kind, !test_below(&state, 6), test_below(&state, 4), begin,
                end < TICKS ? end : TICKS);
        }
        fast = trace_breakdown(&trace);
        count_ticks(&trace, &slow);
        bool equal = true;
        for (int p = 0; p < 2 * NPARTS; p++) {
            Share s = slow.part[p / NPARTS][p % NPARTS];
            equal = share_is(&fast, p / NPARTS, p % NPARTS, s.busy_s, s.hidden_s) && equal;
        }
        trace_free(&trace);
        if (!equal) {
            fprintf(stderr, "\n    round %d\n", round);
            CU_FAIL_FATAL("shares");
        }
    }
    CU_PASS("shares");
}

/* A run of eight prompts with everything on every tier, the batches at equal distances or all at once. */
static Breakdown run_on_sim(Trace *trace, Schedule schedule, bool delegated, RunStats *stats, LaneCount *count) {
    enum { PROMPTS = 8, S = 5, N = 40 };
    static const OptConfig config = SMALL_CONFIG(2);
    Hardware hardware = test_fast_machine();
    Checkpoint *checkpoint = checkpoint_dummy(&config, 3);
    int32_t ids[S] = {0};
    Prompt prompts[PROMPTS];
    const Task task = {.prompts = prompts, .count = PROMPTS, .sampling = {.top_p = 1}};
    const Listener listener = {0};
    Policy policy = all_gpu(2, 2);
    Error err;
    for (int stage = 0; stage < 2; stage++) { /* so slow that pauses between ops do not count */
        hardware.ctog_bdw[stage] = hardware.gtoc_bdw[stage] = 1e5;
        hardware.dtoc_bdw[stage] = hardware.ctod_bdw[stage] = 5e4, hardware.mm_flops[stage] = 1e6;
    }
    for (int p = 0; p < PROMPTS; p++) prompts[p] = (Prompt){.ids = ids, .s = S, .n = N - 3 * p};
    policy.wg = policy.cg = policy.hg = .3, policy.wc = policy.cc = policy.hc = .3, policy.schedule = schedule;
    policy.delegated = delegated;
    Plan *plan = plan_make(checkpoint, &policy, &task, F16, &err);
    Device *device = sim_open(plan, &hardware);
    device->trace = trace;
    ASSERT_OK(schedule_run(plan, &task, device, &listener, stats, &err));
    memcpy(count, device->count, sizeof device->count);
    device->close(device), plan_free(plan), checkpoint_close(checkpoint);
    return trace_breakdown(trace);
}

static void a_sweep_in_which_some_batch_prefills_counts_as_prefill(void) {
    Trace trace = {0};
    RunStats stats;
    LaneCount count[NLANES];
    bool prefill[400] = {false};
    int mixed = 0;
    run_on_sim(&trace, SCHEDULE_DIAGONAL, false, &stats, count);
    for (size_t n = 0; n < trace.n; n++) prefill[trace.slice[n].i] |= trace.slice[n].prefill;
    for (size_t n = 0; n < trace.n; n++) {
        CU_ASSERT_EQUAL(trace.slice[n].prefill_sweep, prefill[trace.slice[n].i]);
        mixed += trace.slice[n].prefill != prefill[trace.slice[n].i];
    }
    CU_ASSERT(mixed > 0);
    trace_free(&trace);
}

static bool near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

/* Where the CPU does not attend it only puts new k and v into their pages. */
static void the_cpu_attends_where_attention_is_delegated(void) {
    for (int cpu = 0; cpu < 2; cpu++) {
        Trace trace = {0};
        RunStats stats;
        LaneCount count[NLANES];
        int attends = 0, stores = 0;
        run_on_sim(&trace, SCHEDULE_ZIGZAG, cpu, &stats, count);
        for (const Slice *s = trace.slice; s < trace.slice + trace.n; s++) {
            if (s->lane != ATTEND) continue;
            attends += !strcmp(trace_call(s), "attend"), stores += !strcmp(trace_call(s), "store_cache");
            CU_ASSERT_EQUAL(!strcmp(trace_call(s), "attend"), cpu && !s->prefill);
        }
        CU_ASSERT(stores > 0 && (attends > 0) == cpu);
        trace_free(&trace);
    }
}

/* However few slices a trace keeps at a time, its table is that of one that keeps all of them. */
static void a_trace_that_drops_slices_adds_up_the_whole_run(void) {
    static const size_t limits[] = {1, 16, 100};
    for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++) {
        Trace all = {0};
        RunStats stats;
        LaneCount count[NLANES];
        const Breakdown whole = run_on_sim(&all, (Schedule)schedule, true, &stats, count);
        for (int l = 0; l < 3; l++) {
            Trace some = {.limit = limits[l]};
            const Breakdown b = run_on_sim(&some, (Schedule)schedule, true, &stats, count);
            CU_ASSERT(some.n < all.n / 10 && some.kept + some.limit <= 1024);
            CU_ASSERT(near(b.busy_s, whole.busy_s));
            for (int p = 0; p < 2 * NPARTS; p++) {
                const Share *share = &whole.part[p / NPARTS][p % NPARTS], *its = &b.part[p / NPARTS][p % NPARTS];
                CU_ASSERT(near(its->busy_s, share->busy_s) && near(its->hidden_s, share->hidden_s));
                CU_ASSERT(near(b.total_s[p / NPARTS], whole.total_s[p / NPARTS]));
            }
            trace_free(&some);
        }
        trace_free(&all);
    }
}

/* The parts of both stages beside what the lanes counted, and their totals beside the clock. */
static void the_table_of_a_run_agrees_with_its_lanes_and_its_clock(void) {
    for (int schedule = SCHEDULE_ZIGZAG; schedule <= SCHEDULE_DIAGONAL; schedule++) {
        Trace trace = {.limit = 64};
        RunStats stats;
        LaneCount c[NLANES];
        const Breakdown b = run_on_sim(&trace, (Schedule)schedule, true, &stats, c);
        const double compute = b.part[0][COMPUTE].busy_s + b.part[1][COMPUTE].busy_s;
        const double weights = b.part[0][WEIGHT_READ].busy_s + b.part[1][WEIGHT_READ].busy_s;
        const double gpu = c[PROJECT].busy_s + c[FINISH].busy_s;
        CU_ASSERT(compute >= (1 - 1e-9) * gpu && compute <= gpu + c[ATTEND].busy_s + .01 * stats.total_s);
        CU_ASSERT(weights >= (1 - 1e-9) * c[W_LOAD].busy_s && weights <= c[W_READ].busy_s + c[W_LOAD].busy_s);
        CU_ASSERT(b.busy_s <= stats.total_s && b.busy_s >= .9 * stats.total_s);
        CU_ASSERT(b.total_s[0] + b.total_s[1] >= (1 - 1e-9) * b.busy_s);
        trace_free(&trace);
    }
}

/* All of it is far below a second; with a quadratic one nobody would wait for the end of this. */
static void a_million_slices_take_a_moment(void) {
    enum { N = 1000000 };
    Trace trace = {0};
    Breakdown b;
    for (int n = 0; n < N; n++)
        add(&trace, n % 2 ? W_LOAD : PROJECT, n % 2 ? WEIGHT : OTHER, false, n, (long)n * 7919 % N, (long)n * 7919 % N + 1);
    b = trace_breakdown(&trace);
    FILE *out = fopen("/dev/null", "w");
    CHECK(out);
    trace_write(&trace, 1, out);
    CHECK(fclose(out) == 0);
    CU_ASSERT(trace.n == N && share_is(&b, false, COMPUTE, N / 2, 0) && share_is(&b, false, WEIGHT_READ, N / 2, 0));
    trace_free(&trace);
}

/* The union of what lanes do, without those of the network. */
static void a_stage_is_busy_when_a_lane_other_than_of_the_network_is(void) {
    Trace trace = {0}, empty = {0};
    add(&trace, RECEIVE, ACTIVATION, false, 0, 0, 10);
    add(&trace, PROJECT, OTHER, false, 0, 12, 14);
    add(&trace, W_LOAD, WEIGHT, false, 0, 11, 13);
    add(&trace, STORE, CACHE, false, 0, 11.5, 12.5);
    add(&trace, FINISH, OTHER, false, 0, 20, 21);
    add(&trace, SEND, ACTIVATION, false, 0, 21, 30);
    CU_ASSERT_EQUAL(trace_breakdown(&trace).busy_s, 3 + 1);
    CU_ASSERT_EQUAL(trace_breakdown(&empty).busy_s, 0);
    trace_free(&trace);
}

// ---------------------------------------------------------------------------------------------------------------
// scripts/plot_trace.py
// ---------------------------------------------------------------------------------------------------------------

enum { SWEEPS = 3, LAYERS = 2, BATCHES = 2, SWEEP_SQUARES = LAYERS * BATCHES };

/* A trace of three sweeps of two layers and two batches; a square takes a second, and none runs beside another. */
static void write_sweeps(const char *path) {
    Trace trace = {.name = "three sweeps"};
    for (int e = 0; e < SWEEPS * SWEEP_SQUARES; e++) {
        const int i = e / SWEEP_SQUARES;
        Op op = call(PROJECT, OTHER, i == 0, i, e / BATCHES % LAYERS, e % BATCHES);
        op.batch = op.k;
        note(&trace, &op, 1, e, e + 1);
    }
    FILE *out = fopen(path, "w");
    CHECK(out);
    trace_write(&trace, 1, out);
    fclose(out), trace_free(&trace);
}

/* The drawing, or with a range that is wrong what the script says. */
static char *drawing_of(const char *trace, const char *kind, const char *sweeps) {
    char command[1500], svg[400], said[400];
    snprintf(svg, sizeof svg, "%s.svg", trace), snprintf(said, sizeof said, "%s.said", trace);
    snprintf(command, sizeof command, "python3 -B scripts/plot_trace.py %s %s %s --title T %s 2>%s", kind, trace, svg,
             sweeps, said);
    return contents(system(command) ? said : svg, NULL);
}

static int count_of(const char *text, const char *part) {
    int count = 0;
    for (; (text = strstr(text, part)); text += strlen(part)) count++;
    return count;
}

/* first to last are drawn, and no other sweep is. */
static void expect_sweeps(const char *trace, const char *option, int first, int last) {
    char *lanes = drawing_of(trace, "--lanes", option), *squares = drawing_of(trace, "--squares", option), name[60];
    const int n = (last - first + 1) * SWEEP_SQUARES;
    for (int i = 0; i < SWEEPS; i++) {
        const bool there = first <= i && i <= last;
        snprintf(name, sizeof name, ">sweep %d%s</text>", i, i ? "" : ", prefill");
        CU_ASSERT_EQUAL(count_of(lanes, name), there);
        snprintf(name, sizeof name, ">token %d</text>", i);
        CU_ASSERT_EQUAL(count_of(squares, name), there);
    }
    for (int j = 0; j < LAYERS; j++)
        for (int k = 0; k < BATCHES; k++) {
            snprintf(name, sizeof name, ">%d,%d</text>", j, k);
            CU_ASSERT_EQUAL(count_of(lanes, name), last - first + 1);
        }
    for (int number = 1; number <= SWEEPS * SWEEP_SQUARES; number++) {
        snprintf(name, sizeof name, "'>%d</text>", number);
        CU_ASSERT(!strstr(squares, name) == (number > n));
    }
    free(lanes), free(squares);
}

/* "--sweeps A:B cuts out sweeps A to B, both included; either end may be left out." */
static void a_drawing_has_all_of_the_sweeps_that_it_is_asked_for(void) {
    char path[400];
    if (!has_python()) return;
    snprintf(path, sizeof path, "%s/sweeps.json", temp_dir());
    write_sweeps(path);
    expect_sweeps(path, "", 0, 2);
    expect_sweeps(path, "--sweeps 0:1", 0, 1);
    expect_sweeps(path, "--sweeps 1:", 1, 2);
    expect_sweeps(path, "--sweeps :0", 0, 0);
    expect_sweeps(path, "--sweeps 1", 1, 1);
    char *said = drawing_of(path, "--lanes", "--sweeps 3:");
    CU_ASSERT_STRING_EQUAL(said, "plot_trace.py: --sweeps: nothing was computed in 3:; the trace has sweeps 0 to 2\n");
    free(said), said = drawing_of(path, "--squares", "--sweeps 2:1");
    CU_ASSERT_PTR_NOT_NULL(strstr(said, "--sweeps: found '2:1'; expected a range A:B"));
    free(said);
}

CU_TestInfo tests[] = {
    {"ops of one call are one slice", ops_of_one_call_are_one_slice},
    {"whatever differs begins a new slice", whatever_differs_begins_a_new_slice},
    {"slices join over other lanes but not over their own", slices_join_over_other_lanes_but_not_over_their_own},
    {"calls have the names of figure 4", calls_have_the_names_of_figure_4},
    {"the file has a row a lane and a slice a call", the_file_has_a_row_a_lane_and_a_slice_a_call},
    {"times are microseconds with three decimals and touch", times_are_microseconds_with_three_decimals_and_touch},
    {"an empty trace is a file without rows and a table of zeros",
     an_empty_trace_is_a_file_without_rows_and_a_table_of_zeros},
    {"the pages of every sweep are those of its sequences", the_pages_of_every_sweep_are_those_of_its_sequences},
    {"traces of all stages come together with the clock of the first",
     traces_of_all_stages_come_together_with_the_clock_of_the_first},
    {"unions and what hides them add up by hand", unions_and_what_hides_them_add_up_by_hand},
    {"one after the other hides nothing", one_after_the_other_hides_nothing},
    {"every lane and kind has its part", every_lane_and_kind_has_its_part},
    {"random intervals agree with a count of every tick", random_intervals_agree_with_a_count_of_every_tick},
    {"a sweep in which some batch prefills counts as prefill", a_sweep_in_which_some_batch_prefills_counts_as_prefill},
    {"the CPU attends where attention is delegated", the_cpu_attends_where_attention_is_delegated},
    {"a trace that drops slices adds up the whole run", a_trace_that_drops_slices_adds_up_the_whole_run},
    {"the table of a run agrees with its lanes and its clock", the_table_of_a_run_agrees_with_its_lanes_and_its_clock},
    {"a million slices take a moment", a_million_slices_take_a_moment},
    {"a stage is busy when a lane other than of the network is", a_stage_is_busy_when_a_lane_other_than_of_the_network_is},
    {"a drawing has all of the sweeps that it is asked for", a_drawing_has_all_of_the_sweeps_that_it_is_asked_for},
    CU_TEST_INFO_NULL,
};
