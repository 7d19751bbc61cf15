/* checkpoint.c: reads a model: config.json and the tensors of a Hugging Face directory; and makes
 * dummies, models of a known size with random weights.
 *
 * OPT was published in nine sizes (section 6.1 names those that the paper runs); the first chapter
 * has their sizes and the shape of every tensor. A directory holds config.json and either
 * model.safetensors or several shards, which model.safetensors.index.json lists. A safetensors file
 * is 8 bytes with the length of a header, the header in JSON, and the data of the tensors: the
 * header gives the dtype, the shape and the place in the data for each name. A file whose
 * __metadata__ has the format "flexgen-packed-1" holds the matrices of the layers packed, and its
 * tables if their dtype is U8; quantize.c writes such files and describes their layout.
 *
 * Contract: no input is trusted. Every size in config.json has bounds that keep all products of
 * sizes far from overflow, and a field that would make the model anything but an OPT is refused.
 * When checkpoint_open has succeeded, every tensor that the configuration asks for has its shape,
 * lies inside its file and overlaps no other; other content of a file is ignored. Every fault is
 * reported in one line with the file, the field, what was found, what was expected and what to do.
 * Opening reads only the headers (and compares a tied head with the token table). checkpoint_fill
 * reads tensors later, in parts; a tensor may begin at any byte, because old writers did not align
 * them.
 *
 * DIFFERS: the paper's dummy weights are all equal, which hides every mistake of order and place;
 * ours are random.
 * Read next: base/os.c. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <libgen.h>
#include <math.h>
#include <unistd.h>

#include "base/simd.h"
#include "io/io.h"

// -------------------------------------------------------------------------------------------------
// Sizes and shapes
// -------------------------------------------------------------------------------------------------

/* The sizes of a published model, as far as they differ. Only opt-350m projects its embeddings, and
 * it alone normalizes after the sublayers. */
// clang-format off
static const struct {
    const char *name;
    int l, h1, nh, embed;
} sizes[] = {
    {"opt-125m", 12,   768, 12,   768},
    {"opt-350m", 24,  1024, 16,   512},
    {"opt-1.3b", 24,  2048, 32,  2048},
    {"opt-2.7b", 32,  2560, 32,  2560},
    {"opt-6.7b", 32,  4096, 32,  4096},
    {"opt-13b",  40,  5120, 40,  5120},
    {"opt-30b",  48,  7168, 56,  7168},
    {"opt-66b",  64,  9216, 72,  9216},
    {"opt-175b", 96, 12288, 96, 12288},
};
// clang-format on

int opt_config_by_name(OptConfig *config, const char *name) {
    if (!strncmp(name, "facebook/", 9))
        name += 9;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int h1 = sizes[i].h1, embed = sizes[i].embed;
        if (strcmp(name, sizes[i].name))
            continue;
        *config = (OptConfig){.l = sizes[i].l,
                              .h1 = h1,
                              .h2 = 4 * h1,
                              .nh = sizes[i].nh,
                              .vocab = 50272,
                              .max_pos = 2048,
                              .embed = embed,
                              .pre_norm = embed == h1,
                              .final_norm = embed == h1,
                              .eos = 2,
                              .stages = 1};
        strcpy(config->name, name);
        return 0;
    }
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
    bool here = global <= PROJECT_IN ? is_first_stage(config) : is_last_stage(config);
    *rows = here ? shape[global][0] : 0;
    *cols = shape[global][1];
}

// -------------------------------------------------------------------------------------------------
// config.json
// -------------------------------------------------------------------------------------------------

/* A config.json that is being read. */
typedef struct {
    const cJSON *json;
    Error *err;
} Fields;

/* Fills err: the field `key` does not hold what is expected. */
static int refuse_field(const Fields *f, const char *key, const char *expected) {
    return json_refuse(f->err, key, json_get(f->json, key), "%s", expected);
}

/* Returns true if a field is absent or null. */
static bool is_left_out(const Fields *f, const char *key) {
    const cJSON *value = json_get(f->json, key);
    return !value || cJSON_IsNull(value);
}

/* Reads the value of field `key`, a whole number from lo to hi. */
static int whole_field(int *number, const Fields *f, const char *key, const cJSON *value, int lo,
                       int hi) {
    size_t n;
    if (!json_whole(value, &n) || n < (size_t)lo || n > (size_t)hi)
        return json_refuse(
            f->err, key, value,
            "a whole number from %d to %d; take the config.json that came with the model", lo, hi);
    *number = n;
    return 0;
}

/* Reads a field that is true or false. One that is left out leaves *flag as it is. */
static int bool_field(bool *flag, const Fields *f, const char *key) {
    const cJSON *value = json_get(f->json, key);
    if (is_left_out(f, key))
        return 0;
    *flag = cJSON_IsTrue(value);
    return cJSON_IsBool(value) ? 0 : refuse_field(f, key, "true or false");
}

/* Refuses a model that differs from every published OPT in kind, activation, biases or layernorms;
 * this program supports nothing else there. */
static int check_kind(const Fields *f) {
    static const char *const needed[][3] = {
        {"model_type", "\"opt\"", "\"opt\": only OPT models are supported"},
        {"activation_function", "\"relu\"", "\"relu\": no other activation is supported"},
        {"enable_bias", "true", "true: layers without biases are not supported"},
        {"layer_norm_elementwise_affine", "true",
         "true: layernorms without weights of their own are not supported"}};
    if (!is_left_out(f, "quantization_config"))
        return json_refuse(f->err, "quantization_config: quant_method",
                           json_get(json_get(f->json, "quantization_config"), "quant_method"),
                           "none; take the model before it was quantized, and pack that by flexgen "
                           "quantize");
    for (int i = 0; i < 4; i++) {
        char text[100];
        const char *key = needed[i][0], *value = json_describe(text, json_get(f->json, key));
        if (strcmp(value, needed[i][1]) && (i == 0 || !is_left_out(f, key)))
            return refuse_field(f, key, needed[i][2]);
    }
    return 0;
}

