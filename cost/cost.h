/* cost.h: a machine measured, and which policy is best for it (section 4.3). */
#ifndef COST_H
#define COST_H
#include "branches/fit.h"
#include "device/device.h"
#include "io/io.h"
#include "policy.h"

// -------------------------------------------------------------------------------------------------
// profile.c: the machine, measured (section 4.3)
// -------------------------------------------------------------------------------------------------

/* The size of a profile's measurements: a layer's shapes, the ends of the curves, and enough memory
 * to find none of it in a cache. */
typedef struct {
    int h1, h2, nh, nseq; /* nseq: sequences that decode */
    int rows, tokens;  /* largest product; longest prompt, and tokens that a new one attends to */
    size_t cold, disk; /* bytes of the upper tiers' memory, and of the file */
    double seconds;    /* for one value, about */
} ProfileSize;
/* Sets the usual sizes: the model's shapes, unless they would take too long to measure (config
 * NULL: the largest allowed), or more than `memory` bytes of this process. Returns -1 and err
 * (EXIT_USAGE) if that is too little for any. */
int profile_size(ProfileSize *size, const Gpu *gpu, const OptConfig *config, size_t memory,
                 Error *err);

/* The part of this machine that this process uses. */
typedef struct {
    Gpu *gpu;                /* NULL: the host device runs */
    const char *offload_dir; /* on the disk to measure */
    int threads;             /* of the host device */
    const Bytes *capacity;   /* [NTIERS] bytes of the tiers */
    FILE *progress;          /* gets a line about each measurement; may be NULL */
} ThisMachine;

/* Measures this machine through the device that will run, in less than a minute. The disk is read
 * and written past the page cache. If it cannot be written to, the rest is measured, with a line
 * that says so on progress or standard error; then the disk has room for nothing and is very
 * slow. */
int profile_measure(Hardware *hardware, const ProfileSize *size, const ThisMachine *here,
                    Error *err);
/* Reads the file that an earlier call has kept. If there is no such file, measures as above and
 * keeps the result. */
int profile_machine(Hardware *hardware, const ProfileSize *size, const ThisMachine *here,
                    Error *err);
/* Writes the path of that file, hardware-KEY.json in flexgen/ of XDG_CACHE_HOME or ~/.cache, or ""
 * if there is no such directory. KEY stands for all that the rates depend on: the model's shapes,
 * rows, tokens, cold memory, processor, threads and kernels, GPU, the disk of offload_dir, the
 * profile's version; not the capacities. */
void profile_path(char *path, size_t size, const ProfileSize *shapes, const ThisMachine *here);
/* Writes that file. If it cannot be written, a line on progress or standard error says why. */
void profile_keep(const Hardware *hardware, const ProfileSize *size, const ThisMachine *here);
/* Writes a hardware file that says how each value was measured, with today's date. */
void profile_write(const Hardware *hardware, FILE *out);

// -------------------------------------------------------------------------------------------------
// runtime.c: the cost model of this engine (section 4.3)
// -------------------------------------------------------------------------------------------------

/* The variables of `runtime`: the fractions; LAYER_S + 0 and + 1 are the seconds of a layer in
 * sweeps without a prefill and with one, LAST_S + 0 and + 1 those of the last layer with the head
 * behind it. */
enum { LAYER_S = NFRACTIONS, LAST_S = LAYER_S + 2, RUNTIME_VARS = LAST_S + 2 };

extern const char *const memory_row[NTIERS]; /* the names of its rows for the tiers */

/* Writes the LP over placements that minimizes the seconds of all sweeps of a task. Rows are named
 * like the paper's: "ctog^p", "gpu^g", "GPU memory". plan is the task's plan under the policy (its
 * gbs, num_gpu_batches, schedule, overlap, table_home) with everything on the CPU tier and without
 * delegated; from it follow the work of the sweeps, and the bytes on each tier under any
 * placement. delegated: the policy has delegated. capacity: bytes. placed: NULL; or the plan of one
 * placement, for which alone the rows then are, with what whole sequences take beyond shares. */
void runtime_lp(Lp *lp, const Hardware *hardware, const Checkpoint *checkpoint, const Plan *plan,
                bool delegated, const double capacity[NTIERS], const Plan *placed);
/* Returns the tokens that the plan's sweeps generate. */
double runtime_tokens(const Plan *plan);
/* Returns the seconds of a sweep of l layers without a prefill [0] and with one [1], at a point of
 * the LP. */
void runtime_sweeps(double sweep_s[2], const double *x, int l);
/* Computes the cost of a plan by the rows of that LP, layer by layer, with the weights where the
 * plan has put them. */
void runtime_cost(Cost *cost, const Lp *lp, const Plan *plan);

// -------------------------------------------------------------------------------------------------
// search.c: pipelines of machines (sections 4.4 and 6.4)
// -------------------------------------------------------------------------------------------------

