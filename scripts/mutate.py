#!/usr/bin/env python3
"""Breaks the program in one line at a time, and says which suite sees it, or that none does: a hole in the tests, or a line that
no test can see. Without it a green `make test` says little about what the tests hold.

    mutate.py [--seed S] [--count N] [--files PATTERN] [--only I] [--jobs J] [--limit SECONDS] [--planted] [VARIABLE=VALUE...]

The lines of the program are shuffled by the seed, and each gets one change. N are tried of those that compile and whose object
differs from the original's. The suites that are run are those that use the file, by the symbols of their objects: the one with
the file's name, then by how many files a call goes through, then the quicker; NEAREST of them, and those of FAR. A red suite ends
it. One that takes longer than SECONDS and five times what it takes otherwise hangs, and has seen it. Of a suite that is red
without a mutation other tests have to fail.

--only I repeats mutation I of that seed. --planted also tries two of which is known what they give, and fails if they do not.
What has a = goes to make. All happens in copies of the tree, below TMPDIR. Left out are tables of data, headers, checks that only
a bug could fail (CHECK), and what cannot be built here. Needs Python's standard library, 3.8 or later, and nm.
"""
import argparse
import concurrent.futures
import fnmatch
import glob
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import size

PATTERNS = ["*.c", "branches/*.c", "base/*.c", "io/*.c", "device/*.c", "cost/*.c", "app/*.c", "flexgen.cu"]
NO_PROGRAM = ["mini.c", *size.DATA]
NO_SUITE = ["exercises", "mini", "summary", "gpu", "tour"]  # of scripts, of mini.c, or that all sources are those of a page
NEAREST, FAR = 8, ["schedule", "policy", "cli"]
# Files that the suites do not link: what is built of them, the last of which is compared, and their suites.
BUILT = {"flexgen.cu": ["build/flexgen_cpu.cpp", "build/flexgen_cpu.o"], "device/pipeline.c": ["build/flexgen_mpi.so"]}
SUITES = {"flexgen.cu": ["reverse/cuda", "reverse/lanes", "random/schedule"], "device/pipeline.c": ["pipeline", "world", "cli"]}
WARNINGS = "WERROR=-Werror=int-conversion -Werror=incompatible-pointer-types"  # what a compiler refuses needs no test
PLANTED = [  # file, the begin of a line, its replacement, whether a suite can see it: one is about speed alone
    ("base/team.c", "static const double PATIENCE = 2e-4;", "static const double PATIENCE = 1e-4;", False),
    ("lp.c", "    t->basic[r] = c;", "    t->basic[r] = r;", True),
]

# ---- mutations ------------------------------------------------------------------------------------------------------

PAIRS = [(" < ", " <= "), (" > ", " >= "), (" == ", " != "), (" + ", " - "), (" * ", " / "), (" && ", " || "), ("++", "--"),
         (" += ", " -= "), ("true", "false"), (" << ", " >> "), (" & ", " | ")]
OTHER = {**dict(PAIRS), **{b: a for a, b in PAIRS}, " % ": " / "}
OPERATOR = re.compile("|".join(rf"\b{o}\b" if o.isalpha() else re.escape(o) for o in sorted(OTHER, key=len, reverse=True)))
COMMUTE = ["imin", "imax", "fmin", "fmax", "xcalloc", "fwrite", "fread"]  # functions that give the same with two arguments swapped
UNSEEN = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.S)
# a call, an assignment or a jump of one line, and no declaration: that would have a space behind its first word
STATEMENT = re.compile(r"\s+[\w.>\[\]*-]+(\(.*\)|\+\+|--)?( [-+*/|&]?= .*)?;")


def masked(text):
    """The text without comments, and with strings of which nothing matches a pattern; every place stays where it is."""
    return UNSEEN.sub(lambda m: re.sub(r"[^\n]", " " if m.group()[0] == "/" else '"', m.group()), text)


def parts(code, begin):
    """(begin, end) of what stands between the commas of the bracket that opens before begin; [] if it closes on another line."""
    found, depth = [], 0
    for at in range(begin, len(code)):
        depth += (code[at] in "([{") - (code[at] in ")]}")
        if depth < 0 or code[at] == "," and depth == 0:
            found.append((begin, at))
            begin = at + 1 + code[at + 1:].startswith(" ")
        if depth < 0:
            return found
    return []