/* Reads the tokens that end a text, one or a list. If the field is left out, they stay as they are.
 */
static int read_eos(OptConfig *c, const Fields *f) {
    static const char key[] = "eos_token_id";
    const cJSON *given = json_get(f->json, key), *id = cJSON_IsArray(given) ? given->child : given;
    int most = sizeof c->more_eos / sizeof *c->more_eos, n = cJSON_GetArraySize(given);
    if (is_left_out(f, key))
        return 0;
    if (!id || n > most + 1)
        return json_refuse(f->err, key, given, "from 1 to %d tokens", most + 1);
    c->nmore = imax(n - 1, 0);
    for (int i = 0; i <= c->nmore; i++, id = id->next)
        if (whole_field(i ? &c->more_eos[i - 1] : &c->eos, f, key, id, 0, c->vocab - 1))
            return -1;
    return 0;
}

static int read_sizes(OptConfig *c, const Fields *f) {
    const struct {
        const char *key;
        int *size, most;
    } known_as[] = {
        {"num_hidden_layers", &c->l, 1024},
        {"hidden_size", &c->h1, 1 << 16},
        {"ffn_dim", &c->h2, 1 << 19},
        {"num_attention_heads", &c->nh, 1 << 16},
        {"vocab_size", &c->vocab, 1 << 20},
        {"max_position_embeddings", &c->max_pos, 1 << 20},
        {"word_embed_proj_dim", &c->embed, 1 << 16},
    };
    for (size_t i = 0; i < sizeof known_as / sizeof *known_as; i++) {
        const char *key = known_as[i].key;
        if (known_as[i].size == &c->embed && is_left_out(f, key))
            c->embed = c->h1;
        else if (whole_field(known_as[i].size, f, key, json_get(f->json, key), 1, known_as[i].most))
            return -1;
    }
    if (c->h1 % c->nh)
        return fail(f->err, EXIT_FAILED,
                    "hidden_size %d is not a multiple of num_attention_heads %d; expected heads of "
                    "one size",
                    c->h1, c->nh);
    c->eos = c->vocab > 2 ? 2 : 0;
    return read_eos(c, f);
}

static int read_fields(OptConfig *c, bool *tied, const Fields *f) {
    bool no_final_norm = false;
    c->pre_norm = *tied = true;
    if (check_kind(f) || read_sizes(c, f) || bool_field(&c->pre_norm, f, "do_layer_norm_before") ||
        bool_field(&no_final_norm, f, "_remove_final_layer_norm") ||
        bool_field(tied, f, "tie_word_embeddings"))
        return -1;
    c->final_norm = c->pre_norm && !no_final_norm;
    return 0;
}

/* Reads the tokens that end a text from generation_config.json, which comes before config.json. */
static int read_generation(OptConfig *config, char path[MAX_PATH], const char *dir, Error *err) {
    cJSON *json;
    if (file_path(path, dir, "generation_config.json", err) ||
        json_read_if(&json, path, MAX_JSON, err))
        return -1;
    int status = json && read_eos(config, &(Fields){json, err}) ? fail_at(err, path) : 0;
    cJSON_Delete(json);
    return status;
}

/* Reads dir/name as a JSON object and writes its path to `path`. Returns NULL and fills err on
 * failure. */
static cJSON *read_object(char path[MAX_PATH], const char *dir, const char *name, Error *err) {
    return file_path(path, dir, name, err) ? NULL : json_read(path, MAX_JSON, err);
}

/* Returns true if dir/name exists, as a file or anything else, or if that cannot be found out: then
 * opening it reports why. */
static bool exists(const char *dir, const char *name) {
    char path[MAX_PATH];
    struct stat st;
    return snprintf(path, sizeof path, "%s/%s", dir, name) < MAX_PATH &&
           (lstat(path, &st) == 0 || errno != ENOENT);
}

/* Returns why a directory is not the one with the model, or NULL. For the root of a hub's cache
 * reads the name of its newest snapshot. */
static const char *misplaced(char snapshot[100], const char *dir) {
    char path[MAX_PATH];
    size_t len;
    Error none;
    if (exists(dir, "adapter_config.json"))
        return "has adapter_config.json, and adapters are not read; save what merge_and_unload() "
               "of peft returns, without that file";
    if (exists(dir, "config.json") || !exists(dir, "snapshots"))
        return NULL;
    char *newest =
        file_path(path, dir, "refs/main", &none) ? NULL : file_read(path, 80, &len, &none);
    if (newest)
        snprintf(snapshot, 100, ": snapshots/%.*s", (int)strcspn(newest, "\n"), newest);
    free(newest);
    return "is the root of a hub's cache; give the directory in its snapshots that its refs/main "
           "names";
}

int config_read(OptConfig *config, bool *tied, const char *dir, Error *err) {
    char path[MAX_PATH], snapshot[100] = "";
    const char *why = directory_fault(dir);
    if (!why)
        why = misplaced(snapshot, dir);
    if (why)
        return fail(
            err, EXIT_FAILED,
            "%.300s: %s%s; expected a Hugging Face directory, with config.json and *.safetensors",
            dir, why, snapshot);
    cJSON *json = read_object(path, dir, "config.json", err);
    if (!json)
        return -1;
    *config = (OptConfig){.l = 0};
    int status = read_fields(config, tied, &(Fields){json, err}) ? fail_at(err, path) : 0;
    cJSON_Delete(json);
    if (status || read_generation(config, path, dir, err))
        return -1;
    /* The name is the last component of dir, cut where it does not fit or is not UTF-8. */
    char *name = config->name;
    snprintf(name, sizeof config->name, "%s", basename(dirname(path)));
    name[utf8_invalid_at(name, strlen(name))] = 0;
    return status;
}

bool is_model_text(const char *name) {
    return has_word(
        " config.json generation_config.json tokenizer.json vocab.json merges.txt "
        "tokenizer_config.json special_tokens_map.json added_tokens.json ",
        name);
}

