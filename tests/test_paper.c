/* test_paper.c: results/paper says what the program does. `make paper` wrote README.md there and, for every run, a line of
 * runs.json: its flags, its figures to six digits, and the lines of README.md that show it. Those that are quick to
 * simulate run again here. If one fails because the engine has become another, `make paper` writes the folder anew. */
#include <cjson/cJSON.h>
#include <math.h>
#include <sys/wait.h>

#include "tests.h"

#define FOLDER "results/paper/"
enum { MAX_BYTES = 1 << 24, FEWEST = 40 /* runs; fewer means that the choice below no longer finds them */ };

static const char *text_of(const cJSON *object, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(object, name));
    CU_ASSERT_PTR_NOT_NULL_FATAL(text);
    return text;
}

static double figure(const cJSON *run, const char *name) {
    const cJSON *number = cJSON_GetObjectItem(cJSON_GetObjectItem(run, "figures"), name);
    return cJSON_IsNumber(number) ? number->valuedouble : NAN;
}

/* One of those that Table 4 shows. */
static bool is_broken_down(const cJSON *run) { return !isnan(figure(run, "breakdown.decode.total_s")); }

/* On a hardware file as it is, of one machine, and of OPT-6.7B, or of OPT-30B with few batches and nothing to search for;
 * or in Table 4. */
static bool is_quick(const cJSON *run) {
    const char *flags = text_of(run, "flags");
    bool small = strstr(flags, "opt-6.7b") ||
                 (strstr(flags, "opt-30b") && strstr(flags, "--gpu-batch-size") && !strstr(flags, "--compress-cache"));
    return is_broken_down(run) || (!strcmp(text_of(run, "command"), "bench") && strstr(flags, "--device sim") && small &&
                                   !strstr(flags, "--nodes") && !cJSON_GetArraySize(cJSON_GetObjectItem(run, "changed")));
}

/* Runs it; its JSON, or NULL with what it said. */
static cJSON *repeat(const char *flags, char **said) {
    const char *bin = getenv("FLEXGEN_BIN"), *dir = temp_dir();
    char command[2000], json[600], err[600];
    snprintf(json, sizeof json, "%s/json", dir), snprintf(err, sizeof err, "%s/err", dir);
    snprintf(command, sizeof command, "%s bench %s --json %s >/dev/null 2>%s", bin ? bin : "./flexgen", flags, json, err);
    int status = system(command);
    *said = contents(err, NULL);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) return NULL;
    char *text = contents(json, NULL);
    cJSON *found = cJSON_Parse(text);
    free(text);
    return found;
}

/* Numbers as paper.py writes them: %.6g in runs.json, %.3g in README.md. */
static bool same(const cJSON *stated, const cJSON *found) {
    char a[32], b[32];
    if (!cJSON_IsNumber(stated)) return found && cJSON_Compare(stated, found, true);
    if (!cJSON_IsNumber(found)) return false;
    snprintf(a, sizeof a, "%.6g", stated->valuedouble), snprintf(b, sizeof b, "%.6g", found->valuedouble);
    return stated->valuedouble == found->valuedouble || !strcmp(a, b);
}

/* "planned_GPU" is in `tiers`; "breakdown.decode.total_s" in objects inside each other. */
static const cJSON *figure_of(const cJSON *found, const char *name) {
    const char *dot = strchr(name, '.');
    char outer[40];
    if (dot) {
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - name), name);
        return figure_of(cJSON_GetObjectItem(found, outer), dot + 1);
    }
    if (strncmp(name, "planned_", 8)) return cJSON_GetObjectItem(found, name);
    const cJSON *tier = cJSON_GetObjectItem(cJSON_GetObjectItem(found, "tiers"), name + 8);
    return cJSON_GetObjectItem(tier, "planned_bytes");
}

static void compare(const cJSON *run, const cJSON *found) {
    const cJSON *stated;
    cJSON_ArrayForEach(stated, cJSON_GetObjectItem(run, "figures")) {
        bool equal = same(stated, figure_of(found, stated->string));
        if (!equal) fprintf(stderr, "\n    %s of: bench %s\n", stated->string, text_of(run, "flags"));
        CU_ASSERT(equal);
    }
}

/* README.md has the lines, and they have the text as a cell or, for a policy that needs a larger GPU, behind it. */
static void compare_lines(const cJSON *run, const char *readme, const char *text) {
    char cell[100], behind[100];
    const cJSON *line;
    snprintf(cell, sizeof cell, "| %s ", text), snprintf(behind, sizeof behind, "(with them %s)", text);
    cJSON_ArrayForEach(line, cJSON_GetObjectItem(run, "shown")) {
        bool there = strstr(readme, line->valuestring),
             right = strstr(line->valuestring, cell) || strstr(line->valuestring, behind);
        if (!there || !right) fprintf(stderr, "\n    README.md, %s: %s\n", text, line->valuestring);
        CU_ASSERT(there && right);
    }
}

/* Refused for the size of a tier, which must be what the program says. */
static void check_refusal(const char *refused, const char *said, char text[64]) {
    double mib = 0;
    const char *needs = strstr(said, "needs ");
    CU_ASSERT(needs && sscanf(needs, "needs %lf MiB", &mib) == 1);
    snprintf(text, 64, "needs %.3g GiB", mib / 1024);
    CU_ASSERT(!strncmp(refused, text, strlen(text)));
}

