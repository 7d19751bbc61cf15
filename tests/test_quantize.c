/* test_quantize.c: packed copies of checkpoints: what is in them, how they are laid out, what of them is refused, and that
 * nothing is left behind where there can be none. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests.h"

enum { MAX_NUMBERS = 1 << 18, WHOLE = 1 << 30 };

// ---------------------------------------------------------------------------------------------------------------
// Sources and copies
// ---------------------------------------------------------------------------------------------------------------

/* With projections and a head of its own. */
static const OptConfig small = {"small", 2, 64, 128, 4, 70, 20, 24, true, true, 2, 0, 1};
static const char small_json[] =
    "{\"model_type\": \"opt\", \"num_hidden_layers\": 2, \"hidden_size\": 64, \"ffn_dim\": 128, \"num_attention_heads\": 4,"
    " \"vocab_size\": 70, \"max_position_embeddings\": 20, \"word_embed_proj_dim\": 24, \"tie_word_embeddings\": false}";

/* A safetensors file in the making. Element 5 of the tensor that `spoilt` names becomes `bad`. */
typedef struct {
    cJSON *header;
    uint8_t data[1 << 19];
    size_t end;
    Type type;
    const char *spoilt;
    float bad;
} Draft;

static void put(Draft *d, float x) {
    f16 half = f32_to_f16(x);
    uint8_t bytes[4];
    memcpy(bytes, &x, 4);
    if (d->type == F16) memcpy(bytes, &half, 2);
    memcpy(d->data + d->end, d->type == BF16 ? bytes + 2 : bytes, type_bytes(d->type));
    d->end += type_bytes(d->type);
}

static void add_tensor(Draft *d, const Checkpoint *c, const Tensor *t, const char *name, bool vector) {
    static const char *const types[] = {[F32] = "F32", [F16] = "F16", [BF16] = "BF16"};
    const bool packed = t->type == U8;
    const int shape[] = {packed ? t->rows * GROUP : t->rows, packed ? t->cols / GROUP_BYTES : t->cols};
    const int count = shape[0] * shape[1];
    double offsets[2] = {(double)d->end, 0};
    f16 numbers[128 * 64];
    uint8_t groups[64 * 128 * 64 / GROUP * GROUP_BYTES];
    Error err;
    ASSERT_OK(checkpoint_fill(c, packed ? (void *)groups : numbers, t, 0, (size_t)t->rows * t->cols, &err));
    for (int g = 0; packed && g < t->rows; g++)
        quant_unpack_rows(numbers + (size_t)g * GROUP * shape[1], groups + (size_t)g * t->cols, shape[1]);
    for (int e = 0; e < count; e++)
        put(d, d->spoilt && e == 5 && !strcmp(d->spoilt, name) ? d->bad : f16_to_f32(numbers[e]));
    offsets[1] = (double)d->end;
    cJSON *json = cJSON_AddObjectToObject(d->header, name);
    cJSON_AddStringToObject(json, "dtype", types[d->type]);
    cJSON_AddItemToObject(json, "shape", cJSON_CreateIntArray(shape + vector, 2 - vector));
    cJSON_AddItemToObject(json, "data_offsets", cJSON_CreateDoubleArray(offsets, 2));
}

static void write_safetensors(const char *dir, const char *header, const uint8_t *data, size_t size) {
    size_t len = strlen(header);
    uint8_t *file = (uint8_t *)xcalloc(8 + len + size, 1);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)(len >> 8 * i);
    memcpy(file + 8, header, len);
    memcpy(file + 8 + len, data, size);
    write_file(dir, "model.safetensors", file, 8 + len + size);
    free(file);
}

/* A fresh directory with a small model that has c's numbers, and a head. */
static const char *draft(const Checkpoint *c, const Checkpoint *other, const Tensor *head, Draft as) {
    static char dir[300];
    static Draft d;
    char name[100];
    d = as, d.header = cJSON_CreateObject();
    for (int g = 0; g < LM_HEAD; g++)
        add_tensor(&d, c, &c->global[g], checkpoint_name(name, c, &c->global[g]), g >= FINAL_LN_W);
    add_tensor(&d, other, head, "lm_head.weight", false);
    for (int j = 0; j < small.l; j++)
        for (int r = 0; r < NROLES; r++)
            add_tensor(&d, c, &c->layer[j][r], checkpoint_name(name, c, &c->layer[j][r]), !role_is_matrix((Role)r));
    snprintf(dir, sizeof dir, "%s", temp_dir());
    char *header = cJSON_PrintUnformatted(d.header);
    write_safetensors(dir, header, d.data, d.end);
    write_file(dir, "config.json", small_json, strlen(small_json));
    cJSON_free(header);
    cJSON_Delete(d.header);
    return dir;
}

