/* test_events.c: whether the engine's events are enough, whatever the timing. The device here carries out each op when it
 * is posted, so that the bits are always right, and notes who touches which bytes. Beside that it keeps, for every op, what
 * the events alone promise to be over when it begins: earlier ops of its lane, those behind its `after`, those that the
 * posting thread has waited for, and what was over for those. Two ops that touch the same bytes, one of them writing,
 * without such a promise between them are a race, on whatever device, however seldom. Random small tasks and policies go
 * through it; each is compared with the same task on one tier, in one batch. It knows nothing of cells, nor of the table of
 * what ops read and write: of both it is the judge. What ops wait for, by hand, is test_depend.c's; that real lanes keep to
 * it, test_schedule.c's. */
#include "tests.h"
#include "written.h"

// ---- the device: vector clocks and shadow memory --------------------------------------------------------------------

/* How many ops of each lane are known to be over. */
typedef struct {
    uint32_t over[NLANES];
} Clock;

/* Who touched two bytes (no type is smaller) since they were written last. The posting thread leaves no trace: what it has
 * done is over when the next op is posted. */
typedef struct {
    Event written;
    uint32_t read[NLANES]; /* numbers of ops; 0: none */
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
    bool blind;                     /* only notes who touches what, with activations of any type; nothing is computed */
    int races;                      /* cells, each time */
    int shown;                      /* that many of them, and of waits that no byte asks for, are printed */
    long waits;                     /* events that ops waited for */
    long surplus;                   /* of these, those without which the rest would have been enough */
    int unexplained;                /* of these, those that surplus_reason does not name */
    long unpacked, packed_products; /* matrices; products with packed weights */
    int most_moves;                 /* of a copy */
} Checker;

static void merge(Clock *clock, const Clock *other) {
    for (int lane = 0; lane < NLANES; lane++)
        if (other->over[lane] > clock->over[lane]) clock->over[lane] = other->over[lane];
}

/* Prints what is wrong between who touches memory now and an op, of the first ones. */
static void report(const Checker *c, int before, const char *what, Event e) {
    const Event pair[] = {c->self, e};
    if (before >= c->shown) return;
    fprintf(stderr, "\n    %s:", what);
    for (int i = 0; i < 2; i++) {
        if (!pair[i].seq) {
            fprintf(stderr, " the posting thread");
            continue;
        }
        const Op *op = &c->posted[pair[i].lane][pair[i].seq].op;
        fprintf(stderr, " %s %d (%s, i %d, j %d, k %d)", lane_name[op->lane], (int)pair[i].seq, op_info[op->code].name,
                op->i, op->j, op->k);
    }
}

/* Who touches memory now must come after this op. */
static void come_after(Checker *c, Event e, const char *what) {
    if (e.seq > c->need.over[e.lane]) c->need.over[e.lane] = e.seq;
    if (e.seq > c->now.over[e.lane]) report(c, c->races++, what, e);
}

static void touch(Checker *c, Tensor t, bool writes) {
    const size_t size = type_bytes(t.type);
    CHECK(!t.file && t.offset + tensor_span(t) <= c->bytes[t.tier]);
    reach_note(&c->reach, t);
    for (int r = 0; r < t.rows; r++) {
        const size_t begin = t.offset + r * t.ld * size, end = begin + t.cols * size;
        for (Cell *cell = &c->cell[t.tier][begin / CELL]; cell < &c->cell[t.tier][(end + CELL - 1) / CELL]; cell++) {
            if (cell->written.seq) come_after(c, cell->written, "touches what was written by");
            for (int lane = 0; writes && lane < NLANES; lane++)
                if (cell->read[lane]) come_after(c, (Event){lane, cell->read[lane]}, "writes what is read by");
            if (writes)
                *cell = (Cell){.written = c->self};
            else
                cell->read[c->self.lane] = c->self.seq;
        }
    }
}

static void *address(const Checker *c, Tensor t) { return c->arena[t.tier] + t.offset; }

