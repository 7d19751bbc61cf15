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
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "app/app.h"
#include "plan.h"

/* Seconds between two syncs: the work that is lost if the machine loses its power. */
static const double SYNC_EVERY = 1;
/* Seconds to wait for a lock: the processes of a pipeline that is killed end one by one. */
static const double PATIENCE = 3;

/* Tokens on their way to the journal. */
typedef struct {
    Pair *pair;
    size_t n, room;
} Pairs;

struct Completions {
    Job *job;
    const Tokenizer *tokenizer;
    const Options *options;
    size_t longest_stop; /* bytes of the longest stop text */
    const char *path;    /* NULL: standard output */
    int fd;              /* the output */
    Journal *journal;    /* NULL: the output is not a regular file */
    bool resumed;        /* there was a journal, and the job continues it */
    Progress progress;
    Pairs fresh;  /* tokens of the current sweep */
    int complete; /* number of leading prompts that have all ended */

    pthread_t thread;
    bool running;
    pthread_mutex_t lock; /* guards the fields from here to `error` */
    pthread_cond_t wake;
    Pairs queue;          /* tokens that the thread has to write */
    int ready;            /* prompts whose lines the thread may write: a copy of `complete` */
    bool closing, failed; /* the job has ended; the thread has failed */
    Error error;          /* why it failed */

    /* While the thread runs, only the thread uses the fields below. */
    int written;   /* number of lines in the output */
    size_t end;    /* bytes of these lines */
    bool unsynced; /* something was written after the last sync */
    double synced; /* time of the last sync */
    long tokens;   /* tokens in the lines */
};

static const char *output_name(const Completions *c) {
    return c->path ? c->path : "standard output";
}

// -------------------------------------------------------------------------------------------------
// The end of a completion
// -------------------------------------------------------------------------------------------------

/* Returns where the first stop text in a text begins, or NULL. The text may hold NUL bytes. */
static char *find_stop(const Completions *c, char *text, size_t len) {
    const Texts *stop = &c->options->stop;
    char *first = NULL;
    for (int i = 0; i < stop->n; i++) {
        char *found = memmem(text, len, stop->text[i], strlen(stop->text[i]));
        if (found && (!first || found < first))
            first = found;
    }
    return first;
}

/* Returns true if the newest token completes a stop text. Looks only at the last tokens: each
 * stands for a byte or more, so a stop text has at most longest_stop of them, and 8 more allow for
 * a few special tokens, which stand for no bytes. A stop text with more of these inside is found
 * when the line is written. */
static bool ends_in_stop(const Completions *c, const Request *e) {
    if (!c->options->stop.n)
        return false;
    const int most = (int)c->longest_stop + 8, window = most < e->known ? most : e->known;
    size_t len;
    char *text = tokenizer_decode(c->tokenizer, e->tokens + e->known - window, window, &len);
    const bool stop = find_stop(c, text, len) != NULL;
    free(text);
    return stop;
}

/* Adds the next token of a prompt, and notes if it is the last. */
static void add_token(const Completions *c, Request *e, int32_t token) {
    if ((e->known & (e->known - 1)) == 0) /* a power of two: the room is used up */
        e->tokens = xrealloc(e->tokens, 2 * (size_t)e->known + 1, sizeof *e->tokens);
    e->tokens[e->known++] = token;
    e->stopped = token == c->job->config->eos || ends_in_stop(c, e);
    e->ended = e->stopped || e->known == e->n;
}

// -------------------------------------------------------------------------------------------------
// Lines
// -------------------------------------------------------------------------------------------------

/* Writes the beginning of a line, which says to which prompt it belongs. */
static void write_start(FILE *out, const Request *e) {
    fprintf(out, "{\"id\": %s, ", e->id);
    if (e->error) {
        fprintf(out, "\"error\": ");
    } else {
        fprintf(out, "\"prompt\": ");
        json_write_string(out, e->text, strlen(e->text));
        fprintf(out, ", \"completion\": ");
    }
}