/* Of random numbers. */
static const char *source(Type type, const char *spoilt, float bad) {
    Checkpoint *c = checkpoint_dummy(&small, 1), *other = checkpoint_dummy(&small, 2);
    const char *dir = draft(c, other, &other->global[TOK_EMBED], (Draft){.type = type, .spoilt = spoilt, .bad = bad});
    checkpoint_close(c);
    checkpoint_close(other);
    return dir;
}

static char *path_in(const char *dir, const char *name) {
    static char path[4][700];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", dir, name);
    return path[next];
}

static int quantized(CopyStats *stats, const char *from, const char *to, size_t shard_bytes, int threads, Error *err) {
    host_set_threads(threads);
    return checkpoint_quantize(stats, from, to, shard_bytes, NULL, err);
}

/* A packed copy in a fresh directory. */
static const char *copy_of(const char *from, size_t shard_bytes, CopyStats *stats) {
    static char to[400];
    Error err;
    snprintf(to, sizeof to, "%s/copy", temp_dir());
    ASSERT_OK(quantized(stats, from, to, shard_bytes, 3, &err));
    return to;
}

static Checkpoint *opens(const char *dir) {
    Error err;
    Checkpoint *c = checkpoint_open(dir, &err);
    if (!c) fprintf(stderr, "\n    %s\n", err.text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(c);
    return c;
}

// ---------------------------------------------------------------------------------------------------------------
// What is in a copy
// ---------------------------------------------------------------------------------------------------------------

/* Row by row of groups, by checkpoint_fill and quant_pack_rows; and checkpoint_pack says the same of both. */
static void same_matrix(const Checkpoint *from, const Tensor *w, const Checkpoint *copy, const Tensor *packed) {
    static f16 numbers[MAX_NUMBERS];
    static uint8_t expected[2 * MAX_NUMBERS], bytes[2 * MAX_NUMBERS];
    const size_t size = (size_t)w->cols * GROUP_BYTES;
    Error err;
    CU_ASSERT(packed->type == U8);
    CU_ASSERT_EQUAL_FATAL(packed->rows, w->rows / GROUP);
    CU_ASSERT_EQUAL_FATAL((size_t)packed->cols, size);
    CHECK((size_t)GROUP * w->cols <= MAX_NUMBERS && size <= sizeof bytes);
    for (int g = 0; g < packed->rows; g++) {
        const size_t first = (size_t)g * GROUP;
        ASSERT_OK(checkpoint_fill(from, numbers, w, first * w->cols, (size_t)GROUP * w->cols, &err));
        CU_ASSERT(quant_pack_rows(expected, numbers, w->cols));
        ASSERT_OK(checkpoint_fill(copy, bytes, packed, g * size, size, &err));
        CU_ASSERT_EQUAL(memcmp(bytes, expected, size), 0);
        memset(bytes, 1, size);
        ASSERT_OK(checkpoint_pack(copy, bytes, NULL, packed, g, &err));
        CU_ASSERT_EQUAL(memcmp(bytes, expected, size), 0);
        memset(bytes, 1, size);
        ASSERT_OK(checkpoint_pack(from, bytes, numbers, w, g, &err));
        CU_ASSERT_EQUAL(memcmp(bytes, expected, size), 0);
    }
}

static void same_numbers(const Checkpoint *from, const Tensor *t, const Checkpoint *copy, const Tensor *same) {
    static f16 numbers[2][MAX_NUMBERS];
    Error err;
    CU_ASSERT_FATAL(same->type == F16 && same->rows == t->rows && same->cols == t->cols);
    const size_t count = (size_t)t->rows * t->cols;
    CHECK(count <= MAX_NUMBERS);
    ASSERT_OK(checkpoint_fill(from, numbers[0], t, 0, count, &err));
    ASSERT_OK(checkpoint_fill(copy, numbers[1], same, 0, count, &err));
    CU_ASSERT_EQUAL(memcmp(numbers[0], numbers[1], count * sizeof(f16)), 0);
}

static void is_packed_copy(const char *to, const char *from) {
    Checkpoint *source = opens(from), *copy = opens(to);
    CU_ASSERT(copy->packed && !source->packed);
    for (int g = 0; g < NGLOBALS; g++) {
        CU_ASSERT_EQUAL(copy->global[g].rows, source->global[g].rows);
        if (source->global[g].rows) same_numbers(source, &source->global[g], copy, &copy->global[g]);
    }
    for (int j = 0; j < source->config.l; j++)
        for (int r = 0; r < NROLES; r++) {
            const Tensor *t = &source->layer[j][r], *same = &copy->layer[j][r];
            if (role_is_matrix((Role)r))
                same_matrix(source, t, copy, same);
            else
                same_numbers(source, t, copy, same);
        }
    checkpoint_close(source);
    checkpoint_close(copy);
}

static void matrices_of_layers_are_packed_and_the_rest_is_kept(void) {
    static const char *const dirs[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};
    for (int d = 0; d < 2; d++) {
        CopyStats stats;
        is_packed_copy(copy_of(dirs[d], WHOLE, &stats), dirs[d]);
        CU_ASSERT_EQUAL(stats.files, 1);
        CU_ASSERT_DOUBLE_EQUAL(stats.packed_bits, 4.5, 1e-9);
        CU_ASSERT(stats.bits > 4.5 && stats.bits < 16);
    }
}

static void all_float_types_can_be_packed(void) {
    for (int type = F32; type <= BF16; type++) {
        CopyStats stats;
        const char *from = source((Type)type, NULL, 0);
        is_packed_copy(copy_of(from, WHOLE, &stats), from);
    }
}

static void a_dummy_is_packed_like_a_checkpoint(void) {
    Checkpoint *c = checkpoint_dummy(&small, 5);
    const Tensor *w = &c->layer[1][FC1_W]; /* (128, 64): two groups */
    static f16 numbers[128 * 64], scratch[64 * 64];
    static uint8_t expected[64 * 36], bytes[64 * 36];
    Error err;
    ASSERT_OK(checkpoint_fill(c, numbers, w, 0, 128 * 64, &err));
    for (int g = 0; g < 2; g++) {
        quant_pack_rows(expected, numbers + g * 64 * 64, 64);
        ASSERT_OK(checkpoint_pack(c, bytes, scratch, w, g, &err));
        CU_ASSERT_EQUAL(memcmp(bytes, expected, sizeof bytes), 0);
    }
    checkpoint_close(c);
}

static void a_group_divides_the_rows_of_all_matrices(void) {
    const OptConfig sizes[] = {{"h1", 1, 64, 96, 2, 9, 9, 64, true, true, 2, 0, 1},
                               {"h2", 1, 96, 64, 2, 9, 9, 96, true, true, 2, 0, 1}};
    char names[200], *save = NULL;
    Error err;
    snprintf(names, sizeof names, "%s", opt_known_names());
    for (char *name = strtok_r(names, ", ", &save); name; name = strtok_r(NULL, ", ", &save)) {
        OptConfig config;
        CHECK(opt_config_by_name(&config, name) == 0);
        Checkpoint *c = checkpoint_dummy(&config, 0);
        ASSERT_OK(checkpoint_packs(c, &err));
        checkpoint_close(c);
    }
    for (int i = 0; i < 2; i++) {
        Checkpoint *c = checkpoint_dummy(&sizes[i], 0);
        CU_ASSERT(checkpoint_packs(c, &err) == -1 && err.code == EXIT_USAGE);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, i ? "have 96 and 64 rows" : "have 64 and 96 rows"));
        checkpoint_close(c);
    }
}