/* Returns what is over when the newest op of its lane begins, without one of its events, or with all (-1). */
static Clock known(const Checker *c, const Op *op, int left_out) {
    const uint32_t seq = c->n[op->lane];
    Clock clock = c->waited;
    if (seq > 1) merge(&clock, &c->posted[op->lane][seq - 1].clock);
    for (int a = 0; a < op->nafter; a++) {
        const Event e = op->after[a];
        CHECK(e.seq && e.seq <= c->n[e.lane] - (e.lane == (int)op->lane));
        if (a != left_out) merge(&clock, &c->posted[e.lane][e.seq].clock);
    }
    clock.over[op->lane] = seq;
    return clock;
}

// ---- what each op touches, by this suite's own account and not by the table of reads and writes ---------------------

/* The views that are read (r) or written (w) as a whole, and those of which single tokens are (R, W), see touch_tokens. */
static const char uses_of[NCODES][MAX_VIEWS + 1] = {
    [OP_COPY] = "",           [OP_EMBED] = "wrr",      [OP_LAYERNORM] = "wrrr",      [OP_LINEAR] = "wrrrr",
    [OP_UNPACK] = "wr",       [OP_PACK] = "wr",        [OP_ATTEND_PREFILL] = "wrrr", [OP_ATTEND] = "wr__RRRr",
    [OP_SELECT] = "_rwwR_Rr", [OP_WEIGH] = "w_rr_RRr", [OP_FETCH] = "WRrRRr",        [OP_APPEND] = "WWrrrR",
    [OP_PICK] = "wrrr",       [OP_SCORE] = "wwrr",     [OP_RECEIVE] = "w",           [OP_SEND] = "r",
};

/* A token of a sequence: its entry of the page table is read, and its row in a tier's pages, or one head's part of that, is
 * read or written. Returns that view. */
enum { WHOLE = -1 };
static Tensor touch_token(Checker *c, const Op *op, Tensor pages, Tensor rows, int seq, int token, int head, bool writes) {
    const Tensor entry = tensor_cols(tensor_rows(pages, seq, 1), token / op->page_tokens, 1);
    CHECK(seq >= 0 && seq < pages.rows && token >= 0 && token / op->page_tokens < (int)pages.ld);
    touch(c, entry, false);
    const int row = *(int32_t *)address(c, entry) * op->page_tokens + token % op->page_tokens;
    CHECK(row >= 0 && row < rows.rows);
    Tensor t = tensor_rows(rows, row, 1);
    if (head != WHOLE) t = tensor_cols(t, head * (t.cols / op->nh), t.cols / op->nh);
    touch(c, t, writes);
    return t;
}

static void touch_tokens(Checker *c, const Op *op) {
    const bool fetch = op->code == OP_FETCH;
    if (op->code == OP_ATTEND || op->code == OP_SELECT) { /* K and V of all tokens, or only K */
        const int32_t *len = address(c, op->attend.len);
        for (int r = 0; r < op->attend.q.rows; r++)
            for (int t = 0; t < len[r]; t++) {
                touch_token(c, op, op->attend.pages, op->attend.k, r, t, WHOLE, false);
                if (op->code == OP_ATTEND) touch_token(c, op, op->attend.pages, op->attend.v, r, t, WHOLE, false);
            }
    }
    if (op->code == OP_APPEND) {
        const int32_t *seq = address(c, op->append.seq), *pos = address(c, op->append.pos);
        for (int r = 0; r < op->append.kv.rows; r++) {
            touch_token(c, op, op->append.pages, op->append.k, seq[r], pos[r], WHOLE, true);
            touch_token(c, op, op->append.pages, op->append.v, seq[r], pos[r], WHOLE, true);
        }
    }
    if (op->code != OP_WEIGH && !fetch) return;
    /* Of the chosen tokens a fetch brings V from its home, all but the new one's; OP_WEIGH reads it. */
    const Tensor v = fetch ? op->fetch.v : op->attend.v, pages = fetch ? op->fetch.pages : op->attend.pages;
    const Tensor tokens = fetch ? op->fetch.tokens : op->attend.tokens;
    const int32_t *len = address(c, fetch ? op->fetch.len : op->attend.len), *chosen = address(c, tokens);
    for (int r = 0; r < tokens.rows; r++)
        for (int h = 0; h < op->nh; h++, chosen += tokens.cols / op->nh)
            for (int i = 0; i < sparse_tokens(op->sparsity, len[r]) - fetch; i++) {
                const Tensor here = touch_token(c, op, pages, v, r, chosen[i], h, fetch);
                if (!fetch) continue;
                const Tensor home = touch_token(c, op, op->fetch.home_pages, op->fetch.home_v, r, chosen[i], h, false);
                memcpy(address(c, here), address(c, home), tensor_span(here));
            }
}

