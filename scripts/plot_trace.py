#!/usr/bin/env python3
"""Draw a trace that flexgen wrote with --trace: its lanes over time, or the paper's grid of squares, as one SVG.

    python3 scripts/plot_trace.py --lanes   TRACE.json OUT.svg [--title TEXT] [--sweeps A:B] [--time A:B]
    python3 scripts/plot_trace.py --squares TRACE.json OUT.svg [--title TEXT] [--sweeps A:B] [--time A:B]
    python3 scripts/plot_trace.py --memory  TRACE.json ... OUT.svg [--title TEXT]

--lanes: a row a lane, time to the right, a box a call of Figure 4, labelled with its layer j and GPU batch k where there is
room. Where a run has more calls than pixels, a column is as high as the share of its time in which the lane was busy. The
stages of a pipeline are groups of rows, one below the other, each with its name; a layer j is counted in its stage.
--squares: Figures 3 and 6 from a real run: a square for each compute(i, j, k), a row for each GPU batch, layers and tokens
to the right. The red path is the order in which the squares were computed, by the beginnings of their `project`. Slices
that say which "batch" they are of and which "token" of it they compute are drawn there, others at place k and sweep i.
--memory: the KV pages in use over time, by tier, with the sequences in flight as a line; one drawing below the other for
several traces, all with the same scales and each with the name of its file, so that schedules can be compared.
--sweeps A:B cuts out sweeps A to B, both included, --time A:B a window in milliseconds; either end may be left out.

Needs only Python's standard library, 3.8 or later.
"""
import argparse
import colorsys
import html
import json
import math
import os
import sys

MAX_SLICES = 1500   # drawn one by one, beyond that as columns
MAX_SQUARES = 1500  # an SVG stays below 100 KB with as many
WIDTH = 960         # of a drawing without its labels, pixels
LINE = "#7b828c"    # of axes and frames; seen on both grounds
INK, GROUND = ("#3d444d", "#c3c9d1"), ("#fff", "#15181c")  # of texts, and what is behind them: by day, and in the dark
FONT = "font-family='Helvetica,Arial,sans-serif'"

# the order of the legend; colours stand out on white and on black
COLORS = {
    "compute": "#f28e2b", "load_weight": "#4e79a7", "load_cache": "#59a9a3", "load_activation": "#9c755f", "load_inputs": "#a39a96",
    "gather_tokens": "#8a8a5c", "project": "#f28e2b", "attend": "#e15759", "finish": "#d4ae2c", "store_cache": "#a070a0",
    "store_activation": "#e88f9b", "tokens": "#5f9e52", "receive": "#2aa5d8", "send": "#c2409a",
}
COMPUTES = ("gpu", "cpu", "compute")  # channels; the last is mini.c's
OTHER_COLORS = ["#6b6ecf", "#8c6d31", "#d6616b", "#637939"]


class Fault(Exception):
    """What is wrong with a file or an option, in one line for a person."""


# ------------------------------------------------------------------ the trace

def lane_of(event):
    """(which stage's, which of its lanes)"""
    return int(event["pid"]), int(event["tid"])


class Slice:
    """One call on one lane; times in milliseconds."""

    def __init__(self, event):
        args = event.get("args", {})
        self.lane, self.name = lane_of(event), event["name"]
        self.begin, self.end = float(event["ts"]) / 1000, (float(event["ts"]) + float(event["dur"])) / 1000
        self.i, self.j, self.k = int(args["i"]), int(args["j"]), int(args["k"])
        self.channel, self.prefill = str(event.get("cat", "")), args.get("phase") == "prefill"
        self.numbered = "batch" in args and "token" in args
        self.row, self.column = (int(args["batch"]), int(args["token"])) if self.numbered else (self.k, self.i)
        if not isinstance(self.name, str) or not math.isfinite(self.begin + self.end) or self.end < self.begin:
            raise ValueError


