#!/usr/bin/env python3
"""Write docs/slides.html, the slides of the six lectures of docs/TEACHING.md: docs/slides.txt with pictures of the program's runs.

    python3 scripts/slides.py            in the repository, after `make`; or `make docs`
    python3 scripts/slides.py --check    whether the page is as it would be written; FLEXGEN names another program
    python3 scripts/slides.py --pdf FILE one slide on each page; needs chromium
    --source FILE                        instead of docs/slides.txt

docs/slides.txt begins with its own form. What the commands of a slide print stands below them, and suite tour runs them. No number that
a run gives is written into a sentence: {words} becomes the number behind these words in what the commands print, and {study|line|x} a
point of docs/EXPERIMENTS.md. A number of two digits that is written all the same must stand in the slide's commands, in what they print, or in the
study that is drawn.
Pictures are drawn from what is printed, from these points, or from the traces that the commands write.
The four parts below are the numbers, the pictures, what is checked, and the page itself.

Needs only Python's standard library, 3.8 or later.
"""
import html
import json
import math
import os
import re
import subprocess
import sys
import tempfile

import pages
import paper_page
import plot_trace
from experiments import Axis
from pages import NUMBER, Fault, argument, is_printed, read

SOURCE, PAGE, TEACHING, EXPERIMENTS = "docs/slides.txt", "docs/slides.html", "docs/TEACHING.md", "docs/EXPERIMENTS.md"
FIELDS = ["say", "formula", "table", "draw", "show", "more", "note"]
LIMIT = 600_000  # bytes; a page has to open quickly
FEWEST, MOST = 8, 10  # slides of a lecture, its first one apart


# ------------------------------------------------------------------ numbers

def points(study):
    """(title, y, x, {line: [(x, y as it is printed)]}) of a study."""
    found = re.search(rf"<!-- points {re.escape(study)} -->\n```text\n(.*?): (.*?) by (.*?)\n(.*?)```\n", read(EXPERIMENTS), re.S)
    if not found:
        raise Fault(f"{EXPERIMENTS}: has no points {study}")
    lines = {}
    for line in found[4].strip().split("\n"):
        name, _, values = line.strip().partition(": ")
        lines[name] = [tuple(point.split(": ")) for point in values.split(", ")]
    return found[1], found[2], found[3], lines


def number_for(words, slide):
    """The number that stands for {words}."""
    if "|" in words:
        study, line, x = words.split("|")
        found = dict(points(study)[3].get(line, [])).get(x)
    else:
        match = re.search(re.escape(words) + r"\D*?(\d+(?:\.\d+)?)", "\n".join(slide.printed))
        found = match and match[1]
    if not found:
        raise Fault(f"{slide.id}: {{{words}}} is in nothing that its commands print")
    return found


def filled(text, slide):
    return re.sub(r"\{([^{}]+)\}", lambda m: number_for(m[1], slide), text)


def inline(text, slide):
    return pages.inline(filled(text, slide))


# ------------------------------------------------------------------ pictures

WIDTH, HEIGHT, TEXT, COLORS = 720, 380, 20, 6  # of a picture, its letters; the colours of slides.css


def text(x, y, said, anchor="start", more=""):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{more}>{html.escape(str(said))}</text>'


def box(x, y, w, h, color, more=""):
    return f'<path class="c{color}" d="M{x:.1f} {y:.1f}h{max(w, .5):.1f}v{h:.1f}h-{max(w, .5):.1f}z"{more}/>'


def svg(parts, label, height=HEIGHT):
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}</svg>'


def letters(said):
    """The width of a text."""
    return .62 * TEXT * len(said)


def legend(names, y):
    """The names of some colours in rows; names: {number: name}."""
    parts, x = [], 20
    for n, name in names.items():
        if x + 30 + letters(name) > WIDTH:
            x, y = 20, y + 26
        parts.append(box(x, y - 15, 16, 16, n) + text(x + 23, y, name))
        x += 46 + letters(name)
    return parts, y + 12


def bars(slide, unit, _):
    """A bar for each line that ends with a number."""
    rows = re.findall(r"^\s*(.*?)[:,]?\s+(\d+(?:\.\d+)?)$", "\n".join(slide.printed), re.M)
    if len(rows) < 2:
        raise Fault(f"{slide.id}: bars need two lines that end with a number")
    most, left = max(float(v) for _, v in rows), 18 + max(letters(name) for name, _ in rows)
    room = WIDTH - left - 20 - 1.1 * max(letters(v) for _, v in rows)
    pitch = min(70, (HEIGHT - 40) / len(rows))
    parts = [text(0, 22, unit)]
    for n, (name, value) in enumerate(rows):
        y = 36 + n * pitch
        parts += [text(left - 10, y + pitch / 2 + 3, name, "end"), box(left, y, float(value) / most * room, pitch - 10, 1),
                  text(left + float(value) / most * room + 8, y + pitch / 2 + 3, value, more=' class="strong"')]
    return svg(parts, f"{unit}: " + ", ".join(f"{name} {value}" for name, value in rows), 40 + pitch * len(rows))


