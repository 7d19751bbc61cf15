/* flexgen.c: main, as a table of contents: the commands and their flags.
 *
 *   generate   prompts in, completions out
 *   bench      a named model with random weights, prompts of one length, measured throughput
 * Exit status: 0 done, 1 failed, 2 wrong use or does not fit. Results go to standard output, everything else to standard error.
 * Read next: schedule.c for the paper's Figure 4. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "flexgen.h"

// ---------------------------------------------------------------------------------------------------------------
// Flags
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *model, *prompts, *output, *json, *offload_dir, *device;
    char **prompt, **stop;          /* repeated flags */
    int nprompts, nstops;
    int max_tokens, prompt_len, gen_len, threads;
    Policy policy;
    bool fixed[6], fixed_gbs, fixed_batches; /* policy numbers given by the user */
    Sampling sampling;
    size_t capacity[NTIERS];        /* 0: from the machine */
} Options;

static int parse_long(long *value, const char *flag, const char *text, long low, long high, Error *err) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    if (errno || end == text || *end || *value < low || *value > high)
        return fail(err, EXIT_USAGE, "%s %s: expected a whole number from %ld to %ld", flag, text, low, high);
    return 0;
}

static int parse_int(int *value, const char *flag, const char *text, int low, int high, Error *err) {
    long v;
    if (parse_long(&v, flag, text, low, high, err)) return -1;
    *value = (int)v;
    return 0;
}

static int parse_double(double *value, const char *flag, const char *text, double low, double high, Error *err) {
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (errno || end == text || *end || !(*value >= low && *value <= high))
        return fail(err, EXIT_USAGE, "%s %s: expected a number from %g to %g", flag, text, low, high);
    return 0;
}

/* "16G", "512M", "1.5G", "4096": powers of 1024. */
static int parse_size(size_t *bytes, const char *flag, const char *text, Error *err) {
    char *end;
    double v = strtod(text, &end), unit = 1;
    static const char units[] = "KMGT";
    const char *u = *end ? strchr(units, *end >= 'a' ? *end - 32 : *end) : NULL;
    if (u)
        for (long e = u - units + 1; e > 0; e--) unit *= 1024;
    if (end == text || (*end && (!u || end[1])) || !(v >= 0) || !(v * unit < 1e18))
        return fail(err, EXIT_USAGE, "%s %s: expected a size such as 16G, 512M or 4096", flag, text);
    *bytes = (size_t)(v * unit);
    return 0;
}

/* --percent WG WC CG CC HG HC. */
static int parse_percent(Options *o, char **args, Error *err) {
    double *share[6] = {&o->policy.wg, &o->policy.wc, &o->policy.cg, &o->policy.cc, &o->policy.hg, &o->policy.hc};
    for (int i = 0; i < 6; i++) {
        if (parse_double(share[i], "--percent", args[i], 0, 100, err)) return -1;
        *share[i] /= 100;
        o->fixed[i] = true;
    }
    static const char *const what[] = {"weights", "KV cache", "activations"};
    for (int i = 0; i < 6; i += 2)
        if (*share[i] + *share[i + 1] > 1 + 1e-9)
            return fail(err, EXIT_USAGE, "--percent: %s on GPU and CPU add up to %g%%; at most 100%%", what[i / 2], 100 * (*share[i] + *share[i + 1]));
    return 0;
}

static int parse_schedule(Options *o, const char *text, Error *err) {
    if (!strcmp(text, "zigzag")) o->policy.schedule = SCHEDULE_ZIGZAG;
    else if (!strcmp(text, "row")) o->policy.schedule = SCHEDULE_ROW;
    else return fail(err, EXIT_USAGE, "--schedule %s: expected zigzag or row", text);
    return 0;
}

static void add_text(char ***list, int *n, char *text) {
    *list = xrealloc(*list, *n + 1, sizeof **list);
    (*list)[(*n)++] = text;
}