def read_trace(path):
    """(slices by begin, {lane: name} in the order of the rows, {pid: name of the stage})"""
    expected = "expected a trace that flexgen wrote with --trace; is it complete?"
    try:
        with open(path, encoding="utf-8") as f:
            events = json.load(f)["traceEvents"]
        slices = sorted((Slice(e) for e in events if e["ph"] == "X"), key=lambda s: s.begin)
        meta = [e for e in events if e["ph"] == "M"]
        stages = {int(e["pid"]): str(e["args"]["name"]) for e in meta if e["name"] == "process_name"}
        names = {lane_of(e): str(e["args"]["name"]) for e in meta if e["name"] == "thread_name"}
        place = {lane_of(e): float(e["args"]["sort_index"]) for e in meta if e["name"] == "thread_sort_index"}
        lanes = sorted({s.lane for s in slices}, key=lambda lane: (lane[0], place.get(lane, math.inf), lane))
    except json.JSONDecodeError as e:
        raise Fault(f"{path}: line {e.lineno}: is not JSON; {expected}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise Fault(f"{path}: holds no list of slices with their i, j and k; {expected}") from None
    return slices, {lane: names.get(lane, f"lane {lane[1]}") for lane in lanes}, stages


def parse_range(text, option, kind):
    """A:B, A:, :B or A, as (A, B)."""
    first, colon, last = text.partition(":")
    try:
        a = kind(first) if first else -math.inf
        b = (kind(last) if last else math.inf) if colon else a
    except ValueError:
        a, b = 1, 0
    if not text or not a <= b:
        raise Fault(f"{option}: found {text!r}; expected a range A:B with A <= B, such as 0:3")
    return a, b


def cut(slices, sweeps, window, strictly):
    """The part of the time that the options ask for. A sweep lasts from its first computation to its last;
    strictly: without what runs beside it for other sweeps. Returns (slices, begin, end)."""
    begin, end = -math.inf, math.inf
    if sweeps:
        a, b = parse_range(sweeps, "--sweeps", int)
        inside = [s for s in slices if a <= s.i <= b and s.channel in COMPUTES]
        if not inside:
            raise Fault(f"--sweeps: nothing was computed in {sweeps}; the trace has sweeps 0 to {max(s.i for s in slices)}")
        begin, end = min(s.begin for s in inside), max(s.end for s in inside)
        slices = [s for s in slices if a <= s.i <= b] if strictly else slices
    if window:
        a, b = parse_range(window, "--time", float)
        begin, end = max(begin, a), min(end, b)
    kept = [s for s in slices if s.begin < end and s.end > begin]
    if not kept:
        raise Fault(f"--time: nothing ran then; the trace ends at {max(s.end for s in slices):.3f} ms")
    return kept, max(begin, min(s.begin for s in kept)), min(end, max(s.end for s in kept))


# ------------------------------------------------------------------ SVG

def number(x):
    """Short: one decimal, none where it is 0."""
    return f"{x:.1f}".rstrip("0").rstrip(".") if "." in f"{x:.1f}" else f"{x:.1f}"


def box(x, y, w, h):
    return f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h-{number(w)}z"


def text_width(text, size=11):
    """At most, in the fonts that viewers have."""
    return 0.62 * size * len(text)


def label(x, y, text, size=11, anchor="start", extra=""):
    place = f"x='{number(x)}' y='{number(y)}'"
    return f"<text {place} font-size='{size}' text-anchor='{anchor}'{extra}>{html.escape(text)}</text>"


def luminance(color):
    """Of #rgb or #rrggbb, as WCAG defines it: from 0, black, to 1, white."""
    digits = color[1:] if len(color) == 7 else "".join(2 * d for d in color[1:])
    light = (int(digits[n:n + 2], 16) / 255 for n in (0, 2, 4))
    return sum(share * (v / 12.92 if v <= .04045 else ((v + .055) / 1.055) ** 2.4) for share, v in zip((.2126, .7152, .0722), light))


def ink_on(color):
    """Black or white, whichever has more contrast with the colour: 4.58:1 at least."""
    light = luminance(color) + .05
    return "#000" if light / .05 > 1.05 / light else "#fff"


def document(width, height, title, parts):
    """The drawing brings its own ground, so that its texts can be read wherever it is shown."""
    width, height = math.ceil(width), math.ceil(height)
    head = (f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' {FONT} fill='{INK[0]}'>")
    dark = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ fill: {INK[1]} }} .ground {{ fill: {GROUND[1]} }} }}</style>"
    ground = f"<rect class='ground' width='{width}' height='{height}' fill='{GROUND[0]}'/>"
    return "\n".join([head, dark, ground, f"<title>{html.escape(title)}</title>", label(12, 24, title, 15, extra=" font-weight='bold'"),
                      *parts, "</svg>\n"])


