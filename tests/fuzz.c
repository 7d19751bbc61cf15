/* fuzz.c: everything that is read from outside, given a great many damaged inputs in one process, under ASan and UBSan.
 *
 *     make fuzz N=1000000 SEED=1
 *
 * A target is one way in: a function that reads an input or its file, and good inputs to begin with. An input is made from
 * a good one by a few changes: bits, bytes, numbers, words of the format, pieces moved or left out or taken from another.
 * What a target accepts joins its good inputs, so that later ones lie farther from the first. An input must be accepted, or
 * refused in one line; and what is accepted must hold what it promises (see the targets). The same N and SEED give the same
 * inputs; one that ends the process is left in build/fuzz-input. To add a way in, add a row to the table of targets. */
#include <inttypes.h>
#include <sanitizer/asan_interface.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/tests.h"
#include "tests/written.h"

enum { MOST = 1 << 15, POOL = 64, TIMEOUT = 60 /* seconds, for an input */ };

typedef struct {
    size_t len;
    char bytes[MOST + 1]; /* with room for a 0 behind them */
} Input;

static uint64_t seed, drawn;
static char root[300]; /* where files lie */
static const char *target_name = "";
static const Input *current;
static Error err;
Gpu *test_gpu; /* of main.c, which is not here: fixture.c looks at it */

static uint64_t draw(void) { return splitmix64(seed, ++drawn); }
static size_t below(size_t n) { return n ? draw() % n : 0; }

static const char *path_of(const char *name) { return in_dir(root, name); }

/* A whole file. */
static Input input_of(const char *path) {
    Input in = {.len = 0};
    char *text = contents(path, &in.len);
    CHECK(in.len <= MOST);
    memcpy(in.bytes, text, in.len);
    free(text);
    return in;
}

// ---- A small model --------------------------------------------------------------------------------------------------

#define PIECES "tests/golden/tokenizer"
enum { VOCAB = 1024 };

static OptConfig config; /* of texts: the tokens of the vocabulary */
static Tokenizer *tokenizer;
/* Bytes of the small model's tensors, and of the packed one's, and more. */
enum { SMALL_DATA = 2000, PACKED_DATA = 20000 };

/* A safetensors file of that header, with so much data. */
static Input framed(const char *header, size_t len, size_t data) {
    Input file = {.len = 0};
    const size_t n = size_min(len, MOST - 8), rest = size_min(data, MOST - 8 - n);
    for (int i = 0; i < 8; i++) file.bytes[i] = (char)((uint64_t)len >> 8 * i);
    memcpy(file.bytes + 8, header, n);
    for (size_t i = 0; i < rest; i++) file.bytes[8 + n + i] = (char)(i % 2 ? 0x30 : i);
    file.len = 8 + n + rest;
    return file;
}

// ---- The ways in: each says whether it accepted the input -----------------------------------------------------------

static bool read_utf8(const char *text, size_t len) {
    const size_t invalid = utf8_invalid_at(text, len);
    CHECK(invalid <= len && utf8_valid(text, invalid));
    for (size_t at = 0, step; at < len; at += step) {
        uint32_t code;
        step = utf8_step(&code, text + at, len - at);
        CHECK(step >= 1 && step <= 4 && at + step <= len && (at >= invalid || code != NO_CHARACTER));
    }
    return invalid == len;
}

/* What is accepted is written and read again, and is the same. */
static bool read_json(const char *text, size_t len) {
    cJSON *tree = json_parse(text, len, &err);
    if (!tree) return false;
    char *printed = cJSON_Print(tree);
    cJSON *again = cJSON_Parse(printed);
    CHECK(again && cJSON_Compare(tree, again, true));
    cJSON_Delete(tree), cJSON_Delete(again), free(printed);
    return true;
}

static bool read_config(const char *dir) {
    OptConfig c;
    bool tied;
    if (config_read(&c, &tied, dir, &err)) return false;
    CHECK(c.l > 0 && c.h1 > 0 && c.h1 % c.nh == 0 && c.eos >= 0 && c.eos < c.vocab && utf8_valid(c.name, strlen(c.name)));
    return true;
}

