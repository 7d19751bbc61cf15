/* test_checkpoint.c: what is opened and how it is read; what is refused, and in which words; dummies. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ops.h"
#include "tests.h"

// ---------------------------------------------------------------------------------------------------------------
// A small model, written by hand
// ---------------------------------------------------------------------------------------------------------------

enum { VOCAB = 6, H1 = 4, H2 = 8, MAX_POS = 3, LAYERS = 2, MAX_TENSORS = 48 };

static const char config_json[] =
    "{\"model_type\": \"opt\", \"num_hidden_layers\": 2, \"hidden_size\": 4, \"ffn_dim\": 8, \"num_attention_heads\": 2,"
    " \"vocab_size\": 6, \"max_position_embeddings\": 3, \"eos_token_id\": 2, \"activation_function\": \"relu\"}";

static const struct {
    const char *name;
    int rows, cols; /* rows 0: a vector */
} layer_tensors[] = {{"self_attn_layer_norm.weight", 0, H1},
                     {"self_attn_layer_norm.bias", 0, H1},
                     {"self_attn.q_proj.weight", H1, H1},
                     {"self_attn.q_proj.bias", 0, H1},
                     {"self_attn.k_proj.weight", H1, H1},
                     {"self_attn.k_proj.bias", 0, H1},
                     {"self_attn.v_proj.weight", H1, H1},
                     {"self_attn.v_proj.bias", 0, H1},
                     {"self_attn.out_proj.weight", H1, H1},
                     {"self_attn.out_proj.bias", 0, H1},
                     {"final_layer_norm.weight", 0, H1},
                     {"final_layer_norm.bias", 0, H1},
                     {"fc1.weight", H2, H1},
                     {"fc1.bias", 0, H2},
                     {"fc2.weight", H1, H2},
                     {"fc2.bias", 0, H1}};

/* A safetensors file in the making. Element e of the t-th tensor ever added is value(t, e). */
typedef struct {
    char header[16384];
    uint8_t data[16384];
    size_t len; /* of data */
    int count;
    Type type;
    const char *prefix; /* "model.", or "" */
} Draft;

static float value(int t, size_t e) { return (float)(1 + (7 * t + 3 * e) % 255) / 16; /* exact in BF16, too */ }

static void put(Draft *d, float x) {
    uint32_t bits;
    f16 half = f32_to_f16(x);
    memcpy(&bits, &x, 4);
    if (d->type == F32)
        memcpy(d->data + d->len, &bits, 4);
    else {
        uint16_t high = d->type == BF16 ? (uint16_t)(bits >> 16) : half;
        memcpy(d->data + d->len, &high, 2);
    }
    d->len += type_bytes(d->type);
}

static void add_tensor(Draft *d, const char *name, int rows, int cols, int t) {
    size_t begin = d->len, at = strlen(d->header);
    char shape[40];
    if (rows)
        snprintf(shape, sizeof shape, "%d,%d", rows, cols);
    else
        snprintf(shape, sizeof shape, "%d", cols);
    for (int e = 0; e < (rows ? rows : 1) * cols; e++) put(d, value(t, e));
    snprintf(d->header + at, sizeof d->header - at,
             "%c\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", d->count++ ? ',' : '{', d->prefix,
             name,
             d->type == F32   ? "F32"
             : d->type == F16 ? "F16"
                              : "BF16",
             shape, begin, d->len);
}

static void add_layer(Draft *d, int j, int t) {
    char name[100];
    for (int r = 0; r < NROLES; r++) {
        snprintf(name, sizeof name, "decoder.layers.%d.%s", j, layer_tensors[r].name);
        add_tensor(d, name, layer_tensors[r].rows, layer_tensors[r].cols, t + r);
    }
}

static void add_globals(Draft *d) {
    add_tensor(d, "decoder.embed_tokens.weight", VOCAB, H1, 0);
    add_tensor(d, "decoder.embed_positions.weight", MAX_POS + 2, H1, 1);
    add_tensor(d, "decoder.final_layer_norm.weight", 0, H1, 2);
    add_tensor(d, "decoder.final_layer_norm.bias", 0, H1, 3);
}

/* Writes length, header with its closing bracket, and data; pad adds spaces to the header, to move the data to any byte. */
static void write_draft(const char *dir, const char *name, const Draft *d, size_t pad) {
    static uint8_t bytes[8 + sizeof d->header + sizeof d->data + 64];
    size_t len = strlen(d->header);
    memcpy(bytes + 8, d->header, len);
    bytes[8 + len++] = '}';
    memset(bytes + 8 + len, ' ', pad);
    len += pad;
    for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(len >> (8 * i));
    memcpy(bytes + 8 + len, d->data, d->len);
    write_file(dir, name, bytes, 8 + len + d->len);
}

static void draft_model(Draft *d, Type type, const char *prefix) {
    memset(d, 0, sizeof *d);
    d->type = type;
    d->prefix = prefix;
    add_globals(d);
    for (int j = 0; j < LAYERS; j++) add_layer(d, j, 4 + NROLES * j);
}

static void write_text(const char *dir, const char *name, const char *text) { write_file(dir, name, text, strlen(text)); }

/* A fresh directory with config.json and, unless d is NULL, model.safetensors. */
static const char *model_dir(const char *config, const Draft *d) {
    const char *dir = temp_dir();
    write_text(dir, "config.json", config);
    if (d) write_draft(dir, "model.safetensors", d, 0);
    return dir;
}

