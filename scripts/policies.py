#!/usr/bin/env python3
"""policies.py [PART...]: the cost model and the policy search against the clock, as tables. Standard library only.

  predict   unlike policies on this machine, on its own links and on slow ones: what the cost model says and what they take
  best      three emulated machines: the policy that the search finds beside 60 random and hand-made ones
  search    how long a search takes; what it finds for every OPT size and hardware file

All by default, in about an hour on two cores; predict and best want an idle machine. Run it in the repository after `make`.
--repeat N: predict takes N rounds (1). --flexgen FILE, or FLEXGEN in the environment, names another program."""
import argparse, datetime, glob, itertools, json, os, platform, random, resource, statistics, subprocess, sys, tempfile

FLEXGEN = os.environ.get("FLEXGEN", "./flexgen")
TMP = tempfile.TemporaryDirectory()
REPEAT = 1


def flexgen(command, flags, pin=False):
    """The JSON of one run; None: the policy does not fit."""
    out = os.path.join(TMP.name, "run.json")
    words = ["taskset", "-c", "0"] * pin + [FLEXGEN, command, "--json", out] + flags.split()
    r = subprocess.run(words, capture_output=True, text=True)
    if r.returncode == 2 and "tier needs" in r.stderr:
        return None
    if r.returncode:
        sys.exit(f"{' '.join(words)}: {r.stderr.splitlines()[-1] if r.stderr else r.returncode}")
    with open(out) as f:
        return json.load(f)


def bench(flags):
    return flexgen("bench", f"--device host {flags}")


def row(*cells):
    shown = lambda c: str(c) if not isinstance(c, float) else f"{c:.0f}" if c >= 1000 else f"{c:.3g}"
    print("| " + " | ".join(map(shown, cells)) + " |", flush=True)


def head(*columns):
    print()
    row(*columns)
    row(*["---"] * len(columns))


def machine():
    """What a reader must know of the machine, in a line."""
    with open("/proc/cpuinfo") as f:
        model = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def profile():
    """This machine as numbers, measured now."""
    path = os.path.join(TMP.name, "machine.json")
    subprocess.run([FLEXGEN, "profile", "--device", "host", "--model", "opt-125m", "--output", path], check=True, capture_output=True)
    with open(path) as f:
        h = json.load(f)
    print(f"\nflexgen profile: ctog {h['ctog_bdw'] / 1e9:.2f}, gtoc {h['gtoc_bdw'] / 1e9:.2f}, dtoc {h['dtoc_bdw'] / 1e9:.2f}, ctod "
          f"{h['ctod_bdw'] / 1e9:.2f} GB/s; products {h['mm_flops_p'] / 1e9:.1f} GFLOP/s of 1024 rows, {h['mm_flops_g'] / 1e9:.1f} of 16; "
          f"attention of the CPU {h['cpu_bdw'] / 1e9:.1f} GB/s", flush=True)
    return h


def hardware_file(h):
    path = os.path.join(TMP.name, "hardware.json")
    with open(path, "w") as f:
        json.dump(h, f)
    return path


# ---------------------------------------------------------------------------------------------------------------
# predict
# ---------------------------------------------------------------------------------------------------------------

