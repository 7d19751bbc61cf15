/* lp_parts.h: the rules of lp.c by themselves, for the grades of the exercise about it. */
#ifndef LP_PARTS_H
#define LP_PARTS_H

/* What the rules look at: costs of the phase, and of one column the entries and right-hand sides. What they say: the column
 * that enters and the row that leaves in phase 2. */
enum { LP_PART_M = 4, LP_PART_N = 5 };
typedef struct {
    double cost[LP_PART_N], entry[LP_PART_M], right[LP_PART_M];
    int column, basic[LP_PART_M];
    int entering, leaving;
} LpTableau;
extern LpTableau lp_part;
void lp_part_decide(void);

#endif
