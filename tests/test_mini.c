/* test_mini.c: mini.c, the whole paper in one file, beside the engine. Neither shares a line with the other, so that each
 * is the other's oracle.
 *
 * Both programs are started: the engine once for each model and each kind of compression, since every policy gives its
 * tokens (test_schedule.c), and mini under many policies. Sums come in another order there, so a token may differ where the
 * engine's own choice was close: its lead over the next one is then shown, and bounded. A.3 is held against the engine's
 * linear program (test_policy.c, test_lp.c). What mini alone says is held by formulas here: the bytes of each link, the
 * memory of each tier. What runs long takes a sample of its cases; with MINI_ALL set (make mini-all) all. The figures that
 * docs/TOUR.md derives are test_tour.c's. */
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/started.h"
#include "tests/written.h"

#define TINY "models/opt-tiny"
#define PIECES "tests/golden/tokenizer"
enum { LINKS = 4, PROMPTS = 12, FEW_PROMPTS = 5, MOST_TOKENS = 12, POSITIONS = 384, PLACEMENTS = 40 };

/* With MINI_ALL every case is taken, else every so many-th, and texts are shorter. */
static bool all(void) { return getenv("MINI_ALL"); }
static int step(int stride) { return all() ? 1 : stride * test_every; }
static int tokens(void) { return all() ? MOST_TOKENS : 6; }

static int between(uint64_t *state, int low, int high) { return low + test_below(state, high - low + 1); }

/* A text, until the end of the suite. */
__attribute__((format(printf, 1, 2))) static char *text_of(const char *format, ...) {
    char *text;
    va_list args;
    va_start(args, format);
    CHECK(vasprintf(&text, format, args) >= 0);
    va_end(args);
    return keep(text);
}

// ---- Running mini ---------------------------------------------------------------------------------------------------

/* The variables that name its programs: as a reader builds it, with sums in another order, and with sanitizers. */
#define MINI "MINI_BIN"
#define PORTABLE "MINI_PORTABLE"
#define ASAN "MINI_ASAN"
#define TSAN "MINI_TSAN"
#define EMULATED "MINI_EMULATED" /* with mini.cu, on the emulation of a GPU */
#define ROUNDED "MINI_ROUNDED"   /* mini.c alone, which rounds to F16 what it multiplies, as mini.cu does */

/* Starts a program with the words of a text. TSan needs a fixed layout of the address space. */
static pid_t start(const char *program, const char *text) {
    char *argv[100];
    /* mini leaves its memory to the system when it ends */
    setenv("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1", 1);
    setenv("TSAN_OPTIONS", "halt_on_error=1:abort_on_error=1", 1);
    split_words(text_of("%s%s %s", strstr(program, "TSAN") ? "setarch -R " : "", getenv(program), text), argv, 100);
    return start_program((const char *const *)argv);
}

static Result run(const char *program, const char *text) { return finish(start(program, text)); }

/* Runs it, and it does what it is asked for. */
static Result done(const char *program, const char *text) {
    const Result r = run(program, text);
    if (r.status) fprintf(stderr, "\n    %s: status %d: %s\n", text, r.status, r.err);
    CU_ASSERT_EQUAL_FATAL(r.status, 0);
    return r;
}

#define DONE(...) done(MINI, text_of(__VA_ARGS__))

/* It failed, with that status or, if that is 0, with 1 or 2, wrote nothing, and said why in one line. */
static bool was_refused(const Result *r, int status) {
    const bool one_line = !strncmp(r->err, "mini: ", 6) && strchr(r->err, '\n') == r->err + r->err_len - 1;
    return (status ? r->status == status : r->status == 1 || r->status == 2) && !r->out_len && one_line;
}

static void assert_refused(const char *program, const char *text, int status) {
    const Result r = run(program, text);
    const bool right = was_refused(&r, status);
    if (!right) fprintf(stderr, "\n    %s: status %d: %s%s", text, r.status, r.out, r.err);
    CU_ASSERT(right);
}

// ---- Models with random weights -------------------------------------------------------------------------------------

/* What a tensor's numbers are around, and how far from it. The sizes make each layer matter, so that texts do not repeat
 * one token; with larger ones a code of four bits that rounds the other way would change tokens. The table of tokens is the
 * head, too; so the last norm keeps little of the state. */
static float spread(const OptConfig *c, int t, size_t e) {
    static const float globals[NGLOBALS] = {[TOK_EMBED] = 4, [POS_EMBED] = 8, [FINAL_LN_W] = 2, [FINAL_LN_B] = .5};
    const int role = (t - NGLOBALS) % NROLES;
    if (t < NGLOBALS) return globals[t] * any_number(t, e);
    if (role_is_matrix((Role)role)) return sqrtf(300.f / (float)(role == FC2_W ? c->h2 : c->h1)) * any_number(t, e);
    if (role == LN1_W || role == LN2_W) return 1 + 2 * any_number(t, e);
    return (role == LN1_B || role == LN2_B ? 2 : 1) * any_number(t, e);
}

static float spread_but_for_keys(const OptConfig *c, int t, size_t e) {
    return t >= NGLOBALS && (t - NGLOBALS) % NROLES == K_W ? 0 : spread(c, t, e);
}

typedef struct {
    OptConfig c;
    int shards;
    char dir[300];
} Subject;

/* The shipped model, whose heads are of 64; one with heads of 16, which is spoilt, and which most questions about memory
 * are asked of; with heads of 32, in shards; with heads of 80. And the second without keys, for one test alone. */
static Subject subjects[] = {{TEST_CONFIG(6, 256, 1024, 4, 4096, 2), 0, TINY},
                             {TEST_CONFIG(3, 64, 192, 4, 1024, 2), 0, ""},
                             {TEST_CONFIG(5, 128, 320, 4, 1024, 2), 2, ""},
                             {TEST_CONFIG(1, 320, 384, 4, 1024, 2), 0, ""},
                             {TEST_CONFIG(3, 64, 192, 4, 1024, 2), 0, ""}};
enum { SUBJECTS = COUNT(subjects) - 1, KEYLESS = SUBJECTS };
static Subject *const victim = &subjects[1];

static const char *const files[] = {"config.json", "vocab.json", "merges.txt", "model.safetensors"}; /* of a model */

static Model model_of(const Subject *m) {
    Model model = {m->c, F16, "model.", m->shards, .number = m == &subjects[KEYLESS] ? spread_but_for_keys : spread};
    model.config.max_pos = POSITIONS;
    return model;
}

/* The directory of a model, which is written when it is first asked for. */
static const char *dir_of(Subject *m) {
    open_directories();
    if (m->dir[0]) return m->dir;
    snprintf(m->dir, sizeof m->dir, "%s", model_dir(model_of(m)));
    copy_file(PIECES, m->dir, "vocab.json");
    copy_file(PIECES, m->dir, "merges.txt");
    return m->dir;
}

static const char *small(void) { return dir_of(victim); }

/* A fresh directory with the victim's files. */
static const char *copy_of_victim(void) {
    const char *dir = text_of("%s", temp_dir());
    for (int f = 0; f < 4; f++) copy_file(small(), dir, files[f]);
    return dir;
}

// ---- Prompts, and what the engine answers ---------------------------------------------------------------------------

static const char *const prompts[PROMPTS] = {
    "Once upon a time, there was a little girl named Lily.",
    "A",
    "Tom and Sue went to the park to play. They saw a big dog, and the dog wasn't happy: it couldn't find its ball!",
    "The cat",
    "\"Don't,\" he said.  \"I'll do it;   we've 3 apples, 12 pears & 4567 nuts (or so)...\"",
    "One rainy day, a small frog found a red boat. He climbed in and sailed over the pond to the other side.",
    "Ben was not afraid of the dark. He had a lamp, a book, and a friend who told him long stories about the sea, the "
    "stars and the whales that sing at night. One night the lamp went out.",
    "Le caf\303\251 d'\303\251t\303\251 \303\251tait ferm\303\251",
    "tab\there, back\\slash, <b>bold</b>  ",
    " leading blank and x_1 = y^2 + 0.5",
    "Mum",
    "The end of the story is that the old man gave the boy his hat, and the boy gave the old man his",
};

/* A file of that name, with a line for each prompt. */
static const char *write_prompts(const char *name, const char *const *lines, int count) {
    open_directories();
    const char *path = text_of("%s/%s", capture, name);
    FILE *f = fopen(path, "w");
    CHECK(f);
    for (int i = 0; i < count; i++) fprintf(f, "%s\n", lines[i]);
    CHECK(fclose(f) == 0);
    return path;
}

/* A file with the first of them. */
static const char *prompts_file(int count) { return write_prompts(text_of("prompts-%d", count), prompts, count); }

/* What changes the tokens: compression and sparse attention, which is delegated with --cpu-cache-compute and without. */
typedef enum { PLAIN, PACKED_WEIGHT, PACKED_CACHE, BOTH, SPARSE_1, SPARSE_3, SPARSE_PACKED, VARIANTS } Variant;
static const struct {
    const char *flags;
    double sparsity;
} variant[] = {{"", 1},
               {"--compress-weight", 1},
               {"--compress-cache", 1},
               {"--compress-weight --compress-cache", 1},
               {"--attn-sparsity 0.1", .1},
               {"--attn-sparsity 0.3", .3},
               {"--attn-sparsity 0.3 --compress-weight --compress-cache", .3}};
static bool sparse_in(Variant v) { return variant[v].sparsity < 1; }
static bool packs(Variant v, const char *what) { return strstr(variant[v].flags, what); }

typedef struct {
    int n[PROMPTS];
    int32_t token[PROMPTS][MOST_TOKENS];
} Answers;

/* Both programs write a JSON object a line, with "id" first and "tokens", for each of so many prompts one. */
static Answers read_answers(const char *text, int count) {
    Answers a;
    int lines = 0, id;
    memset(a.n, -1, sizeof a.n);
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1, lines++) {
        char *at = strstr(line, "\"tokens\": [");
        CU_ASSERT_FATAL(at && at < end && sscanf(line, "{\"id\": %d,", &id) == 1 && id >= 0 && id < count && a.n[id] < 0);
        a.n[id] = 0;
        for (at = strchr(at, '[') + 1; *at != ']' && a.n[id] < MOST_TOKENS; at += strspn(at, ", "))
            a.token[id][a.n[id]++] = (int32_t)strtol(at, &at, 10);
        CU_ASSERT_EQUAL_FATAL(*at, ']');
    }
    CU_ASSERT_EQUAL_FATAL(lines, count);
    return a;
}

#define ENGINE_ALL_ON_GPU                                                                                \
    "--percent 100 0 100 0 100 0 --gpu-batch-size 12 --num-gpu-batches 1 --gpu-mem 256M --cpu-mem 256M " \
    "--disk-mem 256M --threads 2"

/* Returns at which token two answers to a prompt begin to differ, or MOST_TOKENS if they are equal. */
static int difference(const Answers *a, const Answers *b, int prompt) {
    int at = 0;
    while (at < a->n[prompt] && at < b->n[prompt] && a->token[prompt][at] == b->token[prompt][at]) at++;
    return at == a->n[prompt] && at == b->n[prompt] ? MOST_TOKENS : at;
}

static Tokenizer *tokenizer_of(int m) {
    Error err;
    Tokenizer *t = tokenizer_open(dir_of(&subjects[m]), subjects[m].c.vocab, &err);
    ASSERT_OK(!t);
    return t;
}

/* A prompt with its tokens, </s> first. */
static Prompt encoded(int m, const char *text) {
    Error err;
    Prompt p = {0};
    Tokenizer *t = tokenizer_of(m);
    p.s = text_encode(&p.ids, text, strlen(text), t, &err);
    ASSERT_OK(p.s < 0);
    tokenizer_close(t);
    keep(p.ids);
    return p;
}

/* What the engine is asked for. mini unpacks weights to F16 and multiplies floats; the engine multiplies the codes by
 * integers of 16 bits, which is enough to choose another past token where attention is sparse. Suite host bounds what
 * this loses. Here the engine has weights in F16 that are rounded to what their codes stand for. */
static Policy engine_policy(Variant v) {
    Policy policy = all_gpu(1, 1);
    if (packs(v, "weight")) policy.weight_study = (Quant){4, GROUP};
    policy.cache_packed = packs(v, "cache");
    if (sparse_in(v)) policy.sparsity = variant[v].sparsity, policy.delegated = true, policy.cg = 0, policy.cc = 1;
    return policy;
}