/* Every flag: its name, how many values it takes, what they are. The order is that of the help text. */
typedef struct {
    const char *name;
    int values;
    const char *commands, *help; /* "g": generate, "b": bench */
} Flag;

static const Flag flags[] = {
    {"--model", 1, "gb", "DIR: a Hugging Face directory; bench also takes a name, opt-125m to opt-175b, with random weights"},
    {"--prompt", 1, "g", "TEXT: a prompt; may be repeated"},
    {"--prompts", 1, "g", "FILE: JSON lines {\"id\", \"prompt\", \"max_tokens\"} or plain lines; - is standard input"},
    {"--output", 1, "g", "FILE: completions as JSON lines, instead of standard output"},
    {"--max-tokens", 1, "g", "N: tokens to generate where the prompt does not say (64)"},
    {"--prompt-len", 1, "b", "S: tokens of every prompt (512)"},
    {"--gen-len", 1, "b", "N: tokens to generate (32)"},
    {"--json", 1, "b", "FILE: the figures as one JSON object; - is standard output"},
    {"--percent", 6, "gb", "WG WC CG CC HG HC: weights, KV cache, activations on GPU and on CPU; the disk has the rest"},
    {"--gpu-batch-size", 1, "gb", "N: sequences of a GPU batch"},
    {"--num-gpu-batches", 1, "gb", "N: GPU batches of a block"},
    {"--schedule", 1, "gb", "zigzag (Figure 3b, the default) or row (Figure 3a)"},
    {"--cpu-cache-compute", 0, "gb", "the CPU attends to the KV cache on CPU and disk, in place"},
    {"--no-overlap", 0, "gb", "wait for every operation at once"},
    {"--page-tokens", 1, "gb", "N: tokens of a KV page (16)"},
    {"--device", 1, "gb", "host"},
    {"--gpu-mem", 1, "gb", "SIZE: capacity of the GPU tier, such as 16G"},
    {"--cpu-mem", 1, "gb", "SIZE: of the CPU tier"},
    {"--disk-mem", 1, "gb", "SIZE: of the disk tier"},
    {"--offload-dir", 1, "gb", "DIR: where the disk tier's file is (TMPDIR, or /var/tmp)"},
    {"--threads", 1, "gb", "N: threads that compute (all cores)"},
    {"--temperature", 1, "g", "T: 0 is greedy (the default)"},
    {"--top-p", 1, "g", "P: sample from the likeliest tokens with together this mass (1)"},
    {"--top-k", 1, "g", "K: sample from the K likeliest tokens (0: all)"},
    {"--seed", 1, "gb", "N: of sampling, and of bench's weights (0)"},
    {"--stop", 1, "g", "TEXT: end a completion before it; may be repeated"},
};
enum { NFLAGS = sizeof flags / sizeof flags[0] };

