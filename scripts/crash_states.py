#!/usr/bin/env python3
"""What is on the disk after the machine has lost its power, and what the program makes of it.

    python3 scripts/crash_states.py [--count N] [--seed S] [--job NAME] [--keep DIR]

Each job is run once undisturbed, and every call that changes a file is recorded (tests/faults.c, FAULT_LOG). Then states of the disk
are drawn that a loss of power could have left: the calls end somewhere; of the writes and truncations of a file behind its last
sync any subset is lost, of a write any sectors of 512 bytes; a directory keeps the changes that came before some moment, which is
not before the last one that is known to be on the disk. On each state the program runs once more, and

  - it ends well, and the result is that of the undisturbed run, byte for byte; or it refuses in one line, leaves every file as
    it was, and ends well with the remedy that the line names;
  - every line of the output that was on the disk for certain is still there, and a file that is to be replaced is the old or
    the new one;
  - files of others, beside the output, are as they were.

The program is $FLEXGEN_BIN, or build/flexgen_host; `make build/flexgen_host build/faults.so` makes both. Linux on x86-64; needs only
Python's standard library, 3.8 or later. A state that went wrong can be drawn again with its seed.
"""
import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading

FLEXGEN = os.path.abspath(os.environ.get("FLEXGEN_BIN", "build/flexgen_host"))
LIBRARY = os.path.abspath("build/faults.so")
MODEL = os.path.abspath("models/opt-tiny")
SECTOR = 512
O_CREAT, O_TRUNC, O_TMPFILE = 0o100, 0o1000, 0o20000000
OTHERS = {"out.journal.old": b"another journal\n", "out.tmp": b"not ours\n", "other": b"of another program\n"}
PLACED = ["--percent", "0", "100", "0", "100", "0", "100", "--gpu-batch-size", "2", "--num-gpu-batches", "1", "--threads", "1"]
BENCHED = ["bench", "--model", MODEL, "--device", "host", *PLACED, "--prompt-len", "8", "--gen-len", "2", "--num-prompts", "2"]
GENERATED = ["generate", "--model", MODEL, "--device", "host", *PLACED, "--prompts", "@prompts", "--output", "@out"]


class Job:
    """A command, of which a word that begins with @ is a file in the working directory, and what its result is."""

    def __init__(self, name, words, again, form, before=None, room=None):
        self.name, self.words, self.form = name, words, form
        self.again = again    # what is added when it runs on the state, instead of --overwrite
        self.before = before  # the files that are there when it begins; a function of the directory
        self.room = room      # bytes of the largest file that it may write


def run(directory, words, log=None, room=None):
    """The exit status and standard error of the program."""
    env = {**os.environ, "XDG_CACHE_HOME": os.path.join(directory, "cache")}
    if log:
        env.update(LD_PRELOAD=LIBRARY, FAULT_LOG=log)
    args = [FLEXGEN, *(os.path.join(directory, word[1:]) if word[0] == "@" else word for word in words)]
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))) if room else None
    done = subprocess.run(args, env=env, preexec_fn=limit, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          timeout=300)
    return done.returncode, done.stderr.decode(errors="replace")


# ---- The disk -------------------------------------------------------------------------------------------------------


def snapshot(top):
    """{path: bytes, or None for a directory}, of all below a directory, with paths that begin there."""
    found = {}
    for where, directories, files in os.walk(top):
        for name in directories:
            found[os.path.relpath(os.path.join(where, name), top)] = None
        for name in files:
            with open(os.path.join(where, name), "rb") as f:
                found[os.path.relpath(os.path.join(where, name), top)] = f.read()
    return found


