/* job.c: reads the prompts.
 *
 * All lines of a file are JSON, or all are plain text. A prompt that cannot be completed does not
 * stop the others: it becomes a request with an error, which its line of the output reports; with
 * `strict` the whole job is refused. Sampling depends on a prompt's place in the input, which does
 * not change when a job goes on with the prompts that are left.
 * Read next: journal.c. */
#include <cjson/cJSON.h>
#include <math.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Prompts
// -------------------------------------------------------------------------------------------------

int text_encode(int32_t **ids, Passage passage, const Tokenizer *tokenizer, const OptConfig *config,
                Error *err) {
    Error inner;
    int32_t *bare;
    int n = tokenizer_encode(tokenizer, passage.text, passage.len, &bare, &inner);
    if (n < 0)
        return fail(err, inner.code, "%.400s: %.600s", passage.where, inner.text);
    *ids = xcalloc((size_t)n + 1, sizeof **ids);
    (*ids)[0] = config->eos;
    if (n)
        memcpy(*ids + 1, bare, n * sizeof *bare);
    free(bare);
    return n + 1;
}

/* Returns a new, empty request at the end of the job. */
static Request *new_request(Job *job, int line) {
    job->request = xrealloc(job->request, (size_t)job->count + 1, sizeof *job->request);
    Request *e = &job->request[job->count++];
    *e = (Request){.line = line};
    return e;
}

static Request *newest(const Job *job) { return &job->request[job->count - 1]; }

/* Notes that a prompt cannot be completed; with `strict` that is an error. */
static int impossible(const Job *job, Request *e, const Error *why, Error *err) {
    if (job->strict) {
        *err = *why;
        return -1;
    }
    e->error = xstrdup(why->text);
    return 0;
}

/* Fills in the newest request. */
static int take_text(Job *job, const char *text, size_t len, int n, const char *where, Error *err) {
    Request *e = newest(job);
    if (memchr(text, 0, len))
        return fail(err, EXIT_FAILED, "%s: a NUL byte in the prompt; remove it", where);
    if (!utf8_valid(text, len))
        return fail(err, EXIT_FAILED, "%s: the prompt is not valid UTF-8; convert it", where);
    const int most = job->config->max_pos;
    /* the 1 is </s>; checked before encoding, which takes memory */
    const size_t least = 1 + len / tokenizer_longest(job->tokenizer);
    if (least > (size_t)most)
        return fail(err, EXIT_FAILED,
                    "%s: the prompt has at least %zu tokens and the model takes %d; shorten it",
                    where, least, most);
    const int s =
        text_encode(&e->ids, (Passage){text, len, where}, job->tokenizer, job->config, err);
    if (s < 0)
        return -1;
    if (s > most)
        return fail(err, EXIT_FAILED,
                    "%s: the prompt has %d tokens and the model takes %d; shorten it", where, s,
                    most);
    e->s = s;
    e->n = imin(n, most - s + 1);
    e->cut = e->n < n;
    e->text = memcpy(xcalloc(len + 1, 1), text, len);
    return 0;
}

int job_add(Job *job, const char *text, size_t len, int line, const char *where, Error *err) {
    Error why;
    new_request(job, line);
    return take_text(job, text, len, job->max_tokens, where, &why)
               ? impossible(job, newest(job), &why, err)
               : 0;
}

static char *json_string(const char *s) {
    Text text = {0};
    FILE *out = text_stream(&text);
    json_write_string(out, s, strlen(s));
    putc(0, out);
    fclose(out);
    return text.text;
}

/* Writes an id as JSON text, or leaves *text as it is if none is given. Beyond 2^53 a double skips
 * whole numbers, and two ids could become one. */
static int id_text(char **text, const cJSON *id, const char *where, Error *err) {
    char number[100];
    if (cJSON_IsString(id))
        *text = json_string(id->valuestring);
    else if (id && !cJSON_IsNull(id)) {
        const double value = cJSON_IsNumber(id) ? id->valuedouble : NAN;
        if (!(fabs(value) < 9007199254740992.0 && floor(value) == value))
            return json_refuse(err, where, "\"id\"", id, "a string, or a whole number below 2^53");
        snprintf(number, sizeof number, "%.0f", value + 0); /* turns -0 into 0 */
        *text = xstrdup(number);
    }
    return 0;
}

