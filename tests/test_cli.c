/* test_cli.c: the program as its users meet it: exit status, standard output, one line on standard error, files left
 * behind.
 *
 * Runs the built ./flexgen, or the one that FLEXGEN_BIN names. Hostile checkpoints are mutations of a small good one that
 * is made here: a text of one of its files is replaced by another, and a table says what the message must name. */
#include <ctype.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/started.h"

#define MODEL "models/opt-tiny"
#define PIECES "tests/golden/tokenizer"
#define SHARDED "tests/golden/opt-pre"

// ---------------------------------------------------------------------------------------------------------------
// Running the program
// ---------------------------------------------------------------------------------------------------------------

/* Starts the program with the arguments up to NULL. */
static pid_t start(const char *const *args) {
    const char *bin = getenv(with.emulated ? "FLEXGEN_EMULATED" : "FLEXGEN_BIN"), *argv[64] = {bin ? bin : "./flexgen"};
    for (int n = 1; (argv[n] = args[n - 1]); n++) continue;
    return start_program(argv);
}

static Result run(const char *const *args) { return finish(start(args)); }
#define RUN(...) run((const char *const[]){__VA_ARGS__, NULL})
#define START(...) start((const char *const[]){__VA_ARGS__, NULL})

static bool contains_all(const char *text, const char *const *words) {
    for (; *words; words++)
        if (!strstr(text, *words)) return fprintf(stderr, "\n    no \"%s\" in: %s\n", *words, text), false;
    return true;
}