def restore(top, state):
    shutil.rmtree(top, ignore_errors=True)
    os.makedirs(top)
    for path in sorted(state):
        full = os.path.join(top, path)
        if state[path] is None:
            os.makedirs(full, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as f:
            f.write(state[path])


def read_log(text):
    """The calls, each as (name, result, fd, offset, bytes)."""
    at = 0
    while at < len(text):
        end = text.index(b"\n", at)
        name, result, fd, offset, size = text[at:end].split()
        at = end + 1 + int(size)
        yield name.decode(), int(result), int(fd), int(offset), text[end + 1:at]


def changes_of(log, top, before):
    """The calls as changes of inodes and of names below `top`. Inodes are numbers; those of `before` come first.

    ("data", inode, offset, bytes) ("size", inode, bytes) ("sync", inode) ("name", path, inode or None) ("move", path, path)
    ("directory", path): a sync of it.
    """
    names = {path: number for number, path in enumerate(sorted(before)) if before[path] is not None}
    folders = {path for path in before if before[path] is None} | {"."}
    opened, position, count = {}, {}, len(before)

    def inside(raw, fd=None):
        full = raw.decode()
        if fd in opened and isinstance(opened[fd], str) and not full.startswith("/"):
            full = os.path.join(top, opened[fd], full)
        full = os.path.normpath(full)
        return os.path.relpath(full, top) if full == top or full.startswith(top + "/") else None

    for name, result, fd, offset, data in read_log(log):
        paths = data.split(b"\0")
        if name == "open":
            path = inside(paths[0], fd & 0xFFFFFFFF if fd >= 0 else fd)
            opened.pop(result, None)
            position[result] = 0
            if path is None or offset & O_TMPFILE == O_TMPFILE:
                continue
            if path in folders:
                opened[result] = path
                continue
            if path not in names:
                names[path] = count
                count += 1
                yield "name", path, names[path]
            opened[result] = names[path]
            if offset & O_TRUNC:
                yield "size", names[path], 0
        elif name in ("write", "sync", "truncate"):
            inode = opened.get(fd)
            if inode is None or (isinstance(inode, str) and name != "sync"):
                continue
            if name == "write":
                at = position[fd] if offset < 0 else offset
                position[fd] += len(data) if offset < 0 else 0
                yield "data", inode, at, data
            elif name == "truncate":
                yield "size", inode, offset
            else:
                yield ("directory" if isinstance(inode, str) else "sync"), inode
        elif name == "mkdir":
            path = inside(paths[0])
            if path:
                folders.add(path)
                yield "name", path, None
        elif name == "unlink":
            path = inside(paths[0], fd)
            if path and (path in names or path in folders):
                names.pop(path, None)
                folders.discard(path)
                yield "gone", path
        elif name == "rename":
            old, new = inside(paths[0]), inside(paths[1])
            if not old or not new:
                continue
            for held in (names, ):
                for path in [p for p in held if p == old or p.startswith(old + "/")]:
                    held[new + path[len(old):]] = held.pop(path)
            for path in [p for p in folders if p == old or p.startswith(old + "/")]:
                folders.discard(path)
                folders.add(new + path[len(old):])
            for number, where in opened.items():
                if isinstance(where, str) and (where == old or where.startswith(old + "/")):
                    opened[number] = new + where[len(old):]
            yield "move", old, new


def put(content, offset, data):
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset:offset + len(data)] = data


def resize(content, size):
    del content[size:]
    content.extend(bytes(size - len(content)))


