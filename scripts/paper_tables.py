"""paper_tables.py: the paper's tables beside ours, for paper.py. Each function returns a section of README.md as lines; it begins
all its runs before it looks at one."""
import json, os

from paper_published import *
from paper_runs import *


def hardware_of(path):
    with open(path) as f:
        return json.load(f)


# ---------------------------------------------------------------------------------------------------------------
# Table 1
# ---------------------------------------------------------------------------------------------------------------

def table1():
    h, fitted = hardware_of(T4), hardware_of(FITTED)
    value = lambda of, name: ", ".join(unit(of[n]) for n in (name, name + "_p", name + "_g") if n in of) or "-"
    rows = [(f"`{name}`", value(h, name), value(fitted, name), why) for name, why in h["sources"].items()]
    return ["## Table 1: the machine", "",
            said(f"""The paper: an NVIDIA T4 with 16 GB, a Xeon at 2.00 GHz with 208 GB, an NVMe disk of 1.5 TB. Here it is
            [{T4}](../../{T4}), whose links are nominal, and [{FITTED}](../../{FITTED}), the rates that the original program's cost
            model was fitted with: what that program gets out of the same machine. Bytes, bytes/s, FLOP/s; two values are for prefill
            and generation."""),
            *table(("parameter", "nominal", "fitted", "where the nominal value comes from"), *rows)]


# ---------------------------------------------------------------------------------------------------------------
# Table 2
# ---------------------------------------------------------------------------------------------------------------

def baseline(system, model, s, hardware=T4):
    """Published batch sizes are for 512 tokens; else the search finds the best."""
    batch = f"--gpu-batch-size {BASELINE_BATCH[system][model]}" if s == 512 else ""
    overlap = "--no-overlap" if system == "Accelerate" else ""
    return sim(model, f"--schedule row --num-gpu-batches 1 {batch} --percent {BASELINE_PERCENT[system][model]} {overlap}", s, hardware)


def petals(model, s):
    """(the fewest T4s that hold the model, their run with one sequence in flight)"""
    at = lambda nodes: run("policy", f"--hardware {T4} --model {model} --prompt-len {s} --gen-len {OUTPUT} --nodes {nodes} --net-ms 100 "
                                     "--net-gbps 0.1 --gpu-batch-size 1 --num-gpu-batches 1 --flights 1")
    few, nodes = 0, 64  # too few, enough
    while nodes - few > 1:
        middle = (few + nodes) // 2
        few, nodes = (few, middle) if at(middle).has("chain") else (middle, nodes)
    return nodes, at(nodes)


def table2_rows(model):
    """(system, s, published, sim, sim with the fitted rates, measured if asked for, a run whose policy to show)"""
    rows = []
    for system in BASELINES:
        for s, rate in zip((512, 1024), BASELINES[system][model]):
            nominal = baseline(system, model, s)
            rows.append((system, s, published(rate), nominal, baseline(system, model, s, FITTED), ["-"] * GPU, nominal))
    for p in (p for p in POLICIES if p.model == model):
        nominal, fitted = (sim(model, p.flags(), p.s, h) for h in (T4, FITTED))
        system = "FlexGen" if p.bits == 16 else "FlexGen (c)"
        rows.append((system, p.s, published(p.rate), nominal, fitted, measured(model, p.flags(), p.s), nominal))
    for name, flags in (("ours, searched", ""), ("ours, searched (c)", "--allow-compression")):
        for s in LENGTHS:
            nominal, fitted = (sim(model, flags, s, h) for h in (T4, FITTED))
            rows.append((name, s, "-", nominal, fitted, measured(model, flags, s), nominal))
    return rows


