/* flags.c: reads the command line.
 *
 * One table has every flag: which commands know it, how many values it takes, which function reads
 * them into which field of Options, and its line of the help text. When all flags are read,
 * flags_check looks for combinations that do not go together. A wrong use ends with status 2 and
 * one line that says what was expected.
 * Read next: report.c. */
#include <dirent.h>
#include <fnmatch.h>
#include <math.h>
#include <unistd.h>

#include "app/app.h"

#define VERSION "0.9"

/* In the table of flags and in the help text, a letter stands for each command. */
static const struct {
    char letter;
    const char *name, *use, *does;
} commands[NCOMMANDS] = {
    [GENERATE] = {'g', "generate", "--model DIR (--prompt TEXT | --prompts FILE|-)",
                  "completions as JSON lines"},
    [BENCH] = {'b', "bench", "--model NAME|DIR", "measured throughput"},
    [POLICY] = {'p', "policy", "--model NAME|DIR", "the best policies, and what they promise"},
    [PROFILE] = {'m', "profile", "", "this machine as a hardware file"},
    [QUANTIZE] = {'q', "quantize", "--model DIR --output DIR", "a 4-bit copy of a checkpoint"},
    [EVAL] = {'e', "eval", "--model DIR (--perplexity | --last-word | --score) FILE",
              "how probable a text is"},
};

// -------------------------------------------------------------------------------------------------
// Values
// -------------------------------------------------------------------------------------------------

/* The values of a flag on the command line. */
typedef struct {
    const struct Flag *flag;
    void *to; /* the field to which they go; Options, if that is not one field */
    char **text;
} Given;

typedef struct Flag {
    const char *name, *commands; /* letters of the commands that know it */
    int values;                  /* number of values that it takes */
    /* Reads the values, and writes them to the field. Returns false if one is not as expected, and
     * leaves that one in text[0]. */
    bool (*set)(Given given);
    size_t at, bytes;     /* the field of Options */
    double low, high;     /* bounds of a number */
    const char *expected; /* what a value has to be, in which %f or %g stand for the bounds */
    const char *help;
} Flag;

static bool set_text(Given g) {
    *(const char **)g.to = g.text[0];
    return true;
}

/* Stores "-" for standard output, which has many names, such as /dev/stdout: opened anew, it would
 * be written from its beginning. */
static bool set_output(Given g) {
    bool is_standard = file_identity(g.text[0]) == file_identity("/dev/stdout");
    *(const char **)g.to = is_standard ? "-" : g.text[0];
    return *g.text[0];
}

/* Stores the name of a machine's file. One that is not there is looked for beside the program,
 * where `make install` puts hardware/. */
static bool set_machine(Given g) {
    static char beside[MAX_PATH];
    const char *file = g.text[0];
    set_text(g);
    program_file(beside, "");
    char *name = strrchr(beside, '/');
    if (!name || *file == '/' || !access(file, F_OK))
        return true;
    snprintf(name, beside + MAX_PATH - name, "/%s", file);
    if (!access(beside, F_OK))
        *(const char **)g.to = beside;
    return true;
}

static bool add_text(Given g) {
    Texts *list = g.to;
    list->text = with_room(list->text, list->n, sizeof *list->text);
    list->text[list->n++] = g.text[0];
    return true;
}

static bool set_format(Given g) {
    set_text(g);
    return has_word(" jsonl text openai ", g.text[0]);
}

/* Stores the flag's constant, which stands in its upper bound. */
static bool set_bool(Given g) {
    *(bool *)g.to = g.flag->high > 0;
    return true;
}

/* Stores a whole number in a field of 16, 32 or 64 bits. */
static bool set_whole(Given g) {
    char *end;
    long value = strtol(g.text[0], &end, 10);
    if (end == g.text[0] || *end || value < g.flag->low || value > g.flag->high)
        return false;
    memcpy(g.to, &value, g.flag->bytes); /* the low bytes are the first */
    return true;
}

/* Reads "512", or "16-512" for lengths between the two. */
static bool set_range(Given g) {
    int *range = g.to, len = 0;
    long low, high;
    int n = sscanf(g.text[0], "%ld%n-%ld%n", &low, &len, &high, &len);
    if (n == 1)
        high = low;
    if (n < 1 || g.text[0][len] || low < g.flag->low || high < low || high > g.flag->high)
        return false;
    range[0] = low;
    range[1] = high;
    return true;
}

