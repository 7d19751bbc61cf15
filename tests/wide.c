/* wide.c: a program of its own, which test_plan.c builds for 32 bits as well: what OPT-175B's tiers hold, whatever size_t
 * is. */
#include <inttypes.h>

#include "io/io.h"
#include "plan.h"

int main(void) {
    enum { PROMPTS = 256, S = 512, N = 32 };
    const Policy policy = {
        .wc = .5, .gbs = 32, .num_gpu_batches = 8, .delegated = true, .overlap = true, .page_tokens = 16};
    OptConfig config;
    Prompt prompts[PROMPTS];
    Error err;
    if (opt_config_by_name(&config, "opt-175b")) return 1;
    for (int i = 0; i < PROMPTS; i++) prompts[i] = (Prompt){.s = S, .n = N, .place = i};
    Checkpoint *checkpoint = checkpoint_dummy(&config, 0);
    Plan *plan = plan_make(checkpoint, &policy, &(Task){.prompts = prompts, .count = PROMPTS}, F16, &err);
    for (int t = 0; t < NTIERS; t++) printf("%s %" PRIu64 "\n", tier_name[t], plan->total[t]);
    const Region *cache = &plan->region[KV_CACHE][TIER_DISK];
    const Tensor v = plan_view(plan, KV_CACHE, TIER_DISK, 2 * config.l - 1, cache->rows - 1, 1);
    printf("last of the cache %" PRIu64 "\n", v.offset + tensor_span(v));
    plan_free(plan), checkpoint_close(checkpoint);
    return 0;
}
