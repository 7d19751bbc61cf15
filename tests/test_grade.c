/* test_grade.c: the steps by which `make grade EX=N` grades the exercises of docs/EXERCISES.md. They give no solution away:
 * what they expect was found by hand, is a property, or is what Hugging Face or another part of the program computed.
 * answers.h has the driver; here an exercise has its case, which ends with the answer, how one is drawn, how the code that
 * is graded answers it, and what must be true of that. The points of each step, what it expects in words, and the wrong
 * solutions with the points that they get are in scripts/exercises.txt. */
#include "answers.h"
#include "branches/walk.h"

#include <strings.h>

#include "golden.h"
#include "lessons.h"
#include "lp_parts.h"
#include "lp_tables.h"
#include "mini_kernels.h"
#include "mini_parts.h"
#include "ops.h"
#include "written.h"

static Error err;

/* In a child: ends it for what should not happen whatever the code that is graded does. */
static void must(bool done, const Error *why) {
    if (done) return;
    fprintf(stderr, "%s\n", why->text);
    _exit(127);
}

/* In a child: returns how many prompts get all of their tokens. */
static int run_rig(Rig *r) {
    int all = 0;
    must(rig_run(r) == 0, &r->err);
    for (int i = 0; i < r->prompts; i++) all += r->answer[i].done == 1 && r->answer[i].n == r->task->prompts[i].n;
    return all;
}

// ---- 1: plain attention, by itself and through the forward pass -----------------------------------------------------
//
// Weights are known by construction: at one place of a head k of token u is sqrt(hd) log(a_u), and anything at the others,
// where q of token t is 0; at the one it is c_t. So their product over sqrt(hd) is c_t log(a_u), and token u weighs
// a_u^c_t.

enum { ATT_N = 12, ATT_H1 = 24, GUARD = 7, ATT_MOST = ATT_N * ATT_H1, GOLDEN_LOGITS = 1 << 15 };
static struct {
    int n, nh, hd, changed;
    float q[ATT_MOST], k[2][ATT_MOST], v[2][ATT_MOST]; /* [1]: with another token `changed` */
    double a[ATT_N][ATT_H1], c[ATT_N];                 /* a: by token and head */
    const GoldenSequence *golden;                      /* a prompt whose logits are wanted too; or NULL */
    float o[2][ATT_MOST + GUARD], logits[GOLDEN_LOGITS];
} att;
static const float UNTOUCHED = 12345;
static const char GOLDEN_DIR[] = "tests/golden/opt-pre";
static Golden golden;

/* In the last step scores are up to 130, too much for expf. */
static bool draw_attention(void) {
    if (!golden.file) golden = golden_read(GOLDEN_DIR);
    att.golden = step == 3 && number < golden.count ? &golden.sequence[number] : NULL;
    CHECK(!att.golden || att.golden->n * golden.vocab <= GOLDEN_LOGITS);
    att.n = step == 1 ? 1 : draw(2, ATT_N), att.nh = draw(2, 4), att.hd = draw(2, 6);
    att.changed = draw(0, att.n - 1);
    for (int j = 0; j < ATT_MOST + GUARD; j++) att.o[0][j] = UNTOUCHED;
    for (int t = 0; t < att.n; t++) att.c[t] = draw_real(0, step == 3 && number % 2 ? 60 : 2);
    for (int h = 0; h < att.nh; h++) {
        const int place = draw(0, att.hd - 1);
        for (int t = 0; t < att.n; t++) {
            att.a[t][h] = draw(1, 9);
            for (int d = 0; d < att.hd; d++) {
                const int at = (t * att.nh + h) * att.hd + d, more = t == att.changed;
                att.q[at] = d == place ? att.c[t] : 0, att.v[0][at] = draw_real(-4, 4);
                att.k[0][at] = d == place ? sqrt(att.hd) * log(att.a[t][h]) : draw_real(-4, 4);
                att.k[1][at] = att.k[0][at] + more, att.v[1][at] = att.v[0][at] + 9 * more;
            }
        }
    }
    return true;
}

static void attend(void) {
    const OptConfig config = {.h1 = att.nh * att.hd, .nh = att.nh};
    for (int i = 0; i < 2; i++) plain_attention(att.o[i], att.q, att.k[i], att.v[i], att.n, &config);
    if (!att.golden) return;
    Checkpoint *checkpoint = checkpoint_open(GOLDEN_DIR, &err);
    must(checkpoint, &err);
    must(!reference_forward(att.logits, checkpoint, att.golden->ids, att.golden->n, &err), &err);
}

/* A token alone has its own v. Of logits, as in test_opt_model.c: K and V rounded to F16 cost up to 8e-4, what is wrong
 * costs over 1e-2. */
static void check_attention(void) {
    const GoldenSequence *s = att.golden;
    const int h1 = att.nh * att.hd;
    in_case("%d tokens, %d heads of %d", att.n, att.nh, att.hd);
    for (int g = 0; g < GUARD; g++)
        if (att.o[0][att.n * h1 + g] != UNTOUCHED) wrong("something behind o was written to");
    for (int t = 0; t < att.n; t++) {
        const float *o = att.o[0] + t * h1, *other = att.o[1] + t * h1;
        const bool sees = t < att.changed ? memcmp(o, other, h1 * sizeof *o) != 0 : max_norm_error(o, other, h1) > 1e-4;
        if (step == 2 && sees != (t >= att.changed))
            wrong("token %d %s token %d", t, sees ? "sees" : "does not see", att.changed);
        for (int d = 0; d < h1 && step != 2; d++) {
            double all = 0, sum = 0;
            for (int u = 0; u <= t; u++) {
                const double weight = pow(att.a[u][d / att.hd], att.c[t]);
                all += weight, sum += weight * att.v[0][u * h1 + d];
            }
            near_to(o[d], sum / all, step == 1 ? 1e-6 : 4e-3, "o of token %d, head %d, element %d", t, d / att.hd,
                    d % att.hd);
        }
    }
    if (!s) return;
    in_case("logits of prompt %d (%d tokens), of its last %d tokens", number, s->n, s->rows);
    near_row(att.logits + (s->n - s->rows) * golden.vocab, s->logits, s->rows * golden.vocab, 2e-3);
}

// ---- 2 and 3: who may be seated -------------------------------------------------------------------------------------

enum { LINE = 64, SWEEPS = 40 };
static struct {
    Prompt prompts[LINE];
    Policy policy;
    int count, sweeps, first;         /* the first sweep that is looked at */
    int stops;                        /* the seat whose sequence stops before it; -1: none */
    int limit[NTIERS];                /* of pages; -1: none */
    int may[SWEEPS], entered[SWEEPS]; /* before each sweep: what seats_for said, who entered */
} line;

static void enter(void) {
    const Task task = {.prompts = line.prompts, .count = line.count};
    Admission a;
    int next = 0, seats[LINE], topups;
    admission_open(&a, &line.policy, &task, &next, line.limit[0] < 0 ? NULL : line.limit);
    for (int i = 0; i < line.sweeps; i++) {
        for (int e = 0; e < a.nseats; e++) {
            const Seat *seat = &a.seat[e];
            const int had = (int)(i - seat->since);
            if (seat->prompt >= 0 && (had == line.prompts[seat->prompt].n || (i == line.first && e == line.stops)))
                admission_leave(&a, e, had);
        }
        a.sweep = i;
        line.may[i] = i ? imax(0, seats_for[SCHEDULE_DIAGONAL](&a)) : 0;
        line.entered[i] = admission_next(&a, i, seats, &topups);
    }
    admission_close(&a);
}

/* Equal prompts; there may be fewer than seats in the block. In the last step one stops when all seats are taken and nobody
 * else is about to leave or to enter. */
static bool draw_seats(void) {
    const bool few = step == 2 && number % 3 == 1; /* prompts for two batches or more, but not for all of the policy's */
    const int gbs = draw(step == 3 ? 2 : 1, 4), K = draw(step == 3 || few ? 3 : 1, 5),
              n = draw(step == 3 ? 2 * K : K, 3 * K);
    line.policy = all_gpu(gbs, K);
    line.limit[0] = -1;
    line.policy.schedule = SCHEDULE_DIAGONAL;
    line.count = few ? draw(gbs + 1, gbs * (K - 1)) : step < 3 && draw(0, 1) ? draw(1, gbs * K) : LINE;
    line.sweeps = step == 1 ? 1 : step == 2 ? imin(3 * n, SWEEPS) : n;
    line.first = step == 3 ? n - 1 : 0, line.stops = step == 3 ? draw(0, gbs * K - 1) : -1;
    for (int i = 0; i < line.count; i++) line.prompts[i] = (Prompt){.s = 5, .n = n};
    return true;
}

/* By Figure 6: batch b enters with the first sweep that is not before b n/K, and every n sweeps after that the next one
 * takes its seats. The last of a small task's batches may not be full. */
static void check_seats(void) {
    int expected[SWEEPS] = {0}, waiting = line.count;
    const int gbs = line.policy.gbs, seats = imin(gbs * line.policy.num_gpu_batches, line.count),
              K = (seats + gbs - 1) / gbs, n = line.prompts[0].n;
    in_case("prompts with n = %d, in a block of %d seats, batches of %d", n, seats, gbs);
    for (int b = 0; b < K; b++)
        for (int i = (b * n + K - 1) / K; i < line.sweeps; i += n) expected[i] += imin(gbs, seats - b * gbs);
    expected[line.first] += step == 3;
    for (int i = 0; i < line.sweeps; i++) {
        const bool asked = i >= line.first && i && waiting > 0;
        const int enter = imin(expected[i], waiting);
        waiting -= enter;
        if (asked) near_to(line.may[i], expected[i], 0, "prompts that may be seated before sweep %d", i);
        if (i >= line.first) near_to(line.entered[i], enter, 0, "prompts that enter sweep %d", i);
    }
}

