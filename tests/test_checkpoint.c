/* test_checkpoint.c: which checkpoints are opened, and what is read from them; which are refused, and in which words; files
 * that change while they are open; digests; dummies. test_quantize.c has packed ones, test_json.c what is no JSON. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ops.h"
#include "tests.h"
#include "written.h"

#define CONFIG "config.json"
#define TENSORS "model.safetensors"

static Error err;

// ---- A small model --------------------------------------------------------------------------------------------------

enum { LAYERS = 2, H1 = 4, H2 = 8, VOCAB = 6, LAST = VOCAB * H1 - 1, LAST_FC2_W = NGLOBALS + NROLES + FC2_W };

static float value(const OptConfig *config, int t, size_t e) {
    const size_t tensor = t == LM_HEAD ? TOK_EMBED : (size_t)t;
    (void)config;
    return (float)(1 + (7 * tensor + 3 * e) % 255) / 16; /* exact in BF16, too */
}

#define SIZES \
    { "small", LAYERS, H1, H2, 2, VOCAB, 3, H1, true, true, 2, {0}, 0, 0, 1 }
static const Model small = {SIZES, F16, "model.", .number = value};
static const Model headed = {SIZES, F16, "model.", .head = true, F16, value};

/* Opens the small model, until the next call: every tensor of it is there, and holds its numbers, whole and in pieces. */
static const Checkpoint *holds(const char *dir, const Model *m, bool head) {
    static Checkpoint *c;
    int present = 0;
    checkpoint_close(c);
    c = NULL; /* opens may leave the test */
    c = opens(dir);
    for (int t = 0; t < part_count(&c->config); t++) {
        const Tensor *tensor = checkpoint_part(c, t).tensor;
        const size_t count = (size_t)tensor->rows * tensor->cols;
        f16 bits[64];
        CU_ASSERT_FATAL(count <= 64 && (!count || (tensor->ld == (size_t)tensor->cols && tensor->tier == TIER_DISK)));
        present += count > 0;
        for (size_t less = 0; count && less < 2; less++) {
            ASSERT_OK(checkpoint_fill(c, bits, tensor, less, count - 2 * less, &err));
            for (size_t e = less; e < count - less; e++) CU_ASSERT_EQUAL(bits[e - less], f32_to_f16(model_number(m, t, e)));
        }
    }
    CU_ASSERT_EQUAL(present, 4 + head + LAYERS * NROLES);
    return c;
}

// ---- What is opened -------------------------------------------------------------------------------------------------

TEST(all_float_types_names_and_alignments_are_read) {
    for (int i = 0; i < 24; i++) {
        Model m = small;
        m.type = (Type)(i % 3);
        m.prefix = i / 3 % 2 ? "" : "model.";
        const char *dir = model_dir(m);
        spoil(dir, TENSORS, "", &"   "[i / 6]); /* blanks, behind which the data lies */
        CU_ASSERT_EQUAL(holds(dir, &small, false)->layer[1][FC2_W].type, m.type);
    }
}

/* As modules that contain a model name its tensors, the head's too, one inside of another. */
TEST(tensors_may_have_names_of_a_wrapper_in_front) {
    static const char *const wrappers[] = {
        "module.",    "_orig_mod.", "base_model.model.", "module._orig_mod.", "_orig_mod.module.base_model.model.",
        "some.other."};
    for (size_t w = 0; w < 2 * COUNT(wrappers); w++) {
        char prefix[100], head[100];
        Model m = headed;
        m.odd = LM_HEAD, m.odd_at = LAST;
        snprintf(prefix, sizeof prefix, "%s%s", wrappers[w / 2], w % 2 ? "model." : "");
        snprintf(head, sizeof head, "\"%slm_head.", wrappers[w / 2]);
        m.prefix = prefix;
        const char *dir = model_dir(m);
        spoil(dir, TENSORS, "\"lm_head.", head);
        CU_ASSERT(holds(dir, &m, true)->untied);
    }
}

TEST(shards_of_different_types_make_one_model) {
    Model m = small;
    m.shards = 3;
    const char *dir = model_dir(m);
    m.type = F32;
    copy_file(model_dir(m), dir, "b.safetensors");
    const Checkpoint *c = holds(dir, &small, false);
    CU_ASSERT(c->nfiles == 3 && c->layer[0][FC2_W].type == F32 && c->layer[1][FC2_W].type == F16);
}

/* As numbers of F16, whatever the types: the last one may be a little more, by a bit of F16 or by too little for it. A head
 * that config.json does not tie is separate anyhow. */
TEST(a_head_is_separate_when_it_differs_as_numbers_whatever_its_type) {
    static const float more[] = {0, .0625f, 1e-6f};
    for (int i = 0; i < 27; i++) {
        const bool differs = i / 9 == 1;
        Model m = headed;
        m.odd = LM_HEAD, m.odd_at = LAST, m.odd_number = value(NULL, TOK_EMBED, LAST) + more[i / 9];
        m.type = (Type)(i % 3), m.head_type = (Type)(i / 3 % 3);
        const char *dir = model_dir(m);
        CU_ASSERT_EQUAL(holds(dir, &m, differs)->untied, differs);
        spoil(dir, CONFIG, "embeddings\": true", "embeddings\": false");
        CU_ASSERT_FALSE(holds(dir, &m, true)->untied);
    }
}

/* Of tensors so large that they are read in pieces. */
TEST(a_tied_head_is_compared_to_its_last_number) {
    Model m = headed;
    m.config.vocab = 300000;
    for (int differs = 0; differs < 2; differs++) {
        m.odd = differs ? LM_HEAD : 0, m.odd_at = 300000 * H1 - 1;
        Checkpoint *c = opens(model_dir(m));
        CU_ASSERT_EQUAL(c->untied, differs);
        checkpoint_close(c);
    }
}