def table2():
    rows = {m: table2_rows(m) for m in MODELS}
    lines = []
    for model in MODELS:
        for system, s, rate, nominal, fitted, gpu, of in rows[model]:
            of = of.roomy()
            lines.append((model, str(s), system, rate, nominal, fitted, *gpu, "-" if of.refused() else policy(of)))
    for s, rate in zip((512, 1024), PETALS["opt-175b"]):
        nodes, r = petals("opt-175b", s)
        lines.append(("opt-175b", str(s), "Petals, a GPU", published(rate), r["chain.throughput"] / nodes, "-", *["-"] * GPU,
                      f"{nodes} GPUs, no offloading"))
    return ["## Table 2: token/s of one GPU", "",
            said(f"""Prompts of 512 and 1024 tokens as in the paper, and of 256 (the original program's benchmarks); 32 tokens are
            generated. A policy is GPU batch size x batches, then percent of weights, cache and activations on GPU and on CPU (wg wc cg
            cc hg hc). *FlexGen* and *FlexGen (c)* are the published policies, the latter with 4-bit compression; *ours* is what the
            search finds for the hardware file, (c) where it may compress. A policy that our plan refuses on 15 GiB says what it needs,
            and what it would give on a GPU that has as much."""),
            *table(("model", "s", "system", "published", "sim, nominal", "sim, fitted", *MEASURED, "policy"), *lines),
            *why_baselines(), *why_6_7b(), *why_30b(), *why_175b()]


def given(model, s, bits=16):
    return next(p for p in POLICIES if (p.model, p.s, p.bits) == (model, s, bits))


def of_published(model, s=512, hardware=T4, bits=16):
    p = given(model, s, bits)
    return sim(model, p.flags(), s, hardware).roomy()


def why_baselines():
    a, d = baseline("Accelerate", "opt-30b", 512), baseline("DeepSpeed", "opt-30b", 512)
    link = {}
    for name, r in (("Accelerate", a), ("DeepSpeed", d)):
        seconds = r["bls"] * OUTPUT / BASELINES[name]["opt-30b"][0]
        link[name] = r["channels.ctog.moved_bytes"] / seconds / 1e9
    best = max(baseline(b, "opt-175b", 512)["throughput"] for b in BASELINES)
    ours, packed = sim("opt-175b")["throughput"] / best, sim("opt-175b", "--allow-compression")["throughput"] / best
    return [said(f"""- **Accelerate and DeepSpeed** are this program with their schedule (row by row), placement and batch sizes.
            Assumed are: Accelerate's hooks load synchronously, so that it has no overlap; DeepSpeed prefetches. The batch sizes are
            published for 512 tokens; for 1024 the search chooses the best, which for these placements is the largest that fits, and the
            same plan need not fit theirs. For OPT-30B the published figures mean that weights cross the link at
            {number(link['Accelerate'])} and {number(link['DeepSpeed'])} GB/s, where the file says
            {number(hardware_of(T4)['ctog_bdw'] / 1e9)}. Figures of 0.01 are too coarse to compare. On OPT-175B the paper is
            {SPEEDUPS[16]} times as fast as the better of the two, and {SPEEDUPS[4]} times with compression; the sim is {number(ours)}
            and {number(packed)} times as fast as its own best run of them."""),
            said(f"""- **Petals** is section 6.4's chain of T4s with one sequence in flight, over 100 ms and 0.1 Gbit/s, divided by the
            number of GPUs; the paper divides what {PETALS_GPUS} servers of other kinds reached. Section 6.4 below has other networks,
            and chains that are full.""")]


def why_6_7b():
    ratios = [of_published("opt-6.7b", s)["throughput"] / given("opt-6.7b", s).rate for s in LENGTHS]
    packed = [of_published("opt-6.7b", s, bits=4)["throughput"] / given("opt-6.7b", s, 4).rate for s in LENGTHS]
    r, best, decoding = of_published("opt-6.7b"), sim("opt-6.7b"), FOUR_GPUS["opt-6.7b"][0][1]
    bound = hardware_of(T4)["gpu_bdw"]
    return [said(f"""- **OPT-6.7B**, all on the GPU: no link and no disk is used, so that what the original loses there plays no part.
            The sim is {span(ratios)} times as fast with the published policies. In decoding it makes {number(r['decode_throughput'])}
            token/s, which the GPU's memory with its {number(bound / 1e9)} GB/s bounds; the published {decoding:g} (Table 3) are
            {percent(decoding / r['decode_throughput'])} of it, so the original's kernels lose the rest. The fitted file has no bound by
            the GPU's memory, hence its higher figures. The search puts {best['bls']} sequences into a block in the place of {r['bls']}
            and keeps {percent(best['cg'])} of the cache on the GPU, which gives {number(best['throughput'] / r['throughput'])} times
            the throughput. With 4 bits the sim is {span(packed)} times as fast with the published policies: the original unpacks every
            weight and the whole cache into fp16 copies before each use, where the sim counts the reading of a packed cache as it is.""")]