/* Pages that the first m hold in any sweep, if all of them entered sweep 0. */
static int most_held(int m) {
    int most = 0;
    for (int sweep = 0; sweep < SWEEPS; sweep++) {
        int pages = 0;
        for (int i = 0; i < m; i++)
            if (sweep < line.prompts[i].n) pages += pages_for(line.prompts[i].s + sweep, line.policy.page_tokens);
        most = imax(most, pages);
    }
    return most;
}

/* A batch of prompts, equal ones but in the last step, of which at least one could enter alone. */
static bool draw_pages(void) {
    line.count = draw(2, 8);
    line.sweeps = 1, line.stops = -1;
    line.policy = all_gpu(line.count, 1), line.policy.page_tokens = draw(2, 5);
    for (int i = 0; i < line.count; i++)
        line.prompts[i] = i && step < 3 ? line.prompts[0] : (Prompt){.s = draw(1, 16), .n = step == 2 ? 1 : draw(1, 14)};
    const int all = most_held(line.count);
    line.limit[0] = step == 1 ? all + (number % 3 - 1) * draw(0, 9) : draw(step == 2 ? 0 : most_held(1), all);
    if (step == 1 && number % 3 == 0) line.limit[0] = -1;
    return true;
}

/* As many enter sweep 0 as always have their pages, and no more. */
static void check_pages(void) {
    int m = 0;
    while (m < line.count && (line.limit[0] < 0 || most_held(m + 1) <= line.limit[0])) m++;
    in_case("prompts of s = %d, n = %d, and others; pages of %d tokens, limit %d (-1: none)", line.prompts->s,
            line.prompts->n, line.policy.page_tokens, line.limit[0]);
    near_to(line.entered[0], m, 0, "prompts that enter sweep 0, of which the first %d need at most %d pages", m,
            most_held(m));
}

// ---- 4: error diffusion ---------------------------------------------------------------------------------------------

enum { DEALT = 60, MOST_DEALT = 48 * NROLES }; /* items; the weights of OPT-30B */
static struct {
    double share[NTIERS], size[MOST_DEALT], within;
    int items, every; /* so many items have their shares to within so many bytes */
    Tier tier[MOST_DEALT];
} dealt;

static void deal(void) {
    const OptConfig opt = opt_named("opt-30b");
    Diffusion diffusion = {.share = {dealt.share[0], dealt.share[1], dealt.share[2]}};
    if (step == 3) place_weights((Tier(*)[NROLES])dealt.tier, &opt, dealt.share[0], dealt.share[1]);
    for (int j = 0; j < dealt.items && step != 3; j++) dealt.tier[j] = diffuse(&diffusion, dealt.size[j]);
}

/* Shares of q parts.
 *   1  each q equal items are dealt exactly
 *   2  items of 1 to 100 bytes. A tier is due at most 5/6 of the largest item: what is due sums to nothing, and nobody who
 *      was furthest behind is more than 2/3 of an item ahead
 *   3  the weights of OPT-30B, layer by layer
 *   4  equal items of which each q are dealt exactly, but for what rounding leaves, which may be less than nothing for both
 *      tiers with a share; then small ones, which are less than that */
static bool draw_deal(void) {
    const OptConfig opt = opt_named("opt-30b");
    const int q[] = {draw(2, 8), 1000, 100, draw(3, 7)}, all = q[step - 1], least = step == 4;
    const int a = draw(least, all - least), b = step < 4 && draw(0, 2) ? draw(0, all - a) : all - a;
    const int parts[NTIERS] = {a, b, all - a - b}, every[] = {all, 1, NROLES, 1};
    const double within[] = {1e-9, 100, 2. * opt.h1 * opt.h2 + 2 * opt.h2, INFINITY};
    double large = 0;
    for (int t = 0; t < NTIERS; t++) dealt.share[(t + number) % NTIERS] = (double)parts[t] / all;
    dealt.items = step == 3 ? opt.l * NROLES : DEALT, dealt.every = every[step - 1], dealt.within = within[step - 1];
    for (int j = 0; j < dealt.items; j++) {
        int rows, cols;
        opt_role_shape(&opt, (Role)(j % NROLES), &rows, &cols);
        if (j % (all + 2) == 0) large = draw_real(1e14, 1e15);
        const double sizes[] = {1, draw(1, 100), 2. * rows * cols, j % (all + 2) < all ? large : draw_real(0, 1e-3)};
        dealt.size[j] = sizes[step - 1];
    }
    return true;
}

static void check_deal(void) {
    double holds[NTIERS] = {0}, all = 0;
    in_case("shares %.4g %.4g %.4g", dealt.share[0], dealt.share[1], dealt.share[2]);
    for (int j = 0; j < dealt.items; j++) {
        const Tier tier = dealt.tier[j];
        if ((unsigned)tier >= NTIERS) return wrong("item %d went to tier %d", j, tier);
        all += dealt.size[j], holds[tier] += dealt.size[j];
        if (dealt.share[tier] == 0 && step != 3)
            return wrong("item %d of %g bytes went to %s, which has none", j, dealt.size[j], tier_name[tier]);
        for (int t = 0; t < NTIERS && (j + 1) % dealt.every == 0; t++)
            near_to(holds[t], all * dealt.share[t], dealt.within, "bytes on %s after %d items", tier_name[t], j + 1);
    }
}

// ---- 5, 6 and 14: the engine and mini.c, against the plain forward --------------------------------------------------

enum { PROMPTS = 5, TOKENS = 4, VOCAB = 131, LONGEST = 16, BLOCKS = 5 };
static struct {
    Task task;
    Checkpoint *model;
    Rig rig;
    char words[700]; /* to mini.c; "": to the engine */
    int ended;       /* prompts that got their tokens */
    int32_t ids[PROMPTS][TOKENS];
    float logits[PROMPTS][TOKENS][VOCAB];
} gen;
static const OptConfig small = SMALL_CONFIG(-1);
static const int blocks[BLOCKS][2] = {{5, 1}, {2, 1}, {2, 2}, {2, 3}, {3, 2}}; /* gbs, num_gpu_batches */

/* Percentages on the GPU and on the CPU, as for --percent: of weights, cache and activations. */
static const struct {
    int step, mini; /* of mini.c's exercise; 0: none */
    const char *percent;
} placements[] = {
    {1, 1, "100 0 100 0 100 0"},
    {2, 3, "0 100 100 0 100 0"},
    {2, 3, "30 30 100 0 100 0"},
    {2, 0, "0 0 100 0 100 0"},
    {0, 3, "0 0 0 0 0 0"},
    /* the weights stay, so that this does not hang on the step before */
    {3, 0, "100 0 100 0 0 50"},
    {3, 0, "100 0 0 50 100 0"},
    {3, 2, "100 0 20 30 40 20"},
    {3, 2, "100 0 0 100 0 0"},
    {3, 2, "100 0 0 0 0 100"},
    /* delegated */
    {4, 0, "100 0 0 100 100 0"},
    {5, 0, "100 0 40 60 100 0"},
    {5, 0, "100 0 50 50 100 0"},
    {6, 0, "100 0 0 0 100 0"},
    {6, 0, "100 0 20 40 100 0"},
};

static bool draw_run(void) {
    const int *block = blocks[number % BLOCKS];
    char *percent = (char *)placements[number / BLOCKS].percent;
    double share[6];
    int s[PROMPTS], n[PROMPTS];
    if (placements[number / BLOCKS].step != step) return false;
    for (int i = 0; i < 6; i++) share[i] = strtod(percent, &percent) / 100;
    for (int i = 0; i < PROMPTS; i++) s[i] = draw(3, LONGEST), n[i] = TOKENS;
    gen.task = random_task(PROMPTS, s, n, VOCAB, draw(1, 1 << 20)), gen.task.keep_logits = true;
    gen.model = checkpoint_dummy(&small, draw(1, 1 << 20));
    gen.rig = (Rig){.model = gen.model, .policy = placed(share, block[0], block[1]), .task = &gen.task, .dir = temp_dir()};
    gen.rig.policy.page_tokens = draw(2, 5), gen.rig.policy.delegated = step > 3;
    return true;
}

static void generate(void) {
    Rig rig = gen.rig;
    gen.ended = run_rig(&rig);
    for (int i = 0; i < PROMPTS; i++) {
        memcpy(gen.ids[i], rig.answer[i].tokens, sizeof gen.ids[i]);
        memcpy(gen.logits[i], rig.answer[i].steps, sizeof gen.logits[i]);
    }
}

enum { TEXTS = 10 };
static const char *const texts[TEXTS] = {"Once upon a time", "Tom and Sue had a", "One was", "The big brown dog",
                                         "Ben liked",        "A little girl and", "One day", "The cat was",
                                         "She saw a",        "Mom said"};

/* Whatever rests where the engine's does, in several blocks, with overlapping or without; in the first step one batch after
 * the other. */
static bool draw_mini(void) {
    const char *dir = "models/opt-tiny", *percent = placements[number / BLOCKS].percent;
    const int *block = blocks[number % BLOCKS];
    if (placements[number / BLOCKS].mini != step || (step == 1 && block[1] > 1)) return false;
    gen.model = opens(dir), gen.task = equal_task(PROMPTS, LONGEST, TOKENS);
    Tokenizer *tokenizer = tokenizer_open(dir, gen.model->config.vocab, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tokenizer);
    strcpy(gen.words, dir);
    for (int i = 0; i < PROMPTS; i++) {
        Prompt *q = &gen.task.prompts[i];
        int32_t *ids;
        q->place = draw(0, TEXTS - 1);
        q->s = text_encode(&ids, texts[q->place], strlen(texts[q->place]), tokenizer, &err);
        CU_ASSERT_FATAL(q->s > 1 && q->s <= LONGEST);
        memcpy(q->ids, ids, q->s * sizeof *ids), free(ids);
        sprintf(strchr(gen.words, 0), " '%s'", texts[q->place]);
    }
    sprintf(strchr(gen.words, 0), " --json --max-tokens %d --percent %s --gpu-batch-size %d --num-gpu-batches %d%s", TOKENS,
            percent, block[0], block[1], number % 2 ? " --no-overlap" : "");
    tokenizer_close(tokenizer);
    return true;
}

