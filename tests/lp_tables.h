/* lp_tables.h: LPs as tables, and those in which the simplex method may go round in circles, for test_lp.c and the grades.
 */
#ifndef LP_TABLES_H
#define LP_TABLES_H
#include <string.h>

#include "lp.h"

enum { TABLE_ROWS = 6, TABLE_COLUMNS = 6 };
typedef struct {
    const char *what;
    int n, m, equations; /* variables; rows, of which the first so many are equations */
    LpVerdict verdict;
    double at[1 + TABLE_ROWS]
             [TABLE_COLUMNS + 1]; /* the costs, and behind them the least cost; the rows, and behind each b */
} LpTable;

static inline Lp lp_of(const LpTable *t) {
    Lp lp = {.n = t->n};
    memcpy(lp.c, t->at[0], t->n * sizeof *lp.c);
    for (int i = 1; i <= t->m; i++)
        memcpy(lp_row(&lp, "row", i <= t->equations, t->at[i][t->n])->a, t->at[i], t->n * sizeof *lp.c);
    return lp;
}

/* The steepest column and the first row go round in circles in those of Beale (1955), of Kuhn and of Chvatal (1983). In the
 * others the first column enters, as Bland has it, but if of rows that tie the first one left, and not that of the first
 * variable, the search would stay at x = 0; they were found by trying at random. */
enum { KUHN = 2, CYCLES = 7 };
// clang-format off
static const LpTable lp_cycles[CYCLES] = {
    {"Beale's cycle", 4, 3, 0, LP_OPTIMAL,
     {{-.75, 20, -.5, 6, -1.25}, {.25, -8, -1, 9}, {.5, -12, -.5, 3}, {0, 0, 1, 0, 1}}},
    {"Beale's other cycle", 4, 3, 0, LP_OPTIMAL,
     {{-.75, 150, -.02, 6, -.05}, {.25, -60, -.04, 9}, {.5, -90, -.02, 3}, {0, 0, 1, 0, 1}}},
    {"Kuhn's cycle", 4, 3, 0, LP_OPTIMAL,
     {{-2, -3, 1, 12, -2}, {-2, -9, 1, 9}, {1 / 3., 1, -1 / 3., -2}, {2, 3, -1, -12, 2}}},
    {"Chvatal's cycle", 4, 3, 0, LP_OPTIMAL,
     {{-10, 57, 9, 24, -1}, {.5, -5.5, -2.5, 9}, {.5, -1.5, -.5, 1}, {1, 0, 0, 0, 1}}},
    {"a cycle by ties of six variables", 6, 4, 0, LP_OPTIMAL,
     {{-1, 1, 3, -4, 1, -3, -10 / 3.},
      {-1, -3, 2, 2, -3, -3}, {-2, 0, -4, -3, 3, -1}, {3, 1, 2, 4, -3, -2}, {1, 1, 1, 1, 1, 1, 1}}},
    {"a cycle by ties of five variables", 5, 5, 0, LP_OPTIMAL,
     {{3, 1, -2, -4, 6}, {1, -2, -2, 4, 9}, {3, 1, -8, -7, 3}, {1, -2, 5, 8, -2}, {0, 7, 8, -8}, {1, 1, 1, 1, 1, 1}}},
    {"another cycle by ties of five variables", 5, 5, 0, LP_OPTIMAL,
     {{7, -2, 2, 2, 0}, {3, -8, 4, 2, 3}, {7, 1, -5, -7, -7}, {-2, 6, 5, -8, -7}, {3, 5, 6, 5, 5}, {1, 1, 1, 1, 1, 1}}},
};
// clang-format on
#endif