# ------------------------------------------------------------------ lanes over time

def colors_of(slices):
    """{call: colour}, in the order of the legend."""
    names = {s.name for s in slices}
    colors = {name: color for name, color in COLORS.items() if name in names}
    for n, name in enumerate(sorted(names - set(COLORS))):
        colors[name] = OTHER_COLORS[n % len(OTHER_COLORS)]
    return colors


def tick_step(span, count):
    """1, 2 or 5 times a power of ten, so that there are at most `count` in the span."""
    power = 10 ** math.floor(math.log10(span / count))
    return next(m * power for m in (1, 2, 5, 10, 20) if m * power * count >= span)


def time_axis(begin, end, x_of, top, bottom):
    """Lines and times; from 0 where nothing is cut off."""
    span = end - begin
    unit, name = (1000, "s") if span >= 2000 else (1, "ms") if span >= 2 else (0.001, "µs")
    step, parts = tick_step(span, 9), []
    for n in range(math.ceil(begin / step - 1e-9), math.floor(end / step + 1e-9) + 1):
        x, value = x_of(n * step), n * step / unit
        decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
        parts.append(f"<path d='M{number(x)} {number(top)}V{number(bottom)}' stroke='{LINE}' stroke-opacity='.22'/>")
        parts.append(label(x, bottom + 15, f"{value:.{decimals}f} {name}", anchor="middle"))
    return parts


def sweep_marks(slices, begin, end, x_of, top, bottom):
    """Where each sweep's first computation begins, and what it is, as far as there is room."""
    starts = {}
    for s in slices:
        if s.channel in ("gpu", "compute"):
            starts.setdefault(s.i, s)
    parts, free = [], -math.inf
    for i, s in sorted(starts.items()):
        x = x_of(max(s.begin, begin))
        if x < free or s.begin >= end:
            continue
        text = f"sweep {i}" + (", prefill" if s.prefill else "")
        free = x + text_width(text) + 8
        parts.append(f"<path d='M{number(x)} {number(top - 14)}V{number(bottom)}' stroke='{LINE}' stroke-dasharray='2 3'/>")
        parts.append(label(x + 4, top - 5, text))
    return parts


def legend(colors, x, y, width):
    """Returns (parts, height)."""
    parts, left, top = [], x, y
    for name, color in colors.items():
        need = 30 + text_width(name)
        if left + need > x + width and left > x:
            left, top = x, top + 20
        parts.append(f"<path d='{box(left, top, 12, 12)}' fill='{color}'/>{label(left + 17, top + 10, name)}")
        left += need
    return parts, top + 20 - y


def exact_boxes(slices, x_of, tops, begin, end, height):
    """A box a slice: {call: [path]}, and j and k in those that are wide enough: {call: [text]}."""
    paths, labels, room = {}, {}, 400
    for s in slices:
        x, right = x_of(max(s.begin, begin)), x_of(min(s.end, end))
        gap = min(0.6, (right - x) / 4)  # neighbours of one call stay apart
        paths.setdefault(s.name, []).append(box(x, tops[s.lane], max(right - x - gap, 0.6), height))
        text = f"{s.j},{s.k}"
        if right - x > 6.5 * len(text) and room:
            room -= 1
            y = tops[s.lane] + height / 2 + 3.5
            labels.setdefault(s.name, []).append(f"<text x='{number((x + right) / 2)}' y='{number(y)}'>{text}</text>")
    return paths, labels


def busy_columns(slices, x_of, tops, begin, end, height, step, left):
    """Columns `step` pixels wide, as high as the share of their time that each call took: {call: [path]}."""
    share = {}
    for s in slices:
        x, right = x_of(max(s.begin, begin)) - left, x_of(min(s.end, end)) - left
        for column in range(int(x / step), int(min(right, WIDTH - 1e-6) / step) + 1):
            part = (min(right, (column + 1) * step) - max(x, column * step)) / step
            if part > 0:
                key = (s.lane, column, s.name)
                share[key] = share.get(key, 0) + part
    filled, paths = {}, {}
    order = {name: n for n, name in enumerate(COLORS)}
    for lane, column, name in sorted(share, key=lambda key: (key[0], key[1], order.get(key[2], len(order)), key[2])):
        h, used = height * share[lane, column, name], filled.get((lane, column), 0)
        filled[lane, column] = used + h
        if h >= 0.3:
            paths.setdefault(name, []).append(box(left + column * step, tops[lane] + height - used - h, step, h))
    return paths, {}


