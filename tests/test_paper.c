/* test_paper.c: results/paper says what the program does. `make paper` wrote README.md there and, for every run, a line of
 * runs.json: its flags, its figures to six digits, and the lines of README.md that show it. Those that are quick to
 * simulate run again here. If one fails because the engine has become another, `make paper` writes the folder anew. */
#include "tests/started.h"

enum { FEWEST = 40 /* runs or lines; fewer means that the tests below no longer find them */ };

static const cJSON *runs(void) {
    static cJSON *all;
    if (!all) all = keep(cJSON_Parse(keep(contents("results/paper/runs.json", NULL))));
    CU_ASSERT_FATAL(cJSON_IsArray(all));
    return all;
}

static const char *text_of(const cJSON *run, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(run, name));
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    return text;
}

static double figure(const cJSON *run, const char *name) {
    return cJSON_GetNumberValue(cJSON_GetObjectItem(cJSON_GetObjectItem(run, "figures"), name));
}

/* One of those that Table 4 shows. */
static bool is_broken_down(const cJSON *run) { return !isnan(figure(run, "breakdown.decode.total_s")); }

/* The runs on a hardware file as it is, of one machine, and of OPT-6.7B, or of OPT-30B with few batches and nothing to
 * search for; and those in Table 4. Numbers have six digits in runs.json. "breakdown.decode.total_s" is in objects inside
 * each other, and "planned_GPU" in `tiers`. A run that is refused is so for the size of a tier. */
TEST(what_results_paper_says_is_what_the_program_does) {
    const cJSON *run, *stated;
    int quick = 0;
    cJSON_ArrayForEach(run, runs()) {
        const char *flags = text_of(run, "flags"), *refused = cJSON_GetStringValue(cJSON_GetObjectItem(run, "refused"));
        const bool small = strstr(flags, "opt-6.7b") || (strstr(flags, "opt-30b") && strstr(flags, "--gpu-batch-size") &&
                                                         !strstr(flags, "--compress-cache"));
        if (!is_broken_down(run) && (strcmp(text_of(run, "command"), "bench") || !strstr(flags, "--device sim") || !small ||
                                     strstr(flags, "--nodes") || cJSON_GetArraySize(cJSON_GetObjectItem(run, "changed"))))
            continue;
        if (!test_takes(quick++)) continue;
        const Result r = flexgen("bench %s --json @json", flags);
        if (r.status && !refused) fprintf(stderr, "\n    %s: %s\n", flags, r.err);
        CU_ASSERT_EQUAL(r.status != 0, refused != NULL);
        if (refused) {
            const char *needs = strstr(r.err, "needs ");
            char text[64];
            double mib = 0;
            CU_ASSERT(needs && sscanf(needs, "needs %lf MiB", &mib) == 1);
            snprintf(text, sizeof text, "needs %.3g GiB", mib / 1024);
            CU_ASSERT(!strncmp(refused, text, strlen(text)));
            continue;
        }
        if (r.status) continue;
        cJSON *object = cJSON_Parse(keep(contents(in_dir(capture, "json"), NULL)));
        cJSON_ArrayForEach(stated, cJSON_GetObjectItem(run, "figures")) {
            const cJSON *found = object;
            const int planned = !strncmp(stated->string, "planned_", 8) ? 8 : 0;
            char path[80], *at = path, a[32], b[32];
            snprintf(path, sizeof path, planned ? "tiers.%s.planned_bytes" : "%s", stated->string + planned);
            for (char *name; (name = strsep(&at, "."));) found = cJSON_GetObjectItem(found, name);
            snprintf(a, sizeof a, "%.6g", cJSON_GetNumberValue(stated));
            snprintf(b, sizeof b, "%.6g", cJSON_GetNumberValue(found));
            const bool equal = cJSON_IsNumber(stated) ? !strcmp(a, b) : cJSON_Compare(stated, found, true);
            if (!equal) fprintf(stderr, "\n    %s of: bench %s\n", stated->string, flags);
            CU_ASSERT(equal);
        }
        cJSON_Delete(object);
    }
    CU_ASSERT(quick >= FEWEST);
}

/* README.md has the lines, and they have the throughput, or what a run needs, as a cell or, for a policy that needs a
 * larger GPU, behind it. */
TEST(what_results_paper_shows_is_what_it_says) {
    const char *readme = keep(contents("results/paper/README.md", NULL));
    const cJSON *run, *line;
    int lines = 0;
    cJSON_ArrayForEach(run, runs()) {
        const char *refused = cJSON_GetStringValue(cJSON_GetObjectItem(run, "refused"));
        const char *end = refused ? strstr(refused, " GiB") : NULL;
        char text[64], cell[100], behind[100];
        snprintf(text, sizeof text, "%.3g", figure(run, "throughput"));
        if (end) snprintf(text, sizeof text, "%.*s GiB", (int)(end - refused), refused);
        snprintf(cell, sizeof cell, "| %s ", text);
        snprintf(behind, sizeof behind, "(with them %s)", text);
        cJSON_ArrayForEach(line, cJSON_GetObjectItem(run, "shown")) {
            const char *shown = line->valuestring;
            const bool right = strstr(readme, shown) && (strstr(shown, cell) || strstr(shown, behind));
            if (!right) fprintf(stderr, "\n    README.md, %s: %s\n", text, shown);
            CU_ASSERT(right);
            lines++;
        }
    }
    CU_ASSERT(lines >= FEWEST);
}

/* With overlap off one part follows the other, so that they add up to the stage; both stages are the whole run, whose
 * seconds are known by themselves. Figures of six digits are off by 5e-6 of themselves at most; so are their sum and what
 * it is compared with. Sweeps end a little before the last stores of prefill, which belong to it. */
TEST(without_overlap_the_parts_of_a_run_add_up) {
    static const char *const parts[] = {"compute", "weight (R)", "cache (R)", "cache (W)", "activation"},
                             *const stages[] = {"prefill", "decode"};
    const cJSON *run;
    int broken_down = 0;
    cJSON_ArrayForEach(run, runs()) {
        double all = 0;
        if (!is_broken_down(run)) continue;
        broken_down++;
        for (int s = 0; s < 2; s++) {
            char name[60];
            double sum = 0;
            snprintf(name, sizeof name, "breakdown.%s.total_s", stages[s]);
            const double total = figure(run, name);
            for (int p = 0; p < 5; p++) {
                snprintf(name, sizeof name, "breakdown.%s.%s.busy_s", stages[s], parts[p]);
                sum += figure(run, name);
            }
            snprintf(name, sizeof name, "%s_s", stages[s]);
            CU_ASSERT_DOUBLE_EQUAL(sum, total, 1e-5 * total);
            CU_ASSERT_DOUBLE_EQUAL(total, figure(run, name), .01 * total);
            all += total;
        }
        CU_ASSERT_DOUBLE_EQUAL(all, figure(run, "T"), 1e-5 * all);
    }
    CU_ASSERT_EQUAL(broken_down, 2);
}

/* The scripts make these sections anew, from the figures of runs.json, and README.md has each line. The other sections need
 * figures that runs.json does not have, from runs that take longer, or from real ones. */
TEST(the_tables_of_results_paper_are_what_its_scripts_make_of_the_runs) {
    if (!has_python()) return;
    setenv("FLEXGEN", getenv("FLEXGEN_BIN"), 1);
    CU_ASSERT_EQUAL(system("python3 -B scripts/paper.py --check table1 table2 losses table3_rows table4 table5 figure5 "
                           "appendix_policies dollars"),
                    0);
}
