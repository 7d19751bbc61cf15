/* eval.c: measures the cost of approximations (section 6.2, Table 6): the perplexity of a text, and
 * how often the last word of a line is predicted.
 *
 * It follows the usual protocols, so that the figures can be compared with others. WikiText: the
 * whole text is cut into disjoint windows of the model's length. LAMBADA: the last word counts as
 * predicted if each of its tokens is the greedy choice after the tokens before it. For the engine
 * both are scored tasks, under any policy; this file reads and cuts the texts and adds up the
 * scores. It keeps sums for each prompt and adds them in the order of the input, so that the
 * results do not depend on the schedule.
 * Read next: stage.c. */
#include <math.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Texts
// -------------------------------------------------------------------------------------------------

static bool is_full(const Eval *e) { return e->limit && e->task.count == e->limit; }

/* Adds a prompt of ids[tokens], of which the tokens from `from` on are scored. In stepwise mode a
 * decoding step predicts each scored token that has at least two tokens before it. */
static void add_prompt(Eval *e, const int32_t *ids, int tokens, int from) {
    Task *t = &e->task;
    int s = e->stepwise ? imax(from - 1, 1) : tokens - 1;
    Prompt p = {.ids = xcalloc(tokens, sizeof *ids), .s = s, .n = tokens - s, .from = from};
    memcpy(p.ids, ids, tokens * sizeof *ids);
    t->scored = true;
    t->prompts = with_room(t->prompts, t->count, sizeof *t->prompts);
    e->score = with_room(e->score, t->count, sizeof *e->score);
    e->score[t->count] = (Score){0};
    t->prompts[t->count++] = p;
    e->tokens += tokens - from;
    e->bytes += tokenizer_bytes(e->tokenizer, ids + from, tokens - from);
}

int eval_text(Eval *e, const char *path, Error *err) {
    /* Bytes for a byte of text: the ids, their copies in windows, and the text itself as it grows.
     */
    enum { FACTOR = 12 };
    int most = e->config->max_pos;
    int32_t *ids;
    Lines l;
    if (e->window > most)
        return fail(err, EXIT_USAGE, "--window %d: expected at most %d, the model's positions",
                    e->window, most);
    if (lines_open(&l, path, err))
        return -1;
    int status = lines_whole(&l, FACTOR, err);
    int tokens = status ? status : text_encode(&ids, l.line, l.size, e->tokenizer, err);
    if (!status && tokens < 0)
        fail_at(err, l.path);
    lines_close(&l);
    if (tokens < 0)
        return -1;
    e->window = imin(e->window ? e->window : most, tokens);
    for (int at = 0; tokens > 1 && at + e->window <= tokens && !is_full(e); at += e->window)
        add_prompt(e, ids + at, e->window, 1);
    free(ids);
    e->unscored = tokens - 1 - e->tokens; /* 1: the first, before which there is none */
    return e->task.count
               ? 0
               : fail(err, EXIT_FAILED, "%s: there is no text; name a file that has some", l.path);
}

// -------------------------------------------------------------------------------------------------
// Lines with last words
// -------------------------------------------------------------------------------------------------

/* Returns the length of a text without the white space at its end (blanks true), or without the
 * last word (blanks false). */
static size_t without_last(const char *text, size_t len, bool blanks) {
    while (len && (strchr(" \t\n\v\f\r", text[len - 1]) != NULL) == blanks)
        len--;
    return len;
}

/* Adds a line of text as a prompt that scores its last word. If it is too long for the model,
 * tokens at its beginning (after the one in front) are dropped. */
static int add_line(Eval *e, const char *text, Error *err) {
    int most = e->config->max_pos + 1; /* the last token takes no position */
    size_t len = without_last(text, strlen(text), true);
    size_t before = without_last(text, without_last(text, len, false), true);
    int32_t *context, *ids;
    if (!before)
        return fail(err, EXIT_FAILED,
                    "\"text\" has no two words; expected a last word and some before it");
    /* This is checked before encoding, which takes memory. */
    if ((len - before) / tokenizer_longest(e->tokenizer) > (size_t)most - 2)
        return fail(err, EXIT_FAILED,
                    "the last word has %zu bytes, more than %d tokens, which the model takes; "
                    "shorten it",
                    len - before, most - 2);
    int from = text_encode(&context, text, before, e->tokenizer, err);
    if (from < 0)
        return -1;
    free(context);
    int tokens = text_encode(&ids, text, len, e->tokenizer, err);
    if (tokens < 0)
        return -1;
    int front = tokenizer_bos(e->tokenizer) >= 0, drop = imax(tokens - most, 0), status = 0;
    if (front)
        ids[drop] = ids[0];
    if (from >= tokens)
        status = fail(err, EXIT_FAILED,
                      "the last word is a part of an added piece that begins before it; expected a "
                      "word with tokens of its own");
    else if (from - drop < 1 + front)
        status = fail(err, EXIT_FAILED,
                      "the last word has %d token%s and the model takes %d; shorten it",
                      tokens - from, plural(tokens - from), most - 2);
    else
        add_prompt(e, ids + drop, tokens - drop, from - drop);
    free(ids);
    return status;
}

/* Adds the text of a JSON line. */
static int score_line(Eval *e, const Lines *l, Error *err) {
    cJSON *value = line_parse(l, "\"text\"", err);
    if (!value)
        return -1;
    const cJSON *text = json_get(value, "text");
    int status = cJSON_IsString(text) ? add_line(e, text->valuestring, err)
                                      : json_refuse(err, "\"text\"", text, "a string");
    cJSON_Delete(value);
    return status;
}

int eval_lines(Eval *e, const char *path, Error *err) {
    Lines l;
    if (lines_open(&l, path, err))
        return -1;
    int status = 0;
    while (!status && !is_full(e) && (status = line_next(&l, err)) > 0)
        status = score_line(e, &l, err) && fail_at(err, l.where) ? fail_at(err, l.path) : 0;
    lines_close(&l);
    if (status || e->task.count)
        return status;
    return fail(err, EXIT_FAILED, "%s: no lines; expected JSON lines {\"text\": ...}", l.path);
}

// -------------------------------------------------------------------------------------------------
// Sums
// -------------------------------------------------------------------------------------------------

/* Listener.scored: adds up the score of one token. */
static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Eval *e = ctx;
    e->score[prompt].nll -= logp;
    if (best != e->task.prompts[prompt].ids[at])
        e->score[prompt].missed = true;
    e->told++;
}

static int on_sweep(void *ctx, const RunStats *stats, Error *err) {
    Eval *e = ctx;
    (void)err;
    progress_show(&e->progress, stats, e->told);
    return 0;
}

Listener eval_listener(Eval *e) {
    return (Listener){.ctx = e, .scored = on_scored, .sweep = on_sweep};
}

EvalResult eval_result(const Eval *e) {
    double sum = 0, right = 0;
    for (int i = 0; i < e->task.count; i++) {
        sum += e->score[i].nll;
        right += !e->score[i].missed;
    }
    return (EvalResult){.nll = sum / e->tokens,
                        .perplexity = exp(sum / e->tokens),
                        .bits_per_byte = sum / log(2) / e->bytes,
                        .word_perplexity = exp(sum / e->task.count),
                        .accuracy = right / e->task.count};
}

void eval_free(Eval *e) {
    prompts_free(&e->task);
    free(e->score);
    *e = (Eval){0};
}