/* A pipeline of equal machines, and the network between neighbours. */
typedef struct {
    int nodes;               /* machines; 0 or 1: one alone */
    double net_bdw, delay_s; /* bytes/s; seconds of delay for each message */
} Cluster;

/* The seconds that the sweeps of all flights take. */
typedef struct {
    double prefill_s; /* of the first prefill of every flight */
    double token_s;   /* of one new token for every flight */
    double T;         /* of the whole task */
} Pace;

/* Returns the pace of a pipeline, from sweep_s, the seconds of a machine's sweep without a prefill
 * [0] and with one [1], and the plan of a machine. */
Pace cluster_pace(const Cluster *cluster, const Plan *plan, const double sweep_s[2]);

// -------------------------------------------------------------------------------------------------
// search.c: the policy search (section 4.3)
// -------------------------------------------------------------------------------------------------

/* The task and the machine for which a policy is searched, and what is given of it. */
typedef struct {
    const Hardware *hardware;
    const Checkpoint *checkpoint;
    const Task *task;
    Cluster cluster; /* checkpoint is the part of one of its machines */
    /* The task has as many prompts as may be in flight; a policy is judged by one block for each
     * flight. */
    bool one_block;
    Type act_type; /* of the device */
    Bytes capacity[NTIERS];
    Policy given;  /* overlap and page_tokens are used as they are; the rest only if it is fixed */
    bool fixed[6]; /* which of wg wc cg cc hg hc are given */
    bool fixed_flights, fixed_gbs, fixed_batches, fixed_schedule, fixed_attention;
    bool may_pack;      /* weights and cache may be packed even if `given` has them as F16 */
    double max_latency; /* seconds that one block may take; 0: any number */
    bool rehearse;      /* for the caller of policy_search: the sim is to choose */
} Search;

/* A policy whose plan fits, and what the cost model `runtime` expects of it. In a pipeline
 * cost.T_pre and T_gen are a machine's seconds of a layer, and cost.T and the throughput are those
 * of the whole. */
typedef struct {
    Policy policy;
    Cost cost;
    Pace pace;
    double latency; /* seconds of one block; in a pipeline, of one for each flight */
    /* From policy_rehearse: the token/s that are expected (before, those predicted); how many
     * policies were played, and the seconds that it took. */
    double expected, play_s;
    int plays;
} Found;

/* Finds the best policies, at most `most`, sorted by falling throughput less the prices of
 * policy_score (on shared cores, twice the batches in flight must bring two percent more; twice a
 * block of any size one percent). Returns their number, or -1 and one line (EXIT_USAGE) that says
 * why there is none. */
int policy_search(Found *found, int most, const Search *search, Error *err);
/* Returns token/s of a policy less those prices. */
double policy_score(const Search *search, double throughput, const Policy *policy);
/* Returns, of n policies that were found, best first, and whose throughput is expected to come
 * close to the best one's, the one with the shortest time for a block: for somebody who waits for
 * the first results. */
const Found *policy_sooner(const Found *found, int n);
/* Finds the best throughput for every latency that a block may have (Figure 1), shortest latency
 * first, at most `most`. Returns as policy_search does. */
int policy_frontier(Found *found, int most, const Search *search, Error *err);
/* Makes the plan by which the search judges a policy: for all of the task, or for one block of each
 * flight. Returns NULL and err if there is none. */
Plan *plan_for(const Search *search, const Policy *policy, Error *err);
/* Computes what the cost model expects of search->given, unchanged. Returns -1 and err if its plan
 * does not fit. */
int policy_predict(Found *found, const Search *search, Error *err);
/* Writes the linear program of a policy that was found: its fractions are open again, except those
 * that are given. *tokens is the number of tokens that its sweeps generate. */
void policy_lp(Lp *lp, double *tokens, const Search *search, const Policy *policy);
/* Finds the best policy for search->cluster, where search->checkpoint is the whole model; without
 * offloading, one that keeps everything on the GPUs. Returns -1 and one line (EXIT_USAGE) if a
 * machine's part does not fit. */
int cluster_search(Found *best, const Search *search, bool offloading, Error *err);
/* Returns how many machines it takes to keep one sequence on the GPUs, or 0 if even one layer is
 * too much for one machine. */
int cluster_least(const Search *search);

// -------------------------------------------------------------------------------------------------
// rehearse.c: the policy search, judged by the device sim (section 4.3)
// -------------------------------------------------------------------------------------------------

/* Plays the best of n policies that were found for one machine, and moves the one that is expected
 * to be the best to the front. The task is not a scored one. Returns 0, or -1 and err (EXIT_USAGE)
 * if search->max_latency is too short for all of them. */
int policy_rehearse(Found *found, int n, const Search *search, Error *err);

#endif