def chart(lines, up, across, log, label, joined=True):
    """lines: {name: [(x, y)]} of numbers."""
    keys, top = legend(dict(enumerate(lines, 1)), 18) if len(lines) > 1 else ([], 4)
    top += 34
    x = Axis([p[0] for l in lines.values() for p in l], 70, WIDTH - 24, log)
    y = Axis([p[1] for l in lines.values() for p in l], HEIGHT - 58, top, False)
    parts = keys + [text(6, top - 14, up)]
    for tick in y.ticks:
        parts.append(f'<path class="grid" d="M70 {y.at(tick):.1f}H{WIDTH - 24}"/>' + text(62, y.at(tick) + 7, f"{tick:g}", "end"))
    last = -math.inf
    for tick in x.ticks:
        if x.at(tick) - last > letters(f"{tick:.3g}") + 12:
            parts.append(text(x.at(tick), HEIGHT - 34, f"{tick:.3g}", "middle"))
            last = x.at(tick)
    parts.append(text(WIDTH - 24, HEIGHT - 8, across, "end"))
    for n, at in enumerate(lines.values(), 1):
        path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in at)
        parts.append(f'<path class="l{n}" d="M{path}"/>' if joined else "")
        parts += [box(x.at(a) - 4, y.at(b) - 4, 8, 8, n) for a, b in at]
    if not joined:  # where both are equal
        most = min(x.high, y.high)
        parts.append(f'<path class="order" d="M{x.at(0):.1f} {y.at(0):.1f}L{x.at(most):.1f} {y.at(most):.1f}"/>')
    return svg(parts, label)


def curve(slide, across, options):
    """A point for each line of two numbers."""
    found = [tuple(map(float, line.split())) for line in slide.printed if re.fullmatch(r"\s*[\d.]+\s+[\d.]+\s*", line)]
    if len(found) < 3:
        raise Fault(f"{slide.id}: a curve needs three lines of two numbers")
    return chart({"": found}, options[0], across, "log" in options, f"{options[0]} by {across}")


def study(slide, name, options):
    title, up, across, lines = points(name)
    wanted = [option for option in options if option not in ("log", "points")]
    for line in wanted:
        if line not in lines:
            raise Fault(f"{slide.id}: the study {name} has no line {line}")
    kept = {line: [(float(a), float(b)) for a, b in at] for line, at in lines.items() if line in wanted or not wanted}
    return chart(kept, up, across, "log" in options, f"{title}: {up} by {across}", "points" not in options)


KINDS = {"weights": ("load_weight",), "KV cache": ("load_cache", "store_cache"), "activations": ("load_activation", "store_activation"),
         "computing": ("project", "attend", "finish", "compute")}
COLOR = {call: n for n, calls in enumerate(KINDS.values(), 1) for call in calls}


def lanes(slide, path, options):
    """A row for each lane of a trace, in one time for all pictures: options are the sweeps, and milliseconds of the whole width."""
    slices, names, _ = plot_trace.read_trace(path)
    found = [s for s in slices if s.name in COLOR]
    if options:
        found, _, _ = plot_trace.cut(found, options[0], None, False)
    begin = min(s.begin for s in found)
    span = float(options[1]) if len(options) > 1 else max(s.end for s in found) - begin
    rows = [lane for lane in names if any(s.lane == lane for s in found)]
    left, pitch = 16 + max(letters(names[lane]) for lane in rows), min(46, (HEIGHT - 96) / len(rows))
    parts = []
    for n, lane in enumerate(rows):
        parts.append(text(left - 10, 12 + n * pitch + pitch / 2 + 4, names[lane], "end"))
        parts.append(f'<path class="grid" d="M{left:.0f} {12 + (n + .95) * pitch:.1f}H{WIDTH}"/>')
        for s in found:
            if s.lane == lane:
                a, b = ((t - begin) / span * (WIDTH - left) for t in (max(s.begin, begin), min(s.end, begin + span)))
                parts.append(box(left + a, 12 + n * pitch, b - a - .8, pitch - 8, COLOR[s.name]) if b > a else "")
    bottom = 12 + len(rows) * pitch
    parts += [text(left, bottom + 22, "0 ms"), text(WIDTH, bottom + 22, f"{span:.3g} ms", "end")]
    used = {COLOR[s.name] for s in found}
    keys, end = legend({n: kind for n, kind in enumerate(KINDS, 1) if n in used}, bottom + 56)
    return svg(parts + keys, "Lanes over time: " + ", ".join(names[lane] for lane in rows), end)


