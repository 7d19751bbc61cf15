/* test_eval.c: scored tasks against the plain forward and against themselves under other policies; texts as windows, lines
 * as contexts and last words; the sums; the shipped model's perplexity against Hugging Face's. That a number that is none
 * ends a scored run is test_schedule.c's. */
#include "tests.h"
#include "written.h"

#define MODEL "models/opt-tiny"
enum { VOCAB = 1024, POSITIONS = 32 };

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Error err;

// ---- the engine -----------------------------------------------------------------------------------------------------

/* Texts of many lengths with </s> in the middle of some, scored from many places on. */
enum { PROMPTS = 6, MOST = 80, HEAD_ROWS_WANTED = 79 + 1 + 1 + 61 + 3 + 2 };
static const int lengths[PROMPTS] = {80, 2, 17, 70, 33, 5};
static Checkpoint *model;
static Task task;
static Policy whole; /* all on the GPU, in one batch */

/* Where prompt i ends and what is given behind it begins: anywhere. */
static void cut(int i, int s) { task.prompts[i].s = s, task.prompts[i].n = lengths[i] - s; }

static void open_task(int which) {
    static const char *const golden[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};
    static const int from[PROMPTS] = {1, 1, 16, 9, 30, 3}, ones[PROMPTS] = {1, 1, 1, 1, 1, 1};
    model = opens(golden[which]);
    task = random_task(PROMPTS, lengths, ones, model->config.vocab, 4);
    task.scored = true, whole = all_gpu(PROMPTS, 1);
    for (int i = 0; i < PROMPTS; i++) {
        task.prompts[i].from = from[i];
        for (int t = 0; t < lengths[i]; t += 13) task.prompts[i].ids[t] = model->config.eos;
        cut(i, lengths[i] - 1);
    }
}

static void close_task(void) {
    free_task(&task);
    checkpoint_close(model);
}

/* All tokens are told, in order, and what has ended is what was given. */
static Rig score(const Policy *policy) {
    Rig r = rig_ran(model, policy, &task, NULL);
    for (int i = 0; i < PROMPTS; i++) {
        const Prompt *p = &task.prompts[i];
        const Answer *a = &r.answer[i];
        CU_ASSERT_EQUAL(a->scored, lengths[i] - p->from);
        CU_ASSERT(a->n == p->n && a->reason == FINISH_LENGTH && !memcmp(a->tokens, p->ids + p->s, a->n * sizeof(int32_t)));
    }
    for (int t = 0; t < NTIERS; t++) CU_ASSERT(r.peak[t] <= r.planned[t]);
    return r;
}

/* Logits of the engine and of the plain forward differ by sums in another order, through F16 roundings of k and v: 2e-3 of
 * the largest. */
TEST(every_score_is_what_the_plain_forward_says) {
    for (int which = 0; which < 2; which++) {
        open_task(which);
        cut(3, 40);
        const int vocab = model->config.vocab;
        float *logits = xcalloc(MOST * vocab, sizeof *logits);
        Rig r = score(&whole);
        for (int i = 0; i < PROMPTS; i++) {
            const Prompt *p = &task.prompts[i];
            ASSERT_OK(reference_forward(logits, model, p->ids, lengths[i] - 1, &err));
            for (int at = p->from; at < lengths[i]; at++) {
                const float *row = logits + (size_t)(at - 1) * vocab;
                double largest = 0, best = -INFINITY, sum = 0;
                for (int v = 0; v < vocab; v++) largest = fmax(largest, fabsf(row[v])), best = fmax(best, row[v]);
                for (int v = 0; v < vocab; v++) sum += exp(row[v] - best);
                const double logp = row[p->ids[at]] - best - log(sum);
                CU_ASSERT(fabs(r.answer[i].logp[at] - logp) <= 2e-3 * largest);
                CU_ASSERT(row[r.answer[i].best[at]] >= best - 2e-3 * largest);
            }
        }
        free(logits);
        rig_close(&r);
        close_task();
    }
}

