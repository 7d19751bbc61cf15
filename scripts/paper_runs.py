"""paper_runs.py: runs of the program for paper.py, two at a time, and Markdown tables of them."""
import concurrent.futures, json, os, re, subprocess, sys, tempfile

FLEXGEN = os.environ.get("FLEXGEN", "./flexgen")
GPU = os.environ.get("GPU") == "1"  # also measure, on the GPU at hand
TMP = tempfile.TemporaryDirectory()
POOL = concurrent.futures.ThreadPoolExecutor(1 if GPU else 2)  # what is measured wants the machine for itself
ROOM = 64  # GiB of a GPU tier that takes every policy
LONGEST = 1800  # seconds of a measured run
T4, FITTED = "hardware/t4.json", "hardware/t4-fitted.json"
HOST = "--device host --hardware hardware/laptop.json --threads 1"  # a real run here; the file spares it measuring the machine
FIGURES = ("throughput", "decode_throughput", "T", "prefill_s", "decode_s", "schedule", "flights", "gbs", "num_gpu_batches",
           "wg", "wc", "cg", "cc", "hg", "hc", "cpu_cache_compute", "compress_weight", "compress_cache")  # of a run in runs.json
ACCURACIES = "perplexity", "last_word_accuracy"
HELP = subprocess.run([FLEXGEN, "help"], capture_output=True, text=True).stdout
MEASURED = ["on the GPU"] if GPU else []  # a column


class Run:
    """One run of the program, which begins when there is room in the pool; who asks for a figure waits for it. changed: what
    differs from the hardware file. One that is in `kept` begins only when a figure is asked for that is not kept."""
    all = {}
    kept = {}  # runs.json's entries by command, flags and what is changed; paper.py --check reads them

    def __init__(self, command, flags, changed):
        self.command, self.flags, self.changed = command, " ".join(flags.split()), changed
        self.shown, self.parts = [], []  # lines of README.md; figures besides FIGURES that runs.json keeps
        self.known = Run.kept.get((command, self.flags, repr(changed)))
        self.future = None if self.known else POOL.submit(self.execute)

    def result(self):
        """All figures, or why there are none."""
        self.future = self.future or POOL.submit(self.execute)
        return self.future.result()

    def execute(self):
        """Its figures, to six digits; or a text: why there are none."""
        out = os.path.join(TMP.name, f"{id(self)}.json")
        flags = self.flags.replace(T4, self.write_hardware()) if self.changed else self.flags
        words, measured = [FLEXGEN, self.command, "--json", out, *flags.split()], "--device cuda" in flags
        try:
            r = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST if measured else None)
        except subprocess.TimeoutExpired:
            return f"longer than {LONGEST // 60} minutes"
        if r.returncode == 0:
            with open(out) as f:
                return json.load(f, parse_float=lambda x: float(f"{float(x):.6g}"))
        last = r.stderr.splitlines()[-1] if r.returncode > 0 and r.stderr else f"exit status {r.returncode}"
        needs = re.search(r"the (\w+) tier needs ([\d.]+) MiB", last)
        if needs:
            return f"needs {number(float(needs[2]) / 1024)} GiB" + (f" of {needs[1]}" if needs[1] != "GPU" else "")
        if measured:
            return last.replace("flexgen: ", "").split(";")[0]
        sys.exit(f"{' '.join(words)}: {last}")

    def write_hardware(self):
        with open(T4) as f:
            h = json.load(f)
        for name in ["sources", *self.changed]:  # a rate of both stages gives way to those of one
            h.pop(name[:-2] if name.endswith(("_p", "_g")) else name, None)
        path = os.path.join(TMP.name, f"{id(self)}-hardware.json")
        with open(path, "w") as f:
            json.dump({**h, **self.changed}, f)
        return path

    def refused(self):
        if self.known:
            return self.known.get("refused")
        return self.result() if isinstance(self.result(), str) else None

    def has(self, name):
        """Whether there is such an object in its JSON."""
        if self.known:
            return any(figure.startswith(f"{name}_") for figure in self.known.get("figures", {}))
        return name in self.result()

    def __getitem__(self, path):
        """run["tiers.GPU.planned_bytes"]"""
        if self.refused():
            sys.exit(f"{self.command} {self.flags}: {self.refused()}")
        if self.known and path != "frontier":  # of which a part is kept
            kept = re.sub(r"^tiers\.(\w+)\.planned_bytes$", r"planned_\1", re.sub(r"^(pipeline|chain)\.", r"\1_", path))
            if kept in self.known["figures"]:
                return self.known["figures"][kept]
        found = self.result()
        for name in path.split("."):
            found = found[name]
        return found

    def roomy(self):
        """Itself, or where the GPU tier is too small, the same with more of it."""
        small = "--device sim" in self.flags and (self.refused() or "").endswith("GiB")
        return run(self.command, f"{self.flags} --gpu-mem {ROOM}G", self.changed) if small else self

    def text(self):
        """In a table: its throughput, or why there is none and what it would be."""
        if not self.refused():
            searched = "--device cuda" in self.flags and "--percent" not in self.flags
            return number(self["throughput"]) + (f" ({policy(self)})" if searched else "")
        return self.refused() + (f" (with them {number(self.roomy()['throughput'])})" if self.roomy() is not self else "")

    def entry(self):
        """Itself in runs.json, with the lines of README.md in which it is shown. Of real runs no times are kept."""
        entry = {"command": self.command, "flags": self.flags.replace(TMP.name, "TMP"), "changed": self.changed, "shown": self.shown}
        if self.refused():
            return {**entry, "refused": self.refused()}
        found, keep = self.result(), FIGURES if "--device host" not in self.flags else ACCURACIES
        figures = {name: found[name] for name in keep if name in found}
        figures.update({name: self[name] for name in self.parts})
        figures.update({f"planned_{t}": tier["planned_bytes"] for t, tier in found.get("tiers", {}).items() if figures})
        for part in ("pipeline", "chain") if "--nodes" in self.flags and self.command == "policy" else ():
            figures.update({f"{part}_{name}": found[part][name] for name in FIGURES if name in found.get(part, {})})
        if "frontier" in found:
            figures["frontier"] = [[p["latency"], p["throughput"]] for p in found["frontier"]]
        return {**entry, "figures": figures}


