/* exam_engine.c: asks the code of libflexgen.a, and that of lessons.c. */
#include "branches/walk.h"
#include "exam_both.h"
#include "lessons.h"
#include "squares.h"

Gpu *test_gpu; /* for fixture.c: none */
int test_every = 1;
static Error err;

void exam_begin(void) { host_set_threads(0); }

// ---- 1 --------------------------------------------------------------------------------------------------------------

static void attend(void *c) {
    Attention *p = c;
    const OptConfig config = {.h1 = p->nh * p->hd, .nh = p->nh};
    for (int j = 0; j < ATT_MOST + GUARD; j++) p->o[0][j] = UNTOUCHED;
    for (int i = 0; i < 2; i++) plain_attention(p->o[i], p->q, p->k[i], p->v[i], p->n, &config);
    if (!p->nids) return;
    Checkpoint *checkpoint = checkpoint_open("tests/golden/opt-pre", &err);
    must(checkpoint != NULL, err.text);
    must(!reference_forward(p->logits, checkpoint, p->ids, p->nids, &err), err.text);
}

// ---- 2 and 3 --------------------------------------------------------------------------------------------------------

static void enter(void *c) {
    Line *p = c;
    Prompt prompts[LINE] = {{0}};
    for (int i = 0; i < p->count; i++) prompts[i] = (Prompt){.s = p->s[i], .n = p->n[i]};
    const Task task = {.prompts = prompts, .count = p->count};
    const int limit[NTIERS] = {p->limit};
    Policy policy = all_gpu(p->gbs, p->num_gpu_batches);
    Admission a;
    int next = 0, seats[LINE], topups;
    policy.page_tokens = p->page_tokens, policy.schedule = SCHEDULE_DIAGONAL;
    admission_open(&a, &policy, &task, &next, p->limit < 0 ? NULL : limit);
    for (int i = 0; i < p->sweeps; i++) {
        for (int e = 0; e < a.nseats; e++) {
            const Seat *seat = &a.seat[e];
            const int had = (int)(i - seat->since);
            if (seat->prompt >= 0 && (had == prompts[seat->prompt].n || (i == p->first && e == p->stops)))
                admission_leave(&a, e, had);
        }
        a.sweep = i;
        p->may[i] = i ? imax(0, seats_for[SCHEDULE_DIAGONAL](&a)) : 0;
        p->entered[i] = admission_next(&a, i, seats, &topups);
    }
    admission_close(&a);
}

// ---- 4 --------------------------------------------------------------------------------------------------------------

static void deal(void *c) {
    Deal *p = c;
    static Tier placed_on[48][NROLES];
    const OptConfig opt = opt_named("opt-30b");
    Diffusion diffusion = {.share = {p->share[0], p->share[1], p->share[2]}};
    if (p->layers) place_weights(placed_on, &opt, p->share[0], p->share[1]);
    for (int j = 0; j < p->items; j++)
        p->tier[j] = p->layers ? placed_on[j / NROLES][j % NROLES] : diffuse(&diffusion, p->size[j]);
}

// ---- 5 and 6 --------------------------------------------------------------------------------------------------------

static void generate(void *c) {
    SmallRun *p = c;
    Task task = run_task(&p->run);
    Rig r = run_rig(&p->run, run_model(&p->run), &task, "/tmp");
    if (rig_run(&r)) fprintf(stderr, "%s\n", r.err.text); /* then prompts have not got their tokens */
    for (int i = 0; i < PROMPTS; i++) {
        p->ended += r.answer[i].done == 1 && r.answer[i].n == RUN_TOKENS;
        memcpy(p->ids[i], r.answer[i].tokens, sizeof p->ids[i]);
        memcpy(p->logits[i], r.answer[i].steps, sizeof p->logits[i]);
    }
    _Static_assert(sizeof p->moved / sizeof **p->moved == sizeof r.moved / sizeof **r.moved, "all links and kinds");
    for (int i = 0; i < CHANNELS * KINDS; i++) p->moved[i / KINDS][i % KINDS] = r.moved[i / KINDS][i % KINDS];
}

/* Runs it once more, and notes what each square has. Each op is over before the next is posted, so that a run that fails
 * has the squares up to there. */