/* Wherever prompts are cut, and then under every policy. */
TEST(a_prefill_scores_what_token_by_token_scores_under_every_policy) {
    enum { CUTS = 5, POLICIES = 15 };
    static const int cuts[CUTS] = {1, 2, 16, 31, 40};
    static const double placements[][6] = {
        {1, 0, 1, 0, 0, 1}, {0, 0, 0, 0, 0, 0}, {0, 1, 0, 1, .5, .5}, {.5, 0, .5, 0, .3, .3}, {.1, .2, .3, .3, .6, .2}};
    for (int which = 0; which < 2; which++) {
        open_task(which);
        Rig reference = score(&whole);
        for (int run = 0; run < CUTS + POLICIES; run++) {
            Policy p = whole;
            for (int i = 0; i < PROMPTS; i++)
                cut(i, run < CUTS ? imin(cuts[run], lengths[i] - 1) : i % 2 ? lengths[i] - 1 : lengths[i] / 2);
            if (run >= CUTS) { /* each policy on one of the models */
                const int number = 2 * (run - CUTS) + which, way = number % 6, placement = number / 6;
                p = placed(placements[placement], 1 + way % 4, 3);
                p.schedule = way % 3, p.overlap = way != 4;
                p.delegated = (way + placement) % 2, p.table_home = (placement + way) % 3;
            }
            Rig r = score(&p);
            for (int i = 0; i < PROMPTS; i++) {
                const Answer *a = &r.answer[i], *b = &reference.answer[i];
                CU_ASSERT(!memcmp(a->logp, b->logp, lengths[i] * sizeof(float)));
                CU_ASSERT(!memcmp(a->best, b->best, lengths[i] * sizeof(int32_t)));
            }
            rig_close(&r);
        }
        rig_close(&reference);
        close_task();
    }
}

/* Those on the disk, too, which other weights would reach straight from the checkpoint. */
TEST(rounded_weights_give_the_same_scores_on_all_tiers) {
    static const double placements[][6] = {{0, 1, 1, 0, 1, 0}, {0, 0, 1, 0, 1, 0}, {.3, .3, 1, 0, 1, 0}};
    open_task(0);
    Rig exact = score(&whole);
    whole.weight_study = (Quant){.bits = 3, .group = 64};
    Rig reference = score(&whole);
    CU_ASSERT(!rig_same(&reference, &exact));
    for (int i = 0; i < 3; i++) {
        Policy p = placed(placements[i], PROMPTS, 1);
        p.weight_study = whole.weight_study;
        Rig r = score(&p);
        CU_ASSERT(rig_same(&r, &reference));
        rig_close(&r);
    }
    rig_close(&exact), rig_close(&reference);
    close_task();
}

/* All rows or the last, more rows than become logits at a time. On a sim, which has no data, a row is 2 vocab h1 flops. */
TEST(only_the_rows_that_are_wanted_go_through_the_head) {
    const Hardware h = machine_with("mm_flops=1e9");
    double seconds[2];
    open_task(0);
    for (int last = 0; last < 2; last++) {
        for (int i = 0; i < PROMPTS && last; i++) task.prompts[i].from = task.prompts[i].s;
        Rig r = {.model = model, .policy = whole, .task = &task, .sim = &h};
        CU_ASSERT_EQUAL_FATAL(rig_run(&r), 0);
        CU_ASSERT_EQUAL(r.plan->head_rows, last ? PROMPTS : HEAD_ROWS_WANTED);
        CU_ASSERT(last || r.plan->head_chunk == 64);
        CU_ASSERT(r.stats.sweeps == r.plan->sweeps && r.peak[TIER_GPU] <= r.planned[TIER_GPU]);
        for (int i = 0; i < PROMPTS; i++) CU_ASSERT(r.answer[i].done == 1 && !r.answer[i].scored);
        seconds[last] = r.device->now(r.device);
        rig_close(&r);
    }
    close_task();
    CU_ASSERT_DOUBLE_EQUAL(seconds[0] - seconds[1], (HEAD_ROWS_WANTED - PROMPTS) * 2. * 300 * 64 / 1e9, 1e-9);
}

// ---- texts ----------------------------------------------------------------------------------------------------------

static const char *written(const char *text) {
    write_file(suite_dir(), "text", text, strlen(text));
    return in_dir(suite_dir(), "text");
}

