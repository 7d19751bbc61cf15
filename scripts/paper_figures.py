"""paper_figures.py: the paper's figures from our runs, for paper.py: SVGs in its folder, and sections of README.md as lines."""
import json, os, subprocess, sys

from paper_published import *
from paper_runs import *
from paper_tables import baseline, given, of_published

SHOWN = "wg", "wc", "cg", "cc", "hg", "hc", "gbs", "num_gpu_batches", "schedule", "cpu_cache_compute", "throughput"


def draw(script, *words):
    subprocess.run([sys.executable, "-B", f"scripts/{script}", *words], check=True)


def line(name, model, points):
    """A file of one line for plot_frontier.py; a point is a policy with its latency and throughput."""
    path = os.path.join(TMP.name, f"{model} {name}.json".replace("/", " in "))
    with open(path, "w") as f:
        json.dump({"model": model, "hardware": name, "s": 512, "n": OUTPUT, "frontier": points}, f)
    return path


def point(r, prefix=""):
    return {**{n: r[prefix + n] for n in SHOWN}, "latency": r[prefix + "T"]}


def published_point(r, rate):
    """The policy of a run at the paper's rate; its latency is that of a block."""
    return {**point(r), "throughput": rate, "latency": r["bls"] * OUTPUT / rate}


def frontier(model, more=""):
    return run("policy", f"--hardware {T4} --model {model} --prompt-len 512 --gen-len {OUTPUT} --frontier {more}")


def figure1(folder):
    lines = ["## Figure 1: latency and throughput", "",
            said(f"""512 tokens in, 32 out. The lines are what the policy search expects on the T4 at nominal links; the points of the
            sim are this program with the baselines' policies (Table 2). The paper's own points are those of its text, Table 2 and the
            published policies: a block takes its tokens over its token/s, which for figures of 0.01 token/s is rough."""), ""]
    drawn = MODELS[:0:-1]
    runs = {m: [frontier(m), frontier(m, "--allow-compression")] for m in drawn}
    rows = []
    for m in drawn:
        files = [line(name, m, r["frontier"]) for name, r in zip(("searched", "searched, 4 bits allowed"), runs[m])]
        files += [line(f"{b}, sim", m, [point(baseline(b, m, 512))]) for b in BASELINES]
        files += [line(f"paper: {name}", m, [published_point(of_published(m, bits=bits), given(m, 512, bits).rate)])
                  for name, bits in (("FlexGen", 16), ("FlexGen (c)", 4))]
        files += [line(f"paper: {b}", m, [published_point(baseline(b, m, 512), BASELINES[b][m][0])]) for b in BASELINES]
        draw("plot_frontier.py", *files, f"{folder}/figure1-{m}.svg", "--title", f"Figure 1: {m}, {OUTPUT} tokens for each prompt of 512")
        lines += [f"![{m}](figure1-{m}.svg)", ""]
        best = {b: baseline(b, m, 512) for b in BASELINES}
        for name, r in zip(("searched", "searched, 4 bits allowed"), runs[m]):
            top = max(r["frontier"], key=lambda x: x["throughput"])
            for b, theirs in best.items():
                same = [x["throughput"] for x in r["frontier"] if x["latency"] <= theirs["T"]]
                rows.append((m, name, b, theirs["T"], max(same) / theirs["throughput"] if same else "-", top["latency"],
                             top["throughput"] / theirs["throughput"]))
    return [*lines, *table(("model", "line", "beside (sim)", "whose latency (s)", "times as fast at that latency",
                            "latency of the best (s)", "times as fast at the best"), *rows),
            said(f"""The paper (section 1) states {SAME_LATENCY} times the throughput of the baselines on OPT-175B at the same latency
            without compression, and {ANY_LATENCY} times with it and with a higher latency. The sim's baselines are faster than the
            measured ones, since they too lose nothing."""), ""]


def figure2():
    return ["## Figures 2 and 4: the loop", "",
            said(f"""Figure 2's squares are `project`, `attend` and `finish` of a layer, a token and a GPU batch. Figure 4's calls, on
            the lanes that carry them out, in two decoding sweeps of a real run of the shipped model on the host device:"""), "", "![Figure 4](figure4-lanes.svg)", ""]


def trace(name, flags):
    path = os.path.join(TMP.name, f"{name}.json")
    run("bench", f"{HOST} --model models/opt-tiny {flags} --trace {path}")["T"]
    return path


