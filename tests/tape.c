/* tape.c: records every op of every run, to compare the program before and after a change that should change nothing.
 *
 *     make tape OUT=a                  # here, and in another tree with OUT=b
 *     python3 scripts/tape.py a b
 *
 * The program build/tape is made of the suites schedule, events and stages and of the test below, and is linked with
 * --wrap=schedule_run: each run is a case. Its name is that of its test, with the stage of a pipeline and its number among
 * the runs of both. OUT/index has a line for each case: its name, the number of its ops, and a hash for each category of
 * what is known about them. With FULL='*', or another pattern of names, OUT has these cases as texts, too, a line for each
 * op. Both are the same from run to run, since what is posted depends on no clock; but when a run that fails ends does, so
 * such a run is only recorded as failed.
 *
 * Offsets are those within a region; the first lines of a case have the regions themselves. */
#include <fnmatch.h>
#include <pthread.h>

#include "tests.h"

// ---- a tape ---------------------------------------------------------------------------------------------------------

/* What is known about an op. The names are those of scripts/tape.py. */
typedef enum {
    ORDER,   /* lane, code and kind */
    BYTES,   /* bytes that it counts for, and in which phase; its parameters; tier, type and shape of its views */
    WAITS,   /* the events that it comes after, and before that those that the posting thread waits for */
    TABLES,  /* hashes of the index tables that it uses */
    OFFSETS, /* where its views lie */
    SQUARE,  /* i, j, k, batch */
    CATEGORIES
} Category;

/* The recorder of one run; its thread is the one that posts. */
typedef struct {
    const Plan *plan;
    Event (*post)(Device *, const Op *);
    int (*wait)(Device *, Event, Error *);
    void *(*cpu_address)(Device *, Tensor);
    const uint8_t *tables; /* the CPU's INDEX_TABLES */
    Text line[CATEGORIES]; /* of the next op */
    uint64_t hash[CATEGORIES];
    bool full;
    Text all; /* all lines, if they are kept */
    long ops;
} Tape;

static _Thread_local Tape *tape;

static uint64_t hash_of(uint64_t hash, const void *bytes, size_t len) {
    const uint8_t *at = bytes;
    for (size_t i = 0; i < len; i++) hash = (hash ^ at[i]) * 0x100000001b3;
    return hash;
}

__attribute__((format(printf, 2, 3))) static void note(Category category, const char *format, ...) {
    char text[200];
    va_list args;
    va_start(args, format);
    const int len = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    CHECK(len < (int)sizeof text);
    text_append(&tape->line[category], text, len);
}

/* Ends a line: its categories, between tabs. */
static void end_line(void) {
    for (int c = 0; c < CATEGORIES; c++) {
        Text *line = &tape->line[c];
        text_append(line, c + 1 < CATEGORIES ? "\t" : "\n", 1);
        tape->hash[c] = hash_of(tape->hash[c], line->text, line->len);
        if (tape->full) text_append(&tape->all, line->text, line->len);
        line->len = 0;
    }
}

// ---- an op ----------------------------------------------------------------------------------------------------------

/* Returns the integers of an index table; NULL for any other view. Only this thread writes them. */
static const int32_t *table_of(const Tensor *t) {
    const bool is_table = t->rows && t->region == INDEX_TABLES && t->tier != TIER_DISK && tape->tables;
    if (!is_table) return NULL;
    return (const int32_t *)(tape->tables + t->offset - tape->plan->region[INDEX_TABLES][t->tier].offset);
}

static void note_view(const Tensor *t, Use use) {
    static const char *const type[] = {"F32", "F16", "BF16", "I32", "U8"};
    if (!t->rows) {
        note(BYTES, " .");
        return;
    }
    const char sign = use == READS ? '<' : use == WRITES ? '>' : '-';
    note(BYTES, " %c %s %s %dx%d/%d", sign, tier_name[t->tier], type[t->type], t->rows, t->cols, (int)t->ld);
    if (t->file) {
        note(OFFSETS, " file %d+%zu", t->file, t->offset);
    } else {
        const Region *region = &tape->plan->region[t->region][t->tier];
        note(OFFSETS, " %s+%zu", region->name, t->offset - region->offset);
    }
    const int32_t *table = table_of(t);
    uint64_t hash = 0;
    for (int r = 0; table && r < t->rows; r++) hash = hash_of(hash, table + r * t->ld, t->cols * sizeof *table);
    if (table) note(TABLES, " %08x", (unsigned)hash);
}