/* The engine's tokens for so many prompts, at most `most` for each, without </s>. */
static Answers policy_answers(int m, const Policy *policy, int count, int most) {
    Prompt asked[PROMPTS];
    Answers answers;
    for (int i = 0; i < count; i++) {
        asked[i] = encoded(m, prompts[i]);
        asked[i].n = most;
    }
    Checkpoint *checkpoint = opens(dir_of(&subjects[m]));
    Rig r = rig_ran(checkpoint, policy, &(Task){.prompts = asked, .count = count}, NULL);
    for (int i = 0; i < count; i++) {
        const Answer *a = &r.answer[i];
        answers.n[i] = a->n - (a->n > 0 && a->tokens[a->n - 1] == subjects[m].c.eos);
        memcpy(answers.token[i], a->tokens, answers.n[i] * sizeof *a->tokens);
    }
    rig_close(&r), checkpoint_close(checkpoint);
    return answers;
}

/* The engine's answers, which it is asked for once. */
static const Answers *engine_answers(int m, Variant v) {
    static Answers known[KEYLESS + 1][VARIANTS];
    if (known[m][v].n[0]) return &known[m][v];
    if (packs(v, "weight")) {
        const Policy policy = engine_policy(v);
        known[m][v] = policy_answers(m, &policy, PROMPTS, tokens());
        return &known[m][v];
    }
    const Result r =
        flexgen_done("generate --model %s --prompts %s --format text --max-tokens %d %s " ENGINE_ALL_ON_GPU "%s",
                     dir_of(&subjects[m]), prompts_file(PROMPTS), tokens(), variant[v].flags,
                     sparse_in(v) ? " --percent 100 0 0 100 100 0 --cpu-cache-compute" : "");
    known[m][v] = read_answers(r.out, PROMPTS);
    return &known[m][v];
}

static int compared, differing; /* sequences of the present test */

/* mini with its JSON lines, for so many prompts. */
static const char *question(int m, Variant v, int count, const char *flags) {
    return text_of("%s --prompts %s --json --max-tokens %d %s %s", dir_of(&subjects[m]), prompts_file(count), tokens(),
                   variant[v].flags, flags);
}

/* The lead of a chosen token over the next one, of the largest |logit|, in the engine, which has generated these tokens
 * before it; NAN if the engine generates others. */
static double lead_of(int m, Variant v, const char *prompt, const int32_t *before, int at, int chosen) {
    const Policy policy = engine_policy(v);
    Prompt one = encoded(m, prompt);
    one.n = at + 1;
    const Task task = {.prompts = &one, .count = 1, .keep_logits = true};
    Checkpoint *checkpoint = opens(dir_of(&subjects[m]));
    Rig r = rig_ran(checkpoint, &policy, &task, NULL);
    const Answer *a = &r.answer[0];
    const bool same = a->n == at + 1 && !memcmp(a->tokens, before, at * sizeof *before);
    float largest = 0, next = -INFINITY;
    for (int t = 0; same && t < subjects[m].c.vocab; t++) {
        largest = fmaxf(largest, fabsf(a->logits[t]));
        if (t != chosen) next = fmaxf(next, a->logits[t]);
    }
    const double lead = same ? (a->logits[chosen] - next) / largest : NAN;
    rig_close(&r), checkpoint_close(checkpoint);
    return lead;
}

/* What mini printed are the engine's answers to so many prompts. A token may be another where the engine's own choice was
 * so close that the order of sums decides it: the lead of the chosen token is small. Sparse attention may also choose
 * between two past tokens by the order of sums, which no lead shows. So there mini is to give the engine's tokens when it
 * is compiled so that its sums have another order, and are rounded otherwise. */
static void compare(int m, Variant v, int count, const char *flags, const char *out, double tie) {
    const Answers a = read_answers(out, count), *b = engine_answers(m, v);
    for (int i = 0; i < count; i++, compared++) {
        const int at = difference(&a, b, i), chosen = at < b->n[i] ? b->token[i][at] : 2;
        if (at == MOST_TOKENS) continue;
        const double lead = lead_of(m, v, prompts[i], b->token[i], at, chosen);
        fprintf(stderr, "\n    model %d, prompt %d, token %d: the engine's has a lead of %.1e: %s %s", m, i, at, lead,
                variant[v].flags, flags);
        bool close = lead < tie;
        if (!close && sparse_in(v)) {
            const Answers other = read_answers(done(PORTABLE, question(m, v, PROMPTS, flags)).out, PROMPTS);
            close = difference(&other, b, i) > at;
        }
        CU_ASSERT(lead >= 0 && close);
        differing++;
    }
}

static void at_most_one_of_fifty_differs(void) {
    printf("%d sequences, %d differ ", compared, differing);
    CU_ASSERT(compared > 0 && 50 * differing <= compared + 49);
    compared = differing = 0;
}

// ---- Tokens ---------------------------------------------------------------------------------------------------------

/* Links of a rate that slows some things down and takes little time; a block of 1 to 4 batches, often a short last one. */
static const char *random_policy(int m, int number, Variant v) {
    uint64_t seed = 1000 * (uint64_t)m + (uint64_t)number + 7919 * v;
    const double rate = (m ? 2e8 : 6e9) * test_spread(&seed, 1, 8);
    const int K = 1 + number % 4, gbs = between(&seed, K < 3 ? 2 : 1, 12 / K), slow = test_below(&seed, 3);
    const char *flags =
        text_of("--gpu-batch-size %d --num-gpu-batches %d --threads %d %s %s --percent", gbs, K, between(&seed, 1, 3),
                test_below(&seed, 3) ? "" : "--no-overlap", test_below(&seed, 2) ? "" : "--cpu-cache-compute");
    for (int kind = 0; kind < 3; kind++) {
        double gpu, cpu;
        draw_shares(&gpu, &cpu, &seed);
        flags = text_of("%s %.9g %.9g", flags, 100 * gpu, 100 * cpu);
    }
    if (slow == 0) return text_of("%s --ctog %.0f --gtoc 9e9", flags, rate);
    if (slow == 1) return text_of("%s --dtoc %.0f --ctod 9e9 --gtoc 9e9", flags, rate);
    return flags;
}

/* mini under a policy gives the engine's answers. */
static void try_policy(const char *program, int m, Variant v, int count, const char *flags) {
    const char *ask = question(m, v, count, text_of("%s --gpu-mem 1e9 --cpu-mem 1e9", flags));
    compare(m, v, count, flags, done(program, ask).out, v == PLAIN ? 1e-3 : 5e-3);
}

/* Tries a sample of so many placements on all models. The first model is slow. */
static void try_policies(Variant first, Variant last, int placements) {
    for (int m = 0; m < SUBJECTS; m++)
        for (Variant v = first; v <= last; v++)
            for (int i = m + (int)v % SPARSE_1; i < placements; i += step(m ? 5 : 10))
                try_policy(MINI, m, v, m || all() ? PROMPTS : FEW_PROMPTS, random_policy(m, i, v));
    at_most_one_of_fifty_differs();
}

/* The first block has more parts of a layer's weights than a thread that moves them can note, over a slow link. */
TEST(every_placement_gives_the_engines_tokens) {
    try_policy(MINI, 1, PLAIN, PROMPTS, "--percent 0 100 0 100 0 100 --gpu-batch-size 1 --num-gpu-batches 12 --ctog 2e7");
    try_policies(PLAIN, PLAIN, PLACEMENTS);
}

TEST(compressed_weights_and_cache_give_the_engines_tokens) { try_policies(PACKED_WEIGHT, BOTH, PLACEMENTS / 4); }

/* The engine as it is used, with packed weights, beside the one above: a token may be another where two are as close as the
 * integers of 16 bits leave them. (A packed cache would make a code another by so little.) */
TEST(the_engines_packed_weights_choose_the_tokens_of_their_numbers) {
    for (int m = 0; m < SUBJECTS; m++) {
        const Answers *plain = engine_answers(m, PACKED_WEIGHT);
        const Result r = flexgen_done(
            "generate --model %s --prompts %s --format text --max-tokens %d --compress-weight " ENGINE_ALL_ON_GPU,
            dir_of(&subjects[m]), prompts_file(PROMPTS), tokens());
        const Answers packed = read_answers(r.out, PROMPTS);
        for (int i = 0; i < PROMPTS; i++, compared++) {
            const int at = difference(&packed, plain, i),
                      chosen = at < plain->n[i] ? plain->token[i][at] : subjects[m].c.eos;
            if (at == MOST_TOKENS) continue;
            const double lead = lead_of(m, PACKED_WEIGHT, prompts[i], plain->token[i], at, chosen);
            fprintf(stderr, "\n    model %d, prompt %d, token %d: a lead of %.1e", m, i, at, lead);
            CU_ASSERT(lead >= 0 && lead <= 1e-3);
            differing++;
        }
    }
    at_most_one_of_fifty_differs();
}

TEST(sparse_attention_gives_the_engines_tokens) { try_policies(SPARSE_1, SPARSE_PACKED, PLACEMENTS / 4); }

/* A few prompts are as good as many: the same threads wait for the same buffers. */
TEST(sanitizers_find_nothing_in_any_of_these) {
    const int count = all() ? PROMPTS : FEW_PROMPTS;
    for (int thread = 0; thread < 2; thread++)
        for (int c = 0; c < (SUBJECTS - 1) * VARIANTS * 10; c += step(thread ? 53 : 17)) {
            const int m = 1 + c % (SUBJECTS - 1);
            const Variant v = c / (SUBJECTS - 1) % VARIANTS;
            try_policy(thread ? TSAN : ASAN, m, v, count, random_policy(m, c / (SUBJECTS - 1) / VARIANTS + c, v));
        }
    at_most_one_of_fifty_differs();
}

/* A run of mini that was drawn: any model, 1 to 5 prompts of random words, often longer than two blocks of threads, all
 * ways to pack, sparse attention, and a random policy. The first model is slow, so that it comes seldom and with short
 * prompts. */
typedef struct {
    int m, count, bytes; /* of all prompts together */
    Variant v;
    const char *prompts[5], *ask;
} Drawn;

static Drawn draw_run(int number) {
    uint64_t seed = 104729 * (uint64_t)(number + 1);
    Drawn d = {.m = test_below(&seed, 10) ? between(&seed, 1, SUBJECTS - 1) : 0, .count = between(&seed, 1, 5)};
    d.v = (Variant)test_below(&seed, VARIANTS);
    for (int i = 0; i < d.count; i++) {
        char text[POSITIONS];
        const int most = POSITIONS - MOST_TOKENS - 2, /* a token has at least a byte */
            length = d.m && test_below(&seed, 2) ? between(&seed, most / 2, most) : between(&seed, 1, 40);
        for (int c = 0; c < length; c++) text[c] = "etaoinshrdlu   .,'"[test_below(&seed, 18)];
        text[0] = 'A'; /* no line is empty */
        d.prompts[i] = text_of("%.*s", length, text);
        d.bytes += length;
    }
    d.ask = text_of("%s --prompts %s --json --max-tokens %d %s --gpu-mem 1e9 --cpu-mem 1e9 %s", dir_of(&subjects[d.m]),
                    write_prompts("drawn", d.prompts, d.count), between(&seed, 1, MOST_TOKENS), variant[d.v].flags,
                    random_policy(d.m, number, d.v));
    return d;
}

/* The GPU's half of mini, on the emulation of a GPU, under runs that are drawn, gives mini.c's tokens, but for near ties:
 * it rounds to F16 what it multiplies, and adds in another order. Where numbers become codes of 4 bits, or scores choose
 * past tokens, rounding may change a token that had a lead: there its tokens are those of a mini.c that rounds likewise. At
 * most one sequence of fifty is neither one's. With sanitizers, which compile slowly, only in make mini-all. */