/* One number of it changes one logit. */
TEST(a_separate_head_makes_the_logits) {
    const int32_t id = 2;
    float logits[2][VOCAB];
    for (int separate = 0; separate < 2; separate++) {
        Model m = headed;
        m.odd = separate ? LM_HEAD : 0, m.odd_at = LAST;
        ASSERT_OK(reference_forward(logits[separate], holds(model_dir(m), &m, separate), &id, 1, &err));
    }
    for (int v = 0; v < VOCAB; v++) CU_ASSERT_EQUAL(logits[0][v] == logits[1][v], v < VOCAB - 1);
}

/* Of tensors that are one, writers of safetensors leave out either. */
TEST(a_tied_head_stands_for_a_token_table_that_is_left_out) {
    const char *dir = model_dir(headed);
    spoil(dir, TENSORS, "embed_tokens", "embed_tokenz");
    CU_ASSERT_FALSE(holds(dir, &small, false)->untied);
}

/* One of the tensors is empty, so that it overlaps nothing. */
TEST(unknown_tensors_and_keys_do_no_harm) {
    const char *dir = model_dir(headed);
    spoil(dir, CONFIG, "{", "{\"_name_or_path\": [1, {}], \"dropout\": 0.1,");
    spoil(dir, TENSORS, "lm_head.weight\":{\"dtype\":\"F16", "decoder.version\":{\"dtype\":\"F4");
    spoil(dir, TENSORS, "{",
          "{\"__metadata__\":{\"format\":\"pt\"},\"odd\":{\"dtype\":\"F4\",\"shape\":[0],\"data_offsets\":[48,48]},");
    holds(dir, &small, false);
}

/* Beside a change: the fields in the order of OptConfig, and whether the head is tied. */
TEST(a_configuration_is_read_alone) {
    static const Fault good[] = {{"", "", "3 64 192 4 300 128 32, 1 1, 7, 1"},
                                 {", \"word_embed_proj_dim\": 32, \"eos_token_id\": 7, \"do_layer_norm_before\": true, "
                                  "\"activation_function\": \"relu\", \"enable_bias\": true, \"tie_word_embeddings\": true",
                                  "", "3 64 192 4 300 128 64, 1 1, 2, 1"},
                                 {"layers\": 3", "layers\": 1", "1 64 192 4 300 128 32, 1 1, 7, 1"},
                                 {"layers\": 3", "layers\": 1024", "1024 64 192 4 300 128 32, 1 1, 7, 1"},
                                 {"_id\": 7", "_id\": 0", "3 64 192 4 300 128 32, 1 1, 0, 1"},
                                 {"_id\": 7", "_id\": 299", "3 64 192 4 300 128 32, 1 1, 299, 1"},
                                 {"_id\": 7", "_id\": [5]", "3 64 192 4 300 128 32, 1 1, 5, 1"},
                                 {"proj_dim\": 32", "proj_dim\": null", "3 64 192 4 300 128 64, 1 1, 7, 1"},
                                 {"before\": true", "before\": false", "3 64 192 4 300 128 32, 0 0, 7, 1"},
                                 {"{", "{\"quantization_config\": null,", "3 64 192 4 300 128 32, 1 1, 7, 1"},
                                 {"{", "{\"_remove_final_layer_norm\": true,", "3 64 192 4 300 128 32, 1 0, 7, 1"},
                                 {"embeddings\": true", "embeddings\": false", "3 64 192 4 300 128 32, 1 1, 7, 0"}};
    const OptConfig config = {"", 3, 64, 192, 4, 300, 128, 32, true, true, 7, {0}, 0, 0, 1};
    char dir[700], fields[200];
    strcpy(dir, in_dir(temp_dir(), "opt-x//"));
    CHECK(mkdir(dir, 0700) == 0);
    for (size_t i = 0; i < COUNT(good); i++) {
        OptConfig c;
        bool tied;
        write_config(dir, &config);
        spoil(dir, CONFIG, good[i].from, good[i].to);
        ASSERT_OK(config_read(&c, &tied, dir, &err));
        snprintf(fields, sizeof fields, "%d %d %d %d %d %d %d, %d %d, %d, %d", c.l, c.h1, c.h2, c.nh, c.vocab, c.max_pos,
                 c.embed, c.pre_norm, c.final_norm, c.eos, tied);
        CU_ASSERT_STRING_EQUAL(fields, good[i].says);
        CU_ASSERT_STRING_EQUAL(c.name, "opt-x");
    }
}

/* Of generation_config.json, and then of config.json; what a directory says about the choice of tokens is named in a line,
 * as greedy decoding knows nothing of it. */