/* text with its first `from` replaced by `to`; static. */
static const char *edited(const char *text, const char *from, const char *to) {
    static char result[32768];
    const char *at = strstr(text, from);
    CHECK(at);
    snprintf(result, sizeof result, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    return result;
}

// ---------------------------------------------------------------------------------------------------------------
// What is opened
// ---------------------------------------------------------------------------------------------------------------

/* Every element of tensor is value(t, e), whole and in pieces. */
static void holds(const Checkpoint *c, const Tensor *tensor, int t) {
    Error err = {0, ""};
    f16 bits[64];
    size_t count = (size_t)tensor->rows * tensor->cols;
    CU_ASSERT_FATAL(count > 0 && count <= 64 && tensor->ld == (size_t)tensor->cols && tensor->tier == TIER_DISK);
    ASSERT_OK(checkpoint_fill(c, bits, tensor, 0, count, &err));
    for (size_t e = 0; e < count; e++) CU_ASSERT_EQUAL(f16_to_f32(bits[e]), value(t, e));
    ASSERT_OK(checkpoint_fill(c, bits, tensor, 1, count - 2, &err));
    for (size_t e = 1; e < count - 1; e++) CU_ASSERT_EQUAL(f16_to_f32(bits[e - 1]), value(t, e));
}

static void holds_model(const Checkpoint *c) {
    holds(c, &c->global[TOK_EMBED], 0);
    holds(c, &c->global[POS_EMBED], 1);
    holds(c, &c->global[FINAL_LN_W], 2);
    holds(c, &c->global[FINAL_LN_B], 3);
    CU_ASSERT(c->global[PROJECT_IN].rows == 0 && c->global[PROJECT_OUT].rows == 0);
    for (int j = 0; j < LAYERS; j++)
        for (int r = 0; r < NROLES; r++) holds(c, &c->layer[j][r], 4 + NROLES * j + r);
}

static Checkpoint *opens(const char *dir) {
    Error err = {0, ""};
    Checkpoint *c = checkpoint_open(dir, &err);
    if (!c) fprintf(stderr, "\n    %s\n", err.text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    return c;
}

static void all_float_types_names_and_alignments_are_read(void) {
    static const Type types[] = {F16, BF16, F32};
    static const char *const prefixes[] = {"model.", ""};
    Draft d;
    for (int t = 0; t < 3; t++)
        for (int p = 0; p < 2; p++)
            for (size_t pad = 0; pad < 4; pad++) {
                draft_model(&d, types[t], prefixes[p]);
                const char *dir = model_dir(config_json, NULL);
                write_draft(dir, "model.safetensors", &d, pad);
                Checkpoint *c = opens(dir);
                CU_ASSERT_EQUAL(c->layer[1][FC2_W].type, types[t]);
                CU_ASSERT_EQUAL(c->global[LM_HEAD].rows, 0);
                holds_model(c);
                checkpoint_close(c);
            }
}

static void shards_of_different_types_make_one_model(void) {
    Draft d[2];
    for (int s = 0; s < 2; s++) memset(&d[s], 0, sizeof d[s]);
    d[0].type = F16, d[0].prefix = "model.";
    d[1].type = F32, d[1].prefix = "model.";
    add_layer(&d[0], 1, 4 + NROLES);
    add_globals(&d[1]);
    add_layer(&d[1], 0, 4);
    const char *dir = model_dir(config_json, NULL);
    write_draft(dir, "a.safetensors", &d[0], 0);
    write_draft(dir, "b.safetensors", &d[1], 0);
    write_text(dir, "model.safetensors.index.json",
               "{\"metadata\": {}, \"weight_map\": {\"x\": \"b.safetensors\", \"y\": \"a.safetensors\", \"z\": "
               "\"b.safetensors\"}}");
    Checkpoint *c = opens(dir);
    CU_ASSERT_EQUAL(c->nfiles, 2);
    holds_model(c);
    checkpoint_close(c);
}

static void the_head_is_separate_when_it_differs(void) {
    static const char untied[] = "\"tie_word_embeddings\": false, \"model_type\"";
    Draft d;
    for (int t = 0; t < 2; t++) { /* 0: a copy of the token table, 1: another matrix */
        draft_model(&d, F16, "");
        add_tensor(&d, "lm_head.weight", VOCAB, H1, t);
        Checkpoint *c = opens(model_dir(config_json, &d));
        CU_ASSERT_EQUAL(c->global[LM_HEAD].rows, t ? VOCAB : 0);
        CU_ASSERT_EQUAL(c->untied, t == 1); /* though config.json, by default, ties it */
        if (t) holds(c, &c->global[LM_HEAD], 1);
        checkpoint_close(c);
        c = opens(model_dir(edited(config_json, "\"model_type\"", untied), &d));
        holds(c, &c->global[LM_HEAD], t);
        CU_ASSERT_FALSE(c->untied);
        checkpoint_close(c);
    }
}

/* Element e of the head is the table's, and the last one may be a little more: by a bit of F16, or by too little for it. */
static void a_tied_head_is_compared_as_numbers_whatever_its_type(void) {
    static const Type types[] = {F16, BF16, F32};
    static const float more[] = {0, .0625f, 1e-6f};
    Draft d;
    for (int i = 0; i < 27; i++) {
        const float add = more[i / 9];
        draft_model(&d, types[i % 3], "");
        d.type = types[i / 3 % 3];
        add_tensor(&d, "lm_head.weight", VOCAB, H1, 0);
        d.len -= type_bytes(d.type);
        put(&d, value(0, VOCAB * H1 - 1) + add);
        Checkpoint *c = opens(model_dir(config_json, &d));
        CU_ASSERT_EQUAL(c->global[LM_HEAD].rows, add > .01f ? VOCAB : 0);
        CU_ASSERT_EQUAL(c->untied, add > .01f);
        checkpoint_close(c);
    }
}

static void draft_without_table(Draft *d) {
    memset(d, 0, sizeof *d);
    d->type = F16, d->prefix = "model.";
    add_tensor(d, "decoder.embed_positions.weight", MAX_POS + 2, H1, 1);
    add_tensor(d, "decoder.final_layer_norm.weight", 0, H1, 2);
    add_tensor(d, "decoder.final_layer_norm.bias", 0, H1, 3);
    for (int j = 0; j < LAYERS; j++) add_layer(d, j, 4 + NROLES * j);
}

/* Of tensors so large that they are read in pieces, zeros in a sparse file, the last number differs or does not. */
static void a_tied_head_is_compared_to_its_last_number(void) {
    enum { ROWS = 300000, BYTES = ROWS * H1 * sizeof(f16) };
    static const char *const names[] = {"model.decoder.embed_tokens.weight", "lm_head.weight"};
    Draft d;
    draft_without_table(&d);
    for (size_t n = 0, at = d.len; n < 2; n++, at += BYTES) {
        const size_t len = strlen(d.header);
        snprintf(d.header + len, sizeof d.header - len,
                 ",\"%s\":{\"dtype\":\"F16\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}", names[n], ROWS, H1, at,
                 at + BYTES);
    }
    const char *dir = model_dir(edited(config_json, "vocab_size\": 6", "vocab_size\": 300000"), &d);
    const int fd = open(in_dir(dir, "model.safetensors"), O_WRONLY);
    const off_t end = lseek(fd, 0, SEEK_END) + 2 * BYTES;
    CHECK(!ftruncate(fd, end));
    for (int differs = 0; differs < 2; differs++) {
        const f16 last = f32_to_f16((float)differs);
        CHECK(pwrite(fd, &last, sizeof last, end - (off_t)sizeof last) == sizeof last);
        Checkpoint *c = opens(dir);
        CU_ASSERT_EQUAL(c->untied, differs);
        checkpoint_close(c);
    }
    close(fd);
}

/* Of tensors that are one, writers of safetensors leave out either. */
static void a_tied_head_stands_for_a_token_table_that_is_left_out(void) {
    Draft d;
    draft_without_table(&d);
    d.prefix = "";
    add_tensor(&d, "lm_head.weight", VOCAB, H1, 0);
    Checkpoint *c = opens(model_dir(config_json, &d));
    holds_model(c);
    CU_ASSERT(!c->global[LM_HEAD].rows && !c->untied);
    checkpoint_close(c);
}

static void a_separate_head_makes_the_logits(void) {
    Draft d;
    Error err = {0, ""};
    int32_t ids[2] = {2, 4};
    float tied[2 * VOCAB], separate[2 * VOCAB];
    draft_model(&d, F16, "");
    Checkpoint *c = opens(model_dir(config_json, &d));
    ASSERT_OK(reference_forward(tied, c, ids, 2, &err));
    checkpoint_close(c);
    add_tensor(&d, "lm_head.weight", VOCAB, H1, 0);
    for (int e = 0; e < H1; e++) memcpy(d.data + d.len - 2 * (e + 1), "\0\0", 2); /* its last row is 0 */
    c = opens(model_dir(config_json, &d));
    ASSERT_OK(reference_forward(separate, c, ids, 2, &err));
    checkpoint_close(c);
    CU_ASSERT_EQUAL(memcmp(tied, separate, (VOCAB - 1) * sizeof *tied), 0);
    CU_ASSERT(tied[VOCAB - 1] != 0 && separate[VOCAB - 1] == 0 && separate[2 * VOCAB - 1] == 0);
}

static void unknown_tensors_and_keys_do_no_harm(void) {
    Draft d;
    draft_model(&d, F16, "model.");
    d.prefix = "";
    add_tensor(&d, "decoder.version", 0, 1, 0);
    size_t at = strlen(d.header);
    snprintf(
        d.header + at, sizeof d.header - at,
        ",\"__metadata__\":{\"format\":\"pt\"},\"odd\":{\"dtype\":\"F4\",\"shape\":[3,3,3],\"data_offsets\":[%zu,%zu]}",
        d.len, d.len + 2);
    d.len += 2;
    Checkpoint *c = opens(model_dir(edited(config_json, "{", "{\"_name_or_path\": [1, {}], \"dropout\": 0.1,"), &d));
    holds_model(c);
    checkpoint_close(c);
}

static void a_configuration_is_read_alone(void) {
    OptConfig c;
    bool tied;
    Error err = {0, ""};
    char dir[400];
    snprintf(dir, sizeof dir, "%s/opt-x", temp_dir());
    CHECK(mkdir(dir, 0700) == 0);
    write_text(dir, "config.json",
               "{\"model_type\": \"opt\", \"num_hidden_layers\": 3, \"hidden_size\": 64, \"ffn_dim\": 192, "
               "\"num_attention_heads\": 4,"
               " \"vocab_size\": 300, \"max_position_embeddings\": 128, \"word_embed_proj_dim\": 32, "
               "\"do_layer_norm_before\": false}");
    strcat(dir, "//");
    ASSERT_OK(config_read(&c, &tied, dir, &err));
    CU_ASSERT(c.l == 3 && c.h1 == 64 && c.h2 == 192 && c.nh == 4 && c.vocab == 300 && c.max_pos == 128 && c.embed == 32 &&
              c.eos == 2);
    CU_ASSERT(!c.pre_norm && !c.final_norm && strcmp(c.name, "opt-x") == 0);
    write_text(dir, "config.json",
               edited(config_json, "{", "{\"_remove_final_layer_norm\": true, \"word_embed_proj_dim\": null,"));
    ASSERT_OK(config_read(&c, &tied, dir, &err));
    CU_ASSERT(c.pre_norm && !c.final_norm && c.embed == 4);
}

// ---------------------------------------------------------------------------------------------------------------
// What is refused
// ---------------------------------------------------------------------------------------------------------------

/* The directory is refused, in one line that begins with a path inside it and contains part. */
static void refused(const char *dir, const char *part) {
    Error err = {0, ""};
    Checkpoint *c = checkpoint_open(dir, &err);
    if (c) fprintf(stderr, "\n    opened, but expected: %s\n", part);
    CU_ASSERT_PTR_NULL(c);
    checkpoint_close(c);
    CU_ASSERT_EQUAL(err.code, EXIT_FAILED);
    if (strncmp(err.text, dir, strlen(dir)) != 0 || !strstr(err.text, part) || strchr(err.text, '\n')) {
        fprintf(stderr, "\n    got: %s\n    expected in it: %s\n", err.text, part);
        CU_FAIL("message");
    }
}

static void bad_configurations_are_refused(void) {
    static const char *const cases[][3] = {
        {"\"opt\"", "\"llama\"", "model_type is \"llama\"; expected \"opt\""},
        {"\"model_type\": \"opt\",", "", "model_type is nothing; expected \"opt\""},
        {"\"relu\"", "\"gelu\"", "activation_function is \"gelu\"; expected \"relu\": no other activation is supported"},
        {"\"relu\"", "7", "activation_function is 7"},
        {"\"hidden_size\": 4", "\"hidden_size\": 0", "hidden_size is 0; expected a whole number from 1"},
        {"\"hidden_size\": 4", "\"hidden_size\": -4", "hidden_size is -4"},
        {"\"hidden_size\": 4", "\"hidden_size\": 4.5", "hidden_size is 4.5"},
        {"\"hidden_size\": 4", "\"hidden_size\": 1e300", "hidden_size is 1e+300;"},
        {"\"hidden_size\": 4", "\"hidden_size\": 4294967300", "hidden_size is 4294967300"},
        {"\"hidden_size\": 4", "\"hidden_size\": \"4\"", "hidden_size is \"4\""},
        {"\"hidden_size\": 4", "\"hidden_size\": null", "hidden_size is null"},
        {"\"hidden_size\": 4", "\"hidden_size\": true", "hidden_size is true"},
        {"\"hidden_size\": 4", "\"hidden_size\": [4]", "hidden_size is a list"},
        {"\"hidden_size\": 4,", "", "hidden_size is nothing"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 100000", "num_hidden_layers is 100000"},
        {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0", "num_hidden_layers is 0"},
        {"\"ffn_dim\": 8", "\"ffn_dim\": 9007199254740993", "ffn_dim is"},
        {"\"num_attention_heads\": 2", "\"num_attention_heads\": 3",
         "hidden_size 4 is not a multiple of num_attention_heads 3"},
        {"\"num_attention_heads\": 2", "\"num_attention_heads\": 0", "num_attention_heads is 0"},
        {"\"vocab_size\": 6", "\"vocab_size\": 2147483648", "vocab_size is 2147483648"},
        {"\"max_position_embeddings\": 3", "\"max_position_embeddings\": 0", "max_position_embeddings is 0"},
        {"\"eos_token_id\": 2", "\"eos_token_id\": 6", "eos_token_id is 6; expected a whole number from 0 to 5"},
        {"\"eos_token_id\": 2", "\"eos_token_id\": [2, 3]", "eos_token_id is a list; expected one token, or a list of one"},
        {"\"eos_token_id\": 2", "\"eos_token_id\": [6]", "eos_token_id is 6; expected a whole number from 0 to 5"},
        {"\"eos_token_id\": 2", "\"eos_token_id\": []", "eos_token_id is a list; expected one token"},
        {"\"eos_token_id\": 2", "\"word_embed_proj_dim\": 0", "word_embed_proj_dim is 0"},
        {"\"eos_token_id\": 2", "\"enable_bias\": false", "enable_bias is false; expected true: layers without biases"},
        {"\"eos_token_id\": 2", "\"enable_bias\": 1", "enable_bias is 1; expected true: layers without biases"},
        {"\"eos_token_id\": 2", "\"layer_norm_elementwise_affine\": false",
         "layer_norm_elementwise_affine is false; expected true: layernorms without"},
        {"\"eos_token_id\": 2", "\"do_layer_norm_before\": \"no\"", "do_layer_norm_before is \"no\""},
        {"\"eos_token_id\": 2", "\"eos_token_id\": 2, \"eos_token_id\": 2", "occurs twice"},
        {"\"eos_token_id\": 2", "\"eos_token_id\": NaN", "config.json: byte"},
    };
    Draft d;
    draft_model(&d, F16, "model.");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(model_dir(edited(config_json, cases[i][0], cases[i][1]), &d), cases[i][2]);
    refused(model_dir("[1]", &d), "no JSON object");
    refused(model_dir("", &d), "config.json: byte 0: the text ends here");
    refused("/nonexistent/model", "/nonexistent/model: there is no such directory");
    refused("tests/main.c", "is no directory");
    refused(temp_dir(), "config.json: cannot open");
}

static void missing_files_are_named(void) {
    const char *dir = model_dir(config_json, NULL);
    refused(dir, "neither model.safetensors nor model.safetensors.index.json");
    write_text(dir, "pytorch_model.bin", "x");
    refused(dir, "run scripts/convert_bin.py");
    write_text(dir, "model.safetensors.index.json", "{\"weight_map\": {\"x\": \"gone.safetensors\"}}");
    refused(dir, "gone.safetensors: cannot open: No such file");
    write_text(dir, "model.safetensors.index.json", "{}");
    refused(dir, "has no weight_map");
    write_text(dir, "model.safetensors.index.json", "{\"weight_map\": {}}");
    refused(dir, "has no weight_map that names files");
    static const char *const bad[] = {
        "\"../a.safetensors\"", "\"/etc/passwd\"", "\"..\"", "\"\"", "\"a/b\"", "\".\"", "3", "null"};
    char index[100];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(index, sizeof index, "{\"weight_map\": {\"x\": %s}}", bad[i]);
        write_text(dir, "model.safetensors.index.json", index);
        refused(dir, "expected the name of a file in the same directory");
    }
}

static void files_that_are_no_safetensors_are_refused(void) {
    const char *dir = model_dir(config_json, NULL);
    static const struct {
        const char *bytes;
        size_t len;
        const char *part;
    } cases[] = {
        {"", 0, "has 0 bytes"},
        {"a", 1, "has 1 byte;"},
        {"abc", 3, "has 3 bytes;"},
        {"\x02\0\0\0\0\0\0\0", 8, "the header claims 2 bytes"},
        {"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10, "the header claims 18446744073709551615 bytes"},
        {"\xF8\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10, "the header claims"},
        {"\x03\0\0\0\0\0\0\0{}", 10, "the header claims 3 bytes"},
        {"\0\0\0\0\0\0\0\0", 8, "header: byte 0: the text ends here"},
        {"\x02\0\0\0\0\0\0\0[]", 10, "no JSON object"},
        {"\x02\0\0\0\0\0\0\0{}", 10, "embed_tokens.weight is missing"},
        {"\x02\0\0\0\0\0\0\0\0\0", 10, "header: byte 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(dir, "model.safetensors", cases[i].bytes, cases[i].len);
        refused(dir, cases[i].part);
    }
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "wb"); /* a header of 101 MB, in a sparse file that is long enough */
    CHECK(f && fwrite("\0\0\x50\x06\0\0\0\0", 1, 8, f) == 8 && fclose(f) == 0 && truncate(path, 120 << 20) == 0);
    refused(dir, "the header claims 105906176 bytes");
    remove(path);
    CHECK(mkfifo(path, 0600) == 0);
    refused(dir, "expected a regular file");
}

static void bad_headers_are_refused(void) {
    /* in the header of the small model, where the token table is first and takes bytes 0 to 48 */
    static const char *const cases[][3] = {
        {"\"F16\"", "\"I64\"", "embed_tokens.weight: dtype is I64; expected F16, BF16 or F32"},
        {"\"F16\"", "\"I16\"", "embed_tokens.weight: dtype is I16; expected F16, BF16 or F32"},
        {"\"F16\"", "\"F8_E4M3\"", "dtype is F8_E4M3; expected F16, BF16 or F32"},
        {"\"F16\"", "\"F4\"", "dtype is F4; expected"},
        {"\"F16\"", "5", "dtype is 5; expected a string"},
        {"\"dtype\":\"F16\",", "", "dtype is nothing"},
        {"[6,4]", "[4,6]", "shape is [4,6]; config.json asks for [6,4]"},
        {"[6,4]", "[24]", "shape is [24]; config.json asks for [6,4]"},
        {"[6,4]", "[6,4,1]", "shape is [6,4,1]; config.json asks for [6,4]"},
        {"[6,4]", "[6,5]", "shape is [6,5]; config.json asks for [6,4]"},
        {"[6,4]", "[-6,-4]", "shape is [-6,-4]; config.json asks for [6,4]"},
        {"[6,4]", "[6.5,4]", "shape is [6.5,4]; config.json"},
        {"[6,4]", "[6,\"4\"]", "shape is [6,\"4\"]; config.json"},
        {"[6,4]", "[4294967296,4294967296]", "shape is [4294967296,4294967296]; config.json"},
        {"[6,4]", "[1e300]", "shape is [1e+300]; config.json"},
        {"[6,4]", "[9007199254740992,1024]", "embed_tokens.weight: shape is [9"},
        {"[6,4]", "{}", "shape is an object"},
        {"\"shape\":[6,4],", "", "shape is nothing"},
        {"[0,48]", "[0,46]", "data_offsets span 46 bytes; expected 48 for [6,4] of F16"},
        {"[0,48]", "[48,0]", "expected [begin, end], two whole numbers"},
        {"[0,48]", "[0]", "expected [begin, end], two whole numbers"},
        {"[0,48]", "[0,48,96]", "expected [begin, end], two whole numbers"},
        {"[0,48]", "[-48,0]", "expected [begin, end], two whole numbers"},
        {"[0,48]", "[0.5,48.5]", "expected [begin, end], two whole numbers"},
        {"[0,48]", "\"0,48\"", "expected [begin, end], two whole numbers"},
        {"[0,48]", "{\"a\":0,\"b\":48}", "expected [begin, end], two whole numbers"},
        {"[0,48]", "[1,49]", "overlap at byte"},
        {"[0,48]", "[48,96]", "overlap at byte"},
        {"[0,48]", "[9007199254740944,9007199254740992]", "is the download complete?"},
        {"embed_tokens", "embed_tokenz", "tensor model.decoder.embed_tokens.weight is missing"},
        {"layers.1.fc2.bias", "layers.2.fc2.bias", "tensor model.decoder.layers.1.fc2.bias is missing"},
        {"embed_positions", "embed_tokens", "occurs twice"},
        {"model.decoder.embed_tokens.weight", "model.decoder\\u0000", "byte"},
        {"{\"dtype\":\"F16\",\"shape\":[6,4],\"data_offsets\":[0,48]}", "[]", "dtype is nothing"},
        {"\"F16\",\"shape\":[6,4],\"data_offsets\":[0,48]", /* 2^62 elements, whose bytes are 0 in 64 bits */
         "\"F32\",\"shape\":[2147483648,2147483648],\"data_offsets\":[0,0]",
         "shape is [2147483648,2147483648]; config.json"},
    };
    Draft d, bad;
    draft_model(&d, F16, "model.");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bad = d;
        const char *header = edited(d.header, cases[i][0], cases[i][1]);
        CHECK(strlen(header) < sizeof bad.header);
        strcpy(bad.header, header);
        refused(model_dir(config_json, &bad), cases[i][2]);
    }
    bad = d;
    bad.len -= 2;
    refused(model_dir(config_json, &bad), "layers.1.fc2.bias: ends at byte");
    draft_model(&bad, F16, "model.");
    bad.prefix = "";
    add_tensor(&bad, "lm_head.weight", VOCAB - 1, H1, 0);
    refused(model_dir(config_json, &bad), "lm_head.weight: shape is [5,4]");
    const char *untied = edited(config_json, "{", "{\"tie_word_embeddings\": false,");
    refused(model_dir(untied, &d), "lm_head.weight is missing");
    draft_model(&bad, F16, "model.");
    bad.prefix = "";
    add_tensor(&bad, "lm_head.weight", VOCAB, H1, 0);
    strcpy(bad.header, edited(bad.header, "embed_tokens", "embed_tokenz"));
    refused(model_dir(edited(config_json, "{", "{\"tie_word_embeddings\": false,"), &bad),
            "embed_tokens.weight is missing");
}

static void shards_must_agree(void) {
    Draft d;
    draft_model(&d, F16, "model.");
    const char *dir = model_dir(config_json, NULL);
    write_draft(dir, "a", &d, 0);
    write_draft(dir, "b", &d, 0);
    write_text(dir, "model.safetensors.index.json", "{\"weight_map\": {\"x\": \"a\", \"y\": \"b\"}}");
    refused(dir, "is also in");
    memset(&d, 0, sizeof d);
    d.prefix = "";
    add_globals(&d);
    write_draft(dir, "b", &d, 0);
    write_text(dir, "model.safetensors.index.json", "{\"weight_map\": {\"decoder.layers.0.fc1.weight\": \"b\"}}");
    refused(dir, "self_attn_layer_norm.weight is missing");
}

static void hostile_names_cannot_forge_a_second_line(void) {
    Draft d;
    draft_model(&d, F16, "x\\nflexgen: all is well\\u001b[2J");
    d.len -= 2;
    refused(model_dir(config_json, &d), "tensor x?flexgen: all is well?[2Jdecoder.layers.1.fc2.bias: ends at byte");
}

static void a_file_that_shrinks_is_an_error_and_not_a_signal(void) {
    static const Type types[] = {F16, F32};
    Draft d;
    for (int t = 0; t < 2; t++) {
        draft_model(&d, types[t], "model.");
        const char *dir = model_dir(config_json, &d);
        char path[600];
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        Checkpoint *c = opens(dir);
        const Tensor *last = &c->layer[1][FC2_W];
        CHECK(truncate(path, (off_t)last->offset + 10) == 0);
        f16 bits[64];
        Error err = {0, ""};
        int32_t ids[1] = {2};
        float logits[VOCAB];
        ASSERT_OK(checkpoint_fill(c, bits, last, 0, 2, &err));
        CU_ASSERT_EQUAL(checkpoint_fill(c, bits, last, 0, 32, &err), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "model.safetensors: tensor model.decoder.layers.1.fc2.weight: read error"));
        CU_ASSERT_EQUAL(reference_forward(logits, c, ids, 1, &err), -1);
        checkpoint_close(c);
    }
}

static void nor_is_one_that_ends_within_a_bias_or_the_token_table(void) {
    static const Type types[] = {F16, F32};
    Draft d;
    for (int t = 0; t < 2; t++) {
        draft_model(&d, types[t], "model.");
        const char *dir = model_dir(config_json, &d);
        char path[600];
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        Checkpoint *c = opens(dir);
        Error err = {0, ""};
        Disk *disk = disk_open(dir, 0, c, &err);
        const Tensor table = c->global[TOK_EMBED], bias = c->layer[1][FC2_B];
        const int32_t ids[] = {2, VOCAB - 1};
        float logits[VOCAB], y[2 * H1];
        Op op = embedding(y, F32, NULL, F16, H1, ids, 2, H1, false);
        op.embed.table = table;
        ASSERT_OK(reference_forward(logits, c, ids, 1, &err));
        ASSERT_OK(disk_embed(disk, &op, &err));
        CHECK(truncate(path, (off_t)(bias.offset + tensor_bytes(bias) - 1)) == 0);
        CU_ASSERT_EQUAL(reference_forward(logits, c, ids, 1, &err), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "layers.1.fc2.bias: read error"));
        CHECK(truncate(path, (off_t)(table.offset + tensor_bytes(table) - 1)) == 0);
        CU_ASSERT_EQUAL(disk_embed(disk, &op, &err), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "embed_tokens.weight: read error"));
        disk_close(disk);
        checkpoint_close(c);
    }
}

static void values_beyond_f16_are_refused_by_name(void) {
    static const float bad[] = {65536, -1e30f, INFINITY, NAN};
    Draft d;
    for (int t = 0; t < 8; t++) {
        draft_model(&d, t % 2 ? BF16 : F32, "model.");
        size_t size = type_bytes(d.type),
               at = d.len - (4 + 3) * size; /* element 29 of the last fc2.weight, (4, 8); its bias follows */
        Draft one = {.type = d.type};
        put(&one, bad[t / 2]);
        memcpy(d.data + at, one.data, size);
        Checkpoint *c = opens(model_dir(config_json, &d));
        Error err = {0, ""};
        f16 bits[64];
        CU_ASSERT_EQUAL(checkpoint_fill(c, bits, &c->layer[1][FC2_W], 4, 28, &err), -1);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "tensor model.decoder.layers.1.fc2.weight: element 29 is "));
        ASSERT_OK(checkpoint_fill(c, bits, &c->layer[1][FC2_W], 0, 29, &err));
        checkpoint_close(c);
    }
}

