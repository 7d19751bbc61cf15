/* completions.c: writes the results of a job: a journal of tokens, a line for each prompt, and the
 * progress on standard error.
 *
 * The journal is the record of the job, and the output is derived from it. After every sweep the
 * new tokens go to a thread of their own. This thread appends them to the journal, then writes the
 * lines of the prompts that are complete, in the order of the input, and syncs both about once a
 * second. So the sweep never waits for a disk. A job that is resumed reads its journal, checks
 * again which completions have ended (the last token may be in the journal and its line not in the
 * output), and continues every sequence after its last token.
 *
 * Standard output, pipes and devices have no journal.
 * Read next: eval.c. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <unistd.h>

#include "app/app.h"

/* Seconds between two syncs: the work that is lost if the machine loses its power. */
static const double SYNC_EVERY = 1;

/* Tokens on their way to the journal. */
typedef struct {
    Pair *pair;
    size_t n;
} Pairs;

struct Completions {
    Job *job;
    const Options *options;
    Text stop;        /* the texts of --stop, as in Request.stop */
    bool openai;      /* the lines are those of an OpenAI batch's output */
    const char *path; /* NULL: standard output */
    int fd;           /* the output */
    Journal *journal; /* NULL: the output is not a regular file */
    bool resumed;     /* there was a journal of an unfinished job, and this job continues it */
    size_t found;     /* bytes of the output that was there */
    Progress progress;
    long told; /* tokens that have come in this run */

    pthread_t thread;
    pthread_mutex_t lock; /* guards the fields from here to `error` */
    pthread_cond_t wake;
    bool news;            /* something has come that the thread has not seen */
    Pairs queue;          /* tokens that the thread has to write */
    int ready;            /* the number of leading prompts that have all ended */
    bool closing, failed; /* the job has ended; the thread has failed */
    Error error;          /* why it failed */

    /* While the thread runs, only the thread uses the fields below. */
    int written;   /* number of lines in the output */
    size_t end;    /* bytes of these lines */
    uint64_t hash; /* of these bytes */
    double synced; /* time of the last sync */
    long tokens;   /* tokens in the lines */
};

static const char *output_name(const Completions *c) {
    return c->path ? c->path : "standard output";
}

// -------------------------------------------------------------------------------------------------
// The end of a completion
// -------------------------------------------------------------------------------------------------

/* Returns the stop texts of a prompt: its line's, or else those of --stop. */
static const Text *stops_of(const Completions *c, const Request *e) {
    return e->stop.len ? &e->stop : &c->stop;
}

/* Returns where the first stop text in a text begins, or NULL. The text may hold NUL bytes. */
static char *find_stop(const Text *stops, char *text, size_t len) {
    char *first = NULL;
    for (const char *stop = stops->text; *stop; stop += strlen(stop) + 1) {
        char *found = memmem(text, len, stop, strlen(stop));
        if (found && (!first || found < first))
            first = found;
    }
    return first;
}

/* Returns true if the newest token completes a stop text. Looks only at the last tokens: each
 * stands for a byte or more, so a stop text has at most as many of them as all have bytes, and 8
 * more allow for a few special tokens, which stand for no bytes. A stop text with more of these
 * inside is found when the line is written. */
static bool ends_in_stop(const Completions *c, const Request *e) {
    const Text *stops = stops_of(c, e);
    if (!stops->text[0])
        return false;
    int window = size_min(stops->len + 8, e->known);
    size_t len;
    char *text = tokenizer_decode(c->job->tokenizer, e->tokens + e->known - window, window, &len);
    bool stop = find_stop(stops, text, len) != NULL;
    free(text);
    return stop;
}