PREDICT = [  # what, links, the task and the whole policy
    ("all on the GPU", "", "--prompt-len 64 --gen-len 24 --gpu-batch-size 8 --num-gpu-batches 2 --percent 100 0 100 0 100 0"),
    ("weights on CPU", "", "--prompt-len 64 --gen-len 24 --gpu-batch-size 8 --num-gpu-batches 2 --percent 0 100 100 0 100 0"),
    ("weights and cache on CPU, GPU attention", "",
     "--prompt-len 128 --gen-len 24 --gpu-batch-size 4 --num-gpu-batches 3 --percent 0 100 0 100 100 0"),
    ("weights and cache on CPU, CPU attention", "",
     "--prompt-len 128 --gen-len 24 --gpu-batch-size 4 --num-gpu-batches 3 --percent 0 100 0 100 100 0 --cpu-cache-compute"),
    ("all on all three, 30/30/40", "",
     "--prompt-len 64 --gen-len 16 --gpu-batch-size 8 --num-gpu-batches 2 --percent 30 30 30 30 30 30"),
    ("weights on disk", "", "--prompt-len 64 --gen-len 12 --gpu-batch-size 8 --num-gpu-batches 2 --percent 0 0 100 0 100 0"),
    ("row by row, a third of the weights on CPU", "",
     "--prompt-len 64 --gen-len 16 --gpu-batch-size 4 --num-gpu-batches 3 --num-prompts 12 --schedule row --percent 67 33 100 0 100 0"),
    ("weights over a slow link", "ctog=0.3G",
     "--prompt-len 64 --gen-len 12 --gpu-batch-size 8 --num-gpu-batches 2 --percent 0 100 100 0 100 0"),
    ("cache over a slow link", "ctog=0.1G,gtoc=0.1G",
     "--prompt-len 128 --gen-len 12 --gpu-batch-size 4 --num-gpu-batches 3 --percent 100 0 0 100 100 0"),
    ("activations and cache over slow links, CPU attention", "ctog=0.01G,gtoc=0.01G",
     "--prompt-len 64 --gen-len 16 --gpu-batch-size 4 --num-gpu-batches 3 --percent 100 0 0 100 0 100 --cpu-cache-compute"),
    ("cache and activations on a slow disk", "dtoc=0.1G,ctod=0.05G",
     "--prompt-len 64 --gen-len 12 --gpu-batch-size 4 --num-gpu-batches 4 --percent 100 0 0 0 0 0"),
    ("weights on a slow disk, CPU attention", "dtoc=0.2G,ctod=0.15G",
     "--prompt-len 64 --gen-len 12 --gpu-batch-size 8 --num-gpu-batches 2 --percent 20 20 0 100 0 100 --cpu-cache-compute"),
    ("diagonal, three blocks, weights over a slow link", "ctog=0.7G",
     "--prompt-len 64 --gen-len 12 --gpu-batch-size 2 --num-gpu-batches 4 --num-prompts 24 --schedule diagonal "
     "--percent 0 100 0 100 100 0 --cpu-cache-compute"),
]


def predict():
    """The cost model beside the host device. Every policy is given in full, so that nothing is searched for."""
    print(f"\n## Predicted and measured: opt-125m, the host device, {REPEAT} round{'s' * (REPEAT > 1)}, each with its own profile")
    rounds = []
    for _ in range(REPEAT):
        known = f"--model opt-125m --hardware {hardware_file(profile())} "
        rounds.append([bench(known + flags + (links and " --link " + links)) for _, links, flags in PREDICT])
    worst = 0
    head("", "policy", "--link", "T predicted (s)", "measured", "ratio", "of the rounds", "T_pre", "T_gen", "bound by")
    for i, (name, links, _) in enumerate(PREDICT):
        runs = [r[i] for r in rounds]
        ratios = {key: [r["predicted"][key] / r[key] for r in runs] for key in ("T", "T_pre", "T_gen")}
        ratio = {key: statistics.median(ratios[key]) for key in ratios}
        worst = max(worst, abs(ratio["T"] - 1))
        row(i + 1, name, links or "-", statistics.median(r["predicted"]["T"] for r in runs), statistics.median(r["T"] for r in runs),
            f"{ratio['T']:.2f}", " ".join(f"{x:.2f}" for x in ratios["T"]), f"{ratio['T_pre']:.2f}", f"{ratio['T_gen']:.2f}",
            f"{runs[0]['predicted']['bound']['T_pre']} {runs[0]['predicted']['bound']['T_gen']}")
    print(f"\nMedians of the rounds; ratio: predicted / measured, of T, and of T_pre and T_gen, the seconds of a layer in sweeps with a prefill "
          f"and in the others. The worst T is off by {worst:.0%} (bar: 15%). The policies:\n")
    for i, (_, _, flags) in enumerate(PREDICT):
        print(f"{i + 1}. `{flags}`")


# ---------------------------------------------------------------------------------------------------------------
# best
# ---------------------------------------------------------------------------------------------------------------

MACHINES = [  # what, links, MiB of the GPU and CPU tier, the task
    ("A: slow PCIe", "ctog=0.3G,gtoc=0.3G", 200, 4096, 32, "--prompt-len 32 --gen-len 24"),
    ("B: little CPU memory, so that the disk must be used", "dtoc=0.2G,ctod=0.15G", 150, 120, 32, "--prompt-len 32 --gen-len 24"),
    ("C: fast links, little GPU memory", "", 180, 4096, 8, "--prompt-len 192 --gen-len 48"),
]
ALL, AGAIN, TIMES, TOO_SLOW = 60, 3, 6, 1.5


