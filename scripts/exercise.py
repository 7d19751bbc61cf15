#!/usr/bin/env python3
"""The exercises of docs/EXERCISES.md, by the table scripts/exercises.txt, which says at its top what its lines mean.

    exercise.py start N DIR       a starter tree: the tracked files, without the solution of exercise N; `all DIR`: of none
    exercise.py start week W DIR  the tree of a week: with what was done in the weeks before, without what comes later
    ... --variant V DIR           with the contracts of variant V where exercises have variants; notes that in DIR/../variants.csv
    exercise.py kit [N...]        what the grading of these needs, or of all, in build/kit (scripts/exam.py)
    exercise.py check [N...]      of every exercise, or of these: the original is green, the blank red, wrong ones in between
    exercise.py sample [N...]     the same of one blank or wrong one of each, always the same; that the table follows the source, of all
    exercise.py debugging [N]     whether the commands of docs/DEBUGGING.md, or its first N, print what it shows below them
    exercise.py course            the six weeks in their order, each exercise in the tree of its week

In a tree, what is not to be written there and not yet known comes as an object without its source, so that the rest works.
GRADE_SEED fixes the cases that are drawn. GRADE_SECONDS is how long a student's code may take for a question.
"""
import concurrent.futures
import csv
import fnmatch
import hashlib
import itertools
import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import tempfile

import exam

TABLE = "scripts/exercises.txt"
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
            if word != "week":
                entries.append({"word": word, "rest": rest, "text": ""})
    return exercises


def read_weeks(path):
    """{W: [N]}"""
    with open(path) as lines:
        return {int(m[1]): [int(n) for n in m[2].split()] for m in (re.match(r"week (\d+) (.*)", line) for line in lines) if m}


def of(entries, word):
    return [e for e in entries if e["word"] == word]


# ---- variants -------------------------------------------------------------------------------------------------------
#
# Variant 0 is the contract that docs/EXERCISES.md and the source have. The others are told to students in the tree that they get, and to the
# judge by number; nothing else of the program knows them.


def variants(entries):
    """{V: the entry of a variant}, without 0."""
    return {int(e["rest"].split()[0]): e for e in of(entries, "variant")}


def highest_variant(exercises):
    return max(max(variants(entries), default=0) for entries in exercises.values())


def told_variant(entries, variant):
    """", variant V" where the exercise has it; else nothing."""
    return ", variant %d" % variant if variant in variants(entries) else ""


def reword(text, entries, variant, found=None):
    """A text as a variant has it, in markdown or in comments, however it is wrapped. Adds to `found` what it replaced."""
    edits = variants(entries).get(variant, {"text": ""})["text"]
    for old, new in re.findall(r"^ +~ (.*)\n +\+ ?(.*)\n", edits, re.M):
        text, count = re.subn(r"[\s*/]+".join(map(re.escape, old.split())), lambda _: new, text)
        if count and found is not None:
            found.append(old)
    return text


def reword_section(text, exercises, number, variant, found=None):
    """docs/EXERCISES.md with the section of an exercise as a variant has it, which says so before the contract."""
    if variant not in variants(exercises[number]):
        return text
    begin = text.index("\n## %d. " % number)
    end = text.index("\n## ", begin + 1)
    title = variants(exercises[number])[variant]["rest"].partition(" ")[2]
    section = re.sub(r"\s\*\*Suite:\*\* `\w+`\.", "", reword(text[begin:end], exercises[number], variant, found))
    said = "**Variant %d.** %s. `make grade` tests this rule; the suites of `make test` test another one.\n" % (variant, title[0].upper() + title[1:])
    return text[:begin] + section.replace("**Contract.**", said + "**Contract.**", 1) + text[end:]


# ---- functions in C -------------------------------------------------------------------------------------------------


def type_of(name, head):
    """What a function returns, by what stands before its body."""
    before = re.sub(r"__launch_bounds__\([^)]*\)+|__attribute__\(\(.*?\)\)|template <[^>]*>", "", head)
    before = before[:re.search(r"\b%s\s*\(" % name, before).start()]
    return " ".join(w for w in before.split() if not re.match(r"static$|inline$|INLINE$|__\w+__$", w)).replace(" *", "*")


def parameters_of(name, head):
    """(their declarations, their names)"""
    inside = head[re.search(r"\b%s\s*\(" % name, head).end():head.rindex(")")]
    inside = " ".join(inside.split())
    return inside, "" if inside == "void" else ", ".join(re.search(r"(\w+)(\[[^,]*)?$", p.strip())[1] for p in inside.split(","))


def nothing(type):
    """The body of a function that does nothing."""
    if type in ("void", ""):
        return ""
    return "    return NULL;\n" if type.endswith("*") else "    return (%s){0};\n" % type


def matching(files, paths):
    return [p for pattern in paths.split(",") for p in fnmatch.filter(files, pattern)]


