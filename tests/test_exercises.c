/* test_exercises.c: a starter or a wrong solution of each exercise of $SAMPLE, always the same ones; and what
 * scripts/exam.py takes from a student's files. `make exercises` takes all, the six weeks and a hostile course, and the
 * suite `grade` the originals. */
#include <sys/stat.h>

#include "tests.h"

const char *test_missing(const char *name) {
    static int status = -1;
    (void)name;
    if (status < 0) status = system("git ls-files --error-unmatch scripts/exercise.py >/dev/null");
    return status || !has_python() ? "exercises, since python3 or git is missing" : NULL;
}

/* The scripts, the tracked files and the table. */
static const char scripts[] =
    "import exam, exercise, hostile\n"
    "original, table = exercise.tracked(), exercise.read_table(exercise.TABLE)\n";

TEST(starters_have_no_points_and_mistakes_lose_theirs) {
    CU_ASSERT_EQUAL(system("python3 -B scripts/exercise.py sample $SAMPLE"), 0);
}

TEST(each_exercise_has_ten_points_and_each_week_its_exercises) {
    CU_ASSERT_EQUAL(python(scripts,
                           "for n in table:\n"
                           "    same(sum(int(e['rest'].split()[0]) for e in exercise.of(table[n], 'step')), 10)\n"
                           "weeks = exercise.read_weeks(exercise.TABLE)\n"
                           "same(sorted(weeks), [1, 2, 3, 4, 5, 6])\n"
                           "text = open('docs/TEACHING.md').read()\n"
                           "for w in weeks:\n"
                           "    row = text[text.index('\\n| %d ' % w) + 1:].split('\\n')[0].split('|')[4]\n"
                           "    for n in weeks[w]: same((w, n, str(n) in row.replace(',', ' ').split()), (w, n, True))\n"
                           "same(len(table) >= 20, True)\n"),
                    0);
}

/* What a judge prints decides: a step that it does not name as passed has no points, however it ends. */
TEST(a_step_has_passed_if_the_judge_says_so) {
    CU_ASSERT_EQUAL(
        python(scripts,
               "judge = os.path.join(dir, 'judge')\n"
               "def says(text):\n"
               "    with open(judge, 'w') as f: f.write('#!/bin/sh\\ncat <<END\\n' + text + 'END\\n')\n"
               "    os.chmod(judge, 0o755)\n"
               "    return exam.run_steps(judge, ['one', 'two'], 1)\n"
               "none = (False, ['the judge ended before this step'], (0, 0))\n"
               "same(exam.run_steps('/bin/true', ['one', 'two'], 1), [none, none])\n"
               "same(says('passed\\none passed\\n'), [none, none])\n"
               "passed = (True, [], (0, 0))\n"
               "same(says('  Test: one ...passed\\n'), [passed, none])\n"
               "same(says('  Test: one ...\\n    Found: a\\n    Printed: 3 40\\nFAILED\\n  Test: two ...passed\\n'),\n"
               "     [(False, ['a'], (3, 40)), passed])\n"
               "same(says('  Test: one ...FAILED\\n    1. x.c:1  - bad\\n'), [(False, ['x.c:1  - bad'], (0, 0)), none])\n"),
        0);
}

