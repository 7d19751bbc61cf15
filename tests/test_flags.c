/* test_flags.c: the command line: each flag sets its own field and no other, from its lowest value to its highest; what
 * must not go together is refused by name. The suite `cli` has the same from outside. */
#include <unistd.h>

#include "tests.h"

enum { MOST = 20 };

static Error err;

static int count(char *const *args) {
    int n = 0;
    while (args[n]) n++;
    return n;
}
static int parse(Options *o, Command command, char *const *args) {
    err = (Error){0, ""};
    return flags_parse(o, command, (char **)args, count(args), &err);
}
#define ARGS(...) ((char *[]){__VA_ARGS__, NULL})

/* What the help text says of a flag, NULL behind the last: its name, and the letters of the commands that know it. */
static const char *flag_in_help(int i, char letters[10]) {
    static char *text, name[40];
    size_t len;
    if (!text) {
        FILE *out = open_memstream(&text, &len);
        flags_help(out);
        CHECK(fclose(out) == 0);
    }
    const char *at = text;
    for (i++; i && (at = strstr(at, "\n  --")); i--) at += 3;
    CHECK(!at || sscanf(at, "%39s %9s", name, letters) == 2);
    return at ? name : NULL;
}

// ---------------------------------------------------------------------------------------------------------------
// One flag
// ---------------------------------------------------------------------------------------------------------------

static char text[] = "a text"; /* the same one, so that pointers can be compared */
static char seen[100][40];     /* the flags that were tried */
static int nseen;

