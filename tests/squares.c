/* squares.c: see squares.h. The linker is told to call __wrap_host_run where the host device calls host_run (--wrap), so
 * that each op is seen as it is carried out, with its views at addresses, while nobody else may write to them. The ops of a
 * lane come in their order, and of two lanes none writes to the same field. In the same way __wrap_post sees all ops in the
 * order in which the sweep posts them. */
#include "squares.h"

#include "tests.h"

Squares *squares_seen;

void __real_host_run(const Op *op);
void __wrap_host_run(const Op *op);
Event __real_post(Poster *poster, Op op);
Event __wrap_post(Poster *poster, Op op);

Row row_of(const float *x, int n) {
    Row row = {0, 0};
    for (int d = 0; d < n; d++) row.sum += x[d], row.size += fabsf(x[d]);
    return row;
}

static Row row_of_halves(const f16 *x, int n) {
    float wide[MOST_ROW];
    CHECK(n <= MOST_ROW);
    for (int d = 0; d < n; d++) wide[d] = f16_to_f32(x[d]);
    return row_of(wide, n);
}

/* Adds the rows of x to those that have arrived [0] or left [1]. */
static void note_x(SquareSeen *s, bool left, Tensor x) {
    int *n = left ? &s->left : &s->arrived;
    for (int r = 0; r < x.rows && *n < MOST_ROWS_X; r++)
        s->x[left][(*n)++] = row_of((float *)x.at + (size_t)r * x.ld, x.cols);
}

/* Adds a sequence: token t has k in k[t], and v in v[t]. */
static void note_sequence(Attended *a, int len, const f16 *k[], const f16 *v[], int n) {
    if (a->n == PROMPTS) return;
    a->len[a->n] = len;
    for (int t = 0; t < len; t++) {
        a->kv[0][a->n][t] = row_of_halves(k[t], n);
        a->kv[1][a->n][t] = row_of_halves(v[t], n);
    }
    a->n++;
}

static void note_prefill(Attended *a, const Op *op) {
    const int32_t *start = op->prefilled.start.at;
    const Tensor kv = op->prefilled.kv;
    const f16 *k[MOST_SEEN], *v[MOST_SEEN];
    for (int s = 0; s + 1 < op->prefilled.start.cols; s++) {
        const int len = imin(start[s + 1] - start[s], MOST_SEEN);
        for (int t = 0; t < len; t++) {
            k[t] = (f16 *)kv.at + (size_t)(start[s] - start[0] + t) * kv.ld;
            v[t] = k[t] + kv.cols / 2;
        }
        note_sequence(a, len, k, v, kv.cols / 2);
    }
}

static void note_pages(Attended *a, const Op *op) {
    const int32_t *lens = op->attend.len.at, *pages = op->attend.pages.at;
    const Tensor keys = op->attend.k, values = op->attend.v;
    const f16 *k[MOST_SEEN], *v[MOST_SEEN];
    for (int s = 0; s < op->attend.len.cols; s++, pages += op->attend.pages.ld) {
        const int len = imin(lens[s], MOST_SEEN);
        for (int t = 0; t < len; t++) {
            const size_t row = (size_t)pages[t / op->page_tokens] * op->page_tokens + t % op->page_tokens;
            k[t] = (f16 *)keys.at + row * keys.ld;
            v[t] = (f16 *)values.at + row * values.ld;
        }
        note_sequence(a, len, k, v, op->nh * op->hd);
    }
}

/* Notes x before a square changes it, and what attention reads, which its op does not change. */
static void note_before(SquareSeen *s, const Op *op) {
    Attended *by = &s->by[op->lane == ATTEND];
    if (op->code == OP_LAYERNORM && op->lane == PROJECT) note_x(s, false, op->layernorm.x);
    if (op->code == OP_ATTEND_PREFILL) note_prefill(by, op);
    if (op->code == OP_ATTEND) note_pages(by, op);
    for (int r = 0; op->code == OP_PICK && r < imin(op->pick.prompt.cols, PROMPTS); r++)
        s->prompt[r] = ((int32_t *)op->pick.prompt.at)[r];
}

/* Notes when the sweep asks for a square's computation, and when for its data. */
static void note_order(SquareSeen *s, const Op *op) {
    _Static_assert((int)OTHER == LOADED_KINDS, "the kinds before OTHER are loaded");
    if (op->lane == PROJECT && op->kind == OTHER && !s->computed) s->computed = ++squares_seen->computed;
    if ((op->lane == W_LOAD || op->lane == C_LOAD) && op->kind < OTHER) s->loaded[op->kind] = squares_seen->computed + 1;
}

/* Returns the square that an op belongs to, or NULL if nothing is to be noted. */
static SquareSeen *square_of(const Op *op) {
    const bool in_grid = squares_seen && op->i >= 0 && op->i < MOST_SWEEPS && op->j >= 0 && op->j < MOST_COLUMNS &&
                         op->k >= 0 && op->k < MOST_K;
    return in_grid ? &squares_seen->at[op->i][op->j][op->k] : NULL;
}

Event __wrap_post(Poster *poster, Op op) {
    SquareSeen *s = square_of(&op);
    if (s) note_order(s, &op);
    return __real_post(poster, op);
}

void __wrap_host_run(const Op *op) {
    SquareSeen *s = square_of(op);
    if (s) note_before(s, op);
    __real_host_run(op);
    /* the last product of a layer is the one from h2 to h1 */
    if (s && op->code == OP_LINEAR && op->lane == FINISH && op->linear.x.cols > op->linear.y.cols)
        note_x(s, true, op->linear.y);
}
