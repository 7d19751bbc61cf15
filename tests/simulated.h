/* simulated.h: runs on the sim, of models of any size, since it moves no bytes: what it counts, for test_theory.c and for
 * the grades. */
#ifndef SIMULATED_H
#define SIMULATED_H
#include "tests.h"

typedef struct {
    double moved[NCHANNELS][NKINDS]; /* bytes */
    double read[2];                  /* bytes of K, V that attention on the CPU read */
    double seconds;
    int ended, pages; /* prompts; pages of the CPU tier's pool */
    RunStats stats;
    long planned_sweeps;
} Simulated;

static inline int count_ended(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *why) {
    (void)prompt, (void)tokens, (void)n, (void)reason, (void)why;
    (*(int *)ctx)++;
    return 0;
}

/* K batches of gbs; weights, cache and activations all stream from the CPU or from the disk. */
static inline Policy streaming(Schedule schedule, int gbs, int K, Tier from) {
    const double cpu = from == TIER_CPU;
    return (Policy){.wc = cpu,
                    .cc = cpu,
                    .hc = cpu,
                    .gbs = gbs,
                    .num_gpu_batches = K,
                    .schedule = schedule,
                    .overlap = true,
                    .page_tokens = 1,
                    .table_home = from};
}

/* A published OPT with l layers, of which no sequence ends early. */
static inline OptConfig opt_of_layers(const char *name, int l) {
    OptConfig config = opt_named(name);
    config.l = l, config.eos = -1;
    return config;
}

/* F16 bytes of a layer's weights, each tensor on its cache lines. */
static inline double layer_bytes(const OptConfig *c) {
    double bytes = 0;
    for (int r = 0; r < NROLES; r++) {
        int rows, cols;
        opt_role_shape(c, (Role)r, &rows, &cols);
        bytes += ((size_t)rows * cols * 2 + 63) / 64 * 64;
    }
    return bytes;
}

/* False: it did not run to its end, and err says why. */
static inline bool simulate(Simulated *to, const OptConfig *config, const Policy *policy, const Task *task, Error *err) {
    Checkpoint *model = checkpoint_dummy(config, 1);
    Hardware machine = {.gmem = 1e18, .cmem = 1e18, .nmem = 1e18};
    Task all = *task;
    for (int stage = 0; stage < 2; stage++) {
        machine.ctog_bdw[stage] = machine.gtoc_bdw[stage] = 1e10, machine.dtoc_bdw[stage] = machine.ctod_bdw[stage] = 1e9;
        machine.mm_flops[stage] = machine.bmm_flops[stage] = 1e14, machine.cpu_flops[stage] = 1e12;
    }
    *to = (Simulated){.seconds = 0};
    Plan *plan = plan_make(model, policy, &all, F16, err);
    Device *device = plan ? sim_open(plan, &machine) : NULL;
    const Listener listener = {.ctx = &to->ended, .done = count_ended};
    if (!device || schedule_run(plan, &all, device, &listener, &to->stats, err) != 0) return false;
    for (int lane = 0; lane < NLANES; lane++)
        for (int kind = 0; kind < NKINDS; kind++) to->moved[lane_channel[lane]][kind] += device->count[lane].moved[kind];
    for (int kv = 0; kv < 2; kv++) to->read[kv] = device->count[ATTEND].read[kv];
    to->seconds = device->now(device), to->pages = plan->npages[TIER_CPU], to->planned_sweeps = plan->sweeps;
    device->close(device), plan_free(plan), checkpoint_close(model);
    return true;
}
#endif
