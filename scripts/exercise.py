#!/usr/bin/env python3
"""The exercises of docs/EXERCISES.md, by the table scripts/exercises.txt, which says at its top what its lines mean.

    exercise.py start N DIR       a starter tree: the tracked files, without the solution of exercise N; of `all`: of none
    exercise.py grade N PROGRAM   runs the steps of exercise N, which are tests of PROGRAM (make grade EX=N)
    exercise.py check [N...]      of every exercise, or of these: the original is green, the blank red, wrong ones in between
    exercise.py sample [N...]     the same of one blank or wrong one of each, always the same

GRADE_SEED fixes the cases that are drawn; then they are not told. GRADE_SECONDS is how long a student's code may run at once.
"""
import concurrent.futures
import fnmatch
import itertools
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time

TABLE = "scripts/exercises.txt"
SECONDS = 60  # that a step may take; the slowest takes about two
SEED = 1  # of the sample

# ---- the table ------------------------------------------------------------------------------------------------------


def read_table(path):
    """{N: [entry]}, an entry being its word, the rest of its line, and the indented lines below it."""
    exercises, entries = {}, None
    with open(path) as lines:
        for line in lines:
            if line.startswith("#") or not line.strip():
                continue
            if line[0] == " ":
                entries[-1]["text"] += line
                continue
            word, _, rest = line.strip().partition(" ")
            if word == "exercise":
                number, _, rest = rest.partition(" ")
                entries = exercises[int(number)] = []
            entries.append({"word": word, "rest": rest, "text": ""})
    return exercises


def of(entries, word):
    return [e for e in entries if e["word"] == word]


# ---- functions in C -------------------------------------------------------------------------------------------------


def functions(source):
    """(name, type, begin, end) of every function that begins in the first column: source[begin:end] is its body in braces.
    clang-format puts the brace that closes it into the first column, or all of it on one line."""
    for head in re.finditer(r"^(?!typedef|enum|struct \w+ {|extern|template)[A-Za-z_][^;{}=#]*\)\s*{", source, re.M):
        text = re.sub(r"__launch_bounds__\([^)]*\)+", "", head.group())
        named = re.match(r"(.*?)(\w+)\(", text, re.S)
        line_end = source.index("\n", head.end() - 1)
        one_line = source[head.end() - 1:line_end].count("{") == source[head.end() - 1:line_end].count("}")
        end = source.rindex("}", head.start(), line_end) + 1 if one_line else source.index("\n}\n", head.end()) + 2
        type = " ".join(w for w in named[1].split() if not re.match(r"static$|inline$|INLINE$|__\w+__$", w))
        yield named[2], type, head.end() - 1, end


def nothing(type):
    """The body of a function that does nothing."""
    if type in ("void", ""):
        return ""
    return "    return NULL;\n" if type.endswith("*") else "    return (%s){0};\n" % type


def matching(files, paths):
    return [p for pattern in paths.split(",") for p in fnmatch.filter(files, pattern)]


def replace_bodies(files, entry, comment):
    """Gives the functions of a line `blank FILES NAMES...` the body below it, or one that does nothing."""
    paths, *names = entry["rest"].split()
    left = set(names)
    for path in matching(files, paths):
        source = files[path]
        for name, type, begin, end in reversed(list(functions(source))):
            hits = [n for n in names if fnmatch.fnmatchcase(name, n)]
            if hits:
                left -= set(hits)
                source = source[:begin] + "{\n    /* %s */\n%s}" % (comment, entry["text"] or nothing(type)) + source[end:]
        files[path] = source
    if left:
        sys.exit("%s: no function %s in %s; the table must follow the source" % (TABLE, " ".join(left), paths))


# ---- trees ----------------------------------------------------------------------------------------------------------


def tracked():
    """The tracked files as they are here, {path: text or bytes}."""
    files = {}
    for path in subprocess.check_output(["git", "ls-files", "-z"], text=True).split("\0"):
        if os.path.isfile(path):
            with open(path, "rb") as f:
                files[path] = f.read()
            if path.endswith((".c", ".h", ".cu")):
                files[path] = files[path].decode()
    return files


