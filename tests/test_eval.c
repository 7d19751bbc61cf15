/* test_eval.c: scored tasks against the plain forward and against themselves under other policies; texts as windows, lines
 * as contexts and last words; the sums; the shipped model's perplexity against Hugging Face's. */
#include "golden.h"

#define PIECES "tests/golden/tokenizer"
#define MODEL "models/opt-tiny"
enum { VOCAB = 1024, POSITIONS = 32 };

static const OptConfig config = {.vocab = VOCAB, .max_pos = POSITIONS, .eos = 2};
static Tokenizer *tokenizer;
static Error err;

static void open_pieces(void) {
    if (!tokenizer) tokenizer = tokenizer_open(PIECES, VOCAB, &err);
    if (!tokenizer) CU_FAIL_FATAL(err.text);
}

// ---- the engine ----------------------------------------------------------------------------------------------------

enum { PROMPTS = 6, MOST = 80 };

typedef struct {
    float logp[PROMPTS][MOST];
    int32_t best[PROMPTS][MOST];
    int told[PROMPTS];
    const Task *task;
    bool in_order, given; /* tokens are told one after another; what `done` has is what was given */
} Scores;

static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Scores *s = ctx;
    s->in_order = s->in_order && at == s->task->prompts[prompt].from + s->told[prompt]++;
    s->logp[prompt][at] = logp, s->best[prompt][at] = best;
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *e) {
    Scores *s = ctx;
    const Prompt *p = &s->task->prompts[prompt];
    (void)e;
    s->given = s->given && n == p->n && reason == FINISH_LENGTH && !memcmp(tokens, p->ids + p->s, n * sizeof *tokens);
    return 0;
}

static int run(const Listener *listener, const Checkpoint *checkpoint, const Policy *policy, const Task *task) {
    RunStats stats;
    Plan *plan = plan_make(checkpoint, policy, task, F32, &err);
    Device *device = plan ? device_open(NULL, plan, checkpoint, temp_dir(), &err) : NULL;
    int status = -1;
    if (device && !weights_load(plan, checkpoint, device, &err))
        status = schedule_run(plan, task, device, listener, &stats, &err);
    for (int t = 0; device && t < NTIERS; t++) CU_ASSERT(device->peak[t] <= plan->total[t]);
    if (device) device->close(device);
    plan_free(plan);
    return status;
}

static Scores score(const Checkpoint *checkpoint, const Policy *policy, const Task *task) {
    Scores s = {.task = task, .in_order = true, .given = true};
    ASSERT_OK(run(&(Listener){.ctx = &s, .done = on_done, .scored = on_scored}, checkpoint, policy, task));
    CU_ASSERT(s.in_order && s.given);
    for (int i = 0; i < task->count; i++) {
        const Prompt *p = &task->prompts[i];
        CU_ASSERT_EQUAL(s.told[i], p->s + p->n - p->from);
    }
    return s;
}

static int32_t ids[PROMPTS][MOST];
static Prompt prompts[PROMPTS];
static const Task scored = {.prompts = prompts, .count = PROMPTS, .scored = true};

/* Texts of many lengths with </s> in the middle of some, scored from many places on. */
static void make_task(const OptConfig *c, uint64_t seed) {
    static const int tokens[PROMPTS] = {80, 2, 17, 70, 33, 5}, from[PROMPTS] = {1, 1, 16, 9, 30, 3};
    for (int i = 0; i < PROMPTS; i++) {
        for (int t = 0; t < tokens[i]; t++)
            ids[i][t] = t && t % 13 ? (int32_t)((test_random(&seed) + 1) / 2 * (c->vocab - 1)) : c->eos;
        prompts[i] = (Prompt){.ids = ids[i], .s = tokens[i] - 1, .n = 1, .from = from[i]};
    }
}