/* In a child: writes what `mini WORDS` prints. */
enum { MOST_TEXT = 1 << 14 };
static void run_mini(char to[MOST_TEXT], const char *words) {
    char text[1000], *argv[40] = {"mini"};
    snprintf(text, sizeof text, "%s", words);
    const int argc = 1 + split_words(text, argv + 1, 39);
    stdout = fmemopen(to, MOST_TEXT, "w");
    const int status = mini_main(argc, argv);
    fflush(stdout);
    if (status) _exit(status);
}

static void generate_by_mini(void) {
    char text[MOST_TEXT] = "", *at = text;
    run_mini(text, gen.words);
    for (int i = 0; i < PROMPTS && (at = strstr(at, "\"tokens\": [")); i++, at++) {
        int32_t *to = gen.ids[i];
        gen.ended += sscanf(at, "\"tokens\": [%d, %d, %d, %d]", to, to + 1, to + 2, to + 3) == TOKENS;
    }
}

/* Each step's logits are those of the plain forward of what has been said so far. As in test_schedule.c: a difference in
 * the last bit can flip a rounding of K and V to F16. mini.c rounds otherwise, so that any token will do whose logit is
 * within 2e-3 of the largest. */
static void check_run(void) {
    static int32_t right[TEXTS][TOKENS]; /* what mini.c has said, and was right */
    const char *percent = placements[number / BLOCKS].percent;
    const int vocab = gen.model->config.vocab, *block = blocks[number % BLOCKS];
    const bool mini = gen.words[0];
    float *logits = xcalloc((size_t)(LONGEST + TOKENS) * vocab, sizeof *logits);
    near_to(gen.ended, PROMPTS, 0, "--percent %s: prompts that got their tokens", percent);
    for (int i = 0; i < PROMPTS; i++) {
        const Prompt *q = &gen.task.prompts[i];
        const int32_t *ids = gen.ids[i];
        bool good = true;
        for (int t = 0; t < TOKENS; t++)
            if (ids[t] < mini || ids[t] >= vocab) return wrong("prompt %d: token %d is %d", i, t, ids[t]);
        if (mini && !memcmp(ids, right[q->place], sizeof *right)) continue;
        memcpy(q->ids + q->s, ids, sizeof *gen.ids);
        ASSERT_OK(reference_forward(logits, gen.model, q->ids, q->s + TOKENS - 1, &err));
        for (int t = 0; t < TOKENS && good; t++) {
            const float *row = logits + (size_t)(q->s - 1 + t) * vocab;
            float best = row[0], largest = 0;
            for (int v = 0; v < vocab; v++) best = fmaxf(best, row[v]), largest = fmaxf(largest, fabsf(row[v]));
            in_case("--percent %s, %d batches of %d: prompt %d (s = %d), token i = %d, logits", percent, block[1], block[0],
                    i, q->s, t);
            good = mini ? near_to(row[ids[t]], best, 2e-3 * largest, "that of token %d, and the best", ids[t])
                        : near_row(gen.logits[i][t], row, VOCAB, 1e-2);
        }
        if (good && mini) memcpy(right[q->place], ids, sizeof *right);
    }
    free(logits), free_task(&gen.task), checkpoint_close(gen.model);
}

// ---- 7: Appendix A.3 in generation, by hand -------------------------------------------------------------------------
//
// h1 = 8, h2 = 32, s = 10, n = 6, bls = 2 x 3 = 6. A layer has 8 h1^2 + 4 h1 h2 = 1536 bytes of weights; a new token of
// each sequence has 2 h1 bls = 96 bytes of activations and 4 h1 bls = 192 of K and V, and attends to 4 bls (s + n/2) h1 =
// 2496. Products take 6 x 1536 flops wherever; attention is the GPU's over cg, and the CPU's over the rest. Cases are
// larger: all of h1 and h2, of s and n, and bls, each by a factor of its own, by which the numbers grow as a unit does.

enum { CTOG_G, GTOC_G, DTOC_G, CTOD_G, COMP_G, NROWS_G };
static const struct {
    const char *name;
    int step;
} rows_g[NROWS_G] = {{"ctog^g", 1}, {"gtoc^g", 1}, {"dtoc^g", 2}, {"ctod^g", 2}, {"comp^g", 3}};
static struct {
    int size, length, block; /* by which they are larger */
    Hardware machine;
    OptConfig config;
    Block paper;
    LpRow row[NROWS_G];
} a3;

static bool draw_rows(void) {
    Hardware *m = &a3.machine;
    a3.size = draw(1, 5), a3.length = draw(1, 6), a3.block = draw(1, 6);
    for (int p = 0; p < 2; p++) {
        for (int link = 0; link <= CTOD; link++) m->bdw[link][p] = draw_real(1, 60);
        m->mm_flops[p] = draw_real(1, 60), m->bmm_flops[p] = draw_real(1, 60), m->cpu_flops[p] = draw_real(1, 60);
    }
    a3.config = (OptConfig)TEST_CONFIG(draw(2, 9), 8 * a3.size, 32 * a3.size, 2, 10, -1);
    a3.paper = (Block){10 * a3.length, 6 * a3.length, 2 * a3.block, 3};
    return true;
}

static void make_rows(void) {
    Lp lp;
    paper_lp(&lp, &a3.machine, &a3.config, &a3.paper);
    for (int r = 0; r < lp.m; r++)
        for (int w = 0; w < NROWS_G; w++)
            if (!strcmp(lp.row[r].name, rows_g[w].name)) a3.row[w] = lp.row[r];
}

/* The row is a x - T_gen <= b, which comes behind a. */
static void check_rows(void) {
    static const char *const others[] = {"T_pre", "T_gen", "right-hand side"};
    const Hardware *m = &a3.machine;
    const double weights = 1536 * a3.size * a3.size, hidden = 96 * a3.size * a3.block, kv = 2 * hidden,
                 attended = 2496 * a3.size * a3.block * a3.length, products = 6 * weights * a3.block;
    const double expected[NROWS_G][NVARS + 1] = {
        [CTOG_G] = {[WC] = weights, [WD] = weights, [HC] = hidden, [HD] = hidden},
        [GTOC_G] = {[HC] = hidden, [HD] = hidden},
        [DTOC_G] = {[WD] = weights, [CD] = attended, [HD] = hidden},
        [CTOD_G] = {[CD] = kv, [HD] = hidden},
        [COMP_G] = {[CG] = attended / m->bmm_flops[0],
                    [CC] = attended / m->cpu_flops[0],
                    [CD] = attended / m->cpu_flops[0],
                    [NVARS] = -products / m->mm_flops[0]},
    };
    in_case("h1 %d, h2 %d, s %d, n %d, bls %d", a3.config.h1, a3.config.h2, a3.paper.s, a3.paper.n,
            a3.paper.gbs * a3.paper.num_gpu_batches);
    for (int r = 0; r < NROWS_G; r++) {
        const LpRow *row = &a3.row[r];
        if (rows_g[r].step != step) continue;
        if (!row->name || row->equal) return wrong("there is no row %s that is an inequality", rows_g[r].name);
        for (int f = 0; f <= NVARS; f++) {
            const double rate = r < COMP_G ? m->bdw[r][0] : 1, amount = f == T_GEN ? -rate : expected[r][f];
            near_to(rate * (f < NVARS ? row->a[f] : row->b), amount, 1e-9 * fabs(amount), "row %s, %s, times its rate",
                    rows_g[r].name, f < NFRACTIONS ? fraction_name[f] : others[f - NFRACTIONS]);
        }
    }
}

// ---- 8 and 13: the simplex method -----------------------------------------------------------------------------------

static struct {
    LpTable table; /* and what is expected */
    Lp lp;
    char words[700]; /* that make mini.c print the answer */
    LpVerdict verdict;
    double value;
} program;

/* By x = 2, 6; 2, 0, 1; 1, 1.5; and one where phase 1 leaves an artificial in the basis, at 0. */
enum { NO_EQUATIONS = 3, TEXTBOOK = 6 };
static const LpTable textbook[TEXTBOOK] = {
    {"-3x - 5y", 2, 3, 0, LP_OPTIMAL, {{-3, -5, -36}, {1, 0, 4}, {0, 2, 12}, {3, 2, 18}}},
    {"-5x - 4y - 3z", 3, 3, 0, LP_OPTIMAL, {{-5, -4, -3, -13}, {2, 3, 1, 5}, {4, 1, 2, 11}, {3, 4, 2, 8}}},
    {"a cost that falls without end", 2, 2, 0, LP_UNBOUNDED, {{-2, 1}, {-1, 3, 2}, {0, -2, 5}}},
    {"x + 2y = 4, x >= 1", 2, 2, 1, LP_OPTIMAL, {{1, 1, 2.5}, {1, 2, 4}, {-1, 0, -1}}},
    {"-x - y = 0, x <= 5", 2, 2, 1, LP_OPTIMAL, {{-1, 0, 0}, {-1, -1, 0}, {1, 0, 5}}},
    {"two rows that contradict each other", 1, 2, 0, LP_INFEASIBLE, {{1}, {1, 3}, {-1, -4}}}};

/* Whose optimum is known, since it was made around one: x with a weight y for every row, such that a row that counts has
 * nothing to spare, and a variable that is not 0 costs nothing more than the rows give. any: the first row is an equation,
 * and entries may be negative, and b. */
static LpTable made(bool any) {
    const int n = draw(2, 5), m = draw(2, TABLE_ROWS);
    LpTable t = {any ? "an LP with an equation" : "an LP that was drawn", n, m, any, LP_OPTIMAL, {{0}}};
    double x[TABLE_COLUMNS], *c = t.at[0];
    for (int j = 0; j < n; j++) {
        x[j] = draw(0, 1) ? draw(1, 6) : 0;
        c[j] = x[j] > 0 ? 0 : draw(0, 4);
    }
    for (int i = 1; i <= m; i++) {
        const bool equal = any && i == 1;
        double *row = t.at[i], y = equal ? draw(-4, 4) : draw(0, 1) * draw(1, 5);
        row[n] = y != 0 || equal ? 0 : draw(0, 5);
        for (int j = 0; j < n; j++) {
            row[j] = draw(any ? -5 : 0, 5);
            row[n] += row[j] * x[j], c[j] -= row[j] * y;
        }
    }
    for (int j = 0; j < n; j++) c[n] += c[j] * x[j];
    return t;
}

