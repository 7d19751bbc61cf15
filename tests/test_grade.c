/* test_grade.c: the steps by which `make grade EX=N` grades the exercises of docs/EXERCISES.md. They give no solution away:
 * what they expect was found by hand, is a property, or is what Hugging Face computed. Cases are drawn from the seed of the
 * run, and what is graded runs in a process of its own (answers.h). The points of each step, and what it expects in words,
 * are in scripts/exercises.txt. */
#include "answers.h"
#include "golden.h"
#include "lessons.h"
#include "lp_parts.h"
#include "mini_parts.h"
#include "ops.h"

static Error err;

// ---------------------------------------------------------------------------------------------------------------
// 1: plain attention, by itself and through the forward pass
//
// Weights are known by construction: head h of k of token u is sqrt(hd) log(a_u) / |e|^2 times a direction e, and something
// perpendicular to it; that of q of token t is c_t e. So their product over sqrt(hd) is c_t log(a_u), and token u weighs
// a_u^c_t.
// ---------------------------------------------------------------------------------------------------------------

enum { ATT_CASES = 12, ATT_N = 12, ATT_H1 = 24, GUARD = 7 };
typedef struct {
    int n, nh, hd, changed;
    float q[ATT_N * ATT_H1], k[ATT_N * ATT_H1], v[ATT_N * ATT_H1];
    double a[ATT_N][ATT_H1], c[ATT_N]; /* a: by token and head */
} AttentionCase;
static AttentionCase att[ATT_CASES];
typedef struct {
    float o[2][ATT_CASES][ATT_N * ATT_H1 + GUARD]; /* [1]: with another token `changed` */
    bool inputs_changed;
} Attended;
static const float UNTOUCHED = 12345;

/* perpendicular: what is added to log(a) e to make k. */
static void draw_attention(AttentionCase *s, int n, double most_c) {
    s->n = n, s->nh = draw(2, 4), s->hd = draw(2, 6), s->changed = n > 1 ? draw(1, n - 1) : 0;
    const int h1 = s->nh * s->hd;
    for (int i = 0; i < n * h1; i++) s->v[i] = (float)draw_real(-4, 4);
    for (int t = 0; t < n; t++) s->c[t] = draw_real(0, most_c);
    for (int h = 0; h < s->nh; h++) {
        double e[8], length = 0;
        for (int d = 0; d < s->hd; d++) e[d] = draw_real(.5, 2) * (draw(0, 1) ? 1 : -1), length += e[d] * e[d];
        for (int t = 0; t < n; t++) {
            double other[8], along = 0;
            s->a[t][h] = draw(1, 9);
            for (int d = 0; d < s->hd; d++) other[d] = draw_real(-2, 2), along += other[d] * e[d] / length;
            for (int d = 0; d < s->hd; d++) {
                s->q[t * h1 + h * s->hd + d] = (float)(s->c[t] * e[d]);
                s->k[t * h1 + h * s->hd + d] = (float)((sqrt(s->hd) * log(s->a[t][h]) / length - along) * e[d] + other[d]);
            }
        }
    }
}

static void attend_each(void *answer, const void *about) {
    Attended *to = answer;
    (void)about;
    for (int i = 0; i < ATT_CASES; i++)
        for (int other = 0; other < 2; other++) {
            AttentionCase *s = xcalloc(1, sizeof *s), *before = xcalloc(1, sizeof *s);
            *s = att[i];
            const int h1 = s->nh * s->hd;
            const OptConfig config = {.h1 = h1, .nh = s->nh};
            for (int d = 0; d < h1 && other; d++) {
                const int at = s->changed * h1 + d;
                s->q[at] = 1 - s->q[at], s->k[at] = 2 - s->k[at], s->v[at] = 9 - s->v[at];
            }
            *before = *s;
            for (int j = 0; j < ATT_N * ATT_H1 + GUARD; j++) to->o[other][i][j] = UNTOUCHED;
            plain_attention(to->o[other][i], s->q, s->k, s->v, s->n, &config);
            if (memcmp(s, before, sizeof *s)) to->inputs_changed = true;
        }
}

static const Attended *attended(const char *step, int least_n, int most_n, double most_c) {
    draw_for(step);
    for (int i = 0; i < ATT_CASES; i++) draw_attention(&att[i], draw(least_n, most_n), i % 2 ? most_c : 2);
    const Attended *found = ASK(Attended, attend_each, NULL);
    if (!found) return NULL;
    if (found->inputs_changed) wrong("q, k or v were written to");
    for (int i = 0; i < ATT_CASES; i++)
        for (int g = 0; g < GUARD; g++)
            if (found->o[0][i][att[i].n * att[i].nh * att[i].hd + g] != UNTOUCHED)
                wrong("something behind o was written to");
    return found;
}

static void attention_1_alone(void) {
    const Attended *found = attended("attention 1", 1, 1, 3);
    for (int i = 0; found && i < ATT_CASES; i++)
        for (int d = 0; d < att[i].nh * att[i].hd; d++)
            near_to(found->o[0][i][d], att[i].v[d], 1e-6, "one token, %d heads of %d: o of head %d, element %d, which is v",
                    att[i].nh, att[i].hd, d / att[i].hd, d % att[i].hd);
}

static void attention_2_causal(void) {
    const Attended *found = attended("attention 2", 4, ATT_N, 2);
    for (int i = 0; found && i < ATT_CASES; i++)
        for (int t = 0; t < att[i].n; t++) {
            const int h1 = att[i].nh * att[i].hd;
            const float *a = found->o[0][i] + t * h1, *b = found->o[1][i] + t * h1;
            const bool same = !memcmp(a, b, h1 * sizeof *a);
            if (t < att[i].changed && !same)
                wrong("token %d of %d sees token %d, which is behind it", t, att[i].n, att[i].changed);
            if (t >= att[i].changed && (same || !(max_norm_error(a, b, h1) > 1e-4)))
                wrong("token %d of %d does not see token %d", t, att[i].n, att[i].changed);
        }
}

/* The logits of all golden sequences by the forward pass, one after the other. */
static Golden golden;
static const char *golden_dir;
static void forward_golden(void *answer, const void *about) {
    float *to = answer;
    Checkpoint *checkpoint = checkpoint_open(golden_dir, &err);
    (void)about;
    MUST(checkpoint);
    for (int i = 0; i < golden.count; i++) {
        const GoldenSequence *s = &golden.sequence[i];
        MUST(reference_forward(to, checkpoint, s->ids, s->n, &err) == 0);
        to += (size_t)s->n * golden.vocab;
    }
}

/* As in test_opt_model.c: K and V rounded to F16 cost up to 8e-4, what is wrong costs over 1e-2. */
static void assert_golden(const char *dir) {
    size_t floats = 0;
    golden_dir = dir, golden = golden_read(dir);
    for (int i = 0; i < golden.count; i++) floats += (size_t)golden.sequence[i].n * golden.vocab;
    const float *found = ask(floats * sizeof *found, forward_golden, NULL);
    for (int i = 0; found && i < golden.count; i++) {
        const GoldenSequence *s = &golden.sequence[i];
        const float *from = found + (size_t)(s->n - s->rows) * golden.vocab; /* of whose rows logits are known */
        if (!(max_norm_error(from, s->logits, (size_t)s->rows * golden.vocab) <= 2e-3))
            wrong("logits of prompt %d (%d tokens) of %s: token %d's first is expected to be %g, found %g", i, s->n, dir,
                  s->n - 1, s->logits[(size_t)(s->rows - 1) * golden.vocab], from[(size_t)(s->rows - 1) * golden.vocab]);
        found += (size_t)s->n * golden.vocab;
    }
    golden_free(&golden);
}

/* Scores are up to 130, too much for expf. In float the sum that they are is of terms of up to 1000, and so right to 4e-4.
 */
static void attention_3_all(void) {
    const Attended *found = attended("attention 3", 2, ATT_N, 60);
    for (int i = 0; found && i < ATT_CASES; i++) {
        const AttentionCase *s = &att[i];
        for (int t = 0; t < s->n; t++)
            for (int c = 0; c < s->nh * s->hd; c++) {
                double all = 0, expected = 0;
                for (int u = 0; u <= t; u++) {
                    const double weight = pow(s->a[u][c / s->hd], s->c[t]);
                    all += weight, expected += weight * s->v[u * s->nh * s->hd + c];
                }
                near_to(found->o[0][i][t * s->nh * s->hd + c], expected / all, 4e-3,
                        "token %d of %d, head %d of %d, element %d", t, s->n, c / s->hd, s->nh, c % s->hd);
            }
    }
    assert_golden("tests/golden/opt-pre"), assert_golden("tests/golden/opt-post");
}

// ---------------------------------------------------------------------------------------------------------------
// 2 and 3: who may be seated
// ---------------------------------------------------------------------------------------------------------------

/* A line of prompts under a schedule. */
enum { LINE = 64, SWEEPS = 40, LINES = 40 };
typedef struct {
    Prompt prompts[LINE];
    Schedule schedule;
    int count, gbs, K, sweeps;
    int stops, stops_at;            /* the seat that stops early before that sweep; -1: none */
    int page_tokens, limit[NTIERS]; /* limit[0] < 0: none */
} Line;
static Line lines[LINES];
typedef struct {
    int may[SWEEPS], entered[SWEEPS]; /* before each sweep: what seats_for said, who entered */
} Entered;

static void enter_line(Entered *to, const Line *line) {
    Policy policy = all_gpu(line->gbs, line->K);
    Task task = {.prompts = (Prompt *)line->prompts, .count = line->count};
    Admission a;
    int next = 0, seats[LINE], topups;
    policy.schedule = line->schedule, policy.page_tokens = line->page_tokens;
    admission_open(&a, &policy, &task, &next, line->limit[0] < 0 ? NULL : line->limit);
    for (int i = 0; i < line->sweeps; i++) {
        for (int e = 0; e < a.nseats; e++) {
            const Seat *seat = &a.seat[e];
            if (seat->prompt < 0) continue;
            const int had = (int)(i - seat->since);
            if (had == line->prompts[seat->prompt].n || (i == line->stops_at && e == line->stops))
                admission_leave(&a, e, had);
        }
        a.sweep = i;
        to->may[i] = i ? imax(0, seats_for[SCHEDULE_DIAGONAL](&a)) : 0;
        to->entered[i] = admission_next(&a, i, seats, &topups);
    }
    admission_close(&a);
}

static void enter_lines(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < LINES; i++) enter_line((Entered *)answer + i, &lines[i]);
}

/* Equal prompts; with `few` there may be fewer than seats in the block. */
static void draw_line(Line *line, bool few) {
    *line = (Line){
        .schedule = SCHEDULE_DIAGONAL, .gbs = draw(1, 4), .K = draw(1, 5), .stops_at = -1, .page_tokens = 4, .limit = {-1}};
    const int n = draw(line->K, 3 * line->K), block = line->gbs * line->K;
    line->count = few && draw(0, 1) ? draw(1, block) : LINE;
    line->sweeps = imin(3 * n, SWEEPS);
    for (int i = 0; i < line->count; i++) line->prompts[i] = (Prompt){.s = 5, .n = n};
}

/* By Figure 6: batch b enters with the first sweep that is not before b n/K, and every n sweeps after that the next one
 * takes its seats. The last of a small task's batches may not be full. */
static void assert_line(const Line *line, const Entered *found, int sweeps) {
    int expected[SWEEPS] = {0}, waiting = line->count;
    const int seats = imin(line->gbs * line->K, line->count), K = (seats + line->gbs - 1) / line->gbs,
              n = line->prompts[0].n;
    for (int b = 0; b < K; b++)
        for (int i = (b * n + K - 1) / K; i < sweeps; i += n) expected[i] += imin(line->gbs, seats - b * line->gbs);
    for (int i = 0; i < sweeps; i++) {
        const int enter = imin(expected[i], waiting);
        waiting -= enter;
        if (found->entered[i] != enter || (i && waiting + enter > 0 && found->may[i] != expected[i]))
            return wrong(
                "sweep %d of prompts with n = %d, in a block of %d seats, batches of %d: %d may be seated, found %d", i, n,
                seats, line->gbs, expected[i], found->entered[i] != enter ? found->entered[i] : found->may[i]);
    }
}

static void diagonal_1_first_sweep(void) {
    draw_for("diagonal 1");
    for (int i = 0; i < LINES; i++) draw_line(&lines[i], true);
    const Entered *found = ask(LINES * sizeof *found, enter_lines, NULL);
    for (int i = 0; found && i < LINES; i++) assert_line(&lines[i], &found[i], 1);
}

static void diagonal_2_every_n_over_K(void) {
    draw_for("diagonal 2");
    for (int i = 0; i < LINES; i++) draw_line(&lines[i], true);
    const Entered *found = ask(LINES * sizeof *found, enter_lines, NULL);
    for (int i = 0; found && i < LINES; i++) assert_line(&lines[i], &found[i], lines[i].sweeps);
}

/* One stops when all seats are taken and nobody else is about to leave. */
static void diagonal_3_replaced_at_once(void) {
    draw_for("diagonal 3");
    for (int i = 0; i < LINES; i++) {
        Line *line = &lines[i];
        line->K = 0;
        while (line->K < 3 || line->prompts[0].n < 2 * line->K) draw_line(line, false); /* or some enter just then */
        line->gbs = imax(line->gbs, 2);
        const int n = line->prompts[0].n;
        line->stops_at = n - 1, line->stops = draw(0, line->gbs * line->K - 1);
    }
    const Entered *found = ask(LINES * sizeof *found, enter_lines, NULL);
    for (int i = 0; found && i < LINES; i++)
        if (found[i].may[lines[i].stops_at] != 1 || found[i].entered[lines[i].stops_at] != 1)
            wrong("all %d seats are taken and one sequence stops: 1 may be seated in sweep %d, found %d",
                  lines[i].gbs * lines[i].K, lines[i].stops_at, found[i].may[lines[i].stops_at]);
}

/* Pages that the first m hold in a sweep, if all of them entered sweep 0. */
static int held(const Line *line, int m, int sweep) {
    int pages = 0;
    for (int i = 0; i < m; i++)
        if (sweep < line->prompts[i].n) pages += (line->prompts[i].s + sweep + line->page_tokens - 1) / line->page_tokens;
    return pages;
}
static int most_held(const Line *line, int m) {
    int most = 0;
    for (int i = 0; i < SWEEPS; i++) most = imax(most, held(line, m, i));
    return most;
}

/* Of a batch with all prompts as many enter sweep 0 as always have their pages, and no more. */
static void assert_pages(void) {
    const Entered *found = ask(LINES * sizeof *found, enter_lines, NULL);
    for (int i = 0; found && i < LINES; i++) {
        const Line *line = &lines[i];
        int m = 0;
        while (m < line->count && (line->limit[0] < 0 || most_held(line, m + 1) <= line->limit[0])) m++;
        if (found[i].entered[0] == m) continue;
        wrong(
            "prompts of s = %d, n = %d, then s = %d, n = %d, and others; pages of %d tokens, limit %d (-1: none): the "
            "first %d "
            "may enter, which need at most %d, found %d, which need %d",
            line->prompts[0].s, line->prompts[0].n, line->prompts[1].s, line->prompts[1].n, line->page_tokens,
            line->limit[0], m, most_held(line, m), found[i].entered[0],
            most_held(line, imin(found[i].entered[0], line->count)));
    }
}

