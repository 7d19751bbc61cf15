/* test_mini.c: mini.c, the whole paper in one file, beside the engine. Neither shares a line with the other, so that each
 * is the other's oracle.
 *
 * Both programs are started: the engine (FLEXGEN_BIN) once for each model and each kind of compression, since every policy
 * gives its tokens (test_schedule.c), and mini (MINI_BIN) under many policies. Sums come in another order there, so a token
 * may differ where the engine's own choice was close: its lead over the next one is then shown, and bounded. MINI_PORTABLE
 * is mini without this machine's instructions, MINI_ASAN and MINI_TSAN are mini with sanitizers. What runs long takes a
 * sample of its cases; with MINI_ALL set (make mini-all) all. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/started.h"

#define TINY "models/opt-tiny"
#define PIECES "tests/golden/tokenizer"
enum { LINKS = 4, PROMPTS = 12, MOST_TOKENS = 16, POSITIONS = 384, PLACEMENTS = 40 };

/* Every case with MINI_ALL, else every so many-th. */
static int step(int stride) { return getenv("MINI_ALL") ? 1 : stride * test_every; }

static int between(uint64_t *state, int low, int high) { return low + test_below(state, high - low + 1); }
// ---------------------------------------------------------------------------------------------------------------
// Running the two programs
// ---------------------------------------------------------------------------------------------------------------

typedef enum { ENGINE, MINI, PORTABLE, ASAN, TSAN } Program;
static const char *const variable[] = {"FLEXGEN_BIN", "MINI_BIN", "MINI_PORTABLE", "MINI_ASAN", "MINI_TSAN"};
static bool has(Program program) {
    const char *path = getenv(variable[program]);
    return path && *path;
}

/* Starts a program with the words of a text. TSan needs a fixed layout of the address space. */
static pid_t start(Program program, const char *text) {
    static const char *argv[100];
    static char words[4000];
    int n = 0;
    /* mini leaves its memory to the system when it ends */
    setenv("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1", 1);
    setenv("TSAN_OPTIONS", "halt_on_error=1:abort_on_error=1", 1);
    CHECK((size_t)snprintf(words, sizeof words, "%s%s %s", program == TSAN ? "setarch -R " : "", getenv(variable[program]),
                           text) < sizeof words);
    for (char *word = strtok(words, " "); word && n < 99; word = strtok(NULL, " ")) argv[n++] = word;
    argv[n] = NULL;
    return start_program(argv);
}

__attribute__((format(printf, 2, 3))) static Result run(Program program, const char *format, ...) {
    char text[3500];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return finish(start(program, text));
}

static bool is_one_line(const char *text) {
    const char *end = strchr(text, '\n');
    return !strncmp(text, "mini: ", 6) && end && !end[1];
}

/* It failed with status 1 or 2, or with `status` alone if that is not 0, wrote nothing, and said why in one line. */
static bool was_refused(const Result *r, int status) {
    return (status ? r->status == status : r->status == 1 || r->status == 2) && !*r->out && is_one_line(r->err);
}

static void assert_refused(Result r, int status, const char *what) {
    if (!was_refused(&r, status)) fprintf(stderr, "\n    %s: status %d: %s%s", what, r.status, r.out, r.err);
    CU_ASSERT(was_refused(&r, status));
    result_free(&r);
}

static bool succeeded(const Result *r, const char *what) {
    if (r->status) fprintf(stderr, "\n    %s: status %d: %s\n", what, r->status, r->err);
    return r->status == 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Models with random weights
// ---------------------------------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    int l, h1, h2, nh, vocab, n; /* n: tokens to generate */
    bool sharded;
    char dir[300];
} Subject;

/* The shipped model has heads of 64. */
static Subject subjects[] = {
    {"the shipped model", 6, 256, 1024, 4, 4096, 10, false, TINY},
    {"heads of 16", 3, 64, 192, 4, 1024, 12, false, ""},
    {"heads of 32, shards", 5, 128, 320, 4, 1024, 12, true, ""},
    {"heads of 80", 1, 320, 384, 4, 1024, 12, false, ""},
};
enum { SUBJECTS = sizeof subjects / sizeof *subjects };

/* A safetensors file in the making. */
typedef struct {
    char header[1 << 14];
    size_t len, size; /* of the header, of the data */
    uint8_t *data;
} Draft;

/* rows 0: a vector. Numbers are middle +- size. */
static void add_tensor(Draft *d, const char *name, int rows, int cols, float middle, float size) {
    const size_t count = (size_t)imax(rows, 1) * cols, bytes = sizeof(f16);
    uint64_t seed = 1;
    char shape[40];
    for (const char *c = name; *c; c++) seed = seed * 31 + (uint64_t)*c;
    d->data = xrealloc(d->data, d->size + count * bytes, 1);
    for (size_t e = 0; e < count; e++) {
        const f16 half = f32_to_f16(middle + size * test_random(&seed));
        memcpy(d->data + d->size + e * bytes, &half, bytes);
    }
    snprintf(shape, sizeof shape, rows ? "%d,%d" : "%.0d%d", rows, cols);
    d->len += (size_t)snprintf(d->header + d->len, sizeof d->header - d->len,
                               "%c\"%s\":{\"dtype\":\"F16\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", d->len ? ',' : '{',
                               name, shape, d->size, d->size + count * bytes);
    d->size += count * bytes;
}

static void add_linear(Draft *d, const char *name, int j, int out, int in, float gain) {
    char path[100];
    for (int bias = 0; bias < 2; bias++) {
        snprintf(path, sizeof path, "model.decoder.layers.%d.%s.%s", j, name, bias ? "bias" : "weight");
        add_tensor(d, path, bias ? 0 : out, bias ? out : in, 0, bias ? .1f : gain * sqrtf(3.f / (float)in));
    }
}

/* gain: the weights are around it. */
static void add_norm(Draft *d, const Subject *m, const char *path, float gain) {
    char name[100];
    for (int bias = 0; bias < 2; bias++) {
        snprintf(name, sizeof name, "model.decoder.%s.%s", path, bias ? "bias" : "weight");
        add_tensor(d, name, 0, m->h1, bias ? 0 : gain, .2f);
    }
}

/* The scales make each layer matter, so that texts do not repeat one token; with larger ones a code of four bits that
 * rounds the other way would change tokens. */
static void add_layer(Draft *d, const Subject *m, int j) {
    static const char *const projection[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                             "self_attn.out_proj"};
    char path[60];
    for (int p = 0; p < 4; p++) add_linear(d, projection[p], j, m->h1, m->h1, 1);
    add_linear(d, "fc1", j, m->h2, m->h1, 1);
    add_linear(d, "fc2", j, m->h1, m->h2, 1);
    snprintf(path, sizeof path, "layers.%d.self_attn_layer_norm", j), add_norm(d, m, path, 1);
    snprintf(path, sizeof path, "layers.%d.final_layer_norm", j), add_norm(d, m, path, 1);
}

/* The table of tokens is the head, too. So that texts do not repeat one token, the last norm keeps little of the state. */
static void add_globals(Draft *d, const Subject *m) {
    add_tensor(d, "model.decoder.embed_tokens.weight", m->vocab, m->h1, 0, .4f);
    add_tensor(d, "model.decoder.embed_positions.weight", POSITIONS + 2, m->h1, 0, 1.4f);
    add_norm(d, m, "final_layer_norm", 0);
}

/* A safetensors file whose header is of that text and says of itself that it is so long. */
static void write_tensors(const char *dir, const char *name, const char *header, uint64_t len, const Draft *d) {
    const size_t written = strlen(header);
    uint8_t *file = xcalloc(8 + written + d->size, 1);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(len >> 8 * i);
    memcpy(file + 8, header, written);
    memcpy(file + 8 + written, d->data, d->size);
    write_file(dir, name, file, 8 + written + d->size);
    free(file);
}

static void write_draft(const char *dir, const char *name, Draft *d) {
    d->header[d->len++] = '}';
    write_tensors(dir, name, d->header, d->len, d);
}

static void write_text(const char *dir, const char *name, const char *text) { write_file(dir, name, text, strlen(text)); }

/* Odd layers are in one shard, all else is in the other. */
static void write_weights(const Subject *m) {
    Draft d[2] = {{.len = 0}, {.len = 0}};
    char index[1000];
    size_t used = 0;
    add_globals(&d[0], m);
    for (int j = 0; j < m->l; j++) add_layer(&d[m->sharded && j % 2], m, j);
    write_draft(m->dir, m->sharded ? "model-2.safetensors" : "model.safetensors", &d[0]);
    if (m->sharded) {
        write_draft(m->dir, "model-1.safetensors", &d[1]);
        for (int j = 0; j < m->l; j++)
            used += (size_t)snprintf(index + used, sizeof index - used,
                                     "%s\"model.decoder.layers.%d.fc1.bias\": \"model-%d.safetensors\"", j ? ", " : "", j,
                                     j % 2 ? 1 : 2);
        char text[1100];
        snprintf(text, sizeof text, "{\"weight_map\": {%s}}", index);
        write_text(m->dir, "model.safetensors.index.json", text);
    }
    free(d[0].data), free(d[1].data);
}

/* The directory of a model, which is written when it is first asked for. */
static const char *dir_of(Subject *m) {
    char config[700];
    if (m->dir[0]) return m->dir;
    snprintf(m->dir, sizeof m->dir, "%s", temp_dir());
    snprintf(config, sizeof config,
             "{\"model_type\": \"opt\", \"num_hidden_layers\": %d, \"hidden_size\": %d, \"ffn_dim\": %d, "
             "\"num_attention_heads\": %d, \"vocab_size\": %d, \"max_position_embeddings\": %d, \"eos_token_id\": 2, "
             "\"activation_function\": \"relu\", \"tie_word_embeddings\": true}",
             m->l, m->h1, m->h2, m->nh, m->vocab, POSITIONS);
    write_text(m->dir, "config.json", config);
    copy_file(PIECES, m->dir, "vocab.json");
    copy_file(PIECES, m->dir, "merges.txt");
    write_weights(m);
    return m->dir;
}

// ---------------------------------------------------------------------------------------------------------------
// Prompts, and what the engine answers
// ---------------------------------------------------------------------------------------------------------------

static const char *const prompts[PROMPTS] = {
    "Once upon a time, there was a little girl named Lily.",
    "A",
    "Tom and Sue went to the park to play. They saw a big dog, and the dog wasn't happy: it couldn't find its ball!",
    "The cat",
    "\"Don't,\" he said.  \"I'll do it;   we've 3 apples, 12 pears & 4567 nuts (or so)...\"",
    "One rainy day, a small frog found a red boat. He climbed in and sailed over the pond to the other side.",
    "Ben was not afraid of the dark. He had a lamp, a book, and a friend who told him long stories about the sea, the "
    "stars "
    "and the whales that sing at night. One night the lamp went out.",
    "Le caf\303\251 d'\303\251t\303\251 \303\251tait ferm\303\251",
    "tab\there, back\\slash, <b>bold</b>  ",
    " leading blank and x_1 = y^2 + 0.5",
    "Mum",
    "The end of the story is that the old man gave the boy his hat, and the boy gave the old man his",
};

static const char *prompts_file(void) {
    static char path[700];
    if (path[0]) return path;
    snprintf(path, sizeof path, "%s", in_dir(temp_dir(), "prompts.txt"));
    FILE *f = fopen(path, "w");
    CHECK(f);
    for (int i = 0; i < PROMPTS; i++) fprintf(f, "%s\n", prompts[i]);
    CHECK(fclose(f) == 0);
    return path;
}

/* What changes the tokens: compression and sparse attention. */
typedef enum { PLAIN, PACKED_WEIGHT, PACKED_CACHE, BOTH, SPARSE_1, SPARSE_3, SPARSE_PACKED, VARIANTS } Variant;
static const struct {
    const char *flags;
    bool weight, cache;
    double sparsity, tie; /* tie: so small a lead may be lost, of the largest |logit| */
} variant[] = {{"", false, false, 0, 1e-3},
               {"--compress-weight", true, false, 0, 5e-3},
               {"--compress-cache", false, true, 0, 5e-3},
               {"--compress-weight --compress-cache", true, true, 0, 5e-3},
               {"--attn-sparsity 0.1 --cpu-cache-compute", false, false, .1, 5e-3},
               {"--attn-sparsity 0.3 --cpu-cache-compute", false, false, .3, 5e-3},
               {"--attn-sparsity 0.3 --cpu-cache-compute --compress-weight --compress-cache", true, true, .3, 5e-3}};

typedef struct {
    int n[PROMPTS], token[PROMPTS][MOST_TOKENS];
    char *completion[PROMPTS];
} Answers;

static void answers_free(Answers *a) {
    for (int i = 0; i < PROMPTS; i++) free(a->completion[i]);
}

/* Both programs write a JSON object a line, the engine's with the texts. False: something is missing, or there twice. */
static bool read_answers(Answers *a, const char *text, bool engines) {
    int lines = 0;
    *a = (Answers){.n = {0}};
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
        cJSON *json = cJSON_ParseWithLength(line, (size_t)(end - line)); /* a text ends at \\u0000, if that is in it */
        size_t id = PROMPTS;
        if (json) json_whole(json_get(json, "id"), &id);
        const cJSON *tokens = json ? json_get(json, "tokens") : NULL,
                    *completion = json ? json_get(json, "completion") : NULL;
        const char *prompt = json ? cJSON_GetStringValue(json_get(json, "prompt")) : NULL;
        bool good =
            id < PROMPTS && !a->completion[id] && cJSON_IsArray(tokens) && cJSON_GetArraySize(tokens) <= MOST_TOKENS;
        if (engines) good = good && cJSON_IsString(completion) && prompt && !strcmp(prompt, prompts[id]);
        if (good) {
            a->n[id] = cJSON_GetArraySize(tokens), a->completion[id] = xstrdup(engines ? completion->valuestring : "");
            for (int t = 0; t < a->n[id]; t++) a->token[id][t] = cJSON_GetArrayItem(tokens, t)->valueint;
        }
        if (!good) fprintf(stderr, "\n    no completion of ours: %.*s\n", (int)(end - line), line);
        cJSON_Delete(json);
        if (!good) return false;
    }
    if (lines != PROMPTS) fprintf(stderr, "\n    %d completions: %s", lines, text);
    return lines == PROMPTS;
}