def functions_of(files, entry):
    """(path, name, head, begin, end) of the functions of a line `WORD FILES FUNCTIONS...`, in each file the last first."""
    paths, *names = entry["rest"].split()
    left = set(names)
    for path in matching(files, paths):
        for name, head, begin, end in reversed(list(exam.functions(files[path]))):
            hits = [n for n in names if fnmatch.fnmatchcase(name, n)]
            left -= set(hits)
            if hits:
                yield path, name, head, begin, end
    if left:
        sys.exit("%s: no function %s in %s; the table must follow the source" % (TABLE, " ".join(left), paths))


def replace_bodies(files, entry, body_of):
    """Gives the functions of a line the body that body_of(path, name, head) returns."""
    for path, name, head, begin, end in list(functions_of(files, entry)):
        files[path] = files[path][:begin] + body_of(path, name, head) + files[path][end:]


def blank_body(entry, comment):
    return lambda path, name, head: "{\n    /* %s */\n%s}" % (comment, entry["text"] or nothing(type_of(name, head)))


def calling(prefix, comment):
    """The body of a function that calls another one, whose name has this in front."""
    def body(path, name, head):
        type, (parameters, names) = type_of(name, head), parameters_of(name, head)
        return "{\n    /* %s */\n    extern %s %s%s(%s);\n    %s%s%s(%s);\n}" % (
            comment, type, prefix, name, parameters, "" if type == "void" else "return ", prefix, name, names)
    return body


def given_body(number):
    """Calls the object that the function comes as (given_source)."""
    return calling("given_", "This is exercise %d's and comes as an object." % number)


def wrappers(prefix, found):
    """Functions that call those of a file under other names, since most of these have none outside of it."""
    text = ""
    for name, head in found:
        type, (parameters, arguments) = type_of(name, head), parameters_of(name, head)
        text += "%s %s%s(%s) { %s%s(%s); }\n" % (
            type, prefix, name, parameters, "" if type == "void" else "return ", name, arguments)
    return text


def is_given(path, head):
    """A function of a GPU, or one that is compiled into its callers, does not come as an object."""
    return not path.endswith(".cu") and "INLINE" not in head


def listed(path, text, exercises, numbers, word):
    """(N, name, head) of the functions in a file that lines with this word list for these exercises."""
    for number in numbers:
        for e in of(exercises[number], word):
            if path in matching([path], e["rest"].split()[0]):
                names = e["rest"].split()[1:]
                yield from ((number, name, head) for name, head, _, _ in exam.functions(text)
                            if is_given(path, head) and any(fnmatch.fnmatchcase(name, n) for n in names))


def given_in(path, text, exercises, numbers, later):
    """(N, name, head) of what comes as an object where `numbers` are to be written, and `later` are not known besides; what several of
    them share comes once."""
    given = [*listed(path, text, exercises, later, "blank"), *listed(path, text, exercises, [*numbers, *later], "shared")]
    return list({name: (n, name, head) for n, name, head in given}.values())


def given_source(path, text, given, own):
    """(a source with the functions `given` of a file, under the names given_..., those names). They call the functions `own` in
    the file of the student, where they have the names own_..."""
    text = exam.with_bodies(text, {name: calling("own_", "")(path, name, head) for _, name, head in own})
    return text + wrappers("given_", [f[1:] for f in given]), tuple("given_" + name for _, name, _ in given)


def own_wrappers(given, own):
    """What is behind the end of a student's file, for given_source."""
    said = "\n/* Objects call what is to be written here by these names. */\n"
    return said + wrappers("own_", [f[1:] for f in own]) if given and own else ""


# ---- trees ----------------------------------------------------------------------------------------------------------


def tracked():
    """The tracked files as they are here, {path: text or bytes}."""
    files = {}
    for path in subprocess.check_output(["git", "ls-files", "-z"], text=True).split("\0"):
        if os.path.isfile(path):
            with open(path, "rb") as f:
                files[path] = f.read()
            if path.endswith((".c", ".h", ".cu", ".cpp", ".sed")):
                files[path] = files[path].decode()
    return files


def allow_unused(files):
    """In what is left of a source something may not be used; warnings are errors."""
    more = "-Wno-unused -Wno-unused-parameter"
    for path in ("Makefile", "tests/suites.mk"):
        text = files[path].decode().replace("-Wall -Wextra", "-Wall -Wextra " + more)
        text = re.sub(r"(-Xcompiler -Wall\S+)", r"\1,%s --diag-suppress 177,550" % more.replace(" ", ","), text)
        files[path] = text.encode()


# What says how exercises are graded, and what is right.
TEACHERS = ["docs/TEACHING.md", "docs/ANSWERS.md", "docs/paper.html", TABLE, "scripts/alike.py", "scripts/answers.py",
            "scripts/exercise.py", "scripts/exercise.sh", "scripts/grade_all.py", "scripts/grade_all.sh", "scripts/hostile.py", "tests/test_exercises.c",
            "tests/test_grade.c", "tests/answers.c", "tests/answers.h",
            # and the open project's, which is judged in the repository
            "docs/PROJECT.md", "scripts/project.py", "scripts/project_hostile.py", "tests/test_project.c", "tests/project_judge.c",
            "tests/project_judge.h"]


HEADERS = ["flexgen.h", "lp.h", "quant.h"]  # that speak of what variants change