/* Reads {"id"?, "prompt", "max_tokens"?}. A null counts as absent, and other fields are ignored. */
static int take_object(Job *job, const cJSON *line, const char *where, Error *err) {
    const cJSON *prompt = json_get(line, "prompt"), *max_tokens = json_get(line, "max_tokens");
    size_t n = (size_t)job->max_tokens;
    if (!cJSON_IsObject(line))
        return fail(err, EXIT_FAILED, "%s: expected a JSON object {\"prompt\": ...}", where);
    if (id_text(&newest(job)->id, json_get(line, "id"), where, err))
        return -1;
    if (!cJSON_IsString(prompt))
        return fail(err, EXIT_FAILED, "%s: \"prompt\" is %s; expected a string", where,
                    prompt ? "not a string" : "missing");
    if (max_tokens && !cJSON_IsNull(max_tokens) &&
        (!json_whole(max_tokens, &n) || n < 1 || n > 1000000000))
        return fail(err, EXIT_FAILED, "%s: \"max_tokens\" must be a whole number from 1 to 1e9",
                    where);
    return take_text(job, prompt->valuestring, strlen(prompt->valuestring), (int)n, where, err);
}

static int add_json(Job *job, const Lines *l, Error *err) {
    Error why;
    new_request(job, l->number - 1);
    cJSON *value = json_parse(l->line, l->size, l->where, &why);
    const int status = value ? take_object(job, value, l->where, &why) : -1;
    cJSON_Delete(value);
    return status ? impossible(job, newest(job), &why, err) : 0;
}

// -------------------------------------------------------------------------------------------------
// JSON lines or plain lines
// -------------------------------------------------------------------------------------------------

/* Returns true if text[0..len) is one whole JSON object, or with `array` one JSON array. */
static bool is_json(const char *text, size_t len, bool array) {
    Error ignored;
    cJSON *value = json_parse(text, len, "", &ignored);
    const bool is = array ? cJSON_IsArray(value) : cJSON_IsObject(value);
    cJSON_Delete(value);
    return is;
}

static int refuse_objects(Lines plain, Error *err) {
    while (line_next(&plain))
        if (plain.line[strspn(plain.line, " \t")] == '{' && is_json(plain.line, plain.size, false))
            return fail(err, EXIT_USAGE,
                        "%s: is a JSON object in a file of plain lines; say --format jsonl, or "
                        "--format text if it is "
                        "meant as text",
                        plain.where);
    return 0;
}

/* Reads the lines as JSON or as plain text: by --format, by the file's name, or by its first line.
 * A file that is neither as a whole is refused, instead of being completed as text. */
