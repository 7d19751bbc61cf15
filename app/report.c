/* report.c: prints what the commands have to say: one list of figures for people and for programs.
 *
 * The list is a cJSON object under the paper's names, which --json writes as it is. The text is a
 * form that fill_in fills in from the object, so that no figure is computed or named twice. Figures
 * for people alone (such as a rate beside bytes and seconds) are computed when they are printed.
 * Read next: explain.c. */
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>

#include "app/app.h"
#include "device/device.h"

static const double GIB = 1073741824;

// -------------------------------------------------------------------------------------------------
// The plan
// -------------------------------------------------------------------------------------------------

/* Prints a line for each name with a column for each tier; regions of one name are added up. */
static void print_regions(FILE *out, const Plan *p) {
    const Region *all = &p->region[0][0];
    for (int i = 0; i < NREGIONS * NTIERS; i++) {
        Bytes bytes[NTIERS] = {0};
        bool first = all[i].bytes > 0;
        for (int e = 0; e < NREGIONS * NTIERS && first; e++) {
            if (!all[e].bytes || strcmp(all[e].name, all[i].name) != 0)
                continue;
            first = e >= i;
            bytes[e % NTIERS] += all[e].bytes;
        }
        if (!first)
            continue;
        fprintf(out, "  %-32s", all[i].name);
        for (int t = 0; t < NTIERS; t++)
            bytes[t] ? fprintf(out, " %12.2f", bytes[t] / MEBIBYTE) : fprintf(out, " %12s", "");
        fprintf(out, "\n");
    }
}

void plan_print(FILE *out, const Plan *p, const Bytes capacity[NTIERS], const Bytes *peak) {
    static const char *const what[] = {"weights", "KV cache", "activations"};
    fprintf(out, "%-34s %12s %12s %12s\n", peak ? "plan and peak (MiB)" : "plan (MiB)", "GPU",
            "CPU", "disk");
    if (!peak)
        print_regions(out, p);
    const Bytes *rows[] = {p->total, capacity, peak};
    static const char *const row_name[] = {"planned", "capacity", "measured peak"};
    for (int r = 0; r < 3; r++)
        if (rows[r])
            fprintf(out, "%-34s %12.2f %12.2f %12.2f\n", row_name[r], rows[r][0] / MEBIBYTE,
                    rows[r][1] / MEBIBYTE, rows[r][2] / MEBIBYTE);
    const int batches =
        p->batches - (p->policy.schedule == SCHEDULE_DIAGONAL) * flight_count(&p->policy);
    Bytes kv = 0;
    for (int t = 0; t < NTIERS; t++)
        kv += (Bytes)flight_count(&p->policy) * p->npages[t] * p->policy.page_tokens * p->kv_row *
              2 * p->config.l;
    if (!peak)
        fprintf(out,
                "  %s, %d batch%s in flight, %ld sweep%s; KV cache %.2f MiB, by A.2.1's estimate "
                "%.2f\n",
                schedule_name[p->policy.schedule], batches, batches == 1 ? "" : "es", p->sweeps,
                plural(p->sweeps), kv / MEBIBYTE, p->a21_kv / MEBIBYTE);
    for (int w = 0; w < 3 && !peak; w++)
        fprintf(out, "  %-32s %11.2f%% %11.2f%% %11.2f%%\n", what[w], 100 * p->achieved[w][0],
                100 * p->achieved[w][1], 100 * p->achieved[w][2]);
}

// -------------------------------------------------------------------------------------------------
// Figures and forms
// -------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    double value;
} Figure;

static void add_figures(cJSON *to, const Figure *figures, size_t n) {
    for (size_t f = 0; f < n; f++)
        cJSON_AddNumberToObject(to, figures[f].name, figures[f].value);
}
#define ADD(to, ...)                               \
    add_figures(to, (const Figure[]){__VA_ARGS__}, \
                sizeof((const Figure[]){__VA_ARGS__}) / sizeof(Figure))