/* Stores a number in a float or a double. */
static bool set_number(Given g) {
    char *end;
    double value = strtod(g.text[0], &end);
    if (g.flag->bytes == sizeof(float))
        *(float *)g.to = value;
    else
        *(double *)g.to = value;
    return end > g.text[0] && !*end && value >= g.flag->low && value <= g.flag->high; /* no NaN */
}

static bool set_percent(Given g) {
    Options *o = g.to;
    double *share = o->policy.share;
    for (int i = 0; i < 6; i++) {
        o->fixed[i] = strcmp(g.text[i], "-") != 0;
        share[i] = 0;
        if (o->fixed[i] && !set_number((Given){g.flag, &share[i], &g.text[i]})) {
            g.text[0] = g.text[i];
            return false;
        }
        share[i] /= 100;
    }
    return true;
}

static bool set_schedule(Given g) {
    Options *o = g.to;
    o->fixed_schedule = true;
    for (int i = SCHEDULE_ZIGZAG; i <= SCHEDULE_DIAGONAL; i++)
        if (!strcmp(g.text[0], schedule_name[i])) {
            o->policy.schedule = i;
            return true;
        }
    return false;
}

static bool set_cost_model(Given g) {
    bool *paper = g.to;
    *paper = !strcmp(g.text[0], "paper");
    return *paper || !strcmp(g.text[0], "runtime");
}

/* Reads a number and an optional unit K, M, G or T, which are powers of `thousand`. Sets *end
 * behind both. Returns NaN if there is no number. */
static double with_unit(const char *text, char **end, double thousand) {
    static const char units[] = "KkMmGgTt";
    double value = strtod(text, end);
    if (*end == text)
        return NAN;
    const char *unit = **end ? strchr(units, **end) : NULL;
    if (!unit)
        return value;
    ++*end;
    return value * pow(thousand, 1 + (unit - units) / 2);
}

/* Reads "16G", "512M", "1.5G" or "4096"; units are powers of 1024. */
static bool set_size(Given g) {
    char *end;
    double value = with_unit(g.text[0], &end, 1024);
    if (*end || !(value >= 0 && value < 1e18))
        return false;
    *(Bytes *)g.to = value;
    return true;
}

static bool is_rate(double bytes_s) { return bytes_s >= 1 && bytes_s < 1e15; }

/* Reads "1G,0.5ms": bytes/s with powers of 1000, and a delay. */
static bool set_wire(Given g) {
    Options *o = g.to;
    char *at;
    double delay = 0;
    int len = 0;
    o->wire_bytes_s = with_unit(g.text[0], &at, 1000);
    bool delayed = sscanf(at, ",%lfms%n", &delay, &len) == 1 && len && !at[len];
    o->wire_delay_s = delay / 1000;
    return is_rate(o->wire_bytes_s) && (!*at || delayed) && delay >= 0 && delay < 1e6;
}

/* Reads "ctog=1G,dtoc=0.5G". */
static bool set_links(Given g) {
    Options *o = g.to;
    o->links = true;
    for (char *at = g.text[0];; at++) {
        char name[8] = "";
        int c = CTOG, len = 0;
        sscanf(at, "%7[a-z]=%n", name, &len);
        while (c <= CTOD && strcmp(name, channel_name[c]) != 0)
            c++;
        double rate = len && c <= CTOD ? with_unit(at + len, &at, 1000) : NAN;
        if (!is_rate(rate) || (*at && *at != ','))
            return false;
        o->link[c] = rate;
        if (!*at)
            return true;
    }
}

// -------------------------------------------------------------------------------------------------
// The flags
// -------------------------------------------------------------------------------------------------

#define AT(name) offsetof(Options, name), sizeof(((Options *)0)->name)
#define TEXT(field) 1, set_text, AT(field), 0, 0, NULL
#define OUTPUT(field) 1, set_output, AT(field), 0, 0, "a name"
#define LIST(field) 1, add_text, AT(field), 0, 0, NULL
#define WHOLE(field, low, high) \
    1, set_whole, AT(field), low, high, "a whole number from %.0f to %.0f"
#define RANGE(field) \
    1, set_range, AT(field), 1, MAX_LEN, "a whole number from %.0f to %.0f, or two such as 16-512"
