#!/usr/bin/env python3
"""tape.py A B [--no-CATEGORY...] [--show N]: what differs between two tapes, the folders that `make tape OUT=` has made in
two trees. tests/tape.c says what a tape has. Standard library only; the exit status is 1 if something differs.

  order    lane, code and kind of the ops, in the order in which they are posted
  bytes    what ops count for, their parameters, and tier, type and shape of their views
  waits    the events that ops and the posting thread wait for
  tables   the contents of index tables
  offsets  where views lie in their regions
  square   sweep, layer, batch

For each category it prints how many cases differ, and of the first N cases (3) their first op that does, where both tapes
have the case as a text (FULL='*'). Behind ops in another order all the rest differs too: where there are texts, a case
counts for another category only if that differs before. --no-offsets and so on leave a category out."""
import argparse, itertools, os, sys

CATEGORIES = ("order", "bytes", "waits", "tables", "offsets", "square")


def index(tape):
    """The cases of a tape: by name the number of ops, and the hashes."""
    with open(os.path.join(tape, "index")) as f:
        return {name: (int(ops), hashes) for name, ops, *hashes in map(str.split, f)}


def first_differences(tapes, case):
    """By category the first line that differs, and its text in both tapes; None if the tapes do not have the text."""
    paths = [os.path.join(tape, case) for tape in tapes]
    found = {}
    if not all(map(os.path.exists, paths)):
        return None
    with open(paths[0]) as a, open(paths[1]) as b:
        for number, lines in enumerate(itertools.zip_longest(a, b, fillvalue="(end)" + "\t" * 5), 1):
            if lines[0] == lines[1]:
                continue
            parts = [line.rstrip("\n").split("\t") for line in lines]
            differing = [c for c in range(len(CATEGORIES)) if parts[0][c] != parts[1][c]]
            if 0 in differing:  # all that these two lines say differs, and so will what follows
                differing = [0]
            for c in differing:
                found.setdefault(CATEGORIES[c], (number, *(f"{p[0]} [{p[5]}] {p[c] if c else ''}" for p in parts)))
            if 0 in differing:
                return found
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tapes", nargs=2, metavar="TAPE")
    parser.add_argument("--show", type=int, default=3, metavar="N")
    for category in CATEGORIES:
        parser.add_argument("--no-" + category, action="store_true")
    args = parser.parse_args()
    a, b = map(index, args.tapes)
    both = sorted(a.keys() & b.keys())
    wanted = [c for c in CATEGORIES if not getattr(args, "no_" + c)]
    differing = {c: [] for c in wanted}
    for case in both:
        (ops, hashes), (other_ops, other_hashes) = a[case], b[case]
        if ops != other_ops and min(ops, other_ops) < 0:
            print(f"fails in one of the two: {case}")
        by_hash = [c for c, x, y in zip(CATEGORIES, hashes, other_hashes) if x != y]
        texts = first_differences(args.tapes, case) if set(by_hash) & set(wanted) else None
        for category in by_hash if texts is None else texts:
            if category in differing:
                differing[category].append((case, texts and texts[category]))
    print(f"{len(both)} cases, {sum(max(0, a[case][0]) for case in both)} ops")
    for tape, cases in zip(args.tapes, (a.keys() - b.keys(), b.keys() - a.keys())):
        if cases:
            print(f"only in {tape}: {len(cases)} cases, such as {min(cases)}")
    for category, cases in differing.items():
        print(f"{category}: {len(cases)} cases differ" if cases else f"{category}: equal")
        for case, text in cases[: args.show]:
            print(f"  {case}" + (f", line {text[0]}\n    {text[1]}\n    {text[2]}" if text else ""))
    sys.exit(a.keys() != b.keys() or any(differing.values()) or any((a[c][0] < 0) != (b[c][0] < 0) for c in both))


main()