/* The engine's answers, which it is asked for once. */
static const Answers *engine_answers(int m, Variant v) {
    static Answers known[SUBJECTS][VARIANTS];
    Answers *a = &known[m][v];
    if (a->completion[0]) return a;
    Result r = run(ENGINE,
                   "generate --model %s --prompts %s --format text --max-tokens %d %s --percent 100 0 %s 100 0 "
                   "--gpu-batch-size %d --num-gpu-batches 1 --gpu-mem 256M --cpu-mem 256M --disk-mem 256M --threads 2",
                   dir_of(&subjects[m]), prompts_file(), subjects[m].n, variant[v].flags,
                   variant[v].sparsity > 0 ? "0 100" : "100 0", PROMPTS);
    CU_ASSERT_FATAL(succeeded(&r, subjects[m].name) && read_answers(a, r.out, true));
    result_free(&r);
    return a;
}

/* Tokens of a prompt, </s> first; the caller frees *ids. */
static int encode(int32_t **ids, Subject *m, int prompt) {
    Error err;
    int32_t *bare;
    Tokenizer *t = tokenizer_open(dir_of(m), m->vocab, &err);
    int n = t ? tokenizer_encode(t, prompts[prompt], strlen(prompts[prompt]), &bare, &err) : -1;
    if (n < 0) CU_FAIL_FATAL(err.text);
    *ids = xcalloc((size_t)n + 1, sizeof **ids);
    (*ids)[0] = 2;
    memcpy(*ids + 1, bare, (size_t)n * sizeof *bare);
    free(bare);
    tokenizer_close(t);
    return n + 1;
}

/* How close a choice was: the lead of the first token over the second, of the largest |logit|. */
typedef struct {
    int vocab, step, chosen;
    double lead;
} Choice;

static void on_logits(void *ctx, int prompt, int n, const float *logits) {
    Choice *c = ctx;
    float largest = 0, second = -INFINITY;
    int best = 0;
    (void)prompt;
    if (n != c->step + 1) return;
    for (int v = 0; v < c->vocab; v++) best = logits[v] > logits[best] ? v : best;
    for (int v = 0; v < c->vocab; v++) {
        largest = fmaxf(largest, fabsf(logits[v]));
        if (v != best) second = fmaxf(second, logits[v]);
    }
    c->chosen = best, c->lead = (logits[best] - second) / largest;
}

/* The engine's choice of token `at` of a prompt, from its own logits. */
static Choice engine_choice(int m, Variant v, int prompt, int at) {
    Policy policy = all_gpu(1, 1);
    Prompt one = {.n = at + 1};
    Choice choice = {.vocab = subjects[m].vocab, .step = at, .chosen = -1, .lead = INFINITY};
    Error err;
    RunStats stats;
    one.s = encode(&one.ids, &subjects[m], prompt);
    policy.weight_packed = variant[v].weight, policy.cache_packed = variant[v].cache;
    if (variant[v].sparsity > 0)
        policy.sparsity = variant[v].sparsity, policy.delegated = true, policy.cg = 0, policy.cc = 1;
    const Task task = {.prompts = &one, .count = 1, .keep_logits = true, .sampling = {.top_p = 1}};
    const Listener listener = {.ctx = &choice, .logits = on_logits};
    Checkpoint *checkpoint = checkpoint_open(dir_of(&subjects[m]), &err);
    Plan *plan = checkpoint ? plan_make(checkpoint, &policy, &task, F32, &err) : NULL;
    Device *device = plan ? device_open(NULL, plan, checkpoint, temp_dir(), &err) : NULL;
    if (!device || weights_load(plan, checkpoint, device, &err) ||
        schedule_run(plan, &task, device, &listener, &stats, &err))
        CU_FAIL_FATAL(err.text);
    device->close(device);
    plan_free(plan);
    checkpoint_close(checkpoint);
    free(one.ids);
    return choice;
}

static int compared, differing;       /* sequences of the present test */
static int most_tokens = MOST_TOKENS; /* that a run generates for each */

static Result run_mini(Program program, int m, Variant v, const char *flags) {
    return run(program, "%s --prompts %s --json --max-tokens %d %s %s --gpu-mem 1e9 --cpu-mem 1e9", dir_of(&subjects[m]),
               prompts_file(), imin(subjects[m].n, most_tokens), variant[v].flags, flags);
}

/* Whether mini gives the engine's tokens up to `at` when it is compiled without this machine's instructions, whose sums are
 * rounded otherwise. So a tie is known that no lead shows: between two past tokens that sparse attention may choose. */
static bool rounding_decides(int m, Variant v, int i, int at, const char *flags) {
    const Answers *b = engine_answers(m, v);
    Answers a;
    Result r = run_mini(PORTABLE, m, v, flags);
    const bool ok = succeeded(&r, flags) && read_answers(&a, r.out, false);
    const bool same = ok && a.n[i] > at && b->n[i] > at && !memcmp(a.token[i], b->token[i], (size_t)(at + 1) * sizeof(int));
    if (ok) answers_free(&a);
    result_free(&r);
    return same;
}

/* Answers are the engine's, but where the engine's own choice was so close that the order of sums decides it. */
static void compare(int m, Variant v, const Answers *a, const char *flags) {
    const Answers *b = engine_answers(m, v);
    for (int i = 0; i < PROMPTS; i++, compared++) {
        const int wanted = imin(b->n[i], most_tokens);
        int at = 0;
        while (at < a->n[i] && at < wanted && a->token[i][at] == b->token[i][at]) at++;
        if (at == a->n[i] && at == wanted) continue;
        const Choice choice = engine_choice(m, v, i, at);
        const int engines = at < wanted ? b->token[i][at] : 2, minis = at < a->n[i] ? a->token[i][at] : 2;
        fprintf(stderr, "\n    %s, prompt %d, token %d: the engine's is %d with a lead of %.1e, mini's %d: %s %s",
                subjects[m].name, i, at, engines, choice.lead, minis, variant[v].flags, flags);
        CU_ASSERT_EQUAL(choice.chosen, engines);
        CU_ASSERT(choice.lead < variant[v].tie || (variant[v].sparsity > 0 && rounding_decides(m, v, i, at, flags)));
        differing++;
    }
}

static void at_most_one_of_fifty_differs(void) {
    printf("%d sequences, %d differ ", compared, differing);
    CU_ASSERT(compared > 0 && 50 * differing <= compared + 49);
    compared = differing = 0;
}

// ---------------------------------------------------------------------------------------------------------------
// Tokens
// ---------------------------------------------------------------------------------------------------------------

/* A share of GPU and CPU: all on one tier, whole percents, or anything. */
static size_t random_percent(char *to, uint64_t *seed) {
    const int kind = test_below(seed, 6), gpu = test_below(seed, 101);
    if (kind < 3) return (size_t)sprintf(to, " %d %d", kind == 0 ? 100 : 0, kind == 1 ? 100 : 0);
    if (kind < 5) return (size_t)sprintf(to, " %d %d", gpu, test_below(seed, 101 - gpu));
    const double above = 100 * (test_random(seed) + 1) / 2, share = (test_random(seed) + 1) / 2;
    return (size_t)sprintf(to, " %.4f %.4f", above * share, above * (1 - share));
}

/* Links of a rate that slows some things down and takes little time; a block of 1 to 4 batches, often a short last one. */
static const char *random_policy(int m, int number, Variant v) {
    static char text[500];
    uint64_t seed = 1000 * (uint64_t)m + (uint64_t)number + 7919 * v;
    size_t used = (size_t)sprintf(text, "--percent");
    const double rate = m ? 2e8 : 6e9;
    for (int kind = 0; kind < 3; kind++) used += random_percent(text + used, &seed);
    const int K = 1 + number % 4, gbs = between(&seed, K < 3 ? 2 : 1, 12 / K);
    used += (size_t)sprintf(text + used, " --gpu-batch-size %d --num-gpu-batches %d --threads %d", gbs, K,
                            1 + test_below(&seed, 3));
    if (test_below(&seed, 3) == 0)
        used += (size_t)sprintf(text + used, " --ctog %.0f --gtoc %.0f", test_spread(&seed, rate, 8 * rate), 8 * rate);
    else if (test_below(&seed, 2) == 0)
        used += (size_t)sprintf(text + used, " --dtoc %.0f --ctod %.0f --gtoc 9e9", test_spread(&seed, rate, 8 * rate),
                                8 * rate);
    if (test_below(&seed, 3) == 0) used += (size_t)sprintf(text + used, " --no-overlap");
    if (test_below(&seed, 2) == 0) used += (size_t)sprintf(text + used, " --cpu-cache-compute");
    return text;
}

/* mini under a policy gives the engine's answers. */
static void try_policy(Program program, int m, Variant v, const char *flags) {
    Answers a;
    Result r = run_mini(program, m, v, flags);
    const bool ok = succeeded(&r, flags) && read_answers(&a, r.out, false);
    CU_ASSERT(ok);
    if (ok) compare(m, v, &a, flags), answers_free(&a);
    result_free(&r);
}

static void every_placement_gives_the_engines_tokens(void) {
    for (int m = 0; m < SUBJECTS; m++)
        for (int i = m; i < PLACEMENTS; i += step(m ? 7 : 9)) try_policy(MINI, m, PLAIN, random_policy(m, i, PLAIN));
    at_most_one_of_fifty_differs();
}

/* More parts of a layer's weights than a thread that moves them can note. */
static void a_block_may_have_many_batches(void) {
    for (int i = 0; i < 2; i++)
        try_policy(MINI, 0, PLAIN, "--percent 0 100 0 100 0 100 --gpu-batch-size 1 --num-gpu-batches 12");
    at_most_one_of_fifty_differs();
}

static void compressed_weights_and_cache_give_the_engines_tokens(void) {
    for (int m = 0; m < SUBJECTS; m++)
        for (Variant v = PACKED_WEIGHT; v <= BOTH; v++)
            for (int i = m + (int)v; i < PLACEMENTS / 4; i += step(m ? 5 : 10))
                try_policy(MINI, m, v, random_policy(m, i, v));
    at_most_one_of_fifty_differs();
}

static void sparse_attention_gives_the_engines_tokens(void) {
    for (int m = 0; m < SUBJECTS; m++)
        for (Variant v = SPARSE_1; v <= SPARSE_PACKED; v++)
            for (int i = m + (int)v - SPARSE_1; i < PLACEMENTS / 4; i += step(m ? 5 : 10))
                try_policy(MINI, m, v, random_policy(m, i, v));
    at_most_one_of_fifty_differs();
}

/* mini generates the engine's tokens for one prompt; `json` is the prompt as JSON writes it. */
static void assert_engines_answer(const char *dir, const char *word, const char *json) {
    const char *file = in_dir(temp_dir(), "prompt.jsonl");
    const char *const argv[] = {getenv("MINI_BIN"), dir, word, "--json", "--max-tokens", "5", NULL};
    FILE *f = fopen(file, "w");
    CHECK(f && fprintf(f, "{\"id\": 0, \"prompt\": \"%s\"}\n", json) > 0 && fclose(f) == 0);
    Result mini = finish(start_program(argv));
    Result engine = run(ENGINE,
                        "generate --model %s --prompts %s --max-tokens 5 --percent 100 0 100 0 100 0 "
                        "--gpu-batch-size 1 --num-gpu-batches 1 --gpu-mem 256M --cpu-mem 256M --disk-mem 256M",
                        dir, file);
    CU_ASSERT_FATAL(succeeded(&mini, json) && succeeded(&engine, json));
    const char *ours = strstr(mini.out, "\"tokens\": ["), *its = strstr(engine.out, "\"tokens\": [");
    CU_ASSERT_FATAL(ours && its);
    const bool same = !strncmp(ours, its, strcspn(ours, "]"));
    if (!same) fprintf(stderr, "\n    %s: %s    the engine's: %s", json, ours, its);
    CU_ASSERT(same);
    result_free(&mini), result_free(&engine);
}

/* What mini prints without --json is each prompt and its completion as bytes. Where these are no UTF-8, the engine's text
 * has U+FFFD, and json_write_string writes ?. */
static void texts_are_those_of_the_tokens(void) {
    for (int m = 0; m < SUBJECTS; m++) {
        const Answers *a = engine_answers(m, PLAIN);
        Error err;
        Result r = run(MINI, "%s --prompts %s --max-tokens %d --percent 100 0 100 0 100 0", dir_of(&subjects[m]),
                       prompts_file(), subjects[m].n);
        CU_ASSERT_FATAL(succeeded(&r, "texts"));
        const char *at = r.out;
        int same = 0;
        for (int i = 0; i < PROMPTS; i++) {
            const size_t len = strlen(prompts[i]);
            CU_ASSERT_FATAL(!strncmp(at, prompts[i], len));
            const char *end = i + 1 < PROMPTS ? strstr(at, prompts[i + 1]) : at + strlen(at);
            while (i + 1 < PROMPTS && end && end[-1] != '\n') end = strstr(end + 1, prompts[i + 1]);
            CU_ASSERT_PTR_NOT_NULL_FATAL(end);
            FILE *f = tmpfile();
            json_write_string(f, at + len, (size_t)(end - 1 - at) - len);
            char text[4000] = "";
            rewind(f);
            CU_ASSERT_FATAL(fread(text, 1, sizeof text - 1, f) > 0 && fclose(f) == 0);
            cJSON *json = json_parse(text, strlen(text), &err);
            char *wanted = xstrdup(a->completion[i]);
            for (char *c; (c = strstr(wanted, "\357\277\275")); memmove(c + 1, c + 3, strlen(c + 3) + 1)) *c = '?';
            same += json && !strcmp(cJSON_GetStringValue(json), wanted);
            free(wanted);
            cJSON_Delete(json);
            at = end;
        }
        if (same < PROMPTS) fprintf(stderr, "\n    %s: %d of %d texts\n", subjects[m].name, same, PROMPTS);
        CU_ASSERT(same >= PROMPTS - 1); /* One may differ by a token. */
        result_free(&r);
    }
}