static Eval eval_of(bool stepwise) {
    static Tokenizer *tokenizer;
    if (!tokenizer) tokenizer = tokenizer_open("tests/golden/tokenizer", VOCAB, &err);
    ASSERT_OK(!tokenizer);
    return (Eval){.stepwise = stepwise, .tokenizer = tokenizer, .config = &config};
}

/* Asserts that n tokens are this text. */
static void expect_text(const Eval *e, const int32_t *of, int n, const char *expected) {
    size_t len;
    char *text = tokenizer_decode(e->tokenizer, of, n, &len);
    CU_ASSERT_STRING_EQUAL(text, expected);
    free(text);
}

/* 1 + N tokens: </s> and a piece for each letter, as no merge begins with two of these. */
static const char letters[] = "qzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqz";
enum { LETTERS = sizeof letters - 1 };

TEST(a_text_is_cut_into_windows_and_the_tail_is_left_out) {
    static const struct { int window, limit; } cases[] = {{10, 0}, {10, 2}, {0, 0}, {2, 0}};
    for (size_t c = 0; c < 2 * COUNT(cases); c++) {
        const bool stepwise = c % 2;
        const int window = cases[c / 2].window, limit = cases[c / 2].limit, of = window ? window : POSITIONS;
        Eval e = eval_of(stepwise);
        e.window = window, e.limit = limit;
        ASSERT_OK(eval_text(&e, written(letters), &err));
        CU_ASSERT_EQUAL(e.task.count, limit ? limit : (LETTERS + 1) / of);
        CU_ASSERT(e.window == of && e.task.scored && e.tokens == (of - 1) * e.task.count);
        CU_ASSERT_EQUAL(e.tokens + e.unscored, LETTERS);
        for (int i = 0; i < e.task.count; i++) {
            const Prompt *p = &e.task.prompts[i];
            char text[POSITIONS + 1] = "";
            CU_ASSERT(p->s == (stepwise ? 1 : of - 1) && p->n == of - p->s && p->from == 1);
            CU_ASSERT(i || p->ids[0] == config.eos);
            memcpy(text, letters + imax(i * of - 1, 0), of - !i); /* </s> is no text */
            expect_text(&e, p->ids, of, text);
        }
        eval_free(&e);
    }
}

TEST(a_text_shorter_than_a_window_is_one) {
    Eval e = eval_of(false);
    ASSERT_OK(eval_text(&e, written("qzqz\xC3\xA9"), &err));
    CU_ASSERT(e.task.count == 1 && e.window == 6 && e.tokens == 5 && e.unscored == 0 && e.bytes == 6);
    eval_free(&e);
}

TEST(a_text_that_cannot_be_scored_is_refused) {
    static const struct {
        int window, code;
        const char *text, *says;
    } cases[] = {{0, EXIT_FAILED, "", "/text: there is no text"},
                 {0, EXIT_FAILED, "caf\xe9", "/text: text: invalid UTF-8"},
                 {POSITIONS + 1, EXIT_USAGE, letters, "--window 33: expected at most 32"}};
    for (size_t c = 0; c < COUNT(cases); c++) {
        Eval e = eval_of(false);
        e.window = cases[c].window;
        CU_ASSERT_EQUAL(eval_text(&e, written(cases[c].text), &err), -1);
        said(&err, cases[c].code, cases[c].says);
        eval_free(&e);
    }
}

// ---- last words -----------------------------------------------------------------------------------------------------

TEST(the_last_word_and_the_white_space_before_it_are_scored) {
    static const char *const cases[][3] = {
        {"{\"text\": \"The next layer\"}", "The next", " layer"},
        {"{\"text\": \"The next layer \\n\", \"domain\": 1}", "The next", " layer"},
        {"{\"text\": \"a  b\"}", "a", "  b"},
        {"{\"text\": \"The disk.\\n\\n\\\"Why?\\\"\"}", "The disk.", "\n\n\"Why?\""},
        {"{\"text\": \" one two\"}", " one", " two"},
        {"{\"text\": \"one\\u000btwo\\u000b\\f\"}", "one", "\vtwo"},
        {"{\"text\": \"one\\ftwo\\r\\t\"}", "one", "\ftwo"},
    };
    for (size_t c = 0; c < 2 * COUNT(cases); c++) {
        const bool stepwise = c % 2;
        Eval e = eval_of(stepwise);
        ASSERT_OK(eval_lines(&e, written(cases[c / 2][0]), &err));
        CU_ASSERT_FATAL(e.task.count == 1 && e.task.scored);
        const Prompt *p = &e.task.prompts[0];
        expect_text(&e, p->ids, p->from, cases[c / 2][1]);
        expect_text(&e, p->ids + p->from, p->s + p->n - p->from, cases[c / 2][2]);
        CU_ASSERT(p->ids[0] == config.eos && (stepwise ? p->s == p->from - 1 : p->n == 1));
        CU_ASSERT_EQUAL(e.bytes, strlen(cases[c / 2][2]));
        eval_free(&e);
    }
}

