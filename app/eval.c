/* eval.c: measures the cost of approximations (section 6.2, Table 6): the perplexity of a text, and
 * how often the last word of a line is predicted.
 *
 * It follows the usual protocols, so that the figures can be compared with others. WikiText: the
 * whole text is cut into disjoint windows of the model's length. LAMBADA: the last word counts as
 * predicted if each of its tokens is the greedy choice after the tokens before it. Both are jobs
 * that are scored, under any policy: this file cuts the text, job.c reads the lines, and
 * completions.c collects the scores of each request. They are added in the order of the input, so
 * that the results do not depend on the schedule.
 * Read next: stage.c. */
#include <math.h>

#include "app/app.h"

// -------------------------------------------------------------------------------------------------
// Texts
// -------------------------------------------------------------------------------------------------

int eval_text(Eval *e, const char *path, Error *err) {
    /* Bytes for a byte of text: the ids, their copies in windows, and the text itself as it grows.
     */
    enum { FACTOR = 12 };
    Job *job = &e->job;
    int most = job->config->max_pos;
    int32_t *ids;
    Lines l;
    if (e->window > most)
        return fail(err, EXIT_USAGE, "--window %d: expected at most %d, the model's positions",
                    e->window, most);
    if (lines_open(&l, path, err))
        return -1;
    int status = lines_whole(&l, FACTOR, err);
    int tokens = status ? status : text_encode(&ids, l.line, l.size, job->tokenizer, err);
    if (!status && tokens < 0)
        fail_at(err, l.path);
    lines_close(&l);
    if (tokens < 0)
        return -1;
    e->window = imin(e->window ? e->window : most, tokens);
    e->unscored = tokens - 1; /* 1: the first, before which there is none */
    for (int at = 0; tokens > 1 && at + e->window <= tokens && !job_full(job); at += e->window) {
        job_push(job, (Request){.ids = copy_ids(ids + at, e->window), .s = 1, .n = e->window - 1});
        e->unscored -= e->window - 1;
    }
    free(ids);
    return job->count
               ? 0
               : fail(err, EXIT_FAILED, "%s: there is no text; name a file that has some", l.path);
}

// -------------------------------------------------------------------------------------------------
// Sums
// -------------------------------------------------------------------------------------------------

EvalResult eval_result(const Job *job) {
    EvalResult r = {0};
    double sum = 0, right = 0, bytes = 0;
    for (int i = 0; i < job->count; i++) {
        const Request *e = &job->request[i];
        bytes += tokenizer_bytes(job->tokenizer, e->ids + e->s, e->n);
        if (e->part)
            continue;
        Score line = line_score(job, e);
        sum += line.nll;
        r.tokens += line.tokens;
        r.lines++;
        right += !line.missed;
    }
    r.nll = sum / r.tokens;
    r.perplexity = exp(r.nll);
    r.bits_per_byte = sum / log(2) / bytes;
    r.word_perplexity = exp(sum / r.lines);
    r.accuracy = right / r.lines;
    return r;
}