/* Returns the figure of that name; "bound.T_gen" is in an object inside. */
static const cJSON *find_figure(const cJSON *figures, const char *name) {
    const char *dot = strchr(name, '.');
    char outer[48];
    if (!dot)
        return json_get(figures, name);
    snprintf(outer, sizeof outer, "%.*s", (int)(dot - name), name);
    return find_figure(json_get(figures, outer), dot + 1);
}

/* Prints a form: a text with holes in braces, each filled with a figure of the object. {%.3f name}
 * prints a number and {%s name} a text, with the format of printf; {%.1f 100*name} prints a number
 * times a constant, and {s name} the plural ending of a noun after that number. With {"wg": 0.25,
 * "n": 2}, the form "wg {%.0f 100*wg}%, {%.0f n} token{s n}" becomes "wg 25%, 2 tokens". */
static void fill_in(FILE *out, const char *form, const cJSON *figures) {
    for (const char *hole; (hole = strchr(form, '{'));) {
        char format[16], what[48];
        int len = 0;
        CHECK(sscanf(hole, "{%15s %47[^}]}%n", format, what, &len) == 2 && len);
        const char *star = strchr(what, '*');
        const cJSON *figure = find_figure(figures, star ? star + 1 : what);
        CHECK(figure);
        fprintf(out, "%.*s", (int)(hole - form), form);
        if (!strcmp(format, "s"))
            fputs(plural(figure->valuedouble), out);
        else if (cJSON_IsString(figure))
            fprintf(out, format, figure->valuestring);
        else
            fprintf(out, format, star ? atof(what) * figure->valuedouble : figure->valuedouble);
        form = hole + len;
    }
    fputs(form, out);
}

int report_open(TaskRun *run, Error *err) {
    const char *path = run->options->json;
    if (path && output_check("--json", path, err))
        return -1;
    run->text = path && !strcmp(path, "-") ? NULL : stdout;
    run->json = cJSON_CreateObject();
    return 0;
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
    if (run->text)
        fflush(run->text); /* an error is found when the stream is closed */
    return path && !output_is_special(path) ? write_json(run, path, err) : 0;
}

int report_close(TaskRun *run, int status, Error *err) {
    const char *path = run->options->json;
    if (path && run->json && !status)
        status = write_json(run, path, err);
    cJSON_Delete(run->json);
    return status;
}

// -------------------------------------------------------------------------------------------------
// Policies and costs
// -------------------------------------------------------------------------------------------------

/* Returns the disk's share; a difference that is only rounding becomes 0. */
static double rest(double gpu, double cpu) { return 1 - gpu - cpu < 1e-9 ? 0 : 1 - gpu - cpu; }

static void add_policy(cJSON *json, const Policy *p) {
    cJSON_AddStringToObject(json, "schedule", schedule_name[p->schedule]);
    cJSON_AddBoolToObject(json, "cpu_cache_compute", p->delegated);
    cJSON_AddBoolToObject(json, "compress_weight", p->weight_packed);
    cJSON_AddBoolToObject(json, "compress_cache", p->cache_packed);
    ADD(json, {"attn_sparsity", is_sparse(p) ? p->sparsity : 1}, {"wg", p->wg}, {"wc", p->wc},
        {"wd", rest(p->wg, p->wc)}, {"cg", p->cg}, {"cc", p->cc}, {"cd", rest(p->cg, p->cc)},
        {"hg", p->hg}, {"hc", p->hc}, {"hd", rest(p->hg, p->hc)}, {"flights", flight_count(p)},
        {"gbs", p->gbs}, {"num_gpu_batches", p->num_gpu_batches}, {"bls", block_size(p)});
}
#define SHARES \
    "{%5.1f 100*wg} {%5.1f 100*wc} {%5.1f 100*cg} {%5.1f 100*cc} {%5.1f 100*hg} {%5.1f 100*hc}"

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
    const Options *o = run->options;
    cJSON_AddStringToObject(run->json, "model", run->checkpoint->config.name);
    cJSON_AddStringToObject(run->json, "hardware", run->hardware->name);
    ADD(run->json, {"s", o->prompt_len[1]}, {"n", o->gen_len[1]});
    if (run->text)
        fill_in(run->text, "{%s model}, s {%.0f s}, n {%.0f n}, on: {%s hardware}\n", run->json);
}