/* A batch of prompts of which at least one could enter alone. */
static void draw_pages(Line *line, bool equal, int least_n, int most_n) {
    *line = (Line){.count = draw(2, 8), .K = 1, .sweeps = 1, .stops_at = -1, .page_tokens = draw(2, 5), .limit = {-1}};
    line->gbs = line->count;
    for (int i = 0; i < line->count; i++)
        line->prompts[i] = i && equal ? line->prompts[0] : (Prompt){.s = draw(1, 16), .n = draw(least_n, most_n)};
}

static void pages_1_no_limit(void) {
    draw_for("pages 1");
    for (int i = 0; i < LINES; i++) {
        draw_pages(&lines[i], true, 1, 12);
        if (i % 3) lines[i].limit[0] = most_held(&lines[i], lines[i].count) + (i % 3 - 1) * draw(0, 9);
    }
    assert_pages();
}

static void pages_2_prompts(void) {
    draw_for("pages 2");
    for (int i = 0; i < LINES; i++) {
        draw_pages(&lines[i], true, 1, 1);
        lines[i].limit[0] = draw(0, most_held(&lines[i], lines[i].count));
    }
    assert_pages();
}

static void pages_3_growth(void) {
    draw_for("pages 3");
    for (int i = 0; i < LINES; i++) {
        draw_pages(&lines[i], false, 1, 16);
        lines[i].limit[0] = draw(most_held(&lines[i], 1), most_held(&lines[i], lines[i].count));
    }
    assert_pages();
}

// ---------------------------------------------------------------------------------------------------------------
// 4: error diffusion
// ---------------------------------------------------------------------------------------------------------------

enum { DEALS = 60, ITEMS = 60 };
typedef struct {
    double share[NTIERS], size[ITEMS];
} Deal;
static Deal deals[DEALS];
typedef struct {
    int tier[ITEMS];
} Dealt;

static void deal_items(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < DEALS; i++) {
        Diffusion d = {.share = {deals[i].share[0], deals[i].share[1], deals[i].share[2]}};
        for (int j = 0; j < ITEMS; j++) ((Dealt *)answer)[i].tier[j] = (int)diffuse(&d, deals[i].size[j]);
    }
}
static const char *const tier_names[] = {"the GPU", "the CPU", "the disk"};

/* After each item every tier has its share of the bytes to within `within`, and one without a share has nothing. */
static void assert_deal(const Deal *deal, const Dealt *found, double within, int every) {
    double holds[NTIERS] = {0}, all = 0;
    for (int j = 0; j < ITEMS; j++) {
        if (found->tier[j] < 0 || found->tier[j] >= NTIERS) return wrong("item %d went to tier %d", j, found->tier[j]);
        all += deal->size[j], holds[found->tier[j]] += deal->size[j];
        for (int t = 0; t < NTIERS; t++) {
            if (deal->share[t] == 0 && holds[t] > 0)
                return wrong("shares %.4g %.4g %.4g: item %d of %g bytes went to %s, which has none", deal->share[0],
                             deal->share[1], deal->share[2], j, deal->size[j], tier_names[t]);
            if ((j + 1) % every == 0 && !(fabs(holds[t] - all * deal->share[t]) <= within))
                return wrong("shares %.4g %.4g %.4g: after %d items, %g bytes, %s has %g; %g was expected, to within %g",
                             deal->share[0], deal->share[1], deal->share[2], j + 1, all, tier_names[t], holds[t],
                             all * deal->share[t], within);
        }
    }
}

/* Shares of so many parts: each so many equal items are dealt exactly. */
static void diffusion_1_equal_items(void) {
    int parts[DEALS];
    draw_for("diffusion 1");
    for (int i = 0; i < DEALS; i++) {
        const int q = parts[i] = draw(2, 8), a = draw(0, q), b = draw(0, q - a);
        deals[i] = (Deal){.share = {(double)a / q, (double)b / q, (double)(q - a - b) / q}};
        for (int j = 0; j < ITEMS; j++) deals[i].size[j] = 1;
    }
    const Dealt *found = ask(DEALS * sizeof *found, deal_items, NULL);
    for (int i = 0; found && i < DEALS; i++) assert_deal(&deals[i], &found[i], 1e-9, parts[i]);
}

/* Items of 1 to 100 bytes. A tier is due at most 5/6 of the largest item: what is due sums to nothing, and nobody who was
 * furthest behind is more than 2/3 of an item ahead. */
static void diffusion_2_any_sizes(void) {
    draw_for("diffusion 2");
    for (int i = 0; i < DEALS; i++) {
        const double g = draw_real(0, 1), c = draw(0, 2) ? draw_real(0, 1 - g) : 1 - g;
        deals[i] = (Deal){.share = {g, c, c == 1 - g ? 0 : 1 - g - c}};
        for (int j = 0; j < ITEMS; j++) deals[i].size[j] = draw(1, 100);
    }
    const Dealt *found = ask(DEALS * sizeof *found, deal_items, NULL);
    for (int i = 0; found && i < DEALS; i++) assert_deal(&deals[i], &found[i], 100, 1);
}

/* Homes of the weights of OPT-30B, and items beside which rounding counts. */
enum { PLACED = 40, LAYERS = 48 };
typedef struct {
    int home[PLACED][LAYERS][NROLES];
} Placed;
static int split[PLACED][2];
static OptConfig opt_30b;

static void place_each(void *answer, const void *about) {
    Tier(*home)[NROLES] = xcalloc(opt_30b.l, sizeof *home);
    (void)about;
    for (int i = 0; i < PLACED; i++) {
        place_weights(home, &opt_30b, split[i][0] / 100., split[i][1] / 100.);
        for (int j = 0; j < opt_30b.l; j++)
            for (int r = 0; r < NROLES; r++) ((Placed *)answer)->home[i][j][r] = (int)home[j][r];
    }
}

static void assert_placed(const int home[LAYERS][NROLES], int g, int c) {
    const double largest = 2.0 * opt_30b.h1 * opt_30b.h2 + 2 * opt_30b.h2, share[NTIERS] = {g, c, 100 - g - c};
    double bytes[NTIERS] = {0}, all = 0;
    for (int j = 0; j < opt_30b.l; j++) {
        for (int r = 0; r < NROLES; r++) {
            int rows, cols;
            opt_role_shape(&opt_30b, (Role)r, &rows, &cols);
            all += 2.0 * rows * cols;
            if (home[j][r] >= 0 && home[j][r] < NTIERS) bytes[home[j][r]] += 2.0 * rows * cols;
        }
        for (int t = 0; t < NTIERS; t++)
            if (!near_to(bytes[t], all * share[t] / 100, largest, "bytes on %s after layer %d of OPT-30B, placed %d %d",
                         tier_names[t], j, g, c))
                return;
    }
}

static void diffusion_3_opt_30b(void) {
    draw_for("diffusion 3");
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&opt_30b, "opt-30b"), 0);
    CHECK(opt_30b.l == LAYERS);
    for (int i = 0; i < PLACED; i++) split[i][0] = draw(0, 100), split[i][1] = draw(0, 100 - split[i][0]);
    const Placed *placed = ASK(Placed, place_each, NULL);
    for (int i = 0; placed && i < PLACED; i++) assert_placed(placed->home[i], split[i][0], split[i][1]);
}

/* Equal items of which each so many are dealt exactly, but for what rounding leaves, which may be less than nothing for
 * both tiers with a share; then small ones, which are less than that. */
static void diffusion_4_nothing_is_nothing(void) {
    draw_for("diffusion 4");
    for (int i = 0; i < DEALS; i++) {
        const int none = i % NTIERS, q = draw(3, 7), part = draw(1, q - 1);
        double size = 0;
        deals[i] = (Deal){.share = {0}};
        deals[i].share[(none + 1) % NTIERS] = (double)part / q,
                                    deals[i].share[(none + 2) % NTIERS] = (double)(q - part) / q;
        for (int j = 0; j < ITEMS; j++) {
            if (j % (q + 2) == 0) size = draw_real(1e14, 1e15);
            deals[i].size[j] = j % (q + 2) < q ? size : draw_real(0, 1e-3);
        }
    }
    const Dealt *found = ask(DEALS * sizeof *found, deal_items, NULL);
    for (int i = 0; found && i < DEALS; i++) assert_deal(&deals[i], &found[i], INFINITY, 1);
}

// ---------------------------------------------------------------------------------------------------------------
// 5 and 6: the engine, against the plain forward
// ---------------------------------------------------------------------------------------------------------------

enum { PROMPTS = 5, TOKENS = 4, VOCAB = 131, LONGEST = 16, RUNS = 12 };
typedef struct {
    int32_t ids[RUNS][PROMPTS][TOKENS]; /* what was generated */
    float logits[RUNS][PROMPTS][TOKENS][VOCAB];
    int ended[RUNS];
} Generated;
static struct {
    int32_t given[PROMPTS][LONGEST];
    Prompt prompt[PROMPTS];
    uint64_t weights; /* the seed of the model's */
    Policy policy[RUNS];
    int n;
    const char *dir;
} runs;
static const OptConfig small = SMALL_CONFIG(-1);

typedef struct {
    Generated *to;
    int run;
} Saying;

static void on_logits(void *ctx, int prompt, int n, const float *logits) {
    const Saying *s = ctx;
    memcpy(s->to->logits[s->run][prompt][n - 1], logits, VOCAB * sizeof *logits);
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *why) {
    const Saying *s = ctx;
    (void)reason, (void)why;
    memcpy(s->to->ids[s->run][prompt], tokens, n * sizeof *tokens);
    s->to->ended[s->run] += n == TOKENS;
    return 0;
}

static void generate_each(void *answer, const void *about) {
    Checkpoint *model = checkpoint_dummy(&small, runs.weights);
    (void)about;
    for (int i = 0; i < runs.n; i++) {
        Task task = {.prompts = runs.prompt, .count = PROMPTS, .keep_logits = true};
        RunStats stats;
        Plan *plan = plan_make(model, &runs.policy[i], &task, F32, &err);
        MUST(plan);
        Device *device = device_open(NULL, plan, model, runs.dir, &err);
        MUST(device);
        MUST(weights_load(plan, model, device, &err) == 0);
        MUST(schedule_run(plan, &task, device,
                          &(Listener){.ctx = &(Saying){answer, i}, .done = on_done, .logits = on_logits}, &stats,
                          &err) == 0);
        device->close(device), plan_free(plan);
    }
}

static void draw_prompts(void) {
    runs.weights = draw_seed(), runs.n = 0;
    runs.dir = temp_dir();
    for (int i = 0; i < PROMPTS; i++) {
        runs.prompt[i] = (Prompt){.ids = runs.given[i], .s = draw(3, LONGEST), .n = TOKENS, .place = i};
        for (int t = 0; t < runs.prompt[i].s; t++) runs.given[i][t] = draw(3, VOCAB - 1);
    }
}

/* Each step's logits are those of the plain forward of what has been said so far. As in test_schedule.c: a difference in
 * the last bit can flip a rounding of K and V to F16. */
static void assert_prompt(const Checkpoint *model, const Generated *found, int run, int i) {
    const Policy *p = &runs.policy[run];
    const int s = runs.prompt[i].s;
    int32_t ids[LONGEST + TOKENS];
    float logits[LONGEST + TOKENS][VOCAB];
    memcpy(ids, runs.given[i], s * sizeof *ids), memcpy(ids + s, found->ids[run][i], TOKENS * sizeof *ids);
    for (int t = 0; t < TOKENS; t++)
        if (ids[s + t] < 0 || ids[s + t] >= VOCAB) return wrong("prompt %d: token %d is %d", i, t, ids[s + t]);
    ASSERT_OK(reference_forward(logits[0], model, ids, s + TOKENS - 1, &err));
    for (int t = 0; t < TOKENS; t++) {
        const float *got = found->logits[run][i][t], *expected = logits[s - 1 + t];
        int v = 0;
        if (max_norm_error(got, expected, VOCAB) <= 1e-2) continue;
        for (int u = 1; u < VOCAB; u++)
            if (!(fabsf(got[u] - expected[u]) <= fabsf(got[v] - expected[v]))) v = u;
        return wrong(
            "weights %.0f %.0f, cache %.0f %.0f, activations %.0f %.0f percent on GPU and CPU, %d batches of %d: prompt %d "
            "(s = %d), token i = %d, logit %d: expected %.6g, found %.6g",
            100 * p->wg, 100 * p->wc, 100 * p->cg, 100 * p->cc, 100 * p->hg, 100 * p->hc, p->num_gpu_batches, p->gbs, i, s,
            t, v, expected[v], got[v]);
    }
}

static void assert_generates(void) {
    const Generated *found = ASK(Generated, generate_each, NULL);
    Checkpoint *model = checkpoint_dummy(&small, runs.weights);
    for (int run = 0; found && run < runs.n; run++) {
        if (found->ended[run] != PROMPTS) wrong("%d of %d prompts got their tokens", found->ended[run], PROMPTS);
        for (int i = 0; i < PROMPTS; i++) assert_prompt(model, found, run, i);
    }
    checkpoint_close(model);
}

/* Of shares of 1: weights, cache and activations on the GPU and on the CPU. */
static Policy *run_with(int gbs, int K, double wg, double wc, double cg, double cc, double hg, double hc) {
    Policy *p = &runs.policy[runs.n++];
    CHECK(runs.n <= RUNS);
    *p = all_gpu(gbs, K);
    p->wg = wg, p->wc = wc, p->cg = cg, p->cc = cc, p->hg = hg, p->hc = hc, p->page_tokens = draw(2, 5);
    return p;
}

static void sweep_1_all_on_gpu(void) {
    draw_for("sweep 1"), draw_prompts();
    run_with(5, 1, 1, 0, 1, 0, 1, 0);
    run_with(draw(1, 2), 3, 1, 0, 1, 0, 1, 0);
    assert_generates();
}

static void sweep_2_weights_stream(void) {
    draw_for("sweep 2"), draw_prompts();
    run_with(5, 1, 0, 1, 1, 0, 1, 0);
    run_with(2, draw(2, 3), draw_real(.2, .4), draw_real(.2, .4), 1, 0, 1, 0);
    run_with(draw(2, 5), draw(1, 2), 0, 0, 1, 0, 1, 0);
    assert_generates();
}

/* The weights stay, so that this does not hang on the step before. */
static void sweep_3_all_move(void) {
    draw_for("sweep 3"), draw_prompts();
    for (int K = 1; K <= 3; K++) {
        run_with(2, K, 1, 0, 1, 0, 0, .5);
        run_with(2, K, 1, 0, 0, .5, 1, 0);
        run_with(2, K, 1, 0, draw_real(.2, .4), .3, .3, draw_real(.2, .4));
    }
    run_with(1, draw(1, 4), 1, 0, 0, draw(0, 1), 0, draw(0, 1));
    assert_generates();
}

