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
    return f'<figure class="wide" tabindex="0">{svg}</figure>'


def table(lines):
    rows = [[inline(cell.strip()) for cell in line.strip().strip("|").split("|")] for line in lines]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def listing(lines):
    return '<pre tabindex="0">' + html.escape("\n".join(lines), quote=False) + "</pre>"


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

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --ink: #1d2126; --soft: #5b636e; --line: #d5d9de; --panel: #f5f6f8;
  --link: #1a5fb4; --empty: #e4e7eb; --done: #9db8d6; --sweep: #3f74b0; --now: #e8590c; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --ink: #e3e6ea; --soft: #9aa3ae; --line: #363c44;
  --panel: #1e2228; --link: #7fb2f0; --empty: #2a3037; --done: #38557a; --sweep: #6ea6e6; --now: #ff8a3d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1032px; padding: 0 16px 48px; background: var(--bg); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; overflow-wrap: break-word; }
h1, h2, h3, h4 { line-height: 1.25; margin: 1.6em 0 .5em; } h1 { font-size: 1.7rem; } h2 { font-size: 1.4rem; } h3 { font-size: 1.15rem; }
a { color: var(--link); } hr { border: 0; border-top: 1px solid var(--line); margin: 2em 0; }
code, pre { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .84em; }
code, kbd { background: var(--panel); padding: .1em .25em; border-radius: 3px; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; overflow-x: auto;
  line-height: 1.4; font-size: 12.5px; max-height: 34em; }