#define NUMBER(field, low, high) 1, set_number, AT(field), low, high, A_NUMBER
#define A_NUMBER "a number from %g to %g"
#define SIZE(field) 1, set_size, AT(field), 0, 0, "a size such as 16G, 512M or 4096"
#define SWITCH(field) 0, set_bool, AT(field), 0, true, NULL
enum { MAX_GBS = 1 << 20, MAX_LEN = 1 << 24 };
static const Flag flags[] = {
    /* in the order of the help text */
    {"--model", "gbpmqe", TEXT(model),
     "DIR: a Hugging Face directory; bench, policy and profile also take a name, opt-125m to "
     "opt-175b"},
    {"--prompt", "g", LIST(prompt), "TEXT: a prompt; may be repeated"},
    {"--prompts", "g", TEXT(prompts),
     "FILE: JSON lines {\"id\", \"prompt\", \"max_tokens\", \"stop\", \"temperature\", \"top_p\", "
     "\"top_k\", \"seed\"}, OpenAI's batch lines, or plain lines; - is standard input"},
    {"--output", "gmqe", OUTPUT(output),
     "FILE: completions or scores as JSON lines, or the machine (-, standard output); DIR: the "
     "copy that quantize makes"},
    {"--resume", "ge", SWITCH(resume),
     "go on with the job whose output FILE is, if it has not ended"},
    {"--overwrite", "ge", SWITCH(overwrite), "lose what is in FILE"},
    {"--format", "g", 1, set_format, AT(format), 0, 0, "jsonl, text or openai",
     "jsonl or text: what the lines of --prompts are (as the name or the first line says); openai: "
     "JSON, and the completions are lines of an OpenAI batch's output"},
    {"--strict", "g", SWITCH(strict),
     "refuse the whole job if one of its prompts cannot be completed"},
    {"--truncate", "g", SWITCH(truncate),
     "of a prompt that leaves no room for its tokens, take the last tokens only"},
    {"--max-tokens", "g", WHOLE(max_tokens, 1, 1000000000),
     "N: tokens to generate where the prompt does not say (64)"},
    {"--prompt-len", "bp", RANGE(prompt_len),
     "S: tokens of every prompt (512); bench also S1-S2: drawn between the two"},
    {"--gen-len", "bp", RANGE(gen_len), "N: tokens to generate (32); bench also N1-N2"},
    {"--num-prompts", "bp", WHOLE(num_prompts, 1, MAX_GBS), "N: prompts (one block of them)"},
    {"--perplexity", "e", TEXT(perplexity), "FILE: a text, scored in windows; - is standard input"},
    {"--last-word", "e", TEXT(last_word), "FILE: JSON lines {\"text\"} whose last word is scored"},
    {"--score", "e", TEXT(score),
     "FILE: JSON lines {\"id\", \"prompt\", \"completion\"}, whose completions are scored; - is "
     "standard input"},
    {"--window", "e", WHOLE(window, 2, MAX_LEN), "N: tokens of a window (the model's positions)"},
    {"--limit", "e", WHOLE(limit, 1, MAX_LEN), "N: the first N windows or lines only (all)"},
    {"--json", "bpe", OUTPUT(json), "FILE: the figures as one JSON object; - is standard output"},
    {"--percent", "gbpe", 6, set_percent, 0, sizeof(double), 0, 100, A_NUMBER,
     "WG WC CG CC HG HC: weights, KV cache, activations on GPU and on CPU; the disk has the rest; "
     "- is left to the search"},
    {"--gpu-batch-size", "gbpe", WHOLE(policy.gbs, 1, MAX_GBS), "N: sequences of a GPU batch"},
    {"--num-gpu-batches", "gbpe", WHOLE(policy.num_gpu_batches, 1, 1 << 16),
     "N: GPU batches of a block"},
    {"--schedule", "gbpe", 1, set_schedule, 0, 0, 0, 0, "row, zigzag or diagonal",
     "zigzag (Figure 3b), row (Figure 3a) or diagonal (Figure 6); the best, or with a given policy "
     "zigzag"},
    {"--cpu-cache-compute", "gbpe", SWITCH(policy.delegated),
     "the CPU attends to the KV cache on CPU and disk, in place"},
    {"--compress-weight", "gbpe", SWITCH(compress_weight),
     "4-bit groups for the layers' matrices, on every tier"},
    {"--compress-head", "gbpqe", SWITCH(compress_head),
     "4-bit groups for the output head and the token table, too"},
    {"--compress-cache", "gbpe", SWITCH(compress_cache),
     "4-bit groups for the KV cache, on every tier"},
    {"--bits", "qe", WHOLE(quant.bits, LEAST_BITS, MOST_BITS),
     "B: of a compressed number (4; others are a study: eval rounds numbers so, and keeps them as "
     "F16)"},
    {"--group", "qe", WHOLE(quant.group, LEAST_GROUP, MOST_GROUP),
     "G: numbers that share a minimum and a scale (64; others are a study)"},
    {"--allow-compression", "gbp", SWITCH(allow_compression),
     "the search may compress weights and cache where that is faster"},
    {"--attn-sparsity", "gbpe", NUMBER(policy.sparsity, 1e-6, 1),
     "F: read V of this share of the tokens, those with the largest scores (1); the CPU attends to "
     "what is off the GPU"},
    {"--no-overlap", "gbpe", 0, set_bool, AT(policy.overlap), 0, false, NULL,
     "wait for every operation at once"},
    {"--synchronize", "gbpe", SWITCH(policy.synchronize),
     "wait for all lanes behind every square, as Figure 4 does"},
    {"--no-graph", "gbe", SWITCH(no_graph),
     "launch every kernel of the GPU by itself, as in a trace and with several batches; not many "
     "together as a CUDA graph"},
    {"--page-tokens", "gbpe", WHOLE(policy.page_tokens, 1, 4096), "N: tokens of a KV page (16)"},
    {"--device", "gbpme", TEXT(device),
     "host, cuda (the GPU, if there is one), or for bench sim, a machine made of numbers"},
    {"--hardware", "gbpe", 1, set_machine, AT(hardware), 0, 0, NULL,
     "FILE: the machine that the policy is for or the sim plays (this one, measured); such as "
     "hardware/t4.json, also from beside the program"},
    {"--with", "gbpe", LIST(with),
     "KEY=NUMBER: of that machine, in place of the file's, such as ctog_bdw=24e9; may be repeated"},
    {"--cost-model", "p", 1, set_cost_model, AT(paper_model), 0, 0, "runtime or paper",
     "runtime: what this program does (the default); paper: Appendix A.3 as printed"},
    {"--max-latency", "gbp", NUMBER(max_latency, 1e-6, 1e12), "SECONDS: that one block may take"},
    {"--no-rehearsal", "gbp", SWITCH(no_rehearsal),
     "take the policy that is predicted to be the best, without playing the best few on the sim"},
    {"--frontier", "p", SWITCH(frontier), "the best throughput for every latency (Figure 1)"},
    {"--explain", "p", SWITCH(explain),
     "the best policy's linear program, what each row's limit is worth (dual prices), and what "
     "more would bring"},
    {"--nodes", "bp", WHOLE(nodes, 1, 10000),
     "M: machines, as a pipeline (4.4) and without offloading (6.4); bench: a pipeline of M sims"},
    {"--net-gbps", "p", NUMBER(net_gbps, 1e-6, 1e6), "G: Gbit/s between two of them (10)"},
    {"--net-ms", "p", NUMBER(net_ms, 0, 1e6), "L: milliseconds that a message takes besides (0.1)"},
    {"--net", "gbe", 1, set_wire, 0, 0, 0, 0, "bytes a second and a delay such as 1G,0.5ms",
     "RATE[,DELAY]: slow the wire of a pipeline (mpirun), or the sims' (1.25G,0.1ms): 1G,0.5ms "
     "(bytes/s)"},
    {"--stages", "gbe", TEXT(stages), "L,L,...: layers of each stage of a pipeline (equally many)"},
    {"--flights", "gbpe", WHOLE(policy.flights, 1, 256),
     "G: blocks in flight in turn (a pipeline searches for it; m + 1 for a given block)"},
    {"--link", "gbpe", 1, set_links, 0, 0, 0, 0,
     "links and bytes a second such as ctog=1G,gtoc=1G,dtoc=0.5G",
     "LIST: slow links of the host device: ctog=1G,gtoc=1G,dtoc=0.5G,ctod=0.5G (bytes/s)"},
    {"--trace", "gbe", OUTPUT(trace),
     "FILE: what each lane did when, for chrome://tracing or Perfetto"},
    {"--gpu-mem", "gbpme", SIZE(capacity[TIER_GPU]), "SIZE: capacity of the GPU tier, such as 16G"},
    {"--cpu-mem", "gbpme", SIZE(capacity[TIER_CPU]), "SIZE: of the CPU tier"},
    {"--disk-mem", "gbpme", SIZE(capacity[TIER_DISK]), "SIZE: of the disk tier"},
    {"--offload-dir", "gbpme", TEXT(offload_dir),
     "DIR: where the disk tier's file is (TMPDIR, or /var/tmp)"},
    {"--threads", "gbpmqe", WHOLE(threads, 1, 1024),
     "N: threads that compute (all cores; with a GPU two fewer)"},
    {"--temperature", "g", NUMBER(sampling.temperature, 0, 1e6),
     "T: of sampling; 0 is greedy (the default)"},
    {"--top-p", "g", NUMBER(sampling.top_p, 1e-6, 1),
     "P: with a temperature, sample from the likeliest tokens with together this mass (1)"},
    {"--top-k", "g", WHOLE(sampling.top_k, 0, MAX_LEN),
     "K: with a temperature, from the K likeliest tokens (0: all)"},
    {"--seed", "gb", WHOLE(sampling.seed, 0, 0x1p62),
     "N: of sampling, and of bench's prompts and weights (0)"},
    {"--stop", "g", LIST(stop), "TEXT: end a completion before it; may be repeated"},
    {"--verbose", "ge", SWITCH(verbose),
     "print the plan, and the measured peaks beside it (bench always does)"},
    {"--help", "gbpmqe", SWITCH(help), "this text"},
    {"--version", "gbpmqe", SWITCH(version), "the version, and the devices that are built in"},
    {0},
};

