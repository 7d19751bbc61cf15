#!/usr/bin/env python3
"""Write docs/index.html: docs/TOUR.md as a page, headed by an animation of the three schedules from real traces.

    python3 scripts/make_page.py            in the repository, after `make`; or `make docs`
    python3 scripts/make_page.py --check    whether the page is as it would be written; FLEXGEN names another program

The program runs the same prompts with each schedule on a machine made of numbers, so that the same bytes come out each
time. The page is one file: pictures, style, script and traces are in it, and a browser opens it without a network.
The parts below are the traces (what is kept of them) and the page itself; the tour's Markdown is read by scripts/pages.py.

Needs only Python's standard library, 3.8 or later.
"""
import json
import os
import subprocess
import tempfile

import pages
import plot_trace

TOUR, PAGE = "docs/TOUR.md", "docs/index.html"
SCHEDULES = [("row", 1), ("zigzag", 3), ("diagonal", 4)]  # and the batches in flight; the last two have the same peak of pages
PROMPTS, GEN_LEN, GBS = 72, 8, 4
RUN = [os.environ.get("FLEXGEN", "./flexgen"), "bench", "--device", "sim", "--hardware", "hardware/t4.json", "--model", "opt-125m",
       "--num-prompts", str(PROMPTS), "--prompt-len", "4", "--gen-len", str(GEN_LEN), "--gpu-batch-size", str(GBS),
       "--page-tokens", "2", "--percent", "10", "80", "50", "25", "50", "50"]
MERGED = 0.1       # milliseconds between two slices of one layer on one lane that are still drawn as one bar
LIMIT = 1_000_000  # bytes; a page has to open quickly


# ------------------------------------------------------------------ the traces

def microseconds(milliseconds):
    return round(milliseconds * 1000)


def bars_of(slices):
    """One lane's [call, gap since the last bar, length, layer] one behind the other. A bar goes by its longest call."""
    bars = []
    for s in slices:
        begin, end = microseconds(s.begin), microseconds(s.end)
        last = bars[-1] if bars else None
        if not last or last["of"] != (s.i, s.j) or begin - last["end"] > MERGED * 1000:
            last = {"of": (s.i, s.j), "begin": begin, "calls": {}}
            bars.append(last)
        last["end"] = end
        last["calls"][s.name] = last["calls"].get(s.name, 0) + end - begin
    flat, at = [], 0
    for bar in bars:
        name = max(sorted(bar["calls"]), key=bar["calls"].get)
        flat += [list(plot_trace.COLORS).index(name), bar["begin"] - at, bar["end"] - bar["begin"], bar["of"][1]]
        at = bar["end"]
    return flat


def squares_of(slices):
    """[begin since the last one's, length, batch, token, layer, sweep] of each compute(i, j, k) in order."""
    squares = {}
    for s in slices:
        if s.channel == "gpu":
            key = (s.row, s.column, s.j, s.i)
            begin, end = squares.get(key, (s.begin, s.end))
            squares[key] = (min(begin, s.begin), max(end, s.end))
    flat, at = [], 0
    for key, (begin, end) in sorted(squares.items(), key=lambda item: item[1] + item[0]):
        flat += [microseconds(begin) - at, microseconds(end - begin), *key]
        at = microseconds(begin)
    return flat


def run(schedule, batches, directory):
    """What the page shows of one schedule."""
    trace = os.path.join(directory, "trace.json")
    command = RUN + ["--schedule", schedule, "--num-gpu-batches", str(batches), "--trace", trace]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if ran.returncode:
        raise plot_trace.Fault(f"{' '.join(command)}: exit status {ran.returncode}: {ran.stderr.strip()}")
    slices, lanes, _ = plot_trace.read_trace(trace)
    held = plot_trace.read_held(trace)
    return {"name": schedule.replace("zigzag", "zig-zag"), "batches": batches, "sweeps": max(s.i for s in slices) + 1, "end": microseconds(held[-1][0]),
            "lanes": [{"name": name, "bars": bars_of([s for s in slices if s.lane == lane])} for lane, name in lanes.items()],
            "squares": squares_of(slices),
            "held": [[microseconds(at), *pages.values(), n] for at, pages, n in held]}


def summary(runs):
    """The table above the animation."""
    rows = ["| schedule | batches in flight | sweeps | most pages | seconds | token/s |", "|---|---|---|---|---|---|"]
    for r in runs:
        most, seconds = max(sum(h[1:4]) for h in r["held"]), r["end"] / 1e6
        rows.append(f"| {r['name']} | {r['batches']} | {r['sweeps']} | {most} | {seconds:.3f} | "
                    f"{PROMPTS * GEN_LEN / seconds:.0f} |")
    return pages.render("\n".join(rows))


# ------------------------------------------------------------------ the page

