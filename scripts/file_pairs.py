#!/usr/bin/env python3
"""Draws command lines with two files each, and checks that no file is lost.

    python3 scripts/file_pairs.py [--count N] [--seed S] [--flexgen FILE]

Each of the two is an input or an output of one command: a flag's, or standard output or error. Both lead to one file, or to two: prompts, a machine, a text, a file of the model, an old result, the journal of the output, the output of a
job that runs, or a file that is still to be made. Each is named plainly, by a detour, by a link, by a second name (hard
link), or as /dev/fd/N. Whatever is drawn, the command does its work, or says in one line why not, and

  - no file but its outputs has other bytes, another mode or another inode than before, and nothing is left beside them;
  - a file that is an input or another output as well is no output: then the command is refused;
  - an output keeps its mode, and a link stays a link.

Prints what does not hold, and fails. Needs only Python's standard library, 3.8 or later, and Linux.
"""
import argparse
import fcntl
import os
import random
import shutil
import subprocess
import sys
import tempfile

MODEL = ["config.json", "vocab.json", "merges.txt", "model.safetensors"]
READ, WRITTEN = "read", "written"
STREAMS = [">>", "2>>"]
MODEL_HERE = "--model m --percent 100 0 100 0 100 0 --gpu-batch-size 2 --num-gpu-batches 1 --threads 1"
BENCHED = "--prompt-len 4 --gen-len 2 --num-prompts 2"
COMMANDS = {  # what is always there, and the flags of files
    "generate": (f"{MODEL_HERE} --max-tokens 2",
                 {"--prompts": READ, "--hardware": READ, "--output": WRITTEN, "--trace": WRITTEN}),
    "bench": (f"{MODEL_HERE} {BENCHED}", {"--hardware": READ, "--json": WRITTEN, "--trace": WRITTEN}),
    "bench ": (f"--model opt-125m --device sim {BENCHED}", {"--hardware": READ, "--json": WRITTEN, "--trace": WRITTEN}),
    "policy": (f"--model m {BENCHED}", {"--hardware": READ, "--json": WRITTEN}),
    "eval": (f"{MODEL_HERE} --limit 1", {"--perplexity": READ, "--hardware": READ, "--json": WRITTEN, "--trace": WRITTEN}),
    "eval ": (f"{MODEL_HERE} --limit 1", {"--last-word": READ, "--hardware": READ, "--json": WRITTEN, "--trace": WRITTEN}),
    "eval  ": (f"{MODEL_HERE} --limit 1", {"--score": READ, "--hardware": READ, "--output": WRITTEN, "--trace": WRITTEN}),
    "quantize": ("--model m", {"--output": WRITTEN}),
}
NEEDED = {"--prompts": "prompts", "--hardware": "machine", "--perplexity": "text", "--last-word": "text", "--score": "text"}
BUSY = ["busy", "busy.journal"]  # drawn less often, since the command waits a while for the end of the other job
FILES = ["prompts", "machine", "text", "old", "old.journal", "new", "new.journal"] + ["m/" + name for name in MODEL]
WAYS = ["plain", "detour", "link", "hard link", "/dev/fd", "-"]


