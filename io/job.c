/* job.c: prompts in, completions out.
 *
 * Prompts are JSON lines or plain lines; completions are JSON lines, written and synced as each sequence ends, so that
 * nothing that was reported as done is lost. A prompt's place in the input is its number in the task, which is all that
 * sampling knows of it. Read next: eval.c, the other use of prompts. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <time.h>
#include <unistd.h>

#include "io/io.h"

// ---------------------------------------------------------------------------------------------------------------
// Prompts
// ---------------------------------------------------------------------------------------------------------------

int text_encode(int32_t **ids, const char *text, size_t len, const char *where, const Tokenizer *tokenizer,
                const OptConfig *config, Error *err) {
    Error inner;
    int32_t *bare;
    int n = tokenizer_encode(tokenizer, text, len, &bare, &inner);
    if (n < 0) return fail(err, inner.code, "%.400s: %.600s", where, inner.text);
    *ids = xcalloc((size_t)n + 1, sizeof **ids);
    (*ids)[0] = config->eos;
    if (n) memcpy(*ids + 1, bare, n * sizeof *bare);
    free(bare);
    return n + 1;
}

int job_add(Job *job, const char *text, size_t len, const char *id, int n, const Tokenizer *tokenizer,
            const OptConfig *config, const char *where, Error *err) {
    if (memchr(text, 0, len)) return fail(err, EXIT_FAILED, "%s: a NUL byte in the prompt; remove it", where);
    if (!utf8_valid(text, len)) return fail(err, EXIT_FAILED, "%s: the prompt is not valid UTF-8; convert it", where);
    int32_t *ids;
    int s = text_encode(&ids, text, len, where, tokenizer, config, err);
    if (s < 0) return -1;
    if (s > config->max_pos)
        return free(ids), fail(err, EXIT_FAILED, "%s: the prompt has %d tokens and the model takes %d; shorten it", where,
                               s, config->max_pos);
    Task *t = &job->task;
    t->prompts = xrealloc(t->prompts, t->count + 1, sizeof *t->prompts);
    job->text = xrealloc(job->text, t->count + 1, sizeof *job->text);
    job->id = xrealloc(job->id, t->count + 1, sizeof *job->id);
    t->prompts[t->count] = (Prompt){.ids = ids, .s = s, .n = imin(n, config->max_pos - s + 1)};
    job->text[t->count] = memcpy(xcalloc(len + 1, 1), text, len);
    job->id[t->count++] = xstrdup(id);
    return 0;
}

/* An id as JSON text. Beyond 2^53 a double skips whole numbers, and two ids could become one. */
static char *id_text(const cJSON *id, int number, const char *where, Error *err) {
    char text[32];
    if (cJSON_IsString(id)) return cJSON_PrintUnformatted(id);
    if (id &&
        (!cJSON_IsNumber(id) || fabs(id->valuedouble) >= 9007199254740992.0 || floor(id->valuedouble) != id->valuedouble)) {
        fail(err, EXIT_FAILED, "%s: \"id\" is %s; expected a string or a whole number below 2^53: put it in quotes", where,
             cJSON_IsNumber(id) ? "another number" : "neither");
        return NULL;
    }
    snprintf(text, sizeof text, "%.0f", id ? id->valuedouble : number);
    return xstrdup(text);
}

typedef struct {
    Job *job;
    int n, json; /* json: whether the lines are; -1: not known yet */
    const Tokenizer *tokenizer;
    const OptConfig *config;
} Reader;

/* {"id"?, "prompt", "max_tokens"?}; other fields are none of our business. */
static int add_json(const Reader *r, const cJSON *line, int number, const char *where, Error *err) {
    if (!cJSON_IsObject(line)) return fail(err, EXIT_FAILED, "%s: expected a JSON object {\"prompt\": ...}", where);
    const cJSON *prompt = json_get(line, "prompt"), *max_tokens = json_get(line, "max_tokens");
    size_t n = (size_t)r->n;
    if (!cJSON_IsString(prompt))
        return fail(err, EXIT_FAILED, "%s: \"prompt\" is %s; expected a string", where,
                    prompt ? "not a string" : "missing");
    if (max_tokens && (!json_whole(max_tokens, &n) || n < 1 || n > 1000000000))
        return fail(err, EXIT_FAILED, "%s: \"max_tokens\" must be a whole number from 1 to 1e9", where);
    char *id = id_text(json_get(line, "id"), number, where, err);
    if (!id) return -1;
    const char *text = prompt->valuestring;
    int status = job_add(r->job, text, strlen(text), id, (int)n, r->tokenizer, r->config, where, err);
    free(id);
    return status;
}

/* Two prompts with one id could not be told apart in the output. */
static int check_ids(const Job *job, const char *path, Error *err) {
    const size_t count = (size_t)job->task.count;
    const char **ids = xcalloc(count, sizeof *ids);
    for (size_t i = 0; i < count; i++) ids[i] = job->id[i];
    const char *twice = sort_strings(ids, count);
    free(ids);
    return twice ? fail(err, EXIT_FAILED, "%s: two prompts have the id %.100s; make ids unique", path, twice) : 0;
}