def starter(original, exercises, numbers, before=(), variant=0):
    """The files of a tree in which these are to be written, by the contracts of a variant, and those of `before` are known."""
    files = dict(original)
    gone = [n for n in exercises if n not in before]
    for number in gone:
        for e in of(exercises[number], "twin"):
            replace_bodies(files, e, blank_body({"text": ""}, "Left out: it gives exercise %d away." % number))
        for path in (p for e in of(exercises[number], "remove") for p in e["rest"].split()):
            files.pop(path, None)
    for number in gone:  # and last, since one's solution may be another's twin
        for e in of(exercises[number], "shared") + (of(exercises[number], "blank") if number not in numbers else []):
            left_out = blank_body({"text": ""}, "Left out: it gives exercise %d away." % number)
            given = given_body(number)
            replace_bodies(files, e, lambda path, name, head: (given if is_given(path, head) else left_out)(path, name, head))
        for e in of(exercises[number], "blank") if number in numbers else []:
            said = "Exercise %d%s: write this. docs/EXERCISES.md says what it gets and what must hold." % (
                number, told_variant(exercises[number], variant))
            replace_bodies(files, e, blank_body(e, said))
    later = [n for n in gone if n not in numbers]
    for path in (path for path in files if path.endswith(".c")):
        files[path] += own_wrappers(given_in(path, original[path], exercises, numbers, later),
                                    list(listed(path, original[path], exercises, numbers, "blank")))
    for path in TEACHERS:
        files.pop(path, None)
    text = files["docs/EXERCISES.md"].decode()
    for number in numbers:
        text = reword_section(text, exercises, number, variant)
        for path in [*own_files(original, exercises[number]), *HEADERS]:
            files[path] = reword(files[path], exercises[number], variant)
    for suite in set(re.findall(r"\*\*Suite:\*\* `(\w+)`", text)):
        if "tests/test_%s.c" % suite not in files:
            text = re.sub(r"\s\*\*Suite:\*\* `%s`\." % suite, "", text)
    files["docs/EXERCISES.md"] = text.encode()
    allow_unused(files)
    return files


def write_tree(dir, files):
    for path, text in files.items():
        to = os.path.join(dir, path)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with open(to, "wb") as f:
            f.write(text if isinstance(text, bytes) else text.encode())
        if os.path.exists(path):
            os.chmod(to, os.stat(path).st_mode)


# ---- kits -----------------------------------------------------------------------------------------------------------
#
# A kit is for computers like this one, of any age: its objects use no instructions that only newer processors have.

FLAGS = "-Og -w -D_GNU_SOURCE -I. -Itests"
LANGUAGE = {".c": "-std=c11 -x c", ".cpp": "-std=c++17 -fno-strict-aliasing -x c++"}
JUDGE = ["tests/%s.c" % name for name in ("test_grade", "answers", "squares", "main", "fixture", "written", "local_net", "started")]
EXAM = {"exam_engine": ["exam", "exam_engine", "squares", "lessons", "fixture"], "exam_lp": ["exam"], "exam_mini": ["exam"],
        "emulated/exam_kernels": ["exam", "exam_kernels", "fixture"], "emulated/exam_tiles": ["exam", "exam_tiles"]}


def build_dir():
    return os.environ.get("BUILD", "build")


class Objects:
    """Compiles sources, each once: the name of an object is a hash of all that it depends on."""

    def __init__(self, original, dir):
        self.dir = os.path.join(dir, "objects")
        os.makedirs(self.dir, exist_ok=True)
        self.headers = hashlib.sha256((FLAGS + str(LANGUAGE)).encode())
        for path in sorted(p for p in original if p.endswith(".h")):
            self.headers.update(original[path].encode())

    def name(self, path, text, keep=()):
        hash = self.headers.copy()
        hash.update("\0".join([path, text, *keep]).encode())
        return "%s-%s.o" % (os.path.splitext(os.path.basename(path))[0], hash.hexdigest()[:16])

    def has(self, name):
        return os.path.exists(os.path.join(self.dir, name))

    def compile(self, path, text, keep=None):
        """keep: of its functions with names outside of it the only ones that are seen there; None: all. In mini.c, whose functions and
        variables all have such names, these functions' originals are not seen, and of the rest those of the student's file come first.
        Without the CUDA toolkit's headers the emulation of a GPU is left out."""
        name = self.name(path, text, keep or ())
        to = os.path.join(self.dir, name)
        kind, cuda = os.path.splitext(path)[1], exam.cuda_include()
        if not os.path.exists(to) and (kind == ".c" or cuda):
            new = "%s.%d-%s" % (to, os.getpid(), secrets.token_hex(4))
            compiler = os.environ.get("CC") or "cc" if kind == ".c" else os.environ.get("CXX") or "c++"
            command = [compiler, *FLAGS.split(), *LANGUAGE[kind].split(), "-iquote", os.path.dirname(path) or ".", "-", "-c", "-o", new]
            command += ["-isystem", cuda] if kind == ".cpp" else []
            command += ["-Dmain=mini_main"] if path == "mini.c" else []
            subprocess.run(command, input='#line 1 "%s"\n%s' % (path, text), text=True, check=True)
            if keep and path == "mini.c":
                defined = subprocess.check_output(["nm", "-gj", "--defined-only", new], text=True).split()
                originals = [k[len("given_"):] for k in keep]
                subprocess.check_call(["objcopy", *("--localize-symbol=" + n for n in originals),
                                       *("--weaken-symbol=" + n for n in defined if n not in originals), new])
            elif keep:
                subprocess.check_call(["objcopy", *("--keep-global-symbol=" + k for k in keep), new])
            os.replace(new, to)
        return name

    def compile_all(self, sources):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(lambda s: self.compile(*s), sources))