static void run_delegating(int gbs, int K, double cg, double cc) { run_with(gbs, K, 1, 0, cg, cc, 1, 0)->delegated = true; }

static void delegation_1_cpu(void) {
    draw_for("delegation 1"), draw_prompts();
    run_delegating(5, 1, 0, 1);
    run_delegating(2, draw(2, 3), 0, 1);
    assert_generates();
}

static void delegation_2_gpu_and_cpu(void) {
    draw_for("delegation 2"), draw_prompts();
    run_delegating(5, 1, .4, .6);
    run_delegating(2, 3, .5, .5);
    run_delegating(draw(3, 4), 2, .4, .6);
    assert_generates();
}

static void delegation_3_disk(void) {
    draw_for("delegation 3"), draw_prompts();
    run_delegating(5, 1, 0, 0);
    run_delegating(5, 1, .2, .4);
    run_delegating(draw(3, 4), 2, .2, .4);
    assert_generates();
}

// ---------------------------------------------------------------------------------------------------------------
// 7: Appendix A.3 in generation, by hand
//
// h1 = 8, h2 = 32, s = 10, n = 6, bls = 2 x 3 = 6. A layer has 8 h1^2 + 4 h1 h2 = 1536 bytes of weights; a new token of
// each sequence has 2 h1 bls = 96 bytes of activations and 4 h1 bls = 192 of K and V, and attends to 4 bls (s + n/2) h1 =
// 2496. Cases are larger: all of h1 and h2, of s and n, of bls, and each rate by a factor of its own, by which the numbers
// grow as a unit does.
// ---------------------------------------------------------------------------------------------------------------

enum { CASES = 10 };
typedef struct {
    int size, length, block; /* factors: of h1, h2; of s, n; of bls */
    double rate[7];          /* factors: of the five rows' rates; of bmm_flops, cpu_flops */
    int gbs, K;
    Hardware machine;
    OptConfig config;
    Block paper;
} RowsCase;
static RowsCase rows_case[CASES];
typedef struct {
    Lp lp;
    char name[LP_MAX_ROWS][40]; /* of rows, whose own are in the child */
} NamedLp;

static void make_lps(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < CASES; i++) {
        NamedLp *to = (NamedLp *)answer + i;
        paper_lp(&to->lp, &rows_case[i].machine, &rows_case[i].config, &rows_case[i].paper);
        for (int r = 0; r < to->lp.m; r++) snprintf(to->name[r], sizeof to->name[r], "%s", to->lp.row[r].name);
    }
}

static void draw_rows_case(RowsCase *c) {
    static const double base[7] = {2, 4, 3, 6, 9, 8, 13};
    double *rates[7] = {c->machine.ctog_bdw, c->machine.gtoc_bdw,  c->machine.dtoc_bdw, c->machine.ctod_bdw,
                        c->machine.mm_flops, c->machine.bmm_flops, c->machine.cpu_flops};
    c->size = draw(1, 5), c->length = draw(1, 6), c->block = draw(1, 6);
    for (int i = 0; i < 7; i++) {
        c->rate[i] = draw_real(.2, 5);
        rates[i][0] = base[i] * c->rate[i], rates[i][1] = draw_real(100, 200);
    }
    c->config = (OptConfig){
        .l = draw(2, 9), .h1 = 8 * c->size, .h2 = 32 * c->size, .nh = 2, .embed = 8 * c->size, .vocab = 10, .max_pos = 200};
    c->paper = (Block){.s = 10 * c->length, .n = 6 * c->length, .gbs = 2 * c->block, .num_gpu_batches = 3};
    if (draw(0, 1)) c->paper.gbs = 3, c->paper.num_gpu_batches = 2 * c->block;
}

/* The row is a x - T_gen <= b. */
static void assert_row(const RowsCase *c, const NamedLp *found, const char *name, const double a[NFRACTIONS], double b) {
    const LpRow *row = NULL;
    for (int r = 0; r < found->lp.m; r++)
        if (!strcmp(found->name[r], name)) row = &found->lp.row[r];
    if (!row) return wrong("there is no row %s", name);
    for (int f = 0; f < NFRACTIONS; f++)
        near_to(row->a[f], a[f], 1e-9 * a[f], "row %s, letter %s (h1 %d, h2 %d, s %d, n %d, bls %d)", name,
                fraction_name[f], c->config.h1, c->config.h2, c->paper.s, c->paper.n,
                c->paper.gbs * c->paper.num_gpu_batches);
    near_to(row->b, b, 1e-9 * fabs(b), "row %s, right-hand side (h1 %d, bls %d)", name, c->config.h1,
            c->paper.gbs * c->paper.num_gpu_batches);
    if (row->a[T_PRE] != 0 || row->a[T_GEN] != -1 || row->equal)
        wrong("row %s: expected -1 of T_gen and 0 of T_pre, found %g and %g", name, row->a[T_GEN], row->a[T_PRE]);
}

/* Calls check for each case, with how much larger than by hand weights and activations are, and cache that is loaded. */
static void rows_of(const char *step, void (*check)(const RowsCase *, const NamedLp *, double, double, double)) {
    draw_for(step);
    for (int i = 0; i < CASES; i++) draw_rows_case(&rows_case[i]);
    const NamedLp *found = ask(CASES * sizeof *found, make_lps, NULL);
    for (int i = 0; found && i < CASES; i++) {
        const RowsCase *c = &rows_case[i];
        check(c, &found[i], c->size * c->size, c->size * c->block, c->size * c->block * c->length);
    }
}

static void check_gpu_link(const RowsCase *c, const NamedLp *found, double w, double h, double kv) {
    const double up = c->rate[0], down = c->rate[1];
    (void)kv;
    assert_row(c, found, "ctog^g",
               (double[NFRACTIONS]){[WC] = 768 * w / up, [WD] = 768 * w / up, [HC] = 48 * h / up, [HD] = 48 * h / up}, 0);
    assert_row(c, found, "gtoc^g", (double[NFRACTIONS]){[HC] = 24 * h / down, [HD] = 24 * h / down}, 0);
}
static void rows_1_gpu_link(void) { rows_of("rows 1", check_gpu_link); }

static void check_disk(const RowsCase *c, const NamedLp *found, double w, double h, double kv) {
    const double in = c->rate[2], out = c->rate[3];
    assert_row(c, found, "dtoc^g", (double[NFRACTIONS]){[WD] = 512 * w / in, [CD] = 832 * kv / in, [HD] = 32 * h / in}, 0);
    assert_row(c, found, "ctod^g", (double[NFRACTIONS]){[CD] = 32 * h / out, [HD] = 16 * h / out}, 0);
}
static void rows_2_disk_link(void) { rows_of("rows 2", check_disk); }

/* Products take 6 x 1536 flops wherever; attention is the GPU's over cg, and the CPU's over the rest. */
static void check_compute(const RowsCase *c, const NamedLp *found, double w, double h, double kv) {
    const double gpu = c->rate[5], cpu = c->rate[6];
    (void)h;
    assert_row(c, found, "comp^g",
               (double[NFRACTIONS]){[CG] = 312 * kv / gpu, [CC] = 192 * kv / cpu, [CD] = 192 * kv / cpu},
               -1024 * w * c->block / c->rate[4]);
}
static void rows_3_compute(void) { rows_of("rows 3", check_compute); }

// ---------------------------------------------------------------------------------------------------------------
// 8 and 13: the simplex method
// ---------------------------------------------------------------------------------------------------------------

enum { LPS = 40 };
typedef struct {
    Lp lp;
    LpVerdict verdict;
    double value;
    char what[60];
} LpCase;
static LpCase lps[LPS];
static int nlps;
typedef struct {
    int verdict;
    double value;
} Solved;

static Lp *add_lp(int n, const double *c, LpVerdict verdict, double value, const char *what) {
    LpCase *to = &lps[nlps++];
    CHECK(nlps <= LPS);
    *to = (LpCase){.lp = {.n = n}, .verdict = verdict, .value = value};
    snprintf(to->what, sizeof to->what, "%s", what);
    if (c) memcpy(to->lp.c, c, n * sizeof *c);
    return &to->lp;
}

static void add_row(Lp *lp, bool equal, double b, const double *a) {
    memcpy(lp_row(lp, "row", equal, b)->a, a, lp->n * sizeof *a);
}
#define C(...) ((const double[]){__VA_ARGS__})

static void solve_each(void *answer, const void *about) {
    Solved *to = answer;
    (void)about;
    for (int i = 0; i < nlps; i++) {
        LpAnswer found;
        lp_solve(&found, &lps[i].lp);
        to[i] = (Solved){found.verdict, found.value};
    }
}

/* With mini.c's, of rows that the slacks satisfy. */
static void minimize_each(void *answer, const void *about) {
    Solved *to = answer;
    (void)about;
    for (int i = 0; i < nlps; i++) {
        const Lp *lp = &lps[i].lp;
        double a[LP_MAX_VARS * 8], b[8];
        CHECK(lp->m <= 8);
        for (int r = 0; r < lp->m; r++) b[r] = lp->row[r].b, memcpy(a + r * lp->n, lp->row[r].a, lp->n * sizeof *a);
        to[i].verdict = mini_minimize(&to[i].value, lp->c, a, b, lp->m, lp->n) ? LP_OPTIMAL : LP_UNBOUNDED;
    }
}

static void assert_solved(Work *work) {
    static const char *const verdict[] = {"optimal", "infeasible", "unbounded", "lost"};
    const Solved *found = ask(nlps * sizeof *found, work, NULL);
    for (int i = 0; found && i < nlps; i++) {
        const LpCase *c = &lps[i];
        if (found[i].verdict != (int)c->verdict)
            wrong("%s (%d rows, %d variables): expected %s, found %s", c->what, c->lp.m, c->lp.n, verdict[c->verdict],
                  found[i].verdict >= 0 && found[i].verdict < 4 ? verdict[found[i].verdict] : "nothing of these");
        else if (c->verdict == LP_OPTIMAL)
            near_to(found[i].value, c->value, 1e-8 * (1 + fabs(c->value)), "%s (%d rows, %d variables): the least cost",
                    c->what, c->lp.m, c->lp.n);
    }
}

/* Whose optimum is known, since it was made around one: x with a weight y for every row, such that a row that counts has
 * nothing to spare, and a variable that is not 0 costs nothing more than the rows give. equal: the first row is an
 * equation. signs: entries may be negative, and b. */
static void add_made(bool equal, bool signs) {
    const int n = draw(2, 5), m = draw(2, 6);
    double a[6][5], x[5], y[6], c[5], value = 0;
    for (int j = 0; j < n; j++) x[j] = draw(0, 1) ? draw(1, 6) : 0;
    for (int i = 0; i < m; i++) y[i] = draw(0, 1) ? draw(1, 5) : 0;
    if (equal) y[0] = draw(-4, 4);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) a[i][j] = signs ? draw(-5, 5) : draw(0, 5);
    for (int j = 0; j < n; j++) {
        c[j] = x[j] > 0 ? 0 : draw(0, 4);
        for (int i = 0; i < m; i++) c[j] -= a[i][j] * y[i];
        value += c[j] * x[j];
    }
    Lp *lp = add_lp(n, c, LP_OPTIMAL, value, equal ? "an LP with an equation" : "an LP that was drawn");
    for (int i = 0; i < m; i++) {
        double b = y[i] != 0 || (equal && !i) ? 0 : draw(0, 5);
        for (int j = 0; j < n; j++) b += a[i][j] * x[j];
        add_row(lp, equal && !i, b, a[i]);
    }
}

static void add_textbook(void) {
    Lp *lp = add_lp(2, C(-3, -5), LP_OPTIMAL, -36, "-3x - 5y"); /* x = 2, 6 */
    add_row(lp, false, 4, C(1, 0)), add_row(lp, false, 12, C(0, 2)), add_row(lp, false, 18, C(3, 2));
    lp = add_lp(3, C(-5, -4, -3), LP_OPTIMAL, -13, "-5x - 4y - 3z"); /* x = 2, 0, 1 */
    add_row(lp, false, 5, C(2, 3, 1)), add_row(lp, false, 11, C(4, 1, 2)), add_row(lp, false, 8, C(3, 4, 2));
}

/* x_0 may grow for ever, and that pays. */
static void add_unbounded(void) {
    Lp *lp = add_lp(2, C(-draw(1, 5), draw(0, 3)), LP_UNBOUNDED, 0, "a cost that falls without end");
    for (int i = draw(1, 3); i > 0; i--) add_row(lp, false, draw(0, 5), C(-draw(0, 4), draw(-4, 4)));
}

static void simplex_1_textbook(void) {
    draw_for("simplex 1"), nlps = 0;
    add_textbook();
    for (int i = 0; i < 20; i++) add_made(false, false);
    assert_solved(solve_each);
}

static void simplex_2_two_phases(void) {
    draw_for("simplex 2"), nlps = 0;
    Lp *lp = add_lp(2, C(1, 1), LP_OPTIMAL, 2.5, "x + 2y = 4, x >= 1"); /* x = 1, 1.5 */
    add_row(lp, true, 4, C(1, 2)), add_row(lp, false, -1, C(-1, 0));
    lp = add_lp(2, C(-1, 0), LP_OPTIMAL, 0, "-x - y = 0, x <= 5"); /* phase 1 leaves an artificial in the basis, at 0 */
    add_row(lp, true, 0, C(-1, -1)), add_row(lp, false, 5, C(1, 0));
    for (int i = 0; i < 4; i++) {
        const double b = draw(1, 9); /* x <= b, x >= b + 1 or more */
        lp = add_lp(1, C(draw(-2, 2)), LP_INFEASIBLE, 0, "two rows that contradict each other");
        add_row(lp, false, b, C(1)), add_row(lp, false, -b - draw(1, 5), C(-1));
        add_unbounded();
    }
    for (int i = 0; i < 20; i++) add_made(i % 2, true);
    assert_solved(solve_each);
}

/* As given, and with its cost, and one row, by other factors. */
static void add_cycle(const char *what, int n, const double *c, double value, int m, double b[], const double a[][6]) {
    for (int again = 0; again < 2; again++) {
        const double factor = again ? ldexp(1, draw(-2, 3)) : 1;
        double cost[6];
        for (int j = 0; j < n; j++) cost[j] = c[j] * factor;
        Lp *lp = add_lp(n, cost, LP_OPTIMAL, value * factor, what);
        for (int i = 0; i < m; i++) {
            double row[6];
            for (int j = 0; j < n; j++) row[j] = a[i][j] * (again && i == m - 1 ? factor : 1);
            add_row(lp, false, b[i] * (again && i == m - 1 ? factor : 1), row);
        }
    }
}