static void random_damage_never_crashes(void) {
    Draft d, bad;
    uint64_t state = 1;
    int opened = 0;
    draft_model(&d, F16, "model.");
    const char *dir = model_dir(config_json, NULL);
    size_t len = strlen(d.header);
    for (int run = 0; run < 2000; run++) {
        bad = d;
        for (int edits = 1 + run % 3; edits > 0; edits--) {
            size_t at = (size_t)((test_random(&state) + 1) / 2 * (float)len);
            bad.header[at] = "0123456789-.eE[]{}\":,\\u\x80zF"[(size_t)((test_random(&state) + 1) / 2 * 25)];
        }
        write_draft(dir, "model.safetensors", &bad, 0);
        Error err = {0, ""};
        Checkpoint *c = checkpoint_open(dir, &err);
        if (c) { /* damage to what is not asked for: everything else must still be there */
            opened++;
            f16 bits[64];
            for (int r = 0; r < NROLES; r++)
                ASSERT_OK(
                    checkpoint_fill(c, bits, &c->layer[1][r], 0, (size_t)c->layer[1][r].rows * c->layer[1][r].cols, &err));
        } else
            CU_ASSERT(err.code == EXIT_FAILED && err.text[0] != 0);
        checkpoint_close(c);
    }
    CU_ASSERT(opened < 200);
}