/* Where prompt i ends and what is given behind it begins: anywhere. */
static void cut(int i, int s) {
    int tokens = prompts[i].s + prompts[i].n;
    prompts[i].s = s, prompts[i].n = tokens - s;
}

static const char *const golden[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};

static Checkpoint *open_golden(int which) {
    Checkpoint *checkpoint = checkpoint_open(golden[which], &err);
    if (!checkpoint) CU_FAIL_FATAL(err.text);
    return checkpoint;
}

static double log_softmax(const float *logits, int vocab, int target) {
    double most = -INFINITY, sum = 0;
    for (int v = 0; v < vocab; v++) most = fmax(most, logits[v]);
    for (int v = 0; v < vocab; v++) sum += exp(logits[v] - most);
    return logits[target] - most - log(sum);
}

/* Logits of the engine and of the plain forward differ by sums in another order, through F16 roundings of k and v: 2e-3 of
 * the largest. */
static void every_score_is_what_the_plain_forward_says(void) {
    for (int which = 0; which < 2; which++) {
        Checkpoint *checkpoint = open_golden(which);
        const int vocab = checkpoint->config.vocab;
        make_task(&checkpoint->config, 4);
        cut(3, 40);
        float *logits = xcalloc(MOST * vocab, sizeof *logits);
        Policy p = all_gpu(6, 1);
        Scores s = score(checkpoint, &p, &scored);
        for (int i = 0; i < PROMPTS; i++) {
            const Prompt *q = &prompts[i];
            ASSERT_OK(reference_forward(logits, checkpoint, q->ids, q->s + q->n - 1, &err));
            for (int at = q->from; at < q->s + q->n; at++) {
                const float *row = logits + (size_t)(at - 1) * vocab;
                float largest = 0, best = -INFINITY;
                for (int v = 0; v < vocab; v++) largest = fmaxf(largest, fabsf(row[v])), best = fmaxf(best, row[v]);
                CU_ASSERT(fabs(s.logp[i][at] - log_softmax(row, vocab, q->ids[at])) <= 2e-3 * largest);
                CU_ASSERT(row[s.best[i][at]] >= best - 2e-3 * largest);
            }
        }
        free(logits);
        checkpoint_close(checkpoint);
    }
}

static bool same(const Scores *a, const Scores *b) {
    return !memcmp(a->logp, b->logp, sizeof a->logp) && !memcmp(a->best, b->best, sizeof a->best);
}

static void a_prefill_scores_what_token_by_token_scores(void) {
    static const int cuts[] = {1, 2, 16, 31};
    for (int which = 0; which < 2; which++) {
        Checkpoint *checkpoint = open_golden(which);
        Policy p = all_gpu(6, 1);
        make_task(&checkpoint->config, 5);
        Scores reference = score(checkpoint, &p, &scored);
        for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
            make_task(&checkpoint->config, 5);
            for (int i = 0; i < PROMPTS; i++) cut(i, imin(cuts[c], prompts[i].s));
            Scores s = score(checkpoint, &p, &scored);
            CU_ASSERT(same(&s, &reference));
        }
        checkpoint_close(checkpoint);
    }
}

static void every_policy_gives_the_same_scores(void) {
    static const double placements[][6] = {
        {1, 0, 1, 0, 0, 1}, {0, 0, 0, 0, 0, 0}, {0, 1, 0, 1, .5, .5}, {.5, 0, .5, 0, .3, .3}, {.1, .2, .3, .3, .6, .2}};
    for (int which = 0; which < 2; which++) {
        Checkpoint *checkpoint = open_golden(which);
        Policy p = all_gpu(6, 1);
        make_task(&checkpoint->config, 6);
        for (int i = 0; i < PROMPTS; i += 2) cut(i, (prompts[i].s + 1) / 2);
        Scores reference = score(checkpoint, &p, &scored);
        for (int i = 0; i < 5; i++)
            for (int way = 0; way < 6; way++) {
                const double *f = placements[i];
                p = (Policy){.share = {f[0], f[1], f[2], f[3], f[4], f[5]}, .page_tokens = 16};
                p.gbs = 1 + way % 4, p.num_gpu_batches = 3, p.schedule = (Schedule)(way % 3), p.overlap = way != 4;
                p.delegated = (way + i) % 2, p.table_home = (Tier)((i + way) % 3);
                Scores s = score(checkpoint, &p, &scored);
                CU_ASSERT(same(&s, &reference));
            }
        checkpoint_close(checkpoint);
    }
}

