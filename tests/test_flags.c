/* test_flags.c: the command line: each flag sets its own field and no other, from its lowest value to its highest; what is
 * wrong, and what must not go together, is refused by name. The suite `cli` sees that the program ends with such a line. */
#include "tests.h"
#include "written.h"

enum { MOST = 24 };

static Error err;
static char *word[MOST]; /* of the command line that was parsed last */
static Command command;  /* that it names */

/* Parses a command line: see split_words. */
static int parse(Options *o, const char *line) {
    static char text[900];
    CHECK((size_t)snprintf(text, sizeof text, "%s", line) < sizeof text);
    const int n = split_words(text, word, MOST);
    err = (Error){0, ""};
    return command_parse(&command, word[0], &err) || flags_parse(o, command, word + 1, n - 1, &err) ? -1 : 0;
}

static void free_lists(Options *o) { free(o->prompt.text), free(o->stop.text), free(o->with.text); }

/* All that main asks of a command line. */
static bool right(const char *line) {
    Options o = options_default();
    const bool is = !parse(&o, line) && !flags_check(&o, command, &err) && !files_check(&o, command, &err);
    free_lists(&o);
    return is;
}

static void refused(const char *line, const char *says) {
    CU_ASSERT_FALSE(right(line));
    CU_ASSERT(!strncmp(err.text, says, strlen(says)));
    said(&err, EXIT_USAGE, says);
}

/* True if a flag is one of a list, in which each has a blank on both sides. */
static bool among(const char *list, const char *flag) {
    char padded[50];
    snprintf(padded, sizeof padded, " %s ", flag);
    return strstr(list, padded);
}

// ---- One flag -------------------------------------------------------------------------------------------------------

static char tried[2000] = " --prompt --stop --with "; /* the flags; a test of their own has these */

/* Stages of a pipeline may differ in what is each machine's own: where its files and its memory are, not what is done. */
static const char own[] = " --model --offload-dir --threads --gpu-mem --cpu-mem --disk-mem --hardware --with --device ";

/* The fields are as the flag has to leave them, and all others as they are without it; but the digest changes with each
 * flag that must be the same on all stages. */
static void assert_sets(Options *parsed, const Options *fields) {
    const char *flag = word[1];
    Options before = options_default();
    CU_ASSERT_EQUAL(flags_parse(&before, command, NULL, 0, &err), 0);
    CU_ASSERT_EQUAL(parsed->digest == before.digest, among(own, flag));
    parsed->digest = fields->digest;
    const bool same = !memcmp(parsed, fields, sizeof *fields);
    if (!same) fprintf(stderr, "\n    %s sets something else\n", flag);
    CU_ASSERT(same);
    strcat(strcat(tried, flag), " ");
}

/* "--flag=value" for "--flag value"; values keep their places in the line. */
static const char *joined(const char *line) {
    static char text[900];
    snprintf(text, sizeof text, "%s", line);
    char *blank = strchr(strchr(text, ' ') + 1, ' ');
    if (blank) *blank = '=';
    return text;
}
#define SETS(line, setting)                                                   \
    do {                                                                      \
        Options parsed, o, plain = options_default();                         \
        memcpy(&parsed, &plain, sizeof parsed);                               \
        memcpy(&o, &plain, sizeof o); /* with the bytes between its fields */ \
        CU_ASSERT_EQUAL(parse(&o, joined(line)), 0);                          \
        CU_ASSERT_EQUAL(parse(&parsed, line), 0);                             \
        CU_ASSERT(!memcmp(&parsed, &o, sizeof o));                            \
        memcpy(&o, &plain, sizeof o);                                         \
        setting;                                                              \
        assert_sets(&parsed, &o);                                             \
    } while (0)
#define VALUE word[2]

/* Those of the help text, each with the letters of the commands that know it. */
static struct { char name[40], letters[10]; } known[100];
static int nknown;

/* Finds the flags of the help text, unless an earlier test has done so. */
static void read_help(void) {
    if (nknown) return;
    char *text;
    size_t len;
    FILE *out = open_memstream(&text, &len);
    flags_help(out);
    CHECK(fclose(out) == 0);
    for (const char *at = text; (at = strstr(at, "\n  --")); nknown++) {
        at += strlen("\n  ");
        CHECK(sscanf(at, "%39s %9s", known[nknown].name, known[nknown].letters) == 2);
    }
    free(text);
    CU_ASSERT_FATAL(nknown > 40);
}

