/* test_tour.c: docs/TOUR.md and the program say the same; so do README.md, docs/EXPERIMENTS.md, docs/TEACHING.md,
 * docs/ANSWERS.md and docs/flexgen.ipynb where they quote the program, the pages that are made of these documents, and the
 * source files about what to read next. docs/paper.txt is the source of the page beside the paper, docs/slides.txt that of
 * the slides. All links lead somewhere, and README.md is short.
 *
 * A command in a document, a line "    $ ...", is run as it stands, and what it prints is compared with the lines below it.
 * What no command prints stands in the tour behind a line <!-- listing NAME --> and is made here, from a model of two
 * layers whose sizes are so small that one can add up its bytes by hand. In a comment of schedule.h a listing stands behind
 * a line that ends with "(listing NAME):". TOUR=write make test SUITE=tour writes all of these; without it the suite
 * compares. That the figures are right is held elsewhere: test_mini.c, test_plan.c, test_schedule.c. */
#include "tests/started.h"
#include "tests/written.h"

#define TOUR "docs/TOUR.md"

static bool writes(void) { return getenv("TOUR") && !strcmp(getenv("TOUR"), "write"); }

// ---- the example: two layers, two GPU batches of one prompt, three tiers --------------------------------------------

enum { LAYERS = 2, SWEEP = 1, PROMPTS = 2, S = 3, N = 3, VOCAB = 64 };

/* A quarter of the weights is on the GPU and half on the CPU; one sequence's KV cache on the CPU, the other's on disk; one
 * sequence's activations on the GPU, the other's on the CPU. The sim is so slow that a layer takes a millisecond: links of
 * 10 and 5 MB/s, 40 million flops a second; memory is too fast to notice. */
static Rig example(void) {
    static int32_t ids[PROMPTS][S] = {{2, 5, 6}, {2, 9, 40}};
    static Prompt prompts[] = {{.ids = ids[0], .s = S, .n = N}, {.ids = ids[1], .s = S, .n = N, .place = 1}};
    static const Task task = {.prompts = prompts, .count = PROMPTS};
    static const Checkpoint *model;
    static Hardware slow;
    OptConfig config = TEST_CONFIG(LAYERS, 32, 128, 2, VOCAB, -1);
    config.max_pos = 14;
    if (!model) model = checkpoint_dummy(&config, 1);
    slow = machine_with("ctog_bdw=10e6 gtoc_bdw=10e6 dtoc_bdw=5e6 ctod_bdw=5e6 mm_flops=40e6 bmm_flops=10e6");
    Rig r = {.model = model, .policy = on_tiers(.25, .5, 0, .5, .5, .5, 1, 2), .task = &task, .sim = &slow};
    r.policy.page_tokens = 4;
    r.policy.table_home = TIER_GPU;
    return r;
}

static Trace traced(void) {
    Trace trace = {.name = "two-layers"};
    Rig r = example();
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    r.device->trace = &trace;
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    rig_close(&r);
    return trace;
}

// ---- its listings ---------------------------------------------------------------------------------------------------

static FILE *out; /* the listing that a test makes */
static char *listing;
static size_t listing_len;

static void begin_listing(void) {
    out = open_memstream(&listing, &listing_len);
    CHECK(out);
}

/* What a file shows between a mark and an end is what was made now; with TOUR=write it becomes that. */
static void assert_is_in(const char *path, const char *mark, const char *end_mark) {
    char *document = keep(contents(path, NULL)), *all;
    fclose(out);
    char *begin = strstr(document, mark), *end = begin ? strstr(begin += strlen(mark), end_mark) : NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(end);
    const bool same = listing_len == (size_t)(end - begin) && !memcmp(begin, listing, listing_len);
    if (!same) fprintf(stderr, "\n    %s: a listing is now:\n%s", path, listing);
    CU_ASSERT(same || writes());
    const int len = asprintf(&all, "%.*s%s%s", (int)(begin - document), document, listing, end);
    if (writes()) write_file(".", path, all, len);
    free(listing);
    free(all);
}

static void assert_shown(const char *name) {
    char mark[80];
    snprintf(mark, sizeof mark, "<!-- listing %s -->\n```text\n", name);
    assert_is_in(TOUR, mark, "```\n");
}

/* In a comment of schedule.h each line of a listing begins with " * ", and an empty line ends it. */
static void assert_shown_in_comment(const char *name) {
    char mark[80];
    snprintf(mark, sizeof mark, "(listing %s):\n", name);
    assert_is_in("schedule.h", mark, " *\n");
}

TEST(the_tour_lists_the_weights_of_a_layer_and_where_they_rest) {
    Rig r = example();
    size_t sum = 0;
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    begin_listing();
    fprintf(out, "            ln1      q      k      v      o    ln2    fc1    fc2    layer\n%-8s", "bytes");
    for (int role = 0; role < NROLES; role += 2) {
        const size_t bytes = tensor_bytes(r.model->layer[0][role]) + tensor_bytes(r.model->layer[0][role + 1]);
        sum += bytes;
        fprintf(out, "%7zu", bytes);
    }
    fprintf(out, "%9zu\n", sum);
    for (int j = 0; j < LAYERS; j++) {
        fprintf(out, "layer %-2d", j);
        for (int role = 0; role < NROLES; role += 2) fprintf(out, "%7s", tier_name[r.plan->weight[j][role].home.tier]);
        fprintf(out, "\n");
    }
    assert_shown("weights");
    rig_close(&r);
}

TEST(the_tour_lists_the_regions_of_the_plan) {
    static const char *const type[] = {"F32", "F16", "BF16", "I32", "U8"};
    Rig rig = example();
    CU_ASSERT_EQUAL_FATAL(rig_open(&rig), 0);
    begin_listing();
    for (int t = 0; t < NTIERS; t++) {
        fprintf(out, "%s\n", tier_name[t]);
        for (int id = 0; id < NREGIONS; id++) {
            const Region *r = &rig.plan->region[id][t];
            if (!r->bytes) continue;
            fprintf(out, "  %-34s %8zu", r->name, r->bytes);
            if (r->cols) fprintf(out, " = %d x (%d, %d) %s", r->slots, r->rows, r->cols, type[r->type]);
            fprintf(out, "\n");
        }
        fprintf(out, "  %-34s %8zu\n", "together", rig.plan->total[t]);
    }
    assert_shown("plan");
    rig_close(&rig);
}

/* Ops as they are posted. What an op waits for is known by its lane and its number there; here ops have the number of the
 * sweep that posts them and their number in it. */
