/* policy.h: what a placement costs (policy.c; section 4.3, Appendix A.3). */
#ifndef POLICY_H
#define POLICY_H
#include "flexgen.h"
#include "lp.h"

/* The nine fractions, which are the first variables of every LP here. */
enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, NFRACTIONS };
extern const char *const fraction_name[NFRACTIONS]; /* "wg", ... */

/* A sum that is linear in the nine fractions, in their order; `one` is its constant. */
typedef union {
    struct {
        double wg, wc, wd, cg, cc, cd, hg, hc, hd, one;
    };
    double at[NFRACTIONS + 1];
} Sum;
/* Adds factor * more. */
void sum_add(Sum *to, double factor, Sum more);
/* Adds the row sum / rate <= T, one term of a max, to the LP; T is the index of a variable in
 * seconds. */
void latency_row(Lp *lp, const char *name, int T, Sum sum, double rate);
/* Adds the row sum <= capacity. */
void peak_row(Lp *lp, const char *name, Sum sum, double capacity);
/* Adds the sums of Eq. (1): wg + wc + wd = 1, cg + cc + cd = 1, hg + hc + hd = 1. */
void fraction_rows(Lp *lp);

enum { NAMES = 200 }; /* the most bytes of a list of rows' names */

/* A placement and what a cost model expects of it. */
typedef struct {
    double fraction[NFRACTIONS]; /* wg wc wd cg cc cd hg hc hd */
    double T_pre, T_gen;         /* seconds of a layer in prefill, in generation */
    double T;                    /* seconds of a block (runtime: of the whole task) */
    double throughput;           /* token/s */
    double peak[NTIERS];         /* bytes */
    char slowest[2][NAMES];      /* the rows that bind T_gen [0], T_pre [1] */
    char full[NTIERS][NAMES];    /* the rows of a full tier, else "" */
} Cost;

/* The size of one LP of the paper: s, n, and a block of num_gpu_batches GPU batches of gbs
 * sequences. */
typedef struct {
    int s, n, gbs, num_gpu_batches;
} Block;

/* The paper's variables: the fractions, and the seconds of a layer in prefill and in generation. */
enum { T_PRE = NFRACTIONS, T_GEN, NVARS };
/* The first row of each kind in the paper's LP; the name says what the rows bound. There are 5 + 5
 * rows of seconds (a link or a processor each), 12 of the GPU's memory (6 steps of a layer, in
 * prefill and in generation), 2 of the CPU's, 1 of the disk's, and 3 sums of fractions. */
enum {
    T_PRE_ROWS = 0,
    T_GEN_ROWS = 5,
    GPU_ROWS = 10,
    CPU_ROWS = 22,
    DISK_ROWS = 24,
    FRACTION_ROWS = 25,
    NROWS = 28
};
extern const int tier_rows[NTIERS + 1]; /* where the rows of each tier begin, and where they end */

/* Writes the LP of Appendix A.3 as printed, for one block: minimize T / bls over placements, with a
 * row for each term of each max. Rows have the names of their equations: "ctog^p", "gpu_peak^g with
 * att_1^g". */
void paper_lp(Lp *lp, const Hardware *hardware, const OptConfig *config, const Block *block);

/* Finds the best placement of one block by A.3. Returns -1 and one line that names the tiers which
 * cannot hold the block (EXIT_USAGE), or says that the LP could not be solved (EXIT_FAILED). */
int paper_cost(Cost *cost, const Hardware *hardware, const OptConfig *config, const Block *block,
               Error *err);

#endif
