#!/usr/bin/env python3
"""Draw two pictures of docs/TOUR.md from its own listings, so that both say the same.

    python3 scripts/plot_tour.py --plan   OUT.svg      the plan of its section 2, a bar a tier
    python3 scripts/plot_tour.py --square OUT.svg      one square of its section 3, over the three tiers

`TOUR=write make test SUITE=tour` writes them into docs/. Needs only Python's standard library, 3.8 or later.
"""
import argparse
import math
import re

from plot_trace import LINE, Fault, arrow, box, document, draw, ink_on, label, legend, number, text_width, tick_step

TOUR = "docs/TOUR.md"
TIERS = ["GPU", "CPU", "disk"]


def listing(name):
    with open(TOUR, encoding="utf-8") as f:
        found = re.search(rf"<!-- listing {name} -->\n```text\n(.*?)```\n", f.read(), re.S)
    if not found:
        raise Fault(f"{TOUR}: has no listing {name}")
    return found[1].splitlines()


# ------------------------------------------------------------------ the plan

PURPOSES = {"weights": "#4e79a7", "embeddings": "#76b7d4", "weight staging": "#a9c4e0", "KV cache": "#3d8f88", "KV staging": "#8cc9c3",
            "activations": "#9c755f", "workspace": "#f28e2b", "logits, tables, tokens, new k and v": "#a39a96"}


def purpose(region):
    found = [name for name in PURPOSES if region.startswith(name)]
    return max(found, key=len) if found else list(PURPOSES)[-1]


def plot_plan():
    left, top, width, height, pitch = 64, 48, 900, 34, 56
    tiers = {}
    for line in listing("plan"):
        region = re.match(r"  (.+?) +(\d+)( =|$)", line)
        if not region:
            bar = tiers[line] = []
        elif region[1] != "together":
            bar.append((region[1], int(region[2])))
    most = max(sum(n for _, n in bar) for bar in tiers.values())
    step, parts = tick_step(most, 7), []
    bottom = top + pitch * len(tiers) - (pitch - height)
    for k in range(int(most / step) + 1):
        x = left + k * step / most * width
        parts.append(f"<path d='M{number(x)} {top - 6}V{number(bottom + 6)}' stroke='{LINE}' stroke-opacity='.22'/>")
        parts.append(label(x, bottom + 20, f"{k * step:,}", anchor="middle"))
    for y, (tier, bar) in zip(range(top, 10 ** 6, pitch), tiers.items()):
        parts.append(label(left - 10, y + height / 2 - 3, tier, 12, "end", " font-weight='bold'"))
        parts.append(label(left - 10, y + height / 2 + 12, str(sum(n for _, n in bar)), 11, "end"))
        x = left
        for region, size in bar:
            w = size / most * width
            parts.append(f"<path d='{box(x, y, max(w - .6, .4), height)}' fill='{PURPOSES[purpose(region)]}'>"
                         f"<title>{region}: {size} bytes</title></path>")
            if w > text_width(str(size), 10) + 4:
                ink = ink_on(PURPOSES[purpose(region)])
                parts.append(label(x + w / 2, y + height / 2 + 4, str(size), 10, "middle", f" fill='{ink}'"))
            x += w
    used = {purpose(region) for bar in tiers.values() for region, _ in bar}
    entries, more = legend({p: c for p, c in PURPOSES.items() if p in used}, left, bottom + 36, width)
    return document(left + width + 20, bottom + 36 + more, "The plan: bytes of each tier", parts + entries)


# ------------------------------------------------------------------ one square

SQUARE = "(i=1, j=1, k=1)"
W, H, WIDTH = 120, 34, 1000
BANDS = {"GPU": (44, 268), "CPU": (280, 366), "disk": (378, 454)}  # from which y to which
PLACES = {  # the middle of each region's box
    ("GPU", "weights"): (90, 86), ("GPU", "weight staging"): (155, 222),
    ("GPU", "workspace: x"): (350, 154), ("GPU", "workspace: norm 1"): (470, 86), ("GPU", "workspace: q, k, v"): (650, 86),
    ("GPU", "workspace: attention"): (590, 154), ("GPU", "workspace: norm 2"): (460, 226), ("GPU", "workspace: mlp"): (636, 226),
    ("GPU", "KV staging"): (900, 86), ("GPU", "index tables"): (800, 222),
    ("CPU", "weights"): (90, 330), ("CPU", "weight staging"): (220, 330), ("CPU", "activations"): (350, 330),
    ("CPU", "index tables"): (560, 330), ("CPU", "new k, v"): (760, 330), ("CPU", "KV staging"): (900, 330),
    ("disk", "weights"): (220, 422), ("disk", "KV cache"): (835, 422),
}
# what an arithmetic operation reads beside its data is a mark at its number, or the arrows would hide each other
MARKS = {("GPU", "weights"): "#4e79a7", ("GPU", "weight staging"): "#a9c4e0", ("GPU", "index tables"): "#a39a96",
         ("CPU", "index tables"): "#a39a96"}
LANES = {"disk to CPU": ("#9c755f", r"read "), "CPU to GPU": ("#4e79a7", r"load |attention up"), "GPU": ("#d9730d", r"project|finish"),
         "GPU to CPU": ("#9467a8", r"store|attention down"), "CPU to disk": ("#c2409a", r"write"), "CPU": ("#5f9e52", r"attend")}