/* Each flag of the help text is tried. */
TEST(each_flag_sets_its_field_and_no_other) {
    /* texts and files */
    SETS("generate --model x", o.model = VALUE);
    SETS("generate --prompts x", o.prompts = VALUE);
    SETS("generate --output x", o.output = VALUE);
    SETS("eval --perplexity x", o.perplexity = VALUE);
    SETS("eval --last-word x", o.last_word = VALUE);
    SETS("eval --score x", o.score = VALUE);
    SETS("bench --stages x", o.stages = VALUE);
    SETS("bench --json x", o.json = VALUE);
    SETS("bench --device x", o.device = VALUE);
    SETS("bench --hardware x", o.hardware = VALUE);
    SETS("bench --trace x", o.trace = VALUE);
    SETS("bench --offload-dir x", o.offload_dir = VALUE);
    SETS("generate --format jsonl", o.format = VALUE);
    SETS("generate --format openai", o.format = VALUE);
    /* switches */
    SETS("generate --resume", o.resume = true);
    SETS("generate --overwrite", o.overwrite = true);
    SETS("generate --strict", o.strict = true);
    SETS("generate --truncate", o.truncate = true);
    SETS("generate --verbose", o.verbose = true);
    SETS("generate --help", o.help = true);
    SETS("generate --version", o.version = true);
    SETS("bench --cpu-cache-compute", o.policy.delegated = true);
    SETS("bench --compress-weight", o.compress_weight = true);
    SETS("bench --compress-head", o.compress_head = true);
    SETS("bench --compress-cache", o.compress_cache = true);
    SETS("bench --allow-compression", o.allow_compression = true);
    SETS("bench --no-overlap", o.policy.overlap = false);
    SETS("bench --synchronize", o.policy.synchronize = true);
    SETS("eval --no-graph", o.no_graph = true);
    SETS("policy --frontier", o.frontier = true);
    SETS("policy --explain", o.explain = true);
    /* numbers */
    SETS("generate --max-tokens 7", o.max_tokens = 7);
    SETS("bench --prompt-len 16-512", (o.prompt_len[0] = 16, o.prompt_len[1] = 512));
    SETS("bench --prompt-len 9", o.prompt_len[0] = o.prompt_len[1] = 9);
    SETS("bench --gen-len 2-3", (o.gen_len[0] = 2, o.gen_len[1] = 3));
    SETS("bench --num-prompts 11", o.num_prompts = 11);
    SETS("eval --window 12", o.window = 12);
    SETS("eval --limit 13", o.limit = 13);
    SETS("bench --gpu-batch-size 14", o.policy.gbs = 14);
    SETS("bench --num-gpu-batches 15", o.policy.num_gpu_batches = 15);
    SETS("eval --bits 3", o.quant.bits = 3);
    SETS("eval --group 48", o.quant.group = 48);
    SETS("bench --attn-sparsity 0.25", o.policy.sparsity = .25);
    SETS("bench --page-tokens 32", o.policy.page_tokens = 32);
    SETS("bench --flights 5", o.policy.flights = 5);
    SETS("bench --max-latency 2.5", o.max_latency = 2.5);
    SETS("generate --no-rehearsal", o.no_rehearsal = true);
    SETS("policy --nodes 4", o.nodes = 4);
    SETS("policy --net-gbps 25", o.net_gbps = 25);
    SETS("policy --net-ms 0.5", o.net_ms = .5);
    SETS("bench --threads 6", o.threads = 6);
    SETS("generate --temperature 0.75", o.sampling.temperature = .75f);
    SETS("generate --top-p 0.5 --temperature 1", (o.sampling.temperature = 1, o.sampling.top_p = .5f));
    SETS("generate --top-k 17 --temperature 1", (o.sampling.temperature = 1, o.sampling.top_k = 17));
    SETS("generate --seed 18 --temperature 1", (o.sampling.temperature = 1, o.sampling.seed = 18));
    /* memory in powers of 1024, rates in powers of 1000, delays in milliseconds, shares in percent */
    SETS("bench --gpu-mem 16G", o.capacity[TIER_GPU] = (size_t)16 << 30);
    SETS("bench --cpu-mem 1.5m", o.capacity[TIER_CPU] = (size_t)3 << 19);
    SETS("bench --disk-mem 2T", o.capacity[TIER_DISK] = (size_t)2 << 40);
    SETS("bench --disk-mem 4096", o.capacity[TIER_DISK] = 4096);
    SETS("bench --gpu-mem 5K", o.capacity[TIER_GPU] = 5 << 10);
    SETS("bench --link ctog=1G,dtoc=0.5G,ctod=3K,gtoc=2m",
         (o.links = true, o.link[CTOG] = 1e9, o.link[GTOC] = 2e6, o.link[DTOC] = .5e9, o.link[CTOD] = 3e3));
    SETS("bench --net 1G,0.5ms", (o.wire_bytes_s = 1e9, o.wire_delay_s = .5e-3));
    SETS("bench --net 2.5M", o.wire_bytes_s = 2.5e6);
    SETS("bench --percent 12.5 25 50 0 - 100",
         (o.policy.wg = .125, o.policy.wc = .25, o.policy.cg = .5, o.policy.cc = 0, o.policy.hc = 1,
          o.fixed[0] = o.fixed[1] = o.fixed[2] = o.fixed[3] = o.fixed[5] = true));
    /* words */
    SETS("bench --schedule row", (o.policy.schedule = SCHEDULE_ROW, o.fixed_schedule = true));
    SETS("bench --schedule zigzag", (o.policy.schedule = SCHEDULE_ZIGZAG, o.fixed_schedule = true));
    SETS("bench --schedule diagonal", (o.policy.schedule = SCHEDULE_DIAGONAL, o.fixed_schedule = true));
    SETS("policy --cost-model paper", o.paper_model = true);
    SETS("policy --cost-model runtime", o.paper_model = false);
    read_help();
    for (int i = 0; i < nknown; i++) {
        const bool was_tried = among(tried, known[i].name);
        if (!was_tried) fprintf(stderr, "\n    nothing tries %s\n", known[i].name);
        CU_ASSERT(was_tried);
    }
}

