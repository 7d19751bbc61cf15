/* exam_lp.c: asks lp.c, which is compiled here, since its rules have no names outside. */
#include "lp.c"
#include "tests/exam.h"

void exam_begin(void) {}

static void solve(void *c) {
    Program *p = c;
    Lp lp = {.n = p->n};
    LpAnswer found;
    memcpy(lp.c, p->c, sizeof p->c);
    for (int i = 0; i < p->m; i++) memcpy(lp_row(&lp, "row", p->equal[i], p->b[i])->a, p->a[i], sizeof p->a[i]);
    lp_solve(&found, &lp);
    /* these programs need no mending: where it was needed, the method itself went wrong */
    p->verdict = found.mended ? LP_LOST : found.verdict, p->value = found.value;
}

static void decide(void *c) {
    Rules *p = c;
    Tableau t = {.n = RULES_N, .m = RULES_M, .artificial = RULES_N + RULES_M, .right = RULES_N + RULES_M};
    memcpy(t.cell[t.m + PHASE_2], p->cost, sizeof p->cost);
    for (int i = 0; i < RULES_M; i++) {
        t.basic[i] = p->basic[i];
        t.cell[i][p->column] = p->entry[i], t.cell[i][t.right] = p->right[i];
    }
    p->entering = entering(&t, PHASE_2), p->leaving = leaving(&t, PHASE_2, p->column);
}

const Work works[NASKS] = {[ASK_PROGRAM] = {solve}, [ASK_RULES] = {decide}};