TEST(tokens_that_end_a_text_are_those_of_generation_config_json) {
    static const struct {
        const char *config, *generation, *ends, *notice;
    } cases[] = {
        {"7", NULL, "7", ""},
        {"[7, 5, 0]", NULL, "7 5 0", ""},
        {"7", "{}", "7", ""},
        {"7", "{\"eos_token_id\": null}", "7", ""},
        {"7", "{\"eos_token_id\": 3, \"do_sample\": false, \"num_beams\": 1, \"temperature\": 0.7}", "3", ""},
        {"[7, 5]", "{\"eos_token_id\": 3}", "3", ""},
        {"[7, 5]", "{\"eos_token_id\": [0, 1, 2, 3, 4, 5, 6, 299]}", "0 1 2 3 4 5 6 299", ""},
        {"7", "{\"do_sample\": true, \"repetition_penalty\": 1.2, \"min_length\": 0}", "7",
         ": do_sample is true, repetition_penalty is 1.2: not used; decoding is greedy unless flags say otherwise\n"},
    };
    const OptConfig config = {"", 3, 64, 192, 4, 300, 128, 32, true, true, 7, {0}, 0, 0, 1};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const char *dir = temp_dir();
        Text notice = {0}, ends = {0};
        OptConfig c;
        bool tied;
        char put[100];
        write_config(dir, &config);
        snprintf(put, sizeof put, "_id\": %s", cases[i].config);
        spoil(dir, CONFIG, "_id\": 7", put);
        if (cases[i].generation)
            write_file(dir, "generation_config.json", cases[i].generation, strlen(cases[i].generation));
        ASSERT_OK(config_read(&c, &tied, dir, &err));
        FILE *out = text_stream(&ends);
        fprintf(out, "%d", c.eos);
        for (int e = 0; e < c.nmore; e++) fprintf(out, " %d", c.more_eos[e]);
        putc(0, out), fclose(out);
        CU_ASSERT_STRING_EQUAL(ends.text, cases[i].ends);
        out = text_stream(&notice);
        generation_notice(out, dir);
        putc(0, out), fclose(out);
        CU_ASSERT_STRING_EQUAL(notice.text + (*cases[i].notice ? strlen(in_dir(dir, "generation_config.json")) : 0),
                               cases[i].notice);
        free(ends.text), free(notice.text);
    }
    const char *dir = temp_dir();
    write_config(dir, &config);
    write_file(dir, "generation_config.json", "{\"eos_token_id\": 300}", 21);
    OptConfig c;
    bool tied;
    CU_ASSERT_EQUAL(config_read(&c, &tied, dir, &err), -1);
    said(&err, EXIT_FAILED, "generation_config.json: eos_token_id is 300; expected a whole number from 0 to 299");
}

/* Doubles become floats; floats and halfs stay as they are. The matrices here are of several pieces, as those of a real
 * model are: a piece has 32 bytes. */
TEST(what_torch_saved_is_converted_doubles_too) {
    if (!has_python()) return;
    char command[1200];
    Model m = small;
    m.type = F32;
    const char *dir = model_dir(m);
    snprintf(
        command, sizeof command,
        "d=%s; python3 -B tests/make_bin.py $d && rm $d/model.safetensors && python3 -B -c 'import sys; "
        "sys.path.insert(0, \"scripts\"); import convert_bin; convert_bin.PIECE = 32; convert_bin.main()' $d 2>$d/said && "
        "grep -q '36 tensors, .*; 12 of F64 written as F32' $d/said",
        dir);
    CU_ASSERT_EQUAL_FATAL(system(command), 0);
    const Checkpoint *c = holds(dir, &small, false);
    for (int t = 0, written = 0; t < part_count(&c->config); t++) {
        const Tensor *tensor = checkpoint_part(c, t).tensor;
        if (tensor->rows) CU_ASSERT_EQUAL(tensor->type, written++ % 3 == 2 ? F16 : F32);
    }
}

/* A checkpoint that has a fault of some kind (tests/bad_bin.py), and a command of the shell that succeeds in its directory.
 * $convert is the program, with little memory and time, and what it says goes to ../said. */
typedef struct {
    const char *kind, *command;
} BadBin;

/* One process of Python makes all of them. Those that convert them look for no packages (-S), as they need none: that takes
 * half of their start. */
static void check_bins(const BadBin *bad, int count) {
    const char *dir = temp_dir();
    char text[1500];
    int len = snprintf(text, sizeof text, "python3 -B tests/bad_bin.py %s", dir);
    for (int b = 0; b < count; b++) len += snprintf(text + len, sizeof text - len, " '%s'", bad[b].kind);
    CU_ASSERT_EQUAL_FATAL(system(text), 0);
    for (int b = 0; b < count; b++) {
        snprintf(
            text, sizeof text,
            "here=$PWD; cd %s/%d && ls >../before && "
            "convert() { ulimit -v 400000; exec timeout 30 python3 -BS $here/scripts/convert_bin.py . 2>../said; }\n%s",
            dir, b, bad[b].command);
        const bool good = !system(text);
        if (!good) fprintf(stderr, "\n    %s: %s", bad[b].kind, bad[b].command);
        CU_ASSERT(good);
    }
}

#define REFUSED "(convert); test $? = 1 && ls | cmp -s - ../before && test $(wc -l <../said) = 1 && "

/* Nothing is left of what was written, and nothing takes long. */
TEST(a_hostile_bin_is_refused_in_one_line) {
    static const struct {
        const char *kind, *said;
    } bad[] = {
        {"nested key", "a tuple that describes no tensor"},
        {"nested value", "a tuple that describes no tensor"},
        {"dimensions", "a tuple that describes no tensor"},
        {"long number", "data.pkl cannot be read"},
        {"metadata", "tensor __metadata__: "},
        {"byteorder", "its archive/byteorder has 268435456 bytes; expected at most 1048576"},
        {"pipe", "pytorch_model.bin: is no regular file"},
        {"pipe for an index", "index.json: is no regular file"},
        {"two names of one", "two files that would both become model-1.safetensors"},
        {"one tensor in two", "tensor w: is in two shards, model-1.safetensors and model-2.safetensors"},
        {"bad second shard", "pytorch_model-2.bin: the pickle has a tuple"},
        {"missing shard", "pytorch_model-2.bin: is missing; download it"},
        {"link", "pytorch_model.bin: is a link to ../blobs/0a, which is missing; download it again"},
        {"pointer", "pytorch_model.bin: is a Git-LFS pointer, which stands for the file; run git lfs pull"},
        {"pointer for an index", "pytorch_model.bin.index.json: is a Git-LFS pointer"},
        {"adapter",
         "has neither .*; an adapter (adapter_model.bin) is no model: save what merge_and_unload() of peft returns"},
        {"hub", "is the root of a hub.s cache; give the directory in its snapshots that its refs/main names"},
    };
    BadBin refused[COUNT(bad)];
    char command[COUNT(bad)][300];
    if (!has_python()) return;
    for (size_t b = 0; b < COUNT(bad); b++) {
        snprintf(command[b], sizeof command[b], REFUSED "grep -q '%s' ../said", bad[b].said);
        refused[b] = (BadBin){bad[b].kind, command[b]};
    }
    check_bins(refused, COUNT(bad));
}

