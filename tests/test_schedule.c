/* test_schedule.c: the invariants of the engine. On one device every schedule, placement, overlap setting, page size,
 * batching and number of threads gives bit-identical tokens and logits; what the cache moves over each link is the
 * closed form, on the sim as well; nothing is left behind. The suite runs on the host device, and on the cuda device where
 * main.c was told so. test_events.c says whether the events are enough, test_stages.c is about pipelines, test_eval.c about
 * scored tasks.
 */
#include <unistd.h>

#include "golden.h"
#include "ops.h"
#include "written.h"

/* Odd sizes on purpose, and prompts end at every place of a page. */
static const OptConfig small = SMALL_CONFIG(-1);
enum { PROMPTS = 9, KNOWN = 16 };
static const int prompt_len[PROMPTS] = {5, 1, 17, 33, 16, 2, 64, 31, 9},
                 prompt_n[PROMPTS] = {12, 7, 1, 9, 12, 3, 12, 2, 10};

static Checkpoint *model;
static Task task;
static Rig known[KNOWN];   /* references of the task, on the host by `kept` */
static int slow_lane = -1; /* every op of it waits for a millisecond first */

static int turn; /* combinations of long lists so far */

/* True when the turn of the next one has come. */
static bool taken(void) { return turn++ % test_every == 0; }

/* True when one of the next n of them will be taken. If not, their turns are over. */
static bool one_is_due(int n) {
    const bool due = turn % test_every == 0 || turn / test_every != (turn + n - 1) / test_every;
    if (!due) turn += n;
    return due;
}

/* ThreadSanitizer looks for races, and not at numbers. */
static bool for_races(void) { return test_every > 100; }

/* So slow a way that tests which the others run whole are cut short. */
static bool hurried(void) { return test_every > 96; }

/* Where lanes have most to do: the cache, or states, or everything below the GPU; a bit of everything everywhere. */
enum { ALL_GPU, ON_DISK, CACHE_ON_CPU, CACHE_ON_DISK, STATES_ON_DISK, MIXED, PLACEMENTS };
static const double placements[PLACEMENTS][6] = {{1, 0, 1, 0, 1, 0}, {0, 0, 0, 0, 0, 0}, {1, 0, 0, 1, 1, 0},
                                                 {1, 0, 0, 0, 1, 0}, {1, 0, 1, 0, 0, 0}, {.3, .3, .3, .3, .3, .3}};

/* How numbers are kept, and which are read: what they cost in accuracy they cost everywhere alike. */
static const struct {
    bool weights, cache, head;       /* packed */
    Quant weight_study, cache_study; /* the second on the host alone */
    double sparsity;
} numbers[] = {{false, false, false, {0}, {0}, 1},      {true, false, false, {0}, {0}, 1},
               {false, true, false, {0}, {0}, 1},       {true, true, false, {0}, {0}, .3},
               {false, false, false, {0}, {0}, .1},     {false, false, false, {3, 32}, {5, 6}, .5},
               {true, false, false, {0}, {8, 64}, .01}, {true, false, true, {0}, {0}, 1}};
static int kept; /* which of them; 0: plain F16 */

static void set_numbers(Policy *p) {
    p->weight_packed = numbers[kept].weights, p->cache_packed = numbers[kept].cache, p->sparsity = numbers[kept].sparsity;
    p->head_packed = numbers[kept].head;
    p->weight_study = numbers[kept].weight_study;
    if (!test_gpu) p->cache_study = numbers[kept].cache_study;
    p->delegated = p->delegated || is_sparse(p);
}

/* The i-th of many policies. A piece has a sequence or two, or is large. */
static Policy drawn(int i) {
    static const int shapes[][2] = {{1, 1}, {1, 2}, {1, 7}, {2, 1}, {2, 2}, {2, 7},
                                    {3, 3}, {4, 2}, {5, 1}, {9, 1}, {20, 2}};
    static const int page_tokens[] = {1, 2, 3, 16, 16, 64, 200};
    const int *shape = shapes[i % 11];
    uint64_t seed = i;
    Policy p = all_gpu(shape[0], shape[1]);
    for (int what = 0; what < 6; what += 2) draw_shares(&p.share[what], &p.share[what + 1], &seed);
    p.flights = 1 + test_below(&seed, 3), p.schedule = test_below(&seed, 3), p.delegated = test_below(&seed, 2);
    p.overlap = test_below(&seed, 4), p.table_home = test_below(&seed, 3),
    p.page_tokens = page_tokens[test_below(&seed, 7)];
    p.piece_rows = test_below(&seed, 2) * (1 + i % 11), p.workspaces = 2 + test_below(&seed, 2);
    set_numbers(&p);
    return p;
}