class Tried:
    """A policy with everything given."""

    def __init__(self, origin, gbs, batches, schedule, percent, cpu):
        self.origin, self.gbs, self.batches, self.schedule, self.percent, self.cpu = origin, gbs, batches, schedule, tuple(percent), cpu
        self.predicted, self.rates = None, []

    def flags(self):
        return (f" --gpu-batch-size {self.gbs} --num-gpu-batches {self.batches} --schedule {self.schedule} --percent "
                f"{' '.join(f'{x:g}' for x in self.percent)}{' --cpu-cache-compute' if self.cpu else ''}")

    def __str__(self):
        return f"{self.gbs} x {self.batches} {self.schedule}, {' '.join(f'{x:g}' for x in self.percent)}, {'CPU' if self.cpu else 'GPU'} attention"

    def rate(self):
        return statistics.median(self.rates)


def policy_of(found, origin):
    """The one in a run's or a search's JSON."""
    percent = [round(100 * found[x], 1) for x in ("wg", "wc", "cg", "cc", "hg", "hc")]
    return Tried(origin, int(found["gbs"]), int(found["num_gpu_batches"]), found["schedule"], percent, found["cpu_cache_compute"])


def emulated(h, links, gpu, cpu):
    """The measured machine with slow links and little memory."""
    h = dict(h, gmem=gpu * 2**20, cmem=cpu * 2**20)
    for link in filter(None, links.split(",")):
        name, rate = link.split("=")
        h[name + "_bdw"] = min(h[name + "_bdw"], float(rate.rstrip("G")) * 1e9)
    return h


def fits(policy, task):
    """Whether it does; then also what the cost model says of it. Asked of the sim, which runs at once; `flexgen policy` would itself
    choose who attends."""
    run = flexgen("bench", "--device sim " + task + policy.flags())
    policy.predicted = run and run["predicted"]["throughput"]
    return run is not None


