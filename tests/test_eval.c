/* test_eval.c: scored tasks against the plain forward and against themselves under other policies; texts as windows, lines
 * as prompts with what is scored behind them; the sums; the shipped model's scores against the plain forward's, and its
 * perplexity against Hugging Face's. scripts/lm_eval_check.py compares them with lm-evaluation-harness. That a number that
 * is none ends a scored run is test_schedule.c's. */
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
    return (Eval){.job = {.tokenizer = tokenizer,
                          .config = &config,
                          .strict = true,
                          .format = "jsonl",
                          .stepwise = stepwise,
                          .task.scored = true}};
}

/* Reads what this text has: in windows, or in lines. */
static int in_windows(Eval *e, const char *text) {
    const int status = eval_text(e, written(text), &err);
    job_rest(&e->job);
    return status;
}

static int in_lines(Job *job, const char *text) {
    const int status = job_read(job, written(text), &err);
    if (!status) job_rest(job);
    return status;
}

/* Asserts that n tokens are this text. */
static void expect_text(const Job *job, const int32_t *of, int n, const char *expected) {
    size_t len;
    char *text = tokenizer_decode(job->tokenizer, of, n, &len);
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
        e.window = window, e.job.limit = limit;
        ASSERT_OK(in_windows(&e, letters));
        const Task *cut = &e.job.task;
        const long tokens = eval_result(&e.job).tokens;
        CU_ASSERT_EQUAL(cut->count, limit ? limit : (LETTERS + 1) / of);
        CU_ASSERT(e.window == of && tokens == (of - 1) * cut->count);
        CU_ASSERT_EQUAL(tokens + e.unscored, LETTERS);
        for (int i = 0; i < cut->count; i++) {
            const Prompt *p = &cut->prompts[i];
            char text[POSITIONS + 1] = "";
            CU_ASSERT(p->s == (stepwise ? 1 : of - 1) && p->n == of - p->s && p->from == 1);
            CU_ASSERT(i || p->ids[0] == config.eos);
            memcpy(text, letters + imax(i * of - 1, 0), of - !i); /* </s> is no text */
            expect_text(&e.job, p->ids, of, text);
        }
        job_free(&e.job);
    }
}

TEST(a_text_shorter_than_a_window_is_one) {
    Eval e = eval_of(false);
    ASSERT_OK(in_windows(&e, "qzqz\xC3\xA9"));
    e.job.request[0].score.nll = 12 * log(2); /* of 6 bytes */
    const EvalResult r = eval_result(&e.job);
    CU_ASSERT(e.job.count == 1 && e.window == 6 && r.tokens == 5 && e.unscored == 0);
    CU_ASSERT_DOUBLE_EQUAL(r.bits_per_byte, 2, 1e-12);
    job_free(&e.job);
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
        job_free(&e.job);
    }
}

// ---- lines ----------------------------------------------------------------------------------------------------------

TEST(a_completion_or_the_last_word_is_scored_with_the_white_space_before_it) {
    static const struct {
        const char *line, *before, *scored;
    } cases[] = {
        {"{\"text\": \"The next layer\"}", "The next", " layer"},
        {"{\"text\": \"The next layer \\n\", \"domain\": 1}", "The next", " layer"},
        {"{\"text\": \"a  b\"}", "a", "  b"},
        {"{\"text\": \"The disk.\\n\\n\\\"Why?\\\"\"}", "The disk.", "\n\n\"Why?\""},
        {"{\"text\": \" one two\"}", " one", " two"},
        {"{\"text\": \"one\\u000btwo\\u000b\\f\"}", "one", "\vtwo"},
        {"{\"text\": \"one\\ftwo\\r\\t\"}", "one", "\ftwo"},
        {"{\"prompt\": \"The next\", \"completion\": \" layer of it \"}", "The next", " layer of it "},
        {"{\"prompt\": \"The next \\n \", \"completion\": \"layer\"}", "The next", " \n layer"},
        {"{\"prompt\": \"caf\\u00e9\\u00a0\\u3000\\u2028\", \"completion\": \"\\u00e9\"}", "caf\xC3\xA9",
         "\xC2\xA0\xE3\x80\x80\xE2\x80\xA8\xC3\xA9"},
        {"{\"prompt\": \"\", \"completion\": \"layer\"}", "", "layer"},
        {"{\"prompt\": \" \", \"completion\": \"layer\"}", "", " layer"},
        {"{\"prompt\": \"layer \", \"completion\": \"\"}", "layer", " "},
        {"{\"prompt\": \"</s>\", \"completion\": \"</s>q\", \"text\": \"not this\"}", "", "q"}, /* </s> is no text */
    };
    for (size_t c = 0; c < 2 * COUNT(cases); c++) {
        const bool stepwise = c % 2;
        Job job = eval_of(stepwise).job;
        ASSERT_OK(in_lines(&job, cases[c / 2].line));
        CU_ASSERT_FATAL(job.task.count == 1 && job.task.scored);
        const Prompt *p = &job.task.prompts[0];
        expect_text(&job, p->ids, p->from, cases[c / 2].before);
        expect_text(&job, p->ids + p->from, p->s + p->n - p->from, cases[c / 2].scored);
        CU_ASSERT(p->ids[0] == config.eos && (stepwise ? p->s == imax(p->from - 1, 1) : p->n == 1));
        CU_ASSERT(job.request[0].n == p->s + p->n - p->from && !job.request[0].cut);
        job_free(&job);
    }
}

