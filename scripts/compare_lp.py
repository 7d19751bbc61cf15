#!/usr/bin/env python3
"""compare_lp.py [--flexgen ./flexgen] [--machines 500] [--seed 0]: the cost model `paper` beside another reading of it.

Writes Appendix A.3 as an LP a second time, from the paper's text, solves it with scipy's linprog (HiGHS), and compares with
`flexgen policy --cost-model paper --json -`: for every OPT size on each of N random machines with a random task and block, the
verdict must be the same (some placement fits, or none), and T, with T_pre and T_gen, equal to 1e-6. Each answer of flexgen's is
also put into the second LP: its fractions must meet every constraint and give its T. Exit status 1 if anything differs.

Needs scipy (made with 1.17)."""
import argparse, json, os, random, subprocess, sys, tempfile

import numpy as np
from scipy.optimize import linprog

OPT = {  # l, h1, nh; h2 = 4 h1
    "opt-125m": (12, 768, 12), "opt-350m": (24, 1024, 16), "opt-1.3b": (24, 2048, 32), "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32), "opt-13b": (40, 5120, 40), "opt-30b": (48, 7168, 56), "opt-66b": (64, 9216, 72),
    "opt-175b": (96, 12288, 96)}
NAMES = ["wg", "wc", "wd", "cg", "cc", "cd", "hg", "hc", "hd"]
LINKS = ["ctog_bdw", "gtoc_bdw", "dtoc_bdw", "ctod_bdw", "mm_flops", "bmm_flops", "cpu_flops"]
SAME = 1e-6


class Lin:
    """A linear function of the nine fractions: coefficients and a constant. Formulas are written with + - * / as printed."""

    def __init__(self, const=0.0, coef=None):
        self.c, self.a = float(const), np.zeros(9) if coef is None else coef

    def __add__(self, o):
        o = o if isinstance(o, Lin) else Lin(o)
        return Lin(self.c + o.c, self.a + o.a)

    def __mul__(self, k):
        return Lin(self.c * k, self.a * k)

    def __sub__(self, o):
        return self + (o if isinstance(o, Lin) else Lin(o)) * -1.0

    def __rsub__(self, o):
        return Lin(o) - self

    def __truediv__(self, k):
        return self * (1.0 / k)

    __radd__, __rmul__ = __add__, __mul__

    def at(self, x):
        return self.c + self.a @ x


FRACTIONS = [Lin(0, np.eye(9)[i]) for i in range(9)]


