/* lp_parts.c: see lp_parts.h. lp.c is compiled here once more, by itself, since its rules have no names outside. */
#define lp_solve part_solve
#define lp_row part_row
#define lp_excess part_excess
#define lp_binds part_binds
#include "lp.c"
#include "tests/lp_parts.h"

static Tableau tableau_of(const LpTableau *part) {
    Tableau t = {.n = LP_PART_N, .m = LP_PART_M, .width = LP_PART_N + LP_PART_M + 1, .fresh = true};
    for (int j = 0; j < LP_PART_N; j++) t.cell[t.m + PHASE_2][j] = part->cost[j];
    for (int i = 0; i < LP_PART_M; i++) {
        t.basis[i] = part->basis[i];
        t.cell[i][part->column] = part->entry[i], t.cell[i][t.width - 1] = part->right[i];
    }
    return t;
}

int lp_part_entering(const LpTableau *part) {
    const Tableau t = tableau_of(part);
    return entering(&t, PHASE_2);
}

int lp_part_leaving(const LpTableau *part, int column) {
    const Tableau t = tableau_of(part);
    return leaving(&t, PHASE_2, column);
}

bool lp_part_pivot_leaves_fresh(const LpTableau *part) {
    Tableau t = tableau_of(part);
    pivot(&t, 0, part->column);
    return t.fresh;
}
