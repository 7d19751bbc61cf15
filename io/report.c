/* report.c: what the commands say of policies and costs, as JSON under the paper's names and as tables. Read next:
 * flexgen.c, which calls it. */
#include <cjson/cJSON.h>

#include "cost/cost.h"

void add_figures(cJSON *to, const Figure *figures, size_t n) {
    for (size_t f = 0; f < n; f++) cJSON_AddNumberToObject(to, figures[f].name, figures[f].value);
}

/* The disk's share, without the dust of a subtraction. */
static double rest(double gpu, double cpu) { return 1 - gpu - cpu < 1e-9 ? 0 : 1 - gpu - cpu; }

/* A policy under the paper's names. */
void add_policy(cJSON *json, const Policy *p) {
    const Figure figures[] = {
        {"wg", p->wg},
        {"wc", p->wc},
        {"wd", rest(p->wg, p->wc)},
        {"cg", p->cg},
        {"cc", p->cc},
        {"cd", rest(p->cg, p->cc)},
        {"hg", p->hg},
        {"hc", p->hc},
        {"hd", rest(p->hg, p->hc)},
        {"gbs", p->gbs},
        {"num_gpu_batches", p->num_gpu_batches},
        {"bls", block_size(p)},
    };
    cJSON_AddStringToObject(json, "schedule", schedule_name[p->schedule]);
    cJSON_AddBoolToObject(json, "cpu_cache_compute", p->cpu_attention);
    cJSON_AddBoolToObject(json, "compress_weight", p->weight_quant.bits > 0);
    cJSON_AddBoolToObject(json, "compress_cache", p->cache_quant.bits > 0);
    cJSON_AddNumberToObject(json, "attn_sparsity", is_sparse(p) ? p->sparsity : 1);
    add_figures(json, figures, sizeof figures / sizeof *figures);
}

/* What a cost model expects. */
void add_cost(cJSON *json, const Cost *cost) {
    const Figure figures[] = {
        {"T", cost->T}, {"T_pre", cost->T_pre}, {"T_gen", cost->T_gen}, {"throughput", cost->throughput}};
    add_figures(json, figures, sizeof figures / sizeof *figures);
    cJSON *bound = cJSON_AddObjectToObject(json, "bound");
    cJSON_AddStringToObject(bound, "T_pre", cost->slowest[1]);
    cJSON_AddStringToObject(bound, "T_gen", cost->slowest[0]);
    cJSON *peak = cJSON_AddObjectToObject(json, "peak_bytes");
    for (int t = 0; t < NTIERS; t++) {
        cJSON_AddNumberToObject(peak, tier_name[t], cost->peak[t]);
        if (cost->full[t][0]) cJSON_AddStringToObject(bound, tier_name[t], cost->full[t]);
    }
}

void print_json(FILE *out, cJSON *json) {
    char *text = cJSON_Print(json);
    CHECK(text);
    fprintf(out, "%s\n", text);
    free(text);
    cJSON_Delete(json);
}

cJSON *paper_json(const Cost *cost, const Block *block) {
    const Figure figures[] = {{"gbs", block->gbs},
                              {"num_gpu_batches", block->num_gpu_batches},
                              {"bls", (double)block->gbs * block->num_gpu_batches}};
    cJSON *json = cJSON_CreateObject();
    for (int f = 0; f < NFRACTIONS; f++) cJSON_AddNumberToObject(json, fraction_name[f], cost->fraction[f]);
    add_figures(json, figures, sizeof figures / sizeof *figures);
    add_cost(json, cost);
    return json;
}

