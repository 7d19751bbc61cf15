/* flexgen.c: main, as a table of contents: the commands and their flags.
 *
 *   generate   prompts in, completions out
 *   bench      a named model with random weights, prompts of one length, measured throughput
 *   policy     the best policies for a machine, by a cost model
 *   profile    this machine as numbers
 *   quantize   a 4-bit copy of a checkpoint
 *   eval       perplexity, last words
 * Exit status: 0 done, 1 failed, 2 wrong use or does not fit. Results go to standard output, everything else to standard
 * error. Read next: schedule.c for the paper's Figure 4. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cost/cost.h"

// ---------------------------------------------------------------------------------------------------------------
// Flags
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    char **text;
    int n;
} Texts; /* the values of a flag that may be repeated */

typedef struct {
    const char *model, *prompts, *output, *json, *offload_dir, *device, *hardware, *trace, *cost_model;
    const char *perplexity, *last_word;
    Texts prompt, stop;
    int max_tokens, num_prompts, threads, window, limit;
    int prompt_len[2], gen_len[2]; /* least, most */
    Policy policy;                 /* gbs, num_gpu_batches 0: not given */
    bool fixed[6];                 /* which of wg wc cg cc hg hc are given */
    bool fixed_schedule, frontier;
    bool compress_weight, compress_cache, allow_compression;
    Quant quant;        /* of compression */
    double max_latency; /* seconds of a block; 0: any number */
    int nodes;
    double net_gbps, net_ms;
    bool verbose, help;
    Sampling sampling;
    size_t capacity[NTIERS]; /* FROM_MACHINE: not given */
    double link[NCHANNELS];  /* bytes/s; 0: not slowed */
    bool links;              /* some link is */
} Options;
#define FROM_MACHINE SIZE_MAX

/* A flag: the commands that know it ("g" generate, "b" bench, "p" policy, "m" profile, "q" quantize, "e" eval), how many
 * values it takes, and what they set. */
typedef struct Flag Flag;
struct Flag {
    const char *name, *commands;
    int values;
    int (*set)(Options *, const Flag *, char **values, Error *);
    size_t at;        /* the field of Options */
    double low, high; /* bounds of a number */
    const char *help;
};

static void *field(Options *o, const Flag *flag) { return (char *)o + flag->at; }

static int set_text(Options *o, const Flag *flag, char **v, Error *err) {
    (void)err;
    *(const char **)field(o, flag) = v[0];
    return 0;
}

static int add_text(Options *o, const Flag *flag, char **v, Error *err) {
    (void)err;
    Texts *list = field(o, flag);
    list->text = xrealloc(list->text, list->n + 1, sizeof *list->text);
    list->text[list->n++] = v[0];
    return 0;
}

static int set_true(Options *o, const Flag *flag, char **v, Error *err) {
    (void)v, (void)err;
    *(bool *)field(o, flag) = true;
    return 0;
}

static int set_false(Options *o, const Flag *flag, char **v, Error *err) {
    (void)v, (void)err;
    *(bool *)field(o, flag) = false;
    return 0;
}

static int parse_whole(long *value, const Flag *flag, const char *text, Error *err) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    if (errno || end == text || *end || *value < flag->low || *value > flag->high)
        return fail(err, EXIT_USAGE, "%s %.60s: expected a whole number from %.0f to %.0f", flag->name, text, flag->low,
                    flag->high);
    return 0;
}

static int set_int(Options *o, const Flag *flag, char **v, Error *err) {
    long value;
    if (parse_whole(&value, flag, v[0], err)) return -1;
    *(int *)field(o, flag) = (int)value;
    return 0;
}

/* "512", or "16-512" for lengths between the two. */
static int set_range(Options *o, const Flag *flag, char **v, Error *err) {
    int *range = field(o, flag), len = 0;
    long low, high;
    int n = sscanf(v[0], "%ld%n-%ld%n", &low, &len, &high, &len);
    if (n == 1) high = low;
    if (n < 1 || v[0][len] || low < flag->low || high < low || high > flag->high)
        return fail(err, EXIT_USAGE, "%s %.60s: expected a whole number from %.0f to %.0f, or two such as 16-512",
                    flag->name, v[0], flag->low, flag->high);
    range[0] = (int)low, range[1] = (int)high;
    return 0;
}

/* Of Policy.quant; group is a multiple of its least. */
static int set_quant(Options *o, const Flag *flag, char **v, Error *err) {
    long value;
    if (parse_whole(&value, flag, v[0], err)) return -1;
    if (flag->low == LEAST_GROUP && value % LEAST_GROUP)
        return fail(err, EXIT_USAGE, "%s %ld: expected a multiple of %d", flag->name, value, LEAST_GROUP);
    *(uint16_t *)field(o, flag) = (uint16_t)value;
    return 0;
}

static int set_seed(Options *o, const Flag *flag, char **v, Error *err) {
    long value;
    if (parse_whole(&value, flag, v[0], err)) return -1;
    *(uint64_t *)field(o, flag) = (uint64_t)value;
    return 0;
}

static int parse_double(double *value, const Flag *flag, const char *text, Error *err) {
    char *end;
    errno = 0;
    *value = strtod(text, &end);
    if (errno || end == text || *end || !(*value >= flag->low && *value <= flag->high)) /* NaN is refused as well */
        return fail(err, EXIT_USAGE, "%s %.60s: expected a number from %g to %g", flag->name, text, flag->low, flag->high);
    return 0;
}

static int set_double(Options *o, const Flag *flag, char **v, Error *err) {
    return parse_double(field(o, flag), flag, v[0], err);
}

static int set_float(Options *o, const Flag *flag, char **v, Error *err) {
    double value;
    if (parse_double(&value, flag, v[0], err)) return -1;
    *(float *)field(o, flag) = (float)value;
    return 0;
}

/* "16G", "512M", "1.5G", "4096": powers of 1024. */
static int set_size(Options *o, const Flag *flag, char **v, Error *err) {
    static const char units[] = "KMGT";
    char *end;
    double value = strtod(v[0], &end), unit = 1;
    const char *u = *end ? strchr(units, *end >= 'a' ? *end - 32 : *end) : NULL;
    if (u)
        for (long e = u - units + 1; e > 0; e--) unit *= 1024;
    if (end == v[0] || (*end && (!u || end[1])) || !(value >= 0) || !(value * unit < 1e18))
        return fail(err, EXIT_USAGE, "%s %.60s: expected a size such as 16G, 512M or 4096", flag->name, v[0]);
    *(size_t *)field(o, flag) = (size_t)(value * unit);
    return 0;
}

static int set_percent(Options *o, const Flag *flag, char **v, Error *err) {
    double *share[6] = {&o->policy.wg, &o->policy.wc, &o->policy.cg, &o->policy.cc, &o->policy.hg, &o->policy.hc};
    static const char *const what[] = {"weights", "KV cache", "activations"};
    for (int i = 0; i < 6; i++) {
        o->fixed[i] = strcmp(v[i], "-") != 0;
        *share[i] = 0;
        if (o->fixed[i] && parse_double(share[i], flag, v[i], err)) return -1;
        *share[i] /= 100;
    }
    for (int i = 0; i < 6; i += 2)
        if (*share[i] + *share[i + 1] > 1 + 1e-9)
            return fail(err, EXIT_USAGE, "%s: %s on GPU and CPU add up to %g%%; at most 100%%", flag->name, what[i / 2],
                        100 * (*share[i] + *share[i + 1]));
    return 0;
}

static int set_schedule(Options *o, const Flag *flag, char **v, Error *err) {
    for (int i = SCHEDULE_ZIGZAG; i <= SCHEDULE_DIAGONAL; i++)
        if (!strcmp(v[0], schedule_name[i])) return o->policy.schedule = (Schedule)i, o->fixed_schedule = true, 0;
    return fail(err, EXIT_USAGE, "%s %.60s: expected row, zigzag or diagonal", flag->name, v[0]);
}

static int set_cost_model(Options *o, const Flag *flag, char **v, Error *err) {
    if (strcmp(v[0], "paper") && strcmp(v[0], "runtime"))
        return fail(err, EXIT_USAGE, "%s %.60s: expected runtime or paper", flag->name, v[0]);
    o->cost_model = v[0];
    return 0;
}