static float *forward(const Checkpoint *c, size_t *count) {
    static const int32_t ids[] = {2, 9, 41, 69, 7, 7, 30};
    enum { N = sizeof ids / sizeof *ids };
    Error err;
    float *logits = (float *)xcalloc(*count = N * (size_t)c->config.vocab, sizeof *logits);
    ASSERT_OK(reference_forward(logits, c, ids, N, &err));
    return logits;
}

/* The same bits as of the numbers that its groups stand for, which are not the source's. */
static void the_plain_forward_reads_a_copy(void) {
    CopyStats stats;
    size_t count;
    char from[400];
    snprintf(from, sizeof from, "%s", source(F16, NULL, 0));
    Checkpoint *copy = opens(copy_of(from, WHOLE, &stats)), *c = opens(from);
    Checkpoint *unpacked = opens(draft(copy, copy, &copy->global[LM_HEAD], (Draft){.type = F16}));
    float *of_copy = forward(copy, &count), *of_unpacked = forward(unpacked, &count), *of_source = forward(c, &count);
    CU_ASSERT_EQUAL(memcmp(of_copy, of_unpacked, count * sizeof(float)), 0);
    const double error = max_norm_error(of_copy, of_source, count);
    CU_ASSERT(error > 2e-3 && error < 1); /* 2e-3: what F16 alone may cost */
    free(of_copy), free(of_unpacked), free(of_source);
    checkpoint_close(copy), checkpoint_close(unpacked), checkpoint_close(c);
}

// ---------------------------------------------------------------------------------------------------------------
// How it is laid out
// ---------------------------------------------------------------------------------------------------------------

/* The header of a safetensors file as JSON; *data becomes where its tensors begin, *size the bytes of the file. */
static cJSON *header_of(const char *path, size_t *data, size_t *size) {
    Error err;
    char *text = file_read(path, 1 << 24, size, &err);
    if (!text) CU_FAIL_FATAL(err.text);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--) len = len << 8 | (uint8_t)text[i];
    CHECK(*size > 8 && len <= *size - 8);
    cJSON *json = json_parse(text + 8, len, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(json);
    *data = 8 + len;
    free(text);
    return json;
}