def allow_unused(files):
    """In what is left of a source something may not be used; warnings are errors."""
    more = "-Wno-unused -Wno-unused-parameter"
    for path in ("Makefile", "tests/suites.mk"):
        text = files[path].decode().replace("-Wall -Wextra", "-Wall -Wextra " + more)
        text = text.replace("-Wall,-Wextra", "-Wall,-Wextra,%s --diag-suppress 177,550" % more.replace(" ", ","))
        files[path] = text.encode()


def runs_of(exercises, numbers):
    """The exercises whose solutions the grading of these runs, and with them those of which it runs what is shared."""
    words = [w for n in numbers for e in of(exercises[n], "runs") for w in e["rest"].split()]
    return {int(w) for w in words if w[0] != "~"}, {int(w.strip("~")) for w in words}


def remove(files, entries):
    for e in of(entries, "remove"):
        for path in e["rest"].split():
            files.pop(path, None)


def starter(original, exercises, numbers, others=True):
    """Without the solutions of these, and of all others but those that the grading of one of these runs."""
    files = dict(original)
    runs, shared = runs_of(exercises, numbers)
    gone = [n for n in exercises if n in numbers or (others and n not in runs)]
    for number in gone:
        for e in of(exercises[number], "twin") + (of(exercises[number], "shared") if number not in shared else []):
            replace_bodies(files, e, "Left out: it gives exercise %d away." % number)
        remove(files, exercises[number])
    for number in gone:  # and last, since one's solution may be another's twin
        for e in of(exercises[number], "blank" if number in numbers or not of(exercises[number], "elsewhere") else "elsewhere"):
            said = "Exercise %d: write this. docs/EXERCISES.md says what it gets and what must hold."
            replace_bodies(files, e, (said if number in numbers else "Left out: it is exercise %d.") % number)
    files.pop("tests/test_exercises.c", None)  # which is about all of them
    files[TABLE] = "".join("exercise %d %s\n" % (n, exercises[n][0]["rest"]) + "".join(
        "step %s\n%s" % (e["rest"], e["text"]) for e in of(exercises[n], "step")) for n in numbers).encode()
    for path in ("docs/EXERCISES.md",):
        for suite in set(re.findall(r"\*\*Suite:\*\* `(\w+)`", files[path].decode())):
            if "tests/test_%s.c" % suite not in files:
                files[path] = re.sub(r"\s\*\*Suite:\*\* `%s`\." % suite, "", files[path].decode()).encode()
    for path in ("docs/TEACHING.md", "docs/paper.html"):  # answers; the solutions as code
        files.pop(path, None)
    allow_unused(files)
    return files


def with_bodies(files, entries, bodies):
    """The functions to be written, with these bodies in braces, {name: body}; those of other names stay."""
    for paths, *names in (e["rest"].split() for e in of(entries, "blank")):
        for path in matching(files, paths):
            for name, _, begin, end in reversed(list(functions(files[path]))):
                if name in names and name in bodies:
                    files[path] = files[path][:begin] + bodies[name] + files[path][end:]
    return files


def bodies_in(files, entries):
    """The functions to be written, as they are in these files, {name: body}."""
    bodies = {}
    for paths, *names in (e["rest"].split() for e in of(entries, "blank")):
        for path in matching(files, paths):
            bodies.update((name, files[path][begin:end]) for name, _, begin, end in functions(files[path]) if name in names)
    return bodies


def solved(files, original, entries):
    """A starter tree with the solution."""
    files = with_bodies(dict(files), entries, bodies_in(original, entries))
    for e in of(entries, "solution"):
        replace_bodies(files, {"rest": of(entries, "blank")[0]["rest"], "text": e["text"]}, "Another solution.")
    return files