/* The token </s>, with which every prompt begins, is the end of a generated text only. "" is a prompt of that token alone.
 */
static void an_empty_prompt_gives_the_engines_tokens(void) { assert_engines_answer(TINY, "", ""); }

/* A few sweeps are as good as many: the same threads wait for the same buffers. */
static void sanitizers_find_nothing_in_any_of_these(void) {
    if (!getenv("MINI_ALL")) most_tokens = 4;
    for (Program p = ASAN; p <= TSAN; p++)
        for (int c = 0; c < (SUBJECTS - 1) * VARIANTS * 10 && has(p); c += step(p == ASAN ? 19 : 37)) {
            const int m = 1 + c % (SUBJECTS - 1);
            const Variant v = c / (SUBJECTS - 1) % VARIANTS;
            try_policy(p, m, v, random_policy(m, c / (SUBJECTS - 1) / VARIANTS + c, v));
        }
    if (has(ASAN) || has(TSAN)) at_most_one_of_fifty_differs();
    most_tokens = MOST_TOKENS;
}

/* Or a comparison would see little. */
static void texts_of_random_weights_are_of_many_tokens(void) {
    for (int m = 1; m < SUBJECTS; m++) {
        const Answers *a = engine_answers(m, PLAIN);
        int different = 0, whole = 0;
        for (int i = 0; i < PROMPTS; i++) {
            whole += a->n[i];
            for (int t = 0; t < a->n[i]; t++) {
                bool seen = false;
                for (int u = 0; u < t; u++) seen |= a->token[i][u] == a->token[i][t];
                different += !seen;
            }
        }
        CU_ASSERT_EQUAL(whole, PROMPTS * subjects[m].n); /* none ends early: the formulas below count on it */
        if (2 * different < whole) fprintf(stderr, "\n    %s: %d of %d\n", subjects[m].name, different, whole);
        CU_ASSERT(2 * different >= whole);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Links and memory
// ---------------------------------------------------------------------------------------------------------------

/* What mini reports on standard error: "mini: ctog: 115015680 bytes, 0.013 s", "mini: GPU: 10496320 bytes". */
typedef struct {
    double moved[LINKS], busy[LINKS]; /* bytes, seconds */
    double peak[NTIERS], seconds;
} Figures;

static bool read_figures(Figures *f, const char *text) {
    static const char *const tiers[] = {"GPU", "CPU", "disk"};
    char key[40];
    bool all = true;
    for (int c = 0; c < LINKS; c++) {
        snprintf(key, sizeof key, "mini: %s: ", channel_name[c]);
        const char *at = strstr(text, key);
        all &= at && sscanf(at + strlen(key), "%lf bytes%*[, in]%lf s", &f->moved[c], &f->busy[c]) == 2;
    }
    for (int t = 0; t < NTIERS; t++) {
        snprintf(key, sizeof key, "mini: %s", tiers[t]);
        const char *at = strstr(text, key);
        all &= at && sscanf(at + strlen(key), "%*[^0-9]%lf bytes", &f->peak[t]) == 1;
    }
    const char *at = strstr(text, ", tokens ");
    return all && at && sscanf(at, ", tokens %*d, %lf s", &f->seconds) == 1;
}

static double group_bytes(int n) { return 4 + ceil((n / 32 * 16 + imin(n % 32, 16)) / 4.) * 4; }

/* Bytes of a matrix of F16, or in groups of 64 along its rows; of a layer. */
static double matrix_bytes(int rows, int cols, bool packed) {
    return packed ? ceil(rows / 64.) * cols * group_bytes(64) : 2. * rows * cols;
}
static double layer_bytes(const Subject *m, bool packed) {
    return 4 * matrix_bytes(m->h1, m->h1, packed) + matrix_bytes(m->h2, m->h1, packed) +
           matrix_bytes(m->h1, m->h2, packed) + 2. * (9 * m->h1 + m->h2);
}
/* Of a token's k in one layer: heads in groups of 64 and what is left. */
static double row_bytes(const Subject *m, bool packed) {
    const int hd = m->h1 / m->nh;
    return packed ? m->nh * (hd / 64 * group_bytes(64) + (hd % 64 ? group_bytes(hd % 64) : 0)) : 2. * m->h1;
}

/* Where all weights, all of the cache and all activations are. */
typedef struct {
    Tier weights, cache, activations;
    bool delegated;
    int gbs, num_gpu_batches;
} Pure;

/* Adds bytes that go from a tier to the GPU, or down from there: from disk over both links. */
static void add_moved(double moved[LINKS], Tier tier, bool up, double bytes) {
    if (tier >= TIER_CPU) moved[up ? CTOG : GTOC] += bytes;
    if (tier == TIER_DISK) moved[up ? DTOC : CTOD] += bytes;
}

/* What a sequence of s tokens moves while n are generated, of which the last is not computed with: its k and v go down
 * once; each new token brings the past up, to the GPU or, delegated, no further than the CPU. Then its query and the
 * result, floats, cross ctog and gtoc instead. Of sparse attention K comes from disk whole, of V what is read. Hidden
 * states, floats, go down and up around each layer, unless a block is of one batch. */
static void add_sequence(double moved[LINKS], const Subject *m, Variant v, const Pure *p, int s, bool one_batch) {
    const double row = row_bytes(m, variant[v].cache), l = m->l, h1 = m->h1;
    add_moved(moved, p->cache, false, l * 2 * (s + m->n - 1) * row);
    for (int len = s; len < s + m->n - 1; len++) {
        const int read = variant[v].sparsity > 0 ? sparse_tokens(variant[v].sparsity, len + 1) - 1 : len;
        if (!p->delegated)
            add_moved(moved, p->cache, true, l * 2 * len * row);
        else if (p->cache != TIER_GPU) {
            moved[GTOC] += l * h1 * 4, moved[CTOG] += l * h1 * 4;
            if (p->cache == TIER_DISK) moved[DTOC] += l * (len + read) * row;
        }
    }
    for (int up = 0; up < 2 && !one_batch; up++) add_moved(moved, p->activations, up, l * (s + m->n - 1) * h1 * 4);
}

/* The formula: every sweep of a block streams the weights once, and adds what its sequences move. */
static void expected_bytes(double moved[LINKS], Subject *m, Variant v, const Pure *p) {
    const int bls = p->gbs * p->num_gpu_batches;
    memset(moved, 0, LINKS * sizeof *moved);
    for (int first = 0; first < PROMPTS; first += bls) {
        const int count = imin(bls, PROMPTS - first);
        add_moved(moved, p->weights, true, m->n * m->l * layer_bytes(m, variant[v].weight));
        for (int i = first; i < first + count; i++) {
            int32_t *ids;
            add_sequence(moved, m, v, p, encode(&ids, m, i), count <= p->gbs);
            free(ids);
        }
    }
}

static void try_bytes(Subject *m, Variant v, const Pure *p) {
    static const char *const share[] = {"100 0", "0 100", "0 0"};
    double expected[LINKS];
    Figures f;
    expected_bytes(expected, m, v, p);
    Result r = run(
        MINI, "%s --prompts %s --json --max-tokens %d %s %s --percent %s %s %s --gpu-batch-size %d --num-gpu-batches %d",
        dir_of(m), prompts_file(), m->n, variant[v].flags, p->delegated ? "--cpu-cache-compute" : "", share[p->weights],
        share[p->cache], share[p->activations], p->gbs, p->num_gpu_batches);
    CU_ASSERT_FATAL(succeeded(&r, "bytes") && read_figures(&f, r.err));
    for (int c = 0; c < LINKS; c++) {
        if (f.moved[c] != expected[c])
            fprintf(stderr, "\n    %s, %s, weights %s, cache %s, activations %s, %d x %d%s: %s %.0f bytes, expected %.0f",
                    m->name, variant[v].flags, share[p->weights], share[p->cache], share[p->activations], p->gbs,
                    p->num_gpu_batches, p->delegated ? ", delegated" : "", channel_name[c], f.moved[c], expected[c]);
        CU_ASSERT_EQUAL(f.moved[c], expected[c]);
    }
    result_free(&r);
}

/* Blocks of 6 and 6; of 10 and 2, which are one batch; of 4 batches; all in one. */
static void links_carry_the_bytes_of_a_formula(void) {
    static const int blocks[][2] = {{2, 3}, {5, 2}, {1, 4}, {12, 1}};
    for (int m = 1; m < SUBJECTS; m++)
        for (int c = m; c < 27 * 2 * VARIANTS; c += step(59)) {
            const Variant v = c % VARIANTS;
            const int at = c / VARIANTS, *block = blocks[(c + m) % 4];
            const Pure p = {(Tier)(at % 3),     (Tier)(at / 3 % 3),
                            (Tier)(at / 9 % 3), at / 27 || variant[v].sparsity > 0,
                            block[0],           block[1]};
            try_bytes(&subjects[m], v, &p);
        }
}

/* Whole tensors: the GPU and the CPU have their share of the weights but for one, which is streamed instead. */
static void shares_of_weights_are_streamed_to_within_a_tensor(void) {
    Subject *m = &subjects[0];
    uint64_t seed = 5;
    const double all = m->l * layer_bytes(m, false), largest = matrix_bytes(m->h2, m->h1, false) + 2 * m->h2;
    for (int i = 0; i < 20; i += step(7)) {
        const double wg = 100 * (test_random(&seed) + 1) / 2, wc = (100 - wg) * (test_random(&seed) + 1) / 2;
        Figures f;
        Result r = run(MINI, "%s Mum --max-tokens 3 --percent %.3f %.3f 100 0 100 0 --gpu-batch-size 1", dir_of(m), wg, wc);
        CU_ASSERT_FATAL(succeeded(&r, "shares") && read_figures(&f, r.err));
        const double off = f.moved[CTOG] / 3 - all * (100 - wg) / 100,
                     disk = f.moved[DTOC] / 3 - all * (100 - wg - wc) / 100;
        if (fabs(off) > largest || fabs(disk) > largest)
            fprintf(stderr, "\n    --percent %.3f %.3f: %.0f and %.0f bytes more than the share, a tensor has %.0f", wg, wc,
                    off, disk, largest);
        CU_ASSERT(fabs(off) <= largest && fabs(disk) <= largest);
        result_free(&r);
    }
}

/* In percents whose fractions are rounded in a float, too: what GPU and CPU have together leaves nothing for the disk. */
static void shares_of_100_percent_leave_the_disk_empty(void) {
    static const int gpu[] = {41, 70, 29, 57};
    for (size_t g = 0; g < sizeof gpu / sizeof *gpu; g++) {
        Figures f;
        char share[20];
        snprintf(share, sizeof share, "%d %d", gpu[g], 100 - gpu[g]);
        Result r = run(MINI, "%s Mum Dad boat --max-tokens 2 --percent %s %s %s --gpu-batch-size 1 --num-gpu-batches 3",
                       dir_of(&subjects[0]), share, share, share);
        CU_ASSERT_FATAL(succeeded(&r, share) && read_figures(&f, r.err));
        if (f.peak[TIER_DISK] + f.moved[DTOC] + f.moved[CTOD] > 0)
            fprintf(stderr, "\n    %s: %.0f bytes on disk, %.0f read", share, f.peak[TIER_DISK], f.moved[DTOC]);
        CU_ASSERT(f.peak[TIER_DISK] == 0 && f.moved[DTOC] == 0 && f.moved[CTOD] == 0);
        result_free(&r);
    }
}

/* Runs mini with these words and flags, and returns what it reports. */
static Figures figures_of(const char *words, const char *flags) {
    Figures f = {.seconds = 0};
    Result r = run(MINI, "%s %s %s", dir_of(&subjects[1]), words, flags);
    CU_ASSERT_FATAL(succeeded(&r, flags) && read_figures(&f, r.err));
    result_free(&r);
    return f;
}

/* The GPU sees such a cache in prefill only, so that its slots hold no more than the prompts. */
static void a_delegated_cache_needs_no_more_of_the_GPU_for_more_tokens(void) {
#define CACHE_BELOW "--percent 100 0 0 100 100 0 --max-tokens "
    const Figures few = figures_of("A", CACHE_BELOW "2 --cpu-cache-compute");
    const Figures many = figures_of("A", CACHE_BELOW "40 --cpu-cache-compute");
    CU_ASSERT(many.peak[TIER_GPU] == few.peak[TIER_GPU] && many.peak[TIER_CPU] > few.peak[TIER_CPU]);
    CU_ASSERT(figures_of("A", CACHE_BELOW "40").peak[TIER_GPU] > figures_of("A", CACHE_BELOW "2").peak[TIER_GPU]);
#undef CACHE_BELOW
}

/* A long prompt has more than half of all tokens and comes first, so that the CPU gets it. The three short prompts then fit
 * the GPU's half. So the links carry the bytes of the long prompt alone: those of all four less those of three short ones.
 */
static void a_share_of_sequences_is_one_of_their_tokens(void) {
#define FOUR_BATCHES "--max-tokens 2 --gpu-batch-size 1 --num-gpu-batches 4 --percent 100 0 "
    static const char *const half[] = {FOUR_BATCHES "50 50 100 0", FOUR_BATCHES "100 0 50 50"};
    static const char *const none[] = {FOUR_BATCHES "0 100 100 0", FOUR_BATCHES "100 0 0 100"};
    for (int kind = 0; kind < 2; kind++) {
        const Figures shared = figures_of("zzzzzzzzzzzzzzzzzzzz A A A", half[kind]);
        const Figures all = figures_of("zzzzzzzzzzzzzzzzzzzz A A A", none[kind]);
        const Figures four_short = figures_of("A A A A", none[kind]);
        for (int c = CTOG; c <= GTOC; c++)
            CU_ASSERT(shared.moved[c] > 0 && shared.moved[c] == all.moved[c] - four_short.moved[c] * 3 / 4);
    }
#undef FOUR_BATCHES
}

/* A block begins where the one before it began. */
static void many_blocks_need_the_memory_of_one(void) {
#define SIX "--max-tokens 3 --percent 30 30 30 30 30 30 --gpu-batch-size 2 --num-gpu-batches 3"
    const Figures one = figures_of("A A A A A A", SIX), three = figures_of("A A A A A A A A A A A A A A A", SIX);
    CU_ASSERT(three.moved[CTOG] > 2 * one.moved[CTOG]);
    CU_ASSERT(!memcmp(one.peak, three.peak, sizeof one.peak));
#undef SIX
}

/* Blocks share one place, so that a search for ten blocks finds what it finds for one. */
static void a_search_takes_off_the_memory_of_one_block(void) {
#define SEARCH "--max-tokens 3 --gpu-batch-size 2 --num-gpu-batches 1 --threads 1 --cpu-mem 1e9 --gpu-mem 7e5"
    const Figures one = figures_of("A A", SEARCH), ten = figures_of("A A A A A A A A A A A A A A A A A A A A", SEARCH);
    CU_ASSERT(!memcmp(one.peak, ten.peak, sizeof one.peak));
#undef SEARCH
}

/* How often a run of 44 prompts of 370 tokens waited. Each helper waits once for each product that
 * it computes a part of; the main thread makes all moves. */
static long waits_of(const char *model, const char *file, int tokens) {
    struct rusage before, after;
    getrusage(RUSAGE_CHILDREN, &before);
    Result r = run(
        MINI, "%s --prompts %s --max-tokens %d --threads 2 --no-overlap --percent 100 0 100 0 100 0 --gpu-batch-size 44",
        model, file, tokens);
    getrusage(RUSAGE_CHILDREN, &after);
    CU_ASSERT(succeeded(&r, "44 long prompts"));
    result_free(&r);
    return after.ru_nvcsw - before.ru_nvcsw;
}

/* In decoding a layer of this model has fewer than 10^6 multiplications in each product, and more in attention, 44 x 64 for
 * each of the 370 tokens. So threads share the head and the attention of three layers, four times for each token. */
static void threads_share_the_attention_to_a_long_context(void) {
    char file[700], line[400];
    snprintf(file, sizeof file, "%s", in_dir(temp_dir(), "long.txt"));
    FILE *f = fopen(file, "w");
    CHECK(f);
    memset(line, '\'', sizeof line); /* a word, a piece, a token each */
    for (int i = 0; i < 44; i++) fprintf(f, "%.370s\n", line);
    CHECK(fclose(f) == 0);
    const char *model = dir_of(&subjects[1]);
    const long waits = waits_of(model, file, 11) - waits_of(model, file, 1);
    printf("%ld waits for 10 tokens, ", waits);
    CU_ASSERT(waits >= 25);
}

/* In doubles .28 x 25 is above 7. Yet 7 of 25 past tokens are read, as with a share that is a little smaller. Of a share
 * near 1 all are read. */
static void rounding_adds_no_token_to_a_sparse_share(void) {
#define CACHE_ON_DISK "--max-tokens 30 --percent 100 0 0 0 100 0 "
    const Figures exact = figures_of("A", CACHE_ON_DISK "--attn-sparsity 0.28");
    const Figures less = figures_of("A", CACHE_ON_DISK "--attn-sparsity 0.2799999");
    const Figures almost_all = figures_of("A", CACHE_ON_DISK "--attn-sparsity 0.9999");
    const Figures all = figures_of("A", CACHE_ON_DISK "--cpu-cache-compute");
    CU_ASSERT(exact.moved[DTOC] > 0 && exact.moved[DTOC] == less.moved[DTOC]);
    CU_ASSERT_EQUAL(almost_all.moved[DTOC], all.moved[DTOC]);
#undef CACHE_ON_DISK
}

/* A directory like the victim's but that the token `eos` ends a text. */
static const char *ended_by(int eos);

/* Reads the tokens that mini printed for prompt `id`, nine at most. */
static int tokens_of(int to[9], const char *out, int id) {
    const char *at = out;
    int n = 0;
    for (int line = 0; line < id && at; line++) at = strchr(at, '\n') + 1;
    CU_ASSERT_PTR_NOT_NULL_FATAL(at = strstr(at, "\"tokens\": ["));
    for (at = strchr(at, '['); *at != ']' && n < 9; n++) to[n] = (int)strtol(at + 1, (char **)&at, 10);
    return n;
}

/* Finds two words of which the second is never followed by the second token of the first, and returns that token. */
static int choose_ending(const char *word[2]) {
    static const char *const words[] = {"Mum", "A", "c", "Dad", "boat", "cat", "zz", "Ben"};
    enum { WORDS = sizeof words / sizeof *words };
    int token[WORDS][9];
    Result r =
        run(MINI, "%s Mum A c Dad boat cat zz Ben --json --max-tokens 9 --percent 100 0 100 0 100 0", dir_of(&subjects[1]));
    CU_ASSERT_FATAL(succeeded(&r, "words"));
    for (int w = 0; w < WORDS; w++) CU_ASSERT_FATAL(tokens_of(token[w], r.out, w) == 9);
    result_free(&r);
    for (int a = 0; a < WORDS; a++)
        for (int b = 0; b < WORDS; b++) {
            const int eos = token[a][1];
            bool met = token[a][0] == eos;
            for (int n = 0; n < 9; n++) met |= token[b][n] == eos;
            word[0] = words[a], word[1] = words[b];
            if (!met) return eos;
        }
    CU_FAIL_FATAL("every word ends");
    return 0;
}

/* With the weights on the GPU, two prompts in one batch move what they move alone, though one of them ends after its
 * second token and the other goes on: its cache, its queries and the results rest from then on. */
static void a_sequence_that_has_ended_moves_nothing(void) {
    static const char *const places[] = {"0 100", "0 0", "0 100 --cpu-cache-compute", "0 0 --cpu-cache-compute"};
    const char *word[2], *dir = ended_by(choose_ending(word));
    char both[40];
    snprintf(both, sizeof both, "%s %s", word[0], word[1]);
    for (size_t p = 0; p < sizeof places / sizeof *places; p++) {
        const char *const words[] = {word[0], word[1], both};
        Figures f[3];
        char shares[60], share[30], *flag;
        snprintf(share, sizeof share, "%s", places[p]);
        if ((flag = strstr(share, " --"))) *flag++ = 0;
        snprintf(shares, sizeof shares, "--percent 100 0 %s 100 0 %s", share, flag ? flag : "");
        for (int w = 0; w < 3; w++) {
            Result r = run(MINI, "%s %s --json --max-tokens 9 --gpu-batch-size 2 %s", dir, words[w], shares);
            CU_ASSERT_FATAL(succeeded(&r, shares) && read_figures(&f[w], r.err));
            /* </s> is not printed */
            int token[9];
            if (w == 0) CU_ASSERT(tokens_of(token, r.out, 0) == 1);
            if (w == 1) CU_ASSERT_PTR_NOT_NULL(strstr(r.err, ", tokens 9, "));
            result_free(&r);
        }
        for (int c = 0; c < LINKS; c++) {
            if (f[2].moved[c] != f[0].moved[c] + f[1].moved[c])
                fprintf(stderr, "\n    %s: %s %.0f bytes, alone %.0f and %.0f", shares, channel_name[c], f[2].moved[c],
                        f[0].moved[c], f[1].moved[c]);
            CU_ASSERT_EQUAL(f[2].moved[c], f[0].moved[c] + f[1].moved[c]);
        }
    }
}

/* So many bytes at such a rate take so long at least, for the link and for the run. */
static void a_slowed_link_takes_the_time_of_its_bytes(void) {
    for (int overlap = 0; overlap < 2; overlap++) {
        Figures f;
        Result r = run(MINI, "%s --prompts %s --max-tokens 4 --percent 0 0 100 0 100 0 --gpu-batch-size 12 --dtoc 5e6 %s",
                       dir_of(&subjects[1]), prompts_file(), overlap ? "" : "--no-overlap");
        CU_ASSERT_FATAL(succeeded(&r, "a slow link") && read_figures(&f, r.err));
        CU_ASSERT(f.moved[DTOC] > 1e6 && f.busy[DTOC] >= f.moved[DTOC] / 5e6 - .001);
        CU_ASSERT(f.seconds >=
                  (f.moved[DTOC] - layer_bytes(&subjects[1], false)) / 5e6 - .01); /* the first is not timed with it */
        result_free(&r);
    }
}

/* The last digit of a time is a millisecond, that of a share and of tokens a second a tenth; so each may be half of one
 * off. */
static void the_figures_that_are_reported_agree_with_each_other(void) {
    Figures f;
    double tokens, rate, share;
    Result r =
        run(MINI, "%s A Mum --max-tokens 4 --percent 0 0 100 0 100 0 --gpu-batch-size 1 --dtoc 3e6", dir_of(&subjects[1]));
    CU_ASSERT_FATAL(succeeded(&r, "figures") && read_figures(&f, r.err));
    const char *last = strstr(r.err, "mini: prompts 2, blocks of 1 x 1, "), *link = strstr(r.err, "mini: dtoc: ");
    CU_ASSERT_FATAL(last &&
                    sscanf(last, "mini: prompts 2, blocks of 1 x 1, tokens %lf, %*f s, %lf tokens/s", &tokens, &rate) == 2);
    CU_ASSERT_FATAL(link && sscanf(link, "mini: dtoc: %*f bytes, %*f s, %lf%% of the time", &share) == 1);
    CU_ASSERT(tokens == 8 && f.seconds > .1);
    CU_ASSERT(fabs(rate - tokens / f.seconds) <= .05 + tokens / f.seconds * .0005 / (f.seconds - .0005));
    CU_ASSERT(fabs(share - 100 * f.busy[DTOC] / f.seconds) <=
              .05 + 100 * .0005 * (1 + f.busy[DTOC] / f.seconds) / (f.seconds - .0005));
    result_free(&r);
}

/* A slice of a trace: a row (scripts/plot_trace.py), and where the call that it shows belongs. */
typedef struct {
    double begin, end, bytes;
    int row, i, j, k;
    const char *name;
} Shown;

static double number_in(const cJSON *object, const char *key) {
    const cJSON *it = cJSON_GetObjectItemCaseSensitive(object, key);
    CU_ASSERT_FATAL(cJSON_IsNumber(it));
    return it->valuedouble;
}

static int slices_of(Shown *slice, int most, const cJSON *trace) {
    const cJSON *event;
    int n = 0;
    cJSON_ArrayForEach(event, cJSON_GetObjectItem(trace, "traceEvents")) {
        if (strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(event, "ph")), "X")) continue;
        const cJSON *args = cJSON_GetObjectItem(event, "args");
        const double ns = rint(number_in(event, "ts") * 1e3);
        CU_ASSERT_FATAL(n < most);
        slice[n++] = (Shown){ns,
                             ns + rint(number_in(event, "dur") * 1e3),
                             number_in(args, "bytes"),
                             (int)number_in(event, "tid"),
                             (int)number_in(args, "i"),
                             (int)number_in(args, "j"),
                             (int)number_in(args, "k"),
                             cJSON_GetStringValue(cJSON_GetObjectItem(event, "name"))};
    }
    return n;
}

