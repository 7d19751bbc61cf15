/* test_explain.c: that the linear program which is printed is the one that is solved, and that its prices are right: what a
 * little more memory brings is measured by solving again, which would tell if a dual price were wrong. */
#include <cjson/cJSON.h>

#include "tests.h"

static Error err;

/* A report of the linear program, as text and as an object. policy NULL: by Appendix A.3. */
typedef struct {
    char *text;
    cJSON *json;
} Said;

static Said explain(const Search *search, const Policy *policy, const Block *block) {
    Said said = {.json = cJSON_CreateObject()};
    size_t len;
    const TaskRun run = {.json = said.json, .text = open_memstream(&said.text, &len)};
    CHECK(run.text);
    ASSERT_OK(report_explained(&run, search, policy, block, &err));
    fclose(run.text);
    return said;
}

static void said_free(Said *said) { free(said->text), cJSON_Delete(said->json); }

static double figure(const Said *said, const char *outer, const char *inner, const char *name) {
    const cJSON *at = cJSON_GetObjectItem(said->json, outer);
    const cJSON *item = cJSON_GetObjectItem(inner ? cJSON_GetObjectItem(at, inner) : at, name);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

/* OPT-30B on the paper's machine: a block of 16 x 14, with so much memory on the CPU. */
typedef struct {
    Hardware hardware;
    Task task;
    Search search;
    Policy policy;
    Block block;
} Case;

static void case_open(Case *c, double cpu_gb) {
    enum { PROMPTS = 16 * 14, S = 512, N = 32 };
    OptConfig config;
    *c = (Case){.block = {S, N, 16, 14}, .policy = {.gbs = 16, .num_gpu_batches = 14, .overlap = true, .page_tokens = 16}};
    CHECK(opt_config_by_name(&config, "opt-30b") == 0);
    ASSERT_OK(hardware_read(&c->hardware, "hardware/t4.json", &err));
    c->hardware.cmem = cpu_gb * 1e9;
    c->policy.delegated = true;
    c->task = (Task){.prompts = xcalloc(PROMPTS, sizeof(Prompt)), .count = PROMPTS};
    for (int i = 0; i < PROMPTS; i++) c->task.prompts[i] = (Prompt){.s = S, .n = N};
    c->search = (Search){.hardware = &c->hardware,
                         .checkpoint = checkpoint_dummy(&config, 0),
                         .task = &c->task,
                         .act_type = F16,
                         .given = c->policy};
}

static void set_room(Case *c) {
    const double room[NTIERS] = {c->hardware.gmem, c->hardware.cmem, c->hardware.nmem};
    for (int t = 0; t < NTIERS; t++) c->search.capacity[t] = (size_t)room[t];
}

static void case_close(Case *c) {
    free(c->task.prompts);
    checkpoint_close((Checkpoint *)c->search.checkpoint);
}

/* The price by the text (4 digits, so that it is right to 1e-3) and by the object against the difference of two optima. */
static void check_price(Case *c, const Policy *policy, const char *tier, double *room) {
    const double little = 1e6; /* bytes; so few that the same rows bind */
    set_room(c);
    Said before = explain(&c->search, policy, &c->block);
    *room += little;
    set_room(c);
    Said after = explain(&c->search, policy, &c->block);
    const double price = figure(&before, "more", tier, "price");
    const double measured =
        (figure(&before, "lp", NULL, "objective") - figure(&after, "lp", NULL, "objective")) / little * 1e9;
    char gb[8];
    double size = NAN, printed = NAN;
    const char *line = strstr(before.text, "with one more GB");
    line = line ? strstr(line, tier) : NULL;
    CU_ASSERT(line && sscanf(line + strlen(tier), "%lf %7s %lf", &size, gb, &printed) == 3);
    CU_ASSERT(measured > 1e-3); /* or nothing is tested */
    CU_ASSERT(fabs(price - measured) <= 1e-6 * measured);
    CU_ASSERT(fabs(-printed - measured) <= 1e-3 * measured);
    CU_ASSERT(fabs(size - (*room - little) / 1e9) <= 1e-4 * size);
    said_free(&before), said_free(&after);
}

static void a_tier_with_a_little_more_memory_brings_what_its_price_says(void) {
    enum { ENOUGH = 219, SHORT = 150 }; /* GB of CPU memory; with the less a part of the cache must go to disk */
    for (int paper = 0; paper < 2; paper++)
        for (int squeezed = 0; squeezed < 2; squeezed++) {
            Case c;
            case_open(&c, squeezed ? SHORT : ENOUGH);
            check_price(&c, paper ? NULL : &c.policy, "GPU memory", &c.hardware.gmem);
            if (squeezed) check_price(&c, paper ? NULL : &c.policy, "CPU memory", &c.hardware.cmem);
            case_close(&c);
        }
}

/* No price without a limit: a row that has room to spare is worth nothing. */
static void every_row_binds_or_has_no_price(void) {
    Case c;
    case_open(&c, 219);
    set_room(&c);
    for (int paper = 0; paper < 2; paper++) {
        Said said = explain(&c.search, paper ? NULL : &c.policy, &c.block);
        const cJSON *row, *rows = cJSON_GetObjectItem(cJSON_GetObjectItem(said.json, "lp"), "rows");
        int n = 0, binding = 0;
        cJSON_ArrayForEach(row, rows) {
            const double left = cJSON_GetObjectItem(row, "left")->valuedouble,
                         right = cJSON_GetObjectItem(row, "right")->valuedouble;
            const bool binds = cJSON_IsTrue(cJSON_GetObjectItem(row, "binds"));
            CU_ASSERT(left <= right + 1e-9 * fabs(right)); /* of rounded sums */
            CU_ASSERT(binds || cJSON_GetObjectItem(row, "price")->valuedouble == 0);
            CU_ASSERT(!binds || fabs(left - right) <= 1e-9 * fabs(right));
            n++, binding += binds;
        }
        CU_ASSERT(n >= NROWS && binding > 3);
        CU_ASSERT(!paper || n == NROWS);
        said_free(&said);
    }
    case_close(&c);
}

/* ctog^g of Appendix A.3: 12 h1^2 x 2 bytes of weights over the link; by hand, h1 = 7168: 1.233 GB and 2 x 7168 x 224
 * bytes. */
static void rows_read_as_in_appendix_a3(void) {
    Case c;
    case_open(&c, 219);
    set_room(&c);
    Said said = explain(&c.search, NULL, &c.block);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(said.text, " ctog^g                   (1.233 GB (wc + wd) + 0.003211 GB (hc + hd)) / 12 GB/s <= T_gen\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(said.text, " wg + wc + wd             wg + wc + wd = 1\n"));
    said_free(&said);
    case_close(&c);
}

/* A faster link can only help, and here only the one that bounds T_gen does. */
static void the_link_that_bounds_is_the_one_to_make_faster(void) {
    Case c;
    case_open(&c, 219);
    set_room(&c);
    for (int paper = 0; paper < 2; paper++) {
        Said said = explain(&c.search, paper ? NULL : &c.policy, &c.block);
        CU_ASSERT(figure(&said, "more", "ctog", "throughput") > .1);
        CU_ASSERT(figure(&said, "more", "ctod", "throughput") == 0);
        CU_ASSERT(figure(&said, "more", "GPU memory", "throughput") > .05);
        said_free(&said);
    }
    case_close(&c);
}

/* What one more GB/s of a link brings, by the report, is what the same question on that machine says. */
static void a_faster_link_is_faster_in_both_stages(void) {
    static const char *const name[] = {"ctog", "gtoc", "dtoc", "ctod"};
    double most = 0;
    for (int paper = 0; paper < 2; paper++)
        for (int link = CTOG; link <= CTOD; link++) {
            Case c;
            case_open(&c, 100); /* so little that all links are busy */
            set_room(&c);
            Said before = explain(&c.search, paper ? NULL : &c.policy, &c.block);
            double *const bdw[] = {c.hardware.ctog_bdw, c.hardware.gtoc_bdw, c.hardware.dtoc_bdw, c.hardware.ctod_bdw};
            bdw[link][0] += 1e9, bdw[link][1] += 1e9;
            Said after = explain(&c.search, paper ? NULL : &c.policy, &c.block);
            const double seconds = figure(&before, "lp", NULL, "objective") - figure(&after, "lp", NULL, "objective");
            const double rises = figure(&after, "lp", NULL, "throughput") - figure(&before, "lp", NULL, "throughput");
            CU_ASSERT(fabs(figure(&before, "more", name[link], "seconds") - seconds) <= 1e-9 * fabs(seconds));
            CU_ASSERT(fabs(figure(&before, "more", name[link], "throughput") - rises) <= 1e-6 * fabs(rises) + 1e-9);
            most = fmax(most, seconds);
            said_free(&before), said_free(&after);
            case_close(&c);
        }
    CU_ASSERT(most > 1); /* or nothing is tested */
}

/* The left side of a printed row of a tier: what does not depend on the fractions stands first. On the GPU of A.3 that is
 * twice a layer's weights, the hidden states of a batch, and the work of each row: by hand, h1 = 7168, gbs = 16, s = 512,
 * 2.466 GB + 0.1174 GB, and for mlp_1^p 2 x 16 x 512 x 5 h1 = 0.5872 GB more. */
static void what_does_not_depend_on_fractions_stands_first_in_a_row(void) {
    Case c;
    case_open(&c, 219);
    set_room(&c);
    Said said = explain(&c.search, NULL, &c.block);
    const double fixed = (2 * 24. * 7168 * 7168 + 2. * 512 * 7168 * 16) / 1e9, mlp = 2. * 16 * 512 * 5 * 7168 / 1e9;
    const char *at[] = {strstr(said.text, " gpu_peak^p with mlp_1^p "), strstr(said.text, " gpu_peak^p with att_1^p ")};
    for (int i = 0; i < 2; i++) {
        double first = NAN;
        CU_ASSERT(at[i] && sscanf(at[i] + strlen(" gpu_peak^p with mlp_1^p "), "%lf GB + ", &first) == 1);
        CU_ASSERT(fabs(first - fixed - (i ? 0 : mlp)) <= 1e-3 * fixed); /* of four digits */
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(said.text, " nvme_peak                59.19 GB wd + ")); /* nothing here */
    said_free(&said);
    case_close(&c);
}

CU_TestInfo tests[] = {
    {"a tier with a little more memory brings what its price says",
     a_tier_with_a_little_more_memory_brings_what_its_price_says},
    {"every row binds or has no price", every_row_binds_or_has_no_price},
    {"rows read as in Appendix A.3", rows_read_as_in_appendix_a3},
    {"the link that bounds is the one to make faster", the_link_that_bounds_is_the_one_to_make_faster},
    {"a faster link is faster in both stages", a_faster_link_is_faster_in_both_stages},
    {"what does not depend on fractions stands first in a row", what_does_not_depend_on_fractions_stands_first_in_a_row},
    CU_TEST_INFO_NULL,
};