/* Six kinds of honest submissions are taken as they are, and what is nowhere, or elsewhere, is not. */
TEST(what_a_student_hands_in_is_found_wherever_it_lies) {
    CU_ASSERT_EQUAL(
        python(scripts,
               "trees, home = {}, os.path.join(exercise.build_dir(), 'kit')\n"
               "def tree(n):\n"
               "    trees[n] = trees.get(n) or exercise.starter(original, table, [n])\n"
               "    return trees[n]\n"
               "objects = exercise.Objects(original, home)\n"
               "spec = {n: exercise.exam_of(original, table, n, objects)[0] for n in (1, 3, 5, 7, 9, 14)}\n"
               "def found(n, **files):\n"
               "    at = os.path.join(dir, os.urandom(8).hex())\n"
               "    exercise.write_tree(at, files['files'])\n"
               "    return exam.handed_in(at, spec[n])\n"
               "for name, (n, files) in hostile.honest(original, table, tree).items():\n"
               "    code, note = found(n, files=files)\n"
               "    same((name, sorted(code or {}), note), (name, sorted(spec[n]['files']), ''))\n"
               "ledger, L = original['branches/ledger.c'], 'branches/ledger.c'\n"
               "same(found(3, files={'a/ledger.c': ledger})[1], '')\n"
               "same(found(3, files={'x': ''}), (None, 'nothing found: there is no ' + L))\n"
               "same(found(3, files={L: tree(3)[L]})[1], 'nothing found: pages_fit in ' + L + ' is as it was given out')\n"
               "same(found(3, files={L: tree(1)[L]})[1], 'nothing found: pages_fit in ' + L + ' is as it was given out')\n"
               "same(found(3, files={L: 'int x;'})[1], 'nothing found: pages_fit is not in ' + L)\n"
               "same(found(3, files={L: ledger[:ledger.index('x < q->n')]})[1], 'nothing found: pages_fit in %s has no "
               "end; a brace is missing' % L)\n"
               "two = {'a/' + L: ledger, 'b/' + L: ledger.replace('x < q->n', 'x <= q->n')}\n"
               "same(found(3, files=two)[1], 'refused: %s is there more than once: a/%s, b/%s' % (L, L, L))\n"
               "same(found(3, files={'ex3/' + L: ledger, 'ex5/' + L: two['b/' + L]})[0][L].startswith(ledger), True)\n"
               "os.makedirs(dir + '/links/branches')\n"
               "os.symlink(os.path.abspath(L), dir + '/links/' + L)\n"
               "same(exam.handed_in(dir + '/links', spec[3])[0], None)\n"
               "os.makedirs(dir + '/folder/' + L)\n"
               "same(exam.handed_in(dir + '/folder', spec[3], True), (None, 'nothing found: there is no ' + L))\n"
               "given = found(5, files={'schedule.c': original['schedule.c']})[0]['schedule.c']\n"
               "same('attend_on_cpu' in exam.bodies_in(given, ['attend_on_cpu']) and 'given_attend_on_cpu(run)' in given, "
               "True)\n"),
        0);
}

/* A tree has the text of its variant and no other's, and notes in variants.csv who has it; where that file has not all
 * students, nobody is graded. */
TEST(a_student_has_the_variant_that_was_given_out) {
    CU_ASSERT_EQUAL(
        python(scripts,
               "import grade_all\n"
               "same(list(exercise.unsaid(original, table)), [])\n"
               "same([n for n in table if exercise.variants(table[n])], [4, 8, 9, 10])\n"
               "tree = exercise.starter(original, table, [4, 7], (), 1)\n"
               "text = tree['docs/EXERCISES.md'].decode()\n"
               "same(('furthest behind, or to the first' in text, 'or to the last of several' in text), (False, True))\n"
               "same(text.count('**Variant 1.**'), 1)\n"
               "same('Exercise 4, variant 1: write this' in tree['admission.c'], True)\n"
               "same('Exercise 7: write this' in tree['policy.c'], True)\n"
               "objects = exercise.Objects(original, os.path.join(exercise.build_dir(), 'kit'))\n"
               "kit = lambda n, v: exercise.exam_of(original, table, n, objects, v)[0]\n"
               "same([kit(4, 2)['variant'], kit(4, 0)['variant'], kit(7, 2)['variant']], [2, 0, 0])\n"
               "same('to within 200' in kit(4, 1)['steps'][1][2], True)\n"
               "os.makedirs(dir + '/in/anna')\n"
               "os.makedirs(dir + '/in/ben')\n"
               "same(grade_all.students_of(dir + '/in'), {'anna': 0, 'ben': 0})\n"
               "exercise.note_variant(dir + '/in/anna', 1)\n"
               "exercise.note_variant(dir + '/in/anna/', 2)\n"
               "try: said = grade_all.students_of(dir + '/in')\n"
               "except SystemExit as e: said = str(e)\n"
               "same(said, dir + '/in/variants.csv: has no variant of ben; add a line NAME,VARIANT for each')\n"
               "exercise.note_variant(dir + '/in/ben', 0)\n"
               "same(grade_all.students_of(dir + '/in'), {'anna': 2, 'ben': 0})\n"
               "exercise.note_variant(dir + '/in/ben', 4)\n"
               "try: said = grade_all.students_of(dir + '/in')\n"
               "except SystemExit as e: said = str(e)\n"
               "same(said, dir + '/in/variants.csv: variants are 0 to 3')\n"
               "files = {'admission.c': tree['admission.c']}\n"
               "same([grade_all.other_variant(files, kit(4, v)) for v in (1, 0, 2)], ['', *(\n"
               "    'its file was given out as variant 1, and it is graded as variant %d' % v for v in (0, 2))])\n"
               "same(grade_all.other_variant({'policy.c': tree['policy.c']}, kit(7, 1)), '')\n"),
        0);
}