/* Also if it is found late, or is a link to nothing; and a signal leaves nothing behind. */
TEST(a_bin_that_is_converted_overwrites_nothing_and_leaves_nothing_half) {
    static const BadBin cases[] = {
        {"good", "umask 027; (convert) && ls -l | grep -q '^-rw-r-----.* model.safetensors$' && test $(ls | wc -l) = 2"},
        {"shards",
         "(convert) && test $(ls | wc -l) = 6 && grep -q 'w1.: .model-2.safetensors' model.safetensors.index.json"},
        {"good", "ln -s nowhere model.safetensors; ls >../before; " REFUSED "grep -q 'is already there' ../said"},
        {"shards", "echo mine >model-2.safetensors; ls >../before; " REFUSED
                   "grep -q 'model-2.safetensors: is already there' ../said && grep -q mine model-2.safetensors"},
        {"slow",
         "convert & n=0; while ! ls | grep -q tmp && test $n -lt 200; do sleep .05; n=$((n + 1)); done; ls | grep -q tmp "
         "&& "
         "kill $! && wait $!; test $? = 1 && ls | cmp -s - ../before && grep -q 'interrupted; nothing' ../said"},
        {"slow",
         "convert & n=0; while ! ls | grep -q tmp && test $n -lt 200; do sleep .05; n=$((n + 1)); done; "
         "echo mine >model.safetensors; wait $!; test $? = 1 && grep -q mine model.safetensors && test $(ls | wc -l) = 2"},
    };
    if (has_python()) check_bins(cases, COUNT(cases));
}

// ---- What is refused ------------------------------------------------------------------------------------------------

static const Fault bad_config[] = {
    {"\"opt\"", "\"llama\"", "model_type is \"llama\"; expected \"opt\""},
    {"\"model_type\": \"opt\",", "", "model_type is nothing; expected \"opt\""},
    {"\"relu\"", "\"gelu\"", "activation_function is \"gelu\"; expected \"relu\": no other activation is supported"},
    {"layers\": 2", "layers\": 1025", "num_hidden_layers is 1025; expected a whole number from 1 to 1024;"},
    {"_size\": 4", "_size\": 0", "hidden_size is 0; expected a whole number from 1 to 65536;"},
    {"_size\": 4", "_size\": 4294967300", "hidden_size is 4294967300; expected a whole number from 1 to 65536;"},
    {"ffn_dim\": 8", "ffn_dim\": 524289", "ffn_dim is 524289; expected a whole number from 1 to 524288;"},
    {"heads\": 2", "heads\": 65537", "num_attention_heads is 65537; expected a whole number from 1 to 65536;"},
    {"vocab_size\": 6", "vocab_size\": 1048577", "vocab_size is 1048577; expected a whole number from 1 to 1048576;"},
    {"embeddings\": 3", "embeddings\": 1048577",
     "max_position_embeddings is 1048577; expected a whole number from 1 to 1048576;"},
    {"_dim\": 4", "_dim\": 65537", "word_embed_proj_dim is 65537; expected a whole number from 1 to 65536;"},
    {"\"hidden_size\": 4,", "", "hidden_size is nothing"},
    {"_size\": 4", "_size\": null", "hidden_size is null"},
    {"heads\": 2", "heads\": 3", "hidden_size 4 is not a multiple of num_attention_heads 3"},
    {"_id\": 2", "_id\": [0,1,2,3,4,5,0,1,2]", "eos_token_id is a list; expected from 1 to 8 tokens"},
    {"_id\": 2", "_id\": [2, 6]", "eos_token_id is 6; expected a whole number from 0 to 5"},
    {"_id\": 2", "_id\": [6]", "eos_token_id is 6; expected a whole number from 0 to 5"},
    {"_id\": 2", "_id\": []", "eos_token_id is a list; expected from 1 to 8 tokens"},
    {"bias\": true", "bias\": false", "enable_bias is false; expected true: layers without biases"},
    {"{", "{\"layer_norm_elementwise_affine\": false,",
     "layer_norm_elementwise_affine is false; expected true: layernorms without"},
    {"before\": true", "before\": \"no\"", "do_layer_norm_before is \"no\""},
    {"{", "{\"quantization_config\": {\"bits\": 4, \"quant_method\": \"gptq\"},",
     "config.json: quantization_config: quant_method is \"gptq\"; expected none; take the model before it was quantized"},
    {"{", "{\"quantization_config\": {\"load_in_8bit\": true},", "quant_method is nothing; expected none; take the model"},
    {NULL, "[1]", "no JSON object"},
    {NULL, "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 644\n", "config.json: is a Git-LFS pointer"},
};

