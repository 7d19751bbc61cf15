#!/usr/bin/env python3
"""Ask docs/explore.html's program and this one the same questions, and compare what they answer, to the last digit.

    python3 scripts/explore_questions.py [NUMBER]    50 random questions, a large one, and some that must be refused; FLEXGEN names the program

Exit status 0: all answers are equal, or there is no node (a line says so). Needs Python's standard library and node.
"""
import base64
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

FLEXGEN = os.path.abspath(os.environ.get("FLEXGEN", "./flexgen"))
BEFORE = "let waiting; var onmessage; const postMessage = answer => waiting(answer);\n"  # what a worker has
BEHIND = """
(async () => {
  const fs = require("fs");
  onmessage({data: {module: await WebAssembly.compile(fs.readFileSync("flexgen.wasm"))}});
  for (const {args, files} of JSON.parse(fs.readFileSync("questions.json", "utf8"))) {
    const answer = new Promise(done => { waiting = done; });
    onmessage({data: {id: 0, args, files, read: ["answer.json"]}});
    console.log(JSON.stringify(await answer));
  }
})();
"""


def random_question(r, machines):
    model = r.choice(["opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "opt-175b"])
    machine = r.choice(machines)
    args = ["--model", model, "--prompt-len", str(r.choice([1, 32, 512, 1024, 1900])), "--gen-len", str(r.choice([1, 8, 32, 128])),
            "--hardware", machine]
    for key in r.sample(["gmem", "cmem", "nmem", "ctog_bdw", "dtoc_bdw"], r.randint(0, 2)):
        args += ["--with", f"{key}={r.choice([2e9, 8e9, 24e9, 2e11, 2e12]):.6g}"]
    if r.random() < .3:
        args += ["--allow-compression"]
    if r.random() < .2:
        args += ["--attn-sparsity", "0.1"]
    if r.random() < .4:
        args += ["--schedule", r.choice(["zigzag", "row", "diagonal"])]
    if r.random() < .2:
        args += ["--max-latency", str(r.choice([10, 300, 1000]))]
    if r.random() < .3:
        g, c = r.choice([(100, 0), (0, 100), (20, 80), (10, 40), (0, 0)]), r.choice([(0, 100), (50, 50), (0, 0)])
        args += ["--percent", *map(str, g), *map(str, c), "0", "100", "--gpu-batch-size", str(r.choice([1, 4, 32])), "--num-gpu-batches", str(r.choice([1, 3, 8]))]
        args += r.choice([[], ["--cpu-cache-compute"]])
    return args + r.choice([["--explain"], ["--explain"], ["--frontier"]])


# More bytes on each tier than 32 bits can count, which is what a page's size_t has.
LARGE = ["--model", "opt-175b", "--prompt-len", "512", "--gen-len", "32", "--hardware", "t4.json", "--percent", "0", "50", "0", "0", "0", "0",
         "--gpu-batch-size", "32", "--num-gpu-batches", "8", "--cpu-cache-compute", "--explain"]
REFUSED = [["--with", "ctog_bdw=0"], ["--prompt-len", "3000"], ["--with", "gmem=1"], ["--model", "opt-900b"], ["--percent", "90", "20", "0", "100", "0", "100"],
           ["--with", "speed=3"], ["--gpu-batch-size", "0"], ["--percent", "100", "0", "100", "0", "100", "0", "--gpu-batch-size", "64", "--num-gpu-batches", "9"]]


def untimed(said):
    """What was said, without the seconds that a rehearsal took."""
    return re.sub(r"(rehearsed on the sim: \d+), in [\d.]+ s", r"\1", said).strip()


def here(args):
    """This program's answer, as the page has it: exit status, what it said, its JSON."""
    with tempfile.TemporaryDirectory() as directory:
        for name in os.listdir("hardware"):
            os.symlink(os.path.abspath(os.path.join("hardware", name)), os.path.join(directory, name))
        ran = subprocess.run([FLEXGEN, *args], cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True)
        file = os.path.join(directory, "answer.json")
        return ran.returncode, untimed(ran.stderr), json.load(open(file)) if ran.returncode == 0 else None


def main():
    node = shutil.which("node") or shutil.which("nodejs")
    if not node:
        return print("explore_questions.py: skipped: no node")
    with open("docs/explore.html", encoding="utf-8") as f:
        text = f.read()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    worker = re.search(r'<script type="text/plain" id="worker">(.*?)</script>', text, re.S)[1]
    seed = int(os.environ.get("SEED", random.randrange(10 ** 6)))
    r, machines = random.Random(seed), [f"{name}.json" for name in data["machines"]]
    asked = [random_question(r, machines) for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 50)]
    asked.append(LARGE)
    asked += [["--model", "opt-30b", "--hardware", "t4.json", *bad] for bad in REFUSED]
    asked = [["policy", *args, "--json", "answer.json"] for args in asked]
    with tempfile.TemporaryDirectory() as directory:
        for name, content in (("ask.js", (BEFORE + worker + BEHIND).encode()), ("flexgen.wasm", gzip.decompress(base64.b64decode(data["wasm"]))),
                              ("questions.json", json.dumps([{"args": args, "files": {f"{name}.json": json.dumps(machine) for name, machine in data["machines"].items()}}
                                                             for args in asked]).encode())):
            with open(os.path.join(directory, name), "wb") as f:
                f.write(content)
        ran = subprocess.run([node, "ask.js"], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    answers, refused = [json.loads(line) for line in ran.stdout.splitlines()], 0
    if len(answers) != len(asked):
        sys.exit(f"explore_questions.py: node gave {len(answers)} answers to {len(asked)} questions: {ran.stderr[-500:]}")
    for args, got in zip(asked, answers):
        want = here(args)
        there = (got["status"], untimed("\n".join(got["said"])), json.loads(got["files"]["answer.json"]) if got["status"] == 0 else None)
        refused += want[0] != 0
        if there != want:
            sys.exit(f"explore_questions.py: SEED={seed}: flexgen {' '.join(args)}: here {str(want)[:600]}; the page: {str(there)[:600]}")
    print(f"{len(asked)} questions, {refused} of them refused: the page answers as the program does")


if __name__ == "__main__":
    main()
