/* test_opt_model.c: sizes, shapes, and the plain forward against Hugging Face. */
#include "golden.h"
#include "ops.h"

static size_t parameters(const OptConfig *config) {
    size_t total = 0;
    int rows, cols;
    for (int g = 0; g < LM_HEAD; g++) {
        opt_global_shape(config, (Global)g, &rows, &cols);
        total += (size_t)rows * cols;
    }
    for (int r = 0; r < NROLES; r++) {
        opt_role_shape(config, (Role)r, &rows, &cols);
        total += (size_t)rows * cols * config->l;
    }
    return total;
}

static void the_sizes_have_their_published_parameters(void) {
    static const struct {
        const char *name;
        size_t parameters;
    } known[] = {{"opt-125m", 125239296},          {"opt-350m", 331196416},  {"opt-1.3b", 1315758080},
                 {"opt-2.7b", 2651596800},         {"opt-6.7b", 6658473984}, {"facebook/opt-13b", 12853473280},
                 {"facebook/opt-30b", 29974540288}};
    OptConfig config;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, known[i].name), 0);
        CU_ASSERT_EQUAL(parameters(&config), known[i].parameters);
    }
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-66b"), 0);
    CU_ASSERT_DOUBLE_EQUAL(parameters(&config) / 1e9, 66, 1);
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-175b"), 0);
    CU_ASSERT_DOUBLE_EQUAL(parameters(&config) / 1e9, 175, 1);
}

static void heads_are_of_the_published_size(void) {
    static const char *const names[] = {"opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b",
                                        "opt-13b",  "opt-30b",  "opt-66b",  "opt-175b"};
    static const int head_dim[] = {64, 64, 64, 80, 128, 128, 128, 128, 128};
    OptConfig config;
    for (int i = 0; i < 9; i++) {
        CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, names[i]), 0);
        CU_ASSERT(config.h1 % config.nh == 0 && config.h1 / config.nh == head_dim[i] && config.h2 == 4 * config.h1);
        CU_ASSERT(config.vocab == 50272 && config.max_pos == 2048 && config.eos == 2);
    }
}

static void only_published_names_are_known(void) {
    static const char *const bad[] = {
        "", "opt", "opt-125", "opt-125m ", "OPT-125M", "facebook/", "facebook/facebook/opt-125m", "meta/opt-125m"};
    OptConfig config;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CU_ASSERT_EQUAL(opt_config_by_name(&config, bad[i]), -1);
    char names[200], *save = NULL;
    int count = 0;
    snprintf(names, sizeof names, "%s", opt_known_names());
    for (char *name = strtok_r(names, ", ", &save); name; name = strtok_r(NULL, ", ", &save), count++)
        CU_ASSERT(opt_config_by_name(&config, name) == 0 && strcmp(config.name, name) == 0);
    CU_ASSERT_EQUAL(count, 9);
}

static void opt_350m_is_the_odd_one(void) {
    OptConfig config;
    int rows, cols;
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-350m"), 0);
    CU_ASSERT(!config.pre_norm && !config.final_norm && config.embed == 512);
    opt_global_shape(&config, PROJECT_IN, &rows, &cols);
    CU_ASSERT(rows == 1024 && cols == 512);
    opt_global_shape(&config, PROJECT_OUT, &rows, &cols);
    CU_ASSERT(rows == 512 && cols == 1024);
    opt_global_shape(&config, FINAL_LN_W, &rows, &cols);
    CU_ASSERT_EQUAL(rows, 0);
    CU_ASSERT_EQUAL_FATAL(opt_config_by_name(&config, "opt-125m"), 0);
    opt_global_shape(&config, PROJECT_IN, &rows, &cols);
    CU_ASSERT_EQUAL(rows, 0);
    opt_global_shape(&config, FINAL_LN_W, &rows, &cols);
    CU_ASSERT(rows == 1 && cols == 768);
    opt_role_shape(&config, FC2_W, &rows, &cols);
    CU_ASSERT(rows == 768 && cols == 3072);
    opt_role_shape(&config, FC1_B, &rows, &cols);
    CU_ASSERT(rows == 1 && cols == 3072);
}