/* Doubles become floats; floats and halfs stay as they are. The matrices here are of several pieces, as those of a real
 * model are: a piece has 32 bytes. */
static void what_torch_saved_is_converted_doubles_too(void) {
    static const Type types[] = {F32, F32, F16};
    if (system("python3 -c '' 2>/dev/null")) return; /* there is none */
    char command[1200];
    Draft d;
    draft_model(&d, F32, "model.");
    const char *dir = model_dir(config_json, &d);
    snprintf(
        command, sizeof command,
        "python3 -B tests/make_bin.py %s && rm %s/model.safetensors && python3 -B -c 'import sys; "
        "sys.path.insert(0, \"scripts\"); import convert_bin; convert_bin.PIECE = 32; convert_bin.main()' %s 2>%s/said",
        dir, dir, dir, dir);
    CU_ASSERT_EQUAL_FATAL(system(command), 0);
    Checkpoint *c = opens(dir);
    holds_model(c);
    for (int g = 0; g < 2; g++) CU_ASSERT_EQUAL(c->global[g].type, types[g]);
    for (int r = 0; r < NROLES; r++) CU_ASSERT_EQUAL(c->layer[0][r].type, types[(4 + r) % 3]);
    checkpoint_close(c);
    snprintf(command, sizeof command, "grep -q '36 tensors, .*; 12 of F64 written as F32' %s/said", dir);
    CU_ASSERT_EQUAL(system(command), 0);
}