TEST(random_runs_of_the_gpus_half_give_the_tokens_of_the_other_one) {
    enum { RUNS = 200 };
    int runs = 0, sequences = 0, ties = 0, by_rounding = 0, neither = 0;
    for (int c = 0; getenv(EMULATED) && c < RUNS; c += step(25), runs++) {
        const Drawn d = draw_run(c);
        const Result gpu = done(EMULATED, d.ask);
        const Answers ours = read_answers(gpu.out, d.count), cpu = read_answers(done(MINI, d.ask).out, d.count);
        if (c % 29 == 0 && getenv(EMULATED "_ASAN")) CU_ASSERT_STRING_EQUAL(done(EMULATED "_ASAN", d.ask).out, gpu.out);
        if (c % 3 == 1 && d.bytes < 200 && getenv(EMULATED "_TSAN")) /* which takes a minute for a long prompt */
            CU_ASSERT_STRING_EQUAL(done(EMULATED "_TSAN", d.ask).out, gpu.out);
        sequences += d.count;
        for (int i = 0; i < d.count; i++) {
            const int at = difference(&ours, &cpu, i), chosen = at < cpu.n[i] ? cpu.token[i][at] : 2;
            if (at == MOST_TOKENS) continue;
            const double lead = lead_of(d.m, d.v, d.prompts[i], cpu.token[i], at, chosen);
            const Answers rounded = read_answers(done(ROUNDED, d.ask).out, d.count);
            const bool close = lead < 5e-3, likewise = difference(&ours, &rounded, i) == MOST_TOKENS;
            fprintf(stderr, "\n    run %d, prompt %d, token %d: mini.c's has a lead of %.1e%s: %s", c, i, at, lead,
                    likewise ? ", and is this one if it rounds likewise" : "", d.ask);
            CU_ASSERT(lead >= 0 && (close || likewise));
            ties += close, by_rounding += !close, neither += !likewise;
        }
    }
    printf("%d runs, %d sequences: %d equal, %d near ties, %d by rounding ", runs, sequences,
           sequences - ties - by_rounding, ties, by_rounding);
    CU_ASSERT(50 * neither <= sequences + 49);
}

/* Of tokens alone a wrong weight of a far token is seldom seen. Here attention is beside weights that are known: these are
 * the steps of exercise 20. */
TEST(the_attention_of_the_gpus_half_has_the_right_weights) {
    static const char *const steps[] = {"texts of a block of tokens", "longer texts", "large scores, tokens left out"};
    for (int s = 0; s < 3 && getenv("MINI_GRADER"); s++)
        CU_ASSERT(!system(text_of(
            "said=$($MINI_GRADER --only 'mini.cu: %s' 2>&1) || { echo \"$said\" | grep Found: >&2; false; }", steps[s])));
}

/* No driver, no GPU, one without room. */
TEST(a_gpu_that_cannot_be_used_is_one_line) {
    static const char *const faults[][2] = {
        {"CUDA_CPU_NO_DEVICE", "1"}, {"CUDA_CPU_NO_DEVICE", "2"}, {"CUDA_CPU_MEM_MB", "20"}};
    for (size_t f = 0; getenv(EMULATED) && f < COUNT(faults); f++) {
        setenv(faults[f][0], faults[f][1], 1);
        assert_refused(EMULATED, text_of("%s Mum --max-tokens 3 --percent 100 0 100 0 100 0", small()), 1);
        unsetenv(faults[f][0]);
    }
}

/* Whichever launch fails: the line names its kernel, and has a remedy. */
TEST(a_launch_that_fails_is_one_line) {
    const char *ask =
        text_of("%s Mum --max-tokens 2 --attn-sparsity 0.3 --compress-cache --compress-weight --percent 100 0 100 0 100 0",
                small());
    for (int n = 1; getenv(EMULATED) && n <= 100; n += step(6)) {
        setenv("CUDA_CPU_LAUNCH_FAILS", text_of("%d", n), 1);
        const Result r = run(EMULATED, ask);
        CU_ASSERT(was_refused(&r, 1) && strstr(r.err, "_kernel: ") && strstr(r.err, "nvidia-smi shows"));
        unsetenv("CUDA_CPU_LAUNCH_FAILS");
    }
}

/* What mini prints without --json is each prompt and, as the engine's tokenizer has them, the tokens that it prints with
 * it. In the tokenizer's text each piece that is no UTF-8 has become U+FFFD. */
TEST(texts_are_those_of_the_tokens) {
    for (int m = 0; m < SUBJECTS; m++) {
        const char *ask = text_of("%s --prompts %s --max-tokens %d --percent 100 0 100 0 100 0", dir_of(&subjects[m]),
                                  prompts_file(PROMPTS), tokens()),
                   *bytes = DONE("%s", ask).out, *text = "";
        const Answers a = read_answers(DONE("%s --json", ask).out, PROMPTS);
        Tokenizer *t = tokenizer_of(m);
        for (int i = 0; i < PROMPTS; i++) {
            size_t len;
            text = text_of("%s%s%s\n", text, prompts[i], (char *)keep(tokenizer_decode(t, a.token[i], a.n[i], &len)));
        }
        tokenizer_close(t);
        while (*bytes) {
            uint32_t code;
            const size_t width = utf8_step(&code, bytes, strlen(bytes)), len = code == NO_CHARACTER ? 3 : width;
            if (strncmp(text, code == NO_CHARACTER ? "\357\277\275" : bytes, len) != 0) break;
            bytes += width;
            text += len;
        }
        CU_ASSERT_STRING_EQUAL(bytes, ""); /* what is left of the two where they differ */
        CU_ASSERT_STRING_EQUAL(text, "");
    }
}

/* Or a comparison would see little. */
TEST(texts_of_random_weights_are_of_many_tokens) {
    for (int m = 1; m < SUBJECTS; m++) {
        const Answers *a = engine_answers(m, PLAIN);
        int different = 0;
        for (int i = 0; i < PROMPTS; i++) {
            CU_ASSERT_EQUAL(a->n[i], tokens()); /* none ends early: the formulas below count on it */
            for (int t = 1; t < a->n[i]; t++) different += a->token[i][t] != a->token[i][t - 1];
        }
        CU_ASSERT(2 * different >= PROMPTS * tokens());
    }
}

// ---- Links and memory -----------------------------------------------------------------------------------------------

/* What mini reports on standard error. */
typedef struct {
    double peak[NTIERS], share[3][NTIERS];            /* bytes; of weights, cache and activations */
    double moved[LINKS], busy[LINKS], percent[LINKS]; /* bytes, seconds, of the time */
    int prompts, gbs, num_gpu_batches, tokens;
    double seconds, rate;
} Figures;

static Figures read_figures(const char *text) {
    static const char *const tiers[] = {"GPU", "CPU", "disk"};
    Figures f;
    bool whole = true;
    for (int t = 0; t < NTIERS; t++) {
        const char *at = strstr(text, text_of("mini: %s: ", tiers[t]));
        whole &= at && sscanf(at, "mini: %*[^:]: %lf bytes, %lf of weights, %lf of cache, %lf of activations", &f.peak[t],
                              &f.share[0][t], &f.share[1][t], &f.share[2][t]) == 4;
    }
    for (int c = 0; c < LINKS; c++) {
        const char *at = strstr(text, text_of("mini: %s: ", channel_name[c]));
        whole &= at && sscanf(at, "mini: %*[^:]: %lf bytes, %lf s, %lf%% of", &f.moved[c], &f.busy[c], &f.percent[c]) == 3;
    }
    const char *at = strstr(text, "mini: prompts ");
    whole &= at && sscanf(at, "mini: prompts %d, blocks of %d x %d, tokens %d, %lf s, %lf tokens/s", &f.prompts, &f.gbs,
                          &f.num_gpu_batches, &f.tokens, &f.seconds, &f.rate) == 6;
    CU_ASSERT_FATAL(whole);
    return f;
}

#define FIGURES(...) read_figures(DONE(__VA_ARGS__).err)

/* Bytes of a matrix of F16, or in groups of 64 along its rows; of a layer. */
static double matrix_bytes(int rows, int cols, bool packed) {
    return packed ? ceil(rows / 64.) * cols * quant_bytes(64) : 2. * rows * cols;
}
static double layer_bytes(const OptConfig *c, bool packed) {
    return 4 * matrix_bytes(c->h1, c->h1, packed) + matrix_bytes(c->h2, c->h1, packed) +
           matrix_bytes(c->h1, c->h2, packed) + 2. * (9 * c->h1 + c->h2);
}

/* Adds bytes that go from a tier to the GPU, or down from there: from disk over both links. */
static void add_moved(double moved[LINKS], Tier tier, bool up, double bytes) {
    if (tier >= TIER_CPU) moved[up ? CTOG : GTOC] += bytes;
    if (tier == TIER_DISK) moved[up ? DTOC : CTOD] += bytes;
}

/* Every sweep of a block streams the weights once. A sequence of s tokens moves, while n are generated, of which the last
 * is not computed with: its k and v go down once; each new token brings the past up, to the GPU or, delegated, no further
 * than the CPU. Then its query and the result, floats, cross ctog and gtoc instead. Of sparse attention K comes from disk
 * whole, of V what is read. Hidden states, floats, go down and up around each layer, unless a block is of one batch. Blocks
 * of 6 and 6; of 10 and 2, which are one batch; of 4 batches; all in one. */
TEST(links_carry_the_bytes_of_a_formula) {
    static const int blocks[][2] = {{2, 3}, {5, 2}, {1, 4}, {12, 1}};
    static const char *const share[] = {"100 0", "0 100", "0 0"};
    for (int m = 1; m < SUBJECTS; m++)
        for (int number = m; number < 27 * 2 * VARIANTS; number += step(59)) {
            const Variant v = number % VARIANTS;
            const int at = number / VARIANTS, gbs = blocks[(number + m) % 4][0], K = blocks[(number + m) % 4][1];
            const Tier weights = (Tier)(at % 3), cache = (Tier)(at / 3 % 3), activations = (Tier)(at / 9 % 3);
            const bool delegated = at / 27 || sparse_in(v);
            const OptConfig *c = &subjects[m].c;
            const double l = c->l, state = 4. * c->h1;
            /* The k of a token has `row` bytes in one layer. */
            const double row = packs(v, "cache") ? c->nh * quant_bytes(c->h1 / c->nh) : 2. * c->h1;
            double expected[LINKS] = {0};
            for (int i = 0; i < PROMPTS; i++) {
                const int s = encoded(m, prompts[i]).s, computed = s + tokens() - 1, block = i / (gbs * K) * gbs * K;
                if (i == block) add_moved(expected, weights, true, tokens() * l * layer_bytes(c, packs(v, "weight")));
                add_moved(expected, cache, false, l * 2 * computed * row);
                for (int len = s; len < computed; len++) {
                    const int read = sparse_in(v) ? sparse_tokens(variant[v].sparsity, len + 1) - 1 : len;
                    if (!delegated) add_moved(expected, cache, true, l * 2 * len * row);
                    if (!delegated || cache == TIER_GPU) continue;
                    expected[GTOC] += l * state, expected[CTOG] += l * state;
                    if (cache == TIER_DISK) expected[DTOC] += l * (len + read) * row;
                }
                for (int up = 0; up < 2 && imin(gbs * K, PROMPTS - block) > gbs; up++)
                    add_moved(expected, activations, up, l * computed * state);
            }
            const char *ask = question(m, v, PROMPTS,
                                       text_of("%s --percent %s %s %s --gpu-batch-size %d --num-gpu-batches %d",
                                               delegated && !sparse_in(v) ? "--cpu-cache-compute" : "", share[weights],
                                               share[cache], share[activations], gbs, K));
            const Figures f = FIGURES("%s", ask);
            for (int link = 0; link < LINKS; link++) {
                if (f.moved[link] != expected[link])
                    fprintf(stderr, "\n    %s: %s %.0f bytes, expected %.0f", ask, channel_name[link], f.moved[link],
                            expected[link]);
                CU_ASSERT_EQUAL(f.moved[link], expected[link]);
            }
        }
}

/* Whole tensors: the GPU and the CPU have their share of the weights but for one, which is streamed instead. */
TEST(shares_of_weights_are_streamed_to_within_a_tensor) {
    const OptConfig *c = &subjects[0].c;
    uint64_t seed = 5;
    const double whole = c->l * layer_bytes(c, false), largest = matrix_bytes(c->h2, c->h1, false) + 2 * c->h2;
    for (int i = 0; i < 20; i += step(7)) {
        const double wg = 100 * (test_random(&seed) + 1) / 2, wc = (100 - wg) * (test_random(&seed) + 1) / 2;
        const Figures f = FIGURES(TINY " Mum --max-tokens 3 --percent %.3f %.3f 100 0 100 0 --gpu-batch-size 1", wg, wc);
        CU_ASSERT(fabs(f.moved[CTOG] / 3 - whole * (100 - wg) / 100) <= largest);
        CU_ASSERT(fabs(f.moved[DTOC] / 3 - whole * (100 - wg - wc) / 100) <= largest);
    }
}

/* In percents whose fractions are rounded in a float, too: what GPU and CPU have together leaves nothing for the disk. */
TEST(shares_of_100_percent_leave_the_disk_empty) {
    static const char *const shares[] = {"41 59", "70 30", "29 71", "57 43"};
    for (int s = 0; s < 4; s++) {
        const Figures f = FIGURES(
            "%1$s Mum Dad boat --max-tokens 2 --percent %2$s %2$s %2$s --gpu-batch-size 1 "
            "--num-gpu-batches 3",
            small(), shares[s]);
        CU_ASSERT(f.peak[TIER_DISK] == 0 && f.moved[DTOC] == 0 && f.moved[CTOD] == 0);
    }
}

