#!/usr/bin/env python3
"""Write docs/index.html: docs/TOUR.md as a page, headed by an animation of the three schedules from real traces.

    python3 scripts/make_page.py            in the repository, after `make`; or `make docs`
    python3 scripts/make_page.py --check    whether the page is as it would be written; FLEXGEN names another program

The program runs the same prompts with each schedule on a machine made of numbers, so that the same bytes come out each
time. The page is one file: pictures, style, script and traces are in it, and a browser opens it without a network.
The three parts below are the traces (what is kept of them), the tour (as much of Markdown as it uses), and the page itself.

Needs only Python's standard library, 3.8 or later.
"""
import html
import json
import os
import re
import subprocess
import sys
import tempfile

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
    return render("\n".join(rows))


# ------------------------------------------------------------------ the tour

def inline(text):
    """Code, links, bold and slanted words; what is in a code span stays as it is."""
    parts = re.split(r"`([^`]+)`", text)
    for n in range(0, len(parts), 2):
        parts[n] = html.escape(parts[n], quote=False)
    parts[1::2] = [f"<code>{html.escape(p, quote=False)}</code>" for p in parts[1::2]]
    # code is put aside, since a star in it is no mark
    kept, text = parts[1::2], "\0".join(parts[::2])
    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", r"<em>\1</em>", text)
    return re.sub("\0", lambda _: kept.pop(0), text)


def slug(heading):
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def picture(alt, path):
    """An SVG beside the tour, drawn in the page itself."""
    with open(os.path.join(os.path.dirname(TOUR), path), encoding="utf-8") as f:
        svg = f.read().strip()
    svg = re.sub(r" width='\d+' height='\d+'", f" role='img' aria-label='{html.escape(alt)}'", svg, count=1)
    svg = re.sub(r"<style>.*?</style>\n|<rect class='ground'.*?/>\n", "", svg)  # the page has its own ground, and style.css the ink
    return f'<figure class="wide" tabindex="0" aria-label="{html.escape(alt)}">{svg}</figure>'


def table(lines):
    rows = [[inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f'<div class="wide" tabindex="0" role="group" aria-label="table"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def listing(lines):
    return '<pre tabindex="0" role="group" aria-label="listing">' + html.escape("\n".join(lines), quote=False) + "</pre>"


def block(lines):
    """One paragraph, heading, list, table or piece of code, whose lines belong together."""
    first = lines[0]
    heading = re.match(r"(#+) (.*)", first)
    image = re.fullmatch(r"!\[([^\]]*)\]\(([^)]+)\)", " ".join(lines))
    if heading:
        level = len(heading[1]) + 1  # the page has a title of its own
        return f'<h{level} id="{slug(heading[2])}">{inline(heading[2])}</h{level}>'
    if image:
        return picture(image[1], image[2])
    if first.startswith("|"):
        return table(lines)
    if first.startswith("    "):
        return listing([line[4:] for line in lines])
    if first == "---":
        return "<hr>"
    if first.startswith("- "):
        items = re.split(r"(?:^|\n)- ", "\n".join(lines))[1:]
        return "<ul>" + "\n".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>"
    return f"<p>{inline(chr(10).join(lines))}</p>"


def render(text):
    """Blocks are parted by empty lines, but in a listing; comments are left out."""
    out, lines, code = [], [], None
    for line in text.split("\n") + [""]:
        if line.startswith("```"):
            if code is not None:
                out.append(listing(code))
            code = [] if code is None else None
        elif code is not None:
            code.append(line)
        elif line.strip() and not line.startswith("<!--"):
            lines.append(line)
        elif lines:
            out.append(block(lines))
            lines = []
    return "\n".join(out)


# ------------------------------------------------------------------ the page

def piece(name):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "page", name), encoding="utf-8") as f:
        return f.read()


STYLE = piece("style.css")

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

SCRIPT = piece("draw.js") + piece("index.js")

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
    return (f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>FlexGen: a tour</title>\n'
            f'<style>{STYLE}</style>\n<noscript><style>#player, #keys {{ display: none; }}</style></noscript>\n</head>\n<body>\n<main>\n<h1>FlexGen, drawn from its own runs</h1>{WHAT}\n'
            f'<h2 id="schedules">Three schedules</h2>{INTRO}{summary(runs)}{PLAYER}{KEYS}<hr>\n{tour}\n</main>\n'
            f'<script type="application/json" id="traces">{traces}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n')


def main():
    with tempfile.TemporaryDirectory() as directory:
        runs = [run(schedule, batches, directory) for schedule, batches in SCHEDULES]
    with open(TOUR, encoding="utf-8") as f:
        text = page(runs, render(f.read()))
    size = len(text.encode())
    if size > LIMIT:
        raise plot_trace.Fault(f"{PAGE}: would have {size} bytes; expected at most {LIMIT}: choose a smaller run")
    if "--check" in sys.argv:
        with open(PAGE, encoding="utf-8", newline="\n") as f:
            if f.read() != text:
                raise plot_trace.Fault(f"{PAGE}: is not what the tour and the runs make now; `make docs` writes it anew")
        return
    with open(PAGE, "w", encoding="utf-8", newline="\n") as f:
        f.write(text)
    print(f"{PAGE}: {size} bytes")


if __name__ == "__main__":
    try:
        main()
    except plot_trace.Fault as fault:
        print(f"make_page.py: {fault}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        sys.exit(f"make_page.py: {e.filename}: {e.strerror}; run it in the repository, after `make`")
