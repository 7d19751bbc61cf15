/* golden.h: reads tests/golden/<name>/golden.bin, what Hugging Face computed; scripts/make_golden.py has its layout. */
#ifndef GOLDEN_H
#define GOLDEN_H
#include "tests.h"

enum { GOLDEN_MAX = 8 };

typedef struct {
    int n, rows;     /* prompt length; the last rows positions have logits */
    int32_t *ids;    /* [n] the prompt, </s> first */
    int32_t *tokens; /* [greedy] how it goes on */
    float *logits;   /* (rows, vocab) */
} GoldenSequence;

typedef struct {
    int32_t count, vocab, greedy;
    GoldenSequence sequence[GOLDEN_MAX];
} Golden;

static inline void *golden_take(FILE *f, size_t count) {
    void *p = xcalloc(count, 4);
    CHECK(fread(p, 4, count, f) == count);
    return p;
}

/* dir as in "tests/golden/opt-pre". */
static inline Golden golden_read(const char *dir) {
    Golden golden = {0, 0, 0, {{0, 0, NULL, NULL, NULL}}};
    char path[300];
    snprintf(path, sizeof path, "%s/golden.bin", dir);
    FILE *f = fopen(path, "rb");
    CHECK(f && fread(&golden, 4, 3, f) == 3 && golden.count <= GOLDEN_MAX);
    for (int i = 0; i < golden.count; i++) {
        GoldenSequence *s = &golden.sequence[i];
        int32_t *sizes = golden_take(f, 2);
        s->n = sizes[0];
        s->rows = sizes[1];
        free(sizes);
        s->ids = golden_take(f, s->n);
        s->tokens = golden_take(f, golden.greedy);
        s->logits = golden_take(f, (size_t)s->rows * golden.vocab);
    }
    CHECK(fgetc(f) == EOF && fclose(f) == 0);
    return golden;
}

static inline void golden_free(Golden *golden) {
    for (int i = 0; i < golden->count; i++) {
        free(golden->sequence[i].ids);
        free(golden->sequence[i].tokens);
        free(golden->sequence[i].logits);
    }
}
#endif
