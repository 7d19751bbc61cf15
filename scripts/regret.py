#!/usr/bin/env python3
"""regret.py: how much better than the searched policy others are, on random machines. Standard library only.

    python3 scripts/regret.py --seed 1 --count 150 --jobs 2    in the repository, after `make`

A case is a machine of hardware/, mostly with some other numbers, a model and a task; its seed draws it again. The program chooses a
policy for it. Others are random blocks, schedules and processors for attention, with the placement that the search finds for them, and
small steps from the best so far. The device `sim` plays all of them and is the judge: the regret is the best of them / the searched one
- 1. Where the number of prompts is open, both are token/s less the price of a block's size (policy_score in cost/search.c).

What is printed are the worst cases, as commands, and the figures of all. With --check the exit status is 1 if these are above the bars."""
import argparse, concurrent.futures, glob, json, math, os, random, statistics, subprocess, sys

FLEXGEN = os.environ.get("FLEXGEN", "./flexgen")
LAYERS = {"opt-125m": 12, "opt-350m": 24, "opt-1.3b": 24, "opt-2.7b": 32, "opt-6.7b": 32, "opt-13b": 40, "opt-30b": 48, "opt-66b": 64}
VARIED = ["gmem", "cmem", "ctog_bdw", "gtoc_bdw", "dtoc_bdw", "ctod_bdw", "mm_flops", "bmm_flops_p", "bmm_flops_g", "cpu_flops", "cpu_bdw", "op_s"]
SQUARES = 30000         # layers x batches x sweeps that another policy may take: about a third of a second
PRICE_OF_BLOCKS = .01   # as in cost/search.c
MOST_BATCHES = 64       # as there
LARGEST_BLOCK = 4096    # of a task whose prompts are not counted, as in flexgen.c
MANY, BAD, SHOWN = .02, .1, 20
BARS = {"mean": .006, "share over 2%": .06, "median": .001}


def draw_case(seed):
    """A machine and a task, as flags."""
    r = random.Random(seed)
    path = r.choice([f for f in sorted(glob.glob("hardware/*.json")) if "h200" not in f])
    with open(path) as f:
        machine = json.load(f)
    words = ["--hardware", path]
    for key in r.sample(VARIED, r.choice([0, 0, 1, 2, 4])):
        if key in machine:
            words += ["--with", f"{key}={machine[key] * math.exp(r.uniform(-1.4, 1.4)):.6g}"]
    model = r.choice(list(LAYERS))
    s, n = r.choice([32, 64, 128, 256, 512, 1024]), r.choice([4, 8, 16, 32, 64])
    count = r.choice([None, None] + [int(math.exp(r.uniform(1, 6)))] * 3)
    words += ["--model", model, "--prompt-len", str(s), "--gen-len", str(n)]
    return {"seed": seed, "flags": words + (["--num-prompts", str(count)] if count else []), "layers": LAYERS[model], "n": n, "count": count}