/* Those on the disk, too, which other weights would reach straight from the checkpoint. */
static void rounded_weights_give_the_same_scores_on_all_tiers(void) {
    static const double placements[][2] = {{0, 1}, {0, 0}, {.3, .3}};
    Checkpoint *checkpoint = open_golden(0);
    Policy p = all_gpu(6, 1);
    make_task(&checkpoint->config, 6);
    const Scores exact = score(checkpoint, &p, &scored);
    p.weight_study = (Quant){.bits = 3, .group = 64};
    const Scores reference = score(checkpoint, &p, &scored);
    CU_ASSERT(!same(&reference, &exact));
    for (int i = 0; i < 3; i++) {
        p.wg = placements[i][0], p.wc = placements[i][1];
        const Scores s = score(checkpoint, &p, &scored);
        CU_ASSERT(same(&s, &reference));
    }
    checkpoint_close(checkpoint);
}

/* More rows than become logits at a time, with the head streamed and a prompt's rows cut in two by a piece's end. */
static void only_the_rows_that_are_wanted_go_through_the_head(void) {
    Checkpoint *checkpoint = open_golden(0);
    Policy p = all_gpu(6, 1);
    make_task(&checkpoint->config, 7);
    Plan *all = plan_make(checkpoint, &p, &scored, F32, &err);
    CU_ASSERT_EQUAL(all->head_rows, 79 + 1 + 1 + 61 + 3 + 2);
    CU_ASSERT_EQUAL(all->head_chunk, 64);
    for (int i = 0; i < PROMPTS; i++) prompts[i].from = prompts[i].s;
    Plan *last = plan_make(checkpoint, &p, &scored, F32, &err);
    CU_ASSERT_EQUAL(last->head_rows, PROMPTS);
    plan_free(all), plan_free(last);
    checkpoint_close(checkpoint);
}

static void logits_that_are_no_numbers_end_the_run(void) {
    const f16 nan = 0x7e00;
    Policy p = all_gpu(6, 1);
    RunStats stats;
    Checkpoint *checkpoint = open_golden(0);
    make_task(&checkpoint->config, 8);
    Plan *plan = plan_make(checkpoint, &p, &scored, F32, &err);
    Device *device = device_open(NULL, plan, checkpoint, temp_dir(), &err);
    ASSERT_OK(weights_load(plan, checkpoint, device, &err));
    device->upload(device, plan->global[FINAL_LN_B].home, 1, &nan, 1);
    Scores s = {.task = &scored};
    CU_ASSERT_EQUAL(schedule_run(plan, &scored, device, &(Listener){.ctx = &s, .done = on_done}, &stats, &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "finite"));
    device->close(device);
    plan_free(plan);
    checkpoint_close(checkpoint);
}

static double simulated_seconds(void) {
    Hardware h = test_fast_machine();
    Policy p = all_gpu(6, 1);
    RunStats stats;
    Scores s = {.task = &scored, .given = true};
    Checkpoint *checkpoint = open_golden(0);
    for (int x = 0; x < 2; x++) h.mm_flops[x] = 1e9;
    Plan *plan = plan_make(checkpoint, &p, &scored, F16, &err);
    Device *device = sim_open(plan, &h);
    Listener listener = {.ctx = &s, .done = on_done, .scored = on_scored};
    ASSERT_OK(schedule_run(plan, &scored, device, &listener, &stats, &err));
    CU_ASSERT(s.given && stats.sweeps == plan->sweeps && device->peak[TIER_GPU] <= plan->total[TIER_GPU]);
    for (int i = 0; i < PROMPTS; i++) CU_ASSERT_EQUAL(s.told[i], 0); /* it has no data */
    double seconds = device->now(device);
    device->close(device);
    plan_free(plan);
    checkpoint_close(checkpoint);
    return seconds;
}