/* Every tensor of what is accepted can be read. */
static bool read_checkpoint(const char *dir) {
    Checkpoint *c = checkpoint_open(dir, &err);
    if (!c) return false;
    f16 numbers[64];
    for (int t = 0; t < part_count(&c->config); t++) {
        const Tensor *tensor = checkpoint_part(c, t).tensor;
        const size_t count = (size_t)tensor->rows * tensor->cols;
        if (tensor->rows) checkpoint_fill(c, numbers, tensor, 0, count < 64 ? count : 64, &err);
    }
    checkpoint_close(c);
    return true;
}

/* The ids of any text are ids, and ids of any kind are a text. */
static bool open_tokenizer(const char *dir) {
    static const char text[] = "The the  hello\n\xC3\xA9 \xE4\xB8\xAD 12 isn't </s>";
    int32_t *ids, any[] = {-1, 0, 7, VOCAB - 1, VOCAB, INT32_MAX};
    size_t len;
    Tokenizer *t = tokenizer_open(dir, VOCAB, &err);
    if (!t) return false;
    int n = tokenizer_encode(t, text, sizeof text - 1, &ids, &err);
    CHECK(n > 0);
    for (int i = 0; i < n; i++) CHECK(ids[i] >= 0 && ids[i] < VOCAB);
    char *back = tokenizer_decode(t, ids, n, &len);
    CHECK(utf8_valid(back, len));
    free(back), free(tokenizer_decode(t, any, 6, &len)), free(ids);
    tokenizer_close(t);
    return true;
}

/* A text comes back as it was. */
static bool read_text(const char *text, size_t len) {
    int32_t *ids;
    size_t same;
    int n = tokenizer_encode(tokenizer, text, len, &ids, &err);
    if (n < 0) return false;
    char *back = tokenizer_decode(tokenizer, ids, n, &same);
    CHECK(same == len && !memcmp(back, text, len) && tokenizer_bytes(tokenizer, ids, n) == len);
    free(back), free(ids);
    return true;
}

static bool read_prompts(const char *path) {
    Job job = {.tokenizer = tokenizer, .config = &config, .max_tokens = 8, .strict = draw() % 2};
    const bool good = !job_read(&job, path, &err);
    for (int i = 0; good && i < job.count; i++) {
        const Request *r = &job.request[i];
        CHECK(r->error ||
              (r->s > 0 && r->n > 0 && r->s + r->n <= config.max_pos + 1 && utf8_valid(r->text, strlen(r->text))));
    }
    if (good) job_rest(&job);
    job_free(&job);
    return good;
}

/* A journal: its head, and records that hold, which is a matter of their hash; then it can be gone on with. */
static int take_token(void *ctx, Pair pair) {
    *(long *)ctx += pair.place + pair.token != 0;
    return 0;
}
static bool read_journal(const char *path) {
    long taken = 0;
    const Pair pair = {1, {2}};
    Journal *j = journal_open(path, &err);
    const bool good = j && j->head && !journal_read(j, take_token, &taken, &err);
    if (good) CHECK(!journal_begin(j, NULL, &err) && !journal_append(j, &pair, 1, &err));
    if (j && !j->head) fail(&err, EXIT_FAILED, "new");
    if (j) CHECK(unlink(j->path) == 0);
    journal_close(j);
    return good;
}

static bool read_last_words(const char *path) {
    Job job = {.tokenizer = tokenizer, .config = &config, .format = "jsonl", .strict = true, .task.scored = true};
    const bool good = !job_read(&job, path, &err);
    job_free(&job);
    return good;
}

/* What is accepted is written and read again, and is the same. */
static bool machine_is_read(const char *path) {
    Hardware h, again;
    if (hardware_read(&h, path, &err)) return false;
    FILE *f = fopen(path_of("again.json"), "w");
    hardware_write(&h, NULL, f);
    CHECK(fclose(f) == 0 && hardware_read(&again, path_of("again.json"), &err) == 0);
    CHECK(h.gmem == again.gmem && h.mm_rows.n == again.mm_rows.n && h.dtoc_bdw[1] == again.dtoc_bdw[1]);
    return true;
}

