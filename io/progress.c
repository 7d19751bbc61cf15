/* progress.c: how far a run is, in a line on standard error. Read next: eval.c. */
#include <math.h>
#include <time.h>

#include "io/io.h"

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

void progress_open(Progress *p, const Plan *plan, const Task *task) {
    *p = (Progress){.on = p->on, .sweeps = (double)plan->sweeps, .tokens = p->tokens};
    const bool count = !p->tokens;
    for (int i = 0; i < task->count; i++) {
        const Prompt *q = &task->prompts[i];
        p->rows += q->s + q->n - 1;
        if (count) p->tokens += q->n;
    }
}

/* A sweep costs a, such as the weights that it streams, and b for each row that it computes; both by least squares. */
double progress_left(const Progress *p, const RunStats *stats) {
    const double spread = p->n * p->rr - p->r * p->r;
    if (p->n < 2) return -1;
    double b = spread > 0 ? (p->n * p->rt - p->r * p->t) / spread : 0;
    b = fmin(fmax(b, 0), p->t / p->r);
    const double a = (p->t - b * p->r) / p->n;
    return a * (p->sweeps - stats->sweeps) + b * (p->rows - p->rows_before);
}

void progress_show(Progress *p, const RunStats *stats, long tokens) {
    const double rows = stats->prefill_tokens + stats->decoded, new = rows - p->rows_before, now = seconds_now();
    const double t = stats->total_s - p->seconds_before;
    p->n++, p->r += new, p->rr += new *new, p->t += t, p->rt += new *t;
    p->rows_before = rows, p->seconds_before = stats->total_s;
    if (!p->on || now - p->shown < 0.2) return;
    const double left = progress_left(p, stats);
    p->shown = now;
    fprintf(stderr, "\r%ld sweeps, %ld of at most %ld tokens, %.1f tokens/s", stats->sweeps, tokens, p->tokens,
            tokens / stats->total_s);
    if (left >= 0) fprintf(stderr, ", at most %.0f s left", left);
    fprintf(stderr, "\033[K");
}

void progress_clear(const Progress *p) {
    if (p->on) fprintf(stderr, "\r\033[K");
}
