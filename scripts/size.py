#!/usr/bin/env python3
"""The size and the order of the program.

    python3 scripts/size.py BUILD     a table of the files; fails where one breaks a rule below. `make size` runs this
    python3 scripts/size.py write     makes every budget of scripts/size.txt what the file has

Size is counted in tokens of C, comments apart: lines can be joined, tokens cannot. The rules are:
  1. A file has at most as many tokens as its budget, scripts/size.txt, and so has the whole. To raise a budget, change it there
     and say in the commit why.
  2. A file has at most 10.5 tokens a line, the whole 8.5 (tables of data apart), and no line has more than 100 columns.
  3. The floors are ordered. A file includes only headers of its own floor or of a lower one, and uses only their functions.
  4. No two files need each other, directly or by others, and neither do two folders; by the symbols in the objects below BUILD.
  5. The trunk, which is the files that docs/READING.md says to read first, has at most as many tokens as its own budget in scripts/size.txt.
  6. mini.c and mini.cu, which are not a part of the whole, have at most 17,780 and 5,500 tokens, 10 a line. tests/test_mini.c measures
     their functions.

tests/ and docs/ are left out. Needs only Python's standard library, 3.8 or later, and nm.
"""
import fnmatch
import glob
import os
import re
import subprocess
import sys

FLOORS = [  # from the ground up
    ["base/*"],
    ["flexgen.h", "quant.*", "lp.*"],
    ["io/*"],
    ["admission.c", "plan.*", "branches/fit.*", "branches/walk.*", "branches/ledger.c", "branches/diagonal.c", "branches/work.c"],
    ["device/*", "flexgen.cu"],
    ["opt_model.c", "batch.*", "schedule.*", "square.c", "weights.c", "policy.*", "branches/*"],
    ["cost/*"],
    ["app/*"],
    ["flexgen.c"],
]
TRUNK = ["flexgen.h", "opt_model.*", "admission.c", "plan.*", "device/ops.h", "batch.*", "schedule.*", "square.c", "weights.c", "device/depend.c",
         "quant.*", "lp.*", "policy.*"]
TRUNK_ENDS = re.compile("^// The trunk ends here", re.M)  # a line of a file of which only what stands above belongs to it
BUDGETS = "scripts/size.txt"
MOST_A_LINE, MOST_OF_ALL, COLUMNS = 10.5, 8.5, 100
MOST_OF_MINI, MINI_A_LINE = {"mini.c": 17780, "mini.cu": 5500}, 10
DATA = ["io/unicode.c"]
TOKEN = re.compile(r"""
    (?P<comment> /\*.*?\*/ | //[^\n]* )
  | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'
  | \.?\d(?:[eEpP][+-]|[\w.'])*
  | [A-Za-z_]\w*
  | <<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||\#\#|[-+*/%&|^!=<>]=
  | \S
""", re.S | re.X)


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def program():
    """The files that are counted: in a checkout without git, all that are there."""
    found = [path for pattern in ("*.[ch]", "*.cu", "*/*.[ch]") for path in glob.glob(pattern)]
    return sorted(path for path in found if path.split("/")[0] not in ("tests", "docs", "build", *MOST_OF_MINI))


def tokens(text):
    return sum(match.lastgroup != "comment" for match in TOKEN.finditer(text))


def floor_of(path):
    for number, patterns in enumerate(FLOORS):
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
            return number
    sys.exit(f"size.py: {path}: is on no floor; name one in FLOORS")


def trunk_of(path):
    """The part of a file that belongs to the trunk, which may be empty."""
    inside = any(fnmatch.fnmatch(path, pattern) for pattern in TRUNK)
    return TRUNK_ENDS.split(read(path))[0] if inside else ""


def size_of(text):
    """(tokens, lines)"""
    return tokens(text), text.count("\n")


def sums(sizes, trunk):
    """The two sums that have budgets of their own."""
    return {"trunk": whole(trunk), "total": whole(sizes)}


