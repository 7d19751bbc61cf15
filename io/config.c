/* config.c: which model it is: the nine published sizes, the shape of every tensor, and config.json.
 *
 * OPT comes in nine sizes (section 6.1 names those that the paper runs). A checkpoint says its own in config.json, whose
 * fields are not trusted: every size has bounds that keep all products of sizes far from overflow, and what would make it
 * another model than OPT is refused in one line with the file, the field, what was found and what was expected.
 * Read next: checkpoint.c, where tensors of these shapes come from. */
#include <cjson/cJSON.h>

#include "io/io.h"

// ---------------------------------------------------------------------------------------------------------------
// Sizes and shapes
// ---------------------------------------------------------------------------------------------------------------

static const OptConfig sizes[] = {
    /* name      l   h1     h2         nh  vocab  max_pos embed pre_norm final_norm eos */
    {"opt-125m", 12, 768, 4 * 768, 12, 50272, 2048, 768, true, true, 2, 0, 1},
    {"opt-350m", 24, 1024, 4 * 1024, 16, 50272, 2048, 512, false, false, 2, 0, 1},
    {"opt-1.3b", 24, 2048, 4 * 2048, 32, 50272, 2048, 2048, true, true, 2, 0, 1},
    {"opt-2.7b", 32, 2560, 4 * 2560, 32, 50272, 2048, 2560, true, true, 2, 0, 1},
    {"opt-6.7b", 32, 4096, 4 * 4096, 32, 50272, 2048, 4096, true, true, 2, 0, 1},
    {"opt-13b", 40, 5120, 4 * 5120, 40, 50272, 2048, 5120, true, true, 2, 0, 1},
    {"opt-30b", 48, 7168, 4 * 7168, 56, 50272, 2048, 7168, true, true, 2, 0, 1},
    {"opt-66b", 64, 9216, 4 * 9216, 72, 50272, 2048, 9216, true, true, 2, 0, 1},
    {"opt-175b", 96, 12288, 4 * 12288, 96, 50272, 2048, 12288, true, true, 2, 0, 1},
};

int opt_config_by_name(OptConfig *config, const char *name) {
    if (strncmp(name, "facebook/", 9) == 0) name += 9;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(name, sizes[i].name) == 0) return *config = sizes[i], 0;
    return -1;
}

const char *opt_known_names(void) {
    return "opt-125m, opt-350m, opt-1.3b, opt-2.7b, opt-6.7b, opt-13b, opt-30b, opt-66b, opt-175b";
}

void opt_role_shape(const OptConfig *config, Role role, int *rows, int *cols) {
    bool matrix = role_is_matrix(role);
    int out = role == FC1_W || role == FC1_B ? config->h2 : config->h1;
    *rows = matrix ? out : 1;
    *cols = !matrix ? out : role == FC2_W ? config->h2 : config->h1;
}

void opt_global_shape(const OptConfig *config, Global global, int *rows, int *cols) {
    bool project = config->embed != config->h1;
    int shape[NGLOBALS][2] = {
        [TOK_EMBED] = {config->vocab, config->embed},
        [POS_EMBED] = {config->max_pos + 2, config->h1},
        [PROJECT_IN] = {project ? config->h1 : 0, config->embed},
        [PROJECT_OUT] = {project ? config->embed : 0, config->h1},
        [FINAL_LN_W] = {config->final_norm, config->h1},
        [FINAL_LN_B] = {config->final_norm, config->h1},
        [LM_HEAD] = {config->vocab, config->embed},
    };
    const bool of_first = global == TOK_EMBED || global == POS_EMBED || global == PROJECT_IN;
    *rows = (of_first ? is_first(config) : is_last(config)) ? shape[global][0] : 0;
    *cols = shape[global][1];
}

// ---------------------------------------------------------------------------------------------------------------
// config.json
// ---------------------------------------------------------------------------------------------------------------

/* A config.json while it is read. */
typedef struct {
    const char *path;
    const cJSON *json;
    Error *err;
} Fields;

/* The field `key` holds something else than what is expected. */
static int refuse_field(const Fields *f, const char *key, const char *expected) {
    return json_refuse(f->err, f->path, key, json_get(f->json, key), "%s", expected);
}

/* A field that is absent or null, and need not be there. */
static bool is_left_out(const Fields *f, const char *key) {
    const cJSON *value = json_get(f->json, key);
    return !value || cJSON_IsNull(value);
}

/* Field key, from lo to hi. Left out it gives missing, unless that is negative: then the field is required. */
static int whole_field(int *number, const Fields *f, const char *key, int lo, int hi, int missing) {
    size_t n = 0;
    if (missing >= 0 && is_left_out(f, key)) return *number = missing, 0;
    if (json_whole(json_get(f->json, key), &n) && n >= (size_t)lo && n <= (size_t)hi) return *number = (int)n, 0;
    return json_refuse(f->err, f->path, key, json_get(f->json, key),
                       "a whole number from %d to %d; take the config.json that came with the model", lo, hi);
}