Options options_default(void) {
    const char *tmp = getenv("TMPDIR");
    return (Options){.max_tokens = 64,
                     .prompt_len = {512, 512},
                     .gen_len = {32, 32},
                     .net_gbps = 10,
                     .net_ms = .1,
                     .offload_dir = tmp && *tmp ? tmp : "/var/tmp",
                     .capacity = {FROM_MACHINE, FROM_MACHINE, FROM_MACHINE},
                     .sampling = {.temperature = -1, .top_p = 1},
                     .quant = {4, GROUP},
                     .policy = {.schedule = SCHEDULE_ZIGZAG, .overlap = true, .page_tokens = 16}};
}

void flags_help(FILE *out) {
    fprintf(out, "FlexGen: generates text from OPT models that do not fit the GPU.\n\n");
    for (int c = 0; c < NCOMMANDS; c++)
        fprintf(out, "  flexgen %-8s %-46s   %s\n", commands[c].name, commands[c].use,
                commands[c].does);
    fprintf(out, "\n");
    for (const Flag *f = flags; f->name; f++)
        fprintf(out, "  %-20s%-6s %s\n", f->name, f->commands, f->help);
    fprintf(out, "\n");
    for (int c = 0; c < NCOMMANDS; c++)
        fprintf(out, "%s%c: of %s", c ? ", " : "", commands[c].letter, commands[c].name);
    fprintf(out, ". Exit status: 0 done, 1 failed, 2 wrong use or does not fit.\n");
}