/* A line is an argument. */
static bool read_flags(const char *text, size_t len) {
    char *copy = memcpy(xcalloc(len + 1, 1), text, len), *args[100], *rest = copy;
    Options o = options_default();
    Command command;
    int n = 0;
    while (rest && n < 100) args[n++] = strsep(&rest, "\n");
    const bool good = !command_parse(&command, args[0], &err) && !flags_parse(&o, command, args + 1, n - 1, &err) &&
                      !flags_check(&o, command, &err);
    free(o.prompt.text), free(o.stop.text), free(copy);
    return good;
}

static const char generate_flags[] =
    "generate\n--model\nx\n--prompt\na\n--percent\n0\n50\n-\n0\n100\n0\n--gpu-batch-size\n4\n--stop\n.\n"
    "--temperature\n0.7\n--top-p\n0.9\n--seed\n3\n--gpu-mem\n16G\n--link\nctog=1G,dtoc=0.5G",
                  bench_flags[] =
                      "bench\n--model\nopt-125m\n--prompt-len\n8-16\n--gen-len\n4\n--compress-cache\n"
                      "--schedule\nrow\n--device\nsim\n--hardware\nt4.json\n--attn-sparsity\n.1",
                  policy_flags[] =
                      "policy\n--model\nopt-30b\n--cost-model\npaper\n--gpu-batch-size\n4\n--num-gpu-batches\n2\n"
                      "--net-gbps\n10\n--hardware\nt4.json";
static const char prompt_lines[] =
    "{\"id\": \"a\", \"prompt\": \"The cat \\u00e9\", \"max_tokens\": 4}\r\n{\"prompt\": \"x\"}\n\n"
    "{\"id\": 7, \"prompt\": \"\"}\n",
                  plain_lines[] = "\xEF\xBB\xBFOnce upon a time\n  the\xE4\xB8\xAD\n",
                  word_lines[] = "{\"text\": \"the cat sat on the mat\"}\n{\"text\": \"is it \\n so  \"}";
static const char merge_lines[] = "#version: 0.2\ne r\n\xC4\xA0 t\n\xC4\xA0 s\nh e\nc o\nr e\n\xC4\xA0 a\n\xC4\xA0 i\n";
static const char index_text[] =
    "{\"metadata\": {\"total_size\": 500}, \"weight_map\": {\"model.decoder.embed_tokens.weight\": "
    "\"a.safetensors\", \"x\": \"b.safetensors\"}}";