/* What may be given several times is kept in its order. */
TEST(lists_keep_what_is_given_in_order) {
    Options o = options_default();
    CU_ASSERT_EQUAL(parse(&o, "generate --prompt a --stop x --prompt b --stop ''"), 0);
    CU_ASSERT(o.prompt.n == 2 && !strcmp(o.prompt.text[0], "a") && !strcmp(o.prompt.text[1], "b"));
    CU_ASSERT(o.stop.n == 2 && !strcmp(o.stop.text[0], "x") && !o.stop.text[1][0]);
    CU_ASSERT_EQUAL(parse(&o, "policy --with gmem=1e9 --with=ctog_bdw=2e9"), 0);
    CU_ASSERT(o.with.n == 2 && !strcmp(o.with.text[0], "gmem=1e9") && !strcmp(o.with.text[1], "ctog_bdw=2e9"));
    free_lists(&o);
}

static const char *const commands[NCOMMANDS] = {"generate", "bench", "policy", "profile", "quantize", "eval"};
static const char letter[] = "gbpmqe"; /* of each command, in the help text */

TEST(a_flag_is_known_to_its_commands_only) {
    char line[60], only[60];
    read_help();
    for (int i = 0; i < nknown; i++)
        for (Command c = GENERATE; c < NCOMMANDS; c++) {
            Options o = options_default();
            snprintf(line, sizeof line, "%s %s", commands[c], known[i].name);
            snprintf(only, sizeof only, "%s is a flag of ", known[i].name);
            const int status = parse(&o, line);
            CU_ASSERT_EQUAL(status && !strncmp(err.text, only, strlen(only)), !strchr(known[i].letters, letter[c]));
        }
}

// ---- Bounds ---------------------------------------------------------------------------------------------------------

static bool takes(const char *name, const char *of, const char *format, double value) {
    char number[400], line[500];
    Options o = options_default();
    snprintf(number, sizeof number, format, value);
    snprintf(line, sizeof line, "%s %s '%s'", of, name, number);
    const bool taken = !parse(&o, line);
    free_lists(&o);
    return taken;
}