static int in_order(const void *a, const void *b) {
    const Shown *x = a, *y = b;
    return x->row != y->row ? x->row - y->row : (x->begin > y->begin) - (x->begin < y->begin);
}

/* Returns the nanoseconds in which a mover was busy beside `compute`. */
static double overlap(const Shown *slice, int n) {
    double both = 0;
    for (const Shown *s = slice; s < slice + n; s++)
        for (const Shown *c = slice; c < slice + n && s->row < 3; c++)
            if (c->row == 3) both += fmax(0, fmin(s->end, c->end) - fmax(s->begin, c->begin));
    return both;
}

/* Rows 0 to 2 are the threads that move, 3 computes, 4 to 7 are the links. Slices of a row do not overlap; the links' have
 * the bytes that are reported; each square is computed once; and moves are beside computing, but with --no-overlap are not.
 */
static void a_trace_shows_what_each_thread_and_link_did(void) {
    enum { SLICES = 20000, SQUARES = 4 * 4 * 2 }; /* 3 layers and the head, 4 tokens, 2 batches */
    static Shown slice[SLICES];
    for (int no_overlap = 0; no_overlap < 2; no_overlap++) {
        char command[900], *path = xstrdup(in_dir(temp_dir(), "trace.json"));
        double bytes[LINKS] = {0};
        size_t len;
        int squares = 0;
        Figures f;
        Error err;
        Result r = run(MINI,
                       "%s A Mum c d --max-tokens 4 --percent 0 50 0 50 0 100 --gpu-batch-size 2 --num-gpu-batches 2 "
                       "--ctog 1e8 --dtoc 5e7 --trace %s %s",
                       dir_of(&subjects[1]), path, no_overlap ? "--no-overlap" : "");
        CU_ASSERT_FATAL(succeeded(&r, "a trace") && read_figures(&f, r.err));
        char *text = contents(path, &len);
        cJSON *trace = json_parse(text, len, &err);
        if (!trace) fprintf(stderr, "\n    %s\n", err.text);
        CU_ASSERT_PTR_NOT_NULL_FATAL(trace);
        const int n = slices_of(slice, SLICES, trace);
        qsort(slice, n, sizeof *slice, in_order);
        for (int e = 0; e < n; e++) {
            const Shown *s = &slice[e];
            CU_ASSERT(s->begin >= 0 && s->end >= s->begin && s->row >= 0 && s->row < 4 + LINKS);
            CU_ASSERT(!e || s->row != s[-1].row || s->begin >= s[-1].end);
            if (s->row >= 4) bytes[s->row - 4] += s->bytes;
            squares += s->row == 3 && !strcmp(s->name, "compute");
            if (s->row == 0) CU_ASSERT_STRING_EQUAL(s->name, "load_weight");
            CU_ASSERT(s->i >= 0 && s->i < 4 && s->j >= 0 && s->j <= 3 && s->k >= 0 && s->k < 2);
        }
        for (int c = 0; c < LINKS; c++) CU_ASSERT_EQUAL(bytes[c], f.moved[c]);
        CU_ASSERT_EQUAL(squares, SQUARES);
        if (no_overlap) CU_ASSERT_EQUAL(overlap(slice, n), 0);
        if (!no_overlap) CU_ASSERT(overlap(slice, n) > 0);
        const char *const drawing[] = {"--lanes", "--squares"};
        for (int d = 0; d < 2; d++) {
            snprintf(command, sizeof command, "python3 -B scripts/plot_trace.py %s %s %s.svg", drawing[d], path, path);
            CU_ASSERT_EQUAL(system(command), 0);
        }
        cJSON_Delete(trace);
        free(text), free(path);
        result_free(&r);
    }
}

