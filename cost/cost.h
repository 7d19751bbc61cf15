/* cost.h: a machine measured, and which policy is best for it (section 4.3). */
#ifndef COST_H
#define COST_H
#include "device/device.h"
#include "io/io.h"
#include "policy.h"
#ifdef __cplusplus
extern "C" {
#endif

// -------------------------------------------------------------------------------------------------
// profile.c: the machine, measured (section 4.3)
// -------------------------------------------------------------------------------------------------

/* What a profile measures with: a layer's shapes, the ends of its curves, and so much memory that
 * it is cold. */
typedef struct {
    int h1, h2, nh, nseq; /* sequences that decode */
    int rows, tokens;     /* largest product; longest prompt, and what a new token attends to */
    size_t cold, disk;    /* bytes of the upper tiers' memory, and of the file */
    double seconds;       /* for one value, about */
} ProfileSize;
/* The usual sizes: the model's shapes, unless they would take too long to measure (config NULL: the
 * largest allowed), or more than `memory` bytes of this process. -1 and err (EXIT_USAGE) if that is
 * too little for any. */
int profile_size(ProfileSize *size, const Gpu *gpu, const OptConfig *config, size_t memory,
                 Error *err);

/* Measures this machine through the device that will run: the host device with so many threads or,
 * if there is a gpu, the cuda device. The disk is that of offload_dir, past the page cache.
 * capacity: bytes of the tiers. Takes less than a minute, and writes to progress (may be NULL) what
 * it is measuring. If that disk cannot be written to, the rest is measured, with a line that says
 * so on progress or standard error; then the disk has room for nothing and is very slow. */
int profile_measure(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir,
                    int threads, const Bytes capacity[NTIERS], FILE *progress, Error *err);
/* The same, but read from the file that an earlier call has kept; without such a file, measured and
 * kept. */
int profile_machine(Hardware *hardware, const ProfileSize *size, Gpu *gpu, const char *offload_dir,
                    int threads, const Bytes capacity[NTIERS], FILE *progress, Error *err);
/* That file: hardware-KEY.json in flexgen/ of XDG_CACHE_HOME or ~/.cache. KEY stands for all that
 * the rates depend on: the model's shapes, rows, tokens, cold memory, processor, threads and
 * kernels, GPU, the disk of offload_dir, the profile's version; not the capacities.
 * "" where there is no such directory. */
void profile_path(char *path, size_t size, const ProfileSize *shapes, const Gpu *gpu,
                  const char *offload_dir, int threads);
/* Writes that file; where it cannot be written, a line on progress or standard error says why. */
void profile_keep(const Hardware *hardware, const ProfileSize *size, const Gpu *gpu,
                  const char *offload_dir, int threads, FILE *progress);
/* Writes a hardware file that says how each value was measured, with today's date. */
void profile_write(const Hardware *hardware, FILE *out);

// -------------------------------------------------------------------------------------------------
// runtime.c: what this engine does with a task (section 4.3)
// -------------------------------------------------------------------------------------------------

/* The variables of `runtime`: the fractions; LAYER_S + 0 and + 1 are the seconds of a layer in
 * sweeps without a prefill and with one, LAST_S + 0 and + 1 those of the last layer with the head
 * behind it. */
enum { LAYER_S = NFRACTIONS, LAST_S = LAYER_S + 2, RUNTIME_VARS = LAST_S + 2 };

extern const char *const memory_row[NTIERS]; /* the names of its rows for the tiers */

/* What this engine does with a task, as an LP over placements that minimizes the seconds of all its
 * sweeps. Rows are named like the paper's: "ctog^p", "gpu^g", "GPU memory". plan is the task's plan
 * under the policy (its gbs, num_gpu_batches, schedule, overlap, table_home) with everything on the
 * CPU tier and without cpu_attention; it says what the sweeps do and what the tiers hold under any
 * placement. delegated: whether the policy has cpu_attention. capacity: bytes. */
void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan,
                bool delegated, const double capacity[NTIERS]);