def draw_boxes(slices, x_of, tops, begin, end, height, left):
    if len(slices) <= MAX_SLICES:
        return exact_boxes(slices, x_of, tops, begin, end, height)
    for step in (2, 3, 4, 6, 8, 12, 16, 24):
        paths, labels = busy_columns(slices, x_of, tops, begin, end, height, step, left)
        if sum(map(len, paths.values())) <= 2 * MAX_SLICES:
            break
    return paths, labels


def plot_lanes(slices, lanes, stages, begin, end, title):
    if not end > begin:
        raise Fault("the slices that are left take no time; choose a longer window")
    left, top, pitch, height = 132, 62, 30, 22
    x_of = lambda t: left + (t - begin) / (end - begin) * WIDTH
    lanes = {lane: name for lane, name in lanes.items() if any(s.lane == lane for s in slices)}
    channel = {s.lane: s.channel for s in slices}
    groups = sorted({pid for pid, _ in lanes})
    above = 40 if len(groups) > 1 else 0  # a stage's name, and below it the names of its sweeps
    tops, marks, bottom, colors = {}, [], top - above / 2, colors_of(slices)
    for pid in groups:
        first = bottom = bottom + above
        for lane in (lane for lane in lanes if lane[0] == pid):
            tops[lane] = bottom + (pitch - height) / 2
            bottom += pitch
        marks += sweep_marks([s for s in slices if s.lane[0] == pid], begin, end, x_of, first, bottom)
        if above:
            marks.append(label(12, first - 21, stages.get(pid, f"process {pid}"), 12, extra=" font-weight='bold'"))
    parts = time_axis(begin, end, x_of, top, bottom) + marks
    for lane, name in lanes.items():
        alone = channel[lane] == name
        parts.append(label(left - 10, tops[lane] + (15 if alone else 10), name, 12, "end"))
        if not alone:
            parts.append(label(left - 10, tops[lane] + 21, channel[lane], 9, "end"))
    paths, labels = draw_boxes(slices, x_of, tops, begin, end, height, left)
    parts += [f"<path fill='{color}' d='{''.join(paths.get(name, []))}'/>" for name, color in colors.items()]
    parts += [f"<g font-size='9.5' text-anchor='middle' fill='{ink_on(color)}'>{''.join(labels[name])}</g>"
              for name, color in colors.items() if name in labels]
    entries, more = legend(colors, left, bottom + 32, WIDTH)
    note = f"In a box: layer j{' of the stage' if above else ''}, GPU batch k." if labels else ""
    if len(slices) > MAX_SLICES:
        note = "A column is as high as the share of its time in which the lane was busy."
    parts += entries + ([label(left, bottom + 32 + more + 12, note)] if note else [])
    return document(left + WIDTH + 34, bottom + 32 + more + (24 if note else 4), title, parts)


# ------------------------------------------------------------------ squares

RED = "#e0202f"


def computed_squares(slices):
    """The first `project` of each square, or its `compute` (mini.c), in the order of computing."""
    seen, squares = set(), []
    for s in slices:
        key = (s.i, s.j, s.k)
        if s.name in ("project", "compute") and key not in seen:
            seen.add(key)
            squares.append(s)
    if not squares:
        raise Fault("the part of the trace that was asked for holds no `project` slices, which are the squares")
    if len({s.numbered for s in squares}) > 1:
        raise Fault("some slices of the trace say their batch and token, some do not; expected all or none")
    if len(squares) > MAX_SQUARES:
        raise Fault(f"{len(squares)} squares do not fit, at most {MAX_SQUARES} do: choose fewer with --sweeps A:B")
    return squares


def layer_color(j, layers, head):
    if j == head:
        return "#c3c7cd"
    r, g, b = colorsys.hls_to_rgb((0.50 + 0.30 * j / max(layers - 1, 1)) % 1, 0.78, 0.60)  # cyan to violet: no red
    return f"#{round(r * 255):02x}{round(g * 255):02x}{round(b * 255):02x}"