/* Adds the next token of a prompt, or its score, and notes if it is the last. */
static void add_token(const Completions *c, Request *e, Pair pair) {
    if (c->job->task.scored) {
        e->score.nll += fabsf(pair.logp);
        e->score.missed |= !signbit(pair.logp);
        e->known++;
    } else {
        e->tokens = with_room(e->tokens, e->known, sizeof *e->tokens);
        e->tokens[e->known++] = pair.token;
        e->stopped = is_eos(c->job->config, pair.token) || ends_in_stop(c, e);
    }
    e->ended = e->stopped || e->known == e->n;
}

// -------------------------------------------------------------------------------------------------
// Lines
// -------------------------------------------------------------------------------------------------

/* A completion as it is written: up to a stop text. */
typedef struct {
    char *text; /* malloc'ed */
    size_t len;
    int tokens; /* as many of the request's as make the text */
    const char *reason;
} Written;

/* Returns how many of the tokens are needed to make the text. The last may reach beyond it. */
static int tokens_of(const Completions *c, const Request *e, int n, const char *text, size_t len) {
    for (bool more = true; more && n;) {
        size_t shorter;
        char *prefix = tokenizer_decode(c->job->tokenizer, e->tokens, n - 1, &shorter);
        more = shorter >= len && !memcmp(prefix, text, len);
        free(prefix);
        n -= more;
    }
    return n;
}

/* Returns what is written of a prompt that could be completed. */
static Written completion_of(const Completions *c, const Request *e) {
    Written w = {.tokens =
                     e->known - (e->known && is_eos(c->job->config, e->tokens[e->known - 1]))};
    w.text = tokenizer_decode(c->job->tokenizer, e->tokens, w.tokens, &w.len);
    const char *stop = find_stop(stops_of(c, e), w.text, w.len);
    if (stop) {
        w.len = stop - w.text;
        w.tokens = tokens_of(c, e, w.tokens, w.text, w.len);
    }
    w.reason = e->stopped || stop ? "stop" : "length";
    return w;
}

static void write_line(FILE *out, const Request *e, const Written *w) {
    const char *text = e->error ? e->error : e->text;
    fprintf(out, "{\"id\": %s, \"%s\": ", e->id, e->error ? "error" : "prompt");
    json_write_string(out, text, strlen(text));
    if (!e->error) {
        fprintf(out, ", \"completion\": ");
        json_write_string(out, w->text, w->len);
        fprintf(out, ", \"tokens\": [");
        for (int i = 0; i < w->tokens; i++)
            fprintf(out, i ? ", %d" : "%d", e->tokens[i]);
        fprintf(out, "], \"finish_reason\": \"%s\"", w->reason);
    }
    fprintf(out, "}\n");
}

/* Writes a line as OpenAI's batches answer. An id there is a string. */
static void write_answer(const Completions *c, FILE *out, const Request *e, const Written *w) {
    const char *quote = *e->id == '"' ? "" : "\"", *model = c->job->config->name;
    fprintf(out, "{\"id\": \"batch_req_%d\", \"custom_id\": %s%s%s, \"response\": ", c->written,
            quote, e->id, quote);
    if (e->error) {
        fprintf(out, "null, \"error\": {\"code\": \"invalid_request\", \"message\": ");
        json_write_string(out, e->error, strlen(e->error));
        fprintf(out, "}}\n");
        return;
    }
    fprintf(out,
            "{\"status_code\": 200, \"request_id\": \"req_%d\", \"body\": {\"id\": \"cmpl-%d\", "
            "\"object\": \"text_completion\", \"model\": ",
            c->written, c->written);
    json_write_string(out, model, strlen(model));
    fprintf(out, ", \"choices\": [{\"index\": 0, \"text\": ");
    json_write_string(out, w->text, w->len);
    fprintf(out,
            ", \"finish_reason\": \"%s\"}], \"usage\": {\"prompt_tokens\": %d, "
            "\"completion_tokens\": %d, \"total_tokens\": %d}}}, \"error\": null}\n",
            w->reason, e->s, w->tokens, e->s + w->tokens);
}