/* The run failed with that status, wrote no result, and said why in exactly one line that has the words. */
static void assert_refused(Result r, int status, const char *const *words) {
    if (r.status != status || r.out_len)
        fprintf(stderr, "\n    status %d, %zu bytes out: %s\n", r.status, r.out_len, r.err);
    CU_ASSERT_EQUAL(r.status, status);
    CU_ASSERT_EQUAL(r.out_len, 0);
    CU_ASSERT(!strncmp(r.err, "flexgen: ", 9));
    char *end = strchr(r.err, '\n');
    CU_ASSERT(end && end == r.err + r.err_len - 1);
    CU_ASSERT(contains_all(r.err, words));
    result_free(&r);
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void assert_done(const Result *r) {
    if (r->status) fprintf(stderr, "\n    status %d: %s\n", r->status, r->err);
    CU_ASSERT_EQUAL_FATAL(r->status, 0);
    CU_ASSERT_PTR_NULL(strstr(r->err, "flexgen: "));
}

/* The n-th line of a run's completions as JSON; with its fields checked. */
static cJSON *completion(const char *text, int n) {
    static const char *const names[] = {"id", "prompt", "completion", "tokens", "finish_reason"};
    Error err;
    while (text && n--) text = (text = strchr(text, '\n')) ? text + 1 : NULL;
    const char *end = text ? strchr(text, '\n') : NULL;
    CU_ASSERT_PTR_NOT_NULL_FATAL(end);
    cJSON *line = json_parse(text, (size_t)(end - text), &err);
    if (!line) CU_FAIL_FATAL(err.text);
    CU_ASSERT_EQUAL(cJSON_GetArraySize(line), 5);
    for (int i = 0; i < 5; i++) CU_ASSERT(cJSON_HasObjectItem(line, names[i]));
    return line;
}

static int count_lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static int compare_lines(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Sequences may finish in another order: the same text with its lines sorted. */
static char *sorted(const char *text) {
    char *copy = xstrdup(text), *lines[100], *out = xcalloc(strlen(text) + 2, 1);
    int n = 0;
    for (char *line = strtok(copy, "\n"); line && n < 100; line = strtok(NULL, "\n")) lines[n++] = line;
    qsort(lines, (size_t)n, sizeof *lines, compare_lines);
    for (int i = 0; i < n; i++) strcat(strcat(out, lines[i]), "\n");
    free(copy);
    return out;
}

// ---------------------------------------------------------------------------------------------------------------
// A small checkpoint to spoil
// ---------------------------------------------------------------------------------------------------------------

static const char small_config[] =
    "{\"model_type\": \"opt\", \"num_hidden_layers\": 2, \"hidden_size\": 32, \"ffn_dim\": 64, \"num_attention_heads\": 4, "
    "\"vocab_size\": 1024, \"max_position_embeddings\": 64, \"word_embed_proj_dim\": 32, \"eos_token_id\": 2, "
    "\"do_layer_norm_before\": true, \"activation_function\": \"relu\", \"enable_bias\": true}";

typedef struct {
    char header[1 << 14]; /* JSON */
    size_t len, data;     /* its length; bytes of all tensors */
} Safetensors;

static void add_tensor(Safetensors *s, const char *name, int rows, int cols) {
    char shape[40];
    size_t end = s->data + (size_t)(rows ? rows : 1) * (size_t)cols * 2;
    snprintf(shape, sizeof shape, rows ? "%d, %d" : "%.0d%d", rows, cols);
    s->len +=
        (size_t)snprintf(s->header + s->len, sizeof s->header - s->len,
                         "%s\"model.decoder.%s\": {\"dtype\": \"F16\", \"shape\": [%s], \"data_offsets\": [%zu, %zu]}",
                         s->len ? ", " : "{", name, shape, s->data, end);
    s->data = end;
}

static int width = 32; /* of the small model */

/* The header of small_config's model. */
static Safetensors small_header(void) {
    const struct {
        const char *name;
        int rows, cols;
    } layer[] = {{"self_attn_layer_norm.weight", 0, width},
                 {"self_attn_layer_norm.bias", 0, width},
                 {"self_attn.q_proj.weight", width, width},
                 {"self_attn.q_proj.bias", 0, width},
                 {"self_attn.k_proj.weight", width, width},
                 {"self_attn.k_proj.bias", 0, width},
                 {"self_attn.v_proj.weight", width, width},
                 {"self_attn.v_proj.bias", 0, width},
                 {"self_attn.out_proj.weight", width, width},
                 {"self_attn.out_proj.bias", 0, width},
                 {"final_layer_norm.weight", 0, width},
                 {"final_layer_norm.bias", 0, width},
                 {"fc1.weight", 64, width},
                 {"fc1.bias", 0, 64},
                 {"fc2.weight", width, 64},
                 {"fc2.bias", 0, width}};
    Safetensors s = {.len = 0};
    char name[80];
    add_tensor(&s, "embed_tokens.weight", 1024, width);
    add_tensor(&s, "embed_positions.weight", 66, width);
    add_tensor(&s, "final_layer_norm.weight", 0, width);
    add_tensor(&s, "final_layer_norm.bias", 0, width);
    for (int j = 0; j < 2; j++)
        for (size_t r = 0; r < sizeof layer / sizeof *layer; r++) {
            snprintf(name, sizeof name, "layers.%d.%s", j, layer[r].name);
            add_tensor(&s, name, layer[r].rows, layer[r].cols);
        }
    s.len += (size_t)snprintf(s.header + s.len, sizeof s.header - s.len, "}");
    return s;
}

/* dir/model.safetensors: a header of that text, and as many random values as small_config's tensors need. */
static void write_safetensors(const char *dir, const char *header, size_t len) {
    Safetensors small = small_header();
    uint8_t *file = xcalloc(8 + len + small.data, 1);
    uint64_t state = 1;
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(len >> 8 * i);
    memcpy(file + 8, header, len);
    for (size_t e = 0; e < small.data / 2; e++) {
        f16 value = f32_to_f16(0.1f * test_random(&state));
        memcpy(file + 8 + len + 2 * e, &value, 2);
    }
    write_file(dir, "model.safetensors", file, 8 + len + small.data);
    free(file);
}

/* A directory with a good small model, kept for all tests. */
static const char *small_model(void) {
    static char dir[300];
    if (dir[0]) return dir;
    Safetensors s = small_header();
    snprintf(dir, sizeof dir, "%s", temp_dir());
    write_safetensors(dir, s.header, s.len);
    write_file(dir, "config.json", small_config, strlen(small_config));
    copy_file(PIECES, dir, "vocab.json");
    copy_file(PIECES, dir, "merges.txt");
    return dir;
}

/* A copy of the small model. */
static const char *small_copy(void) {
    static const char *const names[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"};
    const char *from = small_model(), *dir = temp_dir();
    for (int i = 0; i < 4; i++) copy_file(from, dir, names[i]);
    return dir;
}

/* A small model 64 numbers wide, of whole groups, and its header in *s. */
static const char *wide_model(Safetensors *s) {
    char config[sizeof small_config];
    const char *dir = small_copy();
    snprintf(config, sizeof config, "%s", small_config);
    for (char *at = config; (at = strstr(at, "\": 32"));) memcpy(at + 3, "64", 2);
    width = 64;
    *s = small_header();
    write_safetensors(dir, s->header, s->len);
    width = 32;
    write_file(dir, "config.json", config, strlen(config));
    return dir;
}

/* text with the first `find` replaced, or with more behind it where find is "". */
static char *replaced(const char *text, size_t *len, const char *find, const char *put, size_t put_len) {
    char *at = *find ? memmem(text, *len, find, strlen(find)) : (char *)text + *len;
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    size_t before = (size_t)(at - text), after = before + strlen(find);
    char *out = xcalloc(*len + put_len + 1, 1);
    memcpy(out, text, before);
    memcpy(out + before, put, put_len);
    memcpy(out + before + put_len, text + after, *len - after);
    *len = *len - strlen(find) + put_len;
    return out;
}

/* Replaces a text of dir/name; of model.safetensors, of its header. */
static void spoil(const char *dir, const char *name, const char *find, const char *put, size_t put_len) {
    bool tensors = !strcmp(name, "model.safetensors");
    Safetensors small = small_header();
    size_t len = small.len;
    char *text = tensors ? xstrdup(small.header) : contents(in_dir(dir, name), &len);
    char *spoilt = replaced(text, &len, find, put, put_len);
    if (tensors)
        write_safetensors(dir, spoilt, len);
    else
        write_file(dir, name, spoilt, len);
    free(text), free(spoilt);
}

// ---------------------------------------------------------------------------------------------------------------
// Wrong use
// ---------------------------------------------------------------------------------------------------------------

/* What is left open is searched for on a machine of numbers: measuring this one takes its time. */
#define LAPTOP "--hardware", "hardware/laptop.json"
#define GENERATE "generate", "--model", MODEL, "--prompt", "Once", LAPTOP

static void a_wrong_flag_is_refused_in_one_line_with_status_2(void) {
    static const struct {
        const char *args[10], *words[3];
    } cases[] = {
        {{"--stop", "\xFF"}, {"--stop", "not valid UTF-8"}},
        {{"--output", "docs/none", "--trace", "docs/experiments/../none"}, {"--trace", "is the file of --output"}},
        {{"--percent", "101", "0", "100", "0", "100", "0"}, {"--percent 101", "from 0 to 100"}},
        {{"--percent", "60", "50", "100", "0", "100", "0"}, {"--percent", "weights", "110"}},
        {{"--percent", "0", "0", "60", "40.1", "100", "0"}, {"--percent", "KV cache"}},
        {{"--percent", "0", "0", "0", "0", "100", "1"}, {"--percent", "activations"}},
        {{"--percent", "-1", "0", "100", "0", "100", "0"}, {"--percent -1"}},
        {{"--percent", "nan", "0", "100", "0", "100", "0"}, {"--percent nan"}},
        {{"--percent", "0", "inf", "100", "0", "100", "0"}, {"--percent inf"}},
        {{"--percent", "0", "", "100", "0", "100", "0"}, {"--percent"}},
        {{"--percent", "0", "5x", "100", "0", "100", "0"}, {"--percent 5x"}},
        {{"--percent", "0", "0", "100", "0", "100"}, {"--percent takes 6 values", "WG WC"}},
        {{"--gpu-men", "1G"}, {"unknown flag --gpu-men", "--gpu-mem"}},
        {{"--prompt-length", "1"}, {"unknown flag --prompt-length", "--prompt"}},
        {{"--prompt-len", "1"}, {"--prompt-len is a flag of bench"}},
        {{"again"}, {"again: expected a flag"}},
        {{"-\n-forged"}, {"unknown flag -?-forged"}},
        {{"--model"}, {"--model takes 1 value"}},
        {{"--gpu-mem", "much"}, {"--gpu-mem much", "16G"}},
        {{"--cpu-mem", "-1G"}, {"--cpu-mem -1G"}},
        {{"--disk-mem", "nan"}, {"--disk-mem nan"}},
        {{"--disk-mem", "1GG"}, {"--disk-mem 1GG"}},
        {{"--disk-mem", "1e30"}, {"--disk-mem 1e30"}},
        {{"--gpu-mem", ""}, {"--gpu-mem"}},
        {{"--max-tokens", "0"}, {"--max-tokens 0", "from 1"}},
        {{"--max-tokens", "1.5"}, {"--max-tokens 1.5"}},
        {{"--max-tokens", "99999999999999999999"}, {"--max-tokens 9999"}},
        {{"--threads", "0"}, {"--threads 0"}},
        {{"--page-tokens", "-16"}, {"--page-tokens -16"}},
        {{"--gpu-batch-size", "0"}, {"--gpu-batch-size 0"}},
        {{"--num-gpu-batches", "two"}, {"--num-gpu-batches two"}},
        {{"--gpu-batch-size", "1048576", "--num-gpu-batches", "65536"},
         {"--gpu-batch-size", "--num-gpu-batches", "at most"}},
        {{"--schedule", "spiral"}, {"--schedule spiral", "row", "diagonal"}},
        {{"--link", "1G"}, {"--link 1G", "ctog=1G"}},
        {{"--link", "ctog"}, {"--link ctog"}},
        {{"--link", "ctog="}, {"--link ctog="}},
        {{"--link", "ctog=0"}, {"--link ctog=0"}},
        {{"--link", "ctog=-1G"}, {"--link ctog=-1G"}},
        {{"--link", "ctog=nan"}, {"--link ctog=nan"}},
        {{"--link", "ctog=1G,"}, {"--link ctog=1G,"}},
        {{"--link", "ctog=1GB"}, {"--link ctog=1GB"}},
        {{"--link", "gpu=1G"}, {"--link gpu=1G"}},
        {{"--link", "ctog=1G", "--device", "cuda"}, {"--link", "host device"}},
        {{"--device", "sim"}, {"--device sim", "bench"}},
        {{"--hardware", "none.json"}, {"none.json"}},
        {{"--hardware", MODEL "/config.json"}, {"config.json", "unknown key"}},
        {{"--cost-model", "runtime"}, {"--cost-model is a flag of policy"}},
        {{"--frontier"}, {"--frontier is a flag of policy"}},
        {{"--max-latency", "0"}, {"--max-latency 0", "from 1e-06"}},
        {{"--max-latency", "nan"}, {"--max-latency nan"}},
        {{"--max-latency", "soon"}, {"--max-latency soon"}},
        {{"--max-latency", "1e-6"}, {"1e-06 s", "--max-latency", "the smallest takes"}},
        {{"--percent", "-", "-", "-", "-", "-", "--"}, {"--percent --"}},
        {{"--percent", "-", "101", "-", "-", "-", "-"}, {"--percent 101"}},
        {{"--device", "tpu"}, {"--device tpu", "host"}},
        {{"--temperature", "-0.1"}, {"--temperature -0.1"}},
        {{"--temperature", "nan"}, {"--temperature nan"}},
        {{"--top-p", "0"}, {"--top-p 0"}},
        {{"--top-p", "1.01"}, {"--top-p 1.01"}},
        {{"--top-k", "-1"}, {"--top-k -1"}},
        {{"--seed", "-1"}, {"--seed -1"}},
        {{"--top-p", "0.9"}, {"--top-p: without --temperature", "--temperature, such as 0.7"}},
        {{"--top-k", "5"}, {"--top-k: without --temperature"}},
        {{"--seed", "3"}, {"--seed: without --temperature"}},
        {{"--stop", ""}, {"--stop", "empty"}},
        {{"--prompts", "-"}, {"--prompt TEXT", "--prompts FILE"}},
        {{"--gpu-mem", "1K"}, {"GPU", "--gpu-mem", "its largest part is"}},
        {{"--cpu-mem", "16"}, {"CPU", "--cpu-mem", "its largest part is"}},
        {{"--disk-mem", "0", "--percent", "100", "0", "0", "0", "100", "0"}, {"disk", "--disk-mem", "its largest part is"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *args[20] = {GENERATE}, *words[4] = {cases[i].words[0], cases[i].words[1], cases[i].words[2], NULL};
        for (int a = 0; a < 10; a++) args[7 + a] = cases[i].args[a];
        assert_refused(run(args), EXIT_USAGE, words);
    }
}

static void a_wrong_command_is_refused_in_one_line_with_status_2(void) {
    assert_refused(RUN("genrate"), EXIT_USAGE, WORDS("unknown command genrate", "generate", "bench"));
    assert_refused(RUN("--model", MODEL), EXIT_USAGE, WORDS("unknown command --model"));
    assert_refused(RUN("generate"), EXIT_USAGE, WORDS("--model is missing"));
    assert_refused(RUN("bench"), EXIT_USAGE, WORDS("--model is missing", "opt-125m"));
    assert_refused(RUN("bench", "--model", "opt-1t"), EXIT_USAGE, WORDS("opt-1t", "opt-125m", "directory"));
    assert_refused(RUN("bench", "--model", MODEL, "--prompts", "-"), EXIT_USAGE, WORDS("--prompts is a flag of generate"));
    assert_refused(RUN("bench", "--model", MODEL, "--prompt-len", "512", "--gen-len", "2"), EXIT_USAGE,
                   WORDS("--gen-len", "513", "512"));
    assert_refused(RUN("bench", "--model", MODEL, "--prompt-len", "16-8"), EXIT_USAGE,
                   WORDS("--prompt-len 16-8", "16-512"));
    assert_refused(RUN("bench", "--model", MODEL, "--gen-len", "4-"), EXIT_USAGE, WORDS("--gen-len 4-"));
    assert_refused(RUN("bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "2-510"), EXIT_USAGE,
                   WORDS("510", "512"));
    assert_refused(RUN("bench", "--model", MODEL, "--device", "sim"), EXIT_USAGE, WORDS("--device sim", "--hardware"));
    assert_refused(RUN("bench", "--model", MODEL, "--nodes", "2"), EXIT_USAGE, WORDS("--nodes", "--device sim"));
    assert_refused(
        RUN("bench", "--model", "opt-125m", "--device", "sim", "--hardware", "hardware/t4.json", "--nodes", "13"),
        EXIT_USAGE, WORDS("13 stages", "12 layers"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--hardware", "x"), EXIT_USAGE, WORDS("x: cannot open"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--with", "gmem=1e9"), EXIT_USAGE,
                   WORDS("--with", "--hardware FILE"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--hardware", "hardware/t4.json", "--with", "ctog=1e9"), EXIT_USAGE,
                   WORDS("--with ctog=1e9", "KEY=NUMBER"));
    assert_refused(RUN("eval", "--model", MODEL, "--bits", "9"), EXIT_USAGE, WORDS("--bits 9", "from 2 to 8"));
    assert_refused(RUN("bench", "--model", MODEL, "--bits", "3"), EXIT_USAGE,
                   WORDS("--bits is a flag of quantize and eval"));
    assert_refused(RUN("bench", "--model", MODEL, "--attn-sparsity", "0"), EXIT_USAGE, WORDS("--attn-sparsity 0", "to 1"));
    assert_refused(RUN("profile", "--prompt", "a"), EXIT_USAGE, WORDS("--prompt is a flag of generate only"));
    assert_refused(RUN("profile", "--model", "opt-1t"), EXIT_USAGE, WORDS("opt-1t", "opt-125m"));
    assert_refused(RUN("profile", "--device", "sim"), EXIT_USAGE, WORDS("--device sim", "only bench"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--device", "sim", "--hardware", "none.json"), EXIT_USAGE,
                   WORDS("none.json"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--device", "sim", "--hardware", MODEL "/config.json"), EXIT_USAGE,
                   WORDS("config.json", "unknown key"));
    assert_refused(RUN("generate", "--model", MODEL), EXIT_USAGE, WORDS("--prompt TEXT", "--prompts FILE"));
    assert_refused(RUN("generate", "--model", "opt-125m", "--prompt", "a"), EXIT_USAGE,
                   WORDS("--model opt-125m: is a name", "a model's directory"));
    assert_refused(RUN("bench", "--model", "opt-125m", "--hardware", "hardware/t4.json", "--gpu-batch-size", "1048576"),
                   EXIT_USAGE, WORDS("--gpu-batch-size"));
}

static void help_goes_to_standard_output_and_names_every_flag(void) {
    static const char *const asked[][3] = {{"help"}, {"--help"}, {"generate", "--help"}, {"bench", "--help"}};
    for (int i = 0; i < 4; i++) {
        Result r = run((const char *const[]){asked[i][0], asked[i][1], NULL});
        assert_done(&r);
        CU_ASSERT(contains_all(
            r.out, WORDS("flexgen generate", "flexgen bench", "flexgen quantize", "--percent", "--stop", "--offload-dir")));
        CU_ASSERT_EQUAL(r.err_len, 0);
        result_free(&r);
    }
    Result r = run((const char *const[]){NULL});
    CU_ASSERT_EQUAL(r.status, EXIT_USAGE);
    CU_ASSERT(r.out_len == 0 && strstr(r.err, "flexgen generate"));
    result_free(&r);
}

// ---------------------------------------------------------------------------------------------------------------
// Hostile files
// ---------------------------------------------------------------------------------------------------------------

static Result generate_small(const char *dir) {
    return RUN("generate", "--model", dir, "--prompt", "a", "--max-tokens", "2", LAPTOP);
}

static void a_spoilt_model_is_refused_in_one_line_that_names_the_file_and_the_field(void) {
    static const char config[] = "config.json", tensors[] = "model.safetensors", vocab[] = "vocab.json",
                      merges[] = "merges.txt";
    static const struct {
        const char *file, *find, *put, *words[3];
    } cases[] = {
        {config, "\"hidden_size\": 32", "\"hidden_size\": 0", {"config.json", "hidden_size is 0", "from 1"}},
        {config, "\"hidden_size\": 32", "\"hidden_size\": -32", {"hidden_size is -32"}},
        {config, "\"hidden_size\": 32", "\"hidden_size\": 1e18", {"hidden_size is 1e+18"}},
        {config, "\"hidden_size\": 32", "\"hidden_size\": \"32\"", {"hidden_size is \"32\""}},
        {config, "\"hidden_size\": 32", "\"hidden_size\": 32.5", {"hidden_size is 32.5"}},
        {config, "\"hidden_size\": 32", "\"hidden_sise\": 32", {"hidden_size is nothing"}},
        {config, "\"hidden_size\": 32", "\"hidden_size\": 36", {"shape", "config.json asks for"}},
        {config, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", {"layers.2", "missing"}},
        {config, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1e9", {"num_hidden_layers"}},
        {config, "heads\": 4", "heads\": 5", {"num_attention_heads 5"}},
        {config, "heads\": 4", "heads\": null", {"num_attention_heads is null"}},
        {config, "\"vocab_size\": 1024", "\"vocab_size\": []", {"vocab_size is a list"}},
        {config, "\"vocab_size\": 1024", "\"vocab_size\": 1025", {"embed_tokens", "1025"}},
        {config, "embeddings\": 64", "embeddings\": 2147483648", {"max_position_embeddings"}},
        {config, "embeddings\": 64", "embeddings\": 65", {"embed_positions"}},
        {config, "\"eos_token_id\": 2", "\"eos_token_id\": 1024", {"eos_token_id is 1024"}},
        {config, "before\": true", "before\": 1", {"do_layer_norm_before", "true or false"}},
        {config, "\"opt\"", "\"llama\"", {"model_type is \"llama\"", "OPT"}},
        {config, "\"relu\"", "\"gelu\"", {"activation_function is \"gelu\""}},
        {config, "{", "{\"hidden_size\": 32, ", {"hidden_size", "twice"}},
        {config, "", " x", {"config.json", "nothing after the value"}},
        {config, "}", "", {"config.json", "text ends here"}},
        {config, "\"opt\"", "\"opt\\u0000\"", {"config.json", "u0000"}},
        {config, "\"relu\"", "\"\xC3(\"", {"config.json", "UTF-8"}},
        {config, "\"relu\"", "\"\\ud800\"", {"config.json", "surrogate"}},
        {tensors, "\"F16\"", "\"I64\"", {"model.safetensors", "embed_tokens", "I64"}},
        {tensors, "\"F16\"", "\"F99\"", {"embed_tokens", "F99", "F16, BF16 or F32"}},
        {tensors, "\"F16\"", "16", {"embed_tokens", "dtype is 16"}},
        {tensors, "[1024, 32]", "[512, 64]", {"embed_tokens", "shape is [512,64]", "[1024,32]"}},
        {tensors, "[1024, 32]", "[32768]", {"embed_tokens", "shape"}},
        {tensors, "[1024, 32]", "[1024, 16]", {"embed_tokens", "shape is [1024,16]"}},
        {tensors, "[1024, 32]", "[-1024, -32]", {"embed_tokens", "shape is [-1024,-32]"}},
        {tensors, "[1024, 32]", "[9007199254740992, 9007199254740992]", {"embed_tokens", "shape"}},
        {tensors, "[1024, 32]", "{}", {"embed_tokens", "shape is an object"}},
        {tensors, "[0, 65536]", "[0, 65537]", {"embed_tokens", "overlap at byte"}},
        {tensors, "[0, 65536]", "[0, 65535]", {"embed_tokens", "data_offsets span 65535 bytes; expected 65536"}},
        {tensors, "[0, 65536]", "[65536, 0]", {"embed_tokens", "data_offsets"}},
        {tensors, "[0, 65536]", "[4224, 69760]", {"overlap"}},
        {tensors, "[0, 65536]", "[1000000, 1065536]", {"embed_tokens", "ends at byte", "complete"}},
        {tensors, "[0, 65536]", "[9007199254675456, 9007199254740992]", {"embed_tokens", "ends at byte"}},
        {tensors, "[0, 65536]", "[0]", {"embed_tokens", "data_offsets"}},
        {tensors, "layers.1.fc2.bias", "layers.1.fc3.bias", {"layers.1.fc2.bias", "missing"}},
        {tensors, "embed_positions", "embed_tokens", {"header", "embed_tokens", "twice"}},
        {tensors, "{", "[", {"header"}},
        {vocab, "\"<pad>\":1", "\"<pad>\":2", {"vocab.json", "both have id 2"}},
        {vocab, "\"<pad>\":1", "\"<s>\":1", {"vocab.json", "twice"}},
        {vocab, "\"<pad>\":1", "\"<pad>\":1024", {"vocab.json", "1024"}},
        {vocab, "\"<pad>\":1", "\"<pad>\":-1", {"vocab.json", "-1"}},
        {vocab, "\"<pad>\":1", "\"<pad>\":1.5", {"vocab.json", "1.5"}},
        {vocab, "\"<pad>\":1", "\"<pad>\":\"1\"", {"vocab.json", "is \"1\", expected a whole number"}},
        {vocab, "\"</s>\"", "\"<end>\"", {"vocab.json", "</s>"}},
        {vocab, "\"a\":", "\"no a\":", {"vocab.json", "0x61"}},
        {vocab, "\"<pad>\"", "\"\xFF\"", {"vocab.json", "UTF-8"}},
        {vocab, "\"<pad>\"", "\"\\u0000\"", {"vocab.json", "u0000"}},
        {vocab, "", "{}", {"vocab.json", "nothing after the value"}},
        {merges, "e r\n", "e qqq\n", {"merges.txt line 4", "qqq"}},
        {merges, "e r\n", "er\n", {"merges.txt line 4", "two pieces"}},
        {merges, "e r\n", "e \xFF\n", {"merges.txt line 4", "UTF-8"}},
        {merges, "", "e r\n", {"merges.txt", "stood before"}},
        {config, "bias\": true", "bias\": false", {"enable_bias is false", "without biases"}},
    };
    const char *dir = small_copy();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *words[4] = {cases[i].words[0], cases[i].words[1], cases[i].words[2], NULL};
        spoil(dir, cases[i].file, cases[i].find, cases[i].put, strlen(cases[i].put));
        assert_refused(generate_small(dir), EXIT_FAILED, words);
        copy_file(small_model(), dir, cases[i].file);
    }
    spoil(dir, config, "\"relu\"", "\"re\0lu\"", 7);
    assert_refused(generate_small(dir), EXIT_FAILED, WORDS("config.json", "control characters"));
    copy_file(small_model(), dir, config);
    Result r = generate_small(dir);
    assert_done(&r); /* what all of them began with is good */
    result_free(&r);
}

static void a_truncated_file_is_refused(void) {
    static const char *const names[] = {"config.json", "vocab.json", "model.safetensors"};
    const char *dir = small_copy();
    for (int i = 0; i < 3; i++) {
        size_t len;
        char *text = contents(in_dir(dir, names[i]), &len);
        const size_t cuts[] = {0, 1, 7, 8, 9, len / 3, len - 2};
        for (size_t c = 0; c < sizeof cuts / sizeof *cuts; c++) {
            write_file(dir, names[i], text, cuts[c]);
            assert_refused(generate_small(dir), EXIT_FAILED, WORDS(names[i]));
        }
        write_file(dir, names[i], text, len);
        free(text);
    }
}

static void a_header_longer_than_its_file_is_refused(void) {
    static const uint8_t claims[][8] = {{255, 255, 255, 255, 255, 255, 255, 255},
                                        {0, 0, 0, 0, 0, 0, 0, 128},
                                        {0, 0, 0, 64, 0, 0, 0, 0},
                                        {0, 0, 2, 0, 0, 0, 0, 0}};
    const char *dir = small_copy();
    size_t len;
    char *text = contents(in_dir(dir, "model.safetensors"), &len);
    for (int i = 0; i < 4; i++) {
        memcpy(text, claims[i], 8);
        write_file(dir, "model.safetensors", text, len);
        assert_refused(generate_small(dir), EXIT_FAILED, WORDS("model.safetensors", "header", "expected"));
    }
    free(text);
}

static void a_missing_file_or_shard_is_refused_by_name(void) {
    static const char *const names[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"};
    for (int i = 0; i < 4; i++) {
        const char *dir = small_copy();
        CHECK(remove(in_dir(dir, names[i])) == 0);
        assert_refused(generate_small(dir), EXIT_FAILED, WORDS(names[i]));
        CHECK(mkdir(in_dir(dir, names[i]), 0755) == 0);
        assert_refused(generate_small(dir), EXIT_FAILED, WORDS(names[i]));
    }
    const char *dir = temp_dir();
    copy_file(SHARDED, dir, "config.json");
    copy_file(SHARDED, dir, "model.safetensors.index.json");
    copy_file(SHARDED, dir, "model-00001-of-00003.safetensors");
    copy_file(SHARDED, dir, "model-00003-of-00003.safetensors");
    assert_refused(generate_small(dir), EXIT_FAILED, WORDS("model-00002-of-00003.safetensors"));
    spoil(dir, "model.safetensors.index.json", "model-00003", "../../x", 7);
    assert_refused(generate_small(dir), EXIT_FAILED, WORDS("weight_map", "same directory"));
}

/* Whatever the command, also where a known name would do. */
static void a_model_that_is_no_directory_is_refused_with_what_is_expected(void) {
    static const struct {
        const char *command, *flag, *value;
        bool name; /* the command takes one */
    } cases[] = {{"generate", "--prompt", "a", false},
                 {"eval", "--perplexity", "Makefile", false},
                 {"quantize", "--output", "no/such", false},
                 {"bench", "--seed", "1", true},
                 {"policy", "--hardware", "hardware/t4.json", true},
                 {"profile", "--threads", "1", true}};
    for (int i = 0; i < 6; i++) {
        const char *const expected = cases[i].name ? "; expected a Hugging Face directory, or one of opt-125m, opt-350m"
                                                   : "; expected a Hugging Face directory, with config.json";
#define OF(model) RUN(cases[i].command, "--model", model, cases[i].flag, cases[i].value)
        const int status = cases[i].name ? EXIT_USAGE : EXIT_FAILED;
        assert_refused(OF("models/none"), status, WORDS("models/none: there is no such directory", expected));
        assert_refused(OF("models/prompts.txt"), status, WORDS("models/prompts.txt: is no directory", expected));
        assert_refused(OF("Makefile/none"), status, WORDS("Makefile/none: Not a directory", expected));
    }
}

static void a_wrong_prompt_is_refused_with_its_line(void) {
    static const struct {
        const char *text;
        size_t len;
        const char *words[2];
    } cases[] = {
#define TEXT(text) text, sizeof text - 1
        {TEXT("fine\nfi\0ne\n"), {"line 2", "NUL"}},
        {TEXT("fine\n\xC3(\n"), {"line 2", "UTF-8"}},
        {TEXT("{\"prompt\": \"a\"}\n{\"prompt\": 1}\n"), {"line 2", "\"prompt\""}},
        {TEXT("{\"prompt\": \"a\"}\nplain\n"), {"line 2", "JSON"}},
        {TEXT("{\"prompt\": \"a\\u0000b\"}\n"), {"line 1", "u0000"}},
        {TEXT("{\"prompt\": \"a\", \"prompt\": \"b\"}\n"), {"line 1", "twice"}},
        {TEXT("{\"prompt\": \"a\"} trailing\n"), {"line 1", "nothing after the value"}},
        {TEXT("{\"prompt\": \"a\", \"max_tokens\": 0}\n"), {"line 1", "max_tokens"}},
        {TEXT("{\"prompt\": \"a\", \"id\": 12345678901234567890}\n"), {"line 1", "\"id\""}},
        {TEXT("{\"prompt\": \"a\", \"id\": 7}\n{\"prompt\": \"b\", \"id\": 7}\n"), {"id 7", "unique"}},
#undef TEXT
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(capture, "prompts", cases[i].text, cases[i].len);
        const char *words[] = {"prompts", cases[i].words[0], cases[i].words[1], NULL};
        assert_refused(RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--strict"), EXIT_FAILED,
                       words);
    }
    char *text = xcalloc(2000, 1);
    for (int i = 0; i < 600; i++) memcpy(text + 3 * i, "we ", 3);
    assert_refused(RUN("generate", "--model", MODEL, "--prompt", text), EXIT_FAILED,
                   WORDS("--prompt", "takes 512", "shorten"));
    free(text);
    assert_refused(RUN("generate", "--model", MODEL, "--prompts", offload), EXIT_FAILED, WORDS(offload, "directory"));
    assert_refused(RUN("generate", "--model", MODEL, "--prompts", "no/such"), EXIT_FAILED,
                   WORDS("no/such", "check the path"));
    with.input = offload;
    assert_refused(RUN("generate", "--model", MODEL, "--prompts", "-"), EXIT_FAILED, WORDS("standard input", "directory"));
}

// ---------------------------------------------------------------------------------------------------------------
// Outputs, signals
// ---------------------------------------------------------------------------------------------------------------

static const char ten_prompts[] =
    "Once upon a time\nThe dog\n\nTom and Lily went to the park.\nShe said: \"Look!\"\nA big red\n"
    "One day\r\nHe was\nThe little bird could not\nMom\nI am caf\xC3\xA9 \xF0\x9F\x98\x80\n";

#define TEN_PROMPTS "generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "12", LAPTOP

static void write_ten_prompts(void) {
    open_directories();
    write_file(capture, "prompts", ten_prompts, strlen(ten_prompts));
}

// ---------------------------------------------------------------------------------------------------------------
// A disk that does not play along
// ---------------------------------------------------------------------------------------------------------------

#define ON_DISK "--percent", "0", "0", "0", "0", "0", "0"

static void a_full_or_unwritable_offload_directory_is_refused_by_name(void) {
    with.file = 4096;
    assert_refused(RUN(GENERATE, ON_DISK), EXIT_FAILED, WORDS("offload", offload, "--offload-dir"));
    assert_refused(RUN(GENERATE, ON_DISK, "--offload-dir", "Makefile"), EXIT_FAILED,
                   WORDS("offload", "Makefile", "--offload-dir"));
    assert_refused(RUN(GENERATE, ON_DISK, "--offload-dir", "/proc", "--disk-mem", "1G"), EXIT_FAILED,
                   WORDS("/proc", "--offload-dir"));
    assert_refused(RUN(GENERATE, ON_DISK, "--offload-dir", "no/such"), EXIT_USAGE,
                   WORDS("--offload-dir no/such", "directory"));
}

static void an_output_that_cannot_be_written_is_an_error(void) {
    assert_refused(RUN(GENERATE, "--output", "no/such/file"), EXIT_FAILED, WORDS("--output no/such/file", "No such file"));
    assert_refused(RUN(GENERATE, "--output", offload), EXIT_FAILED, WORDS("--output", offload, "directory"));
    assert_refused(RUN(GENERATE, "--output", "/dev/full"), EXIT_FAILED, WORDS("/dev/full", "No space left"));
    with.output = "/dev/full";
    assert_refused(RUN(GENERATE), EXIT_FAILED, WORDS("standard output", "No space left"));
    with.output = "/dev/full";
    assert_refused(RUN("help"), EXIT_FAILED, WORDS("standard output", "No space left"));
    with.output = "/dev/full";
    assert_refused(RUN("quantize", "--help"), EXIT_FAILED, WORDS("standard output", "No space left"));
    with.output = "/dev/full"; /* where a copy writes nothing */
    Result copy = RUN("quantize", "--model", MODEL, "--output", in_dir(temp_dir(), "copy"));
    assert_done(&copy);
    CU_ASSERT(count_lines(copy.err) == 1 && strstr(copy.err, " packed to "));
    result_free(&copy);
    static const char *const bench[] = {"bench",         "--model", MODEL,  "--prompt-len", "4",  "--gen-len", "2",
                                        "--num-prompts", "4",       LAPTOP, "--json",       NULL, NULL};
    for (int i = 0; i < 3; i++) {
        const char *args[14];
        memcpy(args, bench, sizeof args);
        args[12] = i == 0 ? "-" : i == 1 ? "/dev/full" : "no/such/file";
        if (i == 0) with.output = "/dev/full";
        Result r = run(args);
        CU_ASSERT_EQUAL(r.status, EXIT_FAILED);
        CU_ASSERT(contains_all(r.err, WORDS("flexgen: --json", args[12], i == 2 ? "No such file" : "No space left")));
        char *last = strstr(r.err, "flexgen: ");
        CU_ASSERT(last && strchr(last, '\n') == r.err + r.err_len - 1); /* behind the plan, one line */
        result_free(&r);
    }
}

/* Nothing is touched before everything that can be refused has been, and nothing that is there without being told. */
static void an_older_output_is_left_alone(void) {
    write_file(capture, "old", "precious\n", 9);
    char old[700];
    snprintf(old, sizeof old, "%s", in_dir(capture, "old"));
    assert_refused(RUN(GENERATE, "--output", old), EXIT_USAGE, WORDS("old", "--resume", "--overwrite"));
    assert_refused(RUN(GENERATE, "--output", old, "--overwrite", "--gpu-mem", "1K"), EXIT_USAGE, WORDS("--gpu-mem"));
    assert_refused(RUN(GENERATE, "--output", old, "--resume"), EXIT_USAGE, WORDS("old", "no journal"));
    assert_refused(RUN(GENERATE, "--output", old, "--resume", "--overwrite"), EXIT_USAGE, WORDS("--resume", "--overwrite"));
    assert_refused(RUN("generate", "--model", MODEL, "--prompts", old, "--output", old, LAPTOP), EXIT_USAGE,
                   WORDS("--output", "prompts"));
    assert_refused(RUN("profile", "--output", old, "--gpu-mem", "1K", "--offload-dir", "no/such"), EXIT_USAGE,
                   WORDS("no/such"));
    size_t len;
    char *text = contents(old, &len);
    CU_ASSERT_STRING_EQUAL(text, "precious\n");
    free(text);
    CU_ASSERT(access(in_dir(capture, "old.journal"), F_OK) != 0);
    Result r = RUN(GENERATE, "--max-tokens", "2", "--output", old, "--overwrite");
    assert_done(&r);
    text = contents(old, &len);
    cJSON_Delete(completion(text, 0));
    free(text);
    result_free(&r);
    assert_refused(RUN(GENERATE, "--resume"), EXIT_USAGE, WORDS("--resume", "--output"));
}

static void results_are_not_written_over_the_model(void) {
    char dir[300];
    static const char *const names[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"};
    snprintf(dir, sizeof dir, "%s", small_copy());
    for (int i = 0; i < 4; i++) {
        char path[700];
        snprintf(path, sizeof path, "%s", in_dir(dir, names[i]));
        assert_refused(RUN("generate", "--model", dir, "--prompt", "a", LAPTOP, "--overwrite", "--output", path),
                       EXIT_USAGE, WORDS("--output: is a file of the model"));
        assert_refused(RUN("generate", "--model", dir, "--prompt", "a", LAPTOP, "--trace", path), EXIT_USAGE,
                       WORDS("--trace: is a file of the model"));
        assert_refused(RUN("bench", "--model", dir, LAPTOP, "--json", path), EXIT_USAGE,
                       WORDS("--json: is a file of the model"));
    }
}

/* The file that a link leads to is replaced, and standard output is written where it stands, whatever it is called. */
static void a_link_stays_a_link_and_standard_output_may_have_any_name(void) {
    struct stat st;
    size_t len;
    char file[700], name[700];
    open_directories();
    snprintf(file, sizeof file, "%s", in_dir(capture, "file")), snprintf(name, sizeof name, "%s", in_dir(capture, "link"));
    write_file(capture, "file", "old", 3);
    CHECK(symlink("file", name) == 0);
    Result plain = RUN(GENERATE, "--max-tokens", "2", "--trace", name);
    assert_done(&plain);
    CU_ASSERT(lstat(name, &st) == 0 && S_ISLNK(st.st_mode));
    char *trace = contents(file, &len);
    CU_ASSERT(!strncmp(trace, "{\"displayTimeUnit\"", 18));
    CHECK(unlink(file) == 0);
    assert_refused(RUN(GENERATE, "--output", name), EXIT_FAILED, WORDS("--output", "link to nothing"));
    Result named = RUN(GENERATE, "--max-tokens", "2", "--output", "/dev/stdout");
    assert_done(&named);
    CU_ASSERT_STRING_EQUAL(named.out, plain.out);
    free(trace), result_free(&plain), result_free(&named);
}

/* What few people have more than one of is counted as one; and a completion that ends where the model's positions do is
 * told from one that ends by itself. */
static void one_is_not_counted_as_many(void) {
    static const char words[] = "{\"text\": \"Once upon a time\"}\n";
    open_directories();
    write_file(capture, "words", words, sizeof words - 1);
    static const char *const texts[] = {"1 token in 1 window of 2, ", "4 tokens in 1 window of 5, ",
                                        "6 tokens in 2 windows of 4, "};
    static const char *const windows[] = {"2", "5", "4"}, *const limits[] = {"1", "1", "2"};
    for (int i = 0; i < 3; i++) {
        Result r = RUN("eval", "--model", MODEL, "--perplexity", MODEL "/stories.txt", "--window", windows[i], "--limit",
                       limits[i], "--threads", "1", LAPTOP);
        assert_done(&r);
        CU_ASSERT(contains_all(r.out, WORDS(texts[i], ", 1 thread, ")));
        result_free(&r);
    }
    Result r = RUN("eval", "--model", MODEL, "--last-word", in_dir(capture, "words"), LAPTOP);
    assert_done(&r);
    CU_ASSERT(contains_all(r.out, WORDS(": 1 line\n")));
    result_free(&r);
    r = RUN("generate", "--model", MODEL, "--prompt", "a", "--max-tokens", "1", "--verbose", LAPTOP);
    assert_done(&r);
    CU_ASSERT(contains_all(r.err, WORDS("1 prompt, 1 token in ", "1 batch in flight, 1 sweep;")));
    result_free(&r);
}

static void a_completion_that_the_positions_cut_short_is_counted(void) {
    static const char prompts[] =
        "{\"prompt\": \"a\", \"max_tokens\": 1000}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\", \"max_tokens\": 65}\n";
    open_directories();
    write_file(capture, "prompts", prompts, sizeof prompts - 1);
    Result r =
        RUN("generate", "--model", small_model(), "--prompts", in_dir(capture, "prompts"), "--max-tokens", "63", LAPTOP);
    assert_done(&r);
    CU_ASSERT(contains_all(r.err, WORDS("2 of 3 completions cut short: the model has 64 positions")));
    result_free(&r);
    r = RUN("generate", "--model", small_model(), "--prompt", "b", "--max-tokens", "63", LAPTOP);
    assert_done(&r);
    CU_ASSERT_PTR_NULL(strstr(r.err, "cut short"));
    result_free(&r);
}

/* small_model with a head of its own behind it, which config.json, by default, ties. */
static void a_head_that_differs_from_the_table_is_used_and_said(void) {
    static const char head[] =
        ", \"lm_head.weight\": {\"dtype\": \"F16\", \"shape\": [1024, 64], \"data_offsets\": [%zu, %zu]}}";
    char dir[300], copy[700];
    Safetensors s;
    snprintf(dir, sizeof dir, "%s", wide_model(&s));
    Result tied = generate_small(dir);
    snprintf(copy, sizeof copy, "%s/copy", temp_dir());
    const size_t bytes = 1024 * 64 * 2;
    s.len += (size_t)sprintf(s.header + s.len - 1, head, s.data, s.data + bytes) - 1;
    width = 64;
    write_safetensors(dir, s.header, s.len);
    width = 32;
    FILE *f = fopen(in_dir(dir, "model.safetensors"), "ab");
    for (size_t b = 0; b < bytes / 2; b++) fputc((int)b, f), fputc(0x20, f); /* around .01 */
    CHECK(!fclose(f));
    Result r = generate_small(dir), packed = RUN("quantize", "--model", dir, "--output", copy);
    assert_done(&r), assert_done(&packed), assert_done(&tied);
    CU_ASSERT(contains_all(r.err, WORDS(dir, "lm_head.weight differs from the token table", "tie_word_embeddings")));
    CU_ASSERT(contains_all(packed.err, WORDS("lm_head.weight differs from the token table")));
    CU_ASSERT_PTR_NULL(strstr(tied.err, "lm_head"));
    CU_ASSERT_STRING_NOT_EQUAL(r.out, tied.out);
    result_free(&r), result_free(&packed), result_free(&tied);
}

/* The first and the last prompt are good. */
static void a_job_goes_on_beside_prompts_that_are_impossible(void) {
    static const char *const names[] = {"one", "two", "three"};
    static const char *const prompts[] = {
        "One\n\xFF\nTwo\n", "{\"prompt\": \"One\"}\n{\"prompt\": 1}\n{\"prompt\": \"Two\"}\n",
        "{\"id\": 1, \"prompt\": \"One\"}\n{\"id\": 1, \"prompt\": \"\"}\n{\"prompt\": \"Two\"}\n"};
    for (int i = 0; i < 3; i++) {
        write_file(capture, "prompts", prompts[i], strlen(prompts[i]));
        Result r = RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "3", LAPTOP);
        Error err;
        CU_ASSERT_EQUAL(r.status, EXIT_FAILED);
        CU_ASSERT(contains_all(r.err, WORDS("flexgen: 1 of 3 prompts could not be completed")));
        CU_ASSERT_EQUAL_FATAL(count_lines(r.out), 3);
        cJSON_Delete(completion(r.out, 0)), cJSON_Delete(completion(r.out, 2));
        const char *line = strchr(r.out, '\n') + 1;
        cJSON *error = json_parse(line, (size_t)(strchr(line, '\n') - line), &err);
        if (!error) CU_FAIL_FATAL(err.text);
        CU_ASSERT_EQUAL(cJSON_GetArraySize(error), 2);
        CU_ASSERT_EQUAL(cJSON_GetObjectItem(error, "id")->valueint, 1);
        CU_ASSERT(!strncmp(cJSON_GetObjectItem(error, "error")->valuestring, "line 2: ", 8));
        cJSON_Delete(error);
        char output[700];
        snprintf(output, sizeof output, "%s", in_dir(capture, names[i]));
        write_file(capture, names[i], r.out, r.out_len);
        Result again = RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "3",
                           LAPTOP, "--output", output, "--resume");
        CU_ASSERT_EQUAL(again.status, EXIT_FAILED); /* of a job that has ended, too */
        CU_ASSERT(contains_all(again.err, WORDS("nothing is left to do", "flexgen: 1 of 3 prompts")));
        result_free(&r), result_free(&again);
    }
}

/* Waits until the journal of a job that runs has so many bytes. */
static void wait_for_journal(pid_t pid, const char *output, off_t bytes) {
    char path[720];
    struct stat st = {0};
    snprintf(path, sizeof path, "%s.journal", output);
    while ((stat(path, &st) || st.st_size < bytes) && program_runs(pid)) usleep(1000);
    CU_ASSERT(st.st_size >= bytes);
}

/* The prompts fit; with what has been generated behind them they do not any more. */
static void a_job_goes_on_in_smaller_batches_where_longer_prompts_do_not_fit(void) {
#define EIGHT                                                                                                              \
    "generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "200", "--gpu-batch-size", "8", \
        "--num-gpu-batches", "1", "--percent", "100", "0", "100", "0", "100", "0", "--gpu-mem", "22200K"
    static const char prompts[] = "a\nb\nc\nd\ne\nf\ng\nh\n";
    char output[700];
    size_t len;
    open_directories();
    write_file(capture, "prompts", prompts, strlen(prompts));
    snprintf(output, sizeof output, "%s", in_dir(capture, "eight"));
    Result plain = RUN(EIGHT);
    assert_done(&plain);
    pid_t pid = START(EIGHT, "--output", output);
    wait_for_journal(pid, output, 400 + 100 * 76); /* a hundred sweeps */
    kill(pid, SIGKILL);
    Result killed = finish(pid), rest = RUN(EIGHT, "--output", output, "--resume");
    CU_ASSERT_EQUAL(killed.status, 1000 + SIGKILL);
    assert_done(&rest);
    CU_ASSERT(contains_all(rest.err, WORDS("do not fit: going on with --gpu-batch-size 4", "8 prompts, ")));
    char *text = contents(output, &len);
    CU_ASSERT_STRING_EQUAL(text, plain.out);
    free(text);
    result_free(&plain), result_free(&killed), result_free(&rest);
}

/* Stopped by a signal between two tokens, the run says how to go on; and does. */
static void a_signal_stops_a_job_that_then_goes_on(void) {
    static const int signals[] = {SIGINT, SIGTERM};
    size_t len;
    write_ten_prompts();
    Result plain = RUN(TEN_PROMPTS, "--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "3",
                       "--num-gpu-batches", "1");
    assert_done(&plain);
    for (int i = 0; i < 2; i++) {
        char output[700];
        snprintf(output, sizeof output, "%s", in_dir(capture, i ? "stopped" : "interrupted"));
        pid_t pid = START(TEN_PROMPTS, "--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "3",
                          "--num-gpu-batches", "1", "--output", output, "--link", "ctog=50M");
        wait_for_journal(pid, output, 500); /* behind its head are some tokens */
        kill(pid, signals[i]);
        assert_refused(finish(pid), 128 + signals[i], WORDS(i ? "SIGTERM" : "SIGINT", "go on with --resume"));
        Result rest = RUN(TEN_PROMPTS, "--output", output, "--resume");
        assert_done(&rest);
        char *text = contents(output, &len);
        CU_ASSERT_STRING_EQUAL(text, plain.out);
        free(text);
        result_free(&rest);
    }
    result_free(&plain);
}

/* Whose output nobody reads: it has no journal, and does not wait for a reader. */
static void a_signal_stops_a_job_whose_pipe_is_full(void) {
    char prompts[4000] = "";
    int ends[2];
    open_directories();
    for (int i = 0; i < 100; i++) strcat(prompts, "There was a girl who had a red ball.\n");
    write_file(capture, "prompts", prompts, strlen(prompts));
    CHECK(pipe2(ends, O_CLOEXEC) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 4096) >= 4096);
    with.pipe = ends[1];
    pid_t pid = START("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), LAPTOP, "--max-tokens", "9");
    close(ends[1]);
    while (poll(&(struct pollfd){.fd = ends[0], .events = POLLIN}, 1, -1) != 1) CHECK(errno == EINTR);
    usleep(500000); /* or longer than the whole job takes */
    kill(pid, SIGTERM);
    Result r = finish(pid);
    CU_ASSERT_EQUAL(r.status, 128 + SIGTERM);
    CU_ASSERT_STRING_EQUAL(r.err, "flexgen: stopped by SIGTERM\n");
    close(ends[0]);
    result_free(&r);
}

/* Ten prompts, killed on the way; then a text of the journal becomes another. */
static void kill_and_edit(const char *output, const char *from, const char *to) {
    char journal[720];
    size_t len;
    pid_t pid = START(TEN_PROMPTS, "--output", output, "--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size",
                      "3", "--num-gpu-batches", "1", "--link", "ctog=50M");
    wait_for_journal(pid, output, 500);
    kill(pid, SIGKILL);
    Result killed = finish(pid);
    snprintf(journal, sizeof journal, "%s.journal", output);
    char *text = contents(journal, &len), *edited = replaced(text, &len, from, to, strlen(to));
    write_file(capture, strrchr(journal, '/') + 1, edited, len);
    free(text), free(edited), result_free(&killed);
}

/* What somebody has written into a journal's head is no policy. */
static void a_head_that_was_edited_is_refused(void) {
    static const char *const edits[][2] = {{"\"bits of weights\":0", "\"bits of weights\":9"},
                                           {"\"bits of the cache\":0", "\"bits of the cache\":4"}};
    char output[700];
    write_ten_prompts();
    for (int i = 0; i < 2; i++) {
        snprintf(output, sizeof output, "%s", in_dir(capture, i ? "edited" : "edited too"));
        kill_and_edit(output, edits[i][0], edits[i][1]);
        assert_refused(
            RUN(TEN_PROMPTS, "--output", output, "--resume", "--allow-compression"), EXIT_USAGE,
            WORDS("is of another job", i ? "group of the cache is 0, and here it is 64" : "bits of weights is 9"));
    }
}

/* The journal of a program that added in another order, and of one that did not say in which. */
static void another_order_of_sums_is_said(void) {
    char now[20], output[700];
    const char *const puts[] = {now, "\"sums\":1", "\"others\":2"};
    snprintf(now, sizeof now, "\"sums\":%d", HOST_SUMS);
    write_ten_prompts();
    for (int i = 0; i < 3; i++) {
        snprintf(output, sizeof output, "%s%d", in_dir(capture, "sums"), i);
        kill_and_edit(output, now, puts[i]);
        Result rest = RUN(TEN_PROMPTS, "--output", output, "--resume");
        assert_done(&rest);
        CU_ASSERT_EQUAL(strstr(rest.err, "going on with another version of this program") != NULL, i > 0);
        result_free(&rest);
    }
}

static void a_disk_that_fills_up_keeps_what_was_reported_as_done(void) {
    char prompts[1000] = "", *output = in_dir(capture, "partial");
    for (int i = 0; i < 40; i++) strcat(prompts, "A dog and a cat.\n");
    write_file(capture, "prompts", prompts, strlen(prompts));
    with.file = 2000;
    Result r =
        RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "8", "--gpu-batch-size",
            "2", "--num-gpu-batches", "1", "--percent", "100", "0", "100", "0", "100", "0", "--output", output);
    assert_refused(r, EXIT_FAILED, WORDS("cannot write", "partial", "File too large"));
    size_t len;
    char *text = contents(output, &len);
    int lines = count_lines(text);
    CU_ASSERT(lines > 2 && lines < 40);
    for (int i = 0; i < lines; i++) cJSON_Delete(completion(text, i));
    free(text);
}

/* When the first of the hundred lines has come, the run is under way. */
static void a_killed_run_leaves_no_offload_file_and_whole_lines(void) {
    static const int signals[] = {SIGKILL, SIGINT, SIGTERM};
    char prompts[4000] = "";
    open_directories();
    for (int i = 0; i < 100; i++) strcat(prompts, "There was a girl who had a red ball.\n");
    write_file(capture, "prompts", prompts, strlen(prompts));
    for (int i = 0; i < 3; i++) {
        static char out[1 << 16];
        int ends[2];
        size_t len = 0;
        CHECK(pipe2(ends, O_CLOEXEC) == 0);
        with.pipe = ends[1];
        pid_t pid = START("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), ON_DISK, "--max-tokens",
                          "50", "--gpu-batch-size", "2", "--num-gpu-batches", "1", "--threads", "1");
        close(ends[1]);
        ssize_t n = read(ends[0], out, sizeof out - 1);
        kill(pid, signals[i]);
        for (; n > 0; n = read(ends[0], out + len, sizeof out - 1 - len)) len += (size_t)n;
        close(ends[0]);
        out[len] = 0;
        Result r = finish(pid);
        const int expected = signals[i] == SIGKILL ? 1000 + SIGKILL : 128 + signals[i];
        if (r.status != expected) fprintf(stderr, "\n    status %d, %zu bytes out: %s\n", r.status, len, r.err);
        CU_ASSERT_EQUAL(r.status, expected);
        int lines = count_lines(out);
        CU_ASSERT(lines > 0 && lines < 100 && out[len - 1] == '\n');
        for (int line = 0; line < lines; line++) cJSON_Delete(completion(out, line));
        result_free(&r);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Good runs
// ---------------------------------------------------------------------------------------------------------------

static void prompts_come_from_flags_a_file_or_standard_input(void) {
    write_ten_prompts();
    Result file = RUN(TEN_PROMPTS);
    with.input = in_dir(capture, "prompts");
    Result input = RUN("generate", "--model", MODEL, "--prompts", "-", "--max-tokens", "12", LAPTOP);
    assert_done(&file), assert_done(&input);
    CU_ASSERT_EQUAL(count_lines(file.out), 10);
    CU_ASSERT_STRING_EQUAL(file.out, input.out);
    Result flag = RUN("generate", "--model", MODEL, "--prompt", "Once upon a time", "--prompt", "The dog", "--max-tokens",
                      "12", LAPTOP);
    assert_done(&flag);
    char *of_file = sorted(file.out), *of_flag = sorted(flag.out);
    CU_ASSERT(!strncmp(of_flag, of_file, strlen(of_flag)));            /* ids 0 and 1 */
    cJSON *line = completion(of_file, 2);                              /* "0", "1", "10", "3" */
    CU_ASSERT_EQUAL(cJSON_GetObjectItem(line, "id")->valuedouble, 10); /* blank lines count */
    CU_ASSERT_STRING_EQUAL(cJSON_GetObjectItem(line, "prompt")->valuestring, "I am caf\xC3\xA9 \xF0\x9F\x98\x80");
    cJSON_Delete(line);
    free(of_file), free(of_flag);
    result_free(&file), result_free(&input), result_free(&flag);
}

static void every_policy_writes_the_same_completions(void) {
    static const char *const policies[][14] = {
        {"--gpu-batch-size", "2", "--num-gpu-batches", "2"},  /* more prompts than a block */
        {"--gpu-batch-size", "64", "--num-gpu-batches", "3"}, /* fewer than a batch */
        {"--gpu-batch-size", "3", "--schedule", "row"},
        {"--gpu-batch-size", "3", "--num-gpu-batches", "2", ON_DISK},
        {"--percent", "30", "30", "30", "30", "30", "30", "--cpu-cache-compute"},
        {"--no-overlap", "--page-tokens", "5", "--threads", "1"},
        {"--synchronize", "--percent", "30", "30", "30", "30", "30", "30"},
        {"--gpu-mem", "5M"},
        {"--schedule", "diagonal", "--gpu-batch-size", "2", "--num-gpu-batches", "2"}, /* some stop early: topups */
        {"--schedule", "diagonal", "--gpu-batch-size", "1", "--num-gpu-batches", "3", ON_DISK},
        {"--schedule", "diagonal"},
        {"--link", "ctog=0.1G,gtoc=50M", "--percent", "0", "100", "0", "100", "0", "100"},
    };
    write_ten_prompts();
    Result plain = RUN(TEN_PROMPTS);
    assert_done(&plain);
    char *expected = sorted(plain.out);
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        const char *args[24] = {TEN_PROMPTS};
        for (int a = 0; a < 14; a++) args[9 + a] = policies[i][a];
        Result r = run(args);
        assert_done(&r);
        char *got = sorted(r.out);
        CU_ASSERT_STRING_EQUAL(got, expected);
        free(got);
        result_free(&r);
    }
    free(expected);
    result_free(&plain);
}

static void one_seed_gives_one_output_and_another_gives_another(void) {
#define SAMPLED TEN_PROMPTS, "--temperature", "1", "--top-p", "0.95", "--top-k", "50", "--seed"
    write_ten_prompts();
    Result a = RUN(SAMPLED, "5"), b = RUN(SAMPLED, "5", "--gpu-batch-size", "3"), c = RUN(SAMPLED, "6"),
           greedy = RUN(TEN_PROMPTS);
    Result narrow = RUN(TEN_PROMPTS, "--temperature", "1", "--top-k", "1", "--seed", "9");
    Result cold = RUN(TEN_PROMPTS, "--temperature", "0", "--top-k", "50", "--seed", "9");
    assert_done(&cold);
    CU_ASSERT_STRING_EQUAL(greedy.out, cold.out); /* whoever says 0 means it */
    result_free(&cold);
    assert_done(&a), assert_done(&b), assert_done(&c), assert_done(&greedy), assert_done(&narrow);
    char *of_a = sorted(a.out), *of_b = sorted(b.out), *of_c = sorted(c.out);
    CU_ASSERT_STRING_EQUAL(of_a, of_b);
    CU_ASSERT_STRING_NOT_EQUAL(of_a, of_c);
    CU_ASSERT_STRING_EQUAL(greedy.out, narrow.out); /* the likeliest one of one */
    CU_ASSERT_STRING_NOT_EQUAL(greedy.out, a.out);
    free(of_a), free(of_b), free(of_c);
    result_free(&a), result_free(&b), result_free(&c), result_free(&greedy), result_free(&narrow);
}

static void no_prompts_are_no_work_and_no_error(void) {
    static const char *const nothing[] = {"", "\n\r\n \t\n", "\xEF\xBB\xBF"};
    for (int i = 0; i < 3; i++) {
        write_file(capture, "prompts", nothing[i], strlen(nothing[i]));
        Result r = RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"));
        assert_done(&r);
        CU_ASSERT_EQUAL(r.out_len, 0);
        result_free(&r);
    }
}

static void output_to_a_file_is_what_standard_output_would_be(void) {
    Result out = RUN(GENERATE, "--max-tokens", "8"),
           file = RUN(GENERATE, "--max-tokens", "8", "--output", in_dir(capture, "completions"));
    Result dash = RUN(GENERATE, "--max-tokens", "8", "--output", "-");
    assert_done(&out), assert_done(&file), assert_done(&dash);
    size_t len;
    char *text = contents(in_dir(capture, "completions"), &len);
    CU_ASSERT_STRING_EQUAL(text, out.out);
    CU_ASSERT_STRING_EQUAL(dash.out, out.out);
    CU_ASSERT_EQUAL(file.out_len, 0);
    free(text);
    result_free(&out), result_free(&file), result_free(&dash);
}

static void a_stop_text_ends_a_completion_before_it(void) {
    Result all = RUN("generate", "--model", MODEL, "--prompt", "Once upon a time", "--max-tokens", "40", LAPTOP);
    Result cut = RUN("generate", "--model", MODEL, "--prompt", "Once upon a time", "--max-tokens", "40", "--stop", ".",
                     "--stop", "zebra", LAPTOP);
    assert_done(&all), assert_done(&cut);
    cJSON *whole = completion(all.out, 0), *part = completion(cut.out, 0);
    const char *text = cJSON_GetObjectItem(whole, "completion")->valuestring, *stop = strchr(text, '.');
    const char *before = cJSON_GetObjectItem(part, "completion")->valuestring;
    CU_ASSERT_PTR_NOT_NULL_FATAL(stop);
    CU_ASSERT(strlen(before) == (size_t)(stop - text) && !strncmp(before, text, strlen(before)));
    CU_ASSERT_STRING_EQUAL(cJSON_GetObjectItem(part, "finish_reason")->valuestring, "stop");
    CU_ASSERT(cJSON_GetArraySize(cJSON_GetObjectItem(part, "tokens")) <
              cJSON_GetArraySize(cJSON_GetObjectItem(whole, "tokens")));
    cJSON_Delete(whole), cJSON_Delete(part);
    result_free(&all), result_free(&cut);
}

// ---------------------------------------------------------------------------------------------------------------
// bench
// ---------------------------------------------------------------------------------------------------------------

static double number(const cJSON *object, const char *name) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (!cJSON_IsNumber(item)) fprintf(stderr, "\n    no number %s\n", name);
    CU_ASSERT(cJSON_IsNumber(item));
    return item ? item->valuedouble : NAN;
}

/* One object with all the names of the paper, whose numbers agree with each other. */
static void assert_bench(const cJSON *json, double wd, double gbs, double batches, double s, double n) {
    static const char *const names[] = {"wg", "wc", "cg", "cc", "cd", "hg", "hc", "hd", "T_pre", "T_gen", "throughput"};
    static const char *const tiers[] = {"GPU", "CPU", "disk"}, *const channels[] = {"ctog", "gtoc", "dtoc",
                                                                                    "ctod", "gpu",  "cpu"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) CU_ASSERT(number(json, names[i]) >= 0);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "wd"), wd, 1e-9);
    CU_ASSERT(number(json, "gbs") == gbs && number(json, "num_gpu_batches") == batches &&
              number(json, "bls") == gbs * batches);
    CU_ASSERT(number(json, "s") == s && number(json, "n") == n);
    double total = number(json, "total_s"), prefill = number(json, "prefill_s"), decode = number(json, "decode_s");
    CU_ASSERT(prefill > 0 && decode > 0);
    CU_ASSERT_DOUBLE_EQUAL(prefill + decode, total, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "T"), total, 1e-6);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "generation_throughput") * total, gbs * batches * n, 1e-3);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "decode_throughput") * decode, gbs * batches * (n - 1), 1e-3);
    for (int i = 0; i < 3; i++) {
        const cJSON *tier = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "tiers"), tiers[i]);
        CU_ASSERT(number(tier, "planned_bytes") >= number(tier, "peak_bytes"));
    }
    for (int i = 0; i < 6; i++) {
        const cJSON *channel =
            cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "channels"), channels[i]);
        CU_ASSERT(number(channel, "moved_bytes") >= 0 && number(channel, "busy_s") >= 0);
    }
}

