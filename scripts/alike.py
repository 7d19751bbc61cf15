"""Which submissions have functions that are alike beyond renaming: `grade_all.py --alike SUBMISSIONS [N...]`.

A function is a row of words, in which all names are one word and all numbers another; types, parentheses and braces, comments and
strings are left out, and of words that do the same one stands for the others (for and while, -> and a point). Each run of PIECE words
is a piece. Of two submissions the share is that of the pieces of the one with fewer that the other has too, wherever they stand. So
other names, another order of functions, other comments and other types do not hide a copy.

A piece that the starter tree has counts for nobody, and neither does what the paper's text gives away (the lines `given` of
scripts/exercises.txt). The repository's solution is compared like a student's, by the name THEIRS. Where a submission has fewer than
FEWEST pieces of its own, independent solutions look the same, and nothing is said but that.

A pair in the table is a reason to look at both, and not a proof.
"""
import collections
import itertools
import os
import re

import exam
import exercise

PIECE = 14  # words
FEWEST = 60  # pieces
ALIKE = .5  # the share from which on a pair is in the table; the independent solutions `other` of scripts/exercises.txt have less
THEIRS = "(the repository)"

WORD = re.compile(r"[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\S")
KEPT = {"if": "if", "else": "else", "for": "for", "while": "for", "do": "for", "return": "return", "break": "break", "continue": "continue",
        "switch": "if", "case": "case", "goto": "goto", "->": ".", ",": ";"}
LEFT_OUT = set("(){}") | set("int long short unsigned signed char float double bool void const static inline struct enum register restrict "
                             "size_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t f16 half".split())


def words(body):
    for word in WORD.findall(exam.code_of(body)):
        if word in LEFT_OUT:
            continue
        yield KEPT.get(word) or ("name" if word[0].isalpha() or word[0] == "_" else "number" if word[-1].isalnum() else word)


def pieces(body):
    row = list(words(body))
    return {tuple(row[i:i + PIECE]) for i in range(len(row) - PIECE + 1)}


def pieces_of(text, left_out=()):
    """The pieces of all functions of a file but these."""
    return {p for name, _, begin, end in exam.functions(text) if name not in left_out for p in pieces(text[begin:end])}


class Known:
    """What is in everybody's hands."""

    def __init__(self, original, exercises):
        self.original, self.exercises = original, exercises
        self.seen, self.given_away = {}, {}  # by file, and by exercise

    def of_file(self, text):
        if text not in self.seen:
            self.seen[text] = pieces_of(text)
        return self.seen[text]

    def of(self, number):
        """The pieces of an exercise's starter tree, and of what the paper gives away."""
        if number in self.given_away:
            return self.given_away[number]
        tree = exercise.starter(self.original, self.exercises, [number])
        known = set().union(*(self.of_file(text) for path, text in tree.items() if path.endswith((".c", ".cu", ".h"))))
        self.given_away[number] = known.union(*(pieces(e["text"]) for e in exercise.of(self.exercises[number], "given")))
        return self.given_away[number]

    def theirs(self, number):
        """The repository's solution, and where that is far from a first try the one that the table has."""
        entries = self.exercises[number]
        files = exercise.own_files(self.original, entries)
        both = [files, exercise.solved(files, self.original, entries)]
        shared = [e for word in ("blank", "shared") for e in exercise.of(entries, word)]
        names = {name for e in shared for _, name, *_ in exercise.functions_of(self.original, e)}
        return {p for solution in both for text in solution.values()
                for name, _, begin, end in exam.functions(text) if name in names for p in pieces(text[begin:end])}


def share(one, other):
    return len(one & other) / max(1, min(len(one), len(other)))


def alike(known, spec, submissions):
    """([(share, pieces of the one with fewer, name, name)], the names that have too little to tell) of the submissions for an exercise,
    {name: {path: text}}."""
    of_all = known.of(spec["exercise"])
    own = {name: set().union(*(pieces_of(text, spec["files"][path]["given"]) for path, text in files.items())) - of_all
           for name, files in submissions.items()}
    own[THEIRS] = known.theirs(spec["exercise"]) - of_all
    few = sorted(name for name in own if len(own[name]) < FEWEST)
    pairs = [(share(own[a], own[b]), min(len(own[a]), len(own[b])), a, b)
             for a, b in itertools.combinations([name for name in own if name not in few], 2)]
    return sorted((pair for pair in pairs if pair[0] >= ALIKE), reverse=True), few
