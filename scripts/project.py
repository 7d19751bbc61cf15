#!/usr/bin/env python3
"""The open project of docs/PROJECT.md: what students get, what judges an entry, and the board.

    project.py kit DIR                          the files that an entry begins with, in a new directory
    project.py check ENTRY                      the figures of one entry, beside those of the baseline
    project.py board ENTRIES [PREDICTIONS]      board.csv, board.md and board.html in ENTRIES, with a row for each ENTRIES/NAME/; what was
                                                predicted is in PREDICTIONS/NAME.json, as it was handed in before
    project.py hostile                          whether entries that cheat or do harm get no row, and gain nothing

ENTRY has project.c and entry.json. The four functions of project.c are built and run in the sandbox of scripts/grade_all.py. The judge is
another program (tests/project_judge.c), which has the texts, the model, the bytes and the clock.

PROJECT_TEXT is the file of the texts (else that of the shipped model), PROJECT_STORIES how many stories of it (24), PROJECT_SEED which (1).
"""
import csv
import datetime
import html
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

import exam
import grade_all

HERE, MODEL = "docs/project", "models/opt-tiny"
HEADERS = ["base/base.h", "base/simd.h"]
MOST_SOURCE = 32 << 10  # bytes of project.c, so that no model hides in it
MOST_PERPLEXITY = 1.02  # times the baseline's
SECONDS = 600  # that the judge may take for an entry
SCHEDULES = ("zigzag", "row", "diagonal", "own")
COLUMNS = ["place", "entry", "score", "token/s", "predicted", "perplexity", "same tokens", "bits: weights", "cache", "read", "note", "date"]


class Refused(Exception):
    pass


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def kit(dir):
    if os.path.exists(dir):
        sys.exit("project.py kit DIR: %s is there already" % dir)
    os.makedirs(dir)
    for name in sorted(os.listdir(HERE)):
        shutil.copy(os.path.join(HERE, name), dir)
    for path in [*HEADERS, "docs/PROJECT.md"]:
        to = os.path.join(dir, path.replace("docs/", ""))
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copy(path, to)
    print("%s: read PROJECT.md there, change project.c and entry.json, and `python3 scripts/project.py check %s` here." % (dir, dir))


# ---- an entry -------------------------------------------------------------------------------------------------------


def numbers(value, count, least, most, what):
    """A list of numbers in a range, whatever JSON has."""
    good = isinstance(value, list) and len(value) == count and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and least <= x <= most for x in value)
    if not good:
        raise Refused("entry.json: %s: expected %d of %g to %g" % (what, count, least, most))
    return value


def policy_of(text):
    """(the judge's arguments for the policy of entry.json, whether it claims to be exact)"""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused("entry.json is no JSON")
    known = ["percent", "gpu_batch_size", "num_gpu_batches", "schedule", "cpu_cache_compute"]
    if not isinstance(entry, dict) or sorted(set(entry) - {"exact"}) != sorted(known):
        raise Refused("entry.json: expected %s, and perhaps exact" % ", ".join(known))
    percent = numbers(entry["percent"], 6, 0, 100, "percent")
    if any(percent[i] + percent[i + 1] > 100.0001 for i in (0, 2, 4)):
        raise Refused("entry.json: percent: GPU and CPU add up to more than 100")
    block = [int(numbers([entry[key]], 1, 1, 64, key)[0]) for key in ("gpu_batch_size", "num_gpu_batches")]
    if entry["schedule"] not in SCHEDULES:
        raise Refused("entry.json: schedule: expected one of %s" % ", ".join(SCHEDULES))
    flags = [entry["cpu_cache_compute"], entry.get("exact", False)]
    if not all(isinstance(flag, bool) for flag in flags):
        raise Refused("entry.json: cpu_cache_compute and exact are true or false")
    return [*map(str, percent), *map(str, block), entry["schedule"], str(int(flags[0]))], flags[1]


