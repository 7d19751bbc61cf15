/* job.c: reads the prompts, and texts that are to be scored.
 *
 * All lines of a file are JSON, or all are plain text. A prompt that cannot be completed does not
 * stop the others: it becomes a request with an error, which its line of the output reports; with
 * `strict` the whole job is refused. Sampling depends on a prompt's place in the input, which does
 * not change when a job goes on with the prompts that are left; or, if its line has a seed, on that
 * alone.
 *
 * Lines that are scored become tokens and windows by the rules of lm-evaluation-harness, so that
 * its tasks have the figures that they have with Hugging Face (scripts/lm_eval_flexgen.py).
 * Read next: journal.c. */
#include <fnmatch.h>
#include <math.h>
#include <search.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Prompts
// -------------------------------------------------------------------------------------------------

int text_encode(int32_t **ids, const char *text, size_t len, const Tokenizer *tokenizer,
                Error *err) {
    int n = tokenizer_encode(tokenizer, text, len, ids, err);
    int32_t bos = tokenizer_bos(tokenizer);
    if (n < 0 || bos < 0)
        return n;
    *ids = xrealloc(*ids, n + 1, sizeof **ids);
    memmove(*ids + 1, *ids, n * sizeof **ids);
    **ids = bos;
    return n + 1;
}

void job_push(Job *job, Request request) {
    job->request = with_room(job->request, job->count, sizeof *job->request);
    job->request[job->count++] = request;
}

int32_t *copy_ids(const int32_t *ids, int n) {
    return memcpy(xcalloc(n, sizeof *ids), ids, n * sizeof *ids);
}

/* Fills in a request that is to generate n tokens. -1 and err if that is impossible. */
static int take_text(const Job *job, Request *e, const char *text, size_t len, int n, Error *err) {
    if (memchr(text, 0, len))
        return fail(err, EXIT_FAILED, "a NUL byte in the prompt; remove it");
    /* checked before encoding, which takes memory */
    int most = job->config->max_pos, before = tokenizer_bos(job->tokenizer) >= 0;
    int least = job->truncate ? 0 : before + len / tokenizer_longest(job->tokenizer);
    int s = least > most ? least : text_encode(&e->ids, text, len, job->tokenizer, err);
    if (s < 0)
        return -1;
    /* so many tokens leave room for n; at least one of the text stays */
    int kept = imax(most + 1 - n, before + 1), tail = kept - before;
    e->truncated = job->truncate && s > kept;
    if (e->truncated) {
        memmove(e->ids + before, e->ids + s - tail, tail * sizeof *e->ids);
        s = kept;
    }
    if (!s)
        return fail(err, EXIT_FAILED,
                    "the prompt has no tokens; write one, since this model puts none in front");
    if (s > most)
        return fail(err, EXIT_FAILED,
                    "the prompt has %s%d tokens and the model takes %d; shorten it",
                    least > most ? "at least " : "", s, most);
    e->s = s;
    e->n = imin(n, most - s + 1);
    e->cut = e->n < n;
    e->text = memcpy(xcalloc(len + 1, 1), text, len);
    return 0;
}

/* Writes an id as JSON text, or leaves *text as it is if none is given. Beyond 2^53 a double skips
 * whole numbers, and two ids could become one. */
static int id_text(char **text, const cJSON *id, Error *err) {
    double value = cJSON_GetNumberValue(id);
    Text written = {0};
    if (!id)
        return 0;
    if (!cJSON_IsString(id) && !(fabs(value) < 0x1p53 && floor(value) == value))
        return json_refuse(err, "\"id\"", id, "a string, or a whole number below 2^53");
    FILE *out = text_stream(&written);
    if (cJSON_IsString(id))
        json_write_string(out, id->valuestring, strlen(id->valuestring));
    else
        fprintf(out, "%.0f", value + 0); /* turns -0 into 0 */
    putc(0, out);
    fclose(out);
    *text = written.text;
    return 0;
}

