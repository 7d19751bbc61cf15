/* progress.c: how far a run is, in a line on standard error. Read next: eval.c. */
#include <math.h>

#include "io/io.h"
#include "tier.h"

/* A row takes 24 h1^2 operations a layer; attending to a token 4 h1, and 4 h1 bytes, which take about ten times as long. */
void progress_open(Progress *p, const Plan *plan, const Task *task) {
    *p = (Progress){.on = p->on, .sweeps = (double)plan->sweeps, .pair = 1. / plan->config.h1, .tokens = p->tokens};
    const bool count = !p->tokens;
    for (int i = 0; i < task->count; i++) {
        const double s = task->prompts[i].s, n = task->prompts[i].n;
        p->work += s + n - 1 + p->pair * (s * (s + 1) / 2 + (n - 1) * (s + n / 2));
        if (count) p->tokens += task->prompts[i].n;
    }
}

/* A sweep costs a, such as the weights that it streams, and b for its work; both by least squares. */
double progress_left(const Progress *p, const RunStats *stats) {
    const double spread = p->n * p->ww - p->w * p->w;
    if (p->n < 2) return -1;
    double b = spread > 0 ? (p->n * p->wt - p->w * p->t) / spread : 0;
    b = fmin(fmax(b, 0), p->t / p->w);
    const double a = (p->t - b * p->w) / p->n;
    return a * (p->sweeps - stats->sweeps) + b * (p->work - p->work_before);
}

void progress_show(Progress *p, const RunStats *stats, long tokens) {
    const double work = stats->prefill_tokens + stats->decoded + p->pair * stats->attended, now = seconds_now();
    const double w = work - p->work_before, t = stats->total_s - p->total_before;
    p->n++, p->w += w, p->ww += w * w, p->t += t, p->wt += w * t;
    p->work_before = work, p->total_before = stats->total_s;
    if (!p->on || now - p->shown < 0.2) return;
    const double left = progress_left(p, stats);
    p->shown = now;
    fprintf(stderr, "\r%ld sweep%s, %ld of at most %ld token%s, %.1f tokens/s", stats->sweeps, plural(stats->sweeps),
            tokens, p->tokens, plural(p->tokens), tokens / stats->total_s);
    if (left >= 0) fprintf(stderr, ", at most %.0f s left", left);
    fprintf(stderr, "\033[K");
}

void progress_clear(const Progress *p) {
    if (p->on) fprintf(stderr, "\r\033[K");
}