/* In the header, the token table is first and takes bytes 0 to 48. */
static const Fault bad_header[] = {
    {"\"F16\"", "\"I64\"", "embed_tokens.weight: dtype is I64; expected F16, BF16 or F32"},
    {"\"F16\"", "5", "dtype is 5; expected a string"},
    {"[6,4]", "[4,6]", "shape is [4,6]; config.json asks for [6,4]"},
    {"[6,4]", "[24]", "shape is [24]; config.json asks for [6,4]"},
    {"[6,4]", "[6,4,1]", "shape is [6,4,1]; config.json asks for [6,4]"},
    {"[6,4]", "{}", "shape is an object"},
    {"[0,48]", "[0,46]", "data_offsets span 46 bytes; expected 48 for [6,4] of F16"},
    {"[0,48]", "[48,0]", "expected [begin, end], two whole numbers"},
    {"[0,48]", "[0,48,96]", "expected [begin, end], two whole numbers"},
    {"[0,48]", "[-48,0]", "expected [begin, end], two whole numbers"},
    {"[0,48]", "[0,48.5]", "expected [begin, end], two whole numbers"},
    {"[0,48]", "{\"a\":0,\"b\":48}", "expected [begin, end], two whole numbers"},
    {"[0,48]", "[1,49]", "overlap at byte"},
    {"[0,48]", "[9007199254740944,9007199254740992]", "is the download complete?"},
    {"layers.1.fc2.bias", "layers.2.fc2.bias", "tensor model.decoder.layers.1.fc2.bias is missing"},
    {"model.decoder.layers.1.fc2.bias", "x.decoder.layers.1.fc2.bits",
     "fc2.bias is missing; config.json asks for it, and the nearest is x.decoder.layers.1.fc2.bits: is the download"},
    {"model.decoder.layers.1.fc2.bias", "copy.decoder.layers.1.fc1.bias", "decoder.layers.1.fc1.bias is also in"},
    {"layers.1.fc2.bias", "layers.1.fc2.lora_A.weight",
     "layers.1.fc2.lora_A.weight: is of an adapter; save what merge_and_unload() of peft"},
    {"{\"dtype\":\"F16\",\"shape\":[6,4],\"data_offsets\":[0,48]}", "[]", "dtype is nothing"},
    {"model.decoder.embed_tokens.weight\":{\"dtype\":\"F16", "x\\nflexgen: all is well\\u001b[2J\":{\"dtype\":5,\"y\":\"",
     "tensor x?flexgen: all is well?[2J: dtype is 5"},
    {NULL, "[]", "no JSON object"},
    {NULL, "{}", "embed_tokens.weight is missing; config.json asks for it, and the nearest is nothing:"},
};

static const Fault bad_index[] = {
    {NULL, "{}", "has no weight_map"},
    {NULL, "{\"weight_map\": {}}", "has no weight_map that names files"},
    {"a.safetensors", "gone.safetensors",
     "/gone.safetensors: cannot open: No such file or directory; check the path, or download it"},
    {NULL, "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 644\n", "index.json: is a Git-LFS pointer"},
    {"\"a.safetensors\"", "\"../a.safetensors\"", "expected the name of a file in the same directory"},
    {"\"a.safetensors\"", "\"a\\\\b\"", "expected the name of a file in the same directory"},
    {"\"a.safetensors\"", "\"..\"", "expected the name of a file in the same directory"},
    {"\"a.safetensors\"", "3", "expected the name of a file in the same directory"},
};

/* In the first shard, with what is outside of the layers. */
static const Fault bad_shard[] = {
    {"embed_tokens.weight", "layers.0.fc1.weight", "layers.0.fc1.weight is also in"},
    {"embed_tokens.weight", "x", "embed_tokens.weight is missing, as in the other shards"},
};

/* Of a head of its own behind the last norm; the first also where it is compared with the table. */
static const Fault bad_head[] = {
    {"lm_head.weight\":{\"dtype\":\"F16\",\"shape\":[6,4]", "lm_head.weight\":{\"dtype\":\"F16\",\"shape\":[5,4]",
     "lm_head.weight: shape is [5,4]"},
    {"[96,104]},\"lm_head.weight\":{\"dtype\":\"F16\",\"shape\":[6,4],\"data_offsets\":[104,152]", "[96,106]",
     "final_layer_norm.bias: data_offsets span 10 bytes; expected 8 for [4] of F16"},
    {"lm_head.weight", "head.weight", "lm_head.weight is missing"},
    {"embed_tokens", "embed_tokenz", "embed_tokens.weight is missing"},
};

TEST(hostile_texts_are_refused_each_in_its_line) {
    Model sharded = small;
    sharded.shards = 2;
    const char *dir = model_dir(small), *shards = model_dir(sharded), *head = model_dir(headed);
    refuses_each(checkpoint_opens, EXIT_FAILED, dir, CONFIG, bad_config, COUNT(bad_config));
    refuses_each(checkpoint_opens, EXIT_FAILED, dir, TENSORS, bad_header, COUNT(bad_header));
    refuses_each(checkpoint_opens, EXIT_FAILED, shards, TENSORS ".index.json", bad_index, COUNT(bad_index));
    refuses_each(checkpoint_opens, EXIT_FAILED, shards, "a.safetensors", bad_shard, COUNT(bad_shard));
    refuses_each(checkpoint_opens, EXIT_FAILED, head, TENSORS, bad_head, 1);
    spoil(head, CONFIG, "embeddings\": true", "embeddings\": false");
    refuses_each(checkpoint_opens, EXIT_FAILED, head, TENSORS, bad_head, COUNT(bad_head));
    holds(shards, &sharded, false);
    holds(head, &headed, true);
    const off_t size = (off_t)holds(dir, &small, false)->files[0].size;
    CHECK(truncate(in_dir(dir, TENSORS), size - 1) == 0);
    refuses(checkpoint_opens, EXIT_FAILED, dir, "layers.1.fc2.bias: ends at byte");
}

TEST(missing_files_are_named) {
    const char *dir = temp_dir();
    refuses(checkpoint_opens, EXIT_FAILED, "/nonexistent/model", "/nonexistent/model: there is no such directory");
    refuses(checkpoint_opens, EXIT_FAILED, "tests/main.c", "is no directory");
    refuses(checkpoint_opens, EXIT_FAILED, dir, "config.json: cannot open");
    copy_file(model_dir(small), dir, CONFIG);
    refuses(checkpoint_opens, EXIT_FAILED, dir, "or, if they are in pytorch_model.bin, run scripts/convert_bin.py");
}