def why_30b():
    ratio = lambda h: span(of_published("opt-30b", s, h)["throughput"] / given("opt-30b", s).rate for s in LENGTHS)
    best, p = sim("opt-30b"), of_published("opt-30b")
    return [said(f"""- **OPT-30B**: with the published policies the sim is {ratio(T4)} times as fast at nominal links and
            {ratio(FITTED)} times with the fitted rates. The original adds the times of CPU and GPU, where here the CPU attends beside
            the GPU, and its CPU attention moves about ten times the bytes; the losses are taken one by one below. The search's block of
            {best['gbs']} x {best['num_gpu_batches']} is {number(best['throughput'] / p['throughput'])} times as fast as the published
            one of {p['gbs']} x {p['num_gpu_batches']}: more sequences share the weights that cross the link.""")]


def why_175b():
    nominal, fitted = (of_published("opt-175b", hardware=h) for h in (T4, FITTED))
    decoding, rate = FOUR_GPUS["opt-175b"][0][1], given("opt-175b", 512).rate
    best, packed = sim("opt-175b"), sim("opt-175b", "--allow-compression")
    needed = nominal["channels.dtoc.moved_bytes"] / (OUTPUT * nominal["bls"]) * decoding
    return [said(f"""- **OPT-175B**: half of the weights and the whole cache are on the disk, which bounds everything. For the published
            decoding rate of {decoding:g} token/s (Table 3) the disk must read {number(needed / 1e9)} GB/s with this policy, where the
            paper's reads about {DISK_READ / 1e9:g}; so the sim, at {number(nominal['throughput'])} token/s for the published {rate:g},
            stays below the paper. With the {number(hardware_of(FITTED)['dtoc_bdw'] / 1e9)} GB/s that the original's cost model was
            fitted with, it could not be {number(rate / fitted['throughput'])} times as fast as the {number(fitted['throughput'])}
            token/s here: the paper projects such figures from fewer tokens, and a cache of a few layers may stay in the page cache. The
            search makes little of fp16 on this disk ({number(best['throughput'])}), and {number(packed['throughput'])} token/s with 4
            bits, which leave {percent(1 - packed['wg'] - packed['wc'])} of the weights and {percent(1 - packed['cg'] - packed['cc'])}
            of the cache to the disk.""")]


# ---------------------------------------------------------------------------------------------------------------
# The losses
# ---------------------------------------------------------------------------------------------------------------

NEAR = .2  # of the published figure: reached


def steps(p):
    """[(a loss, the run with it and all before it)]"""
    fitted = hardware_of(FITTED)
    take = lambda *names: {n: fitted[n] for n in names}
    pcie, attention = take("ctog_bdw", "gtoc_bdw_p", "gtoc_bdw_g"), take("ctog_bdw", "gtoc_bdw_p", "gtoc_bdw_g", "cpu_flops")
    disk = {**attention, **take("dtoc_bdw", "ctod_bdw_p", "ctod_bdw_g")}
    rounded = p._replace(percent=whole_tensors(p.percent))
    waits = lambda flag: rounded._replace(more=p.more.replace("--no-overlap", "") + " " + flag)
    found = [("nominal", p, {}), ("PCIe", p, pcie), ("CPU attention", p, attention), ("whole tensors", rounded, attention)]
    found += [("synchronize", waits("--synchronize"), attention)] if knows("--synchronize") else []
    found += [("no overlap", waits("--no-overlap"), attention), ("disk", waits("--no-overlap"), disk)]
    return [(name, sim(q.model, q.flags(), q.s, changed=changed)) for name, q, changed in found]