/* Where only percentages are given, a batch has 32 sequences, and a block one batch. */
static void a_batch_has_32_sequences_unless_it_is_said(void) {
    char words[33 * 2 + 1] = "";
    for (int i = 0; i < 33; i++) strcat(words, " A");
    Result r = run(MINI, "%s %s --max-tokens 1 --percent 100 0 100 0 100 0", dir_of(&subjects[1]), words);
    CU_ASSERT(succeeded(&r, "33 prompts") && strstr(r.err, "mini: prompts 33, blocks of 32 x 1, tokens 33, "));
    result_free(&r);
}

/* The CPU chooses the tokens, and it attends: sparse attention is delegated with --cpu-cache-compute and without. */
static void sparse_attention_is_delegated_without_a_flag_too(void) {
    for (int disk = 0; disk < 2; disk++) {
        Result r[2];
        Figures f[2];
        for (int flag = 0; flag < 2; flag++) {
            r[flag] = run(MINI, "%s A Mum --max-tokens 6 --attn-sparsity 0.3 --percent 100 0 0 %d 100 0 %s",
                          dir_of(&subjects[1]), disk ? 0 : 100, flag ? "--cpu-cache-compute" : "");
            CU_ASSERT_FATAL(succeeded(&r[flag], "sparse") && read_figures(&f[flag], r[flag].err));
        }
        CU_ASSERT_STRING_EQUAL(r[0].out, r[1].out);
        CU_ASSERT(!memcmp(f[0].moved, f[1].moved, sizeof f[0].moved) && !memcmp(f[0].peak, f[1].peak, sizeof f[0].peak));
        result_free(&r[0]), result_free(&r[1]);
    }
}

/* A policy runs in the memory that it reports, is refused in a byte less, and takes no more of this machine than that. */
static void a_policy_runs_in_its_memory_and_not_in_less(void) {
    static const char *const tier[] = {"gpu", "cpu"};
    for (int i = 0; i < PLACEMENTS; i += step(13)) {
        const int m = i % SUBJECTS;
        const Variant v = i / SUBJECTS % VARIANTS;
        char base[1000], flags[500];
        Figures f, again;
        snprintf(flags, sizeof flags, "%s", random_policy(m, i, v));
        snprintf(base, sizeof base, "%s --prompts %s --json --max-tokens %d %s %s", dir_of(&subjects[m]), prompts_file(),
                 subjects[m].n, variant[v].flags, flags);
        Result r = run(MINI, "%s --gpu-mem 1e9 --cpu-mem 1e9", base);
        CU_ASSERT_FATAL(succeeded(&r, base) && read_figures(&f, r.err));
        if (has(ASAN)) /* else mini itself may be with a sanitizer: the tiers, the mapped files, 8 MB for all else */
            CU_ASSERT(r.resident <= f.peak[0] + f.peak[1] + f.peak[2] + (m ? 2e6 : 12e6) + 8e6);
        result_free(&r);
        r = run(MINI, "%s --gpu-mem %.0f --cpu-mem %.0f", base, f.peak[TIER_GPU], fmax(f.peak[TIER_CPU], 1));
        CU_ASSERT(succeeded(&r, base) && read_figures(&again, r.err) && !memcmp(f.peak, again.peak, sizeof f.peak));
        result_free(&r);
        for (int t = TIER_GPU; t <= TIER_CPU; t++)
            if (f.peak[t] > 1) assert_refused(run(MINI, "%s --%s-mem %.0f", base, tier[t], f.peak[t] - 1), 2, base);
    }
}

/* Without --percent: what is found runs within the memory that there is, and gives the same tokens; or nothing is found. */
static void what_is_searched_for_keeps_to_the_memory(void) {
    uint64_t seed = 3;
    int found = 0;
    for (int i = 0; i < 40; i += step(5)) {
        const int m = i % SUBJECTS;
        const double gpu = test_spread(&seed, m ? 1e5 : 2e6, 2e7), cpu = test_spread(&seed, 1e5, 2e7);
        Figures f;
        Answers a;
        Result r = run(MINI, "%s --prompts %s --json --max-tokens %d --gpu-mem %.0f --cpu-mem %.0f --threads 1 %s",
                       dir_of(&subjects[m]), prompts_file(), subjects[m].n, gpu, cpu, i % 3 ? "" : "--gpu-batch-size 3");
        if (r.status) {
            assert_refused(r, 2, "a search");
            continue;
        }
        CU_ASSERT_FATAL(read_figures(&f, r.err) && read_answers(&a, r.out, false));
        CU_ASSERT(f.peak[TIER_GPU] <= gpu && f.peak[TIER_CPU] <= cpu);
        compare(m, PLAIN, &a, "searched"), answers_free(&a), found++;
        result_free(&r);
    }
    CU_ASSERT(found > 0);
    at_most_one_of_fifty_differs();
}

// ---------------------------------------------------------------------------------------------------------------
// A.3
// ---------------------------------------------------------------------------------------------------------------

/* A question to both: a machine, a model of the paper, lengths, a block. */
typedef struct {
    Hardware hardware;
    OptConfig config;
    Block block;
} Question;

static Question random_question(uint64_t *seed) {
    static const char *const names[] = {"opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    Question q = {
        .block = {between(seed, 16, 1500), between(seed, 2, 200), 4 * between(seed, 1, 24), between(seed, 1, 12)}};
    Hardware *h = &q.hardware;
    snprintf(h->name, sizeof h->name, "a random machine");
    h->gmem = test_spread(seed, 4e9, 1e11), h->cmem = test_spread(seed, 2e10, 6e11),
    h->nmem = test_spread(seed, 3e11, 8e12);
    double *const rates[] = {h->ctog_bdw, h->gtoc_bdw, h->dtoc_bdw, h->ctod_bdw, h->mm_flops, h->bmm_flops, h->cpu_flops};
    static const double low[] = {4e9, 4e9, 3e8, 3e8, 5e12, 1e11, 1e10};
    for (int r = 0; r < 7; r++)
        for (int prefill = 0; prefill < 2; prefill++) rates[r][prefill] = test_spread(seed, low[r], 16 * low[r]);
    CHECK(opt_config_by_name(&q.config, names[test_below(seed, 8)]) == 0);
    return q;
}

/* mini prints "wg 0.5", a line each. */
static double printed(const char *text, const char *name) {
    const size_t len = strlen(name);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (!strncmp(line, name, len) && line[len] == ' ') return strtod(line + len, NULL);
    return NAN;
}

/* The least and the largest value of a fraction among all placements that are as good as the best: its row is added. */
static void range_of(double range[2], Lp *lp, int fraction) {
    double c[LP_MAX_VARS];
    memcpy(c, lp->c, sizeof c);
    for (int most = 0; most < 2; most++) {
        LpAnswer answer;
        memset(lp->c, 0, sizeof lp->c);
        lp->c[fraction] = most ? -1 : 1;
        lp_solve(&answer, lp);
        range[most] = answer.verdict == LP_OPTIMAL ? answer.x[fraction] : NAN;
    }
    memcpy(lp->c, c, sizeof c);
}

/* Returns by how much x has more on slower tiers than the rows ask for: the CPU is one step from the GPU, the disk two. */
static double needless_steps(Lp *lp, const double *x) {
    LpAnswer answer;
    double steps = 0;
    memset(lp->c, 0, sizeof lp->c);
    for (int f = 0; f < NFRACTIONS; f++) lp->c[f] = f % NTIERS;
    lp_solve(&answer, lp);
    for (int f = 0; f < NFRACTIONS; f++) steps += lp->c[f] * (x[f] - answer.x[f]);
    return answer.verdict == LP_OPTIMAL ? steps : NAN;
}

/* mini's placement satisfies the engine's rows; where the best is the only one, fractions are the same, and where it is
 * not, no other placement has less on slower tiers. */
static int compare_fractions(const Question *q, const char *out, double T) {
    Lp lp;
    double x[NVARS];
    int unique = 0;
    paper_lp(&lp, &q->hardware, &q->config, &q->block);
    for (int f = 0; f < NFRACTIONS; f++) x[f] = printed(out, fraction_name[f]);
    x[T_PRE] = printed(out, "T_pre"), x[T_GEN] = printed(out, "T_gen");
    for (int i = 0; i < lp.m; i++) {
        double size = fabs(lp.row[i].b);
        for (int v = 0; v < NVARS; v++) size = fmax(size, fabs(lp.row[i].a[v] * x[v]));
        CU_ASSERT(fabs(fmin(0, -lp_excess(&lp.row[i], x, NVARS))) <= 1e-8 * size);
    }
    const double best = T / q->block.gbs / q->block.num_gpu_batches;
    LpRow *row = lp_row(&lp, "as good as the best", false, best * (1 + 1e-9));
    memcpy(row->a, lp.c, sizeof row->a);
    for (int f = 0; f < NFRACTIONS; f++) {
        double range[2];
        range_of(range, &lp, f);
        if (!(range[1] - range[0] < 1e-5)) continue;
        if (!(fabs(x[f] - range[0]) < 1e-4))
            fprintf(stderr, "\n    %s, %s is %g, mini's %g", q->config.name, fraction_name[f], range[0], x[f]);
        CU_ASSERT(fabs(x[f] - range[0]) < 1e-4);
        unique++;
    }
    CU_ASSERT(fabs(needless_steps(&lp, x)) < 1e-4);
    return unique;
}

/* A directory with the config.json of a model of the paper, which is all that a search reads of it. */
static const char *paper_model(const char *name) {
    static char dir[300];
    OptConfig c;
    CHECK(opt_config_by_name(&c, name) == 0);
    snprintf(dir, sizeof dir, "%s", temp_dir());
    FILE *f = fopen(in_dir(dir, "config.json"), "w");
    CHECK(f);
    fprintf(f,
            "{\"model_type\": \"opt\", \"num_hidden_layers\": %d, \"hidden_size\": %d, \"ffn_dim\": %d, "
            "\"num_attention_heads\": %d, \"vocab_size\": %d, \"max_position_embeddings\": %d, "
            "\"activation_function\": \"relu\", \"do_layer_norm_before\": true, \"eos_token_id\": 2, "
            "\"word_embed_proj_dim\": %d}",
            c.l, c.h1, c.h2, c.nh, c.vocab, c.max_pos, c.h1);
    CHECK(fclose(f) == 0);
    return dir;
}

static int try_question(const Question *q, bool *fits) {
    const char *path = in_dir(temp_dir(), "hardware.json");
    char question[900];
    int unique = 0;
    Error err;
    FILE *f = fopen(path, "w");
    CHECK(f);
    hardware_write(&q->hardware, NULL, f);
    CHECK(fclose(f) == 0);
    snprintf(question, sizeof question, "--hardware %s --gpu-batch-size %d --num-gpu-batches %d", path, q->block.gbs,
             q->block.num_gpu_batches);
    Result a = run(ENGINE, "policy --model %s --cost-model paper --prompt-len %d --gen-len %d --json - %s", q->config.name,
                   q->block.s, q->block.n, question);
    Result b =
        run(MINI, "%s --policy %d --max-tokens %d %s", paper_model(q->config.name), q->block.s, q->block.n, question);
    *fits = a.status == 0;
    if (a.status != b.status)
        fprintf(stderr, "\n    %s %s: engine %d, mini %d: %s", q->config.name, question, a.status, b.status, b.err);
    CU_ASSERT(a.status == b.status && (!b.status || was_refused(&b, 2)));
    if (!a.status && !b.status) {
        cJSON *json = json_parse(a.out, strlen(a.out), &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(json);
        const double T = json_get(json, "T")->valuedouble, ours = printed(b.out, "T");
        if (!(fabs(ours - T) <= 1e-6 * T))
            fprintf(stderr, "\n    %s %s: T is %.9g, mini's %.9g", q->config.name, question, T, ours);
        CU_ASSERT(fabs(ours - T) <= 1e-6 * T);
        unique = compare_fractions(q, b.out, T);
        cJSON_Delete(json);
    }
    result_free(&a), result_free(&b);
    return unique;
}

/* A hundred machines on which some placement fits. */
static void the_papers_cost_model_is_the_engines(void) {
    uint64_t seed = 11;
    int fit = 0, unique = 0, asked = 0;
    for (; fit < 100; asked++) {
        const Question q = random_question(&seed);
        bool fits;
        unique += try_question(&q, &fits);
        fit += fits;
    }
    printf("%d machines, %d fit, %d of %d fractions are the only ones ", asked, fit, unique, 9 * fit);
    CU_ASSERT(unique > fit && fit < asked);
}

/* Without a given block the one of most tokens a second is taken: no other is better. */
static void the_search_finds_no_worse_block_than_those_tried_by_hand(void) {
    static const int blocks[][2] = {{4, 1}, {8, 3}, {16, 5}, {32, 8}, {48, 3}, {64, 6}, {24, 12}, {12, 20}};
    const char *dir = paper_model("opt-30b");
    Result r = run(MINI, "%s --policy 512 --hardware hardware/t4.json --max-tokens 32", dir);
    CU_ASSERT_FATAL(succeeded(&r, "a search"));
    const double best = printed(r.out, "throughput");
    const double bls = printed(r.out, "gbs") * printed(r.out, "num_gpu_batches");
    CU_ASSERT(fabs(best - bls * 32 / printed(r.out, "T")) <= 1e-9 * best); /* all tokens that the block generates */
    result_free(&r);
    for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++) {
        r = run(MINI,
                "%s --policy 512 --hardware hardware/t4.json --max-tokens 32 --gpu-batch-size %d --num-gpu-batches %d", dir,
                blocks[b][0], blocks[b][1]);
        CU_ASSERT(r.status == 2 || printed(r.out, "throughput") <= best * (1 + 1e-9));
        result_free(&r);
    }
    CU_ASSERT(best > 0);
}