/* A.3 for OPT-30B on the paper's machine: seconds for each of 144 sequences; 309.12 s a block. */
#define OPT_30B_SECONDS 2.14667022904

/* The steps of the textbook, of two phases and of cycles; then the first and the last of mini.c. Each table comes as given,
 * and then with its cost and each row scaled by a factor of its own. Behind them come tables that were made, scaled too, or
 * behind cycles A.3. */
static bool draw_program(void) {
    static const int first[] = {0, 2, 0, 0, 0}, count[] = {2, TEXTBOOK - 2, CYCLES, NO_EQUATIONS, CYCLES};
    const bool cycles = step == 3 || step == 5;
    const int n = count[step - 1];
    const LpTable *from = (cycles ? lp_cycles : textbook) + first[step - 1] + number % n;
    LpTable *t = &program.table;
    if (number < 2 * n || !cycles) {
        *t = number < 2 * n ? *from : made(step == 2);
        for (int i = 0; i <= t->m && number >= n; i++) {
            const double factor = ldexp(1, draw(-2, 3));
            for (int j = 0; j <= t->n; j++) t->at[i][j] *= factor;
        }
        program.lp = lp_of(t);
        return true;
    }
    Hardware t4;
    const OptConfig config = opt_named("opt-30b");
    const char *dir = temp_dir();
    write_config(dir, &config);
    snprintf(program.words, sizeof program.words,
             "%s --policy 512 --hardware hardware/t4.json --max-tokens 32 --gpu-batch-size 48 --num-gpu-batches 3", dir);
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
    *t = (LpTable){"A.3 for OPT-30B on the paper's machine", 0, 0, 0, LP_OPTIMAL, {{OPT_30B_SECONDS}}};
    paper_lp(&program.lp, &t4, &config, &(Block){.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3});
    return number == 2 * n;
}

/* mini.c's takes rows that the slacks satisfy. */
static void solve(void) {
    const LpTable *t = &program.table;
    MiniTableau mini = {{0}, {0}, {{0}}};
    LpAnswer found;
    if (step < 4) {
        lp_solve(&found, &program.lp);
        /* these programs need no mending: where it was needed, the method itself went wrong */
        program.verdict = found.mended ? LP_LOST : found.verdict, program.value = found.value;
    } else if (program.words[0]) {
        char text[MOST_TEXT] = "";
        run_mini(text, program.words);
        const char *T = strstr(text, "\nT ");
        program.value = T ? atof(T + 3) / 144 : NAN;
    } else {
        for (int v = 0; v < MINI_COLUMNS; v++) mini.other[v] = v;
        for (int i = 0; i < MINI_ROWS; i++) mini.basic[i] = MINI_COLUMNS + i;
        for (int i = 0; i <= t->m; i++) {
            double *row = mini.at[i ? i - 1 : MINI_COST];
            memcpy(row, t->at[i], t->n * sizeof *row);
            row[MINI_COLUMNS] = i ? t->at[i][t->n] : 0;
        }
        program.verdict = mini_minimize(&mini) ? LP_OPTIMAL : LP_UNBOUNDED;
        program.value = -mini.at[MINI_COST][MINI_COLUMNS];
    }
}

static void check_program(void) {
    static const char *const verdict[] = {"optimal", "infeasible", "unbounded", "lost"};
    const LpTable *t = &program.table;
    const double value = t->at[0][t->n];
    in_case("%s (%d rows, %d variables)", t->what, t->m, t->n);
    if (program.verdict != t->verdict)
        wrong("expected %s, found %s", verdict[t->verdict], verdict[program.verdict % 4]);
    else if (t->verdict == LP_OPTIMAL)
        near_to(program.value, value, 1e-8 * (1 + fabs(value)), "the least cost");
}

/* Costs of which some are below 0, the first of them not the lowest; rows of which two tie. */
static bool draw_tableau(void) {
    lp_part.column = draw(0, LP_PART_N - 1);
    for (int j = 0; j < LP_PART_N; j++) lp_part.cost[j] = draw(0, 1) ? draw(0, 5) : -draw(1, 9);
    draw_order(lp_part.basic, LP_PART_M);
    for (int i = 0; i < LP_PART_M; i++)
        lp_part.entry[i] = i ? draw(-2, 4) : draw(1, 4), lp_part.right[i] = draw(0, i ? 3 : 1) * fabs(lp_part.entry[i]);
    return true;
}

static void check_decided(void) {
    double reach[LP_PART_M];
    int first = 0, row = 0;
    while (first < LP_PART_N && lp_part.cost[first] >= 0) first++;
    for (int r = 0; r < LP_PART_M; r++) {
        reach[r] = lp_part.entry[r] > 0 ? lp_part.right[r] / lp_part.entry[r] : INFINITY;
        if (reach[r] < reach[row] || (reach[r] == reach[row] && lp_part.basic[r] < lp_part.basic[row])) row = r;
    }
    near_to(lp_part.entering, first < LP_PART_N ? first : -1, 0, "the column that enters (-1: no cost is below 0)");
    near_to(lp_part.leaving, row, 0, "the row that leaves, which reaches 0 at %g", reach[row]);
}

// ---- 9: groups of a few bits ----------------------------------------------------------------------------------------

enum { PACKED = 192, MOST_STRIDE = 3 };
static struct {
    float x[PACKED];
    int n, stride;
    Quant quant;
    double within; /* steps between two codes */
    float back[PACKED];
    bool finite;
} packed;

static void pack(void) {
    f16 half[PACKED * MOST_STRIDE] = {0};
    for (int i = 0; i < packed.n; i++) half[i * packed.stride] = f32_to_f16(packed.x[i]);
    packed.finite = quant_round(half, packed.stride, packed.n, packed.quant);
    for (int i = 0; i < packed.n; i++) packed.back[i] = f16_to_f32(half[i * packed.stride]);
}

/*   1  a group of one number over and over, and one of the 16 numbers of a grid whose step is a power of two
 *   2  any numbers, in groups that are not full
 *   3  the ends of F16, where the step is as wide, or as narrow, as it can be, and numbers that are not finite. 131008 / 15
 * is rounded to a multiple of 8, and 15 times that is off by 15 x 8, or .0137 steps */
static bool draw_pack(void) {
    enum { ON_GRID, ANY, NOT_FINITE, SMALLEST, LARGEST };
    static const double within[] = {0, .5 + 1. / 1024, 0, 0, .0137};
    const int kind = step < 3 ? step - 1 : NOT_FINITE + number % 3;
    const float constant = draw(-40, 40) / 16., grid = ldexp(1, draw(-4, 3)), low = grid * draw(-12, 12);
    packed.n = kind == ANY ? draw(1, 128) : PACKED;
    packed.stride = draw(1, MOST_STRIDE);
    packed.quant = (Quant){kind == ANY ? 2 + number % 7 : 4, GROUP};
    packed.within = within[kind];
    for (int i = 0; i < packed.n; i++) {
        const float x[] = {i < GROUP ? constant : low + grid * (i * 7 % 16), f16_to_f32(f32_to_f16(draw_real(-1, 7))),
                           i % 16, draw(0, 7) * 0x1p-24f, (i + number) % 2 ? 65504 : -65504};
        packed.x[i] = x[kind];
    }
    if (kind == NOT_FINITE) packed.x[draw(64, 127)] = draw(0, 1) ? INFINITY : -INFINITY, packed.x[draw(128, 191)] = NAN;
    return true;
}

/* A group comes back as no more numbers than it has codes, and each number of it to within so many of its steps, and what
 * F16 rounds of numbers below 8; NaN of a group that is not finite. */
static void check_pack(void) {
    const int levels = (1 << packed.quant.bits) - 1;
    bool all = true;
    for (int g = 0; g < packed.n; g += GROUP) {
        const float *x = packed.x + g, *back = packed.back + g;
        const int n = imin(GROUP, packed.n - g);
        float low = INFINITY, high = -INFINITY;
        int kinds = 0;
        bool finite = true;
        for (int i = 0; i < n; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]), finite &= isfinite(x[i]) != 0;
        const double off = packed.within ? ((double)high - low) / levels * packed.within + 8. / 2048 : 0;
        in_case("%d bits, a group of %d from %g to %g, %d apart", packed.quant.bits, n, low, high, packed.stride);
        for (int i = 0, j; i < n; i++) {
            for (j = 0; j < i && back[j] != back[i]; j++) continue;
            kinds += j == i;
            if (finite) near_to(back[i], x[i], off, "number %d, to within %g", i, off);
            if (!finite && !isnan(back[i]))
                wrong("number %d is in a group that is not finite: expected NaN, found %g", i, back[i]);
        }
        if (finite && kinds > levels + 1) wrong("expected at most %d numbers, found %d", levels + 1, kinds);
        all &= finite;
    }
    near_to(packed.finite, all, 0, "the result for %d numbers (1: all are finite)", packed.n);
}

// ---- 10: the tokens with the largest scores -------------------------------------------------------------------------

enum { NH = 2, HEAD = 4, H1 = NH * HEAD, SEQS = 2, PAGE = 2, PAGES = 8, LEN = PAGE * PAGES, MOST = LEN + 1 };
static struct {
    float score[SEQS][NH][LEN]; /* halves, which q and k give exactly */
    int32_t len[SEQS], pages[SEQS][PAGES];
    double sparsity;
    int32_t tokens[SEQS][NH][MOST];
    float weights[SEQS][NH][MOST];
} chosen;