/* Returns true if the library of that suffix lies beside the program. */
static bool has_library(const char *suffix) {
    char path[MAX_PATH];
    program_file(path, suffix);
    return !access(path, F_OK);
}

void flags_version(FILE *out) {
    fprintf(out, "flexgen %s\ndevices: host (%s), sim%s\npipelines: sim%s\n", VERSION, host_isa(),
            has_library("_cuda.so") ? ", cuda" : "", has_library("_mpi.so") ? ", MPI" : "");
}

// -------------------------------------------------------------------------------------------------
// Reading the flags
// -------------------------------------------------------------------------------------------------

/* Returns the Levenshtein distance between a text and a flag's name, for "did you mean". */
static int edit_distance(const char *a, const char *name) {
    int n = strlen(name), row[128];
    for (int c = 0; c <= n; c++)
        row[c] = c;
    for (int r = 0; a[r] && r < 100; r++) {
        int diagonal = row[0];
        row[0] = r + 1;
        for (int c = 0; c < n; c++) {
            int swap = diagonal + (a[r] != name[c]);
            diagonal = row[c + 1];
            row[c + 1] = imin(swap, imin(row[c], diagonal) + 1);
        }
    }
    return row[n];
}

/* Refuses a flag of other commands, and names them. */
static int elsewhere(const Flag *flag, Error *err) {
    char who[64];
    size_t used = 0;
    for (int c = 0; c < NCOMMANDS; c++)
        if (strchr(flag->commands, commands[c].letter))
            used +=
                snprintf(who + used, sizeof who - used, "%s%s", used ? ", " : "", commands[c].name);
    return fail(err, EXIT_USAGE, "%s is a flag of %s only; leave it out", flag->name, who);
}