class Grid:
    """Where squares are. Columns: layers within tokens, rows: batches; from the first to the last that occur."""

    def __init__(self, squares):
        rows, columns, layers = ([f(s) for s in squares] for f in (lambda s: s.row, lambda s: s.column, lambda s: s.j))
        self.row0, self.rows = min(rows), max(rows) - min(rows) + 1
        self.column0, self.columns = min(columns), max(columns) - min(columns) + 1
        self.layer0, self.layers = min(layers), max(layers) - min(layers) + 1
        self.gap = 8
        self.slanted = any(a.i == b.i and a.j == b.j and a.column != b.column for a, b in zip(squares, squares[1:]))
        self.cell = min(30, (WIDTH + 100 - self.gap * (self.columns - 1)) / (self.columns * self.layers))
        self.pitch = self.cell + (12 if self.slanted else 0)  # of rows; room for the slope of a diagonal
        self.size = 8.5 if self.cell >= 22 else 7  # of a square's number, which is top left in it
        beside = 4.5 + 0.57 * self.size * len(str(len(squares)))  # where the path is clear of the numbers
        self.numbers = self.cell >= 17 and beside <= 0.87 * self.cell
        self.path_x, self.path_y = (max(0.67 * self.cell, beside), 0.67 * self.cell) if self.numbers else (self.cell / 2, self.cell / 2)
        self.left, self.top = 76, 74 if self.cell >= 9 else 60
        if self.cell < 5:
            raise Fault(f"{self.columns} tokens of {self.layers} layers do not fit: choose fewer with --sweeps A:B")

    def x(self, s):
        return self.group_x(s.column) + (s.j - self.layer0) * self.cell

    def group_x(self, column):
        return self.left + (column - self.column0) * (self.layers * self.cell + self.gap)

    def y(self, row):
        return self.top + (row - self.row0) * self.pitch

    def middle(self, s):
        """Where the path goes."""
        return self.x(s) + self.path_x, self.y(s.row) + self.path_y

    def way(self, a, b):
        """From a square to another between the squares, so that the line crosses no number. The first point is left out."""
        (x0, y0), (x1, y1) = self.middle(a), self.middle(b)
        if x0 == x1 or y0 == y1 and x0 < x1:
            return [(x1, y1)]
        if b.row < a.row:
            left = self.x(b) - (self.gap / 2 if b.j == self.layer0 else 0)
            return [(left, y0), (left, y1), (x1, y1)]
        above = self.y(b.row) - (self.pitch - self.cell) / 2
        return [(x0, above), (x1, above), (x1, y1)]


def arrow(points, size):
    """A line through the points with a head at its end."""
    (x0, y0), (x1, y1) = points[-2:]
    length = math.hypot(x1 - x0, y1 - y0) or 1
    dx, dy = (x1 - x0) / length * size, (y1 - y0) / length * size
    line = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    back, wing = (x1 - dx, y1 - dy), 0.5
    head = f"M{number(x1)} {number(y1)}L{number(back[0] - dy * wing)} {number(back[1] + dx * wing)}" \
           f"L{number(back[0] + dy * wing)} {number(back[1] - dx * wing)}z"
    return line, head


def runs_of(squares, grid):
    """The order of computing cut into straight runs: along a row, or through the batches of a layer."""
    runs = [[squares[0]]]
    for before, s in zip(squares, squares[1:]):
        same_layer = s.j == before.j and s.i == before.i
        beside = s.row == before.row and 0 < grid.x(s) - grid.x(before) < grid.cell + grid.gap + 1
        run = runs[-1]
        if not same_layer and not beside:
            runs.append([s])
        elif len(run) > 1 and same_layer != (run[-1].j == run[-2].j and run[-1].i == run[-2].i):
            runs.append([before, s])
        else:
            run.append(s)
    return runs


