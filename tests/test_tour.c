/* test_tour.c: docs/TOUR.md and the program say the same; so do README.md where it quotes the program, the page that is
 * made of the tour, and the source files about what to read next.
 *
 * Every listing of the tour stands behind a line <!-- listing NAME --> and is made here, from a model of two layers whose
 * sizes are so small that one can add up its bytes by hand. TOUR=write make test SUITE=tour writes them into the document;
 * without it the suite compares. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <glob.h>
#include <unistd.h>

#include "tests.h"

#define TOUR "docs/TOUR.md"

static Error err;

// ---------------------------------------------------------------------------------------------------------------
// The example: two layers, two GPU batches of one prompt, three tiers
// ---------------------------------------------------------------------------------------------------------------

enum { SWEEP = 1, PROMPTS = 2, S = 3, N = 3 };

static const OptConfig two_layers = {.name = "two-layers",
                                     .l = 2,
                                     .h1 = 32,
                                     .h2 = 128,
                                     .nh = 2,
                                     .vocab = 64,
                                     .max_pos = 14,
                                     .embed = 32,
                                     .pre_norm = true,
                                     .final_norm = true,
                                     .eos = -1};

/* A quarter of the weights on the GPU and half on the CPU; one sequence's KV cache on the CPU, the other's on disk; one
 * sequence's activations on the GPU, the other's on the CPU. */
static const Policy policy = {.wg = .25,
                              .wc = .5,
                              .cg = 0,
                              .cc = .5,
                              .hg = .5,
                              .hc = .5,
                              .gbs = 1,
                              .num_gpu_batches = 2,
                              .overlap = true,
                              .page_tokens = 4,
                              .table_home = TIER_GPU};

/* So slow that a layer takes a millisecond: links of 10 and 5 MB/s, 40 million flops a second; memory is too fast to
 * notice. */
static Hardware machine_of_the_tour(void) {
    Hardware h = test_fast_machine();
    for (int stage = 0; stage < 2; stage++) {
        h.ctog_bdw[stage] = h.gtoc_bdw[stage] = 10e6;
        h.dtoc_bdw[stage] = h.ctod_bdw[stage] = 5e6;
        h.mm_flops[stage] = 40e6, h.bmm_flops[stage] = 10e6;
    }
    return h;
}

typedef struct {
    Checkpoint *checkpoint;
    int32_t ids[PROMPTS][S];
    Prompt prompts[PROMPTS];
    Task task;
    Plan *plan;
} Example;

static void example_open(Example *e, const Policy *with, Type act_type) {
    *e = (Example){.checkpoint = checkpoint_dummy(&two_layers, 1), .ids = {{2, 5, 6}, {2, 9, 40}}};
    for (int p = 0; p < PROMPTS; p++) e->prompts[p] = (Prompt){.ids = e->ids[p], .s = S, .n = N, .place = p};
    e->task = (Task){.prompts = e->prompts, .count = PROMPTS, .sampling = {.top_p = 1}};
    e->plan = plan_make(e->checkpoint, with, &e->task, act_type, &err);
    if (!e->plan) CU_FAIL_FATAL(err.text);
}

static void example_close(Example *e) { plan_free(e->plan), checkpoint_close(e->checkpoint); }

/* Sweeps on the sim. */
static void simulate(Example *e, const Hardware *hardware, Trace *trace, LaneCount count[NLANES], RunStats *stats,
                     void (*prepare)(Device *)) {
    const Listener listener = {0};
    Device *device = sim_open(e->plan, hardware);
    device->trace = trace;
    if (prepare) prepare(device);
    ASSERT_OK(schedule_run(e->plan, &e->task, device, &listener, stats, &err));
    if (count) memcpy(count, device->count, sizeof device->count);
    device->close(device);
}

// ---------------------------------------------------------------------------------------------------------------
// The listings
// ---------------------------------------------------------------------------------------------------------------

/* A text with another word for one of its words. */
static char *replaced(char *text, const char *word, const char *by) {
    char *all;
    size_t len;
    FILE *out = open_memstream(&all, &len);
    CHECK(out);
    for (const char *at = text, *next; *at; at = next) {
        next = strstr(at, word);
        if (!next) next = at + strlen(at);
        fprintf(out, "%.*s", (int)(next - at), at);
        if (*next) fputs(by, out), next += strlen(word);
    }
    fclose(out), free(text);
    return all;
}

/* A directory in the place of /tmp, with its slash. */
static const char *tmp_place(void) {
    static char dir[400];
    if (!dir[0]) snprintf(dir, sizeof dir, "%s/", temp_dir());
    return dir;
}

/* What a command of the shell prints whose "./flexgen" and "./mini" are the programs under test, and whose /tmp is a
 * directory of this suite; of standard error with its lines behind. */
static char *printed_by(const char *command, bool with_errors) {
    const char *dir = tmp_place(), *flexgen = getenv("FLEXGEN_BIN"), *mini = getenv("MINI_BIN");
    char *script = xcalloc(strlen(command) + 1, 1), line[1000];
    strcpy(script, command);
    script = replaced(script, "/tmp/", dir);
    if (flexgen) script = replaced(script, "./flexgen", flexgen);
    if (mini) script = replaced(script, "./mini", mini);
    setenv("FLEXGEN", flexgen ? flexgen : "./flexgen", 1); /* for scripts */
    write_file(dir, "command.sh", script, strlen(script));
    setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* mini leaves its memory to the system when it ends */
    snprintf(line, sizeof line, "sh %scommand.sh >%sprinted %s", dir, dir, with_errors ? "2>&1" : "2>/dev/null");
    CU_ASSERT_EQUAL(system(line), 0);
    snprintf(line, sizeof line, "%sprinted", dir);
    free(script);
    return contents(line, NULL);
}

// ---- mini.c: three prompts in two batches, one token more after another

enum { MINI_N = 3, MINI_K = 2, MINI_PROMPTS = 3, LINKS = 4 };
enum { MOVED = OF_ACTIVATIONS + 1 };
#define MINI_RUN                                                                                        \
    "./mini models/opt-tiny \"Once upon a time\" \"Tom and Sue\" \"One rainy day\" --max-tokens 3 \\\n" \
    "        --percent 0 50 0 100 0 100 --gpu-batch-size 2 --num-gpu-batches 2 "                        \
    "--ctog 1e8 --gtoc 1e8 --dtoc 5e7 --ctod 5e7"
static const int mini_s[MINI_PROMPTS] = {5, 4, 5}, mini_batch[MINI_PROMPTS] = {0, 0, 1};
static const char *const link_name[LINKS] = {"ctog", "gtoc", "dtoc", "ctod"}; /* as Channel */
static const OptConfig tiny = {.l = 6, .h1 = 256, .h2 = 1024, .nh = 4, .vocab = 4096, .max_pos = 512, .embed = 256};
typedef long Moves[LINKS][MOVED]; /* bytes */

static long mini_bytes(int role) {
    int rows, cols;
    opt_role_shape(&tiny, (Role)role, &rows, &cols);
    return 2L * rows * cols;
}

static bool mini_on_disk[6][NROLES];

/* One tensor after the other: to the CPU, if with it the CPU has at most half of all so far; else to the disk. */
static void mini_place(void) {
    long all = 0, cpu = 0;
    for (int e = 0; e < tiny.l * NROLES; e++) {
        const long bytes = mini_bytes(e % NROLES);
        all += bytes;
        mini_on_disk[e / NROLES][e % NROLES] = 2 * (cpu + bytes) > all;
        cpu += 2 * (cpu + bytes) > all ? 0 : bytes;
    }
}