/* A flag says a link's rate in both stages: the answer is that for a machine whose file says so. */
static void a_link_of_the_command_line_is_one_of_the_file(void) {
    static const char *const links[] = {"ctog", "gtoc", "dtoc", "ctod"};
    const char *dir = paper_model("opt-30b");
    for (int c = 0; c < LINKS; c++) {
        char *text = contents("hardware/t4.json", NULL), key[30], file[700];
        snprintf(key, sizeof key, "\"%s_bdw\": ", links[c]);
        char *at = strstr(text, key);
        CU_ASSERT_PTR_NOT_NULL_FATAL(at);
        char *end = strchr(at, ',');
        memset(at + strlen(key), ' ', (size_t)(end - at) - strlen(key));
        memcpy(end - 3, "1e7", 3);
        snprintf(file, sizeof file, "%s", in_dir(temp_dir(), "link.json"));
        FILE *out = fopen(file, "w");
        CHECK(out && fputs(text, out) >= 0 && fclose(out) == 0);
        Result a = run(MINI, "%s --policy 512 --max-tokens 32 --hardware hardware/t4.json --%s 1e7", dir, links[c]);
        Result b = run(MINI, "%s --policy 512 --max-tokens 32 --hardware %s", dir, file);
        CU_ASSERT(succeeded(&a, links[c]) && succeeded(&b, links[c]));
        CU_ASSERT_STRING_EQUAL(a.out, b.out);
        result_free(&a), result_free(&b), free(text);
    }
}

/* Blocks are tried that have more places than there are prompts, as long as each batch has one: seven prompts may go into
 * 2 x 4 at once, and not only into 1 x 7. But a place without a prompt makes no tokens, so that 1 x 7 is better where both
 * fit. One batch alone may be larger than the prompts, too. */
static void a_block_may_have_more_places_than_there_are_prompts(void) {
    static const char *const flags[] = {"--gpu-mem 8e6 --cpu-mem 4e6", "--gpu-mem 6291456 --cpu-mem 1e9",
                                        "--gpu-mem 8388608 --cpu-mem 1e9 --num-gpu-batches 1"},
                             *const block[] = {"blocks of 2 x 4, ", "blocks of 1 x 7, ", "blocks of 8 x 1, "};
    for (int c = 0; c < 3; c++) {
        Result r = run(MINI, TINY " Mum Mum Mum Mum Mum Mum Mum --max-tokens 2 --threads 1 --hardware hardware/t4.json %s",
                       flags[c]);
        CU_ASSERT_FATAL(succeeded(&r, "seven prompts"));
        if (!strstr(r.err, block[c])) fprintf(stderr, "\n    not %s: %s", block[c], r.err);
        CU_ASSERT_PTR_NOT_NULL(strstr(r.err, block[c]));
        result_free(&r);
    }
}

/* When a tier lacks room, the next linear program has less of it. The room that another tier has left does not count: here
 * the GPU lacks room, and the shares that are found still satisfy A.3's row of the CPU, with all of its memory: l layers'
 * share of the weights, and one layer of those on disk (cpu_peak^g). */
static void a_search_gives_no_tier_more_than_it_has(void) {
    Result r = run(MINI, TINY " Mum Mum Mum Mum Mum Mum Mum --max-tokens 2 --threads 1 --gpu-mem 7e6 --cpu-mem 3e6");
    const char *cpu = strstr(r.err, "mini: CPU: "), *disk = strstr(r.err, "mini: disk: ");
    const double weight = 8. * 256 * 256 + 4. * 256 * 1024;
    double wc, wd;
    CU_ASSERT_FATAL(succeeded(&r, "7 MB") && cpu && disk);
    CU_ASSERT_FATAL(sscanf(cpu, "mini: CPU: %*f bytes, %lf of weights", &wc) == 1);
    CU_ASSERT_FATAL(sscanf(disk, "mini: disk: %*f bytes, %lf of weights", &wd) == 1);
    CU_ASSERT(wd > .1 && wc * 6 * weight + wd * weight <= 3e6);
    result_free(&r);
    /* the first program is solved again without the bytes that A.3 does not count: here nothing else is found */
    r = run(MINI, TINY " Mum Mum Mum --max-tokens 4 --threads 1 --hardware hardware/t4.json --gpu-mem 6e6 --cpu-mem 3e6");
    CU_ASSERT(succeeded(&r, "6 MB"));
    result_free(&r);
}

// ---------------------------------------------------------------------------------------------------------------
// Wrong use, spoilt files, no room
// ---------------------------------------------------------------------------------------------------------------

/* The model that is spoilt, and a question to it. */
static Subject *victim(void) { return &subjects[1]; }
#define PERCENT "--percent 20 30 20 30 20 30 --gpu-batch-size 2 --num-gpu-batches 2 --threads 2"

static void wrong_use_is_refused_in_one_line(void) {
    static const char *const cases[] = {"--max-tokens 0",
                                        "--max-tokens x",
                                        "--max-tokens",
                                        "--max-tokens 2.5",
                                        "--max-tokens 99999999999",
                                        "--max-tokens 400",
                                        "--percent 101 0 0 0 0 0",
                                        "--percent 60 50 0 0 0 0",
                                        "--percent nan 0 0 0 0 0",
                                        "--percent -1 0 0 0 0 0",
                                        "--percent 1 2 3",
                                        "--percent 0 0 0 0 0 5x",
                                        "--gpu-batch-size 0",
                                        "--gpu-batch-size 1e99",
                                        "--num-gpu-batches 0",
                                        "--attn-sparsity 0",
                                        "--attn-sparsity 1.5",
                                        "--attn-sparsity nan",
                                        "--gpu-mem 0",
                                        "--gpu-mem x",
                                        "--gpu-mem 1G",
                                        "--gpu-mem -5",
                                        "--cpu-mem nan",
                                        "--cpu-mem",
                                        "--ctog",
                                        "--ctox 1e9",
                                        "--ctog 0",
                                        "--ctog nan",
                                        "--ctog 1e9;",
                                        "--dtoc =",
                                        "--policy 0",
                                        "--json another",
                                        "--trace nowhere/at/all",
                                        "--threads 0",
                                        "--threads 100000",
                                        "--wrong",
                                        "--prompts none.txt",
                                        "--prompts models",
                                        "--hardware none.json",
                                        "--hardware models/prompts.txt",
                                        "--gpu-mem 1e3",
                                        "--percent 0 0 0 0 0 0 --gpu-mem 1e3",
                                        "--percent 0 100 0 100 0 100 --cpu-mem 1e3"};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int program = MINI; program <= ASAN && has(program); program++)
            assert_refused(run(program, "%s Mum %s", dir_of(victim()), cases[c]),
                           strstr(cases[c], ".txt") || strstr(cases[c], "models") || strstr(cases[c], "nowhere") ? 0 : 2,
                           cases[c]);
    assert_refused(run(MINI, " "), 2, "nothing");
    assert_refused(run(MINI, "%s", dir_of(victim())), 2, "no prompt");
    assert_refused(run(MINI, "nowhere Mum"), 0, "no model");
    assert_refused(run(MINI, "nowhere --policy 512"), 0, "no model to search for");
    assert_refused(run(MINI, "%s --policy 512 --gpu-mem 1e6", paper_model("opt-30b")), 2, "an impossible machine");
    assert_refused(run(MINI, "%s --prompts /dev/null", dir_of(victim())), 0, "no prompts");
    assert_refused(run(MINI, "%s Mum " PERCENT " --offload-dir nowhere", dir_of(victim())), 0, "no offload directory");
    Result help = run(MINI, "--help");
    CU_ASSERT(help.status == 0 && !*help.err && strstr(help.out, "--num-gpu-batches") &&
              strstr(help.out, "--attn-sparsity"));
    result_free(&help);
}

#define ALL_ON_GPU "--percent 100 0 100 0 100 0"
#define WHOLE_GPU ALL_ON_GPU " --max-tokens 1"

/* Lines may end in CR LF; empty ones are no prompts. */
static void a_line_is_a_prompt(void) {
    char *dir = xstrdup(temp_dir());
    write_text(dir, "prompts.txt", "a b\r\n\r\n\nc");
    Result r = run(MINI, "%s --prompts %s/prompts.txt " WHOLE_GPU, dir_of(victim()), dir);
    CU_ASSERT(r.status == 0 && !strncmp(r.out, "a b", 3) && strstr(r.out, "\nc") && strstr(r.err, "mini: prompts 2, "));
    result_free(&r);
    r = run(MINI, "%s a c --json " WHOLE_GPU, dir_of(victim()));
    CU_ASSERT(strstr(r.out, "{\"id\": 0, \"tokens\": [") == r.out && strstr(r.out, "]}\n{\"id\": 1, \"tokens\": ["));
    result_free(&r);
    free(dir);
}

static char *replaced(const char *text, const char *from, const char *to);
static const char *without_weights(void);

/* The token that follows a prompt is made the piece of byte 0, whose id the piece that it was gets. */
static void a_completion_may_contain_NUL(void) {
    char generated[20], nul[20], *dir = xstrdup(without_weights());
    size_t len;
    Result r = run(MINI, "%s c --json " WHOLE_GPU, dir_of(victim()));
    const char *tokens = strstr(r.out, "\"tokens\": ["), *one = "c\0\n";
    CU_ASSERT_FATAL(r.status == 0 && tokens);
    char *vocab = contents(in_dir(dir, "vocab.json"), NULL), *piece = strstr(vocab, "\"\304\200\":");
    CU_ASSERT_PTR_NOT_NULL_FATAL(piece);
    snprintf(generated, sizeof generated, ":%d,", atoi(tokens + 11)), snprintf(nul, sizeof nul, ":%d,", atoi(piece + 5));
    char *a = replaced(vocab, generated, ":#,"), *b = replaced(a, nul, generated), *c = replaced(b, ":#,", nul);
    write_text(dir, "vocab.json", c);
    copy_file(dir_of(victim()), dir, "model.safetensors");
    result_free(&r), r = run(MINI, "%s c " WHOLE_GPU, dir), result_free(&r);
    char *plain = contents(in_dir(capture, "out"), &len);
    CU_ASSERT(len == 3 && !memcmp(plain, one, 3));
    free(vocab), free(a), free(b), free(c), free(plain), free(dir);
}

/* The prompt is </s> and "A". The last token generated needs no position. */
static void a_text_may_use_all_positions(void) {
    Result r = run(MINI, "%s A " ALL_ON_GPU " --max-tokens %d", dir_of(victim()), POSITIONS - 1);
    CU_ASSERT(succeeded(&r, "all positions"));
    result_free(&r);
    assert_refused(run(MINI, "%s A " ALL_ON_GPU " --max-tokens %d", dir_of(victim()), POSITIONS), 2, "one more");
}

static void a_full_disk_is_one_line(void) {
    with.file = 100000; /* the disk tier needs more, standard output less */
    assert_refused(run(MINI, "%s --prompts %s " PERCENT, dir_of(victim()), prompts_file()), 1, "a full disk");
    with.output = "/dev/full";
    Result r = run(MINI, "%s Mum " PERCENT, dir_of(victim()));
    CU_ASSERT(r.status == 1 && is_one_line(r.err));
    result_free(&r);
}

/* From hardly enough for a program to what it takes. */
static void no_memory_is_one_line(void) {
    int done = 0, refused = 0;
    for (double memory = 6e6; memory < 4e8; memory *= getenv("MINI_ALL") ? 1.01 : 1.2) {
        with.memory = (rlim_t)memory;
        Result help = run(MINI, "--help");
        const bool loads = help.status == 0;
        result_free(&help);
        with.memory = (rlim_t)memory;
        Result r = run(MINI, "%s --prompts %s --json " PERCENT, dir_of(victim()), prompts_file());
        if (loads && r.status && !was_refused(&r, 0))
            fprintf(stderr, "\n    %.0f bytes: status %d: %s%s", memory, r.status, r.out, r.err);
        CU_ASSERT(!loads || r.status == 0 || was_refused(&r, 0));
        done += r.status == 0, refused += loads && r.status;
        result_free(&r);
    }
    CU_ASSERT(done > 0 && refused > 0);
}