/* Prints a line of the table: the policy, what it promises, what binds it. */
static void print_found(FILE *out, const cJSON *figures, const Found *found) {
    const Policy *p = &found->policy;
    fill_in(out, "{%5.0f gbs} x {%-3.0f num_gpu_batches}{%-8s schedule}", figures);
    fprintf(out, " %-3s %2d %2d ", p->delegated ? "CPU" : "GPU", p->weight_packed ? 4 : 16,
            p->cache_packed ? 4 : 16);
    fill_in(out,
            SHARES
            " {%11.5g throughput} {%10.4g T_pre} {%10.4g T_gen} {%10.4g latency}  {%s bound.T_pre} "
            "{%s bound.T_gen}",
            figures);
    for (int t = 0; t < NTIERS; t++)
        fprintf(out, "%s%s", found->cost.full[t][0] ? ", " : "", found->cost.full[t]);
    fprintf(out, "\n");
}

void report_found(const TaskRun *run, const char *key, const Found *found, int n) {
    add_found(run->json, found);
    cJSON *list = cJSON_AddArrayToObject(run->json, key);
    report_question(run);
    if (run->text)
        fprintf(run->text, "%10s %-8s %-3s %-5s %-36s %11s %10s %10s %10s  %s\n", "block",
                "schedule", "att", "bits", "  wg    wc    cg    cc    hg    hc", "token/s",
                "T_pre (s)", "T_gen (s)", "block (s)", "bound by");
    for (int i = 0; i < n; i++) {
        cJSON *one = cJSON_CreateObject();
        add_found(one, &found[i]);
        cJSON_AddItemToArray(list, one);
        if (run->text)
            print_found(run->text, one, &found[i]);
    }
}

void report_paper(const TaskRun *run, const Cost *cost, const Block *block) {
    const double *capacity = run->hardware->mem;
    for (int f = 0; f < NFRACTIONS; f++)
        cJSON_AddNumberToObject(run->json, fraction_name[f], cost->fraction[f]);
    ADD(run->json, {"gbs", block->gbs}, {"num_gpu_batches", block->num_gpu_batches},
        {"bls", (double)block->gbs * block->num_gpu_batches});
    add_cost(run->json, cost);
    report_question(run);
    if (!run->text)
        return;
    fill_in(run->text,
            "block of {%.0f gbs} x {%.0f num_gpu_batches}, by Appendix A.3\n"
            "  weights      wg {%6.2f 100*wg}%  wc {%6.2f 100*wc}%  wd {%6.2f 100*wd}%\n"
            "  KV cache     cg {%6.2f 100*cg}%  cc {%6.2f 100*cc}%  cd {%6.2f 100*cd}%\n"
            "  activations  hg {%6.2f 100*hg}%  hc {%6.2f 100*hc}%  hd {%6.2f 100*hd}%\n"
            "  T_pre        {%12.6g T_pre} s a layer, bound by {%s bound.T_pre}\n"
            "  T_gen        {%12.6g T_gen} s a layer, bound by {%s bound.T_gen}\n"
            "  T            {%12.6g T} s, throughput {%.6g throughput} token/s\n",
            run->json);
    for (int t = 0; t < NTIERS; t++)
        fprintf(run->text, "  %-12s %12.2f of %.2f GiB%s%s\n", tier_name[t], cost->peak[t] / GIB,
                capacity[t] / GIB, cost->full[t][0] ? ", full: " : "", cost->full[t]);
}

