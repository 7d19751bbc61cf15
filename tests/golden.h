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
    int32_t *file; /* all of it, in which the pointers of the sequences lie */
    int32_t count, vocab, greedy;
    GoldenSequence sequence[GOLDEN_MAX];
} Golden;

/* dir as in "tests/golden/opt-pre". */
static inline Golden golden_read(const char *dir) {
    size_t len;
    int32_t *at = (int32_t *)contents(in_dir(dir, "golden.bin"), &len);
    Golden golden = {.file = at, .count = at[0], .vocab = at[1], .greedy = at[2]};
    CHECK(golden.count <= GOLDEN_MAX);
    at += 3;
    for (int i = 0; i < golden.count; i++) {
        GoldenSequence *s = &golden.sequence[i];
        s->n = at[0], s->rows = at[1];
        s->ids = at + 2, s->tokens = s->ids + s->n;
        s->logits = (float *)(s->tokens + golden.greedy);
        at = s->tokens + golden.greedy + s->rows * golden.vocab;
    }
    CHECK(at == golden.file + len / sizeof *at);
    return golden;
}

static inline void golden_free(Golden *golden) { free(golden->file); }
#endif