/* Writes the score of a line, whose last request this is. */
static void write_score(const Completions *c, FILE *out, const Request *last) {
    Score line = line_score(c->job, last);
    fprintf(out, "{\"id\": %s, \"logprob\": %.12g, \"greedy\": %s, \"tokens\": %d}\n", last->id,
            0 - line.nll, line.missed ? "false" : "true", line.tokens); /* 0 - 0 is not -0 */
}

/* Returns the line of the next request, which is empty if it is a part, and how many tokens are in
 * it. */
static Text next_line(const Completions *c, int *tokens) {
    const Request *e = &c->job->request[c->written];
    Text line = {0};
    FILE *out = text_stream(&line);
    if (e->error || !c->job->task.scored) {
        Written w = e->error ? (Written){0} : completion_of(c, e);
        if (c->openai)
            write_answer(c, out, e, &w);
        else
            write_line(out, e, &w);
        free(w.text);
        *tokens = w.tokens;
    } else {
        if (!e->part)
            write_score(c, out, e);
        *tokens = e->n;
    }
    fclose(out);
    return line;
}

/* Counts a line that is in the output. Its request does not need its tokens any more. */
static void count_line(Completions *c, const Text *line, int tokens) {
    Request *e = &c->job->request[c->written++];
    free(e->tokens);
    e->tokens = NULL;
    c->end += line->len;
    c->hash = hash_bytes(c->hash, line->text, line->len);
    c->tokens += tokens;
}

/* Checks that nobody has changed the output file during the job. This and all functions up to the
 * thread's return -1 and note their error in c->error if something is wrong. */
static int check_undisturbed(Completions *c) {
    struct stat mine, there;
    const char *why = NULL;
    if (!c->journal)
        return 0;
    if (stat(c->path, &there) || fstat(c->fd, &mine))
        why = strerror(errno);
    else if (mine.st_dev != there.st_dev || mine.st_ino != there.st_ino)
        why = "another file is in its place";
    else if ((size_t)mine.st_size != c->end)
        why = "somebody else has written there";
    if (!why)
        return 0;
    return fail(&c->error, EXIT_FAILED,
                "%s: was changed while the job wrote it: %s; go on with --resume", c->path, why);
}

/* Writes to a pipe. If nobody has read for a second, a signal can end the job. A pipe that has room
 * at all has room for PIPE_BUF bytes. */
static const char *put_in_pipe(const Completions *c, const char *line, size_t len) {
    for (ssize_t n; len; line += n, len -= n) {
        struct pollfd room = {.fd = c->fd, .events = POLLOUT};
        int ready = poll(&room, 1, 1000);
        if (!ready && __atomic_load_n(stop_signal(), __ATOMIC_RELAXED))
            return "nobody reads it";
        n = ready > 0 ? write(c->fd, line, len < PIPE_BUF ? len : PIPE_BUF) : ready;
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return strerror(errno);
        if (n < 0)
            n = 0;
    }
    return NULL;
}

/* Writes a line to the end of the file, as a whole or not at all; or to a pipe. */
static const char *put(const Completions *c, const char *line, size_t len) {
    if (!c->journal)
        return put_in_pipe(c, line, len);
    const char *why = file_write_at(c->fd, line, len, c->end);
    int unused = why ? ftruncate(c->fd, c->end) : 0;
    (void)unused; /* if this fails too, the line has no end and nobody takes it for whole */
    return why;
}

static int cannot_write(Completions *c, const char *why) {
    return fail(&c->error, EXIT_FAILED, "cannot write %s: %s; make room or write elsewhere",
                output_name(c), why);
}