class Trial:
    """One command line in a directory of its own files; the model's are the same in all."""

    def __init__(self, draw, directory, flexgen):
        self.draw, self.dir, self.opened, self.files = draw, directory, [], []
        command = draw.choice(list(COMMANDS))
        always, flags = COMMANDS[command]
        self.argv = [flexgen, command.strip()] + always.split()
        self.streams = {"<": subprocess.DEVNULL, ">>": subprocess.PIPE, "2>>": subprocess.PIPE}
        self.make_files()
        roles = draw.sample(sorted(flags) + STREAMS, 2)
        first, second = [draw.choice(FILES if draw.random() < .95 else BUSY) for _ in roles]
        for role, name in zip(roles, [first, first if draw.random() < .6 else second]):
            self.give(role, name, flags.get(role, WRITTEN))
        for flag, name in NEEDED.items():
            if flag in flags and flag not in roles:
                self.argv += [flag, name]
                self.files.append((name, READ, flag))
        if command == "quantize" and "--output" not in roles:
            self.argv += ["--output", "copy"]
        if command == "generate" and draw.random() < .7:
            self.argv += [draw.choice(["--overwrite", "--overwrite", "--resume"])]

    def path(self, name):
        return os.path.join(self.dir, name)

    def make_files(self):
        """Makes all files anew but the model's; of the two of a job that runs, this process plays the job."""
        for name in os.listdir(self.dir):
            if name != "m":
                path = self.path(name)
                shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        shutil.copy("hardware/laptop.json", self.path("machine"))
        for name, text in [("prompts", "Once\n"), ("text", '{"text": "Once upon a time"}\n'), ("old", "old\n"),
                           ("busy", "busy\n"), ("busy.journal", "busy\n")]:
            with open(self.path(name), "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(self.path(name), self.draw.choice([0o600, 0o640, 0o644]))
        for name in BUSY:
            fcntl.flock(self.open(name, os.O_RDWR), fcntl.LOCK_EX)

    def give(self, role, name, kind):
        """Gives the command a file in a role, by a name that is drawn."""
        there = os.path.exists(self.path(name))
        if role not in STREAMS:
            self.argv += [role, self.name(role, name, there, kind)]
        elif there:
            self.streams[role] = self.open(name, os.O_WRONLY | os.O_APPEND)
        else:
            return
        self.files.append((name, kind, role))

    def open(self, name, how):
        """Opens a file, until the command has ended."""
        self.opened.append(os.open(self.path(name), how))
        return self.opened[-1]

    def name(self, role, name, there, kind):
        """Returns one of the names of a file, or "-" for standard input."""
        way = self.draw.choice(WAYS)
        if way == "detour":
            return os.path.join("..", os.path.basename(self.dir), name)
        if way in ("link", "hard link") and there:
            other = f"{way.replace(' ', '')}{role}"
            (os.symlink if way == "link" else os.link)(name if way == "link" else self.path(name), self.path(other))
            return other
        if way == "/dev/fd" and there:
            return f"/dev/fd/{self.open(name, os.O_RDONLY if kind == READ else os.O_RDWR)}"
        if way == "-" and there and role in ("--prompts", "--perplexity"):
            self.streams["<"] = self.open(name, os.O_RDONLY)
            return "-"
        return name

    def state(self):
        """Every file: its inode, mode, size and time of change of its bytes; a link: where it leads."""
        found = {}
        for directory, _, names in os.walk(self.dir):
            for name in names:
                path = os.path.join(directory, name)
                st = os.lstat(path)
                found[os.path.relpath(path, self.dir)] = (st.st_ino, oct(st.st_mode), st.st_size, st.st_mtime_ns) \
                    if not os.path.islink(path) else os.readlink(path)
        return found

    def run(self):
        """Returns what does not hold."""
        before = self.state()
        r = subprocess.run(self.argv, cwd=self.dir, stdin=self.streams["<"], stdout=self.streams[">>"],
                           stderr=self.streams["2>>"], pass_fds=self.opened, timeout=100, check=False)
        after, wrong = self.state(), []
        for fd in self.opened:
            os.close(fd)
        said = (r.stderr or b"").decode(errors="replace")
        errors = said.count("flexgen: ")
        if r.returncode not in (0, 1, 2) or (r.stderr is not None and errors != (r.returncode > 0)):
            wrong.append(f"ends with {r.returncode}: {said}")
        wrong += self.lost(before, after, r.returncode == 0)
        wrong += [f"{name} is left" for name in after if ".tmp-" in name]
        return r.returncode, wrong

    def lost(self, before, after, done):
        """Returns which files are others than they may be."""
        wrong = []
        for name, state in before.items():
            now, parts = after.get(name), self.parts(name, before)
            written = {role for kind, role in parts if kind == WRITTEN}
            appended = now and now[:2] == state[:2]  # as it may be at a stream, which gets the line of a refusal
            if not written:
                right = now == state or (name == "old.journal" and "--output" in self.argv)
            elif written <= set(STREAMS) and len(written) == len(parts):
                right = appended
            elif ">>" in written and len(written) == len(parts):
                right = appended  # another name of standard output
            elif len(parts) > 1:
                right = not done and (now == state or ("2>>" in written and appended))
            else:
                right = now and now[1] == state[1] and (name not in BUSY or now == state)
            if not right:
                wrong.append(f"{name} was {state}, and is {now}; it is {parts}")
        return wrong

    def parts(self, name, before):
        """Returns in which roles a file is given, by whatever of its names."""
        same = {other for other, state in before.items() if state == before[name]}
        parts = [(kind, role) for other, kind, role in self.files if other in same]
        return parts + ([(READ, "--model")] if name.startswith("m/") and "m" in self.argv else [])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--flexgen", default="./flexgen")
    given = parser.parse_args()
    flexgen, failures, ends = os.path.abspath(given.flexgen), 0, {}
    with tempfile.TemporaryDirectory(prefix="flexgen-pairs-") as directory:
        os.mkdir(os.path.join(directory, "m"))
        os.environ["XDG_CACHE_HOME"] = directory
        for i in range(given.count):
            for name in MODEL:  # a line of a refusal may stand in one
                shutil.copy(os.path.join("models/opt-tiny", name), os.path.join(directory, "m"))
            trial = Trial(random.Random(given.seed * 1000003 + i), directory, flexgen)
            status, wrong = trial.run()
            ends[status] = ends.get(status, 0) + 1
            if wrong:
                failures += 1
                print(f"trial {i}: {' '.join(trial.argv[1:])}\n    {trial.files}\n    " + "\n    ".join(wrong))
    print(f"{given.count} command lines: {ends.get(0, 0)} done, {given.count - ends.get(0, 0)} refused; {failures} wrong")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