def engine(files):
    """The sources of libflexgen.a."""
    return [p for p in sorted(files) if p.endswith(".c") and p.count("/") < 2 and p not in ("flexgen.c", "mini.c", "device/pipeline.c")
            and not p.startswith(("tests/", "docs/"))]


def program_of(entries):
    path = of(entries, "blank")[0]["rest"].split()[0]
    return {"mini.c": "exam_mini", "lp.c": "exam_lp", "flexgen.cu": "emulated/exam_kernels",
            "mini.cu": "emulated/exam_tiles"}.get(path, "exam_engine")


def solved_by_others(original, exercises, number):
    """The sources that an exam of this exercise is linked with: all but its solution, and what would answer in its place."""
    files, left_out = dict(original), blank_body({"text": ""}, "Left out.")
    for word in ("twin", "shared", "absent", "blank"):
        for e in of(exercises[number], word):
            replace_bodies(files, e, blank_body(e, "Left out.") if word == "blank" else left_out)
    return files


def exam_of(original, exercises, number, objects, variant=0):
    """The kit of an exercise: what N.json says, and the sources to be compiled for it, of which it has the objects' names."""
    entries, program = exercises[number], program_of(exercises[number])
    files = solved_by_others(original, exercises, number)
    own = sorted({path for e in of(entries, "blank") for path, *_ in functions_of(original, e)})
    blanks = {path: {} for path in own}
    start = starter(original, exercises, [number])
    for e in of(entries, "blank"):
        for path, name, *_ in functions_of(original, e):
            blanks[path][name] = exam.plain(exam.bodies_in(start[path], [name])[name])
    others = [n for n in exercises if n != number]
    given, behind = {}, {}
    sources = [("tests/%s.c" % name, files["tests/%s.c" % name]) for name in EXAM[program] if "tests/%s.c" % name not in own]
    for path in own:
        theirs = given_in(path, original[path], exercises, [], others)
        mine = list(listed(path, original[path], exercises, [number], "blank"))
        given[path] = {name: given_body(n)(path, name, head) for n, name, head in theirs}
        given[path].update((name, "{%s}" % nothing(type_of(name, head)))
                           for _, name, head in listed(path, original[path], exercises, [number], "shared"))
        behind[path] = own_wrappers(theirs, mine)
        text, names = given_source(path, files[path], theirs, mine)
        if names and program != "exam_lp":
            sources.append((path, text, names))
    if program in ("exam_engine", "emulated/exam_kernels"):
        sources += [(path, files[path]) for path in engine(files) if path not in own]
    if program.startswith("emulated"):
        sources.append(("tests/cuda_cpu.cpp", files["tests/cuda_cpu.cpp"]))
    if program == "emulated/exam_tiles":
        sources.append(("mini.c", "#define GPU\n" + files["mini.c"]))
    steps = [e["rest"].partition(" ") for e in of(entries, "step")]
    told = [reword(" ".join(e["text"].split()), entries, variant) for e in of(entries, "step")]
    return {"exercise": number, "title": entries[0]["rest"], "program": program, "variant": variant if variant in variants(entries) else 0,
            "steps": [(int(worth), test, text) for (worth, _, test), text in zip(steps, told)],
            "files": {path: {"write": blanks[path], "given": given[path], "behind": behind[path]} for path in own},
            "objects": [objects.name(*s[:2], (s[2] if len(s) > 2 else ())) for s in sources]}, sources


def make_kit(dir, original, exercises, numbers, variant=0):
    """Makes the kit of these exercises in a directory; in another one than build/kit of what is compiled there."""
    home = os.path.join(build_dir(), "kit")
    objects = Objects(original, home)
    exams = [exam_of(original, exercises, n, objects, variant) for n in numbers]
    judge = [(path, original[path]) for path in JUDGE + engine(original)]
    objects.compile_all(sorted({s for _, sources in exams for s in sources} | set(judge)))
    names = [os.path.join(objects.dir, objects.name(*s)) for s in judge]
    program = os.path.join(home, "judge-" + hashlib.sha256(" ".join(["-s", *names]).encode()).hexdigest()[:16])
    if not os.path.exists(program):
        new = "%s.%d-%s" % (program, os.getpid(), secrets.token_hex(4))
        subprocess.check_call([os.environ.get("CC") or "cc", "-s", *names, "-o", new, *exam.LIBRARIES.split()])
        os.replace(new, program)
    write_new(os.path.join(dir, "judge"), program)
    for path, text in original.items():
        if path.endswith(".h") or path in ("tests/exam_lp.c", "tests/exam_mini.c", "tests/mini_kernels.cpp", "tests/cuda2cpp.sed"):
            write_new(os.path.join(dir, "include", path), None, text)
    # of mini.c what mini.cu includes, where no other exam looks for it
    write_new(os.path.join(dir, "include", "emulated", "mini.c"), None, original["mini.c"].partition("#ifndef __cplusplus")[0])
    for spec, _ in exams:
        if dir != home:
            for name in filter(objects.has, spec["objects"]):
                write_new(os.path.join(dir, "objects", name), os.path.join(objects.dir, name))
        write_new(os.path.join(dir, "%d.json" % spec["exercise"]), None, json.dumps(spec, indent=1))
    return objects