/* As the format asks: tensors one behind the other, from the first byte of the data to the last of the file; each begins
 * at as round a byte as its size is, up to 64. */
static void follows_the_format(const char *path) {
    size_t data, size, end = 0, tensors = 0;
    cJSON *json = header_of(path, &data, &size);
    CU_ASSERT_EQUAL(data % 64, 0);
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json->child, "format")), "flexgen-packed-1");
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json->child, "flexgen.bits")), "4");
    CU_ASSERT_STRING_EQUAL(cJSON_GetStringValue(cJSON_GetObjectItem(json->child, "flexgen.group")), "64");
    for (const cJSON *t = json->child->next; t; t = t->next, tensors++) {
        const cJSON *offsets = cJSON_GetObjectItem(t, "data_offsets");
        size_t begin = (size_t)offsets->child->valuedouble;
        CU_ASSERT_EQUAL(begin, end);
        end = (size_t)offsets->child->next->valuedouble;
        for (size_t round = 2; round <= 64; round *= 2) CU_ASSERT((end - begin) % round || begin % round == 0);
    }
    CU_ASSERT(tensors > 0 && data + end == size);
    cJSON_Delete(json);
}

static void files_follow_the_format(void) {
    CopyStats stats;
    follows_the_format(path_in(copy_of(source(F16, NULL, 0), WHOLE, &stats), "model.safetensors"));
    follows_the_format(path_in(copy_of("tests/golden/opt-pre", WHOLE, &stats), "model.safetensors"));
}

/* A layer of a copy lies in the file as it will lie in memory: from there one read brings it. */
static void a_layer_of_a_copy_is_read_as_one(void) {
    const Policy policy = {.gbs = 1, .num_gpu_batches = 1, .page_tokens = 16, .weight_packed = true};
    const Task nothing = {.count = 0};
    CopyStats stats;
    Error err;
    Checkpoint *copy = opens(copy_of("models/opt-tiny", WHOLE, &stats));
    Plan *plan = plan_make(copy, &policy, &nothing, F32, &err);
    CU_ASSERT_PTR_NOT_NULL_FATAL(plan);
    for (int j = 0; j < copy->config.l; j++)
        for (int i = 1; i < NROLES; i++) {
            const Role *order = plan->slab_order[j];
            const WeightPlace *before = &plan->weight[j][order[i - 1]], *w = &plan->weight[j][order[i]];
            const size_t bytes = tensor_bytes(before->home);
            CU_ASSERT_EQUAL(w->slab_offset - before->slab_offset, bytes);
            CU_ASSERT_EQUAL(w->home.offset - before->home.offset, bytes);
        }
    plan_free(plan);
    checkpoint_close(copy);
}

static void large_models_are_cut_between_layers(void) {
    static const char from[] = "tests/golden/opt-pre"; /* three layers; embeddings and final norm are a part of their own */
    static const size_t limit[] = {1, 90000, 120000};
    static const int files[] = {4, 2, 2};
    for (int i = 0; i < 3; i++) {
        CopyStats stats;
        Error err;
        const char *to = copy_of(from, limit[i], &stats);
        CU_ASSERT_EQUAL(stats.files, files[i]);
        CU_ASSERT_EQUAL(count_files(to), files[i] + 2); /* the index and config.json */
        is_packed_copy(to, from);
        for (int f = 1; f <= files[i]; f++) {
            char name[60];
            struct stat st;
            snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", f, files[i]);
            follows_the_format(path_in(to, name));
            CU_ASSERT(i == 0 || (stat(path_in(to, name), &st) == 0 && (size_t)st.st_size <= limit[i] + 8192)); /* header */
        }
        size_t len;
        char *text = file_read(path_in(to, "model.safetensors.index.json"), 1 << 20, &len, &err);
        cJSON *index = json_parse(text, len, &err);
        CU_ASSERT_DOUBLE_EQUAL(cJSON_GetObjectItem(index->child, "total_size")->valuedouble, stats.after, 0);
        CU_ASSERT_EQUAL(cJSON_GetArraySize(index->child->next), 3 * NROLES + 4);
        cJSON_Delete(index);
        free(text);
    }
    CopyStats whole, stats; /* a file may be as large as the limit */
    copy_of(from, WHOLE, &whole);
    for (int less = 0; less < 2; less++) {
        copy_of(from, whole.after - less, &stats);
        CU_ASSERT_EQUAL(stats.files, 1 + less);
    }
}