/* Writes the lines of all prompts below `upto` that are not written yet. */
static int write_lines(Completions *c, int upto) {
    while (c->written < upto) {
        int tokens;
        if (check_undisturbed(c))
            return -1;
        Text line = next_line(c, &tokens);
        const char *why = put(c, line.text, line.len);
        if (!why)
            count_line(c, &line, tokens);
        free(line.text);
        if (why)
            return cannot_write(c, why);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The writer thread
// -------------------------------------------------------------------------------------------------

/* Syncs the journal, then the output. An output that cannot be synced, such as a pipe, is fine. */
static int sync_all(Completions *c) {
    if (c->journal && journal_sync(c->journal, &c->error))
        return -1;
    if (file_sync(c->fd) && errno != EINVAL && errno != EROFS && errno != ENOTSUP)
        return cannot_write(c, strerror(errno));
    c->synced = seconds_now();
    return check_undisturbed(c);
}

/* Writes tokens to the journal, and then the lines that they complete to the output. Syncs both if
 * it is time, or the last time. */
static int write_all(Completions *c, const Pairs *tokens, int upto, bool last) {
    if (tokens->n && journal_append(c->journal, tokens->pair, tokens->n, &c->error))
        return -1;
    if (write_lines(c, upto))
        return -1;
    return last || seconds_now() - c->synced >= SYNC_EVERY ? sync_all(c) : 0;
}

/* Writes what has come until the job ends or a write fails. Sleeps until there are news, or it is
 * time to sync. */
static void *writer_main(void *arg) {
    Completions *c = arg;
    Pairs taken = {0};
    bool last = false;
    int status = 0;
    pthread_mutex_lock(&c->lock);
    while (!last && !status) {
        while (!c->news && cond_wait_until(&c->wake, &c->lock, c->synced + SYNC_EVERY))
            continue;
        /* The two buffers of tokens change places: the one written before becomes the queue. */
        Pairs empty = {taken.pair, 0};
        int upto = c->ready;
        taken = c->queue;
        c->queue = empty;
        last = c->closing;
        c->news = false;
        pthread_mutex_unlock(&c->lock);
        status = write_all(c, &taken, upto, last);
        pthread_mutex_lock(&c->lock);
    }
    c->failed = status;
    pthread_mutex_unlock(&c->lock);
    free(taken.pair);
    return NULL;
}

/* Counts the leading prompts that have all ended, and tells the thread that there are news, or that
 * the job has ended (`last`). Returns true if the thread has failed; then c->error says why. */
static bool hand_over(Completions *c, bool last) {
    const Request *e = c->job->request;
    pthread_mutex_lock(&c->lock);
    while (c->ready < c->job->count && (e[c->ready].ended || e[c->ready].error))
        c->ready++;
    c->news = true;
    c->closing = last;
    bool failed = c->failed;
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    return failed;
}

// -------------------------------------------------------------------------------------------------
// Progress
// -------------------------------------------------------------------------------------------------

/* Counts the work of the task. Its unit is one token's products in a layer, 24 h1^2 operations.
 * Attending to one token takes 4 h1 operations and 4 h1 bytes; the bytes take about ten times as
 * long as the operations. */
void progress_open(Progress *p, const Plan *plan, const Task *task) {
    p->on = isatty(STDERR_FILENO);
    p->every = p->on ? 0.2 : 60;
    p->shown = p->on ? 0 : seconds_now();
    p->sweeps = plan->sweeps;
    p->count = task->count;
    p->pair = 1. / plan->config.h1;
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        double s = q->s, n = q->n;
        p->work += s + n - 1 + p->pair * (s * (s + 1) / 2 + (n - 1) * (s + n / 2));
        p->tokens += task->scored ? q->s + q->n - q->from : q->n;
    }
}

/* Assumes that a sweep takes a + b * work seconds, where a is a fixed cost such as streaming the
 * weights, and fits a and b by least squares. */
double progress_left(const Progress *p) {
    double spread = p->n * p->ww - p->w * p->w;
    if (p->n < 2)
        return -1;
    double b = spread > 0 ? (p->n * p->wt - p->w * p->t) / spread : 0;
    b = fmin(fmax(b, 0), p->t / p->w);
    double a = (p->t - b * p->w) / p->n;
    return a * (p->sweeps - p->n) + b * (p->work - p->w);
}

void progress_show(Progress *p, const RunStats *stats, long tokens) {
    double work = stats->prefill_tokens + stats->decoded + p->pair * stats->attended,
           w = work - p->w, t = stats->total_s - p->t, now = seconds_now();
    p->n++;
    p->w = work;
    p->t = stats->total_s;
    p->ww += w * w;
    p->wt += w * t;
    if (p->every <= 0 || now - p->shown < p->every)
        return;
    double left = progress_left(p);
    p->shown = now;
    if (p->on)
        putc('\r', stderr);
    else
        fprintf(stderr, "%ld of %d sequence%s, ", stats->ended, p->count, plural(p->count));
    fprintf(stderr, "%ld sweep%s, %ld of at most %ld token%s, %.1f tokens/s", stats->sweeps,
            plural(stats->sweeps), tokens, p->tokens, plural(p->tokens), tokens / stats->total_s);
    if (left >= 0)
        fprintf(stderr, ", at most %.0f s left", left);
    fprintf(stderr, p->on ? "\033[K" : "\n");
}

void progress_clear(const Progress *p) {
    if (p->on)
        fprintf(stderr, "\r\033[K");
}

// -------------------------------------------------------------------------------------------------
// The listener of the engine
// -------------------------------------------------------------------------------------------------

/* Takes a new token, or its score. Returns true if its sequence ends with it. */
static bool take_newest(Completions *c, Pair pair) {
    Request *e = &c->job->request[pair.place];
    add_token(c, e, pair);
    c->told++;
    if (!c->journal)
        return e->stopped;
    pthread_mutex_lock(&c->lock);
    Pairs *q = &c->queue;
    q->pair = with_room(q->pair, q->n, sizeof *q->pair);
    q->pair[q->n++] = pair;
    pthread_mutex_unlock(&c->lock);
    return e->stopped;
}

/* Listener.token. */
static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    Completions *c = ctx;
    return take_newest(c, (Pair){c->job->task.prompts[prompt].place, {.token = tokens[n - 1]}});
}

