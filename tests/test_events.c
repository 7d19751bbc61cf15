/* test_events.c: whether the engine's events are enough, whatever the timing. The device here carries out each op when it
 * is posted, so that the bits are always right, and notes who touches which bytes. Beside that it keeps, for every op, what
 * the events alone promise to be over when it begins: earlier ops of its lane, those behind its `after`, those that the
 * posting thread has waited for, and what was over for those. Two ops that touch the same bytes, one of them writing,
 * without such a promise between them are a race, on whatever device, however seldom. Random small tasks and policies go
 * through it; each is compared with the same task on one tier, in one batch. It knows nothing of cells, nor of the table of
 * what ops read and write: of both it is the judge. */
#include "tests.h"

// ---------------------------------------------------------------------------------------------------------------
// The device: vector clocks and shadow memory
// ---------------------------------------------------------------------------------------------------------------

/* How many ops of each lane are known to be over. */
typedef struct {
    uint32_t over[NLANES];
} Clock;

/* Who touched two bytes (no type is smaller) since they were written last. The posting thread leaves no trace: what it has
 * done is over when the next op is posted. */
typedef struct {
    uint32_t written, read[NLANES]; /* numbers of ops; 0: none */
    Lane writer;
} Cell;
enum { CELL = 2 };

/* An op, and what is over when it has ended. */
typedef struct {
    Op op;
    Clock clock;
} Posted;

typedef struct {
    Device base;
    Reach reach;
    uint8_t *arena[NTIERS];
    Cell *cell[NTIERS];
    size_t bytes[NTIERS];
    Posted *posted[NLANES]; /* [1 + ops so far] */
    uint32_t n[NLANES];
    Clock waited; /* for the posting thread */
    Clock now;    /* for who touches memory now: an op, or with seq 0 the posting thread */
    Clock need;   /* what its bytes say must be over */
    Event self;
    const Op *op;                   /* it; NULL: the posting thread */
    bool blind;                     /* only notes who touches what, with activations of any type; nothing is computed */
    int races;                      /* cells, each time */
    int shown;                      /* that many of them, and of waits that no byte asks for, are printed */
    long ops, waits;                /* ops, and events that they waited for */
    long surplus;                   /* of these, those without which the rest would have been enough */
    long unexplained;               /* of these, those that surplus_kinds does not name */
    long unpacked, packed_products; /* matrices; products with packed weights */
    int most_moves;                 /* of a copy */
} Checker;

static void merge(Clock *clock, const Clock *other) {
    for (int lane = 0; lane < NLANES; lane++)
        if (other->over[lane] > clock->over[lane]) clock->over[lane] = other->over[lane];
}

static void print_op(const Checker *c, Lane lane, uint32_t seq) {
    const Op *op = &c->posted[lane][seq].op;
    fprintf(stderr, "%s %u (%s, kind %d, i %d, j %d, k %d)", lane_name[lane], seq, op_info[op->code].name, op->kind, op->i,
            op->j, op->k);
}

static void note_race(Checker *c, Tier tier, size_t at, const char *what, Lane lane, uint32_t seq) {
    const char *term = "?";
    if (c->races++ >= c->shown) return;
    for (int id = 0; id < NREGIONS; id++) {
        const Region *r = &c->reach.plan->region[id][tier];
        if (at >= r->offset && at - r->offset < r->bytes) term = r->name;
    }
    fprintf(stderr, "\n    %s, %s %s + %zu: ", what, tier_name[tier], term, at);
    if (c->self.seq)
        print_op(c, c->self.lane, (uint32_t)c->self.seq);
    else
        fprintf(stderr, "the posting thread");
    fprintf(stderr, " does not wait for ");
    print_op(c, lane, seq);
}

static void touch_bytes(Checker *c, Tier tier, size_t begin, size_t bytes, bool writes) {
    uint32_t seq = (uint32_t)c->self.seq;
    for (size_t at = begin / CELL; at < (begin + bytes + CELL - 1) / CELL; at++) {
        Cell *cell = &c->cell[tier][at];
        if (cell->written > c->need.over[cell->writer]) c->need.over[cell->writer] = cell->written;
        for (int lane = 0; writes && lane < NLANES; lane++)
            if (cell->read[lane] > c->need.over[lane]) c->need.over[lane] = cell->read[lane];
        if (cell->written > c->now.over[cell->writer])
            note_race(c, tier, at * CELL, writes ? "write after write" : "read after write", cell->writer, cell->written);
        for (int lane = 0; writes && lane < NLANES; lane++)
            if (cell->read[lane] > c->now.over[lane])
                note_race(c, tier, at * CELL, "write after read", (Lane)lane, cell->read[lane]);
        if (writes)
            *cell = (Cell){.written = seq, .writer = (Lane)c->self.lane};
        else
            cell->read[c->self.lane] = seq;
    }
}

/* What ops of a code have been seen to do with their views: 1 reads, 2 writes. */
static uint8_t seen[NCODES][MAX_VIEWS];

static bool lies_in(Tensor t, Tensor view) {
    const size_t size = type_bytes(view.type), at = t.offset - view.offset;
    return view.rows && t.tier == view.tier && t.offset >= view.offset && at < tensor_span(view) &&
           at % (view.ld * size) < view.cols * size;
}

/* Bytes of two views at once, such as of a residual that is y, tell nothing. */
static void note_use(const Op *op, Tensor t, bool writes) {
    int n = 0, found = 0;
    for (int v = 0; v < MAX_VIEWS; v++)
        if (lies_in(t, op->view[v])) n++, found = v;
    if (n == 1) seen[op->code][found] |= writes ? 2 : 1;
}