/* 79 + 1 + 1 + 61 + 3 + 2 rows of logits, or one a prompt; a row is 2 vocab h1 flops. */
static void on_the_sim_each_wanted_row_takes_its_product(void) {
    const OptConfig c = {.vocab = 300, .eos = 2};
    make_task(&c, 9);
    double all = simulated_seconds();
    for (int i = 0; i < PROMPTS; i++) prompts[i].from = prompts[i].s;
    CU_ASSERT_DOUBLE_EQUAL(all - simulated_seconds(), (79 + 1 + 1 + 61 + 3 + 2 - PROMPTS) * 2. * 300 * 64 / 1e9, 1e-9);
}

// ---- texts ---------------------------------------------------------------------------------------------------------

static const char *written(const char *bytes) {
    static char dir[300], path[320];
    if (!dir[0]) snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(path, sizeof path, "%s/text", dir);
    write_file(dir, "text", bytes, strlen(bytes));
    return path;
}

static Eval eval_of(bool stepwise) {
    open_pieces();
    return (Eval){.stepwise = stepwise, .tokenizer = tokenizer, .config = &config};
}

/* 1 + N tokens: </s> and a piece for each letter, as no merge begins with two of these. */
static const char letters[] = "qzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqz";
enum { LETTERS = sizeof letters - 1 };

static void a_text_is_cut_into_windows_and_the_tail_is_left_out(void) {
    static const struct {
        int window, limit, windows, of;
    } cases[] = {{10, 0, (LETTERS + 1) / 10, 10},
                 {10, 2, 2, 10},
                 {10, 100, (LETTERS + 1) / 10, 10},
                 {0, 0, (LETTERS + 1) / POSITIONS, POSITIONS},
                 {2, 0, (LETTERS + 1) / 2, 2}};
    open_pieces();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        for (int stepwise = 0; stepwise < 2; stepwise++) {
            Eval e = eval_of(stepwise);
            e.window = cases[c].window, e.limit = cases[c].limit;
            const int of = cases[c].of;
            ASSERT_OK(eval_text(&e, written(letters), &err));
            CU_ASSERT_EQUAL(e.task.count, cases[c].windows);
            CU_ASSERT(e.window == of && e.task.scored && e.tokens == (of - 1) * e.task.count);
            CU_ASSERT_EQUAL(e.tokens + e.unscored, LETTERS);
            for (int i = 0, at = 0; i < e.task.count; i++) {
                const Prompt *p = &e.task.prompts[i];
                CU_ASSERT(p->s == (stepwise ? 1 : of - 1) && p->n == of - p->s && p->from == 1);
                for (int t = 0; t < of; t++, at++) {
                    char *piece;
                    size_t len;
                    piece = tokenizer_decode(tokenizer, &p->ids[t], 1, &len);
                    CU_ASSERT(at ? len == 1 && piece[0] == letters[at - 1] : p->ids[0] == config.eos);
                    free(piece);
                }
            }
            eval_free(&e);
        }
    }
}

static void a_text_shorter_than_a_window_is_one(void) {
    Eval e = eval_of(false);
    open_pieces();
    ASSERT_OK(eval_text(&e, written("qzqzq"), &err));
    CU_ASSERT(e.task.count == 1 && e.window == 6 && e.tokens == 5 && e.unscored == 0 && e.bytes == 5);
    eval_free(&e);
}