static int bool_field(bool *flag, const Fields *f, const char *key, bool missing) {
    const cJSON *value = json_get(f->json, key);
    if (!is_left_out(f, key) && !cJSON_IsBool(value)) return refuse_field(f, key, "true or false");
    *flag = cJSON_IsBool(value) ? cJSON_IsTrue(value) : missing;
    return 0;
}

/* What every published OPT has, and this program knows no other way. */
static int check_kind(const Fields *f) {
    static const char *const needed[][2] = {
        {"enable_bias", "true: layers without biases are not supported"},
        {"layer_norm_elementwise_affine", "true: layernorms without weights of their own are not supported"}};
    const cJSON *type = json_get(f->json, "model_type"), *activation = json_get(f->json, "activation_function");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "opt") != 0)
        return refuse_field(f, "model_type", "\"opt\": only OPT models are supported");
    if (activation && (!cJSON_IsString(activation) || strcmp(activation->valuestring, "relu") != 0))
        return refuse_field(f, "activation_function", "\"relu\": no other activation is supported");
    for (int i = 0; i < 2; i++) {
        bool flag;
        if (bool_field(&flag, f, needed[i][0], true) != 0) return -1;
        if (!flag) return refuse_field(f, needed[i][0], needed[i][1]);
    }
    return 0;
}

/* Hugging Face allows a list of tokens that end a text; here there is one. */
static int read_eos(OptConfig *c, const Fields *f) {
    const cJSON *eos = json_get(f->json, "eos_token_id");
    size_t id;
    if (!cJSON_IsArray(eos)) return whole_field(&c->eos, f, "eos_token_id", 0, c->vocab - 1, c->vocab > 2 ? 2 : 0);
    if (cJSON_GetArraySize(eos) == 1 && json_whole(eos->child, &id) && id < (size_t)c->vocab) return c->eos = (int)id, 0;
    return refuse_field(f, "eos_token_id",
                        "one token, or a list of one, since one alone ends a text here: leave </s> in it");
}

static int read_sizes(OptConfig *c, const Fields *f) {
    const struct {
        const char *key;
        int *size, most;
    } sizes[] = {{"num_hidden_layers", &c->l, 1024}, {"hidden_size", &c->h1, 1 << 16},
                 {"ffn_dim", &c->h2, 1 << 19},       {"num_attention_heads", &c->nh, 1 << 16},
                 {"vocab_size", &c->vocab, 1 << 20}, {"max_position_embeddings", &c->max_pos, 1 << 20}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (whole_field(sizes[i].size, f, sizes[i].key, 1, sizes[i].most, -1) != 0) return -1;
    if (whole_field(&c->embed, f, "word_embed_proj_dim", 1, 1 << 16, c->h1) != 0) return -1;
    if (c->h1 % c->nh != 0)
        return fail(f->err, EXIT_FAILED,
                    "%s: hidden_size %d is not a multiple of num_attention_heads %d; expected heads of one size", f->path,
                    c->h1, c->nh);
    return read_eos(c, f);
}

static int read_fields(OptConfig *c, bool *tied, const Fields *f) {
    bool no_final_norm = false;
    int status = check_kind(f) || read_sizes(c, f) || bool_field(&c->pre_norm, f, "do_layer_norm_before", true) ||
                 bool_field(&no_final_norm, f, "_remove_final_layer_norm", false) ||
                 bool_field(tied, f, "tie_word_embeddings", true);
    c->final_norm = c->pre_norm && !no_final_norm;
    return -status;
}

cJSON *config_object(char path[MAX_PATH], const char *dir, const char *name, Error *err) {
    return file_path(path, dir, name, err) ? NULL : json_read(path, MAX_JSON, err);
}

/* The last component of dir, as far as it is UTF-8 and fits. */
static void model_name(char name[64], const char *dir) {
    size_t end = strlen(dir), from, n;
    while (end > 1 && dir[end - 1] == '/') end--;
    for (from = end; from > 0 && dir[from - 1] != '/'; from--) continue;
    for (n = end - from < 63 ? end - from : 63; n > 0 && !utf8_valid(dir + from, n); n--) continue;
    memcpy(name, dir + from, n);
    name[n] = 0;
}

int config_read(OptConfig *config, bool *tied, const char *dir, Error *err) {
    char path[MAX_PATH];
    const char *why = directory_fault(dir);
    if (why)
        return fail(err, EXIT_FAILED, "%.300s: %s; expected a Hugging Face directory, with config.json and *.safetensors",
                    dir, why);
    cJSON *json = config_object(path, dir, "config.json", err);
    if (!json) return -1;
    *config = (OptConfig){.l = 0};
    model_name(config->name, dir);
    int status = read_fields(config, tied, &(Fields){path, json, err});
    cJSON_Delete(json);
    return status;
}