static bool ran[NCODES]; /* of all trials */

/* The op touches what it touches, and is carried out. */
static void carry_out(Checker *c, const Op *op) {
    Op run = *op;
    ran[op->code] = true;
    for (int v = 0; v < MAX_VIEWS; v++) {
        const char use = uses_of[op->code][v];
        if (use == 'r' || use == 'w') touch(c, op->view[v], use == 'w');
        if (run.view[v].rows) run.view[v].at = address(c, run.view[v]);
    }
    for (int i = 0; i < op->nmoves; i++) {
        const Tensor to = op->moves[i].dst, from = op->moves[i].src;
        CHECK(to.rows == from.rows && to.cols == from.cols && to.type == from.type);
        touch(c, from, false), touch(c, to, true);
        for (int r = 0; r < to.rows; r++) {
            const Tensor row = tensor_rows(to, r, 1);
            memcpy(address(c, row), address(c, tensor_rows(from, r, 1)), tensor_span(row));
        }
    }
    touch_tokens(c, op);
    c->most_moves = imax(c->most_moves, op->nmoves), c->unpacked += op->code == OP_UNPACK;
    c->packed_products += op->code == OP_LINEAR && op->linear.w.type == U8;
    if (!c->blind && op->code != OP_COPY && op->code != OP_FETCH && op->code < OP_RECEIVE) host_run(&run);
}

/* Waits that no two bytes ask for, since pages and a weight slot on the GPU are used as a whole, and an op that uses pages
 * says which table has them and not which pages. Which lanes wait for which, and why that stays. */
static const char *const surplus_reason[NLANES][NLANES] = {
    [C_LOAD][ATTEND] = "a batch's pages of a layer are one cell: those that are read, and one that only got a new token",
    [ATTEND][C_LOAD] = "pages of a layer again: a new token in a page of its own, beside those that are read",
    [D_WRITE][C_READ] = "the same of the disk's pages at home",
    [C_READ][D_WRITE] = "the same the other way round",
    [FINISH][C_LOAD] = "a new token goes into a staged page that no other page's past is copied to",
    [ATTEND][C_READ] = "the same of the disk's pages, staged on the CPU",
    [W_LOAD][FINISH] = "a part of a layer that is smaller than the one that had the slot",
    [W_LOAD][PROJECT] = "the same of the head, which had the slot",
};

/* An op begins, becomes who touches memory, and is carried out. Then its events are counted that the others made
 * needless. */
static Event check_post(Device *device, const Op *op) {
    Checker *c = (Checker *)device;
    const uint32_t seq = ++c->n[op->lane];
    c->posted[op->lane] = with_room(c->posted[op->lane], seq, sizeof(Posted));
    c->now = known(c, op, -1);
    c->need = (Clock){{0}};
    c->posted[op->lane][seq] = (Posted){*op, c->now};
    c->self = (Event){op->lane, seq};
    carry_out(c, op);
    c->waits += op->nafter;
    for (int left_out = 0; left_out < op->nafter; left_out++) {
        const Clock without = known(c, op, left_out);
        Clock enough = without;
        merge(&enough, &c->need);
        if (memcmp(&enough, &without, sizeof enough)) continue;
        c->surplus++;
        if (!surplus_reason[op->lane][op->after[left_out].lane])
            report(c, c->unexplained++, "waits, though no byte asks for it, for", op->after[left_out]);
    }
    return c->self;
}

/* Before the first op, and by several threads: nothing to note. */
static void check_upload(Device *device, Tensor dst, size_t first, const void *src, size_t count) {
    Checker *c = (Checker *)device;
    memcpy((uint8_t *)address(c, dst) + first * type_bytes(dst.type), src, count * type_bytes(dst.type));
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
    touch(c, t, true);
    return address(c, t);
}