static int unknown_flag(const char *name, Command command, Error *err) {
    const char *nearest = NULL;
    int least = 1000;
    if (*name != '-')
        return fail(err, EXIT_USAGE,
                    "%.60s: expected a flag; put a value that has blanks into quotes", name);
    for (const Flag *f = flags; f->name; f++) {
        int distance = edit_distance(name, f->name);
        if (!distance)
            return elsewhere(f, err);
        if (strchr(f->commands, commands[command].letter) && distance < least) {
            least = distance;
            nearest = f->name;
        }
    }
    return fail(err, EXIT_USAGE, "unknown flag %.60s; the nearest known one is %s", name, nearest);
}

int command_parse(Command *command, const char *name, Error *err) {
    for (*command = 0; *command < NCOMMANDS; ++*command)
        if (!strcmp(name, commands[*command].name))
            return 0;
    return fail(err, EXIT_USAGE,
                "unknown command %.60s; the commands are generate, bench, policy, profile, "
                "quantize, eval and help",
                name);
}

const char *const placed_name[3] = {"weights", "KV cache", "activations"};

/* Checks that no more than everything is on GPU and CPU. */
static int check_percent(const Policy *p, Error *err) {
    for (int i = 0; i < 3; i++) {
        double sum = p->share[2 * i] + p->share[2 * i + 1];
        if (sum > 1 + 1e-9) /* allows for the sum of two rounded numbers */
            return fail(err, EXIT_USAGE,
                        "--percent: %s on GPU and CPU add up to %g%%; at most 100%%",
                        placed_name[i], 100 * sum);
    }
    return 0;
}

/* Finds the flag of a command. */
static const Flag *find_flag(const char *name, Command command) {
    const Flag *f = flags;
    while (f->name &&
           (strcmp(name, f->name) != 0 || !strchr(f->commands, commands[command].letter)))
        f++;
    return f->name ? f : NULL;
}

/* Sets a flag's field to its values. `name` is the flag's for the user. */
static int set_flag(Options *o, const Flag *f, const char *name, char **values, Error *err) {
    char expected[100];
    if (!f->set((Given){f, (char *)o + f->at, values})) {
        snprintf(expected, sizeof expected, f->expected, f->low, f->high);
        return fail(err, EXIT_USAGE, "%s %.60s: expected %s", name, values[0], expected);
    }
    if (f->at >= offsetof(Options, model))
        return 0;
    o->digest = hash_text(o->digest, f->name);
    for (int i = 0; i < f->values; i++)
        o->digest = hash_text(o->digest, values[i]);
    return 0;
}

int option_set(Options *o, const char *flag, const cJSON *value, Error *err) {
    char text[100], *values = (char *)json_describe(text, value);
    return set_flag(o, find_flag(flag, GENERATE), value->string, &values, err);
}

int flags_parse(Options *o, Command command, char **args, int n, Error *err) {
    o->digest = HASH_START + command;
    for (int a = 0; a < n; a++) {
        char *equals = strchr(args[a], '=');
        if (equals)
            *equals++ = 0;
        const Flag *f = find_flag(args[a], command);
        if (!f)
            return unknown_flag(args[a], command, err);
        if (equals && !f->values)
            return fail(err, EXIT_USAGE, "%s takes no value; leave =%.60s out", f->name, equals);
        if (equals) /* the first value stands where the flag stood */
            args[a--] = equals;
        if (n - a - 1 < f->values)
            return fail(err, EXIT_USAGE, "%s takes %d value%s: %s", f->name, f->values,
                        plural(f->values), f->help);
        if (set_flag(o, f, f->name, args + a + 1, err))
            return -1;
        a += f->values;
    }
    return check_percent(&o->policy, err);
}

// -------------------------------------------------------------------------------------------------
// Flags that do not go together
// -------------------------------------------------------------------------------------------------

bool device_is(const Options *o, const char *name) { return o->device && !strcmp(o->device, name); }