static int set_flag(Options *o, const char *name, char **v, Error *err) {
    long seed;
    double number;
    if (!strcmp(name, "--model")) o->model = v[0];
    else if (!strcmp(name, "--prompt")) add_text(&o->prompt, &o->nprompts, v[0]);
    else if (!strcmp(name, "--prompts")) o->prompts = v[0];
    else if (!strcmp(name, "--output")) o->output = v[0];
    else if (!strcmp(name, "--json")) o->json = v[0];
    else if (!strcmp(name, "--offload-dir")) o->offload_dir = v[0];
    else if (!strcmp(name, "--device")) o->device = v[0];
    else if (!strcmp(name, "--cpu-cache-compute")) o->policy.cpu_attention = true;
    else if (!strcmp(name, "--no-overlap")) o->policy.overlap = false;
    else if (!strcmp(name, "--stop") && !v[0][0]) return fail(err, EXIT_USAGE, "--stop: an empty text would end everything; give one");
    else if (!strcmp(name, "--stop")) add_text(&o->stop, &o->nstops, v[0]);
    else if (!strcmp(name, "--percent")) return parse_percent(o, v, err);
    else if (!strcmp(name, "--schedule")) return parse_schedule(o, v[0], err);
    else if (!strcmp(name, "--max-tokens")) return parse_int(&o->max_tokens, name, v[0], 1, 1 << 24, err);
    else if (!strcmp(name, "--prompt-len")) return parse_int(&o->prompt_len, name, v[0], 1, 1 << 24, err);
    else if (!strcmp(name, "--gen-len")) return parse_int(&o->gen_len, name, v[0], 1, 1 << 24, err);
    else if (!strcmp(name, "--page-tokens")) return parse_int(&o->policy.page_tokens, name, v[0], 1, 4096, err);
    else if (!strcmp(name, "--threads")) return parse_int(&o->threads, name, v[0], 1, 1024, err);
    else if (!strcmp(name, "--top-k")) return parse_int(&o->sampling.top_k, name, v[0], 0, 1 << 24, err);
    else if (!strcmp(name, "--gpu-mem")) return parse_size(&o->capacity[TIER_GPU], name, v[0], err);
    else if (!strcmp(name, "--cpu-mem")) return parse_size(&o->capacity[TIER_CPU], name, v[0], err);
    else if (!strcmp(name, "--disk-mem")) return parse_size(&o->capacity[TIER_DISK], name, v[0], err);
    else if (!strcmp(name, "--gpu-batch-size")) o->fixed_gbs = true;
    else if (!strcmp(name, "--num-gpu-batches")) o->fixed_batches = true;
    if (!strcmp(name, "--gpu-batch-size")) return parse_int(&o->policy.gbs, name, v[0], 1, 1 << 20, err);
    if (!strcmp(name, "--num-gpu-batches")) return parse_int(&o->policy.num_gpu_batches, name, v[0], 1, 1 << 16, err);
    if (!strcmp(name, "--seed")) {
        if (parse_long(&seed, name, v[0], 0, (long)1 << 62, err)) return -1;
        o->sampling.seed = (uint64_t)seed;
    } else if (!strcmp(name, "--temperature") || !strcmp(name, "--top-p")) {
        bool t = !strcmp(name, "--temperature");
        if (parse_double(&number, name, v[0], t ? 0 : 1e-6, t ? 1e6 : 1, err)) return -1;
        *(t ? &o->sampling.temperature : &o->sampling.top_p) = (float)number;
    }
    return 0;
}

/* Levenshtein, for "did you mean". */
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(b), row[128];
    if (n > 100) return 100;
    for (int c = 0; c <= n; c++) row[c] = c;
    for (int r = 0; a[r]; r++) {
        int diagonal = row[0];
        row[0] = r + 1;
        for (int c = 0; c < n; c++) {
            int swap = diagonal + (a[r] != b[c]), best = row[c] < row[c + 1] ? row[c] + 1 : row[c + 1] + 1;
            diagonal = row[c + 1];
            row[c + 1] = swap < best ? swap : best;
        }
    }
    return row[n];
}

static int unknown_flag(const char *name, char command, Error *err) {
    const char *nearest = NULL;
    int least = 1000;
    for (int f = 0; f < NFLAGS; f++) {
        int distance = edit_distance(name, flags[f].name);
        if (strchr(flags[f].commands, command) && distance < least) least = distance, nearest = flags[f].name;
    }
    return fail(err, EXIT_USAGE, "unknown flag %.60s; the nearest known one is %s", name, nearest);
}

static int parse_flags(Options *o, char command, char **args, int n, Error *err) {
    for (int a = 0; a < n; a++) {
        int f = 0;
        while (f < NFLAGS && (strcmp(args[a], flags[f].name) != 0 || !strchr(flags[f].commands, command))) f++;
        if (f == NFLAGS) return unknown_flag(args[a], command, err);
        if (n - a - 1 < flags[f].values) return fail(err, EXIT_USAGE, "%s takes %d value%s", args[a], flags[f].values, flags[f].values > 1 ? "s" : "");
        if (set_flag(o, args[a], args + a + 1, err)) return -1;
        a += flags[f].values;
    }
    if (!o->model) return fail(err, EXIT_USAGE, "--model is missing; name a checkpoint directory%s", command == 'b' ? " or a size such as opt-125m" : "");
    if (strcmp(o->device, "host") != 0) return fail(err, EXIT_USAGE, "--device %s: this build has the device host only", o->device);
    return 0;
}