// ---------------------------------------------------------------------------------------------------------------
// Dummies
// ---------------------------------------------------------------------------------------------------------------

static const OptConfig small = {"small", 3, 64, 256, 4, 101, 30, 64, true, true, 2, 0, 1};

static void a_dummy_depends_on_seed_tensor_and_element_only(void) {
    Checkpoint *c = checkpoint_dummy(&small, 7), *same = checkpoint_dummy(&small, 7), *other = checkpoint_dummy(&small, 8);
    enum { COUNT = 64 * 256 };
    f16 *whole = (f16 *)xcalloc(3 * COUNT, sizeof *whole), *piece = whole + COUNT, *third = whole + 2 * COUNT;
    Error err = {0, ""};
    const Tensor *w = &c->layer[2][FC1_W];
    ASSERT_OK(checkpoint_fill(c, whole, w, 0, COUNT, &err));
    for (size_t first = 0, n = 1; first < COUNT; first += n, n = n * 5 % 1009 + 1) { /* odd pieces */
        if (n > COUNT - first) n = COUNT - first;
        ASSERT_OK(checkpoint_fill(same, piece + first, &same->layer[2][FC1_W], first, n, &err));
    }
    CU_ASSERT_EQUAL(memcmp(whole, piece, COUNT * sizeof *whole), 0);
    Tensor rows = tensor_rows(*w, 5, 3); /* a view of some rows sees the same elements */
    ASSERT_OK(checkpoint_fill(c, third, &rows, 0, 3 * 64, &err));
    CU_ASSERT_EQUAL(memcmp(whole + 5 * 64, third, 3 * 64 * sizeof *whole), 0);
    ASSERT_OK(checkpoint_fill(other, third, &other->layer[2][FC1_W], 0, COUNT, &err));
    CU_ASSERT(memcmp(whole, third, 64) != 0);
    ASSERT_OK(checkpoint_fill(c, third, &c->layer[1][FC1_W], 0, COUNT, &err));
    CU_ASSERT(memcmp(whole, third, 64) != 0);
    free(whole);
    checkpoint_close(c);
    checkpoint_close(same);
    checkpoint_close(other);
}