/* What a policy is compared with: everything on the GPU, one op after another. On the host all prompts are one batch. On a
 * GPU cuBLAS may sum differently for another number of rows, and the CPU attends in float, so bits are the same for the
 * same members of a batch and where the same processor attends. */
static const Rig *reference_for(Policy p) {
    static int next;
    if (!test_gpu) p = all_gpu(PROMPTS, 1);
    p.wg = p.hg = 1, p.wc = p.hc = 0, p.table_home = TIER_GPU, p.page_tokens = 16, p.overlap = false;
    if (!p.delegated) p.cg = 1, p.cc = 0;
    set_numbers(&p);
    for (int i = 0; i < KNOWN; i++)
        if (known[i].model == model && !memcmp(&known[i].policy, &p, sizeof p)) return &known[i];
    const Rig fresh = rig_ran(model, &p, &task, NULL);
    Rig *r = &known[test_gpu ? next++ % KNOWN : kept];
    rig_close(r);
    *r = fresh;
    return r;
}

/* Asserts that the policy gives on a fresh device what the reference gave; under ThreadSanitizer, that it runs. */
static void expect_same(Policy p) {
    Rig r = {.model = model, .policy = p, .task = &task};
    if (!taken()) return;
    const bool opened = !rig_open(&r);
    if (opened && slow_lane >= 0) r.device->delay_us[slow_lane] = 1000;
    const bool runs = opened && !rig_run(&r);
    rig_stop(&r);
    const bool same = runs && (for_races() || rig_same(&r, reference_for(p)));
    if (!same) say_policy(&p), fprintf(stderr, "%s: %s\n", model->config.name, runs ? "differs" : r.err.text);
    CU_ASSERT(same);
    rig_close(&r);
}

static void open_task(const OptConfig *config) {
    model = checkpoint_dummy(config, 3);
    task = random_task(PROMPTS, prompt_len, prompt_n, config->vocab, 7);
    task.keep_logits = true;
}

/* Cuts the prompts and the answers short, for what does not depend on their lengths. */
static void shorten_task(void) {
    for (int i = 0; i < PROMPTS; i++) task.prompts[i].s = imin(task.prompts[i].s, 3), task.prompts[i].n = 1 + i % 2;
}

static void close_task(void) {
    for (int i = 0; i < KNOWN; i++) rig_close(&known[i]);
    memset(known, 0, sizeof known);
    free_task(&task);
    checkpoint_close(model);
}

static const OptConfig post_norm = {
    .name = "post", .l = 3, .h1 = 60, .h2 = 100, .nh = 3, .vocab = 131, .max_pos = 128, .embed = 28, .eos = -1};

TEST(every_policy_gives_the_same_bits) {
    for (int post = 0; post < 2; post++) {
        open_task(post ? &post_norm : &small);
        for (int i = 0; i < (post ? 13 : 400); i++) {
            host_set_threads(i % 4);
            expect_same(drawn(i));
        }
        close_task();
    }
    host_set_threads(0);
}

/* Its matrices are of whole groups. */
static const OptConfig grouped = TEST_CONFIG(3, 64, 128, 4, 131, -1);

TEST(packed_and_sparse_every_policy_gives_the_same_bits_too) {
    open_task(&grouped);
    const Rig *plain = test_gpu ? NULL : reference_for(drawn(0));
    for (kept = 1; kept < (int)COUNT(numbers); kept++) {
        CU_ASSERT(!plain || !rig_same(reference_for(drawn(0)), plain)); /* or nothing would have been packed */
        for (int i = 0; i < 50; i++) expect_same(drawn(i));
    }
    kept = 0;
    close_task();
}

/* Lanes meet only at events. Where one is missing, holding up a single lane lets another run ahead of it into the wrong
 * bytes. With the diagonal schedule seats refill and topups join. */