def losses():
    taken = {p: steps(p) for p in POLICIES}
    rows, reached = [], 0
    for p, runs in taken.items():
        ratios = [r.roomy()["throughput"] / p.rate for _, r in runs]
        first = next((i for i, x in enumerate(ratios) if abs(x - 1) <= NEAR), None)
        near = min(range(len(runs)), key=lambda i: abs(ratios[i] - 1))
        text = [number(r.roomy()["throughput"]) for _, r in runs]
        if first is not None:
            text[first], reached = f"**{text[first]}**", reached + 1
        rows.append((p.model, str(p.s), f"{p.gbs} x {p.batches}, {p.percent}" + ", 4-bit" * (p.bits == 4), published(p.rate), *text,
                     runs[first][0] if first is not None else f"no; nearest {number(ratios[near])} with {runs[near][0]}"))
    names = [name for name, _ in taken[POLICIES[0]]]
    disk = {p: dict(taken[p]) for p in POLICIES if p.model == "opt-175b" and p.bits == 16}
    rounding = {p.percent: whole_tensors(p.percent) for p in POLICIES if p.model == "opt-30b" and p.bits == 16}
    fitted, nominal = hardware_of(FITTED), hardware_of(T4)
    return ["## From our figures to the published ones: the losses of the original program", "",
            said(f"""The published policies on the sim, which loses nothing, and then with one known loss of the original program more
            in each column; the first figure within {percent(NEAR)} of the published one is bold. Where the GPU's 15 GiB are too few for
            our plan, these runs have {ROOM}."""), "",
            said(f"""- *PCIe*: the links as fitted. Down from the GPU {fitted['gtoc_bdw_p'] / 1e9:.3g} GB/s in prefill and
            {fitted['gtoc_bdw_g'] / 1e9:.3g} in generation in the place of {nominal['gtoc_bdw'] / 1e9:.3g}; up
            {fitted['ctog_bdw'] / 1e9:.3g}, which is more than the file's {nominal['ctog_bdw'] / 1e9:.3g}."""),
            said(f"""- *CPU attention*: it copies the cache to fp32 and transposes it; as fitted, {fitted['cpu_flops'] / 1e9:.3g} GB/s
            of cache in the place of {nominal['cpu_bdw'] / 1e9:.3g}."""),
            "- *whole tensors*: it rounds the weights' shares to whole matrices of a sublayer: "
            + "; ".join(f"{a.split()[0]}% on the GPU becomes {b.split()[0]}%" for a, b in rounding.items()) + ".",
            "- *synchronize*: it waits for everything after every (i, j, k)." if knows("--synchronize") else
            "- Waits for everything after every (i, j, k) are not in this table: the program has no flag for them.",
            "- *no overlap*: each operation is waited for at once, which is more than the original loses.",
            f"- *disk*: {fitted['dtoc_bdw'] / 1e9:.3g} GB/s as fitted in the place of {nominal['dtoc_bdw'] / 1e9:.3g}.",
            *table(("model", "s", "policy", "published", *names, "reached with"), *rows),
            said(f"""The published figure is reached within {percent(NEAR)} for {reached} of {len(POLICIES)} policies. OPT-6.7B uses no
            link, so only its kernels could lose what is left. With compression, what the original loses most by is not in this list: it
            unpacks every weight once for each batch, and the whole cache in every sweep. OPT-175B in fp16 is bound by the disk: it
            begins below the published figures, and with the fitted disk it falls to
            {span(r['disk'].roomy()['throughput'] / p.rate for p, r in disk.items())} of what was published."""), ""]


# ---------------------------------------------------------------------------------------------------------------
# Table 3
# ---------------------------------------------------------------------------------------------------------------

def pipeline(model, m, gbit=10, flights=""):
    return sim(model, f"--nodes {m} --net {gbit / 8:g}G,0.1ms {flights}")


def waits(r):
    """The bubble: mean over the stages."""
    return percent(sum(s["gpu_waits"] for s in r["stages"]) / len(r["stages"]))


def four_gpus():
    """(token/s of one machine and of four beside the paper's, how they scale, the models whose decoding scales by more than 4)"""
    one, four = {m: sim(m) for m in MODELS}, {m: pipeline(m, 4) for m in MODELS}
    rows, scaling = [], []
    for m, ((gen1, dec1), (gen4, dec4), deepspeed) in FOUR_GPUS.items():
        a, b, d = one[m], four[m], baseline("DeepSpeed", m, 512)
        rows += [(m, "FlexGen 1 GPU", published(gen1), a, published(dec1), a["decode_throughput"], policy(a)),
                 (m, "FlexGen 4 GPU", published(gen4), b, published(dec4), b["decode_throughput"], policy(b)),
                 (m, "DeepSpeed 4 GPU", published(deepspeed[0]), 4 * d["throughput"], published(deepspeed[1]),
                  4 * d["decode_throughput"], f"4 times {policy(d)}")]
        scaling.append((m, gen4 / gen1, b["throughput"] / a["throughput"], dec4 / dec1, b["decode_throughput"] / a["decode_throughput"]))
    return rows, scaling, [row[0] for row in scaling if row[4] > 4]