/* Half of a layer's bytes, one tensor behind the other: those from disk pass two links. */
static void mini_weights(Moves m, int i, int j, int k) {
    long at = 0, layer = 0;
    i += j > tiny.l, j %= tiny.l + 1;
    for (int r = 0; r < NROLES; r++) layer += mini_bytes(r);
    for (int r = 0; r < NROLES && j < tiny.l && i < MINI_N; at += mini_bytes(r++)) {
        const long from = at > k * layer / 2 ? at : k * layer / 2, half_end = (k + 1) * layer / 2;
        const long end = at + mini_bytes(r) < half_end ? at + mini_bytes(r) : half_end;
        m[CTOG][OF_WEIGHTS] += end > from ? end - from : 0;
        m[DTOC][OF_WEIGHTS] += end > from && mini_on_disk[j][r] ? end - from : 0;
    }
}

/* A sequence's rows in token i (new: k, v and hidden state), and the tokens before these. */
static int mini_rows(int i, int k, bool past) {
    int rows = 0;
    for (int p = 0; p < MINI_PROMPTS; p++)
        if (mini_batch[p] == k) rows += past ? (i ? mini_s[p] + i - 1 : 0) : i ? 1 : mini_s[p];
    return rows;
}

/* The square that is meant beside the edges of a column. */
static bool mini_square(int *i, int *j, int *k) {
    const int column = *i * (tiny.l + 1) + *j + (*k == MINI_K) - (*k == -1);
    *k = (*k + MINI_K) % MINI_K, *i = column / (tiny.l + 1), *j = column % (tiny.l + 1);
    return column >= 0 && *i < MINI_N;
}

/* A row of k and v are twice h1 numbers of two bytes, one of the hidden state h1 floats. */
static void mini_store(Moves m, int i, int j, int k) {
    if (!mini_square(&i, &j, &k) || j == tiny.l) return;
    m[GTOC][OF_ACTIVATIONS] += 4L * tiny.h1 * mini_rows(i, k, false);
    m[GTOC][OF_CACHE] += 2 * 2L * tiny.h1 * mini_rows(i, k, false);
}

static void mini_load(Moves m, int i, int j, int k) {
    if (!mini_square(&i, &j, &k)) return;
    if (j < tiny.l) m[CTOG][OF_CACHE] += 2 * 2L * tiny.h1 * mini_rows(i, k, true);
    if (j > 0) m[CTOG][OF_ACTIVATIONS] += 4L * tiny.h1 * mini_rows(i, k, false);
}

static void list_mini(FILE *out) {
    char *printed = printed_by(MINI_RUN, true), *errors = strstr(printed, "mini: ");
    CU_ASSERT_PTR_NOT_NULL_FATAL(errors);
    fprintf(out, "%.*s", (int)(errors - printed), printed);
    for (int c = 0; c < LINKS; c++) {
        char mark[40];
        snprintf(mark, sizeof mark, "mini: %s: ", link_name[c]);
        const char *at = strstr(errors, mark);
        CU_ASSERT_PTR_NOT_NULL_FATAL(at);
        fprintf(out, "%s%ld bytes, ...\n", mark, atol(at + strlen(mark)));
    }
    free(printed);
}

static void list_mini_weights(FILE *out) {
    static const char *const role[] = {"ln1", "q", "k", "v", "o", "ln2", "fc1", "fc2"};
    fprintf(out, "%-8s", "");
    for (int r = 0; r < NROLES; r += 2) fprintf(out, "%13s", role[r / 2]);
    fprintf(out, "%12s\n%-8s", "from disk", "bytes");
    for (int r = 0; r < NROLES; r += 2)
        fprintf(out, "%*ld+%ld", mini_bytes(r + 1) > 999 ? 8 : 9, mini_bytes(r), mini_bytes(r + 1));
    fprintf(out, "\n");
    mini_place();
    for (int j = 0; j < tiny.l; j++) {
        const bool *on_disk = mini_on_disk[j];
        long sum = 0;
        fprintf(out, "layer %-2d", j);
        for (int r = 0; r < NROLES; r += 2)
            fprintf(out, "%*s+%s", on_disk[r + 1] ? 8 : 9, on_disk[r] ? "disk" : "CPU", on_disk[r + 1] ? "disk" : "CPU");
        for (int r = 0; r < NROLES; r++) sum += on_disk[r] ? mini_bytes(r) : 0;
        fprintf(out, "%12ld\n", sum);
    }
}

/* Square (1, 2, 1), call for call. */
static void list_mini_square(FILE *out) {
    enum { I = 1, J = 2, THIS = 1 };
    Moves weights = {{0}}, stored = {{0}}, loaded = {{0}};
    int i = I, j = J, k = THIS + 1;
    mini_place(), mini_weights(weights, I, J + 1, THIS), mini_store(stored, I, J, THIS - 1), mini_load(loaded, I, J, k);
    mini_square(&i, &j, &k);
    fprintf(out, "load_weight(1, 3, 1)       %6ld bytes by ctog, of these %ld by dtoc before\n", weights[CTOG][OF_WEIGHTS],
            weights[DTOC][OF_WEIGHTS]);
    fprintf(out, "store_activation(1, 2, 0)  %6ld bytes by gtoc = %d rows x 256 x 4\n", stored[GTOC][OF_ACTIVATIONS],
            mini_rows(I, 0, false));
    fprintf(out, "store_cache(1, 2, 0)       %6ld bytes by gtoc = %d tokens x 2 x 256 x 2\n", stored[GTOC][OF_CACHE],
            mini_rows(I, 0, false));
    fprintf(out, "load_cache(1, 2, 2)        %6ld bytes by ctog = %d tokens x 2 x 256 x 2, of square (%d, %d, %d)\n",
            loaded[CTOG][OF_CACHE], mini_rows(I, 0, true), i, j, k);
    fprintf(out, "load_activation(1, 2, 2)   %6ld bytes by ctog = %d rows x 256 x 4, of square (%d, %d, %d)\n",
            loaded[CTOG][OF_ACTIVATIONS], mini_rows(I, 0, false), i, j, k);
    fprintf(out, "compute(1, 2, 1)\nsynchronize()\n");
}

/* The same for all squares, and what the program says. */
static void list_mini_links(FILE *out) {
    Moves all = {{0}};
    char *printed = printed_by(MINI_RUN, true);
    mini_place();
    for (int k = 0; k < MINI_K; k++) mini_weights(all, 0, 0, k);
    for (int e = 0; e < MINI_N * (tiny.l + 1) * MINI_K; e++) {
        const int i = e / MINI_K / (tiny.l + 1), j = e / MINI_K % (tiny.l + 1), k = e % MINI_K;
        mini_weights(all, i, j + 1, k), mini_store(all, i, j, k - 1), mini_load(all, i, j, k + 1);
    }
    fprintf(out, "%-6s %10s %10s %12s %10s %12s\n", "", "weights", "cache", "activations", "together", "the program");
    for (int c = 0; c < LINKS; c++) {
        const long *m = all[c], sum = m[OF_WEIGHTS] + m[OF_CACHE] + m[OF_ACTIVATIONS];
        char mark[40];
        snprintf(mark, sizeof mark, "mini: %s: ", link_name[c]);
        const char *at = strstr(printed, mark);
        const long said = at ? atol(at + strlen(mark)) : -1;
        fprintf(out, "%-6s %10ld %10ld %12ld %10ld %12ld\n", link_name[c], m[OF_WEIGHTS], m[OF_CACHE], m[OF_ACTIVATIONS],
                sum, said);
        CU_ASSERT_EQUAL(sum, said);
    }
    free(printed);
}

