#!/usr/bin/env python3
"""Hold docs/ANSWERS.md against the program, and say which of its numbers nothing gives.

    python3 scripts/answers.py [FILE]    in the repository; or a changed copy

Below "# Answers" a section is what stands behind "### ". Each of its numbers with more than one digit must stand in its commands, in
what these print (suite tour runs them), or in its study in docs/EXPERIMENTS.md, whose points are those of scripts/experiments.py.
Below "## Exercises" each row names an exercise, points and a mistake: scripts/exercises.txt must have the mistake, with these points.
Each family of oral questions has eight. Needs only Python's standard library, 3.8 or later.
"""
import re
import sys

import exercise
from pages import NUMBER, Fault, is_printed, read, run

ANSWERS, EXPERIMENTS = "docs/ANSWERS.md", "docs/EXPERIMENTS.md"
QUESTIONS = 8


def part(text, heading):
    """What stands behind a heading, up to the next one of its rank or a higher one."""
    begin = text.find(f"\n{heading}\n")
    if begin < 0:
        raise Fault(f"has no {heading}")
    rank = len(heading.split()[0])
    end = re.search(rf"^#{{1,{rank}}} ", text[begin + len(heading) + 2:], re.M)
    return text[begin + len(heading) + 2:][:end.start() if end else None]


def check_section(title, body, studies):
    number = re.match(r"Study (\d+)\. (.*)", title)
    study = part(studies, next((line for line in studies.split("\n") if line.startswith(f"## {number[1]}. ")), "its study")) if number else ""
    listing = "\n".join(line for line in body.split("\n") if line.startswith("    "))
    prose = re.sub(r"`[^`]*`", "", "\n".join(line for line in body.split("\n") if not line.startswith("    ")))
    for found in re.findall(r"(?<![\w.])\d[\d.]*\d", prose):
        if not NUMBER.fullmatch(found) or not is_printed(found, listing + study):
            raise Fault(f"{title} {found} is in nothing that its commands print")


def check_answers(text):
    studies = read(EXPERIMENTS)
    sections = re.split(r"^### (.*)\n", part(text, "# Answers"), flags=re.M)[1:]
    for title, body in zip(sections[::2], sections[1::2]):
        check_section(title, body, studies)
    answered = [int(n) for n in re.findall(r"^Study (\d+)", "\n".join(sections[::2]), re.M)]
    asked = [int(n) for n in re.findall(r"^## (\d+)\. ", studies, re.M)]
    if answered != asked:
        raise Fault(f"answers the studies {answered}; {EXPERIMENTS} has {asked}")


def check_rubric(text):
    table = exercise.read_table(exercise.TABLE)
    mistakes = {n: [(sum(map(int, numbers.split())), said) for numbers, said in
                    (re.fullmatch(r"([\d ]+?) ([^\d ].*)", e["rest"]).groups() for e in exercise.of(table[n], "wrong"))] for n in table}
    rows = re.findall(r"^\| (\d+) \|[^|]*\| (\d+): ([^|]*) \|", part(text, "## Exercises"), re.M)
    for n, points, said in rows:
        if (int(points), said) not in mistakes.get(int(n), []):
            raise Fault(f"exercise {n}: {exercise.TABLE} has no mistake that leaves {points}: {said}")
    if [int(n) for n, _, _ in rows] != sorted(table):
        raise Fault("## Exercises has not one row for each exercise")


def check_questions(text):
    families = re.split(r"^## (.*)\n", part(text, "# Oral questions"), flags=re.M)[1:]
    for title, body in zip(families[::2], families[1::2]):
        count = len(re.findall(r"^\d+\. .*\\\n   \*.*\*$", body, re.M))
        if count != QUESTIONS:
            raise Fault(f"{title}: has {count} questions with an answer; expected {QUESTIONS}")
    covered = sorted(int(n) for title in families[::2] for n in re.findall(r"\d+", title[title.rindex("("):]))
    if covered != sorted(exercise.read_table(exercise.TABLE)):
        raise Fault(f"the families of questions have the exercises {covered}")


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else ANSWERS
    text = read(path)
    try:
        for check in (check_answers, check_rubric, check_questions):
            check(text)
    except Fault as fault:
        raise Fault(f"{path}: {fault}") from None


if __name__ == "__main__":
    run(main)