.wide { overflow-x: auto; margin: 1em 0; } .wide svg { display: block; width: 100%; min-width: 720px; height: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
#player { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 4px 12px 12px; margin: 1em 0; }
#player h3 { font-size: .95rem; margin: 10px 0 2px; } #player p { margin: 6px 0; font-size: .9rem; }
#controls { position: sticky; top: 0; z-index: 1; padding: 8px 0 2px; background: var(--panel); border-bottom: 1px solid var(--line); }
.controls { display: flex; flex-wrap: wrap; gap: 8px 20px; align-items: center; } .controls .controls { gap: 8px; }
button, select { font: inherit; font-size: .9rem; min-height: 36px; padding: 4px 12px; color: var(--ink); background: var(--bg);
  border: 1px solid var(--soft); border-radius: 6px; cursor: pointer; }
button[aria-pressed=true] { background: var(--link); border-color: var(--link); color: var(--bg); }
:focus-visible { outline: 2px solid var(--now); outline-offset: 2px; }
input[type=range] { width: 100%; margin: 8px 0 0; accent-color: var(--link); }
#status { font-variant-numeric: tabular-nums; min-height: 1.6em; }
@media (max-width: 640px) { #status { min-height: 4.7em; } th, td { padding-right: 6px; font-size: .76rem; } }
canvas { display: block; width: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .8rem; color: var(--soft); margin: 4px 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; vertical-align: -1px; }
"""

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
<button type="button" id="forth" aria-label="Forth by one square">&#9654;</button>
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

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("traces").textContent);
const at = id => document.getElementById(id);
const PER_PIXEL = 30, PAST = 0.6; // the lanes' microseconds, and the share of them before now
const TIERS = Object.entries(data.tiers), CALLS = Object.entries(data.calls);
let run, now = 0, playing = false, last = 0, ink = {}, asked = false;

// -------------------------------------------------- the traces, from differences to times

for (const r of data.runs) {
  for (const lane of r.lanes) {
    const flat = lane.bars;
    let t = 0;
    lane.bars = [];
    for (let n = 0; n < flat.length; n += 4) {
      const begin = t + flat[n + 1];
      t = begin + flat[n + 2];
      lane.bars.push({call: flat[n], begin, end: t, layer: flat[n + 3]});
    }
  }
  const flat = r.squares;
  let t = 0;
  r.squares = [];
  for (let n = 0; n < flat.length; n += 6) {
    const [gap, length, batch, token, layer, sweep] = flat.slice(n, n + 6);
    t += gap;
    r.squares.push({begin: t, end: t + length, batch, token, layer, sweep});
  }
}
const most = key => Math.max(...data.runs[0].squares.map(s => s[key])) + 1;
const ROWS = most("batch"), TOKENS = most("token"), LAYERS = most("layer");
const END = Math.max(...data.runs.map(r => r.end));
const PAGES = Math.max(...data.runs.flatMap(r => r.held.map(h => h[1] + h[2] + h[3])));
const SEQUENCES = Math.max(...data.runs.flatMap(r => r.held.map(h => h[4])));

/* The first place in a list in order of time that begins after t. */
function after(list, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].begin > t) high = middle; else low = middle + 1;
  }
  return low;
}

// -------------------------------------------------- drawing

/* An empty canvas of so many CSS pixels in height: [context, width]. */
function sheet(id, height) {
  const canvas = at(id), ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = "11px system-ui, Helvetica, Arial, sans-serif";
  c.textBaseline = "middle";
  return [c, width];
}

function write(c, text, x, y, align = "left", color = ink.soft) {
  c.fillStyle = color;
  c.textAlign = align;
  c.fillText(text, x, y);
}

function drawSquares() {
  const left = 22, top = 18, gap = 3, wide = at("squares").clientWidth;
  const cell = (wide - left - gap * (TOKENS - 1)) / (TOKENS * LAYERS), tall = Math.min(12, Math.max(8, cell));
  const [c] = sheet("squares", top + ROWS * tall + 2), seam = cell > 5 ? 1 : 0.5;
  const x = s => left + s.token * (LAYERS * cell + gap) + s.layer * cell;
  for (let token = 0; token < TOKENS; token++) {
    const middle = x({token, layer: LAYERS / 2});
    write(c, LAYERS * cell > 60 ? (token ? "token " + token : "token 0, prefill") : String(token), middle, 8, "center");
  }
  for (let row = 0; row < ROWS; row += tall < 11 ? 3 : 1) write(c, String(row), left - 5, top + (row + 0.5) * tall, "right");
  const newest = after(run.squares, now) - 1, sweep = newest < 0 ? -1 : run.squares[newest].sweep;
  run.squares.forEach((s, n) => {
    c.fillStyle = n > newest ? ink.empty : now < s.end ? ink.now : s.sweep === sweep ? ink.sweep : ink.done;
    c.fillRect(x(s), top + s.batch * tall, cell - seam, tall - 1);
  });
}

function drawLanes() {
  const left = 96, tall = 17, [c, wide] = sheet("lanes", run.lanes.length * tall + 18);
  const begin = now - (wide - left) * PER_PIXEL * PAST, pixel = 1 / PER_PIXEL, bottom = run.lanes.length * tall;
  run.lanes.forEach((lane, n) => {
    const y = n * tall;
    write(c, lane.name, left - 8, y + tall / 2, "right");
    c.fillStyle = ink.empty;
    c.fillRect(left, y + tall - 2, wide - left, 1);
    for (let b = Math.max(0, after(lane.bars, begin) - 1); b < lane.bars.length; b++) {
      const bar = lane.bars[b], x = left + Math.max(0, (bar.begin - begin) * pixel);
      const right = Math.min(wide, left + (bar.end - begin) * pixel);
      if (x >= wide) break;
      if (right <= left) continue;
      c.globalAlpha = bar.begin > now ? 0.35 : 1;
      c.fillStyle = CALLS[bar.call][1];
      c.fillRect(x, y + 3, Math.max(right - x - 0.5, 0.7), tall - 5);
      c.globalAlpha = 1;
      const text = bar.layer === LAYERS - 1 ? "h" : String(bar.layer);
      if (right - x > 8 * text.length + 2) write(c, text, (x + right) / 2, y + tall / 2 + 1, "center", bar.begin > now ? ink.ink : "#14171b");
    }
  });
  const x = left + (wide - left) * PAST;
  c.fillStyle = ink.now;
  c.fillRect(x - 1, 0, 2, bottom);
  write(c, "now", x, bottom + 9, "center", ink.now);
}

function drawMemory() {
  const left = 30, top = 8, height = 80, [c, wide] = sheet("memory", top + height + 20), bottom = top + height;
  const x = t => left + t / END * (wide - left - 8), y = n => bottom - n / PAGES * height;
  for (let n = 0; n <= PAGES; n += PAGES / 4) {
    c.fillStyle = ink.line;
    c.fillRect(left, y(n), wide - left - 8, 1);
    write(c, String(n), left - 5, y(n), "right");
  }
  for (let t = 0; t <= END; t += 5e5) write(c, (t / 1e6).toFixed(1) + " s", x(t), bottom + 11, t ? "center" : "left");
  run.held.slice(0, -1).forEach((h, n) => {
    const next = run.held[n + 1][0];
    let below = 0;
    TIERS.forEach(([, color], tier) => {
      const pages = h[1 + tier], until = Math.min(next, Math.max(now, h[0]));
      c.fillStyle = color;
      c.fillRect(x(h[0]), y(below + pages), x(until) - x(h[0]), pages / PAGES * height);
      c.globalAlpha = 0.3;
      c.fillRect(x(until), y(below + pages), x(next) - x(until), pages / PAGES * height);
      c.globalAlpha = 1;
      below += pages;
    });
  });
  c.beginPath();
  run.held.forEach((h, n) => {
    const level = bottom - h[4] / SEQUENCES * height * 0.97;
    if (n) c.lineTo(x(h[0]), bottom - run.held[n - 1][4] / SEQUENCES * height * 0.97);
    c.lineTo(x(h[0]), level);
  });
  c.strokeStyle = ink.ink;
  c.lineWidth = 1.2;
  c.stroke();
  c.fillStyle = ink.now;
  c.fillRect(x(now) - 1, top - 6, 2, height + 6);
}

function tell() {
  const done = after(run.squares, now), s = run.squares[Math.max(0, done - 1)];
  const held = run.held.filter(h => h[0] <= now).pop() || run.held[0];
  const what = now >= run.end ? "the end" : `sweep ${s.sweep}: batch ${s.batch}, token ${s.token}, ` +
    (s.layer === LAYERS - 1 ? "the head, which chooses the next token" : `layer ${s.layer}`);
  at("status").textContent = `${run.name}, ${(now / 1e3).toFixed(2)} of ${(run.end / 1e3).toFixed(0)} ms, ${what}; ` +
    `${held[1] + held[2] + held[3]} pages, ${held[4]} sequences in flight`;
}

function draw() {
  asked = false;
  drawSquares();
  drawLanes();
  drawMemory();
  at("time").value = now;
  at("time").setAttribute("aria-valuetext", (now / 1e3).toFixed(1) + " milliseconds");
  tell();
}

/* Many causes, one drawing a frame. */
function redraw() {
  if (!asked) requestAnimationFrame(draw);
  asked = true;
}

// -------------------------------------------------- controls

function go(t) {
  now = Math.min(run.end, Math.max(0, t));
  redraw();
}

function choose(n) {
  run = data.runs[n];
  at("time").max = run.end;
  document.querySelectorAll("[data-schedule]").forEach((b, m) => b.setAttribute("aria-pressed", String(m === n)));
  go(now);
}

function frame(t) {
  if (!playing) return;
  go(now + (t - last) * at("speed").value);
  last = t;
  if (now >= run.end) play(false); else requestAnimationFrame(frame);
}

function play(on) {
  if (on === playing) return;
  playing = on;
  if (on && now >= run.end) go(0);
  at("play").textContent = on ? "Pause" : "Play";
  at("play").setAttribute("aria-label", on ? "Pause" : "Play");
  at("status").setAttribute("aria-live", on ? "off" : "polite");
  last = performance.now();
  if (on) requestAnimationFrame(frame);
}

/* To the beginning of the next square, or of the one before. */
function step(by) {
  play(false);
  const n = after(run.squares, now) - 1 + by;
  go(n < 0 ? 0 : n < run.squares.length ? run.squares[n].begin : run.end);
}

/* Keys serve the animation only while it is seen, so that they scroll the page elsewhere. */
function key(e) {
  const box = at("player").getBoundingClientRect();
  if (box.bottom < 0 || box.top > innerHeight || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target.closest("select, pre, .wide")) return;
  if (e.key === " " && e.target.tagName !== "BUTTON" && e.target.tagName !== "A") play(!playing);
  else if (e.key === "ArrowRight") step(1);
  else if (e.key === "ArrowLeft") step(-1);
  else if ("123".includes(e.key)) choose(e.key - 1);
  else return;
  e.preventDefault();
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "soft", "line", "empty", "done", "sweep", "now"]) ink[name] = style.getPropertyValue("--" + name).trim();
  redraw();
}

function legend(id, entries) {
  for (const [name, color] of entries) {
    const entry = at(id).appendChild(document.createElement("span"));
    entry.appendChild(document.createElement("i")).style.background = color;
    entry.append(name);
  }
}

const seen = new Set(data.runs.flatMap(r => r.lanes.flatMap(l => l.bars.map(b => b.call))));
legend("calls", CALLS.filter((_, n) => seen.has(n)));
legend("tiers", TIERS);
legend("tiers", [[`sequences in flight, up to ${SEQUENCES}`, "var(--ink)"]]);
document.querySelectorAll("[data-schedule]").forEach((b, n) => b.addEventListener("click", () => choose(n)));
at("play").addEventListener("click", () => play(!playing));
at("back").addEventListener("click", () => step(-1));
at("forth").addEventListener("click", () => step(1));
at("time").addEventListener("input", e => go(Number(e.target.value)));
window.addEventListener("keydown", key);
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", colors);
choose(1);
colors();
go(Number(new URLSearchParams(location.search).get("ms") || 0) * 1000); // index.html?ms=100 opens there
"""

WHAT = """
<p>FlexGen (<a href="https://arxiv.org/abs/2303.06865">arXiv 2303.06865</a>) lets one GPU generate text with a language model
that is larger than its memory: weights, KV cache and activations are spread over GPU, CPU and disk, and while one batch is
computed what the next ones need is on its way. This page shows how, with a small implementation in C and CUDA.</p>
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