/* Returns the length of a text without the white space at its end (blanks true), or without the
 * last word (blanks false). */
static size_t without_last(const char *text, size_t len, bool blanks) {
    for (size_t at = len; at--;) {
        uint32_t c;
        if ((text[at] & 0xC0) == 0x80)
            continue; /* inside a character */
        utf8_step(&c, text + at, len - at);
        if ((char_kind(c) == 'S') != blanks)
            break;
        len = at;
    }
    return len;
}

/* Fills in a request that scores what a text has behind its first `before` bytes: the tokens of
 * the whole text that come after as many as these bytes have by themselves. */
static int take_pair(const Job *job, Request *e, const char *text, size_t len, size_t before,
                     Error *err) {
    int32_t *ids;
    int s = text_encode(&ids, text, before, job->tokenizer, err);
    int tokens = s < 0 ? s : text_encode(&e->ids, text, len, job->tokenizer, err);
    if (tokens > s)
        memcpy(e->ids, ids, s * sizeof *ids);
    free(ids);
    if (tokens < 0)
        return -1;
    if (!s)
        return fail(err, EXIT_FAILED,
                    "the prompt has no tokens; write one, since this model puts none in front");
    if (tokens <= s)
        return fail(err, EXIT_FAILED,
                    "what is to be scored has no tokens of its own; write a word of them");
    e->s = s;
    e->n = tokens - s;
    return 0;
}

/* Reads {"id"?, "prompt", "completion"}, which scores the completion and the white space before it,
 * or {"id"?, "text"}, which scores the last word of the text and the white space before that. */
static int take_scored(const Job *job, Request *e, const cJSON *line, Error *err) {
    const char *prompt = cJSON_GetStringValue(json_get(line, "prompt")),
               *completion = cJSON_GetStringValue(json_get(line, "completion"));
    const cJSON *text = json_get(line, "text");
    if (prompt && completion) {
        char *whole = xcalloc(strlen(prompt) + strlen(completion) + 1, 1);
        strcat(strcpy(whole, prompt), completion);
        size_t before = without_last(prompt, strlen(prompt), true);
        int status = take_pair(job, e, whole, strlen(whole), before, err);
        free(whole);
        return status;
    }
    if (!cJSON_IsString(text))
        return json_refuse(err, "\"text\"", text,
                           "a string, or strings \"prompt\" and \"completion\"");
    const char *words = text->valuestring;
    size_t len = without_last(words, strlen(words), true);
    size_t before = without_last(words, without_last(words, len, false), true);
    if (!before)
        return fail(err, EXIT_FAILED,
                    "\"text\" has no two words; expected a last word and some before it");
    return take_pair(job, e, words, len, before, err);
}

/* Reads "stop", a text or a list of texts. */
static int take_stop(Request *e, const cJSON *stop, Error *err) {
    const cJSON *text = cJSON_IsArray(stop) ? stop->child : stop;
    for (; text; text = text == stop ? NULL : text->next) {
        if (!cJSON_IsString(text) || !*text->valuestring)
            return json_refuse(err, "\"stop\"", text,
                               "a text that is not empty, or a list of them");
        text_append(&e->stop, text->valuestring, strlen(text->valuestring) + 1);
    }
    text_append(&e->stop, "", 1);
    return 0;
}

/* Returns a member of an object, or NULL if it is null or not there. */
static const cJSON *given(const cJSON *line, const char *name) {
    const cJSON *value = json_get(line, name);
    return cJSON_IsNull(value) ? NULL : value;
}