/* The GPU sees such a cache in prefill only, so that its slots hold no more than the prompts. */
TEST(a_delegated_cache_needs_no_more_of_the_GPU_for_more_tokens) {
    Figures f[2][2]; /* delegated or not, of few tokens and of many */
    for (int c = 0; c < 4; c++)
        f[c / 2][c % 2] = FIGURES("%s A --percent 100 0 0 100 100 0 --max-tokens %d %s", small(), c % 2 ? 40 : 2,
                                  c / 2 ? "" : "--cpu-cache-compute");
    CU_ASSERT(f[0][1].peak[TIER_GPU] == f[0][0].peak[TIER_GPU] && f[0][1].peak[TIER_CPU] > f[0][0].peak[TIER_CPU]);
    CU_ASSERT(f[1][1].peak[TIER_GPU] > f[1][0].peak[TIER_GPU]);
}

/* Tensors and sequences rest as a whole, so that a small run gets other shares than it asks for. The cache of one prompt is
 * more than GPU and CPU may have together: it goes to the disk. Of four equal ones the first does, the second and fourth go
 * to the GPU, the third to the CPU. A second block is dealt out like the first. A batch that is alone in its block leaves
 * its activations where they are. */
TEST(the_report_says_the_shares_that_were_met) {
    static const struct {
        const char *flags;
        double cache[NTIERS], activations[NTIERS];
    } cases[] = {
        {"A --percent 50 25 50 25 50 25", {0, 0, 1}, {0, 0, 0}},
        {"A A A A --percent 50 25 50 25 50 25 --gpu-batch-size 4", {.5, .25, .25}, {0, 0, 0}},
        {"A A A A --percent 50 25 50 25 50 25 --gpu-batch-size 2 --num-gpu-batches 2", {.5, .25, .25}, {.5, .25, .25}},
        {"A A A A --percent 50 25 50 25 50 25 --gpu-batch-size 1 --num-gpu-batches 2", {.5, 0, .5}, {.5, 0, .5}},
        {"A A A A --percent 50 25 50 50 50 50 --gpu-batch-size 1 --num-gpu-batches 1", {0, 1, 0}, {0, 0, 0}},
    };
    const double numbers = layer_bytes(&victim->c, false) / 2, largest = 64 * 192 / (3 * numbers);
    for (size_t c = 0; c < COUNT(cases); c++) {
        const Result r = DONE("%s %s --max-tokens 2", small(), cases[c].flags);
        const Figures f = read_figures(r.err);
        for (int t = 0; t < NTIERS; t++) {
            CU_ASSERT_EQUAL(f.share[1][t], cases[c].cache[t]);
            CU_ASSERT_EQUAL(f.share[2][t], cases[c].activations[t]);
        }
        const double *weights = f.share[0];
        CU_ASSERT(fabs(weights[TIER_GPU] - .5) <= largest && fabs(weights[TIER_CPU] - .25) <= largest);
        CU_ASSERT(fabs(weights[TIER_GPU] + weights[TIER_CPU] + weights[TIER_DISK] - 1) <= 2e-4);
        CU_ASSERT_PTR_NOT_NULL(strstr(r.err, "of activations; weights of F16 stay in the checkpoint\n"));
    }
}

/* A long prompt has more than half of all tokens and comes first, so that the CPU gets it. The three short prompts then fit
 * the GPU's half. So the links carry the bytes of the long prompt alone: those of all four less those of three short ones.
 */
TEST(a_share_of_sequences_is_one_of_their_tokens) {
    static const char *const shares[][2] = {{"50 50 100 0", "0 100 100 0"}, {"100 0 50 50", "100 0 0 100"}};
    for (int kind = 0; kind < 2; kind++) {
        Figures f[3]; /* shared, all below, all below and short */
        for (int r = 0; r < 3; r++)
            f[r] = FIGURES("%s %s A A A --max-tokens 2 --gpu-batch-size 1 --num-gpu-batches 4 --percent 100 0 %s", small(),
                           r < 2 ? "zzzzzzzzzzzzzzzzzzzz" : "A", shares[kind][r > 0]);
        for (int c = CTOG; c <= GTOC; c++)
            CU_ASSERT(f[0].moved[c] > 0 && f[0].moved[c] == f[1].moved[c] - f[2].moved[c] * 3 / 4);
    }
}

/* A block begins where the one before it began; so a search for ten blocks finds what it finds for one. */
TEST(many_blocks_need_the_memory_of_one) {
    static const char *const flags[] = {"--percent 30 30 30 30 30 30 --gpu-batch-size 1 --num-gpu-batches 2",
                                        "--gpu-batch-size 2 --num-gpu-batches 1 --threads 1 --cpu-mem 1e9 --gpu-mem 7e5"};
    for (int searched = 0; searched < 2; searched++) {
        const Figures one = FIGURES("%s A A --max-tokens 3 %s", small(), flags[searched]),
                      ten =
                          FIGURES("%s A A A A A A A A A A A A A A A A A A A A --max-tokens 3 %s", small(), flags[searched]);
        CU_ASSERT_EQUAL(memcmp(one.peak, ten.peak, sizeof one.peak), 0);
        CU_ASSERT(searched || ten.moved[CTOG] > 9 * one.moved[CTOG]);
    }
}

/* In decoding a layer of this model has fewer than 10^6 multiplications in each product, and more in attention, 44 x 64 for
 * each of the 370 tokens that the longest prompt has. So threads share the head and the attention of three layers, four
 * times for each token; a helper waits once for each. */
TEST(threads_share_the_attention_to_a_long_context) {
    char lines[370 + 43 * 2 + 1];
    long waits[2];
    memset(lines, '\'', sizeof lines); /* a word, a piece, a token each */
    for (size_t i = 369; i < sizeof lines; i += 2) lines[i] = '\n';
    write_file(small(), "long.txt", lines, sizeof lines);
    for (int many = 0; many < 2; many++) {
        struct rusage before, after;
        getrusage(RUSAGE_CHILDREN, &before);
        DONE(
            "%1$s --prompts %1$s/long.txt --max-tokens %2$d --threads 2 --no-overlap --percent 100 0 100 0 100 0 "
            "--gpu-batch-size 44",
            small(), many ? 11 : 1);
        getrusage(RUSAGE_CHILDREN, &after);
        waits[many] = after.ru_nvcsw - before.ru_nvcsw;
    }
    printf("%ld waits for 10 tokens, ", waits[1] - waits[0]);
    CU_ASSERT(waits[1] - waits[0] >= 25);
}

/* In doubles .28 x 25 is above 7. Yet 7 of 25 past tokens are read, as with a share that is a little smaller. Of a share
 * near 1 all are read. */
TEST(rounding_adds_no_token_to_a_sparse_share) {
    static const char *const equal[][2] = {{"--attn-sparsity 0.28", "--attn-sparsity 0.2799999"},
                                           {"--attn-sparsity 0.9999", "--cpu-cache-compute"}};
    for (int pair = 0; pair < 2; pair++) {
        double read[2];
        for (int i = 0; i < 2; i++)
            read[i] = FIGURES("%s A --max-tokens 30 --percent 100 0 0 0 100 0 %s", small(), equal[pair][i]).moved[DTOC];
        CU_ASSERT(read[0] > 0 && read[0] == read[1]);
    }
}

/* With the weights on the GPU, three prompts in one batch move what they move alone, though one of them ends after its
 * second token and another goes on: its cache, its queries and the results rest from then on. */
TEST(a_sequence_that_has_ended_moves_nothing) {
    static const char *const words[] = {"Mum", "A", "cat", "Mum A cat"};
    static const char *const places[] = {"0 100 100 0", "0 0 100 0", "0 100 100 0 --cpu-cache-compute",
                                         "0 0 100 0 --cpu-cache-compute"};
    const Answers two = read_answers(DONE("%s Mum --json --max-tokens 2 --percent 100 0 100 0 100 0", small()).out, 1);
    const int first = two.token[0][0], second = two.token[0][1];
    const char *dir = copy_of_victim();
    CU_ASSERT_NOT_EQUAL(first, second);
    spoil(dir, "config.json", "\"eos_token_id\": 2", text_of("\"eos_token_id\": %d", second));
    for (size_t p = 0; p < COUNT(places); p++) {
        Figures f[4];
        for (int w = 0; w < 4; w++)
            f[w] = FIGURES("%s %s --json --max-tokens 9 --gpu-batch-size 3 --percent 100 0 %s", dir, words[w], places[p]);
        CU_ASSERT(f[0].tokens == 2 && f[1].tokens > 2 && f[2].tokens > 2);
        CU_ASSERT_EQUAL(f[3].tokens, f[0].tokens + f[1].tokens + f[2].tokens);
        for (int c = 0; c < LINKS; c++) CU_ASSERT_EQUAL(f[3].moved[c], f[0].moved[c] + f[1].moved[c] + f[2].moved[c]);
    }
    const Answers ended = read_answers(DONE("%s Mum --json --max-tokens 9", dir).out, 1); /* </s> is not printed */
    CU_ASSERT(ended.n[0] == 1 && ended.token[0][0] == first);
}

/* So many bytes at such a rate take so long at least, for the link and for the run. The last digit of a time is a
 * millisecond, that of a share and of tokens a second a tenth; so each may be half of one off. */
TEST(a_slowed_link_takes_the_time_of_its_bytes_and_figures_agree) {
    for (int overlap = 0; overlap < 2; overlap++) {
        const Figures f =
            FIGURES("%s --prompts %s --max-tokens 4 --percent 0 0 100 0 100 0 --gpu-batch-size 12 --dtoc 5e6 %s", small(),
                    prompts_file(PROMPTS), overlap ? "" : "--no-overlap");
        const double first = layer_bytes(&victim->c, false), off = .0005 / (f.seconds - .0005);
        CU_ASSERT(f.moved[DTOC] > 1e6 && f.busy[DTOC] >= f.moved[DTOC] / 5e6 - .001);
        CU_ASSERT(f.seconds >= (f.moved[DTOC] - first) / 5e6 - .01); /* the first layer is not timed with it */
        CU_ASSERT(f.tokens == 4 * PROMPTS && fabs(f.rate - f.tokens / f.seconds) <= .05 + f.tokens / f.seconds * off);
        CU_ASSERT(fabs(f.percent[DTOC] - 100 * f.busy[DTOC] / f.seconds) <=
                  .05 + 100 * off * (1 + f.busy[DTOC] / f.seconds));
    }
}

/* A slice of a trace, a bar. Rows 0 to 2 are the threads that move, 3 computes, 4 to 7 are the links
 * (scripts/plot_trace.py). */
typedef struct {
    char name[30];
    int row, i, j, k;
    double begin, end, bytes; /* microseconds */
} Bar;
enum { SLICES = 20000, COMPUTES = 3 };
static Bar slices[SLICES];

/* Reads them, and returns how many they are. */
static int read_slices(const char *path) {
    int n = 0;
    for (const char *at = keep(contents(path, NULL)); (at = strstr(at, "{\"ph\":\"X\"")); at++, n++) {
        Bar *s = &slices[n];
        CU_ASSERT_FATAL(n < SLICES &&
                        sscanf(at,
                               "{\"ph\":\"X\",\"name\":\"%29[a-z_]\",\"cat\":\"%*[a-z]\",\"pid\":1,\"tid\":%d,\"ts\":%lf,"
                               "\"dur\":%lf,\"args\":{\"i\":%d,\"j\":%d,\"k\":%d,\"bytes\":%lf,",
                               s->name, &s->row, &s->begin, &s->end, &s->i, &s->j, &s->k, &s->bytes) == 8);
        CU_ASSERT_FATAL(s->begin >= 0 && s->end >= 0 && s->row >= 0 && s->row <= COMPUTES + LINKS);
        s->end += s->begin;
    }
    return n;
}

/* Slices of a row do not overlap; the links' have the bytes that are reported; each square is computed once; and moves are
 * beside computing, but with --no-overlap are not. With mini.cu, too, whose links are streams. */