static void bench_reports_one_json_object_with_the_names_of_the_paper(void) {
    Error err;
    Result r = RUN("bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "4", "--gpu-batch-size", "2",
                   "--num-gpu-batches", "2", "--percent", "100", "0", "100", "0", "100", "0", "--json", "-");
    assert_done(&r);
    cJSON *json = json_parse(r.out, r.out_len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    assert_bench(json, 0, 2, 2, 8, 4);
    cJSON_Delete(json);
    result_free(&r);
}

static void bench_reports_a_disk_share_in_a_file(void) {
    Error err;
    size_t len;
    Result r = RUN("bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "4", "--percent", "0", "50", "0", "50", "0",
                   "50", "--gpu-batch-size", "4", "--num-gpu-batches", "1", "--json", in_dir(capture, "bench.json"));
    assert_done(&r);
    CU_ASSERT(contains_all(r.out, WORDS("prefill", "decode", "token/s")));
    char *text = contents(in_dir(capture, "bench.json"), &len);
    cJSON *json = json_parse(text, len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    assert_bench(json, 0.5, 4, 1, 8, 4);
    const cJSON *channels = cJSON_GetObjectItem(json, "channels"),
                *disk = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "tiers"), "disk");
    CU_ASSERT(number(cJSON_GetObjectItem(channels, "dtoc"), "moved_bytes") > 0);
    CU_ASSERT(number(cJSON_GetObjectItem(channels, "ctod"), "moved_bytes") > 0);
    CU_ASSERT(number(disk, "peak_bytes") > 0);
    free(text);
    cJSON_Delete(json);
    result_free(&r);
}