def table3_rows():
    rows, scaling, _ = four_gpus()
    return [*table(("model", "machines", "published", "sim", "published, decoding", "sim, decoding", "policy on the sim"), *rows),
            *table(("4 machines / 1 machine", "published", "sim", "published, decoding", "sim, decoding"), *scaling)]


def table3():
    one, four = {m: sim(m) for m in MODELS}, {m: pipeline(m, 4) for m in MODELS}
    above = four_gpus()[2]
    return ["## Table 3: four machines", "",
            said(f"""T4s of the nominal file, 512 tokens in, 32 out; the wire between two machines carries 10 Gbit/s and takes 0.1 ms
            more. Policies are the search's: flights x GPU batch size x batches, then the percentages."""),
            *table3_rows(),
            said(f"""As in the paper, decoding scales better than linearly (sim: {', '.join(above) or 'none'}), since each machine has a
            part of the weights only and its memory takes larger batches, or the disk is not needed any more. The whole task scales
            worse than decoding, since the pipeline fills and empties while prompts are computed and 32 tokens are few. DeepSpeed's ZeRO
            is data parallel; its row of the sim is four machines for themselves, without the parts of each layer that they could load
            for one another."""), "",
            *why_table3(one, four), *wires(four), *formulas()]


def why_table3(one, four):
    faster = {m: [r[m]["throughput"] / FOUR_GPUS[m][i][0] for i, r in enumerate((one, four))] for m in MODELS}
    return [said(f"""- opt-6.7b: the paper's policy for one GPU, with everything on it, reaches
            {number(of_published('opt-6.7b')['throughput'])} token/s here; the search takes {one['opt-6.7b']['bls']} sequences, so that
            one machine is {number(faster['opt-6.7b'][0])} times as fast as the paper's and four have less to gain."""),
            said(f"""- opt-30b: the sim is {number(faster['opt-30b'][0])} times as fast as the original on one machine and
            {number(faster['opt-30b'][1])} times on four, since its operations overlap as far as their order allows and nothing but they
            takes time."""),
            said(f"""- opt-175b: one machine waits for its disk, in the paper and here ({number(faster['opt-175b'][0])} times the
            published figure); on four the weights and most of the cache are in memory, and the sim, {number(faster['opt-175b'][1])}
            times as fast as the paper, streams each layer at the link's full rate."""), ""]


def wires(four):
    rows = []
    for m in MODELS:
        again = {gbit: pipeline(m, 4, gbit, f"--flights {four[m]['flights']:g}") for gbit in (10, 25, 100)}
        busy = lambda r: f"{100 * r['lanes.send.busy_s'] / r['T']:.1f}%"
        rows += [(m, str(gbit), r, r["decode_throughput"], busy(r), waits(r)) for gbit, r in again.items()]
    return [said(f"""What the wire and the bubble cost. Hidden states are 2 h1 bytes a token, and the group beyond one for each stage is
            on its way while the others compute:"""),
            *table(("4 machines", "Gbit/s", "token/s", "decoding", "wire busy", "GPUs wait"), *rows)]


def formulas():
    runs = {(m, nodes): sim(m, f"--nodes {nodes}") for m in MODELS for nodes in (1, 2, 4, 8)}
    rows = [(str(nodes), m, r["T"], r["predicted.T"], f"{r['predicted.T'] / r['T']:.3f}", waits(r)) for (m, nodes), r in runs.items()]
    return ["What the formulas of `cost/search.c` expect of the same policies:",
            *table(("machines", "model", "T, sim (s)", "T, formulas (s)", "formulas / sim", "GPUs wait"), *rows)]


# ---------------------------------------------------------------------------------------------------------------
# Tables 4, 5 and 6
# ---------------------------------------------------------------------------------------------------------------

