#!/usr/bin/env python3
"""Grades the exercises of docs/EXERCISES.md that are written in this tree.

    exam.py N       the points of exercise N (make grade EX=N)

A kit, the directory kit/ (in the complete repository build/kit), has for each exercise N.json, the objects that a student's code is
linked with, and the judge, which asks the program that comes out (tests/test_grade.c). What is graded is the file that has the functions
to be written, whole, with what else it has: helpers, headers of the standard library. Other exercises' functions in it come from the kit.

GRADE_SEED fixes the cases that are drawn; then they are not told. GRADE_SECONDS is how long a student's code may take for a question.
With GRADE_SHOW=1 a step that fails shows what was printed for its first case that is wrong. GRADE_CFLAGS are more flags for the
student's files. With GRADE_KEEP=1 the program, for a debugger, and the question of the first wrong case stay in build/examN
(docs/DEBUGGING.md).
"""
import functools
import glob
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

SECONDS = 60  # that a step may take, of which the judge gives an exam 50
BUILD_SECONDS = 120
MOST_BYTES = 1 << 20  # of a file that is handed in
MOST_SHOWN = 100  # lines of what was printed
MOST_PLACES = 20000  # that are looked at in what a student hands in

# ---- functions in C -------------------------------------------------------------------------------------------------

SKIPPED = re.compile(r"""
    /\*.*?(?:\*/|\Z)  |  //[^\n]*
  | R"([^()\\\s]{0,16})\(.*?(?:\)\1"|\Z)  |  "(?:\\.|[^"\\\n])*"?  |  '(?:\\.|[^'\\\n])*'?
  | ^[ \t]*\#(?:[^\n\\]|\\.)*""", re.S | re.M | re.X)
MARK = re.compile(r"[{}();=]|\w+")
NO_NAMES = ("__launch_bounds__", "__attribute__", "__attribute", "_Alignas", "alignas")


def code_of(text):
    """The text with blanks in the place of comments, strings and lines of the preprocessor."""
    return SKIPPED.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


@functools.lru_cache(maxsize=512)  # the same files are looked at over and over
def functions(text):
    """(name, head, begin, end) of every function: text[begin:end] is its body in braces. One that does not end is none."""
    return list(all_functions(text))


def all_functions(text):
    code = code_of(text)
    depth = parens = start = 0
    named = found = last = None
    assigned = False
    for m in MARK.finditer(code):
        mark = m.group()
        if depth:
            depth += {"{": 1, "}": -1}.get(mark, 0)
            if not depth:
                if found:
                    yield (*found, m.end())
                start, named, found, last, assigned = m.end(), None, None, None, False
        elif mark == "(":
            if not parens and last and last not in NO_NAMES:
                named = named or last
            parens += 1
        elif mark == ")":
            parens = max(0, parens - 1)
        elif parens:
            continue
        elif mark in ";}":
            start, named, last, assigned = m.end(), None, None, False
        elif mark == "=":
            assigned = True
        elif mark == "{":
            head = code[start:m.start()]
            first = head.split()[0] if head.split() else ""
            if not named and first in ("extern", "namespace"):  # what is in these braces is outside of all functions
                start, last = m.end(), None
                continue
            found = (named, head, m.start()) if named and not assigned and first != "typedef" else None
            depth = 1
        else:
            last = mark


def bodies_in(text, names):
    """{name: body} of those functions that are there."""
    return {name: text[begin:end] for name, _, begin, end in functions(text) if name in names}


def with_bodies(text, bodies):
    parts, done = [], 0
    for name, _, begin, end in functions(text):
        if name in bodies:
            parts += [text[done:begin], bodies[name]]
            done = end
    return "".join([*parts, text[done:]])


def plain(body):
    """A body without its comments and blanks, to be compared."""
    return "".join(re.sub(r"/\*.*?(?:\*/|\Z)|//[^\n]*|(\"(?:\\.|[^\"\\\n])*\"?)", lambda m: m[1] or " ", body, flags=re.S).split())


# ---- what is handed in ----------------------------------------------------------------------------------------------


def read_kit(kit, number):
    with open(os.path.join(kit, "%d.json" % number)) as f:
        return json.load(f)


def places(root):
    """The directories and files of a submission, its top first: no links, and nothing that was built."""
    waiting, seen = [""], 0
    while waiting:
        dir = waiting.pop(0)
        try:
            entries = sorted(os.scandir(os.path.join(root, dir)), key=lambda e: e.name)
        except OSError:
            continue
        for e in entries:
            seen += 1
            if seen > MOST_PLACES:
                return
            at = os.path.join(dir, e.name)
            if e.is_dir(follow_symlinks=False):
                if e.name not in ("build", "kit", ".git") and at.count(os.sep) < 5:
                    waiting.append(at)
            elif e.is_file(follow_symlinks=False):
                yield at