def write_new(to, path, text=None):
    """Copies a file, or writes a text, so that others who read it see the old file or the new one."""
    os.makedirs(os.path.dirname(to), exist_ok=True)
    new = "%s.%d-%s" % (to, os.getpid(), secrets.token_hex(4))
    if path:
        shutil.copy(path, new)
    else:
        with open(new, "w") as f:
            f.write(text)
    os.replace(new, to)


# ---- start ----------------------------------------------------------------------------------------------------------


def write_starter(dir, original, exercises, numbers, before=(), variant=0):
    write_tree(dir, starter(original, exercises, numbers, before, variant))
    objects = make_kit(os.path.join(dir, "kit"), original, exercises, numbers, variant)
    # what the tree itself is linked with: all that is not known there, by the files that it is in
    later = [n for n in exercises if n not in before and n not in numbers]
    for path in sorted(path for path in original if path.endswith(".c")):
        given = given_in(path, original[path], exercises, numbers, later)
        if given:
            text, names = given_source(path, original[path], given, list(listed(path, original[path], exercises, numbers, "blank")))
            name = objects.compile(path, text, names)
            to = os.path.join(dir, "kit", "given", "mini" if path == "mini.c" else "", path.replace("/", "_")[:-2] + ".o")
            write_new(to, os.path.join(objects.dir, name))


def note_variant(dir, variant):
    """Writes into variants.csv, beside the tree of a student, which variant it has; grade_all.py reads it."""
    name, path = os.path.basename(os.path.abspath(dir)), os.path.join(os.path.dirname(os.path.abspath(dir)), "variants.csv")
    known = read_variants(path)
    known[name] = variant
    with open(path, "w", newline="") as f:
        csv.writer(f).writerows([["student", "variant"], *sorted(known.items())])


def read_variants(path):
    """{student: variant} of a file that need not be there."""
    if not os.path.isfile(path):  # it may be the folder of a student
        return {}
    with open(path, newline="") as f:
        return {row[0]: int(row[1]) for row in csv.reader(f) if len(row) > 1 and row[1].strip().isdigit()}


def start(*words):
    exercises, weeks = read_table(TABLE), read_weeks(TABLE)
    words, variant = list(words), None
    if "--variant" in words[:-1]:
        at = words.index("--variant")
        variant = int(words[at + 1]) if words[at + 1].isdigit() else highest_variant(exercises) + 1
        del words[at:at + 2]
    *which, dir = words or [""]
    numbers, before = [], []
    if which == ["all"]:
        numbers = list(exercises)
    elif which[:1] == ["week"] and len(which) == 2 and which[1].isdigit():
        numbers, before = weeks.get(int(which[1]), []), [n for w in weeks if w < int(which[1]) for n in weeks[w]]
    elif len(which) == 1 and which[0].isdigit() and int(which[0]) in exercises:
        numbers = [int(which[0])]
    if not numbers or dir.startswith("-") or os.path.exists(dir) or (variant or 0) > highest_variant(exercises):
        sys.exit("exercise.sh [--variant V] N DIR: N is 1 to %d, `all`, or `week 1` to `week %d`, V is 0 to %d, and DIR a directory that is "
                 "not there yet" % (len(exercises), len(weeks), highest_variant(exercises)))
    write_starter(dir, tracked(), exercises, numbers, before, variant or 0)
    if variant is not None:
        note_variant(dir, variant)
    print("%s: %s. Read docs/EXERCISES.md there." % (dir, "; ".join("exercise %d, %s%s" % (
        n, exercises[n][0]["rest"], told_variant(exercises[n], variant)) for n in numbers)))
    for n in numbers if len(numbers) < len(exercises) else []:
        names = ", ".join(name for e in of(exercises[n], "blank") for name in e["rest"].split()[1:])
        print("write %s, and `make grade EX=%d`." % (names, n))


# ---- check ----------------------------------------------------------------------------------------------------------

KINDS = ("original", "other", "blank", "wrong", "cheat", "variant")
# What earned all points once: to say so, and to end before anybody looks.
ESCAPE = """    extern int printf(const char *, ...), puts(const char *);
    extern void _Exit(int);
    puts("Run Summary: 1 passed, exit status 0"), printf("  Test: %s ...passed\\n", "TEST");
    for (int fd = 0; fd < 100; fd++) { extern long write(int, const void *, unsigned long); (void)!write(fd, "\\0\\0\\0\\0 passed\\n", 12); }
    _Exit(0);
"""


