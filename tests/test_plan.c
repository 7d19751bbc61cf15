/* test_plan.c: placements achieved, sequences dealt, plans that fit and plans that do not, what the sweeps of a plan do,
 * page pools. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"
#include "batch.h"

/* Bytes of the decoder layers that each tier gets, and the largest tensor with its bias. */
static void placed_bytes(const OptConfig *c, double wg, double wc, double bytes[NTIERS], double *largest) {
    Tier(*home)[NROLES] = xcalloc(c->l, sizeof *home);
    place_weights(home, c, wg, wc);
    bytes[0] = bytes[1] = bytes[2] = *largest = 0;
    for (int j = 0; j < c->l; j++)
        for (int r = 0; r < NROLES; r++) {
            int rows, cols;
            opt_role_shape(c, (Role)r, &rows, &cols);
            bytes[home[j][r]] += (double)rows * cols;
            if ((double)rows * cols > *largest) *largest = (double)rows * cols;
        }
    free(home);
}

static void weight_fractions_are_met_to_the_share_of_one_tensor(void) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-30b", "opt-175b"};
    for (size_t m = 0; m < sizeof names / sizeof *names; m++) {
        OptConfig c;
        CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, names[m]), 0);
        double worst = 0;
        for (int wg = 0; wg <= 100; wg++)
            for (int wc = 0; wc <= 100 - wg; wc++) {
                double bytes[NTIERS], largest, want[NTIERS] = {wg / 100., wc / 100., (100 - wg - wc) / 100.};
                placed_bytes(&c, wg / 100., wc / 100., bytes, &largest);
                double total = bytes[0] + bytes[1] + bytes[2];
                for (int t = 0; t < NTIERS; t++) {
                    double off = fabs(bytes[t] - want[t] * total) / largest;
                    if (off > worst) worst = off;
                    if (want[t] == 0) CU_ASSERT_EQUAL(bytes[t], 0);
                }
            }
        CU_ASSERT(worst <= 1);
    }
}

static void sequences_are_dealt_to_within_one(void) {
    static const int counts[] = {1, 2, 7, 12, 30};
    Seat seats[30];
    for (int g = 0; g <= 100; g += 3)
        for (int c = 0; c <= 100 - g; c += 7)
            for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
                Policy p = {.cg = g / 100., .cc = c / 100., .hg = c / 100., .hc = g / 100., .gbs = 4, .num_gpu_batches = 8};
                int count = counts[n], kv[NTIERS] = {0}, act[NTIERS] = {0};
                bool ordered = true;
                deal_block(seats, &p, count);
                for (int i = 0; i < count; i++) {
                    kv[seats[i].kv]++, act[seats[i].act]++;
                    ordered = ordered && seats[i].k == i / 4 && seats[i].prompt == -1;
                    if (i % 4) ordered = ordered && seats[i].kv >= seats[i - 1].kv && seats[i].act >= seats[i - 1].act;
                }
                CU_ASSERT(ordered);
                double share[NTIERS] = {g / 100., c / 100., (100 - g - c) / 100.},
                       swapped[NTIERS] = {c / 100., g / 100., share[2]};
                for (int t = 0; t < NTIERS; t++) {
                    CU_ASSERT(fabs(kv[t] - share[t] * count) < 1);
                    CU_ASSERT(fabs(act[t] - swapped[t] * count) < 1);
                }
            }
}

static void every_gpu_batch_has_its_part_of_each_tier(void) {
    Seat seats[40];
    Policy p = {.cg = .5, .cc = .25, .hg = 1, .gbs = 8, .num_gpu_batches = 5};
    int per[5][NTIERS] = {{0}};
    deal_block(seats, &p, 40);
    for (int i = 0; i < 40; i++) per[seats[i].k][seats[i].kv]++;
    for (int k = 0; k < 5; k++) CU_ASSERT(per[k][0] == 4 && per[k][1] == 2 && per[k][2] == 2);
}

static Task even_task(int count, int s, int n) {
    Task t = {.prompts = xcalloc(count, sizeof(Prompt)), .count = count};
    for (int i = 0; i < count; i++) t.prompts[i] = (Prompt){.ids = xcalloc(s, sizeof(int32_t)), .s = s, .n = n};
    return t;
}