/* The literature's; and as in test_lp.c some in which the rule for columns is Bland's, and ties between rows matter. */
static void add_cycles(void) {
    add_cycle("Beale's cycle", 4, C(-.75, 20, -.5, 6), -1.25, 3, (double[]){0, 0, 1},
              (const double[][6]){{.25, -8, -1, 9}, {.5, -12, -.5, 3}, {0, 0, 1, 0}});
    add_cycle("Kuhn's cycle", 4, C(-2, -3, 1, 12), -2, 3, (double[]){0, 0, 2},
              (const double[][6]){{-2, -9, 1, 9}, {1 / 3., 1, -1 / 3., -2}, {2, 3, -1, -12}});
    add_cycle("Chvatal's cycle", 4, C(-10, 57, 9, 24), -1, 3, (double[]){0, 0, 1},
              (const double[][6]){{.5, -5.5, -2.5, 9}, {.5, -1.5, -.5, 1}, {1, 0, 0, 0}});
    add_cycle(
        "a cycle by ties of six variables", 6, C(-1, 1, 3, -4, 1, -3), -10 / 3., 4, (double[]){0, 0, 0, 1},
        (const double[][6]){{-1, -3, 2, 2, -3, -3}, {-2, 0, -4, -3, 3, -1}, {3, 1, 2, 4, -3, -2}, {1, 1, 1, 1, 1, 1}});
    add_cycle(
        "a cycle by ties of five variables", 5, C(3, 1, -2, -4, 6), 0, 5, (double[]){0, 0, 0, 0, 1},
        (const double[][6]){{1, -2, -2, 4, 9}, {3, 1, -8, -7, 3}, {1, -2, 5, 8, -2}, {0, 7, 8, -8, 0}, {1, 1, 1, 1, 1}});
}

/* A.3 for OPT-30B on the paper's machine: seconds for each of 144 sequences; 309.12 s a block. */
#define OPT_30B_SECONDS 2.14667022904

/* Tableaus of random numbers, and what the functions decided. */
enum { TABLEAUS = 30 };
static LpTableau tableaus[TABLEAUS];
typedef struct {
    int entering[TABLEAUS], leaving[TABLEAUS];
    bool fresh[TABLEAUS];
} Decided;

static void decide_each(void *answer, const void *about) {
    Decided *to = answer;
    (void)about;
    for (int i = 0; i < TABLEAUS; i++) {
        to->entering[i] = lp_part_entering(&tableaus[i]);
        to->leaving[i] = lp_part_leaving(&tableaus[i], tableaus[i].column);
        to->fresh[i] = lp_part_pivot_leaves_fresh(&tableaus[i]);
    }
}

/* Costs of which some are below 0, the first of them not the lowest; rows of which two tie. */
static void draw_tableau(LpTableau *t) {
    int order[LP_PART_M];
    *t = (LpTableau){.column = draw(0, LP_PART_N - 1)};
    for (int j = 0; j < LP_PART_N; j++) t->cost[j] = draw(0, 1) ? draw(0, 5) : -draw(1, 9);
    draw_order(order, LP_PART_M);
    for (int i = 0; i < LP_PART_M; i++) {
        t->basis[i] = LP_PART_N + order[i];
        t->entry[i] = draw(-2, 4), t->right[i] = draw(0, 3) * (double)abs((int)t->entry[i]);
    }
    t->entry[0] = draw(1, 4), t->right[0] = t->entry[0] * draw(0, 1);
}

static void assert_decided(void) {
    const Decided *found = ASK(Decided, decide_each, NULL);
    for (int i = 0; found && i < TABLEAUS; i++) {
        const LpTableau *t = &tableaus[i];
        int first = 0, row = 0;
        while (first < LP_PART_N && t->cost[first] >= 0) first++;
        if (first == LP_PART_N) first = -1;
        for (int r = 1; r < LP_PART_M; r++) {
            const double reach = t->entry[r] > 0 ? t->right[r] / t->entry[r] : INFINITY,
                         best = t->right[row] / t->entry[row];
            if (reach < best || (reach == best && t->basis[r] < t->basis[row])) row = r;
        }
        if (found->entering[i] != first)
            wrong("costs %g %g %g %g %g: column %d was expected to enter, found %d", t->cost[0], t->cost[1], t->cost[2],
                  t->cost[3], t->cost[4], first, found->entering[i]);
        if (found->leaving[i] != row)
            wrong(
                "entries %g %g %g %g, right-hand sides %g %g %g %g, basic variables %d %d %d %d: row %d was expected to "
                "leave, "
                "found %d",
                t->entry[0], t->entry[1], t->entry[2], t->entry[3], t->right[0], t->right[1], t->right[2], t->right[3],
                t->basis[0], t->basis[1], t->basis[2], t->basis[3], row, found->leaving[i]);
        if (found->fresh[i]) wrong("after a pivot the tableau is still said to be fresh");
    }
}

static void simplex_3_rules(void) {
    draw_for("simplex 3");
    for (int i = 0; i < TABLEAUS; i++) draw_tableau(&tableaus[i]);
    assert_decided();
}

static void simplex_4_cycles(void) {
    draw_for("simplex 4"), nlps = 0;
    add_cycles();
    Hardware t4;
    OptConfig config;
    ASSERT_OK(hardware_read(&t4, "hardware/t4.json", &err));
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-30b"), 0);
    Lp *paper = add_lp(0, NULL, LP_OPTIMAL, OPT_30B_SECONDS, "A.3 for OPT-30B on the paper's machine");
    paper_lp(paper, &t4, &config, &(Block){.s = 512, .n = 32, .gbs = 48, .num_gpu_batches = 3});
    assert_solved(solve_each);
}

// ---------------------------------------------------------------------------------------------------------------
// 9: groups of a few bits
// ---------------------------------------------------------------------------------------------------------------

enum { PACKED = 192, PACKS = 48 };
typedef struct {
    float x[PACKED];
    int n, stride;
    Quant quant;
} Pack;
static Pack packs[PACKS];
static int npacks;
typedef struct {
    float back[PACKED];
    bool finite;
} Unpacked;

static void pack_each(void *answer, const void *about) {
    (void)about;
    for (int p = 0; p < npacks; p++) {
        enum { MOST_STRIDE = 3 };
        Unpacked *to = (Unpacked *)answer + p;
        f16 half[PACKED * MOST_STRIDE] = {0};
        const Pack *from = &packs[p];
        CHECK(from->stride <= MOST_STRIDE);
        for (int i = 0; i < from->n; i++) half[i * from->stride] = f32_to_f16(from->x[i]);
        to->finite = quant_round(half, from->stride, from->n, from->quant);
        for (int i = 0; i < from->n; i++) to->back[i] = f16_to_f32(half[i * from->stride]);
    }
}

static Pack *add_pack(int bits, int n) {
    Pack *p = &packs[npacks++];
    CHECK(npacks <= PACKS && n <= PACKED);
    *p = (Pack){.n = n, .stride = draw(1, 3), .quant = {(uint16_t)bits, 64}};
    return p;
}

/* How many numbers there are among n, each counted once. */
static int count_kinds(const float *x, int n) {
    int kinds = 0;
    for (int i = 0, j; i < n; i++) {
        for (j = 0; j < i && x[j] != x[i]; j++) continue;
        kinds += j == i;
    }
    return kinds;
}

/* A group comes back as no more numbers than it has codes, and each number of it to within so many of its steps, and what
 * F16 rounds of numbers below 8; NaN of a group that is not finite. */
static void assert_packs(double steps) {
    const Unpacked *found = ask(npacks * sizeof *found, pack_each, NULL);
    for (int p = 0; found && p < npacks; p++) {
        const Pack *from = &packs[p];
        bool all_finite = true;
        for (int g = 0; g < from->n; g += 64) {
            float low = INFINITY, high = -INFINITY;
            bool finite = true;
            for (int i = g; i < imin(g + 64, from->n); i++) {
                low = fminf(low, from->x[i]), high = fmaxf(high, from->x[i]);
                finite = finite && isfinite(from->x[i]);
            }
            const double step = ((double)high - low) / ((1 << from->quant.bits) - 1);
            for (int i = g; i < imin(g + 64, from->n); i++) {
                const double off = steps == 0 ? 0 : step * (steps + 1. / 1024) + 8. / 2048;
                if (!finite && !isnan(found[p].back[i]))
                    return wrong("number %d of a group that is not finite: expected NaN, found %g", i - g,
                                 found[p].back[i]);
                if (finite && !near_to(found[p].back[i], from->x[i], off,
                                       "%d bits, number %d of a group of %d from %g to %g, %d apart, to within %g",
                                       from->quant.bits, i - g, imin(64, from->n - g), low, high, from->stride, off))
                    return;
            }
            const int kinds = count_kinds(found[p].back + g, imin(64, from->n - g)), codes = 1 << from->quant.bits;
            if (finite && kinds > codes)
                return wrong("%d bits: expected at most %d numbers in a group, found %d", from->quant.bits, codes, kinds);
            all_finite = all_finite && finite;
        }
        if (found[p].finite != all_finite)
            wrong("%d numbers: the result was expected to be %s, found %s", from->n, all_finite ? "true" : "false",
                  found[p].finite ? "true" : "false");
    }
}

/* Groups of one number over and over, and of the 16 numbers of a grid whose step is a power of two. */
static void quant_1_exact(void) {
    draw_for("quant 1"), npacks = 0;
    for (int p = 0; p < 20; p++) {
        Pack *to = add_pack(4, 128);
        const float constant = (float)draw(-40, 40) / 16, step = ldexpf(1, draw(-4, 3)), low = step * (float)draw(-12, 12);
        int order[16];
        draw_order(order, 16);
        for (int i = 0; i < 128; i++) to->x[i] = i < 64 ? constant : low + step * (float)order[i % 16];
    }
    assert_packs(0);
}

static void quant_2_half_a_step(void) {
    draw_for("quant 2"), npacks = 0;
    for (int p = 0; p < PACKS; p++) {
        Pack *to = add_pack(2 + p % 7, draw(1, 128));
        for (int i = 0; i < to->n; i++) to->x[i] = f16_to_f32(f32_to_f16((float)draw_real(-1, 7)));
    }
    assert_packs(.5);
}

/* The ends of F16: the step is as wide, or as narrow, as it can be. */
static void quant_3_hard_numbers(void) {
    draw_for("quant 3"), npacks = 0;
    for (int p = 0; p < 8; p++) {
        Pack *to = add_pack(4, 192);
        for (int i = 0; i < 192; i++) to->x[i] = (float)(i % 16);
        to->x[draw(64, 127)] = draw(0, 1) ? INFINITY : -INFINITY, to->x[draw(128, 191)] = NAN;
    }
    for (int p = 0; p < 4; p++) {
        Pack *to = add_pack(4, 64);
        for (int i = 0; i < 64; i++) to->x[i] = (float)draw(0, 7) * 0x1p-24f;
        to->x[p] = 0, to->x[63 - p] = 7 * 0x1p-24f;
    }
    assert_packs(0);
    npacks = 0;
    for (int p = 0; p < 4; p++) {
        Pack *to = add_pack(4, 64); /* 131008 / 15 is rounded to a multiple of 8, and 15 times that is off by 15 x 8 */
        for (int i = 0; i < 64; i++) to->x[i] = (i + p) % 2 ? 65504 : -65504;
    }
    const Unpacked *found = ask(npacks * sizeof *found, pack_each, NULL);
    for (int p = 0; found && p < npacks; p++)
        for (int i = 0; i < 64; i++) near_to(found[p].back[i], packs[p].x[i], 15 * 8, "number %d of -65504 and 65504", i);
}

// ---------------------------------------------------------------------------------------------------------------
// 10: the tokens with the largest scores
// ---------------------------------------------------------------------------------------------------------------

enum { NH = 2, HEAD = 4, H1 = NH * HEAD, SEQS = 2, PAGE = 2, PAGES = 8, LEN = PAGE * PAGES, MOST = LEN + 1, SELECTS = 16 };
typedef struct {
    float score[SEQS][NH][LEN]; /* halves, which q and k give exactly */
    int32_t len[SEQS], pages[SEQS][PAGES];
    double sparsity;
} Select;
static Select selects[SELECTS];
typedef struct {
    int32_t tokens[SEQS][NH][MOST];
    float weights[SEQS][NH][MOST];
} Selected;

/* q is (2, 0, 0, 0), over sqrt(HEAD) 1, and k (score, 9, -9, 9). Rows of q lie apart. */
static void select_each(void *answer, const void *about) {
    (void)about;
    for (int c = 0; c < SELECTS; c++) {
        Selected *to = (Selected *)answer + c;
        Select *s = &selects[c];
        f16 q[SEQS][3 * H1] = {0}, k[SEQS * PAGES * PAGE][H1];
        memset(k, 0, sizeof k), memset(to, 0xff, sizeof *to);
        for (int r = 0; r < SEQS; r++)
            for (int h = 0; h < NH; h++) {
                q[r][h * HEAD] = f32_to_f16(2);
                for (int t = 0; t < s->len[r]; t++) {
                    f16 *at = k[s->pages[r][t / PAGE] * PAGE + t % PAGE] + h * HEAD;
                    at[0] = f32_to_f16(s->score[r][h][t]), at[1] = at[3] = f32_to_f16(9), at[2] = f32_to_f16(-9);
                }
            }
        const PageTable table = paged(k, k, s->pages[0], s->len, SEQS, PAGES, PAGE, H1, NH, false);
        run(selection(to->tokens[0][0], to->weights[0][0], MOST, q[0], 3 * H1, H1, table, s->sparsity));
    }
}

/* With pages in order, one sequence's behind the other's, or mixed. Scores differ, or are of few kinds. */
static void draw_select(Select *s, bool mixed, bool equal) {
    int order[SEQS * PAGES], at[LEN];
    *s = (Select){.sparsity = draw_real(.1, .7)};
    draw_order(order, SEQS * PAGES);
    for (int r = 0; r < SEQS; r++) {
        s->len[r] = draw(3, LEN);
        for (int p = 0; p < PAGES; p++) s->pages[r][p] = mixed ? order[r * PAGES + p] : r * PAGES + p;
        for (int h = 0; h < NH; h++) {
            draw_order(at, LEN);
            for (int t = 0; t < LEN; t++) s->score[r][h][t] = equal ? (float)draw(-1, 1) : (float)at[t] / 2 - 4;
        }
    }
}

/* Whether token t is one of the n largest before the last, of equal scores the earlier: fewer than n come before it. */
static bool is_chosen(const float *score, int last, int t, int n) {
    int before = 0;
    for (int u = 0; u < last; u++) before += score[u] > score[t] || (score[u] == score[t] && u < t);
    return t == last || before < n;
}

static void assert_chosen(const Select *s, const Selected *found, int r, int h) {
    const int last = s->len[r] - 1, n = sparse_tokens(s->sparsity, s->len[r]) - 1;
    char expected[200] = "", got[200] = "";
    int count = 0, off = -1;
    for (int t = 0; t <= last; t++) {
        if (!is_chosen(s->score[r][h], last, t, n)) continue;
        if (off < 0 && found->tokens[r][h][count] != t) off = t;
        sprintf(strchr(expected, 0), " %d", t), sprintf(strchr(got, 0), " %d", found->tokens[r][h][count++] % 1000);
    }
    if (off >= 0)
        wrong(
            "sequence %d of %d tokens, head %d: expected tokens%s, found%s; token %d is in page %d of sequence %d, which "
            "the page "
            "table has as page %d of the cache",
            r, s->len[r], h, expected, got, off, off / PAGE, r, s->pages[r][off / PAGE]);
    for (; count < MOST; count++)
        if (found->tokens[r][h][count] != -1) return wrong("sequence %d, head %d: more tokens than were asked for", r, h);
}

