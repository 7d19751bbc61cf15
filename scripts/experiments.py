#!/usr/bin/env python3
"""Run the small studies of docs/EXPERIMENTS.md, print their points and draw them into build/experiments/.

    python3 scripts/experiments.py [NAME ...]      all of them, or those named: two minutes in all
    python3 scripts/experiments.py NAME --device host --flags "--model opt-125m --prompt-len 64"
                                                   measured on this computer, and not simulated; or --device cuda
    python3 scripts/experiments.py NAME --hardware hardware/h100.json       simulated on another machine
    python3 scripts/experiments.py [NAME ...] --docs       into docs/experiments/, and the points into docs/EXPERIMENTS.md
    python3 scripts/experiments.py [NAME ...] --check      compares with these; `make experiments` does so with all of them

--flags adds flags to every run of ./flexgen; of two of a kind the last one counts. FLEXGEN names another program.

Each study is one function: it runs ./flexgen with other flags each time, and gives its points to draw(), which also prints
them. Change a number and run it again. Needs only Python's standard library, 3.8 or later.
"""
import argparse
import glob
import json
import math
import os
import re
import subprocess
import sys
import tempfile

from plot_trace import LINE, box, document, label, legend, number, tick_step

TEXT, PLOTS = "docs/EXPERIMENTS.md", "docs/experiments"
FLEXGEN = os.environ.get("FLEXGEN", "./flexgen")
TMP = tempfile.TemporaryDirectory()
COLORS = ["#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b", "#9c755f"]
# The sim computes the same everywhere. A perplexity has the roundings of the processor's instructions, which move it by less
# than a thousandth; a mistake in packing or choosing moves it by percents.
TOLERANCE = {"bits": .005, "sparsity": .005, "accuracy": .005}


# ------------------------------------------------------------------ runs

def flexgen(flags, may_be_large=False):
    """(the figures of one run, what it said on standard error); None if it does not fit the machine, where that may be."""
    command = [FLEXGEN, *flags.split(), *args.flags.split(), "--json", "-"]
    r = subprocess.run(command, capture_output=True, text=True)
    if may_be_large and r.returncode == 2 and re.search("no policy|needs|does not fit|lacks", r.stderr):
        return None
    if r.returncode:
        sys.exit(f"{' '.join(command)}: {r.stderr.splitlines()[-1] if r.stderr else r.returncode}")
    return json.loads(r.stdout), r.stderr


def machine(hardware="hardware/t4.json", **changed):
    """The flags for a machine with some of its numbers changed; --hardware goes before the study's own."""
    return f"--hardware {args.hardware or hardware}" + "".join(f" --with {key}={value:g}" for key, value in changed.items())


def bench(flags, hardware="hardware/t4.json", may_be_large=False, **changed):
    """A run on the device: on the sim of such a machine, or on this one with its links slowed."""
    if args.device == "sim":
        return flexgen(f"bench --device sim {machine(hardware, **changed)} {flags}", may_be_large)
    links = ",".join(f"{key[:4]}={value:g}" for key, value in changed.items())
    if links and args.device == "cuda":
        sys.exit("experiments.py: the links of a real GPU are as fast as they are; --device host and sim can slow them")
    here = f"--hardware {args.hardware}" if args.hardware else ""
    return flexgen(f"bench --device {args.device} {here} {'--link ' + links if links else ''} {flags}", may_be_large)


def perplexity(flags):
    """Of the stories beside the shipped model."""
    device = "host" if args.device == "sim" else args.device
    return flexgen(f"eval --device {device} --model models/opt-tiny --perplexity models/opt-tiny/stories.txt "
                   f"--window 256 --limit 16 {flags}")[0]["perplexity"]


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
        parts.append(f"<path d='M{left} {number(y.at(tick))}h{width}' stroke='{LINE}' stroke-opacity='.22'/>")
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
                     f"stroke='{LINE}' stroke-dasharray='3 3'/>")
    parts += [label(left, top - 6, up, 11), label(left + width, top + height + 34, across, 11, "end")]
    entries, more = legend(colors, left, top + height + 44, width)
    said = f"{title}: {up} by {across}\n"
    for line, at in lines.items():
        said += f"  {line}: " + ", ".join(f"{a:g}: {b:.4g}" for a, b in at) + "\n"
    tell(name, said, document(left + width + 24, top + height + 48 + more, title, parts + entries))