def red_path(runs, grid):
    """Arrows through runs, dashes from one's end to the next one's beginning."""
    lines, heads, returns = [], [], []
    for run in runs:
        points = [grid.middle(run[0])] + [point for a, b in zip(run, run[1:]) for point in grid.way(a, b)]
        line, head = arrow(points, max(4.0, min(7.0, grid.cell * 0.26))) if len(run) > 1 else \
            ("", box(points[0][0] - 1.5, points[0][1] - 1.5, 3, 3))
        lines.append(line)
        heads.append(head)
    for run, following in zip(runs, runs[1:]):
        if run[-1] is not following[0]:
            returns.append(arrow([grid.middle(run[-1]), *grid.way(run[-1], following[0])], 1)[0])
    stroke = 2 if grid.cell >= 14 else 1.3
    return [f"<g stroke='{RED}' fill='none'>"
            f"<path d='{''.join(returns)}' stroke-opacity='.7' stroke-dasharray='3 3'/>"
            f"<path d='{''.join(lines)}' stroke-width='{stroke}' stroke-linejoin='round'/>"
            f"<path d='{''.join(heads)}' fill='{RED}' stroke='none'/></g>"]


def paths(squares, grid):
    """All of the order where its lines do not cross. A diagonal's do: there it is that of one layer, and on to the next, in the
    first sweep with the most squares, which are framed as in Figure 6. Returns (parts, that sweep or None)."""
    if not grid.slanted:
        return red_path(runs_of(squares, grid), grid), None
    sweeps = {}
    for s in squares:
        sweeps.setdefault(s.i, []).append(s)
    chosen = max(sorted(sweeps), key=lambda i: len(sweeps[i]))
    frames = "".join(box(grid.x(s) + 1, grid.y(s.row) + 1, grid.cell - 2, grid.cell - 2) for s in sweeps[chosen])
    parts = [f"<path d='{frames}' fill='none' stroke='{RED}' stroke-width='1.6'/>"]
    first = sweeps[chosen][0].j
    shown = [s for s in sweeps[chosen] if s.j == first]
    return parts + red_path(runs_of(shown + sweeps[chosen][len(shown):][:1], grid), grid), chosen


def grid_labels(squares, grid, head):
    word, row_word = ("token", "batch") if squares[0].numbered else ("sweep", "k =")
    parts, width = [], grid.layers * grid.cell
    for c in range(grid.column0, grid.column0 + grid.columns):
        members = [s for s in squares if s.column == c]
        text = f"{word} {c}"
        if members and all(s.prefill for s in members) and text_width(text + " (prefill)", 12) < width:
            text += " (prefill)"
        if text_width(text, 12) > width + grid.gap:
            text = str(c)
        if text_width(text, 12) <= width + grid.gap or c % 5 == 0:
            parts.append(label(grid.group_x(c) + width / 2, grid.top - (22 if grid.cell >= 9 else 8), text, 12, "middle"))
        for j in range(grid.layer0, grid.layer0 + grid.layers, 1 if grid.cell >= 14 else 2):
            if grid.cell >= 9:
                x = grid.group_x(c) + (j - grid.layer0 + 0.5) * grid.cell
                parts.append(label(x, grid.top - 6, "h" if j == head else str(j), 9, "middle"))
    for row in range(grid.row0, grid.row0 + grid.rows):
        if grid.cell >= 10 or row % 5 == 0:
            parts.append(label(grid.left - 9, grid.y(row) + grid.cell / 2 + 4, f"{row_word} {row}", 11, "end"))
    return parts


