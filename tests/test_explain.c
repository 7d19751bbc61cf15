/* test_explain.c: that the linear program which is printed is the one that is solved, and that its prices are right: what a
 * little more memory brings is measured by solving again, which would tell if a dual price were wrong. How rows and prices
 * read is in docs/TOUR.md, which test_tour.c holds. */
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
    const cJSON *lp, *more; /* of the object: the solution, and what more of a tier or a link brings */
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
    said.lp = cJSON_GetObjectItem(said.json, "lp");
    said.more = cJSON_GetObjectItem(said.json, "more");
    fclose(run.text), free_task(&task), checkpoint_close(checkpoint);
    return said;
}

static void said_free(Said *said) { free(said->text), cJSON_Delete(said->json); }

static double figure(const cJSON *of, const char *name) { return cJSON_GetNumberValue(cJSON_GetObjectItem(of, name)); }

/* The price by the text (4 digits, so that it is right to 1e-3) and by the object against the difference of two optima. */
TEST(a_tier_with_a_little_more_memory_brings_what_its_price_says) {
    enum { ENOUGH = 219, SHORT = 150 }; /* GB of CPU memory; with the less a part of the cache must go to disk */
    static const struct {
        double cpu_gb;
        Tier tier;
        const char *name;
    } cases[] = {{ENOUGH, TIER_GPU, "GPU memory"}, {SHORT, TIER_GPU, "GPU memory"}, {SHORT, TIER_CPU, "CPU memory"}};
    const double little = 1e6; /* bytes; so few that the same rows bind */
    for (size_t way = 0; way < 2 * sizeof cases / sizeof *cases; way++) {
        const char *name = cases[way / 2].name;
        const bool paper = way % 2;
        char gb[8];
        double size = NAN, printed = NAN;
        Hardware h = machine(cases[way / 2].cpu_gb);
        double *mem = &h.mem[cases[way / 2].tier];
        const double given = *mem / 1e9;
        Said before = explain(&h, paper);
        *mem += little;
        Said after = explain(&h, paper);
        const double price = figure(cJSON_GetObjectItem(before.more, name), "price");
        const double measured = (figure(before.lp, "objective") - figure(after.lp, "objective")) / little * 1e9;
        const char *line = strstr(before.text, "with one more GB");
        line = line ? strstr(line, name) : NULL;
        CU_ASSERT(line && sscanf(line + strlen(name), "%lf %7s %lf", &size, gb, &printed) == 3);
        CU_ASSERT(measured > 1e-3); /* or nothing is tested */
        CU_ASSERT(fabs(price - measured) <= 1e-6 * measured);
        CU_ASSERT(fabs(-printed - measured) <= 1e-3 * measured);
        CU_ASSERT(fabs(size - given) <= 1e-4 * size);
        said_free(&before), said_free(&after);
    }
}

/* No price without a limit: a row that has room to spare is worth nothing. What the paper's rows of seconds may take is
 * T_pre or T_gen, of which A.3 makes T. */
TEST(every_row_binds_or_has_no_price) {
    const Hardware h = machine(219);
    for (int paper = 0; paper < 2; paper++) {
        Said said = explain(&h, paper);
        const cJSON *row, *rows = cJSON_GetObjectItem(said.lp, "rows");
        int n = 0, binding = 0;
        double of_stage[2] = {NAN, NAN}; /* seconds of a layer: in generation, in prefill */
        cJSON_ArrayForEach(row, rows) {
            const double left = figure(row, "left"), right = figure(row, "right");
            const bool binds = cJSON_IsTrue(cJSON_GetObjectItem(row, "binds"));
            CU_ASSERT(left <= right + 1e-9 * fabs(right)); /* of rounded sums */
            CU_ASSERT(binds || figure(row, "price") == 0);
            CU_ASSERT(!binds || fabs(left - right) <= 1e-9 * fabs(right));
            for (int stage = 0; stage < 2; stage++)
                if (!strcmp(cJSON_GetObjectItem(row, "row")->valuestring, stage ? "ctog^p" : "ctog^g"))
                    of_stage[stage] = right;
            n++, binding += binds;
        }
        CU_ASSERT(n >= NROWS && binding > 3 && (!paper || n == NROWS));
        const double T = opt_named("opt-30b").l * (of_stage[1] + (block.n - 1) * of_stage[0]);
        CU_ASSERT(!paper || fabs(T / (block.gbs * block.num_gpu_batches) / figure(said.lp, "seconds") - 1) < 1e-9);
        said_free(&said);
    }
}

/* What one more GB of a tier or GB/s of a link brings, by the report, is what the same question on that machine says. */
TEST(more_memory_or_a_faster_link_brings_what_the_report_says) {
    double most[] = {0, 0}; /* of a tier, of a link */
    for (int paper = 0; paper < 2; paper++)
        for (int what = TIER_GPU; what <= NTIERS + CTOD; what++) {
            const bool tier = what < NTIERS;
            Hardware h = machine(100); /* so little that all links are busy */
            Said before = explain(&h, paper);
            if (tier) h.mem[what] += 1e9;
            for (int stage = 0; stage < 2 && !tier; stage++) h.bdw[what - NTIERS][stage] += 1e9;
            Said after = explain(&h, paper);
            const cJSON *more = cJSON_GetObjectItem(before.more, tier ? memory_row[what] : channel_name[what - NTIERS]);
            const double seconds = figure(before.lp, "objective") - figure(after.lp, "objective"),
                         rises = figure(after.lp, "throughput") - figure(before.lp, "throughput");
            CU_ASSERT(fabs(figure(more, "seconds") - seconds) <= 1e-9 * fabs(seconds));
            CU_ASSERT(fabs(figure(more, "throughput") - rises) <= 1e-6 * fabs(rises) + 1e-9);
            most[!tier] = fmax(most[!tier], seconds);
            said_free(&before), said_free(&after);
        }
    CU_ASSERT(most[0] > 1 && most[1] > 1); /* or nothing is tested */
}