/* Reads the fields that say what is to be completed, and how. */
static int take_fields(const Job *job, Request *e, const cJSON *line, Error *err) {
    static const char *const flag[][2] = {{"max_tokens", "--max-tokens"},
                                          {"max_new_tokens", "--max-tokens"},
                                          {"temperature", "--temperature"},
                                          {"top_p", "--top-p"},
                                          {"top_k", "--top-k"},
                                          {"seed", "--seed"}};
    const cJSON *prompt = json_get(line, "prompt"), *value, *stop = given(line, "stop");
    char text[100];
    Options own = {.max_tokens = job->max_tokens, .sampling = job->sampling, .digest = HASH_START};
    for (value = line->child; value; value = value->next) /* "n": 1 asks for what is done */
        if (has_word(" n messages stream logprobs echo ", value->string) &&
            !has_word(*value->string == 'n' ? " null false 1 " : " null false ",
                      json_describe(text, value)))
            return fail(
                err, EXIT_FAILED,
                "\"%s\" asks for what this program does not do: it completes one text once; "
                "leave it out",
                value->string);
    if (!cJSON_IsString(prompt))
        return json_refuse(err, "\"prompt\"", prompt, "a string");
    if (given(line, "max_tokens") && given(line, "max_new_tokens"))
        return fail(err, EXIT_FAILED,
                    "\"max_tokens\" and \"max_new_tokens\" are the same limit; leave one out");
    for (int i = 0; i < 6; i++) {
        value = given(line, flag[i][0]);
        if (value && option_set(&own, flag[i][1], value, err))
            return -1;
    }
    if (stop && take_stop(e, stop, err))
        return -1;
    own.sampling.placeless = value; /* the last one is the seed */
    e->sampling = own.sampling;
    e->own = hash_bytes(own.digest, e->stop.text, e->stop.len);
    return take_text(job, e, prompt->valuestring, strlen(prompt->valuestring), own.max_tokens, err);
}

/* Returns the names of the fields that a line may have. */
static const char *known_fields(const Job *job) {
    if (job->task.scored)
        return "\"id\" \"prompt\" \"completion\" \"text\" ";
    return "\"id\" \"prompt\" \"max_tokens\" \"max_new_tokens\" \"stop\" \"temperature\" \"top_p\" "
           "\"top_k\" \"seed\" \"n\" \"messages\" \"stream\" \"logprobs\" \"echo\" \"custom_id\" "
           "\"method\" \"url\" \"body\" \"model\" ";
}

/* Names each field that is not known once on standard error, until the names are too many. */
static void say_ignored(Job *job, const Lines *l, const cJSON *line) {
    char name[100], *names = job->fields;
    if (!*names)
        strcpy(names, known_fields(job));
    for (const cJSON *field = line->child; field; field = field->next) {
        Error said;
        snprintf(name, sizeof name, "\"%.60s\" ", field->string);
        if (strstr(names, name) || strlen(names) + strlen(name) >= sizeof job->fields)
            continue;
        strcat(names, name);
        fail(&said, EXIT_OK, "%s %s: field %sis not known and is ignored", l->path, l->where, name);
        fprintf(stderr, "%s\n", said.text);
    }
}

/* Reads {"id"?, "prompt", ...}, or {"custom_id", "body": {"prompt", ...}} of an OpenAI batch. */
static int take_object(Job *job, Request *e, const Lines *l, const cJSON *line, Error *err) {
    const cJSON *id = given(line, "custom_id"), *fields = id ? json_get(line, "body") : line;
    say_ignored(job, l, line);
    if (id_text(&e->id, id ? id : given(line, "id"), err))
        return -1;
    if (job->task.scored)
        return take_scored(job, e, line, err);
    if (!cJSON_IsObject(fields))
        return json_refuse(err, "\"body\"", fields, "an object, as there is a \"custom_id\"");
    if (id)
        say_ignored(job, l, fields);
    return take_fields(job, e, fields, err);
}

/* Takes the prompt of a JSON line. */
static int take_json(Job *job, Request *e, const Lines *l, Error *err) {
    cJSON *value = line_parse(l, known_fields(job), err);
    int status = value ? take_object(job, e, l, value, err) : -1;
    cJSON_Delete(value);
    return status;
}

/* Adds a request, as windows if more is to be scored than the model has positions: each token is
 * scored in one of them. Before its first scored token, a window has the token before that; the
 * last, and the only one, has as many tokens as the model takes. */
