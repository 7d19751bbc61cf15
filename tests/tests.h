/* tests.h: what every suite shares. A suite is a file test_<name>.c that defines
 *     CU_TestInfo tests_<name>[] = {{"a sentence that is true", function}, ..., CU_TEST_INFO_NULL};
 * and is found by the Makefile by its file name. Tests run in the repository root. */
#ifndef TESTS_H
#define TESTS_H
#include <CUnit/CUnit.h>
#include <math.h>

#include "../flexgen.h"

/* max|a-b| / max|b|, the error of DESIGN's number rules; NaN anywhere gives NaN, and `!(e <= tol)` then fails. */
double max_norm_error(const float *a, const float *b, size_t n);
/* A fresh directory under TMPDIR, removed with everything in it after the suites. */
const char *temp_dir(void);
/* Writes bytes to dir/name. */
void write_file(const char *dir, const char *name, const void *bytes, size_t len);
/* A small reproducible generator for test data: uniform in [-1, 1). */
float test_random(uint64_t *state);

#define ASSERT_OK(call)                              \
    do {                                             \
        if ((call) != 0) {                           \
            fprintf(stderr, "\n    %s\n", err.text); \
            CU_FAIL_FATAL(#call);                    \
        } else                                       \
            CU_PASS(#call);                          \
    } while (0)
#endif