/* Returns how many of the tokens are needed to make the text. The last may reach beyond it. */
static int tokens_of(const Completions *c, const Request *e, int n, const char *text, size_t len) {
    for (bool more = true; more && n;) {
        size_t shorter;
        char *prefix = tokenizer_decode(c->tokenizer, e->tokens, n - 1, &shorter);
        more = shorter >= len && !memcmp(prefix, text, len);
        free(prefix);
        n -= more;
    }
    return n;
}

/* Writes the completion, up to a stop text, and the rest of the line. Returns its tokens. */
static int write_completion(const Completions *c, FILE *out, const Request *e) {
    int n = e->known - (e->known && e->tokens[e->known - 1] == c->job->config->eos);
    size_t len;
    char *text = tokenizer_decode(c->tokenizer, e->tokens, n, &len);
    char *stop = find_stop(c, text, len);
    if (stop) {
        len = (size_t)(stop - text);
        n = tokens_of(c, e, n, text, len);
    }
    json_write_string(out, text, len);
    fprintf(out, ", \"tokens\": [");
    for (int i = 0; i < n; i++)
        fprintf(out, i ? ", %d" : "%d", e->tokens[i]);
    fprintf(out, "], \"finish_reason\": \"%s\"}\n", e->stopped || stop ? "stop" : "length");
    free(text);
    return n;
}

/* Returns the line of the next prompt, malloc'ed. Adds its tokens to the count. */
static char *next_line(Completions *c, size_t *len) {
    const Request *e = &c->job->request[c->written];
    Text line = {0};
    FILE *out = text_stream(&line);
    write_start(out, e);
    if (e->error) {
        json_write_string(out, e->error, strlen(e->error));
        fprintf(out, "}\n");
    } else
        c->tokens += write_completion(c, out, e);
    fclose(out);
    *len = line.len;
    return line.text;
}

/* Returns how somebody has changed the output file during the job, or NULL if nobody has. */
static const char *disturbed(const Completions *c) {
    struct stat mine, there;
    if (!c->journal)
        return NULL;
    if (stat(c->path, &there) || fstat(c->fd, &mine))
        return strerror(errno);
    if (mine.st_dev != there.st_dev || mine.st_ino != there.st_ino)
        return "another file is in its place";
    return (size_t)mine.st_size == c->end ? NULL : "somebody else has written there";
}

/* Writes to a pipe. If nobody has read for a second, a signal can end the job. A pipe that has room
 * at all has room for PIPE_BUF bytes. */