/* A directory with the victim's other files; its weights are still to be written. */
static const char *without_weights(void) {
    const char *from = dir_of(victim()), *dir = temp_dir();
    copy_file(from, dir, "config.json");
    copy_file(from, dir, "vocab.json");
    copy_file(from, dir, "merges.txt");
    return dir;
}

static Program best_checked(void) { return has(ASAN) ? ASAN : MINI; }

/* Whatever a file says, it is refused in one line, or taken with nothing that a sanitizer finds. */
static void assert_survives(const char *dir, const char *what, bool may_be_taken) {
    Result r = run(best_checked(), "%s Mum --max-tokens 2 " PERCENT, dir);
    const bool good = was_refused(&r, 0) || (may_be_taken && r.status == 0);
    if (!good) fprintf(stderr, "\n    %.200s: status %d: %.100s%.1000s", what, r.status, r.out, r.err);
    CU_ASSERT(good);
    result_free(&r);
}

static void a_truncated_checkpoint_is_refused(void) {
    size_t len, header = 0;
    char *whole = contents(in_dir(dir_of(victim()), "model.safetensors"), &len), what[60];
    const char *dir = without_weights(), *copy = xstrdup(dir);
    uint64_t seed = 17;
    memcpy(&header, whole, 8);
    const size_t edges[] = {0,          1,          7,       8,       9,      8 + header / 2, 8 + header - 1,
                            8 + header, 9 + header, len / 2, len - 2, len - 1};
    for (int c = 0; c < 60; c += c < 12 ? 1 : step(8)) {
        const size_t cut = c < 12 ? edges[c] : (size_t)test_below(&seed, (int)len);
        write_file(copy, "model.safetensors", whole, cut);
        snprintf(what, sizeof what, "%zu of %zu bytes", cut, len);
        assert_survives(copy, what, false);
    }
    write_file(copy, "model.safetensors", whole, len);
    assert_survives(copy, "whole", true);
    free((char *)copy), free(whole);
}