/* "ctog=1G,dtoc=0.5G": bytes/s, powers of 1000. */
static int set_links(Options *o, const Flag *flag, char **v, Error *err) {
    static const char units[] = "KMGT";
    for (const char *at = v[0];; at++) {
        int c = CTOG, len = 0;
        while (c <= CTOD && (strncmp(at, channel_name[c], len = strlen(channel_name[c])) != 0 || at[len] != '=')) c++;
        char *end = (char *)at;
        double rate = c <= CTOD ? strtod(at + len + 1, &end) : 0;
        const char *u = end > at && *end ? strchr(units, *end >= 'a' ? *end - 32 : *end) : NULL;
        for (long e = u ? u - units + 1 : 0; e > 0; e--) rate *= 1000;
        end += u != NULL;
        if (end == at || !(rate >= 1 && rate < 1e15) || (*end && *end != ','))
            return fail(err, EXIT_USAGE, "%s %.60s: expected links and bytes a second such as ctog=1G,gtoc=1G,dtoc=0.5G",
                        flag->name, v[0]);
        o->link[c] = rate;
        if (!*(at = end)) break;
    }
    o->links = true;
    return 0;
}

/* In the order of the help text. */
#define AT(name) offsetof(Options, name)
enum { MAX_GBS = 1 << 20, MAX_LEN = 1 << 24, MAX_BENCH = 1 << 28, MAX_SLICES = 1 << 20 };
static const Flag flags[] = {
    {"--model", "gbpmqe", 1, set_text, AT(model), 0, 0,
     "DIR: a Hugging Face directory; bench, policy and profile also take a name, opt-125m to opt-175b"},
    {"--prompt", "g", 1, add_text, AT(prompt), 0, 0, "TEXT: a prompt; may be repeated"},
    {"--prompts", "g", 1, set_text, AT(prompts), 0, 0,
     "FILE: JSON lines {\"id\", \"prompt\", \"max_tokens\"} or plain lines; - is standard input"},
    {"--output", "gmq", 1, set_text, AT(output), 0, 0,
     "FILE: completions as JSON lines, or the machine (-, standard output); DIR: the copy that quantize makes"},
    {"--max-tokens", "g", 1, set_int, AT(max_tokens), 1, MAX_LEN,
     "N: tokens to generate where the prompt does not say (64)"},
    {"--prompt-len", "bp", 1, set_range, AT(prompt_len), 1, MAX_LEN,
     "S: tokens of every prompt (512); bench also S1-S2: drawn between the two"},
    {"--gen-len", "bp", 1, set_range, AT(gen_len), 1, MAX_LEN, "N: tokens to generate (32); bench also N1-N2"},
    {"--num-prompts", "bp", 1, set_int, AT(num_prompts), 1, MAX_GBS, "N: prompts (one block of them)"},
    {"--perplexity", "e", 1, set_text, AT(perplexity), 0, 0, "FILE: a text, scored in windows; - is standard input"},
    {"--last-word", "e", 1, set_text, AT(last_word), 0, 0, "FILE: JSON lines {\"text\"} whose last word is scored"},
    {"--window", "e", 1, set_int, AT(window), 2, MAX_LEN, "N: tokens of a window (the model's positions)"},
    {"--limit", "e", 1, set_int, AT(limit), 1, MAX_LEN, "N: the first N windows or lines only (all)"},
    {"--json", "bpe", 1, set_text, AT(json), 0, 0, "FILE: the figures as one JSON object; - is standard output"},
    {"--percent", "gbpe", 6, set_percent, 0, 0, 100,
     "WG WC CG CC HG HC: weights, KV cache, activations on GPU and on CPU; the disk has the rest; - is left to the search"},
    {"--gpu-batch-size", "gbpe", 1, set_int, AT(policy.gbs), 1, MAX_GBS, "N: sequences of a GPU batch"},
    {"--num-gpu-batches", "gbpe", 1, set_int, AT(policy.num_gpu_batches), 1, 1 << 16, "N: GPU batches of a block"},
    {"--schedule", "gbpe", 1, set_schedule, 0, 0, 0,
     "zigzag (Figure 3b), row (Figure 3a) or diagonal (Figure 6); the best, or with a given policy zigzag"},
    {"--cpu-cache-compute", "gbpe", 0, set_true, AT(policy.cpu_attention), 0, 0,
     "the CPU attends to the KV cache on CPU and disk, in place"},
    {"--compress-weight", "gbpe", 0, set_true, AT(compress_weight), 0, 0,
     "4-bit groups for the layers' matrices, on every tier"},
    {"--compress-cache", "gbpe", 0, set_true, AT(compress_cache), 0, 0, "4-bit groups for the KV cache, on every tier"},
    {"--bits", "gbpqe", 1, set_quant, AT(quant.bits), LEAST_BITS, MOST_BITS,
     "B: of a compressed number (4; others, for study, are slow)"},
    {"--group", "gbpqe", 1, set_quant, AT(quant.group), LEAST_GROUP, MOST_GROUP,
     "G: numbers that share a minimum and a scale (64)"},
    {"--allow-compression", "gbp", 0, set_true, AT(allow_compression), 0, 0,
     "the search may compress weights and cache where that is faster"},
    {"--attn-sparsity", "gbpe", 1, set_double, AT(policy.sparsity), 1e-6, 1,
     "F: read V of this share of the tokens, those with the largest scores (1); the CPU attends to what is off the GPU"},
    {"--no-overlap", "gbpe", 0, set_false, AT(policy.overlap), 0, 0, "wait for every operation at once"},
    {"--page-tokens", "gbpe", 1, set_int, AT(policy.page_tokens), 1, 4096, "N: tokens of a KV page (16)"},
    {"--device", "gbpme", 1, set_text, AT(device), 0, 0,
     "host, cuda (the GPU, if there is one), or for bench sim, a machine made of numbers"},
    {"--hardware", "gbpe", 1, set_text, AT(hardware), 0, 0,
     "FILE: the machine that the policy is for or the sim plays, such as hardware/t4.json (this one, measured)"},
    {"--cost-model", "p", 1, set_cost_model, 0, 0, 0,
     "runtime: what this program does (the default); paper: Appendix A.3 as printed"},
    {"--max-latency", "gbp", 1, set_double, AT(max_latency), 1e-6, 1e12, "SECONDS: that one block may take"},
    {"--frontier", "p", 0, set_true, AT(frontier), 0, 0, "the best throughput for every latency (Figure 1)"},
    {"--nodes", "p", 1, set_int, AT(nodes), 1, 10000, "M: machines, as a pipeline (4.4) and without offloading (6.4)"},
    {"--net-gbps", "p", 1, set_double, AT(net_gbps), 1e-6, 1e6, "G: Gbit/s between two of them (10)"},
    {"--net-ms", "p", 1, set_double, AT(net_ms), 0, 1e6, "L: milliseconds that a message takes besides (0.1)"},
    {"--link", "gbpe", 1, set_links, 0, 0, 0,
     "LIST: slow links of the host device: ctog=1G,gtoc=1G,dtoc=0.5G,ctod=0.5G (bytes/s)"},
    {"--trace", "gbe", 1, set_text, AT(trace), 0, 0, "FILE: what each lane did when, for chrome://tracing or Perfetto"},
    {"--gpu-mem", "gbpme", 1, set_size, AT(capacity[TIER_GPU]), 0, 0, "SIZE: capacity of the GPU tier, such as 16G"},
    {"--cpu-mem", "gbpme", 1, set_size, AT(capacity[TIER_CPU]), 0, 0, "SIZE: of the CPU tier"},
    {"--disk-mem", "gbpme", 1, set_size, AT(capacity[TIER_DISK]), 0, 0, "SIZE: of the disk tier"},
    {"--offload-dir", "gbpme", 1, set_text, AT(offload_dir), 0, 0,
     "DIR: where the disk tier's file is (TMPDIR, or /var/tmp)"},
    {"--threads", "gbpmqe", 1, set_int, AT(threads), 1, 1024, "N: threads that compute (all cores)"},
    {"--temperature", "g", 1, set_float, AT(sampling.temperature), 0, 1e6, "T: of sampling; 0 is greedy (the default)"},
    {"--top-p", "g", 1, set_float, AT(sampling.top_p), 1e-6, 1,
     "P: with a temperature, sample from the likeliest tokens with together this mass (1)"},
    {"--top-k", "g", 1, set_int, AT(sampling.top_k), 0, MAX_LEN,
     "K: with a temperature, from the K likeliest tokens (0: all)"},
    {"--seed", "gb", 1, set_seed, AT(sampling.seed), 0, 0x1p62, "N: of sampling, and of bench's prompts and weights (0)"},
    {"--stop", "g", 1, add_text, AT(stop), 0, 0, "TEXT: end a completion before it; may be repeated"},
    {"--verbose", "ge", 0, set_true, AT(verbose), 0, 0,
     "print the plan, and the measured peaks beside it (bench always does)"},
    {"--help", "gbpmqe", 0, set_true, AT(help), 0, 0, "this text"},
};
enum { NFLAGS = sizeof flags / sizeof flags[0] };