def squares_legend(squares, grid, head, chosen, y, width):
    """Returns (parts, their bottom). Entries are (what to draw at 0 0, its width, text)."""
    layers = grid.layers - (head is not None)
    text = "order of computing" + (", as numbered" if grid.numbers else "")
    text += "" if chosen is None else f"; the line is layer {grid.layer0} in sweep {chosen}"
    solid = f"<path d='M0 6h22' stroke='{RED}' stroke-width='2'/><path d='M28 6l-7 -3.5v7z' fill='{RED}'/>"
    dashed = f"<path d='M0 6h28' stroke='{RED}' stroke-opacity='.7' stroke-dasharray='3 3'/>"
    entries = [(solid, 28, text), (dashed, 28, "back to where it goes on")]
    shown = min(layers, 12)
    colors = [layer_color(n * (layers - 1) // max(shown - 1, 1), layers, None) for n in range(shown)]
    text = f"layers {grid.layer0} to {grid.layer0 + layers - 1}" if layers > 1 else f"layer {grid.layer0}"
    strip = "".join(f"<path d='{box(12 * n, 0, 12, 12)}' fill='{c}'/>" for n, c in enumerate(colors))
    entries.append((strip, 12 * shown, text))
    if head is not None:
        color = layer_color(head, layers, head)
        entries.append((f"<path d='{box(0, 0, 12, 12)}' fill='{color}'/>", 12, "h: head, next token"))
    parts, x = [], grid.left
    for drawing, need, text in entries:
        need += 6 + text_width(text)
        if x + need > width and x > grid.left:
            x, y = grid.left, y + 20
        caption = label(need - text_width(text), 10, text)
        parts.append(f"<g transform='translate({number(x)} {number(y)})'>{drawing}{caption}</g>")
        x += need + 14
    return parts, y + 24


def plot_squares(slices, title):
    squares = computed_squares(slices)
    heads = {s.j for s in slices if s.name == "tokens"}
    head = max(s.j for s in squares) if heads == {max(s.j for s in squares)} else None
    grid, by_color, numbers = Grid(squares), {}, []
    layers = grid.layers - (head is not None)
    for n, s in enumerate(squares):
        color = layer_color(head if s.j == head else s.j - grid.layer0, layers, head)
        by_color.setdefault(color, []).append(box(grid.x(s) + 0.5, grid.y(s.row) + 0.5, grid.cell - 1, grid.cell - 1))
        numbers.append(f"<text x='{number(grid.x(s) + 3)}' y='{number(grid.y(s.row) + 10)}'>{n + 1}</text>")
    red, chosen = paths(squares, grid)
    parts = grid_labels(squares, grid, head)
    parts += [f"<path fill='{color}' d='{''.join(boxes)}'/>" for color, boxes in by_color.items()] + red
    if grid.numbers:
        parts.append(f"<g font-size='{grid.size}' fill='#30343a'>{''.join(numbers)}</g>")
    width = max(grid.group_x(grid.column0 + grid.columns) - grid.gap, grid.left + 450, 24 + text_width(title, 15)) + 16
    entries, bottom = squares_legend(squares, grid, head, chosen, grid.y(grid.row0 + grid.rows) + 14, width)
    return document(width, bottom, title, parts + entries)


# ------------------------------------------------------------------ pages over time

TIER_COLORS = {"GPU": "#f28e2b", "CPU": "#4e79a7", "disk": "#9c755f"}


def read_held(path):
    """[(milliseconds, {tier: pages}, sequences in flight)] of a machine's trace; the last is its end."""
    expected = "expected a trace that flexgen wrote with --trace"
    try:
        with open(path, encoding="utf-8") as f:
            counters = [e for e in json.load(f)["traceEvents"] if e["ph"] == "C" and e["pid"] == 1]
        pages, sequences = ([e for e in counters if e["name"] == name] for name in ("KV pages", "sequences"))
        held = [(float(p["ts"]) / 1000, {t: int(p["args"][t]) for t in TIER_COLORS}, int(s["args"]["in flight"]))
                for p, s in zip(pages, sequences)]
    except (ValueError, KeyError, TypeError):
        raise Fault(f"{path}: holds no counters of pages; {expected}") from None
    if not held or not held[-1][0] > 0:
        raise Fault(f"{path}: holds no counters of pages; {expected}")
    return held


def steps(points, base):
    """A staircase through points (x, y), closed along the points of `base`, which has the same x."""
    def walk(line):
        return [p for (x, y), (after, _) in zip(line, line[1:]) for p in ((x, y), (after, y))]
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in walk(points) + walk(base)[::-1]) + "z"


def memory_panel(held, x_of, y_of, most, top, bottom, pixels):
    """The tiers on top of each other, and the line of the sequences up to `most` of them."""
    parts, below = [], [(x_of(at), bottom) for at, _, _ in held]
    total = [0] * len(held)
    for tier, color in TIER_COLORS.items():
        total = [n + pages[tier] for n, (_, pages, _) in zip(total, held)]
        if any(pages[tier] for _, pages, _ in held):
            above = [(x_of(at), y_of(n, top)) for n, (at, _, _) in zip(total, held)]
            parts.append(f"<path d='{steps(above, below)}' fill='{color}'/>")
            below = above
    line = [(x_of(at), bottom - n / most * pixels) for at, _, n in held]
    walk = "L".join(f"{number(x)} {number(y)}L{number(after)} {number(y)}" for (x, y), (after, _) in zip(line, line[1:]))
    return parts + [f"<path d='M{walk}' fill='none' stroke='{RED}' stroke-width='1.4'/>"]


def plot_memory(traces, title):
    all_held = [(os.path.splitext(os.path.basename(path))[0], read_held(path)) for path in traces]
    end = max(held[-1][0] for _, held in all_held)
    pages = max(sum(p.values()) for _, held in all_held for _, p, _ in held) or 1
    most = max(s for _, held in all_held for _, _, s in held) or 1
    left, top, pixels, pitch = 76, 64, 110, 152
    x_of, y_of = (lambda t: left + t / end * WIDTH), (lambda n, top: top + pixels * (1 - n / pages))
    parts, colors = [], {t: c for t, c in TIER_COLORS.items() if any(p[t] for _, held in all_held for _, p, _ in held)}
    for n, (name, held) in enumerate(all_held):
        here = top + n * pitch
        parts += time_axis(0, end, x_of, here, here + pixels)
        step = tick_step(pages, 4)
        for k in range(int(pages / step + 1e-9) + 1):
            parts.append(label(left - 8, y_of(k * step, here) + 4, f"{k * step:g}", 10, "end"))
        parts += memory_panel(held, x_of, y_of, most, here, here + pixels, pixels)
        peak = max(sum(p.values()) for _, p, _ in held)
        words = f"{name}: at most {peak} pages, {max(s for _, _, s in held)} sequences; {held[-1][0] / 1000:.4g} s"
        parts.append(label(left, here - 7, words, 12, extra=" font-weight='bold'"))
    bottom = top + len(all_held) * pitch
    entries, more = legend({**{f"pages on {t}": c for t, c in colors.items()}, f"sequences in flight (up to {most})": RED},
                           left, bottom, WIDTH)
    return document(left + WIDTH + 34, bottom + more + 4, title, parts + entries)


# ------------------------------------------------------------------ main

class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"plot_trace.py: {message}; --help explains\n")