/* Of 44 letters and a word, the last positions' worth stays, with </s> before it. */
TEST(a_line_too_long_loses_its_beginning) {
    char line[200];
    snprintf(line, sizeof line, "{\"text\": \"%s zq\"}\n\n{\"text\": \"q z\"}", letters);
    Eval e = eval_of(true);
    ASSERT_OK(eval_lines(&e, written(line), &err));
    CU_ASSERT_EQUAL_FATAL(e.task.count, 2);
    const Prompt *p = &e.task.prompts[0];
    CU_ASSERT(p->s + p->n == POSITIONS + 1 && p->ids[0] == config.eos);
    expect_text(&e, p->ids, p->from, letters + LETTERS - (p->from - 1)); /* a letter a token, behind </s> */
    expect_text(&e, p->ids + p->from, p->s + p->n - p->from, " zq");
    eval_free(&e);
}

TEST(a_bad_line_is_named) {
    enum { LONG = 1000000 };
    char *line = xcalloc(LONG + 30, 1);
    strcpy(memset(stpcpy(line, "{\"text\": \"a "), 'q', LONG) + LONG, "\"}");
    const char *const bad[][2] = {
        {"{\"text\": \"one two\"}\n{\"text\": \"one\"}\n", "/text: line 2: \"text\" has no two words"},
        {"{\"text\": \"one two\"}\n\n{\"text\": \" one \"}\n", "/text: line 3: \"text\" has no two words"},
        {"{\"text\": \"\"}", "/text: line 1: \"text\" has no two words"},
        {"{\"text\": 5}", "/text: line 1: \"text\" is 5; expected a string"},
        {"[\"one two\"]", "/text: line 1: holds no JSON object"},
        {"{\"text\": \"a qzqzqzqzqzqzqzqzqzqzqzqzqzqzqzq\"}",
         "/text: line 1: the last word has 32 tokens and the model takes 31"},
        {line, "/text: line 1: the last word has 1000001 bytes"}, /* is not encoded, which would take memory */
        {"", "/text: no lines"},
    };
    for (size_t i = 0; i < COUNT(bad); i++) {
        Eval e = eval_of(false);
        CU_ASSERT_EQUAL(eval_lines(&e, written(bad[i][0]), &err), -1);
        CU_ASSERT(!strncmp(err.text, suite_dir(), strlen(suite_dir())));
        said(&err, EXIT_FAILED, bad[i][1]);
        eval_free(&e);
    }
    free(line);
}

/* The first token, before which there is none, is not scored. A last word needs one token before it, then. */
TEST(a_text_may_begin_without_a_token_in_front) {
    Tokenizer *none = tokenizer_open("tests/golden/forms/no-bos", 330, &err);
    ASSERT_OK(!none);
    Eval e = eval_of(false);
    e.tokenizer = none;
    ASSERT_OK(eval_text(&e, written("qzqz"), &err));
    CU_ASSERT(e.task.count == 1 && e.window == 4 && e.tokens == 3 && e.unscored == 0 && e.bytes == 3);
    eval_free(&e);
    char line[100];
    snprintf(line, sizeof line, "{\"text\": \"q z\"}\n{\"text\": \"%s zq\"}", letters);
    e = eval_of(false);
    e.tokenizer = none;
    ASSERT_OK(eval_lines(&e, written(line), &err));
    CU_ASSERT_EQUAL_FATAL(e.task.count, 2);
    const Prompt *p = e.task.prompts;
    expect_text(&e, p[0].ids, p[0].from, "q");
    expect_text(&e, p[0].ids + 1, p[0].s + p[0].n - 1, " z");
    CU_ASSERT(p[0].from == 1 && p[1].s + p[1].n == POSITIONS + 1);
    expect_text(&e, p[1].ids, p[1].from, letters + LETTERS - p[1].from);
    eval_free(&e);
    tokenizer_close(none);
}