/* A rule about flags, and the message to somebody who has broken it. */
typedef struct {
    bool broken;
    const char *message;
} Rule;

/* Refuses the first wrong use; the last rule has no message. */
static int check_rules(const Rule *rule, Error *err) {
    while (rule->message && !rule->broken)
        rule++;
    return rule->message ? fail(err, EXIT_USAGE, "%s", rule->message) : 0;
}

#define NO_MACHINE "--hardware is missing; name the machine's file, such as hardware/t4.json"

static bool is_range(const int lengths[2]) { return lengths[0] < lengths[1]; }

/* Checks a question for the cost model paper: Appendix A.3 knows one block of equal prompts on one
 * machine. */
static int check_paper(const Options *o, Error *err) {
#define BLOCK " is missing; give the block as --gpu-batch-size N --num-gpu-batches N"
#define LENGTH ": the cost model paper knows one length; give one number"
#define EXACT ": the cost model paper knows none; leave it out"
#define BEYOND ": the cost model paper looks at one block on one machine; leave it out"
    const Rule rules[] = {
        {!o->hardware, NO_MACHINE},
        {!o->policy.gbs, "--gpu-batch-size" BLOCK},
        {!o->policy.num_gpu_batches, "--num-gpu-batches" BLOCK},
        {is_range(o->prompt_len), "--prompt-len" LENGTH},
        {is_range(o->gen_len), "--gen-len" LENGTH},
        {memchr(o->fixed, true, sizeof o->fixed),
         "--percent: the cost model paper finds all of them; leave it out"},
        {is_sparse(&o->policy), "--attn-sparsity" EXACT},
        {o->compress_weight || o->compress_cache || o->allow_compression, "compression" EXACT},
        {o->frontier, "--frontier" BEYOND},
        {o->nodes, "--nodes" BEYOND},
        {o->max_latency > 0, "--max-latency" BEYOND},
        {o->no_rehearsal, "--no-rehearsal" BEYOND},
        {0}};
    return check_rules(rules, err);
}

/* Checks that a command has what it needs and a device that it knows, and its flags go together. */
static int check_uses(const Options *o, Command command, Error *err) {
#define GREEDY \
    ": without --temperature the likeliest token is always taken; add --temperature, such as 0.7"
    bool sim = device_is(o, "sim"), host = device_is(o, "host"),
         no_model = command != PROFILE && !o->model, copies = command == QUANTIZE,
         prints = !o->output || !strcmp(o->output, "-"), on_paper = o->nodes && command == POLICY,
         cold = command == GENERATE && o->sampling.temperature < 0, odd_stop = false;
    for (int i = 0; i < o->stop.n; i++) {
        const char *stop = o->stop.text[i];
        odd_stop |= !*stop || !utf8_valid(stop, strlen(stop));
    }
    if (o->device && !sim && !host && !device_is(o, "cuda"))
        return fail(err, EXIT_USAGE, "--device %.60s: expected host, cuda or sim", o->device);
    const Rule rules[] = {
        {sim && command != BENCH,
         "--device sim: it computes nothing, so only bench knows it; leave it out"},
        {sim && !o->hardware, "--device sim: " NO_MACHINE},
        {o->with.n && !o->hardware,
         "--with: changes a number of a machine's file; give --hardware FILE"},
        {o->links && o->device && !host,
         "--link: only links of the host device can be slowed; use --device host"},
        {no_model && (command == BENCH || command == POLICY),
         "--model is missing; name a checkpoint directory or a size such as opt-125m"},
        {no_model, "--model is missing; name a checkpoint directory"},
        {copies && !is_stored(o->quant),
         "--bits, --group: only 4 bits in groups of 64 are stored; leave them out, or see with "
         "eval "
         "what others would cost"},
        {o->compress_head && !copies && !(o->compress_weight && is_stored(o->quant)),
         "--compress-head: packs the head beside the matrices of the layers, in 4 bits and groups "
         "of 64; give --compress-weight, too, without --bits and --group"},
        {copies && prints, "--output is missing; name the directory that the copy is to be"},
        {command == GENERATE && !o->prompt.n == !o->prompts,
         "give either --prompt TEXT or --prompts FILE"},
        {command == EVAL && !!o->perplexity + !!o->last_word + !!o->score != 1,
         "give one of --perplexity FILE, --last-word FILE and --score FILE"},
        {command == EVAL && !o->score && (o->output || o->resume || o->overwrite),
         "--output, --resume, --overwrite: are about the lines of --score; leave them out"},
        {o->score && o->json, "--json: every score is a line of --output; leave it out"},
        {o->nodes && !sim && command == BENCH,
         "--nodes: machines made of numbers; give --device sim"},
        {o->explain && (o->nodes || o->frontier),
         "--explain: is about the best policy of one machine; leave --nodes and --frontier out"},
        {o->nodes && o->frontier, "--nodes: looks at one block; leave --frontier out"},
        {on_paper && o->num_prompts, "--nodes: looks at one block; leave --num-prompts out"},
        {on_paper && is_range(o->prompt_len),
         "--nodes: knows one length; give one number for --prompt-len"},
        {on_paper && is_range(o->gen_len),
         "--nodes: knows one length; give one number for --gen-len"},
        {o->window && !o->perplexity, "--window: a line is one by itself; leave it out"},
        {o->trace && !strcmp(o->trace, "-") && prints,
         "--trace: standard output has the other results; name a file"},
        {o->resume && o->overwrite, "--resume: keeps what --overwrite loses; give one of them"},
        {cold && o->sampling.top_p < 1, "--top-p" GREEDY},
        {cold && o->sampling.top_k, "--top-k" GREEDY},
        {cold && o->sampling.seed, "--seed" GREEDY},
        {odd_stop,
         "--stop: an empty text would end everything, and one that is not valid UTF-8 nothing; "
         "give another"},
        {0}};
    return check_rules(rules, err);
}