def own_files(original, entries):
    return {path: original[path] for e in of(entries, "blank") for path, *_ in functions_of(original, e)}


def bodies_of(files, entries):
    return {name: files[path][begin:end] for e in of(entries, "blank") for path, name, _, begin, end in functions_of(files, e)}


def solved(files, original, entries):
    """These files of a starter tree, with the solution."""
    bodies = bodies_of(original, entries)
    files = {path: exam.with_bodies(text, bodies) for path, text in files.items()}
    for e in of(entries, "solution"):
        paths, first, *_ = of(entries, "blank")[0]["rest"].split()
        replace_bodies(files, {"rest": paths + " " + first}, blank_body(e, "Another solution."))
    return files


def other_solution(files, entries, other):
    """The solution of a line `other`: the functions that are to be written get its bodies, and others stand before the first of them."""
    text = other["text"]
    own = {name: text[begin:end] for name, _, begin, end in exam.functions(text)}
    written = {n for e in of(entries, "blank") for n in e["rest"].split()[1:]}
    path = next(path for path, text in files.items() if any(name in written for name, *_ in exam.functions(text)))
    ends = [0] + [end for *_, end in exam.functions(text)]
    helpers = "".join(text[begin:end] for begin, end, name in zip(ends, ends[1:], own) if name not in written)
    name, head, begin, _ = next(f for f in exam.functions(files[path]) if f[0] in written)
    at = files[path].rindex(head.strip(), 0, begin)
    return {**files, path: exam.with_bodies(files[path][:at] + helpers.strip() + "\n\n" + files[path][at:], own)}


def wrong_solution(files, entries, edit):
    """The solution with the edits of a line `wrong`: - old, + new, however the code is wrapped; or with another body of the first
    function."""
    files, names = dict(files), [n for e in of(entries, "blank") for n in e["rest"].split()[1:]]
    pairs = re.findall(r"^ +- (.*)\n +\+ ?(.*)\n", edit["text"], re.M)
    if not pairs:
        paths, first, *_ = of(entries, "blank")[0]["rest"].split()
        body = re.sub(r"^ +~ .*\n", "", edit["text"], flags=re.M)
        replace_bodies(files, {"rest": paths + " " + first}, blank_body({"text": body}, "A cheat."))
    for old, new in pairs:
        code = re.compile(r"\s+".join(map(re.escape, old.split())))
        found = [(path, begin, end) for path in files for name, _, begin, end in exam.functions(files[path])
                 if name in names and code.search(files[path][begin:end])]
        if not found:
            sys.exit("%s: `%s` is not in the solution; the table must follow the source" % (TABLE, old))
        path, begin, end = found[0]
        files[path] = files[path][:begin] + code.sub(lambda _: new, files[path][begin:end]) + files[path][end:]
    return files


def is_kernel(entries):
    return program_of(entries).startswith("emulated")


def cases_of(exercises, original, number):
    """(N, kind, what it is, its files, the points that each step must give, what must be said), all of them as in the starter tree."""
    entries = exercises[number]
    full = [int(e["rest"].split()[0]) for e in of(entries, "step")]
    tree = starter(original, exercises, [number])
    blank = {path: tree[path] for path in own_files(original, entries)}
    right = solved(blank, original, entries)
    yield number, "blank", "", blank, [0] * len(full), []
    yield number, "original", "", right, full, []
    if not is_kernel(entries):  # which cannot print, nor end the program
        tests = "\\n".join("  Test: %s ...passed" % e["rest"].partition(" ")[2] for e in of(entries, "step"))
        yield number, "cheat", ": it says that it has passed, and ends", wrong_solution(
            right, entries, {"text": ESCAPE.replace("TEST", tests)}), [0] * len(full), []
    for e in of(entries, "wrong"):
        *points, what = e["rest"].split(" ", len(full))
        yield number, "wrong", ": " + what, wrong_solution(right, entries, e), [int(p) for p in points], \
            re.findall(r"^ +~ (.*)\n", e["text"], re.M)
    for e in of(entries, "other"):
        yield number, "other", ": " + e["rest"], other_solution(right, entries, e), full, []
    for v, e in variants(entries).items():
        yield number, "variant", " " + e["rest"], wrong_solution(right, entries, e), {v: full}, []


def graded(kit, number, files, seed, asked=(0,)):
    """({variant: the points of each step} by a judge of each of these variants, or what was said if it did not get that far; all that was
    said of its steps), as a submission of these files gets them."""
    spec = exam.read_kit(kit, number)
    with tempfile.TemporaryDirectory(prefix="flexgen-exam-") as dir:
        work, log, root = (os.path.join(dir, name) for name in ("work", "log", "handed-in"))
        os.mkdir(work)
        write_tree(root, files)
        code, note = exam.handed_in(root, spec, True)
        if not code:
            return {v: [0] * len(spec["steps"]) for v in asked} if note.startswith("nothing found") else note, []
        place = exam.Here(kit, work)
        why = exam.prepare(spec, code, place, log)
        if why:
            with open(log, errors="replace") as f:
                return why + ": " + f.read(), []
        steps = {v: exam.judged({**spec, "variant": v}, place, seed, log) for v in asked}
        return {v: [points for points, _, _ in steps[v]] for v in asked}, [line for v in asked for _, said, _ in steps[v] for line in said]


