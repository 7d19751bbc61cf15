/* test_exercises.c: a starter or a wrong solution of each exercise, always the same ones. `make exercises` takes all, and
 * the suite `grade` the originals. */
#include <sys/stat.h>

#include "tests.h"

const char *test_missing(const char *name) {
    (void)name;
    return system("python3 -c '' && git ls-files --error-unmatch scripts/exercise.py >/dev/null")
               ? "exercises, since python3 or git is missing"
               : NULL;
}

TEST(starters_have_no_points_and_mistakes_lose_theirs) {
    CU_ASSERT_EQUAL(system("python3 -B scripts/exercise.py sample $SAMPLE"), 0);
}

/* Each exercise has ten points, of which a program gets none that ends well but does not know the secret. */
TEST(a_program_that_does_not_say_the_secret_has_no_points) {
    CU_ASSERT_EQUAL(
        system("python3 -B -c 'import contextlib, io, sys; sys.path.insert(0, \"scripts\"); import exercise\n"
               "exercises = exercise.read_table(exercise.TABLE)\n"
               "for n in exercises:\n"
               "    with contextlib.redirect_stdout(io.StringIO()) as out: good = exercise.grade(n, \"/bin/true\")\n"
               "    none = out.getvalue().splitlines()[-1].startswith(\"0 of 10 points; next: step 1, \")\n"
               "    if good or not none: sys.exit(\"exercise %d: %s\" % (n, out.getvalue()))\n"
               "sys.exit(len(exercises) < 20)'"),
        0);
}

/* The points of exercise 1 are 3, 3 and 4. Scripts are in place of the suite `grade`: one reads the secret of a step first,
 * and is called with "--only" and a name. The first gets all points, which is success. */
TEST(the_points_are_those_of_the_steps_that_passed) {
    static const char *const cases[][2] = {
        {"#!/bin/sh\nread secret\necho $secret passed\n", "10 of 10 points\n"},
        {"#!/bin/sh\nread secret\ncase $2 in no*) ;; *) echo $secret passed ;; esac\n",
         "7 of 10 points; next: step 2, no token sees the ones behind it\n"},
        {"#!/bin/sh\nread secret\necho $secret passed\nexit 1\n",
         "0 of 10 points; next: step 1, a token alone attends to itself\n"},
        {"#!/bin/sh\nread secret\necho passed\n", "0 of 10 points; next: step 1, a token alone attends to itself\n"},
    };
    const char *dir = temp_dir();
    setenv("DIR", dir, 1);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char line[200] = "";
        write_file(dir, "grader.sh", cases[c][0], strlen(cases[c][0]));
        CHECK(!chmod(in_dir(dir, "grader.sh"), 0755));
        FILE *out = popen("python3 -B scripts/exercise.py grade 1 $DIR/grader.sh", "r");
        CHECK(out);
        while (fgets(line, sizeof line, out)) continue;
        CU_ASSERT_EQUAL(pclose(out) == 0, c == 0);
        CU_ASSERT_STRING_EQUAL(line, cases[c][1]);
    }
}

/* Of two trees one is worked in, and the other has links to its files. */
TEST(what_a_student_hands_in_does_not_come_from_elsewhere) {
    setenv("DIR", temp_dir(), 1);
    CU_ASSERT_EQUAL(system("mkdir $DIR/own $DIR/links && cp opt_model.c $DIR/own && ln -s ../own/opt_model.c $DIR/links && "
                           "python3 -B -c 'import os, sys; sys.path.insert(0, \"scripts\"); import grade_all, exercise\n"
                           "table, files = exercise.read_table(exercise.TABLE), exercise.tracked()\n"
                           "trees = [os.environ[\"DIR\"] + name for name in (\"/own\", \"/links\")]\n"
                           "own, links = (grade_all.submitted(tree, files, table[1]) for tree in trees)\n"
                           "sys.exit(list(own[0]) != [\"plain_attention\"] or own[1] is not None or links != ({}, None))'"),
                    0);
}