/* The prompt has the tokens that it has alone, though together its last letter and the next would be one. */
TEST(a_completion_has_the_tokens_behind_as_many_as_the_prompt_has_alone) {
    Job job = eval_of(false).job;
    int32_t *alone, *both;
    ASSERT_OK(in_lines(&job, "{\"prompt\": \"a lay\", \"completion\": \"er of it\"}"));
    const int s = text_encode(&alone, "a lay", 5, job.tokenizer, &err),
              n = text_encode(&both, "a layer of it", 13, job.tokenizer, &err);
    const Request *r = &job.request[0];
    CU_ASSERT_FATAL(r->s == s && r->n == n - s);
    CU_ASSERT(memcmp(alone, both, (size_t)s * sizeof *alone) != 0);
    CU_ASSERT(!memcmp(r->ids, alone, (size_t)s * sizeof *alone) &&
              !memcmp(r->ids + s, both + s, (size_t)(n - s) * sizeof *both));
    free(alone), free(both);
    job_free(&job);
}

TEST(two_jobs_are_the_same_only_if_all_their_tokens_are) {
    static const char *const lines[] = {
        "{\"prompt\": \"q\", \"completion\": \"zq\"}", "{\"prompt\": \"q\", \"completion\": \"zz\"}",
        "{\"prompt\": \"z\", \"completion\": \"zq\"}", "{\"prompt\": \"qz\", \"completion\": \"q\"}"};
    uint64_t digest[COUNT(lines)];
    for (size_t i = 0; i < COUNT(lines); i++) {
        Job job = eval_of(false).job;
        ASSERT_OK(in_lines(&job, lines[i]));
        digest[i] = job.digest;
        for (size_t before = 0; before < i; before++) CU_ASSERT_NOT_EQUAL(digest[i], digest[before]);
        job_free(&job);
    }
}

/* Of 44 letters and a word, each letter a token, the last positions' worth stays. */
TEST(a_line_too_long_loses_its_beginning) {
    static const char *const forms[] = {"{\"text\": \"%s zq\"}\n\n{\"text\": \"q z\"}",
                                        "{\"prompt\": \"%s\", \"completion\": \" zq\"}\n\n{\"text\": \"q z\"}"};
    for (size_t f = 0; f < COUNT(forms); f++) {
        char line[200];
        snprintf(line, sizeof line, forms[f], letters);
        Job job = eval_of(true).job;
        ASSERT_OK(in_lines(&job, line));
        CU_ASSERT_EQUAL_FATAL(job.task.count, 2);
        const Prompt *p = &job.task.prompts[0];
        CU_ASSERT(p->s + p->n == POSITIONS + 1 && job.request[0].cut && !job.request[1].cut);
        expect_text(&job, p->ids, p->from, letters + LETTERS - p->from);
        expect_text(&job, p->ids + p->from, p->s + p->n - p->from, " zq");
        job_free(&job);
    }
}

/* Of so many letters behind </s> and one letter, each is scored in one window. The first windows have one token of context,
 * the last is full. One token more than positions fits, since the last takes none. */