static void select_by(const char *step, bool mixed, bool equal, bool weights) {
    draw_for(step);
    for (int c = 0; c < SELECTS; c++) draw_select(&selects[c], mixed, equal);
    for (int c = 0; weights && c < 4; c++) /* one far above the others: what is far below it must not overflow */
        for (int t = 0; t < LEN; t++) selects[c].score[c % SEQS][c / SEQS][t] += t == draw(0, 2) ? 1000 : -1000;
    const Selected *found = ask(SELECTS * sizeof *found, select_each, NULL);
    for (int c = 0; found && c < SELECTS; c++)
        for (int r = 0; r < SEQS; r++)
            for (int h = 0; h < NH; h++) {
                const float *score = selects[c].score[r][h];
                double largest = -INFINITY, sum = 0;
                if (!weights) {
                    assert_chosen(&selects[c], &found[c], r, h);
                    continue;
                }
                for (int t = 0; t < selects[c].len[r]; t++) largest = fmax(largest, score[t]);
                for (int t = 0; t < selects[c].len[r]; t++) sum += exp(score[t] - largest);
                for (int i = 0; i < sparse_tokens(selects[c].sparsity, selects[c].len[r]); i++) {
                    const int t = found[c].tokens[r][h][i];
                    if (t < 0 || t >= selects[c].len[r])
                        return wrong("sequence %d, head %d: token %d is not one of its", r, h, t);
                    const double share = exp(score[t] - largest) / sum;
                    near_to(found[c].weights[r][h][i], share, 1e-5 * share + 1e-30,
                            "sequence %d, head %d: the weight of token %d", r, h, t);
                }
            }
}

static void select_1_largest(void) { select_by("select 1", false, false, false); }
static void select_2_equal(void) { select_by("select 2", true, true, false); }
static void select_3_weights(void) { select_by("select 3", true, false, true); }

// ---------------------------------------------------------------------------------------------------------------
// 11: a pipeline, by the formulas of the first comment of cost/search.c
//
// A case says what these speak of: t, x, K and so on; what the function gets is the sums over sweeps that a plan has. [0]
// is generation, [1] prefill.
// ---------------------------------------------------------------------------------------------------------------

enum { PACES = 20 };
typedef struct {
    int M, G, K, l, blocks, n;
    double t[2], x[2], d;
} PaceCase;
static PaceCase paces[PACES];

static void pace_each(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < PACES; i++) {
        const PaceCase *c = &paces[i];
        enum { ROWS = 5, H1_OF = 8 }; /* rows in a batch of generation; in prefill twice as many. A row is 16 bytes */
        const double pre = c->G * c->blocks, gen = (c->n - 1) * pre;
        const Cluster cluster = {c->M, ROWS * H1_OF * 2 / c->x[0], c->d};
        Plan plan = {.config = {.l = c->l, .h1 = H1_OF}, .act_type = F16, .policy = {.flights = c->G}};
        plan.work[1] = (Workload){.sweeps = pre, .prefills = c->K * pre, .prompt_rows = 2 * ROWS * c->K * pre};
        plan.work[0] = (Workload){.sweeps = gen, .decodes = c->K * gen, .decoded = ROWS * c->K * gen};
        ((Pace *)answer)[i] = cluster_pace(&cluster, &plan, c->t);
    }
}

static double round_of(const PaceCase *c, int stage, double hop) {
    return fmax(c->G * fmax(c->t[stage], c->K * c->x[stage]), (c->M - 1) * hop + c->t[stage] + c->d);
}

static double hop_of(const PaceCase *c, int stage) {
    const double square = c->t[stage] / (c->l * c->K);
    return (1 - 1. / c->l) * c->t[stage] + square + c->d + c->x[stage] + (c->K - 1) * fmax(0, c->x[stage] - square);
}

/* x: of how many squares the wire takes, at most. */
static void pipeline(const char *step, int least_M, int most_M, double least_x, double most_x, int least_blocks,
                     int most_blocks) {
    draw_for(step);
    for (int i = 0; i < PACES; i++) {
        PaceCase *c = &paces[i];
        *c = (PaceCase){draw(least_M, most_M),
                        draw(1, 8),
                        draw(1, 4),
                        draw(1, 6),
                        draw(least_blocks, most_blocks),
                        draw(2, 6),
                        {draw_real(2, 9), draw_real(10, 30)},
                        {0},
                        0};
        c->x[0] = c->t[0] / (c->l * c->K) * draw_real(least_x, most_x), c->x[1] = 2 * c->x[0];
        if (most_x > 1e-6) c->d = draw_real(0, 1);
    }
    const Pace *found = ask(PACES * sizeof *found, pace_each, NULL);
    for (int i = 0; found && i < PACES; i++) {
        PaceCase c = paces[i];
        char what[200];
        if (c.M == 1) c.x[0] = c.x[1] = c.d = 0; /* there is no network */
        const double hop[2] = {hop_of(&c, 0), hop_of(&c, 1)};
        const double prefill = (c.M - 1) * hop[1] + c.G * fmax(c.t[1], c.K * c.x[1]), token = round_of(&c, 0, hop[0]);
        const double all = prefill + (c.blocks - 1) * round_of(&c, 1, hop[1]) + c.blocks * (c.n - 1) * token;
        snprintf(what, sizeof what,
                 "M = %d, G = %d, K = %d, l = %d, %d blocks, n = %d, t %.3g and %.3g s, x %.3g and %.3g s, d %.3g s", c.M,
                 c.G, c.K, c.l, c.blocks, c.n, c.t[1], c.t[0], c.x[1], c.x[0], c.d);
        near_to(found[i].prefill_s, prefill, 1e-6 * prefill, "prefill_s of %s", what);
        near_to(found[i].token_s, token, 1e-6 * token, "token_s of %s", what);
        near_to(found[i].T, all, 1e-6 * all, "T of %s", what);
    }
}

static void pipeline_1_one_machine(void) { pipeline("pipeline 1", 1, 1, 1, 3, 1, 1); }
static void pipeline_2_fast_wire(void) { pipeline("pipeline 2", 2, 6, 1e-9, 1e-9, 1, 1); }
static void pipeline_3_slow_wire(void) { pipeline("pipeline 3", 2, 6, .2, 4, 1, 1); }
static void pipeline_4_more_blocks(void) { pipeline("pipeline 4", 1, 1, 1, 1, 2, 5); }

// ---------------------------------------------------------------------------------------------------------------
// 12: a kernel, on the GPU or in its emulation; without either, its twin on the host
// ---------------------------------------------------------------------------------------------------------------

enum { MARK = 1, NORMS = 6, MOST_NUMBERS = 2 * 12288, MOST_ROWS = 3 };
typedef struct {
    int rows, cols;
    bool in_place;
    f16 x[MOST_NUMBERS], w[MOST_NUMBERS], b[MOST_NUMBERS];
} Norm;
static Norm norms[NORMS];
static int nnorms;
typedef struct {
    f16 y[NORMS][MOST_NUMBERS];
    long most_work[NORMS]; /* numbers that one thread has rounded; 0: not counted */
} Normalized;

/* What the emulation counts: the largest number of roundings of one thread of a kernel since it was last asked. */
long cuda_cpu_most_roundings(void) __attribute__((weak));

static void normalize_on_host(f16 *y, const Norm *s) {
    const size_t n = (size_t)s->rows * s->cols;
    float *floats = xcalloc(n, sizeof *floats);
    for (size_t i = 0; i < n; i++) floats[i] = f16_to_f32(s->x[i]);
    run(norm(F32, floats, floats, s->w, s->b, s->rows, s->cols));
    for (size_t i = 0; i < n; i++) y[i] = f32_to_f16(floats[i]);
    free(floats);
}

/* x, y (rows, cols), w, b (cols), all F16 in one allocation; in place: y is x. */
static void normalize_on_gpu(Gpu *gpu, f16 *y, const Norm *s) {
    const size_t row = (size_t)s->cols * sizeof(f16), all = s->rows * row, apart = whole_lines(all);
    uint8_t *at = gpu->call->alloc(gpu, 4 * apart, &err), *to = s->in_place ? at : at + apart;
    MUST(at);
    MUST(!gpu->call->transfer(gpu, at, s->x, all, &err) && !gpu->call->transfer(gpu, at + 2 * apart, s->w, row, &err));
    MUST(!gpu->call->transfer(gpu, at + 3 * apart, s->b, row, &err) && !gpu->call->begin(gpu, PROJECT, MARK, &err));
    const Op op = norm(F16, to, at, at + 2 * apart, at + 3 * apart, s->rows, s->cols);
    MUST(!gpu->call->run(gpu, &op, &err));
    MUST(!gpu->call->end(gpu, PROJECT, MARK, true, &err) && !gpu->call->sync(gpu, PROJECT, MARK, &err));
    MUST(!gpu->call->transfer(gpu, y, to, all, &err));
    gpu->call->release(gpu, at);
}

static void normalize_each(void *answer, const void *about) {
    Normalized *to = answer;
    Gpu *gpu = cuda_open_gpu ? cuda_open_gpu(&err) : NULL;
    (void)about;
    MUST(gpu || !cuda_open_gpu);
    for (int i = 0; i < nnorms; i++) {
        if (!gpu) {
            normalize_on_host(to->y[i], &norms[i]);
            continue;
        }
        if (cuda_cpu_most_roundings) cuda_cpu_most_roundings();
        normalize_on_gpu(gpu, to->y[i], &norms[i]);
        if (cuda_cpu_most_roundings) to->most_work[i] = cuda_cpu_most_roundings();
    }
    if (gpu) gpu->close(gpu);
}

/* Rows around `mean`, of numbers that lie up to 2 `spread` apart. */
static void add_norm(int rows, int cols, double mean, double spread, bool in_place) {
    Norm *s = &norms[nnorms++];
    CHECK(nnorms <= NORMS && rows * cols <= MOST_NUMBERS);
    s->rows = rows, s->cols = cols, s->in_place = in_place;
    for (int i = 0; i < rows * cols; i++) s->x[i] = f32_to_f16((float)(mean + draw_real(-spread, spread)));
    for (int c = 0; c < cols; c++)
        s->w[c] = f32_to_f16((float)draw_real(1, 3)), s->b[c] = f32_to_f16((float)draw_real(-2, 2));
    for (int r = 0; r < rows; r++) /* the deviation is known not to be small */
        s->x[r * cols] = f32_to_f16((float)(mean - spread)), s->x[r * cols + cols - 1] = f32_to_f16((float)(mean + spread));
}

static void assert_norm(const Norm *s, const f16 *y, long most_work) {
    enum { EACH = 8, MOST_THREADS_OF_A_ROW = 256 };
    for (int r = 0; r < s->rows; r++) {
        double mean = 0, square = 0;
        for (int c = 0; c < s->cols; c++) mean += f16_to_f32(s->x[r * s->cols + c]) / s->cols;
        for (int c = 0; c < s->cols; c++) square += pow(f16_to_f32(s->x[r * s->cols + c]) - mean, 2) / s->cols;
        for (int c = 0; c < s->cols; c++) {
            const double normal = (f16_to_f32(s->x[r * s->cols + c]) - mean) / sqrt(square + 1e-5);
            const double expected = normal * f16_to_f32(s->w[c]) + f16_to_f32(s->b[c]);
            if (!near_to(f16_to_f32(y[r * s->cols + c]), expected, 2e-3 * fmax(fabs(expected), 4),
                         "%d rows of %d columns%s, mean %.4g: row %d, column %d", s->rows, s->cols,
                         s->in_place ? ", in place" : "", mean, r, c))
                return;
        }
    }
    const int threads = imin((s->cols + EACH - 1) / EACH, MOST_THREADS_OF_A_ROW),
              share = (s->cols + threads - 1) / threads + EACH;
    if (most_work > 2 * share)
        wrong("rows of %d columns: a thread was expected to write %d numbers at most, found one that wrote %ld", s->cols,
              share, most_work);
}

static void assert_normalized(void) {
    const Normalized *found = ASK(Normalized, normalize_each, NULL);
    for (int i = 0; found && i < nnorms; i++) assert_norm(&norms[i], found->y[i], found->most_work[i]);
}

static void kernel_1_one_row(void) {
    draw_for("kernel 1"), nnorms = 0;
    add_norm(1, 64, draw_real(-2, 2), 1, false);
    add_norm(3, 256, draw_real(-2, 2), 2, false);
    add_norm(draw(1, 3), 8 * draw(3, 60), draw_real(-2, 2), 2, false);
    assert_normalized();
}

/* Widths that no block covers at once, that end within eight numbers; in place. */
static void kernel_2_all_widths(void) {
    const int widths[] = {2, 28, 60, 1022, 5120, 12288};
    draw_for("kernel 2"), nnorms = 0;
    for (int i = 0; i < 6; i++) add_norm(2, i && i < 4 ? widths[i] + draw(0, 9) : widths[i], draw_real(-1, 1), 1, i % 2);
    assert_normalized();
}

/* At 1000 a square has no digits left for a variance of 1/4. */
static void kernel_3_large_mean(void) {
    draw_for("kernel 3"), nnorms = 0;
    add_norm(2, 768, 1000, .5, false), add_norm(2, 60, -1000, .5, true);
    add_norm(2, 8 * draw(10, 99), draw(800, 1000), .5, draw(0, 1));
    assert_normalized();
}

// ---------------------------------------------------------------------------------------------------------------
// 13 and 14: in mini.c
// ---------------------------------------------------------------------------------------------------------------

/* What `mini WORDS` prints, with | between words; NULL if it fails. */
enum { MOST_TEXT = 1 << 14 };
static const char *mini_out;

static void run_mini(void *answer, const void *about) {
    char text[1000], *argv[40] = {"mini"};
    int argc = 1;
    size_t len;
    snprintf(text, sizeof text, "%s", (const char *)about);
    for (char *word = strtok(text, "|"); word && argc < 39; word = strtok(NULL, "|")) argv[argc++] = word;
    CHECK(freopen(mini_out, "w", stdout));
    const int status = mini_main(argc, argv);
    fflush(stdout);
    if (status) _exit(status);
    char *said = file_read(mini_out, MOST_TEXT - 1, &len, &err);
    MUST(said);
    memcpy(answer, said, len);
}

static const char *mini_says(const char *words) {
    static char path[400];
    snprintf(path, sizeof path, "%s/said", temp_dir());
    mini_out = path;
    return ask(MOST_TEXT, run_mini, words);
}