static struct {
    Event (*post)(Device *, const Op *);
    const Plan *plan;
    int sweep;     /* the one that posts */
    int number[4]; /* of each sweep's newest op */
    struct {
        int sweep, number;
    } op[NLANES][400]; /* [lane][seq] */
    Slice last;        /* the newest line's call */
} tape;

/* "GPU KV cache #7": each view once, by its tier, its region and its cell. */
static void print_views(const Op *op, Use wanted) {
    char text[64][80];
    int n = 0;
    for (int v = 0; v < op_nviews(op); v++) {
        Use use;
        const Tensor *t = op_view(op, v, &use);
        if (use != wanted || !t->rows) continue;
        CHECK(n < 64);
        const int used =
            snprintf(text[n], sizeof text[n], "%s %s", tier_name[t->tier], tape.plan->region[t->region][t->tier].name);
        if (t->cell) snprintf(text[n] + used, sizeof text[n] - used, " #%d", t->cell);
        int same = 0;
        while (strcmp(text[same], text[n]) != 0) same++;
        if (same == n) fprintf(out, "%s%s", n ? ", " : "", text[n]), n++;
    }
}

static Event record(Device *device, const Op *op) {
    if (op->kind != WEIGHT || op->j) tape.sweep = op->i; /* layer 0 is loaded by the sweep before its own */
    const int number = ++tape.number[tape.sweep];
    const Event event = tape.post(device, op);
    CHECK(event.seq < 400);
    tape.op[event.lane][event.seq].sweep = tape.sweep, tape.op[event.lane][event.seq].number = number;
    if (tape.sweep != SWEEP) return event;
    const Slice slice = slice_of(op, 0, 0, 0);
    const char *call = trace_call(&slice);
    if (number == 1 || strcmp(call, trace_call(&tape.last)) != 0 || op->j != tape.last.j || op->k != tape.last.k)
        fprintf(out, "%s(i=%d, j=%d, k=%d)\n", call, op->i, op->j, op->k);
    tape.last = slice;
    fprintf(out, "  %d.%-3d %-14s %-9s ", SWEEP, number, lane_name[op->lane],
            op->code == OP_EMBED && op->add ? "embed +" : op_info[op->code].name);
    print_views(op, WRITES);
    fprintf(out, " <- ");
    print_views(op, READS);
    for (int e = 0; e < op->nafter; e++) {
        const Event a = op->after[e];
        const int sweep = tape.op[a.lane][a.seq].sweep;
        fprintf(out, "%s%d.%d", e ? ", " : "; after ", sweep, tape.op[a.lane][a.seq].number);
        if (sweep != SWEEP) fprintf(out, " (%s)", lane_name[a.lane]);
    }
    fprintf(out, "\n");
    return event;
}

TEST(the_tour_lists_the_ops_of_a_sweep) {
    Rig r = example();
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    tape.plan = r.plan;
    tape.post = r.device->post;
    r.device->post = record;
    begin_listing();
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    assert_shown("ops");
    rig_close(&r);
}

/* Those of the sim: a letter for each quarter of a millisecond. */
TEST(the_tour_lists_what_the_lanes_do_in_a_sweep) {
    enum { WIDTH = 110 };
    Trace trace = traced();
    const double from = trace.held[SWEEP].at, step = (trace.held[SWEEP + 1].at - from) / WIDTH;
    begin_listing();
    for (int lane = 0; lane < NLANES; lane++) {
        char row[WIDTH + 1];
        memset(row, '.', WIDTH), row[WIDTH] = 0;
        for (size_t n = 0; n < trace.n; n++) {
            const Slice *s = &trace.slice[n];
            for (int c = 0; c < WIDTH && (int)s->lane == lane; c++) /* by what is done in the middle of a column */
                if (s->begin <= from + (c + .5) * step && s->end > from + (c + .5) * step)
                    row[c] = "012h"[imin(s->j, 2) + (s->j == LAYERS)];
        }
        if (strspn(row, ".") < WIDTH) fprintf(out, "%-14s |%s|\n", lane_name[lane], row);
    }
    fprintf(out, "a column is %.4g ms; 0, 1: of that layer, h: of the head\n", 1e3 * step);
    assert_shown("lanes");
    trace_free(&trace);
}

TEST(the_tour_lists_the_tokens_of_the_host_device_and_of_the_plain_forward_pass) {
    float logits[(S + N) * VOCAB];
    Error err;
    Rig r = example();
    r.sim = NULL;
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    begin_listing();
    for (int p = 0; p < PROMPTS; p++) {
        const int32_t *s = r.task->prompts[p].ids, *n = r.answer[p].tokens;
        int32_t all[S + N] = {s[0], s[1], s[2]};
        fprintf(out, "prompt %d: %d %d %d, the engine: %d %d %d, reference_forward:", p, s[0], s[1], s[2], n[0], n[1],
                n[2]);
        for (int i = S; i < S + N; i++) {
            ASSERT_OK(reference_forward(logits, r.model, all, i, &err));
            const float *row = logits + (size_t)(i - 1) * VOCAB;
            for (int v = 1; v < VOCAB; v++)
                if (row[v] > row[all[i]]) all[i] = v;
            fprintf(out, " %d", all[i]);
        }
        fprintf(out, "\n");
    }
    assert_shown("tokens");
    rig_close(&r);
}

TEST(the_tour_lists_the_bytes_of_weights_over_the_links_row_by_row_and_zig_zag) {
    begin_listing();
    fprintf(out, "%-8s %7s %14s %14s %12s\n", "", "sweeps", "disk to CPU", "CPU to GPU", "seconds");
    for (int row = 0; row < 2; row++) {
        Rig r = example();
        r.policy.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
        r.policy.num_gpu_batches = row ? 1 : 2;
        CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
        fprintf(out, "%-8s %7ld %14zu %14zu %12.4g\n", schedule_name[r.policy.schedule], r.stats.sweeps,
                r.moved[DTOC][WEIGHT], r.moved[CTOG][WEIGHT], r.stats.total_s);
        rig_close(&r);
    }
    assert_shown("bytes");
}

// ---- one square in numbers: the listings of schedule.h --------------------------------------------------------------

enum { SQUARE_I = 2, SQUARE_J = 1, SQUARE_K = 1, SQUARE_L = 3, BATCHES = 3 };

/* Three batches of three sequences, of which each tier has one, as it has of their activations. A sequence has a page for
 * its prompt of four tokens, and one for the next four. All weights are on the GPU: a square does not load them. */