/* Levenshtein, for "did you mean". */
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(b), row[128];
    CHECK(n < 128);
    for (int c = 0; c <= n; c++) row[c] = c;
    for (int r = 0; a[r] && r < 100; r++) {
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

static const char *command_name(char letter);

/* "generate and bench": the commands that know a flag. */
static const char *known_by(char *text, size_t size, const Flag *flag) {
    text[0] = 0;
    for (const char *c = flag->commands; *c; c++) {
        const char *name = command_name(*c);
        size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%s", !used ? "" : c[1] ? ", " : " and ", name);
    }
    return text;
}

static int unknown_flag(const char *name, char command, Error *err) {
    const char *nearest = NULL;
    int least = 1000;
    for (int f = 0; f < NFLAGS; f++) {
        int distance = edit_distance(name, flags[f].name);
        char who[64];
        if (!distance)
            return fail(err, EXIT_USAGE, "%s is a flag of %s only; leave it out", name,
                        known_by(who, sizeof who, &flags[f]));
        if (strchr(flags[f].commands, command) && distance < least) least = distance, nearest = flags[f].name;
    }
    return fail(err, EXIT_USAGE, "unknown flag %.60s; the nearest known one is %s", name, nearest);
}

static int parse_flags(Options *o, char command, char **args, int n, Error *err) {
    for (int a = 0; a < n; a++) {
        const Flag *f = flags;
        while (f < flags + NFLAGS && (strcmp(args[a], f->name) != 0 || !strchr(f->commands, command))) f++;
        if (f == flags + NFLAGS) return unknown_flag(args[a], command, err);
        if (n - a - 1 < f->values)
            return fail(err, EXIT_USAGE, "%s takes %d value%s: %s", f->name, f->values, f->values > 1 ? "s" : "", f->help);
        if (f->set(o, f, args + a + 1, err)) return -1;
        a += f->values;
    }
    return 0;
}

static bool device_is(const Options *o, const char *name) { return o->device && !strcmp(o->device, name); }

static int check_device(const Options *o, char command, Error *err) {
    if (o->device && !device_is(o, "host") && !device_is(o, "cuda") && !device_is(o, "sim"))
        return fail(err, EXIT_USAGE, "--device %.60s: expected host, cuda or sim", o->device);
    if (device_is(o, "sim") && command != 'b')
        return fail(err, EXIT_USAGE, "--device sim: it computes nothing, so only bench knows it; leave it out");
    if (device_is(o, "sim") && !o->hardware)
        return fail(err, EXIT_USAGE,
                    "--device sim: --hardware is missing; name the machine's file, such as hardware/t4.json");
    if (o->links && o->device && !device_is(o, "host"))
        return fail(err, EXIT_USAGE, "--link: only links of the host device can be slowed; use --device host");
    return 0;
}

static bool paper_model(const Options *o) { return o->cost_model && !strcmp(o->cost_model, "paper"); }

/* Appendix A.3 knows one block of equal prompts on one machine. */
static int check_paper(const Options *o, Error *err) {
    if (!o->hardware)
        return fail(err, EXIT_USAGE, "--hardware is missing; name the machine's file, such as hardware/t4.json");
    if (!o->policy.gbs || !o->policy.num_gpu_batches)
        return fail(err, EXIT_USAGE, "%s is missing; give the block as --gpu-batch-size N --num-gpu-batches N",
                    o->policy.gbs ? "--num-gpu-batches" : "--gpu-batch-size");
    if (o->prompt_len[0] < o->prompt_len[1] || o->gen_len[0] < o->gen_len[1])
        return fail(err, EXIT_USAGE, "%s: the cost model paper knows one length; give one number",
                    o->prompt_len[0] < o->prompt_len[1] ? "--prompt-len" : "--gen-len");
    for (int i = 0; i < 6; i++)
        if (o->fixed[i]) return fail(err, EXIT_USAGE, "--percent: the cost model paper finds all of them; leave it out");
    if (o->compress_weight || o->compress_cache || o->allow_compression || is_sparse(&o->policy))
        return fail(err, EXIT_USAGE, "%s: the cost model paper knows none; leave it out",
                    is_sparse(&o->policy) ? "--attn-sparsity" : "compression");
    if (o->max_latency > 0 || o->frontier || o->nodes)
        return fail(err, EXIT_USAGE, "%s: the cost model paper looks at one block on one machine; leave it out",
                    o->frontier ? "--frontier"
                    : o->nodes  ? "--nodes"
                                : "--max-latency");
    return 0;
}

/* Clusters are for one block of equal prompts. */
static int check_cluster(const Options *o, Error *err) {
    if (o->frontier || o->num_prompts)
        return fail(err, EXIT_USAGE, "--nodes: looks at one block; leave %s out",
                    o->frontier ? "--frontier" : "--num-prompts");
    if (o->prompt_len[0] < o->prompt_len[1] || o->gen_len[0] < o->gen_len[1])
        return fail(err, EXIT_USAGE, "--nodes: knows one length; give one number for %s",
                    o->prompt_len[0] < o->prompt_len[1] ? "--prompt-len" : "--gen-len");
    return 0;
}

/* What no flag alone can get wrong. */
static int check_options(const Options *o, char command, Error *err) {
    if (check_device(o, command, err)) return -1;
    if (command == 'm') return 0;
    if (!o->model)
        return fail(err, EXIT_USAGE, "--model is missing; name a checkpoint directory%s",
                    command == 'b' || command == 'p' ? " or a size such as opt-125m" : "");
    if (command == 'q' && (!o->output || !o->output[0]))
        return fail(err, EXIT_USAGE, "--output is missing; name the directory that the copy is to be");
    if (command == 'p' && paper_model(o) && check_paper(o, err)) return -1;
    if (o->nodes && check_cluster(o, err)) return -1;
    if (command == 'g' && !o->prompt.n == !o->prompts)
        return fail(err, EXIT_USAGE, "give either --prompt TEXT or --prompts FILE");
    if (command == 'e' && !o->perplexity == !o->last_word)
        return fail(err, EXIT_USAGE, "give either --perplexity FILE or --last-word FILE");
    if (o->window && !o->perplexity) return fail(err, EXIT_USAGE, "--window: a line is one by itself; leave it out");
    for (int i = 0; i < o->stop.n; i++)
        if (!o->stop.text[i][0]) return fail(err, EXIT_USAGE, "--stop: an empty text would end everything; give one");
    if ((long)o->policy.gbs * o->policy.num_gpu_batches > MAX_GBS)
        return fail(err, EXIT_USAGE, "--gpu-batch-size %d x --num-gpu-batches %d: expected a block of at most %d sequences",
                    o->policy.gbs, o->policy.num_gpu_batches, MAX_GBS);
    return 0;
}

static void usage(FILE *out) {
    fprintf(out,
            "FlexGen: generates text from OPT models that do not fit the GPU.\n\n"
            "  flexgen generate --model DIR (--prompt TEXT | --prompts FILE|-)   completions as JSON lines\n"
            "  flexgen bench    --model NAME|DIR                                 measured throughput\n"
            "  flexgen policy   --model NAME|DIR                                 the best policies, and what they promise\n"
            "  flexgen profile                                                   this machine as a hardware file\n"
            "  flexgen quantize --model DIR --output DIR                         a 4-bit copy of a checkpoint\n"
            "  flexgen eval     --model DIR (--perplexity FILE | --last-word FILE)   how probable a text is\n\n");
    for (const Flag *f = flags; f < flags + NFLAGS; f++) fprintf(out, "  %-20s%-6s %s\n", f->name, f->commands, f->help);
    fprintf(
        out,
        "\ng: of generate, b: of bench, p: of policy, m: of profile, q: of quantize, e: of eval. Exit status: 0 done, 1 "
        "failed, 2 wrong use or does not fit.\n");
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

/* Memory that can be had, by the kernel and by the control group, whichever is less. The group counts files that are
 * only cached; they give way. */
static size_t memory_available(void) {
    static const char group[] = "/sys/fs/cgroup/memory.stat";
    size_t available = file_number("/proc/meminfo", "MemAvailable:", 1024);
    size_t limit = file_number("/sys/fs/cgroup/memory.max", "", 1);
    size_t used = file_number("/sys/fs/cgroup/memory.current", "", 1);
    size_t active = file_number(group, "active_file ", 1), inactive = file_number(group, "inactive_file ", 1);
    if (limit == SIZE_MAX || used == SIZE_MAX) return available;
    if (active <= used) used -= active;
    if (inactive <= used) used -= inactive;
    size_t left = used < limit ? limit - used : 0;
    return left < available ? left : available;
}

/* Of --gpu-mem, or of the whole GPU, what is left for the tier: the context and the workspaces take their part of it, and
 * other programs may have taken theirs. */
static size_t gpu_room(Gpu *gpu, size_t limit) {
    size_t room = limit < gpu->total ? limit : gpu->total, taken = gpu->overhead + gpu->spare;
    size_t used = gpu->in_use(gpu) + gpu->spare, left = used < gpu->total ? gpu->total - used : 0;
    room = taken < room ? room - taken : 0;
    return room < left ? room : left;
}

/* Capacities that were not given. On the host device both upper tiers are this memory. Room is left for the rest of the
 * machine. gpu NULL: the host device; hardware: the sim, which has what its file says. */
static int fill_capacities(Options *o, Gpu *gpu, const Hardware *hardware, const Checkpoint *checkpoint, Error *err) {
    size_t memory = memory_available();
    struct statvfs disk;
    for (int t = 0; hardware && t < NTIERS; t++)
        if (o->capacity[t] == FROM_MACHINE)
            o->capacity[t] = (size_t)(t == TIER_GPU ? hardware->gmem : t == TIER_CPU ? hardware->cmem : hardware->nmem);
    if (hardware) return 0;
    if (gpu)
        o->capacity[TIER_GPU] = gpu_room(gpu, o->capacity[TIER_GPU]);
    else if (o->capacity[TIER_GPU] == FROM_MACHINE)
        o->capacity[TIER_GPU] = memory / 100 * 45;
    if (o->capacity[TIER_CPU] == FROM_MACHINE) o->capacity[TIER_CPU] = memory / 100 * (gpu ? 80 : 40);
    if (o->capacity[TIER_DISK] != FROM_MACHINE) return 0;
    if (statvfs(o->offload_dir, &disk))
        return fail(err, EXIT_USAGE, "--offload-dir %s: %s; name a directory", o->offload_dir, strerror(errno));
    o->capacity[TIER_DISK] = (size_t)disk.f_bavail * disk.f_frsize / 100 * 90;
    for (int f = 0; f < checkpoint->nfiles; f++)
        o->capacity[TIER_DISK] += checkpoint->files[f].size; /* it is there already */
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Running a task under a policy
// ---------------------------------------------------------------------------------------------------------------

/* One task: what it needs, where it runs, how it went. */
typedef struct {
    Gpu *gpu; /* NULL on the other devices */
    bool sim, predicted;
    Hardware hardware; /* of the sim, or of this machine where the policy is searched for */
    Found found;       /* what is expected of the policy, if predicted */
    Error no_gpu;      /* text: why not the GPU, where nobody said --device host */
    size_t in_use_before,
        in_use; /* bytes of the GPU before there is a tier and at the end of the run, by its own account */
    Plan *plan;
    Device *device;
    RunStats stats;
    bool traced; /* the device notes what it does: for --trace, and for bench's breakdown */
    Trace trace;
} Run;

/* The sim; the GPU, if it is wanted or there. */
static int choose_device(Run *run, const Options *o, const OptConfig *config, Error *err) {
    int head = config->h1 / config->nh;
    run->sim = device_is(o, "sim");
    if (run->sim) return hardware_read(&run->hardware, o->hardware, err);
    if (device_is(o, "host") || o->links) return 0;
    if (!cuda_open_gpu)
        fail(&run->no_gpu, EXIT_USAGE, "this flexgen was built without CUDA; build it where nvcc is installed");
    else if ((run->gpu = cuda_open_gpu(&run->no_gpu)) && head > run->gpu->max_head) {
        fail(&run->no_gpu, EXIT_USAGE,
             "the model's heads have %d elements, the GPU's attention has room for %d; use --device host", head,
             run->gpu->max_head);
        run->gpu->close(run->gpu);
        run->gpu = NULL;
    }
    if (run->gpu) run->in_use_before = run->gpu->in_use(run->gpu);
    if (run->gpu || !o->device) return 0;
    *err = run->no_gpu;
    return -1;
}

static void slow_links(Hardware *h, const double link[NCHANNELS]) {
    double *const bdw[] = {h->ctog_bdw, h->gtoc_bdw, h->dtoc_bdw, h->ctod_bdw};
    for (int c = CTOG; c <= CTOD; c++)
        for (int stage = 0; link[c] > 0 && stage < 2; stage++) bdw[c][stage] = fmin(bdw[c][stage], link[c]);
}

/* The machine that the search is for: a file's, or this one, measured; with its links as slow as they will be. */
static int know_machine(Run *run, const Options *o, const OptConfig *config, Error *err) {
    const ProfileSize size = profile_size(run->gpu, config);
    FILE *progress = isatty(STDERR_FILENO) ? stderr : NULL;
    if (run->sim) return 0;
    if (o->hardware
            ? hardware_read(&run->hardware, o->hardware, err)
            : profile_machine(&run->hardware, &size, run->gpu, o->offload_dir, o->threads, o->capacity, progress, err))
        return -1;
    slow_links(&run->hardware, o->link);
    return 0;
}

static Type act_type(const Run *run) { return run->gpu || (run->sim && !run->hardware.shared_cores) ? F16 : F32; }

static Search search_for(const Options *o, const Hardware *hardware, Type act_type, const Checkpoint *checkpoint,
                         const Task *task, bool one_block) {
    Search s = {.hardware = hardware,
                .checkpoint = checkpoint,
                .task = task,
                .one_block = one_block,
                .act_type = act_type,
                .given = o->policy,
                .fixed_gbs = o->policy.gbs > 0,
                .fixed_batches = o->policy.num_gpu_batches > 0 || o->policy.schedule == SCHEDULE_ROW,
                .fixed_schedule = o->fixed_schedule,
                .fixed_attention = o->policy.cpu_attention,
                .max_latency = o->max_latency};
    if (o->allow_compression) s.allowed = o->quant;
    memcpy(s.capacity, o->capacity, sizeof s.capacity);
    memcpy(s.fixed, o->fixed, sizeof s.fixed);
    if (!s.given.num_gpu_batches && s.fixed_batches) s.given.num_gpu_batches = 1;
    return s;
}

/* Whether the flags say everything that the search would look for. */
static bool all_given(const Search *s) {
    bool all = s->fixed_gbs && s->fixed_batches && s->max_latency <= 0; /* a limit must be looked at */
    for (int i = 0; i < 6; i++) all = all && s->fixed[i];
    return all && !s->allowed.bits;
}

/* How the flags, or a packed checkpoint, say that weights and cache are packed; and who attends sparsely. */
static int settle_compression(Options *o, const Checkpoint *checkpoint, Error *err) {
    const Quant asked = o->quant, is = checkpoint->quant;
    Policy *p = &o->policy;
    if (o->compress_weight) p->weight_quant = asked;
    if (o->compress_cache) p->cache_quant = asked;
    if (is_sparse(p)) p->cpu_attention = true;
    if (!is.bits) return 0;
    if (o->compress_weight && (is.bits != asked.bits || is.group != asked.group))
        return fail(err, EXIT_USAGE,
                    "--compress-weight: the checkpoint's weights have %d bits in groups of %d; leave it out", is.bits,
                    is.group);
    p->weight_quant = is;
    return 0;
}

/* Chooses what the flags leave open, and refuses what does not fit, before anything is allocated or written. one_block: the
 * task is as long as a block may be, and ends behind the policy's. */
static int plan_task(Run *run, Options *o, const Checkpoint *checkpoint, Task *task, bool one_block, Error *err) {
    if (choose_device(run, o, &checkpoint->config, err) ||
        fill_capacities(o, run->gpu, run->sim ? &run->hardware : NULL, checkpoint, err) ||
        settle_compression(o, checkpoint, err))
        return -1;
    o->threads = host_set_threads(o->threads);
    Search search = search_for(o, &run->hardware, act_type(run), checkpoint, task, one_block);
    bool given = all_given(&search);
    run->predicted = run->sim || o->hardware || !given;
    if (run->predicted && know_machine(run, o, &checkpoint->config, err)) return -1;
    if (given && table_home(&search.given, checkpoint, task, act_type(run), o->capacity, err)) return -1;
    if (!given && policy_search(&run->found, 1, &search, err) < 0) return -1;
    if (given && run->predicted && policy_predict(&run->found, &search, err)) return -1;
    o->policy = given ? search.given : run->found.policy;
    if (one_block) task->count = imin(task->count, block_size(&o->policy));
    run->plan = plan_make(checkpoint, &o->policy, task, act_type(run), err);
    return run->plan ? plan_fits(run->plan, o->capacity, err) : -1;
}

/* What a user should know who expected the GPU, or full speed of it. A person hears it at once; in a log an error stays the
 * only line. */
static void say_notices(const Run *run, bool now) {
    if (now != (isatty(STDERR_FILENO) != 0)) return;
    if (run->no_gpu.text[0]) fprintf(stderr, "running on the host device: %s\n", run->no_gpu.text);
    if (run->device->notice.text[0]) fprintf(stderr, "%s\n", run->device->notice.text);
}

/* The GPU's own account against the plan. */
static void check_in_use(Run *run) {
    size_t planned = run->in_use_before + run->plan->total[TIER_GPU] + run->gpu->spare;
    run->in_use = run->gpu->in_use(run->gpu);
    if (run->in_use > planned)
        fail(&run->device->notice, EXIT_OK,
             "the GPU counts %.1f MiB more in use than planned, by this program or by others",
             (run->in_use - planned) / 1048576.0);
}

/* Opens where results go ("-": standard output); what was there before is gone. flag names it in messages. */
static FILE *open_output(const char *flag, const char *path, Error *err) {
    FILE *f = strcmp(path, "-") ? fopen(path, "w") : stdout;
    if (!f) fail(err, EXIT_FAILED, "%s %s: %s; name a file that can be written", flag, path, strerror(errno));
    return f;
}

/* Whether all that was written has arrived. */
static int close_output(FILE *f, const char *flag, const char *path, Error *err) {
    int bad = fflush(f) || ferror(f);
    if (f != stdout && fclose(f)) bad = 1;
    return bad ? fail(err, EXIT_FAILED, "%s %s: %s; make room or write elsewhere", flag, path, strerror(errno)) : 0;
}

static Device *open_device(const Run *run, const Options *o, const Checkpoint *checkpoint, Error *err) {
    if (run->sim) return sim_open(run->plan, &run->hardware, err);
    if (run->gpu) return cuda_open(run->gpu, run->plan, checkpoint, o->offload_dir, err);
    return host_open(run->plan, checkpoint, o->offload_dir, err);
}

/* Loads the weights and generates. */
static int run_on(Run *run, const Options *o, const Checkpoint *checkpoint, const Task *task, const Listener *listener,
                  Error *err) {
    memcpy(run->device->link, o->link, sizeof o->link);
    if (!run->sim && weights_load(run->plan, checkpoint, run->device, err)) return -1;
    if (run->gpu && opt_warm_up(run->device, run->plan, err)) return -1;
    if (run->traced) run->device->trace = &run->trace;
    if (schedule_run(run->plan, task, run->device, listener, &run->stats, err)) return -1;
    if (run->gpu) check_in_use(run);
    return 0;
}

/* The whole of a run. The device stays open for its counters. The file for the trace is opened before anything else. */
static int run_task(Run *run, Options *o, const Checkpoint *checkpoint, const Task *task, const Listener *listener,
                    Error *err) {
    FILE *trace = o->trace ? open_output("--trace", o->trace, err) : NULL;
    if (o->trace && !trace) return -1;
    Error unwritten;
    run->traced = run->traced || trace;
    run->device = open_device(run, o, checkpoint, err);
    if (run->device) say_notices(run, true);
    int status = run->device ? run_on(run, o, checkpoint, task, listener, err) : -1;
    if (trace && !status) trace_write(&run->trace, run->plan->config.name, trace);
    if (trace && close_output(trace, "--trace", o->trace, &unwritten) && !status) *err = unwritten, status = -1;
    if (!status) say_notices(run, false);
    return status;
}

/* What was planned and what was used, and what the GPU says of it. */
static void print_peaks(const Run *run, const Options *o) {
    plan_print(stderr, run->plan, o->capacity, run->device->peak);
    if (run->gpu)
        fprintf(stderr, "in use on the GPU, by its own account %12.2f = tier, context, workspaces and other programs\n",
                run->in_use / 1048576.0);
}

static void run_close(Run *run) {
    if (run->device) run->device->close(run->device);
    plan_free(run->plan);
    if (run->gpu) run->gpu->close(run->gpu);
    trace_free(&run->trace);
}

/* Side by side. T_pre and T_gen are seconds of a layer, in sweeps with a prefill and in the others. */
static void print_prediction(const Run *run) {
    const RunStats *r = &run->stats;
    const Cost *cost = &run->found.cost;
    const double l = run->plan->config.l, prefills = (double)r->prefill_sweeps, others = (double)r->sweeps - prefills;
    const double rows[][2] = {{cost->T_pre, prefills > 0 ? r->prefill_s / prefills / l : 0},
                              {cost->T_gen, others > 0 ? r->decode_s / others / l : 0},
                              {cost->T, r->total_s},
                              {cost->throughput, r->total_s > 0 ? r->generated / r->total_s : 0}};
    static const char *const name[] = {"T_pre (s)", "T_gen (s)", "T (s)", "throughput (token/s)"};
    fprintf(stderr, "%-34s %12s %12s\n", "", "predicted", "measured");
    for (int i = 0; i < 4; i++) fprintf(stderr, "%-34s %12.6g %12.6g\n", name[i], rows[i][0], rows[i][1]);
    for (int t = 0; t < NTIERS; t++)
        fprintf(stderr, "%-4s peak (MiB) %18s %12.2f %12.2f\n", tier_name[t], "", cost->peak[t] / 1048576.0,
                run->device->peak[t] / 1048576.0);
}

/* Under which policy, on what. */
static void print_policy(FILE *out, const Options *o, const Run *run) {
    const Policy *p = &o->policy;
    fprintf(out, "weights %g/%g%s, cache %g/%g%s, activations %g/%g%% on GPU/CPU, %d x %d, %s, %s%s%d threads, %s\n",
            100 * p->wg, 100 * p->wc, p->weight_quant.bits ? " packed" : "", 100 * p->cg, 100 * p->cc,
            p->cache_quant.bits ? " packed" : "", 100 * p->hg, 100 * p->hc, p->gbs, p->num_gpu_batches,
            schedule_name[p->schedule], run->gpu ? run->gpu->name : "", run->gpu ? ", " : "", o->threads, host_isa());
}

static void print_summary(const Options *o, const Run *run, int prompts) {
    const RunStats *stats = &run->stats;
    fprintf(stderr, "%d prompts, %ld tokens in %.2f s (prefill %.2f, decode %.2f): %.1f tokens/s generated; ", prompts,
            stats->generated, stats->total_s, stats->prefill_s, stats->decode_s,
            stats->total_s > 0 ? stats->generated / stats->total_s : 0);
    print_policy(stderr, o, run);
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen generate
// ---------------------------------------------------------------------------------------------------------------

static int read_job(Job *job, const Options *o, const Tokenizer *tokenizer, const OptConfig *config, Error *err) {
    if (o->prompts) {
        if (!strcmp(o->prompts, "-") && isatty(STDIN_FILENO)) fprintf(stderr, "prompts, one a line; Ctrl-D ends them\n");
        return job_read(job, o->prompts, o->max_tokens, tokenizer, config, err);
    }
    for (int i = 0; i < o->prompt.n; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", i);
        if (job_add(job, o->prompt.text[i], strlen(o->prompt.text[i]), id, o->max_tokens, tokenizer, config, "--prompt",
                    err))
            return -1;
    }
    return 0;
}

static int generate_job(Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Job *job, Run *run,
                        Error *err) {
    const char *path = o->output ? o->output : "-";
    if (job->task.count && plan_task(run, o, checkpoint, &job->task, false, err)) return -1;
    if (job->task.count && o->verbose) plan_print(stderr, run->plan, o->capacity, NULL);
    Completions c = {.job = job,
                     .tokenizer = tokenizer,
                     .out = open_output("--output", path, err),
                     .stop = o->stop.text,
                     .nstops = o->stop.n,
                     .out_name = strcmp(path, "-") ? path : "standard output",
                     .progress.on = isatty(STDERR_FILENO)};
    if (!c.out) return -1;
    Listener listener = completions_listener(&c);
    int status = job->task.count ? run_task(run, o, checkpoint, &job->task, &listener, err) : 0;
    progress_clear(&c.progress);
    Error unwritten;
    if (close_output(c.out, "--output", path, &unwritten) && !status) *err = unwritten, status = -1;
    if (!status && job->task.count && o->verbose) print_peaks(run, o);
    if (!status && run->predicted) print_prediction(run);
    if (!status && job->task.count) print_summary(o, run, job->task.count);
    return status;
}

static int generate_with(Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Error *err) {
    Job job = {.task.sampling = o->sampling};
    Run run = {0};
    int status = read_job(&job, o, tokenizer, &checkpoint->config, err);
    if (!status) status = generate_job(o, checkpoint, tokenizer, &job, &run, err);
    run_close(&run);
    job_free(&job);
    return status;
}

/* The model's </s> is a special piece of the vocabulary, or the two files do not belong together. */
static int check_eos(const Tokenizer *tokenizer, const OptConfig *config, const char *dir, Error *err) {
    size_t len;
    int32_t eos = config->eos;
    free(tokenizer_decode(tokenizer, &eos, 1, &len));
    if (len)
        return fail(err, EXIT_FAILED,
                    "%.300s: eos_token_id %d of config.json is an ordinary piece of vocab.json; expected </s>", dir, eos);
    return 0;
}

/* With what a command needs that knows texts. */
static int with_model(Options *o, int (*work)(Options *, const Checkpoint *, const Tokenizer *, Error *), Error *err) {
    OptConfig config;
    struct stat st;
    if (stat(o->model, &st) && opt_config_by_name(&config, o->model) == 0)
        return fail(err, EXIT_USAGE, "--model %s: is no directory; only bench takes a name: download the model", o->model);
    Checkpoint *checkpoint = checkpoint_open(o->model, err);
    if (!checkpoint) return -1;
    Tokenizer *tokenizer = tokenizer_open(o->model, checkpoint->config.vocab, err);
    int status = tokenizer ? check_eos(tokenizer, &checkpoint->config, o->model, err) : -1;
    if (!status) status = work(o, checkpoint, tokenizer, err);
    tokenizer_close(tokenizer);
    checkpoint_close(checkpoint);
    return status;
}

static int generate(Options *o, Error *err) { return with_model(o, generate_with, err); }

// ---------------------------------------------------------------------------------------------------------------
// flexgen bench
// ---------------------------------------------------------------------------------------------------------------

static int draw(uint64_t *x, const int range[2]) {
    *x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
    return range[0] + (int)(*x % (uint64_t)(range[1] - range[0] + 1));
}

/* Prompts of one length, or of lengths between two, so far without tokens. */
static Task bench_task(const Options *o, int count) {
    uint64_t x = (88172645463325252ull + o->sampling.seed) ^ 1;
    Task task = {.count = count, .prompts = xcalloc(count, sizeof *task.prompts), .sampling = o->sampling};
    for (int i = 0; i < count; i++) task.prompts[i].s = draw(&x, o->prompt_len), task.prompts[i].n = draw(&x, o->gen_len);
    return task;
}

/* Their tokens, at random. */
static void fill_prompts(Task *task, const OptConfig *config) {
    uint64_t x = 88172645463325252ull + task->sampling.seed;
    for (int i = 0; i < task->count; i++) {
        Prompt *p = &task->prompts[i];
        p->ids = xcalloc(p->s, sizeof *p->ids);
        for (int t = 0; t < p->s; t++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            p->ids[t] = t ? (int32_t)(x % (uint64_t)config->vocab) : 2;
        }
    }
}

static void free_prompts(Task *task) {
    for (int i = 0; i < task->count; i++) free(task->prompts[i].ids);
    free(task->prompts);
}

static int ignore_done(void *ctx, int prompt, const int32_t *tokens, int n, FinishReason reason, Error *err) {
    (void)ctx, (void)prompt, (void)tokens, (void)n, (void)reason, (void)err;
    return 0;
}

/* A run's times. */
static void add_run(cJSON *json, const Options *o, const Run *run) {
    const RunStats *r = &run->stats;
    double l = run->plan->config.l, prefills = (double)r->prefill_sweeps, others = (double)r->sweeps - prefills;
    double throughput = r->generated / r->total_s, decode = r->decode_s > 0 ? r->decoded / r->decode_s : 0;
    const Figure figures[] = {
        {"sweeps", (double)r->sweeps},
        {"s", o->prompt_len[1]},
        {"n", o->gen_len[1]},
        {"T", r->total_s},
        {"T_pre", prefills > 0 ? r->prefill_s / prefills / l : 0},
        {"T_gen", others > 0 ? r->decode_s / others / l : 0},
        {"throughput", throughput},
        {"prefill_s", r->prefill_s},
        {"decode_s", r->decode_s},
        {"total_s", r->total_s},
        {"generation_throughput", throughput},
        {"decode_throughput", decode},
    };
    add_figures(json, figures, sizeof figures / sizeof *figures);
}

static void add_busy(cJSON *json, const char *name, double moved, double busy) {
    const Figure figures[] = {{"moved_bytes", moved}, {"busy_s", busy}};
    add_figures(cJSON_AddObjectToObject(json, name), figures, 2);
}

/* What the lanes moved and how long they worked, and their sums by channel. */
static void add_lanes(cJSON *json, const Device *device) {
    cJSON *channels = cJSON_AddObjectToObject(json, "channels"), *lanes = cJSON_AddObjectToObject(json, "lanes");
    double moved[NCHANNELS] = {0}, busy[NCHANNELS] = {0};
    for (int lane = 0; lane < NLANES; lane++) {
        const LaneCount *count = &device->count[lane];
        double bytes = 0;
        for (int kind = 0; kind < NKINDS; kind++) bytes += (double)count->moved[kind];
        add_busy(lanes, lane_name[lane], bytes, count->busy_s);
        if (count->read[0]) {
            const Figure read[] = {{"k_bytes", (double)count->read[0]}, {"v_bytes", (double)count->read[1]}};
            add_figures(cJSON_GetObjectItem(lanes, lane_name[lane]), read, 2);
        }
        moved[lane_channel[lane]] += bytes, busy[lane_channel[lane]] += count->busy_s;
    }
    for (int channel = 0; channel < NCHANNELS; channel++)
        add_busy(channels, channel_name[channel], moved[channel], busy[channel]);
}

static const char *const stage_name[] = {"decode", "prefill"};

/* Table 4. */
static void print_breakdown(const Run *run) {
    Breakdown b;
    trace_breakdown(&run->trace, &b);
    if (run->trace.n == run->trace.limit) printf("of the first %d of %ld sweeps:\n", b.sweeps, run->stats.sweeps);
    printf("%-24s %10s", "breakdown (s, hidden)", "total");
    for (int part = 0; part < NPARTS; part++) printf("  %19s", part_name[part]);
    for (int stage = 1; stage >= 0; stage--) {
        printf("\n  %-22s %10.3f", stage_name[stage], b.total_s[stage]);
        for (int part = 0; part < NPARTS; part++) {
            const Share *share = &b.part[stage][part];
            printf("  %10.3f (%5.1f%%)", share->busy_s, share->busy_s > 0 ? 100 * share->hidden_s / share->busy_s : 0);
        }
    }
    printf("\n");
}

static void add_breakdown(cJSON *json, const Run *run) {
    Breakdown b;
    trace_breakdown(&run->trace, &b);
    cJSON *to = cJSON_AddObjectToObject(json, "breakdown");
    add_figures(to, &(Figure){"sweeps", b.sweeps}, 1);
    for (int stage = 1; stage >= 0; stage--) {
        cJSON *parts = cJSON_AddObjectToObject(to, stage_name[stage]);
        add_figures(parts, &(Figure){"total_s", b.total_s[stage]}, 1);
        for (int part = 0; part < NPARTS; part++) {
            const Figure figures[] = {{"busy_s", b.part[stage][part].busy_s}, {"hidden_s", b.part[stage][part].hidden_s}};
            add_figures(cJSON_AddObjectToObject(parts, part_name[part]), figures, 2);
        }
    }
}

static cJSON *bench_json(const Options *o, const Run *run) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "model", run->plan->config.name);
    cJSON_AddStringToObject(json, "device", run->device->name);
    add_policy(json, &o->policy);
    add_run(json, o, run);
    cJSON *tiers = cJSON_AddObjectToObject(json, "tiers");
    for (int t = 0; t < NTIERS; t++) {
        const Figure figures[] = {{"planned_bytes", (double)run->plan->total[t]},
                                  {"peak_bytes", (double)run->device->peak[t]}};
        cJSON *tier = cJSON_AddObjectToObject(tiers, tier_name[t]);
        add_figures(tier, figures, 2);
        if (run->gpu && t == TIER_GPU) add_figures(tier, &(Figure){"in_use_bytes", (double)run->in_use}, 1);
    }
    add_lanes(json, run->device);
    add_breakdown(json, run);
    if (run->predicted) add_cost(cJSON_AddObjectToObject(json, "predicted"), &run->found.cost);
    return json;
}

static void print_bench(const Run *run) {
    const RunStats *r = &run->stats;
    printf("prefill %.3f s, decode %.3f s, total %.3f s\n", r->prefill_s, r->decode_s, r->total_s);
    printf("generation throughput %.2f token/s, decode throughput %.2f token/s\n", r->generated / r->total_s,
           r->decode_s > 0 ? r->decoded / r->decode_s : 0);
    for (int lane = 0; lane < NLANES; lane++) {
        const LaneCount *c = &run->device->count[lane];
        size_t moved = 0;
        for (int kind = 0; kind < NKINDS; kind++) moved += c->moved[kind];
        printf("  %-16s %-5s busy %8.3f s", lane_name[lane], channel_name[lane_channel[lane]], c->busy_s);
        if (moved) printf("  moved %10.2f MB  %6.2f GB/s", moved / 1e6, moved / 1e9 / (c->busy_s + 1e-12));
        printf("\n");
    }
}

/* The task is planned; --json is opened before the run, so that an hour of it is not lost to a wrong path. */
static int bench_run(Options *o, const Checkpoint *checkpoint, const Task *task, Run *run, Error *err) {
    Listener listener = {.done = ignore_done};
    FILE *json = o->json ? open_output("--json", o->json, err) : NULL;
    if (o->json && !json) return -1;
    plan_print(stderr, run->plan, o->capacity, NULL);
    int status = run_task(run, o, checkpoint, task, &listener, err);
    if (!status) {
        print_peaks(run, o);
        if (run->predicted) print_prediction(run);
        if (json) print_json(json, bench_json(o, run));
        if (json != stdout) print_bench(run), print_breakdown(run);
    }
    Error unwritten;
    if (json && close_output(json, "--json", o->json, &unwritten) && !status) *err = unwritten, status = -1;
    return status;
}

static int check_lengths(const Options *o, const OptConfig *config, Error *err) {
    int s = o->prompt_len[1], n = o->gen_len[1];
    if (s <= config->max_pos && n <= config->max_pos - s + 1) return 0;
    return fail(err, EXIT_USAGE,
                "--prompt-len %d --gen-len %d: expected at most %d together, as the model has %d positions", s, n,
                config->max_pos + 1, config->max_pos);
}

/* How many prompts: as many as are asked for, or one block, which the search may make as large as this (*one_block). */
static int bench_count(bool *one_block, const Options *o, const OptConfig *config, Error *err) {
    enum { LARGEST_BLOCK = 4096 };
    int s = o->prompt_len[1], block = o->policy.gbs * o->policy.num_gpu_batches;
    *one_block = !o->num_prompts && !block;
    int count = o->num_prompts ? o->num_prompts : block ? block : imin(LARGEST_BLOCK, MAX_BENCH / s);
    if (check_lengths(o, config, err)) return -1;
    if ((double)count * s <= MAX_BENCH) return count;
    return fail(err, EXIT_USAGE,
                "--prompt-len %d: %d prompts (--num-prompts, or --gpu-batch-size x --num-gpu-batches) are over %d tokens",
                s, count, MAX_BENCH);
}

static int bench_with(Options *o, Checkpoint *checkpoint, Error *err) {
    bool one_block;
    Run run = {.traced = true, .trace.limit = o->trace ? 0 : MAX_SLICES};
    int count = bench_count(&one_block, o, &checkpoint->config, err);
    if (count < 0) return -1;
    checkpoint->config.eos = -1; /* every sequence runs to its full length */
    Task task = bench_task(o, count);
    int status = plan_task(&run, o, checkpoint, &task, one_block, err);
    if (!status) {
        fill_prompts(&task, &checkpoint->config);
        status = bench_run(o, checkpoint, &task, &run, err);
    }
    run_close(&run);
    free_prompts(&task);
    return status;
}

/* A directory's checkpoint, or a named size with random weights. */
static Checkpoint *open_model(const Options *o, Error *err) {
    OptConfig config;
    struct stat st;
    if (stat(o->model, &st) == 0 && S_ISDIR(st.st_mode)) return checkpoint_open(o->model, err);
    if (opt_config_by_name(&config, o->model) == 0) return checkpoint_dummy(&config, o->sampling.seed);
    fail(err, EXIT_USAGE, "--model %s: neither a directory nor one of %s", o->model, opt_known_names());
    return NULL;
}

static int bench(Options *o, Error *err) {
    Checkpoint *checkpoint = open_model(o, err);
    int status = checkpoint ? bench_with(o, checkpoint, err) : -1;
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen policy
// ---------------------------------------------------------------------------------------------------------------

/* The task, the machine and what was found on it: to --json, and unless that is standard output as text. */
static int say_policy(const Options *o, const OptConfig *config, const Run *run, cJSON *json, Error *err) {
    FILE *out = o->json ? open_output("--json", o->json, err) : NULL;
    if (o->json && !out) return cJSON_Delete(json), -1;
    cJSON_AddStringToObject(json, "model", config->name);
    cJSON_AddStringToObject(json, "hardware", run->hardware.name);
    cJSON_AddNumberToObject(json, "s", o->prompt_len[1]);
    cJSON_AddNumberToObject(json, "n", o->gen_len[1]);
    if (out)
        print_json(out, json);
    else
        cJSON_Delete(json);
    if (out != stdout)
        printf("%s, s %d, n %d, on: %s\n", config->name, o->prompt_len[1], o->gen_len[1], run->hardware.name);
    return out ? close_output(out, "--json", o->json, err) : 0;
}

static int paper_policy(Run *run, const Options *o, const OptConfig *config, Error *err) {
    Cost cost;
    const Block block = {o->prompt_len[1], o->gen_len[1], o->policy.gbs, o->policy.num_gpu_batches};
    if (check_lengths(o, config, err) || hardware_read(&run->hardware, o->hardware, err) ||
        paper_cost(&cost, &run->hardware, config, &block, err) ||
        say_policy(o, config, run, paper_json(&cost, &block), err))
        return -1;
    if (!o->json || strcmp(o->json, "-")) print_paper(&cost, &block, &run->hardware);
    return 0;
}

/* What --hardware says, or this machine. */
static int choose_machine(Run *run, Options *o, const Checkpoint *checkpoint, Error *err) {
    if (o->hardware) {
        if (hardware_read(&run->hardware, o->hardware, err)) return -1;
        slow_links(&run->hardware, o->link);
        run->sim = true; /* nothing runs: as for the sim, its file says it all */
    } else if (choose_device(run, o, &checkpoint->config, err)) {
        return -1;
    }
    o->threads = host_set_threads(o->threads);
    return fill_capacities(o, run->gpu, run->sim ? &run->hardware : NULL, checkpoint, err) ||
           know_machine(run, o, &checkpoint->config, err);
}

/* One machine, the pipeline, the chain without offloading. */
static int cluster_policy(Run *run, const Options *o, const Checkpoint *checkpoint, const Search *search, Error *err) {
    const Cluster alone = {.nodes = 1}, many = {o->nodes, o->net_gbps * 1e9 / 8, o->net_ms / 1000};
    ClusterCost one, pipeline, chain;
    Error too_small;
    if (cluster_search(&one, search, &alone, true, err) || cluster_search(&pipeline, search, &many, true, err)) return -1;
    bool chained = cluster_search(&chain, search, &many, false, &too_small) == 0;
    cJSON *json = cJSON_CreateObject();
    add_cluster(json, "one", &one);
    add_cluster(json, "pipeline", &pipeline);
    if (chained) add_cluster(json, "chain", &chain);
    if (say_policy(o, &checkpoint->config, run, json, err)) return -1;
    if (o->json && !strcmp(o->json, "-")) return 0;
    char name[64];
    printf("%-34s %-10s %-37s %9s %11s %11s %11s %11s\n", "", "block", "    wg    wc    cg    cc    hg    hc",
           "prefill (s)", "a token (s)", "block (s)", "token/s", "decoding");
    print_cluster("1 machine", &one);
    snprintf(name, sizeof name, "%d machines, pipeline", o->nodes);
    print_cluster(name, &pipeline);
    snprintf(name, sizeof name, "%d machines, without offloading", o->nodes);
    if (chained)
        print_cluster(name, &chain);
    else
        printf("%s: it does not fit; %d would hold one sequence\n", name, cluster_least(search));
    return 0;
}

/* What is expected of the policy that the flags give in full; the best ten; the frontier. */
static int find_policies(Found *found, int most, const Options *o, Search *search, Error *err) {
    enum { TEN = 10 };
    if (o->frontier) return policy_frontier(found, most, search, err);
    if (!all_given(search)) return policy_search(found, TEN, search, err);
    if (table_home(&search->given, search->checkpoint, search->task, search->act_type, search->capacity, err)) return -1;
    return policy_predict(found, search, err) ? -1 : 1;
}

static int runtime_policy(Run *run, Options *o, const Checkpoint *checkpoint, Error *err) {
    enum { MOST = 64 };
    bool one_block;
    Found found[MOST];
    int count = bench_count(&one_block, o, &checkpoint->config, err), n;
    if (count < 0 || choose_machine(run, o, checkpoint, err) || settle_compression(o, checkpoint, err)) return -1;
    Task task = bench_task(o, count);
    Search search = search_for(o, &run->hardware, act_type(run), checkpoint, &task, one_block);
    n = o->nodes ? cluster_policy(run, o, checkpoint, &search, err) : find_policies(found, MOST, o, &search, err);
    free_prompts(&task);
    if (n < 0 || o->nodes) return n;
    if (say_policy(o, &checkpoint->config, run, found_json(o->frontier ? "frontier" : "best", found, n), err)) return -1;
    if (!o->json || strcmp(o->json, "-")) print_found(found, n);
    return 0;
}

static int policy_with(Options *o, const Checkpoint *checkpoint, Error *err) {
    Run run = {0};
    int status =
        paper_model(o) ? paper_policy(&run, o, &checkpoint->config, err) : runtime_policy(&run, o, checkpoint, err);
    run_close(&run);
    return status;
}

static int policy(Options *o, Error *err) {
    Checkpoint *checkpoint = open_model(o, err);
    int status = checkpoint ? policy_with(o, checkpoint, err) : -1;
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------

// ---------------------------------------------------------------------------------------------------------------
// flexgen profile
// ---------------------------------------------------------------------------------------------------------------

static int profile_with(Run *run, Options *o, const OptConfig *config, Error *err) {
    const OptConfig any = {.h1 = 1, .nh = 1};
    const Checkpoint none = {.nfiles = 0};
    const char *to = o->output ? o->output : "-";
    if (choose_device(run, o, config ? config : &any, err) || fill_capacities(o, run->gpu, NULL, &none, err)) return -1;
    const ProfileSize size = profile_size(run->gpu, config);
    o->threads = host_set_threads(o->threads);
    FILE *out = open_output("--output", to, err);
    if (!out) return -1;
    if (profile_measure(&run->hardware, &size, run->gpu, o->offload_dir, o->threads, o->capacity, stderr, err)) return -1;
    profile_keep(&run->hardware, &size, run->gpu, o->offload_dir, o->threads);
    profile_write(&run->hardware, out);
    return close_output(out, "--output", to, err);
}

/* Measures the machine anew, at a model's shapes if one is named, keeps that for later runs, and writes it. */
static int profile(Options *o, Error *err) {
    Run run = {.gpu = NULL};
    Checkpoint *checkpoint = o->model ? open_model(o, err) : NULL;
    int status = o->model && !checkpoint ? -1 : profile_with(&run, o, checkpoint ? &checkpoint->config : NULL, err);
    run_close(&run);
    checkpoint_close(checkpoint);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen quantize
// ---------------------------------------------------------------------------------------------------------------

static int quantize(Options *o, Error *err) {
    const size_t shard_bytes = 5000000000; /* as others cut large checkpoints */
    CopyStats stats;
    if (checkpoint_quantize(&stats, o->model, o->output, o->quant, shard_bytes, host_set_threads(o->threads),
                            isatty(STDERR_FILENO) ? stderr : NULL, err))
        return -1;
    fprintf(stderr, "%.2f MB packed to %.2f MB, %d file%s in %s: %.2f bits a weight, %.2f in the matrices of the layers\n",
            stats.before / 1e6, stats.after / 1e6, stats.files, stats.files > 1 ? "s" : "", o->output, stats.bits,
            stats.packed_bits);
    return 0;
}

// flexgen eval
// ---------------------------------------------------------------------------------------------------------------

static cJSON *eval_json(const Options *o, const Eval *eval, const Run *run) {
    const EvalResult r = eval_result(eval);
    const RunStats *t = &run->stats;
    const Figure text[] = {{"perplexity", r.perplexity},       {"nll", r.nll},
                           {"bits_per_byte", r.bits_per_byte}, {"tokens", (double)eval->tokens},
                           {"windows", eval->task.count},      {"window", eval->window}};
    const Figure words[] = {
        {"last_word_accuracy", r.accuracy}, {"perplexity", r.word_perplexity}, {"lines", eval->task.count}};
    const Figure times[] = {{"sweeps", (double)t->sweeps},
                            {"T", t->total_s},
                            {"prefill_s", t->prefill_s},
                            {"decode_s", t->decode_s},
                            {"total_s", t->total_s}};
    cJSON *json = cJSON_CreateObject();
    if (o->perplexity)
        add_figures(json, text, sizeof text / sizeof *text);
    else
        add_figures(json, words, sizeof words / sizeof *words);
    cJSON_AddStringToObject(json, "model", run->plan->config.name);
    cJSON_AddStringToObject(json, "device", run->device->name);
    add_policy(json, &o->policy);
    add_figures(json, times, sizeof times / sizeof *times);
    return json;
}

static void print_eval(const Options *o, const Eval *eval, const Run *run) {
    const EvalResult r = eval_result(eval);
    if (o->perplexity)
        printf("perplexity %.4f, %.4f bits per byte: %ld tokens in %d windows of %d\n", r.perplexity, r.bits_per_byte,
               eval->tokens, eval->task.count, eval->window);
    else
        printf("last word: accuracy %.4f, perplexity %.4f: %d lines\n", r.accuracy, r.word_perplexity, eval->task.count);
    printf("%.2f s; ", run->stats.total_s);
    print_policy(stdout, o, run);
}

/* The texts are read; --json is opened before the run. */
static int eval_run(Options *o, const Checkpoint *checkpoint, Eval *eval, Run *run, Error *err) {
    if (plan_task(run, o, checkpoint, &eval->task, false, err)) return -1;
    if (o->verbose) plan_print(stderr, run->plan, o->capacity, NULL);
    FILE *json = o->json ? open_output("--json", o->json, err) : NULL;
    if (o->json && !json) return -1;
    Listener listener = eval_listener(eval);
    int status = run_task(run, o, checkpoint, &eval->task, &listener, err);
    progress_clear(&eval->progress);
    if (!status) {
        if (o->verbose) print_peaks(run, o);
        if (run->predicted) print_prediction(run);
        if (json) print_json(json, eval_json(o, eval, run));
        if (json != stdout) print_eval(o, eval, run);
    }
    Error unwritten;
    if (json && close_output(json, "--json", o->json, &unwritten) && !status) *err = unwritten, status = -1;
    return status;
}

static int eval_with(Options *o, const Checkpoint *checkpoint, const Tokenizer *tokenizer, Error *err) {
    Eval eval = {.stepwise = o->compress_cache || is_sparse(&o->policy), .progress.on = isatty(STDERR_FILENO)};
    Run run = {0};
    int status = o->perplexity ? eval_text(&eval, o->perplexity, o->window, o->limit, tokenizer, &checkpoint->config, err)
                               : eval_lines(&eval, o->last_word, o->limit, tokenizer, &checkpoint->config, err);
    if (!status) status = eval_run(o, checkpoint, &eval, &run, err);
    run_close(&run);
    eval_free(&eval);
    return status;
}

static int eval(Options *o, Error *err) { return with_model(o, eval_with, err); }

// ---------------------------------------------------------------------------------------------------------------

static const struct {
    const char *name;
    char letter; /* in Flag.commands */
    int (*run)(Options *, Error *);
} commands[] = {{"generate", 'g', generate}, {"bench", 'b', bench},       {"policy", 'p', policy},
                {"profile", 'm', profile},   {"quantize", 'q', quantize}, {"eval", 'e', eval}};

static const char *command_name(char letter) {
    int c = 0;
    while (commands[c].letter != letter) c++;
    return commands[c].name;
}

/* A closed standard stream would lend its number to the next file opened, and our results would go there. */
static void open_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) exit(EXIT_FAILED);
}

static int run_command(Options *o, int argc, char **argv, Error *err) {
    int n = sizeof commands / sizeof commands[0], c = 0;
    if (!strcmp(argv[1], "help") || !strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return usage(stdout), 0;
    while (c < n && strcmp(argv[1], commands[c].name)) c++;
    if (c == n)
        return fail(err, EXIT_USAGE,
                    "unknown command %.60s; the commands are generate, bench, policy, profile, quantize, eval and help",
                    argv[1]);
    if (parse_flags(o, commands[c].letter, argv + 2, argc - 2, err)) return -1;
    if (o->help) return usage(stdout), 0;
    return check_options(o, commands[c].letter, err) ? -1 : commands[c].run(o, err);
}

int main(int argc, char **argv) {
    const char *tmp = getenv("TMPDIR");
    Options o = {.max_tokens = 64,
                 .prompt_len = {512, 512},
                 .gen_len = {32, 32},
                 .net_gbps = 10,
                 .net_ms = .1,
                 .offload_dir = tmp && *tmp ? tmp : "/var/tmp",
                 .capacity = {FROM_MACHINE, FROM_MACHINE, FROM_MACHINE},
                 .sampling = {.top_p = 1},
                 .quant = {4, 64},
                 .policy = {.schedule = SCHEDULE_ZIGZAG, .overlap = true, .page_tokens = 16}};
    Error err = {0}, unwritten;
    signal(SIGPIPE, SIG_IGN); /* a closed pipe or a limit on file sizes is a failed write, said in one line */
    signal(SIGXFSZ, SIG_IGN);
    open_standard_streams();
    if (argc < 2) return usage(stderr), EXIT_USAGE;
    int status = run_command(&o, argc, argv, &err);
    if (!status && close_output(stdout, "standard", "output", &unwritten)) err = unwritten, status = -1;
    free(o.prompt.text), free(o.stop.text);
    if (status) fprintf(stderr, "flexgen: %s\n", err.text);
    return status ? err.code : EXIT_OK;
}