def a3(model, hw, s, n, gbs, bls):
    """A.3 as printed: the terms of T_pre and of T_gen in seconds, and (bytes, capacity) of every memory constraint."""
    l, h1, nh = OPT[model]
    h2 = 4 * h1
    wg, wc, wn, cg, cc, cn, hg, hc, hn = FRACTIONS
    p = {k: hw.get(k, hw.get(k + "_p")) for k in LINKS}
    g = {k: hw.get(k, hw.get(k + "_g")) for k in LINKS}
    W = 8 * h1**2 + 4 * h1 * h2
    pre = [
        ((wc + wn) * W + 2 * (hc + hn) * s * h1 * bls) / p["ctog_bdw"],
        (4 * (cc + cn) * (s + 1) * h1 * bls + 2 * (hc + hn) * s * h1 * bls) / p["gtoc_bdw"],
        (wn * W + 2 * hn * s * h1 * bls) / p["dtoc_bdw"],
        (4 * cn * bls * (s + 1) * h1 + 2 * hn * s * h1 * bls) / p["ctod_bdw"],
        Lin(bls * (8 * s * h1**2 + 4 * s * h1 * h2) / p["mm_flops"] + 4 * bls * s**2 * h1 / p["bmm_flops"])]
    gen = [
        ((wc + wn) * W + 2 * (hc + hn) * h1 * bls) / g["ctog_bdw"],
        (2 * (hc + hn) * h1 * bls) / g["gtoc_bdw"],
        (4 * cn * bls * (s + n / 2) * h1 + wn * W + 2 * hn * h1 * bls) / g["dtoc_bdw"],
        (4 * cn * bls * h1 + 2 * hn * h1 * bls) / g["ctod_bdw"],
        bls * W / g["mm_flops"] + 4 * cg * bls * (s + n / 2) * h1 / g["bmm_flops"]
        + 4 * (cc + cn) * bls * (s + n / 2) * h1 / g["cpu_flops"]]
    gpu_home_p = wg * W * l + hg * 2 * s * h1 * bls + 4 * (s + n) * h1 * cg * bls * l
    gpu_home_g = wg * W * l + hg * 2 * h1 * bls + 4 * (s + n) * h1 * cg * bls * l
    gpu_w = 2 * (1 - wg) * W + (1 - hg) * 2 * s * h1 * gbs  # printed alike for both stages
    work_p = [Lin(gbs * 8 * s * h1), cg * gbs * (2 * s * h1 + 2 * s * h1 + 2 * nh * s**2),
              cg * gbs * (2 * nh * s**2 + 2 * s * h1 + 2 * s * h1), Lin(gbs * 4 * s * h1), Lin(2 * gbs * s * (h1 + h2)),
              Lin(2 * gbs * s * (h1 + h2))]
    work_g = [Lin(8 * gbs * h1), cg * gbs * (2 * h1 + 2 * (s + n) * h1 + 2 * nh * (s + n)),
              cg * gbs * (2 * nh * (s + n) + 2 * (s + n) * h1 + 2 * h1), Lin(4 * gbs * h1), Lin(2 * gbs * (h1 + h2)),
              Lin(2 * gbs * (h2 + h1))]
    cpu_p = (wc * W * l + hc * 2 * s * h1 * bls + 4 * (s + n) * h1 * cc * bls * l
             + (1 - wg) * W + (1 - hg) * 2 * s * h1 * gbs)
    cpu_g = (wc * W * l + hc * 2 * h1 * bls + 4 * (s + n) * h1 * cc * bls * l + wn * W + 2 * hn * 2 * h1 * gbs
             + 2 * cn * 4 * (s + n) * h1 * gbs + 2 * nh * (s + n) * gbs + 2 * h1 * gbs)
    nvme = W * wn * l + hn * 2 * s * h1 * bls + cn * 4 * (s + n) * h1 * bls * l
    memory = ([(gpu_home_p + gpu_w + w, hw["gmem"]) for w in work_p] + [(gpu_home_g + gpu_w + w, hw["gmem"]) for w in work_g]
              + [(cpu_p, hw["cmem"]), (cpu_g, hw["cmem"]), (nvme, hw["nmem"])])
    return pre, gen, memory