static void a_text_that_cannot_be_scored_is_refused(void) {
    static const char *const texts[] = {"", "caf\xe9"}, *const says[] = {"no text", "UTF-8"};
    open_pieces();
    for (int i = 0; i < 2; i++) {
        Eval e = eval_of(false);
        CU_ASSERT_EQUAL(eval_text(&e, written(texts[i]), &err), -1);
        CU_ASSERT(strstr(err.text, says[i]) && strstr(err.text, "/text"));
        eval_free(&e);
    }
    Eval e = eval_of(false);
    e.window = POSITIONS + 1;
    CU_ASSERT_EQUAL(eval_text(&e, written(letters), &err), -1);
    CU_ASSERT(err.code == EXIT_USAGE && strstr(err.text, "--window 33: expected at most 32"));
    eval_free(&e);
}

/* Each of four bytes has a probability of 1/2 but the last, which has 1/16: 7 bits for 4 bytes. */
static void bits_per_byte_are_as_by_hand(void) {
    Eval e = eval_of(false);
    open_pieces();
    ASSERT_OK(eval_text(&e, written("qzqz"), &err));
    Listener listener = eval_listener(&e);
    for (int at = 4; at > 0; at--) listener.scored(listener.ctx, 0, at, at == 4 ? -4 * logf(2) : -logf(2), 0);
    EvalResult r = eval_result(&e);
    CU_ASSERT_DOUBLE_EQUAL(r.bits_per_byte, 7 / 4., 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.nll, 7 * log(2) / 4, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(r.perplexity, pow(2, 7 / 4.), 1e-6);
    eval_free(&e);
}

static void bytes_are_those_of_the_text(void) {
    static const char text[] = "The weights of the next layer; \xC3\xA9\xF0\x9F\x98\x80, twice.\n\n";
    int32_t *of, special[] = {0, 1, 2, 3, -1, VOCAB};
    open_pieces();
    int n = tokenizer_encode(tokenizer, text, sizeof text - 1, &of, &err);
    CU_ASSERT_EQUAL(tokenizer_bytes(tokenizer, of, n), sizeof text - 1);
    for (int cut = 0; cut <= n; cut++) /* also within a character */
        CU_ASSERT_EQUAL(tokenizer_bytes(tokenizer, of, cut) + tokenizer_bytes(tokenizer, of + cut, n - cut),
                        sizeof text - 1);
    CU_ASSERT_EQUAL(tokenizer_bytes(tokenizer, special, 6), 0);
    free(of);
}

// ---- last words ----------------------------------------------------------------------------------------------------

static char *text_of(const int32_t *of, int n) {
    size_t len;
    return tokenizer_decode(tokenizer, of, n, &len);
}

static void the_last_word_and_the_white_space_before_it_are_scored(void) {
    static const char *const cases[][3] = {
        {"{\"text\": \"The next layer\"}", "The next", " layer"},
        {"{\"text\": \"The next layer \\n\", \"domain\": 1}", "The next", " layer"},
        {"{\"text\": \"a  b\"}", "a", "  b"},
        {"{\"text\": \"The disk.\\n\\n\\\"Why?\\\"\"}", "The disk.", "\n\n\"Why?\""},
        {"{\"text\": \" one two\"}", " one", " two"},
        {"{\"text\": \"one\\u000btwo\\u000b\\f\"}", "one", "\vtwo"},
        {"{\"text\": \"one\\ftwo\\r\\t\"}", "one", "\ftwo"},
    };
    open_pieces();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int stepwise = 0; stepwise < 2; stepwise++) {
            Eval e = eval_of(stepwise);
            ASSERT_OK(eval_lines(&e, written(cases[c][0]), &err));
            CU_ASSERT_FATAL(e.task.count == 1 && e.task.scored);
            const Prompt *p = &e.task.prompts[0];
            char *context = text_of(p->ids, p->from), *word = text_of(p->ids + p->from, p->s + p->n - p->from);
            CU_ASSERT_STRING_EQUAL(context, cases[c][1]);
            CU_ASSERT_STRING_EQUAL(word, cases[c][2]);
            CU_ASSERT(p->ids[0] == config.eos && (stepwise ? p->s == p->from - 1 : p->n == 1));
            free(context), free(word), eval_free(&e);
        }
}