/* Seconds of a sweep of l layers without a prefill [0] and with one [1], at a point of the LP. */
void runtime_sweeps(double sweep_s[2], const double *x, int l);
/* What a plan costs by the rows of that LP, layer by layer with the weights where the plan has put
 * them. */
void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan);

// -------------------------------------------------------------------------------------------------
// search.c: what a pipeline of machines takes (sections 4.4 and 6.4)
// -------------------------------------------------------------------------------------------------

/* Equal machines in a pipeline (nodes 0 or 1: one alone), and the network between neighbours:
 * bytes/s, and the seconds of delay for each message. */
typedef struct {
    int nodes;
    double net_bdw, delay_s;
} Cluster;

/* How long the sweeps of all flights take: seconds of the first prefill of all, of one new token
 * for all, of everything. */
typedef struct {
    double prefill_s, token_s, T;
} Pace;

/* What a pipeline makes of sweep_s, the seconds of a machine's sweep without a prefill and with
 * one; plan: a machine's. */
Pace cluster_pace(const Cluster *cluster, const Plan *plan, const double sweep_s[2]);

// -------------------------------------------------------------------------------------------------
// search.c: the policy search (section 4.3)
// -------------------------------------------------------------------------------------------------

/* What to search for, and for which machine. */
typedef struct {
    const Hardware *hardware;
    const Checkpoint *checkpoint;
    const Task *task;
    Cluster cluster; /* checkpoint is the part of one of its machines */
    bool one_block;  /* the task has as many prompts as may be in flight; a policy is judged by one
                        block for each flight */
    Type act_type;   /* of the device */
    Bytes capacity[NTIERS];
    Policy
        given; /* overlap and page_tokens are used as they are; the rest only where it is fixed */
    bool fixed[6]; /* which of wg wc cg cc hg hc are given */
    bool fixed_flights, fixed_gbs, fixed_batches, fixed_schedule, fixed_attention;
    bool may_pack;      /* weights and cache may be packed where `given` has them as F16 */
    double max_latency; /* seconds that one block may take; 0: any number */
} Search;

/* A policy whose plan fits, and what the cost model `runtime` expects of it. In a pipeline
 * cost.T_pre and T_gen are what a machine does for a layer, and cost.T and the throughput those of
 * the whole. */
typedef struct {
    Policy policy;
    Cost cost;
    Pace pace;
    double latency; /* seconds of one block; in a pipeline, of one for each flight */
} Found;

/* The best policies, at most `most`, by falling throughput less the prices of search.c: score (on
 * shared cores, twice the batches in flight must bring two percent more; twice a block of any size
 * one percent). Returns their number, or -1 and one line (EXIT_USAGE) that says why there is none.
 */
int policy_search(Found *found, int most, const Search *search, Error *err);
/* The best policy, and of those whose throughput comes close to it the one whose block takes the
 * shortest time: for somebody who waits for the first results. Returns 1 or more, or -1 and err as
 * above. */
int policy_sooner(Found *best, Found *sooner, const Search *search, Error *err);
/* The best throughput for every latency that a block may have (Figure 1), quickest first, at most
 * `most`; as above. */
int policy_frontier(Found *found, int most, const Search *search, Error *err);
/* What the cost model expects of search->given, unchanged. -1 and err when its plan does not fit.
 */
int policy_predict(Found *found, const Search *search, Error *err);
/* The linear program of a policy that was found: its fractions are open again, but for those that
 * are given. *tokens: those that its sweeps make. */
void policy_lp(Lp *lp, double *tokens, const Search *search, const Policy *policy);
/* The best policy for search->cluster, of which search->checkpoint is the whole model; without
 * offloading, one that keeps everything on the GPUs. -1 and one line (EXIT_USAGE) if a machine's
 * part does not fit. */
int cluster_search(Found *best, const Search *search, bool offloading, Error *err);
/* How many machines it takes to keep one sequence on the GPUs; 0: even one layer is too much for
 * one. */
int cluster_least(const Search *search);

#ifdef __cplusplus
}
#endif
#endif