static int usage(FILE *out) {
    fprintf(out, "FlexGen: generates text from OPT models that do not fit the GPU.\n\n"
                 "  flexgen generate --model DIR (--prompt TEXT | --prompts FILE|-)   completions as JSON lines\n"
                 "  flexgen bench    --model NAME|DIR                                 measured throughput\n\n");
    for (int f = 0; f < NFLAGS; f++)
        fprintf(out, "  %-20s%s %s\n", flags[f].name, !strcmp(flags[f].commands, "gb") ? "  " : flags[f].commands[0] == 'g' ? "g " : "b ", flags[f].help);
    return EXIT_USAGE;
}

// ---------------------------------------------------------------------------------------------------------------
// The machine
// ---------------------------------------------------------------------------------------------------------------

static size_t file_number(const char *path, const char *prefix, size_t unit) {
    char line[256];
    size_t value = SIZE_MAX;
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, prefix, strlen(prefix)) && sscanf(line + strlen(prefix), "%zu", &value) == 1) {
            value *= unit;
            break;
        }
    if (f) fclose(f);
    return value;
}

/* Memory that can be had, by the kernel and by the control group, whichever is less. */
static size_t memory_available(void) {
    size_t free_memory = file_number("/proc/meminfo", "MemAvailable:", 1024);
    size_t limit = file_number("/sys/fs/cgroup/memory.max", "", 1), used = file_number("/sys/fs/cgroup/memory.current", "", 1);
    if (limit != SIZE_MAX && used != SIZE_MAX && limit - (used < limit ? used : limit) < free_memory) free_memory = limit - used;
    return free_memory;
}