static Input small_header, small_file, small_config, packed_header, small_journal; /* of the models; of three tokens */
typedef struct {
    const char *name;
    bool (*read)(const char *, size_t); /* NULL: the input's file is written, and then opened by its path */
    const char *texts[3];               /* good inputs, or "@FILE", or NULL */
    const Input *made;                  /* one more, or NULL; a header is framed before it is written */
    const char *words;                  /* what changes put in besides numbers; each ends with a newline */
    bool (*open)(const char *);
    const char *path, *file;
    Input *pool; /* good inputs so far */
    int npool;
    long tried, accepted;
} Target;
#define FORMS "tests/golden/forms/"
#define ADDED_WORDS "content\nlstrip\nrstrip\nspecial\nthe\n320\n1e9\n \n"
#define JSON_WORDS "{\n}\n[\n]\n,\n:\n\"\n\\u0041\n\\ud83d\\ude00\n\\udc00\n\\u0000\ntrue\nfalse\nnull\n"
// clang-format off
static Target targets[] = {
    {"utf8", read_utf8, {"ab\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80z"}, .words = "\xED\xA0\x80\n\xC0\x80\n\xF4\x90\x80\x80\n"},
    {"json", read_json, {"@hardware/t4.json", index_text}, &small_config, .words = JSON_WORDS},
    {"text", read_text, {plain_lines, "It isn't   2nd\t\n!!", "a\xC2\xA0\xE3\x80\x80 b"}, .words = "'ll\n \n  \n\xC2\xA0\n"},
    {"flags", read_flags, {generate_flags, bench_flags, policy_flags},
     .words = "--\n-\ninf\nnan\n1e9\n5T\n9-3\neval\nquantize\n"},
    {"config.json", NULL, {"@models/opt-tiny/config.json"}, &small_config, JSON_WORDS "eos_token_id\nopt\n",
     read_config, "config", .file = "config/config.json"},
    {"header", NULL, {NULL}, &small_header, JSON_WORDS "U8\nF32\n__metadata__\nformat\nflexgen-packed-1\nmodel.\n",
     read_checkpoint, "model", .file = "model/model.safetensors"},
    {"packed", NULL, {NULL}, &packed_header, JSON_WORDS "U8\nF16\n__metadata__\nformat\nflexgen-packed-1\nflexgen.bits\n",
     read_checkpoint, "packed", .file = "packed/model.safetensors"},
    {"safetensors", NULL, {NULL}, &small_file, JSON_WORDS,
     read_checkpoint, "model", .file = "model/model.safetensors"},
    {"index", NULL, {index_text}, NULL, JSON_WORDS "a.safetensors\nb.safetensors\n../\n",
     read_checkpoint, "shards", .file = "shards/model.safetensors.index.json"},
    {"vocab.json", NULL, {"@" PIECES "/vocab.json"}, NULL, JSON_WORDS "</s>\n\xC4\xA0\n",
     open_tokenizer, "vocab", .file = "vocab/vocab.json"},
    {"merges.txt", NULL, {merge_lines}, NULL, "\r\n \n\xC4\xA0\nt\nhe\n#version\n",
     open_tokenizer, "merges", .file = "merges/merges.txt"},
    {"tokenizer.json", NULL, {"@" FORMS "grown-5/tokenizer.json"}, NULL, JSON_WORDS ADDED_WORDS "merges\nvocab\nsingle\n",
     open_tokenizer, "form", .file = "form/tokenizer.json"},
    {"tokenizer_config.json", NULL, {"@" FORMS "slow-4/tokenizer_config.json", "@" FORMS "published/tokenizer_config.json"}, NULL,
     JSON_WORDS ADDED_WORDS "_token\n_tokens\n", open_tokenizer, "added", .file = "added/tokenizer_config.json"},
    {"added_tokens.json", NULL, {"@" FORMS "legacy/added_tokens.json"}, NULL, JSON_WORDS ADDED_WORDS,
     open_tokenizer, "older", .file = "older/added_tokens.json"},
    {"prompts", NULL, {prompt_lines, plain_lines}, NULL, JSON_WORDS "prompt\nid\n\r\n",
     read_prompts, "prompts", .file = "prompts"},
    {"journal", NULL, {NULL}, &small_journal, JSON_WORDS JOURNAL_VERSION "\n", read_journal, "out", .file = "out.journal"},
    {"last words", NULL, {word_lines}, NULL, JSON_WORDS "text\n \n", read_last_words, "lines", .file = "lines"},
    {"machine", NULL, {"@hardware/t4.json", "@hardware/laptop.json"}, NULL, JSON_WORDS "_p\n_g\nmm_rows\n",
     machine_is_read, "machine.json", .file = "machine.json"},
};
// clang-format on
enum { NTARGETS = COUNT(targets) };

// ---- Changes --------------------------------------------------------------------------------------------------------

/* Bytes [at, at + out) give way to n others, as far as there is room. */
static void replace(Input *in, size_t at, size_t out, const char *by, size_t n) {
    if (in->len - out + n > MOST) return;
    memmove(in->bytes + at + n, in->bytes + at + out, in->len - at - out);
    memcpy(in->bytes + at, by, n);
    in->len += n - out;
}

/* One of several words that end in line feeds. */
static const char *one_of(const char *words, size_t *len) {
    size_t n = 0;
    for (const char *c = words; *c; c++) n += *c == '\n';
    for (n = below(n); n > 0; n--) words = strchr(words, '\n') + 1;
    *len = strcspn(words, "\n");
    return words;
}