void print_paper(const Cost *cost, const Block *block, const Hardware *hardware) {
    static const char *const what[] = {"weights", "KV cache", "activations"};
    const double capacity[NTIERS] = {hardware->gmem, hardware->cmem, hardware->nmem}, *share = cost->fraction;
    printf("block of %d x %d, by Appendix A.3\n", block->gbs, block->num_gpu_batches);
    for (int i = 0, f = 0; i < 3; i++, f += 3)
        printf("  %-12s %s %6.2f%%  %s %6.2f%%  %s %6.2f%%\n", what[i], fraction_name[f], 100 * share[f],
               fraction_name[f + 1], 100 * share[f + 1], fraction_name[f + 2], 100 * share[f + 2]);
    printf("  %-12s %12.6g s a layer, bound by %s\n", "T_pre", cost->T_pre, cost->slowest[1]);
    printf("  %-12s %12.6g s a layer, bound by %s\n", "T_gen", cost->T_gen, cost->slowest[0]);
    printf("  %-12s %12.6g s, throughput %.6g token/s\n", "T", cost->T, cost->throughput);
    for (int t = 0; t < NTIERS; t++)
        printf("  %-12s %12.2f of %.2f GiB%s%s\n", tier_name[t], cost->peak[t] / 0x1p30, capacity[t] / 0x1p30,
               cost->full[t][0] ? ", full: " : "", cost->full[t]);
}

/* A line each: the policy, what it promises, what binds it. */
void print_found(const Found *found, int n) {
    printf("%10s %-8s %-3s %-5s %-36s %11s %10s %10s %10s  %s\n", "block", "schedule", "att", "bits",
           "  wg    wc    cg    cc    hg    hc", "token/s", "T_pre (s)", "T_gen (s)", "block (s)", "bound by");
    for (int i = 0; i < n; i++) {
        const Policy *p = &found[i].policy;
        const Cost *c = &found[i].cost;
        int w = p->weight_quant.bits, kv = p->cache_quant.bits; /* of weights, of the cache */
        printf("%5d x %-3d%-8s %-3s %2d %2d %5.1f %5.1f %5.1f %5.1f %5.1f %5.1f %11.5g %10.4g %10.4g %10.4g  %s %s", p->gbs,
               p->num_gpu_batches, schedule_name[p->schedule], p->cpu_attention ? "CPU" : "GPU", w ? w : 16, kv ? kv : 16,
               100 * p->wg, 100 * p->wc, 100 * p->cg, 100 * p->cc, 100 * p->hg, 100 * p->hc, c->throughput, c->T_pre,
               c->T_gen, found[i].latency, c->slowest[1], c->slowest[0]);
        for (int t = 0; t < NTIERS; t++) printf("%s%s", c->full[t][0] ? ", " : "", c->full[t]);
        printf("\n");
    }
}

static void add_found(cJSON *json, const Found *found) {
    add_policy(json, &found->policy);
    add_cost(json, &found->cost);
    cJSON_AddNumberToObject(json, "latency", found->latency);
}

cJSON *found_json(const char *key, const Found *found, int n) {
    cJSON *json = cJSON_CreateObject();
    add_found(json, found);
    cJSON *list = cJSON_AddArrayToObject(json, key);
    for (int i = 0; i < n; i++) {
        cJSON *one = cJSON_CreateObject();
        add_found(one, &found[i]);
        cJSON_AddItemToArray(list, one);
    }
    return json;
}

void add_cluster(cJSON *json, const char *name, const ClusterCost *c) {
    const Figure figures[] = {{"prefill_s", c->prefill_s},
                              {"token_s", c->token_s},
                              {"T", c->T},
                              {"throughput", c->throughput},
                              {"decode_throughput", c->decode_throughput}};
    cJSON *to = cJSON_AddObjectToObject(json, name);
    add_policy(to, &c->found.policy);
    add_figures(to, figures, sizeof figures / sizeof *figures);
}

void print_cluster(const char *name, const ClusterCost *c) {
    const Policy *p = &c->found.policy;
    printf("%-34s %4d x %-3d %5.1f %5.1f %5.1f %5.1f %5.1f %5.1f %11.4g %11.4g %11.4g %11.4g %11.4g\n", name, p->gbs,
           p->num_gpu_batches, 100 * p->wg, 100 * p->wc, 100 * p->cg, 100 * p->cc, 100 * p->hg, 100 * p->hc, c->prefill_s,
           c->token_s, c->T, c->throughput, c->decode_throughput);
}