static void add_windows(Job *job, Request e) {
    int most = job->config->max_pos;
    int at = e.s, end = e.s + e.n, first = imax(end - most - 1, 0); /* the last takes no position */
    e.cut |= at + imin(e.n, most) > most + 1;
    for (; end - at > most; at += most)
        job_push(job, (Request){.line = e.line,
                                .ids = copy_ids(e.ids + at - 1, most + 1),
                                .s = 1,
                                .n = most,
                                .part = true});
    if (first)
        memmove(e.ids, e.ids + first, (end - first) * sizeof *e.ids);
    e.s = at - first;
    e.n = end - at;
    job_push(job, e);
}

void job_add(Job *job, const Lines *l, bool json) {
    Error why;
    Request e = {.line = l->number - 1, .sampling = job->sampling};
    if (json ? take_json(job, &e, l, &why)
             : take_text(job, &e, l->line, l->size, job->max_tokens, &why)) {
        fail_at(&why, l->where);
        e.error = xstrdup(why.text);
    }
    add_windows(job, e);
}

bool job_full(const Job *job) { return job->limit && job->count >= job->limit; }

// -------------------------------------------------------------------------------------------------
// JSON lines or plain lines
// -------------------------------------------------------------------------------------------------

/* Reads the lines as JSON or as plain text: by --format, by the file's name, or by its first line.
 * Without --format a file that is neither as a whole is refused, instead of being completed as
 * text: plain lines one of which is a JSON object, and a file that is one JSON value, such as an
 * array. */
static int read_lines(Job *job, Lines *l, const char *path, Error *err) {
    bool named_json = !fnmatch("?*.jsonl", path, 0), named_text = !fnmatch("?*.txt", path, 0);
    bool named = named_json || named_text, guess = !job->format;
    bool json = guess ? named_json : strcmp(job->format, "text") != 0;
    Text whole = {0};  /* the input so far, while it may be one JSON value, up to MAX_LINE */
    Error mixed = {0}; /* a JSON object among plain lines */
    int more = 0;
    char kind = 0; /* of the input as a whole */
    while (!job_full(job) && (more = line_next(l, err)) > 0 && (named || whole.len <= MAX_LINE)) {
        char first = l->line[strspn(l->line, " \t")];
        bool object =
            guess && !(json && job->count) && first == '{' && json_kind(l->line, l->size) == '{';
        json |= guess && !named && !job->count && first == '{';
        if (object && !json && !mixed.code)
            fail(&mixed, EXIT_USAGE,
                 "%s %s: is a JSON object in a file of plain lines; say --format jsonl, or "
                 "--format text if it is meant as text",
                 l->path, l->where);
        bool opens = !object && (first == '{' || first == '[') && l->size <= MAX_LINE;
        if (guess && whole.len <= MAX_LINE && (job->count ? whole.len : opens)) {
            text_append(&whole, l->line, l->size);
            text_append(&whole, "\n", 1);
        }
        job_add(job, l, json);
    }
    if (whole.len && whole.len <= MAX_LINE)
        kind = json_kind(whole.text, whole.len);
    free(whole.text);
    bool seems = whole.len > MAX_LINE && !named; /* too long to know */
    if (kind == '[' || kind == '{' || seems)
        return fail(err, EXIT_USAGE,
                    "%s: %s one JSON value; expected a JSON object {\"prompt\": ...} on each line, "
                    "or say --format",
                    l->path, seems ? "begins like" : "is");
    if (more < 0 || !mixed.code)
        return more;
    *err = mixed;
    return -1;
}

// -------------------------------------------------------------------------------------------------
// The whole job
// -------------------------------------------------------------------------------------------------

/* Compares two requests by their ids. */
static int by_id(const void *a, const void *b) {
    return strcmp(((const Request *)a)->id, ((const Request *)b)->id);
}

/* Returns the requests that have an id as a tree (tsearch). One with an id that an earlier one has
 * is impossible, since their completions could not be told apart. */