def play(case, policy=(), limit=300):
    """What a policy, as flags of which some may be left out, makes in the sim; None: it does not fit, or takes too long."""
    words = [FLEXGEN, "bench", "--device", "sim", "--json", "-", *case["flags"], *policy]
    try:
        r = subprocess.run(words, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    if r.returncode == 2:
        return None
    if r.returncode:
        print(f"regret.py: {' '.join(words)}: {r.stderr.splitlines()[-1]}", file=sys.stderr)
        return None
    d = json.loads(r.stdout)
    block = d["gbs"] * d["num_gpu_batches"]
    d["worth"] = d["throughput"] / (1 if case["count"] else 1 + PRICE_OF_BLOCKS * math.log2(block))
    return d


def shares(d):
    return [d[key] for key in ("wg", "wc", "cg", "cc", "hg", "hc")]


def percent(share):
    return ["--percent", *(f"{100 * x:.8g}" for x in share)]


def block(gbs, batches, schedule, cpu):
    return ["--gpu-batch-size", str(gbs), "--num-gpu-batches", str(batches), "--schedule", schedule] + ["--cpu-cache-compute"] * cpu


def policy(d):
    """The policy of a run, as flags."""
    return block(d["gbs"], d["num_gpu_batches"], d["schedule"], d["cpu_cache_compute"]) + percent(shares(d))


def small_enough(case, gbs, batches):
    if not case["count"] and gbs * batches > LARGEST_BLOCK:
        return False
    return case["layers"] * -(-(case["count"] or gbs * batches) // gbs) * case["n"] <= SQUARES


def step_from(r, case, d):
    """Flags of a policy beside that of a run: another block, for which the search finds the placement, or another placement."""
    gbs, batches, schedule, cpu, share = d["gbs"], d["num_gpu_batches"], d["schedule"], d["cpu_cache_compute"], shares(d)
    kind = r.choice(["block", "block", "schedule", "attention", "placement"])
    if kind == "block":
        gbs = max(1, round(gbs * r.choice([.5, .7, .85, 1, 1, 1.15, 1.4, 2])))
        batches = max(1, min(MOST_BATCHES, round(batches * r.choice([.5, .7, 1, 1, 1.4, 2])) + r.choice([-1, 0, 0, 1])))
    elif kind == "schedule":
        schedule = "zigzag" if schedule == "diagonal" else "diagonal"
    elif kind == "attention":
        cpu = not cpu
    else:
        of, size = 2 * r.randrange(3), r.choice([.01, .03, .1, 1])
        up, down = r.choice([(1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)])
        share[of] = min(1, max(0, share[of] + size * up))
        share[of + 1] = min(1 - share[of], max(0, share[of + 1] + size * down))
    gbs = min(gbs, case["count"] or gbs)
    keeps = kind == "placement" or r.random() > .8
    return block(gbs, batches, schedule, cpu) + percent(share) * keeps if small_enough(case, gbs, batches) else None


def draw_policy(r, case):
    """Flags of a policy with a random block, schedule and attention."""
    gbs, batches = int(2**r.uniform(0, 8)), int(2**r.uniform(0, 5.2))
    gbs = min(gbs, case["count"] or gbs)
    return block(gbs, batches, r.choice(["zigzag", "diagonal"]), r.randrange(2)) if small_enough(case, gbs, batches) else None


def find_regret(case, tries):
    """Adds to a case its regret, the searched run and the best one; None: nothing fits."""
    r, tried = random.Random(case["seed"] + 1), set()
    searched = best = play(case)
    for i in range(tries if searched else 0):
        words = draw_policy(r, case) if i < tries // 3 else step_from(r, case, best)
        if not words or tuple(words) in tried:
            continue
        tried.add(tuple(words))
        other = play(case, [*words, "--no-rehearsal"], 30)
        if other and other["worth"] > best["worth"]:
            best = other
    return searched and case | {"regret": best["worth"] / searched["worth"] - 1, "searched": searched, "best": best}


def show(case):
    searched, best = case["searched"], case["best"]
    print(f"{case['regret']:.1%}, seed {case['seed']}: predicted {searched['predicted']['throughput']:.5g} token/s, made "
          f"{searched['throughput']:.5g}, possible {best['throughput']:.5g}\n    bench --device sim {' '.join(case['flags'])}\n"
          f"    searched {' '.join(policy(searched))}\n    better   {' '.join(policy(best))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--count", type=int, default=150, help="of cases")
    parser.add_argument("--tries", type=int, default=45, help="other policies of each case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true", help="fail above the bars")
    parser.add_argument("--keep", help="a file for all cases, as JSON")
    args = parser.parse_args()
    cases = [draw_case(seed) for seed in range(args.seed, args.seed + args.count)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        done = sorted(filter(None, pool.map(lambda c: find_regret(c, args.tries), cases)), key=lambda c: -c["regret"])
    if args.keep:
        with open(args.keep, "w") as f:
            json.dump(done, f)
    for case in done[:SHOWN]:
        if case["regret"] > MANY:
            show(case)
    regrets = [case["regret"] for case in done]
    count = lambda bar: sum(x > bar for x in regrets)
    figures = {"mean": statistics.fmean(regrets), "share over 2%": count(MANY) / len(done), "median": statistics.median(regrets)}
    print(f"{len(done)} of {len(cases)} cases from seed {args.seed} fit; regret: median {figures['median']:.2%}, mean {figures['mean']:.2%}, "
          f"over 2%: {count(MANY)}, over 10%: {count(BAD)}, worst {max(regrets):.1%}")
    above = [key for key in BARS if figures[key] > BARS[key]]
    if args.check and above:
        sys.exit(f"regret.py: above the bar: {', '.join(above)}")


if __name__ == "__main__":
    main()