/* Other names, comments, types, braces, and another order of functions hide no copy; of solutions that were found
 * independently, which the table has, no two are alike; and of what is short nothing is said. */
TEST(what_is_alike_beyond_renaming_is_found) {
    CU_ASSERT_EQUAL(
        python(scripts,
               "import alike, re, subprocess\n"
               "known = alike.Known(original, table)\n"
               "objects = exercise.Objects(original, os.path.join(exercise.build_dir(), 'kit'))\n"
               "spec = {n: exercise.exam_of(original, table, n, objects)[0] for n in (1, 3, 9, 10, 14, 17)}\n"
               "def compared(n, **texts):\n"
               "    path, = spec[n]['files']\n"
               "    found, few = alike.alike(known, spec[n], {name: {path: text} for name, text in texts.items()})\n"
               "    return [({a, b}, share > .9) for share, _, a, b in found], few\n"
               "def others(n):\n"
               "    tree = exercise.starter(original, table, [n])\n"
               "    right = exercise.solved({p: tree[p] for p in exercise.own_files(original, table[n])}, original, "
               "table[n])\n"
               "    return [exercise.other_solution(right, table[n], e).popitem()[1] for e in exercise.of(table[n], "
               "'other')]\n"
               "def disguised(text):\n"
               "    own = {name: text[b:e] for name, _, b, e in exam.functions(text)}\n"
               "    for name in sorted(own): text = text.replace(own[name], ';') + name + '() ' + own[name]\n"
               "    text = re.sub(r'\\b(score|max|sum|head|top|total|out|scale|step|code|copy|sweeps|i|t|u|d)\\b', "
               "r'my_\\1', text)\n"
               "    text = text.replace('float', 'double').replace('const ', '').replace('\\n', '  // mine\\n')\n"
               "    return text.replace('->', ' -> ').replace('(', '( /* what */ ')\n"
               "for n in (1, 9, 10, 14, 17):\n"
               "    found = dict(zip('abcd', others(n)))\n"
               "    same((n, compared(n, **found)), (n, ([], [])))\n"
               "    same((n, compared(n, z=disguised(found['a']), **found)), (n, ([({'a', 'z'}, True)], [])))\n"
               "path, = exercise.own_files(original, table[1])\n"
               "same(compared(1, z=disguised(original[path])), ([({alike.THEIRS, 'z'}, True)], []))\n"
               "ledger = original['branches/ledger.c']\n"
               "same(compared(3, a=ledger, b=ledger), ([], [alike.THEIRS, 'a', 'b']))\n"
               "exercise.write_tree(dir + '/in', {'anna/opt_model.c': original['opt_model.c'], 'ben/opt_model.c': "
               "disguised(original['opt_model.c']), 'cem/x': ''})\n"
               "said = subprocess.run(['scripts/grade_all.sh', '--alike', dir + '/in', '1', '3'], capture_output=True, "
               "text=True)\n"
               "lines = said.stdout.splitlines()\n"
               "same((len(lines), lines[0]), (4, 'exercise,alike,pieces,student,student'))\n"
               "same([re.sub(r'%,\\d+,', '%,N,', line) for line in lines if 'anna,ben' in line], ['1,100%,N,anna,ben'])\n"
               "same(said.stderr, 'exercise 3: too short to tell: (the repository)\\n')\n"),
        0);
}