/* q is (2, 0, 0, 0), over sqrt(HEAD) 1, and k begins with the score; all else is large. Rows of q lie apart. */
static void select_tokens(void) {
    f16 q[SEQS][3 * H1] = {0}, k[SEQS * PAGES * PAGE][NH][HEAD];
    memset(k, 0x48, sizeof k); /* 8.5625 */
    memset(chosen.tokens, 0xff, sizeof chosen.tokens);
    for (int r = 0; r < SEQS; r++)
        for (int h = 0; h < NH; h++) {
            q[r][h * HEAD] = f32_to_f16(2);
            for (int t = 0; t < chosen.len[r]; t++)
                k[chosen.pages[r][t / PAGE] * PAGE + t % PAGE][h][0] = f32_to_f16(chosen.score[r][h][t]);
        }
    const PageTable table = paged(k, k, chosen.pages[0], chosen.len, SEQS, PAGES, PAGE, H1, NH, false);
    run(selection(chosen.tokens[0][0], chosen.weights[0][0], MOST, q[0], 3 * H1, H1, table, chosen.sparsity));
}

/* In the first step pages lie in order, one sequence's behind the other's; then mixed. Scores differ, but for the second
 * step's. In the last there are cases with one far above the others: what is far below it must not overflow. */
static bool draw_select(void) {
    int at[LEN];
    chosen.sparsity = draw_real(.1, .7);
    draw_order(chosen.pages[0], SEQS * PAGES);
    for (int r = 0; r < SEQS; r++) {
        chosen.len[r] = draw(3, LEN);
        for (int p = 0; p < PAGES && step == 1; p++) chosen.pages[r][p] = r * PAGES + p;
        for (int h = 0; h < NH; h++) {
            draw_order(at, LEN);
            for (int t = 0; t < LEN; t++) {
                chosen.score[r][h][t] = step == 2 ? draw(-1, 1) : at[t] / 2. - 4;
                if (step == 3 && number < 4) chosen.score[r][h][t] += t == draw(0, 2) ? 1000 : -1000;
            }
        }
    }
    return true;
}

/* Tokens: the n - 1 largest before the last, of equal scores the earlier, so that fewer than n - 1 come before each; and
 * the last. Weights: of the tokens that were found. */
static void check_select(void) {
    for (int i = 0; i < SEQS * NH; i++) {
        const int r = i / NH, h = i % NH, len = chosen.len[r], n = sparse_tokens(chosen.sparsity, len);
        const float *score = chosen.score[r][h], *weights = chosen.weights[r][h];
        const int32_t *tokens = chosen.tokens[r][h];
        int count = 0;
        in_case("sequence %d of %d tokens, head %d", r, len, h);
        for (int t = 0; t < len && step < 3; t++) {
            int before = 0;
            for (int u = 0; u < len - 1; u++) before += score[u] > score[t] || (score[u] == score[t] && u < t);
            if (t == len - 1 || before < n - 1) near_to(tokens[count++], t, 0, "a token of %d that are chosen", n);
        }
        for (; count < MOST && step < 3; count++) near_to(tokens[count], -1, 0, "what is behind them");
        for (int j = 0; j < n && step == 3; j++) {
            double over = 0; /* what all weigh together, over this one */
            if (tokens[j] < 0 || tokens[j] >= len) return wrong("token %d is not one of its", tokens[j]);
            for (int t = 0; t < len; t++) over += exp(score[t] - score[tokens[j]]);
            near_to(weights[j], 1 / over, 1e-5 / over + 1e-30, "the weight of token %d", tokens[j]);
        }
    }
}

// ---- 11: a pipeline, by the formulas of the first comment of cost/search.c ------------------------------------------
//
// A case says what these speak of: t, x, K and so on; what the function gets is the sums over sweeps that a plan has. [0]
// is generation, [1] prefill.

static struct {
    int M, G, K, l, blocks, n;
    double t[2], x[2], d;
    Pace pace;
} pipeline;

static void pace(void) {
    enum { ROWS = 5, WIDTH = 8 }; /* rows in a batch of generation; in prefill twice as many. A row is 16 bytes */
    const double pre = pipeline.G * pipeline.blocks, rest = (pipeline.n - 1) * pre;
    const Cluster cluster = {pipeline.M, ROWS * WIDTH * 2 / pipeline.x[0], pipeline.d};
    Plan plan = {.config = {.l = pipeline.l, .h1 = WIDTH}, .act_type = F16, .policy = {.flights = pipeline.G}};
    plan.work[1] = (Workload){.sweeps = pre, .prefills = pipeline.K * pre, .prompt_rows = 2 * ROWS * pipeline.K * pre};
    plan.work[0] = (Workload){.sweeps = rest, .decodes = pipeline.K * rest, .decoded = ROWS * pipeline.K * rest};
    pipeline.pace = cluster_pace(&cluster, &plan, pipeline.t);
}

/* One machine in the first and the last step, blocks in the last; the wire takes nearly nothing, or up to 4 squares. */
static bool draw_pace(void) {
    const bool one = step == 1 || step == 4;
    pipeline.M = one ? 1 : draw(2, 6);
    pipeline.G = draw(1, 8);
    pipeline.K = draw(1, 4);
    pipeline.l = draw(1, 6);
    pipeline.blocks = step == 4 ? draw(2, 5) : 1;
    pipeline.n = draw(2, 6);
    pipeline.t[0] = draw_real(2, 9);
    pipeline.t[1] = draw_real(10, 30);
    pipeline.x[0] = pipeline.t[0] / (pipeline.l * pipeline.K) * (step == 2 ? 1e-9 : draw_real(.2, 4));
    pipeline.x[1] = 2 * pipeline.x[0];
    pipeline.d = step == 2 ? 0 : draw_real(0, 1);
    return true;
}

static void check_pace(void) {
    const int M = pipeline.M, G = pipeline.G, K = pipeline.K, l = pipeline.l, later = pipeline.blocks - 1, n = pipeline.n;
    const double d = M > 1 ? pipeline.d : 0;
    double fill[2], sweeps[2], round[2];
    in_case("M = %d, G = %d, K = %d, l = %d, %d blocks, n = %d, t %.3g, x %.3g and d %.3g s in generation", M, G, K, l,
            later + 1, n, pipeline.t[0], pipeline.x[0], pipeline.d);
    for (int p = 0; p < 2; p++) {
        const double t = pipeline.t[p], x = M > 1 ? pipeline.x[p] : 0, square = t / (l * K); /* alone it has no network */
        fill[p] = (M - 1) * (t - t / l + square + d + x + (K - 1) * fmax(0, x - square));
        sweeps[p] = G * fmax(t, K * x);
        round[p] = fmax(sweeps[p], fill[p] + t + d);
    }
    const double prefill = fill[1] + sweeps[1], all = prefill + later * round[1] + (later + 1) * (n - 1) * round[0];
    near_to(pipeline.pace.prefill_s, prefill, 1e-6 * prefill, "prefill_s");
    near_to(pipeline.pace.token_s, round[0], 1e-6 * round[0], "token_s");
    near_to(pipeline.pace.T, all, 1e-6 * all, "T");
}

// ---- 12 and 18: kernels, on the GPU or in its emulation, against their twins on the host ----------------------------

/* What the emulation counts: the largest number of roundings of one thread of a kernel, of all that have run. */
long cuda_cpu_most_roundings(void) __attribute__((weak));

enum { MARK = 1, EACH = 8, MOST_THREADS = 256, MOST_NUMBERS = 2 * 12288 };
enum { TABLE = 20, GATHERED = 5, WIDEST = 700, POOL = 12, PER_PAGE = 3, SEQUENCES = 2 };
typedef struct {
    int idx[GATHERED], seq[GATHERED], pos[POOL], pages[POOL];
    _Alignas(16) f16 act[2 * MOST_NUMBERS]; /* x, and y */
    _Alignas(16) f16 table[MOST_NUMBERS];
    _Alignas(16) f16 pair[2 * MOST_NUMBERS]; /* w and b, or the pools of k and v */
} Data;
/* Rows of x are normalized with w and b; or rows of a table are gathered into y, or as pairs of k and v put into pages. */
static struct {
    OpCode code;
    int rows, cols;
    bool onto; /* y is x, or a sum with what it has */
    double within;
    Data before, after;
    long most_work; /* numbers that one thread has rounded */
} kernel;

/* The op on data that lie there, on the GPU or here; x and y may be of another type. */
static Op kernel_op(Type act, const void *x, const void *y, const Data *there) {
    const f16 *second = there->pair + MOST_NUMBERS;
    const PageTable pool =
        paged(there->pair, second, there->pages, NULL, SEQUENCES, POOL / SEQUENCES, PER_PAGE, kernel.cols / 2, 1, false);
    if (kernel.code == OP_LAYERNORM)
        return norm(act, kernel.onto ? x : y, x, there->pair, second, kernel.rows, kernel.cols);
    if (kernel.code == OP_EMBED)
        return embedding(y, act, there->table, F16, kernel.cols, there->idx, kernel.rows, kernel.cols, kernel.onto);
    return appending(pool, there->table, kernel.cols, false, kernel.cols, there->seq, there->pos, kernel.rows);
}

static void carry_out(void) {
    const size_t bytes = sizeof kernel.before;
    Gpu *gpu = cuda_open_gpu(&err);
    Data *at = gpu ? gpu->call->alloc(gpu, whole_lines(bytes), &err) : NULL;
    must(at, &err);
    const Op op = kernel_op(F16, at->act, at->act + MOST_NUMBERS, at);
    must(!gpu->call->transfer(gpu, at, &kernel.before, bytes, &err), &err);
    must(!gpu->call->begin(gpu, PROJECT, MARK, &err), &err);
    must(!gpu->call->run(gpu, &op, &err), &err);
    must(!gpu->call->end(gpu, PROJECT, MARK, true, &err), &err);
    must(!gpu->call->sync(gpu, PROJECT, MARK, &err), &err);
    must(!gpu->call->transfer(gpu, &kernel.after, at, bytes, &err), &err);
    if (cuda_cpu_most_roundings) kernel.most_work = cuda_cpu_most_roundings();
    gpu->call->release(gpu, at), gpu->close(gpu);
}