/* Where a C file defines a function, which begins in the first column; NULL: nowhere. */
static const char *definition(const char *text, const char *name, const char **end) {
    char call[80];
    snprintf(call, sizeof call, "%s(", name);
    for (const char *at = text; (at = strstr(at, call)); at++) {
        const char *line = at;
        while (line > text && line[-1] != '\n') line--;
        const char *body = at + strcspn(at, "{;"), *line_end = strchr(at, '\n');
        if (at == line || isalnum(at[-1]) || at[-1] == '_' || !isalpha(*line) || *body != '{' || !line_end) continue;
        const char *whole = line_end[-1] == '}' && body < line_end ? line_end : strstr(at, "\n}\n") + 2;
        if (end) *end = whole + 1;
        return line;
    }
    return NULL;
}

static void list_function(FILE *out, const char *name) {
    char *text = contents("mini.c", NULL);
    const char *end = NULL, *begin = definition(text, name, &end);
    CU_ASSERT_PTR_NOT_NULL_FATAL(begin);
    fprintf(out, "%.*s", (int)(end - begin), begin);
    free(text);
}

static void list_load_weight(FILE *out) { list_function(out, "load_weight"); }
static void list_move_cache(FILE *out) { list_function(out, "move_cache"); }
static void list_compute(FILE *out) { list_function(out, "compute"); }

// ---- The engine

static void list_plan(FILE *out) {
    static const char *const type[] = {"F32", "F16", "BF16", "I32", "U8"};
    Example e;
    example_open(&e, &policy, F16);
    for (int t = 0; t < NTIERS; t++) {
        fprintf(out, "%s\n", tier_name[t]);
        for (int id = 0; id < NREGIONS; id++) {
            const Region *r = &e.plan->region[id][t];
            if (!r->bytes) continue;
            fprintf(out, "  %-34s %8zu", r->name, r->bytes);
            if (r->cols) fprintf(out, " = %d x (%d, %d) %s", r->slots, r->rows, r->cols, type[r->type]);
            fprintf(out, "\n");
        }
        fprintf(out, "  %-34s %8zu\n", "together", e.plan->total[t]);
    }
    example_close(&e);
}

static void list_weights(FILE *out) {
    static const char *const role[NROLES] = {"ln1", "", "q",   "", "k",   "", "v",   "",
                                             "o",   "", "ln2", "", "fc1", "", "fc2", ""};
    Example e;
    example_open(&e, &policy, F16);
    fprintf(out, "%-8s", "");
    for (int r = 0; r < NROLES; r += 2) fprintf(out, "%7s", role[r]);
    fprintf(out, "%9s\n", "layer");
    for (int j = -1; j < two_layers.l; j++) {
        size_t sum = 0;
        j < 0 ? fprintf(out, "%-8s", "bytes") : fprintf(out, "layer %-2d", j);
        for (int r = 0; r < NROLES; r += 2) {
            int rows[2], cols[2];
            for (int i = 0; i < 2; i++) opt_role_shape(&two_layers, (Role)(r + i), &rows[i], &cols[i]);
            const size_t bytes = 2 * ((size_t)rows[0] * cols[0] + (size_t)rows[1] * cols[1]);
            sum += bytes;
            j < 0 ? fprintf(out, "%7zu", bytes) : fprintf(out, "%7s", tier_name[e.plan->weight[j][r].home.tier]);
        }
        j < 0 ? fprintf(out, "%9zu\n", sum) : fprintf(out, "\n");
    }
    example_close(&e);
}

/* Ops as they are posted. What an op waits for is known by its lane and its number there; here ops have the number of their
 * sweep and their number in it. */
static struct {
    Event (*post)(Device *, const Op *);
    FILE *out;
    const Plan *plan;
    int number[4]; /* of each sweep's newest op */
    struct {
        int sweep, number;
    } op[NLANES][400]; /* [lane][seq] */
    Slice last;        /* the newest line's call */
} tape;

/* "GPU KV cache 7": a view by its tier, its region and its first cell. */
static void print_views(const Op *op, Use wanted) {
    const char *printed[64];
    int n = 0;
    char text[64][80];
    for (int v = 0; v < op_nviews(op); v++) {
        Use use;
        const Tensor *t = op_view(op, v, &use);
        if (use != wanted || !t->rows || n == 64) continue;
        int used =
            snprintf(text[n], sizeof text[n], "%s %s", tier_name[t->tier], tape.plan->region[t->region][t->tier].name);
        if (t->ncells) used += snprintf(text[n] + used, sizeof text[n] - used, " #%d", t->cell);
        if (t->ncells > 1) snprintf(text[n] + used, sizeof text[n] - used, "-%d", t->cell + t->ncells - 1);
        int same = 0;
        while (same < n && strcmp(printed[same], text[n]) != 0) same++;
        if (same == n) printed[n] = text[n], n++;
    }
    for (int i = 0; i < n; i++) fprintf(tape.out, "%s%s", i ? ", " : "", printed[i]);
}

static Event record(Device *device, const Op *op) {
    const Slice slice = slice_of(op, 0, 0, 0);
    const int number = ++tape.number[op->i];
    if (op->i == SWEEP) {
        const char *call = trace_call(&slice);
        const bool next = op->kind == WEIGHT && op->j == 0; /* layer 0 of the next sweep */
        if (number == 1 || strcmp(call, trace_call(&tape.last)) != 0 || op->j != tape.last.j || op->k != tape.last.k)
            fprintf(tape.out, "%s(i=%d, j=%d, k=%d)\n", call, op->i + next, op->j, op->k);
        tape.last = slice;
        const char *name = op->code == OP_EMBED && op->add ? "embed +" : op_info[op->code].name;
        fprintf(tape.out, "  %d.%-3d %-14s %-9s ", op->i, number, lane_name[op->lane], name);
        print_views(op, WRITES), fprintf(tape.out, " <- "), print_views(op, READS);
        for (int e = 0; e < op->nafter; e++) {
            const Event a = op->after[e];
            const int sweep = tape.op[a.lane][a.seq].sweep;
            fprintf(tape.out, "%s%d.%d", e ? ", " : "; after ", sweep, tape.op[a.lane][a.seq].number);
            if (sweep != SWEEP) fprintf(tape.out, " (%s)", lane_name[a.lane]);
        }
        fprintf(tape.out, "\n");
    }
    const Event event = tape.post(device, op);
    CHECK(event.seq < 400);
    tape.op[event.lane][event.seq].sweep = op->i, tape.op[event.lane][event.seq].number = number;
    return event;
}

static void start_tape(Device *device) { tape.post = device->post, device->post = record; }

static void list_ops(FILE *out) {
    const Hardware hardware = machine_of_the_tour();
    Example e;
    RunStats stats;
    example_open(&e, &policy, F16);
    memset(&tape, 0, sizeof tape);
    tape.out = out, tape.plan = e.plan;
    simulate(&e, &hardware, NULL, NULL, &stats, start_tape);
    example_close(&e);
}