/* Two rows and both costs over two variables; after the exchange of basic[r] and other[c]. */
enum { PIVOTS = 20 };
typedef struct {
    double at[4][3];
    int basic[2], other[2], r, c;
} Pivot;
static Pivot pivots[PIVOTS];
typedef struct {
    Pivot after, back; /* after the pivot, and another one at the same place */
} Pivoted;

static void pivot_each(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < PIVOTS; i++) {
        Pivot p = pivots[i];
        mini_pivot(p.at, p.basic, p.other, p.r, p.c), ((Pivoted *)answer)[i].after = p;
        mini_pivot(p.at, p.basic, p.other, p.r, p.c), ((Pivoted *)answer)[i].back = p;
    }
}

/* A point: of variables 0 to 3 and the two costs 4 and 5, by what those that are not basic have. */
static void set_point(double value[6], const Pivot *p) {
    for (int i = 0; i < 4; i++) {
        double sum = p->at[i][2];
        for (int v = 0; v < 2; v++) sum -= p->at[i][v] * value[p->other[v]];
        value[i < 2 ? p->basic[i] : i + 2] = i < 2 ? sum : -sum;
    }
}

/* Any point of the first tableau is one of the second. */
static void mini_simplex_1_pivot(void) {
    draw_for("mini pivot");
    for (int i = 0; i < PIVOTS; i++) {
        Pivot *p = &pivots[i];
        int order[4];
        *p = (Pivot){.r = draw(0, 1), .c = draw(0, 1)};
        draw_order(order, 4);
        for (int v = 0; v < 2; v++) p->basic[v] = order[v], p->other[v] = order[2 + v];
        for (int row = 0; row < 4; row++)
            for (int v = 0; v < 3; v++) p->at[row][v] = draw_real(-5, 5);
        p->at[p->r][p->c] = draw_real(.5, 4);
    }
    const Pivoted *found = ask(PIVOTS * sizeof *found, pivot_each, NULL);
    for (int i = 0; found && i < PIVOTS; i++) {
        const Pivot *p = &pivots[i], *after = &found[i].after;
        if (after->basic[p->r] != p->other[p->c] || after->other[p->c] != p->basic[p->r] ||
            after->basic[!p->r] != p->basic[!p->r] || after->other[!p->c] != p->other[!p->c]) {
            wrong(
                "after a pivot at row %d, column %d variable %d was expected to be basic, found %d; and %d in its place, "
                "found %d",
                p->r, p->c, p->other[p->c], after->basic[p->r], p->basic[p->r], after->other[p->c]);
            continue;
        }
        double value[6] = {0}, again[6];
        for (int v = 0; v < 2; v++) value[p->other[v]] = draw_real(-3, 3);
        set_point(value, p), memcpy(again, value, sizeof again), set_point(again, after);
        for (int v = 0; v < 6; v++)
            near_to(again[v], value[v], 1e-9 * (1 + fabs(value[v])), "pivot at row %d, column %d: %s %d of a point", p->r,
                    p->c, v < 4 ? "variable" : "cost", v < 4 ? v : v - 4);
        for (int row = 0; row < 4; row++)
            for (int v = 0; v < 3; v++)
                near_to(found[i].back.at[row][v], p->at[row][v], 1e-9 * (1 + fabs(p->at[row][v])),
                        "two pivots at row %d, column %d lead back: row %d, column %d", p->r, p->c, row, v);
    }
}

static void mini_simplex_2_textbook(void) {
    draw_for("mini textbook"), nlps = 0;
    add_textbook();
    for (int i = 0; i < 4; i++) add_unbounded();
    for (int i = 0; i < 20; i++) add_made(false, false);
    assert_solved(minimize_each);
}

static void mini_simplex_3_cycles(void) {
    static const char opt_30b_config[] =
        "{\"model_type\": \"opt\", \"activation_function\": \"relu\", \"num_hidden_layers\": 48, \"hidden_size\": 7168, "
        "\"ffn_dim\": 28672, \"num_attention_heads\": 56, \"vocab_size\": 50272, \"max_position_embeddings\": 2048, "
        "\"eos_token_id\": 2}";
    const char *dir = temp_dir();
    char words[700];
    draw_for("mini cycles"), nlps = 0;
    add_cycles(), assert_solved(minimize_each);
    write_file(dir, "config.json", opt_30b_config, sizeof opt_30b_config - 1);
    snprintf(words, sizeof words,
             "%s|--policy|512|--hardware|hardware/t4.json|--max-tokens|32|--gpu-batch-size|48|"
             "--num-gpu-batches|3",
             dir);
    const char *said = mini_says(words), *T = said ? strstr(said, "\nT ") : NULL;
    if (said) near_to(T ? atof(T + 3) : NAN, 144 * OPT_30B_SECONDS, 1e-4, "T of A.3 for OPT-30B, in seconds");
}

/* The prompts of mini: words that its model knows. */
static char texts[PROMPTS][60];

static void draw_texts(void) {
    static const char *const beginnings[] = {"Once upon a time", "Tom and Sue", "One",     "The big brown dog", "Ben",
                                             "A little girl",    "One day",     "The cat", "She saw",           "Mom said"},
                             *const more[] = {"", " and", " was", " had a", " went to the", " liked"};
    for (int i = 0; i < PROMPTS; i++) snprintf(texts[i], sizeof texts[i], "%s%s", beginnings[draw(0, 9)], more[draw(0, 5)]);
}

/* Reads "tokens": [1, 2, ...]; returns what is behind it, or NULL. */
static const char *read_tokens(int32_t *to, const char *at, int vocab) {
    if (!(at = strstr(at, "\"tokens\": ["))) return NULL;
    at = strchr(at, '[');
    for (int t = 0; t < TOKENS; t++) {
        if (*at != (t ? ',' : '[')) return NULL;
        to[t] = (int32_t)strtol(at + 1, (char **)&at, 10);
        if (to[t] <= 0 || to[t] >= vocab) return NULL;
    }
    return at;
}

/* Whether each of the last TOKENS tokens is one that the plain forward pass finds best, of near ones any: mini.c rounds
 * otherwise, by less than TIE of the largest logit. */
static void assert_best(const Checkpoint *model, const int32_t *ids, int s, const char *what) {
    const double TIE = 2e-3;
    const int vocab = model->config.vocab;
    float *logits = xcalloc((size_t)(s + TOKENS) * vocab, sizeof *logits);
    ASSERT_OK(reference_forward(logits, model, ids, s + TOKENS - 1, &err));
    for (int t = s; t < s + TOKENS; t++) {
        const float *row = logits + (size_t)(t - 1) * vocab;
        int best = 0;
        float largest = 0;
        for (int v = 0; v < vocab; v++) {
            if (row[v] > row[best]) best = v;
            largest = fmaxf(largest, fabsf(row[v]));
        }
        if (row[ids[t]] >= row[best] - TIE * largest) continue;
        wrong("%s: token %d was expected to be %d (logit %.5g), found %d (%.5g)", what, t - s, best, row[best], ids[t],
              row[ids[t]]);
        break;
    }
    free(logits);
}

/* The prompts by mini with those flags. */
static void assert_mini_generates(const Checkpoint *model, const Tokenizer *tokenizer, const char *flags) {
    char words[900], what[500];
    int used = snprintf(words, sizeof words, "models/opt-tiny");
    for (int i = 0; i < PROMPTS; i++) used += snprintf(words + used, sizeof words - used, "|%s", texts[i]);
    snprintf(words + used, sizeof words - used, "|--json|--max-tokens|%d|%s", TOKENS, flags);
    const char *at = mini_says(words);
    for (int i = 0; at && i < PROMPTS; i++) {
        int32_t *text, ids[2 * LONGEST + TOKENS] = {model->config.eos}, chosen[TOKENS];
        if (!(at = read_tokens(chosen, at, model->config.vocab)))
            return wrong("%s: prompt %d has not got %d tokens", flags, i, TOKENS);
        const int n = tokenizer_encode(tokenizer, texts[i], strlen(texts[i]), &text, &err);
        CU_ASSERT_FATAL(n > 0 && n < 2 * LONGEST);
        memcpy(ids + 1, text, n * sizeof *ids), memcpy(ids + 1 + n, chosen, sizeof chosen), free(text);
        snprintf(what, sizeof what, "%s, prompt %d (\"%s\")", flags, i, texts[i]);
        assert_best(model, ids, 1 + n, what);
    }
}

/* With overlapping and without. */
static void assert_mini_in_blocks(const char *percent, const char *const *blocks, int n) {
    Checkpoint *model = checkpoint_open("models/opt-tiny", &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(model);
    Tokenizer *tokenizer = tokenizer_open("models/opt-tiny", model->config.vocab, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tokenizer);
    for (int b = 0; b < 2 * n; b++) {
        char flags[200];
        snprintf(flags, sizeof flags, "%s--percent|%s|--gpu-batch-size|%s", b % 2 ? "--no-overlap|" : "", percent,
                 blocks[b / 2]);
        assert_mini_generates(model, tokenizer, flags);
    }
    tokenizer_close(tokenizer), checkpoint_close(model);
}

static void mini_loop_1_one_batch(void) {
    static const char *const blocks[] = {"5|--num-gpu-batches|1", "2|--num-gpu-batches|1"};
    draw_for("mini loop 1"), draw_texts();
    assert_mini_in_blocks("100|0|100|0|100|0", blocks, 2);
}

/* One batch of all, three in flight, and two, of which the second block has one. */
static const char *const many[] = {"5|--num-gpu-batches|1", "2|--num-gpu-batches|3", "2|--num-gpu-batches|2"};

/* Percentages of cache and activations, or of the weights, as given and as drawn. */
static void mini_loop_2_cache_and_activations(void) {
    char percent[60];
    draw_for("mini loop 2"), draw_texts();
    assert_mini_in_blocks("100|0|0|100|0|100", many, 3);
    snprintf(percent, sizeof percent, "100|0|%d|%d|%d|%d", draw(20, 40), draw(20, 40), draw(20, 40), draw(20, 40));
    assert_mini_in_blocks(percent, many, 3);
}

static void mini_loop_3_weights(void) {
    char percent[60];
    draw_for("mini loop 3"), draw_texts();
    snprintf(percent, sizeof percent, "%d|%d|100|0|100|0", draw(10, 30), draw(30, 50));
    assert_mini_in_blocks(percent, many, 3);
    assert_mini_in_blocks("0|0|0|0|0|0", many, 3);
}

// ---------------------------------------------------------------------------------------------------------------
// 15: what must come after what
// ---------------------------------------------------------------------------------------------------------------

enum { PROGRAMS = 24, OPS = 24, CELLS = 5, LANES = 4 };
typedef struct {
    int lane, write, nwrite, read, nread; /* cells: first, number */
} Posted;
typedef struct {
    Posted op[OPS];
} Program;
static Program programs[PROGRAMS];
typedef struct {
    Event after[NLANES];
    int n;
} After;

static void post_each(void *answer, const void *about) {
    (void)about;
    for (int p = 0; p < PROGRAMS; p++) {
        Depend *depend = depend_open(CELLS + 1);
        uint64_t seq[NLANES] = {0};
        for (int i = 0; i < OPS; i++) {
            const Posted *from = &programs[p].op[i];
            After *to = (After *)answer + p * OPS + i;
            Op op = {.code = OP_UNPACK, .lane = (Lane)from->lane};
            op.unpack.w = (Tensor){.rows = 1, .cols = 1, .cell = from->write, .ncells = from->nwrite};
            op.unpack.packed = (Tensor){.rows = 1, .cols = 1, .cell = from->read, .ncells = from->nread};
            depend_before(depend, &op);
            to->n = op.nafter;
            for (int e = 0; e < op.nafter && e < NLANES; e++) to->after[e] = op.after[e];
            depend_posted(depend, &op, (Event){from->lane, ++seq[from->lane]});
        }
        depend_close(depend);
    }
}

static void draw_program(Program *p) {
    for (int i = 0; i < OPS; i++) {
        Posted *op = &p->op[i];
        const int kind = draw(0, 3); /* reads, writes, both, both */
        *op = (Posted){draw(0, LANES - 1), draw(0, CELLS - 2), kind == 0 ? 0 : draw(1, 2), draw(0, CELLS - 2),
                       kind == 1 ? 0 : 1};
    }
}

static bool meet(int a, int na, int b, int nb) { return na && nb && a < b + nb && b < a + na; }

typedef enum { NO_CONFLICT, READ_AFTER_WRITE, AFTER_USE } Conflict;
static Conflict conflict(const Posted *a, const Posted *b) {
    if (meet(a->write, a->nwrite, b->read, b->nread)) return READ_AFTER_WRITE;
    return meet(a->read, a->nread, b->write, b->nwrite) || meet(a->write, a->nwrite, b->write, b->nwrite) ? AFTER_USE
                                                                                                          : NO_CONFLICT;
}

/* Adds to before[j] all that is before i, and i. */
static void add_before(bool before[OPS][OPS], int j, int i) {
    before[j][i] = true;
    for (int x = 0; x < i; x++) before[j][x] = before[j][x] || before[i][x];
}

/* The op that an event is the end of; -1: none that was posted before j. */
static int op_of(const Program *p, Event e, int j) {
    uint64_t seq = 0;
    for (int i = 0; i < j; i++)
        if (p->op[i].lane == (int)e.lane && ++seq == e.seq) return i;
    return -1;
}

/* before[j][i]: i is over when j begins, by lanes and events; without one of j's events. */
static bool order_of(bool before[OPS][OPS], const Program *p, const After *after, int last, int without) {
    memset(before, 0, sizeof(bool) * OPS * OPS);
    for (int j = 0; j <= last; j++) {
        for (int i = 0; i < j; i++)
            if (p->op[i].lane == p->op[j].lane) add_before(before, j, i);
        if (after[j].n < 0 || after[j].n > NLANES) return false;
        for (int e = 0; e < after[j].n; e++) {
            const int i = op_of(p, after[j].after[e], j);
            if (i < 0) return false;
            if (j < last || e != without) add_before(before, j, i);
        }
    }
    return true;
}

/* Each op that conflicts with one before it must come after it. exactly: and after nothing else, and no event is one that
 * others imply. */
static void assert_order(const Program *p, const After *found, Conflict which, bool exactly) {
    static const char *const use[] = {"", "reads what it writes", "writes what it uses"};
    bool is[OPS][OPS], must[OPS][OPS] = {{false}}, less[OPS][OPS];
    if (!order_of(is, p, found, OPS - 1, -1)) return wrong("an event is of no op that was posted");
    for (int j = 0; j < OPS; j++)
        for (int i = 0; i < j; i++) {
            const Conflict c = conflict(&p->op[i], &p->op[j]);
            if (c || p->op[i].lane == p->op[j].lane) add_before(must, j, i);
            if (c && (c == which || exactly) && !is[j][i])
                return wrong("op %d (lane %d) does not wait for op %d (lane %d), but %s", j, p->op[j].lane, i,
                             p->op[i].lane, use[c]);
        }
    for (int j = 0; j < OPS && exactly; j++) {
        for (int i = 0; i < j; i++)
            if (is[j][i] && !must[j][i]) return wrong("op %d waits for op %d, and need not: they could overlap", j, i);
        for (int e = 0; e < found[j].n; e++) {
            const int i = op_of(p, found[j].after[e], j);
            order_of(less, p, found, j, e);
            if (less[j][i]) return wrong("op %d waits for op %d by an event that others imply", j, i);
        }
    }
}

static void assert_orders(const char *step, Conflict which, bool exactly) {
    draw_for(step);
    for (int i = 0; i < PROGRAMS; i++) draw_program(&programs[i]);
    const After *found = ask(PROGRAMS * OPS * sizeof *found, post_each, NULL);
    for (int i = 0; found && i < PROGRAMS; i++) assert_order(&programs[i], found + i * OPS, which, exactly);
}

static void order_1_read_after_write(void) { assert_orders("order 1", READ_AFTER_WRITE, false); }
static void order_2_write_after_use(void) { assert_orders("order 2", AFTER_USE, false); }
static void order_3_overlap(void) { assert_orders("order 3", NO_CONFLICT, true); }

// ---------------------------------------------------------------------------------------------------------------
// 16: the search over blocks, and the frontier of Figure 1
//
// What is found is compared with policies that are drawn, by the same cost model: policy_predict says what each takes.
// ---------------------------------------------------------------------------------------------------------------

enum { MOST_FOUND = 64, TRIED = 60 };
typedef struct {
    Found found[MOST_FOUND], best;
    int n, nbest;
} Frontier;
static Search question;
static Checkpoint *asked_model; /* until the next question */
static Prompt asked_prompts[64];
static Task asked_task;
static Hardware asked_machine;

static void find_frontier(void *answer, const void *about) {
    Frontier *to = answer;
    to->nbest = policy_search(&to->best, 1, &question, &err);
    if (about) to->n = policy_frontier(to->found, MOST_FOUND, &question, &err);
}

/* OPT-125M or 350M on a machine that does not hold it, and more prompts than the best block has. */
static void draw_question(void) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, draw(0, 1) ? "opt-125m" : "opt-350m") == 0);
    ASSERT_OK(hardware_read(&asked_machine, "hardware/t4.json", &err));
    if (asked_model) checkpoint_close(asked_model);
    asked_model = checkpoint_dummy(&config, 1);
    question = (Search){.hardware = &asked_machine,
                        .checkpoint = asked_model,
                        .task = &asked_task,
                        .act_type = F16,
                        .one_block = true,
                        .given = {.overlap = true, .page_tokens = 16}};
    asked_task = (Task){.prompts = asked_prompts, .count = 64};
    for (int i = 0, s = draw(64, 256), n = draw(8, 32); i < asked_task.count; i++)
        asked_task.prompts[i] = (Prompt){.s = s, .n = n};
    question.capacity[TIER_GPU] = (size_t)(draw_real(.3, .9) * 1e9);
    question.capacity[TIER_CPU] = (size_t)(draw_real(2, 4) * 1e9);
    question.capacity[TIER_DISK] = (size_t)1e12;
}

