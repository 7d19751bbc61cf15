/* policy.h: what a placement costs (policy.c; section 4.3, Appendix A.3). */
#ifndef POLICY_H
#define POLICY_H
#include "flexgen.h"
#include "lp.h"
#ifdef __cplusplus
extern "C" {
#endif

/* The nine fractions, the first variables of every LP here. */
enum { WG, WC, WD, CG, CC, CD, HG, HC, HD, NFRACTIONS };
extern const char *const fraction_name[NFRACTIONS]; /* "wg", ... */

/* A placement and what a cost model expects of it. */
typedef struct {
    double fraction[NFRACTIONS];            /* wg wc wd cg cc cd hg hc hd */
    double T_pre, T_gen, T;                 /* seconds: of a layer, of a layer, of a block (runtime: of the whole task) */
    double throughput;                      /* token/s */
    double peak[NTIERS];                    /* bytes */
    char slowest[2][96], full[NTIERS][200]; /* the rows that bind T_gen [0], T_pre [1]; full tiers; or "" */
} Cost;

/* What one LP of the paper is for: s and n, and a block of num_gpu_batches GPU batches of gbs sequences. */
typedef struct {
    int s, n, gbs, num_gpu_batches;
} Block;

/* The paper's variables: the fractions, and the seconds that a layer takes in prefill and in generation. */
enum { T_PRE = NFRACTIONS, T_GEN, NVARS };
/* Its rows, by what they bound: the first of each kind. */
enum { T_PRE_ROWS = 0, T_GEN_ROWS = 5, GPU_ROWS = 10, CPU_ROWS = 22, DISK_ROWS = 24, SUM_ROWS = 25, NROWS = 28 };

/* Appendix A.3 as printed, for one block: minimize T / bls over placements, with a row for each term of each max. Rows have
 * the names of their equations: "ctog^p", "gpu_peak^g with att_1^g". */
void paper_lp(Lp *lp, const Hardware *hardware, const OptConfig *config, const Block *block);

/* The best placement of one block by A.3. -1 and one line (EXIT_USAGE) that names the tiers which cannot hold it. */
int paper_cost(Cost *cost, const Hardware *hardware, const OptConfig *config, const Block *block, Error *err);

/* The variables of `runtime`: the fractions; LAYER_S + 0 and + 1 are the seconds of a layer in sweeps without a prefill and
 * with one, LAST_S + 0 and + 1 those of the last layer with the head behind it. */
enum { LAYER_S = NFRACTIONS, LAST_S = LAYER_S + 2, RUNTIME_VARS = LAST_S + 2 };

extern const char *const memory_row[NTIERS]; /* the names of its rows for the tiers */

/* What this engine does with a task, as an LP over placements that minimizes the seconds of all its sweeps. Rows are named
 * like the paper's: "ctog^p", "gpu^g", "GPU memory". plan is the task's plan under the policy (its gbs, num_gpu_batches,
 * schedule, overlap, table_home) with everything on the CPU tier and without cpu_attention; it says what the sweeps do and
 * what the tiers hold under any placement. delegated: whether the policy has cpu_attention. capacity: bytes. */
void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan, bool delegated,
                const double capacity[NTIERS]);
/* Seconds of a sweep of l layers without a prefill [0] and with one [1], at a point of the LP. */
void runtime_sweeps(double sweep_s[2], const double *x, int l);
/* What a plan costs by the rows of that LP, layer by layer with the weights where the plan has put them. */
void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan);

#ifdef __cplusplus
}
#endif
#endif