/* Stages of a pipeline may differ in what is each machine's own: where its files and its memory are, not what is done. */
static bool is_own(const char *flag) {
    static const char *const own[] = {"--model",    "--offload-dir", "--threads", "--gpu-mem", "--cpu-mem",
                                      "--disk-mem", "--hardware",    "--with",    "--device"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (!strcmp(flag, own[i])) return true;
    return false;
}

/* The fields are as the flag has to leave them, and all others as they are without it; but the digest changes with each
 * flag that must be the same on all stages. */
static void assert_sets(const Options *fields, Command command, char *const *args) {
    Options o, before = options_default();
    memcpy(&o, &before, sizeof o); /* with the bytes between its fields */
    CU_ASSERT_EQUAL(parse(&o, command, args), 0);
    CU_ASSERT_EQUAL(parse(&before, command, ARGS(NULL)), 0);
    CU_ASSERT_EQUAL(o.digest == before.digest, is_own(args[0]));
    o.digest = fields->digest;
    if (memcmp(&o, fields, sizeof o)) fprintf(stderr, "\n    %s sets something else\n", args[0]);
    CU_ASSERT_EQUAL(memcmp(&o, fields, sizeof o), 0);
    snprintf(seen[nseen++], sizeof *seen, "%s", args[0]);
}
#define SETS(command, setting, ...)                  \
    do {                                             \
        Options o, plain = options_default();        \
        memcpy(&o, &plain, sizeof o);                \
        setting;                                     \
        assert_sets(&o, command, ARGS(__VA_ARGS__)); \
    } while (0)

static void texts_and_files_set_their_field(void) {
    SETS(GENERATE, o.model = text, "--model", text);
    SETS(GENERATE, o.prompts = text, "--prompts", text);
    SETS(GENERATE, o.output = text, "--output", text);
    SETS(EVAL, o.perplexity = text, "--perplexity", text);
    SETS(EVAL, o.last_word = text, "--last-word", text);
    SETS(BENCH, o.stages = text, "--stages", text);
    SETS(BENCH, o.json = text, "--json", text);
    SETS(BENCH, o.device = text, "--device", text);
    SETS(BENCH, o.hardware = text, "--hardware", text);
    SETS(BENCH, o.trace = text, "--trace", text);
    SETS(BENCH, o.offload_dir = text, "--offload-dir", text);
    static char jsonl[] = "jsonl";
    SETS(GENERATE, o.format = jsonl, "--format", jsonl);
}

static void switches_set_their_field(void) {
    SETS(GENERATE, o.resume = true, "--resume");
    SETS(GENERATE, o.overwrite = true, "--overwrite");
    SETS(GENERATE, o.strict = true, "--strict");
    SETS(GENERATE, o.verbose = true, "--verbose");
    SETS(GENERATE, o.help = true, "--help");
    SETS(BENCH, o.policy.delegated = true, "--cpu-cache-compute");
    SETS(BENCH, o.compress_weight = true, "--compress-weight");
    SETS(BENCH, o.compress_cache = true, "--compress-cache");
    SETS(BENCH, o.allow_compression = true, "--allow-compression");
    SETS(BENCH, o.policy.overlap = false, "--no-overlap");
    SETS(BENCH, o.policy.synchronize = true, "--synchronize");
    SETS(POLICY, o.frontier = true, "--frontier");
    SETS(POLICY, o.explain = true, "--explain");
}

/* What sampling asks for. */
static void warm(Options *o) { o->sampling.temperature = 1; }

static void numbers_set_their_field(void) {
    SETS(GENERATE, o.max_tokens = 7, "--max-tokens", "7");
    SETS(BENCH, (o.prompt_len[0] = 16, o.prompt_len[1] = 512), "--prompt-len", "16-512");
    SETS(BENCH, o.prompt_len[0] = o.prompt_len[1] = 9, "--prompt-len", "9");
    SETS(BENCH, (o.gen_len[0] = 2, o.gen_len[1] = 3), "--gen-len", "2-3");
    SETS(BENCH, o.num_prompts = 11, "--num-prompts", "11");
    SETS(EVAL, o.window = 12, "--window", "12");
    SETS(EVAL, o.limit = 13, "--limit", "13");
    SETS(BENCH, o.policy.gbs = 14, "--gpu-batch-size", "14");
    SETS(BENCH, o.policy.num_gpu_batches = 15, "--num-gpu-batches", "15");
    SETS(EVAL, o.quant.bits = 3, "--bits", "3");
    SETS(EVAL, o.quant.group = 48, "--group", "48");
    SETS(BENCH, o.policy.sparsity = .25, "--attn-sparsity", "0.25");
    SETS(BENCH, o.policy.page_tokens = 32, "--page-tokens", "32");
    SETS(BENCH, o.policy.flights = 5, "--flights", "5");
    SETS(BENCH, o.max_latency = 2.5, "--max-latency", "2.5");
    SETS(POLICY, o.nodes = 4, "--nodes", "4");
    SETS(POLICY, o.net_gbps = 25, "--net-gbps", "25");
    SETS(POLICY, o.net_ms = .5, "--net-ms", "0.5");
    SETS(BENCH, o.threads = 6, "--threads", "6");
    SETS(GENERATE, (warm(&o), o.sampling.temperature = .75f), "--temperature", "0.75");
    SETS(GENERATE, (warm(&o), o.sampling.top_p = .5f), "--top-p", "0.5", "--temperature", "1");
    SETS(GENERATE, (warm(&o), o.sampling.top_k = 17), "--top-k", "17", "--temperature", "1");
    SETS(GENERATE, (warm(&o), o.sampling.seed = 18), "--seed", "18", "--temperature", "1");
}

/* Memory in powers of 1024, rates in powers of 1000, delays in milliseconds, shares in percent. */
static void units_are_those_of_the_help_text(void) {
    SETS(BENCH, o.capacity[TIER_GPU] = (size_t)16 << 30, "--gpu-mem", "16G");
    SETS(BENCH, o.capacity[TIER_CPU] = (size_t)3 << 19, "--cpu-mem", "1.5m");
    SETS(BENCH, o.capacity[TIER_DISK] = (size_t)2 << 40, "--disk-mem", "2T");
    SETS(BENCH, o.capacity[TIER_DISK] = 4096, "--disk-mem", "4096");
    SETS(BENCH, o.capacity[TIER_GPU] = 5 << 10, "--gpu-mem", "5K");
    SETS(BENCH, (o.links = true, o.link[CTOG] = 1e9, o.link[GTOC] = 2e6, o.link[DTOC] = .5e9, o.link[CTOD] = 3e3), "--link",
         "ctog=1G,dtoc=0.5G,ctod=3K,gtoc=2m");
    SETS(BENCH, (o.wire_bytes_s = 1e9, o.wire_delay_s = .5e-3), "--net", "1G,0.5ms");
    SETS(BENCH, o.wire_bytes_s = 2.5e6, "--net", "2.5M");
    SETS(BENCH,
         (o.policy.wg = .125, o.policy.wc = .25, o.policy.cg = .5, o.policy.cc = 0, o.policy.hc = 1,
          o.fixed[0] = o.fixed[1] = o.fixed[2] = o.fixed[3] = o.fixed[5] = true),
         "--percent", "12.5", "25", "50", "0", "-", "100");
}

static void words_set_their_field(void) {
    for (int s = SCHEDULE_ZIGZAG; s <= SCHEDULE_DIAGONAL; s++)
        SETS(BENCH, (o.policy.schedule = (Schedule)s, o.fixed_schedule = true), "--schedule", (char *)schedule_name[s]);
    SETS(POLICY, o.paper_model = true, "--cost-model", "paper");
    SETS(POLICY, o.paper_model = false, "--cost-model", "runtime");
}

/* What may be given several times is kept in its order. */
static void lists_keep_what_is_given_in_order(void) {
    Options o = options_default();
    CU_ASSERT_EQUAL(parse(&o, GENERATE, ARGS("--prompt", "a", "--stop", "x", "--prompt", "b", "--stop", "")), 0);
    CU_ASSERT(o.prompt.n == 2 && !strcmp(o.prompt.text[0], "a") && !strcmp(o.prompt.text[1], "b"));
    CU_ASSERT(o.stop.n == 2 && !strcmp(o.stop.text[0], "x") && !o.stop.text[1][0]);
    CU_ASSERT_EQUAL(parse(&o, POLICY, ARGS("--with", "gmem=1e9", "--with", "ctog_bdw=2e9")), 0);
    CU_ASSERT(o.with.n == 2 && !strcmp(o.with.text[0], "gmem=1e9") && !strcmp(o.with.text[1], "ctog_bdw=2e9"));
    free(o.prompt.text), free(o.stop.text), free(o.with.text);
}

/* Behind the tests above. */
static void every_flag_of_the_help_text_was_tried(void) {
    static const char *const lists = " --prompt --stop --with "; /* above */
    char letters[10], padded[50];
    const char *name;
    int i = 0;
    for (; (name = flag_in_help(i, letters)); i++) {
        bool tried = false;
        for (int s = 0; s < nseen; s++) tried = tried || !strcmp(seen[s], name);
        snprintf(padded, sizeof padded, " %s ", name);
        if (!tried && !strstr(lists, padded)) fprintf(stderr, "\n    nothing tries %s\n", name);
        CU_ASSERT(tried || strstr(lists, padded));
    }
    CU_ASSERT(i > 40);
}

static void a_flag_is_known_to_its_commands_only(void) {
    static const char letter[] = "gbpmqe";
    char letters[10], only[60];
    const char *name;
    for (int i = 0; (name = flag_in_help(i, letters)); i++)
        for (Command c = GENERATE; c < NCOMMANDS; c++) {
            Options o = options_default();
            const int status = parse(&o, c, ARGS((char *)name));
            snprintf(only, sizeof only, "%s is a flag of ", name);
            CU_ASSERT_EQUAL(status && !strncmp(err.text, only, strlen(only)), !strchr(letters, letter[c]));
        }
}

// ---------------------------------------------------------------------------------------------------------------
// Bounds
// ---------------------------------------------------------------------------------------------------------------

static bool takes(const char *name, Command command, const char *format, double value) {
    char number[400];
    Options o = options_default();
    snprintf(number, sizeof number, format, value);
    const bool taken = !parse(&o, command, ARGS((char *)name, number));
    free(o.prompt.text), free(o.stop.text), free(o.with.text);
    return taken;
}

/* What a refusal says: it takes the first and the last value of these, and none beyond. */
static void a_number_is_taken_from_the_lowest_to_the_highest_that_it_names(void) {
    static const char letter[] = "gbpmqe";
    char letters[10];
    const char *name;
    int bounded = 0;
    for (int i = 0; (name = flag_in_help(i, letters)); i++) {
        const Command command = (Command)(strchr(letter, letters[0]) - letter);
        double low, high;
        takes(name, command, "x", 0);
        const char *said = strstr(err.text, "number from ");
        if (!said || sscanf(said, "number from %lf to %lf", &low, &high) != 2) continue;
        const bool whole = strstr(err.text, "a whole number") != NULL;
        const char *format = whole ? "%.0f" : "%.9g";
        const double beyond = fmax(1, high / 4); /* more than a double rounds away */
        bounded++;
        CU_ASSERT(takes(name, command, format, low) && takes(name, command, format, high));
        CU_ASSERT(!takes(name, command, format, high + beyond));
        CU_ASSERT(!takes(name, command, format, whole ? low - 1 : low > 0 ? low / 2 : low - 1e-9));
        CU_ASSERT(high > 1e9 || !takes(name, command, format, whole ? high + 1 : high * 1.001));
        CU_ASSERT(!takes(name, command, "nan", 0) && !takes(name, command, "", 0) && !takes(name, command, "%.0fx", low));
        CU_ASSERT(!whole || !takes(name, command, "%.0f.5", low));
    }
    CU_ASSERT(bounded > 20);
}

static void a_range_is_not_turned_round(void) {
    Options o = options_default();
    CU_ASSERT(parse(&o, BENCH, ARGS("--gen-len", "3-2")) == -1 && parse(&o, BENCH, ARGS("--gen-len", "0-2")) == -1);
    CU_ASSERT(parse(&o, BENCH, ARGS("--gen-len", "2-16777217")) == -1 && parse(&o, BENCH, ARGS("--gen-len", "2-3x")) == -1);
    CU_ASSERT_EQUAL(parse(&o, BENCH, ARGS("--gen-len", "2-2")), 0);
}

/* Two shares of hundredths of a percent: none is so near to 100 that rounding would refuse it, and one more is too much. */
static void percentages_add_up_to_100(void) {
    for (int cents = 0; cents <= 10000; cents++) {
        char gpu[20], cpu[20], more[20];
        Options o = options_default();
        snprintf(gpu, sizeof gpu, "%d.%02d", cents / 100, cents % 100);
        snprintf(cpu, sizeof cpu, "%d.%02d", (10000 - cents) / 100, (10000 - cents) % 100);
        snprintf(more, sizeof more, "%d.%02d", (10001 - cents) / 100, (10001 - cents) % 100);
        CU_ASSERT_EQUAL(parse(&o, BENCH, ARGS("--percent", gpu, cpu, "0", "0", cpu, gpu)), 0);
        CU_ASSERT_EQUAL(parse(&o, BENCH, ARGS("--percent", "0", "0", gpu, more, "0", "0")), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, cents ? "KV cache on GPU and CPU add up to" : "from 0 to 100"));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// What goes together
// ---------------------------------------------------------------------------------------------------------------

static int check(Command command, char *const *args) {
    Options o = options_default();
    const int status = parse(&o, command, args) || flags_check(&o, command, &err) ? -1 : 0;
    free(o.prompt.text), free(o.stop.text), free(o.with.text);
    return status;
}

/* The host device's, which is also taken where no device is named. */
static void links_are_slowed_on_the_host_device_alone(void) {
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--link", "ctog=1G")), 0);
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--link", "ctog=1G", "--device", "host")), 0);
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--device", "cuda")), 0);
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--link", "ctog=1G", "--device", "cuda")), -1);
    CU_ASSERT(err.code == EXIT_USAGE && !strncmp(err.text, "--link: only links of the host device", 37));
    CU_ASSERT_EQUAL(
        check(BENCH, ARGS("--model", "m", "--link", "ctog=1G", "--device", "sim", "--hardware", "hardware/t4.json")), -1);
    CU_ASSERT(err.code == EXIT_USAGE && !strncmp(err.text, "--link: only links of the host device", 37));
}

/* Each is refused although all of its flags are right; without the last of them it is not. */
static void what_does_not_go_together_is_refused_by_name(void) {
#define PAPER "--cost-model", "paper", "--hardware", "h", "--gpu-batch-size", "1", "--num-gpu-batches", "1"
    static const struct {
        Command command;
        int values; /* of the last flag */
        const char *args[MOST - 2], *said;
    } cases[] = {
        {GENERATE, 0, {"--prompt", "p", "--resume", "--overwrite"}, "--resume: keeps what --overwrite loses"},
        {GENERATE, 1, {"--prompt", "p", "--prompts", "f"}, "give either --prompt TEXT or --prompts FILE"},
        {GENERATE, 1, {"--prompt", "p", "--stop", ""}, "--stop: an empty text"},
        {GENERATE, 1, {"--prompt", "p", "--stop", "\xff"}, "--stop: is not valid UTF-8"},
        {GENERATE, 1, {"--prompt", "p", "--top-p", ".5"}, "--top-p: without --temperature"},
        {GENERATE, 1, {"--prompt", "p", "--top-k", "5"}, "--top-k: without --temperature"},
        {GENERATE, 1, {"--prompt", "p", "--seed", "5"}, "--seed: without --temperature"},
        {EVAL, 1, {"--perplexity", "f", "--last-word", "g"}, "give either --perplexity FILE or --last-word FILE"},
        {EVAL, 1, {"--last-word", "f", "--window", "9"}, "--window: a line is one by itself"},
        {QUANTIZE, 1, {"--output", "d", "--bits", "3"}, "--bits, --group: only 4 bits"},
        {QUANTIZE, 1, {"--output", "d", "--group", "32"}, "--bits, --group: only 4 bits"},
        {BENCH, 1, {"--with", "gmem=1"}, "--with: changes a number of a machine's file"},
        {BENCH, 1, {"--device", "sim"}, "--device sim: --hardware is missing"},
        {BENCH, 1, {"--hardware", "h", "--nodes", "2"}, "--nodes: machines made of numbers"},
        {EVAL, 1, {"--perplexity", "f", "--device", "sim"}, "--device sim: it computes nothing"},
        {POLICY, 0, {"--nodes", "2", "--frontier"}, "--nodes: looks at one block; leave --frontier out"},
        {POLICY, 0, {"--nodes", "2", "--explain"}, "--explain: is about the best policy of one machine"},
        {POLICY, 0, {"--frontier", "--explain"}, "--explain: is about the best policy of one machine"},
        {POLICY, 1, {"--nodes", "2", "--num-prompts", "9"}, "--nodes: looks at one block; leave --num-prompts out"},
        {POLICY, 1, {"--nodes", "2", "--prompt-len", "1-2"}, "--nodes: knows one length"},
        {POLICY, 1, {"--nodes", "2", "--gen-len", "1-2"}, "--nodes: knows one length"},
        {POLICY, 1, {PAPER, "--prompt-len", "1-2"}, "--prompt-len: the cost model paper knows one length"},
        {POLICY, 1, {PAPER, "--gen-len", "1-2"}, "--gen-len: the cost model paper knows one length"},
        {POLICY, 1, {PAPER, "--attn-sparsity", ".5"}, "--attn-sparsity: the cost model paper knows none"},
        {POLICY, 0, {PAPER, "--compress-weight"}, "compression: the cost model paper knows none"},
        {POLICY, 0, {PAPER, "--compress-cache"}, "compression: the cost model paper knows none"},
        {POLICY, 0, {PAPER, "--allow-compression"}, "compression: the cost model paper knows none"},
        {POLICY, 0, {PAPER, "--frontier"}, "--frontier: the cost model paper looks at one block"},
        {POLICY, 6, {PAPER, "--percent", "-", "-", "-", "-", "-", "1"}, "--percent: the cost model paper finds all"},
        {POLICY, 1, {PAPER, "--nodes", "2"}, "--nodes: the cost model paper looks at one block"},
        {POLICY, 1, {PAPER, "--max-latency", "9"}, "--max-latency: the cost model paper looks at one block"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *args[MOST] = {"--model", "m"};
        for (int a = 0; cases[i].args[a]; a++) args[2 + a] = (char *)cases[i].args[a];
        const int status = check(cases[i].command, args);
        if (!status || strncmp(err.text, cases[i].said, strlen(cases[i].said)) != 0)
            fprintf(stderr, "\n    not \"%s\", but: %s\n", cases[i].said, status ? err.text : "taken");
        CU_ASSERT(status == -1 && err.code == EXIT_USAGE);
        CU_ASSERT_EQUAL(strncmp(err.text, cases[i].said, strlen(cases[i].said)), 0);
        args[count(args) - 1 - cases[i].values] = NULL;
        CU_ASSERT_EQUAL(check(cases[i].command, args), 0);
    }
}

static void what_is_missing_is_named(void) {
    static const struct {
        Command command;
        const char *args[8], *said;
    } cases[] = {
        {BENCH, {NULL}, "--model is missing; name a checkpoint directory or a size such as opt-125m"},
        {GENERATE, {"--prompt", "p"}, "--model is missing; name a checkpoint directory"},
        {GENERATE, {"--model", "m"}, "give either --prompt TEXT or --prompts FILE"},
        {EVAL, {"--model", "m"}, "give either --perplexity FILE or --last-word FILE"},
        {QUANTIZE, {"--model", "m"}, "--output is missing; name the directory that the copy is to be"},
        {QUANTIZE, {"--model", "m", "--output", ""}, "--output is missing; name the directory that the copy is to be"},
        {POLICY,
         {"--model", "m", "--cost-model", "paper"},
         "--hardware is missing; name the machine's file, such as hardware/t4.json"},
        {POLICY,
         {"--model", "m", "--cost-model", "paper", "--hardware", "h"},
         "--gpu-batch-size is missing; give the block as --gpu-batch-size N --num-gpu-batches N"},
        {POLICY,
         {"--model", "m", "--cost-model", "paper", "--hardware", "h", "--gpu-batch-size", "1"},
         "--num-gpu-batches is missing; give the block as --gpu-batch-size N --num-gpu-batches N"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *args[MOST] = {NULL};
        for (int a = 0; a < 8 && cases[i].args[a]; a++) args[a] = (char *)cases[i].args[a];
        CU_ASSERT_EQUAL(check(cases[i].command, args), -1);
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT_STRING_EQUAL(err.text, cases[i].said);
    }
    CU_ASSERT_EQUAL(check(PROFILE, ARGS(NULL)), 0); /* needs nothing */
}

/* One file in two places of a command line, of which one is written to. */
static void nothing_is_written_over_what_is_read_or_written_as_well(void) {
    static const struct {
        Command command;
        const char *rest[4], *one, *other, *named; /* the flag that the refusal begins with */
    } cases[] = {{GENERATE, {0}, "--prompts", "--output", "--output"},
                 {GENERATE, {0}, "--prompts", "--trace", "--trace"},
                 {GENERATE, {"--prompt", "p"}, "--output", "--trace", "--trace"},
                 {BENCH, {0}, "--json", "--trace", "--trace"},
                 {BENCH, {0}, "--hardware", "--json", "--json"},
                 {BENCH, {0}, "--hardware", "--trace", "--trace"},
                 {POLICY, {0}, "--hardware", "--json", "--json"},
                 {EVAL, {0}, "--perplexity", "--json", "--json"},
                 {EVAL, {0}, "--perplexity", "--trace", "--trace"},
                 {EVAL, {0}, "--last-word", "--json", "--json"},
                 {EVAL, {0}, "--last-word", "--trace", "--trace"}};
    const char *dir = temp_dir();
    char path[400], also[400], another[400];
    write_file(dir, "file", "", 0);
    snprintf(path, sizeof path, "%s/file", dir);
    snprintf(also, sizeof also, "%s/../%s/file", dir, strrchr(dir, '/') + 1); /* by another name */
    snprintf(another, sizeof another, "%s/another", dir);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int same = 0; same < 2; same++) {
            char *args[MOST] = {
                "--model", "opt-125m", (char *)cases[i].one, path, (char *)cases[i].other, same ? also : another};
            for (int r = 0; cases[i].rest[r]; r++) args[6 + r] = (char *)cases[i].rest[r];
            CU_ASSERT_EQUAL(check(cases[i].command, args), same ? -1 : 0);
            CU_ASSERT(!same || (err.code == EXIT_USAGE && !strncmp(err.text, cases[i].named, strlen(cases[i].named))));
            CU_ASSERT(!same || (strstr(err.text, cases[i].one) && strstr(err.text, cases[i].other)));
        }
}

/* Files of a model, by any name of its directory. */
static void nothing_is_written_over_the_model(void) {
    static const char *const files[] = {
        "config.json", "vocab.json", "merges.txt", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "notes.txt"};
    static const char *const flags[] = {"--output", "--trace", "--json"};
    const char *dir = temp_dir();
    char path[400], model[400];
    snprintf(model, sizeof model, "%s/.", dir);
    for (int f = 0; f < 6; f++) {
        write_file(dir, files[f], "", 0);
        snprintf(path, sizeof path, "%s/%s", dir, files[f]);
        for (int w = 0; w < 3; w++) {
            const Command command = w < 2 ? GENERATE : BENCH;
            char *args[MOST] = {"--model", model, (char *)flags[w], path, w < 2 ? "--prompt" : NULL, "p"};
            CU_ASSERT_EQUAL(check(command, args), f < 5 ? -1 : 0);
            CU_ASSERT(f == 5 || (!strncmp(err.text, flags[w], strlen(flags[w])) && strstr(err.text, "file of the model")));
        }
    }
}

static uint64_t digest(Command command, char *const *args) {
    Options o = options_default();
    CU_ASSERT_EQUAL(parse(&o, command, args), 0);
    free(o.stop.text);
    return o.digest;
}

/* assert_sets tries each flag by itself. */
static void what_is_a_machines_own_is_no_part_of_the_digest(void) {
    const uint64_t seed = digest(BENCH, ARGS("--seed", "11"));
    CU_ASSERT(seed == digest(BENCH, ARGS("--threads", "2", "--seed", "11", "--gpu-mem", "1G")));
    CU_ASSERT(seed != digest(BENCH, ARGS("--seed", "12")) && seed != digest(GENERATE, ARGS("--seed", "11")));
    CU_ASSERT(digest(GENERATE, ARGS("--stop", "ab", "--stop", "c")) !=
              digest(GENERATE, ARGS("--stop", "a", "--stop", "bc")));
}

/* The block as a whole is bounded, too. */
static void a_block_has_at_most_a_million_sequences(void) {
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--gpu-batch-size", "16384", "--num-gpu-batches", "64")), 0);
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--gpu-batch-size", "16384", "--num-gpu-batches", "65")), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "a block of at most 1048576 sequences"));
    CU_ASSERT_EQUAL(check(BENCH, ARGS("--model", "m", "--gpu-batch-size", "1048576", "--num-gpu-batches", "65536")), -1);
}

CU_TestInfo tests[] = {
    {"texts and files set their field", texts_and_files_set_their_field},
    {"switches set their field", switches_set_their_field},
    {"numbers set their field", numbers_set_their_field},
    {"units are those of the help text", units_are_those_of_the_help_text},
    {"words set their field", words_set_their_field},
    {"lists keep what is given in order", lists_keep_what_is_given_in_order},
    {"every flag of the help text was tried", every_flag_of_the_help_text_was_tried},
    {"a flag is known to its commands only", a_flag_is_known_to_its_commands_only},
    {"a number is taken from the lowest to the highest that it names",
     a_number_is_taken_from_the_lowest_to_the_highest_that_it_names},
    {"a range is not turned round", a_range_is_not_turned_round},
    {"percentages add up to 100", percentages_add_up_to_100},
    {"links are slowed on the host device alone", links_are_slowed_on_the_host_device_alone},
    {"what is missing is named", what_is_missing_is_named},
    {"what does not go together is refused by name", what_does_not_go_together_is_refused_by_name},
    {"nothing is written over what is read or written as well", nothing_is_written_over_what_is_read_or_written_as_well},
    {"nothing is written over the model", nothing_is_written_over_the_model},
    {"what is a machine's own is no part of the digest", what_is_a_machines_own_is_no_part_of_the_digest},
    {"a block has at most a million sequences", a_block_has_at_most_a_million_sequences},
    CU_TEST_INFO_NULL,
};