/* The lanes of the sim during the sweep: a letter for each quarter of a millisecond. */
static void list_lanes(FILE *out) {
    enum { WIDTH = 110 };
    const Hardware hardware = machine_of_the_tour();
    Example e;
    RunStats stats;
    Trace trace = {0};
    example_open(&e, &policy, F16);
    simulate(&e, &hardware, &trace, NULL, &stats, NULL);
    const double from = trace.held[SWEEP].at, to = trace.held[SWEEP + 1].at, step = (to - from) / WIDTH;
    for (int lane = 0; lane < NLANES; lane++) {
        char row[WIDTH + 1];
        bool any = false;
        memset(row, '.', WIDTH), row[WIDTH] = 0;
        for (size_t n = 0; n < trace.n; n++) {
            const Slice *s = &trace.slice[n];
            for (int c = 0; c < WIDTH && (int)s->lane == lane; c++) /* by what is done in the middle of a column */
                if (s->begin <= from + (c + .5) * step && s->end > from + (c + .5) * step)
                    row[c] = "012h"[imin(s->j, 2) + (s->j == two_layers.l)], any = true;
        }
        if (any) fprintf(out, "%-14s |%s|\n", lane_name[lane], row);
    }
    fprintf(out, "a column is %.4g ms; 0, 1: of that layer, h: of the head\n", 1e3 * step);
    trace_free(&trace), example_close(&e);
}

static bool keep_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    ((int32_t(*)[N])ctx)[prompt][n - 1] = tokens[n - 1];
    return false;
}

/* The engine on the host device, and the plain forward pass. */
static void list_tokens(FILE *out) {
    Example e;
    RunStats stats;
    int32_t chosen[PROMPTS][N];
    float logits[(S + N) * 64];
    const Listener listener = {.ctx = chosen, .token = keep_token};
    example_open(&e, &policy, F32);
    Device *device = device_open(NULL, e.plan, e.checkpoint, temp_dir(), &err);
    ASSERT_OK(weights_load(e.plan, e.checkpoint, device, &err));
    ASSERT_OK(schedule_run(e.plan, &e.task, device, &listener, &stats, &err));
    device->close(device);
    for (int p = 0; p < PROMPTS; p++) {
        int32_t ids[S + N];
        fprintf(out, "prompt %d:", p);
        for (int i = 0; i < S; i++) fprintf(out, " %d", ids[i] = e.ids[p][i]);
        fprintf(out, ", the engine:");
        for (int i = 0; i < N; i++) fprintf(out, " %d", chosen[p][i]);
        fprintf(out, ", reference_forward:");
        for (int i = S; i < S + N; i++) {
            ASSERT_OK(reference_forward(logits, e.checkpoint, ids, i, &err));
            const float *row = logits + (size_t)(i - 1) * two_layers.vocab;
            ids[i] = 0;
            for (int v = 1; v < two_layers.vocab; v++)
                if (row[v] > row[ids[i]]) ids[i] = v;
            fprintf(out, " %d", ids[i]);
        }
        fprintf(out, "\n");
    }
    example_close(&e);
}

// ---------------------------------------------------------------------------------------------------------------
// The pages behind it
// ---------------------------------------------------------------------------------------------------------------

/* Bytes of weights over the two links, row by row and zig-zag. */
static void list_bytes(FILE *out) {
    const Hardware hardware = machine_of_the_tour();
    fprintf(out, "%-8s %7s %14s %14s %12s\n", "", "sweeps", "disk to CPU", "CPU to GPU", "seconds");
    for (int row = 0; row < 2; row++) {
        Policy p = policy;
        Example e;
        RunStats stats;
        LaneCount count[NLANES];
        p.schedule = row ? SCHEDULE_ROW : SCHEDULE_ZIGZAG, p.num_gpu_batches = row ? 1 : 2;
        example_open(&e, &p, F16);
        simulate(&e, &hardware, NULL, count, &stats, NULL);
        fprintf(out, "%-8s %7ld %14zu %14zu %12.4g\n", schedule_name[p.schedule], stats.sweeps, count[W_READ].moved[WEIGHT],
                count[W_LOAD].moved[WEIGHT], stats.total_s);
        example_close(&e);
    }
}

/* A model of a known size on the T4, with as many prompts as given. */
typedef struct {
    Hardware hardware;
    Checkpoint *checkpoint;
    Task task;
} Large;

static void large_open(Large *a, const char *name, int prompts, int s, int n) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, name) == 0);
    config.eos = -1;
    ASSERT_OK(hardware_read(&a->hardware, "hardware/t4.json", &err));
    a->checkpoint = checkpoint_dummy(&config, 0);
    a->task = (Task){.prompts = xcalloc(prompts, sizeof(Prompt)), .count = prompts, .sampling = {.top_p = 1}};
    for (int p = 0; p < prompts; p++) a->task.prompts[p] = (Prompt){.ids = xcalloc(s, sizeof(int32_t)), .s = s, .n = n};
}

static void large_close(Large *a) {
    for (int p = 0; p < a->task.count; p++) free(a->task.prompts[p].ids);
    free(a->task.prompts), checkpoint_close(a->checkpoint);
}

/* The most pages of all sweeps. */
static int run_large(const Large *a, const Policy *p, RunStats *stats) {
    int most = 0;
    Trace trace = {0};
    Plan *plan = plan_make(a->checkpoint, p, &a->task, F16, &err);
    CHECK(plan);
    Example e = {.checkpoint = a->checkpoint, .task = a->task, .plan = plan};
    simulate(&e, &a->hardware, &trace, NULL, stats, NULL);
    for (size_t i = 0; i < trace.sweeps; i++)
        most = imax(most, trace.held[i].pages[0] + trace.held[i].pages[1] + trace.held[i].pages[2]);
    plan_free(plan), trace_free(&trace);
    return most;
}

/* OPT-30B, 16 x 14 prompts of 512 tokens, 32 more each: what the weights take on the link, and what the sim makes of it. */
static void list_link(FILE *out) {
    enum { GBS = 16, BATCHES = 14, LONG = 512, MORE = 32 };
    const Policy p = {.wg = .211,
                      .wc = .789,
                      .cc = 1,
                      .hc = 1,
                      .gbs = GBS,
                      .num_gpu_batches = BATCHES,
                      .overlap = true,
                      .delegated = true,
                      .page_tokens = 16,
                      .table_home = TIER_GPU};
    Large a;
    RunStats stats;
    Found found;
    large_open(&a, "opt-30b", GBS * BATCHES, LONG, MORE);
    const OptConfig *c = &a.checkpoint->config;
    const double layer = 24. * c->h1 * c->h1, moves = layer * p.wc, T = moves / a.hardware.ctog_bdw[0];
    const Search search = {.hardware = &a.hardware,
                           .checkpoint = a.checkpoint,
                           .task = &a.task,
                           .act_type = F16,
                           .given = p,
                           .capacity = {1ul << 40, 1ul << 40, 1ul << 40}};
    ASSERT_OK(policy_predict(&found, &search, &err));
    run_large(&a, &p, &stats);
    fprintf(out, "weights of a layer        24 h1^2 = 24 x %d^2 = %.4g GB\n", c->h1, layer / 1e9);
    fprintf(out, "of them from the CPU      wc = %.3f: %.4g GB\n", p.wc, moves / 1e9);
    fprintf(out, "over the link             %.4g GB / %.4g GB/s = %.4g ms a layer\n", moves / 1e9,
            a.hardware.ctog_bdw[0] / 1e9, 1e3 * T);
    fprintf(out, "%d layers, %d sweeps      %.4g s\n", c->l, MORE - 1, T * c->l * (MORE - 1));
    fprintf(out, "the cost model            T_gen = %.4g ms, bound by %s; decoding %.4g s\n", 1e3 * found.cost.T_gen,
            found.cost.slowest[0], found.cost.T_gen * c->l * (MORE - 1));
    fprintf(out, "the sim                   decoding %.4g s, all %.4g s, %.4g token/s\n",
            stats.total_s - stats.prefill_sweeps_s, stats.total_s, stats.generated / stats.total_s);
    large_close(&a);
}