static void touch(Checker *c, Tensor t, bool writes) {
    if (c->op && c->op->code != OP_COPY && t.rows) note_use(c->op, t, writes);
    size_t row = t.cols * type_bytes(t.type);
    CHECK(!t.file && t.offset + tensor_span(t) <= c->bytes[t.tier]);
    reach_note(&c->reach, t);
    for (int r = 0; r < t.rows; r++) touch_bytes(c, t.tier, t.offset + r * t.ld * type_bytes(t.type), row, writes);
}

/* Notes the access and gives the address; NULL for no tensor. */
static void *reads(Checker *c, Tensor t) {
    touch(c, t, false);
    return t.rows ? c->arena[t.tier] + t.offset : NULL;
}
static void *writes(Checker *c, Tensor t) {
    touch(c, t, true);
    return t.rows ? c->arena[t.tier] + t.offset : NULL;
}

/* An op begins, and becomes who touches memory. */
static Checker *begin(Device *device, const Op *op) {
    Checker *c = (Checker *)device;
    memset(&c->need, 0, sizeof c->need);
    uint32_t seq = ++c->n[op->lane];
    if (!(seq & (seq - 1))) c->posted[op->lane] = xrealloc(c->posted[op->lane], 2 * (size_t)seq, sizeof(Posted));
    c->now = c->waited;
    if (seq > 1) merge(&c->now, &c->posted[op->lane][seq - 1].clock);
    for (int a = 0; a < op->nafter; a++) {
        Event e = op->after[a];
        CHECK(e.seq && e.seq <= c->n[e.lane] - (e.lane == (int)op->lane));
        merge(&c->now, &c->posted[e.lane][e.seq].clock);
    }
    c->now.over[op->lane] = seq;
    c->posted[op->lane][seq] = (Posted){*op, c->now};
    c->self = (Event){op->lane, seq};
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// Each code notes what it touches, by its own account and not by the table of reads and writes; the rest is the host's
// arithmetic
// ---------------------------------------------------------------------------------------------------------------

/* A copy, a fetch and a message have been carried out, or are not. */
static void carry_out(const Checker *c, const Op *op) {
    Op run = *op;
    if (c->blind || op->code == OP_COPY || op->code == OP_FETCH || op->code >= OP_RECEIVE) return;
    for (int v = 0; v < MAX_VIEWS; v++)
        if (run.view[v].rows) run.view[v].at = c->arena[run.view[v].tier] + run.view[v].offset;
    host_run(&run);
}

static void check_copy(Checker *c, const Op *op) {
    c->most_moves = imax(c->most_moves, op->nmoves);
    for (int i = 0; i < op->nmoves; i++) {
        Tensor to = op->moves[i].dst, from = op->moves[i].src;
        size_t bytes = type_bytes(to.type), row = to.cols * bytes;
        CHECK(to.rows == from.rows && to.cols == from.cols && to.type == from.type);
        const uint8_t *src = reads(c, from);
        uint8_t *dst = writes(c, to);
        for (int r = 0; r < to.rows; r++) memcpy(dst + r * to.ld * bytes, src + r * from.ld * bytes, row);
    }
}

static void check_embed(Checker *c, const Op *op) {
    reads(c, op->embed.idx), reads(c, op->embed.table);
    if (op->add) reads(c, op->embed.y);
    writes(c, op->embed.y);
}

static void check_layernorm(Checker *c, const Op *op) {
    reads(c, op->layernorm.x), reads(c, op->layernorm.w), reads(c, op->layernorm.b);
    writes(c, op->layernorm.y);
}

static void check_linear(Checker *c, const Op *op) {
    reads(c, op->linear.x), reads(c, op->linear.w), reads(c, op->linear.b), reads(c, op->linear.residual);
    writes(c, op->linear.y);
    c->packed_products += op->linear.w.type == U8;
}

static void check_unpack(Checker *c, const Op *op) {
    reads(c, op->unpack.packed), writes(c, op->unpack.w);
    c->unpacked++;
}

static void check_attend_prefill(Checker *c, const Op *op) {
    reads(c, op->prefilled.q), reads(c, op->prefilled.kv), reads(c, op->prefilled.start);
    writes(c, op->prefilled.o);
}

static void check_pack(Checker *c, const Op *op) { reads(c, op->pack.kv), writes(c, op->pack.packed); }

/* One token of a sequence: its entry of the page table is read. Which row it has in a tier's pages. */
static int find_token(Checker *c, const Op *op, Tensor pages, Tensor rows, int seq, int token) {
    Tensor entry = tensor_cols(tensor_rows(pages, seq, 1), token / op->page_tokens, 1);
    CHECK(seq >= 0 && seq < pages.rows && token >= 0 && token / op->page_tokens < (int)pages.ld);
    int row = *(int32_t *)reads(c, entry) * op->page_tokens + token % op->page_tokens;
    CHECK(row >= 0 && row < rows.rows);
    return row;
}

static void touch_token(Checker *c, const Op *op, Tensor pages, Tensor rows, int seq, int token, bool writes) {
    touch(c, tensor_rows(rows, find_token(c, op, pages, rows, seq, token), 1), writes);
}

static void check_attend(Checker *c, const Op *op) {
    Tensor k = op->attend.k, v = op->attend.v, pages = op->attend.pages;
    const int32_t *len = reads(c, op->attend.len);
    reads(c, op->attend.q);
    for (int r = 0; r < op->attend.o.rows; r++)
        for (int t = 0; t < len[r]; t++)
            touch_token(c, op, pages, k, r, t, false), touch_token(c, op, pages, v, r, t, false);
    writes(c, op->attend.o);
}

static void check_select(Checker *c, const Op *op) {
    const Tensor q = op->attend.q;
    const int32_t *len = reads(c, op->attend.len);
    reads(c, q);
    for (int r = 0; r < q.rows; r++)
        for (int t = 0; t < len[r]; t++) touch_token(c, op, op->attend.pages, op->attend.k, r, t, false);
    int32_t *tokens = writes(c, op->attend.tokens);
    writes(c, op->attend.weights);
    for (int r = 0; r < q.rows * op->nh && c->blind; r++, tokens += op->attend.tokens.cols / op->nh) {
        const int own = len[r / op->nh] - 1, n = sparse_tokens(op->sparsity, own + 1); /* the first ones, and its own */
        for (int i = 0; i < n; i++) tokens[i] = i < n - 1 ? i : own;
    }
}

/* One head's part of a row of V. */
static Tensor head_of(const Op *op, Tensor v, int row, int h) {
    int size = v.cols / op->nh;
    return tensor_cols(tensor_rows(v, row, 1), h * size, size);
}

static void check_fetch(Checker *c, const Op *op) {
    Tensor v = op->fetch.v, home = op->fetch.home_v, tokens = op->fetch.tokens;
    const int32_t *len = reads(c, op->fetch.len), *chosen = reads(c, tokens);
    int most = tokens.cols / op->nh;
    for (int r = 0; r < op->fetch.len.cols; r++)
        for (int h = 0; h < op->nh; h++)
            for (int i = 0; i < sparse_tokens(op->sparsity, len[r]) - 1; i++) {
                int token = chosen[((size_t)r * op->nh + h) * most + i];
                Tensor here = head_of(op, v, find_token(c, op, op->fetch.pages, v, r, token), h);
                const void *from = reads(c, head_of(op, home, find_token(c, op, op->fetch.home_pages, home, r, token), h));
                memcpy(writes(c, here), from, tensor_span(here));
            }
}

static void check_weigh(Checker *c, const Op *op) {
    Tensor v = op->attend.v, pages = op->attend.pages;
    const int32_t *len = reads(c, op->attend.len), *tokens = reads(c, op->attend.tokens);
    reads(c, op->attend.weights);
    for (int r = 0; r < op->attend.o.rows; r++)
        for (int h = 0; h < op->nh; h++, tokens += op->attend.tokens.cols / op->nh)
            for (int i = 0; i < sparse_tokens(op->sparsity, len[r]); i++)
                reads(c, head_of(op, v, find_token(c, op, pages, v, r, tokens[i]), h));
    writes(c, op->attend.o);
}

static void check_append(Checker *c, const Op *op) {
    Tensor k = op->append.k, v = op->append.v, kv = op->append.kv, pages = op->append.pages;
    const int32_t *seq = reads(c, op->append.seq), *pos = reads(c, op->append.pos);
    reads(c, kv);
    for (int r = 0; r < kv.rows; r++)
        touch_token(c, op, pages, k, seq[r], pos[r], true), touch_token(c, op, pages, v, seq[r], pos[r], true);
}

static void check_pick(Checker *c, const Op *op) {
    reads(c, op->pick.logits), reads(c, op->pick.prompt), reads(c, op->pick.pos);
    writes(c, op->pick.ids);
}

static void check_score(Checker *c, const Op *op) {
    reads(c, op->score.logits), reads(c, op->score.target);
    writes(c, op->score.logp), writes(c, op->score.best);
}

static void check_receive(Checker *c, const Op *op) { writes(c, op->state.x); }
static void check_send(Checker *c, const Op *op) { reads(c, op->state.x); }

/* Waits that no two bytes ask for: cells are coarser than bytes. Which lanes wait for which, and why that stays. */
static const struct {
    Lane lane, other;
    const char *reason;
} surplus_kinds[] = {
    {PROJECT, C_LOAD, "rows of one slot of x that other tiers bring; what follows needs all of them"},
    {C_LOAD, FINISH, "rows of a slot of x that went to rest on the GPU three squares ago; its other rows are waited for"},
    {C_LOAD, PROJECT, "the same of rows that came from the GPU's home"},
    {C_LOAD, STORE, "the same of rows that went to the tiers below"},
    {C_LOAD, ATTEND, "a batch's pages of a layer are one cell: those that are read, and one that only got a new token"},
    {FINISH, C_LOAD, "a new token goes into a staged page that no other page's past is copied to"},
    {ATTEND, C_LOAD, "pages of a layer again: a new token in a page of its own, beside those that are read"},
    {PROJECT, FINISH, "the same, where x comes from another stage: on one machine x has waited for more"},
    {ATTEND, C_READ, "the same of the disk's pages, staged on the CPU"},
    {D_WRITE, C_READ, "the same of the disk's pages at home"},
    {C_READ, D_WRITE, "the same the other way round"},
    {C_READ, C_LOAD, "staging of fewer rows than the slot had before"},
    {C_READ, ATTEND, "the same, where the CPU attends to what is staged"},
    {STORE, D_WRITE, "new k, v, and activations on their way to disk: fewer rows than the slot had before"},
    {A_DOWN, D_WRITE, "the same of new k, v that come down with the queries"},
    {PROJECT, STORE, "new k, v and x of a batch of fewer rows than the one that had the slot"},
    {PROJECT, A_DOWN, "the same of queries"},
    {A_UP, FINISH, "the same of the result of attention"},
    {W_LOAD, FINISH, "a part of a layer that is smaller than the one that had the slot"},
    {W_LOAD, PROJECT, "the same of the head, which had the slot"},
};

static bool is_explained(const Op *op, Event e) {
    for (size_t i = 0; i < sizeof surplus_kinds / sizeof *surplus_kinds; i++)
        if (surplus_kinds[i].lane == op->lane && (int)surplus_kinds[i].other == e.lane) return true;
    return false;
}

static bool covers(const Clock *clock, const Clock *need) {
    for (int lane = 0; lane < NLANES; lane++)
        if (need->over[lane] > clock->over[lane]) return false;
    return true;
}

/* The op has touched what it touches. Which of its events were not needed, the others being there? */
static void note_surplus(Checker *c, const Op *op) {
    uint32_t seq = (uint32_t)c->self.seq;
    c->ops++, c->waits += op->nafter;
    for (int left_out = 0; left_out < op->nafter; left_out++) {
        Clock without = c->waited;
        if (seq > 1) merge(&without, &c->posted[op->lane][seq - 1].clock);
        for (int a = 0; a < op->nafter; a++)
            if (a != left_out) merge(&without, &c->posted[op->after[a].lane][op->after[a].seq].clock);
        without.over[op->lane] = seq;
        if (!covers(&without, &c->need)) continue;
        c->surplus++;
        if (is_explained(op, op->after[left_out]) || c->unexplained++ >= c->shown) continue;
        fprintf(stderr, "\n    no byte asks for it: ");
        print_op(c, op->lane, seq);
        fprintf(stderr, " waits for ");
        print_op(c, (Lane)op->after[left_out].lane, (uint32_t)op->after[left_out].seq);
    }
}

/* An op begins, becomes who touches memory, and is carried out. */
static Event check_post(Device *device, const Op *op) {
    static void (*const check[NCODES])(Checker *, const Op *) = {
        [OP_COPY] = check_copy,           [OP_EMBED] = check_embed,
        [OP_LAYERNORM] = check_layernorm, [OP_LINEAR] = check_linear,
        [OP_UNPACK] = check_unpack,       [OP_PACK] = check_pack,
        [OP_ATTEND] = check_attend,       [OP_SELECT] = check_select,
        [OP_FETCH] = check_fetch,         [OP_WEIGH] = check_weigh,
        [OP_APPEND] = check_append,       [OP_PICK] = check_pick,
        [OP_SCORE] = check_score,         [OP_ATTEND_PREFILL] = check_attend_prefill,
        [OP_RECEIVE] = check_receive,     [OP_SEND] = check_send};
    Checker *c = begin(device, op);
    c->op = op;
    check[op->code](c, op);
    carry_out(c, op);
    c->op = NULL;
    note_surplus(c, op);
    return c->self;
}

/* Before the first op, and by several threads: nothing to note. */
static void check_upload(Device *device, Tensor dst, size_t first, const void *src, size_t count) {
    Checker *c = (Checker *)device;
    memcpy(c->arena[dst.tier] + dst.offset + first * type_bytes(dst.type), src, count * type_bytes(dst.type));
}

static int check_wait(Device *device, Event e, Error *err) {
    Checker *c = (Checker *)device;
    (void)err;
    if (e.seq) merge(&c->waited, &c->posted[e.lane][e.seq].clock);
    return 0;
}

/* The thread may do with it what it likes, until it posts the next op. */
static void *check_host(Device *device, Tensor t) {
    Checker *c = (Checker *)device;
    CHECK(t.tier == TIER_CPU);
    c->now = c->waited, c->self = (Event){0, 0};
    return writes(c, t);
}

static double check_now(Device *device) { return (void)device, 0; }

static void check_close(Device *device) {
    Checker *c = (Checker *)device;
    for (int t = 0; t < NTIERS; t++) free(c->arena[t]), free(c->cell[t]);
    for (int lane = 0; lane < NLANES; lane++) free(c->posted[lane]);
    free(c);
}

static const Device functions = {.name = "checker",
                                 .act_type = F32,
                                 .post = check_post,
                                 .upload = check_upload,
                                 .wait = check_wait,
                                 .host = check_host,
                                 .now = check_now,
                                 .close = check_close};

static Checker *checker_open(const Plan *plan) {
    Checker *c = xcalloc(1, sizeof *c);
    c->base = functions;
    reach_open(&c->reach, c->base.peak, plan);
    for (int t = 0; t < NTIERS; t++) {
        c->bytes[t] = t == TIER_DISK ? plan->offload_bytes : plan->total[t];
        c->arena[t] = memset(xcalloc(c->bytes[t], 1), 0xff, c->bytes[t]); /* not a number, no page, until it is written */
        c->cell[t] = xcalloc(c->bytes[t] / CELL + 1, sizeof(Cell));
    }
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// A trial: a small model, a task, what it gives in one batch on one tier
// ---------------------------------------------------------------------------------------------------------------

enum { PROMPTS = 16, MAX_S = 40, MAX_N = 10, VOCAB = 24 };

static struct {
    Checkpoint *model;
    Task task;
    Prompt prompts[PROMPTS];
    int32_t ids[PROMPTS][MAX_S + MAX_N];
    Policy policy;
    bool weights, cache; /* packed; for all of a trial's policies */
    Quant study;         /* of both, where they are not; bits 0: none */
    double sparsity;
    bool recording;                 /* the reference */
    bool blind;                     /* nothing is computed, so nothing is compared but who waits for whom */
    int packed_rows;                /* of a blind device: as Plan.packed_rows */
    long unpacked, packed_products; /* of the latest run, as in Checker */
    int most_moves;                 /* the same */
    Net *net;                       /* of a stage of a pipeline */
    int32_t tokens[PROMPTS][MAX_N];
    float logits[PROMPTS][MAX_N][VOCAB];
    float logp[PROMPTS][MAX_S + MAX_N]; /* of a scored task */
    int32_t best[PROMPTS][MAX_S + MAX_N];
    int scored[PROMPTS]; /* tokens so far */
    int stop[PROMPTS];   /* tokens at which the listener ends a sequence; 0: never */
    int done[PROMPTS];
    const char *wrong;        /* the first thing that was */
    long ops, waits, surplus; /* of all runs */
} trial;

static uint64_t dice;
static int roll(int low, int high) { return low + (int)((test_random(&dice) + 1.) / 2 * (high - low + 1)); }
static bool one_in(int n) { return roll(1, n) == 1; }

static void expect(bool ok, const char *what) {
    if (!ok && !trial.wrong) trial.wrong = what;
}

static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    (void)ctx;
    if (trial.recording || trial.blind) return false;
    expect(!trial.done[prompt], "a token after the end");
    expect(!memcmp(tokens, trial.tokens[prompt], n * sizeof *tokens), "tokens");
    return n == trial.stop[prompt];
}

static void on_logits(void *ctx, int prompt, int n, const float *logits) {
    size_t bytes = trial.model->config.vocab * sizeof *logits;
    (void)ctx;
    if (trial.blind) return;
    if (trial.recording)
        memcpy(trial.logits[prompt][n - 1], logits, bytes);
    else
        expect(!memcmp(trial.logits[prompt][n - 1], logits, bytes), "logits");
}

static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    (void)ctx;
    expect(at == trial.prompts[prompt].from + trial.scored[prompt]++, "every token is scored once, in order");
    if (trial.recording)
        trial.logp[prompt][at] = logp, trial.best[prompt][at] = best;
    else if (!trial.blind)
        expect(trial.logp[prompt][at] == logp && trial.best[prompt][at] == best, "scores");
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    int length = 0, wanted = trial.task.prompts[prompt].n, eos = trial.model->config.eos;
    bool stops = false;
    (void)ctx, (void)err;
    trial.done[prompt]++;
    if (trial.blind) return 0;
    if (trial.recording) memcpy(trial.tokens[prompt], tokens, n * sizeof *tokens);
    if (trial.task.scored) eos = -1; /* given tokens end nothing */
    while (length < wanted && !stops) {
        if ((stops = eos >= 0 && trial.tokens[prompt][length] == eos)) break; /* which is not part of the text */
        stops = ++length == trial.stop[prompt];
    }
    expect(n == length && reason == (stops ? FINISH_STOP : FINISH_LENGTH), "length");
    expect(!memcmp(tokens, trial.tokens[prompt], n * sizeof *tokens), "tokens");
    return 0;
}