/* Numbers of a JSON file that bench has written. */
static cJSON *read_json(const char *path) {
    Error err;
    size_t len;
    char *text = contents(path, &len);
    cJSON *json = json_parse(text, len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    free(text);
    return json;
}

/* OPT-175B at the paper's 32 x 8, on the paper's machine: no file, no data, and the plan is what is used. */
static void the_sim_runs_opt_175b_on_a_t4(void) {
    Result r = RUN("bench", "--model", "opt-175b", "--device", "sim", "--hardware", "hardware/t4.json", "--gpu-batch-size",
                   "32", "--num-gpu-batches", "8", "--percent", "0", "50", "0", "0", "0", "100", "--cpu-cache-compute",
                   "--json", in_dir(capture, "sim.json"));
    assert_done(&r);
    CU_ASSERT(contains_all(r.out, WORDS("breakdown", "weight (R)", "cache (W)")));
    cJSON *json = read_json(in_dir(capture, "sim.json"));
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json, "device")), "sim");
    assert_bench(json, .5, 32, 8, 512, 32);
    double rate = number(json, "throughput"); /* the paper measured 0.69; the disk alone bounds it by 0.65 here */
    CU_ASSERT(rate > .4 && rate < .7);
    for (int t = 0; t < 3; t++) {
        const cJSON *tier = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "tiers"), t);
        CU_ASSERT(number(tier, "planned_bytes") == number(tier, "peak_bytes"));
    }
    const cJSON *part =
        cJSON_GetObjectItem(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "breakdown"), "decode"), "weight (R)");
    CU_ASSERT(number(part, "busy_s") >= number(part, "hidden_s") && number(part, "busy_s") > 0);
    cJSON_Delete(json);
    result_free(&r);
}