static void change(Input *in, const Target *target) {
    static const char numbers[] =
        "0\n-1\n1\n2\n3\n64\n65536\n1e9\n2147483648\n0.5\n1e308\n1e309\n-0\n9007199254740993\n1e-9\n18446744073709551615\n"
        "00\n1.\n1e\n[]\n\"4\"\n";
    const Input *other = &target->pool[below((size_t)target->npool)];
    const size_t kind = in->len ? below(8) : 5;
    const size_t at = below(in->len + (kind == 5)), left = in->len - at, from = below(other->len);
    const size_t piece = below(below(8) ? 20 : 2000);
    char byte = kind ? (char)draw() : (char)(in->bytes[at] ^ 1 << below(8));
    char copy[2000];
    in->bytes[in->len] = 0; /* where the last digits end */
    if (kind < 3)           /* a bit or a byte of it is another, or there is one more */
        replace(in, at, kind < 2, &byte, 1);
    else if (kind == 3)
        replace(in, at, size_min(piece, left), "", 0);
    else if (kind == 4) { /* a number of the text behind `at` is another */
        size_t n;
        const size_t digits = at + strcspn(in->bytes + at, "0123456789");
        const char *by = one_of(numbers, &n);
        replace(in, digits, strspn(in->bytes + digits, "0123456789"), by, n);
    } else if (kind < 7) { /* a word, or a piece of this or another input */
        size_t n = size_min(piece, other->len - from);
        const char *by = kind == 5 ? one_of(target->words, &n) : memcpy(copy, other->bytes + from, n);
        replace(in, at, draw() % 2 && n <= left ? n : 0, by, n);
    } else if (!below(4))
        in->len = at;
}

// ---- Running --------------------------------------------------------------------------------------------------------

static void add_good(Target *t, const Input *in) {
    const int at = t->npool < POOL ? t->npool++ : (int)below(POOL);
    t->pool[at] = *in;
}

/* On a copy without a byte behind it, so that reading further is seen. */
static bool accepts(const Target *t, const Input *in) {
    if (t->read) {
        char *exact = memcpy(xcalloc(in->len, 1), in->bytes, in->len);
        const bool good = t->read(exact, in->len);
        free(exact);
        return good;
    }
    const size_t data = t->made == &small_header ? SMALL_DATA : t->made == &packed_header ? PACKED_DATA : 0;
    const Input file = data ? framed(in->bytes, in->len, data) : *in;
    write_file(root, t->file, file.bytes, file.len);
    return t->open(path_of(t->path));
}

static void try(Target *t) {
    static Input in;
    in = t->pool[below((size_t)t->npool)];
    for (size_t changes = 1 + below(4); changes > 0; changes--) change(&in, t);
    err = (Error){.code = -1};
    current = &in, target_name = t->name;
    alarm(TIMEOUT);
    const bool good = accepts(t, &in);
    alarm(0);
    if (!good && t->read != read_utf8) { /* one line, of which a person can make something */
        CHECK((err.code == EXIT_FAILED || err.code == EXIT_USAGE) && err.text[0]);
        for (const char *c = err.text; *c; c++) CHECK((unsigned char)*c >= ' ' && *c != 127);
    }
    t->tried++, t->accepted += good;
    if (good && !below(4)) add_good(t, &in);
}

/* The newest input goes where it can be looked at; also where memory has run out, of which inputs so small need none. */
static void on_death(void) {
    FILE *f = current ? fopen("build/fuzz-input", "w") : NULL;
    if (f) fwrite(current->bytes, 1, current->len, f), fclose(f);
    if (current) fprintf(stderr, "fuzz: an input of %s, SEED=%" PRIu64 ": see build/fuzz-input\n", target_name, seed);
    remove_temp_dirs();
}
static void on_alarm(int signal) {
    (void)signal;
    abort();
}

const char *__asan_default_options(void) { return "handle_abort=1:max_allocation_size_mb=512"; }

/* The header of a safetensors file. */
static Input header_of(const char *path) {
    Input in = input_of(path_of(path));
    memcpy(&in.len, in.bytes, sizeof(uint64_t));
    memmove(in.bytes, in.bytes + sizeof(uint64_t), in.len);
    return in;
}

/* The small model is in one file and in two shards; names have no "model." in front. Another has matrices of whole groups,
 * and is packed with its token table. The journal has two records. */