static void check_run(const cJSON *run, const char *readme) {
    char *said, text[64];
    const cJSON *refused = cJSON_GetObjectItem(run, "refused"), *figures = cJSON_GetObjectItem(run, "figures");
    cJSON *found = repeat(text_of(run, "flags"), &said);
    if (!found && !refused) fprintf(stderr, "\n    %s: %s\n", text_of(run, "flags"), said);
    CU_ASSERT_EQUAL_FATAL(!found, refused != NULL);
    if (refused)
        check_refusal(refused->valuestring, said, text);
    else {
        compare(run, found);
        snprintf(text, sizeof text, "%.3g", cJSON_GetObjectItem(figures, "throughput")->valuedouble);
    }
    compare_lines(run, readme, text);
    cJSON_Delete(found);
    free(said);
}

static void what_results_paper_says_is_what_the_program_does(void) {
    char *json = contents(FOLDER "runs.json", NULL), *readme = contents(FOLDER "README.md", NULL);
    cJSON *runs = cJSON_Parse(json), *run;
    int count = 0;
    CU_ASSERT_FATAL(cJSON_IsArray(runs));
    cJSON_ArrayForEach(run, runs) if (is_quick(run)) count++, check_run(run, readme);
    CU_ASSERT(count >= FEWEST);
    cJSON_Delete(runs);
    free(json), free(readme);
}

static const char *const parts[] = {"compute", "weight (R)", "cache (R)", "cache (W)", "activation"};
enum { NPARTS_SHOWN = 4 }; /* of these in a row of Table 4 */

static double part_of(const cJSON *run, const char *stage, const char *part) {
    char name[60];
    snprintf(name, sizeof name, "breakdown.%s.%s%s", stage, part, strcmp(part, "total_s") ? ".busy_s" : "");
    return figure(run, name);
}

/* With overlap off one part follows the other, so that they add up to the stage; both stages are the whole run, whose
 * seconds are known by themselves. Sweeps end a little before the last stores of prefill, which belong to it. */
static void check_sums(const cJSON *run) {
    static const char *const stages[] = {"prefill", "decode"}, *const seconds[] = {"prefill_s", "decode_s"};
    double all = 0;
    for (int s = 0; s < 2; s++) {
        const double total = part_of(run, stages[s], "total_s");
        double sum = 0;
        for (int p = 0; p <= NPARTS_SHOWN; p++) sum += part_of(run, stages[s], parts[p]);
        CU_ASSERT_DOUBLE_EQUAL(sum, total, 1e-3 * total);
        CU_ASSERT_DOUBLE_EQUAL(total, figure(run, seconds[s]), .01 * total);
        all += total;
    }
    CU_ASSERT_DOUBLE_EQUAL(all, figure(run, "T"), 1e-3 * all);
}

/* README.md has its rows. */
static void check_rows(const cJSON *run, const char *readme) {
    static const char *const stages[] = {"prefill", "decode"};
    for (int s = 0; s < 2; s++) {
        char row[200];
        int len =
            snprintf(row, sizeof row, "| %s | sim, %s | %.0f", stages[s],
                     strstr(text_of(run, "flags"), "fitted") ? "fitted" : "nominal", part_of(run, stages[s], "total_s"));
        for (int p = 0; p < NPARTS_SHOWN; p++)
            len += snprintf(row + len, sizeof row - len, " | %.0f", part_of(run, stages[s], parts[p]));
        if (!strstr(readme, row)) fprintf(stderr, "\n    README.md lacks: %s\n", row);
        CU_ASSERT(strstr(readme, row) != NULL);
    }
}

static void table_4_is_of_whole_runs(void) {
    char *json = contents(FOLDER "runs.json", NULL), *readme = contents(FOLDER "README.md", NULL);
    cJSON *runs = cJSON_Parse(json), *run;
    int count = 0;
    cJSON_ArrayForEach(run, runs) if (is_broken_down(run)) count++, check_sums(run), check_rows(run, readme);
    CU_ASSERT_EQUAL(count, 2);
    cJSON_Delete(runs);
    free(json), free(readme);
}

/* The scripts make these sections anew, from the figures of runs.json, and README.md has each line. The other sections need
 * figures that runs.json does not have, from runs that take longer, or from real ones. */
static void the_tables_of_results_paper_are_what_its_scripts_make_of_the_runs(void) {
    const char *bin = getenv("FLEXGEN_BIN");
    if (!has_python()) return;
    setenv("FLEXGEN", bin ? bin : "./flexgen", 1);
    CU_ASSERT_EQUAL(system("python3 -B scripts/paper.py --check table1 table2 losses table3_rows table4 table5 figure5 "
                           "appendix_policies dollars"),
                    0);
}

CU_TestInfo tests[] = {
    {"what results/paper says is what the program does", what_results_paper_says_is_what_the_program_does},
    {"table 4 is of whole runs", table_4_is_of_whole_runs},
    {"the tables of results/paper are what its scripts make of the runs",
     the_tables_of_results_paper_are_what_its_scripts_make_of_the_runs},
    CU_TEST_INFO_NULL,
};