/* Four machines: a line for each, and in --json the same figures. */
static void the_sim_runs_a_pipeline_of_machines(void) {
    static const int layers[] = {8, 8, 10, 6};
    Result r =
        RUN("bench", "--model", "opt-6.7b", "--device", "sim", "--hardware", "hardware/t4.json", "--nodes", "4", "--stages",
            "8,8,10,6", "--flights", "5", "--net", "1.25G,0.1ms", "--json", in_dir(capture, "stages.json"));
    assert_done(&r);
    CU_ASSERT(
        contains_all(r.out, WORDS("stage 0: layers 0 to 7;", "stage 3: layers 26 to 31;", "GPU waits", "stage 3 waits")));
    cJSON *json = read_json(in_dir(capture, "stages.json"));
    const cJSON *stages = cJSON_GetObjectItem(json, "stages");
    CU_ASSERT(cJSON_GetArraySize(stages) == 4 && number(json, "flights") == 5);
    for (int s = 0; s < 4; s++) {
        const cJSON *stage = cJSON_GetArrayItem(stages, s);
        const double busy = number(stage, "busy_share"), waits = number(stage, "gpu_waits");
        CU_ASSERT_EQUAL((int)number(stage, "layers"), layers[s]);
        const double idle = cJSON_GetArrayItem(cJSON_GetObjectItem(json, "waiting"), s)->valuedouble;
        CU_ASSERT(busy > 0 && busy < 1 && waits > 0 && waits < 1);
        CU_ASSERT(idle > 0 && idle < waits + 1e-9 && idle < 1 - busy + 1e-9);
        CU_ASSERT(number(cJSON_GetObjectItem(stage, "planned_bytes"), "GPU") > 1e9);
    }
    CU_ASSERT(!cJSON_HasObjectItem(json, "predicted")); /* the formulas are for equal stages */
    cJSON_Delete(json);
    result_free(&r);
}

/* Left to itself the diagonal schedule takes as many batches as are worth it, and is faster than the others where the CPU
 * has room for few sequences. The JSON of --json has what was expected beside what the clock says. */
static void the_diagonal_schedule_finds_its_number_of_batches(void) {
    static const char *const schedule[] = {"row", "zigzag", "diagonal"}, *const lengths[][2] = {{"32", "256"},
                                                                                                {"512", "4"}};
    for (int i = 0; i < 2; i++) {
        double rate[3];
        for (int w = 0; w < 3; w++) {
            Result r = RUN("bench", "--model", "opt-125m", "--device", "sim", LAPTOP, "--percent", "0", "100", "0", "100",
                           "100", "0", "--prompt-len", lengths[i][0], "--gen-len", lengths[i][1], "--cpu-mem", "600M",
                           "--num-prompts", "400", "--schedule", schedule[w], "--json", in_dir(capture, "sim.json"));
            assert_done(&r);
            cJSON *json = read_json(in_dir(capture, "sim.json"));
            CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json, "schedule")), schedule[w]);
            CU_ASSERT(w < 2 || number(json, "num_gpu_batches") > 1);
            rate[w] = number(json, "throughput");
            CU_ASSERT_DOUBLE_EQUAL(number(cJSON_GetObjectItem(json, "predicted"), "throughput") / rate[w], 1, .1);
            cJSON_Delete(json);
            result_free(&r);
        }
        CU_ASSERT(rate[2] > rate[1] && rate[1] >= rate[0]);
    }
}

/* The wait for a slowed link is a lower bound of the time, and lengths between two limits are all wanted. */
static void a_slowed_link_and_mixed_lengths_show_in_the_figures(void) {
    Result r = RUN("bench", "--model", MODEL, "--prompt-len", "4-20", "--gen-len", "2-6", "--num-prompts", "9",
                   "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--percent", "0", "100", "100", "0", "100", "0",
                   "--link", "ctog=200M", "--json", in_dir(capture, "link.json"));
    assert_done(&r);
    cJSON *json = read_json(in_dir(capture, "link.json"));
    const cJSON *ctog = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "channels"), "ctog");
    const cJSON *lane = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "lanes"), "load weights");
    CU_ASSERT(number(json, "total_s") >= .9 * number(lane, "moved_bytes") / 200e6);
    CU_ASSERT(number(ctog, "moved_bytes") >= number(lane, "moved_bytes") && number(lane, "moved_bytes") > 0);
    double tokens = number(json, "throughput") * number(json, "total_s");
    CU_ASSERT(tokens >= 9 * 2 && tokens <= 9 * 6 && number(json, "n") == 6);
    cJSON_Delete(json);
    result_free(&r);
}

static void a_trace_is_json_with_a_slice_for_every_call(void) {
    Result r = RUN("generate", "--model", MODEL, "--prompt", "The dog", "--max-tokens", "4", LAPTOP, "--trace",
                   in_dir(capture, "trace.json"));
    assert_done(&r);
    cJSON *json = read_json(in_dir(capture, "trace.json"));
    const cJSON *events = cJSON_GetObjectItem(json, "traceEvents"), *e;
    int projects = 0;
    cJSON_ArrayForEach(e, events) projects += !strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(e, "name")), "project");
    CU_ASSERT(projects >= 4 * 7); /* 4 tokens through 6 layers and the head; a pause may part one */
    cJSON_Delete(json);
    result_free(&r);
    assert_refused(RUN("generate", "--model", MODEL, "--prompt", "a", LAPTOP, "--trace", "/nonexistent/x"), EXIT_FAILED,
                   WORDS("--trace", "/nonexistent/x"));
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen policy
// ---------------------------------------------------------------------------------------------------------------

static void a_wrong_policy_question_is_refused_in_one_line(void) {
#define B "--gpu-batch-size", "48", "--num-gpu-batches", "3"
#define H "--hardware", "hardware/t4.json", "--cost-model", "paper"
#define P "policy", "--model", "opt-30b"
    static const struct {
        const char *args[18], *words[3];
    } cases[] = {
        {{"policy"}, {"--model is missing", "opt-125m"}},
        {{P, "--cost-model", "paper"}, {"--hardware is missing"}},
        {{P, H}, {"--gpu-batch-size is missing"}},
        {{P, H, "--gpu-batch-size", "4"}, {"--num-gpu-batches is missing"}},
        {{P, "--cost-model", "printed"}, {"--cost-model printed", "runtime or paper"}},
        {{P, B, H, "--max-latency", "9"}, {"--max-latency", "paper", "leave it out"}},
        {{P, B, H, "--frontier"}, {"--frontier", "paper", "leave it out"}},
        {{P, B, H, "--nodes", "4"}, {"--nodes", "paper", "leave it out"}},
        {{P, B, H, "--compress-cache"}, {"compression", "paper", "leave it out"}},
        {{P, B, H, "--attn-sparsity", "0.1"}, {"--attn-sparsity", "paper", "leave it out"}},
        {{P, "--explain", "--frontier"}, {"--explain", "one machine", "--frontier"}},
        {{P, B, "--explain", "--nodes", "4"}, {"--explain", "one machine", "--nodes"}},
        {{P, "--nodes", "4", "--frontier"}, {"--nodes", "one block", "--frontier"}},
        {{P, "--nodes", "4", "--num-prompts", "9"}, {"--nodes", "one block", "--num-prompts"}},
        {{P, "--nodes", "4", "--gen-len", "4-8"}, {"--nodes", "one length", "--gen-len"}},
        {{P, B, "--hardware", "hardware/t4.json", "--percent", "0", "100", "0", "100", "0", "100", "--max-latency", "9"},
         {"within 9 s", "--max-latency"}},
        {{"policy", "--model", "opt-1t", B, H}, {"opt-1t", "opt-125m"}},
        {{P, B, "--cost-model", "paper", "--hardware", "none.json"}, {"none.json"}},
        {{P, B, H, "--prompt-len", "16-512"}, {"--prompt-len", "one length"}},
        {{P, B, H, "--gen-len", "4-8"}, {"--gen-len", "one length"}},
        {{P, B, H, "--prompt-len", "2048", "--gen-len", "2"}, {"2049", "2048"}},
        {{P, B, H, "--percent", "0", "0", "0", "0", "0", "0"}, {"--percent", "the cost model paper"}},
        {{P, B, H, "--device", "sim"}, {"--device sim", "only bench"}},
        {{P, "--hardware", "none.json"}, {"none.json"}},
        {{P, "--hardware", "hardware/t4.json", "--prompts", "-"}, {"--prompts is a flag of generate"}},
        {{P, "--hardware", "hardware/t4.json", "--prompt-len", "2048", "--gen-len", "2"}, {"2049", "2048"}},
        {{P, "--hardware", "hardware/t4.json", "--gpu-mem", "1M", "--cpu-mem", "1M", "--disk-mem", "1M"},
         {"GPU", "--gpu-mem"}},
        {{P, "--hardware", "hardware/t4.json", "--disk-mem", "0", "--cpu-mem", "1G"}, {"--gpu-mem"}},
        {{P, "--hardware", "hardware/t4.json", "--max-latency", "0.5"}, {"within 0.5 s", "--max-latency"}},
        {{P, "--hardware", "hardware/t4.json", "--max-latency", "0.5", "--frontier"}, {"within 0.5 s", "--max-latency"}},
        {{"generate", "--model", MODEL, "--cost-model", "paper"}, {"--cost-model is a flag of policy"}},
        {{"policy", "--model", "opt-175b", "--gpu-batch-size", "4800", "--num-gpu-batches", "3", H},
         {"no placement fits", "GPU lacks 329.25 GiB", "disk lacks"}},
        {{P, H, "--gpu-batch-size", "1048576", "--num-gpu-batches", "2"}, {"at most 1048576"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *words[4] = {cases[i].words[0], cases[i].words[1], cases[i].words[2], NULL}, *args[19] = {NULL};
        memcpy(args, cases[i].args, sizeof cases[i].args);
        assert_refused(run(args), EXIT_USAGE, words);
    }
    assert_refused(RUN(P, B, H, "--json", "/nonexistent/x"), EXIT_FAILED, WORDS("--json /nonexistent/x"));
}

static void the_papers_cost_model_places_opt_30b(void) {
    static const char *const names[] = {"wg", "wc", "wd", "cg",    "cc",    "cd",
                                        "hg", "hc", "hd", "T_pre", "T_gen", "throughput"};
    Error err;
    Result r = RUN(P, B, H, "--json", "-"), text = RUN(P, B, H);
    assert_done(&r), assert_done(&text);
    cJSON *json = json_parse(r.out, r.out_len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) CU_ASSERT(number(json, names[i]) >= 0);
    CU_ASSERT(number(json, "gbs") == 48 && number(json, "num_gpu_batches") == 3 && number(json, "bls") == 144);
    CU_ASSERT(number(json, "s") == 512 && number(json, "n") == 32);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "T"), 309.121, 309.121e-5);
    CU_ASSERT_DOUBLE_EQUAL(number(json, "wg"), 0.203194, 1e-5);
    CU_ASSERT(contains_all(text.out, WORDS("T_pre", "bound by comp^p", "ctog^g", "gpu_peak^p")));
    cJSON_Delete(json);
    result_free(&r), result_free(&text);
#undef B
#undef H
#undef P
}

#define POLICY "policy", "--model", "opt-1.3b", LAPTOP, "--prompt-len", "128", "--gen-len", "16"

static cJSON *parse_out(const Result *r) {
    Error err;
    cJSON *json = json_parse(r->out, r->out_len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    return json;
}

static double sum_of(const cJSON *json, const char *gpu, const char *cpu, const char *disk) {
    return number(json, gpu) + number(json, cpu) + number(json, disk);
}

/* A policy and what it promises, under the paper's names; its numbers agree with each other. */
static void assert_policy(const cJSON *json) {
    static const char *const names[] = {"wg", "wc", "wd", "cg",    "cc",    "cd",         "hg",
                                        "hc", "hd", "T",  "T_pre", "T_gen", "throughput", "latency"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) CU_ASSERT(number(json, names[i]) >= 0);
    CU_ASSERT_DOUBLE_EQUAL(sum_of(json, "wg", "wc", "wd"), 1, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(sum_of(json, "cg", "cc", "cd"), 1, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(sum_of(json, "hg", "hc", "hd"), 1, 1e-9);
    const cJSON *schedule = cJSON_GetObjectItem(json, "schedule"),
                *delegated = cJSON_GetObjectItem(json, "cpu_cache_compute");
    CU_ASSERT(cJSON_IsString(schedule) && cJSON_IsBool(delegated));
    double batches = strcmp(schedule->valuestring, "row") ? number(json, "num_gpu_batches") : 1;
    CU_ASSERT(number(json, "gbs") >= 1 && number(json, "bls") == number(json, "gbs") * batches);
    CU_ASSERT(cJSON_IsString(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "bound"), "T_gen")));
}

static void policy_lists_the_ten_best_under_the_papers_names(void) {
    Result r = RUN(POLICY, "--num-prompts", "96", "--gpu-mem", "1G", "--json", "-");
    Result text = RUN(POLICY, "--num-prompts", "96", "--gpu-mem", "1G");
    assert_done(&r), assert_done(&text);
    cJSON *json = parse_out(&r);
    const cJSON *best = cJSON_GetObjectItem(json, "best"), *one;
    double before = INFINITY;
    assert_policy(json);
    CU_ASSERT(number(json, "s") == 128 && number(json, "n") == 16);
    CU_ASSERT(cJSON_IsString(cJSON_GetObjectItem(json, "hardware")) && cJSON_IsString(cJSON_GetObjectItem(json, "model")));
    CU_ASSERT_EQUAL(cJSON_GetArraySize(best), 10);
    cJSON_ArrayForEach(one, best) {
        assert_policy(one);
        CU_ASSERT(number(one, "throughput") <= before);
        before = number(one, "throughput");
        CU_ASSERT_DOUBLE_EQUAL(number(one, "throughput") * number(one, "T"), 96 * 16, 1e-3);
        CU_ASSERT(number(cJSON_GetObjectItem(one, "peak_bytes"), "GPU") <= 0x1p30);
    }
    CU_ASSERT(number(json, "T") == number(cJSON_GetArrayItem(best, 0), "T"));
    CU_ASSERT_EQUAL(count_lines(text.out), 12); /* two lines of heading */
    CU_ASSERT(contains_all(text.out, WORDS("opt-1.3b", "RTX 4060", "token/s", "T_pre", "bound by", "zigzag")));
    cJSON_Delete(json);
    result_free(&r), result_free(&text);
}

static void the_frontier_is_a_list_that_rises(void) {
    Result r = RUN(POLICY, "--num-prompts", "96", "--gpu-mem", "1G", "--frontier", "--json", "-");
    assert_done(&r);
    cJSON *json = parse_out(&r);
    const cJSON *list = cJSON_GetObjectItem(json, "frontier"), *one;
    double latency = 0, throughput = 0;
    CU_ASSERT(cJSON_GetArraySize(list) > 3);
    cJSON_ArrayForEach(one, list) {
        assert_policy(one);
        CU_ASSERT(number(one, "latency") > latency && number(one, "throughput") > throughput);
        latency = number(one, "latency"), throughput = number(one, "throughput");
    }
    cJSON_Delete(json);
    result_free(&r);
}

static void a_latency_bounds_what_is_found(void) {
    Result free_run = RUN(POLICY, "--json", "-");
    assert_done(&free_run);
    cJSON *any = parse_out(&free_run);
    char limit[40];
    snprintf(limit, sizeof limit, "%.17g", number(any, "latency") / 4);
    Result bounded = RUN(POLICY, "--max-latency", limit, "--json", "-");
    assert_done(&bounded);
    cJSON *json = parse_out(&bounded);
    const cJSON *one;
    cJSON_ArrayForEach(one, cJSON_GetObjectItem(json, "best")) CU_ASSERT(number(one, "latency") <= atof(limit));
    CU_ASSERT(number(json, "throughput") < number(any, "throughput"));
    cJSON_Delete(json), cJSON_Delete(any);
    result_free(&free_run), result_free(&bounded);
}

static void a_dash_leaves_a_percentage_to_the_search(void) {
    Result r = RUN(POLICY, "--gpu-mem", "1G", "--num-prompts", "32", "--percent", "12.3", "-", "-", "33.3", "-", "-",
                   "--gpu-batch-size", "8", "--cpu-cache-compute", "--json", "-");
    assert_done(&r);
    cJSON *json = parse_out(&r);
    const cJSON *one;
    cJSON_ArrayForEach(one, cJSON_GetObjectItem(json, "best")) {
        CU_ASSERT_DOUBLE_EQUAL(number(one, "wg"), .123, 1e-12);
        CU_ASSERT_DOUBLE_EQUAL(number(one, "cc"), .333, 1e-12);
        CU_ASSERT(number(one, "gbs") == 8 && cJSON_IsTrue(cJSON_GetObjectItem(one, "cpu_cache_compute")));
        CU_ASSERT(number(one, "hg") == 1); /* what is left open goes where it is best */
    }
    cJSON_Delete(json);
    result_free(&r);
}

/* Found by the search, for the sim: in --json the expected figures stand beside those of the clock, and are near them. */
static void bench_says_what_was_expected(void) {
    static const char *const names[] = {"T", "T_pre", "T_gen", "throughput"};
    Result r = RUN("bench", "--model", "opt-1.3b", "--device", "sim", LAPTOP, "--prompt-len", "128", "--gen-len", "16",
                   "--gpu-mem", "1G", "--num-prompts", "64", "--json", "-");
    assert_done(&r);
    cJSON *json = parse_out(&r);
    const cJSON *predicted = cJSON_GetObjectItem(json, "predicted");
    for (int i = 0; i < 4; i++) CU_ASSERT_DOUBLE_EQUAL(number(predicted, names[i]) / number(json, names[i]), 1, .15);
    for (int t = 0; t < 3; t++) {
        double peak = number(cJSON_GetObjectItem(predicted, "peak_bytes"), tier_name[t]);
        const cJSON *tier = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "tiers"), tier_name[t]);
        CU_ASSERT(peak == number(tier, "planned_bytes") && peak >= number(tier, "peak_bytes"));
        char line[100];
        snprintf(line, sizeof line, "%-4s peak (MiB) %18s %12.2f %12.2f\n", tier_name[t], "", peak / 0x1p20,
                 number(tier, "peak_bytes") / 0x1p20);
        CU_ASSERT_PTR_NOT_NULL(strstr(r.err, line));
    }
    CU_ASSERT(contains_all(r.err, WORDS("predicted", "measured", "throughput (token/s)", "GPU  peak (MiB)")));
    cJSON_Delete(json);
    result_free(&r);
    r = RUN("bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "4", "--gpu-batch-size", "2", "--num-gpu-batches",
            "2", "--percent", "100", "0", "100", "0", "100", "0", "--json", "-"); /* all is given, nothing is expected */
    assert_done(&r);
    json = parse_out(&r);
    CU_ASSERT(!cJSON_HasObjectItem(json, "predicted") && !strstr(r.err, "predicted"));
    cJSON_Delete(json);
    result_free(&r);
}