static Rig three_tiers(bool delegated) {
    static const Checkpoint *model;
    static Hardware machine;
    static Task task;
    OptConfig config = TEST_CONFIG(SQUARE_L, 32, 128, 2, VOCAB, -1);
    if (!model) model = checkpoint_dummy(&config, 1), task = equal_task(3 * BATCHES, 4, 4);
    machine = machine_with("");
    Rig r = {.model = model, .policy = on_tiers(1, 0, 1. / 3, 1. / 3, 1. / 3, 1. / 3, 3, BATCHES), .task = &task};
    r.sim = &machine;
    r.policy.page_tokens = 4;
    r.policy.workspaces = 2;
    r.policy.table_home = TIER_GPU;
    r.policy.delegated = delegated;
    return r;
}

/* An op of the square; layer norms and products that follow each other are one row. */
typedef struct {
    const char *call, *lane, *op;
    Bytes moved; /* over the lane's link, as the device counts; 0 for a processor */
    const char *writes, *reads;
} Row;
typedef struct {
    Row row[40];
    int n;
    Bytes moved[NCHANNELS];
} Rows;

static struct {
    Event (*post)(Device *, const Op *);
    Device *device;
    const Plan *plan;
    Rows *rows;
    Tensor last; /* the view that was printed last; rows 0: none of this op yet */
    int slot;    /* its slot */
} watch;

#define WORD(name) [name] = #name

/* Returns the slot of a region in which a view lies, and in *row its first row there. */
static int slot_of(const Tensor *t, int *row) {
    const Region *r = &watch.plan->region[t->region][t->tier];
    const int first = (int)((t->offset - r->offset) / (r->cols * type_bytes(r->type)));
    *row = first % r->rows;
    return first / r->rows;
}

static bool is_paged(const Tensor *t) { return t->region == KV_CACHE || t->region == KV_STAGING; }

/* Prints where a view lies, "GPU QKV[1] ": its tier, its region and, if there are several, its slot. K and V of a layer
 * are two slots, which count as one here. Of a place only what the view before it has not is printed. */
static void print_place(Tensor t) {
    static const char *const word[NREGIONS] = {
        WORD(KV_CACHE), WORD(KV_STAGING), WORD(ACTIVATIONS), WORD(ACT_READING), WORD(ACT_WRITING), WORD(HIDDEN), WORD(QKV),
        WORD(QUERY),    WORD(NEW_KV),     WORD(ATTENDED),    WORD(NORM_1),      WORD(NORM_2),      WORD(MLP)};
    int row;
    const int slot = slot_of(&t, &row) / (is_paged(&t) ? 2 : 1);
    const bool follows = watch.last.rows, same_tier = follows && t.tier == watch.last.tier;
    const bool same_slot = same_tier && t.region == watch.last.region && slot == watch.slot;
    CHECK(word[t.region]);
    fprintf(out, "%s%s%s", follows ? ", " : "", same_tier ? "" : tier_name[t.tier], same_tier ? "" : " ");
    if (!same_slot) fprintf(out, "%s", word[t.region]);
    if (!same_slot && watch.plan->region[t.region][t.tier].slots > 1) fprintf(out, "[%d]", slot);
    if (!same_slot) fprintf(out, " ");
    watch.last = t;
    watch.slot = slot;
}

static void print_range(int first, int rows) { fprintf(out, rows > 1 ? "%d-%d" : "%d", first, first + rows - 1); }

/* Prints "GPU QKV[1] q 0-2": rows of a slot. Those of V are those of K, and are left out. */
static void print_rows(Tensor t) {
    const Region *r = &watch.plan->region[t.region][t.tier];
    int row;
    if (!t.rows || (is_paged(&t) && slot_of(&t, &row) % 2)) return;
    slot_of(&t, &row);
    print_place(t);
    if (t.region == QKV && t.cols < r->cols)
        fprintf(out, (t.offset - r->offset) / type_bytes(r->type) % r->cols ? "kv " : "q ");
    print_range(row, imax(t.rows, t.rows * t.cols / r->cols)); /* a move is one long row */
}

/* An entry of an index table, of which the CPU has the numbers. */
static int table_entry(Tensor table, int row, int col) {
    const Region *on = watch.plan->region[INDEX_TABLES];
    table.offset += on[TIER_CPU].offset - on[table.tier].offset;
    table.tier = TIER_CPU;
    const int32_t *entries = watch.device->cpu_address(watch.device, table);
    return entries[row * table.ld + col];
}

/* Prints the rows of pages that have n tokens of a sequence, from `first` on. */
static void print_tokens(Tensor k, Tensor pages, int sequence, int first, int n) {
    const int page_tokens = watch.plan->policy.page_tokens;
    int begin = 0, rows = 0;
    for (int token = first; token < first + n; token++) {
        const int row = table_entry(pages, sequence, token / page_tokens) * page_tokens + token % page_tokens;
        if (rows && row == begin + rows) {
            rows++;
            continue;
        }
        if (rows) print_place(k), print_range(begin, rows);
        begin = row, rows = 1;
    }
    print_place(k);
    print_range(begin, rows);
}

static void print_written(const Op *op) {
    for (int m = 0; m < op->nmoves; m++) print_rows(op->moves[m].dst);
    for (int r = 0; op->code == OP_APPEND && r < op->append.kv.rows; r++)
        print_tokens(op->append.k, op->append.pages, table_entry(op->append.seq, 0, r), table_entry(op->append.pos, 0, r),
                     1);
    if (op->code != OP_COPY && op->code != OP_APPEND) print_rows(op->view[0]);
}

static void print_read(const Op *op) {
    for (int m = 0; m < op->nmoves; m++) print_rows(op->moves[m].src);
    if (op->code == OP_APPEND) print_rows(op->append.kv);
    if (op->code == OP_LAYERNORM) print_rows(op->layernorm.x);
    if (op->code == OP_LINEAR) print_rows(op->linear.x), print_rows(op->linear.residual);
    if (op->code != OP_ATTEND) return;
    print_rows(op->attend.q);
    for (int r = 0; r < op->attend.o.rows; r++)
        print_tokens(op->attend.k, op->attend.pages, r, 0, table_entry(op->attend.len, 0, r));
}

/* Returns what one of these prints. */
static const char *printed_of(const Op *op, void (*print)(const Op *)) {
    begin_listing();
    watch.last.rows = 0;
    print(op);
    fclose(out);
    return keep(listing);
}

