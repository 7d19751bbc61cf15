#!/usr/bin/env python3
"""The exercises of docs/EXERCISES.md, by the table scripts/exercises.txt, which says at its top what its lines mean.

    exercise.py start N DIR       a starter tree: the tracked files, without the solution of exercise N
    exercise.py grade N PROGRAM   runs the steps of exercise N, which are tests of PROGRAM (make grade EX=N)
    exercise.py check [N...]      of every exercise, or of these: the original is green, the blank red, wrong ones in between
    exercise.py sample [N...]     the same of one blank or wrong one of each, always the same
"""
import fnmatch
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

TABLE = "scripts/exercises.txt"
SECONDS = 30  # that a step may take; the slowest takes about one
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


UNUSED = "".join('#pragma GCC diagnostic ignored "-Wunused-%s" // what an exercise leaves out used it\n' % w
                 for w in ("parameter", "function", "variable", "const-variable"))
UNUSED_CUDA = "#pragma nv_diag_suppress 177, 550 // nvcc's numbers for the same\n"


def replace_bodies(files, entry, comment):
    """Gives the functions of a line `blank FILES NAMES...` the body below it, or one that does nothing."""
    paths, *names = entry["rest"].split()
    left = set(names)
    for path in fnmatch.filter(files, paths):
        source = files[path]
        for name, type, begin, end in reversed(list(functions(source))):
            hits = [n for n in names if fnmatch.fnmatchcase(name, n)]
            if hits:
                left -= set(hits)
                source = source[:begin] + "{\n    /* %s */\n%s}" % (comment, entry["text"] or nothing(type)) + source[end:]
        if source != files[path]:
            files[path] = source if source.startswith(UNUSED) else UNUSED + UNUSED_CUDA * path.endswith(".cu") + source
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


def starter(original, exercises, number):
    files, entries = dict(original), exercises[number]
    for e in of(entries, "blank"):
        replace_bodies(files, e, "Exercise %d: write this. docs/EXERCISES.md says what it gets and what must hold." % number)
    for e in of(entries, "twin"):
        replace_bodies(files, e, "Left out: it gives exercise %d away." % number)
    for e in of(entries, "remove"):
        for path in e["rest"].split():
            del files[path]
    steps = "".join("step %s\n%s" % (e["rest"], e["text"]) for e in of(entries, "step"))
    files.pop("tests/test_exercises.c", None)  # which is about all of them
    files[TABLE] = ("exercise %d %s\n" % (number, entries[0]["rest"]) + steps).encode()
    return files


def wrong_solution(original, entries, edit):
    """The solution with the edits of a line `wrong`: - old, + new."""
    files, where = dict(original), of(entries, "blank")
    for e in of(entries, "solution"):
        replace_bodies(files, {"rest": where[0]["rest"], "text": e["text"]}, "Another solution.")
    pairs = re.findall(r"^ +- (.*)\n +\+ ?(.*)\n", edit["text"], re.M)
    for old, new in pairs:
        found = 0
        for paths, *names in (e["rest"].split() for e in where):
            for path in fnmatch.filter(files, paths):
                for name, _, begin, end in list(functions(files[path])):
                    body = files[path][begin:end]
                    if name in names and old in body and not found:
                        files[path] = UNUSED + files[path][:begin] + body.replace(old, new) + files[path][end:]
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


# ---- the three commands ---------------------------------------------------------------------------------------------


def start(number, dir):
    exercises = read_table(TABLE)
    if number not in exercises or os.path.exists(dir):
        sys.exit("exercise.sh N DIR: N is 1 to %d, and DIR a directory that is not there yet" % len(exercises))
    write_tree(dir, starter(tracked(), exercises, number), {})
    entry = exercises[number]
    names = ", ".join(n for e in of(entry, "blank") for n in e["rest"].split()[1:])
    print("%s: exercise %d, %s. Read docs/EXERCISES.md there, write %s, and `make grade EX=%d`."
          % (dir, number, entry[0]["rest"], names, number))