/* A directory with only an adapter, one with a model too, and a hub's cache of a model. */
TEST(directories_of_other_kinds_are_refused_each_in_its_line) {
    const char *adapter = temp_dir(), *both = model_dir(small), *hub = temp_dir();
    write_file(adapter, "adapter_config.json", "{}", 2);
    write_file(both, "adapter_config.json", "{}", 2);
    CHECK(!mkdir(in_dir(hub, "snapshots"), 0700));
    refuses(checkpoint_opens, EXIT_FAILED, adapter, ": has adapter_config.json, and adapters are not read; save what");
    refuses(checkpoint_opens, EXIT_FAILED, both, ": has adapter_config.json, and adapters are not read; save what");
    refuses(checkpoint_opens, EXIT_FAILED, hub, ": is the root of a hub's cache; give the directory in its snapshots");
    CHECK(!mkdir(in_dir(hub, "refs"), 0700));
    write_file(hub, "refs/main", "0a1b2c\n", 7);
    refuses(checkpoint_opens, EXIT_FAILED, hub, "in its snapshots that its refs/main names: snapshots/0a1b2c; expected a");
    CHECK(!symlink("nothing", in_dir(adapter, "link")));
    refuses(checkpoint_opens, EXIT_FAILED, in_dir(adapter, "link"),
            "/link: is a link to what is missing; download it again");
    copy_file(both, hub, CONFIG), copy_file(both, hub, TENSORS);
    holds(hub, &small, false);
}

TEST(a_link_to_nothing_and_a_pointer_of_git_lfs_are_called_so) {
    static const char pointer[] = "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 644\n";
    static const char *const names[] = {CONFIG, TENSORS, "generation_config.json"};
    for (size_t n = 0; n < COUNT(names); n++) {
        char says[200];
        const char *dir = model_dir(small);
        write_file(dir, names[n], pointer, strlen(pointer));
        snprintf(says, sizeof says, "/%s: is a Git-LFS pointer, which stands for the file; run git lfs pull", names[n]);
        refuses(checkpoint_opens, EXIT_FAILED, dir, says);
        CHECK(!remove(in_dir(dir, names[n])) && !symlink("../blobs/0a", in_dir(dir, names[n])));
        snprintf(says, sizeof says, "/%s: is a link to ../blobs/0a, which is missing; download it again", names[n]);
        refuses(checkpoint_opens, EXIT_FAILED, dir, says);
    }
}

/* A file of so many bytes, whose header says that it has the length `claimed`. */
TEST(files_that_are_no_safetensors_are_refused) {
    static const struct {
        uint64_t claimed;
        off_t size;
        const char *says;
    } cases[] = {
        {0, 0, "has 0 bytes"},
        {1, 1, "has 1 byte;"},
        {3, 10, "the header claims 3 bytes"},
        {1, 8, "the header claims 1 byte;"},
        {UINT64_MAX - 7, 10, "the header claims 18446744073709551608 bytes"},
        {101 << 20, 120 << 20, "the header claims 105906176 bytes"}, /* in a sparse file that is long enough */
        {0, 8, "header: byte 0: the text ends here"},
        {2, 10, "header: byte 0: found byte 0x00"},
    };
    const char *dir = model_dir(small);
    for (size_t i = 0; i < COUNT(cases); i++) {
        write_file(dir, TENSORS, &cases[i].claimed, sizeof cases[i].claimed);
        CHECK(truncate(in_dir(dir, TENSORS), cases[i].size) == 0);
        refuses(checkpoint_opens, EXIT_FAILED, dir, cases[i].says);
    }
    CHECK(!remove(in_dir(dir, TENSORS)) && !mkfifo(in_dir(dir, TENSORS), 0600));
    refuses(checkpoint_opens, EXIT_FAILED, dir, "expected a regular file");
}

TEST(values_beyond_f16_are_refused_by_name) {
    static const float bad[] = {65536, -1e30f, INFINITY, NAN};
    for (int i = 0; i < 8; i++) {
        Model m = small;
        m.type = i % 2 ? BF16 : F32;
        m.shards = 3;
        m.odd = LAST_FC2_W, m.odd_at = 29, m.odd_number = bad[i / 2];
        Checkpoint *c = opens(model_dir(m));
        f16 bits[32];
        CU_ASSERT_EQUAL(checkpoint_fill(c, bits, &c->layer[1][FC2_W], 4, 28, &err), -1);
        CU_ASSERT_PTR_NOT_NULL(
            strstr(err.text, "/c.safetensors: tensor model.decoder.layers.1.fc2.weight: element 29 is "));
        ASSERT_OK(checkpoint_fill(c, bits, &c->layer[1][FC2_W], 0, 29, &err));
        checkpoint_close(c);
    }
}

// ---- Files that change, and the disk --------------------------------------------------------------------------------

/* It ends within the last bias, then within the token table. */
TEST(a_file_that_shrinks_is_an_error_and_not_a_signal) {
    const char *dir = model_dir(small), *path = in_dir(dir, TENSORS);
    Checkpoint *c = opens(dir);
    Disk *disk = disk_open(dir, 0, c, &err);
    const Tensor table = c->global[TOK_EMBED];
    const int32_t ids[] = {2, VOCAB - 1};
    float logits[VOCAB], y[2 * H1];
    f16 bits[VOCAB * H1];
    Op op = embedding(y, F32, NULL, F16, H1, ids, 2, H1, false);
    op.embed.table = table;
    CHECK(truncate(path, (off_t)c->files[0].size - 1) == 0);
    CU_ASSERT_EQUAL(reference_forward(logits, c, ids, 1, &err), -1);
    said(&err, EXIT_FAILED, "model.safetensors: tensor model.decoder.layers.1.fc2.bias: read error");
    ASSERT_OK(disk_embed(disk, &op, &err));
    CHECK(truncate(path, (off_t)(table.offset + tensor_bytes(table) - 1)) == 0);
    CU_ASSERT_EQUAL(disk_embed(disk, &op, &err), -1);
    said(&err, EXIT_FAILED, "model.decoder.embed_tokens.weight: read error");
    CU_ASSERT_EQUAL(checkpoint_fill(c, bits, &table, 0, LAST + 1, &err), -1);
    ASSERT_OK(checkpoint_fill(c, bits, &table, 0, LAST, &err));
    disk_close(disk);
    checkpoint_close(c);
}