/* What a refusal says: it takes the first and the last value of these, and none beyond. */
TEST(a_number_is_taken_from_the_lowest_to_the_highest_that_it_names) {
    int bounded = 0;
    read_help();
    for (int i = 0; i < nknown; i++) {
        const char *name = known[i].name, *of = commands[strchr(letter, known[i].letters[0]) - letter];
        double low, high;
        takes(name, of, "x", 0);
        const char *said = strstr(err.text, "number from ");
        if (!said || sscanf(said, "number from %lf to %lf", &low, &high) != 2) continue;
        const bool whole = strstr(err.text, "a whole number") != NULL;
        const char *format = whole ? "%.0f" : "%.9g";
        const double beyond = fmax(1, high / 4); /* more than a double rounds away */
        bounded++;
        CU_ASSERT_EQUAL(err.code, EXIT_USAGE);
        CU_ASSERT(takes(name, of, format, low) && takes(name, of, format, high));
        CU_ASSERT(!takes(name, of, format, high + beyond));
        CU_ASSERT(!takes(name, of, format, whole ? low - 1 : low > 0 ? low / 2 : low - 1e-9));
        CU_ASSERT(high > 1e9 || !takes(name, of, format, whole ? high + 1 : high * 1.001));
        CU_ASSERT(!takes(name, of, "nan", 0) && !takes(name, of, "", 0) && !takes(name, of, "%.0fx", low));
        CU_ASSERT(!whole || !takes(name, of, "%.0f.5", low));
    }
    CU_ASSERT(bounded > 20);
}

/* Two shares of hundredths of a percent: none is so near to 100 that rounding would refuse it, and one more is too much. */
TEST(percentages_add_up_to_100) {
    for (int cents = 0; cents <= 10000; cents++) {
        char line[200];
        const double gpu = cents / 100., cpu = (10000 - cents) / 100., more = (10001 - cents) / 100.;
        Options o = options_default();
        snprintf(line, sizeof line, "bench --percent %.2f %.2f 0 0 %.2f %.2f", gpu, cpu, cpu, gpu);
        CU_ASSERT_EQUAL(parse(&o, line), 0);
        snprintf(line, sizeof line, "bench --percent 0 0 %.2f %.2f 0 0", gpu, more);
        CU_ASSERT_EQUAL(parse(&o, line), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, cents ? "KV cache on GPU and CPU add up to" : "from 0 to 100"));
    }
}

// ---- What is wrong --------------------------------------------------------------------------------------------------

