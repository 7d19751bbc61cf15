/* report.c: prints what the commands have to say: one list of figures for people and for programs.
 *
 * The list is a cJSON object under the paper's names, which --json writes as it is. The text has
 * those of them that a person wants to see, and a few more, such as a rate beside bytes and
 * seconds. Read next: explain.c. */
#include <inttypes.h>

#include "app/app.h"

static const double GIB = 1073741824;

// -------------------------------------------------------------------------------------------------
// The plan
// -------------------------------------------------------------------------------------------------

const char *plan_purpose(Bytes bytes[NTIERS], const Plan *p, int i) {
    const Region *all = &p->region[0][0];
    memset(bytes, 0, NTIERS * sizeof *bytes);
    for (int e = 0; e < NREGIONS * NTIERS; e++) {
        if (!all[i].bytes || !all[e].bytes || strcmp(all[e].name, all[i].name))
            continue;
        if (e < i)
            return NULL;
        bytes[e % NTIERS] += all[e].bytes;
    }
    return all[i].bytes ? all[i].name : NULL;
}

static void print_tiers(FILE *out, const char *name, const Bytes bytes[NTIERS]) {
    fprintf(out, "%-34s %12.2f %12.2f %12.2f\n", name, bytes[TIER_GPU] / MEBIBYTE,
            bytes[TIER_CPU] / MEBIBYTE, bytes[TIER_DISK] / MEBIBYTE);
}

void plan_print(FILE *out, const Plan *p, const Bytes capacity[NTIERS]) {
    int flights = flight_count(&p->policy),
        batches = p->batches - (p->policy.schedule == SCHEDULE_DIAGONAL) * flights;
    fputs("plan (MiB)                                  GPU          CPU         disk\n", out);
    for (int i = 0; i < NREGIONS * NTIERS; i++) {
        Bytes bytes[NTIERS];
        const char *name = plan_purpose(bytes, p, i);
        if (!name)
            continue;
        fprintf(out, "  %-32s", name);
        for (int t = 0; t < NTIERS; t++)
            bytes[t] ? fprintf(out, " %12.2f", bytes[t] / MEBIBYTE) : fprintf(out, " %12s", "");
        fprintf(out, "\n");
    }
    print_tiers(out, "planned", p->total);
    print_tiers(out, "capacity", capacity);
    Bytes pages = 0;
    for (int t = 0; t < NTIERS; t++)
        pages += p->npages[t];
    fprintf(
        out,
        "  %s, %d batch%s in flight, %ld sweep%s; KV cache %.2f MiB, by A.2.1's estimate %.2f\n",
        schedule_name[p->policy.schedule], batches, batches == 1 ? "" : "es", p->sweeps,
        plural(p->sweeps),
        flights * pages * p->policy.page_tokens * p->kv_row * 2 * p->config.l / MEBIBYTE,
        p->a21_kv / MEBIBYTE);
    for (int w = 0; w < 3; w++)
        fprintf(out, "  %-32s %11.2f%% %11.2f%% %11.2f%%\n", placed_name[w],
                100 * p->achieved[w][0], 100 * p->achieved[w][1], 100 * p->achieved[w][2]);
}

// -------------------------------------------------------------------------------------------------
// The object and the text
// -------------------------------------------------------------------------------------------------

void add_figures(cJSON *to, const Figure *figure) {
    for (; figure->name; figure++)
        cJSON_AddNumberToObject(to, figure->name, figure->value);
}

int report_open(TaskRun *run, Error *err) {
    const char *path = run->options->json;
    run->json = cJSON_CreateObject();
    run->text = output_open("--json", path && !strcmp(path, "-") ? "/dev/null" : "-", err);
    return run->text ? 0 : -1;
}

static int write_json(const TaskRun *run, const char *path, Error *err) {
    FILE *file = output_open("--json", path, err);
    if (!file)
        return -1;
    json_print(file, run->json);
    return output_close(file, "--json", path, err);
}

int report_write(const TaskRun *run, Error *err) {
    const char *path = run->options->json;
    fflush(run->text); /* an error is found when the stream is closed */
    return path && !output_is_special(path) ? write_json(run, path, err) : 0;
}