/* Capacities that were not given: on the host device both upper tiers are this memory. Room is left for the rest of the machine. */
static int fill_capacities(Options *o, const Checkpoint *checkpoint, Error *err) {
    size_t memory = memory_available();
    struct statvfs disk;
    if (!o->capacity[TIER_GPU]) o->capacity[TIER_GPU] = memory / 100 * 45;
    if (!o->capacity[TIER_CPU]) o->capacity[TIER_CPU] = memory / 100 * 40;
    if (o->capacity[TIER_DISK]) return 0;
    if (statvfs(o->offload_dir, &disk))
        return fail(err, EXIT_USAGE, "--offload-dir %s: %s; name a directory", o->offload_dir, strerror(errno));
    o->capacity[TIER_DISK] = (size_t)disk.f_bavail * disk.f_frsize / 100 * 90;
    for (int f = 0; f < checkpoint->nfiles; f++) o->capacity[TIER_DISK] += checkpoint->files[f].size; /* it is there already */
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Running a task under a policy
// ---------------------------------------------------------------------------------------------------------------

/* Plans, loads and runs. The device stays open for its counters; close it and free the plan also after a failure. */
static int run_task(Options *o, Checkpoint *checkpoint, const Task *task, const Listener *listener, Plan **plan, Device **device,
                    RunStats *stats, bool verbose, Error *err) {
    if (fill_capacities(o, checkpoint, err)) return -1;
    o->threads = host_set_threads(o->threads);
    if (policy_default(&o->policy, o->fixed, o->fixed_gbs, o->fixed_batches, checkpoint, task, F32, o->capacity, err)) return -1;
    *plan = plan_make(checkpoint, &o->policy, task, F32, err);
    if (!*plan || plan_fits(*plan, o->capacity, err)) return -1;
    if (verbose) plan_print(stderr, *plan, o->capacity, NULL);
    *device = host_open(*plan, checkpoint, o->offload_dir, err);
    if (!*device || weights_load(*plan, checkpoint, *device, err)) return -1;
    return schedule_run(*plan, task, *device, listener, stats, err);
}

static void print_summary(const Options *o, const RunStats *stats, int prompts) {
    const Policy *p = &o->policy;
    fprintf(stderr, "%d prompts, %ld tokens in %.2f s (prefill %.2f, decode %.2f): %.1f tokens/s generated; "
                    "weights %g/%g, cache %g/%g, activations %g/%g%% on GPU/CPU, %d x %d, %s, %d threads, %s\n",
            prompts, stats->generated, stats->total_s, stats->prefill_s, stats->decode_s,
            stats->total_s > 0 ? stats->generated / stats->total_s : 0, 100 * p->wg, 100 * p->wc, 100 * p->cg, 100 * p->cc, 100 * p->hg,
            100 * p->hc, p->gbs, p->num_gpu_batches, p->schedule == SCHEDULE_ROW ? "row" : "zigzag", o->threads, host_isa());
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen generate
// ---------------------------------------------------------------------------------------------------------------

static int read_job(Job *job, const Options *o, const Tokenizer *tokenizer, const OptConfig *config, Error *err) {
    if (!o->nprompts == !o->prompts) return fail(err, EXIT_USAGE, "give either --prompt TEXT or --prompts FILE");
    if (o->prompts) return job_read(job, o->prompts, o->max_tokens, tokenizer, config, err);
    for (int i = 0; i < o->nprompts; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i);
        if (job_add(job, o->prompt[i], strlen(o->prompt[i]), id, o->max_tokens, tokenizer, config, "--prompt", err)) return -1;
    }
    return 0;
}

static int generate_with(Options *o, Checkpoint *checkpoint, const Tokenizer *tokenizer, Error *err) {
    Job job = {0};
    Plan *plan = NULL;
    Device *device = NULL;
    RunStats stats;
    Completions c = {.job = &job, .tokenizer = tokenizer, .out = stdout, .out_name = "standard output", .stop = o->stop, .nstops = o->nstops,
                     .progress = isatty(STDERR_FILENO)};
    job.task.sampling = o->sampling;
    int status = read_job(&job, o, tokenizer, &checkpoint->config, err);
    if (!status && o->output) {
        c.out_name = o->output;
        c.out = fopen(o->output, "w");
        if (!c.out) status = fail(err, EXIT_FAILED, "--output %s: %s", o->output, strerror(errno));
    }
    if (!status && job.task.count) {
        Listener listener = completions_listener(&c);
        status = run_task(o, checkpoint, &job.task, &listener, &plan, &device, &stats, false, err);
        if (c.progress) fprintf(stderr, "\r\033[K");
        if (!status) print_summary(o, &stats, job.task.count);
    }
    if (device) device->close(device);
    plan_free(plan);
    if (c.out && c.out != stdout && fclose(c.out) && !status) status = fail(err, EXIT_FAILED, "--output %s: %s", o->output, strerror(errno));
    job_free(&job);
    return status;
}

static int generate(Options *o, Error *err) {
    Checkpoint *checkpoint = checkpoint_open(o->model, err);
    if (!checkpoint) return -1;
    Tokenizer *tokenizer = tokenizer_open(o->model, checkpoint->config.vocab, err);
    int status = tokenizer ? generate_with(o, checkpoint, tokenizer, err) : -1;
    tokenizer_close(tokenizer);
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen bench
// ---------------------------------------------------------------------------------------------------------------

/* One block of random prompts of one length. */
static void bench_task(Task *task, const Options *o, const OptConfig *config, int count) {
    uint64_t x = 88172645463325252ull;
    *task = (Task){.count = count, .prompts = xcalloc(count, sizeof *task->prompts), .sampling = o->sampling};
    for (int i = 0; i < count; i++) {
        Prompt *p = &task->prompts[i];
        *p = (Prompt){.ids = xcalloc(o->prompt_len, sizeof *p->ids), .s = o->prompt_len, .n = o->gen_len};
        for (int t = 0; t < p->s; t++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            p->ids[t] = t ? (int32_t)(x % (uint64_t)config->vocab) : 2;
        }
    }
}

static int ignore_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    (void)ctx, (void)prompt, (void)tokens, (void)n, (void)reason, (void)err;
    return 0;
}

static cJSON *add_numbers(cJSON *to, const char *const *names, const double *values, int n) {
    for (int i = 0; i < n; i++) cJSON_AddNumberToObject(to, names[i], values[i]);
    return to;
}

static cJSON *bench_json(const Options *o, const Plan *plan, const Device *device, const RunStats *r) {
    const Policy *p = &o->policy;
    double n = o->gen_len, steps = n > 1 ? (n - 1) * plan->config.l : 1, throughput = r->generated / r->total_s;
    const char *const names[] = {"wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd", "gbs", "num_gpu_batches", "bls", "s", "n", "T",
                                 "T_pre", "T_gen", "throughput", "prefill_s", "decode_s", "total_s", "generation_throughput", "decode_throughput"};
    const double values[] = {p->wg, p->wc, 1 - p->wg - p->wc, p->cg, p->cc, 1 - p->cg - p->cc, p->hg, p->hc, 1 - p->hg - p->hc, p->gbs,
                             p->num_gpu_batches, block_size(p), o->prompt_len, n, r->total_s, r->prefill_s / plan->config.l,
                             r->decode_s / steps, throughput, r->prefill_s, r->decode_s, r->total_s, throughput,
                             r->decode_s > 0 ? r->decoded / r->decode_s : 0};
    cJSON *out = cJSON_CreateObject();
    cJSON_AddStringToObject(out, "model", o->model);
    cJSON_AddStringToObject(out, "device", device->name);
    cJSON_AddStringToObject(out, "schedule", p->schedule == SCHEDULE_ROW ? "row" : "zigzag");
    add_numbers(out, names, values, sizeof values / sizeof *values);
    cJSON *tiers = cJSON_AddObjectToObject(out, "tiers"), *channels = cJSON_AddObjectToObject(out, "channels");
    for (int t = 0; t < NTIERS; t++)
        add_numbers(cJSON_AddObjectToObject(tiers, tier_name[t]), (const char *const[]){"planned_bytes", "peak_bytes"},
                    (double[]){(double)plan->total[t], (double)device->peak[t]}, 2);
    for (int ch = 0; ch < NCHANNELS; ch++) {
        double moved = 0, busy = 0;
        for (int lane = 0; lane < NLANES; lane++) {
            if ((int)lane_channel[lane] != ch) continue;
            busy += device->count[lane].busy_s;
            for (int kind = 0; kind < NKINDS; kind++) moved += (double)device->count[lane].moved[kind];
        }
        add_numbers(cJSON_AddObjectToObject(channels, channel_name[ch]), (const char *const[]){"moved_bytes", "busy_s"}, (double[]){moved, busy}, 2);
    }
    return out;
}

static int bench_report(const Options *o, const Plan *plan, const Device *device, const RunStats *r, Error *err) {
    cJSON *json = bench_json(o, plan, device, r);
    char *text = cJSON_Print(json);
    bool to_stdout = o->json && !strcmp(o->json, "-");
    FILE *f = !o->json || to_stdout ? NULL : fopen(o->json, "w");
    int status = 0;
    if (o->json && !to_stdout) {
        bool bad = !f || fprintf(f, "%s\n", text) < 0;
        if (f && fclose(f)) bad = true;
        if (bad) status = fail(err, EXIT_FAILED, "--json %s: %s", o->json, strerror(errno));
    } else if (to_stdout) {
        printf("%s\n", text);
    } else {
        printf("prefill %.3f s, decode %.3f s, total %.3f s\n", r->prefill_s, r->decode_s, r->total_s);
        printf("generation throughput %.2f token/s, decode throughput %.2f token/s\n", r->generated / r->total_s,
               r->decode_s > 0 ? r->decoded / r->decode_s : 0);
        for (int lane = 0; lane < NLANES; lane++) {
            const LaneCount *c = &device->count[lane];
            size_t moved = 0;
            for (int kind = 0; kind < NKINDS; kind++) moved += c->moved[kind];
            printf("  %-16s %-5s busy %8.3f s", lane_name[lane], channel_name[lane_channel[lane]], c->busy_s);
            if (moved) printf("  moved %10.2f MB  %6.2f GB/s", moved / 1e6, moved / 1e9 / (c->busy_s + 1e-12));
            printf("\n");
        }
    }
    free(text);
    cJSON_Delete(json);
    return status;
}

static int bench_with(Options *o, Checkpoint *checkpoint, Error *err) {
    Plan *plan = NULL;
    Device *device = NULL;
    RunStats stats;
    Task task;
    Listener listener = {.done = ignore_done};
    if (!o->fixed_gbs) o->policy.gbs = 4, o->fixed_gbs = true;
    if (!o->fixed_batches) o->policy.num_gpu_batches = 1, o->fixed_batches = true;
    if (o->prompt_len > checkpoint->config.max_pos || o->gen_len > checkpoint->config.max_pos - o->prompt_len + 1)
        return fail(err, EXIT_USAGE, "--prompt-len %d --gen-len %d: the model has %d positions", o->prompt_len, o->gen_len, checkpoint->config.max_pos);
    checkpoint->config.eos = -1; /* every sequence runs to its full length */
    bench_task(&task, o, &checkpoint->config, o->policy.gbs * o->policy.num_gpu_batches);
    int status = run_task(o, checkpoint, &task, &listener, &plan, &device, &stats, true, err);
    if (!status) {
        plan_print(stderr, plan, o->capacity, device->peak);
        status = bench_report(o, plan, device, &stats, err);
    }
    if (device) device->close(device);
    plan_free(plan);
    for (int i = 0; i < task.count; i++) free(task.prompts[i].ids);
    free(task.prompts);
    return status;
}

static int bench(Options *o, Error *err) {
    OptConfig config;
    bool named = opt_config_by_name(&config, o->model) == 0;
    struct stat st;
    if (!named && stat(o->model, &st)) return fail(err, EXIT_USAGE, "--model %s: neither a directory nor one of %s", o->model, opt_known_names());
    Checkpoint *checkpoint = named ? checkpoint_dummy(&config, o->sampling.seed) : checkpoint_open(o->model, err);
    int status = checkpoint ? bench_with(o, checkpoint, err) : -1;
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    Options o = {.max_tokens = 64, .prompt_len = 512, .gen_len = 32, .device = "host", .offload_dir = tmp ? tmp : "/var/tmp",
                 .sampling = {.top_p = 1}, .policy = {.schedule = SCHEDULE_ZIGZAG, .overlap = true, .page_tokens = 16}};
    Error err = {0};
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is a failed write, said in one line */
    if (argc < 2) return usage(stderr);
    const char *command = argv[1];
    bool is_generate = !strcmp(command, "generate"), is_bench = !strcmp(command, "bench");
    if (!strcmp(command, "--help") || !strcmp(command, "help")) return usage(stdout), EXIT_OK;
    int status;
    if (!is_generate && !is_bench) status = fail(&err, EXIT_USAGE, "unknown command %.60s; the commands are generate and bench", command);
    else status = parse_flags(&o, is_generate ? 'g' : 'b', argv + 2, argc - 2, &err);
    if (!status) status = is_generate ? generate(&o, &err) : bench(&o, &err);
    free(o.prompt), free(o.stop);
    if (status) fprintf(stderr, "flexgen: %s\n", err.text);
    return status ? err.code : EXIT_OK;
}