static void a_dummy_s_weights_look_like_weights(void) {
    Checkpoint *c = checkpoint_dummy(&small, 7);
    Error err = {0, ""};
    static f16 bits[256 * 64];
    for (int r = 0; r < NROLES; r++) {
        const Tensor *w = &c->layer[1][r];
        size_t count = (size_t)w->rows * w->cols;
        double sum = 0, squares = 0, most = 0;
        ASSERT_OK(checkpoint_fill(c, bits, w, 0, count, &err));
        for (size_t e = 0; e < count; e++) {
            double x = f16_to_f32(bits[e]);
            sum += x;
            squares += x * x;
            most = fmax(most, fabs(x));
        }
        double mean = sum / (double)count, std = sqrt(squares / (double)count - mean * mean);
        double center = r == LN1_W || r == LN2_W ? 1 : 0;
        CU_ASSERT(fabs(mean - center) < 4 * std / sqrt((double)count)); /* four standard errors */
        CU_ASSERT(std > 0.01 && std < 0.5 && most < 2);
    }
    checkpoint_close(c);
}

/* Whatever else is wrong with such a model, its number is taken from the lowest to the highest that a refusal names. */
static void a_number_of_a_configuration_has_the_bounds_that_it_names(void) {
    static const char *const fields[] = {"num_hidden_layers",   "hidden_size", "ffn_dim",
                                         "num_attention_heads", "vocab_size",  "max_position_embeddings",
                                         "eos_token_id"};
    static const int beyond[] = {-1, 0, 0, 1}; /* of the lowest, twice, and of the highest */
    for (int f = 0; f < 7; f++) {
        int low = -1, high = -1;
        for (int i = -1; i < 4; i++) { /* first for the bounds */
            char from[60], to[60], is[80];
            Error err = {0, ""};
            snprintf(from, sizeof from, "\"%s\": ", fields[f]);
            snprintf(to, sizeof to, "\"%s\": %d, \"was\": ", fields[f], i < 0 ? -1 : (i < 2 ? low : high) + beyond[i]);
            snprintf(is, sizeof is, "%s is %d; expected a whole number from ", fields[f],
                     i < 0 ? -1 : (i < 2 ? low : high) + beyond[i]);
            checkpoint_close(checkpoint_open(model_dir(edited(config_json, from, to), NULL), &err));
            const char *said = strstr(err.text, is);
            CU_ASSERT_EQUAL(said != NULL, i < 0 || beyond[i] != 0);
            if (i < 0) CU_ASSERT_FATAL(said && sscanf(said + strlen(is), "%d to %d", &low, &high) == 2);
        }
    }
}