def read_file(path):
    """The text of a plain file, or None."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > MOST_BYTES:
        os.close(fd)
        return None
    with open(fd, "rb") as f:
        return f.read().decode("utf-8", "replace").replace("\r\n", "\n").lstrip("\ufeff")


def state(text, spec):
    """Of a file the functions that were written, and those that are not there."""
    bodies = bodies_in(text, spec["write"])
    written = [n for n, body in bodies.items() if plain(body) not in (spec["write"][n], "{}") and "given_" + n not in body]
    return written, [n for n in spec["write"] if n not in bodies]


def choose(number, path, found):
    """Of files with something written, {place: text}, one; or None, and why not."""
    if len({plain(text) for text in found.values()}) == 1:
        return min(found, key=lambda at: (at.count(os.sep), at)), None
    own = [at for at in found if at == path]
    own = own or [at for at in found if re.search(r"(?<!\d)0*%d(?!\d)" % number, os.path.dirname(at))]
    if len(own) == 1:
        return own[0], None
    return None, "%s is there more than once: %s" % (path, ", ".join(sorted(found)[:3]))


def handed_in(root, exam, whole_tree=False):
    """({path: text to be compiled}, a note) of an exercise; or (None, why there is nothing to be graded). In a whole tree a file
    has one place; elsewhere it may lie in a folder of its own, or without its own folder."""
    files, missing = {}, []
    for path, spec in exam["files"].items():
        name = os.path.basename(path)
        every = [path] if whole_tree else [at for at in places(root) if os.path.basename(at) == name]
        own = [at for at in every if ("/" + at).endswith("/" + path)] or every
        texts = {at: read_file(os.path.join(root, at)) for at in own}
        texts = {at: text for at, text in texts.items() if text is not None}
        if not texts:
            return None, "nothing found: there is no %s" % path
        states = {at: state(text, spec) for at, text in texts.items()}
        written = {at: texts[at] for at in texts if states[at][0]}
        if not written:
            gone = min((states[at][1] for at in texts), key=len)
            if any(re.search(r"\b%s\b" % n, text) for n in gone for text in texts.values()):
                return None, "nothing found: %s in %s has no end; a brace is missing" % (", ".join(gone), path)
            names, one = gone or list(spec["write"]), len(gone or spec["write"]) == 1
            unwritten = "in %s is as it was given out" % path if one else "in %s are as they were given out" % path
            absent = ("is not in " if one else "are not in ") + path
            return None, "nothing found: %s %s" % (", ".join(names), absent if gone else unwritten)
        at, why = choose(exam["exercise"], path, written)
        if not at:
            return None, "refused: " + why
        files[path] = with_bodies(texts[at], spec["given"])
        files[path] += "" if "own_" + min(spec["write"]) + "(" in files[path] else spec["behind"]
        missing += [n for n in spec["write"] if n not in states[at][0]]
    return files, "without " + " ".join(missing) if missing else ""


# ---- an exam --------------------------------------------------------------------------------------------------------


def cuda_include():
    """The headers of the CUDA toolkit, for the emulation of a GPU; or None."""
    nvcc = shutil.which("nvcc")
    dirs = [os.environ.get("CUDA_INCLUDE"), os.path.join(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "include"),
            nvcc and os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "include"), "/usr/local/cuda/include"]
    return next((d for d in dirs if d and os.path.isfile(os.path.join(d, "cublasLt.h"))), None)


# --wrap: the judge and exam_engine see the ops that the sweep posts and the host device carries out (tests/squares.c).
LIBRARIES = "-lcjson -lcunit -lm -lpthread -ldl -Wl,--wrap=host_run,--wrap=post"
NO_EMULATION = "this is graded in an emulation of a GPU, which needs the headers of the CUDA toolkit, here and where the kit is made"


def can_be_graded(exam, kit):
    """Whether the emulation that an exam needs is in its kit, and can be compiled with here."""
    whole = all(os.path.exists(os.path.join(kit, "objects", name)) for name in exam["objects"])
    return not exam["program"].startswith("emulated") or bool(whole and cuda_include())


def build_script(exam, kit, work, more):
    """The shell's commands that make the program `exam` of the files in `work`, with more flags."""
    c, objects = [], " ".join(exam["objects"])
    include = "-I%s -I%s/include" % (work, kit)
    flags = "-O1 -w -std=c11 -D_GNU_SOURCE " + include
    libraries = LIBRARIES if exam["program"] == "exam_engine" else LIBRARIES.partition(" -Wl")[0]
    if exam["program"] == "exam_engine":
        sources = ["%s/%s" % (work, path) for path in exam["files"]]
    elif exam["program"].startswith("emulated"):
        cu, = exam["files"]
        source = "%s/flexgen.cpp" % work
        if cu == "mini.cu":
            source = "-DGPU -DCUDA_CPU_TABLE=0 -DMINI_CU='\"mini.cpp\"' -I%s/include/emulated %s/include/tests/mini_kernels.cpp" % (kit, kit)
        c.append("sed -E -f %s/include/tests/cuda2cpp.sed %s/%s >%s/%s" % (kit, work, cu, work, cu.replace(".cu", ".cpp")))
        c.append("$CXX -std=c++17 -O0 -w -fno-strict-aliasing %s -isystem %s -include %s/include/tests/cuda_cpu.h -c %s "
                 "-o %s/0.o %s" % (include, cuda_include(), kit, source, work, more))
        sources = []
    else:
        sources = ["%s/include/tests/%s.c" % (kit, exam["program"])]
        libraries = "-lm -lpthread"
        flags = flags.replace("-O1", "-O1 -march=native")  # mini.c runs a whole model; -O3 takes three times as long to compile
    beside = ["-iquote %s/include/%s" % (kit, os.path.dirname(path) or ".") for path in exam["files"]]
    for i, source in enumerate(sources):
        c.append("$CC %s %s %s -c %s -o %s/%d.o" % (flags, more, beside[i], source, work, i))
    linker = "$CXX -rdynamic" if exam["program"].startswith("emulated") else "$CC"
    c.append("cd %s/objects" % kit)
    c.append("%s %s %s/[0-9].o %s -o %s/exam %s" % (linker, more, work, objects, work, libraries))
    return "CC=%s CXX=%s; " % (shlex.quote(os.environ.get("CC") or "cc"), shlex.quote(os.environ.get("CXX") or "c++")) + " &&\n".join(c)