static void the_small_files_come_along(void) {
    static const char *const names[] = {"vocab.json", "merges.txt", "generation_config.json",
                                        "README.md",  "old.bin",    "pytorch_model.bin.index.json"};
    const char *from = source(F16, NULL, 0);
    CopyStats stats;
    Error err;
    for (int i = 0; i < 6; i++) write_file(from, names[i], "\0x", 2);
    CHECK(mkdir(path_in(from, "sub.json"), 0700) == 0);
    const char *to = copy_of(from, WHOLE, &stats);
    CU_ASSERT_EQUAL(count_files(to), 5); /* the first three, config.json, model.safetensors */
    for (int i = 0; i < 3; i++) {
        size_t len;
        char *text = file_read(path_in(to, names[i]), 100, &len, &err);
        CU_ASSERT(text && len == 2 && !memcmp(text, "\0x", 2));
        free(text);
    }
    struct stat st;
    mode_t mask = umask(0);
    umask(mask);
    CU_ASSERT(stat(to, &st) == 0 && (st.st_mode & 0777) == (0777 & ~mask));
}

/* Those of processes that have ended; another's lives. */
static void what_a_killed_copy_has_left_is_cleared_away(void) {
    CopyStats stats;
    Error err;
    const char *from = source(F16, NULL, 0);
    char to[700], dead[720], living[720], mine[720];
    snprintf(to, sizeof to, "%s", path_in(temp_dir(), "new"));
    snprintf(dead, sizeof dead, "%s.tmp-12345", to), snprintf(living, sizeof living, "%s.tmp-23456", to);
    snprintf(mine, sizeof mine, "%s.tmp-1x", to);
    CHECK(!mkdir(dead, 0700) && !mkdir(living, 0700) && !mkdir(mine, 0700));
    write_file(dead, "config.json", "{}", 2), write_file(living, "config.json", "{}", 2);
    const int fd = open(living, O_RDONLY | O_DIRECTORY);
    CHECK(fd >= 0 && !flock(fd, LOCK_EX));
    ASSERT_OK(quantized(&stats, from, to, WHOLE, 2, &err));
    is_packed_copy(to, from);
    CU_ASSERT(access(dead, F_OK) && !access(mine, F_OK) && count_files(living) == 1);
    close(fd);
}

/* A file and a directory. Another process begins one with the same target. */
static void what_a_running_process_has_begun_is_left_alone(void) {
    Error err;
    for (int directory = 0; directory < 2; directory++) {
        char mine[700], to[700];
        int status;
        snprintf(to, sizeof to, "%s", path_in(temp_dir(), "new"));
        const int fd = unfinished_begin(to, directory, &err);
        CU_ASSERT_FATAL(fd >= 0);
        snprintf(mine, sizeof mine, "%s", unfinished_name());
        const pid_t other = fork();
        if (!other) _exit(unfinished_begin(to, directory, &err) < 0);
        CU_ASSERT(waitpid(other, &status, 0) == other && !status && !access(mine, F_OK));
        unfinished_remove();
        CU_ASSERT(access(mine, F_OK));
        if (!directory) close(fd);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// What is refused
// ---------------------------------------------------------------------------------------------------------------

/* No copy, one line that has part, and the directory that would hold it has as many files as before. */
static void refused(const char *from, const char *to, int code, const char *part) {
    char parent[700];
    CopyStats stats;
    Error err = {0, ""};
    snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(to, '/') - to), to);
    int before = count_files(parent);
    CU_ASSERT_EQUAL(quantized(&stats, from, to, WHOLE, 2, &err), -1);
    if (err.code != code || !strstr(err.text, part)) {
        fprintf(stderr, "\n    got: %d %s\n    expected in it: %s\n", err.code, err.text, part);
        CU_FAIL("message");
    }
    CU_ASSERT_EQUAL(count_files(parent), before);
}