TEST(a_trace_shows_what_each_thread_and_link_did) {
    enum { SQUARES = 4 * 4 * 2 }; /* 3 layers and the head, 4 tokens, 2 batches */
    const char *path = text_of("%s/trace.json", temp_dir());
    for (int way = 0; way < 4; way++) {
        const bool no_overlap = way % 2;
        const char *program = way / 2 ? EMULATED : MINI;
        double bytes[LINKS] = {0}, overlap = 0; /* microseconds in which one moves while another computes */
        int squares = 0;
        if (!getenv(program)) continue;
        const Figures f =
            read_figures(done(program, text_of("%s A Mum c d --max-tokens 4 --percent 0 50 0 50 0 100 --gpu-batch-size 2 "
                                               "--num-gpu-batches 2 --ctog 1e8 --dtoc 5e7 --trace %s %s",
                                               small(), path, no_overlap ? "--no-overlap" : ""))
                             .err);
        for (Bar *s = slices, *end = slices + read_slices(path); s < end; s++) {
            CU_ASSERT(s->i >= 0 && s->i < 4 && s->j >= 0 && s->j <= 3 && s->k >= 0 && s->k < 2);
            if (s->row > COMPUTES) bytes[s->row - 4] += s->bytes;
            squares += s->row == COMPUTES && !strcmp(s->name, "compute");
            if (s->row == 0) CU_ASSERT_STRING_EQUAL(s->name, "load_weight");
            if (s->row > COMPUTES)
                CU_ASSERT(strncmp(s->name, s->row % 2 ? "load" : "store", 4) != 0); /* gtoc, ctod: down */
            for (Bar *b = slices; b < s; b++) {
                const double common = fmin(s->end, b->end) - fmax(s->begin, b->begin);
                if (s->row == b->row) CU_ASSERT(common <= 1e-6);
                if (imax(s->row, b->row) == COMPUTES && s->row != b->row) overlap += fmax(0, common);
            }
        }
        for (int c = 0; c < LINKS; c++) CU_ASSERT_EQUAL(bytes[c], f.moved[c]);
        CU_ASSERT_EQUAL(squares, SQUARES);
        CU_ASSERT((overlap > 1e-6) == !no_overlap);
        CU_ASSERT(!system(text_of(
            "for how in lanes squares; do python3 -B scripts/plot_trace.py --$how %s %s.svg || exit 1; done", path, path)));
    }
}

/* With mini.cu a delegated query waits in its stream for the kernels that make it. Its slice begins when they are done, and
 * not when it was posted: it is shorter than what came before it in its square. */
TEST(the_slice_of_a_copy_has_no_time_of_kernels) {
    double before = 0, copying = 0, begin = 0;
    const char *path = text_of("%s/trace.json", temp_dir());
    if (!getenv(EMULATED)) return;
    done(EMULATED,
         text_of(TINY " Mum --max-tokens 9 --threads 1 --percent 100 0 0 100 0 100 --cpu-cache-compute --trace %s", path));
    const int n = read_slices(path);
    for (int copy = 0; copy < n; copy++) {
        const Bar *c = &slices[copy];
        if (c->row != COMPUTES + 1 + GTOC || c->i == 0) continue;
        for (int at = 0; at < n; at++) {
            const Bar *square = &slices[at];
            if (square->row == COMPUTES && square->i == c->i && square->j == c->j) begin = square->begin;
        }
        before += c->begin - begin;
        copying += c->end - c->begin;
    }
    CU_ASSERT(copying > 0 && copying < before);
}

/* With sparse attention v of a delegated sequence comes from the disk while the GPU attends for another one. The main
 * thread, which has posted that, does not wait for it: in most squares the time from the first copy of v to the last one is
 * short beside the time before them. */
TEST(late_v_does_not_wait_for_kernels) {
    int squares = 0, slow = 0;
    const char *path = text_of("%s/trace.json", temp_dir());
    if (!getenv(EMULATED)) return;
    done(EMULATED,
         text_of(TINY " abcdefgh jklmnopqrstuvwxyzabcdefghjklmnopqrstuvwxyzabcdefghjklmnopqrstuvwxyz --max-tokens 6 "
                      "--threads 1 --percent 100 0 85 0 100 0 --cpu-cache-compute --attn-sparsity .3 --trace %s",
                 path));
    const int n = read_slices(path);
    for (const Bar *square = slices; square < slices + n; square++) {
        const Bar *first = NULL, *last = NULL;
        if (square->row != COMPUTES) continue;
        for (const Bar *c = slices; c < slices + n; c++)
            if (c->row == COMPUTES + 1 + DTOC && !strcmp(c->name, "compute") && c->i == square->i && c->j == square->j) {
                first = first ? first : c;
                last = c;
            }
        if (!first) continue;
        slow += last->end - first->begin > (first->begin - square->begin) / 3;
        squares++;
    }
    CU_ASSERT(squares > 0 && 2 * slow < squares);
}

/* Where only percentages are given, a batch has 32 sequences, and a block one batch. */
TEST(a_batch_has_32_sequences_unless_it_is_said) {
    char words[33 * 2 + 1] = "";
    for (int i = 0; i < 33; i++) strcat(words, " A");
    const Figures f = FIGURES("%s %s --max-tokens 1 --percent 100 0 100 0 100 0", small(), words);
    CU_ASSERT(f.prompts == 33 && f.gbs == 32 && f.num_gpu_batches == 1 && f.tokens == 33);
}

/* A policy runs in the memory that it reports, is refused in a byte less, and takes no more of this machine than that. */
TEST(a_policy_runs_in_its_memory_and_not_in_less) {
    static const char *const tier[] = {"gpu", "cpu"};
    struct rusage own;
    for (int i = 0; i < PLACEMENTS; i += step(13)) {
        const int m = i % SUBJECTS;
        const Variant v = i / SUBJECTS % VARIANTS;
        const char *base = question(m, v, PROMPTS, random_policy(m, i, v));
        const Result r = DONE("%s --gpu-mem 1e9 --cpu-mem 1e9", base);
        const Figures f = read_figures(r.err);
        /* the tiers, the mapped files, 8 MB for all else; in mini-all this suite may have more */
        const double most = f.peak[0] + f.peak[1] + f.peak[2] + (m ? 2e6 : 12e6) + 8e6;
        CHECK(!getrusage(RUSAGE_SELF, &own));
        CU_ASSERT(r.resident <= fmax(most, own.ru_maxrss * 1024.));
        const Figures again =
            FIGURES("%s --gpu-mem %.0f --cpu-mem %.0f", base, f.peak[TIER_GPU], fmax(f.peak[TIER_CPU], 1));
        CU_ASSERT_EQUAL(memcmp(f.peak, again.peak, sizeof f.peak), 0);
        for (int t = TIER_GPU; t <= TIER_CPU; t++)
            if (f.peak[t] > 1) assert_refused(MINI, text_of("%s --%s-mem %.0f", base, tier[t], f.peak[t] - 1), 2);
    }
}

/* Without --percent: what is found runs within the memory that there is, and gives the same tokens; or nothing is found. */
TEST(what_is_searched_for_keeps_to_the_memory) {
    uint64_t seed = 3;
    int found = 0;
    for (int i = 0; i < 40; i += step(5)) {
        const int m = i % SUBJECTS;
        const double gpu = test_spread(&seed, m ? 1e5 : 2e6, 2e7), cpu = test_spread(&seed, 1e5, 2e7);
        const char *flags =
            text_of("--gpu-mem %.0f --cpu-mem %.0f --threads 1 %s", gpu, cpu, i % 3 ? "" : "--gpu-batch-size 3");
        Result r = run(MINI, question(m, PLAIN, PROMPTS, flags));
        if (!r.status) {
            const Figures f = read_figures(r.err);
            CU_ASSERT(f.peak[TIER_GPU] <= gpu && f.peak[TIER_CPU] <= cpu);
            compare(m, PLAIN, PROMPTS, "searched", r.out, 1e-3), found++;
        } else
            CU_ASSERT(was_refused(&r, 2));
    }
    CU_ASSERT(found > 0);
    at_most_one_of_fifty_differs();
}

// ---- A.3 ------------------------------------------------------------------------------------------------------------

/* mini prints "wg 0.5", a line each. */
static double printed(const char *text, const char *name) {
    const char *at = strstr(text_of("\n%s", text), text_of("\n%s ", name));
    return at ? strtod(at + strlen(name) + 2, NULL) : NAN;
}

/* mini's placement satisfies the engine's rows, costs what it says and no more than the engine's, which is therefore the
 * same where there is only one best. And none that is as good has less on slower tiers: the CPU is one step from the GPU,
 * the disk two. */
static void check_optimum(Lp *lp, double best, const char *out, double sequences) {
    LpAnswer fewest;
    double x[NVARS], cost = 0, needless = 0;
    for (int f = 0; f < NFRACTIONS; f++) x[f] = printed(out, fraction_name[f]);
    x[T_PRE] = printed(out, "T_pre"), x[T_GEN] = printed(out, "T_gen");
    for (int i = 0; i < lp->m; i++) {
        const double excess = lp_excess(&lp->row[i], x, NVARS);
        double size = fabs(lp->row[i].b);
        for (int v = 0; v < NVARS; v++) size = fmax(size, fabs(lp->row[i].a[v] * x[v]));
        CU_ASSERT((lp->row[i].equal ? fabs(excess) : fmax(excess, 0)) <= 1e-8 * size);
    }
    for (int v = 0; v < NVARS; v++) cost += lp->c[v] * x[v];
    CU_ASSERT(fabs(cost - best) <= 1e-8 * best && fabs(printed(out, "T") / sequences - cost) <= 1e-8 * cost);
    LpRow *row = lp_row(lp, "as good as the best", false, best * (1 + 1e-9));
    memcpy(row->a, lp->c, sizeof row->a);
    for (int v = 0; v < LP_MAX_VARS; v++) lp->c[v] = v < NFRACTIONS ? v % NTIERS : 0;
    lp_solve(&fewest, lp);
    for (int f = 0; f < NFRACTIONS; f++) needless += lp->c[f] * (x[f] - fewest.x[f]);
    CU_ASSERT(fewest.verdict == LP_OPTIMAL && fabs(needless) < 1e-4);
}

/* A directory with the config.json of a model of the paper, which is all that a search reads of it. */
static const char *paper_model(const OptConfig *c) {
    const char *dir = text_of("%s", temp_dir());
    write_config(dir, c);
    return dir;
}

/* Of the paper's machine each number becomes up to four times larger or smaller, and one of its rates so low that its row
 * binds, until there have been a hundred machines on which some placement fits. */
