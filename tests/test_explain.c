/* test_explain.c: that the linear program which is printed is the one that is solved, and that its prices are right: what a
 * little more memory brings is measured by solving again, which would tell if a dual price were wrong. How rows and prices
 * read is in docs/TOUR.md, which test_tour.c holds. */
#include <cjson/cJSON.h>

#include "tests.h"

static Error err;

/* OPT-30B in a block of 16 x 14. */
static const Block block = {512, 32, 16, 14};

/* The paper's machine, with so much memory on the CPU. */
static Hardware machine(double cpu_gb) {
    Hardware h;
    ASSERT_OK(hardware_read(&h, "hardware/t4.json", &err));
    h.cmem = cpu_gb * 1e9;
    return h;
}

/* A report of the linear program, as text and as an object. */
typedef struct {
    char *text;
    cJSON *json;
} Said;

/* By Appendix A.3, or by this engine's cost model. */
static Said explain(const Hardware *hardware, bool paper) {
    const OptConfig config = opt_named("opt-30b");
    Checkpoint *checkpoint = checkpoint_dummy(&config, 0);
    Task task = equal_task(block.gbs * block.num_gpu_batches, block.s, block.n);
    Said said = {.json = cJSON_CreateObject()};
    size_t len;
    const TaskRun run = {.json = said.json, .text = open_memstream(&said.text, &len)};
    Search search = open_question(hardware, checkpoint, &task);
    search.given = on_tiers(0, 0, 0, 0, 0, 0, block.gbs, block.num_gpu_batches);
    search.given.delegated = true;
    ASSERT_OK(report_explained(&run, &search, paper ? NULL : &search.given, &block, &err));
    fclose(run.text), free_task(&task), checkpoint_close(checkpoint);
    return said;
}

static void said_free(Said *said) { free(said->text), cJSON_Delete(said->json); }

static double figure(const Said *said, const char *outer, const char *inner, const char *name) {
    const cJSON *at = cJSON_GetObjectItem(said->json, outer);
    return cJSON_GetNumberValue(cJSON_GetObjectItem(inner ? cJSON_GetObjectItem(at, inner) : at, name));
}

/* Returns by how much a figure of the solution rises from one to the other. */
static double rise(const Said *before, const Said *after, const char *name) {
    return figure(after, "lp", NULL, name) - figure(before, "lp", NULL, name);
}

/* The price by the text (4 digits, so that it is right to 1e-3) and by the object against the difference of two optima. */
static void check_price(double cpu_gb, bool paper, Tier tier) {
    const char *const name[] = {"GPU memory", "CPU memory"}, *line;
    const double little = 1e6; /* bytes; so few that the same rows bind */
    char gb[8];
    double size = NAN, printed = NAN;
    Hardware h = machine(cpu_gb);
    Said before = explain(&h, paper);
    const double given = h.mem[tier] / 1e9;
    h.mem[tier] += little;
    Said after = explain(&h, paper);
    const double price = figure(&before, "more", name[tier], "price");
    const double measured = -rise(&before, &after, "objective") / little * 1e9;
    line = strstr(before.text, "with one more GB");
    line = line ? strstr(line, name[tier]) : NULL;
    CU_ASSERT(line && sscanf(line + strlen(name[tier]), "%lf %7s %lf", &size, gb, &printed) == 3);
    CU_ASSERT(measured > 1e-3); /* or nothing is tested */
    CU_ASSERT(fabs(price - measured) <= 1e-6 * measured);
    CU_ASSERT(fabs(-printed - measured) <= 1e-3 * measured);
    CU_ASSERT(fabs(size - given) <= 1e-4 * size);
    said_free(&before), said_free(&after);
}

TEST(a_tier_with_a_little_more_memory_brings_what_its_price_says) {
    enum { ENOUGH = 219, SHORT = 150 }; /* GB of CPU memory; with the less a part of the cache must go to disk */
    for (int paper = 0; paper < 2; paper++)
        check_price(ENOUGH, paper, TIER_GPU), check_price(SHORT, paper, TIER_GPU), check_price(SHORT, paper, TIER_CPU);
}

/* No price without a limit: a row that has room to spare is worth nothing. What the paper's rows of seconds may take is
 * T_pre or T_gen, of which A.3 makes T. */
TEST(every_row_binds_or_has_no_price) {
    const Hardware h = machine(219);
    for (int paper = 0; paper < 2; paper++) {
        Said said = explain(&h, paper);
        const cJSON *row, *rows = cJSON_GetObjectItem(cJSON_GetObjectItem(said.json, "lp"), "rows");
        int n = 0, binding = 0;
        double of_stage[2] = {NAN, NAN}; /* seconds of a layer: in generation, in prefill */
        cJSON_ArrayForEach(row, rows) {
            const double left = cJSON_GetObjectItem(row, "left")->valuedouble,
                         right = cJSON_GetObjectItem(row, "right")->valuedouble;
            const bool binds = cJSON_IsTrue(cJSON_GetObjectItem(row, "binds"));
            CU_ASSERT(left <= right + 1e-9 * fabs(right)); /* of rounded sums */
            CU_ASSERT(binds || cJSON_GetObjectItem(row, "price")->valuedouble == 0);
            CU_ASSERT(!binds || fabs(left - right) <= 1e-9 * fabs(right));
            for (int stage = 0; stage < 2; stage++)
                if (!strcmp(cJSON_GetObjectItem(row, "row")->valuestring, stage ? "ctog^p" : "ctog^g"))
                    of_stage[stage] = right;
            n++, binding += binds;
        }
        CU_ASSERT(n >= NROWS && binding > 3 && (!paper || n == NROWS));
        const double T = opt_named("opt-30b").l * (of_stage[1] + (block.n - 1) * of_stage[0]);
        CU_ASSERT(!paper ||
                  fabs(T / (block.gbs * block.num_gpu_batches) / figure(&said, "lp", NULL, "seconds") - 1) < 1e-9);
        said_free(&said);
    }
}

/* What one more GB/s of a link brings, by the report, is what the same question on that machine says. */
TEST(a_faster_link_is_faster_in_both_stages) {
    double most = 0;
    for (int paper = 0; paper < 2; paper++)
        for (int link = CTOG; link <= CTOD; link++) {
            Hardware h = machine(100); /* so little that all links are busy */
            Said before = explain(&h, paper);
            h.bdw[link][0] += 1e9, h.bdw[link][1] += 1e9;
            Said after = explain(&h, paper);
            const double seconds = -rise(&before, &after, "objective"), rises = rise(&before, &after, "throughput");
            CU_ASSERT(fabs(figure(&before, "more", channel_name[link], "seconds") - seconds) <= 1e-9 * fabs(seconds));
            CU_ASSERT(fabs(figure(&before, "more", channel_name[link], "throughput") - rises) <= 1e-6 * fabs(rises) + 1e-9);
            most = fmax(most, seconds);
            said_free(&before), said_free(&after);
        }
    CU_ASSERT(most > 1); /* or nothing is tested */
}