static Event record_post(Device *device, const Op *op) {
    static const char *const kind[NKINDS] = {"weight", "cache", "activation", "other"};
    LaneCount count = {.busy_s = 0};
    const Tensor *lengths = op_lengths(op);
    const Bytes moved = op_count(&count, op, lengths ? table_of(lengths) : NULL);
    note(ORDER, "%s: %s %s", lane_name[op->lane], op_info[op->code].name, kind[op->kind]);
    note(BYTES, "%s%s%s moves %zu reads %zu %zu; %d %d %d %d %d %g; study %d %d", op->prefill ? " prefill" : "",
         op->prefill_sweep ? " prefill_sweep" : "", op->delegated ? " delegated" : "", moved, count.read[0], count.read[1],
         op->nh, op->hd, op->page_tokens, op->add, op->relu, op->sparsity, op->study.bits, op->study.group);
    const Sampling greedy = {0}, *sampling = op->prompts ? &op->prompts[0].sampling : &greedy;
    note(BYTES, "; %g %g %d %llu:", sampling->temperature, sampling->top_p, sampling->top_k,
         (unsigned long long)sampling->seed);
    for (int v = 0; v < op_nviews(op); v++) {
        Use use;
        const Tensor *t = op_view(op, v, &use);
        note_view(t, use);
    }
    for (int e = 0; e < op->nafter; e++) note(WAITS, " %s %d", lane_name[op->after[e].lane], (int)op->after[e].seq);
    note(SQUARE, "i %d j %d k %d batch %d", op->i, op->j, op->k, op->batch);
    end_line();
    tape->ops++;
    return tape->post(device, op);
}

static int record_wait(Device *device, Event e, Error *err) {
    if (e.seq) note(WAITS, " (poster: %s %d)", lane_name[e.lane], (int)e.seq);
    return tape->wait(device, e, err);
}

static void *record_address(Device *device, Tensor t) {
    uint8_t *at = tape->cpu_address(device, t);
    if (t.region == INDEX_TABLES) tape->tables = at - (t.offset - tape->plan->region[INDEX_TABLES][TIER_CPU].offset);
    return at;
}

// ---- a case ---------------------------------------------------------------------------------------------------------