static double check_now(Device *device) { return (void)device, 0; }

static void check_close(Device *device) {
    Checker *c = (Checker *)device;
    for (int t = 0; t < NTIERS; t++) free(c->arena[t]), free(c->cell[t]);
    for (int lane = 0; lane < NLANES; lane++) free(c->posted[lane]);
    free(c);
}

static Checker *checker_open(const Plan *plan) {
    Checker *c = xcalloc(1, sizeof *c);
    c->base = (Device){.act_type = F32,
                       .post = check_post,
                       .upload = check_upload,
                       .wait = check_wait,
                       .cpu_address = check_host,
                       .now = check_now,
                       .close = check_close};
    reach_open(&c->reach, c->base.peak, plan);
    for (int t = 0; t < NTIERS; t++) {
        c->bytes[t] = t == TIER_DISK ? plan->offload_bytes : plan->total[t];
        c->arena[t] = memset(xcalloc(c->bytes[t], 1), 0xff, c->bytes[t]); /* not a number, no page, until it is written */
        c->cell[t] = xcalloc(c->bytes[t] / CELL + 1, sizeof(Cell));
    }
    return c;
}

// ---- a trial: a small model, a task, what it gives in one batch on one tier -----------------------------------------

enum { PROMPTS = 16, MAX_S = 40, MAX_N = 10, VOCAB = 24 };

static struct {
    uint64_t seed;
    Checkpoint *model;
    Task task;
    Policy policy;
    Rig reference;       /* without prompts: none */
    bool blind;          /* nothing is computed, nor are tokens selected: only who waits for whom is compared */
    int packed_rows;     /* of a blind device: as Plan.packed_rows */
    Net *net;            /* of a stage of a pipeline */
    int stop[PROMPTS];   /* tokens at which the listener ends a sequence; 0: never */
    const char *wrong;   /* the first thing in the latest run that was */
    Checker latest;      /* what that run's has counted */
    long waits, surplus; /* of all runs */
} trial;

static uint64_t dice;
static int roll(int low, int high) { return low + test_below(&dice, high - low + 1); }
static bool one_in(int n) { return roll(1, n) == 1; }

static void expect(bool ok, const char *what) {
    if (!ok && !trial.wrong) trial.wrong = what;
}

static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    const Rig *r = ctx;
    (void)tokens;
    expect(!r->answer[prompt].done, "a token after the end");
    return n == trial.stop[prompt];
}

/* What was heard of a prompt is complete, and what the reference heard, if there is one, up to where it stops: behind so
 * many tokens, or before one that ends a text. In a scored task given tokens end nothing. */
static void check_answer(const Answer *a, int prompt) {
    const Prompt *p = &trial.task.prompts[prompt];
    const OptConfig *c = &trial.model->config;
    const int eos = trial.task.scored ? -1 : c->eos, other = trial.task.scored || !c->nmore ? -1 : c->more_eos[0];
    const int vocab = c->vocab;
    int length = 0;
    expect(a->done == 1, "a prompt is done once");
    expect(a->scored >= 0, "every token is scored once, in order");
    expect(!trial.task.scored || trial.stop[prompt] || a->scored == p->s + p->n - p->from, "all are scored");
    if (!trial.reference.prompts) return;
    const Answer *all = &trial.reference.answer[prompt];
    while (length < p->n && all->tokens[length] != eos && all->tokens[length] != other && ++length != trial.stop[prompt])
        continue;
    const bool stops = length < p->n || length == trial.stop[prompt];
    expect(a->n == length && a->reason == (stops ? FINISH_STOP : FINISH_LENGTH), "length");
    expect(!memcmp(a->tokens, all->tokens, a->n * sizeof *a->tokens), "tokens");
    expect(!a->steps || !memcmp(a->steps, all->steps, a->n * vocab * sizeof *a->steps), "logits");
    if (!trial.task.scored || a->scored < 0) return;
    expect(!memcmp(a->logp + p->from, all->logp + p->from, a->scored * sizeof *a->logp), "scores");
    expect(!memcmp(a->best + p->from, all->best + p->from, a->scored * sizeof *a->best), "greedy choices");
}