static void generate_says_what_was_expected_and_writes_the_same(void) {
    write_ten_prompts();
    Result found = RUN(TEN_PROMPTS);
    Result given = RUN("generate", "--model", MODEL, "--prompts", in_dir(capture, "prompts"), "--max-tokens", "12",
                       "--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "3", "--num-gpu-batches", "2");
    assert_done(&found), assert_done(&given);
    CU_ASSERT(contains_all(found.err, WORDS("predicted", "measured", "T_pre (s)", "T_gen (s)", "disk peak (MiB)")));
    CU_ASSERT_PTR_NULL(strstr(given.err, "predicted"));
    char *of_found = sorted(found.out), *of_given = sorted(given.out);
    CU_ASSERT_STRING_EQUAL(of_found, of_given);
    CU_ASSERT_EQUAL(count_lines(found.out), 10);
    for (int i = 0; i < 10; i++) cJSON_Delete(completion(found.out, i));
    free(of_found), free(of_given);
    result_free(&found), result_free(&given);
}

// ---------------------------------------------------------------------------------------------------------------
// eval
// ---------------------------------------------------------------------------------------------------------------

#define EVAL "eval", "--model", MODEL, "--json", "-"
#define STORIES EVAL, "--perplexity", MODEL "/stories.txt", "--window", "64"
#define WORDS_OF(file) EVAL, "--last-word", file

static cJSON *eval_object(Result r) {
    Error err;
    assert_done(&r);
    cJSON *json = json_parse(r.out, r.out_len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    result_free(&r);
    return json;
}

/* The policy searched for, and one that leaves nothing on the GPU. */
static void eval_gives_the_same_perplexity_under_every_policy(void) {
    static const char *const names[] = {"perplexity", "nll", "bits_per_byte", "T", "wg", "bls", NULL};
    Result r = RUN(STORIES, "--limit", "5", LAPTOP);
    CU_ASSERT(strstr(r.err, "T (s)") && !strstr(r.err, "throughput")); /* nothing was generated */
    cJSON *searched = eval_object(r);
    cJSON *given = eval_object(RUN(STORIES, "--limit", "5", ON_DISK, "--gpu-batch-size", "2", "--num-gpu-batches", "2"));
    for (int i = 0; names[i]; i++) CU_ASSERT(cJSON_HasObjectItem(given, names[i]));
    CU_ASSERT(number(given, "windows") == 5 && number(given, "window") == 64 && number(given, "tokens") == 5 * 63);
    CU_ASSERT_DOUBLE_EQUAL(number(given, "perplexity"), exp(number(given, "nll")), 1e-6);
    CU_ASSERT(number(given, "perplexity") > 5 && number(given, "perplexity") < 100);
    CU_ASSERT_EQUAL(number(searched, "nll"), number(given, "nll"));
    cJSON_Delete(searched), cJSON_Delete(given);
}

static void eval_knows_which_last_words_are_right(void) {
    static const char lines[] =
        "{\"text\": \"Once upon a time, there was a little girl named Lily. Once upon a time\"}\n"
        "{\"text\": \"Once upon a hippopotamus\"}\n{\"text\": \"not read\"}\n";
    write_file(capture, "words", lines, sizeof lines - 1);
    cJSON *json = eval_object(RUN(WORDS_OF(in_dir(capture, "words")), LAPTOP, "--limit", "2"));
    CU_ASSERT(number(json, "lines") == 2 && number(json, "last_word_accuracy") == .5);
    CU_ASSERT(number(json, "perplexity") > 10);
    CU_ASSERT_FALSE(cJSON_HasObjectItem(json, "windows"));
    cJSON_Delete(json);
    Result r = RUN("eval", "--model", MODEL, "--last-word", in_dir(capture, "words"), LAPTOP, "--limit", "1");
    assert_done(&r);
    CU_ASSERT_PTR_NOT_NULL(strstr(r.out, "last word: accuracy 1.0000"));
    result_free(&r);
}

static void a_wrong_evaluation_is_refused_in_one_line(void) {
    assert_refused(RUN(EVAL), EXIT_USAGE, WORDS("--perplexity FILE or --last-word FILE"));
    assert_refused(RUN(STORIES, "--last-word", "x"), EXIT_USAGE, WORDS("either"));
    assert_refused(RUN(WORDS_OF("x"), "--window", "64"), EXIT_USAGE, WORDS("--window", "leave it out"));
    assert_refused(RUN(STORIES, "--window", "513"), EXIT_USAGE, WORDS("--window 513", "512"));
    assert_refused(RUN(STORIES, "--device", "sim"), EXIT_USAGE, WORDS("--device sim", "only bench"));
    assert_refused(RUN(STORIES, "--max-tokens", "4"), EXIT_USAGE, WORDS("--max-tokens", "generate only"));
    assert_refused(RUN("eval", "--model", "opt-125m", "--perplexity", "x"), EXIT_USAGE, WORDS("opt-125m", "directory"));
    static const char lines[] = "{\"text\": \"a b\"}\nhello\n";
    write_file(capture, "words", lines, sizeof lines - 1);
    assert_refused(RUN(WORDS_OF(in_dir(capture, "words"))), EXIT_FAILED, WORDS("words line 2"));
    assert_refused(RUN(EVAL, "--perplexity", "/dev/null"), EXIT_FAILED, WORDS("/dev/null"));
}

/* Without --hardware it is this machine: the one that was measured before, if there is one. */
static void the_machine_that_was_measured_before_is_used(void) {
    Hardware h;
    Error err;
    Checkpoint *checkpoint = checkpoint_open(MODEL, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(checkpoint);
    ProfileSize size;
    ASSERT_OK(profile_size(&size, NULL, &checkpoint->config, (size_t)1 << 40, &err));
    open_directories();
    ASSERT_OK(hardware_read(&h, "hardware/laptop.json", &err));
    strcpy(h.name, "measured before");
    profile_keep(&h, &size, &(ThisMachine){.offload_dir = offload, .threads = host_set_threads(0)});
    Result r = RUN("policy", "--model", MODEL, "--prompt-len", "8", "--gen-len", "4", "--json", "-");
    assert_done(&r);
    cJSON *json = parse_out(&r);
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json, "hardware")), "measured before");
    cJSON_Delete(json);
    result_free(&r);
    r = RUN("generate", "--model", MODEL, "--prompt", "Once", "--max-tokens", "3");
    assert_done(&r);
    CU_ASSERT(contains_all(r.err, WORDS("predicted", "measured")));
    result_free(&r);
    checkpoint_close(checkpoint);
}