AT = {"1.38": .3, "1.52": .35, "1.54": .6, "1.56": .3, "1.60": .75}  # where along its arrow a number stands clear of others; else in the middle


def views_of(text):
    """[((tier, region), [cells])]; a region's name may have commas."""
    found = []
    for view in re.split(r", (?=(?:GPU|CPU|disk) )", text):
        tier, region, cells = re.fullmatch(r"(\w+) (.+?)(?: #([\d-]+))?", view).groups()
        found.append(((tier, region), [int(c) for c in cells.split("-")] if cells else []))
    return found


def read_square():
    """[(number, lane, what it reads, what it writes)] of the calls for the square."""
    ops, inside = [], False
    for line in listing("ops"):
        if not line.startswith(" "):
            inside = line.endswith(SQUARE)
        elif inside:
            written, read = line[33:].split("; after ")[0].split(" <- ")
            ops.append((line[2:8].strip(), line[8:22].strip(), views_of(read), views_of(written)))
    return ops


def edge(a, b):
    """Where the line from the middle of box a to that of box b leaves a."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    t = min(W / 2 / abs(dx) if dx else math.inf, H / 2 / abs(dy) if dy else math.inf)
    return a[0] + t * dx, a[1] + t * dy


def one_arrow(op, lane, source, target, both):
    """both: there is one in the other direction, so that they stand side by side."""
    color = next(c for c, pattern in LANES.values() if re.match(pattern, lane))
    (x0, y0), (x1, y1) = a, b = edge(PLACES[source], PLACES[target]), edge(PLACES[target], PLACES[source])
    length = math.hypot(x1 - x0, y1 - y0)
    aside = 9 if both else 0
    dx, dy = (y0 - y1) / length * aside, (x1 - x0) / length * aside
    line, head = arrow([(a[0] + dx, a[1] + dy), (b[0] + dx, b[1] + dy)], 8)
    t = AT.get(op, .5)
    return (f"<path d='{line}' stroke='{color}' stroke-width='1.6' fill='none'/><path d='{head}' fill='{color}'/>",
            (x0 + t * (x1 - x0) + dx, y0 + t * (y1 - y0) + dy), color)


def plot_square():
    ops, cells, parts, numbers = read_square(), {}, [], []
    pairs = []
    for op, lane, read, written in ops:
        for region, cell in read + written:
            if region not in PLACES:
                raise Fault(f"{op}: {' '.join(region)} has no place in the picture; give it one in PLACES")
            cells.setdefault(region, set()).update(cell)
        sources = dict.fromkeys(r for r, _ in read if r not in MARKS)
        pairs += [(op, lane, s, t, list(dict.fromkeys(r for r, _ in read if r in MARKS)))
                  for s in sources for t in dict.fromkeys(r for r, _ in written) if s != t]
    for tier, (top, bottom) in BANDS.items():
        parts.append(f"<path d='{box(12, top, WIDTH - 24, bottom - top)}' fill='{LINE}' fill-opacity='.1'/>")
        parts.append(label(WIDTH - 20, bottom - 8, tier, 13, "end", " font-weight='bold'"))
    links = {(s, t) for _, _, s, t, _ in pairs}
    for op, lane, source, target, marks in pairs:
        path, (x, y), color = one_arrow(op, lane, source, target, (target, source) in links)
        parts.append(path)
        w = text_width(op, 10) + 6
        numbers.append(f"<rect x='{number(x - w / 2)}' y='{number(y - 8)}' width='{number(w)}' height='15' rx='3' fill='{color}'/>"
                       + label(x, y + 3.5, op, 10, "middle", f" fill='{ink_on(color)}'"))
        numbers += [f"<path d='{box(x + w / 2 + 2 + 9 * n, y - 4, 7, 7)}' fill='{MARKS[m]}'/>" for n, m in enumerate(marks)]
    for region, (x, y) in PLACES.items():
        if region not in cells:
            continue
        of, name = sorted(cells[region]), region[1].replace("workspace: ", "")
        name += (f" #{of[0]}" if of else "") + (f"-{of[-1]}" if len(of) > 1 else "")
        fill = MARKS.get(region)
        parts.append(f"<rect x='{x - W / 2}' y='{y - H / 2}' width='{W}' height='{H}' rx='4' stroke='{LINE}' "
                     f"fill='{fill or LINE}' fill-opacity='{.3 if fill else .1}'/>")
        parts.append(label(x, y + 4, name, 11, "middle"))
    used = {lane for _, lane, *_ in ops}
    entries, more = legend({name: c for name, (c, pattern) in LANES.items() if any(re.match(pattern, lane) for lane in used)}, 24, 468, 560)
    note = label(WIDTH - 20, 478, "A square at a number: it also reads weights, weight staging or index tables.", 11, "end")
    return document(WIDTH, 468 + more, f"The square {SQUARE}: what it reads and writes, by the numbers of the listing", parts + numbers + entries + [note])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--square", action="store_true")
    parser.add_argument("out", metavar="OUT.svg")
    args = parser.parse_args()
    draw(args.out, plot_plan if args.plan else plot_square)
