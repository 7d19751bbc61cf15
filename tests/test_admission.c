/* test_admission.c: who enters which sweep, and the pages that this takes. A small walk of its own plays the run: sequences
 * grow by a token a sweep, and end when they have n or when a test stops them early. That the engine computes the same
 * batches is of the suite `schedule`; what their weights cost, of `theory`. */
#include "tests.h"

enum { MOST_PROMPTS = 512 };

/* What a run without an engine came to. */
typedef struct {
    long sweeps, first[MOST_PROMPTS], last[MOST_PROMPTS]; /* of each prompt: its prefill, its last token */
    int seat[MOST_PROMPTS], peak[NTIERS], most_in_flight, most_topups;
} Walk;

/* limit: pages by tier; stop: tokens after which each prompt stops. NULL: none. Prompts enter in the order of the input,
 * and batch by batch. */
static Walk walked(const Task *task, const Policy *policy, const int *limit, const int *stop) {
    Walk w = {.sweeps = 0};
    Admission a;
    int topups, entered[MOST_PROMPTS], line = 0;
    admission_open(&a, policy, task, &line, limit);
    for (;; w.sweeps++) {
        const int seen = line, n = admission_next(&a, w.sweeps, entered, &topups);
        if (!a.seated) break;
        CU_ASSERT(n == line - seen && topups <= policy->gbs);
        w.most_topups = imax(w.most_topups, topups);
        for (int e = 0; e < n; e++) {
            const Seat *seat = &a.seat[entered[e]];
            CU_ASSERT(seat->prompt == seen + e && seat->since == w.sweeps);
            CU_ASSERT(e <= topups || seat->k >= a.seat[entered[e - 1]].k);
            w.first[seen + e] = w.sweeps, w.seat[seen + e] = entered[e];
        }
        int pages[NTIERS] = {0}, batches = 0, in[MOST_PROMPTS] = {0}; /* in use in this sweep, counted one by one */
        for (int e = 0; e < a.nseats; e++) {
            const Seat *seat = &a.seat[e];
            const int prompt = seat->prompt, x = (int)(w.sweeps - seat->since);
            if (prompt < 0) continue;
            const Prompt *q = &task->prompts[prompt];
            pages[seat->kv] += pages_for(q->s + x, policy->page_tokens);
            batches += !in[seat->k]++;
            CU_ASSERT(in[seat->k] <= policy->gbs && x < q->n);
            if (x + 1 < q->n && (!stop || x + 1 < stop[prompt])) continue;
            w.last[prompt] = w.sweeps;
            admission_leave(&a, e, x + 1);
        }
        w.most_in_flight = imax(w.most_in_flight, batches);
        for (int t = 0; t < NTIERS; t++) {
            w.peak[t] = imax(w.peak[t], pages[t]);
            CU_ASSERT(!limit || pages[t] <= limit[t]);
        }
    }
    CU_ASSERT_EQUAL(line, task->count);
    for (int t = 0; t < NTIERS; t++) CU_ASSERT(stop || a.peak[t] == w.peak[t]); /* the ledger is what was held */
    admission_close(&a);
    return w;
}

static Policy policy_of(Schedule schedule, int gbs, int K, int page) {
    Policy p = all_gpu(gbs, K);
    p.schedule = schedule, p.page_tokens = page;
    return p;
}

/* Of count equal prompts. */
static Walk walked_evenly(Schedule schedule, int gbs, int K, int count, int s, int n) {
    const Policy policy = policy_of(schedule, gbs, K, 1);
    Task t = equal_task(count, s, n);
    const Walk w = walked(&t, &policy, NULL, NULL);
    free_task(&t);
    return w;
}

TEST(row_keeps_one_batch_and_zigzag_one_block_in_flight) {
    const Walk row = walked_evenly(SCHEDULE_ROW, 2, 3, 14, 5, 4), zigzag = walked_evenly(SCHEDULE_ZIGZAG, 2, 3, 14, 5, 4);
    CU_ASSERT(row.sweeps == 7 * 4 && row.most_in_flight == 1);
    CU_ASSERT(zigzag.sweeps == 3 * 4 && zigzag.most_in_flight == 3);
    for (int i = 0; i < 14; i++) CU_ASSERT(row.first[i] == i / 2 * 4 && zigzag.first[i] == i / 6 * 4);
}