def squares(slide, path, options):
    """The grid of Figure 3: a row for each batch, layers within tokens to the right, and the order of computing as a line; or, with the
    option sweeps, a colour for each sweep."""
    slices, _, _ = plot_trace.read_trace(path)
    by_sweep = "sweeps" in options
    if options and options[0]:
        slices, _, _ = plot_trace.cut(slices, options[0], None, True)
    order = plot_trace.computed_squares(slices)
    row0, column0 = min(s.row for s in order), min(s.column for s in order)
    rows, columns, layers = max(s.row for s in order) - row0 + 1, max(s.column for s in order) - column0 + 1, max(s.j for s in order) + 1
    left, gap = 100, 12
    cell = min((WIDTH - left - gap * (columns - 1) - 4) / (columns * layers), (HEIGHT - 60) / rows)
    centre, parts = [], []
    for n, s in enumerate(order):
        x, y = left + (s.column - column0) * (layers * cell + gap) + s.j * cell, 34 + (s.row - row0) * cell
        shade = "" if by_sweep else f' fill-opacity="{.2 + .8 * n / len(order):.2f}"'
        parts.append(box(x + 1, y + 1, cell - 2, cell - 2, s.i % COLORS + 1 if by_sweep else 1, shade))
        centre.append((x + cell / 2, y + cell / 2))
    parts += [text(left - 10, 34 + (n + .5) * cell + 7, f"batch {row0 + n}", "end") for n in range(rows)]
    parts += [text(left + n * (layers * cell + gap), 22, f"token {column0 + n}") for n in range(columns)]
    if not by_sweep:
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in centre)
        parts.append(f'<path class="order" d="M{line}"/><circle class="c2" cx="{centre[0][0]:.1f}" cy="{centre[0][1]:.1f}" r="6"/>')
    bottom = 34 + rows * cell + 30
    parts.append(text(left, bottom, f"{layers} columns for each token: its layers and the head"))
    return svg(parts, f"{len(order)} squares in the order of computing", bottom + 12)


def memory(slide, path, options):
    """Pages in use over time, a picture for each trace with the same scales; the name of a trace is that of its file."""
    held = {p: plot_trace.read_held(p) for p in [path, *options]}
    end, most = max(h[-1][0] for h in held.values()), max(sum(p.values()) for h in held.values() for _, p, _ in h)
    height = (HEIGHT - 40) / len(held) - 44
    parts = []
    for n, (p, h) in enumerate(held.items()):
        top = 34 + n * (height + 44)
        line = "".join(f"V{top + height * (1 - sum(pages_.values()) / most):.1f}H{at / end * (WIDTH - 4):.1f}"
                       for (_, pages_, _), at in zip(h, [x[0] for x in h[1:]] + [h[-1][0]]))
        peak = max(sum(pages_.values()) for _, pages_, _ in h)
        parts += [text(0, top - 10, f"{os.path.splitext(os.path.basename(p))[0]}: at most {peak} pages, {h[-1][0]:.0f} ms"),
                  f'<path class="c{n + 1}" d="M0 {top + height:.1f}{line}V{top + height:.1f}z"/>']
    parts.append(text(WIDTH, HEIGHT - 2, "time", "end"))
    return svg(parts, "KV pages in use over time")


def tiers(slide, path, _):
    """The three memories of a hardware file and the links between them."""
    machine = json.loads(read(path))
    parts, size = [], lambda key: machine[key] / 2**30
    said = [("GPU", "gmem", 150), ("CPU", "cmem", 330), ("disk", "nmem", 560)]
    for n, (name, key, width) in enumerate(said):
        y = 6 + n * 132
        parts += [f'<path class="tier" d="M20 {y}h{width}v76h-{width}z"/>', text(34, y + 32, name, more=' class="strong"'),
                  text(34, y + 60, f"{size(key):,.0f} GiB")]
        if n < 2:
            up, down = (("ctog_bdw", "gtoc_bdw"), ("dtoc_bdw", "ctod_bdw"))[n]
            parts += [f'<path class="order" d="M70 {y + 82}v44m0 -44l-7 10m7 -10l7 10M120 {y + 82}v44l-7 -10m7 10l7 -10"/>',
                      text(150, y + 111, f"{up[:4]} {machine[up] / 1e9:g} GB/s, {down[:4]} {machine[down] / 1e9:g} GB/s")]
    return svg(parts, f"The tiers of {machine['name']}", 6 + 2 * 132 + 84)


