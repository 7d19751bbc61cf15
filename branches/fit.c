/* fit.c: plans that must fit into the tiers.
 *
 * plan_make says how many bytes each tier needs. Here they are compared with the bytes that the
 * tier has. If these are too few, fit_policy tries what costs only a little speed: fewer
 * workspaces, or a token table that rests lower. If that does not help, check_fits says which tier
 * is too small, which region is the largest there, and which flag changes it.
 * Read next: walk.c. */
#include "branches/fit.h"

Bytes plan_missing(const Plan *p, const Bytes capacity[NTIERS]) {
    Bytes missing = 0;
    for (int t = 0; t < NTIERS; t++)
        missing += size_less(p->total[t], capacity[t]);
    return missing;
}

static const char percent_w[] =
    "raise or lower the first two numbers of --percent (weights on GPU, on CPU)";
static const char percent_h[] =
    "change the fifth and sixth number of --percent (activations on GPU, on CPU), or %s";
/* Says what can be done about a region that takes too much; %s stands for the advice of
 * smaller_block, which is all there is for the other regions. */
static const char *const remedies[NREGIONS] = {
    [RESTING_WEIGHTS] = percent_w,
    [WEIGHT_SLOT] = percent_w,
    [WEIGHT_SLOT_1] = percent_w,
    [EMBEDDINGS] = "use a smaller model",
    [UNPACKED_WEIGHTS] = "leave --compress-weight out",
    [KV_CACHE] = "change the third and fourth number of --percent (KV cache on GPU, on CPU), or %s",
    [KV_STAGING] = "use --cpu-cache-compute, or %s", /* on the GPU; on the CPU it is of no use */
    [ACTIVATIONS] = percent_h,
    [ACT_READING] = percent_h,
    [ACT_WRITING] = percent_h,
};

/* Returns advice on how to make the policy's block smaller. */
static const char *smaller_block(const Policy *p) {
    if (p->gbs > 1)
        return "lower --gpu-batch-size";
    return p->num_gpu_batches > 1 ? "lower --num-gpu-batches"
                                  : "use a smaller model, or shorten prompts or outputs";
}

/* Returns the advice on a region: NULL if smaller_block is all there is. */
static const char *remedy_of(RegionId id, const Plan *p) {
    const Policy *policy = &p->policy;
    bool packs = !policy->head_packed && !policy->weight_study.bits && p->config.embed % GROUP == 0;
    return id == EMBEDDINGS && packs
               ? "give --compress-weight and --compress-head, or use a smaller model"
               : remedies[id];
}

/* Prints both numbers in MiB with one decimal, or with as many as it takes to tell them apart. */
static void print_apart(char needs[32], char has[32], Bytes need, Bytes have) {
    for (int digits = 1; digits == 1 || !strcmp(needs, has); digits++) {
        snprintf(needs, 32, "%.*f", digits, need / 1048576.0);
        snprintf(has, 32, "%.*f", digits, have / 1048576.0);
    }
}

int check_fits(const Plan *p, const Bytes capacity[NTIERS], bool placed, Error *err) {
    static const char *const flag[NTIERS] = {"--gpu-mem", "--cpu-mem", "--disk-mem"};
    char needs[32], has[32], remedy[200];
    for (int t = 0; t < NTIERS; t++) {
        int worst = 0;
        if (p->total[t] <= capacity[t])
            continue;
        for (int id = 1; id < NREGIONS; id++)
            if (p->region[id][t].bytes > p->region[worst][t].bytes)
                worst = id;
        const Region *part = &p->region[worst][t];
        const char *advice = remedy_of(worst, p);
        bool block_only = !placed || !advice || (worst == KV_STAGING && t == TIER_CPU);
        print_apart(needs, has, p->total[t], capacity[t]);
        snprintf(remedy, sizeof remedy, block_only ? "%s" : advice, smaller_block(&p->policy));
        return fail(err, EXIT_USAGE,
                    "the %s tier needs %s MiB and has %s MiB; its largest part is %s with %.1f "
                    "MiB: %s, or raise %s",
                    tier_name[t], needs, has, part->name, part->bytes / 1048576.0, remedy, flag[t]);
    }
    return 0;
}

int fit_policy(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
               const Bytes capacity[NTIERS], Error *err) {
    policy_defaults(policy);
    int most = policy->workspaces;
    Bytes least = UINT64_MAX;
    for (policy->workspaces = most; policy->workspaces >= LEAST_WORKSPACES; policy->workspaces--)
        for (Tier home = TIER_GPU; home < NTIERS; home++) {
            policy->table_home = home;
            Plan *p = plan_make(checkpoint, policy, task, act_type, err);
            Bytes missing = p ? plan_missing(p, capacity) : least;
            if (missing < least) {
                least = missing;
                check_fits(p, capacity, true, err);
            }
            plan_free(p);
            if (!missing)
                return 0;
        }
    policy->workspaces = most;
    return -1;
}

void fit_pieces(Policy *policy, const Checkpoint *checkpoint, const Task *task, Type act_type,
                const Bytes capacity[NTIERS]) {
    Error none;
    for (policy->piece_rows = LARGE_PIECE_ROWS; policy->piece_rows > PIECE_ROWS;
         policy->piece_rows /= 2) {
        Plan *p = plan_make(checkpoint, policy, task, act_type, &none);
        bool fits = p && !plan_missing(p, capacity);
        plan_free(p);
        if (fits)
            return;
    }
}