/* Listener.scored. */
static void on_scored(void *ctx, int prompt, int at, float logp, int32_t best) {
    Completions *c = ctx;
    const Prompt *p = &c->job->task.prompts[prompt];
    take_newest(c, (Pair){p->place, {.logp = copysignf(logp, best == p->ids[at] ? -1 : 1)}});
}

static int on_sweep(void *ctx, const RunStats *stats, Error *err) {
    Completions *c = ctx;
    progress_show(&c->progress, stats, c->told);
    if (!hand_over(c, false))
        return 0;
    *err = c->error;
    return -1;
}

Listener completions_listener(Completions *c) {
    /* In a scored task the tokens are given, and only their scores are news. */
    return (Listener){.ctx = c,
                      .token = c->job->task.scored ? NULL : on_token,
                      .scored = on_scored,
                      .sweep = on_sweep};
}

// -------------------------------------------------------------------------------------------------
// Resuming
// -------------------------------------------------------------------------------------------------

/* Refuses the journal if its first line is not that of this job. */
static int compare_heads(const Completions *c, const cJSON *head, Error *err) {
    for (const cJSON *here = head->child; here; here = here->next) {
        const cJSON *there = json_get(c->journal->head, here->string);
        if (cJSON_Compare(here, there, true))
            continue;
        char *is = cJSON_PrintUnformatted(here), *was = cJSON_PrintUnformatted(there);
        fail(err, EXIT_USAGE,
             "%s is of another job: its %s is %.100s, and here it is %.100s; name another file, or "
             "--overwrite",
             c->journal->path, here->string, was ? was : "missing", is);
        free(is);
        free(was);
        return -1;
    }
    return 0;
}

