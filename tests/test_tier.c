/* test_tier.c: placements achieved, sequences dealt, plans that fit and plans that do not, page pools. */
#include "tests.h"

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
    for (int i = 0; i < count; i++) t.prompts[i] = (Prompt){xcalloc(s, sizeof(int32_t)), s, n};
    return t;
}

static void free_task(Task *t) {
    for (int i = 0; i < t->count; i++) free(t->prompts[i].ids);
    free(t->prompts);
}

static size_t term_bytes(const Plan *p, Tier tier, const char *name) {
    size_t bytes = 0;
    for (int i = 0; i < p->nterms; i++)
        if (p->terms[i].tier == tier && !strcmp(p->terms[i].name, name)) bytes += p->terms[i].bytes;
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
        .wg = .2, .wc = .8, .cc = 1, .hc = 1, .gbs = 48, .num_gpu_batches = 3, .page_tokens = 16, .cpu_attention = true};
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
    for (int t2 = 0; t2 < NTIERS; t2++) { /* terms tile their tier */
        size_t at = 0;
        for (int i = 0; i < plan->nterms; i++) {
            if ((int)plan->terms[i].tier != t2) continue;
            CU_ASSERT_EQUAL(plan->terms[i].offset, at);
            at += plan->terms[i].bytes;
        }
        CU_ASSERT_EQUAL(at, plan->total[t2]);
    }
    plan_free(plan);
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
    size_t enough[NTIERS] = {plan->total[0], plan->total[1], plan->total[2]};
    CU_ASSERT_EQUAL(plan_fits(plan, enough, &err), 0);
    static const char *const flag[NTIERS] = {"--gpu-mem", "--cpu-mem", "--disk-mem"};
    for (int tier = 0; tier < NTIERS; tier++) {
        if (!plan->total[tier]) continue;
        size_t less[NTIERS] = {enough[0], enough[1], enough[2]};
        less[tier]--;
        CU_ASSERT_EQUAL(plan_fits(plan, less, &err), -1);
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT(strstr(err.text, flag[tier]) && strstr(err.text, tier_name[tier]));
    }
    size_t small[NTIERS] = {(size_t)1 << 30, enough[1], enough[2]};
    CU_ASSERT_EQUAL(plan_fits(plan, small, &err), -1);
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
    for (int i = 0; i < t.count; i++) t.prompts[i] = (Prompt){NULL, 4, 2};
    Policy p = {.wg = 1, .cg = 1, .hg = .5, .hc = .25, .gbs = GBS, .num_gpu_batches = 2, .page_tokens = 16};
    p.schedule = SCHEDULE_DIAGONAL;
    Plan *plan = plan_make(checkpoint, &p, &t, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    CU_ASSERT_EQUAL(plan->slots, 3);
    CU_ASSERT_EQUAL(plan->act_rows[TIER_CPU][2], GBS / 4 * 4); /* a quarter of the topups, four rows each */
    plan_free(plan);
    free(t.prompts);
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
        Prompt prompt = {NULL, bad[i][0], bad[i][1]};
        CU_ASSERT_PTR_NULL(plan_make(checkpoint, &p, &(Task){.prompts = &prompt, .count = 1}, F32, &err));
    }
    Prompt fits = {NULL, 2048, 1};
    Plan *plan = plan_make(checkpoint, &p, &(Task){.prompts = &fits, .count = 1}, F32, &err);
    CU_ASSERT_PTR_NOT_NULL(plan);
    plan_free(plan);
    checkpoint_close(checkpoint);
}

static void pools_hand_out_the_lowest_page_and_remember_their_peak(void) {
    PagePool pool;
    pool_open(&pool, 130);
    for (int i = 0; i < 130; i++) CU_ASSERT_EQUAL(pool_take(&pool), i);
    pool_give(&pool, 100), pool_give(&pool, 3), pool_give(&pool, 64);
    CU_ASSERT_EQUAL(pool_take(&pool), 3);
    CU_ASSERT_EQUAL(pool_take(&pool), 64);
    CU_ASSERT_EQUAL(pool.used, 129);
    CU_ASSERT_EQUAL(pool.peak, 130);
    pool_close(&pool);
}

CU_TestInfo tests_tier[] = {
    {"weight fractions are met to the share of one tensor", weight_fractions_are_met_to_the_share_of_one_tensor},
    {"sequences are dealt to within one", sequences_are_dealt_to_within_one},
    {"every GPU batch has its part of each tier", every_gpu_batch_has_its_part_of_each_tier},
    {"the plan of OPT-30B has the paper's sizes", the_plan_of_opt_30b_has_the_papers_sizes},
    {"a plan that does not fit names term and flag", a_plan_that_does_not_fit_names_term_and_flag},
    {"a diagonal of very large batches is planned", a_diagonal_of_very_large_batches_is_planned},
    {"prompts beyond the positions are refused", prompts_beyond_the_positions_are_refused},
    {"pools hand out the lowest page and remember their peak", pools_hand_out_the_lowest_page_and_remember_their_peak},
    CU_TEST_INFO_NULL,
};