/* Its size and the time of its last change, to the nanosecond: each of them alone tells. */
static void a_change_shows_in_size_seconds_or_nanoseconds(void) {
    static const struct {
        int seconds, nanoseconds, bytes;
    } cases[] = {{0, 0, 0}, {0, 1, 0}, {0, -1, 0}, {1, 0, 0}, {-1, 0, 0}, {0, 0, 1}, {0, 0, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Draft d;
        Error err = {0, ""};
        char path[400];
        struct stat st;
        draft_model(&d, F16, "model.");
        const char *dir = model_dir(config_json, &d);
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        const struct timespec before[] = {{1000, 500}, {1000, 500}};
        CU_ASSERT(utimensat(AT_FDCWD, path, before, 0) == 0 && stat(path, &st) == 0);
        Checkpoint *c = opens(dir);
        const struct timespec now = {1000 + cases[i].seconds, 500 + cases[i].nanoseconds};
        CU_ASSERT_EQUAL(truncate(path, st.st_size + cases[i].bytes), 0);
        CU_ASSERT_EQUAL(utimensat(AT_FDCWD, path, (struct timespec[]){now, now}, 0), 0);
        CU_ASSERT_EQUAL(checkpoint_unchanged(c, &err), i ? -1 : 0);
        CU_ASSERT(!i || strstr(err.text, "was changed"));
        checkpoint_close(c);
    }
}

/* A job goes on, and stages go together, only with the same model: sizes, what ends a text, what a dummy is made of. */
static void a_digest_tells_two_models_apart(void) {
    OptConfig config[12];
    uint64_t digest[13];
    for (int i = 0; i < 12; i++) config[i] = small;
    config[1].l++, config[2].h1 *= 2, config[3].h2 += 64, config[4].nh *= 2, config[5].vocab++, config[6].max_pos++;
    config[7].embed /= 2, config[8].pre_norm = !small.pre_norm, config[9].final_norm = !small.final_norm;
    config[10].eos++;
    for (int i = 0; i < 13; i++) {
        const uint64_t seed = i == 12 ? 8 : 7;
        Checkpoint *c = checkpoint_dummy(&config[i % 12], seed), *again = checkpoint_dummy(&config[i % 12], seed);
        digest[i] = checkpoint_digest(c);
        CU_ASSERT_EQUAL(checkpoint_digest(again), digest[i]);
        for (int before = 0; before < i; before++)
            CU_ASSERT(digest[before] != digest[i] || (before == 0 && i == 11)); /* which are the same */
        checkpoint_close(c), checkpoint_close(again);
    }
}

/* The same tensors elsewhere are the same model, also where other bytes lie in front of them; with one bit changed in any
 * number of any of them they are not. */
static void a_digest_is_of_what_the_tensors_hold(void) {
    Draft d;
    draft_model(&d, F16, "model.");
    const char *dir = model_dir(config_json, NULL);
    write_draft(dir, "model.safetensors", &d, 0);
    Checkpoint *c = opens(dir);
    const uint64_t first = checkpoint_digest(c);
    checkpoint_close(c);
    for (size_t at = 0; at <= d.len; at += 8) { /* the shortest tensors have as many bytes */
        if (at < d.len) d.data[at] ^= 1;
        write_draft(dir, "model.safetensors", &d, at % 3);
        c = opens(dir);
        CU_ASSERT_EQUAL(checkpoint_digest(c) == first, at == d.len);
        checkpoint_close(c);
        if (at < d.len) d.data[at] ^= 1;
    }
}

static void one_end_of_a_text_may_be_a_list(void) {
    OptConfig config;
    bool tied;
    Error err = {0, ""};
    ASSERT_OK(config_read(&config, &tied, model_dir(edited(config_json, "_id\": 2", "_id\": [5]"), NULL), &err));
    CU_ASSERT_EQUAL(config.eos, 5);
}

/* However large they are: those of other types do not go around the page cache. */
static void what_is_read_from_disk_becomes_f16(void) {
    Error err = {0, ""};
    Checkpoint *c = opens("models/opt-tiny");
    Disk *disk = disk_open(temp_dir(), 0, c, &err);
    Tensor w = c->layer[1][FC1_W];
    const size_t count = (size_t)w.rows * w.cols / 2;
    int checked = 0;
    f16 *expected = xcalloc(count, sizeof *expected), *numbers = xcalloc(2 * count, sizeof *numbers);
    for (Type type = F32; type <= BF16; type++) { /* any bytes are numbers of each type */
        w.type = type, w.rows = 1, w.cols = (int)count, w.ld = count;
        if (checkpoint_fill(c, expected, &w, 0, count, &err)) continue; /* but some are no halfs */
        ASSERT_OK(disk_read(disk, numbers, w, F16, 0, &err));
        CU_ASSERT(!memcmp(numbers, expected, count * sizeof *numbers));
        checked++;
    }
    CU_ASSERT(checked >= 2);
    disk_close(disk);
    checkpoint_close(c);
    free(expected), free(numbers);
}

/* Read around the page cache: a tensor behind the end of the file, and one that it ends within. */
static void nor_is_one_that_ends_before_a_large_matrix_does(void) {
    Error err = {0, ""};
    size_t len, config_len;
    char dir[400], path[500];
    snprintf(dir, sizeof dir, "%s", temp_dir());
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    char *all = file_read("models/opt-tiny/model.safetensors", 1 << 28, &len, &err);
    char *text = file_read("models/opt-tiny/config.json", 1 << 20, &config_len, &err);
    write_file(dir, "model.safetensors", all, len), write_file(dir, "config.json", text, config_len);
    Checkpoint *c = opens(dir);
    Disk *disk = disk_open(dir, 0, c, &err);
    const Tensor a = c->layer[1][FC1_W], b = c->layer[1][FC2_W], first = a.offset < b.offset ? a : b,
                 second = a.offset < b.offset ? b : a;
    f16 *numbers = xcalloc(tensor_bytes(a), 1);
    ASSERT_OK(disk_read(disk, numbers, second, F16, 0, &err));
    CU_ASSERT(!memcmp(numbers, all + second.offset, tensor_bytes(second)));
    CHECK(truncate(path, (off_t)(first.offset + tensor_bytes(first) - 100)) == 0);
    CU_ASSERT_EQUAL_FATAL(disk_read(disk, numbers, second, F16, 0, &err), -1);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "model.safetensors: reading"));
    CU_ASSERT_EQUAL(disk_read(disk, numbers, first, F16, 0, &err), -1);
    disk_close(disk);
    checkpoint_close(c);
    free(all), free(text), free(numbers);
}