static int read_line(void *ctx, const char *line, size_t len, int number, const char *where, Error *err) {
    Reader *r = ctx;
    char id[16];
    snprintf(id, sizeof id, "%d", number);
    if (r->json < 0) r->json = line[strspn(line, " \t")] == '{';
    if (!r->json) return job_add(r->job, line, len, id, r->n, r->tokenizer, r->config, where, err);
    cJSON *value = json_parse(line, len, where, err);
    if (!value) return -1;
    int status = add_json(r, value, number, where, err);
    cJSON_Delete(value);
    return status;
}

int job_read(Job *job, const char *path, int n, const Tokenizer *tokenizer, const OptConfig *config, Error *err) {
    Reader reader = {.job = job, .n = n, .json = -1, .tokenizer = tokenizer, .config = config};
    return input_lines(path, read_line, &reader, err) || check_ids(job, input_name(path), err) ? -1 : 0;
}

void job_free(Job *job) {
    for (int i = 0; i < job->task.count; i++) free(job->task.prompts[i].ids), free(job->text[i]), free(job->id[i]);
    free(job->task.prompts), free(job->text), free(job->id);
    *job = (Job){0};
}

// ---------------------------------------------------------------------------------------------------------------
// Completions
// ---------------------------------------------------------------------------------------------------------------

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Where the first of the stop texts begins, or NULL. A completion may hold NUL bytes. */
static char *find_stop(const Completions *c, char *text, size_t len) {
    char *first = NULL;
    for (int i = 0; i < c->nstops; i++) {
        char *found = memmem(text, len, c->stop[i], strlen(c->stop[i]));
        if (found && (!first || found < first)) first = found;
    }
    return first;
}

/* A stop text ends in the newest token, so only the last few, a byte each or more, are looked at. A text with special
 * tokens inside, which are no bytes, may be seen only by on_done. */
static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    const Completions *c = ctx;
    (void)prompt;
    if (!c->nstops) return false;
    int window = c->max_stop + 8 < n ? c->max_stop + 8 : n;
    size_t len;
    char *text = tokenizer_decode(c->tokenizer, tokens + n - window, window, &len);
    bool stop = find_stop(c, text, len) != NULL;
    free(text);
    return stop;
}

void progress_open(Progress *p, bool on, long wanted) { *p = (Progress){.on = on, .wanted = wanted, .started = seconds()}; }

void progress_clear(const Progress *p) {
    if (p->on) fprintf(stderr, "\r\033[K");
}

void progress_show(Progress *p, long sweeps, long tokens) {
    double t = seconds();
    if (!p->on || t - p->shown < 0.2 || !tokens) return;
    double rate = tokens / (t - p->started);
    p->shown = t;
    fprintf(stderr, "\r%ld sweeps, %ld of at most %ld tokens, %.1f tokens/s, at most %.0f s left\033[K", sweeps, tokens,
            p->wanted, rate, (p->wanted - tokens) / rate);
}

static int on_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    Completions *c = ctx;
    size_t len;
    char *text = tokenizer_decode(c->tokenizer, tokens, n, &len), *stop = find_stop(c, text, len);
    if (stop) len = (size_t)(stop - text);
    progress_clear(&c->progress);
    fprintf(c->out, "{\"id\": %s, \"prompt\": ", c->job->id[prompt]);
    json_write_string(c->out, c->job->text[prompt], strlen(c->job->text[prompt]));
    fprintf(c->out, ", \"completion\": ");
    json_write_string(c->out, text, len);
    fprintf(c->out, ", \"tokens\": [");
    for (int i = 0; i < n; i++) fprintf(c->out, i ? ", %d" : "%d", tokens[i]);
    fprintf(c->out, "], \"finish_reason\": \"%s\"}\n", reason == FINISH_STOP || stop ? "stop" : "length");
    free(text);
    if (fflush(c->out) || ferror(c->out) ||
        (fdatasync(fileno(c->out)) && errno != EINVAL && errno != EROFS && errno != ENOTSUP))
        return fail(err, EXIT_FAILED, "cannot write %s: %s; make room or write elsewhere", c->out_name, strerror(errno));
    return 0;
}

int completion_ignored(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    (void)ctx, (void)prompt, (void)tokens, (void)n, (void)reason, (void)err;
    return 0;
}

static void on_sweep(void *ctx, long sweeps, long tokens) {
    progress_show(&((Completions *)ctx)->progress, sweeps, tokens);
}

Listener completions_listener(Completions *c) {
    long wanted = 0;
    for (int i = 0; i < c->job->task.count; i++) wanted += c->job->task.prompts[i].n;
    progress_open(&c->progress, c->progress.on, wanted);
    for (int i = 0; i < c->nstops; i++)
        if ((int)strlen(c->stop[i]) > c->max_stop) c->max_stop = (int)strlen(c->stop[i]);
    return (Listener){.ctx = c, .token = on_token, .done = on_done, .sweep = on_sweep};
}