static void fill(f16 *x, int n, double low, double high) {
    for (int i = 0; i < n; i++) x[i] = f32_to_f16(draw_real(low, high));
}

/* Rows around a mean, of numbers that lie up to 2 `spread` apart, and two that do.
 *   1  a few widths
 *   2  widths that no block covers at once, that end within eight numbers; in place
 *   3  at 1000 a square has no digits left for a variance of 1/4 */
static bool draw_norm(void) {
    const struct {
        double spread, mean;
        int cols[6];
    } rows[] = {{number ? 2 : 1, draw_real(-2, 2), {64, 256, 8 * draw(3, 60)}},
                {1, draw_real(-2, 2), {2, draw(28, 37), draw(60, 69), draw(1022, 1031), 5120, 12288}},
                {.5, number % 2 ? -1000 : draw(800, 1000), {768, 60, 8 * draw(10, 99)}}};
    const double low = rows[step - 1].mean - rows[step - 1].spread, high = low + 2 * rows[step - 1].spread;
    Data *data = &kernel.before;
    kernel.code = OP_LAYERNORM, kernel.within = 8e-3, kernel.onto = step > 1 && number % 2;
    kernel.rows = draw(1, 2), kernel.cols = rows[step - 1].cols[number];
    if (!kernel.cols) return false;
    fill(data->pair, kernel.cols, 1, 3);
    fill(data->pair + MOST_NUMBERS, kernel.cols, -2, 2);
    for (int r = 0; r < kernel.rows; r++) {
        f16 *row = data->act + r * kernel.cols;
        fill(row, kernel.cols, low, high);
        row[0] = f32_to_f16(low);
        row[kernel.cols - 1] = f32_to_f16(high);
    }
    return cuda_open_gpu;
}

static bool draw_gather(void) {
    Data *data = &kernel.before;
    kernel.code = step == 3 ? OP_APPEND : OP_EMBED, kernel.within = step == 2 ? 4e-3 : 0, kernel.onto = step == 2;
    kernel.rows = GATHERED;
    kernel.cols = number == 0 ? 64 : number % 2 ? 8 * draw(20, WIDEST / 8) : 2 * draw(1, WIDEST / 2);
    fill(data->table, TABLE * kernel.cols, -4, 4);
    fill(data->act + MOST_NUMBERS, GATHERED * kernel.cols, -4, 4);
    memset(data->pair, 0x3c, sizeof data->pair);
    draw_order(data->pages, POOL), draw_order(data->pos, POOL);
    for (int r = 0; r < GATHERED; r++) data->idx[r] = draw(0, TABLE - 1), data->seq[r] = draw(0, SEQUENCES - 1);
    return cuda_open_gpu;
}

/* Nothing else is written either, and no thread has much more to write than another. */
static void check_kernel(void) {
    static Data twin;
    static float act[2 * MOST_NUMBERS];
    const Data *found = &kernel.after;
    const int cols = kernel.cols, threads = imin((cols + EACH - 1) / EACH, MOST_THREADS),
              share = (cols + threads - 1) / threads + EACH;
    in_case("%d rows of %d columns%s", kernel.rows, cols, kernel.onto ? ", onto what is there" : "");
    twin = kernel.before;
    for (int e = 0; e < 2 * MOST_NUMBERS; e++) act[e] = f16_to_f32(twin.act[e]);
    run(kernel_op(F32, act, act + MOST_NUMBERS, &twin));
    for (int e = 0; e < 2 * MOST_NUMBERS; e++) {
        const int second = e / MOST_NUMBERS, i = e % MOST_NUMBERS;
        near_to(f16_to_f32(found->act[e]), act[e], kernel.within, "%c, row %d, column %d", "xy"[second], i / cols,
                i % cols);
        near_to(f16_to_f32(found->pair[e]), f16_to_f32(twin.pair[e]), 0, "element %d of the pages of %c", i, "kv"[second]);
    }
    if (kernel.most_work > 2 * share)
        wrong("a thread was expected to write %d numbers at most, found one that wrote %ld", share, kernel.most_work);
}

// ---- 20: attention in mini.cu, in its own emulation -----------------------------------------------------------------
//
// Weights are known by construction, as in exercise 1: at one place of a head k of token u is sqrt(hd) log(a_u), and q has
// c there and 0 elsewhere. So token u weighs a_u^c.

extern __typeof(mini_attend) mini_attend __attribute__((weak)); /* where there is no emulation */
enum { TILE = 128, MOST_TOKENS = 5 * TILE, MOST_HEADS = 3, WIDE = TILE + 16, MOST_ROWS = 4 };
static struct {
    MiniAttention a;
    int c;
    double base[MOST_TOKENS][MOST_HEADS]; /* a_u */
    float q[MOST_ROWS * MOST_HEADS * WIDE], k[MOST_TOKENS * MOST_HEADS * WIDE], v[MOST_TOKENS * MOST_HEADS * WIDE];
    bool kept[MOST_HEADS * MOST_TOKENS];
    float o[MOST_ROWS * MOST_HEADS * WIDE + GUARD];
} tiles;

static float as_half(double x) { return f16_to_f32(f32_to_f16((float)x)); }

/* Texts of one tile at most; longer ones, whose scores rise or fall from token to token, or come as they like; then large
 * scores and heads of any width, and of a cache only some tokens' v, where the others are NaN. */
static bool draw_tiles(void) {
    const int edges[] = {1, TILE - 1, TILE, TILE + 1, 2 * TILE, 4 * TILE + 1};
    MiniAttention *a = &tiles.a;
    const int least = step == 2 ? TILE + 1 : 1, most = step == 1 ? TILE : MOST_TOKENS;
    const bool sparse = step == 3 && number % 3 == 0;
    a->rows = sparse ? 1 : draw(1, MOST_ROWS), a->nh = draw(1, MOST_HEADS),
    a->hd = step < 3 ? 8 * draw(1, 8) : draw(number % 2 ? TILE + 1 : 1, WIDE);
    int tokens = number < 6 ? edges[number] : draw(least, most);
    tokens = imin(imax(tokens, imax(least, a->rows)), most);
    a->first = tokens - a->rows + 1, a->halves = sparse || draw(0, 1);
    tiles.c = step == 3 && !sparse ? 60 : draw(1, 3);
    for (int e = 0; e < MOST_ROWS * MOST_HEADS * WIDE + GUARD; e++) tiles.o[e] = UNTOUCHED;
    for (int h = 0; h < a->nh; h++) {
        const int place = draw(0, a->hd - 1), way = number % 3;
        for (int r = 0; r < a->rows; r++) tiles.q[(r * a->nh + h) * a->hd + place] = tiles.c;
        for (int t = 0; t < tokens; t++) {
            const double rank = way == 2 ? draw_real(0, 1) : (way ? tokens - 1. - t : t) / tokens;
            const float key = as_half(sqrt(a->hd) * log(1 + 8 * rank));
            const bool last = t == tokens - 1, kept = tiles.kept[h * tokens + t] = last || draw(0, 2) == 0;
            tiles.base[t][h] = exp(key / sqrt(a->hd));
            for (int d = 0; d < a->hd; d++) {
                const int at = (t * a->nh + h) * a->hd + d;
                tiles.k[at] = d == place ? key : as_half(draw_real(-4, 4));
                tiles.v[at] = sparse && !kept ? NAN : as_half(draw_real(-4, 4));
            }
        }
    }
    if (!sparse) memset(tiles.kept, true, sizeof tiles.kept);
    a->kept = sparse ? tiles.kept : NULL;
    return mini_attend;
}

static void attend_in_tiles(void) {
    MiniAttention a = tiles.a;
    a.q = tiles.q, a.k = tiles.k, a.v = tiles.v;
    mini_attend(tiles.o, COUNT(tiles.o), &a);
}

static void check_tiles(void) {
    const MiniAttention *a = &tiles.a;
    const int all = a->rows * a->nh * a->hd, tokens = a->first + a->rows - 1;
    in_case("%d tokens, %d rows, %d heads of %d, scores up to %.0f%s", tokens, a->rows, a->nh, a->hd, tiles.c * log(9),
            a->kept ? ", some left out" : "");
    for (int e = all; e < all + GUARD; e++)
        if (tiles.o[e] != UNTOUCHED) wrong("something behind o was written to");
    for (int e = 0; e < all; e++) {
        const int r = e / a->hd / a->nh, h = e / a->hd % a->nh, d = e % a->hd;
        double sum = 0, whole = 0;
        for (int t = 0; t < a->first + r; t++) {
            const double weight = pow(tiles.base[t][h] / 9, tiles.c);
            whole += weight;
            if (tiles.kept[h * tokens + t]) sum += weight * tiles.v[(t * a->nh + h) * a->hd + d];
        }
        near_to(tiles.o[e], sum / whole, 2e-3, "o of row %d, head %d, element %d", r, h, d);
    }
}

// ---- 13: in mini.c, beside the LPs above ----------------------------------------------------------------------------

static struct {
    MiniTableau before;
    int r, c; /* basic[r] and other[c] are exchanged */
    MiniTableau after;
} exchange;

static bool draw_pivot(void) {
    MiniTableau *p = &exchange.before;
    int order[MINI_ROWS + MINI_COLUMNS];
    exchange.r = draw(0, MINI_ROWS - 1);
    exchange.c = draw(0, MINI_COLUMNS - 1);
    draw_order(order, MINI_ROWS + MINI_COLUMNS);
    memcpy(p->basic, order, sizeof p->basic);
    memcpy(p->other, order + MINI_ROWS, sizeof p->other);
    for (int i = 0; i < MINI_ROWS + 2; i++)
        for (int v = 0; v <= MINI_COLUMNS; v++) p->at[i][v] = draw_real(-5, 5);
    p->at[exchange.r][exchange.c] = draw_real(.5, 4);
    return true;
}

static void pivot(void) { mini_pivot(&exchange.after, &exchange.before, exchange.r, exchange.c); }

