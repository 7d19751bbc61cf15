/* mini_parts.h: mini.c inside another program, for the grades of the exercises about it. */
#ifndef MINI_PARTS_H
#define MINI_PARTS_H
#include <stdbool.h>

/* The program: main of mini.c, which may end the process. */
int mini_main(int argc, char **argv);

/* Its Tableau: behind the columns are the right sides, and behind the rows the costs, and those of phase 1. */
enum { MINI_ROWS = 31, MINI_COLUMNS = 12, MINI_COST = MINI_ROWS };
typedef struct {
    int basic[MINI_ROWS], other[MINI_COLUMNS];
    double at[MINI_ROWS + 2][MINI_COLUMNS + 1];
} MiniTableau;
void mini_pivot(MiniTableau *after, const MiniTableau *before, int r, int c);
bool mini_minimize(MiniTableau *mini); /* in phase 2 */

#endif