/* F16 is read around the page cache, other types are not. Then a tensor lies behind the end of its file, and another is one
 * that it ends within. */
TEST(large_matrices_are_read_from_disk_as_f16_while_they_are_there) {
    enum { COLS = 256, ROWS = 1024 };
    static f16 expected[ROWS * COLS], numbers[2 * ROWS * COLS];
    for (int type = F32; type <= BF16; type++) {
        const Model m = {{"", 1, COLS, ROWS, 4, 9, 9, COLS, true, true, 2, {0}, 0, 0, 1}, (Type)type, "", .number = NULL};
        const char *dir = model_dir(m);
        Checkpoint *c = opens(dir);
        Disk *disk = disk_open(dir, 0, c, &err);
        const Tensor within = c->layer[0][FC1_W], behind = c->layer[0][FC2_W];
        ASSERT_OK(checkpoint_fill(c, expected, &behind, 0, ROWS * COLS, &err));
        ASSERT_OK(disk_read(disk, numbers, behind, F16, 0, &err));
        CU_ASSERT_EQUAL(memcmp(numbers, expected, sizeof expected), 0);
        CHECK(truncate(in_dir(dir, TENSORS), (off_t)(within.offset + tensor_bytes(within) - 100)) == 0);
        CU_ASSERT_EQUAL_FATAL(disk_read(disk, numbers, behind, F16, 0, &err), -1);
        said(&err, EXIT_FAILED, type == F16 ? "model.safetensors: reading" : "fc2.weight: read error");
        CU_ASSERT_EQUAL(disk_read(disk, numbers, within, F16, 0, &err), -1);
        disk_close(disk);
        checkpoint_close(c);
    }
}

/* Sets the time of a file's last change. */
static void touch(const char *path, int seconds, int nanoseconds) {
    const struct timespec times[] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
}

/* Each alone, by one more or one less. */
TEST(a_change_shows_in_size_seconds_or_nanoseconds) {
    for (int i = 0; i < 7; i++) {
        const char *dir = model_dir(small), *path = in_dir(dir, TENSORS);
        int more[] = {0, 0, 0};
        if (i > 0) more[(i - 1) / 2] = i % 2 ? 1 : -1;
        touch(path, 1000, 500);
        Checkpoint *c = opens(dir);
        c->digest = checkpoint_digest(c);
        CHECK(truncate(path, (off_t)c->files[0].size + more[0]) == 0);
        touch(path, 1000 + more[1], 500 + more[2]);
        CU_ASSERT_EQUAL(checkpoint_unchanged(c, &err), i ? -1 : 0);
        if (i > 0) said(&err, EXIT_FAILED, "model.safetensors: was changed");
        checkpoint_close(c);
    }
}

/* Another file under its name does no harm, since the first stays open. Reads from disk look at it now and then. */
TEST(a_file_that_changes_while_it_is_open_is_named) {
    f16 row[H1 * H1];
    const char *dir = model_dir(small), *moved = in_dir(dir, "moved");
    Checkpoint *c = opens(dir);
    c->digest = checkpoint_digest(c);
    CU_ASSERT_EQUAL(rename(in_dir(dir, TENSORS), moved), 0);
    write_file(dir, TENSORS, "another", 7);
    CU_ASSERT_EQUAL(checkpoint_unchanged(c, &err), 0);
    Disk *disk = disk_open(dir, 0, c, &err);
    for (int changed = 0; changed < 2; changed++) {
        int failed = 0;
        for (int i = 0; i < 200; i++) failed += disk_read(disk, row, c->layer[1][Q_W], F16, 0, &err) != 0;
        CU_ASSERT_EQUAL(failed > 0, changed);
        touch(moved, 1, 1);
    }
    said(&err, EXIT_FAILED, "model.safetensors: was changed while it was in use");
    disk_close(disk);
    checkpoint_close(c);
}

/* Somebody links a file, renames it and sets its rights while it is open: nothing has changed. Or he changes data and sets
 * the time back. */
TEST(a_change_shows_when_its_time_was_set_back) {
    for (int way = 0; way < 5; way++) {
        const char *dir = model_dir(small), *path = in_dir(dir, TENSORS), *other = in_dir(dir, "other");
        size_t size;
        struct stat before;
        Checkpoint *c = opens(dir);
        c->digest = checkpoint_digest(c);
        usleep(20000); /* longer than a tick of the file system's clock */
        char *bytes = contents(path, &size);
        CHECK(!stat(path, &before));
        CHECK((way == 1 ? link(path, other) : way == 2 ? rename(path, other) : way == 3 ? chmod(path, 0400) : 0) == 0);
        if (way == 4) {
            const int fd = open(path, O_WRONLY);
            bytes[size - 1] ^= 1;
            CHECK(pwrite(fd, bytes, size, 0) == (ssize_t)size);
            CHECK(!futimens(fd, (struct timespec[]){{0, UTIME_OMIT}, file_changed(&before)}) && !close(fd));
        }
        for (int again = 0; again < 2; again++) CU_ASSERT_EQUAL(checkpoint_unchanged(c, &err), way == 4 ? -1 : 0);
        if (way == 4) said(&err, EXIT_FAILED, "model.safetensors: was changed while it was in use");
        free(bytes);
        checkpoint_close(c);
    }
}

// ---- Digests and dummies --------------------------------------------------------------------------------------------

static const OptConfig medium = {"medium", 3, 64, 256, 4, 101, 30, 64, true, true, 2, {0}, 0, 0, 1};