/* Of a longer block it is said what it would bring, where that is anything: with zigzag it is not. */
static void what_a_longer_block_would_bring_is_at_least_a_percent(void) {
    for (int zigzag = 0; zigzag < 2; zigzag++) {
        Result r = RUN("generate", "--model", MODEL, "--prompts", "models/prompts.txt", "--max-tokens", "5", "--hardware",
                       "hardware/t4-fitted.json", zigzag ? "--schedule" : NULL, "zigzag");
        assert_done(&r);
        const char *said = strstr(r.err, " would bring ");
        CU_ASSERT(zigzag ? !said : said && atoi(said + strlen(" would bring ")) >= 1);
        result_free(&r);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The GPU: without one, and with the emulation where the Makefile could build it
// ---------------------------------------------------------------------------------------------------------------

static void without_a_gpu_the_default_is_the_host_device_and_says_so(void) {
    assert_refused(RUN("generate", "--model", MODEL, "--prompt", "A", "--device", "cuda"), 2, WORDS("CUDA"));
    Result r = RUN("generate", "--model", MODEL, "--prompt", "A", "--max-tokens", "3", LAPTOP);
    Result quiet = RUN("generate", "--model", MODEL, "--prompt", "A", "--max-tokens", "3", LAPTOP, "--device", "host");
    assert_done(&r), assert_done(&quiet);
    CU_ASSERT(contains_all(r.err, WORDS("running on the host device", "CUDA")));
    CU_ASSERT_PTR_NULL(strstr(quiet.err, "running on the host device"));
    CU_ASSERT_STRING_EQUAL(r.out, quiet.out);
    result_free(&r), result_free(&quiet);
}

const char *test_missing(const char *name) {
    const bool on_gpu = strstr(name, "GPU") && !strstr(name, "without a GPU");
    return on_gpu && !getenv("FLEXGEN_EMULATED") ? "the emulated GPU, which needs the CUDA toolkit's headers" : NULL;
}

/* A run on the emulated GPU with one variable of its environment set. */
static Result run_emulated(const char *name, const char *value, const char *const *args) {
    if (name) setenv(name, value, 1);
    with.emulated = true;
    Result r = run(args);
    if (name) unsetenv(name);
    return r;
}
#define RUN_EMULATED(name, value, ...) run_emulated(name, value, (const char *const[]){__VA_ARGS__, NULL})
#define ON_GPU "generate", "--model", MODEL, "--prompt", "The dog", "--max-tokens", "6", LAPTOP

/* How many threads computed, as the summary says. */
static int threads_of(const Result *r) {
    const char *at = strstr(r->err, " thread"); /* one, or several */
    while (at && at > r->err && isdigit((unsigned char)at[-1])) at--;
    return at ? atoi(at) : 0;
}

static void beside_a_gpu_two_cores_are_left_to_its_lanes(void) {
    Result host = RUN(ON_GPU), gpu = RUN_EMULATED(NULL, NULL, ON_GPU);
    Result given = RUN_EMULATED(NULL, NULL, ON_GPU, "--threads", "2");
    const int all = threads_of(&host), half = (all + 1) / 2;
    CU_ASSERT(all > 0 && threads_of(&gpu) == (all - 2 > half ? all - 2 : half) && threads_of(&given) == 2);
    result_free(&host), result_free(&gpu), result_free(&given);
}

static void the_gpu_writes_what_the_host_writes(void) {
    Result host = RUN(ON_GPU), gpu = RUN_EMULATED(NULL, NULL, ON_GPU);
    Result spread = RUN_EMULATED(NULL, NULL, ON_GPU, "--percent", "30", "40", "0", "50", "20", "40", "--cpu-cache-compute");
    assert_done(&host), assert_done(&gpu), assert_done(&spread);
    CU_ASSERT(contains_all(gpu.err, WORDS("emulated GPU")));
    CU_ASSERT_STRING_EQUAL(gpu.out, host.out);
    CU_ASSERT_STRING_EQUAL(spread.out, host.out);
    result_free(&host), result_free(&gpu), result_free(&spread);
}

static void trouble_with_the_gpu_is_one_line_that_says_what_to_do(void) {
    static const struct {
        const char *name, *value;
        int status;
        const char *words[2];
    } cases[] = {
        {"CUDA_CPU_NO_DEVICE", "1", 2, {"driver", "install"}},
        {"CUDA_CPU_NO_DEVICE", "2", 2, {"finds none", "nvidia-smi"}},
        {"CUDA_CPU_ARCH", "61", 2, {"sm_61", "too old"}},
        {"CUDA_CPU_MEM_MB", "64", 1, {"MiB free", "end other programs"}},
        {"CUDA_CPU_MEM_MB", "226", 2, {"GPU tier", "--gpu-mem"}},
        {"CUDA_CPU_LAUNCH_FAILS", "1", 1, {"the GPU", "compute-sanitizer"}},
        {"CUDA_CPU_LAUNCH_FAILS", "30", 1, {"the GPU", "compute-sanitizer"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(RUN_EMULATED(cases[i].name, cases[i].value, ON_GPU, "--device", "cuda"), cases[i].status,
                       WORDS(cases[i].words[0], cases[i].words[1]));
    Result r = RUN_EMULATED("CUDA_CPU_ARCH", "61", ON_GPU);
    assert_done(&r);
    CU_ASSERT(contains_all(r.err, WORDS("running on the host device", "too old")));
    result_free(&r);
    r = RUN_EMULATED("CUDA_CPU_PIN_FAILS", "1", ON_GPU, "--percent", "0", "100", "0", "100", "0", "100");
    assert_done(&r);
    CU_ASSERT(contains_all(r.err, WORDS("cannot pin", "ulimit -l")));
    result_free(&r);
}

/* By the GPU's own account nothing goes beyond --gpu-mem, workspaces included. */
static void the_gpu_keeps_to_its_limit(void) {
    static const char *const limits[] = {"245M", "300M"};
    Error err;
    for (int i = 0; i < 2; i++) {
        Result r = RUN_EMULATED(NULL, NULL, "bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "2",
                                "--num-prompts", "4", LAPTOP, "--gpu-mem", limits[i], "--json", "-");
        assert_done(&r);
        cJSON *json = json_parse(r.out, r.out_len, &err);
        if (!json) CU_FAIL_FATAL(err.text);
        const cJSON *tier = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "tiers"), "GPU");
        double in_use = number(tier, "in_use_bytes");
        CU_ASSERT(in_use >= number(tier, "planned_bytes"));
        CU_ASSERT(in_use <= atof(limits[i]) * 1048576);
        const double grown = number(tier, "grown_bytes"); /* of a GPU that loads nothing */
        CU_ASSERT(grown >= 0 && grown <= number(tier, "spare_bytes"));
        CU_ASSERT_DOUBLE_EQUAL(number(tier, "spare_bytes"), 128 << 20, 0); /* of a small card */
        CU_ASSERT_DOUBLE_EQUAL(number(tier, "planned_bytes"), number(tier, "peak_bytes"), 0);
        cJSON_Delete(json);
        result_free(&r);
    }
}

#define BENCH_GPU                                                                                                      \
    "bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", "2", "--percent", "0", "100", "0", "100", "0", "100", \
        "--gpu-batch-size", "2", "--num-gpu-batches", "2"

/* A trace takes the GPU's time, so what is measured has none: the task runs a second time for it. Seconds of the GPU's
 * lanes are known of that one only. */
static void bench_on_the_gpu_measures_before_it_traces(void) {
    char trace[4096];
    double moved[2], decoded[2];
    open_directories();
    snprintf(trace, sizeof trace, "%s", in_dir(capture, "gpu-trace.json"));
    for (int traced = 0; traced < 2; traced++) {
        Result r =
            RUN_EMULATED(NULL, NULL, BENCH_GPU, "--json", in_dir(capture, "gpu.json"), traced ? "--trace" : NULL, trace);
        assert_done(&r);
        CU_ASSERT_EQUAL(strstr(r.out, "breakdown") != NULL, traced);
        cJSON *json = read_json(in_dir(capture, "gpu.json"));
        CU_ASSERT_EQUAL(cJSON_GetObjectItem(json, "breakdown") != NULL, traced);
        CU_ASSERT_EQUAL(json_get(json_get(json_get(json, "channels"), "gpu"), "busy_s") != NULL, 0);
        CU_ASSERT(number(json_get(json_get(json, "channels"), "cpu"), "busy_s") >= 0);
        if (traced) CU_ASSERT(number(json_get(json_get(json_get(json, "traced"), "channels"), "gpu"), "busy_s") > 0);
        moved[traced] = number(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "channels"), "ctog"), "moved_bytes");
        decoded[traced] = number(json, "decode_throughput") * number(json, "decode_s");
        cJSON_Delete(json), result_free(&r);
    }
    CU_ASSERT(moved[0] > 0 && moved[0] == moved[1]); /* the second run counts for nothing */
    CU_ASSERT_DOUBLE_EQUAL(decoded[0], decoded[1], 1e-6);
    cJSON *slices = read_json(trace);
    CU_ASSERT(cJSON_GetArraySize(cJSON_GetObjectItem(slices, "traceEvents")) > 2 * 2 * 4); /* sweeps, batches, layers */
    cJSON_Delete(slices);
}

/* Returns the digest that bench prints of so many prompts and new tokens. */
static uint64_t digest_of(const char *prompts, const char *tokens, const char *flag, const char *value) {
    Error err;
    Result r =
        RUN("bench", "--model", MODEL, "--prompt-len", "8", "--gen-len", tokens, "--percent", "100", "0", "100", "0", "100",
            "0", "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--num-prompts", prompts, "--json", "-", flag, value);
    assert_done(&r);
    cJSON *json = json_parse(r.out, r.out_len, &err);
    if (!json) CU_FAIL_FATAL(err.text);
    const cJSON *of = json_get(json, "digest");
    CU_ASSERT_FATAL(cJSON_IsString(of) && strlen(of->valuestring) == 16);
    const uint64_t digest = strtoull(of->valuestring, NULL, 16);
    cJSON_Delete(json), result_free(&r);
    return digest;
}

/* The same for every placement and schedule; another for other prompts. */
static void bench_tells_its_tokens_by_their_digest(void) {
    const uint64_t digest = digest_of("6", "6", "--schedule", "zigzag");
    CU_ASSERT(digest == digest_of("6", "6", "--schedule", "diagonal") && digest != digest_of("6", "6", "--seed", "5"));
}

/* Two prompts generate one token each. The second adds the hash of its number and its token to the digest of the first, so
 * that both tokens can be told from the digests. */
static void bench_gives_every_prompt_tokens_of_its_own(void) {
    enum { VOCAB = 4096 };
    const uint64_t first = digest_of("1", "1", "--seed", "0"), both = digest_of("2", "1", "--seed", "0");
    int token[2] = {-1, -1};
    for (int32_t t = 0; t < VOCAB; t++)
        for (int i = 0; i < 2; i++)
            if ((i ? both - first : first) == hash_bytes((uint64_t)HASH_START + (uint64_t)i, &t, sizeof t)) token[i] = t;
    CU_ASSERT(token[0] >= 0 && token[1] >= 0 && token[0] != token[1]);
}

/* 1,200 rows of a prefill, of 1,024 numbers in the MLP: together where a GPU has room for them, else in pieces of 1,000 or
 * less. */
static void a_gpu_with_room_takes_prompts_in_larger_pieces(void) {
    static const char *const where[] = {"cuda", "host"}, *const mlp[] = {"2.34", "4.00"}; /* MiB, F16 and F32 */
    for (int i = 0; i < 2; i++) {
        Result r = RUN_EMULATED(NULL, NULL, "bench", "--model", MODEL, "--prompt-len", "100", "--gen-len", "1", "--percent",
                                "100", "0", "100", "0", "100", "0", "--gpu-batch-size", "12", "--num-gpu-batches", "1",
                                "--gpu-mem", "1G", "--device", where[i]);
        assert_done(&r);
        const char *line = strstr(r.err, "workspace: mlp");
        CU_ASSERT_FATAL(line != NULL);
        CU_ASSERT(strtod(line + strlen("workspace: mlp"), NULL) == atof(mlp[i]));
        result_free(&r);
    }
}

/* A launch that fails once the measured run is over: without --trace it would never have been. */
static void what_was_measured_on_a_gpu_is_written_before_the_second_run(void) {
    char trace[4096], nth[24];
    bool over = false;
    int n = 50;
    open_directories();
    snprintf(trace, sizeof trace, "%s", in_dir(capture, "early-trace.json"));
    for (; !over; n += n / 4) {
        snprintf(nth, sizeof nth, "%d", n);
        Result r = RUN_EMULATED("CUDA_CPU_LAUNCH_FAILS", nth, BENCH_GPU);
        over = !r.status;
        result_free(&r);
        CU_ASSERT_FATAL(n < 1000000);
        if (over) break;
    }
    const char *json = in_dir(capture, "early.json");
    Result r = RUN_EMULATED("CUDA_CPU_LAUNCH_FAILS", nth, BENCH_GPU, "--json", json, "--trace", trace);
    CU_ASSERT_EQUAL(r.status, EXIT_FAILED);
    CU_ASSERT(strstr(r.out, "generation throughput") && strstr(r.err, "in use on the GPU") && !strstr(r.out, "breakdown"));
    cJSON *figures = read_json(json);
    CU_ASSERT(number(figures, "throughput") > 0);
    cJSON_Delete(figures), result_free(&r);
}

// ---------------------------------------------------------------------------------------------------------------
// flexgen quantize
// ---------------------------------------------------------------------------------------------------------------

static void a_wrong_copy_is_refused_in_one_line(void) {
    static const struct {
        const char *args[4], *words[3];
        int status;
    } cases[] = {{{NULL}, {"--output is missing"}, EXIT_USAGE},
                 {{"--output", ""}, {"--output is missing"}, EXIT_USAGE},
                 {{"--output", MODEL}, {"--output " MODEL, "not empty"}, EXIT_USAGE},
                 {{"--output", "Makefile"}, {"--output Makefile", "Not a directory"}, EXIT_USAGE},
                 {{"--output", "no/such/copy"}, {"--output no/such/copy", "No such file"}, EXIT_FAILED},
                 {{"--bits", "1"}, {"--bits 1", "from 2 to 8"}, EXIT_USAGE},
                 {{"--bits", "9"}, {"--bits 9", "from 2 to 8"}, EXIT_USAGE},
                 {{"--group", "8"}, {"--group 8", "from 16 to 1024"}, EXIT_USAGE},
                 {{"--group", "2048"}, {"--group 2048", "from 16 to 1024"}, EXIT_USAGE},
                 {{"--bits", "3"},
                  {"--bits", "only 4 bits in groups of 64 are stored; leave them out, or see with eval"},
                  EXIT_USAGE},
                 {{"--group", "32"},
                  {"--group", "only 4 bits in groups of 64 are stored; leave them out, or see with eval"},
                  EXIT_USAGE},
                 {{"--percent", "1"}, {"--percent is a flag of generate, bench, policy and eval only"}, EXIT_USAGE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(RUN("quantize", "--model", MODEL, cases[i].args[0], cases[i].args[1]), cases[i].status,
                       cases[i].words);
    assert_refused(RUN("quantize", "--output", "x"), EXIT_USAGE, WORDS("--model is missing"));
    assert_refused(RUN("quantize", "--model", "opt-125m", "--output", "x"), EXIT_FAILED,
                   WORDS("opt-125m: there is no such directory"));
}

static void what_groups_do_not_divide_is_refused(void) {
    const char *const words[] = {"have 32 and 64 rows", "whole groups of 64", "leave the weights unpacked",
                                 "--compress-cache still packs a KV cache", NULL};
    const char *const heads[] = {"--compress-cache: heads of 8 numbers", "multiples of 16", "leave it out",
                                 "--compress-weight still packs the weights", NULL};
    char to[400], dir[300];
    snprintf(dir, sizeof dir, "%s", small_model());
    snprintf(to, sizeof to, "%s/copy", temp_dir());
    assert_refused(RUN("quantize", "--model", dir, "--output", to), EXIT_USAGE, words);
    assert_refused(RUN("generate", "--model", dir, "--prompt", "a", LAPTOP, "--compress-weight"), EXIT_USAGE, words);
    assert_refused(RUN("bench", "--model", dir, "--prompt-len", "6", LAPTOP, "--compress-weight"), EXIT_USAGE, words);
    assert_refused(RUN("bench", "--model", dir, "--prompt-len", "6", LAPTOP, "--compress-cache"), EXIT_USAGE, heads);
    assert_refused(RUN("policy", "--model", dir, "--prompt-len", "6", LAPTOP, "--allow-compression"), EXIT_USAGE,
                   WORDS("--allow-compression: heads of 8 numbers"));
    Result r = RUN("eval", "--model", dir, "--perplexity", "README.md", LAPTOP, "--limit", "1", "--compress-weight",
                   "--compress-cache", "--group", "96");
    assert_done(&r); /* a study needs no whole groups */
    CU_ASSERT(contains_all(r.out, WORDS("a study: weights and cache rounded to 4 bits in groups of 96")));
    result_free(&r);
}

/* Numbers that are rounded stay F16: on disk they take as much, and elsewhere. Rounding to 8 bits costs less than to 2, and
 * where the numbers rest does not matter. */
static void a_study_rounds_and_says_so(void) {
    double loss[4];
    static const char *const bits[] = {"8", "2", "2", "4"};
    for (int i = 0; i < 4; i++) {
        Result r = RUN("eval", "--model", MODEL, "--perplexity", MODEL "/stories.txt", "--window", "64", "--limit", "2",
                       LAPTOP, "--json", "-", "--compress-weight", "--bits", bits[i], "--percent", i == 2 ? "0" : "100",
                       "0", "100", "0", "100", "0");
        assert_done(&r);
        cJSON *json = parse_out(&r), *study = cJSON_GetObjectItem(json, "study");
        loss[i] = number(json, "perplexity");
        CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(json, "compress_weight")) == (i == 3) && !study == (i == 3));
        if (study) CU_ASSERT(number(study, "bits") == atoi(bits[i]) && number(study, "group") == 64);
        if (study)
            CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(study, "weights")) &&
                      cJSON_IsFalse(cJSON_GetObjectItem(study, "cache")));
        cJSON_Delete(json);
        result_free(&r);
    }
    CU_ASSERT(loss[0] < loss[3] && loss[3] < loss[1] && loss[1] == loss[2]);
}

static void quantize_makes_a_copy_and_says_how_large_it_is(void) {
    Error err;
    size_t len;
    char dir[300], to[400], again[400];
    snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(to, sizeof to, "%s/copy", dir);
    snprintf(again, sizeof again, "%s/again", dir);
    Result r = RUN("quantize", "--model", MODEL, "--output", to, "--threads", "1");
    assert_done(&r);
    CU_ASSERT(r.out_len == 0 && count_lines(r.err) == 1);
    CU_ASSERT(contains_all(r.err, WORDS("11.85 MB packed to", "1 file in", to, "4.50 in the matrices")));
    result_free(&r);
    Checkpoint *copy = checkpoint_open(to, &err);
    CU_ASSERT(copy && copy->packed);
    checkpoint_close(copy);
    char *merges = contents(in_dir(to, "merges.txt"), &len);
    free(merges);
    CU_ASSERT_EQUAL(count_files(dir), 1);
    assert_refused(RUN("quantize", "--model", to, "--output", again), EXIT_USAGE, WORDS(to, "packed already"));
    CU_ASSERT_EQUAL(count_files(dir), 1);
}

/* Packed when it is loaded or read from a packed copy, the model writes the same; not what it writes in F16. */
static void a_packed_copy_writes_what_compress_weight_does(void) {
    char to[400];
    snprintf(to, sizeof to, "%s/copy", temp_dir());
    Result copy = RUN("quantize", "--model", MODEL, "--output", to);
    assert_done(&copy);
    Result plain = RUN(GENERATE), packed = RUN(GENERATE, "--compress-weight");
    Result from = RUN("generate", "--model", to, "--prompt", "Once upon a time", LAPTOP, "--max-tokens", "40");
    Result same = RUN("generate", "--model", MODEL, "--prompt", "Once upon a time", LAPTOP, "--max-tokens", "40",
                      "--compress-weight", "--percent", "0", "50", "100", "0", "100", "0");
    assert_done(&plain), assert_done(&packed), assert_done(&from), assert_done(&same);
    CU_ASSERT_STRING_EQUAL(from.out, same.out);
    CU_ASSERT(strcmp(plain.out, packed.out) != 0);
    CU_ASSERT(contains_all(from.err, WORDS("packed")));
    assert_refused(RUN("eval", "--model", to, "--perplexity", "README.md", LAPTOP, "--compress-weight", "--bits", "3"),
                   EXIT_USAGE, WORDS("--bits", "are packed", "name the model that it was made from"));
    result_free(&copy), result_free(&plain), result_free(&packed), result_free(&from), result_free(&same);
}

/* The counters of what is packed, and of what sparse attention reads. */
static void bench_counts_packed_bytes_and_the_v_that_is_read(void) {
    double weights[2], k[2], v[2];
    for (int i = 0; i < 2; i++) {
        Result r = RUN("bench", "--model", MODEL, "--prompt-len", "100", "--gen-len", "3", "--gpu-batch-size", "2",
                       "--num-gpu-batches", "2", "--percent", "0", "100", "0", "100", "100", "0", "--cpu-cache-compute",
                       "--json", "-", i ? "--attn-sparsity" : NULL, "0.1", "--compress-weight", "--compress-cache");
        assert_done(&r);
        cJSON *json = parse_out(&r);
        const cJSON *lanes = cJSON_GetObjectItem(json, "lanes"), *attend = cJSON_GetObjectItem(lanes, "attend");
        weights[i] = number(cJSON_GetObjectItem(lanes, "load weights"), "moved_bytes");
        k[i] = number(attend, "k_bytes"), v[i] = number(attend, "v_bytes");
        CU_ASSERT_EQUAL(number(json, "attn_sparsity"), i ? .1 : 1);
        CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(json, "compress_weight")) == i);
        CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(json, "compress_cache")) == i);
        cJSON_Delete(json);
        result_free(&r);
    }
    CU_ASSERT(weights[1] < .29 * weights[0]); /* and what stays F16 */
    CU_ASSERT(v[0] == k[0] && k[1] == k[0] * 4.5 / 16 && v[1] < .12 * k[1]);
}

static void policy_compresses_where_it_is_allowed_to(void) {
    Result plain = RUN(POLICY, "--gpu-mem", "1G", "--num-prompts", "32", "--json", "-");
    Result r = RUN(POLICY, "--gpu-mem", "1G", "--num-prompts", "32", "--json", "-", "--allow-compression");
    assert_done(&plain), assert_done(&r);
    cJSON *before = parse_out(&plain), *json = parse_out(&r);
    CU_ASSERT(cJSON_IsFalse(cJSON_GetObjectItem(before, "compress_weight")));
    CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(json, "compress_weight")));
    CU_ASSERT(number(json, "throughput") > number(before, "throughput"));
    cJSON_Delete(before), cJSON_Delete(json);
    result_free(&plain), result_free(&r);
}

/* Killed while it is made, wherever that is. */
static void a_copy_that_is_stopped_leaves_nothing(void) {
    for (int i = 0; i < 6; i++) {
        char dir[700];
        snprintf(dir, sizeof dir, "%s", temp_dir());
        pid_t pid = START("quantize", "--model", MODEL, "--output", in_dir(dir, "copy"));
        for (int ms = 0; ms < 1000 && !count_files(dir); ms++) usleep(1000); /* it has begun */
        usleep(3000 * i);
        kill(pid, i % 2 ? SIGINT : SIGTERM);
        Result r = finish(pid);
        if (r.status) assert_refused(r, 128 + (i % 2 ? SIGINT : SIGTERM), WORDS("stopped by", "no copy"));
        CU_ASSERT_EQUAL(count_files(dir), !r.status); /* or it was too late */
        if (!r.status) result_free(&r);
    }
}

static void a_copy_that_does_not_fit_the_disk_leaves_nothing(void) {
    char dir[300], to[400];
    snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(to, sizeof to, "%s/copy", dir);
    with.file = 100000;
    assert_refused(RUN("quantize", "--model", MODEL, "--output", to), EXIT_FAILED,
                   WORDS("copy", "model.safetensors", "File too large", "make room"));
    CU_ASSERT_EQUAL(count_files(dir), 0);
}