/* Runs the trial's task under its policy on a checker of its own. */
static void run(void) {
    Error err = {0, ""};
    RunStats stats;
    bool early = trial.model->config.eos >= 0;
    for (int i = 0; i < PROMPTS; i++) early = early || trial.stop[i], trial.done[i] = trial.scored[i] = 0;
    Listener listener = {
        .done = on_done, .logits = on_logits, .scored = on_scored, .token = early || one_in(2) ? on_token : NULL};
    Plan *plan = plan_make(trial.model, &trial.policy, &trial.task, trial.blind ? F16 : F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Checker *c = checker_open(plan);
    if (trial.blind) plan->packed_rows = trial.packed_rows;
    c->shown = 2, c->blind = trial.blind, c->base.net = trial.net;
    trial.wrong = NULL;
    ASSERT_OK(weights_load(plan, trial.model, &c->base, &err));
    expect(!schedule_run(plan, &trial.task, &c->base, &listener, &stats, &err), "the run failed");
    for (int i = 0; i < trial.task.count; i++) expect(trial.done[i] == 1, "a prompt is done once");
    for (int i = 0; i < trial.task.count && trial.task.scored; i++) {
        const Prompt *q = &trial.prompts[i];
        expect(trial.stop[i] || trial.scored[i] == q->s + q->n - q->from, "all are scored");
    }
    for (int t = 0; t < NTIERS; t++) expect(c->base.peak[t] <= plan->total[t], "the plan is too small");
    expect(early || stats.sweeps == plan->sweeps, "sweeps");
    expect(!c->races, "races");
    expect(!c->unexplained, "an event that no byte asks for");
    trial.ops += c->ops, trial.waits += c->waits, trial.surplus += c->surplus;
    trial.unpacked = c->unpacked, trial.packed_products = c->packed_products, trial.most_moves = c->most_moves;
    check_close(&c->base);
    plan_free(plan);
}

/* packs: of whole groups, so that weights and cache can be packed. */
static void open_model(int l, bool packs) {
    int nh = packs ? 1 << roll(0, 2) : roll(1, 2), h1 = packs ? GROUP : nh * 4 * roll(1, 2);
    OptConfig config = {.name = "test",
                        .l = l,
                        .h1 = h1,
                        .h2 = packs ? GROUP * roll(1, 2) : 4 * roll(1, 4),
                        .nh = nh,
                        .vocab = roll(5, VOCAB),
                        .max_pos = MAX_S + MAX_N,
                        .embed = one_in(4) ? 4 * roll(1, 3) : h1,
                        .pre_norm = !one_in(4),
                        .final_norm = !one_in(4),
                        .eos = -1};
    trial.model = checkpoint_dummy(&config, dice);
}

static void clear_task(void) {
    trial.task = (Task){.prompts = trial.prompts, .sampling = {.temperature = !one_in(3), .top_p = 1, .seed = dice}};
}

static void add_prompt(int s, int n) {
    int i = trial.task.count++;
    for (int t = 0; t < s + n; t++) trial.ids[i][t] = roll(0, trial.model->config.vocab - 1);
    trial.prompts[i] =
        (Prompt){.ids = trial.ids[i], .s = s, .n = n, .from = one_in(3) ? 1 : roll(1, s + n - 1), .place = i};
}

/* Lengths of many kinds: all the same, all of one token (batches then follow each other without a cache to load), any. */
static void draw_task(void) {
    int kind = roll(0, 5), count = roll(1, PROMPTS), even_s = roll(1, 12), even_n = kind == 1 ? 1 : roll(1, MAX_N);
    clear_task();
    trial.task.scored = one_in(3);
    for (int i = 0; i < count; i++) {
        int s = one_in(10) ? roll(1, MAX_S) : roll(1, 12), n = one_in(10) ? 1 : roll(1, MAX_N);
        add_prompt(kind == 0 ? even_s : s, kind < 2 ? even_n : n);
    }
}

static void set_numbers(Policy *p) {
    p->weight_packed = trial.weights, p->cache_packed = trial.cache, p->sparsity = trial.sparsity;
    p->weight_study = trial.weights ? (Quant){0} : trial.study, p->cache_study = trial.cache ? (Quant){0} : trial.study;
    p->delegated = p->delegated || is_sparse(p);
}

/* Packed or not, rounded or not, dense or sparse. */
static void draw_numbers(void) {
    static const Quant studies[] = {{0, 0}, {0, 0}, {3, 8}, {4, 5}};
    const bool packs = trial.model->config.h1 % GROUP == 0;
    trial.weights = packs && roll(0, 4) > 1, trial.cache = packs && roll(0, 4) > 1, trial.study = studies[roll(0, 3)];
    trial.sparsity = one_in(3) ? .05 + .3 * roll(0, 3) : 1;
}

static void run_reference(void) {
    trial.policy = (Policy){.wg = 1, .cg = 1, .hg = 1, .gbs = trial.task.count, .num_gpu_batches = 1, .page_tokens = 16};
    set_numbers(&trial.policy);
    trial.recording = true;
    trial.task.keep_logits = !trial.task.scored;
    memset(trial.stop, 0, sizeof trial.stop);
    run();
    trial.recording = false;
}

static void draw_shares(double *gpu, double *cpu) {
    static const double share[] = {0, 0, 1, 1, .5, .3, .25, .7, .1};
    *gpu = share[roll(0, 8)], *cpu = one_in(3) ? 1 - *gpu : share[roll(0, 8)];
    if (*gpu + *cpu > 1) *cpu = 1 - *gpu;
}

static void draw_policy(void) {
    static const int page_tokens[] = {1, 2, 3, 5, 16, 64};
    Policy *p = &trial.policy;
    draw_shares(&p->wg, &p->wc), draw_shares(&p->cg, &p->cc), draw_shares(&p->hg, &p->hc);
    p->gbs = roll(1, 4), p->num_gpu_batches = roll(1, 5), p->flights = one_in(2) ? roll(1, 3) : 1;
    p->schedule = one_in(2) ? SCHEDULE_DIAGONAL : (Schedule)roll(0, 1); /* the diagonal has most to get wrong */
    p->delegated = one_in(2), p->overlap = !one_in(8), p->synchronize = one_in(16);
    p->page_tokens = page_tokens[roll(0, 5)], p->table_home = (Tier)roll(0, 2);
    p->piece_rows = one_in(2) ? roll(1, 30) : 0, p->workspaces = roll(2, 3);
    set_numbers(p);
    trial.task.keep_logits = !trial.task.scored && !one_in(4);
}

/* Sequences that end early: at some token of some prompt, wherever it comes, or where the listener says so. */
static void draw_stops(void) {
    int prompt = roll(0, trial.task.count - 1), some = one_in(2) ? roll(1, 4) : 0;
    trial.model->config.eos = one_in(3) ? trial.tokens[prompt][roll(0, trial.task.prompts[prompt].n - 1)] : -1;
    for (int i = 0; i < trial.task.count; i++) trial.stop[i] = some && one_in(some) ? roll(1, MAX_N) : 0;
}

/* Asserts that nothing was wrong; if something was, says under which policy. */
static bool passes(uint64_t seed) {
    const Policy *p = &trial.policy;
    CU_ASSERT_PTR_NULL(trial.wrong);
    if (!trial.wrong) return true;
    fprintf(stderr,
            "\n    seed %d: %s: %g %g %g %g %g %g, %d x %d x %d, %s, table %d, page %d%s%s; packed %d %d, sparsity %g; l "
            "%d, %d "
            "prompts, eos %d\n",
            (int)seed, trial.wrong, p->wg, p->wc, p->cg, p->cc, p->hg, p->hc, p->gbs, p->num_gpu_batches, flight_count(p),
            schedule_name[p->schedule], p->table_home, p->page_tokens, p->delegated ? ", CPU attention" : "",
            p->overlap ? "" : ", no overlap", p->weight_packed, p->cache_packed, p->sparsity, trial.model->config.l,
            trial.task.count, trial.model->config.eos);
    return false;
}

static void no_two_ops_touch_the_same_bytes_without_an_event_between_them(void) {
    enum { SEEDS = 60, POLICIES = 6 };
    bool ok = true;
    host_set_threads(1); /* the tensors are tiny */
    for (uint64_t seed = 0; seed < SEEDS && ok; seed++) {
        dice = seed << 32; /* far apart: the generator counts up from here */
        open_model(roll(1, 4), one_in(2));
        draw_task();
        draw_numbers();
        run_reference();
        ok = passes(seed);
        for (int i = 0; i < POLICIES && ok; i++) {
            draw_policy();
            draw_stops();
            run();
            ok = passes(seed);
        }
        checkpoint_close(trial.model);
    }
    host_set_threads(0);
    printf("%.2f events an op, %.1f%% of them more than bytes ask for ... ", (double)trial.waits / trial.ops,
           100. * trial.surplus / trial.waits);
    CU_ASSERT(trial.surplus < trial.waits / 20); /* coarse cells cost overlap, silently */
}

/* A device whose activations are halfs multiplies few rows with packed weights, or none, and unpacks them for more. */
static void nor_where_packed_weights_are_unpacked_first(void) {
    enum { SEEDS = 40 };
    bool ok = true;
    trial.blind = true;
    for (uint64_t seed = 0; seed < SEEDS && ok; seed++) {
        dice = (seed << 32) + 7;
        open_model(roll(1, 4), true);
        draw_task();
        draw_numbers();
        trial.weights = true, trial.packed_rows = one_in(3) ? 0 : roll(1, 30);
        memset(trial.stop, 0, sizeof trial.stop);
        draw_policy();
        run();
        ok = passes(seed);
        checkpoint_close(trial.model);
    }
    trial.blind = false, trial.packed_rows = 0;
}

/* Two batches of two prompts of 5 tokens, in pieces of a prompt: in prefill their 10 rows are too many for packed weights,
 * though no piece's are, and the first batch has them unpacked for both. The two rows that decode take them as they lie. */
static void weights_are_unpacked_once_and_only_for_batches_of_many_rows(void) {
    enum { L = 3, MATRICES = 6, PRODUCTS = 4, SWEEPS = 4, BATCHES = 2 }; /* q, k and v are one product */
    dice = 3;
    open_model(L, true);
    clear_task();
    for (int i = 0; i < 4; i++) add_prompt(5, SWEEPS);
    trial.weights = true, trial.blind = true;
    memset(trial.stop, 0, sizeof trial.stop);
    for (int rows = 9; rows <= 10; rows++) {
        trial.packed_rows = rows;
        trial.policy = (Policy){.wg = .5, .cg = 1, .hg = 1, .gbs = 2, .num_gpu_batches = BATCHES, .page_tokens = 16};
        trial.policy.piece_rows = 5, trial.policy.overlap = true;
        set_numbers(&trial.policy);
        run();
        passes(rows);
        CU_ASSERT_EQUAL(trial.unpacked, rows < 10 ? L * MATRICES : 0);
        CU_ASSERT_EQUAL(trial.packed_products, L * PRODUCTS * BATCHES * (SWEEPS - 1 + (rows < 10 ? 0 : 2)));
    }
    trial.blind = false, trial.packed_rows = 0;
    checkpoint_close(trial.model);
}

/* Of a pipeline one stage is here: the tokens that come round to it are any, and nobody is where it sends its own. */
static int receive_any(Net *net, int from, NetKind kind, void *bytes, size_t size, Error *err) {
    int32_t *ids = bytes;
    (void)err;
    CHECK(from == net->stages - 1 && kind == NET_TOKENS);
    for (size_t i = 0; i < size / sizeof *ids; i++) ids[i] = roll(0, trial.model->config.vocab - 1);
    return 0;
}

static int send_nowhere(Net *net, int to, NetKind kind, const void *bytes, size_t size, Error *err) {
    (void)bytes, (void)size, (void)err;
    CHECK(to < net->stage && kind == NET_TOKENS);
    return 0;
}

/* States are written before they are sent, and read before the next ones come to their place. */
static void nor_in_a_stage_of_a_pipeline(void) {
    enum { SEEDS = 80 };
    bool ok = true;
    trial.blind = true;
    for (uint64_t seed = 0; seed < SEEDS && ok; seed++) {
        dice = (seed << 32) + 11;
        open_model(roll(2, 4), one_in(2));
        draw_task();
        draw_numbers();
        draw_policy();
        memset(trial.stop, 0, sizeof trial.stop);
        const int l = trial.model->config.l, stages = roll(2, l), stage = (int)seed % stages, first = l * stage / stages;
        Checkpoint *whole = trial.model,
                   part = checkpoint_stage(whole, stage, stages, first, l * (stage + 1) / stages - first);
        part.config.eos = one_in(3) ? roll(0, part.config.vocab - 1) : -1;
        trial.model = &part;
        trial.net = &(Net){.stage = stage, .stages = stages, .receive = receive_any, .post = send_nowhere};
        run();
        ok = passes(seed);
        trial.net = NULL;
        checkpoint_close(whole);
    }
    trial.blind = false;
}

/* Of all that has run above. A residual has never been anything but y. */
static void the_table_of_ops_says_what_ops_do(void) {
    for (int code = OP_COPY + 1; code < NCODES; code++)
        for (int v = 0; v < MAX_VIEWS; v++) {
            const Use use = op_info[code].view[v];
            const bool same = use == WRITES ? seen[code][v] & 2 : seen[code][v] == (use == READS);
            if (code == OP_LINEAR && v == 4) continue;
            if (!same) fprintf(stderr, "\n    %s, view %d: seen %d", op_info[code].name, v, seen[code][v]);
            CU_ASSERT(same);
        }
}

/* Who reuses a workspace waits for what it held, and with it for nearly everything; batches whose members have all ended by
 * themselves reuse none. By hand, so that nothing but the events that a batch keeps of its cache is left: sequences in turn
 * have it on the GPU and off it, and there is one layer. */
static const struct {
    int gbs, num_gpu_batches, count, n, stop[PROMPTS];
} left_open[] = {
    /* In sweep 2 batches 0 and 1 turn out to be empty; in sweep 3 they are filled again, and batch 1 writes the tables that
     * its stores of sweep 1 read. */
    {1, 3, 5, 3, {2, 1}},
    /* In sweep 2 prompt 2 prefills in the entrance while the batch of its seat turns out to be empty; in sweep 3 it is
     * there and loads what the entrance has stored. */
    {2, 2, 4, 8, {2, 1}},
    /* In sweep 5 batch 0 is filled again, behind batch 1. In sweep 8 prompts 6 and 7 prefill in the entrance in the order
     * of their seats, both off the GPU, one in either batch; in sweep 9 batch 1 is the first to load what is its own. */
    {2, 2, 8, 8, {4, 4, 0, 3, 0, 1}},
};

static void what_a_batch_has_left_open_is_waited_for_when_others_are_gone(void) {
    dice = 2;
    open_model(1, false);
    for (size_t i = 0; i < sizeof left_open / sizeof *left_open; i++) {
        clear_task();
        for (int q = 0; q < left_open[i].count; q++) add_prompt(roll(1, 12), left_open[i].n);
        run_reference();
        passes(i);
        for (int disk = 0; disk < 2; disk++) {
            trial.policy = (Policy){.wg = 1, .cg = .5, .cc = disk ? 0 : .5, .hg = 1, .overlap = true, .page_tokens = 16};
            trial.policy.schedule = SCHEDULE_DIAGONAL, trial.policy.gbs = left_open[i].gbs;
            trial.policy.num_gpu_batches = left_open[i].num_gpu_batches;
            memcpy(trial.stop, left_open[i].stop, sizeof left_open[i].stop);
            run();
            passes(i);
        }
    }
    checkpoint_close(trial.model);
}

/* If prompt 0 takes its four sweeps, the long one comes to a seat on the CPU; when it stops early, to one on the GPU, where
 * nobody was to have as many pages. */
static void a_seat_has_pages_for_whoever_comes_to_it_when_others_stop_early(void) {
    dice = 9;
    open_model(1, false);
    clear_task();
    add_prompt(1, 4), add_prompt(1, 1), add_prompt(20, 2);
    run_reference();
    passes(0);
    for (int stop = 0; stop < 2; stop++) {
        trial.policy = (Policy){.wg = 1, .cg = .5, .cc = .5, .hg = 1, .overlap = true, .page_tokens = 1};
        trial.policy.schedule = SCHEDULE_DIAGONAL, trial.policy.gbs = 1, trial.policy.num_gpu_batches = 2;
        trial.stop[0] = stop;
        run();
        passes(stop);
    }
    checkpoint_close(trial.model);
}

/* Two prompts of one token, each a batch, that grow by a page a sweep in turn: no page of one has a neighbour, so each page
 * of the past is a move, its K and its V, from the disk to the CPU and on to the GPU. */
static void there_is_room_for_the_moves_of_pages_that_all_lie_apart(void) {
    enum { N = 40 };
    dice = 5;
    open_model(1, false);
    clear_task();
    for (int i = 0; i < 2; i++) add_prompt(1, N);
    trial.blind = true;
    trial.policy = (Policy){.wg = 1, .hg = 1, .gbs = 1, .num_gpu_batches = 2, .overlap = true, .page_tokens = 1};
    run();
    passes(0);
    CU_ASSERT_EQUAL(trial.most_moves, 2 * (N - 1));
    trial.blind = false;
    checkpoint_close(trial.model);
}

// ---------------------------------------------------------------------------------------------------------------
// The checker itself
// ---------------------------------------------------------------------------------------------------------------

enum { NOTHING, EARLIER_EVENT, EVENT, WAIT, LANE, THIRD_LANE, WAYS };

static Event post_copy(Checker *c, Lane lane, Event after, const Move *moves, int n) {
    Op op = op_copy((Call){.lane = lane}, moves, n);
    if (after.seq) op.after[op.nafter++] = after;
    return c->base.post(&c->base, &op);
}

/* Posts two copies, with so much between them, and returns how many races there are. */
static int races_of(const Plan *plan, Move first, Move second, int way) {
    const Event none = {0, 0};
    Checker *c = checker_open(plan);
    Event before = post_copy(c, W_LOAD, none, NULL, 0), end = post_copy(c, W_LOAD, none, &first, 1);
    if (way == WAIT) c->base.wait(&c->base, end, NULL);
    if (way == THIRD_LANE) end = post_copy(c, C_LOAD, end, NULL, 0);
    post_copy(c, way == LANE ? W_LOAD : STORE,
              way == EARLIER_EVENT            ? before
              : way == NOTHING || way == WAIT ? none
                                              : end,
              &second, 1);
    int races = c->races;
    check_close(&c->base);
    return races;
}

static void ops_without_an_event_are_races_and_with_one_they_are_none(void) {
    Error err;
    dice = 1;
    open_model(1, false);
    draw_task();
    trial.policy = (Policy){.wg = 1, .cg = 1, .hg = 1, .gbs = 2, .num_gpu_batches = 2, .page_tokens = 16};
    Plan *plan = plan_make(trial.model, &trial.policy, &trial.task, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    Tensor x = plan->weight[0][Q_W].home, y = plan->weight[0][K_W].home, z = plan->weight[0][V_W].home;
    const Move first = {x, y}, second[] = {{z, x}, {x, z}, {y, z}, {z, y}}; /* the last one only reads y, too */
    for (int way = 0; way < WAYS; way++)
        for (int i = 0; i < 4; i++)
            CU_ASSERT_EQUAL(races_of(plan, first, second[i], way), i < 3 && way <= EARLIER_EVENT ? x.rows * x.cols : 0);
    /* the posting thread is held to it as well */
    Tensor on_cpu = tensor_cols(plan_view(plan, INDEX_TABLES, TIER_CPU, 0, 0, 1), 0, 1);
    Tensor on_gpu = tensor_cols(plan_view(plan, INDEX_TABLES, TIER_GPU, 0, 0, 1), 0, 1);
    for (int waits = 0; waits < 2; waits++) {
        Checker *c = checker_open(plan);
        Event up = post_copy(c, C_LOAD, (Event){0, 0}, &(Move){on_gpu, on_cpu}, 1);
        if (waits) c->base.wait(&c->base, up, &err);
        c->base.host(&c->base, on_cpu);
        CU_ASSERT_EQUAL(c->races, waits ? 0 : 2); /* two cells of two bytes */
        check_close(&c->base);
    }
    plan_free(plan);
    checkpoint_close(trial.model);
}

CU_TestInfo tests[] = {
    {"ops without an event are races, and with one they are none",
     ops_without_an_event_are_races_and_with_one_they_are_none},
    {"what a batch has left open is waited for when others are gone",
     what_a_batch_has_left_open_is_waited_for_when_others_are_gone},
    {"a seat has pages for whoever comes to it when others stop early",
     a_seat_has_pages_for_whoever_comes_to_it_when_others_stop_early},
    {"there is room for the moves of pages that all lie apart", there_is_room_for_the_moves_of_pages_that_all_lie_apart},
    {"no two ops touch the same bytes without an event between them",
     no_two_ops_touch_the_same_bytes_without_an_event_between_them},
    {"nor where packed weights are unpacked first", nor_where_packed_weights_are_unpacked_first},
    {"weights are unpacked once, and only for batches of many rows",
     weights_are_unpacked_once_and_only_for_batches_of_many_rows},
    {"nor in a stage of a pipeline", nor_in_a_stage_of_a_pipeline},
    {"the table of ops says what ops do", the_table_of_ops_says_what_ops_do},
    CU_TEST_INFO_NULL,
};