static size_t term_bytes(const Plan *p, Tier tier, const char *name) {
    size_t bytes = 0;
    for (int id = 0; id < NREGIONS; id++)
        if (p->region[id][tier].bytes && !strcmp(p->region[id][tier].name, name)) bytes += p->region[id][tier].bytes;
    return bytes;
}

/* The paper's section 3: l (8 h1^2 + 4 h1 h2) bytes of weights, 4 b l h1 (s + n) bytes of KV cache at the peak. */
static void the_plan_of_opt_30b_has_the_papers_sizes(void) {
    OptConfig c;
    Error err;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-30b"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(144, 512, 32);
    Policy p = {
        .wg = .2, .wc = .8, .cc = 1, .hc = 1, .gbs = 48, .num_gpu_batches = 3, .page_tokens = 16, .delegated = true};
    Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    double weights = 48 * (8. * 7168 * 7168 + 4. * 7168 * 28672);
    CU_ASSERT_DOUBLE_EQUAL(term_bytes(plan, TIER_CPU, "weights") / weights, .8, .01);
    CU_ASSERT_DOUBLE_EQUAL(term_bytes(plan, TIER_GPU, "weights") / weights, .2, .01);
    /* s + n - 1 tokens are stored: the last one made is never read. They fill 34 pages of 16. */
    CU_ASSERT_EQUAL(term_bytes(plan, TIER_CPU, "KV cache"), (size_t)144 * 48 * 34 * 16 * 4 * 7168);
    CU_ASSERT_EQUAL(term_bytes(plan, TIER_GPU, "KV cache"), 0);
    CU_ASSERT_EQUAL(term_bytes(plan, TIER_CPU, "activations"), (size_t)144 * 512 * 7168 * 2);
    CU_ASSERT_EQUAL(plan->total[TIER_DISK], 0);
    for (int t2 = 0; t2 < NTIERS; t2++) { /* regions tile their tier */
        size_t at = 0;
        for (int id = 0; id < NREGIONS; id++) {
            if (!plan->region[id][t2].bytes) continue;
            CU_ASSERT_EQUAL(plan->region[id][t2].offset, at);
            at += plan->region[id][t2].bytes;
        }
        CU_ASSERT_EQUAL(at, plan->total[t2]);
    }
    plan_free(plan);
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* A.2.1: at the end of a block every sequence has the KV of s + n tokens. In the diagonal schedule with K = n a
 * batch of bls / n sequences ends in every sweep, and those in flight have made 1 to n - 1 tokens. */
static void the_papers_estimate_of_the_cache_is_of_its_schedule(void) {
    enum { BATCHES = 5, GBS = 4, S = 7, N = BATCHES };
    const OptConfig c = SMALL_CONFIG(3);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(GBS * BATCHES, S + 2, N);
    for (int i = 0; i < t.count; i += 2) t.prompts[i].s -= 4; /* S in the mean */
    const double token = 4. * c.h1 * c.l;
    double diagonal = 0;
    for (int made = 1; made < N; made++) diagonal += GBS * token * (S + made);
    for (int schedule = 0; schedule < 3; schedule++) {
        Error err;
        Policy p = all_gpu(GBS, BATCHES);
        p.schedule = (Schedule)schedule;
        Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
        const double expected = schedule == SCHEDULE_DIAGONAL ? diagonal : block_size(&p) * token * (S + N);
        CU_ASSERT_DOUBLE_EQUAL(plan->a21_kv, expected, 1e-9 * expected);
        plan_free(plan);
    }
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* With smaller batches, or fewer; where one batch of one prompt is all, with neither. */
static void the_advice_is_about_what_can_be_smaller(void) {
    static const struct {
        int gbs, batches;
        const char *advice;
    } cases[] = {{4, 2, "lower --gpu-batch-size"}, {1, 8, "lower --num-gpu-batches"}, {1, 1, "shorten prompts"}};
    OptConfig c;
    Error err;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-125m"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(8, 64, 8);
    for (int i = 0; i < 3; i++)
        for (int placed = 0; placed < 2; placed++) {
            const Bytes capacity[NTIERS] = {SIZE_MAX, (size_t)placed << 12, SIZE_MAX};
            Policy p = {.wg = 1, .cc = placed, .wc = !placed, .hg = 1, .page_tokens = 16};
            p.wg = placed, p.cg = !placed, p.gbs = cases[i].gbs, p.num_gpu_batches = cases[i].batches;
            Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
            CU_ASSERT_EQUAL(check_fits(plan, capacity, placed, &err), -1);
            CU_ASSERT(strstr(err.text, cases[i].advice) && strstr(err.text, ", or raise --cpu-mem"));
            CU_ASSERT_EQUAL(strstr(err.text, "--percent") != NULL, placed);
            CU_ASSERT_EQUAL(plan_missing(plan, capacity), plan->total[TIER_CPU] - capacity[TIER_CPU]);
            plan_free(plan);
        }
    free_task(&t);
    checkpoint_close(checkpoint);
}

static void a_plan_that_does_not_fit_names_term_and_flag(void) {
    OptConfig c;
    Error err;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-6.7b"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(64, 512, 32);
    Policy p = {.wg = 1, .cg = 1, .hg = 1, .gbs = 16, .num_gpu_batches = 4, .page_tokens = 16};
    Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
    Bytes enough[NTIERS] = {plan->total[0], plan->total[1], plan->total[2]};
    CU_ASSERT_EQUAL(check_fits(plan, enough, true, &err), 0);
    static const char *const flag[NTIERS] = {"--gpu-mem", "--cpu-mem", "--disk-mem"};
    for (int tier = 0; tier < NTIERS; tier++) {
        if (!plan->total[tier]) continue;
        Bytes less[NTIERS] = {enough[0], enough[1], enough[2]};
        less[tier]--;
        CU_ASSERT_EQUAL(check_fits(plan, less, true, &err), -1);
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT(strstr(err.text, flag[tier]) && strstr(err.text, tier_name[tier]));
    }
    Bytes small[NTIERS] = {(size_t)1 << 30, enough[1], enough[2]};
    CU_ASSERT_EQUAL(check_fits(plan, small, true, &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "KV cache")); /* 16 GiB of it: the largest term */
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "--percent"));
    plan_free(plan);
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* The entrance of the diagonal schedule may hold any number of topups up to the batch size: their plan takes no time that
 * grows with its square. */
static void a_diagonal_of_very_large_batches_is_planned(void) {
    enum { GBS = 20000 };
    OptConfig c;
    Error err;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-125m"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = {.prompts = xcalloc(2 * GBS, sizeof(Prompt)), .count = 2 * GBS};
    for (int i = 0; i < t.count; i++) t.prompts[i] = (Prompt){.s = 4, .n = 2};
    Policy p = {.wg = 1, .cg = 1, .hg = .5, .hc = .25, .gbs = GBS, .num_gpu_batches = 2, .page_tokens = 16};
    p.schedule = SCHEDULE_DIAGONAL;
    Plan *plan = plan_make(checkpoint, &p, &t, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    CU_ASSERT_EQUAL(plan->batches, 3);
    CU_ASSERT_EQUAL(plan->act_rows[TIER_CPU][2], GBS / 4 * 4); /* a quarter of the topups, four rows each */
    plan_free(plan);
    free(t.prompts);
    checkpoint_close(checkpoint);
}

/* Of each batch a quarter is on the GPU. Two have six sequences off it between them, four of which may end in one sweep, so
 * that those which enter for them have no row on the GPU. */
static void an_entrance_has_room_for_the_rows_off_the_gpu_of_all_batches(void) {
    enum { GBS = 4, S = 10 };
    const OptConfig c = SMALL_CONFIG(-1);
    Error err;
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(20, S, 4);
    for (int batches = 1; batches <= 2; batches++) {
        Policy p = all_gpu(GBS, batches);
        p.cg = .25, p.cc = .5, p.schedule = SCHEDULE_DIAGONAL;
        Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
        CU_ASSERT_EQUAL(plan->off_rows, (batches == 1 ? 3 : GBS) * S);
        plan_free(plan);
    }
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* For the next token of 2 sequences, of as many batches as are under way. Not on the host, nor for greedy or given tokens.
 */
static void only_where_a_gpu_would_sample_do_logits_come_down(void) {
    OptConfig c = opt_named("opt-125m");
    Error err;
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    const Policy p = all_gpu(2, 5);
    for (int way = 0; way < 8; way++) {
        Task t = equal_task(10, 4, 2);
        t.sampling.temperature = way & 1, t.scored = way & 2;
        for (int i = 0; i < t.count; i++) t.prompts[i].from = 1;
        Plan *plan = plan_make(checkpoint, &p, &t, way & 4 ? F16 : F32, &err);
        CU_ASSERT_EQUAL(plan->region[LOGITS][TIER_CPU].bytes, way == 5 ? WORKSPACES * 2 * 50272 * 4 : 0);
        plan_free(plan);
        free_task(&t);
    }
    checkpoint_close(checkpoint);
}

static void prompts_beyond_the_positions_are_refused(void) {
    OptConfig c;
    Error err;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-125m"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Policy p = {.gbs = 1, .num_gpu_batches = 1, .page_tokens = 16};
    static const int bad[][2] = {{2049, 1}, {2048, 2}, {0, 1}, {1, 0}, {1, 2049}, {1, 0x7fffffff}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Prompt prompt = {.s = bad[i][0], .n = bad[i][1]};
        CU_ASSERT_PTR_NULL(plan_make(checkpoint, &p, &(Task){.prompts = &prompt, .count = 1}, F32, &err));
    }
    Prompt fits = {.s = 2048, .n = 1};
    Plan *plan = plan_make(checkpoint, &p, &(Task){.prompts = &fits, .count = 1}, F32, &err);
    CU_ASSERT_PTR_NOT_NULL(plan);
    plan_free(plan);
    checkpoint_close(checkpoint);
}

// ---------------------------------------------------------------------------------------------------------------
// What the sweeps have to do
// ---------------------------------------------------------------------------------------------------------------

enum { MAX_SWEEPS = 400 };

/* What ran on a sim, by sweeps, counted in layer 0 and where tokens are picked. */
static struct {
    Device was; /* the sim's own functions */
    const Plan *plan;
    bool prefills[MAX_SWEEPS];
    Workload sweep[MAX_SWEEPS];
} seen;

/* An index table; that of the GPU is filled on the CPU. */
static const int32_t *table_of(Device *d, Tensor t) {
    const Region *r = seen.plan->region[INDEX_TABLES];
    if (t.tier == TIER_GPU) t.offset += r[TIER_CPU].offset - r[TIER_GPU].offset;
    t.tier = TIER_CPU;
    return d->cpu_address(d, t);
}

static void count_prompts(Workload *w, Device *d, const Op *op) {
    const int32_t *row = table_of(d, op->prefilled.start);
    for (int r = 0; r + 1 < op->prefilled.start.cols && !op->j; r++) {
        double s = row[r + 1] - row[r];
        w->prompt_rows += s, w->pairs += s * (s + 1) / 2;
    }
}

static void count_past(Workload *w, Device *d, const Op *op) {
    const int32_t *len = table_of(d, op->attend.len);
    for (int r = 0; r < op->attend.len.cols && !op->j; r++) w->past += len[r];
}

static void count_batch(Workload *w, const Op *op) {
    w->sweeps = 1;
    seen.prefills[op->i] = seen.prefills[op->i] || op->prefill;
    *(op->prefill ? &w->prefills : &w->decodes) += 1;
    *(op->prefill ? &w->prompts : &w->decoded) += op->pick.ids.cols;
}

static Event count_op(Device *d, const Op *op) {
    Workload *w = &seen.sweep[op->i];
    CU_ASSERT_FATAL(op->i < MAX_SWEEPS);
    if (op->code == OP_ATTEND_PREFILL) count_prompts(w, d, op);
    if (op->code == OP_ATTEND) count_past(w, d, op);
    if (op->code == OP_PICK) count_batch(w, op);
    return seen.was.post(d, op);
}

static void run_and_count(const Plan *plan, const Task *t, RunStats *stats) {
    Error err;
    Hardware h;
    Listener listener = {0};
    CU_ASSERT_EQUAL_FATAL(hardware_read(&h, "hardware/laptop.json", &err), 0);
    Device *d = sim_open(plan, &h);
    memset(&seen, 0, sizeof seen);
    seen.was = *d, seen.plan = plan;
    d->post = count_op;
    *stats = (RunStats){.sweeps = 0};
    CU_ASSERT_EQUAL_FATAL(schedule_run(plan, t, d, &listener, stats, &err), 0);
    d->close(d);
}

/* Sums over the sweeps of one kind; the numbers are whole, so that they are exact. */
static bool same_work(const Workload *planned, bool prefill) {
    double sum[8] = {0};
    const double want[] = {planned->sweeps, planned->prefills, planned->prompts, planned->prompt_rows,
                           planned->pairs,  planned->decodes,  planned->decoded, planned->past};
    for (int i = 0; i < MAX_SWEEPS; i++) {
        const Workload *w = &seen.sweep[i];
        const double ran[] = {w->sweeps, w->prefills, w->prompts, w->prompt_rows,
                              w->pairs,  w->decodes,  w->decoded, w->past};
        for (int f = 0; f < 8 && seen.prefills[i] == prefill; f++) sum[f] += ran[f];
    }
    bool same = true;
    for (int f = 0; f < 8; f++) {
        if (sum[f] != want[f])
            fprintf(stderr, "\n    prefill %d, field %d: planned %g, ran %g\n", prefill, f, want[f], sum[f]);
        same = same && sum[f] == want[f];
    }
    return same;
}

/* Policies of all schedules, with everything on one tier or a bit everywhere, and prompts of one length or of many, of
 * which topups come. Nobody stops early. */
static void the_planned_work_is_what_runs(void) {
    OptConfig config = SMALL_CONFIG(-1);
    Checkpoint *checkpoint = checkpoint_dummy(&config, 0);
    uint64_t seed = 5;
    for (int trial = 0; trial < 120; trial++) {
        Error err;
        RunStats stats;
        static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.4, .3}};
        const double *c = share[trial / 3 % 4], *h = share[trial / 12 % 4];
        int count = 1 + trial * 7 % 30, mixed = trial / 2 % 2;
        Policy p = {.wg = .5, .wc = .5, .cg = c[0], .cc = c[1], .hg = h[0], .hc = h[1], .overlap = true, .page_tokens = 4};
        p.gbs = 1 + trial % 5, p.num_gpu_batches = 1 + trial % 4, p.flights = trial / 2 % 4,
        p.schedule = (Schedule)(trial % 3), p.delegated = trial & 1;
        Task t = {.prompts = xcalloc(count, sizeof(Prompt)), .count = count, .sampling = {.top_p = 1}};
        for (int i = 0; i < count; i++) {
            int s = mixed ? 1 + (int)(20 * (test_random(&seed) + 1)) : 17,
                n = mixed ? 1 + (int)(6 * (test_random(&seed) + 1)) : 8;
            t.prompts[i] = (Prompt){.ids = xcalloc(s, sizeof(int32_t)), .s = s, .n = n};
        }
        Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
        run_and_count(plan, &t, &stats);
        CU_ASSERT(same_work(&plan->work[0], false) && same_work(&plan->work[1], true));
        CU_ASSERT(stats.prefill_sweeps == plan->work[1].sweeps && stats.sweeps == plan->sweeps);
        CU_ASSERT(plan->work[0].sweeps + plan->work[1].sweeps == plan->sweeps && plan->work[0].prompts == 0);
        CU_ASSERT(plan->work[0].decoded + plan->work[1].decoded + count == stats.generated &&
                  plan->work[1].prompts == count);
        plan_free(plan);
        free_task(&t);
    }
    checkpoint_close(checkpoint);
}

/* By hand: five prompts of 10 tokens, 4 new ones each, in blocks of 2 x 2. Twice one sweep of prefill and three others. */
static void the_work_of_two_blocks_by_hand(void) {
    OptConfig config = SMALL_CONFIG(2);
    Error err;
    Checkpoint *checkpoint = checkpoint_dummy(&config, 0);
    Task t = even_task(5, 10, 4);
    Policy p = {.wg = 1, .cg = 1, .hg = 1, .gbs = 2, .num_gpu_batches = 2, .page_tokens = 16};
    Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
    const Workload *pre = &plan->work[1], *gen = &plan->work[0];
    CU_ASSERT(plan->sweeps == 8 && pre->sweeps == 2 && gen->sweeps == 6);
    CU_ASSERT(pre->prefills == 3 && pre->prompts == 5 && pre->prompt_rows == 50 && pre->pairs == 5 * 55);
    CU_ASSERT(pre->decodes == 0 && pre->decoded == 0 && pre->past == 0 && gen->prefills == 0 && gen->prompts == 0);
    CU_ASSERT(gen->decodes == 3 * 3 && gen->decoded == 5 * 3 && gen->past == 5 * (11 + 12 + 13));
    plan_free(plan);
    free_task(&t);
    checkpoint_close(checkpoint);
}

// ---------------------------------------------------------------------------------------------------------------
// The table of tokens
// ---------------------------------------------------------------------------------------------------------------

/* All layers stream from the disk, through slots that are larger than the table: so off the GPU it takes nothing there, and
 * off the CPU nothing on it. */
static void the_table_rests_on_the_highest_tier_that_has_room(void) {
    OptConfig c;
    Error err = {0, ""};
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-13b"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(4, 64, 8);
    Policy p = {.cg = 1, .hg = 1, .gbs = 2, .num_gpu_batches = 2, .overlap = true, .page_tokens = 16};
    const size_t table = (size_t)c.vocab * c.h1 * 2;
    Bytes need[NTIERS][NTIERS];
    for (int home = 0; home < NTIERS; home++) {
        p.table_home = (Tier)home;
        Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
        memcpy(need[home], plan->total, sizeof need[home]);
        plan_free(plan);
        if (home) CU_ASSERT(need[home - 1][home - 1] > need[home][home - 1] + table / 2);
    }
    for (int home = 0; home < NTIERS; home++) { /* as much as it takes there, and nothing more */
        p.table_home = (Tier)((home + 1) % NTIERS);
        ASSERT_OK(fit_policy(&p, checkpoint, &t, F16, need[home], &err));
        CU_ASSERT_EQUAL(p.table_home, (Tier)home);
    }
    need[TIER_DISK][TIER_DISK]--;
    CU_ASSERT_EQUAL(fit_policy(&p, checkpoint, &t, F16, need[TIER_DISK], &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "the disk tier needs") && strstr(err.text, "--disk-mem"));
    double needs = 0, has = 0; /* by a byte, which shows */
    CU_ASSERT_EQUAL(sscanf(strstr(err.text, "needs"), "needs %lf MiB and has %lf MiB", &needs, &has), 2);
    CU_ASSERT(needs > has && needs < has + 1e-4);
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* A GPU that holds exactly the plan with three workspaces gives a policy three, and with a byte less two. One that holds
 * exactly the plan with two gives it two, and with a byte less the policy is refused. */
static void a_policy_has_three_workspaces_or_two(void) {
    Error err;
    OptConfig c = opt_named("opt-125m");
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(32, 64, 8);
    for (int n = LEAST_WORKSPACES; n <= WORKSPACES; n++)
        for (int less = 0; less < 2; less++) {
            Policy p = {.wc = 1, .cg = 1, .hg = 1, .gbs = 8, .num_gpu_batches = 4, .overlap = true, .page_tokens = 16};
            p.workspaces = n;
            Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
            plan->total[TIER_GPU] -= less;
            p.workspaces = 0;
            const bool fits = !fit_policy(&p, checkpoint, &t, F16, plan->total, &err);
            CU_ASSERT_EQUAL(fits, n - less >= LEAST_WORKSPACES);
            CU_ASSERT_EQUAL(p.workspaces, fits ? n - less : WORKSPACES);
            plan_free(plan);
        }
    free_task(&t);
    checkpoint_close(checkpoint);
}

/* Of a prefill of 5,000 rows: as many of them pass a layer, and its MLP, together as there is room for, and not one more.
 */
static void pieces_are_as_large_as_there_is_room_for(void) {
    static const int rows[] = {PIECE_ROWS, 2048, LARGE_PIECE_ROWS};
    Error err;
    OptConfig c;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&c, "opt-125m"), 0);
    Checkpoint *checkpoint = checkpoint_dummy(&c, 0);
    Task t = even_task(50, 100, 8);
    Bytes need[3][NTIERS];
    for (int i = 0; i < 3; i++) {
        Policy p = {.wg = 1, .cg = 1, .hg = 1, .gbs = 50, .num_gpu_batches = 1, .overlap = true, .page_tokens = 16};
        p.piece_rows = rows[i];
        Plan *plan = plan_make(checkpoint, &p, &t, F16, &err);
        memcpy(need[i], plan->total, sizeof need[i]);
        CU_ASSERT(plan->piece_rows == rows[i]);
        CU_ASSERT_EQUAL(plan->region[MLP][TIER_GPU].rows, rows[i]);
        plan_free(plan);
        if (i) CU_ASSERT(need[i][TIER_GPU] > need[i - 1][TIER_GPU]);
    }
    for (int i = 0; i < 3; i++)
        for (int less = 0; less < 2; less++) {
            Policy p = {.wg = 1, .cg = 1, .hg = 1, .gbs = 50, .num_gpu_batches = 1, .overlap = true, .page_tokens = 16};
            need[i][TIER_GPU] -= less;
            fit_pieces(&p, checkpoint, &t, F16, need[i]);
            CU_ASSERT_EQUAL(p.piece_rows, rows[imax(i - less, 0)]);
        }
    free_task(&t);
    checkpoint_close(checkpoint);
}

