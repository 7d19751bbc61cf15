#!/usr/bin/env python3
"""Run the small studies of docs/EXPERIMENTS.md and draw them into build/experiments/.

    python3 scripts/experiments.py [NAME ...]      all of them, or those named: about a minute in all
    python3 scripts/experiments.py prediction --here      this one also on this machine, which is measured first: two minutes
    python3 scripts/experiments.py [NAME ...] --docs      into docs/experiments/, and the points into docs/EXPERIMENTS.md

Each study is one function: it runs ./flexgen with other flags each time, and gives its points to draw(), which also prints
them. Change a number and run it again. Needs only Python's standard library, 3.8 or later.
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile

from plot_trace import INK, box, document, label, legend, number, tick_step

DOCS, TEXT, T4 = "--docs" in sys.argv, "docs/EXPERIMENTS.md", "hardware/t4.json"
FLEXGEN = os.environ.get("FLEXGEN", "./flexgen")
FOLDER = "docs/experiments" if DOCS else "build/experiments"
TMP = tempfile.TemporaryDirectory()
COLORS = ["#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b", "#9c755f"]
STORIES = "eval --model models/opt-tiny --perplexity models/opt-tiny/stories.txt --window 256 --limit 16"


# ------------------------------------------------------------------ runs

def machine(**changed):
    """A hardware file: the T4 with some numbers changed."""
    with open(T4, encoding="utf-8") as f:
        numbers = {k: v for k, v in json.load(f).items() if k != "sources"}
    path = os.path.join(TMP.name, "-".join(f"{k}={v:g}" for k, v in changed.items()) + ".json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump({**numbers, **changed}, f)
    return path


def flexgen(flags):
    """(the figures of one run, what it said on standard error); None if the machine is too small."""
    r = subprocess.run([FLEXGEN, *flags.split(), "--json", "-"], capture_output=True, text=True)
    if r.returncode == 2 and re.search("no policy|needs|does not fit|lacks", r.stderr):
        return None
    if r.returncode:
        sys.exit(f"flexgen {flags}: {r.stderr.splitlines()[-1] if r.stderr else r.returncode}")
    return json.loads(r.stdout), r.stderr


def sim(flags, hardware=T4):
    return flexgen(f"bench --device sim --hardware {hardware} {flags}")[0]


# ------------------------------------------------------------------ drawing

class Axis:
    """From pixel a to pixel b; logarithmic (base 2 marks), or from 0."""

    def __init__(self, values, a, b, log):
        self.log, self.a, self.b = log, a, b
        self.low, self.high = (min(values), max(values)) if log else (min(0, *values), max(values) * 1.05)
        step = None if log else tick_step(self.high - self.low, 7)
        self.ticks = sorted(set(values)) if log else [n * step for n in range(int(self.high / step) + 1)]

    def at(self, v):
        f = math.log(v / self.low) / math.log(self.high / self.low) if self.log else (v - self.low) / (self.high - self.low)
        return self.a + f * (self.b - self.a)


def draw(name, title, across, up, lines, log=False, points=False):
    """lines: {name: [(x, y)]}. Prints them and draws NAME.svg."""
    left, top, width, height = 70, 44, 620, 300
    x = Axis([p[0] for l in lines.values() for p in l], left, left + width, log)
    y = Axis([p[1] for l in lines.values() for p in l], top + height, top, False)
    parts = []
    for tick in y.ticks:
        parts.append(f"<path d='M{left} {number(y.at(tick))}h{width}' stroke='{INK}' stroke-opacity='.22'/>")
        parts.append(label(left - 8, y.at(tick) + 4, f"{tick:g}", 11, "end"))
    for tick in x.ticks:
        parts.append(label(x.at(tick), top + height + 17, f"{tick:g}", 11, "middle"))
    colors = dict(zip(lines, COLORS))
    for line, at in lines.items():
        path = "L".join(f"{number(x.at(a))} {number(y.at(b))}" for a, b in at)
        if not points:
            parts.append(f"<path d='M{path}' fill='none' stroke='{colors[line]}' stroke-width='2'/>")
        marks = "".join(box(x.at(a) - 3, y.at(b) - 3, 6, 6) for a, b in at)
        parts.append(f"<path d='{marks}' fill='{colors[line]}'/>")
    if points:  # where both are equal
        most = min(x.high, y.high)
        parts.append(f"<path d='M{number(x.at(0))} {number(y.at(0))}L{number(x.at(most))} {number(y.at(most))}' "
                     f"stroke='{INK}' stroke-dasharray='3 3'/>")
    parts += [label(left, top - 6, up, 11), label(left + width, top + height + 34, across, 11, "end")]
    entries, more = legend(colors, left, top + height + 44, width)
    os.makedirs(FOLDER, exist_ok=True)
    with open(f"{FOLDER}/{name}.svg", "w", encoding="utf-8") as f:
        f.write(document(left + width + 24, top + height + 48 + more, title, parts + entries))
    said = f"{title}: {up} by {across}\n"
    for line, at in lines.items():
        said += f"  {line}: " + ", ".join(f"{a:g}: {b:.4g}" for a, b in at) + "\n"
    print(said, end="")
    if DOCS:
        write_points(name, said)


def write_points(name, said):
    """Into the listing of that name, if there is one."""
    with open(TEXT, encoding="utf-8") as f:
        text = f.read()
    listing = re.compile(rf"(<!-- points {name} -->\n```text\n).*?(```\n)", re.S)
    with open(TEXT, "w", encoding="utf-8") as f:
        f.write(listing.sub(lambda m: m[1] + said + m[2], text))


# ------------------------------------------------------------------ the studies

def overlap():
    run = "--model opt-1.3b --gpu-batch-size 16 --num-gpu-batches 4 --percent 0 100 100 0 100 0 --gen-len 16"
    rates = [3, 6, 12, 24, 48, 96]
    lines = {name: [(r, sim(f"{run} {flag}", machine(ctog_bdw=r * 1e9))["decode_throughput"]) for r in rates]
             for name, flag in (("overlapped", ""), ("--no-overlap", "--no-overlap"))}
    draw("overlap", "Overlap", "GB/s of the link ctog", "token/s while decoding", lines, log=True)


def block():
    batches = [1, 2, 4, 8, 16, 32]
    runs = [(k, sim(f"--model opt-6.7b --gpu-batch-size 8 --num-gpu-batches {k} --percent 50 50 0 100 0 100 "
                    "--cpu-cache-compute")) for k in batches]
    draw("block-throughput", "Block size and throughput", "GPU batches of a block", "token/s",
         {"throughput": [(k, r["throughput"]) for k, r in runs]}, log=True)
    draw("block-latency", "Block size and latency", "GPU batches of a block", "seconds of the block",
         {"latency": [(k, r["T"]) for k, r in runs]}, log=True)


def bits():
    widths = range(2, 9)
    lines = {name: [(b, flexgen(f"{STORIES} {flag} --bits {b}")[0]["perplexity"]) for b in widths]
             for name, flag in (("weights", "--compress-weight"), ("KV cache", "--compress-cache"))}
    exact = flexgen(STORIES)[0]["perplexity"]
    draw("bits", "Bits of a number", "bits (groups of 64)", "perplexity",
         {**lines, "FP16": [(2, exact), (8, exact)]}, log=True)


def sparsity():
    shares = [.02, .05, .1, .2, .4, .7, 1]
    found = [(100 * f, flexgen(f"{STORIES} --attn-sparsity {f}")[0]["perplexity"]) for f in shares]
    draw("sparsity", "Sparse attention", "percent of V that is read", "perplexity", {"perplexity": found}, log=True)


def pages():
    sizes = [1, 4, 16, 64, 256]
    rooms, rates = [], []
    for size in sizes:
        figures, said = flexgen(f"bench --device sim --hardware {T4} --model opt-6.7b --gpu-batch-size 8 --num-gpu-batches 4 "
                                f"--percent 50 50 0 100 0 100 --prompt-len 16-300 --gen-len 32 --page-tokens {size}")
        rooms.append((size, float(re.search(r"KV cache ([\d.]+) MiB", said)[1])))
        rates.append((size, figures["decode_throughput"]))
    percent = lambda values: [(a, 100 * v / values[0][1]) for a, v in values]
    draw("pages", "Page size", "tokens of a page", "percent of that with pages of 1 token",
         {"bytes of the KV cache": percent(rooms), "token/s while decoding": percent(rates)}, log=True)


def machines():
    lines = {}
    for rate in (6, 12, 24, 48):
        found = [(g, flexgen(f"policy --model opt-30b --hardware {machine(gmem=g * 1e9, ctog_bdw=rate * 1e9, gtoc_bdw=rate * 1e9)}"))
                 for g in (8, 16, 24, 32, 48, 64, 80)]
        lines[f"{rate} GB/s"] = [(g, r[0]["throughput"]) for g, r in found if r]
    draw("machines", "OPT-30B on machines that one dreams up", "GB of GPU memory", "token/s of the best policy", lines)


def prediction():
    blocks = (2, 1), (4, 2), (8, 4)
    shares = ("100 0 100 0 100 0", "0 100 100 0 100 0", "50 50 0 100 0 100", "50 50 0 100 0 100 --cpu-cache-compute",
              "20 40 30 70 100 0")
    flags = [f"--gpu-batch-size {g} --num-gpu-batches {k} --percent {p}" for g, k in blocks for p in shares]
    runs = [sim(f"--model opt-1.3b --gen-len 16 {f}") for f in flags]
    pairs = lambda runs: [(r["predicted"]["throughput"], r["throughput"]) for r in runs]
    draw("prediction-sim", "Prediction beside the sim", "predicted token/s", "token/s", {"opt-1.3b, the sim": pairs(runs)}, points=True)
    if "--here" not in sys.argv:
        return
    here = f"{TMP.name}/here.json"
    subprocess.run([FLEXGEN, "profile", "--model", "opt-125m", "--output", here], check=True,
                   env={**os.environ, "XDG_CACHE_HOME": TMP.name})
    runs = [flexgen(f"bench --device host --hardware {here} --model opt-125m --prompt-len 64 --gen-len 16 {f}")[0] for f in flags]
    draw("prediction-here", "Prediction beside measurement", "predicted token/s", "token/s", {"opt-125m, this machine": pairs(runs)},
         points=True)


def stages():
    lines = {}
    for name, net in (("10 Gbit/s, 0.1 ms", "1.25G,0.1ms"), ("0.1 Gbit/s, 5 ms", "12.5M,5ms")):
        lines[name] = [(m, sim("--model opt-6.7b --percent 0 100 100 0 100 0 --gpu-batch-size 8 --num-gpu-batches 2 --gen-len 16 "
                               f"--num-prompts 144 --nodes {m} --net {net}")["throughput"]) for m in (1, 2, 4, 8)]
    draw("stages", "Stages of a pipeline", "machines", "token/s", lines)


STUDIES = {f.__name__: f for f in (overlap, block, bits, sparsity, pages, machines, prediction, stages)}

if __name__ == "__main__":
    names = [a for a in sys.argv[1:] if a not in ("--here", "--docs")] or list(STUDIES)
    for n in names:
        if n not in STUDIES:
            sys.exit(f"experiments.py: {n}: expected some of {', '.join(STUDIES)}")
        STUDIES[n]()