/* The call is that of Figure 4: compute calls project, attend and finish, and all of PROJECT is its own. */
static Row row_of(const Op *op, Bytes moved) {
    static const char *const lane[NLANES] = {WORD(C_READ), WORD(C_LOAD),  WORD(STORE),  WORD(D_WRITE), WORD(A_DOWN),
                                             WORD(A_UP),   WORD(PROJECT), WORD(FINISH), WORD(ATTEND)};
    const Slice slice = slice_of(op, 0, 0, 0);
    const char *call = trace_call(&slice);
    const bool computes = op->lane == PROJECT || !strcmp(call, "attend") || !strcmp(call, "finish");
    const bool products = op->code == OP_LAYERNORM || op->code == OP_LINEAR;
    CHECK(lane[op->lane]);
    return (Row){.call = computes ? "compute" : call,
                 .lane = lane[op->lane],
                 .op = products ? call : op_info[op->code].name,
                 .moved = lane_channel[op->lane] <= CTOD ? moved : 0,
                 .writes = printed_of(op, print_written),
                 .reads = printed_of(op, print_read)};
}

static bool same_row(const Row *a, const Row *b) {
    return !strcmp(a->call, b->call) && !strcmp(a->lane, b->lane) && !strcmp(a->op, b->op) && a->moved == b->moved &&
           !strcmp(a->writes, b->writes) && !strcmp(a->reads, b->reads);
}

static Bytes moved_on(const Device *device, Lane lane) {
    Bytes moved = 0;
    for (int kind = 0; kind < NKINDS; kind++) moved += device->count[lane].moved[kind];
    return moved;
}

static Event record_square(Device *device, const Op *op) {
    const Bytes before = moved_on(device, op->lane);
    const Event event = watch.post(device, op);
    Rows *rows = watch.rows;
    if (op->i != SQUARE_I || op->j != SQUARE_J || op->k != SQUARE_K) return event;
    const Row row = row_of(op, moved_on(device, op->lane) - before);
    Row *last = rows->n ? &rows->row[rows->n - 1] : NULL;
    rows->moved[lane_channel[op->lane]] += row.moved;
    if (last && (op->code == OP_LAYERNORM || op->code == OP_LINEAR) && !strcmp(row.op, last->op)) {
        last->writes = row.writes;
        return event;
    }
    CHECK(rows->n < 40);
    rows->row[rows->n++] = row;
    return event;
}

static Rows rows_of_square(bool delegated) {
    Rows rows = {.n = 0};
    Rig r = three_tiers(delegated);
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    watch.plan = r.plan, watch.device = r.device, watch.post = r.device->post, watch.rows = &rows;
    r.device->post = record_square;
    CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
    rig_close(&r);
    return rows;
}

/* Lists all rows, where those that `other` has not have a mark; with + for a mark it lists only these. */
static void list_rows(const Rows *rows, const Rows *other, char mark) {
    const char *call = "";
    for (const Row *r = rows->row; r < rows->row + rows->n; r++) {
        bool in_both = false;
        char moved[24] = "";
        for (int o = 0; o < other->n; o++) in_both |= same_row(r, &other->row[o]);
        if (in_both && mark == '+') continue;
        if (strcmp(call, r->call) != 0) fprintf(out, " *   %s\n", call = r->call);
        if (r->moved) snprintf(moved, sizeof moved, "%zu", r->moved);
        fprintf(out, " *   %c %-7s %-7s %4s %-26s <- %s\n", in_both ? ' ' : mark, r->lane, r->op, moved, r->writes,
                r->reads);
    }
    fprintf(out, " *   all bytes:");
    for (int c = CTOG; c <= CTOD; c++) fprintf(out, "%s %s %zu", c ? "," : "", channel_name[c], rows->moved[c]);
    fprintf(out, "\n");
}

TEST(the_comment_of_schedule_h_lists_the_ops_of_a_square) {
    const Rows gpu = rows_of_square(false), cpu = rows_of_square(true);
    begin_listing();
    list_rows(&gpu, &cpu, '-');
    assert_shown_in_comment("square");
    begin_listing();
    list_rows(&cpu, &gpu, '+');
    assert_shown_in_comment("delegated");
}

// ---- commands -------------------------------------------------------------------------------------------------------

/* What a command of the shell prints whose "./flexgen" and "./mini" are the programs under test, and whose /tmp is
 * the directory of this suite; each line behind `indent`. */
static const char *printed_by(const char *command, const char *indent) {
    write_file(suite_dir(), "command", command, strlen(command));
    setenv("TMP_PLACE", suite_dir(), 1);
    setenv("FLEXGEN", getenv("FLEXGEN_BIN") ? getenv("FLEXGEN_BIN") : "./flexgen", 1); /* for scripts, too */
    setenv("MINI", getenv("MINI_BIN") ? getenv("MINI_BIN") : "./mini", 1);
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* mini leaves its memory to the system when it ends */
    setenv("INDENT", indent, 1);
    const int status = system(
        "sed \"s,/tmp/,$TMP_PLACE/,g; s,[.]/flexgen,$FLEXGEN,g; s,[.]/mini,$MINI,g\" $TMP_PLACE/command "
        ">$TMP_PLACE/script\n"
        "sh $TMP_PLACE/script >$TMP_PLACE/raw 2>$TMP_PLACE/errors || { cat $TMP_PLACE/errors >&2; exit 1; }\n"
        "sed \"s/^/$INDENT/\" $TMP_PLACE/raw >$TMP_PLACE/printed");
    if (status) fprintf(stderr, "\n    fails: %s\n", command);
    CU_ASSERT_EQUAL(status, 0);
    return keep(contents(in_dir(suite_dir(), "printed"), NULL));
}

static void prints(const char *command, const char *expected) {
    const char *printed = printed_by(command, "");
    CU_ASSERT_STRING_EQUAL(printed, expected);
    if (strcmp(printed, expected)) fprintf(stderr, "\n    %s\n    prints: %s", command, printed);
}

static void succeeds(const char *command) { printed_by(command, ""); }

/* A drawing is the one that the documents show; with TOUR=write it becomes that. */
static void is_kept(const char *drawing, const char *path) {
    const char *drawn = keep(contents(in_dir(suite_dir(), drawing), NULL));
    if (writes()) write_file(".", path, drawn, strlen(drawn));
    const bool same = !strcmp(drawn, keep(contents(path, NULL)));
    if (!same)
        fprintf(stderr, "\n    %s is no longer what is drawn; TOUR=write make test SUITE=tour draws it anew\n", path);
    CU_ASSERT(same);
}