class Stage:
    """What the sandbox shows: the kit, and no data."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="flexgen-project-")
        self.judge = None
        kit_dir = os.path.join(self.dir, "kit")
        os.makedirs(os.path.join(kit_dir, "base")), os.makedirs(os.path.join(self.dir, "data"))
        for name in ("project.h", "ask.h", "entry.c"):
            shutil.copy(os.path.join(HERE, name), kit_dir)
        for path in HEADERS:
            shutil.copy(path, os.path.join(kit_dir, path))
        subprocess.check_call(["chmod", "-R", "a+rX", self.dir])


class Judge:
    """Judges entries, one after the other."""

    def __enter__(self):
        build = os.environ.get("BUILD", "build")
        self.program = os.environ.get("PROJECT_JUDGE") or os.path.join(build, "project_judge")
        if "PROJECT_JUDGE" not in os.environ:
            subprocess.check_call(["make", "-s", self.program])
        self.stage = Stage()
        self.place = grade_all.Closed(self.stage, 0)
        if not self.place.closed:
            print("no namespaces here (%s): an entry has limits, but what packs can tell what unpacks by files, and both see this computer; "
                  "judge in a container, and read what you judge" % self.place.why[0], file=sys.stderr)
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.stage.dir, ignore_errors=True)

    def run(self, words, seconds, **options):
        """(status, output, errors) of a process, whose group ends in time."""
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True, **options)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Refused("refused: it takes more than %d s" % seconds)
        return process.returncode, out, err

    def figures(self, root, log):
        """The figures of the entry in a directory, as the judge prints them."""
        texts = {name: exam.read_file(os.path.join(root, name)) for name in ("project.c", "entry.json")}
        for name, text in texts.items():
            if text is None:
                raise Refused("nothing found: there is no %s" % name)
        if len(texts["project.c"].encode()) > MOST_SOURCE:
            raise Refused("refused: project.c has more than %d bytes" % MOST_SOURCE)
        policy, exact = policy_of(texts["entry.json"])
        self.place.fresh(os.path.join(self.stage.dir, "kit"))
        with open(os.path.join(self.place.work, "project.c"), "w", encoding="utf-8") as f:
            f.write(texts["project.c"])
        self.place.own()
        shown, work = self.place.inside
        script = "cc -O2 -march=native -w -std=c11 -D_GNU_SOURCE -I%s %s/entry.c %s/project.c -o %s/entry -lm" % (shown, shown, work, work)
        with open(log, "ab") as said:
            status, _, _ = self.run(self.place.words(script, True), exam.BUILD_SECONDS, stdout=said, stderr=said)
        if status:
            raise Refused("it does not compile")
        command = shlex.join(self.place.words("exec %s/entry" % work, False))
        env = dict(os.environ, PROJECT_ENTRY="exec " + command, PROJECT_LOG=os.path.abspath(log))
        words = [os.path.abspath(self.program), MODEL, os.environ.get("PROJECT_TEXT") or MODEL + "/stories.txt",
                 os.environ.get("PROJECT_STORIES", "24"), os.environ.get("PROJECT_SEED", "1"), HERE + "/machine.json", *policy]
        status, out, said = self.run(words, SECONDS, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if status or not out:
            raise Refused((said.strip().splitlines() or ["the judge ended with status %d" % status])[-1])
        found = json.loads(out)
        if exact and found["same"] < found["tokens"]:
            raise Refused("refused: it claims to be exact, and %d of %d tokens are others" % (found["tokens"] - found["same"], found["tokens"]))
        return found

    def baseline(self):
        with tempfile.TemporaryDirectory() as dir:
            return self.figures(HERE, os.path.join(dir, "log"))


# ---- the board ------------------------------------------------------------------------------------------------------


def predicted_of(path):
    """token/s of a prediction, or None."""
    try:
        value = json.loads(exam.read_file(path) or "null")["token_s"]
        return float(value) if isinstance(value, (int, float)) and value is not True and 0 < value < 1e9 else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def is_closed():
    """Whether this system allows namespaces."""
    with Judge() as judge:
        return judge.place.closed


def score_of(speed, predicted):
    """token/s less up to a quarter for the error of the prediction; without any it is the whole quarter."""
    error = min(1, abs(predicted - speed) / speed) if predicted else 1
    return speed * (1 - error / 4)


def judge_one(judge, baseline, root, log):
    """The figures of an entry; Refused if it has no row."""
    if os.path.islink(root):
        raise Refused("refused: the folder is a link")
    found = judge.figures(root, log)
    most = MOST_PERPLEXITY * baseline["perplexity"]
    if not found["perplexity"] <= most:
        raise Refused("refused: the perplexity is %.3f, and at most %.3f is allowed" % (found["perplexity"], most))
    return found


def row_of(name, found, predicted, note):
    date = datetime.date.today().isoformat()
    if not found:
        return {"entry": name, "note": note, "date": date, "score": 0}
    return {"entry": name, "score": score_of(found["token_s"], predicted), "token/s": found["token_s"], "predicted": predicted,
            "perplexity": found["perplexity"], "same tokens": found["same"] / found["tokens"], "bits: weights": found["weight_bits"],
            "cache": found["cache_bits"], "read": found["read_bits"], "note": note, "date": date}


def texts_of(row):
    """A row's cells as they are shown."""
    form = {"score": "%.2f", "token/s": "%.2f", "predicted": "%.2f", "perplexity": "%.3f", "same tokens": "%.1f%%", "bits: weights": "%.2f",
            "cache": "%.2f", "read": "%.2f"}
    shown = dict(row, **{"same tokens": 100 * row["same tokens"]} if "same tokens" in row else {})
    return ["" if shown.get(c) is None or shown.get(c) == "" else form.get(c, "%s") % shown[c] for c in COLUMNS]


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>The board</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 90em; padding: 0 1em; }
div { overflow-x: auto; }
table { border-collapse: collapse; white-space: nowrap; }
td, th { border-bottom: 1px solid #888; padding: .3em .6em; text-align: right; }
td:nth-child(2), th:nth-child(2), td:nth-child(11), th:nth-child(11) { text-align: left; white-space: normal; min-width: 14em; }
caption { text-align: left; }
meter { width: 10em; }
</style>
<h1>The board</h1>
<p>Tokens a second on <code>machine.json</code>, at a perplexity of at most %s. The score is token/s, less up to a quarter for the error of the
prediction. %s.</p>
<div><table><caption>Entries, best score first</caption><tr>%s<th scope="col">token/s, drawn</th></tr>
%s</table></div>
</html>
"""


def write_board(dir, rows, baseline):
    rows = sorted(rows, key=lambda row: -row["score"])
    for place, row in enumerate((row for row in rows if row["score"]), 1):
        row["place"] = place
    shown = [[grade_all.cell(text) if text and c in ("entry", "note") else text for c, text in zip(COLUMNS, texts_of(row))] for row in rows]
    with open(os.path.join(dir, "board.csv"), "w", newline="") as f:
        csv.writer(f).writerows([COLUMNS, *shown])
    with open(os.path.join(dir, "board.md"), "w") as f:
        for cells in [COLUMNS, ["---"] * len(COLUMNS), *shown]:
            f.write("| %s |\n" % " | ".join(html.escape(text).replace("|", "&#124;") for text in cells))
    most = max([row.get("token/s", 0) for row in rows] + [1])
    body = ""
    for row, cells in zip(rows, shown):
        speed = row.get("token/s", 0)
        drawn = '<meter aria-label="token/s" max="%.3f" value="%.3f">%.2f</meter>' % (most, speed, speed) if speed else ""
        body += "<tr>%s<td>%s</td></tr>\n" % ("".join("<td>%s</td>" % html.escape(text) for text in cells), drawn)
    heads = "".join('<th scope="col">%s</th>' % c for c in COLUMNS)
    bound = "%.3f" % (MOST_PERPLEXITY * baseline["perplexity"])
    with open(os.path.join(dir, "board.html"), "w") as f:
        f.write(PAGE % (bound, datetime.date.today().isoformat(), heads, body))
    print(read(os.path.join(dir, "board.md")), end="")


def board(root, predictions=None):
    """Judges all, writes the board, and returns its rows."""
    names = sorted(d for d in os.listdir(root) if os.path.isdir(os.path.join(root, d)) and d != "logs")
    os.makedirs(os.path.join(root, "logs"), exist_ok=True)
    with Judge() as judge:
        baseline = judge.baseline()
        rows = [row_of("(baseline)", baseline, baseline["token_s"], "")]
        for name in names:
            log, found, note = os.path.join(root, "logs", grade_all.short(name) + ".log"), None, ""
            open(log, "w").close()
            try:
                found = judge_one(judge, baseline, os.path.join(root, name), log)
            except Refused as why:
                note = str(why)
            except Exception as e:  # an entry must not keep others from being judged
                note = "cannot be judged: %s" % type(e).__name__
            if os.path.getsize(log) > grade_all.MOST_LOG:
                os.truncate(log, grade_all.MOST_LOG)
            rows.append(row_of(name, found, predicted_of(os.path.join(predictions, name + ".json")) if predictions else None, note))
    write_board(root, rows, baseline)
    return rows


def check(root):
    with tempfile.TemporaryDirectory() as dir, Judge() as judge:
        log = os.path.join(dir, "log")
        open(log, "w").close()
        try:
            baseline = judge.baseline()
            print("baseline:", json.dumps(baseline))
            print("entry:   ", json.dumps(judge_one(judge, baseline, root, log)))
        except Refused as why:
            print("%s%s" % (exam.read_file(log) or "", why))
            return False
        print("%s" % (exam.read_file(log) or ""), end="")
    return True


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "kit" and len(arguments) == 1:
        kit(*arguments)
    elif command == "check" and len(arguments) == 1:
        sys.exit(not check(*arguments))
    elif command == "board" and len(arguments) in (1, 2):
        board(*arguments)
    elif command == "hostile" and not arguments:
        import project_hostile
        sys.exit(not project_hostile.hostile())
    else:
        sys.exit(__doc__)