TEST(no_lane_may_be_so_slow_that_the_bits_change) {
    for (int packed = 0; packed < 2; packed++) {
        kept = 3 * packed;
        open_task(packed ? &grouped : &small);
        for (slow_lane = 0; slow_lane < NLANES; slow_lane++)
            for (int i = 0; i < (packed ? 4 : 10); i++) {
                Policy p = placed(placements[ON_DISK + i / 2 * (packed ? MIXED - ON_DISK : 1)], 2 + i % 2, 5 - 2 * (i % 2));
                p.delegated = i % 2, p.table_home = i / 2 % 3;
                if (i / 2 % 2) p.gbs = p.num_gpu_batches = 2, p.schedule = SCHEDULE_DIAGONAL;
                set_numbers(&p);
                expect_same(p);
            }
        slow_lane = -1, kept = 0;
        close_task();
    }
}

/* A prompt alone, at another place of the batch, or sampled: only seed, index and position count. The index is the place in
 * the input, so the same input is dealt to other batches. */
TEST(sampling_depends_on_nothing_but_seed_place_and_position) {
    if (hurried()) return;
    open_task(&small);
    Sampling sampling = {.temperature = 1.2f, .top_p = .95f, .top_k = 50, .seed = 11};
    sample(&task, sampling);
    const Policy p = drawn(8);
    const Rig *reference = reference_for(p);
    for (int i = 0; i < 9; i++) expect_same(drawn(i));
    sampling.seed = 12;
    sample(&task, sampling);
    Rig other = rig_ran(model, &p, &task, NULL);
    CU_ASSERT(!rig_same(&other, reference)); /* and the seed does count */
    for (int i = 0; i < PROMPTS; i++) {      /* a GPU takes what the host takes of its logits */
        const Answer *a = &other.answer[i];
        int32_t id = -1, at = prompt_len[i] + a->n - 1;
        run(picking(&id, a->logits, &task.prompts[i].place, &at, sampling, 1, small.vocab));
        CU_ASSERT_EQUAL(a->tokens[a->n - 1], id);
    }
    task.keep_logits = false;
    Rig unseen = rig_ran(model, &p, &task, NULL);
    CU_ASSERT(rig_same(&unseen, &other));
    rig_close(&other), rig_close(&unseen);
    close_task();
}

/* Tensors and page runs of more than a quarter MiB are read around the page cache, in blocks that do not begin where they
 * do. The token table is uploaded in two pieces. */
TEST(large_reads_from_disk_bring_the_same_bits) {
    static const int lengths[] = {200, 1, 198, 33, 196, 2, 194, 31, 192}, few[] = {4, 7, 4, 9, 4, 3, 4, 2, 4};
    OptConfig wide = TEST_CONFIG(2, 520, 1000, 5, 4100, -1);
    wide.max_pos = 512;
    model = checkpoint_dummy(&wide, 5);
    task = random_task(PROMPTS, lengths, few, wide.vocab, 7);
    task.keep_logits = true;
    for (int cpu = 0; cpu < 2; cpu++) {
        Policy p = placed(placements[ON_DISK], 4, 3);
        p.table_home = TIER_DISK, p.delegated = cpu;
        expect_same(p);
    }
    close_task();
}

/* More ops a sweep than a lane's queue holds, or a stream has marks. */
TEST(a_model_deeper_than_the_queues_gives_the_same_bits) {
    const OptConfig deep = TEST_CONFIG(100, 16, 16, 2, 40, -1);
    const int every = test_every;
    if (hurried()) return;
    open_task(&deep);
    shorten_task();
    test_every = 1; /* there are no others that do this */
    for (int way = every > 16 ? 3 : 0; way < 4; way++) {
        Policy p = placed(placements[way % 2 ? MIXED : ALL_GPU], 3, 3);
        p.delegated = way & 2;
        expect_same(p);
    }
    test_every = every;
    close_task();
}

/* Of the final layernorm's bias, or of the last token, which is in no prompt, and whose logit, being NaN, is never the
 * largest. Greedy, sampled and scored. Of a slow way the first and the last. */
TEST(a_number_that_is_none_ends_the_run_though_nobody_says_its_token) {
    const f16 nan = 0x7e00;
    open_task(&small);
    if (hurried()) shorten_task();
    for (int way = 0; way < 6; way += hurried() ? 5 : 1) {
        Rig r = {.model = model, .policy = all_gpu(4, 3), .task = &task};
        task.scored = way / 2 == 2, task.keep_logits = !task.scored;
        sample(&task, (Sampling){.temperature = way / 2 == 1});
        CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
        const Tensor table = r.plan->global[TOK_EMBED].home, bias = r.plan->global[FINAL_LN_B].home;
        r.device->upload(r.device, way % 2 ? table : bias, way % 2 ? (small.vocab - 1) * table.cols + 2 : 1, &nan, 1);
        CU_ASSERT_EQUAL(rig_run(&r), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(r.err.text, "not finite"));
        rig_close(&r);
    }
    close_task();
}