static void numbers_that_are_not_finite_are_named_and_leave_nothing(void) {
    static const struct {
        Type type;
        const char *name;
        float bad;
        const char *part;
    } cases[] = {{F16, "model.decoder.layers.1.fc2.weight", NAN, "layers.1.fc2.weight: element 5 is nan; expected finite"},
                 {F16, "model.decoder.layers.0.self_attn.k_proj.weight", -INFINITY, "k_proj.weight: element 5 is -inf"},
                 {F16, "model.decoder.layers.0.fc1.bias", INFINITY, "layers.0.fc1.bias: element 5 is inf; expected finite"},
                 {F16, "lm_head.weight", NAN, "lm_head.weight: element 5 is nan"},
                 {BF16, "model.decoder.layers.1.fc1.weight", NAN, "layers.1.fc1.weight: element 5 is nan"},
                 {F32, "model.decoder.layers.1.fc1.weight", 1e6f, "layers.1.fc1.weight: element 5 is 1e+06"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *from = source(cases[i].type, cases[i].name, cases[i].bad), *to = temp_dir();
        refused(from, path_in(to, "new"), EXIT_FAILED, cases[i].part);
        refused(from, to, EXIT_FAILED, cases[i].part); /* an empty directory is there again */
        CU_ASSERT_EQUAL(count_files(to), 0);
    }
}

/* The link to vocab.json of a download that was broken off; a file that is too large. */
static void a_small_file_that_cannot_come_along_is_an_error(void) {
    const char *from = source(F16, NULL, 0), *to = path_in(temp_dir(), "new");
    CHECK(symlink("no/such", path_in(from, "vocab.json")) == 0);
    refused(from, to, EXIT_FAILED, "vocab.json: cannot open: No such file");
    CHECK(unlink(path_in(from, "vocab.json")) == 0);
    write_file(from, "vocab.json", "", 0);
    CHECK(truncate(path_in(from, "vocab.json"), 200 << 20) == 0);
    refused(from, to, EXIT_FAILED, "vocab.json: has 209715200 bytes; expected at most");
}

static void a_signal_leaves_nothing(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    const char *from = source(F16, NULL, 0), *parent = temp_dir();
    char to[700];
    snprintf(to, sizeof to, "%s", path_in(parent, "new"));
    for (int s = 0; s < 3; s++) {
        int status;
        fflush(NULL);
        const pid_t pid = fork();
        if (!pid) {
            CopyStats stats;
            Error err;
            stop_catch();
            raise(signals[s]);
            quantized(&stats, from, to, WHOLE, 1, &err);
            _exit(err.code);
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SIGNAL + signals[s]);
        CU_ASSERT_EQUAL(count_files(parent), 0);
    }
}

/* The first is only noted. What was ignored before, as in the background of a shell, is neither. */
static void a_second_signal_ends_the_program_at_once(void) {
    static const int signals[][2] = {{SIGINT, SIGINT}, {SIGINT, SIGTERM}, {SIGTERM, SIGHUP}};
    for (int s = 0; s < 3; s++) {
        int status;
        fflush(NULL);
        const pid_t pid = fork();
        if (!pid) {
            signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, s == 2 ? SIG_IGN : SIG_DFL);
            stop_catch();
            raise(signals[s][0]), raise(signals[s][1]);
            _exit(*stop_signal());
        }
        CU_ASSERT(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        CU_ASSERT_EQUAL(WEXITSTATUS(status), s == 2 ? SIGTERM : EXIT_SIGNAL + signals[s][1]);
    }
}

static void a_full_disk_leaves_nothing(void) {
    struct rlimit old, small_files;
    static const rlim_t most[] = {100, 1000, 20000}; /* of config.json, of a header, of tensors */
    const char *from = source(F16, NULL, 0);
    char to[700];
    snprintf(to, sizeof to, "%s", path_in(temp_dir(), "new"));
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    for (int i = 0; i < 3; i++) {
        small_files = (struct rlimit){most[i], old.rlim_max};
        CHECK(setrlimit(RLIMIT_FSIZE, &small_files) == 0);
        refused(from, to, EXIT_FAILED, "File too large; make room");
        CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
    }
    signal(SIGXFSZ, handler);
}

/* In this program instead of libc's: counts, and fails the one that it is told to. */
static int syncs, failing_sync;
int fsync(int fd) {
    if (++syncs == failing_sync) return errno = EIO, -1;
    return (int)syscall(SYS_fsync, fd);
}

/* Each file, then their directory, then the one in which that has got its name. */
static void a_copy_is_on_the_disk_before_it_has_its_name(void) {
    CopyStats stats;
    const char *from = source(F16, NULL, 0);
    char to[700];
    syncs = 0;
    int files = count_files(copy_of(from, 1, &stats));
    CU_ASSERT(files > 3); /* several shards */
    CU_ASSERT_EQUAL(syncs, files + 2);
    snprintf(to, sizeof to, "%s", path_in(temp_dir(), "new"));
    int wanted = count_files(copy_of(from, WHOLE, &stats)) + 1;
    for (failing_sync = 1; failing_sync <= wanted; failing_sync++) {
        syncs = 0;
        refused(from, to, EXIT_FAILED, "Input/output error; make room or write elsewhere");
    }
    failing_sync = 0;
}

static void an_output_that_is_there_is_refused(void) {
    const char *from = source(F16, NULL, 0), *to = temp_dir();
    CopyStats stats;
    Error err;
    write_file(to, "mine", "precious", 8);
    refused(from, to, EXIT_USAGE, "Directory not empty; name a new directory or an empty one");
    refused(from, path_in(to, "mine"), EXIT_USAGE, "Not a directory");
    refused(from, from, EXIT_USAGE, "Directory not empty");
    CU_ASSERT_EQUAL(quantized(&stats, from, path_in(to, "no/such"), WHOLE, 2, &err), -1);
    CU_ASSERT(err.code == EXIT_FAILED && strstr(err.text, "No such file"));
    CU_ASSERT_EQUAL(count_files(to), 1);
    CHECK(symlink(to, path_in(to, "link")) == 0);
    refused(from, path_in(to, "link"), EXIT_USAGE, "Not a directory");
    CHECK(mkdir(path_in(to, "empty"), 0700) == 0);
    ASSERT_OK(quantized(&stats, from, path_in(to, "empty//"), WHOLE, 2, &err));
    is_packed_copy(path_in(to, "empty"), from);
    CU_ASSERT_EQUAL(count_files(to), 3);
    refused("/nonexistent", path_in(to, "new"), EXIT_FAILED, "there is no such directory");
}

static void a_packed_checkpoint_is_not_packed_again(void) {
    CopyStats stats;
    const char *copy = copy_of(source(F16, NULL, 0), WHOLE, &stats);
    refused(copy, path_in(temp_dir(), "new"), EXIT_USAGE, "is packed already; name");
}

// ---------------------------------------------------------------------------------------------------------------
// Hostile copies
// ---------------------------------------------------------------------------------------------------------------

/* A packed copy, its header as text, and its tensors, to spoil. */
typedef struct {
    char dir[400], header[16384];
    uint8_t *file;
    size_t data, size;
} Victim;

static Victim victim_open(const char *from) {
    Victim v;
    CopyStats stats;
    Error err;
    snprintf(v.dir, sizeof v.dir, "%s", copy_of(from, WHOLE, &stats));
    v.file = (uint8_t *)file_read(path_in(v.dir, "model.safetensors"), 1 << 24, &v.size, &err);
    CHECK(v.file);
    v.data = 8 + v.file[8 - 8] + 256u * v.file[1];
    CHECK(v.data - 8 < sizeof v.header);
    memcpy(v.header, v.file + 8, v.data - 8);
    v.header[v.data - 8] = 0;
    return v;
}

static void not_opened(const char *dir, const char *part) {
    Error err = {0, ""};
    Checkpoint *c = checkpoint_open(dir, &err);
    CU_ASSERT_PTR_NULL(c);
    checkpoint_close(c);
    if (c || err.code != EXIT_FAILED || !strstr(err.text, part) || strchr(err.text, '\n')) {
        fprintf(stderr, "\n    got: %s\n    expected in it: %s\n", err.text, part);
        CU_FAIL("message");
    }
}

/* small: q_proj is (64, 64): [1, 64 x 36]; fc1 (128, 64): [2, 2304] */
static const char *const spoilt[][3] = {
    {"flexgen-packed-1", "flexgen-packed-2", "format is \"flexgen-packed-2\"; expected \"flexgen-packed-1\""},
    {"flexgen-packed-1", "pt", "q_proj.weight: dtype is U8; expected F16, BF16 or F32: save the model"},
    {"\"__metadata__\"", "\"metadata\"", "tensor metadata: dtype is nothing"},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":4", "flexgen.bits is 4; expected \"4\": pack the model again"},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":\"3\"", "flexgen.bits is \"3\"; expected \"4\": pack the model again"},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":\"\"", "flexgen.bits is \"\""},
    {"\"flexgen.bits\":\"4\"", "\"flexgen.bits\":\"4 \"", "flexgen.bits is \"4 \""},
    {"\"flexgen.bits\":\"4\",", "", "flexgen.bits is nothing"},
    {"\"flexgen.group\":\"64\"", "\"flexgen.group\":\"32\"",
     "flexgen.group is \"32\"; expected \"64\": pack the model again"},
    {"\"flexgen.group\":\"64\"", "\"flexgen.group\":[64]", "flexgen.group is a list"},
    {"\"flexgen.group\":\"64\"", "\"group\":\"64\"", "flexgen.group is nothing"},
    {"{\"format\"", "[{\"format\"", "header: byte"},
    {"\"U8\"", "\"I8\"", "q_proj.weight: dtype is I8; expected U8, as __metadata__ says it is packed"},
    {"\"U8\",\"shape\":[1,2304]", "\"F16\",\"shape\":[18,64]", "q_proj.weight: dtype is F16; expected U8"},
    {"\"U8\",\"shape\":[1,2304]", "\"U8\",\"shape\":[2304,1]", "shape is [2304,1]; config.json asks for [1,2304]"},
    {"\"U8\",\"shape\":[1,2304]", "\"U8\",\"shape\":[2304]", "shape is [2304]; config.json asks for [1,2304]"},
    {"\"U8\",\"shape\":[2,2304]", "\"U8\",\"shape\":[1,4608]", "fc1.weight: shape is [1,4608]; config.json asks for [2"},
    {"\"U8\",\"shape\":[2,2304]", "\"U8\",\"shape\":[2,2305]", "shape is [2,2305]; config.json asks for [2,2304]"},
    {"\"F16\",\"shape\":[70,24]", "\"U8\",\"shape\":[70,48]", "embed_tokens.weight: dtype is U8; expected F16, BF16 or"},
    {"\"F16\",\"shape\":[128]", "\"U8\",\"shape\":[256]", "fc1.bias: dtype is U8; expected F16"},
};