void generation_notice(FILE *out, const char *dir) {
    char path[MAX_PATH + 2], text[100];
    cJSON *json = NULL;
    Error ignored; /* config_read has reported it */
    if (!file_path(path, dir, "generation_config.json", &ignored))
        json_read_if(&json, path, MAX_JSON, &ignored);
    const char *before = strcat(path, ": ");
    for (const cJSON *field = json ? json->child : NULL; field; field = field->next) {
        const char *value = json_describe(text, field);
        if (!has_word(" do_sample num_beams repetition_penalty min_new_tokens bad_words_ids "
                      "no_repeat_ngram_size min_length suppress_tokens ",
                      field->string) ||
            has_word(" null false 0 1 ", value))
            continue;
        fprintf(out, "%s%s is %s", before, field->string, value);
        before = ", ";
    }
    if (before != path)
        fprintf(out, ": not used; decoding is greedy unless flags say otherwise\n");
    cJSON_Delete(json);
}

// -------------------------------------------------------------------------------------------------
// safetensors headers
// -------------------------------------------------------------------------------------------------

/* One tensor of a header, whether the model needs it or not. */
typedef struct {
    const char *name, *dtype; /* belong to the header's JSON tree */
    const cJSON *shape;       /* belongs to it, too */
    int file;                 /* index into Checkpoint.files */
    const char *path;         /* the path of this file */
    size_t begin, end;        /* bytes in the file */
} Entry;

/* A checkpoint that is being opened. */
typedef struct {
    Checkpoint *checkpoint;
    cJSON *headers; /* an array of the headers of all files */
    Entry *entries; /* (nentries), the tensors of all files */
    size_t nentries;
    bool tied; /* config.json says that the head is the token table */
} Opening;

/* Reads one member of a header into *e: its name, dtype, shape and place in the file. `data` is the
 * byte of the file where the data begins. Refuses a place that lies outside of the file. */
static int entry_read(Entry *e, const cJSON *member, const TensorFile *file, size_t data,
                      Error *err) {
    const cJSON *dtype = json_get(member, "dtype"), *offsets = json_get(member, "data_offsets");
    e->name = member->string;
    e->dtype = cJSON_GetStringValue(dtype);
    e->shape = json_get(member, "shape");
    if (!e->dtype)
        return json_refuse(err, "dtype", dtype, "a string such as \"F16\"");
    if (!cJSON_IsArray(e->shape))
        return json_refuse(err, "shape", e->shape, "a list of whole numbers");
    if (cJSON_GetArraySize(offsets) != 2 || !cJSON_IsArray(offsets) ||
        !json_whole(offsets->child, &e->begin) || !json_whole(offsets->child->next, &e->end) ||
        e->begin > e->end)
        return json_refuse(err, "data_offsets", offsets,
                           "[begin, end], two whole numbers in this order");
    e->begin += data;
    e->end += data;
    if (strstr(e->name, ".lora_"))
        return fail(err, EXIT_FAILED,
                    "is of an adapter; save what merge_and_unload() of peft returns");
    if (e->end <= file->size)
        return 0;
    return fail(err, EXIT_FAILED,
                "ends at byte %zu, but the file at %zu; is the download complete?", e->end,
                file->size);
}

/* Reads a file's header. Sets *data to the byte where the tensors' data begins. */
static int header_read(cJSON **header, size_t *data, const TensorFile *file, Error *err) {
    uint64_t len;
    if (file->size < sizeof len)
        return fail(err, EXIT_FAILED,
                    "has %zu byte%s; expected a safetensors file, which has at least 10: is the "
                    "download complete?",
                    file->size, plural(file->size));
    const char *why = file_read_at(file->fd, &len, sizeof len, 0);
    if (why)
        return fail(err, EXIT_FAILED, "header: read error: %s", why);
    if (len > MAX_HEADER || len > file->size - sizeof len)
        return fail(err, EXIT_FAILED,
                    "the header claims %llu byte%s; expected at most %d and at most the %zu that "
                    "follow: not a safetensors file, or an incomplete download",
                    (unsigned long long)len, plural(len), MAX_HEADER, file->size - sizeof len);
    *data = sizeof len + len;
    char *text = file_read_part(file->fd, "header", len, sizeof len, err);
    *header = text ? json_object(text, len, err) : NULL;
    if (text && !*header)
        fail_at(err, "header");
    free(text);
    return *header ? 0 : -1;
}

/* Sets *packed if the file's __metadata__ has our packed format; refuses other versions of it.
 * Numbers are strings there, as all values of __metadata__. */
static int metadata_read(bool *packed, const cJSON *metadata, Error *err) {
    static const char *const fields[][2] = {
        {"format", PACKED_FORMAT}, {"flexgen.bits", "4"}, {"flexgen.group", "64"}};
    const char *format = cJSON_GetStringValue(json_get(metadata, "format"));
    if (!format || strncmp(format, "flexgen-packed", 14))
        return 0;
    for (int f = 0; f < 3; f++) {
        const cJSON *value = json_get(metadata, fields[f][0]);
        char found[100];
        if (!cJSON_IsString(value) || strcmp(value->valuestring, fields[f][1]))
            return fail(err, EXIT_FAILED,
                        "__metadata__: %s is %s; expected \"%s\": pack the model again",
                        fields[f][0], json_describe(found, value), fields[f][1]);
    }
    *packed = true;
    return 0;
}

/* Adds all tensors of file f to the entries. Refuses a checkpoint of which some files are packed
 * and others are not. */