/* text with the first `from` replaced by `to`; the caller frees it. */
static char *replaced(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    char *result = xcalloc(strlen(text) + strlen(to) + 1, 1);
    CU_ASSERT_PTR_NOT_NULL_FATAL(at);
    sprintf(result, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return result;
}

/* The text of a safetensors file of the victim, which is its header. */
static Draft victims_draft(void) {
    Draft d = {.len = 0};
    add_globals(&d, victim());
    for (int j = 0; j < victim()->l; j++) add_layer(&d, victim(), j);
    d.header[d.len++] = '}';
    return d;
}

/* Returns a directory like the victim's, but with another text in config.json. */
static const char *with_config(const char *from, const char *to) {
    static char kept[300];
    char *dir = xstrdup(without_weights()), *config = contents(in_dir(dir, "config.json"), NULL);
    char *edited = replaced(config, from, to);
    write_text(dir, "config.json", edited);
    copy_file(dir_of(victim()), dir, "model.safetensors");
    snprintf(kept, sizeof kept, "%s", dir);
    free(dir), free(config), free(edited);
    return kept;
}

static const char *ended_by(int eos) {
    char text[40];
    snprintf(text, sizeof text, "\"eos_token_id\": %d", eos);
    return with_config("\"eos_token_id\": 2", text);
}

/* Writes the victim with names of tensors that do not begin with "model.", and returns its directory. */
static const char *with_short_names(void) {
    const char *dir = without_weights();
    Draft d = victims_draft();
    for (char *at = d.header; (at = strstr(at, "\"model."));) memmove(at + 1, at + 7, strlen(at + 7) + 1);
    write_tensors(dir, "model.safetensors", d.header, strlen(d.header), &d);
    free(d.data);
    return dir;
}

/* Writes the victim with vocab.json in ASCII, as Python does, and returns its directory. All characters are below 2048. */
static const char *with_escaped_pieces(void) {
    const char *dir = without_weights();
    char *pieces = contents(in_dir(dir, "vocab.json"), NULL);
    FILE *f = fopen(in_dir(dir, "vocab.json"), "w");
    CHECK(f);
    for (const char *c = pieces; *c; c += *c & 0x80 ? 2 : 1)
        if (*c & 0x80)
            fprintf(f, "\\u%04x", (unsigned)((c[0] & 31) << 6 | (c[1] & 63)));
        else
            fputc(*c, f);
    CHECK(fclose(f) == 0);
    copy_file(dir_of(victim()), dir, "model.safetensors");
    free(pieces);
    return dir;
}

static void a_checkpoint_may_be_written_in_other_ways(void) {
    Result wanted = run(MINI, "%s Mum --json " WHOLE_GPU, dir_of(victim()));
    CU_ASSERT_FATAL(succeeded(&wanted, "the victim"));
    for (int way = 0; way < 3; way++) {
        const char *dir = way == 0   ? with_short_names()
                          : way == 1 ? with_config("\"eos_token_id\": 2", "\"eos_token_id\":\n  2")
                                     : with_escaped_pieces();
        Result r = run(MINI, "%s Mum --json " WHOLE_GPU, dir);
        CU_ASSERT(succeeded(&r, "another way"));
        CU_ASSERT_STRING_EQUAL(r.out, wanted.out);
        result_free(&r);
    }
    result_free(&wanted);
}

/* The victim with all weights of k 0. So every token has the same k, and all scores of a query are equal; v differs. */
static const char *with_equal_keys(void) {
    const char *dir = without_weights();
    Draft d = victims_draft();
    for (const char *at = d.header; (at = strstr(at, "k_proj.weight\":"));) {
        size_t begin, end;
        at = strstr(at, "data_offsets");
        CU_ASSERT_FATAL(sscanf(at, "data_offsets\":[%zu,%zu]", &begin, &end) == 2);
        memset(d.data + begin, 0, end - begin);
    }
    write_tensors(dir, "model.safetensors", d.header, d.len, &d);
    free(d.data);
    return dir;
}

/* As in the engine (device/host_attend.c, select_tokens), which writes the same tokens; one of the twelve texts may be
 * another where the order of sums decides a token. */
static void of_equal_scores_sparse_attention_keeps_the_earlier_tokens(void) {
    char *dir = xstrdup(with_equal_keys());
    const char *sparse = "--attn-sparsity 0.3 --cpu-cache-compute --percent 100 0 0 100 100 0";
    Answers mini, engine;
    Result r = run(MINI, "%s --prompts %s --json --max-tokens %d --gpu-batch-size 12 %s", dir, prompts_file(), victim()->n,
                   sparse);
    CU_ASSERT_FATAL(succeeded(&r, sparse) && read_answers(&mini, r.out, false));
    result_free(&r);
    r = run(ENGINE,
            "generate --model %s --prompts %s --format text --max-tokens %d %s --gpu-batch-size 12 --num-gpu-batches 1 "
            "--gpu-mem 256M --cpu-mem 256M --disk-mem 256M --threads 2",
            dir, prompts_file(), victim()->n, sparse);
    CU_ASSERT_FATAL(succeeded(&r, sparse) && read_answers(&engine, r.out, true));
    int equal = 0;
    for (int i = 0; i < PROMPTS; i++)
        equal += mini.n[i] == engine.n[i] && !memcmp(mini.token[i], engine.token[i], mini.n[i] * sizeof(int));
    if (equal < PROMPTS) fprintf(stderr, "\n    equal: %d of %d", equal, PROMPTS);
    CU_ASSERT(equal >= PROMPTS - 1);
    answers_free(&mini), answers_free(&engine), result_free(&r), free(dir);
}

/* merges.txt gets two more pairs. In "zzz" the first pair is joined, not the last. Two line feeds are not joined, since the
 * last of several blanks belongs to the next word. */
static void words_and_pairs_are_those_of_the_engine(void) {
    char *dir = xstrdup(without_weights());
    char *pieces = contents(in_dir(dir, "vocab.json"), NULL), *pairs = contents(in_dir(dir, "merges.txt"), NULL);
    char *more_pieces = replaced(pieces, "{", "{\"\304\212\304\212\":300,\"zz\":301,");
    char *more_pairs = replaced(pairs, "\nh e\n", "\nh e\n\304\212 \304\212\nz z\n");
    write_text(dir, "vocab.json", more_pieces);
    write_text(dir, "merges.txt", more_pairs);
    copy_file(dir_of(victim()), dir, "model.safetensors");
    assert_engines_answer(dir, "zzz", "zzz");
    assert_engines_answer(dir, "b\n\nb", "b\\n\\nb");
    free(dir), free(pieces), free(pairs), free(more_pieces), free(more_pairs);
}

/* "FILE: THIS -> THAT": in a copy of the victim's directory that text of a file, or all of it, is replaced. */
static void try_edit(const Draft *d, const char *edit, bool may_be_taken) {
    char *dir = xstrdup(without_weights()), *file = xstrdup(edit), *from = strstr(file, ": ") + 2,
         *to = strstr(from, " -> ") + 4;
    from[-2] = to[-4] = 0;
    const bool tensors = !strcmp(file, "model.safetensors");
    char *text = tensors ? xstrdup(d->header) : contents(in_dir(dir, file), NULL);
    char *edited = *from ? replaced(text, from, to) : xstrdup(to);
    write_tensors(dir, "model.safetensors", tensors ? edited : d->header, tensors ? strlen(edited) : d->len, d);
    if (!tensors) write_text(dir, file, edited);
    assert_survives(dir, edit, may_be_taken);
    free(dir), free(file), free(text), free(edited);
}

static void a_spoilt_file_is_refused(void) {
    static const char *const edits[] = {"model.safetensors: \"F16\" -> \"I64\"",
                                        "model.safetensors: \"F16\" -> 7",
                                        "model.safetensors: \"F16\" -> \"F32\"",
                                        "model.safetensors: \"F16\" -> null",
                                        "model.safetensors: \"F16\" -> \"F16",
                                        "model.safetensors: [0,131072] -> [131072,0]",
                                        "model.safetensors: [0,131072] -> [-131072,0]",
                                        "model.safetensors: [0,131072] -> [0,1e300]",
                                        "model.safetensors: [0,131072] -> [1e18,1000000000000131072]",
                                        "model.safetensors: [0,131072] -> [.5,131072.5]",
                                        "model.safetensors: [0,131072] -> [0,nan]",
                                        "model.safetensors: [0,131072] -> [0]",
                                        "model.safetensors: [0,131072] -> \"0,131072\"",
                                        "model.safetensors: [0,131072] -> [[0],131072]",
                                        "model.safetensors: embed_tokens -> embed_token",
                                        "model.safetensors: embed_tokens -> embed_tok\\u00",
                                        "model.safetensors: embed_tokens -> \\ud800\\u0041",
                                        "model.safetensors: embed_tokens -> \\q",
                                        "model.safetensors: layers.2.fc1.weight -> layers.0.fc1.weight",
                                        "config.json:  -> ",
                                        "config.json:  -> 7",
                                        "config.json:  -> {",
                                        "config.json: \"opt\" -> \"llama\"",
                                        "config.json: _embeddings\": true -> _embeddings\": false",
                                        "config.json: \"relu\" -> \"gelu\"",
                                        "config.json: _size\": 64 -> _size\": 0",
                                        "config.json: _size\": 64 -> _size\": 65",
                                        "config.json: _size\": 64 -> _size\": -64",
                                        "config.json: _size\": 64 -> _size\": 8e300",
                                        "config.json: _size\": 64 -> _size\": 128",
                                        "config.json: heads\": 4 -> heads\": 0",
                                        "config.json: heads\": 4 -> heads\": 7",
                                        "config.json: layers\": 3 -> layers\": 4",
                                        "config.json: layers\": 3 -> layers\": 0",
                                        "config.json: layers\": 3 -> layers\": 99999999",
                                        "config.json: layers\": 3 -> layers\": \"3\"",
                                        "config.json: 1024 -> 1023",
                                        "config.json: 1024 -> 1e9",
                                        "config.json: 384 -> 1000000",
                                        "config.json: 384 -> 2",
                                        "config.json: \"activation -> \"do_layer_norm_before\": false, \"activation",
                                        "vocab.json:  -> ",
                                        "vocab.json:  -> {}",
                                        "vocab.json:  -> [1]",
                                        "vocab.json: :5, -> :1024,",
                                        "vocab.json: :5, -> :-5,",
                                        "vocab.json: :5, -> :6,",
                                        "vocab.json: :5, -> :{},",
                                        "vocab.json: :5, -> ,",
                                        "merges.txt: h e -> he",
                                        "merges.txt: h e -> h",
                                        "merges.txt: h e -> h e e",
                                        "merges.txt: h e -> h \377",
                                        "merges.txt: h e -> zq xq",
                                        "merges.txt: h e -> q z",
                                        "vocab.json: \"a\" -> \"~~~\""};
    static const char *const files[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"};
    Draft d = victims_draft();
    for (size_t e = 0; e < sizeof edits / sizeof *edits; e++) try_edit(&d, edits[e], false);
    for (int f = 0; f < 4; f++) {
        char *dir = xstrdup(without_weights());
        write_tensors(dir, "model.safetensors", d.header, d.len, &d);
        CHECK(unlink(in_dir(dir, files[f])) == 0);
        assert_survives(dir, files[f], false);
        free(dir);
    }
    free(d.data);
}

/* What may be overlooked does no harm. */
static void lesser_faults_do_no_harm(void) {
    static const char *const edits[] = {"model.safetensors: [1024,64] -> [1024,65]",
                                        "model.safetensors: [1024,64] -> [-1024,-64]",
                                        "model.safetensors: [1024,64] -> [65536]",
                                        "model.safetensors: [1024,64] -> []",
                                        "model.safetensors: [1024,64] -> [1024,64,1]",
                                        "model.safetensors: [1024,64] -> 64",
                                        "model.safetensors: [1024,64] -> [1e308,1e308]",
                                        "model.safetensors: [1024,64] -> [\"a\",{}]",
                                        "model.safetensors: [1024,64] -> [4294967296,4294967296]",
                                        "model.safetensors: [1024,64] -> [2048,32]",
                                        "vocab.json: :5, -> :5.5,",
                                        "vocab.json: :5, -> :5",
                                        "merges.txt: h e -> h ",
                                        "merges.txt: h e ->  e",
                                        "model.safetensors: {\"dtype\" -> [\"dtype\"",
                                        "model.safetensors: {\"dtype\" -> {dtype",
                                        "model.safetensors: :{\"dtype\" -> :7,\"x\":{\"dtype\"",
                                        "model.safetensors: } -> ",
                                        "model.safetensors: , -> ,,",
                                        "model.safetensors: { -> ",
                                        "config.json: eos_token_id\": 2 -> eos_token_id\": 5000",
                                        "merges.txt: h e -> ",
                                        "merges.txt:  -> "};
    Draft d = victims_draft();
    for (size_t e = 0; e < sizeof edits / sizeof *edits; e++) try_edit(&d, edits[e], true);
    free(d.data);
}

static void a_header_that_lies_about_its_length_is_refused(void) {
    static const uint64_t lengths[] = {0, 1, 2, 100, 1ull << 32, 1ull << 62, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
    char what[100], *dir = xstrdup(without_weights()), *deep = xcalloc(200001, 1);
    Draft d = victims_draft();
    for (size_t e = 0; e < sizeof lengths / sizeof *lengths; e++) {
        write_tensors(dir, "model.safetensors", d.header, lengths[e], &d);
        snprintf(what, sizeof what, "a header of %llu bytes", (unsigned long long)lengths[e]);
        assert_survives(dir, what, false);
    }
    /* one that ends a byte behind its file is not read */
    write_tensors(dir, "model.safetensors", d.header, strlen(d.header) + d.size + 1, &d);
    Result r = run(MINI, "%s Mum " WHOLE_GPU, dir);
    CU_ASSERT_PTR_NOT_NULL(strstr(r.err, "is no whole file of safetensors"));
    assert_refused(r, 1, "a header that ends a byte behind its file");
    memset(deep, '[', 200000);
    memcpy(deep, "{\"a\":", 5);
    write_tensors(dir, "model.safetensors", deep, 200000, &d);
    assert_survives(dir, "brackets without end", false);
    free(deep), free(dir), free(d.data);
}

/* Bytes of what is read are changed at random; some changes do no harm. */
static void random_damage_is_refused_or_harmless(void) {
    static const char *const files[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"};
    uint64_t seed = 23;
    char *dir = xstrdup(without_weights());
    copy_file(dir_of(victim()), dir, "model.safetensors");
    for (int c = 0; c < 400; c += step(21)) {
        const char *file = files[c % 4];
        char what[100];
        size_t len;
        char *text = contents(in_dir(dir_of(victim()), file), &len);
        const int changes = between(&seed, 1, 3), range = (int)fmin((double)len, c % 4 == 3 ? 4500 : 1e9);
        for (int i = 0; i < changes; i++)
            text[test_below(&seed, range)] =
                test_below(&seed, 2) ? (char)test_below(&seed, 256) : "{}[]\",:0-9\\ue"[test_below(&seed, 14)];
        write_file(dir, file, text, len);
        snprintf(what, sizeof what, "%s, damage %d", file, c);
        assert_survives(dir, what, true);
        free(text);
        copy_file(dir_of(victim()), dir, file);
    }
    free(dir);
}

/* Whether a process has a file of the offload directory mapped that has no name any more. */
static bool maps_unnamed_file(pid_t pid) {
    char path[60], line[1000];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) found |= strstr(line, offload) && strstr(line, "(deleted)");
    if (f) fclose(f);
    return found;
}

static void the_offload_file_has_no_name_while_it_is_used(void) {
    static const int signals[] = {SIGKILL, SIGTERM, SIGINT, SIGSEGV};
    char text[900];
    for (int s = 0; s < 4; s++) {
        bool seen = false;
        snprintf(text, sizeof text,
                 "%s --prompts %s --percent 0 0 0 0 0 0 --gpu-batch-size 4 --num-gpu-batches 3 --ctod 20e3",
                 dir_of(victim()), prompts_file());
        pid_t pid = start(MINI, text);
        for (int ms = 0; ms < 20000 && !seen; ms += 2) usleep(2000), seen = maps_unnamed_file(pid);
        CU_ASSERT(seen && count_files(offload) == 0);
        kill(pid, signals[s]);
        Result r = finish(pid);
        CU_ASSERT_EQUAL(r.status, 1000 + signals[s]);
        result_free(&r);
    }
}

/* The N-th call of a kind fails, or all from then on (tests/faults.c). */
static void whatever_call_fails_is_one_line_or_does_no_harm(void) {
    static const char *const faults[] = {"open:%d:5",     "open:%d+:24",  "mmap:%d:12",   "mmap:%d+:12", "malloc:%d:12",
                                         "malloc:%d+:12", "thread:%d:11", "write:%d+:28", "write:%d:4"};
    static const int most[] = {8, 8, 16, 16, 60, 60, 5, 4, 4};
    if (!getenv("FAULTS_LIBRARY") || !*getenv("FAULTS_LIBRARY")) return;
    Result good = run(MINI, "%s Mum --json --max-tokens 3 " PERCENT, dir_of(victim()));
    CU_ASSERT_FATAL(good.status == 0);
    for (int f = 0; f < 9; f++)
        for (int n = 1 + f % 3; n <= most[f]; n += step(7)) {
            char fault[40];
            snprintf(fault, sizeof fault, faults[f], n);
            with.fault = fault;
            Result r = run(MINI, "%s Mum --json --max-tokens 3 " PERCENT, dir_of(victim()));
            const bool right =
                r.status == 0 ? !strcmp(r.out, good.out) : (r.status == 1 || r.status == 2) && is_one_line(r.err);
            if (!right) fprintf(stderr, "\n    FAULT=%s: status %d: %s%s", fault, r.status, r.out, r.err);
            CU_ASSERT(right);
            result_free(&r);
        }
    result_free(&good);
}

// ---------------------------------------------------------------------------------------------------------------
// The text of mini.c
// ---------------------------------------------------------------------------------------------------------------

enum { COLUMNS = 100, FUNCTION = 40, NLINES = 4000 };

/* Characters of a line, of which some have more than one byte. */
static int width(const char *line) {
    int n = 0;
    for (; *line; line++) n += (*line & 0xc0) != 0x80;
    return n;
}

/* Whether a line is of a comment, which may have begun before it. */
static bool is_comment(const char *line, bool *inside) {
    const bool before = *inside;
    const char *begin = strstr(line, "/*");
    if (begin) *inside = true;
    if (*inside && strstr(begin ? begin : line, "*/")) *inside = false;
    return before || begin || strstr(line, "//");
}

/* Lines of the longest function: from its name in the first column to its brace there. */
static int longest_function(char *const line[], int n) {
    int begun = -1, most = 0, at = 0;
    for (int i = 0; i < n; i++) {
        const size_t len = strlen(line[i]);
        if (begun < 0 && (isalpha(line[i][0]) || line[i][0] == '_') && strchr(line[i], '(')) begun = i;
        if (begun >= 0 && line[i][0] == '}' && i - begun >= most) most = i - begun + 1, at = begun + 1;
        if (len && (line[i][0] == '}' || (line[i][len - 1] == ';' && !isblank(line[i][0]))))
            begun = -1; /* or a prototype */
    }
    printf("the longest function, at line %d, has %d lines, ", at, most);
    return most;
}

static void lines_and_functions_are_short_and_a_fifth_is_comments(void) {
    char *text = contents("mini.c", NULL), *line[NLINES];
    int n = 0, comments = 0, wide = 0;
    bool inside = false;
    for (char *at = text, *end; (end = strchr(at, '\n')) && n < NLINES; at = end + 1) *end = 0, line[n++] = at;
    for (int i = 0; i < n; i++) {
        wide += width(line[i]) > COLUMNS;
        comments += is_comment(line[i], &inside);
        CU_ASSERT(strncmp(line[i], "#include \"", 10) != 0);
    }
    printf("%d lines, %d with a comment, %d too wide, ", n, comments, wide);
    CU_ASSERT(wide == 0); /* scripts/size.py counts tokens */
    CU_ASSERT(5 * comments >= n);
    CU_ASSERT(longest_function(line, n) <= FUNCTION);
    free(text);
}

/* As its first lines say, the file compiles on any system: here for those whose compilers are installed. */
static void no_compiler_warns(void) {
    static const char *const compilers[] = {"gcc -march=native",
                                            "clang -march=native",
                                            "gcc",
                                            "aarch64-linux-gnu-gcc",
                                            "python3 -m ziglang cc -target aarch64-macos",
                                            "python3 -m ziglang cc -target x86_64-macos",
                                            "python3 -m ziglang cc -target riscv64-linux-musl"};
    char command[300];
    for (int c = 0; c < (getenv("MINI_ALL") ? 7 : 4); c++) {
        snprintf(command, sizeof command, "%s --version >/dev/null 2>&1", compilers[c]);
        if (system(command)) continue;
        snprintf(command, sizeof command, "%s %s -Wall -Wextra -Werror -c mini.c -o %s/mini.o", compilers[c],
                 getenv("MINI_ALL") ? "-O3" : "-O1", temp_dir());
        CU_ASSERT_EQUAL(system(command), 0);
    }
}

CU_TestInfo tests[] = {
    {"every placement gives the engine's tokens", every_placement_gives_the_engines_tokens},
    {"texts are those of the tokens", texts_are_those_of_the_tokens},
    {"texts of random weights are of many tokens", texts_of_random_weights_are_of_many_tokens},
    {"a block may have many batches", a_block_may_have_many_batches},
    {"compressed weights and cache give the engine's tokens", compressed_weights_and_cache_give_the_engines_tokens},
    {"sparse attention gives the engine's tokens", sparse_attention_gives_the_engines_tokens},
    {"of equal scores sparse attention keeps the earlier tokens",
     of_equal_scores_sparse_attention_keeps_the_earlier_tokens},
    {"an empty prompt gives the engine's tokens", an_empty_prompt_gives_the_engines_tokens},
    {"words and pairs are those of the engine", words_and_pairs_are_those_of_the_engine},
    {"links carry the bytes of a formula", links_carry_the_bytes_of_a_formula},
    {"shares of weights are streamed to within a tensor", shares_of_weights_are_streamed_to_within_a_tensor},
    {"shares of 100 percent leave the disk empty", shares_of_100_percent_leave_the_disk_empty},
    {"a delegated cache needs no more of the GPU for more tokens",
     a_delegated_cache_needs_no_more_of_the_GPU_for_more_tokens},
    {"a share of sequences is one of their tokens", a_share_of_sequences_is_one_of_their_tokens},
    {"many blocks need the memory of one", many_blocks_need_the_memory_of_one},
    {"a search takes off the memory of one block", a_search_takes_off_the_memory_of_one_block},
    {"threads share the attention to a long context", threads_share_the_attention_to_a_long_context},
    {"rounding adds no token to a sparse share", rounding_adds_no_token_to_a_sparse_share},
    {"a sequence that has ended moves nothing", a_sequence_that_has_ended_moves_nothing},
    {"a slowed link takes the time of its bytes", a_slowed_link_takes_the_time_of_its_bytes},
    {"the figures that are reported agree with each other", the_figures_that_are_reported_agree_with_each_other},
    {"a trace shows what each thread and link did", a_trace_shows_what_each_thread_and_link_did},
    {"a batch has 32 sequences unless it is said", a_batch_has_32_sequences_unless_it_is_said},
    {"sparse attention is delegated without a flag too", sparse_attention_is_delegated_without_a_flag_too},
    {"a policy runs in its memory and not in less", a_policy_runs_in_its_memory_and_not_in_less},
    {"what is searched for keeps to the memory", what_is_searched_for_keeps_to_the_memory},
    {"the paper's cost model is the engine's", the_papers_cost_model_is_the_engines},
    {"the search finds no worse block than those tried by hand", the_search_finds_no_worse_block_than_those_tried_by_hand},
    {"a link of the command line is one of the file", a_link_of_the_command_line_is_one_of_the_file},
    {"a block may have more places than there are prompts", a_block_may_have_more_places_than_there_are_prompts},
    {"a search gives no tier more than it has", a_search_gives_no_tier_more_than_it_has},
    {"wrong use is refused in one line", wrong_use_is_refused_in_one_line},
    {"a line is a prompt", a_line_is_a_prompt},
    {"a completion may contain NUL", a_completion_may_contain_NUL},
    {"a checkpoint may be written in other ways", a_checkpoint_may_be_written_in_other_ways},
    {"a text may use all positions", a_text_may_use_all_positions},
    {"a full disk is one line", a_full_disk_is_one_line},
    {"no memory is one line", no_memory_is_one_line},
    {"a truncated checkpoint is refused", a_truncated_checkpoint_is_refused},
    {"a header that lies about its length is refused", a_header_that_lies_about_its_length_is_refused},
    {"a spoilt file is refused", a_spoilt_file_is_refused},
    {"lesser faults do no harm", lesser_faults_do_no_harm},
    {"random damage is refused or harmless", random_damage_is_refused_or_harmless},
    {"the offload file has no name while it is used", the_offload_file_has_no_name_while_it_is_used},
    {"whatever call fails is one line or does no harm", whatever_call_fails_is_one_line_or_does_no_harm},
    {"lines and functions are short and a fifth is comments", lines_and_functions_are_short_and_a_fifth_is_comments},
    {"no compiler warns", no_compiler_warns},
    {"sanitizers find nothing in any of these", sanitizers_find_nothing_in_any_of_these},
    CU_TEST_INFO_NULL,
};