def run_step(program, test):
    """Whether it passed, and what it said if not."""
    try:
        run = subprocess.run([program, "--only", test], capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False, ["it did not end within %d seconds" % SECONDS]
    if run.returncode == 0 and "Test: %s ...passed" % test in run.stdout:
        return True, []
    said = re.findall(r"^ +\d+\. (\S+  - .*)$", run.stdout, re.M)
    said += [] if run.returncode in (0, 1) else ["it crashed: %s" % (run.stderr.strip() or "signal %d" % -run.returncode)]
    return False, said[:3]


def grade(number, program):
    exercises = read_table(TABLE)
    if number not in exercises:
        sys.exit("make grade EX=N: the exercises here are %s" % ", ".join(map(str, sorted(exercises))))
    points = most = 0
    print("exercise %d, %s" % (number, exercises[number][0]["rest"]))
    for i, e in enumerate(of(exercises[number], "step"), 1):
        worth, _, test = e["rest"].partition(" ")
        passed, said = run_step(program, test)
        got = int(worth) if passed else 0
        points, most = points + got, most + int(worth)
        print("  step %d: %d of %s points: %s" % (i, got, worth, test))
        if not passed:
            print("    expected: %s" % " ".join(e["text"].split()))
            print("".join("    found: %s\n" % s for s in said), end="")
    print("%d of %d points" % (points, most))
    return points == most


def points_of(dir, number):
    """Of each step, as make grade prints them; what it said instead, if it did not get that far."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in ("BUILD", "SUITE")}
    env.setdefault("CFLAGS", "-O1 -march=native")  # of what a case changes; it runs for a moment
    run = subprocess.run(["make", "-s", "-C", dir, "grade", "EX=%d" % number], capture_output=True, text=True, env=env)
    return [int(p) for p in re.findall(r"^  step \d: (\d+) of", run.stdout, re.M)] or run.stdout + run.stderr


def copy_objects(dir, files):
    """Into a fresh tree what was built here of what grading needs; all newer than the sources, so that make leaves it alone."""
    build, now = os.environ.get("BUILD", "build"), time.time()
    sources = [p for p in files if p.endswith(".c") and p not in ("flexgen.c", "device/pipeline.c") and not p.startswith("tests/")]
    sources += ["tests/%s.c" % name for name in ("main", "fixture", "local_net", "mini_parts", "test_grade")]
    names = [p[:-2] + end for p in sources for end in (".o", ".d")]
    for name in names + ["libflexgen.a", "flexgen_cpu.cpp", "flexgen_cpu.o", "flexgen_cpu.d", "test_grade", "emulated/test_grade"]:
        if os.path.exists(os.path.join(build, name)):
            to = os.path.join(dir, "build", name)
            os.makedirs(os.path.dirname(to), exist_ok=True)
            shutil.copy(os.path.join(build, name), to)
            os.utime(to, (now, now))


KINDS = ("original", "blank", "wrong")


def cases_of(exercises, original, number):
    """(N, kind, what it is, its tree, the points that each step must give)."""
    entries = exercises[number]
    full = [int(e["rest"].split()[0]) for e in of(entries, "step")]
    yield number, "original", "", original, full
    yield number, "blank", "", starter(original, exercises, number), [0] * len(full)
    for e in of(entries, "wrong"):
        *points, what = e["rest"].split(" ", len(full))
        yield number, "wrong", ": " + what, wrong_solution(original, entries, e), [int(p) for p in points]


def check(numbers, sample=False):
    """Whether all cases of these exercises get the points that they should; or of each a case (the originals are the suite `grade`)."""
    exercises, original, draw = read_table(TABLE), tracked(), random.Random(SEED)
    cases = [list(cases_of(exercises, original, number)) for number in numbers or exercises]
    cases = [draw.choice(c[1:]) for c in cases] if sample else sum(cases, [])
    good, total = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    with tempfile.TemporaryDirectory() as dir:
        there = write_tree(dir, original, {})
        copy_objects(dir, original)
        for number, kind, what, files, expected in cases:
            there = write_tree(dir, files, there)
            points = points_of(dir, number)
            total[kind], good[kind] = total[kind] + 1, good[kind] + (points == expected)
            print("%2d %-60s %s%s" % (number, kind + what, points, "" if points == expected else " INSTEAD OF %s" % expected),
                  flush=True)
    print("%d of %d originals have all points, %d of %d blanks none, %d of %d wrong solutions those that they should"
          % tuple(n for kind in KINDS for n in (good[kind], total[kind])))
    return good == total


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "start" and len(arguments) == 2 and arguments[0].isdigit():
        start(int(arguments[0]), arguments[1])
    elif command == "grade" and len(arguments) == 2:
        sys.exit(not grade(int(arguments[0]) if arguments[0].isdigit() else 0, arguments[1]))
    elif command in ("check", "sample"):
        sys.exit(not check([int(a) for a in arguments], command == "sample"))
    else:
        sys.exit(__doc__)