PLAYER = """
<noscript><p>The animation of these runs needs JavaScript. The table above, the drawings and the text below do not.</p></noscript>
<section id="player" aria-label="Animation of the three schedules">
<div id="controls">
<div class="controls">
<div class="controls" role="group" aria-label="Schedule">
<button type="button" data-schedule="0" aria-pressed="false">1 row</button>
<button type="button" data-schedule="1" aria-pressed="true">2 zig-zag</button>
<button type="button" data-schedule="2" aria-pressed="false">3 diagonal</button>
</div>
<div class="controls" role="group" aria-label="Playing">
<button type="button" id="back" aria-label="Back by one square">&#9664;</button>
<button type="button" id="play" aria-label="Play">Play</button>
<button type="button" id="forth" aria-label="Forward by one square">&#9654;</button>
<select id="speed" aria-label="Speed"><option value="1">1 ms a second</option><option value="5">5 ms a second</option>
<option value="20" selected>20 ms a second</option><option value="100">100 ms a second</option></select>
</div>
</div>
<input type="range" id="time" min="0" step="1" value="0" aria-label="Time of the run">
<p id="status" role="status" aria-live="polite"></p>
</div>
<h3>Squares: a row for each batch; tokens to the right, and in each its layers</h3>
<canvas id="squares" role="img" aria-label="Grid of squares, a row for each batch, tokens and layers to the right"></canvas>
<div class="legend"><span><i style="background:var(--now)"></i>now</span><span><i style="background:var(--sweep)"></i>this sweep</span>
<span><i style="background:var(--done)"></i>done</span><span><i style="background:var(--empty)"></i>to come</span></div>
<h3>Lanes: the milliseconds around now; a number is the layer that the lane works for, h the head</h3>
<canvas id="lanes" role="img" aria-label="Lanes as rows, with a bar for the work on each layer"></canvas>
<div class="legend" id="calls"></div>
<h3>Memory: KV pages in use by tier over the whole run; the line is the sequences in flight</h3>
<canvas id="memory" role="img" aria-label="KV pages in use over time by tier, and sequences in flight"></canvas>
<div class="legend" id="tiers"></div>
</section>
"""

SCRIPT = pages.piece("draw.js") + pages.piece("index.js")

WHAT = """
<p>FlexGen (<a href="https://arxiv.org/abs/2303.06865">arXiv 2303.06865</a>) lets one GPU generate text with a language model
that is larger than its memory: weights, KV cache and activations are spread over GPU, CPU and disk, and while one batch is
computed what the next ones need is on its way. This page shows how, with a small implementation in C and CUDA. What it would do with
a model and a machine of your choice, and what would hold it back, the <a href="explore.html">policy search</a> says at once. Beside the paper, place by place, stands the code on a
<a href="paper.html">page of its own</a>.</p>
"""

INTRO = f"""
<p>The same {PROMPTS} prompts in {PROMPTS // GBS} GPU batches of {GBS}, each with {GEN_LEN} new tokens, by OPT-125M on the T4
of <code>hardware/t4.json</code>: a machine made of numbers, on which the program plays its schedules operation by operation.
About a tenth of the weights is on the GPU, four fifths are on the CPU, and the rest is on disk; the KV cache is on all three.
Zig-zag and the diagonal have the same peak of pages, but the diagonal has one batch more in flight, so that fewer sweeps load
the weights.</p>
"""

KEYS = """
<p id="keys">Keys: <kbd>1</kbd> <kbd>2</kbd> <kbd>3</kbd> choose the schedule at the same time of its run, the space bar plays and
pauses, and the arrow keys go from square to square. Paler bars are yet to come. Neighbouring operations for one layer on one
lane are drawn as one bar, coloured by its longest call. <code>make docs</code> makes the runs and this page anew.</p>
"""


def page(runs, tour):
    traces = json.dumps({"calls": plot_trace.COLORS, "tiers": plot_trace.TIER_COLORS, "runs": runs}, separators=(",", ":"))
    return pages.html_page(
        "FlexGen: a tour", pages.STYLE,
        f'<main>\n<h1>FlexGen, drawn from its own runs</h1>{WHAT}\n'
        f'<h2 id="schedules">Three schedules</h2>{INTRO}{summary(runs)}{PLAYER}{KEYS}<hr>\n{tour}\n</main>',
        f'<script type="application/json" id="traces">{traces}</script>\n<script>{SCRIPT}</script>',
        "<noscript><style>#player, #keys { display: none; }</style></noscript>\n")


def main():
    with tempfile.TemporaryDirectory() as directory:
        runs = [run(schedule, batches, directory) for schedule, batches in SCHEDULES]
    pages.write_or_check(PAGE, page(runs, pages.render(pages.read(TOUR))), LIMIT, "choose a smaller run")


if __name__ == "__main__":
    pages.run(main)