/* Runs the trial's task under its policy on a checker of its own. Nothing may be wrong; if something is, says under which
 * policy. kept: where the rig stays, for the reference, whose policy is that of open_trial; NULL: it is closed. */
static void run(Rig *kept) {
    bool early = trial.model->config.eos >= 0 || trial.model->config.nmore;
    for (int i = 0; i < PROMPTS; i++) early = early || trial.stop[i];
    Rig r = {.model = trial.model, .policy = trial.policy, .task = &trial.task, .hears = {.ctx = &r}};
    if (early || one_in(2)) r.hears.token = on_token;
    r.plan = plan_make(trial.model, &trial.policy, &trial.task, trial.blind ? F16 : F32, &r.err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(r.plan);
    Checker *c = checker_open(r.plan);
    if (trial.blind) r.plan->packed_rows = trial.packed_rows;
    c->shown = 2, c->blind = trial.blind, c->base.net = trial.net;
    r.device = &c->base;
    trial.wrong = NULL;
    CU_ASSERT_EQUAL_FATAL(weights_load(r.plan, trial.model, r.device, &r.err), 0);
    expect(!rig_run(&r), "the run failed");
    for (int i = 0; i < r.prompts; i++) check_answer(&r.answer[i], i);
    for (int t = 0; t < NTIERS; t++) expect(r.peak[t] <= r.planned[t], "the plan is too small");
    expect(early || r.stats.sweeps == r.plan->sweeps, "sweeps");
    expect(!c->races, "races");
    expect(!c->unexplained, "an event that no byte asks for");
    if (trial.wrong) say_policy(&trial.policy), fprintf(stderr, "seed %llx: %s\n", (long long)trial.seed, trial.wrong);
    CU_ASSERT_PTR_NULL_FATAL(trial.wrong);
    trial.waits += c->waits, trial.surplus += c->surplus;
    trial.latest = *c;
    rig_stop(&r);
    if (kept)
        *kept = r;
    else
        rig_close(&r);
}

/* Opens a trial of these lengths, with a random model; packs: of whole groups, so that weights and cache can be packed.
 * What a trial may have besides is at first not there. */
static void open_trial(uint64_t seed, int l, bool packs, int count, const int *s, const int *n) {
    host_set_threads(1); /* the tensors are tiny */
    dice = trial.seed = seed;
    const int nh = packs ? 1 << roll(0, 2) : roll(1, 2), h1 = packs ? GROUP : nh * 4 * roll(1, 2);
    OptConfig config = TEST_CONFIG(l, h1, packs ? GROUP * roll(1, 2) : 4 * roll(1, 4), nh, roll(5, VOCAB), -1);
    config.max_pos = MAX_S + MAX_N, config.embed = one_in(4) ? 4 * roll(1, 3) : h1;
    config.pre_norm = !one_in(4), config.final_norm = !one_in(4);
    trial.model = checkpoint_dummy(&config, dice);
    trial.blind = false, trial.packed_rows = 0, trial.net = NULL;
    trial.task = random_task(count, s, n, config.vocab, dice);
    sample(&trial.task, (Sampling){.temperature = !one_in(3), .top_p = 1, .seed = dice});
    for (int i = 0; i < count; i++) trial.task.prompts[i].from = one_in(3) ? 1 : roll(1, s[i] + n[i] - 1);
    memset(trial.stop, 0, sizeof trial.stop);
    trial.policy = all_gpu(count, 1);
    trial.policy.overlap = false;
}

static void close_trial(void) {
    rig_close(&trial.reference);
    free_task(&trial.task);
    checkpoint_close(trial.model);
}

/* Opens a random trial. Seeds are far apart, since the generator counts up from them. Lengths are of many kinds: all the
 * same, all of one token (batches then follow each other without a cache to load), any. Packed or not, rounded or not,
 * dense or sparse are all policies of a trial. */
static void open_random(uint64_t seed, int least_layers, bool packs) {
    static const Quant studies[] = {{0, 0}, {0, 0}, {3, 8}, {4, 5}};
    dice = ~seed; /* The lengths must not be drawn from the same numbers as the model, which begins at seed. */
    const int kind = roll(0, 5), count = roll(1, PROMPTS);
    int s[PROMPTS], n[PROMPTS];
    s[0] = roll(1, 12), n[0] = kind == 1 ? 1 : roll(1, MAX_N);
    for (int i = 1; i < count; i++) {
        s[i] = kind == 0 ? s[0] : one_in(10) ? roll(1, MAX_S) : roll(1, 12);
        n[i] = kind < 2 ? n[0] : one_in(10) ? 1 : roll(1, MAX_N);
    }
    open_trial(seed, roll(least_layers, 4), packs || one_in(2), count, s, n);
    trial.task.scored = one_in(3);
    trial.task.keep_logits = !trial.task.scored;
    const bool can_pack = trial.model->config.h1 % GROUP == 0;
    Policy *p = &trial.policy;
    p->weight_packed = can_pack && roll(0, 4) > 1;
    p->head_packed = p->weight_packed && trial.model->config.embed % GROUP == 0 && one_in(2);
    p->cache_packed = can_pack && roll(0, 4) > 1;
    const Quant study = studies[roll(0, 3)];
    if (!p->weight_packed) p->weight_study = study;
    if (!p->cache_packed) p->cache_study = study;
    p->sparsity = one_in(3) ? .05 + .3 * roll(0, 3) : 1, p->delegated = is_sparse(p);
}

static void draw_policy(void) {
    static const int page_tokens[] = {1, 2, 3, 5, 16, 64};
    Policy *p = &trial.policy;
    p->gbs = roll(1, 4), p->num_gpu_batches = roll(1, 5);
    for (int what = 0; what < 6; what += 2) draw_shares(&p->share[what], &p->share[what + 1], &dice);
    p->flights = one_in(2) ? roll(1, 3) : 1;
    p->schedule = one_in(2) ? SCHEDULE_DIAGONAL : roll(0, 1); /* the diagonal has most to get wrong */
    p->delegated = one_in(2) || is_sparse(p), p->overlap = !one_in(8), p->synchronize = one_in(16);
    p->page_tokens = page_tokens[roll(0, 5)], p->table_home = roll(0, 2);
    p->piece_rows = one_in(2) ? roll(1, 30) : 0, p->workspaces = roll(2, 3);
    trial.task.keep_logits = !trial.task.scored && !one_in(4);
}

/* Sequences end early, too: at some token of some prompt, wherever it comes, or where the listener says so. */
TEST(no_two_ops_touch_the_same_bytes_without_an_event_between_them) {
    enum { SEEDS = 60, POLICIES = 6 };
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        if (!test_takes(seed)) continue;
        open_random(seed << 32, 1, false);
        run(&trial.reference);
        for (int i = 0; i < POLICIES; i++) {
            draw_policy();
            const int prompt = roll(0, trial.task.count - 1), some = one_in(2) ? roll(1, 4) : 0;
            const int at = roll(0, trial.task.prompts[prompt].n - 1);
            trial.model->config.eos = one_in(3) ? trial.reference.answer[prompt].tokens[at] : -1;
            trial.model->config.nmore = one_in(3);
            trial.model->config.more_eos[0] = trial.reference.answer[0].tokens[trial.task.prompts[0].n - 1];
            for (int q = 0; q < trial.task.count; q++) trial.stop[q] = some && one_in(some) ? roll(1, MAX_N) : 0;
            run(NULL);
        }
        close_trial();
    }
    CU_ASSERT(trial.surplus < trial.waits / 100); /* what is used as a whole costs overlap, silently */
}