class Here:
    """Where an exam is built and run: this computer, without any limits; here one may ask for more flags."""

    def __init__(self, kit, work, flags=""):
        self.flags = flags
        self.kit, self.work, self.inside = os.path.abspath(kit), work, (os.path.abspath(kit), work)
        self.judge = os.path.join(self.kit, "judge")

    def words(self, script, writes):
        return ["sh", "-c", script]

    def own(self):
        pass


def build(exam, place, log):
    """None, or the compiler's message, and in a line where it first stopped."""
    kit, work = place.inside
    env = {k: v for k, v in os.environ.items() if not k.startswith("GRADE_")}
    with open(log, "ab") as out:
        run = subprocess.Popen(place.words(build_script(exam, kit, work, place.flags), True), stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env,
                               start_new_session=True)
        try:
            status = run.wait(BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return "compiling took more than %d s" % BUILD_SECONDS
    if not status:
        return None
    with open(log, errors="replace") as said:
        at = re.search(r"^(?:\S*/)?([\w.]+):(\d+):\d+: (?:fatal )?error:", said.read(MOST_BYTES), re.M)
    known = [os.path.basename(path) for path in exam["files"]]
    return "it does not compile: %s, line %s" % at.groups() if at and at[1] in known else "it does not compile, or not link"


def run_steps(program, tests, seed, command=None, log=None, variant=0):
    """Of each test whether it passed, and if not, what the judge said, and where in the log is what was printed for the first wrong
    case."""
    env = dict(os.environ, GRADE_SEED=str(seed), GRADE_VARIANT=str(variant))
    env.update({"GRADE_EXAM": command, "GRADE_LOG": log} if command else {})
    only = [word for test in tests for word in ("--only", test)]
    try:
        run = subprocess.run([program, *only], capture_output=True, text=True, errors="replace", timeout=SECONDS * len(tests),
                             stdin=subprocess.DEVNULL, env=env)
        said = run.stdout
    except subprocess.TimeoutExpired:
        said = ""
    results = {test: (False, ["the judge ended before this step"], (0, 0)) for test in tests}
    for part in re.split(r"^  Test: ", said, flags=re.M)[1:]:
        test = part[:part.index(" ...")]
        passed = part.startswith(test + " ...passed")
        found = re.findall(r"^ *Found: (.*)$", part, re.M)[:3] or re.findall(r"^ +\d+\. (\S+  - .*)$", part, re.M)[:1]
        printed = re.search(r"^    Printed: (\d+) (\d+)$", part, re.M)
        results[test] = (passed, found, (int(printed[1]), int(printed[2])) if printed else (0, 0))
    return [results[test] for test in tests]


def prepare(exam, files, place, log):
    """Builds the program of an exam in a directory that has nothing else. Returns what the compiler said, or None."""
    for path, text in files.items():
        to = os.path.join(place.work, path)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        with open(to, "w", encoding="utf-8") as f:
            f.write(text)
    place.own()
    if not can_be_graded(exam, place.kit):
        return NO_EMULATION
    return build(exam, place, log)


def judged(exam, place, seed, log):
    """[(points, what was said, where in the log is what was printed)] of each step, as the judge has the exam's variant."""
    run = shlex.join(place.words("exec %s/exam" % place.inside[1], False))
    results = run_steps(place.judge, [test for _, test, _ in exam["steps"]], seed, run, log, exam["variant"])
    return [(worth if passed else 0, said, printed) for (worth, _, _), (passed, said, printed) in zip(exam["steps"], results)]


def grade(exam, files, place, seed, log):
    """The same from the files on; or what the compiler said."""
    return prepare(exam, files, place, log) or judged(exam, place, seed, log)


# ---- make grade -----------------------------------------------------------------------------------------------------


def print_printed(log, begin, end):
    """Shows lines of the log, marked so that nobody takes them for the grade's."""
    with open(log, "rb") as f:
        f.seek(begin)
        lines = f.read(end - begin).decode("utf-8", "replace").splitlines()
    print("    your code, and the program around it, printed %d lines for the first case that is wrong%s" % (
        len(lines), ", of which these are the first %d:" % MOST_SHOWN if len(lines) > MOST_SHOWN else ":" if lines else ""))
    for line in lines[:MOST_SHOWN]:
        print("    | " + "".join(c if c.isprintable() else "?" for c in line.expandtabs()))


def print_grade(exam, seed):
    kit = kit_dir()
    log = os.path.join(os.environ.get("BUILD", "build"), "exam.log")
    os.makedirs(os.path.dirname(log), exist_ok=True)
    variant = ", variant %d" % exam["variant"] if exam["variant"] else ""
    told = "" if "GRADE_SEED" in os.environ else " (cases of GRADE_SEED=%s)" % seed
    print("exercise %d, %s%s%s" % (exam["exercise"], exam["title"], variant, told))
    files, note = handed_in(".", exam, True)
    if note:
        print("  %s" % note)
    nothing = [(0, [], (0, 0))] * len(exam["steps"])
    steps = nothing
    if files:
        open(log, "w").close()
        with tempfile.TemporaryDirectory(prefix="flexgen-exam-") as work:
            flags = os.environ.get("GRADE_CFLAGS", "")
            if os.environ.get("GRADE_KEEP"):
                work = os.path.abspath(os.path.join(os.path.dirname(log), "exam%d" % exam["exercise"]))
                shutil.rmtree(work, ignore_errors=True)
                os.mkdir(work)
                os.environ["GRADE_QUESTION"] = os.path.join(work, "question")
                flags += " -g -O1" if exam["program"] == "exam_mini" else " -g -O0"  # mini.c runs a whole model
            steps = grade(exam, files, Here(kit, work, flags), seed, log)
    failed = isinstance(steps, str)
    if failed:
        print("  %s. The compiler says:" % steps)
        with open(log, errors="replace") as said:
            print("".join("    " + line for line in said.readlines()[:20]), end="")
        steps = nothing
    following, points, most = None, sum(p for p, _, _ in steps), sum(worth for worth, _, _ in exam["steps"])
    for i, ((worth, test, expected), (got, said, printed)) in enumerate(zip(exam["steps"], steps), 1):
        print("  step %d: %d of %d points: %s" % (i, got, worth, test))
        if got < worth:
            following = following or "next: step %d, %s" % (i, test)
            print("    expected: %s" % expected)
            print("".join("    found: %s\n" % s for s in said), end="")
            if os.environ.get("GRADE_SHOW") and said:
                print_printed(log, *printed)
    if files and not failed and os.path.getsize(log):
        print("what your code printed is in %s" % log)
    print("%d of %d points%s" % (points, most, "; " + following if following else ""))
    return points == most


def kit_dir():
    return "kit" if os.path.isdir("kit") else os.path.join(os.environ.get("BUILD", "build"), "kit")


def main(number):
    kit = kit_dir()
    here = sorted(int(os.path.basename(path)[:-5]) for path in glob.glob(os.path.join(kit, "[0-9]*.json")))
    if not number.isdigit() or int(number) not in here:
        sys.exit("exercise %s is not written here. make grade EX=N: the exercises of this tree are %s"
                 % (number or "?", ", ".join(map(str, here))))
    exam = read_kit(kit, int(number))
    if not can_be_graded(exam, kit):
        sys.exit(NO_EMULATION)
    return print_grade(exam, os.environ.get("GRADE_SEED") or str(secrets.randbelow(10**6)))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(not main(sys.argv[1]))
