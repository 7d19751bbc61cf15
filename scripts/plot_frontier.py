#!/usr/bin/env python3
"""Draw what `flexgen policy --frontier --json FILE` wrote as the paper's Figure 1: throughput over latency, as one SVG.

    python3 scripts/plot_frontier.py FRONTIER.json... OUT.svg [--title TEXT]

Both axes are logarithmic, each file is a line, each point a policy: the best throughput of all blocks that take no longer.
Beside some of the points, where there is room, stands the policy: gbs x num_gpu_batches, then wg wc cg cc hg hc in percent;
zig-zag, and the CPU attends to the cache off the GPU, unless it says otherwise.

Needs only Python's standard library, 3.8 or later.
"""
import argparse
import json
import math

from plot_trace import LINE, Fault, document, draw, label, number, text_width

WIDTH, HEIGHT = 900, 470                  # of the drawing, pixels
LEFT, RIGHT, BOTTOM = 66, 20, 78          # around the axes
LABELS = 6                                # of a line, at most
SMALL = 10                                # their size
COLORS = ["#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b", "#9c755f", "#2aa5d8", "#8c8d46"]  # stand out on white and on black


class Line:
    """One file: the policies of its frontier, and what they are for."""

    def __init__(self, path):
        expected = "expected what flexgen policy --frontier --json wrote"
        try:
            with open(path, encoding="utf-8") as f:
                found = json.load(f)
            self.model, self.hardware = str(found["model"]), str(found["hardware"])
            self.lengths = f"s {found['s']:.0f}, n {found['n']:.0f}"
            self.points = [(float(p["latency"]), float(p["throughput"])) for p in found["frontier"]]
            self.names = [policy_name(p) for p in found["frontier"]]
        except json.JSONDecodeError as e:
            raise Fault(f"{path}: line {e.lineno}: is not JSON; {expected}") from None
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise Fault(f"{path}: holds no frontier with its policies; {expected}") from None
        if not self.points or not all(0 < v < math.inf for p in self.points for v in p):
            raise Fault(f"{path}: a frontier without points, or with one that is not above 0; {expected}")


def policy_name(p):
    percent = " ".join(f"{100 * p[x]:.1f}".replace(".0", "") for x in ("wg", "wc", "cg", "cc", "hg", "hc"))
    schedule = "" if p["schedule"] == "zigzag" else f" {p['schedule']}"
    attention = "" if p["cpu_cache_compute"] else ", GPU attention"
    return f"{p['gbs']:.0f} x {p['num_gpu_batches']:.0f}{schedule}: {percent}{attention}"


# ------------------------------------------------------------------ the axes

class Axis:
    """Logarithmic, from pixel a to pixel b."""

    def __init__(self, values, a, b):
        low, high = min(values), max(values)
        room = max((high / low) ** .06, 1.15)
        self.low, self.high, self.a, self.b = low / room, high * room, a, b

    def at(self, value):
        return self.a + (self.b - self.a) * math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self):
        """(value, whether it has a number)"""
        decades = math.log10(self.high / self.low)
        numbered = (1, 2, 5) if decades < 3.5 else (1,)
        for e in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for m in range(1, 10):
                value = float(f"{m}e{e}")
                if self.low <= value <= self.high:
                    yield value, m in numbered


def draw_axes(x, y):
    parts, minor, major = [], "", ""
    for value, numbered in x.ticks():
        stroke = f"M{number(x.at(value))} {y.a}V{y.b}"
        major, minor = (major + stroke, minor) if numbered else (major, minor + stroke)
        if numbered:
            parts.append(label(x.at(value), y.a + 17, f"{value:g}", 11, "middle"))
    for value, numbered in y.ticks():
        stroke = f"M{x.a} {number(y.at(value))}H{x.b}"
        major, minor = (major + stroke, minor) if numbered else (major, minor + stroke)
        if numbered:
            parts.append(label(x.a - 7, y.at(value) + 4, f"{value:g}", 11, "end"))
    middle = number((y.a + y.b) / 2)
    return [f"<path d='{minor}' stroke='{LINE}' stroke-opacity='.1'/><path d='{major}' stroke='{LINE}' stroke-opacity='.28'/>",
            f"<path d='M{x.a} {y.b}V{y.a}H{x.b}' fill='none' stroke='{LINE}'/>", *parts,
            label((x.a + x.b) / 2, y.a + 38, "latency of a block (s)", 12, "middle"),
            label(16, (y.a + y.b) / 2, "throughput (token/s)", 12, "middle", f" transform='rotate(-90 16 {middle})'")]


# ------------------------------------------------------------------ the policies beside their points

def apart(a, b):
    """Whether two boxes (x0, y0, x1, y1) have nothing in common."""
    return a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]


def taken_by(places):
    """Small boxes along the lines through the places."""
    boxes = []
    for line in places:
        for (ax, ay), (bx, by) in zip(line, line[1:] + line[-1:]):
            steps = max(1, math.ceil(math.dist((ax, ay), (bx, by)) / 4))
            boxes += [(x - 4, y - 4, x + 4, y + 4) for x, y in
                      ((ax + (bx - ax) * i / steps, ay + (by - ay) * i / steps) for i in range(steps + 1))]
    return boxes