/* OPT-1.3B, 192 prompts, the cache on the GPU and the weights on the CPU: how many batches fit one peak of pages. */
static void list_pages(FILE *out) {
    static const struct {
        Schedule schedule;
        int batches;
    } runs[] = {{SCHEDULE_ZIGZAG, 6}, {SCHEDULE_DIAGONAL, 6}, {SCHEDULE_DIAGONAL, 8}};
    Large a;
    large_open(&a, "opt-1.3b", 192, 32, 48);
    fprintf(out, "%-9s %8s %10s %9s %9s\n", "", "batches", "most pages", "seconds", "token/s");
    for (int i = 0; i < 3; i++) {
        RunStats stats;
        Policy p = {.wc = 1, .cg = 1, .hg = 1, .gbs = 4, .overlap = true, .page_tokens = 4, .table_home = TIER_GPU};
        p.schedule = runs[i].schedule, p.num_gpu_batches = runs[i].batches;
        const int pages = run_large(&a, &p, &stats);
        fprintf(out, "%-9s %8d %10d %9.4g %9.4g\n", schedule_name[p.schedule], p.num_gpu_batches, pages, stats.total_s,
                stats.generated / stats.total_s);
    }
    large_close(&a);
}

/* Of what `policy --explain` says the part from one text to another, or with "" to the end. */
static void list_between(FILE *out, const char *from, const char *to) {
    const Block block = {512, 32, 16, 14};
    Large a;
    char *text;
    size_t len;
    large_open(&a, "opt-30b", 1, block.s, block.n);
    const Hardware *h = &a.hardware;
    const Search machine = {
        .hardware = h, .checkpoint = a.checkpoint, .capacity = {(size_t)h->gmem, (size_t)h->cmem, (size_t)h->nmem}};
    const TaskRun run = {.json = cJSON_CreateObject(), .text = open_memstream(&text, &len)};
    ASSERT_OK(report_explained(&run, &machine, NULL, &block, &err));
    fclose(run.text), cJSON_Delete(run.json);
    const char *begin = strstr(text, from), *end = begin ? strstr(begin, to) : NULL;
    if (begin && !*to) end = text + len;
    CU_ASSERT_PTR_NOT_NULL_FATAL(end);
    fprintf(out, "%.*s", (int)(end - begin), begin);
    free(text), large_close(&a);
}

static void list_program(FILE *out) { list_between(out, "minimize", "\nwith one more"); }
static void list_prices(FILE *out) { list_between(out, "with one more", "\ntoken/s by"); }
static void list_objective(FILE *out) { list_between(out, "token/s by", ""); }

// ---------------------------------------------------------------------------------------------------------------
// The document
// ---------------------------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    void (*write)(FILE *out);
} listings[] = {{"mini", list_mini},
                {"mini-weights", list_mini_weights},
                {"mini-square", list_mini_square},
                {"mini-links", list_mini_links},
                {"load_weight", list_load_weight},
                {"move_cache", list_move_cache},
                {"compute", list_compute},
                {"weights", list_weights},
                {"plan", list_plan},
                {"ops", list_ops},
                {"lanes", list_lanes},
                {"tokens", list_tokens},
                {"link", list_link},
                {"bytes", list_bytes},
                {"pages", list_pages},
                {"program", list_program},
                {"prices", list_prices},
                {"objective", list_objective}};
enum { NLISTINGS = sizeof listings / sizeof *listings };

static bool writes(void) { return getenv("TOUR") && !strcmp(getenv("TOUR"), "write"); }

static char *made(int i) {
    char *text;
    size_t len;
    FILE *out = open_memstream(&text, &len);
    CHECK(out);
    listings[i].write(out);
    fclose(out);
    return text;
}

/* Where the text of a listing begins and ends. */
static char *find_listing(char *document, const char *name, char **end) {
    char mark[80];
    snprintf(mark, sizeof mark, "<!-- listing %s -->\n```text\n", name);
    char *at = strstr(document, mark);
    if (!at) fprintf(stderr, "\n    %s: no %s", TOUR, mark);
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    at += strlen(mark);
    *end = strstr(at, "```\n");
    CU_ASSERT_PTR_NOT_NULL_FATAL(*end);
    return at;
}

static char *with_listing(char *document, int i, const char *text) {
    char *end, *begin = find_listing(document, listings[i].name, &end), *all;
    size_t len;
    FILE *out = open_memstream(&all, &len);
    CHECK(out);
    fprintf(out, "%.*s%s%s", (int)(begin - document), document, text, end);
    fclose(out);
    free(document);
    return all;
}

static void every_listing_of_the_tour_is_what_the_program_says(void) {
    const bool write = writes();
    size_t len;
    char *document = file_read(TOUR, 1 << 20, &len, &err);
    if (!document) CU_FAIL_FATAL(err.text);
    for (int i = 0; i < NLISTINGS; i++) {
        char *text = made(i), *end;
        if (write) document = with_listing(document, i, text);
        const char *at = find_listing(document, listings[i].name, &end);
        const bool same = strlen(text) == (size_t)(end - at) && !strncmp(at, text, strlen(text));
        if (!same) fprintf(stderr, "\n    listing %s is now:\n%s", listings[i].name, text);
        CU_ASSERT(same);
        free(text);
    }
    if (write) write_file("docs", "TOUR.md", document, strlen(document));
    free(document);
}

/* A drawing is the one that the documents show; with TOUR=write it becomes that. */
static void is_kept(const char *drawing, const char *path) {
    char *drawn = contents(drawing, NULL), *kept;
    if (writes()) write_file(".", path, drawn, strlen(drawn));
    kept = contents(path, NULL);
    const bool same = !strcmp(drawn, kept);
    if (!same)
        fprintf(stderr, "\n    %s is no longer what is drawn; TOUR=write make test SUITE=tour draws it anew\n", path);
    CU_ASSERT(same);
    free(drawn), free(kept);
}

