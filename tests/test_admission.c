/* test_admission.c: who enters which sweep, and the pages that this takes. A small walk of its own plays the run: sequences
 * grow by a token a sweep, and end when they have n or when a test stops them early. */
#include "tests.h"

/* A run without an engine: what it checks in every sweep, and what came out. */
typedef struct {
    const Task *task;
    Policy policy;
    const int *limit;
    const int *stop;                    /* [prompts] tokens after which each one stops; NULL: none does */
    long sweeps, first[512], last[512]; /* of each prompt: its prefill, its last token */
    int seat[512], peak[NTIERS], most_in_flight, most_topups;
    long held; /* pages, summed over the sweeps */
} Walk;

static int tokens_of(const Walk *w, int prompt) {
    int n = w->task->prompts[prompt].n;
    return w->stop && w->stop[prompt] < n ? w->stop[prompt] : n;
}

/* Pages that the seated hold in this sweep, by tier, counted one by one. */
static void count_pages(Walk *w, const Admission *a, long sweep, bool *rules) {
    int pages[NTIERS] = {0}, batches = 0, in[512] = {0};
    for (int e = 0; e < a->nseats; e++) {
        const Seat *seat = &a->seat[e];
        if (seat->prompt < 0) continue;
        int x = (int)(sweep - seat->since);
        pages[seat->kv] += pages_for(w->task->prompts[seat->prompt].s + x, w->policy.page_tokens);
        if (!in[seat->k]++) batches++;
        if (in[seat->k] > w->policy.gbs || x >= w->task->prompts[seat->prompt].n) *rules = false;
    }
    if (batches > w->most_in_flight) w->most_in_flight = batches;
    for (int t = 0; t < NTIERS; t++) {
        if (pages[t] > w->peak[t]) w->peak[t] = pages[t];
        if (w->limit && pages[t] > w->limit[t]) *rules = false;
        w->held += pages[t];
    }
}

static void walk(Walk *w) {
    Admission a;
    bool rules = true;
    int count = w->task->count, seen = 0, topups, entered[512];
    int line = 0;
    admission_open(&a, &w->policy, w->task, &line, w->limit);
    for (w->sweeps = 0;; w->sweeps++) {
        bool empty = !a.seated;
        int n = admission_next(&a, w->sweeps, entered, &topups), k = -1;
        if (!a.seated) break;
        rules = rules && (!empty || n > 0) && topups <= w->policy.gbs;
        if (topups > w->most_topups) w->most_topups = topups;
        for (int e = 0; e < n; e++) {
            const Seat *seat = &a.seat[entered[e]];
            rules = rules && seat->prompt == seen && seat->since == w->sweeps; /* in the order of the input */
            rules = rules && (e < topups || seat->k >= k);
            if (e >= topups) k = seat->k;
            w->first[seen] = w->sweeps, w->seat[seen++] = entered[e];
        }
        count_pages(w, &a, w->sweeps, &rules);
        for (int e = 0; e < a.nseats; e++) {
            int prompt = a.seat[e].prompt, x = (int)(w->sweeps - a.seat[e].since) + 1;
            if (prompt < 0 || x < tokens_of(w, prompt)) continue;
            w->last[prompt] = w->sweeps;
            admission_leave(&a, e, x);
        }
    }
    CU_ASSERT(rules);
    CU_ASSERT_EQUAL(seen, count);
    if (!w->stop)
        for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(a.peak[t], w->peak[t]); /* the ledger is what was held */
    admission_close(&a);
}

static void even_task(Task *t, int count, int s, int n) {
    *t = (Task){.prompts = xcalloc(count, sizeof(Prompt)), .count = count};
    for (int i = 0; i < count; i++) t->prompts[i] = (Prompt){.s = s, .n = n};
}

static Policy policy_of(Schedule schedule, int gbs, int K, int page) {
    return (Policy){.cg = 1, .hg = 1, .gbs = gbs, .num_gpu_batches = K, .schedule = schedule, .page_tokens = page};
}

static void row_keeps_one_batch_and_zigzag_one_block_in_flight(void) {
    Task t;
    even_task(&t, 14, 5, 4);
    Walk row = {.task = &t, .policy = policy_of(SCHEDULE_ROW, 2, 3, 1)};
    Walk zigzag = {.task = &t, .policy = policy_of(SCHEDULE_ZIGZAG, 2, 3, 1)};
    walk(&row), walk(&zigzag);
    CU_ASSERT_EQUAL(row.sweeps, 7 * 4);
    CU_ASSERT_EQUAL(row.most_in_flight, 1);
    CU_ASSERT_EQUAL(zigzag.sweeps, 3 * 4);
    CU_ASSERT_EQUAL(zigzag.most_in_flight, 3);
    for (int i = 0; i < 14; i++) CU_ASSERT(row.first[i] == i / 2 * 4 && zigzag.first[i] == i / 6 * 4);
    free(t.prompts);
}

/* Figure 6: 4 batches, 4 tokens. Batch b enters in sweep b, and from sweep 3 on each sweep computes 4 squares of each
 * layer, whose tokens are 4 different ones. */