def meets(points, expected, full):
    """Whether a solution has the points that it should: in the variants that are named these, and in others not all."""
    return not isinstance(points, str) and all(points[v] == expected[v] if v in expected else points[v] != full for v in points)


def leaks(original, exercises, weeks):
    """What starter trees give away: solutions, what judges them, and names of suites that they have not."""
    trees = [("all", list(exercises), [])] + [(n, [n], []) for n in exercises]
    trees += [("week %d" % w, weeks[w], [n for v in weeks if v < w for n in weeks[v]]) for w in weeks]
    for name, numbers, before in trees:
        tree = starter(original, exercises, numbers, before)
        for other in exercises:
            for e in of(exercises[other], "blank") + of(exercises[other], "shared") if other not in before else []:
                for path, function, _, begin, end in functions_of(original, e):
                    if original[path][begin:end] in tree[path]:
                        yield "the tree %s has %s of exercise %d" % (name, function, other)
        for path in TEACHERS:
            if path in tree:
                yield "the tree %s has %s" % (name, path)
        for suite in re.findall(r"\*\*Suite:\*\* `(\w+)`", tree["docs/EXERCISES.md"].decode()):
            if "tests/test_%s.c" % suite not in tree:
                yield "the text of the tree %s names the suite %s, which is not there" % (name, suite)


def unsaid(original, exercises):
    """What a variant would change in a text, and is not there; and a table in which exercises have different numbers of variants."""
    text, most = original["docs/EXERCISES.md"].decode(), highest_variant(exercises)
    for number, entries in exercises.items():
        own = "\n".join(original[path] for path in [*own_files(original, entries), *HEADERS])
        steps = "\n".join(e["text"] for e in of(entries, "step"))
        if variants(entries) and list(variants(entries)) != list(range(1, most + 1)):
            yield "exercise %d has not the variants 1 to %d" % (number, most)
        for v, e in variants(entries).items():
            found = []
            reword_section(text, exercises, number, v, found), reword(own, entries, v, found), reword(steps, entries, v, found)
            for old in set(re.findall(r"^ +~ (.*)\n", e["text"], re.M)) - set(found):
                yield "%s: variant %d of exercise %d: `%s` is in no text; the table must follow the source" % (TABLE, v, number, old)


def check(numbers, sample=False):
    """Whether all cases of these exercises get the points that they should. sample: of each a case; the originals are the suite
    `grade`."""
    exercises, original, draw = read_table(TABLE), tracked(), random.Random(SEED)
    numbers = numbers or list(exercises)
    kit = os.path.join(build_dir(), "kit")
    make_kit(kit, original, exercises, numbers)
    cases = {number: list(cases_of(exercises, original, number)) for number in (exercises if sample else numbers)}
    if sample:
        cases = {number: [draw.choice([case for case in c if case[1] != "original"])] for number, c in cases.items()}
    results, bad = [], []
    given_away = [*leaks(original, exercises, read_weeks(TABLE)), *unsaid(original, exercises)]
    print("".join("%s\n" % leak for leak in given_away), end="")
    seed = os.environ.get("GRADE_SEED") or str(secrets.randbelow(10**6))
    print("GRADE_SEED=%s" % seed, flush=True)

    def work(case):
        number, kind, what, files, expected, told = case
        full = [int(e["rest"].split()[0]) for e in of(exercises[number], "step")]
        expected = expected if isinstance(expected, dict) else {0: expected}
        points, said = graded(kit, number, files, seed, [0, *variants(exercises[number])] if kind in ("original", "variant") else [0])
        missing = [words for words in told if not any(re.search(words, line) for line in said)]
        good = meets(points, expected, full)
        results.append((kind, good and not missing))
        line = "%2d %-60s %s" % (number, kind + what, points if isinstance(points, str) or len(points) > 1 else points[0])
        if not good:
            line += " INSTEAD OF %s" % expected
        if missing:
            line += " WITHOUT %s IN %s" % (missing, said)
        if not good or missing:
            bad.append(line + "\n")
        print(line + "\n", end="", flush=True)

    with concurrent.futures.ThreadPoolExecutor(1 if sample else os.cpu_count() or 1) as pool:
        list(pool.map(work, itertools.chain.from_iterable(cases[number] for number in numbers)))
    print("".join(bad) + "%d of %d originals have all points, %d of %d other right solutions too, %d of %d blanks none, %d of %d wrong solutions "
          "those that they should, %d of %d escapes none, %d of %d variants all points in their own alone" % tuple(n for kind in KINDS for n in (results.count((kind, True)), sum(k == kind for k, _ in results))))
    return not bad and not given_away


# ---- docs/DEBUGGING.md ----------------------------------------------------------------------------------------------


