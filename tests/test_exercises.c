/* test_exercises.c: a starter or a wrong solution of each exercise, always the same ones. `make exercises` takes all, and
 * the suite `grade` the originals. */
#include "tests.h"

const char *test_missing(const char *name) {
    (void)name;
    return system("python3 -c '' && git ls-files --error-unmatch scripts/exercise.py >/dev/null")
               ? "exercises, since python3 or git is missing"
               : NULL;
}

static void starters_have_no_points_and_mistakes_lose_theirs(void) {
    CU_ASSERT_EQUAL(system("python3 -B scripts/exercise.py sample $SAMPLE"), 0);
}

CU_TestInfo tests[] = {
    {"starters have no points and mistakes lose theirs", starters_have_no_points_and_mistakes_lose_theirs},
    CU_TEST_INFO_NULL,
};