/* Another file under its name does no harm, since the first stays open. Of what streams from disk, reads look now and then.
 */
static void a_file_that_changes_while_it_is_open_is_named(void) {
    Draft d;
    Error err = {0, ""};
    f16 row[H1 * H1];
    int failed = 0;
    draft_model(&d, F16, "model.");
    const char *dir = model_dir(config_json, &d);
    char path[400], moved[400];
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    snprintf(moved, sizeof moved, "%s/moved", dir);
    Checkpoint *c = checkpoint_open(dir, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    CU_ASSERT_EQUAL(rename(path, moved), 0);
    write_text(dir, "model.safetensors", "another");
    CU_ASSERT_EQUAL(checkpoint_unchanged(c, &err), 0);
    Disk *disk = disk_open(dir, 0, c, &err);
    for (int i = 0; i < 200; i++) CU_ASSERT_EQUAL(disk_read(disk, row, c->layer[1][Q_W], F16, 0, &err), 0);
    CU_ASSERT_EQUAL(utimensat(AT_FDCWD, moved, (struct timespec[]){{1, 0}, {1, 1}}, 0), 0);
    for (int i = 0; i < 200; i++) failed += disk_read(disk, row, c->layer[1][Q_W], F16, 0, &err) != 0;
    CU_ASSERT(failed > 0 && strstr(err.text, "model.safetensors: was changed while it was in use"));
    err.text[0] = 0;
    CU_ASSERT(checkpoint_unchanged(c, &err) == -1 && strstr(err.text, "was changed"));
    disk_close(disk);
    checkpoint_close(c);
}

CU_TestInfo tests[] = {
    {"all float types, names and alignments are read", all_float_types_names_and_alignments_are_read},
    {"shards of different types make one model", shards_of_different_types_make_one_model},
    {"the head is separate when it differs", the_head_is_separate_when_it_differs},
    {"a tied head is compared as numbers, whatever its type", a_tied_head_is_compared_as_numbers_whatever_its_type},
    {"a tied head is compared to its last number", a_tied_head_is_compared_to_its_last_number},
    {"a tied head stands for a token table that is left out", a_tied_head_stands_for_a_token_table_that_is_left_out},
    {"a separate head makes the logits", a_separate_head_makes_the_logits},
    {"unknown tensors and keys do no harm", unknown_tensors_and_keys_do_no_harm},
    {"a configuration is read alone", a_configuration_is_read_alone},
    {"bad configurations are refused", bad_configurations_are_refused},
    {"missing files are named", missing_files_are_named},
    {"files that are no safetensors are refused", files_that_are_no_safetensors_are_refused},
    {"bad headers are refused", bad_headers_are_refused},
    {"shards must agree", shards_must_agree},
    {"hostile names cannot forge a second line", hostile_names_cannot_forge_a_second_line},
    {"a file that shrinks is an error and not a signal", a_file_that_shrinks_is_an_error_and_not_a_signal},
    {"nor is one that ends within a bias or the token table", nor_is_one_that_ends_within_a_bias_or_the_token_table},
    {"nor is one that ends before a large matrix does", nor_is_one_that_ends_before_a_large_matrix_does},
    {"what is read from disk becomes F16", what_is_read_from_disk_becomes_f16},
    {"a file that changes while it is open is named", a_file_that_changes_while_it_is_open_is_named},
    {"a number of a configuration has the bounds that it names", a_number_of_a_configuration_has_the_bounds_that_it_names},
    {"a change shows in size, seconds or nanoseconds", a_change_shows_in_size_seconds_or_nanoseconds},
    {"a digest tells two models apart", a_digest_tells_two_models_apart},
    {"a digest is of what the tensors hold", a_digest_is_of_what_the_tensors_hold},
    {"one end of a text may be a list", one_end_of_a_text_may_be_a_list},
    {"values beyond f16 are refused by name", values_beyond_f16_are_refused_by_name},
    {"what torch saved is converted, doubles too", what_torch_saved_is_converted_doubles_too},
    {"random damage never crashes", random_damage_never_crashes},
    {"a dummy depends on seed, tensor and element only", a_dummy_depends_on_seed_tensor_and_element_only},
    {"a dummy's weights look like weights", a_dummy_s_weights_look_like_weights},
    CU_TEST_INFO_NULL,
};