TEST(a_wrong_value_is_refused_with_what_is_expected) {
#define A_SIZE ": expected a size such as 16G, 512M or 4096"
#define LINKS ": expected links and bytes a second such as ctog=1G,gtoc=1G,dtoc=0.5G"
#define A_WIRE ": expected bytes a second and a delay such as 1G,0.5ms"
#define A_SHARE ": expected a number from 0 to 100"
#define A_RANGE ": expected a whole number from 1 to 16777216, or two such as 16-512"
    static const char *const cases[][2] = {
        {"genrate", "unknown command genrate; the commands are generate, bench, policy, profile, quantize, eval and help"},
        {"generate --gpu-men 1G", "unknown flag --gpu-men; the nearest known one is --gpu-mem"},
        {"generate --prompt-length 1", "unknown flag --prompt-length; the nearest known one is --prompt"},
        {"generate again", "again: expected a flag; put a value that has blanks into quotes"},
        {"generate '-\n-forged'", "unknown flag -?-forged"},
        {"profile --prompt a", "--prompt is a flag of generate only; leave it out"},
        {"quantize --percent 1", "--percent is a flag of generate, bench, policy, eval only; leave it out"},
        {"generate --model", "--model takes 1 value: DIR: a Hugging Face directory"},
        {"generate --percent 0 0 100 0 100", "--percent takes 6 values: WG WC CG CC HG HC"},
        {"generate --percent -1 0 100 0 100 0", "--percent -1" A_SHARE},
        {"generate --percent - - - - - --", "--percent --" A_SHARE},
        {"generate --percent - 101 - - - -", "--percent 101" A_SHARE},
        {"generate --percent 60 50 100 0 100 0", "--percent: weights on GPU and CPU add up to 110%; at most 100%"},
        {"generate --percent 0 0 0 0 100 1", "--percent: activations on GPU and CPU add up to 101%"},
        {"generate --gpu-mem ''", "--gpu-mem " A_SIZE},
        {"generate --cpu-mem -1G", "--cpu-mem -1G" A_SIZE},
        {"generate --disk-mem 1GG", "--disk-mem 1GG" A_SIZE},
        {"generate --disk-mem 1e30", "--disk-mem 1e30" A_SIZE},
        {"generate --max-tokens 99999999999999999999", "--max-tokens 99999999999999999999: expected a whole number from 1"},
        {"generate --max-latency soon", "--max-latency soon: expected a number from 1e-06 to 1e+12"},
        {"generate --schedule spiral", "--schedule spiral: expected row, zigzag or diagonal"},
        {"generate --format xml", "--format xml: expected jsonl, text or openai"},
        {"generate --max-tokens=0", "--max-tokens 0: expected a whole number from 1"},
        {"generate --resume=yes", "--resume takes no value; leave =yes out"},
        {"generate --gpu-men=1G", "unknown flag --gpu-men; the nearest known one is --gpu-mem"},
        {"profile --prompt=a", "--prompt is a flag of generate only; leave it out"},
        {"generate --percent=0 0 100 0 100", "--percent takes 6 values: WG WC CG CC HG HC"},
        {"policy --cost-model printed", "--cost-model printed: expected runtime or paper"},
        {"generate --link ctog", "--link ctog" LINKS},
        {"generate --link ctog=", "--link ctog=" LINKS},
        {"generate --link ctog=0", "--link ctog=0" LINKS},
        {"generate --link ctog=-1G", "--link ctog=-1G" LINKS},
        {"generate --link ctog=nan", "--link ctog=nan" LINKS},
        {"generate --link ctog=1G,", "--link ctog=1G," LINKS},
        {"generate --link ctog=1GB", "--link ctog=1GB" LINKS},
        {"generate --link 1G", "--link 1G" LINKS},
        {"generate --link gpu=1G", "--link gpu=1G" LINKS},
        {"bench --net 1G,1s", "--net 1G,1s" A_WIRE},
        {"bench --net 0", "--net 0" A_WIRE},
        {"bench --net 1G,-1ms", "--net 1G,-1ms" A_WIRE},
        {"bench --gen-len 3-2", "--gen-len 3-2" A_RANGE},
        {"bench --gen-len 0-2", "--gen-len 0-2" A_RANGE},
        {"bench --gen-len 2-16777217", "--gen-len 2-16777217" A_RANGE},
        {"bench --gen-len 2-3x", "--gen-len 2-3x" A_RANGE},
        {"bench --prompt-len 4-", "--prompt-len 4-" A_RANGE},
        {"bench --model m --device tpu", "--device tpu: expected host, cuda or sim"},
        {"bench ", "--model is missing; name a checkpoint directory or a size such as opt-125m"},
        {"generate --prompt p", "--model is missing; name a checkpoint directory"},
        {"generate --model m", "give either --prompt TEXT or --prompts FILE"},
        {"eval --model m", "give one of --perplexity FILE, --last-word FILE and --score FILE"},
        {"quantize --model m", "--output is missing; name the directory that the copy is to be"},
        {"quantize --model m --output ''", "--output : expected a name"},
        {"quantize --model m --output -", "--output is missing; name the directory that the copy is to be"},
        {"bench --trace ''", "--trace : expected a name"},
        {"bench --json ''", "--json : expected a name"},
        {"policy --model m --cost-model paper", "--hardware is missing; name the machine's file, such as hardware/t4.json"},
        {"policy --model m --cost-model paper --hardware h",
         "--gpu-batch-size is missing; give the block as --gpu-batch-size N --num-gpu-batches N"},
        {"policy --model m --cost-model paper --hardware h --gpu-batch-size 1",
         "--num-gpu-batches is missing; give the block as --gpu-batch-size N --num-gpu-batches N"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) refused(cases[i][0], cases[i][1]);
    CU_ASSERT(right("profile")); /* needs nothing */
    CU_ASSERT(right("bench --model m --gen-len 2-2"));
}

/* Each is refused although all of its flags are right; without the last of them it is not. Links are those of the host
 * device, which is also taken where no device is named. */
TEST(what_does_not_go_together_is_refused_by_name) {
#define PAPER "policy --model m --cost-model paper --hardware h --gpu-batch-size 1 --num-gpu-batches 1 "
    static const char *const cases[][2] = {
        {"generate --model m --prompt p --resume --overwrite", "--resume: keeps what --overwrite loses"},
        {"generate --model m --prompt p --prompts f", "give either --prompt TEXT or --prompts FILE"},
        {"generate --model m --prompt p --stop ''", "--stop: an empty text"},
        {"generate --model m --prompt p --stop \xff",
         "--stop: an empty text would end everything, and one that is not valid UTF-8"},
        {"generate --model m --prompt p --top-p .5", "--top-p: without --temperature"},
        {"generate --model m --prompt p --top-k 5", "--top-k: without --temperature"},
        {"generate --model m --prompt p --seed 5", "--seed: without --temperature"},
        {"bench --model m --trace -", "--trace: standard output has the other results"},
        {"generate --model m --prompt p --trace -", "--trace: standard output has the other results"},
        {"eval --model m --perplexity f --last-word g", "give one of --perplexity FILE, --last-word FILE and --score FILE"},
        {"eval --model m --last-word f --score g", "give one of --perplexity FILE, --last-word FILE and --score FILE"},
        {"eval --model m --last-word f --output g", "--output, --resume, --overwrite: are about the lines of --score"},
        {"eval --model m --perplexity f --resume", "--output, --resume, --overwrite: are about the lines of --score"},
        {"eval --model m --perplexity f --overwrite", "--output, --resume, --overwrite: are about the lines of --score"},
        {"eval --model m --score f --json g", "--json: every score is a line of --output"},
        {"eval --model m --score f --trace -", "--trace: standard output has the other results"},
        {"eval --model m --perplexity f --trace -", "--trace: standard output has the other results"},
        {"eval --model m --score f --resume --overwrite", "--resume: keeps what --overwrite loses"},
        {"eval --model m --score f --window 9", "--window: a line is one by itself"},
        {"eval --model m --last-word f --window 9", "--window: a line is one by itself"},
        {"eval --model m --perplexity f --device sim", "--device sim: it computes nothing"},
        {"quantize --model m --output d --bits 3",
         "--bits, --group: only 4 bits in groups of 64 are stored; leave them out"},
        {"quantize --model m --output d --group 32", "--bits, --group: only 4 bits"},
        {"generate --model m --prompt p --compress-head", "--compress-head: packs the head beside the matrices"},
        {"bench --model m --compress-cache --compress-head", "--compress-head: packs the head"},
        {"eval --model m --score f --compress-weight --compress-head --bits 3",
         "--compress-head: packs the head beside the matrices of the layers, in 4 bits"},
        {"bench --model m --hardware h --link ctog=1G --device sim", "--link: only links of the host device"},
        {"bench --model m --device cuda --link ctog=1G", "--link: only links of the host device"},
        {"bench --model m --with gmem=1", "--with: changes a number of a machine's file"},
        {"bench --model m --device sim", "--device sim: --hardware is missing"},
        {"bench --model m --hardware h --nodes 2", "--nodes: machines made of numbers"},
        /* a block as a whole has at most a million sequences */
        {"bench --model m --gpu-batch-size 16384 --num-gpu-batches 65",
         "--gpu-batch-size 16384 x --num-gpu-batches 65: expected a block"},
        {"bench --model m --gpu-batch-size 1048576 --num-gpu-batches 65536",
         "--gpu-batch-size 1048576 x --num-gpu-batches 65536"},
        {"policy --model m --nodes 2 --frontier", "--nodes: looks at one block; leave --frontier out"},
        {"policy --model m --nodes 2 --explain", "--explain: is about the best policy of one machine"},
        {"policy --model m --frontier --explain", "--explain: is about the best policy of one machine"},
        {"policy --model m --nodes 2 --num-prompts 9", "--nodes: looks at one block; leave --num-prompts out"},
        {"policy --model m --nodes 2 --prompt-len 1-2", "--nodes: knows one length"},
        {"policy --model m --nodes 2 --gen-len 1-2", "--nodes: knows one length"},
        {PAPER "--prompt-len 1-2", "--prompt-len: the cost model paper knows one length"},
        {PAPER "--gen-len 1-2", "--gen-len: the cost model paper knows one length"},
        {PAPER "--attn-sparsity .5", "--attn-sparsity: the cost model paper knows none"},
        {PAPER "--compress-weight", "compression: the cost model paper knows none"},
        {PAPER "--compress-cache", "compression: the cost model paper knows none"},
        {PAPER "--allow-compression", "compression: the cost model paper knows none"},
        {PAPER "--frontier", "--frontier: the cost model paper looks at one block"},
        {PAPER "--percent - - - - - 1", "--percent: the cost model paper finds all"},
        {PAPER "--nodes 2", "--nodes: the cost model paper looks at one block"},
        {PAPER "--max-latency 9", "--max-latency: the cost model paper looks at one block"},
        {PAPER "--no-rehearsal", "--no-rehearsal: the cost model paper looks at one block"},
    };
    char line[200];
    for (size_t i = 0; i < COUNT(cases); i++) {
        refused(cases[i][0], cases[i][1]);
        const char *last = cases[i][0];
        for (const char *flag = last; (flag = strstr(flag + 1, " --"));) last = flag;
        snprintf(line, sizeof line, "%.*s", (int)(last - cases[i][0]), cases[i][0]);
        CU_ASSERT(right(line));
    }
    CU_ASSERT(right("bench --model m --link ctog=1G --device host"));
    CU_ASSERT(right("bench --model m --compress-head --compress-weight"));
    CU_ASSERT(right("quantize --model m --output d --compress-head"));
    CU_ASSERT(right("bench --model m --gpu-batch-size 16384 --num-gpu-batches 64"));
}

/* One file in two places of a command line, by two names, of which one is written to: the last. */
TEST(nothing_is_written_over_what_is_read_or_written_as_well) {
    static const char *const cases[][2] = {{"generate --prompts", "--output"},
                                           {"generate --prompts", "--trace"},
                                           {"generate --prompt p --output", "--trace"},
                                           {"bench --json", "--trace"},
                                           {"bench --hardware", "--json"},
                                           {"bench --hardware", "--trace"},
                                           {"policy --hardware", "--json"},
                                           {"eval --perplexity", "--json"},
                                           {"eval --perplexity", "--trace"},
                                           {"eval --last-word", "--json"},
                                           {"eval --last-word", "--trace"},
                                           {"eval --score", "--output"},
                                           {"eval --score", "--trace"},
                                           {"eval --score p --output", "--trace"}};
    const char *dir = temp_dir(), *name = strrchr(dir, '/') + 1;
    write_file(dir, "file", "", 0);
    for (size_t i = 0; i < COUNT(cases); i++) {
        char line[800], says[60];
        snprintf(line, sizeof line, "%s %s/file --model opt-125m %s %s/../%s/file", cases[i][0], dir, cases[i][1], dir,
                 name);
        snprintf(says, sizeof says, "%s: is the file of %s", cases[i][1], strrchr(cases[i][0], ' ') + 1);
        refused(line, says);
        CU_ASSERT(right(strcat(line, "2")));
    }
}

/* Files of a model, by any name of its directory. */
TEST(nothing_is_written_over_the_model) {
    static const char *const files[] = {"config.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "model.safetensors.index.json",
                                        "model-00001-of-00002.safetensors",
                                        "generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "notes.txt"};
    enum { FILES = COUNT(files) };
    static const char *const flags[] = {"--output", "--trace", "--json"};
    const char *dir = temp_dir();
    char line[900], says[60];
    for (int i = 0; i < FILES * 3; i++) {
        const char *file = files[i / 3], *flag = flags[i % 3], *start = i % 3 < 2 ? "generate --prompt p" : "bench";
        write_file(dir, file, "", 0);
        snprintf(line, sizeof line, "%s --model %s/. %s %s/%s", start, dir, flag, dir, file);
        snprintf(says, sizeof says, "%s: is a file of the model", flag);
        if (i / 3 == FILES - 1)
            CU_ASSERT(right(line))
        else
            refused(line, says);
    }
}

/* assert_sets tries each flag by itself. */
TEST(what_is_a_machines_own_is_no_part_of_the_digest) {
    static const char *const lines[] = {"bench --seed 11",
                                        "bench --threads 2 --seed 11 --gpu-mem 1G --with gmem=1e9",
                                        "bench --seed 12",
                                        "generate --seed 11",
                                        "generate --stop a --stop b",
                                        "generate --stop a--stopb"};
    uint64_t digest[COUNT(lines)];
    for (size_t i = 0; i < COUNT(lines); i++) {
        Options o = options_default();
        CU_ASSERT_EQUAL(parse(&o, lines[i]), 0);
        digest[i] = o.digest;
        free_lists(&o);
        for (size_t e = 0; e < i; e++) CU_ASSERT_EQUAL(digest[e] == digest[i], i == 1);
    }
}