/* Batch b, the (b % K)-th of its round, enters in the first sweep at or after its time. In Figure 6, with 4 batches and 4
 * tokens, batch b enters in sweep b, and from sweep 3 on each sweep computes 4 squares of each layer, whose tokens are 4
 * different ones. */
TEST(a_batch_enters_every_n_over_K_sweeps) {
    for (int K = 1; K <= 12; K++)
        for (int n = 1; n <= 40; n += 3) {
            const Walk w = walked_evenly(SCHEDULE_DIAGONAL, 2, K, 3 * K * 2, 7, n);
            for (int i = 0; i < 3 * K * 2; i++) {
                const int b = i / 2;
                CU_ASSERT(w.first[i] == (b % K * n + K - 1) / K + b / K * n && w.last[i] == w.first[i] + n - 1);
            }
            CU_ASSERT(w.most_in_flight == K && w.most_topups == 0);
            if (K == 4 && n == 4) CU_ASSERT_EQUAL(w.peak[TIER_GPU], 2 * (7 + 8 + 9 + 10));
        }
}

/* A.2.1: the diagonal's peak is 4 h1 bls l (2s + n)(n - 1) / 2n where zig-zag's is 4 h1 bls l (s + n): as batches get
 * finer, bls may grow by (2s + 2n) / (2s + n). In tokens, with K batches in the memory of Z zig-zag batches. */
TEST(finer_batches_bring_the_block_to_the_papers_ratio) {
    enum { S = 32, N = 256 };
    double limit = (2. * S + 2 * N) / (2. * S + N), before = 0;
    for (int Z = 2; Z <= 64; Z *= 2) {
        int K = Z + 1, exact;
        while ((exact = walked_evenly(SCHEDULE_DIAGONAL, 1, K, 200, S, N).peak[TIER_GPU]) <= Z * (S + N - 1)) {
            const double estimate = (double)K * (2 * S + N) * (N - 1) / (2. * N);
            CU_ASSERT(exact > estimate); /* which hands pages over in mid-sweep, and lets K grow without bound */
            CU_ASSERT(exact <= K * (S + N / 2.) + N / 2.);
            if (N % K == 0) CU_ASSERT_EQUAL(exact, K * (S + N - 1) - N / K * (K - 1) * K / 2);
            if (K == 6 || K == 27) CU_ASSERT_DOUBLE_EQUAL(exact / estimate, K == 6 ? 1.14 : 1.03, .01);
            K++;
        }
        const double ratio = (K - 1.) / Z;
        CU_ASSERT(ratio >= before && ratio < limit + 1e-9);
        before = ratio;
    }
    CU_ASSERT(before > .98 * limit);
}

/* Prompts of all lengths, some that stop early, limits as the plan sets them: no page too many, nobody left out, and who
 * waits is next in line. */
TEST(no_early_stop_and_no_length_breaks_the_limits) {
    uint64_t state = 5;
    for (int round = 0; round < 300; round++) {
        int stop[MOST_PROMPTS], longest = 0, limit[NTIERS];
        Policy p = policy_of((Schedule)(round % 3), 1 + round % 5, 1 + round % 7, 1 + round % 4 * 5);
        Task t = equal_task(1 + test_below(&state, 120), 1, 1);
        for (int i = 0; i < t.count; i++) {
            Prompt *q = &t.prompts[i];
            q->s = 1 + test_below(&state, 80), q->n = 1 + test_below(&state, 40);
            stop[i] = test_below(&state, 2) ? q->n : 1 + test_below(&state, q->n);
            longest = imax(longest, pages_for(q->s + q->n - 1, p.page_tokens));
        }
        p.cg = round % 4 / 3., p.cc = (1 - p.cg) * (round % 3 / 2.), p.hg = .5;
        const Walk plan = walked(&t, &p, NULL, NULL);
        for (int tier = 0; tier < NTIERS; tier++) limit[tier] = imax(plan.peak[tier], longest);
        const Walk same = walked(&t, &p, limit, NULL); /* nothing changes as long as nobody stops early */
        CU_ASSERT(same.sweeps == plan.sweeps && memcmp(same.first, plan.first, sizeof same.first) == 0);
        const Walk early = walked(&t, &p, limit, stop);
        CU_ASSERT(p.schedule == SCHEDULE_DIAGONAL || early.sweeps <= plan.sweeps);
        free_task(&t);
    }
}