static void *tree_of_ids(const Job *job) {
    void *tree = NULL;
    Error why;
    for (int i = 0; i < job->count; i++) {
        Request *e = &job->request[i], **found = e->id ? tsearch(e, &tree, by_id) : &e;
        if (!found)
            out_of_memory(1, sizeof *e);
        const Request *twin = *found;
        if (twin == e || e->error)
            continue;
        fail(&why, EXIT_FAILED, "line %d: the id %.100s is that of line %d, too; make ids unique",
             e->line + 1, e->id, twin->line + 1);
        free(e->text);
        free(e->ids);
        free(e->stop.text);
        *e = (Request){.line = e->line, .id = e->id, .error = xstrdup(why.text)};
    }
    return tree;
}

/* Gives an id to requests that came without one: the number of the line, or, if another request has
 * that, the first free number behind the last line. */
static void settle_ids(Job *job) {
    void *tree = tree_of_ids(job);
    int next = job->count ? job->request[job->count - 1].line + 1 : 0;
    for (int i = 0; i < job->count; i++) {
        Request *e = &job->request[i];
        char text[16];
        if (e->id || e->part)
            continue;
        snprintf(text, sizeof text, "%d", e->line);
        while (tfind(&(Request){.id = text}, &tree, by_id))
            snprintf(text, sizeof text, "%d", next++);
        e->id = xstrdup(text);
    }
    while (tree)
        tdelete(*(Request **)tree, &tree, by_id);
}

int job_settle(Job *job, const char *name, Error *err) {
    settle_ids(job);
    uint64_t hash = HASH_START;
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        if (e->error && job->strict)
            return fail(err, EXIT_FAILED, "%.500s%s%s", name, *name ? " " : "", e->error);
        hash = hash_text(hash, e->id);
        hash = hash_bytes(hash, &e->n, sizeof e->n);
        hash = hash_text(hash, e->text);
        hash = hash_bytes(hash, e->ids, (e->s + job->task.scored * e->n) * sizeof *e->ids);
        hash = hash_bytes(hash, &e->own, sizeof e->own);
    }
    job->digest = hash;
    return 0;
}

int job_read(Job *job, const char *path, Error *err) {
    Lines lines;
    if (lines_open(&lines, path, err))
        return -1;
    int status = read_lines(job, &lines, path, err);
    lines_close(&lines);
    return status < 0 ? -1 : job_settle(job, lines.path, err);
}

void job_rest(Job *job) {
    Task *t = &job->task;
    t->prompts = xcalloc(job->count, sizeof *t->prompts);
    for (int i = 0; i < job->count; i++) {
        Request *e = &job->request[i];
        if (e->error || e->ended)
            continue;
        if (e->tokens) {
            e->ids = xrealloc(e->ids, e->s + e->known, sizeof *e->ids);
            memcpy(e->ids + e->s, e->tokens, e->known * sizeof *e->tokens);
        }
        int from = e->s + e->known, end = e->s + e->n;
        int s = !t->scored ? from : job->stepwise ? imax(from - 1, 1) : end - 1;
        t->sampled |= e->sampling.temperature > 0;
        t->prompts[t->count++] = (Prompt){
            .ids = e->ids, .s = s, .n = end - s, .from = from, .place = i, .sampling = e->sampling};
    }
}

Score line_score(const Job *job, const Request *last) {
    const Request *e = last;
    Score sum = {0};
    while (e > job->request && e[-1].part)
        e--;
    for (; e <= last; e++) {
        sum.nll += e->score.nll;
        sum.missed |= e->score.missed;
        sum.tokens += e->n;
    }
    return sum;
}

void prompts_free(Task *task) {
    for (int i = 0; i < task->count; i++)
        free(task->prompts[i].ids);
    free(task->prompts);
}

void job_free(Job *job) {
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        free(e->id);
        free(e->text);
        free(e->error);
        free(e->stop.text);
        free(e->ids);
        free(e->tokens);
    }
    free(job->task.prompts);
    free(job->request);
    *job = (Job){0};
}
