/* test_grade.c: the judge of the exercises of docs/EXERCISES.md, whose steps `make grade EX=N` takes.
 *
 * A student's code is linked with an exam (exam.c), which is another program; it gets questions and gives back numbers
 * (exam.h), and is never a part of this one. Here an exercise has how a question is drawn, and what must be true of the
 * answer.
 *
 * So an exam cannot say how good it is. Where a run of 5, 6 or 14 is wrong, the judge asks for what each square had, and
 * names the first that differs from its own (squares.c); that decides nothing. Where a run of 5 is right, it asks when data
 * were loaded, and what comes too late loses points. A program could lie about this, but to write the sweep is less work.
 * Of 16 and 19 the judge computes the cost, of 5, 6 and 14 also what must have moved, so that a plain forward is no sweep.
 * What steps give, what they expect in words, and the wrong solutions with the points that they get are in
 * scripts/exercises.txt.
 *
 * 4, 8, 9 and 10 have variants, whose rules differ (`variant`): so that one student's solution is not another's. */

// clang-format off
/* What crosses the pipe:
 *
 *     exercise   question                                   answer                        judged by
 *     1          q, k, v; the tokens of a prompt            o; logits                     weights by construction, Hugging Face
 *     2, 3       prompts' s and n, a block, limits          who entered each sweep        Figure 6; pages, counted
 *     4          shares and sizes                           a tier for each item          what each tier holds
 *     5, 6       a small model and a placement, by seeds    tokens, logits; what moved    the plain forward; the engine here
 *     7          a machine and a block                      the rows ^g                   their coefficients by hand
 *     8, 13      linear programs; tableaus                  verdict and value; tableaus   optima known by construction
 *     9          numbers, and how they are packed           numbers                       half a step
 *     10         scores, pages                              tokens, weights               a sort
 *     11         times of a pipeline                        three times                   the formulas
 *     12, 18     rows                                       the memory of the GPU         the host's kernels
 *     14         the arguments of mini                      tokens; bytes of each link    the plain forward; what must move
 *     5, 6, 14   the same, if that was wrong                what each square had          the engine here; no points
 *     15         what ops read and write                    what each waits for           the conflicts
 *     16         a task and a machine                       policies                      the cost of these, and of drawn ones
 *     17         a case                                     sweeps and bytes              the sim
 *     19         prompts and a block                        what it said, call by call    the sim, which is told what it said
 *     20         q, k, v                                    o                             weights by construction */
// clang-format on
#include <strings.h>

#include "answers.h"
#include "branches/walk.h"
#include "exam_both.h"
#include "golden.h"
#include "lp_tables.h"
#include "squares.h"
#include "written.h"

static Error err;

// ---- 1: plain attention, by itself and through the forward pass -----------------------------------------------------
//
// Weights are known by construction: at one place of a head k of token u is sqrt(hd) log(a_u), and anything at the others,
// where q of token t is 0; at the one it is c_t. So their product over sqrt(hd) is c_t log(a_u), and token u weighs
// a_u^c_t.

static Attention att;
static struct {
    int changed;                       /* the token that is another one in k[1] and v[1] */
    double a[ATT_N][ATT_H1], c[ATT_N]; /* a: by token and head */
    const GoldenSequence *golden;      /* a prompt whose logits are wanted too; or NULL */
} made_att;
static Golden golden;

/* In the last step scores are up to 130, too much for expf. */
static bool draw_attention(void) {
    ask(ASK_ATTENTION, &att);
    if (!golden.file) golden = golden_read("tests/golden/opt-pre");
    made_att.golden = step == 3 && number < golden.count ? &golden.sequence[number] : NULL;
    if (made_att.golden) {
        att.nids = made_att.golden->n;
        CHECK(att.nids <= MOST_IDS && att.nids * golden.vocab <= MOST_LOGITS);
        memcpy(att.ids, made_att.golden->ids, att.nids * sizeof *att.ids);
    }
    att.n = step == 1 ? 1 : draw(2, ATT_N), att.nh = draw(2, 4), att.hd = draw(2, 6);
    made_att.changed = draw(0, att.n - 1);
    for (int t = 0; t < att.n; t++) made_att.c[t] = draw_real(0, step == 3 && number % 2 ? 60 : 2);
    for (int h = 0; h < att.nh; h++) {
        const int place = draw(0, att.hd - 1);
        for (int t = 0; t < att.n; t++) {
            made_att.a[t][h] = draw(1, 9);
            for (int d = 0; d < att.hd; d++) {
                const int at = (t * att.nh + h) * att.hd + d, more = t == made_att.changed;
                att.q[at] = d == place ? made_att.c[t] : 0, att.v[0][at] = draw_real(-4, 4);
                att.k[0][at] = d == place ? sqrt(att.hd) * log(made_att.a[t][h]) : draw_real(-4, 4);
                att.k[1][at] = att.k[0][at] + more, att.v[1][at] = att.v[0][at] + 9 * more;
            }
        }
    }
    return true;
}

/* A token alone has its own v. Of logits, as in test_opt_model.c: K and V rounded to F16 cost up to 8e-4, what is wrong
 * costs over 1e-2. */