/* </s> is made a token that the model is known to choose, so that some sequences stop early and others do not. Where they
 * stop is test_events.c's. */
TEST(sequences_that_stop_early_change_nothing_for_the_others) {
    enum { POLICIES = 38 };
    OptConfig config = small;
    int stopped = 0;
    if (!one_is_due(POLICIES)) return;
    open_task(&small);
    config.eos = reference_for(all_gpu(PROMPTS, 1))->answer[4].tokens[5];
    close_task();
    open_task(&config);
    const Rig *reference = reference_for(all_gpu(PROMPTS, 1));
    for (int i = 0; i < PROMPTS; i++) stopped += reference->answer[i].reason == FINISH_STOP;
    CU_ASSERT(0 < stopped && stopped < PROMPTS);
    for (int i = 0; i < POLICIES; i++) expect_same(drawn(i));
    close_task();
}

/* With the diagonal schedule some decode while others prefill; no sweep is the one alone, and its seconds are divided. */
TEST(seconds_are_of_what_they_were_spent_on) {
    if (hurried()) return;
    open_task(&small);
    for (int schedule = 0; schedule < 3; schedule++) {
        Rig r = {.model = model, .policy = all_gpu(2, 2), .task = &task};
        const RunStats *s = &r.stats;
        const bool mixed = schedule == SCHEDULE_DIAGONAL;
        r.policy.schedule = schedule;
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        CU_ASSERT_EQUAL(s->decoded, s->generated - PROMPTS);
        CU_ASSERT_EQUAL(s->beside, r.plan->work[1].decoded);
        CU_ASSERT((s->beside > 0) == mixed && s->beside < s->decoded);
        CU_ASSERT(fabs(s->prefill_s + s->decode_s - s->total_s) <= 1e-9 * s->total_s);
        CU_ASSERT(mixed ? 0 < s->prefill_s && s->prefill_s < s->prefill_sweeps_s : s->prefill_s == s->prefill_sweeps_s);
        rig_close(&r);
    }
    close_task();
}

TEST(a_run_that_is_stopped_begins_no_further_op) {
    const int stop = 1;
    open_task(&small);
    Rig r = {.model = model, .policy = all_gpu(4, 3), .task = &task};
    CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
    r.device->stop = &stop;
    CU_ASSERT_EQUAL(rig_run(&r), -1);
    CU_ASSERT_STRING_EQUAL(r.err.text, "stopped");
    for (int lane = 0; lane < NLANES; lane++) CU_ASSERT_EQUAL(r.device->count[lane].busy_s, 0);
    rig_close(&r);
    close_task();
}

TEST(a_task_without_prompts_is_done_at_once) {
    const Task nothing = {.count = 0};
    open_task(&small);
    for (int schedule = 0; schedule < 3; schedule++) {
        Policy p = on_tiers(.5, .5, 1, 0, 1, 0, 4, 3); /* so that no tier's memory is empty */
        p.schedule = schedule;
        Rig r = rig_ran(model, &p, &nothing, NULL);
        CU_ASSERT(r.stats.sweeps == 0 && r.stats.generated == 0);
        rig_close(&r);
    }
    close_task();
}

/* Greedy tokens and logits of the engine against the plain forward. K and V are rounded to F16, and a last-bit difference
 * before that can flip a rounding; on a GPU all is F16. */
TEST(the_engine_agrees_with_the_plain_forward) {
    static float logits[100 * 131];
    Error err;
    if (hurried()) return;
    for (int post = 0; post < 2; post++) {
        open_task(post ? &post_norm : &small);
        for (int i = 0; i < PROMPTS; i++) {
            const Answer *a = &reference_for(all_gpu(PROMPTS, 1))->answer[i];
            const int s = prompt_len[i], total = s + a->n - 1;
            memcpy(task.prompts[i].ids + s, a->tokens, a->n * sizeof(int32_t));
            ASSERT_OK(reference_forward(logits, model, task.prompts[i].ids, total, &err));
            CU_ASSERT(max_norm_error(a->logits, logits + (total - 1) * small.vocab, small.vocab) <=
                      (test_gpu ? 1e-2 : 1e-3));
        }
        close_task();
    }
}