static void the_diagonal_of_figure_6_is_a_batch_a_sweep(void) {
    Task t;
    even_task(&t, 24, 7, 4);
    Walk w = {.task = &t, .policy = policy_of(SCHEDULE_DIAGONAL, 2, 4, 1)};
    walk(&w);
    for (int i = 0; i < 24; i++) CU_ASSERT(w.first[i] == i / 2 && w.last[i] == i / 2 + 3);
    CU_ASSERT_EQUAL(w.most_in_flight, 4);
    CU_ASSERT_EQUAL(w.most_topups, 0);
    CU_ASSERT_EQUAL(w.peak[TIER_GPU], 2 * (7 + 8 + 9 + 10));
    free(t.prompts);
}

static void a_batch_enters_every_n_over_K_sweeps(void) {
    Task t;
    for (int K = 1; K <= 12; K++)
        for (int n = 1; n <= 40; n += 3) {
            even_task(&t, 3 * K * 2, 3, n);
            Walk w = {.task = &t, .policy = policy_of(SCHEDULE_DIAGONAL, 2, K, 16)};
            walk(&w);
            bool paced = true;
            for (int b = 0; b < 3 * K;
                 b++) /* batch b, the (b % K)-th of its round, in the first sweep at or after its time */
                paced = paced && w.first[2 * b] == (b % K * n + K - 1) / K + b / K * (long)n &&
                        w.first[2 * b + 1] == w.first[2 * b];
            CU_ASSERT(paced);
            free(t.prompts);
        }
}

/* A.2.1: the diagonal's peak is 4 h1 bls l (2s + n)(n - 1) / 2n where zig-zag's is 4 h1 bls l (s + n): as batches get
 * finer, bls may grow by (2s + 2n) / (2s + n). In tokens, with K batches in the memory of Z zig-zag batches. */
static void finer_batches_bring_the_block_to_the_papers_ratio(void) {
    const int s = 32, n = 256;
    double limit = (2. * s + 2 * n) / (2. * s + n), before = 0;
    for (int Z = 2; Z <= 64; Z *= 2) {
        int K = Z, room = Z * (s + n - 1);
        Task t;
        even_task(&t, 200, s, n);
        for (;; K++) {
            Walk w = {.task = &t, .policy = policy_of(SCHEDULE_DIAGONAL, 1, K + 1, 1)};
            walk(&w);
            if (w.peak[TIER_GPU] > room) break;
            double estimate = (K + 1.) * (2 * s + n) * (n - 1) / (2. * n), exact = w.peak[TIER_GPU];
            CU_ASSERT(exact > estimate); /* which hands pages over in mid-sweep, and lets K grow without bound */
            CU_ASSERT(exact <= (K + 1) * (s + n / 2.) + n / 2.);
            if (n % (K + 1) == 0) CU_ASSERT_EQUAL(exact, (K + 1) * (s + n - 1) - n / (K + 1) * K * (K + 1) / 2);
            if (K + 1 == 6 || K + 1 == 27) CU_ASSERT(fabs(exact / estimate - (K + 1 == 6 ? 1.14 : 1.03)) < .01);
        }
        CU_ASSERT((double)K / Z >= before && (double)K / Z < limit + 1e-9);
        before = (double)K / Z;
        free(t.prompts);
    }
    CU_ASSERT(before > .98 * limit);
}

/* Prompts of all lengths, some that stop early, limits as the plan sets them: no page too many, nobody left out, and who
 * waits is next in line. */
static void no_early_stop_and_no_length_breaks_the_limits(void) {
    uint64_t state = 5;
    for (int round = 0; round < 300; round++) {
        int count = 1 + (int)((test_random(&state) + 1) * 60), stop[512], longest = 0;
        Task t;
        even_task(&t, count, 1, 1);
        for (int i = 0; i < count; i++) {
            Prompt *q = &t.prompts[i];
            q->s = 1 + (int)((test_random(&state) + 1) * 40), q->n = 1 + (int)((test_random(&state) + 1) * 20);
            stop[i] = test_random(&state) > 0 ? q->n : 1 + (int)((test_random(&state) + 1) / 2 * q->n);
        }
        Policy p = policy_of((Schedule)(round % 3), 1 + round % 5, 1 + round % 7, 1 + round % 4 * 5);
        for (int i = 0; i < count; i++) {
            int pages = pages_for(t.prompts[i].s + t.prompts[i].n - 1, p.page_tokens);
            if (pages > longest) longest = pages;
        }
        p.cg = round % 4 / 3., p.cc = (1 - p.cg) * (round % 3 / 2.), p.hg = .5;
        Walk plan = {.task = &t, .policy = p}, same = plan;
        walk(&plan);
        int limit[NTIERS];
        for (int tier = 0; tier < NTIERS; tier++) limit[tier] = plan.peak[tier] < longest ? longest : plan.peak[tier];
        same.limit = limit;
        walk(&same); /* with the limit nothing changes as long as nobody stops early */
        CU_ASSERT_EQUAL(same.sweeps, plan.sweeps);
        CU_ASSERT(memcmp(same.first, plan.first, sizeof same.first) == 0);
        Walk early = {.task = &t, .policy = p, .limit = limit, .stop = stop};
        walk(&early);
        CU_ASSERT(p.schedule == SCHEDULE_DIAGONAL || early.sweeps <= plan.sweeps);
        free(t.prompts);
    }
}