def table4():
    p = given("opt-175b", 512)
    runs = {name: sim(p.model, p.flags() + " --no-overlap", hardware=h) for name, h in (("nominal", T4), ("fitted", FITTED))}
    rows = []
    for stage, seconds in BREAKDOWN.items():
        rows.append((stage, "published", *map(str, seconds), percent(seconds[1] / seconds[0])))
        for name, r in runs.items():
            names = [f"breakdown.{stage}.total_s"] + [f"breakdown.{stage}.{part}.busy_s" for part in (*BREAKDOWN_PARTS[1:], "activation")]
            ours, r.parts = [r[n] for n in names], r.parts + names
            rows.append((stage, f"sim, {name}", *(f"{x:.0f}" for x in ours[:-1]), percent(ours[1] / ours[0])))
    n, f = runs["nominal"], runs["fitted"]
    read, decode = (lambda r: r["breakdown.decode.cache (R).busy_s"]), BREAKDOWN["decode"][0]
    carried = n["channels.dtoc.moved_bytes"] / (BREAKDOWN["decode"][3] + BREAKDOWN["decode"][2] + BREAKDOWN["prefill"][2])
    return ["## Table 4: where the time goes", "",
            said(f"""OPT-175B, 512 tokens, the policy of Table 2 ({policy(n)}) with overlap off, in seconds for the whole block of
            {n['bls']} sequences. The last column is the share of the total in which the processors compute."""),
            *table(("stage", "", *BREAKDOWN_PARTS, "computing"), *rows),
            said(f"""Reading the cache is the largest part of decoding in the paper and here. Decoding takes the sim
            {number(n['breakdown.decode.total_s'] / decode)} times as long as the paper at nominal rates and
            {number(f['breakdown.decode.total_s'] / decode)} times with the fitted ones. The paper's times for reading weights and
            cache mean {number(carried / 1e9)} GB/s from the disk, more than the {DISK_READ / 1e9:g} that it reads (section 6) and than
            the {number(hardware_of(FITTED)['dtoc_bdw'] / 1e9)} of the fitted file, with which reading the cache takes {number(read(f))}
            s. In decoding the paper's compute is {number(BREAKDOWN['decode'][1] / n['breakdown.decode.compute.busy_s'])} times the
            sim's at nominal rates: its CPU attention copies the cache to fp32."""), ""]


def table5():
    rows, kept = [], {}
    head = ["", *(f"{m}, {x}" for m in MODELS[1:] for x in ("published", "sim, nominal", "sim, fitted", *MEASURED))]
    for name, *cases in ABLATION:
        kept[name] = [[sim(m, flags, hardware=h) for h in (T4, FITTED)] + measured(m, flags) for m, (_, flags) in zip(MODELS[1:], cases)]
    for name, *cases in ABLATION:
        rows.append((name, *(c for (rate, _), runs in zip(cases, kept[name]) for c in (published(rate), *runs))))
    base, lost = kept["All optimizations"], []
    for name, *cases in ABLATION[1:]:
        for i, (rate, _) in enumerate(cases):
            r = kept[name][i][0].roomy()
            if rate and not r.refused():
                lost.append((name, MODELS[i + 1], rate / ABLATION[0][i + 1][0], r["throughput"] / base[i][0].roomy()["throughput"]))
    searched, without = (kept[name][0][1] for name in ("All optimizations", "No policy search"))
    both = lambda name, i: " and ".join(percent(shares[i]) for n, _, *shares in lost if n == name)
    largest = sim("opt-30b", f"--schedule row --num-gpu-batches 1 --percent {BASELINE_PERCENT['DeepSpeed']['opt-30b']}")
    return ["## Table 5: without one technique at a time", "",
            "512 tokens. OPT-30B with 64 x 2, 20% of the weights on the GPU; OPT-175B with 32 x 8, half of the weights on the CPU.",
            *table(head, *rows), "The same as shares of the first row:",
            *table(("", "model", "published", "sim, nominal"), *((n, m, percent(a), percent(b)) for n, m, a, b in lost)),
            said(f"""Without overlap the paper keeps {both('No overlapping', 0)} of its throughput (OPT-30B, OPT-175B) and the sim
            {both('No overlapping', 1)}. Without the CPU's attention the paper keeps {both('No CPU compute', 0)} and the sim
            {both('No CPU compute', 1)}: OPT-175B's cache comes from the disk, whoever attends, and the sim's links carry it on to the
            GPU beside that. *No disk* changes nothing for OPT-30B, whose policy uses none; OPT-175B needs it for its cache. The batch
            size of DeepSpeed's policy is not printed; with that of Table 2 the sim makes
            {number(kept['w/ DeepSpeed policy'][0][0]['throughput'])} token/s for OPT-30B, with the largest that fits,
            {largest['gbs']:g}, {number(largest['throughput'])}."""), "",
            said(f"""Two remarks on OPT-30B. The paper prints its {ABLATION[0][1][0]} token/s twice: this table gives the policy 64 x 2,
            the original program's benchmarks, and so Table 2, {given('opt-30b', 512).gbs} x {given('opt-30b', 512).batches}. The sim
            tells them apart: {number(base[0][0]['throughput'])} and {number(of_published('opt-30b')['throughput'])}. With the fitted
            rates the sim is *faster* without the search ({number(searched['throughput'])} with it, {number(without['throughput'])}
            without). There the CPU's attention bounds decoding ({number(searched['lanes.attend.busy_s'])} of
            {number(searched['decode_s'])} s, and {number(without['lanes.attend.busy_s'])} of {number(without['decode_s'])}), so that the
            20% of the weights on the GPU save the link time for which nobody waits; but they leave no room there for the head, and the
            CPU is idle at the end of every sweep until that has come over the link."""), ""]


