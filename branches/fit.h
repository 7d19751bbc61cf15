/* fit.h: plans that must fit into the tiers (fit.c). */
#ifndef FIT_H
#define FIT_H
#include "plan.h"

/* Returns 0 if the plan fits. Returns -1 and err (EXIT_USAGE) when a tier's total exceeds its
 * capacity; err names the tier, the bytes that it needs and has, its largest region, and the flag
 * that shrinks it. With placed == false it advises only a smaller block or a higher capacity,
 * because the user has not placed anything. */
int check_fits(const Plan *plan, const Bytes capacity[NTIERS], bool placed, Error *err);
/* Returns by how many bytes the tiers exceed their capacities; 0: the plan fits. */
Bytes plan_missing(const Plan *plan, const Bytes capacity[NTIERS]);
/* Fills in a policy's defaults, and makes its plan fit if it can. For this it lowers
 * policy->workspaces as little as possible, and chooses for policy->table_home the highest tier
 * that has room. It prefers more workspaces to a higher home. If no plan fits, returns -1 and the
 * err of the plan that lacks the fewest bytes. */
int fit_policy(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
               const Bytes capacity[NTIERS], Error *err);
/* Sets policy->piece_rows to LARGE_PIECE_ROWS, or to the largest half, quarter, ... of it for which
 * the plan has room, but at least to PIECE_ROWS. */
void fit_pieces(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
                const Bytes capacity[NTIERS]);
#endif