TEST(a_last_word_within_an_added_piece_is_refused) {
    static const char more[] = "{\" of York\": 320}", *const files[] = {"vocab.json", "merges.txt"};
    const char *dir = temp_dir();
    for (size_t f = 0; f < COUNT(files); f++) copy_file("tests/golden/forms/published", dir, files[f]);
    write_file(dir, "added_tokens.json", more, strlen(more));
    Tokenizer *t = tokenizer_open(dir, 330, &err);
    ASSERT_OK(!t);
    Eval e = eval_of(false);
    e.tokenizer = t;
    CU_ASSERT_EQUAL(eval_lines(&e, written("{\"text\": \"a of York\"}"), &err), -1);
    said(&err, EXIT_FAILED, "/text: line 1: the last word is a part of an added piece that begins before it");
    eval_free(&e);
    tokenizer_close(t);
}

/* Of three words, of 2, 3 and 2 tokens, the first alone is right. Together they are worth 1 + 4 + 3 bits, here as if of
 * twice as many bytes. */
TEST(results_are_as_by_hand) {
    static const struct {
        int word;
        float bits;
        bool right;
    } told[] = {{2, 1, true}, {2, 2, false}, {1, .5f, true}, {1, 3, false}, {1, .5f, true}, {0, .5f, true}, {0, .5f, true}};
    int at[] = {2, 2, 2}; /* behind </s> and a letter */
    Eval e = eval_of(false);
    e.limit = 3;
    ASSERT_OK(eval_lines(&e, written("{\"text\": \"q z\"}\n{\"text\": \"q zq\"}\n{\"text\": \"z q\"}\nnot read"), &err));
    CU_ASSERT_EQUAL(e.tokens, COUNT(told));
    Listener listener = eval_listener(&e);
    for (size_t i = 0; i < COUNT(told); i++) {
        const int word = told[i].word, place = at[word]++;
        const int32_t id = e.task.prompts[word].ids[place];
        listener.scored(listener.ctx, word, place, -told[i].bits * logf(2), told[i].right ? id : 0);
    }
    e.bytes = 16;
    const EvalResult r = eval_result(&e);
    CU_ASSERT_DOUBLE_EQUAL(r.bits_per_byte, .5, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.nll, 8 * log(2) / 7, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.perplexity, pow(2, 8 / 7.), 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.accuracy, 1 / 3., 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(r.word_perplexity, pow(2, 8 / 3.), 1e-5);
    eval_free(&e);
}

// ---- the shipped model ----------------------------------------------------------------------------------------------

/* scripts/make_golden.py --perplexity (torch 2.15.0, transformers 5.23.0, float32) on the same windows. K and V in F16 are
 * worth 1e-6. */
TEST(the_shipped_models_perplexity_is_that_of_hugging_face) {
    static const struct {
        int window, limit;
        double perplexity;
    } cases[] = {{512, 4, 26.212540887577653}, {128, 32, 27.785140819042184}};
    Checkpoint *checkpoint = opens(MODEL);
    Tokenizer *own = tokenizer_open(MODEL, checkpoint->config.vocab, &err);
    ASSERT_OK(!own);
    for (int c = 0; c < 2; c++) {
        Eval e = {.tokenizer = own, .config = &checkpoint->config, .window = cases[c].window, .limit = cases[c].limit};
        ASSERT_OK(eval_text(&e, MODEL "/stories.txt", &err));
        Rig r = {.model = checkpoint, .policy = all_gpu(6, 1), .task = &e.task, .hears = eval_listener(&e)};
        CU_ASSERT_EQUAL(rig_run(&r), 0);
        rig_close(&r);
        const double ratio = eval_result(&e).perplexity / cases[c].perplexity;
        CU_ASSERT(fabs(ratio - 1) <= 1e-3);
        eval_free(&e);
    }
    tokenizer_close(own);
    checkpoint_close(checkpoint);
}
