/* mini_parts.c: see mini_parts.h. Types of mini.c have the names of the engine's; so it is compiled here, by itself. These
 * are the functions and variables that both have. */
#undef _GNU_SOURCE  // which mini.c defines itself
#define main mini_main
#define ask mini_ask
#define paper_lp mini_paper_lp
#define place_weights mini_place_weights
#define post mini_post
#define scratch mini_scratch
#define tier_name mini_tier_name
#include "mini.c"
#include "tests/mini_parts.h"

static const int part_rows[4] = {0, 1, COST, PHASE_1}, part_columns[3] = {0, 1, RIGHT};

void mini_pivot(double at[4][3], int basic[2], int other[2], int r, int c) {
    Tableau t = {.basic = {basic[0], basic[1]}, .other = {other[0], other[1]}};
    for (int e = 0; e < 4 * 3; e++) t.at[part_rows[e / 3]][part_columns[e % 3]] = at[e / 3][e % 3];
    pivot(&t, r, c);
    for (int e = 0; e < 4 * 3; e++) at[e / 3][e % 3] = t.at[part_rows[e / 3]][part_columns[e % 3]];
    memcpy(basic, t.basic, 2 * sizeof *basic), memcpy(other, t.other, 2 * sizeof *other);
}

bool mini_minimize(double *value, int m, int n, int width, double at[][width]) {
    Tableau t = {0};
    for (int v = 0; v <= LEAN; v++) t.other[v] = v;
    for (int i = 0; i < NROWS; i++) t.basic[i] = FIRST_SLACK + i;
    for (int i = 0; i <= m; i++) {
        double *row = t.at[i ? i - 1 : COST];
        memcpy(row, at[i], n * sizeof *row);
        row[RIGHT] = i ? at[i][n] : 0;
    }
    const bool ended = minimize(&t, COST);
    *value = -t.at[COST][RIGHT];
    return ended;
}