/* A vacant seat is taken in the next sweep. */
static void whoever_stops_early_is_replaced_at_once(void) {
    Task t;
    int stop[40];
    even_task(&t, 40, 4, 10);
    for (int i = 0; i < 40; i++) stop[i] = 1 + i * 7 % 10;
    Walk w = {.task = &t, .policy = policy_of(SCHEDULE_DIAGONAL, 4, 2, 1), .stop = stop};
    walk(&w);
    CU_ASSERT(w.most_topups > 0);
    for (int i = 8; i < 40; i++) {
        bool replaces = false;
        for (int e = 0; e < i; e++) replaces = replaces || (w.seat[e] == w.seat[i] && w.last[e] + 1 == w.first[i]);
        CU_ASSERT(replaces || w.first[i] <= 6); /* the second batch opens in sweep 5 */
    }
    free(t.prompts);
}

/* Pages of 4 tokens, and 4 pages. Prompt 0 has 3 of them in its sweeps 8 to 11, and prompt 1, which is to end in sweep 7,
 * stops in sweep 4. Prompt 2 has its second page only in its fifth and last sweep: in sweep 5 it may not take the vacant
 * seat, though its pages would be there in all sweeps but that one. */
static void who_enters_has_its_pages_up_to_its_last_sweep(void) {
    Prompt prompts[] = {{.s = 1, .n = 12}, {.s = 1, .n = 4}, {.s = 1, .n = 5}};
    const Task t = {.prompts = prompts, .count = 3};
    const int limit[NTIERS] = {4}, stop[] = {12, 1, 5};
    Walk plan = {.task = &t, .policy = policy_of(SCHEDULE_DIAGONAL, 1, 2, 4)}, early = plan;
    walk(&plan);
    CU_ASSERT_EQUAL(plan.peak[TIER_GPU], limit[TIER_GPU]);
    early.limit = limit, early.stop = stop;
    walk(&early);
    CU_ASSERT(early.last[1] == 4 && early.first[2] == 8);
}

/* The diagonal's batches enter by the mean length of the prompts, rounded up. */
static void the_mean_length_is_rounded_up(void) {
    for (int longer = 0; longer <= 4; longer++) {
        Prompt prompts[4];
        Admission a;
        const Policy policy = all_gpu(2, 2);
        int next = 0;
        for (int i = 0; i < 4; i++) prompts[i] = (Prompt){.s = 3, .n = 5 + (i < longer)};
        const Task task = {.prompts = prompts, .count = 4};
        admission_open(&a, &policy, &task, &next, NULL);
        CU_ASSERT_EQUAL(a.n, longer ? 6 : 5);
        admission_close(&a);
    }
}

/* Whole sequences, as near to the shares as they can be: none is off by one or more. One that several tiers have the same
 * claim to goes to the highest of them. */
static void a_sequence_goes_to_the_tier_with_the_largest_claim(void) {
    static const struct {
        double share[NTIERS];
        int total, count[NTIERS];
    } cases[] = {{{.5, .5, 0}, 1, {1, 0, 0}}, {{0, .5, .5}, 1, {0, 1, 0}},    {{.5, 0, .5}, 3, {2, 0, 1}},
                 {{.4, .6, 0}, 1, {0, 1, 0}}, {{.25, .25, .5}, 2, {1, 0, 1}}, {{.3, .3, .4}, 7, {2, 2, 3}},
                 {{0, 0, 1}, 5, {0, 0, 5}},   {{.1, .2, .7}, 10, {1, 2, 7}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int count[NTIERS];
        apportion(count, cases[i].share, cases[i].total);
        for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(count[t], cases[i].count[t]);
    }
}

CU_TestInfo tests[] = {
    {"row keeps one batch and zig-zag one block in flight", row_keeps_one_batch_and_zigzag_one_block_in_flight},
    {"the diagonal of Figure 6 is a batch a sweep", the_diagonal_of_figure_6_is_a_batch_a_sweep},
    {"a batch enters every n/K sweeps", a_batch_enters_every_n_over_K_sweeps},
    {"finer batches bring the block to the paper's ratio", finer_batches_bring_the_block_to_the_papers_ratio},
    {"no early stop and no length breaks the limits", no_early_stop_and_no_length_breaks_the_limits},
    {"whoever stops early is replaced at once", whoever_stops_early_is_replaced_at_once},
    {"who enters has its pages up to its last sweep", who_enters_has_its_pages_up_to_its_last_sweep},
    {"the mean length is rounded up", the_mean_length_is_rounded_up},
    {"a sequence goes to the tier with the largest claim", a_sequence_goes_to_the_tier_with_the_largest_claim},
    CU_TEST_INFO_NULL,
};
