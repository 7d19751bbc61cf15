/* test_emulation.c: the emulation of a GPU (cuda_cpu.h) finds the faults of planted.cu, each in a process of its own.
 * Without that, green suites on the emulation would say little about kernels that no GPU has run. */
#include "tests.h"

static const struct {
    const char *fault;
    bool tsan; /* for ThreadSanitizer to find */
    const char *says;
} faults[] = {
    {"race", true, "data race"},
    {"fence", true, "data race"},
    {"unwritten", false, "sum -nan"},
    {"turns", false, "cannot join thread"},
    {"threads", false, "bias_kernel: more threads than its row"},
    {"row", false, "has_no_row: no row of results/kernels.md"},
};

const char *test_missing(const char *name) {
    (void)name;
    return getenv("PLANTED") ? NULL : "the emulation of a GPU needs the CUDA toolkit's headers";
}

/* What the program says of a fault, or of none of them. */
static char *said(const char *fault, bool tsan) {
    static char text[1 << 16];
    char command[1000];
    snprintf(command, sizeof command, "%s %s 2>&1", getenv(tsan ? "PLANTED_TSAN" : "PLANTED"), fault);
    FILE *f = popen(command, "r");
    CHECK(f);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    pclose(f);
    return text;
}

TEST(each_planted_fault_is_found) {
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        const bool found = strstr(said(faults[i].fault, faults[i].tsan), faults[i].says) != NULL;
        if (!found) fprintf(stderr, "\n    not found: %s\n", faults[i].fault);
        CU_ASSERT(found);
    }
}

TEST(nothing_is_found_where_there_is_no_fault) {
    CU_ASSERT_STRING_EQUAL(said("none", false), "sum 0\n");
    CU_ASSERT_STRING_EQUAL(said("none", true), "sum 0\n");
}
