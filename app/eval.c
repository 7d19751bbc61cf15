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
#include <cjson/cJSON.h>
#include <math.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Texts
// -------------------------------------------------------------------------------------------------

/* Adds a prompt of ids[tokens], of which the tokens from `from` on are scored. In stepwise mode a
 * decoding step predicts each scored token that has at least two tokens before it. */
static void add_prompt(Eval *e, const int32_t *ids, int tokens, int from,
                       const Tokenizer *tokenizer) {
    Task *t = &e->task;
    t->prompts = xrealloc(t->prompts, t->count + 1, sizeof *t->prompts);
    e->nll = xrealloc(e->nll, t->count + 1, sizeof *e->nll);
    e->missed = xrealloc(e->missed, t->count + 1, sizeof *e->missed);
    int s = e->stepwise ? imax(from - 1, 1) : tokens - 1;
    Prompt p = {.ids = xcalloc(tokens, sizeof *ids), .s = s, .n = tokens - s, .from = from};
    memcpy(p.ids, ids, tokens * sizeof *ids);
    e->nll[t->count] = 0;
    e->missed[t->count] = false;
    e->tokens += tokens - from;
    e->bytes += tokenizer_bytes(tokenizer, ids + from, tokens - from);
    t->prompts[t->count++] = p;
}

int eval_text(Eval *e, const char *path, int window, int limit, const Tokenizer *tokenizer,
              const OptConfig *config, Error *err) {
    size_t len;
    int32_t *ids;
    if (!window)
        window = config->max_pos;
    if (window > config->max_pos)
        return fail(err, EXIT_USAGE, "--window %d: expected at most %d, the model's positions",
                    window, config->max_pos);
    char *text = input_read(path, &len, err);
    if (!text)
        return -1;
    int tokens = text_encode(&ids, (Passage){text, len, input_name(path)}, tokenizer, config, err);
    free(text);
    if (tokens < 0)
        return -1;
    e->task.scored = true;
    e->window = window = imin(window, tokens);
    for (int at = 0; tokens > 1 && at + window <= tokens && (!limit || e->task.count < limit);
         at += window)
        add_prompt(e, ids + at, window, 1, tokenizer);
    free(ids);
    e->unscored = tokens - 1 - e->tokens; /* 1: the </s> in front */
    return e->task.count ? 0
                         : fail(err, EXIT_FAILED, "%s: there is no text; name a file that has some",
                                input_name(path));
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
 * tokens at its beginning (after </s>) are dropped. */
static int add_line(Eval *e, const char *text, const char *where, const Tokenizer *tokenizer,
                    const OptConfig *config, Error *err) {
    const int most = config->max_pos + 1; /* the last token takes no position */
    const size_t len = without_last(text, strlen(text), true);
    const size_t before = without_last(text, without_last(text, len, false), true);
    int32_t *context, *ids;
    if (!before)
        return fail(err, EXIT_FAILED,
                    "%s: \"text\" has no two words; expected a last word and some before it",
                    where);
    /* This is checked before encoding, which takes memory. */
    if ((len - before) / tokenizer_longest(tokenizer) > (size_t)most - 2)
        return fail(err, EXIT_FAILED,
                    "%s: the last word has %zu bytes, more than %d tokens, which the model takes; "
                    "shorten it",
                    where, len - before, most - 2);
    int from = text_encode(&context, (Passage){text, before, where}, tokenizer, config, err);
    if (from < 0)
        return -1;
    free(context);
    int tokens = text_encode(&ids, (Passage){text, len, where}, tokenizer, config, err);
    if (tokens < 0)
        return -1;
    int drop = imax(tokens - most, 0), status = 0;
    CHECK(from < tokens);
    ids[drop] = ids[0];
    if (from - drop < 2)
        status = fail(err, EXIT_FAILED,
                      "%s: the last word has %d token%s and the model takes %d; shorten it", where,
                      tokens - from, plural(tokens - from), most - 2);
    else
        add_prompt(e, ids + drop, tokens - drop, from - drop, tokenizer);
    free(ids);
    return status;
}

/* Adds the text of a JSON line. */
static int score_line(Eval *e, const Lines *l, const Tokenizer *tokenizer, const OptConfig *config,
                      Error *err) {
    cJSON *value = json_parse(l->line, l->size, l->where, err);
    if (!value)
        return -1;
    const cJSON *text = json_get(value, "text");
    int status = cJSON_IsString(text)
                     ? add_line(e, text->valuestring, l->where, tokenizer, config, err)
                     : -1;
    if (!cJSON_IsObject(value))
        fail(err, EXIT_FAILED, "%s: expected a JSON object {\"text\": ...}", l->where);
    else if (!cJSON_IsString(text))
        fail(err, EXIT_FAILED, "%s: \"text\" is %s; expected a string", l->where,
             text ? "not a string" : "missing");
    cJSON_Delete(value);
    return status;
}

int eval_lines(Eval *e, const char *path, int limit, const Tokenizer *tokenizer,
               const OptConfig *config, Error *err) {
    size_t len;
    char *text = input_read(path, &len, err);
    if (!text)
        return -1;
    int status = 0;
    Lines l = {.text = text, .len = len, .name = input_name(path)};
    e->task.scored = true;
    while (!status && (!limit || e->task.count < limit) && line_next(&l))
        status = score_line(e, &l, tokenizer, config, err);
    free(text);
    if (status || e->task.count)
        return status;
    return fail(err, EXIT_FAILED, "%s: no lines; expected JSON lines {\"text\": ...}", l.name);
}

// -------------------------------------------------------------------------------------------------
// Sums
// -------------------------------------------------------------------------------------------------

/* Listener.scored: adds up the score of one token. */
static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Eval *e = ctx;
    e->nll[prompt] -= logp;
    if (best != e->task.prompts[prompt].ids[at])
        e->missed[prompt] = true;
    e->told++;
}

static int on_sweep(void *ctx, const RunStats *stats, Error *err) {
    Eval *e = ctx;
    (void)err;
    progress_show(&e->progress, stats, e->told);
    return 0;
}

Listener eval_listener(Eval *e) {
    e->progress.tokens = e->tokens;
    return (Listener){.ctx = e, .scored = on_scored, .sweep = on_sweep};
}

EvalResult eval_result(const Eval *e) {
    double sum = 0, right = 0;
    for (int i = 0; i < e->task.count; i++) {
        sum += e->nll[i];
        right += !e->missed[i];
    }
    return (EvalResult){.nll = sum / e->tokens,
                        .perplexity = exp(sum / e->tokens),
                        .bits_per_byte = sum / log(2) / e->bytes,
                        .word_perplexity = exp(sum / e->task.count),
                        .accuracy = right / e->task.count};
}

void eval_free(Eval *e) {
    for (int i = 0; i < e->task.count; i++)
        free(e->task.prompts[i].ids);
    free(e->task.prompts);
    free(e->nll);
    free(e->missed);
    *e = (Eval){0};
}