DRAWN = {f.__name__: f for f in (bars, curve, study, lanes, squares, memory, tiers)}


def run_commands(slide, directory):
    """Runs the commands of a slide that writes traces, with /tmp in that directory."""
    commands = re.sub(r"^(?!\$ ).*\n?", "", "\n".join(slide.listing).replace("\\\n", " ") + "\n", flags=re.M)
    script = re.sub("^[$] ", "", commands, flags=re.M).replace("/tmp/", directory + "/")
    script = script.replace("./flexgen ", os.environ.get("FLEXGEN", "./flexgen") + " ")
    ran = subprocess.run(["sh", "-e", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    if ran.returncode:
        raise Fault(f"{slide.id}: exit status {ran.returncode}: {ran.stderr.strip()[-300:]}")


def drawn(slide):
    kind, _, rest = slide.text("draw").partition(" ")
    if kind not in DRAWN:
        raise Fault(f"{slide.id}: draw {kind}: expected one of {', '.join(DRAWN)}")
    first, *options = [part.strip() for part in rest.split("|")]
    if "/tmp/" not in rest:
        return DRAWN[kind](slide, first, options)
    with tempfile.TemporaryDirectory() as directory:
        run_commands(slide, directory)
        inside = [part.replace("/tmp/", directory + "/") for part in (first, *options)]
        for path, said in zip(inside, (first, *options)):
            if path != said and not os.path.exists(path):
                raise Fault(f"{slide.id}: none of its commands writes {said}")
        return DRAWN[kind](slide, inside[0], inside[1:])


# ------------------------------------------------------------------ what is checked

NAMED = re.compile(r"(?:[Ff]igures?|[Ss]ections?|[Tt]ables?|[Ee]xercises?|[Ss]tud(?:y|ies)|[Ww]eek|Theorem|A)[ .]\d[\d.]*(?:(?:,| and| or| to) \d[\d.]*)*|`[^`]*`|\{[^{}]*\}")


def check_slide(slide):
    if not slide.text("say"):
        raise Fault(f"{slide.id}: lacks say")
    if not any(slide.text(field) for field in ("formula", "table", "draw", "show")):
        raise Fault(f"{slide.id}: has nothing to look at")
    known = "\n".join([*slide.listing, *slide.lines("formula")])
    if slide.text("draw").startswith("study "):
        mark = f"<!-- points {slide.text('draw').split()[1]} -->"
        known += next((chapter for chapter in read(EXPERIMENTS).split("\n## ") if mark in chapter), "")
    for field in ("say", "table", "more", "note"):
        for found in re.findall(r"(?<![\w.])\d[\d.]*\d", NAMED.sub("", " ".join([slide.title, *slide.lines(field)]))):
            if not NUMBER.fullmatch(found) or not is_printed(found, known):
                raise Fault(f"{slide.id}: {found} is in nothing that its commands print")


def check(slides):
    ids = [s.id for s in slides]
    if len(set(ids)) < len(ids):
        raise Fault("two slides have one name")
    for s in slides:
        check_slide(s)
        paper_page.check_alone(s)
    for lecture in dict.fromkeys(s.chapter for s in slides):
        count = sum(s.chapter == lecture for s in slides)
        if not FEWEST <= count <= MOST:
            raise Fault(f"{lecture}: has {count} slides; expected {FEWEST} to {MOST}")


# ------------------------------------------------------------------ the page

def shown(slide):
    """The printed lines whose numbers are given, as A-B; or all. Letters are as large as the longest line allows."""
    first, _, last = slide.text("show").partition("-")
    lines = slide.printed if first == "all" else slide.printed[int(first) - 1:int(last or first)]
    return f'<pre tabindex="0" role="group" aria-label="what the commands print" style="--columns:{max(map(len, lines))}">{html.escape(chr(10).join(lines), quote=False)}</pre>'


def table(slide):
    rows = [filled(line, slide) for line in slide.lines("table") if line]
    return pages.table([rows[0], "|", *rows[1:]])


def aside(slide):
    """What the key n shows: a few words for who speaks, and the commands."""
    commands = "\n".join(line for line in slide.listing if line not in slide.printed)
    said = f"<p>{inline(slide.text('note'), slide)}</p>" if slide.lines("note") else ""
    listing = f"<pre>{html.escape(commands, quote=False)}</pre>" if commands else ""
    return f"<aside>{said}{listing}</aside>" if said or listing else ""


def section(name, lecture, n, body, title, kind):
    return (f'<section class="slide {kind}" id="{name}" aria-roledescription="slide" aria-labelledby="t{n}">'
            f'<p class="place"><span>{lecture}</span> <span>{n}</span></p><h2 id="t{n}" tabindex="-1">{title}</h2>\n{body}</section>')


def slide_html(slide, n):
    parts = [f'<p class="say">{inline(slide.text("say"), slide)}</p>']
    parts += [paper_page.formula(slide.lines("formula"))] if slide.lines("formula") else []
    parts += [table(slide)] if slide.lines("table") else []
    parts += [f'<div class="picture" tabindex="0" role="group" aria-label="picture">{drawn(slide)}</div>'] if slide.lines("draw") else []
    parts += [shown(slide)] if slide.lines("show") else []
    parts += [f'<p class="more">{inline(slide.text("more"), slide)}</p>'] if slide.lines("more") else []
    kind = "" if slide.lines("draw") else "alone"
    return section(slide.id, pages.inline(slide.chapter), n, "\n".join([*parts, aside(slide)]), pages.inline(slide.title), kind)


def first_html(lecture, n):
    """The slide that opens a lecture, from the syllabus."""
    row = next((line for line in read(TEACHING).split("\n") if line.startswith(f"| {lecture} |")), None)
    if not row:
        raise Fault(f"{TEACHING}: has no week {lecture}")
    _, paper, tour, exercise, study_ = [cell.strip() for cell in row.strip("|").split("|")]
    rows = [("Read in the paper", paper), ("Read in the tour", tour), ("Exercises", exercise), ("Study", study_)]
    body = "<dl>" + "".join(f"<dt>{name}</dt><dd>{pages.inline(said)}</dd>" for name, said in rows) + "</dl>"
    number, _, title = lecture.partition(" ")
    return section(f"lecture-{number}", "FlexGen in six lectures", n, body, f"{number}. {pages.inline(title)}", "first")


HELP = """<div id="help" role="region" aria-label="Keys" hidden><p><kbd>&#8594;</kbd> <kbd>&#8592;</kbd> the next slide, the one before;
<kbd>Home</kbd> <kbd>End</kbd> the first, the last; a number and <kbd>Enter</kbd> that slide; <kbd>o</kbd> all slides; <kbd>n</kbd> what to
say, and the commands; <kbd>?</kbd> these keys. The browser prints one slide on each page.</p></div>"""
BAR = """<nav id="bar" aria-label="Slides"><button type="button" id="before" aria-label="Slide before">&#8592;</button>
<button type="button" id="after" aria-label="Next slide">&#8594;</button> <button type="button" id="all" aria-expanded="false"
aria-controls="contents">All slides</button> <button type="button" id="notes" aria-pressed="false">Notes</button>
<button type="button" id="keys" aria-expanded="false" aria-controls="help">Keys</button> <span id="jump" role="status"></span></nav>"""


def page(slides):
    body, contents, lecture = [], [], None
    for s in slides:
        if s.chapter != lecture:
            lecture = s.chapter
            body.append(first_html(lecture, len(body) + 1))
            contents.append(f'<h2><a href="#lecture-{lecture.split()[0]}">{pages.inline(lecture)}</a></h2>')
        body.append(slide_html(s, len(body) + 1))
        contents.append(f'<p><a href="#{s.id}"><span>{len(body)}</span> {pages.inline(s.title)}</a></p>')
    return pages.html_page(
        "FlexGen in six lectures", pages.STYLE + pages.piece("slides.css"),
        f'<main>\n<h1>FlexGen in six lectures</h1>\n<nav id="contents" aria-label="All slides" hidden>{"".join(contents)}</nav>\n'
        + "\n".join(body) + f"\n{HELP}\n</main>\n{BAR}", f'<script>{pages.piece("slides.js")}</script>')


def main():
    if "--pdf" in sys.argv:
        return pages.write_pdf(PAGE, argument("--pdf"))
    slides = pages.stations(read(argument("--source", SOURCE)), FIELDS)
    check(slides)
    pages.write_or_check(PAGE, page(slides), LIMIT, "draw less")


if __name__ == "__main__":
    pages.run(main)