static uint64_t digest_of(Checkpoint *c) {
    const uint64_t digest = checkpoint_digest(c);
    checkpoint_close(c);
    return digest;
}

/* A job goes on, and stages go together, only with the same model: sizes, what ends a text, what a dummy is made of. */
TEST(a_digest_tells_two_models_apart) {
    enum { MODELS = 13 };
    OptConfig config[MODELS];
    uint64_t digest[MODELS];
    for (int i = 0; i < MODELS; i++) config[i] = medium;
    config[1].l++, config[2].h1 *= 2, config[3].h2 += 64, config[4].nh *= 2, config[5].vocab++, config[6].max_pos++;
    config[7].embed /= 2, config[8].pre_norm = false, config[9].final_norm = false, config[10].eos++, config[11].nmore++;
    for (int i = 0; i < MODELS; i++) {
        const uint64_t seed = i == MODELS - 1 ? 8 : 7;
        digest[i] = digest_of(checkpoint_dummy(&config[i], seed));
        CU_ASSERT_EQUAL(digest_of(checkpoint_dummy(&config[i], seed)), digest[i]);
        for (int before = 0; before < i; before++) CU_ASSERT_NOT_EQUAL(digest[before], digest[i]);
    }
}

/* The same tensors elsewhere are the same model, also where other bytes lie in front of them; with one bit changed in any
 * number of any of them they are not. */
TEST(a_digest_is_of_what_the_tensors_hold) {
    const char *dir = model_dir(small);
    const uint64_t first = digest_of(opens(dir));
    uint64_t header;
    size_t size;
    spoil(dir, TENSORS, "{", "{ ");
    CU_ASSERT_EQUAL(digest_of(opens(dir)), first);
    char *bytes = contents(in_dir(dir, TENSORS), &size);
    memcpy(&header, bytes, sizeof header);
    for (size_t at = sizeof header + header; at < size; at += 8) { /* the shortest tensors have as many bytes */
        bytes[at] ^= 1;
        write_file(dir, TENSORS, bytes, size);
        CU_ASSERT_NOT_EQUAL(digest_of(opens(dir)), first);
        bytes[at] ^= 1;
    }
    free(bytes);
}

/* Its beginning and its end stay: a part of so many bytes in the middle of a matrix is zero, or the whole of it but both
 * ends. A part as long as two strata of five holds at least one of them. */
TEST(a_digest_sees_a_change_within_a_matrix) {
    enum { COLS = 256, ROWS = 1024, ENDS = 4096 };
    const char *dir =
        model_dir((Model){{"", 2, COLS, ROWS, 4, 9, 9, COLS, true, true, 2, {0}, 0, 0, 1}, F16, "", .number = NULL});
    Checkpoint *c = opens(dir);
    const uint64_t first = checkpoint_digest(c);
    size_t size;
    char *bytes = contents(in_dir(dir, TENSORS), &size), *spare = memcpy(xcalloc(size, 1), bytes, size);
    for (int t = 0; t < part_count(&c->config); t++) {
        const Part part = checkpoint_part(c, t);
        const size_t all = tensor_bytes(*part.tensor);
        for (int less = 0; less < 2 && part.matrix; less++) {
            const size_t ends = less ? all * 3 / 10 : ENDS;
            memset(bytes + part.tensor->offset + ends, 0, all - 2 * ends);
            write_file(dir, TENSORS, bytes, size);
            CU_ASSERT_NOT_EQUAL(digest_of(opens(dir)), first);
            memcpy(bytes, spare, size);
        }
    }
    write_file(dir, TENSORS, bytes, size);
    CU_ASSERT_EQUAL(digest_of(opens(dir)), first);
    free(bytes), free(spare);
    checkpoint_close(c);
}

TEST(a_dummy_depends_on_seed_tensor_and_element_only) {
    enum { COLS = 64, ALL = COLS * 256 };
    static f16 whole[ALL], piece[ALL];
    Checkpoint *c = checkpoint_dummy(&medium, 7), *other = checkpoint_dummy(&medium, 8);
    const Tensor w = c->layer[2][FC1_W], rows = tensor_rows(w, 5, 3); /* a view of some rows sees the same elements */
    ASSERT_OK(checkpoint_fill(c, whole, &w, 0, ALL, &err));
    for (size_t first = 0, n = 1; first < ALL; first += n, n = size_min(n * 5 % 1009 + 1, ALL - first)) /* odd pieces */
        ASSERT_OK(checkpoint_fill(c, piece + first, &w, first, n, &err));
    CU_ASSERT_EQUAL(memcmp(whole, piece, sizeof whole), 0);
    ASSERT_OK(checkpoint_fill(c, piece, &rows, 0, 3 * COLS, &err));
    CU_ASSERT_EQUAL(memcmp(whole + 5 * COLS, piece, 3 * COLS * sizeof *whole), 0);
    for (int i = 0; i < 2; i++) {
        ASSERT_OK(checkpoint_fill(i ? c : other, piece, i ? &c->layer[1][FC1_W] : &w, 0, COLS, &err));
        CU_ASSERT_NOT_EQUAL(memcmp(whole, piece, COLS), 0);
    }
    for (int r = 0; r < NROLES; r++) { /* around 1 where they are factors, and else around 0 */
        const Tensor *t = &c->layer[1][r];
        const int n = t->rows * t->cols;
        double sum = 0, squares = 0;
        float *x = checkpoint_floats(c, t, &err);
        for (int e = 0; e < n; e++) sum += x[e], squares += x[e] * x[e];
        const double mean = sum / n, deviation = sqrt(squares / n - mean * mean);
        CU_ASSERT(fabs(mean - (r == LN1_W || r == LN2_W)) < 4 * deviation / sqrt(n));
        CU_ASSERT(.01 < deviation && deviation < .5);
        free(x);
    }
    checkpoint_close(c), checkpoint_close(other);
}