def edits(line, code, before):
    """{kind: [(begin, end, replacement)]} of one line; code is the line masked, and before the code before it."""
    found = {}

    def add(kind, begin, end, new):
        found.setdefault(kind, []).append((begin, end, new))

    for match in OPERATOR.finditer(code):
        if not ("for (" in code and match.group() in ("++", "--")):  # which would hang, and tell nothing
            add("operator", *match.span(), OTHER[match.group()])
    for match in re.finditer(r"(?<![\w.])\d+(?![\w.])", code):
        add("off by one", *match.span(), str(int(match.group(), 0 if match.group() == "0" else 10) + 1))
    for match in re.finditer(r"!(?=[\w(])", code):
        add("no !", *match.span(), "")
    for match in re.finditer(r"(?<=[{ ])\.\w+ = [^,{}()]+(, |(?=}))", code):
        add("no field", *match.span(), "")
    for match in re.finditer(r"\b(\w+) ?\(", code):
        places = parts(code, match.end())
        if places and match.group(1) == "if":
            begin, end = places[0][0], places[-1][1]
            add("condition", begin, end, "!(" + line[begin:end] + ")")
            add("condition", begin, end, "false && (" + line[begin:end] + ")")
        for (a, b), (c, d) in zip(places, places[1:]):
            if line[a:b] != line[c:d] and match.group(1) not in COMMUTE:
                add("arguments", a, d, line[c:d] + line[b:c] + line[a:b])
    if STATEMENT.fullmatch(code.rstrip()) and code.count("(") == code.count(")") and before[-1:] in "{};:)":
        add("no statement", len(code) - len(code.lstrip()), len(line), ";")
    if not code.startswith(" "):  # of a function's head or a variable's name nothing
        body = min((at for at in (code.find("{"), code.find(" = ")) if at >= 0), default=len(code))
        found = {kind: [e for e in places if e[0] > body] for kind, places in found.items()}
    return {kind: places for kind, places in found.items() if places}


def lines_of(path):
    """(path, number, line, its edits) for all lines that can be mutated."""
    text, before = size.read(path), ""
    for number, (line, code) in enumerate(zip(text.split("\n"), masked(text).split("\n")), 1):
        if code.strip() and not re.search(r"^#|\\$|\bCHECK\(|static_assert", code):
            found = edits(line, code, before)
            if found:
                yield path, number, line, found
        before = code.rstrip() or before


def drawn(paths, seed):
    """All mutations in the order of the seed: (path, number, old line, new line)."""
    lines = [line for path in paths for line in lines_of(path)]
    random.Random(seed).shuffle(lines)
    for index, (path, number, line, found) in enumerate(lines):
        chance = random.Random(f"{seed} {index}")
        begin, end, new = chance.choice(found[chance.choice(sorted(found))])
        yield path, number, line, line[:begin] + new + line[end:]


# ---- trees and suites -----------------------------------------------------------------------------------------------


def built(path):
    return BUILT.get(path, ["build/" + path[:-2] + ".o"])