/* A complete policy; false: it does not fit. */
static bool try_policy(Found *found, int tenth) {
    Search one = question;
    const double wg = tenth % 4 * .2, cg = tenth / 4 % 3 * .5, hg = tenth % 2;
    one.given = (Policy){.wg = wg,
                         .wc = 1 - wg,
                         .cg = cg,
                         .cc = 1 - cg,
                         .hg = hg,
                         .hc = 1 - hg,
                         .gbs = 1 << draw(0, 4),
                         .num_gpu_batches = 1 << draw(0, 3),
                         .overlap = true,
                         .page_tokens = 16,
                         .delegated = draw(0, 1),
                         .table_home = TIER_CPU,
                         .workspaces = WORKSPACES};
    if (question.fixed_gbs) one.given.gbs = question.given.gbs;
    if (question.fixed_batches) one.given.num_gpu_batches = question.given.num_gpu_batches;
    return block_size(&one.given) <= asked_task.count && policy_predict(found, &one, &err) == 0;
}

static void assert_best_found(const Found *best, double slack) {
    for (int i = 0; i < TRIED; i++) {
        Found other;
        if (!try_policy(&other, i) || best->cost.throughput >= slack * other.cost.throughput) continue;
        return wrong(
            "the best that was found makes %.4g token/s (gbs %d, %d batches), but gbs %d, %d batches, weights %.0f %.0f, "
            "cache "
            "%.0f %.0f makes %.4g",
            best->cost.throughput, best->policy.gbs, best->policy.num_gpu_batches, other.policy.gbs,
            other.policy.num_gpu_batches, 100 * other.policy.wg, 100 * other.policy.wc, 100 * other.policy.cg,
            100 * other.policy.cc, other.cost.throughput);
    }
}

/* A larger block pays one percent for each doubling: see score() in cost/search.c. */
static void search_1_blocks(void) {
    draw_for("search 1"), draw_question();
    const Frontier *found = ASK(Frontier, find_frontier, NULL);
    if (found && found->nbest != 1) wrong("nothing was found");
    if (found && found->nbest == 1) assert_best_found(&found->best, .93);
}

static void search_2_given(void) {
    for (int which = 0; which < 2; which++) {
        draw_for(which ? "search 2, batches" : "search 2, gbs"), draw_question();
        if (which) question.fixed_batches = true, question.given.num_gpu_batches = draw(1, 5);
        if (!which) question.fixed_gbs = true, question.given.gbs = draw(1, 9);
        const Frontier *found = ASK(Frontier, find_frontier, NULL);
        if (!found) return;
        if (found->nbest != 1) return wrong("nothing was found");
        if (which && found->best.policy.num_gpu_batches != question.given.num_gpu_batches)
            return wrong("%d batches were given, found %d", question.given.num_gpu_batches,
                         found->best.policy.num_gpu_batches);
        if (!which && found->best.policy.gbs != question.given.gbs)
            return wrong("gbs %d was given, found %d", question.given.gbs, found->best.policy.gbs);
        assert_best_found(&found->best, .93);
    }
}

static void search_3_frontier(void) {
    draw_for("search 3"), draw_question();
    const Frontier *at = ASK(Frontier, find_frontier, &question);
    if (!at) return;
    if (at->n < 2 || at->n > MOST_FOUND) return wrong("the frontier has %d policies", at->n);
    for (int i = 1; i < at->n; i++) {
        const Found *a = &at->found[i - 1], *b = &at->found[i];
        if (!(b->latency >= a->latency && b->cost.throughput > a->cost.throughput))
            return wrong("policy %d of the frontier takes %.4g s and makes %.4g token/s, the next one %.4g s and %.4g",
                         i - 1, a->latency, a->cost.throughput, b->latency, b->cost.throughput);
    }
    if (at->found[at->n - 1].cost.throughput < at->best.cost.throughput * (1 - 1e-9))
        return wrong("the frontier ends with %.4g token/s, but the search finds %.4g", at->found[at->n - 1].cost.throughput,
                     at->best.cost.throughput);
    for (int i = 0; i < TRIED; i++) { /* of all that are as quick, the frontier has one that is about as good */
        Found other;
        double best = 0;
        if (!try_policy(&other, i)) continue;
        for (int j = 0; j < at->n; j++)
            if (at->found[j].latency <= 1.25 * other.latency) best = fmax(best, at->found[j].cost.throughput);
        if (best < .75 * other.cost.throughput)
            return wrong("within %.4g s the frontier makes %.4g token/s, but gbs %d, %d batches makes %.4g",
                         1.25 * other.latency, best, other.policy.gbs, other.policy.num_gpu_batches, other.cost.throughput);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// 17 and 19: on the sim, which counts bytes and seconds
// ---------------------------------------------------------------------------------------------------------------

static int ignore_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *why) {
    (void)prompt, (void)tokens, (void)n, (void)reason, (void)why;
    (*(int *)ctx)++;
    return 0;
}

typedef struct {
    double moved[NCHANNELS][NKINDS], seconds;
    int ended, pages; /* of the CPU tier's pool */
    long sweeps, generated;
} Simulated;

/* Everything streams from the CPU. */
static void simulate(Simulated *to, const OptConfig *config, Schedule schedule, int gbs, int K, const Prompt *prompts,
                     int count) {
    Checkpoint *model = checkpoint_dummy(config, 1);
    Hardware machine = {.gmem = 1e18, .cmem = 1e18, .nmem = 1e18};
    Policy p = {.wc = 1,
                .cc = 1,
                .hc = 1,
                .gbs = gbs,
                .num_gpu_batches = K,
                .schedule = schedule,
                .overlap = true,
                .page_tokens = 1,
                .table_home = TIER_CPU};
    Task task = {.prompts = (Prompt *)prompts, .count = count};
    RunStats stats;
    for (int stage = 0; stage < 2; stage++) {
        machine.ctog_bdw[stage] = machine.gtoc_bdw[stage] = 1e10, machine.dtoc_bdw[stage] = machine.ctod_bdw[stage] = 1e9;
        machine.mm_flops[stage] = machine.bmm_flops[stage] = 1e14, machine.cpu_flops[stage] = 1e12;
    }
    Plan *plan = plan_make(model, &p, &task, F16, &err);
    MUST(plan);
    Device *device = sim_open(plan, &machine);
    MUST(device);
    *to = (Simulated){.ended = 0};
    MUST(schedule_run(plan, &task, device, &(Listener){.ctx = &to->ended, .done = ignore_done}, &stats, &err) == 0);
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) to->moved[lane_channel[lane]][kind] += device->count[lane].moved[kind];
    to->seconds = device->now(device), to->sweeps = stats.sweeps, to->generated = stats.generated;
    to->pages = plan->npages[TIER_CPU];
    device->close(device), plan_free(plan), checkpoint_close(model);
}

/* OPT-125M with fewer layers; no sequence ends early. */
static OptConfig short_opt(int l) {
    OptConfig config;
    CHECK(opt_config_by_name(&config, "opt-125m") == 0);
    config.l = l, config.eos = -1;
    return config;
}

enum { COUNTS = 12, MOST_PROMPTS = 80 };
static struct {
    OptConfig config;
    Schedule schedule;
    IoCase io;
} io_cases[COUNTS];

static void count_each(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < COUNTS; i++) ((IoCount *)answer)[i] = io_count(&io_cases[i].io, io_cases[i].schedule);
}

static double layer_bytes(const OptConfig *c) {
    double bytes = 0;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(c, (Role)r, &rows, &cols);
        bytes += ((size_t)rows * cols * 2 + 63) / 64 * 64;
    }
    return bytes;
}

/* Of blocks, or of the diagonal. What is expected has been counted. */
static void assert_counts(const char *step, bool diagonal, bool weights) {
    draw_for(step);
    for (int i = 0; i < COUNTS; i++) {
        const int gbs = draw(1, 3), K = draw(1, 4), n = draw(K, 3 * K + 1);
        io_cases[i].config = short_opt(draw(1, 3));
        const OptConfig *c = &io_cases[i].config;
        io_cases[i].schedule = diagonal ? SCHEDULE_DIAGONAL : i % 2 ? SCHEDULE_ROW : SCHEDULE_ZIGZAG;
        io_cases[i].io = (IoCase){.l = c->l,
                                  .h1 = c->h1,
                                  .layer_bytes = layer_bytes(c),
                                  .head_bytes = 2. * c->vocab * c->h1,
                                  .s = draw(1, 20),
                                  .n = n,
                                  .gbs = gbs,
                                  .K = K,
                                  .count = gbs * K * draw(1, 3)};
    }
    const IoCount *found = ask(COUNTS * sizeof *found, count_each, NULL);
    for (int i = 0; found && i < COUNTS; i++) {
        const IoCase *io = &io_cases[i].io;
        Prompt prompts[MOST_PROMPTS];
        Simulated real;
        char what[200];
        int32_t ids[32] = {0};
        CHECK(io->count <= MOST_PROMPTS);
        for (int p = 0; p < io->count; p++) prompts[p] = (Prompt){.ids = ids, .s = io->s, .n = io->n};
        simulate(&real, &io_cases[i].config, io_cases[i].schedule, io->gbs, io->K, prompts, io->count);
        CU_ASSERT_EQUAL_FATAL(real.generated, (long)io->count * io->n);
        snprintf(what, sizeof what, "%s, %d prompts, l = %d, s = %d, n = %d, %d batches of %d",
                 schedule_name[io_cases[i].schedule], io->count, io->l, io->s, io->n, io->K, io->gbs);
        if (weights) {
            near_to(found[i].sweeps, real.sweeps, 0, "sweeps: %s", what);
            near_to(found[i].weights, real.moved[CTOG][WEIGHT], .5, "bytes of weights: %s", what);
            continue;
        }
        near_to(found[i].cache, real.moved[CTOG][CACHE] + real.moved[GTOC][CACHE], .5, "bytes of cache: %s", what);
        near_to(found[i].activations, real.moved[CTOG][ACTIVATION] + real.moved[GTOC][ACTIVATION], .5,
                "bytes of activations: %s", what);
    }
}

static void count_1_blocks(void) { assert_counts("count 1", false, true); }
static void count_2_cache(void) { assert_counts("count 2", false, false); }
static void count_3_diagonal(void) { assert_counts("count 3", true, true); }

/* A fourth schedule in the place of the diagonal, and the diagonal. */
enum { RACES = 8 };
typedef struct {
    Prompt prompts[MOST_PROMPTS];
    int count, gbs, K, diagonal_K; /* diagonal_K: as many batches as fit into the same pages */
    bool fourth;
} Race;
static Race races[RACES];
static OptConfig race_model;

static void race_each(void *answer, const void *about) {
    const bool fourth = about;
    if (fourth) seats_for[SCHEDULE_DIAGONAL] = fourth_seats;
    for (int i = 0; i < RACES; i++) {
        const Race *r = &races[i];
        simulate((Simulated *)answer + i, &race_model, SCHEDULE_DIAGONAL, r->gbs, r->K, r->prompts, r->count);
    }
}

static void zigzag_each(void *answer, const void *about) {
    (void)about;
    for (int i = 0; i < RACES; i++)
        simulate((Simulated *)answer + i, &race_model, SCHEDULE_ZIGZAG, races[i].gbs, races[i].K, races[i].prompts,
                 races[i].count);
}

static int32_t race_ids[64];
static void draw_races(const char *step, bool equal) {
    draw_for(step);
    race_model = short_opt(2);
    for (int i = 0; i < RACES; i++) {
        Race *r = &races[i];
        r->gbs = draw(1, 2), r->K = draw(3, 6), r->count = MOST_PROMPTS;
        const int s = draw(4, 30), n = r->K * draw(3, 5);
        for (int p = 0; p < r->count; p++)
            r->prompts[p] = (Prompt){.ids = race_ids, .s = equal ? s : draw(4, 30), .n = equal ? n : draw(2, 2 * n)};
    }
}

static void race(Simulated to[RACES], Work *work, const void *about) {
    const Simulated *found = ask(RACES * sizeof *found, work, about);
    memset(to, 0, RACES * sizeof *to);
    if (found) memcpy(to, found, RACES * sizeof *found);
}