/* Takes a token from the journal. Returns -1 if it cannot belong to this job. */
static int take_token(void *ctx, Pair pair) {
    Completions *c = ctx;
    if (pair.place >= (uint32_t)c->job->count)
        return -1;
    Request *e = &c->job->request[pair.place];
    bool possible = c->job->task.scored ? isfinite(pair.logp)
                                        : pair.token >= 0 && pair.token < c->job->config->vocab;
    if (e->error || e->ended || !possible)
        return -1;
    add_token(c, e, pair);
    return 0;
}

/* Describes an output by the number of its bytes and their hash. */
static void write_state(char state[64], size_t bytes, uint64_t hash) {
    snprintf(state, 64, "%zu bytes, %016" PRIx64, bytes, hash);
}

/* Checks that the output is that of this job, which has ended, and that nobody has changed it. */
static int check_finished(const Completions *c, const cJSON *head, Error *err) {
    const char *was = cJSON_GetStringValue(json_get(c->journal->head, JOURNAL_ENDED));
    char is[64];
    size_t len;
    if (!was)
        return fail(err, EXIT_USAGE,
                    "--resume: %s has no journal, so that nobody knows what job it is of; bring "
                    "back %s.journal, or move it away and begin anew, or --overwrite",
                    c->path, c->path);
    if (compare_heads(c, head, err))
        return -1;
    char *text = file_read(c->path, SIZE_MAX, &len, err);
    if (!text)
        return -1;
    write_state(is, len, hash_bytes(HASH_START, text, len));
    free(text);
    if (!strcmp(is, was))
        return 0;
    return fail(err, EXIT_USAGE,
                "--resume: %s was changed after its job had ended: it has %s, and had %s; move it "
                "away and begin anew, or --overwrite",
                c->path, is, was);
}

int completions_resume(Completions *c, const cJSON *head, bool *finished, Error *err) {
    *finished = c->options->resume && !c->resumed && c->found;
    if (c->resumed)
        return compare_heads(c, head, err) || journal_read(c->journal, take_token, c, err) ? -1 : 0;
    return *finished ? check_finished(c, head, err) : 0;
}

/* Keeps the next line if the output has it as a whole. Returns 1 then, 0 if it ends before, or -1
 * and err if it goes on otherwise or cannot be read. */