static void watch(void *c) {
    RunSeen *p = c;
    Task task = run_task(&p->run);
    Rig r = run_rig(&p->run, run_model(&p->run), &task, "/tmp");
    r.policy.overlap = false;
    squares_seen = &p->squares;
    (void)rig_run(&r);
}

// ---- 7 --------------------------------------------------------------------------------------------------------------

static void make_rows(void *c) {
    Rows *p = c;
    Hardware m = machine_with("");
    const OptConfig config = TEST_CONFIG(p->l, p->h1, p->h2, 2, 10, -1);
    const Block block = {p->s, p->n, p->gbs, p->num_gpu_batches};
    Lp lp;
    _Static_assert((int)PAPER_VARS == NVARS, "the variables are A.3's");
    memcpy(m.bdw, p->bdw, sizeof p->bdw);
    memcpy(m.mm_flops, p->mm_flops, sizeof p->mm_flops);
    memcpy(m.bmm_flops, p->bmm_flops, sizeof p->bmm_flops);
    memcpy(m.cpu_flops, p->cpu_flops, sizeof p->cpu_flops);
    paper_lp(&lp, &m, &config, &block);
    for (int r = 0; r < lp.m; r++)
        for (int w = 0; w < NROWS_G; w++) {
            if (strcmp(lp.row[r].name, row_g[w])) continue;
            p->row[w].found = 1, p->row[w].equal = lp.row[r].equal, p->row[w].b = lp.row[r].b;
            memcpy(p->row[w].a, lp.row[r].a, sizeof p->row[w].a);
        }
}

// ---- 9 --------------------------------------------------------------------------------------------------------------

static void round_groups(void *c) {
    Groups *p = c;
    f16 half[PACKED * MOST_STRIDE] = {0};
    for (int i = 0; i < p->n; i++) half[i * p->stride] = f32_to_f16(p->x[i]);
    p->finite = quant_round(half, p->stride, p->n, (Quant){p->bits, p->group});
    for (int i = 0; i < p->n; i++) p->back[i] = f16_to_f32(half[i * p->stride]);
}

// ---- 10 -------------------------------------------------------------------------------------------------------------

/* q is (2, 0, 0, 0), over sqrt(HEAD) 1, and k begins with the score; all else is large. Rows of q lie apart. */
static void select_tokens(void *c) {
    Selection *p = c;
    f16 q[SEQS][3 * H1] = {0}, k[SEQS * PAGES * PAGE][NH][HEAD];
    memset(k, 0x48, sizeof k); /* 8.5625 */
    memset(p->tokens, 0xff, sizeof p->tokens);
    for (int r = 0; r < SEQS; r++)
        for (int h = 0; h < NH; h++) {
            q[r][h * HEAD] = f32_to_f16(2);
            for (int t = 0; t < p->len[r]; t++)
                k[p->pages[r][t / PAGE] * PAGE + t % PAGE][h][0] = f32_to_f16(p->score[r][h][t]);
        }
    const PageTable table = paged(k, k, p->pages[0], p->len, SEQS, PAGES, PAGE, H1, NH, false);
    run(selection(p->tokens[0][0], p->weights[0][0], MOST, q[0], 3 * H1, H1, table, p->sparsity));
}

// ---- 11 -------------------------------------------------------------------------------------------------------------

static void pace(void *c) {
    enum { ROWS = 5, WIDTH = 8 }; /* rows in a batch of generation; in prefill twice as many. A row is 16 bytes */
    Pipeline *p = c;
    const double pre = p->G * p->blocks, rest = (p->n - 1) * pre;
    const Cluster cluster = {p->M, ROWS * WIDTH * 2 / p->x[0], p->d};
    Plan plan = {.config = {.l = p->l, .h1 = WIDTH}, .act_type = F16, .policy = {.flights = p->G}};
    plan.work[1] = (Workload){.sweeps = pre, .prefills = p->K * pre, .prompt_rows = 2 * ROWS * p->K * pre};
    plan.work[0] = (Workload){.sweeps = rest, .decodes = p->K * rest, .decoded = ROWS * p->K * rest};
    const Pace found = cluster_pace(&cluster, &plan, p->t);
    p->prefill_s = found.prefill_s, p->token_s = found.token_s, p->T = found.T;
}

// ---- 15 -------------------------------------------------------------------------------------------------------------