/* Of 44 letters and a word, the last positions' worth stays, with </s> before it. */
static void a_line_too_long_loses_its_beginning(void) {
    char line[200], expected[200];
    open_pieces();
    snprintf(line, sizeof line, "{\"text\": \"%s zq\"}\n\n{\"text\": \"q z\"}", letters);
    Eval e = eval_of(true);
    ASSERT_OK(eval_lines(&e, written(line), &err));
    CU_ASSERT_EQUAL_FATAL(e.task.count, 2);
    const Prompt *p = &e.task.prompts[0];
    CU_ASSERT(p->s + p->n == POSITIONS + 1 && p->ids[0] == config.eos);
    char *text = text_of(p->ids, p->s + p->n), *word = text_of(p->ids + p->from, p->s + p->n - p->from);
    snprintf(expected, sizeof expected, "%s zq", letters);
    CU_ASSERT_STRING_EQUAL(text, expected + strlen(expected) - strlen(text));
    CU_ASSERT_STRING_EQUAL(word, " zq");
    free(text), free(word), eval_free(&e);
}

static void a_bad_line_is_named(void) {
    static const char *const cases[][3] = {
        {"{\"text\": \"one two\"}\n{\"text\": \"one\"}\n", "line 2", "two words"},
        {"{\"text\": \"one two\"}\n\n{\"text\": \" one \"}\n", "line 3", "two words"},
        {"{\"text\": \"\"}", "line 1", "two words"},
        {"{\"text\": 5}", "line 1", "\"text\" is 5; expected a string"},
        {"{\"txt\": \"one two\"}", "line 1", "\"text\" is nothing; expected a string"},
        {"{\"text\": \"one two\"", "line 1", ""},
        {"[\"one two\"]", "line 1", "object"},
        {"one two", "line 1", ""},
        {"{\"text\": \"a qzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqzqz\"}", "line 1", "last word has"},
        {"", "/text", "no lines"},
    };
    open_pieces();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        Eval e = eval_of(false);
        memset(&err, 0, sizeof err);
        CU_ASSERT_EQUAL(eval_lines(&e, written(cases[c][0]), &err), -1);
        CU_ASSERT(strstr(err.text, cases[c][1]) && strstr(err.text, cases[c][2]) && !strchr(err.text, '\n'));
        eval_free(&e);
    }
}

static void a_last_word_that_is_far_too_long_is_refused_before_it_is_encoded(void) {
    enum { LONG = 1000000 };
    char *line = xcalloc(LONG + 30, 1);
    Eval e = eval_of(false);
    open_pieces();
    memset(stpcpy(line, "{\"text\": \"a "), 'q', LONG);
    strcat(line, "\"}");
    CU_ASSERT_EQUAL(eval_lines(&e, written(line), &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "line 1: the last word has 1000001 bytes"));
    eval_free(&e), free(line);
}

/* Three words: right with probability 1/2; of two tokens, the first right with 1/2 and the second wrong with 1/8; wrong
 * with 1/8. On average 8/3 bits. */