/* The pictures are drawn by Python, where there is one: the lanes from the same trace, the others from the listings. */
static void the_pictures_of_the_tour_are_drawn_from_its_trace_and_listings(void) {
    const Hardware hardware = machine_of_the_tour();
    const char *dir = temp_dir();
    static const char *const of_listings[] = {"plan", "square"};
    char trace_path[400], svg_path[400], command[1400], kept[100];
    Example e;
    RunStats stats;
    Trace trace = {.name = "two-layers"};
    if (!has_python()) return;
    snprintf(trace_path, sizeof trace_path, "%s/tour.json", dir), snprintf(svg_path, sizeof svg_path, "%s/tour.svg", dir);
    example_open(&e, &policy, F16);
    simulate(&e, &hardware, &trace, NULL, &stats, NULL);
    FILE *file = fopen(trace_path, "w");
    CHECK(file);
    trace_write(&trace, 1, file);
    fclose(file);
    snprintf(command, sizeof command,
             "python3 -B scripts/plot_trace.py --lanes %s %s --sweeps %d --title 'Two layers, K = 2: sweep %d'", trace_path,
             svg_path, SWEEP, SWEEP);
    CU_ASSERT_EQUAL_FATAL(system(command), 0);
    is_kept(svg_path, "docs/tour-lanes.svg");
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "python3 -B scripts/plot_tour.py --%s %s", of_listings[i], svg_path);
        CU_ASSERT_EQUAL_FATAL(system(command), 0);
        snprintf(kept, sizeof kept, "docs/tour-%s.svg", of_listings[i]);
        is_kept(svg_path, kept);
    }
    snprintf(command, sizeof command, "python3 -B scripts/plot_trace.py --memory %s %s %s", trace_path, trace_path,
             svg_path);
    CU_ASSERT_EQUAL_FATAL(system(command), 0);
    char *drawn = contents(svg_path, NULL);
    CU_ASSERT(strstr(drawn, "tour: at most 4 pages, 2 sequences") && strstr(drawn, "pages on disk"));
    free(drawn);
    trace_free(&trace), example_close(&e);
}

// ---------------------------------------------------------------------------------------------------------------
// README.md, the page, and the order of reading
// ---------------------------------------------------------------------------------------------------------------

/* What a command prints that a document shows as `from` to `to`, with each line indented. */
static char *shown(const char *from, const char *to) {
    char *command = xcalloc(to - from + 1, 1), *said;
    size_t len;
    memcpy(command, from, to - from);
    char *printed = printed_by(command, false);
    FILE *out = open_memstream(&said, &len);
    CHECK(out);
    for (const char *at = printed, *end; *at; at = end) {
        end = at + strcspn(at, "\n"), end += *end != 0;
        fprintf(out, "    %.*s", (int)(end - at), at);
    }
    fclose(out), free(command), free(printed);
    return said;
}

/* Equal texts, but that numbers may differ by a share. */
static bool alike(const char *a, size_t len, const char *b, double share) {
    const char *const a_end = a + len;
    while (a < a_end && *b) {
        char *next;
        if (!isdigit(*a) || !isdigit(*b)) {
            if (*a++ != *b++) return false;
            continue;
        }
        const double x = strtod(a, &next), y = strtod(b, (char **)&b);
        a = next;
        if (!(fabs(x - y) <= share * fmax(x, y))) return false;
    }
    return a == a_end && !*b;
}

static const char *next_line(const char *line) {
    line += strcspn(line, "\n");
    return line + (*line != 0);
}

/* A document shows "$ command", which may go on behind a backslash, and below it all that the command prints; all
 * indented. A perplexity has the roundings of the processor's instructions, see scripts/experiments.py. */
static int commands_print_what_is_below_them(const char *path) {
    const bool write = writes(), python = has_python();
    char *document = contents(path, NULL), *anew;
    int count = 0;
    size_t len;
    FILE *out = open_memstream(&anew, &len);
    CHECK(out);
    for (const char *line = document, *end, *below; *line; line = below) {
        below = end = next_line(line);
        const bool command = !strncmp(line, "    $ ", 6);
        while (command && !strncmp(end - 2, "\\\n", 2)) below = end = next_line(end);
        while (command && !strncmp(below, "    ", 4) && strncmp(below, "    $ ", 6) != 0) below = next_line(below);
        fprintf(out, "%.*s", (int)(end - line), line);
        if (!command || (!python && !strncmp(line + 6, "python3", 7))) {
            fprintf(out, "%.*s", (int)(below - end), end);
            continue;
        }
        char *said = shown(line + 6, end);
        const bool same = alike(end, below - end, said, strstr(said, "perplexity") ? .005 : 0);
        if (!same && !write) fprintf(stderr, "\n    %s: %.*s    prints\n%s", path, (int)(end - line - 6), line + 6, said);
        CU_ASSERT(same || write);
        same ? fprintf(out, "%.*s", (int)(below - end), end) : fputs(said, out);
        free(said), count++;
    }
    fclose(out);
    if (write) write_file(".", path, anew, len);
    free(document), free(anew);
    return count;
}

static void what_README_quotes_is_what_the_program_prints(void) {
    CU_ASSERT(commands_print_what_is_below_them("README.md") >= 2); /* of both programs */
}
/* They draw one of its pictures, and leave nothing large behind. */
static void the_commands_of_the_tour_print_what_is_below_them(void) {
    char drawing[420];
    CU_ASSERT(commands_print_what_is_below_them(TOUR) >= 4);
    snprintf(drawing, sizeof drawing, "%spages.svg", tmp_place());
    if (!access(drawing, R_OK)) is_kept(drawing, "docs/pages-same-memory.svg"); /* there is Python */
    for (int left = 0; left < 2; left++) {
        snprintf(drawing, sizeof drawing, "%s%s.json", tmp_place(), left ? "diagonal-8" : "zigzag-6");
        CU_ASSERT(access(drawing, F_OK));
    }
}
/* At least one of each study. */
static void the_commands_of_the_experiments_print_what_is_below_them(void) {
    CU_ASSERT(commands_print_what_is_below_them("docs/EXPERIMENTS.md") >= 10);
}

/* The last column of README.md's table. */
static void every_function_that_README_finds_in_mini_c_is_there(void) {
    char *readme = contents("README.md", NULL), *mini = contents("mini.c", NULL), *save;
    int count = 0;
    char *table = strstr(readme, "\n| paper |");
    CU_ASSERT_PTR_NOT_NULL_FATAL(table);
    CU_ASSERT_PTR_NOT_NULL(strstr(table, "`mini.c`"));
    *strstr(table, "\n\n") = 0;
    for (char *row = strtok_r(table, "\n", &save); row; row = strtok_r(NULL, "\n", &save)) {
        char *end = strrchr(row, '|'), name[60];
        *end = 0;
        for (char *at = strrchr(row, '|'); count >= 0 && (at = strchr(at, '`')); at = strchr(at + 1, '`') + 1, count++) {
            snprintf(name, sizeof name, "%.*s", (int)strcspn(at + 1, "`"), at + 1);
            const bool there = definition(mini, name, NULL) || !strcmp(name, "mini.c");
            if (!there) fprintf(stderr, "\n    mini.c has no function %s", name);
            CU_ASSERT(there);
        }
    }
    CU_ASSERT(count >= 20);
    free(readme), free(mini);
}

/* README.md has the beginning of the first line of `make run`, up to dots. Where the policy is given, nothing is measured;
 * the text is the same. */
static void make_run_prints_what_README_says(void) {
    char *readme = contents("README.md", NULL);
    char *found = printed_by(
        "./flexgen generate --model models/opt-tiny --prompts models/prompts.txt --max-tokens 12 --temperature 0.7 "
        "--top-p 0.9 --seed 3 --percent 100 0 100 0 100 0 --gpu-batch-size 5 --num-gpu-batches 1",
        false);
    const char *line = strstr(readme, "    {\"id\": 0"), *dots = line ? strstr(line, "...") : NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(dots);
    CU_ASSERT(!strncmp(found, line + 4, dots - line - 4));
    free(readme), free(found);
}