def parse_args():
    parser = Parser(description="Draw a trace that flexgen wrote with --trace, as one SVG.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--lanes", action="store_true", help="a row a lane, time to the right")
    what.add_argument("--squares", action="store_true", help="Figures 3 and 6: a row a GPU batch, tokens to the right")
    what.add_argument("--memory", action="store_true", help="KV pages and sequences over time, of one trace or several")
    parser.add_argument("--title", help="over the drawing; the file's name if it is not given")
    parser.add_argument("--sweeps", metavar="A:B", help="only sweeps A to B, both included")
    parser.add_argument("--time", metavar="A:B", help="only milliseconds A to B from the beginning of the trace")
    parser.add_argument("traces", metavar="TRACE.json", nargs="+", help="what flexgen --trace wrote")
    parser.add_argument("out", metavar="OUT.svg", help="the drawing")
    args = parser.parse_args()
    args.trace = args.traces[0]
    if len(args.traces) > 1 and not args.memory:
        parser.error("only --memory draws several traces")
    if args.memory and (args.sweeps or args.time):
        parser.error("--memory draws all of a run; leave --sweeps and --time out")
    return args


def draw(out, svg):
    """Writes what svg() returns; what is wrong with its input is one line, and exit status 2."""
    program = os.path.basename(sys.argv[0])
    try:
        text = svg()
        with open(out, "w", encoding="utf-8") as f:
            f.write(text)
    except Fault as fault:
        print(f"{program}: {fault}", file=sys.stderr)
        sys.exit(2)
    except OSError as e:
        sys.exit(f"{program}: {e.filename or out}: {e.strerror}")


def plot(args):
    if args.memory:
        return plot_memory(args.traces, "KV pages in use" if args.title is None else args.title)
    slices, lanes, stages = read_trace(args.trace)
    if not slices:
        raise Fault(f"{args.trace}: holds no slices; expected the trace of a run that computed something")
    if args.squares and len({s.lane[0] for s in slices}) > 1:
        raise Fault(f"{args.trace}: is the trace of a pipeline; --squares draws one machine's, --lanes all stages")
    slices, begin, end = cut(slices, args.sweeps, args.time, args.squares)
    title = args.trace if args.title is None else args.title
    return plot_lanes(slices, lanes, stages, begin, end, title) if args.lanes else plot_squares(slices, title)


if __name__ == "__main__":
    arguments = parse_args()
    draw(arguments.out, lambda: plot(arguments))