def wrong_solution(files, entries, edit):
    """The solution with the edits of a line `wrong`: - old, + new, however the code is wrapped; or with another body of the first
    function."""
    files, where = dict(files), of(entries, "blank")
    pairs = re.findall(r"^ +- (.*)\n +\+ ?(.*)\n", edit["text"], re.M)
    if not pairs:
        paths, first, *_ = where[0]["rest"].split()
        replace_bodies(files, {"rest": paths + " " + first, "text": edit["text"]}, "A cheat.")
    for old, new in pairs:
        found, code = 0, re.compile(r"\s+".join(map(re.escape, old.split())))
        for paths, *names in (e["rest"].split() for e in where):
            for path in matching(files, paths):
                for name, _, begin, end in list(functions(files[path])):
                    body = files[path][begin:end]
                    if name in names and code.search(body) and not found:
                        files[path] = files[path][:begin] + code.sub(lambda _: new, body) + files[path][end:]
                        found += 1
        if not found:
            sys.exit("%s: `%s` is not in the solution; the table must follow the source" % (TABLE, old))
    return files


def write_tree(dir, files, before):
    """Makes the tree in dir, where `before` is, the files given; what stays keeps its time, so that make leaves it alone."""
    for path in before.keys() - files.keys():
        os.remove(os.path.join(dir, path))
    for path, text in files.items():
        if before.get(path) == text:
            continue
        to = os.path.join(dir, path)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with open(to, "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode())
        os.chmod(to, os.stat(path).st_mode)
    return files


# ---- start and grade ------------------------------------------------------------------------------------------------


def start(which, dir):
    exercises = read_table(TABLE)
    numbers = list(exercises) if which == "all" else [int(which)] if which.isdigit() else []
    if not numbers or not set(numbers) <= set(exercises) or os.path.exists(dir):
        sys.exit("exercise.sh N DIR: N is 1 to %d, or `all`, and DIR a directory that is not there yet" % len(exercises))
    write_tree(dir, starter(tracked(), exercises, numbers), {})
    if which == "all":
        print("%s: exercises 1 to %d. Read docs/EXERCISES.md there; then `make grade EX=N`." % (dir, len(exercises)))
        return
    entry = exercises[numbers[0]]
    names = ", ".join(n for e in of(entry, "blank") for n in e["rest"].split()[1:])
    print("%s: exercise %d, %s. Read docs/EXERCISES.md there, write %s, and `make grade EX=%d`."
          % (dir, numbers[0], entry[0]["rest"], names, numbers[0]))


def run_step(program, test, seed, sandbox=None):
    """Whether it passed, and what it said if not. Who says that it passed has to know the secret, which a student's code has not."""
    secret = secrets.token_hex(16)
    try:
        run = subprocess.run((sandbox or []) + [program, "--only", test], capture_output=True, text=True, errors="replace",
                             timeout=SECONDS, input=secret, env=dict(os.environ, GRADE_SEED=str(seed), GRADE_SECRET="1"))
    except subprocess.TimeoutExpired:
        return False, ["it did not end within %d seconds" % SECONDS]
    if run.returncode == 0 and secret + " passed" in run.stdout.splitlines():
        return True, []
    said = re.findall(r"^ *Found: (.*)$", run.stdout, re.M)
    said = said or re.findall(r"^ +\d+\. (\S+  - .*)$", run.stdout, re.M) + run.stderr.splitlines()[-1:]
    return False, said[:3]


def grade(number, program):
    exercises = read_table(TABLE)
    if number not in exercises:
        sys.exit("make grade EX=N: the exercises here are %s" % ", ".join(map(str, sorted(exercises))))
    points = most = 0
    seed, following = os.environ.get("GRADE_SEED"), None
    print("exercise %d, %s%s" % (number, exercises[number][0]["rest"], "" if seed else drawn()))
    for i, e in enumerate(of(exercises[number], "step"), 1):
        worth, _, test = e["rest"].partition(" ")
        passed, said = run_step(program, test, seed or SEEDS[0])
        got = int(worth) if passed else 0
        points, most = points + got, most + int(worth)
        print("  step %d: %d of %s points: %s" % (i, got, worth, test))
        if not passed:
            following = following or "next: step %d, %s" % (i, test)
            print("    expected: %s" % " ".join(e["text"].split()))
            print("".join("    found: %s\n" % s for s in said), end="")
    print("%d of %d points%s" % (points, most, "; " + following if following else ""))
    return points == most


SEEDS = []  # that was drawn, if none was given


def drawn():
    SEEDS.append(secrets.randbelow(10**6))
    return " (cases of GRADE_SEED=%d)" % SEEDS[0]


# ---- check ----------------------------------------------------------------------------------------------------------


def points_of(dir, number):
    """Of each step, as make grade prints them; what it said instead, if it did not get that far."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in ("BUILD", "SUITE")}
    env.setdefault("CFLAGS", "-O0 -march=native")  # of what a case changes; it runs for a moment
    env.setdefault("DEVICE_O", "-O0")
    run = subprocess.run(["make", "-s", "-C", dir, "grade", "EX=%d" % number], capture_output=True, text=True, env=env)
    return [int(p) for p in re.findall(r"^  step \d: (\d+) of", run.stdout, re.M)] or run.stdout + run.stderr


def objects_of(path):
    """What make builds of a source for grading."""
    stem, _, end = path.rpartition(".")
    if path == "flexgen.cu":
        return ["flexgen_cpu.cpp", "flexgen_cpu.o", "flexgen_cpu.d"]
    if path == "mini.cu":
        return ["mini_cpu.cpp", "mini_kernels.so"]
    stems = [stem] * (end == "c") + {"mini.c": ["tests/mini_parts"], "lp.c": ["tests/lp_parts"]}.get(path, [])
    return [stem + end for stem in stems for end in (".o", ".d")]


def copy_objects(dir, names):
    """Into a tree what was built here, if it was; all newer than the sources, so that make leaves it alone."""
    build, now = os.environ.get("BUILD", "build"), time.time()
    for name in names:
        if os.path.exists(os.path.join(build, name)):
            to = os.path.join(dir, "build", name)
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copy(os.path.join(build, name), to)
            if name.endswith(".d"):  # what the objects depend on, by the names that they have in the tree
                with open(to, "r+", encoding="utf-8") as f:
                    text = f.read().replace(build + "/", "build/")
                    f.seek(0)
                    f.write(text)
                    f.truncate()
            os.utime(to, (now, now))


KINDS = ("original", "blank", "wrong", "cheat")
# What earned all points once: to say so, and to end before anybody looks.
ESCAPE = """    extern int printf(const char *, ...), puts(const char *);
    extern void _Exit(int);
    puts("Run Summary: 1 passed, exit status 0"), printf("  Test: %s ...passed\\n", "TEST");
    for (int fd = 0; fd < 100; fd++) { extern long write(int, const void *, unsigned long); (void)!write(fd, "\\0\\0\\0\\0 passed\\n", 12); }
    _Exit(0);
"""


def is_kernel(entries):
    return of(entries, "blank")[0]["rest"].startswith(("flexgen.cu ", "mini.cu "))


def cases_of(exercises, original, number, others):
    """(N, kind, what it is, its tree, the points that each step must give), all of them in the starter tree."""
    entries = exercises[number]
    full = [int(e["rest"].split()[0]) for e in of(entries, "step")]
    blank = starter(original, exercises, [number], others)
    right = solved(blank, original, entries)
    yield number, "blank", "", blank, [0] * len(full)
    yield number, "original", "", right, full
    if not is_kernel(entries):  # which cannot print, nor end the program
        tests = "\\n".join("  Test: %s ...passed" % e["rest"].partition(" ")[2] for e in of(entries, "step"))
        yield number, "cheat", ": it says that it has passed, and ends", wrong_solution(
            right, entries, {"text": ESCAPE.replace("TEST", tests)}), [0] * len(full)
    for e in of(entries, "wrong"):
        *points, what = e["rest"].split(" ", len(full))
        yield number, "wrong", ": " + what, wrong_solution(right, entries, e), [int(p) for p in points]


def with_one_tree(cases, exercises):
    """The cases, of which those of kernels come last and have one tree with the functions of each: it compiles for seconds."""
    kernels = [case for case in cases if is_kernel(exercises[case[0]])]
    tree = dict(kernels[0][3]) if kernels else {}
    for number, _, _, files, _ in kernels[1:]:
        with_bodies(tree, exercises[number], bodies_in(files, exercises[number]))
        tree[TABLE] += files[TABLE]
    return [case for case in cases if not is_kernel(exercises[case[0]])] + [(*kernel[:3], tree, kernel[4]) for kernel in kernels]


def leaks(original, exercises):
    """What starter trees give away: solutions that their grading does not run, and names of suites that they have not."""
    for numbers in [list(exercises)] + [[n] for n in exercises]:
        tree = starter(original, exercises, numbers)
        runs, _ = runs_of(exercises, numbers)
        for other in exercises:
            for e in of(exercises[other], "blank") if other in numbers or other not in runs else []:
                paths, *names = e["rest"].split()
                for path in matching(original, paths):
                    for name, _, begin, end in functions(original[path]):
                        if name in names and original[path][begin:end] in tree[path]:
                            yield "the tree of %s has %s of exercise %d" % (numbers, name, other)
        for suite in re.findall(r"\*\*Suite:\*\* `(\w+)`", tree["docs/EXERCISES.md"].decode()):
            if "tests/test_%s.c" % suite not in tree:
                yield "the text of the tree of %s names the suite %s, which is not there" % (numbers, suite)


def check(numbers, sample=False):
    """Whether all cases of these exercises get the points that they should. sample: of each a case, in a tree with the solutions of the
    others, of which less is to be built; the originals are the suite `grade`."""
    exercises, original, draw = read_table(TABLE), tracked(), random.Random(SEED)
    cases = [list(cases_of(exercises, original, number, not sample)) for number in numbers or exercises]
    if sample:
        cases = [with_one_tree([draw.choice([case for case in c if case[1] != "original"]) for c in cases], exercises)]
    results, bad = [], []
    given_away = list(leaks(original, exercises))
    print("".join("%s\n" % leak for leak in given_away), end="")
    os.environ.setdefault("GRADE_SEED", str(secrets.randbelow(10**6)))
    print("GRADE_SEED=%s" % os.environ["GRADE_SEED"], flush=True)
    waiting = iter(cases)

    def work(_):
        """Takes exercise after exercise, in a tree of its own: most of a case is one compiler or one linker."""
        with tempfile.TemporaryDirectory() as dir:
            there = write_tree(dir, original, {})
            copy_objects(dir, ["libflexgen.a", "test_grade", "emulated/test_grade"] + sum(map(objects_of, original), []))
            for number, kind, what, files, expected in itertools.chain.from_iterable(waiting):
                again = [p for p in files if files[p] == original.get(p) != there.get(p)]  # as it was built here
                there = write_tree(dir, files, there)
                copy_objects(dir, sum(map(objects_of, again), []))
                points = points_of(dir, number)
                results.append((kind, points == expected))
                line = "%2d %-60s %s" % (number, kind + what, points)
                if points != expected:
                    line += " INSTEAD OF %s" % expected
                    bad.append(line + "\n")
                print(line + "\n", end="", flush=True)

    workers = 1 if sample else min(len(cases), os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    print("".join(bad) + "%d of %d originals have all points, %d of %d blanks none, %d of %d wrong solutions those that they should, %d of %d "
          "escapes none" % tuple(n for kind in KINDS for n in (results.count((kind, True)), sum(k == kind for k, _ in results))))
    return not bad and not given_away


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "start" and len(arguments) == 2:
        start(*arguments)
    elif command == "grade" and len(arguments) == 2:
        sys.exit(not grade(int(arguments[0]) if arguments[0].isdigit() else 0, arguments[1]))
    elif command in ("check", "sample"):
        sys.exit(not check([int(a) for a in arguments], command == "sample"))
    else:
        sys.exit(__doc__)
