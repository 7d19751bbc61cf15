/* lp_parts.c: see lp_parts.h. lp.c is compiled here once more, by itself, since its rules have no names outside. */
#define lp_solve part_solve
#define lp_row part_row
#define lp_excess part_excess
#define lp_binds part_binds
#include "lp.c"
#include "tests/lp_parts.h"

LpTableau lp_part;

void lp_part_decide(void) {
    Tableau t = {.n = LP_PART_N, .m = LP_PART_M, .artificial = LP_PART_N + LP_PART_M, .right = LP_PART_N + LP_PART_M};
    memcpy(t.cell[t.m + PHASE_2], lp_part.cost, sizeof lp_part.cost);
    for (int i = 0; i < LP_PART_M; i++) {
        t.basic[i] = lp_part.basic[i];
        t.cell[i][lp_part.column] = lp_part.entry[i], t.cell[i][t.right] = lp_part.right[i];
    }
    lp_part.entering = entering(&t, PHASE_2), lp_part.leaving = leaving(&t, PHASE_2, lp_part.column);
}