/* The basic variable of a row, or minus a cost, where the variables of the columns are x. */
static double row_value(const MiniTableau *t, int i, const double *x) {
    double sum = t->at[i][MINI_COLUMNS];
    for (int v = 0; v < MINI_COLUMNS; v++) sum -= t->at[i][v] * x[v];
    return sum;
}

/* A point of one tableau, with both costs, is one of the other; so many points determine the rows. */
static void check_pivot(void) {
    const MiniTableau *before = &exchange.before, *after = &exchange.after;
    const int r = exchange.r, c = exchange.c;
    in_case("pivot at row %d, column %d", r, c);
    for (int i = 0; i < MINI_ROWS; i++)
        near_to(after->basic[i], i == r ? before->other[c] : before->basic[i], 0, "the basic variable of row %d", i);
    for (int v = 0; v < MINI_COLUMNS; v++)
        near_to(after->other[v], v == c ? before->basic[r] : before->other[v], 0, "the variable of column %d", v);
    for (int point = 0; point <= MINI_COLUMNS; point++) {
        double x[MINI_COLUMNS], exchanged[MINI_COLUMNS];
        for (int v = 0; v < MINI_COLUMNS; v++) exchanged[v] = x[v] = draw_real(-3, 3);
        exchanged[c] = row_value(before, r, x);
        for (int i = 0; i < MINI_ROWS + 2; i++) {
            const double value = i == r ? x[c] : row_value(before, i, x);
            near_to(row_value(after, i, exchanged), value, 1e-9 * (1 + fabs(value)), "a point by row %d", i);
        }
    }
}

// ---- 15: what must come after what ----------------------------------------------------------------------------------

enum { OPS = 24, BYTES = 5, LANES = 4, UNKNOWN = 31 };
/* In a set of ops bit j is op j; UNKNOWN stands for what was not posted. */
static struct {
    int lane[OPS];
    uint32_t written[OPS], read[OPS]; /* bit b: byte b */
    uint32_t after[OPS];              /* the ops whose events it waits for */
    int events[OPS];
} posted;

static Tensor view_of(uint32_t bytes) {
    const int n = __builtin_popcount(bytes);
    return (Tensor){.type = U8, .offset = n ? ffs(bytes) - 1 : 0, .rows = n > 0, .cols = n, .ld = n, .cell = 1};
}

static void post_ops(void) {
    Depend *depend = depend_open(2);
    int count[NLANES] = {0}, at[NLANES][OPS]; /* the ops of each lane */
    for (int j = 0; j < OPS; j++) {
        const Lane lane = posted.lane[j];
        Op op = {.code = OP_UNPACK, .lane = lane};
        op.unpack.w = view_of(posted.written[j]), op.unpack.packed = view_of(posted.read[j]);
        depend_before(depend, &op);
        posted.events[j] = op.nafter;
        for (int e = 0; e < imin(op.nafter, NLANES); e++) {
            const Event *after = &op.after[e];
            const bool known = (unsigned)after->lane < NLANES && after->seq - 1 < (uint64_t)count[after->lane];
            posted.after[j] |= 1u << (known ? at[after->lane][after->seq - 1] : UNKNOWN);
        }
        at[lane][count[lane]++] = j;
        depend_posted(depend, &op, (Event){lane, count[lane]});
    }
    depend_close(depend);
}

/* Ops that read, write, or both, one byte or two. */
static bool draw_posted(void) {
    for (int j = 0; j < OPS; j++) {
        const int kind = draw(0, 3);
        posted.lane[j] = draw(0, LANES - 1);
        posted.written[j] = kind == 0 ? 0 : draw(1, 3) << draw(0, BYTES - 2);
        posted.read[j] = kind == 1 ? 0 : draw(1, 3) << draw(0, BYTES - 2);
    }
    return true;
}

/* Each op that conflicts with one before it must come after it; in the last step after nothing else, and no event is one
 * that others, or its lane, imply. */
static void check_order(void) {
    enum { READ_AFTER_WRITE = 1, AFTER_USE, OVERLAP }; /* the steps; a conflict is one of the first two, or 0 */
    uint32_t over[OPS] = {0};                          /* the ops that have ended when op j begins */
    uint32_t ended[LANES] = {0};                       /* the ops that have ended when all of a lane so far have */
    uint32_t may[OPS] = {0};                           /* the ops that op j may wait for */
    for (int j = 0; j < OPS; j++) {
        const int lane = posted.lane[j];
        const uint32_t after = posted.after[j], written = posted.written[j];
        uint32_t must = 0, implied = ended[lane];
        if ((unsigned)posted.events[j] > NLANES || after >> j) return wrong("op %d waits for what was not posted", j);
        for (int i = 0; i < j; i++) {
            const uint32_t wrote = posted.written[i], used = wrote | posted.read[i];
            const int how = wrote & posted.read[j] ? READ_AFTER_WRITE : used & written ? AFTER_USE : 0;
            if (how || posted.lane[i] == lane) may[j] |= may[i] | 1u << i;
            if (how && (how == step || step == OVERLAP)) must |= 1u << i;
            if (after >> i & 1) implied |= over[i];
        }
        over[j] = implied | after;
        ended[lane] = over[j] | 1u << j;
        const int missing = ffs(must & ~over[j]) - 1;
        if (missing >= 0)
            return wrong("op %d (lane %d) does not wait for op %d (lane %d), but %s", j, lane, missing,
                         posted.lane[missing],
                         posted.written[missing] & posted.read[j] ? "reads what it writes" : "writes what it uses");
        if (step == OVERLAP && over[j] & ~may[j])
            return wrong("op %d waits for op %d, and need not: they could overlap", j, ffs(over[j] & ~may[j]) - 1);
        if (step == OVERLAP && (after & implied || posted.events[j] != __builtin_popcount(after)))
            return wrong("op %d waits for an event that others imply", j);
    }
}

// ---- 16: the search over blocks, and the frontier of Figure 1 -------------------------------------------------------
//
// What is found is compared with policies that are drawn, by the same cost model: policy_predict says what each takes.

enum { MOST_FOUND = 64, TRIED = 60, ASKED = 64 };
static struct {
    Search search;
    Task task;
    Hardware machine;
    Checkpoint *model;
    Found best, frontier[MOST_FOUND];
    int nbest, n;
} question;

/* OPT-125M or 350M on a machine that does not hold it, and more prompts than the best block has. In the second step the
 * number of batches is given, or their size. */
static bool draw_question(void) {
    if (number && step != 2) return false;
    const OptConfig config = opt_named(draw(0, 1) ? "opt-125m" : "opt-350m");
    ASSERT_OK(hardware_read(&question.machine, "hardware/t4.json", &err));
    question.model = checkpoint_dummy(&config, 1);
    question.task = equal_task(ASKED, draw(64, 256), draw(8, 32));
    Search *s = &question.search;
    *s = open_question(&question.machine, question.model, &question.task);
    s->one_block = true, s->fixed_batches = step == 2 && number, s->fixed_gbs = step == 2 && !number;
    s->capacity[TIER_GPU] = draw_real(3e8, 9e8);
    s->capacity[TIER_CPU] = draw_real(2e9, 4e9);
    s->given.num_gpu_batches = draw(1, 5);
    s->given.gbs = draw(1, 9);
    return true;
}

static void find(void) {
    question.nbest = policy_search(&question.best, 1, &question.search, &err);
    if (step == 3) question.n = policy_frontier(question.frontier, MOST_FOUND, &question.search, &err);
}

/* A larger block pays one percent for each doubling: see score() in cost/search.c. From each policy of the frontier to the
 * next latency and throughput rise, up to the best; of all that are as quick as one that is tried, it has one that is about
 * as good. */
static void check_found(void) {
    const Search *s = &question.search;
    const Policy *best = &question.best.policy, *given = &s->given;
    const Found *frontier = question.frontier;
    const double throughput = question.best.cost.throughput;
    const int n = question.n;
    if (question.nbest != 1 || (step == 3 && (n < 2 || n > MOST_FOUND)))
        return wrong("%d policies were found, %d of a frontier", question.nbest, n);
    if (s->fixed_gbs) near_to(best->gbs, given->gbs, 0, "gbs, which was given");
    if (s->fixed_batches) near_to(best->num_gpu_batches, given->num_gpu_batches, 0, "num_gpu_batches, which was given");
    for (int i = 1; i < n; i++)
        if (!(frontier[i].latency >= frontier[i - 1].latency &&
              frontier[i].cost.throughput > frontier[i - 1].cost.throughput))
            wrong("policies %d and %d of the frontier do not rise in latency and throughput", i - 1, i);
    if (n && frontier[n - 1].cost.throughput < throughput * (1 - 1e-9))
        wrong("the search finds %.4g token/s, which is above the end of the frontier", throughput);
    for (int i = 0; i < TRIED; i++) {
        const double wg = i % 4 * .2, cg = i / 4 % 3 * .5, hg = i % 2;
        double most = step == 3 ? 0 : throughput;
        Search one = *s;
        Found other;
        one.given = on_tiers(wg, 1 - wg, cg, 1 - cg, hg, 1 - hg, s->fixed_gbs ? given->gbs : 1 << draw(0, 4),
                             s->fixed_batches ? given->num_gpu_batches : 1 << draw(0, 3));
        one.given.delegated = draw(0, 1), one.given.table_home = TIER_CPU, one.given.workspaces = WORKSPACES;
        if (block_size(&one.given) > ASKED || policy_predict(&other, &one, &err)) continue; /* it does not fit */
        for (int j = 0; j < n; j++)
            if (frontier[j].latency <= 1.25 * other.latency) most = fmax(most, frontier[j].cost.throughput);
        if (most < (step == 3 ? .75 : .93) * other.cost.throughput)
            return wrong("%d batches of %d make %.4g token/s in %.4g s, what was found %.4g", other.policy.num_gpu_batches,
                         other.policy.gbs, other.cost.throughput, other.latency, most);
    }
    free_task(&question.task), checkpoint_close(question.model);
}

// ---- 17 and 19: on the sim, which counts bytes and seconds ----------------------------------------------------------

