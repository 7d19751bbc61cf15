/* test_emulation.c: the emulation of a GPU (cuda_cpu.h) finds the faults of planted.cu, each in a process of its own.
 * Without that, green suites on the emulation would say little about kernels that no GPU has run. */
#include "tests.h"

const char *test_missing(const char *name) {
    (void)name;
    return getenv("PLANTED") ? NULL : "the emulation of a GPU needs the CUDA toolkit's headers";
}

TEST(each_planted_fault_is_found_and_none_where_there_is_none) {
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
        {"behind", false, "something was written behind the memory"},
        {"row", false, "has_no_row: no row of results/kernels.md"},
        {"none", false, "sum 0\n"},
        {"none", true, "sum 0\n"},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        static char text[1 << 16];
        char command[1000];
        snprintf(command, sizeof command, "%s %s 2>&1", getenv(faults[i].tsan ? "PLANTED_TSAN" : "PLANTED"),
                 faults[i].fault);
        FILE *f = popen(command, "r");
        CHECK(f);
        text[fread(text, 1, sizeof text - 1, f)] = 0;
        pclose(f);
        const bool none = !strcmp(faults[i].fault, "none"); /* then nothing else is said */
        const bool right = none ? !strcmp(text, faults[i].says) : strstr(text, faults[i].says) != NULL;
        if (!right) fprintf(stderr, "\n    of %s: %s\n", faults[i].fault, text);
        CU_ASSERT(right);
    }
}