# ------------------------------------------------------------------ telling, keeping and comparing

def alike(a, b, tolerance):
    """Whether two texts have the same words, and numbers that differ by no more than this share."""
    figures = r"\d+(?:\.\d+)?"
    numbers = [[float(n) for n in re.findall(figures, text)] for text in (a, b)]
    return re.sub(figures, "#", a) == re.sub(figures, "#", b) and \
        all(abs(x - y) <= tolerance * max(x, y) for x, y in zip(*numbers))


def kept(path):
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as f:
        return f.read()


def keep(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def tell(name, said, svg):
    """Prints the points, and writes or compares them and the drawing. What was not simulated has its device in its name."""
    name += "" if args.device == "sim" else f"-{args.device}"
    path, document = f"{PLOTS}/{name}.svg", kept(TEXT)
    listing = re.compile(rf"(<!-- points {name} -->\n```text\n)(.*?)(```\n)", re.S)
    there = listing.search(document)
    print(said, end="", flush=True)
    if args.check:
        for what, old, new in ((f"the points of {name} in {TEXT}", there[2] if there else "", said), (path, kept(path), svg)):
            if new and not alike(old, new, TOLERANCE.get(name, 0)):
                print(f"  {what}: has something else; --docs writes it anew")
                stale.append(what)
        return
    if svg:
        keep(path if args.docs else f"build/experiments/{name}.svg", svg)
    if args.docs and there:
        keep(TEXT, listing.sub(lambda m: m[1] + said + m[3], document))


# ------------------------------------------------------------------ the studies

def overlap():
    run = "--model opt-1.3b --gpu-batch-size 16 --num-gpu-batches 4 --percent 0 100 100 0 100 0 --gen-len 16"
    rates = [3, 6, 12, 24, 48, 96]
    lines = {name: [(r, bench(f"{run} {flag}", ctog_bdw=r * 1e9)[0]["decode_throughput"]) for r in rates]
             for name, flag in (("overlapped", ""), ("--no-overlap", "--no-overlap"))}
    draw("overlap", "Overlap", "GB/s of the link ctog", "token/s while decoding", lines, log=True)


def block():
    batches = [1, 2, 4, 8, 16, 32]
    runs = [(k, bench(f"--model opt-6.7b --gpu-batch-size 8 --num-gpu-batches {k} --percent 50 50 0 100 0 100 "
                      "--cpu-cache-compute")[0]) for k in batches]
    draw("block-throughput", "Block size and throughput", "GPU batches of a block", "token/s",
         {"throughput": [(k, r["throughput"]) for k, r in runs]}, log=True)
    draw("block-latency", "Block size and latency", "GPU batches of a block", "seconds of the block",
         {"latency": [(k, r["T"]) for k, r in runs]}, log=True)


def bits():
    widths = range(2, 9)
    lines = {name: [(b, perplexity(f"{flag} --bits {b}")) for b in widths]
             for name, flag in (("weights", "--compress-weight"), ("KV cache", "--compress-cache"))}
    exact = perplexity("")
    draw("bits", "Bits of a number", "bits (groups of 64)", "perplexity",
         {**lines, "FP16": [(2, exact), (8, exact)]}, log=True)


def sparsity():
    shares = [.02, .05, .1, .2, .4, .7, 1]
    found = [(100 * f, perplexity(f"--attn-sparsity {f}")) for f in shares]
    draw("sparsity", "Sparse attention", "percent of V that is read", "perplexity", {"perplexity": found}, log=True)


def pages():
    sizes = [1, 4, 16, 64, 256]
    rooms, rates = [], []
    for size in sizes:
        figures, said = bench("--model opt-6.7b --gpu-batch-size 8 --num-gpu-batches 4 --percent 50 50 0 100 0 100 "
                              f"--prompt-len 16-300 --gen-len 32 --page-tokens {size}")
        rooms.append((size, float(re.search(r"KV cache ([\d.]+) MiB", said)[1])))
        rates.append((size, figures["decode_throughput"]))
    percent = lambda values: [(a, 100 * v / values[0][1]) for a, v in values]
    draw("pages", "Page size", "tokens of a page", "percent of that with pages of 1 token",
         {"bytes of the KV cache": percent(rooms), "token/s while decoding": percent(rates)}, log=True)


def machines():
    lines = {}
    for rate in (6, 12, 24, 48):
        found = [(g, flexgen("policy --model opt-30b " + machine(gmem=g * 1e9, ctog_bdw=rate * 1e9, gtoc_bdw=rate * 1e9), True))
                 for g in (8, 16, 24, 32, 48, 64, 80)]
        lines[f"{rate} GB/s"] = [(g, r[0]["throughput"]) for g, r in found if r]
    draw("machines", "OPT-30B on machines that one dreams up", "GB of GPU memory", "token/s of the best policy", lines)


def prediction():
    blocks = (2, 1), (4, 2), (8, 4)
    shares = ("100 0 100 0 100 0", "0 100 100 0 100 0", "50 50 0 100 0 100", "50 50 0 100 0 100 --cpu-cache-compute",
              "20 40 30 70 100 0")
    model, more, what = "opt-1.3b", "", "the sim"
    if args.device != "sim":  # so small that a computer has it done in two minutes
        model, here, what = "opt-125m", f"{TMP.name}/here.json", "measurement"
        more = f"--prompt-len 64 --hardware {args.hardware or here}"
        if not args.hardware:
            subprocess.run([FLEXGEN, "profile", "--device", args.device, "--model", model, "--output", here], check=True,
                           env={**os.environ, "XDG_CACHE_HOME": TMP.name})
    runs = [bench(f"--model {model} --gen-len 16 --gpu-batch-size {g} --num-gpu-batches {k} --percent {p} {more}")[0]
            for g, k in blocks for p in shares]
    draw("prediction", f"Prediction beside {what}", "predicted token/s", "token/s",
         {f"{model}, {what}": [(r["predicted"]["throughput"], r["throughput"]) for r in runs]}, points=True)


def stages():
    lines = {}
    for name, net in (("10 Gbit/s, 0.1 ms", "1.25G,0.1ms"), ("0.1 Gbit/s, 5 ms", "12.5M,5ms")):
        lines[name] = [(m, bench("--model opt-6.7b --percent 0 100 100 0 100 0 --gpu-batch-size 8 --num-gpu-batches 2 --gen-len 16 "
                                 f"--num-prompts 144 --nodes {m} --net {net}")[0]["throughput"]) for m in (1, 2, 4, 8)]
    draw("stages", "Stages of a pipeline", "machines", "token/s", lines)


def card():
    """The policy is searched for: on the sim of a laptop's card of 8 GB, or on the card that is here."""
    sizes = [.5, 1, 2, 3, 4, 6]
    lines = {name: [(g, bench(f"--model opt-1.3b --gpu-mem {g}G {flag}", "hardware/laptop.json", True)) for g in sizes]
             for name, flag in (("16 bits", ""), ("4 bits where that is faster", "--allow-compression"))}
    draw("card", "OPT-1.3B on a card of 8 GB", "GiB of it that may be used", "token/s",
         {name: [(g, r[0]["throughput"]) for g, r in runs if r] for name, runs in lines.items()})


def accuracy():
    """The shipped model's, and that of every real OPT in models/ or in --flags."""
    ways = {"FP16": "", "4-bit weights": "--compress-weight", "4-bit cache": "--compress-cache",
            "4-bit": "--compress-weight --compress-cache", "4-bit-S": "--compress-weight --compress-cache --attn-sparsity 0.1"}
    given = re.search(r"--model +(\S+)", args.flags)
    models = [given[1]] if given else sorted(os.path.dirname(f) for f in glob.glob("models/*/config.json"))
    for model in models:
        name = os.path.basename(model.rstrip("/"))
        found = {way: perplexity(f"--model {model} {flags}") for way, flags in ways.items()}
        said = f"{name}: perplexity, and beside that of FP16\n" + "".join(
            f"  {way:<14} {p:7.2f}  x {p / found['FP16']:.3f}\n" for way, p in found.items())
        if name == "opt-tiny":
            tell("accuracy", said, None)
        else:  # no document has these figures
            print(said, end="")


def cards():
    """{name: the machine of the two cards that the next studies compare}; or the one machine that is given or here."""
    if args.device != "sim" or args.hardware:
        return {"this machine": args.hardware}
    return {"RTX 3060": "hardware/rtx3060.json", "RTX 3090": "hardware/rtx3090.json"}


def placement():
    shares = [100, 80, 60, 40, 20, 0]
    lines = {}
    for model in ("opt-1.3b", "opt-6.7b"):
        for card, hardware in cards().items():
            runs = [(wg, bench(f"--model {model} --percent {wg} {100 - wg} 100 0 100 0 --gpu-batch-size 8 --num-gpu-batches 1 "
                               "--prompt-len 256 --gen-len 32", hardware, True)) for wg in shares]
            lines[f"{model}, {card}"] = [(wg, r[0]["decode_throughput"]) for wg, r in runs if r]
    draw("placement", "Weights on the GPU", "percent of the weights on the GPU", "token/s while decoding", lines)


def equal_memory():
    lines = {}
    for card, hardware in cards().items():
        most = json.load(open(hardware))["gmem"] / 2**30 if hardware else math.inf
        sizes = [g for g in (4, 6, 8, 10, 11, 12, 16, 20) if g <= most]
        for bits, flag in (("16 bits", ""), ("4 bits", "--compress-weight --compress-cache")):
            runs = [(g, bench(f"--model opt-6.7b --gpu-mem {g}G --prompt-len 256 --gen-len 32 {flag}", hardware, True)) for g in sizes]
            lines[f"{card}, {bits}"] = [(g, r[0]["throughput"]) for g, r in runs if r]
    draw("equal_memory", "OPT-6.7B in 16 and in 4 bits", "GiB of the GPU that may be used", "token/s", lines)


def blocks():
    batches = [1, 2, 4, 8, 16]
    lines = {}
    for card, hardware in cards().items():
        for name, flag in (("overlapped", ""), ("--no-overlap", "--no-overlap")):
            runs = [(k, bench(f"--model opt-1.3b --percent 0 100 0 100 0 100 --gpu-batch-size {64 // k} --num-gpu-batches {k} "
                              f"--prompt-len 256 --gen-len 32 {flag}", hardware, True)) for k in batches]
            lines[f"{card}, {name}"] = [(k, r[0]["decode_throughput"]) for k, r in runs if r]
    draw("blocks", "64 sequences in batches", "GPU batches of the block", "token/s while decoding", lines, log=True)


STUDIES = {f.__name__: f for f in (overlap, block, bits, sparsity, pages, machines, prediction, stages, card, accuracy, placement,
                                   equal_memory, blocks)}
SIMULATED = "machines", "stages"  # on no other device

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--device", choices=["sim", "host", "cuda"], default="sim")
    parser.add_argument("--hardware", metavar="FILE", help="the machine (that of each study)")
    parser.add_argument("--flags", default="", metavar="FLAGS", help="more flags for every run")
    parser.add_argument("--docs", action="store_true", help="write into docs/, not into build/experiments/")
    parser.add_argument("--check", action="store_true", help="compare with docs/, write nothing")
    args, stale = parser.parse_args(), []
    if args.check and (args.docs or args.hardware or args.flags or args.device != "sim"):
        parser.error("--check compares what is simulated as it stands; leave the other options out")
    for n in args.names:
        if n not in STUDIES:
            parser.error(f"{n}: expected some of {', '.join(STUDIES)}")
        if n in SIMULATED and args.device != "sim":
            parser.error(f"{n}: is about machines that are not here; leave --device out")
    for n in args.names or [n for n in STUDIES if args.device == "sim" or n not in SIMULATED]:
        STUDIES[n]()
    sys.exit(1 if stale else 0)