static int file_entries(Opening *o, int f, Error *err) {
    Checkpoint *c = o->checkpoint;
    const TensorFile *file = &c->files[f];
    bool packed = false;
    cJSON *header = NULL;
    size_t data = 0;
    if (header_read(&header, &data, file, err))
        return -1;
    cJSON_AddItemToArray(o->headers, header);
    const cJSON *metadata = json_get(header, "__metadata__");
    if (metadata_read(&packed, metadata, err))
        return -1;
    o->entries = xrealloc(o->entries, o->nentries + cJSON_GetArraySize(header), sizeof *o->entries);
    for (const cJSON *member = header->child; member; member = member->next) {
        if (member == metadata)
            continue;
        Entry *e = &o->entries[o->nentries++];
        e->file = f;
        e->path = file->path;
        if (entry_read(e, member, file, data, err)) {
            char tensor[220];
            snprintf(tensor, sizeof tensor, "tensor %.200s", member->string);
            return fail_at(err, tensor);
        }
    }
    if (f == 0)
        c->packed = packed;
    if (packed == c->packed)
        return 0;
    return fail(err, EXIT_FAILED, "is %spacked, %s is %spacked; expected shards of one model",
                packed ? "" : "not ", c->files[0].path, c->packed ? "" : "not ");
}

static int compare_places(const void *a, const void *b) {
    const Entry *x = a, *y = b;
    if (x->file != y->file)
        return x->file - y->file;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    /* An empty tensor comes before another with the same begin: it overlaps nothing. */
    return (x->end > y->end) - (x->end < y->end);
}

/* Returns a tensor's name without what may be in front of it: that is model.decoder. or decoder.,
 * or less if only a part of the model was saved, or more if a wrapper was in front of it, such as
 * module. of DistributedDataParallel, _orig_mod. of torch.compile, base_model.model. of peft. */
static const char *bare_name(const char *name) {
    const char *inner = strstr(name, "decoder."), *head = strstr(name, "lm_head.");
    return inner ? inner + strlen("decoder.") : head ? head : name;
}

static int compare_names(const void *a, const void *b) {
    return strcmp(bare_name(((const Entry *)a)->name), bare_name(((const Entry *)b)->name));
}

/* Refuses tensors that overlap, and a tensor that is there twice, because either could be meant.
 * Sorts the entries by name. */
