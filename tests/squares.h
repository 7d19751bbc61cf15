/* squares.h: notes what each square of the engine has (exam.h), in an exam and in the judge. */
#ifndef SQUARES_H
#define SQUARES_H
#include "exam.h"

enum { MOST_ROW = 256 };      /* numbers of a row */
extern Squares *squares_seen; /* where it is noted; NULL: nowhere */

/* Returns a row of n floats as two numbers. */
Row row_of(const float *x, int n);
#endif