static int read_lines(Job *job, const char *path, const char *text, size_t len, Error *err) {
    const char *name = input_name(path), *end = path + strlen(path),
               *first = text + strspn(text, "\xEF\xBB\xBF \t\r\n");
    const bool named_json = end - path > 6 && !strcmp(end - 6, ".jsonl"),
               named_text = end - path > 4 && !strcmp(end - 4, ".txt");
    const char *eol = memchr(first, '\n', len - (size_t)(first - text));
    const size_t line = eol ? (size_t)(eol - first) : strlen(first),
                 rest = len - (size_t)(first - text);
    bool json =
        job->format ? !strcmp(job->format, "jsonl") : named_json || (!named_text && *first == '{');
    if (!job->format && (is_json(first, rest, true) ||
                         (!is_json(first, line, false) && is_json(first, rest, false))))
        return fail(err, EXIT_USAGE,
                    "%s: is one JSON value; expected a JSON object {\"prompt\": ...} on each line",
                    name);
    if (!job->format && !json &&
        refuse_objects((Lines){.text = text, .len = len, .name = name}, err))
        return -1;
    /* an error that becomes a line of the output does not depend on where the prompts come from */
    Lines l = {.text = text, .len = len, .name = job->strict ? name : ""};
    while (line_next(&l))
        if (json ? add_json(job, &l, err)
                 : job_add(job, l.line, l.size, l.number - 1, l.where, err))
            return -1;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The whole job
// -------------------------------------------------------------------------------------------------

/* Compares two requests by their ids, and if these are equal by their order in the input. */
static int by_id(const void *a, const void *b) {
    const Request *x = *(Request *const *)a, *y = *(Request *const *)b;
    const int order = strcmp(x->id, y->id);
    return order ? order : x->line - y->line;
}

static int has_id(const void *id, const void *request) {
    return strcmp(id, (*(Request *const *)request)->id);
}

/* Refuses prompts with an id that an earlier one has, since their completions could not be told
 * apart. */
static int refuse_twins(const Job *job, Request **given, int n, const char *name, Error *err) {
    Error why;
    int status = 0;
    qsort(given, (size_t)n, sizeof *given, by_id);
    for (int i = 1, first = 0; i < n && !status; i++) {
        Request *e = given[i], *twin = given[first];
        if (strcmp(e->id, twin->id))
            first = i;
        if (first == i || e->error)
            continue;
        fail(&why, EXIT_FAILED,
             "%.500s%sline %d: the id %.100s is that of line %d, too; make ids unique",
             job->strict ? name : "", job->strict ? " " : "", e->line + 1, e->id, twin->line + 1);
        free(e->text);
        free(e->ids);
        *e = (Request){.line = e->line, .id = e->id};
        status = impossible(job, e, &why, err);
    }
    return status;
}

/* Gives an id to requests that came without one: the number of the line, or, if another request has
 * that, the first free number behind the last line. */
static int settle_ids(Job *job, const char *name, Error *err) {
    Request **given = xcalloc((size_t)job->count, sizeof *given);
    int n = 0, next = job->count ? newest(job)->line + 1 : 0;
    for (int i = 0; i < job->count; i++)
        if (job->request[i].id)
            given[n++] = &job->request[i];
    const int status = refuse_twins(job, given, n, name, err);
    for (int i = 0; i < job->count && !status; i++) {
        Request *e = &job->request[i];
        char text[16];
        if (e->id)
            continue;
        for (int number = e->line;; number = next++) {
            snprintf(text, sizeof text, "%d", number);
            if (!bsearch(text, given, (size_t)n, sizeof *given, has_id))
                break;
        }
        e->id = xstrdup(text);
    }
    free(given);
    return status;
}

int job_settle(Job *job, const char *name, Error *err) {
    if (settle_ids(job, name, err))
        return -1;
    job->digest = HASH_START;
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        job->digest = hash_bytes(job->digest, e->id, strlen(e->id) + 1);
        job->digest = hash_bytes(job->digest, &e->n, sizeof e->n);
        if (e->text)
            job->digest = hash_bytes(job->digest, e->text, strlen(e->text) + 1);
        job->digest = hash_bytes(job->digest, e->ids, (size_t)e->s * sizeof *e->ids);
    }
    return 0;
}

int job_read(Job *job, const char *path, Error *err) {
    size_t len;
    char *text = input_read(path, &len, err);
    if (!text)
        return -1;
    const int status = read_lines(job, path, text, len, err);
    free(text);
    return status ? -1 : job_settle(job, input_name(path), err);
}

void job_rest(Job *job) {
    Task *t = &job->task;
    t->prompts = xcalloc((size_t)job->count, sizeof *t->prompts);
    for (int i = 0; i < job->count; i++) {
        Request *e = &job->request[i];
        if (e->error || e->ended)
            continue;
        if (e->known) {
            e->ids = xrealloc(e->ids, (size_t)(e->s + e->known), sizeof *e->ids);
            memcpy(e->ids + e->s, e->tokens, (size_t)e->known * sizeof *e->tokens);
        }
        t->prompts[t->count++] =
            (Prompt){.ids = e->ids, .s = e->s + e->known, .n = e->n - e->known, .place = i};
    }
}

void job_free(Job *job) {
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        free(e->id);
        free(e->text);
        free(e->error);
        free(e->ids);
        free(e->tokens);
    }
    free(job->task.prompts);
    free(job->request);
    *job = (Job){0};
}