int report_close(TaskRun *run, int status, Error *err) {
    const char *path = run->options->json;
    if (path && run->json && !status)
        status = write_json(run, path, err);
    cJSON_Delete(run->json);
    if (run->text && run->text != stdout)
        fclose(run->text);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Policies and costs
// -------------------------------------------------------------------------------------------------

static void add_policy(cJSON *json, const Policy *p) {
    cJSON_AddStringToObject(json, "schedule", schedule_name[p->schedule]);
    cJSON_AddBoolToObject(json, "cpu_cache_compute", p->delegated);
    cJSON_AddBoolToObject(json, "compress_weight", p->weight_packed);
    if (p->head_packed)
        cJSON_AddTrueToObject(json, "compress_head");
    cJSON_AddBoolToObject(json, "compress_cache", p->cache_packed);
    cJSON_AddNumberToObject(json, "attn_sparsity", is_sparse(p) ? p->sparsity : 1);
    for (int of = 0; of < 3; of++) {
        const double *share = &p->share[2 * of];
        const char *const *name = &fraction_name[NTIERS * of];
        double rest = 1 - share[0] - share[1];
        ADD(json, {name[0], share[0]}, {name[1], share[1]},
            {name[2], rest < 1e-9 ? 0 : rest}); /* a difference that is only rounding becomes 0 */
    }
    ADD(json, {"flights", flight_count(p)}, {"gbs", p->gbs},
        {"num_gpu_batches", p->num_gpu_batches}, {"bls", block_size(p)});
}

/* Prints the shares in percent: wg wc cg cc hg hc. */
static void print_shares(FILE *out, const Policy *p) {
    for (int i = 0; i < 6; i++)
        fprintf(out, i ? " %5.1f" : "%5.1f", 100 * p->share[i]);
}

/* Adds what a cost model expects, and the rows that bind it. */
static void add_cost(cJSON *json, const Cost *cost) {
    ADD(json, {"T", cost->T}, {"T_pre", cost->T_pre}, {"T_gen", cost->T_gen},
        {"throughput", cost->throughput});
    cJSON *bound = cJSON_AddObjectToObject(json, "bound");
    cJSON_AddStringToObject(bound, "T_pre", cost->slowest[1]);
    cJSON_AddStringToObject(bound, "T_gen", cost->slowest[0]);
    cJSON *peak = cJSON_AddObjectToObject(json, "peak_bytes");
    for (int t = 0; t < NTIERS; t++) {
        cJSON_AddNumberToObject(peak, tier_name[t], cost->peak[t]);
        if (cost->full[t][0])
            cJSON_AddStringToObject(bound, tier_name[t], cost->full[t]);
    }
}

static void add_found(cJSON *json, const Found *found) {
    add_policy(json, &found->policy);
    add_cost(json, &found->cost);
    cJSON_AddNumberToObject(json, "latency", found->latency);
}

/* Reports the question: the last figures of the object, and the first line of the text. */
static void report_question(const TaskRun *run) {
    int s = run->options->prompt_len[1], n = run->options->gen_len[1];
    const char *model = run->checkpoint->config.name, *hardware = run->hardware->name;
    cJSON_AddStringToObject(run->json, "model", model);
    cJSON_AddStringToObject(run->json, "hardware", hardware);
    ADD(run->json, {"s", s}, {"n", n});
    fprintf(run->text, "%s, s %d, n %d, on: %s\n", model, s, n, hardware);
}

/* Prints a line of the table: the policy, what it promises, what binds it. */
static void print_found(FILE *out, const Found *found) {
    const Policy *p = &found->policy;
    const Cost *cost = &found->cost;
    fprintf(out, "%5d x %-3d%-8s %-3s %2d %2d ", p->gbs, p->num_gpu_batches,
            schedule_name[p->schedule], p->delegated ? "CPU" : "GPU", p->weight_packed ? 4 : 16,
            p->cache_packed ? 4 : 16);
    print_shares(out, p);
    fprintf(out, " %11.5g %10.4g %10.4g %10.4g  %s %s", cost->throughput, cost->T_pre, cost->T_gen,
            found->latency, cost->slowest[1], cost->slowest[0]);
    for (int t = 0; t < NTIERS; t++)
        fprintf(out, "%s%s", cost->full[t][0] ? ", " : "", cost->full[t]);
    fprintf(out, "\n");
}

/* Says on standard error how many policies the sim played before one was chosen. */
static void print_rehearsal(const Found *found) {
    if (found->plays)
        fprintf(stderr, "policies rehearsed on the sim: %d, in %.2f s (--no-rehearsal: none)\n",
                found->plays, found->play_s);
}

void report_found(const TaskRun *run, const char *key, const Found *found, int n) {
    add_found(run->json, found);
    cJSON *list = cJSON_AddArrayToObject(run->json, key);
    report_question(run);
    fputs(
        "     block schedule att bits    wg    wc    cg    cc    hg    hc       token/s  T_pre (s)"
        "  T_gen (s)  block (s)  bound by\n",
        run->text);
    print_rehearsal(found);
    for (int i = 0; i < n; i++) {
        cJSON *one = cJSON_CreateObject();
        add_found(one, &found[i]);
        cJSON_AddItemToArray(list, one);
        print_found(run->text, &found[i]);
    }
}

void report_paper(const TaskRun *run, const Cost *cost, const Block *block) {
    FILE *out = run->text;
    for (int f = 0; f < NFRACTIONS; f++)
        cJSON_AddNumberToObject(run->json, fraction_name[f], cost->fraction[f]);
    ADD(run->json, {"gbs", block->gbs}, {"num_gpu_batches", block->num_gpu_batches},
        {"bls", (double)block->gbs * block->num_gpu_batches});
    add_cost(run->json, cost);
    report_question(run);
    fprintf(out, "block of %d x %d, by Appendix A.3\n", block->gbs, block->num_gpu_batches);
    for (int f = 0; f < NFRACTIONS; f++) {
        if (f % NTIERS == 0)
            fprintf(out, "  %-11s", placed_name[f / NTIERS]);
        fprintf(out, "  %s %6.2f%%%s", fraction_name[f], 100 * cost->fraction[f],
                f % NTIERS == TIER_DISK ? "\n" : "");
    }
    fprintf(out,
            "  T_pre        %12.6g s a layer, bound by %s\n"
            "  T_gen        %12.6g s a layer, bound by %s\n"
            "  T            %12.6g s, throughput %.6g token/s\n",
            cost->T_pre, cost->slowest[1], cost->T_gen, cost->slowest[0], cost->T,
            cost->throughput);
    for (int t = 0; t < NTIERS; t++)
        fprintf(out, "  %-12s %12.2f of %.2f GiB%s%s\n", tier_name[t], cost->peak[t] / GIB,
                run->hardware->mem[t] / GIB, cost->full[t][0] ? ", full: " : "", cost->full[t]);
}

/* Returns the tokens/s of a pipeline without the prefills. */
static double decode_throughput(const Found *f) {
    double token_s = f->pace.token_s;
    return token_s > 0 ? block_size(&f->policy) * flight_count(&f->policy) / token_s : 0;
}

static void add_cluster(cJSON *to, const Found *f) {
    add_policy(to, &f->policy);
    ADD(to, {"prefill_s", f->pace.prefill_s}, {"token_s", f->pace.token_s}, {"T", f->cost.T},
        {"throughput", f->cost.throughput}, {"decode_throughput", decode_throughput(f)});
}

static void print_cluster(FILE *out, const Found *f) {
    const Policy *p = &f->policy;
    fprintf(out, "%3d x %4d x %-3d ", flight_count(p), p->gbs, p->num_gpu_batches);
    print_shares(out, p);
    fprintf(out, " %11.4g %11.4g %11.4g %11.4g %11.4g\n", f->pace.prefill_s, f->pace.token_s,
            f->cost.T, f->cost.throughput, decode_throughput(f));
}

void report_clusters(const TaskRun *run, const Found *const found[3], int least) {
    static const char *const name[] = {"one", "pipeline", "chain"};
    static const char *const ending[] = {"", ", pipeline", ", without offloading"};
    for (int i = 0; i < 3; i++)
        if (found[i])
            add_cluster(cJSON_AddObjectToObject(run->json, name[i]), found[i]);
    report_question(run);
    fputs(
        "                                   flights x block      wg    wc    cg    cc    hg    hc "
        " prefill (s) a token (s)   block (s)     token/s    decoding\n",
        run->text);
    for (int i = 0; i < 3; i++) {
        int nodes = i ? run->options->nodes : 1;
        char title[64];
        snprintf(title, sizeof title, "%d machine%s%s", nodes, plural(nodes), ending[i]);
        fprintf(run->text, found[i] ? "%-34s " : "%s: ", title);
        if (found[i])
            print_cluster(run->text, found[i]);
        else
            fprintf(run->text, "it does not fit; %d would hold one sequence\n", least);
    }
}

// -------------------------------------------------------------------------------------------------
// Runs
// -------------------------------------------------------------------------------------------------

/* Returns a run's times in the terms of a cost model: T_pre and T_gen are seconds of a layer, in
 * sweeps with a prefill and in the others. */
static Cost measured(const TaskRun *run) {
    const RunStats *r = &run->stats;
    long l = run->plan->config.l, prefills = r->prefill_sweeps, others = r->sweeps - prefills;
    Cost cost = {.T_pre = prefills > 0 ? r->prefill_sweeps_s / prefills / l : 0,
                 .T_gen = others > 0 ? (r->total_s - r->prefill_sweeps_s) / others / l : 0,
                 .T = r->total_s,
                 .throughput = r->total_s > 0 ? r->generated / r->total_s : 0};
    for (int t = 0; t < NTIERS; t++)
        cost.peak[t] = run->device->peak[t];
    return cost;
}

static void print_pair(const char *name, double before, double after) {
    fprintf(stderr, "%-34s %12.6g %12.6g\n", name, before, after);
}

void print_prediction(const TaskRun *run, const Task *task) {
    if (!run->predicted)
        return;
    const Found *found = &run->found;
    const Cost *expected = &found->cost, was = measured(run);
    print_rehearsal(found);
    /* the layers of all flights in a sweep */
    double rows = run->plan->config.l * flight_count(&found->policy);
    fputs("                                      predicted     measured\n", stderr);
    /* with the time that a pipeline waits */
    print_pair("T_pre (s)", found->pace.prefill_s / rows, was.T_pre);
    print_pair("T_gen (s)", found->pace.token_s / rows, was.T_gen);
    print_pair("T (s)", expected->T, was.T);
    if (!task->scored)
        print_pair("throughput (token/s)", expected->throughput, was.throughput);
    for (int t = 0; t < NTIERS; t++)
        fprintf(stderr, "%-4s peak (MiB) %18s %12.2f %12.2f\n", tier_name[t], "",
                expected->peak[t] / MEBIBYTE, was.peak[t] / MEBIBYTE);
}

/* Returns the bytes that the GPU's use has grown by besides its tier: kernels that were loaded, and
 * what other programs took meanwhile. */
static double grown_bytes(const TaskRun *run) {
    return (double)run->in_use - run->in_use_before - run->plan->total[TIER_GPU];
}

void print_peaks(const TaskRun *run) {
    const Bytes *tiers = run->device->peak;
    double peak = memory_peak() / MEBIBYTE,
           in_process = ((run->gpu ? 0 : tiers[TIER_GPU]) + tiers[TIER_CPU]) / MEBIBYTE;
    fputs("plan and peak (MiB)                         GPU          CPU         disk\n", stderr);
    print_tiers(stderr, "planned", run->plan->total);
    print_tiers(stderr, "capacity", run->capacity);
    print_tiers(stderr, "measured peak", tiers);
    if (!run->sim)
        fprintf(stderr,
                "process (MiB): planned overhead %.2f, measured peak RSS %.2f, which is %.2f "
                "without the tiers\n",
                run->overhead / MEBIBYTE, peak, peak - in_process);
    if (run->gpu)
        fprintf(stderr,
                "in use on the GPU, by its own account %12.2f = tier, context, workspaces and "
                "other programs; besides the tier "
                "it has grown by %.2f of %.2f set aside\n",
                run->in_use / MEBIBYTE, grown_bytes(run) / MEBIBYTE, run->gpu->spare / MEBIBYTE);
}

/* Prints the policy and the device. */
static void print_policy(FILE *out, const TaskRun *run) {
    const Policy *p = &run->plan->policy;
    fprintf(out,
            "weights %g/%g%s, cache %g/%g%s, activations %g/%g%% on GPU/CPU, %d x %d, %s, %s%s%d "
            "thread%s, %s\n",
            100 * p->wg, 100 * p->wc,
            p->head_packed     ? " packed with the head"
            : p->weight_packed ? " packed"
                               : "",
            100 * p->cg, 100 * p->cc, p->cache_packed ? " packed" : "", 100 * p->hg, 100 * p->hc,
            p->gbs, p->num_gpu_batches, schedule_name[p->schedule], run->gpu ? run->gpu->name : "",
            run->gpu ? ", " : "", run->threads, plural(run->threads), host_isa());
}

void print_summary(const TaskRun *run, int prompts, long tokens) {
    const RunStats *r = &run->stats;
    fprintf(stderr, "%d prompt%s, %ld token%s%s%s in %.2f s", prompts, plural(prompts), tokens,
            plural(tokens), run->options->score ? " scored" : "",
            completions_head(run->completions) ? ", the rest of them" : "", r->total_s);
    if (!run->options->score)
        fprintf(stderr, " (prefill %.2f, decode %.2f): %.1f tokens/s generated", r->prefill_s,
                r->decode_s, measured(run).throughput);
    fprintf(stderr, "; ");
    print_policy(stderr, run);
}

// -------------------------------------------------------------------------------------------------
// flexgen bench and eval
// -------------------------------------------------------------------------------------------------

static void report_times(const TaskRun *run) {
    const RunStats *t = &run->stats;
    Cost was = measured(run);
    double decoding = t->decode_s > 0 ? t->decoded / t->decode_s : 0;
    ADD(run->json, {"sweeps", t->sweeps}, {"s", run->options->prompt_len[1]},
        {"n", run->options->gen_len[1]}, {"T", was.T}, {"T_pre", was.T_pre}, {"T_gen", was.T_gen},
        {"throughput", was.throughput}, {"prefill_s", t->prefill_s}, {"decode_s", t->decode_s},
        {"total_s", t->total_s}, {"generation_throughput", was.throughput},
        {"decode_throughput", decoding});
    fprintf(run->text,
            "prefill %.3f s, decode %.3f s, total %.3f s\n"
            "generation throughput %.2f token/s, decode throughput %.2f token/s\n",
            t->prefill_s, t->decode_s, t->total_s, was.throughput, decoding);
}

static void report_tiers(const TaskRun *run) {
    cJSON *tiers = cJSON_AddObjectToObject(run->json, "tiers");
    for (int t = 0; t < NTIERS; t++) {
        cJSON *tier = cJSON_AddObjectToObject(tiers, tier_name[t]);
        ADD(tier, {"planned_bytes", run->plan->total[t]}, {"peak_bytes", run->device->peak[t]});
        if (run->gpu && t == TIER_GPU)
            ADD(tier, {"in_use_bytes", run->in_use}, {"grown_bytes", grown_bytes(run)},
                {"spare_bytes", run->gpu->spare});
    }
}

/* Returns true if the channel's lanes have times. On a GPU some lanes are streams; their marks have
 * times only in a trace, or if sweeps mix prompts with new tokens. */
static bool is_timed(const TaskRun *run, Channel c) {
    return !run->gpu || run->device->trace || run->plan->policy.schedule == SCHEDULE_DIAGONAL ||
           (c != GPU && c != CTOG && c != GTOC);
}

/* Reports what each lane moved and how long it worked, and in the object also the sums by channel.
 * A GPU's lanes do not know how long, unless their marks have times. */
static void report_lanes(const TaskRun *run, cJSON *to) {
    FILE *out = run->text;
    cJSON *channels = cJSON_AddObjectToObject(to, "channels"),
          *lanes = cJSON_AddObjectToObject(to, "lanes");
    double moved[NCHANNELS] = {0}, busy[NCHANNELS] = {0};
    for (int l = 0; l < NLANES; l++) {
        const LaneCount *count = &run->device->count[l];
        Channel channel = lane_channel[l];
        cJSON *lane = cJSON_AddObjectToObject(lanes, lane_name[l]);
        double bytes = 0;
        for (int kind = 0; kind < NKINDS; kind++)
            bytes += count->moved[kind];
        bool known = is_timed(run, channel);
        cJSON_AddNumberToObject(lane, "moved_bytes", bytes);
        if (known)
            cJSON_AddNumberToObject(lane, "busy_s", count->busy_s);
        if (count->read[0])
            ADD(lane, {"k_bytes", count->read[0]}, {"v_bytes", count->read[1]});
        moved[channel] += bytes;
        busy[channel] += count->busy_s;
        if (channel == NET && !run->device->net)
            continue;
        fprintf(out, known ? "  %-16s %-5s busy %8.3f s" : "  %-16s %-5s busy        ? s",
                lane_name[l], channel_name[channel], count->busy_s);
        if (bytes > 0)
            fprintf(out, "  moved %10.2f MB", bytes / 1e6);
        if (bytes > 0 && known)
            fprintf(out, "  %6.2f GB/s", bytes / 1e9 / (count->busy_s + 1e-12));
        fprintf(out, "\n");
    }
    for (int c = 0; c < NCHANNELS; c++) {
        cJSON *sum = cJSON_AddObjectToObject(channels, channel_name[c]);
        cJSON_AddNumberToObject(sum, "moved_bytes", moved[c]);
        if (is_timed(run, c))
            cJSON_AddNumberToObject(sum, "busy_s", busy[c]);
    }
}

/* Reports Table 4. */
static void report_breakdown(const TaskRun *run) {
    FILE *out = run->text;
    Breakdown b = trace_breakdown(run->device->trace);
    cJSON *to = cJSON_AddObjectToObject(run->json, "breakdown");
    fprintf(out, "%-24s %10s", "breakdown (s, hidden)", "total");
    for (int part = 0; part < NPARTS; part++)
        fprintf(out, "  %19s", part_name[part]);
    for (int prefill = 1; prefill >= 0; prefill--) {
        const char *name = prefill ? "prefill" : "decode";
        cJSON *phase = cJSON_AddObjectToObject(to, name);
        cJSON_AddNumberToObject(phase, "total_s", b.total_s[prefill]);
        fprintf(out, "\n  %-22s %10.3f", name, b.total_s[prefill]);
        for (int part = 0; part < NPARTS; part++) {
            double busy = b.part[prefill][part].busy_s, hidden = b.part[prefill][part].hidden_s;
            ADD(cJSON_AddObjectToObject(phase, part_name[part]), {"busy_s", busy},
                {"hidden_s", hidden});
            fprintf(out, "  %10.3f (%5.1f%%)", busy, busy > 0 ? 100 * hidden / busy : 0);
        }
    }
    fprintf(out, "\n");
}

/* Reports the machines of a simulated pipeline. The GPU's two lanes take turns; the rest of its
 * time is the bubble. */
static void report_stages(const TaskRun *run) {
    double T = run->stats.total_s;
    cJSON *list = cJSON_AddArrayToObject(run->json, "stages");
    for (int s = 0; s < run->stages.n; s++) {
        const Stage *stage = &run->stages.stage[s];
        const LaneCount *count = stage->device->count;
        const Bytes *total = stage->plan->total;
        int most = 0;
        for (int l = 0; l < NLANES; l++)
            if (count[l].busy_s > count[most].busy_s)
                most = l;
        double busy_share = count[most].busy_s / T,
               gpu_waits = 1 - (count[PROJECT].busy_s + count[FINISH].busy_s) / T;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(list, one);
        ADD(one, {"first_layer", stage->first}, {"layers", stage->part.config.l});
        ADD(cJSON_AddObjectToObject(one, "planned_bytes"), {"GPU", total[TIER_GPU]},
            {"CPU", total[TIER_CPU]}, {"disk", total[TIER_DISK]});
        cJSON_AddStringToObject(one, "busiest", lane_name[most]);
        ADD(one, {"busy_share", busy_share}, {"gpu_waits", gpu_waits});
        fprintf(run->text,
                "stage %d: layers %d to %d; planned (MiB) GPU %.2f, CPU %.2f, disk %.2f; %s busy "
                "%.1f%%, GPU waits %.1f%%\n",
                s, stage->first, stage->first + stage->part.config.l - 1, total[0] / MEBIBYTE,
                total[1] / MEBIBYTE, total[2] / MEBIBYTE, lane_name[most], 100 * busy_share,
                100 * gpu_waits);
    }
}

/* Reports the share of the time in which each stage of a pipeline waits for others: the bubble. */
static void report_waiting(const TaskRun *run) {
    cJSON *list = cJSON_AddArrayToObject(run->json, "waiting");
    for (int s = 0; s < run->nstages; s++) {
        double share = 1 - trace_breakdown(&run->traces[s]).busy_s / run->stats.total_s;
        cJSON_AddItemToArray(list, cJSON_CreateNumber(share));
        fprintf(run->text, "stage %d waits %.1f%% of the time\n", s, 100 * share);
    }
}

/* Adds the model, the device and the policy. */
static void add_setting(const TaskRun *run) {
    cJSON_AddStringToObject(run->json, "model", run->plan->config.name);
    cJSON_AddStringToObject(run->json, "device", run->device->name);
    add_policy(run->json, &run->plan->policy);
}

void report_bench(const TaskRun *run) {
    add_setting(run);
    report_times(run);
    report_tiers(run);
    if (!run->sim) {
        char digest[24];
        snprintf(digest, sizeof digest, "%016" PRIx64, run->digest);
        cJSON_AddStringToObject(run->json, "digest", digest);
        ADD(run->json, {"overhead_bytes", run->overhead}, {"peak_rss_bytes", memory_peak()});
    }
    report_lanes(run, run->json);
    if (run->device->trace)
        report_breakdown(run);
    if (run->stages.n)
        report_stages(run);
    if (run->stages.n || run->net)
        report_waiting(run);
    if (run->predicted)
        add_cost(cJSON_AddObjectToObject(run->json, "predicted"), &run->found.cost);
}

void report_traced(const TaskRun *run) {
    cJSON *traced = cJSON_AddObjectToObject(run->json, "traced");
    cJSON_AddNumberToObject(traced, "total_s", run->stats.total_s);
    fprintf(run->text, "once more, traced: total %.3f s\n", run->stats.total_s);
    report_lanes(run, traced);
    report_breakdown(run);
}

/* Reports that numbers were only rounded for a study: in memory and in traffic they were as large
 * as F16. */
static void report_study(const TaskRun *run) {
    const Policy *p = &run->plan->policy;
    Quant study = p->weight_study.bits ? p->weight_study : p->cache_study;
    if (!study.bits)
        return;
    cJSON *json = cJSON_AddObjectToObject(run->json, "study");
    cJSON_AddBoolToObject(json, "weights", p->weight_study.bits);
    cJSON_AddBoolToObject(json, "cache", p->cache_study.bits);
    ADD(json, {"bits", study.bits}, {"group", study.group});
    fprintf(run->text,
            "a study: %s%s%s rounded to %d bits in groups of %d, in memory and on the way as large "
            "as F16\n",
            p->weight_study.bits ? "weights" : "",
            p->weight_study.bits && p->cache_study.bits ? " and " : "",
            p->cache_study.bits ? "cache" : "", study.bits, study.group);
}

void report_eval(const TaskRun *run, const Eval *eval) {
    EvalResult e = eval_result(&eval->job);
    const RunStats *t = &run->stats;
    if (run->options->perplexity) {
        ADD(run->json, {"perplexity", e.perplexity}, {"nll", e.nll},
            {"bits_per_byte", e.bits_per_byte}, {"tokens", e.tokens}, {"unscored", eval->unscored},
            {"windows", e.lines}, {"window", eval->window});
        fprintf(run->text,
                "perplexity %.4f, %.4f bits per byte: %ld token%s in %d window%s of %d, %ld left "
                "unscored\n",
                e.perplexity, e.bits_per_byte, e.tokens, plural(e.tokens), e.lines, plural(e.lines),
                eval->window, eval->unscored);
    } else {
        ADD(run->json, {"last_word_accuracy", e.accuracy}, {"perplexity", e.word_perplexity},
            {"lines", e.lines});
        fprintf(run->text, "last word: accuracy %.4f, perplexity %.4f: %d line%s\n", e.accuracy,
                e.word_perplexity, e.lines, plural(e.lines));
    }
    add_setting(run);
    ADD(run->json, {"sweeps", t->sweeps}, {"T", t->total_s}, {"prefill_s", t->prefill_s},
        {"decode_s", t->decode_s}, {"total_s", t->total_s});
    cJSON_AddStringToObject(run->json, "isa", host_isa());
    fprintf(run->text, "%.2f s; ", t->total_s);
    print_policy(run->text, run);
    report_study(run);
}
