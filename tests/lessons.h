/* lessons.h: what two exercises of docs/EXERCISES.md ask for that the program does without. */
#ifndef LESSONS_H
#define LESSONS_H
#include "flexgen.h"

/* count equal prompts of s tokens, n to generate, with everything on the CPU, in F16: a layer's weights and the head's,
 * which all stream; K batches of gbs, of which count is a whole number of blocks. n >= K. */
typedef struct {
    int l, h1;
    double layer_bytes, head_bytes;
    int s, n, gbs, K, count;
} IoCase;

/* What crosses the link between CPU and GPU, both ways, until all have their tokens. */
typedef struct {
    double sweeps, weights, cache, activations; /* bytes, but for the sweeps */
} IoCount;

/* Appendix A.2 counted, before anything runs. */
IoCount io_count(const IoCase *c, Schedule schedule);

/* A fourth schedule, for the place of the diagonal in seats_for. */
int fourth_seats(const Admission *a);

#endif