static int keep_line(Completions *c, Error *err) {
    int tokens, status = 0;
    Text line = next_line(c, &tokens);
    size_t there = size_min(size_less(c->found, c->end), line.len);
    char *text = file_read_part(c->fd, c->path, there, c->end, err);
    /* Zeros are bytes that did not reach the disk before the power was lost. */
    size_t n = text ? strnlen(text, there) : 0;
    if (!text)
        status = -1;
    else if (n && memcmp(line.text, text, n)) /* a part has no text at all */
        status = fail(err, EXIT_USAGE,
                      "%s: line %d is not what %s says; move the output away, and --resume writes "
                      "it anew",
                      c->path, c->written + 1, c->journal->path);
    else if (n == line.len) {
        /* If a sync failed, it was read from memory, and may not be on the disk. */
        const char *why = file_write_at(c->fd, text, n, c->end);
        status = why ? fail(err, EXIT_FAILED, "%s: cannot write: %s", c->path, why) : 1;
    }
    if (status > 0)
        count_line(c, &line, tokens);
    free(text);
    free(line.text);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Opening, beginning, closing
// -------------------------------------------------------------------------------------------------

Completions *completions_follow(Job *job, const Options *o) {
    Completions *c = xcalloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    cond_open(&c->wake);
    c->job = job;
    c->options = o;
    c->fd = STDOUT_FILENO;
    c->hash = HASH_START;
    c->openai = o->format && !strcmp(o->format, "openai");
    for (int i = 0; i < o->stop.n; i++)
        text_append(&c->stop, o->stop.text[i], strlen(o->stop.text[i]) + 1);
    text_append(&c->stop, "", 1);
    return c;
}

/* Looks at the output, and opens the journal if it has one. */
static int look_at_output(Completions *c, Error *err) {
    const Options *o = c->options;
    struct stat st = {.st_size = 0};
    if (!c->path || output_is_special(c->path))
        return o->resume
                   ? fail(err, EXIT_USAGE, "--resume: %s has no journal; name a file with --output",
                          output_name(c))
                   : 0;
    c->journal = journal_open(c->path, err);
    if (!c->journal)
        return -1;
    stat(c->path, &st);
    c->found = st.st_size;
    const cJSON *head = c->journal->head;
    bool ended = json_get(head, JOURNAL_ENDED);
    c->resumed = o->resume && head && !ended;
    if (o->resume || o->overwrite || (!c->found && (!head || ended)))
        return 0;
    return fail(err, EXIT_USAGE,
                "--output %s: is there already; go on with --resume, or lose it with --overwrite",
                c->path);
}

Completions *completions_open(Job *job, const Options *o, Error *err) {
    Completions *c = completions_follow(job, o);
    if (o->output && strcmp(o->output, "-"))
        c->path = o->output;
    if (!look_at_output(c, err))
        return c;
    completions_free(c);
    return NULL;
}

const cJSON *completions_head(const Completions *c) {
    /* The head of a job that has ended says nothing if its output has been removed since. */
    bool counts = c && c->journal && c->options->resume && (c->resumed || c->found);
    return counts ? c->journal->head : NULL;
}

/* Opens the output, and begins its journal. */
static int open_output(Completions *c, const cJSON *head, Error *err) {
    c->fd = open(c->path, (c->journal ? O_RDWR | O_CREAT : O_WRONLY) | O_CLOEXEC, 0666);
    if (c->fd < 0)
        return fail(err, EXIT_FAILED, "--output %s: %s; name a file that can be written", c->path,
                    strerror(errno));
    if (!c->journal)
        return 0;
    /* Another job may have opened the same file under another name. */
    if (!file_lock(c->fd, 0) && errno == EWOULDBLOCK)
        return fail(err, EXIT_USAGE, "--output %s: another job is writing there; wait for its end",
                    c->path);
    /* What comes after the lines that are kept was cut off by a kill, or is newer than a journal
     * that lost its end when the machine lost its power; it will be written again. */
    int kept = c->resumed;
    while (kept > 0 && c->written < c->ready)
        kept = keep_line(c, err);
    if (kept < 0)
        return -1;
    if (ftruncate(c->fd, c->end))
        return fail(err, EXIT_FAILED, "--output %s: %s", c->path, strerror(errno));
    return journal_begin(c->journal, c->resumed ? NULL : head, err);
}

int completions_begin(Completions *c, const cJSON *head, Error *err) {
    hand_over(c, false); /* counts the prompts that have ended already */
    if (c->path && open_output(c, head, err))
        return -1;
    c->synced = seconds_now();
    int why = pthread_create(&c->thread, NULL, writer_main, c);
    return why ? fail_to_start(err, why) : 0;
}

int completions_end(Completions *c, int status, Error *err) {
    char state[64];
    hand_over(c, true);
    pthread_join(c->thread, NULL);
    if (!status && c->failed) {
        *err = c->error;
        status = -1;
    }
    if (status)
        return *stop_signal() ? stop_fail(err, c->journal ? "; go on with --resume" : "") : -1;
    write_state(state, c->end, c->hash);
    return c->journal && c->written == c->job->count ? journal_end(c->journal, state, err) : 0;
}

Progress *completions_progress(Completions *c) { return &c->progress; }
long completions_tokens(const Completions *c) { return c->tokens; }

void completions_free(Completions *c) {
    if (!c)
        return;
    journal_close(c->journal);
    if (c->fd != STDOUT_FILENO)
        close(c->fd); /* the thread has synced it */
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->wake);
    free(c->queue.pair);
    free(c->stop.text);
    free(c);
}
