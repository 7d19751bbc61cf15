/* lessons.c: see lessons.h. */
#include "lessons.h"

#include <math.h>

static double sweeps_of(const IoCase *c, Schedule schedule) {
    /* Row and zig-zag: every block n sweeps. Diagonal: batch b enters with the first sweep that is not before b n/K,
     * and the last of them takes n. */
    const double batches = (double)c->count / c->gbs, last = batches - 1;
    if (schedule == SCHEDULE_ROW) return batches * c->n;
    if (schedule == SCHEDULE_ZIGZAG) return batches / c->K * c->n;
    return floor(last / c->K) * c->n + ceil(fmod(last, c->K) * c->n / c->K) + c->n;
}

IoCount io_count(const IoCase *c, Schedule schedule) {
    /* A sweep loads each layer and the head once. K and V of a token are 4 h1 bytes: a prompt's are stored once and
     * loaded before each of the n - 1 tokens behind the first, with those of the tokens between. A token's 2 h1 bytes
     * of activations are stored behind each layer and loaded before the next one, but behind the last one only the
     * last row of a prompt is wanted. */
    const double s = c->s, n = c->n, l = c->l, h1 = c->h1, sweeps = sweeps_of(c, schedule);
    const double cache = 4 * h1 * l * (s * n + n * (n - 1) / 2), row = 2 * h1;
    return (IoCount){.sweeps = sweeps,
                     .weights = sweeps * (l * c->layer_bytes + c->head_bytes),
                     .cache = c->count * cache,
                     .activations = c->count * (2 * row * l * (s + n - 1) - 2 * row * (s - 1))};
}

int fourth_seats(const Admission *a) {
    /* The diagonal of single seats: after i + 1 of n sweeps that part of the seats is open, so that in every sweep
     * about as many enter as leave, whatever a batch is. */
    const long open = ((a->sweep + 1) * a->nseats + a->n - 1) / a->n;
    return (open < a->nseats ? (int)open : a->nseats) - a->seated;
}