static void spoilt_copies_are_refused(void) {
    Victim v = victim_open(source(F16, NULL, 0));
    char *text = (char *)xcalloc(sizeof v.header + 100, 1);
    for (size_t i = 0; i < sizeof spoilt / sizeof *spoilt; i++) {
        const char *at = strstr(v.header, spoilt[i][0]);
        CU_ASSERT_PTR_NOT_NULL_FATAL(at);
        sprintf(text, "%.*s%s%s", (int)(at - v.header), v.header, spoilt[i][1], at + strlen(spoilt[i][0]));
        write_safetensors(v.dir, text, v.file + v.data, v.size - v.data);
        not_opened(v.dir, spoilt[i][2]);
    }
    write_safetensors(v.dir, v.header, v.file + v.data, v.size - v.data - 1);
    not_opened(v.dir, "is the download complete?");
    write_file(v.dir, "model.safetensors", v.file, v.data - 40);
    not_opened(v.dir, "the header claims");
    free(text);
    free(v.file);
}

static void shards_are_all_packed_or_none_is(void) {
    static const char b[] = "model-00002-of-00002.safetensors";
    char to[400], other[400];
    CopyStats stats;
    snprintf(to, sizeof to, "%s", copy_of("tests/golden/opt-pre", 90000, &stats));
    CU_ASSERT_EQUAL_FATAL(stats.files, 2);
    is_packed_copy(to, "tests/golden/opt-pre");
    CHECK(unlink(path_in(to, b)) == 0 &&
          symlink(realpath("tests/golden/opt-post/model.safetensors", other), path_in(to, b)) == 0);
    not_opened(to, "00002.safetensors: is not packed, ");
}