/* A full disk has stopped a job. It goes on with the flags that its tokens depend on, as they were, and with no others. */
static void a_job_goes_on_only_as_it_began(void) {
    static const struct {
        const char *began[6], *goes_on[6], *other; /* what the refusal says; NULL: it goes on */
    } cases[] = {{{"--temperature", "0.7", "--seed", "3"}, {"--temperature", "0.7", "--seed", "4"}, "--seed is \"3\""},
                 {{"--temperature", "0.7", "--seed", "3"}, {"--temperature", "0.8", "--seed", "3"}, "--temperature is "},
                 {{"--temperature", "0.7"}, {"--temperature", "0.7", "--top-k", "5"}, "--top-k is 0, and here it is 5"},
                 {{"--temperature", "0.7"}, {"--temperature", "0.7", "--top-p", "0.5"}, "--top-p is 1, and here it is 0.5"},
                 {{"--stop", "x"}, {"--stop", "y"}, "--stop is [\"x\"], and here it is [\"y\"]"},
                 {{"--compress-weight"}, {NULL}, "bits of weights is 4, and here it is 0"},
                 {{"--compress-weight"}, {"--allow-compression"}, NULL},
                 {{"--compress-cache"}, {NULL}, "bits of the cache is 4, and here it is 0"},
                 {{"--compress-cache"}, {"--allow-compression"}, NULL},
                 {{"--attn-sparsity", "0.5"}, {"--attn-sparsity", "0.25"}, "--attn-sparsity is 0.5, and here it is 0.25"},
                 {{NULL}, {"--attn-sparsity", "0.5"}, "--attn-sparsity is 1, and here it is 0.5"}};
    char prompts[1000] = "", output[700], journal[720];
    open_directories();
    for (int i = 0; i < 40; i++) strcat(prompts, "A dog and a cat.\n");
    write_file(capture, "prompts", prompts, strlen(prompts));
    snprintf(output, sizeof output, "%s", in_dir(capture, "began"));
    snprintf(journal, sizeof journal, "%s.journal", output);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int again = 0; again < 2; again++) {
            const char *args[40] = {"generate",
                                    "--model",
                                    MODEL,
                                    "--prompts",
                                    in_dir(capture, "prompts"),
                                    "--max-tokens",
                                    "8",
                                    "--gpu-batch-size",
                                    "2",
                                    "--num-gpu-batches",
                                    "1",
                                    "--percent",
                                    "100",
                                    "0",
                                    "100",
                                    "0",
                                    "100",
                                    "0",
                                    "--output",
                                    output,
                                    again ? "--resume" : "--overwrite"};
            const char *const *more = again ? cases[i].goes_on : cases[i].began;
            for (int n = 21; *more; n++) args[n] = *more++;
            if (!again) with.file = 2000;
            Result r = run(args);
            if (!again)
                assert_refused(r, EXIT_FAILED, WORDS("cannot write", "File too large"));
            else if (cases[i].other)
                assert_refused(r, EXIT_USAGE, WORDS("is of another job", cases[i].other));
            else {
                assert_done(&r), result_free(&r);
                CU_ASSERT(access(journal, F_OK) != 0); /* and it has ended */
            }
        }
}

/* The figures of --json of a command. */
static cJSON *figures(const char *const *args) {
    const char *all[64] = {NULL};
    int n = 0;
    for (; args[n]; n++) all[n] = args[n];
    all[n] = "--json", all[n + 1] = "-";
    Result r = run(all);
    assert_done(&r);
    cJSON *json = parse_out(&r);
    result_free(&r);
    return json;
}
#define FIGURES(...) figures((const char *const[]){__VA_ARGS__, NULL})
#define ON_T4 "--hardware", "hardware/t4.json", "--prompt-len", "64", "--gen-len", "8", "--num-prompts", "8"
#define BEST "policy", "--model", "opt-1.3b", ON_T4

static double throughput_and_free(cJSON *json) {
    const double throughput = number(json, "throughput");
    cJSON_Delete(json);
    return throughput;
}

/* A wire that is given as what is meant where none is given; a link that is slowed, and one that could not be so fast. */
static void wires_and_links_are_as_fast_as_they_are_given(void) {
    const char *const pipeline[] = {"bench",   "--model", "opt-125m", "--device",    "sim", ON_T4,
                                    "--nodes", "2",       "--net",    "1.25G,0.1ms", NULL};
    const char *const as_usual[] = {"bench", "--model", "opt-125m", "--device", "sim", ON_T4, "--nodes", "2", NULL};
    CU_ASSERT_EQUAL(throughput_and_free(figures(pipeline)), throughput_and_free(figures(as_usual)));
    const double usual = throughput_and_free(FIGURES(BEST, "--percent", "0", "100", "0", "100", "100", "0"));
    const double slow =
        throughput_and_free(FIGURES(BEST, "--percent", "0", "100", "0", "100", "100", "0", "--link", "ctog=1G"));
    const double fast =
        throughput_and_free(FIGURES(BEST, "--percent", "0", "100", "0", "100", "100", "0", "--link", "ctog=900G"));
    CU_ASSERT(fast == usual && slow < .5 * usual);
    CU_ASSERT_EQUAL(
        throughput_and_free(FIGURES(BEST, "--percent", "0", "100", "0", "100", "100", "0", "--with", "ctog_bdw=1e9")),
        slow);
}

/* By both cost models and on the sim; the machine's name says so. */
static void a_number_of_the_machine_is_changed_wherever_it_is_read(void) {
#define WHOLE_POLICY "--percent", "0", "100", "0", "100", "100", "0", "--gpu-batch-size", "4", "--num-gpu-batches", "2"
#define PAPER \
    "policy", "--model", "opt-1.3b", ON_T4, "--cost-model", "paper", "--gpu-batch-size", "4", "--num-gpu-batches", "2"
#define SIM "bench", "--model", "opt-1.3b", "--device", "sim", ON_T4, WHOLE_POLICY
    const double paper = throughput_and_free(FIGURES(PAPER)), sim = throughput_and_free(FIGURES(SIM));
    /* what does not fit the GPU must pass the link */
    const double small = throughput_and_free(FIGURES(PAPER, "--with", "gmem=1e9"));
    const double slow = throughput_and_free(FIGURES(PAPER, "--with", "gmem=1e9", "--with", "ctog_bdw=1e8"));
    CU_ASSERT(small < paper && slow < .5 * small);
    CU_ASSERT(throughput_and_free(FIGURES(SIM, "--with", "ctog_bdw=1e8")) < .1 * sim);
    cJSON *json = FIGURES(BEST, "--with", "gmem=2e9", "--with", "op_s=0");
    const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(json, "hardware"));
    CU_ASSERT(name && strstr(name, ", gmem=2e9, op_s=0"));
    cJSON_Delete(json);
}

/* Who attends, and how much a number may be compressed to, are orders where they are given. */
static void the_search_keeps_to_what_is_ordered(void) {
    cJSON *json = FIGURES(BEST, "--cpu-cache-compute"), *one;
    cJSON_ArrayForEach(one, cJSON_GetObjectItem(json, "best"))
        CU_ASSERT(cJSON_IsTrue(cJSON_GetObjectItem(one, "cpu_cache_compute")));
    CU_ASSERT(cJSON_GetArraySize(cJSON_GetObjectItem(json, "best")) > 1);
    cJSON_Delete(json);
    Result r = RUN(BEST, "--allow-compression");
    assert_done(&r);
    int packed = 0;
    for (const char *line = strchr(r.out, '\n'); line && line[1]; line = strchr(line + 1, '\n')) {
        int gbs, batches, weights, cache;
        if (sscanf(line, "%d x %d%*s %*s %d %d", &gbs, &batches, &weights, &cache) != 4) continue;
        CU_ASSERT((weights == 4 || weights == 16) && (cache == 4 || cache == 16));
        packed += weights == 4 || cache == 4;
    }
    CU_ASSERT(packed > 0);
    result_free(&r);
}

#define ON_SIM "bench", "--model", "opt-125m", "--device", "sim", "--hardware", "hardware/t4.json", "--prompt-len", "64"

/* T_pre and T_gen are seconds of a layer, in sweeps with a prefill and in the others: so many of these make up T, and where
 * batches enter one by one, some whole number. Without --num-prompts there is one block for each flight. */
static void t_pre_and_t_gen_make_up_t(void) {
    static const char *const schedules[] = {"zigzag", "diagonal"};
    for (int i = 0; i < 2; i++) {
        cJSON *json = FIGURES(ON_SIM, "--gen-len", "16", "--gpu-batch-size", "2", "--num-gpu-batches", "4", "--num-prompts",
                              "16", "--percent", "0", "100", "50", "50", "100", "0", "--schedule", schedules[i]);
        const double l = 12, T = number(json, "T"), T_pre = number(json, "T_pre"), T_gen = number(json, "T_gen");
        const double prefills = (T / l - number(json, "sweeps") * T_gen) / (T_pre - T_gen);
        CU_ASSERT_DOUBLE_EQUAL(prefills, round(prefills), 1e-6);
        CU_ASSERT(i ? prefills > 2 : round(prefills) == 2);
        cJSON_Delete(json);
    }
    cJSON *json = FIGURES(ON_SIM, "--gen-len", "8", "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--flights", "3",
                          "--percent", "0", "100", "50", "50", "100", "0");
    CU_ASSERT_DOUBLE_EQUAL(number(json, "throughput") * number(json, "T"), 2 * 2 * 3 * 8, 1e-6);
    cJSON_Delete(json);
}

/* The last token takes no position: of 2048, a prompt of 2040 leaves room for nine. */
static void a_prompt_and_its_output_may_fill_the_positions(void) {
#define TWO_OF(n) "policy", "--model", "opt-125m", LAPTOP, "--prompt-len", "2040", "--gen-len", n, "--num-prompts", "2"
    cJSON_Delete(FIGURES(TWO_OF("9")));
    assert_refused(RUN(TWO_OF("10")), EXIT_USAGE, WORDS("--prompt-len 2040 --gen-len 10", "at most 2049 together"));
}

/* What one place says of a run is what another says: of the clock, and of the lane that loads weights. */
static void the_figures_of_a_run_agree_with_each_other(void) {
    cJSON *json = FIGURES(ON_SIM, "--gen-len", "8", "--gpu-batch-size", "2", "--num-gpu-batches", "2", "--num-prompts", "8",
                          "--percent", "0", "100", "50", "50", "100", "0", "--no-overlap");
    const double T = number(json, "T");
    CU_ASSERT_DOUBLE_EQUAL(number(json, "prefill_s") + number(json, "decode_s"), T, 1e-9 * T);
    static const char *const stage[] = {"prefill", "decode"};
    double loads = 0, all = 0;
    for (int s = 0; s < 2; s++) {
        const cJSON *of = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "breakdown"), stage[s]), *part;
        double parts = 0;
        cJSON_ArrayForEach(part, of) if (cJSON_IsObject(part)) parts += number(part, "busy_s");
        CU_ASSERT_DOUBLE_EQUAL(parts, number(of, "total_s"), 1e-6 * parts); /* nothing overlaps */
        loads += number(cJSON_GetObjectItem(of, "weight (R)"), "busy_s"), all += parts;
    }
    const cJSON *lane = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "lanes"), "load weights");
    CU_ASSERT_DOUBLE_EQUAL(loads, number(lane, "busy_s"), 1e-6 * loads);
    CU_ASSERT_DOUBLE_EQUAL(all, T, 1e-6 * T);
    cJSON_Delete(json);
}

CU_TestInfo tests[] = {
    {"a wrong command is refused in one line with status 2", a_wrong_command_is_refused_in_one_line_with_status_2},
    {"a wrong flag is refused in one line with status 2", a_wrong_flag_is_refused_in_one_line_with_status_2},
    {"help goes to standard output and names every flag", help_goes_to_standard_output_and_names_every_flag},
    {"a spoilt model is refused in one line that names the file and the field",
     a_spoilt_model_is_refused_in_one_line_that_names_the_file_and_the_field},
    {"a truncated file is refused", a_truncated_file_is_refused},
    {"a header longer than its file is refused", a_header_longer_than_its_file_is_refused},
    {"a missing file or shard is refused by name", a_missing_file_or_shard_is_refused_by_name},
    {"a model that is no directory is refused with what is expected",
     a_model_that_is_no_directory_is_refused_with_what_is_expected},
    {"a wrong prompt is refused with its line", a_wrong_prompt_is_refused_with_its_line},
    {"a full or unwritable offload directory is refused by name",
     a_full_or_unwritable_offload_directory_is_refused_by_name},
    {"an output that cannot be written is an error", an_output_that_cannot_be_written_is_an_error},
    {"an older output is left alone", an_older_output_is_left_alone},
    {"results are not written over the model", results_are_not_written_over_the_model},
    {"a link stays a link, and standard output may have any name",
     a_link_stays_a_link_and_standard_output_may_have_any_name},
    {"one is not counted as many", one_is_not_counted_as_many},
    {"a completion that the positions cut short is counted", a_completion_that_the_positions_cut_short_is_counted},
    {"a head that differs from the table is used, and said", a_head_that_differs_from_the_table_is_used_and_said},
    {"a job goes on beside prompts that are impossible", a_job_goes_on_beside_prompts_that_are_impossible},
    {"a job goes on in smaller batches where longer prompts do not fit",
     a_job_goes_on_in_smaller_batches_where_longer_prompts_do_not_fit},
    {"a signal stops a job that then goes on", a_signal_stops_a_job_that_then_goes_on},
    {"a signal stops a job whose pipe is full", a_signal_stops_a_job_whose_pipe_is_full},
    {"a head that was edited is refused", a_head_that_was_edited_is_refused},
    {"another order of sums is said", another_order_of_sums_is_said},
    {"a disk that fills up keeps what was reported as done", a_disk_that_fills_up_keeps_what_was_reported_as_done},
    {"a job goes on only as it began", a_job_goes_on_only_as_it_began},
    {"a killed run leaves no offload file, and whole lines", a_killed_run_leaves_no_offload_file_and_whole_lines},
    {"prompts come from flags, a file or standard input", prompts_come_from_flags_a_file_or_standard_input},
    {"every policy writes the same completions", every_policy_writes_the_same_completions},
    {"one seed gives one output and another gives another", one_seed_gives_one_output_and_another_gives_another},
    {"no prompts are no work and no error", no_prompts_are_no_work_and_no_error},
    {"output to a file is what standard output would be", output_to_a_file_is_what_standard_output_would_be},
    {"a stop text ends a completion before it", a_stop_text_ends_a_completion_before_it},
    {"bench reports one JSON object with the names of the paper",
     bench_reports_one_json_object_with_the_names_of_the_paper},
    {"bench reports a disk share in a file", bench_reports_a_disk_share_in_a_file},
    {"the sim runs OPT-175B on a T4", the_sim_runs_opt_175b_on_a_t4},
    {"the sim runs a pipeline of machines", the_sim_runs_a_pipeline_of_machines},
    {"the diagonal schedule finds its number of batches", the_diagonal_schedule_finds_its_number_of_batches},
    {"a slowed link and mixed lengths show in the figures", a_slowed_link_and_mixed_lengths_show_in_the_figures},
    {"a trace is JSON with a slice for every call", a_trace_is_json_with_a_slice_for_every_call},
    {"a wrong policy question is refused in one line", a_wrong_policy_question_is_refused_in_one_line},
    {"the paper's cost model places OPT-30B", the_papers_cost_model_places_opt_30b},
    {"policy lists the ten best under the paper's names", policy_lists_the_ten_best_under_the_papers_names},
    {"wires and links are as fast as they are given", wires_and_links_are_as_fast_as_they_are_given},
    {"a number of the machine is changed wherever it is read", a_number_of_the_machine_is_changed_wherever_it_is_read},
    {"the search keeps to what is ordered", the_search_keeps_to_what_is_ordered},
    {"a prompt and its output may fill the positions", a_prompt_and_its_output_may_fill_the_positions},
    {"T_pre and T_gen make up T", t_pre_and_t_gen_make_up_t},
    {"the figures of a run agree with each other", the_figures_of_a_run_agree_with_each_other},
    {"the frontier is a list that rises", the_frontier_is_a_list_that_rises},
    {"a latency bounds what is found", a_latency_bounds_what_is_found},
    {"a dash leaves a percentage to the search", a_dash_leaves_a_percentage_to_the_search},
    {"bench says what was expected", bench_says_what_was_expected},
    {"generate says what was expected and writes the same", generate_says_what_was_expected_and_writes_the_same},
    {"eval gives the same perplexity under every policy", eval_gives_the_same_perplexity_under_every_policy},
    {"eval knows which last words are right", eval_knows_which_last_words_are_right},
    {"a wrong evaluation is refused in one line", a_wrong_evaluation_is_refused_in_one_line},
    {"the machine that was measured before is used", the_machine_that_was_measured_before_is_used},
    {"what a longer block would bring is at least a percent", what_a_longer_block_would_bring_is_at_least_a_percent},
    {"without a GPU the default is the host device, and says so", without_a_gpu_the_default_is_the_host_device_and_says_so},
    {"beside a GPU two cores are left to its lanes", beside_a_gpu_two_cores_are_left_to_its_lanes},
    {"the GPU writes what the host writes", the_gpu_writes_what_the_host_writes},
    {"trouble with the GPU is one line that says what to do", trouble_with_the_gpu_is_one_line_that_says_what_to_do},
    {"the GPU keeps to its limit", the_gpu_keeps_to_its_limit},
    {"bench on the GPU measures before it traces", bench_on_the_gpu_measures_before_it_traces},
    {"bench tells its tokens by their digest", bench_tells_its_tokens_by_their_digest},
    {"bench gives every prompt tokens of its own", bench_gives_every_prompt_tokens_of_its_own},
    {"a GPU with room takes prompts in larger pieces", a_gpu_with_room_takes_prompts_in_larger_pieces},
    {"what was measured on a GPU is written before the second run",
     what_was_measured_on_a_gpu_is_written_before_the_second_run},
    {"a wrong copy is refused in one line", a_wrong_copy_is_refused_in_one_line},
    {"quantize makes a copy and says how large it is", quantize_makes_a_copy_and_says_how_large_it_is},
    {"what groups do not divide is refused", what_groups_do_not_divide_is_refused},
    {"a study rounds, and says so", a_study_rounds_and_says_so},
    {"a packed copy writes what --compress-weight does", a_packed_copy_writes_what_compress_weight_does},
    {"bench counts packed bytes and the V that is read", bench_counts_packed_bytes_and_the_v_that_is_read},
    {"policy compresses where it is allowed to", policy_compresses_where_it_is_allowed_to},
    {"a copy that is stopped leaves nothing", a_copy_that_is_stopped_leaves_nothing},
    {"a copy that does not fit the disk leaves nothing", a_copy_that_does_not_fit_the_disk_leaves_nothing},
    CU_TEST_INFO_NULL,
};