/* What Hugging Face says of a checkpoint, against the engine run over every prefix of every sequence, for a token, and
 * over every sequence for as many as it has said. Against float32 throughout, K and V in F16 alone cost 3e-4 to 8e-4; on a
 * GPU activations are F16 too. */
TEST(the_engine_agrees_with_hugging_face) {
    enum { MOST = 256 };
    static const char *const dirs[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};
    if (hurried()) return;
    for (int m = 0; m < 2; m++) {
        Checkpoint *c = opens(dirs[m]);
        Golden golden = golden_read(dirs[m]);
        Prompt prompts[MOST]; /* each with the number of its sequence as its place */
        Task t = {.prompts = prompts, .keep_logits = true};
        double worst = 0;
        c->config.eos = -1; /* Hugging Face was told to go on */
        for (int i = 0; i < golden.count; i++)
            for (int s = 1; s <= golden.sequence[i].n + 1; s++) {
                const GoldenSequence *q = &golden.sequence[i];
                if (s % (1 + test_every / 8) && s < q->n) continue;
                CU_ASSERT_FATAL(t.count < MOST);
                prompts[t.count++] = (Prompt){q->ids, imin(s, q->n), s > q->n ? golden.greedy : 1, .place = i};
            }
        Policy p = placed(placements[MIXED], 16, 3); /* a bit of everything everywhere */
        p.delegated = true, p.table_home = TIER_DISK;
        Rig r = rig_ran(c, &p, &t, NULL);
        for (int i = 0; i < t.count; i++) {
            const Answer *a = &r.answer[i];
            const GoldenSequence *q = &golden.sequence[prompts[i].place];
            const int row = prompts[i].s - 1 - (q->n - q->rows);
            if (prompts[i].n > 1)
                CU_ASSERT(a->n == golden.greedy && !memcmp(a->tokens, q->tokens, a->n * sizeof(int32_t)))
            else if (row >= 0)
                worst = fmax(worst, max_norm_error(a->logits, q->logits + (size_t)row * golden.vocab, golden.vocab));
        }
        CU_ASSERT(0 < worst && worst <= (test_gpu ? 1e-2 : 2e-3));
        CU_ASSERT_EQUAL(r.peak[TIER_DISK], r.planned[TIER_DISK]); /* with what rests in the checkpoint */
        rig_close(&r);
        golden_free(&golden);
        checkpoint_close(c);
    }
}

enum { S = 20, N = 6, SEQS = 6 };

/* A.2.1's 4 h1 bls l (s n + n (n - 1) / 2) for reads and writes: s tokens are stored in prefill and one a token after; the
 * past is loaded in each of the n-1 decoding sweeps, of V only what is chosen. Where the CPU attends, only the disk's past
 * moves, and queries go down, in F16, and results up. Pages of one token make page traffic exact. What weights and
 * activations move on the sim is test_theory.c's, and the next test says that devices move the same. */
TEST(the_cache_crosses_as_the_formula_says) {
    const Hardware fast = machine_with("");
    const Bytes queries = (N - 1) * SEQS * grouped.l * grouped.h1;
    Task even = equal_task(SEQS, S, N);
    model = checkpoint_dummy(&grouped, 3);
    for (int way = 0; way < 24 && !hurried(); way++) {
        const bool disk = way & 1, packed = way & 2, on_sim = way & 4, cpu = way / 8, sparse = way / 16;
        const Bytes row = SEQS * grouped.l * (packed ? grouped.nh * quant_bytes(grouped.h1 / grouped.nh) : 2u * grouped.h1),
                    stored = 2 * row * (S + N - 1), result = type_bytes(on_sim ? F16 : test_act_type());
        Policy p = on_tiers(1, 0, 0, !disk, 1, 0, 2, 3);
        p.page_tokens = 1, p.delegated = cpu, p.sparsity = sparse ? .25 : 1, p.cache_packed = packed;
        Bytes past = 0;
        for (int t = S; t < S + N - 1; t++) past += row * (t + (sparse ? sparse_tokens(.25, t + 1) - 1 : t));
        Rig r = rig_ran(model, &p, &even, on_sim ? &fast : NULL);
        const Bytes expected[] = {cpu ? queries * result : past, stored + (cpu ? 2 * queries : 0), disk ? past : 0,
                                  disk ? stored : 0};
        for (int c = CTOG; c <= CTOD; c++) CU_ASSERT_EQUAL(r.moved[c][CACHE], expected[c]);
        rig_close(&r);
    }
    free_task(&even);
    checkpoint_close(model);
}