TEST(the_papers_cost_model_is_the_engines) {
    static const char *const names[] = {"opt-125m", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    uint64_t seed = 11;
    int fit = 0, asked = 0;
    for (; fit < 100; asked++) {
        const Block b = {between(&seed, 16, 1500), between(&seed, 2, 200), 4 * between(&seed, 1, 24),
                         between(&seed, 1, 12)};
        const OptConfig config = opt_named(names[test_below(&seed, COUNT(names))]);
        const char *dir = paper_model(&config);
        Error err;
        Hardware h;
        ASSERT_OK(hardware_read(&h, "hardware/t4.json", &err));
        double *const rates[] = {h.bdw[CTOG], h.bdw[GTOC], h.bdw[DTOC], h.bdw[CTOD], h.mm_flops, h.bmm_flops, h.cpu_flops};
        for (int t = 0; t < NTIERS; t++) h.mem[t] *= test_spread(&seed, .25, 4);
        for (int r = 0; r < 7 * 2; r++) rates[r / 2][r % 2] *= test_spread(&seed, .25, 4);
        rates[test_below(&seed, 7)][test_below(&seed, 2)] /= 300;
        FILE *f = fopen(in_dir(dir, "hardware.json"), "w");
        CHECK(f);
        hardware_write(&h, NULL, f);
        CHECK(fclose(f) == 0);
        Lp lp;
        LpAnswer answer;
        paper_lp(&lp, &h, &config, &b);
        lp_solve(&answer, &lp);
        const char *ask = text_of(
            "%1$s --policy %2$d --max-tokens %3$d --hardware %1$s/hardware.json --gpu-batch-size %4$d "
            "--num-gpu-batches %5$d",
            dir, b.s, b.n, b.gbs, b.num_gpu_batches);
        if (answer.verdict == LP_OPTIMAL) {
            check_optimum(&lp, answer.value, done(MINI, ask).out, 1. * b.gbs * b.num_gpu_batches);
            fit++;
        } else {
            assert_refused(MINI, ask, 2);
        }
    }
    printf("%d machines, %d fit ", asked, fit);
    CU_ASSERT(fit < asked);
}

/* Without a given block the one of most tokens a second is taken: no other is better. */
TEST(the_search_finds_no_worse_block_than_those_tried_by_hand) {
    static const int blocks[][2] = {{4, 1}, {8, 3}, {16, 5}, {32, 8}, {48, 3}, {64, 6}, {24, 12}, {12, 20}};
    const OptConfig config = opt_named("opt-30b");
    const char *ask = text_of("%s --policy 512 --hardware hardware/t4.json --max-tokens 32", paper_model(&config));
    Result r = done(MINI, ask);
    const double best = printed(r.out, "throughput");
    const double bls = printed(r.out, "gbs") * printed(r.out, "num_gpu_batches");
    CU_ASSERT(best > 0 && fabs(best - bls * 32 / printed(r.out, "T")) <= 1e-9 * best); /* all tokens of the block */
    for (size_t b = 0; b < COUNT(blocks); b++) {
        r = run(MINI, text_of("%s --gpu-batch-size %d --num-gpu-batches %d", ask, blocks[b][0], blocks[b][1]));
        CU_ASSERT(r.status == 2 || printed(r.out, "throughput") <= best * (1 + 1e-9));
    }
}

/* A flag says a link's rate in both stages: the answer is that for a machine whose file says so. */
TEST(a_link_of_the_command_line_is_one_of_the_file) {
    const OptConfig config = opt_named("opt-30b");
    const char *ask = text_of("%s --policy 512 --max-tokens 32 --hardware", paper_model(&config));
    const char *file = text_of("%s/link.json", temp_dir());
    for (int c = 0; c < LINKS; c++) {
        CU_ASSERT(!system(text_of("sed 's/\"%s_bdw\": [^,]*/\"%s_bdw\": 1e7/' hardware/t4.json >%s", channel_name[c],
                                  channel_name[c], file)));
        Result a = DONE("%s hardware/t4.json --%s 1e7", ask, channel_name[c]), b = DONE("%s %s", ask, file);
        CU_ASSERT_STRING_EQUAL(a.out, b.out);
    }
}

/* Blocks are tried that have more places than there are prompts, as long as each batch has one: seven prompts may go into
 * 2 x 4 at once, and not only into 1 x 7. But a place without a prompt makes no tokens, so that 1 x 7 is better where both
 * fit. One batch alone may be larger than the prompts, too. */
TEST(a_block_may_have_more_places_than_there_are_prompts) {
    static const struct {
        const char *flags;
        int gbs, num_gpu_batches;
    } cases[] = {{"--gpu-mem 8e6 --cpu-mem 4e6", 2, 4},
                 {"--gpu-mem 6291456 --cpu-mem 1e9", 1, 7},
                 {"--gpu-mem 8388608 --cpu-mem 1e9 --num-gpu-batches 1", 8, 1}};
    for (int c = 0; c < 3; c++) {
        const Figures f = FIGURES(
            TINY " Mum Mum Mum Mum Mum Mum Mum --max-tokens 2 --threads 1 --hardware hardware/t4.json %s", cases[c].flags);
        CU_ASSERT(f.gbs == cases[c].gbs && f.num_gpu_batches == cases[c].num_gpu_batches);
    }
}

/* Where all fits and nothing binds but the processor, T / bls is the same for all blocks. Then GPU batches are as large as
 * they can be with a prompt in each place: 48 is the last size before 50, and 4 before 7. */
TEST(of_blocks_that_are_equally_good_the_largest_batch_is_taken) {
    static const int count[][2] = {{50, 48}, {7, 4}};
    for (int c = 0; c < 2; c++) {
        char lines[100];
        for (int i = 0; i < 2 * count[c][0]; i++) lines[i] = i % 2 ? '\n' : 'A';
        write_file(small(), "equal.txt", lines, 2 * (size_t)count[c][0]);
        const Figures f = FIGURES("%1$s --prompts %1$s/equal.txt --max-tokens 2 --gpu-mem 1e9 --cpu-mem 1e9", small());
        CU_ASSERT(f.gbs == count[c][1] && f.num_gpu_batches == 1);
    }
}

/* A search says which time it expects: for as many prompts as the block has, that of --policy with the same block. A given
 * placement was not searched for. */
TEST(a_searched_run_says_the_time_that_was_predicted) {
    static const char machine[] =
        "{\"gmem\":1e9,\"cmem\":1e9,\"nmem\":1e9,\"ctog_bdw\":1e9,\"gtoc_bdw\":1e9,\"dtoc_bdw\":1e9,"
        "\"ctod_bdw\":1e9,\"mm_flops\":1e7,\"bmm_flops\":1e7,\"cpu_flops\":1e7}";
    write_file(small(), "slow.json", machine, strlen(machine));
    const char *flags = text_of("--max-tokens 9 --gpu-batch-size 2 --num-gpu-batches 1 --hardware %s/slow.json", small());
    const Result r = DONE(TINY " Mum Mum %s", flags), policy = DONE(TINY " --policy 2 %s", flags);
    double predicted = 0, T = printed(policy.out, "T");
    const char *at = strstr(r.err, "mini: A.3 predicted ");
    CU_ASSERT_FATAL(at && sscanf(at, "mini: A.3 predicted %lf s", &predicted) == 1);
    if (fabs(predicted - T) > .0006) fprintf(stderr, "\n    %g s, and %g s by --policy", predicted, T);
    CU_ASSERT(T > .1 && fabs(predicted - T) <= .0006);
    CU_ASSERT_PTR_NULL(strstr(DONE("%s A --max-tokens 2 --percent 100 0 100 0 100 0", small()).err, "predicted"));
}

/* When a tier lacks room, the next linear program has less of it. The room that another tier has left does not count: here
 * the GPU lacks room, and the shares that are found still satisfy A.3's row of the CPU, with all of its memory: l layers'
 * share of the weights, and one layer of those on disk (cpu_peak^g). */
TEST(a_search_gives_no_tier_more_than_it_has) {
    const Figures f = FIGURES(TINY " Mum Mum Mum Mum Mum Mum Mum --max-tokens 2 --threads 1 --gpu-mem 7e6 --cpu-mem 3e6");
    const double weight = 8. * 256 * 256 + 4. * 256 * 1024;
    CU_ASSERT(f.share[0][TIER_DISK] > .1 && (f.share[0][TIER_CPU] * 6 + f.share[0][TIER_DISK]) * weight <= 3e6);
    /* the first program is solved again without the bytes that A.3 does not count: here nothing else is found */
    DONE(TINY " Mum Mum Mum --max-tokens 4 --threads 1 --hardware hardware/t4.json --gpu-mem 6e6 --cpu-mem 3e6");
}

// ---- Wrong use, spoilt files, no room -------------------------------------------------------------------------------

#define PERCENT "--percent 20 30 20 30 20 30 --gpu-batch-size 2 --num-gpu-batches 2 --threads 2"
#define ALL_ON_GPU "--percent 100 0 100 0 100 0"
#define WHOLE_GPU ALL_ON_GPU " --max-tokens 1"

/* Of the values of flags, each kind has its bounds, and each kind of mistake is tried with one flag. */
TEST(wrong_use_is_refused_in_one_line) {
    static const char *const flags[] = {"--max-tokens 0",
                                        "--max-tokens x",
                                        "--max-tokens",
                                        "--max-tokens 2.5",
                                        "--max-tokens 400",
                                        "--percent 101 0 0 0 0 0",
                                        "--percent 60 50 0 0 0 0",
                                        "--percent nan 0 0 0 0 0",
                                        "--percent -1 0 0 0 0 0",
                                        "--percent 1 2 3",
                                        "--percent 0 0 0 0 0 5x",
                                        "--percent 0 0 0 0 0 0 --gpu-mem 1e3",
                                        "--percent 0 100 0 100 0 100 --cpu-mem 1e3",
                                        "--attn-sparsity 0",
                                        "--attn-sparsity 1.5",
                                        "--gpu-mem 0",
                                        "--gpu-mem 1e3",
                                        "--json another",
                                        "--threads 100000",
                                        "--wrong",
                                        "-n 4",
                                        "-h",
                                        "--prompts models/prompts.txt",
                                        "--policy 512",
                                        "--hardware none.json",
                                        "--hardware models/prompts.txt",
                                        PERCENT " --offload-dir nowhere"};
    const OptConfig large = opt_named("opt-30b");
    const char *dir = small();
    for (size_t f = 0; f < COUNT(flags); f++) assert_refused(ASAN, text_of("%s Mum %s", dir, flags[f]), 2);
    assert_refused(MINI, text_of("%s Mum --trace nowhere/at/all " PERCENT, dir), 1);
    assert_refused(MINI, " ", 2);
    assert_refused(MINI, dir, 2); /* no prompt */
    assert_refused(MINI, "-h", 2);
    assert_refused(MINI, "--prompts models/prompts.txt", 2);
    static const char *const policy[] = {"--percent 0 0 0 0 0 0", "--json", "--trace nowhere",
                                         "--prompts models/prompts.txt"};
    for (int f = 0; f < 4; f++) assert_refused(MINI, text_of("%s --policy 512 %s", dir, policy[f]), 2);
    assert_refused(MINI, "nowhere Mum", 2);
    assert_refused(MINI, "nowhere --policy 512", 2);
    assert_refused(MINI, text_of("%s --policy 512 --gpu-mem 1e6", paper_model(&large)), 2); /* an impossible machine */
    const Result help = DONE("--help");
    CU_ASSERT(!*help.err && strstr(help.out, "--num-gpu-batches") && strstr(help.out, "--attn-sparsity"));
    CU_ASSERT(strstr(help.out, "mini MODEL (PROMPT ... | --prompts FILE | --policy S) [FLAGS]\n") == help.out);
    for (const char *line = help.out; (line = strstr(line, "\n  --")); line++) /* what has a default says it last */
        CU_ASSERT(strchr("pnjh", line[5]) || strchr(line + 1, '\n')[-1] == ')');
}

/* More prompts than a block has places, though the product of its sizes is beyond an int. */
TEST(a_block_may_have_more_places_than_an_int_can_count) {
    enum { MANY = 46341 };
    char *lines = keep(calloc(MANY, 2));
    for (int i = 0; i < MANY; i++) memcpy(lines + 2 * i, "A\n", 2);
    write_file(small(), "many.txt", lines, 2 * MANY);
    const Figures f =
        FIGURES("%1$s --prompts %1$s/many.txt --max-tokens 1 " ALL_ON_GPU " --gpu-batch-size 46341 --num-gpu-batches 46341",
                small());
    CU_ASSERT(f.prompts == MANY && f.tokens == MANY);
}

// ---- Refusals that say the cause ------------------------------------------------------------------------------------

/* It is refused with that status, and says so. */
static void assert_says(const char *text, int status, const char *said) {
    const Result r = run(MINI, text);
    const bool right = was_refused(&r, status) && strstr(r.err, said);
    if (!right) fprintf(stderr, "\n    %s: status %d, without \"%s\": %s%s", text, r.status, said, r.out, r.err);
    CU_ASSERT(right);
}

/* Makes a file of the victim's copy what it cannot be: 0: missing, 1: a pipe that nobody writes, 2: a directory. */
static const char *with_strange(const char *file, int kind) {
    const char *dir = copy_of_victim();
    CHECK(unlink(in_dir(dir, file)) == 0);
    if (kind == 1) CHECK(mkfifo(in_dir(dir, file), 0600) == 0);
    if (kind == 2) CHECK(mkdir(in_dir(dir, file), 0700) == 0);
    return dir;
}

TEST(a_file_that_cannot_be_read_is_refused_with_the_cause) {
    static const char *const said[] = {"o such file", "is no regular file", "is no regular file"};
    for (int f = 0; f < 4; f++)
        for (int kind = 0; kind < 3; kind++)
            assert_says(text_of("%s Mum " PERCENT, with_strange(files[f], kind)), 2,
                        f == 3 && kind == 0 ? "no readable file" : said[kind]);
    for (int n = 1, refused = 0; refused < 4 && n < 40; n++) { /* as where the user has no right to read one of them */
        char fault[20];
        snprintf(fault, sizeof fault, "open:%d:13", n);
        with.fault = fault;
        const Result r = run(MINI, text_of("%s Mum " WHOLE_GPU, small()));
        if (r.status == 0) continue;
        CU_ASSERT(was_refused(&r, 2) && (strstr(r.err, strerror(EACCES)) || strstr(r.err, "no readable file")));
        refused++;
    }
    assert_says(text_of("%s --prompts none.txt", small()), 2, "o such file");
    assert_says(text_of("%s --prompts models", small()), 2, "models: is empty, has a NUL byte, or cannot be read");
    assert_says(text_of("%s --prompts /dev/null", small()), 2, "/dev/null: is empty");
    write_file(small(), "blank.txt", "\r\n\n", 3);
    assert_says(text_of("%1$s --prompts %1$s/blank.txt", small()), 2, "blank.txt: has no prompt");
    write_file(small(), "nul.txt", "a\nb\0c\n", 6);
    assert_says(text_of("%1$s --prompts %1$s/nul.txt", small()), 2, "nul.txt: is empty, has a NUL byte");
    const char *dir = text_of("%s/m[1]d", temp_dir());
    CHECK(mkdir(dir, 0700) == 0);
    for (int f = 0; f < 4; f++) copy_file(small(), dir, files[f]);
    assert_says(text_of("'%s' Mum", dir), 2, "no readable file (*, ?, [ and \\ in a directory match others)");
}

/* A file that ends early, a tensor of another shape or type, a matrix whose rows are no whole groups. */
TEST(a_model_that_is_not_as_it_should_be_is_refused_with_the_cause) {
    size_t size;
    const char *dir = copy_of_victim();
    char *file = keep(contents(in_dir(dir, "model.safetensors"), &size));
    write_file(dir, "model.safetensors", file, size - 2);
    assert_says(text_of("%s Mum", dir), 1, "bytes are not in its file; is that whole?");
    spoil(dir = copy_of_victim(), "model.safetensors", "[1024,64]", "[64,1024]");
    assert_says(text_of("%s Mum", dir), 1, "embed_tokens.weight: is not there as F16 of 1024 x 64");
    spoil(dir = copy_of_victim(), "model.safetensors", "\"F16\"", "\"F32\"");
    assert_says(text_of("%s Mum", dir), 1, "the engine reads other types");
    Model odd = model_of(victim);
    odd.config.h2 = 96;
    write_model(dir = copy_of_victim(), &odd);
    DONE("%s Mum --max-tokens 2 --compress-cache " ALL_ON_GPU, dir);
    assert_says(text_of("%s Mum --max-tokens 2 --compress-weight " ALL_ON_GPU, dir), 2, "multiples of 64");
    spoil(dir = copy_of_victim(), "vocab.json", "{", "{\"q z\":300,");
    assert_says(text_of("%s Mum", dir), 1, "\"q z\" has no id of its own below vocab_size, or a blank");
    spoil(dir = copy_of_victim(), "vocab.json", "{", "{\"\":300,");
    assert_says(text_of("%s Mum", dir), 1, "\"\" has no id of its own");
}

/* What a directory adds to the tokens of vocab.json, the engine reads. */
TEST(tokens_that_only_the_engine_reads_are_refused) {
    static const struct {
        const char *file, *text;
        bool refused;
    } cases[] = {
        {"added_tokens.json", "{\"<img>\": 1000}", true},
        {"tokenizer_config.json", "{\"add_bos_token\": false, \"bos_token\": \"</s>\"}", true},
        {"tokenizer_config.json", "{\"bos_token\": \"</s>\"}", true},
        {"tokenizer_config.json", "{\"add_bos_token\": true, \"bos_token\": \"</s>\"}", false},
        {"tokenizer_config.json", "{\"add_bos_token\": true, \"bos_token\": {\"content\": \"<s>\"}}", true},
        {"generation_config.json", "{\"eos_token_id\": [2, 7]}", true},
        {"generation_config.json", "{\"bos_token_id\": 2}", false},
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        const char *dir = copy_of_victim(), *call = text_of("%s Mum --max-tokens 2 " ALL_ON_GPU, dir);
        write_file(dir, cases[c].file, cases[c].text, strlen(cases[c].text));
        if (!cases[c].refused)
            DONE("%s", call);
        else if (*cases[c].file == 'g')
            assert_says(call, 1, "eos_token_id has to be a whole number");
        else
            assert_says(call, 1, "has added pieces, or prompts without </s> in front; use the engine");
    }
}

/* It is the second token of a text without an end, so that one token is left. */
TEST(a_text_ends_where_generation_config_says) {
    const char *dir = copy_of_victim();
    Result without = DONE("%s Mum --json --max-tokens 2 " ALL_ON_GPU, dir);
    int first, second;
    CU_ASSERT_EQUAL_FATAL(sscanf(strchr(without.out, '['), "[%d, %d", &first, &second), 2);
    const char *ends = text_of("{\"eos_token_id\": %d}", first);
    write_file(dir, "generation_config.json", ends, strlen(ends));
    Result r = DONE("%s Mum --json --max-tokens 2 " ALL_ON_GPU, dir);
    CU_ASSERT(!strstr(r.out, text_of("%d, %d", first, second)));
    CU_ASSERT(strlen(r.out) < strlen(without.out));
}

/* One word of 40,000 letters would take the square of that; a text of many words is refused before it is all cut. */
TEST(a_long_text_is_refused_before_it_takes_long) {
    enum { LENGTH = 1 << 20 };
    char *text = keep(malloc(LENGTH));
    struct rusage before, after;
    for (int words = 0; words < 2; words++) {
        for (int i = 0; i < LENGTH; i++) text[i] = (char)('a' + i * 7 % 26);
        for (int i = 0; words && i < LENGTH; i += 1000) text[i] = ' ';
        write_file(small(), "long.txt", text, words ? LENGTH : 40000);
        getrusage(RUSAGE_CHILDREN, &before);
        assert_says(text_of("%1$s --prompts %1$s/long.txt", small()), 2, words ? "384 positions" : "more than 4096 bytes");
        getrusage(RUSAGE_CHILDREN, &after);
        CU_ASSERT(after.ru_utime.tv_sec - before.ru_utime.tv_sec <= 1);
    }
}

/* By its name, a link to it, or another name of it. A trace of before is written over. */
TEST(a_trace_is_no_input_by_any_name) {
    static const char *const names[] = {"", "%s/link", "%s/hard"};
    for (int f = 0; f < 6; f++)
        for (int name = 0; name < 3; name++) {
            const char *dir = copy_of_victim();
            copy_file("hardware", dir, "t4.json");
            copy_file("models", dir, "prompts.txt");
            const char *file = f < 4 ? files[f] : f == 4 ? "t4.json" : "prompts.txt", *path = text_of("%s/%s", dir, file);
            CHECK(symlink(path, in_dir(dir, "link")) == 0);
            CHECK(link(path, in_dir(dir, "hard")) == 0);
            size_t size, left;
            char *before = keep(contents(path, &size));
            const char *trace = name ? text_of(names[name], dir) : path;
            assert_says(
                text_of("%1$s --prompts %1$s/prompts.txt --hardware %1$s/t4.json --max-tokens 2 --trace %2$s", dir, trace),
                2, "is also the file of --trace");
            const char *after = keep(contents(path, &left));
            CU_ASSERT(left == size && !memcmp(before, after, size));
        }
    const char *trace = text_of("%s/trace.json", temp_dir());
    for (int i = 0; i < 2; i++) DONE("%s Mum " WHOLE_GPU " --trace %s", small(), trace);
    with.output = trace;
    assert_says(text_of("%s Mum " WHOLE_GPU " --trace %s", small(), trace), 2, "is also the file of standard output");
}

/* What was generated is printed even if the trace cannot be; what cannot be printed is not called a success. */
TEST(a_full_disk_is_called_so_and_costs_no_text) {
    const Result good = DONE("%s Mum " WHOLE_GPU, small());
    const Result r = run(MINI, text_of("%s Mum " WHOLE_GPU " --trace /dev/full", small()));
    CU_ASSERT(r.status == 1 && !strcmp(r.out, good.out) &&
              strstr(r.err, "mini: --trace: the file could not be written whole\n"));
    with.file = 100 << 10;
    assert_says(text_of("%s --prompts %s --percent 0 0 0 0 0 0 --gpu-batch-size 12 --max-tokens 99", small(),
                        prompts_file(PROMPTS)),
                1, strerror(EFBIG));
    with.output = "/dev/full";
    assert_says(text_of("%s Mum " WHOLE_GPU, small()), 1, "standard output could not be written whole");
    with.fault = "thread:1:11";
    assert_says(text_of("%s Mum --threads 1 " WHOLE_GPU, small()), 1, "ulimit");
}

/* A file of the model loses its end while its weights are read from it. */
TEST(a_model_that_is_cut_short_while_it_runs_is_one_line) {
    const char *dir = copy_of_victim();
    const pid_t pid = start(MINI, text_of("%s Mum --percent 0 0 100 0 100 0 --max-tokens 99 --dtoc 1e6", dir));
    bool runs = false;
    for (int tries = 0; tries < 2000 && !runs; tries++)
        runs = !system(text_of("grep -q '%s.*(deleted)' /proc/%d/maps", offload, (int)pid));
    CHECK(truncate(in_dir(dir, "model.safetensors"), 9) == 0);
    const Result r = finish(pid);
    CU_ASSERT(runs && was_refused(&r, 1) && strstr(r.err, "a file of the model was cut short"));
}

// ---- What may be written --------------------------------------------------------------------------------------------

/* Lines may end in CR LF; empty ones are no prompts. */
TEST(a_line_is_a_prompt) {
    write_file(small(), "lines.txt", "a b\r\n\r\n\nc", 9);
    const Result r = DONE("%1$s --prompts %1$s/lines.txt " WHOLE_GPU, small());
    CU_ASSERT(!strncmp(r.out, "a b", 3) && strstr(r.out, "\nc") && strstr(r.err, "mini: prompts 2, "));
}

/* The prompt is </s> and "A". The last token generated needs no position. */
TEST(a_text_may_use_all_positions) {
    DONE("%s A " ALL_ON_GPU " --max-tokens %d", small(), POSITIONS - 1);
    assert_refused(MINI, text_of("%s A " ALL_ON_GPU " --max-tokens %d", small(), POSITIONS), 2);
}

/* Whatever a file says, it is refused in one line, or taken with nothing that a sanitizer finds. Returns what was said. */
static const char *assert_survives(const char *dir, const char *what, bool may_be_taken) {
    Result r = run(ASAN, text_of("%s Mum --max-tokens 2 " PERCENT, dir));
    const bool good = was_refused(&r, 0) || (may_be_taken && r.status == 0);
    if (!good) fprintf(stderr, "\n    %.200s: status %d: %.100s%.1000s", what, r.status, r.out, r.err);
    CU_ASSERT(good);
    return r.err;
}

/* The token that follows a prompt is made the piece of byte 0, whose id the piece that it was gets. */
TEST(a_completion_may_contain_NUL) {
    const char *dir = copy_of_victim();
    const Answers a = read_answers(DONE("%s Mum --json " WHOLE_GPU, dir).out, 1);
    char *vocab = keep(contents(in_dir(dir, "vocab.json"), NULL)), *piece = strstr(vocab, "\"\304\200\":");
    CU_ASSERT_PTR_NOT_NULL_FATAL(piece);
    const char *generated = text_of(":%d,", a.token[0][0]), *nul = text_of(":%d,", atoi(piece + 5));
    spoil(dir, "vocab.json", generated, ":#,");
    spoil(dir, "vocab.json", nul, generated);
    spoil(dir, "vocab.json", ":#,", nul);
    const Result r = DONE("%s Mum " WHOLE_GPU, dir);
    CU_ASSERT(r.out_len == 5 && !memcmp(r.out, "Mum\0\n", 5));
}

/* The names of tensors do not begin with "model."; a line ends in config.json; vocab.json is ASCII, as Python writes it. */
TEST(a_checkpoint_may_be_written_in_other_ways) {
    Result wanted = DONE("%s Mum --json " WHOLE_GPU, small());
    for (int way = 0; way < 3; way++) {
        const char *dir = copy_of_victim();
        Model m = model_of(victim);
        m.prefix = "";
        if (way == 0) write_model(dir, &m);
        if (way == 1) spoil(dir, "config.json", "\"model_type\": ", "\"model_type\":\n  ");
        if (way == 2 && has_python())
            CU_ASSERT(!system(
                text_of("cd %s && python3 -c 'import json; read = json.load(open(\"vocab.json\", encoding=\"utf-8\")); "
                        "json.dump(read, open(\"vocab.json\", \"w\"))' && grep -q u0120 vocab.json",
                        dir)));
        Result r = DONE("%s Mum --json " WHOLE_GPU, dir);
        CU_ASSERT_STRING_EQUAL(r.out, wanted.out);
    }
}

/* With all weights of k 0 every token has the same k, and all scores of a query are equal; v differs. As in the engine
 * (device/host_attend.c, select_tokens), which writes the same tokens; one of the twelve texts may be another where the
 * order of sums decides a token. */
TEST(of_equal_scores_sparse_attention_keeps_the_earlier_tokens) {
    const char *flags = "--gpu-batch-size 12 --percent 100 0 0 100 100 0";
    const Answers *engine = engine_answers(KEYLESS, SPARSE_3),
                  mini = read_answers(DONE("%s", question(KEYLESS, SPARSE_3, PROMPTS, flags)).out, PROMPTS);
    int equal = 0;
    for (int i = 0; i < PROMPTS; i++) equal += difference(&mini, engine, i) == MOST_TOKENS;
    CU_ASSERT(equal >= PROMPTS - 1);
}

/* merges.txt gets two more pairs. In "zzz" the first pair is joined, not the last. Two line feeds are not joined, since the
 * last of several blanks belongs to the next word. "" is a prompt of </s> alone, which ends a generated text only. */
TEST(words_and_pairs_are_those_of_the_engine) {
    const char *dir = copy_of_victim();
    const char *const cases[][3] = {
        {TINY, "", ""}, {dir, "zzz", "zzz"}, {dir, "b\n\nb", "b\\n\\nb"}}; /* as JSON writes it */
    spoil(dir, "vocab.json", "{", "{\"\304\212\304\212\":300,\"zz\":301,");
    spoil(dir, "merges.txt", "\nh e\n", "\nh e\n\304\212 \304\212\nz z\n");
    for (size_t c = 0; c < COUNT(cases); c++) {
        const char *const *at = cases[c], *line = text_of("{\"id\": 0, \"prompt\": \"%s\"}\n", at[2]);
        write_file(capture, "prompt.jsonl", line, strlen(line));
        const Result mini = DONE("%s '%s' --json --max-tokens 5", at[0], at[1]),
                     engine = flexgen_done("generate --model %s --prompts @prompt.jsonl --max-tokens 5 " ENGINE_ALL_ON_GPU,
                                           at[0]);
        const Answers ours = read_answers(mini.out, 1), its = read_answers(engine.out, 1);
        CU_ASSERT_EQUAL(difference(&ours, &its, 0), MOST_TOKENS);
    }
}

#define TENSORS "model.safetensors"
#define TABLE "[1024,64]" /* the shape of the table of tokens, and its bytes */
#define BYTES "[0,131072]"

/* In a copy of the victim a text of a file becomes each of others; "": the whole file; of a safetensors file in its header.
 * What may be overlooked does no harm. */
TEST(a_spoilt_file_is_refused_and_lesser_faults_do_no_harm) {
    static const struct {
        const char *file, *from, *to[11];
    } edits[2][21] = {
        {
            {TENSORS, "\"F16\"", {"\"I64\"", "7", "\"F32\"", "null", "\"F16"}},
            {TENSORS,
             BYTES,
             {"[131072,0]", "[0,131074]", "[-131072,0]", "[0,1e300]", "[1e18,1000000000000131072]", "[.5,131072.5]",
              "[0,nan]", "[0]", "\"0,131072\"", "[[0],131072]"}},
            {TENSORS,
             TABLE,
             {"[-1024,-64]", "[65536]", "[]", "64", "[1e308,1e308]", "[\"a\",{}]", "[4294967296,4294967296]", "[2048,32]",
              "[64,1024]"}},
            {TENSORS, "embed_tokens", {"embed_token", "embed_tok\\u00", "\\ud800\\u0041", "\\q"}},
            {TENSORS, "layers.2.fc1.weight", {"layers.0.fc1.weight"}},
            {"config.json", "", {"", "7", "{"}},
            {"config.json", "\"opt\"", {"\"llama\""}},
            {"config.json", "_embeddings\": true", {"_embeddings\": false"}},
            {"config.json", "\"relu\"", {"\"gelu\""}},
            {"config.json", "_size\": 64", {"_size\": 0", "_size\": 65", "_size\": -64", "_size\": 8e300", "_size\": 128"}},
            {"config.json", "heads\": 4", {"heads\": 0", "heads\": 7"}},
            {"config.json", "layers\": 3", {"layers\": 4", "layers\": 0", "layers\": 99999999", "layers\": \"3\""}},
            {"config.json", "1024", {"1023", "1e9"}},
            {"config.json", "384", {"1000000", "2"}},
            {"config.json", "before\": true", {"before\": false"}},
            {"vocab.json", "", {"", "{}", "[1]"}},
            {"vocab.json", ":5,", {":1024,", ":-5,", ":6,", ":{},", ","}},
            {"merges.txt", "h e", {"he", "h", "h e e", "h \377", "zq xq", "q z"}},
            {"vocab.json", "\"a\"", {"\"~~~\""}},
            {"vocab.json", "{", {"{\"q z\":300,", "{\"q\\u0020z\":300,", "{\"\":300,"}},
        },
        {
            {TENSORS, TABLE, {"[1024,65]", "[1024,64,1]", "[ 1024 , 64 ]"}},
            {"vocab.json", ":5,", {":5.5,", ":5"}},
            {"merges.txt", "h e", {"h ", " e", ""}},
            {TENSORS, "{\"dtype\"", {"[\"dtype\"", "{dtype"}},
            {TENSORS, ":{\"dtype\"", {":7,\"x\":{\"dtype\""}},
            {TENSORS, "}", {""}},
            {TENSORS, ",", {",,"}},
            {TENSORS, "{", {""}},
            {"config.json", "eos_token_id\": 2", {"eos_token_id\": 5000"}},
            {"merges.txt", "", {""}},
        }};
    for (int harmless = 0; harmless < 2; harmless++)
        for (size_t e = 0; e < COUNT(*edits) && edits[harmless][e].file; e++)
            for (size_t t = 0; t < COUNT(edits[harmless][e].to) && edits[harmless][e].to[t]; t++) {
                const char *dir = copy_of_victim(), *file = edits[harmless][e].file, *from = edits[harmless][e].from;
                const char *to = edits[harmless][e].to[t];
                spoil(dir, file, *from ? from : NULL, to);
                assert_survives(dir, text_of("%s: %s -> %s", file, from, to), harmless);
            }
    for (int f = 0; f < 4; f++) {
        const char *dir = copy_of_victim();
        CHECK(unlink(in_dir(dir, files[f])) == 0);
        assert_survives(dir, files[f], false);
    }
}

/* A file of so many bytes, or whose header says that it has so many. */
TEST(a_file_or_header_of_another_length_is_refused) {
    const char *dir = copy_of_victim();
    size_t size, header;
    char *file = keep(contents(in_dir(dir, TENSORS), &size));
    memcpy(&header, file, sizeof header);
    const size_t sizes[] = {0,          1,          7,          8,        9,        8 + header / 2,
                            7 + header, 8 + header, 9 + header, size / 2, size - 2, size - 1},
                 headers[] = {0,          1,          2,          100,      size - 7 /* it ends behind its file */,
                              1ull << 32, 1ull << 62, 1ull << 63, SIZE_MAX, SIZE_MAX - 7};
    for (size_t c = 0; c < COUNT(sizes); c++) {
        write_file(dir, TENSORS, file, sizes[c]);
        assert_survives(dir, text_of("%zu bytes", sizes[c]), false);
    }
    for (size_t c = 0; c < COUNT(headers); c++) {
        memcpy(file, &headers[c], sizeof header);
        write_file(dir, TENSORS, file, size);
        const char *said = assert_survives(dir, text_of("a header of %zu", headers[c]), false);
        CU_ASSERT(headers[c] <= header || strstr(said, "is no whole file of safetensors"));
    }
}

/* Bytes of what is read are changed at random; some changes do no harm. */
TEST(random_damage_is_refused_or_harmless) {
    uint64_t seed = 23;
    const char *dir = copy_of_victim();
    for (int c = 0; c < 400; c += step(21)) {
        const char *file = files[c % 4];
        size_t len;
        char *text = contents(in_dir(small(), file), &len);
        const int changes = between(&seed, 1, 3), range = (int)fmin((double)len, c % 4 == 3 ? 4500 : 1e9);
        for (int i = 0; i < changes; i++)
            text[test_below(&seed, range)] =
                test_below(&seed, 2) ? (char)test_below(&seed, 256) : "{}[]\",:0-9\\ue"[test_below(&seed, 14)];
        write_file(dir, file, text, len);
        assert_survives(dir, text_of("%s, damage %d", file, c), true);
        free(text);
        copy_file(small(), dir, file);
    }
}

TEST(the_offload_file_has_no_name_while_it_is_used) {
    static const int signals[] = {SIGKILL, SIGTERM, SIGINT, SIGSEGV};
    for (int s = 0; s < 4; s++) {
        bool seen = false;
        const pid_t pid =
            start(MINI, text_of("%s --prompts %s --percent 0 0 0 0 0 0 --gpu-batch-size 4 --num-gpu-batches 3 "
                                "--ctod 20e3",
                                small(), prompts_file(PROMPTS)));
        /* it has a file of that directory mapped that has no name any more */
        for (int tries = 0; tries < 2000 && !seen; tries++)
            seen = !system(text_of("grep -q '%s.*(deleted)' /proc/%d/maps", offload, (int)pid));
        CU_ASSERT(seen && count_files(offload) == 0);
        kill(pid, signals[s]);
        Result r = finish(pid);
        CU_ASSERT_EQUAL(r.status, 1000 + signals[s]);
    }
}

/* The N-th call of a kind fails, or all from then on (tests/faults.c). */
TEST(whatever_call_fails_is_one_line_or_does_no_harm) {
    static const struct {
        const char *fault;
        int most;
    } faults[] = {{"open:%d:5", 8},    {"open:%d+:24", 8},   {"mmap:%d:12", 16},
                  {"mmap:%d+:12", 16}, {"malloc:%d:12", 60}, {"malloc:%d+:12", 60},
                  {"thread:%d:11", 5}, {"write:%d+:28", 4},  {"write:%d:4", 4}};
    const char *ask = text_of("%s Mum --json --max-tokens 3 " PERCENT, small());
    Result good = done(MINI, ask);
    for (size_t f = 0; f < COUNT(faults); f++)
        for (int n = 1 + (int)f % 3; n <= faults[f].most; n += step(4)) {
            char fault[40];
            snprintf(fault, sizeof fault, faults[f].fault, n);
            with.fault = fault;
            Result r = run(MINI, ask);
            const bool right = r.status ? was_refused(&r, 0) : !strcmp(r.out, good.out);
            if (!right) fprintf(stderr, "\n    FAULT=%s: status %d: %s%s", fault, r.status, r.out, r.err);
            CU_ASSERT(right);
        }
    with.file = 65536; /* the disk tier's first write ends there, and the next one is to be no signal */
    assert_refused(MINI, text_of("%s --prompts %s " PERCENT, small(), prompts_file(PROMPTS)), 1);
}

// ---- The text of mini.c ---------------------------------------------------------------------------------------------

/* No line has more than 100 columns, no function more than 40 lines, from its name in the first column to its brace there;
 * a fifth is comments; mini.c includes no file of the engine, and mini.cu no other one than mini.c. scripts/size.py counts
 * tokens. */
TEST(lines_and_functions_are_short_and_a_fifth_is_comments) {
    static const char *const paths[] = {"mini.c", "mini.cu"};
    static const char *const rules[] = {
        "awk 'length > 100 {print; wrong = 1} END {exit wrong}' $FILE",
        "! grep '^#include \"' $FILE | grep -v '\"mini.c\"$'",
        "awk '/[/][*]/ {inside = 1} inside || /[/][/]/ {n++} /[*][/]/ {inside = 0} END {exit 5 * n < NR}' $FILE",
        "awk '/^[A-Za-z_].*[(]/ && !begun {begun = NR} /^}/ && begun && NR - begun >= 40 {print begun; wrong = 1}\n"
        "     /^}|^[^ ].*[;}]$/ {begun = 0} END {exit wrong}' $FILE",
    };
    for (int f = 0; f < 2; f++)
        for (int r = 0; r < 4; r++) {
            setenv("FILE", paths[f], 1);
            CU_ASSERT_EQUAL(system(rules[r]), 0);
        }
}

/* As its first lines say, the file compiles on any system: here for those whose compilers are installed. The Makefile has
 * compiled it for this processor, with the same warnings. */
TEST(no_compiler_warns) {
    static const char *const compilers[] = {"clang -march=native",
                                            "gcc",
                                            "aarch64-linux-gnu-gcc",
                                            "python3 -m ziglang cc -target aarch64-macos",
                                            "python3 -m ziglang cc -target x86_64-macos",
                                            "python3 -m ziglang cc -target riscv64-linux-musl"};
    for (int c = 0; c < (all() ? 6 : 3); c++)
        if (!system(text_of("%s --version >/dev/null 2>&1", compilers[c])))
            CU_ASSERT_EQUAL(system(text_of("%s %s -Wall -Wextra -Werror -c mini.c -o %s/mini.o", compilers[c],
                                           all() ? "-O3" : "-O1", temp_dir())),
                            0);
}
