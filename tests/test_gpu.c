/* test_gpu.c: how the program finds a GPU: a copy of it with different files beside it, with and without a driver. */
#include <unistd.h>

#include "tests.h"

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

/* Runs the copy in dir on a GPU, with the stub of a driver or without one, and looks for a word in what it says. */
static void says(const char *dir, bool driver, int status, const char *word) {
    char command[4096], said[4096];
    snprintf(command, sizeof command,
             "CUDA_VISIBLE_DEVICES= LD_LIBRARY_PATH=%s '%s/flexgen' generate --device cuda --model models/opt-tiny "
             "--prompt x --max-tokens 1 --gpu-batch-size 1 --num-gpu-batches 1 --percent 100 0 100 0 100 0 2>&1",
             driver ? setting("FLEXGEN_DRIVER", "build/driver") : "", dir);
    FILE *f = popen(command, "r");
    CHECK(f);
    said[fread(said, 1, sizeof said - 1, f)] = 0;
    const int exited = pclose(f);
    CU_ASSERT(WIFEXITED(exited) && WEXITSTATUS(exited) == status);
    if (strstr(said, word)) return;
    fprintf(stderr, "\n    no \"%s\" in: %s\n", word, said);
    CU_FAIL("message");
}

/* A directory with a copy of the program, and beside it the library, if any. */
static const char *copy_program(const char *library) {
    const char *dir = temp_dir();
    char command[4096];
    snprintf(command, sizeof command, "cp '%s' '%s/flexgen'", setting("FLEXGEN_BIN", "./flexgen"), dir);
    CHECK(system(command) == 0);
    snprintf(command, sizeof command, "cp '%s' '%s/flexgen_cuda.so'", library ? library : "", dir);
    CHECK(!library || system(command) == 0);
    return dir;
}

static void a_program_without_the_library_was_built_without_cuda(void) {
    says(copy_program(NULL), true, 2, "flexgen_cuda.so; build it where nvcc is installed");
}

static void nothing_is_loaded_without_a_driver(void) { /* or where the real one has no GPU */
    says(copy_program("README.md"), false, 2, "nvidia-smi");
}

static void a_library_that_cannot_be_loaded_is_one_line(void) {
    says(copy_program("README.md"), true, 1, "invalid ELF header; install the CUDA toolkit");
}

static void the_library_beside_the_program_runs_the_model(void) {
    const char *emulated = setting("FLEXGEN_EMULATED", "");
    char library[4096];
    if (!emulated[0]) return;
    snprintf(library, sizeof library, "%s_cuda.so", emulated);
    says(copy_program(library), true, 0, "emulated GPU");
}

CU_TestInfo tests[] = {
    {"a program without the library was built without CUDA", a_program_without_the_library_was_built_without_cuda},
    {"nothing is loaded without a driver", nothing_is_loaded_without_a_driver},
    {"a library that cannot be loaded is one line", a_library_that_cannot_be_loaded_is_one_line},
    {"the library beside the program runs the model", the_library_beside_the_program_runs_the_model},
    CU_TEST_INFO_NULL,
};