TEST(a_completion_longer_than_the_model_is_scored_in_windows) {
    static const struct {
        int letters, windows, context; /* of the last window */
    } cases[] = {{POSITIONS - 1, 1, 2},         {POSITIONS, 1, 1},
                 {POSITIONS + 1, 2, POSITIONS}, {LETTERS - 1, 2, 2 * POSITIONS + 2 - LETTERS},
                 {2 * POSITIONS, 2, 1},         {2 * POSITIONS + 5, 3, POSITIONS - 4}};
    char all[3 * POSITIONS];
    for (int i = 0; i < 3 * POSITIONS; i++) all[i] = "qz"[i % 2];
    for (size_t c = 0; c < COUNT(cases); c++) {
        char line[200];
        const int n = cases[c].letters;
        snprintf(line, sizeof line, "{\"id\": 7, \"prompt\": \"q\", \"completion\": \"%.*s\"}\n{\"text\": \"q z\"}", n,
                 all + 1);
        Job job = eval_of(false).job;
        ASSERT_OK(in_lines(&job, line));
        CU_ASSERT_EQUAL_FATAL(job.task.count, cases[c].windows + 1);
        int scored = 0;
        for (int w = 0; w < cases[c].windows; w++) {
            const Request *r = &job.request[w];
            const bool last = w == cases[c].windows - 1;
            CU_ASSERT(r->s + r->n <= POSITIONS + 1 && r->part == !last && !r->line && !r->id == !last);
            CU_ASSERT_EQUAL(r->s, last ? cases[c].context : 1);
            if (w || cases[c].windows > 1) CU_ASSERT(r->s + r->n == POSITIONS + 1);
            char text[2 * POSITIONS] = "";
            memcpy(text, all + 1 + scored, (size_t)r->n);
            expect_text(&job, r->ids + r->s, r->n, text);
            memcpy(text, all + imax(1 + scored - r->s, 0), (size_t)imin(r->s, 1 + scored)),
                text[imin(r->s, 1 + scored)] = 0;
            expect_text(&job, r->ids, r->s, text);
            CU_ASSERT_EQUAL(r->cut, last && n >= POSITIONS);
            scored += r->n;
        }
        CU_ASSERT(scored == n && job.request[job.count - 1].line == 1 && !strcmp(job.request[job.count - 1].id, "1"));
        job_free(&job);
    }
}

TEST(a_bad_line_is_named) {
    static const char *const bad[][2] = {
        {"{\"text\": \"one two\"}\n{\"text\": \"one\"}\n", "/text line 2: \"text\" has no two words"},
        {"{\"text\": \"one two\"}\n\n{\"text\": \" one \"}\n", "/text line 3: \"text\" has no two words"},
        {"{\"text\": \"\"}", "/text line 1: \"text\" has no two words"},
        {"{\"text\": 5}", "/text line 1: \"text\" is 5; expected a string"},
        {"[\"one two\"]", "/text line 1: holds no JSON object"},
        {"one two", "/text line 1: byte 0: found 'one two'; expected JSON"},
        {"{\"prompt\": \"one\"}",
         "/text line 1: \"text\" is nothing; expected a string, or strings \"prompt\" and \"completion\""},
        {"{\"prompt\": \"one\", \"completion\": [2]}", "/text line 1: \"text\" is nothing; expected"},
        {"{\"prompt\": \"one\", \"completion\": \"\"}", "/text line 1: what is to be scored has no tokens of its own"},
        {"{\"prompt\": \"\", \"completion\": \"\"}", "/text line 1: what is to be scored has no tokens of its own"},
        {"{\"id\": 1, \"text\": \"a b\"}\n{\"id\": 1, \"text\": \"a b\"}", "/text line 2: the id 1 is that of line 1"},
    };
    for (size_t i = 0; i < COUNT(bad); i++) {
        Job job = eval_of(false).job;
        CU_ASSERT_EQUAL(in_lines(&job, bad[i][0]), -1);
        CU_ASSERT(!strncmp(err.text, suite_dir(), strlen(suite_dir())));
        said(&err, EXIT_FAILED, bad[i][1]);
        job_free(&job);
    }
}

/* The first token, before which there is none, is not scored. A last word needs one token before it, then. */
TEST(a_text_may_begin_without_a_token_in_front) {
    Tokenizer *none = tokenizer_open("tests/golden/forms/no-bos", 330, &err);
    ASSERT_OK(!none);
    Eval e = eval_of(false);
    e.job.tokenizer = none;
    ASSERT_OK(in_windows(&e, "qzqz"));
    CU_ASSERT(e.job.count == 1 && e.window == 4 && eval_result(&e.job).tokens == 3 && e.unscored == 0);
    job_free(&e.job);
    char line[100];
    snprintf(line, sizeof line, "{\"text\": \"q z\"}\n{\"text\": \"%s zq\"}", letters);
    Job job = eval_of(false).job;
    job.tokenizer = none;
    ASSERT_OK(in_lines(&job, line));
    CU_ASSERT_EQUAL_FATAL(job.task.count, 2);
    const Prompt *p = job.task.prompts;
    expect_text(&job, p[0].ids, p[0].from, "q");
    expect_text(&job, p[0].ids + 1, p[0].s + p[0].n - 1, " z");
    CU_ASSERT(p[0].from == 1 && p[1].s + p[1].n == POSITIONS + 1);
    expect_text(&job, p[1].ids, p[1].from, letters + LETTERS - p[1].from);
    job_free(&job);
    job = eval_of(false).job;
    job.tokenizer = none;
    CU_ASSERT_EQUAL(in_lines(&job, "{\"prompt\": \"\", \"completion\": \"q\"}"), -1);
    said(&err, EXIT_FAILED, "line 1: the prompt has no tokens; write one, since this model puts none in front");
    job_free(&job);
    tokenizer_close(none);
}