enum { MOST_STAGES = 16 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards these, since stages are threads */
static FILE *cases;                                      /* OUT/unsorted */
static const char *test;                                 /* the one that runs */
static int runs[1 + MOST_STAGES];                        /* of this test: those of one machine, and of each stage */

static void name_case(char name[160], const Device *device) {
    const int stage = device->net ? 1 + device->net->stage : 0;
    pthread_mutex_lock(&lock);
    if (test != CU_get_current_test()->pName) memset(runs, 0, sizeof runs);
    test = CU_get_current_test()->pName;
    int len = snprintf(name, 120, "%s", test);
    for (int i = 0; i < len; i++)
        if (name[i] == ' ') name[i] = '_';
    if (stage) len += sprintf(name + len, ".stage%d", stage - 1);
    sprintf(name + len, ".%d", ++runs[stage]);
    pthread_mutex_unlock(&lock);
}

static void end_case(const char *name, bool failed) {
    pthread_mutex_lock(&lock);
    if (!cases) cases = fopen(in_dir(getenv("OUT"), "unsorted"), "w");
    CHECK(cases);
    fprintf(cases, "%s %ld", name, failed ? -1 : tape->ops);
    for (int c = 0; c < CATEGORIES; c++) fprintf(cases, " %016llx", (unsigned long long)(failed ? 0 : tape->hash[c]));
    fprintf(cases, "\n");
    if (tape->full && !failed) write_file(getenv("OUT"), name, tape->all.text, tape->all.len);
    pthread_mutex_unlock(&lock);
}

int __real_schedule_run(const Plan *, const Task *, Device *, const Listener *, RunStats *, Error *);
int __wrap_schedule_run(const Plan *plan, const Task *task, Device *device, const Listener *listener, RunStats *stats,
                        Error *err) {
    Tape mine = {.plan = plan, .post = device->post, .wait = device->wait, .cpu_address = device->cpu_address};
    char name[160];
    name_case(name, device);
    mine.full = getenv("FULL") && !fnmatch(getenv("FULL"), name, 0);
    tape = &mine;
    for (int id = 0; id < NREGIONS; id++)
        for (int t = 0; t < NTIERS; t++) {
            const Region *r = &plan->region[id][t];
            if (!r->bytes) continue;
            note(BYTES, "%s %s: %zu", tier_name[t], r->name, r->bytes);
            note(OFFSETS, "%zd", (ssize_t)r->offset);
            end_line();
        }
    device->post = record_post, device->wait = record_wait, device->cpu_address = record_address;
    const int status = __real_schedule_run(plan, task, device, listener, stats, err);
    device->post = mine.post, device->wait = mine.wait, device->cpu_address = mine.cpu_address;
    end_line(); /* of what the posting thread has waited for behind the last op */
    end_case(name, status != 0);
    for (int c = 0; c < CATEGORIES; c++) free(mine.line[c].text);
    free(mine.all.text);
    return status;
}

// ---- random policies on the sim -------------------------------------------------------------------------------------

static bool stops(void *ctx, int prompt, const int32_t *tokens, int n) {
    const int *every = ctx;
    (void)tokens;
    return *every && (7 * prompt + n) % *every == 0;
}

/* Models are wider than those of the suites, and activations are halfs, so that many rows unpack weights. */
TEST(random_policies_on_the_sim) {
    enum { POLICIES = 100, MOST = 40 };
    static const int page_tokens[] = {1, 3, 16, 64};
    const Hardware machine = machine_with("ctog_bdw=1e9 gtoc_bdw=1e9 dtoc_bdw=5e8 ctod_bdw=5e8 mm_flops=1e12");
    for (int i = 0; i < POLICIES; i++) {
        uint64_t seed = (uint64_t)i << 32;
        int s[MOST], n[MOST], every;
        const int count = 1 + test_below(&seed, MOST), same = test_below(&seed, 3);
        for (int q = 0; q < count; q++) {
            s[q] = same && q ? s[0] : 1 + test_below(&seed, 60);
            n[q] = same == 1 && q ? n[0] : 1 + test_below(&seed, 12);
        }
        OptConfig config = TEST_CONFIG(1 + test_below(&seed, 5), GROUP * (1 + test_below(&seed, 3)), 4 * GROUP, 2, 500, -1);
        if (!test_below(&seed, 4)) config.embed = 48;
        Checkpoint *model = checkpoint_dummy(&config, 3);
        Task task = random_task(count, s, n, config.vocab, seed);
        task.scored = !test_below(&seed, 4), task.keep_logits = !task.scored && !test_below(&seed, 4);
        sample(&task, (Sampling){.temperature = !test_below(&seed, 3)});
        Policy p = all_gpu(1 + test_below(&seed, 6), 1 + test_below(&seed, 5));
        for (int what = 0; what < 6; what += 2) draw_shares(&p.share[what], &p.share[what + 1], &seed);
        p.schedule = i % 3, p.flights = test_below(&seed, 3) ? 1 : 2 + test_below(&seed, 2);
        p.weight_packed = test_below(&seed, 2), p.cache_packed = test_below(&seed, 2);
        p.head_packed = p.weight_packed && config.embed % GROUP == 0 && test_below(&seed, 2);
        p.sparsity = test_below(&seed, 3) ? 1 : .3, p.delegated = test_below(&seed, 2) || is_sparse(&p);
        p.overlap = test_below(&seed, 8), p.synchronize = !test_below(&seed, 8);
        p.page_tokens = page_tokens[test_below(&seed, 4)], p.table_home = test_below(&seed, 3);
        p.piece_rows = test_below(&seed, 2) * (1 + test_below(&seed, 100)), p.workspaces = 2 + test_below(&seed, 2);
        every = test_below(&seed, 2) * (2 + test_below(&seed, 6));
        Rig r = {.model = model, .policy = p, .task = &task, .sim = &machine, .hears = {.token = stops, .ctx = &every}};
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        rig_close(&r);
        free_task(&task);
        checkpoint_close(model);
    }
}