def draw_state(changes, before, draw, everything=False):
    """(state, certain): what is on the disk after a loss of power, and what is for certain: the state without any luck.

    With `everything` the power is lost at the end, and nothing with it."""
    first = {number: bytearray(before[path]) for number, path in enumerate(sorted(before)) if before[path] is not None}
    moment = len(changes) if everything or draw.random() < .25 else draw.randint(0, len(changes))
    synced, named, sure = {}, {}, 0  # the last sync of each inode, when it got its name, the last change that a directory has
    for at, change in enumerate(changes[:moment]):
        if change[0] == "name":
            named.setdefault(change[2], at)
        if change[0] == "sync":
            synced[change[1]] = at
            sure = max(sure, 1 + named.get(change[1], -1))  # journals of file systems keep their order
        if change[0] == "directory":
            sure = at
    lucky, certain = {n: bytearray(c) for n, c in first.items()}, {n: bytearray(c) for n, c in first.items()}
    for at, change in enumerate(changes[:moment]):
        if change[0] not in ("data", "size"):
            continue
        kind, inode = change[:2]
        for contents, luck in ((lucky, True), (certain, False)):
            content = contents.setdefault(inode, bytearray())
            durable = everything or at < synced.get(inode, -1)
            if kind == "size" and (durable or (luck and draw.random() < .5)):
                resize(content, change[2])
            if kind == "data" and durable:
                put(content, change[2], change[3])
            elif kind == "data" and luck:
                lose = draw.choice((0, 0, .5, 1))  # of the sectors
                for part in range(change[2] - change[2] % SECTOR, change[2] + len(change[3]), SECTOR):
                    begin, end = max(part, change[2]), min(part + SECTOR, change[2] + len(change[3]))
                    if draw.random() >= lose:
                        put(content, begin, change[3][begin - change[2]:end - change[2]])
    states = []
    kept = moment if everything or draw.random() < .5 else draw.randint(min(sure, moment), moment)
    for contents, upto in ((lucky, kept), (certain, sure)):
        names = {path: number for number, path in enumerate(sorted(before))}
        folders = {path for path in before if before[path] is None}
        for change in changes[:upto]:
            if change[0] == "name" and change[2] is None:
                folders.add(change[1])
            elif change[0] == "name":
                names[change[1]] = change[2]
            elif change[0] == "gone":
                names.pop(change[1], None)
                folders.discard(change[1])
            elif change[0] == "move":
                for path in [p for p in names if p == change[1] or p.startswith(change[1] + "/")]:
                    names[change[2] + path[len(change[1]):]] = names.pop(path)
                if change[1] in folders:
                    folders.discard(change[1])
                    folders.add(change[2])
        states.append({**{path: None for path in folders},
                       **{path: bytes(contents.get(number, b"")) for path, number in names.items() if path not in folders}})
    return states


# ---- Jobs -----------------------------------------------------------------------------------------------------------


def prompts(directory):
    with open(os.path.join(directory, "prompts"), "w", encoding="utf-8") as f:
        f.writelines(f"{text}\n" for text in ("Once upon a time", "Tom and Sue went", "The big dog", "One day", "A girl named Lily"))


def half(directory):
    """The files of a job that a full disk has stopped."""
    prompts(directory)
    run(directory, [*GENERATED, "--max-tokens", "24"], room=1024)


def finished(directory):
    prompts(directory)
    run(directory, [*GENERATED, "--max-tokens", "3"])


def earlier(directory):
    with open(os.path.join(directory, "out"), "w", encoding="utf-8") as f:
        f.write('{"earlier": true}\n')


JOBS = [
    Job("generate", [*GENERATED, "--max-tokens", "24"], ["--resume"], "lines", prompts),
    Job("stopped", [*GENERATED, "--max-tokens", "24"], ["--resume"], "lines", prompts, room=1024),
    Job("resume", [*GENERATED, "--max-tokens", "24", "--resume"], [], "lines", half),
    Job("overwrite", [*GENERATED, "--max-tokens", "24", "--overwrite"], ["--resume"], "lines", finished),
    Job("trace", [*BENCHED, "--trace", "@out"], [], "replaced", earlier),
    Job("json", [*BENCHED, "--json", "@out"], [], "replaced", earlier),
    Job("quantize", ["quantize", "--model", MODEL, "--output", "@out"], [], "directory"),
]


def lines_of(content):
    return [line for line in content.split(b"\n")[:-1] if line]


def is_json(content):
    try:
        json.loads(content)
        return True
    except ValueError:
        return False


def judge(job, top, state, certain, reference):
    """What is wrong with what the program makes of a state, or ""; and True if it refuses the state."""
    old = state.get("out")
    if job.form == "replaced":
        if old is not None and old != b'{"earlier": true}\n' and not is_json(old):
            return "a file that is to be replaced is neither the old nor the new one", False
        if old is None:
            return "the earlier file is gone, and there is no new one", False
    restore(top, state)
    words = [word for word in job.words if word != "--overwrite"]
    status, said = run(top, words + job.again)
    refused = status in (1, 2) and sum(line.startswith("flexgen: ") for line in said.splitlines()) == 1
    after = snapshot(top)
    if status and not refused:
        return f"exit status {status}: {said}", False
    if refused and {p: c for p, c in after.items() if p in state} != state:
        return f"is refused, and files have changed: {said}", True
    if refused and job.form == "directory" and "not empty" in said:
        pass  # the copy is there: it is looked at below
    elif refused:
        if "--overwrite" not in said and "move" not in said:
            return f"is refused without a remedy: {said}", True
        if "--overwrite" not in said:
            os.remove(os.path.join(top, "out.journal" if "journal of this version" in said else "out"))
        words = [word for word in words if word != "--resume"]
        status, said = run(top, words + (["--overwrite"] if "--overwrite" in said else ["--resume"]))
        after = snapshot(top)
        if status:
            return f"the remedy does not help: {said}", True
    for path, content in OTHERS.items():
        if after.get(path) != content:
            return f"{path}, of somebody else, has changed", refused
    if job.form == "replaced":
        return ("" if is_json(after.get("out", b"")) else "no whole result"), refused
    if job.form == "directory":
        made = {path: content for path, content in after.items() if path.startswith("out/")}
        return ("" if made == reference else "the copy is another one"), refused
    lost = [line for line in lines_of(certain.get("out") or b"") if line not in lines_of(after["out"])]
    if lost and job.name != "overwrite":
        return f"{len(lost)} lines that were on the disk are lost", refused
    return ("" if after["out"] == reference else "another result than without a break"), refused


