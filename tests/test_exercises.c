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
    const char *end = "0 of 10 points; next: step 1, ";
    char line[1000];
    int count = 0, none = 0;
    FILE *out = popen(
        "python3 -B -c 'import sys; sys.path.insert(0, \"scripts\"); import exercise\n"
        "for n in exercise.read_table(exercise.TABLE): print(\"good:\", exercise.grade(n, \"/bin/true\"))'",
        "r");
    CHECK(out);
    while (fgets(line, sizeof line, out)) {
        none += !strncmp(line, end, strlen(end));
        count += !strncmp(line, "good: False", 11);
        CU_ASSERT(strncmp(line, "good: True", 10) != 0);
    }
    CU_ASSERT(!pclose(out) && count >= 19);
    CU_ASSERT_EQUAL(none, count);
}

/* The points of exercise 1 are 3, 3 and 4. Scripts are in place of the suite `grade`: one reads the secret of a step first,
 * and is called with "--only" and a name. */
TEST(the_points_are_those_of_the_steps_that_passed) {
    static const struct {
        const char *script, *line;
        bool good;
    } cases[] = {
        {"#!/bin/sh\nread secret\necho $secret passed\n", "10 of 10 points\n", true},
        {"#!/bin/sh\nread secret\ncase $2 in no*) ;; *) echo $secret passed ;; esac\n",
         "7 of 10 points; next: step 2, no token sees the ones behind it\n", false},
        {"#!/bin/sh\nread secret\necho $secret passed\nexit 1\n",
         "0 of 10 points; next: step 1, a token alone attends to itself\n", false},
        {"#!/bin/sh\nread secret\necho passed\n", "0 of 10 points; next: step 1, a token alone attends to itself\n", false},
    };
    const char *dir = temp_dir();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char line[200] = "", command[800];
        write_file(dir, "grader.sh", cases[c].script, strlen(cases[c].script));
        CHECK(!chmod(in_dir(dir, "grader.sh"), 0755));
        snprintf(command, sizeof command, "python3 -B scripts/exercise.py grade 1 %s/grader.sh", dir);
        FILE *out = popen(command, "r");
        CHECK(out);
        while (fgets(line, sizeof line, out)) continue;
        CU_ASSERT_EQUAL(!pclose(out), cases[c].good);
        CU_ASSERT_STRING_EQUAL(line, cases[c].line);
    }
}

/* Of two trees one is worked in, and the other has links to its files. */
TEST(what_a_student_hands_in_does_not_come_from_elsewhere) {
    char command[800];
    const char *dir = temp_dir();
    snprintf(command, sizeof command,
             "mkdir %s/own %s/links && cp opt_model.c %s/own && ln -s ../own/opt_model.c %s/links && "
             "python3 -B -c 'import sys; sys.path.insert(0, \"scripts\"); import grade_all, exercise\n"
             "task = exercise.read_table(exercise.TABLE)[1], exercise.tracked()\n"
             "own, links = (grade_all.submitted(\"%s/\" + of, task[1], task[0]) for of in (\"own\", \"links\"))\n"
             "sys.exit(list(own[0]) != [\"plain_attention\"] or own[1] is not None or links != ({}, None))'",
             dir, dir, dir, dir, dir);
    CU_ASSERT_EQUAL(system(command), 0);
}