int flags_check(const Options *o, Command command, Error *err) {
    const Policy *p = &o->policy;
    if (check_uses(o, command, err) || (o->paper_model && check_paper(o, err)))
        return -1;
    if ((double)p->gbs * p->num_gpu_batches <= MAX_GBS)
        return 0;
    return fail(
        err, EXIT_USAGE,
        "--gpu-batch-size %d x --num-gpu-batches %d: expected a block of at most %d sequences",
        p->gbs, p->num_gpu_batches, MAX_GBS);
}

// -------------------------------------------------------------------------------------------------
// Files that do not go together
// -------------------------------------------------------------------------------------------------

/* Returns true if a file of the model has this identity. */
static bool is_of_model(const Options *o, uint64_t identity) {
    char file[MAX_PATH];
    Error unused;
    bool is = false;
    DIR *dir = o->model ? opendir(o->model) : NULL;
    for (const struct dirent *e; dir && !is && (e = readdir(dir));)
        is = (is_model_text(e->d_name) || !fnmatch("*.safetensors*", e->d_name, 0)) &&
             !file_path(file, o->model, e->d_name, &unused) && file_identity(file) == identity;
    if (dir)
        closedir(dir);
    return is;
}

int files_check(const Options *o, Command command, Error *err) {
    enum { NAMED = 4, RESULTS = 6, FILES = 11 };
    char journal[MAX_PATH];
    bool lasts = o->output && !output_is_special(o->output);
    if (lasts && file_beside(journal, o->output, ".journal", err))
        return -1;
    const struct {
        const char *flag, *path;
    } files[FILES] = {{"--trace", o->trace},
                      {"--json", o->json},
                      {"--output", o->output},
                      {"the journal of --output", lasts ? journal : NULL},
                      {"standard output", "/dev/stdout"},
                      {"standard error", "/dev/stderr"},
                      {"--prompts", o->prompts},
                      {"--hardware", o->hardware},
                      {"--perplexity", o->perplexity},
                      {"--last-word", o->last_word},
                      {"--score", o->score}};
    for (int r = 0; r < RESULTS; r++) {
        const char *flag = files[r].flag, *path = files[r].path;
        uint64_t identity = path && !output_is_special(path) ? file_identity(path) : 0;
        if (is_of_model(o, identity))
            return fail(err, EXIT_USAGE, "%s: is a file of the model; name another", flag);
        /* standard output and standard error may be one */
        for (int f = r < NAMED ? r + 1 : RESULTS; f < FILES; f++)
            if (identity && identity == file_identity(files[f].path))
                return fail(err, EXIT_USAGE, "%s: is the file of %s, too; name another", flag,
                            files[f].flag);
        /* a directory of quantize is looked at where it is made */
        if (path && r < NAMED && command != QUANTIZE && output_check(flag, path, err))
            return -1;
    }
    return 0;
}