static void a_word_is_right_where_all_its_tokens_are(void) {
    Eval e = eval_of(false);
    open_pieces();
    e.limit = 3;
    ASSERT_OK(eval_lines(&e, written("{\"text\": \"q z\"}\n{\"text\": \"q zq\"}\n{\"text\": \"z q\"}\nnot read"), &err));
    Listener listener = eval_listener(&e);
    for (int i = 2; i >= 0; i--) {
        const Prompt *p = &e.task.prompts[i];
        for (int at = p->from, last = p->s + p->n - 1; at <= last; at++) {
            bool right = i == 0 || (i == 1 && at < last);
            float logp = right    ? -logf(2) / (i ? last - p->from : last - p->from + 1)
                         : i == 2 ? -3 * logf(2) / (last - p->from + 1)
                                  : -3 * logf(2);
            listener.scored(listener.ctx, i, at, logp, right ? p->ids[at] : 0);
        }
    }
    EvalResult r = eval_result(&e);
    CU_ASSERT_DOUBLE_EQUAL(r.accuracy, 1 / 3., 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(r.word_perplexity, pow(2, 8 / 3.), 1e-5);
    eval_free(&e);
}

// ---- the shipped model ---------------------------------------------------------------------------------------------

/* scripts/make_golden.py --perplexity (torch 2.15.0, transformers 5.23.0, float32) on the same windows. K and V in F16 are
 * worth 1e-6. */
static void the_shipped_models_perplexity_is_that_of_hugging_face(void) {
    static const struct {
        int window, limit;
        double perplexity;
    } cases[] = {{512, 4, 26.212540887577653}, {128, 32, 27.785140819042184}};
    Checkpoint *checkpoint = checkpoint_open(MODEL, &err);
    Tokenizer *own = checkpoint ? tokenizer_open(MODEL, checkpoint->config.vocab, &err) : NULL;
    if (!own) CU_FAIL_FATAL(err.text);
    for (int c = 0; c < 2; c++) {
        Eval e = {.tokenizer = own, .config = &checkpoint->config, .window = cases[c].window, .limit = cases[c].limit};
        Policy p = all_gpu(6, 1);
        ASSERT_OK(eval_text(&e, MODEL "/stories.txt", &err));
        Listener listener = eval_listener(&e);
        ASSERT_OK(run(&listener, checkpoint, &p, &e.task));
        double ratio = eval_result(&e).perplexity / cases[c].perplexity;
        CU_ASSERT(fabs(ratio - 1) <= 1e-3);
        eval_free(&e);
    }
    tokenizer_close(own);
    checkpoint_close(checkpoint);
}

CU_TestInfo tests[] = {
    {"every score is what the plain forward says", every_score_is_what_the_plain_forward_says},
    {"a prefill scores what token by token scores", a_prefill_scores_what_token_by_token_scores},
    {"every policy gives the same scores", every_policy_gives_the_same_scores},
    {"rounded weights give the same scores on all tiers", rounded_weights_give_the_same_scores_on_all_tiers},
    {"only the rows that are wanted go through the head", only_the_rows_that_are_wanted_go_through_the_head},
    {"on the sim each wanted row takes its product", on_the_sim_each_wanted_row_takes_its_product},
    {"logits that are no numbers end the run", logits_that_are_no_numbers_end_the_run},
    {"a text is cut into windows and the tail is left out", a_text_is_cut_into_windows_and_the_tail_is_left_out},
    {"a text shorter than a window is one", a_text_shorter_than_a_window_is_one},
    {"a text that cannot be scored is refused", a_text_that_cannot_be_scored_is_refused},
    {"bits per byte are as by hand", bits_per_byte_are_as_by_hand},
    {"bytes are those of the text", bytes_are_those_of_the_text},
    {"the last word and the white space before it are scored", the_last_word_and_the_white_space_before_it_are_scored},
    {"a line too long loses its beginning", a_line_too_long_loses_its_beginning},
    {"a bad line is named", a_bad_line_is_named},
    {"a last word that is far too long is refused before it is encoded",
     a_last_word_that_is_far_too_long_is_refused_before_it_is_encoded},
    {"a word is right where all its tokens are", a_word_is_right_where_all_its_tokens_are},
    {"the shipped model's perplexity is that of Hugging Face", the_shipped_models_perplexity_is_that_of_hugging_face},
    CU_TEST_INFO_NULL,
};