static void meets_hugging_face(const char *dir) {
    Error err = {0, ""};
    Golden golden = golden_read(dir);
    Checkpoint *checkpoint = checkpoint_open(dir, &err);
    if (!checkpoint) fprintf(stderr, "\n    %s\n", err.text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(checkpoint);
    CU_ASSERT_EQUAL_FATAL(checkpoint->config.vocab, golden.vocab);
    for (int i = 0; i < golden.count; i++) {
        const GoldenSequence *s = &golden.sequence[i];
        float *logits = (float *)xcalloc((size_t)s->n * golden.vocab, sizeof *logits);
        ASSERT_OK(reference_forward(logits, checkpoint, s->ids, s->n, &err));
        double e =
            max_norm_error(logits + (size_t)(s->n - s->rows) * golden.vocab, s->logits, (size_t)s->rows * golden.vocab);
        if (getenv("VERBOSE")) fprintf(stderr, "\n    %s, %d tokens: error %.2e", dir, s->n, e);
        /* K and V rounded to F16 cost 3e-4 to 8e-4; a wrong order, scale or missing bias costs over 1e-2 */
        CU_ASSERT(e <= 2e-3);
        free(logits);
    }
    golden_free(&golden);
    checkpoint_close(checkpoint);
}

static void the_plain_forward_meets_hugging_face(void) { meets_hugging_face("tests/golden/opt-pre"); }
static void the_post_norm_forward_meets_hugging_face(void) { meets_hugging_face("tests/golden/opt-post"); }

static void greedy_decoding_finds_hugging_face_s_tokens(void) {
    static const char *const dirs[] = {"tests/golden/opt-pre", "tests/golden/opt-post"};
    Sampling sampling = {0, 1, 0, 0};
    for (int d = 0; d < 2; d++) {
        Error err = {0, ""};
        Golden golden = golden_read(dirs[d]);
        Checkpoint *checkpoint = checkpoint_open(dirs[d], &err);
        CU_ASSERT_PTR_NOT_NULL_FATAL(checkpoint);
        for (int i = 0; i < 2; i++) { /* the short prompts: the plain forward computes everything again for each token */
            const GoldenSequence *s = &golden.sequence[i];
            int32_t ids[128];
            float *logits = (float *)xcalloc(128 * (size_t)golden.vocab, sizeof *logits);
            memcpy(ids, s->ids, s->n * sizeof *ids);
            for (int t = 0; t < golden.greedy; t++) {
                int n = s->n + t, prompt = 0;
                ASSERT_OK(reference_forward(logits, checkpoint, ids, n, &err));
                run(picking(&ids[n], logits + (size_t)(n - 1) * golden.vocab, &prompt, &n, &sampling, 1, golden.vocab));
                CU_ASSERT_EQUAL_FATAL(ids[n], s->tokens[t]);
            }
            free(logits);
        }
        golden_free(&golden);
        checkpoint_close(checkpoint);
    }
}

static void later_tokens_change_nothing_before_them(void) {
    enum { N = 20, PREFIX = 7 };
    OptConfig config = {"t", 2, 32, 64, 4, 50, 40, 32, true, true, 2, 0, 1};
    Checkpoint *checkpoint = checkpoint_dummy(&config, 3);
    Error err = {0, ""};
    int32_t ids[N];
    float all[N * 50], prefix[PREFIX * 50];
    for (int t = 0; t < N; t++) ids[t] = (t * 7 + 2) % 50;
    ASSERT_OK(reference_forward(all, checkpoint, ids, N, &err));
    ASSERT_OK(reference_forward(prefix, checkpoint, ids, PREFIX, &err));
    CU_ASSERT_EQUAL(memcmp(all, prefix, sizeof prefix), 0);
    checkpoint_close(checkpoint);
}

static void a_dummy_tells_tokens_apart_in_the_deepest_models(void) {
    enum { N = 12, VOCAB = 150 };
    for (int post = 0; post < 2; post++) {
        OptConfig config = {"t", post ? 24 : 96, 64, 256, 4, VOCAB, 40, post ? 32 : 64, !post, !post, 2, 0, 1};
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

CU_TestInfo tests[] = {
    {"the sizes have their published parameters", the_sizes_have_their_published_parameters},
    {"heads are of the published size", heads_are_of_the_published_size},
    {"only published names are known", only_published_names_are_known},
    {"opt-350m is the odd one", opt_350m_is_the_odd_one},
    {"the plain forward meets Hugging Face", the_plain_forward_meets_hugging_face},
    {"the post-norm forward meets Hugging Face", the_post_norm_forward_meets_hugging_face},
    {"greedy decoding finds Hugging Face's tokens", greedy_decoding_finds_hugging_face_s_tokens},
    {"later tokens change nothing before them", later_tokens_change_nothing_before_them},
    {"a dummy tells tokens apart in the deepest models", a_dummy_tells_tokens_apart_in_the_deepest_models},
    CU_TEST_INFO_NULL,
};