def traces(folder):
    """Figures 3, 4 and 6 from real runs."""
    squares = "--prompt-len 8 --gen-len 4 --gpu-batch-size 1 --percent 0 100 100 0 100 0"
    for name, flags, title in (
            ("figure3-row", "--schedule row --num-prompts 8 --num-gpu-batches 1", "Figure 3(a): row by row"),
            ("figure3-zigzag", "--schedule zigzag --num-prompts 8 --num-gpu-batches 4", "Figure 3(b): blocks of four batches"),
            ("figure6-diagonal", "--schedule diagonal --num-prompts 10 --num-gpu-batches 4", "Figure 6: four batches on the diagonal")):
        draw("plot_trace.py", "--squares", trace(name, f"{squares} {flags}"), f"{folder}/{name}.svg", "--title", title)
    lanes = trace("figure4-lanes", "--prompt-len 32 --gen-len 4 --gpu-batch-size 8 --num-gpu-batches 4 --percent 0 100 0 100 100 0 "
                                   f"{CPU_ATTENTION} --link ctog=0.2G")
    draw("plot_trace.py", "--lanes", lanes, f"{folder}/figure4-lanes.svg", "--sweeps", "1:2", "--title",
         "Figure 4: two decoding sweeps, zig-zag")
    return [*figure2(), "## Figures 3 and 6: the schedules", "",
            "Each square is one `compute` of a real run of the shipped model (6 layers and the head, 4 tokens); the red path is the order.",
            "",
            *(x for name in ("figure3-row", "figure3-zigzag", "figure6-diagonal") for x in (f"![{name}]({name}.svg)", ""))]


# ---------------------------------------------------------------------------------------------------------------
# Section 6.4
# ---------------------------------------------------------------------------------------------------------------

def chain(delay, gbit, more=""):
    return run("policy", f"--hardware {T4} --model opt-30b --prompt-len 512 --gen-len {OUTPUT} --nodes {CHAIN} --net-ms {delay} "
                         f"--net-gbps {gbit:g} {more}")


def figure5(folder):
    model, batches = "opt-30b", (1, 2, 4, 8, 16, 32, 64)
    full = {net: chain(*net) for net in NETWORKS}
    single = {net: [chain(*net, f"--gpu-batch-size {b} --num-gpu-batches 1 --flights 1") for b in batches] for net in NETWORKS}
    alone, one = frontier(model), sim(model)
    single = {net: [point(r, "chain.") for r in runs if r.has("chain")] for net, runs in single.items()}
    files = [line("one T4 that offloads", model, alone["frontier"])]
    files += [line(f"{CHAIN} T4s, {d} ms, {g:g} Gbit/s", model, single[d, g]) for d, g in NETWORKS]
    draw("plot_frontier.py", *files, f"{folder}/figure5.svg", "--title",
         f"Figure 5: {model}, one T4 that offloads, and a chain of {CHAIN} with one batch in flight")
    rows, quickest = [], min(alone["frontier"], key=lambda p: p["latency"])
    for net in NETWORKS:
        kept, r = single[net], full[net]
        rows.append((f"{net[0]} ms, {net[1]:g} Gbit/s", kept[0]["latency"], max(p["throughput"] for p in kept), r["chain.throughput"],
                     f"{r['chain.flights']:g} x {r['chain.gbs']:g} x {r['chain.num_gpu_batches']:g}", r["chain.throughput"] / CHAIN,
                     r["pipeline.throughput"]))
    rate = one["throughput"]
    wins = [sum(rate > row[i] for row in rows) for i in (2, 3, 5)]
    return ["## Figure 5 and section 6.4: offloading or collaborative inference", "",
            said(f"""OPT-30B on {CHAIN} T4s without offloading, as `cost/search.c` predicts it from the nominal file, with the delay
            and the rate of the wire between two of them; 512 tokens in, 32 out. One T4 that offloads makes {number(rate)} token/s on
            the sim. The paper's figure has no numbers in the text."""), "", "![Figure 5](figure5.svg)",
            *table(("network", "latency of one sequence (s)", "one batch in flight, token/s", "full chain, token/s", "its flights x batch",
                    "a GPU of it", "the same T4s, offloading, in a pipeline"), *rows),
            said(f"""The paper measures that one T4 gives more than the whole Petals cluster on every network. Here it does on {wins[0]}
            of {len(rows)} beside a chain with one batch in flight, and on {wins[1]} of {len(rows)} beside a chain that is kept full,
            which Petals, serving requests as they come, is not; beside a single GPU of the full chain, on {wins[2]} of {len(rows)}. The
            paper sees one T4 ahead in latency too where the network is slow. Here one T4 needs {number(quickest['latency'])} s at least
            (a block of {quickest['gbs'] * quickest['num_gpu_batches']:g}) and the chain {span(row[1] for row in rows)} s: its formulas
            count products and the wire, and nothing that Petals' servers do besides. As in the paper, prompts are what a slow wire
            hurts: their hidden states are those of {one['s']:g} tokens."""), ""]