static Tensor view_of(uint32_t bytes) {
    const int n = __builtin_popcount(bytes), first = n ? __builtin_ctz(bytes) : 0;
    return (Tensor){.type = U8, .offset = first, .rows = n > 0, .cols = n, .ld = n, .cell = 1};
}

static void post_ops(void *c) {
    Posted *p = c;
    Depend *depend = depend_open(2);
    int count[NLANES] = {0}, at[NLANES][OPS]; /* the ops of each lane */
    for (int j = 0; j < OPS; j++) {
        const Lane lane = p->lane[j];
        Op op = {.code = OP_UNPACK, .lane = lane};
        op.unpack.w = view_of(p->written[j]), op.unpack.packed = view_of(p->read[j]);
        depend_before(depend, &op);
        p->events[j] = op.nafter;
        for (int e = 0; e < imin(op.nafter, NLANES); e++) {
            const Event *after = &op.after[e];
            const bool known = (unsigned)after->lane < NLANES && after->seq - 1 < (uint64_t)count[after->lane];
            p->after[j] |= 1u << (known ? at[after->lane][after->seq - 1] : UNKNOWN);
        }
        at[lane][count[lane]++] = j;
        depend_posted(depend, &op, (Event){lane, count[lane]});
    }
    depend_close(depend);
}

// ---- 16 -------------------------------------------------------------------------------------------------------------

static Choice choice_of(const Found *found) {
    const Policy *p = &found->policy;
    Choice choice = {.gbs = p->gbs, .num_gpu_batches = p->num_gpu_batches, .delegated = p->delegated};
    choice.schedule = p->schedule, choice.table_home = p->table_home, choice.piece_rows = p->piece_rows,
    choice.workspaces = p->workspaces;
    memcpy(choice.share, p->share, sizeof p->share);
    return choice;
}

static void find(void *c) {
    Question *p = c;
    static Found best, frontier[MOST_FOUND];
    const OptConfig config = search_config(p);
    const Task task = equal_task(ASKED, p->s, p->n);
    Hardware machine;
    must(!hardware_read(&machine, "hardware/t4.json", &err), err.text);
    const Search s = search_of(p, &machine, checkpoint_dummy(&config, 1), &task);
    p->nbest = policy_search(&best, 1, &s, &err);
    p->best = choice_of(&best);
    if (!p->frontier) return;
    p->nfrontier = policy_frontier(frontier, MOST_FOUND, &s, &err);
    for (int i = 0; i < p->nfrontier && i < MOST_FOUND; i++) p->found[i] = choice_of(&frontier[i]);
}

// ---- 17 and 19 ------------------------------------------------------------------------------------------------------

static void count(void *c) {
    Count *p = c;
    const IoCase io = {p->l, p->h1, p->layer_bytes, p->head_bytes, p->s, p->n, p->gbs, p->K, p->count};
    const IoCount found = io_count(&io, p->schedule);
    p->sweeps = found.sweeps, p->weights = found.weights;
    p->cache = found.cache, p->activations = found.activations;
}

static Race *racing; /* whose schedule is asked */

static int noted_seats(const Admission *a) {
    const int seats = fourth_seats(a);
    must(racing->calls < MOST_CALLS, "the schedule was asked too often");
    return racing->said[racing->calls++] = seats;
}

static void race(void *c) {
    racing = c;
    Prompt prompts[RACING];
    const OptConfig config = short_opt(2);
    const Task task = {.prompts = prompts, .count = RACING};
    const Hardware machine = race_machine(prompts, racing);
    seats_for[SCHEDULE_DIAGONAL] = noted_seats;
    Rig r = {.model = checkpoint_dummy(&config, 1), .task = &task, .sim = &machine};
    r.policy = on_cpu(SCHEDULE_DIAGONAL, racing->gbs, racing->K);
    must(!rig_run(&r), r.err.text);
}

const Work works[NASKS] = {
    [ASK_ATTENTION] = {attend}, [ASK_SEATS] = {enter},    [ASK_DEAL] = {deal},           [ASK_RUN] = {generate},
    [ASK_SEEN] = {watch},       [ASK_ROWS] = {make_rows}, [ASK_GROUPS] = {round_groups}, [ASK_SELECTION] = {select_tokens},
    [ASK_PIPELINE] = {pace},    [ASK_ORDER] = {post_ops}, [ASK_SEARCH] = {find},         [ASK_COUNT] = {count},
    [ASK_RACE] = {race},
};