static void make_files(void) {
    static const char *const dirs[] = {"config", "model", "shards", "whole", "vocab", "merges", "form", "added", "older"};
    const Model whole = {{"whole", 1, GROUP, GROUP, 1, 6, 3, GROUP, true, true, 2, {0}, 0, 0, 1}, F16, "", .number = NULL};
    Model small = {{"small", 1, 4, 8, 2, 6, 3, 4, true, true, 2, {0}, 0, 0, 1}, F16, "", .number = NULL};
    const Pair pairs[] = {{0, {7}}, {1, {8}}, {0, {9}}};
    CopyStats stats;
    for (size_t d = 0; d < COUNT(dirs); d++) CHECK(!mkdir(path_of(dirs[d]), 0700));
    write_model(path_of("model"), &small);
    small.shards = 2;
    write_model(path_of("shards"), &small);
    spoil(root, "model/config.json", "_id\": 2", "_id\": [2]");
    spoil(root, "model/config.json", "embeddings\": true", "embeddings\": null");
    small_config = input_of(path_of("model/config.json"));
    small_header = header_of("model/model.safetensors");
    small_file = framed(small_header.bytes, small_header.len, SMALL_DATA);
    write_model(path_of("whole"), &whole);
    CHECK(!checkpoint_quantize(&stats, path_of("whole"), path_of("packed"), MOST, true, NULL, &err));
    packed_header = header_of("packed/model.safetensors");
    Journal *j = journal_open(path_of("made"), &err);
    cJSON *head = cJSON_Parse("{\"" JOURNAL_VERSION "\": 1, \"model\": \"x\"}");
    CHECK(j && !journal_begin(j, head, &err) && !journal_append(j, pairs, 2, &err));
    CHECK(!journal_append(j, pairs + 2, 1, &err));
    small_journal = input_of(path_of("made.journal"));
    CHECK(unlink(j->path) == 0);
    journal_close(j);
    cJSON_Delete(head);
    copy_file(PIECES, path_of("vocab"), "vocab.json");
    copy_file(PIECES, path_of("vocab"), "merges.txt");
    copy_file(PIECES, path_of("merges"), "vocab.json");
    copy_file(FORMS "published", path_of("added"), "vocab.json");
    copy_file(FORMS "published", path_of("added"), "merges.txt");
    copy_file(FORMS "published", path_of("older"), "vocab.json");
    copy_file(FORMS "published", path_of("older"), "merges.txt");
    tokenizer = tokenizer_open(path_of("vocab"), VOCAB, &err);
    config = (OptConfig){.l = 1, .h1 = 4, .h2 = 8, .nh = 2, .vocab = VOCAB, .max_pos = 60, .embed = 4, .eos = 2};
    CHECK(tokenizer);
}

static void open_targets(void) {
    for (Target *t = targets; t < targets + NTARGETS; t++) {
        t->pool = xcalloc(POOL, sizeof *t->pool);
        for (int i = 0; i < 3 && t->texts[i]; i++) {
            const char *text = t->texts[i];
            Input in = {strlen(text), ""};
            memcpy(in.bytes, text, in.len);
            if (*text == '@') in = input_of(text + 1);
            add_good(t, &in);
        }
        if (t->made) add_good(t, t->made);
        target_name = t->name;
        for (int i = 0; i < t->npool; i++) CHECK(accepts(t, current = &t->pool[i]));
    }
}

int main(int argc, char **argv) {
    const long inputs = argc > 1 ? atol(argv[1]) : 100000;
    seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    if (!access("/dev/shm", W_OK)) setenv("TMPDIR", "/dev/shm", 1); /* in memory, if there is such a place */
    strcpy(root, temp_dir());
    signal(SIGALRM, on_alarm);
    atexit(on_death);
    __sanitizer_set_death_callback(on_death);
    make_files();
    open_targets();
    for (long i = 0; i < inputs; i++) try(&targets[i % NTARGETS]);
    current = NULL;
    printf("%-12s %10s %10s\n", "fuzz", "inputs", "accepted");
    for (Target *t = targets; t < targets + NTARGETS; t++) {
        printf("%-12s %10ld %10ld\n", t->name, t->tried, t->accepted);
        free(t->pool);
    }
    tokenizer_close(tokenizer);
    printf("%ld inputs with SEED=%" PRIu64 ", no fault found\n", inputs, seed);
    return 0;
}