/* The pictures are drawn by Python, where there is one: the lanes from the same trace, the others from the listings. */
TEST(the_pictures_of_the_tour_are_drawn_from_its_trace_and_listings) {
    static const char *const drawn[][2] = {
        {"plot_trace.py --lanes /tmp/tour.json /tmp/tour.svg --sweeps 1 --title 'Two layers, K = 2: sweep 1'", "lanes"},
        {"plot_tour.py --plan /tmp/tour.svg", "plan"},
        {"plot_tour.py --square /tmp/tour.svg", "square"}};
    char text[200];
    if (!has_python()) return;
    Trace trace = traced();
    FILE *file = fopen(in_dir(suite_dir(), "tour.json"), "w");
    CHECK(file);
    trace_write(&trace, 1, file);
    fclose(file);
    trace_free(&trace);
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text, "python3 -B scripts/%s", drawn[i][0]);
        succeeds(text);
        snprintf(text, sizeof text, "docs/tour-%s.svg", drawn[i][1]);
        is_kept("tour.svg", text);
    }
    prints(
        "python3 -B scripts/plot_trace.py --memory /tmp/tour.json /tmp/tour.json /tmp/tour.svg\n"
        "grep -oE 'tour: at most . pages, . sequences|pages on disk' /tmp/tour.svg | sort -u",
        "pages on disk\ntour: at most 4 pages, 2 sequences\n");
}

/* Equal texts, but that a perplexity has the roundings of the processor's instructions, see scripts/experiments.py. */
static bool alike(const char *a, const char *b) {
    static const char perplexity[] = " perplexity %lf, %lf bits per byte%n";
    double x[2], y[2];
    int a_len, b_len;
    if (sscanf(a, perplexity, &x[0], &x[1], &a_len) != 2 || sscanf(b, perplexity, &y[0], &y[1], &b_len) != 2)
        return !strcmp(a, b);
    return fabs(x[0] / y[0] - 1) <= .005 && fabs(x[1] / y[1] - 1) <= .005 && !strcmp(a + a_len, b + b_len);
}

/* A document shows "$ command", which may go on behind a backslash, and below it all that the command prints; all
 * indented. README.md has commands of both programs; of the experiments each study has at least one. In `make test` the
 * documents take turns. */
TEST(the_commands_of_the_documents_print_what_is_below_them) {
    static const struct {
        const char *path;
        int least; /* commands */
    } documents[] = {{"README.md", 2},
                     {TOUR, 17},
                     {"docs/EXPERIMENTS.md", 10},
                     {"docs/paper.txt", 50},
                     {"docs/TEACHING.md", 3},
                     {"docs/ANSWERS.md", 30},
                     {"docs/slides.txt", 40}};
    const bool python = has_python();
    for (size_t d = 0; d < COUNT(documents); d++) {
        if (!test_takes((int)d)) continue;
        char *anew;
        int count = 0;
        size_t len;
        const char *text = keep(contents(documents[d].path, &len));
        /* The last line ends, and no command goes on behind it: there is nothing behind it to be read. */
        const bool whole = len > 1 && text[len - 1] == '\n' && text[len - 2] != '\\';
        if (!whole) fprintf(stderr, "\n    %s: its last line goes on behind its end\n", documents[d].path);
        CU_ASSERT(whole);
        if (!whole) continue;
        FILE *written = open_memstream(&anew, &len);
        CHECK(written);
        for (const char *line = text, *end, *below; *line; line = below) {
            below = end = strchr(line, '\n') + 1;
            const bool command = !strncmp(line, "    $ ", 6);
            while (command && !strncmp(end - 2, "\\\n", 2)) below = end = strchr(end, '\n') + 1;
            while (command && !strncmp(below, "    ", 4) && strncmp(below, "    $ ", 6) != 0)
                below = strchr(below, '\n') + 1;
            const char *shown = keep(strndup(end, (size_t)(below - end))), *said = shown;
            if (command && (python || strncmp(line + 6, "python3", 7) != 0)) {
                const char *script = keep(strndup(line + 6, (size_t)(end - line - 6)));
                said = printed_by(script, "    ");
                const bool same = alike(shown, said);
                if (same)
                    said = shown;
                else if (!writes())
                    fprintf(stderr, "\n    %s: %s    prints\n%s", documents[d].path, script, said);
                CU_ASSERT(same || writes());
                count++;
            }
            fprintf(written, "%.*s%s", (int)(end - line), line, said);
        }
        fclose(written);
        CU_ASSERT(count >= documents[d].least);
        if (writes()) write_file(".", documents[d].path, anew, len);
        free(anew);
    }
    prints("find /tmp/ -size +8192", ""); /* they leave nothing large behind */
    if (python && test_takes(1)) is_kept("pages.svg", "docs/pages-same-memory.svg");
}

/* So does the notebook, whose texts are read by a script. Its cells run in .ci/run. */
TEST(the_commands_of_the_notebook_print_what_is_below_them) {
    if (!has_python()) return;
    succeeds(writes() ? "python3 -B scripts/notebook.py write" : "python3 -B scripts/notebook.py check 1>&2");
}

/* README.md has the beginning of the first line of `make run`, up to dots. Where the policy is given, nothing is measured;
 * the text is the same. */
TEST(make_run_prints_what_README_says) {
    const char *readme = keep(contents("README.md", NULL));
    const char *found = printed_by(
        "./flexgen generate --model models/opt-tiny --prompts models/prompts.txt --max-tokens 12 --temperature 0.7 "
        "--top-p 0.9 --seed 3 --percent 100 0 100 0 100 0 --gpu-batch-size 5 --num-gpu-batches 1",
        "    ");
    const char *line = strstr(readme, "    {\"id\": 0"), *dots = line ? strstr(line, "...") : NULL;
    CU_ASSERT(dots && !strncmp(found, line, dots - line));
}

/* Each file that docs/READING.md names in its list of differences, in brackets, marks them by DIFFERS. */
TEST(where_the_program_differs_from_the_paper_the_code_says_so) {
    const char *list = strstr(keep(contents("docs/READING.md", NULL)), "\n## Where this differs");
    const char *end = list ? strstr(list + 1, "\n## ") : NULL;
    int named = 0;
    char path[60];
    CU_ASSERT_PTR_NOT_NULL_FATAL(end);
    for (const char *at = list; (at = strstr(at, "(`")) && at < end; at++) {
        if (sscanf(at, "(`%59[a-z_/.]`)", path) != 1) continue;
        const bool marked = strstr(keep(contents(path, NULL)), "DIFFERS: ");
        if (!marked) fprintf(stderr, "\n    %s: no comment with DIFFERS\n", path);
        CU_ASSERT(marked);
        named++;
    }
    CU_ASSERT(named >= 9);
}