/* The command that the tour names prints the three listings of its linear program. */
static void the_program_of_the_tour_is_that_of_its_command(void) {
    char *tour = contents(TOUR, NULL), *words = contents(TOUR, NULL), *text, *end;
    char *found = printed_by(
        "./flexgen policy --model opt-30b --prompt-len 512 --gen-len 32 --hardware hardware/t4.json "
        "--cost-model paper --gpu-batch-size 16 --num-gpu-batches 14 --explain",
        false);
    for (char *c = words; *c; c++) /* lines are filled */
        if (*c == '\n') *c = ' ';
    CU_ASSERT_PTR_NOT_NULL(strstr(words, "`policy --cost-model paper --gpu-batch-size 16 --num-gpu-batches 14 --explain`"));
    static const char *const names[] = {"program", "prices", "objective"};
    CU_ASSERT_PTR_NOT_NULL(strstr(tour, "\n    " MINI_RUN "\n"));
    for (int i = 0; i < 3; i++) {
        text = find_listing(tour, names[i], &end), *end = 0;
        CU_ASSERT_PTR_NOT_NULL(strstr(found, text));
        *end = '`';
    }
    free(tour), free(words), free(found);
}

/* docs/EXPERIMENTS.md and its plots are what its script makes: here of those studies that take no time; of all of them in
 * `make experiments`. Python is not everywhere. */
static void the_experiments_are_what_their_script_makes(void) {
    if (!has_python()) return;
    char *said = printed_by("python3 -B scripts/experiments.py --check overlap block pages prediction stages", true);
    if (strstr(said, "writes it anew")) fprintf(stderr, "\n%s", said);
    free(said);
}

/* Every figure may differ by the tolerance of what is kept, and no word may. */
static void points_are_alike_if_all_their_figures_are(void) {
    if (!has_python()) return;
    CU_ASSERT(
        !system("python3 -B -c 'import sys; sys.path.insert(0, \"scripts\"); from experiments import alike\n"
                "kept = \"K = 3: 100.0, 8: 200.0\"\n"
                "asked = {kept: True, \"K = 3: 100.4, 8: 200.8\": True, \"K = 3: 100.0, 8: 202.0\": False,\n"
                "         \"K = 3: 102.0, 8: 200.0\": False, \"K = 3: 100.0, 8 200.0\": False, \"K = 3: 100.0\": False}\n"
                "sys.exit([alike(kept, new, .005) for new in asked] != [*asked.values()] or alike(\"1\", \"1.001\", 0))'"));
}

/* Lanes have a busy_s too, of which none is asked for. */
static void make_bench_reads_the_figures_of_a_run(void) {
    char names[] =
        "prefill_s decode_s decode_throughput dtoc.moved_bytes dtoc.busy_s ctog.moved_bytes gpu.busy_s cpu.busy_s";
    char command[1000], path[420], *save;
    snprintf(command, sizeof command,
             "./flexgen bench --device sim --hardware hardware/t4.json --model opt-125m --prompt-len 8 --gen-len 4 "
             "--gpu-batch-size 2 --num-gpu-batches 2 --percent 0 50 0 50 100 0 --cpu-cache-compute --json /tmp/run.json "
             ">/tmp/out\n"
             "eval \"$(sed -n '/^get()/,/^}/p' scripts/bench.sh)\"; tmp=/tmp/\n"
             "for name in %s; do get run $name; done\n",
             names);
    char *said = printed_by(command, false), *at = said;
    snprintf(path, sizeof path, "%srun.json", tmp_place());
    char *text = contents(path, NULL);
    cJSON *run = cJSON_Parse(text), *channels = cJSON_GetObjectItem(run, "channels");
    for (char *name = strtok_r(names, " ", &save); name; name = strtok_r(NULL, " ", &save)) {
        char *dot = strchr(name, '.');
        if (dot) *dot = 0;
        const cJSON *figure =
            dot ? cJSON_GetObjectItem(cJSON_GetObjectItem(channels, name), dot + 1) : cJSON_GetObjectItem(run, name);
        CU_ASSERT(cJSON_GetNumberValue(figure) > 0 && strtod(at, &at) == figure->valuedouble && *at++ == '\n');
    }
    CU_ASSERT(!*at);
    cJSON_Delete(run), free(text), free(said);
}

/* Three policies, each ten times as slow and as fast as the one before: the second is in the middle of both axes, where 10
 * and 20 are. */
static void a_frontier_is_drawn_where_its_figures_say(void) {
    static const char *const shown[] = {
        "<circle cx='473' cy='218'",
        "<text x='473' y='409' font-size='11' text-anchor='middle'>10<",
        "<text x='59' y='222' font-size='11' text-anchor='end'>20<",
        ">10 x 3 diagonal: 20 67.5 0 100 50 25, GPU attention<",
        ">100 x 3: 20 67.5 0 100 50 25<",
        ">m, s 8, n 4, h<",
    };
    if (!has_python()) return;
    FILE *out = fopen(in_dir(tmp_place(), "frontier.json"), "w");
    CHECK(out);
    fprintf(out, "{\"model\": \"m\", \"hardware\": \"h\", \"s\": 8, \"n\": 4, \"frontier\": [");
    for (int x = 1; x <= 100; x *= 10)
        fprintf(out,
                "%s{\"latency\": %d, \"throughput\": %d, \"gbs\": %d, \"num_gpu_batches\": 3, \"wg\": 0.2, \"wc\": 0.675, "
                "\"cg\": 0, \"cc\": 1, \"hg\": 0.5, \"hc\": 0.25, \"schedule\": \"%s\", \"cpu_cache_compute\": %s}",
                x > 1 ? ", " : "", x, 2 * x, x, x == 10 ? "diagonal" : "zigzag", x == 10 ? "false" : "true");
    fprintf(out, "]}");
    CHECK(!fclose(out));
    char *svg = printed_by("python3 -B scripts/plot_frontier.py /tmp/frontier.json /tmp/svg && cat /tmp/svg", false);
    for (size_t s = 0; s < sizeof shown / sizeof *shown; s++) {
        if (!strstr(svg, shown[s])) fprintf(stderr, "\n    the drawing has no %s", shown[s]);
        CU_ASSERT_PTR_NOT_NULL(strstr(svg, shown[s]));
    }
    free(svg);
}

/* What is measured depends on the machine and its load: only that there are figures. */
static void an_experiment_is_measured_on_the_host(void) {
    if (!has_python()) return;
    char *said = printed_by(
        "python3 -B scripts/experiments.py overlap pages --device host "
        "--flags '--model models/opt-tiny --prompt-len 4 --gen-len 2 --gpu-batch-size 2'",
        false);
    CU_ASSERT(strstr(said, "--no-overlap: 3: ") && !strstr(said, "96: 1045") && strstr(said, "Page size"));
    free(said);
}

/* docs/index.html is made from the tour and from runs by `make docs`, and is whole without the folders beside docs. */
static void the_page_is_made_of_the_tour_and_no_link_leads_out_of_docs(void) {
    const char *bin = getenv("FLEXGEN_BIN");
    char *page = contents("docs/index.html", NULL), command[500];
    snprintf(command, sizeof command, "FLEXGEN=%s python3 -B scripts/make_page.py --check", bin ? bin : "./flexgen");
    CU_ASSERT(writes() || !has_python() || !system(command)); /* what is written now makes the page old */
    for (char *at = page; (at = strstr(at, "href=\""));) {
        char path[300];
        at += strlen("href=\"");
        if (*at == '#' || !strncmp(at, "https:", 6)) continue;
        snprintf(path, sizeof path, "docs/%.*s", (int)strcspn(at, "\"#"), at);
        CU_ASSERT(!strstr(path, "..") && !access(path, R_OK));
    }
    free(page);
}

