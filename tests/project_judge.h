/* project_judge.h: where the judge of the open project reaches into its copies of opt_model.c and device/sim.c
 * (project_judge.c). */
#ifndef PROJECT_JUDGE_H
#define PROJECT_JUDGE_H
#include "device/ops.h"
#include "io/io.h"

/* In the place of plain_attention, in reference_forward. */
void judged_attention(float *o, const float *q, const float *k, const float *v, int n, const OptConfig *c);
/* In the place of checkpoint_floats. */
float *judged_floats(const Checkpoint *checkpoint, const Tensor *tensor, Error *err);
/* The share of an op's seconds on the sim that it takes. */
double judged_share(const Op *op);

#endif