/* What is wrong in a command is said in a line, and nothing is made. */
TEST(a_command_that_lacks_something_says_so) {
    CU_ASSERT_EQUAL(
        python(
            scripts,
            "import subprocess\n"
            "def said(*words):\n"
            "    run = subprocess.run(words, capture_output=True, text=True)\n"
            "    return run.returncode, run.stdout + run.stderr\n"
            "for words in ([], ['4'], ['4', '--variant'], ['4', '--variant', '2'], ['99', dir + '/t'], ['week', dir + "
            "'/t']):\n"
            "    same((words, said('scripts/exercise.sh', *words)[0], said('scripts/exercise.sh', *words)[1].startswith(\n"
            "        'exercise.sh [--variant V] N DIR: N is 1 to ')), (words, 1, True))\n"
            "same([name for name in ('4', '2', '--variant') if os.path.exists(name)], [])\n"
            "same(said('scripts/grade_all.sh', dir + '/none', '5'), (1, 'grade_all.sh SUBMISSIONS [N...]: there is no "
            "directory %s/none\\n' % dir))\n"
            "same(said('scripts/grade_all.sh', dir, 'five'), (1, 'grade_all.sh SUBMISSIONS [N...]: five is no number of "
            "an exercise\\n'))\n"),
        0);
}

/* A spreadsheet takes no cell for a formula, and nothing is added to others. */
TEST(cells_of_the_table_of_grades_are_no_formulas) {
    CU_ASSERT_EQUAL(python(scripts,
                           "from grade_all import cell\n"
                           "same([cell(text) for text in ('', 'a=b', 10)], ['', 'a=b', '10'])\n"
                           "same([cell(text) for text in ('=1', '+1', '-1', '@a', '\\t=1')], [\"'=1\", \"'+1\", \"'-1\", "
                           "\"'@a\", '?=1'])\n"),
                    0);
}

/* Functions are found in any style, in time that grows with the text. */
TEST(functions_are_found_in_any_style) {
    CU_ASSERT_EQUAL(
        python(
            scripts,
            "names = lambda text: [name for name, *_ in exam.functions(text)]\n"
            "same(names('int f(void)\\n{\\n  if (1) { }\\n  }\\nstatic int g(int a) { return \"}\"[0]; }'), ['f', 'g'])\n"
            "same(names('/* int f() { */ int x = 3; struct s { int a; }; int h(int (*a)(int)) { // }\\n }'), ['h'])\n"
            "same(names('extern \"C\" { void k() { const char *q = R\"(\")\"; } }'), ['k'])\n"
            "same(names('__global__ void __launch_bounds__(8 * 4) k(int a) { }'), ['k'])\n"
            "same(names('int __launch_bounds__(1) {\\n}'), [])\n"
            "same(names('int f() { '), [])\n"
            "for text in ('a)', '{', '(', 'R\"(', '/*', '\"', '\\\\\\n'): names(text * 100000)\n"),
        0);
}

/* So many lines of a case, in their order, each behind a bar: nothing that a student prints is taken for a line of the
 * grade. */
TEST(what_was_printed_is_shown_in_order_and_only_its_beginning) {
    CU_ASSERT_EQUAL(
        python(scripts,
               "import contextlib, io\n"
               "log = os.path.join(dir, 'log')\n"
               "def shown(text, begin, end):\n"
               "    with open(log, 'wb') as f: f.write(text)\n"
               "    said = io.StringIO()\n"
               "    with contextlib.redirect_stdout(said): exam.print_printed(log, begin, end)\n"
               "    return said.getvalue().splitlines()\n"
               "head = '    your code, and the program around it, printed %s for the first case that is wrong'\n"
               "same(shown(b'before\\none\\r10 of 10 points\\n\\x1b[2Jtwo\\nafter\\n', 7, 35),\n"
               "     [head % '3 lines' + ':', '    | one', '    | 10 of 10 points', '    | ?[2Jtwo'])\n"
               "same(shown(b'before', 6, 6), [head % '0 lines'])\n"
               "lines = shown(b''.join(b'%d\\n' % i for i in range(2345)), 0, 1 << 20)\n"
               "same(lines[0], head % '2345 lines' + ', of which these are the first 100:')\n"
               "same(lines[1:], ['    | %d' % i for i in range(100)])\n"),
        0);
}

/* Its first ones; all of them in `make exercises`. */
TEST(the_commands_of_the_page_on_debugging_show_what_is_below_them) {
    CU_ASSERT_EQUAL(system("python3 -B scripts/exercise.py debugging 6"), 0);
}