def wrong_sizes(sizes, trunk):
    budgets = {name: int(budget) for budget, name in (line.split() for line in read(BUDGETS).splitlines())}
    for path, (count, lines) in {**sizes, **sums(sizes, trunk)}.items():
        if path not in budgets:
            yield f"{path}: has no budget in {BUDGETS}"
        elif count > budgets[path]:
            yield f"{path}: {count} tokens, and its budget is {budgets[path]}"
        if count > lines * (MOST_OF_ALL if path == "total" else MOST_A_LINE) and path not in DATA:
            yield f"{path}: {count / lines:.2f} tokens a line"


def wrong_mini():
    for path, most in MOST_OF_MINI.items():
        count, lines = size_of(read(path))
        if count > most or count > MINI_A_LINE * lines:
            yield f"{path}: {count} tokens, {count / lines:.2f} a line; at most {most} and {MINI_A_LINE}"


def wide_lines(path):
    table = False
    for number, line in enumerate(read(path).splitlines(), 1):
        if "clang-format o" in line:
            table = "off" in line
        if len(line) > COLUMNS and not table:
            yield f"{path}:{number}: {len(line)} columns, more than {COLUMNS}"


def includes_upwards(path):
    for header in re.findall(r'^#include "(.*)"', read(path), re.M):
        if floor_of(header) > floor_of(path):
            yield f"{path}: includes {header}, which is on a higher floor"


def uses(build, paths):
    """{file: {another whose functions or data it uses: one of them}}"""
    home, wanted = {}, {}
    for path in paths:
        listing = os.path.join(build, (path[:-2] if path.endswith(".c") else path) + ".o")
        if path.endswith(".h") or not os.path.exists(listing):
            continue
        for line in subprocess.check_output(["nm", listing], text=True).splitlines():
            kind, name = line.split()[-2:]
            if kind in "TDRB":
                home.setdefault(name, path)  # a test may have a function of its own in the program's place
            elif kind == "U":
                wanted.setdefault(path, []).append(name)
    return {path: {home[name]: name for name in names if name in home} for path, names in wanted.items()}


def calls_upwards(graph):
    for path, others in graph.items():
        for other, name in others.items():
            if floor_of(other) > floor_of(path):
                yield f"{path}: uses {name} of {other}, which is on a higher floor"


def circle(graph):
    """Files or folders each of which needs the next, and the last the first; or []."""
    done, way = set(), []

    def visit(place):
        if place in way:
            return way[way.index(place):]
        if place in done:
            return []
        way.append(place)
        for other in graph.get(place, ()):
            found = visit(other)
            if found:
                return found
        done.add(way.pop())
        return []

    return next((found for found in map(visit, graph) if found), [])


def circles(graph):
    folders = {}
    for path, others in graph.items():
        for other in others:
            here, there = os.path.dirname(path), os.path.dirname(other)
            if here and there and here != there:
                folders.setdefault(here, set()).add(there)
    for found in (circle(graph), circle(folders)):
        if found:
            yield f"these need each other: {' -> '.join(found + found[:1])}"


def whole(sizes):
    return tuple(map(sum, zip((0, 0), *sizes.values())))


def main():
    paths = program()
    sizes = {path: size_of(read(path)) for path in paths}
    trunk = {path: size_of(trunk_of(path)) for path in paths if trunk_of(path)}
    if sys.argv[1:] == ["write"]:
        with open(BUDGETS, "w", encoding="utf-8") as f:
            f.writelines(f"{count:7d} {path}\n" for path, (count, _) in {**sizes, **sums(sizes, trunk)}.items())
        return
    for path, (count, lines) in sizes.items():
        part = trunk.get(path, (0, 0))[0]
        mark = "" if not part else "  trunk" if part == count else f"  trunk: {part} tokens"
        print(f"{count:7d} tokens {lines:6d} lines {count / lines:6.1f} a line  {path}{mark}")
    for name, (count, lines) in sums(sizes, trunk).items():
        print(f"{count:7d} tokens {lines:6d} lines {count / max(lines, 1):6.1f} a line  {name}")
    graph = uses(sys.argv[1], paths)
    wrong = [*wrong_sizes(sizes, trunk), *wrong_mini(), *(line for path in paths for line in [*wide_lines(path), *includes_upwards(path)]),
             *calls_upwards(graph), *circles(graph)]
    print("".join(f"size.py: {line}\n" for line in wrong), end="")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