/* A vacant seat is taken in the next sweep. */
TEST(whoever_stops_early_is_replaced_at_once) {
    int stop[40];
    Task t = equal_task(40, 4, 10);
    const Policy policy = policy_of(SCHEDULE_DIAGONAL, 4, 2, 1);
    for (int i = 0; i < 40; i++) stop[i] = 1 + i * 7 % 10;
    const Walk w = walked(&t, &policy, NULL, stop);
    CU_ASSERT(w.most_topups > 0);
    for (int i = 8; i < 40; i++) {
        bool replaces = w.first[i] <= 6; /* the second batch opens in sweep 5 */
        for (int e = 0; e < i; e++) replaces = replaces || (w.seat[e] == w.seat[i] && w.last[e] + 1 == w.first[i]);
        CU_ASSERT(replaces);
    }
    free_task(&t);
}

/* Pages of 4 tokens, and 4 pages. Prompt 0 has 3 of them in its sweeps 8 to 11, and prompt 1, which is to end in sweep 7,
 * stops in sweep 4. Prompt 2 has its second page only in its fifth and last sweep: in sweep 5 it may not take the vacant
 * seat, though its pages would be there in all sweeps but that one. */
TEST(who_enters_has_its_pages_up_to_its_last_sweep) {
    Prompt prompts[] = {{.s = 1, .n = 12}, {.s = 1, .n = 4}, {.s = 1, .n = 5}};
    const Task t = {.prompts = prompts, .count = 3};
    const int limit[NTIERS] = {4}, stop[] = {12, 1, 5};
    const Policy policy = policy_of(SCHEDULE_DIAGONAL, 1, 2, 4);
    CU_ASSERT_EQUAL(walked(&t, &policy, NULL, NULL).peak[TIER_GPU], limit[TIER_GPU]);
    const Walk early = walked(&t, &policy, limit, stop);
    CU_ASSERT(early.last[1] == 4 && early.first[2] == 8);
}

/* The diagonal's batches enter by the mean length of the prompts, rounded up. */
TEST(the_mean_length_is_rounded_up) {
    const Policy policy = all_gpu(2, 2);
    Task task = equal_task(4, 3, 5);
    for (int longer = 0; longer < 4; longer++) {
        Admission a;
        int next = 0;
        admission_open(&a, &policy, &task, &next, NULL);
        CU_ASSERT_EQUAL(a.n, longer ? 6 : 5);
        admission_close(&a);
        task.prompts[longer].n++;
    }
    free_task(&task);
}

/* Whole sequences, as near to the shares as they can be: none is off by one or more. One that several tiers have the same
 * claim to goes to the highest of them. */
TEST(a_sequence_goes_to_the_tier_with_the_largest_claim) {
    static const struct {
        double share[NTIERS];
        int total, count[NTIERS];
    } cases[] = {{{.5, .5, 0}, 1, {1, 0, 0}},  {{0, .5, .5}, 1, {0, 1, 0}},    {{.5, 0, .5}, 3, {2, 0, 1}},
                 {{.4, .6, 0}, 1, {0, 1, 0}},  {{.25, .25, .5}, 2, {1, 0, 1}}, {{.3, .3, .4}, 7, {2, 2, 3}},
                 {{.1, .2, .7}, 10, {1, 2, 7}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int count[NTIERS];
        apportion(count, cases[i].share, cases[i].total);
        for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(count[t], cases[i].count[t]);
    }
}