def reference_of(job, top):
    """What the job makes undisturbed."""
    os.makedirs(top)
    if job.before:
        (prompts if job.form == "lines" else job.before)(top)
    words = [word for word in job.words if word not in ("--resume", "--overwrite")]
    status, said = run(top, words)
    if status:
        sys.exit(f"{job.name}: exit status {status}: {said}")
    made = snapshot(top)
    if job.form == "directory":
        return {path: content for path, content in made.items() if path.startswith("out/")}
    return made["out"]


def record(job, work):
    """The files before a job and its changes."""
    top, log = os.path.join(work, "state"), os.path.join(work, "log")
    shutil.rmtree(top, ignore_errors=True)
    os.makedirs(top)
    if job.before:
        job.before(top)
    for path, content in OTHERS.items():
        with open(os.path.join(top, path), "wb") as f:
            f.write(content)
    before = snapshot(top)
    os.mkfifo(log)  # a file would have at most job.room bytes, too
    heard = []
    reader = threading.Thread(target=lambda: heard.append(open(log, "rb").read()))
    reader.start()
    status, said = run(top, job.words, log, job.room)
    os.close(os.open(log, os.O_RDWR))  # ends the reader if nobody has written
    reader.join()
    os.remove(log)
    if (status == 0) != (job.room is None):
        sys.exit(f"{job.name}: exit status {status}: {said}")
    changes = list(changes_of(heard[0], top, before))
    # what the calls come to is what is there, or the record has missed one
    whole = draw_state(changes, before, random.Random(0), everything=True)[0]
    if whole != snapshot(top):
        there = snapshot(top)
        wrong = sorted(path for path in {*whole, *there} if whole.get(path, 0) != there.get(path, 0))
        sys.exit(f"{job.name}: the record has missed something of {', '.join(wrong)}")
    return before, changes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=210, help="states, divided among the jobs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", choices=[job.name for job in JOBS])
    parser.add_argument("--keep", metavar="DIR", help="where the first state that goes wrong is left")
    args = parser.parse_args()
    for needed in (FLEXGEN, LIBRARY):
        if not os.path.exists(needed):
            sys.exit(f"crash_states.py: {needed}: is not there; make build/flexgen_host build/faults.so")
    jobs = [job for job in JOBS if args.job in (None, job.name)]
    wrong = 0
    with tempfile.TemporaryDirectory() as work:
        for job in jobs:
            reference = reference_of(job, os.path.join(work, "whole-" + job.name))
            before, changes = record(job, work)
            count, refusals = max(1, args.count // len(jobs)), 0
            for number in range(count):
                draw = random.Random(f"{args.seed} {job.name} {number}")
                state, certain = draw_state(changes, before, draw)
                fault, refused = judge(job, os.path.join(work, "state"), state, certain, reference)
                refusals += refused
                if not fault:
                    continue
                wrong += 1
                print(f"{job.name}, --seed {args.seed}, state {number}: {fault.strip()}")
                if args.keep and wrong == 1:
                    restore(args.keep, state)
            print(f"{job.name:10} {len(changes):5} changes, {count:5} states: {count - refusals} end well, {refusals} are refused")
    print(f"{wrong} states went wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