static void add_cluster(cJSON *json, const char *name, const Found *f) {
    cJSON *to = cJSON_AddObjectToObject(json, name);
    const double in_flight = block_size(&f->policy) * flight_count(&f->policy);
    add_policy(to, &f->policy);
    ADD(to, {"prefill_s", f->pace.prefill_s}, {"token_s", f->pace.token_s}, {"T", f->cost.T},
        {"throughput", f->cost.throughput},
        {"decode_throughput", f->pace.token_s > 0 ? in_flight / f->pace.token_s : 0});
}

void report_clusters(const TaskRun *run, const Found *const found[3], int least) {
    static const char *const name[] = {"one", "pipeline", "chain"};
    char title[3][64] = {"1 machine"};
    const int nodes = run->options->nodes;
    snprintf(title[1], sizeof title[1], "%d machine%s, pipeline", nodes, plural(nodes));
    snprintf(title[2], sizeof title[2], "%d machine%s, without offloading", nodes, plural(nodes));
    for (int i = 0; i < 3; i++)
        if (found[i])
            add_cluster(run->json, name[i], found[i]);
    report_question(run);
    if (!run->text)
        return;
    fprintf(run->text, "%-34s %-16s %-37s %9s %11s %11s %11s %11s\n", "", "flights x block",
            "    wg    wc    cg    cc    hg    hc", "prefill (s)", "a token (s)", "block (s)",
            "token/s", "decoding");
    for (int i = 0; i < 3; i++) {
        fprintf(run->text, found[i] ? "%-34s " : "%s: ", title[i]);
        if (found[i])
            fill_in(run->text,
                    "{%3.0f flights} x {%4.0f gbs} x {%-3.0f num_gpu_batches} " SHARES
                    " {%11.4g prefill_s} {%11.4g token_s} {%11.4g T} {%11.4g throughput} {%11.4g "
                    "decode_throughput}\n",
                    cJSON_GetObjectItem(run->json, name[i]));
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
    const double l = run->plan->config.l, prefills = (double)r->prefill_sweeps,
                 others = (double)r->sweeps - prefills;
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
    /* the layers of all flights in a sweep */
    const double rows = run->plan->config.l * flight_count(&found->policy);
    fprintf(stderr, "%-34s %12s %12s\n", "", "predicted", "measured");
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

/* Returns the bytes of the tiers that are this process's memory. */
static Bytes tiers_in_process(const TaskRun *run, const Bytes bytes[NTIERS]) {
    return (run->gpu ? 0 : bytes[TIER_GPU]) + bytes[TIER_CPU];
}

/* Returns the bytes that the GPU's use has grown by besides its tier: kernels that were loaded, and
 * what other programs took meanwhile. */
static double grown_bytes(const TaskRun *run) {
    return (double)run->in_use - (double)run->in_use_before - (double)run->plan->total[TIER_GPU];
}

void print_peaks(const TaskRun *run) {
    const double peak = memory_peak() / MEBIBYTE,
                 tiers = tiers_in_process(run, run->device->peak) / MEBIBYTE;
    plan_print(stderr, run->plan, run->capacity, run->device->peak);
    if (!run->sim)
        fprintf(stderr,
                "process (MiB): planned overhead %.2f, measured peak RSS %.2f, which is %.2f "
                "without the tiers\n",
                run->overhead / MEBIBYTE, peak, peak - tiers);
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
            100 * p->wg, 100 * p->wc, p->weight_packed ? " packed" : "", 100 * p->cg, 100 * p->cc,
            p->cache_packed ? " packed" : "", 100 * p->hg, 100 * p->hc, p->gbs, p->num_gpu_batches,
            schedule_name[p->schedule], run->gpu ? run->gpu->name : "", run->gpu ? ", " : "",
            run->threads, plural(run->threads), host_isa());
}

void print_summary(const TaskRun *run, int prompts, long tokens) {
    const RunStats *r = &run->stats;
    fprintf(stderr,
            "%d prompt%s, %ld token%s%s in %.2f s (prefill %.2f, decode %.2f): %.1f tokens/s "
            "generated; ",
            prompts, plural(prompts), tokens, plural(tokens),
            completions_head(run->completions) ? ", the rest of them" : "", r->total_s,
            r->prefill_s, r->decode_s, measured(run).throughput);
    print_policy(stderr, run);
}

// -------------------------------------------------------------------------------------------------
// flexgen bench and eval
// -------------------------------------------------------------------------------------------------

static void report_times(const TaskRun *run) {
    const RunStats *t = &run->stats;
    const Options *o = run->options;
    const Cost was = measured(run);
    ADD(run->json, {"sweeps", (double)t->sweeps}, {"s", o->prompt_len[1]}, {"n", o->gen_len[1]},
        {"T", was.T}, {"T_pre", was.T_pre}, {"T_gen", was.T_gen}, {"throughput", was.throughput},
        {"prefill_s", t->prefill_s}, {"decode_s", t->decode_s}, {"total_s", t->total_s},
        {"generation_throughput", was.throughput},
        {"decode_throughput", t->decode_s > 0 ? t->decoded / t->decode_s : 0});
    if (run->text)
        fill_in(run->text,
                "prefill {%.3f prefill_s} s, decode {%.3f decode_s} s, total {%.3f total_s} s\n"
                "generation throughput {%.2f generation_throughput} token/s, "
                "decode throughput {%.2f decode_throughput} token/s\n",
                run->json);
}

static void report_tiers(const TaskRun *run) {
    cJSON *tiers = cJSON_AddObjectToObject(run->json, "tiers");
    for (int t = 0; t < NTIERS; t++) {
        cJSON *tier = cJSON_AddObjectToObject(tiers, tier_name[t]);
        ADD(tier, {"planned_bytes", (double)run->plan->total[t]},
            {"peak_bytes", (double)run->device->peak[t]});
        if (run->gpu && t == TIER_GPU)
            ADD(tier, {"in_use_bytes", (double)run->in_use}, {"grown_bytes", grown_bytes(run)},
                {"spare_bytes", (double)run->gpu->spare});
    }
}

/* Returns true if the channel's lanes have no times. On a GPU these lanes are streams; their marks
 * have times only in a trace, or if sweeps mix prompts with new tokens. */
static bool is_untimed(const TaskRun *run, Channel c) {
    return run->gpu && !run->device->trace && run->plan->policy.schedule != SCHEDULE_DIAGONAL &&
           (c == GPU || c == CTOG || c == GTOC);
}

/* Reports what each lane moved and how long it worked, and in the object also the sums by channel.
 * A GPU's lanes do not know how long, unless their marks have times. */
static void report_lanes(const TaskRun *run, cJSON *to, const Device *device) {
    cJSON *channels = cJSON_AddObjectToObject(to, "channels"),
          *lanes = cJSON_AddObjectToObject(to, "lanes");
    double moved[NCHANNELS] = {0}, busy[NCHANNELS] = {0};
    for (int l = 0; l < NLANES; l++) {
        const LaneCount *count = &device->count[l];
        const Channel channel = lane_channel[l];
        cJSON *lane = cJSON_AddObjectToObject(lanes, lane_name[l]);
        double bytes = 0;
        for (int kind = 0; kind < NKINDS; kind++)
            bytes += (double)count->moved[kind];
        const bool known = !is_untimed(run, channel);
        ADD(lane, {"moved_bytes", bytes});
        if (known)
            ADD(lane, {"busy_s", count->busy_s});
        if (count->read[0])
            ADD(lane, {"k_bytes", (double)count->read[0]}, {"v_bytes", (double)count->read[1]});
        moved[channel] += bytes;
        busy[channel] += count->busy_s;
        if (!run->text || (channel == NET && !device->net))
            continue;
        fprintf(run->text, "  %-16s %-5s ", lane_name[l], channel_name[channel]);
        fprintf(run->text, known ? "busy %8.3f s" : "busy        ? s", count->busy_s);
        if (bytes > 0)
            fprintf(run->text, "  moved %10.2f MB", bytes / 1e6);
        if (bytes > 0 && known)
            fprintf(run->text, "  %6.2f GB/s", bytes / 1e9 / (count->busy_s + 1e-12));
        fprintf(run->text, "\n");
    }
    for (int c = 0; c < NCHANNELS; c++) {
        cJSON *sum = cJSON_AddObjectToObject(channels, channel_name[c]);
        ADD(sum, {"moved_bytes", moved[c]});
        if (!is_untimed(run, c))
            ADD(sum, {"busy_s", busy[c]});
    }
}

/* Reports one phase of Table 4. */
static void report_phase(const TaskRun *run, cJSON *breakdown, const char *name, double total_s,
                         const Share part[NPARTS]) {
    cJSON *phase = cJSON_AddObjectToObject(breakdown, name);
    ADD(phase, {"total_s", total_s});
    if (run->text)
        fprintf(run->text, "\n  %-22s %10.3f", name, total_s);
    for (int p = 0; p < NPARTS; p++) {
        const double busy = part[p].busy_s, hidden = part[p].hidden_s;
        ADD(cJSON_AddObjectToObject(phase, part_name[p]), {"busy_s", busy}, {"hidden_s", hidden});
        if (run->text)
            fprintf(run->text, "  %10.3f (%5.1f%%)", busy, busy > 0 ? 100 * hidden / busy : 0);
    }
}

/* Reports Table 4. */
static void report_breakdown(const TaskRun *run, const Trace *trace) {
    const Breakdown b = trace_breakdown(trace);
    cJSON *to = cJSON_AddObjectToObject(run->json, "breakdown");
    if (run->text)
        fprintf(run->text, "%-24s %10s", "breakdown (s, hidden)", "total");
    for (int part = 0; run->text && part < NPARTS; part++)
        fprintf(run->text, "  %19s", part_name[part]);
    report_phase(run, to, "prefill", b.total_s[1], b.part[1]);
    report_phase(run, to, "decode", b.total_s[0], b.part[0]);
    if (run->text)
        fprintf(run->text, "\n");
}

/* Reports the machines of a simulated pipeline. The GPU's two lanes take turns; the rest of its
 * time is the bubble. */
static void report_stages(const TaskRun *run, const Stages *all) {
    const double T = run->stats.total_s;
    cJSON *list = cJSON_AddArrayToObject(run->json, "stages");
    for (int s = 0; s < all->n; s++) {
        const Stage *stage = &all->stage[s];
        const LaneCount *count = stage->device->count;
        const Bytes *total = stage->plan->total;
        int most = 0;
        for (int l = 0; l < NLANES; l++)
            if (count[l].busy_s > count[most].busy_s)
                most = l;
        cJSON *one = cJSON_CreateObject();
        cJSON_AddItemToArray(list, one);
        ADD(one, {"first_layer", stage->first}, {"layers", stage->part.config.l});
        ADD(cJSON_AddObjectToObject(one, "planned_bytes"), {"GPU", (double)total[TIER_GPU]},
            {"CPU", (double)total[TIER_CPU]}, {"disk", (double)total[TIER_DISK]});
        cJSON_AddStringToObject(one, "busiest", lane_name[most]);
        ADD(one, {"busy_share", count[most].busy_s / T},
            {"gpu_waits", 1 - (count[PROJECT].busy_s + count[FINISH].busy_s) / T});
        if (!run->text)
            continue;
        fprintf(run->text,
                "stage %d: layers %d to %d; planned (MiB) GPU %.2f, CPU %.2f, disk %.2f; ", s,
                stage->first, stage->first + stage->part.config.l - 1, total[0] / MEBIBYTE,
                total[1] / MEBIBYTE, total[2] / MEBIBYTE);
        fill_in(run->text,
                "{%s busiest} busy {%.1f 100*busy_share}%, GPU waits {%.1f 100*gpu_waits}%\n", one);
    }
}

/* Reports the share of the time in which each stage of a pipeline waits for others: the bubble. */
static void report_waiting(const TaskRun *run, int stages) {
    cJSON *list = cJSON_AddArrayToObject(run->json, "waiting");
    for (int s = 0; s < stages; s++) {
        const double share = 1 - trace_breakdown(&run->traces[s]).busy_s / run->stats.total_s;
        cJSON_AddItemToArray(list, cJSON_CreateNumber(share));
        if (run->text)
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
    char digest[24];
    snprintf(digest, sizeof digest, "%016" PRIx64, run->digest);
    if (!run->sim)
        cJSON_AddStringToObject(run->json, "digest", digest);
    if (!run->sim)
        ADD(run->json, {"overhead_bytes", (double)run->overhead},
            {"peak_rss_bytes", (double)memory_peak()});
    report_lanes(run, run->json, run->device);
    if (run->device->trace)
        report_breakdown(run, run->device->trace);
    if (run->stages.n)
        report_stages(run, &run->stages);
    if (run->stages.n || run->net)
        report_waiting(run, run->net ? run->net->stages : run->stages.n);
    if (run->predicted)
        add_cost(cJSON_AddObjectToObject(run->json, "predicted"), &run->found.cost);
}

void report_traced(const TaskRun *run) {
    cJSON *traced = cJSON_AddObjectToObject(run->json, "traced");
    ADD(traced, {"total_s", run->stats.total_s});
    if (run->text)
        fill_in(run->text, "once more, traced: total {%.3f total_s} s\n", traced);
    report_lanes(run, traced, run->device);
    report_breakdown(run, run->device->trace);
}

/* Reports that numbers were only rounded for a study: in memory and in traffic they were as large
 * as F16. */
static void report_study(const TaskRun *run) {
    const Policy *p = &run->plan->policy;
    const Quant study = p->weight_study.bits ? p->weight_study : p->cache_study;
    if (!study.bits)
        return;
    cJSON *json = cJSON_AddObjectToObject(run->json, "study");
    cJSON_AddBoolToObject(json, "weights", p->weight_study.bits);
    cJSON_AddBoolToObject(json, "cache", p->cache_study.bits);
    ADD(json, {"bits", study.bits}, {"group", study.group});
    if (run->text)
        fprintf(run->text,
                "a study: %s%s%s rounded to %d bits in groups of %d, in memory and on the way as "
                "large as F16\n",
                p->weight_study.bits ? "weights" : "",
                p->weight_study.bits && p->cache_study.bits ? " and " : "",
                p->cache_study.bits ? "cache" : "", study.bits, study.group);
}

void report_eval(const TaskRun *run, const Eval *eval) {
    const EvalResult e = eval_result(eval);
    const RunStats *t = &run->stats;
    const char *form =
        "last word: accuracy {%.4f last_word_accuracy}, perplexity {%.4f perplexity}: {%.0f lines} "
        "line{s lines}\n";
    if (run->options->perplexity) {
        form =
            "perplexity {%.4f perplexity}, {%.4f bits_per_byte} bits per byte: {%.0f tokens} "
            "token{s tokens} in "
            "{%.0f windows} window{s windows} of {%.0f window}, {%.0f unscored} left unscored\n";
        ADD(run->json, {"perplexity", e.perplexity}, {"nll", e.nll},
            {"bits_per_byte", e.bits_per_byte}, {"tokens", (double)eval->tokens},
            {"unscored", (double)eval->unscored}, {"windows", eval->task.count},
            {"window", eval->window});
    } else
        ADD(run->json, {"last_word_accuracy", e.accuracy}, {"perplexity", e.word_perplexity},
            {"lines", eval->task.count});
    add_setting(run);
    ADD(run->json, {"sweeps", (double)t->sweeps}, {"T", t->total_s}, {"prefill_s", t->prefill_s},
        {"decode_s", t->decode_s}, {"total_s", t->total_s});
    cJSON_AddStringToObject(run->json, "isa", host_isa());
    if (run->text) {
        fill_in(run->text, form, run->json);
        fill_in(run->text, "{%.2f total_s} s; ", run->json);
        print_policy(run->text, run);
    }
    report_study(run);
}