/* A device whose activations are halfs multiplies few rows with packed weights, or none, and unpacks them for more. */
TEST(nor_where_packed_weights_are_unpacked_first) {
    for (uint64_t seed = 0; seed < 40; seed++) {
        if (!test_takes(seed)) continue;
        open_random((seed << 32) + 7, 1, true);
        trial.policy.weight_packed = true, trial.policy.weight_study = (Quant){0}, trial.policy.sparsity = 1;
        trial.blind = true, trial.packed_rows = one_in(3) ? 0 : roll(1, 30);
        draw_policy();
        run(NULL);
        close_trial();
    }
}

/* Batches of two prompts, in pieces of a prompt of 5 tokens: in prefill the 10 rows of the first and the third batch are
 * too many for packed weights, though no piece's are, and the first has them unpacked for both. The second batch, and the
 * rows that decode, take them as they lie. */
TEST(weights_are_unpacked_once_and_only_for_batches_of_many_rows) {
    enum { L = 3, MATRICES = 6, PRODUCTS = 4, SWEEPS = 4, BATCHES = 3 }; /* q, k and v are one product */
    open_trial(3, L, true, 6, (int[]){5, 5, 1, 1, 5, 5}, (int[]){SWEEPS, SWEEPS, SWEEPS, SWEEPS, SWEEPS, SWEEPS});
    trial.blind = true;
    trial.policy = on_tiers(.5, 0, 1, 0, 1, 0, 2, BATCHES);
    trial.policy.piece_rows = 5, trial.policy.weight_packed = true;
    for (int rows = 9; rows <= 10; rows++) {
        trial.packed_rows = rows;
        run(NULL);
        CU_ASSERT_EQUAL(trial.latest.unpacked, rows < 10 ? L * MATRICES : 0);
        CU_ASSERT_EQUAL(trial.latest.packed_products, L * PRODUCTS * (BATCHES * (SWEEPS - 1) + (rows < 10 ? 1 : 5)));
    }
    close_trial();
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
TEST(nor_in_a_stage_of_a_pipeline) {
    for (uint64_t seed = 0; seed < 80; seed++) {
        open_random((seed << 32) + 11, 2, false);
        trial.policy.sparsity = 1;
        draw_policy();
        trial.blind = true;
        const int l = trial.model->config.l, stages = roll(2, l), stage = (int)seed % stages, first = l * stage / stages;
        Checkpoint *whole = trial.model,
                   part = checkpoint_stage(whole, stage, stages, first, l * (stage + 1) / stages - first);
        part.config.eos = one_in(3) ? roll(0, part.config.vocab - 1) : -1;
        trial.model = &part;
        trial.net = &(Net){.stage = stage, .stages = stages, .receive = receive_any, .post = send_nowhere};
        run(NULL);
        trial.model = whole;
        close_trial();
    }
}

/* All of them have run above. */
TEST(the_table_of_ops_says_what_ops_do) {
    for (int code = OP_COPY + 1; code < NCODES; code++) {
        CU_ASSERT(ran[code]);
        for (int v = 0; v < MAX_VIEWS; v++) {
            const char use = uses_of[code][v];
            const bool reads = use == 'r' || use == 'R', writes = use == 'w' || use == 'W';
            CU_ASSERT_EQUAL(op_info[code].view[v], reads ? READS : writes ? WRITES : UNUSED);
        }
    }
}

/* Who reuses a workspace waits for what it held, and with it for nearly everything; batches whose members have all ended by
 * themselves reuse none. By hand, so that nothing but the events that a batch keeps of its cache is left: sequences in turn
 * have it on the GPU and off it, and there is one layer. s and n: of each third prompt. */
static const struct {
    int gbs, num_gpu_batches, count, page_tokens, s[3], n[3], stop[PROMPTS];
} left_open[] = {
    /* In sweep 2 batches 0 and 1 turn out to be empty; in sweep 3 they are filled again, and batch 1 writes the tables that
     * its stores of sweep 1 read. */
    {1, 3, 5, 16, {7, 1, 9}, {3, 3, 3}, {2, 1}},
    /* In sweep 2 prompt 2 prefills in the entrance while the batch of its seat turns out to be empty; in sweep 3 it is
     * there and loads what the entrance has stored. */
    {2, 2, 4, 16, {7, 1, 9}, {8, 8, 8}, {2, 1}},
    /* In sweep 5 batch 0 is filled again, behind batch 1. In sweep 8 prompts 6 and 7 prefill in the entrance in the order
     * of their seats, both off the GPU, one in either batch; in sweep 9 batch 1 is the first to load what is its own. */
    {2, 2, 8, 16, {7, 1, 9}, {8, 8, 8}, {4, 4, 0, 3, 0, 1}},
    /* If prompt 0 takes its four sweeps, the long one comes to a seat off the GPU; when it stops early, to one on the GPU,
     * where nobody was to have as many pages. */
    {1, 2, 3, 1, {1, 1, 20}, {4, 1, 2}, {0}},
    {1, 2, 3, 1, {1, 1, 20}, {4, 1, 2}, {1}},
};

TEST(what_a_batch_has_left_open_is_waited_for_when_others_are_gone) {
    for (size_t i = 0; i < COUNT(left_open); i++) {
        int s[PROMPTS], n[PROMPTS];
        for (int q = 0; q < PROMPTS; q++) s[q] = left_open[i].s[q % 3], n[q] = left_open[i].n[q % 3];
        open_trial(2, 1, false, left_open[i].count, s, n);
        trial.task.keep_logits = true;
        sample(&trial.task, (Sampling){.temperature = i % 2, .top_p = 1});
        run(&trial.reference);
        for (int disk = 0; disk < 2; disk++) {
            trial.policy = on_tiers(1, 0, .5, disk ? 0 : .5, 1, 0, left_open[i].gbs, left_open[i].num_gpu_batches);
            trial.policy.schedule = SCHEDULE_DIAGONAL, trial.policy.page_tokens = left_open[i].page_tokens;
            memcpy(trial.stop, left_open[i].stop, sizeof left_open[i].stop);
            run(NULL);
        }
        close_trial();
    }
}

/* Two prompts of one token, each a batch, that grow by a page a sweep in turn: no page of one has a neighbour, so each page
 * of the past is a move, its K and its V, from the disk to the CPU and on to the GPU. */
TEST(there_is_room_for_the_moves_of_pages_that_all_lie_apart) {
    enum { N = 40 };
    open_trial(5, 1, false, 2, (int[]){1, 1}, (int[]){N, N});
    trial.blind = true;
    trial.policy = on_tiers(1, 0, 0, 0, 1, 0, 1, 2);
    trial.policy.page_tokens = 1;
    run(NULL);
    CU_ASSERT_EQUAL(trial.latest.most_moves, 2 * (N - 1));
    close_trial();
}

// ---- the checker itself ---------------------------------------------------------------------------------------------

/* W_LOAD copies a row from the CPU to the GPU; then another lane copies the same row, or the posting thread writes it, with
 * nothing between them, an earlier event of W_LOAD, or its event. */
TEST(ops_without_an_event_are_races_and_with_one_they_are_none) {
    enum { N = 3, WAYS = 3, POSTER = NLANES /* as a lane: the posting thread */ };
    static const struct {
        int lane, races;
    } seconds[] = {{STORE, 2 * N}, {C_LOAD, N}, {W_READ, N}, {D_WRITE, 0}, {POSTER, N}}; /* D_WRITE only reads, too */
    Error err;
    Tensor on[NTIERS];
    open_trial(1, 1, false, 3, (int[]){1, 1, 1}, (int[]){1, 1, 1});
    trial.policy = on_tiers(1, 0, .34, .33, 1, 0, 3, 1);
    Plan *plan = plan_make(trial.model, &trial.policy, &trial.task, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    for (int t = 0; t < NTIERS; t++) on[t] = plan_view(plan, KV_CACHE, t, 0, 0, 1);
    for (size_t i = 0; i < COUNT(seconds) * WAYS; i++) {
        const int lane = seconds[i / WAYS].lane;
        Checker *c = checker_open(plan);
        Device *device = &c->base;
        const Event earlier = post_row(device, (Call){.lane = W_LOAD}, on, 0, 0, no_event);
        const Event first = post_row(device, (Call){.lane = W_LOAD}, on, 0, N, no_event);
        const Event ways[WAYS] = {no_event, earlier, first};
        const Event after = ways[i % WAYS];
        if (lane == POSTER) {
            device->wait(device, after, &err);
            device->cpu_address(device, tensor_cols(on[TIER_CPU], 0, N));
        } else {
            post_row(device, (Call){.lane = lane}, on, 0, N, after);
        }
        CU_ASSERT_EQUAL(c->races, i % WAYS < 2 ? seconds[i / WAYS].races : 0);
        device->close(device);
    }
    plan_free(plan);
    close_trial();
}
