/* test_kill.c: jobs that are killed at random moments; by hand scripts/kill_test.sh takes 200 of them. In `make test` there
 * are fewer, and others with each commit. */
#include "tests.h"

TEST(a_job_that_is_killed_and_goes_on_writes_the_same_file) {
    CU_ASSERT_EQUAL(system(test_every > 1 ? "scripts/kill_test.sh 5 $TEST_TURN" : "scripts/kill_test.sh 10"), 0);
}