def place_label(text, x, y, frame, taken, labels):
    """(box, how deep its pole goes) beside or below the point, where a frontier leaves room, or None."""
    w, h = text_width(text, SMALL) * .88, SMALL + 2
    places = [(x + 9, y - h / 2, 0)]
    places += [(left, y + deep, deep + h) for deep in range(12, 110, 14) for left in (x + 4, x - 4 - w)]
    for left, top, pole in places:
        box, line = (left, top, left + w, top + h), (x - 2, y, x + 2, y + pole)
        inside = box[0] > frame[0] and box[1] > frame[1] and box[2] < frame[2] and box[3] < frame[3]
        if inside and all(apart(box, other) for other in taken + labels) and all(apart(line, other) for other in labels):
            return box, pole
    return None


def in_turn(places):
    """The last and the first point, then always that which is farthest from all before."""
    left = list(range(len(places)))
    done = [left.pop()]
    while left:
        n = 0 if len(done) == 1 else max(range(len(left)), key=lambda i: min(math.dist(places[left[i]], places[d]) for d in done))
        done.append(left.pop(n))
    return done


def draw_policies(lines, places, frame):
    parts, taken, labels = [], taken_by(places), []
    for n, line in enumerate(lines):
        shown = []
        for i in in_turn(places[n]):
            x, y = places[n][i]
            near = any(math.dist((x, y), places[n][k]) < 30 for k in shown)
            found = None if near or len(shown) == LABELS else place_label(line.names[i], x, y, frame, taken, labels)
            if not found:
                continue
            box, pole = found
            shown.append(i)
            labels += [box, (x - 2, y, x + 2, y + pole)]
            side, anchor = (box[0], "start") if box[0] > x else (box[2], "end")
            parts.append(label(side, box[3] - 2, line.names[i], SMALL, anchor))
            if pole:
                parts.append(f"<path d='M{number(x)} {number(y)}v{number(pole)}' stroke='{LINE}' stroke-opacity='.7'/>")
    return parts


# ------------------------------------------------------------------ the drawing

def legend(names):
    """(parts, its bottom); as many rows as it takes."""
    parts, at, y = [], LEFT, 46 if any(names) else 26
    for n, name in enumerate(names):
        need, color = 28 + text_width(name, 12), COLORS[n % len(COLORS)]
        if at > LEFT and at + need > WIDTH - RIGHT:
            at, y = LEFT, y + 20
        if name:
            parts.append(f"<path d='M{number(at)} {y}h22' stroke='{color}' stroke-width='2'/>"
                         f"<circle cx='{number(at + 11)}' cy='{y}' r='3.5' fill='{color}'/>" + label(at + 28, y + 4, name, 12))
        at += need + 18
    return parts, y + 18


def plot(lines, title):
    facts = [[line.model, line.lengths, line.hardware] for line in lines]
    common = [f for i, f in enumerate(facts[0]) if all(other[i] == f for other in facts)]
    parts, top = legend([", ".join(f for f in of if f not in common) for of in facts])
    x = Axis([p[0] for line in lines for p in line.points], LEFT, WIDTH - RIGHT)
    y = Axis([p[1] for line in lines for p in line.points], HEIGHT - BOTTOM, top)
    places = [[(x.at(a), y.at(b)) for a, b in line.points] for line in lines]
    parts += draw_axes(x, y) + draw_policies(lines, places, (x.a, y.b, x.b, y.a))
    for n in range(len(lines)):
        color = COLORS[n % len(COLORS)]
        path = "L".join(f"{number(a)} {number(b)}" for a, b in places[n])
        dots = "".join(f"<circle cx='{number(a)}' cy='{number(b)}' r='3.5'/>" for a, b in places[n])
        parts.append(f"<path d='M{path}' fill='none' stroke='{color}' stroke-width='2'/><g fill='{color}'>{dots}</g>")
    parts.append(label(LEFT, HEIGHT - 14, "beside the points: gbs x num_gpu_batches: wg wc cg cc hg hc (%), the disk has the rest; zig-zag, "
                                          "CPU attention off the GPU"))
    return document(WIDTH, HEIGHT, title or ", ".join(common) or "The best throughput for every latency", parts)


def main():
    parser = argparse.ArgumentParser(description="Draw what flexgen policy --frontier --json wrote as the paper's Figure 1.")
    parser.add_argument("--title", help="over the drawing; what all files have in common if it is not given")
    parser.add_argument("frontier", nargs="+", metavar="FRONTIER.json", help="what flexgen policy --frontier --json wrote")
    parser.add_argument("out", metavar="OUT.svg", help="the drawing")
    args = parser.parse_args()
    draw(args.out, lambda: plot([Line(path) for path in args.frontier], args.title))


if __name__ == "__main__":
    main()