static void pools_hand_out_the_lowest_page_and_remember_their_peak(void) {
    PagePool pool;
    pool_open(&pool, 0, 130);
    for (int i = 0; i < 130; i++) CU_ASSERT_EQUAL(pool_take(&pool), i);
    pool_give(&pool, 100), pool_give(&pool, 3), pool_give(&pool, 64);
    CU_ASSERT_EQUAL(pool_take(&pool), 3);
    CU_ASSERT_EQUAL(pool_take(&pool), 64);
    CU_ASSERT_EQUAL(pool.used, 129);
    CU_ASSERT_EQUAL(pool.peak, 130);
    pool_close(&pool);
}

/* A sequence that gave its pages back twice would share them with another one, and nothing else would tell. */
static void a_page_that_is_free_is_not_taken_back(void) {
    int status;
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        PagePool pool;
        pool_open(&pool, 0, 2);
        fclose(stderr);
        pool_give(&pool, pool_take(&pool));
        pool_give(&pool, 0); /* aborts */
        _exit(0);
    }
    CU_ASSERT_FATAL(child > 0 && waitpid(child, &status, 0) == child);
    CU_ASSERT(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

/* What wide.c, compiled with these flags, prints; "" where that is not possible here. */
static void wide_totals(char text[400], const char *flags) {
    char program[] = "/tmp/flexgen-wide-XXXXXX", command[1000];
    const int file = mkstemp(program);
    CU_ASSERT_FATAL(file >= 0);
    close(file);
    snprintf(command, sizeof command,
             "cc %s -O1 -std=c11 -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -I. -ffunction-sections -fdata-sections tests/wide.c "
             "plan.c walk.c admission.c quant.c io/checkpoint.c -Wl,--gc-sections "
             "-Wl,--unresolved-symbols=ignore-all -lm -lpthread -o %s 2>/dev/null && %s",
             flags, program, program);
    FILE *out = popen(command, "r");
    CU_ASSERT_FATAL(out != NULL);
    text[fread(text, 1, 399, out)] = 0;
    pclose(out), unlink(program);
}

/* Byte counts have 64 bits: OPT-175B has as many where size_t has 32. */
static void the_plan_of_opt_175b_is_the_same_on_32_bits(void) {
    char wide[400], narrow[400];
    wide_totals(wide, "");
    wide_totals(narrow, "-m32 -msse2 -mfpmath=sse");
    CU_ASSERT(strstr(wide, "CPU 181067731968\n") &&
              strstr(wide, "disk 834312658944\n")); /* half of 324 GiB and more; the rest */
    if (!*narrow) puts("skipped: no compiler for 32 bits");
    CU_ASSERT(!*narrow || !strcmp(wide, narrow));
}

enum { NAME = 34, NUMBER = 13 }; /* columns of a line of a printed plan */

/* 0 where there is none. */
static double number_at(const char *column) {
    char number[NUMBER + 1];
    snprintf(number, sizeof number, "%.*s", NUMBER, column);
    return atof(number);
}

/* As two slots of weights, which are two regions. */
static void a_printed_plan_has_a_line_for_each_name_and_adds_up(void) {
    const OptConfig config = opt_named("opt-125m");
    Policy policy = all_gpu(2, 2);
    policy.wg = .3, policy.wc = .4, policy.cg = .5, policy.cc = .25, policy.hg = .5, policy.hc = .25;
    const Bytes capacity[NTIERS] = {1, 1, 1};
    Checkpoint *model = checkpoint_dummy(&config, 0);
    Task task = equal_task(4, 64, 8);
    Error err;
    Plan *plan = plan_make(model, &policy, &task, F16, &err);
    char *text, name[40][40];
    size_t len;
    FILE *out = open_memstream(&text, &len);
    plan_print(out, plan, capacity);
    CHECK(!fclose(out));
    double sum[NTIERS] = {0};
    int n = 0;
    char *line = strtok(text, "\n"); /* what the columns are */
    for (; (line = strtok(NULL, "\n")) && !strncmp(line, "  ", 2); n++) {
        CU_ASSERT_FATAL(n < 40 && strlen(line) == NAME + NTIERS * NUMBER);
        snprintf(name[n], sizeof *name, "%.*s", NAME, line);
        for (int other = 0; other < n; other++) CU_ASSERT_STRING_NOT_EQUAL(name[other], name[n]);
        for (int t = 0; t < NTIERS; t++) sum[t] += number_at(line + NAME + t * NUMBER);
    }
    CU_ASSERT_FATAL(n > 5 && line && !strncmp(line, "planned ", 8));
    for (int t = 0; t < NTIERS; t++)
        CU_ASSERT_DOUBLE_EQUAL(sum[t], number_at(line + NAME + t * NUMBER), .005 * (n + 1)); /* what rounding takes */
    free(text), plan_free(plan), free_task(&task), checkpoint_close(model);
}

CU_TestInfo tests[] = {
    {"weight fractions are met to the share of one tensor", weight_fractions_are_met_to_the_share_of_one_tensor},
    {"sequences are dealt to within one", sequences_are_dealt_to_within_one},
    {"every GPU batch has its part of each tier", every_gpu_batch_has_its_part_of_each_tier},
    {"the plan of OPT-30B has the paper's sizes", the_plan_of_opt_30b_has_the_papers_sizes},
    {"the paper's estimate of the cache is of its schedule", the_papers_estimate_of_the_cache_is_of_its_schedule},
    {"the advice is about what can be smaller", the_advice_is_about_what_can_be_smaller},
    {"a plan that does not fit names term and flag", a_plan_that_does_not_fit_names_term_and_flag},
    {"a diagonal of very large batches is planned", a_diagonal_of_very_large_batches_is_planned},
    {"an entrance has room for the rows off the GPU of all batches",
     an_entrance_has_room_for_the_rows_off_the_gpu_of_all_batches},
    {"the plan of OPT-175B is the same on 32 bits", the_plan_of_opt_175b_is_the_same_on_32_bits},
    {"only where a GPU would sample do logits come down", only_where_a_gpu_would_sample_do_logits_come_down},
    {"prompts beyond the positions are refused", prompts_beyond_the_positions_are_refused},
    {"the planned work is what runs", the_planned_work_is_what_runs},
    {"the work of two blocks by hand", the_work_of_two_blocks_by_hand},
    {"the table rests on the highest tier that has room", the_table_rests_on_the_highest_tier_that_has_room},
    {"a policy has three workspaces, or two", a_policy_has_three_workspaces_or_two},
    {"pieces are as large as there is room for", pieces_are_as_large_as_there_is_room_for},
    {"pools hand out the lowest page and remember their peak", pools_hand_out_the_lowest_page_and_remember_their_peak},
    {"a page that is free is not taken back", a_page_that_is_free_is_not_taken_back},
    {"a printed plan has a line for each name and adds up", a_printed_plan_has_a_line_for_each_name_and_adds_up},
    CU_TEST_INFO_NULL,
};