/* On the suite's device and on sims of other rates, which all move the same bytes, or numbers of the type of activations.
 * Where a GPU is tested, what it does not run is left out whole. */
TEST(the_plan_is_what_is_used_to_the_byte) {
    static const double share[][2] = {{1, 0}, {0, 1}, {0, 0}, {.3, .3}};
    Hardware machine[2] = {machine_with(""), machine_with("ctog_bdw_g=1e5 dtoc_bdw_p=1e5 cpu_bdw=1e5 op_s=1e-4")};
    Task even = equal_task(SEQS, S, N);
    machine[1].shared_cores = true;
    model = checkpoint_dummy(&small, 3);
    for (int i = 0; i < 4 * 64; i++) {
        const double *w = share[i % 4], *c = share[i / 4 % 4], *h = share[i / 16 % 4];
        const int devices = taken() ? 3 : 2;
        Rig r[3];
        if (test_gpu && devices == 2) continue;
        Policy p = on_tiers(w[0], w[1], c[0], c[1], h[0], h[1], i & 64 ? 6 : 2, i & 64 ? 1 : 3);
        p.delegated = i & 128, p.table_home = i % 3;
        for (int m = 0; m < devices; m++) {
            r[m] = rig_ran(model, &p, &even, m < 2 ? &machine[m] : NULL);
            for (int t = 0; t < NTIERS; t++) CU_ASSERT_EQUAL(r[m].peak[t], r[m].planned[t]);
            rig_close(&r[m]);
        }
        CU_ASSERT(!memcmp(r[0].moved, r[1].moved, sizeof r->moved));
        for (int x = 0; x < NCHANNELS * OTHER && devices > 2; x++) {
            const Channel channel = x / OTHER;
            const Kind kind = x % OTHER;
            const bool of_type = kind == ACTIVATION || (kind == CACHE && channel == CTOG && p.delegated);
            const Bytes size = of_type ? type_bytes(test_act_type()) / sizeof(f16) : 1;
            CU_ASSERT_EQUAL(r[2].moved[channel][kind], r[0].moved[channel][kind] * size);
        }
        const bool streams = !w[0] && !w[1] && p.table_home == TIER_DISK; /* all weights, and a file has no padding */
        if (streams) CU_ASSERT_EQUAL(r[0].moved[DTOC][WEIGHT], N * streamed_bytes(&small));
    }
    free_task(&even);
    checkpoint_close(model);
}

static int refuse(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    (void)ctx, (void)prompt, (void)tokens, (void)n, (void)reason;
    return fail(err, EXIT_FAILED, "refused");
}

/* In turn a run that succeeds, one that fails, and a device that cannot be opened. */
TEST(nothing_is_left_behind_after_success_or_failure) {
    enum { SUCCESS, FAILURE, NO_DEVICE, DEVICES = 4, PAGES = 256 }; /* of both tiers of a device */
    int mapped[2] = {0, 0}; /* 4 KiB of memory: behind the first four rounds, which leave what others use, and at the end */
    open_task(&small);
    if (hurried()) shorten_task();
    memory_share_heap();          /* malloc maps no memory for threads that happen to meet, */
    host_set_threads(1);          /* and there are no helpers, which would keep working memory from their first task on */
    reference_for(all_gpu(4, 3)); /* the threads of a GPU's streams stay */
    for (int round = 0; round < (hurried() ? 2 : 9); round++) {
        const char *dir = temp_dir();
        const int files = count_files("/proc/self/fd"), threads = count_files("/proc/self/task"), way = round % 3;
        Rig r = {.model = model, .policy = placed(placements[MIXED], 4, 3), .task = &task, .dir = dir};
        if (way == NO_DEVICE) r.dir = "/nonexistent";
        if (way == FAILURE) r.hears.done = refuse;
        CU_ASSERT_EQUAL(rig_run(&r), way == SUCCESS ? 0 : -1);
        CU_ASSERT_EQUAL(r.device == NULL, way == NO_DEVICE);
        CU_ASSERT_EQUAL(count_files(dir), 0); /* even while it runs the file has no name */
        rig_close(&r);
        CU_ASSERT_EQUAL(count_files(dir), 0);
        CU_ASSERT_EQUAL(count_files("/proc/self/fd"), files);
        for (int ms = 0; ms < 1000 && count_files("/proc/self/task") > threads; ms++) usleep(1000); /* they may linger */
        CU_ASSERT(count_files("/proc/self/task") <= threads);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* a sanitizer maps more and more */
        FILE *f = fopen("/proc/self/maps", "r");                    /* statm would be that of an emulator, such as qemu */
        CHECK(f);
        mapped[round > 3] = 0;
        for (unsigned long begin, end; fscanf(f, "%lx-%lx%*[^\n]", &begin, &end) == 2;)
            mapped[round > 3] += (int)((end - begin) / 4096);
        fclose(f);
#endif
    }
    /* three devices have mapped 37 of their disks each */
    CU_ASSERT(hurried() || mapped[1] < mapped[0] + (test_gpu ? DEVICES * PAGES : 32));
    host_set_threads(0);
    close_task();
}