/* Whatever the lengths, everyone gets his tokens, and no more sweeps are needed than by doing one prompt after the other.
 */
static void fourth_1_invariants(void) {
    Simulated own[RACES];
    draw_races("fourth 1", false);
    race(own, race_each, &races);
    for (int i = 0; i < RACES; i++) {
        long tokens = 0;
        for (int p = 0; p < races[i].count; p++) tokens += races[i].prompts[p].n;
        if (own[i].ended != races[i].count || own[i].generated != tokens)
            return wrong("%d prompts with %ld tokens to generate: %d ended, %ld tokens were generated", races[i].count,
                         tokens, own[i].ended, own[i].generated);
        const long most = tokens / races[i].gbs * 2;
        if (own[i].sweeps > most)
            return wrong("%ld sweeps for %ld tokens in batches of %d", own[i].sweeps, tokens, races[i].gbs);
    }
}

/* Of equal prompts it holds fewer pages than zig-zag in the same block: they are not all long at the same time. */
static void fourth_2_memory(void) {
    Simulated own[RACES], zigzag[RACES];
    draw_races("fourth 2", true);
    race(zigzag, zigzag_each, NULL), race(own, race_each, &races);
    for (int i = 0; i < RACES; i++) {
        const int s = races[i].prompts[0].s, n = races[i].prompts[0].n;
        const double staggered = (s + n / 2. + n / (2. * races[i].K)) / (s + n);
        if (own[i].ended != races[i].count)
            return wrong("of %d prompts of s = %d and n = %d, %d ended", races[i].count, s, n, own[i].ended);
        if (own[i].pages <= 0 || own[i].pages > ceil(staggered * zigzag[i].pages) + races[i].gbs * races[i].K)
            return wrong("s = %d, n = %d, %d batches of %d: %d pages were expected at most, found %d; zig-zag has %d", s, n,
                         races[i].K, races[i].gbs, (int)ceil(staggered * zigzag[i].pages), own[i].pages, zigzag[i].pages);
    }
}

/* For each page as many tokens a second as the diagonal has, to within 5 percent. */
static void fourth_3_throughput(void) {
    Simulated own[RACES], diagonal[RACES];
    double sum = 0, least = INFINITY;
    draw_races("fourth 3", true);
    race(diagonal, race_each, NULL), race(own, race_each, &races);
    for (int i = 0; i < RACES; i++) {
        const double mine = own[i].generated / own[i].seconds / own[i].pages;
        const double ratio = mine / (diagonal[i].generated / diagonal[i].seconds / diagonal[i].pages);
        sum += log(ratio), least = fmin(least, ratio);
    }
    if (!(exp(sum / RACES) >= .95))
        wrong("token/s a page: expected .95 of the diagonal's, found %.3g (at the least %.3g)", exp(sum / RACES), least);
}

// ---------------------------------------------------------------------------------------------------------------
// 18: two small kernels: rows of a table, and rows into pages
// ---------------------------------------------------------------------------------------------------------------

enum { GATHERS = 8, TABLE = 20, GATHERED = 5, WIDEST = 700, POOL = 12, PER_PAGE = 3 };
typedef struct {
    int cols, idx[GATHERED];
    bool add;
    f16 table[TABLE * WIDEST], y[GATHERED * WIDEST];      /* y: what is there before */
    int seq[GATHERED], pos[GATHERED], pages[2][POOL / 2]; /* of append, whose rows are 2 cols wide */
} Gather;
static Gather gathers[GATHERS];
typedef struct {
    f16 y[GATHERS][GATHERED * WIDEST], k[GATHERS][POOL * PER_PAGE * WIDEST / 2], v[GATHERS][POOL * PER_PAGE * WIDEST / 2];
    long most_work[GATHERS];
} Gathered;

/* n bytes that the GPU then holds; NULL: of no matter. */
static void *on_gpu(Gpu *gpu, const void *bytes, size_t n) {
    void *at = gpu->call->alloc(gpu, whole_lines(n), &err);
    MUST(at);
    MUST(!bytes || !gpu->call->transfer(gpu, at, bytes, n, &err));
    return at;
}

static void gather_on_gpu(Gpu *gpu, Gathered *to, int i, bool append) {
    const Gather *g = &gathers[i];
    const size_t row = g->cols * sizeof(f16), pool = POOL * PER_PAGE * row / 2;
    void *table = on_gpu(gpu, g->table, TABLE * row), *y = on_gpu(gpu, g->y, GATHERED * row),
         *idx = on_gpu(gpu, g->idx, sizeof g->idx);
    void *k = on_gpu(gpu, to->k[i], pool), *v = on_gpu(gpu, to->v[i], pool),
         *pages = on_gpu(gpu, g->pages, sizeof g->pages);
    void *seq = on_gpu(gpu, g->seq, sizeof g->seq), *pos = on_gpu(gpu, g->pos, sizeof g->pos);
    const PageTable into = paged(k, v, pages, NULL, 2, POOL / 2, PER_PAGE, g->cols / 2, 1, false);
    const Op op = append ? appending(into, y, g->cols, false, g->cols, seq, pos, GATHERED)
                         : embedding(y, F16, table, F16, g->cols, idx, GATHERED, g->cols, g->add);
    MUST(!gpu->call->begin(gpu, PROJECT, MARK, &err));
    MUST(!gpu->call->run(gpu, &op, &err));
    MUST(!gpu->call->end(gpu, PROJECT, MARK, true, &err) && !gpu->call->sync(gpu, PROJECT, MARK, &err));
    MUST(!gpu->call->transfer(gpu, to->y[i], y, GATHERED * row, &err));
    MUST(!gpu->call->transfer(gpu, to->k[i], k, pool, &err) && !gpu->call->transfer(gpu, to->v[i], v, pool, &err));
    void *const all[] = {table, y, idx, k, v, pages, seq, pos};
    for (int j = 0; j < 8; j++) gpu->call->release(gpu, all[j]);
}

/* Without a GPU the host's, whose activations are floats. */
static void gather_on_host(Gathered *to, int i, bool append) {
    const Gather *g = &gathers[i];
    float *y = xcalloc(GATHERED * WIDEST, sizeof *y);
    for (int j = 0; j < GATHERED * g->cols; j++) y[j] = f16_to_f32(g->y[j]);
    const PageTable into = paged(to->k[i], to->v[i], g->pages[0], NULL, 2, POOL / 2, PER_PAGE, g->cols / 2, 1, false);
    run(append ? appending(into, g->y, g->cols, false, g->cols, g->seq, g->pos, GATHERED)
               : embedding(y, F32, g->table, F16, g->cols, g->idx, GATHERED, g->cols, g->add));
    for (int j = 0; j < GATHERED * g->cols; j++) to->y[i][j] = f32_to_f16(y[j]);
    free(y);
}

static void gather_each(void *answer, const void *about) {
    Gathered *to = answer;
    Gpu *gpu = cuda_open_gpu ? cuda_open_gpu(&err) : NULL;
    MUST(gpu || !cuda_open_gpu);
    memset(to->k, 0x3c, sizeof to->k), memset(to->v, 0x3c, sizeof to->v);
    for (int i = 0; i < GATHERS; i++) {
        if (cuda_cpu_most_roundings) cuda_cpu_most_roundings();
        if (gpu)
            gather_on_gpu(gpu, to, i, about);
        else
            gather_on_host(to, i, about);
        if (cuda_cpu_most_roundings) to->most_work[i] = cuda_cpu_most_roundings();
    }
    if (gpu) gpu->close(gpu);
}

static const Gathered *gathered(const char *step, bool add, bool append) {
    draw_for(step);
    for (int i = 0; i < GATHERS; i++) {
        Gather *g = &gathers[i];
        int order[POOL];
        g->cols = i == 0 ? 64 : i % 2 ? 8 * draw(20, WIDEST / 8) : 2 * draw(1, WIDEST / 2), g->add = add;
        for (int j = 0; j < TABLE * g->cols; j++) g->table[j] = f32_to_f16((float)draw_real(-4, 4));
        for (int j = 0; j < GATHERED * g->cols; j++) g->y[j] = f32_to_f16((float)draw_real(-4, 4));
        draw_order(order, POOL);
        for (int p = 0; p < POOL; p++) g->pages[p % 2][p / 2] = order[p];
        draw_order(order, POOL / 2 * PER_PAGE < POOL ? POOL / 2 * PER_PAGE : POOL);
        for (int r = 0; r < GATHERED; r++) g->idx[r] = draw(0, TABLE - 1), g->seq[r] = draw(0, 1), g->pos[r] = order[r];
    }
    return ASK(Gathered, gather_each, append ? &gathers : NULL);
}

static void assert_rows(const Gathered *found, bool add) {
    for (int i = 0; found && i < GATHERS; i++) {
        const Gather *g = &gathers[i];
        for (int r = 0; r < GATHERED; r++)
            for (int c = 0; c < g->cols; c++) {
                const double row = f16_to_f32(g->table[g->idx[r] * g->cols + c]),
                             before = add ? f16_to_f32(g->y[r * g->cols + c]) : 0;
                if (!near_to(f16_to_f32(found->y[i][r * g->cols + c]), row + before, add ? 4e-3 : 0,
                             "%d columns: row %d, which is row %d of the table, column %d", g->cols, r, g->idx[r], c))
                    return;
            }
        const int share = (g->cols + 255) / 256 + 16;
        if (found->most_work[i] > 2 * share)
            return wrong("rows of %d columns: a thread was expected to add %d numbers at most, found one that added %ld",
                         g->cols, share, found->most_work[i]);
    }
}

static void small_1_gather(void) { assert_rows(gathered("small 1", false, false), false); }
static void small_2_add(void) { assert_rows(gathered("small 2", true, false), true); }

static void small_3_append(void) {
    const Gathered *found = gathered("small 3", false, true);
    for (int i = 0; found && i < GATHERS; i++) {
        const Gather *g = &gathers[i];
        const int width = g->cols / 2;
        f16 k[POOL * PER_PAGE * WIDEST / 2], v[POOL * PER_PAGE * WIDEST / 2];
        memset(k, 0x3c, sizeof k), memset(v, 0x3c, sizeof v);
        for (int r = 0; r < GATHERED; r++) {
            const int page = g->pages[g->seq[r]][g->pos[r] / PER_PAGE], row = page * PER_PAGE + g->pos[r] % PER_PAGE;
            memcpy(k + row * width, g->y + r * g->cols, width * sizeof *k);
            memcpy(v + row * width, g->y + r * g->cols + width, width * sizeof *v);
        }
        for (int j = 0; j < POOL * PER_PAGE * width; j++) {
            const int row = j / width;
            if (!near_to(f16_to_f32(found->k[i][j]), f16_to_f32(k[j]), 0, "k, %d wide: token %d of page %d, element %d",
                         width, row % PER_PAGE, row / PER_PAGE, j % width) ||
                !near_to(f16_to_f32(found->v[i][j]), f16_to_f32(v[j]), 0, "v, %d wide: token %d of page %d, element %d",
                         width, row % PER_PAGE, row / PER_PAGE, j % width))
                return;
        }
    }
}

CU_TestInfo tests[] = {
    {"a token alone attends to itself", attention_1_alone},
    {"no token sees the ones behind it", attention_2_causal},
    {"all weights are right, and the logits Hugging Face's", attention_3_all},
    {"the first sweep has one GPU batch", diagonal_1_first_sweep},
    {"a GPU batch enters every n/K sweeps", diagonal_2_every_n_over_K},
    {"whoever stops early is replaced at once", diagonal_3_replaced_at_once},
    {"without a limit, and up to it, all enter", pages_1_no_limit},
    {"a prompt waits for the pages of its prefill", pages_2_prompts},
    {"a prompt enters when its pages fit in every sweep", pages_3_growth},
    {"equal items meet the shares exactly", diffusion_1_equal_items},
    {"items of any size meet the shares to within one", diffusion_2_any_sizes},
    {"the weights of OPT-30B meet every placement", diffusion_3_opt_30b},
    {"a tier without a share gets nothing", diffusion_4_nothing_is_nothing},
    {"with everything on the GPU the logits are right", sweep_1_all_on_gpu},
    {"the weights may stream", sweep_2_weights_stream},
    {"cache and activations may rest anywhere", sweep_3_all_move},
    {"the CPU attends to a cache on the CPU", delegation_1_cpu},
    {"GPU and CPU attend to their parts of a batch", delegation_2_gpu_and_cpu},
    {"the CPU attends to a cache on disk", delegation_3_disk},
    {"the rows of the link between CPU and GPU", rows_1_gpu_link},
    {"the rows of the disk", rows_2_disk_link},
    {"the row of the processors", rows_3_compute},
    {"a textbook's programs are solved", simplex_1_textbook},
    {"both phases end with the right verdict", simplex_2_two_phases},
    {"the rules are Bland's", simplex_3_rules},
    {"the known cycles end", simplex_4_cycles},
    {"numbers on the grid come back exactly", quant_1_exact},
    {"all numbers come back within half a step", quant_2_half_a_step},
    {"the ends of F16 and numbers that are not finite", quant_3_hard_numbers},
    {"the largest scores are chosen, and the token itself", select_1_largest},
    {"of equal scores the earlier are chosen", select_2_equal},
    {"weights are shares of all tokens", select_3_weights},
    {"one machine takes its sweeps", pipeline_1_one_machine},
    {"machines fill and run", pipeline_2_fast_wire},
    {"a slow wire holds them up", pipeline_3_slow_wire},
    {"later blocks take their rounds", pipeline_4_more_blocks},
    {"a row is normalized", kernel_1_one_row},
    {"rows of all widths, in place too", kernel_2_all_widths},
    {"a large mean does not blur the variance", kernel_3_large_mean},
    {"mini.c: a pivot exchanges two variables", mini_simplex_1_pivot},
    {"mini.c: a textbook's programs are minimized", mini_simplex_2_textbook},
    {"mini.c: the known cycles end, and A.3 has its optimum", mini_simplex_3_cycles},
    {"mini.c: a batch alone on the GPU gets the right tokens", mini_loop_1_one_batch},
    {"mini.c: cache and activations may rest anywhere", mini_loop_2_cache_and_activations},
    {"mini.c: the weights may stream", mini_loop_3_weights},
    {"a reader waits for the writer", order_1_read_after_write},
    {"a writer waits for all who use it", order_2_write_after_use},
    {"whatever may overlap does", order_3_overlap},
    {"no block that was tried is better", search_1_blocks},
    {"what is given stays", search_2_given},
    {"the frontier is not below what was tried", search_3_frontier},
    {"row and zig-zag load so many weights", count_1_blocks},
    {"cache and activations are counted", count_2_cache},
    {"the diagonal loads fewer", count_3_diagonal},
    {"rows are gathered", small_1_gather},
    {"rows are added", small_2_add},
    {"rows are put into pages", small_3_append},
    {"a fourth schedule serves everyone", fourth_1_invariants},
    {"a fourth schedule staggers its sequences", fourth_2_memory},
    {"a fourth schedule is as good as the diagonal", fourth_3_throughput},
    CU_TEST_INFO_NULL,
};