TEST(a_last_word_within_an_added_piece_is_refused) {
    static const char more[] = "{\" of York\": 320}", *const files[] = {"vocab.json", "merges.txt"};
    const char *dir = temp_dir();
    for (size_t f = 0; f < COUNT(files); f++) copy_file("tests/golden/forms/published", dir, files[f]);
    write_file(dir, "added_tokens.json", more, strlen(more));
    Tokenizer *t = tokenizer_open(dir, 330, &err);
    ASSERT_OK(!t);
    Job job = eval_of(false).job;
    job.tokenizer = t;
    CU_ASSERT_EQUAL(in_lines(&job, "{\"text\": \"a of York\"}"), -1);
    said(&err, EXIT_FAILED, "/text line 1: what is to be scored has no tokens of its own");
    job_free(&job);
    tokenizer_close(t);
}

/* Of three words, of 2, 3 and 2 tokens, the first alone is right. Together they are worth 1 + 4 + 3 bits; they have 2, 3
 * and 2 bytes. */
TEST(results_are_as_by_hand) {
    static const struct {
        int word;
        float bits;
        bool right;
    } told[] = {{2, 1, true}, {2, 2, false}, {1, .5f, true}, {1, 3, false}, {1, .5f, true}, {0, .5f, true}, {0, .5f, true}};
    int at[] = {2, 2, 2}; /* behind </s> and a letter */
    Job job = eval_of(false).job;
    const Options options = {.limit = 0};
    job.limit = 3;
    ASSERT_OK(in_lines(&job, "{\"text\": \"q z\"}\n{\"text\": \"q zq\"}\n{\"text\": \"z q\"}\nnot read"));
    Completions *completions = completions_follow(&job, &options);
    Listener listener = completions_listener(completions);
    CU_ASSERT_PTR_NULL(listener.token);
    for (size_t i = 0; i < COUNT(told); i++) {
        const int word = told[i].word, place = at[word]++;
        const int32_t id = job.task.prompts[word].ids[place];
        CU_ASSERT(!job.request[word].ended);
        listener.scored(listener.ctx, word, place, -told[i].bits * logf(2), told[i].right ? id : 0);
    }
    const EvalResult r = eval_result(&job);
    CU_ASSERT(r.tokens == COUNT(told) && r.lines == 3 && job.request[0].ended && job.request[1].ended &&
              job.request[2].ended);
    CU_ASSERT_DOUBLE_EQUAL(r.bits_per_byte, 8 / 7., 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.nll, 8 * log(2) / 7, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.perplexity, pow(2, 8 / 7.), 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.accuracy, 1 / 3., 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(r.word_perplexity, pow(2, 8 / 3.), 1e-5);
    completions_free(completions);
    job_free(&job);
}

// ---- the shipped model ----------------------------------------------------------------------------------------------

/* Scores a job under a policy. */
static void score_job(Job *job, const Checkpoint *of, const Policy *policy) {
    const Options options = {.limit = 0};
    Completions *completions = completions_follow(job, &options);
    Rig r = {.model = of, .policy = *policy, .task = &job->task, .hears = completions_listener(completions)};
    CU_ASSERT_EQUAL(rig_run(&r), 0);
    rig_close(&r);
    completions_free(completions);
}

/* Returns the sum for the tokens ids[from..n) by the plain forward, each in the window of its turn, and whether all are the
 * greedy choices. */
static Score plain_score(const Checkpoint *of, const int32_t *ids, int from, int n) {
    const int vocab = of->config.vocab, most = of->config.max_pos;
    Score sum = {0};
    for (int begin = from, end; begin < n; begin = end) {
        end = imin(begin + most, n);
        const int first = imax(end - 1 - most, 0);
        float *logits = xcalloc((size_t)(end - first) * vocab, sizeof *logits);
        ASSERT_OK(reference_forward(logits, of, ids + first, end - 1 - first, &err));
        for (int at = begin; at < end; at++) {
            const float *row = logits + (size_t)(at - 1 - first) * vocab;
            double total = 0;
            int best = 0;
            for (int v = 0; v < vocab; v++) best = row[v] > row[best] ? v : best;
            for (int v = 0; v < vocab; v++) total += exp((double)row[v] - row[best]);
            sum.nll -= (double)row[ids[at]] - row[best] - log(total);
            sum.missed |= best != ids[at];
            sum.tokens++;
        }
        free(logits);
    }
    return sum;
}

/* The prompt of the fifth line is longer than the positions that the model has here, and so is the completion of the last.
 * A score is rounded as the K and V are that it comes from: 1e-4 a token. */
TEST(the_score_of_a_line_is_a_sum_of_the_plain_forward) {
    enum { LINES = 6, WORDS = 60 };
    static const char *const prompts[] =
        {"Once upon a time", "Once upon a time, there ", "Once upon a hippo", "", "", "Tom"},
                             *const completions[] = {", there was a little girl", "was", "potamus", "The dog", " ran", ""};
    Checkpoint *checkpoint = opens(MODEL);
    Tokenizer *own = tokenizer_open(MODEL, checkpoint->config.vocab, &err);
    ASSERT_OK(!own);
    checkpoint->config.max_pos = 48;
    char words[5 * WORDS] = "", lines[LINES * 100 + 2 * sizeof words], *end = lines;
    for (int i = 0; i < WORDS; i++) strcat(words, i % 7 ? " dog" : " and");
    for (int i = 0; i < LINES; i++)
        end += sprintf(end, "{\"prompt\": \"%s%s\", \"completion\": \"%s%s\"}\n", prompts[i], i == 4 ? words : "",
                       completions[i], i == 5 ? words : "");
    const Policy policies[] = {all_gpu(7, 1), placed((double[]){.5, 0, .3, .3, .3, .3}, 2, 2)};
    Job jobs[COUNT(policies)];
    for (size_t j = 0; j < COUNT(policies); j++) {
        jobs[j] = (Job){
            .tokenizer = own, .config = &checkpoint->config, .format = "jsonl", .task.scored = true, .stepwise = j > 0};
        ASSERT_OK(in_lines(&jobs[j], lines));
        CU_ASSERT_EQUAL_FATAL(jobs[j].count, LINES + 1);
        score_job(&jobs[j], checkpoint, &policies[j]);
    }
    for (int i = 0, request = 0; i < LINES; i++, request++) {
        int32_t *ids, *alone;
        request += i == LINES - 1; /* the first window of the last line */
        char *text = xcalloc(sizeof lines, 1);
        const int before = sprintf(text, "%s%s", prompts[i], i == 4 ? words : "") - (i == 1); /* without its blank */
        const int from = text_encode(&alone, text, (size_t)before, own, &err);
        strcat(strcat(text, completions[i]), i == 5 ? words : "");
        const int n = text_encode(&ids, text, strlen(text), own, &err);
        memcpy(ids, alone, (size_t)from * sizeof *ids);
        const Score plain = plain_score(checkpoint, ids, from, n);
        for (size_t j = 0; j < COUNT(policies); j++) {
            const Score score = line_score(&jobs[j], &jobs[j].request[request]);
            CU_ASSERT(score.tokens == plain.tokens && score.missed == plain.missed);
            /* Each instruction set adds in an order of its own, so that other numbers of K and V round up in F16: measured
             * 2.2e-5 of the sum and 3e-7 a token at most (AVX-512, AVX2, SSE2). */
            CU_ASSERT(fabs(score.nll - plain.nll) <= 1e-5 * plain.tokens + 4e-5 * fabs(plain.nll));
        }
        free(ids), free(alone), free(text);
    }
    for (size_t j = 0; j < COUNT(policies); j++) job_free(&jobs[j]);
    tokenizer_close(own);
    checkpoint_close(checkpoint);
}

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
        Eval e = {.job = {.tokenizer = own, .config = &checkpoint->config, .limit = cases[c].limit, .task.scored = true},
                  .window = cases[c].window};
        const Policy policy = all_gpu(6, 1);
        ASSERT_OK(eval_text(&e, MODEL "/stories.txt", &err));
        job_rest(&e.job);
        score_job(&e.job, checkpoint, &policy);
        const double ratio = eval_result(&e.job).perplexity / cases[c].perplexity;
        CU_ASSERT(fabs(ratio - 1) <= 1e-3);
        job_free(&e.job);
    }
    tokenizer_close(own);
    checkpoint_close(checkpoint);
}