static int check_entries(Opening *o, Error *err) {
    qsort(o->entries, o->nentries, sizeof *o->entries, compare_places);
    for (size_t i = 1; i < o->nentries; i++) {
        const Entry *a = &o->entries[i - 1], *b = &o->entries[i];
        if (a->file == b->file && a->end > b->begin)
            return fail(err, EXIT_FAILED,
                        "%s: tensors %.200s and %.200s overlap at byte %zu; expected each to have "
                        "its own bytes",
                        a->path, a->name, b->name, b->begin);
    }
    qsort(o->entries, o->nentries, sizeof *o->entries, compare_names);
    for (size_t i = 1; i < o->nentries; i++) {
        const Entry *a = &o->entries[i - 1], *b = &o->entries[i];
        if (!compare_names(a, b))
            return fail(err, EXIT_FAILED,
                        "%s: tensor %.200s is also in %s, as %.200s; expected it once", b->path,
                        b->name, a->path, a->name);
    }
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Files and shards
// -------------------------------------------------------------------------------------------------

/* Opens one more file of the checkpoint and reads its header. */
static int add_file(Opening *o, const char *dir, const char *name, Error *err) {
    Checkpoint *c = o->checkpoint;
    int f = c->nfiles;
    char path[MAX_PATH];
    struct stat st;
    int fd = file_path(path, dir, name, err) ? -1 : file_open(path, &st, err);
    if (fd < 0)
        return -1;
    c->files = with_room(c->files, f, sizeof *c->files);
    c->files[c->nfiles++] =
        (TensorFile){xstrdup(path), fd, st.st_size, file_changed(&st), file_touched(&st)};
    return file_entries(o, f, err) ? fail_at(err, path) : 0;
}

static int add_shards(Opening *o, const char *dir, Error *err) {
    char path[MAX_PATH], found[100];
    cJSON *index = read_object(path, dir, "model.safetensors.index.json", err);
    if (!index)
        return -1;
    const cJSON *map = json_get(index, "weight_map"),
                *entry = cJSON_IsObject(map) ? map->child : NULL;
    const char **names = xcalloc(cJSON_GetArraySize(map), sizeof *names);
    int n = 0, status = 0;
    if (!entry)
        status = fail(err, EXIT_FAILED,
                      "%s: has no weight_map that names files; expected an object of tensor names "
                      "and file names",
                      path);
    for (; entry && !status; entry = entry->next) {
        const char *name = names[n++] = entry->valuestring;
        if (!cJSON_IsString(entry) || strpbrk(name, "/\\") || !name[strspn(name, ".")])
            status = fail(err, EXIT_FAILED,
                          "%s: weight_map: %.200s is in %s; expected the name of a file in the "
                          "same directory",
                          path, entry->string, json_describe(found, entry));
    }
    if (!status)
        sort_strings(names, n);
    for (int i = 0; i < n && !status; i++)
        if (i == 0 || strcmp(names[i], names[i - 1]))
            status = add_file(o, dir, names[i], err);
    free(names);
    cJSON_Delete(index);
    return status;
}

static int add_files(Opening *o, const char *dir, Error *err) {
    if (exists(dir, "model.safetensors"))
        return add_file(o, dir, "model.safetensors", err);
    if (exists(dir, "model.safetensors.index.json"))
        return add_shards(o, dir, err);
    return fail(err, EXIT_FAILED,
                "%s: has neither model.safetensors nor model.safetensors.index.json; download the "
                "model's weights, or, if they are in pytorch_model.bin, run scripts/convert_bin.py "
                "%s",
                dir, dir);
}

// -------------------------------------------------------------------------------------------------
// Names and shapes of tensors
// -------------------------------------------------------------------------------------------------

/* The names of a layer's parts, each with a weight and a bias, in the order of Role. */
static const char *const part_names[NROLES / 2] = {"self_attn_layer_norm",
                                                   "self_attn.q_proj",
                                                   "self_attn.k_proj",
                                                   "self_attn.v_proj",
                                                   "self_attn.out_proj",
                                                   "final_layer_norm",
                                                   "fc1",
                                                   "fc2"};
/* The names of the tensors outside of the layers, in the order of Global. */
static const char *const global_names[NGLOBALS] = {"model.decoder.embed_tokens.weight",
                                                   "model.decoder.embed_positions.weight",
                                                   "model.decoder.project_in.weight",
                                                   "model.decoder.project_out.weight",
                                                   "model.decoder.final_layer_norm.weight",
                                                   "model.decoder.final_layer_norm.bias",
                                                   "lm_head.weight"};

Part checkpoint_part(const Checkpoint *c, int t) {
    if (t < NGLOBALS)
        return (Part){
            (Tensor *)&c->global[t],       -1, t, t == FINAL_LN_W || t == FINAL_LN_B, false,
            t == TOK_EMBED || t == LM_HEAD};
    int layer = (t - NGLOBALS) / NROLES, role = (t - NGLOBALS) % NROLES;
    bool matrix = role_is_matrix((Role)role);
    return (Part){&c->layer[layer][role], layer, role, !matrix, matrix, false};
}

/* Writes the shape that config.json asks for; rows 0 if it does not ask for this tensor. */
static void part_shape(int *rows, int *cols, const OptConfig *config, const Part *part) {
    if (part->layer < 0)
        opt_global_shape(config, (Global)part->role, rows, cols);
    else
        opt_role_shape(config, (Role)part->role, rows, cols);
}

static const char *part_name(char name[100], const Part *part) {
    if (part->layer < 0)
        return global_names[part->role];
    snprintf(name, 100, "model.decoder.layers.%d.%s.%s", part->layer, part_names[part->role / 2],
             part->role % 2 ? "bias" : "weight");
    return name;
}

/* Returns the tensor to which a view belongs. Its field `tensor` is NULL if there is none. */
static Part find_owner(const Checkpoint *c, const Tensor *view) {
    for (int t = 0; t < part_count(&c->config); t++) {
        Part part = checkpoint_part(c, t);
        const Tensor *whole = part.tensor;
        if (whole->file == view->file && view->offset >= whole->offset &&
            view->offset - whole->offset < tensor_bytes(*whole))
            return part;
    }
    return (Part){.tensor = NULL};
}

const char *checkpoint_name(char name[100], const Checkpoint *checkpoint, const Tensor *view) {
    Part owner = find_owner(checkpoint, view);
    return owner.tensor ? part_name(name, &owner) : "(unknown)";
}

// -------------------------------------------------------------------------------------------------
// The tensors that config.json asks for
// -------------------------------------------------------------------------------------------------

/* Returns the entry of the tensor with this name, or NULL. */
static const Entry *find_entry(const Opening *o, const char *name) {
    Entry key = {.name = name};
    return bsearch(&key, o->entries, o->nentries, sizeof key, compare_names);
}

/* Returns the name in the files that begins most like this one, behind what is in front of both. */
static const char *nearest_name(const Opening *o, const char *name) {
    const char *bare = bare_name(name);
    for (int n = strlen(bare); n >= 0; n--)
        for (size_t i = 0; i < o->nentries; i++)
            if (!strncmp(bare_name(o->entries[i].name), bare, n))
                return o->entries[i].name;
    return "nothing";
}

/* Makes a tensor a view of an entry, which must have the type, the shape and the bytes that
 * config.json asks for: (rows, cols), or (cols) for a vector. */
static int take_entry(const Part *part, const Entry *e, int rows, int cols, bool packed,
                      Error *err) {
    static const char *const names[] = {[F32] = "F32", [F16] = "F16", [BF16] = "BF16", [U8] = "U8"};
    char expected[40], *shape = cJSON_PrintUnformatted(e->shape);
    int status = 0;
    Type type = packed ? U8 : F32;
    while (type < BF16 && strcmp(e->dtype, names[type]))
        type++;
    if (part->vector)
        snprintf(expected, sizeof expected, "[%d]", cols);
    else
        snprintf(expected, sizeof expected, "[%d,%d]", rows, cols);
    if (strcmp(e->dtype, names[type]))
        status = fail(err, EXIT_FAILED, "%s: tensor %.200s: dtype is %.40s; expected %s", e->path,
                      e->name, e->dtype,
                      packed ? "U8, as __metadata__ says it is packed"
                             : "F16, BF16 or F32: save the model in one of these (U8 is for packed "
                               "matrices, in a file whose __metadata__ says how)");
    else if (strcmp(shape, expected))
        status =
            fail(err, EXIT_FAILED, "%s: tensor %.200s: shape is %.60s; config.json asks for %s%s",
                 e->path, e->name, shape, expected, packed ? " at 4 bits in groups of 64" : "");
    *part->tensor = (Tensor){.tier = TIER_DISK,
                             .type = type,
                             .file = 1 + e->file,
                             .offset = e->begin,
                             .rows = rows,
                             .cols = cols,
                             .ld = cols};
    size_t bytes = tensor_bytes(*part->tensor), span = e->end - e->begin;
    if (!status && span != bytes)
        status = fail(err, EXIT_FAILED,
                      "%s: tensor %.200s: data_offsets span %zu byte%s; expected %zu for %s of %s",
                      e->path, e->name, span, plural(span), bytes, shape, e->dtype);
    free(shape);
    return status;
}

/* Takes the tensor of a part from the files, if config.json asks for it. If the token table and the
 * head are one matrix, a checkpoint may have it under either name. */
static int take_part(const Opening *o, int t, Error *err) {
    const Checkpoint *c = o->checkpoint;
    Part part = checkpoint_part(c, t);
    char text[100];
    const char *name = part_name(text, &part);
    int rows, cols;
    part_shape(&rows, &cols, &c->config, &part);
    if (!rows)
        return 0;
    const Entry *e = find_entry(o, name);
    if (!e && o->tied && t == TOK_EMBED)
        e = find_entry(o, global_names[LM_HEAD]);
    if (!e)
        return fail(err, EXIT_FAILED,
                    "%s: tensor %s is missing%s; config.json asks for it, and the nearest is "
                    "%.200s: is the download complete, and of this model?",
                    c->files[0].path, name, c->nfiles > 1 ? ", as in the other shards" : "",
                    nearest_name(o, name));
    /* in a packed copy the type of a table says if it is packed, too */
    bool packed = c->packed && (part.matrix || (part.table && !strcmp(e->dtype, "U8")));
    if (packed && part.matrix && rows % GROUP)
        return fail(err, EXIT_FAILED,
                    "%s: tensor %s: has %d rows, which groups of %d do not divide", e->path, name,
                    rows, GROUP);
    if (packed) {
        rows = ceil_div(rows, GROUP);
        cols *= GROUP_BYTES;
    }
    return take_entry(&part, e, rows, cols, packed, err);
}

/* Sets *same if all numbers of two tensors of one shape are equal, as F16. */
static int same_numbers(bool *same, const Checkpoint *c, const Tensor *a, const Tensor *b,
                        Error *err) {
    enum { CHUNK = 1 << 20 }; /* numbers compared at once */
    size_t count = (size_t)a->rows * a->cols;
    f16 *numbers = xcalloc(2 * CHUNK, sizeof *numbers);
    int status = 0;
    *same = true;
    for (size_t at = 0; at < count && *same && !status; at += CHUNK) {
        size_t n = size_min(count - at, CHUNK);
        status = checkpoint_fill(c, numbers, a, at, n, err) ||
                 checkpoint_fill(c, numbers + CHUNK, b, at, n, err);
        *same = !memcmp(numbers, numbers + CHUNK, n * sizeof *numbers);
    }
    free(numbers);
    return status;
}

/* Takes the head, unless it is the token table. A tied head that old checkpoints store as a copy of
 * the table would only cost memory, so it is left out. A head that differs from the table is
 * separate whatever config.json says, as in transformers from version 5 on; version 4 took the
 * table. */
static int take_head(const Opening *o, Error *err) {
    Checkpoint *c = o->checkpoint;
    Tensor *head = &c->global[LM_HEAD];
    bool same;
    if (o->tied && !find_entry(o, global_names[LM_HEAD]))
        return 0;
    if (take_part(o, LM_HEAD, err))
        return -1;
    bool packed = head->type == U8;
    if (packed != (c->global[TOK_EMBED].type == U8))
        return fail(err, EXIT_FAILED, "%s: %s is packed, and %s is not: pack the model again",
                    c->files[head->file - 1].path, global_names[packed ? LM_HEAD : TOK_EMBED],
                    global_names[packed ? TOK_EMBED : LM_HEAD]);
    if (!o->tied)
        return 0;
    if (same_numbers(&same, c, &c->global[TOK_EMBED], head, err))
        return -1;
    c->untied = !same;
    if (same)
        *head = (Tensor){.rows = 0};
    return 0;
}

static int take_tensors(const Opening *o, Error *err) {
    for (int t = 0; t < part_count(&o->checkpoint->config); t++)
        if (t != LM_HEAD && take_part(o, t, err))
            return -1;
    return take_head(o, err);
}

// -------------------------------------------------------------------------------------------------
// Opening and closing
// -------------------------------------------------------------------------------------------------

/* Makes a checkpoint without files, whose tensors are all absent. */
static Checkpoint *checkpoint_new(const OptConfig *config) {
    Checkpoint *c = xcalloc(1, sizeof *c);
    c->config = *config;
    c->layer = xcalloc(config->l, sizeof *c->layer);
    return c;
}

Checkpoint *checkpoint_open(const char *dir, Error *err) {
    OptConfig config;
    bool tied;
    if (config_read(&config, &tied, dir, err))
        return NULL;
    Opening o = {checkpoint_new(&config), cJSON_CreateArray(), .tied = tied};
    bool good = !add_files(&o, dir, err) && !check_entries(&o, err) && !take_tensors(&o, err);
    cJSON_Delete(o.headers);
    free(o.entries);
    if (!good)
        checkpoint_close(o.checkpoint);
    return good ? o.checkpoint : NULL;
}

int checkpoint_unchanged(const Checkpoint *checkpoint, Error *err) {
    struct stat st;
    for (int f = 0; f < checkpoint->nfiles; f++) {
        TensorFile *file = &checkpoint->files[f];
        if (fstat(file->fd, &st))
            return fail(err, EXIT_FAILED, "%s: read error: %s", file->path, strerror(errno));
        struct timespec changed = file_changed(&st);
        uint64_t touched = file_touched(&st);
        /* A new name, another link or other rights touch a file, too, but leave its data. */
        bool same = (size_t)st.st_size == file->size &&
                    !memcmp(&changed, &file->changed, sizeof changed) &&
                    (touched == __atomic_load_n(&file->touched, __ATOMIC_RELAXED) ||
                     checkpoint_digest(checkpoint) == checkpoint->digest);
        if (!same)
            return fail(err, EXIT_FAILED,
                        "%s: was changed while it was in use, so that its tensors may be of two "
                        "models; run again",
                        file->path);
        __atomic_store_n(&file->touched, touched, __ATOMIC_RELAXED);
    }
    return 0;
}

void checkpoint_close(Checkpoint *checkpoint) {
    if (!checkpoint)
        return;
    for (int f = 0; f < checkpoint->nfiles; f++) {
        close(checkpoint->files[f].fd);
        free(checkpoint->files[f].path);
    }
    free(checkpoint->files);
    free(checkpoint->layer);
    free(checkpoint);
}

// -------------------------------------------------------------------------------------------------
// Dummies
// -------------------------------------------------------------------------------------------------

/* Gives the tensors consecutive places in one imagined file. */
Checkpoint *checkpoint_dummy(const OptConfig *config, uint64_t seed) {
    Checkpoint *c = checkpoint_new(config);
    Bytes end = 0;
    int rows, cols;
    c->dummy = true;
    c->seed = seed;
    for (int t = 0; t < part_count(config); t++) {
        Part part = checkpoint_part(c, t);
        part_shape(&rows, &cols, config, &part);
        if (!rows || t == LM_HEAD)
            continue;
        *part.tensor = (Tensor){
            .tier = TIER_DISK, .type = F16, .offset = end, .rows = rows, .cols = cols, .ld = cols};
        end += tensor_bytes(*part.tensor);
    }
    return c;
}

/* Writes the center and the standard deviation of a dummy's elements. With a deviation of about
 * 1/sqrt(k) every product stays near the size of its input, so that activations stay finite through
 * 96 layers. The gains differ from 1 to keep tokens apart: they make scores sharper and residual
 * branches smaller. With all gains at 1, attention averages everything, all positions soon look
 * alike, and a mix-up of two sequences would not show. */
static void dummy_spread(float *center, float *std, const Part *owner) {
    static const float gain[NROLES] = {
        [Q_W] = 2, [K_W] = 2, [V_W] = 1, [O_W] = 0.5f, [FC1_W] = 1, [FC2_W] = 0.25f};
    bool is_weight = owner->role % 2 == 0; /* of a layernorm, if it is no matrix */
    float matrix = owner->layer < 0 ? owner->role < FINAL_LN_W : gain[owner->role];
    *center = !matrix && is_weight;
    *std = matrix ? matrix / sqrtf(owner->tensor->cols) : 0.03f;
}

/* Writes elements of a dummy. Each is the sum of two random bytes, whose distribution is roughly a
 * bell curve, looked up in a table of F16; four elements share a random number, counted through all
 * tensors. This gives over 1 GB/s on a core; a real generator and a conversion would slow down
 * every benchmark. */
static void dummy_fill(const Checkpoint *c, f16 *dst, const Tensor *tensor, size_t first,
                       size_t count) {
    Part owner = find_owner(c, tensor);
    uint64_t key = splitmix64(c->seed, 1);
    float center, std;
    f16 value[511];
    CHECK(owner.tensor);
    dummy_spread(&center, &std, &owner);
    for (int i = 0; i < 511; i++)
        value[i] = f32_to_f16(center + (i - 255) * std / 104.5f); /* 104.5: i's deviation */
    size_t e = tensor->offset / sizeof(f16) + first;
    uint64_t bits = splitmix64(key, e / 4) >> e % 4 * 16;
    for (size_t end = e + count; e < end;) {
        *dst++ = value[(bits & 255) + (bits >> 8 & 255)];
        e++;
        bits = e % 4 ? bits >> 16 : splitmix64(key, e / 4);
    }
}

// -------------------------------------------------------------------------------------------------
// Reading tensors
// -------------------------------------------------------------------------------------------------

static bool is_finite(f16 x) { return (x & 0x7C00) != 0x7C00; }

static int bad_element(const Checkpoint *c, const Tensor *tensor, size_t e, double value,
                       const char *expected, Error *err) {
    char name[100];
    return fail(err, EXIT_FAILED, "%s: tensor %s: element %zu is %g; expected %s",
                c->dummy ? c->config.name : c->files[tensor->file - 1].path,
                checkpoint_name(name, c, tensor), e, value, expected);
}

/* Reads bytes of a tensor, beginning at its byte `from`. */
static int read_tensor(const Checkpoint *c, void *to, const Tensor *tensor, size_t from,
                       size_t bytes, Error *err) {
    const TensorFile *file = &c->files[tensor->file - 1];
    const char *why = file_read_at(file->fd, to, bytes, tensor->offset + from);
    char name[100];
    if (!why)
        return 0;
    return fail(err, EXIT_FAILED, "%s: tensor %s: read error: %s", file->path,
                checkpoint_name(name, c, tensor), why);
}

int checkpoint_fill(const Checkpoint *checkpoint, void *dst, const Tensor *tensor, size_t first,
                    size_t count, Error *err) {
    enum { CHUNK = 16384 }; /* bytes read at once */
    uint8_t raw[CHUNK];
    size_t size = type_bytes(tensor->type), end = first + count;
    f16 *to = dst;
    CHECK(tensor->ld == (size_t)tensor->cols && end <= (size_t)tensor->rows * tensor->cols);
    if (checkpoint->dummy) {
        dummy_fill(checkpoint, dst, tensor, first, count);
        return 0;
    }
    if (tensor->type == F16 || tensor->type == U8)
        return read_tensor(checkpoint, dst, tensor, first * size, count * size, err);
    for (size_t n; first < end; first += n) {
        n = size_min(end - first, CHUNK / size);
        if (read_tensor(checkpoint, raw, tensor, first * size, n * size, err))
            return -1;
        for (size_t i = 0; i < n; i++) {
            float value = 0; /* whose high bytes the element is, at any alignment */
            memcpy((uint8_t *)&value + sizeof value - size, raw + i * size, size);
            *to = f32_to_f16(value);
            if (!is_finite(*to++))
                return bad_element(checkpoint, tensor, first + i, value,
                                   "values from -65504 to 65504, since weights are F16 here", err);
        }
    }
    return 0;
}

int checkpoint_finite(const Checkpoint *checkpoint, const f16 *x, const Tensor *tensor,
                      size_t first, size_t count, Error *err) {
    for (size_t i = 0; i < count; i++)
        if (!is_finite(x[i]))
            return bad_element(checkpoint, tensor, first + i, f16_to_f32(x[i]),
                               "finite numbers: is the download complete?", err);
    return 0;
}

// -------------------------------------------------------------------------------------------------
// Packing
// -------------------------------------------------------------------------------------------------

int checkpoint_packs(const Checkpoint *checkpoint, bool head, Error *err) {
    const OptConfig *c = &checkpoint->config;
    if (head && c->embed % GROUP)
        return fail(err, EXIT_USAGE,
                    "the token table has %d columns, and can be packed in whole groups of %d only; "
                    "leave --compress-head out",
                    c->embed, GROUP);
    if (c->h1 % GROUP == 0 && c->h2 % GROUP == 0)
        return 0;
    return fail(
        err, EXIT_USAGE,
        "the model's matrices have %d and %d rows, and can be packed in whole groups of %d only; "
        "leave the weights unpacked: --compress-cache still packs a KV cache whose heads are "
        "multiples of 16, and eval --compress-weight --group 32 says what packing would cost",
        c->h1, c->h2, GROUP);
}

int checkpoint_pack(const Checkpoint *checkpoint, uint8_t *to, f16 *scratch, const Tensor *tensor,
                    int row, Error *err) {
    size_t cols = (size_t)tensor->cols;
    if (tensor->type == U8)
        return checkpoint_fill(checkpoint, to, tensor, row * cols, cols, err);
    size_t count = imin(GROUP, tensor->rows - row * GROUP) * cols, first = row * GROUP * cols;
    if (checkpoint_fill(checkpoint, scratch, tensor, first, count, err))
        return -1;
    for (f16 *x = scratch + count; x < scratch + GROUP * cols; x++)
        *x = *(x - cols);
    if (quant_pack_rows(to, scratch, tensor->cols))
        return 0;
    return checkpoint_finite(checkpoint, scratch, tensor, first, count, err);
}

float *checkpoint_floats(const Checkpoint *checkpoint, const Tensor *tensor, Error *err) {
    size_t rows = tensor->rows, size = rows * tensor->cols;
    int groups = tensor->type == U8 ? tensor->cols / GROUP_BYTES : 0; /* in a packed row */
    size_t count = groups ? rows * groups * GROUP : size;
    f16 *numbers = xcalloc(count, sizeof *numbers);
    uint8_t *bytes = xcalloc(groups ? size : 0, 1);
    float *values = NULL;
    if (!checkpoint_fill(checkpoint, groups ? (void *)bytes : numbers, tensor, 0, size, err)) {
        values = xcalloc(count, sizeof *values);
        for (size_t r = 0; groups && r < rows; r++)
            quant_unpack_rows(numbers + r * GROUP * groups, bytes + r * tensor->cols, groups);
        for (size_t i = 0; i < count; i++)
            values[i] = f16_to_f32(numbers[i]);
    }
    free(bytes);
    free(numbers);
    return values;
}

// -------------------------------------------------------------------------------------------------
// The digest, and stages of a pipeline
// -------------------------------------------------------------------------------------------------

/* Adds blocks of a tensor to a hash. The tensor is cut into equal strata, and each has a block: the
 * first one its first bytes, the last one its last bytes, the others some that depend on the hash
 * so far. A tensor of up to 20 KiB is hashed as a whole.
 *
 * So a change of a contiguous two fifths of any tensor shows for certain, and of a large tensor one
 * of 32 MiB. A change of a single block of 4 KiB shows with a chance of 1 to 4096 in a stratum of
 * 16 MiB, and one number that was set on purpose almost never: the digest tells two models apart,
 * such as before and after some training, or a damaged copy from a good one, and is no seal.
 *
 * OPT-175B has 28,500 blocks, 117 MB. An NVMe disk reads one in 0.1 ms, all in 3 s; a hard disk
 * takes 4 to 8 ms for each, 2 to 4 minutes, where reading the whole model takes 40. From a file in
 * memory the digest takes 0.4 s. */
static uint64_t hash_tensor(uint64_t hash, const Checkpoint *c, const Tensor *tensor) {
    enum { BLOCK = 4096, LEAST = 4, STRATUM = 16 << 20 };
    size_t size = tensor_bytes(*tensor);
    size_t strata = 1 + size_min(size / BLOCK, LEAST + size / STRATUM);
    uint8_t bytes[BLOCK];
    Error ignored; /* if a tensor cannot be read now, filling it will report why */
    for (size_t s = 0; s < strata; s++) {
        size_t begin = size * s / strata, room = size * (s + 1) / strata - begin;
        size_t n = size_min(room, BLOCK), spare = room - n;
        begin += s == 0 ? 0 : s == strata - 1 ? spare : hash % (spare + 1);
        if (!read_tensor(c, bytes, tensor, begin, n, &ignored))
            hash = hash_bytes(hash, bytes, n);
    }
    return hash;
}

uint64_t checkpoint_digest(const Checkpoint *c) {
    const OptConfig *o = &c->config;
    const int dims[] = {o->l,       o->h1,    o->h2,       o->nh,         o->vocab,
                        o->max_pos, o->embed, o->pre_norm, o->final_norm, o->eos};
    uint64_t hash = hash_bytes(HASH_START, dims, sizeof dims);
    hash = hash_bytes(hash, o->more_eos, o->nmore * sizeof *o->more_eos);
    hash = hash_bytes(hash, &c->seed, sizeof c->seed);
    for (int t = 0; t < part_count(&c->config); t++) {
        const Tensor *tensor = checkpoint_part(c, t).tensor;
        bool packed = tensor->type == U8;
        const int shape[] = {tensor->type, tensor->rows, tensor->cols, packed ? 4 : 0,
                             packed ? GROUP : 0};
        hash = hash_bytes(hash, shape, sizeof shape);
        if (tensor->rows && !c->dummy)
            hash = hash_tensor(hash, c, tensor);
    }
    return hash;
}

Checkpoint checkpoint_stage(const Checkpoint *whole, int stage, int stages, int first, int layers) {
    Checkpoint c = *whole;
    bool tied = !whole->global[LM_HEAD].rows;
    c.config.stage = stage;
    c.config.stages = stages;
    c.config.l = layers;
    c.layer += first;
    for (int g = 0; g < NGLOBALS; g++) {
        int rows, cols;
        opt_global_shape(&c.config, (Global)g, &rows, &cols);
        bool is_head = g == TOK_EMBED && tied && is_last_stage(&c.config);
        if (!rows && !is_head)
            c.global[g] = (Tensor){.rows = 0};
    }
    return c;
}
