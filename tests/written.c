/* written.c: writes checkpoints, and faults into files. written.h says what each function does. Names and shapes are
 * those that the program knows; the checkpoints in tests/golden and models, which Python wrote, hold these to be right. */
#include "written.h"

#include "tests.h"

void write_config(const char *dir, const OptConfig *c) {
    FILE *f = fopen(in_dir(dir, "config.json"), "w");
    fprintf(
        f,
        "{\"model_type\": \"opt\", \"num_hidden_layers\": %d, \"hidden_size\": %d, \"ffn_dim\": %d, "
        "\"num_attention_heads\": %d, \"vocab_size\": %d, \"max_position_embeddings\": %d, \"word_embed_proj_dim\": %d, "
        "\"eos_token_id\": %d, \"do_layer_norm_before\": %s, \"activation_function\": \"relu\", \"enable_bias\": true, "
        "\"tie_word_embeddings\": true}",
        c->l, c->h1, c->h2, c->nh, c->vocab, c->max_pos, c->embed, c->eos, c->pre_norm ? "true" : "false");
    CHECK(fclose(f) == 0);
}

float any_number(int t, size_t e) { return .1f * ((float)(splitmix64((uint64_t)t, e) >> 40) / (1 << 23) - 1); }

float model_number(const Model *m, int t, size_t e) {
    if (m->odd && t == m->odd && e == m->odd_at) return m->odd_number;
    return m->number ? m->number(&m->config, t, e) : any_number(t, e);
}

/* Writes a file with its part of the tensors. */
static void write_tensors(const char *dir, const char *file, const Model *m, int shard) {
    static const char *const types[] = {[F32] = "F32", [F16] = "F16", [BF16] = "BF16"};
    Checkpoint *sizes = checkpoint_dummy(&m->config, 0);
    Text header = {0}, data = {0};
    FILE *text = text_stream(&header);
    for (int t = 0; t < part_count(&m->config); t++) {
        const bool head = t == LM_HEAD && m->head;
        const Part part = checkpoint_part(sizes, head ? TOK_EMBED : t);
        const Type type = head ? m->head_type : m->type;
        const int rows = part.tensor->rows, cols = part.tensor->cols;
        const size_t begin = data.len;
        char name[100];
        if (!rows || (part.layer + 1) % imax(m->shards, 1) != shard) continue;
        for (size_t e = 0; e < (size_t)rows * cols; e++) {
            const float x = model_number(m, t, e);
            const f16 half = f32_to_f16(x);
            const size_t bytes = type_bytes(type); /* of BF16 the high ones of a float */
            text_append(&data, type == F16 ? (const char *)&half : (const char *)&x + sizeof x - bytes, bytes);
        }
        fprintf(text, "%c\"%s%s\":{\"dtype\":\"%s\",\"shape\":[", begin ? ',' : '{', head ? "" : m->prefix,
                head ? "lm_head.weight" : checkpoint_name(name, sizes, part.tensor) + strlen("model."), types[type]);
        fprintf(text, part.vector ? "%.0d%d" : "%d,%d", part.vector ? 0 : rows, cols);
        fprintf(text, "],\"data_offsets\":[%zu,%zu]}", begin, data.len);
    }
    putc('}', text), fclose(text);
    const uint64_t len = header.len;
    FILE *f = fopen(in_dir(dir, file), "wb");
    fwrite(&len, sizeof len, 1, f), fwrite(header.text, len, 1, f), fwrite(data.text, data.len, 1, f);
    CHECK(fclose(f) == 0);
    free(header.text), free(data.text);
    checkpoint_close(sizes);
}

void write_model(const char *dir, const Model *model) {
    char file[] = "a.safetensors", kept[700];
    dir = strcpy(kept, dir); /* it may come from in_dir */
    write_config(dir, &model->config);
    if (model->shards < 2) {
        write_tensors(dir, "model.safetensors", model, 0);
        return;
    }
    FILE *index = fopen(in_dir(dir, "model.safetensors.index.json"), "w");
    for (int s = 0; s < 2 * model->shards; s++) { /* each file is named twice, as it is for each of its tensors */
        file[0] = (char)('a' + s % model->shards);
        if (s < model->shards) write_tensors(dir, file, model, s);
        fprintf(index, "%s\"tensor %d\": \"%s\"", s ? ", " : "{\"weight_map\": {", s, file);
    }
    fputs("}}", index);
    CHECK(fclose(index) == 0);
}

const char *model_dir(Model model) {
    const char *dir = temp_dir();
    write_model(dir, &model);
    return dir;
}

const char *suite_dir(void) {
    static char dir[300]; /* for longer than temp_dir keeps it */
    if (!dir[0]) strcpy(dir, temp_dir());
    return dir;
}

void spoil(const char *dir, const char *file, const char *from, const char *to) {
    const size_t skipped = strstr(file, ".safetensors") && !strstr(file, ".json") ? sizeof(uint64_t) : 0;
    size_t size;
    char *all = contents(in_dir(dir, file), &size), *text = all + skipped;
    uint64_t len = size;
    memcpy(&len, all, skipped);
    char *at = !from ? text : *from ? memmem(text, len, from, strlen(from)) : text + len;
    CHECK(at);
    const char *rest = from ? at + strlen(from) : text + len;
    len += strlen(to) - (size_t)(rest - at);
    FILE *f = fopen(in_dir(dir, file), "wb");
    fwrite(&len, skipped, 1, f), fwrite(text, (size_t)(at - text), 1, f), fputs(to, f);
    fwrite(rest, (size_t)(all + size - rest), 1, f);
    CHECK(fclose(f) == 0);
    free(all);
}

Checkpoint *opens(const char *dir) {
    Error err;
    Checkpoint *c = checkpoint_open(dir, &err);
    ASSERT_OK(!c);
    return c;
}

bool checkpoint_opens(const char *dir, Error *err) {
    Checkpoint *c = checkpoint_open(dir, err);
    checkpoint_close(c);
    return c;
}

void said(Error *err, int code, const char *part) {
    CU_ASSERT_EQUAL(err->code, code);
    CU_ASSERT(!strchr(err->text, '\n') && utf8_valid(err->text, strlen(err->text)));
    if (!strstr(err->text, part)) fprintf(stderr, "\n    got: %s\n    expected in it: %s\n", err->text, part);
    CU_ASSERT_PTR_NOT_NULL(strstr(err->text, part));
    *err = (Error){0, ""};
}

void refuses(Opens *opens_it, int code, const char *name, const char *says) {
    Error err = {0, ""};
    CU_ASSERT_FALSE(opens_it(name, &err));
    CU_ASSERT(!strncmp(err.text, name, strlen(name)));
    said(&err, code, says);
}

void refuses_each(Opens *opens_it, int code, const char *dir, const char *file, const Fault *fault, size_t n) {
    size_t len;
    char *good = contents(in_dir(dir, file), &len);
    for (size_t i = 0; i < n; i++) {
        spoil(dir, file, fault[i].from, fault[i].to);
        refuses(opens_it, code, dir, fault[i].says);
        write_file(dir, file, good, len);
    }
    free(good);
}