/* docs/explore.html is of these sources, and what it says is what the program says (more questions: .ci/run). */
static void the_search_in_the_browser_is_this_programs(void) {
    const char *bin = getenv("FLEXGEN_BIN");
    char command[500];
    if (!has_python()) return;
    CU_ASSERT(!system("python3 -B scripts/make_explore.py --check"));
    snprintf(command, sizeof command, "FLEXGEN=%s python3 -B scripts/explore_questions.py 8", bin ? bin : "./flexgen");
    CU_ASSERT(!system(command));
}

/* A hash of its sources does not cover the script that makes the page, which names the models that one can ask for. */
static void the_page_of_the_search_offers_every_model_that_the_program_knows(void) {
    char *page = contents("docs/explore.html", NULL),
         *data = strstr(page, "<script type=\"application/json\" id=\"data\">");
    CU_ASSERT_PTR_NOT_NULL_FATAL(data);
    data = strchr(data, '>') + 1;
    *strstr(data, "</script>") = 0;
    cJSON *json = cJSON_Parse(data), *model;
    char names[300] = "";
    cJSON_ArrayForEach(model, cJSON_GetObjectItem(json, "models"))
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", model->valuestring);
    CU_ASSERT_STRING_EQUAL(names, opt_known_names());
    cJSON_Delete(json), free(page);
    if (!has_python()) return;
    char *said = printed_by(
        "cd scripts && python3 -B -c 'import make_explore; print(*make_explore.MODELS, sep=\", \", end=\"\")'", false);
    CU_ASSERT_STRING_EQUAL(said, opt_known_names());
    free(said);
}

/* Those to files of the repository, from the document's folder. */
static void every_link_of_the_documents_leads_to_a_file(void) {
    glob_t found = {0};
    int count = 0;
    CU_ASSERT_EQUAL(glob("*.md", 0, NULL, &found), 0);
    CU_ASSERT_EQUAL(glob("*/*.md", GLOB_APPEND, NULL, &found), 0);
    CU_ASSERT_EQUAL(glob("results/*/*.md", GLOB_APPEND, NULL, &found), 0);
    for (size_t f = 0; f < found.gl_pathc; f++) {
        const char *path = found.gl_pathv[f], *slash = strrchr(path, '/');
        char *text = contents(path, NULL), to[400];
        for (const char *at = text; (at = strstr(at, "]("));) {
            at += strlen("](");
            const int len = (int)strcspn(at, ")# \n");
            if (!len || !strncmp(at, "http", 4)) continue;
            snprintf(to, sizeof to, "%.*s%.*s", slash ? (int)(slash + 1 - path) : 0, path, len, at);
            if (access(to, R_OK)) fprintf(stderr, "\n    %s: there is no %s", path, to);
            count++;
            CU_ASSERT_EQUAL(access(to, R_OK), 0);
        }
        free(text);
    }
    CU_ASSERT(count > 40);
    globfree(&found);
}

/* The file that a first comment names behind "Read next:", as it is or beside the one that names it. */
static bool next_of(char path[100], const char *from) {
    const char *slash = strrchr(from, '/');
    char *text = contents(from, NULL), *at = text, name[60];
    for (char *c = text; (c = strstr(c, "\n * "));)
        memmove(c + 1, c + 4, strlen(c + 4) + 1), *c = ' '; /* lines are filled */
    at = strstr(text, "Read next: ");
    if (!at) fprintf(stderr, "\n    %s names none", from);
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    at += strlen("Read next: ");
    if (*at == '`') at = strstr(at, " of ") + 4; /* a function of the file */
    int len = (int)strcspn(at, ",; \n");
    snprintf(name, sizeof name, "%.*s", len - (at[len - 1] == '.'), at);
    const size_t dir = slash ? (size_t)(slash + 1 - from) : 0;
    memcpy(path, from, dir);
    snprintf(path + dir, 100 - dir, "%s", name);
    if (access(path, R_OK)) snprintf(path, 100, "%s", name);
    free(text);
    return !access(path, R_OK);
}

/* From mini.c and flexgen.h to flexgen.c, which has main. */
static void what_to_read_next_leads_through_every_source_file(void) {
    enum { MOST = 200 };
    char read[MOST][100] = {"mini.c"};
    int n = 1;
    while (n < MOST && strcmp(read[n - 1], "flexgen.c") != 0 && next_of(read[n], read[n - 1])) n++;
    CU_ASSERT_STRING_EQUAL(read[n - 1], "flexgen.c");
    glob_t found = {0};
    static const char *const patterns[] = {"*.c", "*.cu", "device/*.c", "cost/*.c", "io/*.c", "base/*.c", "app/*.c"};
    for (int p = 0; p < 7; p++) CU_ASSERT_EQUAL(glob(patterns[p], p ? GLOB_APPEND : 0, NULL, &found), 0);
    for (size_t f = 0; f < found.gl_pathc; f++) {
        int times = 0;
        for (int i = 0; i < n; i++) times += !strcmp(read[i], found.gl_pathv[f]);
        if (times != 1) fprintf(stderr, "\n    %s is reached %d times", found.gl_pathv[f], times);
        CU_ASSERT_EQUAL(times, 1);
    }
    globfree(&found);
}

CU_TestInfo tests[] = {
    {"every listing of the tour is what the program says", every_listing_of_the_tour_is_what_the_program_says},
    {"the pictures of the tour are drawn from its trace and listings",
     the_pictures_of_the_tour_are_drawn_from_its_trace_and_listings},
    {"what README quotes is what the program prints", what_README_quotes_is_what_the_program_prints},
    {"every function that README finds in mini.c is there", every_function_that_README_finds_in_mini_c_is_there},
    {"make run prints what README says", make_run_prints_what_README_says},
    {"the program of the tour is that of its command", the_program_of_the_tour_is_that_of_its_command},
    {"the commands of the tour print what is below them", the_commands_of_the_tour_print_what_is_below_them},
    {"the commands of the experiments print what is below them", the_commands_of_the_experiments_print_what_is_below_them},
    {"the experiments are what their script makes", the_experiments_are_what_their_script_makes},
    {"points are alike if all their figures are", points_are_alike_if_all_their_figures_are},
    {"make bench reads the figures of a run", make_bench_reads_the_figures_of_a_run},
    {"a frontier is drawn where its figures say", a_frontier_is_drawn_where_its_figures_say},
    {"an experiment is measured on the host", an_experiment_is_measured_on_the_host},
    {"the page is made of the tour and no link leads out of docs",
     the_page_is_made_of_the_tour_and_no_link_leads_out_of_docs},
    {"the search in the browser is this program's", the_search_in_the_browser_is_this_programs},
    {"the page of the search offers every model that the program knows",
     the_page_of_the_search_offers_every_model_that_the_program_knows},
    {"every link of the documents leads to a file", every_link_of_the_documents_leads_to_a_file},
    {"what to read next leads through every source file", what_to_read_next_leads_through_every_source_file},
    CU_TEST_INFO_NULL,
};