static void random_damage_to_a_copy_never_crashes(void) {
    Victim v = victim_open(source(F16, NULL, 0));
    const size_t len = strlen(v.header);
    uint64_t state = 3;
    static uint8_t bytes[1 << 14];
    int opened = 0;
    for (int run = 0; run < 1000; run++) {
        char text[sizeof v.header];
        strcpy(text, v.header);
        for (int edits = 1 + run % 3; edits > 0; edits--) {
            size_t most = edits == 1 ? 120 : len, at = (size_t)((test_random(&state) + 1) / 2 * (float)most);
            text[at] = "0123456789-.eE[]{}\":,\\u\x80UF"[(size_t)((test_random(&state) + 1) / 2 * 25)];
        }
        write_safetensors(v.dir, text, v.file + v.data, v.size - v.data);
        Error err = {0, ""};
        Checkpoint *c = checkpoint_open(v.dir, &err);
        for (int r = 0; c && r < NROLES; r++) {
            const Tensor *t = &c->layer[1][r];
            ASSERT_OK(checkpoint_fill(c, bytes, t, 0, (size_t)t->rows * t->cols, &err));
        }
        opened += c != NULL;
        CU_ASSERT(c || (err.code == EXIT_FAILED && err.text[0]));
        checkpoint_close(c);
    }
    CU_ASSERT(opened < 100);
    free(v.file);
}

CU_TestInfo tests[] = {
    {"matrices of layers are packed and the rest is kept", matrices_of_layers_are_packed_and_the_rest_is_kept},
    {"all float types can be packed", all_float_types_can_be_packed},
    {"a dummy is packed like a checkpoint", a_dummy_is_packed_like_a_checkpoint},
    {"a group divides the rows of all matrices", a_group_divides_the_rows_of_all_matrices},
    {"the plain forward reads a copy", the_plain_forward_reads_a_copy},
    {"files follow the format", files_follow_the_format},
    {"a layer of a copy is read as one", a_layer_of_a_copy_is_read_as_one},
    {"large models are cut between layers", large_models_are_cut_between_layers},
    {"the small files come along", the_small_files_come_along},
    {"numbers that are not finite are named and leave nothing", numbers_that_are_not_finite_are_named_and_leave_nothing},
    {"what a killed copy has left is cleared away", what_a_killed_copy_has_left_is_cleared_away},
    {"what a running process has begun is left alone", what_a_running_process_has_begun_is_left_alone},
    {"a small file that cannot come along is an error", a_small_file_that_cannot_come_along_is_an_error},
    {"a signal leaves nothing", a_signal_leaves_nothing},
    {"a second signal ends the program at once", a_second_signal_ends_the_program_at_once},
    {"a full disk leaves nothing", a_full_disk_leaves_nothing},
    {"a copy is on the disk before it has its name", a_copy_is_on_the_disk_before_it_has_its_name},
    {"an output that is there is refused", an_output_that_is_there_is_refused},
    {"a packed checkpoint is not packed again", a_packed_checkpoint_is_not_packed_again},
    {"spoilt copies are refused", spoilt_copies_are_refused},
    {"shards are all packed, or none is", shards_are_all_packed_or_none_is},
    {"random damage to a copy never crashes", random_damage_to_a_copy_never_crashes},
    CU_TEST_INFO_NULL,
};
