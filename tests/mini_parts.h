/* mini_parts.h: mini.c inside another program, for the grades of the exercises about it. */
#ifndef MINI_PARTS_H
#define MINI_PARTS_H
#include <stdbool.h>

/* The program: main of mini.c, which may end the process. */
int mini_main(int argc, char **argv);

/* pivot(t, r, c) of a tableau with two rows, two columns and a right side; at: the rows, and both costs. */
void mini_pivot(double at[4][3], int basic[2], int other[2], int r, int c);

/* Minimizes c x, x >= 0, where a x <= b of m rows, b >= 0. at: c, then the rows of a, b behind each. False: it has no end.
 * *value: the minimum. */
bool mini_minimize(double *value, int m, int n, int width, double at[][width]);

#endif