def run(command, flags, changed=None):
    key = command, " ".join(flags.split()), repr(changed or {})
    if key not in Run.all:
        Run.all[key] = Run(command, flags, changed or {})
    return Run.all[key]


def sim(model, flags="", s=512, hardware=T4, changed=None):
    """32 tokens for prompts of s on a machine made of numbers."""
    return run("bench", f"--device sim --hardware {hardware} --model {model} --prompt-len {s} --gen-len 32 {flags}", changed)


def measured(model, flags="", s=512):
    """The same on the GPU at hand with a T4's memory: [its cell], or [] where none was asked for."""
    return [run("bench", f"--device cuda --gpu-mem 15G --model {model} --prompt-len {s} --gen-len 32 {flags}")] if GPU else []


def knows(flag):
    return f"{flag} " in HELP


# ---------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------

def said(text):
    """A paragraph in one line of Markdown."""
    return " ".join(text.split())


def number(x):
    return f"{x:.0f}" if abs(x) >= 999.5 else f"{x:.3g}"


def unit(x):
    """A hardware file's number, with a unit of thousands."""
    return f"{x / 1e12:.4g} T" if x >= 1e12 else f"{x / 1e9:.4g} G" if x >= 1e8 else f"{x:g}"


def percent(x):
    return f"{100 * x:.0f}%"


def span(values):
    values = sorted(values)
    return number(values[0]) + (f" to {number(values[-1])}" if number(values[0]) != number(values[-1]) else "")


def published(x):
    return "out of memory" if x is None else f"{x:g}"


def shares(r, prefix=""):
    return " ".join(f"{100 * r[prefix + f]:.0f}" for f in ("wg", "wc", "cg", "cc", "hg", "hc"))


def policy(r, prefix=""):
    """flights x (if there are several) GPU batch size x batches, then wg wc cg cc hg hc."""
    flights = f"{r[prefix + 'flights']:g} x " if r[prefix + "flights"] > 1 else ""
    return f"{flights}{r[prefix + 'gbs']:g} x {r[prefix + 'num_gpu_batches']:g}, {shares(r, prefix)}"


def table(head, *rows):
    """Lines of Markdown; where a cell is a run, it learns its line."""
    lines = ["", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    show = lambda c: c.text() if isinstance(c, Run) else c if isinstance(c, str) else number(c)
    for row in rows:
        lines.append("| " + " | ".join(map(show, row)) + " |")
        for cell in row:
            for r in {cell, cell.roomy()} if isinstance(cell, Run) else ():
                r.shown.append(lines[-1])
    return lines + [""]