static const char *put_in_pipe(const Completions *c, const char *line, size_t len) {
    for (ssize_t n; len; line += n, len -= (size_t)n) {
        struct pollfd room = {.fd = c->fd, .events = POLLOUT};
        const int ready = poll(&room, 1, 1000);
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
    if (c->journal) {
        const char *why = file_write_at(c->fd, line, len, c->end);
        const int unused = why ? ftruncate(c->fd, (off_t)c->end) : 0;
        (void)unused; /* if this fails too, the line has no end and nobody takes it for whole */
        return why;
    }
    return put_in_pipe(c, line, len);
}

static int check_undisturbed(const Completions *c, Error *err) {
    const char *why = disturbed(c);
    return why ? fail(err, EXIT_FAILED,
                      "%s: was changed while the job wrote it: %s; go on with --resume", c->path,
                      why)
               : 0;
}

/* Writes the lines of all prompts below `upto` that are not written yet. */
static int write_lines(Completions *c, int upto, Error *err) {
    while (c->written < upto) {
        size_t len;
        if (check_undisturbed(c, err))
            return -1;
        char *line = next_line(c, &len);
        const char *why = put(c, line, len);
        free(line);
        if (why)
            return fail(err, EXIT_FAILED, "cannot write %s: %s; make room or write elsewhere",
                        output_name(c), why);
        free(c->job->request[c->written].tokens);
        c->job->request[c->written++].tokens = NULL;
        c->end += len;
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// The writer thread
// -------------------------------------------------------------------------------------------------

/* Syncs the journal, then the output. An output that cannot be synced, such as a pipe, is fine. */
static int sync_all(Completions *c, Error *err) {
    if (c->journal && journal_sync(c->journal, err))
        return -1;
    if (fdatasync(c->fd) && errno != EINVAL && errno != EROFS && errno != ENOTSUP)
        return fail(err, EXIT_FAILED, "cannot write %s: %s; make room or write elsewhere",
                    output_name(c), strerror(errno));
    c->synced = seconds_now();
    c->unsynced = false;
    return check_undisturbed(c, err);
}

/* Writes tokens to the journal, and then the lines that they complete to the output. */
static int write_all(Completions *c, const Pairs *tokens, int upto, Error *err) {
    c->unsynced = true;
    if (c->journal && tokens->n && journal_append(c->journal, tokens->pair, tokens->n, err))
        return -1;
    return write_lines(c, upto, err);
}

/* Sleeps until there is something to write or to sync. The caller holds the lock. */
static void wait_for_work(Completions *c) {
    const struct timespec t = timespec_at(c->synced + SYNC_EVERY);
    while (!c->queue.n && c->ready == c->written && !c->closing) {
        if (c->unsynced && pthread_cond_timedwait(&c->wake, &c->lock, &t) == ETIMEDOUT)
            return;
        if (!c->unsynced)
            pthread_cond_wait(&c->wake, &c->lock);
    }
}

/* Writes what is queued until the job ends or a write fails. */
static void *writer_main(void *arg) {
    Completions *c = arg;
    Pairs taken = {0};
    Error err;
    int status = 0;
    pthread_mutex_lock(&c->lock);
    while (!status && !(c->closing && !c->queue.n && c->ready == c->written && !c->unsynced)) {
        wait_for_work(c);
        /* The two buffers of tokens change places: the one written before becomes the queue. */
        const Pairs empty = {taken.pair, 0, taken.room};
        const int upto = c->ready;
        const bool work = c->queue.n || upto > c->written;
        taken = c->queue;
        c->queue = empty;
        pthread_mutex_unlock(&c->lock);
        if (work)
            status = write_all(c, &taken, upto, &err);
        if (!status && c->unsynced && (!work || seconds_now() - c->synced >= SYNC_EVERY))
            status = sync_all(c, &err);
        pthread_mutex_lock(&c->lock);
    }
    if (status) {
        c->failed = true;
        c->error = err;
    }
    pthread_mutex_unlock(&c->lock);
    free(taken.pair);
    return NULL;
}

static void add_pairs(Pairs *to, const Pair *pair, size_t n) {
    if (to->n + n > to->room) {
        to->room = 2 * (to->n + n);
        to->pair = xrealloc(to->pair, to->room, sizeof *pair);
    }
    if (n)
        memcpy(to->pair + to->n, pair, n * sizeof *pair);
    to->n += n;
}

/* Counts the leading prompts that have all ended. */
static void count_complete(Completions *c) {
    const Job *job = c->job;
    while (c->complete < job->count &&
           (job->request[c->complete].ended || job->request[c->complete].error))
        c->complete++;
}

/* Gives the thread the new tokens and complete prompts. Returns -1 and err if it has failed. */
static int hand_over(Completions *c, Error *err) {
    count_complete(c);
    pthread_mutex_lock(&c->lock);
    if (c->journal)
        add_pairs(&c->queue, c->fresh.pair, c->fresh.n);
    c->fresh.n = 0;
    c->ready = c->complete;
    const bool failed = c->failed;
    if (failed)
        *err = c->error;
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    return failed ? -1 : 0;
}

// -------------------------------------------------------------------------------------------------
// Progress
// -------------------------------------------------------------------------------------------------

/* Counts the work of the task. Its unit is one token's products in a layer, 24 h1^2 operations.
 * Attending to one token takes 4 h1 operations and 4 h1 bytes; the bytes take about ten times as
 * long as the operations. */
void progress_open(Progress *p, const Plan *plan, const Task *task) {
    *p = (Progress){.on = p->on,
                    .sweeps = (double)plan->sweeps,
                    .pair = 1. / plan->config.h1,
                    .tokens = p->tokens};
    const bool count = !p->tokens;
    for (int i = 0; i < task->count; i++) {
        const double s = task->prompts[i].s, n = task->prompts[i].n;
        p->work += s + n - 1 + p->pair * (s * (s + 1) / 2 + (n - 1) * (s + n / 2));
        if (count)
            p->tokens += task->prompts[i].n;
    }
}

/* Assumes that a sweep takes a + b * work seconds, where a is a fixed cost such as streaming the
 * weights, and fits a and b by least squares. */
double progress_left(const Progress *p, const RunStats *stats) {
    const double spread = p->n * p->ww - p->w * p->w;
    if (p->n < 2)
        return -1;
    double b = spread > 0 ? (p->n * p->wt - p->w * p->t) / spread : 0;
    b = fmin(fmax(b, 0), p->t / p->w);
    const double a = (p->t - b * p->w) / p->n;
    return a * (p->sweeps - stats->sweeps) + b * (p->work - p->work_before);
}

void progress_show(Progress *p, const RunStats *stats, long tokens) {
    const double work = stats->prefill_tokens + stats->decoded + p->pair * stats->attended,
                 now = seconds_now();
    const double w = work - p->work_before, t = stats->total_s - p->total_before;
    p->n++;
    p->w += w;
    p->ww += w * w;
    p->t += t;
    p->wt += w * t;
    p->work_before = work;
    p->total_before = stats->total_s;
    if (!p->on || now - p->shown < 0.2) /* seconds: shows at most five lines a second */
        return;
    const double left = progress_left(p, stats);
    p->shown = now;
    fprintf(stderr, "\r%ld sweep%s, %ld of at most %ld token%s, %.1f tokens/s", stats->sweeps,
            plural(stats->sweeps), tokens, p->tokens, plural(p->tokens), tokens / stats->total_s);
    if (left >= 0)
        fprintf(stderr, ", at most %.0f s left", left);
    fprintf(stderr, "\033[K");
}

void progress_clear(const Progress *p) {
    if (p->on)
        fprintf(stderr, "\r\033[K");
}

// -------------------------------------------------------------------------------------------------
// The listener of the engine
// -------------------------------------------------------------------------------------------------

/* Listener.token: takes a new token. Returns true if its sequence ends with it. */
static bool on_token(void *ctx, int prompt, const int32_t *tokens, int n) {
    Completions *c = ctx;
    const Pair pair = {(uint32_t)c->job->task.prompts[prompt].place, tokens[n - 1]};
    Request *e = &c->job->request[pair.place];
    add_token(c, e, pair.token);
    add_pairs(&c->fresh, &pair, 1);
    return e->stopped;
}

static int on_sweep(void *ctx, const RunStats *stats, Error *err) {
    Completions *c = ctx;
    progress_show(&c->progress, stats, stats->generated);
    return hand_over(c, err);
}

Listener completions_listener(Completions *c) {
    return (Listener){.ctx = c, .token = on_token, .done = completion_ignored, .sweep = on_sweep};
}

int completion_ignored(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason,
                       Error *err) {
    (void)ctx;
    (void)prompt;
    (void)tokens;
    (void)n;
    (void)reason;
    (void)err;
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Resuming
// -------------------------------------------------------------------------------------------------

/* Refuses the journal if its first line is not that of this job. */
static int compare_heads(const Completions *c, const cJSON *head, Error *err) {
    for (const cJSON *here = head->child; here; here = here->next) {
        const cJSON *there = json_get(journal_head(c->journal), here->string);
        if (cJSON_Compare(here, there, true))
            continue;
        char *is = cJSON_PrintUnformatted(here),
             *was = there ? cJSON_PrintUnformatted(there) : NULL;
        fail(err, EXIT_USAGE,
             "%s is of another job: its %s is %.100s, and here it is %.100s; finish that job, or "
             "--overwrite",
             journal_path(c->journal), here->string, was ? was : "missing", is);
        free(is);
        free(was);
        return -1;
    }
    return 0;
}

/* Takes a token from the journal. Returns -1 if it cannot belong to this job. */
static int take_token(void *ctx, uint32_t place, int32_t token) {
    Completions *c = ctx;
    if (place >= (uint32_t)c->job->count)
        return -1;
    Request *e = &c->job->request[place];
    if (e->error || e->ended || token < 0 || token >= c->job->config->vocab)
        return -1;
    add_token(c, e, token);
    return 0;
}

static bool is_line_of(const Request *e, const Lines *l) {
    Text start = {0};
    FILE *out = text_stream(&start);
    write_start(out, e);
    fclose(out);
    const bool is =
        start.len < l->size && !memcmp(start.text, l->line, start.len) && l->line[l->size] == '\n';
    free(start.text);
    return is;
}

/* Checks that an output without a journal is the complete output of this job. */
static int check_finished(const Completions *c, Error *err) {
    const Job *job = c->job;
    size_t len;
    Error unread; /* ignored: an unreadable file counts as one without lines */
    char *text = input_read(c->path, &len, &unread);
    int n = 0;
    bool same = true;
    Lines l = {.text = text, .len = text ? len : 0, .name = ""};
    for (; same && line_next(&l); n += same)
        same = n < job->count && is_line_of(&job->request[n], &l);
    free(text);
    if (same && n == job->count)
        return 0;
    if (n)
        return fail(err, EXIT_USAGE,
                    "--resume: %s has no journal and only %d of the %d lines of this job; bring "
                    "back %s.journal, or begin anew with --overwrite",
                    c->path, n, job->count, c->path);
    return fail(err, EXIT_USAGE,
                "--resume: %s has no journal and is not the output of this job; move it away, or "
                "--overwrite",
                c->path);
}

int completions_resume(Completions *c, const cJSON *head, bool *finished, Error *err) {
    size_t size;
    *finished = false;
    if (!c->options->resume)
        return 0;
    if (c->resumed)
        return compare_heads(c, head, err) || journal_read(c->journal, take_token, c, err) ? -1 : 0;
    if (file_size(&size, c->path, err))
        return -1;
    *finished = size > 0;
    return *finished && (check_finished(c, err) || journal_remove(c->journal, err)) ? -1 : 0;
}

/* Keeps the lines that an earlier run has written, as far as they agree with the journal. What
 * comes after them was cut off by a kill, or is newer than a journal that lost its end when the
 * machine lost its power; it will be written again. */
static int keep_lines(Completions *c, int upto, Error *err) {
    struct stat st;
    if (fstat(c->fd, &st))
        return fail(err, EXIT_FAILED, "%s: cannot read: %s", c->path, strerror(errno));
    bool whole = true;
    while (whole && c->written < upto) {
        const long tokens = c->tokens;
        size_t len;
        char *line = next_line(c, &len), *there = xcalloc(len, 1);
        const size_t left = (size_t)st.st_size - c->end, most = left < len ? left : len;
        const char *why = file_read_at(c->fd, there, most, c->end);
        /* Zeros are bytes that did not reach the disk before the power was lost. */
        const size_t n = strnlen(there, most);
        const bool same = !why && !memcmp(line, there, n);
        free(line);
        free(there);
        if (why)
            return fail(err, EXIT_FAILED, "%s: read error: %s", c->path, why);
        if (!same)
            return fail(err, EXIT_USAGE,
                        "%s: line %d is not what %s says; move the output away, and --resume "
                        "writes it anew",
                        c->path, c->written + 1, journal_path(c->journal));
        whole = n == len;
        if (whole) {
            c->end += len;
            c->written++;
        } else
            c->tokens = tokens;
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Opening, beginning, closing
// -------------------------------------------------------------------------------------------------

Completions *completions_follow(Job *job, const Tokenizer *tokenizer, const Options *o) {
    Completions *c = xcalloc(1, sizeof *c);
    pthread_mutex_init(&c->lock, NULL);
    cond_open(&c->wake);
    c->job = job;
    c->tokenizer = tokenizer;
    c->options = o;
    c->fd = STDOUT_FILENO;
    for (int i = 0; i < o->stop.n; i++)
        if (strlen(o->stop.text[i]) > c->longest_stop)
            c->longest_stop = strlen(o->stop.text[i]);
    return c;
}

Completions *completions_open(Job *job, const Tokenizer *tokenizer, const Options *o, Error *err) {
    Completions *c = completions_follow(job, tokenizer, o);
    size_t size = 0;
    int status = 0;
    if (o->output && strcmp(o->output, "-"))
        c->path = o->output;
    if (c->path)
        status = output_check("--output", c->path, err);
    if (!status && c->path && !output_is_special(c->path)) {
        c->journal = journal_open(c->path, o->resume ? PATIENCE : 0, err);
        if (!c->journal)
            status = -1;
    } else if (!status && o->resume)
        status = fail(err, EXIT_USAGE, "--resume: %s has no journal; name a file with --output",
                      output_name(c));
    if (c->journal)
        status = file_size(&size, c->path, err);
    const bool there = c->journal && (journal_head(c->journal) || size);
    if (!status && there && !o->resume && !o->overwrite)
        status =
            fail(err, EXIT_USAGE,
                 "--output %s: is there already; go on with --resume, or lose it with --overwrite",
                 c->path);
    c->resumed = o->resume && c->journal && journal_head(c->journal);
    if (!status)
        return c;
    completions_free(c);
    return NULL;
}

bool completions_last(const Completions *c) { return c->journal != NULL; }
const cJSON *completions_head(const Completions *c) {
    return c->resumed ? journal_head(c->journal) : NULL;
}

static int open_output(Completions *c, Error *err) {
    c->fd = open(c->path, (c->journal ? O_RDWR | O_CREAT : O_WRONLY) | O_CLOEXEC, 0666);
    if (c->fd < 0)
        return fail(err, EXIT_FAILED, "--output %s: %s; name a file that can be written", c->path,
                    strerror(errno));
    /* Another job may have opened the same file under another name. */
    if (c->journal && !file_lock(c->fd, c->resumed ? PATIENCE : 0) && errno == EWOULDBLOCK)
        return fail(err, EXIT_USAGE, "--output %s: another job is writing there; wait for its end",
                    c->path);
    if (c->resumed && keep_lines(c, c->complete, err))
        return -1;
    if (c->journal && ftruncate(c->fd, (off_t)c->end))
        return fail(err, EXIT_FAILED, "--output %s: %s", c->path, strerror(errno));
    return 0;
}

int completions_begin(Completions *c, const cJSON *head, Error *err) {
    count_complete(c);
    if (c->path && open_output(c, err))
        return -1;
    if (c->journal && journal_begin(c->journal, c->resumed ? NULL : head, err))
        return -1;
    c->synced = seconds_now();
    const int status = pthread_create(&c->thread, NULL, writer_main, c);
    c->running = !status;
    return status ? fail_to_start(err, status) : 0;
}

int completions_end(Completions *c, int status, Error *err) {
    Error mine;
    if (!c->running)
        return status;
    int written = hand_over(c, &mine);
    pthread_mutex_lock(&c->lock);
    c->closing = true;
    pthread_cond_signal(&c->wake);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    c->running = false;
    if (c->failed) {
        written = -1;
        mine = c->error;
    }
    if (!status && written)
        *err = mine;
    if (status || written)
        return -1;
    return c->journal && c->written == c->job->count ? journal_remove(c->journal, err) : 0;
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
    free(c->fresh.pair);
    free(c->queue.pair);
    free(c);
}
