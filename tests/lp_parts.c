/* lp_parts.c: see lp_parts.h. lp.c is compiled here once more, by itself, since its rules have no names outside. */
#define lp_solve part_solve
#define lp_row part_row
#define lp_excess part_excess
#define lp_binds part_binds
#include "lp.c"
#include "tests/lp_parts.h"

void lp_part_decide(LpTableau *part) {
    Tableau t = {.n = LP_PART_N, .m = LP_PART_M, .width = LP_PART_N + LP_PART_M + 1, .fresh = true};
    memcpy(t.cell[t.m + PHASE_2], part->cost, sizeof part->cost);
    for (int i = 0; i < LP_PART_M; i++) {
        t.basis[i] = part->basis[i];
        t.cell[i][part->column] = part->entry[i], t.cell[i][t.width - 1] = part->right[i];
    }
    part->entering = entering(&t, PHASE_2), part->leaving = leaving(&t, PHASE_2, part->column);
    pivot(&t, 0, part->column);
    part->fresh = t.fresh;
}