def solve(model, hw, s, n, gbs, bls):
    """The optimum by HiGHS: T, or None where nothing fits. Times are counted in units of what they come to, bytes in capacities,
    as HiGHS's tolerances are absolute."""
    l = OPT[model][0]
    pre, gen, memory = a3(model, hw, s, n, gbs, bls)
    unit = [max(t.at(np.full(9, 1 / 3)) for t in terms) for terms in (pre, gen)]
    for _ in range(3):
        rows, rhs = [], []
        for stage, terms in enumerate((pre, gen)):
            for t in terms:
                rows.append(np.concatenate([t.a / unit[stage], [-1.0, 0.0] if stage == 0 else [0.0, -1.0]]))
                rhs.append(-t.c / unit[stage])
        for m, capacity in memory:
            rows.append(np.concatenate([m.a / capacity, [0.0, 0.0]]))
            rhs.append(1 - m.c / capacity)
        sums = [[float(i // 3 == k) for i in range(9)] + [0.0, 0.0] for k in range(3)]
        cost = [l * unit[0], (n - 1) * l * unit[1]]
        r = linprog([0.0] * 9 + [c / max(cost) for c in cost], A_ub=rows, b_ub=rhs, A_eq=sums, b_eq=[1.0] * 3,
                    bounds=[(0, None)] * 11, method="highs",
                    options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10})
        if r.status == 2:
            return None
        if r.status:
            raise RuntimeError(r.message)
        found = [max(t.at(r.x[:9]) for t in terms) for terms in (pre, gen)]
        if all(u / 4 < f < u * 4 for u, f in zip(unit, found)):
            break
        unit = found
    return l * (found[0] + (n - 1) * found[1])


def random_hardware(rng, model):
    """A machine on which the model is a squeeze, most of the time."""
    def between(lo, hi):
        return lo * (hi / lo) ** rng.random()
    l, h1, _ = OPT[model]
    weights = 24.0 * h1**2 * l
    hw = {"name": "random", "gmem": weights * between(0.02, 3), "cmem": weights * between(0.05, 10),
          "nmem": weights * between(0.1, 100)}
    ranges = {"ctog_bdw": (1e9, 6e10), "gtoc_bdw": (1e9, 6e10), "dtoc_bdw": (1e8, 1e10), "ctod_bdw": (5e7, 1e10),
              "mm_flops": (1e12, 1e15), "bmm_flops": (1e10, 1e14), "cpu_flops": (1e9, 1e12)}
    for key, (lo, hi) in ranges.items():
        if rng.random() < 0.5:
            hw[key] = between(lo, hi)
        else:
            hw[key + "_p"], hw[key + "_g"] = between(lo, hi), between(lo, hi)
    return hw


def flexgen(program, path, model, s, n, gbs, batches):
    """Its JSON; None where it says that no placement fits; the message where it says something else."""
    r = subprocess.run([program, "policy", "--model", model, "--prompt-len", str(s), "--gen-len", str(n), "--gpu-batch-size",
                        str(gbs), "--num-gpu-batches", str(batches), "--hardware", path, "--cost-model", "paper", "--json",
                        "-"], capture_output=True, text=True)
    if r.returncode == 2 and "no placement fits" in r.stderr:
        return None
    return json.loads(r.stdout) if r.returncode == 0 else r.stderr.strip()


def differences(ours, theirs, model, hw, s, n, gbs, batches):
    """What is wrong with an answer, as texts; and how far T is from HiGHS's."""
    if isinstance(ours, str):
        return [ours], 0
    if ours is None or theirs is None:
        says = {True: "nothing fits", False: "it fits"}
        return [f"flexgen: {says[ours is None]}, HiGHS: {says[theirs is None]}"] * ((ours is None) != (theirs is None)), 0
    wrong, bls = [], gbs * batches
    pre, gen, memory = a3(model, hw, s, n, gbs, bls)
    x = np.array([ours[k] for k in NAMES])
    T_pre, T_gen = (max(t.at(x) for t in terms) for terms in (pre, gen))
    for name, value in (("T", theirs), ("T_pre", T_pre), ("T_gen", T_gen), ("throughput", bls * n / theirs), ("bls", bls)):
        if not abs(ours[name] / value - 1) <= SAME:
            wrong.append(f"{name} {ours[name]} expected {value}")
    if not all(m.at(x) <= c * (1 + 1e-9) for m, c in memory):
        wrong.append("a tier is too small")
    if not (all(x >= 0) and all(abs(x[i:i + 3].sum() - 1) <= 1e-9 for i in (0, 3, 6))):
        wrong.append("fractions do not add up to 1")
    return wrong, abs(ours["T"] / theirs - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--flexgen", default="./flexgen")
    parser.add_argument("--machines", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    rng = random.Random(a.seed)
    cases = fits = failures = 0
    worst = 0.0
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "hw.json")
        for machine in range(a.machines):
            for model in OPT:
                hw = random_hardware(rng, model)
                with open(path, "w") as f:
                    json.dump(hw, f)
                s, n = rng.choice([1, 16, 128, 512, 1024, 1900]), rng.choice([1, 2, 7, 32, 128])
                gbs, batches = rng.choice([1, 4, 16, 48, 128, 512]), rng.choice([1, 2, 3, 8, 20])
                ours = flexgen(a.flexgen, path, model, s, n, gbs, batches)
                theirs = solve(model, hw, s, n, gbs, gbs * batches)
                wrong, gap = differences(ours, theirs, model, hw, s, n, gbs, batches)
                cases, fits, worst = cases + 1, fits + (theirs is not None), max(worst, gap)
                if wrong:
                    failures += 1
                    print(f"{model} s {s} n {n} {gbs} x {batches} on {json.dumps(hw)}: {'; '.join(wrong)}", flush=True)
    print(f"{cases} LPs, {fits} with a placement: {failures} differ; the largest difference of T is {worst:.2g} of it")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