/* docs/EXPERIMENTS.md and its plots are what its script makes: here of those studies that take no time; of all of them in
 * `make experiments`. docs/index.html is made from the tour and from runs by `make docs`. docs/explore.html is of these
 * sources, and what it says is what the program says (more questions: .ci/run). Python is not everywhere. */
TEST(the_pages_and_the_experiments_are_what_their_scripts_make) {
    if (!has_python()) return;
    if (test_takes(0)) succeeds("python3 -B scripts/experiments.py --check overlap block pages 2>&1");
    if (test_takes(1)) succeeds("python3 -B scripts/experiments.py --check prediction stages 2>&1");
    if (!writes()) { /* what is written now makes the pages old */
        succeeds("python3 -B scripts/make_page.py --check");
        succeeds("python3 -B scripts/paper_page.py --check");
        succeeds("python3 -B scripts/slides.py --check");
    }
    succeeds("python3 -B scripts/make_explore.py --check");
    succeeds("python3 -B scripts/explore_questions.py 2");
}

/* A change of a page's source, as sed makes it, and what the line says that then refuses the page. */
typedef struct {
    const char *change, *said;
} Change;

/* The script refuses a page for each of these changes of its source, whose path it takes behind `flags`. They are tried
 * one after the other in one interpreter. */
static void refuses_changes(const char *script, const char *flags, const char *source, const Change *change, size_t n) {
    char *command, begin[40];
    size_t len;
    FILE *f = open_memstream(&command, &len);
    CHECK(f && n < 100);
    for (size_t c = 0; c < n; c++) fprintf(f, "sed '%s' %s >/tmp/wrong.%02zu\n", change[c].change, source, c);
    fprintf(f,
            "python3 -B - /tmp/wrong.* 2>&1 <<'END'\n"
            "import sys\n"
            "sys.path.insert(0, 'scripts')\n"
            "import pages, %s as script\n"
            "for path in sys.argv[1:]:\n"
            "    sys.argv = ['%s.py', *'%s'.split(), path]\n"
            "    try:\n"
            "        pages.run(script.main)\n"
            "        print('is taken', flush=True)\n"
            "    except SystemExit as end:\n"
            "        if end.code != 2: print(end.code, flush=True)\n"
            "END\n"
            "rm /tmp/wrong.*\n",
            script, script, flags);
    fclose(f);
    char *lines = (char *)printed_by(command, "");
    snprintf(begin, sizeof begin, "%s.py: ", script);
    for (size_t c = 0; c < n; c++) {
        const char *line = strsep(&lines, "\n");
        const bool refused = line && !strncmp(line, begin, strlen(begin)) && shows(line, change[c].said);
        if (!refused) fprintf(stderr, "\n    %s: expected %s\n", change[c].change, change[c].said);
        CU_ASSERT(refused);
    }
    CU_ASSERT(lines && !*lines);
    free(command);
}

/* The page beside the paper is not made if its source says what is not so: a function, a line or an exercise that there is
 * not, a number that no command prints, a file that no command of the station writes, a station that is not whole, a place
 * of README.md's table or a file of the trunk without a station. */
TEST(a_page_beside_the_paper_that_is_not_so_is_refused) {
    static const Change faults[] = {
        {"s/^mini     generate$/mini     generates/", "figure-3a: mini.c: has no function or type generates"},
        {"s/Sum ctog; /Sum gtog; /", "policy.c: time_rows: no line has Sum gtog"},
        {"s/^exercise 5 14/exercise 5 40/", "figure-4: there is no exercise 40"},
        {"s/[*][*]24[*][*]/**25**/", "figure-4: **25** is in nothing that its commands print"},
        {"s/^    gtoc: 30720 bytes/    gtoc: 30721 bytes/", "3-prefill: **30720** is in nothing that its commands print"},
        {"/^@ figure-2/,/^$/{/^miss/d}", "figure-2: lacks miss"},
        {"/^@ figure-2/,/^$/s,--trace .tmp.,--trace ,", "figure-2: none of its commands writes /tmp/paper.json"},
        {"/^@ figure-2/,/^$/s/^place /paper /", "figure-2: a line begins with paper; expected"},
        {"/^@ A.3-nvme/,$s/^number .*/number/", "A.3-nvme: lacks number"},
        {"s/^@ figure-4 /@ figure-5 /", "README.md: leads to no station: | [Figure 4](docs/paper.html#figure-4)"},
        {"s/^place    Section 4.2, Figure 4 .*/place    Section 4.2, Figure 40/",
         "README.md: Figure 4 leads to figure-4, which stands at Section 4.2, Figure 40"},
        {"/^@ figure-1 /,/^$/{H;d}; /^= A.2/{x;G}", "README.md: table-3 stands behind figure-1; on the page"},
        {"s/^@ A.3-cpu/= A.4 More\\n\\n&/", "README.md: no row leads to a station of: A.4 More"},
        {"s/^  batch.c: .*/  batch.h/", "docs/READING.md: batch.c of the trunk is at no station"},
        {"s/(`batch.h`)/(`lp.c`)/", "A.3-gpu-p: lp.c: no comment with DIFFERS"},
        {"s/(`batch.h`)//", "batch.h: has a comment with DIFFERS, and is at no station"},
        {"s/`loaded` is 0/`is_loaded` is 0/", "A.3-dtoc-p: is_loaded stands in no source"},
        {"s/^formula  min T.bls$/formula  {T/", "formula: {T: ends too early"},
    };
    if (!has_python()) return;
    refuses_changes("paper_page", "--check --source", "docs/paper.txt", faults, COUNT(faults));
}

/* The answers for teachers are refused if one of their numbers is in no run, a study has no answer, a mistake of the rubric
 * leaves other points, or a family of oral questions is not whole. */
