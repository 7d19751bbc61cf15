/* test_opt_model.c: the published sizes and shapes, and the plain forward pass against Hugging Face's logits.
 * The engine's own forward pass is in test_schedule.c. */
#include "golden.h"
#include "written.h"

TEST(the_sizes_have_their_published_parameters_and_opt_350m_is_the_odd_one) {
    static const struct {
        const char *name;
        double parameters, about;
        int head;
    } known[] = {{"opt-125m", 125239296, 0, 64},
                 {"opt-350m", 331196416, 0, 64},
                 {"opt-1.3b", 1315758080, 0, 64},
                 {"opt-2.7b", 2651596800, 0, 80},
                 {"opt-6.7b", 6658473984, 0, 128},
                 {"facebook/opt-13b", 12853473280, 0, 128},
                 {"facebook/opt-30b", 29974540288, 0, 128},
                 {"opt-66b", 66e9, 1e9, 128},
                 {"opt-175b", 175e9, 1e9, 128}};
    for (size_t i = 0; i < COUNT(known); i++) {
        const OptConfig config = opt_named(known[i].name);
        Checkpoint *checkpoint = checkpoint_dummy(&config, 0);
        double parameters = 0;
        for (int t = 0; t < part_count(&config); t++) {
            const Tensor *tensor = checkpoint_part(checkpoint, t).tensor;
            parameters += (double)tensor->rows * tensor->cols;
        }
        checkpoint_close(checkpoint);
        CU_ASSERT_DOUBLE_EQUAL(parameters, known[i].parameters, known[i].about);
        CU_ASSERT(config.h1 == config.nh * known[i].head && config.h2 == 4 * config.h1);
        const bool odd = i == 1;
        CU_ASSERT(config.pre_norm == !odd && config.final_norm == !odd && config.embed == (odd ? 512 : config.h1));
        CU_ASSERT(config.vocab == 50272 && config.max_pos == 2048 && config.eos == 2);
    }
}

TEST(only_published_names_are_known) {
    static const char *const bad[] = {
        "", "opt", "opt-125", "opt-125m ", "OPT-125M", "facebook/", "facebook/facebook/opt-125m", "meta/opt-125m"};
    OptConfig config;
    for (size_t i = 0; i < COUNT(bad); i++) CU_ASSERT_EQUAL(opt_config_by_name(&config, bad[i]), -1);
    char names[200], *save = NULL;
    int count = 0;
    strcpy(names, opt_known_names());
    for (char *name = strtok_r(names, ", ", &save); name; name = strtok_r(NULL, ", ", &save), count++)
        CU_ASSERT(opt_config_by_name(&config, name) == 0 && strcmp(config.name, name) == 0);
    CU_ASSERT_EQUAL(count, 9);
}

TEST(with_pre_norm_and_with_post_norm_logits_are_those_of_hugging_face) {
    static const char *const dirs[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};
    Error err = {0, ""};
    for (int d = 0; d < 2; d++) {
        Golden golden = golden_read(dirs[d]);
        Checkpoint *checkpoint = opens(dirs[d]);
        const size_t vocab = golden.vocab;
        CU_ASSERT_EQUAL_FATAL(checkpoint->config.vocab, golden.vocab);
        for (int i = 0; i < golden.count; i++) {
            const GoldenSequence *s = &golden.sequence[i];
            float *logits = xcalloc(s->n * vocab, sizeof *logits);
            ASSERT_OK(reference_forward(logits, checkpoint, s->ids, s->n, &err));
            /* K and V rounded to F16 cost 3e-4 to 8e-4; a wrong order, scale or missing bias costs over 1e-2 */
            const double error = max_norm_error(logits + (s->n - s->rows) * vocab, s->logits, s->rows * vocab);
            if (!(error <= 2e-3)) fprintf(stderr, "\n    %s, sequence %d: %g\n", dirs[d], i, error);
            CU_ASSERT(error <= 2e-3);
            free(logits);
        }
        golden_free(&golden);
        checkpoint_close(checkpoint);
    }
}

TEST(a_dummy_tells_tokens_apart_in_the_deepest_models) {
    enum { N = 12, VOCAB = 150 };
    for (int post = 0; post < 2; post++) {
        OptConfig config = {"t", post ? 24 : 96, 64, 256, 4, VOCAB, 40, post ? 32 : 64, !post, !post, 2, {0}, 0, 0, 1};
        Checkpoint *checkpoint = checkpoint_dummy(&config, 1);
        Error err = {0, ""};
        int32_t ids[N];
        float a[N * VOCAB], b[N * VOCAB], *last = a + (N - 1) * VOCAB;
        for (int t = 0; t < N; t++) ids[t] = (t * 37 + 2) % VOCAB;
        ASSERT_OK(reference_forward(a, checkpoint, ids, N, &err));
        ids[3] = 5;
        ASSERT_OK(reference_forward(b, checkpoint, ids, N, &err));
        for (int v = 0; v < N * VOCAB; v++) CU_ASSERT(fabsf(a[v]) < 100);
        CU_ASSERT(max_norm_error(last, b + (N - 1) * VOCAB, VOCAB) > 0.1); /* an earlier token matters */
        CU_ASSERT(max_norm_error(last, last - VOCAB, VOCAB) > 0.1);        /* and so does the position */
        checkpoint_close(checkpoint);
    }
}