class Tree:
    """A copy in which things are built and run."""

    def __init__(self, original, dir, variables):
        self.dir, self.variables, tmp = dir, variables, os.path.join(dir, "tmp")
        skipped = [os.path.join(original, name) for name in (".git", "tmp", "build/asan", "build/tsan", "build/wasm", "build/experiments")]
        shutil.copytree(original, dir, symlinks=True, ignore=lambda at, names: [n for n in names if os.path.join(at, n) in skipped])
        os.mkdir(tmp)
        self.env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "GOING_ON", "BUILD")}
        self.env.update(MAKELEVEL="1", TMPDIR=tmp, XDG_CACHE_HOME=tmp)

    def path(self, name):
        return os.path.join(self.dir, name)

    def make(self, *targets, limit=600):
        # A mutant may fill the disk.
        command = ["bash", "-c", 'ulimit -c 0 -f 4000000; exec make -s "$@"', "make", WARNINGS, *self.variables, *targets]
        return subprocess.run(command, cwd=self.dir, env={**self.env, "SUITE_SECONDS": str(limit)}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    def last(self, suite):
        """Exit status and seconds of the suite's last run, which scripts/suite.sh has put at the end of its log."""
        log = self.path(f"build/{suite}.log")
        words = size.read(log).split()[-4:] if os.path.exists(log) else []
        return (int(words[1]), float(words[2])) if len(words) == 4 and words[1].isdigit() else (-1, 0)

    def reds(self, suite):
        """The names of the tests that failed in the suite's last run."""
        name, found = "", set()
        for line in size.read(self.path(f"build/{suite}.log")).split("\n") if self.last(suite)[0] == 1 else ():
            name = line.split(" ...")[0] if line.startswith("  Test: ") else name
            found |= {name} if line.endswith("FAILED") else set()
        return found

    def run(self, suite, limit, known=frozenset()):
        """None if no test failed but the known ones, else how that was seen."""
        log = self.path(f"build/{suite}.log")
        if os.path.exists(log):
            os.remove(log)
        if self.make(f"build/{suite}.log", limit=limit) or self.reds(suite) and self.reds(suite) <= known:
            return None
        return "HANG" if self.last(suite)[0] in (124, 137) else "caught"

    def mutate(self, clean, path, number, new):
        """Whether the tree has the mutation now: it compiles, and its object is another than the clean tree's."""
        lines, target = size.read(clean.path(path)).split("\n"), built(path)[-1]
        with open(self.path(path), "w", encoding="utf-8") as f:
            f.write("\n".join(lines[:number - 1] + [new] + lines[number:]))
        return self.make(target) and open(self.path(target), "rb").read() != open(clean.path(target), "rb").read()

    def restore(self, clean, path):
        shutil.copy2(clean.path(path), self.path(path))
        for name in built(path):  # newer than the file, so that it is not compiled again
            shutil.copy(clean.path(name), self.path(name))


class Suites:
    """Which suites use which file, and how long they take in the clean tree, where this works."""

    def __init__(self, clean, limit):
        self.clean, self.limit, self.lock, self.limits = clean, limit, threading.Lock(), {}
        self.known = {}  # tests that are red without a mutation
        tests = {path[11:-2]: path for path in sorted(glob.glob("tests/test_*.c")) if path[11:-2] not in NO_SUITE}
        if not clean.make("build/libflexgen.a", "build/flexgen.o", *(f"build/{path[:-2]}.o" for path in tests.values())):
            sys.exit("mutate.py: the suites cannot be built; `make test` says why")
        uses = size.uses("build", [*size.program(), *glob.glob("tests/*.c")])
        self.distance = {name: self.distances(uses, path) for name, path in tests.items()}

    @staticmethod
    def distances(uses, test):
        """{file: how many files a call of this test goes through}. A test that starts the program calls flexgen.c."""
        away, order = {test: 0}, [test]
        for path in order:
            starts = path == test and "FLEXGEN_BIN" in size.read(test)
            for other in [*uses.get(path, ()), *(["flexgen.c"] if starts else [])]:
                if other not in away:
                    away[other] = away[path] + 1
                    order.append(other)
        return away

    def of(self, path):
        stem, away = os.path.basename(path)[:-2], self.distance
        near = [name for name in away if path in away[name]]
        near.sort(key=lambda name: (not stem.startswith(name), away[name][path], self.clean.last(name)[1], name))
        return SUITES.get(path) or near[:NEAREST] + [name for name in FAR if name in near[NEAREST:]]

    def limit_of(self, suite):
        """Seconds for a suite, or 0 if it does not end well as it is. It is run for that, if its log is not newer than its program."""
        with self.lock:
            if suite not in self.limits:
                log, program = f"build/{suite}.log", f"build/test_{suite}"
                fresh = os.path.exists(log) and os.path.exists(program) and os.path.getmtime(log) > os.path.getmtime(program)
                green = fresh and self.clean.last(suite)[0] == 0 or not self.clean.run(suite, 600)
                self.known[suite] = self.clean.reds(suite)
                usable = green or self.known[suite]
                self.limits[suite] = max(self.limit, int(5 * self.clean.last(suite)[1])) if usable else 0
                if not green:
                    print(f"mutate.py: {suite} is red without a mutation", "".join(sorted(self.known[suite])) or "and left out", flush=True)
            return self.limits[suite]


# ---- the run --------------------------------------------------------------------------------------------------------


class Run:
    """The mutations that are left to the workers, and what the others gave: (how, mutation)."""

    def __init__(self, suites, mutations, count):
        self.suites, self.mutations, self.count, self.lock, self.found = suites, mutations, count, threading.Lock(), []

    def take(self, tree):
        """Puts the next one that compiles and differs into the tree; by one worker at a time, so that --jobs changes nothing."""
        with self.lock:
            for index, mutation in self.mutations if self.count else ():
                path, number, _, new = mutation
                if tree.mutate(self.suites.clean, path, number, new):
                    self.count -= 1
                    return index, mutation
                tree.restore(self.suites.clean, path)

    def work(self, tree):
        for index, mutation in iter(lambda: self.take(tree), None):
            path, number, old, new = mutation
            how, where, began = "SURVIVED", 0, time.time()
            for name in self.suites.of(path):
                limit = self.suites.limit_of(name)
                result = limit and tree.run(name, limit, self.suites.known[name])
                if result:
                    how, where = result, name
                    break
                where += limit > 0
            tree.restore(self.suites.clean, path)
            self.found.append((how, mutation))
            where = f"{where} suites" if how == "SURVIVED" else f"by {where}"
            print(f"{index:4d} {path}:{number}: {old.strip()}  ->  {new.strip()}  {how} {where}, {time.time() - began:.0f} s", flush=True)


def planted():
    for path, old, new, _ in PLANTED:
        at = [(number, line) for number, line in enumerate(size.read(path).split("\n"), 1) if line.startswith(old)]
        if len(at) != 1:
            sys.exit(f"mutate.py: {path} has not one line, {old}; name another in PLANTED")
        yield path, *at[0], at[0][1].replace(old, new)


def main():
    options = argparse.ArgumentParser(usage=__doc__)
    for name, kind, default in [("seed", str, "1"), ("count", int, 10), ("files", str, "*"), ("only", int, 0), ("jobs", int, 1), ("limit", int, 90)]:
        options.add_argument("--" + name, type=kind, default=default)
    options.add_argument("--planted", action="store_true")
    options.add_argument("variables", nargs="*")
    given, here = options.parse_args(), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="flexgen-mutate-") as dir:
        clean = Tree(here, os.path.join(dir, "clean"), given.variables)
        os.chdir(clean.dir)
        suites = Suites(clean, given.limit)
        paths = [path for pattern in PATTERNS for path in sorted(glob.glob(pattern)) if fnmatch.fnmatch(path, given.files)]
        paths = [path for path in paths if path not in NO_PROGRAM and (path not in BUILT or clean.make(built(path)[-1]))]
        known = dict(zip(planted(), (seen for *_, seen in PLANTED))) if given.planted else {}
        rest = [(index, mutation) for index, mutation in enumerate(drawn(paths, given.seed), 1) if given.only in (0, index)]
        run = Run(suites, iter([(0, mutation) for mutation in known] + rest), len(known) + given.count)
        trees = [Tree(clean.dir, os.path.join(dir, str(job)), given.variables) for job in range(given.jobs)]
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(run.work, trees))
        os.chdir(here)
    results = [how for how, mutation in run.found if mutation not in known]
    print(f"\n{len(results)} mutations: {results.count('caught')} caught, {results.count('HANG')} hung, {results.count('SURVIVED')} survived")
    for path, number, old, new in (mutation for how, mutation in run.found if how == "SURVIVED" and mutation not in known):
        print(f"--- a/{path}\n+++ b/{path}\n@@ -{number} +{number} @@\n-{old}\n+{new}")
    wrong = [mutation for mutation, seen in known.items() if (mutation, seen) not in ((m, how != "SURVIVED") for how, m in run.found)]
    for path, number, _, new in wrong:
        print(f"mutate.py: planted at {path}:{number}, {new.strip()}: is not what it was known to give")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