TEST(answers_that_are_not_so_are_refused) {
    static const Change faults[] = {
        {"s/ 18[.]9% / 14% /", "Study 5. How large should a page be? 14 is in nothing that its commands print"},
        {"s/ 1[.]82,/ 1.83,/", "Study 1. How much does overlap bring? 1.83 is in nothing that its commands print"},
        {"/^### Study 9/,/^### Study 10/{/^### Study 10/!d}",
         "answers the studies [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]; docs/EXPERIMENTS.md has [1, 2, 3, 4, 5, 6, 7, 8, "
         "9, 10, 11, "
         "12, 13]"},
        {"s/| 6: pages lie in order/| 7: pages lie in order/",
         "exercise 18: scripts/exercises.txt has no mistake that leaves 7: pages lie in order"},
        {"/^| 20 |/d", "## Exercises has not one row for each exercise"},
        {"/^## Pipelines/,${/^8[.]/d}", "Pipelines (11): has 7 questions with an answer; expected 8"},
    };
    if (!has_python()) return;
    succeeds("python3 -B scripts/answers.py");
    refuses_changes("answers", "", "docs/ANSWERS.md", faults, COUNT(faults));
}

/* The slides are not made if a number is not one of a run, a slide has nothing to look at, or a lecture is no week. */
TEST(slides_that_are_not_so_are_refused) {
    static const Change faults[] = {
        {"s/{opt-175b}/325/", "larger: 325 is in nothing that its commands print"},
        {"s/{opt-175b}/{opt-66b}/", "larger: {opt-66b} is in nothing that its commands print"},
        {"s/{block-throughput|throughput|1}/{block-throughput|throughput|3}/",
         "share: {block-throughput|throughput|3} is in nothing that its commands print"},
        {"/^@ tiers/,/^$/{/^draw/d}", "tiers: has nothing to look at"},
        {"s/^draw  study stages/draw  study states/", "docs/EXPERIMENTS.md: has no points states"},
        {"s/^draw  study blocks | RTX 3060, /&un/", "alone: the study blocks has no line RTX 3060, unoverlapped"},
        {"s/^draw  tiers/draw  tears/", "tiers: draw tears: expected one of"},
        {"s/^= 2 Schedules/= 2 Orders/", "docs/TEACHING.md: has no week 2 Orders"},
        {"s/^= 2 Schedules//", "1 Three tiers, one token: has 20 slides; expected 8 to 10"},
        {"s,--trace .tmp.row.json,,", "row: none of its commands writes /tmp/row.json"},
    };
    if (!has_python()) return;
    refuses_changes("slides", "--check --source", "docs/slides.txt", faults, COUNT(faults));
}

/* Every figure may differ by the tolerance of what is kept, and no word may. */
TEST(points_are_alike_if_all_their_figures_are) {
    if (!has_python()) return;
    succeeds(
        "python3 -B -c 'import sys; sys.path.insert(0, \"scripts\"); from experiments import alike\n"
        "kept = \"K = 3: 100.0, 8: 200.0\"\n"
        "asked = {kept: True, \"K = 3: 100.4, 8: 200.8\": True, \"K = 3: 100.0, 8: 202.0\": False,\n"
        "         \"K = 3: 102.0, 8: 200.0\": False, \"K = 3: 100.0, 8 200.0\": False, \"K = 3: 100.0\": False}\n"
        "sys.exit([alike(kept, new, .005) for new in asked] != [*asked.values()] or alike(\"1\", \"1.001\", 0))'");
}

/* What is measured depends on the machine and its load: only that there are figures. */
TEST(an_experiment_is_measured_on_the_host) {
    if (!has_python()) return;
    const char *said = printed_by(
        "python3 -B scripts/experiments.py overlap pages --device host "
        "--flags '--model models/opt-tiny --prompt-len 4 --gen-len 2 --gpu-batch-size 2'",
        "");
    CU_ASSERT(strstr(said, "--no-overlap: 3: ") && !strstr(said, "96: 1045") && strstr(said, "Page size"));
}

/* Lanes have a busy_s too, of which none is asked for. */
TEST(make_bench_reads_the_figures_of_a_run) {
    static const char *const names[] = {"prefill_s",   "decode_s",         "decode_throughput", "dtoc.moved_bytes",
                                        "dtoc.busy_s", "ctog.moved_bytes", "gpu.busy_s",        "cpu.busy_s"};
    succeeds(
        "./flexgen bench --device sim --hardware hardware/t4.json --model opt-125m --prompt-len 8 --gen-len 4 "
        "--gpu-batch-size 2 --num-gpu-batches 2 --percent 0 50 0 50 100 0 --cpu-cache-compute --json /tmp/run.json");
    cJSON *run_json = cJSON_Parse(keep(contents(in_dir(suite_dir(), "run.json"), NULL)));
    for (size_t n = 0; n < COUNT(names); n++) {
        char command[200], name[40], *at = name, *end;
        const cJSON *figure = strchr(names[n], '.') ? cJSON_GetObjectItem(run_json, "channels") : run_json;
        snprintf(name, sizeof name, "%s", names[n]);
        for (char *part; (part = strsep(&at, "."));) figure = cJSON_GetObjectItem(figure, part);
        snprintf(command, sizeof command, "eval \"$(sed -n '/^get()/,/^}/p' scripts/bench.sh)\"; tmp=/tmp/; get run %s",
                 names[n]);
        const char *said = printed_by(command, "");
        CU_ASSERT(cJSON_GetNumberValue(figure) > 0 && strtod(said, &end) == figure->valuedouble && !strcmp(end, "\n"));
    }
    cJSON_Delete(run_json);
}

/* Three policies, each ten times as slow and as fast as the one before: the second is in the middle of both axes, where 10
 * and 20 are. */
TEST(a_frontier_is_drawn_where_its_figures_say) {
    static const char *const shown[] = {
        "<circle cx='473' cy='218'",
        "<text x='473' y='409' font-size='11' text-anchor='middle'>10<",
        "<text x='59' y='222' font-size='11' text-anchor='end'>20<",
        ">10 x 3 diagonal: 20 67.5 0 100 50 25, GPU attention<",
        ">100 x 3: 20 67.5 0 100 50 25<",
        ">m, s 8, n 4, h<",
    };
    if (!has_python()) return;
    const char *svg = printed_by(
        "for x in 1 10 100; do\n"
        "    test $x = 10 && other='\"diagonal\", \"cpu_cache_compute\": false' || "
        "other='\"zigzag\", \"cpu_cache_compute\": true'\n"
        "    test $x = 1 || printf ,\n"
        "    echo \"{\\\"latency\\\": $x, \\\"throughput\\\": $((2 * x)), \\\"gbs\\\": $x, \\\"schedule\\\": $other, \"\n"
        "    echo '\"num_gpu_batches\": 3, \"wg\": 0.2, \"wc\": 0.675, \"cg\": 0, \"cc\": 1, \"hg\": 0.5, \"hc\": 0.25}'\n"
        "done | (echo '{\"model\": \"m\", \"hardware\": \"h\", \"s\": 8, \"n\": 4, \"frontier\": ['; cat; echo ']}') "
        ">/tmp/frontier.json\n"
        "python3 -B scripts/plot_frontier.py /tmp/frontier.json /tmp/svg && cat /tmp/svg",
        "");
    for (size_t s = 0; s < COUNT(shown); s++) CU_ASSERT(shows(svg, shown[s]));
}