def table6():
    model = "models/opt-tiny"
    text = f"{model}/stories.txt"
    last = os.path.join(TMP.name, "last-words.jsonl")
    with open(text) as f, open(last, "w") as out:
        stories = [line.strip() for line in f if len(line.split()) > 1]
        out.writelines(json.dumps({"text": line}) + "\n" for line in stories)
    ways = {"FP16": "", "4-bit": PACKED, "4-bit-S": PACKED + " --attn-sparsity 0.1", "3-bit": PACKED + " --bits 3"}
    flags = f"--model {model} {HOST} --percent {ALL_GPU} --gpu-batch-size 32 --num-gpu-batches 1"
    tasks = f"--perplexity {text}", f"--last-word {last}"
    runs = {w: [run("eval", f"{flags} {more} {task}") for task in tasks] for w, more in ways.items()}
    rows = [(m, name, *(f"{x:g}" for x in values), "-")
            for m, both in ACCURACY.items() for name, values in zip(("Lambada, accuracy", "WikiText, perplexity"), both)]
    ours = {w: (p["perplexity"], a["last_word_accuracy"]) for w, (p, a) in runs.items()}
    rows.append(("opt-tiny", "stories, last words, accuracy", *(f"{a:.3f}" for _, a in ours.values())))
    rows.append(("opt-tiny", "stories, perplexity", *(f"{p:.2f}" for p, _ in ours.values())))
    cost = {w: p / ours["FP16"][0] - 1 for w, (p, _) in ours.items()}
    theirs, isa = ACCURACY["opt-30b"][1], runs["FP16"][0]["isa"]
    return ["## Table 6: what the approximations cost", "",
            said(f"""The shipped model for real (`flexgen eval` on the host device), scored on stories that it was not trained on:
            perplexity, and the last word of each of {len(stories)} paragraphs. 4-bit-S reads a tenth of V; 3-bit is mentioned in
            section 6.2 only."""),
            *table(("model", "", *ways), *rows),
            said(f"""Four bits cost {100 * cost['4-bit']:.1f}% in perplexity here and {100 * (theirs[1] / theirs[0] - 1):.1f}% for
            OPT-30B in the paper. Three bits cost {100 * cost['3-bit']:.1f}%; the paper says that they cannot preserve accuracy. A tenth
            of V, nearly free in the paper, costs {100 * cost['4-bit-S']:.0f}%: attention of a small model over at most 512 tokens is
            spread wider than that of a large one. So this checks the arithmetic of quantization, which knows no sizes, and says nothing
            about how much of V OPT-30B needs. The last digits differ between instruction sets, which add in another order: these are
            of a CPU with {isa}."""), ""]


# ---------------------------------------------------------------------------------------------------------------
# The appendix, and dollars
# ---------------------------------------------------------------------------------------------------------------

BLOCKS = 64  # of prompts: the more, the less the diagonal's warm-up counts