/* An OPT-125M with l layers. */
static OptConfig short_opt(int l) {
    OptConfig config = opt_named("opt-125m");
    config.l = l, config.eos = -1;
    return config;
}

static Policy on_cpu(Schedule schedule, int gbs, int K) {
    Policy p = on_tiers(0, 1, 0, 1, 0, 1, gbs, K);
    p.schedule = schedule, p.page_tokens = 1, p.table_home = TIER_CPU;
    return p;
}

static struct {
    Schedule schedule;
    IoCase io;
    IoCount found;
} counting;

/* Row and zig-zag; in the last step the diagonal. */
static bool draw_counting(void) {
    const OptConfig config = short_opt(draw(1, 3));
    IoCase *io = &counting.io;
    counting.schedule = step == 3 ? SCHEDULE_DIAGONAL : number % 2 ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
    io->l = config.l;
    io->h1 = config.h1;
    io->head_bytes = 2. * config.vocab * config.h1;
    io->layer_bytes = ((double)streamed_bytes(&config) - io->head_bytes) / config.l;
    io->gbs = draw(1, 3);
    io->K = draw(1, 4);
    io->s = draw(1, 20);
    io->n = draw(io->K, 3 * io->K + 1);
    io->count = io->gbs * io->K * draw(1, 3);
    return true;
}

static void count(void) { counting.found = io_count(&counting.io, counting.schedule); }

static void check_count(void) {
    const IoCase *io = &counting.io;
    const IoCount *found = &counting.found;
    const Hardware machine = machine_with("");
    const OptConfig config = short_opt(io->l);
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Task task = equal_task(io->count, io->s, io->n);
    const Policy policy = on_cpu(counting.schedule, io->gbs, io->K);
    Rig real = rig_ran(model, &policy, &task, &machine);
    in_case("%s, %d prompts, l = %d, s = %d, n = %d, %d batches of %d", schedule_name[counting.schedule], io->count, io->l,
            io->s, io->n, io->K, io->gbs);
    const Bytes *in = real.moved[CTOG], *out = real.moved[GTOC];
    if (step == 2) {
        near_to(found->cache, in[CACHE] + out[CACHE], .5, "bytes of cache");
        near_to(found->activations, in[ACTIVATION] + out[ACTIVATION], .5, "bytes of activations");
    } else {
        near_to(found->sweeps, real.stats.sweeps, 0, "sweeps");
        near_to(found->weights, in[WEIGHT], .5, "bytes of weights");
    }
    rig_close(&real), free_task(&task), checkpoint_close(model);
}

/* A fourth schedule in the place of the diagonal, and another: zig-zag in the second step, else the diagonal. */
enum { RACES = 8, RACING = 80 };
static struct {
    Prompt prompts[RACING];
    int gbs, K;
    int ended;  /* prompts, by the fourth */
    Rig rig[2]; /* of the fourth, and of the other */
} both;

static void race(void) {
    const OptConfig config = short_opt(2);
    const Hardware machine = machine_with("ctog_bdw=1e10 gtoc_bdw=1e10 mm_flops=1e14 bmm_flops=1e14");
    const Task task = {.prompts = both.prompts, .count = RACING};
    Checkpoint *model = checkpoint_dummy(&config, 1);
    for (int i = 1; i >= 0; i--) {
        const Schedule schedule = i && step == 2 ? SCHEDULE_ZIGZAG : SCHEDULE_DIAGONAL;
        if (!i) seats_for[schedule] = fourth_seats;
        both.rig[i] = (Rig){.model = model, .policy = on_cpu(schedule, both.gbs, both.K), .task = &task, .sim = &machine};
        both.ended = run_rig(&both.rig[i]);
    }
}

/* Prompts of all lengths, once in batches of more than two; but for the first step equal ones. */
static bool draw_race(void) {
    static int32_t ids[64];
    both.gbs = step == 1 && !number ? 3 : draw(1, 2), both.K = draw(3, 6);
    const int s = draw(4, 30), n = both.K * draw(3, 5);
    for (int p = 0; p < RACING; p++)
        both.prompts[p] = (Prompt){.ids = ids, .s = step > 1 ? s : draw(4, 30), .n = step > 1 ? n : draw(2, 2 * n)};
    return true;
}

/* Whatever the lengths, no more sweeps are needed than by doing one prompt after the other. Of equal prompts it holds fewer
 * pages than zig-zag in the same block: they are not all long at the same time. For each page it has as many tokens a
 * second as the diagonal, to within 5 percent, as the mean of all cases. */
static void check_race(void) {
    static double log_ratios;
    const Rig *own = &both.rig[0], *other = &both.rig[1];
    const int s = both.prompts[0].s, n = both.prompts[0].n;
    const double staggered = ceil((s + n / 2. + n / (2. * both.K)) / (s + n) * other->pages);
    double speed[2]; /* token/s a page */
    long tokens = 0;
    for (int i = 0; i < 2; i++) speed[i] = both.rig[i].stats.generated / both.rig[i].seconds / both.rig[i].pages;
    in_case("s = %d, n = %d, %d batches of %d", s, n, both.K, both.gbs);
    for (int p = 0; p < RACING; p++) tokens += both.prompts[p].n;
    if (step < 3) near_to(both.ended, RACING, 0, "prompts that got all of their tokens");
    if (step == 1 && own->stats.sweeps > tokens / both.gbs * 2)
        wrong("%ld sweeps for %ld tokens", (long)own->stats.sweeps, tokens);
    if (step == 2 && (own->pages <= 0 || own->pages > staggered + both.gbs * both.K))
        wrong("%g pages were expected at most, found %d; zig-zag has %d", staggered, own->pages, other->pages);
    log_ratios = log(speed[0] / speed[1]) + (number ? log_ratios : 0);
    if (step == 3 && number == RACES - 1 && !(log_ratios / RACES >= log(.95)))
        wrong("token/s a page: expected .95 of the diagonal's, found %.3g", exp(log_ratios / RACES));
}

// ---- the exercises --------------------------------------------------------------------------------------------------

// clang-format off
const Exercise exercises[] = {
    {{"a token alone attends to itself", "no token sees the ones behind it",
      "all weights are right, and the logits Hugging Face's"},
     12, CASE(att, o), draw_attention, attend, check_attention},
    {{"the first sweep has one GPU batch", "a GPU batch enters every n/K sweeps",
      "whoever stops early is replaced at once"}, 40, CASE(line, may), draw_seats, enter, check_seats},
    {{"without a limit, and up to it, all enter", "a prompt waits for the pages of its prefill",
      "a prompt enters when its pages fit in every sweep"}, 40, CASE(line, may), draw_pages, enter, check_pages},
    {{"equal items meet the shares exactly", "items of any size meet the shares to within one",
      "the weights of OPT-30B meet every placement", "a tier without a share gets nothing"},
     60, CASE(dealt, tier), draw_deal, deal, check_deal},
    {{"with everything on the GPU the logits are right", "the weights may stream",
      "cache and activations may rest anywhere", "the CPU attends to a cache on the CPU",
      "GPU and CPU attend to their parts of a batch", "the CPU attends to a cache on disk"},
     BLOCKS * COUNT(placements), CASE(gen, ended), draw_run, generate, check_run},
    {{"the rows of the link between CPU and GPU", "the rows of the disk", "the row of the processors"},
     10, CASE(a3, row), draw_rows, make_rows, check_rows},
    {{"a textbook's programs are solved", "both phases end with the right verdict", "the known cycles end",
      "mini.c: a textbook's programs are minimized", "mini.c: the known cycles end, and A.3 has its optimum"},
     30, CASE(program, verdict), draw_program, solve, check_program},
    {{"the rules are Bland's"}, 30, CASE(lp_part, entering), draw_tableau, lp_part_decide, check_decided},
    {{"numbers on the grid come back exactly", "all numbers come back within half a step",
      "the ends of F16 and numbers that are not finite"}, 48, CASE(packed, back), draw_pack, pack, check_pack},
    {{"the largest scores are chosen, and the token itself", "of equal scores the earlier are chosen",
      "weights are shares of all tokens"}, 16, CASE(chosen, tokens), draw_select, select_tokens, check_select},
    {{"one machine takes its sweeps", "machines fill and run", "a slow wire holds them up",
      "later blocks take their rounds"}, 20, CASE(pipeline, pace), draw_pace, pace, check_pace},
    {{"a row is normalized", "rows of all widths, in place too", "a large mean does not blur the variance"},
     6, CASE(kernel, after), draw_norm, carry_out, check_kernel},
    {{"rows are gathered", "rows are added", "rows are put into pages"},
     8, CASE(kernel, after), draw_gather, carry_out, check_kernel},
    {{"mini.cu: texts of a block of tokens", "mini.cu: longer texts", "mini.cu: large scores, tokens left out"},
     18, CASE(tiles, o), draw_tiles, attend_in_tiles, check_tiles},
    {{"mini.c: a pivot exchanges two variables"}, 20, CASE(exchange, after), draw_pivot, pivot, check_pivot},
    {{"mini.c: a batch alone on the GPU gets the right tokens", "mini.c: cache and activations may rest anywhere",
      "mini.c: the weights may stream"}, BLOCKS * COUNT(placements), CASE(gen, ended), draw_mini, generate_by_mini, check_run},
    {{"a reader waits for the writer", "a writer waits for all who use it", "whatever may overlap does"},
     24, CASE(posted, after), draw_posted, post_ops, check_order},
    {{"no block that was tried is better", "what is given stays", "the frontier is not below what was tried"},
     2, CASE(question, best), draw_question, find, check_found},
    {{"row and zig-zag load so many weights", "cache and activations are counted", "the diagonal loads fewer"},
     12, CASE(counting, found), draw_counting, count, check_count},
    {{"a fourth schedule serves everyone", "a fourth schedule staggers its sequences",
      "a fourth schedule is as good as the diagonal"}, RACES, CASE(both, ended), draw_race, race, check_race},
    {.steps = {NULL}},
};
// clang-format on