/* A launch fails near the end: the run ends, and says why. */
TEST(a_gpu_in_trouble_ends_the_run) {
    if (!test_gpu || !strstr(test_gpu->name, "emulated")) return;
    open_task(&small);
    Rig r = {.model = model, .policy = placed(placements[MIXED], 4, 3), .task = &task};
    r.policy.delegated = true;
    setenv("CUDA_CPU_LAUNCH_FAILS", "900", 1);
    r.gpu = cuda_open_gpu(&r.err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(r.gpu);
    CU_ASSERT_EQUAL(rig_run(&r), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(r.err.text, "the GPU"));
    rig_close(&r);
    r.gpu->close(r.gpu);
    unsetenv("CUDA_CPU_LAUNCH_FAILS");
    close_task();
}

/* A lane may be given ops faster than they happen, more of them than it has marks, which have no times, or have them. */
TEST(what_is_waited_for_has_happened_however_far_ahead_a_lane_is) {
    enum { OPS = MARKS * 3 / 2 };
    const OptConfig wide = TEST_CONFIG(2, 300, 1000, 3, 131, -1);
    int32_t number[OPS];
    Event done[OPS];
    open_task(&wide);
    for (int timed = 0; timed < 2; timed++) {
        Rig r = {.model = model, .policy = all_gpu(4, 3), .task = &task};
        if (timed) r.policy.schedule = SCHEDULE_DIAGONAL;
        CU_ASSERT_EQUAL_FATAL(rig_open(&r), 0);
        Device *device = r.device;
        const Move slow = {r.plan->weight[1][FC1_W].home, r.plan->weight[0][FC1_W].home};
        const Tensor up = plan_bytes(r.plan, KV_CACHE, TIER_GPU, 0, I32, OPS);
        const Tensor down = plan_bytes(r.plan, LOGITS, TIER_CPU, 0, I32, OPS);
        for (int i = 0; i < OPS; i++) number[i] = i + 1;
        device->upload(device, up, 0, number, MARKS);
        device->upload(device, up, MARKS, number + MARKS, OPS - MARKS); /* as large tensors are, piece by piece */
        int32_t *arrived = memset(device->cpu_address(device, down), 0, sizeof number);
        const double start = device->now(device);
        Op op = op_copy((Call){.lane = W_LOAD, .kind = OTHER}, &slow, 1);
        const Event first = device->post(device, &op);
        for (int i = 0; i < OPS; i++) { /* something that takes time, then a number; an event makes it a group of its own */
            const Move moves[] = {slow, slow, slow, {tensor_cols(down, i, 1), tensor_cols(up, i, 1)}};
            op = op_copy((Call){.lane = STORE, .kind = OTHER}, moves, 4);
            op.after[op.nafter++] = first;
            done[i] = device->post(device, &op);
        }
        for (int i = MARKS * 3 / 4; i < OPS; i++) {
            CU_ASSERT_EQUAL_FATAL(device->wait(device, done[i], &r.err), 0);
            CU_ASSERT_EQUAL(arrived[i], i + 1);
        }
        const double busy = device->count[STORE].busy_s;
        CU_ASSERT((busy > 0) == (timed || !test_gpu) && busy <= device->now(device) - start + 1e-3);
        rig_close(&r);
    }
    close_task();
}