def theorem():
    flags = "--gpu-batch-size 1 --page-tokens 1 --percent 0 100 0 100 100 0 --cpu-cache-compute"
    cases = (512, 32, 8), (128, 128, 8), (32, 256, 8)  # s, n, batches of a zig-zag block
    task = lambda s, n: f"--device sim --hardware {T4} --model opt-125m --prompt-len {s} --gen-len {n} {flags}"
    memory = {c: run("bench", f"{task(*c[:2])} --num-gpu-batches {c[2]}") for c in cases}
    begin = lambda s, n, Z, schedule: run("bench", f"{task(s, n)} --num-prompts {BLOCKS * Z} --cpu-mem "
                                                   f"{memory[s, n, Z]['tiers.CPU.planned_bytes']} --schedule {schedule}")
    runs = {c: (begin(*c, "zigzag"), begin(*c, "diagonal")) for c in cases}
    ratio = {c: z["lanes.load weights.moved_bytes"] / d["lanes.load weights.moved_bytes"] for c, (z, d) in runs.items()}
    rows = [(str(s), str(n), *(f"{r['num_gpu_batches']:g}" for r in runs[s, n, Z]), f"{ratio[s, n, Z]:.2f}",
             f"{(2 * s + 2 * n) / (2 * s + n):.2f}", "2") for s, n, Z in cases]
    return ["## Theorem 4.1 and appendix A.2: weights loaded by zig-zag and diagonal", "",
            said(f"""OPT-125M on the sim, weights over the link, batches of one sequence. The diagonal has the CPU memory that the
            zig-zag block's plan takes, and the same prompts, {BLOCKS} blocks of them. The ratio is that of all bytes of weights loaded
            for the same tokens."""),
            *table(("s", "n", "batches, zig-zag", "batches, diagonal", "weights loaded, zig-zag / diagonal", "(2s + 2n) / (2s + n)",
                    "bound of Theorem 4.1"), *rows),
            said(f"""The largest ratio is {max(ratio.values()):.2f}, below A.2.1's limit and below 2: the diagonal must warm up, and
            whole batches are seated. `tests/test_theory.c` checks the bound for many more."""), ""]


def appendix_policies():
    runs = {p: sim(p.model, p.flags(), p.s) for p in POLICIES}
    gib = lambda r, tier: f"{r[f'tiers.{tier}.planned_bytes'] / 2**30:.1f}"
    rows = [(p.model, str(p.s), f"{p.gbs} x {p.batches}", p.percent, " ".join(f"`{w}`" for w in p.more.split()),
             *(gib(r.roomy(), tier) for tier in ("GPU", "CPU", "disk")), "no" if r.refused() else "yes") for p, r in runs.items()]
    fit = sum(r.refused() is None for r in runs.values())
    return ["## Appendix A.4: the published policies", "", f"What our plan says of each; {fit} of {len(runs)} fit the T4's 15 GiB.",
            *table(("model", "s", "gbs x batches", "wg wc cg cc hg hc", "flags", "GPU GiB", "CPU GiB", "disk GiB", "fits"), *rows)]


def dollars():
    home = lambda rate: 3600 * rate / (WATTS / 1000 * DOLLARS_A_KWH)
    rows = [("FlexGen, T4 at home, as published", given("opt-175b", 512).rate), ("the published policy, sim", of_published("opt-175b")),
            ("ours, searched, sim", sim("opt-175b")), ("ours, searched, with compression, sim", sim("opt-175b", "--allow-compression"))]
    rate = lambda x: x["throughput"] if isinstance(x, Run) else x
    cloud = CLOUD_TOKENS / CLOUD_DOLLARS
    lines = [(name, x, f"{home(rate(x)):.0f}", number(home(rate(x)) / cloud)) for name, x in rows]
    return ["## Section 6.3: tokens for a dollar", "",
            said(f"""OPT-175B, 512 tokens. At home: {WATTS} W at {DOLLARS_A_KWH:g} $/kWh. In the cloud FasterTransformer on 8 A100 makes
            {CLOUD_TOKENS} tokens for {CLOUD_DOLLARS:g} $."""),
            *table(("", "token/s", "token/$", "times the cloud's"),
                   ("FasterTransformer, 8 A100, as published", f"{CLOUD_TOKENS / 3600:.0f}", f"{cloud:.0f}", "1"), *lines),
            said(f"""Only token/s differs from the paper's sum, for the reasons of Table 2; nobody has measured what this program draws.
            The paper states {TIMES_THE_CLOUD} times the cloud's; its own figures give {home(given("opt-175b", 512).rate) / cloud:.2f}."""), ""]