// ---- what the documents name ----------------------------------------------------------------------------------------

/* A hash of its sources does not cover the script that makes the page, which names the models that one can ask for. */
TEST(the_page_of_the_search_offers_every_model_that_the_program_knows) {
    prints("sed -nE 's/.*\"models\": \\[([^]]*).*/\\1/p' docs/explore.html | tr -d '\"\\n'", opt_known_names());
    if (!has_python()) return;
    prints("cd scripts && python3 -B -c 'import make_explore; print(*make_explore.MODELS, sep=\", \", end=\"\")'",
           opt_known_names());
}

/* README.md and the pages behind it are read in terminals, too. Of a UTF-8 character only the first byte is counted. */
TEST(README_is_short_and_no_line_of_it_is_long) {
    prints(
        "test $(wc -l <README.md) -le 180 || echo long\n"
        "for f in README.md docs/JOBS.md docs/PIPELINES.md docs/COMPUTERS.md docs/READING.md; do\n"
        "    LC_ALL=C tr -d '\\200-\\277' <$f | LC_ALL=C grep -nE '.{111}' | sed \"s,^,$f:,\"\n"
        "done",
        "");
}

/* Those to files of the repository, from the document's folder. docs/index.html is whole without the folders beside docs;
 * docs/paper.html has the code in them. */
TEST(every_link_of_the_documents_leads_to_a_file) {
    prints(
        "for f in *.md */*.md results/*/*.md; do grep -oE '\\]\\([^)# ]+' $f | sed \"s,^..,$(dirname $f)/,\"; done "
        ">/tmp/all\n"
        "grep -oE 'href=\"[^\"#]+' docs/index.html | sed 's,.*\",docs/,' >/tmp/page\n"
        "grep -oE 'href=\"[^\"#]+' docs/paper.html | sed 's,.*\",docs/,' >>/tmp/all\n"
        "grep -hv /http /tmp/all /tmp/page | while read -r to; do test -r $to || echo $to; done\n"
        "grep '[.][.]' /tmp/page; test $(grep -vc /http /tmp/all) -gt 40 || echo few",
        "");
}

/* GitHub makes the name of a heading's anchor out of its words. Of a page it is an id; the one that
 * is cut is followed by scripts/paper_browser.py. */
TEST(every_anchor_of_a_link_is_there) {
    prints(
        "anchors() {\n"
        "    case $1 in\n"
        "    *.md) sed -n 's/^##* //p' $1 | tr A-Z a-z | tr -cd 'a-z0-9_ \\n-' | tr ' ' - ;;\n"
        "    *) grep -oE '\\<id=\"[^\"]+' $1 | cut -c5- ;;\n"
        "    esac\n"
        "}\n"
        "for f in *.md */*.md results/*/*.md docs/*.html; do\n"
        "    { grep -oE '\\]\\([^) ]*#[^) ]+' $f | cut -c3-; grep -oE 'href=\"[^\"]*#[^\"]+' $f | cut -c7-; } |\n"
        "        grep -v '^http' | sed \"s,^#,$(basename $f)#,; s,^,$f $(dirname $f)/,\"\n"
        "done | sort -u | grep -v '/[^ ]*[.][chu]*#L[0-9]*$' | grep -v ' docs/paper.html#A.3-dtoc$' >/tmp/links\n"
        "while read -r f to; do\n"
        "    anchors ${to%%#*} | grep -qxF -- \"${to#*#}\" || echo $f: $to\n"
        "done </tmp/links\n"
        "test $(wc -l </tmp/links) -gt 120 || echo few",
        "");
}

/* From mini.c and flexgen.h to flexgen.c, which has main: each first comment names the next file, as it is or beside the
 * one that names it, and perhaps a function of it; and each file with code is named once. */
TEST(what_to_read_next_leads_through_every_source_file) {
    prints(
        "f=mini.c; n=0\n"
        "while echo $f; test $f != flexgen.c && test $((n += 1)) -lt 200; do\n"
        "    next=$(tr '\\n' ' ' <$f | sed 's/  *\\* / /g' | grep -oE 'Read next: (`[^`]*`[a-z ]* of )?[^,; ]*' | head -1 "
        "|\n"
        "        sed 's/.* //; s/[.]$//')\n"
        "    test -r $(dirname $f)/$next && next=$(dirname $f)/$next\n"
        "    f=${next#./}\n"
        "done | grep '[.]cu*$' | sort >/tmp/read\n"
        "ls *.c *.cu branches/*.c device/*.c cost/*.c io/*.c base/*.c app/*.c | sort | diff /tmp/read - || true",
        "");
}

/* docs/READING.md has each source file, and in its first table those of scripts/size.py's trunk. */
TEST(the_reading_order_names_every_source_file) {
    prints(
        "for f in *.[ch] *.cu */*.[ch]; do\n"
        "    case $f in tests/* | docs/* | build/*) ;; *) grep -qF \"$(basename $f)\\`\" docs/READING.md || echo $f ;; "
        "esac\n"
        "done",
        "");
    if (!has_python()) return;
    succeeds(
        "python3 -B -c 'import fnmatch, glob, re, sys; sys.path.insert(0, \"scripts\"); import paper_page, size\n"
        "rows = paper_page.table_rows(\"docs/READING.md\", \"read\")\n"
        "read = {path for row in rows for path in re.findall(\"`([^`]+[.][ch])`\", row.split(\"|\")[1])}\n"
        "trunk = {path for path in size.program() if any(fnmatch.fnmatch(path, p) for p in size.TRUNK)}\n"
        "sys.exit(sorted(read ^ trunk) or 0)'");
}

TEST(the_map_of_the_tests_names_every_suite) {
    prints(
        "sed -n 's/^|.*| \\(`.*\\) |$/\\1/p' tests/README.md | grep -o '[a-z_]*' | grep . | sort -u >/tmp/mapped\n"
        "ls tests/test_*.c | sed 's,.*test_,,; s,[.]c$,,' | sort | diff /tmp/mapped - || true",
        "");
}