static void check_attention(void) {
    const GoldenSequence *s = made_att.golden;
    const int h1 = att.nh * att.hd;
    in_case("%d tokens, %d heads of %d", att.n, att.nh, att.hd);
    for (int g = 0; g < GUARD; g++)
        if (att.o[0][att.n * h1 + g] != UNTOUCHED) wrong("something behind o was written to");
    for (int t = 0; t < att.n; t++) {
        const float *o = att.o[0] + t * h1, *other = att.o[1] + t * h1;
        const bool sees =
            t < made_att.changed ? memcmp(o, other, h1 * sizeof *o) != 0 : max_norm_error(o, other, h1) > 1e-4;
        if (step == 2 && sees != (t >= made_att.changed))
            wrong("token %d %s token %d", t, sees ? "sees" : "does not see", made_att.changed);
        for (int d = 0; d < h1 && step != 2; d++) {
            double all = 0, sum = 0;
            for (int u = 0; u <= t; u++) {
                const double weight = pow(made_att.a[u][d / att.hd], made_att.c[t]);
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

static Line line;

/* Equal prompts; there may be fewer than seats in the block. In the last step one stops when all seats are taken and nobody
 * else is about to leave or to enter. */
static bool draw_seats(void) {
    ask(ASK_SEATS, &line);
    const bool few = step == 2 && number % 3 == 1; /* prompts for two batches or more, but not for all of the policy's */
    const int gbs = draw(step == 3 ? 2 : 1, 4), K = draw(step == 3 || few ? 3 : 1, 5),
              n = draw(step == 3 ? 2 * K : K, 3 * K);
    line.gbs = gbs, line.num_gpu_batches = K, line.page_tokens = 16, line.limit = -1;
    line.count = few ? draw(gbs + 1, gbs * (K - 1)) : step < 3 && draw(0, 1) ? draw(1, gbs * K) : LINE;
    line.sweeps = step == 1 ? 1 : step == 2 ? imin(3 * n, SWEEPS) : n;
    line.first = step == 3 ? n - 1 : 0, line.stops = step == 3 ? draw(0, gbs * K - 1) : -1;
    for (int i = 0; i < line.count; i++) line.s[i] = 5, line.n[i] = n;
    return true;
}

/* By Figure 6: batch b enters with the first sweep that is not before b n/K, and every n sweeps after that the next one
 * takes its seats. The last of a small task's batches may not be full. */
static void check_seats(void) {
    int expected[SWEEPS] = {0}, waiting = line.count;
    const int gbs = line.gbs, seats = imin(gbs * line.num_gpu_batches, line.count), K = (seats + gbs - 1) / gbs,
              n = line.n[0];
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
            if (sweep < line.n[i]) pages += pages_for(line.s[i] + sweep, line.page_tokens);
        most = imax(most, pages);
    }
    return most;
}

/* A batch of prompts, equal ones but in the last step, of which at least one could enter alone. */
static bool draw_pages(void) {
    ask(ASK_SEATS, &line);
    line.count = draw(2, 8);
    line.sweeps = 1, line.stops = -1;
    line.gbs = line.count, line.num_gpu_batches = 1, line.page_tokens = draw(2, 5);
    for (int i = 0; i < line.count; i++) {
        const bool other = !i || step == 3;
        line.s[i] = other ? draw(1, 16) : line.s[0];
        line.n[i] = !other ? line.n[0] : step == 2 ? 1 : draw(1, 14);
    }
    const int all = most_held(line.count);
    line.limit = step == 1 ? all + (number % 3 - 1) * draw(0, 9) : draw(step == 2 ? 0 : most_held(1), all);
    if (step == 1 && number % 3 == 0) line.limit = -1;
    return true;
}

/* As many enter sweep 0 as always have their pages, and no more. */
static void check_pages(void) {
    int m = 0;
    while (m < line.count && (line.limit < 0 || most_held(m + 1) <= line.limit)) m++;
    in_case("prompts of s = %d, n = %d, and others; pages of %d tokens, limit %d (-1: none)", line.s[0], line.n[0],
            line.page_tokens, line.limit);
    near_to(line.entered[0], m, 0, "prompts that enter sweep 0, of which the first %d need at most %d pages", m,
            most_held(m));
}

// ---- 4: error diffusion ---------------------------------------------------------------------------------------------

static Deal dealt;
static struct {
    double within; /* so many bytes from its share is what each tier holds ... */
    int every;     /* ... after so many items */
    bool exact;    /* nothing is rounded, so that it is seen who is equally far behind */
} made_deal;

/* Shares of q parts.
 *   1  each q equal items are dealt exactly
 *   2  items of 1 to 100 bytes. A tier is due at most 5/6 of the largest item: what is due sums to nothing, and nobody who
 *      was furthest behind is more than 2/3 of an item ahead. In variants nobody is a whole item ahead, and so at most two
 *      behind
 *   3  the weights of OPT-30B, layer by layer
 *   4  equal items of which each q are dealt exactly, but for what rounding leaves, which may be less than nothing for both
 *      tiers with a share; then small ones, which are less than that */
static bool draw_deal(void) {
    ask(ASK_DEAL, &dealt);
    const OptConfig opt = opt_named("opt-30b");
    const int q[] = {draw(2, 8), 1000, 100, draw(3, 7)}, all = q[step - 1], least = step == 4;
    const int a = draw(least, all - least), b = step < 4 && draw(0, 2) ? draw(0, all - a) : all - a;
    const int parts[NTIERS] = {a, b, all - a - b}, every[] = {all, 1, NROLES, 1};
    const double within[] = {1e-9, 100, 2. * opt.h1 * opt.h2 + 2 * opt.h2, INFINITY};
    double large = 0;
    for (int t = 0; t < NTIERS; t++) dealt.share[(t + number) % NTIERS] = (double)parts[t] / all;
    dealt.layers = step == 3, dealt.items = step == 3 ? opt.l * NROLES : DEALT;
    made_deal.every = every[step - 1], made_deal.within = within[step - 1] * (variant ? 2 : 1);
    made_deal.exact = step == 1 && (all & (all - 1)) == 0;
    for (int j = 0; j < dealt.items; j++) {
        int rows, cols;
        opt_role_shape(&opt, (Role)(j % NROLES), &rows, &cols);
        if (j % (all + 2) == 0) large = draw_real(1e14, 1e15);
        const double sizes[] = {1, draw(1, 100), 2. * rows * cols, j % (all + 2) < all ? large : draw_real(0, 1e-3)};
        dealt.size[j] = sizes[step - 1];
    }
    return true;
}

/* Returns by how much a tier that is due so much comes before others, by variant. */
static double urgency(double due, double size, double share) {
    const double by[VARIANTS] = {due + size * share, (due + size * share) / share, due, (due + size * share) * share};
    return by[variant];
}

/* Returns the tier to which the variant's rule sends an item that went to `tier`. Where numbers are rounded, what is nearly
 * equal is equal, and any of those is right. */
static int rightful(int tier, const double due[NTIERS], double size) {
    const bool last = variant == 1 || variant == 2; /* of equals */
    double best = -INFINITY, of[NTIERS];
    int right = 0;
    for (int t = 0; t < NTIERS; t++) {
        of[t] = dealt.share[t] > 0 ? urgency(due[t], size, dealt.share[t]) : -INFINITY;
        if (last ? of[t] >= best : of[t] > best) right = t;
        best = fmax(best, of[t]);
    }
    return !made_deal.exact && of[tier] >= best - 1e-7 * (1 + fabs(best)) ? tier : right;
}

static void check_deal(void) {
    double holds[NTIERS] = {0}, due[NTIERS] = {0}, all = 0;
    in_case("shares %.4g %.4g %.4g", dealt.share[0], dealt.share[1], dealt.share[2]);
    for (int j = 0; j < dealt.items; j++) {
        const int tier = dealt.tier[j];
        if (tier < 0 || tier >= NTIERS) return wrong("item %d went to tier %d", j, tier);
        const int right = step < 3 ? rightful(tier, due, dealt.size[j]) : tier;
        if (tier != right) return wrong("item %d: expected %s, found %s", j, tier_name[right], tier_name[tier]);
        for (int t = 0; t < NTIERS; t++) due[t] += dealt.size[j] * (dealt.share[t] - (t == tier));
        all += dealt.size[j], holds[tier] += dealt.size[j];
        if (dealt.share[tier] == 0 && step != 3)
            return wrong("item %d of %g bytes went to %s, which has none", j, dealt.size[j], tier_name[tier]);
        for (int t = 0; t < NTIERS && (j + 1) % made_deal.every == 0; t++)
            near_to(holds[t], all * dealt.share[t], made_deal.within, "bytes on %s after %d items", tier_name[t], j + 1);
    }
}

// ---- 5, 6 and 14: the engine and mini.c, against the plain forward --------------------------------------------------

enum { BLOCKS = 5 };
static SmallRun gen;
static MiniRun mini;
static const int blocks[BLOCKS][2] = {{5, 1}, {2, 1}, {2, 2}, {2, 3}, {3, 2}}; /* gbs, num_gpu_batches */

/* Percentages on the GPU and on the CPU, as for --percent: of weights, cache and activations. */
#define WEIGHTS_ON_CPU "0 100 100 0 100 0"
static const struct {
    int step, mini; /* of mini.c's exercise; 0: none */
    const char *percent;
} placements[] = {
    {1, 1, "100 0 100 0 100 0"},
    {2, 3, WEIGHTS_ON_CPU},
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
    RunCase *c = &gen.run;
    ask(ASK_RUN, &gen);
    if (placements[number / BLOCKS].step != step) return false;
    for (int i = 0; i < 6; i++) c->share[i] = strtod(percent, &percent) / 100;
    for (int i = 0; i < PROMPTS; i++) c->s[i] = draw(3, LONGEST);
    c->words = draw(1, 1 << 20), c->weights = draw(1, 1 << 20);
    c->gbs = block[0], c->num_gpu_batches = block[1];
    c->page_tokens = draw(2, 5), c->delegated = step > 3;
    return true;
}

static void in_placement(void) {
    const int *block = blocks[number % BLOCKS];
    in_case("--percent %s, %d batches of %d", placements[number / BLOCKS].percent, block[1], block[0]);
}

// ---- the first square that is wrong

static void name_square(char *name, size_t size, int i, int j, int k, int l) {
    snprintf(name, size, "token i = %d of block %d, layer j = %d%s, batch k = %d", i % RUN_TOKENS, i / RUN_TOKENS, j,
             j == l ? " (the head)" : "", k);
}

/* Says of a square of the right run what differs in the other: NAME of the row of some token of prompt p. Returns true if
 * the row is the same, but for what F16 rounds. */
static bool same_row(const Row *found, const Row *right, const char *square, const char *name, int token, int p,
                     const char *where) {
    if (fabs(found->sum - right->sum) <= 2e-3 * right->size) return true;
    wrong(
        "first wrong square: %s: %s of token %d of prompt %d differs %s; of the sum of its numbers %.4g was expected, "
        "found "
        "%.4g",
        square, name, token, p, where, right->sum, found->sum);
    return false;
}

/* Compares x as it arrived or left. by: the sequences of the batch. In decoding and for the head each has one row, its
 * newest token's. */
static bool same_x(const SquareSeen *found, const SquareSeen *right, bool left, const Attended by[2], const int *prompt,
                   const char *square) {
    const int nfound = left ? found->left : found->arrived, n = left ? right->left : right->arrived;
    const int nseq = by[0].n + by[1].n;
    if (nfound != n)
        return wrong("first wrong square: %s: %d rows of x were expected to %s, found %d", square, n,
                     left ? "leave" : "arrive", nfound),
               false;
    for (int q = 0, row = 0; q < nseq; q++) {
        const int len = q < by[0].n ? by[0].len[q] : by[1].len[q - by[0].n], rows = n == nseq ? 1 : len;
        for (int r = 0; r < rows && row < n; r++, row++)
            if (!same_row(&found->x[left][row], &right->x[left][row], square, "x", len - rows + r, prompt[q],
                          left ? "as it leaves" : "as it arrives"))
                return false;
    }
    return true;
}

/* Compares k and v where one processor attends to them; its sequences begin with number `first` of the batch. */
static bool same_kv(const Attended *found, const Attended *right, int first, const int *prompt, const char *square,
                    const char *processor) {
    if (found->n != right->n)
        return wrong("first wrong square: %s: the %s was expected to attend for %d sequences, found %d", square, processor,
                     right->n, found->n),
               false;
    for (int q = 0; q < right->n; q++)
        for (int t = 0; t < right->len[q]; t++)
            for (int value = 0; value < 2; value++) {
                char where[80];
                snprintf(where, sizeof where, "where the %s attends for its token %d", processor, right->len[q] - 1);
                if (!same_row(&found->kv[value][q][t], &right->kv[value][q][t], square, value ? "v" : "k", t,
                              prompt[first + q], where))
                    return false;
            }
    return true;
}

/* Says the first square, in the order of the loop, that differs from that of the right run: what came, what was attended
 * to, and what was made of it. The head is column l. loads: of x that was in its place before, nothing was noted, as in
 * mini.c. Returns true if none differs. */
static bool same_squares(const Squares *found, const Squares *right, int l, bool loads) {
    for (int i = 0; i < MOST_SWEEPS; i++)
        for (int j = 0; j <= l; j++)
            for (int k = 0; k < MOST_K; k++) {
                const SquareSeen *f = &found->at[i][j][k], *r = &right->at[i][j][k];
                const Attended *by = right->at[i][0][k].by;
                const int *prompt = right->at[i][l][k].prompt;
                const bool arrives = !loads || j == l || (j && right->at[i][0][1].left);
                char square[120];
                if (!r->arrived) continue;
                name_square(square, sizeof square, i, j, k, l);
                if (j < l ? !f->left && !f->by[0].n && !f->by[1].n : !f->arrived)
                    return wrong("first wrong square: %s: it was never computed", square), false;
                if ((arrives && !same_x(f, r, false, by, prompt, square)) ||
                    !same_kv(&f->by[0], &r->by[0], 0, prompt, square, "GPU") ||
                    !same_kv(&f->by[1], &r->by[1], r->by[0].n, prompt, square, "CPU") ||
                    !same_x(f, r, true, by, prompt, square))
                    return false;
            }
    return true;
}

// ---- 5 and 6

/* Says the first square whose data were loaded later than in the right run, so that nothing was computed beside them.
 * Returns true if there is none. */
static bool loads_in_time(const Squares *found, const Squares *right, int l) {
    static const char *const kinds[LOADED_KINDS] = {"weights were", "cache was", "activations were"};
    for (int i = 0; i < MOST_SWEEPS; i++)
        for (int j = 0; j <= l; j++)
            for (int k = 0; k < MOST_K; k++)
                for (int kind = 0; kind < LOADED_KINDS; kind++) {
                    const int f = found->at[i][j][k].loaded[kind], r = right->at[i][j][k].loaded[kind];
                    char square[120];
                    if (!r || (f && f <= r)) continue;
                    name_square(square, sizeof square, i, j, k, l);
                    if (!f) return wrong("first wrong square: %s: its %s not loaded", square, kinds[kind]), false;
                    return wrong(
                               "first wrong square: %s: the numbers are right, but its %s loaded too late: after the "
                               "computation of %d squares of this run; expected: after %d",
                               square, kinds[kind], f - 1, r - 1),
                           false;
                }
    return true;
}

/* Has it run once more, and runs it here. Says where it went wrong, and of a run that was right what was loaded
 * too late. Returns false if nothing was said. */
static bool in_square(Task *task, Checkpoint *model, bool was_right) {
    static RunSeen theirs;
    static Squares ours;
    Rig r = run_rig(&gen.run, model, task, NULL);
    memset(&theirs, 0, sizeof theirs), memset(&ours, 0, sizeof ours);
    theirs.run = gen.run;
    in_placement();
    if (!ask_more(ASK_SEEN, &theirs)) {
        if (was_right) wrong("the same run did not end a second time");
        return was_right;
    }
    squares_seen = &ours;
    ASSERT_OK(rig_run(&r));
    squares_seen = NULL;
    rig_close(&r);
    return was_right ? !loads_in_time(&theirs.squares, &ours, model->config.l)
                     : !same_squares(&theirs.squares, &ours, model->config.l, false);
}

/* Returns whether all prompts have their tokens, with logits that are those of the plain forward of what has been said so
 * far. As in test_schedule.c: a difference in the last bit can flip a rounding of K and V to F16. Says the first number
 * that differs, if told to. */
static bool right_logits(const Task *task, const Checkpoint *model, bool says) {
    static float logits[(LONGEST + RUN_TOKENS) * VOCAB];
    bool right = gen.ended == PROMPTS;
    for (int i = 0; i < PROMPTS; i++) {
        const Prompt *q = &task->prompts[i];
        bool words = true;
        for (int t = 0; t < RUN_TOKENS; t++) words &= gen.ids[i][t] >= 0 && gen.ids[i][t] < VOCAB;
        if (!words && says) wrong("the tokens of prompt %d are none", i);
        right &= words;
        if (!words) continue;
        memcpy(q->ids + q->s, gen.ids[i], sizeof gen.ids[i]);
        CHECK(!reference_forward(logits, model, q->ids, q->s + RUN_TOKENS - 1, &err));
        for (int t = 0; t < RUN_TOKENS; t++) {
            const float *expected = logits + (q->s - 1 + t) * VOCAB;
            const bool same = max_norm_error(gen.logits[i][t], expected, VOCAB) <= 1e-2;
            right &= same;
            if (same || !says) continue;
            in_case("prompt %d (s = %d), token i = %d, logits", i, q->s, t);
            near_row(gen.logits[i][t], expected, VOCAB, 1e-2);
            break;
        }
    }
    return right;
}

/* Over each link went what the engine moves here, too: there is one way to make Figure 4's calls. */
static void check_run(void) {
    const char *const kinds[] = {"weights", "cache", "activations", "other data"};
    Checkpoint *model = run_model(&gen.run);
    Task task = run_task(&gen.run), plain = run_task(&gen.run);
    Rig here = run_rig(&gen.run, model, &task, NULL);
    const bool right = right_logits(&plain, model, false);
    const bool said = (!right || step == 2 || step == 3) && in_square(&task, model, right);
    if (!right && !said) right_logits(&plain, model, true);
    in_placement();
    near_to(gen.ended, PROMPTS, 0, "prompts that got their tokens");
    ASSERT_OK(rig_run(&here));
    for (int i = 0; i < CHANNELS * KINDS; i++)
        near_to(gen.moved[i / KINDS][i % KINDS], here.moved[i / KINDS][i % KINDS], 0, "bytes or operations of %s, %s",
                channel_name[i / KINDS], kinds[i % KINDS]);
    rig_close(&here), free_task(&task), free_task(&plain), checkpoint_close(model);
}

// ---- 14

enum { TEXTS = 10 };
static const char *const texts[TEXTS] = {"Once upon a time", "Tom and Sue had a", "One was", "The big brown dog",
                                         "Ben liked",        "A little girl and", "One day", "The cat was",
                                         "She saw a",        "Mom said"};
static const char TINY[] = "models/opt-tiny";
static Checkpoint *tiny;
static Task told; /* the prompts of mini.c, of texts[place] */

/* Whatever rests where the engine's does, in several blocks, with overlapping or without; in the first step one batch after
 * the other. */
static bool draw_mini(void) {
    const char *percent = placements[number / BLOCKS].percent;
    const int *block = blocks[number % BLOCKS];
    char *words = mini.words;
    int wg, wc, cg, cc, hg, hc;
    ask(ASK_MINI, &mini);
    if (placements[number / BLOCKS].mini != step || (step == 1 && block[1] > 1)) return false;
    if (!tiny) tiny = opens(TINY), told = equal_task(PROMPTS, LONGEST, RUN_TOKENS);
    Tokenizer *tokenizer = tokenizer_open(TINY, tiny->config.vocab, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tokenizer);
    words += sprintf(words, "%s\n", TINY);
    for (int i = 0; i < PROMPTS; i++) {
        Prompt *q = &told.prompts[i];
        int32_t *ids;
        q->place = draw(0, TEXTS - 1);
        q->s = text_encode(&ids, texts[q->place], strlen(texts[q->place]), tokenizer, &err);
        CU_ASSERT_FATAL(q->s > 1 && q->s <= LONGEST);
        memcpy(q->ids, ids, q->s * sizeof *ids), free(ids);
        words += sprintf(words, "%s\n", texts[q->place]);
    }
    sscanf(percent, "%d %d %d %d %d %d", &wg, &wc, &cg, &cc, &hg, &hc);
    words +=
        sprintf(words, "--json\n--max-tokens\n%d\n--percent\n%d\n%d\n%d\n%d\n%d\n%d\n", RUN_TOKENS, wg, wc, cg, cc, hg, hc);
    sprintf(words, "--gpu-batch-size\n%d\n--num-gpu-batches\n%d\n%s", block[0], block[1],
            number % 2 ? "--no-overlap\n" : "");
    tokenizer_close(tokenizer);
    return true;
}

/* Says where the run went wrong, by the engine with everything on the GPU. Returns false if all squares are right. */
static bool in_mini_square(void) {
    static MiniSeen theirs;
    static Squares ours;
    const int *block = blocks[number % BLOCKS];
    Rig r = {.model = tiny, .policy = all_gpu(block[0], block[1]), .task = &told};
    memset(&theirs, 0, sizeof theirs), memset(&ours, 0, sizeof ours);
    memcpy(theirs.words, mini.words, sizeof mini.words);
    if (!ask_more(ASK_MINI_SEEN, &theirs)) return false;
    squares_seen = &ours;
    ASSERT_OK(rig_run(&r));
    squares_seen = NULL;
    rig_close(&r);
    in_placement();
    return !same_squares(&theirs.squares, &ours, tiny->config.l, true);
}

/* Returns whether all tokens are as in the plain forward. mini.c rounds otherwise, so that any token will do whose logit is
 * within 2e-3 of the largest. Says the first that is not, if told to. */
static bool right_tokens(bool says) {
    static int32_t known[TEXTS][RUN_TOKENS]; /* what mini.c has said, and was right */
    const int vocab = tiny->config.vocab;
    float *logits = xcalloc((size_t)(LONGEST + RUN_TOKENS) * vocab, sizeof *logits);
    bool right = mini.ended == PROMPTS;
    for (int i = 0; i < PROMPTS; i++) {
        const Prompt *q = &told.prompts[i];
        const int32_t *ids = mini.ids[i];
        bool good = true;
        for (int t = 0; t < RUN_TOKENS; t++) good &= ids[t] >= 1 && ids[t] < vocab;
        if (good && !memcmp(ids, known[q->place], sizeof *known)) continue;
        if (!good && says) wrong("the tokens of prompt %d are none", i);
        right &= good;
        if (!good) continue;
        memcpy(q->ids + q->s, ids, sizeof *mini.ids);
        CHECK(!reference_forward(logits, tiny, q->ids, q->s + RUN_TOKENS - 1, &err));
        for (int t = 0; t < RUN_TOKENS && good; t++) {
            const float *row = logits + (size_t)(q->s - 1 + t) * vocab;
            float best = row[0], largest = 0;
            for (int v = 0; v < vocab; v++) best = fmaxf(best, row[v]), largest = fmaxf(largest, fabsf(row[v]));
            good = row[ids[t]] >= best - 2e-3 * largest;
            if (good || !says) continue;
            in_case("prompt %d (s = %d), token i = %d, logits", i, q->s, t);
            wrong("that of token %d, and the best: expected %.9g, found %.9g", ids[t], best, row[ids[t]]);
        }
        right &= good;
        if (good) memcpy(known[q->place], ids, sizeof *known);
    }
    free(logits);
    return right;
}

static void check_mini(void) {
    if (!right_tokens(false) && !in_mini_square()) right_tokens(true);
    in_placement();
    near_to(mini.ended, PROMPTS, 0, "prompts that got their tokens");
    if (!strcmp(placements[number / BLOCKS].percent, WEIGHTS_ON_CPU)) {
        const OptConfig *c = &tiny->config;
        const double layers = (double)streamed_bytes(c) - 2. * c->vocab * c->h1;
        const int passes = ceil_div(PROMPTS, blocks[number % BLOCKS][0] * blocks[number % BLOCKS][1]) * RUN_TOKENS;
        near_to(mini.carried[CTOG], passes * layers, 0, "bytes of weights, all layers once for each token of a block");
    }
}

// ---- 7: Appendix A.3 in generation, by hand -------------------------------------------------------------------------
//
// h1 = 8, h2 = 32, s = 10, n = 6, bls = 2 x 3 = 6. A layer has 8 h1^2 + 4 h1 h2 = 1536 bytes of weights; a new token of
// each sequence has 2 h1 bls = 96 bytes of activations and 4 h1 bls = 192 of K and V, and attends to 4 bls (s + n/2) h1 =
// 2496. Products take 6 x 1536 flops wherever; attention is the GPU's over cg, and the CPU's over the rest. Cases are
// larger: all of h1 and h2, of s and n, and bls, each by a factor of its own, by which the numbers grow as a unit does.

static const int step_of_row[NROWS_G] = {1, 1, 2, 2, 3};
static Rows a3;
static int size, length, factor_bls; /* the factors */

static bool draw_rows(void) {
    ask(ASK_ROWS, &a3);
    size = draw(1, 5), length = draw(1, 6), factor_bls = draw(1, 6);
    for (int p = 0; p < 2; p++) {
        for (int link = 0; link <= CTOD; link++) a3.bdw[link][p] = draw_real(1, 60);
        a3.mm_flops[p] = draw_real(1, 60), a3.bmm_flops[p] = draw_real(1, 60), a3.cpu_flops[p] = draw_real(1, 60);
    }
    a3.l = draw(2, 9), a3.h1 = 8 * size, a3.h2 = 32 * size;
    a3.s = 10 * length, a3.n = 6 * length, a3.gbs = 2 * factor_bls, a3.num_gpu_batches = 3;
    return true;
}

/* The row is a x - T_gen <= b, which comes behind a. */
static void check_rows(void) {
    static const char *const others[] = {"T_pre", "T_gen", "right-hand side"};
    const double weights = 1536 * size * size, hidden = 96 * size * factor_bls, kv = 2 * hidden,
                 attended = 2496 * size * factor_bls * length, products = 6 * weights * factor_bls;
    const double expected[NROWS_G][NVARS + 1] = {
        [CTOG_G] = {[WC] = weights, [WD] = weights, [HC] = hidden, [HD] = hidden},
        [GTOC_G] = {[HC] = hidden, [HD] = hidden},
        [DTOC_G] = {[WD] = weights, [CD] = attended, [HD] = hidden},
        [CTOD_G] = {[CD] = kv, [HD] = hidden},
        [COMP_G] = {[CG] = attended / a3.bmm_flops[0],
                    [CC] = attended / a3.cpu_flops[0],
                    [CD] = attended / a3.cpu_flops[0],
                    [NVARS] = -products / a3.mm_flops[0]},
    };
    in_case("h1 %d, h2 %d, s %d, n %d, bls %d", a3.h1, a3.h2, a3.s, a3.n, a3.gbs * a3.num_gpu_batches);
    for (int r = 0; r < NROWS_G; r++) {
        if (step_of_row[r] != step) continue;
        if (!a3.row[r].found || a3.row[r].equal) return wrong("there is no row %s that is an inequality", row_g[r]);
        for (int f = 0; f <= NVARS; f++) {
            const double rate = r < COMP_G ? a3.bdw[r][0] : 1, amount = f == T_GEN ? -rate : expected[r][f];
            near_to(rate * (f < NVARS ? a3.row[r].a[f] : a3.row[r].b), amount, 1e-9 * fabs(amount),
                    "row %s, %s, times its rate", row_g[r], f < NFRACTIONS ? fraction_name[f] : others[f - NFRACTIONS]);
        }
    }
}

// ---- 8 and 13: the simplex method -----------------------------------------------------------------------------------

static LpTable table; /* and what is expected */
static Program program;
static MiniProgram mini_program;

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

/* Has mini.c write the policy of that block. */
static bool draw_mini_policy(void) {
    ask(ASK_MINI, &mini);
    strcpy(mini.words,
           "OPT-30B\n--policy\n512\n--hardware\nhardware/t4.json\n--max-tokens\n32\n--gpu-batch-size\n48\n"
           "--num-gpu-batches\n3\n");
    return true;
}

/* The steps of the textbook, of two phases and of cycles; then the first and the last of mini.c. Each table comes as given,
 * and then with its cost and each row scaled by a factor of its own. Behind them come tables that were made, scaled too, or
 * behind cycles A.3. */
static bool draw_table(bool of_mini) {
    static const int first[2][3] = {{0, 2, 0}, {0, 0}}, count[2][3] = {{2, TEXTBOOK - 2, CYCLES}, {NO_EQUATIONS, CYCLES}};
    const bool cycles = step == 3 - of_mini;
    const int n = count[of_mini][step - 1];
    const LpTable *from = (cycles ? lp_cycles : textbook) + first[of_mini][step - 1] + number % n;
    Lp lp;
    ask(of_mini ? ASK_TABLEAU : ASK_PROGRAM, of_mini ? (void *)&mini_program : &program);
    if (number < 2 * n || !cycles) {
        table = number < 2 * n ? *from : made(!of_mini && step == 2);
        for (int i = 0; i <= table.m && number >= n; i++) {
            const double factor = ldexp(1, draw(-2, 3));
            for (int j = 0; j <= table.n; j++) table.at[i][j] *= factor;
        }
        lp = lp_of(&table);
    } else {
        Hardware t4;
        const OptConfig config = opt_named("opt-30b");
        ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
        table = (LpTable){"A.3 for OPT-30B on the paper's machine", 0, 0, 0, LP_OPTIMAL, {{OPT_30B_SECONDS}}};
        paper_lp(&lp, &t4, &config, &(Block){.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3});
        if (number > 2 * n || of_mini) return number == 2 * n && draw_mini_policy();
    }
    if (of_mini) {
        MiniTableau *t = &mini_program.before;
        for (int v = 0; v < MINI_COLUMNS; v++) t->other[v] = v;
        for (int i = 0; i < MINI_ROWS; i++) t->basic[i] = MINI_COLUMNS + i;
        for (int i = 0; i <= table.m; i++) {
            double *row = t->at[i ? i - 1 : MINI_COST];
            memcpy(row, table.at[i], table.n * sizeof *row);
            row[MINI_COLUMNS] = i ? table.at[i][table.n] : 0;
        }
        return true;
    }
    program.n = lp.n, program.m = lp.m;
    memcpy(program.c, lp.c, sizeof lp.c);
    for (int i = 0; i < lp.m; i++) {
        program.equal[i] = lp.row[i].equal, program.b[i] = lp.row[i].b;
        memcpy(program.a[i], lp.row[i].a, sizeof lp.row[i].a);
    }
    return true;
}

static bool draw_program(void) { return draw_table(false); }
static bool draw_mini_program(void) { return draw_table(true); }

static void check_table(bool of_mini) {
    static const char *const verdict[] = {"optimal", "infeasible", "unbounded", "lost"};
    const bool by_policy = of_mini && !table.m;
    const MiniTableau *t = &mini_program.after;
    const int ended = mini_program.ended ? LP_OPTIMAL : LP_UNBOUNDED;
    const int found = by_policy ? LP_OPTIMAL : of_mini ? ended : program.verdict;
    const double least = table.at[0][table.n];
    const double value = by_policy ? mini.T / 144 : of_mini ? -t->at[MINI_COST][MINI_COLUMNS] : program.value;
    in_case("%s (%d rows, %d variables)", table.what, table.m, table.n);
    if (found != (int)table.verdict)
        wrong("expected %s, found %s", verdict[table.verdict], verdict[(unsigned)found % 4]);
    else if (table.verdict == LP_OPTIMAL)
        near_to(value, least, 1e-8 * (1 + fabs(least)), "the least cost");
}

static void check_program(void) { check_table(false); }
static void check_mini_program(void) { check_table(true); }

static Rules rules;

/* Costs of which some are below 0, the first of them not the lowest; rows of which two tie. */
static bool draw_rules(void) {
    ask(ASK_RULES, &rules);
    int order[RULES_N + RULES_M];
    rules.column = draw(0, RULES_N + RULES_M - 1);
    for (int j = 0; j < RULES_N + RULES_M; j++) rules.cost[j] = draw(0, 1) ? draw(0, 5) : -draw(1, 9);
    draw_order(order, RULES_N + RULES_M);
    memcpy(rules.basic, order, sizeof rules.basic);
    for (int i = 0; i < RULES_M; i++)
        rules.entry[i] = i ? draw(-2, 4) : draw(1, 4), rules.right[i] = draw(0, i ? 3 : 1) * fabs(rules.entry[i]);
    return true;
}

/* Returns the place of a variable in the order in which Bland's rule takes them, by variant: as they come; the last first;
 * slacks first; those with even numbers first. */
static int turn(int v) {
    const int all = RULES_N + RULES_M, of[VARIANTS] = {v, -v, (v + RULES_M) % all, v % 2 * all + v};
    return of[variant];
}

static void check_rules(void) {
    double reach[RULES_M];
    int first = -1, row = 0;
    for (int v = 0; v < RULES_N + RULES_M; v++)
        if (rules.cost[v] < 0 && (first < 0 || turn(v) < turn(first))) first = v;
    for (int r = 0; r < RULES_M; r++) {
        reach[r] = rules.entry[r] > 0 ? rules.right[r] / rules.entry[r] : INFINITY;
        if (reach[r] < reach[row] || (reach[r] == reach[row] && turn(rules.basic[r]) < turn(rules.basic[row]))) row = r;
    }
    near_to(rules.entering, first, 0, "the column that enters (-1: no cost is below 0)");
    near_to(rules.leaving, row, 0, "the row that leaves, which reaches 0 at %g", reach[row]);
}

// ---- 9: groups of a few bits ----------------------------------------------------------------------------------------

static Groups packed;

/*   1  a group of one number over and over, and one of the 16 numbers of a grid whose step is a power of two
 *   2  any numbers, in groups that are not full: whole multiples of 2^-8, so that floats and doubles give the same scale
 *   3  the ends of F16, where the step is as wide, or as narrow, as it can be, and numbers that are not finite */
static bool draw_pack(void) {
    ask(ASK_GROUPS, &packed);
    enum { ON_GRID, ANY, NOT_FINITE, SMALLEST, LARGEST };
    static const int groups[VARIANTS] = {GROUP, 32, 48, 16};
    const int kind = step < 3 ? step - 1 : NOT_FINITE + number % 3, group = groups[variant];
    const float constant = draw(-40, 40) / 16., grid = ldexp(1, draw(-4, 3)), low = grid * draw(-12, 12);
    packed.n = kind == ANY ? draw(1, 128) : 3 * group;
    packed.stride = draw(1, MOST_STRIDE);
    packed.bits = kind == ANY ? 2 + number % 7 : 4, packed.group = group;
    for (int i = 0; i < packed.n; i++) {
        const float x[] = {i < group ? constant : low + grid * (i * 7 % 16), draw(-256, 1792) / 256., i % 16,
                           draw(0, 7) * 0x1p-24f, (i + number) % 2 ? 65504 : -65504};
        packed.x[i] = x[kind];
    }
    if (kind == NOT_FINITE) {
        packed.x[draw(group, 2 * group - 1)] = draw(0, 1) ? INFINITY : -INFINITY;
        packed.x[draw(2 * group, 3 * group - 1)] = NAN;
    }
    return true;
}

/* A code stands for base + width * code. */
typedef struct {
    double base, width;
    int least, most; /* the codes */
} Codes;

/* Returns the codes of a group, by variant: from the least number up; from the largest down; around 0; from the least up by
 * a power of two. */
static Codes codes_of(double low, double high, int levels) {
    const int half = levels / 2;
    const double exact = variant == 2 ? fmax(-low, high) / half : (high - low) / levels;
    f16 scale = f32_to_f16(exact);
    double power = exact > 0 ? 0x1p-24 : 0;
    while (power < exact) power *= 2;
    if (f16_to_f32(scale) < exact) scale++;
    const double up = f16_to_f32(scale), reach[VARIANTS] = {low + levels * up, levels * up - high, half * up, 0};
    if (reach[variant] >= 65520) scale--;
    const double width = f16_to_f32(scale);
    const Codes by[VARIANTS] = {
        {low, width, 0, levels}, {high, -width, 0, levels}, {0, width, -half, half}, {low, power, 0, levels}};
    return by[variant];
}

/* Returns the number that a code stands for, in F16; where that would be too large for F16, that of the code below. */
static double decoded(const Codes *c, double code) {
    const double x = c->base + c->width * fmin(fmax(code, c->least), c->most);
    return f16_to_f32(f32_to_f16(x < 65520 ? x : x - c->width));
}

/* Each number becomes the one of its code; where it is halfway between two codes, either is right. NaN comes of a group
 * that is not finite. */
static void check_pack(void) {
    const int levels = (1 << packed.bits) - 1;
    bool all = true;
    for (int g = 0; g < packed.n; g += packed.group) {
        const float *x = packed.x + g, *back = packed.back + g;
        const int n = imin(packed.group, packed.n - g);
        float low = INFINITY, high = -INFINITY;
        bool finite = true;
        for (int i = 0; i < n; i++) low = fminf(low, x[i]), high = fmaxf(high, x[i]), finite &= isfinite(x[i]) != 0;
        const Codes codes = finite ? codes_of(low, high, levels) : (Codes){0};
        in_case("%d bits, a group of %d from %g to %g, stride %d", packed.bits, n, low, high, packed.stride);
        for (int i = 0; i < n; i++) {
            const double exact = codes.width ? (x[i] - codes.base) / codes.width : 0, code = floor(exact);
            const bool half = fabs(exact - code - .5) < 1e-3;
            if (finite && !(half && back[i] == decoded(&codes, code)))
                near_to(back[i], decoded(&codes, half ? code + 1 : rint(exact)), 0, "number %d, which was %g", i, x[i]);
            if (!finite && !isnan(back[i]))
                wrong("number %d is in a group that is not finite: expected NaN, found %g", i, back[i]);
        }
        all &= finite;
    }
    near_to(packed.finite, all, 0, "the result for %d numbers (1: all are finite)", packed.n);
}

// ---- 10: the tokens with the largest scores -------------------------------------------------------------------------

static Selection chosen;

/* In the first step pages lie in order, one sequence's behind the other's; then mixed. Scores differ, but for the second
 * step's. In the last there are cases with one far above the others: what is far below it must not overflow. */
static bool draw_select(void) {
    int at[LEN];
    ask(ASK_SELECTION, &chosen);
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

/* Tokens: the last, and the n - 1 largest before it, of equal scores the earlier, so that fewer than n - 1 come before
 * each. Weights: of the tokens that were found, of all. In variants the first token is always chosen (1), or first and last
 * (3); of equal scores the later (1, 2); weights are shares of the chosen tokens (2, 3). */
static void check_select(void) {
    for (int i = 0; i < SEQS * NH; i++) {
        const int r = i / NH, h = i % NH, len = chosen.len[r], n = sparse_tokens(chosen.sparsity, len);
        const float *score = chosen.score[r][h], *weights = chosen.weights[r][h];
        const int32_t *tokens = chosen.tokens[r][h];
        const bool later = variant == 1 || variant == 2, first = variant == 1 || (variant == 3 && n > 1),
                   last = variant != 1;
        int count = 0;
        in_case("sequence %d of %d tokens, head %d", r, len, h);
        for (int t = 0; t < len && step < 3; t++) {
            int before = 0;
            for (int u = first; u < len - last; u++)
                before += score[u] > score[t] || (score[u] == score[t] && (later ? u > t : u < t));
            if ((t == 0 && first) || (t == len - 1 && last) || before < n - first - last)
                near_to(tokens[count++], t, 0, "a token of %d that are chosen", n);
        }
        for (; count < MOST && step < 3; count++) near_to(tokens[count], -1, 0, "what is behind them");
        for (int j = 0; j < n && step == 3; j++) {
            double over = 0; /* what all weigh together, over this one */
            if (tokens[j] < 0 || tokens[j] >= len) return wrong("token %d is not one of its", tokens[j]);
            for (int t = 0; t < len; t++) {
                bool counts = variant < 2;
                for (int e = 0; e < n; e++) counts |= tokens[e] == t;
                if (counts) over += exp(score[t] - score[tokens[j]]);
            }
            near_to(weights[j], 1 / over, 1e-5 / over + 1e-30, "the weight of token %d", tokens[j]);
        }
    }
}

// ---- 11: a pipeline, by the formulas of the first comment of cost/search.c ------------------------------------------
//

static Pipeline pipeline;

/* One machine in the first and the last step, blocks in the last; the wire takes nearly nothing, or up to 4 squares. */
static bool draw_pace(void) {
    const bool one = step == 1 || step == 4;
    ask(ASK_PIPELINE, &pipeline);
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
    near_to(pipeline.prefill_s, prefill, 1e-6 * prefill, "prefill_s");
    near_to(pipeline.token_s, round[0], 1e-6 * round[0], "token_s");
    near_to(pipeline.T, all, 1e-6 * all, "T");
}

// ---- 12 and 18: kernels, on the GPU or in its emulation, against their twins on the host ----------------------------

enum { EACH = 8, MOST_THREADS = 256 };
static Kernel kernel;
static double halves_off; /* how far a number of x and y may be off */

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
    ask(ASK_KERNEL, &kernel);
    kernel.what = NORMALIZE, halves_off = 8e-3, kernel.onto = step > 1 && number % 2;
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
    return true;
}

/* Rows of a few columns, in the last two cases of more than a block has threads for; a row that is put into pages has a k
 * and a v of so many. */
static bool draw_gather(void) {
    const int few = number == 0 ? 64 : number % 2 ? 8 * draw(20, WIDE_ROW / 8) : 2 * draw(1, WIDE_ROW / 2);
    const int many = number % 2 ? 8 * draw(257, WIDEST / 8) : 2 * draw(1025, WIDEST / 2);
    const bool is_wide = number >= 6;
    Data *data = &kernel.before;
    ask(ASK_KERNEL, &kernel);
    kernel.what = step == 3 ? SCATTER : GATHER, halves_off = step == 2 ? 4e-3 : 0, kernel.onto = step == 2;
    kernel.rows = GATHERED;
    kernel.cols = is_wide ? many * (1 + (step == 3)) : few;
    fill(data->table, TABLE * kernel.cols, -4, 4);
    fill(data->act + MOST_NUMBERS, GATHERED * kernel.cols, -4, 4);
    memset(data->pair, 0x3c, sizeof data->pair);
    draw_order(data->pages, POOL), draw_order(data->pos, POOL);
    for (int r = 0; r < GATHERED; r++) data->idx[r] = draw(0, TABLE - 1), data->seq[r] = draw(0, SEQUENCES - 1);
    return true;
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
    run(kernel_op(&kernel, F32, act, act + MOST_NUMBERS, &twin));
    for (int e = 0; e < 2 * MOST_NUMBERS; e++) {
        const int second = e / MOST_NUMBERS, i = e % MOST_NUMBERS;
        near_to(f16_to_f32(found->act[e]), act[e], halves_off, "%c, row %d, column %d", "xy"[second], i / cols, i % cols);
        near_to(f16_to_f32(found->pair[e]), f16_to_f32(twin.pair[e]), 0, "element %d of the pages of %c", i, "kv"[second]);
    }
    if (kernel.most_work > 2 * share)
        wrong("a thread was expected to write %d numbers at most, found one that wrote %ld", share, (long)kernel.most_work);
}

// ---- 20: attention in mini.cu, in its own emulation -----------------------------------------------------------------
//
// Weights are known by construction, as in exercise 1: at one place of a head k of token u is sqrt(hd) log(a_u), and q has
// c there and 0 elsewhere. So token u weighs a_u^c.

static Tiles tiles;
static struct {
    int c;
    double base[MOST_TOKENS][MOST_HEADS]; /* a_u */
} made_tiles;

static float as_half(double x) { return f16_to_f32(f32_to_f16((float)x)); }

/* Texts of one tile at most; longer ones, whose scores rise or fall from token to token, or come as they like; then large
 * scores and heads of any width, and of a cache only some tokens' v, where the others are NaN. */
static bool draw_tiles(void) {
    ask(ASK_TILES, &tiles);
    const int edges[] = {1, TILE - 1, TILE, TILE + 1, 2 * TILE, 4 * TILE + 1};
    Tiles *a = &tiles;
    const int least = step == 2 ? TILE + 1 : 1, most = step == 1 ? TILE : MOST_TOKENS;
    const bool sparse = step == 3 && number % 3 == 0;
    a->sparse = sparse;
    a->rows = sparse ? 1 : draw(1, MOST_ROWS), a->nh = draw(1, MOST_HEADS),
    a->hd = step < 3 ? 8 * draw(1, 8) : draw(number % 2 ? TILE + 1 : 1, WIDE);
    int tokens = number < 6 ? edges[number] : draw(least, most);
    tokens = imin(imax(tokens, imax(least, a->rows)), most);
    a->first = tokens - a->rows + 1, a->halves = sparse || draw(0, 1);
    made_tiles.c = step == 3 && !sparse ? 60 : draw(1, 3);
    for (int h = 0; h < a->nh; h++) {
        const int place = draw(0, a->hd - 1), way = number % 3;
        for (int r = 0; r < a->rows; r++) tiles.q[(r * a->nh + h) * a->hd + place] = made_tiles.c;
        for (int t = 0; t < tokens; t++) {
            const double rank = way == 2 ? draw_real(0, 1) : (way ? tokens - 1. - t : t) / tokens;
            const float key = as_half(sqrt(a->hd) * log(1 + 8 * rank));
            const bool last = t == tokens - 1, kept = last || draw(0, 2) == 0;
            tiles.kept[h * tokens + t] = kept;
            made_tiles.base[t][h] = exp(key / sqrt(a->hd));
            for (int d = 0; d < a->hd; d++) {
                const int at = (t * a->nh + h) * a->hd + d;
                tiles.k[at] = d == place ? key : as_half(draw_real(-4, 4));
                tiles.v[at] = sparse && !kept ? NAN : as_half(draw_real(-4, 4));
            }
        }
    }
    return true;
}

static void check_tiles(void) {
    const Tiles *a = &tiles;
    const int all = a->rows * a->nh * a->hd, tokens = a->first + a->rows - 1;
    in_case("%d tokens, %d rows, %d heads of %d, scores up to %.0f%s", tokens, a->rows, a->nh, a->hd, made_tiles.c * log(9),
            a->sparse ? ", some left out" : "");
    for (int e = all; e < all + GUARD; e++)
        if (tiles.o[e] != UNTOUCHED) wrong("something behind o was written to");
    for (int e = 0; e < all; e++) {
        const int r = e / a->hd / a->nh, h = e / a->hd % a->nh, d = e % a->hd;
        double sum = 0, whole = 0;
        for (int t = 0; t < a->first + r; t++) {
            const double weight = pow(made_tiles.base[t][h] / 9, made_tiles.c);
            whole += weight;
            if (!a->sparse || tiles.kept[h * tokens + t]) sum += weight * tiles.v[(t * a->nh + h) * a->hd + d];
        }
        near_to(tiles.o[e], sum / whole, 2e-3, "o of row %d, head %d, element %d", r, h, d);
    }
    /* A thread has the k of a token of each tile, and a number of the v of all tokens, or several. Who computes scores more
     * than once, for their largest, their sum and v, reads k as often. */
    const int share = ceil_div(tokens, TILE) * a->hd + ceil_div(a->hd, TILE) * tokens;
    if (a->halves && tiles.most_work > 4 * share)
        wrong("a thread was expected to read about %d numbers, found one that read %ld", share, (long)tiles.most_work);
}

// ---- 13: in mini.c, beside the LPs above ----------------------------------------------------------------------------

static Pivot exchange;

static bool draw_pivot(void) {
    MiniTableau *p = &exchange.before;
    ask(ASK_PIVOT, &exchange);
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

static Posted posted;

/* Ops that read, write, or both, one byte or two. */
static bool draw_posted(void) {
    ask(ASK_ORDER, &posted);
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

enum { TRIED = 60 };
static Question question;

/* OPT-125M or 350M on a machine that does not hold it, and more prompts than the best block has. In the second step the
 * number of batches is given, or their size. */
static bool draw_question(void) {
    ask(ASK_SEARCH, &question);
    if (number && step != 2) return false;
    question.large = draw(0, 1);
    question.s = draw(64, 256), question.n = draw(8, 32);
    question.fixed_batches = step == 2 && number, question.fixed_gbs = step == 2 && !number;
    question.gpu = draw_real(3e8, 9e8);
    question.cpu = draw_real(2e9, 4e9);
    question.num_gpu_batches = draw(1, 5);
    question.gbs = draw(1, 9);
    question.frontier = step == 3;
    return true;
}

/* Computes what a policy of the answer costs. Returns false, and says so, if it is none, or does not fit. */
static bool costs(Found *found, const Search *s, const Choice *c) {
    Search one = *s;
    bool good = c->gbs > 0 && c->gbs <= ASKED && c->num_gpu_batches > 0 && c->num_gpu_batches <= 1024;
    good &= c->table_home >= 0 && c->table_home < NTIERS && c->piece_rows >= 0 && c->piece_rows <= 1 << 20;
    good &= c->schedule >= 0 && c->schedule <= SCHEDULE_DIAGONAL;
    good &= c->workspaces == 0 || (c->workspaces >= LEAST_WORKSPACES && c->workspaces <= WORKSPACES);
    for (int f = 0; f < 6; f++) good &= c->share[f] >= 0 && c->share[f] + (f % 2 ? c->share[f - 1] : 0) <= 1 + 1e-9;
    if (!good) return wrong("one of the policies that were found is none"), false;
    one.given = placed(c->share, c->gbs, c->num_gpu_batches);
    one.given.delegated = c->delegated != 0, one.given.table_home = c->table_home;
    one.given.schedule = c->schedule, one.given.piece_rows = c->piece_rows, one.given.workspaces = c->workspaces;
    if (!policy_predict(found, &one, &err)) return true;
    return wrong("one of the policies that were found does not fit"), false;
}

/* A larger block pays one percent for each doubling: see score() in cost/search.c. From each policy of the frontier to the
 * next latency and throughput rise, up to the best; of all that are as quick as one that is tried, it has one that is about
 * as good. */
static void check_found(void) {
    static Found frontier[MOST_FOUND];
    const OptConfig config = search_config(&question);
    Task task = equal_task(ASKED, question.s, question.n);
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Hardware machine;
    Found best;
    ASSERT_OK(hardware_read(&machine, "hardware/t4.json", &err));
    const Search s = search_of(&question, &machine, model, &task);
    const int n = step == 3 ? question.nfrontier : 0;
    bool good = question.nbest == 1 && n <= MOST_FOUND && (step < 3 || n >= 2);
    if (!good) wrong("%d policies were found, %d of a frontier", question.nbest, n);
    good = good && costs(&best, &s, &question.best);
    for (int i = 0; i < n && good; i++) good = costs(&frontier[i], &s, &question.found[i]);
    const double throughput = good ? best.cost.throughput : 0;
    if (good && s.fixed_gbs) near_to(question.best.gbs, question.gbs, 0, "gbs, which was given");
    if (good && s.fixed_batches)
        near_to(question.best.num_gpu_batches, question.num_gpu_batches, 0, "num_gpu_batches, which was given");
    for (int i = 1; i < n && good; i++)
        if (!(frontier[i].latency >= frontier[i - 1].latency &&
              frontier[i].cost.throughput > frontier[i - 1].cost.throughput))
            wrong("policies %d and %d of the frontier do not rise in latency and throughput", i - 1, i);
    if (good && n && frontier[n - 1].cost.throughput < throughput * (1 - 1e-9))
        wrong("the search finds %.4g token/s, which is above the end of the frontier", throughput);
    for (int i = 0; i < TRIED && good; i++) {
        const double wg = i % 4 * .2, cg = i / 4 % 3 * .5, hg = i % 2;
        double most = step == 3 ? 0 : throughput;
        Search one = s;
        Found other;
        one.given = on_tiers(wg, 1 - wg, cg, 1 - cg, hg, 1 - hg, s.fixed_gbs ? question.gbs : 1 << draw(0, 4),
                             s.fixed_batches ? question.num_gpu_batches : 1 << draw(0, 3));
        one.given.delegated = draw(0, 1), one.given.table_home = TIER_CPU, one.given.workspaces = WORKSPACES;
        if (block_size(&one.given) > ASKED || policy_predict(&other, &one, &err)) continue; /* it does not fit */
        for (int j = 0; j < n; j++)
            if (frontier[j].latency <= 1.25 * other.latency) most = fmax(most, frontier[j].cost.throughput);
        good = most >= (step == 3 ? .75 : .93) * other.cost.throughput;
        if (!good)
            wrong("%d batches of %d make %.4g token/s in %.4g s, what was found %.4g", other.policy.num_gpu_batches,
                  other.policy.gbs, other.cost.throughput, other.latency, most);
    }
    free_task(&task), checkpoint_close(model);
}

// ---- 17 and 19: on the sim, which counts bytes and seconds ----------------------------------------------------------

static Count counting;

/* Row and zig-zag; in the last step the diagonal. */
static bool draw_counting(void) {
    const OptConfig config = short_opt(draw(1, 3));
    Count *c = &counting;
    ask(ASK_COUNT, c);
    c->schedule = step == 3 ? SCHEDULE_DIAGONAL : number % 2 ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
    c->l = config.l;
    c->h1 = config.h1;
    c->head_bytes = 2. * config.vocab * config.h1;
    c->layer_bytes = ((double)streamed_bytes(&config) - c->head_bytes) / config.l;
    c->gbs = draw(1, 3);
    c->K = draw(1, 4);
    c->s = draw(1, 20);
    c->n = draw(c->K, 3 * c->K + 1);
    c->count = c->gbs * c->K * draw(1, 3);
    return true;
}

static void check_count(void) {
    const Count *c = &counting;
    const Hardware machine = machine_with("");
    const OptConfig config = short_opt(c->l);
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Task task = equal_task(c->count, c->s, c->n);
    const Policy policy = on_cpu(c->schedule, c->gbs, c->K);
    Rig real = rig_ran(model, &policy, &task, &machine);
    in_case("%s, %d prompts, l = %d, s = %d, n = %d, %d batches of %d", schedule_name[c->schedule], c->count, c->l, c->s,
            c->n, c->K, c->gbs);
    const Bytes *in = real.moved[CTOG], *out = real.moved[GTOC];
    if (step == 2) {
        near_to(c->cache, in[CACHE] + out[CACHE], .5, "bytes of cache");
        near_to(c->activations, in[ACTIVATION] + out[ACTIVATION], .5, "bytes of activations");
    } else {
        near_to(c->sweeps, real.stats.sweeps, 0, "sweeps");
        near_to(c->weights, in[WEIGHT], .5, "bytes of weights");
    }
    rig_close(&real), free_task(&task), checkpoint_close(model);
}

/* A fourth schedule in the place of the diagonal, and another: zig-zag in the second step, else the diagonal. */
enum { RACES = 8 };
static Race both;

/* Prompts of all lengths, once in batches of more than two; but for the first step equal ones. Half of the batches have two
 * prompts: where they have one, a good schedule may be the diagonal. */
static bool draw_race(void) {
    ask(ASK_RACE, &both);
    both.gbs = step == 1 && !number ? 3 : 1 + number % 2, both.K = draw(3, 6);
    const int s = draw(4, 30), n = both.K * draw(3, 5);
    for (int p = 0; p < RACING; p++) both.s[p] = step > 1 ? s : draw(4, 30), both.n[p] = step > 1 ? n : draw(2, 2 * n);
    return true;
}

static int (*diagonal)(const Admission *); /* seats_for[SCHEDULE_DIAGONAL], where `repeat` stands meanwhile */
static int repeated;                       /* calls of this case */
static bool is_old[3]; /* in all calls of this case the fourth schedule is row [0], zig-zag [1], the diagonal [2] */
static bool is_own;    /* in some case of the step it is none of these */

/* Returns how many of the waiting prompts get seats if so many may. */
static int entering(const Admission *a, int seats) {
    return imax(0, imin(seats, imin(a->nseats - a->seated, a->task->count - *a->next_prompt)));
}

/* Says what the fourth schedule said, call by call. */
static int repeat(const Admission *a) {
    const int said = repeated < both.calls && repeated < MOST_CALLS ? both.said[repeated] : 0;
    const int seats = entering(a, said);
    repeated++;
    is_old[0] &= seats == entering(a, a->seated ? 0 : both.gbs);
    is_old[1] &= seats == entering(a, seats_for[SCHEDULE_ZIGZAG](a));
    is_old[2] &= seats == entering(a, diagonal(a));
    return seats;
}

/* Whatever the lengths, no more sweeps are needed than by doing one prompt after the other. Of equal prompts it holds fewer
 * pages than zig-zag in the same block: they are not all long at the same time. For each page it has as many tokens a
 * second as the diagonal, to within 5 percent, as the mean of all cases. And it is not in each case one of the three
 * schedules that there are. */
static void check_race(void) {
    static double log_ratios;
    const OptConfig config = short_opt(2);
    Prompt prompts[RACING];
    const Task task = {.prompts = prompts, .count = RACING};
    const Hardware machine = race_machine(prompts, &both);
    Checkpoint *model = checkpoint_dummy(&config, 1);
    Rig rig[2];      /* of the fourth, and of the other */
    double speed[2]; /* token/s a page */
    long tokens = 0;
    int ended = 0;
    for (int i = 0; i < 2; i++) {
        const Schedule schedule = i && step == 2 ? SCHEDULE_ZIGZAG : SCHEDULE_DIAGONAL;
        rig[i] = (Rig){.model = model, .policy = on_cpu(schedule, both.gbs, both.K), .task = &task, .sim = &machine};
        if (!i) diagonal = seats_for[SCHEDULE_DIAGONAL], seats_for[SCHEDULE_DIAGONAL] = repeat, repeated = 0;
        if (!i) is_old[0] = is_old[1] = is_old[2] = true, is_own &= number > 0;
        const int status = rig_run(&rig[i]);
        if (!i) seats_for[SCHEDULE_DIAGONAL] = diagonal;
        if (status) return wrong("the run failed: %s", rig[i].err.text);
        speed[i] = rig[i].stats.generated / rig[i].seconds / rig[i].pages;
    }
    const int s = both.s[0], n = both.n[0], pages = rig[0].pages, others = rig[1].pages;
    const double staggered = ceil((s + n / 2. + n / (2. * both.K)) / (s + n) * others);
    in_case("s = %d, n = %d, %d batches of %d", s, n, both.K, both.gbs);
    near_to(both.calls, repeated, 0, "how often the schedule is asked");
    for (int p = 0; p < RACING; p++)
        tokens += both.n[p], ended += rig[0].answer[p].done == 1 && rig[0].answer[p].n == both.n[p];
    if (step < 3) near_to(ended, RACING, 0, "prompts that got all of their tokens");
    if (step == 1 && rig[0].stats.sweeps > tokens / both.gbs * 2)
        wrong("%ld sweeps for %ld tokens", (long)rig[0].stats.sweeps, tokens);
    if (step == 2 && (pages <= 0 || pages > staggered + both.gbs * both.K))
        wrong("%g pages were expected at most, found %d; zig-zag has %d", staggered, pages, others);
    log_ratios = log(speed[0] / speed[1]) + (number ? log_ratios : 0);
    if (step == 3 && number == RACES - 1 && !(log_ratios / RACES >= log(.95)))
        wrong("token/s a page: expected .95 of the diagonal's, found %.3g", exp(log_ratios / RACES));
    is_own |= !is_old[0] && !is_old[1] && !is_old[2];
    if (number == RACES - 1 && !is_own) wrong("in every case this is row, zig-zag or the diagonal");
    for (int i = 0; i < 2; i++) rig_close(&rig[i]);
    checkpoint_close(model);
}

// ---- the exercises --------------------------------------------------------------------------------------------------

// clang-format off
#define ENGINE "exam_engine"
#define LP "exam_lp"
#define MINI_C "exam_mini"
#define KERNELS "emulated/exam_kernels"
#define MINI_CU "emulated/exam_tiles"
const Exercise exercises[] = {
    {ENGINE, {"a token alone attends to itself", "no token sees the ones behind it",
              "all weights are right, and the logits Hugging Face's"}, 12, draw_attention, check_attention},
    {ENGINE, {"the first sweep has one GPU batch", "a GPU batch enters every n/K sweeps",
              "whoever stops early is replaced at once"}, 40, draw_seats, check_seats},
    {ENGINE, {"without a limit, and up to it, all enter", "a prompt waits for the pages of its prefill",
              "a prompt enters when its pages fit in every sweep"}, 40, draw_pages, check_pages},
    {ENGINE, {"equal items meet the shares exactly", "items of any size meet the shares to within one",
              "the weights of OPT-30B meet every placement", "a tier without a share gets nothing"},
     60, draw_deal, check_deal},
    {ENGINE, {"with everything on the GPU the logits are right", "the weights may stream",
              "cache and activations may rest anywhere", "the CPU attends to a cache on the CPU",
              "GPU and CPU attend to their parts of a batch", "the CPU attends to a cache on disk"},
     BLOCKS * COUNT(placements), draw_run, check_run},
    {ENGINE, {"the rows of the link between CPU and GPU", "the rows of the disk", "the row of the processors"},
     10, draw_rows, check_rows},
    {LP, {"a textbook's programs are solved", "both phases end with the right verdict", "the known cycles end"},
     30, draw_program, check_program},
    {LP, {"the rules by themselves"}, 30, draw_rules, check_rules},
    {MINI_C, {"mini.c: a textbook's programs are minimized", "mini.c: the known cycles end, and A.3 has its optimum"},
     30, draw_mini_program, check_mini_program},
    {ENGINE, {"equal numbers, and those of a grid", "any numbers, in groups that are not full",
              "the ends of F16 and numbers that are not finite"}, 48, draw_pack, check_pack},
    {ENGINE, {"the right tokens are chosen", "of equal scores the right ones are chosen", "the weights of the chosen are right"}, 16, draw_select, check_select},
    {ENGINE, {"one machine takes its sweeps", "machines fill and run", "a slow wire holds them up",
              "later blocks take their rounds"}, 20, draw_pace, check_pace},
    {KERNELS, {"a row is normalized", "rows of all widths, in place too", "a large mean does not blur the variance"},
     6, draw_norm, check_kernel},
    {KERNELS, {"rows are gathered", "rows are added", "rows are put into pages"}, 8, draw_gather, check_kernel},
    {MINI_CU, {"mini.cu: texts of a block of tokens", "mini.cu: longer texts", "mini.cu: large scores, tokens left out"},
     18, draw_tiles, check_tiles},
    {MINI_C, {"mini.c: a pivot exchanges two variables"}, 20, draw_pivot, check_pivot},
    {MINI_C, {"mini.c: a batch alone on the GPU gets the right tokens", "mini.c: cache and activations may rest anywhere",
              "mini.c: the weights may stream"}, BLOCKS * COUNT(placements), draw_mini, check_mini},
    {ENGINE, {"a reader waits for the writer", "a writer waits for all who use it", "whatever may overlap does"},
     24, draw_posted, check_order},
    {ENGINE, {"no block that was tried is better", "what is given stays", "the frontier is not below what was tried"},
     2, draw_question, check_found},
    {ENGINE, {"row and zig-zag load so many weights", "cache and activations are counted", "the diagonal loads fewer"},
     12, draw_counting, check_count},
    {ENGINE, {"a fourth schedule serves everyone", "a fourth schedule staggers its sequences",
              "a fourth schedule is as good as the diagonal"}, RACES, draw_race, check_race},
    {.steps = {NULL}},
};
// clang-format on