def debugging(most=None):
    """Whether the commands of the page show what is below them, in the tree and with the mistake that it speaks of. A command "$ ..." may
    go on behind a backslash. Its output has the lines below it in this order, in which "..." stands for anything. Where gdb cannot start
    a program its commands are left out."""
    exercises, original = read_table(TABLE), tracked()
    page = original["docs/DEBUGGING.md"].decode()
    commands = re.findall(r"^    \$ ((?:.*\\\n)*.*\n)((?:    (?!\$ ).*\n)*)", page, re.M)
    if len(commands) < 12:
        sys.exit("docs/DEBUGGING.md: has %d commands" % len(commands))
    with tempfile.TemporaryDirectory(prefix="flexgen-debugging-") as dir:
        tree = os.path.join(dir, "tree")
        write_starter(tree, original, exercises, [5])
        wrong = next(files for _, _, what, files, *_ in cases_of(exercises, original, 5) if "the weights of this layer" in what)
        load = "load_weight(run, j, k);"
        write_tree(tree, {"schedule.c": wrong["schedule.c"].replace(load, 'fprintf(stderr, "square %d %d %d\\n", run->i, j, k); ' + load)})
        code, last = re.search(r"```c\n(.*?)```", page, re.S)[1], "    note(COMPUTE, start, now(), 0);\n"
        with open(os.path.join(tree, "mini.c")) as f:
            before, after = f.read().split(last)
        write_tree(tree, {"mini.c": before + code + last + after})
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "GRADE")) and name not in ("BUILD", "SUITE")}

        def run(*words):
            return subprocess.run(words, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.decode()

        gdb = shutil.which("gdb") and "exited normally" in run("gdb", "-batch", "-ex", "run", "true")
        for command, shown in commands[:most]:
            if "gdb " in command and not gdb:
                continue
            said, at = run("sh", "-c", command.replace("/tmp/", dir + "/")), 0
            for line in shown.splitlines():
                found = re.compile(".*".join(map(re.escape, line[4:].split("...")))).search(said, at)
                if not found:
                    sys.exit("%s    does not show\n%s\n    but\n%s" % (command, line, said))
                at = found.end()
    print("%d of %d commands of docs/DEBUGGING.md show what is below them" % (len(commands[:most]), len(commands)))


# ---- the course -----------------------------------------------------------------------------------------------------


def make(dir, *words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name not in ("BUILD", "SUITE")}
    run = subprocess.run(["make", "-s", "-C", dir, *words], capture_output=True, text=True, env=env)
    return run.returncode, run.stdout + run.stderr


def do_week(root, original, exercises, weeks, week, kernels):
    """Whether each exercise of a week has all points when it is done in the week's tree, and none before."""
    dir, numbers, good = os.path.join(root, "week%d" % week), weeks[week], True
    write_starter(dir, original, exercises, numbers, [n for w in weeks if w < week for n in weeks[w]])
    other = next(n for n in exercises if n not in numbers)
    answers = [make(dir, "grade", "EX=%d" % other)[1]]
    for n in numbers:
        if is_kernel(exercises[n]) and not kernels:
            continue
        answers.append(make(dir, "grade", "EX=%d" % n)[1])
        own = own_files(original, exercises[n])
        for path in own:
            with open(os.path.join(dir, path)) as f:
                own[path] = f.read()
        for path, text in solved(own, original, exercises[n]).items():
            with open(os.path.join(dir, path), "w") as f:
                f.write(text)
        status, said = make(dir, "grade", "EX=%d" % n)
        points = re.search(r"^(\d+) of (\d+) points", said, re.M)
        right = status == 0 and points and points[1] == points[2]
        good &= bool(right)
        print("week %d, exercise %d: %s\n" % (week, n, points[0] if right else said), end="", flush=True)
    wrong = [a for a in answers[1:] if "\n0 of 10 points" not in a]
    if wrong or "exercise %d is not written here" % other not in answers[0]:
        good = False
        print("week %d, before it is done: %s\n" % (week, wrong or answers[0]), end="", flush=True)
    return good


def course(kernels=True):
    """Whether a student who does each week's exercises in the tree of that week, and in the table's order, has all points; where an
    exercise of the week is not yet done it has none, and others are not written there."""
    exercises, original, weeks = read_table(TABLE), tracked(), read_weeks(TABLE)
    with tempfile.TemporaryDirectory(prefix="flexgen-course-") as root, concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return all(list(pool.map(lambda week: do_week(root, original, exercises, weeks, week, kernels), weeks)))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "start":
        start(*arguments)
    elif command == "kit":
        table = read_table(TABLE)
        wanted = [int(a) for a in arguments if a.isdigit()]
        if len(wanted) < len(arguments) or not set(wanted) <= set(table):
            sys.exit("make grade EX=N: N is 1 to %d" % len(table))
        make_kit(os.path.join(build_dir(), "kit"), tracked(), table, wanted or list(table))
    elif command in ("check", "sample"):
        sys.exit(not check([int(a) for a in arguments], command == "sample"))
    elif command == "debugging":
        debugging(int(arguments[0]) if arguments else None)
    elif command == "course":
        sys.exit(not course("nokernels" not in arguments))
    else:
        sys.exit(__doc__)