def by_hand(task, n):
    """What a person would try: blocks of one, two and four batches, the cache here or there, then the weights as high up as they fit."""
    for batches in (1, 2, 4):
        for cache, activations, cpu in (((100, 0), (100, 0), False), ((0, 100), (100, 0), True), ((0, 100), (100, 0), False),
                                        ((0, 100), (0, 100), True), ((50, 50), (100, 0), True), ((0, 50), (100, 0), True),
                                        ((0, 0), (100, 0), False)):
            tries = (Tried("by hand", n // batches, batches, "zigzag", (100 - wd - wc, wc) + cache + activations, cpu)
                     for wd in range(0, 101, 10) for wc in range(0, 101 - wd, 10))
            yield from itertools.islice((p for p in tries if fits(p, task)), 1)


def around(p, n):
    """What a person would change in the policy that the search found."""
    for gbs, batches, schedule, cpu in ((p.gbs, p.batches, p.schedule, not p.cpu), (p.gbs // 2, p.batches, p.schedule, p.cpu),
                                        (p.gbs // 2, p.batches * 2, p.schedule, p.cpu), (p.gbs, p.batches * 2, p.schedule, p.cpu),
                                        (p.gbs * 2, p.batches // 2, p.schedule, p.cpu), (p.gbs // 4, p.batches * 2, "diagonal", p.cpu)):
        if gbs and batches and gbs * batches <= n:
            yield Tried("around it", gbs, batches, schedule, p.percent, cpu)


def at_random(rng, n):
    """Corners half of the time."""
    def shares():
        if rng.random() < .5:
            return rng.choice(((100, 0), (0, 100), (0, 0)))
        a, b = sorted((5 * rng.randint(0, 20), 5 * rng.randint(0, 20)))
        return a, b - a
    while True:
        gbs = rng.choice([g for g in (1, 2, 4, 8, 12, 16, 24, 32) if g <= n])
        batches = rng.randint(1, min(8, n // gbs))
        schedule = rng.choice(("zigzag", "zigzag", "diagonal", "row"))
        yield Tried("random", gbs, batches, schedule, shares() + shares() + shares(), rng.random() < .5)


def draw(task, n, searched):
    """60 unlike policies that fit: some around the searched one, some made by hand, the others random."""
    chosen = {}
    for p in itertools.chain(around(searched, n), by_hand(task, n), at_random(random.Random(1), n)):
        if str(p) not in chosen and str(p) != str(searched) and (p.predicted or fits(p, task)):
            chosen[str(p)] = p
        if len(chosen) == ALL:
            return list(chosen.values())


def measure(p, flags):
    """One more run; the searched policy is searched for again. True: it was refused."""
    run = bench(flags + (p.flags() if p.origin != "searched" else ""))
    if run:
        p.rates.append(run["throughput"])
    return run is None


def compare(h, name, links, gpu, cpu, n, lengths):
    task = f"--model opt-125m {lengths} --num-prompts {n} --hardware {hardware_file(emulated(h, links, gpu, cpu))}"
    run = task + f" --gpu-mem {gpu}M --cpu-mem {cpu}M" + (links and " --link " + links)
    first = bench(run)
    if not first:
        return print(f"\n{name}: the search finds nothing")
    searched = policy_of(first, "searched")
    searched.rates.append(first["throughput"])
    searched.predicted = first["predicted"]["throughput"]
    chosen = draw(task, n, searched)
    slow = [p for p in chosen if p.predicted < searched.predicted / TOO_SLOW]
    chosen = [p for p in chosen if p not in slow]
    for p in chosen:
        measure(p, run)
    chosen.sort(key=lambda p: -p.rates[0])
    best, searched.rates, refusals = chosen[:AGAIN], [], 0
    for p in best:
        p.rates = []
    again = [searched] + best
    for i in range(TIMES):  # rounds, each in another order: the machine drifts
        for p in again[i % len(again):] + again[:i % len(again)]:
            refusals += measure(p, run)
    print(f"\n### {name}: {links or 'its own links'}, GPU tier of {gpu} MiB, CPU tier of {cpu} MiB; {n} prompts, {lengths}")
    head("policy", "from", "predicted token/s", "measured", "ratio", "")
    for p in [searched] + sorted(best, key=lambda p: -p.rate()) + chosen[AGAIN:12]:
        times = f"median of {len(p.rates)}: {', '.join(f'{x:.1f}' for x in p.rates)}" if len(p.rates) > 1 else ""
        row(p, p.origin, f"{p.predicted:.1f}", f"{p.rate():.1f}", f"{p.predicted / p.rate():.2f}", times)
    off = sorted(p.predicted / p.rate() for p in chosen)
    origins = ", ".join(f"{sum(p.origin == x for p in chosen + slow)} {x}" for x in ("around it", "by hand", "random"))
    print(f"\n{len(chosen)} of the {len(chosen) + len(slow)} ({origins}) ran, the others are predicted over {TOO_SLOW}x slower than the "
          f"searched one. Predicted / measured of those that ran: median {statistics.median(off):.2f}, "
          f"from {off[0]:.2f} to {off[-1]:.2f}; slowest {chosen[-1].rates[0]:.1f} token/s. Refusals after a successful search: {refusals}.")
    ratios = [statistics.median(x / y for x, y in zip(searched.rates, p.rates)) for p in best]
    print(f"searched / best of the {ALL}, medians of {TIMES} rounds: {min(ratios):.3f} (bar: 0.95)", flush=True)


def best():
    print(f"\n## The searched policy beside {ALL} others: opt-125m, the host device")
    h = profile()
    for m in MACHINES:
        compare(h, *m)


# ---------------------------------------------------------------------------------------------------------------
# search
# ---------------------------------------------------------------------------------------------------------------

MODELS = "opt-125m opt-350m opt-1.3b opt-2.7b opt-6.7b opt-13b opt-30b opt-66b opt-175b".split()


def processor_seconds(flags):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    flexgen("policy", flags, pin=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def search():
    print("\n## The search: 32 new tokens, blocks of any size")
    flags = "--model opt-175b --prompt-len 512 --gen-len 32 --hardware hardware/t4.json"
    times = sorted(processor_seconds(flags) for _ in range(7))
    print(f"\n`flexgen policy {flags}` on one core: {times[3]:.3f} s of processor time, user and system (median of 7, {times[0]:.3f} to "
          f"{times[6]:.3f}; bar: 0.2)")
    print("\nAll sizes on all machines of hardware/, 512 + 32 tokens:")
    head("machine", "model", "found", "token/s", "a block takes (s)", "T_pre by", "T_gen by", "full")
    for path in sorted(glob.glob("hardware/*.json")):
        for model in MODELS:
            found = flexgen("policy", f"--model {model} --prompt-len 512 --gen-len 32 --hardware {path}")
            if found is None:
                row(os.path.basename(path), model, "nothing fits", *["-"] * 5)
                continue
            bound = found["bound"]
            row(os.path.basename(path), model, policy_of(found, ""), found["throughput"], found["latency"], bound["T_pre"], bound["T_gen"],
                ", ".join(t for t in ("GPU", "CPU", "disk") if t in bound) or "-")


PARTS = {f.__name__: f for f in (predict, best, search)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--flexgen", default=FLEXGEN)
    parser.add_argument("--repeat", type=int, default=REPEAT)
    args = parser.parse_args()
    FLEXGEN, REPEAT = args.flexgen, args.repeat
    print(f"# policies.py, {datetime.date.today()}: {machine()}")
    for part in args.part or PARTS:
        PARTS[part]()
